"""Rerank pools on many workers of a Ray cluster: `pd-rerank rerank`, its shards scored by an actor pool of engines.

    python pipelines/rerank_ray.py --pools pools --model Qwen/Qwen3-4B --output runs/qwen --workers 4 --worker-gpus 1
    python pipelines/rerank_ray.py --config pipelines/configs/rerank_ray.yaml --address auto

Takes every option of `pd-rerank rerank` and writes the same files into the same kind of folder; scores are those of one
process, byte for byte where the engine's are (docs/determinism.md). Each worker loads the model once, as `rerank` does,
and is sent one shard at a time; the driver keeps pools and scores in memory and each finished shard on disk. A worker
that dies is started again and its shard scored again. After a killed driver the same command goes on, and so does
`pd-rerank rerank` with the same options. Needs the `ray` extra on every machine; models, adapters and thresholds
named by path must lie at that path on every machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from pydantic import Field, model_validator

from pd_rerank import BadArgument, EngineFailure, Pool
from pd_rerank._extras import need
from pd_rerank.cli import program
from pd_rerank.cli.flags import flags
from pd_rerank.cli.rerank import Setup, Work, progress_bar, run
from pd_rerank.config import RerankSettings, load
from pd_rerank.job import RerankJob, ScoredShard, ShardScorer, windows_of


def _option(default: Any, help: str, **limits: Any) -> Any:
    return Field(default, description=help, json_schema_extra={"panel": "Workers"}, **limits)


class RaySettings(RerankSettings):
    """What `pd-rerank rerank` can be told, and on how many workers it runs."""

    workers: int = _option(2, "Engines that score at the same time.", ge=1)
    worker_cpus: float = _option(1.0, "CPU cores of a worker; whole ones are also its threads.", gt=0)
    worker_gpus: float | None = _option(
        None,
        "GPUs of a worker, parts allowed. Left out: with vllm --tensor-parallel, else 1 where the cluster has any.",
        ge=0,
    )
    address: str | None = _option(
        None, "A running cluster: auto, or host:port. Left out: RAY_ADDRESS, or this machine alone."
    )

    @model_validator(mode="after")
    def _fits_workers(self) -> Self:
        if self.engine == "generated":
            raise ValueError("--engine generated computes nothing here and keeps one cache; use 'pd-rerank rerank'")
        if self.engine == "vllm" and self.worker_gpus is not None and self.worker_gpus < (self.tensor_parallel or 1):
            raise ValueError(
                f"--worker-gpus {self.worker_gpus:g} is too little for --tensor-parallel {self.tensor_parallel or 1}; "
                "leave it out"
            )
        return self


class Worker:
    """An actor: loads the engine with its first shard, then scores one shard after another."""

    def __init__(self, settings: dict[str, Any], folder: str) -> None:
        self._settings, self._folder = settings, folder
        self._score: ShardScorer | None = None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Score a row's pools. An error goes back as it is: Ray would wrap it and try again."""
        try:
            if self._score is None:
                self._score = self._load()
            return {"shard": self._score(row["pools"])}
        except Exception as error:
            return {"shard": error}

    def _load(self) -> ShardScorer:
        if Path(self._folder).is_dir():
            os.chdir(self._folder)  # paths are given as the driver sees them
        setup = Setup(load(RerankSettings, given=self._settings))
        engine, prompt = setup.open()
        return ShardScorer(
            engine=engine,
            prompt=prompt,
            scoring=setup.scoring,
            settle=setup.settle,
            readout=setup.settings.readout,
            residual=setup.residual,
        )


class ClusterWork(Work):
    """`rerank`'s work, with its shards scored by the workers of a Ray cluster."""

    settings: RaySettings

    def score(self, job: RerankJob, *, progress: bool | None, doing: str) -> None:
        """Score what is left of the job on as many workers as there are shards, at most --workers."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        need("ray", extra="ray", purpose="rerank_ray runs on Ray Data")
        import ray

        try:
            ray.init(
                address=self.settings.address, include_dashboard=False, log_to_driver=False, logging_level="WARNING"
            )
        except Exception as error:
            # Ray's helpers have seconds to come up; on a machine with other work they may not, and its error is bare.
            raise EngineFailure(
                f"Ray did not start, or no cluster answered ({' '.join(str(error).split())[:200]}); free processors "
                "here, or start a cluster and name it with --address"
            ) from error
        with redirect_stdout(sys.stderr):  # Ray's threads print what befalls its workers
            try:
                with progress_bar(job, shown=progress, doing=doing) as on_windows:
                    job.score_shards(partial(self._on_workers, job, on_windows))
            finally:
                ray.shutdown()

    def _on_workers(self, job: RerankJob, on_windows: Any, shards: Sequence[Sequence[Pool]]) -> Iterator[ScoredShard]:
        import ray
        from ray.exceptions import RayError

        if not shards:
            return
        windows = {pool.query_id: windows_of(pool, self.scoring) for pool in self.pools}
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        workers = min(self.settings.workers, len(shards))
        needed = {"CPU": self.settings.worker_cpus, "GPU": self._gpus(ray.cluster_resources())}
        self._room(workers, needed, ray.cluster_resources())
        names = RerankSettings.model_fields
        settings = self.settings.model_dump(mode="json", include=set(names), exclude_none=True)
        scored = ray.data.from_items([{"pools": list(pools)} for pools in shards], override_num_blocks=len(shards)).map(
            Worker,
            fn_constructor_args=(settings, os.getcwd()),
            compute=ray.data.ActorPoolStrategy(size=workers),
            num_cpus=needed["CPU"],
            num_gpus=needed["GPU"],
            max_task_retries=3,
        )
        try:
            for row in scored.iter_rows():
                shard = row["shard"]
                if isinstance(shard, Exception):
                    raise shard
                yield shard
                on_windows(sum(windows[query_id] for query_id in (*(t.query_id for t in shard.tables), *shard.failed)))
        except RayError as error:
            first = str(error).strip().splitlines()[0]
            raise EngineFailure(f"the cluster gave up on a shard ({first}); run the same command to go on") from error

    def _gpus(self, has: dict[str, float]) -> float:
        if self.settings.worker_gpus is not None:
            return self.settings.worker_gpus
        if self.settings.engine == "vllm":
            return float(self.settings.tensor_parallel or 1)
        return 1.0 if self.settings.engine == "hf" and self.settings.device != "cpu" and has.get("GPU") else 0.0

    def _room(self, workers: int, needed: dict[str, float], has: dict[str, float]) -> None:
        """Refuse on one machine what would wait for ever; a cluster may still grow."""
        if self.settings.address is not None or "RAY_ADDRESS" in os.environ:
            return
        for kind, each in needed.items():
            if workers * each > has.get(kind, 0.0):
                raise BadArgument(
                    f"{workers} workers of {each:g} {kind} each need more than the {has.get(kind, 0.0):g} of this "
                    f"machine; lower --workers or --worker-{kind.lower()}s"
                )


@flags(RaySettings)
def rerank_ray(
    config: Annotated[
        Path | None, typer.Option(help="YAML file with any of the options below as keys; what is typed wins.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Clear an earlier job's files from the folder.")
    ] = False,
    progress: Annotated[
        bool | None,
        typer.Option(help="Progress bar on stderr. Default: where stderr is a terminal.", show_default=False),
    ] = None,
    **given: Any,
) -> None:
    """Rerank pools or a run on the workers of a Ray cluster, with the options, files and exit codes of `rerank`."""
    work = ClusterWork(load(RaySettings, file=config, given=given))
    run(work, overwrite=overwrite, dry_run=False, validate_only=False, progress=progress)


if __name__ == "__main__":
    program(rerank_ray)
