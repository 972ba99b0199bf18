"""Permutations and partitions, against the method's vectors and their own laws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_rerank import windows
from pd_rerank.errors import BadArgument

SIZES = st.integers(0, 120)
WIDTHS = st.integers(1, 30)
KEYS = st.lists(st.text(max_size=6), max_size=60)


def as_lists(cut: list[np.ndarray]) -> list[list[int]]:
    return [w.tolist() for w in cut]


def test_permutations_are_the_methods() -> None:
    assert windows.permutation(10, seed=0).tolist() == [7, 8, 1, 5, 3, 4, 2, 0, 9, 6]
    assert windows.permutation(10, seed=1).tolist() == [6, 8, 9, 7, 5, 3, 0, 4, 1, 2]
    assert windows.permutation(10, seed=2).tolist() == [5, 9, 3, 4, 6, 7, 2, 8, 1, 0]
    assert windows.permutation(100, seed=0)[:10].tolist() == [23, 8, 11, 7, 48, 13, 1, 91, 94, 54]


@pytest.mark.parametrize(
    ("base", "window", "seed", "five"),
    [
        (0, 0, 13262485098473454748, [0, 3, 2, 1, 4]),
        (0, 1, 17416048900784198341, [3, 1, 2, 0, 4]),
        (1, 0, 12022766493922051361, [0, 3, 2, 1, 4]),
        (1, 1, 7688936097339725926, [1, 4, 0, 3, 2]),
    ],
)
def test_view_seeds_are_the_methods(base: int, window: int, seed: int, five: list[int]) -> None:
    assert windows.view_seed(base, epoch=0, query_id="q1", window=window) == seed
    assert windows.within_window(windows.identity(5), base=base, query_id="q1", index=window).tolist() == five


def test_view_permutations_of_a_full_window_are_the_methods() -> None:
    window = windows.identity(20)
    assert windows.within_window(window, base=0, query_id="q1", index=0).tolist() == [
        13, 11, 4, 18, 10, 1, 15, 14, 16, 19, 8, 3, 0, 6, 9, 2, 7, 12, 5, 17,
    ]  # fmt: skip
    assert windows.within_window(window, base=1, query_id="q1", index=0).tolist() == [
        8, 5, 3, 17, 15, 10, 16, 0, 14, 18, 12, 11, 6, 1, 9, 2, 7, 13, 4, 19,
    ]  # fmt: skip


def test_seven_candidates_in_windows_of_three() -> None:
    order = windows.identity(7)
    assert as_lists(windows.partition(order, width=3, method="contiguous")) == [[0, 1, 2], [3, 4, 5], [6]]
    assert as_lists(windows.partition(order, width=3, method="round_robin")) == [[0, 3, 6], [1, 4], [2, 5]]


def test_round_robin_balances_where_contiguous_leaves_a_window_of_one() -> None:
    order = windows.identity(101)
    assert [len(w) for w in windows.partition(order, width=20, method="round_robin")] == [17, 17, 17, 17, 17, 16]
    assert [len(w) for w in windows.partition(order, width=20, method="contiguous")] == [20, 20, 20, 20, 20, 1]


@given(n=SIZES, width=WIDTHS, seed=st.integers(0, 5), method=st.sampled_from(windows.PARTITIONS))
def test_every_candidate_is_in_exactly_one_window(n: int, width: int, seed: int, method: str) -> None:
    order = windows.permutation(n, seed=seed)
    keys = windows.content_keys("q", [f"text {i % 7}" for i in range(n)], [str(i) for i in range(n)])
    cut = windows.partition(order, width=width, method=method, keys=keys)  # type: ignore[arg-type]
    assert sorted(p for w in cut for p in w.tolist()) == list(range(n))
    assert all(1 <= len(w) <= width for w in cut)


@given(n=SIZES, width=WIDTHS, method=st.sampled_from(windows.PARTITIONS))
def test_a_window_keeps_the_presentations_order(n: int, width: int, method: str) -> None:
    order = windows.permutation(n, seed=3)
    keys = windows.content_keys("q", [str(i) for i in range(n)], [str(i) for i in range(n)])
    place = {p: i for i, p in enumerate(order.tolist())}
    for window in windows.partition(order, width=width, method=method, keys=keys):  # type: ignore[arg-type]
        shown = [place[p] for p in window.tolist()]
        assert shown == sorted(shown)


@given(texts=KEYS, seed=st.integers(0, 9))
def test_canonical_order_ignores_arrival(texts: list[str], seed: int) -> None:
    ids = [f"d{i}" for i in range(len(texts))]
    shuffled = windows.permutation(len(texts), seed=seed)
    keys = windows.content_keys("q", texts, ids)
    arrived = [keys[i] for i in shuffled]
    assert [keys[i] for i in windows.canonical(keys)] == [arrived[i] for i in windows.canonical(arrived)]


def test_canonical_order_differs_between_queries() -> None:
    texts, ids = [f"text {i}" for i in range(30)], [f"d{i}" for i in range(30)]
    one = windows.canonical(windows.content_keys("one query", texts, ids))
    other = windows.canonical(windows.content_keys("another query", texts, ids))
    assert one.tolist() != other.tolist()


@given(n=st.integers(1, 80), width=st.integers(1, 20), seed=st.integers(0, 9))
def test_hashed_windows_ignore_arrival(n: int, width: int, seed: int) -> None:
    keys = windows.content_keys("q", [f"text {i}" for i in range(n)], ["" for _ in range(n)])
    shuffled = windows.permutation(n, seed=seed)
    here = windows.partition(windows.identity(n), width=width, method="hashed", keys=keys)
    there = windows.partition(windows.identity(n), width=width, method="hashed", keys=[keys[i] for i in shuffled])
    assert {frozenset(w.tolist()) for w in here} == {frozenset(shuffled[w].tolist()) for w in there}


def test_replacing_one_candidate_leaves_nearly_all_hashed_windows_alone() -> None:
    moved = []
    for trial in range(30):
        texts = [f"trial {trial} text {i}" for i in range(100)]
        changed = [*texts[:99], f"trial {trial} newcomer"]
        companions = []
        for these in (texts, changed):
            keys = windows.content_keys("q", these, ["" for _ in these])
            cut = windows.partition(windows.identity(100), width=20, method="hashed", keys=keys)
            companions.append({p: w for w, members in enumerate(cut) for p in members.tolist() if p != 99})
        moved.append(sum(companions[0][p] != companions[1][p] for p in range(99)))
    assert np.mean(moved) < 1.0  # contiguous windows of a hash-sorted pool would move about two in three windows
    assert max(moved) <= 5


def test_reverse_and_identity_are_each_others_mirror() -> None:
    assert windows.reverse(4).tolist() == [3, 2, 1, 0]
    assert windows.identity(0).tolist() == windows.reverse(0).tolist() == []


@pytest.mark.parametrize("width", [0, -3])
def test_a_window_of_nothing_is_refused(width: int) -> None:
    with pytest.raises(BadArgument, match="at least 1"):
        windows.partition(windows.identity(3), width=width)


def test_unknown_partitions_and_missing_keys_are_refused() -> None:
    with pytest.raises(BadArgument, match="round_robin"):
        windows.partition(windows.identity(3), width=2, method="zigzag")  # type: ignore[arg-type]
    with pytest.raises(BadArgument, match="keys"):
        windows.partition(windows.identity(3), width=2, method="hashed")
    with pytest.raises(BadArgument, match="-1"):
        windows.permutation(-1, seed=0)
