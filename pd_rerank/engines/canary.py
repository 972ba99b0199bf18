"""A canary: one fixed prompt with the scores the transformers engine gave it, held against another engine at its start.

It catches what no error message reports: grade tokens of another vocabulary, an adapter whose head is ignored, a soft
cap left out, rows of another position, weights that are not those. `write_canary` puts it beside an adapter or a model;
engines look for it there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pd_rerank.engines.answers import apart, expected
from pd_rerank.engines.base import Engine, FloatArray, WindowPrompt
from pd_rerank.errors import BadArgument, InvalidData, ModelMismatch
from pd_rerank.files import read_json, write_json

logger = logging.getLogger("pd_rerank")

CANARY = "canary.json"
"""The file's name in an adapter's or model's folder."""

EXACT, HALF = 1e-3, 5e-2
"""How far expected grades (in [0, 1]) may be apart: both in float32, or one of them in half precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A prompt, the ids of its grades, the logits (slots, grades) read from it, and the precision they were read in."""

    prompt: WindowPrompt
    grade_ids: tuple[int, ...]
    logits: FloatArray
    dtype: str
    model: str

    def check(self, read: FloatArray, *, dtype: str, what: str) -> float:
        """How far expected grades in `read` are from the canary's at most; `ModelMismatch` beyond the tolerance."""
        tolerance = EXACT if self.dtype == dtype == "float32" else HALF
        worst = apart(expected(read), expected(self.logits))
        if not worst <= tolerance:
            raise ModelMismatch(
                f"{what} does not read its canary as {self.model} did in transformers: expected grades are up to "
                f"{worst:.3g} apart (tolerance {tolerance:g}), at its slots {_shown(read)} against "
                f"{_shown(self.logits)}; these are other weights, another adapter, other grade tokens, or a head that "
                "is not applied whole. Serve the exported model, or canary=False where the difference is meant"
            )
        return worst

    def write(self, place: str | Path) -> None:
        """Keep it in the folder or .json file `place`."""
        record: dict[str, Any] = {
            "format": "pd_rerank canary 1",
            "model": self.model,
            "dtype": self.dtype,
            "token_ids": self.prompt.token_ids.tolist(),
            "slots": self.prompt.slots.tolist(),
            "grade_ids": list(self.grade_ids),
            "logits": [[float(value) for value in row] for row in self.logits],
        }
        path = Path(place)
        write_json(path if path.suffix == ".json" else path / CANARY, record)


def _shown(logits: FloatArray) -> str:
    return "[" + ", ".join(f"{value:.3f}" for value in expected(logits)[:4]) + "]"


def canary_of(engine: Engine, prompt: WindowPrompt, grade_ids: Sequence[int], *, model: str | None = None) -> Canary:
    """What `engine` (the transformers one) reads from `prompt`; `model` is its name, else the engine's."""
    (logits,) = engine.grade_logits([prompt], grade_ids)
    if not np.isfinite(logits).all():
        raise BadArgument("the canary's prompt has slots without grades in this engine; nothing to compare with")
    return Canary(
        prompt=prompt,
        grade_ids=tuple(int(g) for g in grade_ids),
        logits=logits,
        dtype=str(engine.describe().get("dtype")),
        model=model or engine.name,
    )


def write_canary(engine: Engine, prompt: WindowPrompt, grade_ids: Sequence[int], place: str | Path) -> Canary:
    """Read `prompt` with `engine` (the transformers one) and keep what it said in the folder or .json file `place`."""
    canary = canary_of(engine, prompt, grade_ids)
    canary.write(place)
    return canary


def read_canary(path: str | Path) -> Canary:
    """The canary in a file or folder."""
    place = Path(path)
    file = place / CANARY if place.is_dir() else place
    record = read_json(file)
    try:
        canary = Canary(
            prompt=WindowPrompt(
                token_ids=np.array(record["token_ids"], dtype=np.int64), slots=np.array(record["slots"], dtype=np.int64)
            ),
            grade_ids=tuple(int(g) for g in record["grade_ids"]),
            logits=np.array(record["logits"], dtype=np.float32),
            dtype=str(record["dtype"]),
            model=str(record["model"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidData(f"{file} is no canary ({error!r}); write it again with write_canary") from error
    if canary.logits.shape != (len(canary.prompt.slots), len(canary.grade_ids)):
        raise InvalidData(f"{file}: logits of shape {canary.logits.shape} do not fit its slots and grades")
    return canary


def find_canary(given: Any, *folders: str | Path | None) -> Canary | None:
    """The canary to hold an engine to: the one given, else the first found in `folders`; None with `given` False."""
    if given is False:
        return None
    if isinstance(given, Canary):
        return given
    if given is not None and given is not True:
        return read_canary(given)
    for folder in folders:
        if folder is not None and Path(folder, CANARY).is_file():
            return read_canary(folder)
    if given is True:
        raise BadArgument(f"canary=True, but no {CANARY} lies beside the adapter or the model; write_canary makes one")
    return None
