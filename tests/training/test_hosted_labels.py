"""A hosted chat model as teacher: its written grades become labels, by either way, and a student trains on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("httpx")
pytest.importorskip("torch")

from pd_rerank.cli import app
from pd_rerank.files import read_json
from pd_rerank.training.labels import read_labels
from tests.engines.chat_server import ChatServer, Reply, answer, completion, good, graded, shown
from tests.training.runs import Bench

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def run(command: str, url: str, *words: str | Path) -> Any:
    how = ("--engine", "generated", "--server", url, "--model", "judge", "--concurrency", "1", "--attempts", "1")
    return CliRunner().invoke(app, [command, *how, *map(str, words)])


def lines(folder: Path) -> bytes:
    return (folder / "labels" / "labels.jsonl").read_bytes()


def test_written_grades_become_labels_by_either_way_and_a_student_learns_from_them(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    def reply(body: dict[str, Any], number: int) -> Reply:
        """Whole grades, and one more for whoever stands first."""
        grades = graded(body)
        first = next(iter(grades))
        return completion(answer({**grades, first: grades[first] + 1}))

    pools, made = bench.place / "pools", bench.place / "silver"
    shuffles = ("--pools", pools, "--window-size", "3", "--partition", "contiguous", "--presentations", "3")
    with ChatServer(reply) as server:
        asked = run("label", server.url, *shuffles, "--output", made)
        assert asked.exit_code == 0, asked.output
        first = len(server.requests)
        scored = run("rerank", server.url, *shuffles, "--output", bench.place / "scored")
        assert scored.exit_code == 0, scored.output
        assert len(server.requests) == 2 * first == 2 * 6 * 2 * 3
    words = ["label", "--scores", bench.place / "scored", "--pools", pools, "--output", bench.place / "taken"]
    taken = CliRunner().invoke(app, [str(word) for word in words])
    assert taken.exit_code == 0, taken.output
    assert lines(bench.place / "taken") == lines(made)

    labels = read_labels(made)
    assert (labels.documents, labels.presentations) == (30, 3)
    record = read_json(made / "labels" / "manifest.json")
    assert (record["teacher_model_id"], record["teacher_protocol"]) == ("judge", "k_shot_bsc")
    assert record["teacher"]["engine"] == "generated"
    given = [label for query in labels.values() for label in query.values()]
    assert {score for label in given for score in label.scores} <= {0.0, 1.0, 2.0, 3.0}
    assert any(label.averaged % 1 for label in given), "over several orders they come to lie between"

    assert bench(labels=str(made), max_steps=2) == 5
    assert "the label file was made with prompt template" in capsys.readouterr().err
    assert bench("--overwrite", labels=str(made), max_steps=2, check_template=False, targets="averaged") == 0
    assert "nothing to average" not in capsys.readouterr().err
    assert len(bench.lines()) == 2


def test_a_window_the_model_does_not_grade_is_named_and_training_refuses_its_query(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    def reply(body: dict[str, Any], number: int) -> Reply:
        return completion("I cannot grade these.") if "bread" in shown(body)[0] else good(body)

    made = bench.place / "silver"
    with ChatServer(reply) as server:
        words = ("--pools", bench.place / "pools", "--presentations", "2", "--output", made)
        done = run("label", server.url, *words)
    assert done.exit_code == 7, done.output
    assert "5 documents of query 'q2'" in " ".join(done.output.split())
    assert set(read_labels(made)) == {"q0", "q1", "q3", "q4", "q5"}
    assert bench(labels=str(made), check_template=False) == 5
    assert "query 'q2': 5 of 5 documents have no label" in capsys.readouterr().err
