"""Rerank many pools into a folder, shard by shard, so that an interrupted job goes on where it stopped.

A shard is the score tables of a few queries, on disk whole or not at all. Once all are there the folder's files are
written from them: what they hold depends on pools and settings alone, never on how often the job was interrupted.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pd_rerank import windows
from pd_rerank.decisions import Settle, Threshold
from pd_rerank.engines.base import Engine
from pd_rerank.errors import BadArgument, EngineFailure, InvalidData, MissingResource, ModelMismatch, whole
from pd_rerank.files import (
    SCORED_WITH,
    check_folder,
    hold_folder,
    manifest,
    read_json,
    run_word,
    sha256_file,
    write_json,
    write_jsonl,
    write_run,
)
from pd_rerank.pool import Pool, pool_sha256, pools_sha256
from pd_rerank.prompt import Prompt
from pd_rerank.scores import Readout, ScoreTable, SlotResidual, read_scores, write_scores
from pd_rerank.scoring import Scoring, score_pools

logger = logging.getLogger("pd_rerank")

_RUN, _RESULTS, _SCORES, _MANIFEST, _SHARDS = "run.trec", "results.jsonl", "scores", "manifest.json", "shards"
_OURS = (_RUN, _RESULTS, _SCORES, _MANIFEST, _SHARDS)
_SCORE_FILES = (f"{_SCORES}/scores.npz", f"{_SCORES}/run.json")
_HASHED = (_RUN, _RESULTS, *_SCORE_FILES)

_QUERY_FAULTS = (InvalidData, ModelMismatch, EngineFailure)
"""What one query's text or the engine's trouble with it can raise; other queries may still be scored."""

OnWindows = Callable[[int], None]


class RerankJob:
    """One set of pools, one way of scoring and one folder for the results.

    `settings` is what scores depend on, as plain values; the pools' hash is added, and with `settle` what it decides
    by. A folder that holds a job with other settings is refused, with the settings that differ, unless `overwrite`
    clears our files from it once scoring starts. What only shapes the results (readout, residual, threshold, and
    `tag` and `top_k` of `write`) may change: the scores there are taken, and the results written again.
    Ids that a run file cannot hold, and a folder that cannot be written, are refused here, before anything is scored.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        folder: str | Path,
        *,
        scoring: Scoring,
        settings: Mapping[str, Any],
        readout: Readout = "expected",
        residual: SlotResidual | None = None,
        threshold: Threshold | None = None,
        settle: Settle | None = None,
        shard_size: int = 16,
        tag: str = "pd_rerank",
        top_k: int | None = None,
        overwrite: bool = False,
    ) -> None:
        if not whole(shard_size) or shard_size < 1:
            raise BadArgument(f"shard_size must be a whole number of at least 1, got {shard_size!r}")
        seen: set[str] = set()
        for pool in pools:
            run_word(pool.query_id, what="query id")
            if pool.query_id in seen:
                raise InvalidData(f"query '{pool.query_id}' has two pools; give every query its own id")
            seen.add(pool.query_id)
            for doc_id in pool.doc_ids:
                run_word(doc_id, what=f"query '{pool.query_id}': document id")
        self.pools = pools
        self.folder = Path(folder)
        self.scoring = scoring
        self.readout = readout
        self.residual = residual
        self.threshold = threshold
        self.settle = settle
        self.tag = tag
        self.top_k = top_k
        self.shard_size = shard_size
        shown = {"readout": readout, "residual": residual and asdict(residual)}
        stops = {} if settle is None else {"settle": asdict(settle), "settled_by": shown}
        self.settings = _plain({**settings, **stops, "pools_sha256": pools_sha256(pools)})
        self.shown = _plain({**shown, "threshold": threshold and asdict(threshold), "tag": tag, "top_k": top_k})
        self.failed: dict[str, str] = {}
        self._tables: dict[str, ScoreTable] = {}
        self._loaded: dict[str, Any] | None = None
        self._kept = False
        self._overwrite = overwrite
        self._lock: int | None = None
        if self.folder.exists() and not self.folder.is_dir():
            raise BadArgument(f"{self.folder} is a file; name a folder for the results")
        if overwrite:
            self._clearable()
        self.finished = False if overwrite else self._look()
        if not self.finished:
            self._writable()

    # -- what is there already --------------------------------------------------------------------------------

    def _writable(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise BadArgument(f"{self.folder} cannot be written ({error.strerror}); name another folder") from error

    def _clearable(self) -> None:
        """Refuse to clear what no job has written: other files in our folders, or the manifest of something else."""
        begun = self.folder / _SHARDS
        shards = [path.name for path in self._shards()]
        halves = [path.name for path in begun.glob(".*")]
        check_folder(self.folder / _SCORES, holds=[Path(name).name for name in _SCORE_FILES])
        check_folder(begun, holds=["settings.json", *shards, *halves])
        try:
            record = _record(self.folder / _MANIFEST)
        except (InvalidData, MissingResource):  # damaged: then to overwrite is the cure
            return
        hashes = record.get("sha256")
        if foreign := sorted({*hashes} - {*_HASHED}) if isinstance(hashes, dict) else []:
            raise BadArgument(
                f"{self.folder / _MANIFEST} is of something else (it records '{foreign[0]}'); name another folder"
            )

    def _clear(self) -> None:
        for name in _OURS:
            path = self.folder / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _look(self) -> bool:
        """Compare with the job the folder holds, if any; take over its scores; say whether nothing is left to do."""
        self._tables.clear()
        self.failed.clear()
        if (self.folder / _MANIFEST).exists():
            record = _record(self.folder / _MANIFEST)
            self._same(record.get("settings"), self.settings)
            if not record.get("failed"):
                return self._take_whole(record)
        elif not (self.folder / _SHARDS / "settings.json").exists():
            mine = [name for name in _OURS if (self.folder / name).exists() and name != _SHARDS]
            if mine:
                raise BadArgument(f"{self.folder} holds a {mine[0]} of something else; name another folder")
            return False
        for shard in self._shards():
            self._take_over(shard)
        if not self._graded():  # a first try of which every query failed holds nothing to go on with
            self._tables.clear()
            self.failed.clear()
        elif (begun := self.folder / _SHARDS / "settings.json").exists():
            found = _record(begun)
            self._same(found.get("settings"), self.settings)
            self._loaded = found.get("loaded")
        return False

    def _graded(self) -> bool:
        """Whether any document of any query has been graded."""
        return any(table.doc_ids for table in self._tables.values())

    def _shards(self) -> list[Path]:
        folder = self.folder / _SHARDS
        return sorted(path for path in folder.iterdir() if path.name.isdecimal()) if folder.is_dir() else []

    def _take_over(self, shard: Path) -> None:
        try:
            tables, run = read_scores(shard)
            failed = dict(run["failed"])
        except (InvalidData, MissingResource, KeyError, TypeError, ValueError) as error:
            logger.warning("%s; the queries of %s are scored again", error, shard)
            return
        self._tables.update({table.query_id: table for table in tables})
        self.failed = {qid: why for qid, why in (self.failed | failed).items() if qid not in self._tables}

    def _take_whole(self, record: Mapping[str, Any]) -> bool:
        """Take over a finished job: unchanged where its results are shown the same way, else to be written again."""
        same = bool(record.get("shown") == self.shown)
        hashes = record.get("sha256")
        for name in _HASHED if same else _SCORE_FILES:
            path = self.folder / name
            want = hashes.get(name) if isinstance(hashes, dict) else None
            if not path.is_file() or sha256_file(path) != want:
                raise InvalidData(f"{path} is not what {_MANIFEST} records; overwrite the job or name another folder")
        if not same:
            tables, _ = read_scores(self.folder / _SCORES)
            self._tables.update({table.query_id: table for table in tables})
            self._loaded, self._kept = record.get("loaded"), True
        return same

    def _same(self, there: Any, here: Mapping[str, Any]) -> None:
        differing = list(_differences(there, here))
        if differing:
            raise BadArgument(
                f"{self.folder} holds a job with other settings: {'; '.join(differing[:5])}"
                f"{f'; and {len(differing) - 5} more' if len(differing) > 5 else ''}; "
                "name another folder, or overwrite it (--overwrite)"
            )

    @property
    def done(self) -> int:
        """How many queries are scored."""
        return len(self._tables)

    @property
    def scored(self) -> bool:
        """Whether every query has its scores, so that only results are to be written."""
        return not self._overwrite and len(self._tables) == len(self.pools) and self._loaded is not None

    @property
    def windows_done(self) -> int:
        """About how many windows the scored queries took."""
        return sum(windows_of(pool, self.scoring) for pool in self.pools if pool.query_id in self._tables)

    @property
    def windows_total(self) -> int:
        """About how many windows the whole job takes; fewer where presentations settle early."""
        return sum(windows_of(pool, self.scoring) for pool in self.pools)

    # -- one process at a time --------------------------------------------------------------------------------

    def _hold(self) -> None:
        """Keep other processes out of the folder until results are written; the system frees it when a process dies."""
        if self._lock is None:
            busy = f"another process is working in {self.folder}; wait for it, or name another folder"
            self._lock = hold_folder(self.folder, busy=busy)

    def _let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _start(self) -> bool:
        """Hold the folder, clear what a killed process left half written, and look again; whether all is done."""
        self._hold()
        if self._overwrite:
            self._clear()
            self._overwrite = False
        killed = [path for name in _OURS for path in self.folder.glob(f".{name}.*")]
        for half in (*killed, *(self.folder / _SHARDS).glob(".*")):
            shutil.rmtree(half) if half.is_dir() else half.unlink()
        self.finished = self._look()
        if not self.finished and not self._graded():
            shutil.rmtree(self.folder / _SHARDS, ignore_errors=True)
        return self.finished

    # -- scoring ----------------------------------------------------------------------------------------------

    def score(self, *, engine: Engine, prompt: Prompt, on_windows: OnWindows | None = None) -> None:
        """Score what no shard holds yet, in this process; see `score_shards`."""

        def each(shards: Sequence[Sequence[Pool]]) -> Iterator[ScoredShard]:
            self._read_by(loaded_as(engine, prompt))
            for pools in shards:
                seen = _Count(on_windows)
                yield self.scorer(engine, prompt)(pools, progress=seen)
                seen.up_to(sum(windows_of(pool, self.scoring) for pool in pools))

        self.score_shards(each)

    def scorer(self, engine: Engine, prompt: Prompt) -> ShardScorer:
        """What scores one shard of this job with an engine, here or in another process."""
        return ShardScorer(
            engine=engine,
            prompt=prompt,
            scoring=self.scoring,
            settle=self.settle,
            readout=self.readout,
            residual=self.residual,
        )

    def score_shards(self, each: Callable[[Sequence[Sequence[Pool]]], Iterable[ScoredShard]]) -> None:
        """Have `each` score what no shard holds yet, queries that failed before included.

        `each` is given the pools of every shard that is left and yields scored shards, in any order, from wherever they
        are scored; each is on disk before the next is asked for. All must be scored by the same engine and prompt as
        those there already. A query that cannot be scored is put into `failed` with the reason. Where the engine fails
        on a whole shard before it has scored anything at all, its error is raised. Another process in the same folder
        is a `BadArgument`; the folder is held until `write` is done.
        """
        try:
            if not self._start():
                todo = [pool for pool in self.pools if pool.query_id not in self._tables]
                shards = [todo[i : i + self.shard_size] for i in range(0, len(todo), self.shard_size)]
                first = max((int(there.name) for there in self._shards()), default=-1) + 1
                for number, shard in enumerate(each(shards), first):
                    self._keep(number, shard)
        except BaseException:
            self._let_go()
            raise

    def _read_by(self, loaded: Mapping[str, Any]) -> None:
        """Record what scores are read by, or refuse it where another engine or prompt has begun."""
        record = self.folder / _SHARDS / "settings.json"
        if record.exists():
            self._same(_record(record).get("loaded"), loaded)
        else:
            write_json(record, {"settings": self.settings, "loaded": loaded})
        self._loaded = _plain(loaded)

    def _keep(self, number: int, shard: ScoredShard) -> None:
        if shard.fault is not None and not self._graded() and not any(table.doc_ids for table in shard.tables):
            raise shard.fault
        self._read_by(shard.loaded)
        self._tables.update({table.query_id: table for table in shard.tables})
        for table in shard.tables:
            self.failed.pop(table.query_id, None)
        self.failed.update(shard.failed)
        write_scores(self.folder / _SHARDS / f"{number:06d}", shard.tables, run={"failed": shard.failed})

    # -- results ----------------------------------------------------------------------------------------------

    def write(self, *, record: Mapping[str, Any]) -> dict[str, Any]:
        """Write run.trec, results.jsonl, scores/ and, last, manifest.json; return the manifest.

        A candidate the model gave no grade is in results.jsonl with score null, after all others, and not in
        run.trec. Failed and empty queries are in results.jsonl without candidates. `record` goes into the manifest.
        """
        try:
            if not self.finished and (self._lock is not None or not self._start()):
                return self._write(record)
            return _record(self.folder / _MANIFEST)
        finally:
            self._let_go()

    def _write(self, record: Mapping[str, Any]) -> dict[str, Any]:
        if left := len({pool.query_id for pool in self.pools} - {*self._tables, *self.failed}):
            raise BadArgument(f"{left} of {len(self.pools)} queries are not scored yet; score them first")
        tables = [self._tables[pool.query_id] for pool in self.pools if pool.query_id in self._tables]
        if self.failed and not any(table.doc_ids for table in tables):
            first, reason = next(iter(self.failed.items()))
            raise EngineFailure(f"all {len(self.failed)} queries with candidates failed; first '{first}': {reason}")
        if self._kept:  # until all is written, the manifest says that results are to be written again
            write_json(self.folder / _MANIFEST, _record(self.folder / _MANIFEST) | {"shown": None})
        rankings = ((pool.query_id, self._ranking(pool)) for pool in self.pools)
        write_run(self.folder / _RUN, rankings, tag=self.tag)
        write_jsonl(self.folder / _RESULTS, (self._result(pool) for pool in self.pools))
        run = {
            **self.settings,
            **(self._loaded or {}),
            "pool_sha256": {pool.query_id: pool_sha256(pool) for pool in self.pools},
            "failed": self.failed,
        }
        if not self._kept:
            write_scores(self.folder / _SCORES, tables, run=run)
        report = {
            **record,
            "queries": len(self.pools),
            "candidates": sum(map(len, self.pools)),
            "empty_pools": [pool.query_id for pool in self.pools if not len(pool)],
            "failed": self.failed,
            "without_grade": sum(int(np.isnan(table.mean()).sum()) for table in tables),
            "grades_missing": sum(int(table.fallback.sum()) for table in tables),
            "documents_cut": sum(int((table.cut > 0).sum()) for table in tables),
            "presentations": sum(table.presentations for table in tables),
            "settings": self.settings,
            "loaded": self._loaded,
            "shown": self.shown,
        }
        whole = manifest(report, files={name: self.folder / name for name in _HASHED}, libraries=SCORED_WITH)
        write_json(self.folder / _MANIFEST, whole)
        if not self.failed:
            shutil.rmtree(self.folder / _SHARDS, ignore_errors=True)
        return whole

    def _ranking(self, pool: Pool) -> list[tuple[str, float]]:
        found = self._result(pool)["candidates"]
        return [(c["docid"], c["score"]) for c in found if c["score"] is not None]

    def _result(self, pool: Pool) -> dict[str, Any]:
        query = {"qid": pool.query_id, "text": pool.query}
        table = self._tables.get(pool.query_id)
        if table is None:
            return {"query": query, "error": self.failed[pool.query_id], "candidates": []}
        mean = table.mean(self.readout, residual=self.residual)
        spread = table.spread(self.readout, residual=self.residual)
        grades = table.mean_probabilities()
        kept = None if self.threshold is None else self.threshold.retain(mean)
        order = table.ranking(self.readout, residual=self.residual)[: self.top_k]
        return {
            "query": query,
            "presentations": table.presentations,
            "candidates": [
                {
                    "docid": pool.candidates[i].doc_id,
                    "rank": rank,
                    "score": _number(mean[i]),
                    "spread": _number(spread[i]),
                    "grade_probabilities": None if np.isnan(mean[i]) else grades[i].tolist(),
                    "first_stage": {"rank": i + 1, "score": pool.candidates[i].score},
                    "cut": int(table.cut[i]),
                }
                | ({} if kept is None else {"retained": bool(kept[i])})
                for rank, i in enumerate(order.tolist(), 1)
            ],
        }


def loaded_as(engine: Engine, prompt: Prompt) -> dict[str, Any]:
    """What scores are read by, as plain values: they do not mix with those of another engine or prompt."""
    loaded: dict[str, Any] = _plain({"engine": engine.describe(), "prompt": prompt.describe()})
    return loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredShard:
    """The score tables of one shard, the reason of each query that has none, and what they were read by.

    `fault` is the engine's failure on all queries together, after which they were tried one by one.
    """

    tables: list[ScoreTable]
    failed: dict[str, str]
    loaded: Mapping[str, Any]
    fault: EngineFailure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardScorer:
    """Scores the pools of one shard in one engine call; where that fails, query by query."""

    engine: Engine
    prompt: Prompt
    scoring: Scoring
    settle: Settle | None = None
    readout: Readout = "expected"
    residual: SlotResidual | None = None

    def __call__(self, pools: Sequence[Pool], *, progress: Callable[[int], None] | None = None) -> ScoredShard:
        """Score `pools`; what one query's text or the engine can raise is a failed query, not an error."""
        loaded = loaded_as(self.engine, self.prompt)
        try:
            return ScoredShard(tables=self._ask(pools, progress), failed={}, loaded=loaded)
        except _QUERY_FAULTS as error:
            first = error
        tables: list[ScoreTable] = []
        failed: dict[str, str] = {}
        for pool in pools:
            try:
                tables += self._ask([pool], progress)
            except _QUERY_FAULTS as error:
                logger.warning("query '%s' failed: %s", pool.query_id, error)
                failed[pool.query_id] = str(error)
        fault = first if isinstance(first, EngineFailure) else None
        return ScoredShard(tables=tables, failed=failed, loaded=loaded, fault=fault)

    def _ask(self, pools: Sequence[Pool], progress: Callable[[int], None] | None) -> list[ScoreTable]:
        return score_pools(
            pools,
            engine=self.engine,
            prompt=self.prompt,
            scoring=self.scoring,
            settle=self.settle,
            readout=self.readout,
            residual=self.residual,
            progress=progress,
        )


class _Count:
    """Passes windows on as they are read, and makes up the difference to what was expected at a shard's end."""

    def __init__(self, on_windows: OnWindows | None) -> None:
        self._on_windows = on_windows
        self._seen = 0

    def __call__(self, n: int) -> None:
        self._seen += n
        if self._on_windows is not None:
            self._on_windows(n)

    def up_to(self, expected: int) -> None:
        self(expected - self._seen)


def windows_of(pool: Pool, scoring: Scoring) -> int:
    """How many windows a pool takes if nothing is blank, too long or settled early; equal windows count once."""
    n, width = len(pool), scoring.window
    count = windows.hashed_count(n, width=width) if scoring.partition == "hashed" else -(-n // width)
    return count * (1 if width == 1 else scoring.presentations)


class _Counting:
    """An engine that reads nothing and counts what it is asked to read."""

    name = "counting"

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.prompts = 0
        self.tokens = 0
        self.longest = 0

    def grade_logits(self, prompts: Sequence[Any], grade_ids: Sequence[int], *, progress: Any = None) -> list[Any]:
        self.prompts += len(prompts)
        lengths = [len(prompt.token_ids) for prompt in prompts]
        self.tokens += sum(lengths)
        self.longest = max([self.longest, *lengths])
        shapes = [(len(prompt.slots), len(grade_ids)) for prompt in prompts]
        return [np.arange(n * g, dtype=np.float32).reshape(n, g) for n, g in shapes]

    def describe(self) -> dict[str, Any]:
        return {"engine": self.name}


def count_tokens(
    pools: Sequence[Pool], *, tokenizer: Any, prompt: Prompt, scoring: Scoring, max_length: int, sample: int = 50
) -> dict[str, Any]:
    """What scoring would ask of a model: prompts, tokens and the longest prompt, rendered but not run.

    Exact where there are at most `sample` pools with candidates; otherwise as many, evenly spread, are rendered and
    scaled up by windows. A pool that cannot be rendered is warned of and counted like the others.
    """
    full = [pool for pool in pools if len(pool)]
    chosen = full[:: max(1, -(-len(full) // sample))]
    engine = _Counting(tokenizer, max_length)
    rendered: list[Pool] = []
    for pool in chosen:
        try:
            score_pools([pool], engine=engine, prompt=prompt, scoring=scoring)
        except _QUERY_FAULTS as error:
            logger.warning("query '%s' will fail: %s", pool.query_id, error)
        else:
            rendered.append(pool)
    most, part = (sum(windows_of(pool, scoring) for pool in some) for some in (full, rendered))
    scale = most / part if part else 1.0
    return {
        "prompts": round(engine.prompts * scale),
        "tokens": round(engine.tokens * scale),
        "longest_prompt": engine.longest,
        "rendered_queries": len(rendered),
    }


def _record(path: Path) -> dict[str, Any]:
    found = read_json(path)
    if not isinstance(found, dict):
        raise InvalidData(f"{path} is not a job's record; overwrite the job or name another folder")
    return found


def _differences(there: Any, here: Any, name: str = "") -> Iterator[str]:
    """Name every setting whose values differ, as `name: there -> here`."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in sorted({*there, *here}):
            yield from _differences(there.get(key), here.get(key), f"{name}.{key}" if name else key)
    elif there != here:
        yield f"{name} is {_short(there)} there, {_short(here)} here"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:36]}…"


def _plain(value: Any) -> Any:
    """`value` as JSON gives it back, so that settings compare equal to those read from a file."""
    return json.loads(json.dumps(value, default=str, ensure_ascii=False))


def _number(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)
