"""`pipelines/throughput.py`: every arm is measured on new queries, and what there is no time for is named."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.engines.test_server import write_model

SCRIPT = Path(__file__).parents[1] / "pipelines" / "throughput.py"


@pytest.fixture
def throughput(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("throughput_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(throughput: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script on a tiny model, the cross-encoder another."""
    model = write_model(tmp_path / "model")
    sizes = ("--documents", "5", "--words", "4", "--seconds", "0.01", "--most", "2", "--device", "cpu")

    def call(*words: str) -> Any:
        given = ("--model", model, "--cross-encoder", model, "--output", tmp_path / "out.json", *sizes, *words)
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, given)])
        assert throughput.main() == 0
        return json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))

    return call


def test_every_arm_has_a_rate_and_more_presentations_cost_more_tokens(run: Any, capsys: Any) -> None:
    found = run()
    assert list(found["arms"]) == ["cross-encoder", "B=20, K=1", "B=20, K=10", "B=1, K=1, start shared"]
    assert all(row["queries_per_s"] > 0 for row in found["arms"].values())
    per_query = {name: row["tokens"] / row["queries"] for name, row in found["arms"].items()}
    assert per_query["B=20, K=10"] == pytest.approx(10 * per_query["B=20, K=1"], rel=0.15)
    assert per_query["B=1, K=1, start shared"] > per_query["B=20, K=1"]
    assert found["cross_encoder"]["head"] == "random"
    assert capsys.readouterr().out.count("queries |") == 4


def test_what_there_is_no_time_for_is_left_out_and_named(run: Any) -> None:
    found = run("--minutes", "0")
    assert {row["left_out"] for row in found["arms"].values()} == {"no time"}


def test_a_call_is_sized_by_the_one_before_and_only_the_last_counts(throughput: ModuleType) -> None:
    asked: list[int] = []
    clock = [0.0]

    def run(n: int) -> int:
        asked.append(n)
        clock[0] += 1.0 if len(asked) == 1 else 0.1 * n + 0.4
        return 10 * n

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throughput.time, "monotonic", lambda: clock[0])
        found = throughput.measured(run, seconds=8.0, most=1000)
    assert asked == [1, 1, 16, 64]
    assert (found["queries"], found["queries_per_s"]) == (64, pytest.approx(64 / 6.8))


def test_no_query_comes_twice(throughput: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--documents", "5"])
    made = list(itertools.islice(throughput.pools(throughput.arguments()), 50))
    assert len({pool.query for pool in made}) == 50
    assert len({text for pool in made for text in pool.texts}) == 50 * 5
