"""Labelled pairs laid out as the files a pool config names."""

from __future__ import annotations

from pathlib import Path

import pytest

from pd_rerank.config import PoolSettings
from pd_rerank.errors import BadArgument
from pd_rerank.studies.collections import lay_out
from tests.designated import direction


def settings(folder: Path, topics: str) -> PoolSettings:
    names = {"corpus": folder / "c.jsonl", "topics": folder / topics, "qrels": folder / "q.txt"}
    return PoolSettings.model_validate(
        {**names, "output": folder / "pools", "routes": {"bm25": {"type": "bm25", "index": "i"}}}
    )


def test_pairs_are_written_whole_and_not_under_a_name_they_could_not_be_read_by(tmp_path: Path) -> None:
    directions = [direction()]
    with pytest.raises(BadArgument, match=r"topics: .* JSON lines; give .*t\.tsv the ending \.jsonl"):
        lay_out(directions, settings(tmp_path, "t.tsv"))
    assert list(tmp_path.iterdir()) == []
    lay_out(directions, settings(tmp_path, "t.jsonl"))
    assert {path.name for path in tmp_path.iterdir()} == {"c.jsonl", "t.jsonl", "q.txt"}
