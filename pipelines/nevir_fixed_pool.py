"""The NevIR fixed-pool study on one's own machine: preference and position of rankers on the same hybrid pools.

    python pipelines/nevir_fixed_pool.py --config pipelines/configs/nevir_smoke.yaml

The config names collections (labelled pairs and how their pools are made), which of them, or which shares, serve for
training, development and test, and the text scorers of the window; see docs/nevir_study.md. Paths are relative to the
working folder. Everything that is done is kept in the output folder: after an interruption the same command goes on.
The report is `<output>/report/index.html`, its tables are CSV files beside it.

Exit codes: 0 all done, 7 a scorer could not be run (the report says which and why), others as `pd-rerank`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pd_rerank.config import load
from pd_rerank.studies.command import carry_out
from pd_rerank.studies.nevir import run
from pd_rerank.studies.nevir_report import report, timing
from pd_rerank.studies.nevir_settings import NevirSettings

LIBRARIES = ("numpy", "lightgbm", "scipy", "torch", "transformers", "rerankers", "pyserini", "ranx", "matplotlib")


def main() -> int:
    args = arguments()

    def told() -> NevirSettings:
        return load(NevirSettings, file=args.config, given={"output": args.output})

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
    return parser.parse_args()


def inputs(settings: NevirSettings, config: Path) -> dict[str, Path]:
    """The files whose hashes the run records: the config, and every collection's pairs and pool config."""
    named = {"config": config}
    for name, collection in settings.collections.items():
        for what in ("pairs", "pools"):
            path = getattr(collection, what)
            if path is not None and path.is_file():
                named[f"{name}, {what}"] = path
    return named


if __name__ == "__main__":
    sys.exit(main())
