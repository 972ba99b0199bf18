"""The report of `pd-rerank evaluate`: ranking metrics with intervals, and what each figure leaves open."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.evaluation.ranking import (
    EXPONENTIAL,
    Metric,
    Qrels,
    Ranking,
    RankingOutcome,
    RankingResult,
    Run,
    as_ranking,
    evaluate,
)
from pd_rerank.evaluation.report import (
    Picture,
    Query,
    Report,
    Row,
    Section,
    Table,
    beginning,
    defined,
    mean_row,
    some,
)
from pd_rerank.evaluation.resampling import QUERIES, paired_bootstrap
from pd_rerank.evaluation.systems import System
from pd_rerank.pool import Pool

OPENED = 20
"""Queries whose documents a report shows."""

SHOWN = 10
"""Documents shown of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One system's rankings against judgements; several runs are several results, of which queries take the mean."""

    system: System
    results: tuple[RankingResult, ...]

    def values(self, metric: Metric) -> dict[str, float]:
        """The metric by query, the mean over the system's runs."""
        each = [result.values(metric) for result in self.results]
        return {query_id: math.fsum(v[query_id] for v in each) / len(each) for query_id in each[0]}

    def outcomes(self, metric: Metric) -> list[RankingOutcome]:
        """The first run's outcomes, in the judgements' order."""
        return [outcome for outcome in self.results[0].outcomes if outcome.metric == metric]


def metrics_at(names: str | Sequence[str], level: int | None = None) -> list[Metric]:
    """Metrics from names between commas; `level` is the relevant grade of all that name none, but nDCG.

    As in TREC's deep learning tracks, nDCG keeps every grade's gain.
    """
    words = names.split(",") if isinstance(names, str) else list(names)
    metrics = [Metric.parse(word) for word in words if word.strip()]
    if not metrics:
        raise BadArgument("no metric given; name at least one, such as nDCG@10")
    if level is not None:
        binary = [m.rel == 1 and m.family not in ("nDCG", EXPONENTIAL) for m in metrics]
        metrics = [replace(m, rel=level) if b else m for m, b in zip(metrics, binary, strict=True)]
    return list(dict.fromkeys(metrics))


def judge(
    systems: Sequence[System],
    qrels: Qrels,
    metrics: Sequence[Metric],
    *,
    first_stage: Run | None = None,
    pools: Sequence[Pool] | None = None,
) -> list[Judged]:
    """Evaluate every system; with `pools`, which must be those it ranked, the ceiling is theirs."""
    ids = None if pools is None else {pool.query_id: pool.doc_ids for pool in pools}
    judged = []
    for system in systems:
        results = []
        for run in system.rankings():
            try:
                results.append(evaluate(qrels, run, metrics, pools=ids, first_stage=first_stage))
            except InvalidData as error:
                raise InvalidData(f"'{system.name}': {error}") from error
        judged.append(Judged(system=system, results=tuple(results)))
    return judged


def quality_report(
    judged: Sequence[Judged],
    qrels: Qrels,
    metrics: Sequence[Metric],
    *,
    first_stage: Run | None = None,
    pools: Sequence[Pool] | None = None,
    settings: Mapping[str, object],
    draw: bool = False,
) -> Report:
    """A section per system, and the judged queries: by loss against the first stage, else by the first metric."""
    sections = [_section(j, metrics, compared=first_stage is not None, draw=draw) for j in judged]
    return Report(
        title="Ranking quality",
        settings={**settings, "bootstrap": asdict(QUERIES)},
        sections=tuple(sections),
        queries=_queries(judged, qrels, metrics, first_stage, pools),
    )


def _section(judged: Judged, metrics: Sequence[Metric], *, compared: bool, draw: bool) -> Section:
    first = judged.results[0]
    outcomes = {metric: judged.outcomes(metric) for metric in metrics}
    rows = [mean_row(str(metric), judged.values(metric).values()) for metric in metrics]
    open_ends = [_open_ends(metric, outcomes[metric], first, compared=compared) for metric in metrics]
    columns: tuple[str, ...] = (
        "metric",
        "ideal order",
        "of it",
        "in pool",
        "unjudged",
        "tied",
        "ties against",
        "ties for",
    )
    if compared:
        rows += [_change(metric, outcomes[metric]) for metric in metrics]
        columns += ("first stage",)
    pictures: tuple[Picture, ...] = ()
    if draw:
        from pd_rerank.evaluation.pictures import histogram

        name = str(metrics[0])
        drawn = histogram(list(judged.values(metrics[0]).values()), name, title=f"{name} of {judged.system.name}")
        pictures = (Picture(title=f"{name} by query", caption="How the judged queries spread.", svg=drawn),)
    return Section(
        title=judged.system.name,
        text=_who_counts(judged),
        rows=tuple(rows),
        tables=(
            Table(
                title="What the figures leave open",
                columns=tuple(columns),
                rows=tuple(open_ends),
                note="ideal order: the metric if the pool's documents stood in the best order; of it: the share "
                "reached; in pool: relevant documents that are in the pool (recall ceiling); unjudged: documents above "
                "the cut-off without a judgement; tied: equal neighbours, and the metric with all ties broken against "
                "or for it",
            ),
        ),
        pictures=pictures,
    )


def _who_counts(judged: Judged) -> str:
    first = judged.results[0]
    n = len({outcome.query_id for outcome in first.outcomes})
    text = f"{n} judged queries."
    if len(judged.results) > 1:
        text += f" {len(judged.results)} runs: a query's figure is the mean over them; the tables are the first run's."
    if first.empty:
        text += f" {len(first.empty)} of them have no results and count 0: {some(first.empty)}."
    if first.ignored:
        text += f" {len(first.ignored)} queries of the run are not judged and left out: {some(first.ignored)}."
    return text


def _open_ends(
    metric: Metric, outcomes: Sequence[RankingOutcome], result: RankingResult, *, compared: bool
) -> tuple[str | float | None, ...]:
    row = next(summary for summary in result.summary() if summary.metric == metric)
    cells = (row.oracle, row.of_oracle, row.pool_recall, row.unjudged, row.tied, row.low, row.high)
    return (str(metric), *map(defined, cells), *((defined(row.first_stage),) if compared else ()))


def _change(metric: Metric, outcomes: Sequence[RankingOutcome]) -> Row:
    found = paired_bootstrap([outcome.value - outcome.first_stage for outcome in outcomes])
    better, worse = (sum(s * (o.value - o.first_stage) > 0 for o in outcomes) for s in (1, -1))
    note = f"better for {better}, worse for {worse} queries"
    return Row(
        name=f"{metric} less first stage", value=found.estimate, low=found.low, high=found.high, n=found.n, note=note
    )


def _queries(
    judged: Sequence[Judged],
    qrels: Qrels,
    metrics: Sequence[Metric],
    first_stage: Run | None,
    pools: Sequence[Pool] | None,
) -> tuple[Query, ...]:
    values: dict[str, dict[str, float | None]] = {query_id: {} for query_id in qrels}
    for j in judged:
        prefix = f"{j.system.name} " if len(judged) > 1 else ""
        for metric in metrics:
            for query_id, value in j.values(metric).items():
                values[query_id][f"{prefix}{metric}"] = defined(value)
    lead, main = metrics[0], judged[0]
    first = {outcome.query_id: outcome for outcome in main.outcomes(lead)}
    for query_id, outcome in first.items():
        if first_stage is not None:
            values[query_id][f"first stage {lead}"] = defined(outcome.first_stage)
        values[query_id] |= {f"ideal order {lead}": defined(outcome.oracle), "unjudged": defined(outcome.unjudged)}
    lost = {q: o.value - (o.first_stage if first_stage is not None else 0.0) for q, o in first.items()}
    worst = sorted(qrels, key=lambda query_id: (lost[query_id], query_id))
    by_query = {pool.query_id: pool for pool in pools or ()}
    rankings = main.system.rankings()[0]
    found = []
    for place, query_id in enumerate(worst):
        pool = by_query.get(query_id)
        ranked = as_ranking(rankings.get(query_id, ()))
        found.append(
            Query(
                query_id=query_id,
                query="" if pool is None else beginning(pool.query),
                values=values[query_id],
                documents=_documents(ranked, qrels[query_id], (first_stage or {}).get(query_id), pool)
                if place < OPENED and ranked.doc_ids
                else None,
            )
        )
    return tuple(found)


def _documents(ranked: Ranking, judged: Mapping[str, int], before: object, pool: Pool | None) -> Table:
    first = {} if before is None else {d: r for r, d in enumerate(as_ranking(before).doc_ids, 1)}  # type: ignore[arg-type]
    texts = {} if pool is None else {c.doc_id: beginning(c.text) for c in pool.candidates}
    scores = ranked.scores or (None,) * len(ranked.doc_ids)
    top = list(zip(ranked.doc_ids, scores, strict=True))[:SHOWN]
    rows = tuple(
        (rank, doc_id, defined(score), judged.get(doc_id), first.get(doc_id), texts.get(doc_id))
        for rank, (doc_id, score) in enumerate(top, 1)
    )
    columns = ("rank", "document", "score", "grade", "first stage rank", "text")
    kept = [i for i in range(len(columns)) if i < 4 or any(row[i] is not None for row in rows)]
    return Table(
        title="Best ranked",
        columns=tuple(columns[i] for i in kept),
        rows=tuple(tuple(row[i] for i in kept) for row in rows),
    )
