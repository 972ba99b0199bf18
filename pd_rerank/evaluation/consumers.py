"""What those who use a ranking make of its reordering: the chosen response, the pair, the answer, the verdict.

A decision is whatever a presentation led to: a document id, a (chosen, rejected) pair, a normalised answer, a
verdict. A flip rate says how often two presentations lead to different ones. A decision that is missing (None) agrees
with nothing, another missing one included: it is a counted failure, never an absence.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pd_rerank.errors import InvalidData
from pd_rerank.files import QUERY_ID_FIELDS, identifier, read_jsonl

Ranks = npt.NDArray[np.integer[Any]]
Indices = npt.NDArray[np.int64]

Verdict = Literal["SUPPORTED", "REFUTED", "NEI", "INVALID"]
Crossing = Literal["all", "none", "some"]


# -- flips ---------------------------------------------------------------------------------------------------


def pairwise_flip(decisions: Sequence[Hashable | None]) -> float:
    """The share of pairs of presentations whose decisions differ: (M/(M-1)) · (1 - Σ_v p_v²), p_v the share of v.

    The headline estimate. NaN with fewer than two presentations. Source: method, 5.4.

    Example: seven times a, twice b, once c: (10/9)(1 - .49 - .04 - .01) = .5111; five and five: .5556.
    """
    m = len(decisions)
    if m < 2:
        return math.nan
    agreeing = sum(count * (count - 1) for count in _counts(decisions).values())
    return 1 - agreeing / (m * (m - 1))


def modal_flip(decisions: Sequence[Hashable | None]) -> float:
    """The share of presentations whose decision is not the most frequent one, 1 - max_v p_v.

    The second estimate; for rare flips about half the pairwise one. NaN with fewer than two presentations.

    Example: seven times a, twice b, once c: .3; five and five: .5.
    """
    m = len(decisions)
    return 1 - max(_counts(decisions).values(), default=0) / m if m > 1 else math.nan


def _counts(decisions: Sequence[Hashable | None]) -> Counter[Hashable]:
    return Counter(decision for decision in decisions if decision is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipOutcome:
    """One query's decisions under its presentations, with both flip estimates; `missing` counts those lacking."""

    query_id: str
    decisions: tuple[Hashable | None, ...]
    pairwise: float
    modal: float
    missing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipSummary:
    """Flip rates averaged over the `n` queries with at least two presentations; `undefined` names the others.

    `missing` counts the decisions lacking over all queries; `flipping` is the share of queries with any flip.
    """

    pairwise: float
    modal: float
    flipping: float
    n: int
    missing: int
    undefined: tuple[str, ...]


def flips(decisions: Mapping[str, Sequence[Hashable | None]]) -> list[FlipOutcome]:
    """One record per query from its decisions, one per presentation. All kinds of flips are this, see `chosen`, `ends`,
    `normalise_answer`, `read_verdict`.
    """
    return [
        FlipOutcome(
            query_id=query_id,
            decisions=tuple(made),
            pairwise=pairwise_flip(made),
            modal=modal_flip(made),
            missing=sum(decision is None for decision in made),
        )
        for query_id, made in decisions.items()
    ]


def summarise_flips(outcomes: Sequence[FlipOutcome]) -> FlipSummary:
    """Means over queries; NaN where no query has two presentations."""
    there = [outcome for outcome in outcomes if not math.isnan(outcome.pairwise)]
    return FlipSummary(
        pairwise=_mean(outcome.pairwise for outcome in there),
        modal=_mean(outcome.modal for outcome in there),
        flipping=_mean(float(outcome.pairwise > 0) for outcome in there),
        n=len(there),
        missing=sum(outcome.missing for outcome in outcomes),
        undefined=tuple(outcome.query_id for outcome in outcomes if math.isnan(outcome.pairwise)),
    )


# -- chosen responses and pairs --------------------------------------------------------------------------------


def chosen(ranks: Ranks) -> Indices:
    """The candidate each presentation ranks first, ranks (K, n) -> (K,); -1 where it ranks none.

    Flips of these are selection flips. Ties were broken when the ranks were made (by document id).
    """
    r = np.asarray(ranks)
    if not r.shape[1]:
        return np.full(len(r), -1, dtype=np.int64)
    first = np.where(r < 0, r.shape[1], r).argmin(axis=1)
    return np.where((r >= 0).any(axis=1), first, -1).astype(np.int64)


def ends(ranks: Ranks) -> Indices:
    """The candidates each presentation ranks first and last, ranks (K, n) -> (K, 2): what preference training takes as
    chosen and rejected. -1, -1 where a presentation ranks fewer than two. Flips of these are pair flips.

    Example: rankings ABCD, ABDC, BACD give (A,D), (A,C), (B,D): pairwise flip 1, modal .6667. Source: method, 5.4.
    """
    r = np.asarray(ranks)
    if r.shape[1] < 2:
        return np.full((len(r), 2), -1, dtype=np.int64)
    both = np.stack([chosen(r), r.argmax(axis=1)], axis=1)
    return np.where(((r >= 0).sum(axis=1) >= 2)[:, None], both, -1).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionOutcome:
    """One query's chosen candidates against their gold grades.

    `quality`: mean over presentations of the chosen one's grade / the best grade (0 where none is positive, and for a
    presentation without a choice). `quality_flip`: pairwise flip of the chosen one's *grade*, which a move between
    equally good candidates does not raise. `gold`: whether the choice has the best grade under all, none or some of
    the presentations ("none" too where no grade is positive); "some" is a query that crosses the gold label.
    `accuracy`: the share of presentations where it has.
    """

    query_id: str
    selection_flip: float
    pair_flip: float
    quality: float
    quality_flip: float
    gold: Crossing
    accuracy: float


def selection(query_id: str, ranks: Ranks, grades: npt.ArrayLike) -> SelectionOutcome:
    """What presentations choose, ranks (K, n), against grades (n,), higher is better; K at least 1.

    Example: rankings ABCD, ABDC, BACD with grades A 3, B 2, D 1, C 0: chosen A, A, B; selection flip .6667; quality
    (1 + 1 + 2/3)/3 = .8889; gold agrees under some, accuracy .6667. Source: method, 5.4.
    """
    r, g = np.asarray(ranks), np.asarray(grades, dtype=np.float64)
    if not len(r) or r.shape[1] != len(g):
        raise InvalidData(f"query '{query_id}': ranks of shape {r.shape} and {len(g)} grades")
    first = chosen(r)
    best = float(g.max()) if len(g) else 0.0
    grade = [float(g[i]) if i >= 0 else None for i in first]
    hits = [value is not None and value == best > 0 for value in grade]
    return SelectionOutcome(
        query_id=query_id,
        selection_flip=pairwise_flip(_or_none(first.tolist())),
        pair_flip=pairwise_flip([None if a < 0 else (a, b) for a, b in ends(r).tolist()]),
        quality=_mean(0.0 if value is None or best <= 0 else value / best for value in grade),
        quality_flip=pairwise_flip(grade),
        gold="all" if all(hits) else "some" if any(hits) else "none",
        accuracy=sum(hits) / len(hits),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossingSummary:
    """How the choice meets the gold label over queries.

    `all`, `none`, `some` are shares of queries and add up to 1; `flips_on_crossing` is the share of the pair flips that
    falls on the queries that cross (NaN without flips).
    """

    all: float
    none: float
    some: float
    flips_on_crossing: float
    accuracy: float
    quality: float
    n: int


def gold_crossing(outcomes: Sequence[SelectionOutcome]) -> CrossingSummary:
    """Shares of queries whose choice agrees with gold under all, none and some presentations."""
    n = len(outcomes)
    counts = Counter(outcome.gold for outcome in outcomes)
    flipped = [(o.gold, o.pair_flip) for o in outcomes if not math.isnan(o.pair_flip)]
    total = math.fsum(flip for _, flip in flipped)
    crossing = math.fsum(flip for gold, flip in flipped if gold == "some")
    return CrossingSummary(
        all=counts["all"] / n if n else math.nan,
        none=counts["none"] / n if n else math.nan,
        some=counts["some"] / n if n else math.nan,
        flips_on_crossing=crossing / total if total else math.nan,
        accuracy=_mean(outcome.accuracy for outcome in outcomes),
        quality=_mean(outcome.quality for outcome in outcomes),
        n=n,
    )


def _or_none(indices: Sequence[int]) -> list[int | None]:
    return [None if i < 0 else i for i in indices]


# -- answers -------------------------------------------------------------------------------------------------

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_TAG = re.compile(r"\s*(?:final\s+|short\s+)?answers?\s*[:=]\s*", re.IGNORECASE)


def first_line(output: str) -> str:
    """A reader's answer: the first line of its output that is not blank, without a leading "Answer:"."""
    line = next((line for line in output.splitlines() if line.strip()), "")
    tag = _TAG.match(line)
    return (line[tag.end() :] if tag else line).strip()


def normalise_answer(answer: str) -> str:
    """An answer as SQuAD compares it: lower case, without ASCII punctuation and the words a, an, the; single spaces.

    Example: " The Eiffel-Tower!" becomes "eiffeltower". Source: method, 5.4.
    """
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, gold: Iterable[str]) -> float:
    """1 where the normalised answer equals a normalised gold answer, else 0; 0 without gold."""
    mine = normalise_answer(answer)
    return float(any(mine == normalise_answer(one) for one in gold))


def answer_f1(answer: str, gold: Iterable[str]) -> float:
    """The best token F1 of the normalised answer against a gold answer, as SQuAD computes it; 0 without gold.

    With common = the multiset of shared tokens: F1 = 2·common / (tokens of the answer + tokens of the gold). Where
    either is empty it is 1 if both are. Example: "in Paris, France" against "Paris": 2·1/(3+1) = .5.
    """
    return max((_token_f1(normalise_answer(answer), normalise_answer(one)) for one in gold), default=0.0)


def _token_f1(mine: str, gold: str) -> float:
    a, b = mine.split(), gold.split()
    if not a or not b:
        return float(a == b)
    return 2 * sum((Counter(a) & Counter(b)).values()) / (len(a) + len(b))


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOutcome:
    """One query's answers: their flips after normalisation, and EM and F1, mean over presentations (missing counts 0).

    `exact` and `f1` are NaN without gold answers; `gold` tells whether EM holds under all, none or some presentations.
    """

    query_id: str
    pairwise: float
    modal: float
    missing: int
    exact: float
    f1: float
    gold: Crossing | None


def answer_flips(
    answers: Mapping[str, Sequence[str | None]], gold: Mapping[str, Sequence[str]] | None = None
) -> list[AnswerOutcome]:
    """One record per query from its reader's outputs, one per presentation, None where one is missing.

    Answers are the first line of an output, normalised. `gold` gives the accepted answers; a query it lacks is
    `InvalidData`. Source: method, 5.4.
    """
    if gold is not None:
        lacking = [query_id for query_id in answers if query_id not in gold]
        if lacking:
            raise InvalidData(f"{len(lacking)} of {len(answers)} queries have no gold answer, first '{lacking[0]}'")
    outcomes = []
    for query_id, outputs in answers.items():
        made = [None if output is None else normalise_answer(first_line(output)) for output in outputs]
        exact, f1, crossing = math.nan, math.nan, None
        if gold is not None and made:
            hits = [0.0 if a is None else exact_match(a, gold[query_id]) for a in made]
            exact, crossing = _mean(hits), _crossing(hits)
            f1 = _mean(0.0 if a is None else answer_f1(a, gold[query_id]) for a in made)
        outcomes.append(
            AnswerOutcome(
                query_id=query_id,
                pairwise=pairwise_flip(made),
                modal=modal_flip(made),
                missing=sum(a is None for a in made),
                exact=exact,
                f1=f1,
                gold=crossing,
            )
        )
    return outcomes


# -- verdicts ------------------------------------------------------------------------------------------------

_VERDICTS = {
    "support": "SUPPORTED",
    "supports": "SUPPORTED",
    "supported": "SUPPORTED",
    "refute": "REFUTED",
    "refutes": "REFUTED",
    "refuted": "REFUTED",
    "nei": "NEI",
    "not enough info": "NEI",
    "not enough information": "NEI",
}


def read_verdict(output: str) -> Verdict:
    """A verdict: the first line of an output, without "Answer:", case, underscores and outer punctuation, or INVALID.

    Known are SUPPORTED/SUPPORTS, REFUTED/REFUTES and NEI/NOT ENOUGH INFO. INVALID is a category of its own: two invalid
    outputs agree. Source: method, 5.4.
    """
    words = " ".join(first_line(output).lower().replace("_", " ").strip(string.punctuation + " ").split())
    return _VERDICTS.get(words, "INVALID")  # type: ignore[return-value]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictOutcome:
    """One claim's verdicts, their flips, and the share of presentations with the gold verdict (a missing one is wrong).

    Without gold labels `accuracy` is NaN and `gold` None.
    """

    query_id: str
    verdicts: tuple[Verdict | None, ...]
    pairwise: float
    modal: float
    missing: int
    invalid: int
    accuracy: float
    gold: Crossing | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictResult:
    """Outcomes claim by claim, and the claims left out because people dispute them."""

    outcomes: tuple[VerdictOutcome, ...]
    disputed: tuple[str, ...]


def verdict_flips(outputs: Mapping[str, Sequence[str | None]], gold: Mapping[str, str] | None = None) -> VerdictResult:
    """One record per claim from its reader's outputs, one per presentation, None where one is missing.

    Claims whose `gold` label is DISPUTED are left out and named; a claim without a label, or with one that is no
    verdict, is `InvalidData`. Source: method, 5.4.
    """
    disputed, outcomes = [], []
    for query_id, said in outputs.items():
        label: Verdict | None = None
        if gold is not None:
            if gold.get(query_id, "").strip().upper() == "DISPUTED":
                disputed.append(query_id)
                continue
            label = read_verdict(gold.get(query_id, ""))
            if label == "INVALID":
                raise InvalidData(
                    f"claim '{query_id}': label {gold.get(query_id)!r} is none of SUPPORTED, REFUTED, NEI, DISPUTED"
                )
        verdicts = tuple(None if output is None else read_verdict(output) for output in said)
        hits = [float(verdict == label) for verdict in verdicts]
        outcomes.append(
            VerdictOutcome(
                query_id=query_id,
                verdicts=verdicts,
                pairwise=pairwise_flip(verdicts),
                modal=modal_flip(verdicts),
                missing=sum(verdict is None for verdict in verdicts),
                invalid=sum(verdict == "INVALID" for verdict in verdicts),
                accuracy=math.nan if label is None else _mean(hits),
                gold=None if label is None or not hits else _crossing(hits),
            )
        )
    return VerdictResult(outcomes=tuple(outcomes), disputed=tuple(disputed))


def _crossing(hits: Sequence[float]) -> Crossing:
    return "all" if all(hits) else "some" if any(hits) else "none"


# -- saved outputs -------------------------------------------------------------------------------------------


def read_outputs(path: str | Path) -> dict[str, list[str | None]]:
    """A reader's saved outputs by query, from JSON lines `{"query_id", "presentation", "answer"}`.

    Presentations count from 0. Every query gets as many as the file's highest says; one that is not there, or whose
    answer is null, is None: a failure that counts. The same (query, presentation) twice is `InvalidData`, with its
    line.
    """
    found: dict[str, dict[int, str | None]] = {}
    for where, record in read_jsonl(path):
        query_id = identifier(record, ("claim_id", *QUERY_ID_FIELDS), where=where)
        number, answer = record.get("presentation"), record.get("answer")
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise InvalidData(f"{where}: 'presentation' is {number!r}; presentations are counted 0, 1, 2, …")
        if "answer" not in record or not isinstance(answer, str | None):
            raise InvalidData(f"{where}: 'answer' is {answer!r}; write the reader's output as a string, or null")
        mine = found.setdefault(query_id, {})
        if number in mine:
            raise InvalidData(f"{where}: query '{query_id}' has presentation {number} twice; keep one of them")
        mine[number] = answer
    if not found:
        raise InvalidData(f"{path} holds no outputs")
    count = 1 + max(max(mine) for mine in found.values())
    return {query_id: [mine.get(number) for number in range(count)] for query_id, mine in found.items()}


def _mean(values: Iterable[float]) -> float:
    there = list(values)
    return math.fsum(there) / len(there) if there else math.nan
