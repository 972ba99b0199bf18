"""The NevIR study's page in a real browser: nothing on the console, nothing asked for, every part there."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from tests.evaluation.test_page_in_browser import browse, said
from tests.evaluation.test_page_in_browser import pytestmark as browser
from tests.studies.test_nevir import execute, rows, small

pytestmark = browser


def test_the_page_of_a_study_loads_and_shows_every_table(tmp_path: Path) -> None:
    scorer = {"type": "ocsft", "model": "words", "options": {"engine": "fake", "window": 5, "position_bias": 0.3}}
    assert execute(tmp_path, small(train=None, scorers={"words": scorer | {"presentations": 2}})) == 0
    html = (tmp_path / "run" / "report" / "index.html").read_text(encoding="utf-8")
    script = """
    const heads = [...document.querySelectorAll("h2, h3, caption")].map((e) => e.textContent.trim());
    document.body.dataset.said = JSON.stringify({ heads, wide: document.body.scrollWidth - innerWidth });
    """
    document, console, asked = browse(html, tmp_path / "browser", script=script)
    found = said(document)
    assert isinstance(found, dict)
    assert console == []
    assert asked == set()
    assert any("Order, preference and position" in head for head in found["heads"])
    assert found["wide"] <= 0  # a wide table scrolls by itself
    assert len(rows(tmp_path / "run", "order-preference-and-position")) == 2
