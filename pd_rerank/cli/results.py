"""Where an evaluation's report goes: a folder, or JSON on stdout; then its gates decide the exit code."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from pd_rerank.evaluation.gates import Checked
    from pd_rerank.evaluation.report import Report

logger = logging.getLogger("pd_rerank")


def check_output(output: Path | None) -> bool:
    """Whether pictures are wanted; a folder that no report can go to is refused before any work."""
    if output is None:
        return False
    from pd_rerank.evaluation.report import check_destination

    check_destination(output)
    return True


def deliver(report: Report, output: Path | None, gates: Sequence[Checked] = ()) -> None:
    """Write or print a report, and raise `GateFailed` after that if a gate failed."""
    from pd_rerank.evaluation.gates import refuse_failed
    from pd_rerank.evaluation.report import as_json, write_report

    if output is None:
        typer.echo(json.dumps(as_json(report), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        write_report(report, output)
        logger.info("report: %s", output / "report.html")
    refuse_failed(gates)
