"""`OCSFTBatchedReranker`: the batched grade scorer as a `rerankers` model, and its registration there."""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from rerankers.documents import Document
from rerankers.models import AVAILABLE_RANKERS
from rerankers.models.ranker import BaseRanker
from rerankers.results import RankedResults, Result

from pd_rerank import windows
from pd_rerank.decisions import Settle, Threshold, scored_by
from pd_rerank.engines import load_engine
from pd_rerank.engines.base import Engine, Progress
from pd_rerank.engines.generated import GeneratedEngine
from pd_rerank.errors import BadArgument, EngineFailure, whole
from pd_rerank.pool import Candidate, Pool
from pd_rerank.prompt import ChatPrompt, GradePrompt, Prompt
from pd_rerank.rubrics import Rubric
from pd_rerank.scores import READOUTS, Readout, ScoreTable, SlotResidual
from pd_rerank.scoring import Calibration, Scoring, Shuffle, score_pools

logger = logging.getLogger("pd_rerank")
_NOWHERE = logging.NullHandler()

Docs: TypeAlias = str | Document | Sequence[str | Document]
Ids: TypeAlias = Sequence[str | int]
Metadata: TypeAlias = Sequence[Mapping[str, Any]]


class GradedResult(Result):  # type: ignore[misc]
    """One document with its score in [0, 1] (None where the model gave no grade) and its rank from 1.

    `spread` is the standard deviation of the score over presentations, `grade_probabilities` the mean
    probability of each grade, `cut` the characters taken off the document's end.
    """

    def __init__(
        self,
        document: Document,
        score: float | None,
        rank: int,
        *,
        spread: float | None = None,
        grade_probabilities: tuple[float, ...] | None = None,
        cut: int = 0,
    ) -> None:
        super().__init__(document=document, score=score, rank=rank)
        self.spread = spread
        self.grade_probabilities = grade_probabilities
        self.cut = cut

    def __getattr__(self, item: str) -> Any:
        # The inherited look-up asks for `document` first, which recurses for ever while an object is unpickled.
        if item.startswith("__") or "document" not in self.__dict__:
            raise AttributeError(item)
        return super().__getattr__(item)


class GradedResults(RankedResults):  # type: ignore[misc]
    """Results sorted from best to worst, with what they were read from.

    `table` is the query's `ScoreTable` in the order the documents were given; `presentations` says how many
    were spent on it.
    """

    def __init__(self, results: list[GradedResult], query: str, table: ScoreTable | None) -> None:
        super().__init__(results=results, query=query, has_scores=True)
        self.table = table

    def __len__(self) -> int:
        return len(self.results)

    @property
    def presentations(self) -> int:
        """How many presentations the scores are averaged over; 0 for an empty list."""
        return self.table.presentations if self.table is not None and self.table.doc_ids else 0

    def get_result_by_docid(self, doc_id: str | int) -> GradedResult | None:
        """The best result with this id; where none has it exactly, "0" also finds 0 and the reverse."""
        exact = (r for r in self.results if r.document.doc_id == doc_id)
        alike = (r for r in self.results if str(r.document.doc_id) == str(doc_id))
        return next(exact, None) or next(alike, None)

    def get_score_by_docid(self, doc_id: str | int) -> float | None:
        """The score of `get_result_by_docid`."""
        result = self.get_result_by_docid(doc_id)
        return None if result is None else result.score

    def top_k(self, k: int) -> list[GradedResult]:
        """The k best results; k must not be negative."""
        if k < 0:
            raise BadArgument(f"top_k must be 0 or more, got {k}")
        return list(self.results[:k])


class OCSFTBatchedReranker(BaseRanker):  # type: ignore[misc]
    """Reranks by the expected grade an LLM gives each of `window` documents in one prompt, in one forward pass.

    Scores are expected grades over the top grade, in [0, 1]. They compare within a query; across queries and
    thresholds they compare as far as the model's grades do. `model_name_or_path` is a short name of an embedded
    model ("smollm2-135m"), a hub id or a folder. Options, all by keyword:

    * what is shown: `window`, `partition`, `order`, `presentations`, `seed`, `shuffle`, see `Scoring`;
    * what is asked: `rubric`, `instruction`, `markers`, `placeholder`, `max_doc_chars`, `chat`,
      `template_kwargs`, see `GradePrompt`;
    * what is read: `readout` ("expected", "p_relevant", "argmax"), `calibration` ("none", "capcal"),
      `slot_residual` (a `SlotResidual` or its file);
    * what is decided: `threshold` (a number, a `Threshold` or its file), `settle` (stop presenting once settled);
    * the model: `adapter` (LoRA folder or hub id), `engine` ("hf", "vllm", "server", "generated", "fake" or an object),
      `max_length`, and every option of the engine's constructor (`dtype`, `device`, `merge_adapter`, `server`, …). An
      unknown option is an error.

    With `engine="generated"` a chat model at `server` writes the grades down: `model_name_or_path` is the server's name
    for it, the prompt a `ChatPrompt`, and what is about slots (`placeholder`, `chat`, `template_kwargs`, `calibration`)
    is refused; `reasons` asks for a short reason beside every grade.

    An adapter that carries a `reranker.json` must have been made with the same prompt template, and a threshold that
    records its `context()` been fitted on the same model and template; `check_template=False` overrides.
    `max_concurrency` is how many `rank_async` calls run at once; the others wait. With `verbose=0` warnings go only
    where the program has set up logging (logger "pd_rerank"), and nowhere otherwise.
    """

    def __init__(
        self,
        model_name_or_path: Any,
        verbose: int = 1,
        *,
        adapter: str | Path | None = None,
        engine: str | Engine = "hf",
        window: int = 20,
        partition: windows.Partition = "round_robin",
        order: windows.Arrangement = "given",
        presentations: int = 1,
        seed: int = 0,
        shuffle: Shuffle = "pool",
        calibration: Calibration = "none",
        readout: Readout = "expected",
        slot_residual: SlotResidual | str | Path | None = None,
        threshold: Threshold | float | str | Path | None = None,
        settle: Settle | None = None,
        rubric: str | Path | Rubric = "passage_relevance",
        instruction: str | None = None,
        markers: str = "numeric",
        placeholder: str = "0",
        max_doc_chars: int | None = None,
        chat: bool | Literal["auto"] = "auto",
        template_kwargs: Mapping[str, Any] | None = None,
        reasons: bool = False,
        check_template: bool = True,
        max_concurrency: int = 4,
        **engine_options: Any,
    ) -> None:
        if readout not in READOUTS:
            raise BadArgument(f"unknown readout '{readout}'; choose one of {', '.join(READOUTS)}")
        if not whole(max_concurrency) or max_concurrency < 1:
            raise BadArgument(f"max_concurrency must be a whole number of at least 1, got {max_concurrency!r}")
        if settle is not None and not isinstance(settle, Settle):
            raise BadArgument(f"settle is Settle(threshold=…) or Settle(top_k=…), got {settle!r}")
        if not isinstance(verbose, int):
            raise BadArgument(f"verbose is a whole number, 0 for silence, got {verbose!r}")
        if verbose < 1:  # without a handler anywhere, Python itself prints warnings on stderr
            logger.addHandler(_NOWHERE)
        self.verbose = verbose
        self.scoring = Scoring(
            window=window,
            partition=partition,
            order=order,
            presentations=presentations,
            seed=seed,
            shuffle=shuffle,
            calibration=calibration,
        )
        self.readout: Readout = readout
        if settle is not None:
            settle.check(self.scoring.presentations)
        self.settle = settle
        self.threshold = None if threshold is None else Threshold.of(threshold, readout)
        self.residual = SlotResidual.load(slot_residual) if isinstance(slot_residual, str | Path) else slot_residual
        if self.residual is not None:
            if not isinstance(self.residual, SlotResidual):
                raise BadArgument(f"a slot residual is a SlotResidual or its file, got {slot_residual!r}")
            self.residual.check(readout=readout, calibration=calibration)
        self._max_concurrency = int(max_concurrency)
        self._threads: dict[int, ThreadPoolExecutor] = {}
        written = engine == "generated" or isinstance(engine, GeneratedEngine)
        if written and calibration != "none":
            raise BadArgument("calibration corrects grade probabilities; the generated engine has none")
        if written and (placeholder != "0" or chat != "auto" or template_kwargs is not None):
            raise BadArgument(
                "placeholder, chat and template_kwargs are for reading slots; the generated engine has none"
            )
        if reasons and not written:
            raise BadArgument("reasons is for grades that are written down: engine='generated'")
        if engine == "hf" and verbose < 1:
            engine_options.setdefault("quiet", True)
        try:
            self.engine = load_engine(
                model_name_or_path, engine=engine, adapter=adapter, also=_OPTIONS, **engine_options
            )
            wording: dict[str, Any] = {
                "rubric": rubric,
                "instruction": instruction,
                "markers": markers,
                "max_doc_chars": max_doc_chars,
            }
            self.prompt: Prompt
            if written:
                self.prompt = ChatPrompt(**wording, reasons=reasons)
            else:
                self.prompt = GradePrompt(
                    self.engine.tokenizer,
                    **wording,
                    placeholder=placeholder,
                    chat=chat,
                    template_kwargs=template_kwargs,
                )
        except KeyError as error:
            # rerankers reports a KeyError from a constructor as a missing dependency, and fails on its own table.
            raise EngineFailure(f"loading '{model_name_or_path}' failed on a missing key {error}") from error
        card = getattr(self.engine, "adapter_card", None)
        if card:
            where = f"adapter '{adapter}'" if adapter else f"'{self.engine.name}'"
            if check_template:
                self.prompt.check_card(card, where=where)
            self.scoring.note_card(card, where=where)
        self._check_template = check_template
        if self.threshold is not None and check_template:
            self.threshold.check(self.context())

    def context(self) -> dict[str, Any]:
        """What a threshold fitted on this reranker's scores holds for: model, adapter, template, window, calibration.

        Pass it to `Threshold.fit_f1(…, context=ranker.context())`: the threshold is then refused elsewhere.
        """
        return scored_by(self.engine.describe(), self.prompt.describe(), self.scoring.describe())

    # -- rerankers' interface -----------------------------------------------------------------------------

    def rank(
        self,
        query: str,
        docs: Docs,
        doc_ids: Ids | None = None,
        metadata: Metadata | None = None,
    ) -> GradedResults:
        """Rerank one query's documents, best first.

        `docs` are strings, `Document`s or both, or a single one; `doc_ids` replace the ids, `metadata` the metadata.
        Documents without an id are numbered from 0 in the order given. Repeated ids and texts keep separate results.
        An empty list gives an empty result. Ties are broken by id (by content where no id was given), never by
        arrival. A blank document is not shown to the model and scores 0. One the model gave no grade ranks last with
        score None; a warning counts the grades that are missing. The caller's objects are not changed.
        """
        return self.rank_many([query], [docs], [doc_ids], [metadata])[0]

    def rank_many(
        self,
        queries: Sequence[str],
        docs: Sequence[Docs],
        doc_ids: Sequence[Ids | None] | None = None,
        metadata: Sequence[Metadata | None] | None = None,
        *,
        progress: Progress | None = None,
    ) -> list[GradedResults]:
        """Rerank many queries, all their windows in one engine call; arguments are lists of `rank`'s, one per query."""
        if isinstance(queries, str) or isinstance(docs, str | Document):
            raise BadArgument("rank_many takes a list of queries and a list of their documents; use rank for one")
        many_ids: list[Ids | None] = [None] * len(queries) if doc_ids is None else list(doc_ids)
        many_metadata: list[Metadata | None] = [None] * len(queries) if metadata is None else list(metadata)
        for name, given in (("docs", docs), ("doc_ids", many_ids), ("metadata", many_metadata)):
            if len(given) != len(queries):
                raise BadArgument(f"{len(queries)} queries but {len(given)} entries in {name}; give one for each")
        asked = [_asked(*entry) for entry in zip(queries, docs, many_ids, many_metadata, strict=True)]
        tables = self.score_pools([pool for pool, _ in asked], progress=progress)
        return [
            self._results(query, documents, table)
            for query, (_, documents), table in zip(queries, asked, tables, strict=True)
        ]

    def score(self, query: str, doc: str | Document) -> float:
        """The score of one document alone, in [0, 1]; NaN where the model gives no grade."""
        (result,) = self.rank(query, [doc])
        return float("nan") if result.score is None else float(result.score)

    async def rank_async(
        self,
        query: str,
        docs: Docs,
        doc_ids: Ids | None = None,
        metadata: Metadata | None = None,
    ) -> GradedResults:
        """`rank` in a thread, at most `max_concurrency` at a time; same arguments, same results, from any event loop.

        A call cancelled while it waits never reaches the engine; one that runs is finished, its result dropped.
        """
        work = partial(self.rank, query, docs, doc_ids, metadata)
        return await asyncio.get_running_loop().run_in_executor(self._executor(), work)

    def _executor(self) -> ThreadPoolExecutor:
        """Threads of this process's own: a forked child gets none of its parent's, and would wait for them for ever.

        Not a gate on a loop's threads: a cancelled call's thread keeps its place until it is done, and no event loop
        is held on to.
        """
        process = os.getpid()
        if process not in self._threads:
            fresh = ThreadPoolExecutor(self._max_concurrency, thread_name_prefix="pd_rerank")
            self._threads.setdefault(process, fresh)
        return self._threads[process]

    def as_langchain_compressor(self, k: int = 10) -> Any:
        """This reranker as a LangChain document compressor that keeps the k best documents."""
        from pd_rerank.frameworks.langchain import OCSFTCompressor

        return OCSFTCompressor(self, k=k)

    # -- what rerankers does not have -----------------------------------------------------------------------

    def retain(
        self,
        query: str,
        docs: Docs,
        threshold: Threshold | float | str | Path | None = None,
        *,
        doc_ids: Ids | None = None,
        metadata: Metadata | None = None,
    ) -> GradedResults:
        """The documents whose score reaches the threshold, best first; none reaching it is an empty result.

        `threshold` is a number on the score scale, a fitted `Threshold` or its file; left out, the constructor's.
        """
        limit = self.threshold if threshold is None else Threshold.of(threshold, self.readout)
        if limit is None:
            raise BadArgument("retain needs a threshold: pass one here or to the constructor")
        if self._check_template:
            limit.check(self.context())
        ranked = self.rank(query, docs, doc_ids, metadata)
        scores = np.array([np.nan if r.score is None else r.score for r in ranked], dtype=np.float64)
        kept = [r for r, keep in zip(ranked.results, limit.retain(scores), strict=True) if keep]
        return GradedResults(kept, query, ranked.table)

    def score_pools(self, pools: Sequence[Pool], *, progress: Progress | None = None) -> list[ScoreTable]:
        """Score tables of whole pools with this reranker's settings; `rank` and `rank_many` end here too."""
        return score_pools(
            pools,
            engine=self.engine,
            prompt=self.prompt,
            scoring=self.scoring,
            settle=self.settle,
            readout=self.readout,
            residual=self.residual,
            progress=progress,
        )

    def _results(self, query: str, documents: list[Document], table: ScoreTable) -> GradedResults:
        mean = table.mean(self.readout, residual=self.residual)
        spread = table.spread(self.readout, residual=self.residual)
        probabilities = table.mean_probabilities()
        if lost := int(np.isnan(table.scores(self.readout)).sum()):
            logger.warning(
                "%d of %d grades are missing for query %r; %d of %d documents have none and rank last",
                lost,
                table.fallback.size,
                query[:80],
                int(np.isnan(mean).sum()),
                len(mean),
            )
        results = []
        for rank, i in enumerate(table.ranking(self.readout, residual=self.residual), start=1):
            graded = not np.isnan(mean[i])
            results.append(
                GradedResult(
                    documents[i],
                    float(mean[i]) if graded else None,
                    rank,
                    spread=float(spread[i]) if graded else None,
                    grade_probabilities=tuple(probabilities[i].tolist()) if graded else None,
                    cut=int(table.cut[i]),
                )
            )
        return GradedResults(results, query, table)


def register() -> None:
    """Make `Reranker(name, model_type="OCSFTBatchedReranker")` and `model_type="ocsft"` work. Safe to repeat."""
    AVAILABLE_RANKERS["OCSFTBatchedReranker"] = OCSFTBatchedReranker
    AVAILABLE_RANKERS["ocsft"] = OCSFTBatchedReranker


register()

_OPTIONS = tuple(inspect.signature(OCSFTBatchedReranker).parameters)


def pool_of(query: str, docs: Docs, doc_ids: Ids | None = None) -> Pool:
    """The pool `rank` would score for these arguments, its candidates in the order given."""
    return _asked(query, docs, doc_ids, None)[0]


def _asked(query: str, docs: Docs, doc_ids: Ids | None, metadata: Metadata | None) -> tuple[Pool, list[Document]]:
    """The caller's documents as a pool, and as fresh `Document`s that carry ids and metadata for the results."""
    if not isinstance(query, str):
        raise BadArgument(f"a query is a string, got {type(query).__name__}")
    given = [docs] if isinstance(docs, str | Document) else _listed(docs, "docs")
    new_ids = None if doc_ids is None else _listed(doc_ids, "doc_ids")
    new_metadata = None if metadata is None else _listed(metadata, "metadata")
    for what, values in (("doc_ids", new_ids), ("metadata", new_metadata)):
        if values is not None and len(values) != len(given):
            raise BadArgument(f"{len(given)} documents but {len(values)} entries in {what}; give one for each")
    documents: list[Document] = []
    ids: list[str | int | None] = []
    for i, doc in enumerate(given):
        if isinstance(doc, Document):
            if doc.document_type != "text":
                raise BadArgument(f"document {i} is of type '{doc.document_type}'; only text documents are graded")
            document = copy.copy(doc)
        elif isinstance(doc, str):
            document = Document(doc)
        else:
            raise BadArgument(f"document {i} is a {type(doc).__name__}; give strings or rerankers Documents")
        chosen = document.doc_id if new_ids is None else new_ids[i]
        ids.append(chosen)
        document.doc_id = i if chosen is None else chosen
        fields = (document.metadata if new_metadata is None else new_metadata[i]) or {}
        if not isinstance(fields, Mapping):
            raise BadArgument(f"metadata of document {i} is a {type(fields).__name__}; give a dict")
        document.metadata = _copied(fields)
        documents.append(document)
    texts = [document.text for document in documents]
    unique = _unique_ids(query, texts, ids)
    candidates = tuple(Candidate(doc_id=u, text=t) for u, t in zip(unique, texts, strict=True))
    # The query stands for its id: what a query is shown must not depend on which queries are asked with it.
    return Pool(query_id=query, query=query, candidates=candidates), documents


def _listed(values: Iterable[Any], what: str) -> list[Any]:
    if isinstance(values, str | Document | Mapping) or not isinstance(values, Iterable):
        raise BadArgument(f"{what} is a list with one entry per document, got {type(values).__name__}")
    return list(values)


def _copied(value: Any) -> Any:
    """Metadata with its dicts and lists copied at every depth; what they hold may not be copyable and is shared."""
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _unique_ids(query: str, texts: Sequence[str], ids: Sequence[str | int | None]) -> list[str]:
    """Ids that tell every document apart and break ties: the given id, else the content.

    Where an id is repeated every bearer gets content and type added, so that none depends on who came first; only
    documents alike in all three are counted.
    """
    keys = windows.content_keys(query, texts, [""] * len(texts))
    bases = [key if own is None else str(own) for key, own in zip(keys, ids, strict=True)]
    bearers, seen = Counter(bases), Counter[str]()
    unique = []
    for base, key, own in zip(bases, keys, ids, strict=True):
        name = base if bearers[base] == 1 else f"{base}\0{key}\0{type(own).__name__}"
        seen[name] += 1
        unique.append(name if seen[name] == 1 else f"{name}\0{seen[name]}")
    return unique
