"""A direction in several orders: what changes with the order, worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pd_rerank.errors import BadArgument
from pd_rerank.evaluation.order_preference import averaged, order_outcomes, over_orders, primary
from tests.designated import case, direction, laid_out

ONE = case({"p": 4.0, "o": 3.0, "x": 2.0, "y": 1.0})
"""A pool of four whose window of three holds both passages; the tail is y."""

ORDERS = [
    [laid_out(ONE, {"p": 0.9, "o": 0.5, "x": 0.1})],  # p o x y
    [laid_out(ONE, {"p": 0.2, "o": 0.8, "x": 0.5})],  # o x p y
    [laid_out(ONE, {"p": 0.9, "o": 0.9, "x": 0.9})],  # ties, first stage: p o x y
]


def value(measure: str, orders: list[list[np.ndarray]] = ORDERS, tops: tuple[int, ...] = (1, 2)) -> float:
    return float(over_orders(order_outcomes([ONE], orders, k=3, tops=tops), measure)[0])


@pytest.mark.parametrize(
    ("measure", "worked"),
    [
        ("tau_psi", 4 / 9),  # τ of pox and oxp -1/3, twice, and 1: mean 1/9
        ("overlap@1", 1 / 3),  # p, o, p
        ("overlap@2", 5 / 9),  # po, ox, po: 1/3, 1, 1/3
        ("strict", 2 / 3),
        ("reciprocal_rank", 7 / 9),  # ranks 1, 3, 1
        ("preference_changes", 1.0),
        ("preference_differs", 2 / 3),
        ("crosses@1", 1.0),
        ("crosses@2", 1.0),
        ("crosses@3", 0.0),
        ("rank_range", 2.0),
    ],
)
def test_figures_of_three_orders_are_those_worked_by_hand(measure: str, worked: float) -> None:
    assert value(measure) == pytest.approx(worked)


def test_one_ranking_in_every_order_moves_nothing() -> None:
    same = [ORDERS[0]] * 3
    for measure in ("tau_psi", "preference_changes", "preference_differs", "crosses@1", "rank_range"):
        assert value(measure, same) == 0.0
    assert value("overlap@2", same) == 1.0


def test_a_missing_grade_shows_the_first_stage_that_is_served_instead() -> None:
    broken = [laid_out(ONE, {"p": 0.1, "o": None, "x": 0.9})]  # p o x, not x p
    assert value("tau_psi", [ORDERS[0], broken]) == 0.0
    assert value("tau_psi", [ORDERS[1], broken]) == value("tau_psi", [ORDERS[1], ORDERS[0]])


def test_what_the_tail_holds_and_ids_decide_is_no_movement() -> None:
    tied = case({"p": 1.0, "o": 1.0, "x": 1.0})
    ones = [laid_out(tied, {"p": 0.5, "o": 0.5, "x": 0.5})]
    (found,) = order_outcomes([tied], [ones, ones], k=3)
    assert found.tau_psi == 0.0
    assert [o.relation for o in found.outcomes] == ["model_tie", "model_tie"]


def test_an_ensemble_is_the_mean_of_its_own_orders() -> None:
    served = averaged([*ORDERS, ORDERS[0]], 2)
    assert len(served) == 2
    assert served[0][0] == pytest.approx(laid_out(ONE, {"p": 0.55, "o": 0.65, "x": 0.3}), nan_ok=True)
    assert averaged(ORDERS, 2)[0][0] == pytest.approx(served[0][0], nan_ok=True)
    assert [len(averaged(ORDERS, size)) for size in (1, 2, 3, 4)] == [3, 1, 1, 0]
    for refused in (lambda: averaged(ORDERS, 0), lambda: order_outcomes([ONE], [], k=3)):
        with pytest.raises(BadArgument):
            refused()


def test_windows_too_small_to_move_are_undefined_and_misses_are_left_out() -> None:
    alone = case({"p": 1.0, "o": 0.5})
    (found,) = order_outcomes([alone], [[laid_out(alone, {"p": 0.5})]] * 2, k=1)
    assert math.isnan(found.tau_psi)
    assert found.overlap[1] == 1.0
    gone = case({"p": 1.0}, direction("g-2:q1"))
    outcomes = order_outcomes([alone, gone], [[laid_out(c, {"p": 0.5}) for c in (alone, gone)]] * 2, k=1)
    assert [o.direction.direction_id for o in primary(outcomes)] == ["g-1:q1"]
