"""Thresholds fitted and frozen, and the rule that ends the spending of presentations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pd_rerank.decisions import Settle, Threshold, dev_split, fit_f1, scored_by
from pd_rerank.errors import BadArgument, InvalidData, ModelMismatch
from tests.tables import table

NAN = float("nan")


def two_queries() -> list:
    return [
        table([[0.9, 0.6, 0.3, 0.1]], query_id="q1"),
        table([[0.8, 0.5, 0.45, 0.0]], query_id="q2"),
    ]


def test_f1_threshold_of_the_methods_example() -> None:
    qrels = {"q1": {"A": 1, "B": 2}, "q2": {"A": 1}}
    threshold = Threshold.fit_f1(two_queries(), qrels, span=(0.0, 0.9))
    assert threshold.value == pytest.approx(0.585)
    assert threshold.reached == pytest.approx(1.0)
    assert threshold.n_queries == 2


def test_relevant_documents_outside_the_pool_do_not_count_against_it() -> None:
    qrels = {"q1": {"A": 1, "B": 1, "unretrieved": 3}, "q2": {"A": 1}}
    assert Threshold.fit_f1(two_queries(), qrels, span=(0.0, 0.9)).reached == pytest.approx(1.0)


def test_a_query_without_a_relevant_candidate_counts_zero() -> None:
    assert Threshold.fit_f1(two_queries(), {"q1": {"A": 1, "B": 1}}, span=(0, 0.9)).reached == pytest.approx(0.5)


def test_qrels_of_another_collection_are_refused() -> None:
    with pytest.raises(InvalidData, match="same ids"):
        Threshold.fit_f1(two_queries(), {"other": {"A": 1}})


def test_retention_threshold_meets_its_target_and_ties_go_up() -> None:
    threshold = Threshold.fit_retention(two_queries(), 0.25, span=(0.0, 0.9))
    # One of four kept in each query for every grid point in (0.6, 0.8]; the highest such point is 0.7875.
    assert threshold.value == pytest.approx(0.7875)
    assert threshold.reached == pytest.approx(0.25)
    assert threshold.objective == "retention"


def test_a_score_at_the_threshold_is_kept_and_a_missing_one_never() -> None:
    kept = Threshold(value=0.5).retain(np.array([0.5, 0.4999, NAN, 0.9]))
    assert kept.tolist() == [True, False, False, True]


def test_a_threshold_frozen_to_a_file_comes_back_equal(tmp_path: Path) -> None:
    threshold = Threshold.fit_f1(two_queries(), {"q1": {"A": 1}}, context={"model": "m"})
    threshold.save(tmp_path / "t.json")
    assert Threshold.load(tmp_path / "t.json") == threshold


@pytest.mark.parametrize("content", ["[]", '{"value": "x"}', '{"value": 1, "valeu": 2}', "nonsense"])
def test_a_file_that_is_no_threshold_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(content)
    with pytest.raises(InvalidData, match=r"t\.json"):
        Threshold.load(path)


def test_a_threshold_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadArgument):
        Threshold(value=NAN)
    (tmp_path / "t.json").write_text(json.dumps({"value": 0.3, "objective": "f1"}))
    assert Threshold.load(tmp_path / "t.json").value == 0.3


def test_dev_split_is_the_methods() -> None:
    ids = [f"q{i:02d}" for i in range(10)]
    assert dev_split(ids[::-1])[0] == ["q00", "q03", "q06", "q07", "q09"]
    assert [len(dev_split(ids[:n])[0]) for n in (3, 5, 7)] == [2, 2, 4]
    with pytest.raises(BadArgument, match="two queries"):
        dev_split(["q"])


def test_a_split_that_shares_queries_or_leaves_a_part_empty_is_refused() -> None:
    with pytest.raises(BadArgument, match="'b' comes twice"):
        dev_split(["a", "b", "c", "b"])
    for share in (0.0, 1.0, NAN):
        with pytest.raises(BadArgument, match="share"):
            dev_split(["a", "b", "c"], share=share)


def test_scores_and_relevance_of_other_lengths_are_refused() -> None:
    scores = np.array([0.1, 0.5])
    for relevant in ([np.array([True])], [np.array([True, False])] * 2):
        with pytest.raises(BadArgument, match="same length"):
            fit_f1([scores], relevant)


def test_a_threshold_of_numpys_numbers_is_frozen_too(tmp_path: Path) -> None:
    Threshold(value=np.float32(0.5), reached=np.float32(0.25), n_queries=np.int64(3)).save(tmp_path / "t.json")
    assert Threshold.load(tmp_path / "t.json") == Threshold(value=0.5, reached=0.25, n_queries=3)


def test_an_adapter_trained_again_in_its_folder_is_another() -> None:
    def context(weights: str) -> dict[str, Any]:
        return scored_by({"model": "m", "adapter": {"source": "lora", "sha256": weights}}, {"template_hash": "h"})

    threshold = Threshold(value=0.5, context=context("before"))
    threshold.check(context("before"))
    with pytest.raises(ModelMismatch, match="adapter before there, after here"):
        threshold.check(context("after"))


def test_scores_of_another_window_or_calibration_are_other_scores() -> None:
    def context(**scoring: Any) -> dict[str, Any]:
        return scored_by({"model": "m"}, {"template_hash": "h"}, {"window": 20, "calibration": "none", **scoring})

    threshold = Threshold(value=0.5, context=context())
    threshold.check(context(presentations=10))
    with pytest.raises(ModelMismatch, match="window 20 there, 1 here"):
        threshold.check(context(window=1))
    with pytest.raises(ModelMismatch, match="calibration none there, capcal here"):
        threshold.check(context(calibration="capcal"))


def test_agreement_settles_and_disagreement_at_the_threshold_does_not() -> None:
    rule = Settle(threshold=0.5)
    assert rule.settled(np.array([[0.9, 0.1], [0.9, 0.1]]))
    assert not rule.settled(np.array([[0.9, 0.45], [0.7, 0.6]]))


def test_expected_changes_by_hand() -> None:
    # Means 0.8 and 0.4, each varying by ±0.1: variance (ddof 1) 0.02, standard error sqrt(0.02 / 2) = 0.1.
    # Distances 3 and 1 standard errors from 0.5: Φ(-3) + Φ(-1) = 0.0013499 + 0.1586553.
    scores = np.array([[0.9, 0.5], [0.7, 0.3]])
    assert Settle(threshold=0.5).expected_changes(scores) == pytest.approx(0.1600052, abs=1e-6)
    assert not Settle(threshold=0.5, tolerance=0.15).settled(scores)
    assert Settle(threshold=0.5, tolerance=0.17).settled(scores)


def test_a_top_k_decision_is_a_threshold_between_two_ranks() -> None:
    scores = np.array([[0.9, 0.5, 0.3], [0.7, 0.3, 0.1]])
    assert Settle(top_k=1).expected_changes(scores) == Settle(threshold=0.6).expected_changes(scores)
    assert Settle(top_k=3).settled(scores)


def test_one_presentation_never_settles_and_missing_scores_do_not_count() -> None:
    assert not Settle(threshold=0.5).settled(np.array([[0.9, 0.1]]))
    assert Settle(threshold=0.5).settled(np.array([[0.9, NAN], [0.9, NAN]]))
    # The served mean counts a candidate read once, so the decision may not close without it.
    assert not Settle(top_k=1).settled(np.array([[0.9, 0.1, NAN], [0.9, 0.1, 0.95]]))
    assert Settle(threshold=0.5).settled(np.zeros((2, 0)))


@pytest.mark.parametrize(
    "bad",
    [
        *({}, {"threshold": 0.5, "top_k": 3}, {"top_k": 0}, {"threshold": 0.5, "first": 1}),
        *(
            {"threshold": NAN},
            {"threshold": "0.5"},
            {"threshold": Threshold(value=0.5)},
            {"top_k": 1.5},
            {"top_k": "2"},
        ),
        *({"top_k": 1, "first": "2"}, {"top_k": 1, "step": 0.5}, {"top_k": 1, "tolerance": NAN}),
    ],
)
def test_a_rule_without_one_decision_is_refused(bad: dict) -> None:
    with pytest.raises(BadArgument):
        Settle(**bad)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"value": True}, "finite number"),
        ({"value": "0.5"}, "finite number"),
        ({"value": 0.5, "readout": "mean"}, "unknown readout 'mean'"),
        ({"value": 0.5, "objective": "luck"}, "unknown objective 'luck'"),
        ({"value": 0.5, "reached": "much"}, "what a threshold reached"),
        ({"value": 0.5, "n_queries": "all"}, "whole number of queries"),
        ({"value": 0.5, "context": []}, "mapping as context"),
        ({}, "no number under 'value'"),
    ],
)
def test_a_threshold_file_of_another_shape_is_refused_by_name(
    tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    (tmp_path / "t.json").write_text(json.dumps(fields))
    with pytest.raises(InvalidData, match=f"t.json.*{message}"):
        Threshold.load(tmp_path / "t.json")
