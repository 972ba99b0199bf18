"""`pd-rerank evaluate`: rankings against judgements, with intervals and what each figure leaves open."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pd_rerank.cli.flags import flags
from pd_rerank.cli.results import check_output, deliver
from pd_rerank.config import EvaluateSettings, load

if TYPE_CHECKING:
    from pd_rerank.evaluation.ranking import Run
    from pd_rerank.pool import Pool


@flags(EvaluateSettings)
def evaluate(
    config: Annotated[Path | None, typer.Option(help="YAML file with any of the options below as keys.")] = None,
    **given: Any,
) -> None:
    """Evaluate runs or scores against judgements; no model is needed.

    Every metric comes with a bootstrap interval, the recall ceiling its pool sets, the share of documents nobody
    judged, how many neighbours tie, and the same metric of the first stage. Judged queries without results count 0
    and are named.
    """
    settings = load(EvaluateSettings, file=config, given=given)
    from pd_rerank.evaluation.report_quality import judge, metrics_at, quality_report
    from pd_rerank.evaluation.systems import read_systems
    from pd_rerank.files import read_qrels

    assert settings.qrels is not None
    draw = check_output(settings.output)
    metrics = metrics_at(settings.metrics, settings.relevance_level)
    qrels = read_qrels(settings.qrels)
    first, pools = _first_stage(settings.first_stage)
    systems = read_systems([*(settings.run or ()), *(settings.scores or ())], readout=settings.readout)
    for system in systems:
        if pools is not None:
            system.check_pools(pools)
    report = quality_report(
        judge(systems, qrels, metrics, first_stage=first, pools=pools),
        qrels,
        metrics,
        first_stage=first,
        pools=pools,
        settings={
            "systems": {system.name: system.describe() for system in systems},
            "qrels": settings.qrels,
            "first_stage": settings.first_stage,
            "metrics": list(map(str, metrics)),
        },
        draw=draw,
    )
    deliver(report, settings.output)


def _first_stage(path: Path | None) -> tuple[Run | None, list[Pool] | None]:
    """The first stage's ranking, and the pools where it is given as pools."""
    from pd_rerank.evaluation.ranking import Ranking
    from pd_rerank.files import read_run
    from pd_rerank.pool import read_pools

    if path is None:
        return None, None
    if path.is_dir() or path.name.removesuffix(".gz").endswith(".jsonl"):
        pools = read_pools(path)
        return {pool.query_id: Ranking.first_stage(pool) for pool in pools}, pools
    return read_run(path), None
