"""Readers of the order study: a plain rule, a model in this process, an endpoint; and answers that are kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pd_rerank.config import load
from pd_rerank.engines.fake import FakeTokenizer
from pd_rerank.errors import EngineFailure
from pd_rerank.studies import order_reader
from pd_rerank.studies.order_reader import VERDICTS, Asked, ChatModel, Endpoint, Extractive, Kept
from pd_rerank.studies.order_settings import ReaderSettings
from tests.engines import chat_server
from tests.engines.tiny import tiny


def question(*passages: str) -> Asked:
    return Asked(kind="qa", text="Where was Ada Brenn born?", passages=passages)


def claim(*passages: str) -> Asked:
    return Asked(kind="claims", text="The school was founded by Otto Pell", passages=passages)


def reader(**said: Any) -> ReaderSettings:
    return load(ReaderSettings, given=said)


def test_the_plain_rule_reads_what_stands_first() -> None:
    read = Extractive().read
    one, other = "Ada Brenn was born in Gorlin.", "Ada Brenn was born in Delmar."
    assert read([question(one, other), question(other, one), question()]) == ["Gorlin", "Delmar", "unknown"]
    yes, no = "The school was founded by Otto Pell.", "The school was not founded by Otto Pell."
    said = read([claim(yes, no), claim(no, yes), claim("Otto Pell went home."), claim()])
    assert said == ["SUPPORTED", "REFUTED", "NEI", "NEI"]


def test_the_same_passages_in_the_same_order_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Asked] = []

    class Counted(Extractive):
        def read(self, given: Sequence[Asked]) -> list[str | None]:
            asked.extend(given)
            return super().read(given)

    monkeypatch.setattr(order_reader, "open_reader", lambda _: Counted())
    settings, (a, b) = reader(type="extractive"), ("Ada Brenn was born in Gorlin.", "It rains in Delmar.")
    kept = Kept(tmp_path, settings, "t")
    assert kept.read("q/1", [question(a, b), question(a, b), question(b, a)]) == ["Gorlin"] * 3
    assert len(asked) == 2
    assert Kept(tmp_path, settings, "t").read("q/1", [question(b, a), question(b)]) == ["Gorlin", "Delmar"]
    assert len(asked) == 3
    Kept(tmp_path, settings, "t").read("q 1", [question(b, a)])  # another query, and another file
    Kept(tmp_path, reader(type="extractive", top=2), "t").read("q/1", [question(b, a)])  # another reader
    assert len(asked) == 5
    assert len(list(tmp_path.rglob("*.json"))) == 3


class Characters(FakeTokenizer):
    """One token per character, as the tiny model's vocabulary has room for."""

    pad_token_id = 0

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return "".join(chr(i) for i in [int(i) for i in ids] if i > 2)


def test_a_model_answers_greedily_and_judges_by_the_likeliest_word() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    model = tiny("Llama", max_position_embeddings=1024)
    asked = question("Ada was born in Gorlin.")
    (said,) = ChatModel(model, Characters(), max_tokens=4).read([asked])

    def following(ids: list[int]) -> Any:
        with torch.inference_mode():
            return torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].float(), dim=-1)

    ids = [ord(c) for c in f"{asked.prompt} "]
    for _ in range(4):
        ids.append(int(following(ids).argmax()))
    assert said == "".join(chr(i) for i in ids[-4:] if i > 2)
    judged = claim("Otto Pell founded it.")
    (verdict,) = ChatModel(model, Characters(), max_tokens=4).read([judged])
    start = [ord(c) for c in f"{judged.prompt} "]
    sums = []
    for label in VERDICTS:
        total, so_far = 0.0, list(start)
        for c in label:
            total += float(following(so_far)[ord(c)])
            so_far.append(ord(c))
        sums.append(total)
    assert verdict == VERDICTS[sums.index(max(sums))]


def test_an_endpoint_is_asked_for_words_and_held_to_three_for_claims() -> None:
    def reply(body: dict[str, Any], number: int) -> chat_server.Reply:
        if "response_format" in body:
            labels = body["response_format"]["json_schema"]["schema"]["properties"]["verdict"]["enum"]
            return chat_server.completion(json.dumps({"verdict": labels[1]}))
        return chat_server.completion("Gorlin\nbecause it says so")

    with chat_server.ChatServer(reply) as server:
        settings = reader(type="server", model="m", server=server.url, request={"seed": 3})
        assert Endpoint(settings).read([question("a"), claim("b")]) == ["Gorlin\nbecause it says so", "REFUTED"]
        sent = server.requests[0]
    assert (sent["temperature"], sent["max_tokens"], sent["seed"]) == (0.0, 64, 3)


def test_an_endpoint_that_refuses_one_request_leaves_it_out_and_one_that_is_gone_is_an_error() -> None:
    def reply(body: dict[str, Any], number: int) -> chat_server.Reply:
        return chat_server.Reply("too long", status=400)

    with chat_server.ChatServer(reply) as server:
        assert Endpoint(reader(type="server", model="m", server=server.url)).read([question("a")]) == [None]

    def nobody(body: dict[str, Any], number: int) -> chat_server.Reply:
        return chat_server.Reply("no such model", status=404)

    with chat_server.ChatServer(nobody) as server, pytest.raises(EngineFailure, match="does not answer"):
        Endpoint(reader(type="server", model="m", server=server.url)).read([question("a")])
