"""The HTTP client against real servers on loopback: what it tries again, what it does not, and when it gives up."""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from typing import Any

import pytest

from pd_rerank.engines.http import Client, Failure, Response, checked_url
from pd_rerank.errors import BadArgument, InvalidData
from tests.engines.chat_server import ChatServer, Reply, closed_port


def echo(body: dict[str, Any], number: int) -> Reply:
    return Reply(json.dumps(body))


def client(url: str, **options: Any) -> Client:
    return Client(url, **({"backoff_s": 0.01, "timeout_s": 5.0} | options))


def bodies(count: int) -> list[dict[str, int]]:
    return [{"i": i} for i in range(count)]


def test_answers_come_in_the_order_of_the_bodies_and_no_more_are_under_way_than_allowed() -> None:
    def slower_first(body: dict[str, Any], number: int) -> Reply:
        time.sleep(0.02 if body["i"] % 2 else 0.002)
        return echo(body, number)

    seen: list[int] = []
    with ChatServer(slower_first) as server, client(server.url, concurrency=5) as asking:
        found = asking.post_many("a/path", bodies(40), on_done=lambda i, _: seen.append(i))
    assert [outcome.json() for outcome in found] == bodies(40)
    assert sorted(seen) == list(range(40))
    assert seen != list(range(40))
    assert 2 <= server.most_under_way <= 5
    assert set(server.paths) == {"/a/path"}


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again(status: int) -> None:
    with ChatServer(lambda b, n: Reply("", status) if n < 2 else echo(b, n)) as server, client(server.url) as asking:
        (found,) = asking.post_many("x", bodies(1))
    assert isinstance(found, Response)
    assert (found.attempts, found.connected) == (3, 3)


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 413, 422, 501])
def test_what_will_not_pass_is_asked_once(status: int) -> None:
    reply = Reply('{"error": {"message": "no such thing"}}', status, {"location": "http://127.0.0.1:9/"})
    with ChatServer(lambda *_: reply) as server, client(server.url) as asking:
        (found,) = asking.post_many("x", bodies(1))
    assert len(server.requests) == 1
    assert isinstance(found, Failure)
    assert found.status == status
    assert "no such thing" in found.reason
    assert found.of_request == (status in (400, 413, 422))


def test_waits_grow_and_differ() -> None:
    times: list[float] = []

    def failing(body: dict[str, Any], number: int) -> Reply:
        times.append(time.monotonic())
        return Reply("", 503)

    with ChatServer(failing) as server, client(server.url, attempts=4, backoff_s=0.08) as asking:
        (found,) = asking.post_many("x", bodies(1))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert isinstance(found, Failure)
    assert found.attempts == len(times) == 4
    for gap, wait in zip(gaps, (0.08, 0.16, 0.32), strict=True):
        assert gap >= wait / 2
    waits = [asking._random.uniform(0.5, 1.0) for _ in range(5)]
    assert len(set(waits)) == 5


def test_retry_after_holds_all_requests_back() -> None:
    times: list[float] = []

    def busy_once(body: dict[str, Any], number: int) -> Reply:
        times.append(time.monotonic())
        if number == 0:
            return Reply("", 429, {"Retry-After": "0.4"})
        time.sleep(0.1)
        return echo(body, number)

    with ChatServer(busy_once) as server, client(server.url, concurrency=2) as asking:
        found = asking.post_many("x", bodies(6))
    assert all(isinstance(outcome, Response) for outcome in found)
    # One other request may be under way already; the rest wait.
    assert sorted(times)[2] - min(times) >= 0.4


def test_retry_after_may_be_a_date_and_too_long_a_wait_is_not_waited_for() -> None:
    reply = Reply("", 429, {"Retry-After": "Fri, 01 Jan 2100 00:00:00 GMT"})
    start = time.monotonic()
    with ChatServer(lambda *_: reply) as server, client(server.url, max_wait_s=2) as asking:
        (found,) = asking.post_many("x", bodies(1))
    assert time.monotonic() - start < 2
    assert isinstance(found, Failure)
    assert "asks to wait" in found.reason
    assert len(server.requests) == 1


def test_429_halves_how_many_are_under_way() -> None:
    lock, now, refused = threading.Lock(), [0], [0]

    def at_most_two(body: dict[str, Any], number: int) -> Reply:
        with lock:
            now[0] += 1
            over = now[0] > 2
            refused[0] += over
        try:
            if over:
                return Reply("", 429)
            time.sleep(0.01)
            return echo(body, number)
        finally:
            with lock:
                now[0] -= 1

    with ChatServer(at_most_two) as server, client(server.url, concurrency=16, attempts=8) as asking:
        found = asking.post_many("x", bodies(60))
    assert all(isinstance(outcome, Response) for outcome in found)
    assert refused[0] < 60


def test_a_timeout_is_tried_again() -> None:
    def slow_once(body: dict[str, Any], number: int) -> Reply:
        time.sleep(0.5 if number == 0 else 0)
        return echo(body, number)

    with ChatServer(slow_once) as server, client(server.url, timeout_s=0.15) as asking:
        (found,) = asking.post_many("x", bodies(1))
    assert isinstance(found, Response)
    assert found.attempts == 2


def test_an_answer_that_drips_is_cut_off_in_the_end() -> None:
    import socketserver

    class Dripping(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
            try:
                for _ in range(100):
                    self.request.sendall(b"x")
                    time.sleep(0.05)
            except OSError:
                pass

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Dripping) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        start = time.monotonic()
        with client(f"http://127.0.0.1:{server.server_address[1]}", timeout_s=0.2, attempts=1) as asking:
            (found,) = asking.post_many("x", bodies(1))
        server.shutdown()
    assert isinstance(found, Failure)
    assert found.kind == "slow"
    assert time.monotonic() - start < 2


def test_an_answer_cut_off_or_hung_up_on_is_tried_again() -> None:
    def broken(body: dict[str, Any], number: int) -> Reply | None:
        return {0: Reply('{"i": 0, "long": 1}', cut=5), 1: None}.get(number, echo(body, number))

    with ChatServer(broken) as server, client(server.url) as asking:
        (found,) = asking.post_many("x", bodies(1))
    assert isinstance(found, Response)
    assert found.attempts == 3


def test_an_answer_its_check_refuses_is_broken_and_tried_again() -> None:
    with ChatServer(lambda b, n: Reply('{"i"') if n == 0 else echo(b, n)) as server, client(server.url) as asking:
        (found,) = asking.post_many("x", bodies(1), check=Response.json)
    assert isinstance(found, Response)
    assert found.json() == {"i": 0}

    def never(response: Response) -> None:
        raise InvalidData("not as agreed")

    with ChatServer(echo) as server, client(server.url, attempts=2) as asking:
        (failed,) = asking.post_many("x", bodies(1), check=never)
    assert isinstance(failed, Failure)
    assert (failed.kind, failed.reason, failed.attempts) == ("broken", "not as agreed", 2)


def test_a_server_that_is_not_there_is_not_asked_a_thousand_times() -> None:
    with client(closed_port(), concurrency=4, cool_down_s=60) as asking:
        found = asking.post_many("x", bodies(1000))
    assert all(isinstance(outcome, Failure) for outcome in found)
    assert sum(outcome.attempts for outcome in found) <= 8 + 4
    assert {outcome.kind for outcome in found} <= {"unreachable", "given_up"}
    assert sum(outcome.connected for outcome in found) == 0
    assert "times in a row" in found[-1].reason


def test_a_server_in_trouble_gets_no_storm_of_retries() -> None:
    def every_other(body: dict[str, Any], number: int) -> Reply:
        return Reply("", 500) if number % 2 else echo(body, number)

    with ChatServer(every_other) as server, client(server.url, concurrency=4) as asking:
        found = asking.post_many("x", bodies(300))
    good = sum(isinstance(outcome, Response) for outcome in found)
    # Without a budget all 300 would be answered, with about 300 retries.
    assert len(server.requests) <= 300 + 10 + 0.2 * good + 4
    assert any("too many requests failed" in outcome.reason for outcome in found if isinstance(outcome, Failure))


def test_after_cooling_down_one_request_is_tried_and_all_follow_if_it_is_answered() -> None:
    down = [True]

    def reply(body: dict[str, Any], number: int) -> Reply:
        return Reply("", 503) if down[0] else echo(body, number)

    with ChatServer(reply) as server, client(server.url, faults=3, cool_down_s=0.3) as asking:
        assert all(isinstance(outcome, Failure) for outcome in asking.post_many("x", bodies(20)))
        before = len(server.requests)
        assert isinstance(asking.post_many("x", bodies(1))[0], Failure)
        assert len(server.requests) == before
        down[0] = False
        time.sleep(0.35)
        assert all(isinstance(outcome, Response) for outcome in asking.post_many("x", bodies(20)))


def test_a_wrong_key_ends_everything_at_once() -> None:
    with ChatServer(lambda *_: Reply("", 401)) as server, client(server.url, concurrency=2) as asking:
        found = asking.post_many("x", bodies(100))
    assert len(server.requests) <= 2
    assert all("the key is missing or wrong" in outcome.reason for outcome in found if isinstance(outcome, Failure))


def test_a_deadline_ends_all_requests() -> None:
    def slow(body: dict[str, Any], number: int) -> Reply:
        time.sleep(0.1)
        return echo(body, number)

    start = time.monotonic()
    with ChatServer(slow) as server, client(server.url, concurrency=2, deadline_s=0.35) as asking:
        found = asking.post_many("x", bodies(100))
    assert time.monotonic() - start < 2
    kinds = [isinstance(outcome, Response) for outcome in found]
    assert any(kinds)
    assert not all(kinds)
    assert "time for all requests is over" in found[-1].reason


def test_the_key_comes_from_the_environment_and_is_shown_nowhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTHER_KEY", "sk-very-secret")
    reply = Reply('{"error": {"message": "Incorrect API key provided: sk-very-secret"}}', 401)
    with caplog.at_level(logging.DEBUG), ChatServer(lambda *_: reply) as server:
        with client(server.url, key_variable="OTHER_KEY") as asking:
            (found,) = asking.post_many("x", bodies(1))
        with client(server.url) as without:
            without.post_many("x", bodies(1))
    assert server.headers[0]["authorization"] == "Bearer sk-very-secret"
    assert "authorization" not in server.headers[1]
    assert isinstance(found, Failure)
    assert "***" in found.reason
    assert "secret" not in repr(found) + repr(asking) + caplog.text


def test_a_key_no_header_can_carry_is_refused_without_showing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PD_RERANK_API_KEY", "sk-se\ncret")
    with pytest.raises(BadArgument) as caught:
        Client("http://127.0.0.1:1")
    assert "se\ncret" not in str(caught.value)


def test_a_key_that_would_go_unencrypted_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PD_RERANK_API_KEY", "sk-1")
    Client("http://127.0.0.1:1").close()
    assert not caplog.records
    Client("http://models.example:8000/v1").close()
    assert "unencrypted" in caplog.text


@pytest.mark.parametrize(
    "url", ["", "host:80", "ftp://host", "http://", "http://u:p@host", "http://host?key=1", "http://host:99999"]
)
def test_addresses_that_are_none_or_hold_secrets_are_refused(url: str) -> None:
    with pytest.raises(BadArgument, match="address") as caught:
        checked_url(url)
    assert "u:p" not in str(caught.value)
    assert "key=1" not in str(caught.value)


def test_what_the_caller_raises_ends_the_call() -> None:
    def refuse(i: int, outcome: object) -> None:
        raise RuntimeError("enough")

    with ChatServer(echo) as server, client(server.url, concurrency=1) as asking:
        with pytest.raises(RuntimeError, match="enough"):
            asking.post_many("x", bodies(2000), on_done=refuse)
        time.sleep(0.1)
        sent = len(server.requests)
        time.sleep(0.2)
        assert len(server.requests) == sent < 2000
