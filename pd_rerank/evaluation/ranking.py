"""Ranking quality through ranx, with trec_eval's results, and what a figure means beside the pool it was earned on.

ranx's own metric functions compute every value. What this module adds is their input, so that none of the ways ranx can
go wrong is open: queries are aligned with the judgements, ties are broken as trec_eval breaks them, a query without
results counts 0 and is listed, nothing the caller gave is changed, and a small evaluation is not compiled first.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
import numpy.typing as npt

from pd_rerank._extras import need
from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.files import RunHit
from pd_rerank.pool import Pool
from pd_rerank.scores import Readout, ScoreTable, SlotResidual

Values = npt.NDArray[np.float64]
Qrels = Mapping[str, Mapping[str, int]]

EXPONENTIAL = "nDCG(dcg='exp-log2')"

_RANX = {
    "nDCG": "ndcg",
    EXPONENTIAL: "ndcg_burges",
    "RR": "mrr",
    "AP": "map",
    "R": "recall",
    "P": "precision",
    "Success": "hit_rate",
    "Rprec": "r-precision",
}

_FAMILIES = {
    "ndcg": "nDCG",
    "ndcg_cut": "nDCG",
    "ndcg_burges": EXPONENTIAL,
    "rr": "RR",
    "mrr": "RR",
    "recip_rank": "RR",
    "ap": "AP",
    "map": "AP",
    "map_cut": "AP",
    "r": "R",
    "recall": "R",
    "p": "P",
    "precision": "P",
    "success": "Success",
    "hit_rate": "Success",
    "rprec": "Rprec",
    "r-precision": "Rprec",
}

_SPELLING = re.compile(
    r"(?P<family>[A-Za-z]+(?:[_-][A-Za-z]+)*?)"
    r"(?:\((?P<options>[^()]*)\))?"
    r"(?:(?:@|[_.](?=\d))(?P<cutoff>\d{1,9}))?"
    r"(?:-l(?P<level>\d{1,9}))?"
)

_PLAIN = 50_000
"""Rankings times metrics that ranx's functions compute as plain Python (about 0.2 ms each) rather than compiled: numba
takes about 10 s of CPU time to compile nDCG and 3 s for each other metric before the first value."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A ranking metric: its family, the rank it is cut at, and the grade from which a document is relevant.

    `str()` is the canonical, ir_measures' spelling: `nDCG@10`, `AP(rel=2)@100`, `RR`. `cutoff` None is the whole
    ranking. nDCG has linear gain (trec_eval's), or 2^grade - 1 as `nDCG(dcg='exp-log2')`; grades below `rel` gain
    nothing.
    """

    family: str
    cutoff: int | None = None
    rel: int = 1

    def __post_init__(self) -> None:
        if self.family not in _RANX:
            raise BadArgument(f"unknown metric '{self.family}'; known are {', '.join(_RANX)}")
        if self.cutoff is not None and self.cutoff < 1:
            raise BadArgument(f"{self.family}: the cut-off is a rank from 1 on, got {self.cutoff}")
        if self.rel < 1:
            raise BadArgument(f"{self.family}: the relevance level is a grade from 1 on, got {self.rel}")
        if self.family == "Rprec" and self.cutoff is not None:
            raise BadArgument("Rprec is cut at the number of relevant documents; give it no cut-off")

    @classmethod
    def parse(cls, text: str) -> Metric:
        """Read a metric as ranx (`ndcg@10`, `map@100-l2`), ir_measures (`AP(rel=2)@100`) or trec_eval
        (`ndcg_cut_10`) spells it; upper and lower case are alike.
        """
        found = _SPELLING.fullmatch(text.strip())
        family = _FAMILIES.get(found["family"].lower()) if found else None
        if not found or family is None:
            raise BadArgument(f"unknown metric '{text}'; write nDCG@10, RR@10, AP(rel=2), R@100, P@5 or as ranx does")
        level = found["level"]
        for option in filter(None, (part.strip() for part in (found["options"] or "").split(","))):
            name, _, value = (part.strip() for part in option.partition("="))
            if name == "rel" and value.isdecimal() and level is None:
                level = value
            elif name == "dcg" and family == "nDCG" and value.strip("'\"") in {"log2", "exp-log2"}:
                family = EXPONENTIAL if value.strip("'\"") == "exp-log2" else family
            else:
                raise BadArgument(
                    f"metric '{text}': unknown option '{option}'; rel=2 and, for nDCG, dcg='exp-log2' exist"
                )
        return cls(family, int(found["cutoff"]) if found["cutoff"] else None, int(level) if level else 1)

    def __str__(self) -> str:
        family, options = self.family, f"rel={self.rel}" if self.rel > 1 else ""
        if options and family == EXPONENTIAL:
            family, options = "nDCG", f"dcg='exp-log2',{options}"
        return family + (f"({options})" if options else "") + (f"@{self.cutoff}" if self.cutoff else "")

    @property
    def ranx(self) -> str:
        """The same metric as ranx spells it."""
        level = f"-l{self.rel}" if self.rel > 1 else ""
        return _RANX[self.family] + (f"@{self.cutoff}" if self.cutoff else "") + level


@dataclass(frozen=True, slots=True)
class Ranking:
    """One query's documents from best to worst, with the scores that ordered them where there are any.

    Equal neighbours among `scores` are ties; how they were broken is the maker's rule, see `trec` and `served`.
    """

    doc_ids: tuple[str, ...]
    scores: tuple[float, ...] | None = None

    @classmethod
    def trec(cls, scored: Mapping[str, float] | Iterable[RunHit]) -> Ranking:
        """Order as trec_eval does: scores in single precision descending, ties by document id *descending*.

        Ids compare by their UTF-8 bytes. A score that is NaN and a document twice are `InvalidData`.
        """
        hits = scored.items() if isinstance(scored, Mapping) else [(hit.doc_id, hit.score) for hit in scored]
        doc_ids, scores = [doc_id for doc_id, _ in hits], [float(score) for _, score in hits]
        _check_ids(doc_ids)
        if any(map(math.isnan, scores)):
            bad = next(doc_id for doc_id, score in zip(doc_ids, scores, strict=True) if math.isnan(score))
            raise InvalidData(f"document '{bad}' has the score NaN; give it a number or leave it out")
        with np.errstate(over="ignore"):
            single = np.array(scores, dtype=np.float32).tolist()
        ordered = sorted(zip(single, doc_ids, strict=True), reverse=True)
        return cls(tuple(doc_id for _, doc_id in ordered), tuple(score for score, _ in ordered))

    @classmethod
    def served(
        cls, table: ScoreTable, readout: Readout = "expected", *, residual: SlotResidual | None = None
    ) -> Ranking:
        """The ranking a reranker serves from a score table: mean score descending, ties by document id *ascending*.

        Candidates without any grade come last, tied with each other.
        """
        mean = table.mean(readout, residual=residual)
        order = table.ranking(readout, residual=residual)
        scores = np.where(np.isnan(mean), -np.inf, mean)[order]
        return cls(tuple(table.doc_ids[i] for i in order), tuple(scores.tolist()))

    @classmethod
    def first_stage(cls, pool: Pool) -> Ranking:
        """The first stage's ranking of a pool: by its scores, see `trec`, or as given where one is missing."""
        scores = {c.doc_id: c.score for c in pool.candidates if c.score is not None}
        return cls.trec(scores) if len(scores) == len(pool) else cls(pool.doc_ids)


Ranked = Ranking | Mapping[str, float] | Sequence[RunHit] | Sequence[str]
"""One query's result: a `Ranking`; scores or run hits, ordered by `Ranking.trec`; or document ids, best first."""

Run = Mapping[str, Ranked]


def as_ranking(ranked: Ranked) -> Ranking:
    """`ranked` as a `Ranking`: scores and run hits in trec_eval's order, a sequence of ids as it stands."""
    if isinstance(ranked, Ranking):
        _check_ids(ranked.doc_ids)
        return ranked
    if isinstance(ranked, Mapping):
        return Ranking.trec(ranked)
    if isinstance(ranked, str):
        raise InvalidData(f"'{ranked}' is one id, a sequence of ids is wanted")
    hits = [item for item in ranked if isinstance(item, RunHit)]
    if hits and len(hits) == len(ranked):
        return Ranking.trec(hits)
    _check_ids(ranked)
    return Ranking(tuple(item for item in ranked if isinstance(item, str)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingOutcome:
    """One query under one metric, with what the figure leaves open.

    `value` is the metric. `oracle` is the same metric had the pool's documents stood in the ideal order: what a
    reranker of this pool could reach at most; `pool_recall` the share of the query's relevant documents that are in
    the pool at all (0 without any relevant). `unjudged` is the share of documents above the cut-off without a
    judgement (absent or negative), NaN without results. `tied` is the share of neighbours above or at the cut-off
    with equal scores, NaN where there are no neighbours or no scores; `low` and `high` are the metric with all ties
    broken against and for the system. `first_stage` is the metric of the first stage's ranking, NaN where none was
    given. `retrieved` counts the documents ranked: 0 is a query without results, which counts 0.
    """

    query_id: str
    metric: Metric
    value: float
    oracle: float
    pool_recall: float
    unjudged: float
    tied: float
    low: float
    high: float
    first_stage: float
    retrieved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingSummary:
    """One metric over all judged queries: means of the outcomes' fields.

    `value`, `oracle`, `pool_recall`, `low`, `high` and `first_stage` are means over all `n` judged queries, with 0 for
    those without results; `unjudged` and `tied` over the queries where they are defined. `of_oracle` is value / oracle.
    """

    metric: Metric
    value: float
    oracle: float
    of_oracle: float
    pool_recall: float
    unjudged: float
    tied: float
    low: float
    high: float
    first_stage: float
    n: int
    empty: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingResult:
    """Outcomes query by query in the judgements' order, metric by metric within a query; and what was left out.

    `empty` names the judged queries without results (they count 0), `ignored` the queries of the run that nobody
    judged.
    """

    outcomes: tuple[RankingOutcome, ...]
    empty: tuple[str, ...]
    ignored: tuple[str, ...]

    def values(self, metric: Metric | str) -> dict[str, float]:
        """The metric's value by query id, in the judgements' order."""
        wanted = Metric.parse(metric) if isinstance(metric, str) else metric
        found = {o.query_id: o.value for o in self.outcomes if o.metric == wanted}
        if not found:
            raise BadArgument(f"{wanted} was not evaluated; it is none of {', '.join(map(str, self._metrics()))}")
        return found

    def summary(self) -> list[RankingSummary]:
        """One row per metric."""
        return [self._row(metric) for metric in self._metrics()]

    def _metrics(self) -> list[Metric]:
        return list(dict.fromkeys(outcome.metric for outcome in self.outcomes))

    def _row(self, metric: Metric) -> RankingSummary:
        mine = [outcome for outcome in self.outcomes if outcome.metric == metric]

        def mean(name: str) -> float:
            there = [value for value in (getattr(o, name) for o in mine) if not math.isnan(value)]
            return math.fsum(there) / len(there) if there else math.nan

        value, oracle = mean("value"), mean("oracle")
        return RankingSummary(
            metric=metric,
            value=value,
            oracle=oracle,
            of_oracle=value / oracle if oracle else math.nan,
            pool_recall=mean("pool_recall"),
            unjudged=mean("unjudged"),
            tied=mean("tied"),
            low=mean("low"),
            high=mean("high"),
            first_stage=mean("first_stage"),
            n=len(mine),
            empty=self.empty,
        )


def evaluate(
    qrels: Qrels,
    run: Run,
    metrics: Iterable[Metric | str],
    *,
    pools: Mapping[str, Iterable[str]] | None = None,
    first_stage: Run | None = None,
) -> RankingResult:
    """Evaluate a run against judgements, query by query, with the ceiling its pool sets.

    Every judged query counts: one the run lacks, or holds without documents, has the value 0 and is named in `empty`.
    `pools` gives each query's pool as document ids (default: the documents the run ranks). `first_stage` is the run
    that was reranked; a query it lacks counts 0 there. Values equal trec_eval's with `-c`, for `rel=2` with `-l 2`;
    see `Ranking.trec` for ties. Nothing given is changed. A run none of whose queries is judged is `InvalidData`.

    Example: q1 has a relevant document A (grade 3) and B (1). The run scores C .9, A .5, X .5. X is above A, as "X" >
    "A". nDCG@10 = (3/log2(4)) / (3/log2(2) + 1/log2(3)) = 1.5 / 3.6309 = .4131. The tie could put A second: `high` =
    1.8928 / 3.6309 = .5213, `low` = `value`. `oracle` = 3 / 3.6309 = .8262, for B is not in the pool; `pool_recall`
    .5.
    """
    wanted = list(dict.fromkeys(Metric.parse(m) if isinstance(m, str) else m for m in metrics))
    if not wanted:
        raise BadArgument("no metric given; name at least one, such as nDCG@10")
    rankings = _rankings(run, qrels, what="the run")
    first = None if first_stage is None else _rankings(first_stage, qrels, what="the first stage")
    cells = _Cells()
    rows = []
    for query_id, judged in qrels.items():
        ranking = rankings.get(query_id, Ranking(()))
        pool = _pool_ids(pools, query_id, ranking)
        query = cells.query(judged)
        value = cells.add(query, ranking.doc_ids)
        oracle = cells.add(query, sorted(pool, key=lambda d: -query.grades.get(d, 0)))
        low, high = value, value
        if any(_ties(ranking, None)):
            low = cells.add(query, _rebroken(ranking, query.grades, sign=1))
            high = cells.add(query, _rebroken(ranking, query.grades, sign=-1))
        before = None if first is None else cells.add(query, first.get(query_id, Ranking(())).doc_ids)
        rows.append((query_id, ranking, judged, pool, value, oracle, low, high, before))
    values = cells.values(wanted)
    outcomes = [
        RankingOutcome(
            query_id=query_id,
            metric=metric,
            value=float(values[value, m]),
            oracle=float(values[oracle, m]),
            pool_recall=_pool_recall(pool, judged, metric.rel),
            unjudged=_unjudged(ranking, judged, metric.cutoff),
            tied=_tie_rate(ranking, metric.cutoff),
            low=float(values[low, m]),
            high=float(values[high, m]),
            first_stage=math.nan if before is None else float(values[before, m]),
            retrieved=len(ranking.doc_ids),
        )
        for query_id, ranking, judged, pool, value, oracle, low, high, before in rows
        for m, metric in enumerate(wanted)
    ]
    return RankingResult(
        outcomes=tuple(outcomes),
        empty=tuple(query_id for query_id, ranking, *_ in rows if not ranking.doc_ids),
        ignored=tuple(query_id for query_id in run if query_id not in qrels),
    )


def measure(qrels: Qrels, run: Run, metrics: Iterable[Metric | str]) -> Values:
    """The bare values, (queries in the judgements' order, metrics); a query without results has 0.

    The same computation as `evaluate`, for those who need no more than the array.
    """
    wanted = [Metric.parse(m) if isinstance(m, str) else m for m in metrics]
    rankings = _rankings(run, qrels, what="the run")
    cells = _Cells()
    for query_id, judged in qrels.items():
        cells.add(cells.query(judged), rankings.get(query_id, Ranking(())).doc_ids)
    return cells.values(wanted)


# -- what ranx is given --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Query:
    grades: Mapping[str, int]
    numbers: Mapping[str, int]
    qrel: Values


class _Cells:
    """Rankings beside their judgements, as ranx's functions take them: pairs of float arrays [[number, grade], …].

    Documents are numbered within their query, relevant ones from 0 by grade descending (ranx takes the ideal order from
    the judgements' order) and all others one above them: exact, where ranx's hashed ids are rounded to doubles, and
    outside the range ranx scans for matches.
    """

    def __init__(self) -> None:
        self._qrels: list[Values] = []
        self._runs: list[Values] = []

    def query(self, judged: Mapping[str, int]) -> _Query:
        grades = {doc_id: grade for doc_id, grade in judged.items() if grade > 0}
        relevant = sorted(grades, key=lambda doc_id: (-grades[doc_id], doc_id))
        numbers = {doc_id: i for i, doc_id in enumerate(relevant)}
        pairs = [[i, grades[doc_id]] for i, doc_id in enumerate(relevant)]
        return _Query(grades, numbers, np.array(pairs, dtype=np.float64).reshape(-1, 2))

    def add(self, query: _Query, doc_ids: Sequence[str]) -> int:
        """Add one ranking; returns its row in `values`."""
        other = len(query.numbers)
        run = np.zeros((len(doc_ids), 2))
        run[:, 0] = [query.numbers.get(doc_id, other) for doc_id in doc_ids]
        self._qrels.append(query.qrel)
        self._runs.append(run)
        return len(self._runs) - 1

    def values(self, metrics: Sequence[Metric]) -> Values:
        """Each ranking's value under each metric, (rankings, metrics), computed by ranx's functions."""
        known = need("ranx.metrics", extra="eval", purpose="ranking metrics need ranx")
        out = np.zeros((len(self._runs), len(metrics)))
        if not out.size:
            return out
        compiled = out.size > _PLAIN
        qrels, runs = (_typed(self._qrels), _typed(self._runs)) if compiled else (self._qrels, self._runs)
        plain: dict[Any, Callable[..., Any]] = {}
        with warnings.catch_warnings():
            # numba warns while it compiles ranx that a loop counter changes sign; nothing of ours can.
            warnings.filterwarnings("ignore", message="unsafe cast from uint64 to int64")
            for m, metric in enumerate(metrics):
                function = known.metric_switch(_RANX[metric.family])
                function = function if compiled else _plain(function, plain)
                out[:, m] = function(qrels, runs, metric.cutoff or 0, metric.rel)
        return out


def _plain(function: Any, made: dict[Any, Callable[..., Any]]) -> Callable[..., Any]:
    """A ranx metric function as plain Python: its own code, with the compiled functions it calls replaced alike.

    ranx marks its functions for compilation when it is imported. Switching numba's compiler off would do so for the
    whole process; this leaves ranx and numba as they are.
    """
    source = getattr(function, "py_func", function)
    if source not in made:
        scope = dict(source.__globals__)
        copy = FunctionType(source.__code__, scope, source.__name__, source.__defaults__, source.__closure__)
        copy.__kwdefaults__ = source.__kwdefaults__
        made[source] = copy
        for name in source.__code__.co_names:
            called = scope.get(name)
            if callable(called) and str(getattr(called, "__module__", "")).startswith("ranx."):
                scope[name] = _plain(called, made)
    return made[source]


def _typed(arrays: list[Values]) -> Any:
    return need("numba.typed", extra="eval").List(arrays)


# -- rankings, pools, ties -----------------------------------------------------------------------------------


def _rankings(run: Run, qrels: Qrels, *, what: str) -> dict[str, Ranking]:
    if not qrels:
        raise InvalidData("the judgements hold no query; there is nothing to evaluate against")
    if run and not any(query_id in qrels for query_id in run):
        raise InvalidData(
            f"none of the {len(run)} queries of {what} is among the {len(qrels)} judged ones "
            f"(first '{next(iter(run))}' and '{next(iter(qrels))}'); check that both use the same query ids"
        )
    rankings = {}
    for query_id in qrels:
        if query_id not in run:
            continue
        try:
            rankings[query_id] = as_ranking(run[query_id])
        except InvalidData as error:
            raise InvalidData(f"{what}, query '{query_id}': {error}") from error
    return rankings


def _check_ids(doc_ids: Sequence[Any]) -> None:
    for doc_id in doc_ids:
        if not isinstance(doc_id, str):
            raise InvalidData(f"document id {doc_id!r} is a {type(doc_id).__name__}; ids are strings")
    if len(set(doc_ids)) < len(doc_ids):
        seen: set[str] = set()
        twice = next(d for d in doc_ids if d in seen or seen.add(d))  # type: ignore[func-returns-value]
        raise InvalidData(f"document '{twice}' is ranked twice; keep one of them")


def _pool_ids(pools: Mapping[str, Iterable[str]] | None, query_id: str, ranking: Ranking) -> Sequence[str]:
    if pools is None:
        return ranking.doc_ids
    pool = dict.fromkeys(pools.get(query_id, ()))
    outside = [doc_id for doc_id in ranking.doc_ids if doc_id not in pool]
    if outside:
        raise InvalidData(
            f"query '{query_id}': the run ranks '{outside[0]}', which its pool of {len(pool)} does not hold; "
            "give the pools this run was made from"
        )
    return tuple(pool)


def _pool_recall(pool: Sequence[str], judged: Mapping[str, int], rel: int) -> float:
    relevant = sum(grade >= rel for grade in judged.values())
    return sum(judged.get(doc_id, 0) >= rel for doc_id in pool) / relevant if relevant else 0.0


def _ties(ranking: Ranking, cutoff: int | None) -> list[bool]:
    """For each neighbouring pair that begins above the cut-off, whether its two scores are equal."""
    if ranking.scores is None:
        return []
    scores = ranking.scores
    pairs = len(scores) - 1 if cutoff is None else min(cutoff, len(scores) - 1)
    return [scores[i] == scores[i + 1] for i in range(pairs)]


def _tie_rate(ranking: Ranking, cutoff: int | None) -> float:
    ties = _ties(ranking, cutoff)
    return sum(ties) / len(ties) if ties else math.nan


def _rebroken(ranking: Ranking, grades: Mapping[str, int], *, sign: int) -> list[str]:
    """The ranking with its ties broken by grade, ascending for sign 1 and descending for -1."""
    assert ranking.scores is not None
    order = sorted(
        zip(ranking.scores, ranking.doc_ids, strict=True), key=lambda pair: (-pair[0], sign * grades.get(pair[1], 0))
    )
    return [doc_id for _, doc_id in order]


def _unjudged(ranking: Ranking, judged: Mapping[str, int], cutoff: int | None) -> float:
    top = ranking.doc_ids[:cutoff]
    return sum(judged.get(doc_id, -1) < 0 for doc_id in top) / len(top) if top else math.nan
