"""`pd-rerank pool`: from runs and a corpus to pools, checked, converted, resumed to the same bytes."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pd_rerank.files import read_json, read_run, write_run
from pd_rerank.pool import read_pools

from .conftest import CORPUS, TOPICS, rotated

Run = Callable[..., Any]


@pytest.fixture
def pool(collection: Path, cli: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `pd-rerank pool` on two runs of the collection, in its folder."""
    (collection / "corpus.jsonl").write_text(
        "".join(json.dumps({"_id": i, "text": t or "."}) + "\n" for i, t in CORPUS.items()), encoding="utf-8"
    )
    ids = list(CORPUS)
    write_run(collection / "second.trec", [(q, [(d, 9.0 - r) for r, d in enumerate(ids[::-1])]) for q in TOPICS])
    (collection / "qrels.txt").write_text("007 0 文書 1\n007 0 1 2\nNA 0 NA 1\nnull 0 1 0\n", encoding="utf-8")
    (collection / "pools.yaml").write_text(
        "topics: topics.tsv\ncorpus: corpus.jsonl\noutput: out\nshard-size: 1\n"
        "routes:\n  one: {type: run, path: run.trec, depth: 3}\n  two: {type: run, path: second.trec, depth: 2}\n"
    )
    monkeypatch.chdir(collection)

    def invoke(*words: str | Path) -> Any:
        return cli("pool", "--config", "pools.yaml", *words)

    return invoke


def contents(folder: Path) -> dict[str, Any]:
    record = read_json(folder / "manifest.json")
    for name in ("created", "seconds"):
        record.pop(name)
    return {"pools": (folder / "pools.jsonl").read_bytes(), "manifest": record}


# -- building -----------------------------------------------------------------------------------------------------


def test_pools_are_built_from_a_config(pool: Run, collection: Path) -> None:
    done = pool("--qrels", "qrels.txt")
    assert (done.exit_code, done.stdout) == (0, ""), done.stderr
    pools = read_pools(collection / "out")
    assert [p.query_id for p in pools] == list(TOPICS)
    ids = list(CORPUS)
    assert set(pools[0].doc_ids) == {*rotated(0)[:3], *ids[::-1][:2]}
    hits = next(c for c in pools[0].candidates if c.doc_id == ids[-1]).routes
    assert {name: hit.rank for name, hit in hits.items()} == {"two": 1}
    manifest = read_json(collection / "out/manifest.json")
    assert manifest["settings"]["routes"]["one"]["depth"] == 3
    assert manifest["health"]["ceiling"]["queries"] == 2
    assert sorted(p.name for p in collection.glob("out*")) == ["out"]


def test_what_is_typed_wins_over_the_config_and_runs_can_be_added(pool: Run, collection: Path) -> None:
    done = pool("--method", "rrf", "--run", "three=run.trec", "--output", "b", "--max-queries", "2")
    assert done.exit_code == 0, done.stderr
    manifest = read_json(collection / "b/manifest.json")
    assert list(manifest["settings"]["routes"]) == ["one", "two", "three"]
    assert manifest["settings"]["fusion"]["method"] == "rrf"
    assert manifest["queries"] == 2
    assert pool("--run", "one=run.trec").exit_code == 2
    assert "write NAME=PATH" in pool("--run", "run.trec").stderr


def test_no_config_is_needed_for_runs(pool: Run, cli: Run, collection: Path) -> None:
    done = cli("pool", "--run", "a=run.trec", "--topics", "topics.tsv", "--corpus", "corpus.jsonl", "--output", "c")
    assert done.exit_code == 0, done.stderr
    assert read_pools(collection / "c")[0].doc_ids == tuple(sorted(CORPUS, key=list(CORPUS).index))


def test_a_finished_job_says_so_and_other_settings_are_refused(pool: Run, collection: Path) -> None:
    assert pool().exit_code == 0
    again = pool()
    assert (again.exit_code, "is finished already" in again.stderr) == (0, True)
    other = pool("--method", "rrf")
    assert other.exit_code == 2
    assert 'fusion.method is "weighted" there, "rrf" here' in other.stderr
    assert pool("--method", "rrf", "--overwrite", "--keep-hits").exit_code == 0
    assert (collection / "out.hits").is_dir()


def test_validate_only_counts_and_writes_nothing(pool: Run, collection: Path) -> None:
    done = pool("--validate-only")
    assert json.loads(done.stdout) == {"queries": 3, "routes": ["one", "two"], "to_search": 6}
    assert not list(collection.glob("out*"))


def test_building_from_runs_loads_nothing_heavy(pool: Run, collection: Path) -> None:
    code = (
        "import sys\nfrom pd_rerank.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'jnius', 'pyserini', 'faiss', 'ranx', 'numba', 'pandas', 'scipy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    command = [sys.executable, "-c", code, "pool", "--config", "pools.yaml"]
    done = subprocess.run(command, cwd=collection, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (collection / "out/pools.jsonl").exists()


# -- refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "code", "says"),
    [
        ("run.trec", "007 Q0 1 1 9\n", 5, "run.trec:1: 5 columns; a run line has six"),
        ("run.trec", "007 Q0 1 1 9 t\n007 Q0 1 2 8 t\n", 5, "run.trec:2: query '007' holds '1' twice"),
        ("run.trec", "7 Q0 1 1 9 t\n", 5, "1 of the 1 queries of run.trec are not in the topics ('7')"),
        ("run.trec", "007 Q0 other_1 1 9 t\n", 5, "have no text in corpus.jsonl ('other_1' of route 'one')"),
        ("topics.tsv", "007\tx\nNA\t\n", 5, "topics.tsv:2: query 'NA' has no text; write one or drop the line"),
        ("corpus.jsonl", '{"_id": "1", "text": "x"}\n{"_id": ', 5, "corpus.jsonl:2: not JSON"),
        ("corpus.jsonl", '{"_id": "1", "text": "x"}\n{"_id": "1", "text": "y"}\n', 5, "corpus.jsonl:2: document '1'"),
        ("pools.yaml", "topics: t\nroutes:\n  a: {type: run, path: r, k: 1}\n", 2, "routes.a: unknown key 'k'"),
        ("pools.yaml", "topics: topics.tsv\nrouts: {}\n", 2, "unknown key 'routs'; did you mean routes"),
        ("pools.yaml", "output: o\nroutes: {a: {type: run, path: run.trec}}\n", 2, "--topics is missing"),
        (
            "pools.yaml",
            "topics: topics.tsv\ncorpus: corpus.jsonl\noutput: o\nroutes: {a: {type: run, path: no.trec}}\n",
            4,
            "no run file no.trec",
        ),
        (
            "pools.yaml",
            "topics: none.tsv\nroutes: {a: {type: run, path: run.trec}}\n",
            4,
            "--topics: no file or folder",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_place(
    pool: Run, collection: Path, name: str, content: str, code: int, says: str
) -> None:
    (collection / name).write_text(content, encoding="utf-8")
    done = pool()
    assert (done.exit_code, done.stdout) == (code, "")
    assert says in done.stderr
    assert not (collection / "out").exists()


def test_an_empty_line_among_the_queries_is_skipped_and_told(pool: Run, collection: Path) -> None:
    lines = [f"{query_id}\t{text}\n" for query_id, text in TOPICS.items()]
    (collection / "topics.tsv").write_text("".join([lines[0], "\n", *lines[1:]]), encoding="utf-8")
    done = pool()
    assert done.exit_code == 0
    assert "topics.tsv:2: empty line, skipped; if a query belongs there, write it" in done.stderr
    assert [p.query_id for p in read_pools(collection / "out")] == list(TOPICS)


@pytest.mark.skipif(importlib.util.find_spec("faiss") is None, reason="faiss is not installed (the extra 'pools')")
def test_a_wrong_index_path_is_named(pool: Run, collection: Path) -> None:
    (collection / "pools.yaml").write_text(
        "topics: topics.tsv\ncorpus: corpus.jsonl\noutput: out\n"
        "routes:\n  r: {type: run, path: run.trec}\n  d: {type: dense, index: no/such/index}\n"
    )
    done = pool()
    assert done.exit_code == 4
    assert done.stderr.splitlines()[-1] == (
        "error: route 'd': no index folder no/such/index; make it with 'pd-rerank index', or mend the path"
    )
    assert not (collection / "out").exists()


# -- checking, converting, weighing -------------------------------------------------------------------------------


def test_check_reports_and_exits_with_5_where_ids_do_not_meet(pool: Run, cli: Run, collection: Path) -> None:
    assert pool().exit_code == 0
    done = cli("pool", "check", "--pools", "out", "--qrels", "qrels.txt", "--corpus", "corpus.jsonl")
    assert done.exit_code == 0, done.stderr
    assert "recall ceiling: " in done.stdout
    assert "route one: 9 candidates" in done.stdout
    words = ["pool", "check", "--pools", "out", "--json", "--window-size", "2", "--tokens-per-second", "100"]
    report = json.loads(cli(*words).stdout)
    assert report["cost"]["windows"] == sum(-(-len(p) // 2) for p in read_pools(collection / "out"))
    assert report["cost"]["seconds"] > 0
    (collection / "qrels.txt").write_text("7 0 1 1\n")
    wrong = cli("pool", "check", "--pools", "out", "--qrels", "qrels.txt")
    assert wrong.exit_code == 5
    assert "pools and qrels share no query id: '007' here, '7' there" in wrong.stderr
    assert "problem: pools and qrels share no query id" in wrong.stdout
    assert cli("pool", "check", "--pools", "none").exit_code == 4


def test_pools_runs_and_rank_llm_files_turn_into_each_other(pool: Run, cli: Run, collection: Path) -> None:
    assert pool().exit_code == 0
    pools = read_pools(collection / "out")
    assert cli("pool", "convert", "--pools", "out", "--output", "f.trec", "--run-tag", "t").exit_code == 0
    fused = {q: tuple(hit.doc_id for hit in hits) for q, hits in read_run(collection / "f.trec").items()}
    assert fused == {p.query_id: p.doc_ids for p in pools}
    assert cli("pool", "convert", "--pools", "out", "--output", "one.trec", "--route", "one").exit_code == 0
    assert [hit.doc_id for hit in read_run(collection / "one.trec")["007"]] == rotated(0)[:3]
    assert cli("pool", "convert", "--pools", "out", "--output", "p.jsonl").exit_code == 0
    assert (collection / "p.jsonl").read_bytes() == (collection / "out/pools.jsonl").read_bytes()
    assert cli("pool", "convert", "--pools", "p.jsonl", "--output", "back").exit_code == 0
    assert read_pools(collection / "back") == pools
    given = ["--run", "run.trec", "--corpus", "corpus.jsonl", "--topics", "topics.tsv", "--hits", "2"]
    assert cli("pool", "convert", *given, "--output", "from-run").exit_code == 0
    assert read_pools(collection / "from-run")[0].doc_ids == tuple(rotated(0)[:2])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--output", "x"], "nothing to convert"),
        (["--pools", "out", "--run", "run.trec", "--output", "x"], "leave out --run"),
        (["--pools", "out", "--route", "one", "--output", "x"], "--route is for a TREC run"),
        (["--pools", "out", "--route", "no", "--output", "x.trec"], "no route 'no'; they have one, two"),
    ],
)
def test_conversions_that_cannot_be_meant_are_refused(pool: Run, cli: Run, words: list[str], says: str) -> None:
    assert pool().exit_code == 0
    done = cli("pool", "convert", *words)
    assert (done.exit_code, says in done.stderr) == (2, True), done.stderr


def test_weights_found_on_dev_queries_go_into_a_config(pool: Run, cli: Run, collection: Path) -> None:
    assert pool().exit_code == 0
    (collection / "test.tsv").write_text("t1\tother queries\n")
    words = ["pool", "weights", "--pools", "out", "--qrels", "qrels.txt", "--output", "w.json", "--steps", "4"]
    done = cli(*words, "--test", "test.tsv", "--config", "pools.yaml", "--metric", "mrr@10")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert sum(found["weights"].values()) == 1.0
    assert (found["dev_queries"], found["tried"], found["metric"]) == (2, 5, "mrr@10")
    assert pool("--weights", "w.json", "--output", "weighed").exit_code == 0
    rules = read_json(collection / "weighed/manifest.json")["settings"]["fusion"]["rules"]
    assert {name: rule["weight"] for name, rule in rules.items()} == found["weights"]
    overlap = cli(*words, "--test", "topics.tsv")
    assert (overlap.exit_code, "dev queries are test queries" in overlap.stderr) == (2, True)


# -- killed -------------------------------------------------------------------------------------------------------

SLOW = """
import sys, time
from pd_rerank.retrieval.hybrid import RunSource
quick = RunSource.hits
def slow(self, queries, k):
    time.sleep(0.4)
    return quick(self, queries, k)
RunSource.hits = slow
from pd_rerank.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_process_goes_on_to_the_same_files(pool: Run, collection: Path, how: signal.Signals) -> None:
    command = [sys.executable, "-c", SLOW, "pool", "--config", "pools.yaml", "--output", "cut"]
    process = subprocess.Popen(command, cwd=collection, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(collection.glob("cut.hits/one-*/000000.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(how)
    out, err = process.communicate(timeout=60)
    assert out == ""
    assert process.returncode == (-signal.SIGKILL if how == signal.SIGKILL else 130), err
    assert not (collection / "cut").exists()
    (collection / ".cut.a1b2c3d4.part").mkdir()  # what a kill in the last moment leaves
    again = pool("--output", "cut")
    assert again.exit_code == 0
    assert "going on: " in again.stderr
    assert pool("--output", "whole").exit_code == 0
    assert contents(collection / "cut") == contents(collection / "whole")
    assert [path.name for path in collection.iterdir() if "cut" in path.name] == ["cut"]
