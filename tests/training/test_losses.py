"""Losses against numbers worked by hand, and the general forms against the reference's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.training.losses import (
    LOSSES,
    Batch,
    Fit,
    as_difference,
    expected_grade,
    in_window_order,
    inverse_propensity,
    kl_to_base,
    mean_teacher,
    order_consistency,
    supervised,
    total,
    two_point,
)
from pd_rerank.training.schedules import learning_rate, ramp

torch = pytest.importorskip("torch")

A, B, T = (2.0, 1.0, 0.5), (1.6, 1.2, 0.1), (2.2, 0.8, 0.0)
"""Scores of three documents in two views, and their targets (method, section 9)."""


def logits_of(*views: tuple[float, ...]) -> Any:
    """Float64 logits of four grades whose expected grades are the given scores."""
    return torch.stack([(two_point(torch.tensor(v, dtype=torch.float64), 4) + 1e-300).log() for v in views])


def batch_of(targets: tuple[float, ...] = T, **more: Any) -> Batch:
    return Batch(targets=torch.tensor(targets, dtype=torch.float64), **more)


def test_the_expected_grade_is_a_softmax_over_the_grades_alone() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    assert logits.softmax(-1).tolist() == pytest.approx([0.0320586, 0.0871443, 0.2368828, 0.6439143], abs=1e-7)
    assert expected_grade(logits).item() == pytest.approx(2.4926527, abs=1e-7)


@pytest.mark.parametrize(("strength", "loss"), [(0.0, 0.11), (1.0, 0.23), (5.0, 0.71)])
def test_oc_sft_of_two_views_is_the_fit_and_lambda_times_the_squared_difference(strength: float, loss: float) -> None:
    terms = order_consistency(logits_of(A, B), batch_of())
    assert terms.fit.item() == pytest.approx(0.33)
    assert terms.consistency.item() == pytest.approx(0.36)
    assert total([terms], strength).item() == pytest.approx(loss)


def test_variance_about_the_mean_is_the_squared_difference_times_a_stated_factor() -> None:
    apart = np.array(A) - np.array(B)
    both = np.stack([A, B])
    summed = ((both - both.mean(0)) ** 2).sum(0).mean()
    assert (summed, summed / 2) == pytest.approx((0.06, 0.03))
    assert (apart**2).mean() == pytest.approx(0.12)
    terms = order_consistency(logits_of(A, B), batch_of())
    for of, value in (("difference", 0.12), ("variance_sum", 0.06), ("variance_mean", 0.03)):
        strength = as_difference(5.0, views=2, of=of)  # type: ignore[arg-type]
        assert total([terms], strength).item() == pytest.approx(0.11 + 5.0 * value)


@pytest.mark.parametrize("views", [2, 3, 5])
def test_the_conversion_of_conventions_holds_for_any_number_of_views(views: int) -> None:
    torch.manual_seed(views)
    logits = torch.randn(views, 4, 4, dtype=torch.float64)
    scores = expected_grade(logits)
    terms = order_consistency(logits, batch_of((0.0, 1.0, 2.0, 3.0)))
    deviations = (scores - scores.mean(0)).square()
    for of, variance in (("variance_sum", deviations.sum(0)), ("variance_mean", deviations.mean(0))):
        strength = as_difference(3.0, views=views, of=of)  # type: ignore[arg-type]
        assert (strength * terms.consistency).item() == pytest.approx((3.0 * variance.sum()).item())


def test_n_views_are_compared_in_all_pairs() -> None:
    views = (2.0,), (1.0,), (0.5,)
    terms = order_consistency(logits_of(*views), batch_of((2.0,)))
    # (2-1)² + (2-0.5)² + (1-0.5)² = 3.5, over three pairs.
    assert terms.consistency.item() == pytest.approx(3.5 / 3)


def test_gradients_of_the_general_form_for_two_views_are_those_of_the_reference_form() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.rand(7, dtype=torch.float64) * 3
    general = total([order_consistency(logits, Batch(targets=targets))], 5.0)
    (mine,) = torch.autograd.grad(general, logits)
    s = expected_grade(logits)
    reference = ((s[0] - targets).square().sum() + 5.0 * (s[0] - s[1]).square().sum()) / 7
    (theirs,) = torch.autograd.grad(reference, logits)
    assert general.item() == pytest.approx(reference.item(), abs=1e-14)
    assert torch.allclose(mine, theirs, atol=1e-14, rtol=0)
    assert mine[1].abs().max() > 0, "no gradient reaches the second view"


def test_a_document_a_view_does_not_show_is_not_compared() -> None:
    shown = torch.tensor([[True, True, True], [True, False, True]])
    terms = order_consistency(logits_of(A, B), batch_of(shown=shown))
    assert terms.consistency.item() == pytest.approx(0.4**2 + 0.4**2)
    assert terms.consistency_count.item() == 2
    assert terms.fit_count.item() == 3


def test_windows_add_up_before_they_are_divided_and_a_window_of_one_counts_in_the_fit_only() -> None:
    three = order_consistency(logits_of(A, B), batch_of())
    one = order_consistency(logits_of((1.0,)), batch_of((3.0,)))
    assert one.consistency.item() == 0.0
    assert total([three, one], 5.0).item() == pytest.approx((0.33 + 4.0) / 4 + 5.0 * 0.36 / 3)
    assert total([one], 5.0).item() == pytest.approx(4.0)


def test_supervised_reads_the_first_view_alone() -> None:
    terms = supervised(logits_of(A, B), batch_of())
    assert total([terms], 5.0).item() == pytest.approx(0.11)
    assert terms.scores.tolist() == pytest.approx(A)


def test_debiasfirst_weights_are_inverse_propensities_of_mean_one() -> None:
    weights = inverse_propensity([5, 3, 1, 0])
    assert weights.tolist() == pytest.approx([0.000798616, 0.00133085, 0.00398989, 3.99388064], rel=1e-5)
    clipped = inverse_propensity([5, 3, 1, 0], clip=1.0)
    assert clipped.mean() == pytest.approx(1.0)
    assert clipped[3] / clipped[2] == pytest.approx(1.0 / 0.00398989, rel=1e-5)
    with pytest.raises(InvalidData, match="no relevant document"):
        inverse_propensity([0, 0])


def test_weights_divide_by_their_sum() -> None:
    weights = torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64)
    terms = supervised(logits_of(A), batch_of(weights=weights))
    assert total([terms], 0.0).item() == pytest.approx((1 * 0.04 + 3 * 0.04) / 4)


def test_the_mean_teacher_pulls_the_first_view_to_the_averaged_models_second() -> None:
    reference = logits_of(B)[0]
    terms = mean_teacher(logits_of(A), batch_of(reference=reference))
    assert total([terms], 0.5).item() == pytest.approx(0.11 + 0.5 * 0.12)
    shown = torch.tensor([[True, True, True], [False, True, True]])
    part = mean_teacher(logits_of(A), batch_of(reference=reference, shown=shown))
    assert part.consistency.item() == pytest.approx(0.04 + 0.16)
    alone = mean_teacher(logits_of((1.0,)), batch_of((3.0,)))
    assert (alone.fit.item(), alone.consistency_count.item()) == (pytest.approx(4.0), 0)


def test_kl_to_base_is_over_the_grades_at_a_temperature() -> None:
    student = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log()
    base = torch.tensor([[0.25, 0.25, 0.25, 0.25]], dtype=torch.float64).log()
    by_hand = 0.5 * math.log(2) + 0.25 * 0 + 2 * 0.125 * math.log(0.5)
    terms = kl_to_base(student[None], batch_of((0.875,), reference=base))
    assert terms.fit.item() == pytest.approx(0.0, abs=1e-12)
    assert total([terms], 0.05).item() == pytest.approx(0.05 * by_hand)
    # At T = 2 the student is proportional to sqrt(p): .4142, .2929, .1464…
    q = np.sqrt([0.5, 0.25, 0.125, 0.125])
    q /= q.sum()
    warm = kl_to_base(student[None], batch_of((0.875,), reference=base), temperature=2.0)
    assert warm.consistency.item() == pytest.approx(float((q * np.log(q / 0.25)).sum()))


def test_the_combined_loss_adds_the_divergence_from_the_teachers_grades() -> None:
    p = torch.tensor([[0.0, 0.5, 0.5, 0.0]], dtype=torch.float64)
    student = torch.tensor([[0.25, 0.25, 0.25, 0.25]], dtype=torch.float64).log()[None]
    both = supervised(student, batch_of((2.0,), probabilities=p), fit=Fit(squared=1.0, distribution=0.5))
    assert both.fit.item() == pytest.approx(0.25 + 0.5 * math.log(2))
    alone = supervised(student, batch_of((2.0,), probabilities=p), fit=Fit(squared=0.0, distribution=1.0))
    assert alone.fit.item() == pytest.approx(math.log(2))
    with pytest.raises(InvalidData, match="needs the teacher's grade probabilities"):
        supervised(student, batch_of((2.0,)), fit=Fit(distribution=1.0))


def test_the_cross_entropy_is_to_the_two_grades_around_the_target() -> None:
    assert two_point(torch.tensor([2.25, 3.0]), 4).tolist() == [[0, 0, 0.75, 0.25], [0, 0, 0, 1]]
    student = torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=torch.float64).log()[None]
    terms = supervised(student, batch_of((2.25,)), fit=Fit(squared=0.0, cross_entropy=0.3))
    assert terms.fit.item() == pytest.approx(-0.3 * (0.75 * math.log(0.3) + 0.25 * math.log(0.4)))


def test_the_cross_entropy_has_a_gradient_where_the_expected_grade_has_none() -> None:
    gradients = {}
    for name, fit in (("squared", Fit()), ("cross", Fit(squared=0.0, cross_entropy=1.0))):
        logits = torch.tensor([[[40.0, 0.0, 0.0, 0.0]]], requires_grad=True)
        supervised(logits, Batch(targets=torch.tensor([3.0])), fit=fit).fit.backward()
        gradients[name] = logits.grad.abs().max().item()
    assert gradients["squared"] < 1e-12
    assert gradients["cross"] == pytest.approx(1.0)


def test_slots_go_back_to_the_windows_order_and_strangers_are_left_out() -> None:
    logits = torch.arange(12.0).reshape(3, 4).requires_grad_()
    placed = in_window_order(logits, torch.tensor([2, -1, 0]), 3)
    assert placed.tolist() == [[8, 9, 10, 11], [0, 0, 0, 0], [0, 1, 2, 3]]
    placed.sum().backward()
    assert logits.grad[:, 0].tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("name", list(LOSSES))
def test_every_loss_takes_the_same_arguments(name: str) -> None:
    reference = logits_of(B)[0]
    terms = LOSSES[name](logits_of(A, B), batch_of(reference=reference), fit=Fit(squared=2.0))
    assert terms.fit.item() == pytest.approx(0.66)
    assert total([terms], 1.0).shape == ()


def test_what_makes_no_loss_is_refused() -> None:
    with pytest.raises(BadArgument, match="not all 0"):
        Fit(squared=0.0)
    with pytest.raises(BadArgument, match="the base model's logits"):
        kl_to_base(logits_of(A), batch_of())
    with pytest.raises(BadArgument, match="two views or more"):
        as_difference(1.0, views=1, of="difference")


@pytest.mark.parametrize(("step", "strength"), [(0, 0.0), (250, 2.5), (468, 4.68), (499, 4.99), (500, 5.0), (900, 5.0)])
def test_the_strength_ramps_up_over_optimizer_steps(step: int, strength: float) -> None:
    assert ramp(step, target=5.0, over=500) == pytest.approx(strength)


def test_without_a_ramp_the_strength_is_there_from_the_start() -> None:
    assert ramp(0, target=3.0, over=0) == 3.0


@pytest.mark.parametrize(("step", "rate"), [(0, 8.696e-7), (100, 8.783e-5), (229, 2e-4), (1000, 1.39402e-4)])
def test_the_rate_warms_up_in_a_line_and_falls_as_a_cosine(step: int, rate: float) -> None:
    assert learning_rate(step, steps=2305, warmup=230, peak=2e-4) == pytest.approx(rate, rel=1e-4)


def test_the_rate_ends_at_nothing() -> None:
    assert learning_rate(2305, steps=2305, warmup=230, peak=2e-4) == pytest.approx(0.0, abs=1e-12)
