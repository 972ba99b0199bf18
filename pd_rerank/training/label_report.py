"""What labels are worth: how they spread, how far they depend on the order shown, how they rank judged documents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from pd_rerank.errors import InvalidData
from pd_rerank.evaluation.order_effects import silver_beta
from pd_rerank.evaluation.presentations import Presentations, strict_ranks
from pd_rerank.evaluation.ranking import Metric, Ranking, evaluate
from pd_rerank.evaluation.report import Report, Row, Section, Table, interval_row, mean_row
from pd_rerank.evaluation.resampling import paired_bootstrap
from pd_rerank.evaluation.stability import score_spread, tau_psi
from pd_rerank.pool import Pool
from pd_rerank.scores import ScoreTable
from pd_rerank.training.labels import Labels

Qrels = Mapping[str, Mapping[str, int]]


def label_report(
    labels: Labels,
    pools: Sequence[Pool],
    *,
    qrels: Qrels | None = None,
    tables: Sequence[ScoreTable] | None = None,
    metrics: Sequence[Metric | str] = ("nDCG@10",),
) -> Report:
    """A report on labels: spread, order-consistency where T > 1, quality where there are judgements.

    Silver-β needs to know where documents stood: give the teacher's score `tables`. Quality is that of the rankings
    which single-order and order-averaged labels make of the judged queries that have labels; it needs ranx (extra
    eval). Figures are in grades. Queries without labels are left out and counted.
    """
    sections = [_spread(labels, pools)]
    if labels.presentations > 1:
        sections.append(_consistency(labels, tables))
    if qrels is not None:
        sections.append(_quality(labels, pools, qrels, metrics))
    settings = {key: value for key, value in labels.manifest.items() if isinstance(value, str | int | None)}
    return Report(title="Training labels", settings=settings, sections=tuple(sections))


def _spread(labels: Labels, pools: Sequence[Pool]) -> Section:
    every = [scores for _, _, scores in labels.arrays()]
    single = np.concatenate([scores[:, 0] for scores in every] or [np.zeros(0)])
    averaged = np.concatenate([scores.mean(axis=1) for scores in every] or [np.zeros(0)])
    full = [pool for pool in pools if len(pool)]
    covered = sum(all(doc_id in labels.get(pool.query_id, {}) for doc_id in pool.doc_ids) for pool in full)
    rows = [
        Row(name="queries with all labels", value=covered, n=len(full)),
        Row(name="documents with a label", value=labels.documents, n=sum(map(len, pools))),
        mean_row("mean grade", [float(scores.mean()) for scores in every], "over queries"),
        mean_row("SD over a query's documents", [float(s.mean(axis=1).std()) for s in every], "0 tells nothing apart"),
    ]
    counts = [
        (g, *(int((np.rint(values) == g).sum()) / max(1, len(values)) for values in (single, averaged)))
        for g in range(labels.grades)
    ]
    table = Table(
        title="Share of labels by nearest grade", columns=("grade", "single-order", "averaged"), rows=tuple(counts)
    )
    return Section(title="Spread", rows=tuple(rows), tables=(table,))


def _consistency(labels: Labels, tables: Sequence[ScoreTable] | None) -> Section:
    spreads, psi, shifts = [], [], []
    for _, doc_ids, vectors in labels.arrays():
        scores = vectors.T
        spreads.append(score_spread(scores))
        psi.append(tau_psi(strict_ranks(scores, doc_ids)))
        shifts.append(float(np.abs(scores[0] - scores.mean(axis=0)).mean()))
    top = labels.grades - 1
    beta = math.nan if tables is None else silver_beta([Presentations.of_table(t) for t in tables], top_grade=top)
    note = "how far the slot alone moves a grade, root mean square over slots"
    rows = [
        Row(
            name="silver-β",
            value=None if math.isnan(beta) else beta,
            n=len(labels),
            note=note if tables is not None else "needs the teacher's scores, which say where documents stood",
        ),
        mean_row("τ-PSI", psi, "0 the same ranking in every shuffle, .5 unrelated ones"),
        mean_row("order variance", [s.residual for s in spreads], "of a document's grade over shuffles"),
        mean_row("dispersion", [s.dispersion for s in spreads], "variance of the grades over documents, per shuffle"),
        mean_row("normalised residual", [s.normalised for s in spreads], "order movement against dispersion"),
        mean_row("single-order less averaged", shifts, "mean absolute difference of the two targets"),
    ]
    return Section(title="Order-consistency", rows=tuple(rows))


def _quality(labels: Labels, pools: Sequence[Pool], qrels: Qrels, metrics: Sequence[Metric | str]) -> Section:
    judged = {query_id: dict(qrels[query_id]) for query_id in labels if qrels.get(query_id)}
    if not judged:
        raise InvalidData(f"none of the {len(labels)} labelled queries is judged; give the judgements of these queries")
    kinds = {"single-order": _run(labels, first=True), "averaged": _run(labels, first=False)}
    first_stage = {pool.query_id: Ranking.first_stage(pool) for pool in pools}
    wanted = [Metric.parse(m) if isinstance(m, str) else m for m in metrics]
    found = {kind: evaluate(judged, run, wanted, first_stage=first_stage) for kind, run in kinds.items()}
    rows: list[Row] = []
    for metric in wanted:
        values = {kind: result.values(metric) for kind, result in found.items()}
        before = [o.first_stage for o in found["averaged"].outcomes if o.metric == metric]
        rows.append(mean_row(f"{metric} of the first stage", before))
        kept = values if labels.presentations > 1 else {"averaged": values["averaged"]}
        rows += [mean_row(f"{metric} of {kind} labels", value.values()) for kind, value in kept.items()]
        if labels.presentations > 1:
            gained = [values["averaged"][q] - values["single-order"][q] for q in judged]
            rows.append(interval_row(f"{metric}, averaged less single-order", paired_bootstrap(gained)))
    unjudged = [o.unjudged for o in found["averaged"].outcomes if o.metric == wanted[0]]
    rows.append(mean_row("documents above the cut-off that nobody judged", unjudged))
    text = f"{len(judged)} of {len(labels)} labelled queries are judged."
    return Section(title="Quality", text=text, rows=tuple(rows))


def _run(labels: Labels, *, first: bool) -> dict[str, dict[str, float]]:
    return {
        query_id: dict(zip(doc_ids, (scores[:, 0] if first else scores.mean(axis=1)).tolist(), strict=True))
        for query_id, doc_ids, scores in labels.arrays()
    }
