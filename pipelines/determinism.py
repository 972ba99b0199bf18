"""How far scores move when something other than model and input changes: the table of docs/determinism.md.

    python pipelines/determinism.py --model smollm2-135m

Scores the demo's pools once as the reference (float32, one thread, one window at a time), then again with one thing
changed at a time. Prints a line per change: the largest difference of a score, how many scores changed at all, and how
many queries rank otherwise; then the hash of the reference, the same in every process (try PYTHONHASHSEED).
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from pd_rerank import GradePrompt, HFEngine, Pool, Scoring, read_pools, score_pools

Scores = dict[str, dict[str, float]]


def scored(engine: HFEngine, pools: Sequence[Pool], scoring: Scoring, *, chars: int) -> Scores:
    """Each query's scores by document, all pools in one engine call."""
    prompt = GradePrompt(engine.tokenizer, max_doc_chars=chars)
    tables = score_pools(pools, engine=engine, prompt=prompt, scoring=scoring)
    return {t.query_id: dict(zip(t.doc_ids, t.mean().tolist(), strict=True)) for t in tables}


def compared(there: Scores, here: Scores) -> tuple[float, int, int]:
    """Largest difference of a score, how many differ, and how many queries rank otherwise."""
    apart = [abs(there[q][d] - score) for q, scores in here.items() for d, score in scores.items()]
    ranks = [[sorted(s[q], key=lambda d, s=s, q=q: (-s[q][d], d)) for s in (there, here)] for q in here]
    return max(apart), int(np.count_nonzero(apart)), sum(one != other for one, other in ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--queries", type=int, default=3, help="of the demo's")
    parser.add_argument("--candidates", type=int, default=8, help="of each query")
    parser.add_argument("--window-size", type=int, default=4)
    parser.add_argument("--chars", type=int, default=300, help="of a document")
    args = parser.parse_args()

    import torch

    torch.set_num_threads(1)
    with resources.as_file(resources.files("pd_rerank") / "demo" / "pools.jsonl") as path:
        pools = [
            replace(pool, candidates=pool.candidates[: args.candidates])
            for pool in read_pools(Path(path))[: args.queries]
        ]
    turned = [replace(pool, candidates=pool.candidates[::-1]) for pool in reversed(pools)]
    scoring = Scoring(window=args.window_size)
    canonical, alone = replace(scoring, order="canonical"), Scoring(window=1)
    averaged, contiguous = replace(scoring, presentations=3), replace(scoring, partition="contiguous")
    made: dict[str, HFEngine] = {}

    def run(pools: Sequence[Pool] = pools, scoring: Scoring = scoring, **options: Any) -> Scores:
        name = json.dumps(options)
        if name not in made:
            made.clear()
            made[name] = HFEngine(
                args.model, **{"dtype": "float32", "batching": "single", "share_prefix": False} | options
            )
        return scored(made[name], pools, scoring, chars=args.chars)

    def one_by_one() -> Scores:
        return {pool.query_id: run([pool])[pool.query_id] for pool in pools}

    def threads(count: int) -> Scores:
        torch.set_num_threads(count)
        try:
            return run()
        finally:
            torch.set_num_threads(1)

    reference = run()
    in_canonical, in_ones, in_three = run(scoring=canonical), run(scoring=alone), run(scoring=averaged)
    changes: list[tuple[str, Scores, Callable[[], Scores]]] = [
        ("the same again", reference, run),
        ("each query in a call of its own", reference, one_by_one),
        ("candidates in another order", reference, lambda: run(turned)),
        ("the same, order=canonical", in_canonical, lambda: run(turned, canonical)),
        ("the same, window=1", in_ones, lambda: run(turned, alone)),
        ("three presentations again", in_three, lambda: run(scoring=averaged)),
        ("seed 7 instead of 0", in_three, lambda: run(scoring=replace(averaged, seed=7))),
        ("partition contiguous instead of round-robin", reference, lambda: run(scoring=contiguous)),
        ("two threads instead of one", reference, lambda: threads(2)),
        ("padded batches instead of single windows", reference, lambda: run(batching="padded")),
        ("share_prefix True instead of False", reference, lambda: run(share_prefix=True)),
        ("share_prefix 'queries'", reference, lambda: run(share_prefix="queries")),
        ("eager attention instead of sdpa", reference, lambda: run(attn_implementation="eager")),
        ("bfloat16 instead of float32", reference, lambda: run(dtype="bfloat16")),
    ]  # fmt: skip
    count = sum(map(len, pools))
    print(f"| changed | largest difference | scores that differ, of {count} | rankings that differ, of {len(pools)} |")
    print("|---|---|---|---|")
    for name, there, run_again in changes:
        apart, differ, ranked = compared(there, run_again())
        print(f"| {name} | {apart:.1e} | {differ} | {ranked} |", flush=True)
    digest = hashlib.sha256(json.dumps(reference, sort_keys=True).encode()).hexdigest()
    print(f"\nreference {digest[:16]}")


if __name__ == "__main__":
    main()
