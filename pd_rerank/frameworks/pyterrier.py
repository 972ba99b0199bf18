"""The reranker as a PyTerrier transformer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from pd_rerank._extras import need
from pd_rerank.errors import BadArgument, InvalidData

need("pyterrier", extra="pyterrier", purpose="a PyTerrier transformer needs pyterrier")

import pyterrier as pt  # noqa: E402

if TYPE_CHECKING:
    from pd_rerank.reranker import OCSFTBatchedReranker


class OCSFTTransformer(pt.Transformer):  # type: ignore[misc]
    """Gives a frame's documents the scores and ranks of an `OCSFTBatchedReranker`, best first within each query.

    Reads the columns qid, query, docno and `text_field`; keeps all others. All queries of a frame are scored in one
    engine call, candidates shown in the order of their rows. Ties are broken by docno. A document without a grade
    comes last of its query with score -inf, because PyTerrier cannot rank what has no score.
    """

    def __init__(self, reranker: OCSFTBatchedReranker, *, text_field: str = "text") -> None:
        super().__init__()
        self.reranker = reranker
        self.text_field = text_field

    def transform(self, inp: Any) -> Any:
        """`inp` with score and rank; queries stay in their order."""
        pt.validate.columns(inp, includes=["qid", "query", "docno", self.text_field])
        if not len(inp):
            return inp.assign(score=np.zeros(0), rank=np.zeros(0, dtype=int))
        groups = [rows for _, rows in inp.reset_index(drop=True).groupby("qid", sort=False)]
        for rows in groups:
            if rows["query"].nunique(dropna=False) > 1:
                raise InvalidData(f"query '{rows['qid'].iloc[0]}' has {rows['query'].nunique()} texts; give it one")
            if not rows[self.text_field].map(lambda text: isinstance(text, str)).all():
                raise BadArgument(
                    f"query '{rows['qid'].iloc[0]}': column '{self.text_field}' does not hold texts alone; "
                    "put pt.text.get_text(…) before the reranker"
                )
        ranked = self.reranker.rank_many(
            [rows["query"].iloc[0] for rows in groups],
            [rows[self.text_field].tolist() for rows in groups],
            [rows["docno"].tolist() for rows in groups],
            [[{"row": row} for row in rows.index] for rows in groups],
        )
        order = [result.document.metadata["row"] for results in ranked for result in results]
        scores = [-math.inf if r.score is None else r.score for results in ranked for r in results]
        ranks = [pt.model.FIRST_RANK + i for results in ranked for i in range(len(results))]
        return inp.iloc[order].reset_index(drop=True).assign(score=scores, rank=ranks)
