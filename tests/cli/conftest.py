"""A small collection on disk, and the command line in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pd_rerank.cli import app

TOPICS = {"007": "how long do bees live", "NA": "when does the ferry leave", "null": "été 文書 🙂"}

CORPUS = {
    "1": "A worker bee can live six weeks.",
    "NA": "The ferry leaves at nine.",
    "null": "été 文書 🙂 in a text",
    "été": "Honey keeps long.",
    "文書": "Bees live in hives.",
    "d6": "",
}


@pytest.fixture
def collection(tmp_path: Path) -> Path:
    """Topics, corpus and a run of 3 queries × 6 documents."""
    (tmp_path / "topics.tsv").write_text("".join(f"{q}\t{t}\n" for q, t in TOPICS.items()), encoding="utf-8")
    lines = [json.dumps({"_id": i, "text": t}, ensure_ascii=False) for i, t in CORPUS.items()]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    run = [
        f"{q} Q0 {d} {r} {10 - r}.5 first\n" for n, q in enumerate(TOPICS) for r, d in enumerate(rotated(n), start=1)
    ]
    (tmp_path / "run.trec").write_text("".join(run), encoding="utf-8")
    return tmp_path


def rotated(n: int) -> list[str]:
    ids = list(CORPUS)
    return ids[n:] + ids[:n]


@pytest.fixture
def cli() -> Callable[..., Any]:
    """Run `pd-rerank` with the given words in this process."""

    def invoke(*words: str | Path) -> Any:
        return CliRunner().invoke(app, [str(word) for word in words])

    return invoke


@pytest.fixture
def rerank(collection: Path, cli: Callable[..., Any]) -> Callable[..., Any]:
    """Run `pd-rerank rerank` on the collection with the fake engine."""

    def invoke(*words: str | Path, **replaced: Path | None) -> Any:
        inputs: dict[str, Path | None] = {
            "--run": collection / "run.trec",
            "--corpus": collection / "corpus.jsonl",
            "--topics": collection / "topics.tsv",
            "--output": collection / "out",
        }
        inputs |= {f"--{name}": path for name, path in replaced.items()}
        given = [word for name, path in inputs.items() if path is not None for word in (name, path)]
        return cli("rerank", "--engine", "fake", *given, *words)

    return invoke
