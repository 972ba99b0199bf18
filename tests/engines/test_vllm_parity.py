"""`pipelines/vllm_parity.py` without vLLM: what it compares, and what makes it fail."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pd_rerank import FakeEngine

SCRIPT = Path(__file__).parents[2] / "pipelines" / "vllm_parity.py"
SIZES = SimpleNamespace(max_doc_chars=60, queries=1, windows=2, window_size=3, max_length=2048)
SLOTS = 6


@pytest.fixture(scope="module")
def parity() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_parity_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def held(parity: ModuleType, row: dict[str, Any], *, tolerance: float = 1e-3, accelerator: bool = True) -> list[str]:
    found: list[str] = parity.faults([row], tolerance=tolerance, accelerator=accelerator)
    return found


class Reader(FakeEngine):
    """Grades by word overlap, without any at the first `lost` slots of a window."""

    def __init__(self, lost: int = 0) -> None:
        super().__init__()
        self.lost = lost

    def grade_logits(self, prompts: Any, grade_ids: Any, *, progress: Any = None) -> Any:
        read = super().grade_logits(prompts, grade_ids, progress=progress)
        for logits in read:
            logits[: self.lost] = math.nan
        return read


def test_equal_readings_hold_and_grades_that_are_missing_or_apart_do_not(parity: ModuleType) -> None:
    windows, ids = parity.windows_of(FakeEngine().tokenizer, SIZES)
    wanted = parity.grades(Reader(), windows, ids)
    assert len(wanted) == SLOTS

    def row(lost: int, want: Any = wanted) -> dict[str, Any]:
        return {"readout": "pooling", "lora": True, **parity.compared(Reader(lost), SIZES, want)}

    assert held(parity, row(0)) == []
    assert row(0)["again"] | {"seconds": 0} == {"largest": 0.0, "missing": 0, "seconds": 0, "cached_tokens": 0}
    some, all_lost = row(1), row(3)
    assert (some["reversed"]["missing"], some["reversed"]["largest"]) == (2, 0.0)
    assert "pooling with LoRA, reversed: 2 grades are missing" in held(parity, some)
    assert (all_lost["in order"]["missing"], all_lost["in order"]["largest"]) == (SLOTS, None)
    assert "pooling with LoRA, in order: grades are None apart, 0.15 are allowed" in held(
        parity, all_lost, tolerance=0.15
    )
    assert len(held(parity, row(0, wanted + np.float32(0.1)))) == 3
    assert len(held(parity, row(0, np.where(np.arange(SLOTS) == 1, math.nan, wanted)))) == 3


def test_a_readout_that_fails_is_excused_only_for_want_of_an_accelerator(parity: ModuleType) -> None:
    good = {"readout": "pooling", "in order": {"largest": 0.0, "missing": 0}}
    failed = {"readout": "prompt_ids", "error": "requires the V2 model runner"}
    assert parity.faults([good, failed], tolerance=1e-3, accelerator=False) == []
    assert parity.faults([good, failed], tolerance=1e-3, accelerator=True) == [
        "prompt_ids: requires the V2 model runner"
    ]
    assert held(parity, failed, accelerator=False) == ["nothing was compared"]
    assert held(parity, {"readout": "top_k", "error": "died"}, accelerator=False)[0] == "top_k: died"
