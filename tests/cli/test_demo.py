"""`pd-rerank demo` shows order dependence where there is some, and exactly none where there is none."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from pd_rerank.cli import app
from pd_rerank.cli import demo as module
from pd_rerank.engines.fake import FakeEngine
from pd_rerank.errors import EngineFailure
from pd_rerank.prompt import GradePrompt
from pd_rerank.scoring import Scoring, score_pools

Command = Callable[..., Any]

GIVEN, CONTIGUOUS, AVERAGE = (
    "round-robin, as given",
    "contiguous, as given",
    "average, presentations=5",
)
CANONICAL, SINGLE = 'order="canonical"', "window=1, one by one"


def figures(engine: FakeEngine, **settings: int) -> dict[str, Any]:
    chosen = {"queries": 2, "candidates": 24, "presentations": 10, "window": 20, "seed": 0, **settings}
    return module.measure(engine, GradePrompt(engine.tokenizer), **chosen)


def rows(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["way"]: row for row in found["rows"]}


def test_the_demo_runs_and_its_json_agrees_with_its_tables(cli: Command, tmp_path: Path) -> None:
    result = cli("demo", "--model", "fake", "--json", tmp_path / "figures.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert [row["way"] for row in found["rows"]] == [GIVEN, CONTIGUOUS, AVERAGE, CANONICAL, SINGLE]
    for row in found["rows"]:
        line = next(line for line in result.stdout.splitlines() if line.startswith(row["way"]))
        cells = re.split(r"\s{2,}", line.strip())[1:]
        for cell, name in zip(
            cells, ("mean_score_change", "score_sd", "kendall_tau", "retained_overlap"), strict=False
        ):
            assert float(cell) == pytest.approx(row[name], abs=6e-4)
        assert cells[4] == f"{row['top1_changes']} of {row['pairs']}"
    for best in found["example"]["top"]:
        for hit in best:
            assert f"#{hit['arrived']}, judged {hit['grade']}, {hit['score']:.3f}" in result.stdout


def test_tables_go_to_stdout_within_80_columns_and_progress_to_stderr(cli: Command) -> None:
    result = cli("demo", "--model", "fake", "--queries", "8", "--candidates", "24", "--presentations", "12")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert not any(line.endswith(("█", "·")) for line in result.stdout.splitlines())  # no bar is wrapped
    assert "word overlap" in result.stderr
    assert "word overlap" not in result.stdout


@pytest.mark.parametrize("words", [("--model", "fake"), ("--engine", "fake")])
def test_without_a_model_nothing_is_said_to_be_loaded_or_fetched(cli: Command, words: tuple[str, str]) -> None:
    result = cli("demo", *words, "--queries", "1")
    assert result.exit_code == 0, result.output
    assert not re.search("fetch|load|smollm2-135m:", result.stderr + result.stdout.partition("\n")[0])


def test_the_caveat_on_averages_stands_between_the_third_table_and_its_title(cli: Command) -> None:
    shown = " ".join(cli("demo", "--model", "fake").stdout.split())
    title, caveat, table = (
        shown.index(words)
        for words in ("3. What changes", "cannot rank by what a model does not see", "how the list is scored")
    )
    assert title < caveat < table
    assert title < shown.index("An average is compared with one over other orders") < table
    assert "SD of scores: " in shown[table:]
    assert "judged grade" in shown[:title]


def test_where_stderr_is_no_terminal_lines_tell_how_far_it_is(cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SIGN_OF_LIFE_S", 0.0)
    words = ("demo", "--model", "fake", "--queries", "1", "--candidates", "8", "--presentations", "2")
    lines = [line for line in cli(*words).stderr.splitlines() if line.startswith("graded")]
    assert lines[0] == "graded 8 of 64 candidates"
    assert lines[-1] == "graded 64 of 64 candidates"
    assert "graded" not in cli(*words, "--quiet").stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_stdout_that_knows_no_bars_gets_others(encoding: str) -> None:
    result = CliRunner(charset=encoding).invoke(app, ["demo", "--model", "fake"])
    assert result.exit_code == 0, result.output
    assert re.search(r"1-\d  #+\.+  10/10", result.stdout)
    assert result.stdout.isascii()
    assert "\\u" not in result.stdout


def test_text_that_stdout_cannot_spell_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    pools, *rest = module.demo_data()
    pools[0] = replace(pools[0], query="pourquoi l'été ?")
    monkeypatch.setattr(module, "demo_data", lambda: (pools, *rest))
    result = CliRunner(charset="ascii").invoke(app, ["demo", "--model", "fake"])
    assert result.exit_code == 0, result.output
    assert r"l'\xe9t\xe9" in result.stdout


def test_it_runs_without_what_only_evaluation_needs() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['ranx', 'scipy', 'numba', 'pandas', 'matplotlib']))\n"
        "from pd_rerank.cli import main; main(['demo', '--model', 'fake', '--quiet'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_position_biased_model_depends_on_order_and_two_ways_do_not() -> None:
    found = rows(figures(FakeEngine(position_bias=0.6)))
    for way in (GIVEN, CONTIGUOUS):
        assert found[way]["mean_score_change"] > 0.05
        assert found[way]["kendall_tau"] < 0.9
        assert found[way]["retained_overlap"] < 0.9
    assert found[GIVEN]["top1_changes"] > 0
    for way in (CANONICAL, SINGLE):
        assert found[way]["mean_score_change"] == 0.0
        assert found[way]["kendall_tau"] == 1.0
        assert found[way]["retained_overlap"] == 1.0
        assert found[way]["top1_changes"] == 0


def test_averaging_dampens_order_but_does_not_remove_it() -> None:
    found = rows(figures(FakeEngine(position_bias=0.6)))
    assert 0 < found[AVERAGE]["mean_score_change"] < found[GIVEN]["mean_score_change"]
    assert found[GIVEN]["kendall_tau"] < found[AVERAGE]["kendall_tau"] < 1


def test_an_average_is_compared_with_one_over_other_presentations_only() -> None:
    """With 2 presentations an average is over one of them: the pair of halves is the pair of arrivals."""
    found = figures(FakeEngine(position_bias=0.6), presentations=2)["rows"]
    assert found[2]["way"] == "average, presentations=1"
    assert {**found[2], "way": "", "cpu_seconds_per_query": 0} == {**found[0], "way": "", "cpu_seconds_per_query": 0}


def test_the_average_row_agrees_with_the_scorer_averaging_itself() -> None:
    """Presentations=5 from two seeds is what the row stands for: its change is of the same size."""
    engine = FakeEngine(position_bias=0.6)
    prompt = GradePrompt(engine.tokenizer)
    pools, _, _ = module.demo_data()
    changes = []
    for first in range(0, 40, 10):
        a, b = (
            score_pools(pools[:2], engine=engine, prompt=prompt, scoring=Scoring(presentations=5, seed=seed))
            for seed in (first, first + 5)
        )
        changes += [np.abs(x.mean() - y.mean()).mean() for x, y in zip(a, b, strict=True)]
    row = rows(figures(engine))[AVERAGE]
    assert row["mean_score_change"] == pytest.approx(np.mean(changes), rel=0.2)


def test_the_zeros_are_computed_a_model_that_changes_its_mind_shows_in_every_row() -> None:
    """Scores that differ from prompt to prompt are order dependence no arrangement can hide."""
    noise = np.random.default_rng(0)
    found = rows(figures(FakeEngine(relevance=lambda query, text: float(noise.random()))))
    assert all(row["mean_score_change"] > 0 and row["retained_overlap"] < 1 for row in found.values())


def test_a_model_without_position_bias_is_order_free_in_every_row() -> None:
    found = rows(figures(FakeEngine()))
    for way in (GIVEN, CONTIGUOUS, CANONICAL, SINGLE):
        assert found[way]["mean_score_change"] == 0.0
        assert found[way]["retained_overlap"] == 1.0


def test_an_arrival_order_is_scored_as_the_caller_would_have_it_scored() -> None:
    """The figures' first row comes from lists really handed over in that order, each place once."""
    found = figures(FakeEngine(position_bias=0.6), presentations=3)
    for best in found["example"]["top"]:
        assert len({hit["arrived"] for hit in best}) == 5
        assert [hit["score"] for hit in best] == sorted((hit["score"] for hit in best), reverse=True)


def test_each_arrival_order_is_its_own_call_so_that_equality_is_never_a_shortcut_of_the_engine() -> None:
    engine = FakeEngine(position_bias=0.6)
    figures(engine, queries=1, candidates=8, presentations=4, window=4)
    assert engine.calls == 4 + 3 * 3
    assert engine.prompts == (4 + 3 + 3) * 2 + 3 * 8


def test_the_settings_reach_the_figures() -> None:
    found = figures(FakeEngine(position_bias=0.3), queries=1, candidates=6, presentations=4, window=3, seed=5)
    assert found["settings"] | {"template": ""} == {
        "queries": 1,
        "candidates": 6,
        "presentations": 4,
        "averaged": 2,
        "window": 3,
        "seed": 5,
        "template": "",
    }
    assert [row["pairs"] for row in found["rows"]] == [6, 3, 2, 3, 3]
    assert len(found["example"]["documents"]) == 6
    other = figures(FakeEngine(position_bias=0.3), queries=1, candidates=6, presentations=4, window=3, seed=6)
    assert other["rows"][0]["mean_score_change"] != found["rows"][0]["mean_score_change"]


def test_two_candidates_in_two_orders_are_enough(cli: Command) -> None:
    result = cli("demo", "--model", "fake", "--queries", "1", "--candidates", "2", "--presentations", "2")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("argument", [("--queries", "9"), ("--candidates", "25"), ("--presentations", "1")])
def test_numbers_out_of_range_stop_before_anything_loads(cli: Command, argument: tuple[str, str]) -> None:
    result = cli("demo", "--model", "fake", *argument)
    assert result.exit_code == 2
    assert "word overlap" not in result.output


def test_what_cannot_be_used_stops_before_anything_loads(cli: Command, tmp_path: Path) -> None:
    for words in (("--json", tmp_path), ("--adapter", "some/adapter"), ("--engine", "vlm")):
        result = cli("demo", "--model", "fake", *words)
        assert result.exit_code == 2
        assert "word overlap" not in result.output


def test_quiet_leaves_the_tables_and_nothing_else(cli: Command) -> None:
    result = cli("demo", "--model", "fake", "--quiet")
    assert result.stderr == ""
    assert "Kendall" in result.stdout


def test_a_missing_grade_is_reported_not_averaged_away() -> None:
    with pytest.raises(EngineFailure, match="no grade for 1 of 24 candidates of query 'd01'"):
        figures(FakeEngine(missing=lambda text: "asparagus" in text), queries=3, presentations=30)


def test_ndcg_has_the_linear_gain_of_the_evaluation() -> None:
    """d01's first candidates by the first stage, worked by hand."""
    found = figures(FakeEngine(), queries=1, candidates=4)["quality"]
    pools, qrels, _ = module.demo_data()
    gains = [qrels["d01"][doc_id] for doc_id in pools[0].doc_ids[:4]]
    discounts = [1 / np.log2(rank + 1) for rank in (1, 2, 3, 4)]

    def of(order: Sequence[int]) -> float:
        return float(np.dot(order, discounts) / np.dot(sorted(gains, reverse=True), discounts))

    assert len(set(gains)) > 1
    assert found["first_stage_ndcg10"] == pytest.approx(of(gains))
    assert found["random_ndcg10"] == pytest.approx(np.mean([of(order) for order in permutations(gains)]))


def test_every_way_is_compared_with_hand_worked_figures() -> None:
    """Scores .9 .8 .1 .0 against .8 .9 .1 .0: one of six pairs turns, the upper two are kept in both."""
    pool = module.demo_data()[0][0]
    pool = replace(pool, candidates=pool.candidates[:4])
    table = np.array([[0.9, 0.8, 0.1, 0.0], [0.8, 0.9, 0.1, 0.0], [0.0, 0.8, 0.9, 0.1]])
    found = module._compare([pool], [table], [np.array([1, 0, 0, 0])], pairs=[(0, 1)])
    assert found["kendall_tau"] == pytest.approx(4 / 6)
    assert found["retained_overlap"] == 1.0
    assert found["mean_score_change"] == pytest.approx(0.05)
    assert found["top1_changes"] == 1
    assert found["ndcg10"] == pytest.approx((1 + 1 / np.log2(3) + 1 / np.log2(5)) / 3)
    assert module._compare([pool], [table], [np.ones(4)], pairs=[(0, 2)])["retained_overlap"] == pytest.approx(1 / 3)


class Trained(FakeEngine):
    """A fake with the card of an adapter."""

    adapter_card: dict[str, Any] = {"window": 2, "partition": "contiguous"}  # noqa: RUF012


def test_what_training_does_stands_beside_the_bare_model_in_the_adapters_own_prompt_and_windows() -> None:
    found = module.training(
        FakeEngine(position_bias=0.6),
        Trained(position_bias=0.0),
        "smollm2-135m-passages",
        queries=2,
        candidates=6,
        orders=3,
        seed=0,
    )
    bare, trained = found["rows"]
    assert (bare["way"], trained["way"], found["window"], found["orders"]) == ("bare model", "with adapter", 2, 3)
    assert bare["kendall_tau"] < 1.0 == trained["kendall_tau"]
    assert bare["mean_score_change"] > 0.0 == trained["mean_score_change"]
    shown = figures(FakeEngine(), candidates=6) | {"training": found}
    stream = io.StringIO()
    module.show(shown, Console(file=stream, width=80, highlight=False, markup=False))
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    line = next(line for line in text.splitlines() if line.startswith("with adapter"))
    assert re.split(r"\s{2,}", line.strip())[1] == f"{trained['ndcg10']:.2f}"
