"""What an evaluation found, as data: rows with intervals, tables, pictures, queries worst first; and its files."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pd_rerank._extras import need
from pd_rerank.evaluation.resampling import Interval, paired_bootstrap
from pd_rerank.files import check_folder, whole_file, whole_folder, write_json

Cell = str | float | int | None

FILES = ("report.json", "report.md", "queries.csv", "report.html")
"""What `write_report` puts into its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure: its value with an interval where there is one, and the `n` units it is of; None is undefined."""

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table: each row has one cell per column; None is an empty cell."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture as SVG text, with what it shows in words."""

    title: str
    caption: str
    svg: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of a report under a heading, read from top to bottom: text, figures, tables, pictures."""

    title: str
    text: str = ""
    rows: tuple[Row, ...] = ()
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One query (or one labelled direction): its figures by name, and the documents behind them where worth a look."""

    query_id: str
    query: str = ""
    values: Mapping[str, float | None] = field(default_factory=dict)
    documents: Table | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A whole report; `settings` is what it was made from and how, as JSON values; `queries` stand worst first."""

    title: str
    settings: Mapping[str, Any]
    sections: tuple[Section, ...]
    queries: tuple[Query, ...] = ()


# -- parts ----------------------------------------------------------------------------------------------------------


def interval_row(name: str, found: Interval, note: str = "") -> Row:
    """A figure with the interval that resampling gave it."""
    return Row(name=name, value=found.estimate, low=found.low, high=found.high, n=found.n, note=note)


def mean_row(name: str, values: Iterable[float], note: str = "") -> Row:
    """The mean over the queries that have the figure, queries resampled; NaN ones are left out and counted."""
    every = list(values)
    there = [value for value in every if not math.isnan(value)]
    if len(there) < len(every):
        note = f"{note}{'; ' if note else ''}undefined for {len(every) - len(there)}"
    return interval_row(name, paired_bootstrap(there), note) if there else Row(name=name, value=None, n=0, note=note)


def beginning(text: str, most: int = 160) -> str:
    """The start of a text on one line, fit for any file."""
    line = " ".join(text[: 4 * most].split()).encode("utf-8", "replace").decode()
    return line if len(line) <= most else f"{line[: most - 1]}…"


def some(ids: Sequence[str], most: int = 10) -> str:
    """The first few ids, quoted, for a sentence."""
    return ", ".join(f"'{name}'" for name in ids[:most]) + (", …" if len(ids) > most else "")


def defined(value: float | None) -> float | None:
    """`value`, or None where it is NaN or infinite: what JSON can carry."""
    return None if value is None or not math.isfinite(value) else float(value)


def shown(value: Cell) -> str:
    """A cell as a reader sees it: whole numbers whole, others with four decimals or two digits, – for nothing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.1e}" if 1e-12 < abs(value) < 5e-5 else f"{value:.4f}".replace("-0.0000", "0.0000")


# -- files ----------------------------------------------------------------------------------------------------------


def as_json(report: Report) -> dict[str, Any]:
    """The report as JSON values: everything but the pictures' drawings; undefined figures are null."""
    return {
        "title": report.title,
        "settings": _plain(report.settings),
        "sections": [
            {
                "title": section.title,
                "text": section.text,
                "rows": [_row(row) for row in section.rows],
                "tables": [_table(table) for table in section.tables],
                "pictures": [{"title": p.title, "caption": p.caption} for p in section.pictures],
            }
            for section in report.sections
        ],
        "queries": [
            {
                "query_id": query.query_id,
                "query": query.query,
                "values": _plain(query.values),
                "documents": None if query.documents is None else _table(query.documents),
            }
            for query in report.queries
        ],
    }


def as_markdown(report: Report) -> str:
    """The report as Markdown; of the pictures only what they show, in words."""
    return "\n".join(_markdown(report)) + "\n"


def check_destination(folder: str | Path) -> None:
    """Find out before any work whether a report with pictures can be drawn and written into `folder`."""
    check_folder(folder, holds=FILES)
    need("jinja2", extra="eval", purpose="reports are laid out with 'jinja2'")
    need("matplotlib", extra="eval", purpose="reports are drawn with 'matplotlib'")


def write_report(report: Report, folder: str | Path) -> None:
    """Write report.json, report.md, queries.csv and report.html into `folder`, whole or not at all.

    A folder that holds anything else is refused. The page needs jinja2 (extra eval).
    """
    from pd_rerank.evaluation.page import page

    with whole_folder(folder, holds=FILES) as fresh:
        write_json(fresh / "report.json", as_json(report))
        for name, text in (("report.md", as_markdown(report)), ("report.html", page(report))):
            with whole_file(fresh / name) as stream:
                stream.write(text)
        _write_queries(report, fresh / "queries.csv")


# -- inner parts --------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """`value` as JSON carries it: NaN and infinity null, paths and other objects as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return defined(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _row(row: Row) -> dict[str, Any]:
    low, high = defined(row.low), defined(row.high)
    return {"name": row.name, "value": defined(row.value), "low": low, "high": high, "n": row.n, "note": row.note}


def _table(table: Table) -> dict[str, Any]:
    return {"title": table.title, "columns": list(table.columns), "rows": _plain(table.rows), "note": table.note}


def _value_names(report: Report) -> list[str]:
    return list(dict.fromkeys(name for query in report.queries for name in query.values))


def _write_queries(report: Report, path: Path) -> None:
    names = _value_names(report)
    with whole_file(path) as stream:
        rows = csv.writer(stream, lineterminator="\n")
        rows.writerow(["query_id", "query", *names])
        for query in report.queries:
            values = [defined(query.values.get(name)) for name in names]
            rows.writerow([query.query_id, query.query, *("" if v is None else repr(v) for v in values)])


def _markdown(report: Report) -> Iterator[str]:
    yield f"# {_text(report.title)}"
    for section in report.sections:
        yield f"\n## {_text(section.title)}"
        if section.text:
            yield f"\n{_text(section.text)}"
        if section.rows:
            columns = ("", "value", "low", "high", "n", "note")
            yield from _grid(columns, [(r.name, r.value, r.low, r.high, r.n, r.note) for r in section.rows])
        for table in section.tables:
            yield f"\n**{_text(table.title)}**{f'. {_text(table.note)}' if table.note else ''}"
            yield from _grid(table.columns, table.rows)
        for picture in section.pictures:
            yield f"\n*{_text(picture.title)}*: {_text(picture.caption)} (drawn in report.html)"
    if report.queries:
        yield "\n## Queries, worst first"
        names = _value_names(report)
        rows = [(q.query_id, *(q.values.get(name) for name in names)) for q in report.queries]
        yield from _grid(("query", *names), rows)
        for query in report.queries:
            if query.documents is not None:
                yield f"\n### {_text(query.query_id)}: {_text(query.query)}"
                yield from _grid(query.documents.columns, query.documents.rows)
    yield "\n## Settings"
    yield from _grid(("setting", "value"), [(name, str(value)) for name, value in report.settings.items()])


def _grid(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Iterator[str]:
    yield ""
    yield f"| {' | '.join(_text(column) for column in columns)} |"
    yield f"|{'|'.join('---' for _ in columns)}|"
    for row in rows:
        yield f"| {' | '.join(_text(shown(cell)) for cell in row)} |"


_MARKUP = str.maketrans({char: f"\\{char}" for char in "\\|<>*_`[]#"})


def _text(value: str) -> str:
    """`value` on one line, with what Markdown would take for markup escaped."""
    return " ".join(value.split()).translate(_MARKUP)
