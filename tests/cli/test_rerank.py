"""`pd-rerank rerank`: from files to files, refused early, resumed to the same bytes."""

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

from pd_rerank.decisions import Threshold
from pd_rerank.engines.fake import FakeEngine
from pd_rerank.errors import EngineFailure
from pd_rerank.files import read_run, read_topics
from pd_rerank.pool import Candidate, Pool, read_pools, write_pools
from pd_rerank.scores import SlotResidual, join_scores, read_scores

from .conftest import CORPUS, TOPICS

Run = Callable[..., Any]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()]


# -- what comes out ----------------------------------------------------------------------------------------


def test_a_run_is_reranked_and_odd_ids_come_through(rerank: Run, collection: Path) -> None:
    done = rerank()
    assert (done.exit_code, done.stdout) == (0, "")
    run = read_run(collection / "out/run.trec")
    assert list(run) == list(TOPICS)
    assert all({hit.doc_id for hit in hits} == set(CORPUS) for hits in run.values())
    assert [hit.doc_id for hit in run["007"][:2]] == ["文書", "1"]
    assert run["NA"][0].doc_id == "NA"
    assert run["null"][0].doc_id == "null"
    lines = results(collection / "out")
    assert [line["query"] for line in lines] == [{"qid": q, "text": t} for q, t in TOPICS.items()]
    assert [c["rank"] for c in lines[0]["candidates"]] == [1, 2, 3, 4, 5, 6]
    manifest = json.loads((collection / "out/manifest.json").read_text())
    assert (manifest["queries"], manifest["candidates"]) == (3, 18)
    assert manifest["inputs"]["run"] == str(collection / "run.trec")


def test_the_scores_join_the_pools_they_are_of(cli: Run, collection: Path) -> None:
    pools = [
        Pool(query_id="q", query="bees live", candidates=tuple(Candidate(doc_id=d, text=t) for d, t in CORPUS.items())),
        Pool(query_id="none", query="nothing found", candidates=()),
    ]
    write_pools(collection / "pools", pools)
    done = cli("rerank", "--engine", "fake", "--pools", collection / "pools", "--output", collection / "out")
    assert done.exit_code == 0
    assert "1 queries had no candidates and have no lines in run.trec" in done.stderr
    tables, run = read_scores(collection / "out/scores")
    assert [p.query_id for p, _ in join_scores(tables, read_pools(collection / "pools"), run=run)] == ["q", "none"]
    assert [len(line["candidates"]) for line in results(collection / "out")] == [6, 0]
    assert json.loads((collection / "out/manifest.json").read_text())["empty_pools"] == ["none"]


def test_rank_llm_files_go_in_directly(cli: Run, collection: Path) -> None:
    record = {
        "query": {"qid": 1, "text": "bees"},
        "candidates": [{"docid": 7, "score": 1.0, "doc": {"contents": "bees"}}],
    }
    (collection / "requests.jsonl").write_text(json.dumps(record) + "\n")
    done = cli(
        "rerank", "--engine", "fake", "--requests-file", collection / "requests.jsonl", "--output_dir", collection / "o"
    )
    assert done.exit_code == 0
    assert read_run(collection / "o/run.trec")["1"][0].doc_id == "7"


def test_options_reach_what_they_are_for(rerank: Run, collection: Path) -> None:
    Threshold(value=0.5).save(collection / "t.json")
    SlotResidual(offsets={2: (0.1, -0.1)}, readout="expected", n_queries=1).save(collection / "r.json")
    done = rerank(
        *("--window_size", "2", "--partition", "round-robin", "--order", "canonical", "--presentations", "4"),
        *("--seed", "5", "--shuffle", "window", "--no-chat", "--rubric", "answer_support"),
        *("--instruction", "Grade.", "--markers", "alpha", "--max-doc-chars", "20", "--max-length", "9000"),
        *("--hits", "5", "--top-k", "3", "--max-queries", "2", "--run-tag", "mine", "--shard-size", "1"),
        *("--threshold", collection / "t.json", "--residual", collection / "r.json", "--settle", "--placeholder", "1"),
    )
    assert done.exit_code == 0, done.stderr
    manifest = json.loads((collection / "out/manifest.json").read_text())
    assert manifest["settings"]["scoring"] == {
        "window": 2,
        "partition": "round_robin",
        "order": "canonical",
        "presentations": 4,
        "seed": 5,
        "shuffle": "window",
        "calibration": "none",
    }
    assert manifest["settings"]["settle"]["threshold"] == 0.5
    prompt = manifest["loaded"]["prompt"]
    assert (prompt["markers"], prompt["placeholder"], prompt["max_doc_chars"]) == ("alpha", "1", 20)
    assert prompt["rubric"]["instruction"] == "Grade."
    lines = results(collection / "out")
    assert [len(line["candidates"]) for line in lines] == [3, 3]
    assert all("retained" in c for line in lines for c in line["candidates"])
    text = (collection / "out/run.trec").read_text()
    assert text.count("\n") == 6
    assert text.splitlines()[0].endswith(" mine")


def test_the_command_and_the_reranker_give_the_same_scores(rerank: Run, collection: Path) -> None:
    from pd_rerank.reranker import OCSFTBatchedReranker

    assert rerank("--window-size", "2", "--presentations", "3").exit_code == 0
    same = OCSFTBatchedReranker("smollm2-135m", 0, engine="fake", window=2, presentations=3)
    run = read_run(collection / "run.trec")
    for line in results(collection / "out"):
        ids = [hit.doc_id for hit in run[line["query"]["qid"]]]
        ranked = same.rank(line["query"]["text"], [CORPUS[i] for i in ids], ids)
        assert [c["docid"] for c in line["candidates"]] == [r.document.doc_id for r in ranked]
        assert [c["score"] for c in line["candidates"]] == [r.score for r in ranked]


def test_a_config_file_is_the_same_as_options(rerank: Run, collection: Path) -> None:
    (collection / "c.yaml").write_text("window-size: 2\npresentations: 3\nseed: 9\n")
    assert rerank("--config", collection / "c.yaml", "--seed", "4").exit_code == 0
    assert rerank("--window-size", "2", "--presentations", "3", "--seed", "4", output=collection / "b").exit_code == 0
    assert contents(collection / "out") == contents(collection / "b")
    assert rerank("--config", collection / "none.yaml").exit_code == 4
    (collection / "c.yaml").write_text("windowsize: 2\n")
    wrong = rerank("--config", collection / "c.yaml")
    assert wrong.exit_code == 2
    assert "unknown key 'windowsize'; did you mean window_size" in wrong.stderr


def test_quiet_says_nothing_and_progress_stays_on_stderr(rerank: Run, collection: Path) -> None:
    silent = rerank("--quiet", "--progress")
    assert (silent.exit_code, silent.stdout, silent.stderr) == (0, "", "")
    shown = rerank("--progress", output=collection / "b")
    assert "reranking: 100%" in shown.stderr
    assert "window/s" in shown.stderr
    assert shown.stdout == ""
    assert "reranking" not in rerank(output=collection / "c").stderr


def test_crlf_and_byte_order_marks_change_nothing(rerank: Run, collection: Path) -> None:
    assert rerank().exit_code == 0
    for name in ("run.trec", "topics.tsv", "corpus.jsonl"):
        raw = (collection / name).read_bytes()
        (collection / name).write_bytes(b"\xef\xbb\xbf" + raw.replace(b"\n", b"\r\n"))
    assert rerank(output=collection / "b").exit_code == 0
    assert contents(collection / "out") == contents(collection / "b")


# -- dry runs ----------------------------------------------------------------------------------------------


def test_a_dry_run_counts_and_writes_nothing(rerank: Run, collection: Path) -> None:
    before = sorted(os.listdir(collection))
    done = rerank("--dry-run", "--window-size", "2", "--presentations", "3", output=None)
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert (found["queries"], found["candidates"], found["windows"]) == (3, 18, 27)
    assert 9 < found["prompts"] <= 27  # windows that come out the same in two presentations are asked for once
    assert found["tokens"] > found["longest_prompt"] > 100
    assert found["tokens_counted_by"] == "tokenizer"
    assert sorted(os.listdir(collection)) == before


def test_validate_only_counts_input_and_stops(rerank: Run, collection: Path) -> None:
    done = rerank("--validate-only", output=None)
    found = json.loads(done.stdout)
    assert (done.exit_code, found["queries"], found["candidates"], found["missing_texts"]) == (0, 3, 18, 0)
    assert "tokens" not in found
    assert not (collection / "out").exists()


def test_a_dry_run_with_overwrite_deletes_nothing(rerank: Run, collection: Path) -> None:
    assert rerank().exit_code == 0
    before = contents(collection / "out")
    assert rerank("--dry-run", "--overwrite").exit_code == 0
    assert contents(collection / "out") == before


# -- refused before anything loads -------------------------------------------------------------------------


def test_another_threshold_or_top_k_needs_no_model(
    rerank: Run, collection: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rerank().exit_code == 0
    monkeypatch.setattr("pd_rerank.engines.load_engine", None)
    done = rerank("--threshold", "0.3", "--top-k", "2")
    assert done.exit_code == 0, done.stderr
    assert "scored already" in done.stderr
    shown = [c for line in results(collection / "out") for c in line["candidates"]]
    assert all(c["retained"] == (c["score"] >= 0.3) for c in shown)
    assert max(len(line["candidates"]) for line in results(collection / "out")) == 2


def test_capcal_is_an_option(rerank: Run, collection: Path) -> None:
    assert rerank("--calibration", "capcal").exit_code == 0
    assert json.loads((collection / "out/scores/run.json").read_text())["scoring"]["calibration"] == "capcal"


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("the engine was loaded")

    monkeypatch.setattr("pd_rerank.engines.load_engine", loaded)


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--window-size", "0"], 2, "--window-size: input should be greater than or equal to 1, got 0"),
        (["--partition", "robin"], 2, "--partition: input should be 'round_robin'"),
        (["--order", "random"], 2, "--order: input should be 'given', 'reverse' or 'canonical'"),
        (["--readout", "best"], 2, "--readout"),
        (["--engine", "tgi"], 2, "--engine: input should be 'hf', 'vllm', 'server'"),
        (["--rubric", "fairness"], 2, "unknown rubric 'fairness'"),
        (["--rubric", "none.yaml"], 4, "none.yaml"),
        (["--markers", "stars"], 2, "unknown markers 'stars'"),
        (["--run-tag", "my run"], 2, "run tag 'my run'"),
        (["--threshold", "none.json"], 4, "no file none.json"),
        (["--threshold", "nan"], 2, "a threshold is a finite number, got nan"),
        (["--residual", "t.tsv", "--calibration", "capcal"], 2, "correct the same thing"),
        (["--config", "."], 2, ". is a folder; name a config file"),
        (["--merge-adapter"], 2, "--merge-adapter means nothing to --engine fake"),
        (["--trust-remote-code"], 2, "--trust-remote-code means nothing to --engine fake"),
        (["--pools", "p"], 2, "leave out --run, --corpus, --topics"),
        (["--dtype", "bf16"], 2, "--dtype means nothing to --engine fake"),
        (["--settle", "--presentations", "5"], 2, "--settle needs a decision"),
        (["--run", "nowhere.trec"], 4, "--run: no file or folder nowhere.trec"),
    ],
)
def test_bad_arguments_stop_before_the_model_loads(rerank: Run, words: list[str], code: int, says: str) -> None:
    done = rerank(*words)
    assert (done.exit_code, done.stdout) == (code, "")
    assert says in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.usefixtures("no_engine")
def test_no_output_folder_is_a_bad_argument(rerank: Run) -> None:
    done = rerank(output=None)
    assert done.exit_code == 2
    assert "--output is missing" in done.stderr


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize(
    ("name", "content", "code", "says"),
    [
        ("run.trec", "007 Q0 1 1 9.5\n", 5, "run.trec:1: 5 columns; a run line has six"),
        ("run.trec", "007 Q0 1 1 9 t\n007 Q0 1 2 8 t\n", 5, "run.trec:2: query '007' holds '1' twice"),
        ("run.trec", "7 Q0 1 1 9 t\n", 5, "1 of the run's 1 queries are not in the topics ('7')"),
        ("run.trec", "007 Q0 msmarco_1 1 9 t\n", 5, "run and corpus are of different collections"),
        ("run.trec", "007 Q0 msmarco_1 1 9 t\n007 Q0 1 2 8 t\n", 5, "1 of the run's 2 documents have no text"),
        ("topics.tsv", "007\tx\nNA\t\n", 5, "topics.tsv:2: query 'NA' has no text; write one or drop the line"),
        ("corpus.jsonl", '{"_id": "1", "text": "x"}\n{"_id": ', 5, "corpus.jsonl:2: not JSON"),
        ("corpus.jsonl", '{"_id": "1", "text": "x"}\n{"_id": "1", "text": "y"}\n', 5, "corpus.jsonl:2: document '1'"),
        ("topics.tsv", b"007\tm\xfcll\n", 5, "topics.tsv:1: byte 0xfc is not UTF-8"),
    ],
)
def test_corrupt_files_are_named_with_their_line(
    rerank: Run, collection: Path, name: str, content: str | bytes, code: int, says: str
) -> None:
    (collection / name).write_bytes(content.encode() if isinstance(content, str) else content)
    done = rerank()
    assert (done.exit_code, done.stdout) == (code, "")
    assert says in done.stderr
    assert not (collection / "out").exists()


@pytest.mark.usefixtures("no_engine")
def test_a_threshold_of_another_readout_is_refused(rerank: Run, collection: Path) -> None:
    Threshold(value=0.5, readout="argmax").save(collection / "t.json")
    done = rerank("--threshold", collection / "t.json")
    assert done.exit_code == 2
    assert "was fitted on readout 'argmax', asked for is 'expected'; ask for 'argmax', or fit one anew" in done.stderr


@pytest.mark.usefixtures("no_engine")
def test_other_settings_in_the_same_folder_are_refused_before_loading(
    rerank: Run, collection: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd_rerank.engines.load_engine", lambda *_, **__: FakeEngine())
    assert rerank().exit_code == 0
    monkeypatch.setattr("pd_rerank.engines.load_engine", None)
    done = rerank("--window-size", "3", "--placeholder", "?")
    assert done.exit_code == 2
    assert 'prompt_options.placeholder is "0" there, "?" here; scoring.window is 20 there, 3 here' in done.stderr
    assert "--overwrite" in done.stderr
    again = rerank()
    assert (again.exit_code, again.stdout) == (0, "")
    assert "is finished already" in again.stderr


def test_missing_texts_can_be_skipped(rerank: Run, collection: Path) -> None:
    (collection / "run.trec").write_text("007 Q0 gone 1 9 t\n007 Q0 1 2 8 t\n")
    done = rerank("--missing", "skip")
    assert done.exit_code == 0
    assert "1 of the run's 2 documents have no text in the corpus ('gone'); they are left out" in done.stderr
    assert json.loads((collection / "out/manifest.json").read_text())["missing_texts"] == 1


# -- failures and interruptions ----------------------------------------------------------------------------


class Failing(FakeEngine):
    def grade_logits(self, prompts: Any, grade_ids: Any, **rest: Any) -> Any:
        if any("ferry leave\n" in self.tokenizer.decode(p.token_ids.tolist()) for p in prompts):
            raise EngineFailure("the device fell off")
        return super().grade_logits(prompts, grade_ids, **rest)


def test_failed_queries_are_named_the_others_kept_and_the_code_is_7(
    rerank: Run, collection: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd_rerank.engines.fake.FakeEngine", Failing)
    done = rerank()
    assert (done.exit_code, done.stdout) == (7, "")
    assert done.stderr.splitlines()[-1].startswith("error: 1 of 3 queries failed ('NA'; first: the device fell off)")
    assert set(read_run(collection / "out/run.trec")) == {"007", "null"}
    monkeypatch.undo()
    monkeypatch.setattr("pd_rerank.engines.fake.FakeEngine", FakeEngine)
    assert rerank().exit_code == 0
    assert set(read_run(collection / "out/run.trec")) == set(TOPICS)


def test_a_missing_grade_is_counted_on_stderr(rerank: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(FakeEngine):
        def __init__(self, **options: Any) -> None:
            super().__init__(missing=lambda text: text.startswith("Honey"), **options)

    monkeypatch.setattr("pd_rerank.engines.fake.FakeEngine", Forgetful)
    done = rerank()
    assert done.exit_code == 0
    assert "3 candidates got no grade" in done.stderr


def test_a_full_disk_is_one_line_and_leaves_no_partial_file(
    rerank: Run, collection: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        done = rerank()
    assert done.exit_code == 6
    assert "No space left on device" in done.stderr
    assert [path for path in (collection / "out").rglob("*") if path.is_file()] == []
    assert rerank().exit_code == 0


def test_ctrl_c_keeps_finished_shards_and_says_how_to_go_on(
    rerank: Run, collection: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(FakeEngine):
        def grade_logits(self, prompts: Any, grade_ids: Any, **rest: Any) -> Any:
            if (collection / "out/shards/000000").exists():
                raise KeyboardInterrupt
            return super().grade_logits(prompts, grade_ids, **rest)

    assert rerank("--shard-size", "1", output=collection / "whole").exit_code == 0
    monkeypatch.setattr("pd_rerank.engines.fake.FakeEngine", Stopped)
    done = rerank("--shard-size", "1")
    assert done.exit_code == 130
    assert done.stderr.splitlines()[-1].startswith("error: interrupted; 1 of 3 queries are kept in ")
    assert done.stderr.splitlines()[-1].endswith("run the same command again to go on")
    monkeypatch.undo()
    again = rerank("--shard-size", "1")
    assert again.exit_code == 0
    assert "going on after 1 of 3 queries" in again.stderr
    assert contents(collection / "out") == contents(collection / "whole")


SLOW = """
import sys, time
from pd_rerank.engines.fake import FakeEngine
quick = FakeEngine.grade_logits
def slow(self, prompts, grade_ids, **rest):
    time.sleep(0.4)
    return quick(self, prompts, grade_ids, **rest)
FakeEngine.grade_logits = slow
from pd_rerank.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_process_goes_on_to_the_same_files(collection: Path, rerank: Run, how: signal.Signals) -> None:
    words = ["--run", "run.trec", "--corpus", "corpus.jsonl", "--topics", "topics.tsv"]
    words = ["rerank", "--engine", "fake", *words, "--shard-size", "1", "--window-size", "2", "--presentations", "2"]
    code = [sys.executable, "-c", SLOW, *words, "--output", "cut"]
    process = subprocess.Popen(code, cwd=collection, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (collection / "cut/shards/000000").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(how)
    out, err = process.communicate(timeout=60)
    assert out == ""
    assert process.returncode == (-signal.SIGKILL if how == signal.SIGKILL else 130), err
    assert not (collection / "cut/run.trec").exists()
    settings = ["--shard-size", "1", "--window-size", "2", "--presentations", "2"]
    again = rerank(*settings, output=collection / "cut")
    assert again.exit_code == 0
    assert "going on after" in again.stderr
    assert rerank(*settings, output=collection / "whole").exit_code == 0
    assert contents(collection / "cut") == contents(collection / "whole")


# -- real data ---------------------------------------------------------------------------------------------

DL20 = Path(__file__).parents[3] / "shared" / "data" / "dl20"


@pytest.mark.skipif(not DL20.is_dir(), reason="real data not present (../shared/data/dl20)")
def test_a_real_run_goes_through(cli: Run, tmp_path: Path) -> None:
    done = cli(
        *("rerank", "--engine", "fake", "--run", DL20 / "runs/BM25.trec", "--corpus", DL20 / "corpus.jsonl"),
        *("--topics", DL20 / "queries.tsv", "--missing", "skip", "--max-queries", "10", "--output", tmp_path / "o"),
    )
    assert done.exit_code == 0, done.stderr
    run = read_run(tmp_path / "o/run.trec")
    assert list(run) == list(read_topics(DL20 / "queries.tsv"))[:10]
