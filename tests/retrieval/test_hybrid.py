"""Building pools: what goes in, what is kept of every route, and going on after an interruption."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pd_rerank.config import PoolSettings, load
from pd_rerank.errors import BadArgument, InvalidData, MissingResource
from pd_rerank.files import RunHit, read_json, read_run, write_run
from pd_rerank.pool import Candidate, Pool, RouteHit, read_pools
from pd_rerank.retrieval.fusion import RanxFusion, ReciprocalRank, RouteRule, WeightedFusion
from pd_rerank.retrieval.hybrid import (
    CorpusFile,
    PoolJob,
    Route,
    RunSource,
    SearchSource,
    fusion_of,
    open_job,
    runs_of,
    write_pools_as_jsonl,
    write_pools_as_run,
)

QUERIES = {"q1": "bees", "q2": "ferries", "q3": "nothing at all"}
TEXTS = {"a": "Bees live in hives.", "b": "BEES live  in hives.", "c": "A ferry leaves.", "d": "Honey."}


class Toy:
    """A searcher that answers from a table and counts what it is asked."""

    def __init__(self, found: Mapping[str, Mapping[str, float]]) -> None:
        self.found = found
        self.asked: list[str] = []
        self.fails_after: int | None = None

    def search(self, queries: Sequence[str], k: int) -> list[list[RunHit]]:
        if self.fails_after is not None and len(self.asked) >= self.fails_after:
            raise KeyboardInterrupt
        self.asked += queries
        return [[RunHit(d, 0, s) for d, s in self.found.get(q, {}).items()] for q in queries]

    def describe(self) -> dict[str, Any]:
        return {"toy": len(self.found)}


class Texts:
    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def texts(self, doc_ids: Any) -> dict[str, str]:
        return {d: self._texts[d] for d in doc_ids if d in self._texts}


def toys() -> dict[str, Toy]:
    return {
        "bm25": Toy({"bees": {"b": 2.0, "a": 4.0}, "ferries": {"c": 3.0}}),
        "dense": Toy({"bees": {"d": 0.5, "a": 0.9}, "ferries": {"c": 0.7, "a": 0.2}, "nothing at all": {"d": 0.1}}),
    }


def job(folder: Path, searchers: Mapping[str, Toy] | None = None, **options: Any) -> PoolJob:
    routes = [
        Route(name=name, source=SearchSource(lambda t=toy: t, depends_on={"toy": name}), depth=options.pop(name, 100))
        for name, toy in (searchers or toys()).items()
    ]
    fusion = WeightedFusion(rules={route.name: RouteRule() for route in routes})
    settings: dict[str, Any] = {"queries": QUERIES, "fusion": fusion, "texts": Texts(TEXTS), "shard_size": 1, **options}
    return PoolJob(folder, routes=routes, **settings)


def contents(folder: Path) -> dict[str, Any]:
    record = read_json(folder / "manifest.json")
    record.pop("created")
    return {"pools": (folder / "pools.jsonl").read_bytes(), "manifest": record}


# -- what a pool holds --------------------------------------------------------------------------------------------


def test_a_pool_is_the_union_of_the_routes_with_every_routes_score_and_rank(tmp_path: Path) -> None:
    pools, manifest = job(tmp_path / "out").write()
    assert [pool.query_id for pool in pools] == ["q1", "q2", "q3"]
    first = {c.doc_id: c for c in pools[0].candidates}
    assert first["a"].routes == {"bm25": RouteHit(score=4.0, rank=1), "dense": RouteHit(score=0.9, rank=1)}
    assert first["b"].routes == {"bm25": RouteHit(score=2.0, rank=2)}
    assert first["d"].routes == {"dense": RouteHit(score=0.5, rank=2)}
    assert pools[0].doc_ids == ("a", "b", "d")  # 1, then two zeros by id
    assert (first["a"].score, first["b"].score, first["a"].text) == (1.0, 0.0, TEXTS["a"])
    assert pools[2].doc_ids == ("d",)
    assert read_pools(tmp_path / "out") == pools
    assert (manifest["documents"], manifest["missing_texts"]) == (4, 0)
    assert manifest["sources"] == {"bm25": {"toy": 2}, "dense": {"toy": 3}}
    assert manifest["settings"]["fusion"]["method"] == "weighted"
    assert manifest["health"]["routes"]["bm25"]["empty"] == ["q3"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_a_route_gives_no_more_than_its_depth_tied_hits_by_id(tmp_path: Path) -> None:
    found = {"only": Toy({"bees": {"d": 1.0, "c": 2.0, "b": 1.0, "a": 0.5}})}
    pools, _ = job(tmp_path / "out", found, only=2).write()
    assert pools[0].candidates[1].routes == {"only": RouteHit(score=1.0, rank=2)}
    assert pools[0].doc_ids == ("c", "b")


def test_judged_documents_that_no_route_found_are_never_put_in(tmp_path: Path) -> None:
    qrels = {"q1": {"c": 1, "a": 1}}
    pools, manifest = job(tmp_path / "out").write(qrels=qrels)
    assert "c" not in pools[0].doc_ids
    assert manifest["health"]["ceiling"]["recall"] == 0.5


def test_texts_alike_can_be_folded_into_the_smallest_id(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = {"bm25": Toy({"bees": {"b": 5.0, "d": 4.0, "a": 3.0}}), "dense": Toy({"bees": {"a": 0.9, "b": 0.8}})}
    with caplog.at_level(logging.INFO, "pd_rerank"):
        pools, manifest = job(tmp_path / "out", found, fold_texts=True).write()
    held = {c.doc_id: c for c in pools[0].candidates}
    assert set(held) == {"a", "d"}
    # the best hit of either id counts, with the rank it had
    assert held["a"].routes == {"bm25": RouteHit(score=5.0, rank=1), "dense": RouteHit(score=0.9, rank=1)}
    assert held["d"].routes == {"bm25": RouteHit(score=4.0, rank=2)}
    assert manifest["folded_texts"] == 1
    assert "1 of 3 documents repeat another's text and are folded into it" in caplog.text


def test_missing_texts_stop_the_job_above_the_limit_and_are_left_out_below(tmp_path: Path) -> None:
    found = {"bm25": Toy({"bees": {"a": 2.0, "gone": 5.0}, "ferries": {"c": 1.0, "d": 0.5}})}
    with pytest.raises(InvalidData, match=r"1 of 4 documents have no text.*'gone'"):
        job(tmp_path / "out", found).write()
    assert not (tmp_path / "out").exists()
    pools, manifest = job(tmp_path / "out", found, missing_limit=0.25).write()
    assert pools[0].doc_ids == ("a",)
    assert pools[0].candidates[0].routes["bm25"].rank == 2
    assert manifest["missing_texts"] == 1


def test_a_route_may_be_a_trec_run(tmp_path: Path) -> None:
    write_run(tmp_path / "r.trec", [("q1", [("a", 2.0), ("d", 1.0)]), ("q2", [("c", 9.0)])])
    routes = [Route(name="first", source=RunSource(tmp_path / "r.trec"), depth=1)]
    made = PoolJob(tmp_path / "out", queries=QUERIES, routes=routes, fusion=ReciprocalRank(), texts=Texts(TEXTS))
    pools, manifest = made.write()
    assert [pool.doc_ids for pool in pools] == [("a",), ("c",), ()]
    assert manifest["health"]["empty_pools"] == ["q3"]
    with pytest.raises(InvalidData, match=r"1 of the 2 queries of .*r\.trec are not in the topics \('q2'\)"):
        RunSource(tmp_path / "r.trec").check(["q1"])


# -- going on -----------------------------------------------------------------------------------------------------


def test_an_interrupted_job_goes_on_and_ends_with_the_same_files(tmp_path: Path) -> None:
    job(tmp_path / "whole").write()
    for stop in range(1, 6):
        searchers = toys()
        for toy in searchers.values():
            toy.fails_after = 3
        which, left = ("bm25", stop) if stop < 3 else ("dense", stop - 3)
        searchers[which].fails_after = left
        with pytest.raises(KeyboardInterrupt):
            job(tmp_path / "out", searchers).search()
        assert not (tmp_path / "out").exists()
        again = toys()
        resumed = job(tmp_path / "out", again)
        assert resumed.todo() == 6 - stop
        resumed.write()
        assert sum(len(toy.asked) for toy in again.values()) == 6 - stop
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")
        (tmp_path / "out" / "pools.jsonl").unlink()
        (tmp_path / "out" / "manifest.json").unlink()
        (tmp_path / "out").rmdir()


def test_left_overs_of_a_killed_process_and_damaged_shards_do_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job(tmp_path / "whole").write()
    begun = job(tmp_path / "out")
    begun.search()
    shards = begun.shards(begun.routes[0])
    (shards / ".000001.jsonl.x.part").write_text("half")
    (shards / "000000.jsonl").write_text('{"qid": "q1", "doc')
    (shards / "000002.jsonl").write_text('{"qid": "q9", "docids": [], "scores": []}\n')
    searchers = toys()
    job(tmp_path / "out", searchers).write()
    assert searchers["bm25"].asked == ["bees", "nothing at all"]
    assert searchers["dense"].asked == []
    assert "its queries are searched again" in caplog.text
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not begun.work.exists()


def test_hits_can_be_kept_and_fused_otherwise_without_searching(tmp_path: Path) -> None:
    job(tmp_path / "out").write(keep_hits=True)
    searchers = toys()
    fusion = ReciprocalRank(k=1)
    again = job(tmp_path / "out", searchers, fusion=fusion, overwrite=True)
    assert again.todo() == 0
    pools, _ = again.write()
    assert pools[0].candidates[0].score == 1.0
    assert [toy.asked for toy in searchers.values()] == [[], []]


def test_a_finished_folder_is_left_alone_and_one_of_other_settings_refused(tmp_path: Path) -> None:
    job(tmp_path / "out").write()
    assert job(tmp_path / "out").finished
    with pytest.raises(BadArgument, match=r"routes\.dense\.depth is 100 there, 5 here.*--overwrite"):
        job(tmp_path / "out", dense=5)
    assert not job(tmp_path / "out", dense=5, overwrite=True).finished
    (tmp_path / "out" / "pools.jsonl").write_text("{}\n")
    with pytest.raises(InvalidData, match=r"pools\.jsonl is not what manifest\.json records"):
        job(tmp_path / "out")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    for overwrite in (False, True):
        with pytest.raises(BadArgument, match=r"holds 'notes\.txt', which is no part of a pool folder"):
            job(tmp_path / "other", overwrite=overwrite)


# -- what is refused ----------------------------------------------------------------------------------------------


def test_a_route_that_answers_wrongly_is_named(tmp_path: Path) -> None:
    class Twice(Toy):
        def search(self, queries: Sequence[str], k: int) -> list[list[RunHit]]:
            return [[RunHit("a", 0, 1.0), RunHit("a", 0, 1.0)] for _ in queries]

    class Short(Toy):
        def search(self, queries: Sequence[str], k: int) -> list[list[RunHit]]:
            return []

    for searcher, says in (
        (Twice({}), "route 'bm25' gave query 'q1' document 'a' twice; its index holds the id twice"),
        (Short({}), "route 'bm25' answered 0 of 1 queries"),
        (Toy({"bees": {"a": float("nan")}}), "route 'bm25', query 'q1', document 'a': score nan"),
    ):
        with pytest.raises(InvalidData, match=says):
            job(tmp_path / "out", {"bm25": searcher}).search()
    assert not (tmp_path / "out").exists()


def test_names_depths_and_queries_are_checked(tmp_path: Path) -> None:
    source = SearchSource(lambda: Toy({}), depends_on={})
    with pytest.raises(BadArgument, match="depth must be at least 1, got 0"):
        Route(name="a", source=source, depth=0)
    with pytest.raises(BadArgument, match="route name 'a/b'"):
        Route(name="a/b", source=source)
    with pytest.raises(BadArgument, match="two routes have one name"):
        PoolJob(
            tmp_path,
            queries=QUERIES,
            routes=[Route(name="a", source=source)] * 2,
            fusion=ReciprocalRank(),
            texts=Texts({}),
        )
    with pytest.raises(InvalidData, match="no queries"):
        job(tmp_path / "out", queries={})
    with pytest.raises(MissingResource, match=r"no run file .*none\.trec"):
        PoolJob(
            tmp_path / "o",
            queries=QUERIES,
            routes=[Route(name="a", source=RunSource(tmp_path / "none.trec"))],
            fusion=ReciprocalRank(),
            texts=Texts({}),
        )


def test_a_corpus_that_holds_an_id_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text(
        '{"_id": "a", "text": "x"}\n{"_id": "b", "text": " "}\n{"_id": "a", "text": "y"}\n'
    )
    corpus = CorpusFile(tmp_path / "c.jsonl")
    assert corpus.texts(["b", "z"]) == {}
    with pytest.raises(InvalidData, match=r"c\.jsonl:3: document 'a' was at .*c\.jsonl:1 before"):
        corpus.texts(["a"])


# -- from settings ------------------------------------------------------------------------------------------------


def settings(tmp_path: Path, text: str) -> PoolSettings:
    (tmp_path / "c.yaml").write_text(text)
    return load(PoolSettings, file=tmp_path / "c.yaml")


RUNS = "routes:\n  a: {type: run, path: a.trec, weight: 3}\n  b: {type: run, path: b.trec, weight: 1}\n"


def test_the_nevir_preset_sets_depths_weights_thresholds_by_type(tmp_path: Path) -> None:
    given = settings(
        tmp_path,
        "preset: nevir-paper\nprecision: float32\nroutes:\n"
        "  d: {type: faiss, index: d}\n  s: {type: impact, index: s, depth: 60}\n"
        "  b: {type: lucene, index: b, threshold: 1}\n"
        "topics: t.tsv\noutput: out\ncorpus: c.jsonl\n",
    )
    fusion = fusion_of(given)
    assert isinstance(fusion, WeightedFusion)
    assert (fusion.precision, dict(fusion.rules)) == (
        "float32",
        {
            "d": RouteRule(weight=0.7, threshold=0.3),
            "s": RouteRule(weight=0.15, threshold=0.2, transform="log1p"),
            "b": RouteRule(weight=0.15, threshold=1.0, transform="log1p"),
        },
    )
    (tmp_path / "t.tsv").write_text("q1\tbees\n")
    (tmp_path / "c.jsonl").write_text('{"_id": "a", "text": "x"}\n')
    here = given.model_copy(update={"topics": tmp_path / "t.tsv", "corpus": tmp_path / "c.jsonl"})
    assert {r.name: r.depth for r in open_job(here).routes} == {"d": 150, "s": 60, "b": 100}


def test_methods_are_chosen_by_name(tmp_path: Path) -> None:
    plain = fusion_of(settings(tmp_path, RUNS))
    assert isinstance(plain, WeightedFusion)
    assert plain.rules["a"] == RouteRule(weight=3)
    rrf = fusion_of(settings(tmp_path, RUNS + "method: rrf\nparams: {k: 10}\n"))
    assert rrf == ReciprocalRank(k=10, weights={"a": 3, "b": 1})
    wsum = fusion_of(settings(tmp_path, RUNS + "method: wsum\nnorm: zmuv\n"))
    assert wsum == RanxFusion(method="wsum", norm="zmuv", params={"weights": [0.75, 0.25]})
    theirs = fusion_of(settings(tmp_path, RUNS + "method: ranx:rrf\nparams: {k: 10}\n"))
    assert theirs == RanxFusion(method="rrf", params={"k": 10})


def test_weights_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text(json.dumps({"weights": {"a": 0.1, "b": 0.9}}))
    fusion = fusion_of(settings(tmp_path, RUNS + f"weights: {tmp_path / 'w.json'}\n"))
    assert isinstance(fusion, WeightedFusion)
    assert fusion.rules["b"].weight == 0.9


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("routes: {a: {type: bm25}}\n", "routes.a: a route of type bm25 needs 'index'"),
        ("routes: {a: {type: run, index: x}}\n", "routes.a: 'index' means nothing to type run"),
        ("routes: {a: {type: dense, index: x, k1: 1.2}}\n", "'k1' means nothing to type dense, which knows depth"),
        ("routes: {a: {type: bm25, index: x, k_1: 1.2}}\n", "unknown key 'k_1'; did you mean k1"),
        ("routes: {a: {type: bm24, index: x}}\n", "routes.a.type: input should be 'bm25', 'dense', 'sparse' or 'run'"),
        (
            "routes: {a: {type: run, path: x, depth: 0}}\n",
            "routes.a.depth: input should be greater than or equal to 1",
        ),
        ("routes: {a: run}\n", "routes.a"),
        ("topics: x\n", "no routes: list them under 'routes'"),
        (RUNS + "corpus: a\ntext_index: b\n", "texts come from --corpus or --text-index"),
        (RUNS + "methd: rrf\n", "unknown key 'methd'; did you mean method"),
    ],
)
def test_a_config_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(BadArgument) as caught:
        settings(tmp_path, text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("method: rff\n", "no fusion method 'rff'"),
        ("method: rrf\nparams: {kk: 1}\n", "rrf takes k, got kk"),
        ("method: gmnz\nparams: {k: 1}\n", "ranx's gmnz takes 'gamma', got 'k'"),
    ],
)
def test_a_fusion_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(BadArgument, match=says):
        fusion_of(settings(tmp_path, RUNS + text))
    with pytest.raises(BadArgument, match="route 'a' has a threshold or transform"):
        fusion_of(settings(tmp_path, "routes: {a: {type: run, path: x, threshold: 1}}\nmethod: rrf\n"))


def test_where_texts_come_from_must_be_said(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text("q1\tbees\n")
    given = settings(tmp_path, RUNS + f"topics: {tmp_path / 't.tsv'}\noutput: {tmp_path / 'o'}\n")
    with pytest.raises(BadArgument, match="nothing holds the texts"):
        open_job(given)


# -- to runs and back ---------------------------------------------------------------------------------------------


def test_pools_give_back_the_runs_they_were_made_of(tmp_path: Path) -> None:
    pools, _ = job(tmp_path / "out").write()
    assert runs_of(pools) == {
        "bm25": {"q1": {"a": 4.0, "b": 2.0}, "q2": {"c": 3.0}, "q3": {}},
        "dense": {"q1": {"a": 0.9, "d": 0.5}, "q2": {"c": 0.7, "a": 0.2}, "q3": {"d": 0.1}},
    }
    write_pools_as_run(tmp_path / "f.trec", pools, tag="mine")
    assert {q: [h.doc_id for h in hits] for q, hits in read_run(tmp_path / "f.trec").items()} == {
        "q1": ["a", "b", "d"],
        "q2": ["c", "a"],
        "q3": ["d"],
    }
    write_pools_as_run(tmp_path / "r.trec", pools, route="bm25")
    assert read_run(tmp_path / "r.trec")["q1"] == [RunHit("a", 1, 4.0), RunHit("b", 2, 2.0)]
    with pytest.raises(BadArgument, match="the pools have no route 'tfidf'; they have bm25, dense"):
        write_pools_as_run(tmp_path / "x.trec", pools, route="tfidf")


def test_a_run_and_a_rank_llm_file_of_pools_keep_their_order_and_have_scores(tmp_path: Path) -> None:
    candidates = tuple(
        Candidate(doc_id=d, text=d, score=s) for d, s in (("x", None), ("y", 2.0), ("z", -1.0), ("w", 5.0))
    )
    pools = [Pool(query_id="q", query="t", candidates=candidates)]
    write_pools_as_run(tmp_path / "r.trec", pools)
    assert [hit.doc_id for hit in read_run(tmp_path / "r.trec")["q"]] == ["x", "y", "z", "w"]
    write_pools_as_jsonl(tmp_path / "p.jsonl", pools)
    back = read_pools(tmp_path / "p.jsonl")[0]
    assert (back.doc_ids, [c.score for c in back.candidates]) == (("x", "y", "z", "w"), [0.0, 0.0, -1.0, -1.0])
