"""The process around the application: its socket, its signals, and an end that loses nothing it took on."""

from __future__ import annotations

import errno
import signal
import socket
import time

import uvicorn
from fastapi import FastAPI

from pd_rerank.errors import BadArgument

_IDLE_SECONDS = 75
"""Longer than clients and balancers commonly keep an idle connection, so that they close it and not we."""


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to an address; one that is taken or not ours is `BadArgument`."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise BadArgument(f"--host {host}: no such address ({error.strerror})") from error
    family, _, _, _, address = found[0]
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened on ({error.strerror})"
        raise BadArgument(f"{host}:{port} {why}; choose another --port or --host") from error
    bound.set_inheritable(True)
    return bound


def run(app: FastAPI, bound: socket.socket, *, timeout: float, drain: float = 0.0) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish what was taken on; `timeout` bounds how long any request takes.

    After the signal /ready says no; `drain` seconds later no connection is taken any more, requests under way are
    answered, and this returns (after Ctrl-C: raises KeyboardInterrupt). A second Ctrl-C ends it at once.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=int(timeout) + 5,
    )
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again when all is done
    try:
        _Server(config, drain=drain).run(sockets=[bound])
    finally:
        signal.signal(signal.SIGTERM, before)
        bound.close()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, *, drain: float) -> None:
        super().__init__(config)
        self._drain = drain
        self._told: float | None = None

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; whether to stop taking requests."""
        stop = await super().on_tick(counter)
        if not stop:
            return False
        if self._told is None:
            self._told = time.monotonic()
            self.config.app.state.service.draining = True  # type: ignore[union-attr]
        return self.force_exit or time.monotonic() - self._told >= self._drain
