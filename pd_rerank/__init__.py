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
    "ChatPrompt": "prompt",
    "EngineFailure": "errors",
    "FakeEngine": "engines.fake",
    "GeneratedEngine": "engines.generated",
    "GradePrompt": "prompt",
    "HFEngine": "engines.hf",
    "InvalidData": "errors",
    "join_scores": "scores",
    "MissingExtra": "errors",
    "MissingResource": "errors",
    "ModelMismatch": "errors",
    "OCSFTBatchedReranker": "reranker",
    "PdRerankError": "errors",
    "Pool": "pool",
    "pools_from_run": "pool",
    "read_corpus": "files",
    "read_pools": "pool",
    "read_qrels": "files",
    "read_run": "files",
    "read_scores": "scores",
    "read_topics": "files",
    "register": "reranker",
    "RouteHit": "pool",
    "Rubric": "rubrics",
    "score_pools": "scoring",
    "ScoreTable": "scores",
    "Scoring": "scoring",
    "ServerEngine": "engines.server",
    "Settle": "decisions",
    "SlotResidual": "scores",
    "Threshold": "decisions",
    "VLLMEngine": "engines.vllm",
    "write_pools": "pool",
    "write_run": "files",
    "write_scores": "scores",
}

__all__ = ["__version__", *sorted(_HOME)]

if TYPE_CHECKING:
    from pd_rerank.decisions import Settle as Settle
    from pd_rerank.decisions import Threshold as Threshold
    from pd_rerank.engines.fake import FakeEngine as FakeEngine
    from pd_rerank.engines.generated import GeneratedEngine as GeneratedEngine
    from pd_rerank.engines.hf import HFEngine as HFEngine
    from pd_rerank.engines.server import ServerEngine as ServerEngine
    from pd_rerank.engines.vllm import VLLMEngine as VLLMEngine
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
    from pd_rerank.files import read_corpus as read_corpus
    from pd_rerank.files import read_qrels as read_qrels
    from pd_rerank.files import read_run as read_run
    from pd_rerank.files import read_topics as read_topics
    from pd_rerank.files import write_run as write_run
    from pd_rerank.pool import Candidate as Candidate
    from pd_rerank.pool import Pool as Pool
    from pd_rerank.pool import RouteHit as RouteHit
    from pd_rerank.pool import pools_from_run as pools_from_run
    from pd_rerank.pool import read_pools as read_pools
    from pd_rerank.pool import write_pools as write_pools
    from pd_rerank.prompt import ChatPrompt as ChatPrompt
    from pd_rerank.prompt import GradePrompt as GradePrompt
    from pd_rerank.reranker import OCSFTBatchedReranker as OCSFTBatchedReranker
    from pd_rerank.reranker import register as register
    from pd_rerank.rubrics import Rubric as Rubric
    from pd_rerank.scores import ScoreTable as ScoreTable
    from pd_rerank.scores import SlotResidual as SlotResidual
    from pd_rerank.scores import join_scores as join_scores
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
