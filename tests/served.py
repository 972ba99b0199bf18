"""The server's application without a socket, and on a socket of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from pd_rerank import FakeEngine, OCSFTBatchedReranker
from pd_rerank.config import LimitSettings
from pd_rerank.serving.app import Service, create_app
from pd_rerank.serving.server import listen

QUERY = "red apples"
DOCS = ["green pears", "red apples grow on trees", "apples"]
"""Word overlap 0, 1 and 1/2: best to worst they stand 1, 2, 0."""
BODY = {"query": QUERY, "documents": DOCS}


class Gated(FakeEngine):
    """Waits before each prompt until `gate` is open; `entered` is set once it waits."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.gate = threading.Event()
        self.entered = threading.Event()

    def _grade(self, prompt: Any, grades: int) -> Any:
        self.entered.set()
        assert self.gate.wait(20), "nobody opened the gate"
        return super()._grade(prompt, grades)


def ranker(engine: Any = None, **options: Any) -> OCSFTBatchedReranker:
    return OCSFTBatchedReranker("fake", verbose=0, engine=FakeEngine() if engine is None else engine, **options)


class Client(httpx.AsyncClient):
    """A client that has the server's service at hand."""

    service: Service


@asynccontextmanager
async def client(
    rankers: Any = None, *, token: str | None = None, log_texts: bool = False, **limits: Any
) -> AsyncIterator[Client]:
    app = create_app(rankers or ranker(), limits=LimitSettings(**limits), token=token, log_texts=log_texts)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        Client(transport=transport, base_url="http://server", timeout=30) as opened,
    ):
        opened.service = app.state.service
        yield opened


def run(work: Callable[[Client], Awaitable[Any]], rankers: Any = None, **options: Any) -> Any:
    """What `work` returns, given a client of a server of its own."""

    async def main() -> Any:
        async with client(rankers, **options) as opened:
            return await work(opened)

    return asyncio.run(main())


def ask(body: Any, rankers: Any = None, *, path: str = "/v1/rerank", **options: Any) -> httpx.Response:
    """One request to a server of its own."""
    response: httpx.Response = run(lambda c: c.post(path, json=body), rankers, **options)
    return response


@contextmanager
def on_socket(rankers: Any = None, *, token: str | None = None, **limits: Any) -> Iterator[tuple[str, Service]]:
    """A real server in a thread: its URL and its service."""
    app = create_app(rankers or ranker(), limits=LimitSettings(**limits), token=token)
    bound = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}", app.state.service
    finally:
        server.should_exit = True
        thread.join()
        bound.close()


async def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until something is so."""
    for _ in range(int(seconds * 200)):
        if true():
            return
        await asyncio.sleep(0.005)
    pytest.fail("it did not become so in time")
