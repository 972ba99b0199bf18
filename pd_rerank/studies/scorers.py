"""Text scorers of a study: any model of rerankers, grades a chat model writes, batched grades, and scores at hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pd_rerank.engines.generated import GeneratedEngine
from pd_rerank.errors import BadArgument, EngineFailure
from pd_rerank.evaluation.systems import read_system
from pd_rerank.pool import Pool
from pd_rerank.studies.folder import Scorer
from pd_rerank.studies.nevir_settings import ScorerSettings


def open_scorer(settings: ScorerSettings) -> Scorer:
    """Load what `settings` name; what cannot be loaded is an error that says why."""
    if settings.type == "rerankers":
        return CrossEncoder(settings.model, settings.options)
    if settings.type == "scores":
        return Saved(settings.model, settings.options)
    return Batched(settings.model, settings.options, written=settings.type == "generated")


def pointwise(settings: ScorerSettings) -> bool:
    """Whether a passage's score depends on nothing but itself and the query, so that one scoring serves every use."""
    if settings.type == "ocsft":
        return bool(settings.options.get("window", 20) == 1)
    return settings.type != "generated" or bool(settings.options.get("window", 1) == 1)


class CrossEncoder:
    """Any ranker of the library rerankers, by default a cross-encoder: raw scores, one per query and passage."""

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        from rerankers import Reranker

        self.options = {"model_type": "cross-encoder", "verbose": 0, **options}
        self.model = model
        try:
            self.ranker = Reranker(model, **self.options)
        except (OSError, ValueError) as error:
            raise EngineFailure(f"rerankers could not load '{model}': {error}") from error
        if self.ranker is None:
            raise EngineFailure(f"rerankers could not load '{model}' as {self.options['model_type']}")

    def score(self, pools: Sequence[Pool]) -> list[list[float | None]]:
        """Score every candidate of every pool; one the ranker leaves out has no score."""
        found: list[list[float | None]] = []
        for pool in pools:
            if not len(pool):
                found.append([])
                continue
            ranked = self.ranker.rank(pool.query, list(pool.texts), doc_ids=list(range(len(pool))))
            scores = {int(result.document.doc_id): result.score for result in ranked.results}
            found.append([_number(scores.get(i)) for i in range(len(pool))])
        return found

    def describe(self) -> dict[str, Any]:
        """What decides about the scores."""
        return {"type": "rerankers", "model": self.model, "options": dict(self.options)}

    def tokens(self) -> dict[str, int | None]:
        """Nobody counts."""
        return {}


class Batched:
    """`OCSFTBatchedReranker`: grades read from token probabilities, or with `written` grades that a model writes.

    Written grades are 0 to 4 of rubric "evidence", one passage in a prompt, unless the options say otherwise.
    """

    def __init__(self, model: str, options: Mapping[str, Any], *, written: bool = False) -> None:
        from pd_rerank.reranker import OCSFTBatchedReranker

        given = {"engine": "generated", "rubric": "evidence", "window": 1, **options} if written else dict(options)
        self.ranker = OCSFTBatchedReranker(model, verbose=0, **given)
        self.top = len(self.ranker.prompt.grade_ids) - 1 if written else 1

    def score(self, pools: Sequence[Pool]) -> list[list[float | None]]:
        """Served scores of every candidate: expected grades in [0, 1], or the written grades themselves."""
        tables = self.ranker.score_pools(pools)
        rows = [table.mean(self.ranker.readout, residual=self.ranker.residual) for table in tables]
        return [[_number(self.top * score) for score in row.tolist()] for row in rows]

    def describe(self) -> dict[str, Any]:
        """What decides about the scores."""
        parts = {"engine": self.ranker.engine, "prompt": self.ranker.prompt, "scoring": self.ranker.scoring}
        return {"type": "batched", "readout": self.ranker.readout} | {n: part.describe() for n, part in parts.items()}

    def tokens(self) -> dict[str, int | None]:
        """What a chat endpoint says it read and wrote; empty for other engines."""
        if not isinstance(self.ranker.engine, GeneratedEngine):
            return {}
        spent = self.ranker.engine.cost()
        return {name: spent.get(name) for name in ("prompt_tokens", "completion_tokens")}


class Saved:
    """Scores that are there already: a scores folder, or a TREC run."""

    def __init__(self, path: str, options: Mapping[str, Any]) -> None:
        if options:
            raise BadArgument(f"scores at hand take no options, got {', '.join(sorted(options))}")
        self.system = read_system([path])
        self.scores = self.system.scores()

    def score(self, pools: Sequence[Pool]) -> list[list[float | None]]:
        """Look up every candidate; one without a score stays without."""
        return [[_number(self.scores.get(p.query_id, {}).get(d)) for d in p.doc_ids] for p in pools]

    def describe(self) -> dict[str, Any]:
        """What is known of their making."""
        return {"type": "scores", **self.system.describe()}

    def tokens(self) -> dict[str, int | None]:
        """Nothing is read."""
        return {}


def _number(score: float | None) -> float | None:
    return None if score is None or not math.isfinite(score) else float(score)
