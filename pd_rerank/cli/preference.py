"""`pd-rerank preference`: which of two passages a reranker prefers, and where it puts them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pd_rerank.cli.flags import flags
from pd_rerank.cli.results import check_output, deliver
from pd_rerank.config import PreferenceSettings, load

GATES = {"min_strict": "strict", "min_both": "both_directions", "min_mrr": "mrr", "min_coverage": "coverage"}
"""Options that limit a figure."""


@flags(PreferenceSettings)
def preference(
    config: Annotated[Path | None, typer.Option(help="YAML file with any of the options below as keys.")] = None,
    **given: Any,
) -> None:
    """Measure preference and position on labelled pairs of passages; no model is needed.

    How many pairs the pools cover, how often the preferred passage is scored strictly above the other (one way and
    both), where it stands, what decided, and what changed against the first stage and any --reference. Intervals
    resample source groups. Limits make it a check: exit code 7 where one does not hold, the report written all the
    same.
    """
    settings = load(PreferenceSettings, file=config, given=given)
    from pd_rerank.evaluation.gates import check, gates_of
    from pd_rerank.evaluation.pairs import designate, read_pairs
    from pd_rerank.evaluation.report_preference import first_stage_of, preference_report, ranker_of
    from pd_rerank.evaluation.systems import read_system, read_systems
    from pd_rerank.pool import read_pools

    assert settings.pairs is not None
    assert settings.pools is not None
    gates = gates_of(GATES, settings.model_dump())
    draw = check_output(settings.output)
    directions = read_pairs(settings.pairs, source=settings.source)
    pools = read_pools(settings.pools)
    system = read_system([settings.scores or settings.run or ""], readout=settings.readout)
    others = read_systems(settings.reference or ())
    for one in (system, *others):
        one.check_pools(pools)
    cases = designate(directions, pools)
    ranker, *references = (
        ranker_of(one, cases, window=settings.window, fallback=settings.fallback) for one in (system, *others)
    )
    values, units = ranker.limited(settings.population, settings.ties)
    checked = check(gates, values, units)
    report = preference_report(
        ranker,
        cases,
        references=[first_stage_of(cases), *references],
        pools=pools,
        which=settings.population,
        ties=settings.ties,
        gates=checked,
        settings={
            "system": system.describe(),
            "references": {other.name: other.describe() for other in others},
            "pairs": settings.pairs,
            "pools": settings.pools,
            "source": settings.source,
            "window": settings.window,
            "fallback": settings.fallback,
        },
        draw=draw,
    )
    deliver(report, settings.output, checked)
