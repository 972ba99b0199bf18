"""Small evaluations on disk, for tests: pools, scores of them, runs, judgements and labelled pairs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pd_rerank.pool import Candidate, Pool, pool_sha256, pools_sha256, write_pools
from pd_rerank.scores import write_scores
from tests.tables import table

SHAKY = [[0.9, 0.7, 0.5, 0.1], [0.8, 0.75, 0.4, 0.45], [0.55, 0.6, 0.5, 0.2]]
"""The worked example of docs/evaluation_stability.md: A, B, C, D under three presentations."""

STEADY = [[0.9, 0.7, 0.5, 0.1]] * 3

QUERIES = {"q1": SHAKY, "007": STEADY, "NA": STEADY}

QRELS = {q: {"A": 3, "B": 2, "D": 1, "C": 0} for q in QUERIES}


def pools(queries: Sequence[str] = tuple(QUERIES)) -> list[Pool]:
    """One pool of A, B, C, D per query; the first stage ranks them D, C, B, A."""
    return [
        Pool.ordered(
            query_id=q,
            query=f"what is asked as {q}",
            candidates=[Candidate(doc_id=d, text=f"text of {d}", score=float(s)) for s, d in enumerate("ABCD")],
        )
        for q in queries
    ]


def write_scored(folder: Path, scores: Mapping[str, list[list[float]]], **record: Any) -> None:
    """A scores folder of `pools`, its scores given in the order A, B, C, D."""
    made = pools(list(scores))
    tables = []
    for pool in made:
        place = ["ABCD".index(doc_id) for doc_id in pool.doc_ids]
        rows = [[row[i] for i in place] for row in scores[pool.query_id]]
        # Every presentation shows the four in another order.
        slots = [[(slot + k) % 4 for slot in range(4)] for k in range(len(rows))]
        tables.append(table(rows, slots, query_id=pool.query_id, doc_ids=pool.doc_ids))
    run = {
        "engine": {"model": "m"},
        "prompt": {"template_hash": "h"},
        "pools_sha256": pools_sha256(made),
        "pool_sha256": {pool.query_id: pool_sha256(pool) for pool in made},
        **record,
    }
    write_scores(folder, tables, run=run)


def run_lines(scores: Mapping[str, Mapping[str, float]]) -> str:
    """A TREC run of these scores."""
    lines = []
    for query_id, docs in scores.items():
        ranked = sorted(docs, key=lambda d: (-docs[d], d))
        lines += [f"{query_id} Q0 {d} {rank} {docs[d]} tag\n" for rank, d in enumerate(ranked, 1)]
    return "".join(lines)


def write_evaluation(folder: Path) -> None:
    """Everything the evaluation commands take: pools, scores, two runs, qrels, pairs."""
    write_pools(folder / "pools", pools())
    write_scored(folder / "scores", QUERIES)
    for name, k in (("run.trec", 0), ("run2.trec", 1)):
        scores = {q: dict(zip("ABCD", rows[k], strict=True)) for q, rows in QUERIES.items()}
        (folder / name).write_text(run_lines(scores), encoding="utf-8")
    lines = [f"{q} 0 {d} {grade}\n" for q, judged in QRELS.items() for d, grade in judged.items()]
    (folder / "qrels.txt").write_text("".join(lines), encoding="utf-8")
    pairs: list[dict[str, Any]] = [
        {"query_id": q, "preferred": preferred, "rejected": rejected, "group": q[0]}
        for q, preferred, rejected in (("q1", "A", "B"), ("007", "B", "A"), ("NA", "A", "D"))
    ]
    text = "".join(json.dumps(pair) + "\n" for pair in pairs)
    (folder / "pairs.jsonl").write_text(text, encoding="utf-8")
