"""The report of `pd-rerank compare`: systems side by side in quality and stability, and what differs beyond chance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from pd_rerank.decisions import dev_split
from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.evaluation.preference import Population, Ties, per_direction, population
from pd_rerank.evaluation.ranking import Metric
from pd_rerank.evaluation.report import Cell, Picture, Query, Report, Section, Table, defined, some
from pd_rerank.evaluation.report_preference import Ranker
from pd_rerank.evaluation.report_quality import Judged
from pd_rerank.evaluation.report_stability import Measured, Rule, measure_at
from pd_rerank.evaluation.resampling import (
    GROUPS,
    QUERIES,
    Interval,
    Recipe,
    group_bootstrap,
    holm,
    paired_bootstrap,
    sign_flip_test,
)
from pd_rerank.evaluation.stability import Qrels, matched_retention
from pd_rerank.evaluation.systems import System

STABILITY = {
    "tau_psi": -1,
    "overlap": 1,
    "set_flip": -1,
    "retention": 0,
    "top_k_churn": -1,
    "selection_flip": -1,
    "worst_ndcg": 1,
    "order_spread": -1,
}
"""The stability figures that are compared, and whether more is better (1), worse (-1) or neither (0)."""

_LEVEL = 0.05

RESAMPLES = 20_000
"""Sign patterns drawn where there are too many to count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of several systems: values by unit (a query, or a labelled direction with its source group).

    `recipe` is how queries are resampled; source groups have their own.
    """

    name: str
    better: int
    values: Mapping[str, Mapping[str, float]]
    groups: Mapping[str, str] = field(default_factory=dict)
    recipe: Recipe = QUERIES

    def interval(self, system: str) -> Interval | None:
        """The mean over the units that have it, with its interval; None where none has."""
        there = {unit: value for unit, value in self.values[system].items() if not math.isnan(value)}
        return self._resampled(there) if there else None

    def differences(self, system: str, baseline: str) -> dict[str, float]:
        """System less baseline, over the units that both have."""
        ours, theirs = self.values[system], self.values[baseline]
        both = {unit: ours[unit] - theirs[unit] for unit in ours if unit in theirs}
        return {unit: value for unit, value in both.items() if not math.isnan(value)}

    def contrast(self, system: str, baseline: str) -> Contrast | None:
        """What differs, how sure that is, and a test; None without a shared unit."""
        found = self.differences(system, baseline)
        if not found:
            return None
        groups = [self.groups[unit] for unit in found] if self.groups else None
        p = sign_flip_test(list(found.values()), groups, resamples=RESAMPLES).p
        up, down = (sum(sign * value > 0 for value in found.values()) for sign in (1, -1))
        return Contrast(interval=self._resampled(found), p=p, up=up, down=down)

    def _resampled(self, values: Mapping[str, float]) -> Interval:
        if not self.groups:
            return paired_bootstrap(list(values.values()), self.recipe)
        return group_bootstrap(list(values.values()), [self.groups[unit] for unit in values])


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """A system's difference from the baseline; `up` and `down` count the units that rise and fall."""

    interval: Interval
    p: float
    up: int
    down: int


def measure_all(
    systems: Sequence[System],
    *,
    rule: Rule | None,
    baseline: str,
    qrels: Qrels | None,
    k: int = 10,
    min_grade: int = 1,
) -> dict[str, Measured]:
    """The stability of every system with several presentations, thresholds fitted on the same dev queries.

    The rule "matched" makes all retain as much as `baseline` does at its own F1 threshold, without which overlaps of
    sets of different size are compared. Source: method, 5.3.
    """
    shown = {system.name: system.shown() for system in systems if system.presentations > 1}
    if rule is not None and not shown:
        raise BadArgument("--threshold is of retained sets under reordering, and no system holds several presentations")
    if rule is None or rule.given is not None:
        given = None if rule is None else rule.given
        return {
            name: measure_at(queries, given, qrels=qrels, k=k, min_grade=min_grade) for name, queries in shown.items()
        }
    shared = sorted(set.intersection(*({q.query_id for q in queries} for queries in shown.values())))
    if len(shared) < 2:
        raise InvalidData(
            f"the systems share {len(shared)} queries; fitting thresholds and reporting takes two at least"
        )
    dev = dev_split(shared)[0]
    if rule.objective == "matched":
        if qrels is None:
            raise BadArgument("--threshold matched starts from the baseline's F1 threshold; give --qrels")
        if baseline not in shown:
            raise BadArgument(f"--threshold matched follows the baseline '{baseline}', which holds one presentation")
        thresholds = matched_retention(shown, qrels, reference=baseline, dev=dev, min_grade=min_grade)
    else:
        fitting = {name: [q for q in queries if q.query_id in set(dev)] for name, queries in shown.items()}
        thresholds = {name: rule.fit(queries, qrels, min_grade=min_grade) for name, queries in fitting.items()}
    return {
        name: measure_at(queries, thresholds[name], qrels=qrels, k=k, min_grade=min_grade, dev=dev)
        for name, queries in shown.items()
    }


def figures_of(
    systems: Sequence[str],
    *,
    judged: Sequence[Judged] = (),
    metrics: Sequence[Metric] = (),
    measured: Mapping[str, Measured] | None = None,
    rankers: Mapping[str, Ranker] | None = None,
    which: Population = "primary",
    ties: Ties = "doc_id",
) -> list[Figure]:
    """Every figure that at least one system has, by unit."""
    found = [
        Figure(name=str(metric), better=1, values={j.system.name: j.values(metric) for j in judged})
        for metric in metrics
        if judged
    ]
    for name, better in STABILITY.items():
        values = {system: m.figure(name) for system, m in (measured or {}).items()}
        if any(not math.isnan(value) for of in values.values() for value in of.values()):
            found.append(Figure(name=name, better=better, values={s: values.get(s, {}) for s in systems}))
    for name, measure in (("strict", "strict"), ("mrr", "reciprocal_rank")):
        mine = {system: population(ranker.outcomes, which) for system, ranker in (rankers or {}).items()}
        if mine:
            groups = {o.direction.direction_id: o.direction.group for outcomes in mine.values() for o in outcomes}
            by_unit = {
                system: dict(
                    zip(
                        (o.direction.direction_id for o in outcomes),
                        per_direction(outcomes, measure, ties=ties).tolist(),
                        strict=True,
                    )
                )
                for system, outcomes in mine.items()
            }
            found.append(Figure(name=name, better=1, values=by_unit, groups=groups))
    return found


def comparison_report(
    systems: Sequence[str],
    figures: Sequence[Figure],
    *,
    baseline: str,
    measured: Mapping[str, Measured],
    settings: Mapping[str, object],
    draw: bool = False,
) -> Report:
    """The figures side by side, every difference from the baseline with Holm's adjustment, pictures, and queries."""
    intervals = {(figure.name, system): figure.interval(system) for figure in figures for system in systems}
    sections = [_side_by_side(systems, figures, intervals, measured)]
    others = [system for system in systems if system != baseline]
    if others:
        sections.append(_contrasts(others, figures, baseline))
    if draw and (pictures := _pictures(systems, figures, intervals)):
        sections.append(Section(title="Pictures", pictures=pictures))
    recipe = {"queries": asdict(QUERIES), "source groups": asdict(GROUPS)}
    return Report(
        title=f"Comparison of {', '.join(systems)}",
        settings={**settings, "baseline": baseline, "bootstrap": recipe},
        sections=tuple(sections),
        queries=_queries(systems, [figure for figure in figures if not figure.groups], baseline),
    )


# -- sections -----------------------------------------------------------------------------------------------------

Intervals = Mapping[tuple[str, str], Interval | None]


def _side_by_side(
    systems: Sequence[str], figures: Sequence[Figure], intervals: Intervals, measured: Mapping[str, Measured]
) -> Section:
    def value(figure: Figure, system: str) -> Cell:
        found = intervals[figure.name, system]
        return None if found is None else found.estimate

    means = Table(
        title="Side by side",
        columns=("system", *(figure.name for figure in figures)),
        rows=tuple((system, *(value(figure, system) for figure in figures)) for system in systems),
    )
    rows: list[tuple[Cell, ...]] = []
    for figure in figures:
        for system in systems:
            found = intervals[figure.name, system]
            if found is not None:
                rows.append((figure.name, _arrow(figure), system, found.estimate, found.low, found.high, found.n))
    whole = Table(
        title="With intervals", columns=("figure", "better", "system", "value", "low", "high", "n"), rows=tuple(rows)
    )
    text = [
        "Quality is of what a system serves (the mean of its presentations' scores); stability of one presentation "
        "against another."
    ]
    alone = [system for system in systems if system not in measured]
    if alone:
        text.append(f"One presentation, hence no stability: {some(alone)}.")
    for system, mine in measured.items():
        if mine.threshold is not None:
            on = f", fitted on {len(mine.dev)} queries that are left out of set figures" if mine.dev else ""
            text.append(f"{system} retains from {mine.threshold.value:.6g} ({mine.threshold.objective}{on}).")
    return Section(title="Quality and stability", text=" ".join(text), tables=(means, whole))


def _contrasts(others: Sequence[str], figures: Sequence[Figure], baseline: str) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for figure in figures:
        found = {system: contrast for system in others if (contrast := figure.contrast(system, baseline)) is not None}
        adjusted = holm({system: contrast.p for system, contrast in found.items()})
        for system, contrast in found.items():
            i, p = contrast.interval, adjusted[system]
            verdict = _verdict(figure, i, p)
            counts = f"{contrast.up} / {contrast.down}"
            rows.append((figure.name, system, i.estimate, i.low, i.high, verdict, contrast.p, p, counts, i.n))
    table = Table(
        title=f"Less {baseline}",
        columns=("figure", "system", "difference", "low", "high", "so", "p", "p, Holm", "up / down", "n"),
        rows=tuple(rows),
        note="paired over the queries (or directions) both have; p: two-sided sign-flip test, by source group for "
        "directions; Holm's adjustment is over the systems compared in one figure; open: the interval holds 0, or the "
        "adjusted p is above .05",
    )
    return Section(title=f"Differences from {baseline}", tables=(table,))


def _verdict(figure: Figure, found: Interval, p: float) -> str:
    if not found.excludes_zero or p > _LEVEL:
        return "open"
    if figure.better == 0:
        return "more" if found.estimate > 0 else "less"
    return "better" if figure.better * found.estimate > 0 else "worse"


def _arrow(figure: Figure) -> str:
    return {1: "higher", -1: "lower", 0: ""}[figure.better]


def _pictures(systems: Sequence[str], figures: Sequence[Figure], intervals: Intervals) -> tuple[Picture, ...]:
    from pd_rerank.evaluation import pictures as drawn

    names = [figure.name for figure in figures]
    quality = next((f.name for f in figures if f.name not in STABILITY and not f.groups), None)

    def points(x: str, y: str) -> list[drawn.Point]:
        pairs = [(system, intervals[x, system], intervals[y, system]) for system in systems]
        return [
            drawn.Point(
                name=system,
                x=None if a is None else a.estimate,
                y=None if b is None else b.estimate,
                x_low=None if a is None else a.low,
                x_high=None if a is None else a.high,
                y_low=None if b is None else b.low,
                y_high=None if b is None else b.high,
            )
            for system, a, b in pairs
        ]

    found = []
    if quality is not None and "tau_psi" in names:
        svg = drawn.quality_stability(points("tau_psi", quality), y_label=quality)
        caption = "How good each system is, and how far the order of its candidates moves it; 95 % intervals."
        found.append(Picture(title="Quality against stability", caption=caption, svg=svg))
    if "strict" in names and "mrr" in names:
        svg = drawn.preference_position(points("strict", "mrr"))
        caption = "How often the right passage is preferred, and how high it stands; 95 % intervals."
        found.append(Picture(title="Preference and position", caption=caption, svg=svg))
    return tuple(found)


def _queries(systems: Sequence[str], figures: Sequence[Figure], baseline: str) -> tuple[Query, ...]:
    """Every query with every figure of every system, by the most that any system loses on the baseline."""
    values: dict[str, dict[str, float | None]] = {}
    for figure in figures:
        for system in systems:
            for query_id, value in figure.values[system].items():
                values.setdefault(query_id, {})[f"{system} {figure.name}"] = defined(value)
    loss: dict[str, float] = {}
    if figures:
        lead = figures[0]
        for system in systems:
            for query_id, value in lead.differences(system, baseline).items():
                loss[query_id] = min(loss.get(query_id, 0.0), (lead.better or 1) * value)
    ordered = sorted(values, key=lambda query_id: (loss.get(query_id, 0.0), query_id))
    return tuple(Query(query_id=query_id, values=values[query_id]) for query_id in ordered)
