"""The studies' pages in a real browser: nothing on the console, nothing asked for, every part there, on any screen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightgbm")
pytest.importorskip("matplotlib")

from tests.evaluation.test_page_in_browser import browse, framed, said
from tests.evaluation.test_page_in_browser import pytestmark as browser
from tests.studies import test_nevir, test_order
from tests.studies.runs import Pipeline, rows

pytestmark = browser

ORDERED = {"type": "ocsft", "model": "words", "options": {"engine": "fake", "window": 5, "position_bias": 0.3}}
NEVIR = test_nevir.small(train=None, scorers={"words": ORDERED | {"presentations": 2}})
ORDER = test_order.small(controls={"reverse": {"queries": 4}, "sources": {}})
ORDER["tasks"]["q"] = {"type": "qa", "templates": 6, "candidates": 5, "window": 5, "reader": {"type": "extractive"}}


@pytest.mark.parametrize(
    ("execute", "config", "head", "table"),
    [
        (test_nevir.execute, NEVIR, "Order, preference and position", "order-preference-and-position"),
        (test_order.execute, ORDER, "Table 1", "table-1"),
    ],
    ids=["nevir", "order"],
)
def test_the_page_of_a_study_loads_and_shows_every_table(
    tmp_path: Path, execute: Pipeline, config: dict[str, Any], head: str, table: str
) -> None:
    assert execute(tmp_path, config) == 0
    report = tmp_path / "run" / "report"
    script = """{
      heads: [...inner.querySelectorAll("h2, h3, caption")].map((e) => e.textContent.trim()),
      tables: inner.querySelectorAll("table").length,
      figures: inner.querySelectorAll("svg").length,
      wide: root.scrollWidth - root.clientWidth,
    }"""
    html, script = framed((report / "index.html").read_text(encoding="utf-8"), "", script)
    document, console, asked = browse(html, tmp_path / "browser", script=script)
    found = said(document)
    assert isinstance(found, dict)
    assert console == []
    assert asked == set()
    assert any(head in title for title in found["heads"])
    assert found["figures"] == len(list((report / "figures").glob("*.svg"))) > 0
    assert found["tables"] >= len(list((report / "tables").glob("*.csv")))
    assert found["wide"] == 0  # a wide table scrolls by itself, on a telephone too
    assert len(rows(tmp_path / "run", table)) == 2
