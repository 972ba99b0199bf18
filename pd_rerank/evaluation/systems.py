"""What is evaluated: a reranker's saved output under a name, from a scores folder or from TREC runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from pd_rerank.decisions import Threshold, scored_by
from pd_rerank.errors import BadArgument, InvalidData, MissingResource
from pd_rerank.evaluation.presentations import Presentations, presentations_of_runs
from pd_rerank.evaluation.ranking import Ranking, Run
from pd_rerank.files import RunHit, read_run
from pd_rerank.pool import Pool
from pd_rerank.scores import READOUTS, Readout, ScoreTable, SlotResidual, join_scores, read_scores

_SCORES = "scores"
"""The folder of that name inside what `pd-rerank rerank` writes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class System:
    """A reranker's output: score tables, or TREC runs, one per presentation; the other of the two is empty.

    `record` is what the scores' run.json says of their making; `readout` and `residual` say which score is served.
    """

    name: str
    paths: tuple[str, ...]
    tables: tuple[ScoreTable, ...] = ()
    runs: tuple[Mapping[str, Sequence[RunHit]], ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)
    readout: Readout = "expected"
    residual: SlotResidual | None = None

    @property
    def query_ids(self) -> list[str]:
        """The queries it has output for, in order."""
        if self.tables:
            return [table.query_id for table in self.tables]
        return list(dict.fromkeys(query_id for run in self.runs for query_id in run))

    @property
    def presentations(self) -> int:
        """K, the most presentations any query has."""
        return max((table.presentations for table in self.tables), default=len(self.runs))

    @property
    def top_grade(self) -> int | None:
        """The grade that a score of 1 stands for; None where scores are no grades."""
        return self.tables[0].grades.shape[2] - 1 if self.tables and self.readout != "p_relevant" else None

    def rankings(self) -> list[Run]:
        """What it ranks: the one served ranking of score tables, or each of the runs."""
        if self.tables:
            return [{t.query_id: Ranking.served(t, self.readout, residual=self.residual) for t in self.tables}]
        return list(self.runs)

    def scores(self) -> dict[str, dict[str, float]]:
        """The served scores by query and document, NaN for a candidate without; several runs have none."""
        if self.tables:
            rows = [(t, t.mean(self.readout, residual=self.residual).tolist()) for t in self.tables]
            return {t.query_id: dict(zip(t.doc_ids, row, strict=True)) for t, row in rows}
        if len(self.runs) > 1:
            raise BadArgument(f"'{self.name}' is {len(self.runs)} runs, one per presentation; name one of them")
        return {query_id: {hit.doc_id: hit.score for hit in hits} for query_id, hits in self.runs[0].items()}

    def shown(self, *, average: int = 1) -> list[Presentations]:
        """Its queries under their presentations, or under the means of every `average` of them.

        A single one is `InvalidData`: nothing can differ from it.
        """
        if self.presentations < 2 * average:
            cure = "give a run for each presentation" if self.runs else "rerank with more --presentations"
            raise InvalidData(
                f"'{self.name}' has {self.presentations} presentations, and it takes {2 * average} to see what changes "
                f"with the order; {cure}"
            )
        if self.tables:
            shown = [Presentations.of_table(t, self.readout, residual=self.residual) for t in self.tables]
        else:
            shown = presentations_of_runs(self.runs)
        return shown if average == 1 else [query.averaged(average) for query in shown]

    @property
    def context(self) -> dict[str, Any]:
        """Model, adapter and prompt template of its scores: what a threshold fitted on them records."""
        return scored_by(*(self.record.get(part) or {} for part in ("engine", "prompt", "scoring")))

    def check_threshold(self, threshold: Threshold) -> None:
        """Refuse a threshold from a file that was fitted on another readout, model, adapter or template."""
        if not self.tables:
            return
        if threshold.readout != self.readout:
            raise BadArgument(
                f"the threshold is of readout '{threshold.readout}', '{self.name}' is read as '{self.readout}'; "
                f"give --readout {threshold.readout} or another threshold"
            )
        threshold.check(self.context)

    def stamp(self, threshold: Threshold) -> Threshold:
        """A threshold fitted on this system, with what `check_threshold` compares."""
        return replace(threshold, readout=self.readout, context=self.context) if self.tables else threshold

    def check_pools(self, pools: Sequence[Pool]) -> None:
        """Refuse output of other pools: score tables by their recorded hash, runs by queries and documents."""
        if self.tables:
            join_scores(self.tables, pools, run=self.record)
            return
        known = {pool.query_id: set(pool.doc_ids) for pool in pools}
        for path, run in zip(self.paths, self.runs, strict=True):
            for query_id, hits in run.items():
                if query_id not in known:
                    raise InvalidData(f"{path} ranks query '{query_id}', which has no pool; it is of other pools")
                foreign = next((hit.doc_id for hit in hits if hit.doc_id not in known[query_id]), None)
                if foreign is not None:
                    raise InvalidData(
                        f"{path}, query '{query_id}': '{foreign}' is not among the {len(known[query_id])} candidates "
                        "of its pool; give the pools this run was made from"
                    )

    def describe(self) -> dict[str, Any]:
        """What a report's settings say of it."""
        made = {key: self.record[key] for key in ("model", "adapter", "engine", "scoring") if key in self.record}
        kind = {"readout": self.readout, "residual": self.residual is not None} if self.tables else {}
        return {"files": list(self.paths), "presentations": self.presentations, **kind, **made}


def read_system(paths: Sequence[str | Path], *, name: str | None = None, readout: str | None = None) -> System:
    """Read a scores folder (or the folder `pd-rerank rerank` wrote), or one TREC run per presentation.

    `readout` is by default the one the scores were served with. The name is by default the file's or folder's.
    """
    if readout is not None and readout not in READOUTS:
        raise BadArgument(f"unknown readout '{readout}'; choose one of {', '.join(READOUTS)}")
    sources = [Path(path) for path in paths]
    folders = [source for source in sources if source.is_dir()]
    named = name or _name(sources[0])
    files = tuple(str(source) for source in sources)
    if folders and len(sources) > 1:
        raise BadArgument(f"{folders[0]} is a scores folder, which holds its presentations; give it alone")
    if folders:
        return _of_scores(folders[0], named, files, readout)
    runs = []
    for source in sources:
        run = read_run(source)
        if not run:
            raise InvalidData(f"{source} holds no lines; a run has one line per query and document")
        runs.append(run)
    return System(name=named, paths=files, runs=tuple(runs))


def read_systems(words: Sequence[str], *, readout: str | None = None) -> list[System]:
    """Read systems as a command line names them: `PATH` or `NAME=PATH`; runs of one NAME are its presentations."""
    paths: dict[str, list[str]] = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not equals or Path(word).exists():
            name, path = _name(Path(word)), word
            if name in paths:
                raise BadArgument(f"two systems would be called '{name}'; write NAME={word}")
        elif not name or not path:
            raise BadArgument(f"'{word}' is no system; write PATH or NAME=PATH")
        paths.setdefault(name, []).append(path)
    return [read_system(found, name=name, readout=readout) for name, found in paths.items()]


def _of_scores(folder: Path, name: str, files: tuple[str, ...], readout: str | None) -> System:
    inner = folder / _SCORES
    if not (folder / "scores.npz").is_file() and inner.is_dir():
        folder = inner
    tables, record = read_scores(folder)
    if not tables:
        raise MissingResource(f"{folder} holds scores of no query; score some pools first")
    served = record.get("readout", "expected")
    residual = None
    if record.get("residual") and readout in (None, served):
        residual = _residual(record["residual"], folder)
    chosen = cast(Readout, readout or (served if served in READOUTS else "expected"))
    return System(name=name, paths=files, tables=tuple(tables), record=record, readout=chosen, residual=residual)


def _residual(found: Any, folder: Path) -> SlotResidual:
    """The slot residual that run.json records; JSON has turned its widths into text."""
    try:
        offsets = {int(width): tuple(map(float, values)) for width, values in found["offsets"].items()}
        return SlotResidual(offsets=offsets, readout=found["readout"], n_queries=found["n_queries"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidData(f"{folder / 'run.json'}: 'residual' is no slot residual ({error!r})") from error


def _name(path: Path) -> str:
    """What a file or folder is called where nobody named it."""
    whole = path.absolute()
    if whole.name == _SCORES and (whole.parent / "results.jsonl").is_file():
        whole = whole.parent
    return whole.name if whole.is_dir() else whole.name.removesuffix(".gz").rsplit(".", 1)[0]
