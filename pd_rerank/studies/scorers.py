"""Text scorers of a study: any model of rerankers, grades a chat model writes, batched grades, and scores at hand."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from pd_rerank.decisions import Settle
from pd_rerank.engines import check_options
from pd_rerank.engines.generated import GeneratedEngine
from pd_rerank.engines.http import checked_url
from pd_rerank.errors import BadArgument, EngineFailure, PdRerankError
from pd_rerank.evaluation.systems import read_system
from pd_rerank.pool import Pool
from pd_rerank.prompt import ChatPrompt
from pd_rerank.scores import READOUTS
from pd_rerank.scoring import Scoring
from pd_rerank.studies.folder import Scorer
from pd_rerank.studies.nevir_settings import ScorerSettings


def open_scorer(settings: ScorerSettings) -> Scorer:
    """Load what `settings` name; what cannot be loaded is an error that says why."""
    if settings.type == "rerankers":
        return CrossEncoder(settings.model, settings.options)
    if settings.type == "scores":
        return Saved(settings.model)
    return Batched(settings.model, settings.options, written=settings.type == "generated")


SHOWN = ("window", "partition", "order", "calibration")
WORDED = ("rubric", "instruction", "markers", "max_doc_chars", "placeholder", "chat", "template_kwargs")
WRITTEN = ("rubric", "instruction", "markers", "max_doc_chars", "reasons")
"""Options of `OCSFTBatchedReranker`: how pools are shown, how slots are asked for, how written grades are."""

_SPENT = ("presentations", "seed", "shuffle")
_REST = ("readout", "settle", "threshold", "slot_residual", "check_template", "max_concurrency")


def check_scorer(settings: ScorerSettings) -> None:
    """Refuse, before anything is loaded, options that `open_scorer` would refuse and that no model is needed to judge.

    What depends on a model (adapter, placeholder, chat template), on a library or a machine fails when it is opened.
    """
    if settings.type not in ("ocsft", "generated"):
        return
    given = Batched.options(settings.options, written=settings.type == "generated")
    if given.get("readout", READOUTS[0]) not in READOUTS:
        raise BadArgument(f"unknown readout '{given['readout']}'; choose one of {', '.join(READOUTS)}")
    if given.get("settle") is not None:
        given["settle"].check(given.get("presentations", 1))
    check_reranker(given, also=(*_SPENT, *_REST))


def check_reranker(options: Mapping[str, Any], *, also: Sequence[str] = ()) -> None:
    """Refuse options that no reranker takes; `also` names those that the caller sees to."""
    engine = options.get("engine", "hf")
    if isinstance(options.get("server"), str):
        checked_url(options["server"])
    worded = WRITTEN if engine == "generated" else WORDED
    Scoring(**{name: options[name] for name in (*SHOWN, *_SPENT) if name in options})
    ChatPrompt(**{name: options[name] for name in WRITTEN if name in worded and name in options})
    taken = (*SHOWN, *worded, *also, "engine")
    known = (*SHOWN, *worded, *also, "check_template")
    check_options(engine, {name: value for name, value in options.items() if name not in taken}, also=known)


def pointwise(settings: ScorerSettings) -> bool:
    """Whether a passage's score depends on nothing but itself and the query, so that one scoring serves every use."""
    if settings.type == "ocsft":
        return bool(settings.options.get("window", 20) == 1)
    return settings.type != "generated" or bool(settings.options.get("window", 1) == 1)


def failure_of(error: Exception) -> str | None:
    """Why a scorer could not be run, as a report says it; None where the error is our own code's fault.

    A failure is what this package raises on purpose, what the system refuses (files, memory), and what comes out of
    another library: raised in its code, of a type of its own, or the RuntimeError of compiled code. The standard
    library is nobody's: what it raises is laid to whoever called it.
    """
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, PdRerankError | OSError | MemoryError) or type(error) is RuntimeError:
        return said
    homes = [type(error).__module__]
    homes += [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [name.partition(".")[0] for name in homes]
    last = next((name for name in reversed(names[1:]) if name not in sys.stdlib_module_names), "")
    ours = {"", "pd_rerank", "builtins"} | sys.stdlib_module_names
    return said if {names[0], last} - ours else None


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

    def presentations(self) -> list[int] | None:
        """None: there is one reading."""
        return None


class Batched:
    """`OCSFTBatchedReranker`: grades read from token probabilities, or with `written` grades that a model writes.

    Written grades are 0 to 4 of rubric "evidence", one passage in a prompt, unless the options say otherwise.
    """

    def __init__(self, model: str, options: Mapping[str, Any], *, written: bool = False) -> None:
        from pd_rerank.reranker import OCSFTBatchedReranker

        self.ranker = OCSFTBatchedReranker(model, verbose=0, **self.options(options, written=written))
        self.top = len(self.ranker.prompt.grade_ids) - 1 if written else 1
        self._taken: list[int] = []

    @staticmethod
    def options(options: Mapping[str, Any], *, written: bool) -> dict[str, Any]:
        """The reranker's options, of what a config says."""
        if "verbose" in options:
            raise BadArgument("option 'verbose' is the study's to set; leave it out")
        given = {"engine": "generated", "rubric": "evidence", "window": 1, **options} if written else dict(options)
        if given.get("settle") is not None:
            given["settle"] = _settle(given["settle"])
        return given

    def score(self, pools: Sequence[Pool]) -> list[list[float | None]]:
        """Served scores of every candidate: expected grades in [0, 1], or the written grades themselves."""
        tables = self.ranker.score_pools(pools)
        self._taken = [table.presentations for table in tables]
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

    def presentations(self) -> list[int] | None:
        """What was spent on each pool: as many as the options say, or fewer where it settled."""
        return self._taken


class Saved:
    """Scores that are there already: a scores folder, or a TREC run."""

    def __init__(self, path: str) -> None:
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

    def presentations(self) -> list[int] | None:
        """None: there is one reading."""
        return None


def _settle(given: Any) -> Settle:
    """What a config says of settling early: `threshold` or `top_k`, and `tolerance`, `first`, `step`."""
    if not isinstance(given, Mapping):
        raise BadArgument(f"settle is a mapping such as {{top_k: 5, tolerance: 0.05}}, got {given!r}")
    unknown = set(given) - set(_SETTLE)
    if unknown:
        raise BadArgument(f"settle has no {', '.join(sorted(map(str, unknown)))}; it has {', '.join(_SETTLE)}")
    return Settle(**given)


_SETTLE = tuple(Settle.__dataclass_fields__)


def _number(score: float | None) -> float | None:
    return None if score is None or not math.isfinite(score) else float(score)
