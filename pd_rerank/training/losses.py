"""What training minimises: a fit to the labels, and how far a document's score may move between views.

Every loss is `loss(logits, batch, *, fit) -> Terms`. `logits` (views, m, G) are float32, one row per document of the
window in the window's own order whatever order a view showed; view 0 is the supervised one. Scores are expected
grades on the scale 0 … G-1. A `Terms` holds sums over documents with their counts, so that windows of different sizes
add up before anything is divided; `total` divides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from pd_rerank.errors import BadArgument, InvalidData

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """What one window's logits are held against.

    `targets` (m,) grades; `probabilities` (m, G) the teacher's P(g); `weights` (m,) of the fit; `shown` (views, m)
    bool, False where a view did not show a document; `reference` (m, G) logits of another model, without gradient.
    None is: not given, every weight 1, everything shown.
    """

    targets: Tensor
    probabilities: Tensor | None = None
    weights: Tensor | None = None
    shown: Tensor | None = None
    reference: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Terms:
    """Sums over documents, scalars: of the fit (weighted) and of the consistency term, each with its count.

    `scores` (m,) are view 0's expected grades, without gradient.
    """

    fit: Tensor
    fit_count: Tensor
    consistency: Tensor
    consistency_count: Tensor
    scores: Tensor


def means(terms: Sequence[Terms]) -> tuple[Tensor, Tensor]:
    """Fit and consistency of a micro-batch, each the sum over its windows divided by the sum of its counts.

    A window of one document counts in the fit alone; where no document counts the consistency is 0.
    """
    fit, weight, apart, count = (
        sum(getattr(t, name) for t in terms) for name in ("fit", "fit_count", "consistency", "consistency_count")
    )
    return fit / weight, apart / count.clamp(min=1)


def total(terms: Sequence[Terms], strength: float) -> Tensor:
    """The loss of a micro-batch: its fit and `strength` times its consistency.

    Where every window has all its views this is the reference's (1/S) · [Σ (s_A - t)² + λ Σ (s_A - s_B)²] with S the
    documents of the micro-batch. Source: method, section 4.3.
    """
    fit, apart = means(terms)
    whole: Tensor = fit + strength * apart
    return whole


def expected_grade(logits: Tensor) -> Tensor:
    """Expected grade, 0 … G-1, of logits (…, G): softmax over the grades, in the logits' own precision."""
    grades = logits.new_tensor(range(logits.shape[-1]))
    expected: Tensor = logits.softmax(dim=-1) @ grades
    return expected


def in_window_order(logits: Tensor, shows: Tensor, m: int) -> Tensor:
    """Rows of a view's slots (slots, G) as rows of the window's documents (m, G).

    `shows` (slots,) is the document each slot graded, -1 for one that is not of the window. Documents the view did
    not show get zeros: mask them.
    """
    ours = shows >= 0
    return logits.new_zeros(m, logits.shape[-1]).index_copy(0, shows[ours], logits[ours])


# -- the fit ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How view 0 is held against the labels: a weighted sum of up to three terms per document.

    `squared`: (s - t)² of the expected grade. `distribution`: KL(teacher ‖ student) over the grades, which needs the
    teacher's probabilities; with `squared` this is the combined loss, alone the distribution loss (method, 4.3).
    `cross_entropy`: -Σ q log p for the two-point q on the grades around t whose mean is t; it still has a gradient
    where the softmax is saturated and the expected grade has none.
    """

    squared: float = 1.0
    distribution: float = 0.0
    cross_entropy: float = 0.0

    def __post_init__(self) -> None:
        values = (self.squared, self.distribution, self.cross_entropy)
        if min(values) < 0 or not sum(values):
            raise BadArgument(f"the weights of the fit are 0 or more and not all 0, got {values}")

    def __call__(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The weighted sum over the documents of (m, G) logits, and the sum of weights; both scalars."""
        import torch

        cost = logits.new_zeros(len(logits))
        if self.squared:
            cost = cost + self.squared * (expected_grade(logits) - batch.targets).square()
        if self.distribution:
            if batch.probabilities is None:
                raise InvalidData("the distribution loss needs the teacher's grade probabilities; these have none")
            p = batch.probabilities
            apart = (torch.xlogy(p, p) - p * logits.log_softmax(dim=-1)).sum(dim=-1)
            cost = cost + self.distribution * apart
        if self.cross_entropy:
            q = two_point(batch.targets, logits.shape[-1])
            cost = cost - self.cross_entropy * (q * logits.log_softmax(dim=-1)).sum(dim=-1)
        weights = torch.ones_like(cost) if batch.weights is None else batch.weights
        return (weights * cost).sum(), weights.sum()


SQUARED = Fit()


def two_point(targets: Tensor, grades: int) -> Tensor:
    """The distribution (m, G) on the grades just below and above each target whose mean is the target."""
    scale = targets.new_tensor(range(grades))
    return (1.0 - (targets[:, None] - scale).abs()).clamp(min=0.0)


# -- losses -------------------------------------------------------------------------------------------------------


def supervised(logits: Tensor, batch: Batch, *, fit: Fit = SQUARED) -> Terms:
    """The fit of view 0 alone: Σ w (s - t)², count Σ w.

    With the labels of one teacher order this is single-order distillation, with the mean of T orders order-averaged
    distillation, on whole-pool shuffles permutation augmentation, and with weights from `inverse_propensity` the port
    of DebiasFirst. Source: method, section 4.4.
    """
    return _terms(logits, batch, fit, consistency=logits.new_zeros(()), count=logits.new_zeros(()))


def order_consistency(logits: Tensor, batch: Batch, *, fit: Fit = SQUARED) -> Terms:
    """OC-SFT: the fit of view 0, and per document the mean squared difference of its scores in two views.

    For two views that is the reference's (s_A - s_B)²; for N it is the mean over all pairs of views, which equals
    2/(N-1) · Σ_v (s_v - mean)², twice the unbiased variance. Gradients flow through every view. A document counts if
    two views or more showed it. For a λ meant for a variance see `as_difference`. Source: method, section 4.3.
    """
    scores = expected_grade(logits)
    shown = scores.new_ones(scores.shape) if batch.shown is None else batch.shown.to(scores.dtype)
    views = shown.sum(dim=0)
    mean = (scores * shown).sum(dim=0) / views.clamp(min=1)
    apart = ((scores - mean).square() * shown).sum(dim=0) * 2.0 / (views - 1).clamp(min=1)
    return _terms(logits, batch, fit, consistency=apart.sum(), count=(views >= 2).sum())


def mean_teacher(logits: Tensor, batch: Batch, *, fit: Fit = SQUARED) -> Terms:
    """The fit of view 0, and (s_A - s_B')² where s_B' is an averaged model's score of view 1.

    `batch.reference` (m, G) are that model's logits, in window order, None for a window of one view, which counts in
    the fit alone; so do documents view 1 did not show. The student needs view 0 only. The averaged model's weights
    follow the student's with decay 0.999; strength 0.5. Source: method, section 4.4.
    """
    if batch.reference is None:
        return supervised(logits, batch, fit=fit)
    apart = (expected_grade(logits[0]) - expected_grade(batch.reference)).square()
    shown = apart.new_ones(apart.shape) if batch.shown is None else batch.shown[1].to(apart.dtype)
    return _terms(logits, batch, fit, consistency=(apart * shown).sum(), count=shown.sum())


def kl_to_base(logits: Tensor, batch: Batch, *, fit: Fit = SQUARED, temperature: float = 1.0) -> Terms:
    """The fit of view 0, and KL(student ‖ base) over the grades, both logits divided by `temperature`.

    `batch.reference` (m, G) are the logits of the same prompt without the adapter; strength 0.05. Source: method, 4.4.
    """
    mine = (logits[0] / temperature).log_softmax(dim=-1)
    if batch.reference is None:
        raise BadArgument("this loss compares with the base model's logits; give them as reference")
    base = (batch.reference / temperature).log_softmax(dim=-1)
    apart = (mine.exp() * (mine - base)).sum(dim=-1)
    return _terms(logits, batch, fit, consistency=apart.sum(), count=apart.new_tensor(len(apart)))


LOSSES: Mapping[str, Callable[..., Terms]] = {
    loss.__name__: loss for loss in (supervised, order_consistency, mean_teacher, kl_to_base)
}
"""The losses by name, for settings files."""


def _terms(logits: Tensor, batch: Batch, fit: Fit, *, consistency: Tensor, count: Tensor) -> Terms:
    fitted, weight = fit(logits[0], batch)
    return Terms(
        fit=fitted,
        fit_count=weight,
        consistency=consistency,
        consistency_count=count,
        scores=expected_grade(logits[0].detach()),
    )


# -- conventions and weights --------------------------------------------------------------------------------------


def as_difference(strength: float, *, views: int, of: Literal["difference", "variance_sum", "variance_mean"]) -> float:
    """The λ of `order_consistency` that equals a `strength` stated for another convention, with `views` views.

    `variance_sum`: Σ_v (s_v - mean)² per document, as variance about the mean is summed; λ = strength · (N-1)/2.
    `variance_mean`: its mean over the views; λ = strength · (N-1)/(2N). For two views that is a half and a quarter,
    so the paper's λ = 5 on squared differences would be 10 and 20 on those. Source: method, sections 4.3 and 10.
    """
    if views < 2:
        raise BadArgument(f"consistency is between two views or more, got {views}")
    factors = {"difference": 1.0, "variance_sum": (views - 1) / 2, "variance_mean": (views - 1) / (2 * views)}
    if of not in factors:
        raise BadArgument(f"unknown convention '{of}'; choose {', '.join(factors)}")
    return strength * factors[of]


def inverse_propensity(
    counts: Sequence[float], *, smoothing: float = 1e-3, clip: float | None = None
) -> npt.NDArray[np.float64]:
    """DebiasFirst's weight of each slot, mean 1, from how many relevant documents stood there in training.

    p = (count + smoothing) / Σ, w = (1/p) / mean(1/p), cut at `clip` and brought to mean 1 again where one is given.
    Source: method, section 4.4.
    """
    found = np.asarray(counts, dtype=np.float64)
    if found.size == 0 or (found < 0).any():
        raise BadArgument(f"counts per slot are 0 or more, one for each slot, got {list(counts)}")
    raw = found.sum() / (found + smoothing)
    if not raw.any():
        raise InvalidData("no relevant document stands in any slot; give the judgements of the training pools")
    weights: npt.NDArray[np.float64] = raw / raw.mean()
    if clip is not None:
        weights = np.minimum(weights, clip)
        weights /= weights.mean()
    return weights
