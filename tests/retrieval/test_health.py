"""Pool health: what is wrong, the ceiling, what each route adds, what reranking costs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from pd_rerank.engines.fake import FakeTokenizer
from pd_rerank.errors import BadArgument
from pd_rerank.job import count_tokens
from pd_rerank.pool import Candidate, Pool, RouteHit
from pd_rerank.prompt import GradePrompt
from pd_rerank.retrieval.health import check_pools, cost, faults, in_words, problems
from pd_rerank.retrieval.texts import folded, normal_text
from pd_rerank.scoring import Scoring


def pool(query_id: str, found: Mapping[str, Mapping[str, int]], texts: Mapping[str, str] | None = None) -> Pool:
    """A pool from each document's rank by route."""
    candidates = [
        Candidate(
            doc_id=d,
            text=(texts or {}).get(d, f"text of {d}"),
            score=1.0,
            routes={name: RouteHit(score=1.0 / rank, rank=rank) for name, rank in routes.items()},
        )
        for d, routes in found.items()
    ]
    return Pool(query_id=query_id, query="what is it", candidates=tuple(candidates))


POOLS = [
    pool("q1", {"x": {"bm25": 1, "dense": 2}, "y": {"bm25": 2}, "z": {"dense": 1}}),
    pool("q2", {"x": {"dense": 1}}),
    pool("q3", {}),
]


def test_what_each_route_found_alone_is_counted() -> None:
    routes = check_pools(POOLS, qrels={"q1": {"y": 1, "x": 2}, "q2": {"x": 1}})["routes"]
    assert routes["bm25"] == {
        "hits": 2,
        "unique": 1,
        "empty_queries": 2,
        "empty": ["q2", "q3"],
        "relevant": 2,
        "unique_relevant": 1,
    }
    assert (routes["dense"]["unique"], routes["dense"]["relevant"], routes["dense"]["unique_relevant"]) == (2, 2, 1)


def test_the_ceiling_is_the_mean_share_of_relevant_documents_in_the_pools() -> None:
    qrels = {"q1": {"x": 2, "y": 1, "w": 1, "v": 0}, "q2": {"w": 1}, "q9": {"x": 1}, "q3": {"x": 0}}
    ceiling = check_pools(POOLS, qrels=qrels)["ceiling"]
    assert ceiling["recall"] == pytest.approx((2 / 3 + 0 + 0) / 3)
    assert (ceiling["relevant"], ceiling["relevant_in_pools"], ceiling["queries"]) == (5, 2, 3)
    assert (ceiling["queries_with_none"], ceiling["queries_without_pool"]) == (2, 1)
    high = check_pools(POOLS, qrels=qrels, relevant=2)["ceiling"]
    assert (high["recall"], high["queries"], high["relevant_from"]) == (1.0, 1, 2)


def test_sizes_empty_pools_and_texts_are_counted() -> None:
    texts = {"x": "Same  text", "y": "same text", "z": " "}
    report = check_pools([pool("q1", {"x": {}, "y": {}, "z": {}}, texts), pool("q2", {"x": {}}), pool("q3", {})])
    assert (report["queries"], report["candidates"], report["empty_pools"]) == (3, 4, ["q3"])
    assert report["pool_size"] == {"min": 0.0, "p10": 0.2, "median": 1.0, "p90": 2.6, "max": 3.0, "mean": 1.33}
    assert report["texts"] == {
        "documents": 3,
        "blank": 1,
        "duplicates": 1,
        "queries_with_duplicates": 1,
        "ids_with_two_texts": ["x"],
    }
    told = problems(report)
    assert "1 documents have different texts in different pools, first 'x'" in told
    assert "1 of 3 pools are empty, first 'q3'" in told
    assert "1 candidates have no text" in told
    assert "1 candidates repeat the text of another in their pool (1 queries); fold_texts makes them one" in told


@pytest.mark.parametrize(
    ("qrels", "corpus", "says"),
    [
        ({"1": {"x": 1}}, None, "pools and qrels share no query id: 'q1' here, '1' there"),
        ({"q1": {"msmarco_x": 1}}, None, "no judged document is in any pool: 'x' here, 'msmarco_x' there"),
        (None, ["msmarco_x"], "no candidate is in the corpus: 'x' here, 'msmarco_x' there"),
        ({"q1": {"x": 1}}, ["y"], "no judged document is in the corpus: 'x' in the qrels, 'y' in the corpus"),
    ],
)
def test_ids_that_do_not_meet_are_faults(qrels: Any, corpus: Any, says: str) -> None:
    assert any(says in fault for fault in faults(check_pools(POOLS, qrels=qrels, corpus_ids=corpus)))


def test_ids_that_meet_are_no_fault() -> None:
    report = check_pools(POOLS, qrels={"q1": {"y": 1}, "q2": {"x": 1}, "q3": {"u": 1}}, corpus_ids=["x", "y", "z", "u"])
    assert faults(report) == []
    assert report["namespaces"]["qrels"]["documents_in_pools"] == 2
    assert report["namespaces"]["corpus"]["judged_in_corpus"] == 3


def test_the_cost_counts_windows_tokens_and_seconds() -> None:
    many = pool("q", {f"d{i}": {} for i in range(45)}, {f"d{i}": "abcd" * 10 for i in range(45)})
    priced = cost([many, *POOLS[2:]], window=20, presentations=2, tokens_per_second=100.0)
    # 3 windows; 45 texts of 10 tokens and 13 beside; 170 and the query's 3 per window; twice
    assert (priced["windows"], priced["tokens"]) == (6, 2 * (45 * 23 + 3 * 173))
    assert priced["seconds"] == pytest.approx(priced["tokens"] / 100, abs=0.1)
    assert cost([many], window=1, presentations=5)["windows"] == 45
    assert cost([many], count_tokens=lambda text: 2)["tokens"] == 45 * 15 + 3 * 172
    with pytest.raises(BadArgument, match="at least 1"):
        cost([many], window=0)


def test_a_sample_of_pools_prices_a_whole_collection() -> None:
    sample = [pool(f"q{i}", {f"d{j}": {} for j in range(20)}, {f"d{j}": "abcd" * 10 for j in range(20)}) for i in "ab"]
    priced = cost(sample, tokens_per_second=200.0, price_per_hour=3.0, for_queries=1000)
    # a query: 20 texts of 10 tokens and 13 beside, and 170 and the query's 3
    assert (priced["queries"], priced["windows"], priced["tokens"]) == (1000, 1000, 1000 * (20 * 23 + 173))
    assert priced["seconds"] == priced["tokens"] / 200
    assert priced["price"] == pytest.approx(priced["seconds"] / 3600 * 3, abs=0.01)
    assert cost(sample, price_per_hour=3.0)["price"] is None
    with pytest.raises(BadArgument, match="no pools"):
        cost([], for_queries=5)
    report = check_pools(sample, tokens_per_second=200.0, price_per_hour=3.0, for_queries=1000)
    assert "reranking 1000 queries" in in_words(report)
    assert f"0.879 hours for {priced['price']:.2f}" in in_words(report)


def test_the_estimate_is_near_what_the_default_prompt_takes() -> None:
    texts = {f"d{i}": " ".join(["several words of a passage"] * (5 + i % 30)) for i in range(60)}
    pools = [pool("q1", {d: {} for d in texts}, texts), pool("q2", {d: {} for d in list(texts)[:33]}, texts)]
    tokenizer = FakeTokenizer()  # a token per character
    exact = count_tokens(pools, tokenizer=tokenizer, prompt=GradePrompt(tokenizer), scoring=Scoring(), max_length=10**6)
    estimate = cost(pools)
    assert estimate["windows"] == exact["prompts"]
    assert estimate["tokens"] == pytest.approx(exact["tokens"] / 4, rel=0.15)


def test_the_report_is_plain_values_and_reads_as_lines() -> None:
    report = check_pools(POOLS, qrels={"q1": {"y": 1}}, tokens_per_second=10.0)
    assert json.loads(json.dumps(report)) == report
    told = in_words(report)
    assert "3 queries, 4 candidates, 3 documents" in told
    assert "route bm25: 2 candidates, 50.0% found by no other, nothing for 2 queries; 1 relevant" in told
    assert "recall ceiling: 1.0000 over 1 queries" in told
    assert "problem: 1 of 3 pools are empty" in told
    assert in_words(check_pools([])).endswith("no problems found")


def test_texts_that_differ_in_case_white_space_or_unicode_form_are_one() -> None:
    assert normal_text(" Ｆull  \n Width ") == "full width"
    assert folded({"b": "One text", "a": "one\ttext", "c": "ONE TEXT", "d": "other"}) == {"b": "a", "c": "a"}
