"""The order study from end to end on this project's own sentences: everything runs, resumes, and comes out the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from pd_rerank.config import load
from pd_rerank.errors import BadArgument, InvalidData, MissingResource
from pd_rerank.files import write_jsonl, write_run
from pd_rerank.studies import order
from pd_rerank.studies.order_settings import CONTROLS, OrderSettings
from pd_rerank.studies.order_templates import write_passages, write_questions, write_responses
from tests.studies.runs import CONFIGS, Pipeline, killed_ten_times, rows, tables

ROOT = Path(__file__).parents[2]
SMOKE = CONFIGS / "order_smoke.yaml"
execute = Pipeline("order_dependence")


BIASED = {"type": "fake", "options": {"position_bias": 0.4, "companion_bias": 0.4, "partition": "contiguous"}}


def small(**also: Any) -> dict[str, Any]:
    """A study small enough to be run again and again."""
    return {
        "output": "run",
        "presentations": 4,
        "resamples": 100,
        "shard_size": 3,
        "tasks": {"p": {"type": "passages", "templates": 8, "candidates": 6, "window": 3}},
        "scorers": {"plain": {"type": "fake"}, "biased": BIASED},
        **also,
    }


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the smoke configuration."""
    folder = tmp_path_factory.mktemp("smoke")
    assert execute(folder, SMOKE) == 0
    return folder / "runs" / "order_smoke"


# -- the smoke run ------------------------------------------------------------------------------------------------


def test_the_smoke_run_makes_every_table_and_says_what_it_left_out(smoke: Path) -> None:
    found = {path.stem for path in (smoke / "report" / "tables").glob("*.csv")}
    assert found >= {
        "populations", "table-1", "figures-of-passages", "contrasts", "retained-sets", "readers", "chosen-and-rejected",
        "by-partition", "by-reverse", "by-placeholder", "by-markers", "by-width", "by-batching", "by-first-stage",
        "first-stages", "pool-psi", "by-readout", "by-k", "variance-shares", "slot-profile", "adaptive-k", "cost",
        "not-run", "between-values-of-markers", "between-values-of-batching",
    }  # fmt: skip
    left = {row["what"]: row for row in rows(smoke, "not-run")}
    assert set(left) == {"a peer", "control: width, both on passages, widths 20"}
    assert {row[""] for row in left.values()} == {"left out"}
    record = json.loads((smoke / "run.json").read_text())
    assert set(record) == {"settings", "inputs", "versions"}
    page = (smoke / "report" / "index.html").read_text()
    assert "No figure here says anything about a scorer" in page
    assert "Table 1" in page
    assert len(list((smoke / "report" / "figures").glob("*.svg"))) >= 5


def test_what_does_not_depend_on_order_is_perfectly_stable_and_what_does_is_not(smoke: Path) -> None:
    one = {row["scorer"]: row for row in rows(smoke, "table-1")}
    steady = ("unbiased", "both, canonical order", "both, one at a time")
    for name in steady:
        for column, value in one[name].items():
            if "τ-PSI" in column or "flip" in column:
                assert float(value) == 0.0, (name, column)
            if "overlap" in column:
                assert float(value) == 1.0, (name, column)
    for name in ("place 0.3", "company 0.5", "both", "both, BSC x5"):
        assert float(one[name]["passages τ-PSI"]) > 0
        assert float(one[name]["passages overlap"]) < 1
    assert float(one["both"]["questions answer flip"]) > 0
    assert float(one["both"]["responses pair flip"]) > 0
    assert float(one["both, BSC x5"]["passages τ-PSI"]) < float(one["both"]["passages τ-PSI"])
    assert (one["both, BSC x5"]["M"], one["both, canonical order"]["M"], one["both"]["M"]) == ("4", "2", "10")


def test_tables_agree_with_one_another(smoke: Path) -> None:
    one = {row["scorer"]: row for row in rows(smoke, "table-1")}
    figures = {(r["figure"], r["scorer"]): r for r in rows(smoke, "figures-of-passages")}
    sets = {(r["scorer"], r["at"]): r for r in rows(smoke, "retained-sets") if r["task"] == "passages"}
    contrasts = {
        (r["figure"], r["against"]): float(r["difference"]) for r in rows(smoke, "contrasts") if r["task"] == "passages"
    }
    for name in one:
        overlap = figures["overlap", name]
        assert float(overlap["low"]) <= float(overlap["value"]) <= float(overlap["high"])
        assert overlap["value"] == one[name]["passages overlap"]
        assert float(sets[name, "own F1"]["overlap"]) == pytest.approx(float(overlap["value"]))
        assert sets[name, "own F1"]["n"] == "8"  # the half that nothing was fitted on
        if name != "unbiased":
            apart = float(one["unbiased"]["passages τ-PSI"]) - float(one[name]["passages τ-PSI"])
            assert contrasts["τ-PSI", name] == pytest.approx(apart)
    sweep = {(r["scorer"], r["task"], r["K"]): r for r in rows(smoke, "by-k")}
    assert float(sweep["both", "passages", "1"]["τ-PSI"]) != 0.0
    assert sweep["both", "passages", "10"]["ensembles"] == "2"
    shares = next(r for r in rows(smoke, "variance-shares") if r["scorer"] == "place 0.3" and r["task"] == "passages")
    assert float(shares["slot"]) > 0.8  # a liking for places is all that moves it
    between = {r["scorer"]: r for r in rows(smoke, "between-values-of-batching")}
    assert float(between["both"]["τ-PSI between"]) == 0.0
    spent = {r["presentations"]: r for r in rows(smoke, "adaptive-k") if r["task"] == "passages"}
    assert float(spent["fixed 5"]["spent"]) == 5.0
    assert 2.0 <= float(spent["until 0.2"]["spent"]) <= float(spent["until 0.01"]["spent"]) <= 10.0
    shifts = {(r["scorer"], r["change"]): r for r in rows(smoke, "pool-psi")}
    assert float(shifts["unbiased", "replace"]["Pool-PSI"]) == 0.0
    assert float(shifts["both", "replace"]["Pool-PSI"]) > 0.0
    assert shifts["both", "drop"]["survivors"] == "11.0"
    disputed = next(r for r in rows(smoke, "populations") if r["task"] == "claims")
    assert disputed["left out"] == "2 disputed"


# -- the same again -----------------------------------------------------------------------------------------------


def test_running_again_scores_nothing_and_changes_no_byte(tmp_path: Path) -> None:
    task = {"type": "qa", "templates": 6, "candidates": 5, "window": 5, "reader": {"type": "extractive"}}
    config = small(tasks={"q": task}, controls={"width": {"values": [1, 5], "queries": 4}})
    assert execute(tmp_path, config) == 0
    before = tables(tmp_path / "run")
    scored = [p for p in (tmp_path / "run").rglob("*") if p.suffix in (".npz", ".json") and "report" not in p.parts]
    stamps = {path: path.stat().st_mtime_ns for path in scored if path.name != "run.json" or "shard" in str(path)}
    assert any("answers" in str(path) for path in stamps)
    assert execute(tmp_path, config) == 0
    assert tables(tmp_path / "run") == before
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps


def test_killed_at_random_moments_it_ends_with_the_same_tables(tmp_path: Path) -> None:
    killed_ten_times(execute, tmp_path, small(controls={"reverse": {"queries": 4}}), seed=5)


# -- by hand --------------------------------------------------------------------------------------------------------


def by_hand(folder: Path) -> dict[str, Any]:
    """Four queries of four passages, all of the same kind, and a peer's three runs: the toy of docs."""
    write_jsonl(folder / "topics.jsonl", ({"qid": f"q{i}", "text": f"question {i}"} for i in range(4)))
    write_jsonl(folder / "corpus.jsonl", ({"_id": d, "text": f"passage {d}"} for d in "ABCDE"))
    grades = {"A": 3, "B": 2, "D": 1, "C": 0}
    (folder / "qrels.txt").write_text("".join(f"q{i} 0 {d} {g}\n" for i in range(4) for d, g in grades.items()))
    write_run(folder / "first.trec", [(f"q{i}", [(d, 5.0 - k) for k, d in enumerate("CADBE")]) for i in range(4)])
    shown = [
        {"A": 0.9, "B": 0.7, "C": 0.5, "D": 0.1},
        {"A": 0.8, "B": 0.75, "D": 0.45, "C": 0.4},
        {"B": 0.6, "A": 0.55, "C": 0.5, "D": 0.2},
    ]
    for k, scores in enumerate(shown):
        ranked = sorted(scores.items(), key=lambda item: -item[1])
        write_run(folder / f"peer.{k}.trec", [(f"q{i}", ranked) for i in range(4)])
    task = {
        "type": "passages", "run": "first.trec", "topics": "topics.jsonl", "corpus": "corpus.jsonl",
        "qrels": "qrels.txt", "candidates": 4, "window": 4, "consumers": ["threshold", "pair"], "min_grade": 2,
    }  # fmt: skip
    peer = {"type": "scores", "runs": {"toy": [f"peer.{k}.trec" for k in range(3)]}, "presentations": 3}
    return small(tasks={"toy": task}, scorers={"peer": peer})


def test_cells_are_what_one_works_out_by_hand(tmp_path: Path) -> None:
    assert execute(tmp_path, by_hand(tmp_path)) == 0
    (one,) = rows(tmp_path / "run", "table-1")
    # Rankings ABCD, ABDC, BACD: (A,B) and (C,D) are turned in one of three, so 2·1 + 2·1 of 3·6 pairs disagree.
    assert float(one["toy τ-PSI"]) == pytest.approx(4 / 18)
    # Ends (A,D), (A,C), (B,D): all pairs of presentations differ, and none comes twice.
    assert float(one["toy pair flip"]) == pytest.approx(1.0)
    assert float(one["toy pair flip, modal"]) == pytest.approx(2 / 3)
    # F1 of {A, B} is 1 in the first order for thresholds above C's .5 and up to B's .7: the 41 points from .1 to .9 are
    # .02 apart, and the highest of these is .70. Kept are AB, AB, nothing: overlaps 1, 0, 0.
    sets = next(r for r in rows(tmp_path / "run", "retained-sets") if r["at"] == "own F1")
    assert float(sets["threshold"]) == pytest.approx(0.7)
    assert float(sets["overlap"]) == pytest.approx(1 / 3)
    assert float(sets["set flip"]) == pytest.approx(1.0)
    # nDCG: ABCD (3 + 2/log2(3) + 1/log2(5)) of ideal 3 + 2/log2(3) + 1/2; ABDC 1; BACD .9079.
    assert float(one["toy nDCG@10"]) == pytest.approx((0.9854419 + 1 + 0.9079365) / 3, abs=1e-6)
    pairs = rows(tmp_path / "run", "chosen-and-rejected")[0]
    assert float(pairs["quality of the pick"]) == pytest.approx((1 + 1 + 2 / 3) / 3)
    assert (pairs["in some"], pairs["in all orders"]) == ("1.0", "0.0")


# -- own data, own scorers, what fails ----------------------------------------------------------------------------


def test_one_scorer_that_cannot_run_leaves_the_others_and_ends_with_seven(tmp_path: Path) -> None:
    config = small()
    config["scorers"] |= {
        "gone": {"type": "scores", "runs": {"p": ["none.trec", "none2.trec"]}},
        "after it": {"of": "gone", "bsc": 2},
        "no model": {"type": "ocsft", "model": str(tmp_path / "nowhere"), "tasks": ["p"]},
    }
    assert execute(tmp_path, config) == 7
    left = {row["what"]: row for row in rows(tmp_path / "run", "not-run") if not row["what"].startswith("control")}
    assert set(left) == {"gone on p", "after it on p", "no model on p"}
    assert "MissingResource" in left["gone on p"]["why"]
    assert {row["scorer"] for row in rows(tmp_path / "run", "table-1")} == {"plain", "biased"}


def test_a_peer_that_ranked_other_candidates_is_refused(tmp_path: Path) -> None:
    config = by_hand(tmp_path)
    write_run(tmp_path / "peer.1.trec", [(f"q{i}", [("A", 2.0), ("E", 1.0)]) for i in range(4)])
    assert execute(tmp_path, config) == 7
    (left,) = [r for r in rows(tmp_path / "run", "not-run") if r[""] == "failed"]
    assert "'E' is not among the 4 candidates of task 'toy'" in left["why"]


def test_a_config_is_tried_out_on_less(tmp_path: Path) -> None:
    config = small(controls={"reverse": {"queries": 6}})
    config["scorers"]["mean"] = {"of": "biased", "bsc": 2}
    assert execute(tmp_path, config, "--queries", "4", "--presentations", "3", "--output", "tried") == 0
    assert rows(tmp_path / "tried", "populations")[0]["queries used"] == "4"
    left = {row["what"]: row["why"] for row in rows(tmp_path / "tried", "not-run")}
    assert left["mean"] == "3 presentations hold no two ensembles of 2"
    for words in (("--queries", "0"), ("--presentations", "0")):
        assert execute(tmp_path, config, *words) == BadArgument.exit_code


def test_bad_configs_are_refused_before_anything_is_scored(tmp_path: Path) -> None:
    task = small()["tasks"]["p"]
    brief = str(ROOT / "train" / "configs" / "rubric-brief.yaml")
    adapted = {"type": "ocsft", "model": "smollm2-135m", "options": {"adapter": "smollm2-135m-passages"}}
    for change, message in (
        ({"tasks": {"p": task | {"colour": 1}}}, "unknown setting 'tasks.p.colour'"),
        ({"tasks": {"p": task | {"queries": 0}}}, "queries: input should be greater than or equal to 4"),
        ({"tasks": {}}, "the study names no task"),
        ({"tasks": {"p": task | {"type": "responses", "reader": {"type": "extractive"}}}}, "has neither"),
        ({"tasks": {"a b": task, "a-b": task}}, "tasks 'a b' and 'a-b' would have the same files"),
        ({"scorers": {"x": {"of": "nobody", "bsc": 2}}}, "derived of 'nobody', which is not among the scorers"),
        ({"scorers": {"b": BIASED, "x": {"of": "b", "bsc": 5}}}, "hold 0 ensemble"),
        ({"scorers": {"b": {**BIASED, "options": {"seed": 3}}}}, "option 'seed' is the study's to set"),
        ({"scorers": {"b": {"type": "fake", "tasks": ["q"]}}}, "for task 'q', which is not listed"),
        ({"main": "nobody"}, "main is scorer 'nobody', which is not listed"),
        ({"controls": {"colour": {}}}, "unknown control 'colour'"),
        ({"controls": {"partition": {"values": ["striped"]}}}, "not 'striped'"),
        ({"controls": {"width": {"values": ["wide"]}}}, "takes numbers above 0, got 'wide'"),
        ({"controls": {"adaptive": {"values": [float("inf")]}}}, "a finite number"),
        ({"scorers": {"b": {"type": "fake", "options": {"position_bias": float("nan")}}}}, "a finite number"),
        ({"scorers": {"b" * 300: BIASED}}, "a name of 300 characters"),
        ({"scorers": {"b": {"type": "scores", "runs": {"p": []}}}}, "runs of task 'p' are one or more files"),
        ({"scorers": {"b": {"type": "scores", "runs": {"p": ["x", "x"]}}}}, "each of another presentation"),
        ({"scorers": {"b": {"type": "scores", "runs": {"p": ["x"]}, "options": {"a": 1}}}}, "take no model and no opt"),
        ({"tasks": {"p": task | {"consumers": ["reader"]}}}, "task of type passages has neither"),
        ({"tasks": {"p": task | {"candidates": 10**9}}}, "words for 96 candidates at most"),
        ({"reader": {"type": "server", "model": "m", "server": "here"}}, "the server's address is 'here'"),
    ):
        with pytest.raises(BadArgument, match=message):
            load(OrderSettings, given=small() | change)
    for change, message in (
        (
            {"scorers": {"b": {"type": "fake", "options": {"windw": 3}}}},
            "scorer 'b' on task 'p': unknown option",
        ),
        ({"scorers": {"b": {"type": "fake", "by_task": {"p": {"window": 0}}}}}, "window must be a whole number"),
        ({"controls": {"markers": {"values": ["nope"]}}}, "control 'markers', plain on p: unknown markers 'nope'"),
        ({"controls": {"batching": {"values": [{"nope": 1}]}}}, "control 'batching', .* unknown option 'nope'"),
    ):
        with pytest.raises(BadArgument, match=message):
            order.check(load(OrderSettings, given=small() | change))
    asked = load(OrderSettings, given=small(scorers={"a": adapted}))
    with pytest.raises(BadArgument, match="trained with rubric 'brief', asked is 'passage_relevance'"):
        order.check(asked)
    order.check(load(OrderSettings, given=small(scorers={"a": adapted}, tasks={"p": task | {"rubric": brief}})))
    with pytest.raises(MissingResource, match="no rubric file"):
        order.check(load(OrderSettings, given=small(tasks={"p": task | {"rubric": "none.yaml"}})))


def test_bad_data_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    for kind, write, spoil, message in (
        ("qa", write_questions, {"qid": "h00"}, "d.jsonl:2: 'h00' was at .*d.jsonl:1 before"),
        ("qa", write_questions, {"answers": []}, "d.jsonl:2: 'answers' is no list of accepted answers"),
        ("qa", write_questions, {"question": " "}, "d.jsonl:2: 'question' is ' '"),
        ("responses", write_responses, {"responses": [{"rid": "a", "text": "t", "scores": [9]}]}, "scores from 1 to 5"),
        ("responses", write_responses, {"responses": [{"rid": "a", "text": "t", "scores": [1]}] * 2}, "'a' twice"),
    ):
        write(path, 5, 4)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[1] |= spoil  # type: ignore[arg-type]
        write_jsonl(path, lines)
        task = {"type": kind, "file": str(path), "candidates": 4, "window": 4}
        settings = load(OrderSettings, given=small(tasks={"t": task}))
        with pytest.raises(InvalidData, match=message.replace("scores from", "numbers from")):
            order.read_task("t", settings.tasks["t"], tmp_path, seed=0)


def test_fewer_queries_are_among_more_and_their_order_is_the_files(tmp_path: Path) -> None:
    paths = write_passages(tmp_path, 20, 8)
    paths.pop("other")
    task = {"type": "passages", **{name: str(path) for name, path in paths.items()}, "candidates": 5, "window": 5}

    def chosen(queries: int, seed: int) -> list[str]:
        settings = load(OrderSettings, given=small(tasks={"t": task | {"queries": queries}})).tasks["t"]
        return [pool.query_id for pool in order.read_task("t", settings, tmp_path, seed=seed).pools]

    few, more = chosen(6, 0), chosen(12, 0)
    assert set(few) < set(more)
    assert few == sorted(few)
    assert set(few) != set(chosen(6, 1))


@pytest.mark.parametrize("name", ["order_smoke", "order_small", "order_paper"])
def test_every_config_is_valid_and_asks_for_every_control(name: str) -> None:
    settings = load(OrderSettings, file=CONFIGS / f"{name}.yaml")
    assert set(settings.controls) == set(CONTROLS)
