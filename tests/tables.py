"""Score tables made from the scores a test wants to see."""

from __future__ import annotations

import numpy as np

from pd_rerank.scores import ScoreTable


def table(scores: list[list[float]], slots: list[list[int]] | None = None, **fields: object) -> ScoreTable:
    """A table whose expected-grade scores are `scores` (K, n), made from mass on the grades 0 and 3 alone."""
    wanted = np.array(scores, dtype=np.float64)
    k, n = wanted.shape
    p = np.zeros((k, n, 4))
    p[..., 3], p[..., 0] = wanted, 1 - wanted
    with np.errstate(divide="ignore"):
        grades = np.log(p).astype(np.float32)
    slot = np.array(slots if slots is not None else [list(range(n))] * k, dtype=np.int32)
    defaults: dict[str, object] = {
        "query_id": "q",
        "doc_ids": tuple("ABCDEFGH"[:n]),
        "grades": grades,
        "fallback": np.isnan(wanted),
        "window": np.zeros((k, n), dtype=np.int32),
        "slot": slot,
        "cut": np.zeros(n, dtype=np.int32),
    }
    return ScoreTable(**{**defaults, **fields})  # type: ignore[arg-type]
