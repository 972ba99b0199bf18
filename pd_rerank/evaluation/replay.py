"""Window reranks replayed from saved grades: head and tail, fallbacks, every K, and gates that spare some queries.

No model is needed: grades once saved for a head of K are enough for every smaller K, every gate and every fallback
policy. Composite keys and procedures are those of the NevIR study (sections III, IV and V-C).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.evaluation.pairs import Case
from pd_rerank.evaluation.preference import (
    Branch,
    PairOutcome,
    Position,
    Preference,
    Ties,
    pair_outcomes,
    position,
    strict_preference,
)
from pd_rerank.scores import Scores

Fallback = Literal["query", "passage", "pair"]

FALLBACKS: tuple[Fallback, ...] = get_args(Fallback)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Composite:
    """A pool after a window rerank: `values` (n,) order it as its composite keys do, equal where the keys are equal.

    `head` (n,) marks the window; `fallback` says the whole query kept its first-stage order; `requested` and
    `judged` count head slots and those of them with a grade, `moved` candidates whose place in the list changed.
    `edge_tie`: the window's last and the first behind it have equal first-stage scores, so an id set the edge.
    """

    values: Scores
    head: npt.NDArray[np.bool_]
    fallback: bool
    requested: int
    judged: int
    moved: int
    edge_tie: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Reranked:
    """One direction's outcome in a window rerank, with what its query cost; see `Composite` for the counts."""

    outcome: PairOutcome
    query_id: str | None
    requested: int
    judged: int
    fallback: bool
    moved: int
    edge_tie: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a window rerank asked of its scorer, over all planned queries, each counted once.

    `triggered` queries were sent at all, `changed` ones came back in another order, `fallback` ones returned to the
    first stage for want of a grade; `missing` grades were requested and not there.
    """

    queries: int
    requested: int
    judged: int
    missing: int
    triggered: int
    fallback: int
    changed: int
    mean_judged: float
    triggered_share: float
    edge_ties: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """A setting of K and gate with its cost and what it gives; `rows` keep the outcomes, for intervals.

    `threshold` is the margin below which a query is sent, None where no margin gate stood.
    """

    k: int
    threshold: float | None
    cost: Cost
    preference: Preference
    position: Position
    rows: tuple[Reranked, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MarginGate:
    """A margin fitted on development queries and frozen: a query is sent if its top two are closer than `threshold`.

    `groups` are the source groups it was fitted on; it refuses to be applied to any of them.
    """

    threshold: float
    k: int
    target: float
    groups: frozenset[str]

    def calls(self, cases: Sequence[Case]) -> list[bool]:
        """Which of `cases` are sent; a case of a group the gate was fitted on is `InvalidData`."""
        shared = self.groups & {case.direction.group for case in cases}
        if shared:
            raise InvalidData(
                f"the gate was fitted on source group '{min(shared)}' ({len(shared)} shared); "
                "fit on a development split and report on queries of other groups"
            )
        return [margin(case) < self.threshold for case in cases]


# -- one window ---------------------------------------------------------------------------------------------------


def levels(*keys: Scores) -> Scores:
    """Numbers that order candidates as their composite keys do, (n,): 0 for the best, equal where all keys are equal.

    `keys` are arrays (n,), the most important first, higher is better, without NaN.
    """
    order = np.lexsort([-key for key in reversed(keys)])
    differs = np.zeros(len(order), dtype=bool)
    for key in keys:
        differs[1:] |= key[order][1:] != key[order][:-1]
    out = np.empty(len(order))
    out[order] = -np.cumsum(differs)
    return out


def head_of(case: Case, k: int) -> npt.NDArray[np.bool_]:
    """The window: the first `k` candidates by first-stage score, ties by id; a mask in pool order, (n,)."""
    head = np.zeros(len(case.doc_ids), dtype=bool)
    head[_first_order(case)[:k]] = True
    return head


def composite(
    case: Case,
    grades: Scores,
    *,
    k: int,
    secondary: Scores | None = None,
    fallback: Literal["query", "passage"] = "query",
) -> Composite:
    """Rerank the first `k` of a pool by `grades`, ties by `secondary`, the tail unchanged behind them.

    `grades` and `secondary` are (n,) in pool order, NaN where there is none; those outside the window are ignored.
    `secondary` is the first stage's score unless given. A head candidate's key is (1, grade, secondary), a tail
    candidate's (0, 0, first-stage score). A missing head grade sends the whole query back to the first stage
    ("query", the study's rule), or leaves that candidate at its first-stage place among the regraded others
    ("passage"): it then equals neither neighbour, but shares a run of equal keys that it stands inside.
    """
    n = len(case.doc_ids)
    for name, array in (("grades", grades), ("secondary", secondary)):
        if array is not None and array.shape != (n,):
            raise BadArgument(f"'{case.direction.direction_id}': {name} of shape {array.shape} for a pool of {n}")
    if k < 0:
        raise BadArgument(f"a window holds k >= 0 candidates, got {k}")
    if fallback not in ("query", "passage"):
        raise BadArgument(f"unknown fallback '{fallback}'; choose query or passage")
    order = _first_order(case)
    head = np.zeros(n, dtype=bool)
    head[order[:k]] = True
    if secondary is None:
        secondary = case.first
    elif np.isnan(secondary[head]).any():
        raise BadArgument(f"'{case.direction.direction_id}': a candidate of the window has no secondary score")
    there = ~np.isnan(grades)
    judged, requested = int((head & there).sum()), int(head.sum())
    whole = judged == requested
    if whole or fallback == "passage":
        text = np.where(head & there, grades, 0.0)
        values = levels(head.astype(np.float64), text, np.where(head, secondary, case.first))
        if not whole:
            values = _with_gaps(case, values, order, head & ~there)
    else:
        values = levels(case.first)
    after = np.lexsort([case.id_order, -values])
    return Composite(
        values=values,
        head=head,
        fallback=not whole and fallback == "query",
        requested=requested,
        judged=judged,
        moved=int((after != order).sum()),
        edge_tie=bool(0 < k < n and case.first[order[k - 1]] == case.first[order[k]]),
    )


def window_rerank(
    cases: Sequence[Case],
    grades: Sequence[Scores],
    *,
    k: int,
    secondary: Sequence[Scores] | None = None,
    fallback: Fallback = "query",
) -> list[Reranked]:
    """A window rerank of every case, with the branch that decided it; k = 0 is the first stage itself.

    `grades` and `secondary` hold one array (n,) per case, see `composite`. `fallback` is what a missing grade does:
    "query" and "passage" as there; "pair" returns a query to the first stage only where a passage of the pair itself
    has no grade, and is "passage" elsewhere. It knows the labels, so it measures and cannot be served.
    """
    if len(grades) != len(cases) or (secondary is not None and len(secondary) != len(cases)):
        raise BadArgument(f"one array of grades (and of secondary scores) for each of the {len(cases)} cases is wanted")
    if fallback not in FALLBACKS:
        raise BadArgument(f"unknown fallback '{fallback}'; choose one of {', '.join(FALLBACKS)}")
    rows = []
    for i, case in enumerate(cases):
        second = None if secondary is None else secondary[i]
        rule: Literal["query", "passage"] = "query" if fallback == "query" else "passage"
        if fallback == "pair":
            pair = [at for at in (case.preferred, case.other) if at is not None]
            if any(np.isnan(grades[i][at]) for at in pair if head_of(case, k)[at]):
                rule = "query"
        found = composite(case, grades[i], k=k, secondary=second, fallback=rule)
        rows.append(_row(case, found, grades[i]))
    return rows


def fallback_policies(
    cases: Sequence[Case], grades: Sequence[Scores], *, k: int, secondary: Sequence[Scores] | None = None
) -> dict[Fallback, list[Reranked]]:
    """The same window rerank under each fallback policy, side by side: what missing grades cost."""
    return {rule: window_rerank(cases, grades, k=k, secondary=secondary, fallback=rule) for rule in FALLBACKS}


def cost(rows: Sequence[Reranked]) -> Cost:
    """Add up what the queries of `rows` cost; a query with several directions, or pairs, counts once."""
    queries = {row.query_id or row.outcome.direction.direction_id: row for row in rows}
    n = len(queries)
    if not n:
        raise InvalidData("no queries to add up the cost of")
    once = list(queries.values())
    requested, judged = (sum(getattr(row, name) for row in once) for name in ("requested", "judged"))
    triggered = sum(row.requested > 0 for row in once)
    return Cost(
        queries=n,
        requested=requested,
        judged=judged,
        missing=requested - judged,
        triggered=triggered,
        fallback=sum(row.fallback for row in once),
        changed=sum(row.moved > 0 for row in once),
        mean_judged=judged / n,
        triggered_share=triggered / n,
        edge_ties=sum(row.edge_tie for row in once),
    )


# -- K and gates --------------------------------------------------------------------------------------------------


def k_curve(
    cases: Sequence[Case],
    grades: Sequence[Scores],
    *,
    ks: Sequence[int] = tuple(range(21)),
    secondary: Sequence[Scores] | None = None,
    fallback: Fallback = "query",
    ties: Ties = "doc_id",
) -> list[FrontierPoint]:
    """Every K replayed from the same grades: preference and position over the covered directions, cost over all."""
    return [
        _point(window_rerank(cases, grades, k=k, secondary=secondary, fallback=fallback), k, None, ties) for k in ks
    ]


def margin(case: Case) -> float:
    """How far the first stage's best candidate is ahead of the next: infinite with fewer than two."""
    if len(case.doc_ids) < 2:
        return math.inf
    best, second = np.sort(case.first)[::-1][:2]
    return 0.0 if best == second else float(best - second)


def margin_thresholds(cases: Sequence[Case]) -> list[float]:
    """The thresholds to try: the 0 to 100 percentiles of the finite margins, and one just above all of them."""
    margins = np.array([m for case in cases if math.isfinite(m := margin(case))])
    if not margins.size:
        raise InvalidData("no query has two candidates with first-stage scores; a margin gate has nothing to go by")
    return [*np.unique(np.percentile(margins, np.arange(101))).tolist(), float(np.nextafter(margins.max(), np.inf))]


def margin_frontier(
    cases: Sequence[Case],
    grades: Sequence[Scores],
    *,
    k: int,
    thresholds: Sequence[float] | None = None,
    secondary: Sequence[Scores] | None = None,
    fallback: Fallback = "query",
    ties: Ties = "doc_id",
) -> list[FrontierPoint]:
    """Send only queries whose top two are closer than each threshold, the others keep the first stage's order."""
    sent = window_rerank(cases, grades, k=k, secondary=secondary, fallback=fallback)
    kept = window_rerank(cases, grades, k=0)
    margins = [margin(case) for case in cases]
    return [
        _point([s if m < t else r for m, s, r in zip(margins, sent, kept, strict=True)], k, t, ties)
        for t in (margin_thresholds(cases) if thresholds is None else thresholds)
    ]


def fit_margin_gate(frontier: Sequence[FrontierPoint], *, target: float = 0.95) -> MarginGate:
    """The cheapest point of a development frontier that keeps `target` of the strict preferences of sending all.

    Cheapest by mean judged candidates, then by threshold; the frontier's last point must send every query that can
    be sent, as `margin_frontier` makes it. Freeze the gate before looking at the queries to report on.
    """
    if not frontier or any(p.threshold is None for p in frontier):
        raise BadArgument("a margin gate is fitted on the points of margin_frontier")
    full = max(frontier, key=lambda p: p.cost.triggered)
    enough = [p for p in frontier if p.preference.strict_correct >= target * full.preference.strict_correct]
    best = min(enough, key=lambda p: (p.cost.mean_judged, p.threshold))
    assert best.threshold is not None
    return MarginGate(
        threshold=best.threshold,
        k=best.k,
        target=target,
        groups=frozenset(row.outcome.direction.group for row in best.rows),
    )


def routes_disagree(case: Case) -> bool:
    """The route gate: whether a route is empty, or the routes do not all put the same candidate first."""
    return None in case.route_tops or len(set(case.route_tops)) > 1


def gated(
    cases: Sequence[Case],
    grades: Sequence[Scores],
    calls: Sequence[bool],
    *,
    k: int,
    secondary: Sequence[Scores] | None = None,
    fallback: Fallback = "query",
    ties: Ties = "doc_id",
    threshold: float | None = None,
) -> FrontierPoint:
    """One gate applied: queries with a true value in `calls` are reranked, the others keep the first stage's order."""
    if len(calls) != len(cases):
        raise BadArgument(f"{len(calls)} decisions to call for {len(cases)} cases")
    sent = window_rerank(cases, grades, k=k, secondary=secondary, fallback=fallback)
    kept = window_rerank(cases, grades, k=0)
    rows = [s if call else r for call, s, r in zip(calls, sent, kept, strict=True)]
    return _point(rows, k, threshold, ties)


# -- inner parts --------------------------------------------------------------------------------------------------


def _first_order(case: Case) -> npt.NDArray[np.int64]:
    return np.lexsort([case.id_order, -case.first])


def _with_gaps(case: Case, values: Scores, order: npt.NDArray[np.int64], failed: npt.NDArray[np.bool_]) -> Scores:
    """Values of the graded candidates, with the failed ones put back at their first-stage places."""
    graded = iter([i for i in np.lexsort([case.id_order, -values]).tolist() if not failed[i]])
    listed = [i if failed[i] else next(graded) for i in order.tolist()]
    keys = [math.nan if failed[i] else float(values[i]) for i in listed]
    for at, i in enumerate(listed):
        if failed[i]:
            # Between two of equal keys it joins them: neither an id nor its own place may tell those two apart.
            before = next((float(values[j]) for j in reversed(listed[:at]) if not failed[j]), None)
            after = next((float(values[j]) for j in listed[at:] if not failed[j]), None)
            keys[at] = before if before is not None and before == after else math.nan
    out = np.empty(len(values))
    out[listed] = -np.cumsum([at > 0 and keys[at] != keys[at - 1] for at in range(len(keys))])
    return out


def _row(case: Case, found: Composite, grades: Scores) -> Reranked:
    (outcome,) = pair_outcomes([case], [found.values])
    branch, pair, cut = None, None, False
    if case.preferred is not None and case.other is not None:
        p, o = case.preferred, case.other
        inside = bool(found.head[p]), bool(found.head[o])
        mine, theirs = (None if not found.head[at] or np.isnan(grades[at]) else float(grades[at]) for at in (p, o))
        pair = (mine, theirs)
        branch = _branch(found, inside, mine, theirs)
        cut = branch.endswith("only_in_window") and bool(case.first[p] == case.first[o])
    return Reranked(
        outcome=replace(outcome, branch=branch, grades=pair, edge_tie=cut),
        query_id=case.query_id,
        requested=found.requested,
        judged=found.judged,
        fallback=found.fallback,
        moved=found.moved,
        edge_tie=found.edge_tie,
    )


def _branch(found: Composite, inside: tuple[bool, bool], mine: float | None, theirs: float | None) -> Branch:
    if found.fallback:
        return "whole_query_fallback"
    if inside == (True, False):
        return "preferred_only_in_window"
    if inside == (False, True):
        return "other_only_in_window"
    if inside == (False, False):
        return "both_outside_window"
    if mine is None or theirs is None:
        return "missing_grade"
    return "grade_tie" if mine == theirs else "different_grades"


def _point(rows: Sequence[Reranked], k: int, threshold: float | None, ties: Ties) -> FrontierPoint:
    primary = [r.outcome for r in rows if r.outcome.missing is None and r.outcome.direction.conflict is None]
    return FrontierPoint(
        k=k,
        threshold=threshold,
        cost=cost(rows),
        preference=strict_preference(primary),
        position=position(primary, ties=ties),
        rows=tuple(rows),
    )
