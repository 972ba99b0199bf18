"""The reranker as a LangChain document compressor, on langchain-core alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pd_rerank._extras import need
from pd_rerank.errors import BadArgument

if TYPE_CHECKING:
    from pd_rerank.reranker import OCSFTBatchedReranker


def compressor(reranker: OCSFTBatchedReranker, *, k: int = 10) -> Any:
    """A `BaseDocumentCompressor` that returns the k best documents, each with `relevance_score` in its metadata.

    Documents and their metadata are copied, never changed; `acompress_documents` runs through `rank_async`.
    Needs the `langchain` extra (langchain-core 1.x).
    """
    if k < 0:
        raise BadArgument(f"k must be 0 or more, got {k}")
    need("langchain_core", extra="langchain", purpose="a LangChain compressor needs langchain-core")
    from langchain_core.documents import Document
    from langchain_core.documents.compressor import BaseDocumentCompressor

    def asked(documents: Sequence[Document]) -> dict[str, Any]:
        return {"docs": [d.page_content for d in documents], "metadata": [d.metadata for d in documents]}

    def picked(documents: Sequence[Document], results: Any) -> list[Document]:
        chosen = []
        for result in results.top_k(k):
            metadata = {**result.document.metadata, "relevance_score": result.score}
            chosen.append(documents[result.document.doc_id].model_copy(update={"metadata": metadata}))
        return chosen

    class OCSFTCompressor(BaseDocumentCompressor):  # type: ignore[misc]
        """Keeps the documents an `OCSFTBatchedReranker` ranks highest."""

        def compress_documents(
            self, documents: Sequence[Document], query: str, callbacks: Any = None
        ) -> Sequence[Document]:
            """Rerank `documents` for `query` and return the best."""
            return picked(documents, reranker.rank(query, **asked(documents)))

        async def acompress_documents(
            self, documents: Sequence[Document], query: str, callbacks: Any = None
        ) -> Sequence[Document]:
            """`compress_documents` without blocking the event loop."""
            return picked(documents, await reranker.rank_async(query, **asked(documents)))

    return OCSFTCompressor()
