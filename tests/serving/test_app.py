"""What the server answers: the shapes clients know, what more they may ask for, and every refusal."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import numpy as np
import pytest

from pd_rerank import BadArgument, EngineFailure, FakeEngine, OCSFTBatchedReranker, Settle, Threshold
from pd_rerank.serving.app import PATHS, create_app
from pd_rerank.serving.schemas import Problem, RerankResponse
from tests.served import BODY, DOCS, QUERY, Client, Gated, ask, ranker, run, until


def direct(
    docs: list[str] = DOCS, *, query: str = QUERY, engine: Any = None, **options: Any
) -> list[tuple[int, float]]:
    """Index and score of each document, best first, from the library itself."""
    return [(int(r.document.doc_id), r.score) for r in ranker(engine, **options).rank(query, docs)]


def answered(response: httpx.Response) -> list[tuple[int, float]]:
    assert response.status_code == 200, response.text
    RerankResponse.model_validate(response.json())
    return [(r["index"], r["relevance_score"]) for r in response.json()["results"]]


def problem(response: httpx.Response) -> tuple[int, str]:
    """Status and code of a refusal, whose body is held to its shape."""
    told = Problem.model_validate(response.json())
    assert told.message == told.detail
    assert response.headers["content-type"] == "application/json"
    return response.status_code, told.code


# -- the shapes clients know --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*PATHS, *(f"{path}/" for path in PATHS)])
def test_every_path_answers_what_the_library_does(path: str) -> None:
    assert answered(ask(BODY, path=path)) == direct()


def test_the_answer_has_coheres_and_jinas_fields_and_no_others_unless_asked() -> None:
    answer = ask(BODY | {"model": "rerank-v3.5", "top_n": 2}).json()
    assert set(answer) == {"id", "model", "results", "usage", "meta"}
    assert answer["model"] == "fake"
    assert answer["usage"]["total_tokens"] == answer["meta"]["tokens"]["input_tokens"] > 100
    assert [set(result) for result in answer["results"]] == [{"index", "relevance_score"}] * 2
    assert [result["index"] for result in answer["results"]] == [1, 2]


def test_documents_come_back_where_asked_as_they_were_given() -> None:
    docs = ["apples", {"text": "red apples", "id": 7}, {"text": "pears"}]
    answer = ask({"query": QUERY, "documents": docs, "return_documents": True}).json()
    assert [r["document"] for r in answer["results"]] == [{"text": "red apples", "id": 7}, {"text": "apples"}, docs[2]]


def test_rank_fields_are_read_a_line_each() -> None:
    docs = [{"title": "red", "body": "apples", "text": "nothing"}, {"title": "green", "body": "pears"}]
    answer = answered(ask({"query": QUERY, "documents": docs, "rank_fields": ["title", "body"]}))
    assert answer == direct(["red\napples", "green\npears"])


def test_what_other_servers_know_and_this_does_not_is_taken_and_told() -> None:
    asked = BODY | {"max_tokens_per_doc": 100, "truncation": True, "user": None, "priority": 0}
    assert ask(asked).json()["meta"]["warnings"] == [
        f"'{name}' has no effect on this server" for name in ("max_tokens_per_doc", "truncation", "priority")
    ]


@pytest.mark.parametrize(
    "docs", [[], [""], ["  ", "\n"], ["a"] * 45, ["x", "x", "red apples", "x"], ["\x00", "[end of 1]", "é" * 3000]]
)
def test_odd_lists_of_documents_are_answered_as_the_library_does(docs: list[str]) -> None:
    assert answered(ask({"query": QUERY, "documents": docs})) == direct(docs)


def test_half_a_surrogate_pair_comes_back_as_it_came() -> None:
    body = b'{"query": "red \\ud83c apples", "documents": ["apples \\udf4e", "pears"], "return_documents": true}'
    response = run(lambda c: c.post("/rerank", content=body, headers={"content-type": "application/json"}))
    assert response.status_code == 200
    assert response.json()["results"][0]["document"] == {"text": "apples \udf4e"}


# -- what more may be asked ----------------------------------------------------------------------------------


def test_details_tell_rank_spread_grades_and_cut_and_how_scores_were_made() -> None:
    engine = FakeEngine(position_bias=0.4)
    answer = ask(BODY | {"details": True, "presentations": 4, "seed": 3}, ranker(engine)).json()
    alone = ranker(FakeEngine(position_bias=0.4), presentations=4, seed=3).rank(QUERY, DOCS)
    assert [(r["rank"], r["spread"], tuple(r["grade_probabilities"]), r["cut"]) for r in answer["results"]] == [
        (r.rank, r.spread, r.grade_probabilities, r.cut) for r in alone
    ]
    assert answer["results"][0]["spread"] > 0
    shown = answer["scoring"]
    assert (shown["presentations"], shown["seed"], shown["windows"]) == (4, 3, 4)


def test_a_threshold_marks_and_counts_and_leaves_out_only_where_asked() -> None:
    marked = ask(BODY | {"threshold": 0.4}).json()
    assert [r["retained"] for r in marked["results"]] == [True, True, False]
    assert marked["decision"] == {"threshold": 0.4, "retained": 2}
    left = ask(BODY | {"threshold": 0.4, "retained_only": True, "details": True}).json()
    assert [(r["index"], r["rank"]) for r in left["results"]] == [(1, 1), (2, 2)]
    assert left["decision"]["retained"] == 2


def test_the_servers_own_threshold_shows_only_to_those_who_ask() -> None:
    served = ranker(threshold=Threshold(value=0.9))
    assert "decision" not in ask(BODY, served).json()
    assert ask(BODY | {"retained_only": True}, served).json()["decision"] == {"threshold": 0.9, "retained": 1}


def test_order_and_presentations_of_a_request_win_over_the_servers() -> None:
    biased = {"position_bias": 0.5}
    served = ranker(FakeEngine(**biased), presentations=2)
    assert answered(ask(BODY, served)) == direct(engine=FakeEngine(**biased), presentations=2)
    for options in ({"presentations": 1, "order": "reverse"}, {"presentations": 5, "order": "canonical", "seed": 9}):
        assert answered(ask(BODY | options, served)) == direct(engine=FakeEngine(**biased), **options)


def test_several_adapters_are_told_apart_by_adapter_or_model_name() -> None:
    by_length = FakeEngine(relevance=lambda _, text: 1 / len(text))
    served = {"one": ranker(), "two": ranker(by_length)}

    async def work(c: Client) -> list[Any]:
        asked = [{}, {"adapter": "two"}, {"model": "two"}, {"model": "else"}, {"adapter": "tow"}]
        return await asyncio.gather(*(c.post("/v1/rerank", json=BODY | more) for more in asked))

    *good, bad = run(work, served, batch_wait=0.1)
    assert [(r.json()["model"], r.json()["results"][0]["index"]) for r in good] == [
        ("one", 1),
        ("two", 2),
        ("two", 2),
        ("one", 1),
    ]
    assert problem(bad) == (422, "unknown_adapter")
    assert "did you mean two" in bad.json()["message"]


def test_a_reranker_that_settles_early_is_not_served() -> None:
    with pytest.raises(BadArgument, match="settle"):
        create_app(ranker(presentations=5, settle=Settle(top_k=1)))


def test_documents_without_a_grade_come_last_without_a_score() -> None:
    engine = FakeEngine(missing=lambda text: text == "apples")
    answer = ask(BODY, ranker(engine)).json()
    assert [(r["index"], r["relevance_score"] is None) for r in answer["results"]] == [
        (1, False),
        (0, False),
        (2, True),
    ]
    assert "1 of 3 documents no grade" in answer["meta"]["warnings"][0]


# -- refusals ----------------------------------------------------------------------------------------------------


def test_the_token_is_asked_for_and_told_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    token = "s3cret-token-of-mine"

    async def work(c: Client) -> list[httpx.Response]:
        sent = [None, "", "Bearer", f"Bearer {token}x", f"Basic {token}", f"bearer {token}", "Bearer " + token]
        headers = [{} if value is None else {"authorization": value} for value in sent]
        return [await c.post("/v1/rerank", json=BODY, headers=h) for h in headers] + [
            await c.get("/metrics"),
            await c.get("/metrics", headers=headers[-1]),
            await c.get("/health"),
            await c.get("/ready"),
            await c.get("/openapi.json"),
        ]

    answers = run(work, token=token)
    assert [r.status_code for r in answers] == [401] * 5 + [200] * 2 + [401, 200, 200, 200, 200]
    assert problem(answers[0]) == (401, "unauthorized")
    assert answers[0].headers["www-authenticate"] == "Bearer"
    assert not any(token in r.text for r in answers)
    assert token not in caplog.text
    assert not any(token in str(vars(record)) for record in caplog.records)


@pytest.mark.parametrize(
    ("more", "limits", "status", "code"),
    [
        ({}, {"max_documents": 2}, 422, "too_many_documents"),
        ({"presentations": 4}, {"max_presentations": 3}, 422, "too_many_presentations"),
        ({}, {"max_body": 50}, 413, "too_large"),
        ({"query": "word " * 400}, {}, 422, "unscorable"),
    ],
)
def test_limits_are_told_with_both_numbers(more: Any, limits: dict[str, Any], status: int, code: str) -> None:
    response = ask(BODY | more, ranker(FakeEngine(max_length=1500)), **limits)
    assert problem(response) == (status, code)
    assert any(str(number) in response.json()["message"] for number in [*limits.values(), 1500])


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"content-type": "text/plain"}, "not_json"),
        ({"content-type": "application/x-www-form-urlencoded"}, "not_json"),
        ({"content-type": "application/json", "content-encoding": "gzip"}, "encoded"),
    ],
)
def test_bodies_of_other_kinds_are_415(headers: dict[str, str], code: str) -> None:
    content = json.dumps(BODY).encode()
    assert problem(run(lambda c: c.post("/v1/rerank", content=content, headers=headers))) == (415, code)


def test_unknown_paths_and_methods_are_told_as_json() -> None:
    assert problem(run(lambda c: c.get("/v1/rerank"))) == (405, "method_not_allowed")
    assert problem(run(lambda c: c.post("/v1/embed", json={}))) == (404, "not_found")
    assert problem(run(lambda c: c.get("/health/"))) == (404, "not_found")


def test_a_full_house_is_429_with_retry_after() -> None:
    engine = Gated()

    async def work(c: Client) -> list[httpx.Response]:
        first = asyncio.create_task(c.post("/v1/rerank", json=BODY))
        await until(engine.entered.is_set)
        second = asyncio.create_task(c.post("/v1/rerank", json=BODY))
        await until(lambda: c.service.batcher.queued == 1)
        refused = [await c.post("/v1/rerank", json=BODY)]
        engine.gate.set()
        return [*refused, await first, await second]

    for limits, code in (({"max_requests": 2}, "queue_full"), ({"max_queue": 1}, "queue_full")):
        engine.gate.clear()
        engine.entered.clear()
        full, *others = run(work, ranker(engine), **limits)
        assert problem(full) == (429, code)
        assert 1 <= int(full.headers["retry-after"]) <= 60
        assert [answered(r) for r in others] == [direct()] * 2


def test_a_request_larger_than_the_queue_is_taken_when_nobody_waits() -> None:
    assert answered(ask(BODY, ranker(window=1), max_queue=1)) == direct(window=1)


def test_a_late_answer_is_504_and_its_work_is_dropped() -> None:
    engine = Gated()

    async def work(c: Client) -> httpx.Response:
        late = [asyncio.create_task(c.post("/v1/rerank", json=BODY)) for _ in range(3)]
        answers = await asyncio.gather(*late)
        assert c.service.batcher.queued == 0
        engine.gate.set()
        await until(lambda: c.service.batcher.busy == 0)
        assert answers[0].status_code == answers[2].status_code
        return answers[0]

    assert problem(run(work, ranker(engine), timeout=0.2)) == (504, "deadline")
    assert engine.prompts == 1


class Broken(FakeEngine):
    """Fails on the texts it is told to fail on, as an engine does or as nobody foresaw."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error
        self.healed = False

    def grade_logits(self, prompts: Any, grade_ids: Any, *, progress: Any = None) -> Any:
        if not self.healed and any("poison" in self.tokenizer.decode(p.token_ids.tolist()) for p in prompts):
            raise self.error
        return super().grade_logits(prompts, grade_ids, progress=progress)


@pytest.mark.parametrize(
    ("error", "code"), [(EngineFailure("cuda: out of memory\n#1 frame"), "engine_failed"), (KeyError("x"), "internal")]
)
def test_a_failing_engine_is_500_without_its_insides_and_harms_no_neighbour(error: Exception, code: str) -> None:
    async def work(c: Client) -> list[httpx.Response]:
        bodies = [BODY, BODY | {"query": "poison"}, BODY]
        return await asyncio.gather(*(c.post("/v1/rerank", json=body) for body in bodies))

    first, failed, last = run(work, ranker(Broken(error)), batch_wait=0.1)
    assert answered(first) == answered(last) == direct()
    assert problem(failed) == (500, code)
    assert "frame" not in failed.text
    assert "KeyError" not in failed.text
    assert failed.json()["id"] == failed.headers["x-request-id"]


def test_an_engine_that_fails_again_and_again_has_to_prove_itself() -> None:
    engine = Broken(EngineFailure("gone"))

    async def work(c: Client) -> list[int]:
        bad = BODY | {"query": "poison"}
        seen = [(await c.get("/ready")).status_code]
        for _ in range(3):
            await c.post("/v1/rerank", json=bad)
        c.service.batcher._last_failed = sick
        seen += [(await c.get(path)).status_code for path in ("/ready", "/health")]
        engine.healed = True
        return [*seen, (await c.get("/health")).status_code, (await c.get("/ready")).status_code]

    sick = ranker(engine, instruction="poison")
    assert run(work, sick) == [200, 503, 503, 200, 200]


# -- what is told to those who watch -------------------------------------------------------------------------


def test_logs_hold_no_texts_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    engine = FakeEngine(missing=lambda text: text == "apples")
    ask(BODY, ranker(engine))
    ask(BODY | {"documents": [5]}, ranker(engine))

    def told() -> list[dict[str, Any]]:
        return [record.fields for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]

    assert [(f["status"], f.get("windows")) for f in told()] == [(200, 1), (422, None)]
    everything = " ".join(str(vars(record)) for record in caplog.records)
    assert "apples" not in everything
    ask(BODY, ranker(engine), log_texts=True)
    assert (told()[-1]["query"], told()[-1]["texts"]) == (QUERY, DOCS)


def test_metrics_count_requests_documents_windows_and_tokens() -> None:
    engine = FakeEngine()

    async def work(c: Client) -> tuple[int, str]:
        answer = await c.post("/v1/rerank", json=BODY | {"presentations": 6})
        await c.post("/v1/rerank", json={})
        return answer.json()["usage"]["total_tokens"], (await c.get("/metrics")).text

    tokens, page = run(work, ranker(engine))
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert values['pd_rerank_requests_total{status="200"}'] == values['pd_rerank_requests_total{status="422"}'] == "1.0"
    assert float(values["pd_rerank_documents_total"]) == 3
    assert float(values["pd_rerank_windows_total"]) == engine.prompts > 1
    assert float(values["pd_rerank_prompt_tokens_total"]) == tokens
    assert float(values["pd_rerank_queue_windows"]) == float(values["pd_rerank_requests_under_way"]) == 0
    assert float(values["process_resident_memory_bytes"]) > 1e6


def test_the_openapi_page_describes_the_model_and_the_request() -> None:
    served = ranker(window=7, threshold=0.25)
    page = run(lambda c: c.get("/openapi.json"), {"mine": served}, token="x").json()
    for shown in ("### mine", "window: `7`", "threshold: `0.25`", served.prompt.hash, "engine: `fake`"):
        assert shown in page["info"]["description"]
    post = page["paths"]["/v1/rerank"]["post"]
    assert {"query", "documents", "top_n", "threshold"} <= set(
        post["requestBody"]["content"]["application/json"]["schema"]["properties"]
    )
    assert {"200", "401", "413", "422", "429", "504"} <= set(post["responses"])
    assert post["security"]


def test_an_id_sent_is_kept_and_one_that_could_forge_a_log_line_is_not() -> None:
    async def work(c: Client) -> list[str]:
        sent = ["trace-1.a", "x" * 65, 'a"b', "a b"]
        return [(await c.post("/rerank", json=BODY, headers={"x-request-id": i})).json()["id"] for i in sent]

    first, *others = run(work)
    assert first == "trace-1.a"
    assert all(len(i) == 32 for i in others)


def test_answers_hold_no_nan() -> None:
    engine = FakeEngine(missing=lambda _: True)
    response = ask(BODY | {"details": True, "threshold": 0.5}, ranker(engine))
    assert response.status_code == 200
    assert [r["relevance_score"] for r in response.json()["results"]] == [None] * 3
    assert response.json()["decision"]["retained"] == 0
    assert not np.isnan(response.json()["usage"]["total_tokens"])


def test_a_client_that_leaves_while_it_waits_leaves_the_queue() -> None:
    engine = Gated()

    async def work(c: Client) -> None:
        first = asyncio.create_task(c.post("/v1/rerank", json=BODY))
        await until(engine.entered.is_set)
        second = asyncio.create_task(c.post("/v1/rerank", json=BODY))
        await until(lambda: c.service.batcher.queued == 1)
        second.cancel()
        await until(lambda: c.service.batcher.queued == 0)
        engine.gate.set()
        assert answered(await first) == direct()

    run(work, ranker(engine))
    assert engine.prompts == 1


@pytest.mark.real_model
def test_a_real_model_answers_over_http_what_it_does_in_the_library() -> None:
    served = OCSFTBatchedReranker("smollm2-135m", verbose=0, dtype="float32", order="canonical", window=2)
    queries = {QUERY: DOCS, "how long do bees live": ["Bees live six weeks.", "Honey keeps.", "", "The ferry leaves."]}

    async def work(c: Client) -> list[httpx.Response]:
        return await asyncio.gather(
            *(c.post("/v1/rerank", json={"query": q, "documents": docs}) for q, docs in queries.items())
        )

    for (query, docs), response in zip(queries.items(), run(work, served, batch_wait=0.1), strict=True):
        alone = [(r.document.doc_id, r.score) for r in served.rank(query, docs)]
        assert [i for i, _ in answered(response)] == [i for i, _ in alone]
        assert [s for _, s in answered(response)] == pytest.approx([s for _, s in alone], abs=1e-5)
