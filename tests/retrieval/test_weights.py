"""Weights: the grid, the measures they are chosen by, and that test queries stay out of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.retrieval.fusion import RouteRule, Scaled, WeightedFusion
from pd_rerank.retrieval.weights import (
    Judged,
    Metric,
    Weights,
    _Trial,
    search_weights,
    simplex,
    with_weights,
)

TWO = WeightedFusion(rules={"a": RouteRule(), "b": RouteRule()})


@given(st.integers(1, 4), st.integers(1, 7))
def test_the_grid_holds_every_way_to_share_the_parts_once(routes: int, steps: int) -> None:
    points = list(simplex(routes, steps))
    assert len(points) == len(set(points)) == math.comb(steps + routes - 1, routes - 1)
    assert all(len(p) == routes and sum(p) == steps and min(p) >= 0 for p in points)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # ranks of x (grade 2) and y (grade 1): 2 and 4; z (grade 1) is not ranked
        ("ndcg@10", (2 / math.log2(3) + 1 / math.log2(5)) / (2 + 1 / math.log2(3) + 1 / math.log2(4))),
        ("ndcg@3", (2 / math.log2(3)) / (2 + 1 / math.log2(3) + 1 / math.log2(4))),
        ("recall@10", 2 / 3),
        ("R@3", 1 / 3),
        ("mrr@10", 1 / 2),
        ("RR(rel=2)@10", 1 / 2),
        ("mrr@1", 0.0),
        ("recall@10-l2", 1.0),
    ],
)
def test_measures_by_hand(name: str, value: float) -> None:
    judged = Judged.of({"q": {"x": 2, "y": 1, "z": 1, "n": 0}})
    ranks = np.array([{"x": 2, "y": 4}.get(d, 0) for d in judged.doc_ids])
    assert judged.values(Metric.named(name), ranks).tolist() == pytest.approx([value])


def test_an_unknown_measure_is_refused() -> None:
    with pytest.raises(BadArgument, match="cannot be chosen by 'map'"):
        Metric.named("map")


def test_the_best_weights_are_found_and_the_most_even_of_equals_taken() -> None:
    # a ranks the relevant document first in q1 and q2; b does so in none
    runs = {
        "a": {q: {"rel": 2.0, "m": 1.5, "n": 1.0} for q in ("q1", "q2")},
        "b": {q: {"m": 9.0, "rel": 8.0, "n": 1.0} for q in ("q1", "q2")},
    }
    qrels = {q: {"rel": 1} for q in ("q1", "q2")}
    found = search_weights(runs, qrels, fusion=TWO, dev=["q1", "q2"], test=["q3"], metric="mrr@10", steps=10)
    # rel: w + (1-w) 7/8; m: w/2 + (1-w): rel leads from w > 1/5; 5 of 10 parts each is the most even
    assert (found.weights, found.value, found.tried) == ({"a": 0.5, "b": 0.5}, 1.0, 11)
    only_b = search_weights(
        {"a": {"q1": {"n": 1.0, "rel": 0.5}}, "b": {"q1": {"rel": 1.0, "n": 0.0}}},
        {"q1": {"rel": 1}},
        fusion=TWO,
        dev=["q1"],
        test=[],
        steps=4,
    )
    assert only_b.weights == {"a": 0.25, "b": 0.75}
    assert only_b.value == 1.0
    assert only_b.equal_weights_value < 1.0  # tied with n there, and n comes first by id


def test_a_dev_query_that_is_a_test_query_is_refused() -> None:
    with pytest.raises(BadArgument, match="1 of 2 dev queries are test queries \\('q2'\\)"):
        search_weights({"a": {}, "b": {}}, {"q1": {"x": 1}}, fusion=TWO, dev=["q1", "q2"], test=["q2", "q9"])
    with pytest.raises(InvalidData, match="none of the 1 dev queries has a relevant document"):
        search_weights({"a": {}, "b": {}}, {"q1": {"x": 0}}, fusion=TWO, dev=["q1"], test=[])


names = st.sampled_from([f"d{i}" for i in range(6)])
hits = st.dictionaries(names, st.sampled_from([0.0, 0.5, 1.0, 3.0]), max_size=6)


@given(hits, hits, st.sampled_from(["float64", "float32"]), st.integers(1, 3), st.integers(1, 3))
def test_the_search_ranks_documents_as_the_fusion_does(
    a: dict[str, float], b: dict[str, float], precision: str, one: int, two: int
) -> None:
    rules = {"a": RouteRule(weight=one, threshold=0.5), "b": RouteRule(weight=two)}
    fusion = WeightedFusion(rules=rules, precision=precision)  # type: ignore[arg-type]
    table = fusion.tabulate({"a": {"q": a}, "b": {"q": b}}, queries=["q"])
    judged = Judged.of({"q": {f"d{i}": 1 for i in range(6)}})
    trial = _Trial(table, Scaled.of(table, rules), judged, single=precision == "float32")
    ranked = fusion.fuse({"a": {"q": a}, "b": {"q": b}})["q"].doc_ids
    expected = [ranked.index(d) + 1 if d in ranked else 0 for d in judged.doc_ids]
    assert trial.ranks(np.array([one, two], dtype=float)).tolist() == expected


def test_weights_are_saved_loaded_and_put_into_a_fusion(tmp_path: Path) -> None:
    found = Weights(
        weights={"a": 0.25, "b": 0.75},
        metric="ndcg@10",
        value=0.5,
        equal_weights_value=0.4,
        steps=4,
        tried=5,
        dev_queries=9,
    )
    found.save(tmp_path / "w.json")
    assert json.loads((tmp_path / "w.json").read_text())["dev_queries"] == 9
    fusion = with_weights(TWO, Weights.load(tmp_path / "w.json"))
    assert {name: rule.weight for name, rule in fusion.rules.items()} == {"a": 0.25, "b": 0.75}
    with pytest.raises(BadArgument, match="weights are for a, the routes are a, b"):
        with_weights(TWO, {"a": 1.0})
    (tmp_path / "w.json").write_text("{}")
    with pytest.raises(InvalidData, match="holds no 'weights' by route"):
        Weights.load(tmp_path / "w.json")
