"""Order stability, preference and position of the same directions: what a window rerank decides when its candidates
arrive in other orders.

Records first, as in `preference`: one `OrderOutcome` per direction holds its outcome in every order and how far the
window's ranking moved; every figure here is a function of such a list. The ranking measured is the one that is
served: ties broken by the first stage, then by id, and a query with a missing grade back in first-stage order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pd_rerank.errors import BadArgument
from pd_rerank.evaluation.consumers import pairwise_flip
from pd_rerank.evaluation.pairs import Case, Direction, Missing
from pd_rerank.evaluation.preference import PairOutcome, per_direction
from pd_rerank.evaluation.replay import composite, window_rerank
from pd_rerank.evaluation.stability import retained_overlap, tau_psi, top_k
from pd_rerank.scores import Scores

TOPS = (1, 5)
"""Depths of the sets that order may change."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OrderOutcome:
    """One direction in several orders of its window: its outcome in each, and how far the window's ranking moved.

    `tau_psi` is that of the window's served rankings, NaN where the window holds fewer than two candidates or there
    are fewer than two orders; `overlap` holds the mean Jaccard index of the top-k sets over all pairs of orders, by k.
    """

    direction: Direction
    outcomes: tuple[PairOutcome, ...]
    tau_psi: float
    overlap: Mapping[int, float]
    missing: Missing | None = None


def order_outcomes(
    cases: Sequence[Case], grades: Sequence[Sequence[Scores]], *, k: int, tops: Sequence[int] = TOPS
) -> list[OrderOutcome]:
    """One record per case. `grades[m]` are order m's, one array (n,) per case in pool order, NaN where there is none.

    Each order is a window rerank of the first `k` by its grades, as `replay.window_rerank` does it.
    """
    if not grades:
        raise BadArgument("no order given; a window is read in at least one")
    by_order = [window_rerank(cases, given, k=k) for given in grades]
    found = []
    for i, case in enumerate(cases):
        ranks = np.array([_window_ranks(case, given[i], k) for given in grades])
        found.append(
            OrderOutcome(
                direction=case.direction,
                outcomes=tuple(rows[i].outcome for rows in by_order),
                tau_psi=tau_psi(ranks),
                overlap={top: retained_overlap(top_k(ranks, top)) if ranks.shape[1] else math.nan for top in tops},
                missing=case.missing,
            )
        )
    return found


def _window_ranks(case: Case, grades: Scores, k: int) -> npt.NDArray[np.int64]:
    """Ranks of the window's candidates in the served list, (k,), the window in pool order."""
    found = composite(case, grades, k=k)
    at = np.flatnonzero(found.head)
    order = np.lexsort([case.id_order[at], -found.values[at]])
    ranks = np.empty(len(at), dtype=np.int64)
    ranks[order] = np.arange(len(at))
    return ranks


def over_orders(outcomes: Sequence[OrderOutcome], measure: str) -> Scores:
    """A measure's value for each direction, (n,); NaN where it is undefined there.

    Any measure of `preference.per_direction`, as the mean over orders; and of the orders together: "tau_psi",
    "overlap@k", "preference_changes" (1 where the relation of the two passages is not the same in all orders),
    "preference_differs" (the share of pairs of orders with different relations), "crosses@k" (1 where the preferred
    passage is among the first k in some orders and not in others), "rank_range" (the preferred passage's highest rank
    less its lowest).
    """
    name, _, depth = measure.partition("@")
    if measure == "tau_psi":
        return np.array([o.tau_psi for o in outcomes], dtype=np.float64)
    if name == "overlap":
        return np.array([o.overlap[int(depth)] for o in outcomes], dtype=np.float64)
    if measure == "preference_changes":
        return np.array([len({one.relation for one in o.outcomes}) > 1 for o in outcomes], dtype=np.float64)
    if measure == "preference_differs":
        return np.array([pairwise_flip([one.relation for one in o.outcomes]) for o in outcomes], dtype=np.float64)
    if name == "crosses":
        inside = _each_order(outcomes, f"preferred@{depth}")
        return np.array([0 < values.sum() < len(values) for values in inside], dtype=np.float64)
    if measure == "rank_range":
        return np.array([np.ptp(values) for values in _each_order(outcomes, "preferred_rank")], dtype=np.float64)
    return np.array([values.mean() for values in _each_order(outcomes, measure)], dtype=np.float64)


def _each_order(outcomes: Sequence[OrderOutcome], measure: str) -> list[Scores]:
    return [per_direction(o.outcomes, measure) for o in outcomes]


def primary(outcomes: Sequence[OrderOutcome]) -> list[OrderOutcome]:
    """Those whose pool holds both passages and whose label does not contradict itself."""
    return [o for o in outcomes if o.missing is None and o.direction.conflict is None]


def averaged(grades: Sequence[Sequence[Scores]], size: int) -> list[list[Scores]]:
    """Disjoint ensembles of `size` orders, each the mean grade of its own; what is left over is dropped.

    What a reranker does that serves the mean of `size` presentations. A missing grade stays missing.
    """
    if size < 1:
        raise BadArgument(f"an ensemble averages at least 1 order, got {size}")
    groups = len(grades) // size
    return [
        [np.mean(same, axis=0) for same in zip(*grades[start * size : (start + 1) * size], strict=True)]
        for start in range(groups)
    ]
