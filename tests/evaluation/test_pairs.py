"""Labelled pairs from files, their conflicts and sources, and what of them a pool lets one judge."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pd_rerank.errors import InvalidData, MissingResource
from pd_rerank.evaluation.pairs import (
    coverage,
    designate,
    first_stage,
    keep_apart,
    mark_conflicts,
    prefix_group,
    read_pairs,
    union_groups,
)
from pd_rerank.pool import Candidate, Pool
from tests.designated import SHARED, direction, pool

NEVIR = {"id": "12-3", "q1": "who came?", "q2": "who never came?", "doc1": "Ann came.", "doc2": "Ann never came."}
OWN = {"query": "who came?", "preferred": "Ann came.", "rejected": "Ann never came."}


def written(tmp_path: Path, *records: Any) -> Path:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


# -- reading ------------------------------------------------------------------------------------------------------


def test_a_line_in_nevirs_shape_is_two_mirrored_directions(tmp_path: Path) -> None:
    one, two = read_pairs(written(tmp_path, NEVIR))
    assert (one.direction_id, one.query, one.preferred, one.other) == (
        "12-3:q1",
        *(NEVIR[k] for k in ("q1", "doc1", "doc2")),
    )
    assert (two.direction_id, two.query, two.preferred, two.other) == (
        "12-3:q2",
        *(NEVIR[k] for k in ("q2", "doc2", "doc1")),
    )
    assert (one.pair_id, one.group, one.side, two.side, one.conflict) == ("12-3", "12", "q1", "q2", None)


def test_a_group_is_the_prefix_the_pair_or_what_the_line_says(tmp_path: Path) -> None:
    path = written(tmp_path, NEVIR, {**NEVIR, "id": "12-4", "group": "apart"})
    assert [d.group for d in read_pairs(path)] == ["12", "12", "apart", "apart"]
    assert [d.group for d in read_pairs(path, source="pair")] == ["12-3", "12-3", "apart", "apart"]


def test_a_users_own_lines_need_a_query_and_two_passages(tmp_path: Path) -> None:
    by_text, by_id, third = read_pairs(
        written(
            tmp_path,
            OWN,
            {"query_id": 7, "preferred": "007", "rejected": 8, "id": "x", "pair": "p", "group": "source"},
            {"query": "and now?", "query_id": "8", "preferred": "8", "rejected": "007", "pair": "p", "group": "source"},
        )
    )
    assert (by_text.direction_id, by_text.group, by_text.pair_id) == ("1", "who came?", None)
    assert (by_id.direction_id, by_id.query_id, by_id.preferred, by_id.other) == ("x", "7", "007", "8")
    assert (by_id.side, third.side, by_id.pair_id, third.direction_id) == ("q1", "q2", "p", "3")


@pytest.mark.parametrize(
    ("lines", "place", "said"),
    [
        ([], "pairs.jsonl", "holds no pairs"),
        ([{"text": "x"}], ":1:", "no pair of passages"),
        ([{}], ":1:", "no fields"),
        (["{"], ":1:", "not JSON"),
        (["[1]"], ":1:", "a JSON object is wanted"),
        ([NEVIR, {**NEVIR, "id": "1-1", "doc2": None}], ":2:", "no 'doc2'"),
        ([NEVIR, {**NEVIR, "id": "1-1", "q2": 5}], ":2:", "'q2' is a int"),
        ([{**NEVIR, "q1": "  "}], ":1:", "'q1' is empty"),
        ([{k: v for k, v in NEVIR.items() if k != "id"}], ":1:", "no id"),
        ([NEVIR, "", NEVIR], ":3:", "was at"),
        ([NEVIR, OWN], ":2:", "two shapes"),
        ([{"query": "q", "preferred": "a"}], ":1:", "no 'rejected'"),
        ([{"preferred": "a", "rejected": "b"}], ":1:", "no 'query'"),
        ([{**OWN, "preferred": ["a"]}], ":1:", "'preferred' is a list"),
        ([{**OWN, "rejected": True}], ":1:", "'rejected' is a bool"),
        ([{**OWN, "id": ""}], ":1:", "no file can carry"),
        ([{**OWN, "pair": "p"}] * 3, ":3:", "a third line of pair 'p'"),
        ([{**OWN, "id": "a"}, {**OWN, "id": "a"}], ":2:", "'a' was at"),
        (['{"query": NaN}'], ":1:", "not JSON"),
    ],
)
def test_a_malformed_line_is_named_with_its_place(tmp_path: Path, lines: list[Any], place: str, said: str) -> None:
    with pytest.raises(InvalidData) as error:
        read_pairs(written(tmp_path, *lines))
    assert place in str(error.value)
    assert said in str(error.value)


def test_a_file_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(MissingResource):
        read_pairs(tmp_path / "none.jsonl")


# -- conflicts and sources ----------------------------------------------------------------------------------------


def test_labels_that_contradict_themselves_are_marked_whatever_the_ranker() -> None:
    same_query = [direction("a-1:q1", "p", "o", query="x"), direction("a-1:q2", "o", "p", query="x")]
    opposing = [direction("b-1:q1", "p", "o", query="y"), direction("c-1:q1", "o", "p", query="y")]
    itself = [direction("d-1:q1", "p", "p")]
    fine = [direction("e-1:q1", "p", "o", query="z"), direction("f-1:q1", "p", "o", query="z")]
    found = mark_conflicts([*same_query, *opposing, *itself, *fine])
    assert [d.conflict for d in found] == [
        *["same query"] * 2,
        *["opposing labels"] * 2,
        "same passages",
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("pair_id", "group"),
    [("1314-2", "1314"), ("nevir-validation-0444-1", "nevir-validation-0444"), ("x", "x"), ("-1", "-1")],
)
def test_a_prefix_group_is_what_stands_before_the_last_hyphen(pair_id: str, group: str) -> None:
    assert prefix_group(pair_id) == group


def test_sources_are_joined_through_passages_queries_and_words() -> None:
    ds = [
        direction("a-1:q1", "p1", "p2", query="Who's there?"),
        direction("b-1:q1", "p3", "p2", query="where?"),  # shares p2 with a
        direction("c-1:q1", "p4", "p5", query="there WHO'S"),  # the words of a, in another order
        direction("d-1:q1", "p6", "p7", query="? !"),  # no words
        direction("e-1:q1", "p8", "p9", query="! ?"),  # nor these: nothing links them
        direction("f-1:q1", "p10", "p7", query="what"),  # shares p7 with d
    ]
    assert [d.group for d in union_groups(ds)] == ["a", "a", "a", "d", "e", "d"]


def test_splits_that_share_a_source_are_refused_by_name() -> None:
    train = [direction("a-1:q1", "p1", "p2"), direction("b-1:q1", "p3", "p4")]
    test = [direction("c-1:q1", "p5", "p6"), direction("d-1:q1", "p7", "p4")]
    keep_apart({"train": train, "test": test[:1]})
    with pytest.raises(InvalidData, match=r"'b' is in 'train' and, through 'd-1:q1', in 'test'"):
        keep_apart({"train": train, "test": test})


# -- joining to pools ---------------------------------------------------------------------------------------------


def test_passages_are_found_by_id_or_by_text_and_never_inserted() -> None:
    pools = [pool("q", {"p": 2.0, "o": 1.0}, query="the  query\n")]
    by_id, by_text, lacking, none = designate(
        [
            direction("a-1:q1", "p", "o", query="", query_id="q"),
            direction("b-1:q1", "text  of p", "text of o", query="the query"),
            direction("c-1:q1", "gone", "o", query="the query", query_id="q"),
            direction("d-1:q1", "p", "o", query="another"),
        ],
        pools,
    )
    assert (by_id.preferred, by_id.other, by_id.missing) == (0, 1, None)
    assert (by_text.preferred, by_text.other, by_text.missing) == (0, 1, None)
    assert (lacking.missing, lacking.preferred, lacking.other) == ("preferred", None, 1)
    assert (none.missing, none.query_id, none.doc_ids) == ("pool", None, ())


def test_a_pool_named_after_the_direction_is_its_pool() -> None:
    (found,) = designate([direction("a-1:q1")], [pool("other", {"p": 1.0}), pool("a-1:q1", {"p": 2.0, "o": 1.0})])
    assert found.query_id == "a-1:q1"


def test_a_line_without_an_id_never_takes_a_pool_by_its_count(tmp_path: Path) -> None:
    pairs = read_pairs(written(tmp_path, {**OWN, "preferred": "p", "rejected": "o"}))
    pools = [
        pool("1", {"p": 1.0, "o": 2.0}, query="something else"),
        pool("7", {"p": 2.0, "o": 1.0}, query=OWN["query"]),
    ]
    assert [d.direction_id for d in pairs] == ["1"]
    assert designate(pairs, pools)[0].query_id == "7"
    assert designate(pairs, pools[:1])[0].missing == "pool"


def test_a_query_id_whose_pool_asks_something_else_is_refused() -> None:
    with pytest.raises(InvalidData, match="asks 'another', the pair 'this'"):
        designate([direction(query="this", query_id="q")], [pool("q", {"p": 1.0}, query="another")])


def test_pools_of_one_text_serve_the_directions_of_that_text_in_order() -> None:
    ds = [direction("a-1:q1", query="x"), direction("b-1:q1", query="x")]
    two = [pool("first", {"p": 1.0}, query="x"), pool("second", {"o": 1.0}, query="x")]
    assert [c.query_id for c in designate(ds, two)] == ["first", "second"]
    assert [c.query_id for c in designate(ds, two[:1])] == ["first", "first"]
    with pytest.raises(InvalidData, match="2 pools ask its query"):
        designate(ds[:1], two)


def test_a_passage_that_two_candidates_carry_is_to_be_named_by_id() -> None:
    twins = Pool(
        query_id="q", query="x", candidates=tuple(Candidate(doc_id=d, text="same", score=1.0) for d in ("a", "b"))
    )
    with pytest.raises(InvalidData, match=r"is 'a', 'b' in pool 'q'"):
        designate([direction("a-1:q1", "same", "b", query="x")], [twins])


def test_coverage_counts_what_is_missing_and_why() -> None:
    ds = mark_conflicts(
        [
            direction("a-1:q1"),
            direction("a-1:q2", "o", "p"),
            direction("a-2:q1"),
            direction("a-2:q2", "o", "x"),
            direction("b-1:q1", "x", "y"),
            direction("b-1:q2"),
            direction("c-1:q1", query="same"),
            direction("c-1:q2", "o", "p", query="same"),
        ]
    )
    pools = [pool(d.direction_id, {"p": 2.0, "o": 1.0}, query=d.query) for d in ds if d.direction_id != "b-1:q2"]
    found = coverage(designate(ds, pools))
    assert (found.planned, found.covered, found.used, found.conflicts) == (8, 5, 3, 2)
    assert dict(found.missing) == {"other": 1, "both": 1, "pool": 1}
    assert (found.planned_pairs, found.complete_pairs, found.planned_groups, found.groups) == (4, 1, 3, 1)


def test_first_stage_scores_where_some_or_all_are_missing() -> None:
    def made(*scores: float | None) -> Pool:
        return Pool(
            query_id="q",
            query="",
            candidates=tuple(Candidate(doc_id=str(i), text="", score=s) for i, s in enumerate(scores)),
        )

    assert first_stage(made(None, None, None)).tolist() == [0, -1, -2]
    assert first_stage(made(0.5, None)).tolist() == [0.5, -np.inf]
    assert first_stage(made()).tolist() == []


def test_route_tops_say_which_route_gave_a_query_nothing() -> None:
    pools = [
        pool("a-1:q1", {"p": 2.0, "o": 1.0}, routes={"dense": ["o", "p"], "bm25": ["p"]}),
        pool("a-1:q2", {"p": 2.0, "o": 1.0}, routes={"dense": ["p"]}),
    ]
    cases = designate([direction("a-1:q1"), direction("a-1:q2", "o", "p")], pools)
    assert [c.route_tops for c in cases] == [("p", "o"), (None, "p")]  # bm25, dense


# -- the real file ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nevir() -> Any:
    path = SHARED / "data" / "nevir" / "test.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    return read_pairs(path)


def test_the_counts_of_nevirs_test_split(nevir: Any) -> None:
    assert (len(nevir), len({d.pair_id for d in nevir})) == (2766, 1383)
    assert len({d.preferred for d in nevir} | {d.other for d in nevir}) == 2081
    assert len({d.group for d in nevir}) == 700
    assert [d.direction_id for d in nevir if d.conflict] == ["1314-2:q1", "1314-2:q2"]
    assert {d.conflict for d in nevir} == {None, "same query"}


def test_nevirs_union_find_groups_are_698(nevir: Any) -> None:
    assert len({d.group for d in union_groups(nevir)}) == 698


def test_nevir_joins_to_pools_by_text_or_by_direction(nevir: Any) -> None:
    texts = sorted({d.preferred for d in nevir} | {d.other for d in nevir})
    ids = {text: hashlib.sha256(text.encode()).hexdigest()[:12] for text in texts}

    def pools(name: bool) -> list[Pool]:
        return [
            Pool(
                query_id=d.direction_id if name else str(i),
                query=d.query,
                candidates=tuple(Candidate(doc_id=ids[t], text=t) for t in sorted((d.preferred, d.other))),
            )
            for i, d in enumerate(nevir)
        ]

    for name in (True, False):
        found = coverage(designate(nevir, pools(name)))
        assert (found.planned, found.covered, found.used) == (2766, 2766, 2764)
        assert (found.complete_pairs, found.planned_groups) == (1382, 700)
