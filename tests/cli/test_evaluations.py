"""`pd-rerank evaluate`, `stability`, `preference`, `compare`: files to reports, and gates to exit codes."""

from __future__ import annotations

import csv
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from pd_rerank.config import CompareSettings, EvaluateSettings, PreferenceSettings, StabilitySettings
from pd_rerank.decisions import Threshold
from pd_rerank.evaluation.report import FILES
from pd_rerank.files import read_qrels
from tests.designated import SHARED
from tests.evaluated import QUERIES, SHAKY, STEADY, run_lines, write_evaluation, write_scored

Cli = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_evaluation(tmp_path)
    return tmp_path


def report_of(done: Any) -> dict[str, Any]:
    assert done.exit_code in (0, 7), done.stderr
    return json.loads(done.stdout)


def rows(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every figure of a report by name."""
    return {row["name"]: row for section in report["sections"] for row in section["rows"]}


def table_of(report: dict[str, Any], title: str) -> list[dict[str, Any]]:
    found = [t for section in report["sections"] for t in section["tables"] if t["title"] == title]
    return [dict(zip(t["columns"], row, strict=True)) for t in found for row in t["rows"]]


# -- evaluate ------------------------------------------------------------------------------------------------------


def test_a_run_is_evaluated_with_what_its_figures_leave_open(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "qrels").write_text("q1 0 A 3\nq1 0 B 1\nq2 0 A 1\n")
    (tmp_path / "first").write_text("q1 Q0 A 1 2 t\nq1 Q0 C 2 1 t\nnobody Q0 A 1 1 t\n")
    (tmp_path / "run").write_text(run_lines({"q1": {"C": 0.9, "A": 0.5, "X": 0.5}, "nobody": {"A": 1}}))
    words = ("--run", tmp_path / "run", "--first-stage", tmp_path / "first", "--metrics", "ndcg@10")
    report = report_of(cli("evaluate", *words, "--qrels", tmp_path / "qrels"))
    # q1 as worked in `ranking.evaluate`: .4131 of .8262; q2 has no results and counts 0.
    ideal = 3 + 1 / math.log2(3)
    assert rows(report)["nDCG@10"]["value"] == pytest.approx(1.5 / ideal / 2)
    assert (rows(report)["nDCG@10"]["low"], rows(report)["nDCG@10"]["n"]) == (0.0, 2)
    (found,) = table_of(report, "What the figures leave open")
    assert found["ideal order"] == pytest.approx(3 / ideal / 2)
    assert (found["of it"], found["in pool"]) == (pytest.approx(0.5), 0.25)
    assert (found["unjudged"], found["tied"]) == (pytest.approx(2 / 3), 0.5)
    assert found["ties for"] == pytest.approx(3 / math.log2(3) / ideal / 2)
    assert found["first stage"] == pytest.approx(3 / ideal / 2)
    assert rows(report)["nDCG@10 less first stage"]["value"] == pytest.approx(-1.5 / ideal / 2)
    text = report["sections"][0]["text"]
    assert "1 of them have no results and count 0: 'q2'" in text
    assert "1 queries of the run are not judged and left out: 'nobody'" in text
    assert [query["query_id"] for query in report["queries"]] == ["q1", "q2"]  # q1 lost more on the first stage


def test_scores_are_evaluated_as_they_are_served_and_their_pools_set_the_ceiling(cli: Cli, folder: Path) -> None:
    words = ("--scores", folder / "scores", "--first-stage", folder / "pools", "--qrels", folder / "qrels.txt")
    report = report_of(cli("evaluate", *words, "--metrics", "RR@10,R@10", "--relevance-level", 3))
    assert rows(report)["RR(rel=3)@10"]["value"] == 1.0  # A leads by its mean in all three
    assert rows(report)["R(rel=3)@10"]["value"] == 1.0
    open_ends = table_of(report, "What the figures leave open")
    assert [row["first stage"] for row in open_ends] == [0.25, 1.0]  # the first stage has A last of four
    assert report["settings"]["systems"]["scores"]["presentations"] == 3
    assert report["queries"][0]["documents"]["columns"][-1] == "text"
    assert report["queries"][0]["query"] == "what is asked as 007"


def test_several_systems_stand_in_one_report(cli: Cli, folder: Path) -> None:
    words = ("--run", f"one={folder / 'run.trec'}", "--run", folder / "run2.trec", "--qrels", folder / "qrels.txt")
    report = report_of(cli("evaluate", *words))
    assert [section["title"] for section in report["sections"]] == ["one", "run2"]
    assert "one nDCG@10" in report["queries"][0]["values"]


def test_the_report_folder_is_whole_and_the_page_asks_for_nothing(cli: Cli, folder: Path) -> None:
    words = ("--run", folder / "run.trec", "--qrels", folder / "qrels.txt", "--output", folder / "report")
    done = cli("evaluate", *words)
    assert (done.exit_code, done.stdout) == (0, "")
    names = sorted(path.name for path in (folder / "report").iterdir())
    assert names == ["queries.csv", "report.html", "report.json", "report.md"]
    with open(folder / "report/queries.csv", newline="", encoding="utf-8") as stream:
        lines = list(csv.DictReader(stream))
    assert sorted(line["query_id"] for line in lines) == ["007", "NA", "q1"]
    page = (folder / "report/report.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "src=" not in page
    assert cli("evaluate", *words).exit_code == 0  # written over
    (folder / "report/mine.txt").write_text("")
    refused = cli("evaluate", *words)
    assert refused.exit_code == 2
    assert "mine.txt" in refused.stderr


@pytest.mark.parametrize("command", ["evaluate", "stability", "preference", "compare"])
def test_settings_come_from_a_file_too(cli: Cli, folder: Path, command: str) -> None:
    given = {
        "evaluate": {"run": [str(folder / "run.trec")], "qrels": str(folder / "qrels.txt")},
        "stability": {"scores": str(folder / "scores"), "top-k": 2},
        "preference": {
            n: str(folder / f) for n, f in (("pairs", "pairs.jsonl"), ("pools", "pools"), ("run", "run.trec"))
        },
        "compare": {
            "systems": [f"a={folder / 'scores'}", f"b={folder / 'run.trec'}"],
            "qrels": str(folder / "qrels.txt"),
        },
    }[command]
    (folder / "config.yaml").write_text(json.dumps(given))  # JSON is YAML
    assert report_of(cli(command, "--config", folder / "config.yaml"))["sections"]


# -- stability -----------------------------------------------------------------------------------------------------


def test_stability_of_scores_is_that_of_the_worked_example(cli: Cli, folder: Path) -> None:
    words = ("--scores", folder / "scores", "--pools", folder / "pools", "--qrels", folder / "qrels.txt")
    report = report_of(cli("stability", *words, "--threshold", 0.5, "--top-k", 3))
    found = rows(report)
    # q1: τ-PSI 2/9, overlap 7/9, set flip 1/3, churn 2/3; the other two queries do not move.
    assert found["tau_psi"]["value"] == pytest.approx(2 / 9 / 3)
    assert found["overlap"]["value"] == pytest.approx((7 / 9 + 2) / 3)
    assert found["set_flip"]["value"] == pytest.approx(1 / 3 / 3)
    assert found["top_k_churn"]["value"] == pytest.approx(2 / 3 / 3)
    assert found["overlap"]["low"] == pytest.approx(7 / 9)  # all three draws are q1
    assert sum(found[f"{part}_share"]["value"] for part in ("slot", "window", "companion")) == pytest.approx(1)
    assert [row["queries"] for row in table_of(report, "Slot profile")] == [3] * 4
    worst = report["queries"][0]
    assert worst["query_id"] == "q1"
    (flips,) = ([dict(zip(worst["documents"]["columns"], row, strict=True)) for row in worst["documents"]["rows"]],)
    assert [(d["document"], d["kept"], d["grade"], d["text"]) for d in flips] == [("C", "2 of 3", 0, "text of C")]
    assert (flips[0]["best rank"], flips[0]["worst rank"]) == (3, 4)
    assert (flips[0]["lowest score"], flips[0]["highest score"]) == (pytest.approx(0.4), pytest.approx(0.5))
    assert all(query["documents"] is None for query in report["queries"][1:])


def test_stability_of_runs_takes_any_system(cli: Cli, folder: Path) -> None:
    named = cli("stability", "--runs", folder / "run.trec", folder / "run2.trec")
    repeated = cli("stability", "--runs", folder / "run.trec", "--runs", folder / "run2.trec")
    report = report_of(named)
    assert report == report_of(repeated)
    assert rows(report)["tau_psi"]["value"] == pytest.approx(1 / 6 / 3)  # q1: one of six pairs turns
    assert "Where it comes from" not in [section["title"] for section in report["sections"]]


def test_a_threshold_fitted_on_half_reports_on_the_other_half_alone(cli: Cli, tmp_path: Path) -> None:
    scores = {f"q{i}": SHAKY if i % 2 else STEADY for i in range(10)}
    write_scored(tmp_path / "scores", scores)
    qrels = "".join(f"{q} 0 {d} 1\n" for q in scores for d in "AB")
    (tmp_path / "qrels").write_text(qrels)
    words = ("--scores", tmp_path / "scores", "--qrels", tmp_path / "qrels", "--threshold", "f1")
    report = report_of(cli("stability", *words, "--save-threshold", tmp_path / "t.json"))
    found = rows(report)
    assert (found["tau_psi"]["n"], found["overlap"]["n"], found["retained_f1"]["n"]) == (10, 5, 5)
    threshold = Threshold.load(tmp_path / "t.json")
    assert (threshold.objective, threshold.n_queries) == ("f1", 5)
    # Frozen, it is taken back for the same scores, and then every query counts.
    again = report_of(cli("stability", "--scores", tmp_path / "scores", "--threshold", tmp_path / "t.json"))
    assert rows(again)["overlap"]["n"] == 10


def test_a_threshold_of_other_scores_is_refused(cli: Cli, folder: Path) -> None:
    Threshold(value=0.5, context={"model": "another"}).save(folder / "t.json")
    done = cli("stability", "--scores", folder / "scores", "--threshold", folder / "t.json")
    assert done.exit_code == 5
    assert "another" in done.stderr
    Threshold(value=0.5, readout="argmax").save(folder / "t.json")
    done = cli("stability", "--scores", folder / "scores", "--threshold", folder / "t.json")
    assert (done.exit_code, "--readout argmax" in done.stderr) == (2, True)


def test_a_gate_that_holds_passes_and_one_that_does_not_ends_in_seven_with_the_worst_named(
    cli: Cli, folder: Path
) -> None:
    words = ("stability", "--scores", folder / "scores", "--threshold", 0.5, "--output", folder / "report")
    held = cli(*words, "--max-psi", 2 / 27, "--min-overlap", 0.9)
    assert held.exit_code == 0, held.stderr
    failed = cli(*words, "--max-psi", 0.05, "--min-overlap", 0.95, "--max-churn", 1)
    assert failed.exit_code == 7
    assert "2 of 3 gates failed" in failed.stderr
    assert "tau_psi is 0.07407, --max-psi 0.05 is the most (worst: 'q1' 0.2222" in failed.stderr
    assert "overlap is 0.9259, --min-overlap 0.95 is the least (worst: 'q1' 0.7778" in failed.stderr
    written = json.loads((folder / "report/report.json").read_text())
    assert [row[0] for row in written["sections"][0]["tables"][0]["rows"]] == ["FAILED", "FAILED", "passed"]


def test_averaged_presentations_move_less(cli: Cli, tmp_path: Path) -> None:
    write_scored(tmp_path / "scores", {"q1": [*SHAKY, SHAKY[0]], "q2": [*SHAKY, SHAKY[0]]})
    single = rows(report_of(cli("stability", "--scores", tmp_path / "scores")))
    averaged = rows(report_of(cli("stability", "--scores", tmp_path / "scores", "--average", 2)))
    # Means of presentations 1 and 2 and of 3 and 4: .85 .725 .45 .275 and .725 .65 .5 .15, one ranking.
    assert single["tau_psi"]["value"] > 0
    assert averaged["tau_psi"]["value"] == 0


# -- preference ----------------------------------------------------------------------------------------------------


def test_preference_says_what_is_preferred_where_it_stands_and_what_changed(cli: Cli, folder: Path) -> None:
    words = ("--pairs", folder / "pairs.jsonl", "--pools", folder / "pools")
    report = report_of(cli("preference", *words, "--scores", folder / "scores", "--reference", folder / "run.trec"))
    found = rows(report)
    # A over B is right, B over A wrong, A over D right; the preferred ones stand at 1, 2, 1.
    assert found["strict"]["value"] == pytest.approx(2 / 3)
    assert found["mrr"]["value"] == pytest.approx((1 + 0.5 + 1) / 3)
    assert found["strict"]["low"] == 0  # groups are resampled, and one of the three has none right
    titles = [section["title"] for section in report["sections"]]
    assert titles[:3] == ["Coverage", "Preference", "Position"]
    assert {"Against first stage", "Against run", "What decided"} <= set(titles)
    changed = table_of(report, "What changed")
    # The first stage ranks D C B A: only B over A is right there.
    assert (changed[0]["corrections"], changed[0]["regressions"], changed[0]["net"]) == (2, 1, 1)
    assert (changed[1]["corrections"], changed[1]["right in both"]) == (0, 2)
    assert report["queries"][0]["query_id"] == "2"  # the reversed one first
    grades = table_of(report, "Grades of the two passages")
    # Means times 3: .75 and .683 are both grade 2, .7 is 2 against .9, 3; .9 is 3 against .1, 0.
    assert {(grade["preferred \\ other"], g) for grade in grades for g in "0123" if grade[g]} == {
        ("2", "2"),
        ("2", "3"),
        ("3", "0"),
    }


def test_a_tie_stays_a_failure_though_the_first_stage_would_break_it(cli: Cli, folder: Path) -> None:
    write_scored(folder / "tied", {q: [[0.5] * 4] * 2 for q in QUERIES})
    words = ("--pairs", folder / "pairs.jsonl", "--pools", folder / "pools", "--scores", folder / "tied")
    report = report_of(cli("preference", *words))
    assert rows(report)["strict"]["value"] == 0
    assert {row["relation"]: row["directions"] for row in table_of(report, "Relations")}["model_tie"] == 3
    (overall,) = (row for row in table_of(report, "By what decided") if row["branch"] == "grade_tie")
    assert (overall["n"], overall["strict"], overall["first stage right"]) == (3, 1, 1)
    assert rows(report)["tie_share"]["value"] == 1
    spread = {row["ties"]: row["mrr"] for row in table_of(report, "How much ties matter")}
    assert (spread["best"], spread["worst"]) == (1.0, 0.25)


def test_a_window_rerank_is_told_by_branches(cli: Cli, folder: Path) -> None:
    words = ("--pairs", folder / "pairs.jsonl", "--pools", folder / "pools", "--scores", folder / "scores")
    report = report_of(cli("preference", *words, "--window", 2))  # of D C B A only D and C are reranked
    found = {row["branch"]: row["n"] for row in table_of(report, "By what decided")}
    assert found == {"both_outside_window": 2, "other_only_in_window": 1, "overall": 3}


def test_preference_gates(cli: Cli, folder: Path) -> None:
    words = (
        "preference",
        "--pairs",
        folder / "pairs.jsonl",
        "--pools",
        folder / "pools",
        "--scores",
        folder / "scores",
    )
    assert cli(*words, "--min-strict", 0.6, "--min-mrr", 0.8, "--min-coverage", 1).exit_code == 0
    failed = cli(*words, "--min-strict", 0.7)
    assert failed.exit_code == 7
    assert "(worst: '2' 0, " in failed.stderr
    none = cli(*words, "--min-both", 0.1)  # no pair has two sides
    assert none.exit_code == 7
    assert "nothing has both_directions" in none.stderr


# -- compare -------------------------------------------------------------------------------------------------------


def test_systems_without_a_common_query_are_not_compared(cli: Cli, folder: Path) -> None:
    (folder / "alien.trec").write_text("".join(f"zz Q0 d{i} {i} {9 - i} x\n" for i in range(1, 4)))
    done = cli("compare", f"a={folder / 'run.trec'}", f"b={folder / 'alien.trec'}")
    assert done.exit_code == 5
    assert "'b' and 'a' have no query in common" in done.stderr
    lines = (folder / "run.trec").read_text().splitlines(keepends=True)
    (folder / "part.trec").write_text("".join(line for line in lines if line.split()[0] == lines[0].split()[0]))
    words = (f"a={folder / 'run.trec'}", f"b={folder / 'part.trec'}", "--qrels", folder / "qrels.txt")
    done = cli("compare", *words)
    assert "'b' has 1 queries" in done.stderr


def test_systems_are_compared_query_by_query(cli: Cli, folder: Path) -> None:
    write_scored(folder / "steady", dict.fromkeys(QUERIES, STEADY))
    words = (folder / "scores", f"still={folder / 'steady'}", f"first={folder / 'run.trec'}")
    inputs = ("--qrels", folder / "qrels.txt", "--pairs", folder / "pairs.jsonl", "--pools", folder / "pools")
    done = cli("compare", *words, *inputs, "--threshold", 0.5, "--output", folder / "report")
    assert done.exit_code == 0, done.stderr
    report = json.loads((folder / "report/report.json").read_text())
    side = {row["system"]: row for row in table_of(report, "Side by side")}
    assert list(side) == ["scores", "still", "first"]
    assert side["scores"]["tau_psi"] == pytest.approx(2 / 27)
    assert (side["still"]["tau_psi"], side["first"]["tau_psi"]) == (0.0, None)
    assert side["scores"]["strict"] == pytest.approx(2 / 3)
    less = {(row["figure"], row["system"]): row for row in table_of(report, "Less scores")}
    assert less["tau_psi", "still"]["difference"] == pytest.approx(-2 / 27)
    assert less["tau_psi", "still"]["up / down"] == "0 / 1"
    assert less["tau_psi", "still"]["so"] == "open"  # one query of three: the interval reaches 0
    assert ("tau_psi", "first") not in less
    titles = [p["title"] for section in report["sections"] for p in section["pictures"]]
    assert titles == ["Quality against stability", "Preference and position"]


def test_what_differs_everywhere_is_called_better_or_worse_with_holms_adjustment(cli: Cli, tmp_path: Path) -> None:
    queries = [f"q{i}" for i in range(8)]
    for name, scores in (("moves", SHAKY), ("still", STEADY), ("also", STEADY)):
        write_scored(tmp_path / name, dict.fromkeys(queries, scores))
    report = report_of(cli("compare", tmp_path / "moves", tmp_path / "still", tmp_path / "also"))
    less = {(row["figure"], row["system"]): row for row in table_of(report, "Less moves")}
    assert less["tau_psi", "still"]["so"] == "better"
    assert less["tau_psi", "still"]["p"] == pytest.approx(2 / 2**8)  # eight of eight fall
    assert less["tau_psi", "still"]["p, Holm"] == pytest.approx(4 / 2**8)
    other = report_of(cli("compare", *(tmp_path / n for n in ("moves", "still", "also")), "--baseline", "still"))
    less = {(row["figure"], row["system"]): row for row in table_of(other, "Less still")}
    assert (less["tau_psi", "moves"]["so"], less["tau_psi", "also"]["so"]) == ("worse", "open")


def test_what_too_few_queries_show_stays_open(cli: Cli, tmp_path: Path) -> None:
    for name, scores in (("moves", SHAKY), ("still", STEADY)):
        write_scored(tmp_path / name, {f"q{i}": scores for i in range(4)})
    report = report_of(cli("compare", tmp_path / "moves", tmp_path / "still"))
    (psi,) = (row for row in table_of(report, "Less moves") if row["figure"] == "tau_psi")
    assert psi["high"] < 0  # the interval is a point: all four fall alike
    assert (psi["p"], psi["so"]) == (pytest.approx(2 / 2**4), "open")


def test_runs_of_one_name_are_its_presentations(cli: Cli, folder: Path) -> None:
    words = (f"a={folder / 'run.trec'}", f"a={folder / 'run2.trec'}", f"b={folder / 'scores'}")
    report = report_of(cli("compare", *words, "--qrels", folder / "qrels.txt"))
    side = {row["system"]: row for row in table_of(report, "Side by side")}
    assert side["a"]["tau_psi"] == pytest.approx(1 / 6 / 3)
    assert side["b"]["tau_psi"] == pytest.approx(2 / 27)


def test_matched_thresholds_retain_as_much_as_the_baseline(cli: Cli, tmp_path: Path) -> None:
    queries = [f"q{i}" for i in range(6)]
    write_scored(tmp_path / "a", dict.fromkeys(queries, STEADY))
    write_scored(tmp_path / "b", {q: [row[::-1] for row in STEADY] for q in queries})  # by F1 it would retain all
    (tmp_path / "qrels").write_text("".join(f"{q} 0 {d} 1\n" for q in queries for d in "AB"))
    words = (tmp_path / "a", tmp_path / "b", "--qrels", tmp_path / "qrels", "--threshold", "matched")
    side = {row["system"]: row for row in table_of(report_of(cli("compare", *words)), "Side by side")}
    assert side["a"]["retention"] == side["b"]["retention"] == 0.5


# -- real data, cold start -----------------------------------------------------------------------------------------


def test_real_runs_have_their_known_figures(cli: Cli) -> None:
    data = SHARED / "data/dl20"
    if not data.is_dir():
        pytest.skip(f"{data} is not there")
    report = report_of(cli("evaluate", "--run", data / "runs/BM25.trec", "--qrels", data / "qrels.txt"))
    assert rows(report)["nDCG@10"]["value"] == pytest.approx(0.4796, abs=5e-5)
    assert len(report["queries"]) == len(read_qrels(data / "qrels.txt")) == 54


def test_a_small_evaluation_loads_no_model_library_and_compiles_nothing(folder: Path) -> None:
    words = ["evaluate", "--run", str(folder / "run.trec"), "--qrels", str(folder / "qrels.txt")]
    code = (
        "import sys\nfrom pd_rerank.cli import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'pyserini', 'rerankers', 'pd_rerank.engines'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "metrics = [v for n, m in sys.modules.items() if n.startswith('ranx.metrics') for v in vars(m).values()]\n"
        "compiled = [v for v in metrics if getattr(v, 'signatures', [])]\n"
        "assert metrics and not compiled, compiled\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- the page that says what is where ------------------------------------------------------------------------------

PAGE = (Path(__file__).resolve().parents[2] / "docs/evaluation.md").read_text(encoding="utf-8")


def test_every_function_the_page_names_is_there() -> None:
    words = set(re.findall(r"`([a-z_]+\.[A-Za-z_0-9]+)`", PAGE))
    named = {word for word in words if word not in FILES and word != "pd_rerank.evaluation"}
    assert len(named) > 40
    missing = []
    for module, _, function in (name.partition(".") for name in sorted(named)):
        if not hasattr(import_module(f"pd_rerank.evaluation.{module}"), function):
            missing.append(f"{module}.{function}")
    assert missing == []


def test_every_option_the_page_names_is_its_commands() -> None:
    settings = {
        "evaluate": EvaluateSettings,
        "stability": StabilitySettings,
        "preference": PreferenceSettings,
        "compare": CompareSettings,
    }
    calls = re.findall(r"pd-rerank (evaluate|stability|preference|compare)([^`\n]*)", PAGE)
    named = {(command, option) for command, rest in calls for option in re.findall(r"--([a-z-]+)", rest)}
    assert {command for command, _ in named} == set(settings)
    assert [(c, o) for c, o in sorted(named) if o.replace("-", "_") not in settings[c].model_fields] == []
    limits = {name for of in settings.values() for name in of.model_fields if name.startswith(("max_", "min_"))}
    assert {name.replace("-", "_") for name in re.findall(r"--((?:max|min)-[a-z-]+)", PAGE)} == limits
