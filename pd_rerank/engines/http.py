"""Many requests to one HTTP server: bounded, patient with what may pass, and quick to give up on what will not.

Connection errors, timeouts, 429 and 5xx are tried again with exponential back-off and jitter; `Retry-After` holds all
requests back. Three things keep a server in trouble from being flooded: 429 halves how many requests are under way,
retries are paid from a budget that only successes refill, and after enough faults in a row nothing is sent for a while.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pd_rerank._extras import need
from pd_rerank.errors import BadArgument, InvalidData, whole

logger = logging.getLogger("pd_rerank")

KEY_VARIABLE = "PD_RERANK_API_KEY"
"""The environment variable an API key is read from unless another is named."""

Kind = Literal["unreachable", "slow", "busy", "fault", "broken", "rejected", "given_up"]
"""No connection; no answer in time; 429; 5xx; an answer cut off or malformed; another 4xx or 3xx; not sent any more."""

_RETRIED: frozenset[Kind] = frozenset({"unreachable", "slow", "busy", "fault", "broken"})
_FOR_ALL = {
    401: "the key is missing or wrong",
    402: "the account is empty",
    404: "no such address or model",
    405: "no such address",
}
"""What one answer says of every request to come."""

_OF_REQUEST = (400, 413, 422)


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """An answer with a status of 2xx: its whole `body`, `headers` in lower case.

    It took `attempts`, of which `connected` reached the server, and the last of them `seconds`.
    """

    status: int
    body: bytes
    headers: Mapping[str, str]
    attempts: int = 1
    connected: int = 1
    seconds: float = 0.0

    def json(self) -> Any:
        """The body as JSON; anything else is `InvalidData`, which as a `check` of `post_many` is tried again."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise InvalidData(f"the answer is not JSON ({error}); it is {len(self.body)} bytes long") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why there is no answer, in words that hold no secret; of `attempts`, `connected` reached the server."""

    kind: Kind
    reason: str
    status: int | None = None
    attempts: int = 0
    connected: int = 0
    retry_after: float | None = field(default=None, compare=False)

    @property
    def of_request(self) -> bool:
        """Whether the server refused this very request, so that it would again."""
        return self.kind == "rejected" and self.status in _OF_REQUEST


OnDone = Callable[[int, Response | Failure], None]
"""Called in the caller's thread with a request's place and its outcome, as each is done."""


class Client:
    """Sends requests to one server.

    `base_url` is http or https, without user, query or fragment. A request is tried `attempts` times, each at most
    `timeout_s` between signs of life and twice that in all; all requests of one call share `deadline_s`. At most
    `concurrency` are under way. `backoff_s` is the first wait, doubled each time up to `max_wait_s`; a server that
    asks for longer fails the request. After `faults` attempts in a row that the server did not answer (default: twice
    `concurrency`, at least 8) requests fail at once for `cool_down_s`, then one is tried. The key, if any, is read from
    `key_variable` in the environment and shown nowhere. Redirects are not followed.
    """

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float = 120.0,
        attempts: int = 5,
        concurrency: int = 8,
        key_variable: str | None = KEY_VARIABLE,
        deadline_s: float | None = None,
        backoff_s: float = 0.5,
        max_wait_s: float = 60.0,
        faults: int | None = None,
        cool_down_s: float = 30.0,
        max_bytes: int = 256 * 2**20,
    ) -> None:
        for name, count in (("attempts", attempts), ("concurrency", concurrency), ("max_bytes", max_bytes)):
            if not whole(count) or count < 1:
                raise BadArgument(f"{name} must be a whole number of at least 1, got {count!r}")
        for name, seconds in (("timeout_s", timeout_s), ("deadline_s", deadline_s)):
            if seconds is not None and not seconds > 0:
                raise BadArgument(f"{name} must be seconds above 0, got {seconds!r}")
        self.base_url = checked_url(base_url)
        self.timeout_s = timeout_s
        self.attempts = attempts
        self.concurrency = concurrency
        self.deadline_s = deadline_s
        self._backoff_s = backoff_s
        self._max_wait_s = max_wait_s
        self._max_bytes = max_bytes
        self._key = _key(key_variable)
        self._httpx = need("httpx", extra="server", purpose="servers are called with 'httpx'")
        self._gate = _Gate(concurrency, faults=faults or max(8, 2 * concurrency), cool_down_s=cool_down_s)
        self._random = random.Random()
        headers = {"content-type": "application/json", "user-agent": "pd-rerank"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
            parts = urlsplit(self.base_url)
            if parts.scheme == "http" and parts.hostname not in ("127.0.0.1", "localhost", "::1"):
                logger.warning(
                    "the API key goes to %s unencrypted; use https where the network is shared", parts.netloc
                )
        self._client = self._httpx.Client(
            headers=headers,
            timeout=self._httpx.Timeout(timeout_s, connect=min(10.0, timeout_s), pool=None),
            limits=self._httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            follow_redirects=False,
            verify=self.base_url.startswith("https:"),  # reading the certificates takes a second
        )
        self._close = weakref.finalize(self, self._client.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; a client that is dropped closes them itself."""
        self._close()

    def get(self, path: str, *, check: Callable[[Response], object] | None = None) -> Response | Failure:
        """Get one address under `base_url`; see `post_many`."""
        return self._all("GET", path, [b""], on_done=None, check=check)[0]

    def post_many(
        self,
        path: str,
        bodies: Sequence[Mapping[str, Any] | bytes],
        *,
        on_done: OnDone | None = None,
        check: Callable[[Response], object] | None = None,
    ) -> list[Response | Failure]:
        """Post every body, mappings as JSON, to `path` under `base_url`; outcomes in the order of the bodies.

        `check` is called in a worker's thread with each answer; an `InvalidData` it raises makes the answer broken,
        which is tried again. What `on_done` raises, and Ctrl-C, end the call and drop what is under way.
        """
        contents = [body if isinstance(body, bytes) else json.dumps(body).encode() for body in bodies]
        return self._all("POST", path, contents, on_done=on_done, check=check)

    def _all(
        self,
        method: str,
        path: str,
        contents: Sequence[bytes],
        *,
        on_done: OnDone | None,
        check: Callable[[Response], object] | None,
    ) -> list[Response | Failure]:
        url = f"{self.base_url}/{path.lstrip('/')}"
        until = math.inf if self.deadline_s is None else time.monotonic() + self.deadline_s
        stop = threading.Event()
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[int, Response | Failure | BaseException]] = queue.SimpleQueue()
        for i in range(len(contents)):
            todo.put(i)

        def work() -> None:
            while True:
                try:
                    i = todo.get_nowait()
                except queue.Empty:
                    return
                try:
                    done.put((i, self._persist(method, url, contents[i], until=until, stop=stop, check=check)))
                except BaseException as error:
                    done.put((i, error))

        # Daemons: a thread that waits for a slow server must not keep an interrupted process alive.
        for _ in range(min(self.concurrency, len(contents))):
            threading.Thread(target=work, daemon=True, name="pd_rerank-http").start()
        outcomes: list[Any] = [None] * len(contents)
        try:
            for _ in contents:
                i, outcome = done.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                outcomes[i] = outcome
                if on_done is not None:
                    on_done(i, outcome)
        finally:
            stop.set()
            self._gate.wake()
        return outcomes

    def _persist(
        self,
        method: str,
        url: str,
        content: bytes,
        *,
        until: float,
        stop: threading.Event,
        check: Callable[[Response], object] | None,
    ) -> Response | Failure:
        """One request with its retries."""
        connected, last = 0, None
        for attempt in range(1, self.attempts + 1):
            if refusal := self._gate.enter(until=until, stop=stop):
                before = f"; before that: {last.reason}" if last else ""
                return Failure(kind="given_up", reason=f"{refusal}{before}", attempts=attempt - 1, connected=connected)
            outcome: Response | Failure | None = None
            try:
                outcome = self._attempt(method, url, content, until=until, check=check)
            finally:
                self._gate.leave(outcome)
            if isinstance(outcome, Response):
                return replace(outcome, attempts=attempt, connected=connected + 1)
            connected += outcome.kind != "unreachable"
            last = replace(outcome, attempts=attempt, connected=connected)
            if outcome.kind not in _RETRIED or attempt == self.attempts:
                return last
            if (asked := outcome.retry_after or 0.0) > self._max_wait_s:
                return replace(last, reason=f"{last.reason}; it asks to wait {asked:.0f} s, longer than is waited for")
            if outcome.kind != "busy" and not self._gate.pay():
                return replace(last, reason=f"{last.reason}; too many requests failed to try each again")
            wait = min(self._max_wait_s, self._backoff_s * 2 ** (attempt - 1)) * self._random.uniform(0.5, 1.0)
            if time.monotonic() + asked + wait >= until:
                return replace(last, reason=f"{last.reason}; no time was left to try again")
            stop.wait(asked + wait)
        raise AssertionError("attempts are at least 1")

    def _attempt(
        self, method: str, url: str, content: bytes, *, until: float, check: Callable[[Response], object] | None
    ) -> Response | Failure:
        httpx, start = self._httpx, time.monotonic()
        limit = min(until, start + 2 * self.timeout_s)
        try:
            with self._client.stream(method, url, content=content) as answer:
                body = bytearray()
                for chunk in answer.iter_bytes():
                    body += chunk
                    if time.monotonic() > limit:
                        return Failure(kind="slow", reason=f"the answer was not whole after {limit - start:.0f} s")
                    if len(body) > self._max_bytes:
                        return Failure(kind="rejected", reason=f"the answer is longer than {self._max_bytes} bytes")
                status, headers = answer.status_code, {k.lower(): v for k, v in answer.headers.items()}
        except httpx.TimeoutException as error:
            if isinstance(error, httpx.ConnectTimeout):
                return Failure(kind="unreachable", reason=f"no connection to {self.base_url} in time")
            return Failure(kind="slow", reason=f"no answer within {self.timeout_s:g} s")
        except httpx.ConnectError as error:
            return Failure(kind="unreachable", reason=f"no connection to {self.base_url} ({self._clean(str(error))})")
        except (httpx.TransportError, httpx.DecodingError) as error:
            return Failure(kind="broken", reason=f"the connection broke ({self._clean(str(error))})")
        if not 200 <= status < 300:
            return self._refused(status, bytes(body), headers)
        response = Response(status=status, body=bytes(body), headers=headers, seconds=time.monotonic() - start)
        if check is not None:
            try:
                check(response)
            except InvalidData as error:
                return Failure(kind="broken", reason=self._clean(str(error)), status=status)
        return response

    def _refused(self, status: int, body: bytes, headers: Mapping[str, str]) -> Failure:
        said = self._clean(_message(body))
        kind: Kind = "busy" if status == 429 else "fault" if status >= 500 and status != 501 else "rejected"
        why = f": {_FOR_ALL[status]}" if status in _FOR_ALL else ""
        return Failure(
            kind=kind,
            reason=f"HTTP {status}{why}{f' ({said})' if said else ''}",
            status=status,
            retry_after=_retry_after(headers.get("retry-after")),
        )

    def _clean(self, text: str) -> str:
        """A server's words on one line, shortened, without the key some of them repeat."""
        if self._key:
            text = text.replace(self._key, "***")
        text = " ".join(text.split())
        return text if len(text) <= 300 else f"{text[:299]}…"


class _Gate:
    """What all threads know of the server: how many may ask, until when nobody may, and what retries are left."""

    def __init__(self, concurrency: int, *, faults: int, cool_down_s: float) -> None:
        self._most = concurrency
        self._limit = float(concurrency)
        self._under_way = 0
        self._pause = 0.0
        self._closed = 0.0
        self._why = ""
        self._row = 0
        self._faults = faults
        self._cool_down_s = cool_down_s
        self._full = float(max(10, 2 * concurrency))
        self._budget = self._full
        self._changed = threading.Condition()

    def enter(self, *, until: float, stop: threading.Event) -> str:
        """Wait for leave to send; why there is none, or nothing."""
        with self._changed:
            while True:
                now = time.monotonic()
                if stop.is_set():
                    return "stopped"
                if now >= until:
                    return "the time for all requests is over"
                if now < self._closed:
                    return self._why
                if now < self._pause:
                    self._changed.wait(min(self._pause, until) - now)
                elif self._under_way >= int(self._limit):
                    self._changed.wait(None if until == math.inf else until - now)
                else:
                    self._under_way += 1
                    return ""

    def leave(self, outcome: Response | Failure | None) -> None:
        """Learn from an attempt's outcome."""
        with self._changed:
            now = time.monotonic()
            self._under_way -= 1
            if isinstance(outcome, Response):
                self._row = 0
                self._limit = min(float(self._most), self._limit + 1.0 / self._limit)
                self._budget = min(self._full, self._budget + 0.2)
            elif outcome is not None:
                if outcome.retry_after:
                    self._pause = max(self._pause, now + outcome.retry_after)
                if outcome.kind == "busy":
                    self._limit = max(1.0, self._limit / 2)
                if outcome.kind in ("unreachable", "slow", "fault"):
                    self._row += 1
                elif outcome.kind != "broken":
                    self._row = 0
                if outcome.kind == "rejected" and outcome.status in _FOR_ALL:
                    self._close(now, outcome.reason)
                elif self._row >= self._faults:
                    self._close(now, f"the server failed {self._row} times in a row (last: {outcome.reason})")
            self._changed.notify_all()

    def _close(self, now: float, why: str) -> None:
        self._closed, self._why, self._limit = now + self._cool_down_s, why, 1.0

    def pay(self) -> bool:
        """Take one retry from the budget, if there is one."""
        with self._changed:
            if self._budget < 1:
                return False
            self._budget -= 1
            return True

    def wake(self) -> None:
        """Let waiting threads look again."""
        with self._changed:
            self._changed.notify_all()


def checked_url(url: str) -> str:
    """`url` without a slash at its end; what is no plain http(s) address, or holds a password, is refused."""
    try:
        parts = urlsplit(url)
        port_ok = parts.port != 0
    except ValueError:
        raise BadArgument("the server's address is no URL; write it as http://host:port") from None
    if parts.username is not None or parts.password is not None:
        raise BadArgument("the server's address holds a user or password; keys are read from the environment only")
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_ok:
        raise BadArgument(f"the server's address is {url!r}; write it as http://host:port or https://host/path")
    if parts.query or parts.fragment:
        raise BadArgument("the server's address holds a '?' or '#'; leave out what follows, keys above all")
    return url.rstrip("/")


def _key(variable: str | None) -> str:
    key = os.environ.get(variable, "").strip() if variable else ""
    if not (key.isascii() and key.isprintable()) or any(c.isspace() for c in key):
        raise BadArgument(f"the key in {variable} holds characters no HTTP header can carry")
    return key


def _retry_after(value: str | None) -> float | None:
    """Seconds from now, of a number of seconds or an HTTP date; None where it is neither."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            when = parsedate_to_datetime(value)
        except ValueError:
            return None
        seconds = (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _message(body: bytes) -> str:
    """What an error's body says: the message of the usual JSON shapes, else its text."""
    text = body[:4096].decode("utf-8", "replace")
    try:
        found = json.loads(text)
    except ValueError:
        return text
    while isinstance(found, dict):
        found = next((found[name] for name in ("error", "message", "detail") if name in found), None)
    return found if isinstance(found, str) else text
