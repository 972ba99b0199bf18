"""pipelines/rerank_ray.py on a real Ray of two workers: the scores of one process, whatever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pd_rerank import read_pools, write_pools
from pd_rerank.config import RerankSettings
from tests.test_job import pool

if find_spec("ray") is None:
    pytest.skip("Ray is not installed (pip install 'pd-rerank[ray]')", allow_module_level=True)
if (os.cpu_count() or 1) < 2:
    pytest.skip("two workers need two processors", allow_module_level=True)

REPO = Path(__file__).resolve().parents[1]
SCRIPT = REPO / "pipelines/rerank_ray.py"
WAY = ["--engine", "fake", "--window-size", "4", "--presentations", "3", "--shard-size", "2"]

SLOW = '''
import os, pathlib, sys, time
from pd_rerank.engines import fake

class Slow(fake.FakeEngine):
    """Says which process it is in, and takes its time."""

    def grade_logits(self, prompts, grade_ids, *, progress=None):
        told = pathlib.Path(os.environ["PD_RERANK_TEST_PIDS"])
        (told / str(os.getpid())).touch()
        time.sleep(float(os.environ["PD_RERANK_TEST_DELAY"]))
        if (told / "die").exists():
            os._exit(1)
        return super().grade_logits(prompts, grade_ids, progress=progress)

fake.FakeEngine = Slow
'''
"""Loaded by every process of a run (sitecustomize), the workers' too."""


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("input") / "pools"
    sizes = [5, 0, 3, 12, 1, 7, 2, 9, 4, 6, 8, 5, 3, 10]
    write_pools(folder, [pool(f"q{i}-ü", n) for i, n in enumerate(sizes)])
    return folder


class Runs:
    """Starts the script and `pd-rerank rerank` with engines that take `delay` seconds a call."""

    def __init__(self, folder: Path, pools: Path) -> None:
        self.pools = pools
        self.pids = folder / "pids"
        self.pids.mkdir()
        (folder / "site").mkdir()
        (folder / "site/sitecustomize.py").write_text(SLOW)
        self.path = f"{folder / 'site'}{os.pathsep}{REPO}"
        self.started: list[subprocess.Popen[str]] = []

    def start(self, output: Path, *words: str, delay: float = 0.0, ray: bool = True) -> subprocess.Popen[str]:
        command = [str(SCRIPT), "--workers", "2"] if ray else ["-m", "pd_rerank", "rerank"]
        process = subprocess.Popen(
            [sys.executable, *command, "--pools", str(self.pools), "--output", str(output), *WAY, *words],
            cwd=REPO,
            env={
                **os.environ,
                "PYTHONPATH": self.path,
                "PD_RERANK_TEST_PIDS": str(self.pids),
                "PD_RERANK_TEST_DELAY": str(delay),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()

    def run(self, output: Path, *words: str, ray: bool = True, **more: Any) -> tuple[int, str, str]:
        process = self.start(output, *words, ray=ray, **more)
        out, err = process.communicate(timeout=900)
        return process.returncode, out, err

    def engines(self) -> set[int]:
        return {int(path.name) for path in self.pids.iterdir() if path.name.isdecimal()}


@pytest.fixture
def runs(tmp_path: Path, pools: Path) -> Iterator[Runs]:
    made = Runs(tmp_path, pools)
    yield made
    made.end()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, pools: Path) -> dict[str, bytes]:
    """The files one process writes."""
    folder = tmp_path_factory.mktemp("one")
    made = Runs(folder, pools)
    assert made.run(folder / "out", ray=False)[0] == 0
    assert len(made.engines()) == 1
    return contents(folder / "out")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


def until(true: Callable[[], bool], process: subprocess.Popen[str] | None = None, seconds: float = 600.0) -> None:
    """Wait until something is so; a process that ends before is the test's failure."""
    deadline = time.monotonic() + seconds
    while not true():
        if process is not None and process.poll() is not None:
            pytest.fail(f"it ended first, with {process.returncode}: {process.communicate()[1][-500:]}")
        assert time.monotonic() < deadline, "it did not become so in time"
        time.sleep(0.02)


def shards(folder: Path) -> int:
    return len([path for path in (folder / "shards").glob("*") if path.name.isdecimal()])


def test_two_workers_write_the_bytes_of_one_process(tmp_path: Path, runs: Runs, alone: dict[str, bytes]) -> None:
    code, out, err = runs.run(tmp_path / "two", delay=0.2)
    assert (code, out) == (0, ""), err
    assert len(runs.engines()) == 2
    assert contents(tmp_path / "two") == alone
    assert sorted(contents(tmp_path / "two")) == ["results.jsonl", "run.trec", "scores/run.json", "scores/scores.npz"]
    assert json.loads((tmp_path / "two/manifest.json").read_text())["queries"] == 14
    code, _, err = runs.run(tmp_path / "two")
    assert code == 0
    assert "finished already" in err


def test_a_killed_worker_costs_its_shard_and_nothing_else(tmp_path: Path, runs: Runs, alone: dict[str, bytes]) -> None:
    before = runs.engines()
    process = runs.start(tmp_path / "two", delay=1.0)
    until(lambda: shards(tmp_path / "two") >= 1, process)
    victim = min(runs.engines() - before)
    os.kill(victim, signal.SIGKILL)
    _, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    assert len(runs.engines() - before) >= 3  # two workers and the one in place of the killed
    assert contents(tmp_path / "two") == alone


def test_after_a_killed_driver_the_same_command_goes_on_and_so_does_one_process(
    tmp_path: Path, runs: Runs, alone: dict[str, bytes]
) -> None:
    for name, ray in (("two", True), ("three", False)):
        before = runs.engines()
        process = runs.start(tmp_path / name, delay=0.5)
        until(lambda name=name: shards(tmp_path / name) >= 2, process)  # type: ignore[misc]
        process.kill()
        process.communicate(timeout=60)
        workers = runs.engines() - before
        kept = shards(tmp_path / name)
        assert not (tmp_path / name / "manifest.json").exists()
        until(lambda workers=workers: not any(Path(f"/proc/{pid}").exists() for pid in workers))  # type: ignore[misc]
        code, _, err = runs.run(tmp_path / name, ray=ray)
        assert code == 0, err
        assert "going on after" in err
        assert json.loads((tmp_path / name / "manifest.json").read_text())["resumed_after"] >= kept
        assert contents(tmp_path / name) == alone


def test_a_shard_that_kills_every_worker_ends_the_job_with_what_is_kept(
    tmp_path: Path, runs: Runs, alone: dict[str, bytes]
) -> None:
    (runs.pids / "die").touch()
    code, _, err = runs.run(tmp_path / "two")
    assert code == 6, err
    assert "the cluster gave up on a shard" in err
    (runs.pids / "die").unlink()
    assert runs.run(tmp_path / "two")[0] == 0
    assert contents(tmp_path / "two") == alone


def test_errors_are_those_of_rerank_in_a_line(tmp_path: Path, runs: Runs) -> None:
    for words, code, told in (
        (["--engine", "hf", "--model", "no/such/folder/at/all"], 4, "no/such/folder/at/all"),
        (["--engine", "generated", "--model", "x", "--server", "http://127.0.0.1:9"], 2, "use 'pd-rerank rerank'"),
        (["--workers", "400"], 2, "lower --workers"),
        (["--engine", "vllm", "--tensor-parallel", "2", "--worker-gpus", "1"], 2, "--tensor-parallel 2"),
        (["--residual", "none.json"], 4, "no file or folder none.json"),
    ):
        found, out, err = runs.run(tmp_path / "x", *words)
        assert (found, out) == (code, ""), err
        assert told in err.splitlines()[-1]
        assert "Traceback" not in err


def test_the_settings_of_one_machine_are_all_there() -> None:
    words = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=True)
    for name in RerankSettings.model_fields:
        assert name.replace("_", "-")[:12] in words.stdout


def test_pools_survive_the_way_to_a_worker(pools: Path) -> None:
    import pickle

    read = read_pools(pools)
    assert pickle.loads(pickle.dumps(read)) == read
