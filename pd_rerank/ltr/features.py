"""Features of the candidates of a pool: what the routes say, how they agree, and what words they share with the query.

For the routes dense, sparse and bm25 these are the NevIR study's 38 columns in its order, with its English rules
(nevir notes, section 4); other routes give the same columns under their own names.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
import numpy.typing as npt

from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.ltr import wording
from pd_rerank.pool import Pool, RouteHit
from pd_rerank.retrieval.fusion import NEVIR_PAPER, RouteRule

Matrix = npt.NDArray[np.float32]

_AGREEMENT = ("route_count", "all_routes")
_WORDS = (
    "query_length",
    "query_has_digit",
    "identifier_exact_coverage",
    "number_exact_coverage",
    "negation_overlap_coverage",
    "negation_mismatch",
    "query_bigram_coverage",
    "query_trigram_coverage",
    "condition_coverage",
    "distinctive_query_bigram_coverage",
    "same_doc_candidate_count",
    "same_doc_max_bigram_similarity",
    "content_length_log",
)
_RARE = 10
"""A query's bigram is distinctive if at most one in so many of the pool's candidates has it, rounded up."""


class FeatureMaker:
    """Computes the features of pools; one maker for many, since what it learns of a text it remembers.

    `rules` are the fusion's, in the order of the columns: their transforms shape a route's scores, their thresholds
    say which hits the fusion kept. `document_of` names the document of a candidate's id, where several candidates are
    passages of one; by default each is its own.
    """

    def __init__(
        self,
        rules: Mapping[str, RouteRule] = NEVIR_PAPER,
        *,
        document_of: Callable[[str], str] | None = None,
    ) -> None:
        if not rules:
            raise BadArgument("features are of routes; give the fusion's rules for at least one")
        self.rules = dict(rules)
        self._document_of = document_of
        self._passages: dict[str, _Passage] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The columns' names, in order."""
        routes = list(self.rules)
        pairs = list(combinations(routes, 2))
        scores = [
            f"{name}_{'log_score' if rule.transform == 'log1p' else 'score'}" for name, rule in self.rules.items()
        ]
        per_route = [f"{name}_{what}" for what in ("norm", "rr", "missing") for name in routes]
        between = [f"{a}_{b}_{what}" for what in ("overlap", "rr_gap") for a, b in pairs]
        margins = [f"{name}_top12_margin" for name in routes]
        return (*scores, *per_route, *_AGREEMENT, *between, *margins, "baseline_score", "baseline_rr", *_WORDS)

    def features(self, pool: Pool) -> Matrix:
        """The features of every candidate, (n, columns) float32, candidates in pool order.

        The pool is one of the fusion's: canonical order, every candidate with a score and the hits of its routes. A
        route without a rule, a candidate without a score, and a negative score on a log1p route are `InvalidData`.
        """
        self._check(pool)
        columns = [*self._routes(pool), *self._baseline(pool), *self._words(pool)]
        made: Matrix = np.column_stack([np.asarray(column, dtype=np.float64) for column in columns]).astype(np.float32)
        return made

    def _check(self, pool: Pool) -> None:
        for candidate in pool.candidates:
            where = f"pool '{pool.query_id}', candidate '{candidate.doc_id}'"
            if candidate.score is None:
                raise InvalidData(f"{where}: no first-stage score; features are of fused pools")
            for name, hit in candidate.routes.items():
                if name not in self.rules:
                    raise InvalidData(f"{where}: route '{name}' has no rule; rules are for {', '.join(self.rules)}")
                if hit.score < 0 and self.rules[name].transform == "log1p":
                    raise InvalidData(f"{where}: route '{name}' scores {hit.score}, and log1p is for scores from 0")

    # -- routes -------------------------------------------------------------------------------------------------

    def _routes(self, pool: Pool) -> list[npt.ArrayLike]:
        hits = {name: [c.routes.get(name) for c in pool.candidates] for name in self.rules}
        there = {name: np.array([hit is not None for hit in found], dtype=bool) for name, found in hits.items()}
        scores = {name: self._scores(name, found) for name, found in hits.items()}
        rr = {name: np.array([0.0 if hit is None else 1 / hit.rank for hit in found]) for name, found in hits.items()}
        pairs = list(combinations(self.rules, 2))
        count = np.sum([*there.values()], axis=0)
        return [
            *scores.values(),
            *(_min_max(scores[name], there[name]) for name in self.rules),
            *rr.values(),
            *(~found for found in there.values()),
            count,
            count == len(self.rules),
            *(there[a] & there[b] for a, b in pairs),
            *(np.abs(rr[a] - rr[b]) for a, b in pairs),
            *(np.full(len(pool), self._margin(name, found)) for name, found in hits.items()),
        ]

    def _scores(self, name: str, hits: Sequence[RouteHit | None]) -> npt.NDArray[np.float64]:
        return np.array([0.0 if hit is None else self._shaped(name, hit.score) for hit in hits], dtype=np.float64)

    def _shaped(self, name: str, score: float) -> float:
        return math.log1p(score) if self.rules[name].transform == "log1p" else score

    def _margin(self, name: str, hits: Sequence[RouteHit | None]) -> float:
        """How far the route's first hit is ahead of its second, as a share of the first; 0 with fewer than two."""
        best = sorted((hit for hit in hits if hit is not None), key=lambda hit: hit.rank)[:2]
        if len(best) < 2:
            return 0.0
        first, second = (self._shaped(name, hit.score) for hit in best)
        return max(0.0, first - second) / max(abs(first), 1e-9)

    def _baseline(self, pool: Pool) -> list[npt.ArrayLike]:
        """The fusion's score and the reciprocal of its rank; a candidate that no route kept has no rank, and 0."""
        kept = [
            any(rule.threshold is None or hit.score >= rule.threshold for name, rule in self.rules.items()
                if (hit := c.routes.get(name)) is not None)
            for c in pool.candidates
        ]  # fmt: skip
        # Canonical order is the fused order; a dropped candidate may tie with a kept one at 0 and stand before it.
        ranks = np.cumsum(kept)
        return [
            [0.0 if c.score is None else c.score for c in pool.candidates],
            [1 / rank if own else 0.0 for rank, own in zip(ranks.tolist(), kept, strict=True)],
        ]

    # -- words --------------------------------------------------------------------------------------------------

    def _words(self, pool: Pool) -> list[npt.ArrayLike]:
        query = _Query(pool.query)
        passages = [self._passage(text) for text in pool.texts]
        shared = [query.passage.bigrams & p.bigrams for p in passages]
        spread = Counter(bigram for found in shared for bigram in found)
        most = max(1, -(-len(passages) // _RARE))
        rare = {bigram for bigram, n in spread.items() if n <= most}
        same_count, same_similarity = self._same_document(pool, passages)
        own, n = query.passage, len(passages)
        return [
            np.full(n, len(pool.query)),
            np.full(n, query.has_digit),
            [_share(own.identifiers & p.identifiers, own.identifiers) for p in passages],
            [_share(own.numbers & p.numbers, own.numbers) for p in passages],
            [_share(own.negations & p.negations, own.negations) for p in passages],
            [_mismatch(own.negations, p.negations) for p in passages],
            [_share(found, own.bigrams) for found in shared],
            [_share(own.trigrams & p.trigrams, own.trigrams) for p in passages],
            [query.conditions(p.bigrams) for p in passages],
            [_share(found & rare, own.bigrams) for found in shared],
            same_count,
            same_similarity,
            [math.log1p(len(text)) for text in pool.texts],
        ]

    def _passage(self, text: str) -> _Passage:
        found = self._passages.get(text)
        if found is None:
            found = self._passages[text] = _Passage(text)
        return found

    def _same_document(self, pool: Pool, passages: Sequence[_Passage]) -> tuple[list[int], list[float]]:
        """How many other candidates are of the same document, and the most alike of them by bigrams (Jaccard)."""
        documents: dict[str, list[int]] = {}
        for i, doc_id in enumerate(pool.doc_ids):
            documents.setdefault(doc_id if self._document_of is None else self._document_of(doc_id), []).append(i)
        count, similarity = [0] * len(passages), [0.0] * len(passages)
        for members in documents.values():
            for i, j in combinations(members, 2):
                alike = _jaccard(passages[i].bigrams, passages[j].bigrams)
                similarity[i], similarity[j] = max(similarity[i], alike), max(similarity[j], alike)
            for i in members:
                count[i] = len(members) - 1
        return count, similarity


class _Passage:
    """What the rules find in a text, each found once."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def negations(self) -> frozenset[str]:
        return wording.negations(self.text)

    @cached_property
    def numbers(self) -> frozenset[str]:
        return wording.numbers(self.text)

    @cached_property
    def identifiers(self) -> frozenset[str]:
        return wording.identifiers(self.text)

    @cached_property
    def bigrams(self) -> frozenset[str]:
        return wording.ngrams(self.text, 2)

    @cached_property
    def trigrams(self) -> frozenset[str]:
        return wording.ngrams(self.text, 3)


class _Query:
    """A query's own side of the features."""

    def __init__(self, text: str) -> None:
        self.passage = _Passage(text)
        self.has_digit = any(char.isdigit() for char in text)
        parts = [bigrams for clause in wording.clauses(text) if (bigrams := wording.ngrams(clause, 2))]
        self._clauses = parts if len(parts) > 1 else []

    def conditions(self, bigrams: frozenset[str]) -> float:
        """The share of the query's clauses of which a passage has at least half the bigrams; 0 with one clause."""
        met = sum(2 * len(clause & bigrams) >= len(clause) for clause in self._clauses)
        return met / len(self._clauses) if self._clauses else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnAudit:
    """What a column is good for: whether it never varies, and whether it never varies inside a pool.

    A column that is constant within every pool tells no two candidates apart by itself; trees can still split on it.
    """

    name: str
    constant: bool
    constant_in_pools: bool


def audit(names: Sequence[str], pools: Iterable[Matrix]) -> list[ColumnAudit]:
    """Look for dead columns: `pools` are the features of pools, (n, columns) each."""
    lows, highs = np.full(len(names), np.inf), np.full(len(names), -np.inf)
    varies = np.zeros(len(names), dtype=bool)
    for matrix in pools:
        if len(matrix):
            low, high = matrix.min(axis=0), matrix.max(axis=0)
            lows, highs, varies = np.minimum(lows, low), np.maximum(highs, high), varies | (low < high)
    return [
        ColumnAudit(name=name, constant=bool(lows[i] >= highs[i]), constant_in_pools=not varies[i])
        for i, name in enumerate(names)
    ]


# -- inner parts --------------------------------------------------------------------------------------------------


def _min_max(values: npt.NDArray[np.float64], there: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Values scaled to [0, 1] over those that are there; ones where these are equal, 0 elsewhere."""
    out = np.zeros(len(values))
    found = values[there]
    if found.size:
        low, span = found.min(), found.max() - found.min()
        out[there] = (found - low) / span if span > 0 else 1.0
    return out


def _share(part: frozenset[str], whole: frozenset[str]) -> float:
    return len(part) / len(whole) if whole else 0.0


def _jaccard(a: frozenset[str], b: frozenset[str]) -> float:
    return len(a & b) / len(a | b) if a or b else 0.0


def _mismatch(query: frozenset[str], passage: frozenset[str]) -> bool:
    """Exactly one of the two negates, or the query negates with no word that the passage negates with."""
    return bool(query) != bool(passage) or (bool(query) and not query & passage)
