"""The reranker as a Haystack component."""

from dataclasses import replace
from typing import Any

from pd_rerank._extras import need
from pd_rerank.errors import BadArgument
from pd_rerank.frameworks import best, best_async, check_limit
from pd_rerank.reranker import OCSFTBatchedReranker

need("haystack", extra="haystack", purpose="a Haystack component needs haystack-ai")

from haystack import Document, component, default_from_dict, default_to_dict  # noqa: E402


@component
class OCSFTRanker:
    """Returns the `top_k` documents an `OCSFTBatchedReranker` ranks highest, with its scores.

    `model` is a model's name, loaded with `options` (any of `OCSFTBatchedReranker`'s) by `warm_up` or the first `run`;
    a pipeline with it can be saved. It may also be a reranker that is loaded already; then a pipeline cannot be saved.
    The given documents are not changed. One without a grade comes last, with score None.
    """

    def __init__(
        self, model: str | OCSFTBatchedReranker, *, top_k: int = 10, options: dict[str, Any] | None = None
    ) -> None:
        check_limit(top_k, name="top_k")
        if options and not isinstance(model, str):
            raise BadArgument("options are for a model given by name; this reranker is loaded already")
        self.model = model
        self.top_k = top_k
        self.options = options
        self._reranker = None if isinstance(model, str) else model

    def warm_up(self) -> None:
        """Load the model, where it is not loaded yet."""
        self._loaded()

    @component.output_types(documents=list[Document])  # type: ignore[untyped-decorator]
    def run(self, query: str, documents: list[Document], top_k: int | None = None) -> dict[str, list[Document]]:
        """Rerank `documents` for `query`; `top_k` here wins over the component's."""
        limit = self._limit(top_k)
        return _chosen(documents, best(self._loaded(), query, _texts(documents), limit=limit))

    @component.output_types(documents=list[Document])  # type: ignore[untyped-decorator]
    async def run_async(
        self, query: str, documents: list[Document], top_k: int | None = None
    ) -> dict[str, list[Document]]:
        """`run` without blocking the event loop."""
        limit = self._limit(top_k)
        return _chosen(documents, await best_async(self._loaded(), query, _texts(documents), limit=limit))

    def to_dict(self) -> dict[str, Any]:
        """The component as plain values, for a saved pipeline."""
        if not isinstance(self.model, str):
            raise BadArgument("a loaded reranker cannot be saved; make the component from a model's name and options")
        saved: dict[str, Any] = default_to_dict(self, model=self.model, top_k=self.top_k, options=self.options)
        return saved

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "OCSFTRanker":
        """The component of a saved pipeline."""
        made: OCSFTRanker = default_from_dict(cls, data)
        return made

    def _loaded(self) -> OCSFTBatchedReranker:
        if self._reranker is None:
            self._reranker = OCSFTBatchedReranker(str(self.model), **(self.options or {}))
        return self._reranker

    def _limit(self, top_k: int | None) -> int:
        if top_k is None:
            return self.top_k
        check_limit(top_k, name="top_k")
        return top_k


def _texts(documents: list[Document]) -> list[str]:
    return [document.content or "" for document in documents]


def _chosen(documents: list[Document], results: Any) -> dict[str, list[Document]]:
    return {"documents": [replace(documents[r.document.doc_id], score=r.score) for r in results]}
