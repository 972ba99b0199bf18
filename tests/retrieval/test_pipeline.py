"""`pipelines/build_pools.py` on labelled pairs and runs: laid out, built, evaluated, and gone on with."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pd_rerank.files import read_topics, write_run
from pd_rerank.pool import read_pools

SCRIPT = Path(__file__).parents[2] / "pipelines" / "build_pools.py"

PAIRS = [
    {"id": "1-1", "q1": "who sails", "q2": "who never sails", "doc1": "Ann sails.", "doc2": "Ben never sails."},
    {"id": "2-1", "q1": "hot tea", "q2": "cold tea", "doc1": "Tea is served hot.", "doc2": "Tea is served cold."},
]

CONFIG = """
topics: made/topics.jsonl
corpus: made/corpus.jsonl
qrels: made/qrels.txt
output: pools
routes:
  good: {type: run, path: good.trec}
  half: {type: run, path: half.trec}
"""


def passage_id(text: str) -> str:
    """A passage's id is made of its text alone."""
    return f"p{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def build(folder: Path, *words: str) -> Any:
    command = [sys.executable, str(SCRIPT), "--config", "c.yaml", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.skipif(find_spec("ranx") is None, reason="ranx is not installed (the extra 'eval')")
def test_pairs_become_a_collection_and_pools_are_held_against_them(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    topics = ["1-1:q1", "1-1:q2", "2-1:q1", "2-1:q2"]
    right = [passage_id(pair[doc]) for pair in PAIRS for doc in ("doc1", "doc2")]
    other = [passage_id(pair[doc]) for pair in PAIRS for doc in ("doc2", "doc1")]
    triples = list(zip(topics, right, other, strict=True))
    write_run(tmp_path / "good.trec", [(q, [(a, 2.0), (b, 1.0)]) for q, a, b in triples])
    half = [(q, [(b, 2.0), (a, 1.0)] if i % 2 else [(a, 1.0)]) for i, (q, a, b) in enumerate(triples)]
    write_run(tmp_path / "half.trec", half)

    done = build(tmp_path, "--pairs", "pairs.jsonl", "--compare", "rrf")
    assert done.returncode == 0, done.stderr
    assert list(read_topics(tmp_path / "made/topics.jsonl")) == topics
    report = json.loads((tmp_path / "pools-report.json").read_text())
    assert report["quality"]["good"] == {"nDCG@10": 1.0, "R@100": 1.0}
    assert set(report["quality"]) == {"good", "half", "fusion", "rrf"}
    assert report["pairs"]["coverage"]["covered"] == 4
    assert report["pairs"]["good"]["paired"] == 1.0
    assert report["pairs"]["half"]["paired"] == 0.0
    assert report["health"]["ceiling"]["recall"] == 1.0
    assert "recall ceiling: 1.0000" in done.stdout
    assert [len(pool) for pool in read_pools(tmp_path / "pools")] == [2, 2, 2, 2]
    assert build(tmp_path).returncode == 0
