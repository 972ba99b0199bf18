"""The report of `pd-rerank preference`: which of two passages is preferred, where it stands, and what decided."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from pd_rerank.errors import InvalidData
from pd_rerank.evaluation.diagnosis import decompose
from pd_rerank.evaluation.gates import Checked, gate_section
from pd_rerank.evaluation.pairs import Case, complete_pairs, coverage
from pd_rerank.evaluation.preference import (
    RELATIONS,
    PairOutcome,
    Population,
    Preference,
    Ties,
    aligned,
    contrast,
    differences,
    matched,
    pair_differences,
    pair_outcomes,
    per_direction,
    population,
    position,
    strict_preference,
)
from pd_rerank.evaluation.replay import Cost, Fallback, Reranked, cost, window_rerank
from pd_rerank.evaluation.report import (
    Cell,
    Picture,
    Query,
    Report,
    Row,
    Section,
    Table,
    beginning,
    defined,
    interval_row,
)
from pd_rerank.evaluation.resampling import GROUPS, group_bootstrap, joint_bootstrap, sign_flip_test, sign_test
from pd_rerank.evaluation.systems import System
from pd_rerank.pool import Pool

DEPTHS = (1, 3, 10)
"""The k of preferred@k."""

_FEW = 12
"""Different grades that a matrix can show."""

OPENED = 50
"""Directions whose two passages a report shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranker:
    """One ranker over all planned directions: its outcomes, and `branched` the same with what decided them.

    `cost` is a window's, None where the whole pool is ranked; `top_grade` what a score of 1 stands for, where it does.
    """

    name: str
    outcomes: tuple[PairOutcome, ...]
    branched: tuple[PairOutcome, ...] = ()
    cost: Cost | None = None
    top_grade: int | None = None

    def limited(self, which: Population, ties: Ties) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
        """The figures that gates limit, as values and by direction (pairs for both directions); NaN is undefined."""
        mine = population(self.outcomes, which)
        found = strict_preference(mine)
        values = {
            "strict": found.strict,
            "both_directions": math.nan if found.paired is None else found.paired,
            "mrr": position(mine, ties=ties).mrr,
            "coverage": sum(o.missing is None for o in self.outcomes) / len(self.outcomes),
        }
        ids = [o.direction.direction_id for o in mine]
        units = {
            "strict": dict(zip(ids, per_direction(mine, "strict").tolist(), strict=True)),
            "both_directions": {
                pair: float(one.strict and two.strict) for pair, (one, two) in complete_pairs(mine).items()
            },
            "mrr": dict(zip(ids, per_direction(mine, "reciprocal_rank", ties=ties).tolist(), strict=True)),
            "coverage": {o.direction.direction_id: float(o.missing is None) for o in self.outcomes},
        }
        return values, units


def first_stage_of(cases: Sequence[Case]) -> Ranker:
    """The first stage itself: the pools' scores."""
    return Ranker(name="first stage", outcomes=tuple(pair_outcomes(cases, [case.first for case in cases])))


def ranker_of(
    system: System, cases: Sequence[Case], *, window: int | None = None, fallback: Fallback = "query"
) -> Ranker:
    """A system's outcomes: by its scores alone, or with `window` as a rerank of the first stage's best so many.

    What decided is told of the window, or of the whole pool with the first stage breaking ties, as though it were one.
    """
    scores = aligned(cases, system.scores())
    if not any(values.size for values in scores):
        raise InvalidData("none of the pairs' queries has a pool; are the pools of other queries?")
    if all(np.isnan(values).all() for values in scores):
        raise InvalidData(f"'{system.name}' scores no candidate of these pools; are both of the same queries?")
    whole = max(1, *(len(case.doc_ids) for case in cases))
    rows: list[Reranked] = window_rerank(cases, scores, k=window or whole, fallback=fallback)
    branched = tuple(row.outcome for row in rows)
    outcomes = branched if window is not None else tuple(pair_outcomes(cases, scores))
    return Ranker(
        name=system.name,
        outcomes=outcomes,
        branched=branched,
        cost=cost(rows) if window is not None else None,
        top_grade=system.top_grade,
    )


def preference_report(
    ranker: Ranker,
    cases: Sequence[Case],
    *,
    references: Sequence[Ranker],
    pools: Sequence[Pool],
    which: Population = "primary",
    ties: Ties = "doc_id",
    gates: Sequence[Checked] = (),
    settings: Mapping[str, object],
    draw: bool = False,
) -> Report:
    """Coverage, preference, position, what decided, and what changed against each reference, the first stage first."""
    mine = population(ranker.outcomes, which)
    sections = [*gate_section(gates), _coverage(cases), _preference(ranker, mine), _position(ranker, mine, ties)]
    for reference in references:
        sections.append(_against(mine, population(reference.outcomes, which), reference.name, ties))
    if any(o.missing is None for o in mine):
        sections.append(_decided(ranker, references[0], which, draw=draw))
    if draw:
        sections.append(_scatter([ranker, *references], which, ties))
    recipe = asdict(GROUPS) | {"unit": "source groups"}
    return Report(
        title=f"Preference and position of {ranker.name}",
        settings={**settings, "population": which, "ties": ties, "bootstrap": recipe},
        sections=tuple(sections),
        queries=_queries(mine, population(references[0].outcomes, which), cases, pools, ties),
    )


# -- sections -----------------------------------------------------------------------------------------------------


def _coverage(cases: Sequence[Case]) -> Section:
    found = coverage(cases)
    planned = found.planned
    used = f"covered, and the label does not contradict itself ({found.conflicts} do)"
    rows = [
        Row(name="planned directions", value=planned),
        Row(name="covered", value=found.covered, note=f"both passages in the pool: {found.covered / planned:.1%}"),
        Row(name="used", value=found.used, note=used),
        Row(name="complete pairs", value=found.complete_pairs, note=f"of {found.planned_pairs}"),
        Row(name="source groups", value=found.groups, note=f"of {found.planned_groups}"),
        *(Row(name=f"missing: {what}", value=n) for what, n in sorted(found.missing.items())),
    ]
    return Section(title="Coverage", text="What the pools let one judge at all.", rows=tuple(rows))


def _preference(ranker: Ranker, mine: Sequence[PairOutcome]) -> Section:
    found = strict_preference(mine)
    strict = per_direction(mine, "strict")
    groups = [o.direction.group for o in mine]
    rows = [
        interval_row("strict", group_bootstrap(strict, groups), f"{found.strict_correct} of {found.n}"),
        interval_row("group_macro", group_bootstrap(strict, groups, statistic="macro"), "mean over source groups"),
    ]
    pairs = complete_pairs(mine).values()
    if pairs:
        both = np.array([one.strict and two.strict for one, two in pairs], dtype=np.float64)
        of_pairs = [one.direction.group for one, _ in pairs]
        count = f"{found.both} of {found.complete_pairs} pairs"
        rows += [
            interval_row("both_directions", group_bootstrap(both, of_pairs), count),
            interval_row("pair_macro", group_bootstrap(both, of_pairs, statistic="macro"), "mean over source groups"),
        ]
    table = Table(
        title="Relations",
        columns=("relation", "directions", "share"),
        rows=tuple((relation, getattr(found, relation), getattr(found, relation) / found.n) for relation in RELATIONS),
        note=f"ties and unavailable are failures; were all unavailable right, strict would be {found.high:.4f}",
    )
    return Section(title="Preference", text=_window_text(ranker, found), rows=tuple(rows), tables=(table,))


def _window_text(ranker: Ranker, found: Preference) -> str:
    text = "Is the preferred passage scored strictly above the other? Intervals resample source groups."
    if found.groups < 2:
        text += " There is one source group, so that there is no interval."
    if ranker.cost is None:
        return text
    c = ranker.cost
    return (
        f"{text} A window was reranked: {c.requested} grades asked for in {c.queries} queries, {c.missing} missing, "
        f"{c.fallback} queries back to the first stage, {c.changed} changed, {c.edge_ties} with a tie at the edge."
    )


def _position(ranker: Ranker, mine: Sequence[PairOutcome], ties: Ties) -> Section:
    found = position(mine, depths=DEPTHS, ties=ties)
    groups = [o.direction.group for o in mine]
    rows = [interval_row("mrr", group_bootstrap(per_direction(mine, "reciprocal_rank", ties=ties), groups))]
    for k in DEPTHS:
        measure = f"preferred@{k}"
        rows.append(interval_row(measure, group_bootstrap(per_direction(mine, measure, ties=ties), groups)))
    both = f"{found.both_in_top / found.n:.1%}"
    rows += [
        Row(name="mean rank, preferred", value=found.mean_rank_preferred, n=found.ranked),
        Row(name="mean rank, other", value=found.mean_rank_other, n=found.ranked),
        Row(name="median rank, preferred", value=found.median_preferred, n=found.ranked),
        Row(name="median rank, other", value=found.median_other, n=found.ranked),
        Row(name="median rank, both pooled", value=found.median_designated, n=found.ranked),
        Row(name=f"both in top {found.top}", value=_count(found.both_in_top), n=found.n, note=both),
    ]
    by_rule = [(rule, position(mine, depths=(1,), ties=rule)) for rule in ("doc_id", "best", "worst", "expected")]
    table = Table(
        title="How much ties matter",
        columns=("ties", "mrr", "preferred@1"),
        rows=tuple((rule, place.mrr, place.preferred_at[1]) for rule, place in by_rule),
        note="by document id, at the best or worst place of what is tied, and expected over their orders",
    )
    text = f"Where in the pool does {ranker.name} put the preferred passage?"
    return Section(title="Position", text=text, rows=tuple(rows), tables=(table,))


def _against(mine: Sequence[PairOutcome], theirs: Sequence[PairOutcome], name: str, ties: Ties) -> Section:
    found = contrast(mine, theirs)
    strict, rank = (differences(mine, theirs, measure, ties=ties) for measure in ("strict", "reciprocal_rank"))
    rows = [
        interval_row("Δ strict", group_bootstrap(strict.values, strict.groups)),
        interval_row("Δ mrr", group_bootstrap(rank.values, rank.groups)),
    ]
    pairs = pair_differences(mine, theirs) if complete_pairs(mine) else None
    if pairs is not None:
        rows.append(interval_row("Δ both_directions", group_bootstrap(pairs.values, pairs.groups)))
    flip = sign_flip_test(strict.values, strict.groups)
    rows += [
        Row(name="p, directions", value=sign_test(found.corrections, found.regressions), note="exact sign test"),
        Row(name="p, source groups", value=flip.p, n=flip.units, note=f"sign-flip test, {flip.method}"),
    ]
    counts = Table(
        title="What changed",
        columns=("right in both", "corrections", "regressions", "right in neither", "net"),
        rows=((found.common_correct, found.corrections, found.regressions, found.common_not, found.net),),
    )
    signs = Table(
        title="Source groups by the sign of their net",
        columns=("up", "even", "down"),
        rows=((found.groups_positive, found.groups_zero, found.groups_negative),),
    )
    tables, text = [counts, signs], ""
    if len(set(strict.groups)) > 1:
        region = joint_bootstrap(strict.values, rank.values, strict.groups)
        text = (
            "Preference and position together: "
            f"(0, 0) lies {'in' if region.contains(0.0, 0.0) else 'outside'} the joint 95 % region."
        )
        tables.append(
            Table(
                title="Δ strict and Δ MRR, resampled together",
                columns=("both up", "both down", "opposite", "correlation"),
                rows=((region.both_up, region.both_down, region.opposite, region.correlation),),
                note="shares of the resamples; opposite: one rises while the other falls",
            )
        )
    return Section(title=f"Against {name}", text=text, rows=tuple(rows), tables=tuple(tables))


def _decided(ranker: Ranker, first: Ranker, which: Population, *, draw: bool) -> Section:
    mine, theirs = (
        [o for o in population(outcomes, which) if o.missing is None] for outcomes in (ranker.branched, first.outcomes)
    )
    found = decompose(mine, theirs)
    branches = Table(
        title="By what decided",
        columns=("branch", "n", "strict", "reverse", "tie", "unavailable", "first stage right", "corrected", "broken"),
        rows=tuple(
            (
                branch,
                part.n,
                part.strict,
                part.reverse,
                part.tie,
                part.unavailable,
                part.reference_correct,
                part.corrections,
                part.regressions,
            )
            for branch, part in [*found.branches.items(), ("overall", found.overall)]
            if part.n
        ),
    )
    rows = (
        Row(name="tie_share", value=found.tie_share, n=found.overall.n, note="directions whose two grades are equal"),
        Row(name="tie_failure_share", value=found.tie_failure_share, note="of the failures, those with equal grades"),
        Row(name="saturation", value=found.saturation, note="of the equal grades, those at the highest grade seen"),
    )
    told = "" if ranker.cost is not None else " Here the whole pool is the window, and the first stage breaks ties."
    matrix, pictures = _matrix(mine, ranker.top_grade, draw=draw)
    return Section(
        title="What decided",
        text=f"Successes and failures by what decided them, beside what the first stage had right; covered "
        f"directions only.{told}",
        rows=rows,
        tables=(branches, *matrix),
        pictures=pictures,
    )


def _matrix(
    mine: Sequence[PairOutcome], top_grade: int | None, *, draw: bool
) -> tuple[tuple[Table, ...], tuple[Picture, ...]]:
    """The matrix of the two passages' grades, scores rounded to grades; none where they are no grades and many."""
    graded = [o.grades for o in mine if o.branch in ("different_grades", "grade_tie") and o.grades is not None]
    if top_grade is None:
        grades = sorted({grade for pair in graded for grade in pair if grade is not None})
    else:
        grades = [float(grade) for grade in range(top_grade + 1)]
        graded = [(_whole(preferred, top_grade), _whole(other, top_grade)) for preferred, other in graded]
    if not graded or len(grades) > _FEW:
        return (), ()
    count = Counter(graded)
    counts = [[count[preferred, other] for other in grades] for preferred in grades]
    names = [f"{grade:g}" for grade in grades]
    table = Table(
        title="Grades of the two passages",
        columns=("preferred \\ other", *names),
        rows=tuple((name, *row) for name, row in zip(names, counts, strict=True)),
        note="directions with both passages graded"
        + ("; the diagonal holds equal grades" if top_grade is None else ", scores rounded to whole grades"),
    )
    if not draw:
        return (table,), ()
    from pd_rerank.evaluation.pictures import tie_matrix

    caption = "How often which grade met which; on the diagonal grades are equal."
    return (table,), (Picture(title="Grade matrix", caption=caption, svg=tie_matrix(counts, names)),)


def _scatter(rankers: Sequence[Ranker], which: Population, ties: Ties) -> Section:
    from pd_rerank.evaluation.pictures import Point, preference_position

    points = []
    for ranker in rankers:
        mine = population(ranker.outcomes, which)
        groups = [o.direction.group for o in mine]
        x = group_bootstrap(per_direction(mine, "strict"), groups)
        y = group_bootstrap(per_direction(mine, "reciprocal_rank", ties=ties), groups)
        points.append(
            Point(
                name=ranker.name,
                x=x.estimate,
                y=y.estimate,
                x_low=x.low,
                x_high=x.high,
                y_low=y.low,
                y_high=y.high,
            )
        )
    caption = "How often the right passage is preferred, and how high it stands: one can rise while the other falls."
    picture = Picture(title="Preference and position", caption=caption, svg=preference_position(points))
    return Section(title="Preference and position", pictures=(picture,))


# -- directions ---------------------------------------------------------------------------------------------------

_ORDER = {"reverse": 0, "unavailable": 1, "model_tie": 2, "strict_correct": 3}


def _queries(
    mine: Sequence[PairOutcome],
    first: Sequence[PairOutcome],
    cases: Sequence[Case],
    pools: Sequence[Pool],
    ties: Ties,
) -> tuple[Query, ...]:
    """Directions, reversed ones first and those the first stage had right before the others."""
    before = {o.direction.direction_id: o for o in matched(mine, first)}
    case_of = {case.direction.direction_id: case for case in cases}
    pool_of = {pool.query_id: pool for pool in pools}
    ranks = {
        name: dict(zip((o.direction.direction_id for o in mine), per_direction(mine, name, ties=ties), strict=True))
        for name in ("preferred_rank", "other_rank")
    }

    def key(o: PairOutcome) -> tuple[int, bool, float, str]:
        name = o.direction.direction_id
        rank = ranks["preferred_rank"][name]
        return _ORDER[o.relation], not before[name].strict, -rank if rank == rank else -math.inf, name

    found = []
    for place, o in enumerate(sorted(mine, key=key)):
        name = o.direction.direction_id
        case = case_of[name]
        pool = None if case.query_id is None else pool_of.get(case.query_id)
        theirs = before[name]
        values: dict[str, float | None] = {"strict": float(o.strict), "tie": float(o.relation == "model_tie")}
        values |= {measure: defined(float(of[name])) for measure, of in ranks.items()}
        values |= {"first stage strict": float(theirs.strict)}
        opened = place < OPENED and pool is not None
        found.append(
            Query(
                query_id=name,
                query=beginning(o.direction.query or (pool.query if pool is not None else "")),
                values=values,
                documents=_passages(o, theirs, case, pool) if opened and pool is not None else None,
            )
        )
    return tuple(found)


def _passages(o: PairOutcome, first: PairOutcome, case: Case, pool: Pool) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for side, at, place, before in (
        ("preferred", case.preferred, o.preferred, first.preferred),
        ("other", case.other, o.other, first.other),
    ):
        if at is None:
            rows.append((side, "not in the pool", None, None, None))
            continue
        candidate = pool.candidates[at]
        rank, old = (None if p is None else p.rank for p in (place, before))
        rows.append((side, candidate.doc_id, rank, old, beginning(candidate.text)))
    told = f"{o.relation}, by the first stage {first.relation}" + (f", decided by {o.branch}" if o.branch else "")
    return Table(
        title="The two passages",
        columns=("", "document", "rank", "first stage rank", "text"),
        rows=tuple(rows),
        note=told,
    )


# -- inner parts --------------------------------------------------------------------------------------------------


def _count(value: float) -> float:
    """A count as a whole number where it is one: with ties in expectation it need not be."""
    return int(value) if value.is_integer() else value


def _whole(grade: float | None, top: int) -> float | None:
    return None if grade is None or math.isnan(grade) else float(min(max(round(grade * top), 0), top))
