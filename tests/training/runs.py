"""A tiny random model on disk, pools with labels, and training runs on them: seconds each."""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
from collections.abc import Iterator, Sequence
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


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ocsft_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


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
        from pd_rerank.cli import program

        with pytest.raises(SystemExit) as ended:
            program(self.script.ocsft, ["--config", str(self.config(**changes)), *words])
        return int(ended.value.code or 0)

    def lines(self, run: str = "run") -> list[dict[str, Any]]:
        """The steps' lines, without what depends on the clock."""
        text = (self.place / run / "steps.jsonl").read_text(encoding="utf-8")
        found = [json.loads(line) for line in text.splitlines()]
        return [{name: value for name, value in line.items() if name != "seconds"} for line in found]


@pytest.fixture
def bench(tmp_path: Path, script: ModuleType, model_folder: Path) -> Iterator[Bench]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield Bench(tmp_path, script, model_folder)
    for number, handler in before.items():
        signal.signal(number, handler)
