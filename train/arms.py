"""Train several arms on the same labels and steps, and show them side by side on the same held-out queries.

    python train/arms.py --config train/configs/arms-small-passages.yaml

The config holds options of `train/ocsft.py`, shared by all arms, and under `arms` a mapping from a name to what that
arm has of its own. Each arm is a run of `train/ocsft.py` in `output/NAME`, one after the other. Beside them stand the
base model off the shelf and, where arms go on from an adapter (`start`), that adapter. `output/arms.md` gets quality
and stability of each arm's last step with intervals, and paired differences from the arm named in `baseline`;
`output/frontier.svg` draws them. With `select: largest_weight` it also says which λ the paper's rule takes of arms that
differ in `consistency` alone. After an interruption the same command goes on; what is finished is not done again.
"""

from __future__ import annotations

import argparse
import logging
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from pd_rerank.config import TrainSettings, load, read_mapping
from pd_rerank.errors import BadArgument, PdRerankError
from pd_rerank.evaluation.report import Cell, Table
from pd_rerank.files import CARD, sha256_file, sha256_json, whole_file
from pd_rerank.training.selection import (
    Choice,
    Evaluation,
    difference,
    evaluation_table,
    frontier_picture,
    largest_weight,
    read_evaluations,
    table_text,
    write_evaluations,
)

SHELF, START = "off_the_shelf", "start"

SHARED = frozenset(
    (
        *("model", "start", "output", "max_steps", "epochs", "windows_per_step", "window_size", "evaluate_k"),
        *("pools", "labels", "max_queries", "heldout_pools", "heldout_qrels", "heldout_queries"),
        "evaluate_presentations",
    )
)
"""What arms must have in common to be compared."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--only", nargs="+", metavar="ARM", help="do these and stop, to share the work out")
    args = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("pd_rerank").setLevel(logging.INFO)
    try:
        arms, output, baseline = settings_of(args.config)
        found = run(arms, output, only=args.only)
        if args.only is None:
            print(report([run[-1] for run in found.values()], output, baseline, weights(arms, found)))
    except PdRerankError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error


def settings_of(config: Path) -> tuple[dict[str, TrainSettings], Path, str | None]:
    """The settings of every arm, the folder of all, and the arm others are compared with."""
    said = {key.replace("-", "_"): value for key, value in read_mapping(config).items()}
    arms, baseline, output = said.pop("arms", None), said.pop("baseline", None), said.pop("output", None)
    if not isinstance(arms, dict) or not arms:
        raise BadArgument(f"{config} has no mapping 'arms' from a name to its options")
    if output is None:
        raise BadArgument(f"{config} names no 'output', the folder of all arms")
    found = {}
    for name, own in arms.items():
        if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
            raise BadArgument(f"{config}: an arm's name is of letters, digits, _ and -, got {name!r}")
        if name in (SHELF, START):
            raise BadArgument(f"{config}: the name '{name}' is taken; give the arm another")
        if own is not None and not isinstance(own, dict):
            raise BadArgument(f"{config}, arm '{name}': its options are 'key: value' lines, got {own!r}")
        mine = {str(key).replace("-", "_"): value for key, value in (own or {}).items()}
        if apart := sorted(set(mine) & SHARED):
            raise BadArgument(f"{config}, arm '{name}': '{apart[0]}' is the same for all arms; give it above them")
        found[name] = load(TrainSettings, given={**said, **mine, "output": str(Path(output) / name)})
        if found[name].heldout_pools is None:
            raise BadArgument(f"{config}, arm '{name}': arms are compared on held-out queries; give heldout-pools")
    if baseline is not None and baseline not in found:
        raise BadArgument(f"{config}: baseline '{baseline}' is none of the arms {', '.join(found)}")
    return found, Path(output), baseline


def run(
    arms: Mapping[str, TrainSettings], output: Path, *, only: Sequence[str] | None = None
) -> dict[str, list[Evaluation]]:
    """Train what is not trained, measure what is not measured; the evaluations of each, by the arm's name."""
    first = next(iter(arms.values()))
    beside = {SHELF: first.model_copy(update={"start": None, "output": output / SHELF})}
    if first.start is not None:
        beside[START] = first.model_copy(update={"output": output / START})
    every = {**beside, **arms}
    if unknown := set(only or ()) - set(every):
        raise BadArgument(f"--only {min(unknown)}: there is {', '.join(every)}")
    output.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, settings in every.items():
        if only is None or name in only:
            evaluations = done(name, settings, untrained=name in beside)
            weight = {"weight": 0.0} if name in beside else {}
            found[name] = [replace(evaluation, arm=name, **weight) for evaluation in evaluations]
    return found


def weights(arms: Mapping[str, TrainSettings], found: Mapping[str, Sequence[Evaluation]]) -> list[Choice]:
    """The paper's choice of λ among arms that differ in it alone, for each such set that asks for `largest_weight`."""
    alike: dict[str, list[str]] = {}
    for name, settings in arms.items():
        if settings.select == "largest_weight" and settings.loss != "supervised":
            rest = settings.model_dump(mode="json", exclude={"output", "consistency"})
            alike.setdefault(sha256_json(rest), []).append(name)
    choices = []
    for names in alike.values():
        first = arms[names[0]]
        runs = [replace(e, arm=first.recipe) for name in names for e in found[name] if e.step]
        choices.append(largest_weight(runs, min_step=first.min_step))
    return choices


def done(name: str, settings: TrainSettings, *, untrained: bool) -> list[Evaluation]:
    """The evaluations of a run of `train/ocsft.py`, run first unless it is finished; `untrained`: of step 0 alone."""
    folder = Path(str(settings.output))
    evaluations = folder / "evaluations.jsonl"
    config, tried = folder.parent / f"{name}.yaml", folder.parent / f"{name}.next.yaml"
    said = yaml.safe_dump(settings.model_dump(mode="json", exclude_none=True), sort_keys=False) + read_from(settings)
    finished = (evaluations if untrained else folder / "adapter" / CARD).is_file()
    if not (finished and config.is_file() and config.read_text(encoding="utf-8") == said):
        with whole_file(tried) as stream:  # under its own name once it is done: other settings are to be refused again
            stream.write(said)
        words = ["--evaluate-first", "--stop-after", "0"] if untrained else []
        command = [sys.executable, str(Path(__file__).with_name("ocsft.py")), "--config", str(tried), *words]
        if code := subprocess.run(command, check=False).returncode:
            raise SystemExit(code)
        tried.replace(config)
    return read_evaluations(evaluations)


def read_from(settings: TrainSettings) -> str:
    """What the files of a run hold, as comments: with other contents its config is another."""
    lines = []
    for name in ("pools", "labels", "heldout_pools", "heldout_qrels"):
        path = Path(getattr(settings, name))
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        lines.append(f"# {name} {sha256_json([sha256_file(file) for file in files])}\n")
    return "".join(lines)


def report(found: Sequence[Evaluation], output: Path, baseline: str | None, choices: Sequence[Choice] = ()) -> str:
    """Write the tables, the choice of λ and the picture; all but the picture as text."""
    tables = [evaluation_table(found, title="Arms on held-out queries")]
    if baseline is not None:
        tables.append(differences(found, next(e for e in found if e.arm == baseline)))
    write_evaluations(output / "arms.jsonl", found)
    parts = [f"{table.title}\n\n{table_text(table)}\n\n{table.note}" for table in tables]
    pages = [f"## {table.title}\n\n```\n{table_text(table)}\n```\n\n{table.note}" for table in tables]
    said = [line for choice in choices for line in chosen(choice)]
    text = "\n\n".join([*parts, *said])
    with whole_file(output / "arms.md") as stream:
        stream.write("\n\n".join([*pages, *said]))
    with whole_file(output / "frontier.svg") as stream:
        stream.write(frontier_picture(found))
    return text


def chosen(choice: Choice) -> list[str]:
    """A choice of λ, in sentences."""
    kept = "none" if choice.kept is None else f"{choice.kept.arm}, λ {choice.kept.weight:g} at step {choice.kept.step}"
    return [f"By {choice.rule}: {kept} ({'; '.join(choice.reasons)})", *(f"But {said}" for said in choice.warnings)]


def differences(found: Sequence[Evaluation], baseline: Evaluation) -> Table:
    """Paired differences from one arm, with bootstrap intervals over queries."""
    rows: list[tuple[Cell, ...]] = []
    for evaluation in found:
        if evaluation is baseline:
            continue
        row: list[Cell] = [evaluation.arm]
        for figure in ("ndcg", "mean_ndcg", "tau_psi", "overlap"):
            apart = difference(evaluation, baseline, figure)
            row.append(f"{apart.estimate:+.4f} [{apart.low:+.3f}, {apart.high:+.3f}]")
        rows.append(tuple(row))
    return Table(
        title=f"Differences from {baseline.arm}",
        columns=("arm", "nDCG", "mean nDCG", "τ-PSI", "overlap"),
        rows=tuple(rows),
        note="paired over held-out queries, with 95 % intervals; lower τ-PSI and higher overlap are steadier",
    )


if __name__ == "__main__":
    main()
