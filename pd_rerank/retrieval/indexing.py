"""Indexes from a corpus file: Lucene BM25, Faiss vectors, Lucene impacts of a learned-sparse encoder.

The corpus is read through and checked before anything expensive starts. Encoded documents are kept in shards beside the
index, each whole or absent: an interrupted run goes on after the last one, and the vectors are those of an
uninterrupted run. The index folder appears whole or not at all, with a manifest of what made it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pd_rerank._extras import need
from pd_rerank.errors import BadArgument, EngineFailure
from pd_rerank.files import (
    clear_left_overs,
    manifest,
    read_json,
    versions,
    whole_file,
    whole_folder,
    write_json,
    write_jsonl,
)
from pd_rerank.retrieval.corpus import Corpus, Document, Empty, check_corpus, with_text
from pd_rerank.retrieval.encoders import DenseEncoder, Encoder, SpladeEncoder, quantised
from pd_rerank.retrieval.java import check_language, java_class, java_thread, start_java
from pd_rerank.retrieval.searchers import MANIFEST, Kind

logger = logging.getLogger("pd_rerank")

Progress = Callable[[str, int, int], None]
"""Called with a stage, how much of it is done and how much there is: documents, in "encoding" and "indexing"."""

FORMAT = "pd_rerank index 1"
_LIBRARIES = ("numpy", "torch", "transformers", "tokenizers", "onnxruntime", "pyserini", "pyjnius", "faiss-cpu")
_ENCODING_LIBRARIES = ("numpy", "torch", "transformers", "tokenizers", "onnxruntime")
_WAIT_S = 0.2


# -- building -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HNSW:
    """A Faiss graph index: `m` neighbours per node, `ef_construction` candidates looked at while building."""

    m: int = 16
    ef_construction: int = 100

    def __post_init__(self) -> None:
        if self.m < 2 or self.ef_construction < 1:
            raise BadArgument(f"HNSW takes m of at least 2 and ef_construction of at least 1, got {self}")


def index_bm25(
    corpus: str | Path | Corpus,
    index: str | Path,
    *,
    language: str = "en",
    threads: int = 1,
    empty: Empty = "error",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Make a Lucene index of a corpus in the folder `index`: positions, document vectors and raw texts stored.

    Pyserini opens it as its own. `language` chooses Anserini's analyzer. Returns the manifest. A finished index with
    these settings is left as it is; one with others is refused unless `overwrite`.
    """
    checked = corpus if isinstance(corpus, Corpus) else check_corpus(corpus, empty=empty)
    job = _Job("bm25", checked, Path(index), {"language": language, "empty": empty}, overwrite)
    if job.finished is not None:
        return job.finished
    start_java()
    check_language(language)
    lines = job.shards / "documents"
    shutil.rmtree(lines, ignore_errors=True)
    stored = ({"id": d.doc_id, "contents": d.text} for d in with_text(checked))
    per_file = -(-checked.documents // threads)  # Anserini gives each file to one thread
    for number in range(threads):
        write_jsonl(lines / f"{number:03d}.jsonl", islice(stored, per_file))
    flags = {"storePositions": True, "storeDocvectors": True, "storeRaw": True, "optimize": True, "language": language}
    with job.folder() as fresh:
        counts = _run_lucene("JsonCollection", lines, fresh, flags, threads, checked.documents, progress)
        return job.write(fresh, {"java": _java_version(), "unindexed": checked.documents - counts["indexed"]})


def index_dense(
    corpus: str | Path | Corpus,
    index: str | Path,
    *,
    encoder: DenseEncoder | Encoder,
    hnsw: HNSW | None = None,
    threads: int = 1,
    shard_size: int = 2048,
    empty: Empty = "error",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Make a Faiss index (inner product; flat, or a graph with `hnsw`) of a corpus, as Pyserini reads it.

    The folder gets `index`, `docid` and the manifest, which is returned. One shard is `shard_size` documents, on
    disk before the next is begun. With one thread a graph comes out the same each time.
    """
    if encoder.kind != "dense":
        raise BadArgument(f"'{encoder.name}' is a {encoder.kind} encoder; a dense index needs a dense one")
    faiss = need("faiss", extra="pools", purpose="dense indexes are made with Faiss")
    checked = corpus if isinstance(corpus, Corpus) else check_corpus(corpus, empty=empty)
    settings = {
        "encoder": encoder.describe(),
        "hnsw": hnsw and asdict(hnsw),
        "shard_size": shard_size,
        "empty": empty,
    }
    job = _Job("dense", checked, Path(index), settings, overwrite)
    if job.finished is not None:
        return job.finished

    def write(path: Path, texts: Sequence[Document], tick: Callable[[int], None]) -> None:
        vectors = encoder.encode([d.text for d in texts], side="document", progress=tick)
        with whole_file(path, "wb") as stream:
            np.save(stream, np.ascontiguousarray(vectors, dtype=np.float32), allow_pickle=False)

    shards = job.encode(write, ".npy", shard_size, progress)
    dimension = int(encoder.describe()["dimension"])
    with job.folder() as fresh, _faiss_threads(faiss, threads):
        if hnsw is None:
            made = faiss.IndexFlatIP(dimension)
        else:
            made = faiss.IndexHNSWFlat(dimension, hnsw.m, faiss.METRIC_INNER_PRODUCT)
            made.hnsw.efConstruction = hnsw.ef_construction
        for path in shards:
            vectors = np.load(path, allow_pickle=False)
            if not np.isfinite(vectors).all():
                raise EngineFailure(f"'{encoder.name}' gave vectors that are not finite; try --dtype fp32")
            made.add(vectors)
            if progress is not None:
                progress("indexing", int(made.ntotal), checked.documents)
        faiss.write_index(made, str(fresh / "index"))
        with whole_file(fresh / "docid") as stream:
            stream.writelines(f"{d.doc_id}\n" for d in with_text(checked))
        return job.write(fresh, {}, files=("index", "docid"))


def index_sparse(
    corpus: str | Path | Corpus,
    index: str | Path,
    *,
    encoder: SpladeEncoder | Encoder,
    quantise: int = 100,
    threads: int = 1,
    shard_size: int = 1024,
    empty: Empty = "error",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Make a Lucene impact index of a corpus: term weights times `quantise`, rounded to whole numbers.

    Returns the manifest; `vectors_sha256` in it covers ids and weights, since Lucene's files differ from run to run
    (each holds a random id and the time). Documents without a term left are counted as `unindexed`.
    """
    if encoder.kind != "sparse":
        raise BadArgument(f"'{encoder.name}' is a {encoder.kind} encoder; an impact index needs a sparse one")
    if quantise < 1:
        raise BadArgument(f"quantise must be at least 1, got {quantise}")
    checked = corpus if isinstance(corpus, Corpus) else check_corpus(corpus, empty=empty)
    settings = {"encoder": encoder.describe(), "quantise": quantise, "shard_size": shard_size, "empty": empty}
    job = _Job("sparse", checked, Path(index), settings, overwrite)
    if job.finished is not None:
        return job.finished
    start_java()

    def write(path: Path, texts: Sequence[Document], tick: Callable[[int], None]) -> None:
        weights = encoder.encode([d.text for d in texts], side="document", progress=tick)
        write_jsonl(
            path,
            (
                {"id": d.doc_id, "contents": "", "vector": quantised(row, quantise)}
                for d, row in zip(texts, weights, strict=True)
            ),
        )

    shards = job.encode(write, ".jsonl", shard_size, progress)
    flags = {"impact": True, "pretokenized": True, "optimize": True}
    with job.folder() as fresh:
        counts = _run_lucene(
            "JsonVectorCollection", shards[0].parent, fresh, flags, threads, checked.documents, progress
        )
        record = {
            "java": _java_version(),
            "unindexed": checked.documents - counts["indexed"],
            "vectors_sha256": _sha256_of(shards),
        }
        return job.write(fresh, record)


class _Job:
    """One index to be made: what it depends on, its shards, and the folder it ends in."""

    def __init__(self, kind: Kind, corpus: Corpus, index: Path, settings: Mapping[str, Any], overwrite: bool) -> None:
        self.kind = kind
        self.corpus = corpus
        self.index = index
        self.shards = index.parent / f"{index.name}.shards"
        made_with = versions(_ENCODING_LIBRARIES) if "encoder" in settings else {}
        self.settings: dict[str, Any] = json.loads(
            json.dumps(
                {"kind": kind, "corpus_sha256": corpus.sha256, "documents": corpus.documents, **settings},
                default=str,
            )
        )
        self.made_with = made_with
        if overwrite:
            shutil.rmtree(self.shards, ignore_errors=True)
        self.finished = self._look(overwrite)

    def _look(self, overwrite: bool) -> dict[str, Any] | None:
        """The manifest of the index that is there, if it is the one to be made; refuse what is another's."""
        if self.index.exists() and not self.index.is_dir():
            raise BadArgument(f"{self.index} is a file; name a folder for the index")
        there = sorted(entry.name for entry in self.index.iterdir()) if self.index.is_dir() else []
        if not there:
            return None
        record = read_json(self.index / MANIFEST) if MANIFEST in there else {}
        ours = str(record.get("format", "")).startswith("pd_rerank index")
        is_index = ours or any(name.startswith("segments_") for name in there) or {"index", "docid"} <= set(there)
        if not is_index:
            raise BadArgument(f"{self.index} holds '{there[0]}' and is no index; name another folder")
        if overwrite:
            return None
        if not ours:
            raise BadArgument(f"{self.index} holds an index already; name another folder, or give --overwrite")
        differing = _differing(record.get("settings") or {}, self.settings)
        if differing:
            raise BadArgument(
                f"{self.index} was made with other settings ({differing}); name another folder, or give --overwrite"
            )
        logger.info("%s is made already, with these settings and this corpus", self.index)
        shutil.rmtree(self.shards, ignore_errors=True)
        return dict(record)

    def encode(
        self,
        write: Callable[[Path, Sequence[Document], Callable[[int], None]], None],
        ending: str,
        shard_size: int,
        progress: Progress | None,
    ) -> list[Path]:
        """Encode every shard that is not there yet; return the paths of all, in order."""
        if shard_size < 1:
            raise BadArgument(f"shard_size must be at least 1, got {shard_size}")
        self._claim()
        vectors = self.shards / "vectors"
        vectors.mkdir(parents=True, exist_ok=True)
        for left_over in vectors.glob(".*"):
            left_over.unlink()
        total, done = self.corpus.documents, 0
        texts = with_text(self.corpus)
        paths: list[Path] = []
        while shard := list(islice(texts, shard_size)):
            paths.append(vectors / f"{len(paths):06d}{ending}")
            if not paths[-1].exists():
                write(paths[-1], shard, _ticker(progress, done, total))
            elif progress is not None:
                progress("encoding", done + len(shard), total)
            done += len(shard)
        return paths

    def _claim(self) -> None:
        """Take over shards made with these very settings and libraries; refuse others."""
        path = self.shards / "settings.json"
        mine = {"settings": self.settings, "versions": self.made_with}
        if path.exists():
            found = read_json(path)
            differing = _differing(
                {**found.get("settings", {}), **found.get("versions", {})}, {**self.settings, **self.made_with}
            )
            if differing:
                raise BadArgument(
                    f"{self.shards} holds the start of another job ({differing}); delete it, or give --overwrite"
                )
            logger.info("going on with the shards in %s", self.shards)
        else:
            write_json(path, mine)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """An empty folder that becomes the index if all goes well; the shards then go."""
        clear_left_overs(self.index)
        held = [entry.name for entry in self.index.iterdir()] if self.index.is_dir() else []
        with whole_folder(self.index, holds=held) as fresh:
            yield fresh
        shutil.rmtree(self.shards, ignore_errors=True)

    def write(self, fresh: Path, record: Mapping[str, Any], *, files: Sequence[str] = ()) -> dict[str, Any]:
        """Write the manifest into the folder and return it."""
        encoder = self.settings.get("encoder")
        whole = manifest(
            {
                "format": FORMAT,
                "kind": self.kind,
                "documents": self.corpus.documents,
                "left_out_empty": self.corpus.empty,
                "corpus": {"path": str(self.corpus.path), "sha256": self.corpus.sha256},
                **{key: self.settings[key] for key in ("language", "quantise", "hnsw") if key in self.settings},
                **({"encoder": encoder} if encoder else {}),
                **record,
                "settings": self.settings,
            },
            files={name: fresh / name for name in files},
            libraries=_LIBRARIES,
        )
        write_json(fresh / MANIFEST, whole)
        return whole


def _run_lucene(
    collection: str,
    source: Path,
    target: Path,
    flags: Mapping[str, Any],
    threads: int,
    total: int,
    progress: Progress | None,
) -> dict[str, int]:
    """Run Anserini's indexer in a thread of its own, so that Ctrl-C is heard, and count what it took in."""
    if threads < 1:
        raise BadArgument(f"threads must be at least 1, got {threads}")
    options = java_class("io.anserini.index.IndexCollection$Args")()
    options.collectionClass, options.generatorClass = collection, "DefaultLuceneDocumentGenerator"
    options.input, options.index = str(source), str(target)
    options.threads, options.quiet = threads, True
    memory = int(java_class("java.lang.Runtime").getRuntime().maxMemory())
    options.memoryBuffer = min(4096, memory // (4 << 20))  # in MB; the default may be more than there is
    for name, value in flags.items():
        setattr(options, name, value)
    indexer = java_class("io.anserini.index.IndexCollection")(options)
    counters = indexer.getCounters()
    failure: list[BaseException] = []

    def run() -> None:
        with java_thread():
            try:
                indexer.run()
            except Exception as error:
                failure.append(error)

    worker = threading.Thread(target=run, name="lucene-indexer", daemon=True)
    worker.start()
    while worker.is_alive():
        worker.join(_WAIT_S)
        if progress is not None:
            progress("indexing", int(counters.indexed.get()), total)
    if failure:
        raise EngineFailure(f"Lucene could not index {source}: {failure[0]}") from failure[0]
    names = ("indexed", "empty", "unindexable", "skipped", "errors")
    counts = {name: int(getattr(counters, name).get()) for name in names}
    if counts["indexed"] + counts["empty"] != total or counts["errors"]:
        raise EngineFailure(f"Lucene indexed {counts['indexed']} of {total} documents ({counts}); nothing was kept")
    return counts


def _java_version() -> str:
    return str(java_class("java.lang.System").getProperty("java.version"))


@contextmanager
def _faiss_threads(faiss: Any, threads: int) -> Iterator[None]:
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(threads)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def _ticker(progress: Progress | None, done: int, total: int) -> Callable[[int], None]:
    """Turns "n more are done" of a shard into how many of all are done."""
    count = done

    def tick(n: int) -> None:
        nonlocal count
        count += n
        if progress is not None:
            progress("encoding", count, total)

    return tick


def _differing(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """The settings whose values differ, named; empty if none."""
    flat_there, flat_here = _flat(there), _flat(here)
    names = [name for name in sorted({*flat_there, *flat_here}) if flat_there.get(name) != flat_here.get(name)]
    return "; ".join(f"{n}: {flat_there.get(n)!r} there, {flat_here.get(n)!r} here" for n in names[:4])


def _flat(values: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{name}.{key}" if name else str(key)
        out |= _flat(value, path) if isinstance(value, dict) else {path: value}
    return out


def _sha256_of(paths: Sequence[Path]) -> str:
    whole = hashlib.sha256()
    for path in paths:
        whole.update(path.read_bytes())
    return whole.hexdigest()
