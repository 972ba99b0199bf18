"""A hundred and more bodies that are no request: each is refused with a sentence, none brings the server down."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from pd_rerank.serving.schemas import Refusal, RerankRequest, parse
from tests.served import BODY, Client, run, until

Q: dict[str, Any] = {"query": "q"}

TOO_LARGE = (b"1e999", b"-1e999", b'[{"y": [1E+400]}]', b"-" + b"9" * 400 + b".5")

NOT_JSON: list[bytes] = [
    b"",
    b" ",
    b"{",
    b"}",
    b"[",
    b'{"query"',
    b'{"query":',
    b'{"query": "q", "documents": ["a"]',
    b'{"query": "q", "documents": ["a"],}',
    b'{"query": "q" "documents": ["a"]}',
    b"{'query': 'q', 'documents': ['a']}",
    b'{query: "q"}',
    b'{"query": "q", "documents": [a]}',
    b'{"query": "q\n", "documents": ["a"]}',
    b'{"query": "\\x", "documents": ["a"]}',
    b'{"query": "q", "documents": ["a"]} trailing',
    b'{"query": "q", "documents": ["a"]}{}',
    b'{"query": "q", "documents": ["a"], "threshold": NaN}',
    b'{"query": "q", "documents": ["a"], "threshold": Infinity}',
    b'{"query": "q", "documents": ["a"], "threshold": -Infinity}',
    *(b'{"query": "q", "documents": ["a"], "%b": %b1e999}' % at for at in ((b"threshold", b""), (b"user", b"-"))),
    *(b'{"query": "q", "documents": [{"text": "a", "x": %b}], "return_documents": true}' % x for x in TOO_LARGE),
    b'{"query": "q", "documents": ["a"], "top_n": 0x10}',
    b'{"query": "q", "documents": ["a"], "top_n": 01}',
    b'{"query": "q", "documents": ["a"], "top_n": ' + b"9" * 5000 + b"}",
    b"\xff\xfe\x00",
    b'{"query": "\xe9", "documents": ["a"]}',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"query=q&documents=a",
    b"<query>q</query>",
    b"query: q\ndocuments: [a]\n",
    b"\x00" * 20,
    b"\x1f\x8b\x08\x00\x00\x00\x00\x00",
    b"undefined",
    b"None",
    b"True",
    b'"half',
    b'{"query": "q", "documents": ["a" , , "b"]}',
    b"// comment\n{}",
    b"data: {}\n\n",
]

NO_REQUEST: list[Any] = [
    *(None, True, 1, 1.5, "query", [], ["q"], [BODY], {}),
    Q,
    {"documents": ["a"]},
    *(
        {"query": value, "documents": ["a"]}
        for value in (None, 1, True, [], {}, ["q"], {"text": "q"}, "", "  ", "\n\t")
    ),
    *(Q | {"documents": value} for value in (None, 1, True, "a", {}, {"0": "a"})),
    *(Q | {"documents": [value]} for value in (None, 1, 2.5, True, [], ["a"], {}, {"text": None}, {"text": 1})),
    *(Q | {"documents": [value]} for value in ({"text": ["a"]}, {"text": {}}, {"txt": "a"}, {"image": "http://x"})),
    Q | {"documents": ["a", "b", None]},
    Q | {"documents": ["a"] * 1001},
    *(BODY | {"top_n": value} for value in (0, -1, "3", 2.5, 1.0, True, [], 1e300)),
    *(BODY | {"return_documents": value} for value in ("yes", 1, [], "true")),
    *(BODY | {"model": value} for value in (1, [], {}, True)),
    *(BODY | {"threshold": value} for value in ("0.5", [], True, {})),
    *(BODY | {"presentations": value} for value in (0, -1, "2", 21, 10**9, 1.5, True)),
    *(BODY | {"order": value} for value in ("random", "", 1, [])),
    *(BODY | {"seed": value} for value in ("1", 1.5, 2**63, -(2**64), True)),
    *(BODY | {"adapter": value} for value in ("none-such", "", 1, "../../etc/passwd")),
    *(BODY | {"details": value, "retained_only": value} for value in ("x", 2)),
    *(
        BODY | {"rank_fields": value}
        for value in ([], "text", [1], {"a": 1}, ["a", "a"], [f"f{i}" for i in range(101)])
    ),
    {"query": "q", "documents": [{"title": "t"}], "rank_fields": ["body"]},
    {"query": "q", "documents": [{"title": ["t"]}], "rank_fields": ["title"]},
    *(BODY | {name: 1} for name in ("top_k", "Query", "document", "__class__", "self", "x" * 5000, "\n", "")),
    {"texts": ["a"], "query": "q"},
    {"input": ["a"], "query": "q"},
]


def test_none_of_them_is_answered_or_brings_the_server_down() -> None:
    bodies = NOT_JSON + [json.dumps(body).encode() for body in NO_REQUEST]
    assert len(bodies) > 100

    async def work(c: Client) -> list[httpx.Response]:
        headers = {"content-type": "application/json"}
        return [await c.post("/v1/rerank", content=body, headers=headers) for body in bodies] + [
            await c.post("/v1/rerank", json=BODY)
        ]

    *refused, last = run(work)
    assert last.status_code == 200
    for body, response in zip(bodies, refused, strict=True):
        told = response.json()
        assert response.status_code == (400 if body in NOT_JSON else 422), (body[:80], response.text)
        assert set(told) == {"message", "detail", "code", "field", "id"}, body[:80]
        assert 10 < len(told["message"]) < 300, (body[:80], told["message"])
        assert told["message"].isprintable(), body[:80]
        assert "Traceback" not in response.text, body[:80]
        assert ".py" not in response.text, body[:80]


def refused(body: Any) -> tuple[str, str | None]:
    response = run(lambda c: c.post("/v1/rerank", json=body))
    return response.json()["message"], response.json()["field"]


def test_the_sentence_names_the_place_and_the_cure() -> None:
    assert refused(BODY | {"top_k": 3}) == ("unknown field 'top_k'; did you mean top_n?", "top_k")
    assert refused(Q | {"documents": ["a", 5]}) == (
        "documents[1]: a document is a string or an object with 'text', this is a number",
        "documents[1]",
    )
    assert refused(Q | {"documents": ["a", {"image": "x"}]}) == (
        "documents[1] has no 'text'; only text is ranked",
        "documents[1]",
    )
    assert refused(Q) == ("documents is missing; a request has query and documents", "documents")
    assert refused(BODY | {"top_n": 0, "order": "x"})[0] == "top_n: input should be greater than or equal to 1 (1 more)"


MANY = 200_000
BULKY: dict[str, tuple[Any, str]] = {
    "documents": (Q | {"documents": [1] * MANY}, f"documents: {MANY}, this server takes 1000 a request"),
    "keys": (
        BODY | {f"k{i}": 1 for i in range(MANY)},
        f"unknown field 'k0'; known are query, .* \\({MANY - 1} more\\)",
    ),
    "rank_fields": (BODY | {"rank_fields": [1] * MANY}, f"rank_fields: {MANY}, there may be 100"),
    "wrong": (Q | {"documents": ["a", *[1] * 999]}, r"documents\[1\]: a document is a string or an object with 'text'"),
}


@pytest.mark.parametrize("what", BULKY)
def test_what_comes_in_any_number_is_refused_at_once_and_not_item_by_item(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RerankRequest, "model_validate", lambda _: pytest.fail("pydantic makes an error of each"))
    body, told = BULKY[what]
    with pytest.raises(Refusal, match=told) as refusal:
        parse(json.dumps(body).encode(), max_documents=1000)
    assert refusal.value.status == 422


def test_others_are_answered_while_a_large_body_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def slow(body: bytes, *, max_documents: int) -> RerankRequest:
        reading.set()
        assert go_on.wait(20), "nobody was answered meanwhile"
        return parse(body, max_documents=max_documents)

    monkeypatch.setattr("pd_rerank.serving.app.parse", slow)

    async def work(c: Client) -> tuple[int, httpx.Response]:
        large = asyncio.create_task(c.post("/v1/rerank", json=Q | {"documents": [1] * MANY}))
        await until(reading.is_set)
        health = await c.get("/health")
        go_on.set()
        return health.status_code, await large

    health, refusal = run(work)
    assert (health, refusal.status_code, refusal.json()["code"]) == (200, 422, "too_many_documents")
