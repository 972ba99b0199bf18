"""Reports as data and as files: JSON, Markdown and CSV say the same, whatever ids and texts hold."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

from pd_rerank.errors import BadArgument
from pd_rerank.evaluation.report import (
    Picture,
    Query,
    Report,
    Row,
    Section,
    Table,
    as_json,
    as_markdown,
    beginning,
    check_destination,
    mean_row,
    shown,
    write_report,
)

NAN = float("nan")


def report() -> Report:
    documents = Table(title="Documents", columns=("document", "score"), rows=(("d|1", 0.5), ("d2", None)))
    return Report(
        title="A *report*",
        settings={"file": Path("a/b"), "limits": (1, NAN), "none": None},
        sections=(
            Section(
                title="One",
                text="Some <b>words</b>",
                rows=(Row(name="psi", value=0.25, low=0.1, high=0.4, n=3, note="x"), Row(name="gone", value=NAN)),
                tables=(documents,),
                pictures=(Picture(title="Drawn", caption="what it shows", svg="<svg/>"),),
            ),
        ),
        queries=(
            Query(query_id="007", query="one\n two", values={"psi": 0.5}, documents=documents),
            Query(query_id="NA", query='with "quotes", commas', values={"psi": NAN, "other": 1}),
        ),
    )


def test_json_holds_everything_but_the_drawings_and_no_nan() -> None:
    found = json.loads(json.dumps(as_json(report()), allow_nan=False))
    assert found["settings"] == {"file": "a/b", "limits": [1, None], "none": None}
    (section,) = found["sections"]
    assert section["rows"][0] == {"name": "psi", "value": 0.25, "low": 0.1, "high": 0.4, "n": 3, "note": "x"}
    assert section["rows"][1]["value"] is None
    assert section["tables"][0]["rows"] == [["d|1", 0.5], ["d2", None]]
    assert section["pictures"] == [{"title": "Drawn", "caption": "what it shows"}]
    assert found["queries"][0]["documents"]["columns"] == ["document", "score"]
    assert found["queries"][1]["values"] == {"psi": None, "other": 1}


def test_markdown_keeps_its_columns_whatever_cells_hold() -> None:
    lines = as_markdown(report()).splitlines()
    assert lines[0] == r"# A \*report\*"
    assert r"Some \<b\>words\</b\>" in lines
    assert r"| d\|1 | 0.5000 |" in lines
    assert "| psi | 0.2500 | 0.1000 | 0.4000 | 3 | x |" in lines
    assert "| NA | – | 1 |" in lines
    assert "### 007: one two" in lines


def test_the_csv_has_one_line_per_query_and_every_figure(tmp_path: Path) -> None:
    write_report(report(), tmp_path / "r")
    with open(tmp_path / "r/queries.csv", newline="", encoding="utf-8") as stream:
        found = list(csv.reader(stream))
    assert found == [
        ["query_id", "query", "psi", "other"],
        ["007", "one\n two", "0.5", ""],
        ["NA", 'with "quotes", commas', "", "1.0"],
    ]
    assert json.loads((tmp_path / "r/report.json").read_text(encoding="utf-8"))["title"] == "A *report*"


def test_a_report_that_cannot_be_laid_out_leaves_nothing(tmp_path: Path) -> None:
    broken = Report(title="x", settings={}, sections=(Section(title="x", tables=("no table",)),))  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        write_report(broken, tmp_path / "r")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_other_things_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(BadArgument, match=r"notes\.txt"):
        check_destination(tmp_path)
    check_destination(tmp_path / "new")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (NAN, "–"),
        (3, "3"),
        ("x", "x"),
        (0.12345, "0.1235"),
        (-1e-17, "0.0000"),
        (0.0, "0.0000"),
        (3.2e-6, "3.2e-06"),
        (6e-5, "0.0001"),
        (-0.5, "-0.5000"),
    ],
)
def test_a_cell_is_shown_so_that_small_is_told_from_nothing(value: float | str | None, text: str) -> None:
    assert shown(value) == text


def test_a_mean_leaves_out_what_is_undefined_and_counts_it() -> None:
    row = mean_row("psi", [0.0, NAN, 1.0], "a note")
    assert (row.value, row.n, row.note) == (0.5, 2, "a note; undefined for 1")
    assert (row.low, row.high) == (0.0, 1.0)
    none = mean_row("psi", [NAN])
    assert (none.value, none.n, none.note) == (None, 0, "undefined for 1")
    assert mean_row("psi", [0.3]).low is None


def test_the_beginning_of_a_text_is_one_line_that_any_file_takes() -> None:
    assert beginning("a\n\tb \ud800 c") == "a b ? c"
    assert beginning("x" * 200) == "x" * 159 + "…"
    assert math.isclose(len(beginning("word " * 100)), 160, abs_tol=5)
