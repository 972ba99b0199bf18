"""Pools: what they hold, how they are made from runs, and how files keep them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_rerank import pool as pool_module
from pd_rerank.errors import BadArgument, InvalidData, MissingResource
from pd_rerank.files import RunHit, read_corpus, read_run, read_topics
from pd_rerank.pool import (
    Candidate,
    Pool,
    RouteHit,
    pool_sha256,
    pools_from_run,
    pools_sha256,
    read_pools,
    write_pools,
)

DATA = Path(__file__).parents[2] / "shared" / "data"


def pool(query_id: str = "q1", *ids: str, query: str = "what?") -> Pool:
    candidates = tuple(Candidate(doc_id=i, text=f"text of {i}", score=float(-n)) for n, i in enumerate(ids))
    return Pool(query_id=query_id, query=query, candidates=candidates)


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., Path]:
    def write(*records: object, name: str = "p.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records))
        return path

    return write


# -- the types ---------------------------------------------------------------------------------------------


def test_a_document_twice_in_a_pool_is_refused() -> None:
    with pytest.raises(InvalidData, match="pool 'q7' holds 'd12' twice"):
        pool("q7", "d1", "d12", "d12")


def test_a_score_that_is_no_number_is_refused() -> None:
    with pytest.raises(InvalidData, match="pool 'q', candidate 'd': first-stage score is nan"):
        Pool(query_id="q", query="", candidates=(Candidate(doc_id="d", text="", score=float("nan")),))


def test_canonical_order_is_score_then_id_with_unscored_last() -> None:
    made = Pool.ordered(
        query_id="q",
        query="",
        candidates=[
            Candidate(doc_id="z", text=""),
            Candidate(doc_id="b", text="", score=1.0),
            Candidate(doc_id="a", text="", score=1.0),
            Candidate(doc_id="c", text="", score=2.0),
        ],
    )
    assert made.doc_ids == ("c", "a", "b", "z")


# -- writing and reading -----------------------------------------------------------------------------------

ids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
numbers = st.floats(allow_nan=False, allow_infinity=False)
routes = st.dictionaries(st.text(), st.builds(RouteHit, score=numbers, rank=st.integers(0, 10**9)), max_size=2)
candidates = st.builds(
    Candidate,
    doc_id=ids,
    text=st.text(st.characters(exclude_categories=[])),
    score=st.none() | numbers,
    routes=routes.map(MappingProxyType),
)
pools = st.builds(
    Pool,
    query_id=ids,
    query=st.text().filter(str.strip),
    candidates=st.lists(candidates, max_size=4, unique_by=lambda c: c.doc_id).map(tuple),
)


def test_a_query_without_text_is_neither_written_nor_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="query 'q1' has no text"):
        write_pools(tmp_path / "set", [pool(query=" ")])
    (tmp_path / "p.jsonl").write_text('{"query": {"qid": "q1", "text": " "}, "candidates": []}\n')
    with pytest.raises(InvalidData, match=r"p\.jsonl:1: query 'q1' has no text"):
        read_pools(tmp_path / "p.jsonl")


@settings(deadline=None)
@given(st.lists(pools, max_size=4, unique_by=lambda p: p.query_id))
def test_written_pools_read_back_the_same(tmp_path_factory: pytest.TempPathFactory, many: list[Pool]) -> None:
    folder = tmp_path_factory.mktemp("p") / "set"
    write_pools(folder, many)
    assert read_pools(folder) == many
    assert pools_sha256(read_pools(folder)) == pools_sha256(many)


def test_equal_pools_give_equal_bytes_and_the_shape_rank_llm_reads(tmp_path: Path) -> None:
    hit = {"dense": RouteHit(score=0.5, rank=1), "bm25": RouteHit(score=2, rank=3)}
    made = Pool(query_id="q", query="é", candidates=(Candidate(doc_id="007", text="t", score=1, routes=hit),))
    write_pools(tmp_path / "a", [made], manifest={"made_by": "hand"})
    write_pools(tmp_path / "b", [made])
    assert (tmp_path / "a/pools.jsonl").read_bytes() == (tmp_path / "b/pools.jsonl").read_bytes()
    (line,) = (tmp_path / "a/pools.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == {
        "query": {"qid": "q", "text": "é"},
        "candidates": [
            {
                "docid": "007",
                "score": 1.0,
                "doc": {"text": "t"},
                "routes": {"bm25": {"score": 2.0, "rank": 3}, "dense": {"score": 0.5, "rank": 1}},
            }
        ],
    }
    manifest = json.loads((tmp_path / "a/manifest.json").read_text())
    assert manifest["made_by"] == "hand"
    assert (manifest["queries"], manifest["candidates"], manifest["empty"]) == (1, 1, 0)


def test_a_changed_pool_file_is_refused_by_its_folder_but_can_be_named_itself(tmp_path: Path) -> None:
    write_pools(tmp_path / "set", [pool("q", "a", "b")])
    path = tmp_path / "set/pools.jsonl"
    path.write_text(path.read_text().replace("text of a", "text of A"))
    with pytest.raises(InvalidData, match=r"pools\.jsonl is not what manifest\.json records"):
        read_pools(tmp_path / "set")
    assert read_pools(path)[0].texts == ("text of A", "text of b")


def test_a_folder_without_a_manifest_is_no_pool_folder(tmp_path: Path) -> None:
    write_pools(tmp_path / "set", [pool()])
    (tmp_path / "set/manifest.json").unlink()
    with pytest.raises(MissingResource, match=r"has no manifest\.json"):
        read_pools(tmp_path / "set")
    with pytest.raises(MissingResource, match="no file"):
        read_pools(tmp_path / "nowhere")


def test_writing_replaces_pools_but_no_other_folder(tmp_path: Path) -> None:
    write_pools(tmp_path / "set", [pool("q", "a")])
    write_pools(tmp_path / "set", [pool("q", "b")])
    assert read_pools(tmp_path / "set")[0].doc_ids == ("b",)
    (tmp_path / "set/notes.txt").write_text("mine")
    with pytest.raises(BadArgument, match=r"notes\.txt"):
        write_pools(tmp_path / "set", [pool("q", "c")])
    assert read_pools(tmp_path / "set")[0].doc_ids == ("b",)


def test_a_full_disk_leaves_the_old_pools_and_no_partial_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pools(tmp_path / "set", [pool("q", "a")])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_pools(tmp_path / "set", [pool("q", "b")])
    assert os.listdir(tmp_path) == ["set"]
    assert read_pools(tmp_path / "set")[0].doc_ids == ("a",)


def test_a_query_twice_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="query 'q' has two pools"):
        write_pools(tmp_path / "set", [pool("q"), pool("q")])
    assert os.listdir(tmp_path) == []


def test_rank_llm_lines_are_read_in_their_order(lines: Callable[..., Path]) -> None:
    path = lines(
        {
            "query": {"qid": 7, "text": "one"},
            "candidates": [
                {"docid": "b", "score": 1, "doc": {"title": "T", "segment": "s"}},
                {"docid": 12, "score": 2.5, "doc": {"contents": "c"}},
                {"docid": "d", "doc": "plain"},
            ],
        },
        "\n",
        {"query": "two", "candidates": []},
        {"query": "three", "qid": "q3", "candidates": []},
    )
    read = read_pools(path)
    assert [(p.query_id, p.query) for p in read] == [("7", "one"), ("2", "two"), ("q3", "three")]
    assert read[0].doc_ids == ("b", "12", "d")
    assert read[0].texts == ("T\ns", "c", "plain")
    assert [c.score for c in read[0].candidates] == [1.0, 2.5, None]


GOOD = {"query": {"qid": "a", "text": "t"}, "candidates": []}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"query": {"qid": "a", "text": "t"}}, r"p\.jsonl:2: no list of candidates"),
        ({"query": 5, "candidates": []}, r"p\.jsonl:2: 'query' is neither a string nor an object"),
        ({"query": {"text": "t"}, "candidates": []}, r"p\.jsonl:2, query: no id"),
        ({"query": {"qid": "b", "text": "t"}, "candidates": [3]}, r"p\.jsonl:2, candidate 1: an object"),
        (GOOD, r"p\.jsonl:2: query 'a' was at .*p\.jsonl:1 before"),
        ("{broken\n", r"p\.jsonl:2: not JSON"),
    ],
)
def test_a_faulty_pool_line_is_named(lines: Callable[..., Path], record: object, says: str) -> None:
    with pytest.raises(InvalidData, match=says):
        read_pools(lines(GOOD, record))


@pytest.mark.parametrize(
    ("candidate", "says"),
    [
        ({"docid": "d", "score": 1.0}, "no document under 'doc'"),
        ({"score": 1.0, "doc": "t"}, "no id"),
        ({"docid": "d", "score": "high", "doc": "t"}, "score 'high' is not a number"),
        ({"docid": "d", "doc": {"url": "u"}}, "no text; give one of text"),
        ({"docid": "d", "doc": "t", "routes": {"bm25": 3}}, "'routes' is not an object of objects"),
        ({"docid": "d", "doc": "t", "routes": {"bm25": {"score": 1.0, "rank": "1"}}}, "route 'bm25' has rank '1'"),
        ({"docid": "d", "doc": "t", "routes": {"bm25": {"rank": 1}}}, "score of route 'bm25' None"),
    ],
)
def test_a_faulty_candidate_is_named(lines: Callable[..., Path], candidate: object, says: str) -> None:
    record = {"query": {"qid": "q", "text": "t"}, "candidates": [{"docid": "x", "doc": "t"}, candidate]}
    with pytest.raises(InvalidData, match=rf"p\.jsonl:1, candidate 2: {says}"):
        read_pools(lines(record))


def test_a_document_twice_in_a_file_is_named_with_its_line(lines: Callable[..., Path]) -> None:
    twice = [{"docid": 1, "doc": "a"}, {"docid": "1", "doc": "b"}]
    with pytest.raises(InvalidData, match=r"p\.jsonl:2: pool 'q' holds '1' twice"):
        read_pools(lines(GOOD, {"query": {"qid": "q", "text": "t"}, "candidates": twice}))


# -- content hash ------------------------------------------------------------------------------------------


def test_the_hash_is_of_the_content_not_of_its_spelling(tmp_path: Path) -> None:
    write_pools(tmp_path / "set", [pool("q", "a", "b")])
    record = json.loads((tmp_path / "set/pools.jsonl").read_text())
    (tmp_path / "other.jsonl").write_text(
        "\n" + json.dumps(record, indent=None, sort_keys=True, separators=(" , ", ":"))
    )
    assert pools_sha256(read_pools(tmp_path / "other.jsonl")) == pools_sha256(read_pools(tmp_path / "set"))


def test_every_part_of_a_pool_is_in_its_hash() -> None:
    base = Candidate(doc_id="d", text="t", score=1.0)
    variants = [
        pool("q1", "a", "b"),
        pool("q2", "a", "b"),
        pool("q1", "b", "a"),
        pool("q1", "a", "b", query="who?"),
        Pool(query_id="q", query="", candidates=(base,)),
        Pool(query_id="q", query="", candidates=(Candidate(doc_id="d", text="u", score=1.0),)),
        Pool(query_id="q", query="", candidates=(Candidate(doc_id="d", text="t", score=2.0),)),
        Pool(query_id="q", query="", candidates=(Candidate(doc_id="d", text="t"),)),
        Pool(
            query_id="q",
            query="",
            candidates=(Candidate(doc_id="d", text="t", score=1.0, routes={"r": RouteHit(score=1.0, rank=1)}),),
        ),
    ]
    assert len({pool_sha256(p) for p in variants}) == len(variants)
    assert pools_sha256(variants[:2]) != pools_sha256(variants[1::-1])


# -- from a run --------------------------------------------------------------------------------------------

RUN = {"q2": [RunHit("b", 1, 2.0), RunHit("a", 2, 1.0), RunHit("c", 3, 0.5)], "q1": [RunHit("a", 1, 3.0)]}
QUERIES = {"q1": "one", "q2": "two", "q3": "three"}
TEXTS = {"a": "A", "b": "B", "c": "C", "d": "D"}


def test_pools_follow_the_topics_and_empty_ones_are_kept_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    made = pools_from_run(RUN, QUERIES, TEXTS, depth=2)
    assert [(p.query_id, p.query, p.doc_ids, p.texts) for p in made] == [
        ("q1", "one", ("a",), ("A",)),
        ("q2", "two", ("b", "a"), ("B", "A")),
        ("q3", "three", (), ()),
    ]
    assert [c.score for c in made[1].candidates] == [2.0, 1.0]
    assert "1 of 3 queries have no hits ('q3')" in caplog.text


def test_the_corpus_is_read_once_and_only_the_texts_needed_are_kept() -> None:
    kept: list[int] = []

    def corpus() -> Iterator[tuple[str, str]]:
        for doc_id, text in TEXTS.items():
            kept.append(1)
            yield doc_id, text

    pools_from_run(RUN, QUERIES, corpus())
    assert len(kept) == len(TEXTS)
    assert set(pool_module._texts(iter(TEXTS.items()), {"a"})) == {"a"}


def test_missing_texts_are_counted_or_left_out(caplog: pytest.LogCaptureFixture) -> None:
    texts = {"a": "A"}
    with pytest.raises(InvalidData, match=r"2 of the run's 3 documents have no text in the corpus \('b', 'c'\)"):
        pools_from_run(RUN, QUERIES, texts)
    made = pools_from_run(RUN, QUERIES, texts, missing="skip")
    assert [p.doc_ids for p in made] == [("a",), ("a",), ()]
    assert "2 of the run's 3 documents have no text" in caplog.text


@pytest.mark.parametrize("missing", ["error", "skip"])
def test_a_run_of_another_collection_is_refused_even_when_skipping(missing: pool_module.Missing) -> None:
    with pytest.raises(InvalidData, match="run and corpus are of different collections"):
        pools_from_run(RUN, QUERIES, {"x": "X"}, missing=missing)


def test_a_run_of_other_topics_is_refused() -> None:
    with pytest.raises(InvalidData, match=r"1 of the run's 2 queries are not in the topics \('q2'\)"):
        pools_from_run(RUN, {"q1": "one"}, TEXTS)


def test_a_needed_text_twice_in_the_corpus_is_refused() -> None:
    with pytest.raises(InvalidData, match="the corpus holds document 'a' twice"):
        pools_from_run(RUN, QUERIES, [("a", "A"), ("d", "D"), ("d", "D"), ("a", "A2"), ("b", "B"), ("c", "C")])


def test_depth_and_missing_are_checked() -> None:
    with pytest.raises(BadArgument, match="depth must be at least 1, got 0"):
        pools_from_run(RUN, QUERIES, TEXTS, depth=0)
    with pytest.raises(BadArgument, match="unknown choice for missing texts 'ignore'"):
        pools_from_run(RUN, QUERIES, TEXTS, missing="ignore")  # type: ignore[arg-type]


@pytest.mark.skipif(not (DATA / "dl20").is_dir(), reason="real data not present (../shared/data/dl20)")
def test_a_real_run_becomes_pools_that_survive_their_file(tmp_path: Path) -> None:
    run = read_run(DATA / "dl20/runs/BM25.trec")
    queries = read_topics(DATA / "dl20/queries.tsv")
    wanted = {hit.doc_id for hits in run.values() for hit in hits}
    corpus = read_corpus(DATA / "dl20/corpus.jsonl", wanted=wanted)
    made = pools_from_run(run, queries, corpus, depth=20, missing="skip")
    assert len(made) == 54
    assert all(0 < len(p) <= 20 for p in made)
    write_pools(tmp_path / "dl20", made)
    assert read_pools(tmp_path / "dl20") == made
