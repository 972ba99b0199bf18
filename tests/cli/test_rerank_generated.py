"""`--engine generated` from end to end: grades a chat model writes, in the same folders as any other."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pd_rerank.pool import Candidate, Pool, write_pools
from pd_rerank.scores import read_scores
from pd_rerank.training.labels import read_labels

pytest.importorskip("httpx")

from pd_rerank.engines.http import Client
from tests.engines.chat_server import ChatServer, Reply, answer, closed_port, completion, good, graded, shown

QUERIES = 8
WORDS = ("tide", "moon", "bread", "salt", "chain", "oil", "rain", "flour")

Run = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Run:
    """A command over 8 queries of 5 documents, two windows each and two queries per shard, waiting little."""
    texts = [f"{a} and {b}" for a, b in zip(WORDS[:5], WORDS[3:], strict=False)]
    pools = [
        Pool(
            query_id=f"q{q}",
            query=f"which {WORDS[q]}",
            candidates=tuple(Candidate(doc_id=f"d{i}", text=t) for i, t in enumerate(texts)),
        )
        for q in range(QUERIES)
    ]
    write_pools(tmp_path / "pools", pools)
    for name, value in {"backoff_s": 0.01, "cool_down_s": 60.0}.items():
        monkeypatch.setitem(Client.__init__.__kwdefaults__, name, value)

    def call(url: str, *words: str | Path, command: str = "rerank", output: str = "out") -> Any:
        given = ("--pools", tmp_path / "pools", "--output", tmp_path / output, "--model", "judge")
        how = ("--shard-size", "2", "--concurrency", "2", "--server-timeout", "2")
        said = [str(word) for word in words]
        window = () if "--window-size" in said else ("--window-size", "3")
        return cli(command, "--engine", "generated", "--server", url, *given, *how, *window, *said)

    return call


def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return found


def test_rerank_writes_what_it_always_writes_and_what_it_cost(run: Run, tmp_path: Path) -> None:
    with ChatServer() as server:
        done = run(server.url, "--presentations", "2")
        assert done.exit_code == 0, done.output
        assert len(server.requests) == QUERIES * 2 * 2
        again = run(server.url, "--presentations", "2")
    assert again.exit_code == 0
    tables, _ = read_scores(tmp_path / "out" / "scores")
    assert {table.grades.shape for table in tables} == {(2, 5, 4)}
    assert not any(table.fallback.any() for table in tables)
    assert {value for table in tables for value in np.unique(table.probabilities())} == {0.0, 1.0}
    record = manifest(tmp_path / "out")
    assert record["cost"]["requests"] == record["cost"]["answers"] == 32
    assert record["cost"]["prompt_tokens"] == 3200
    assert record["server"] == server.url
    assert record["loaded"]["engine"]["engine"] == "generated"
    assert server.url not in json.dumps([record["settings"], record["loaded"]])


@pytest.mark.parametrize("trouble", ["killed", "slow", "500", "429", "truncated"])
def test_trouble_in_mid_run_keeps_what_is_finished_and_names_the_rest(run: Run, tmp_path: Path, trouble: str) -> None:
    hold = threading.Event()

    def reply(body: dict[str, Any], number: int) -> Reply | None:
        if number < 7:
            return good(body)
        if trouble == "killed":
            threading.Thread(target=server.stop, daemon=True).start()
            return None
        if trouble == "slow":
            hold.wait(3)
        return {
            "500": Reply("", 500),
            "429": Reply("", 429, {"Retry-After": "0"}),
            "truncated": Reply(good(body).body[:-20]),
        }.get(trouble, good(body))

    server = ChatServer(reply)
    broken = run(
        server.url,
        "--attempts",
        "2",
        "--server-timeout",
        "0.5" if trouble == "slow" else "5",
        "--cache",
        tmp_path / "kept",
    )
    hold.set()
    assert broken.exit_code == 7, broken.output
    assert "without an answer" in broken.output
    record = manifest(tmp_path / "out")
    finished, failed = read_scores(tmp_path / "out" / "scores")[0], record["failed"]
    assert len(finished) + len(failed) == QUERIES
    assert len(finished) >= 2
    assert not any(table.fallback.any() for table in finished)
    results = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert {r["query"]["qid"] for r in results if "error" in r} == set(failed)
    if trouble != "killed":
        server.stop()

    with ChatServer() as healthy:  # elsewhere, with the answers there are
        done = run(healthy.url, "--cache", tmp_path / "kept")
        assert done.exit_code == 0, done.output
        whole = manifest(tmp_path / "out")
    assert whole["failed"] == {}
    assert len(healthy.requests) == whole["cost"]["requests"] <= QUERIES * 2 - 7
    with ChatServer() as fresh:
        assert run(fresh.url, output="straight").exit_code == 0
    for name in ("run.trec", "results.jsonl"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


def test_no_server_is_a_failure_that_names_it(run: Run) -> None:
    url = closed_port()
    done = run(url, "--attempts", "2")
    assert done.exit_code == 6
    assert url in done.output
    assert "Traceback" not in done.output


def test_answers_without_grades_are_counted_and_the_others_ranked(run: Run, tmp_path: Path) -> None:
    def reply(body: dict[str, Any], number: int) -> Reply:
        grades: dict[str, int] = graded(body)
        if "tide and salt" in body["messages"][0]["content"]:
            grades.popitem()
        return completion(answer(grades))

    with ChatServer(reply) as server:
        done = run(server.url)
    assert done.exit_code == 0, done.output
    record = manifest(tmp_path / "out")
    assert record["grades_missing"] == record["without_grade"] == QUERIES * 3
    assert record["cost"]["windows_without_grades"] == {"the answer leaves documents out": QUERIES}
    assert "got no grade" in done.output


def test_label_takes_written_grades_of_several_orders(run: Run, tmp_path: Path) -> None:
    with ChatServer() as server:
        done = run(server.url, "--presentations", "3", command="label", output="labels")
    assert done.exit_code == 0, done.output
    labels = read_labels(tmp_path / "labels")
    assert labels.presentations == 3
    assert labels.manifest["teacher_model_id"] == "judge"
    label = labels["q0"]["d0"]
    assert label.scores == (2.0, 2.0, 2.0)
    assert label.grade_probabilities == (0.0, 0.0, 1.0, 0.0)
    assert manifest(tmp_path / "labels" / "teacher")["cost"]["answers"] == len(server.requests)


def test_evidence_is_graded_one_passage_at_a_time(run: Run, tmp_path: Path) -> None:
    def reply(body: dict[str, Any], number: int) -> Reply:
        assert len(shown(body)[1]) == 1
        item = {"id": "1", "reason": "as it says", "grade": 4 if graded(body)["1"] else 0}
        return completion(f"<think>hm</think>{json.dumps({'items': [item]})}")

    with ChatServer(reply) as server:
        how = ("--rubric", "evidence", "--window-size", "1", "--reasons", "--max-tokens", "6144")
        done = run(server.url, *how, "--request", '{"chat_template_kwargs": {"enable_thinking": true}}')
    assert done.exit_code == 0, done.output
    tables, _ = read_scores(tmp_path / "out" / "scores")
    assert tables[0].grades.shape == (1, 5, 5)
    assert tables[0].scores().tolist() == [[1.0, 0.0, 0.0, 0.0, 0.0]]
    assert server.requests[0]["chat_template_kwargs"] == {"enable_thinking": True}


def test_answers_stay_when_results_are_made_again_and_other_settings_have_their_own(run: Run, tmp_path: Path) -> None:
    with ChatServer() as server:
        assert run(server.url).exit_code == 0
        first = len(server.requests)
        assert run(server.url, "--overwrite").exit_code == 0
        assert len(server.requests) == first
        other = run(server.url, "--temperature", "0.7")
        assert other.exit_code == 2
        assert "engine_options.temperature" in other.output
        assert run(server.url, "--temperature", "0.7", "--overwrite").exit_code == 0
        assert len(server.requests) == 2 * first
    assert len(list((tmp_path / "out" / "answers").iterdir())) == 2


def test_a_cache_of_other_settings_is_refused(run: Run, tmp_path: Path) -> None:
    with ChatServer() as server:
        assert run(server.url, "--cache", tmp_path / "kept").exit_code == 0
        done = run(server.url, "--cache", tmp_path / "kept", "--request-seed", "3", output="other")
    assert done.exit_code == 2
    assert "other settings" in done.output


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--calibration", "capcal"), "grade probabilities"),
        (("--device", "cpu"), "--device means nothing"),
        (("--adapter", "x"), "--adapter means nothing"),
        (("--placeholder", "?"), "--placeholder"),
        (("--request", "[1]"), "JSON object"),
        (("--request", '{"stream": true}'), "stream"),
        (("--answer-form", "xml"), "answer-form"),
        (("--engine", "fake", "--reasons"), "--reasons means nothing"),
        (("--engine", "fake", "--temperature", "1"), "means nothing to --engine fake"),
    ],
)
def test_what_means_nothing_is_refused_before_anything_is_asked(run: Run, words: tuple[str, ...], why: str) -> None:
    with ChatServer() as server:
        done = run(server.url, *words)
    assert done.exit_code == 2, done.output
    assert why in done.output
    assert server.requests == []


def test_model_and_server_must_be_named(cli: Callable[..., Any], run: Run, tmp_path: Path) -> None:
    given = ("rerank", "--engine", "generated", "--pools", tmp_path / "pools", "--output", tmp_path / "out")
    for words, why in (((), "--model"), (("--model", "judge"), "--server")):
        done = cli(*given, *words)
        assert done.exit_code == 2
        assert why in done.output


def test_a_dry_run_counts_without_asking(run: Run) -> None:
    with ChatServer() as server:
        done = run(server.url, "--dry-run")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert (found["windows"], found["prompts"]) == (QUERIES * 2, QUERIES * 2)
    assert found["tokens"] > 1000
    assert server.requests == []


def test_settings_come_from_a_file_and_the_key_is_in_no_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PD_RERANK_API_KEY", "sk-very-secret")
    (tmp_path / "how.yaml").write_text("request:\n  reasoning_effort: low\nmax-tokens: 77\n", encoding="utf-8")
    reply = Reply('{"error": {"message": "sk-very-secret is over its limit"}}', 403)
    with ChatServer(lambda b, n: reply if n >= 9 else good(b)) as server:
        done = run(server.url, "--config", tmp_path / "how.yaml")
    assert done.exit_code == 7, done.output
    assert (server.requests[0]["reasoning_effort"], server.requests[0]["max_tokens"]) == ("low", 77)
    assert server.headers[0]["authorization"] == "Bearer sk-very-secret"
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"over its limit" in files
    assert b"secret" not in files + done.output.encode()
