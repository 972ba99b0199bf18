"""Fusion: hand-worked values, the study's vectors, laws, and ranx beside it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_rerank.errors import BadArgument, EngineFailure, InvalidData, MissingExtra
from pd_rerank.retrieval.fusion import (
    NEVIR_PAPER,
    RANX_METHODS,
    RANX_NORMS,
    Ranking,
    RanxFusion,
    ReciprocalRank,
    RouteRule,
    WeightedFusion,
)

VECTORS = Path(__file__).parents[3] / "shared" / "vectors" / "nevir_unit.json"

Run = dict[str, dict[str, float]]

needs_ranx = pytest.mark.skipif(find_spec("ranx") is None, reason="ranx is not installed (the extra 'eval')")


def scores(ranking: Ranking) -> dict[str, float]:
    return dict(zip(ranking.doc_ids, ranking.scores.tolist(), strict=True))


def weighted(precision: Any = "float64", **rules: RouteRule) -> WeightedFusion:
    return WeightedFusion(rules=rules, precision=precision)


# -- the weighted fusion, by hand ---------------------------------------------------------------------------------


def test_each_route_is_scaled_to_its_own_range_and_weighted() -> None:
    fused = weighted(a=RouteRule(weight=3), b=RouteRule(weight=1)).fuse(
        {"a": {"q": {"x": 10.0, "y": 6.0, "z": 2.0}}, "b": {"q": {"y": 5.0, "w": 1.0}}}
    )["q"]
    # a: x 1, y 1/2, z 0, weight 3/4; b: y 1, w 0, weight 1/4
    assert scores(fused) == {"x": 0.75, "y": 0.625, "w": 0.0, "z": 0.0}
    assert fused.doc_ids == ("x", "y", "w", "z")


def test_a_hit_at_the_threshold_is_kept_and_one_below_stays_in_the_pool_last() -> None:
    fused = weighted(a=RouteRule(threshold=0.3)).fuse({"a": {"q": {"b": 0.8, "z": 0.3, "a": 0.2999}}})["q"]
    assert fused.doc_ids == ("b", "z", "a")  # z scores 0 as a does, but it was kept
    assert scores(fused) == {"b": 1.0, "z": 0.0, "a": 0.0}


def test_in_single_precision_a_kept_zero_ties_with_a_dropped_document() -> None:
    fused = weighted("float32", a=RouteRule(threshold=0.3)).fuse({"a": {"q": {"b": 0.8, "z": 0.3, "a": 0.2999}}})["q"]
    assert fused.doc_ids == ("b", "a", "z")


def test_single_precision_ties_what_double_precision_tells_apart() -> None:
    runs = {"a": {"q": {"x": 2.0, "y": 2.0 - 1e-9, "z": 1.0}}}
    assert weighted(a=RouteRule()).fuse(runs)["q"].doc_ids == ("x", "y", "z")
    single = weighted("float32", a=RouteRule()).fuse(runs)["q"]
    assert scores(single) == {"x": 1.0, "y": 1.0, "z": 0.0}


@pytest.mark.parametrize("hits", [{"x": 0.5}, {"x": 0.5, "y": 0.5}, {"x": 0.0, "y": 0.0}, {"x": 1e-320}])
def test_a_single_hit_or_equal_scores_count_one_each(hits: dict[str, float]) -> None:
    assert scores(weighted(a=RouteRule()).fuse({"a": {"q": hits}})["q"]) == dict.fromkeys(hits, 1.0)


def test_log1p_is_taken_before_scaling() -> None:
    fused = weighted(a=RouteRule(transform="log1p")).fuse({"a": {"q": {"x": 7.0, "y": 3.0, "z": 1.0}}})["q"]
    # log1p: ln 8, ln 4, ln 2, so y is half-way
    assert scores(fused)["y"] == pytest.approx(0.5)


def test_weights_are_shared_among_the_routes_that_found_something() -> None:
    fusion = weighted(a=RouteRule(weight=0.7), b=RouteRule(weight=0.15), c=RouteRule(weight=0.15))
    fused = fusion.fuse({"a": {"q": {}}, "b": {"q": {"x": 2.0, "y": 1.0}}, "c": {"q": {"y": 3.0}}})["q"]
    assert scores(fused) == {"x": 0.5, "y": 0.5}
    assert fused.doc_ids == ("x", "y")


def test_a_query_no_route_answered_has_an_empty_ranking() -> None:
    fused = weighted(a=RouteRule()).fuse({"a": {"q": {"x": 1.0}, "none": {}}}, queries=["none", "q", "unknown"])
    assert list(fused) == ["none", "q", "unknown"]
    assert (fused["none"].doc_ids, fused["unknown"].doc_ids, fused["q"].doc_ids) == ((), (), ("x",))
    assert weighted(a=RouteRule()).fuse({"a": {}}) == {}
    assert weighted(a=RouteRule()).fuse({"a": {"q": {}}})["q"].doc_ids == ()


def test_routes_need_not_have_the_same_queries() -> None:
    fused = weighted(a=RouteRule(), b=RouteRule()).fuse({"a": {"q1": {"x": 1.0}}, "b": {"q2": {"y": 1.0}}})
    assert {q: r.doc_ids for q, r in fused.items()} == {"q1": ("x",), "q2": ("y",)}


def test_what_no_route_kept_is_ranked_by_id() -> None:
    fused = weighted(a=RouteRule(threshold=5.0)).fuse({"a": {"q": {"b": 1.0, "c": 4.0, "a": 2.0}}})["q"]
    assert scores(fused) == {"a": 0.0, "b": 0.0, "c": 0.0}
    assert fused.doc_ids == ("a", "b", "c")


# -- the study's vectors ------------------------------------------------------------------------------------------


@pytest.mark.skipif(not VECTORS.is_file(), reason="vectors not present (../shared/vectors/nevir_unit.json)")
def test_every_fusion_vector_of_the_study_comes_out_exactly() -> None:
    cases = json.loads(VECTORS.read_text(encoding="utf-8"))["fusion"]
    assert cases
    for case in cases:
        runs = {name: {"q": dict(hits)} for name, hits in case["routes"].items()}
        double = WeightedFusion(rules=NEVIR_PAPER).fuse(runs)["q"]
        assert (scores(double), list(double.doc_ids)) == (case["scores64"], case["pool_order"]), case["name"]
        single = WeightedFusion(rules=NEVIR_PAPER, precision="float32").fuse(runs)["q"]
        assert (scores(single), list(single.doc_ids)) == (case["scores_f32"], case["stage1_order"]), case["name"]


# -- laws ---------------------------------------------------------------------------------------------------------

ids = st.sampled_from([f"d{i}" for i in range(12)])
hit_lists = st.dictionaries(ids, st.sampled_from([0.0, 0.25, 0.3, 1.0, 2.0, 7.5, 30.0]), max_size=9)
run_of_three = st.fixed_dictionaries({"q1": hit_lists, "q2": hit_lists, "q3": hit_lists})
three_runs = st.fixed_dictionaries({"dense": run_of_three, "sparse": run_of_three, "bm25": run_of_three})


def plain(runs: Mapping[str, Mapping[str, float]], rules: Mapping[str, RouteRule]) -> dict[str, float]:
    """One query's weighted fusion in the plainest Python, survivors first."""
    kept: dict[str, dict[str, float]] = {}
    for name, hits in runs.items():
        rule = rules[name]
        floor = -math.inf if rule.threshold is None else rule.threshold
        passed = {d: s for d, s in hits.items() if s >= floor}
        if passed:
            kept[name] = {d: math.log1p(s) if rule.transform == "log1p" else s for d, s in passed.items()}
    total = 0.0
    for name in kept:
        total += rules[name].weight
    fused = dict.fromkeys((d for hits in runs.values() for d in hits), 0.0)
    for name, hits in kept.items():
        low, high = min(hits.values()), max(hits.values())
        for d, s in hits.items():
            fused[d] += rules[name].weight / total * (1.0 if high == low else (s - low) / (high - low))
    survivors = {d for hits in kept.values() for d in hits}
    return dict(sorted(fused.items(), key=lambda i: (i[0] not in survivors, -i[1], i[0])))


@given(three_runs)
def test_the_arrays_give_what_plain_python_gives_to_the_last_bit(runs: dict[str, Run]) -> None:
    fused = WeightedFusion(rules=NEVIR_PAPER).fuse(runs)
    for query, ranking in fused.items():
        expected = plain({name: runs[name][query] for name in NEVIR_PAPER}, NEVIR_PAPER)
        assert scores(ranking) == expected
        assert ranking.doc_ids == tuple(expected)


@given(three_runs, st.randoms(use_true_random=False), st.sampled_from(["weighted", "float32", "rrf"]))
def test_the_order_hits_come_in_changes_nothing(runs: dict[str, Run], random: Any, kind: str) -> None:
    def shuffled(hits: dict[str, float]) -> dict[str, float]:
        items = list(hits.items())
        random.shuffle(items)
        return dict(items)

    how = {
        "weighted": WeightedFusion(rules=NEVIR_PAPER),
        "float32": WeightedFusion(rules=NEVIR_PAPER, precision="float32"),
        "rrf": ReciprocalRank(),
    }[kind]
    again = {name: {q: shuffled(hits) for q, hits in run.items()} for name, run in runs.items()}
    one, two = how.fuse(runs), how.fuse(again, queries=list(one_key(runs)))
    for query in one:
        assert one[query].doc_ids == two[query].doc_ids
        assert one[query].scores.tolist() == two[query].scores.tolist()


def one_key(runs: dict[str, Run]) -> list[str]:
    return list(next(iter(runs.values())))


@given(three_runs)
def test_every_document_of_every_route_is_ranked_once_and_scores_do_not_rise(runs: dict[str, Run]) -> None:
    for how in (WeightedFusion(rules=NEVIR_PAPER), ReciprocalRank()):
        for query, ranking in how.fuse(runs).items():
            assert sorted(ranking.doc_ids) == sorted({d for run in runs.values() for d in run[query]})
            assert (np.diff(ranking.scores) <= 0).all()
            keys = list(zip((-ranking.scores).tolist(), ranking.doc_ids, strict=True))
            if isinstance(how, ReciprocalRank):
                assert keys == sorted(keys)


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_is_named(score: float) -> None:
    for how in (weighted(a=RouteRule()), ReciprocalRank()):
        with pytest.raises(InvalidData, match=r"route 'a', query 'q2', document 'y': score -?(nan|inf)"):
            how.fuse({"a": {"q1": {"x": 1.0}, "q2": {"x": 1.0, "y": score}}})


def test_a_negative_score_is_for_raw_routes_only() -> None:
    runs = {"a": {"q": {"x": -1.0, "y": -3.0}}}
    assert scores(weighted(a=RouteRule()).fuse(runs)["q"]) == {"x": 1.0, "y": 0.0}
    with pytest.raises(InvalidData, match=r"route 'a', query 'q', document 'x': score -1\.0 is negative"):
        weighted(a=RouteRule(transform="log1p", threshold=0.0)).fuse(runs)


def test_routes_that_weigh_nothing_where_only_they_found_something_are_an_error() -> None:
    fusion = weighted(a=RouteRule(weight=0), b=RouteRule(weight=1))
    assert scores(fusion.fuse({"a": {"q": {"x": 2.0}}, "b": {"q": {"y": 1.0}}})["q"]) == {"y": 1.0, "x": 0.0}
    with pytest.raises(InvalidData, match="query 'q': of its routes only 'a' have hits, and they weigh 0"):
        fusion.fuse({"a": {"q": {"x": 2.0}}, "b": {"q": {}}})


def test_rules_and_runs_must_be_of_the_same_routes() -> None:
    with pytest.raises(BadArgument, match="rules for 'a' and got runs of 'b'"):
        weighted(a=RouteRule()).fuse({"b": {}})


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (lambda: RouteRule(weight=-1), "weight is a number from 0"),
        (lambda: RouteRule(threshold=math.nan), "threshold is a number"),
        (lambda: RouteRule(transform="sqrt"), "unknown transform 'sqrt'"),  # type: ignore[arg-type]
        (lambda: weighted("float16", a=RouteRule()), "unknown precision 'float16'"),
        (lambda: WeightedFusion(rules={}), "at least one route"),
        (lambda: ReciprocalRank(k=-1), "k of reciprocal rank fusion"),
        (lambda: ReciprocalRank(weights={"z": 1}).fuse({"a": {}}), "weights for 'z', but the runs are of 'a'"),
        (lambda: RanxFusion(method="wsun"), "no fusion method 'wsun'; did you mean wsum"),
        (lambda: RanxFusion(method="sum", norm="minmax"), "no normalisation 'minmax'"),
        (lambda: RanxFusion(method="sum", params={"k": 1}), "ranx's sum takes nothing, got 'k'"),
        (lambda: RanxFusion(method="wsum").fuse({"a": {}, "b": {}}), "wsum needs 'weights'; give them"),
        (lambda: RanxFusion(method="posfuse").fuse({"a": {}, "b": {}}), "learn them on dev queries"),
        (lambda: RanxFusion(method="wsum", params={"weights": [1]}).fuse({"a": {}, "b": {}}), "1 weights for 2 routes"),
    ],
)
def test_settings_that_cannot_be_are_refused(bad: Any, says: str) -> None:
    with pytest.raises(BadArgument, match=says):
        bad()


# -- reciprocal ranks ---------------------------------------------------------------------------------------------


def test_reciprocal_ranks_add_up_over_the_routes_that_found_a_document() -> None:
    fused = ReciprocalRank(k=9, weights={"b": 2}).fuse({"a": {"q": {"x": 3.0, "y": 1.0}}, "b": {"q": {"y": 0.1}}})["q"]
    assert scores(fused) == pytest.approx({"y": 1 / 11 + 2 / 10, "x": 1 / 10})
    assert fused.doc_ids == ("y", "x")


def test_tied_hits_take_their_ranks_in_the_order_of_their_ids() -> None:
    fused = ReciprocalRank(k=0).fuse({"a": {"q": {"b": 1.0, "c": 1.0, "a": 1.0}}})["q"]
    assert scores(fused) == pytest.approx({"a": 1.0, "b": 1 / 2, "c": 1 / 3})


# -- ranx ---------------------------------------------------------------------------------------------------------


def tie_free(seed: int, *, queries: int = 5, hits: int = 8) -> dict[str, Run]:
    rng = np.random.default_rng(seed)
    names = [f"d{i:02d}" for i in range(15)]
    return {
        route: {
            f"q{q}": {names[i]: float(rng.uniform(1, 20)) for i in rng.choice(15, size=hits, replace=False)}
            for q in range(queries)
        }
        for route in ("a", "b", "c")
    }


@needs_ranx
def test_ranx_wsum_and_rrf_agree_with_ours_where_nothing_is_tied() -> None:
    runs = tie_free(0)
    ours = weighted(a=RouteRule(weight=0.5), b=RouteRule(weight=0.3), c=RouteRule(weight=0.2)).fuse(runs)
    before = set(sys.modules)
    theirs = RanxFusion(method="wsum", params={"weights": [0.5, 0.3, 0.2]}).fuse(runs)
    assert not {name.partition(".")[0] for name in set(sys.modules) - before} & {"ranx", "numba"}
    for query in ours:
        assert theirs[query].doc_ids == ours[query].doc_ids
        assert theirs[query].scores == pytest.approx(ours[query].scores, abs=1e-12)
    ranks, their_ranks = ReciprocalRank(k=60).fuse(runs), RanxFusion(method="rrf", params={"k": 60}).fuse(runs)
    for query in ranks:  # equal sums of reciprocal ranks can differ in the last bit, and then in order
        assert scores(their_ranks[query]) == pytest.approx(scores(ranks[query]), abs=1e-12)


ALL_METHODS = """
import json, sys
from pd_rerank.retrieval.ranx_worker import answer
asked = json.load(sys.stdin)
found = {}
for question in asked:
    learned = {}
    if question.get("learn"):
        dev = {"qrels": question["qrels"], "metric": "ndcg@10"}
        runs = [{q: hits[q] for q in dev["qrels"]} for hits in question["runs"]]
        learned = answer({**question, **dev, "runs": runs})["params"]
    question = {k: v for k, v in question.items() if k != "qrels"}
    fused = answer({**question, "params": {**question["params"], **learned}})["fused"]
    found[f"{question['method']} {question['norm']}"] = fused
json.dump(found, sys.stdout)
"""


@needs_ranx
def test_every_ranx_method_and_norm_scores_every_document_also_where_a_route_is_empty() -> None:
    runs = tie_free(1, queries=3)
    runs["b"]["q1"] = {}
    runs["c"] = {query: {} for query in runs["c"]}
    given: dict[str, Any] = {"weights": [0.5, 0.3, 0.2], "k": 60, "gamma": 0.5, "sigma": 0.3, "phi": 0.8}
    lists = [{q: sorted(h.items(), key=lambda i: -i[1]) for q, h in run.items()} for run in runs.values()]
    qrels = {q: dict.fromkeys(list(runs["a"][q])[:2], 1) for q in ("q0", "q2")}
    slow = {"probfuse", "slidefuse"}  # they try a hundred settings while learning; given fixed ones here
    fixed = {"probfuse": {"probs": [[0.5, 0.1]] * 3}, "slidefuse": {"probs": [[0.5] * 8] * 3, "w": 2}}
    asked = []
    for method, takes in RANX_METHODS.items():
        params = {name: given[name] for name in takes if name in given} | fixed.get(method, {})
        learn = bool(set(takes) - set(params)) and method not in slow
        common = {"params": params, "runs": lists, "qrels": qrels, "learn": learn}
        norms = (None, *RANX_NORMS) if method == "sum" else ("min-max",)
        asked += [{"method": method, "norm": norm, **common} for norm in norms]
    env = {**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONHASHSEED": "0", "MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALL_METHODS],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == len(RANX_METHODS) + len(RANX_NORMS)
    for name, fused in found.items():
        for query, hits in fused.items():
            expected = {d for run in runs.values() for d in run[query]}
            if not name.endswith("borda"):
                assert {d for d, _ in hits} == expected, (name, query)
            assert all(math.isfinite(score) for _, score in hits), (name, query)


def test_ranx_results_are_put_in_canonical_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: Any) -> dict[str, Any]:
        return {"fused": {"q": [["b", 1.0], ["c", 2.0], ["a", 1.0]]}}

    monkeypatch.setattr(RanxFusion, "_ask", asked)
    fused = RanxFusion(method="sum").fuse({"x": {"q": {"a": 1.0}}, "y": {"q": {"b": 1.0, "c": 1.0}, "none": {}}})
    assert fused["q"].doc_ids == ("c", "a", "b")
    assert fused["none"].doc_ids == ()


def test_ranx_needs_two_routes_and_its_failures_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: True)
    with pytest.raises(BadArgument, match="two routes or more"):
        RanxFusion(method="sum").fuse({"a": {"q": {"x": 1.0}}})
    assert RanxFusion(method="sum").fuse({"a": {"q": {}}, "b": {}})["q"].doc_ids == ()
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nValueError: no such thing\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(EngineFailure, match="ranx's sum failed on 1 queries: ValueError: no such thing"):
        RanxFusion(method="sum").fuse({"a": {"q": {"x": 1.0}}, "b": {"q": {"x": 1.0}}})


def test_without_ranx_the_pip_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(MissingExtra, match=r"fusion method 'sum' is ranx's.*pd-rerank\[eval\]"):
        RanxFusion(method="sum").fuse({"a": {"q": {"x": 1.0}}, "b": {"q": {"x": 1.0}}})


@settings(deadline=None)
@given(three_runs)
def test_describing_a_fusion_gives_plain_values(runs: dict[str, Run]) -> None:
    for how in (WeightedFusion(rules=NEVIR_PAPER), ReciprocalRank(), RanxFusion(method="rrf")):
        assert json.loads(json.dumps(how.describe())) == how.describe()
