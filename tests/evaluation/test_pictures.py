"""Pictures: what is drawn, that it stays legible in any page, and that the same input gives the same bytes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from xml.etree import ElementTree

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="pictures need the eval extra")

from pd_rerank.errors import BadArgument
from pd_rerank.evaluation.pictures import (
    COLOURS,
    MOVING,
    STEADY,
    Point,
    histogram,
    order_preference_position,
    preference_position,
    quality_stability,
    rank_ranges,
    score_movement,
    slot_profile,
    tie_matrix,
)

SCORES = np.array([[0.9, 0.4, 0.1], [0.8, 0.6, 0.2]])
RANKS = np.array([[0, 1, 2], [0, 2, -1]])
NAN = float("nan")

PICTURES = {
    "score_movement": lambda: score_movement(SCORES, ["a", "b", "c"], 0.5),
    "rank_ranges": lambda: rank_ranges(RANKS, ["a", "b", "c"], 2),
    "histogram": lambda: histogram([0.1, 0.2, NAN], "overlap", span=(0, 1)),
    "quality_stability": lambda: quality_stability([Point(name="a", x=0.1, y=0.5, x_low=0.05, x_high=0.2)]),
    "preference_position": lambda: preference_position([Point(name="a", x=0.6, y=0.5, y_low=0.4, y_high=0.6)]),
    "order_preference_position": lambda: order_preference_position(
        [Point(name="a", x=0.1, y=0.5, y_low=0.4, y_high=0.6), Point(name="b", x=None, y=0.5)],
        [Point(name="a", x=0.1, y=0.7), Point(name="b", x=None, y=0.5)],
    ),
    "slot_profile": lambda: slot_profile([0.1, NAN, -0.1], [0.0, NAN, -0.2], [0.2, NAN, 0.0]),
    "tie_matrix": lambda: tie_matrix([[5, 1], [7, 3]], ["0", "1"]),
}
EMPTY = {
    "score_movement": lambda: score_movement(np.zeros((2, 0)), [], 0.5),
    "score_movement of infinity": lambda: score_movement([[float("inf"), 0.5], [-float("inf"), 0.2]], ["a", "b"], 0.5),
    "score_movement of nothing": lambda: score_movement(np.zeros((0, 1)), ["a"], 0.5),
    "rank_ranges": lambda: rank_ranges(np.full((2, 1), -1), ["a"], 2),
    "histogram": lambda: histogram([], "overlap"),
    "histogram of NaN": lambda: histogram([NAN, float("inf")], "overlap"),
    "histogram of one value": lambda: histogram([0.3, 0.3], "overlap"),
    "quality_stability": lambda: quality_stability([]),
    "slot_profile": lambda: slot_profile([]),
    "slot_profile of NaN": lambda: slot_profile([NAN, NAN]),
    "tie_matrix": lambda: tie_matrix(np.zeros((0, 0)), []),
    "tie_matrix of zeros": lambda: tie_matrix(np.zeros((2, 2)), ["0", "1"]),
}

_NAME = "{http://www.w3.org/2000/svg}"


def elements(svg: str, tag: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(f"{_NAME}{tag}"))


def texts(svg: str) -> list[str]:
    return [e.text or "" for e in elements(svg, "text")]


def marks(svg: str) -> Counter[tuple[str, str]]:
    """How many marks of each fill and stroke, the legend's too; ticks, in the page's colour, are left out."""
    styles = [dict(re.findall(r"(fill|stroke): ([^;]+)", e.get("style", ""))) for e in elements(svg, "use")]
    return Counter((s.get("fill", "none"), s["stroke"]) for s in styles if s["stroke"] != "currentColor")


def bars(svg: str) -> list[float]:
    """The heights of the bars, left to right."""
    heights = []
    for path in elements(svg, "path"):
        if f"fill: {STEADY}" in path.get("style", "") and "L" in path.get("d", "") and "C" not in path.get("d", ""):
            ys = [float(y) for y in re.findall(r"[ML] \S+ (\S+)", path.get("d", ""))]
            heights.append(max(ys) - min(ys))
    return heights


@pytest.mark.parametrize("name", PICTURES)
def test_the_same_input_gives_the_same_bytes_whatever_the_users_settings(name: str) -> None:
    import matplotlib

    first = PICTURES[name]()
    with matplotlib.rc_context({"font.size": 20, "svg.fonttype": "path", "axes.grid": True, "lines.linewidth": 9}):
        assert PICTURES[name]() == first
        assert matplotlib.rcParams["font.size"] == 20  # and leaves them alone


def test_another_process_draws_the_same_without_pyplot() -> None:
    code = (
        "import sys\nfrom pd_rerank.evaluation.pictures import tie_matrix\n"
        "print(tie_matrix([[5, 1], [7, 3]], ['0', '1']))\nassert 'matplotlib.pyplot' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", check=True)
    assert done.stdout.rstrip("\n") == PICTURES["tie_matrix"]()


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_has_an_accessible_title_and_touches_nothing_else_in_the_page(name: str) -> None:
    svg = PICTURES[name]()
    root = ElementTree.fromstring(svg)
    title = root[0]
    assert title.tag == f"{_NAME}title"
    assert title.text
    assert root.get("role") == "img"
    assert root.get("aria-labelledby") == title.get("id")
    assert {e.tag.removeprefix(_NAME) for e in root.iter()} <= {
        "svg", "title", "defs", "g", "path", "use", "text", "clipPath", "rect"
    }  # fmt: skip
    assert re.findall(r"https?://[^\"' ]+", svg) == ["http://www.w3.org/2000/svg"]


def test_pictures_on_one_page_share_no_names_and_refer_to_their_own() -> None:
    svgs = [picture() for picture in PICTURES.values()]
    ids = [set(re.findall(r' id="([^"]+)"', svg)) for svg in svgs]
    assert sum(map(len, ids)) == len(set.union(*ids))
    for svg, own in zip(svgs, ids, strict=True):
        used = re.findall(r'href="#([^"]+)"', svg) + re.findall(r"url\(#([^)]+)\)", svg)
        assert len(own) > 1
        assert set(used) | {re.search('aria-labelledby="([^"]+)"', svg)[1]} == own


@pytest.mark.parametrize("name", PICTURES)
def test_lines_and_text_take_the_pages_colour(name: str) -> None:
    svg = PICTURES[name]()
    assert "currentColor" in svg
    assert all("fill: currentColor" in e.get("style", "") for e in elements(svg, "text"))
    assert set(re.findall(r"#[0-9a-f]{6}\b", re.sub(r'href="[^"]*"|url\([^)]*\)', "", svg))) <= set(COLOURS)


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("paper", ["#ffffff", "#15181c"])
def test_marks_can_be_seen_on_white_and_on_near_black(colour: str, paper: str) -> None:
    def luminance(code: str) -> float:
        parts = [int(code[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(colour), luminance(paper)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 3


@pytest.mark.parametrize("name", EMPTY)
def test_nothing_to_draw_is_drawn_as_nothing(name: str) -> None:
    ElementTree.fromstring(EMPTY[name]())


def test_labels_stay_what_they_are() -> None:
    names = ["<script>alert(1)</script>", r"$\frac{1}$", "文書", "a\x00b\nc\ud800", "x" * 60]
    svg = score_movement(np.ones((2, 5)), names, title="<b> & $y$")
    assert "<script" not in svg
    assert elements(svg, "title")[0].text == "<b> & $y$"
    rows = texts(svg)
    assert {names[0], names[1], "文書", "a\ufffdb c\ufffd"} <= set(rows)
    assert "x" * 13 + "…" + "x" * 12 in rows


def test_score_movement_fills_what_is_retained_and_sets_documents_that_flip_apart() -> None:
    # a .9 .8 is always retained, b .4 .6 flips, c .1 .2 never; the legend adds one mark of each kind.
    found = marks(score_movement(SCORES, ["a", "b", "c"], 0.5))
    assert found == {
        (STEADY, STEADY): 2 + 1,
        ("none", STEADY): 2 + 1,
        (MOVING, MOVING): 1 + 1,
        ("none", MOVING): 1,
    }


def test_a_score_at_the_threshold_is_retained_and_a_missing_one_is_not() -> None:
    found = marks(score_movement([[0.5, 0.9], [0.5, NAN]], ["a", "b"], 0.5))
    assert found[STEADY, STEADY] == 1 + 1  # a, twice at the same place, and the legend
    assert found[MOVING, MOVING] == 1 + 1  # b is retained once of twice
    assert found["none", MOVING] == 0


def test_rows_go_by_mean_score_and_documents_without_scores_come_last() -> None:
    svg = score_movement([[0.2, NAN, 0.7], [0.4, NAN, 0.1]], ["low", "none", "high"])
    assert [text for text in texts(svg) if text in ("low", "none", "high")] == ["high", "low", "none"]


def test_rank_ranges_set_apart_what_crosses_the_cut_and_mark_what_is_not_ranked() -> None:
    # a is always first; b second then third: crosses; c third, then not ranked: never within 2.
    svg = rank_ranges(RANKS, ["a", "b", "c"], 2)
    assert marks(svg)[MOVING, MOVING] == 2 + 1
    assert "not ranked by some" in texts(svg)
    assert "not ranked by some" not in texts(rank_ranges(RANKS[:, :1], ["a"], 2))
    assert marks(rank_ranges([[0], [-1]], ["a"], 2))[MOVING, MOVING] == 1 + 1 + 1  # within, and not ranked


def test_a_histogram_counts_and_names_what_is_undefined() -> None:
    svg = histogram([0, 1, 1, 3, NAN], "documents that flip")
    assert bars(svg)[0] == pytest.approx(bars(svg)[1] / 2, rel=1e-4)
    assert [round(bar / bars(svg)[0]) for bar in bars(svg)] == [1, 2, 0, 1]
    assert {"documents that flip (undefined for 1)", "mean 1.25 of 4 queries"} <= set(texts(svg))


def test_a_histogram_over_a_span_keeps_what_lies_outside_in_its_end_bars() -> None:
    heights = bars(histogram([-1.0, 0.1, 0.9, 1.0, 2.0], "x", span=(0, 1), bins=2))
    assert heights[1] == pytest.approx(1.5 * heights[0], rel=1e-4)


def test_a_tie_matrix_says_its_counts_and_shades_by_them() -> None:
    svg = tie_matrix([[5, 0], [1234567, 3]], ["0", "1"])
    assert {"5", "0", "1234567", "3"} <= set(texts(svg))
    shades = [float(s) for s in re.findall(r"opacity: ([0-9.]+)", svg)]
    assert max(shades) == pytest.approx(0.6)


def test_scatters_draw_each_system_once_and_name_the_undefined() -> None:
    points = [Point(name=f"s{i}", x=i / 10, y=i / 20) for i in range(9)]
    svg = quality_stability([*points, Point(name="lost", x=None, y=0.5), Point(name="nan", x=0.2, y=NAN)])
    assert {*(f"s{i}" for i in range(9)), "lost (undefined)", "nan (undefined)"} <= set(texts(svg))
    assert marks(svg)[COLOURS[1], COLOURS[1]] == 2
    assert marks(svg)[COLOURS[0], COLOURS[0]] == 4  # the ninth takes the first colour again, in another shape
    shapes = {e.get("href") for e in elements(svg, "use") if f"fill: {COLOURS[0]}" in e.get("style", "")}
    assert len(shapes) == 4  # two shapes, each on the axes and in the legend


def test_intervals_are_drawn_in_both_directions() -> None:
    def lines(**ends: float) -> list[tuple[bool, bool]]:
        """Of each interval, whether it goes across and whether it goes up."""
        svg = quality_stability([Point(name="a", x=0.5, y=0.5, **ends)])
        paths = [e.get("d", "") for e in elements(svg, "path") if f"stroke: {STEADY}" in e.get("style", "")]
        found = [re.fullmatch(r"M (\S+) (\S+) L (\S+) (\S+)", path) for path in paths]
        return [(one[1] != one[3], one[2] != one[4]) for one in found if one]

    assert lines() == []
    assert lines(x_low=0.4, x_high=0.6) == [(True, False)]
    assert lines(x_low=0.4, x_high=0.6, y_low=0.4, y_high=0.6) == [(True, False), (False, True)]


def test_shapes_that_do_not_fit_are_refused_with_both_numbers() -> None:
    with pytest.raises(BadArgument, match=r"scores of shape \(2, 3\) for 2 labels"):
        score_movement(SCORES, ["a", "b"])
    with pytest.raises(BadArgument, match=r"ranks of shape \(2, 3\) for 1 labels"):
        rank_ranges(RANKS, ["a"])
    with pytest.raises(BadArgument, match="3 slots, but intervals for 3 and 2"):
        slot_profile([0, 0, 0], [0, 0, 0], [0, 0])
    with pytest.raises(BadArgument, match=r"2 grades is 2 by 2, got \(1, 2\)"):
        tie_matrix([[1, 2]], ["0", "1"])
