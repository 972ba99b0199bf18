"""Choose the weights of a weighted fusion on dev queries, and keep them in a file."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.files import manifest, read_json, write_json
from pd_rerank.retrieval.fusion import HitTable, Run, Scaled, WeightedFusion, dev_queries

Qrels = Mapping[str, Mapping[str, int]]

_METRIC = re.compile(r"(ndcg|recall|r|mrr|rr)(?:\(rel=([1-9][0-9]*)\))?@([1-9][0-9]*)(?:-l([1-9][0-9]*))?")


_FORMAT = "pd_rerank fusion weights 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights by route, and how they were found."""

    weights: Mapping[str, float]
    metric: str
    value: float
    equal_weights_value: float
    steps: int
    tried: int
    dev_queries: int

    def save(self, path: str | Path) -> None:
        """Write the weights as JSON, with how and on what they were found."""
        write_json(path, manifest({"format": _FORMAT, **asdict(self)}))

    @staticmethod
    def load(path: str | Path) -> dict[str, float]:
        """The weights by route in a file `save` wrote."""
        record = read_json(path)
        weights = record.get("weights") if isinstance(record, dict) else None
        if not isinstance(weights, dict) or not all(
            isinstance(w, int | float) and not isinstance(w, bool) for w in weights.values()
        ):
            raise InvalidData(f"{path} holds no 'weights' by route; write it with 'pd-rerank pool weights'")
        return {name: float(weight) for name, weight in weights.items()}


def simplex(routes: int, steps: int) -> Iterator[tuple[int, ...]]:
    """All ways to give `steps` equal parts to `routes` routes, as whole numbers that sum to `steps`."""
    if routes < 1 or steps < 1:
        raise BadArgument(f"a weight grid needs a route and a step at least, got {routes} and {steps}")
    for bars in itertools.combinations(range(steps + routes - 1), routes - 1):
        edges = (-1, *bars, steps + routes - 1)
        yield tuple(b - a - 1 for a, b in itertools.pairwise(edges))


def search_weights(
    runs: Mapping[str, Run],
    qrels: Qrels,
    *,
    fusion: WeightedFusion,
    dev: Collection[str],
    test: Collection[str],
    metric: str = "ndcg@10",
    steps: int = 20,
) -> Weights:
    """The best weights on a grid of whole parts of `steps`, by the mean metric over the judged dev queries.

    Thresholds, transforms and precision are those of `fusion`; its weights are not looked at. Of equally good weights
    the most even ones are taken. Where a query's only routes with hits weigh 0, its scores are all 0. A dev query
    that is one of `test` is refused.
    """
    chosen = Metric.named(metric)
    judged = Judged.of(qrels, dev_queries(qrels, dev=dev, test=test))
    table = fusion.tabulate(runs, queries=judged.queries)
    tried = _Trial(table, Scaled.of(table, fusion.rules), judged, single=fusion.precision == "float32")
    best: tuple[float, int, tuple[int, ...]] | None = None
    count = 0
    for parts in simplex(len(fusion.rules), steps):
        value = float(judged.values(chosen, tried.ranks(np.array(parts, dtype=np.float64))).mean())
        candidate = (value, -sum(p * p for p in parts), parts)
        if best is None or candidate > best:
            best = candidate
        count += 1
    assert best is not None
    equal = float(judged.values(chosen, tried.ranks(np.ones(len(fusion.rules)))).mean())
    return Weights(
        weights={name: part / steps for name, part in zip(fusion.rules, best[2], strict=True)},
        metric=str(chosen),
        value=best[0],
        equal_weights_value=equal,
        steps=steps,
        tried=count,
        dev_queries=len(judged.queries),
    )


def with_weights(fusion: WeightedFusion, weights: Mapping[str, float]) -> WeightedFusion:
    """The fusion with other weights, one for every route."""
    if set(weights) != set(fusion.rules):
        raise BadArgument(
            f"weights are for {', '.join(sorted(weights))}, the routes are {', '.join(sorted(fusion.rules))}; "
            "they must be the same"
        )
    rules = {name: replace(rule, weight=weights[name]) for name, rule in fusion.rules.items()}
    return replace(fusion, rules=rules)


# -- how good a ranking is ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Metric:
    """A measure by its name in ranx or ir_measures: `ndcg@10`, `recall@100`, `mrr@10`, `RR(rel=2)@10`, `mrr@10-l2`.

    nDCG's gain is the grade and its discount log2(1 + rank), as in trec_eval; recall and reciprocal rank count grades
    from `level` as relevant.
    """

    kind: str
    cutoff: int
    level: int = 1

    @classmethod
    def named(cls, name: str) -> Metric:
        """The metric a name means."""
        found = _METRIC.fullmatch(name.lower())
        if found is None:
            raise BadArgument(
                f"weights cannot be chosen by '{name}'; write ndcg@10, recall@100 or mrr@10, and mrr@10-l2 for "
                "grades from 2"
            )
        kind = {"r": "recall", "rr": "mrr"}.get(found[1], found[1])
        return cls(kind, int(found[3]), int(found[2] or found[4] or 1))

    def __str__(self) -> str:
        return f"{self.kind}@{self.cutoff}" + (f"-l{self.level}" if self.level > 1 else "")


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """The relevant documents of some queries in flat arrays: each one's query (as a number) and grade."""

    queries: list[str]
    doc_ids: list[str]
    query: NDArray[np.int64]
    grade: NDArray[np.int64]

    @classmethod
    def of(cls, qrels: Qrels, queries: Sequence[str] | None = None) -> Judged:
        """The queries with a relevant document, of `queries` or of all judged."""
        chosen = [q for q in (qrels if queries is None else queries) if any(g > 0 for g in qrels.get(q, {}).values())]
        if not chosen:
            raise InvalidData("no query has a relevant document in the qrels; are they of another collection?")
        rows = [(i, d, g) for i, q in enumerate(chosen) for d, g in qrels[q].items() if g > 0]
        return cls(
            chosen, [d for _, d, _ in rows], np.array([i for i, _, _ in rows]), np.array([g for _, _, g in rows])
        )

    def values(self, metric: Metric, ranks: NDArray[np.int64]) -> NDArray[np.float64]:
        """The metric per query, from each relevant document's rank (from 1; 0: not ranked)."""
        n = len(self.queries)
        found = (ranks > 0) & (ranks <= metric.cutoff)
        safe = np.maximum(ranks, 1)
        if metric.kind == "ndcg":
            gains = np.bincount(self.query, self.grade / np.log2(1.0 + safe) * found, n)
            value: NDArray[np.float64] = gains / self._ideal(metric.cutoff)
            return value
        relevant = self.grade >= metric.level
        if metric.kind == "recall":
            wanted = np.bincount(self.query, relevant, n)
            share: NDArray[np.float64] = np.bincount(self.query, relevant & found, n) / np.maximum(wanted, 1)
            return share
        best = np.zeros(n)
        np.maximum.at(best, self.query, (relevant & found) / safe)
        return best

    def _ideal(self, cutoff: int) -> NDArray[np.float64]:
        order = np.lexsort((-self.grade, self.query))
        query = self.query[order]
        rank = np.arange(len(query)) - np.searchsorted(query, query) + 1
        gains = self.grade[order] / np.log2(1.0 + rank) * (rank <= cutoff)
        ideal: NDArray[np.float64] = np.bincount(query, gains, len(self.queries)).astype(np.float64)
        return ideal


class _Trial:
    """Ranks of the relevant documents under any weights: by counting who scores higher, without sorting."""

    def __init__(self, table: HitTable, scaled: Scaled, judged: Judged, *, single: bool) -> None:
        self._table, self._scaled, self._single = table, scaled, single
        self._kept = None if single else scaled.kept(table)
        places = [{d: i for i, d in enumerate(names)} for names in table.names]
        at = [places[q].get(d, -1) for q, d in zip(judged.query.tolist(), judged.doc_ids, strict=True)]
        self._found = np.array(at) >= 0
        self._row = judged.query[self._found]
        self._column = np.array(at)[self._found]
        self._real = table.real
        # Of documents with equal scores, those whose id comes first in order.
        self._before = np.zeros((len(self._row), table.width), dtype=bool)
        for i, (row, column) in enumerate(zip(self._row.tolist(), self._column.tolist(), strict=True)):
            names = table.names[row]
            self._before[i, : len(names)] = [name < names[column] for name in names]

    def ranks(self, weights: NDArray[np.float64]) -> NDArray[np.int64]:
        """Each relevant document's rank from 1, 0 where no route found it."""
        shares, _ = self._scaled.shares(weights)
        keys = self._scaled.fused(self._table, shares)
        if self._single:
            keys = keys.astype(np.float32).astype(np.float64)
        if self._kept is not None:
            keys = np.where(self._kept, keys, -1.0)
        keys = np.where(self._real, keys, -2.0)[self._row]
        own = np.take_along_axis(keys, self._column[:, None], axis=1)
        above = (keys > own) | ((keys == own) & self._before)
        ranks = np.zeros(len(self._found), dtype=np.int64)
        ranks[self._found] = above.sum(axis=1) + 1
        return ranks
