"""The HTML page of a report in a real browser: nothing is asked for, nothing goes wrong, filter and order work."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="pages need the eval extra")
pytest.importorskip("matplotlib", reason="pictures need the eval extra")

from pd_rerank.evaluation.page import page
from pd_rerank.evaluation.pictures import score_movement, tie_matrix
from pd_rerank.evaluation.report import Picture, Query, Report, Section, Table

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="no chromium found; install it (Debian: apt-get install chromium)"),
]

QUERIES = [("q10", "second word", 0.5), ("007", "<script>throw 1</script>", None), ("q9", "third WORD", 0.25)]


def report() -> Report:
    found = (("d10", 9.5, "3/9"), ("d9", None, None), ("d7", 10.5, "10/10"), ("d8", -1.0, "5/9"))
    documents = Table(
        title="Documents",
        columns=("document", "score", "kept", "text"),
        rows=tuple((*row, "a text that takes its room " * 3) for row in found),
    )
    svgs = [score_movement([[0.9, 0.4], [0.8, 0.6]], ["a", "<b>"], 0.5), tie_matrix([[1, 2], [3, 4]], ["0", "1"])]
    return Report(
        title="Browsed </title>",
        settings={"k": 10},
        sections=(
            Section(title="Tables", tables=(documents,)),
            Section(title="Pictures", pictures=tuple(Picture(title="p", caption="c", svg=svg) for svg in svgs)),
        ),
        queries=tuple(Query(query_id=i, query=q, values={"overlap": v}, documents=documents) for i, q, v in QUERIES),
    )


def browse(html: str, folder: Path, *, script: str = "") -> tuple[str, list[str], set[str]]:
    """The document a browser makes of `html` once `script` has run, what the console said, and the URLs it asked for.

    What the browser itself asks for, with no page behind it, is not counted, and finds no host.
    """
    assert BROWSER is not None
    folder.mkdir(parents=True, exist_ok=True)
    file, log = folder / "report.html", folder / "net.json"
    file.write_text(html.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    done = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--host-resolver-rules=MAP * ~NOTFOUND", "--proxy-server=direct://"),
            *("--enable-logging=stderr", "--v=0", f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}"),
            *("--dump-dom", file.as_uri()),
        ],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        check=True,
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    started = json.loads(log.read_text(encoding="utf-8"))["events"]
    asked = [event["params"] for event in started if "initiator" in event.get("params", {})]
    return done.stdout, console, {request["url"] for request in asked if request["initiator"] != "not an origin"}


def said(document: str) -> object:
    """What a script left in the attribute `data-said` of the body."""
    found = re.search(r'<body[^>]* data-said="([^"]*)"', document)
    assert found, "the script did not come to its end"
    return json.loads(unescape(found[1]))


def test_the_page_loads_without_a_word_on_the_console_and_asks_for_nothing(tmp_path: Path) -> None:
    document, console, asked = browse(
        page(report()), tmp_path, script="document.body.dataset.said = JSON.stringify(document.title)"
    )
    assert said(document) == "Browsed </title>"
    assert console == []
    assert asked == set()
    assert document.count("<svg") == 2
    assert document.count("<details") == len(QUERIES)


def test_these_checks_see_an_error_and_a_request(tmp_path: Path) -> None:
    open_page = re.sub(r"<meta http-equiv[^>]+>", "", page(report()))
    image = 'document.body.append(Object.assign(new Image(), { src: "http://127.0.0.1:9/a.png" }))'
    _, console, asked = browse(open_page, tmp_path / "open", script=f"{image}; throw 1")
    assert any("Uncaught" in line for line in console)
    assert asked == {"http://127.0.0.1:9/a.png"}
    _, console, asked = browse(page(report()), tmp_path / "closed", script=image)
    assert any("Content Security Policy" in line for line in console)
    assert asked == set()


def test_filter_order_and_sort_work(tmp_path: Path) -> None:
    script = """
    const found = {}, $ = (q) => document.querySelector(q);
    const ids = () => [...document.querySelectorAll("#list > *")].filter((e) => !e.hidden)
      .map((e) => e.querySelector(".id").textContent);
    const type = (e, value) => { e.value = value; e.dispatchEvent(new Event(e.id === "filter" ? "input" : "change")); };
    const column = (n) => [...$("#list table").tBodies[0].rows].map((r) => r.cells[n].textContent);
    found.tools = getComputedStyle($(".tools")).display;
    found.all = ids();
    type($("#filter"), "word"); found.word = ids(); found.count = $("#count").textContent;
    type($("#filter"), "007"); found.named = ids();
    type($("#filter"), "overlap"); found.none = ids();
    type($("#filter"), ""); found.again = ids();
    for (const option of ["0 up", "0 down", "id", ""]) { type($("#order"), option); found[option] = ids(); }
    const [name, score, kept] = [...$("#list table").tHead.rows[0].cells];
    score.firstChild.click(); found.up = column(1); found.sort = score.ariaSort;
    score.firstChild.click(); found.down = column(1);
    name.firstChild.click(); found.names = column(0); found.unsorted = score.ariaSort;
    kept.firstChild.click(); found.kept = column(2);
    document.body.dataset.said = JSON.stringify(found);
    """
    document, console, _ = browse(page(report()), tmp_path, script=script)
    assert console == []
    assert said(document) == {
        "tools": "flex",
        "all": ["q10", "007", "q9"],
        "word": ["q10", "q9"],
        "count": "2 of 3 queries",
        "named": ["007"],
        "none": [],
        "again": ["q10", "007", "q9"],
        "0 up": ["q9", "q10", "007"],  # the undefined one last, in either direction
        "0 down": ["q10", "q9", "007"],
        "id": ["007", "q10", "q9"],
        "": ["q10", "007", "q9"],
        "up": ["-1.0000", "9.5000", "10.5000", "–"],
        "sort": "ascending",
        "down": ["10.5000", "9.5000", "-1.0000", "–"],
        "names": ["d10", "d7", "d8", "d9"],
        "unsorted": None,
        "kept": ["10/10", "3/9", "5/9", "–"],
    }


def framed(html: str, sandbox: str, script: str) -> tuple[str, str]:
    """A page that holds another in a frame 400 wide, and a script that looks into it and leaves what it finds."""
    frame = f'<iframe {sandbox} srcdoc="{escape(html)}" style="width:400px;height:800px;border:0"></iframe>'
    look = f"""
    addEventListener("load", () => {{
      const inner = document.querySelector("iframe").contentDocument, root = inner.documentElement;
      for (const query of inner.querySelectorAll("details")) query.open = true;
      document.body.dataset.said = JSON.stringify({script});
    }});
    """
    return f"<!doctype html><body>{frame}</body>", look


def test_the_page_fits_a_telephone(tmp_path: Path) -> None:
    html, script = framed(
        page(report()), "", "[inner.title, root.clientWidth > 380, root.scrollWidth - root.clientWidth]"
    )
    assert said(browse(html, tmp_path, script=script)[0]) == ["Browsed </title>", True, 0]


def test_without_javascript_all_is_there_and_nothing_dead_is_shown(tmp_path: Path) -> None:
    html, script = framed(
        page(report()),
        'sandbox="allow-same-origin"',  # and no scripts
        """{
          queries: [...inner.querySelectorAll("details table")].filter((table) => table.offsetHeight > 0).length,
          tools: inner.querySelector(".tools").offsetHeight,
          buttons: inner.querySelectorAll("button").length,
        }""",
    )
    assert said(browse(html, tmp_path, script=script)[0]) == {"queries": len(QUERIES), "tools": 0, "buttons": 0}
