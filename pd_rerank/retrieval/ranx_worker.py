"""Fuse with ranx in a process of its own: `python -m pd_rerank.retrieval.ranx_worker QUESTION ANSWER`, JSON files.

`fusion.RanxFusion` starts it with numba's compilation off, where ranx's functions are plain Python on plain dicts.
Runs are put into ranx as they are ordered in the question: its own constructor would sort them, and ties anyhow.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_ARRAYS = ("probs", "log_odds")
"""Parameters that are a list of arrays, one per route."""

_LEARNED_ONLY = ("bayesfuse", "mapfuse", "posfuse", "segfuse")
"""Methods whose fitting takes no metric and shows no progress bar."""


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The fused scores per query; with qrels in the question, the learned parameters instead."""
    import numpy as np
    import ranx

    runs = [_run(ranx, hits) for hits in question["runs"]]
    method, norm, params = question["method"], question["norm"], dict(question["params"])
    if "qrels" in question:
        options = {} if method in _LEARNED_ONLY else {"show_progress": False}
        qrels = ranx.Qrels(dict(sorted(question["qrels"].items())))
        learned = ranx.optimize_fusion(qrels, runs, norm=norm, method=method, metric=question["metric"], **options)
        return {"params": {name: _plain(value) for name, value in learned.items()}}
    for name in _ARRAYS:
        if name in params:
            params[name] = [np.asarray(values, dtype=float) for values in params[name]]
    fused = ranx.fuse(runs, norm=norm, method=method, params=params)
    return {"fused": {q: [(d, float(s)) for d, s in hits.items()] for q, hits in fused.run.items()}}


def _run(ranx: Any, hits: dict[str, list[tuple[str, float]]]) -> Any:
    run = ranx.Run()
    run.run = {query: dict(ranked) for query, ranked in sorted(hits.items())}
    run.sorted = True
    return run


def _plain(value: Any) -> Any:
    """numpy's arrays and numbers as lists and numbers that JSON knows."""
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value.tolist() if hasattr(value, "tolist") else value


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(answer(json.loads(Path(sys.argv[1]).read_text()))))
