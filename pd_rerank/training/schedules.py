"""What changes from step to step: the learning rate and the strength of the consistency term."""

from __future__ import annotations

import math


def learning_rate(step: int, *, steps: int, warmup: int, peak: float) -> float:
    """The rate of optimizer step `step` (from 0) of `steps`: linear up to `peak`, then half a cosine to 0.

    Warm-up step s has peak · (s+1)/warmup, so the first is not 0. Source: method, section 4.5.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))


def ramp(step: int, *, target: float, over: int, start: float = 0.0) -> float:
    """The strength at a step, `step` being how many were taken: linear from `start`, `target` from step `over` on.

    Source: method, section 4.3, with 500 steps; shorter runs give a fraction of theirs, or never get there.
    """
    return target if step >= over else start + (target - start) * step / over
