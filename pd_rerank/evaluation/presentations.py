"""One query under K presentations: its candidates' ranks and scores in each, whatever system they are of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.evaluation.ranking import Ranked, Ranking, as_ranking
from pd_rerank.files import RunHit
from pd_rerank.scores import Readout, Scores, ScoreTable, SlotResidual

_ENTRIES = 1 << 17
"""Scores sorted at a time, so that the copies sorting needs stay small."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Presentations:
    """One query's candidates under K presentations.

    `ranks` (K, n) int32, 0 the best, -1 not ranked; `scores` (K, n) float64, NaN where there is none. `slot` and
    `window` (K, n) say where a candidate stood, -1 where it was not shown, and are None where nobody recorded it.
    """

    query_id: str
    doc_ids: tuple[str, ...]
    ranks: npt.NDArray[np.int32]
    scores: Scores
    slot: npt.NDArray[np.int32] | None = None
    window: npt.NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        if self.ranks.ndim != 2 or self.ranks.shape[1] != len(self.doc_ids):
            raise InvalidData(
                f"query '{self.query_id}': ranks of shape {self.ranks.shape} for {len(self.doc_ids)} candidates"
            )
        for name in ("scores", "slot", "window"):
            array = getattr(self, name)
            if array is not None and array.shape != self.ranks.shape:
                raise InvalidData(
                    f"query '{self.query_id}': {name} has shape {array.shape}, ranks have {self.ranks.shape}"
                )

    @classmethod
    def of_scores(cls, query_id: str, doc_ids: Sequence[str], scores: npt.ArrayLike) -> Presentations:
        """From scores (K, n): ranked descending, ties by document id ascending, missing scores unranked."""
        there = np.array(scores, dtype=np.float64)
        if there.ndim != 2 or there.shape[1] != len(doc_ids):
            raise InvalidData(f"query '{query_id}': scores of shape {there.shape} for {len(doc_ids)} candidates")
        return cls(query_id=query_id, doc_ids=tuple(doc_ids), ranks=strict_ranks(there, doc_ids), scores=there)

    @classmethod
    def of_table(
        cls,
        table: ScoreTable,
        readout: Readout = "expected",
        *,
        residual: SlotResidual | None = None,
        by_position: Literal["contiguous", "round_robin"] | None = None,
    ) -> Presentations:
        """From a score table: one presentation per row, with its slots and windows.

        Ties are broken by document id, as everywhere here; `by_position` names the partition the pool was cut by and
        breaks them by the position shown instead, as the paper does: then ties alone move a ranking.
        """
        scores = table.scores(readout, residual=residual)
        position = None if by_position is None else shown_position(table.slot, table.window, by_position)
        return cls(
            query_id=table.query_id,
            doc_ids=table.doc_ids,
            ranks=strict_ranks(scores, table.doc_ids, position=position),
            scores=scores,
            slot=table.slot,
            window=table.window,
        )

    @classmethod
    def of_tables(cls, tables: Sequence[ScoreTable], readout: Readout = "expected") -> Presentations:
        """From several score tables of one query, one presentation per table: its served (mean) score.

        What differs between the tables is what is measured: markers, widths, adapters. All hold the same candidates.
        """
        if not tables:
            raise BadArgument("no score table given")
        first = tables[0]
        rows = []
        for table in tables:
            if table.query_id != first.query_id or set(table.doc_ids) != set(first.doc_ids):
                raise InvalidData(f"score tables of '{first.query_id}' and '{table.query_id}' hold other candidates")
            place = {doc_id: i for i, doc_id in enumerate(table.doc_ids)}
            rows.append(table.mean(readout)[[place[doc_id] for doc_id in first.doc_ids]])
        return cls.of_scores(first.query_id, first.doc_ids, np.array(rows).reshape(len(tables), -1))

    @classmethod
    def of_rankings(cls, query_id: str, rankings: Sequence[Ranked]) -> Presentations:
        """From one ranking per presentation; the columns are all documents any of them ranks.

        Run hits and ids are taken in their order, scores by `strict_ranks`. A ranking without scores leaves them NaN.
        """
        parts = [_ordered(ranked) for ranked in rankings]
        doc_ids = tuple(dict.fromkeys(doc_id for part in parts for doc_id in part.doc_ids))
        column = {doc_id: i for i, doc_id in enumerate(doc_ids)}
        ranks = np.full((len(parts), len(doc_ids)), -1, dtype=np.int32)
        scores = np.full(ranks.shape, np.nan)
        for k, part in enumerate(parts):
            at = [column[doc_id] for doc_id in part.doc_ids]
            ranks[k, at] = np.arange(len(at))
            if part.scores is not None:
                scores[k, at] = part.scores
        return cls(query_id=query_id, doc_ids=doc_ids, ranks=ranks, scores=scores)

    @property
    def count(self) -> int:
        """K, the number of presentations."""
        return int(self.ranks.shape[0])

    def averaged(self, size: int) -> Presentations:
        """Disjoint ensembles of `size` presentations, each the mean score of its own; what is left over is dropped.

        The stability of a reranker that serves the mean of `size` presentations. Missing scores stay missing.
        """
        if size < 1:
            raise BadArgument(f"an ensemble averages at least 1 presentation, got {size}")
        groups = self.count // size
        mean = self.scores[: groups * size].reshape(groups, size, -1).mean(axis=1)
        return Presentations.of_scores(self.query_id, self.doc_ids, mean)


def presentations_of_runs(runs: Sequence[Mapping[str, Ranked]]) -> list[Presentations]:
    """One `Presentations` per query from K runs, one run per presentation; queries in the order they first appear.

    A query that a run lacks is an empty presentation there, see `stability`. Nothing is dropped.
    """
    if len(runs) < 2:
        raise BadArgument(f"stability needs at least two runs of the same queries, got {len(runs)}")
    if not set.intersection(*(set(run) for run in runs)):
        raise InvalidData("no query is in all runs; give runs of the same queries, one per presentation")
    queries = dict.fromkeys(query_id for run in runs for query_id in run)
    return [Presentations.of_rankings(query_id, [run.get(query_id, ()) for run in runs]) for query_id in queries]


def strict_ranks(
    scores: npt.ArrayLike, doc_ids: Sequence[str] | None = None, *, position: npt.ArrayLike | None = None
) -> npt.NDArray[np.int32]:
    """Ranks of scores (…, n) along the last axis: score descending, ties broken, -1 where a score is NaN.

    Ties go by `position` (…, n) ascending where it is given, else by document id ascending, else by column.

    Example: scores (.5, .9, .5) of B, C, A give ranks (2, 0, 1); with positions (0, 1, 2) they give (1, 0, 2).
    """
    s = np.asarray(scores, dtype=np.float64)
    n = s.shape[-1]
    rows = s.reshape(math.prod(s.shape[:-1]), n)
    ranks = np.empty(rows.shape, dtype=np.int32)
    by_id = np.arange(n) if doc_ids is None else np.array(sorted(range(n), key=doc_ids.__getitem__), dtype=np.int64)
    places = None if position is None else np.asarray(position).reshape(rows.shape)
    step = max(1, _ENTRIES // max(1, n))
    for start in range(0, len(rows), step):
        block = slice(start, start + step)
        falling = -rows[block]
        order = _by_id(falling, by_id) if places is None else np.lexsort((places[block], falling), axis=-1)
        np.put_along_axis(ranks[block], order, np.arange(n, dtype=np.int32), axis=-1)
    ranks[np.isnan(rows)] = -1  # NaN sorts last
    return ranks.reshape(s.shape)


def _by_id(falling: Scores, by_id: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Columns of each row of `falling` (negated scores) in ascending order, equal ones as `by_id` has them."""
    falling = falling[:, by_id]
    order = np.argsort(falling, axis=-1)
    ordered = np.take_along_axis(falling, order, axis=-1)
    tied = (ordered[:, 1:] == ordered[:, :-1]).any(axis=-1)
    if tied.any():  # the quick sort above does not keep equal scores in order
        order[tied] = np.argsort(falling[tied], axis=-1, kind="stable")
    return by_id[order]


def shown_position(
    slot: npt.NDArray[np.integer[Any]],
    window: npt.NDArray[np.integer[Any]],
    partition: Literal["contiguous", "round_robin"],
) -> npt.NDArray[np.int64]:
    """The position (from 0) at which each candidate was shown, from its slot and window (K, n); not shown ones last.

    A contiguous partition fills one window after the other; round robin deals the pool out, slot by slot.
    """
    if partition not in ("contiguous", "round_robin"):
        raise BadArgument(f"a '{partition}' partition does not tell positions; contiguous and round_robin do")
    shown = np.asarray(slot) >= 0
    keys = (slot, window) if partition == "contiguous" else (window, slot)
    order = np.lexsort((*keys, ~shown), axis=-1)
    positions = np.empty(order.shape, dtype=np.int64)
    np.put_along_axis(positions, order, np.arange(order.shape[-1]), axis=-1)
    return positions


def _ordered(ranked: Ranked) -> Ranking:
    if isinstance(ranked, Mapping):
        as_ranking(ranked)  # refuses NaN and ids that are no strings
        ids = sorted(ranked, key=lambda doc_id: (-ranked[doc_id], doc_id))
        return Ranking(tuple(ids), tuple(float(ranked[doc_id]) for doc_id in ids))
    if not isinstance(ranked, Ranking) and ranked and all(isinstance(item, RunHit) for item in ranked):
        hits = [item for item in ranked if isinstance(item, RunHit)]
        return as_ranking(Ranking(tuple(h.doc_id for h in hits), tuple(h.score for h in hits)))
    return as_ranking(ranked)
