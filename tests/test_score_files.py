"""Score files: every grade comes back as it was, and only to the pools it is of."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_rerank.errors import InvalidData, MissingResource
from pd_rerank.pool import Candidate, Pool, pool_sha256, pools_sha256
from pd_rerank.scores import ScoreTable, join_scores, read_scores, write_scores
from tests.tables import table


def made(query_id: str, doc_ids: tuple[str, ...], k: int, g: int, seed: int) -> ScoreTable:
    rng = np.random.default_rng(seed)
    n = len(doc_ids)
    grades = rng.normal(size=(k, n, g)).astype(np.float32)
    grades[rng.random((k, n)) < 0.2] = np.nan
    grades[rng.random((k, n)) < 0.1] = [0.0] + [-np.inf] * (g - 1)
    return ScoreTable(
        query_id=query_id,
        doc_ids=doc_ids,
        grades=grades,
        fallback=np.isnan(grades).any(axis=-1),
        window=rng.integers(-1, 5, (k, n), dtype=np.int32),
        slot=rng.integers(-1, 20, (k, n), dtype=np.int32),
        cut=rng.integers(0, 2**31 - 1, n, dtype=np.int32),
    )


def same(a: ScoreTable, b: ScoreTable) -> bool:
    arrays = ("grades", "fallback", "window", "slot", "cut")
    return (a.query_id, a.doc_ids) == (b.query_id, b.doc_ids) and all(
        getattr(a, name).dtype == getattr(b, name).dtype
        and getattr(a, name).shape == getattr(b, name).shape
        and getattr(a, name).tobytes() == getattr(b, name).tobytes()
        for name in arrays
    )


odd_ids = st.text(st.characters(exclude_categories=[]), max_size=6) | st.sampled_from(
    ["", "\0", "a\0", "a", "tab\tid", "line\nid", "007", "NA", "文書", "\ud800", "x" * 300]
)
tables = st.builds(
    made,
    query_id=odd_ids,
    doc_ids=st.lists(odd_ids, max_size=5, unique=True).map(tuple),
    k=st.integers(0, 3),
    g=st.integers(2, 5),
    seed=st.integers(0, 2**32 - 1),
)


@settings(deadline=None)
@given(st.lists(tables, max_size=4, unique_by=lambda t: t.query_id))
def test_written_scores_read_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, many: list[ScoreTable]) -> None:
    folder = tmp_path_factory.mktemp("s") / "scores"
    write_scores(folder, many, run={"model": "m"})
    back, run = read_scores(folder)
    assert run["model"] == "m"
    assert len(back) == len(many)
    assert all(same(a, b) for a, b in zip(many, back, strict=True))
    assert not any(t.grades.flags.writeable for t in back)


def test_equal_scores_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_scores(tmp_path / name, [made("q", ("x", "y"), 2, 4, 7)], run={"seed": 7})
    for file in ("scores.npz", "run.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_the_arrays_can_be_read_without_this_package(tmp_path: Path) -> None:
    first, second = made("q1", ("a", "b", "c"), 2, 4, 1), made("q2", ("d",), 3, 4, 2)
    write_scores(tmp_path / "s", [first, second], run={})
    with np.load(tmp_path / "s/scores.npz", allow_pickle=False) as arrays:
        assert arrays["shapes"].tolist() == [[2, 3, 4], [3, 1, 4]]
        assert arrays["doc_offsets"].tolist() == [0, 3, 4]
        assert arrays["cell_offsets"].tolist() == [0, 6, 9]
        assert arrays["grade_offsets"].tolist() == [0, 24, 36]
        assert arrays["doc_ids"].tobytes() == b"abcd"
        assert arrays["query_id_offsets"].tolist() == [0, 2, 4]
        np.testing.assert_array_equal(arrays["grades"][24:36].reshape(3, 1, 4), second.grades)
    run = json.loads((tmp_path / "s/run.json").read_text())
    assert run["versions"]["numpy"] == np.__version__
    assert set(run["sha256"]) == {"scores.npz"}


def test_a_query_twice_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="query 'q' has two score tables"):
        write_scores(tmp_path / "s", [table([[0.5]]), table([[0.5]])], run={})


def test_a_full_disk_leaves_the_old_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_scores(tmp_path / "s", [table([[0.5]])], run={})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_scores(tmp_path / "s", [table([[0.25]])], run={})
    assert os.listdir(tmp_path) == ["s"]
    assert read_scores(tmp_path / "s")[0][0].mean()[0] == pytest.approx(0.5)


def test_changed_or_mixed_up_files_are_refused(tmp_path: Path) -> None:
    write_scores(tmp_path / "a", [table([[0.5]])], run={})
    write_scores(tmp_path / "b", [table([[0.25]])], run={})
    (tmp_path / "a/scores.npz").write_bytes((tmp_path / "b/scores.npz").read_bytes())
    with pytest.raises(InvalidData, match=r"scores\.npz is not what run\.json records"):
        read_scores(tmp_path / "a")


@pytest.mark.parametrize("content", [b"no zip", b""])
def test_a_file_that_holds_no_scores_is_refused(tmp_path: Path, content: bytes) -> None:
    write_scores(tmp_path / "a", [table([[0.5]])], run={})
    (tmp_path / "a/scores.npz").write_bytes(content)
    run = json.loads((tmp_path / "a/run.json").read_text())
    run["sha256"]["scores.npz"] = hashlib.sha256(content).hexdigest()
    (tmp_path / "a/run.json").write_text(json.dumps(run))
    with pytest.raises(InvalidData, match="does not hold score tables"):
        read_scores(tmp_path / "a")


def test_a_pickle_in_a_scores_file_is_not_loaded(tmp_path: Path) -> None:
    write_scores(tmp_path / "a", [table([[0.5]])], run={})
    with np.load(tmp_path / "a/scores.npz") as arrays:
        held = dict(arrays)
    held["cut"] = np.array([{"not": "numbers"}], dtype=object)
    np.savez(tmp_path / "a/scores.npz", allow_pickle=True, **held)
    run = json.loads((tmp_path / "a/run.json").read_text())
    run["sha256"]["scores.npz"] = hashlib.sha256((tmp_path / "a/scores.npz").read_bytes()).hexdigest()
    (tmp_path / "a/run.json").write_text(json.dumps(run))
    with pytest.raises(InvalidData, match="Object arrays cannot be loaded"):
        read_scores(tmp_path / "a")


def test_missing_scores_are_a_missing_resource(tmp_path: Path) -> None:
    with pytest.raises(MissingResource, match=r"a scores folder holds scores\.npz and run\.json"):
        read_scores(tmp_path)


# -- joining -----------------------------------------------------------------------------------------------


def pools(text: str = "t") -> list[Pool]:
    return [
        Pool(query_id="q1", query="one", candidates=tuple(Candidate(doc_id=i, text=text) for i in "AB")),
        Pool(query_id="q2", query="two", candidates=()),
    ]


def scored() -> list[ScoreTable]:
    empty = made("q2", (), 2, 4, 0)
    return [empty, table([[0.5, 0.25]], query_id="q1")]


def record(some: list[Pool]) -> dict[str, object]:
    return {"pools_sha256": pools_sha256(some), "pool_sha256": {p.query_id: pool_sha256(p) for p in some}}


def test_scores_are_joined_to_their_pools_by_query() -> None:
    pairs = join_scores(scored(), pools(), run=record(pools()))
    assert [(p.query_id, t.query_id) for p, t in pairs] == [("q1", "q1"), ("q2", "q2")]


def test_scores_of_other_texts_are_refused_and_the_query_named() -> None:
    with pytest.raises(InvalidData, match=r"^query 'q1': the ids are those scored, but the query, a text or"):
        join_scores(scored(), pools("u"), run=record(pools()))
    with pytest.raises(InvalidData, match=r"^these queries: the ids"):
        join_scores(scored(), pools("u"), run={"pools_sha256": pools_sha256(pools())})


def test_scores_of_other_candidates_are_refused_and_the_query_named() -> None:
    mine = record(pools())
    other = [Pool(query_id="q1", query="one", candidates=(Candidate(doc_id="Z", text="t"),)), pools()[1]]
    with pytest.raises(InvalidData, match=r"query 'q1': the pool's document 'Z' was not scored \(2 scored, 1 in"):
        join_scores(scored(), other, run=mine)
    fewer = [Pool(query_id="q1", query="one", candidates=pools()[0].candidates[:1]), pools()[1]]
    with pytest.raises(InvalidData, match="query 'q1': documents were scored that it lacks"):
        join_scores(scored(), fewer, run=mine)
    turned = [Pool(query_id="q1", query="one", candidates=pools()[0].candidates[::-1]), pools()[1]]
    with pytest.raises(InvalidData, match="query 'q1': scores and pool hold the same documents in another order"):
        join_scores(scored(), turned, run=mine)


def test_scores_and_pools_hold_the_same_queries() -> None:
    with pytest.raises(InvalidData, match="query 'q2' has scores but no pool"):
        join_scores(scored(), pools()[:1], run=record(pools()))
    with pytest.raises(InvalidData, match="query 'q2' has a pool but no scores"):
        join_scores(scored()[1:], pools(), run=record(pools()))


def test_scores_that_do_not_say_what_they_are_of_are_refused() -> None:
    with pytest.raises(InvalidData, match="do not record which pools"):
        join_scores(scored(), pools(), run={})


def test_queries_that_failed_have_no_pair_and_stop_nobody() -> None:
    run = record(pools()) | {"failed": {"q2": "the device fell off"}}
    pairs = join_scores(scored()[1:], pools(), run=run)
    assert [pool.query_id for pool, _ in pairs] == ["q1"]
