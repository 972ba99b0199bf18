"""Directions, cases and outcomes built by hand for tests, and the vectors of the NevIR study."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pd_rerank.evaluation.pairs import Case, Direction, designate
from pd_rerank.evaluation.preference import PairOutcome
from pd_rerank.pool import Candidate, Pool, RouteHit

SHARED = Path(__file__).resolve().parents[1].parent / "shared"


def vectors(name: str) -> Any:
    """A file of the study's vectors; a test that needs it skips where it is not."""
    path = SHARED / "vectors" / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    return json.loads(path.read_text(encoding="utf-8"))


def direction(direction_id: str = "g-1:q1", preferred: str = "p", other: str = "o", **fields: Any) -> Direction:
    """A direction named `pair:side`, its group the pair's prefix."""
    pair, _, side = direction_id.partition(":")
    given = {"query": f"query {direction_id}", "pair_id": pair, "side": side or "q1", "group": pair.split("-")[0]}
    return Direction(direction_id=direction_id, preferred=preferred, other=other, **{**given, **fields})


def pool(
    query_id: str, scores: Mapping[str, float], *, query: str = "", routes: Mapping[str, list[str]] | None = None
) -> Pool:
    """A pool of documents with first-stage scores; `routes` lists each route's documents, best first."""
    hits = {
        doc: {name: RouteHit(score=1.0 / (at + 1), rank=at + 1) for name, docs in (routes or {}).items()
              for at, found in enumerate(docs) if found == doc}
        for doc in scores
    }  # fmt: skip
    candidates = [Candidate(doc_id=d, text=f"text of {d}", score=s, routes=hits[d]) for d, s in scores.items()]
    return Pool.ordered(query_id=query_id, query=query or f"query {query_id}", candidates=candidates)


def case(scores: Mapping[str, float], d: Direction | None = None) -> Case:
    """A case of a pool with these first-stage scores."""
    d = d or direction()
    return designate([d], [pool(d.direction_id, scores)])[0]


def laid_out(case: Case, scores: Mapping[str, float | None]) -> np.ndarray:
    """Scores in the case's pool order, NaN for None and for those not named."""
    given = {doc: math.nan if score is None else score for doc, score in scores.items()}
    return np.array([given.get(doc, math.nan) for doc in case.doc_ids])


def outcome(direction_id: str, relation: str, **fields: Any) -> PairOutcome:
    """An outcome with a relation, named short: strict, reverse, tie, unavailable."""
    full = {"strict": "strict_correct", "tie": "model_tie"}.get(relation, relation)
    return PairOutcome(direction=direction(direction_id), relation=full, **fields)  # type: ignore[arg-type]


def worked_example(page: str) -> None:
    """Run the worked toys of a page under docs/: its blocks marked python, and nothing else."""
    text = (Path(__file__).resolve().parents[1] / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), {})
