"""How far two readings are apart: NaN, which is within no tolerance, where a grade is missing on one side or in all."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pd_rerank.engines.answers import apart
from pd_rerank.engines.base import WindowPrompt
from pd_rerank.engines.canary import Canary
from pd_rerank.errors import ModelMismatch

NAN = math.nan


@pytest.mark.parametrize(
    ("one", "other", "far"),
    [
        ([0.1, 0.5], [0.1, 0.25], 0.25),
        ([0.1, NAN], [0.2, NAN], 0.1),
        ([0.1, NAN], [0.1, 0.5], NAN),
        ([0.1, 0.5], [0.1, NAN], NAN),
        ([NAN, NAN], [NAN, NAN], NAN),
        ([], [], NAN),
    ],
)
def test_a_grade_on_one_side_alone_or_none_at_all_is_nan(one: list[float], other: list[float], far: float) -> None:
    assert apart(np.array(one), np.array(other)) == pytest.approx(far, nan_ok=True)


def test_a_canary_is_not_held_by_a_reading_that_lacks_a_grade() -> None:
    logits = np.array([[0, 1, 2, 3], [3, 2, 1, 0]], dtype=np.float32)
    prompt = WindowPrompt(token_ids=np.arange(9), slots=np.array([3, 7]))
    canary = Canary(prompt=prompt, grade_ids=(1, 2, 3, 4), logits=logits, dtype="float32", model="m")
    assert canary.check(logits, dtype="float32", what="it") == 0
    for lost in ([0], [0, 1]):
        read = logits.copy()
        read[lost, 2] = np.nan
        with pytest.raises(ModelMismatch, match="up to nan apart"):
            canary.check(read, dtype="float32", what="it")
