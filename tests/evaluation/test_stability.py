"""What reordering changes, against hand-worked values, published vectors, and slow definitions written out."""

from __future__ import annotations

import itertools
import math
import re
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pd_rerank.decisions import Threshold
from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.evaluation import stability as module
from pd_rerank.evaluation.presentations import Presentations, presentations_of_runs, shown_position, strict_ranks
from pd_rerank.evaluation.stability import (
    FIGURES,
    fit_threshold_f1,
    fit_threshold_retention,
    gold_rank_variance,
    kendall_matrix,
    margin,
    matched_retention,
    mean_over_collections,
    ndcg_by_presentation,
    pool_buckets,
    position_buckets,
    rbo,
    rbo_instability,
    retained_overlap,
    score_spread,
    set_change,
    set_flip_rate,
    set_quality,
    stability,
    summarise,
    tau_psi,
    tau_psi_b,
    tie_rate,
    top_k,
    zeng_psi,
)
from pd_rerank.files import RunHit
from pd_rerank.windows import partition, permutation
from tests.tables import table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evaluation_stability.md"
NAN = float("nan")
SCORES = np.array([[0.9, 0.7, 0.5, 0.1], [0.8, 0.75, 0.4, 0.45], [0.55, 0.6, 0.5, 0.2]])
"""The method's example: A, B, C, D over three presentations, ranked ABCD, ABDC, BACD."""
GRADES = {"A": 3, "B": 2, "D": 1, "C": 0}


def example() -> Presentations:
    return Presentations.of_scores("q", "ABCD", SCORES)


# -- ranks -------------------------------------------------------------------------------------------------


def test_ties_are_broken_by_id_and_not_by_column() -> None:
    assert strict_ranks([0.5, 0.9, 0.5], ["B", "C", "A"]).tolist() == [2, 0, 1]
    assert strict_ranks([0.5, 0.9, 0.5]).tolist() == [1, 0, 2]
    assert strict_ranks([0.5, 0.9, 0.5], position=[2, 1, 0]).tolist() == [2, 0, 1]


def test_a_missing_score_has_no_rank() -> None:
    assert strict_ranks([[NAN, 0.9, 0.5], [0.1, NAN, NAN]], list("BCA")).tolist() == [[-1, 0, 1], [0, -1, -1]]
    assert strict_ranks(np.zeros((0, 3))).shape == (0, 3)


@given(
    hnp.arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(0, 30)), elements=st.sampled_from([0.0, 0.5, 1.0])),
    st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=50)
def test_ranks_follow_the_candidates_when_columns_are_shuffled(scores: np.ndarray, random: object) -> None:
    ids = [f"d{i:02d}" for i in range(scores.shape[1])]
    order = list(range(scores.shape[1]))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = strict_ranks(scores[:, order], [ids[i] for i in order])
    assert (shuffled == strict_ranks(scores, ids)[:, order]).all()


@pytest.mark.parametrize("method", ["contiguous", "round_robin"])
def test_the_shown_position_is_told_by_slot_and_window(method: str) -> None:
    order = permutation(11, seed=3)
    slot, window = np.full((1, 12), -1), np.full((1, 12), -1)
    for w, positions in enumerate(partition(order, width=4, method=method)):  # type: ignore[arg-type]
        slot[0, positions], window[0, positions] = np.arange(len(positions)), w
    shown = shown_position(slot, window, method)  # type: ignore[arg-type]
    assert shown[0, order].tolist() == list(range(11))
    assert shown[0, 11] == 11  # the blank one, which nobody saw
    with pytest.raises(BadArgument):
        shown_position(slot, window, "hashed")  # type: ignore[arg-type]


# -- τ-PSI -------------------------------------------------------------------------------------------------


def test_tau_psi_of_the_methods_example() -> None:
    ranks = example().ranks
    assert kendall_matrix(ranks)[np.triu_indices(3, 1)] == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert tau_psi(ranks) == pytest.approx(0.2222222, abs=5e-8)
    assert tau_psi_b(SCORES) == pytest.approx(2 / 9)


def test_tau_psi_is_zero_for_one_ranking_half_for_unrelated_ones_and_one_for_the_reverse() -> None:
    same = np.tile(np.arange(6), (4, 1))
    assert tau_psi(same) == 0
    assert tau_psi(np.array([np.arange(6), np.arange(6)[::-1]])) == 1
    every = np.array(list(itertools.permutations(range(4))))
    assert tau_psi(every) == pytest.approx(
        (1 + 1 / 23) / 2
    )  # all 24 rankings: the mean τ of two different ones is -1/23


def test_the_mean_over_collections_of_the_methods_example() -> None:
    dl = {"dl19": [0.0694329339910735], "dl20": [0.07427135553061479], "none": [NAN]}
    assert mean_over_collections(dl) == pytest.approx(0.07185214476084414, abs=1e-16)
    assert math.isnan(mean_over_collections({}))


def slow_tau(a: Sequence[float], b: Sequence[float], variant: str) -> float:
    pairs = [(a[i] - a[j], b[i] - b[j]) for i, j in itertools.combinations(range(len(a)), 2)]
    pairs = [pair for pair in pairs if not any(map(math.isnan, pair))]
    balance = sum(np.sign(x) * np.sign(y) for x, y in pairs)
    size = len(pairs) if variant == "a" else math.sqrt(sum(x != 0 for x, _ in pairs) * sum(y != 0 for _, y in pairs))
    return balance / size if size else NAN


@given(
    hnp.arrays(
        np.float64, st.tuples(st.integers(1, 5), st.integers(1, 7)), elements=st.sampled_from([0.0, 0.5, 1.0, NAN])
    )
)
@settings(deadline=None, max_examples=100)
def test_kendalls_tau_agrees_with_its_definition_ties_and_gaps_included(scores: np.ndarray) -> None:
    for variant in ("a", "b"):
        slow = [[slow_tau(a, b, variant) for b in scores] for a in scores]
        assert kendall_matrix(scores, variant=variant) == pytest.approx(np.array(slow), nan_ok=True)  # type: ignore[arg-type]


@given(
    st.integers(2, 6).flatmap(
        lambda k: st.integers(2, 9).flatmap(lambda n: st.lists(st.permutations(range(n)), min_size=k, max_size=k))
    )
)
@settings(deadline=None, max_examples=100)
def test_the_closed_form_is_the_mean_over_pairs(rankings: list[list[int]]) -> None:
    ranks = np.array(rankings)
    taus = [slow_tau(a, b, "a") for a, b in itertools.combinations(rankings, 2)]
    assert tau_psi(ranks) == pytest.approx((1 - np.mean(taus)) / 2)
    assert tau_psi(np.stack([ranks, ranks[:, ::-1]])) == pytest.approx([tau_psi(ranks)] * 2)


def test_blocks_and_wide_numbers_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    ranks = np.argsort(rng.random((3, 300, 270)), axis=-1)  # more than 256 candidates and presentations
    whole = tau_psi(ranks)
    monkeypatch.setattr(module, "_CELLS", 1000)
    assert tau_psi(ranks).tolist() == whole.tolist()
    some = ranks[0, :3]
    assert tau_psi(some) == pytest.approx(module._psi(kendall_matrix(some)))


def test_a_thousand_queries_take_less_than_20_mib_of_work_space() -> None:
    ranks = np.argsort(np.random.default_rng(0).random((1000, 10, 100)), axis=-1).astype(np.int32)
    tracemalloc.start()
    tau_psi(ranks)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * 2**20, f"{peak / 2**20:.1f} MiB"


def test_scipys_tau_agrees() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed (extra 'eval')")
    rng = np.random.default_rng(1)
    scores = np.round(rng.random((4, 50)), 1)
    slow = [stats.kendalltau(a, b).statistic for a, b in itertools.combinations(scores, 2)]
    assert tau_psi_b(scores) == pytest.approx((1 - np.mean(slow)) / 2)
    ranks = strict_ranks(scores)
    slow = [stats.kendalltau(a, b).statistic for a, b in itertools.combinations(ranks, 2)]
    assert tau_psi(ranks) == pytest.approx((1 - np.mean(slow)) / 2)


def test_tau_psi_compares_what_both_presentations_rank() -> None:
    ranks = np.array([[0, 1, 2, -1], [0, 2, 1, 3], [-1, -1, -1, -1]])
    assert tau_psi(ranks) == pytest.approx((1 - 1 / 3) / 2)
    assert math.isnan(tau_psi(ranks[:1]))
    assert math.isnan(tau_psi(np.array([[0, -1], [-1, 0]])))
    assert math.isnan(tau_psi(np.zeros((3, 1), dtype=int)))
    assert np.isnan(tau_psi(np.zeros((2, 1, 5), dtype=int))).all()


def test_ties_where_an_order_is_wanted_are_refused() -> None:
    with pytest.raises(InvalidData, match="tau_psi_b"):
        tau_psi(np.array([[0, 0, 1], [0, 1, 2]]))


def test_tau_b_of_the_example_and_of_a_constant_scorer() -> None:
    assert tau_psi_b([[0.9, 0.5, 0.5], [0.9, 0.6, 0.4]]) == pytest.approx((1 - 2 / math.sqrt(6)) / 2)
    assert math.isnan(tau_psi_b(np.full((3, 4), 0.5)))


# -- sets --------------------------------------------------------------------------------------------------


def test_retained_sets_of_the_methods_example() -> None:
    kept = SCORES >= 0.5
    assert retained_overlap(kept) == pytest.approx(0.777778, abs=5e-7)
    assert set_flip_rate(kept) == pytest.approx(0.333333, abs=5e-7)
    assert retained_overlap(np.stack([kept, ~kept]))[0] == pytest.approx(7 / 9)


def test_two_sets_that_share_49_of_54_each() -> None:
    kept = np.zeros((2, 59), dtype=bool)
    kept[0, :54] = kept[1, 5:] = True
    assert retained_overlap(kept) == pytest.approx(49 / 59)
    assert retained_overlap(kept) == pytest.approx(0.830508, abs=5e-7)
    abc_abd = np.array([[1, 1, 1, 0], [1, 1, 0, 1]], dtype=bool)
    assert retained_overlap(abc_abd) == 0.5


def test_two_empty_sets_agree_and_one_presentation_says_nothing() -> None:
    assert retained_overlap(np.zeros((2, 5), dtype=bool)) == 1
    assert math.isnan(retained_overlap(np.ones((1, 5), dtype=bool)))
    assert math.isnan(set_flip_rate(np.zeros((3, 5), dtype=bool)))
    assert math.isnan(set_flip_rate(np.zeros((0, 5), dtype=bool)))


@given(hnp.arrays(np.bool_, st.tuples(st.integers(2, 6), st.integers(1, 9))))
@settings(deadline=None, max_examples=100)
def test_overlap_agrees_with_python_sets(kept: np.ndarray) -> None:
    sets = [set(np.flatnonzero(row).tolist()) for row in kept]
    pairs = list(itertools.combinations(sets, 2))
    assert retained_overlap(kept) == pytest.approx(np.mean([len(a & b) / len(a | b) if a | b else 1 for a, b in pairs]))
    assert set_change(kept) == pytest.approx(np.mean([a != b for a, b in pairs]))


def test_quality_of_retained_sets_counts_empty_as_zero() -> None:
    kept = np.array([[1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]], dtype=bool)
    found = set_quality(kept, np.array([True, False, False, True]))
    assert found.precision.tolist() == [0.5, 0, 0]
    assert found.recall.tolist() == [0.5, 0, 0]
    assert found.f1.tolist() == [0.5, 0, 0]
    assert set_quality(kept, np.zeros(4, dtype=bool)).f1.tolist() == [0, 0, 0]


# -- heads -------------------------------------------------------------------------------------------------

TEN = list("abcdefghij")


@pytest.mark.parametrize(
    ("a", "b", "depth", "value"),
    [
        (list("ABCD"), list("ABDC"), 4, 0.973),
        (list("ABCD"), list("DCBA"), 4, 0.783),
        (TEN, ["b", "a", *TEN[2:]], 10, 0.9),
        (TEN, [*TEN[:8], "j", "i"], 10, 0.995217031),
        (TEN, [*TEN[:9], "z"], 10, 0.9612579511),
    ],
)
def test_rank_biased_overlap_of_the_methods_examples(a: list[str], b: list[str], depth: int, value: float) -> None:
    assert rbo(a, b, depth=depth) == pytest.approx(value, abs=5e-11 if value not in (0.995217031,) else 5e-10)
    assert rbo(b, a, depth=depth) == pytest.approx(rbo(a, b, depth=depth))


def test_rbo_stops_at_the_longest_ranking_and_an_empty_one_shares_nothing() -> None:
    assert rbo(list("ABCD"), list("ABDC")) == pytest.approx(0.973)
    assert rbo(TEN, TEN) == pytest.approx(1)
    assert rbo(TEN, []) == 0
    assert rbo_instability(np.array([np.arange(12)] * 3)) == pytest.approx(0)
    assert math.isnan(rbo_instability(np.arange(12)[None]))
    with pytest.raises(BadArgument):
        rbo(TEN, TEN, p=1)


def test_top_k_churn_of_the_example() -> None:
    head = top_k(example().ranks, 3)
    assert head.tolist() == [[1, 1, 1, 0], [1, 1, 0, 1], [1, 1, 1, 0]]
    assert set_change(head) == pytest.approx(2 / 3)
    with pytest.raises(BadArgument):
        top_k(example().ranks, 0)


# -- quality -----------------------------------------------------------------------------------------------


def test_ndcg_over_presentations_of_the_methods_example() -> None:
    grades = [GRADES[d] for d in "ABCD"]
    values = ndcg_by_presentation(example().ranks, grades)
    assert values == pytest.approx([0.9854419, 1.0, 0.9079365], abs=5e-8)
    assert values.mean() == pytest.approx(0.9644595, abs=5e-8)
    assert values.mean() - values.min() == pytest.approx(0.0565230, abs=5e-8)


def test_the_ideal_comes_from_all_judgements_and_no_positive_one_is_zero() -> None:
    ranks = np.array([[0, 1]])
    assert ndcg_by_presentation(ranks, [1, 0], judged=[1, 3], k=10) == pytest.approx([1 / (3 + 1 / math.log2(3))])
    assert ndcg_by_presentation(ranks, [0, -1]).tolist() == [0]
    assert ndcg_by_presentation(np.array([[-1, -1]]), [1, 1]).tolist() == [0]


@given(
    judged=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(-1, 3), max_size=8),
    rankings=st.lists(st.permutations("abcdef"), min_size=1, max_size=4),
    k=st.integers(1, 8),
)
@settings(deadline=None, max_examples=40)
def test_ndcg_agrees_with_ranx(judged: dict[str, int], rankings: list[list[str]], k: int) -> None:
    pytest.importorskip("ranx", reason="ranx is not installed (extra 'eval')")
    from pd_rerank.evaluation.ranking import measure

    shown = Presentations.of_rankings("q", rankings)
    grades = [judged.get(d, 0) for d in shown.doc_ids]
    found = ndcg_by_presentation(shown.ranks, grades, judged=judged.values(), k=k)
    wanted = [measure({"q": judged}, {"q": ranking}, [f"nDCG@{k}"])[0, 0] for ranking in rankings]
    assert found.tolist() == pytest.approx(wanted)


def test_gold_rank_variance_is_that_of_the_relevant_candidates_alone() -> None:
    ranks = np.array([[0, 1, 2], [2, 1, 0]])
    assert gold_rank_variance(ranks, np.array([True, True, False])) == pytest.approx((1 + 0) / 2)
    assert math.isnan(gold_rank_variance(ranks, np.zeros(3, dtype=bool)))
    assert math.isnan(gold_rank_variance(np.array([[0, 1], [0, -1]]), np.array([False, True])))


def test_zengs_psi_is_one_less_the_worst_third_over_the_best() -> None:
    buckets = position_buckets([0.8, 0.6, 0.5, 0.5], [0, 4, 7, 8], n=9)
    assert buckets == {"top": 0.8, "middle": 0.6, "bottom": 0.5}
    assert zeng_psi(buckets) == pytest.approx(0.375)
    assert position_buckets([1.0, 1.0, 1.0], [3, 6, 5], n=10) == {"top": 1.0, "middle": 1.0}  # 3 < 10/3, 6 < 20/3
    assert math.isnan(zeng_psi({"top": 1.0}))
    assert math.isnan(zeng_psi({"top": 0.0, "bottom": 0.0}))
    assert pool_buckets([{"top": 1.0}, {"top": 0.0, "bottom": 0.25}]) == {"top": 0.5, "bottom": 0.25}


# -- scores ------------------------------------------------------------------------------------------------


def test_score_spread_of_the_methods_example() -> None:
    spread = score_spread(SCORES)
    assert spread.residual == pytest.approx(0.0123611, abs=5e-8)
    assert spread.centred == pytest.approx(0.0091319, abs=5e-8)
    assert spread.dispersion == pytest.approx(0.0476563, abs=5e-8)
    assert spread.normalised == pytest.approx(0.4377455, abs=5e-8)
    assert spread.order_marginal == pytest.approx(0.0385243, abs=5e-8)


def test_scores_that_do_not_move_have_no_residual_at_all() -> None:
    spread = score_spread(np.tile([[0.1, 0.7, 0.3]], (7, 1)))
    assert (spread.residual, spread.centred, spread.normalised) == (0, 0, 0)


def test_a_collapsed_scorer_is_not_called_stable() -> None:
    assert score_spread(0.001 * SCORES).normalised == pytest.approx(score_spread(SCORES).normalised)
    assert math.isnan(score_spread(np.full((3, 4), 0.5)).normalised)
    assert math.isnan(score_spread(np.full((3, 4), NAN)).residual)
    assert score_spread(np.hstack([SCORES, [[NAN], [1], [1]]])) == score_spread(SCORES)


def test_tie_rate_and_margin() -> None:
    assert tie_rate(np.array([[0.5, 0.5, 0.1, 0.0], [0.4, 0.3, NAN, 0.3]])) == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert math.isnan(tie_rate(np.array([[0.5, NAN]])))
    assert margin(SCORES, k=2) == pytest.approx((0.2 + 0.3 + 0.05) / 3)
    assert math.isnan(margin(SCORES, k=4))


# -- presentations -----------------------------------------------------------------------------------------


def test_a_score_table_gives_one_presentation_per_row_with_its_slots() -> None:
    shown = Presentations.of_table(table([[0.9, 0.5, 0.5], [0.2, NAN, 0.4]], slots=[[0, 1, 2], [2, 1, 0]]))
    assert shown.ranks.tolist() == [[0, 1, 2], [1, -1, 0]]
    assert shown.slot is not None
    assert shown.slot.tolist() == [[0, 1, 2], [2, 1, 0]]
    tied = table([[0.5, 0.5, 0.5]] * 2, slots=[[0, 1, 2], [2, 1, 0]])
    assert tau_psi(Presentations.of_table(tied).ranks) == 0
    assert tau_psi(Presentations.of_table(tied, by_position="contiguous").ranks) == 1


def test_several_tables_are_presentations_of_their_served_scores() -> None:
    """Marker τ-PSI: what differs between the tables is the markers, and each is served as a mean."""
    numeric = table([[0.9, 0.5, 0.1], [0.7, 0.5, 0.1]])
    alpha = table([[0.1, 0.8, 0.6]], doc_ids=("C", "B", "A"))
    shown = Presentations.of_tables([numeric, alpha])
    assert shown.scores == pytest.approx(np.array([[0.8, 0.5, 0.1], [0.6, 0.8, 0.1]]), abs=1e-6)
    assert tau_psi(shown.ranks) == pytest.approx(1 / 3)
    with pytest.raises(InvalidData, match="other candidates"):
        Presentations.of_tables([numeric, table([[0.1, 0.2, 0.3]], query_id="p")])
    with pytest.raises(BadArgument):
        Presentations.of_tables([])


def test_runs_give_presentations_and_a_query_one_of_them_lacks_is_an_empty_one() -> None:
    hits = {"q": [RunHit("A", 1, 0.9), RunHit("B", 2, 0.5)], "p": [RunHit("A", 1, 1.0)]}
    found = presentations_of_runs([hits, {"q": {"B": 0.8, "C": 0.8, "A": 0.1}}, {"q": ["C", "A"]}])
    assert [f.query_id for f in found] == ["q", "p"]
    assert found[0].doc_ids == ("A", "B", "C")
    assert found[0].ranks.tolist() == [[0, 1, -1], [2, 0, 1], [1, -1, 0]]
    assert np.isnan(found[0].scores[2]).all()
    assert found[1].ranks.tolist() == [[0], [-1], [-1]]
    with pytest.raises(BadArgument, match="at least two runs"):
        presentations_of_runs([hits])
    with pytest.raises(InvalidData, match="no query is in all"):
        presentations_of_runs([{"q": ["A"]}, {"p": ["A"]}])
    with pytest.raises(InvalidData, match="ranked twice"):
        presentations_of_runs([{"q": ["A", "A"]}, {"q": ["A"]}])


def test_ensembles_average_disjoint_presentations() -> None:
    five = Presentations.of_scores("q", "AB", [[0.0, 1.0], [1.0, 0.5], [0.2, 0.2], [0.4, NAN], [9.0, 9.0]])
    two = five.averaged(2)
    assert two.scores.tolist()[0] == [0.5, 0.75]
    assert two.ranks.tolist() == [[1, 0], [0, -1]]
    assert example().averaged(3).scores == pytest.approx(np.array([[0.75, 0.683333, 0.466667, 0.25]]), abs=5e-7)
    with pytest.raises(BadArgument):
        five.averaged(0)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidData, match="3 candidates"):
        Presentations.of_scores("q", "ABC", SCORES)
    with pytest.raises(InvalidData, match="slot has shape"):
        Presentations(
            query_id="q", doc_ids=("A",), ranks=np.zeros((2, 1), int), scores=np.zeros((2, 1)), slot=np.zeros(1)
        )  # type: ignore[arg-type]


# -- thresholds --------------------------------------------------------------------------------------------


def dev() -> list[Presentations]:
    return [
        Presentations.of_scores("q1", "ABCD", [[0.9, 0.6, 0.3, 0.1], [0.0] * 4]),
        Presentations.of_scores("q2", "ABCD", [[0.8, 0.5, 0.45, 0.0], [0.0] * 4]),
    ]


def test_f1_threshold_of_the_methods_example() -> None:
    qrels = {"q1": {"A": 1, "B": 1}, "q2": {"A": 1}}
    threshold = fit_threshold_f1(dev(), qrels)
    assert threshold.value == pytest.approx(0.585)
    assert (threshold.reached, threshold.objective, threshold.n_queries) == (1.0, "f1", 2)
    with pytest.raises(InvalidData, match="same ids"):
        fit_threshold_f1(dev(), {"other": {"A": 1}})


def test_it_is_the_threshold_that_score_tables_give() -> None:
    rng = np.random.default_rng(2)
    tables = [table(rng.random((3, 8)).tolist(), query_id=f"q{i}") for i in range(5)]
    qrels = {t.query_id: {d: int(rng.random() < 0.4) for d in t.doc_ids} for t in tables}
    shown = [Presentations.of_table(t) for t in tables]
    wanted = Threshold.fit_f1(tables, qrels)
    found = fit_threshold_f1(shown, qrels, presentation=None)
    assert (found.value, found.reached) == pytest.approx((wanted.value, wanted.reached))
    wanted, found = Threshold.fit_retention(tables, 0.3), fit_threshold_retention(shown, 0.3, presentation=None)
    assert (found.value, found.reached) == pytest.approx((wanted.value, wanted.reached))


def test_matched_retention_makes_every_system_keep_what_the_reference_keeps() -> None:
    qrels = {"q1": {"A": 1, "B": 1}, "q2": {"A": 1}}
    other = [Presentations.of_scores(q.query_id, "ABCD", q.scores * 100) for q in dev()]
    alone = [Presentations.of_scores("q9", "ABCD", [[1.0, 1, 1, 1]])]
    found = matched_retention({"a": dev(), "b": [*other, *alone]}, qrels, reference="a", dev=["q1", "q2", "q9"])
    assert found["a"].reached == found["b"].reached == pytest.approx(3 / 8)
    assert found["b"].value == pytest.approx(100 * found["a"].value)
    assert found["a"].value == pytest.approx(0.585)
    with pytest.raises(BadArgument, match="no system 'c'"):
        matched_retention({"a": dev()}, qrels, reference="c", dev=["q1"])
    with pytest.raises(InvalidData, match="no dev query"):
        matched_retention({"a": dev(), "b": alone}, qrels, reference="a", dev=["q1"])


def test_thresholds_that_cannot_be_fitted_are_refused() -> None:
    with pytest.raises(BadArgument, match="2 presentations, no number 2"):
        fit_threshold_retention(dev(), 0.5, presentation=2)
    with pytest.raises(BadArgument, match="between 0 and 1"):
        fit_threshold_retention(dev(), 5)
    with pytest.raises(InvalidData, match="no scores"):
        fit_threshold_retention(presentations_of_runs([{"q": ["A"]}] * 2), 0.5)


# -- all of it ---------------------------------------------------------------------------------------------


def test_every_figure_of_the_methods_example() -> None:
    (outcome,) = stability([example()], threshold=0.5, qrels={"q": GRADES}, k=10)
    expected = {
        "tau_psi": 0.2222222,
        "tau_psi_b": 0.2222222,
        "overlap": 0.7777778,
        "set_flip": 0.3333333,
        "retention": 8 / 12,
        "top_k_churn": 0,
        "top_k_overlap": 1,
        "mean_ndcg": 0.9644595,
        "worst_ndcg": 0.9079365,
        "best_ndcg": 1,
        "order_spread": 0.0565230,
        "selection_flip": 2 / 3,
        "selection_flip_modal": 1 / 3,
        "pair_flip": 1.0,
        "pair_flip_modal": 0.6666667,
        "residual_variance": 0.0123611,
        "centred_residual_variance": 0.0091319,
        "dispersion": 0.0476563,
        "normalised_residual": 0.4377455,
        "order_marginal_variance": 0.0385243,
        "tie_rate": 0,
        "gold_rank_variance": (2 / 9 + 2 / 9 + 2 / 9) / 3,  # A, B, D: ranks 0 0 1, 1 1 0, 3 2 3
        "retained_f1": (4 / 6 + 4 / 5 + 4 / 6) / 3,  # relevant A, B, D; sets ABC, AB, ABC
    }
    for name, value in expected.items():
        assert getattr(outcome, name) == pytest.approx(value, abs=5e-8), name
    assert (outcome.presentations, outcome.candidates, outcome.missing) == (3, 4, 0)
    assert len(FIGURES) == 25
    assert not any(math.isnan(getattr(outcome, name)) for name in FIGURES)


def test_the_toy_of_the_page_holds() -> None:
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(block, {})


def test_a_presentation_that_ranks_nothing_disagrees_with_every_other() -> None:
    failed = np.vstack([SCORES[:1], np.full((2, 4), NAN)])
    (outcome,) = stability([Presentations.of_scores("q", "ABCD", failed)], threshold=0.5, qrels={"q": GRADES})
    assert (outcome.overlap, outcome.top_k_churn, outcome.rbo_instability) == (0, 1, 1)
    assert (outcome.selection_flip, outcome.pair_flip, outcome.worst_ndcg, outcome.missing) == (1, 1, 0, 8)
    assert math.isnan(outcome.tau_psi)


def test_an_empty_pool_and_a_single_presentation_are_undefined_and_listed() -> None:
    empty = Presentations.of_scores("e", [], np.zeros((3, 0)))
    single = Presentations.of_scores("s", "AB", [[0.9, 0.1]])
    lone = Presentations.of_scores("l", "A", [[0.9], [0.8]])
    outcomes = stability([empty, single, lone, example()], threshold=0.5, qrels={"s": {"A": 1}, "q": GRADES})
    rows = {row.name: row for row in summarise(outcomes)}
    assert list(rows) == list(FIGURES)
    assert (rows["tau_psi"].n, rows["tau_psi"].undefined) == (1, ("e", "s", "l"))
    assert rows["overlap"].undefined == ("e", "s")
    assert rows["overlap"].value == pytest.approx((1 + 7 / 9) / 2)
    assert rows["pair_flip"].undefined == ("e", "s", "l")
    assert rows["mean_ndcg"].undefined == ("e", "l")
    assert rows["retention"].undefined == ("e",)
    assert all(math.isnan(getattr(outcomes[0], name)) for name in FIGURES)
    assert summarise([])[0].n == 0


def test_a_threshold_needs_scores() -> None:
    shown = presentations_of_runs([{"q": ["A", "B"]}, {"q": ["B", "A"]}])
    assert stability(shown)[0].tau_psi == 1
    with pytest.raises(InvalidData, match="without scores"):
        stability(shown, threshold=0.5)


def test_a_frozen_threshold_and_its_number_say_the_same() -> None:
    kept = stability([example()], threshold=Threshold(value=0.5, objective="f1"))
    assert repr(kept) == repr(stability([example()], threshold=0.5))


@given(
    hnp.arrays(np.float64, st.just((3, 6)), elements=st.sampled_from([0.0, 0.3, 0.6, 1.0, NAN])),
    st.permutations(range(6)),
    st.permutations(range(3)),
)
@settings(deadline=None, max_examples=50)
def test_no_figure_depends_on_the_order_of_candidates_or_presentations(
    scores: np.ndarray, columns: list[int], rows: list[int]
) -> None:
    qrels = {"q": {"B": 2, "E": 1}}
    one = stability([Presentations.of_scores("q", "ABCDEF", scores)], threshold=0.5, qrels=qrels, k=3)[0]
    ids = ["ABCDEF"[c] for c in columns]
    two = stability([Presentations.of_scores("q", ids, scores[rows][:, columns])], threshold=0.5, qrels=qrels, k=3)[0]
    for name in FIGURES:
        assert getattr(one, name) == pytest.approx(getattr(two, name), nan_ok=True), name
