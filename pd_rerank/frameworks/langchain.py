"""The reranker as a LangChain document compressor, on langchain-core alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pd_rerank._extras import need
from pd_rerank.frameworks import best, best_async, check_limit

need("langchain_core", extra="langchain", purpose="a LangChain compressor needs langchain-core")

from langchain_core.documents import Document  # noqa: E402
from langchain_core.documents.compressor import BaseDocumentCompressor  # noqa: E402

if TYPE_CHECKING:
    from pd_rerank.reranker import OCSFTBatchedReranker


class OCSFTCompressor(BaseDocumentCompressor):  # type: ignore[misc]
    """Keeps the `k` documents an `OCSFTBatchedReranker` ranks highest, each with `relevance_score` in its metadata.

    Documents and their metadata are copied, never changed. One without a grade comes last, with score None.
    """

    reranker: Any
    k: int = 10

    def __init__(self, reranker: OCSFTBatchedReranker, *, k: int = 10) -> None:
        check_limit(k, name="k")
        super().__init__(reranker=reranker, k=k)

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Any = None
    ) -> Sequence[Document]:
        """Rerank `documents` for `query` and return the best."""
        return _chosen(documents, best(self.reranker, query, **_asked(documents), limit=self.k))

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Any = None
    ) -> Sequence[Document]:
        """`compress_documents` without blocking the event loop."""
        return _chosen(documents, await best_async(self.reranker, query, **_asked(documents), limit=self.k))


def _asked(documents: Sequence[Document]) -> dict[str, Any]:
    return {"texts": [d.page_content for d in documents], "metadata": [d.metadata for d in documents]}


def _chosen(documents: Sequence[Document], results: Any) -> list[Document]:
    chosen = []
    for result in results:
        metadata = {**result.document.metadata, "relevance_score": result.score}
        chosen.append(documents[result.document.doc_id].model_copy(update={"metadata": metadata}))
    return chosen
