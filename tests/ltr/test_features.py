"""The features of a pool: the study's 38 columns, worked by hand on small pools."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pd_rerank.errors import InvalidData
from pd_rerank.ltr.features import FeatureMaker, audit
from pd_rerank.pool import Candidate, Pool, RouteHit
from pd_rerank.retrieval.fusion import NEVIR_PAPER, RouteRule, WeightedFusion
from tests.designated import vectors

HITS = {
    "dense": {"a": 0.9, "b": 0.6, "c": 0.2},
    "sparse": {"b": 1.0, "d": 0.5},
    "bm25": {"c": 7.0, "a": 1.0},
}
TEXTS = {"a": "Alpha is not ready.", "b": "Beta is ready: 3.14!", "c": "Gamma", "d": ""}


def pool(query: str = "is beta not ready", texts: dict[str, str] | None = None) -> Pool:
    """Four candidates of three routes, fused as in the study."""
    ranking = WeightedFusion(rules=NEVIR_PAPER, precision="float32").fuse({n: {"q": h} for n, h in HITS.items()})["q"]
    routes = {
        doc: {
            name: RouteHit(score=found[doc], rank=sorted(found, key=lambda d: -found[d]).index(doc) + 1)
            for name, found in HITS.items()
            if doc in found
        }
        for doc in ranking.doc_ids
    }
    return Pool(
        query_id="q",
        query=query,
        candidates=tuple(
            Candidate(doc_id=doc, text=(texts or TEXTS)[doc], score=float(score), routes=routes[doc])
            for doc, score in zip(ranking.doc_ids, ranking.scores, strict=True)
        ),
    )


def column(made: np.ndarray, maker: FeatureMaker, name: str, p: Pool) -> dict[str, float]:
    return dict(zip(p.doc_ids, made[:, maker.names.index(name)].tolist(), strict=True))


def test_the_columns_are_the_studys_in_its_order() -> None:
    assert FeatureMaker().names == (
        "dense_score", "sparse_log_score", "bm25_log_score", "dense_norm", "sparse_norm", "bm25_norm",
        "dense_rr", "sparse_rr", "bm25_rr", "dense_missing", "sparse_missing", "bm25_missing",
        "route_count", "all_routes", "dense_sparse_overlap", "dense_bm25_overlap", "sparse_bm25_overlap",
        "dense_sparse_rr_gap", "dense_bm25_rr_gap", "sparse_bm25_rr_gap",
        "dense_top12_margin", "sparse_top12_margin", "bm25_top12_margin", "baseline_score", "baseline_rr",
        "query_length", "query_has_digit", "identifier_exact_coverage", "number_exact_coverage",
        "negation_overlap_coverage", "negation_mismatch", "query_bigram_coverage", "query_trigram_coverage",
        "condition_coverage", "distinctive_query_bigram_coverage", "same_doc_candidate_count",
        "same_doc_max_bigram_similarity", "content_length_log",
    )  # fmt: skip
    assert len(FeatureMaker().names) == 38


def test_route_columns_by_hand() -> None:
    p, maker = pool(), FeatureMaker()
    made = maker.features(p)
    assert (made.dtype, made.shape) == (np.float32, (4, 38))

    def of(name: str) -> dict[str, float]:
        return column(made, maker, name, p)

    assert of("dense_score") == pytest.approx({"a": 0.9, "b": 0.6, "c": 0.2, "d": 0.0})
    assert of("bm25_log_score") == pytest.approx({"a": math.log(2), "b": 0, "c": math.log(8), "d": 0})
    # All saved hits, the dropped one too: (0.6 - 0.2) / (0.9 - 0.2).
    assert of("dense_norm") == pytest.approx({"a": 1.0, "b": 4 / 7, "c": 0.0, "d": 0.0})
    assert of("sparse_rr") == {"a": 0.0, "b": 1.0, "c": 0.0, "d": 0.5}
    assert of("sparse_missing") == {"a": 1.0, "b": 0.0, "c": 1.0, "d": 0.0}
    assert of("route_count") == {"a": 2, "b": 2, "c": 2, "d": 1}
    assert of("dense_bm25_overlap") == {"a": 1, "b": 0, "c": 1, "d": 0}
    assert of("dense_sparse_rr_gap") == pytest.approx({"a": 1, "b": 0.5, "c": 1 / 3, "d": 0.5})
    assert set(of("dense_top12_margin").values()) == {np.float32(0.3 / 0.9)}
    assert set(of("all_routes").values()) == {0.0}


def test_the_baseline_is_the_fusion_and_a_dropped_candidate_has_no_rank() -> None:
    p, maker = pool(), FeatureMaker()
    made = maker.features(p)
    assert p.doc_ids == ("a", "b", "c", "d")
    assert column(made, maker, "baseline_score", p) == {c.doc_id: np.float32(c.score or 0.0) for c in p.candidates}
    assert column(made, maker, "baseline_rr", p) == pytest.approx({"a": 1, "b": 1 / 2, "c": 1 / 3, "d": 1 / 4})
    strict = dict(NEVIR_PAPER) | {"sparse": RouteRule(threshold=0.9, transform="log1p")}
    assert column(FeatureMaker(strict).features(p), maker, "baseline_rr", p)["d"] == 0.0


def test_word_columns_by_hand() -> None:
    p, maker = pool("beta 3.14 not ready, if Alpha"), FeatureMaker()
    made = maker.features(p)

    def of(name: str) -> dict[str, float]:
        return column(made, maker, name, p)

    assert set(of("query_length").values()) == {29.0}
    assert set(of("query_has_digit").values()) == {1.0}
    assert of("number_exact_coverage") == {"a": 0, "b": 1, "c": 0, "d": 0}
    assert of("negation_overlap_coverage") == {"a": 1, "b": 0, "c": 0, "d": 0}
    assert of("negation_mismatch") == {"a": 0, "b": 1, "c": 1, "d": 1}
    # Clauses "beta 3.14 not ready" (14 bigrams, of which alphaisnotready has 7) and "Alpha".
    assert of("condition_coverage")["a"] == 1.0
    assert of("condition_coverage")["d"] == 0.0
    assert of("content_length_log")["d"] == 0.0
    # A bigram is distinctive if one candidate alone has it: at most max(1, ceil(0.4)).
    assert of("distinctive_query_bigram_coverage")["c"] == 0.0
    assert set(of("same_doc_candidate_count").values()) == {0.0}


def test_every_english_vector_of_a_feature_is_reproduced() -> None:
    for query, passage, name, want in vectors("nevir_unit")["english_rules"]["feature"]:
        maker = FeatureMaker({"r": RouteRule()})
        made = maker.features(
            Pool(query_id="q", query=query, candidates=(Candidate(doc_id="d", text=passage, score=1.0),))
        )
        assert made[0, maker.names.index(name)] == want, (query, passage, name)


def test_passages_of_one_document_know_each_other() -> None:
    maker = FeatureMaker(document_of=lambda doc_id: "x" if doc_id in "ab" else doc_id)
    p = pool(texts={"a": "abc", "b": "abd", "c": "abc", "d": ""})
    made = maker.features(p)
    assert column(made, maker, "same_doc_candidate_count", p) == {"a": 1, "b": 1, "c": 0, "d": 0}
    similar = column(made, maker, "same_doc_max_bigram_similarity", p)
    assert similar == pytest.approx({"a": 1 / 3, "b": 1 / 3, "c": 0, "d": 0})


def test_any_routes_give_columns_of_their_names() -> None:
    maker = FeatureMaker({"x": RouteRule(transform="log1p"), "y": RouteRule()})
    assert maker.names[:2] == ("x_log_score", "y_score")
    assert len(maker.names) == 2 * 5 + 2 * 1 + 2 + 15
    assert maker.features(Pool(query_id="q", query="q", candidates=())).shape == (0, len(maker.names))


def test_what_features_cannot_be_made_of_is_named() -> None:
    def of(candidate: Candidate) -> np.ndarray:
        return FeatureMaker().features(Pool(query_id="q", query="q", candidates=(candidate,)))

    with pytest.raises(InvalidData, match="pool 'q', candidate 'd': no first-stage score"):
        of(Candidate(doc_id="d", text="t"))
    with pytest.raises(InvalidData, match="route 'own' has no rule; rules are for dense, sparse, bm25"):
        of(Candidate(doc_id="d", text="t", score=1.0, routes={"own": RouteHit(score=1.0, rank=1)}))
    with pytest.raises(InvalidData, match=r"route 'bm25' scores -1.0, and log1p is for scores from 0"):
        of(Candidate(doc_id="d", text="t", score=1.0, routes={"bm25": RouteHit(score=-1.0, rank=1)}))


def test_an_audit_names_columns_that_tell_nothing_apart() -> None:
    one, two = np.float32([[1, 1, 5], [2, 1, 5]]), np.float32([[1, 1, 6], [1, 1, 6]])
    found = {c.name: (c.constant, c.constant_in_pools) for c in audit(["varies", "dead", "by query"], [one, two])}
    assert found == {"varies": (False, False), "dead": (True, True), "by query": (False, True)}
