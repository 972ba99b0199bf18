"""Parts of labelled pairs: whole source groups, about their shares, the same every time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.evaluation.pairs import keep_apart, read_pairs, union_groups
from pd_rerank.evaluation.splits import first_groups, split
from tests.designated import SHARED, direction

SHARES = {"train": 0.6, "dev": 0.1, "test": 0.3}


def many(groups: int) -> list:  # type: ignore[type-arg]
    return [
        direction(f"g{i}-{pair}:{side}", preferred=f"p{i}{pair}{side}", other=f"o{i}{pair}")
        for i in range(groups)
        for pair in range(1 + i % 3)
        for side in ("q1", "q2")
    ]


def test_parts_share_no_source_and_lose_no_direction() -> None:
    directions = many(100)
    parts = split(directions, SHARES)
    keep_apart(parts)
    ids = [d.direction_id for part in parts.values() for d in part]
    assert sorted(ids) == sorted(d.direction_id for d in directions)
    for name, share in SHARES.items():
        assert abs(len(parts[name]) - share * len(directions)) <= 6  # a group at most


def test_a_split_depends_on_the_seed_and_not_on_the_files_order() -> None:
    directions = many(30)

    def ids(parts: dict) -> dict:  # type: ignore[type-arg]
        return {name: {d.direction_id for d in part} for name, part in parts.items()}

    assert ids(split(directions, SHARES)) == ids(split(directions[::-1], SHARES))
    assert ids(split(directions, SHARES)) != ids(split(directions, SHARES, seed=1))


def test_what_shares_a_passage_stays_together() -> None:
    directions = many(6)
    tied = [replace(d, other="one passage for all") for d in directions]
    with pytest.raises(InvalidData, match="1 source groups are too few for parts train, dev, test: 'dev' is empty"):
        split(tied, SHARES)


def test_shares_that_make_no_whole_are_refused() -> None:
    for shares in ({}, {"a": 0.5}, {"a": 1.5, "b": -0.5}):
        with pytest.raises(BadArgument, match="make 1 together"):
            split(many(4), shares)


def test_first_groups_are_whole_and_nest() -> None:
    directions = many(30)
    small, large = first_groups(directions, 10), first_groups(directions, 40)
    assert small < large
    assert 10 <= sum(d.group in small for d in directions) < 10 + 6
    assert first_groups(directions, 10_000) == {d.group for d in directions}


def test_a_file_may_call_the_fields_otherwise(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text(json.dumps({"question": "q", "yes": "a", "no": "b", "passage": 7}) + "\n")
    fields = {"query": "question", "preferred": "yes", "rejected": "no", "group": "passage"}
    (found,) = read_pairs(tmp_path / "own.jsonl", fields=fields)
    assert (found.query, found.preferred, found.other, found.group) == ("q", "a", "b", "7")


def test_nevir_test_splits_by_the_studys_groups() -> None:
    path = SHARED / "data" / "nevir" / "test.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    directions = read_pairs(path)
    assert len({d.group for d in union_groups(directions)}) == 698
    parts = split(directions, SHARES)
    keep_apart(parts)
    assert sum(len({d.group for d in part}) for part in parts.values()) == 698
