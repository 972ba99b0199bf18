"""What stands behind a preference figure: the branch that decided, ties, labels that may be wrong, the order shown."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from pd_rerank.errors import BadArgument
from pd_rerank.evaluation.pairs import Missing
from pd_rerank.evaluation.preference import Branch, PairOutcome, Relation, matched, some

# -- what decided: branches, ties, saturation ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchCount:
    """Outcomes of one branch, with how many of them the reference had right and what changed."""

    n: int
    strict: int
    reverse: int
    tie: int
    unavailable: int
    reference_correct: int
    corrections: int
    regressions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Directions whose two passages got one pair of grades, and how many of them the reference had right."""

    n: int
    reference_correct: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decomposition:
    """Where a window rerank's successes and failures come from.

    `branches` splits `overall` by what decided. `matrix` counts directions by their (preferred, other) grades, both
    in the window and graded. `tie_share` and `tie_failure_share` are the grade ties' shares of directions and of
    failures; `top_grade` the highest grade, `saturation` the share of grade ties at it, and the last two count
    directions and failures with both passages there.
    """

    overall: BranchCount
    branches: Mapping[Branch, BranchCount]
    matrix: Mapping[tuple[float, float], Cell]
    tie_share: float
    tie_failure_share: float | None
    top_grade: float | None
    saturation: float | None
    top_ties: int
    top_failures: int
    edge_ties: int


def decompose(
    outcomes: Sequence[PairOutcome], reference: Sequence[PairOutcome], *, top_grade: float | None = None
) -> Decomposition:
    """Split the outcomes of a window rerank by what decided them, against the first stage's outcomes.

    `top_grade` is the highest grade of the rubric, by default the highest seen. Source: the study's section VI.
    """
    pairs = list(zip(outcomes, matched(outcomes, reference), strict=True))
    if any(o.branch is None for o in outcomes):
        raise BadArgument("these outcomes say nothing of a window; make them with window_rerank")
    by_branch: defaultdict[Branch, list[tuple[PairOutcome, PairOutcome]]] = defaultdict(list)
    by_grades: defaultdict[tuple[float, float], list[PairOutcome]] = defaultdict(list)
    for o, r in pairs:
        assert o.branch is not None
        by_branch[o.branch].append((o, r))
        if o.branch in ("different_grades", "grade_tie") and o.grades is not None:
            preferred, other = o.grades
            if preferred is not None and other is not None:
                by_grades[preferred, other].append(r)
    ties = [o for o, _ in by_branch["grade_tie"]]
    if top_grade is None and by_grades:
        top_grade = max(max(grades) for grades in by_grades)
    top = [o for o in ties if o.grades == (top_grade, top_grade)]
    overall = _branch_count(pairs)
    failures = overall.n - overall.strict
    return Decomposition(
        overall=overall,
        branches={branch: _branch_count(by_branch[branch]) for branch in get_args(Branch)},
        matrix={
            grades: Cell(n=len(found), reference_correct=sum(r.strict for r in found))
            for grades, found in sorted(by_grades.items())
        },
        tie_share=len(ties) / overall.n,
        tie_failure_share=sum(not o.strict for o in ties) / failures if failures else None,
        top_grade=top_grade,
        saturation=len(top) / len(ties) if ties else None,
        top_ties=len(top),
        top_failures=sum(not o.strict for o in top),
        edge_ties=sum(o.edge_tie for o in outcomes),
    )


def undecided(outcomes: Iterable[PairOutcome]) -> list[PairOutcome]:
    """The outcomes whose two passages the scorer could not tell apart: the pairs to judge next.

    In a window rerank those with equal grades, whatever the first stage made of them; elsewhere exact ties.
    """
    return [o for o in outcomes if o.branch == "grade_tie" or (o.branch is None and o.relation == "model_tie")]


def resolve_ties(outcomes: Sequence[PairOutcome], rates: Sequence[float]) -> dict[float, float]:
    """Strict preference if a share of the undecided directions, and nothing else, came out right, by that rate.

    Rate 0 leaves what the scorer itself decided; the first stage's rate on them gives back the window rerank's own
    figure. A tie-break by pairwise judgement costs one call, or two for both orders, per undecided direction.
    """
    some(outcomes)
    open_ones = undecided(outcomes)
    decided = sum(o.strict for o in outcomes) - sum(o.strict for o in open_ones)
    for rate in rates:
        if not 0 <= rate <= 1:
            raise BadArgument(f"a rate of resolved ties is between 0 and 1, got {rate}")
    return {rate: (decided + rate * len(open_ones)) / len(outcomes) for rate in rates}


# -- what if labels are wrong -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelNoise:
    """A strict rate, or a difference of two, if each label is wrong with probability `rate`: mean and deviation."""

    rate: float
    expected: float
    deviation: float


def flip_labels(outcomes: Iterable[PairOutcome], direction_ids: Collection[str]) -> list[PairOutcome]:
    """The same outcomes with the named directions' labels reversed: the other passage becomes the preferred one.

    For disputed labels: every measure of the result is what it would be if the disputes were right.
    """
    listed = list(outcomes)
    unknown = set(direction_ids) - {o.direction.direction_id for o in listed}
    if unknown:
        raise BadArgument(f"no direction '{min(unknown)}' among the outcomes ({len(unknown)} such ids)")
    return [_flipped(o) if o.direction.direction_id in direction_ids else o for o in listed]


def label_sensitivity(
    outcomes: Sequence[PairOutcome],
    rates: Sequence[float],
    *,
    reference: Sequence[PairOutcome] | None = None,
    unit: Literal["direction", "pair", "group"] = "direction",
) -> list[LabelNoise]:
    """Strict preference, or its difference from `reference`, if labels are wrong at each of `rates`, exactly.

    Labels flip independently by `unit`: a pair's two directions together, or a whole group's. With f_u the change
    when unit u flips, the mean is observed + rate · Σ f_u / n, the variance rate (1 - rate) Σ f_u² / n².
    """
    n = len(outcomes)
    observed, changes = _flip_changes(outcomes, reference, unit)
    total, squares = sum(changes), sum(change**2 for change in changes)
    for rate in rates:
        if not 0 <= rate <= 1:
            raise BadArgument(f"a rate of wrong labels is between 0 and 1, got {rate}")
    return [
        LabelNoise(
            rate=rate,
            expected=(observed + rate * total) / n,
            deviation=math.sqrt(rate * (1 - rate) * squares) / n,
        )
        for rate in rates
    ]


def flips_to_overturn(outcomes: Sequence[PairOutcome], reference: Sequence[PairOutcome]) -> int | None:
    """The fewest labels that would have to be wrong for the strict difference to vanish or turn; None if none can.

    0 where there is no difference. The worst case, labels chosen against the difference.
    """
    observed, changes = _flip_changes(outcomes, reference, "direction")
    sign = 1 if observed > 0 else -1
    left = abs(observed)
    for count, gain in enumerate(sorted((-sign * change for change in changes), reverse=True)):
        if left <= 0:
            return count
        if gain <= 0:
            return None
        left -= gain
    return len(changes) if left <= 0 else None


# -- both presentation orders -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BothOrders:
    """What holds of a preference whichever of the two passages is shown first.

    `right` is strict in both orders, `wrong` reversed in both, `echoes` strict in one and reversed in the other, so
    that the place decided; `open` the rest, with a tie or nothing in an order. Where it is known which passage was
    shown first, `first_echoes` chose the first one both times and `last_echoes` the last one.
    """

    n: int
    right: int
    wrong: int
    echoes: int
    open: int
    strict: float
    echo_rate: float
    first_echoes: int | None = None
    last_echoes: int | None = None


def both_orders(
    given: Sequence[PairOutcome], swapped: Sequence[PairOutcome], *, preferred_first: Sequence[bool] | None = None
) -> BothOrders:
    """Strictness under both document orders: right only if right in both.

    `preferred_first` says for each outcome of `given` whether its preferred passage stood first there (and so last in
    `swapped`).
    """
    pairs = list(zip(given, matched(given, swapped), strict=True))
    if preferred_first is not None and len(preferred_first) != len(pairs):
        raise BadArgument(f"{len(preferred_first)} values of preferred_first for {len(pairs)} outcomes")
    count = Counter((a.relation, b.relation) for a, b in pairs)
    right, wrong = count["strict_correct", "strict_correct"], count["reverse", "reverse"]
    echo = [(a, b) for a, b in pairs if {a.relation, b.relation} == {"strict_correct", "reverse"}]
    chose_first = None
    if preferred_first is not None:
        first = dict(zip((a.direction.direction_id for a, _ in pairs), preferred_first, strict=True))
        chose_first = sum(a.strict == first[a.direction.direction_id] for a, _ in echo)
    return BothOrders(
        n=len(pairs),
        right=right,
        wrong=wrong,
        echoes=len(echo),
        open=len(pairs) - right - wrong - len(echo),
        strict=right / len(pairs),
        echo_rate=len(echo) / len(pairs),
        first_echoes=chose_first,
        last_echoes=None if chose_first is None else len(echo) - chose_first,
    )


# -- inner parts --------------------------------------------------------------------------------------------------


def _branch_count(pairs: Sequence[tuple[PairOutcome, PairOutcome]]) -> BranchCount:
    count = Counter(o.relation for o, _ in pairs)
    return BranchCount(
        n=len(pairs),
        strict=count["strict_correct"],
        reverse=count["reverse"],
        tie=count["model_tie"],
        unavailable=count["unavailable"],
        reference_correct=sum(r.strict for _, r in pairs),
        corrections=sum(o.strict and not r.strict for o, r in pairs),
        regressions=sum(r.strict and not o.strict for o, r in pairs),
    )


_MIRRORED: dict[str, Relation] = {"strict_correct": "reverse", "reverse": "strict_correct"}
_SWAPPED: dict[str, Branch] = {
    "preferred_only_in_window": "other_only_in_window",
    "other_only_in_window": "preferred_only_in_window",
}
_ABSENT: dict[str, Missing] = {"preferred": "other", "other": "preferred"}


def _flipped(o: PairOutcome) -> PairOutcome:
    d = o.direction
    return replace(
        o,
        direction=replace(d, preferred=d.other, other=d.preferred),
        relation=_MIRRORED.get(o.relation, o.relation),
        missing=None if o.missing is None else _ABSENT.get(o.missing, o.missing),
        preferred=o.other,
        other=o.preferred,
        branch=None if o.branch is None else _SWAPPED.get(o.branch, o.branch),
        grades=None if o.grades is None else (o.grades[1], o.grades[0]),
    )


def _flip_changes(
    outcomes: Sequence[PairOutcome],
    reference: Sequence[PairOutcome] | None,
    unit: Literal["direction", "pair", "group"],
) -> tuple[int, list[int]]:
    """The observed strict count, or difference of counts, and its change when each unit's labels flip."""
    some(outcomes)
    against = [None] * len(outcomes) if reference is None else matched(outcomes, reference)
    observed = 0
    changes: defaultdict[str, int] = defaultdict(int)
    for o, r in zip(outcomes, against, strict=True):
        d = o.direction
        name = {"direction": d.direction_id, "pair": d.pair_id or d.direction_id, "group": d.group}[unit]
        now = o.strict - (r is not None and r.strict)
        flipped = (o.relation == "reverse") - (r is not None and r.relation == "reverse")
        observed += now
        changes[name] += flipped - now
    return observed, list(changes.values())
