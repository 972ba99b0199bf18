"""The HTML page of a report: all of it, in order, escaped, and nothing from outside."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="pages need the eval extra")

import pd_rerank
from pd_rerank.evaluation.page import page
from pd_rerank.evaluation.report import Picture, Query, Report, Row, Section, Table

EVIL = "<script>alert(1)</script> & \"quoted\" '<b>'"
SVG = '<svg xmlns="http://www.w3.org/2000/svg" role="img"><title>drawn</title><path d="M 0 0"/></svg>'


def report(*queries: Query, sections: tuple[Section, ...] = (), **settings: object) -> Report:
    return Report(title="A report", settings=settings, sections=sections, queries=queries)


def documents(*rows: tuple[str | float | int | None, ...], columns: tuple[str, ...] = ("document", "score")) -> Table:
    return Table(title="Documents that flip", columns=columns, rows=rows)


WHOLE = report(
    Query(query_id="q1", query="first?", values={"overlap": 0.25, "flips": 3}, documents=documents(("d1", 0.5))),
    Query(query_id="q2", query="second?", values={"overlap": None}),
    sections=(
        Section(
            title="Result",
            text="One paragraph.\n\nAnother.",
            rows=(
                Row(name="overlap", value=0.5, low=0.4, high=0.6, n=2),
                Row(name="ties", value=None, note="undefined for 2"),
            ),
        ),
        Section(
            title="Detail",
            tables=(Table(title="Systems", columns=("system", "nDCG"), rows=(("ours", 0.75),), note="of 2 queries"),),
            pictures=(Picture(title="Slots", caption="What slots do", svg=SVG),),
        ),
    ),
    threshold=0.5,
    inputs={"run": "a.trec", "other": ["é", 1]},
)


class Seen(HTMLParser):
    """What a parser finds in a page: elements with their attributes, and the text of each."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.open: list[list[str]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        text: list[str] = []
        self.elements.append((tag, dict(attrs), text))
        if tag not in ("meta", "input"):
            self.open.append(text)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))

    def handle_endtag(self, tag: str) -> None:
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for text in self.open:
            text.append(data)

    def of(self, *tags: str, **attributes: str) -> list[str]:
        """The texts of the elements with one of these tags and these attributes (`class_` for class)."""
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        return [
            " ".join("".join(text).split())
            for tag, found, text in self.elements
            if tag in tags and wanted.items() <= found.items()
        ]


def test_everything_the_report_holds_is_on_the_page() -> None:
    seen = Seen(page(WHOLE))
    assert seen.of("title") == ["A report", "drawn"]
    assert seen.of("h1") == ["A report"]
    assert seen.of("h2") == ["Result", "Detail", "Queries, worst first", "Settings"]
    assert seen.of("p")[:2] == ["One paragraph.", "Another."]
    assert seen.of("th")[:5] == ["figure", "value", "interval", "n", "note"]
    assert seen.of("td")[:10] == [
        "overlap", "0.5000", "0.4000 to 0.6000", "2", "", "ties", "–", "–", "–", "undefined for 2"
    ]  # fmt: skip
    assert seen.of("caption") == [
        "Figures", "Systems", "Documents that flip", "What this report was made from, and how"
    ]  # fmt: skip
    assert seen.of("td")[10:14] == ["ours", "0.7500", "d1", "0.5000"]
    assert seen.of("p", class_="note") == ["of 2 queries"]
    assert (seen.of("h3"), seen.of("figcaption"), seen.of("svg")) == (["Slots"], ["What slots do"], ["drawn"])
    assert seen.of("td")[14:] == ["threshold", "0.5", "inputs", '{"run": "a.trec", "other": ["é", 1]}']


def test_queries_stand_in_the_reports_order_and_open_where_there_are_documents() -> None:
    seen = Seen(page(WHOLE))
    assert seen.of("summary", "div", class_="closed") == ["q2 second? overlap –"]
    assert seen.of("summary") == ["q1 first? overlap 0.2500flips 3"]
    assert seen.of("bdi", class_="id") == ["q1", "q2"]
    assert seen.of("p", id="count") == ["2 queries"]
    assert [tag for tag, found, _ in seen.elements if found.get("class") == "query"] == ["details", "div"]


def test_ids_and_texts_stay_text() -> None:
    table = Table(title=EVIL, columns=(EVIL,), rows=((EVIL,),), note=EVIL)
    html = page(
        Report(
            title=EVIL,
            settings={EVIL: EVIL, "nested": {EVIL: EVIL}},
            sections=(
                Section(
                    title=EVIL,
                    text=EVIL,
                    rows=(Row(name=EVIL, value=1.0, note=EVIL),),
                    tables=(table,),
                    pictures=(Picture(title=EVIL, caption=EVIL, svg=SVG),),
                ),
            ),
            queries=(Query(query_id=EVIL, query=EVIL, values={EVIL: 1.0}, documents=table),),
        )
    )
    seen = Seen(html)
    assert len(seen.of("script")) == 1
    assert seen.of("b") == ["1.0000"]  # the figure of the query, and nothing of the texts
    for tag, times in {
        "title": 1,
        "h1": 1,
        "h2": 1,
        "h3": 1,
        "p": 3,
        "figcaption": 1,
        "th": 2,
        "td": 6,
        "bdi": 2,
    }.items():
        assert seen.of(tag).count(EVIL) == times, tag
    assert [found["aria-label"] for _, found, _ in seen.elements if found.get("aria-label") == EVIL] == [EVIL, EVIL]
    assert not any(name.startswith("on") for _, found, _ in seen.elements for name in found)


def test_nothing_is_asked_for_outside_the_page() -> None:
    html = page(WHOLE)
    seen = Seen(html)
    [policy] = [found["content"] for _, found, _ in seen.elements if found.get("http-equiv")]
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy
    links = [found[name] for _, found, _ in seen.elements for name in ("href", "src", "action") if name in found]
    assert links
    assert all((link or "").startswith("#") for link in links)
    assert set(re.findall(r"https?://[^\"' )]+", html)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest", html)


def test_links_lead_somewhere_and_names_are_given_once() -> None:
    seen = Seen(page(WHOLE))
    names = [found["id"] for _, found, _ in seen.elements if "id" in found]
    assert len(names) == len(set(names))
    referred = {(found.get("href") or "")[1:] for tag, found, _ in seen.elements if tag == "a"}
    referred |= {found["aria-labelledby"] for _, found, _ in seen.elements if "aria-labelledby" in found}
    assert referred <= set(names)
    assert "main" in referred  # the link that skips to the results


def test_no_heading_level_is_left_out() -> None:
    levels = [int(tag[1]) for tag, _, _ in Seen(page(WHOLE)).elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_a_column_is_numeric_only_where_all_it_holds_are_numbers() -> None:
    table = documents(
        ("007", 1, 0.5, None, 1), ("NA", None, float("nan"), None, "x"), columns=("a", "b", "c", "d", "e")
    )
    html = page(report(Query(query_id="q", documents=table)))
    assert re.findall(r'<th scope="col"( class="n")?>([a-e])<', html) == [
        ("", "a"), (' class="n"', "b"), (' class="n"', "c"), ("", "d"), ("", "e")
    ]  # fmt: skip
    assert '<td>007</td><td class="n">1</td><td class="n">0.5000</td><td>–</td><td>1</td>' in html
    assert '<td>NA</td><td class="n">–</td><td class="n">–</td><td>–</td><td>x</td>' in html


def test_a_figure_with_an_open_interval_shows_the_end_it_has() -> None:
    rows = (Row(name="one", value=1.0, low=0.5), Row(name="two", value=2.0))
    seen = Seen(page(report(sections=(Section(title="s", rows=rows),))))
    assert seen.of("th")[:3] == ["figure", "value", "interval"]  # n and note are empty throughout
    assert seen.of("td")[:6] == ["one", "1.0000", "0.5000 to –", "two", "2.0000", "–"]


def test_an_empty_report_is_a_page_without_queries() -> None:
    seen = Seen(page(report()))
    assert seen.of("h2") == ["Settings"]
    assert not seen.of("div", id="list")


def test_a_text_that_no_file_can_hold_is_written_with_a_mark() -> None:
    html = page(report(Query(query_id="q", query="half \ud83d a face")))
    html.encode("utf-8")
    assert "half ? a face" in html


def test_the_same_report_gives_the_same_bytes() -> None:
    assert page(WHOLE) == page(WHOLE)


def test_the_wheel_carries_every_file_that_is_not_code() -> None:
    root = Path(pd_rerank.__file__).parent
    project = tomllib.loads((root.parent / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["pd_rerank"]
    others = [
        p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")
    ]
    assert "evaluation/report.html.j2" in others
    assert [name for name in others if not any(fnmatch(name, pattern) for pattern in patterns)] == []
