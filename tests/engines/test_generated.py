"""Written grades from real servers on loopback: what is taken, what is refused, what is kept and what it cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pd_rerank.engines.base import Engine
from pd_rerank.engines.fake import FakeEngine
from pd_rerank.engines.generated import GeneratedEngine, _key_of, answer_schema, read_grades
from pd_rerank.errors import BadArgument, EngineFailure, InvalidData
from pd_rerank.pool import Candidate, Pool
from pd_rerank.prompt import ChatPrompt, GradePrompt
from pd_rerank.scores import ScoreTable
from pd_rerank.scoring import Scoring, score_pools
from tests.engines.chat_server import ChatServer, Replies, Reply, answer, closed_port, completion, good, graded

IDS = ("1", "2", "3")


def pool(query_id: str = "q1", texts: tuple[str, ...] = ("red apple pie", "red car", "blue sea", "apple pie")) -> Pool:
    candidates = (Candidate(doc_id=f"d{i}", text=text, routes={}, score=-float(i)) for i, text in enumerate(texts))
    return Pool(query_id=query_id, query="red apple pie", candidates=tuple(candidates))


def engine(url: str, **options: Any) -> GeneratedEngine:
    made = GeneratedEngine("judge", server=url, **({"server_timeout": 5.0} | options))
    made._client._backoff_s = 0.01
    return made


def score(
    made: GeneratedEngine, pools: list[Pool] | None = None, *, prompt: ChatPrompt | None = None, **scoring: Any
) -> list[ScoreTable]:
    return score_pools(pools or [pool()], engine=made, prompt=prompt or ChatPrompt(), scoring=Scoring(**scoring))


def grades(table: ScoreTable, top: int = 3) -> list[list[float]]:
    return (table.scores() * top).round(6).tolist()


# -- reading an answer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '{"items": [{"id": "1", "grade": 3}, {"id": "2", "grade": 0}, {"id": "3", "grade": 1}]}',
        '{"items": [{"id": "3", "grade": 1}, {"id": "1", "reason": "so", "grade": 3}, {"id": 2, "grade": 0}]}',
        '<think>{"items": [{"id": "1", "grade": 0}]}</think>\n{"items": [{"id": "1", "grade": 3}, '
        '{"id": "2", "grade": 0}, {"id": "3", "grade": 1}]}',
        'so I think …</think>{"items":[{"id":"1","grade":3},{"id":"2","grade":0},{"id":"3","grade":1}]}',
        '```json\n{"items":[{"id":"1","grade":3},{"id":"2","grade":0},{"id":"3","grade":1}]}\n```',
    ],
)
def test_grades_are_read_by_id_behind_thinking_and_fences(text: str) -> None:
    assert read_grades(text, ids=IDS, top=3) == [3, 0, 1]


@pytest.mark.parametrize(
    ("items", "why"),
    [
        ('[{"id":"1","grade":3},{"id":"2","grade":0}]', "leaves documents out"),
        ('[{"id":"1","grade":3},{"id":"2","grade":0},{"id":"3","grade":4}]', "not on the scale from 0 to 3"),
        ('[{"id":"1","grade":3},{"id":"2","grade":0},{"id":"3","grade":-1}]', "not on the scale"),
        ('[{"id":"1","grade":3},{"id":"2","grade":0},{"id":"3","grade":1.0}]', "not a whole number"),
        ('[{"id":"1","grade":3},{"id":"2","grade":0},{"id":"3","grade":"1"}]', "not a whole number"),
        ('[{"id":"1","grade":3},{"id":"2","grade":0},{"id":"3","grade":true}]', "not a whole number"),
        ('[{"id":"1","grade":3},{"id":"2","grade":0},{"id":"3","grade":null}]', "not a whole number"),
        ('[{"id":"1","grade":3},{"id":"2","grade":0},{"id":"2","grade":0}]', "twice"),
        ('[{"id":"1","grade":3},{"id":"2","grade":0},{"id":"4","grade":0}]', "not shown"),
        ('[{"id":"1","grade":3},{"id":"2","grade":0},{"id":[],"grade":0}]', "not shown"),
        ('[{"id":"1","grade":3},{"id":"2","grade":0},{"id":"3","grade":0,"sure":1}]', "not an object with an id"),
        ('[{"id":"1","grade":3,"grade":0},{"id":"2","grade":0},{"id":"3","grade":0}]', "key twice"),
        ('[{"id":"1","grade":3},{"id":"2","grade":0},{"id":"3","grade":NaN}]', "not JSON"),
        ('[{"id":"1","grade":3},{"id":"2","gra', "not JSON"),
        ("3", "not an object with one list"),
    ],
)
def test_anything_but_one_grade_each_is_refused(items: str, why: str) -> None:
    with pytest.raises(InvalidData, match=why):
        read_grades(f'{{"items": {items}}}', ids=IDS, top=3)


@pytest.mark.parametrize(
    "text", ["", "  ", "<think>well", "[1] Grade: 3", '{"items": [], "more": 1}', "[]", '{"grades": []}', "[" * 100_000]
)
def test_other_shapes_are_refused(text: str) -> None:
    with pytest.raises(InvalidData):
        read_grades(text, ids=("1",), top=3)


def test_thinking_that_never_ends_is_no_answer() -> None:
    for text in (' <think>{"items": [{"id": "1", "grade": 3}]}', "<think>a</think><reasoning>b"):
        with pytest.raises(InvalidData, match="inside its thinking"):
            read_grades(text, ids=("1",), top=3)


@pytest.mark.parametrize("before", ["", "<thinking>a draft: {}</thinking>", "it says </think> {} </think>"])
@pytest.mark.parametrize("quoted", ["</think>", "</think><think>", "<think>{}</think> {} </reasoning>"])
def test_an_end_of_thinking_in_a_reason_is_a_quotation(before: str, quoted: str) -> None:
    item = {"id": "1", "reason": f"the text says {quoted} and so on", "grade": 2}
    said = json.dumps({"items": [item]})
    assert read_grades(f"{before}{said}", ids=("1",), top=3) == [2]
    assert read_grades(f"{before}\n```json\n{said}\n```", ids=("1",), top=3) == [2]


def test_the_schema_allows_these_ids_and_grades_alone_and_reasons_come_first() -> None:
    item = answer_schema(IDS, grades=5, reasons=True)["properties"]["items"]["items"]
    assert list(item["properties"]) == item["required"] == ["id", "reason", "grade"]
    assert item["properties"]["id"]["enum"] == ["1", "2", "3"]
    assert item["properties"]["grade"]["enum"] == [0, 1, 2, 3, 4]
    assert item["additionalProperties"] is False
    assert "reason" not in answer_schema(IDS, grades=4)["properties"]["items"]["items"]["properties"]


# -- grading windows ---------------------------------------------------------------------------------------------------


def test_a_window_is_graded_over_several_orders() -> None:
    with ChatServer() as server:
        made = engine(server.url)
        (table,) = score(made, presentations=3, window=3)
    assert isinstance(made, Engine)
    assert server.paths[0] == "/v1/chat/completions"
    assert len(server.requests) == 6
    assert grades(table) == [[3, 1, 0, 2]] * 3
    assert not table.fallback.any()
    assert len({tuple(row) for row in table.slot.tolist()}) > 1
    assert table.probabilities()[0, 3].tolist() == [0, 0, 1, 0]


def test_one_document_is_graded_0_to_4_with_a_schema_and_a_reason() -> None:
    def evidence(body: dict[str, Any], number: int) -> Reply:
        (grade,) = graded(body, top=4).values()
        item = {"id": "1", "reason": "it says so", "grade": grade}
        return completion("<think>long</think>" + json.dumps({"items": [item]}))

    with ChatServer(evidence) as server:
        prompt = ChatPrompt(rubric="evidence", reasons=True)
        (table,) = score(engine(server.url, max_tokens=6144), prompt=prompt, window=1, presentations=4)
    assert len(server.requests) == 4
    assert grades(table, top=4) == [[4, 1, 0, 3]] * 4
    sent = server.requests[0]
    assert (sent["model"], sent["temperature"], sent["max_tokens"]) == ("judge", 0.0, 6144)
    assert sent["response_format"]["json_schema"]["strict"] is True
    assert [message["role"] for message in sent["messages"]] == ["user"]


def test_fields_of_the_request_are_added_and_taken_out() -> None:
    own = {"max_tokens": None, "max_completion_tokens": 99, "temperature": None, "reasoning_effort": "low"}
    with ChatServer() as server:
        score(engine(f"{server.url}/api/v2/", request=own, answer_form="text", request_seed=7))
    assert set(server.requests[0]) == {"model", "messages", "max_completion_tokens", "reasoning_effort", "seed"}
    assert server.paths == ["/api/v2/chat/completions"]


@pytest.mark.parametrize(
    ("content", "also", "why"),
    [
        ('{"items": [{"id": "1", "gra', {"finish_reason": "length"}, "cut off at max_tokens"),
        (answer({"1": 3, "2": 0}), {"finish_reason": "length"}, "cut off at max_tokens"),
        ('{"items": [{"id": "1", "gra', {}, "not JSON"),
        ("<think>and on and on", {}, "inside its thinking"),
        (answer({"1": 3}), {}, "leaves documents out"),
        (answer({"1": 3, "2": 9}), {}, "not on the scale"),
        (None, {}, "holds no text"),
    ],
)
def test_an_answer_that_is_not_as_asked_gives_no_grade_in_its_window_and_is_counted(
    content: str | None, also: dict[str, Any], why: str
) -> None:
    def one_bad(body: dict[str, Any], number: int) -> Reply:
        return completion(content, **also) if "blue sea" in body["messages"][0]["content"] else good(body)

    with ChatServer(one_bad) as server:
        made = engine(server.url)
        (table,) = score(made, window=2)
    # Round robin: d0 and d2 stand in one window, d1 and d3 in the other.
    assert table.fallback.tolist() == [[True, False, True, False]]
    assert np.isnan(table.grades[0, 0]).all()
    assert grades(table)[0][1::2] == [1, 2]
    (reason,) = made.cost()["windows_without_grades"]
    assert why in reason
    assert made.cost()["windows_without_grades"][reason] == 1
    assert len(server.requests) == 2


def test_a_request_the_server_refuses_has_no_grades_but_the_others_do() -> None:
    def too_long(body: dict[str, Any], number: int) -> Reply:
        long = "blue sea" in body["messages"][0]["content"]
        return Reply('{"error": {"message": "prompt too long"}}', 400) if long else good(body)

    with ChatServer(too_long) as server:
        made = engine(server.url)
        (table,) = score(made, window=1)
    assert table.fallback.tolist() == [[False, False, True, False]]
    assert made.cost()["windows_without_grades"] == {"the server refuses the request, HTTP 400": 1}


def test_a_server_that_refuses_everything_is_an_error_with_its_words_and_the_cure() -> None:
    reply = Reply('{"error": {"message": "response_format is not supported"}}', 400)
    with ChatServer(lambda *_: reply) as server, pytest.raises(EngineFailure, match=r"not supported.*answer_form"):
        score(engine(server.url))


def test_a_model_that_never_answers_as_asked_is_an_error_before_the_job_goes_on() -> None:
    texts = tuple(f"text {i}" for i in range(8))
    with ChatServer(lambda *_: completion("I cannot do that.")) as server:
        with pytest.raises(EngineFailure, match=r"8 of 8 answers .* not JSON"):
            score(engine(server.url), [pool(texts=texts)], window=1)
        (table,) = score(engine(server.url), [pool(texts=texts[:7])], window=1)
    assert table.fallback.all()


def test_grades_come_after_500_429_hanging_up_and_half_an_answer() -> None:
    replies: dict[int, Reply | None] = {
        0: Reply("", 500),
        1: Reply("", 429, {"Retry-After": "0.05"}),
        2: None,
        3: Reply('{"choices": [{"mess'),
    }
    with ChatServer(lambda body, n: replies.get(n, good(body))) as server:
        made = engine(server.url)
        (table,) = score(made)
    assert grades(table) == [[3, 1, 0, 2]]
    cost = made.cost()
    assert (cost["requests"], cost["retries"], cost["answers"]) == (5, 4, 1)
    assert cost["prompt_tokens"] is None
    assert (cost["prompt_tokens_known"], cost["requests_without_prompt_tokens"]) == (100, 4)


@pytest.mark.parametrize("fault", ["refused", "slow", "fault"])
def test_windows_the_server_left_unanswered_are_an_error_never_a_grade(fault: str) -> None:
    import time

    def reply(body: dict[str, Any], number: int) -> Reply:
        if fault == "slow":
            time.sleep(0.4)
        return Reply("", 503)

    with ChatServer(reply) as server:
        url = closed_port() if fault == "refused" else server.url
        made = engine(url, attempts=2, server_timeout=0.2)
        with pytest.raises(EngineFailure, match="left 1 of 1 windows without an answer"):
            score(made)
    assert made.cost()["requests"] == (0 if fault == "refused" else 2)


def test_what_was_answered_before_a_failure_is_not_asked_again() -> None:
    down = [True]

    def reply(body: dict[str, Any], number: int) -> Reply:
        return Reply("", 500) if down[0] and "blue sea" in body["messages"][0]["content"] else good(body)

    with ChatServer(reply) as server:
        made = engine(server.url, attempts=1)
        with pytest.raises(EngineFailure, match="1 of 4"):
            score(made, window=1)
        down[0], before = False, len(server.requests)
        (table,) = score(made, window=1)
    assert len(server.requests) == before + 1
    assert grades(table) == [[3, 1, 0, 2]]


def test_equal_windows_are_asked_for_once() -> None:
    with ChatServer() as server:
        tables = score(engine(server.url), [pool("q1"), pool("q2")])
    assert len(server.requests) == 1
    assert grades(tables[0]) == grades(tables[1])


def test_progress_counts_every_window_once(tmp_path: Path) -> None:
    with ChatServer() as server:
        for _ in range(2):
            counted: list[int] = []
            pools = [pool("q1"), pool("q2"), pool("q3", ("red", "green"))]
            made = engine(server.url, cache=tmp_path / "answers")
            score_pools(pools, engine=made, prompt=ChatPrompt(), scoring=Scoring(window=2), progress=counted.append)
            assert sum(counted) == 5


def test_slot_prompts_and_bad_settings_are_refused() -> None:
    with ChatServer() as server:
        made = engine(server.url)
        with pytest.raises(BadArgument, match="ChatPrompt"):
            score_pools([pool()], engine=made, prompt=GradePrompt(FakeEngine().tokenizer), scoring=Scoring())
        for wrong in (
            {"answer_form": "yaml"},
            {"max_tokens": 0},
            {"request": {"messages": []}},
            {"request": {"API-Key": "sk-1"}},
            {"request": {"temperature": float("nan")}},
            {"concurrency": 0},
        ):
            with pytest.raises(BadArgument):
                engine(server.url, **wrong)
    with pytest.raises(BadArgument, match="server"):
        GeneratedEngine("judge")


# -- what is kept ----------------------------------------------------------------------------------------------------


def test_kept_answers_are_never_asked_for_twice_whatever_the_host(tmp_path: Path) -> None:
    with ChatServer() as first:
        tables = score(engine(first.url, cache=tmp_path / "answers"), presentations=2)
    with ChatServer() as second:
        made = engine(second.url, cache=tmp_path / "answers")
        again = score(made, presentations=2)
    assert len(first.requests) == 2
    assert second.requests == []
    assert np.array_equal(tables[0].grades, again[0].grades)
    cost = made.cost()
    assert (cost["requests"], cost["answers_from_cache"], cost["prompt_tokens"]) == (0, 2, 0)
    assert cost["all_runs"]["requests"] == 2
    assert cost["all_runs"]["prompt_tokens"] == 200


@pytest.mark.parametrize(
    "other",
    [
        {"temperature": 0.5},
        {"max_tokens": 17},
        {"request_seed": 1},
        {"answer_form": "text"},
        {"request": {"reasoning_effort": "high"}},
    ],
)
def test_answers_made_with_other_settings_are_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    folder = tmp_path / "answers"
    with ChatServer() as server:
        score(engine(server.url, cache=folder))
        with pytest.raises(BadArgument, match="other settings"):
            engine(server.url, cache=folder, **other)
        with pytest.raises(BadArgument, match=r"\(model differ\)"):
            GeneratedEngine("another", server=server.url, cache=folder)


def test_whatever_is_sent_is_in_the_key_of_an_answer() -> None:
    body = {"model": "a", "messages": [{"role": "user", "content": "b"}], "seed": 1, "response_format": {"type": "c"}}
    others = [body | {name: "other"} for name in body] + [{k: v for k, v in body.items() if k != "seed"}]
    assert len({_key_of(one) for one in (body, *others)}) == 6
    assert _key_of(dict(reversed(body.items()))) == _key_of(body)


def test_other_prompts_are_other_answers(tmp_path: Path) -> None:
    with ChatServer() as server:
        for prompt in (ChatPrompt(), ChatPrompt(instruction="Grade otherwise."), ChatPrompt(markers="roman")):
            score(engine(server.url, cache=tmp_path / "answers"), prompt=prompt)
        score(engine(server.url, cache=tmp_path / "answers"), order="reverse")
    assert len(server.requests) == 4


def test_a_folder_of_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs.txt").write_text("x")
    with pytest.raises(BadArgument, match="other files"):
        engine("http://127.0.0.1:9", cache=tmp_path)
    with pytest.raises(BadArgument, match="is a file"):
        engine("http://127.0.0.1:9", cache=tmp_path / "theirs.txt")


@pytest.mark.parametrize("damage", ["", "{}", '{"text": 3}', "moved"])
def test_a_damaged_answer_is_asked_for_again(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "answers"
    with ChatServer() as server:
        score(engine(server.url, cache=folder), window=2)
        one, two = sorted(folder.glob("answers/*/*.json"))
        one.write_text(two.read_text() if damage == "moved" else damage)
        (table,) = score(engine(server.url, cache=folder), window=2)
    assert len(server.requests) == 3
    assert grades(table) == [[3, 1, 0, 2]]


def test_malformed_answers_are_kept_and_unanswered_requests_are_not(tmp_path: Path) -> None:
    def reply(body: dict[str, Any], number: int) -> Reply:
        text = body["messages"][0]["content"]
        return completion("no") if "blue sea" in text else Reply("", 503) if "red car" in text else good(body)

    replies: list[Replies] = [reply, good]
    with ChatServer(lambda body, n: replies[0](body, n)) as server:
        with pytest.raises(EngineFailure):
            score(engine(server.url, cache=tmp_path / "answers", attempts=1), window=1)
        replies.reverse()
        before = len(server.requests)
        (table,) = score(engine(server.url, cache=tmp_path / "answers"), window=1)
    assert len(server.requests) == before + 1
    assert table.fallback.tolist() == [[False, False, True, False]]


# -- what it cost ----------------------------------------------------------------------------------------------------


def test_use_is_added_up_and_the_models_named() -> None:
    with ChatServer() as server:
        made = engine(server.url)
        score(made, window=1)
    cost = made.cost()
    assert (cost["requests"], cost["answers"], cost["retries"]) == (4, 4, 0)
    assert (cost["prompt_tokens"], cost["completion_tokens"]) == (400, 40)
    assert cost["answered_by"] == {"served-1": 4}


def test_use_the_server_does_not_report_is_unknown_not_0() -> None:
    def silent(body: dict[str, Any], number: int) -> Reply:
        return completion(answer(graded(body)), usage=None if number else {"prompt_tokens": 50}, model=None)

    with ChatServer(silent) as server:
        made = engine(server.url, concurrency=1)
        score(made, window=2)
    cost = made.cost()
    assert cost["prompt_tokens"] is None
    assert cost["prompt_tokens_known"] == 50
    assert cost["requests_without_prompt_tokens"] == 1
    assert cost["completion_tokens"] is None
    assert cost["requests_without_completion_tokens"] == 2
    assert cost["answered_by"] == {"unknown": 2}


def test_no_key_stands_in_what_is_kept_or_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PD_RERANK_API_KEY", "sk-very-secret")
    with ChatServer() as server:
        made = engine(server.url, cache=tmp_path / "answers")
        score(made)
    assert server.headers[0]["authorization"] == "Bearer sk-very-secret"
    written = "".join(path.read_text() for path in tmp_path.rglob("*.json"))
    assert written
    assert "secret" not in written + json.dumps(made.describe()) + json.dumps(made.cost())
    assert server.url not in written
