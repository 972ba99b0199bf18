"""Fuse the hits of several routes into one ranking per query: frozen weights, reciprocal ranks, or any ranx method.

A run is a mapping from query to a mapping from document to score; what a route did not find is absent. Every fusion
here orders by (-score, document id), so that neither tied scores nor the order of the input decide anything.
"""

from __future__ import annotations

import difflib
import gc
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from pd_rerank._extras import need
from pd_rerank.errors import BadArgument, EngineFailure, InvalidData
from pd_rerank.files import read_json

Run = Mapping[str, Mapping[str, float]]

Transform = Literal["raw", "log1p"]
Precision = Literal["float64", "float32"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Names = NDArray[np.object_]
"""Document ids; an array, since the garbage collector walks through lists and tuples of them."""


class Ranking(NamedTuple):
    """A query's documents in fused order and their scores; those no route kept stand last with score 0."""

    doc_ids: tuple[str, ...]
    scores: Floats


class Fusion(Protocol):
    """A way to fuse runs."""

    def fuse(self, runs: Mapping[str, Run], *, queries: Sequence[str] | None = None) -> dict[str, Ranking]:
        """Fuse the runs of named routes; `queries` sets which and in what order, default all that any route has."""
        ...

    def describe(self) -> dict[str, Any]:
        """Its settings, as plain values."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRule:
    """How one route enters a weighted fusion: hits below `threshold` add nothing, the others are transformed first."""

    weight: float = 1.0
    threshold: float | None = None
    transform: Transform = "raw"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise BadArgument(f"a route's weight is a number from 0, got {self.weight}")
        if self.threshold is not None and math.isnan(self.threshold):
            raise BadArgument("a route's threshold is a number, got nan; leave it out to keep every hit")
        if self.transform not in get_args(Transform):
            raise BadArgument(f"unknown transform '{self.transform}'; choose raw or log1p")


NEVIR_PAPER: Mapping[str, RouteRule] = {
    "dense": RouteRule(weight=0.70, threshold=0.30),
    "sparse": RouteRule(weight=0.15, threshold=0.20, transform="log1p"),
    "bm25": RouteRule(weight=0.15, threshold=0.0, transform="log1p"),
}
"""The frozen fusion of "Preference is not position" (2026), fitted on another corpus and left alone since."""

NEVIR_DEPTHS: Mapping[str, int] = {"dense": 150, "sparse": 50, "bm25": 100}
"""How many hits that paper collects per route."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedFusion:
    """A weighted sum of scores min–max scaled per query and route.

    Per route: hits with score >= threshold are kept, transformed, and scaled to [0, 1] over the kept ones; a single
    hit or equal scores become ones. The weights are divided by their sum over the routes that kept a hit. A document
    gets the sum over the routes that kept it; a document all its routes dropped is ranked last with score 0.
    `precision="float32"` rounds the sums to single precision, which ties a survivor at 0 with a dropped document, as
    the paper's own scores do. A negative score on a log1p route, a score that is no finite number, and a query whose
    routes with hits all weigh 0 are `InvalidData`. Source: "Preference is not position" (2026), fixed fusion.
    """

    rules: Mapping[str, RouteRule]
    precision: Precision = "float64"

    def __post_init__(self) -> None:
        if not self.rules:
            raise BadArgument("a fusion needs at least one route")
        if self.precision not in get_args(Precision):
            raise BadArgument(f"unknown precision '{self.precision}'; choose float64 or float32")

    def fuse(self, runs: Mapping[str, Run], *, queries: Sequence[str] | None = None) -> dict[str, Ranking]:
        """Fuse `runs`, one for each of the rules."""
        with _uncollected():
            table = self.tabulate(runs, queries=queries)
            scaled = Scaled.of(table, self.rules)
            return table.rankings(*self.scores(table, scaled))

    def tabulate(self, runs: Mapping[str, Run], *, queries: Sequence[str] | None = None) -> HitTable:
        """The hits of `runs` as arrays, routes in the order of the rules."""
        if set(runs) != set(self.rules):
            raise BadArgument(
                f"fusion has rules for {_listed(self.rules)} and got runs of {_listed(runs)}; they must be the same"
            )
        return HitTable.of({name: runs[name] for name in self.rules}, queries=queries)

    def scores(self, table: HitTable, scaled: Scaled) -> tuple[Floats, Bools | None]:
        """Fused scores, a row per query, and which documents some route kept (None: it makes no difference)."""
        weights = np.array([rule.weight for rule in self.rules.values()])
        shares, total = scaled.shares(weights)
        idle = scaled.active.any(axis=1) & (total <= 0)
        if idle.any():
            query = int(np.flatnonzero(idle)[0])
            names = [name for name, on in zip(self.rules, scaled.active[query], strict=True) if on]
            raise InvalidData(
                f"query '{table.queries[query]}': of its routes only {_listed(names)} have hits, and they weigh 0; "
                "give one of them a weight"
            )
        fused = scaled.fused(table, shares)
        if self.precision == "float32":
            return fused.astype(np.float32).astype(np.float64), None
        return fused, scaled.kept(table)

    def describe(self) -> dict[str, Any]:
        """Its settings, as plain values."""
        rules = {name: asdict(rule) for name, rule in self.rules.items()}
        return {"method": "weighted", "precision": self.precision, "rules": rules}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReciprocalRank:
    """The sum of weight / (k + rank) over the routes that found a document, ranks from 1, absent 0 (Cormack 2009)."""

    k: float = 60
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.k) and self.k >= 0):
            raise BadArgument(f"k of reciprocal rank fusion is a number from 0, got {self.k}")

    def fuse(self, runs: Mapping[str, Run], *, queries: Sequence[str] | None = None) -> dict[str, Ranking]:
        """Fuse `runs`; a route without a weight weighs 1."""
        if unknown := set(self.weights) - set(runs):
            raise BadArgument(f"weights for {_listed(unknown)}, but the runs are of {_listed(runs)}")
        ordered = {name: {q: _in_order(hits) for q, hits in run.items()} for name, run in runs.items()}
        table = HitTable.of(ordered, queries=queries)
        first = np.repeat(table.starts, table.lengths.ravel())
        ranks = np.arange(1, len(table.scores) + 1) - first
        weights = np.array([self.weights.get(name, 1.0) for name in runs])
        return table.rankings(table.sums(table.spread(weights) / (self.k + ranks)), None)

    def describe(self) -> dict[str, Any]:
        """Its settings, as plain values."""
        return {"method": "rrf", "k": self.k, "weights": dict(self.weights)}


# -- hits as arrays -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class HitTable:
    """The hits of R routes for Q queries, query by query and in it route by route.

    `names[query]` lists the documents of a query, each once, and `column` is a hit's place there; `segment` is a
    hit's query * R + route; `lengths` (Q, R) counts hits; `width` is the most documents a query has. Tables of fused
    scores are (Q, width), and `cell` is a hit's place in one of them, flat.
    """

    queries: list[str]
    names: list[Names]
    lengths: Ints
    scores: Floats
    segment: Ints
    cell: Ints
    width: int

    @classmethod
    def of(cls, runs: Mapping[str, Run], *, queries: Sequence[str] | None = None) -> HitTable:
        """Tabulate the hits of runs; a query a run lacks has no hits there. Scores must be finite numbers."""
        if not runs:
            raise BadArgument("a fusion needs at least one route")
        wanted = list(dict.fromkeys(chain.from_iterable(runs.values()) if queries is None else queries))
        none: Mapping[str, float] = {}
        routes = list(runs.values())
        lengths = np.empty((len(wanted), len(routes)), dtype=np.int64)
        names: list[Names] = []
        columns: list[Ints] = [np.empty(0, dtype=np.int64)]
        every: list[Mapping[str, float]] = []
        numbers: list[int] = []  # the same objects for every query: a number above 256 is made anew each time
        for i, query in enumerate(wanted):
            hits = [run.get(query, none) for run in routes]
            lengths[i] = counts = list(map(len, hits))
            place: dict[str, Any] = dict(hits[0])
            for found in hits[1:]:
                place.update(found)
            names.append(np.fromiter(place, dtype=object, count=len(place)))
            numbers += range(len(numbers), len(place))
            place.update(zip(place, numbers, strict=False))
            columns.append(np.arange(counts[0]))  # the first route's hits are the first names: nothing to look up
            others = map(place.__getitem__, chain.from_iterable(hits[1:]))
            columns.append(np.fromiter(others, np.int64, sum(counts) - counts[0]))
            every += hits
        total = int(lengths.sum())
        scores = np.fromiter(chain.from_iterable(found.values() for found in every), np.float64, total)
        segment = np.repeat(np.arange(lengths.size), lengths.ravel())
        width = len(numbers)
        cell = np.repeat(np.arange(len(wanted)) * width, lengths.sum(axis=1)) + np.concatenate(columns)
        table = cls(wanted, names, lengths, scores, segment, cell, width)
        wrong = np.flatnonzero(~np.isfinite(table.scores))
        if len(wrong):
            raise InvalidData(f"{table.place(int(wrong[0]), list(runs))} is no finite number; mend the route")
        return table

    def place(self, hit: int, routes: Sequence[str]) -> str:
        """Where a hit is, in words."""
        query, route = divmod(int(self.segment[hit]), len(routes))
        name = self.names[query][int(self.cell[hit]) - query * self.width]
        return f"route '{routes[route]}', query '{self.queries[query]}', document '{name}': score {self.scores[hit]}"

    @property
    def starts(self) -> Ints:
        """Where each segment begins among the hits (Q * R)."""
        return np.cumsum(self.lengths.ravel()) - self.lengths.ravel()

    @property
    def real(self) -> Bools:
        """Which cells of a (Q, width) table are documents."""
        sizes = np.fromiter(map(len, self.names), np.int64, len(self.names))
        return np.arange(self.width) < sizes[:, None]

    def spread(self, by_route: NDArray[Any]) -> NDArray[Any]:
        """What there is one of per route (R,), for each hit."""
        return np.repeat(np.tile(by_route, len(self.queries)), self.lengths.ravel())

    def sums(self, values: Floats, *, at: Ints | None = None) -> Floats:
        """Add up hits' `values` by document, in the order of the routes, as a (Q, width) table."""
        cell = self.cell if at is None else at
        flat = np.bincount(cell, weights=values, minlength=len(self.queries) * self.width)
        return flat.astype(np.float64, copy=False).reshape(len(self.queries), self.width)

    def rankings(self, scores: Floats, kept: Bools | None) -> dict[str, Ranking]:
        """Order each query's documents by (-score, id); scores are from 0. Those not `kept` come after all others."""
        keys = -scores if kept is None else np.where(kept, -scores, 1.0)
        keys[~self.real] = np.inf
        order = np.argsort(keys, axis=1)  # what it leaves open, equal keys, is settled below
        keys = np.take_along_axis(keys, order, axis=1)
        ties = (keys[:, 1:] == keys[:, :-1]) & (keys[:, 1:] <= 1.0)
        rows, edges = np.nonzero(np.diff(ties, axis=1, prepend=False, append=False))
        first = np.searchsorted(rows, np.arange(len(self.queries) + 1)).tolist()
        edge = edges.tolist()
        ranked = np.maximum(-keys, 0.0)
        found = {}
        for i, (query, names) in enumerate(zip(self.queries, self.names, strict=True)):
            ids: list[str] = names[order[i, : len(names)]].tolist()
            for e in range(first[i], first[i + 1], 2):
                tied = slice(edge[e], edge[e + 1] + 1)
                ids[tied] = sorted(ids[tied])
            found[query] = Ranking(tuple(ids), ranked[i, : len(names)])
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """The hits that passed their route's threshold: segment, cell and scaled score; `active` (Q, R): who kept any."""

    segment: Ints
    cell: Ints
    values: Floats
    active: Bools

    @classmethod
    def of(cls, table: HitTable, rules: Mapping[str, RouteRule]) -> Scaled:
        """Filter, transform and scale the hits of a table whose routes are those of `rules`, in their order."""
        segment, scores = table.segment, table.scores
        floors = [-np.inf if rule.threshold is None else rule.threshold for rule in rules.values()]
        floor = table.spread(np.array(floors, dtype=np.float64))
        logs = table.spread(np.array([rule.transform == "log1p" for rule in rules.values()]))
        negative = np.flatnonzero(logs & (scores < 0))
        if len(negative):
            place = table.place(int(negative[0]), list(rules))
            raise InvalidData(f"{place} is negative, and log1p is for scores from 0; use transform raw")
        kept = scores >= floor
        segment, cell, values, logs = segment[kept], table.cell[kept], scores[kept], logs[kept]
        # math.log1p, since numpy's differs between processors in the last bit, and pools should not.
        values[logs] = np.fromiter(map(math.log1p, values[logs].tolist()), np.float64, int(logs.sum()))
        active = np.zeros(table.lengths.size, dtype=bool)
        if len(segment):
            begin = np.flatnonzero(np.diff(segment, prepend=-1))
            low = np.minimum.reduceat(values, begin)
            span = np.maximum.reduceat(values, begin) - low
            low[span == 0] -= 1  # a constant route: (score - low) / span is then one
            lengths = np.diff(begin, append=len(segment))
            constant = np.repeat(span == 0, lengths)
            span[span == 0] = 1
            values = (values - np.repeat(low, lengths)) / np.repeat(span, lengths)
            values[constant] = 1.0
            active[segment[begin]] = True
        return cls(segment, cell, values, active.reshape(table.lengths.shape))

    def shares(self, weights: Floats) -> tuple[Floats, Floats]:
        """Each query's weights (Q, R), divided by their sum over its active routes, and that sum (Q)."""
        mine = np.where(self.active, weights, 0.0)
        total = np.zeros(len(mine))
        for column in mine.T:  # in the routes' order: a sum's last bit depends on it
            total += column
        safe = np.where(total > 0, total, 1.0)
        return mine / safe[:, None], total

    def fused(self, table: HitTable, shares: Floats) -> Floats:
        """The weighted sums, as a (Q, width) table."""
        return table.sums(shares.ravel()[self.segment] * self.values, at=self.cell)

    def kept(self, table: HitTable) -> Bools:
        """Which documents some route kept, as a (Q, width) table."""
        flat = np.zeros(len(table.queries) * table.width, dtype=bool)
        flat[self.cell] = True
        return flat.reshape(len(table.queries), table.width)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector from walking, again and again, through what is being made and none of it garbage."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _in_order(hits: Mapping[str, float]) -> dict[str, float]:
    """A query's hits by (-score, document id)."""
    return dict(sorted(hits.items(), key=lambda hit: (-hit[1], hit[0])))


# -- ranx -----------------------------------------------------------------------------------------------------

RANX_METHODS: Mapping[str, tuple[str, ...]] = {
    "anz": (),
    "bayesfuse": ("log_odds",),
    "bordafuse": (),
    "condorcet": (),
    "gmnz": ("gamma",),
    "isr": (),
    "log_isr": (),
    "logn_isr": ("sigma",),
    "mapfuse": ("map_scores",),
    "max": (),
    "med": (),
    "min": (),
    "mixed": ("weights",),
    "mnz": (),
    "posfuse": ("probs",),
    "probfuse": ("probs",),
    "rbc": ("phi",),
    "rrf": ("k",),
    "segfuse": ("probs",),
    "slidefuse": ("probs", "w"),
    "sum": (),
    "w_bordafuse": ("weights",),
    "w_condorcet": ("weights",),
    "wmnz": ("weights",),
    "wsum": ("weights",),
}
"""ranx's fusion methods and the parameters each takes."""

RANX_NORMS = ("min-max", "min-max-inverted", "max", "sum", "zmuv", "rank", "borda")

_OPTIONAL = {"k", "sigma"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RanxFusion:
    """A fusion method of ranx, by its name there, on scores normalised as ranx does it (`norm`; None: as they are).

    `params` are the method's own: `weights` in the order of the routes, `k`, `gamma`, … Those that are learned
    (`probs`, `log_odds`, `map_scores`) come from `fit`. ranx runs in a process of its own with compilation off: no
    minute of compiling, and nothing of it (numba's settings, threads) reaches the caller's process. Routes are handed
    over in canonical order, results come back in it, so tied scores decide nothing. Needs two routes or more.
    """

    method: str
    norm: str | None = "min-max"
    params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.method not in RANX_METHODS:
            near = difflib.get_close_matches(self.method, RANX_METHODS, n=3)
            cure = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(RANX_METHODS)}"
            raise BadArgument(f"ranx has no fusion method '{self.method}'; {cure}")
        if self.norm is not None and self.norm not in RANX_NORMS:
            raise BadArgument(f"ranx has no normalisation '{self.norm}'; known are {', '.join(RANX_NORMS)}")
        if unknown := set(self.params) - set(self.takes):
            takes = _listed(self.takes) or "nothing"
            raise BadArgument(f"ranx's {self.method} takes {takes}, got {_listed(unknown)}")

    @property
    def takes(self) -> tuple[str, ...]:
        """The parameters of the method."""
        return RANX_METHODS[self.method]

    def fuse(self, runs: Mapping[str, Run], *, queries: Sequence[str] | None = None) -> dict[str, Ranking]:
        """Fuse `runs` with ranx; a query without any hit gets an empty ranking."""
        if missing := set(self.takes) - set(self.params) - _OPTIONAL:
            learned = missing & {"probs", "log_odds", "map_scores"}
            cure = "learn them on dev queries with fit()" if learned else "give them"
            raise BadArgument(f"ranx's {self.method} needs {_listed(missing)}; {cure}")
        weights = self.params.get("weights")
        if weights is not None and len(weights) != len(runs):
            raise BadArgument(f"{len(weights)} weights for {len(runs)} routes ({_listed(runs)})")
        wanted = list(dict.fromkeys(chain.from_iterable(runs.values()) if queries is None else queries))
        HitTable.of(runs, queries=wanted)  # finite scores or an error that names the place
        fused = self._ask(runs, wanted, {})["fused"]
        return {query: self._ranking(query, dict(fused.get(query, ()))) for query in wanted}

    def _ranking(self, query: str, scores: Mapping[str, float]) -> Ranking:
        if wrong := [d for d, s in scores.items() if not math.isfinite(s)]:
            raise EngineFailure(f"ranx's {self.method} gave '{wrong[0]}' of query '{query}' no finite score")
        ranked = _in_order(scores)
        return Ranking(tuple(ranked), np.array(list(ranked.values()), dtype=np.float64))

    def fit(
        self,
        runs: Mapping[str, Run],
        qrels: Mapping[str, Mapping[str, int]],
        *,
        dev: Collection[str],
        test: Collection[str],
        metric: str = "ndcg@10",
    ) -> RanxFusion:
        """This method with the parameters ranx learns on dev queries; a test query among them is refused."""
        judged = dev_queries(qrels, dev=dev, test=test)
        useful = {q: {d: g for d, g in qrels[q].items() if g > 0} for q in judged}
        asked = self._ask(runs, judged, {"qrels": useful, "metric": metric})
        return RanxFusion(method=self.method, norm=self.norm, params=asked["params"])

    def _ask(self, runs: Mapping[str, Run], queries: Sequence[str], more: Mapping[str, Any]) -> dict[str, Any]:
        """Run the worker on the queries that have hits (all of them, where it is to learn)."""
        if importlib.util.find_spec("ranx") is None:  # looked for only: it is imported in the other process
            need("ranx", extra="eval", purpose=f"fusion method '{self.method}' is ranx's")
        if len(runs) < 2:
            raise BadArgument(f"ranx fuses two routes or more, got {_listed(runs)}; use the weighted fusion for one")
        some = [q for q in queries if more or any(run.get(q) for run in runs.values())]
        if not some:
            return {"fused": {}}
        routes = [{q: list(_in_order(run.get(q, {})).items()) for q in some} for run in runs.values()]
        asked = {"method": self.method, "norm": self.norm, "params": dict(self.params), "runs": routes, **more}
        with tempfile.TemporaryDirectory(prefix="pd_rerank-ranx-") as folder:
            question, answer = Path(folder) / "question.json", Path(folder) / "answer.json"
            question.write_text(json.dumps(asked), encoding="utf-8")
            # Python's hash seed decides the order of sets, which ranx's Condorcet and Borda walk through.
            env = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONHASHSEED": "0", "MPLBACKEND": "Agg"}
            command = [sys.executable, "-m", "pd_rerank.retrieval.ranx_worker", str(question), str(answer)]
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
            if done.returncode or not answer.exists():
                tail = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
                raise EngineFailure(f"ranx's {self.method} failed on {len(some)} queries: {tail[0]}")
            found: dict[str, Any] = read_json(answer)
            return found

    def describe(self) -> dict[str, Any]:
        """Its settings, as plain values."""
        return {"method": f"ranx:{self.method}", "norm": self.norm, "params": dict(self.params)}


def dev_queries(qrels: Mapping[str, Mapping[str, int]], *, dev: Collection[str], test: Collection[str]) -> list[str]:
    """The dev queries with a relevant document; one that is a test query too is refused."""
    if both := sorted(set(dev) & set(test)):
        raise BadArgument(
            f"{len(both)} of {len(set(dev))} dev queries are test queries ({_listed(both[:3])}); "
            "fit on queries that are not tested on"
        )
    judged = [q for q in dict.fromkeys(dev) if any(grade > 0 for grade in qrels.get(q, {}).values())]
    if not judged:
        raise InvalidData(f"none of the {len(dev)} dev queries has a relevant document in the qrels")
    return judged


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in (names if isinstance(names, Sequence | Mapping) else sorted(names)))
