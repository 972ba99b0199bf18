"""Flips of decisions: choices, pairs, answers, verdicts."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_rerank.errors import InvalidData
from pd_rerank.evaluation.consumers import (
    answer_f1,
    answer_flips,
    chosen,
    ends,
    exact_match,
    first_line,
    flips,
    gold_crossing,
    modal_flip,
    normalise_answer,
    pairwise_flip,
    read_outputs,
    read_verdict,
    selection,
    summarise_flips,
    verdict_flips,
)
from pd_rerank.evaluation.presentations import strict_ranks

RANKS = strict_ranks([[0.9, 0.7, 0.5, 0.1], [0.8, 0.75, 0.4, 0.45], [0.55, 0.6, 0.5, 0.2]])


# -- flips -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "modal", "pairwise"),
    [((7, 2, 1), 0.3, 0.511111), ((5, 5), 0.5, 0.555556), ((10,), 0, 0), ((1,) * 10, 0.9, 1)],
)
def test_both_estimates_of_the_methods_examples(counts: tuple[int, ...], modal: float, pairwise: float) -> None:
    made = [f"v{v}" for v, count in enumerate(counts) for _ in range(count)]
    assert modal_flip(made) == pytest.approx(modal)
    assert pairwise_flip(made) == pytest.approx(pairwise, abs=5e-7)


@given(st.lists(st.sampled_from(["a", "b", "c", None]), min_size=2, max_size=8))
def test_pairwise_is_the_share_of_pairs_that_differ_and_a_missing_decision_differs_from_all(made: list) -> None:
    pairs = list(itertools.combinations(made, 2))
    assert pairwise_flip(made) == pytest.approx(np.mean([a is None or a != b for a, b in pairs]))
    assert modal_flip(made) <= pairwise_flip(made) + 1e-12


def test_one_decision_says_nothing_and_is_listed() -> None:
    outcomes = flips({"q": ["a"], "p": ["a", "b"], "r": ["a", "a"], "none": []})
    row = summarise_flips(outcomes)
    assert (row.pairwise, row.modal, row.flipping, row.n) == (0.5, 0.25, 0.5, 2)
    assert row.undefined == ("q", "none")
    assert math.isnan(summarise_flips([]).pairwise)


def test_missing_decisions_are_counted() -> None:
    outcomes = flips({"q": [None, None], "p": ["a", None, "a"]})
    assert [(o.pairwise, o.modal, o.missing) for o in outcomes] == [
        (1, 1, 2),
        (pytest.approx(2 / 3), pytest.approx(1 / 3), 1),
    ]
    assert summarise_flips(outcomes).missing == 3


# -- choices -----------------------------------------------------------------------------------------------


def test_pairs_of_the_methods_example() -> None:
    pairs = [tuple("ABCD"[i] for i in pair) for pair in ends(RANKS)]
    assert pairs == [("A", "D"), ("A", "C"), ("B", "D")]
    assert modal_flip(pairs) == pytest.approx(0.666667, abs=5e-7)
    assert pairwise_flip(pairs) == 1.0


def test_a_presentation_without_two_candidates_has_no_pair() -> None:
    ranks = np.array([[0, 1, -1], [-1, 0, -1], [-1, -1, -1]])
    assert chosen(ranks).tolist() == [0, 1, -1]
    assert ends(ranks).tolist() == [[0, 1], [-1, -1], [-1, -1]]
    assert chosen(np.zeros((2, 0), dtype=int)).tolist() == [-1, -1]
    assert ends(np.zeros((2, 1), dtype=int)).tolist() == [[-1, -1]] * 2


def test_selection_of_the_example() -> None:
    outcome = selection("q", RANKS, [3, 2, 0, 1])
    assert outcome.selection_flip == pytest.approx(2 / 3)
    assert outcome.pair_flip == 1
    assert outcome.quality == pytest.approx((1 + 1 + 2 / 3) / 3)
    assert outcome.quality_flip == pytest.approx(2 / 3)
    assert (outcome.gold, outcome.accuracy) == ("some", pytest.approx(2 / 3))


def test_a_move_between_equally_good_candidates_flips_the_choice_and_not_its_quality() -> None:
    outcome = selection("q", RANKS, [3, 3, 0, 0])
    assert (outcome.selection_flip, outcome.quality_flip, outcome.gold) == (pytest.approx(2 / 3), 0, "all")


def test_without_a_positive_grade_gold_is_never_met() -> None:
    outcome = selection("q", RANKS, [0, 0, 0, 0])
    assert (outcome.gold, outcome.quality, outcome.accuracy) == ("none", 0, 0)
    with pytest.raises(InvalidData, match="3 grades"):
        selection("q", RANKS, [1, 2, 3])


def test_most_flips_fall_on_queries_that_cross_the_gold_label() -> None:
    same = np.array([[0, 1, 2, 3]] * 3)
    row = gold_crossing(
        [
            selection("crosses", RANKS, [3, 2, 0, 1]),
            selection("right", same, [3, 0, 0, 0]),
            selection("wrong", same, [0, 0, 0, 3]),
            selection("moves below", RANKS, [0, 0, 3, 0]),
        ]
    )
    assert (row.all, row.none, row.some) == (0.25, 0.5, 0.25)
    assert row.flips_on_crossing == 0.5
    assert row.accuracy == pytest.approx((2 / 3 + 1) / 4)
    assert math.isnan(gold_crossing([]).some)
    assert math.isnan(gold_crossing([selection("right", same, [3, 0, 0, 0])]).flips_on_crossing)


# -- answers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "normal"),
    [
        (" The Eiffel-Tower! ", "eiffeltower"),
        ("a  cat,\tan owl & the dog", "cat owl dog"),
        ("Theatre an", "theatre"),
        ("U.S.A.", "usa"),
        ("«Ünïcode»", "«ünïcode»"),
        ("", ""),
    ],
)
def test_answers_are_normalised_as_squad_does(raw: str, normal: str) -> None:
    assert normalise_answer(raw) == normal


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        ("Answer: Paris\nBecause …", "Paris"),
        ("\n\n  final answer :  Paris ", "Paris"),
        ("Paris. Answer: no", "Paris. Answer: no"),
        ("Answers are hard", "Answers are hard"),
        ("", ""),
    ],
)
def test_the_answer_is_the_first_line_without_its_tag(output: str, answer: str) -> None:
    assert first_line(output) == answer


def test_exact_match_and_f1_take_the_best_gold_answer() -> None:
    assert exact_match("the Paris", ["London", "paris!"]) == 1
    assert exact_match("Paris", []) == 0
    assert answer_f1("in Paris, France", ["Paris"]) == pytest.approx(0.5)
    assert answer_f1("in Paris, France", ["Paris", "Paris France"]) == pytest.approx(0.8)
    assert answer_f1("b b c", ["b c c"]) == pytest.approx(2 / 3)
    assert answer_f1("the", ["a"]) == 1
    assert answer_f1("the", ["Paris"]) == 0
    assert answer_f1("Paris", []) == 0


def test_answer_flips_compare_normalised_answers() -> None:
    answers = {"q": ["Answer: The Nile\nmore", "nile.", "Amazon", None], "p": ["x", "x", "X", "x!"]}
    q, p = answer_flips(answers, {"q": ["Nile"], "p": ["y"]})
    assert (q.pairwise, q.modal, q.missing) == (pytest.approx(5 / 6), 0.5, 1)
    assert (q.exact, q.f1, q.gold) == (0.5, 0.5, "some")
    assert (p.pairwise, p.modal, p.exact, p.gold) == (0, 0, 0, "none")
    assert math.isnan(answer_flips(answers)[0].exact)
    assert answer_flips(answers)[0].gold is None
    with pytest.raises(InvalidData, match="no gold answer, first 'p'"):
        answer_flips(answers, {"q": ["Nile"]})


# -- verdicts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "verdict"),
    [
        ("SUPPORTED", "SUPPORTED"),
        ("supports.", "SUPPORTED"),
        ("Answer: **REFUTED**\n", "REFUTED"),
        ("NOT_ENOUGH_INFO", "NEI"),
        ("nei", "NEI"),
        ("It is supported", "INVALID"),
        ("", "INVALID"),
        ("DISPUTED", "INVALID"),
    ],
)
def test_a_verdict_is_one_of_three_or_invalid(output: str, verdict: str) -> None:
    assert read_verdict(output) == verdict


def test_verdict_flips_leave_disputed_claims_out_and_invalid_ones_in() -> None:
    outputs = {
        "c1": ["SUPPORTED", "SUPPORTS", "nonsense", "?"],
        "c2": ["REFUTED", None, None, "REFUTED"],
        "c3": ["NEI", "REFUTED", "NEI", "NEI"],
    }
    result = verdict_flips(outputs, {"c1": "SUPPORTS", "c2": "REFUTES", "c3": "Disputed"})
    assert result.disputed == ("c3",)
    one, two = result.outcomes
    assert (one.pairwise, one.modal, one.invalid, one.accuracy, one.gold) == (pytest.approx(2 / 3), 0.5, 2, 0.5, "some")
    assert (two.pairwise, two.modal, two.missing, two.accuracy) == (pytest.approx(5 / 6), 0.5, 2, 0.5)
    assert len(verdict_flips(outputs).outcomes) == 3
    assert math.isnan(verdict_flips(outputs).outcomes[0].accuracy)
    with pytest.raises(InvalidData, match="claim 'c2': label None"):
        verdict_flips(outputs, {"c1": "SUPPORTS"})


# -- files -------------------------------------------------------------------------------------------------


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_saved_outputs_are_read_with_their_gaps(tmp_path: Path) -> None:
    rows = [
        {"query_id": "007", "presentation": 1, "answer": "b"},
        {"query_id": "007", "presentation": 0, "answer": "a"},
        {"qid": "NA", "presentation": 2, "answer": None},
        {"claim_id": 5, "presentation": 0, "answer": ""},
    ]
    read = read_outputs(write(tmp_path / "a.jsonl", rows))
    assert read == {"007": ["a", "b", None], "NA": [None, None, None], "5": ["", None, None]}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"query_id": "q", "presentation": 0, "answer": "again"}, "presentation 0 twice"),
        ({"query_id": "q", "presentation": "1", "answer": "x"}, "counted 0, 1, 2"),
        ({"query_id": "q", "presentation": True, "answer": "x"}, "counted 0, 1, 2"),
        ({"query_id": "q", "presentation": -1, "answer": "x"}, "counted 0, 1, 2"),
        ({"query_id": "q", "presentation": 1}, "'answer' is None"),
        ({"query_id": "q", "presentation": 1, "answer": ["x"]}, "as a string"),
        ({"presentation": 1, "answer": "x"}, "no id"),
    ],
)
def test_a_malformed_line_is_refused_with_its_number(tmp_path: Path, row: dict, said: str) -> None:
    path = write(tmp_path / "a.jsonl", [{"query_id": "q", "presentation": 0, "answer": "x"}, row])
    with pytest.raises(InvalidData, match=rf"a\.jsonl:2.*{said}"):
        read_outputs(path)


def test_a_file_without_outputs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="holds no outputs"):
        read_outputs(write(tmp_path / "a.jsonl", []))
