"""Requests that arrive together are scored together: one engine call for the windows of many of them.

Windows keep their query to themselves; what requests share is the engine call. Scores are computed on one
thread, so that an engine is never asked twice at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pd_rerank.config import LimitSettings
from pd_rerank.engines.base import Engine, FloatArray, Progress, WindowPrompt
from pd_rerank.errors import EngineFailure, PdRerankError
from pd_rerank.job import windows_of
from pd_rerank.pool import Candidate, Pool
from pd_rerank.reranker import OCSFTBatchedReranker
from pd_rerank.scores import ScoreTable
from pd_rerank.scoring import Scoring, score_pools
from pd_rerank.serving.metrics import Metrics

logger = logging.getLogger("pd_rerank.serving")

_SICK = 3
"""Engine failures in a row after which the engine has to prove itself on a probe."""

_PROBE_SECONDS = 30.0


class QueueFull(Exception):
    """More windows wait than are taken on; `retry_after` is about how many seconds they take."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the queue is full; try again in {retry_after} s")
        self.retry_after = retry_after


class _Abandoned(Exception):
    """Nobody waits for this engine call any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One request's scores. `windows` it took, their `tokens` (None where that cannot be told), seconds `waited` and
    of the engine call; `together` is how many requests shared that call.
    """

    table: ScoreTable
    windows: int
    tokens: int | None
    waited: float
    computed: float
    together: int


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One request's pool in the queue; `gone` once nobody waits for it. `arrived` is of `time.monotonic`."""

    ranker: OCSFTBatchedReranker
    scoring: Scoring
    pool: Pool
    answer: asyncio.Future[Scored]
    windows: int
    arrived: float = field(default_factory=time.monotonic)
    gone: bool = False

    def alike(self, other: Job) -> bool:
        """Whether both can go into one `score_pools`."""
        return self.ranker is other.ranker and self.scoring == other.scoring


class Batcher:
    """A bounded queue of jobs and the thread that scores them, oldest first, with others alike.

    The oldest job is always taken; younger ones with the same model and scoring settings join it, up to
    `limits.batch_windows` windows. A job nobody waits for leaves the queue; an engine call all of whose jobs are gone
    is ended between two windows. Where an engine call fails, its jobs are tried one by one, so
    that one request's fault is its own.
    """

    def __init__(self, limits: LimitSettings, metrics: Metrics) -> None:
        self._limits = limits
        self._metrics = metrics
        self._queue: list[Job] = []
        self._running: list[Job] = []
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pd_rerank-scoring")
        self._task: asyncio.Task[None] | None = None
        self._rate: float | None = None
        self._failures = 0
        self._last_failed: OCSFTBatchedReranker | None = None
        self._probe: asyncio.Task[bool] | None = None

    def start(self) -> None:
        """Start scoring, in the running event loop."""
        self._task = asyncio.create_task(self._work())

    async def close(self) -> None:
        """Stop; what still waits is cancelled, what is being scored is finished or, if nobody waits, ended."""
        for job in (*self._queue, *self._running):
            self.discard(job)
        if self._task is not None:
            self._task.cancel()
        await asyncio.to_thread(self._thread.shutdown)

    @property
    def queued(self) -> int:
        """Windows that wait."""
        return sum(job.windows for job in self._queue)

    @property
    def busy(self) -> int:
        """Requests that wait or are being scored."""
        return len(self._queue) + len(self._running)

    def submit(self, ranker: OCSFTBatchedReranker, scoring: Scoring, pool: Pool) -> Job:
        """Queue a pool; `QueueFull` if its windows are too many on top of those that wait."""
        windows = windows_of(pool, scoring)
        if self._queue and self.queued + windows > self._limits.max_queue:
            raise QueueFull(self.retry_after())
        return self._put(ranker, scoring, pool, windows=windows)

    def _put(self, ranker: OCSFTBatchedReranker, scoring: Scoring, pool: Pool, *, windows: int) -> Job:
        answer: asyncio.Future[Scored] = asyncio.get_running_loop().create_future()
        job = Job(ranker=ranker, scoring=scoring, pool=pool, answer=answer, windows=windows)
        self._queue.append(job)
        self._arrived.set()
        return job

    def discard(self, job: Job) -> None:
        """Nobody waits for this job: it leaves the queue, and an engine call for it alone is ended."""
        job.gone = True
        if not job.answer.cancel() and not job.answer.cancelled():
            job.answer.exception()  # seen here, or asyncio reports that nobody looked at it
        if job in self._queue:
            self._queue.remove(job)

    def retry_after(self) -> int:
        """About how many seconds until what waits now is scored, at the rate of late; from 1 to 60."""
        ahead = self.queued + sum(job.windows for job in self._running)
        return min(60, max(1, math.ceil(ahead / self._rate))) if self._rate else 1

    async def works(self) -> bool:
        """Whether scores can be expected: after failures in a row, whether a probe can be scored."""
        if self._task is None or self._task.done():
            return False
        if self._failures < _SICK:
            return True
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._try())
        return await asyncio.shield(self._probe)

    async def _try(self) -> bool:
        assert self._last_failed is not None
        pool = Pool(query_id="probe", query="probe", candidates=(Candidate(doc_id="1", text="probe"),))
        job = self._put(self._last_failed, self._last_failed.scoring, pool, windows=1)
        try:
            await asyncio.wait_for(asyncio.shield(job.answer), _PROBE_SECONDS)
        except (Exception, asyncio.CancelledError):
            self.discard(job)
            return False
        return True

    # -- scoring ----------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            await self._wait_for_company()
            batch = self._take()
            if not batch:
                continue
            self._running = batch
            start = time.monotonic()
            outcomes = await loop.run_in_executor(self._thread, self._score, batch)
            self._running = []
            self._pace(sum(job.windows for job in batch), time.monotonic() - start)
            for job, outcome in zip(batch, outcomes, strict=True):
                self._deliver(job, outcome)

    async def _wait_for_company(self) -> None:
        if self._queue and self.queued < self._limits.batch_windows:
            waited = time.monotonic() - self._queue[0].arrived
            if waited < self._limits.batch_wait:
                await asyncio.sleep(self._limits.batch_wait - waited)

    def _take(self) -> list[Job]:
        """The oldest job and those alike that fit beside it."""
        batch: list[Job] = []
        room = self._limits.batch_windows
        for job in self._queue:
            if not batch or (room >= job.windows and job.alike(batch[0])):
                batch.append(job)
                room -= job.windows
        taken = set(map(id, batch))
        self._queue = [job for job in self._queue if id(job) not in taken]
        if not self._queue:
            self._arrived.clear()
        return batch

    def _pace(self, windows: int, seconds: float) -> None:
        rate = windows / max(seconds, 1e-6)
        self._rate = rate if self._rate is None else 0.8 * self._rate + 0.2 * rate

    def _deliver(self, job: Job, outcome: Scored | Exception | None) -> None:
        if isinstance(outcome, Scored):
            self._failures = 0
        elif outcome is not None and (isinstance(outcome, EngineFailure) or not isinstance(outcome, PdRerankError)):
            self._failures += 1
            self._last_failed = job.ranker
        if job.answer.done():
            return
        if isinstance(outcome, Scored):
            job.answer.set_result(outcome)
        elif outcome is not None:
            job.answer.set_exception(outcome)
        else:
            job.answer.cancel()

    def _score(self, batch: Sequence[Job]) -> list[Scored | Exception | None]:
        """On the thread: what came of each job; None where nobody waits."""
        if all(job.gone for job in batch):
            return [None] * len(batch)

        def progress(_: int) -> None:
            if all(job.gone for job in batch):
                raise _Abandoned

        first, start = batch[0], time.monotonic()
        engine = _Counted(first.ranker.engine)
        try:
            tables = score_pools(
                [job.pool for job in batch],
                engine=engine,
                prompt=first.ranker.prompt,
                scoring=first.scoring,
                readout=first.ranker.readout,
                residual=first.ranker.residual,
                progress=progress,
            )
        except _Abandoned:
            return [None] * len(batch)
        except Exception as error:
            if len(batch) == 1:
                if isinstance(error, EngineFailure) or not isinstance(error, PdRerankError):
                    self._metrics.failures.inc()
                return [error]
            return [outcome for job in batch for outcome in self._score([job])]
        seconds = time.monotonic() - start
        self._metrics.computed.observe(seconds)
        self._metrics.together.observe(len(batch))
        windows = [windows_read(table, probes=first.scoring.calibration == "capcal") for table in tables]
        ends = np.cumsum(windows).tolist()
        known = ends[-1] == len(engine.lengths)
        return [
            Scored(
                table=table,
                windows=n,
                tokens=sum(engine.lengths[end - n : end]) if known else None,
                waited=start - job.arrived,
                computed=seconds,
                together=len(batch),
            )
            for job, table, n, end in zip(batch, tables, windows, ends, strict=True)
        ]


class _Counted:
    """An engine that notes how long the prompts are."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.name = engine.name
        self.tokenizer = engine.tokenizer
        self.max_length = engine.max_length
        self.lengths: list[int] = []

    def grade_logits(
        self, prompts: Sequence[WindowPrompt], grade_ids: Sequence[int], *, progress: Progress | None = None
    ) -> list[FloatArray]:
        self.lengths += [len(prompt.token_ids) for prompt in prompts]
        return self._engine.grade_logits(prompts, grade_ids, progress=progress)

    def describe(self) -> dict[str, Any]:
        return self._engine.describe()


def windows_read(table: ScoreTable, *, probes: bool) -> int:
    """How many prompts a table was read from; windows that come out the same are read once.

    With `probes` a prompt of empty documents for every width of window counts too.
    """
    seen: set[bytes] = set()
    widths: set[int] = set()
    for window, slot in zip(table.window, table.slot, strict=True):
        order = np.lexsort((slot, window))
        order = order[window[order] >= 0]
        for positions in np.split(order, np.flatnonzero(np.diff(window[order])) + 1):
            if len(positions):
                seen.add(positions.tobytes())
                widths.add(len(positions))
    return len(seen) + (len(widths) if probes else 0)
