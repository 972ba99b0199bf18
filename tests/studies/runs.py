"""What the tests of both studies share: to run a pipeline in a folder, to read its tables, to kill it and go on."""

from __future__ import annotations

import csv
import importlib.util
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import yaml

PIPELINES = Path(__file__).parents[2] / "pipelines"
CONFIGS = PIPELINES / "configs"


class Pipeline:
    """A study's script, run in this process."""

    def __init__(self, name: str) -> None:
        spec = importlib.util.spec_from_file_location(name, PIPELINES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        self.module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)

    def __call__(self, folder: Path, config: dict[str, Any] | Path, *words: str) -> int:
        """Run in `folder`; returns the exit code."""
        if isinstance(config, dict):
            (folder / "c.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
            config = folder / "c.yaml"
        here, argv = Path.cwd(), sys.argv
        os.chdir(folder)
        sys.argv = [self.module.__name__, "--config", str(config), *words]
        try:
            return int(self.module.main())
        finally:
            os.chdir(here)
            sys.argv = argv


def tables(run: Path) -> dict[str, bytes]:
    """The bytes of every table and figure of a run's report."""
    return {str(p.relative_to(run)): p.read_bytes() for kind in ("csv", "svg") for p in run.glob(f"report/*/*.{kind}")}


def rows(run: Path, name: str) -> list[dict[str, str]]:
    with (run / "report" / "tables" / f"{name}.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def killed_ten_times(execute: Pipeline, folder: Path, config: dict[str, Any], *, seed: int) -> None:
    """Kill a run at ten random moments of its length, one after the other: it then ends with the tables of a whole one.

    Its config says `output: run`.
    """
    whole, again, torn = (folder / name for name in ("whole", "again", "torn"))
    for place in (whole, again, torn):
        place.mkdir()
    assert execute(whole, config) == 0  # in this process, so that the children below need import nothing
    fork = multiprocessing.get_context("fork")

    def child(place: Path, limit: float | None) -> int | None:
        process = fork.Process(target=lambda: os._exit(execute(place, config)))
        process.start()
        process.join(limit)
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        return process.exitcode

    begun = time.monotonic()
    assert child(again, None) == 0
    took = time.monotonic() - begun
    assert tables(again / "run") == tables(whole / "run")
    rng = random.Random(seed)
    ends = [child(torn, rng.uniform(0.0, took)) for _ in range(10)]
    assert -signal.SIGKILL in ends
    assert child(torn, None) == 0
    assert tables(torn / "run") == tables(whole / "run")
    assert not list((torn / "run").rglob("*.part"))
