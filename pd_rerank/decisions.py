"""Scores to decisions: which candidates are kept, at what threshold, and when more presentations cannot change it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from pd_rerank.errors import BadArgument, InvalidData, ModelMismatch, whole
from pd_rerank.files import read_json, write_json
from pd_rerank.scores import READOUTS, Readout, Scores, ScoreTable, SlotResidual

Mask = npt.NDArray[np.bool_]
Qrels = Mapping[str, Mapping[str, int]]
Objective = Literal["f1", "retention", "given"]

GRID = 41
"""Points of the threshold grid (method, section 5.3)."""


SCORED_BY = ("model", "adapter", "template_hash", "window", "calibration")
"""What scores must share for one threshold to mean the same on them."""


def scored_by(
    engine: Mapping[str, Any], prompt: Mapping[str, Any], scoring: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What `SCORED_BY` names, from what engine, prompt and scoring `describe`: a threshold's `context`.

    An adapter is known by the SHA-256 of its weights where that is recorded: trained again in its folder it keeps its
    name only, and moved it keeps its weights.
    """
    adapter = engine.get("adapter")
    if isinstance(adapter, Mapping):
        adapter = adapter.get("sha256") or adapter.get("source")
    read = {name: scoring.get(name) for name in ("window", "calibration")} if scoring else {}
    return {"model": engine.get("model"), "adapter": adapter, "template_hash": prompt.get("template_hash"), **read}


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """A score from which a candidate is kept (score >= value), fitted once and frozen.

    `objective` is "f1", "retention" or "given"; `reached` is what the objective came to on the `n_queries`
    it was fitted on; `readout` says which score it applies to; `context` records model, adapter, template, window
    and calibration (`scored_by`), which `check` compares.
    """

    value: float
    objective: Objective = "given"
    reached: float | None = None
    n_queries: int = 0
    readout: Readout = "expected"
    context: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _number(self.value) or not math.isfinite(self.value):
            raise BadArgument(f"a threshold is a finite number, got {self.value!r}")
        for name, value, known in (
            ("objective", self.objective, get_args(Objective)),
            ("readout", self.readout, READOUTS),
        ):
            if value not in known:
                raise BadArgument(f"unknown {name} {value!r} of a threshold; choose one of {', '.join(known)}")
        if self.reached is not None and not _number(self.reached):
            raise BadArgument(f"what a threshold reached is a number, got {self.reached!r}")
        if not whole(self.n_queries) or not isinstance(self.context, Mapping):
            raise BadArgument("a threshold has a whole number of queries and a mapping as context")
        # numpy's numbers too, which JSON cannot write
        object.__setattr__(self, "value", float(self.value))
        object.__setattr__(self, "reached", None if self.reached is None else float(self.reached))
        object.__setattr__(self, "n_queries", int(self.n_queries))

    def check(self, context: Mapping[str, Any]) -> None:
        """Refuse scores of another model, adapter, prompt template, window or calibration, where it records them."""
        other = [name for name in SCORED_BY if name in self.context and self.context[name] != context.get(name)]
        if other:
            told = "; ".join(f"{name} {self.context[name]} there, {context.get(name)} here" for name in other)
            raise ModelMismatch(
                f"the threshold {self.value:.4g} was fitted on other scores ({told}); fit it again on a dev split of "
                "these, or override with check_template=False (--no-check-template)"
            )

    def retain(self, scores: Scores) -> Mask:
        """Which of `scores` (any shape) are kept; a missing score (NaN) is never kept."""
        with np.errstate(invalid="ignore"):
            return np.asarray(scores >= self.value)

    @classmethod
    def fit_f1(
        cls,
        tables: Sequence[ScoreTable],
        qrels: Qrels,
        *,
        min_grade: int = 1,
        readout: Readout = "expected",
        residual: SlotResidual | None = None,
        span: tuple[float, float] | None = None,
        context: Mapping[str, Any] | None = None,
    ) -> Threshold:
        """Fit the threshold with the best mean F1 over queries; ties go to the higher value.

        Relevant are the pool's own candidates judged at `min_grade` or above. Precision is 0 for an empty set,
        recall 0 without a relevant candidate, F1 0 where both are. The grid has 41 points from the lowest to the
        highest score of `tables`, or over `span`. Source: method, section 5.3.
        """
        scores = [table.mean(readout, residual=residual) for table in tables]
        relevant = [_relevant(table, qrels, min_grade) for table in tables]
        return fit_f1(scores, relevant, span=span, readout=readout, context=context)

    @classmethod
    def fit_retention(
        cls,
        tables: Sequence[ScoreTable],
        target: float,
        *,
        readout: Readout = "expected",
        residual: SlotResidual | None = None,
        span: tuple[float, float] | None = None,
        context: Mapping[str, Any] | None = None,
    ) -> Threshold:
        """Fit the threshold whose mean share of kept candidates is nearest `target`; ties go to the higher value.

        Source: the matched-retention control of the method, section 5.3.
        """
        scores = [table.mean(readout, residual=residual) for table in tables]
        return fit_retention(scores, target, span=span, readout=readout, context=context)

    def save(self, path: str | Path) -> None:
        """Freeze to a JSON file, whole or not at all."""
        write_json(path, asdict(self))

    @classmethod
    def of(cls, given: Threshold | float | str | Path, readout: Readout) -> Threshold:
        """A threshold for scores read as `readout`: a number (one written out too), a `Threshold` or its file."""
        if isinstance(given, str):
            with suppress(ValueError):
                given = float(given)
        if _number(given):
            return cls(value=float(given), readout=readout)  # type: ignore[arg-type]
        if isinstance(given, str | Path):
            chosen, name = cls.load(given), str(given)
        elif isinstance(given, cls):
            chosen, name = given, "the threshold"
        else:
            raise BadArgument(f"a threshold is a number, a Threshold or its file, got {given!r}")
        if chosen.readout != readout:
            raise BadArgument(
                f"{name} was fitted on readout '{chosen.readout}', asked for is '{readout}'; ask for "
                f"'{chosen.readout}', or fit one anew"
            )
        return chosen

    @classmethod
    def load(cls, path: str | Path) -> Threshold:
        """Read what `save` wrote; a file of another shape is `InvalidData`."""
        data = read_json(path)
        if not isinstance(data, dict) or "value" not in data:
            raise InvalidData(f"{path} is not a threshold file: it has no number under 'value'")
        unknown = set(data) - set(cls.__dataclass_fields__)
        if unknown:
            raise InvalidData(f"{path}: unknown threshold fields {', '.join(sorted(unknown))}")
        try:
            return cls(**data)
        except BadArgument as error:
            raise InvalidData(f"{path}: {error}") from error


def fit_f1(
    scores: Sequence[Scores],
    relevant: Sequence[Mask],
    *,
    span: tuple[float, float] | None = None,
    readout: Readout = "expected",
    context: Mapping[str, Any] | None = None,
) -> Threshold:
    """`Threshold.fit_f1` of any system's scores: (n,) per query, NaN where missing, with the mask of relevant ones."""
    if [np.shape(s) for s in scores] != [np.shape(mask) for mask in relevant]:
        raise BadArgument("every query's scores need a mask of relevant candidates of the same length")
    if not any(mask.any() for mask in relevant):
        raise InvalidData(
            f"none of the {len(scores)} queries has a relevant candidate; check that qrels and scores use the same ids"
        )
    grid = _grid(scores, span)
    f1 = np.mean([_f1(s, r, grid) for s, r in zip(scores, relevant, strict=True)], axis=0)
    best = int(np.flatnonzero(f1 == f1.max())[-1])
    return Threshold(
        value=float(grid[best]),
        objective="f1",
        reached=float(f1[best]),
        n_queries=len(scores),
        readout=readout,
        context=dict(context or {}),
    )


def fit_retention(
    scores: Sequence[Scores],
    target: float,
    *,
    span: tuple[float, float] | None = None,
    readout: Readout = "expected",
    context: Mapping[str, Any] | None = None,
) -> Threshold:
    """`Threshold.fit_retention` of any system's scores: (n,) per query, NaN where missing; empty queries are left out.

    A target outside [0, 1] is `BadArgument`.
    """
    if not 0 <= target <= 1:
        raise BadArgument(f"target retention is a share between 0 and 1, got {target}")
    full = [s for s in scores if len(s)]
    grid = _grid(full, span)
    kept = np.mean([_at(grid, s).mean(axis=1) for s in full], axis=0)
    away = np.abs(kept - target)
    best = int(np.flatnonzero(away == away.min())[-1])
    return Threshold(
        value=float(grid[best]),
        objective="retention",
        reached=float(kept[best]),
        n_queries=len(full),
        readout=readout,
        context=dict(context or {}),
    )


def dev_split(query_ids: Sequence[str], *, seed: int = 20260610, share: float = 0.5) -> tuple[list[str], list[str]]:
    """Split query ids into a dev part to fit on and a test part to report on.

    Ids are sorted, shuffled with numpy's default_rng(seed), and the first max(1, round(share·n)) are dev
    (round to even). At least two queries are needed, each once, so that none is in both parts. Source: method,
    section 5.3.
    """
    if not 0 < share < 1:
        raise BadArgument(f"the dev share lies between 0 and 1, got {share}")
    if len(set(query_ids)) < len(query_ids):
        twice = next(q for i, q in enumerate(query_ids) if q in query_ids[:i])
        raise BadArgument(f"query '{twice}' comes twice; a query is in the dev part or the test part, not in both")
    if len(query_ids) < 2:
        raise BadArgument(f"a dev split needs at least two queries, got {len(query_ids)}")
    ids = np.array(sorted(query_ids), dtype=object)
    np.random.default_rng(seed).shuffle(ids)
    n = max(1, round(share * len(ids)))
    return sorted(ids[:n]), sorted(ids[n:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """When to stop spending presentations on a query: its decision is settled.

    The decision is a retained set (`threshold`, a score) or a top-k set (`top_k`; its threshold is taken halfway
    between the k-th and the next mean). After K >= `first` presentations, with m_d a candidate's mean score and s
    the pooled standard deviation of one presentation's score about the candidate's mean, the standard error is
    s/√K, and sum_d Φ(-|m_d - threshold| / (s/√K)) estimates how many candidates still stand on the wrong side.
    The decision is settled when that is at most `tolerance` times the size of the set (at least 1). A candidate
    graded in fewer than `first` presentations keeps the query open; one graded in none has no part in the decision.
    """

    threshold: float | None = None
    top_k: int | None = None
    tolerance: float = 0.05
    first: int = 2
    step: int = 1

    def __post_init__(self) -> None:
        if (self.threshold is None) == (self.top_k is None):
            raise BadArgument("give Settle either a threshold or a top_k, not both and not neither")
        if self.threshold is not None and not (_number(self.threshold) and math.isfinite(self.threshold)):
            raise BadArgument(f"the threshold of Settle is a finite number, got {self.threshold!r}")
        if self.top_k is not None and (not whole(self.top_k) or self.top_k < 1):
            raise BadArgument(f"top_k must be a whole number of at least 1, got {self.top_k!r}")
        counts = whole(self.first) and self.first >= 2 and whole(self.step) and self.step >= 1
        if not counts or not _number(self.tolerance) or not self.tolerance >= 0:
            raise BadArgument("Settle needs whole numbers first >= 2 and step >= 1, and a tolerance >= 0")

    def check(self, presentations: int) -> None:
        """Refuse a most of `presentations` that leaves nothing to save."""
        if presentations <= self.first:
            raise BadArgument(
                f"settle needs presentations of at least {self.first + 1}, the most a query may take; got "
                f"{presentations}"
            )

    def expected_changes(self, scores: Scores) -> float:
        """The expected number of candidates on the wrong side, from scores (K, n); infinite while K < first."""
        if scores.shape[0] < self.first:
            return math.inf
        mean, count = _graded(scores)
        boundary = self._boundary(mean)
        if boundary is None:
            return 0.0
        if (count < self.first).any():
            return math.inf
        scores = scores[:, ~np.isnan(scores).all(axis=0)]
        variance = float(np.mean(np.nansum((scores - mean) ** 2, axis=0) / (count - 1)))
        if variance == 0.0:
            return 0.0
        distance = np.abs(mean - boundary) / np.sqrt(variance / count)
        return float(sum(0.5 * math.erfc(d / math.sqrt(2)) for d in distance))

    def settled(self, scores: Scores) -> bool:
        """Whether the decision from scores (K, n) is settled by the stated rule."""
        mean, _ = _graded(scores)
        boundary = self._boundary(mean)
        size = 0 if boundary is None else int((mean >= boundary).sum())
        return self.expected_changes(scores) <= self.tolerance * max(1, size)

    def _boundary(self, mean: Scores) -> float | None:
        if self.threshold is not None:
            return self.threshold if mean.size else None
        assert self.top_k is not None
        if mean.size <= self.top_k:
            return None
        ordered = np.sort(mean)[::-1]
        return float((ordered[self.top_k - 1] + ordered[self.top_k]) / 2)


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _graded(scores: Scores) -> tuple[Scores, npt.NDArray[np.int64]]:
    """Mean and number of the readings there are, of the candidates that have any."""
    count = (~np.isnan(scores)).sum(axis=0)
    some = count > 0
    return np.nansum(scores[:, some], axis=0) / count[some], count[some]


def _relevant(table: ScoreTable, qrels: Qrels, min_grade: int) -> Mask:
    judged = qrels.get(table.query_id, {})
    return np.array([judged.get(doc_id, 0) >= min_grade for doc_id in table.doc_ids], dtype=bool)


def _grid(scores: Sequence[Scores], span: tuple[float, float] | None) -> Scores:
    if span is None:
        there = np.concatenate([s[~np.isnan(s)] for s in scores]) if scores else np.zeros(0)
        if there.size == 0:
            raise InvalidData("no scores to fit a threshold on; rankings without scores have none")
        span = (float(there.min()), float(there.max()))
    return np.linspace(*span, GRID)


def _at(grid: Scores, scores: Scores) -> Mask:
    """Which scores (n,) each threshold of the grid keeps, (GRID, n)."""
    with np.errstate(invalid="ignore"):
        return np.asarray(scores[None, :] >= grid[:, None])


def _f1(scores: Scores, relevant: Mask, grid: Scores) -> Scores:
    kept = _at(grid, scores)
    hits = (kept & relevant).sum(axis=1)
    total = kept.sum(axis=1) + relevant.sum()
    f1: Scores = np.divide(2.0 * hits, total, out=np.zeros(len(grid)), where=(total > 0) & (hits > 0))
    return f1
