"""The folder of a run: stages that are kept, shards that are gone on with, a report that is whole."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.evaluation.report import Picture, Report, Section, Table
from pd_rerank.files import sha256_json
from pd_rerank.pool import Candidate, Pool
from pd_rerank.studies.collections import passage_id
from pd_rerank.studies.folder import RunFolder, slug


def pools(n: int) -> list[Pool]:
    return [Pool(query_id=f"q{i}", query="q", candidates=(Candidate(doc_id="d", text="t"),)) for i in range(n)]


class Scored:
    """Scores by how many pools it has seen; fails at a shard if told so."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.seen, self.calls, self.fail_at = 0, 0, fail_at

    def score(self, pools: Sequence[Pool]) -> list[list[float | None]]:
        self.calls += 1
        if self.calls == self.fail_at:
            raise RuntimeError("stopped")
        self.seen += len(pools)
        return [[float(pool.query_id[1:])] for pool in pools]

    def describe(self) -> dict[str, Any]:
        return {"model": "counted"}

    def tokens(self) -> dict[str, int | None]:
        return {"prompt_tokens": 10 * self.seen, "completion_tokens": None}

    def presentations(self) -> list[int] | None:
        return None


def test_a_stage_is_made_once_and_again_only_under_another_key(tmp_path: Path) -> None:
    folder, made = RunFolder(tmp_path), []

    def make(fresh: Path) -> None:
        made.append(fresh)
        (fresh / "x").write_text("x")

    one = folder.stage("trees", {"a": 1}, make)
    assert folder.stage("trees", {"a": 1}, make) == one
    assert folder.stage("trees", {"a": 2}, make) != one
    assert (len(made), (one / "x").read_text()) == (2, "x")


def test_a_stage_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(fresh: Path) -> None:
        (fresh / "x").write_text("x")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        RunFolder(tmp_path).stage("trees", 1, fail)
    assert list(tmp_path.iterdir()) == []


def test_two_runs_do_not_share_a_folder_and_a_closed_one_is_free(tmp_path: Path) -> None:
    written = tmp_path / ".run.json.abcdefgh.part"
    with RunFolder(tmp_path):
        written.write_text("being written by the first")
        with pytest.raises(BadArgument, match="another process is working in"):
            RunFolder(tmp_path)
        assert written.exists()
    RunFolder(tmp_path)
    assert not written.exists()


@pytest.mark.parametrize("name", ["file/run", "file", "x" * 300, "a\0b"])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadArgument, match=r"the run folder .* cannot be made: .*; name another"):
        RunFolder(tmp_path / name)


def test_a_passage_of_half_a_surrogate_pair_has_an_id() -> None:
    assert len({passage_id("\ud800"), passage_id("\ud801"), passage_id("")}) == 3


def test_scoring_goes_on_after_the_last_whole_shard(tmp_path: Path) -> None:
    folder, broken, whole = RunFolder(tmp_path), Scored(fail_at=3), Scored()
    with pytest.raises(RuntimeError, match="stopped"):
        list(folder.scored("s", 1, pools(5), lambda: broken, size=2))
    shards = list(folder.scored("s", 1, pools(5), lambda: whole, size=2))
    assert (broken.seen, whole.seen) == (4, 1)
    assert [q["scores"] for shard in shards for q in shard["queries"]] == [[0.0], [1.0], [2.0], [3.0], [4.0]]
    assert [shard["tokens"] for shard in shards][:1] == [{"prompt_tokens": 20, "completion_tokens": None}]
    done = Scored()
    assert list(folder.scored("s", 1, pools(5), lambda: done, size=2)) == shards
    assert done.calls == 0


def test_presentations_are_kept_where_a_scorer_counts_them(tmp_path: Path) -> None:
    class Settling(Scored):
        def presentations(self) -> list[int] | None:
            return [3, 2]

    (shard,) = RunFolder(tmp_path).scored("s", 1, pools(2), Settling)
    assert [query["presentations"] for query in shard["queries"]] == [3, 2]


def test_a_scorer_is_not_opened_where_nothing_is_missing(tmp_path: Path) -> None:
    def refuse() -> Scored:
        raise AssertionError("opened")

    list(RunFolder(tmp_path).scored("s", 1, pools(2), Scored))
    assert len(list(RunFolder(tmp_path).scored("s", 1, pools(2), refuse))) == 1


def test_shards_of_other_candidates_are_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    list(folder.scored("s", 1, pools(2), Scored))
    with pytest.raises(InvalidData, match="holds scores of other candidates"):
        list(folder.scored("s", 1, pools(3), Scored))


def test_a_report_is_tables_figures_and_one_page(tmp_path: Path) -> None:
    table = Table(title="Table II, one", columns=("name", "value", "none"), rows=(("a,b", 0.1, None), ("c", 1, None)))
    picture = Picture(title="A figure", caption="c", svg="<svg xmlns='http://www.w3.org/2000/svg'/>")
    report = Report(title="t", settings={}, sections=(Section(title="s", tables=(table,), pictures=(picture,)),))
    place = RunFolder(tmp_path).publish(report)
    with (place / "tables" / "table-ii-one.csv").open() as stream:
        assert list(csv.reader(stream)) == [["name", "value", "none"], ["a,b", "0.1", ""], ["c", "1", ""]]
    assert (place / "figures" / "a-figure.svg").read_text().startswith("<svg")
    assert "Table II, one" in (place / "index.html").read_text()
    assert RunFolder(tmp_path).publish(report) == place


def test_a_digest_is_of_values_and_not_of_their_order() -> None:
    assert sha256_json({"a": 1, "b": [2]}) == sha256_json({"b": [2], "a": 1}) != sha256_json({"a": 1, "b": [3]})
    assert (slug("E0, labels 2/1"), slug("--")) == ("e0-labels-2-1", "-")
