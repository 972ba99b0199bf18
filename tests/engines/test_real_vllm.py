"""The real vLLM, where it is installed: every readout that runs, against transformers, on a tiny model with LoRA.

Run in the environment that `pipelines/vllm_cpu.sh` builds: `.vllm-cpu/bin/python -m pytest -m vllm tests/engines`.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.test_server import write_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"),
]

SCRIPT = Path(__file__).parents[2] / "pipelines" / "vllm_parity.py"


@pytest.mark.parametrize("readout", ["pooling", "export", "one_token", "top_k"])
def test_every_readout_gives_what_transformers_gives(readout: str, tmp_path: Path) -> None:
    """Heads of 32, the smallest that vLLM's attention takes on a CPU."""
    shape = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = write_model(tmp_path / "model", "Qwen3", **shape)
    words = ["--model", str(model), "--only", readout, "--queries", "1", "--output", str(tmp_path / "found.json")]
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found["largest"] <= 1e-3
    assert found["adapter_moves_grades_by"] > 0.01
    shared = [row["again"]["cached_tokens"] for row in found["rows"] if row["prefix_cache"]]
    assert all(shared), "the second time a prompt's start is in the cache"
