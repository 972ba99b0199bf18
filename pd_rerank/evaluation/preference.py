"""Preference and position: is the preferred passage scored above the other, and where in the list does it stand?

Records first: `pair_outcomes` makes one `PairOutcome` per direction, missing ones included; every number here is a
function of such a list. The NevIR study (its sections III and VI) defines the measures; ties are `>` and never ids.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.evaluation.pairs import Case, Direction, Missing, complete_pairs
from pd_rerank.scores import Readout, Scores, ScoreTable

Relation = Literal["strict_correct", "reverse", "model_tie", "unavailable"]
Ties = Literal["doc_id", "best", "worst", "expected"]
Population = Literal["primary", "planned", "with_conflicts"]
Branch = Literal[
    "different_grades",
    "grade_tie",
    "missing_grade",
    "preferred_only_in_window",
    "other_only_in_window",
    "both_outside_window",
    "whole_query_fallback",
]
"""What decided a direction in a window rerank; see `replay.window_rerank`."""

RELATIONS: tuple[Relation, ...] = get_args(Relation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a passage stands in the full pool, counted from 1: `rank` with ties by id, `best` and `worst` without."""

    rank: int
    best: int
    worst: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOutcome:
    """What one scorer did with one direction.

    `relation` compares the two scores: a tie is a tie exactly, and unavailable where either has none. `missing` says
    what the pool lacks; such a direction is unavailable and counts only where misses are failures. Places are None
    for a passage the pool lacks and where only the two were scored. A window rerank adds the `branch` that decided,
    the two `grades` (preferred, other; None where not graded) and `edge_tie`: first-stage scores were equal and the
    window's edge fell between the two, so that an id decided.
    """

    direction: Direction
    relation: Relation
    missing: Missing | None = None
    preferred: Place | None = None
    other: Place | None = None
    pool_size: int = 0
    branch: Branch | None = None
    grades: tuple[float | None, float | None] | None = None
    edge_tie: bool = False

    @property
    def strict(self) -> bool:
        """Whether the preferred passage is scored strictly above the other."""
        return self.relation == "strict_correct"


# -- scores to outcomes -------------------------------------------------------------------------------------------


def compare(preferred: float | None, other: float | None) -> Relation:
    """The relation of two scores or keys, without any tolerance; None and NaN are unavailable."""
    if preferred is None or other is None or math.isnan(preferred) or math.isnan(other):
        return "unavailable"
    if preferred == other:
        return "model_tie"
    return "strict_correct" if preferred > other else "reverse"


def table_scores(
    tables: Iterable[ScoreTable], *, readout: Readout = "expected", presentation: int | None = None
) -> dict[str, dict[str, float]]:
    """Scores by query and document from score tables: the served mean, or those of one presentation."""
    scores = {}
    for table in tables:
        row = table.mean(readout) if presentation is None else table.scores(readout)[presentation]
        scores[table.query_id] = dict(zip(table.doc_ids, row.tolist(), strict=True))
    return scores


def aligned(cases: Sequence[Case], scores: Mapping[str, Mapping[str, float]]) -> list[Scores]:
    """Scores by query and document laid out per case in pool order, (n,) each; NaN where there is none.

    A document that is scored but not in its pool is `InvalidData`: rankers are compared on exactly the same pools.
    """
    laid_out: dict[str, Scores] = {}
    for case in cases:
        if case.query_id is None or case.query_id in laid_out:
            continue
        given = scores.get(case.query_id, {})
        foreign = given.keys() - set(case.doc_ids)
        if foreign:
            raise InvalidData(
                f"query '{case.query_id}': '{min(foreign)}' has a score but is not in the pool "
                f"({len(foreign)} such documents); these scores are of another pool"
            )
        laid_out[case.query_id] = np.array([given.get(d, math.nan) for d in case.doc_ids], dtype=np.float64)
    return [np.zeros(0) if case.query_id is None else laid_out[case.query_id] for case in cases]


def pair_outcomes(cases: Sequence[Case], values: Sequence[Scores]) -> list[PairOutcome]:
    """One outcome per case from `values`, one array (n,) in pool order per case, higher is better, NaN for none.

    A candidate without a score stands behind all that have one. Values may be any numbers that order the pool as the
    scorer's key does, equal where the keys are equal.
    """
    if len(values) != len(cases):
        raise BadArgument(f"{len(values)} arrays of scores for {len(cases)} cases; give one for each, in order")
    return [_outcome(case, value) for case, value in zip(cases, values, strict=True)]


def pair_only_outcomes(
    directions: Iterable[Direction], scores: Mapping[str, tuple[float | None, float | None]]
) -> list[PairOutcome]:
    """Outcomes where only the two passages were scored: (preferred, other) by direction id; no place in a list.

    A direction without scores is unavailable, never absent. Source: the study's pair-only diagnostic, L1.
    """
    return [PairOutcome(direction=d, relation=compare(*scores.get(d.direction_id, (None, None)))) for d in directions]


def population(outcomes: Iterable[PairOutcome], which: Population = "primary") -> list[PairOutcome]:
    """The outcomes a figure is about.

    "primary": both passages in the pool and no conflict in the label, the study's conditional population.
    "planned": every direction without a conflict; a miss is a failure. "with_conflicts": covered, conflicts kept.
    """
    if which not in get_args(Population):
        raise BadArgument(f"unknown population '{which}'; choose one of {', '.join(get_args(Population))}")
    return [
        o
        for o in outcomes
        if (which == "with_conflicts" or o.direction.conflict is None) and (which == "planned" or o.missing is None)
    ]


def edge_ties_as_ties(outcomes: Iterable[PairOutcome]) -> list[PairOutcome]:
    """The same outcomes, a preference that only an id at the window's edge decided counted as the tie it is."""
    return [replace(o, relation="model_tie") if o.edge_tie else o for o in outcomes]


# -- preference ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Counts and rates of strict preference; ties and unavailable directions stay in every denominator.

    `strict` is strict_correct / n; `group_macro` the mean over groups of the rate within each; `paired` the share of
    complete pairs with both directions strict, None without such pairs, `pair_macro` its mean over groups.
    `low` and `high` count the unavailable directions as failures and as successes: what they could at most change.
    """

    n: int
    strict_correct: int
    reverse: int
    model_tie: int
    unavailable: int
    strict: float
    group_macro: float
    groups: int
    complete_pairs: int
    both: int
    paired: float | None
    pair_macro: float | None
    low: float
    high: float
    edge_ties: int


def strict_preference(outcomes: Sequence[PairOutcome]) -> Preference:
    """Strict preference, bidirectional accuracy and their group means over the given outcomes."""
    some(outcomes)
    count = Counter(o.relation for o in outcomes)
    n, strict = len(outcomes), count["strict_correct"]
    pairs = complete_pairs(outcomes).values()
    right = [one.strict and two.strict for one, two in pairs]
    return Preference(
        n=n,
        strict_correct=strict,
        reverse=count["reverse"],
        model_tie=count["model_tie"],
        unavailable=count["unavailable"],
        strict=strict / n,
        group_macro=_macro([o.strict for o in outcomes], [o.direction.group for o in outcomes]),
        groups=len({o.direction.group for o in outcomes}),
        complete_pairs=len(right),
        both=sum(right),
        paired=sum(right) / len(right) if right else None,
        pair_macro=_macro(right, [one.direction.group for one, _ in pairs]) if right else None,
        low=strict / n,
        high=(strict + count["unavailable"]) / n,
        edge_ties=sum(o.edge_tie for o in outcomes),
    )


# -- position -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where the preferred passage and its counterpart stand in the full pool.

    `mrr` and `preferred_at` run over all `n`, a passage without a rank counting 0; mean and median ranks over the
    `ranked` ones. `median_designated` is over both passages' ranks pooled, `both_in_top` counts directions with both
    within `top`. With ties "expected" they are means over all orders of what is tied, so counts need not be whole.
    """

    n: int
    ranked: int
    ties: Ties
    mrr: float
    preferred_at: Mapping[int, float]
    mean_rank_preferred: float | None
    mean_rank_other: float | None
    median_preferred: float | None
    median_other: float | None
    median_designated: float | None
    top: int
    both_in_top: float


def position(
    outcomes: Sequence[PairOutcome], *, depths: Sequence[int] = (1, 3, 10), top: int = 10, ties: Ties = "doc_id"
) -> Position:
    """Preferred-passage MRR, preferred@k and ranks of both, over the given outcomes.

    `ties` says how a passage among equals is placed: by document id (the study's rule), at the best or worst place
    of its ties, or in expectation over their orders.
    """
    some(outcomes)
    ranked = [o for o in outcomes if o.preferred is not None and o.other is not None]
    preferred, other = (per_direction(ranked, f"{who}_rank", ties=ties) for who in ("preferred", "other"))
    return Position(
        n=len(outcomes),
        ranked=len(ranked),
        ties=ties,
        mrr=float(per_direction(outcomes, "reciprocal_rank", ties=ties).mean()),
        preferred_at={k: float(per_direction(outcomes, f"preferred@{k}", ties=ties).mean()) for k in depths},
        mean_rank_preferred=_mean(preferred),
        mean_rank_other=_mean(other),
        median_preferred=_median(preferred),
        median_other=_median(other),
        median_designated=_median(np.concatenate([preferred, other])),
        top=top,
        both_in_top=float(per_direction(outcomes, f"both@{top}", ties=ties).sum()),
    )


def per_direction(outcomes: Sequence[PairOutcome], measure: str, *, ties: Ties = "doc_id") -> Scores:
    """A measure's value for each outcome, (n,): what means, differences and bootstraps are taken of.

    "strict", "reverse", "model_tie", "unavailable" are 0 or 1; "reciprocal_rank", "preferred@k" and "both@k" are 0
    where a passage has no rank; "preferred_rank" and "other_rank" are NaN there.
    """
    if ties not in get_args(Ties):
        raise BadArgument(f"unknown rule for ties '{ties}'; choose one of {', '.join(get_args(Ties))}")
    name, at, depth = measure.partition("@")
    if at and name in ("preferred", "both") and depth.isascii() and depth.isdigit() and int(depth):
        k = int(depth)
        within = _preferred_within if name == "preferred" else _both_within
        return np.array([within(o, k, ties) for o in outcomes], dtype=np.float64)
    if measure in ("strict", *RELATIONS):
        relation = "strict_correct" if measure == "strict" else measure
        return np.array([o.relation == relation for o in outcomes], dtype=np.float64)
    if measure == "reciprocal_rank":
        return np.array([_reciprocal(o.preferred, ties) for o in outcomes], dtype=np.float64)
    if measure == "preferred_rank":
        return np.array([_rank(o.preferred, ties) for o in outcomes], dtype=np.float64)
    if measure == "other_rank":
        return np.array([_rank(o.other, ties) for o in outcomes], dtype=np.float64)
    raise BadArgument(
        f"unknown measure '{measure}'; choose strict, {', '.join(RELATIONS)}, reciprocal_rank, preferred_rank, "
        "other_rank, preferred@k or both@k"
    )


# -- two rankers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """What a ranker changed against a reference: `corrections` made strict what was not, `regressions` the reverse.

    "Not strict" includes ties and unavailable. `net` is corrections - regressions; the last three count source groups
    by the sign of their own net.
    """

    n: int
    common_correct: int
    corrections: int
    regressions: int
    common_not: int
    net: int
    groups_positive: int
    groups_zero: int
    groups_negative: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Differences:
    """Per-unit differences of two rankers, (n,), with the units' groups and ids: what resampling takes.

    `dropped` counts units left out: unavailable on a side where that was asked for, or pairs not complete.
    """

    values: Scores
    groups: tuple[str, ...]
    ids: tuple[str, ...]
    dropped: int = 0


def contrast(outcomes: Sequence[PairOutcome], reference: Sequence[PairOutcome]) -> Contrast:
    """Corrections and regressions of `outcomes` against `reference`, over the same directions and pools."""
    pairs = list(zip(outcomes, matched(outcomes, reference), strict=True))
    count = Counter((o.strict, r.strict) for o, r in pairs)
    nets: defaultdict[str, int] = defaultdict(int)
    for o, r in pairs:
        nets[o.direction.group] += o.strict - r.strict
    return Contrast(
        n=len(pairs),
        common_correct=count[True, True],
        corrections=count[True, False],
        regressions=count[False, True],
        common_not=count[False, False],
        net=count[True, False] - count[False, True],
        groups_positive=sum(net > 0 for net in nets.values()),
        groups_zero=sum(net == 0 for net in nets.values()),
        groups_negative=sum(net < 0 for net in nets.values()),
    )


def differences(
    outcomes: Sequence[PairOutcome],
    reference: Sequence[PairOutcome],
    measure: str = "strict",
    *,
    ties: Ties = "doc_id",
    drop_unavailable: bool = False,
) -> Differences:
    """`measure` of `outcomes` minus that of `reference`, direction by direction.

    Unavailable directions are failures on their side and stay; `drop_unavailable` leaves out those unavailable on
    either side and counts them, which is another estimand (the study's intervals for pair-only scoring).
    """
    pairs = list(zip(outcomes, matched(outcomes, reference), strict=True))
    kept = [p for p in pairs if not (drop_unavailable and "unavailable" in (p[0].relation, p[1].relation))]
    ours, theirs = ([pair[i] for pair in kept] for i in (0, 1))
    return Differences(
        values=per_direction(ours, measure, ties=ties) - per_direction(theirs, measure, ties=ties),
        groups=tuple(o.direction.group for o in ours),
        ids=tuple(o.direction.direction_id for o in ours),
        dropped=len(pairs) - len(kept),
    )


def pair_differences(
    outcomes: Sequence[PairOutcome], reference: Sequence[PairOutcome], *, drop_unavailable: bool = False
) -> Differences:
    """Bidirectional accuracy of `outcomes` minus that of `reference`, pair by complete pair."""
    theirs = complete_pairs(matched(outcomes, reference))
    ours = complete_pairs(outcomes)
    named = {o.direction.pair_id for o in outcomes if o.direction.pair_id is not None}
    kept = [
        pair_id
        for pair_id in ours
        if not (drop_unavailable and any(o.relation == "unavailable" for o in (*ours[pair_id], *theirs[pair_id])))
    ]
    values = [_both(ours[pair_id]) - _both(theirs[pair_id]) for pair_id in kept]
    return Differences(
        values=np.array(values, dtype=np.float64),
        groups=tuple(ours[pair_id][0].direction.group for pair_id in kept),
        ids=tuple(kept),
        dropped=len(named) - len(kept),
    )


def cross_table(rows: Sequence[PairOutcome], columns: Sequence[PairOutcome]) -> dict[Relation, dict[Relation, int]]:
    """How often each relation of `rows` meets each of `columns` on the same direction, zeros included."""
    count = Counter((a.relation, b.relation) for a, b in zip(rows, matched(rows, columns), strict=True))
    return {a: {b: count[a, b] for b in RELATIONS} for a in RELATIONS}


def matched(outcomes: Sequence[PairOutcome], reference: Sequence[PairOutcome]) -> list[PairOutcome]:
    """The reference's outcomes in the order of `outcomes`; other directions or other pools are `InvalidData`."""
    some(outcomes)
    by_id = {r.direction.direction_id: r for r in reference}
    ours = {o.direction.direction_id for o in outcomes}
    if len(by_id) != len(reference) or len(ours) != len(outcomes):
        raise InvalidData("a direction is there twice; two rankers are compared direction by direction")
    if ours != by_id.keys():
        odd = min(ours ^ by_id.keys())
        raise InvalidData(
            f"'{odd}' is on one side only ({len(ours)} directions against {len(by_id)}); "
            "take the same population of the same pairs on both sides"
        )
    for o in outcomes:
        theirs = by_id[o.direction.direction_id].pool_size
        if o.pool_size != theirs and o.pool_size and theirs:
            raise InvalidData(
                f"'{o.direction.direction_id}': a pool of {o.pool_size} on one side and of {theirs} on the other; "
                "rankers are compared on exactly the same pools"
            )
    return [by_id[o.direction.direction_id] for o in outcomes]


def some(outcomes: Sequence[PairOutcome]) -> None:
    """Refuse an empty list of outcomes: no rate is defined of it."""
    if not outcomes:
        raise InvalidData("no directions to measure; check that pairs and pools are of the same queries and passages")


# -- inner parts --------------------------------------------------------------------------------------------------


def _outcome(case: Case, values: Scores) -> PairOutcome:
    if values.shape != (len(case.doc_ids),):
        raise BadArgument(
            f"'{case.direction.direction_id}': scores of shape {values.shape} for a pool of {len(case.doc_ids)}"
        )
    preferred, other = (None if at is None else float(values[at]) for at in (case.preferred, case.other))
    return PairOutcome(
        direction=case.direction,
        relation=compare(preferred, other),
        missing=case.missing,
        preferred=_place(case, values, case.preferred),
        other=_place(case, values, case.other),
        pool_size=len(case.doc_ids),
    )


def _place(case: Case, values: Scores, at: int | None) -> Place | None:
    if at is None:
        return None
    none = np.isnan(values)
    if none[at]:
        above, ties = int((~none).sum()), none
    else:
        above, ties = int((values > values[at]).sum()), values == values[at]
    before = int((ties & (case.id_order < case.id_order[at])).sum())
    return Place(rank=above + before + 1, best=above + 1, worst=above + int(ties.sum()))


def _rank(place: Place | None, ties: Ties) -> float:
    if place is None:
        return math.nan
    if ties == "doc_id":
        return place.rank
    return {"best": place.best, "worst": place.worst, "expected": (place.best + place.worst) / 2}[ties]


def _reciprocal(place: Place | None, ties: Ties) -> float:
    if place is None:
        return 0.0
    if ties == "expected":
        return math.fsum(1 / r for r in range(place.best, place.worst + 1)) / (place.worst - place.best + 1)
    return 1 / _rank(place, ties)


def _chance_within(place: Place, k: int) -> float:
    size = place.worst - place.best + 1
    return min(max(k - place.best + 1, 0), size) / size


def _preferred_within(o: PairOutcome, k: int, ties: Ties) -> float:
    if o.preferred is None:
        return 0.0
    return _chance_within(o.preferred, k) if ties == "expected" else float(_rank(o.preferred, ties) <= k)


def _both_within(o: PairOutcome, k: int, ties: Ties) -> float:
    if o.preferred is None or o.other is None:
        return 0.0
    tied = o.preferred.best == o.other.best
    if ties != "expected":
        # Two that tie cannot both have the best place: the second of them has the next.
        last = max(_rank(o.preferred, ties), _rank(o.other, ties)) + (tied and ties == "best")
        return float(last <= k)
    if not tied:  # at most one of two different ties straddles k, so the chances multiply
        return _chance_within(o.preferred, k) * _chance_within(o.other, k)
    size = o.preferred.worst - o.preferred.best + 1
    room = min(max(k - o.preferred.best + 1, 0), size)
    return room * (room - 1) / (size * (size - 1))


def _both(pair: tuple[PairOutcome, PairOutcome]) -> int:
    return int(pair[0].strict and pair[1].strict)


def _macro(right: Sequence[bool], groups: Sequence[str]) -> float:
    within: defaultdict[str, list[bool]] = defaultdict(list)
    for r, group in zip(right, groups, strict=True):
        within[group].append(r)
    return math.fsum(sum(rs) / len(rs) for rs in within.values()) / len(within)


def _mean(values: Scores) -> float | None:
    return float(values.mean()) if values.size else None


def _median(values: Scores) -> float | None:
    return float(np.median(values)) if values.size else None
