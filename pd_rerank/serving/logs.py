"""Log lines of a server: one JSON object each."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any


class JsonLines(logging.Formatter):
    """A record as one JSON object: time, level, message, and the `fields` given as `extra`.

    Of an exception only its type and the places it came through are told: its text may quote a document.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line for one record."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = record.exc_info[0].__name__
            line["places"] = [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_tb(record.exc_info[2])]
        return json.dumps(line | getattr(record, "fields", {}), default=str)


@contextmanager
def json_lines() -> Iterator[None]:
    """Let the package's handlers and uvicorn's messages write JSON lines while a server runs."""
    ours, theirs = logging.getLogger("pd_rerank"), logging.getLogger("uvicorn.error")
    before = [(handler, handler.formatter) for handler in ours.handlers]
    state = theirs.handlers, theirs.propagate, theirs.level
    for handler, _ in before:
        handler.setFormatter(JsonLines())
    theirs.handlers, theirs.propagate = list(ours.handlers), False
    theirs.setLevel(max(ours.level, logging.INFO))
    try:
        yield
    finally:
        for handler, formatter in before:
            handler.setFormatter(formatter)
        theirs.handlers, theirs.propagate = state[0], state[1]
        theirs.setLevel(state[2])
