"""`pd-rerank label`: pools and a teacher, its scores or judgements in; training labels and a report on them out."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pd_rerank.cli.flags import flags
from pd_rerank.cli.rerank import PartialResult, Work, finish
from pd_rerank.config import LabelSettings, RerankSettings, ScoringSettings, load
from pd_rerank.errors import BadArgument, InvalidData, MissingResource

if TYPE_CHECKING:
    from pd_rerank.evaluation.ranking import Metric
    from pd_rerank.evaluation.report import Report
    from pd_rerank.scores import ScoreTable
    from pd_rerank.training.labels import Labels

logger = logging.getLogger("pd_rerank")

_LABELS, _REPORT, _TEACHER = "labels", "report", "teacher"


@flags(LabelSettings)
def label(
    config: Annotated[
        Path | None, typer.Option(help="YAML file with any of the options below as keys; what is typed wins.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace other labels in the folder.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print windows, prompts and estimated tokens as JSON and stop.")
    ] = False,
    validate_only: Annotated[
        bool, typer.Option("--validate-only", help="Check options and input, print counts as JSON and stop.")
    ] = False,
    progress: Annotated[
        bool | None,
        typer.Option(help="Progress bar on stderr. Default: where stderr is a terminal.", show_default=False),
    ] = None,
    **given: Any,
) -> None:
    """Make training labels: grades of a teacher over shuffles of every pool, or judgements.

    With --model (a model, or an adapter trained before) every pool is graded --presentations times, shuffled as a
    whole each time; --scores takes such grades from a folder 'rerank' wrote; --qrels alone takes judgements, a
    person's or a language model's. The output folder gets labels/ (labels.jsonl and manifest.json), report/ and, with
    a model, teacher/ with every grade read. After an interruption the same command goes on where it stopped.
    Documents and queries without a label are named, the others are written, and the exit code is 7.
    """
    settings = load(LabelSettings, file=config, given=given)
    work = _Labelling(settings)
    if dry_run or validate_only:
        found = work.scoring.counts() | ({} if validate_only or settings.teacher is None else work.scoring.estimate())
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    folder = work.folder(overwrite=overwrite)
    labels, tables = work.labels(folder, overwrite=overwrite, progress=progress)
    work.write(folder, labels, tables)
    _refuse_gaps(labels, folder)


def _refuse_gaps(labels: Labels, folder: Path) -> None:
    """Say what was labelled; raise `PartialResult` where something was not."""
    logger.info("%d queries, %d documents labelled: %s", len(labels), labels.documents, folder / _LABELS)
    failed, without = labels.manifest["failed"], labels.manifest["without_label"]
    gaps = [f"query '{query_id}' ({why})" for query_id, why in failed.items()]
    gaps += [f"{len(ids)} documents of query '{query_id}' ('{ids[0]}')" for query_id, ids in without.items()]
    if gaps:
        raise PartialResult(
            f"{len(failed)} queries and {sum(map(len, without.values()))} documents got no label: {'; '.join(gaps[:5])}"
            f"{'; …' if len(gaps) > 5 else ''}; the others are in {folder / _LABELS}; training refuses such queries"
        )


class _Labelling:
    """Settings turned into what they name; making it finds every bad argument and missing file."""

    def __init__(self, settings: LabelSettings) -> None:
        self.settings = settings
        for name in ("scores", "qrels"):
            path = getattr(settings, name)
            if path is not None and not path.exists():
                raise MissingResource(f"--{name}: no file or folder {path}")
        shared = {name: getattr(settings, name) for name in ScoringSettings.model_fields if name != "model"}
        self.scoring = Work(
            RerankSettings(
                **shared,
                model=settings.teacher or "none",
                presentations=settings.presentations,
                shard_size=settings.shard_size,
                output=None if settings.output is None else settings.output / _TEACHER,
            )
        )
        self.pools = self.scoring.pools
        if not any(map(len, self.pools)):
            raise InvalidData(f"none of the {len(self.pools)} pools holds a document; there is nothing to label")
        self.qrels = self._qrels()
        self.metrics = self._metrics()

    def _qrels(self) -> dict[str, dict[str, int]] | None:
        from pd_rerank.files import read_qrels

        if self.settings.qrels is None:
            return None
        qrels = read_qrels(self.settings.qrels)
        if not any(pool.query_id in qrels for pool in self.pools):
            raise InvalidData(
                f"{self.settings.qrels} judges none of the {len(self.pools)} pools' queries; give their judgements"
            )
        return qrels

    @property
    def _judged(self) -> bool:
        return self.settings.scores is None and self.settings.teacher is None

    def _metrics(self) -> list[Metric]:
        """What labels are compared with judgements in, where there are others to compare with."""
        from pd_rerank._extras import need
        from pd_rerank.evaluation.report_quality import metrics_at

        metrics = metrics_at(self.settings.metrics)
        if self.qrels is not None and not self._judged:
            need("ranx", extra="eval", purpose="labels are compared with judgements by ranx")
        return metrics

    def folder(self, *, overwrite: bool) -> Path:
        """The output folder, after refusing one that cannot be written or holds labels made otherwise."""
        from pd_rerank.evaluation.report import FILES
        from pd_rerank.files import check_folder, read_json
        from pd_rerank.training.labels import FILES as LABEL_FILES

        folder = self.settings.output
        if folder is None:
            raise BadArgument("--output is missing: name a folder for the labels")
        if folder.exists() and not folder.is_dir():
            raise BadArgument(f"{folder} is a file; name a folder for the labels")
        check_folder(folder / _LABELS, holds=LABEL_FILES)
        check_folder(folder / _REPORT, holds=FILES)
        made = folder / _LABELS / "manifest.json"
        if made.is_file() and not overwrite:
            record = read_json(made)
            there = record.get("made_from") if isinstance(record, dict) else None
            here = self._made_from()
            before = there if isinstance(there, dict) else {}
            if differing := [key for key in here if before.get(key) != here[key]]:
                raise BadArgument(
                    f"{folder} holds labels made otherwise ({', '.join(differing)} differ); name another folder, or "
                    "overwrite them (--overwrite)"
                )
        return folder

    def _made_from(self) -> dict[str, Any]:
        """What decides about the labels beside the teacher's own settings, which its job compares."""
        from pd_rerank.files import sha256_file
        from pd_rerank.pool import pools_sha256

        settings, qrels = self.settings, self.settings.qrels
        return {
            "pools_sha256": pools_sha256(self.pools),
            "model": settings.teacher,
            "scores": None
            if settings.scores is None
            else [sha256_file(file) for file in sorted(settings.scores.rglob("scores.npz"))],
            "judgements": sha256_file(qrels) if self._judged and qrels is not None else None,
            "map_grades": settings.map_grades,
            "unjudged": settings.unjudged,
        }

    def labels(self, folder: Path, *, overwrite: bool, progress: bool | None) -> tuple[Labels, list[ScoreTable] | None]:
        """The labels, and the score tables they were made from where there are any."""
        from pd_rerank.scores import read_scores
        from pd_rerank.training.labels import labels_of_qrels, labels_of_tables

        settings = self.settings
        name = settings.experiment_id or folder.resolve().name
        if self._judged:
            assert self.qrels is not None
            labels = labels_of_qrels(
                self.qrels,
                self.pools,
                grades=len(self.scoring.rubric.grades),
                mapping=_grade_map(settings.map_grades),
                unjudged=settings.unjudged,
                judge=f"judgements:{settings.qrels}",
                experiment_id=name,
            )
            return labels, None
        source = settings.scores
        if source is None:
            source = folder / _TEACHER
            job = self.scoring.job(overwrite=overwrite)
            if job.finished:
                logger.info("%s is graded already, with these settings and pools", source)
            else:
                finish(self.scoring, job, progress=progress, doing="labelling")
        inner = source / "scores"
        tables, run = read_scores(inner if inner.is_dir() else source)
        return labels_of_tables(tables, self.pools, run=run, experiment_id=name), tables

    def write(self, folder: Path, labels: Labels, tables: list[ScoreTable] | None) -> None:
        """Write the labels and, after them, the report."""
        from pd_rerank.evaluation.report import FILES, as_json, as_markdown
        from pd_rerank.files import whole_file, whole_folder, write_json
        from pd_rerank.training.label_report import label_report
        from pd_rerank.training.labels import write_labels

        for half in (path for name in (_LABELS, _REPORT) for path in folder.glob(f".{name}.*")):
            shutil.rmtree(half)  # what a killed process left
        write_labels(folder / _LABELS, labels, also={"made_from": self._made_from()})
        qrels = None if self._judged else self.qrels
        report = label_report(labels, self.pools, qrels=qrels, tables=tables, metrics=self.metrics)
        with whole_folder(folder / _REPORT, holds=FILES) as fresh:
            write_json(fresh / "report.json", as_json(report))
            with whole_file(fresh / "report.md") as stream:
                stream.write(as_markdown(report))
        for line in _figures(report):
            logger.info("%s", line)


def _grade_map(text: str | None) -> Mapping[int, int] | None:
    if text is None:
        return None
    return {int(judged): int(grade) for judged, _, grade in (pair.partition("=") for pair in text.split(","))}


def _figures(report: Report) -> list[str]:
    """The figures worth a line on stderr."""
    from pd_rerank.evaluation.report import shown

    rows = [row for section in report.sections if section.title != "Spread" for row in section.rows]
    return [f"{row.name}: {shown(row.value)}" for row in rows]
