"""The Haystack component, alone and in a saved pipeline, on the real haystack-ai."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")
pytest.importorskip("haystack", reason="haystack-ai is not installed (pip install 'pd-rerank[haystack]')")

from haystack import Document, Pipeline

from pd_rerank import BadArgument, FakeEngine, OCSFTBatchedReranker
from pd_rerank.frameworks.haystack import OCSFTRanker

QUERY = "red apples"
TEXTS = ["green pears", "red apples grow on trees", "apples"]


def ranker(engine: FakeEngine | None = None, **options: Any) -> OCSFTBatchedReranker:
    return OCSFTBatchedReranker("fake", verbose=0, engine=engine or FakeEngine(), **options)


def documents() -> list[Document]:
    return [Document(id=f"d{i}", content=text, meta={"page": i}, score=0.5) for i, text in enumerate(TEXTS)]


def told(found: dict[str, list[Document]]) -> list[tuple[str, float | None]]:
    return [(document.id, document.score) for document in found["documents"]]


def test_it_gives_the_librarys_ranking_and_scores() -> None:
    reranker = ranker(FakeEngine(position_bias=0.3), presentations=3)
    expected = [(f"d{r.document.doc_id}", r.score) for r in reranker.rank(QUERY, TEXTS)]
    one = OCSFTRanker(reranker)
    assert told(one.run(query=QUERY, documents=documents())) == expected
    assert told(asyncio.run(one.run_async(query=QUERY, documents=documents()))) == expected


def test_the_given_documents_are_unchanged_and_keep_everything_but_the_score() -> None:
    given = documents()
    found = OCSFTRanker(ranker()).run(query=QUERY, documents=given)["documents"]
    assert given == documents()
    assert [(d.content, d.meta) for d in found] == [(TEXTS[i], {"page": i}) for i in (1, 2, 0)]


def test_in_a_pipeline_top_k_of_a_run_wins() -> None:
    pipeline = Pipeline()
    pipeline.add_component("ranker", OCSFTRanker(ranker(), top_k=2))
    for asked, count in (({}, 2), ({"top_k": 1}, 1), ({"top_k": 0}, 0), ({"top_k": 9}, 3)):
        found = pipeline.run({"ranker": {"query": QUERY, "documents": documents(), **asked}})
        assert [d.id for d in found["ranker"]["documents"]] == ["d1", "d2", "d0"][:count]


def test_a_pipeline_is_saved_and_loaded_with_the_models_name_and_options() -> None:
    pipeline = Pipeline()
    options = {"engine": "fake", "window": 2, "presentations": 3}
    pipeline.add_component("ranker", OCSFTRanker("anything", top_k=2, options=options))
    with pytest.raises(Exception, match="allowed_modules"):  # Haystack asks before it makes objects of other packages
        Pipeline.loads(pipeline.dumps())
    again = Pipeline.loads(pipeline.dumps(), allowed_modules=["pd_rerank.frameworks.haystack"])
    component = again.get_component("ranker")
    assert isinstance(component, OCSFTRanker)
    assert (component.model, component.top_k, component.options) == ("anything", 2, options)
    expected = ranker(window=2, presentations=3).rank(QUERY, TEXTS).top_k(2)
    found = again.run({"ranker": {"query": QUERY, "documents": documents()}})["ranker"]
    assert told(found) == [(f"d{r.document.doc_id}", r.score) for r in expected]


def test_a_model_is_loaded_by_warm_up_once() -> None:
    one = OCSFTRanker("anything", options={"engine": "fake"})
    one.warm_up()
    loaded = one._loaded()
    one.warm_up()
    one.run(query=QUERY, documents=documents())
    assert one._loaded() is loaded


def test_what_cannot_be_done_is_refused_in_words() -> None:
    with pytest.raises(BadArgument, match="top_k must be 0 or more, got -1"):
        OCSFTRanker("anything", top_k=-1)
    with pytest.raises(BadArgument, match="top_k must be 0 or more, got -2"):
        OCSFTRanker(ranker()).run(query=QUERY, documents=documents(), top_k=-2)
    with pytest.raises(BadArgument, match="loaded already"):
        OCSFTRanker(ranker(), options={"window": 3})
    with pytest.raises(BadArgument, match="cannot be saved"):
        OCSFTRanker(ranker()).to_dict()


def test_no_documents_blank_ones_and_ones_without_text() -> None:
    engine = FakeEngine()
    assert OCSFTRanker(ranker(engine)).run(query=QUERY, documents=[]) == {"documents": []}
    assert engine.calls == 0
    found = OCSFTRanker(ranker()).run(query=QUERY, documents=[Document(id="x"), Document(id="y", content="apples")])
    assert told(found) == [("y", pytest.approx(0.5)), ("x", 0.0)]


def test_a_document_without_a_grade_comes_last_without_score() -> None:
    found = OCSFTRanker(ranker(FakeEngine(missing=lambda text: "red" in text))).run(query=QUERY, documents=documents())
    assert told(found)[-1] == ("d1", None)
