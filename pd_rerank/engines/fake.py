"""An engine without a model: deterministic, instant, and as order-dependent as a test asks it to be."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pd_rerank.engines.base import FloatArray, Progress, WindowPrompt
from pd_rerank.errors import BadArgument, whole


class FakeTokenizer:
    """A tokenizer with one token per character: the id is the code point. Reversible and stateless."""

    chat_template = None
    all_special_tokens: tuple[str, ...] = ()
    bos_token_id = None
    eos_token_id = 0
    model_max_length = 1_000_000

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the code points of `text`."""
        return [ord(c) for c in text]

    def __call__(self, texts: str | Sequence[str], add_special_tokens: bool = False) -> dict[str, Any]:
        """Encode one text or many, in the shape transformers' tokenizers return."""
        if isinstance(texts, str):
            return {"input_ids": self.encode(texts)}
        return {"input_ids": [self.encode(text) for text in texts]}

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text whose code points are `ids`."""
        return "".join(map(chr, ids))


def word_overlap(query: str, text: str) -> float:
    """The share of the query's words that occur in the text, in [0, 1]."""
    wanted = set(re.findall(r"\w+", query.lower()))
    return len(wanted & set(re.findall(r"\w+", text.lower()))) / len(wanted) if wanted else 0.0


class FakeEngine:
    """Grades by `relevance(query, text)` in [0, 1], plus what a test wants to go wrong.

    `position_bias` is added over the window: -bias/2 at the first slot to +bias/2 at the last, on the scale of
    relevance. `companion_bias` times the mean relevance of the window's other documents is taken off.
    `missing(text)` names documents whose grades come back as NaN. `delay` seconds are spent per prompt.
    `calls` and `prompts` count what the engine was asked for.
    """

    def __init__(
        self,
        *,
        relevance: Callable[[str, str], float] = word_overlap,
        position_bias: float = 0.0,
        companion_bias: float = 0.0,
        missing: Callable[[str], bool] | None = None,
        delay: float = 0.0,
        max_length: int = 1_000_000,
        name: str = "fake",
    ) -> None:
        if not whole(max_length) or max_length < 1:
            raise BadArgument(f"max_length must be a whole number of at least 1, got {max_length!r}")
        self.name = name
        self.tokenizer: Any = FakeTokenizer()
        self.max_length = max_length
        self.calls = 0
        self.prompts = 0
        self._relevance = relevance
        self._position_bias = position_bias
        self._companion_bias = companion_bias
        self._missing = missing
        self._delay = delay

    def grade_logits(
        self, prompts: Sequence[WindowPrompt], grade_ids: Sequence[int], *, progress: Progress | None = None
    ) -> list[FloatArray]:
        """Grade each prompt's documents from its text; see `Engine.grade_logits`."""
        self.calls += 1
        out = []
        for prompt in prompts:
            self.prompts += 1
            if self._delay:
                time.sleep(self._delay)
            out.append(self._grade(prompt, len(grade_ids)))
            if progress is not None:
                progress(1)
        return out

    def _grade(self, prompt: WindowPrompt, grades: int) -> FloatArray:
        query, texts = _read(self.tokenizer.decode(prompt.token_ids.tolist()), len(prompt.slots))
        raw = np.array([self._relevance(query, text) for text in texts], dtype=np.float64)
        n = len(raw)
        others = (raw.sum() - raw) / (n - 1) if n > 1 else np.zeros(n)
        place = np.linspace(-0.5, 0.5, n) if n > 1 else np.zeros(n)
        value = raw + self._position_bias * place - self._companion_bias * others
        logits = -2.0 * (np.arange(grades) - value[:, None] * (grades - 1)) ** 2
        if self._missing is not None:
            logits[[self._missing(text) for text in texts]] = np.nan
        out: FloatArray = logits.astype(np.float32)
        return out

    def describe(self) -> dict[str, Any]:
        """Return the settings a manifest records."""
        return {
            "engine": "fake",
            "model": self.name,
            "position_bias": self._position_bias,
            "companion_bias": self._companion_bias,
        }


def _read(text: str, n: int) -> tuple[str, list[str]]:
    """The query and the n documents of a rendered prompt, read back from its lines."""
    lines = text.split("\n")
    last = max(i for i, line in enumerate(lines) if line.startswith("[end of "))
    documents = [line.split("] ", 1)[1] if "] " in line else "" for line in lines[last - n : last]]
    return lines[last - n - 3].split(": ", 1)[1], documents
