"""`pipelines/benchmark.py`: nothing measured is lost, and memory is measured where it can grow."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[1] / "pipelines" / "benchmark.py"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def run(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> Any:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, words)])
    return benchmark.main()


def test_what_a_group_needs_is_asked_for_before_anything_is_measured(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "scipy" else real(name))
    monkeypatch.setattr(benchmark, "alternate", lambda *_, **__: pytest.fail("measured first"))
    assert run(benchmark, monkeypatch, "--only", "stability", "--output", tmp_path) == 3
    assert "pip install 'pd-rerank[eval]'" in capsys.readouterr().err


def test_what_was_measured_is_kept_when_a_later_group_fails(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(_: Any) -> Any:
        raise MemoryError

    ratios = (benchmark.Ratio("one / other", "one", "other", 1e9),)
    cases = {name: lambda: sum(range(100_000)) for name in ("one", "other")}
    fine = benchmark.Group(ratios=ratios, make=lambda _: cases, needs={})
    groups = {"bootstrap": fine, "fusion": benchmark.Group(ratios=(), make=broken, needs={})}
    monkeypatch.setattr(benchmark, "groups", lambda: groups)
    with pytest.raises(MemoryError):
        run(benchmark, monkeypatch, "--rounds", "2", "--output", tmp_path)
    written = json.loads((tmp_path / "benchmark.json").read_text())
    assert [r["name"] for r in written["ratios"]] == ["one / other"]
    assert len(written["cpu_seconds"]["one"]) == 2
    assert "| one / other |" in (tmp_path / "benchmark.md").read_text()


def test_a_peak_before_the_mark_does_not_hide_what_comes_after(benchmark: ModuleType) -> None:
    np.ones(20 << 20)  # 160 MiB, as loading would
    before = benchmark.peak_from_now()
    if before is None:
        pytest.skip("this system does not let a process set its peak back")
    np.ones(8 << 20)  # 64 MiB
    assert benchmark._status_mib("VmHWM") - before == pytest.approx(64, abs=16)


def test_the_memory_row_can_fail_and_growth_stands_beside_it(benchmark: ModuleType) -> None:
    few = {"cpu_s": 1.0, "loaded_mib": 500.0, "peak_mib": 510.0, "growth_mib": 10.0}
    many = {"cpu_s": 10.0, "loaded_mib": 500.0, "peak_mib": 1020.0, "growth_mib": 520.0}
    time, peak, growth = benchmark.scale_rows({"100": [few], "1000": [many]})
    assert (time["reached"], peak["reached"], growth["reached"]) == (True, False, None)
    assert (peak["median"], growth["median"]) == (2.0, 52.0)
    (time,) = benchmark.scale_rows({"100": [{"cpu_s": 1.0}], "1000": [{"cpu_s": 10.0}]})
    assert time["name"].startswith("CPU time")
