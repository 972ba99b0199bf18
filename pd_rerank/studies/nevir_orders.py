"""The NevIR study beyond the paper: order stability beside preference and position, same scorers, same directions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pd_rerank.evaluation.order_preference import TOPS, OrderOutcome, averaged, order_outcomes, over_orders, primary
from pd_rerank.evaluation.pictures import Point, order_preference_position
from pd_rerank.evaluation.preference import PairOutcome, per_direction
from pd_rerank.evaluation.report import Cell, Picture, Section, Table
from pd_rerank.evaluation.resampling import Interval, group_bootstrap
from pd_rerank.scores import Scores
from pd_rerank.studies.nevir import Entry, Study

TITLE = "Order, preference and position"

_SIZES = (1, 2, 3, 5, 10)
"""Ensembles of orders that are looked at, where there are two of them."""

_PAPER = {"strict": "strict", "MRR": "reciprocal_rank"}
"""What the paper measures, in first-stage order."""

_ORDERED = {
    "strict, over orders": "strict",
    "MRR, over orders": "reciprocal_rank",
    "τ-PSI": "tau_psi",
    **{f"top {k} overlap": f"overlap@{k}" for k in TOPS},
    "preference changes": "preference_changes",
    "pairs of orders that differ": "preference_differs",
    **{f"crosses top {k}": f"crosses@{k}" for k in TOPS},
    "rank moves by": "rank_range",
}
"""What several orders show, by the name of its columns."""

_SPENT = ("strict", "reciprocal_rank", "tau_psi", *(f"overlap@{k}" for k in TOPS), "preference_differs")

_NOTE = (
    "strict and MRR: in first-stage order, as in Table II; over orders: the mean over seeded shuffles of the window; "
    "overlap: mean Jaccard index of the top sets over pairs of orders; changes: not the same relation in all orders; "
    "crosses: the preferred passage is in the top in some orders only; rank moves by: its highest less its lowest. "
    "Intervals resample source groups. First stage and trees see no order: nothing to measure, cells are empty"
)
_NOTE_SPENT = (
    "averaged: so many orders' grades in one, as a reranker does that serves their mean, by disjoint ensembles; "
    "presentations: what one window then takes, with those a scorer averages itself or settles early from"
)


def order_sections(study: Study) -> list[Section]:
    """Order stability, preference and position of every scorer that read the test windows in several orders."""
    entries = study.entries["test"]
    read = {name: entry for name, entry in entries.items() if entry.orders}
    if not read:
        return []
    common = set.intersection(*(_directions(entry) for entry in read.values()))
    columns = ["ranker", "n", "groups", "orders", "presentations"]
    columns += [f"{name}{end}" for name in (*_PAPER, *_ORDERED) for end in ("", " low", " high")]
    text = (
        "What the papers measure apart: whether a ranking stays when the window's candidates arrive in another order, "
        "whether the right passage is preferred, and where it stands. "
    )
    if not common:
        text += "The scorers have no direction in common, so that they cannot stand side by side."
        return [Section(title=TITLE, text=text)]
    text += f"Over the {len(common)} directions that all scorers below have read in several orders."
    k = study.settings.window
    rows: list[tuple[Cell, ...]] = []
    spent: list[tuple[Cell, ...]] = []
    points: list[tuple[Point, Point]] = []
    for name, entry in entries.items():
        at = [i for i, case in enumerate(entry.cases) if case.direction.direction_id in common]
        if len(at) < len(common) or (entry.rows and not entry.orders):
            continue
        paper = [entry.outcomes[i] for i in at]
        found = primary(order_outcomes([entry.cases[i] for i in at], _taken(entry, at), k=k)) if entry.orders else []
        rows.append(_row(name, entry, paper, found))
        if found:
            spent += _spent(name, entry, at, k)
            points.append(_points(name, paper, found))
    picture = Picture(
        title=TITLE,
        caption=(
            "How far order moves the window's ranking, against how often the right passage is preferred (full marks) "
            "and how high it stands (open marks), both in first-stage order."
        ),
        svg=order_preference_position([full for full, _ in points], [open_ for _, open_ in points]),
    )
    averages = ("ranker", "averaged", "ensembles", "presentations", "n", *_SPENT_COLUMNS)
    tables = (
        Table(title=TITLE, columns=tuple(columns), rows=tuple(rows), note=_NOTE),
        Table(title="Presentations spent and overlap reached", columns=averages, rows=tuple(spent), note=_NOTE_SPENT),
    )
    return [Section(title=TITLE, text=text, tables=tables, pictures=(picture,))]


_SPENT_COLUMNS = ("strict", "MRR", "τ-PSI", *(f"top {k} overlap" for k in TOPS), "pairs of orders that differ")


def _row(name: str, entry: Entry, paper: Sequence[PairOutcome], found: Sequence[OrderOutcome]) -> tuple[Cell, ...]:
    groups = [o.direction.group for o in paper]
    cells: list[Cell] = [name, len(paper), len(set(groups)), len(entry.orders) or None, entry.presentations]
    for measure in _PAPER.values():
        cells += _cells(_interval(per_direction(paper, measure), groups))
    for measure in _ORDERED.values():
        values = over_orders(found, measure) if found else np.zeros(0)
        cells += _cells(_interval(values, [o.direction.group for o in found]))
    return tuple(cells)


def _spent(name: str, entry: Entry, at: Sequence[int], k: int) -> list[tuple[Cell, ...]]:
    rows: list[tuple[Cell, ...]] = []
    cases, grades = [entry.cases[i] for i in at], _taken(entry, at)
    for size in _SIZES:
        served = averaged(grades, size)
        if len(served) < 2:
            break
        found = primary(order_outcomes(cases, served, k=k))
        means = [_mean(over_orders(found, measure)) for measure in _SPENT]
        rows.append((name, size, len(served), size * (entry.presentations or 1.0), len(found), *means))
    return rows


def _points(name: str, paper: Sequence[PairOutcome], found: Sequence[OrderOutcome]) -> tuple[Point, Point]:
    moved = _interval(over_orders(found, "tau_psi"), [o.direction.group for o in found])
    groups = [o.direction.group for o in paper]
    x, x_low, x_high = _cells(moved)
    full, open_ = (_cells(_interval(per_direction(paper, measure), groups)) for measure in _PAPER.values())
    return tuple(  # type: ignore[return-value]
        Point(name=name, x=x, x_low=x_low, x_high=x_high, y=y, y_low=low, y_high=high) for y, low, high in (full, open_)
    )


# -- inner parts ----------------------------------------------------------------------------------------------------


def _directions(entry: Entry) -> set[str]:
    """The directions read in several orders that a figure can be about: both passages there, no conflict."""
    read = [case for case, grades in zip(entry.cases, entry.orders[0], strict=True) if grades is not None]
    return {case.direction.direction_id for case in read if case.missing is None and case.direction.conflict is None}


def _taken(entry: Entry, at: Sequence[int]) -> list[list[Scores]]:
    """Each order's grades of some cases, all of which were read in every order."""
    return [[grades for i in at if (grades := order[i]) is not None] for order in entry.orders]


def _interval(values: Scores, groups: Sequence[str]) -> Interval | None:
    """The mean over the directions that have a value; None where none has."""
    there = np.isfinite(values)
    if not there.any():
        return None
    return group_bootstrap(values[there], [group for group, some in zip(groups, there, strict=True) if some])


def _cells(found: Interval | None) -> tuple[float | None, float | None, float | None]:
    return (None, None, None) if found is None else (found.estimate, found.low, found.high)


def _mean(values: Scores) -> float | None:
    there = values[np.isfinite(values)]
    return float(there.mean()) if there.size else None
