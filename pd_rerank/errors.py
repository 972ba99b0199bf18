"""The errors this package raises on purpose, each with the exit code its command line ends with."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from numbers import Integral
from typing import Any


class PdRerankError(Exception):
    """Any failure pd_rerank foresees; the message names the thing, the place and the cure."""

    exit_code = 6


class BadArgument(PdRerankError, ValueError):
    """An argument or setting that cannot be used as given."""

    exit_code = 2


class MissingExtra(PdRerankError, ImportError):
    """An optional dependency is not installed; the message holds the pip command that brings it."""

    exit_code = 3


class MissingResource(PdRerankError, FileNotFoundError):
    """A file, folder, model or adapter that was named but is not there."""

    exit_code = 4

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class InvalidData(PdRerankError, ValueError):
    """Data that breaks its contract: a malformed line, a duplicate id, scores of other pools."""

    exit_code = 5


class ModelMismatch(PdRerankError):
    """A tokenizer, model or adapter that does not fit the prompt or each other."""

    exit_code = 5


class EngineFailure(PdRerankError):
    """The engine could not compute what was asked of it."""

    exit_code = 6


def whole(value: Any) -> bool:
    """Whether a value is a whole number, Python's or numpy's; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def near_names(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: those that resemble it, else all there are."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3)
    return f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(names)}"
