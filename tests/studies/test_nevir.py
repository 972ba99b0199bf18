"""The NevIR study from end to end on this project's own sentences: everything runs, resumes, and comes out the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("lightgbm")
pytest.importorskip("matplotlib")

from pd_rerank import windows
from pd_rerank.config import load
from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.evaluation.replay import window_rerank
from pd_rerank.studies import nevir
from pd_rerank.studies.folder import RunFolder
from pd_rerank.studies.nevir import mixed
from pd_rerank.studies.nevir_settings import NevirSettings
from pd_rerank.studies.scorers import open_scorer
from pd_rerank.studies.templates import write_templates
from tests.designated import case, laid_out
from tests.engines import chat_server
from tests.studies.runs import CONFIGS, Pipeline, killed_ten_times, rows, tables

SMOKE = CONFIGS / "nevir_smoke.yaml"
execute = Pipeline("nevir_fixed_pool")


def small(**also: Any) -> dict[str, Any]:
    """A study small enough to be run again and again."""
    own = {"collection": "own"}
    return {
        "output": "run",
        "collections": {"own": {"templates": 12}},
        "train": own | {"share": 0.5},
        "dev": own | {"share": 0.2},
        "test": own,
        "trees": {"rounds": 4, "factors": False},
        "window": 5,
        "shard_size": 3,
        "scorers": {"words": {"type": "ocsft", "model": "words", "options": {"engine": "fake", "window": 5}}},
        **also,
    }


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the smoke configuration."""
    folder = tmp_path_factory.mktemp("smoke")
    assert execute(folder, SMOKE) == 0
    return folder / "runs" / "nevir_smoke"


# -- the smoke run ------------------------------------------------------------------------------------------------


def test_the_smoke_run_makes_every_table_and_says_what_it_left_out(smoke: Path) -> None:
    found = {path.stem for path in (smoke / "report" / "tables").glob("*.csv")}
    assert found >= {
        "table-i", "table-ii", "table-ii-common-directions", "table-iii", "contrasts", "development", "cost",
        "training-factors", "what-decided", "grade-ties", "k-curve", "operating-points", "margin-frontier",
        "score-interpolation", "positions-under-ties", "not-run", "columns-that-tell-nothing-apart",
        "order-preference-and-position", "presentations-spent-and-overlap-reached",
    }  # fmt: skip
    left = {row["what"]: row["why"] for row in rows(smoke, "not-run")}
    limited = {"B=1", "B=10 canonical order", "B=10 hashed windows", "B=10 adaptive, at most 6"}
    assert set(left) == {"generated 0-4", "cross-encoder", *(f"{name} on the rest of test" for name in limited)}
    record = json.loads((smoke / "run.json").read_text())
    assert set(record) == {"settings", "inputs", "versions"}
    assert record["versions"]["lightgbm"]
    page = (smoke / "report" / "index.html").read_text()
    assert "No figure here says anything about a ranker" in page
    assert "Table II" in page


def test_its_counts_agree_with_one_another(smoke: Path) -> None:
    populations = {row["part"]: row for row in rows(smoke, "table-i")}
    assert {name: row["collection"] for name, row in populations.items()} == dict.fromkeys(
        ("train", "dev", "test"), "templates"
    )
    assert sum(int(row["planned"]) for row in populations.values()) == 4 * 32
    second = {row["ranker"]: row for row in rows(smoke, "table-ii")}
    for name, row in second.items():
        counts = [int(row[key]) for key in ("strict", "reverse", "tie", "unavailable")]
        assert sum(counts) == int(row["n"]), name
    for row in rows(smoke, "contrasts"):
        change = int(row["corrections"]) - int(row["regressions"])
        assert change == pytest.approx(float(row["Δ strict pp"]) * int(row["n"]) / 100)
        groups = sum(int(row[key]) for key in ("groups up", "groups even", "groups down"))
        assert groups > 1
    decided = [row for row in rows(smoke, "what-decided") if row["scorer"] == "B=20"]
    overall = next(row for row in decided if row["branch"] == "overall")
    for key in ("n", "strict", "fusion right", "corrections", "regressions"):
        assert sum(int(r[key]) for r in decided if r["branch"] != "overall") == int(overall[key])
    assert int(overall["strict"]) == int(second["B=20"]["strict"])


def test_a_k_of_nothing_is_fusion_and_the_whole_window_is_table_two(smoke: Path) -> None:
    second = {row["ranker"]: row for row in rows(smoke, "table-ii")}
    curve = {
        row["operating point"]: row
        for row in rows(smoke, "k-curve")
        if (row["scorer"], row["part"]) == ("B=20", "test")
    }
    assert curve["K=0"]["strict"] == second["fusion"]["strict"]
    assert curve["K=20"]["strict"] == second["B=20"]["strict"]
    assert float(curve["K=20"]["MRR"]) == float(second["B=20"]["MRR"])
    mixtures = {
        row["weight of text"]: row
        for row in rows(smoke, "score-interpolation")
        if (row["scorer"], row["part"]) == ("B=20", "test")
    }
    assert mixtures["0.0"]["strict"] == second["fusion"]["strict"]
    assert mixtures["1.0"]["strict"] == second["B=20"]["strict"]
    marks = [row[""] for row in rows(smoke, "score-interpolation") if row["scorer"] == "B=20"]
    assert marks.count("chosen on dev") == 2


def test_the_arms_disagree_where_they_should(smoke: Path) -> None:
    """One window of twenty is no partition; two of ten are cut in two ways; one document alone has no place."""
    scored = {}
    for place in smoke.glob("b-*-test-*"):
        if "pairs" not in place.name:
            shards = [json.loads(path.read_text()) for path in sorted(place.glob("shard-*.json"))]
            scored[place.name.rpartition("-test-")[0]] = [q["scores"] for s in shards for q in s["queries"]]
    assert set(scored) >= {"b-20", "b-10-contiguous", "b-10-round-robin", "b-1"}
    assert scored["b-10-contiguous"] != scored["b-10-round-robin"]


def test_order_preference_and_position_stand_side_by_side(smoke: Path) -> None:
    """What cannot see the order does not move; what a position biases does; more presentations move less."""
    found = {row["ranker"]: row for row in rows(smoke, "order-preference-and-position")}
    second = {row["ranker"]: row for row in rows(smoke, "table-ii-common-directions")}
    steady, moved = ("B=1", "B=10 canonical order", "B=10 hashed windows"), ("B=20", "B=10 adaptive, at most 6")
    assert {name for name, row in found.items() if row["orders"]} == {*steady, *moved}
    assert {row["n"] for row in found.values()} == {"24"}
    for name in ("fusion", "E0", "B=20"):
        assert float(found[name]["strict"]) == float(second[name]["strict share"])
        assert float(found[name]["MRR"]) == pytest.approx(float(second[name]["MRR"]))
    for name in steady:
        row = found[name]
        still = ("τ-PSI", "preference changes", "pairs of orders that differ", "crosses top 1", "crosses top 5")
        assert {float(row[key]) for key in still} == {0.0}
        assert {float(row[key]) for key in ("top 1 overlap", "top 5 overlap")} == {1.0}
        assert row["strict"] == row["strict, over orders"]
    for name in moved:
        assert 0 < float(found[name]["τ-PSI low"]) <= float(found[name]["τ-PSI"]) < 0.5
        assert 0 < float(found[name]["preference changes"]) < 1
    assert found["fusion"]["τ-PSI"] == ""
    spent = {(r["ranker"], r["averaged"]): r for r in rows(smoke, "presentations-spent-and-overlap-reached")}
    assert 2 <= float(spent["B=10 adaptive, at most 6", "1"]["presentations"]) < 6
    assert float(spent["B=20", "2"]["τ-PSI"]) < float(spent["B=20", "1"]["τ-PSI"])
    assert float(spent["B=20", "1"]["τ-PSI"]) == pytest.approx(float(found["B=20"]["τ-PSI"]))
    assert (smoke / "report" / "figures" / "order-preference-and-position.svg").is_file()


def test_running_again_scores_nothing_and_changes_no_byte(smoke: Path) -> None:
    before = tables(smoke)
    stamps = {p: p.stat().st_mtime_ns for p in smoke.glob("*-*/**/*") if p.is_file() and "report" not in p.parts}
    assert execute(smoke.parents[1], SMOKE) == 0
    assert tables(smoke) == before
    made = {p: p.stat().st_mtime_ns for p in stamps if "templates-templates" not in p.parts}
    assert made == {p: stamps[p] for p in made}


# -- killed and gone on with --------------------------------------------------------------------------------------


def test_killed_at_random_moments_it_ends_with_the_same_tables(tmp_path: Path) -> None:
    killed_ten_times(execute, tmp_path, small(), seed=7)


# -- own data, other scorers ----------------------------------------------------------------------------------------


def test_a_users_own_pairs_and_runs_need_a_config_and_nothing_else(tmp_path: Path) -> None:
    pairs, pools = write_templates(tmp_path / "made", 12)
    own = [
        {"frage": r[q], "gut": r[good], "schlecht": r[bad], "quelle": r["id"][:4]}
        for r in map(json.loads, pairs.read_text().splitlines())
        for q, good, bad in (("q1", "doc1", "doc2"), ("q2", "doc2", "doc1"))
    ]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    # The user's ids: lines are counted, so topics and runs are named 1, 2, …
    ids = [f"{r['id']}:{q}" for r in map(json.loads, pairs.read_text().splitlines()) for q in ("q1", "q2")]
    names = {old: str(i) for i, old in enumerate(ids, 1)}
    for run in (tmp_path / "made").glob("*.trec"):
        lines = (line.split(" ", 1) for line in run.read_text().splitlines())
        run.write_text("".join(f"{names[first]} {rest}\n" for first, rest in lines))
    fields = {"query": "frage", "preferred": "gut", "rejected": "schlecht", "group": "quelle"}
    config = small(collections={"own": {"pairs": "own.jsonl", "fields": fields, "pools": "made/pools.yaml"}})
    (tmp_path / "made" / "pools.yaml").write_text(pools.read_text().replace(str(tmp_path / "made"), "made"))
    assert execute(tmp_path, config) == 0
    second = {row["ranker"]: row for row in rows(tmp_path / "run", "table-ii")}
    assert set(second) == {"fusion", "E0", "N=8", "words", "words, E0 tie"}
    assert second["fusion"]["pairs"] == "0"
    assert second["fusion"]["paired share"] == ""


def test_written_grades_and_saved_runs_are_scorers_too(tmp_path: Path) -> None:
    _, pools = write_templates(tmp_path / "made", 12)

    (tmp_path / "made" / "foreign.trec").write_text("q Q0 d 1 1.0 other\n")

    def grade(body: dict[str, Any], number: int) -> chat_server.Reply:
        return chat_server.completion(chat_server.answer(chat_server.graded(body, top=4)))

    with chat_server.ChatServer(grade) as server:
        scorers = {
            "written": {"type": "generated", "model": "served-1", "options": {"server": server.url}, "directions": 8},
            "saved": {"type": "scores", "model": "made/dense.trec"},
            "gone": {"type": "scores", "model": "made/none.trec"},
            "foreign": {"type": "scores", "model": "made/foreign.trec"},
        }
        config = small(scorers=scorers, collections={"own": {"pairs": "made/pairs.jsonl", "pools": "made/pools.yaml"}})
        (tmp_path / "made" / "pools.yaml").write_text(pools.read_text().replace(str(tmp_path / "made"), "made"))
        assert execute(tmp_path, config) == 7
    left = {row["what"]: row for row in rows(tmp_path / "run", "not-run")}
    assert left["gone"][""] == "failed"
    assert "MissingResource" in left["gone"]["why"]
    assert left["foreign"]["why"] == "InvalidData: no candidate of test has a score; are they scores of other queries?"
    matrix = {row["grade of preferred"] for row in rows(tmp_path / "run", "grade-matrix") if row["scorer"] == "written"}
    assert matrix <= {"0.0", "1.0", "2.0", "3.0", "4.0"}
    spent = next(r for r in rows(tmp_path / "run", "cost") if (r["part"], r["scorer"]) == ("test", "written"))
    assert int(spent["tokens in"]) == 100 * int(spent["candidates scored"])


def test_a_cross_encoder_scores_through_rerankers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", "which", "the", "not", "open"]
    (tmp_path / "ce").mkdir()
    (tmp_path / "ce" / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(tmp_path / "ce" / "vocab.txt")).save_pretrained(tmp_path / "ce")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.BertForSequenceClassification(
            transformers.BertConfig(
                vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                num_labels=1,
            )
        ).save_pretrained(tmp_path / "ce")  # fmt: skip
    scorer = {"type": "rerankers", "model": str(tmp_path / "ce"), "options": {"device": "cpu", "dtype": "float32"}}
    assert execute(tmp_path, small(scorers={"random": scorer}, train=None)) == 0
    second = {row["ranker"]: row for row in rows(tmp_path / "run", "table-ii")}
    assert set(second) == {"fusion", "random"}
    assert int(second["random"]["unavailable"]) == 0


class Broken:
    """A scorer that ends in an error of a library, or of our own."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def tokens(self) -> dict[str, int | None]:
        return {}

    def score(self, pools: Any) -> list[list[float | None]]:
        raise self.error


def test_what_a_library_raises_ends_its_scorer_and_what_we_raise_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = {"type": "ocsft", "model": "words", "options": {"engine": "fake", "window": 5}}
    config = small(scorers={"broken": one, "words": one}, train=None, dev=None, interpolate=False, window=10**9)

    def opening(error: Exception) -> None:
        made = iter([Broken(error)])
        monkeypatch.setattr(nevir, "open_scorer", lambda given: next(made, None) or open_scorer(given))

    opening(RuntimeError("mat1 and mat2 cannot be multiplied"))
    assert execute(tmp_path, config) == 7
    left = {row["what"]: row["why"] for row in rows(tmp_path / "run", "not-run")}
    assert left["broken"] == "RuntimeError: mat1 and mat2 cannot be multiplied"
    assert {row["ranker"] for row in rows(tmp_path / "run", "table-ii")} == {"fusion", "words"}
    assert len(rows(tmp_path / "run", "k-curve")) <= 1 + 48  # no K beyond the pools, however wide the window
    monkeypatch.setattr(nevir, "open_scorer", lambda given: windows.canonical(3))  # type: ignore[arg-type]
    config["scorers"]["broken"]["options"]["window"] = 4
    with pytest.raises(TypeError, match="object of type 'int' has no len"):
        execute(tmp_path, config)


def test_a_folder_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunFolder(tmp_path / "run"):
        assert execute(tmp_path, small()) == BadArgument.exit_code
    assert "another process is working in run" in capsys.readouterr().err


# -- parts ----------------------------------------------------------------------------------------------------------


def test_a_mixture_runs_from_the_first_stage_to_the_text() -> None:
    one = case({"a": 3.0, "b": 2.0, "c": 1.0})
    grades = laid_out(one, {"a": 0.0, "b": 4.0})
    assert mixed(one, grades, 0.0, k=2)[:2].tolist() == [1.0, 0.0]
    assert mixed(one, grades, 1.0, k=2)[:2].tolist() == [0.0, 1.0]
    assert mixed(one, grades, 0.25, k=2)[:2].tolist() == [0.75, 0.25]
    assert np.isnan(mixed(one, grades, 0.5, k=3)[2])
    assert np.isnan(mixed(one, laid_out(one, {}), 0.5, k=3)).all()
    assert window_rerank([one], [mixed(one, grades, 0.5, k=3)], k=3)[0].fallback


def test_settings_that_cannot_be_are_refused() -> None:
    words = small()["scorers"]["words"]
    for change, message in (
        ({"test": {"collection": "other"}}, "test is of collection 'other', which is not listed"),
        ({"dev": {"collection": "own"}}, "'own' serves dev and test: give all but one of them a share"),
        ({"collections": {"own": {"pairs": "x.jsonl"}}}, "a collection is 'pairs' with 'pools', or 'templates' alone"),
        ({"main": "nobody"}, "main scorer 'nobody' is not among the scorers"),
        ({"scorer": {}}, "unknown"),
        ({"scorers": {"fusion": words}}, "'fusion' has the name of a ranker that the study has itself"),
        ({"scorers": {"N=8": words}}, "'N=8' has the name of a ranker"),
        ({"scorers": {"a": words, "a, E0 tie": words}}, "'a, E0 tie' has the name of a ranker"),
        ({"scorers": {"a b": words, "A-b": words}}, "would have the same files"),
        ({"scorers": {"x" * 300: words}}, "a name of 300 characters"),
        ({"scorers": {"x": words | {"options": {"position_bias": float("nan")}}}}, "a finite number"),
        ({"scorers": {"x": {"type": "scores", "model": "x", "options": {"a": 1}}}}, "take no options, got a"),
        ({"trees": {"arms": {"E0": {}}}}, "arm 'E0' has the name of a ranker"),
        (
            {"collections": {"own": {"pairs": "p", "pools": "p", "fields": {"quary": "q"}}}},
            "no field 'quary'; did you mean",
        ),
    ):
        with pytest.raises(BadArgument, match=message):
            load(NevirSettings, given=small() | change)


def test_parts_that_share_a_source_are_refused(tmp_path: Path) -> None:
    write_templates(tmp_path / "made", 12)
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text((tmp_path / "made" / "pools.yaml").read_text())
    same = {
        name: {"pairs": str(tmp_path / "made/pairs.jsonl"), "pools": str(tmp_path / f"{name}.yaml")}
        for name in ("one", "two")
    }
    config = small(collections=same, train={"collection": "one"}, dev=None, test={"collection": "two"})
    assert execute(tmp_path, config) == InvalidData.exit_code
