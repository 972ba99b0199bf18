"""Strict preference, bidirectional accuracy, position: hand-worked lists, laws, and the study's published figures."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from statistics import mean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.evaluation.pairs import designate, mark_conflicts
from pd_rerank.evaluation.preference import (
    PairOutcome,
    Place,
    aligned,
    compare,
    contrast,
    cross_table,
    differences,
    edge_ties_as_ties,
    pair_differences,
    pair_only_outcomes,
    pair_outcomes,
    per_direction,
    population,
    position,
    strict_preference,
    table_scores,
)
from pd_rerank.evaluation.resampling import GROUPS, group_bootstrap, sign_test
from tests.designated import case, direction, laid_out, outcome, pool, vectors, worked_example
from tests.tables import table

NAN = math.nan

METRIC_ROWS = [
    ("s1-p1:q1", "reverse", "strict"),
    ("s1-p1:q2", "strict", "strict"),
    ("s2-p2:q1", "strict", "tie"),
    ("s2-p2:q2", "reverse", "unavailable"),
    ("s2-p2:q1 again", "reverse", "reverse"),
]


def five(column: int) -> list[PairOutcome]:
    """Base (1) or model (2) of the five rows; the last repeats a side, so its pair is no complete one."""
    made = [outcome(row[0], row[column]) for row in METRIC_ROWS]
    repeated = direction("s2-p2:q1 again", pair_id="s2-p2", side="q1")
    return [*made[:4], replace(made[4], direction=repeated)]


def counted(n: int, pairs: int, *, strict: int, tie: int = 0, unavailable: int = 0, both: int = 0) -> list[PairOutcome]:
    """`n` directions in `pairs` complete pairs and single ones, with the given counts; the rest are reversed."""
    firsts = [f"g{i}-1:q1" for i in range(pairs)]
    seconds = [f"g{i}-1:q2" for i in range(pairs)]
    order = [name for pair in zip(firsts[:both], seconds[:both], strict=True) for name in pair]
    order += firsts[both:] + [f"s{i}-1:q1" for i in range(n - 2 * pairs)] + seconds[both:]
    kinds = ["strict"] * strict + ["tie"] * tie + ["unavailable"] * unavailable
    return [outcome(name, kind) for name, kind in itertools.zip_longest(order, kinds, fillvalue="reverse")]


# -- relations and places -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preferred", "other", "relation"),
    [
        (2.0, 1.0, "strict_correct"),
        (1.0, 2.0, "reverse"),
        (1.0, 1.0, "model_tie"),
        (0.1 + 0.2, 0.3, "strict_correct"),  # no tolerance
        (None, 1.0, "unavailable"),
        (1.0, NAN, "unavailable"),
        (NAN, NAN, "unavailable"),
    ],
)
def test_a_preference_is_strictly_greater_and_nothing_else(preferred: float, other: float, relation: str) -> None:
    assert compare(preferred, other) == relation


def test_places_in_a_list_with_ties_and_missing_scores() -> None:
    c = case({"a": 1.0, "o": 1.0, "p": 1.0, "z": 1.0, "w": 1.0})
    (found,) = pair_outcomes([c], [laid_out(c, {"z": 0.9, "a": 0.5, "o": 0.5, "p": 0.5, "w": None})])
    assert found.relation == "model_tie"
    assert found.preferred == Place(rank=4, best=2, worst=4)  # z, a, o, p: ids break the tie in the list alone
    assert found.other == Place(rank=3, best=2, worst=4)
    (found,) = pair_outcomes([c], [laid_out(c, {"o": 0.1, "a": 0.0, "p": None})])
    assert found.relation == "unavailable"
    assert found.preferred == Place(rank=3, best=3, worst=5)  # p, w and z have no score and stand last, by id
    assert found.other == Place(rank=1, best=1, worst=1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=8), st.randoms())
def test_a_rank_lies_between_the_best_and_the_worst_and_ids_never_change_a_relation(scores: list[int], r) -> None:  # type: ignore[no-untyped-def]
    names = [f"d{i}" for i in range(len(scores))]
    r.shuffle(names)
    found = []
    for ids in (names, names[::-1]):
        c = case(dict.fromkeys(ids, 0.0), direction(preferred=ids[0], other=ids[1]))
        (o,) = pair_outcomes([c], [laid_out(c, dict(zip(ids, scores, strict=True)))])
        assert o.preferred is not None
        assert o.preferred.best <= o.preferred.rank <= o.preferred.worst
        found.append((o.relation, o.preferred.best, o.preferred.worst))
    assert found[0] == found[1]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=6), st.integers(1, 6))
def test_expected_positions_are_the_means_over_all_orders_of_what_is_tied(scores: list[int], k: int) -> None:
    ids = [f"d{i}" for i in range(len(scores))]
    c = case(dict.fromkeys(ids, 0.0), direction(preferred="d0", other="d1"))
    outcomes = pair_outcomes([c], [laid_out(c, dict(zip(ids, scores, strict=True)))])
    orders = [o for o in itertools.permutations(range(len(ids))) if _sorted(scores, o)]
    ranks = [(order.index(0) + 1, order.index(1) + 1) for order in orders]
    found = position(outcomes, depths=[k], top=k, ties="expected")
    assert found.mrr == pytest.approx(mean(1 / p for p, _ in ranks))
    assert found.mean_rank_preferred == pytest.approx(mean(p for p, _ in ranks))
    assert found.preferred_at[k] == pytest.approx(mean(p <= k for p, _ in ranks))
    assert found.both_in_top == pytest.approx(mean(max(pair) <= k for pair in ranks))
    best, worst = (position(outcomes, top=k, ties=t) for t in ("best", "worst"))
    assert best.mrr == pytest.approx(max(1 / p for p, _ in ranks))
    assert worst.mrr == pytest.approx(min(1 / p for p, _ in ranks))
    assert best.both_in_top == max(max(pair) <= k for pair in ranks)
    assert worst.both_in_top == min(max(pair) <= k for pair in ranks)


def _sorted(scores: list[int], order: tuple[int, ...]) -> bool:
    return all(scores[a] >= scores[b] for a, b in itertools.pairwise(order))


# -- scores of pools ----------------------------------------------------------------------------------------------


def test_scores_are_laid_out_in_pool_order_and_foreign_documents_refused() -> None:
    c = case({"p": 2.0, "o": 1.0, "z": 0.0})
    (values,) = aligned([c], {"g-1:q1": {"o": 0.2, "p": 0.1}})
    assert values.tolist()[:2] == [0.1, 0.2]
    assert np.isnan(values[2])
    assert np.isnan(aligned([c], {})[0]).all()
    with pytest.raises(InvalidData, match="'x' has a score but is not in the pool"):
        aligned([c], {"g-1:q1": {"x": 1.0}})


def test_a_score_table_gives_its_mean_or_one_presentation() -> None:
    made = table([[0.9, 0.3], [0.5, 0.3]], query_id="g-1:q1")
    c = designate([direction(preferred="A", other="B")], [pool("g-1:q1", {"A": 1.0, "B": 0.0})])[0]
    assert aligned([c], table_scores([made]))[0] == pytest.approx([0.7, 0.3])
    assert aligned([c], table_scores([made], presentation=1))[0] == pytest.approx([0.5, 0.3])


def test_a_direction_without_a_pool_or_passage_stays_and_is_a_failure_of_the_planned_ones() -> None:
    ds = [direction("a-1:q1"), direction("a-1:q2", "o", "x"), direction("b-1:q1", "p", "o")]
    cases = designate(ds, [pool("a-1:q1", {"p": 2.0, "o": 1.0}), pool("a-1:q2", {"p": 2.0, "o": 1.0})])
    outcomes = pair_outcomes(cases, [c.first for c in cases])
    assert [(o.relation, o.missing) for o in outcomes] == [
        ("strict_correct", None),
        ("unavailable", "other"),
        ("unavailable", "pool"),
    ]
    covered, planned = (population(outcomes, which) for which in ("primary", "planned"))
    assert (strict_preference(covered).strict, strict_preference(planned).strict) == (1.0, 1 / 3)
    assert (strict_preference(planned).low, strict_preference(planned).high) == (1 / 3, 1.0)
    assert position(planned).mrr == pytest.approx((1 + 1 / 2 + 0) / 3)  # o is found at 2, though its counterpart is not
    assert (position(planned).n, position(planned).ranked) == (3, 1)


def test_conflicts_leave_the_primary_population_and_come_back_on_request() -> None:
    ds = mark_conflicts([direction("a-1:q1", query="x"), direction("a-1:q2", "o", "p", query="x"), direction("b-1:q1")])
    outcomes = [PairOutcome(direction=d, relation="strict_correct") for d in ds]
    sizes = {which: len(population(outcomes, which)) for which in ("primary", "planned", "with_conflicts")}
    assert sizes == {"primary": 1, "planned": 1, "with_conflicts": 3}
    with pytest.raises(BadArgument, match="primary, planned"):
        population(outcomes, "all")  # type: ignore[arg-type]


def test_pair_only_scores_have_relations_and_no_places() -> None:
    ds = [direction("a-1:q1"), direction("a-1:q2"), direction("b-1:q1")]
    outcomes = pair_only_outcomes(ds, {"a-1:q1": (4, 1), "a-1:q2": (None, 2)})
    assert [o.relation for o in outcomes] == ["strict_correct", "unavailable", "unavailable"]
    found = position(outcomes)
    assert (found.ranked, found.mean_rank_preferred, found.median_designated) == (0, None, None)
    bounds = strict_preference(outcomes)
    assert (bounds.low, bounds.high) == (1 / 3, 1.0)


def test_arrays_that_do_not_fit_the_cases_are_refused() -> None:
    c = case({"p": 2.0, "o": 1.0})
    with pytest.raises(BadArgument, match="for 1 cases"):
        pair_outcomes([c], [])
    with pytest.raises(BadArgument, match="pool of 2"):
        pair_outcomes([c], [np.zeros(3)])
    with pytest.raises(InvalidData, match="no directions to measure"):
        strict_preference([])
    for wrong in ("mrr", "preferred@0", "preferred@x", "strict@1", "both"):
        with pytest.raises(BadArgument, match="unknown measure"):
            per_direction(five(1), wrong)
    with pytest.raises(BadArgument, match="rule for ties"):
        per_direction(five(1), "strict", ties="id")  # type: ignore[arg-type]


# -- figures by hand ----------------------------------------------------------------------------------------------


def test_the_five_rows_of_the_studys_metric_example() -> None:
    found = strict_preference(five(2))
    assert (found.n, found.strict_correct, found.reverse, found.model_tie, found.unavailable) == (5, 2, 1, 1, 1)
    assert (found.strict, found.group_macro) == (0.4, 0.5)  # groups: 2 of 2, 0 of 3
    assert (found.complete_pairs, found.both, found.paired) == (1, 1, 1.0)  # p2 has q1 twice and is no pair
    change = contrast(five(2), five(1))
    assert (change.common_correct, change.corrections, change.regressions, change.common_not, change.net) == (
        1,
        1,
        1,
        2,
        0,
    )
    assert (change.groups_positive, change.groups_zero, change.groups_negative) == (1, 0, 1)


def test_group_and_pair_means_of_the_studys_example() -> None:
    large = ["tie", "reverse", "reverse", "reverse"]
    names = ["large-1:q1", "large-1:q2", "large-2:q1", "large-2:q2", "small-1:q1", "small-1:q2"]
    found = strict_preference([outcome(n, r) for n, r in zip(names, [*large, "strict", "strict"], strict=True)])
    assert (found.strict, found.group_macro) == (pytest.approx(1 / 3), 0.5)
    assert (found.complete_pairs, found.both, found.pair_macro) == (3, 1, 0.5)


def test_positions_by_hand() -> None:
    ranks = [(1, 2), (4, 1), (12, 3), (2, 11)]
    outcomes = [
        outcome(f"g{i}-1:q1", "strict", preferred=Place(rank=p, best=p, worst=p), other=Place(rank=o, best=o, worst=o))
        for i, (p, o) in enumerate(ranks)
    ]
    found = position(outcomes)
    assert found.mrr == pytest.approx((1 + 1 / 4 + 1 / 12 + 1 / 2) / 4)
    assert found.preferred_at == {1: 0.25, 3: 0.5, 10: 0.75}
    assert (found.mean_rank_preferred, found.mean_rank_other) == (4.75, 4.25)
    assert (found.median_preferred, found.median_other, found.median_designated) == (3.0, 2.5, 2.5)
    assert found.both_in_top == 2


def test_paired_needs_both_sides_in_the_population() -> None:
    found = strict_preference([outcome("a-1:q1", "strict"), outcome("b-1:q2", "strict")])
    assert (found.complete_pairs, found.paired, found.pair_macro) == (0, None, None)


def test_edge_ties_can_be_counted_as_the_ties_they_are() -> None:
    outcomes = [outcome("a-1:q1", "strict", edge_tie=True), outcome("a-1:q2", "strict")]
    assert strict_preference(outcomes).edge_ties == 1
    assert strict_preference(edge_ties_as_ties(outcomes)).strict == 0.5


def test_differences_keep_failures_and_dropping_is_counted() -> None:
    ours = [outcome("a-1:q1", "strict"), outcome("a-1:q2", "unavailable"), outcome("b-1:q1", "tie")]
    theirs = [outcome("b-1:q1", "strict"), outcome("a-1:q1", "reverse"), outcome("a-1:q2", "strict")]
    kept = differences(ours, theirs)
    assert kept.values.tolist() == [1, -1, -1]
    assert (kept.ids, kept.groups, kept.dropped) == (("a-1:q1", "a-1:q2", "b-1:q1"), ("a", "a", "b"), 0)
    dropped = differences(ours, theirs, drop_unavailable=True)
    assert (dropped.values.tolist(), dropped.dropped) == ([1, -1], 1)


def test_differences_of_positions_go_into_the_same_bootstrap() -> None:
    def at(*ranks: int) -> list[PairOutcome]:
        return [
            outcome(f"g{i // 2}-1:q{i % 2 + 1}", "strict", preferred=Place(rank=r, best=r, worst=r))
            for i, r in enumerate(ranks)
        ]

    found = differences(at(1, 2, 4, 1), at(2, 2, 1, 2), "reciprocal_rank")
    assert found.values.tolist() == [0.5, 0, -0.75, 0.5]
    assert group_bootstrap(found.values, found.groups, GROUPS).estimate == pytest.approx(0.0625)


def test_pair_differences_take_complete_pairs_and_count_the_others() -> None:
    names = ["a-1:q1", "a-1:q2", "b-1:q1", "b-1:q2", "c-1:q1"]
    ours = [outcome(n, r) for n, r in zip(names, ["strict", "strict", "strict", "tie", "strict"], strict=True)]
    theirs = [outcome(n, r) for n, r in zip(names, ["strict", "reverse", "strict", "strict", "tie"], strict=True)]
    found = pair_differences(ours, theirs)
    assert (found.values.tolist(), found.groups, found.ids, found.dropped) == ([1, -1], ("a", "b"), ("a-1", "b-1"), 1)


def test_two_rankers_are_compared_on_the_same_directions_and_pools() -> None:
    a, b = outcome("a-1:q1", "strict", pool_size=3), outcome("b-1:q1", "strict", pool_size=3)
    with pytest.raises(InvalidData, match="one side only"):
        contrast([a], [a, b])
    with pytest.raises(InvalidData, match="a pool of 3 on one side and of 4"):
        contrast([a], [outcome("a-1:q1", "reverse", pool_size=4)])
    with pytest.raises(InvalidData, match="twice"):
        differences([a, a], [a, b])


def test_a_pair_of_two_sources_is_refused() -> None:
    one = PairOutcome(direction=direction("a-1:q1"), relation="reverse")
    two = PairOutcome(direction=direction("a-1:q2", group="b"), relation="reverse")
    with pytest.raises(InvalidData, match="one source"):
        strict_preference([one, two])


# -- published figures --------------------------------------------------------------------------------------------

TABLE_II = {
    "fusion": (52.30, 10.79),
    "E0": (56.62, 21.20),
    "N8": (54.53, 15.04),
    "qwen_k20": (77.45, 58.99),
    "bge_k20": (69.77, 43.36),
    "qwen_k20_E0tie": (78.47, 61.70),
    "bge_k20_E0tie": (69.74, 43.29),
}


@pytest.mark.parametrize("name", list(TABLE_II))
def test_table_two_follows_from_its_counts(name: str) -> None:
    row = vectors("nevir_anchors")["test_primary_2736"][name]
    found = strict_preference(counted(2736, 1363, strict=row["strict"], tie=row["tie"], both=row["both"]))
    assert (found.n, found.complete_pairs) == (2736, 1363)
    assert (found.strict_correct, found.reverse, found.model_tie) == (row["strict"], row["reverse"], row["tie"])
    assert found.both == row["both"]
    assert (round(100 * found.strict, 2), round(100 * (found.paired or 0), 2)) == TABLE_II[name]


def test_published_contrasts_follow_from_corrections_and_regressions() -> None:
    anchors = vectors("nevir_anchors")
    tables = {**anchors["test_primary_2736"], **{f"{k}_L1": v for k, v in anchors["test_L1"].items()}}
    published = {(r["a"], r["b"]): r["p"] for r in _named_sign_tests(vectors("nevir_unit")["sign_test"])}
    for row in anchors["test_contrasts_pp"]:
        dropped = row.get("dropped_unavailable", 0)
        n, better, worse = 2736, row["corr"], row["dmg"]
        strict = tables[row["a"]]["strict"]
        # Of the dropped directions the reference had right what the totals leave over.
        dropped_right = tables[row["b"]]["strict"] - (strict - better + worse)
        pairs = [("strict", "reverse")] * better + [("reverse", "strict")] * worse
        pairs += [("strict", "strict")] * (strict - better)
        pairs += [("unavailable", "strict")] * dropped_right + [("unavailable", "reverse")] * (dropped - dropped_right)
        pairs += [("reverse", "reverse")] * (n - len(pairs))
        ours, theirs = ([outcome(f"g{i}-1:q1", p[side]) for i, p in enumerate(pairs)] for side in (0, 1))
        assert strict_preference(theirs).strict_correct == tables[row["b"]]["strict"]
        found = differences(ours, theirs, drop_unavailable=True)
        assert (len(found.values), found.dropped) == (row.get("n", n), dropped)
        assert 100 * found.values.mean() == pytest.approx(row["est"], abs=1e-9)
        if not dropped:
            change = contrast(ours, theirs)
            assert (change.corrections, change.regressions) == (better, worse)
        assert sign_test(better, worse) == published[row["a"], row["b"]]


def _named_sign_tests(rows: list[dict]) -> list[dict]:  # type: ignore[type-arg]
    names = {"Qwen L1": "qwen_L1", "Qwen L2": "qwen_k20", "Qwen L2(E0 tie)": "qwen_k20_E0tie"}
    names |= {"BGE L1": "bge_L1", "BGE L2": "bge_k20", "BGE L2(E0 tie)": "bge_k20_E0tie"}
    named = [(r, *r["name"].split(" - ")) for r in rows if " - " in r["name"]]
    return [{"a": names[a], "b": b, "p": r["p"]} for r, a, b in named if a in names and b in ("fusion", "E0")]


def test_dropping_the_unavailable_is_another_estimand() -> None:
    """The study's 8.19 and 8.66 points for pair-only scoring against E0: n 2,736 and n 2,713."""
    pairs = [("strict", "reverse")] * 715 + [("reverse", "strict")] * 480 + [("strict", "strict")] * 1058
    pairs += [("unavailable", "strict")] * 11 + [("unavailable", "reverse")] * 12
    pairs += [("reverse", "reverse")] * (2736 - len(pairs))
    ours, theirs = ([outcome(f"g{i}-1:q1", p[side]) for i, p in enumerate(pairs)] for side in (0, 1))
    assert round(100 * differences(ours, theirs).values.mean(), 2) == 8.19
    assert round(100 * differences(ours, theirs, drop_unavailable=True).values.mean(), 2) == 8.66


def test_the_examples_worked_above_are_the_published_ones() -> None:
    unit = vectors("nevir_unit")
    rows = [(f"{group}-{pair}:{side}", base, model) for group, pair, side, base, model in unit["metrics"]["rows"]]
    assert [(name.replace(" again", ""), base, model) for name, base, model in METRIC_ROWS] == rows
    want, found = unit["metrics"]["expected"], strict_preference(five(2))
    assert (found.n, found.strict_correct, found.reverse, found.model_tie, found.unavailable) == tuple(
        want[key] for key in ("n", "strict", "reverse", "tie", "unavailable")
    )
    assert (found.strict, found.group_macro, found.complete_pairs, found.both) == tuple(
        want[key] for key in ("micro", "group_macro", "complete_pairs", "both")
    )
    change = contrast(five(2), five(1))
    assert want["contrast"] == {
        "common_correct": change.common_correct,
        "corrected": change.corrections,
        "damaged": change.regressions,
        "common_not": change.common_not,
        "net": change.net,
    }
    macro = unit["macro_metrics"]
    short = {"correct": "strict", "wrong": "reverse", "tie": "tie"}
    found = strict_preference(
        [
            outcome(f"{group}-{i // 2}:q{i % 2 + 1}", short[kind])
            for group, kinds in macro["outcomes"].items()
            for i, kind in enumerate(kinds)
        ]
    )
    assert (found.strict_correct, found.reverse, found.model_tie, found.complete_pairs, found.both) == tuple(
        macro["expected"][key] for key in ("correct", "wrong", "tie", "pairs", "pair_correct")
    )
    assert (found.group_macro, found.strict, found.pair_macro) == tuple(
        macro["expected"][key] for key in ("group_macro", "micro", "pair_macro")
    )


def test_development_and_confirmation_contrasts_follow_from_their_counts() -> None:
    anchors = vectors("nevir_anchors")
    for part, key, n, pairs in (
        ("confirmation", "confirmation_371", 371, 185),
        ("development", "development_74", 74, 37),
    ):
        rows = anchors[key]
        counts = {"gpt_k20": rows["gpt_k20"], "bge_k20": rows["bge_k20"], "E0": rows["E0"], "fusion": rows["fusion"]}
        counts["qwen_k20"] = rows["qwen_k20_first" if part == "confirmation" else "qwen14_k20"]
        found = {
            name: strict_preference(counted(n, pairs, strict=row["strict"], tie=row.get("tie", 0), both=row["both"]))
            for name, row in counts.items()
        }
        assert all(p.complete_pairs == pairs for p in found.values())
        for name, (estimate, _, _) in anchors["contrasts_dev_conf_pp"][part].items():
            ours, _, theirs = name.rpartition("_")
            assert round(100 * (found[ours].strict - found[theirs].strict), 2) == estimate, name


def test_pair_only_scoring_follows_from_its_counts() -> None:
    rows = vectors("nevir_anchors")["test_L1"]
    for name, percent in (("qwen", 64.80), ("bge", 69.96)):
        row = rows[name]
        found = strict_preference(
            counted(2736, 1363, strict=row["strict"], tie=row["tie"], unavailable=row["unavailable"], both=row["both"])
        )
        assert (round(100 * found.strict, 2), found.reverse, found.both) == (percent, row["reverse"], row["both"])
        assert found.high - found.low == pytest.approx(row["unavailable"] / 2736)


def test_with_the_conflict_pair_the_counts_are_the_published_ones() -> None:
    anchors = vectors("nevir_anchors")
    for name in ("fusion", "E0", "N8", "qwen_k20", "bge_k20"):
        primary, with_conflict = (anchors[key][name] for key in ("test_primary_2736", "test_incl_conflict_2738"))
        base = counted(2736, 1363, strict=primary["strict"], tie=primary["tie"], both=primary["both"])
        ds = mark_conflicts([direction("1314-2:q1", query="x"), direction("1314-2:q2", "o", "p", query="x")])
        # The same query and the same scores: whatever the ranker says, one of the two labels is met.
        base += [PairOutcome(direction=d, relation=r) for d, r in zip(ds, ("strict_correct", "reverse"), strict=True)]
        assert strict_preference(population(base)).strict_correct == primary["strict"]
        found = strict_preference(population(base, "with_conflicts"))
        assert (found.n, found.complete_pairs) == (2738, 1364)
        assert (found.strict_correct, found.reverse, found.both) == tuple(
            with_conflict[key] for key in ("strict", "reverse", "both")
        )


def test_the_cross_table_of_pair_only_and_window_outcomes() -> None:
    published = vectors("nevir_decomposition")["l1_l2_cross"]
    short = {"strict": "strict_correct", "tie": "model_tie"}
    pairs = [(a, b) for a, row in published.items() for b, n in row.items() for _ in range(n)]
    one, two = ([outcome(f"g{i}-1:q1", p[side]) for i, p in enumerate(pairs)] for side in (0, 1))
    found = cross_table(one, two)
    assert {a: {b: found[short.get(a, a)][short.get(b, b)] for b in row} for a, row in published.items()} == published
    assert {a: sum(found[short.get(a, a)].values()) for a in published} == vectors("nevir_decomposition")["l1_outcomes"]


def test_the_pages_worked_toy_is_true() -> None:
    worked_example("evaluation_preference.md")
