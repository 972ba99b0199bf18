"""Searchers over Pyserini's indexes: many queries in, ranked (document id, score) lists out.

Lucene is called directly through Pyserini's classes, so scores are Lucene's own (Anserini's command line rounds them to
four decimals and lowers tied ones by a millionth each) and stored texts are not read while searching. Ids are
strings, order is score descending, then document id, and a query without a hit has an empty list.
"""

from __future__ import annotations

import base64
import difflib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self, get_args

import numpy as np
import numpy.typing as npt

from pd_rerank._extras import need
from pd_rerank.errors import BadArgument, InvalidData, MissingResource, ModelMismatch, PdRerankError
from pd_rerank.files import document_text, read_json
from pd_rerank.retrieval.corpus import ENDINGS, documents
from pd_rerank.retrieval.encoders import Encoder, Vectors, load_encoder, quantised
from pd_rerank.retrieval.java import check_language, java_class, java_thread, pyserini_module, start_java

logger = logging.getLogger("pd_rerank")

Kind = Literal["bm25", "dense", "sparse"]
SPELLINGS: dict[str, Kind] = {"lucene": "bm25", "faiss": "dense", "impact": "sparse"}
"""Pyserini's words for the kinds of index."""

MANIFEST = "manifest.json"
_MADE = ("corpus", "documents", "encoder", "quantise")
_FIELD = "contents"
_BLOCK = 256
"""Queries of one Faiss call."""


class Hit(NamedTuple):
    """A document found, with the searcher's own score; higher is better."""

    doc_id: str
    score: float


class Texts(Protocol):
    """Where documents' texts come from."""

    def texts(self, doc_ids: Iterable[str]) -> dict[str, str]:
        """The texts of those of `doc_ids` that have one, by id."""
        ...


class Searcher(Protocol):
    """What a pool builder asks of a route."""

    kind: Kind

    def search(self, queries: Sequence[str], k: int = 100) -> list[list[Hit]]:
        """The best `k` documents of each query, best first; an empty list where nothing matches."""
        ...

    def texts(self, doc_ids: Iterable[str]) -> dict[str, str]:
        """The texts of those of `doc_ids` that have one, by id."""
        ...

    def describe(self) -> dict[str, Any]:
        """Everything the results depend on, as plain values."""
        ...

    def close(self) -> None:
        """Let files and memory go."""
        ...


def kind_named(word: str) -> Kind:
    """The kind of index a word means: bm25, dense, sparse, or Pyserini's lucene, faiss, impact."""
    kind = SPELLINGS.get(word, word)
    if kind not in get_args(Kind):
        raise BadArgument(f"unknown kind of index '{word}'; choose bm25, dense, sparse (or lucene, faiss, impact)")
    return kind  # type: ignore[return-value]


def open_searcher(
    kind: str,
    index: str | Path,
    *,
    text_index: str | Path | Mapping[str, str] | Texts | None = None,
    threads: int = 1,
    **settings: Any,
) -> BM25Searcher | DenseSearcher | ImpactSearcher:
    """Open the searcher of `kind` (bm25, dense, sparse; lucene, faiss, impact are the same) on an index.

    `index` is a folder or the name of one of Pyserini's prebuilt indexes. `settings` are those of the searcher.
    """
    made: dict[Kind, Callable[..., Any]] = {"bm25": BM25Searcher, "dense": DenseSearcher, "sparse": ImpactSearcher}
    found: BM25Searcher | DenseSearcher | ImpactSearcher = made[kind_named(kind)](
        index, text_index=text_index, threads=threads, **settings
    )
    return found


# -- texts --------------------------------------------------------------------------------------------------


class LuceneTexts:
    """The texts a Lucene index stores: the text of the raw JSON (or the raw record itself), else its contents."""

    def __init__(self, index: str | Path) -> None:
        self.index = resolve_index(index, "bm25")
        self._reader = _open_reader(self.index)

    def texts(self, doc_ids: Iterable[str]) -> dict[str, str]:
        """The texts of those of `doc_ids` that have one, by id."""
        return _stored_texts(self._reader, doc_ids)

    def close(self) -> None:
        """Close the index."""
        self._reader.close()


class CorpusTexts:
    """The texts of a corpus file (JSONL or TSV); each call reads the file once, so ask for many ids at a time."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise MissingResource(f"no corpus file {path}")

    def texts(self, doc_ids: Iterable[str]) -> dict[str, str]:
        """The texts of those of `doc_ids` that have one, by id."""
        wanted = set(doc_ids)
        if not wanted:
            return {}
        return {d.doc_id: d.text for d in documents(self.path) if d.doc_id in wanted and d.text.strip()}


class _MappingTexts:
    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def texts(self, doc_ids: Iterable[str]) -> dict[str, str]:
        return {doc_id: self._texts[doc_id] for doc_id in doc_ids if doc_id in self._texts}


def open_texts(source: str | Path | Mapping[str, str] | Texts) -> Texts:
    """Texts from a corpus file, a Lucene index (folder or prebuilt name), a mapping, or anything with `texts`."""
    if isinstance(source, Mapping):
        return _MappingTexts(source)
    if not isinstance(source, str | Path):
        return source
    path = Path(source)
    if path.is_file() or path.name.endswith(ENDINGS) or (path.is_dir() and not any(path.glob("segments_*"))):
        return CorpusTexts(path)
    return LuceneTexts(source)


def fetch_texts(
    source: Texts,
    doc_ids: Iterable[str],
    *,
    missing_limit: float = 0.0,
    name: str = "the text source",
    origin: Callable[[str], str] = repr,
) -> tuple[dict[str, str], list[str]]:
    """The texts of `doc_ids` and the ids that have none; more of those than `missing_limit` (a share) is an error.

    `name` is what the error calls the source, `origin` how it writes an id.
    """
    if not 0.0 <= missing_limit <= 1.0:
        raise BadArgument(f"missing_limit is a share between 0 and 1, got {missing_limit}")
    wanted = list(dict.fromkeys(doc_ids))
    texts = source.texts(wanted)
    missing = [doc_id for doc_id in wanted if doc_id not in texts]
    if missing and len(missing) > missing_limit * len(wanted):
        some = ", ".join(map(origin, missing[:5])) + (", …" if len(missing) > 5 else "")
        cure = (
            "index and texts are of different collections, or it stores no texts: give a text index or corpus file"
            if len(missing) == len(wanted)
            else "give the texts the index was made from, or a higher missing_limit"
        )
        raise InvalidData(
            f"{len(missing)} of {len(wanted)} documents have no text in {name} ({some}), more than the share of "
            f"{missing_limit:g} allowed; {cure}"
        )
    return texts, missing


# -- searchers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RM3:
    """Pseudo-relevance feedback: the query is mixed with the best terms of its own first hits."""

    fb_terms: int = 10
    fb_docs: int = 10
    original_query_weight: float = 0.5

    def __post_init__(self) -> None:
        if self.fb_terms < 1 or self.fb_docs < 1 or not 0.0 <= self.original_query_weight <= 1.0:
            raise BadArgument(f"RM3 takes at least one term and document and a weight in [0, 1], got {self}")


class _Searcher:
    kind: Kind

    def __init__(
        self, index: str | Path, *, text_index: str | Path | Mapping[str, str] | Texts | None, threads: int
    ) -> None:
        if threads < 1:
            raise BadArgument(f"threads must be at least 1, got {threads}")
        self.name = str(index)
        self.index = resolve_index(index, self.kind)
        self.threads = threads
        self.manifest = _manifest_of(self.index, self.kind)
        self._texts = None if text_index is None else open_texts(text_index)

    def texts(self, doc_ids: Iterable[str]) -> dict[str, str]:
        """The texts of those of `doc_ids` that have one, by id: from the text index if given, else from this one."""
        if self._texts is not None:
            return self._texts.texts(doc_ids)
        return self._own_texts(doc_ids)

    def text(self, doc_id: str) -> str | None:
        """The text of one document; None if it has none."""
        return self.texts([doc_id]).get(doc_id)

    def _own_texts(self, doc_ids: Iterable[str]) -> dict[str, str]:
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Everything the results depend on, as plain values."""
        made = {key: value for key, value in self.manifest.items() if key in _MADE}
        return {"kind": self.kind, "index": self.name, "index_manifest": made or None}

    def close(self) -> None:
        """Let files and memory go."""
        close = getattr(self._texts, "close", None)
        if close is not None and isinstance(self._texts, LuceneTexts):
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _LuceneSearcher(_Searcher):
    """Searching a Lucene index: queries are built in Java, hits come back as one JSON text per query."""

    def __init__(
        self, index: str | Path, *, text_index: str | Path | Mapping[str, str] | Texts | None, threads: int
    ) -> None:
        super().__init__(index, text_index=text_index, threads=threads)
        self._reader = _open_reader(self.index)
        _check_ids(self._reader, self.index)
        self._searcher = java_class("org.apache.lucene.search.IndexSearcher")(self._reader)
        self._generator = java_class("io.anserini.search.query.BagOfWordsQueryGenerator")()
        self._sort, self._json = _sort_by_score_and_id(), _hits_as_json()
        self._ids: dict[int, str] = {}
        self._all = max(1, int(self._reader.maxDoc()))
        self._closed = False

    @property
    def documents(self) -> int:
        """How many documents the index holds."""
        return int(self._reader.numDocs())

    def _each(self, ask: Callable[[Any, int], list[Hit]], queries: Sequence[Any], k: int) -> list[list[Hit]]:
        if k < 1:
            raise BadArgument(f"at least one hit must be asked for, got k={k}")
        if self._closed:
            raise PdRerankError(f"the searcher on {self.name} is closed")
        k = min(k, self._all)
        if self.threads == 1 or len(queries) < 2:
            return [ask(query, k) for query in queries]

        def in_thread(share: Sequence[Any]) -> list[list[Hit]]:
            with java_thread():
                return [ask(query, k) for query in share]

        shares = [queries[i :: self.threads] for i in range(self.threads)]
        with ThreadPoolExecutor(self.threads) as pool:
            found = list(pool.map(in_thread, shares))
        return [found[i % self.threads][i // self.threads] for i in range(len(queries))]

    def _hits(self, query: Any, k: int) -> list[Hit]:
        top = self._searcher.search(query, k, self._sort, True)
        hits = []
        for found in json.loads(self._json.writeValueAsString(top))["scoreDocs"]:
            doc_id = self._ids.get(found["doc"])
            if doc_id is None:
                word = found["fields"][1]
                start = word["offset"]
                doc_id = base64.b64decode(word["bytes"])[start : start + word["length"]].decode("utf-8")
                self._ids[found["doc"]] = doc_id
            hits.append(Hit(doc_id, _single(found["score"])))
        return hits

    def _own_texts(self, doc_ids: Iterable[str]) -> dict[str, str]:
        return _stored_texts(self._reader, doc_ids)

    def close(self) -> None:
        """Close the index; searching it afterwards is an error."""
        super().close()
        if not self._closed:
            self._closed = True
            self._reader.close()


class BM25Searcher(_LuceneSearcher):
    """BM25 over a Lucene index, with Pyserini's analyzer and defaults (k1 0.9, b 0.4).

    `rm3` adds pseudo-relevance feedback (True: its defaults), for which the index must hold document vectors; its
    scores are rounded by Anserini. `language` chooses the analyzer: left out, the one in the index's manifest, else
    English. Several `threads` share the queries of one call. A query without a word that the analyzer keeps
    (stop words only, an emoji alone, nothing at all) finds nothing unless the index holds it.
    """

    kind: Kind = "bm25"

    def __init__(
        self,
        index: str | Path,
        *,
        k1: float = 0.9,
        b: float = 0.4,
        rm3: RM3 | bool | None = None,
        language: str | None = None,
        threads: int = 1,
        text_index: str | Path | Mapping[str, str] | Texts | None = None,
    ) -> None:
        if k1 < 0 or not 0 <= b <= 1:
            raise BadArgument(f"BM25 takes k1 of at least 0 and b in [0, 1], got k1={k1}, b={b}")
        super().__init__(index, text_index=text_index, threads=threads)
        self.k1, self.b = float(k1), float(b)
        self.language = language or self._made_for
        self.rm3 = RM3() if rm3 is True else rm3 or None
        self._simple: Any = None
        self._analyzer = self._set_up()

    @property
    def _made_for(self) -> str:
        return str(self.manifest.get("language", "en"))

    def _set_up(self) -> Any:
        check_language(self.language)
        if self.manifest and self.language != self._made_for:
            logger.warning(
                "%s was made with the analyzer of '%s' and is searched with that of '%s': words may not meet",
                self.index,
                self._made_for,
                self.language,
            )
        similarity = java_class("org.apache.lucene.search.similarities.BM25Similarity")(self.k1, self.b)
        self._searcher.setSimilarity(similarity)
        simple = java_class("io.anserini.search.SimpleSearcher")(str(self.index))
        if self.language != "en":
            simple.set_language(self.language)
        analyzer = simple.get_analyzer()
        if self.rm3 is None:
            simple.close()
            return analyzer
        if self._reader.getTermVectors(0) is None:
            simple.close()
            self.close()
            raise BadArgument(
                f"RM3 needs document vectors, which the index {self.name} does not hold; index again with "
                "'pd-rerank index --kind bm25' (or Pyserini's --storeDocvectors), or leave RM3 out"
            )
        simple.set_bm25(self.k1, self.b)
        simple.set_rm3(None, self.rm3.fb_terms, self.rm3.fb_docs, self.rm3.original_query_weight, False, True)
        self._simple = simple
        return analyzer

    def search(self, queries: Sequence[str], k: int = 100) -> list[list[Hit]]:
        """The best `k` documents of each query, best first; an empty list where nothing matches."""
        return self._each(self._search, list(map(_spoken, _listed(queries))), k)

    def _search(self, query: str, k: int) -> list[Hit]:
        if self._simple is None:
            return self._hits(self._generator.buildQuery(_FIELD, self._analyzer, query), k)
        found = [Hit(str(hit.docid), float(hit.score)) for hit in self._simple.search(query, k)]
        return sorted(found, key=lambda hit: (-hit.score, hit.doc_id))

    def describe(self) -> dict[str, Any]:
        """Everything the results depend on, as plain values."""
        own = {"k1": self.k1, "b": self.b, "rm3": self.rm3 and asdict(self.rm3), "language": self.language}
        return {**super().describe(), **own}

    def close(self) -> None:
        """Close the index; searching it afterwards is an error."""
        super().close()
        if self._simple is not None:
            self._simple.close()
            self._simple = None


class _Encoded:
    """The query encoder of an index, compared with the one its manifest names."""

    def __init__(self, searcher: _Searcher, encoder: Encoder | str | Path | None, settings: Mapping[str, Any]) -> None:
        self._recorded: dict[str, Any] = dict(searcher.manifest.get("encoder") or {})
        self._given = encoder
        self._settings = settings
        self._searcher = searcher
        self._encoder: Encoder | None = None

    def get(self) -> Encoder:
        """Load on first use, so that an index can be opened for its own sake, or for vectors made elsewhere."""
        if self._encoder is None:
            self._encoder = self._load()
            self._compare(self._encoder)
        return self._encoder

    def describe(self) -> dict[str, Any]:
        """The encoder's description; as long as it is not loaded, what is recorded or given of it."""
        if self._encoder is not None:
            return self._encoder.describe()
        if self._given is not None and not isinstance(self._given, str | Path):
            return self._given.describe()
        return {**self._recorded, **({"name": str(self._given)} if self._given else {})}

    def _load(self) -> Encoder:
        kind: Literal["dense", "sparse"] = "dense" if self._searcher.kind == "dense" else "sparse"
        if self._given is not None and not isinstance(self._given, str | Path):
            return self._given
        name = self._given or self._recorded.get("name") or _encoder_of_index(self._searcher.name)
        if name is None:
            raise BadArgument(f"{self._searcher.name} does not say which encoder made it; give encoder")
        names = ("pooling", "l2_norm", "query_prefix", "max_length", "max_terms", "revision")
        recorded = {key: self._recorded[key] for key in names if key in self._recorded}
        if self._given is not None and str(self._given) != self._recorded.get("name"):
            recorded = {}
        given = {key: value for key, value in self._settings.items() if value is not None}
        return load_encoder(name, kind=kind, **{**recorded, **given})

    def _compare(self, encoder: Encoder) -> None:
        if encoder.kind != ("dense" if self._searcher.kind == "dense" else "sparse"):
            what = f"{self._searcher.name} is a {self._searcher.kind} index"
            raise ModelMismatch(f"{what}, '{encoder.name}' is a {encoder.kind} encoder")
        if not self._recorded:
            return
        here = encoder.describe()
        keys = ("weights_sha256", "revision", "pooling", "l2_norm", "dimension")
        differing = [key for key in keys if key in self._recorded and key in here and here[key] != self._recorded[key]]
        if differing:
            there = self._recorded
            shown = "; ".join(f"{key} {_short(there[key])} there, {_short(here[key])} here" for key in differing)
            raise ModelMismatch(
                f"{self._searcher.name} was made with another encoder than '{encoder.name}': {shown}; leave it out "
                "to use the recorded one"
            )


class ImpactSearcher(_LuceneSearcher):
    """Learned-sparse search over a Lucene impact index: the dot product of whole-numbered query and document weights.

    `encoder` (name, folder, or an object with `encode`) is loaded at the first search; left out, the manifest's.
    Query weights are multiplied by `quantise` (left out: the manifest's, else 100) and rounded. Terms the index does
    not know count nothing. Unlike Pyserini's, this searcher keeps a term that is in every document.
    """

    kind: Kind = "sparse"

    def __init__(
        self,
        index: str | Path,
        encoder: Encoder | str | Path | None = None,
        *,
        quantise: int | None = None,
        threads: int = 1,
        text_index: str | Path | Mapping[str, str] | Texts | None = None,
        **encoder_settings: Any,
    ) -> None:
        super().__init__(index, text_index=text_index, threads=threads)
        self.quantise = quantise or int(self.manifest.get("quantise", 100))
        self._encoded = _Encoded(self, encoder, encoder_settings)
        self._searcher.setSimilarity(java_class("io.anserini.search.similarity.ImpactSimilarity")())
        self._map, self._float = java_class("java.util.HashMap"), java_class("java.lang.Float")

    def search(self, queries: Sequence[str], k: int = 100) -> list[list[Hit]]:
        """The best `k` documents of each query, best first; an empty list where nothing matches."""
        weights = self._encoded.get().encode(_listed(queries), side="query")
        return self.search_weights([quantised(row, self.quantise) for row in weights], k)

    def search_weights(self, queries: Sequence[Mapping[str, int]], k: int = 100) -> list[list[Hit]]:
        """The best `k` documents for each query given as whole weights by term, as a Pyserini encoder gives them."""
        return self._each(self._search, queries, k)

    def _search(self, query: Mapping[str, int], k: int) -> list[Hit]:
        if not query:
            return []
        terms = self._map()
        for term, weight in query.items():
            terms.put(_spoken(term), self._float(float(weight)))
        return self._hits(self._generator.buildQuery(_FIELD, terms), k)

    def describe(self) -> dict[str, Any]:
        """Everything the results depend on, as plain values; of the encoder once it has searched."""
        return {**super().describe(), "quantise": self.quantise, "encoder": self._encoded.describe()}


class DenseSearcher(_Searcher):
    """Vector search over a Faiss index in Pyserini's shape: a folder with `index` and `docid`.

    `encoder` (name, folder, or an object with `encode`) is loaded at the first search; left out, the manifest's.
    `ef_search` widens the search of an HNSW index. Faiss has no texts: give `text_index`. Scores are inner products, or
    negative distances where the index measures L2. A query may score differently in the seventh digit beside other
    queries, as Faiss multiplies many at once; of equal vectors at the cut, those that were indexed first are kept.
    """

    kind: Kind = "dense"

    def __init__(
        self,
        index: str | Path,
        encoder: Encoder | str | Path | None = None,
        *,
        ef_search: int | None = None,
        threads: int = 1,
        text_index: str | Path | Mapping[str, str] | Texts | None = None,
        **encoder_settings: Any,
    ) -> None:
        faiss = need("faiss", extra="pools", purpose="dense indexes are read with Faiss")
        super().__init__(index, text_index=text_index, threads=threads)
        try:
            self._faiss: Any = faiss.read_index(str(self.index / "index"))
        except RuntimeError as error:
            raise InvalidData(f"{self.index / 'index'} is not a Faiss index, or damaged: {error}") from error
        lines = (self.index / "docid").read_text(encoding="utf-8").removesuffix("\n").split("\n")
        self.doc_ids = [line.rstrip() for line in lines if line]
        if len(self.doc_ids) != self._faiss.ntotal:
            raise InvalidData(
                f"{self.index}: {self._faiss.ntotal} vectors in 'index' but {len(self.doc_ids)} ids in 'docid'; "
                "make it again"
            )
        self._sign = 1.0 if self._faiss.metric_type == faiss.METRIC_INNER_PRODUCT else -1.0
        if ef_search is not None:
            if not hasattr(self._faiss, "hnsw"):
                raise BadArgument(f"ef_search means nothing to the index {self.name}, which is not HNSW; leave it out")
            self._faiss.hnsw.efSearch = ef_search
        self.ef_search = ef_search
        self._encoded = _Encoded(self, encoder, encoder_settings)

    @property
    def documents(self) -> int:
        """How many documents the index holds."""
        return len(self.doc_ids)

    def search(self, queries: Sequence[str], k: int = 100) -> list[list[Hit]]:
        """The best `k` documents of each query, best first."""
        return self.search_vectors(self._encoded.get().encode(_listed(queries), side="query"), k)

    def search_vectors(self, vectors: Vectors, k: int = 100) -> list[list[Hit]]:
        """The best `k` documents for each row of `vectors`, float32 (queries, dimension)."""
        import faiss

        if k < 1:
            raise BadArgument(f"at least one hit must be asked for, got k={k}")
        if self._faiss is None:
            raise PdRerankError(f"the searcher on {self.name} is closed")
        rows = np.ascontiguousarray(vectors, dtype=np.float32)
        if rows.ndim != 2 or rows.shape[1] != self._faiss.d:
            shape = "×".join(map(str, rows.shape))
            raise ModelMismatch(
                f"{self.name} holds vectors of {self._faiss.d} dimensions, queries come as {shape}; "
                "search with the encoder the index was made with"
            )
        before = faiss.omp_get_max_threads()
        faiss.omp_set_num_threads(self.threads)
        try:
            found: list[list[Hit]] = []
            for start in range(0, len(rows), _BLOCK):
                scores, places = self._faiss.search(rows[start : start + _BLOCK], min(k, max(1, self.documents)))
                found += [self._ordered(s * self._sign, p) for s, p in zip(scores, places, strict=True)]
            return found
        finally:
            faiss.omp_set_num_threads(before)

    def _ordered(self, scores: npt.NDArray[np.float32], places: npt.NDArray[np.int64]) -> list[Hit]:
        real = places >= 0  # HNSW fills up with -1 where it found too few
        hits = [Hit(self.doc_ids[i], s) for i, s in zip(places[real].tolist(), scores[real].tolist(), strict=True)]
        return sorted(hits, key=lambda hit: (-hit.score, hit.doc_id))

    def _own_texts(self, doc_ids: Iterable[str]) -> dict[str, str]:
        raise BadArgument(f"a Faiss index ({self.name}) has no texts; give text_index, a Lucene index or a corpus file")

    def describe(self) -> dict[str, Any]:
        """Everything the results depend on, as plain values; of the encoder once it has searched."""
        return {**super().describe(), "ef_search": self.ef_search, "encoder": self._encoded.describe()}

    def close(self) -> None:
        """Let the vectors go; searching afterwards is an error."""
        super().close()
        self._faiss = None


# -- indexes ------------------------------------------------------------------------------------------------


def resolve_index(index: str | Path, kind: Kind) -> Path:
    """The folder of an index: the one named, or that of one of Pyserini's prebuilt indexes, fetched if need be.

    `MissingResource` where the folder is not there or is an index of another sort, where a prebuilt name is unknown
    (near names are offered), and where it would have to be fetched and cannot be.
    """
    folder = Path(index).expanduser()
    if folder.is_dir():
        return _checked(folder, kind)
    word = str(index)
    if folder.is_file():
        raise MissingResource(f"{word} is a file; an index is a folder")
    if isinstance(index, Path) or any(mark in word for mark in "/\\~") or word.startswith("."):
        raise MissingResource(f"no index folder {word}; make it with 'pd-rerank index', or mend the path")
    return _prebuilt(word, kind)


_TABLES: dict[Kind, str] = {"bm25": "TF_INDEX_INFO", "dense": "FAISS_INDEX_INFO", "sparse": "IMPACT_INDEX_INFO"}


def prebuilt_names(kind: Kind) -> list[str]:
    """The names of Pyserini's prebuilt indexes of a kind, as the installed release knows them; starts Java."""
    return sorted(getattr(pyserini_module("pyserini.prebuilt_index_info"), _TABLES[kind]))


def _prebuilt(name: str, kind: Kind) -> Path:
    import sys

    known = prebuilt_names(kind)
    if name not in known:
        for other in get_args(Kind):
            if other != kind and name in prebuilt_names(other):
                raise BadArgument(f"the prebuilt index '{name}' is of kind {other}, not {kind}")
        near = difflib.get_close_matches(name, known, n=5)
        hint = f"did you mean {', '.join(near)}?" if near else f"this release has {len(known)} of kind {kind}"
        raise MissingResource(f"'{name}' is neither a folder nor a prebuilt index of this Pyserini; {hint}")
    util = pyserini_module("pyserini.util")
    entry = getattr(pyserini_module("pyserini.prebuilt_index_info"), _TABLES[kind])[name]
    if not util.check_downloaded(name):
        size = entry.get("size compressed (bytes)")
        logger.info("fetching the prebuilt index '%s'%s", name, f", {int(size) / 1e9:.1f} GB" if size else "")
    try:
        with redirect_stdout(sys.stderr):
            return _checked(Path(util.download_prebuilt_index(name, verbose=False)), kind)
    except (ValueError, OSError, AssertionError) as error:
        if isinstance(error, PdRerankError):
            raise
        raise MissingResource(
            f"the prebuilt index '{name}' is not in {util.get_cache_home()} and could not be fetched ({error}); where "
            f"there is a network, fetch and unpack {entry['urls'][0]} and give its folder"
        ) from error


def _checked(folder: Path, kind: Kind) -> Path:
    lucene = any(folder.glob("segments_*"))
    faiss = (folder / "index").is_file() and (folder / "docid").is_file()
    if lucene if kind != "dense" else faiss:
        return folder
    if lucene or faiss:
        raise MissingResource(
            f"{folder} is a {'Lucene' if lucene else 'Faiss'} index, kind {kind} needs a "
            f"{'Faiss' if lucene else 'Lucene'} one"
        )
    wanted = "files 'index' and 'docid' (Faiss)" if kind == "dense" else "file segments_… (Lucene)"
    raise MissingResource(f"{folder} is no index of kind {kind}: it has no {wanted}")


def _manifest_of(folder: Path, kind: Kind) -> dict[str, Any]:
    """What `pd-rerank index` wrote beside the index; empty for an index of other making."""
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    record = read_json(path)
    if not isinstance(record, dict) or not str(record.get("format", "")).startswith("pd_rerank index"):
        return {}
    if record.get("kind") != kind:
        raise BadArgument(f"{folder} was indexed as {record.get('kind')}; open it as that, not as {kind}")
    return record


_INDEX_ENCODERS = {
    "bge-base-en-v1.5": "BAAI/bge-base-en-v1.5",
    "splade-pp-ed": "naver/splade-cocondenser-ensembledistil",
    "splade-pp-sd": "naver/splade-cocondenser-selfdistil",
    "splade-v3": "naver/splade-v3",
    "contriever": "facebook/contriever",
    "contriever-msft": "facebook/contriever-msmarco",
}
"""The encoder that made a prebuilt index, by the word after the last dot-separated corpus name."""


def _encoder_of_index(name: str) -> str | None:
    for word, encoder in _INDEX_ENCODERS.items():
        if name.endswith(f".{word}"):
            return encoder
    return None


def _open_reader(folder: Path) -> Any:
    start_java()
    import jnius

    # a long query, pasted text for one, has more words than Lucene's default of 1,024 allows
    java_class("org.apache.lucene.search.IndexSearcher").setMaxClauseCount(1 << 20)
    try:
        return java_class("io.anserini.index.IndexReaderUtils").getReader(str(folder))
    except jnius.JavaException as error:
        raise InvalidData(f"{folder} cannot be read as a Lucene index: {_first_line(error)}") from error


def _check_ids(reader: Any, folder: Path) -> None:
    """Refuse an index whose ids cannot be sorted by: ties would fall as they may."""
    field = java_class("org.apache.lucene.index.FieldInfos").getMergedFieldInfos(reader).fieldInfo("id")
    if field is None or str(field.getDocValuesType().toString()) != "BINARY":
        raise InvalidData(
            f"{folder} is no index of this Pyserini's making: its ids are not stored for sorting (indexes of Lucene 8 "
            "lack that); index the corpus again with 'pd-rerank index'"
        )


def _sort_by_score_and_id() -> Any:
    field = java_class("org.apache.lucene.search.SortField")
    by_id = field("id", java_class("org.apache.lucene.search.SortField$Type").STRING_VAL)
    return java_class("org.apache.lucene.search.Sort")(field.FIELD_SCORE, by_id)


def _hits_as_json() -> Any:
    """A writer of Lucene's results as JSON: one text crosses from Java instead of several calls per hit."""
    mapper = java_class("com.fasterxml.jackson.databind.ObjectMapper")()
    find, true = java_class("java.lang.Class").forName, java_class("java.lang.Boolean")(True)
    for name in ("org.apache.lucene.search.SortField", "org.apache.lucene.search.TotalHits"):
        mapper.configOverride(find(name)).setIsIgnoredType(true)
    return mapper


def _stored_texts(reader: Any, doc_ids: Iterable[str]) -> dict[str, str]:
    utils = java_class("io.anserini.index.IndexReaderUtils")
    texts: dict[str, str] = {}
    for doc_id in doc_ids:
        raw = utils.documentRaw(reader, doc_id)
        text = utils.documentContents(reader, doc_id) if raw is None else _text_of(raw, doc_id)
        if text is not None and text.strip():
            texts[doc_id] = text
    return texts


def _text_of(raw: str, doc_id: str) -> str | None:
    """The text in a stored record: of its JSON object where it is one, else the record itself."""
    if not raw.lstrip().startswith("{"):
        return raw
    try:
        record = json.loads(raw)
    except ValueError:
        return raw
    try:
        return document_text(record, where=f"stored document '{doc_id}'")
    except InvalidData:
        return None


def _listed(queries: Sequence[str]) -> Sequence[str]:
    if isinstance(queries, str):
        raise BadArgument("queries is a list of texts; for one query give a list with one")
    return queries


def _spoken(text: str) -> str:
    """Text as Java can take it: half a surrogate pair becomes a question mark."""
    return text.encode("utf-8", "replace").decode()


def _single(score: float) -> float:
    """Java prints the shortest decimal of a single-precision score; this is the score itself."""
    return float(np.float32(score))


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 50 else f"{text[:46]}…"


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
