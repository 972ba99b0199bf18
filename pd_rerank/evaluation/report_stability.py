"""The report of `pd-rerank stability`: what changes with the order, how sure that is, and where it comes from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from pd_rerank.decisions import Threshold, dev_split
from pd_rerank.errors import BadArgument
from pd_rerank.evaluation.gates import Checked, gate_section
from pd_rerank.evaluation.order_effects import silver_beta, slot_profile, variance_parts
from pd_rerank.evaluation.presentations import Presentations
from pd_rerank.evaluation.report import (
    Cell,
    Picture,
    Query,
    Report,
    Row,
    Section,
    Table,
    beginning,
    defined,
    interval_row,
    mean_row,
    some,
)
from pd_rerank.evaluation.resampling import QUERIES, Interval, paired_bootstrap, ratio_bootstrap
from pd_rerank.evaluation.stability import (
    FIGURES,
    Mask,
    Qrels,
    StabilityOutcome,
    fit_threshold_f1,
    fit_threshold_retention,
    stability,
    top_k,
)
from pd_rerank.evaluation.systems import System
from pd_rerank.pool import Pool

OPENED = 50
"""Queries whose documents a report shows."""

SHOWN = 20
"""Documents shown of each."""

DRAWN = 3
"""Queries drawn."""

PARTS: Mapping[str, Mapping[str, str]] = {
    "Rankings": {
        "tau_psi": "(1 - mean Kendall τ-a) / 2: 0 the same ranking, .5 unrelated ones",
        "tau_psi_b": "the same with τ-b on the scores, for many ties",
        "rbo_instability": "1 - mean rank-biased overlap of the heads",
        "top_k_churn": "pairs of presentations whose top k differ",
        "top_k_overlap": "mean Jaccard index of the top k: 1 the same",
    },
    "Choices": {
        "selection_flip": "pairs of presentations that rank another document first",
        "selection_flip_modal": "presentations off the most frequent first",
        "pair_flip": "pairs of presentations whose first and last ranked differ",
        "pair_flip_modal": "presentations off the most frequent first and last",
    },
    "Retained sets": {
        "overlap": "mean Jaccard index of the retained sets: 1 the same",
        "set_flip": "of the documents ever retained, those not always retained",
        "retention": "share of the candidates retained; compare overlaps at equal retention",
        "retained_f1": "of the retained set against the relevant candidates",
        "retained_f1_sd": "its standard deviation over presentations",
    },
    "Quality": {
        "mean_ndcg": "nDCG@k, mean over presentations",
        "worst_ndcg": "of the worst presentation",
        "best_ndcg": "of the best presentation",
        "order_spread": "mean less worst",
        "gold_rank_variance": "variance of a relevant document's rank",
    },
    "Scores": {
        "residual_variance": "a candidate's variance over presentations",
        "centred_residual_variance": "the same with each presentation's mean taken off",
        "dispersion": "variance over candidates within a presentation",
        "normalised_residual": "√(centred / dispersion): movement against spread",
        "order_marginal_variance": "variance over candidates of their mean score",
        "tie_rate": "equal neighbours in score order",
    },
}
"""Every figure of a `StabilityOutcome` with what it says, by part of the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a threshold is come by: `given` as a number or from a `file`, or fitted on a dev split by an `objective`."""

    objective: str
    given: Threshold | None = None
    file: str | None = None
    target: float = math.nan

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Read `f1`, `retention=0.3`, a number, or the path of a threshold file."""
        name, equals, value = text.partition("=")
        if text in ("f1", "matched"):
            return cls(objective=text)
        if name == "retention":
            target = _number(value)
            if not equals or target is None or not 0 < target < 1:
                raise BadArgument(f"--threshold {text}: write retention=0.3, the share of candidates to retain")
            return cls(objective="retention", target=target)
        number = _number(text)
        if number is not None:
            return cls(objective="given", given=Threshold(value=number))
        return cls(objective="given", given=Threshold.load(text), file=text)

    def check(self, system: System) -> None:
        """Refuse a threshold file that was fitted on other scores than the system's."""
        if self.file is not None and self.given is not None:
            system.check_threshold(self.given)

    def fit(self, dev: Sequence[Presentations], qrels: Qrels | None, *, min_grade: int) -> Threshold:
        """The threshold, fitted on the first presentation of `dev` where it is not given. Source: method, 5.3."""
        if self.given is not None:
            return self.given
        if self.objective == "retention":
            return fit_threshold_retention(dev, self.target)
        if qrels is None:
            raise BadArgument(f"--threshold {self.objective} is fitted against judgements; give --qrels")
        return fit_threshold_f1(dev, qrels, min_grade=min_grade)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measured:
    """A system's queries with their stability figures; those of `dev` fitted the threshold and have no set figures."""

    queries: tuple[Presentations, ...]
    outcomes: tuple[StabilityOutcome, ...]
    threshold: Threshold | None
    dev: tuple[str, ...]
    k: int

    def figure(self, name: str) -> dict[str, float]:
        """A figure by query, NaN where undefined."""
        return {outcome.query_id: float(getattr(outcome, name)) for outcome in self.outcomes}

    @property
    def means(self) -> dict[str, float]:
        """Every figure's mean over the queries that have it, NaN where none has."""
        return {name: _mean(self.figure(name).values()) for name in FIGURES}


def measure(
    queries: Sequence[Presentations],
    *,
    rule: Rule | None = None,
    qrels: Qrels | None = None,
    k: int = 10,
    min_grade: int = 1,
    dev: Sequence[str] | None = None,
) -> Measured:
    """Every stability figure of every query. Where `rule` fits a threshold it does so on `dev`, by default half.

    Set figures are then of the other queries alone: no figure is of queries that its threshold was fitted on.
    """
    fitting: set[str] = set()
    threshold = None
    if rule is not None:
        if rule.given is None:
            fitting = set(dev_split([query.query_id for query in queries])[0] if dev is None else dev)
        threshold = rule.fit([query for query in queries if query.query_id in fitting], qrels, min_grade=min_grade)
    return measure_at(queries, threshold, qrels=qrels, k=k, min_grade=min_grade, dev=sorted(fitting))


def measure_at(
    queries: Sequence[Presentations],
    threshold: Threshold | None,
    *,
    qrels: Qrels | None = None,
    k: int = 10,
    min_grade: int = 1,
    dev: Sequence[str] = (),
) -> Measured:
    """Every stability figure of every query at a threshold; `dev` names those it was fitted on."""
    fitting = set(dev)
    outcomes: dict[str, StabilityOutcome] = {}
    for part, at in (
        ([query for query in queries if query.query_id not in fitting], threshold),
        ([query for query in queries if query.query_id in fitting], None),
    ):
        found = stability(part, threshold=at, qrels=qrels, k=k, min_grade=min_grade)
        outcomes |= {outcome.query_id: outcome for outcome in found}
    return Measured(
        queries=tuple(queries),
        outcomes=tuple(outcomes[query.query_id] for query in queries),
        threshold=threshold,
        dev=tuple(sorted(fitting)),
        k=k,
    )


def stability_report(
    measured: Measured,
    *,
    name: str,
    qrels: Qrels | None = None,
    pools: Sequence[Pool] | None = None,
    gates: Sequence[Checked] = (),
    settings: Mapping[str, object],
    top_grade: float = 3.0,
    draw: bool = False,
) -> Report:
    """Gates, every figure with its interval, the causes where slots are recorded, and the queries that move most."""
    worst = _worst_first(measured, gates)
    by_query = {pool.query_id: pool for pool in pools or ()}
    sections = [
        *gate_section(gates),
        *_figures(measured, draw=draw),
        *_causes(measured, top_grade=top_grade, draw=draw),
        *(_pictures(measured, worst[:DRAWN]) if draw else ()),
    ]
    listed = []
    for place, (query, outcome) in enumerate(worst):
        pool = by_query.get(query.query_id)
        judged = None if qrels is None else qrels.get(query.query_id)
        values = {figure: defined(float(getattr(outcome, figure))) for figure in FIGURES}
        listed.append(
            Query(
                query_id=query.query_id,
                query="" if pool is None else beginning(pool.query),
                values={"presentations": query.count, "candidates": len(query.doc_ids), **values},
                documents=_documents(query, measured, pool, judged) if place < OPENED else None,
            )
        )
    return Report(
        title=f"Order stability of {name}",
        settings={**settings, "bootstrap": asdict(QUERIES)},
        sections=tuple(sections),
        queries=tuple(listed),
    )


# -- sections -----------------------------------------------------------------------------------------------------


def _figures(measured: Measured, *, draw: bool) -> list[Section]:
    sections = []
    for title, figures in PARTS.items():
        values = {figure: measured.figure(figure) for figure in figures}
        there = [f for f in figures if not all(map(math.isnan, values[f].values()))]
        if not there:
            continue
        rows = tuple(mean_row(f, values[f].values(), figures[f]) for f in there)
        sections.append(
            Section(
                title=title,
                text=_told(title, measured),
                rows=rows,
                pictures=_histograms(title, values) if draw else (),
            )
        )
    return sections


def _told(title: str, measured: Measured) -> str:
    if title == "Rankings":
        counts = sorted({query.count for query in measured.queries})
        shown = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        absent = [o.query_id for o in measured.outcomes if o.missing]
        gone = f" In {len(absent)} queries a presentation leaves candidates out ({some(absent)})." if absent else ""
        return (
            f"{len(measured.queries)} queries, {shown} presentations each; k = {measured.k}. Means over the queries "
            f"that have a figure, with 95 % bootstrap intervals over queries.{gone}"
        )
    threshold = measured.threshold
    if title != "Retained sets" or threshold is None:
        return ""
    kept = f"Retained is a score of at least {threshold.value:.6g}."
    if not measured.dev:
        return f"{kept} The threshold was given; report on queries it was not fitted on."
    return (
        f"{kept} The threshold was fitted on {len(measured.dev)} queries ({threshold.objective}, there "
        f"{threshold.reached:.4f}); the figures here are of the other {len(measured.queries) - len(measured.dev)}."
    )


def _causes(measured: Measured, *, top_grade: float, draw: bool) -> list[Section]:
    """Slot, window and companion shares, slot profile and silver-β; none where nobody recorded slots."""
    queries = [query for query in measured.queries if query.slot is not None and query.window is not None]
    if not queries:
        return []
    parts = [variance_parts(q.query_id, q.scores, q.slot, q.window) for q in queries]  # type: ignore[arg-type]
    there = [part for part in parts if not math.isnan(part.total)]
    rows: list[Row] = []
    if any(part.total > 0 for part in there):
        total = [part.total for part in there]
        shares = {
            "slot_share": ([part.total - part.after_slot for part in there], "of the order variance, by the slot"),
            "window_share": ([part.after_slot - part.after_window for part in there], "by the window"),
            "companion_share": ([part.after_window for part in there], "the rest, which companions explain best"),
        }
        rows += [interval_row(name, ratio_bootstrap(share, total), note) for name, (share, note) in shares.items()]
    profile = slot_profile(queries)
    beta = defined(silver_beta(queries, top_grade=top_grade))
    note = f"what a slot moves a grade from 0 to {top_grade:g}, root mean square"
    rows.append(Row(name="silver_beta", value=beta, n=len(queries), note=note))
    by_slot = [_of_slot(column) for column in profile.residuals.T]
    table = Table(
        title="Slot profile",
        columns=("slot", "ψ", "low", "high", "queries"),
        rows=tuple(
            (slot, None, None, None, 0) if found is None else (slot, found.estimate, found.low, found.high, found.n)
            for slot, found in enumerate(by_slot)
        ),
        note="mean of the score less the candidate's mean over presentations, at each slot of a window",
    )
    pictures: tuple[Picture, ...] = ()
    if draw and any(by_slot):
        from pd_rerank.evaluation import pictures as drawn

        low, high = (
            [math.nan if f is None or (end := getattr(f, side)) is None else float(end) for f in by_slot]
            for side in ("low", "high")
        )
        svg = drawn.slot_profile(profile.psi, low, high)
        caption = "What each slot adds to a score, with 95 % intervals; a scorer without favourite places is flat at 0."
        pictures = (Picture(title="Slot profile", caption=caption, svg=svg),)
    return [Section(title="Where it comes from", rows=tuple(rows), tables=(table,), pictures=pictures)]


def _of_slot(residuals: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Interval | None:
    there = residuals[~np.isnan(residuals)]
    return paired_bootstrap(there) if there.size else None


def _histograms(title: str, values: Mapping[str, Mapping[str, float]]) -> tuple[Picture, ...]:
    from pd_rerank.evaluation.pictures import histogram

    wanted = {
        "Rankings": {"tau_psi": "τ-PSI by query", "top_k_overlap": "Top-k overlap by query"},
        "Retained sets": {"overlap": "Retained-set overlap by query", "set_flip": "Set flip rate by query"},
        "Choices": {"selection_flip": "Selection flips by query"},
    }.get(title, {})
    return tuple(
        Picture(
            title=heading,
            caption=f"How many queries have which {figure}.",
            svg=histogram(list(values[figure].values()), figure, span=(0.0, 1.0), title=heading),
        )
        for figure, heading in wanted.items()
        if not all(map(math.isnan, values[figure].values()))
    )


def _pictures(measured: Measured, worst: Sequence[tuple[Presentations, StabilityOutcome]]) -> list[Section]:
    from pd_rerank.evaluation.pictures import rank_ranges, score_movement

    pictures = []
    for query, _ in worst:
        chosen = _closest(query, measured)[:SHOWN]
        if not chosen:
            continue
        labels = [query.doc_ids[d] for d in chosen]
        heading = f"Query {query.query_id}"
        if measured.threshold is not None and query.query_id not in measured.dev:
            svg = score_movement(query.scores[:, chosen], labels, measured.threshold.value, title=heading)
            caption = "Scores of the documents around the threshold in every presentation."
        else:
            svg = rank_ranges(query.ranks[:, chosen], labels, measured.k, title=heading)
            caption = f"Ranks of the documents around rank {measured.k} in every presentation."
        pictures.append(Picture(title=heading, caption=caption, svg=svg))
    return [Section(title="Documents that move", pictures=tuple(pictures))] if pictures else []


# -- queries ------------------------------------------------------------------------------------------------------


def _worst_first(measured: Measured, gates: Sequence[Checked]) -> list[tuple[Presentations, StabilityOutcome]]:
    """By the first failed gate's figure, else by overlap of retained sets, else by τ-PSI; undefined ones last."""
    failed = next((found.gate for found in gates if not found.passed and found.gate.figure in FIGURES), None)
    if failed is not None:
        figure, sign = failed.figure, -1 if failed.kind == "most" else 1
    else:
        figure, sign = ("tau_psi", -1) if measured.threshold is None else ("overlap", 1)
    values = measured.figure(figure)

    def key(pair: tuple[Presentations, StabilityOutcome]) -> tuple[bool, float, float, str]:
        value, psi = values[pair[0].query_id], pair[1].tau_psi
        return math.isnan(value), sign * value if value == value else 0.0, -psi if psi == psi else 0.0, pair[0].query_id

    return sorted(zip(measured.queries, measured.outcomes, strict=True), key=key)


def _kept(query: Presentations, measured: Measured) -> Mask:
    """What each presentation decides to keep, (K, n): scores from the threshold, else the top k."""
    if measured.threshold is not None and query.query_id not in measured.dev:
        return measured.threshold.retain(query.scores)
    return top_k(query.ranks, measured.k)


def _closest(query: Presentations, measured: Measured) -> list[int]:
    """Candidates by how evenly the presentations are divided about keeping them, then by their mean rank."""
    share = _kept(query, measured).mean(axis=0)
    rank = np.where(query.ranks < 0, len(query.doc_ids), query.ranks).mean(axis=0)
    edge = float(share.sum())
    return sorted(range(len(query.doc_ids)), key=lambda d: (abs(share[d] - 0.5), abs(rank[d] - edge), d))


def _documents(
    query: Presentations, measured: Measured, pool: Pool | None, judged: Mapping[str, int] | None
) -> Table | None:
    """The documents that some presentations keep and others do not, the most disputed first."""
    kept = _kept(query, measured)
    count = kept.sum(axis=0)
    flips = [d for d in _closest(query, measured) if 0 < count[d] < query.count]
    if not flips:
        return None
    texts = {} if pool is None else {c.doc_id: beginning(c.text) for c in pool.candidates}
    columns: list[tuple[str, list[Cell]]] = [
        ("document", [query.doc_ids[d] for d in flips[:SHOWN]]),
        ("kept", [f"{count[d]} of {query.count}" for d in flips[:SHOWN]]),
        ("grade", [None if judged is None else judged.get(query.doc_ids[d]) for d in flips[:SHOWN]]),
        ("lowest score", [_least(query.scores[:, d]) for d in flips[:SHOWN]]),
        ("highest score", [_most(query.scores[:, d]) for d in flips[:SHOWN]]),
        ("best rank", [_rank(query.ranks[:, d], best=True) for d in flips[:SHOWN]]),
        ("worst rank", [_rank(query.ranks[:, d], best=False) for d in flips[:SHOWN]]),
        ("scores", [" ".join("–" if s != s else f"{s:.3f}" for s in query.scores[:, d]) for d in flips[:SHOWN]]),
        ("text", [texts.get(query.doc_ids[d]) for d in flips[:SHOWN]]),
    ]
    used = [(name, cells) for name, cells in columns if any(cell is not None for cell in cells)]
    ever = int((count > 0).sum())
    more = f", {SHOWN} shown" if len(flips) > SHOWN else ""
    rule = "retained" if measured.threshold is not None and query.query_id not in measured.dev else f"top {measured.k}"
    return Table(
        title="Documents that flip",
        columns=tuple(name for name, _ in used),
        rows=tuple(zip(*(cells for _, cells in used), strict=True)),
        note=f"{len(flips)} of {ever} ever {rule} are not always so{more}",
    )


def _least(scores: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float | None:
    return None if np.isnan(scores).all() else float(np.nanmin(scores))


def _most(scores: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float | None:
    return None if np.isnan(scores).all() else float(np.nanmax(scores))


def _rank(ranks: np.ndarray[tuple[int], np.dtype[np.int32]], *, best: bool) -> int | None:
    """The best or worst rank from 1; a presentation that does not rank the document has none worse."""
    there = ranks[ranks >= 0]
    if not there.size or (not best and there.size < len(ranks)):
        return None
    return int(there.min() if best else there.max()) + 1


def _mean(values: Iterable[float]) -> float:
    there = [value for value in values if not math.isnan(value)]
    return math.fsum(there) / len(there) if there else math.nan


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
