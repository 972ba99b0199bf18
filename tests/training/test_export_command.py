"""`pd-rerank export` from the command line, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("peft")

from pd_rerank.cli import app
from pd_rerank.prompt import GradePrompt
from pd_rerank.training.adapters import save_adapter
from tests.tokenizers_for_tests import byte_level
from tests.training.test_adapters import card, save_base, trained, wide


@pytest.fixture
def made(tmp_path: Path) -> list[str]:
    """A Gemma-like base, whose logits are capped, and an adapter for it, as words of the command."""
    base = save_base(tmp_path / "base", wide("Gemma2"))
    model = trained(wide("Gemma2"))
    folder = save_adapter(tmp_path / "adapter", model, byte_level(), GradePrompt(byte_level()), card(base))
    return ["export", "--model", str(base), "--adapter", str(folder), "--output", str(tmp_path / "out")]


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def test_both_forms_are_written_and_replace_each_other(made: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(*made)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    assert f"{out}: merged, float32; merging moved scores" in result.stderr
    assert "warning" not in result.stderr
    assert json.loads((out / "config.json").read_text())["architectures"] == ["Gemma2ForCausalLM"]
    result = run(*made, "--form", "classifier", "--dtype", "bf16")
    assert result.exit_code == 0, result.stderr
    assert "warning: the classifier's head leaves out softcap" in result.stderr
    record = json.loads((out / "reranker.json").read_text())
    assert (record["format"], record["dtype"]) == ("pd_rerank classifier 1", "bfloat16")
    assert record["logits"] == {"softcap": 3.0}
    config = json.loads((out / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["Gemma2ForSequenceClassification"], "bfloat16")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--form", "gguf"], 2, "choose one of merged, classifier"),
        (["--dtype", "int3"], 2, "unknown dtype"),
        (["--adapter", "nowhere/adapter"], 4, "nowhere/adapter"),
        (["--model", "/no/model"], 4, "/no/model"),
    ],
)
def test_what_is_wrong_is_one_line_and_a_code(
    made: list[str], tmp_path: Path, words: list[str], code: int, says: str
) -> None:
    result = run(*made, *words)
    assert result.exit_code == code, result.stderr
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_another_base_is_refused(made: list[str], tmp_path: Path) -> None:
    twin = save_base(tmp_path / "twin", wide("Gemma2", seed=3))
    result = run(*made, "--model", str(twin))
    assert result.exit_code == 5
    assert "the weights of this model are others" in result.stderr
