"""The NevIR study's published aggregates that are arithmetic on counts, counted again through the library.

Table II's strict and paired rates, the contrasts and their tests, pair-only scoring, the conflict pair and the
decomposition are in test_preference and test_replay; here is the rest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pd_rerank.evaluation.pairs import Case, Direction, coverage
from pd_rerank.evaluation.preference import PairOutcome, Place, contrast, pair_differences, position
from pd_rerank.evaluation.replay import Reranked, cost
from tests.designated import direction, vectors

PARTS = {"development": (38, 37, 0), "confirmation": (187, 185, 1), "test": (1383, 1364, 10)}
"""Per part its pairs, those covered on both sides, and those covered on one."""

TABLES = {"test_primary_2736": 2736, "confirmation_371": 371, "development_74": 74}


def a_case(d: Direction, *, there: bool) -> Case:
    """A direction with both passages in its pool, or with one missing."""
    return Case(
        direction=d,
        query_id=d.direction_id,
        doc_ids=("p", "o"),
        first=np.array([2.0, 1.0]),
        id_order=np.array([1, 0]),
        preferred=0,
        other=1 if there else None,
    )


def outcomes(n: int, ranks: list[tuple[int, int]]) -> list[PairOutcome]:
    """`n` outcomes with these ranks of preferred and other passage."""

    def place(rank: int) -> Place:
        return Place(rank=rank, best=rank, worst=rank)

    assert len(ranks) == n
    return [
        PairOutcome(
            direction=direction(f"g{i}-1:q1"),
            relation="strict_correct",
            preferred=place(p),
            other=place(o),
            pool_size=200,
        )
        for i, (p, o) in enumerate(ranks)
    ]


@pytest.mark.parametrize("part", list(PARTS))
def test_populations_follow_from_pairs_covered_on_both_sides_one_or_none(part: str) -> None:
    pairs, both, one = PARTS[part]
    row = vectors("nevir_anchors")["populations"][part]
    cases = []
    for i in range(pairs):
        conflict: Any = "same query" if part == "test" and i == 0 else None
        for k, side in enumerate(("q1", "q2")):
            d = direction(f"g{i}-1:{side}", conflict=conflict)
            cases.append(a_case(d, there=i < both or (i < both + one and k == 0)))
    found = coverage(cases)
    assert (found.planned_pairs, found.planned, found.used) == (row["pairs"], row["planned"], row["used"])
    assert found.complete_pairs == row["complete_pairs"]
    if part == "test":
        assert (found.covered, both) == (row["covered"], row["pairs_both_covered"])
        assert found.covered - 2 * both == 10  # directions of incomplete pairs count per query and in no pair


def test_pools_and_windows_of_the_test_part_add_up() -> None:
    found = vectors("nevir_anchors")["populations"]["test"]
    assert found["pool_rows"] / found["planned"] == pytest.approx(152.6, abs=0.06)
    assert found["used"] - found["both_in_top20_primary"] == 107
    assert found["empty_routes"]["sparse"] / found["planned"] == pytest.approx(0.19, abs=0.005)


@pytest.mark.parametrize("table", list(TABLES))
def test_position_rates_are_those_of_whole_counts(table: str) -> None:
    n, rows = TABLES[table], vectors("nevir_anchors")[table]
    seen = 0
    for name, row in rows.items():
        if not isinstance(row, dict) or row.get("pref1") is None or row.get("pref3") is None:
            continue
        first, third = round(n * row["pref1"]), round(n * row["pref3"])
        in_ten = row.get("both_top10") or 0
        # As many first places and first three as published; the others far down, pairs in the top ten as published.
        ranks = [1] * first + [2] * (third - first) + [50] * (n - third)
        pairs = [(rank, 10 if i < in_ten and rank < 50 else 60) for i, rank in enumerate(ranks)]
        place = position(outcomes(n, pairs), depths=(1, 3))
        digits = 4 if table == "development_74" or name.startswith(("qwen", "bge", "gpt")) else 9
        tolerance = 0.5 * 10.0**-digits if digits == 9 else 0.0006
        assert place.preferred_at[1] == pytest.approx(row["pref1"], abs=tolerance), name
        assert place.preferred_at[3] == pytest.approx(row["pref3"], abs=tolerance), name
        seen += 1
    assert seen >= 3


@pytest.mark.parametrize("table", list(TABLES))
def test_mean_ranks_are_whole_sums_over_the_directions(table: str) -> None:
    n, rows = TABLES[table], vectors("nevir_anchors")[table]
    for name, row in rows.items():
        for key in ("mean_rank_pref", "mean_rank_other"):
            if isinstance(row, dict) and row.get(key) is not None:
                total = row[key] * n
                assert total == pytest.approx(round(total), abs=1e-6), (name, key)
                each, rest = divmod(round(total), n)
                place = position(outcomes(n, [(each + (i < rest), 1) for i in range(n)]))
                assert place.mean_rank_preferred == pytest.approx(row[key], abs=1e-12)


def test_paired_contrasts_follow_from_both_direction_counts() -> None:
    anchors = vectors("nevir_anchors")
    tables = {**anchors["test_primary_2736"], **{f"{k}_L1": v for k, v in anchors["test_L1"].items()}}
    seen = 0
    for row in anchors["test_contrasts_pp"]:
        if "pair_est" not in row or "pair_n" in row:
            continue
        n, mine, theirs = 1363, tables[row["a"]]["both"], tables[row["b"]]["both"]

        def sides(right: int, n: int = n) -> list[PairOutcome]:
            return [
                PairOutcome(
                    direction=direction(f"g{i}-1:{side}"), relation="strict_correct" if i < right else "reverse"
                )
                for i in range(n)
                for side in ("q1", "q2")
            ]

        found = pair_differences(sides(mine), sides(theirs))
        assert len(found.values) == n
        assert round(100 * found.values.mean(), 2) == row["pair_est"], row["a"]
        seen += 1
    assert seen == 6


def test_group_signs_cover_every_group_and_fit_the_net() -> None:
    anchors = vectors("nevir_anchors")
    for row in anchors["test_contrasts_pp"]:
        if "groups_pos_zero_neg" not in row:
            continue
        up, even, down = row["groups_pos_zero_neg"]
        assert up + even + down == anchors["populations"]["test"]["groups"]
        # One correction or regression for each group with a sign, the rest of the net spread over the rising ones.
        net = row["corr"] - row["dmg"]
        signs = [1] * up + [0] * even + [-1] * down
        spare = net - (up - down)
        assert spare >= 0
        mine, theirs = [], []
        for i, sign in enumerate(signs):
            times = 1 + (spare // up + (i < spare % up) if sign > 0 else 0)
            for k in range(times if sign else 1):
                d = direction(f"g{i}-{k}:q1")
                mine.append(PairOutcome(direction=d, relation="strict_correct" if sign >= 0 else "reverse"))
                theirs.append(replace(mine[-1], relation="strict_correct" if sign <= 0 else "reverse"))
        found = contrast(mine, theirs)
        assert (found.groups_positive, found.groups_zero, found.groups_negative, found.net) == (up, even, down, net)


def test_the_windows_cost_follows_from_its_queries() -> None:
    spent = vectors("nevir_anchors")["cost"]["qwen"]
    queries = vectors("nevir_anchors")["populations"]["test"]["planned"]
    o = outcomes(1, [(1, 2)])[0]
    rows = [
        Reranked(
            outcome=replace(o, direction=direction(f"g{i}-1:q1")),
            query_id=f"q{i}",
            requested=20,
            judged=20 - (i < spent["l2_unavailable"]),
            fallback=i < spent["l2_unavailable"],
            moved=0,
            edge_tie=False,
        )
        for i in range(queries)
    ]
    found = cost(rows)
    assert (found.requested, found.missing, found.fallback) == (
        spent["l2_items"],
        spent["l2_unavailable"],
        spent["fallback_all"],
    )
    assert spent["l2_unavailable"] / spent["l2_unique"] == pytest.approx(0.0014, abs=5e-5)
    assert found.fallback / queries == pytest.approx(0.029, abs=5e-4)


def test_receipts_and_tokens_add_up() -> None:
    spent = vectors("nevir_anchors")["cost"]["qwen"]
    stages = [spent[name] for name in ("l1", "l2", "l2_cont")]
    assert sum(stage["receipts"] for stage in stages) == spent["receipts"]
    assert spent["planned_slots"] - spent["receipts"] == spent["unknown"]
    assert spent["l1_unique"] + spent["l2_unique"] == spent["planned_slots"]
    assert 2 * vectors("nevir_anchors")["populations"]["test"]["covered"] == spent["l1_items"]
    for name in ("prompt", "completion", "total"):
        assert sum(stage[name] for stage in stages) == spent["sum_tokens"][name]
    assert all(stage["prompt"] + stage["completion"] == stage["total"] for stage in stages)
    assert spent["l1"]["length"] + spent["l2"]["length"] == 94


def test_pair_only_ties_end_in_the_windows_branches() -> None:
    record = vectors("nevir_decomposition")
    branches = record["l1_tie_to_l2_branch"].values()
    assert (
        sum(n for n, _ in branches)
        == record["l1_outcomes"]["tie"]
        == vectors("nevir_anchors")["test_L1"]["qwen"]["tie"]
    )
    assert sum(right for _, right in branches) == record["l1_l2_cross"]["tie"]["strict"]
    whole = {name: sum(row[name] for row in record["l1_l2_cross"].values()) for name in ("strict", "reverse", "tie")}
    assert whole == {name: record["overall"][name] for name in whole}


def test_the_paraphrase_probe_leaves_nothing_but_ties() -> None:
    probe = vectors("nevir_anchors")["paraphrase_probe_24"]
    assert {name: row["strict"] + row["tie"] for name, row in probe["qwen"].items()} == dict.fromkeys(probe["qwen"], 24)
    assert probe["gpt"] == dict.fromkeys(probe["gpt"], 24)
