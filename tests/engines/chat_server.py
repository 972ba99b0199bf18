"""A chat endpoint on loopback that answers as a test tells it to: a real server, real sockets."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pd_rerank.engines.fake import word_overlap

USAGE = {"prompt_tokens": 100, "completion_tokens": 10}


@dataclass
class Reply:
    """What goes back: `cut` bytes short of what was announced where that is above 0."""

    body: bytes | str
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut: int = 0


def completion(content: str | None, **also: Any) -> Reply:
    """A chat completion with this text."""
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    choice |= {name: also.pop(name) for name in ("finish_reason",) if name in also}
    return Reply(json.dumps({"model": "served-1", "choices": [choice], "usage": USAGE} | also))


def shown(body: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """The query and the documents of a request, by their ids."""
    text = body["messages"][0]["content"]
    query = re.search(r"^(?:Query|Question|Prompt): (.*)$", text, re.MULTILINE)
    assert query
    lines = text.split("\n")
    lines = lines[lines.index(next(line for line in lines if line in ("Documents:", "Passages:"))) + 1 : -1]
    return query[1], {line[1:].split("]")[0]: line.split("] ", 1)[1] for line in lines}


def graded(body: dict[str, Any], top: int = 3) -> dict[str, int]:
    """Grades by word overlap."""
    query, texts = shown(body)
    return {name: round(top * word_overlap(query, text)) for name, text in texts.items()}


def answer(grades: dict[str, Any]) -> str:
    return json.dumps({"items": [{"id": name, "grade": grade} for name, grade in grades.items()]})


def good(body: dict[str, Any], number: int = 0) -> Reply:
    """A right answer."""
    return completion(answer(graded(body)))


Replies = Callable[[dict[str, Any], int], Reply | None]
"""From a request's body and its number (from 0); None hangs up."""


class ChatServer:
    """Answers POSTs by `replies`, and records them."""

    def __init__(self, replies: Replies = good) -> None:
        self.replies = replies
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.under_way = self.most_under_way = 0
        lock, outer = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # headers and body in one piece

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with lock:
                    number = len(outer.requests)
                    outer.requests.append(body)
                    outer.headers.append({name.lower(): value for name, value in self.headers.items()})
                    outer.paths.append(self.path)
                    outer.under_way += 1
                    outer.most_under_way = max(outer.most_under_way, outer.under_way)
                try:
                    reply = outer.replies(body, number)
                finally:
                    with lock:
                        outer.under_way -= 1
                if reply is None:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                content = reply.body.encode() if isinstance(reply.body, str) else reply.body
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) - reply.cut])
                if reply.cut:
                    self.close_connection = True

            def log_message(self, *args: Any) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *args: Any) -> None:  # a client that has given up
                pass

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def __enter__(self) -> ChatServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Refuse new connections; a request under way is answered."""
        self._server.shutdown()
        self._server.server_close()


def closed_port() -> str:
    """An address nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"
