"""Encoders of no more than arithmetic, for everything about indexes that is not about encoding."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


class ToyDense:
    """Words, hashed into `dimension` slots and counted, scaled to length 1."""

    kind: Literal["dense", "sparse"] = "dense"

    def __init__(self, dimension: int = 8, *, name: str = "toy-dense") -> None:
        self.name = name
        self.dimension = dimension
        self.encoded: list[str] = []

    def encode(self, texts: Sequence[str], *, side: str = "document", progress: Any = None) -> Any:
        self.encoded += texts
        out = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for row, text in zip(out, texts, strict=True):
            for word in words(text):
                row[zlib.crc32(word.encode()) % self.dimension] += 1.0
            row /= max(1.0, float(np.linalg.norm(row)))
        if progress is not None:
            progress(len(texts))
        return out

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "dimension": self.dimension}


class ToySparse:
    """Each word weighs half its count, plus 0.254 on a query."""

    kind: Literal["dense", "sparse"] = "sparse"

    def __init__(self, *, name: str = "toy-sparse") -> None:
        self.name = name
        self.encoded: list[str] = []

    def encode(self, texts: Sequence[str], *, side: str = "document", progress: Any = None) -> Any:
        self.encoded += texts
        extra = 0.254 if side == "query" else 0.0
        out = [{word: 0.5 * n + extra for word, n in Counter(words(text)).items()} for text in texts]
        if progress is not None:
            progress(len(texts))
        return out

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind}
