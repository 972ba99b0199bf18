"""`pd-rerank label`: pools in, labels and a report out; resumed to the same lines, refused before a teacher loads."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pd_rerank.engines.fake import FakeEngine
from pd_rerank.errors import EngineFailure
from pd_rerank.pool import Pool, read_pools, write_pools
from pd_rerank.training.labels import check_labels, read_labels

from .conftest import CORPUS, TOPICS
from .test_rerank import SLOW, Failing

Run = Callable[..., Any]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pools(collection: Path) -> list[Pool]:
    """The collection's run as a pool folder, `pools`."""
    from pd_rerank.files import read_corpus, read_run, read_topics
    from pd_rerank.pool import pools_from_run

    made = pools_from_run(
        read_run(collection / "run.trec"),
        read_topics(collection / "topics.tsv"),
        read_corpus(collection / "corpus.jsonl"),
    )
    write_pools(collection / "pools", made)
    return read_pools(collection / "pools")


@pytest.fixture
def label(collection: Path, cli: Run, pools: list[Pool]) -> Run:
    """Run `pd-rerank label` on the collection's pools, into `out` unless said otherwise."""

    def invoke(*words: str | Path, output: str | None = "out", teacher: bool = True) -> Any:
        where = [] if output is None else ["--output", collection / output]
        return cli("label", "--pools", collection / "pools", *(["--engine", "fake"] if teacher else []), *where, *words)

    return invoke


def qrels(collection: Path, grades: dict[str, int], queries: list[str] | None = None) -> Path:
    path = collection / "qrels"
    path.write_text("".join(f"{q} 0 {d} {g}\n" for q in queries or TOPICS for d, g in grades.items()), encoding="utf-8")
    return path


def labelled(folder: Path) -> bytes:
    return (folder / "labels/labels.jsonl").read_bytes()


def report(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "report/report.json").read_text())
    return {row["name"]: row["value"] for section in found["sections"] for row in section["rows"]}


# -- what comes out ----------------------------------------------------------------------------------------


def test_a_teacher_labels_every_document_over_ten_shuffles(label: Run, collection: Path, pools: list[Pool]) -> None:
    done = label("--window-size", "2")
    assert (done.exit_code, done.stdout) == (0, "")
    labels = read_labels(collection / "out")
    assert (list(labels), labels.documents, labels.presentations) == (list(TOPICS), 18, 10)
    check_labels(labels, pools)
    assert labels.targets(pools[0]).argmax() == list(pools[0].doc_ids).index("文書")
    assert (collection / "out/report/report.md").read_text().startswith("# Training labels")
    assert report(collection / "out")["documents with a label"] == 18
    assert "3 queries, 18 documents labelled" in done.stderr


def test_a_run_with_corpus_and_topics_can_be_labelled_too(cli: Run, label: Run, collection: Path) -> None:
    words = ("--run", "run.trec", "--corpus", "corpus.jsonl", "--topics", "topics.tsv")
    files = [word if word.startswith("--") else collection / word for word in words]
    assert cli("label", "--engine", "fake", *files, "--output", collection / "b").exit_code == 0
    assert label().exit_code == 0
    assert labelled(collection / "b") == labelled(collection / "out")


def test_options_reach_the_teacher(label: Run, collection: Path) -> None:
    done = label(
        *("--presentations", "3", "--window-size", "2", "--partition", "contiguous", "--markers", "alpha"),
        *("--rubric", "answer_support", "--experiment-id", "mine", "--max-queries", "2", "--shard-size", "1"),
    )
    assert done.exit_code == 0, done.stderr
    manifest = json.loads((collection / "out/labels/manifest.json").read_text())
    assert manifest["scoring"] == {
        "window": 2,
        "partition": "contiguous",
        "order": "given",
        "presentations": 3,
        "seed": 0,
        "shuffle": "pool",
        "calibration": "none",
    }
    assert (manifest["prompt"]["markers"], manifest["prompt"]["rubric"]["name"]) == ("alpha", "answer_support")
    assert (manifest["experiment_id"], manifest["n_queries"], manifest["k_perms"]) == ("mine", 2, 3)
    assert manifest["seeds"] == [0, 1, 2]


def test_scores_that_rerank_wrote_are_the_same_labels(label: Run, cli: Run, collection: Path) -> None:
    assert label("--presentations", "4", "--window-size", "2").exit_code == 0
    words = ("--engine", "fake", "--pools", collection / "pools", "--window-size", "2", "--presentations", "4")
    model = ("--model", "fake")  # what 'label' calls it
    assert cli("rerank", *words, *model, "--output", collection / "scored").exit_code == 0
    done = label("--scores", collection / "scored", output="b", teacher=False)
    assert done.exit_code == 0, done.stderr
    assert labelled(collection / "b") == labelled(collection / "out")
    assert report(collection / "b")["silver-β"] == report(collection / "out")["silver-β"]
    assert not (collection / "b/teacher").exists()

    again = ("--output", collection / "scored", "--overwrite", "--seed", "9")
    assert cli("rerank", *words, *model, *again).exit_code == 0
    other = label("--scores", collection / "scored", output="b", teacher=False)
    assert (other.exit_code, "labels made otherwise (scores differ)" in other.stderr) == (2, True), other.stderr


def test_scores_of_other_pools_are_refused(label: Run, rerank: Run, collection: Path) -> None:
    assert rerank("--hits", "3", output=collection / "scored").exit_code == 0
    done = label("--scores", collection / "scored", teacher=False)
    assert done.exit_code == 5
    assert "(3 scored, 6 in the pool); these scores are of another pool" in done.stderr
    assert not (collection / "out").exists()


def test_judgements_alone_are_the_labels(label: Run, collection: Path, pools: list[Pool]) -> None:
    done = label(
        "--qrels", qrels(collection, dict.fromkeys(CORPUS, 0) | {"1": 1}), "--map-grades", "1=3", teacher=False
    )
    assert done.exit_code == 0, done.stderr
    labels = read_labels(collection / "out")
    assert labels["007"]["1"].scores == (3,)
    assert labels.targets(pools[0]).sum() == 3
    assert labels.manifest["teacher_model_id"] == f"judgements:{collection / 'qrels'}"


def test_judgements_that_leave_documents_open_are_an_error_or_get_a_grade(label: Run, collection: Path) -> None:
    judged = qrels(collection, {"1": 3}, ["007", "NA"])
    done = label("--qrels", judged, teacher=False)
    assert done.exit_code == 5
    assert "2 of 3 queries: query '007': 5 of 6 documents have no judgement" in done.stderr
    assert not (collection / "out").exists()
    done = label("--qrels", judged, "--unjudged", "0", teacher=False)
    assert done.exit_code == 7
    assert "1 queries and 0 documents got no label: query 'null' (nobody judged it)" in done.stderr
    assert read_labels(collection / "out").documents == 12


def test_beside_a_teacher_judgements_say_how_good_the_labels_are(label: Run, collection: Path) -> None:
    done = label("--qrels", qrels(collection, {"文書": 1}, ["007"]), "--metrics", "RR,nDCG@10")
    assert done.exit_code == 0, done.stderr
    assert report(collection / "out")["RR of averaged labels"] == 1
    assert "nDCG@10 of averaged labels: 1.0000" in done.stderr
    assert json.loads((collection / "out/labels/manifest.json").read_text())["teacher_protocol"] == "k_shot_bsc"


def test_a_dry_run_counts_all_shuffles_and_writes_nothing(label: Run, collection: Path) -> None:
    done = label("--dry-run", "--window-size", "2", output=None)
    found = json.loads(done.stdout)
    assert (done.exit_code, found["queries"], found["windows"]) == (0, 3, 90)
    found = json.loads(label("--validate-only").stdout)
    assert (found["candidates"], "windows" in found) == (18, False)
    assert not (collection / "out").exists()


def test_the_script_to_launch_is_the_same_command(label: Run, collection: Path) -> None:
    assert label("--presentations", "2").exit_code == 0
    words = ["--pools", "pools", "--engine", "fake", "--presentations", "2", "--output", "b"]
    done = subprocess.run(
        [sys.executable, ROOT / "train/label.py", *words], cwd=collection, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert labelled(collection / "b") == labelled(collection / "out")


# -- refused before a teacher loads ------------------------------------------------------------------------


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("the engine was loaded")

    monkeypatch.setattr("pd_rerank.engines.load_engine", loaded)


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], 2, "no labels: give a teacher (--model), its scores (--scores) or judgements (--qrels)"),
        (["--engine", "fake", "--presentations", "0"], 2, "--presentations: input should be greater than or equal"),
        (
            ["--engine", "fake", "--partition", "hashed"],
            2,
            "--partition: input should be 'round_robin' or 'contiguous'",
        ),
        (["--engine", "fake", "--scores", "s"], 2, "--scores holds a teacher's scores already; leave out --model"),
        (["--engine", "fake", "--unjudged", "0"], 2, "--unjudged is for judgements alone"),
        (["--engine", "fake", "--map-grades", "1=3"], 2, "--map-grades is for judgements alone"),
        (["--qrels", "q", "--map-grades", "1:3"], 2, "--map-grades is a list such as 0=0,1=3, got '1:3'"),
        (["--qrels", "q", "--adapter", "a"], 2, "--adapter needs --model"),
        (["--qrels", "nowhere"], 4, "--qrels: no file or folder nowhere"),
        (["--scores", "nowhere"], 4, "--scores: no file or folder nowhere"),
        (["--engine", "fake", "--metrics", "best"], 2, "unknown metric 'best'"),
        (["--engine", "fake", "--rubric", "none.yaml"], 4, "none.yaml"),
        (["--engine", "fake", "--dtype", "bf16"], 2, "--dtype means nothing to --engine fake"),
    ],
)
def test_bad_arguments_are_one_line(label: Run, collection: Path, words: list[str], code: int, says: str) -> None:
    done = label(*words, teacher=False)
    assert (done.exit_code, done.stdout) == (code, "")
    assert says in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert not (collection / "out").exists()


@pytest.mark.usefixtures("no_engine")
def test_judgements_of_other_queries_are_refused_before_the_teacher_works(label: Run, collection: Path) -> None:
    done = label("--qrels", qrels(collection, {"1": 3}, ["another"]))
    assert done.exit_code == 5
    assert "judges none of the 3 pools' queries" in done.stderr


@pytest.mark.usefixtures("no_engine")
def test_no_output_and_a_file_for_a_folder_are_bad_arguments(label: Run, collection: Path) -> None:
    assert "--output is missing: name a folder for the labels" in label(output=None).stderr
    (collection / "out").write_text("mine")
    assert (label().exit_code, (collection / "out").read_text()) == (2, "mine")


@pytest.mark.usefixtures("no_engine")
def test_pools_without_documents_are_refused(cli: Run, collection: Path) -> None:
    write_pools(collection / "none", [Pool(query_id="q", query="x", candidates=())])
    done = cli("label", "--engine", "fake", "--pools", collection / "none", "--output", collection / "out")
    assert (done.exit_code, "none of the 1 pools holds a document" in done.stderr) == (5, True)


def test_labels_made_otherwise_are_not_replaced_unless_asked(label: Run, collection: Path) -> None:
    assert label().exit_code == 0
    before = labelled(collection / "out")
    other = label("--qrels", qrels(collection, dict.fromkeys(CORPUS, 1)), teacher=False)
    assert other.exit_code == 2
    assert "holds labels made otherwise (model, judgements differ)" in other.stderr
    fewer = label("--presentations", "3")
    assert fewer.exit_code == 2
    assert "scoring.presentations is 10 there, 3 here" in fewer.stderr
    assert labelled(collection / "out") == before
    assert label("--presentations", "3", "--overwrite").exit_code == 0
    assert read_labels(collection / "out").presentations == 3


# -- failures and interruptions ----------------------------------------------------------------------------


def test_queries_the_teacher_fails_on_are_named_and_tried_again(
    label: Run, collection: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert label(output="whole").exit_code == 0
    monkeypatch.setattr("pd_rerank.engines.fake.FakeEngine", Failing)
    done = label()
    assert (done.exit_code, done.stdout) == (7, "")
    assert "1 queries and 0 documents got no label: query 'NA' (the device fell off)" in done.stderr
    assert list(read_labels(collection / "out")) == ["007", "null"]
    monkeypatch.setattr("pd_rerank.engines.fake.FakeEngine", FakeEngine)
    assert label().exit_code == 0
    assert labelled(collection / "out") == labelled(collection / "whole")


def test_a_teacher_that_fails_on_everything_labels_nothing(
    label: Run, collection: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(FakeEngine):
        def grade_logits(self, prompts: Any, grade_ids: Any, **rest: Any) -> Any:
            raise EngineFailure("no device")

    monkeypatch.setattr("pd_rerank.engines.fake.FakeEngine", Broken)
    done = label()
    assert (done.exit_code, "no device" in done.stderr) == (6, True)
    assert not (collection / "out/labels").exists()


def test_documents_without_all_grades_are_named(label: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(FakeEngine):
        def __init__(self, **options: Any) -> None:
            super().__init__(missing=lambda text: text.startswith("Honey"), **options)

    monkeypatch.setattr("pd_rerank.engines.fake.FakeEngine", Forgetful)
    done = label()
    assert done.exit_code == 7
    assert "0 queries and 3 documents got no label: 1 documents of query '007' ('été')" in done.stderr


def test_a_full_disk_loses_nothing_and_the_next_run_ends_it(
    label: Run, collection: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert label(output="whole").exit_code == 0
    real = os.fsync

    def full(fd: int) -> None:
        if "/.labels." in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd)

    if not Path("/proc/self/fd").exists():
        pytest.skip("this system does not name open files")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        done = label()
    assert done.exit_code == 6
    assert "No space left on device" in done.stderr
    assert sorted(os.listdir(collection / "out")) == ["teacher"]
    monkeypatch.setattr("pd_rerank.engines.load_engine", None)
    done = label()
    assert done.exit_code == 0, done.stderr
    assert "is graded already" in done.stderr
    assert labelled(collection / "out") == labelled(collection / "whole")


def test_what_a_killed_process_left_half_written_goes_away(label: Run, collection: Path) -> None:
    (collection / "out/.labels.x7.part").mkdir(parents=True)
    (collection / "out/.labels.x7.part/labels.jsonl").write_text("{")
    assert label().exit_code == 0
    assert sorted(os.listdir(collection / "out")) == ["labels", "report", "teacher"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_process_goes_on_to_the_same_labels(label: Run, collection: Path, how: signal.Signals) -> None:
    words = ["--shard-size", "1", "--window-size", "2", "--presentations", "2"]
    code = [sys.executable, "-c", SLOW, "label", "--engine", "fake", "--pools", "pools", *words, "--output", "cut"]
    process = subprocess.Popen(code, cwd=collection, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (collection / "cut/teacher/shards/000000").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (-signal.SIGKILL if how == signal.SIGKILL else 130), err
    assert not (collection / "cut/labels").exists()
    done = label(*words, output="cut")
    assert done.exit_code == 0, done.stderr
    assert "going on after" in done.stderr
    assert label(*words, output="whole").exit_code == 0
    assert labelled(collection / "cut") == labelled(collection / "whole")
