"""`pd-rerank index`: a corpus file in; a Lucene BM25, Faiss or Lucene impact index out, with a manifest."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import Field

from pd_rerank._extras import need
from pd_rerank.cli.flags import flags
from pd_rerank.config import Settings, load
from pd_rerank.errors import BadArgument

if TYPE_CHECKING:
    from pd_rerank.retrieval.encoders import Encoder
    from pd_rerank.retrieval.indexing import HNSW

logger = logging.getLogger("pd_rerank")


def _option(default: Any, help: str, panel: str, **limits: Any) -> Any:
    return Field(default, description=help, json_schema_extra={"panel": panel}, **limits)


_WHAT, _BM25, _ENCODER, _DENSE, _SPARSE = "What is indexed", "BM25", "Encoder", "Dense indexes", "Impact indexes"


class IndexSettings(Settings):
    """Everything `pd-rerank index` can be told, on the command line or in a file."""

    kind: str | None = _option(None, "bm25, dense or sparse; Pyserini's lucene, faiss and impact mean the same.", _WHAT)
    corpus: Path | None = _option(
        None, "JSONL (id and text) or TSV (id, tab, text), .gz too, or a folder of such files.", _WHAT
    )
    index: Path | None = _option(None, "Folder of the index.", _WHAT)
    empty: Literal["error", "skip"] = _option("error", "Documents without text: stop, or leave them out.", _WHAT)
    threads: int = _option(1, "Threads of Lucene, Faiss and the encoder.", _WHAT, ge=1)

    language: str = _option("en", "Anserini's analyzer, by language code.", _BM25)

    encoder: str | None = _option(
        None, "Short name (all-minilm-l6-v2, minilm-int8, splade-tiny), folder or hub id.", _ENCODER
    )
    batch_size: int | None = _option(None, "Most texts in a batch.", _ENCODER, ge=1)
    batch_tokens: int | None = _option(None, "Most tokens in a batch, padding included.", _ENCODER, ge=1)
    max_length: int | None = _option(None, "Longest text in tokens; left out: the model's.", _ENCODER, ge=3)
    query_prefix: str | None = _option(
        None, "Goes in front of queries; recorded for searching. Left out: the model's.", _ENCODER
    )
    doc_prefix: str | None = _option(None, "Goes in front of documents. Left out: the model's.", _ENCODER)
    device: str | None = _option(None, "cpu, cuda, cuda:1, mps; left out: the best there is.", _ENCODER)
    dtype: Literal["fp32", "bf16", "fp16"] = _option("fp32", "Numbers the model computes in.", _ENCODER)
    revision: str | None = _option(None, "Revision of a hub model.", _ENCODER)
    shard_size: int | None = _option(
        None, "Documents per shard; an interruption loses at most one shard.", _ENCODER, ge=1
    )

    pooling: Literal["cls", "mean", "last"] | None = _option(
        None, "Which token states make the vector. Left out: as the model's files say.", _DENSE
    )
    l2_norm: bool | None = _option(None, "Scale vectors to length 1. Left out: as the model's files say.", _DENSE)
    hnsw: bool = _option(False, "A graph for approximate search instead of a flat index.", _DENSE)
    m: int = _option(16, "Neighbours per node of the graph.", _DENSE, ge=2)
    ef_c: int = _option(100, "Candidates looked at while the graph is built.", _DENSE, ge=1)

    quantise: int = _option(100, "Term weights are multiplied by this and rounded.", _SPARSE, ge=1)
    max_terms: int | None = _option(None, "Only a text's heaviest terms.", _SPARSE, ge=1)


_ENCODER_FIELDS = ("batch_size", "batch_tokens", "max_length", "query_prefix", "doc_prefix", "device", "revision")


@flags(IndexSettings)
def index(
    config: Annotated[
        Path | None, typer.Option(help="YAML file with any of the options below as keys; what is typed wins.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an index, or the start of one, that is there.")
    ] = False,
    progress: Annotated[
        bool | None,
        typer.Option(help="Progress bar on stderr. Default: where stderr is a terminal.", show_default=False),
    ] = None,
    **given: Any,
) -> None:
    """Index a corpus for BM25, for dense or for learned-sparse search, in the shape Pyserini reads.

    The corpus is checked whole before anything expensive starts. Encoding is kept in shards beside the index: after
    an interruption the same command goes on where it stopped. The folder appears whole or not at all and holds a
    manifest.json with all that made it, which is also printed to stdout.
    """
    settings = load(IndexSettings, file=config, given=given)
    for name in ("kind", "corpus", "index"):
        if getattr(settings, name) is None:
            raise BadArgument(f"--{name} is missing")
    build = _builder(settings)
    with _bar(shown=progress) as on_progress:
        try:
            made = build(overwrite=overwrite, progress=on_progress)
        except KeyboardInterrupt:
            logger.error("interrupted; run the same command again to go on with %s", settings.index)
            raise typer.Exit(130) from None
    typer.echo(json.dumps(made, indent=2, ensure_ascii=False))


def _builder(settings: IndexSettings) -> Callable[..., dict[str, Any]]:
    """The function that makes the index, with everything but `overwrite` and `progress` settled."""
    from functools import partial

    from pd_rerank.retrieval import indexing
    from pd_rerank.retrieval.corpus import check_corpus
    from pd_rerank.retrieval.searchers import kind_named

    kind = kind_named(str(settings.kind))
    _refuse_idle(settings, kind)
    common: dict[str, Any] = {"threads": settings.threads, "empty": settings.empty}
    corpus, folder = settings.corpus, settings.index
    assert corpus is not None
    assert folder is not None
    if kind == "bm25":
        return partial(indexing.index_bm25, corpus, folder, language=settings.language, **common)
    checked = check_corpus(corpus, empty=settings.empty)
    if settings.shard_size is not None:
        common["shard_size"] = settings.shard_size
    encoder: Any = _encoder(settings, kind)
    if kind == "dense":
        graph: HNSW | None = indexing.HNSW(m=settings.m, ef_construction=settings.ef_c) if settings.hnsw else None
        return partial(indexing.index_dense, checked, folder, encoder=encoder, hnsw=graph, **common)
    return partial(indexing.index_sparse, checked, folder, encoder=encoder, quantise=settings.quantise, **common)


def _refuse_idle(settings: IndexSettings, kind: str) -> None:
    """An option that means nothing to this kind of index is an error, not a silence."""
    dense, sparse = ("pooling", "l2_norm", "hnsw", "m", "ef_c"), ("quantise", "max_terms")
    encoding = ("encoder", *_ENCODER_FIELDS, "dtype", "shard_size")
    idle = {
        "bm25": (*encoding, *dense, *sparse),
        "dense": ("language", *sparse),
        "sparse": ("language", *dense),
    }[kind]
    if kind == "dense" and not settings.hnsw:
        idle += ("m", "ef_c")
    for name in idle:
        if getattr(settings, name) != IndexSettings.model_fields[name].default:
            why = " without --hnsw" if kind == "dense" and name in ("m", "ef_c") else ""
            raise BadArgument(f"--{name.replace('_', '-')} means nothing to --kind {kind}{why}; leave it out")


def _encoder(settings: IndexSettings, kind: str) -> Encoder:
    from pd_rerank.retrieval.encoders import load_encoder

    if settings.encoder is None:
        raise BadArgument(
            f"--encoder is missing: a {kind} index is made with one, all-minilm-l6-v2 or splade-tiny, say"
        )
    need("torch", extra="hf", purpose="encoders run on PyTorch").set_num_threads(settings.threads)
    options = {name: getattr(settings, name) for name in (*_ENCODER_FIELDS, "dtype")}
    if kind == "dense":
        options |= {"pooling": settings.pooling, "l2_norm": settings.l2_norm}
        loaded = load_encoder(settings.encoder, kind="dense", **options)
    else:
        loaded = load_encoder(settings.encoder, kind="sparse", max_terms=settings.max_terms, **options)
    return loaded


@contextmanager
def _bar(*, shown: bool | None) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar over documents on stderr, one per stage: off with --quiet, and where stderr is no terminal."""
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    wanted = sys.stderr.isatty() if shown is None else shown
    off = not wanted or not logger.isEnabledFor(logging.INFO)
    bars: dict[str, tqdm[Any]] = {}

    def on_progress(stage: str, done: int, total: int) -> None:
        if stage not in bars:
            for bar in bars.values():
                bar.close()
            bars[stage] = tqdm(total=total, desc=stage, unit="doc", disable=off, file=sys.stderr)
        bars[stage].update(done - bars[stage].n)

    with logging_redirect_tqdm([logger]):
        try:
            yield on_progress
        finally:
            for bar in bars.values():
                bar.close()
