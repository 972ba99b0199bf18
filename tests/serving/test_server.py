"""The server on a real socket: bodies that stall or overflow, clients that leave, and an end that loses nothing."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from rerankers import Document, Reranker
from typer.testing import CliRunner

from pd_rerank import BadArgument, FakeEngine
from pd_rerank.cli import app
from pd_rerank.cli.serve import adapters, token
from pd_rerank.config import ServeSettings
from pd_rerank.serving.server import listen
from tests.served import BODY, DOCS, QUERY, Gated, on_socket, ranker, until

REPO = Path(__file__).resolve().parents[2]


def test_rerankers_own_api_client_gets_the_librarys_answer() -> None:
    docs = [Document(text, doc_id=i) for text, i in zip(DOCS, "abc", strict=True)]
    alone = ranker().rank(QUERY, docs)
    with on_socket(token="k") as (url, _):
        for provider, path in (("cohere", "/v1/rerank"), ("jina", "/v1/rerank"), ("cohere", "/rerank")):
            client = Reranker("any-name", model_type=provider, api_key="k", url=f"{url}{path}", verbose=0)
            found = client.rank(QUERY, docs)
            assert [(r.doc_id, r.score, r.rank) for r in found.results] == [
                (r.doc_id, r.score, r.rank) for r in alone.results
            ]


def raw(url: str, *parts: bytes, pause: float = 0.0) -> bytes:
    """What comes back for bytes sent over a socket of our own."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as wire:
        for part in parts:
            wire.sendall(part)
            time.sleep(pause)
        found = b""
        while chunk := wire.recv(65536):
            found += chunk
        return found


HEAD = b"POST /v1/rerank HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"


def test_a_body_that_stalls_is_408_and_one_that_overflows_413_however_it_is_sent() -> None:
    big = json.dumps(BODY | {"documents": ["x" * 1000] * 50}).encode()
    with on_socket(max_body=20_000, timeout=0.3) as (url, service):
        assert raw(url, HEAD + b"Content-Length: 100\r\n\r\n", b'{"query"').startswith(b"HTTP/1.1 408")
        assert raw(url, HEAD + b"Content-Length: %d\r\n\r\n" % len(big) + big).startswith(b"HTTP/1.1 413")
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (big[:30_000], big[30_000:])) + b"0\r\n\r\n"
        assert raw(url, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks).startswith(b"HTTP/1.1 413")
        huge = httpx.post(f"{url}/v1/rerank", json=BODY | {"documents": ["x" * 300_000]})
        assert (huge.status_code, huge.json()["code"]) == (413, "too_large")
        assert httpx.post(f"{url}/v1/rerank", json=BODY).status_code == 200
        assert service._under_way == 0


def test_a_client_that_disconnects_frees_its_work() -> None:
    engine = Gated()
    big = BODY | {"documents": [f"document {i}" for i in range(400)]}

    async def main(url: str, service: Any) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=20) as c:
            running = asyncio.create_task(c.post("/v1/rerank", json=big))
            await until(engine.entered.is_set)
            waiting = asyncio.create_task(c.post("/v1/rerank", json=big))
            await until(lambda: service.batcher.queued == 20)
            running.cancel()
            waiting.cancel()
            await until(lambda: service._under_way == 0)
            assert service.batcher.queued == 0
            engine.gate.set()
            assert (await c.post("/v1/rerank", json=BODY)).status_code == 200
            page = (await c.get("/metrics")).text
            assert "pd_rerank_disconnected_total 2.0" in page

    with on_socket(ranker(engine)) as (url, service):
        asyncio.run(main(url, service))
    assert engine.prompts == 2  # of 41: one under way when its client left, and the last request's


async def keep_asking(url: str, answered: set[str], *, clients: int, headers: Any = None) -> None:
    """Clients that ask one request after another until no connection is taken, and check every answer."""
    expected = [(int(r.document.doc_id), r.score) for r in ranker().rank(QUERY, DOCS)]

    async def one(number: int) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=20, headers=headers) as c:
            for i in itertools.count():
                name = f"{number}-{i}"
                try:
                    response = await c.post("/v1/rerank", json=BODY, headers={"x-request-id": name})
                except httpx.TransportError:
                    return
                assert response.status_code == 200, response.text
                assert [(r["index"], r["relevance_score"]) for r in response.json()["results"]] == expected
                answered.add(name)

    await asyncio.gather(*map(one, range(clients)))


def accepted(records: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Status by id of the requests a log tells of."""
    return {record["id"]: record["status"] for record in records if "-" in record.get("id", "")}


def test_stopping_under_load_answers_everything_that_was_taken_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pd_rerank.serving")
    answered: set[str] = set()
    with on_socket(ranker(FakeEngine(delay=0.01)), batch_windows=2) as (url, _):
        asking = threading.Thread(target=lambda: asyncio.run(keep_asking(url, answered, clients=20)))
        asking.start()
        while len(answered) < 30:
            time.sleep(0.01)
    asking.join()
    told = accepted(record.fields for record in caplog.records if record.message == "request")  # type: ignore[attr-defined]
    assert set(told) == answered
    assert set(told.values()) == {200}


def test_the_command_serves_what_it_is_told_until_sigterm_and_then_ends_with_0() -> None:
    words = ["--engine", "fake", "--port", "0", "--window-size", "2", "--served-name", "mine", "--drain", "0.7"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pd_rerank", "serve", *words, "--batch-windows", "2"],
        cwd=REPO,
        env={**os.environ, "PD_RERANK_TOKEN": "of-mine"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    log = [process.stderr.readline()]
    reading = threading.Thread(target=lambda: log.extend(process.stderr or ()))
    answered: set[str] = set()

    async def main(url: str) -> None:
        headers = {"authorization": "Bearer of-mine"}
        asking = asyncio.create_task(keep_asking(url, answered, clients=8, headers=headers))
        await until(lambda: len(answered) > 20)
        async with httpx.AsyncClient(base_url=url, headers=headers) as c:
            answer = (await c.post("/v2/rerank", json=BODY | {"details": True})).json()
            assert (answer["model"], answer["scoring"]["window"]) == ("mine", 2)
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.3)
            assert (await c.get("/ready")).status_code == 503
            assert (await c.get("/health")).status_code == 200
        await asking

    try:
        url = json.loads(log[0])["url"]
        reading.start()
        deadline = time.monotonic() + 20
        while not any("startup complete" in line for line in log) and time.monotonic() < deadline:
            time.sleep(0.02)
        asyncio.run(main(url))
        assert process.wait(20) == 0
        reading.join()
    finally:
        process.kill()
        process.stderr.close()
    assert accepted(map(json.loads, log)) == dict.fromkeys(answered, 200)
    assert "of-mine" not in "".join(log)


# -- before anything is loaded -----------------------------------------------------------------------------


def command(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["serve", *words])
    return result.exit_code, result.stderr


def test_what_cannot_be_served_is_told_in_a_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert command("--engine", "fake", "--port", port) == (
            2,
            f"error: 127.0.0.1:{port} is in use; choose another --port or --host\n",
        )
    for words, code, told in (
        (["--host", "no.such.host.invalid"], 2, "no such address"),
        (["--engine", "fake", "--adapter", "x"], 2, "--adapter means nothing to --engine fake"),
        (["--adapter", "a=x", "--adapter", "a=y"], 2, "two adapters are called 'a'"),
        (["--presentations", "30"], 2, "above --max-presentations 20"),
        (["--port", "0", "--residual", "none.json"], 4, "no file none.json"),
        (["--port", "0", "--model", "no/such/folder/at/all"], 4, "no/such/folder/at/all"),
    ):
        found, line = command(*words)
        assert found == code, line
        assert told in line


@pytest.mark.parametrize("given", ["", "two words", "späße", "new\nline"])
def test_a_token_no_header_can_carry_is_refused_unshown(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PD_RERANK_TOKEN", given)
    with pytest.raises(BadArgument, match="PD_RERANK_TOKEN") as caught:
        token()
    assert not given or given not in str(caught.value)


def test_what_is_served_is_named_by_name_folder_or_model(tmp_path: Path) -> None:
    here = str(tmp_path)
    for given, names in (
        ({}, {"smollm2-135m": None}),
        ({"served_name": "x"}, {"x": None}),
        ({"engine": "fake"}, {"fake": None}),
        ({"model": here}, {tmp_path.name: None}),
        ({"adapter": here}, {tmp_path.name: here}),
        ({"adapter": [f"a={here}", "team/b"]}, {"a": here, "team/b": "team/b"}),
        ({"adapter": [f"a={here}"], "served_name": "x"}, {"x": here}),
    ):
        assert adapters(ServeSettings(**given)) == names
    with pytest.raises(BadArgument, match="served-name"):
        adapters(ServeSettings(adapter=["a=1", "b=2"], served_name="x"))
    with pytest.raises(BadArgument, match="--adapter NAME=THEIRS"):
        adapters(ServeSettings(engine="server", adapter=["a=1", "b=2"], served_as="x"))
    assert adapters(ServeSettings(engine="server", adapter=["a=1"], served_as="x")) == {"a": "1"}


def test_a_socket_on_any_port_is_free_again_once_closed() -> None:
    bound = listen("127.0.0.1", 0)
    port = bound.getsockname()[1]
    bound.close()
    listen("127.0.0.1", port).close()
