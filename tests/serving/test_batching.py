"""Requests scored together: who shares an engine call, who does not, and whose work is dropped."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_rerank import FakeEngine, score_pools
from pd_rerank.prompt import GradePrompt
from pd_rerank.reranker import pool_of
from pd_rerank.scoring import Scoring
from pd_rerank.serving.batching import windows_read
from pd_rerank.windows import PARTITIONS
from tests.served import BODY, Client, Gated, ranker, run, until


class Calls(FakeEngine):
    """Keeps the query and documents of each prompt of each call."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.texts: list[list[str]] = []

    def grade_logits(self, prompts: Any, grade_ids: Any, *, progress: Any = None) -> Any:
        self.texts.append([self.tokenizer.decode(p.token_ids.tolist()) for p in prompts])
        return super().grade_logits(prompts, grade_ids, progress=progress)


class Held(Calls, Gated):
    """Keeps its calls, and waits at the gate."""


def body(query: str, n: int = 2, **more: Any) -> dict[str, Any]:
    return {"query": query, "documents": [f"document {i} of {query}" for i in range(n)], **more}


def together(bodies: list[Any], engine: Calls, **options: Any) -> list[Any]:
    """The answers to requests sent at once, by a server that gives them time to meet."""

    async def work(c: Client) -> list[Any]:
        return await asyncio.gather(*(c.post("/v1/rerank", json=b) for b in bodies))

    return [r.json() for r in run(work, ranker(engine), **{"batch_wait": 0.2, **options})]


def test_requests_that_meet_share_one_engine_call_and_no_prompt() -> None:
    engine = Calls()
    answers = together([body(f"query{i}") for i in range(5)], engine)
    assert engine.calls == 1
    assert len(engine.texts[0]) == 5
    for i, text in enumerate(engine.texts[0]):
        assert [f"query{j}" in text for j in range(5)] == [j == i for j in range(5)]
    assert [len(a["results"]) for a in answers] == [2] * 5


def test_requests_with_other_settings_do_not_share_a_call() -> None:
    engine = Calls()
    asked = [{}, {"presentations": 2}, {"order": "canonical"}, {"presentations": 2}, {}]
    answers = together([body(f"q{i}", 3, **more) for i, more in enumerate(asked)], engine)
    assert sorted(map(len, engine.texts)) == [1, 2, 4]
    assert all(len(a["results"]) == 3 for a in answers)


def test_a_batch_holds_no_more_windows_than_allowed_but_always_the_oldest() -> None:
    engine = Held()

    async def work(c: Client) -> None:
        sent = [asyncio.create_task(c.post("/v1/rerank", json=body("first")))]
        await until(engine.entered.is_set)
        for i, n in enumerate((100, 21, 20, 41, 20), 1):  # of 5, 2, 1, 3, 1 windows
            sent.append(asyncio.create_task(c.post("/v1/rerank", json=body(f"q{i}", n))))
            await until(lambda i=i: c.service.batcher.busy == i + 1)  # type: ignore[misc]
        engine.gate.set()
        await asyncio.gather(*sent)

    run(work, ranker(engine), batch_windows=4, batch_wait=0)
    assert [len(texts) for texts in engine.texts] == [1, 5, 4, 3]


def test_one_at_a_time_is_a_batch_of_one_window() -> None:
    engine = Calls()
    together([body(f"q{i}") for i in range(4)], engine, batch_windows=1)
    assert [len(texts) for texts in engine.texts] == [1] * 4


def test_an_engine_call_nobody_waits_for_ends_between_two_windows() -> None:
    engine = Held()

    async def work(c: Client) -> None:
        sent = asyncio.create_task(c.post("/v1/rerank", json=body("big", 1000)))
        await until(engine.entered.is_set)
        sent.cancel()
        await until(lambda: c.service.batcher._running[0].gone)
        engine.gate.set()
        await until(lambda: c.service.batcher.busy == 0)
        assert (await c.post("/v1/rerank", json=BODY)).status_code == 200

    run(work, ranker(engine))
    assert engine.prompts == 2  # of 51


def test_a_neighbour_that_leaves_does_not_end_the_call_of_those_who_stay() -> None:
    engine = Held()

    async def work(c: Client) -> None:
        sent = [asyncio.create_task(c.post("/v1/rerank", json=body(f"q{i}", 60))) for i in range(2)]
        await until(engine.entered.is_set)
        sent[0].cancel()
        await until(lambda: any(job.gone for job in c.service.batcher._running))
        engine.gate.set()
        assert len((await sent[1]).json()["results"]) == 60

    run(work, ranker(engine), batch_wait=0.2)
    assert (engine.calls, engine.prompts) == (1, 6)


def test_closing_ends_what_runs_and_cancels_what_waits() -> None:
    engine = Held()

    async def work(c: Client) -> list[int]:
        sent = [asyncio.create_task(c.post("/v1/rerank", json=body(f"q{i}", 60))) for i in range(2)]
        await until(engine.entered.is_set)
        closing = asyncio.create_task(c.service.batcher.close())
        await asyncio.sleep(0)
        engine.gate.set()
        await closing
        return [(await s).status_code for s in sent]

    assert run(work, ranker(engine), batch_windows=1, timeout=1) == [504, 504]
    assert engine.prompts < 6


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 12),
    window=st.integers(1, 5),
    partition=st.sampled_from(PARTITIONS),
    presentations=st.integers(1, 4),
    shuffle=st.sampled_from(["pool", "window"]),
    calibration=st.sampled_from(["none", "capcal"]),
)
def test_windows_read_counts_the_prompts_an_engine_was_given(n: int, **scoring: Any) -> None:
    engine = FakeEngine()
    pool = pool_of("q", ["" if i % 5 == 4 else f"text {i}" for i in range(n)])
    (table,) = score_pools([pool], engine=engine, prompt=GradePrompt(engine.tokenizer), scoring=Scoring(**scoring))
    assert windows_read(table, probes=scoring["calibration"] == "capcal") == engine.prompts


def test_tokens_are_told_apart_between_requests_of_a_batch() -> None:
    bodies = [body("a" * n, n) for n in (1, 5, 30)]
    alone = [together([b], Calls())[0]["usage"]["total_tokens"] for b in bodies]
    for order in itertools.permutations(range(3)):
        answers = together([bodies[i] for i in order], Calls(), batch_wait=0.02)
        assert [a["usage"]["total_tokens"] for a in answers] == [alone[i] for i in order]


def test_scores_do_not_depend_on_who_shares_the_call() -> None:
    rng = np.random.default_rng(0)
    bodies = [body(f"q{i}", int(rng.integers(1, 50)), presentations=int(rng.integers(1, 4))) for i in range(30)]
    engine = Calls(position_bias=0.4, companion_bias=0.2)
    alone = ranker(FakeEngine(position_bias=0.4, companion_bias=0.2))
    for asked, answer in zip(bodies, together(bodies, engine), strict=True):
        view = ranker(alone.engine, presentations=asked["presentations"])
        expected = [(r.document.doc_id, r.score) for r in view.rank(asked["query"], asked["documents"])]
        assert [(r["index"], r["relevance_score"]) for r in answer["results"]] == expected
    assert engine.calls < 10


@pytest.mark.parametrize("waited", [0.0, 0.3])
def test_a_lone_request_waits_for_company_no_longer_than_it_is_told(waited: float) -> None:
    engine = Calls()

    async def work(c: Client) -> float:
        return float((await c.post("/v1/rerank", json=BODY)).elapsed.total_seconds())

    assert run(work, ranker(engine), batch_wait=waited) >= waited
