"""Rerank many pools into a folder, shard by shard, so that an interrupted job goes on where it stopped.

A shard is the score tables of a few queries, on disk whole or not at all. Once all are there the folder's files are
written from them: what they hold depends on pools and settings alone, never on how often the job was interrupted.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pd_rerank import windows
from pd_rerank.decisions import Settle, Threshold
from pd_rerank.engines.base import Engine
from pd_rerank.errors import BadArgument, EngineFailure, InvalidData, ModelMismatch
from pd_rerank.files import (
    manifest,
    read_json,
    run_word,
    sha256_file,
    write_json,
    write_jsonl,
    write_run,
)
from pd_rerank.pool import Pool, pool_sha256, pools_sha256
from pd_rerank.prompt import GradePrompt
from pd_rerank.scores import Readout, ScoreTable, SlotResidual, read_scores, write_scores
from pd_rerank.scoring import Scoring, score_pools

logger = logging.getLogger("pd_rerank")

_RUN, _RESULTS, _SCORES, _MANIFEST, _SHARDS = "run.trec", "results.jsonl", "scores", "manifest.json", "shards"
_OURS = (_RUN, _RESULTS, _SCORES, _MANIFEST, _SHARDS)
_HASHED = (_RUN, _RESULTS, f"{_SCORES}/scores.npz", f"{_SCORES}/run.json")

_QUERY_FAULTS = (InvalidData, ModelMismatch, EngineFailure)
"""What one query's text or the engine's trouble with it can raise; other queries may still be scored."""

OnWindows = Callable[[int], None]


class RerankJob:
    """One set of pools, one way of scoring and one folder for the results.

    `settings` is what results depend on, as plain values; the pools' hash is added. A folder that holds a job with
    other settings is refused, with the settings that differ, unless `overwrite` clears our files from it.
    Ids that a run file cannot hold are refused here, before anything is scored.
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
        overwrite: bool = False,
    ) -> None:
        for pool in pools:
            run_word(pool.query_id, what="query id")
            for doc_id in pool.doc_ids:
                run_word(doc_id, what=f"query '{pool.query_id}': document id")
        self.pools = pools
        self.folder = Path(folder)
        self.scoring = scoring
        self.readout = readout
        self.residual = residual
        self.threshold = threshold
        self.settle = settle
        self.settings = _plain({**settings, "shard_size": shard_size, "pools_sha256": pools_sha256(pools)})
        self.failed: dict[str, str] = {}
        self._shards = [pools[i : i + shard_size] for i in range(0, len(pools), shard_size)]
        self._tables: dict[str, ScoreTable] = {}
        if overwrite:
            self._clear()
        self.finished = self._look()

    # -- what is there already --------------------------------------------------------------------------------

    def _clear(self) -> None:
        for name in _OURS:
            path = self.folder / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _look(self) -> bool:
        """Compare with the job the folder holds, if any; take over its shards; say whether it is finished."""
        if self.folder.exists() and not self.folder.is_dir():
            raise BadArgument(f"{self.folder} is a file; name a folder for the results")
        if (self.folder / _MANIFEST).exists():
            record = read_json(self.folder / _MANIFEST)
            self._same(record.get("settings"), self.settings)
            if not record.get("failed"):
                return self._unchanged(record)
        elif not (self.folder / _SHARDS / "settings.json").exists():
            mine = [name for name in _OURS if (self.folder / name).exists() and name != _SHARDS]
            if mine:
                raise BadArgument(f"{self.folder} holds a {mine[0]} of something else; name another folder")
            return False
        else:
            self._same(read_json(self.folder / _SHARDS / "settings.json").get("settings"), self.settings)
        killed = [path for name in _OURS for path in self.folder.glob(f".{name}.*")]
        for half in (*killed, *(self.folder / _SHARDS).glob(".*")):
            shutil.rmtree(half) if half.is_dir() else half.unlink()
        for i in range(len(self._shards)):
            self._take_over(self._shard(i))
        return False

    def _take_over(self, shard: Path) -> None:
        if not shard.is_dir():
            return
        try:
            tables, run = read_scores(shard)
        except InvalidData as error:
            logger.warning("%s; its queries are scored again", error)
            shutil.rmtree(shard)
            return
        self._tables.update({table.query_id: table for table in tables})
        self.failed.update(run["failed"])

    def _unchanged(self, record: Mapping[str, Any]) -> bool:
        for name, want in record["sha256"].items():
            path = self.folder / name
            if not path.is_file() or sha256_file(path) != want:
                raise InvalidData(f"{path} is not what {_MANIFEST} records; overwrite the job or name another folder")
        shutil.rmtree(self.folder / _SHARDS, ignore_errors=True)
        return True

    def _same(self, there: Any, here: Mapping[str, Any]) -> None:
        differing = list(_differences(there, here))
        if differing:
            raise BadArgument(
                f"{self.folder} holds a job with other settings: {'; '.join(differing[:5])}"
                f"{f'; and {len(differing) - 5} more' if len(differing) > 5 else ''}; "
                "name another folder, or overwrite it (--overwrite)"
            )

    def _shard(self, i: int) -> Path:
        return self.folder / _SHARDS / f"{i:06d}"

    @property
    def done(self) -> int:
        """How many queries are scored."""
        return len(self._tables)

    @property
    def windows_done(self) -> int:
        """About how many windows the scored queries took."""
        return sum(windows_of(pool, self.scoring) for pool in self.pools if pool.query_id in self._tables)

    @property
    def windows_total(self) -> int:
        """About how many windows the whole job takes; fewer where presentations settle early."""
        return sum(windows_of(pool, self.scoring) for pool in self.pools)

    # -- scoring ----------------------------------------------------------------------------------------------

    def score(self, *, engine: Engine, prompt: GradePrompt, on_windows: OnWindows | None = None) -> None:
        """Score what no shard holds yet, queries that failed before included; each shard is on disk before the next.

        A query that cannot be scored is put into `failed` with the reason. Where the engine fails on a whole shard
        before it has scored anything at all, its error is raised.
        """
        loaded = _plain({"engine": engine.describe(), "prompt": prompt.describe()})
        record = self.folder / _SHARDS / "settings.json"
        if record.exists():
            self._same(read_json(record).get("loaded"), loaded)
        else:
            write_json(record, {"settings": self.settings, "loaded": loaded})
        for i, pools in enumerate(self._shards):
            todo = [pool for pool in pools if pool.query_id not in self._tables]
            if not todo:
                continue
            seen = _Count(on_windows)
            tables, failed = self._score(todo, engine=engine, prompt=prompt, seen=seen)
            self._tables.update({table.query_id: table for table in tables})
            for pool in todo:
                self.failed.pop(pool.query_id, None)
            self.failed.update(failed)
            ours = [self._tables[pool.query_id] for pool in pools if pool.query_id in self._tables]
            write_scores(self._shard(i), ours, run={"failed": failed})
            seen.up_to(sum(windows_of(pool, self.scoring) for pool in todo))

    def _score(
        self, pools: Sequence[Pool], *, engine: Engine, prompt: GradePrompt, seen: _Count
    ) -> tuple[list[ScoreTable], dict[str, str]]:
        def ask(some: Sequence[Pool]) -> list[ScoreTable]:
            return score_pools(
                some,
                engine=engine,
                prompt=prompt,
                scoring=self.scoring,
                settle=self.settle,
                readout=self.readout,
                residual=self.residual,
                progress=seen,
            )

        try:
            return ask(pools), {}
        except _QUERY_FAULTS as error:
            first = error
        tables: list[ScoreTable] = []
        failed: dict[str, str] = {}
        for pool in pools:
            try:
                tables += ask([pool])
            except _QUERY_FAULTS as error:
                logger.warning("query '%s' failed: %s", pool.query_id, error)
                failed[pool.query_id] = str(error)
        graded = any(table.doc_ids for table in (*tables, *self._tables.values()))
        if not graded and isinstance(first, EngineFailure):
            raise first
        return tables, failed

    # -- results ----------------------------------------------------------------------------------------------

    def write(self, *, tag: str = "pd_rerank", top_k: int | None = None, record: Mapping[str, Any]) -> dict[str, Any]:
        """Write run.trec, results.jsonl, scores/ and, last, manifest.json; return the manifest.

        A candidate the model gave no grade is in results.jsonl with score null, after all others, and not in
        run.trec. Failed and empty queries are in results.jsonl without candidates. `record` goes into the manifest.
        """
        loaded = read_json(self.folder / _SHARDS / "settings.json")["loaded"]
        tables = [self._tables[pool.query_id] for pool in self.pools if pool.query_id in self._tables]
        if self.failed and not any(table.doc_ids for table in tables):
            first, reason = next(iter(self.failed.items()))
            raise EngineFailure(f"all {len(self.failed)} queries with candidates failed; first '{first}': {reason}")
        rankings = ((pool.query_id, self._ranking(pool, top_k)) for pool in self.pools)
        write_run(self.folder / _RUN, rankings, tag=tag)
        write_jsonl(self.folder / _RESULTS, (self._result(pool, top_k) for pool in self.pools))
        run = {
            **self.settings,
            **loaded,
            "pool_sha256": {pool.query_id: pool_sha256(pool) for pool in self.pools},
            "failed": self.failed,
        }
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
            "loaded": loaded,
        }
        whole = manifest(report, files={name: self.folder / name for name in _HASHED}, libraries=_LIBRARIES)
        write_json(self.folder / _MANIFEST, whole)
        if not self.failed:
            shutil.rmtree(self.folder / _SHARDS)
        return whole

    def _ranking(self, pool: Pool, top_k: int | None) -> list[tuple[str, float]]:
        found = self._result(pool, top_k)["candidates"]
        return [(c["docid"], c["score"]) for c in found if c["score"] is not None]

    def _result(self, pool: Pool, top_k: int | None) -> dict[str, Any]:
        query = {"qid": pool.query_id, "text": pool.query}
        table = self._tables.get(pool.query_id)
        if table is None:
            return {"query": query, "error": self.failed[pool.query_id], "candidates": []}
        mean = table.mean(self.readout, residual=self.residual)
        spread = table.spread(self.readout, residual=self.residual)
        grades = table.mean_probabilities()
        kept = None if self.threshold is None else self.threshold.retain(mean)
        order = table.ranking(self.readout, residual=self.residual)[:top_k]
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


_LIBRARIES = ("numpy", "torch", "transformers", "tokenizers", "peft", "rerankers")


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
    keys = [c.doc_id for c in pool.candidates]
    cut = windows.partition(windows.identity(len(pool)), width=scoring.window, method=scoring.partition, keys=keys)
    return len(cut) * (1 if scoring.window == 1 else scoring.presentations)


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
    pools: Sequence[Pool], *, tokenizer: Any, prompt: GradePrompt, scoring: Scoring, max_length: int, sample: int = 50
) -> dict[str, Any]:
    """What scoring would ask of a model: prompts, tokens and the longest prompt, rendered but not run.

    Exact where there are at most `sample` pools with candidates; otherwise as many, evenly spread, are rendered and
    scaled up by windows.
    """
    full = [pool for pool in pools if len(pool)]
    chosen = full[:: max(1, -(-len(full) // sample))]
    engine = _Counting(tokenizer, max_length)
    score_pools(chosen, engine=engine, prompt=prompt, scoring=scoring)
    whole, part = (sum(windows_of(pool, scoring) for pool in some) for some in (full, chosen))
    scale = whole / part if part else 1.0
    return {
        "prompts": round(engine.prompts * scale),
        "tokens": round(engine.tokens * scale),
        "longest_prompt": engine.longest,
        "rendered_queries": len(chosen),
    }


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
