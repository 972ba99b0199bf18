"""pd_rerank: order-consistent batched LLM reranking.

Public names are looked up on first use, so that `import pd_rerank` itself loads nothing heavy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "BadArgument": "errors",
    "Candidate": "pool",
    "EngineFailure": "errors",
    "FakeEngine": "engines.fake",
    "GradePrompt": "prompt",
    "HFEngine": "engines.hf",
    "InvalidData": "errors",
    "MissingExtra": "errors",
    "MissingResource": "errors",
    "ModelMismatch": "errors",
    "OCSFTBatchedReranker": "reranker",
    "PdRerankError": "errors",
    "Pool": "pool",
    "RouteHit": "pool",
    "Rubric": "prompt",
    "ScoreTable": "scores",
    "Scoring": "scoring",
    "SlotResidual": "scores",
    "Threshold": "decisions",
    "read_pools": "pool",
    "read_scores": "scores",
    "register": "reranker",
    "score_pools": "scoring",
    "write_pools": "pool",
    "write_scores": "scores",
}

__all__ = ["__version__", *sorted(_HOME)]

if TYPE_CHECKING:
    from pd_rerank.decisions import Threshold as Threshold
    from pd_rerank.engines.fake import FakeEngine as FakeEngine
    from pd_rerank.engines.hf import HFEngine as HFEngine
    from pd_rerank.errors import (
        BadArgument as BadArgument,
    )
    from pd_rerank.errors import (
        EngineFailure as EngineFailure,
    )
    from pd_rerank.errors import (
        InvalidData as InvalidData,
    )
    from pd_rerank.errors import (
        MissingExtra as MissingExtra,
    )
    from pd_rerank.errors import (
        MissingResource as MissingResource,
    )
    from pd_rerank.errors import (
        ModelMismatch as ModelMismatch,
    )
    from pd_rerank.errors import (
        PdRerankError as PdRerankError,
    )
    from pd_rerank.pool import Candidate as Candidate
    from pd_rerank.pool import Pool as Pool
    from pd_rerank.pool import RouteHit as RouteHit
    from pd_rerank.pool import read_pools as read_pools
    from pd_rerank.pool import write_pools as write_pools
    from pd_rerank.prompt import GradePrompt as GradePrompt
    from pd_rerank.prompt import Rubric as Rubric
    from pd_rerank.reranker import OCSFTBatchedReranker as OCSFTBatchedReranker
    from pd_rerank.reranker import register as register
    from pd_rerank.scores import ScoreTable as ScoreTable
    from pd_rerank.scores import SlotResidual as SlotResidual
    from pd_rerank.scores import read_scores as read_scores
    from pd_rerank.scores import write_scores as write_scores
    from pd_rerank.scoring import Scoring as Scoring
    from pd_rerank.scoring import score_pools as score_pools


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'pd_rerank' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"pd_rerank.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
