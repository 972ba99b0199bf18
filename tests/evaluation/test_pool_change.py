"""Changed pools: how they are drawn, and what they do to those who stay."""

from __future__ import annotations

import math

import pytest

from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.evaluation.pool_change import (
    changed_pools,
    dropped_rank,
    pool_shift,
    sample_queries,
    summarise_shifts,
)
from pd_rerank.pool import Candidate, Pool


def pool(n: int, query_id: str = "q1") -> Pool:
    return Pool(query_id=query_id, query="?", candidates=tuple(Candidate(doc_id=f"d{i}", text="t") for i in range(n)))


def test_the_dropped_ranks_of_the_method() -> None:
    assert [dropped_rank(query_id) for query_id in ("q1", "q2", "1037798")] == [82, 42, 88]
    assert dropped_rank("q1", seed=1) != dropped_rank("q1", seed=2)


def test_the_sample_is_the_same_in_any_order_and_grows_by_adding() -> None:
    ids = [f"q{i}" for i in range(40)]
    small = sample_queries(ids, size=10)
    assert small == sample_queries(reversed(ids), size=10)
    assert sample_queries(ids, size=20)[:10] == small
    assert sorted(sample_queries(ids, size=100)) == sorted(ids)
    assert sample_queries(ids, size=10, seed=1) != small


def test_one_candidate_leaves_and_the_next_one_comes_last() -> None:
    original, changed, gone = changed_pools(pool(103))
    assert gone == "d82"
    assert original.doc_ids == tuple(f"d{i}" for i in range(100))
    assert changed.doc_ids == tuple(f"d{i}" for i in range(101) if i != 82)
    assert changed_pools(pool(101), change="drop")[1].doc_ids == changed.doc_ids[:-1]


def test_pools_too_small_and_changes_unknown_are_refused() -> None:
    with pytest.raises(InvalidData, match=r"holds 100 candidates.*needs 101"):
        changed_pools(pool(100))
    with pytest.raises(BadArgument, match="replace or drop"):
        changed_pools(pool(101), change="swap")  # type: ignore[arg-type]


def test_pool_psi_of_the_example() -> None:
    shift = pool_shift("q", list("ABCDE"), list("BAFCD"), k=1)
    assert (shift.survivors, shift.pool_psi, shift.top_k_changed) == (4, pytest.approx(1 / 6), 1)
    assert pool_shift("q", list("ABCDE"), list("BAFCD"), k=2).top_k_changed == 0
    assert math.isnan(shift.ndcg_change)


def test_quality_is_measured_on_the_survivors() -> None:
    judged = {"A": 1, "F": 3}
    shift = pool_shift("q", list("ABCDE"), list("FBACD"), judged=judged)
    ideal = 3 + 1 / math.log2(3)
    assert shift.ndcg_before == pytest.approx(1 / ideal)
    assert shift.ndcg_after == pytest.approx(1 / math.log2(3) / ideal)
    assert shift.ndcg_change < 0


def test_scores_are_ranked_with_ties_by_id() -> None:
    same = pool_shift("q", {"B": 0.5, "A": 0.5, "E": 0.9}, {"A": 0.5, "B": 0.5, "F": 0.1})
    assert (same.survivors, same.pool_psi) == (2, 0)


def test_queries_without_two_survivors_are_undefined_and_named() -> None:
    shifts = [
        pool_shift("q", list("AB"), list("BA"), judged={"A": 1}),
        pool_shift("none", ["A"], ["B"], judged={}),
        pool_shift("one", ["A", "B"], ["A", "C"], judged={"A": 1}),
    ]
    row = summarise_shifts(shifts)
    assert (row.pool_psi, row.n, row.undefined) == (1, 1, ("none", "one"))
    assert row.top_k_churn == 0
    assert row.ndcg_change == pytest.approx((1 / math.log2(3) - 1) / 3)
    assert row.ndcg_change_abs == -row.ndcg_change
