"""What a changed pool does to the candidates that stay: Pool-PSI, top-10 churn, and how changed pools are drawn."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.evaluation.presentations import Presentations, strict_ranks
from pd_rerank.evaluation.stability import ndcg_by_presentation, set_change, tau_psi, top_k
from pd_rerank.pool import Pool

Change = Literal["replace", "drop"]

DEPTH = 100
"""The candidates of an original pool; a changed one needs one more to replace with."""


def sample_queries(query_ids: Iterable[str], *, size: int = 100, seed: int = 0) -> list[str]:
    """The `size` queries with the smallest SHA-256 of "seed NUL query NUL query-sample", in that order; all if fewer.

    Independent of the order the ids come in, and stable as queries are added. Source: method, 5.6.
    """
    ids = set(query_ids)
    return sorted(ids, key=lambda query_id: (_digest(f"{seed}\0{query_id}\0query-sample"), query_id))[:size]


def dropped_rank(query_id: str, *, seed: int = 0, depth: int = DEPTH) -> int:
    """The rank, from 0, of the candidate that leaves this query's pool: uniform over `depth`, seeded by SHA-256.

    `random.Random` seeded with the first 8 bytes, big-endian, of SHA-256("seed NUL query NUL drop-rank"), then
    `randrange(depth)`. Example: seed 0 gives q1 82, q2 42, 1037798 88. Source: method, 5.6.
    """
    digest = _digest(f"{seed}\0{query_id}\0drop-rank")
    return random.Random(int.from_bytes(digest[:8], "big")).randrange(depth)


def changed_pools(
    pool: Pool, *, change: Change = "replace", seed: int = 0, depth: int = DEPTH
) -> tuple[Pool, Pool, str]:
    """The original pool (the best `depth` candidates), the changed one, and the id of the candidate that left it.

    "replace" appends candidate `depth` + 1 after the survivors; "drop" only takes one away. Survivors keep their order:
    serve both with the same fixed order. A pool of `depth` candidates or fewer is `InvalidData`. Source: method, 5.6.
    """
    if change not in get_args(Change):
        raise BadArgument(f"unknown change '{change}'; choose replace or drop")
    if len(pool) <= depth:
        raise InvalidData(f"pool '{pool.query_id}' holds {len(pool)} candidates; a changed pool needs {depth + 1}")
    best = pool.candidates[:depth]
    gone = dropped_rank(pool.query_id, seed=seed, depth=depth)
    stay = best[:gone] + best[gone + 1 :]
    if change == "replace":
        stay += (pool.candidates[depth],)
    original, changed = (Pool(query_id=pool.query_id, query=pool.query, candidates=c) for c in (best, stay))
    return original, changed, best[gone].doc_id


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShift:
    """What the change of its pool did to one query, on the candidates that are in both pools.

    `pool_psi`: (1 - τ-a)/2 of the two rankings, NaN with fewer than two survivors. `top_k_changed`: 1 where the best k
    survivors are not the same set. `ndcg_before`, `ndcg_after`: nDCG@k over survivors, NaN without judgements.
    """

    query_id: str
    survivors: int
    pool_psi: float
    top_k_changed: float
    ndcg_before: float
    ndcg_after: float

    @property
    def ndcg_change(self) -> float:
        """After less before."""
        return self.ndcg_after - self.ndcg_before


def pool_shift(
    query_id: str,
    original: Sequence[str] | Mapping[str, float],
    changed: Sequence[str] | Mapping[str, float],
    *,
    judged: Mapping[str, int] | None = None,
    k: int = 10,
) -> PoolShift:
    """Compare the rankings of an original and a changed pool: ids, best first, or scores (ties by id ascending).

    The ideal of nDCG comes from all of `judged`, so that before and after share it.

    Example: ABCDE, and after E was replaced by F, BAFCD. Survivors ABCD and BACD: one of six pairs turns, τ = 2/3,
    Pool-PSI .1667; the top 1 changed, the top 2 did not. Source: method, 5.6.
    """
    before, after = _order(original), _order(changed)
    both = set(before) & set(after)
    shown = Presentations.of_rankings(query_id, [[d for d in before if d in both], [d for d in after if d in both]])
    ndcg = np.array([math.nan, math.nan])
    if judged is not None:
        grades = [judged.get(doc_id, 0) for doc_id in shown.doc_ids]
        ndcg = ndcg_by_presentation(shown.ranks, grades, judged=judged.values(), k=k)
    return PoolShift(
        query_id=query_id,
        survivors=len(both),
        pool_psi=tau_psi(shown.ranks),
        top_k_changed=set_change(top_k(shown.ranks, k)) if both else math.nan,
        ndcg_before=float(ndcg[0]),
        ndcg_after=float(ndcg[1]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShiftSummary:
    """Means over queries: Pool-PSI, top-k churn (queries whose top k changed), nDCG change signed and absolute.

    `n` queries have a Pool-PSI; `undefined` names the others.
    """

    pool_psi: float
    top_k_churn: float
    ndcg_change: float
    ndcg_change_abs: float
    n: int
    undefined: tuple[str, ...]


def summarise_shifts(shifts: Sequence[PoolShift]) -> PoolShiftSummary:
    """Average pool shifts over the queries where each figure is defined."""

    def mean(values: Iterable[float]) -> float:
        there = [value for value in values if not math.isnan(value)]
        return math.fsum(there) / len(there) if there else math.nan

    return PoolShiftSummary(
        pool_psi=mean(shift.pool_psi for shift in shifts),
        top_k_churn=mean(shift.top_k_changed for shift in shifts),
        ndcg_change=mean(shift.ndcg_change for shift in shifts),
        ndcg_change_abs=mean(abs(shift.ndcg_change) for shift in shifts),
        n=sum(not math.isnan(shift.pool_psi) for shift in shifts),
        undefined=tuple(shift.query_id for shift in shifts if math.isnan(shift.pool_psi)),
    )


def _order(ranked: Sequence[str] | Mapping[str, float]) -> list[str]:
    if not isinstance(ranked, Mapping):
        return list(ranked)
    ids = list(ranked)
    ranks = strict_ranks(np.array([ranked[doc_id] for doc_id in ids], dtype=np.float64), ids)
    return [ids[i] for i in np.argsort(ranks, kind="stable") if ranks[i] >= 0]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
