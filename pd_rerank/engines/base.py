"""The seam between prompts and models: what an engine is given and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

Progress = Callable[[int], None]
"""Called with the number of prompts just finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPrompt:
    """One window, rendered: token ids and the positions whose next-token distribution grades each candidate.

    `token_ids` (t,) int64; `slots` (n,) int64, strictly increasing, slot i grades the i-th candidate
    shown, and `token_ids[slots[i] + 1]` is the placeholder. `shared` is how many leading tokens are the
    same in every prompt of this query: an engine may compute them once.
    """

    token_ids: IntArray
    slots: IntArray
    shared: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatWindow(WindowPrompt):
    """One window as the message to a model that writes its grades down.

    `text` is the message, `ids` (n,) name the candidates in the answer, in the order shown. Nothing is read at token
    positions: `token_ids` are the text's code points, for counting, and `slots` are 0 … n-1. With `reasons` the
    answer holds a reason beside every grade.
    """

    text: str
    ids: tuple[str, ...]
    reasons: bool = False


@runtime_checkable
class Engine(Protocol):
    """Anything that reads grade logits at slots.

    `name` identifies the model in manifests; `tokenizer` is the one the prompts are made with;
    `max_length` is the longest prompt it takes, in tokens.
    """

    name: str
    tokenizer: Any
    max_length: int

    def grade_logits(
        self,
        prompts: Sequence[WindowPrompt],
        grade_ids: Sequence[int],
        *,
        progress: Progress | None = None,
    ) -> list[FloatArray]:
        """Return, per prompt, an array (slots, len(grade_ids)) of logits or log-probabilities in float32.

        Values are read at each slot for the next token and need agree only up to a constant per row.
        NaN means the engine had no value; it is never replaced by a number.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Return what a manifest must record: model, revision, adapter, dtype, device, versions."""
        ...
