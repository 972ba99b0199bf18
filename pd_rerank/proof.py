"""What must hold between a model, its tokenizer and a prompt before its grades mean anything, tried on a probe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pd_rerank.engines.base import Engine, FloatArray, WindowPrompt
from pd_rerank.prompt import ChatPrompt, GradePrompt, Prompt
from pd_rerank.scores import Scores, grade_probabilities, read_out

_QUERY = "how long do bees live"
_TEXTS = (
    "A worker bee lives about six weeks in summer and several months in winter; a queen lives two to five years.",
    "The ferry to the island leaves at nine.",
    "Bees visit flowers for nectar and pollen. " * 6 + "What they bring home feeds the hive until the flowers return.",
    "Honey keeps for decades when the jar stays closed and dry.",
)
"""A probe whose documents differ in length and in what they say."""

EXACT, HALF = 1e-4, 5e-2
"""How far scores of two ways to compute the same may be apart: in single precision, in half precision.

Rounding alone moved scores of a 135M model in bfloat16 by up to 0.035 on a CPU; a wrong slot or mask moves them more.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One statement about a model and what trying it showed; `passed` is None where it is only worth knowing."""

    name: str
    passed: bool | None
    detail: str


def prove(engine: Engine, prompt: GradePrompt, *, base: Sequence[FloatArray] | None = None) -> list[Check]:
    """Try on a probe what scoring relies on, one `Check` each.

    `base` is what `probe` read from the same model without its adapter; given, the adapter must change the scores.
    """
    windows = probe_windows(engine, prompt)
    together = engine.grade_logits(windows, prompt.grade_ids)
    alone = [engine.grade_logits([w], prompt.grade_ids)[0] for w in windows]
    apart = engine.grade_logits([replace(w, shared=0) for w in windows], prompt.grade_ids)
    limit = _limit(engine)
    return [
        _grades(engine, prompt),
        _slots(prompt, windows),
        _texts(engine, windows[0]),
        _joined(prompt),
        _finite(together),
        _close("a batch of unequal prompts reads like each alone", together, alone, limit),
        _close("a shared prefix reads like the whole prompt", together, apart, limit),
        _differ(_scores(together[1:])),
        *([] if base is None else [moved(together, base)]),
    ]


def prove_written(engine: Engine, prompt: ChatPrompt) -> list[Check]:
    """The same of an engine whose grades are written down: there are no slots, only answers to look at."""
    read = probe(engine, prompt)
    return [_finite(read), _differ(_scores(read[1:]))]


def probe(engine: Engine, prompt: Prompt) -> list[FloatArray]:
    """Grade logits of the probe's windows, to compare a model with its adapter."""
    return engine.grade_logits(probe_windows(engine, prompt), prompt.grade_ids)


def probe_windows(engine: Engine, prompt: Prompt) -> list[WindowPrompt]:
    """The probe as one window of all documents, then each document alone."""
    sheet = prompt.sheet(_QUERY, _TEXTS, width=len(_TEXTS), max_tokens=engine.max_length)
    return [sheet.window(range(sheet.width)), *(sheet.window([i]) for i in range(len(_TEXTS)))]


def _grades(engine: Engine, prompt: GradePrompt) -> Check:
    ids = prompt.grade_ids
    shown = ", ".join(f"{grade} is {token} {engine.tokenizer.decode([token])!r}" for grade, token in enumerate(ids))
    return Check(name="every grade is one token of its own", passed=len(set(ids)) == len(ids), detail=shown)


def _slots(prompt: GradePrompt, windows: Sequence[WindowPrompt]) -> Check:
    after = {int(token) for w in windows for token in w.token_ids[w.slots + 1]}
    slots = sum(len(w.slots) for w in windows)
    return Check(
        name="every slot is followed by the placeholder",
        passed=len(after) == 1,
        detail=f"{slots} slots, each before '{prompt.placeholder}'"
        if len(after) == 1
        else f"tokens {sorted(after)} follow {slots} slots",
    )


def _texts(engine: Engine, window: WindowPrompt) -> Check:
    shown = " ".join(engine.tokenizer.decode(window.token_ids.tolist()).split())
    begun = [_QUERY, *(" ".join(text.split()[:6]) for text in _TEXTS[: len(window.slots)])]
    lost = [text for text in begun if text not in shown]
    return Check(
        name="the chat template keeps query and documents",
        passed=not lost,
        detail=f"lost: {'; '.join(lost)}" if lost else f"all in a prompt of {len(window.token_ids)} tokens",
    )


def _joined(prompt: GradePrompt) -> Check:
    whole = "this tokenizer merges across documents: every prompt is tokenised whole, which is right but slower"
    return Check(
        name="documents are tokenised once and joined",
        passed=True if prompt.joined else None,
        detail="joined ids equal the whole prompt's" if prompt.joined else whole,
    )


def moved(read: Sequence[FloatArray], base: Sequence[FloatArray]) -> Check:
    """Whether an adapter changes scores: what `probe` read with it, and from the same model without it."""
    by = float(np.abs(_scores(read) - _scores(base)).max())
    return Check(name="the adapter changes the scores", passed=by > 0, detail=f"by up to {by:.4f} on the probe")


def _finite(read: Sequence[FloatArray]) -> Check:
    missing = sum(int((np.isnan(values) | np.isposinf(values)).any(axis=1).sum()) for values in read)
    return Check(
        name="every slot has its grades",
        passed=not missing,
        detail=f"{missing} slots without" if missing else f"{sum(map(len, read))} slots read",
    )


def _close(name: str, one: Sequence[FloatArray], other: Sequence[FloatArray], limit: float) -> Check:
    apart = float(np.abs(_scores(one) - _scores(other)).max())
    return Check(name=name, passed=apart <= limit, detail=f"scores within {apart:.1e} (limit {limit:.0e})")


def _differ(scores: Scores) -> Check:
    spread = float(scores.max() - scores.min())
    return Check(
        name="different documents get different scores",
        passed=spread > 0,
        detail="scores alone: " + ", ".join(f"{score:.3f}" for score in scores),
    )


def _scores(read: Sequence[FloatArray]) -> Scores:
    return read_out(grade_probabilities(np.concatenate(read)))


def _limit(engine: Engine) -> float:
    dtype = str(engine.describe().get("dtype", "float32"))
    return EXACT if dtype in {"float32", "fp32", "float64"} else HALF
