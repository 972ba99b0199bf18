"""`pd-rerank stability`: what changes when the same candidates arrive in another order."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pd_rerank.cli.flags import flags
from pd_rerank.cli.results import check_output, deliver
from pd_rerank.config import StabilitySettings, load
from pd_rerank.errors import BadArgument

GATES = {
    "max_psi": "tau_psi",
    "min_overlap": "overlap",
    "max_set_flip": "set_flip",
    "max_churn": "top_k_churn",
    "max_selection_flip": "selection_flip",
    "max_pair_flip": "pair_flip",
    "max_order_spread": "order_spread",
    "max_residual": "normalised_residual",
}
"""Options that limit a figure."""


@flags(StabilitySettings)
def stability(
    more: Annotated[list[str] | None, typer.Argument(metavar="RUN", help="More runs, as in --runs r*.trec.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with any of the options below as keys.")] = None,
    **given: Any,
) -> None:
    """Measure how far a reranker's decisions depend on the order its candidates arrive in; no model is needed.

    Rankings, heads, retained sets and quality under reordering, with bootstrap intervals; where the movement comes
    from (slots, windows, companions); and every query, the worst first, with the documents that flip. Limits make it
    a check for continuous integration: exit code 7 where one does not hold, the report written all the same.
    """
    if more:
        given["runs"] = [*(given.get("runs") or ()), *more]
    settings = load(StabilitySettings, file=config, given=given)
    from pd_rerank.evaluation.gates import check, gates_of
    from pd_rerank.evaluation.report_stability import Rule, measure, stability_report
    from pd_rerank.evaluation.systems import read_system
    from pd_rerank.files import check_place, read_qrels
    from pd_rerank.pool import read_pools

    gates = gates_of(GATES, settings.model_dump())
    draw = check_output(settings.output)
    if settings.save_threshold is not None:
        check_place(settings.save_threshold)
        if settings.save_threshold.is_dir():
            raise BadArgument(f"--save-threshold {settings.save_threshold} is a folder; name a file")
    rule = None if settings.threshold is None else Rule.parse(settings.threshold)
    if rule is not None and rule.objective == "matched":
        raise BadArgument("--threshold matched is for compare: it takes two systems")
    qrels = None if settings.qrels is None else read_qrels(settings.qrels)
    pools = None if settings.pools is None else read_pools(settings.pools)
    sources = [settings.scores] if settings.scores is not None else list(map(Path, settings.runs or ()))
    system = read_system(sources, readout=settings.readout)
    if pools is not None:
        system.check_pools(pools)
    if rule is not None:
        rule.check(system)
    measured = measure(
        system.shown(average=settings.average),
        rule=rule,
        qrels=qrels,
        k=settings.top_k,
        min_grade=settings.relevance_level,
    )
    if settings.save_threshold is not None and measured.threshold is not None:
        system.stamp(measured.threshold).save(settings.save_threshold)
    checked = check(gates, measured.means, {gate.figure: measured.figure(gate.figure) for gate in gates})
    report = stability_report(
        measured,
        name=system.name,
        qrels=qrels,
        pools=pools,
        gates=checked,
        settings={
            "system": system.describe(),
            "pools": settings.pools,
            "qrels": settings.qrels,
            "threshold": settings.threshold,
            "top_k": settings.top_k,
            "relevance_level": settings.relevance_level,
            "average": settings.average,
        },
        top_grade=system.top_grade or 3,
        draw=draw,
    )
    deliver(report, settings.output, checked)
