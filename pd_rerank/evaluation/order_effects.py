"""Where a score's movement comes from: the slot, the window, the companions, the width of the window.

Functions of scores (K, n) with the slot and window each candidate stood at in each presentation, -1 where it was not
shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.evaluation.presentations import Presentations
from pd_rerank.scores import Scores

Places = npt.NDArray[np.integer[Any]]
Mask = npt.NDArray[np.bool_]


# -- variance decomposition ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class VarianceParts:
    """One query's variance of a score about its document's mean, and what is left of it after slots and windows.

    `total` with document effects only, `after_slot` with slot effects added, `after_window` with window effects too;
    all are mean squared residuals. NaN where fewer than two candidates were graded and shown in every presentation.
    """

    query_id: str
    total: float
    after_slot: float
    after_window: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VarianceShares:
    """Shares of the order variance: by slot, by window, and the rest, which companions explain best; they add up to 1.

    `total` is the variance itself, mean over the `n` queries; `undefined` names the queries without one.
    """

    slot: float
    window: float
    companions: float
    total: float
    n: int
    undefined: tuple[str, ...]


def variance_parts(query_id: str, scores: Scores, slot: Places, window: Places) -> VarianceParts:
    """Least-squares decomposition of scores (K, n) over document, slot and window effects, minimum-norm solution.

    Candidates without all K scores, or not shown in some presentation, are left out. Document effects are taken out by
    subtracting each candidate's mean from scores and from the slot and window indicators, which leaves the residuals of
    the full regression. Source: method, 5.8.

    Example, (score, slot, window) by presentation: A .9/0/0 .8/1/1 .7/0/1; B .6/1/0 .65/0/1 .5/1/1; C .3/0/1 .2/1/0
    .35/0/0; D .1/1/1 .2/0/0 .15/1/0. Candidate variances .00667, .00389, .00389, .00167: total .00403; after slots
    .00278, after windows .00207; shares .3103, .1746, .5151.
    """
    s = np.asarray(scores, dtype=np.float64)
    use = ~np.isnan(s).any(axis=0) & (np.asarray(slot) >= 0).all(axis=0)
    if len(s) < 2 or use.sum() < 2:
        return VarianceParts(query_id=query_id, total=math.nan, after_slot=math.nan, after_window=math.nan)
    residual = _residuals(s[:, use])
    slots, windows = _indicators(slot[:, use]), _indicators(window[:, use])
    return VarianceParts(
        query_id=query_id,
        total=_mean_square(residual),
        after_slot=_mean_square(_unexplained(residual, slots)),
        after_window=_mean_square(_unexplained(residual, np.hstack([slots, windows]))),
    )


def variance_shares(parts: Sequence[VarianceParts]) -> VarianceShares:
    """Shares from the parts' means over queries; NaN where nothing varies. Source: method, 5.8."""
    there = [part for part in parts if not math.isnan(part.total)]
    total, slot, window = (
        math.fsum(getattr(part, name) for part in there) / len(there) if there else math.nan
        for name in ("total", "after_slot", "after_window")
    )
    share = total if total else math.nan
    return VarianceShares(
        slot=(total - slot) / share,
        window=(slot - window) / share,
        companions=window / share,
        total=total,
        n=len(there),
        undefined=tuple(part.query_id for part in parts if math.isnan(part.total)),
    )


def _indicators(places: Places) -> Scores:
    """One column per place, less each candidate's mean: (K·n, places) from (K, n)."""
    names = np.unique(places)
    marks = (np.asarray(places)[..., None] == names).astype(np.float64)
    return np.asarray(marks - marks.mean(axis=0)).reshape(-1, len(names))


def _unexplained(values: Scores, columns: Scores) -> Scores:
    # By the normal equations: on all the rows, lstsq keeps the BLAS library's threads spinning, for 36 times the CPU
    # time (200 queries of 10 x 100: 5.4 s against .15 s). Indicators are conditioned well enough.
    solution, *_ = np.linalg.lstsq(columns.T @ columns, columns.T @ values, rcond=None)
    return np.asarray(values - columns @ solution)


def _residuals(scores: Scores) -> Scores:
    """Scores (K, n) less each candidate's mean, flat; exactly 0 for a candidate that does not move."""
    moved = scores - scores[0]
    return np.asarray(moved - moved.mean(axis=0)).ravel()


def _mean_square(values: Scores) -> float:
    return float(np.mean(values**2))


# -- slot profile ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotProfile:
    """What each slot adds to a score: `residuals` (queries, slots), NaN where a query shows nothing there."""

    query_ids: tuple[str, ...]
    residuals: Scores

    @property
    def psi(self) -> Scores:
        """ψ(p), the mean over the queries that have slot p; (slots,)."""
        there = ~np.isnan(self.residuals)
        total = np.where(there, self.residuals, 0.0).sum(axis=0)
        count = there.sum(axis=0)
        return np.asarray(np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0))


def slot_profile(queries: Sequence[Presentations], *, only: Mapping[str, Mask] | None = None) -> SlotProfile:
    """The mean order residual by slot, query by query.

    It is the score less the candidate's mean over presentations, averaged over all that stood at slot p. A flat
    profile at 0 is a scorer without a preference for places.

    `only` keeps the marked candidates of each query (the relevant ones, say). Needs slots: score tables have them, TREC
    runs do not. Source: method, 5.9, and the paper's ψ(p).

    Example: A .9 at slot 0 then .7 at slot 1, B .4 at slot 1 then .4 at slot 0. Means .8 and .4; residuals at slot 0:
    .1 and 0, at slot 1: -.1 and 0; ψ = (.05, -.05).
    """
    parts = [_slot_residuals(query, only) for query in queries]
    width = 1 + max((int(slot.max(initial=-1)) for _, slot in parts), default=-1)
    residuals = np.full((len(queries), width), np.nan)
    for q, (residual, slot) in enumerate(parts):
        total, count = _by_slot(residual, slot, width)
        np.divide(total, count, out=residuals[q], where=count > 0)
    return SlotProfile(query_ids=tuple(query.query_id for query in queries), residuals=residuals)


def silver_beta(
    queries: Sequence[Presentations], *, top_grade: float = 3.0, aggregate: Literal["rms", "mean_abs"] = "rms"
) -> float:
    """Silver-β: how far the slot moves a grade, in grade units; 0 where grades do not depend on order.

    δ̄_p is the mean, over all occurrences at slot p in all queries, of the grade less the candidate's mean grade over
    presentations. The published definition leaves the aggregate over slots open. Ours is the root mean square of δ̄_p,
    every slot weighing the same; "mean_abs" takes the mean absolute value. `top_grade` turns scores in [0, 1] into
    grades. It is no correlation, and chance alone makes it positive: about √(slots · variance / occurrences).

    Example: the slot profile's example in grades 0–3: δ̄ = (.15, -.15), β = .15.
    """
    parts = [_slot_residuals(query, None) for query in queries]
    width = 1 + max((int(slot.max(initial=-1)) for _, slot in parts), default=-1)
    sums = np.array([_by_slot(residual, slot, width) for residual, slot in parts]).reshape(len(parts), 2, width).sum(0)
    there = sums[1] > 0
    if not there.any():
        return math.nan
    shift = top_grade * sums[0, there] / sums[1, there]
    if aggregate == "rms":
        return float(np.sqrt(np.mean(shift**2)))
    if aggregate == "mean_abs":
        return float(np.abs(shift).mean())
    raise BadArgument(f"unknown aggregate '{aggregate}'; choose rms or mean_abs")


def _slot_residuals(query: Presentations, only: Mapping[str, Mask] | None) -> tuple[Scores, Places]:
    """Residuals of the candidates graded and shown in every presentation, with their slots; both flat."""
    if query.slot is None:
        raise InvalidData(f"query '{query.query_id}': no slots recorded; a score table has them, a TREC run does not")
    use: Mask = np.asarray(~np.isnan(query.scores).any(axis=0) & (query.slot >= 0).all(axis=0))
    if only is not None:
        use &= only.get(query.query_id, np.zeros(len(use), dtype=np.bool_))
    scores = query.scores[:, use]
    if not scores.size:
        return np.zeros(0), np.zeros(0, dtype=np.int32)
    return _residuals(scores), query.slot[:, use].ravel()


def _by_slot(residual: Scores, slot: Places, width: int) -> tuple[Scores, Scores]:
    total = np.bincount(slot, weights=residual, minlength=width)
    return total.astype(np.float64), np.bincount(slot, minlength=width).astype(np.float64)


# -- width -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthOutcome:
    """How one query's mean scores at width B differ from those at width 1.

    `distance`: mean over candidates of |μ_B - μ_1|. `shift`: mean of μ_B - μ_1. `variance`: of μ_1 over candidates.
    """

    query_id: str
    distance: float
    shift: float
    variance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthEffect:
    """The width effect over queries: mean distance and shift in units of the score's standard deviation at width 1.

    The standard deviation is the root of the mean variance within queries, so that a query of equal scores does no
    harm.
    """

    distance: float
    shift: float
    deviation: float
    n: int
    undefined: tuple[str, ...]


def width_outcome(query_id: str, wide: npt.ArrayLike, narrow: npt.ArrayLike) -> WidthOutcome:
    """Compare scores (n,) or (K, n) of the same candidates at two widths; several presentations are averaged first.

    Candidates without a score at one of the widths are left out; NaN where none is left.

    Example: μ_B .8 .4 and μ_1 .7 .5: distance .1, shift 0, variance .01; a width effect of 1 standard deviation.
    """
    b, one = (np.asarray(s, dtype=np.float64) for s in (wide, narrow))
    b, one = (s.mean(axis=0) if s.ndim == 2 else s for s in (b, one))
    if b.shape != one.shape:
        raise InvalidData(f"query '{query_id}': {len(b)} candidates at one width and {len(one)} at the other")
    use = ~np.isnan(b) & ~np.isnan(one)
    if not use.any():
        return WidthOutcome(query_id=query_id, distance=math.nan, shift=math.nan, variance=math.nan)
    moved = b[use] - one[use]
    return WidthOutcome(
        query_id=query_id,
        distance=float(np.abs(moved).mean()),
        shift=float(moved.mean()),
        variance=float(one[use].var()),
    )


def width_effect(outcomes: Iterable[WidthOutcome]) -> WidthEffect:
    """Aggregate `width_outcome`s: the paper's |μ_B - μ_1| in score deviations; NaN where there are none."""
    every = list(outcomes)
    there = [outcome for outcome in every if not math.isnan(outcome.distance)]
    distance, shift, variance = (
        math.fsum(getattr(outcome, name) for outcome in there) / len(there) if there else math.nan
        for name in ("distance", "shift", "variance")
    )
    deviation = math.sqrt(variance) if variance else math.nan
    return WidthEffect(
        distance=distance / deviation,
        shift=shift / deviation,
        deviation=deviation,
        n=len(there),
        undefined=tuple(outcome.query_id for outcome in every if math.isnan(outcome.distance)),
    )
