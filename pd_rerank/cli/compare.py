"""`pd-rerank compare`: several systems side by side, in quality, stability and preference."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from pd_rerank.cli.flags import flags
from pd_rerank.cli.results import check_output, deliver
from pd_rerank.config import CompareSettings, load
from pd_rerank.errors import BadArgument, InvalidData

logger = logging.getLogger("pd_rerank")


@flags(CompareSettings)
def compare(
    systems: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SYSTEM",
            help="Scores folders or TREC runs, PATH or NAME=PATH; runs of one NAME are its presentations.",
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with any of the options below as keys.")] = None,
    **given: Any,
) -> None:
    """Compare systems in quality, order stability and preference, query by query; no model is needed.

    Every difference from the baseline is paired over the queries both have, with a bootstrap interval, a sign-flip
    test and Holm's adjustment. Quality needs --qrels, stability several presentations, preference --pairs.
    """
    settings = load(CompareSettings, file=config, given={**given, "systems": systems or None})
    from pd_rerank.evaluation.pairs import designate, read_pairs
    from pd_rerank.evaluation.report_comparison import comparison_report, figures_of, measure_all
    from pd_rerank.evaluation.report_preference import Ranker, ranker_of
    from pd_rerank.evaluation.report_quality import judge, metrics_at
    from pd_rerank.evaluation.report_stability import Rule
    from pd_rerank.evaluation.systems import read_systems
    from pd_rerank.files import read_qrels
    from pd_rerank.pool import read_pools

    draw = check_output(settings.output)
    metrics = metrics_at(settings.metrics, settings.relevance_level)
    rule = None if settings.threshold is None else Rule.parse(settings.threshold)
    qrels = None if settings.qrels is None else read_qrels(settings.qrels)
    pools = None if settings.pools is None else read_pools(settings.pools)
    named = read_systems(settings.systems, readout=settings.readout)
    names = [system.name for system in named]
    baseline = names[0] if settings.baseline is None else settings.baseline
    if len(names) < 2:
        raise BadArgument(f"'{names[0]}' is the only system, with {len(settings.systems)} runs; name another")
    if baseline not in names:
        raise BadArgument(f"--baseline {baseline} is none of the systems {', '.join(names)}")
    first = set(named[names.index(baseline)].query_ids)
    for system in named:
        both = len(first & set(system.query_ids))
        if not both:
            raise InvalidData(f"'{system.name}' and '{baseline}' have no query in common; give output of one query set")
        if both < max(len(first), len(system.query_ids)):
            logger.warning(
                "'%s' has %d queries, '%s' %d, %d in common: means are over each one's own, differences over those",
                *(system.name, len(system.query_ids), baseline, len(first), both),
            )
        if pools is not None:
            system.check_pools(pools)
        if rule is not None:
            rule.check(system)
    rankers: dict[str, Ranker] = {}
    if settings.pairs is not None and pools is not None:
        cases = designate(read_pairs(settings.pairs, source=settings.source), pools)
        rankers = {system.name: ranker_of(system, cases) for system in named}
    measured = measure_all(
        named,
        rule=rule,
        baseline=baseline,
        qrels=qrels,
        k=settings.top_k,
        min_grade=settings.relevance_level or 1,
    )
    figures = figures_of(
        names,
        judged=() if qrels is None else judge(named, qrels, metrics),
        metrics=metrics,
        measured=measured,
        rankers=rankers,
    )
    if not figures:
        raise BadArgument("nothing to compare these by: give --qrels, --pairs, or systems with several presentations")
    report = comparison_report(
        names,
        figures,
        baseline=baseline,
        measured=measured,
        settings={
            "systems": {system.name: system.describe() for system in named},
            "qrels": settings.qrels,
            "pools": settings.pools,
            "pairs": settings.pairs,
            "threshold": settings.threshold,
            "top_k": settings.top_k,
            "metrics": list(map(str, metrics)),
        },
        draw=draw,
    )
    deliver(report, settings.output)
