"""The order study on one's own machine: what scorers decide about the same candidates in another order.

    python pipelines/order_dependence.py --config pipelines/configs/order_smoke.yaml

The config names tasks (queries with candidates and what is known of these), scorers, who uses their rankings, and
controls; see docs/order_study.md. Paths are relative to the working folder. Everything that is done is kept in the
output folder: after an interruption the same command goes on. The report is `<output>/report/index.html`, its tables
are CSV files beside it.

Exit codes: 0 all done, 7 something could not be run (the report says what and why), others as `pd-rerank`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pd_rerank.config import load
from pd_rerank.studies.command import carry_out
from pd_rerank.studies.order import run
from pd_rerank.studies.order_data import files_of
from pd_rerank.studies.order_report import report, timing
from pd_rerank.studies.order_settings import OrderSettings

LIBRARIES = ("numpy", "scipy", "torch", "transformers", "peft", "vllm", "rerankers", "matplotlib")


def main() -> int:
    args = arguments()

    def told() -> OrderSettings:
        settings = load(OrderSettings, file=args.config, given={"output": args.output})
        return smaller(settings, args.queries, args.presentations)

    return carry_out(
        told,
        inputs=lambda settings: inputs(settings, args.config),
        libraries=LIBRARIES,
        run=run,
        report=report,
        timing=timing,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--output", type=Path, help="run folder, in place of the config's")
    parser.add_argument("--queries", type=int, help="of every task at most so many, to try a config out")
    parser.add_argument("--presentations", type=int, help="in place of the config's, to try a config out")
    return parser.parse_args()


def smaller(settings: OrderSettings, queries: int | None, presentations: int | None) -> OrderSettings:
    """The same study on fewer queries and presentations; ensembles of more than fit are skipped, and said to be."""
    said = settings.model_dump(exclude_unset=True)
    for task in said["tasks"].values():
        if queries is not None:
            task["queries"] = min(queries, task.get("queries") or queries)
    for control in said.get("controls", {}).values():
        if queries is not None and "queries" in control:
            control["queries"] = min(queries, control["queries"])
    if presentations is not None:
        said["presentations"] = presentations
        for scorer in said["scorers"].values():
            size = scorer.get("bsc") or scorer.get("adaptive") or 1
            if "of" in scorer and "ensembles" not in scorer and presentations < 2 * size:
                scorer["skip"] = f"{presentations} presentations hold no two ensembles of {size}"
    return load(OrderSettings, given=said)


def inputs(settings: OrderSettings, config: Path) -> dict[str, Path]:
    """The files whose hashes the run records: the config, and what every task is read from."""
    named = {"config": config}
    for name, task in settings.tasks.items():
        named |= {f"{name}, {what}": path for what, path in files_of(task).items() if path.is_file()}
    return named


if __name__ == "__main__":
    sys.exit(main())
