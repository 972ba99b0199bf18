"""Pictures for reports: arrays in, SVG text out; the same input gives the same bytes.

Text and lines take the colour of the page they stand in (`currentColor`), marks have colours that read on white and on
near-black alike, and every state has a shape of its own besides. Needs matplotlib (extra eval).
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt

from pd_rerank._extras import need
from pd_rerank.errors import BadArgument

COLOURS = ("#3b7fc4", "#d0690b", "#2b9348", "#9d5bd2", "#d64550", "#1d9099", "#8a8000", "#d0559b")
"""Each with a contrast of at least 3 to 1 against white and against the page's dark background."""

STEADY, MOVING = COLOURS[0], COLOURS[1]

_INK = "#010203"  # stands for the page's own text colour until the drawing is done
_SHAPES = "os^DvPX*"
_WIDTH = 5.0  # inches: narrow enough to stay legible on a telephone
_LABEL = 26  # characters
_SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "pd-rerank",
    "text.parse_math": False,
    "font.size": 10.0,
    "font.sans-serif": ["DejaVu Sans", "sans-serif"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "legend.handletextpad": 0.4,
    "legend.columnspacing": 1.2,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One system in a scatter: x and y, each with an interval where there is one; None or NaN is undefined."""

    name: str
    x: float | None
    y: float | None
    x_low: float | None = None
    x_high: float | None = None
    y_low: float | None = None
    y_high: float | None = None


# -- one query -----------------------------------------------------------------------------------------------------


def score_movement(
    scores: npt.ArrayLike, labels: Sequence[str], threshold: float | None = None, *, title: str = "Score movement"
) -> str:
    """Where each document's score falls in every presentation: scores (K, n), NaN missing, one row per document.

    Rows go by mean score, the best on top; a bar spans a document's scores, a dot is one presentation. With a
    `threshold`, dots at or above it (retained) are filled, and documents that fall on both sides are set apart in
    colour and by a diamond; a missing score is not retained. Only finite scores can be drawn.
    """
    s = _matrix(scores, labels, "scores")
    lines = [values[np.isfinite(values)] for values in s.T]
    order = _falling([float(line.mean()) if line.size else -np.inf for line in lines])

    def paint(axes: Any) -> None:
        for y, d in enumerate(order):
            values = lines[d]
            kept = np.ones(len(s), bool) if threshold is None else np.nan_to_num(s[:, d], nan=-np.inf) >= threshold
            moves = threshold is not None and bool(kept.any()) and not kept.all()
            _row(axes, y, values, MOVING if moves else STEADY, "D" if moves else "o", kept[np.isfinite(s[:, d])])
        _names(axes, labels, order)
        axes.set_xlabel("score")
        if threshold is None:
            return
        axes.axvline(threshold, color=_INK, linewidth=1, linestyle=(0, (4, 3)))
        _legend(
            axes,
            [
                _mark("retained", STEADY, "o"),
                _mark("not retained", STEADY, "o", filled=False),
                _mark("document that flips", MOVING, "D"),
                _mark(f"threshold {threshold:.3g}", _INK, "", line=(0, (4, 3))),
            ],
        )

    return _draw(title, paint, height=_rows_high(len(labels)))


def rank_ranges(
    ranks: npt.NDArray[np.integer[Any]], labels: Sequence[str], cut: int | None = None, *, title: str = "Rank ranges"
) -> str:
    """The ranks each document takes over K presentations: ranks (K, n) from 0 for the best, -1 not ranked.

    Rows go by mean rank, those never ranked last; the axis counts from 1. With a `cut`, documents that stand on both
    sides of rank `cut` are set apart; an × at the right edge marks a document that some presentation does not rank.
    """
    r = _matrix(ranks, labels, "ranks")
    there = [values[values >= 0] + 1 for values in r.T]
    order = _falling([-float(values.mean()) if values.size else -np.inf for values in there])
    edge = max((int(values.max()) for values in there if values.size), default=0) + 1
    absent = bool((r < 0).any())

    def paint(axes: Any) -> None:
        for y, d in enumerate(order):
            inside = (r[:, d] >= 0) & (r[:, d] < (edge if cut is None else cut))
            moves = cut is not None and bool(inside.any()) and not inside.all()
            colour = MOVING if moves else STEADY
            _row(axes, y, there[d], colour, "D" if moves else "o", np.ones(len(there[d]), bool))
            if (r[:, d] < 0).any():
                axes.plot([edge], [y], "x", color=colour, markersize=6)
        _names(axes, labels, order)
        axes.set_xlabel("rank (1 is best)")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlim(0.5, edge + 0.5 if absent else max(edge - 0.5, 1.5))
        marks = [_mark("not ranked by some", STEADY, "x")] if absent else []
        if cut is not None:
            axes.axvline(cut + 0.5, color=_INK, linewidth=1, linestyle=(0, (4, 3)))
            marks = [
                _mark("document that flips", MOVING, "D"),
                _mark(f"top {cut}", _INK, "", line=(0, (4, 3))),
                *marks,
            ]
        _legend(axes, marks)

    return _draw(title, paint, height=_rows_high(len(labels)))


# -- many queries --------------------------------------------------------------------------------------------------


def histogram(
    values: npt.ArrayLike,
    label: str,
    *,
    span: tuple[float, float] | None = None,
    bins: int = 20,
    unit: str = "queries",
    title: str | None = None,
) -> str:
    """How many `unit` have which value, with their mean: values (n,), those that are NaN left out and counted.

    Whole numbers over a span of at most 40 get a bar each, other values `bins` equal bars over `span` (default: from
    the least to the greatest). A value outside the span is counted in the bar at its end.
    """
    v = np.asarray(values, dtype=np.float64).ravel()
    there = v[np.isfinite(v)]
    undefined = len(v) - len(there)
    low, high = span if span is not None else (there.min(), there.max()) if there.size else (0.0, 1.0)
    if span is None and there.size and high - low <= 40 and bool((there == np.round(there)).all()):
        edges = np.arange(low - 0.5, high + 1)
    else:
        edges = np.linspace(low, high, bins + 1) if high > low else np.linspace(low - 0.5, low + 0.5, 2)

    def paint(axes: Any) -> None:
        counts, _ = np.histogram(np.clip(there, edges[0], edges[-1]), edges)
        axes.bar(edges[:-1], counts, width=0.94 * np.diff(edges), align="edge", color=STEADY, edgecolor="none")
        axes.set_xlabel(f"{_short(label, 60)}{f' (undefined for {undefined})' if undefined else ''}")
        axes.set_ylabel(_short(unit))
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set_ylim(0, max(1.0, float(counts.max()) * 1.05))
        axes.set_xlim(edges[0], edges[-1])
        if there.size:
            mean = float(there.mean())
            axes.axvline(mean, color=_INK, linewidth=1, linestyle=(0, (4, 3)))
            _legend(axes, [_mark(f"mean {mean:.4g} of {len(there)} {unit}", _INK, "", line=(0, (4, 3)))])

    return _draw(title if title is not None else f"Histogram of {label}", paint, height=2.8)


def slot_profile(
    mean: npt.ArrayLike,
    low: npt.ArrayLike | None = None,
    high: npt.ArrayLike | None = None,
    *,
    label: str = "mean residual",
    title: str = "Slot profile",
) -> str:
    """What each slot adds to a score: mean residuals (slots,), with intervals where given, against a line at zero.

    Slots count from 0, the one shown first; NaN leaves a gap.
    """
    middle = np.asarray(mean, dtype=np.float64)
    slots = np.arange(len(middle))
    ends = [np.full(len(middle), np.nan) if e is None else np.asarray(e, dtype=np.float64) for e in (low, high)]
    if any(end.shape != middle.shape for end in ends):
        raise BadArgument(f"{len(middle)} slots, but intervals for {len(ends[0])} and {len(ends[1])}")

    def paint(axes: Any) -> None:
        axes.axhline(0, color=_INK, linewidth=1)
        axes.vlines(slots, ends[0], ends[1], color=STEADY, linewidth=2, alpha=0.55)
        axes.plot(slots, middle, "o-", color=STEADY, markersize=5, linewidth=1)
        axes.set_xlabel("slot (0 is shown first)")
        axes.set_ylabel(_short(label))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.margins(x=0.03)

    return _draw(title, paint, height=2.8)


def tie_matrix(
    counts: npt.ArrayLike,
    labels: Sequence[str],
    *,
    row_label: str = "grade of the preferred passage",
    column_label: str = "grade of the other passage",
    title: str = "Tie matrix",
) -> str:
    """How often which grade met which: counts (G, G), rows the preferred passage's grade; the diagonal holds ties.

    The lowest grade stands bottom left. Each cell says its count; the shade is its share of the greatest.
    """
    c = np.asarray(counts, dtype=np.float64)
    if c.shape != (len(labels), len(labels)):
        raise BadArgument(f"a tie matrix of {len(labels)} grades is {len(labels)} by {len(labels)}, got {c.shape}")
    most = float(c.max(initial=0)) or 1.0

    def paint(axes: Any) -> None:
        from matplotlib.patches import Rectangle

        for (i, j), count in np.ndenumerate(c):
            edge = _INK if i == j else "none"
            shade = (*(int(STEADY[k : k + 2], 16) / 255 for k in (1, 3, 5)), 0.6 * count / most)
            axes.add_patch(Rectangle((j - 0.47, i - 0.47), 0.94, 0.94, facecolor=shade, edgecolor=edge, linewidth=1.2))
            axes.text(j, i, f"{count:.10g}", ha="center", va="center")
        side = (-0.6, len(labels) - 0.4)
        axes.set(xlim=side, ylim=side, aspect="equal", xlabel=_short(column_label, 40), ylabel=_short(row_label, 40))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(range(len(labels)), [_short(label, 8) for label in labels])
            axis.set_tick_params(length=0)
        axes.spines[:].set_visible(False)

    return _draw(title, paint, height=min(3.6, 1.2 + 0.6 * len(labels)))


# -- several systems -----------------------------------------------------------------------------------------------


def quality_stability(
    points: Sequence[Point],
    *,
    x_label: str = "τ-PSI (lower is steadier)",
    y_label: str = "nDCG@10",
    title: str = "Quality against stability",
) -> str:
    """Systems by how much order moves them and how good they are, each with its intervals.

    A system with an undefined figure is named in the legend and not drawn.
    """
    return _scatter(points, x_label, y_label, title)


def preference_position(
    points: Sequence[Point],
    *,
    x_label: str = "strict preference",
    y_label: str = "MRR of the preferred passage",
    title: str = "Preference and position",
) -> str:
    """Systems by how often they prefer the right passage and where they put it, each with its intervals.

    A system with an undefined figure is named in the legend and not drawn.
    """
    return _scatter(points, x_label, y_label, title)


def order_preference_position(
    preference: Sequence[Point],
    position: Sequence[Point],
    *,
    x_label: str = "τ-PSI (lower is steadier)",
    y_label: str = "strict preference (full), MRR (open)",
    title: str = "Order, preference and position",
) -> str:
    """Systems by how much order moves them, each with two series: full marks for preference, open ones for position.

    Both lists name the same systems in one order and share their x. A system with an undefined figure is named in the
    legend and not drawn.
    """
    if [point.name for point in preference] != [point.name for point in position]:
        raise BadArgument("preference and position are drawn for the same systems, in one order")
    marks = _marks(len(preference))

    def paint(axes: Any) -> None:
        legend = []
        for full, open_, (colour, shape) in zip(preference, position, marks, strict=True):
            x, *heights = _floats(full.x, full.y, open_.y)
            if not np.isfinite([x, *heights]).all():
                legend.append(_mark(f"{_short(full.name)} (undefined)", colour, ""))
                continue
            axes.vlines(x, *heights, color=colour, linewidth=0.8, linestyle=":")
            for point, face in ((full, colour), (open_, "none")):
                x_low, x_high, y, y_low, y_high = _floats(point.x_low, point.x_high, point.y, point.y_low, point.y_high)
                axes.hlines(y, x_low, x_high, color=colour, linewidth=1.2, alpha=0.6)
                axes.vlines(x, y_low, y_high, color=colour, linewidth=1.2, alpha=0.6)
                axes.plot(x, y, shape, color=colour, markerfacecolor=face, markersize=7)
            legend.append(_mark(_short(full.name), colour, shape))
        axes.set(xlabel=_short(x_label, 60), ylabel=_short(y_label, 40))
        axes.margins(0.08)
        _legend(axes, legend)

    return _draw(title, paint, height=3.3 + 0.2 * ((len(preference) + 1) // 2))


def _marks(count: int) -> list[tuple[str, str]]:
    """A colour and a shape for each of `count` systems."""
    return [(COLOURS[i % len(COLOURS)], _SHAPES[(i + i // len(COLOURS)) % len(_SHAPES)]) for i in range(count)]


def _scatter(points: Sequence[Point], x_label: str, y_label: str, title: str) -> str:
    marks = _marks(len(points))

    def paint(axes: Any) -> None:
        legend = []
        for point, (colour, shape) in zip(points, marks, strict=True):
            x, x_low, x_high, y, y_low, y_high = _floats(
                point.x, point.x_low, point.x_high, point.y, point.y_low, point.y_high
            )
            if not np.isfinite([x, y]).all():
                legend.append(_mark(f"{_short(point.name)} (undefined)", colour, ""))
                continue
            axes.hlines(y, x_low, x_high, color=colour, linewidth=1.6, alpha=0.7)
            axes.vlines(x, y_low, y_high, color=colour, linewidth=1.6, alpha=0.7)
            axes.plot(x, y, shape, color=colour, markersize=7)
            legend.append(_mark(_short(point.name), colour, shape))
        axes.set(xlabel=_short(x_label, 60), ylabel=_short(y_label, 40))
        axes.margins(0.08)
        _legend(axes, legend)

    return _draw(title, paint, height=3.3 + 0.2 * ((len(points) + 1) // 2))


# -- inner parts ---------------------------------------------------------------------------------------------------


def _matrix(values: npt.ArrayLike, labels: Sequence[str], what: str) -> npt.NDArray[np.float64]:
    v = np.asarray(values, dtype=np.float64)
    if v.ndim != 2 or v.shape[1] != len(labels):
        raise BadArgument(f"{what} of shape {v.shape} for {len(labels)} labels; give one column per document")
    return v


def _falling(values: Sequence[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def _floats(*values: float | None) -> list[float]:
    return [float("nan") if value is None else float(value) for value in values]


def _short(text: str, most: int = _LABEL) -> str:
    """`text` on one line of at most `most` characters, its middle left out; what cannot be printed becomes �."""
    line = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(str(text).split()))
    head = most // 2
    return line if len(line) <= most else f"{line[:head]}…{line[len(line) - (most - 1 - head) :]}"


def _rows_high(rows: int) -> float:
    return 1.3 + 0.24 * max(rows, 1)


def _row(
    axes: Any, y: int, values: npt.NDArray[np.float64], colour: str, shape: str, filled: npt.NDArray[np.bool_]
) -> None:
    if not values.size:
        return
    axes.hlines(y, values.min(), values.max(), color=colour, linewidth=5, alpha=0.25)
    look = {"marker": shape, "markersize": 4.5, "markeredgecolor": colour, "linestyle": "", "markeredgewidth": 1}
    for inside, face in ((True, colour), (False, "none")):
        chosen = np.unique(values[filled == inside])
        if chosen.size:
            axes.plot(chosen, np.full(len(chosen), y), markerfacecolor=face, **look)


def _names(axes: Any, labels: Sequence[str], order: Iterable[int]) -> None:
    axes.set_yticks(range(len(labels)), [_short(labels[d]) for d in order])
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def _mark(label: str, colour: str, shape: str, *, filled: bool = True, line: Any = "") -> Any:
    from matplotlib.lines import Line2D

    return Line2D(
        [],
        [],
        color=colour,
        marker=shape,
        markersize=5,
        markerfacecolor=colour if filled else "none",
        linestyle=line or "",
        linewidth=1,
        label=label,
    )


def _legend(axes: Any, marks: Sequence[Any]) -> None:
    if marks:
        axes.figure.legend(handles=marks, loc="outside lower center", ncols=min(2, len(marks)))


def _draw(title: str, paint: Callable[[Any], None], *, height: float) -> str:
    """The SVG of one pair of axes, `_WIDTH` by `height` inches, that `paint` fills, whatever settings the user has."""
    matplotlib = need("matplotlib", extra="eval", purpose="reports are drawn with 'matplotlib'")
    from matplotlib.figure import Figure

    with warnings.catch_warnings(), matplotlib.rc_context():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the reader's browser has its own fonts
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        paint(figure.add_subplot())
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return _inline(stream.getvalue(), title)


_SVG = "http://www.w3.org/2000/svg"
_HREF = "{http://www.w3.org/1999/xlink}href"


def _inline(drawing: str, title: str) -> str:
    """`drawing` fit to stand in a page: no prolog, style sheet or size in points, a title, names of its own.

    A style sheet inside an SVG would be the whole page's, and two pictures must not share the names they refer to.
    """
    root = ElementTree.fromstring(drawing)
    own = hashlib.sha256((title + drawing).encode()).hexdigest()[:8]
    parents = {child: parent for parent in root.iter() for child in parent}
    used = {e.get(_HREF, "")[1:] for e in root.iter()} | {e.get("clip-path", "")[5:-1] for e in root.iter()}
    for element in list(root.iter()):
        tag = element.tag.removeprefix(f"{{{_SVG}}}")
        if tag in ("metadata", "style"):
            parents[element].remove(element)
            continue
        element.tag = tag
        name = element.attrib.pop("id", None)
        if name in used:
            element.set("id", f"{own}-{name}")
        if _HREF in element.attrib:
            element.set("href", f"#{own}-{element.attrib.pop(_HREF)[1:]}")
        if "clip-path" in element.attrib:
            element.set("clip-path", f"url(#{own}-{element.attrib['clip-path'][5:-1]})")
        if "style" in element.attrib:
            element.set("style", element.attrib["style"].replace(_INK, "currentColor"))
        if "d" in element.attrib:
            element.set("d", " ".join(element.attrib["d"].split()))
        element.tail = None
        if tag != "text":
            element.text = None
    wide, high = (float(root.attrib.pop(side).removesuffix("pt")) * 4 / 3 for side in ("width", "height"))
    root.attrib.update(
        {"xmlns": _SVG, "width": f"{wide:g}", "height": f"{high:g}", "role": "img", "aria-labelledby": f"{own}-title"}
    )
    root.attrib |= {"stroke-linejoin": "round", "font-family": "'DejaVu Sans', sans-serif"}
    heading = ElementTree.Element("title", {"id": f"{own}-title"})
    heading.text = _short(title, 120)
    root.insert(0, heading)
    return ElementTree.tostring(root, encoding="unicode")
