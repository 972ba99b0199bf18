"""Pools to score tables: presentations, windows, one engine call, and the grades put back where they belong."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from pd_rerank import windows
from pd_rerank.decisions import Settle
from pd_rerank.engines.base import Engine, FloatArray, Progress, WindowPrompt
from pd_rerank.errors import BadArgument, EngineFailure, whole
from pd_rerank.pool import Pool
from pd_rerank.prompt import ChatSheet, Prompt, PromptSheet
from pd_rerank.scores import Readout, Scores, ScoreTable, SlotResidual, grade_probabilities, window_widths

logger = logging.getLogger("pd_rerank")

Shuffle = Literal["pool", "window"]
Calibration = Literal["none", "capcal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How pools are shown to the model.

    `window` candidates stand in one prompt, cut by `partition`. `order` arranges a pool before that: as given,
    reversed, or canonically (by content, so that arrival order cannot matter). With `presentations` K = 1 that
    arrangement is shown; with K > 1 it is shuffled K times with seeds `seed` … `seed`+K-1, the whole pool
    (`shuffle="pool"`) or inside each window (`"window"`). `calibration="capcal"` corrects grade probabilities by
    a prompt of empty documents.
    """

    window: int = 20
    partition: windows.Partition = "round_robin"
    order: windows.Arrangement = "given"
    presentations: int = 1
    seed: int = 0
    shuffle: Shuffle = "pool"
    calibration: Calibration = "none"

    def __post_init__(self) -> None:
        for name in ("window", "presentations", "seed"):
            value = getattr(self, name)
            if not whole(value) or (value < 1 and name != "seed"):
                least = "" if name == "seed" else " of at least 1"
                raise BadArgument(f"{name} must be a whole number{least}, got {value!r}")
            object.__setattr__(self, name, int(value))  # numpy's too, which JSON cannot write
        for name, known in (
            ("partition", windows.PARTITIONS),
            ("order", windows.ARRANGEMENTS),
            ("shuffle", get_args(Shuffle)),
            ("calibration", get_args(Calibration)),
        ):
            if getattr(self, name) not in known:
                raise BadArgument(f"unknown {name} '{getattr(self, name)}'; choose one of {', '.join(known)}")

    def note_card(self, card: Mapping[str, Any], *, where: str) -> None:
        """Warn where an adapter's card (`reranker.json`) says it was trained in other windows than are shown here."""
        for name, here in (("window", self.window), ("partition", self.partition)):
            trained = card.get(name)
            if trained is not None and trained != here and not (name == "partition" and self.window == 1):
                logger.warning("%s was trained with %s %s and is served with %s", where, name, trained, here)

    def describe(self) -> dict[str, Any]:
        """Return the settings as plain values, for manifests."""
        return asdict(self)


def score_pools(
    pools: Sequence[Pool],
    *,
    engine: Engine,
    prompt: Prompt,
    scoring: Scoring,
    settle: Settle | None = None,
    readout: Readout = "expected",
    residual: SlotResidual | None = None,
    progress: Progress | None = None,
) -> list[ScoreTable]:
    """Grade every candidate of every pool in every presentation; one table per pool, in order.

    All windows of all presentations of all pools are rendered first and go to the engine in one call; windows that
    come out the same (single-candidate windows of every presentation do) are computed once. Blank documents are
    not shown: they hold grade 0 by rule. A grade the engine could not give stays NaN and is marked in `fallback`.

    With `settle`, a query stops being presented once its decision is settled: presentations are spent in rounds
    (`settle.first`, then `settle.step` more, up to `scoring.presentations`), each round one engine call for the
    queries still open. `table.presentations` says how many a query took. `readout` and `residual` say which score
    the decision is about.
    """
    if settle is not None:
        settle.check(scoring.presentations)
    plans = [_Plan(pool, prompt=prompt, scoring=scoring, max_tokens=engine.max_length) for pool in pools]
    if settle is None:
        _read(plans, range(scoring.presentations), engine, prompt, progress)
        return [plan.table() for plan in plans]
    open_plans, done = plans, 0
    while open_plans and done < scoring.presentations:
        upto = min(settle.first if done == 0 else done + settle.step, scoring.presentations)
        _read(open_plans, range(done, upto), engine, prompt, progress)
        done = upto
        open_plans = [p for p in open_plans if not settle.settled(p.table().scores(readout, residual=residual))]
    return [plan.table() for plan in plans]


class _Plan:
    """One pool on its way through: its sheet, its presentations, and the grades read so far."""

    def __init__(self, pool: Pool, *, prompt: Prompt, scoring: Scoring, max_tokens: int) -> None:
        self.pool = pool
        self.scoring = scoring
        self.sheet: PromptSheet | ChatSheet = prompt.sheet(
            pool.query, pool.texts, width=scoring.window, max_tokens=max_tokens
        )
        self.grades: list[FloatArray] = []
        self.window: list[npt.NDArray[np.int32]] = []
        self.slot: list[npt.NDArray[np.int32]] = []
        self.probes: dict[int, FloatArray] = {}
        self._count = len(prompt.grade_ids)
        self._keys = windows.content_keys(pool.query, pool.texts, pool.doc_ids)
        n = len(pool)
        arrange = {"given": windows.identity, "reverse": windows.reverse}.get(scoring.order)
        self._base = arrange(n) if arrange else windows.canonical(self._keys)

    def presentation(self, k: int) -> list[npt.NDArray[np.int64]]:
        """The windows of presentation k, as pool positions in the order shown."""
        scoring = self.scoring
        order = self._base
        if scoring.presentations > 1 and scoring.shuffle == "pool":
            order = order[windows.permutation(len(order), seed=scoring.seed + k)]
        order = order[~self.sheet.blank[order]]
        cut = windows.partition(order, width=self.sheet.width, method=scoring.partition, keys=self._keys)
        if scoring.presentations > 1 and scoring.shuffle == "window":
            base, query = scoring.seed + k, self.pool.query_id
            cut = [windows.within_window(w, base=base, query_id=query, index=i) for i, w in enumerate(cut)]
        return cut

    def place(self, cut: Sequence[npt.NDArray[np.int64]], read: Sequence[FloatArray]) -> None:
        """Put one presentation's grades back in pool order."""
        n = len(self.pool)
        grades = np.full((n, self._count), -np.inf, dtype=np.float32)
        grades[:, 0] = 0.0
        window = np.full(n, -1, dtype=np.int32)
        slot = np.full(n, -1, dtype=np.int32)
        for w, (positions, values) in enumerate(zip(cut, read, strict=True)):
            grades[positions] = values
            window[positions] = w
            slot[positions] = np.arange(len(positions))
        self.grades.append(grades)
        self.window.append(window)
        self.slot.append(slot)

    def table(self) -> ScoreTable:
        """What has been read so far, as a score table."""
        grades, window, slot = np.stack(self.grades), np.stack(self.window), np.stack(self.slot)
        if self.scoring.calibration == "capcal" and grades.size:
            grades = _calibrated(grades, window, slot, self.probes)
        # One missing grade of four leaves no expected grade: the whole reading is missing.
        fallback: npt.NDArray[np.bool_] = np.asarray(np.isnan(grades).any(axis=-1))
        grades[fallback] = np.nan
        return ScoreTable(
            query_id=self.pool.query_id,
            doc_ids=self.pool.doc_ids,
            grades=grades,
            fallback=fallback,
            window=window,
            slot=slot,
            cut=self.sheet.cut,
        )


def _read(plans: Sequence[_Plan], ks: range, engine: Engine, prompt: Prompt, progress: Progress | None) -> None:
    """Render presentations `ks` of every plan, ask the engine once, and put the grades back."""
    prompts: list[WindowPrompt] = []
    wanted: list[tuple[_Plan, list[list[npt.NDArray[np.int64]]], list[list[int]], dict[int, int]]] = []
    for plan in plans:
        known: dict[bytes, int] = {}
        cuts = [plan.presentation(k) for k in ks]
        where: list[list[int]] = []
        for cut in cuts:
            where.append([])
            for positions in cut:
                key = positions.tobytes()
                if key not in known:
                    known[key] = len(prompts)
                    prompts.append(plan.sheet.window(positions))
                where[-1].append(known[key])
        probes = {}
        if plan.scoring.calibration == "capcal":
            for n in {len(positions) for cut in cuts for positions in cut} - set(plan.probes):
                probes[n] = len(prompts)
                prompts.append(plan.sheet.empty(n))
        wanted.append((plan, cuts, where, probes))
    read = _ask(engine, prompts, prompt.grade_ids, progress) if prompts else []
    for plan, cuts, where, probes in wanted:
        plan.probes.update({n: read[i] for n, i in probes.items()})
        for cut, places in zip(cuts, where, strict=True):
            plan.place(cut, [read[i] for i in places])


def _ask(
    engine: Engine, prompts: Sequence[WindowPrompt], grade_ids: Sequence[int], progress: Progress | None
) -> list[FloatArray]:
    """Call the engine and hold it to its contract."""
    read = engine.grade_logits(prompts, grade_ids, progress=progress)
    if len(read) != len(prompts):
        raise EngineFailure(f"engine '{engine.name}' returned {len(read)} results for {len(prompts)} prompts")
    for values, prompt in zip(read, prompts, strict=True):
        if np.shape(values) != (len(prompt.slots), len(grade_ids)):
            raise EngineFailure(
                f"engine '{engine.name}' returned grades of shape {np.shape(values)} for a window of "
                f"{len(prompt.slots)} candidates and {len(grade_ids)} grades"
            )
    if blind := sum(len(values) > 1 and bool((np.isfinite(values) & (values == values[0])).all()) for values in read):
        # A template that drops the documents, or a model that does not see them, looks like this.
        logger.warning("in %d of %d windows every document got exactly the same grades", blind, len(read))
    return read


def _calibrated(
    grades: FloatArray,
    window: npt.NDArray[np.int32],
    slot: npt.NDArray[np.int32],
    probes: dict[int, FloatArray],
) -> FloatArray:
    """CapCal: take off what a prompt of empty documents says at the same slot, the more the less sure the grade is.

    p' = p - H(p) · (p_probe - 1/G), clipped at 1e-8 and renormalised; H in nats. Slots and widths come
    from the partition. Returns log-probabilities. Source: method, section 4.4.
    """
    p = grade_probabilities(grades)
    widths = window_widths(window)
    reference = np.full_like(p, 1.0 / p.shape[-1])
    for width, logits in probes.items():
        here = (slot >= 0) & (widths == width)
        reference[here] = grade_probabilities(logits)[slot[here]]
    with np.errstate(divide="ignore"):
        log_p: Scores = np.log(capcal(p, reference))
    log_p[slot < 0] = grades[slot < 0]
    return log_p.astype(np.float32)


def capcal(p: Scores, probe: Scores, *, strength: float = 1.0, adaptive: bool = True) -> Scores:
    """Grade probabilities `p` (…, G) corrected by those of empty documents at the same slots, `probe` (…, G).

    `adaptive` scales the correction by the entropy of p, so that sure grades move little. Source: method, 4.4.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(p > 0, p * np.log(p), 0.0).sum(axis=-1, keepdims=True)
    weight = strength * (entropy if adaptive else 1.0)
    moved: Scores = np.maximum(p - weight * (probe - 1.0 / p.shape[-1]), 1e-8)
    calibrated: Scores = moved / moved.sum(axis=-1, keepdims=True)
    return calibrated
