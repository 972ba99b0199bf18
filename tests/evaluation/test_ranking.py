"""Ranking metrics equal trec_eval's, whatever order things come in, and say what the pool left open."""

from __future__ import annotations

import copy
import importlib.util
import math
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.evaluation import ranking as module
from pd_rerank.evaluation.ranking import Metric, Ranking, as_ranking, evaluate, measure
from pd_rerank.files import RunHit, read_qrels, read_run
from pd_rerank.pool import Candidate, Pool
from tests.tables import table

pytest.importorskip("ranx", reason="ranx is not installed (extra 'eval')")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evaluation_ranking.md"
DL20 = Path(__file__).resolve().parents[3] / "shared" / "data" / "dl20"
RUNS = ("BM25", "D_BERT_KD_TASB", "REP_LLAMA", "SPLADE_P_P_ENSEMBLE_DISTIL")

QRELS = {"q1": {"A": 3, "B": 1, "X": 0}}
RUN = {"q1": {"C": 0.9, "A": 0.5, "X": 0.5}}


# -- names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spelling", "canonical", "ranx"),
    [
        ("ndcg@10", "nDCG@10", "ndcg@10"),
        ("nDCG@10", "nDCG@10", "ndcg@10"),
        ("ndcg_cut_10", "nDCG@10", "ndcg@10"),
        ("ndcg_cut.10", "nDCG@10", "ndcg@10"),
        ("map@100-l2", "AP(rel=2)@100", "map@100-l2"),
        ("AP(rel=2)@100", "AP(rel=2)@100", "map@100-l2"),
        ("AP", "AP", "map"),
        ("MAP", "AP", "map"),
        ("map_cut_100", "AP@100", "map@100"),
        ("mrr", "RR", "mrr"),
        ("RR(rel=2)@10", "RR(rel=2)@10", "mrr@10-l2"),
        ("recip_rank", "RR", "mrr"),
        ("R@100", "R@100", "recall@100"),
        ("recall_1000", "R@1000", "recall@1000"),
        ("Recall(rel=1)@5", "R@5", "recall@5"),
        ("P@5", "P@5", "precision@5"),
        ("precision@5-l2", "P(rel=2)@5", "precision@5-l2"),
        ("Success@5", "Success@5", "hit_rate@5"),
        ("hit_rate@5", "Success@5", "hit_rate@5"),
        ("r-precision", "Rprec", "r-precision"),
        ("Rprec(rel=2)", "Rprec(rel=2)", "r-precision-l2"),
        ("ndcg-l2", "nDCG(rel=2)", "ndcg-l2"),
        ("nDCG(dcg='exp-log2')@10", "nDCG(dcg='exp-log2')@10", "ndcg_burges@10"),
        ("ndcg_burges@10-l2", "nDCG(dcg='exp-log2',rel=2)@10", "ndcg_burges@10-l2"),
    ],
)
def test_every_spelling_has_one_canonical_form(spelling: str, canonical: str, ranx: str) -> None:
    metric = Metric.parse(spelling)
    assert str(metric) == canonical
    assert metric.ranx == ranx
    assert Metric.parse(str(metric)) == metric
    assert Metric.parse(metric.ranx) == metric


@pytest.mark.parametrize(
    "spelling",
    [
        *("", "nDGC@10", "ndcg@", "ndcg@0", "ndcg@-1", "ndcg@1e3", "ndcg@10@5", "P 5", "bpref", "Rprec@5"),
        *("map-l0", "map-l2@10", "AP(rel=x)", "AP(rel=2)-l2", "AP(cutoff=3)", "RR(dcg='exp-log2')"),
    ],
)
def test_a_name_that_is_no_metric_is_refused(spelling: str) -> None:
    with pytest.raises(BadArgument):
        Metric.parse(spelling)


# -- values ------------------------------------------------------------------------------------------------


def test_the_example_worked_by_hand() -> None:
    (outcome,) = evaluate(QRELS, RUN, ["nDCG@10"]).outcomes
    ideal = 3 + 1 / math.log2(3)
    assert outcome.value == pytest.approx(1.5 / ideal) == pytest.approx(0.4131, abs=5e-5)
    assert outcome.high == pytest.approx(3 / math.log2(3) / ideal) == pytest.approx(0.5213, abs=5e-5)
    assert outcome.low == outcome.value
    assert outcome.oracle == pytest.approx(3 / ideal)
    assert outcome.pool_recall == 0.5
    assert outcome.unjudged == pytest.approx(1 / 3)
    assert outcome.tied == 0.5
    assert math.isnan(outcome.first_stage)
    assert outcome.retrieved == 3


def test_the_toy_of_the_page_holds() -> None:
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(block, {})


def test_six_identity_rankings_of_the_methods_fixture() -> None:
    shared = random.Random(20260806)
    grades = []
    for _ in range(6):
        one = [2, 1, 1, 0, 0, 0, 0, 0]
        shared.shuffle(one)
        grades.append(one)
    qrels = {f"q{i}": {f"d{j}": g for j, g in enumerate(one)} for i, one in enumerate(grades)}
    run = {q: [f"d{j}" for j in range(8)] for q in qrels}
    values = measure(qrels, run, ["nDCG@10"])[:, 0]
    assert values == pytest.approx([0.70097, 0.954073, 0.42175, 0.461645, 0.708275, 0.836195], abs=5e-6)
    assert values.mean() == pytest.approx(0.6804846774, abs=5e-11)


def test_gains_are_linear_by_default_and_exponential_on_request() -> None:
    qrels, run = {"q": {"a": 3, "b": 1}}, {"q": ["b", "a"]}
    linear, exponential = measure(qrels, run, ["nDCG@10", "nDCG(dcg='exp-log2')@10"])[0]
    second = 1 / math.log2(3)
    assert linear == pytest.approx((1 + 3 * second) / (3 + second))
    assert exponential == pytest.approx((1 + 7 * second) / (7 + second))


def test_the_relevance_level_cuts_what_counts() -> None:
    qrels, run = {"q": {"a": 1, "b": 2, "c": 3}}, {"q": ["a", "b", "x", "c"]}
    values = measure(qrels, run, ["RR", "RR(rel=2)", "AP(rel=2)", "R(rel=3)@3", "P(rel=2)@5", "Success(rel=3)@3"])[0]
    assert values.tolist() == pytest.approx([1, 0.5, (1 / 2 + 2 / 4) / 2, 0, 2 / 5, 0])


def test_a_cutoff_beyond_the_ranking_divides_precision_by_the_cutoff() -> None:
    assert measure({"q": {"a": 1}}, {"q": ["a"]}, ["P@5", "nDCG@10", "R@100"])[0].tolist() == [0.2, 1.0, 1.0]


# -- ties --------------------------------------------------------------------------------------------------


def test_ties_are_broken_as_trec_eval_breaks_them() -> None:
    assert Ranking.trec({"d1": 1.0, "d3": 1.0, "d2": 1.0}).doc_ids == ("d3", "d2", "d1")
    assert Ranking.trec({"d3": 0.5, "é1": 0.5, "z": 0.5}).doc_ids == ("é1", "z", "d3")


def test_scores_that_single_precision_cannot_tell_apart_are_tied() -> None:
    assert Ranking.trec({"d1": 0.50000001, "d3": 0.5}).doc_ids == ("d3", "d1")
    assert Ranking.trec({"d1": 0.5000001, "d3": 0.5}).doc_ids == ("d1", "d3")
    assert Ranking.trec({"a": 1e300, "b": 1e200}).doc_ids == ("b", "a")


def test_a_constant_scorer_gains_nothing() -> None:
    """Forty tied documents, which ranx alone shuffles: one value in any order, and 0 where ties count against it."""
    ids = [f"d{i:02d}" for i in range(40)]
    qrels = {"q": {"d05": 1}}
    front = evaluate(qrels, {"q": dict.fromkeys(["d05", *ids], 0.0)}, ["RR", "RR@10"]).outcomes
    back = evaluate(qrels, {"q": dict.fromkeys(reversed(ids), 0.0)}, ["RR", "RR@10"]).outcomes
    assert front == back
    assert front[0].value == pytest.approx(1 / 35)  # d39 … d05: the id's place in descending order
    assert (front[1].value, front[1].low, front[1].high) == (0, 0, 1)
    assert front[0].tied == 1
    assert front[0].low == pytest.approx(1 / 40)


def test_a_ranking_given_as_ids_stands_as_it_is() -> None:
    assert as_ranking(["b", "a", "c"]) == Ranking(("b", "a", "c"))
    assert measure({"q": {"b": 1}}, {"q": ("b", "a")}, ["RR"])[0, 0] == 1
    assert math.isnan(evaluate({"q": {"b": 1}}, {"q": ("b", "a")}, ["RR"]).outcomes[0].tied)


def test_run_hits_are_ordered_by_score_and_not_as_they_lie() -> None:
    hits = [RunHit("a", 1, 0.1), RunHit("b", 2, 0.9), RunHit("c", 3, 0.1)]
    assert as_ranking(hits).doc_ids == ("b", "c", "a")


def test_the_served_ranking_of_a_table_keeps_its_own_tie_rule() -> None:
    served = Ranking.served(table([[0.5, 0.9, 0.5, float("nan")]]))
    assert served.doc_ids == ("B", "A", "C", "D")
    assert served.scores is not None
    assert served.scores[1] == served.scores[2]


# -- what is counted -----------------------------------------------------------------------------------------


def test_a_query_without_results_counts_zero_and_is_listed() -> None:
    qrels = {"q1": {"a": 1}, "q2": {"a": 1}, "q3": {"a": 1}, "q4": {"a": 0}}
    result = evaluate(qrels, {"q1": {"a": 1.0}, "q3": {}, "q9": {"a": 1.0}, "q4": {"a": 1.0}}, ["RR", "P@1"])
    assert result.empty == ("q2", "q3")
    assert result.ignored == ("q9",)
    assert result.values("mrr") == {"q1": 1, "q2": 0, "q3": 0, "q4": 0}
    row = result.summary()[0]
    assert (row.value, row.n, row.empty) == (0.25, 4, ("q2", "q3"))


def test_all_queries_empty_is_zero_and_not_an_error() -> None:
    result = evaluate({"q1": {"a": 1}, "q2": {"b": 1}}, {"q1": {}, "q2": []}, ["nDCG@10", "AP"])
    assert [row.value for row in result.summary()] == [0, 0]
    assert result.empty == ("q1", "q2")
    assert evaluate({"q1": {"a": 1}}, {}, ["RR"]).summary()[0].value == 0


def test_queries_in_another_order_than_the_judgements_are_aligned() -> None:
    qrels = {"q1": {"a": 1}, "q2": {"b": 1}}
    assert measure(qrels, {"q2": {"b": 1.0}, "q1": {"a": 1.0}}, ["RR"])[:, 0].tolist() == [1, 1]


def test_negative_grades_are_unjudged_and_gain_nothing() -> None:
    outcome = evaluate({"q": {"a": -2, "b": 1, "c": 0}}, {"q": ["a", "b", "c"]}, ["nDCG@3"]).outcomes[0]
    assert outcome.unjudged == pytest.approx(1 / 3)
    assert outcome.value == pytest.approx(1 / math.log2(3))


def test_the_pool_sets_the_ceiling_not_the_ranking() -> None:
    qrels = {"q": {"a": 1, "b": 1, "c": 1, "d": 1}}
    outcome = evaluate(qrels, {"q": ["x", "a"]}, ["R@1"], pools={"q": ["x", "a", "b"]}).outcomes[0]
    assert (outcome.value, outcome.oracle, outcome.pool_recall) == (0, 0.25, 0.5)
    with pytest.raises(InvalidData, match=r"'y'.*pool of 1"):
        evaluate(qrels, {"q": ["y"]}, ["R@1"], pools={"q": ["x"]})


def test_the_first_stage_stands_beside_the_reranked_run() -> None:
    pool = Pool(
        query_id="q",
        query="?",
        candidates=tuple(Candidate(doc_id=d, text="", score=s) for d, s in (("a", 1.0), ("b", 3.0), ("c", 2.0))),
    )
    assert Ranking.first_stage(pool).doc_ids == ("b", "c", "a")
    unscored = Pool(
        query_id="q", query="?", candidates=(Candidate(doc_id="z", text=""), Candidate(doc_id="a", text=""))
    )
    assert Ranking.first_stage(unscored).doc_ids == ("z", "a")
    result = evaluate(
        {"q": {"a": 1}, "p": {"a": 1}}, {"q": ["a", "b"]}, ["RR"], first_stage={"q": Ranking.first_stage(pool)}
    )
    assert [o.first_stage for o in result.outcomes] == [pytest.approx(1 / 3), 0]
    assert result.summary()[0].first_stage == pytest.approx(1 / 6)


def test_of_what_was_in_the_pool() -> None:
    row = evaluate({"q": {"a": 1, "b": 1}}, {"q": ["x", "a"]}, ["AP"]).summary()[0]
    assert (row.value, row.oracle, row.of_oracle) == (0.25, 0.5, 0.5)


@pytest.mark.parametrize(
    ("qrels", "run", "said"),
    [
        ({}, {"q": ["a"]}, "no query"),
        ({"q": {"a": 1}}, {"other": ["a"]}, "none of the 1 queries of the run.*'other' and 'q'"),
        ({"q": {"a": 1}}, {"q": {"a": float("nan")}}, "query 'q'.*'a' has the score NaN"),
        ({"q": {"a": 1}}, {"q": ["a", "b", "a"]}, "'a' is ranked twice"),
        ({"q": {"a": 1}}, {"q": [RunHit("a", 1, 1.0), RunHit("a", 2, 0.5)]}, "'a' is ranked twice"),
        ({"q": {"a": 1}}, {"q": {7: 1.0}}, "7 is a int"),
        ({"q": {"a": 1}}, {"q": [7, "a"]}, "7 is a int"),
        ({"q": {"a": 1}}, {"q": "a"}, "one id"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_with_its_place(qrels: dict, run: dict, said: str) -> None:
    with pytest.raises(InvalidData, match=said):
        evaluate(qrels, run, ["RR"])


def test_a_metric_is_needed_and_only_what_was_evaluated_is_there() -> None:
    with pytest.raises(BadArgument, match="no metric"):
        evaluate(QRELS, RUN, [])
    with pytest.raises(BadArgument, match="none of RR"):
        evaluate(QRELS, RUN, ["RR", "mrr"]).values("AP")


# -- laws ----------------------------------------------------------------------------------------------------

GRADES = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(-1, 3), max_size=8)
SCORES = st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=8)
METRICS = ["nDCG@3", "RR", "AP(rel=2)", "R@2", "P@4", "Success@1", "Rprec", "nDCG(dcg='exp-log2')"]


@given(judged=GRADES, scored=SCORES, seed=st.integers(0, 9))
@settings(deadline=None, max_examples=60)
def test_values_depend_on_no_order_lie_between_their_bounds_and_change_nothing(
    judged: dict[str, int], scored: dict[str, float], seed: int
) -> None:
    qrels, run = {"q": judged, "r": {"a": 1}}, {"q": scored, "r": {"b": 1.0}}
    kept = copy.deepcopy((qrels, run))
    outcomes = evaluate(qrels, run, METRICS).outcomes
    assert (qrels, run) == kept
    assert [list(q) for q in (judged, scored)] == [list(q) for q in (kept[0]["q"], kept[1]["q"])]

    def shuffled(d: dict) -> dict:
        return dict(random.Random(seed).sample(list(d.items()), len(d)))

    again = evaluate(qrels, {"r": {"b": 1.0}, "q": shuffled(scored)}, METRICS).outcomes
    assert repr(again) == repr(outcomes)
    judged_again = evaluate({"q": shuffled(judged), "r": {"a": 1}}, run, METRICS).outcomes
    assert repr(judged_again) == repr(outcomes)
    for o in outcomes:
        assert 0 <= o.low <= o.value + 1e-12
        assert o.value <= o.high + 1e-12
        assert o.high <= o.oracle + 1e-12


# -- ranx ----------------------------------------------------------------------------------------------------


def test_ranx_and_numba_are_left_as_they_are() -> None:
    import numba
    import ranx.metrics

    called = ranx.metrics.ndcg.__globals__["_ndcg_parallel"]
    compiled, threads = len(getattr(called, "signatures", ())), numba.get_num_threads()
    measure(QRELS, RUN, ["nDCG@10"])
    assert ranx.metrics.ndcg.__globals__["_ndcg_parallel"] is called
    assert numba.get_num_threads() == threads
    assert len(getattr(called, "signatures", ())) == compiled


@pytest.mark.parametrize("family", ["nDCG@10", "AP(rel=2)"])
def test_compiled_and_plain_agree(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where ranx's compilation is cached or switched off is this quick; the arrays are the same either way."""
    if not os.environ.get("NUMBA_DISABLE_JIT") and not os.environ.get("PD_RERANK_TEST_COMPILED"):
        pytest.skip("compiling ranx takes 15 s of CPU; set PD_RERANK_TEST_COMPILED=1 to do it")
    qrels = {f"q{i}": {f"d{j}": (i * j) % 4 for j in range(9)} for i in range(12)}
    run = {q: {f"d{j}": float((j * 7) % 5) for j in range(12)} for q in qrels} | {"q3": {}}
    plain = measure(qrels, run, [family])
    monkeypatch.setattr(module, "_PLAIN", 0)
    assert measure(qrels, run, [family]) == pytest.approx(plain, abs=1e-12)


def test_three_queries_are_evaluated_in_seconds_from_a_cold_start(tmp_path: Path) -> None:
    script = (
        "import time\n"
        "from pd_rerank.evaluation.ranking import evaluate\n"
        "qrels = {q: {'a': 1, 'b': 2} for q in 'xyz'}\n"
        "run = {q: {'a': .1, 'b': .2} for q in 'xyz'}\n"
        "rows = evaluate(qrels, run, ['ndcg@10', 'mrr', 'map', 'recall@10']).summary()\n"
        "assert [r.value for r in rows] == [1, 1, 1, 1]\n"
        "print(time.process_time())\n"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}  # no compiled function of an earlier run
    environment.pop("NUMBA_DISABLE_JIT", None)
    start = time.monotonic()
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 6, f"{run.stdout} s CPU, {time.monotonic() - start:.1f} s"


def test_without_ranx_the_pip_command_is_named() -> None:
    script = (
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "class Without:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        return None if name.partition('.')[0] == 'ranx' else PathFinder.find_spec(name, path, target)\n"
        "sys.meta_path[sys.meta_path.index(PathFinder)] = Without\n"
        "from pd_rerank.errors import MissingExtra\n"
        "from pd_rerank.evaluation.ranking import evaluate\n"
        "try:\n    evaluate({'q': {'a': 1}}, {'q': ['a']}, ['RR'])\n"
        "except MissingExtra as error:\n    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "pip install 'pd-rerank[eval]'" in run.stdout, run.stderr


# -- trec_eval -----------------------------------------------------------------------------------------------

MEASURES = {
    "ndcg": "nDCG",
    "ndcg_cut_5": "nDCG@5",
    "ndcg_cut_10": "nDCG@10",
    "map": "AP",
    "map_cut_10": "AP@10",
    "recip_rank": "RR",
    "P_5": "P@5",
    "P_200": "P@200",
    "recall_100": "R@100",
    "success_5": "Success@5",
    "Rprec": "Rprec",
}

TREC_EVAL = {"ndcg", "ndcg_cut", "map", "map_cut", "recip_rank", "P", "recall", "success", "Rprec"}

PRINTED = {
    # trec_eval 9 of Anserini 1.7.1's jar, -c, with -l 2 for all but nDCG: ndcg_cut.10 map recip_rank recall.100 P.5
    "BM25": "0.4796 0.2685 0.6583 0.5599 0.4296",
    "D_BERT_KD_TASB": "0.6854 0.4520 0.8350 0.7135 0.6185",
    "REP_LLAMA": "0.7195 0.4928 0.8721 0.7311 0.6667",
    "SPLADE_P_P_ENSEMBLE_DISTIL": "0.7197 0.4826 0.8434 0.7653 0.6481",
}


def dl20() -> tuple[dict, dict]:
    if not DL20.is_dir():
        pytest.skip(f"no TREC DL 2020 data at {DL20}")
    return read_qrels(DL20 / "qrels.txt"), {name: read_run(DL20 / "runs" / f"{name}.trec") for name in RUNS}


@pytest.mark.parametrize("name", RUNS)
def test_real_runs_have_the_means_trec_eval_prints(name: str) -> None:
    qrels, runs = dl20()
    metrics = ["nDCG@10", "AP(rel=2)", "RR(rel=2)", "R(rel=2)@100", "P(rel=2)@5"]
    rows = evaluate(qrels, runs[name], metrics).summary()
    assert " ".join(f"{row.value:.4f}" for row in rows) == PRINTED[name]


@pytest.mark.skipif(
    importlib.util.find_spec("pytrec_eval") is None, reason="pytrec_eval is not installed (development extra)"
)
@pytest.mark.parametrize("level", [1, 2])
def test_real_runs_have_trec_evals_values_query_by_query(level: int) -> None:
    import pytrec_eval

    qrels, runs = dl20()
    metrics = [
        Metric(m.family, m.cutoff, 1 if m.family == "nDCG" else level) for m in map(Metric.parse, MEASURES.values())
    ]
    for hits in runs.values():
        oracle = pytrec_eval.RelevanceEvaluator(qrels, TREC_EVAL, relevance_level=level)
        wanted = oracle.evaluate({q: {h.doc_id: h.score for h in found} for q, found in hits.items()})
        values = measure(qrels, hits, metrics)
        for row, query_id in zip(values, qrels, strict=True):
            assert row.tolist() == pytest.approx([wanted[query_id][m] for m in MEASURES], abs=1e-12)


@pytest.mark.skipif(
    importlib.util.find_spec("pytrec_eval") is None, reason="pytrec_eval is not installed (development extra)"
)
@given(
    # pytrec_eval 0.5.11 never returns where all judgements of a query are negative
    judged=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(-1, 3), max_size=7).map(lambda j: {"i": 1, **j}),
    scored=st.dictionaries(st.sampled_from("abcdefghé"), st.sampled_from([0.0, 0.5, 0.50000001, 1.0]), min_size=1),
)
@settings(deadline=None, max_examples=60)
def test_tied_toys_have_trec_evals_values(judged: dict[str, int], scored: dict[str, float]) -> None:
    import pytrec_eval

    oracle = pytrec_eval.RelevanceEvaluator({"q": judged}, TREC_EVAL).evaluate({"q": scored})
    found = measure({"q": judged}, {"q": scored}, MEASURES.values())[0]
    assert found.tolist() == pytest.approx([oracle["q"][m] for m in MEASURES], abs=1e-12)
