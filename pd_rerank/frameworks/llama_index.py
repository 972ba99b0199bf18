"""The reranker as a LlamaIndex node postprocessor, on llama-index-core alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pd_rerank._extras import need
from pd_rerank.errors import BadArgument
from pd_rerank.frameworks import best, best_async, check_limit

need("llama_index", extra="llama-index", purpose="a LlamaIndex postprocessor needs llama-index-core")

from llama_index.core.postprocessor.types import BaseNodePostprocessor  # noqa: E402
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle  # noqa: E402

if TYPE_CHECKING:
    from pd_rerank.reranker import OCSFTBatchedReranker


class OCSFTPostprocessor(BaseNodePostprocessor):  # type: ignore[misc]
    """Keeps the `top_n` nodes an `OCSFTBatchedReranker` ranks highest; their scores are the reranker's.

    A node's text is read as LlamaIndex embeds it, with the metadata that are not excluded there; `metadata_mode` NONE
    leaves metadata out. The given `NodeWithScore`s are not changed. A node without a grade comes last, with score None.
    """

    reranker: Any
    top_n: int = 10
    metadata_mode: MetadataMode = MetadataMode.EMBED

    def __init__(
        self,
        reranker: OCSFTBatchedReranker,
        *,
        top_n: int = 10,
        metadata_mode: MetadataMode = MetadataMode.EMBED,
        **more: Any,
    ) -> None:
        check_limit(top_n, name="top_n")
        super().__init__(reranker=reranker, top_n=top_n, metadata_mode=metadata_mode, **more)

    @classmethod
    def class_name(cls) -> str:
        """What LlamaIndex calls it."""
        return "OCSFTPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return _chosen(nodes, best(self.reranker, _query(query_bundle), self._texts(nodes), limit=self.top_n))

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        found = await best_async(self.reranker, _query(query_bundle), self._texts(nodes), limit=self.top_n)
        return _chosen(nodes, found)

    def _texts(self, nodes: list[NodeWithScore]) -> list[str]:
        return [node.node.get_content(metadata_mode=self.metadata_mode) for node in nodes]


def _query(bundle: QueryBundle | None) -> str:
    if bundle is None:
        raise BadArgument("a reranker needs the query; call postprocess_nodes(nodes, query_str=…)")
    return str(bundle.query_str)


def _chosen(nodes: list[NodeWithScore], results: Any) -> list[NodeWithScore]:
    return [NodeWithScore(node=nodes[result.document.doc_id].node, score=result.score) for result in results]
