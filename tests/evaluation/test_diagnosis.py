"""What stands behind a figure: branches, ties, labels that may be wrong, and the order two passages were shown in."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_rerank.errors import BadArgument
from pd_rerank.evaluation.diagnosis import (
    both_orders,
    decompose,
    flip_labels,
    flips_to_overturn,
    label_sensitivity,
    resolve_ties,
    undecided,
)
from pd_rerank.evaluation.preference import PairOutcome, Place, contrast, position, strict_preference
from pd_rerank.evaluation.replay import window_rerank
from tests.designated import case, direction, laid_out, outcome, vectors

RELATIONS = ["strict", "reverse", "tie", "unavailable"]


def made(*relations: str) -> list[PairOutcome]:
    """Outcomes of pairs g0-1, g1-1, …, two sides each, with these relations."""
    return [outcome(f"g{i // 2}-1:q{i % 2 + 1}", r) for i, r in enumerate(relations)]


# -- branches and ties --------------------------------------------------------------------------------------------


def test_a_small_decomposition_by_hand() -> None:
    first = [{"p": 2.0, "o": 1.0}, {"p": 1.0, "o": 2.0}, {"p": 1.0, "o": 2.0}, {"p": 2.0, "o": 1.0}]
    grades = [{"p": 4, "o": 4}, {"p": 4, "o": 4}, {"p": 3, "o": 3}, {"p": 1, "o": 4}]
    cases = [case(f, direction(f"g{i}-1:q1")) for i, f in enumerate(first)]
    given_grades = [laid_out(c, g) for c, g in zip(cases, grades, strict=True)]
    outcomes, reference = ([r.outcome for r in window_rerank(cases, given_grades, k=k)] for k in (2, 0))
    found = decompose(outcomes, reference)
    assert (found.overall.strict, found.overall.reverse, found.overall.regressions) == (1, 3, 1)
    assert {pair: cell.n for pair, cell in found.matrix.items()} == {(1, 4): 1, (3, 3): 1, (4, 4): 2}
    assert (found.tie_share, found.tie_failure_share) == (3 / 4, 2 / 3)
    assert (found.top_grade, found.saturation, found.top_ties, found.top_failures) == (4, 2 / 3, 2, 1)
    assert decompose(outcomes, reference, top_grade=5).saturation == 0
    # Of four, three are undecided and the scorer itself has none right: 0, 3/8 and 3/4 at rates 0, 1/2, 1.
    assert resolve_ties(outcomes, [0, 0.5, 1, 1 / 3]) == {0: 0.0, 0.5: 0.375, 1: 0.75, 1 / 3: pytest.approx(0.25)}
    assert [o.direction.direction_id for o in undecided(outcomes)] == ["g0-1:q1", "g1-1:q1", "g2-1:q1"]


def test_outcomes_that_saw_no_window_have_no_branches() -> None:
    with pytest.raises(BadArgument, match="window_rerank"):
        decompose(made("strict"), made("strict"))


def test_elsewhere_exact_ties_are_the_undecided_ones() -> None:
    outcomes = made("strict", "tie", "tie", "reverse", "unavailable")
    assert resolve_ties(outcomes, [0, 1]) == {0: 0.2, 1: 0.6}
    with pytest.raises(BadArgument, match="between 0 and 1"):
        resolve_ties(outcomes, [1.5])


def test_the_published_what_if_of_resolved_ties() -> None:
    """738 grade ties, 359 of them right by fusion: at that rate 2,119 of 2,736; at 1, 2,498."""
    branches = vectors("nevir_decomposition")["branches"]
    outcomes = [
        outcome(f"g{name}{i}-1:q1", relation, branch=name.removesuffix("_fusion"))
        for name, row in branches.items()
        for i, relation in enumerate(r for r in ("strict", "reverse", "tie") for _ in range(row[r]))
    ]
    rate = 359 / 738
    found = resolve_ties(outcomes, [0, rate, 1])
    assert [round(share * 2736) for share in found.values()] == [1760, 2119, 2498]
    assert len(undecided(outcomes)) == 738


def test_where_pair_only_ties_went_in_the_window() -> None:
    record = vectors("nevir_decomposition")
    moved = record["l1_tie_to_l2_branch"]
    outcomes = [
        outcome(f"g{name}{i}-1:q1", "strict" if i < right else "reverse", branch=branch)
        for name, (n, right) in moved.items()
        for branch in [{"grade_tie_fusion": "grade_tie", "one_in_one_out": "preferred_only_in_window"}.get(name, name)]
        for i in range(n)
    ]
    found = decompose(outcomes, outcomes)
    assert found.overall.n == record["l1_outcomes"]["tie"]
    assert found.overall.strict == record["l1_l2_cross"]["tie"]["strict"]
    assert found.branches["grade_tie"].n == 707


# -- labels that may be wrong -------------------------------------------------------------------------------------


def test_a_flipped_label_makes_the_other_passage_the_preferred_one() -> None:
    p, o = Place(rank=1, best=1, worst=1), Place(rank=4, best=3, worst=4)
    before = [
        outcome("a-1:q1", "strict", preferred=p, other=o, branch="preferred_only_in_window", grades=(4.0, None)),
        outcome("b-1:q1", "tie", preferred=o, other=o),
        outcome("c-1:q1", "unavailable", missing="preferred", other=o),
    ]
    flipped = flip_labels(before, ["a-1:q1", "b-1:q1", "c-1:q1"])
    assert [f.relation for f in flipped] == ["reverse", "model_tie", "unavailable"]
    assert (flipped[0].preferred, flipped[0].direction.preferred) == (o, "o")
    assert (flipped[0].branch, flipped[0].grades) == ("other_only_in_window", (None, 4.0))
    assert (flipped[2].missing, flipped[2].preferred) == ("other", o)
    assert position(flip_labels(before, ["a-1:q1"])).mrr == pytest.approx((1 / 4 + 1 / 4 + 0) / 3)
    assert flip_labels(flipped, ["a-1:q1", "b-1:q1", "c-1:q1"]) == before
    with pytest.raises(BadArgument, match="no direction 'x'"):
        flip_labels(before, ["x"])


def test_label_noise_by_hand() -> None:
    # 3 strict, 1 reverse, 1 tie of 5: each flip changes the count by -1, -1, -1, +1, 0.
    none, some, all_ = label_sensitivity(made("strict", "strict", "strict", "reverse", "tie"), [0, 0.1, 1])
    assert (none.expected, none.deviation) == (0.6, 0.0)
    assert some.expected == pytest.approx((3 + 0.1 * -2) / 5)
    assert some.deviation == pytest.approx(math.sqrt(0.09 * 4) / 5)
    assert (all_.expected, all_.deviation) == (0.2, 0.0)
    # By pairs: changes -2, 0 (strict with reverse), 0.
    paired = label_sensitivity(made("strict", "strict", "strict", "reverse", "tie"), [0.1], unit="pair")[0]
    assert paired.deviation == pytest.approx(math.sqrt(0.09 * 4) / 5)
    with pytest.raises(BadArgument, match="between 0 and 1"):
        label_sensitivity(made("strict"), [-0.1])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(RELATIONS), st.sampled_from(RELATIONS)), min_size=1, max_size=6), st.floats(0, 1)
)
def test_label_noise_is_the_mean_and_deviation_over_all_flips(rows: list[tuple[str, str]], rate: float) -> None:
    ours, theirs = ([outcome(f"g{i}-1:q1", r[side]) for i, r in enumerate(rows)] for side in (0, 1))
    ids = [o.direction.direction_id for o in ours]
    values, weights = [], []
    for flips in itertools.product((False, True), repeat=len(ids)):
        chosen = [i for i, f in zip(ids, flips, strict=True) if f]
        a, b = (strict_preference(flip_labels(o, chosen)).strict for o in (ours, theirs))
        values.append(a - b)
        weights.append(rate ** len(chosen) * (1 - rate) ** (len(ids) - len(chosen)))
    expected = np.dot(values, weights)
    found = label_sensitivity(ours, [rate], reference=theirs)[0]
    assert found.expected == pytest.approx(expected, abs=1e-12)
    assert found.deviation**2 == pytest.approx(np.dot((np.array(values) - expected) ** 2, weights), abs=1e-12)
    assert flips_to_overturn(ours, theirs) == _fewest(ours, theirs, ids)


def _fewest(ours: list[PairOutcome], theirs: list[PairOutcome], ids: list[str]) -> int | None:
    net = contrast(ours, theirs).net
    for count in range(len(ids) + 1):
        for chosen in itertools.combinations(ids, count):
            if contrast(flip_labels(ours, chosen), flip_labels(theirs, chosen)).net * np.sign(net) <= 0:
                return count
    return None


def test_label_flips_that_overturn_a_difference_by_hand() -> None:
    # Net 2: one label where ours is right and theirs reversed is worth 2; one where theirs ties is worth 1.
    ours, theirs = made("strict", "strict", "reverse"), made("reverse", "tie", "reverse")
    assert flips_to_overturn(ours, theirs) == 1
    assert flips_to_overturn(ours, ours) == 0
    assert flips_to_overturn(made("strict", "strict"), made("tie", "tie")) == 2


# -- both presentation orders -------------------------------------------------------------------------------------


def test_right_only_if_right_in_both_orders() -> None:
    given_order = made("strict", "strict", "reverse", "reverse", "tie", "strict")
    swapped = made("strict", "reverse", "strict", "reverse", "strict", "unavailable")
    found = both_orders(given_order, swapped)
    assert (found.n, found.right, found.echoes, found.wrong, found.open) == (6, 1, 2, 1, 2)
    assert (found.strict, found.echo_rate) == (1 / 6, 1 / 3)
    assert (found.first_echoes, found.last_echoes) == (None, None)


def test_an_echo_chooses_what_is_shown_first_or_what_is_shown_last() -> None:
    given_order, swapped = made("strict", "reverse", "strict", "strict"), made("reverse", "strict", "reverse", "strict")
    found = both_orders(given_order, swapped, preferred_first=[True, False, False, True])
    # 1: preferred first and chosen. 2: preferred last, the other chosen first. 3: preferred last, chosen all the same.
    assert (found.echoes, found.first_echoes, found.last_echoes) == (3, 2, 1)
    with pytest.raises(BadArgument, match="4 outcomes"):
        both_orders(given_order, swapped, preferred_first=[True])


def test_a_scorer_that_only_sees_places_is_never_right_in_both_orders() -> None:
    names = [o.direction.direction_id for o in made(*["strict"] * 8)]
    first = [i % 3 == 0 for i in range(8)]
    by_place = [outcome(n, "strict" if f else "reverse") for n, f in zip(names, first, strict=True)]
    turned = [outcome(n, "reverse" if f else "strict") for n, f in zip(names, first, strict=True)]
    found = both_orders(by_place, turned, preferred_first=first)
    assert (found.right, found.echo_rate, found.first_echoes) == (0, 1.0, 8)
    assert Counter(o.relation for o in by_place)["strict_correct"] == 3
