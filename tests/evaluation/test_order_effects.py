"""Where score movement comes from: slots, windows, companions, widths."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.evaluation.order_effects import (
    silver_beta,
    slot_profile,
    variance_parts,
    variance_shares,
    width_effect,
    width_outcome,
)
from pd_rerank.evaluation.presentations import Presentations
from tests.tables import table

SCORES = np.array([[0.9, 0.6, 0.3, 0.1], [0.8, 0.65, 0.2, 0.2], [0.7, 0.5, 0.35, 0.15]])
SLOT = np.array([[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]])
WINDOW = np.array([[0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]])


def presentations(query_id: str, scores: list[list[float]], slots: list[list[int]]) -> Presentations:
    return Presentations.of_table(table(scores, slots=slots, query_id=query_id))


def test_variance_parts_of_the_methods_example() -> None:
    parts = variance_parts("q", SCORES, SLOT, WINDOW)
    assert parts.total == pytest.approx(0.00402778, abs=5e-9)
    assert parts.after_slot == pytest.approx(0.00277778, abs=5e-9)
    assert parts.after_window == pytest.approx(0.00207465, abs=5e-9)
    shares = variance_shares([parts])
    assert (shares.slot, shares.window, shares.companions) == pytest.approx((0.310345, 0.174569, 0.515086), abs=5e-7)


def test_the_decomposition_is_the_full_regression() -> None:
    rng = np.random.default_rng(0)
    k, n, width = 5, 12, 4
    scores = rng.random((k, n))
    order = np.array([rng.permutation(n) for _ in range(k)])
    place = np.argsort(order, axis=1)
    slot, window = place % width, place // width
    doc = np.tile(np.arange(n), (k, 1))

    def marks(*effects: np.ndarray) -> np.ndarray:
        return np.hstack([(e.reshape(-1, 1) == np.unique(e)).astype(float) for e in effects])

    def left(*effects: np.ndarray) -> float:
        columns = marks(*effects)
        solution = np.linalg.lstsq(columns, scores.ravel(), rcond=None)[0]
        return float(np.mean((scores.ravel() - columns @ solution) ** 2))

    parts = variance_parts("q", scores, slot, window)
    assert (parts.total, parts.after_slot, parts.after_window) == pytest.approx(
        (left(doc), left(doc, slot), left(doc, slot, window))
    )


def test_a_scorer_that_only_likes_slots_has_no_companion_share() -> None:
    slot = np.array([[0, 1, 2], [1, 2, 0], [2, 0, 1]])
    scores = np.array([0.9, 0.5, 0.1]) + np.array([0.1, 0.0, -0.1])[slot]
    shares = variance_shares([variance_parts("q", scores, slot, np.zeros_like(slot))])
    assert (shares.slot, shares.window, shares.companions) == pytest.approx((1, 0, 0), abs=1e-12)


def test_candidates_without_all_scores_are_left_out_and_queries_without_two_are_named() -> None:
    gap = np.hstack([SCORES, [[np.nan], [0.1], [0.9]], [[0.0]] * 3])
    slot = np.hstack([SLOT, [[2]] * 3, [[-1]] * 3])
    window = np.hstack([WINDOW, [[0]] * 3, [[-1]] * 3])
    parts = variance_parts("q", gap, slot, window)
    assert parts.total == pytest.approx(0.00402778, abs=5e-9)
    lone = variance_parts("lone", SCORES[:, :1], SLOT[:, :1], WINDOW[:, :1])
    shares = variance_shares([parts, lone])
    assert (shares.n, shares.undefined) == (1, ("lone",))
    assert math.isnan(variance_shares([lone]).slot)
    still = variance_parts("still", np.tile(SCORES[:1], (3, 1)), SLOT, WINDOW)
    assert still.total == 0
    assert math.isnan(variance_shares([still]).companions)
    assert math.isnan(variance_shares([variance_parts("0", np.zeros((3, 4)), SLOT, WINDOW)]).companions)


def test_slot_profile_of_the_example() -> None:
    query = presentations("q", [[0.9, 0.4], [0.7, 0.4]], [[0, 1], [1, 0]])
    profile = slot_profile([query])
    assert profile.psi == pytest.approx([0.05, -0.05], abs=1e-7)
    assert silver_beta([query]) == pytest.approx(0.15, abs=1e-6)
    assert silver_beta([query], aggregate="mean_abs") == pytest.approx(0.15, abs=1e-6)


def test_the_profile_averages_queries_and_not_occurrences() -> None:
    wide = presentations("w", [[0.9, 0.4, 0.4], [0.7, 0.4, 0.4]], [[0, 1, 2], [1, 0, 2]])
    narrow = presentations("n", [[0.5, 0.5], [0.1, 0.5]], [[0, 1], [1, 0]])
    profile = slot_profile([wide, narrow])
    assert profile.residuals == pytest.approx(
        np.array([[0.05, -0.05, 0.0], [0.1, -0.1, np.nan]]), abs=1e-7, nan_ok=True
    )
    assert profile.psi == pytest.approx([0.075, -0.075, 0], abs=1e-7)
    gold = slot_profile([wide, narrow], only={"w": np.array([True, False, False])})
    assert gold.residuals == pytest.approx(np.array([[0.1, -0.1], [np.nan, np.nan]]), abs=1e-7, nan_ok=True)


def test_grades_that_ignore_order_have_a_flat_profile_and_no_beta() -> None:
    query = presentations("q", [[0.9, 0.4, 0.1]] * 3, [[0, 1, 2], [1, 2, 0], [2, 0, 1]])
    assert slot_profile([query]).psi == pytest.approx([0, 0, 0])
    assert silver_beta([query]) == pytest.approx(0)
    assert math.isnan(silver_beta([]))
    with pytest.raises(BadArgument, match="rms or mean_abs"):
        silver_beta([query], aggregate="median")  # type: ignore[arg-type]


def test_runs_know_no_slots() -> None:
    with pytest.raises(InvalidData, match="no slots"):
        slot_profile([Presentations.of_scores("q", "AB", [[0.1, 0.2]])])


def test_width_effect_in_standard_deviations() -> None:
    one = width_outcome("q", [0.8, 0.4], [[0.6, 0.4], [0.8, 0.6]])
    assert (one.distance, one.shift, one.variance) == pytest.approx((0.1, 0, 0.01))
    up = width_outcome("p", [0.9, 0.7, np.nan], [0.7, 0.5, 0.1])
    effect = width_effect([one, up, width_outcome("none", [np.nan], [0.5])])
    assert (effect.distance, effect.shift, effect.deviation) == pytest.approx((1.5, 1.0, 0.1))
    assert (effect.n, effect.undefined) == (2, ("none",))
    assert math.isnan(width_effect([width_outcome("flat", [0.1, 0.1], [0.2, 0.2])]).distance)
    with pytest.raises(InvalidData, match="2 candidates at one width and 1"):
        width_outcome("q", [0.1, 0.2], [0.1])
