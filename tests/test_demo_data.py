"""The data set the demo runs on keeps its contract: every newcomer meets it first."""

from __future__ import annotations

import difflib
from collections import Counter
from importlib import resources
from itertools import pairwise

import pytest

from pd_rerank.files import read_jsonl
from pd_rerank.pool import Pool, read_pools

FOLDER = resources.files("pd_rerank") / "demo"


@pytest.fixture(scope="module")
def pools() -> list[Pool]:
    with resources.as_file(FOLDER) as folder:
        return read_pools(folder / "pools.jsonl")


@pytest.fixture(scope="module")
def qrels() -> dict[str, dict[str, int]]:
    grades: dict[str, dict[str, int]] = {}
    with resources.as_file(FOLDER) as folder:
        for where, line in read_jsonl(folder / "qrels.jsonl"):
            assert line["docid"] not in grades.setdefault(line["qid"], {}), where
            grades[line["qid"]][line["docid"]] = line["grade"]
    return grades


def test_eight_queries_have_24_candidates_each(pools: list[Pool]) -> None:
    assert [pool.query_id for pool in pools] == [f"d{i:02d}" for i in range(1, 9)]
    assert all(len(pool) == 24 for pool in pools)
    assert len({pool.query for pool in pools}) == 8


def test_every_id_names_its_query_and_is_used_once(pools: list[Pool]) -> None:
    for pool in pools:
        assert sorted(pool.doc_ids) == [f"{pool.query_id}-{i:02d}" for i in range(1, 25)]


def test_ids_do_not_follow_the_first_stage(pools: list[Pool]) -> None:
    assert all(list(pool.doc_ids) != sorted(pool.doc_ids) for pool in pools)


def test_first_stage_scores_are_positive_and_strictly_decrease(pools: list[Pool]) -> None:
    for pool in pools:
        scores = [candidate.score for candidate in pool.candidates]
        assert all(a is not None and b is not None and a > b > 0 for a, b in pairwise(scores))


def test_no_passage_occurs_twice_and_none_is_short_or_long(pools: list[Pool]) -> None:
    texts = [text for pool in pools for text in pool.texts]
    assert len(set(texts)) == len(texts) == 192
    for text in texts:
        assert 20 <= len(text.split()) <= 70, text
        assert text == " ".join(text.split())
        assert text[0].isupper()
        assert text[-1] in ".?!"


def test_every_candidate_is_graded_and_every_grade_has_its_candidate(
    pools: list[Pool], qrels: dict[str, dict[str, int]]
) -> None:
    assert {q: set(grades) for q, grades in qrels.items()} == {p.query_id: set(p.doc_ids) for p in pools}


def test_each_query_has_3_4_5_and_12_passages_of_grades_3_to_0(qrels: dict[str, dict[str, int]]) -> None:
    for query_id, grades in qrels.items():
        assert Counter(grades.values()) == {3: 3, 2: 4, 1: 5, 0: 12}, query_id


def test_numbers_in_ids_say_nothing_about_grades(qrels: dict[str, dict[str, int]]) -> None:
    """No number holds the same grade everywhere, so that an order by id is no order by grade."""
    by_number: dict[str, set[int]] = {}
    for grades in qrels.values():
        for doc_id, grade in grades.items():
            by_number.setdefault(doc_id.split("-")[1], set()).add(grade)
    assert all(len(grades) > 1 for grades in by_number.values())


def test_twins_are_alike_in_wording_and_differ_in_grade(pools: list[Pool], qrels: dict[str, dict[str, int]]) -> None:
    texts = {c.doc_id: c.text for pool in pools for c in pool.candidates}
    with resources.as_file(FOLDER) as folder:
        pairs = [line for _, line in read_jsonl(folder / "twins.jsonl")]
    assert [pair["qid"] for pair in pairs] == [pool.query_id for pool in pools]
    for pair in pairs:
        better, worse = pair["docid"], pair["twin"]
        assert qrels[pair["qid"]][better] > qrels[pair["qid"]][worse]
        alike = difflib.SequenceMatcher(None, texts[better].split(), texts[worse].split(), autojunk=False).ratio()
        assert 0.5 < alike < 1, (alike, pair)


def test_the_demo_states_who_wrote_it_and_under_which_licence() -> None:
    text = " ".join((FOLDER / "DATA.md").read_text(encoding="utf-8").split())
    assert "written for this project" in text
    assert "Apache-2.0" in text
