"""A report as one HTML page that asks for nothing outside itself and works without JavaScript."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from pd_rerank._extras import need
from pd_rerank.evaluation.report import Cell, Report, Row, Table, shown


def page(report: Report) -> str:
    """The whole page as text: sections in order, then the queries, each to be opened for its documents, then settings.

    Ids and texts are escaped; only the drawings of `Picture` stand as they are given. Everything the report holds is
    on the page: what is too much to read, its maker leaves out, and says so. Needs jinja2 (extra eval).
    """
    names = list(dict.fromkeys(name for query in report.queries for name in query.values))
    html = _template().render(report=report, names=names)
    return str(html.encode("utf-8", "replace").decode("utf-8"))  # a lone surrogate in a text cannot be written


@cache
def _template() -> Any:
    jinja2 = need("jinja2", extra="eval", purpose="HTML reports are laid out with 'jinja2'")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(shown=shown, setting=_setting, numeric=_numeric, figures=_figures)
    return environment.from_string((files(__package__) / "report.html.j2").read_text(encoding="utf-8"))


def _figures(rows: tuple[Row, ...]) -> Table:
    """`rows` as a table: the interval in one cell, and no column that is empty throughout."""
    columns: dict[str, list[Cell]] = {
        "figure": [row.name for row in rows],
        "value": [row.value for row in rows],
        "interval": [_interval(row) for row in rows],
        "n": [row.n for row in rows],
        "note": [row.note for row in rows],
    }
    used = {name for name, cells in columns.items() if any(cell not in (None, "") for cell in cells)}
    kept = {name: cells for name, cells in columns.items() if name == "value" or name in used}
    return Table(title="Figures", columns=tuple(kept), rows=tuple(zip(*kept.values(), strict=True)))


def _interval(row: Row) -> str | None:
    return None if row.low is None and row.high is None else f"{shown(row.low)} to {shown(row.high)}"


def _numeric(table: Table) -> list[bool]:
    """Which columns hold numbers and nothing else; an id like 007 is text and stays so when sorted."""
    columns = ([row[i] for row in table.rows if row[i] is not None] for i in range(len(table.columns)))
    return [bool(cells) and all(type(cell) in (int, float) for cell in cells) for cells in columns]


def _setting(value: Any) -> str:
    plain = isinstance(value, Mapping | list | tuple)
    return json.dumps(value, ensure_ascii=False, default=str) if plain else str(value)
