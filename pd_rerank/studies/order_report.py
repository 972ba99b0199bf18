"""The order study's tables and figures: quality and stability, contrasts, consumers, controls, and what was not run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from pd_rerank.decisions import Threshold
from pd_rerank.evaluation.consumers import answer_flips, gold_crossing, selection, verdict_flips
from pd_rerank.evaluation.order_effects import (
    silver_beta,
    slot_profile,
    variance_parts,
    variance_shares,
    width_effect,
    width_outcome,
)
from pd_rerank.evaluation.pictures import Point, quality_stability
from pd_rerank.evaluation.pictures import slot_profile as drawn_profile
from pd_rerank.evaluation.pool_change import pool_shift
from pd_rerank.evaluation.presentations import Presentations
from pd_rerank.evaluation.report import Cell, Picture, Query, Report, Section, Table, defined
from pd_rerank.evaluation.report_comparison import Figure
from pd_rerank.evaluation.report_stability import measure_at, stability_report
from pd_rerank.evaluation.resampling import QUERIES, Recipe, hierarchical_bootstrap, holm, noise_floor, paired_bootstrap
from pd_rerank.evaluation.stability import retained_overlap, stability, tau_psi
from pd_rerank.scores import READOUTS, ScoreTable
from pd_rerank.studies.command import left_out
from pd_rerank.studies.order import (
    Entry,
    Study,
    Variant,
    adaptive,
    controlled,
    reader_of,
    settle_of,
    threshold_of,
)
from pd_rerank.studies.order_data import Task
from pd_rerank.studies.order_settings import CONTROLS

TIMING = "Seconds"
"""The one table that is not the same when everything is scored again."""

_LISTED = 20
"""Queries of the main scorer shown for each task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One figure of a task's scorers: what it is called, whether more is better, and its value by query."""

    name: str
    better: int
    of: Callable[[Entry], Mapping[str, float]]


def report(study: Study) -> Report:
    """Every table of the study, the paper's first one at the top, then controls, then what was left out."""
    figures = {name: figures_of(study, task) for name, task in study.tasks.items()}
    sections = [
        _populations(study),
        _table_one(study, figures),
        *_by_type(study, figures),
        *_contrasts(study, figures),
        *_thresholds(study),
        *_readers(study),
        *_pairs(study),
        *(section for control in CONTROLS for section in _controls(study, control)),
        _costs(study),
        left_out(study),
    ]
    settings = {
        **study.settings.model_dump(mode="json"),
        "bootstrap": asdict(_recipe(study)) | {"unit": "queries"},
    }
    return Report(title=study.settings.title, settings=settings, sections=tuple(sections), queries=_queries(study))


def timing(study: Study) -> Table:
    """Seconds of every scorer and task, from pools handed over to scores in hand; differs from run to run."""
    rows: list[tuple[Cell, ...]] = []
    for task, entries in study.entries.items():
        for name, entry in entries.items():
            if entry.seconds:
                wall, n = entry.seconds["first"] + entry.seconds["shuffled"], len(entry.shown)
                asked = 1 + (entry.stored[0].count if entry.stored else 0)
                rows.append((task, name, n, asked, wall, entry.seconds["cpu"], wall / n, wall / n / asked))
    columns = (
        "task", "scorer", "queries", "presentations", "wall seconds", "cpu seconds", "wall per query",
        "wall per query and presentation",
    )  # fmt: skip
    note = "from pools handed over to scores in hand: rendering and batching are in it, loading is not"
    return Table(title=TIMING, columns=columns, rows=tuple(rows), note=note)


# -- figures ------------------------------------------------------------------------------------------------------


def measures(task: Task) -> list[Measure]:
    """The figures of a task, in the order of the tables; those of its consumers among them."""
    k, uses = task.settings.k, task.settings.uses
    found = [
        Measure(name=f"nDCG@{k}", better=1, of=lambda entry: _quality(entry, task)),
        Measure(name=f"nDCG@{k} over orders", better=1, of=_stable("mean_ndcg")),
        Measure(name=f"worst nDCG@{k}", better=1, of=_stable("worst_ndcg")),
        Measure(name="τ-PSI", better=-1, of=_stable("tau_psi")),
        Measure(name="τ-PSI, ties as ties", better=-1, of=_stable("tau_psi_b")),
        Measure(name="normalised residual", better=-1, of=_stable("normalised_residual")),
    ]
    if "threshold" in uses:
        found += [
            Measure(name="overlap", better=1, of=_stable("overlap")),
            Measure(name="overlap, matched", better=1, of=_stable("overlap", matched=True)),
            Measure(name="set flip", better=-1, of=_stable("set_flip")),
            Measure(name="F1", better=1, of=_stable("retained_f1")),
            Measure(name="retention", better=0, of=_stable("retention")),
        ]
    if "reader" in uses:
        found += _reader_measures(task)
    if "pair" in uses:
        found += [
            Measure(name="pair flip", better=-1, of=_stable("pair_flip")),
            Measure(name="pair flip, modal", better=-1, of=_stable("pair_flip_modal")),
            Measure(name="selection flip", better=-1, of=_stable("selection_flip")),
            Measure(name="selection flip, modal", better=-1, of=_stable("selection_flip_modal")),
            Measure(name="quality of the pick", better=1, of=lambda e: _of_pick(e, task, "quality")),
            Measure(name="quality flip", better=-1, of=lambda e: _of_pick(e, task, "quality_flip")),
        ]
    return found


def headline(task: Task) -> list[str]:
    """The figures of a task that stand in Table 1."""
    k, uses = task.settings.k, task.settings.uses
    kind = "answer" if task.settings.type == "qa" else "verdict"
    return [
        f"nDCG@{k}",
        "τ-PSI",
        *(["overlap"] if "threshold" in uses else []),
        *([f"{kind} flip", f"{kind} flip, modal"] if "reader" in uses else []),
        *(["pair flip", "pair flip, modal"] if "pair" in uses else []),
    ]


def figures_of(study: Study, task: Task) -> list[Figure]:
    """Every figure that a scorer of the task has, by scorer and query."""
    entries = study.entries[task.name]
    found = []
    for measure in measures(task):
        values = {name: dict(measure.of(entry)) for name, entry in entries.items()}
        if any(not math.isnan(value) for of in values.values() for value in of.values()):
            found.append(Figure(name=measure.name, better=measure.better, values=values, recipe=_recipe(study)))
    return found


def _quality(entry: Entry, task: Task) -> Mapping[str, float]:
    """nDCG@k in first-stage order; of what has none (ensembles, peers without) the mean over its presentations."""
    if not entry.first:
        return _stable("mean_ndcg")(entry)
    outcomes = stability(entry.first, qrels=task.qrels, k=task.settings.k, min_grade=task.settings.min_grade)
    return {outcome.query_id: outcome.mean_ndcg for outcome in outcomes}


def _stable(figure: str, *, matched: bool = False) -> Callable[[Entry], Mapping[str, float]]:
    def values(entry: Entry) -> Mapping[str, float]:
        measured = entry.matched if matched else entry.measured
        return {} if measured is None else measured.figure(figure)

    return values


def _reader_measures(task: Task) -> list[Measure]:
    if task.settings.type == "qa":

        def answered(name: str) -> Callable[[Entry], Mapping[str, float]]:
            return lambda entry: {o.query_id: getattr(o, name) for o in answer_flips(entry.outputs, task.answers)}

        return [
            Measure(name="answer flip", better=-1, of=answered("pairwise")),
            Measure(name="answer flip, modal", better=-1, of=answered("modal")),
            Measure(name="exact match", better=1, of=answered("exact")),
            Measure(name="answer F1", better=1, of=answered("f1")),
        ]

    def judged(name: str) -> Callable[[Entry], Mapping[str, float]]:
        return lambda entry: {o.query_id: getattr(o, name) for o in verdict_flips(entry.outputs, task.labels).outcomes}

    return [
        Measure(name="verdict flip", better=-1, of=judged("pairwise")),
        Measure(name="verdict flip, modal", better=-1, of=judged("modal")),
        Measure(name="verdict accuracy", better=1, of=judged("accuracy")),
    ]


def _picks(entry: Entry, task: Task) -> list[Any]:
    return [
        selection(query.query_id, query.ranks, [task.qrels[query.query_id].get(d, 0) for d in query.doc_ids])
        for query in entry.shown
    ]


def _of_pick(entry: Entry, task: Task, name: str) -> Mapping[str, float]:
    return {outcome.query_id: getattr(outcome, name) for outcome in _picks(entry, task)}


# -- the headline -------------------------------------------------------------------------------------------------


def _populations(study: Study) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for name, task in study.tasks.items():
        sizes = [len(pool) for pool in task.pools]
        good = [sum(task.qrels[p.query_id].get(d, 0) >= task.settings.min_grade for d in p.doc_ids) for p in task.pools]
        reader = reader_of(task, study.settings) if "reader" in task.settings.uses else None
        dev = study.dev.get(name)
        left_out = "; ".join(f"{n} {why}" for why, n in task.left_out.items())
        rows.append(
            (
                name, task.settings.type, task.there, left_out or None, len(sizes), None if dev is None else len(dev),
                sum(sizes) / len(sizes), task.settings.window, sum(good) / len(good), task.settings.asked,
                task.settings.max_doc_chars, ", ".join(task.settings.uses),
                None if reader is None else f"{reader.model or reader.type}, top {reader.top}",
            )
        )  # fmt: skip
    columns = (
        "task", "type", "queries there", "left out", "queries used", "of these fitted on", "candidates", "window",
        "relevant in pool", "rubric", "characters", "consumers", "reader",
    )  # fmt: skip
    note = f"{study.settings.note}\n\n" if study.settings.note else ""
    text = (
        f"{note}Every scorer grades the same candidates in first-stage order and in {study.settings.presentations} "
        "whole-pool shuffles (or as many as a table says). Queries that a threshold was fitted on have no set figures."
    )
    return Section(title="Tasks", text=text, tables=(Table(title="Populations", columns=columns, rows=tuple(rows)),))


def _table_one(study: Study, figures: Mapping[str, Sequence[Figure]]) -> Section:
    wanted = [(name, figure) for name, task in study.tasks.items() for figure in headline(task)]
    by_name = {(name, figure.name): figure for name, mine in figures.items() for figure in mine}
    intervals = {
        (task, figure.name, scorer): figure.interval(scorer)
        for task, mine in figures.items()
        for figure in mine
        for scorer in study.entries[task]
    }
    ran = [name for name in study.settings.scorers if any(name in mine for mine in study.entries.values())]
    rows: list[tuple[Cell, ...]] = []
    for scorer in ran:
        cells: list[Cell] = [scorer, study.settings.count(scorer)]
        for key in wanted:
            found = intervals.get((*key, scorer)) if key in by_name else None
            cells.append(None if found is None else found.estimate)
        rows.append(tuple(cells))
    columns = ("scorer", "M", *(f"{task} {figure}" for task, figure in wanted))
    note = (
        "nDCG in first-stage order, of ensembles and of peers without such a run the mean over presentations; M "
        "presentations (or ensembles) are compared with one another; flips are pairwise, the modal estimate beside them"
    )
    tables = [Table(title="Table 1", columns=columns, rows=tuple(rows), note=note)]
    for task, mine in figures.items():
        long = [
            (figure.name, _arrow(figure), scorer, i.estimate, i.low, i.high, i.n)
            for figure in mine
            for scorer in study.entries[task]
            if (i := intervals[task, figure.name, scorer]) is not None
        ]
        tables.append(
            Table(
                title=f"Figures of {task}",
                columns=("figure", "better", "scorer", "value", "low", "high", "n"),
                rows=tuple(long),
                note="means over the queries that have the figure, with percentile bootstrap intervals over queries",
            )
        )
    pictures = []
    for task in figures:
        quality = f"nDCG@{study.tasks[task].settings.k}"
        points = []
        for scorer in study.entries[task]:
            x, y = intervals.get((task, "τ-PSI", scorer)), intervals.get((task, quality, scorer))
            if x is not None and y is not None:
                points.append(
                    Point(
                        name=scorer, x=x.estimate, x_low=x.low, x_high=x.high, y=y.estimate, y_low=y.low, y_high=y.high
                    )
                )
        if points:
            title = f"Quality against stability, {task}"
            caption = "How good each scorer is, and how far the order of its candidates moves it; 95 % intervals."
            pictures.append(
                Picture(title=title, caption=caption, svg=quality_stability(points, y_label=quality, title=title))
            )
    return Section(title="Quality and stability", tables=tuple(tables), pictures=tuple(pictures))


def _by_type(study: Study, figures: Mapping[str, Sequence[Figure]]) -> list[Section]:
    """Means over the tasks of one type, each weighing the same; none where every type has one task."""
    rows: list[tuple[Cell, ...]] = []
    kinds = dict.fromkeys(task.settings.type for task in study.tasks.values())
    for kind in kinds:
        mine = {name: figures[name] for name, task in study.tasks.items() if task.settings.type == kind}
        if len(mine) < 2:
            continue
        names = dict.fromkeys(figure.name for of in mine.values() for figure in of)
        for figure in names:
            for scorer in study.settings.scorers:
                values = {}
                for task, of in mine.items():
                    one = next((f for f in of if f.name == figure), None)
                    there = [] if one is None else [v for v in one.values.get(scorer, {}).values() if v == v]
                    if there:
                        values[task] = there
                if len(values) == len(mine):
                    found = hierarchical_bootstrap(values, _recipe(study))
                    rows.append((kind, figure, scorer, found.estimate, found.low, found.high, found.units, found.n))
    if not rows:
        return []
    columns = ("type", "figure", "scorer", "value", "low", "high", "tasks", "queries")
    note = "mean of the tasks' means; tasks are resampled, then the queries of each"
    return [Section(title="By type", tables=(Table(title="By type", columns=columns, rows=tuple(rows), note=note),))]


def _contrasts(study: Study, figures: Mapping[str, Sequence[Figure]]) -> list[Section]:
    main = study.main
    rows: list[tuple[Cell, ...]] = []
    for task, mine in figures.items():
        others = [name for name in study.entries[task] if name != main]
        if main not in study.entries[task]:
            continue
        for figure in mine:
            found = {name: c for name in others if (c := figure.contrast(main, name)) is not None}
            adjusted = holm({name: c.p for name, c in found.items()})
            for name, c in found.items():
                i, p = c.interval, adjusted[name]
                rows.append((task, figure.name, name, i.estimate, i.low, i.high, c.p, p, c.up, c.down, i.n))
    if not rows:
        return []
    columns = ("task", "figure", "against", "difference", "low", "high", "p", "p, Holm", "up", "down", "n")
    note = (
        f"{main} less the other, paired over the queries both have; p: two-sided sign-flip test; Holm's adjustment is "
        "over the scorers that one figure of one task is compared with"
    )
    table = Table(title="Contrasts", columns=columns, rows=tuple(rows), note=note)
    return [Section(title=f"{main} against the others", tables=(table,))]


# -- consumers ----------------------------------------------------------------------------------------------------


def _thresholds(study: Study) -> list[Section]:
    rows: list[tuple[Cell, ...]] = []
    for task, entries in study.entries.items():
        for name, entry in entries.items():
            for what, measured in (("own F1", entry.measured), ("matched retention", entry.matched)):
                if measured is None or measured.threshold is None:
                    continue
                at, means = measured.threshold, measured.means
                rows.append(
                    (
                        task, name, what, at.value, at.reached, defined(means["retention"]), defined(means["overlap"]),
                        defined(means["set_flip"]), defined(means["retained_f1"]), defined(means["retained_f1_sd"]),
                        sum(not math.isnan(v) for v in measured.figure("overlap").values()),
                    )
                )  # fmt: skip
    if not rows:
        return []
    columns = (
        "task", "scorer", "at", "threshold", "reached on dev", "retention", "overlap", "set flip", "F1", "F1 sd", "n",
    )  # fmt: skip
    reference = study.settings.matched or study.settings.main
    note = "fitted on one half of the queries, on the first shuffle, reported on the other half"
    if reference is not None:
        note += f"; matched: every scorer keeps as much of the dev half as {reference} does at its own threshold"
    table = Table(title="Retained sets", columns=columns, rows=tuple(rows), note=note)
    return [Section(title="Consumer: a threshold", tables=(table,))]


def _readers(study: Study) -> list[Section]:
    rows: list[tuple[Cell, ...]] = []
    for task_name, entries in study.entries.items():
        task = study.tasks[task_name]
        for name, entry in entries.items():
            if not entry.outputs:
                continue
            outcomes: Sequence[Any]
            if task.settings.type == "qa":
                outcomes = answer_flips(entry.outputs, task.answers)
                quality, invalid = _mean(o.exact for o in outcomes), None
            else:
                outcomes = verdict_flips(entry.outputs, task.labels).outcomes
                quality, invalid = _mean(o.accuracy for o in outcomes), sum(o.invalid for o in outcomes)
            crossing = {which: sum(o.gold == which for o in outcomes) for which in ("all", "some", "none")}
            rows.append(
                (
                    task_name, name, len(outcomes), _mean(o.pairwise for o in outcomes),
                    _mean(o.modal for o in outcomes), sum(o.pairwise > 0 for o in outcomes), quality,
                    *crossing.values(), sum(o.missing for o in outcomes), invalid,
                )
            )  # fmt: skip
    if not rows:
        return []
    columns = (
        "task", "scorer", "n", "flip", "flip, modal", "queries that flip", "right", "right in all orders", "in some",
        "in none", "missing", "invalid",
    )  # fmt: skip
    text = "The best passages in the scorer's order are read by one reader; what changes is their choice and order."
    table = Table(title="Readers", columns=columns, rows=tuple(rows), note="right: exact match, or the gold verdict")
    return [Section(title="Consumer: a reader", text=text, tables=(table,))]


def _pairs(study: Study) -> list[Section]:
    rows: list[tuple[Cell, ...]] = []
    for task_name, entries in study.entries.items():
        task = study.tasks[task_name]
        if "pair" not in task.settings.uses:
            continue
        for name, entry in entries.items():
            picks = _picks(entry, task)
            found = gold_crossing(picks)
            rows.append(
                (
                    task_name, name, found.n, _mean(o.pair_flip for o in picks), _mean(o.selection_flip for o in picks),
                    found.quality, found.accuracy, found.all, found.some, found.none, defined(found.flips_on_crossing),
                )
            )  # fmt: skip
    if not rows:
        return []
    columns = (
        "task", "scorer", "n", "pair flip", "selection flip", "quality of the pick", "best picked", "in all orders",
        "in some", "in none", "pair flips on queries that cross",
    )  # fmt: skip
    note = "the first ranked is chosen, the last rejected; quality: grade of the pick by the best grade there is"
    table = Table(title="Chosen and rejected", columns=columns, rows=tuple(rows), note=note)
    return [Section(title="Consumer: preference pairs", tables=(table,))]


# -- controls -----------------------------------------------------------------------------------------------------

_TEXT = {
    "partition": "The same scorer under other partitions of the same shuffles.",
    "reverse": "First-stage order against its reverse; quality alone hides what their τ-PSI shows.",
    "placeholder": "Another token where the grades before a slot stand.",
    "markers": "The same windows under other markers of the candidates.",
    "width": "The same scorer at other window widths; shift and distance are of scores against width 1, in deviations.",
    "batching": "The same first-stage order asked again in other engine calls: nothing below this can be read.",
    "pool": "One candidate replaced by the next one of the first stage, or taken away; the survivors are compared.",
    "first_stage": "The same queries with candidates of other first stages.",
    "readout": "The same grade probabilities read as expectation, as P(g ≥ half) and as the likeliest grade.",
    "k_sweep": "Means over K of the stored presentations, from disjoint groups.",
    "sources": "What explains a score's movement over orders: its slot, its window, or the rest, companions above all.",
    "adaptive": "Presentations are spent on a query until its decision is settled; fixed K beside it.",
}


def _controls(study: Study, control: str) -> list[Section]:
    asked = study.settings.controls.get(control)
    if asked is None:
        return []
    tables: list[Table]
    pictures: list[Picture] = []
    if control in _STORED:
        entries = [
            study.entries[task][name]
            for name in controlled(control, asked, study.settings)
            for task in asked.tasks or study.tasks
            if name in study.entries[task]
        ]
        tables, pictures = _STORED[control](study, entries, list(asked.values or CONTROLS[control]))
    else:
        variants = [variant for variant in study.variants if variant.control == control]
        tables = _of_pools(study, variants) if control == "pool" else _of_variants(study, control, variants)
    title = f"Control: {control.replace('_', ' ')}"
    if not any(table.rows for table in tables):
        return [Section(title=title, text=f"{_TEXT[control]} Nothing of it could be run; see the last table.")]
    return [Section(title=title, text=_TEXT[control], tables=tuple(tables), pictures=tuple(pictures))]


_VARIANT = (
    "scorer", "task", "value", "queries", "M", "nDCG", "nDCG low", "nDCG high", "nDCG over orders", "τ-PSI",
    "τ-PSI low", "τ-PSI high", "overlap", "retention",
)  # fmt: skip


def _of_variants(study: Study, control: str, variants: Sequence[Variant]) -> list[Table]:
    """Each value's quality and stability, and how far the values' rankings of the same candidates agree."""
    rows: list[tuple[Cell, ...]] = []
    for variant in variants:
        task, entry = study.tasks[variant.task], study.entries[variant.task][variant.scorer]
        ndcg = _first(variant, task)
        measured = measure_at(
            variant.shown, threshold_of(entry), qrels=task.qrels, k=task.settings.k,
            min_grade=task.settings.min_grade, dev=entry.measured.dev if entry.measured is not None else (),
        )  # fmt: skip
        means = measured.means
        quality = _interval(study, ndcg.values())
        psi = _interval(study, measured.figure("tau_psi").values())
        count = variant.shown[0].count if variant.shown else None
        rows.append(
            (
                variant.scorer, variant.task, variant.value, len(variant.pools), count, *quality,
                defined(means["mean_ndcg"]), *psi, defined(means["overlap"]), defined(means["retention"]),
            )
        )  # fmt: skip
    note = "overlap and retention at the scorer's own threshold of the main study, on queries it was not fitted on"
    tables = [Table(title=f"By {control.replace('_', ' ')}", columns=_VARIANT, rows=tuple(rows), note=note)]
    if control == "first_stage":
        return [*tables, _stages(study, variants)]
    between = _between(study, control, variants)
    return [*tables, between] if between.rows else tables


def _between(study: Study, control: str, variants: Sequence[Variant]) -> Table:
    """The values of a control against each other on the first-stage order of the same candidates."""
    rows: list[tuple[Cell, ...]] = []
    for scorer, task_name in dict.fromkeys((v.scorer, v.task) for v in variants):
        mine = [v for v in variants if (v.scorer, v.task) == (scorer, task_name)]
        if len(mine) < 2:
            continue
        task, entry = study.tasks[task_name], study.entries[task_name][scorer]
        together = _together(mine)
        at = threshold_of(entry)
        fitted = set(entry.measured.dev) if entry.measured is not None else set()
        kept = [q for q in together if at is not None and q.query_id not in fitted]
        overlap = _mean(retained_overlap(at.retain(q.scores)) for q in kept) if at is not None else math.nan
        floor = noise_floor([list(_first(v, task).values()) for v in mine])
        moved = [float(np.nanmax(np.abs(q.scores - q.scores[0]))) for q in together if not np.isnan(q.scores).all()]
        psi = _interval(study, (tau_psi(q.ranks) for q in together))
        rows.append(
            (
                scorer, task_name, ", ".join(v.value for v in mine), len(together), *psi, defined(overlap),
                floor.low, floor.high, floor.changed, max(moved, default=None),
            )
        )  # fmt: skip
        if control == "width" and mine[0].value == "1":
            for v in mine[1:]:
                effect = width_effect(
                    width_outcome(b.query_id, b.scores(), one.scores())
                    for b, one in zip(v.first, mine[0].first, strict=True)
                )
                said: tuple[Cell, ...] = (scorer, task_name, f"{v.value} against 1", effect.n, *_NOTHING)
                rows.append((*said, defined(effect.distance), defined(effect.shift)))
    columns: tuple[str, ...] = (
        "scorer", "task", "values", "queries", "τ-PSI between", "low", "high", "overlap between", "least nDCG",
        "most nDCG", "queries whose nDCG differs", "largest score difference",
    )  # fmt: skip
    if any(len(row) > len(columns) for row in rows):
        columns = (*columns, "distance", "shift")
        rows = [(*row, *(None,) * (len(columns) - len(row))) for row in rows]
    title = f"Between values of {control.replace('_', ' ')}"
    note = "rankings of the same candidates in first-stage order, one for each value"
    return Table(title=title, columns=columns, rows=tuple(rows), note=note)


_NOTHING: tuple[Cell, ...] = (None,) * 8


def _stages(study: Study, variants: Sequence[Variant]) -> Table:
    """What the first stages themselves are worth, and what the scorer adds."""
    rows: list[tuple[Cell, ...]] = []
    for variant in variants:
        task = study.tasks[variant.task]
        order = [Presentations.of_rankings(pool.query_id, [list(pool.doc_ids)]) for pool in variant.pools if len(pool)]
        own = _mean(o.mean_ndcg for o in stability(order, qrels=task.qrels, k=task.settings.k))
        reranked = _mean(_first(variant, task).values())
        gain = None if own is None or reranked is None else reranked - own
        rows.append((variant.scorer, variant.task, variant.value, len(order), own, reranked, gain))
    columns = ("scorer", "task", "first stage", "queries", "nDCG of the first stage", "reranked", "gain")
    return Table(title="First stages", columns=columns, rows=tuple(rows))


def _of_pools(study: Study, variants: Sequence[Variant]) -> list[Table]:
    rows: list[tuple[Cell, ...]] = []
    originals = {(v.scorer, v.task): v for v in variants if v.value == "original"}
    for variant in variants:
        if variant.value == "original":
            continue
        task = study.tasks[variant.task]
        before = originals[variant.scorer, variant.task]
        shifts = [
            pool_shift(
                b.query_id, _served(b), _served(a), judged=task.qrels.get(b.query_id), k=min(10, task.settings.k)
            )
            for b, a in zip(before.first, variant.first, strict=True)
        ]
        psi = _interval(study, (shift.pool_psi for shift in shifts))
        rows.append(
            (
                variant.scorer, variant.task, variant.value, task.settings.candidates, len(shifts),
                _mean(shift.survivors for shift in shifts), *psi, _mean(shift.top_k_changed for shift in shifts),
                _mean(shift.ndcg_change for shift in shifts), _mean(abs(shift.ndcg_change) for shift in shifts),
            )
        )  # fmt: skip
    columns = (
        "scorer", "task", "change", "depth", "queries", "survivors", "Pool-PSI", "low", "high", "top k changed",
        "nDCG change", "absolute",
    )  # fmt: skip
    note = "the study this follows changes pools of 100; the depth here is the task's"
    return [Table(title="Pool-PSI", columns=columns, rows=tuple(rows), note=note)]


def _readouts(study: Study, entries: Sequence[Entry], values: list[Any]) -> tuple[list[Table], list[Picture]]:
    rows: list[tuple[Cell, ...]] = []
    for entry in entries:
        task = study.tasks[entry.task]
        for readout in (name for name in READOUTS if name in values and entry.tables):
            shown = [
                Presentations.of_table(table, readout)  # type: ignore[arg-type]
                for table in entry.tables
            ]
            outcomes = stability(shown, qrels=task.qrels, k=task.settings.k, min_grade=task.settings.min_grade)
            rows.append(
                (
                    entry.name, entry.task, readout, shown[0].count, *_interval(study, (o.mean_ndcg for o in outcomes)),
                    *_interval(study, (o.tau_psi for o in outcomes)), _mean(o.tau_psi_b for o in outcomes),
                    _mean(o.tie_rate for o in outcomes),
                )
            )  # fmt: skip
    columns = (
        "scorer", "task", "readout", "M", "nDCG over orders", "nDCG low", "nDCG high", "τ-PSI", "τ-PSI low",
        "τ-PSI high", "τ-PSI, ties as ties", "ties",
    )  # fmt: skip
    return [Table(title="By readout", columns=columns, rows=tuple(rows))], []


def _k_sweep(study: Study, entries: Sequence[Entry], values: list[Any]) -> tuple[list[Table], list[Picture]]:
    rows: list[tuple[Cell, ...]] = []
    for entry in entries:
        task, at = study.tasks[entry.task], threshold_of(entry)
        dev = () if entry.measured is None else entry.measured.dev
        there = entry.stored[0].count if entry.stored else 0
        for k in (k for k in (1, 2, 3, 4, 5, 10, 15, 20) if 2 * k <= there):
            means = measure_at(
                [query.averaged(k) for query in entry.stored], at, qrels=task.qrels, k=task.settings.k,
                min_grade=task.settings.min_grade, dev=dev,
            ).means  # fmt: skip
            figures = ("mean_ndcg", "tau_psi", "overlap", "retention", "pair_flip", "top_k_churn")
            rows.append((entry.name, entry.task, k, there // k, *(defined(means[name]) for name in figures)))
    columns = ("scorer", "task", "K", "ensembles", "nDCG", "τ-PSI", "overlap", "retention", "pair flip", "churn")
    note = "overlap at the threshold that was fitted for one presentation"
    return [Table(title="By K", columns=columns, rows=tuple(rows), note=note)], []


def _sources(study: Study, entries: Sequence[Entry], values: list[Any]) -> tuple[list[Table], list[Picture]]:
    shares: list[tuple[Cell, ...]] = []
    profiles: list[tuple[Cell, ...]] = []
    pictures = []
    for entry in entries:
        queries = [q for q in entry.stored if q.slot is not None and q.window is not None]
        if not queries:
            continue
        parts = [variance_parts(q.query_id, q.scores, q.slot, q.window) for q in queries]  # type: ignore[arg-type]
        found = variance_shares(parts)
        beta = silver_beta(queries, top_grade=float(entry.tables[0].grades.shape[2] - 1))
        shares.append(
            (
                entry.name, entry.task, found.n, defined(found.total), defined(found.slot), defined(found.window),
                defined(found.companions), defined(beta),
            )
        )  # fmt: skip
        profile = slot_profile(queries)
        ends = [_interval(study, column) for column in profile.residuals.T]
        profiles += [(entry.name, entry.task, slot, *end) for slot, end in enumerate(ends)]
        low, high = ([math.nan if end[side] is None else float(end[side] or 0.0) for end in ends] for side in (1, 2))
        title = f"Slot profile, {entry.name}, {entry.task}"
        caption = "What each slot adds to a score, with 95 % intervals; flat at 0 is a scorer without favourite places."
        pictures.append(Picture(title=title, caption=caption, svg=drawn_profile(profile.psi, low, high, title=title)))
    tables = [
        Table(
            title="Variance shares",
            columns=("scorer", "task", "queries", "variance over orders", "slot", "window", "rest", "silver-β"),
            rows=tuple(shares),
            note="shares of the variance over orders; silver-β: what a slot moves a grade, root mean square over slots",
        ),
        Table(
            title="Slot profile",
            columns=("scorer", "task", "slot", "ψ", "low", "high"),
            rows=tuple(profiles),
            note="mean of the score less the candidate's mean over presentations",
        ),
    ]
    return tables, pictures


def _adaptive(study: Study, entries: Sequence[Entry], values: list[Any]) -> tuple[list[Table], list[Picture]]:
    rows: list[tuple[Cell, ...]] = []
    for entry in entries:
        task, dev = study.tasks[entry.task], study.dev.get(entry.task)
        there = entry.stored[0].count if entry.stored else 0
        size = there // 2
        if size < 3:
            continue
        # every row has two ensembles, so that none is steadier for having more
        settles = {f"until {v:g}": settle_of(entry, task, dev, size=size, tolerance=float(v)) for v in values}
        at = next(iter(settles.values())).threshold
        made: dict[str, Entry] = {}
        for k in (k for k in (1, 2, 3, 5, 10, 20) if k <= size):
            fixed = tuple(_pair_of_means(query, k, size) for query in entry.stored)
            spent = {query.query_id: float(k) for query in fixed}
            made[f"fixed {k}"] = Entry(name=entry.name, task=entry.task, shown=fixed, spent=spent)
        made |= {how: adaptive(entry.name, entry, settle, size=size, count=2) for how, settle in settles.items()}
        for how, one in made.items():
            limit = None if at is None else Threshold(value=at)
            means = measure_at(
                one.shown, limit, qrels=task.qrels, k=task.settings.k, min_grade=task.settings.min_grade, dev=dev or ()
            ).means
            tested = [v for q, v in one.spent.items() if q not in set(dev or ())]
            figures = ("overlap", "tau_psi", "selection_flip", "mean_ndcg")
            rows.append((entry.name, entry.task, how, size, _mean(tested), *(defined(means[f]) for f in figures)))
    columns = (
        "scorer", "task", "presentations", "at most", "spent", "overlap", "τ-PSI", "selection flip", "nDCG",
    )  # fmt: skip
    note = (
        "two disjoint ensembles in every row; 'until': expected wrong decisions by the size of the set at which a "
        "query is settled; overlap at one threshold, fitted on the dev half for ensembles of the most presentations"
    )
    return [Table(title="Adaptive K", columns=columns, rows=tuple(rows), note=note)], []


_STORED: Mapping[str, Callable[[Study, Sequence[Entry], list[Any]], tuple[list[Table], list[Picture]]]] = {
    "readout": _readouts,
    "k_sweep": _k_sweep,
    "sources": _sources,
    "adaptive": _adaptive,
}


# -- costs, and the rest ------------------------------------------------------------------------------------------


def _costs(study: Study) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for task, entries in study.entries.items():
        for name, entry in entries.items():
            windows = [1 + int(table.window.max()) for table in entry.tables if table.window.size]
            per = _mean(float(n) for n in windows) if windows else None
            spent = _mean(entry.spent.values())
            cut = sum(int(table.cut.sum()) for table in entry.tables)
            missing = sum(int(table.fallback.sum()) for table in entry.tables)
            known = bool(entry.tables)
            rows.append((task, name, spent, per, cut if known else None, missing if known else None))
    columns = ("task", "scorer", "presentations per ranking", "prompts per presentation", "characters cut", "no grade")
    note = "characters cut off documents' ends, and grades the engine did not give, over all that was scored"
    return Section(title="Cost", tables=(Table(title="Cost", columns=columns, rows=tuple(rows), note=note),))


def _queries(study: Study) -> tuple[Query, ...]:
    """The main scorer's queries, task by task, those that move most first."""
    found: list[Query] = []
    for name, entries in study.entries.items():
        entry = entries.get(study.main)
        if entry is None or entry.measured is None:
            continue
        task = study.tasks[name]
        whole = stability_report(entry.measured, name=name, qrels=task.qrels, pools=task.pools, settings={})
        found += [replace(query, query_id=f"{name} {query.query_id}") for query in whole.queries[:_LISTED]]
    return tuple(found)


# -- inner parts --------------------------------------------------------------------------------------------------


def _recipe(study: Study) -> Recipe:
    return Recipe(resamples=study.settings.resamples, seed=QUERIES.seed)


def _interval(study: Study, values: Iterable[float]) -> tuple[Cell, Cell, Cell]:
    there = [value for value in values if not math.isnan(value)]
    if not there:
        return None, None, None
    found = paired_bootstrap(there, _recipe(study))
    return found.estimate, found.low, found.high


def _mean(values: Iterable[float]) -> float | None:
    there = [value for value in values if not math.isnan(value)]
    return math.fsum(there) / len(there) if there else None


def _first(variant: Variant, task: Task) -> dict[str, float]:
    shown = [Presentations.of_table(table) for table in variant.first]
    outcomes = stability(shown, qrels=task.qrels, k=task.settings.k, min_grade=task.settings.min_grade)
    return {outcome.query_id: outcome.mean_ndcg for outcome in outcomes}


def _together(variants: Sequence[Variant]) -> list[Presentations]:
    """One presentation for each value, on the candidates they share."""
    return [Presentations.of_tables(tables) for tables in zip(*(v.first for v in variants), strict=True)]


def _served(table: ScoreTable) -> dict[str, float]:
    return dict(zip(table.doc_ids, table.mean().tolist(), strict=True))


def _pair_of_means(query: Presentations, k: int, size: int) -> Presentations:
    means = [query.scores[start : start + k].mean(axis=0) for start in (0, size)]
    return Presentations.of_scores(query.query_id, query.doc_ids, np.array(means))


def _arrow(figure: Figure) -> str:
    return {1: "higher", -1: "lower", 0: ""}[figure.better]
