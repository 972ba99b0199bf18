"""A tiny random model on disk, pools with labels, and training runs on them: seconds each."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from pd_rerank.pool import Candidate, Pool, write_pools
from pd_rerank.training.labels import labels_of_qrels, write_labels
from tests.engines.tiny import tiny
from tests.tokenizers_for_tests import byte_level

SCRIPT = Path(__file__).parents[2] / "train" / "ocsft.py"
CONFIGS = SCRIPT.parent / "configs"

RACK = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch", "accelerate", "peft", "transformers.modeling_utils", "tests.training.runs"])
"""Processes of their own that import once, together."""

WORDS = ("tide", "moon", "bread", "salt", "chain", "oil", "rain", "flour", "sea", "day")


def pools_of(queries: int, n: int = 5, *, first: int = 0) -> list[Pool]:
    """Pools whose documents hold the query's word 0 to 3 times."""
    made = []
    for q in range(first, first + queries):
        word, other = WORDS[q % len(WORDS)], WORDS[(q + 3) % len(WORDS)]
        found = [
            Candidate(doc_id=f"d{q}-{i}", text=" ".join([word] * (i % 4) + [other] * (4 - i % 4))) for i in range(n)
        ]
        made.append(Pool(query_id=f"q{q}", query=f"which {word}?", candidates=tuple(found)))
    return made


def qrels_of(pools: Sequence[Pool]) -> dict[str, dict[str, int]]:
    return {p.query_id: {d: int(d.rpartition("-")[2]) % 4 for d in p.doc_ids} for p in pools}


def write_qrels(path: Path, pools: Sequence[Pool]) -> Path:
    lines = [f"{q} 0 {d} {g}\n" for q, judged in qrels_of(pools).items() for d, g in judged.items()]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def write_model(folder: Path) -> Path:
    tokenizer = byte_level()
    model = tiny("Llama", vocab_size=len(tokenizer), max_position_embeddings=2048, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def loaded(path: Path) -> ModuleType:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(f"{path.stem}_script", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def script() -> ModuleType:
    return loaded(SCRIPT)


class Bench:
    """A folder with model, pools and labels, and a way to train on them."""

    def __init__(self, place: Path, script: ModuleType, model: Path, pools: Sequence[Pool] | None = None) -> None:
        self.place, self.script = place, script
        pools = pools_of(6) if pools is None else pools
        write_pools(place / "pools", pools)
        write_labels(place / "labels", labels_of_qrels(qrels_of(pools), pools, experiment_id="test"))
        write_qrels(place / "qrels.txt", pools)
        held = pools_of(4, first=100)
        write_pools(place / "held", held)
        write_qrels(place / "held.txt", held)
        self.settings: dict[str, Any] = {
            "model": str(model),
            "pools": str(place / "pools"),
            "labels": str(place / "labels"),
            "output": str(place / "run"),
            "cpu": True,
            "dtype": "float32",
            "window_size": 3,
            "windows_per_step": 4,
            "max_steps": 6,
            "save_every": 3,
            "learning_rate": 1e-2,
            "lora_rank": 4,
            "lora_alpha": 8,
            "lora_dropout": 0.1,
            "ramp_steps": 3,
            "min_spread": 0.0,
        }

    def config(self, name: str = "train.yaml", **changes: Any) -> Path:
        path = self.place / name
        path.write_text(yaml.safe_dump({**self.settings, **changes}), encoding="utf-8")
        return path

    def __call__(self, *words: str, **changes: Any) -> int:
        """Train in this process; the exit code."""
        return self.program("--config", str(self.config(**changes)), *words)

    def program(self, *words: str) -> int:
        """The script in this process; the exit code."""
        from pd_rerank.cli import program

        with pytest.raises(SystemExit) as ended:
            program(self.script.ocsft, list(words))
        return int(ended.value.code or 0)

    def lines(self, run: str = "run") -> list[dict[str, Any]]:
        """The steps' lines, without what depends on the clock."""
        text = (self.place / run / "steps.jsonl").read_text(encoding="utf-8")
        found = [json.loads(line) for line in text.splitlines()]
        return [{name: value for name, value in line.items() if name != "seconds"} for line in found]

    def copied(self, run: Path) -> Path:
        """Train next in a copy of another run's folder."""
        self.settings["output"] = str(self.place / "again")
        return Path(shutil.copytree(run, self.place / "again"))


@contextmanager
def signals_kept() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def bench(tmp_path: Path, script: ModuleType, model_folder: Path) -> Iterator[Bench]:
    with signals_kept():
        yield Bench(tmp_path, script, model_folder)


def start(config: Path, *words: str, said: Path, env: Mapping[str, str] | None = None, die_at: str = "") -> BaseProcess:
    """Run the script in a process of its own, which says what it has to say in `said`.out and .err.

    With `die_at` it ends with 9, cleaning nothing up, before a file gets a name that ends so.
    """
    process = SERVER.Process(target=_run, args=(config, words, said, dict(env or {}), die_at), daemon=True)
    with pytest.MonkeyPatch.context() as patch:  # what the first one starts inherits it
        for name, value in RACK.items():
            patch.setenv(name, value)
        process.start()
    return process


def _run(config: Path, words: Sequence[str], said: Path, env: Mapping[str, str], die_at: str) -> None:
    os.environ.update(env)
    sys.stdout, sys.stderr = (open(said.with_suffix(end), "w", buffering=1) for end in (".out", ".err"))  # noqa: SIM115
    real = os.replace

    def replace(source: Any, target: Any, **how: Any) -> None:
        if str(target).endswith(die_at):
            os._exit(9)
        real(source, target, **how)

    if die_at:
        os.replace = replace
    sys.argv = [str(SCRIPT), "--config", str(config), *words]
    runpy.run_path(str(SCRIPT), run_name="__main__")
