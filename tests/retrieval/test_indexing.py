"""Indexes appear whole or not at all; an interrupted run goes on and ends with the same files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pd_rerank.cli import main
from pd_rerank.errors import BadArgument, EngineFailure, InvalidData
from pd_rerank.files import sha256_file
from pd_rerank.retrieval.indexing import HNSW, index_bm25, index_dense, index_sparse
from pd_rerank.retrieval.searchers import BM25Searcher, DenseSearcher, ImpactSearcher
from tests.retrieval.tiny_encoders import CORPUS, bert, sentence_transformer, write_corpus, write_lines
from tests.retrieval.toys import ToyDense, ToySparse

pytest.importorskip("faiss", reason="indexes need the extra 'pools'")


class Stops(Exception):
    pass


class StopsAfter(ToyDense):
    """Fails, as a machine does, once it has encoded so many batches."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.left = batches

    def encode(self, texts: Any, *, side: str = "document", progress: Any = None) -> Any:
        if not self.left:
            raise Stops
        self.left -= 1
        return super().encode(texts, side=side, progress=progress)


def numbered(path: Path, n: int) -> Path:
    return write_lines(path, [f"d{i}\tword{i % 7} word{i % 5} number{i}" for i in range(n)])


def main_code(*arguments: str) -> Any:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return left.value.code


# -- dense --------------------------------------------------------------------------------------------------


def test_a_flat_index_holds_the_vectors_and_ids_in_corpus_order(tmp_path: Path) -> None:
    import faiss

    encoder = ToyDense()
    corpus = write_corpus(tmp_path / "c.jsonl")
    made = index_dense(corpus, tmp_path / "ix", encoder=encoder, shard_size=2)
    read = faiss.read_index(str(tmp_path / "ix" / "index"))
    np.testing.assert_array_equal(read.reconstruct_n(0, read.ntotal), ToyDense().encode(list(CORPUS.values())))
    assert (tmp_path / "ix" / "docid").read_text().splitlines() == list(CORPUS)
    assert (made["kind"], made["documents"], made["corpus"]["sha256"]) == ("dense", 5, sha256_file(corpus))
    assert made["encoder"] == encoder.describe()
    assert made["sha256"]["index"] == sha256_file(tmp_path / "ix" / "index")
    assert json.loads((tmp_path / "ix" / "manifest.json").read_text()) == made
    assert not (tmp_path / "ix.shards").exists()


@pytest.mark.parametrize("hnsw", [None, HNSW(m=4, ef_construction=20)])
def test_an_interrupted_run_encodes_only_the_rest_and_ends_with_equal_files(tmp_path: Path, hnsw: HNSW | None) -> None:
    corpus = numbered(tmp_path / "c.tsv", 50)
    index_dense(corpus, tmp_path / "whole", encoder=ToyDense(), hnsw=hnsw, shard_size=8)
    with pytest.raises(Stops):
        index_dense(corpus, tmp_path / "ix", encoder=StopsAfter(3), hnsw=hnsw, shard_size=8)
    assert not (tmp_path / "ix").exists()
    rest = ToyDense()
    seen: list[tuple[str, int, int]] = []
    index_dense(corpus, tmp_path / "ix", encoder=rest, hnsw=hnsw, shard_size=8, progress=lambda *at: seen.append(at))
    assert len(rest.encoded) == 50 - 3 * 8
    assert seen[2] == ("encoding", 24, 50)
    assert seen[-1] == ("indexing", 50, 50)
    for name in ("index", "docid"):
        assert (tmp_path / "ix" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_killed_run_leaves_whole_shards_only_and_the_next_ends_with_equal_files(tmp_path: Path) -> None:
    corpus = numbered(tmp_path / "c.tsv", 50)
    index_dense(corpus, tmp_path / "whole", encoder=ToyDense(), shard_size=8)
    script = f"""
import os, signal, sys
from pathlib import Path
from pd_rerank.retrieval import indexing
from tests.retrieval.toys import ToyDense
real, calls = indexing.np.save, 0
def save(stream, *rest, **how):
    global calls
    calls += 1
    if calls == 4:
        stream.write(b"half of it")
        stream.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    real(stream, *rest, **how)
indexing.np.save = save
indexing.index_dense({str(corpus)!r}, {str(tmp_path / "ix")!r}, encoder=ToyDense(), shard_size=8)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, cwd=Path(__file__).parents[2], env=os.environ)
    assert done.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "ix.shards" / "vectors").glob("0*.npy"))) == 3
    index_dense(corpus, tmp_path / "ix", encoder=ToyDense(), shard_size=8)
    for name in ("index", "docid"):
        assert (tmp_path / "ix" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.tsv", "ix", "whole"]


def test_a_finished_index_is_not_made_again(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl")
    made = index_dense(corpus, tmp_path / "ix", encoder=ToyDense())
    again = ToyDense()
    assert index_dense(corpus, tmp_path / "ix", encoder=again) == made
    assert again.encoded == []


def test_an_index_or_a_start_with_other_settings_is_refused_unless_overwritten(tmp_path: Path) -> None:
    corpus = numbered(tmp_path / "c.tsv", 20)
    with pytest.raises(Stops):
        index_dense(corpus, tmp_path / "ix", encoder=StopsAfter(1), shard_size=8)
    with pytest.raises(BadArgument, match=r"start of another job \(encoder\.dimension: 8 there, 4 here\)"):
        index_dense(corpus, tmp_path / "ix", encoder=ToyDense(4), shard_size=8)
    index_dense(corpus, tmp_path / "ix", encoder=ToyDense(4), shard_size=8, overwrite=True)
    with pytest.raises(BadArgument, match=r"made with other settings \(encoder\.dimension: 4 there, 8 here\)"):
        index_dense(corpus, tmp_path / "ix", encoder=ToyDense(), shard_size=8)
    numbered(corpus, 21)
    with pytest.raises(BadArgument, match="corpus_sha256"):
        index_dense(corpus, tmp_path / "ix", encoder=ToyDense(4), shard_size=8)
    assert index_dense(corpus, tmp_path / "ix", encoder=ToyDense(4), overwrite=True)["documents"] == 21


def test_a_folder_of_other_things_is_never_touched(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl")
    (tmp_path / "ix").mkdir()
    (tmp_path / "ix" / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(BadArgument, match=r"holds 'thesis\.tex' and is no index"):
            index_dense(corpus, tmp_path / "ix", encoder=ToyDense(), overwrite=overwrite)
    assert (tmp_path / "ix" / "thesis.tex").read_text() == "years of work"


def test_a_bad_corpus_is_found_before_anything_is_encoded(tmp_path: Path) -> None:
    encoder = ToyDense()
    corpus = write_lines(tmp_path / "c.tsv", ["1\tone", "2\ttwo", "1\tthree"])
    with pytest.raises(InvalidData, match=r"c\.tsv:3: document '1'"):
        index_dense(corpus, tmp_path / "ix", encoder=encoder)
    assert encoder.encoded == []


def test_vectors_that_are_not_finite_make_no_index(tmp_path: Path) -> None:
    class Broken(ToyDense):
        def encode(self, texts: Any, *, side: str = "document", progress: Any = None) -> Any:
            return super().encode(texts) * np.nan

    with pytest.raises(EngineFailure, match="not finite"):
        index_dense(write_corpus(tmp_path / "c.jsonl"), tmp_path / "ix", encoder=Broken())
    assert not (tmp_path / "ix").exists()


def test_an_encoder_of_the_other_sort_is_refused(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl")
    with pytest.raises(BadArgument, match="a dense index needs a dense one"):
        index_dense(corpus, tmp_path / "ix", encoder=ToySparse())
    with pytest.raises(BadArgument, match="an impact index needs a sparse one"):
        index_sparse(corpus, tmp_path / "ix", encoder=ToyDense())


# -- Lucene -------------------------------------------------------------------------------------------------


@pytest.mark.java
@pytest.mark.parametrize("threads", [1, 3])
def test_a_bm25_index_holds_every_document_with_its_text(tmp_path: Path, threads: int) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl")
    made = index_bm25(corpus, tmp_path / "ix", threads=threads)
    with BM25Searcher(tmp_path / "ix") as searcher:
        assert searcher.documents == 5
        assert searcher.texts([*CORPUS, "absent"]) == CORPUS
    assert (made["kind"], made["unindexed"], made["language"]) == ("bm25", 0, "en")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.jsonl", "ix"]


@pytest.mark.java
def test_an_impact_index_holds_rounded_weights_and_counts_documents_without_terms(tmp_path: Path) -> None:
    corpus = write_lines(tmp_path / "c.tsv", ["1\tcat cat dog", "2\t…", "3\tdog"])
    made = index_sparse(corpus, tmp_path / "ix", encoder=ToySparse(), quantise=10, shard_size=2)
    assert (made["documents"], made["unindexed"], made["quantise"]) == (3, 1, 10)
    with ImpactSearcher(tmp_path / "ix", ToySparse()) as searcher:
        assert searcher.search_weights([{"cat": 1}, {"dog": 3}], 5) == [[("1", 10.0)], [("1", 15.0), ("3", 15.0)]]


@pytest.mark.java
def test_an_interrupted_impact_index_ends_with_the_same_weights(tmp_path: Path) -> None:
    class Stopping(ToySparse):
        def encode(self, texts: Any, *, side: str = "document", progress: Any = None) -> Any:
            if len(self.encoded) >= 16:
                raise Stops
            return super().encode(texts, side=side)

    corpus = numbered(tmp_path / "c.tsv", 50)
    whole = index_sparse(corpus, tmp_path / "whole", encoder=ToySparse(), shard_size=8)
    with pytest.raises(Stops):
        index_sparse(corpus, tmp_path / "ix", encoder=Stopping(), shard_size=8)
    rest = ToySparse()
    made = index_sparse(corpus, tmp_path / "ix", encoder=rest, shard_size=8)
    assert len(rest.encoded) == 50 - 16
    assert made["vectors_sha256"] == whole["vectors_sha256"]
    queries = ["word1", "number7 word3", "nothing"]
    with ImpactSearcher(tmp_path / "whole", rest) as one, ImpactSearcher(tmp_path / "ix", rest) as other:
        assert one.search(queries, 50) == other.search(queries, 50)


# -- the command --------------------------------------------------------------------------------------------


def files(folder: Path) -> Iterable[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.java
def test_the_command_makes_a_bm25_index_and_prints_its_manifest(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl")
    assert main_code("index", "--kind", "lucene", "--corpus", str(corpus), "--index", str(tmp_path / "ix")) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["kind"] == "bm25"
    assert err == ""


@pytest.mark.java
def test_the_command_makes_dense_and_impact_indexes_that_search_by_their_manifest(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    pooling = {"pooling_mode_mean_tokens": True}
    dense = sentence_transformer(tmp_path / "m", pooling=pooling, prompts={"query": "query: "})
    sparse = bert(tmp_path / "splade-toy", head=True)
    corpus = write_corpus(tmp_path / "c.jsonl")
    common = ["--corpus", str(corpus), "--max-length", "16", "--shard-size", "2", "--progress"]
    assert main_code(
        "index", "--kind", "faiss", "--encoder", str(dense), "--index", str(tmp_path / "d"), *common,
        "--hnsw", "--M", "4", "--efC", "20",
    ) == 0  # fmt: skip
    out, err = capfd.readouterr()
    assert json.loads(out)["hnsw"] == {"m": 4, "ef_construction": 20}
    assert "encoding" in err
    assert main_code(
        "index", "--kind", "impact", "--encoder", str(sparse), "--index", str(tmp_path / "s"), *common,
        "--quantize", "50",
    ) == 0  # fmt: skip
    capfd.readouterr()
    with DenseSearcher(tmp_path / "d", text_index=corpus) as searcher:
        hits = searcher.search(["the cat", "money in the river"], 3)
        assert [len(h) for h in hits] == [3, 3]
        made = searcher.describe()["encoder"]
        assert (made["max_length"], made["query_prefix"], made["pooling"]) == (16, "query: ", "mean")
        assert searcher.text("d1") == CORPUS["d1"]
    with ImpactSearcher(tmp_path / "s") as searcher2:
        assert searcher2.quantise == 50
        assert all(searcher2.search(["the cat", "money in the river"], 3))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--kind", "bm25", "--corpus", "c.tsv"], 2, "--index is missing"),
        (["--kind", "splade", "--corpus", "c.tsv", "--index", "ix"], 2, "unknown kind of index 'splade'"),
        (["--kind", "bm25", "--corpus", "c.tsv", "--index", "ix", "--hnsw"], 2, "--hnsw means nothing to --kind bm25"),
        (["--kind", "dense", "--corpus", "c.tsv", "--index", "ix", "--M", "4"], 2, "--m means nothing to"),
        (["--kind", "dense", "--corpus", "c.tsv", "--index", "ix"], 2, "--encoder is missing"),
        (["--kind", "bm25", "--corpus", "no.tsv", "--index", "ix"], 4, "no corpus no.tsv"),
        (["--kind", "bm25", "--corpus", "bad.tsv", "--index", "ix"], 5, "bad.tsv:2: a line of a .tsv corpus"),
        (["--kind", "bm25", "--corpus", "empty.tsv", "--index", "ix"], 5, "empty.tsv:1: document '1' has no text"),
    ],
)  # fmt: skip
def test_a_wrong_call_ends_with_a_code_and_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "c.tsv", ["1\tone"])
    write_lines(tmp_path / "bad.tsv", ["1\tone", "two"])
    write_lines(tmp_path / "empty.tsv", ["1\t", "2\ttwo"])
    assert main_code("index", *arguments) == code
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
