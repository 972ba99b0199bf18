"""`pd-rerank rerank --engine server` while the server gets into trouble: finished queries kept, the others named."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pd_rerank.files import read_run
from pd_rerank.pool import Candidate, Pool, write_pools

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("httpx")

from pd_rerank.engines.hf import HFEngine
from pd_rerank.engines.http import Client
from pd_rerank.prompt import GradePrompt
from tests.engines.model_servers import ModelServer
from tests.training.runs import write_model

QUERIES = 8
WORDS = ("tide", "moon", "bread", "salt", "chain", "oil", "rain", "flour")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server(model: Path) -> Iterator[ModelServer]:
    engine = HFEngine(model, dtype="float32")
    ids = GradePrompt(engine.tokenizer).grade_ids
    made = ModelServer("vllm_pooling", engine.model, engine.tokenizer, grade_ids=ids, stall=3.0)
    with made.running() as running:
        yield running


@pytest.fixture
def rerank(
    model: Path, server: ModelServer, tmp_path: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Rerank 8 queries of 5 candidates (two windows each), two queries per shard, waiting little between tries."""
    texts = [f"{a} and {b}" for a, b in zip(WORDS[:5], WORDS[3:], strict=True)]
    write_pools(
        tmp_path / "pools",
        [
            Pool(
                query_id=f"q{q}",
                query=f"which {WORDS[q]}?",
                candidates=tuple(Candidate(doc_id=f"d{i}", text=t) for i, t in enumerate(texts)),
            )
            for q in range(QUERIES)
        ],
    )
    for name, value in {"backoff_s": 0.02, "attempts": 3, "cool_down_s": 60.0}.items():
        monkeypatch.setitem(Client.__init__.__kwdefaults__, name, value)

    def run(output: str = "out", *words: str) -> Any:
        given = ("--pools", tmp_path / "pools", "--output", tmp_path / output, "--model", model)
        how = ("--window-size", "3", "--shard-size", "2", "--concurrency", "2", "--server-timeout", "2")
        return cli("rerank", "--engine", "server", "--server", server.url, *given, *how, *words)

    return run


def asked(body: dict[str, Any], server: ModelServer) -> int:
    """Which query a request is of; -1 for a probe."""
    text = server.tokenizer.decode(body["input"][0])
    return next((q for q in range(QUERIES) if f"which {WORDS[q]}?" in text), -1)


@pytest.mark.parametrize("trouble", ["dead", "slow", "500", "429", "truncated", "rows", "cut"])
def test_trouble_in_mid_run_keeps_what_is_finished_and_names_the_rest(
    trouble: str, rerank: Callable[..., Any], server: ModelServer, tmp_path: Path
) -> None:
    assert rerank("undisturbed").exit_code == 0
    wanted = read_run(tmp_path / "undisturbed/run.trec")
    server.fault = lambda path, body, n: trouble if asked(body, server) >= 4 else None
    done = rerank()
    assert (done.exit_code, done.stdout) == (7, ""), done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: 4 of 8 queries failed ('q4', 'q5', 'q6', 'q7'"), last
    kept = read_run(tmp_path / "out/run.trec")
    assert set(kept) == {"q0", "q1", "q2", "q3"}
    assert all(kept[q] == wanted[q] for q in kept)
    failed = json.loads((tmp_path / "out/manifest.json").read_text(encoding="utf-8"))["failed"]
    assert set(failed) == {"q4", "q5", "q6", "q7"}
    if trouble == "dead":
        return
    server.fault = None
    assert rerank().exit_code == 0
    assert read_run(tmp_path / "out/run.trec") == wanted
    for name in ("run.trec", "results.jsonl", "scores/scores.npz"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes(), name


@pytest.mark.parametrize("trouble", ["500", "429", "truncated", "cut"])
def test_trouble_that_passes_costs_nothing_but_time(
    trouble: str, rerank: Callable[..., Any], server: ModelServer, tmp_path: Path
) -> None:
    met, lock = set[str](), threading.Lock()

    def once(path: str, body: dict[str, Any], n: int) -> str | None:
        with lock:
            key = json.dumps(body["input"])
            if asked(body, server) < 0 or key in met:
                return None
            met.add(key)
        return trouble

    server.fault = once
    done = rerank()
    assert done.exit_code == 0, done.stderr
    assert set(read_run(tmp_path / "out/run.trec")) == {f"q{q}" for q in range(QUERIES)}


def test_one_query_the_server_always_fails_on_leaves_the_others_alone(
    rerank: Callable[..., Any], server: ModelServer, tmp_path: Path
) -> None:
    server.fault = lambda path, body, n: "500" if asked(body, server) == 4 else None
    done = rerank()
    assert done.exit_code == 7
    assert "1 of 8 queries failed ('q4'; first:" in done.stderr
    assert "told to say 500" in done.stderr
    # Its shard is asked for again query by query; windows that were read are not.
    sent = [json.dumps(body["input"]) for _, body in server.posts if asked(body, server) not in (-1, 4)]
    assert len(sent) == len(set(sent)) == 2 * (QUERIES - 1)


def test_a_server_that_moved_finishes_the_job_it_did_not_begin(
    rerank: Callable[..., Any], server: ModelServer, tmp_path: Path, model: Path
) -> None:
    server.fault = lambda path, body, n: "dead" if asked(body, server) >= 4 else None
    assert rerank().exit_code == 7
    engine = HFEngine(model, dtype="float32")
    moved = ModelServer("vllm_pooling", engine.model, engine.tokenizer, grade_ids=server.grade_ids)
    with moved.running():
        done = rerank("out", "--server", moved.url)
    assert done.exit_code == 0, done.stderr
    assert {asked(body, moved) for _, body in moved.posts} == {-1, 4, 5, 6, 7}


def test_options_of_another_engine_and_a_missing_address_are_refused(cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"query": {"qid": "1", "text": "a"}, "candidates": []}\n', encoding="utf-8")
    given = ("--pools", tmp_path / "p.jsonl", "--output", tmp_path / "out")
    done = cli("rerank", "--engine", "server", *given)
    assert (done.exit_code, "--server http://host:port" in done.stderr) == (2, True)
    done = cli("rerank", "--engine", "server", "--server", "http://127.0.0.1:1", "--device", "cuda", *given)
    assert (done.exit_code, "--device means nothing to --engine server" in done.stderr) == (2, True)
    done = cli("rerank", "--server", "http://127.0.0.1:1", *given)
    assert (done.exit_code, "--server means nothing to --engine hf" in done.stderr) == (2, True)
