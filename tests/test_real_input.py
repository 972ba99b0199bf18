"""The main job on real passages with a real model: through rerankers, through the command, and across a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pd_rerank.pool import Candidate, Pool, write_pools

DATA = Path(__file__).parents[2] / "shared" / "data" / "nevir" / "test.jsonl"
SETTINGS = {"max_doc_chars": 200, "window": 5, "dtype": "fp32"}

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(not DATA.is_file(), reason="the NevIR test file is not beside this checkout"),
]


@pytest.fixture(scope="module")
def pools() -> list[Pool]:
    """Three queries, each with the ten passages that share most of its words."""
    rows = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()[:60]]
    passages = sorted({row[name] for row in rows for name in ("doc1", "doc2")})

    def overlap(query: str, text: str) -> float:
        common = Counter(query.lower().split()) & Counter(text.lower().split())
        return float(sum(common.values()))

    found = []
    for row in rows[:3]:
        hits = [Candidate(doc_id=f"p{i}", text=text, score=overlap(row["q1"], text)) for i, text in enumerate(passages)]
        best = Pool.ordered(query_id=row["id"], query=row["q1"], candidates=hits).candidates[:10]
        found.append(Pool(query_id=row["id"], query=row["q1"], candidates=best))
    return found


def command(folder: Path) -> list[str]:
    return [
        sys.executable, "-m", "pd_rerank", "rerank", "--pools", str(folder / "pools"), "--output", str(folder / "out"),
        "--model", "smollm2-135m", "--max-doc-chars", "200", "--window-size", "5", "--shard-size", "1",
        "--dtype", "fp32",
    ]  # fmt: skip


def test_rerankers_and_a_command_killed_half_way_give_identical_scores(pools: list[Pool], tmp_path: Path) -> None:
    from rerankers import Reranker

    import pd_rerank

    torch = pytest.importorskip("torch")
    write_pools(tmp_path / "pools", pools)
    threads = torch.get_num_threads()  # sums differ in their last bits with the number of threads
    run = {"env": os.environ | {"OMP_NUM_THREADS": str(threads)}, "stderr": subprocess.DEVNULL}
    first = subprocess.Popen(command(tmp_path), **run)
    shards = tmp_path / "out" / "shards"
    deadline = time.monotonic() + 300
    while not (shards.is_dir() and any(shards.iterdir())):
        assert first.poll() is None, "the job ended before it could be interrupted"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert not (tmp_path / "out" / "run.trec").exists()
    subprocess.run(command(tmp_path), check=True, **run)
    written = {}
    for line in (tmp_path / "out" / "results.jsonl").read_text(encoding="utf-8").splitlines():
        result = json.loads(line)
        written[result["query"]["qid"]] = [(c["docid"], c["score"]) for c in result["candidates"]]

    pd_rerank.register()
    ranker = Reranker("smollm2-135m", model_type="ocsft", verbose=0, **SETTINGS)
    for pool in pools:
        ranked = ranker.rank(pool.query, list(pool.texts), doc_ids=list(pool.doc_ids))
        assert [(r.doc_id, r.score) for r in ranked] == written[pool.query_id]


def test_canonical_order_and_windows_of_one_decide_the_same_in_any_arrival_order(pools: list[Pool]) -> None:
    """What a position-biased real model scores in two arrival orders: equal to the last bit, or clearly not."""
    from pd_rerank import GradePrompt, HFEngine, Scoring, score_pools

    engine = HFEngine("smollm2-135m", quiet=True)
    prompt = GradePrompt(engine.tokenizer, max_doc_chars=200)
    pool = pools[0]
    turned = Pool(query_id=pool.query_id, query=pool.query, candidates=pool.candidates[::-1])

    def change(**how: object) -> float:
        scoring = Scoring(**how)  # type: ignore[arg-type]
        here, there = (
            score_pools([p], engine=engine, prompt=prompt, scoring=scoring)[0].mean() for p in (pool, turned)
        )
        return float(np.abs(here - there[::-1]).max())

    assert change(window=5, order="canonical") == 0.0
    assert change(window=1) == 0.0
    assert change(window=5) > 0.05
