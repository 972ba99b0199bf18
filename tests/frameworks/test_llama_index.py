"""The LlamaIndex postprocessor, on the real llama-index-core."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("llama_index.core", reason="LlamaIndex is not installed (pip install 'pd-rerank[llama-index]')")

from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode

from pd_rerank import BadArgument, FakeEngine, OCSFTBatchedReranker
from pd_rerank.frameworks.llama_index import OCSFTPostprocessor

QUERY = "red apples"
TEXTS = ["green pears", "red apples grow on trees", "apples"]


def ranker(engine: FakeEngine | None = None, **options: Any) -> OCSFTBatchedReranker:
    return OCSFTBatchedReranker("fake", verbose=0, engine=engine or FakeEngine(), **options)


def nodes() -> list[NodeWithScore]:
    return [
        NodeWithScore(node=TextNode(text=text, id_=f"n{i}", metadata={"page": i}), score=1.0 - i / 10)
        for i, text in enumerate(TEXTS)
    ]


def told(found: list[NodeWithScore]) -> list[tuple[str, float | None]]:
    return [(node.node.node_id, node.score) for node in found]


def test_it_gives_the_librarys_ranking_and_scores() -> None:
    reranker = ranker(FakeEngine(position_bias=0.3), presentations=3)
    one = OCSFTPostprocessor(reranker, metadata_mode=MetadataMode.NONE)
    assert isinstance(one, BaseNodePostprocessor)
    expected = [(f"n{r.document.doc_id}", r.score) for r in reranker.rank(QUERY, TEXTS)]
    assert told(one.postprocess_nodes(nodes(), query_str=QUERY)) == expected
    assert told(one.postprocess_nodes(nodes(), query_bundle=QueryBundle(QUERY))) == expected
    assert told(asyncio.run(one.apostprocess_nodes(nodes(), query_str=QUERY))) == expected


def test_the_given_nodes_are_unchanged() -> None:
    given = nodes()
    OCSFTPostprocessor(ranker()).postprocess_nodes(given, query_str=QUERY)
    assert told(given) == told(nodes())
    assert [node.node.metadata for node in given] == [{"page": i} for i in range(3)]


def test_metadata_are_read_as_llama_index_embeds_them_unless_left_out() -> None:
    node = TextNode(text="on trees", metadata={"title": "red apples", "id": 7}, excluded_embed_metadata_keys=["id"])
    alone = ranker()
    (embedded,) = OCSFTPostprocessor(alone).postprocess_nodes([NodeWithScore(node=node)], query_str=QUERY)
    (bare,) = OCSFTPostprocessor(alone, metadata_mode=MetadataMode.NONE).postprocess_nodes(
        [NodeWithScore(node=node)], query_str=QUERY
    )
    assert embedded.score == alone.score(QUERY, "title: red apples\n\non trees")
    assert bare.score == alone.score(QUERY, "on trees")
    assert embedded.score > bare.score


@pytest.mark.parametrize(("top_n", "count"), [(0, 0), (1, 1), (3, 3), (50, 3)])
def test_top_n_keeps_the_best(top_n: int, count: int) -> None:
    found = OCSFTPostprocessor(ranker(), top_n=top_n).postprocess_nodes(nodes(), query_str=QUERY)
    assert [node.node.node_id for node in found] == ["n1", "n2", "n0"][:count]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(BadArgument, match="top_n must be 0 or more, got -1"):
        OCSFTPostprocessor(ranker(), top_n=-1)
    with pytest.raises(BadArgument, match="needs the query"):
        OCSFTPostprocessor(ranker()).postprocess_nodes(nodes())


def test_no_nodes_are_no_nodes_and_no_engine_call() -> None:
    engine = FakeEngine()
    assert OCSFTPostprocessor(ranker(engine)).postprocess_nodes([], query_str=QUERY) == []
    assert engine.calls == 0


def test_a_node_without_a_grade_comes_last_without_score() -> None:
    engine = FakeEngine(missing=lambda text: "red" in text)
    found = OCSFTPostprocessor(ranker(engine)).postprocess_nodes(nodes(), query_str=QUERY)
    assert told(found)[-1] == ("n1", None)


def test_an_error_of_the_engine_is_never_swallowed() -> None:
    class Failing(FakeEngine):
        def grade_logits(self, prompts: Any, grade_ids: Any, *, progress: Any = None) -> Any:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        OCSFTPostprocessor(ranker(Failing())).postprocess_nodes(nodes(), query_str=QUERY)
