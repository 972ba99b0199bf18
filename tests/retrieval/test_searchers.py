"""Searchers score as their formulas say, order ties by id, and take any query."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pd_rerank.errors import BadArgument, InvalidData, MissingResource, ModelMismatch, PdRerankError
from pd_rerank.retrieval.encoders import PyseriniQuery
from pd_rerank.retrieval.indexing import HNSW, index_bm25, index_dense, index_sparse
from pd_rerank.retrieval.java import pyserini_module
from pd_rerank.retrieval.searchers import (
    RM3,
    BM25Searcher,
    CorpusTexts,
    DenseSearcher,
    Hit,
    ImpactSearcher,
    LuceneTexts,
    fetch_texts,
    open_searcher,
    open_texts,
    resolve_index,
)
from tests.retrieval.tiny_encoders import CORPUS, write_corpus, write_lines
from tests.retrieval.toys import ToyDense, ToySparse

pytest.importorskip("faiss", reason="searchers need the extra 'pools'")

ODD = ["", "   ", "the of and", "zzzqqq", "\U0001f926", "half \ud800", "a\x00b", '"(^~ AND *', "x" * 50_000]
"""Queries that find nothing, and must do so without a fuss."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("indexes")
    write_corpus(made / "c.jsonl")
    index_dense(made / "c.jsonl", made / "dense", encoder=ToyDense())
    return made


@pytest.fixture(scope="module")
def lucene(folder: Path, started_java: None) -> Path:
    index_bm25(folder / "c.jsonl", folder / "bm25")
    index_sparse(folder / "c.jsonl", folder / "sparse", encoder=ToySparse())
    return folder


# -- BM25 ---------------------------------------------------------------------------------------------------


@pytest.mark.java
def test_bm25_scores_are_those_of_the_formula(tmp_path: Path) -> None:
    docs = {"a": "cat cat fish", "b": "cat bird tree river", "c": "tree"}
    index_bm25(write_corpus(tmp_path / "c.jsonl", docs), tmp_path / "ix")
    k1, b, mean_length = 1.2, 0.75, (3 + 4 + 1) / 3
    idf = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))

    def score(times: int, length: int) -> float:
        return idf * times / (times + k1 * (1 - b + b * length / mean_length))

    with BM25Searcher(tmp_path / "ix", k1=k1, b=b) as searcher:
        (hits,) = searcher.search(["cat"])
    assert [h.doc_id for h in hits] == ["a", "b"]
    assert [h.score for h in hits] == pytest.approx([score(2, 3), score(1, 4)], rel=1e-6)


@pytest.mark.java
def test_equal_documents_score_equal_and_stand_in_order_of_id(tmp_path: Path) -> None:
    docs = {f"d{(37 * i) % 120}": "green tree" for i in range(120)} | {"other": "blue tree"}
    index_bm25(write_corpus(tmp_path / "c.jsonl", docs), tmp_path / "ix")
    with BM25Searcher(tmp_path / "ix") as searcher:
        (hits,) = searcher.search(["green"], 200)
        assert len({h.score for h in hits}) == 1
        assert [h.doc_id for h in hits] == sorted(d for d in docs if d != "other")
        assert searcher.search(["green"], 5) == [hits[:5]]


@pytest.mark.java
def test_ids_stay_strings_and_texts_come_back_as_they_were(lucene: Path) -> None:
    with BM25Searcher(lucene / "bm25") as searcher:
        assert {h.doc_id for h in searcher.search(["slow dogs"])[0]} == {"007", "NA", "d1"}
        assert searcher.search(["\U0001f600 北京"])[0][0].doc_id == "007"
        assert searcher.texts(["007", "NA", "nope"]) == {"007": CORPUS["007"], "NA": CORPUS["NA"]}
        assert searcher.text("nope") is None


@pytest.mark.java
@pytest.mark.parametrize("rm3", [None, True])
def test_queries_that_match_nothing_find_nothing(lucene: Path, rm3: bool | None) -> None:
    with BM25Searcher(lucene / "bm25", rm3=rm3) as searcher:
        assert searcher.search(ODD, 3) == [[]] * len(ODD)
        assert searcher.search([], 3) == []


@pytest.mark.java
def test_a_query_of_thousands_of_words_is_searched(lucene: Path) -> None:
    long = " ".join(f"word{i}" for i in range(5000)) + " river"
    with BM25Searcher(lucene / "bm25") as searcher:
        assert {h.doc_id for h in searcher.search([long])[0]} == {"d2", "d3"}


@pytest.mark.java
@pytest.mark.parametrize("rm3", [None, True])
def test_more_hits_than_any_index_has_may_be_asked_for(lucene: Path, rm3: bool | None) -> None:
    with BM25Searcher(lucene / "bm25", rm3=rm3) as searcher:
        assert searcher.search(["slow dogs"], 3_000_000_000) == searcher.search(["slow dogs"], len(CORPUS))


@pytest.mark.java
def test_threads_change_nothing(lucene: Path) -> None:
    queries = [*CORPUS.values(), *ODD] * 5
    with BM25Searcher(lucene / "bm25") as one, BM25Searcher(lucene / "bm25", threads=4) as four:
        assert one.search(queries, 4) == four.search(queries, 4)


@pytest.mark.java
def test_rm3_finds_documents_that_share_no_word_with_the_query(tmp_path: Path) -> None:
    filler = {f"f{i}": f"filler{i} stone{i % 3} wall{i % 4}" for i in range(30)}
    docs = {"a": "lion savanna prey", "b": "lion savanna herd", "c": "savanna herd prey"} | filler
    index_bm25(write_corpus(tmp_path / "c.jsonl", docs), tmp_path / "ix")
    with BM25Searcher(tmp_path / "ix") as plain, BM25Searcher(tmp_path / "ix", rm3=RM3(fb_docs=2)) as fed:
        assert {h.doc_id for h in plain.search(["lion"])[0]} == {"a", "b"}
        assert {h.doc_id for h in fed.search(["lion"])[0]} == {"a", "b", "c"}
        assert fed.describe()["rm3"] == {"fb_terms": 10, "fb_docs": 2, "original_query_weight": 0.5}


@pytest.mark.java
def test_rm3_on_an_index_without_document_vectors_is_refused(lucene: Path) -> None:
    with pytest.raises(BadArgument, match="RM3 needs document vectors"):
        BM25Searcher(_plain_lucene(lucene), rm3=True)


@pytest.mark.java
def test_an_index_that_stores_no_text_has_none_and_a_text_index_helps(lucene: Path) -> None:
    bare = _plain_lucene(lucene)
    with BM25Searcher(bare) as searcher:
        assert [h.doc_id for h in searcher.search(["river"])[0]] == ["x"]
        assert searcher.texts(["x"]) == {}
        with pytest.raises(
            InvalidData, match=r"1 of 1 documents have no text .* it stores no texts: give a text index"
        ):
            fetch_texts(searcher, ["x"])
    with BM25Searcher(bare, text_index={"x": "a text"}) as searcher:
        assert searcher.text("x") == "a text"


def _plain_lucene(folder: Path) -> Path:
    """An index with nothing stored, as Pyserini makes by default."""
    from pd_rerank.retrieval.java import java_class

    target = folder / "plain"
    if not target.exists():
        (folder / "plain-docs").mkdir()
        write_lines(folder / "plain-docs" / "d.jsonl", ['{"id": "x", "contents": "a river"}'])
        options = java_class("io.anserini.index.IndexCollection$Args")()
        options.collectionClass, options.generatorClass = "JsonCollection", "DefaultLuceneDocumentGenerator"
        options.input, options.index, options.threads = str(folder / "plain-docs"), str(target), 1
        java_class("io.anserini.index.IndexCollection")(options).run()
    return target


@pytest.mark.java
def test_pyserinis_own_searchers_read_the_indexes_and_agree(lucene: Path) -> None:
    queries = ["slow dogs", "the river bank", "money"]
    search = pyserini_module("pyserini.search.lucene")
    faiss_search = pyserini_module("pyserini.search.faiss")
    theirs = search.LuceneSearcher(str(lucene / "bm25"))
    ours = BM25Searcher(lucene / "bm25")
    for query, hits in zip(queries, ours.search(queries), strict=True):
        _agree(hits, [(h.docid, h.score) for h in theirs.search(query, 100)], 1e-4)
    dense = ToyDense()
    theirs = faiss_search.FaissSearcher(str(lucene / "dense"), PyseriniQuery(dense))
    for query, hits in zip(queries, DenseSearcher(lucene / "dense", dense).search(queries), strict=True):
        want = [(h.docid, float(h.score)) for h in theirs.search(query, 5)]
        _agree(hits, sorted(want, key=lambda hit: (-hit[1], hit[0])), 1e-6)
    theirs = search.LuceneImpactSearcher(str(lucene / "sparse"), PyseriniQuery(ToySparse()))
    for query, hits in zip(queries, ImpactSearcher(lucene / "sparse", ToySparse()).search(queries), strict=True):
        _agree(hits, [(h.docid, h.score) for h in theirs.search(query, 100)], 1e-2)
    ours.close()


def _agree(ours: list[Hit], theirs: list[tuple[str, float]], tolerance: float) -> None:
    assert [h.doc_id for h in ours] == [doc_id for doc_id, _ in theirs]
    assert [h.score for h in ours] == pytest.approx([score for _, score in theirs], abs=tolerance)


# -- impacts ------------------------------------------------------------------------------------------------


@pytest.mark.java
def test_impact_scores_are_dot_products_of_whole_weights(lucene: Path) -> None:
    with ImpactSearcher(lucene / "sparse", ToySparse()) as searcher:
        found = searcher.search(["the cat"], 5)[0]
    # documents weigh 50 per occurrence, a query's word 75 (0.5 + 0.254 = 0.754, times 100, rounded)
    the_and_cat = {"d1": (3, 1), "NA": (2, 1), "d3": (2, 0), "d2": (1, 0)}
    assert found == [(doc_id, 75 * 50 * (the + cat)) for doc_id, (the, cat) in the_and_cat.items()]


@pytest.mark.java
def test_terms_the_index_does_not_know_count_nothing(lucene: Path) -> None:
    with ImpactSearcher(lucene / "sparse", ToySparse()) as searcher:
        known, mixed, none = searcher.search(["river", "river zebra \U0001f926", "zebra"], 5)
        assert known == mixed
        assert none == []
        assert searcher.search(ODD[:5], 3)[:2] == [[], []]


# -- dense --------------------------------------------------------------------------------------------------


def test_dense_scores_are_inner_products_best_first(folder: Path) -> None:
    encoder = ToyDense()
    with DenseSearcher(folder / "dense", encoder) as searcher:
        queries = ["slow dogs", "", "river"]
        found = searcher.search(queries, 99)
    vectors = dict(zip(CORPUS, ToyDense().encode(list(CORPUS.values())), strict=True))
    for query, hits in zip(encoder.encode(queries), found, strict=True):
        want = sorted(((-float(v @ query), d) for d, v in vectors.items()))
        assert [h.score for h in hits] == pytest.approx([-s for s, _ in want], abs=1e-6)
        assert len(hits) == len(CORPUS)
        assert [(-h.score, h.doc_id) for h in hits] == sorted((-h.score, h.doc_id) for h in hits)


def test_ties_of_vectors_stand_in_order_of_id(tmp_path: Path) -> None:
    docs = {f"d{i}": "same words" for i in (3, 1, 2)}
    index_dense(write_corpus(tmp_path / "c.jsonl", docs), tmp_path / "ix", encoder=ToyDense())
    with DenseSearcher(tmp_path / "ix", ToyDense()) as searcher:
        assert [h.doc_id for h in searcher.search(["words"], 3)[0]] == ["d1", "d2", "d3"]


def test_a_graph_finds_what_the_flat_index_finds_on_few_documents(folder: Path, tmp_path: Path) -> None:
    index_dense(folder / "c.jsonl", tmp_path / "ix", encoder=ToyDense(), hnsw=HNSW(m=4, ef_construction=40))
    with (
        DenseSearcher(folder / "dense", ToyDense()) as flat,
        DenseSearcher(tmp_path / "ix", ToyDense(), ef_search=50) as graph,
    ):
        for ours, theirs in zip(flat.search(["slow dogs"], 5), graph.search(["slow dogs"], 5), strict=True):
            assert [h.doc_id for h in ours] == [h.doc_id for h in theirs]
    with pytest.raises(BadArgument, match="not HNSW"):
        DenseSearcher(folder / "dense", ToyDense(), ef_search=50)


def test_an_l2_index_gives_negative_distances(tmp_path: Path) -> None:
    import faiss

    vectors = np.eye(3, dtype=np.float32)
    index = faiss.IndexFlatL2(3)
    index.add(vectors)
    (tmp_path / "ix").mkdir()
    faiss.write_index(index, str(tmp_path / "ix" / "index"))
    (tmp_path / "ix" / "docid").write_text("b\na\nc\n")
    with DenseSearcher(tmp_path / "ix") as searcher:
        assert searcher.search_vectors(vectors[:1], 3) == [[("b", 0.0), ("a", -2.0), ("c", -2.0)]]


def test_an_encoder_that_did_not_make_the_index_is_refused(folder: Path) -> None:
    with pytest.raises(ModelMismatch, match="another encoder than 'other': dimension 8 there, 4 here"):
        DenseSearcher(folder / "dense", ToyDense(4, name="other")).search(["a"])
    with pytest.raises(ModelMismatch, match="is a dense index, 'toy-sparse' is a sparse encoder"):
        DenseSearcher(folder / "dense", ToySparse()).search(["a"])
    with pytest.raises(ModelMismatch, match="vectors of 8 dimensions, queries come as 1×4"):
        DenseSearcher(folder / "dense").search_vectors(np.zeros((1, 4), dtype=np.float32))


def test_an_index_that_names_no_encoder_asks_for_one(folder: Path, tmp_path: Path) -> None:
    for name in ("index", "docid"):
        (tmp_path / name).write_bytes((folder / "dense" / name).read_bytes())
    with pytest.raises(BadArgument, match="does not say which encoder made it"):
        DenseSearcher(tmp_path).search(["a"])


def test_a_damaged_faiss_folder_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "index").write_bytes((folder / "dense" / "index").read_bytes())
    (tmp_path / "docid").write_text("d1\nd2\n")
    with pytest.raises(InvalidData, match="5 vectors in 'index' but 2 ids in 'docid'"):
        DenseSearcher(tmp_path)
    (tmp_path / "index").write_bytes(b"not an index")
    with pytest.raises(InvalidData, match="not a Faiss index"):
        DenseSearcher(tmp_path)


# -- texts --------------------------------------------------------------------------------------------------


def test_a_faiss_index_takes_texts_from_a_corpus_file_or_asks_for_one(folder: Path) -> None:
    with DenseSearcher(folder / "dense", ToyDense(), text_index=folder / "c.jsonl") as searcher:
        assert searcher.texts(["d1", "nope"]) == {"d1": CORPUS["d1"]}
    with pytest.raises(BadArgument, match="has no texts; give text_index"):
        DenseSearcher(folder / "dense", ToyDense()).text("d1")


@pytest.mark.java
def test_texts_from_a_lucene_index_and_from_its_corpus_are_the_same(lucene: Path) -> None:
    stored, read = open_texts(lucene / "bm25"), open_texts(str(lucene / "c.jsonl"))
    assert isinstance(stored, LuceneTexts)
    assert isinstance(read, CorpusTexts)
    assert stored.texts(CORPUS) == read.texts(CORPUS) == CORPUS
    stored.close()


def test_a_corpus_file_that_is_not_there_is_named_as_one() -> None:
    with pytest.raises(MissingResource, match=r"no corpus file gone\.jsonl"):
        open_texts("gone.jsonl")


def test_missing_texts_are_counted_and_stop_above_the_limit() -> None:
    source = open_texts({f"d{i}": "text" for i in range(9)})
    ids = [f"d{i}" for i in range(10)]
    texts, missing = fetch_texts(source, [*ids, "d1"], missing_limit=0.1)
    assert (len(texts), missing) == (9, ["d9"])
    with pytest.raises(
        InvalidData, match=r"1 of 10 documents have no text in it \('d9'\), more than the share of 0\.05"
    ):
        fetch_texts(source, ids, missing_limit=0.05, name="it")
    assert fetch_texts(source, []) == ({}, [])


# -- finding an index ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bm25", "dense", "sparse"])
def test_a_path_that_is_no_index_says_what_is_wanted(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(MissingResource, match="no index folder"):
        resolve_index(tmp_path / "none", kind)
    with pytest.raises(MissingResource, match="no index folder"):
        resolve_index("./none", kind)
    with pytest.raises(MissingResource, match=f"is no index of kind {kind}"):
        resolve_index(tmp_path, kind)


def test_an_index_of_the_other_sort_is_named(folder: Path) -> None:
    with pytest.raises(MissingResource, match="is a Faiss index, kind bm25 needs a Lucene one"):
        BM25Searcher(folder / "dense")


@pytest.mark.java
def test_a_bm25_index_is_not_opened_as_impacts(lucene: Path) -> None:
    with pytest.raises(BadArgument, match="indexed as bm25; open it as that"):
        open_searcher("impact", lucene / "bm25", encoder=ToySparse())


@pytest.mark.java
def test_a_misspelt_prebuilt_name_brings_near_ones() -> None:
    with pytest.raises(MissingResource, match=r"did you mean msmarco-v1-passage"):
        resolve_index("msmarco-v1-pasage", "bm25")
    with pytest.raises(BadArgument, match="of kind dense, not bm25"):
        resolve_index("beir-v1.0.0-scifact.bge-base-en-v1.5", "bm25")


@pytest.mark.java
def test_a_prebuilt_index_out_of_reach_is_an_error_with_its_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    util = pyserini_module("pyserini.util")
    monkeypatch.setenv("PYSERINI_CACHE", str(tmp_path))

    def unreachable(*_: Any, **__: Any) -> Any:
        raise util.URLError("no network")

    monkeypatch.setattr(util.urllib.request, "urlopen", unreachable)
    with pytest.raises(MissingResource, match=r"could not be fetched .* fetch and unpack https://.*\.tar\.gz"):
        resolve_index("beir-v1.0.0-scifact.flat", "bm25")
    assert capsys.readouterr().out == ""


# -- arguments ----------------------------------------------------------------------------------------------


@pytest.mark.java
def test_wrong_arguments_are_refused(lucene: Path) -> None:
    for settings in ({"k1": -1.0}, {"b": 1.5}, {"threads": 0}):
        with pytest.raises(BadArgument):
            BM25Searcher(lucene / "bm25", **settings)  # type: ignore[arg-type]
    with BM25Searcher(lucene / "bm25") as searcher:
        with pytest.raises(BadArgument, match="k=0"):
            searcher.search(["a"], 0)
        with pytest.raises(BadArgument, match="queries is a list of texts"):
            searcher.search("cat")
    with pytest.raises(PdRerankError, match="is closed"):
        searcher.search(["a"])
    with pytest.raises(BadArgument, match="unknown kind of index 'bm52'"):
        open_searcher("bm52", lucene / "bm25")
    for settings in ({"fb_terms": 0}, {"original_query_weight": 1.5}):
        with pytest.raises(BadArgument, match="RM3"):
            RM3(**settings)  # type: ignore[arg-type]


def test_a_language_without_an_analyzer_is_refused_where_anserini_takes_english(
    lucene: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "corpus.tsv").write_text("d1\tone text\n")
    with pytest.raises(BadArgument, match="no analyzer for language 'xx'; choose ar, bn, da, de, en"):
        index_bm25(tmp_path / "corpus.tsv", tmp_path / "index", language="xx")
    assert not (tmp_path / "index").exists()
    with pytest.raises(BadArgument, match="no analyzer for language 'xx'"):
        BM25Searcher(lucene / "bm25", language="xx")
    BM25Searcher(lucene / "bm25", language="en").close()
    assert not caplog.messages
    BM25Searcher(lucene / "bm25", language="de").close()
    assert "made with the analyzer of 'en' and is searched with that of 'de'" in caplog.text
