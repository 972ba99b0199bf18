"""Presentations and windows: pure index arithmetic over the positions of a pool.

A *permutation* is an index array: entry i is the pool position shown i-th. A *partition* cuts a
presentation into windows of at most B candidates. Nothing here knows what a candidate is.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from pd_rerank.errors import BadArgument

Order = npt.NDArray[np.int64]
Partition = Literal["round_robin", "contiguous", "hashed"]
Arrangement = Literal["given", "reverse", "canonical"]

PARTITIONS: tuple[str, ...] = get_args(Partition)
ARRANGEMENTS: tuple[str, ...] = get_args(Arrangement)

_LOAD = 0.75
"""Mean filling of a hashed window; the room left is what lets a new candidate in without moving others."""


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""The step of splitmix64's state."""


def identity(n: int) -> Order:
    """The presentation that shows the pool as it is: 0, 1, …, n-1."""
    return np.arange(_count(n), dtype=np.int64)


def reverse(n: int) -> Order:
    """The presentation that shows the pool from its end: n-1, …, 1, 0."""
    return identity(n)[::-1].copy()


def permutation(n: int, *, seed: int) -> Order:
    """A whole-pool shuffle of n positions: the method's `random.Random(seed).shuffle` over 0…n-1.

    The same seed gives every query of equal pool size the same permutation (method, section 2).
    """
    return np.frombuffer(_shuffled(_count(n), int(seed)), dtype=np.int64).copy()


@lru_cache(maxsize=1024)
def _shuffled(n: int, seed: int) -> bytes:
    order = list(range(n))
    random.Random(seed).shuffle(order)
    return np.array(order, dtype=np.int64).tobytes()


def view_seed(base: int, *, epoch: int, query_id: str, window: int) -> int:
    """The seed of a within-window permutation: the first 8 bytes, big-endian, of SHA-1("base:epoch:query:window")."""
    text = f"{base}:{epoch}:{query_id}:{window}"
    digest = hashlib.sha1(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")


def within_window(window: Order, *, base: int, query_id: str, index: int, epoch: int = 0) -> Order:
    """Shuffle one window's candidates among its own slots; companions stay, only slots change (method, 4.2)."""
    return window[permutation(len(window), seed=view_seed(base, epoch=epoch, query_id=query_id, window=index))]


def content_keys(query: str, texts: Sequence[str], doc_ids: Sequence[str]) -> list[str]:
    """One key per candidate that depends on the query and its text; the id only tells identical texts apart.

    The query is part of the hash so that no document is first for every query.
    """
    return [_digest(f"{query}\0{text}").hex() + doc_id for text, doc_id in zip(texts, doc_ids, strict=True)]


def canonical(keys: Sequence[str]) -> Order:
    """Positions sorted by their content key: whatever order the same candidates arrive in, one sequence is shown."""
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)


def partition(
    order: Order, *, width: int, method: Partition = "round_robin", keys: Sequence[str] | None = None
) -> list[Order]:
    """Cut a presentation into windows of at most `width` candidates; every position lands in exactly one.

    `contiguous` takes slices and leaves a short last window. `round_robin` deals ceil(n/width) windows
    (window w = order[w], order[w+m], …), sizes differing by at most one. `hashed` places a candidate by
    the hash of its content key: replacing one candidate leaves nearly all others in their window. It needs
    `keys` from `content_keys`, one per pool position. Inside a window the presentation's order is kept.
    """
    order = np.asarray(order, dtype=np.int64)
    if width < 1:
        raise BadArgument(f"window width must be at least 1, got {width}")
    n = len(order)
    if n == 0:
        return []
    if method == "contiguous":
        return [order[start : start + width] for start in range(0, n, width)]
    if method == "round_robin":
        count = -(-n // width)
        return [order[w::count] for w in range(count)]
    if method == "hashed":
        if keys is None:
            raise BadArgument("partition 'hashed' needs the candidates' keys")
        return _hashed(order, width=width, keys=keys)
    raise BadArgument(f"unknown partition '{method}'; choose one of {', '.join(PARTITIONS)}")


def _hashed(order: Order, *, width: int, keys: Sequence[str]) -> list[Order]:
    """Rendezvous hashing with full windows bumping: a stable matching, so its result ignores arrival order."""
    if width == 1:
        return [order[i : i + 1] for i in range(len(order))]
    count = hashed_count(len(order), width=width)
    claims: list[list[tuple[int, str, int]]] = [[] for _ in range(count)]
    waiting = [int(p) for p in order]
    wishes: dict[int, Iterator[tuple[int, int]]] = {}
    while waiting:
        p = waiting.pop()
        if p not in wishes:
            wishes[p] = _wishes(keys[p][:64], count)
        rank, w = next(wishes[p])
        claims[w].append((rank, keys[p], p))
        if len(claims[w]) > width:
            loser = max(claims[w])
            claims[w].remove(loser)
            waiting.append(loser[2])
    members: list[list[int]] = [[] for _ in range(count)]
    place = {p: w for w, claim in enumerate(claims) for _, _, p in claim}
    for p in order.tolist():
        members[place[p]].append(p)
    return [np.array(window, dtype=np.int64) for window in members if window]


def hashed_count(n: int, *, width: int) -> int:
    """How many windows `hashed` deals n candidates to; some may stay empty in a small pool."""
    return n if width == 1 else -(-n // max(1, int(width * _LOAD)))


def _wishes(key: str, count: int) -> Iterator[tuple[int, int]]:
    """The windows a key may go to, dearest first, as (rank, window): window w ranks as its splitmix64 stream's w-th."""
    ranks = _stream(key, count)
    first = int(ranks.argmin())
    yield int(ranks[first]), first
    del ranks  # most keys get what they ask for first, and need hold nothing
    ranks = _stream(key, count)
    for w in np.argsort(ranks, kind="stable")[1:]:
        yield int(ranks[w]), int(w)


def _stream(key: str, count: int) -> npt.NDArray[np.uint64]:
    x = np.uint64(int.from_bytes(_digest(key)[:8], "big")) + _GOLDEN * np.arange(1, count + 1, dtype=np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _count(n: int) -> int:
    if n < 0:
        raise BadArgument(f"a pool cannot hold {n} candidates")
    return n
