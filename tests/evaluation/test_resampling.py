"""Bootstraps, exact tests and noise: published draws and figures to the last digit, and hand-worked small cases."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.evaluation import resampling
from pd_rerank.evaluation.resampling import (
    GROUPS,
    GROUPS_AB,
    QUERIES,
    Recipe,
    group_bootstrap,
    hierarchical_bootstrap,
    holm,
    joint_bootstrap,
    noise_floor,
    paired_bootstrap,
    ratio_bootstrap,
    sign_flip_test,
    sign_test,
    wilson,
)
from tests.designated import vectors, worked_example

QUICK = Recipe(resamples=200, seed=1)


def published_groups(part: str) -> tuple[list[int], list[str], dict[str, Any]]:
    """Row values 1, -1, 0 and their groups, from the published counts per group."""
    record = vectors("nevir_bootstrap_groups")[part]
    values, groups = [], []
    for row in record["groups"]:
        for kind, value in (("corrected", 1), ("damaged", -1), ("common_correct", 0), ("common_not_correct", 0)):
            values += [value] * row[kind]
            groups += [row["group"]] * row[kind]
    return values, groups, record


# -- bootstraps ---------------------------------------------------------------------------------------------------


def test_the_recipes_are_the_published_ones() -> None:
    assert Recipe(resamples=20_000, seed=4401) == QUERIES
    assert Recipe(resamples=2_000, seed=20260910) == GROUPS
    assert Recipe(resamples=10_000, seed=20260907) == GROUPS_AB


def test_paired_bootstrap_of_the_methods_example() -> None:
    found = paired_bootstrap([0.1, -0.2, 0.3, 0.05, 0.15])
    assert (found.estimate, found.low, found.high) == pytest.approx((0.08, -0.08, 0.21), abs=1e-12)
    assert (found.unit, found.units, found.n, found.recipe) == ("queries", 5, 5, QUERIES)


def test_a_pooled_share_is_resampled_by_query() -> None:
    # Numerators and denominators share the draws: a query of weight 0 moves nothing, equal shares have no spread.
    found = ratio_bootstrap([1.0, 2.0, 0.0], [2.0, 4.0, 0.0], QUICK)
    assert (found.estimate, found.low, found.high, found.n) == (0.5, 0.5, 0.5, 3)
    spread = ratio_bootstrap([0.0, 3.0], [1.0, 3.0], QUICK)  # 0, 3/4 and 1 for the draws 11, 12, 22
    assert (spread.estimate, spread.low, spread.high) == (0.75, 0.0, 1.0)
    assert ratio_bootstrap([1.0], [4.0], QUICK).low is None
    for above, below in (([1.0], [0.0]), ([1.0, 1.0], [1.0, -1.0]), ([1.0], [1.0, 2.0])):
        with pytest.raises(BadArgument, match="ratio"):
            ratio_bootstrap(above, below)


def test_draws_in_blocks_are_the_draws_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(7).normal(size=37)
    recipe = Recipe(resamples=500, seed=4401)
    whole = values[np.random.default_rng(4401).integers(0, 37, (500, 37))].mean(axis=1)
    for block in (1, 100, 1000, 10**6):  # 1: a row at a time; 37 is odd, so blocks end inside a 64-bit word
        monkeypatch.setattr(resampling, "_BLOCK", block)
        found = paired_bootstrap(values, recipe)
        assert (found.low, found.high) == tuple(np.quantile(whole, [0.025, 0.975]))


@pytest.mark.parametrize("n", [2, 37, 5000, 65536, 2**31 - 1, 3 * 2**29])  # the last two reject half and a quarter
def test_draws_made_many_at_once_are_numpys(n: int) -> None:
    draw, numpy = resampling._indices(11, n), np.random.default_rng(11)
    for shape in ((1, 1), (3, 7), (1, 5000), (2, 3), (40, 50)):
        assert draw(shape).tolist() == numpy.integers(0, n, shape).tolist()


def test_the_published_group_intervals_come_out_exactly() -> None:
    for part in ("confirmation", "development"):
        values, groups, record = published_groups(part)
        found = group_bootstrap(values, groups)
        assert (found.estimate, found.low, found.high) == tuple(
            record["recomputed"][key] for key in ("estimate", "low", "high")
        )
        published = record["published_pp"]
        assert round(100 * found.estimate, 2) == published["estimate"]
        assert [round(100 * x, 2) for x in (found.low or 0, found.high or 0)] == published["ci"]
        assert found.units == len(record["groups"])
        assert sign_test(values.count(1), values.count(-1)) == pytest.approx(published["p"], rel=5e-4)


def test_a_dominant_group_makes_the_interval_reach_where_it_is_not_drawn() -> None:
    values = [1] * 1000 + [-1] * 90
    groups = ["huge"] * 1000 + [f"small{i // 10}" for i in range(90)]
    found = group_bootstrap(values, groups)
    assert found.estimate == pytest.approx(0.8348623853211009, abs=1e-15)  # (1000 - 90) / 1090
    # Ten groups: a draw lacks the huge one with probability .9^10 = .35, so more than 2.5 % of draws are all -1.
    assert found.low == -1
    assert found.high is not None
    assert found.high > 0.9


def test_group_bootstrap_of_two_groups_by_hand() -> None:
    # Groups of sums 0 of 2 and 1 of 1: draws give 0/4, 1/3 or 2/2; each of the extremes in a quarter of draws.
    found = group_bootstrap([1, -1, 1], ["g0", "g0", "g1"])
    assert (found.estimate, found.low, found.high) == (1 / 3, 0.0, 1.0)
    macro = group_bootstrap([1, -1, 1], ["g0", "g0", "g1"], statistic="macro")
    assert (macro.estimate, macro.low, macro.high) == (0.5, 0.0, 1.0)


def test_groups_are_drawn_in_the_order_of_their_names_not_of_their_arrival() -> None:
    values, groups = [1.0, 0.0, 0.5, 0.25, 0.0], ["b", "c", "a", "a", "b"]
    turned = [4, 2, 0, 3, 1]
    again = group_bootstrap([values[i] for i in turned], [groups[i] for i in turned])
    assert again == group_bootstrap(values, groups)


def test_one_group_or_one_query_leaves_no_interval() -> None:
    for found in (group_bootstrap([1, 0, 1], ["g"] * 3), paired_bootstrap([0.4])):
        assert found.low is None
        assert found.high is None
        assert not found.excludes_zero


def test_collections_then_queries_of_the_methods_example() -> None:
    found = hierarchical_bootstrap({"dl19": [-0.12453829509565943], "dl20": [-0.10022123822201341]})
    assert found.estimate == -0.11237976665883642
    assert (found.low, found.high) == (-0.12453829509565943, -0.10022123822201341)
    assert found.excludes_zero


def test_collections_weigh_equally_whatever_their_size() -> None:
    found = hierarchical_bootstrap({"small": [1.0] * 3, "large": [0.0] * 300}, QUICK)
    assert found.estimate == 0.5
    assert (found.low, found.high) == (0.0, 1.0)
    assert (found.units, found.n) == (2, 303)


def test_a_single_collection_is_resampled_by_query() -> None:
    values = [0.1, -0.2, 0.3, 0.05, 0.15]
    assert hierarchical_bootstrap({"dl20": values}) == paired_bootstrap(values)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(-1, 1), min_size=2, max_size=40), st.integers(0, 2**32))
def test_with_groups_of_one_the_group_bootstrap_is_the_paired_one(values: list[int], seed: int) -> None:
    recipe = Recipe(resamples=60, seed=seed)
    names = [f"{i:03d}" for i in range(len(values))]
    by_group, by_query = group_bootstrap(values, names, recipe), paired_bootstrap(values, recipe)
    assert (by_group.low, by_group.high) == (by_query.low, by_query.high)
    assert by_group.low is not None
    assert by_group.high is not None
    assert min(values) <= by_group.low <= by_group.high <= max(values)


def test_memory_stays_bounded_whatever_is_resampled() -> None:
    values = np.random.default_rng(0).normal(size=5000)
    tracemalloc.start()
    paired_bootstrap(values, Recipe(resamples=2000, seed=0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 2**20  # the whole index matrix would take 76 MiB


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf], [[1.0, 2.0]]])
def test_numbers_that_are_none_are_refused(values: Any) -> None:
    with pytest.raises(InvalidData):
        paired_bootstrap(values)


def test_values_and_groups_of_different_lengths_are_refused() -> None:
    with pytest.raises(BadArgument, match="one for each"):
        group_bootstrap([1, 0], ["a"])
    with pytest.raises(BadArgument, match="one for each"):
        sign_flip_test([1, 0], ["a"])
    with pytest.raises(BadArgument, match="macro"):
        group_bootstrap([1, 0], ["a", "b"], statistic="mean")  # type: ignore[arg-type]
    with pytest.raises(BadArgument):
        Recipe(resamples=0, seed=1)


# -- two measures at once -----------------------------------------------------------------------------------------


def test_measures_that_move_oppositely_are_said_to() -> None:
    rng = np.random.default_rng(3)
    strict = rng.choice([0, 0, 1], size=300)
    region = joint_bootstrap(strict, -0.5 * strict, [f"g{i // 3}" for i in range(300)])
    assert region.opposite == 1.0
    assert (region.both_up, region.both_down) == (0.0, 0.0)
    assert region.correlation == pytest.approx(-1)
    assert not region.contains(0, 0)


def test_a_joint_region_shares_its_draws_with_the_group_bootstrap() -> None:
    rng = np.random.default_rng(4)
    strict, rank, groups = rng.choice([-1, 0, 1], 90), rng.normal(size=90), [f"g{i % 31:02d}" for i in range(90)]
    region = joint_bootstrap(strict, rank, groups)
    assert region.first == group_bootstrap(strict, groups)
    assert region.second == group_bootstrap(rank, groups)
    alone = joint_bootstrap(strict, rank, recipe=QUICK)
    assert (alone.first.low, alone.second.high) == (
        paired_bootstrap(strict, QUICK).low,
        pytest.approx(paired_bootstrap(rank, QUICK).high),
    )


def test_the_region_holds_its_level_of_the_resamples_and_its_outline_bounds_it() -> None:
    rng = np.random.default_rng(5)
    first = rng.normal(0.1, 1, 400)
    region = joint_bootstrap(first, 0.4 * first + rng.normal(0, 1, 400), recipe=Recipe(resamples=1000, seed=2))
    inside = [region.contains(*point) for point in region.points.tolist()]
    assert sum(inside) == pytest.approx(950, abs=1)
    outline = region.outline(50)
    middle = np.array([region.first.estimate, region.second.estimate])
    assert all(region.contains(*(middle + 0.999 * (p - middle))) for p in outline)
    assert not any(region.contains(*(middle + 1.001 * (p - middle))) for p in outline)


def test_a_measure_that_never_changes_makes_a_flat_region() -> None:
    region = joint_bootstrap([0.0] * 20, np.linspace(0, 1, 20), recipe=QUICK)
    assert region.correlation is None
    assert region.opposite == region.both_up == 0.0
    assert region.contains(0.0, 0.5)
    assert not region.contains(0.1, 0.5)
    with pytest.raises(InvalidData, match="two groups"):
        joint_bootstrap([1.0, 2.0], [0.0, 1.0], ["g", "g"])


# -- tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "p"),
    [
        (4, 1, 0.375),  # 2 (1 + 5) / 32
        (20, 0, 2 / 2**20),
        (10, 10, 1.0),
        (0, 0, 1.0),
        (3, 2, 1.0),  # 2 (1 + 5 + 10) / 32
        (753, 65, 2.3750376213816045e-149),
        (195, 252, 0.008008865579404806),
    ],
)
def test_sign_tests_by_hand_and_published(a: int, b: int, p: float) -> None:
    assert sign_test(a, b) == p
    assert sign_test(b, a) == p


def test_every_published_sign_test_comes_out_exactly() -> None:
    for row in vectors("nevir_unit")["sign_test"]:
        assert sign_test(row["a"], row["b"]) == row["p"], row["name"]


def test_wilson_intervals_by_hand_and_published() -> None:
    assert wilson(1549, 2736) == pytest.approx((0.5475044472084505, 0.5846199860628873), abs=1e-15)
    low, high = wilson(0, 10)
    z2 = 1.959963984540054**2
    assert (low, high) == (0.0, pytest.approx(z2 / (10 + z2)))
    assert wilson(10, 10) == (pytest.approx(10 / (10 + z2)), 1.0)
    for row in vectors("nevir_unit")["wilson"]:
        assert wilson(row["s"], row["n"]) == pytest.approx(row["ci"], abs=1e-15)


def test_a_sign_flip_test_of_ones_is_the_sign_test() -> None:
    for a, b in ((20, 4), (7, 7), (1, 0), (60, 41), (3000, 2900)):
        found = sign_flip_test([1] * a + [-1] * b + [0] * 5)
        assert found.p == sign_test(a, b)
        assert (found.method, found.units) == ("exact", a + b)


def test_a_sign_flip_test_by_hand() -> None:
    # Group sums 3, -1, 2, total 4. Of 8 sign patterns 3+1+2, 3-1+2 and their mirrors reach 4: 4/8.
    values, groups = [1, 1, 1, -1, 2], ["a", "a", "a", "b", "c"]
    assert sign_flip_test(values, groups).p == 0.5
    assert sign_flip_test([3.5, -1, 2]).p == 0.5  # not whole: 4.5 is reached by 6.5, 4.5 and mirrors
    assert sign_flip_test([1, -1], ["a", "a"]).p == 1.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-6, 6), min_size=1, max_size=9))
def test_the_exact_count_is_the_count_over_all_sign_patterns(sums: list[int]) -> None:
    patterns = list(itertools.product((-1, 1), repeat=len(sums)))
    reach = [abs(sum(s * v for s, v in zip(signs, sums, strict=True))) >= abs(sum(sums)) for signs in patterns]
    assert sign_flip_test(sums).p == pytest.approx(sum(reach) / len(patterns), abs=1e-15)
    halves = sign_flip_test([s + 0.0 if s % 2 else s / 2 for s in sums])
    assert halves.method == "exact"


def test_many_real_valued_groups_are_drawn_with_a_named_seed() -> None:
    values = np.random.default_rng(0).normal(0.3, 1, 60)
    found = sign_flip_test(values, resamples=20_000, seed=9)
    assert (found.method, found.resamples, found.seed) == ("monte carlo", 20_000, 9)
    assert found == sign_flip_test(values, resamples=20_000, seed=9)
    # Rounded to whole numbers of hundredths it is counted exactly, and nearly the same.
    exact = sign_flip_test(np.rint(values * 100))
    assert exact.method == "exact"
    assert found.p == pytest.approx(exact.p, abs=0.01)


def test_queries_of_one_source_count_once() -> None:
    values, groups = [1] * 12, [f"g{i // 4}" for i in range(12)]
    assert sign_flip_test(values).p == 2 / 2**12
    assert sign_flip_test(values, groups).p == 2 / 2**3


def test_holm_by_hand() -> None:
    # Sorted .005 .01 .03 .04: times 4, 3, 2, 1 = .02 .03 .06 .04, and never below the one before.
    family = {"a": 0.04, "b": 0.01, "c": 0.005, "d": 0.03}
    assert holm(family) == pytest.approx({"a": 0.06, "b": 0.03, "c": 0.02, "d": 0.06})
    assert list(holm(family)) == list(family)
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}
    with pytest.raises(BadArgument, match="between 0 and 1"):
        holm({"a": 1.2})


# -- repeats ------------------------------------------------------------------------------------------------------


def test_the_noise_of_repeats_by_hand() -> None:
    floor = noise_floor([[1, 0, 1, 1], [1, 0, 0, 1], [0, 0, 1, 1]])
    assert (floor.repeats, floor.n) == (3, 4)
    assert (floor.low, floor.high, floor.range) == (0.5, 0.75, 0.25)
    assert floor.mean == pytest.approx(2 / 3 * 0.875)  # means .75 .5 .5
    assert floor.changed == pytest.approx((1 + 1 + 2) / 12)  # three pairs of runs over four units


def test_published_repeat_noise_is_three_of_371() -> None:
    first = [1] * 280 + [0] * 91
    assert noise_floor([first, [1] * 277 + [0] * 94]).range == pytest.approx(3 / 371)


def test_one_repeat_or_other_units_tell_no_noise() -> None:
    with pytest.raises(BadArgument, match="two repeats"):
        noise_floor([[1, 0]])
    with pytest.raises(BadArgument, match="same units"):
        noise_floor([[1, 0], [1]])


def test_the_pages_worked_toy_is_true() -> None:
    worked_example("evaluation_uncertainty.md")
