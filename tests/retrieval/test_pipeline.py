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


@pytest.mark.skipif(find_spec("ranx") is None, reason="ranx is not installed (the extra 'eval')")
def test_sentences_are_put_apart_and_weights_fitted_on_dev_queries_only(tmp_path: Path) -> None:
    glued = "First, e.g. this.Then 3.5 of that?Yes.(Or no.)"
    (tmp_path / "glued.jsonl").write_text(json.dumps({"_id": "a", "text": glued}) + '\n{"_id": "b", "text": "x"}\n')
    for name in ("dev", "test"):
        (tmp_path / f"{name}.tsv").write_text(f"{name}\tany\n")
        (tmp_path / f"{name}.txt").write_text(f"{name} 0 b 2\n")
        write_run(tmp_path / f"{name}-good.trec", [(name, [("b", 2.0), ("a", 1.0)])])
        write_run(tmp_path / f"{name}-bad.trec", [(name, [("a", 3.0), ("b", 1.0)])])
        (tmp_path / f"{name}.yaml").write_text(
            f"topics: {name}.tsv\ncorpus: made.jsonl\nqrels: {name}.txt\noutput: {name}\n"
            f"routes:\n  bad: {{type: run, path: {name}-bad.trec, weight: 3}}\n"
            f"  good: {{type: run, path: {name}-good.trec}}\n"
        )
    words = ("--config", "test.yaml", "--respace", "glued.jsonl", "--relevant", "2", "--compare", "rrf")
    command = [sys.executable, str(SCRIPT), *words, "--dev", "dev.yaml", "--fit", "rbc"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    texts = [json.loads(line)["text"] for line in (tmp_path / "made.jsonl").read_text().splitlines()]
    assert texts == ["First, e.g. this. Then 3.5 of that? Yes.(Or no.)", "x"]
    quality = json.loads((tmp_path / "test-report.json").read_text())["quality"]
    assert set(quality) == {"bad", "good", "fusion", "rrf", "fitted weights", "fitted rbc"}
    assert quality["fusion"]["nDCG@10"] < quality["fitted weights"]["nDCG@10"] == 1.0
    assert quality["bad"]["R(rel=2)@100"] == 1.0
    weights = json.loads((tmp_path / "test-weights.json").read_text())
    assert (weights["dev_queries"], weights["weights"]["good"] > 0.5) == (1, True)
