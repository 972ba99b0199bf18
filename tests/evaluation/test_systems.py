"""Systems: a scores folder or runs under a name, served as they were."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from pd_rerank.decisions import Threshold
from pd_rerank.errors import BadArgument, InvalidData, ModelMismatch
from pd_rerank.evaluation.ranking import Ranking
from pd_rerank.evaluation.systems import read_system, read_systems
from pd_rerank.scores import SlotResidual
from tests.evaluated import SHAKY, pools, write_evaluation, write_scored


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_evaluation(tmp_path)
    return tmp_path


def test_scores_are_read_out_as_they_were_served(tmp_path: Path) -> None:
    write_scored(tmp_path / "s", {"q1": SHAKY}, readout="argmax")
    assert read_system([tmp_path / "s"]).scores()["q1"] == pytest.approx({"A": 1, "B": 1, "C": 0, "D": 0}, abs=0.34)
    chosen = read_system([tmp_path / "s"], readout="expected")
    assert chosen.scores()["q1"] == pytest.approx({"A": 0.75, "B": 2.05 / 3, "C": 1.4 / 3, "D": 0.25})
    ranking = chosen.rankings()[0]["q1"]
    assert isinstance(ranking, Ranking)
    assert ranking.doc_ids == ("A", "B", "C", "D")


def test_a_recorded_slot_residual_is_taken_off_again(tmp_path: Path) -> None:
    residual = SlotResidual(offsets={4: (0.3, 0.0, 0.0, 0.0)}, readout="expected", n_queries=1)
    write_scored(tmp_path / "s", {"q1": SHAKY}, readout="expected", residual=asdict(residual))
    system = read_system([tmp_path / "s"])
    (table,) = system.tables
    wanted = np.where(table.slot == 0, 0.3, 0.0).mean(axis=0)
    plain = table.mean()
    assert list(system.scores()["q1"].values()) == pytest.approx((plain - wanted).tolist())
    other = read_system([tmp_path / "s"], readout="argmax")
    assert list(other.scores()["q1"].values()) == table.mean("argmax").tolist()
    write_scored(tmp_path / "s", {"q1": SHAKY}, residual={"offsets": 3, "readout": "expected", "n_queries": 1})
    with pytest.raises(InvalidData, match=r"run\.json: 'residual'"):
        read_system([tmp_path / "s"])


def test_what_rerank_wrote_is_found_by_its_folder_and_named_after_it(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "scores").rename(folder / "out/scores")
    (folder / "out/results.jsonl").write_text("")
    for path in (folder / "out", folder / "out/scores"):
        (system,) = read_systems([str(path)])
        assert (system.name, system.presentations, len(system.tables)) == ("out", 3, 3)
    assert [s.name for s in read_systems([str(folder / "run.trec"), f"x=y={folder}/run2.trec"[2:]])] == ["run", "y"]


def test_names_gather_runs_and_never_clash(folder: Path) -> None:
    one, two = (str(folder / name) for name in ("run.trec", "run2.trec"))
    (both,) = read_systems([f"a={one}", f"a={two}"])
    assert (both.presentations, len(both.rankings()), both.query_ids) == (2, 2, ["q1", "007", "NA"])
    with pytest.raises(BadArgument, match="would be called 'run'"):
        read_systems([one, one])
    with pytest.raises(BadArgument, match="2 runs"):
        both.scores()
    with pytest.raises(BadArgument, match="give it alone"):
        read_system([folder / "scores", one])
    odd = folder / "k=v.trec"
    odd.write_text((folder / "run.trec").read_text())
    assert read_systems([str(odd)])[0].name == "k=v"


def test_averages_need_two_groups(folder: Path) -> None:
    system = read_system([folder / "scores"])
    assert [query.count for query in system.shown()] == [3, 3, 3]
    with pytest.raises(InvalidData, match="has 3 presentations, and it takes 4"):
        system.shown(average=2)


def test_runs_of_other_pools_are_refused(folder: Path) -> None:
    system = read_system([folder / "run.trec"])
    system.check_pools(pools())
    with pytest.raises(InvalidData, match=r"run\.trec ranks query 'NA', which has no pool"):
        system.check_pools(pools(["q1", "007"]))


def test_a_threshold_carries_what_it_was_fitted_on(folder: Path) -> None:
    system = read_system([folder / "scores"])
    stamped = system.stamp(Threshold(value=0.5))
    assert dict(stamped.context) == {"model": "m", "adapter": None, "template_hash": "h"}
    system.check_threshold(stamped)
    with pytest.raises(ModelMismatch):
        system.check_threshold(Threshold(value=0.5, context={"template_hash": "another"}))
    with pytest.raises(BadArgument, match="--readout argmax"):
        system.check_threshold(Threshold(value=0.5, readout="argmax"))
    run = read_system([folder / "run.trec"])
    assert run.stamp(Threshold(value=0.5)) == Threshold(value=0.5)
    run.check_threshold(stamped)  # a run says nothing of its making
