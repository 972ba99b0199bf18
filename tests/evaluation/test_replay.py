"""Window reranks replayed from grades: composite keys, fallbacks, every K and gates, against the study's vectors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.evaluation.diagnosis import decompose
from pd_rerank.evaluation.pairs import Case, designate
from pd_rerank.evaluation.preference import contrast, pair_outcomes, position, strict_preference
from pd_rerank.evaluation.replay import (
    composite,
    cost,
    fallback_policies,
    fit_margin_gate,
    gated,
    head_of,
    k_curve,
    levels,
    margin,
    margin_frontier,
    margin_thresholds,
    routes_disagree,
    window_rerank,
)
from tests.designated import case, direction, laid_out, pool, vectors

SHORT = {"strict_correct": "strict", "model_tie": "tie"}


def listed(c: Case, values: np.ndarray) -> str:
    """The ids in list order, joined."""
    return "".join(c.doc_ids[i] for i in np.lexsort([c.id_order, -values]))


# -- one window ---------------------------------------------------------------------------------------------------


def test_levels_are_equal_exactly_where_all_keys_are() -> None:
    first, second = np.array([1.0, 0.0, 1.0, 1.0]), np.array([5.0, 9.0, 5.0, 6.0])
    assert levels(first, second).tolist() == [-1, -2, -1, 0]
    assert levels(np.zeros(0)).tolist() == []


def test_the_twelve_published_window_cases() -> None:
    for row in vectors("nevir_unit")["resort"]:
        c = case(row["fusion"])
        (found,) = window_rerank([c], [laid_out(c, row["grades"])], k=row["k"])
        assert found.outcome.branch == row["branch"].removesuffix("_fusion"), row
        assert SHORT.get(found.outcome.relation, found.outcome.relation) == row["final"], row
        assert found.outcome.edge_tie == ("note" in row), row


def test_an_id_at_the_windows_edge_is_flagged_where_it_decides() -> None:
    c = case({"p": 1.0, "o": 1.0, "z": 3.0})
    (inside,) = window_rerank([c], [laid_out(c, {"z": 0, "o": 4})], k=2)  # o before p by id alone
    assert (inside.outcome.relation, inside.outcome.edge_tie, inside.edge_tie) == ("reverse", True, True)
    (whole,) = window_rerank([c], [laid_out(c, {"z": 0, "o": 4, "p": 4})], k=3)
    assert (whole.outcome.relation, whole.outcome.edge_tie, whole.edge_tie) == ("model_tie", False, False)


def test_head_beats_tail_whatever_its_grade_and_the_tail_is_unchanged() -> None:
    c = case({"a": 5.0, "b": 4.0, "o": 3.0, "p": 2.0, "e": 2.0})
    found = composite(c, laid_out(c, {"a": 0, "b": 1, "p": 9}), k=2)
    assert listed(c, found.values) == "baoep"
    assert (found.requested, found.judged, found.moved, found.edge_tie) == (2, 2, 2, False)
    assert found.values[list(c.doc_ids).index("e")] == found.values[list(c.doc_ids).index("p")]
    assert head_of(c, 2).tolist() == [True, True, False, False, False]


def test_the_two_query_table_of_the_study() -> None:
    row = vectors("nevir_unit")["l2_rankers"]
    cases, grades, second = two_queries(row["fusion"], row["labels"], row["grades"], row["E0"])
    fusion = [r.outcome for r in window_rerank(cases, grades, k=0)]
    e0 = pair_outcomes(cases, second)
    by_fusion, by_e0 = (window_rerank(cases, grades, k=2, secondary=s) for s in (None, second))
    for name, rows in (("fusion_tie", by_fusion), ("E0_tie", by_e0)):
        values = [
            composite(c, g, k=2, secondary=None if name == "fusion_tie" else s).values
            for c, g, s in zip(cases, grades, second, strict=True)
        ]
        assert {q: listed(c, v) for q, c, v in zip(("q1", "q2"), cases, values, strict=True)} == row["k2"]["orders"][
            name
        ]
        assert cost(rows).changed == row["k2"]["changed"][name]
    outcomes = {
        "E0": e0,
        "fusion": fusion,
        "fusion_tie": [r.outcome for r in by_fusion],
        "E0_tie": [r.outcome for r in by_e0],
    }
    found = {name: strict_preference(o) for name, o in outcomes.items()}
    assert {name: p.strict_correct for name, p in found.items()} == row["k2"]["strict"]
    assert found["fusion_tie"].both == row["k2"]["both_directions"]["fusion_tie"]
    want, place = row["k2"]["E0_list"], position(e0)
    assert (place.preferred_at[1], place.preferred_at[3], place.mrr) == (want["pref1"], want["pref3"], want["mrr"])
    assert (place.mean_rank_preferred, place.mean_rank_other) == (want["mean_rank_pref"], want["mean_rank_other"])
    assert position(outcomes["fusion_tie"]).mrr == row["k2"]["fusion_tie_mrr"]
    assert contrast(outcomes["fusion_tie"], e0).corrections == row["k2"]["corrected_vs_E0"]
    assert contrast(outcomes["fusion_tie"], fusion).corrections == row["k2"]["corrected_vs_fusion"]
    three = window_rerank(cases, grades, k=3)
    assert cost(three).fallback == row["k3"]["fallback_queries"]
    assert [r.outcome.relation for r in three] == [o.relation for o in fusion]


def two_queries(fusion: Any, labels: Any, grades: Any, second: Any = None) -> tuple[list[Case], list[Any], list[Any]]:
    """Cases of both directions of one pair with grades, and other scores, laid out."""
    ds = [direction(f"g-1:{q}", *labels[q]) for q in ("q1", "q2")]
    cases = designate(ds, [pool(f"g-1:{q}", fusion[q]) for q in ("q1", "q2")])
    return (
        cases,
        [laid_out(c, grades[q]) for q, c in zip(("q1", "q2"), cases, strict=True)],
        [laid_out(c, second[q]) for q, c in zip(("q1", "q2"), cases, strict=True)] if second else [],
    )


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=2, max_size=7),
    st.integers(0, 8),
    st.sampled_from(["query", "passage"]),
    st.integers(0, 127),
)
def test_a_window_rerank_only_ever_moves_the_head(
    rows: list[tuple[int, int]], k: int, fallback: Any, holes: int
) -> None:
    ids = [f"d{i}" for i in range(len(rows))]
    c = case({d: float(f) for d, (f, _) in zip(ids, rows, strict=True)}, direction(preferred="d0", other="d1"))
    grades = laid_out(
        c, {d: None if holes >> i & 1 else g for i, (d, (_, g)) in enumerate(zip(ids, rows, strict=True))}
    )
    found = composite(c, grades, k=k, fallback=fallback)
    before, after = np.lexsort([c.id_order, -c.first]), np.lexsort([c.id_order, -found.values])
    assert before[k:].tolist() == after[k:].tolist() or found.fallback or fallback == "passage"
    assert set(before[:k]) == set(after[:k])
    assert found.requested == min(k, len(ids))
    first, *_ = window_rerank([c], [grades], k=0)
    (again,) = pair_outcomes([c], [c.first])
    assert (first.outcome.relation, first.outcome.preferred) == (again.relation, again.preferred)
    if found.judged == 0 and fallback == "query":
        assert [before.tolist()] == [after.tolist()]


# -- missing grades -----------------------------------------------------------------------------------------------


def test_a_failed_passage_keeps_its_place_and_the_others_are_reranked_around_it() -> None:
    c = case({"a": 5.0, "b": 4.0, "o": 3.0, "p": 2.0, "e": 1.0})
    grades = laid_out(c, {"a": 0, "b": None, "o": 1, "p": 2})
    assert listed(c, composite(c, grades, k=4, fallback="passage").values) == "pboae"
    assert listed(c, composite(c, grades, k=4).values) == "abope"


def test_a_failed_passage_never_separates_two_that_are_equal() -> None:
    c = case({"a": 4.0, "o": 4.0, "b": 4.0, "p": 4.0})  # list order a b o p, all equal to the first stage
    grades = laid_out(c, {"a": 2, "b": None, "o": 2, "p": 2})
    (found,) = window_rerank([c], [grades], k=4, fallback="passage")
    assert found.outcome.relation == "model_tie"
    values = composite(c, grades, k=4, fallback="passage").values
    assert len(set(values.tolist())) == 1
    grades = laid_out(c, {"a": 3, "b": None, "o": 2, "p": 2})  # now b stands between unequal ones, and alone
    values = composite(c, grades, k=4, fallback="passage").values
    assert dict(zip(c.doc_ids, values.tolist(), strict=True)) == {"a": 0, "b": -1, "o": -2, "p": -2}


def test_fallback_policies_side_by_side() -> None:
    scores = {"o": 3.0, "p": 2.0, "z": 1.0}
    ds = [direction(f"g{i}-1:q1") for i in range(2)]
    cases = designate(ds, [pool(d.direction_id, scores) for d in ds])
    grades = [laid_out(cases[0], {"p": 4, "o": 0, "z": None}), laid_out(cases[1], {"p": 4, "o": None, "z": 0})]
    found = fallback_policies(cases, grades, k=3)
    assert {rule: [r.outcome.branch for r in rows] for rule, rows in found.items()} == {
        "query": ["whole_query_fallback", "whole_query_fallback"],
        "passage": ["different_grades", "missing_grade"],
        "pair": ["different_grades", "whole_query_fallback"],
    }
    # One bystander without a grade costs the whole query a preference the grades had right.
    assert [strict_preference([r.outcome for r in rows]).strict_correct for rows in found.values()] == [0, 1, 1]
    assert [cost(rows).fallback for rows in found.values()] == [2, 0, 1]


def test_what_does_not_fit_is_refused() -> None:
    c = case({"p": 2.0, "o": 1.0})
    fits = np.zeros(2)
    with pytest.raises(BadArgument, match="pool of 2"):
        composite(c, np.zeros(3), k=1)
    with pytest.raises(BadArgument, match="k >= 0"):
        composite(c, fits, k=-1)
    with pytest.raises(BadArgument, match="secondary score"):
        composite(c, fits, k=1, secondary=np.full(2, np.nan))
    with pytest.raises(BadArgument, match="query, passage, pair"):
        window_rerank([c], [fits], k=1, fallback="none")  # type: ignore[arg-type]
    with pytest.raises(BadArgument, match="each of the 1 cases"):
        window_rerank([c], [], k=1)
    with pytest.raises(BadArgument, match="2 decisions"):
        gated([c], [fits], [True, False], k=1)


# -- K and gates --------------------------------------------------------------------------------------------------


def curve() -> tuple[Any, list[Case], list[Any]]:
    row = vectors("nevir_unit")["cost_curve"]
    cases, grades, _ = two_queries(row["fusion"], row["labels"], row["grades"])
    return row, cases, grades


def test_the_cost_curve_of_the_study() -> None:
    row, cases, grades = curve()
    (found,) = k_curve(cases, grades, ks=[3])
    assert (found.preference.strict_correct, found.preference.both) == (row["k3"]["strict"], row["k3"]["both"])
    assert found.position.preferred_at[1] == row["k3"]["pref1"]
    assert found.cost.mean_judged == row["k3"]["mean_judged"]
    grades[0] = laid_out(cases[0], {**row["grades"]["q1"], "a": None})
    (found,) = k_curve(cases, grades, ks=[3])
    want = row["missing_grade_q1a_k3"]
    assert found.preference.strict_correct == want["strict"]
    assert {name: getattr(found.cost, name) for name in ("fallback", "missing", "mean_judged", "requested")} == {
        name: want[name] for name in ("fallback", "missing", "mean_judged", "requested")
    }


def test_a_margin_gate_is_fitted_as_in_the_study_and_frozen() -> None:
    row, cases, grades = curve()
    want = row["margin_selection"]
    frontier = margin_frontier(cases, grades, k=3)
    assert frontier[0].cost.triggered_share == want["first_sweep_triggered"]
    assert frontier[-1].cost.triggered_share == want["last_sweep_triggered"]
    gate = fit_margin_gate(frontier, target=want["target_fraction"])
    chosen = gated(cases, grades, [margin(c) < gate.threshold for c in cases], k=3, threshold=gate.threshold)
    assert chosen.cost.mean_judged == want["chosen_mean_judged"]
    assert chosen.cost.triggered_share == want["chosen_triggered_fraction"]
    assert chosen.preference.strict_correct == 2
    with pytest.raises(InvalidData, match="fitted on source group 'g'"):
        gate.calls(cases)
    others = [case({"p": 1.0, "o": 1.0 - m}, direction(f"h{i}-1:q1")) for i, m in enumerate((0.05, 0.9))]
    assert gate.calls(others) == [True, False]


def test_the_margin_is_that_of_the_first_two_and_infinite_without_a_second() -> None:
    cases = [case({"p": 3.0, "o": 1.0}), case({"p": 1.0, "o": 1.0}), case({"p": 1.0})]
    assert [margin(c) for c in cases] == [2.0, 0.0, math.inf]
    thresholds = margin_thresholds(cases)
    assert (thresholds[0], thresholds[-2]) == (0.0, 2.0)
    assert thresholds[-1] == math.nextafter(2.0, math.inf)
    assert len(thresholds) == 102  # 101 different percentiles of 0 and 2, and one above
    with pytest.raises(InvalidData, match="margin gate"):
        margin_thresholds(cases[2:])


def test_the_route_gate_calls_where_routes_disagree_or_one_is_empty() -> None:
    def gate(tops: list[str], missing: int) -> bool:
        routes = {f"r{i}": [top] for i, top in enumerate(tops)} | {f"empty{i}": [] for i in range(missing)}
        ds = [direction("a-1:q1", "a", "c"), direction("b-1:q1", "a", "c")]
        full = {name: ["a"] for name in routes}
        pools = [pool("a-1:q1", {"a": 1.0, "c": 0.5}, routes=routes), pool("b-1:q1", {"a": 1.0, "c": 0.5}, routes=full)]
        cases = designate(ds, pools)
        assert not routes_disagree(cases[1])
        return routes_disagree(cases[0])

    for row in vectors("nevir_unit")["route_disagreement"]:
        assert gate(row["tops"], row["missing"]) == row["trigger"], row
    assert gate(["a", "a"], 0) is False
    assert gate(["a", "c"], 0) is True


def test_a_query_with_several_directions_costs_once_and_one_without_a_pool_nothing() -> None:
    ds = [
        direction("a-1:q1", query="", query_id="q"),
        direction("b-1:q1", "o", "p", query="", query_id="q"),
        direction("c-1:q1"),
    ]
    cases = designate(ds, [pool("q", {"p": 2.0, "o": 1.0})])
    found = cost(window_rerank(cases, [np.ones(len(c.doc_ids)) for c in cases], k=20))
    assert (found.queries, found.requested, found.judged, found.mean_judged) == (2, 2, 2, 1.0)
    assert (found.triggered, found.changed, found.fallback) == (1, 0, 0)


# -- the published decomposition, through the window itself ---------------------------------------------------------


def published_window() -> tuple[Any, list[Case], list[np.ndarray]]:
    """2,736 small pools with a window of 2 that fall into the published branches, cells and first-stage relations."""
    record = vectors("nevir_decomposition")
    cases: list[Case] = []
    grades: list[np.ndarray] = []

    def add(n: int, first: dict[str, float], given: dict[str, float | None]) -> None:
        for _ in range(n):
            cases.append(case(first, direction(f"g{len(cases)}-1:q1")))
            grades.append(laid_out(cases[-1], given))

    right, wrong, level = {"p": 9.0, "o": 8.0}, {"p": 8.0, "o": 9.0}, {"p": 9.0, "o": 9.0}
    for key, cell in record["in_window_success_matrix"].items():
        p, o = map(int, key.split(":"))
        tied = 2 if key == "4:0" else 0  # 7 first-stage ties in all: 5 outside, so 2 among the differently graded
        add(cell["fusion_correct"], right, {"p": p, "o": o})
        add(cell["n"] - cell["fusion_correct"] - tied, wrong, {"p": p, "o": o})
        add(tied, level, {"p": p, "o": o})
    branches = record["branches"]
    head = {"y": 20.0, "z": 19.0}
    add(branches["preferred_only_in_window"]["n"], {"p": 9.0, "z": 8.0, "o": 7.0}, {"p": 0, "z": 4})
    add(branches["other_only_in_window"]["n"], {"o": 9.0, "z": 8.0, "p": 7.0}, {"o": 0, "z": 4})
    for name, first in (("strict", right), ("reverse", wrong), ("tie", level)):
        add(branches["both_outside_window"][name], {**head, **first}, {"y": 1, "z": 2})
    fallback = branches["whole_query_fallback"]
    add(fallback["strict"] - 1, right, {"p": None, "o": 4})
    add(1, {**head, **right}, {"y": None, "z": 2})
    add(fallback["reverse"], wrong, {"p": 4, "o": None})
    return record, cases, grades


def test_the_published_decomposition_comes_out_of_the_window_itself() -> None:
    record, cases, grades = published_window()
    rows = window_rerank(cases, grades, k=2)
    outcomes = [r.outcome for r in rows]
    reference = [r.outcome for r in window_rerank(cases, grades, k=0)]
    found = decompose(outcomes, reference)

    overall, change, first = record["overall"], contrast(outcomes, reference), strict_preference(reference)
    assert (found.overall.n, found.overall.strict, found.overall.reverse, found.overall.tie) == tuple(
        overall[key] for key in ("n", "strict", "reverse", "tie")
    )
    assert (first.strict_correct, first.reverse, first.model_tie) == tuple(
        overall[f"fusion_{key}"] for key in ("strict", "reverse", "tie")
    )
    assert (change.corrections, change.regressions, change.common_correct, change.common_not) == tuple(
        overall[key] for key in ("corrected", "damaged", "common_correct", "common_not_correct")
    )
    for name, want in record["branches"].items():
        branch = found.branches[name.removesuffix("_fusion")]
        assert (branch.n, branch.strict, branch.reverse, branch.tie) == tuple(
            want[key] for key in ("n", "strict", "reverse", "tie")
        ), name
        assert (branch.reference_correct, branch.corrections, branch.regressions) == tuple(
            want[key] for key in ("fusion_correct", "corrected", "damaged")
        ), name
    assert {f"{p:.0f}:{o:.0f}": (c.n, c.reference_correct) for (p, o), c in found.matrix.items()} == {
        key: (cell["n"], cell["fusion_correct"]) for key, cell in record["in_window_success_matrix"].items()
    }
    assert found.edge_ties == record["boundary_fusion_ties"]
    assert found.branches["missing_grade"].n == 0

    # The figures of the text: 27 % of directions hold 61 % of failures, most ties at the top grade.
    assert (round(100 * found.tie_share, 2), round(100 * (found.tie_failure_share or 0), 2)) == (26.97, 61.43)
    assert (found.top_grade, found.top_ties, found.top_failures) == (4, 571, 285)
    assert round(100 * (found.saturation or 0), 2) == 77.37
    graded = found.branches["different_grades"]
    assert round(100 * graded.strict / graded.n, 2) == 91.90
    shares = [found.branches[b].strict for b in ("different_grades", "grade_tie")]
    shares.append(found.overall.strict - sum(shares))
    assert [round(100 * s / found.overall.n, 2) for s in shares] == [60.93, 13.12, 3.40]
    assert cost(rows).fallback == 78
    assert sum(o.branch == "whole_query_fallback" and o.pool_size == 2 for o in outcomes) == 77
