"""A small collection of contrast pairs written for this project: what a study is tried out on before real data.

Sentences are put together from short lists, so that every query has a passage that answers it and one that says the
opposite, and the other groups' passages are the background. Three plain scorers stand in for retrieval. What a ranker
does here says that the machinery works and nothing about the ranker.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from pd_rerank.files import write_jsonl, write_run

_PLACES = (
    "harbour", "hillside", "riverside", "market", "old town", "northern", "garden", "station", "island", "meadow",
    "canal", "mountain",
)  # fmt: skip
_THINGS = ("museum", "bakery", "library", "swimming pool", "workshop", "theatre", "clinic", "school")
_CLAIMS = (
    (
        "is open on Monday",
        "is not open on Monday",
        "is open on every day, Monday included",
        "is open on every day except Monday",
    ),
    (
        "sells season tickets",
        "never sells season tickets",
        "has sold season tickets since spring",
        "never began to sell season tickets",
    ),
    (
        "can be reached by tram 14",
        "cannot be reached by tram 14",
        "lies on the line of tram 14",
        "cannot be reached by tram, not even by tram 14",
    ),
    (
        "lends out bicycles",
        "doesn't lend out bicycles",
        "lends out bicycles without a deposit",
        "lends out skates but no bicycles",
    ),
    (
        "was repaired in 1998",
        "wasn't repaired in 1998",
        "wasn't closed while it was repaired in 1998",
        "was repaired in 2003 and never before",
    ),
    (
        "works with volunteers",
        "works without volunteers",
        "would not work without its volunteers",
        "works with paid staff alone",
    ),
)
"""What is asked, its negation, what the passage that meets the first says, and what the other one says."""

_ASIDES = (
    "Its front door faces the square, and visitors gather there in the afternoon.",
    "A narrow street leads to it, past the fountain and the two lime trees.",
    "Many people of the neighbourhood know it well, but few know who built it.",
    "On rainy days the hall is full, and the staff serve tea.",
)

_DEPTHS = {"dense": 60, "sparse": 20, "bm25": 40}

POOLS = """\
# Written beside the pairs: three plain scorers' runs, fused with the study's weights.
topics: {folder}/topics.jsonl
corpus: {folder}/corpus.jsonl
qrels: {folder}/qrels.txt
output: {folder}/pools
precision: float32
routes:
  dense: {{type: run, path: {folder}/dense.trec, depth: 60, weight: 0.70, threshold: 0.05}}
  sparse: {{type: run, path: {folder}/sparse.trec, depth: 20, weight: 0.15, threshold: 0.20, transform: log1p}}
  bm25: {{type: run, path: {folder}/bm25.trec, depth: 40, weight: 0.15, threshold: 0.0, transform: log1p}}
"""


def write_templates(folder: Path, groups: int) -> tuple[Path, Path]:
    """Write pairs.jsonl (two pairs for each of `groups` sources), the routes' runs and pools.yaml; return both files.

    The same number gives the same bytes. There are words for 96 groups at most.
    """
    pairs = [pair for group in range(min(groups, len(_PLACES) * len(_THINGS))) for pair in _pairs(group)]
    write_jsonl(folder / "pairs.jsonl", pairs)
    passages = sorted({pair[doc] for pair in pairs for doc in ("doc1", "doc2")})
    queries = {f"{pair['id']}:{q}": pair[q] for pair in pairs for q in ("q1", "q2")}
    for name, scorer in (("dense", _Shapes), ("sparse", _Stems), ("bm25", _Words)):
        scored = scorer(passages)
        write_run(
            folder / f"{name}.trec",
            [(query_id, scored.best(query)[: _DEPTHS[name]]) for query_id, query in queries.items()],
            tag=name,
        )
    config = folder / "pools.yaml"
    config.write_text(POOLS.format(folder=folder.as_posix()), encoding="utf-8")
    return folder / "pairs.jsonl", config


def _pairs(group: int) -> list[dict[str, str]]:
    place, thing = list(product(_PLACES, _THINGS))[group * 37 % (len(_PLACES) * len(_THINGS))]
    found = []
    for k in range(2):
        asked, denied, meets, fails = _CLAIMS[(group + 3 * k) % len(_CLAIMS)]
        aside = _ASIDES[(group + k) % len(_ASIDES)]
        found.append(
            {
                "id": f"t{group:03}-{k}",
                "q1": f"Which {place} {thing} {asked}?",
                "q2": f"Which {place} {thing} {denied}?",
                "doc1": f"The {place} {thing} {meets}. {aside}",
                "doc2": f"The {place} {thing} {fails}. {aside}",
            }
        )
    return found


class _Words:
    """Passages scored by the words they share with a query, rare ones more; like BM25 without lengths."""

    def __init__(self, passages: Sequence[str]) -> None:
        from pd_rerank.studies.collections import passage_id

        self.ids = [passage_id(text) for text in passages]
        self.counts = [Counter(self.units(text)) for text in passages]
        spread = Counter(unit for count in self.counts for unit in count)
        self.weight = {unit: math.log(1 + len(passages) / n) for unit, n in spread.items()}
        self.lengths = [self.length(count) for count in self.counts]

    def units(self, text: str) -> list[str]:
        return re.findall(r"\w+", text.lower())

    def score(self, query: Counter[str], passage: Counter[str]) -> float:
        return sum(self.weight.get(unit, 0.0) for unit in query if unit in passage)

    def length(self, count: Counter[str]) -> float:
        return 1.0

    def best(self, query: str) -> list[tuple[str, float]]:
        """Ids and scores above 0, best first, ties by id."""
        asked = Counter(self.units(query))
        long = self.length(asked) or 1.0  # nothing in it is known, and every score 0
        scored = [
            (doc_id, round(self.score(asked, count) / (long * length), 6))
            for doc_id, count, length in zip(self.ids, self.counts, self.lengths, strict=True)
        ]
        return sorted(((doc_id, score) for doc_id, score in scored if score > 0), key=lambda item: (-item[1], item[0]))


class _Stems(_Words):
    """The same by the first four letters of words, and by how often."""

    def units(self, text: str) -> list[str]:
        return [word[:4] for word in super().units(text)]

    def score(self, query: Counter[str], passage: Counter[str]) -> float:
        return sum(self.weight.get(unit, 0.0) * math.log1p(passage[unit]) for unit in query if unit in passage)


class _Shapes(_Words):
    """The cosine of weighted character trigrams."""

    def units(self, text: str) -> list[str]:
        line = f" {' '.join(super().units(text))} "
        return [line[i : i + 3] for i in range(len(line) - 2)]

    def score(self, query: Counter[str], passage: Counter[str]) -> float:
        return sum(n * passage[unit] * self.weight.get(unit, 0.0) ** 2 for unit, n in query.items() if unit in passage)

    def length(self, count: Counter[str]) -> float:
        return math.sqrt(sum((n * self.weight.get(unit, 0.0)) ** 2 for unit, n in count.items()))
