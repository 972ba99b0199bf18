"""The reranker as a part of other frameworks: a module each, which imports its framework when it is imported itself.

What they share is here: a list of texts in, the best k results out, each knowing which text it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pd_rerank.errors import BadArgument, whole

if TYPE_CHECKING:
    from pd_rerank.reranker import GradedResult, OCSFTBatchedReranker


def check_limit(limit: Any, *, name: str) -> None:
    """Refuse a number of documents to keep that is none; `name` is what the framework calls it."""
    if not whole(limit) or limit < 0:
        raise BadArgument(f"{name} must be 0 or more, got {limit}")


def best(
    reranker: OCSFTBatchedReranker,
    query: str,
    texts: Sequence[str],
    *,
    limit: int,
    metadata: Sequence[Mapping[str, Any]] | None = None,
) -> list[GradedResult]:
    """The `limit` best results, best first; `result.document.doc_id` is the text's place in `texts`."""
    return reranker.rank(query, list(texts), metadata=metadata).top_k(limit)


async def best_async(
    reranker: OCSFTBatchedReranker,
    query: str,
    texts: Sequence[str],
    *,
    limit: int,
    metadata: Sequence[Mapping[str, Any]] | None = None,
) -> list[GradedResult]:
    """`best` without blocking the event loop."""
    return (await reranker.rank_async(query, list(texts), metadata=metadata)).top_k(limit)
