"""Jobs: shards whole or absent, resumed to the same bytes, failures kept apart."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pd_rerank.decisions import Settle, Threshold
from pd_rerank.engines.base import Engine, WindowPrompt
from pd_rerank.engines.fake import FakeEngine
from pd_rerank.errors import BadArgument, EngineFailure, InvalidData
from pd_rerank.files import read_run
from pd_rerank.job import RerankJob, count_tokens, windows_of
from pd_rerank.pool import Candidate, Pool, read_pools, write_pools
from pd_rerank.prompt import GradePrompt
from pd_rerank.scores import join_scores, read_scores
from pd_rerank.scoring import Scoring

WORDS = ["bees", "live", "long", "in", "the", "summer", "hive", "and", "make", "honey", "until", "winter", "comes"]


def pool(query_id: str, n: int = 5, query: str = "how long do bees live") -> Pool:
    return Pool(
        query_id=query_id,
        query=query,
        candidates=tuple(
            Candidate(doc_id=f"{query_id}-{i}", text=" ".join(WORDS[i : i + 4]), score=float(n - i)) for i in range(n)
        ),
    )


POOLS = [pool("q1"), pool("q2", 0), pool("q3", 3), pool("q4", 12), pool("q5", 1), pool("q6", 2)]
SCORING = Scoring(window=4, presentations=2)


def job(folder: Path, pools: Sequence[Pool] = POOLS, **changes: Any) -> RerankJob:
    settings = changes.pop("settings", {"model": "fake"})
    return RerankJob(pools, folder, **{"scoring": SCORING, "settings": settings, "shard_size": 2, **changes})


def finish(some: RerankJob, engine: Engine | None = None, **changes: Any) -> dict[str, Any]:
    engine = engine or FakeEngine(position_bias=0.2)
    some.score(engine=engine, prompt=GradePrompt(engine.tokenizer))
    return some.write(**{"record": {}, **changes})


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


class Stopping(FakeEngine):
    """An engine during whose `calls`-th call the user presses Ctrl-C."""

    def __init__(self, calls: int) -> None:
        super().__init__(position_bias=0.2)
        self.left = calls

    def grade_logits(self, prompts: Sequence[WindowPrompt], grade_ids: Sequence[int], **rest: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().grade_logits(prompts, grade_ids, **rest)


class Failing(FakeEngine):
    """An engine that fails wherever a prompt holds one of `words`."""

    def __init__(self, *words: str) -> None:
        super().__init__(position_bias=0.2)
        self.words = words

    def grade_logits(self, prompts: Sequence[WindowPrompt], grade_ids: Sequence[int], **rest: Any) -> Any:
        for prompt in prompts:
            text = self.tokenizer.decode(prompt.token_ids.tolist())
            if any(word in text for word in self.words):
                raise EngineFailure("the device fell off")
        return super().grade_logits(prompts, grade_ids, **rest)


# -- resuming ----------------------------------------------------------------------------------------------


def test_a_finished_folder_holds_run_results_scores_and_manifest_only(tmp_path: Path) -> None:
    manifest = finish(job(tmp_path / "out"))
    assert sorted(os.listdir(tmp_path / "out")) == ["manifest.json", "results.jsonl", "run.trec", "scores"]
    assert manifest["queries"] == 6
    assert manifest["candidates"] == 23
    assert manifest["empty_pools"] == ["q2"]
    assert manifest["failed"] == {}


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_an_interrupted_job_ends_with_the_bytes_of_an_uninterrupted_one(tmp_path: Path, calls: int) -> None:
    finish(job(tmp_path / "whole"))
    first = job(tmp_path / "cut")
    with pytest.raises(KeyboardInterrupt):
        finish(first, Stopping(calls))
    again = job(tmp_path / "cut")
    assert again.done == first.done == min(2 * calls, 6)
    engine = FakeEngine(position_bias=0.2)
    finish(again, engine)
    assert engine.calls == 3 - calls
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_what_a_kill_left_half_written_is_cleared_away(tmp_path: Path) -> None:
    finish(job(tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        finish(job(tmp_path / "cut"), Stopping(1))
    half = tmp_path / "cut/shards/.000001.abc.part"
    half.mkdir()
    (half / "scores.npz").write_bytes(b"half")
    (tmp_path / "cut/shards/.settings.json.x.part").write_text("half")
    (tmp_path / "cut/.run.trec.x.part").write_text("half")
    (tmp_path / "cut/.scores.x.part").mkdir()
    finish(job(tmp_path / "cut"))
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert sorted(os.listdir(tmp_path / "cut")) == sorted(os.listdir(tmp_path / "whole"))


def test_a_damaged_shard_is_scored_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    finish(job(tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        finish(job(tmp_path / "cut"), Stopping(2))
    (tmp_path / "cut/shards/000000/scores.npz").write_bytes(b"damaged")
    again = job(tmp_path / "cut")
    assert again.done == 2
    assert "000000 are scored again" in caplog.text
    finish(again)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["no run.json", "other run.json", "no failures listed"])
def test_a_shard_that_is_not_whole_is_scored_again(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    finish(job(tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        finish(job(tmp_path / "cut"), Stopping(2))
    record = tmp_path / "cut/shards/000001/run.json"
    kept = json.loads(record.read_text())
    if damage == "no run.json":
        record.unlink()
    else:
        record.write_text("[]" if damage == "other run.json" else json.dumps({"sha256": kept["sha256"]}))
    again = job(tmp_path / "cut")
    assert again.done == 2
    assert "000001 are scored again" in caplog.text
    finish(again)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_an_interrupted_job_goes_on_with_shards_of_another_size(tmp_path: Path) -> None:
    finish(job(tmp_path / "whole"))
    first = job(tmp_path / "cut", shard_size=1)
    with pytest.raises(KeyboardInterrupt):
        finish(first, Stopping(2))
    again = job(tmp_path / "cut", shard_size=3)
    assert again.done == first.done == 3
    finish(again)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    "shown", [{"top_k": 2}, {"tag": "mine"}, {"threshold": Threshold(value=0.4)}, {"readout": "argmax"}]
)
def test_results_are_written_anew_from_scores_that_are_there(tmp_path: Path, shown: dict[str, Any]) -> None:
    finish(job(tmp_path / "asked", **shown))
    finish(job(tmp_path / "out"))
    again = job(tmp_path / "out", **shown)
    assert not again.finished
    assert again.scored
    again.write(record={})
    assert contents(tmp_path / "out") == contents(tmp_path / "asked")
    assert job(tmp_path / "out", **shown).finished


def test_a_kill_while_results_are_written_anew_loses_no_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish(job(tmp_path / "asked", top_k=2))
    finish(job(tmp_path / "out"))

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    again = job(tmp_path / "out", top_k=2)
    monkeypatch.setattr("pd_rerank.job.write_jsonl", killed)
    with pytest.raises(KeyboardInterrupt):
        again.write(record={})
    monkeypatch.undo()
    for top_k in (None, 2):
        again = job(tmp_path / "out", top_k=top_k)
        assert (again.finished, again.scored) == (False, True)
        again.write(record={})
    assert contents(tmp_path / "out") == contents(tmp_path / "asked")


def test_what_stops_presentations_is_part_of_the_job(tmp_path: Path) -> None:
    scoring = Scoring(window=4, presentations=8)
    finish(job(tmp_path / "out", scoring=scoring, settle=Settle(threshold=0.9)))
    with pytest.raises(BadArgument, match=r"settle\.threshold is 0\.9 there, 0\.8 here"):
        job(tmp_path / "out", scoring=scoring, settle=Settle(threshold=0.8))
    with pytest.raises(BadArgument, match=r"settled_by\.readout"):
        job(tmp_path / "out", scoring=scoring, settle=Settle(threshold=0.9), readout="argmax")


def test_two_processes_do_not_work_in_one_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    here = job(out)

    class Watching(FakeEngine):
        def grade_logits(self, *given: Any, **rest: Any) -> Any:
            with pytest.raises(BadArgument, match="another process is working in"):
                finish(job(out))
            half = next(iter((out / "shards").glob(".*")), None)
            assert half is None
            return super().grade_logits(*given, **rest)

    finish(here, Watching(position_bias=0.2))
    assert job(out).finished


def test_a_job_finished_by_another_process_meanwhile_is_not_done_again(tmp_path: Path) -> None:
    late = job(tmp_path / "out")
    manifest = finish(job(tmp_path / "out"))
    engine = FakeEngine(position_bias=0.2)
    assert finish(late, engine) == manifest
    assert engine.calls == 0


def test_an_overwritten_job_stays_until_scoring_starts(tmp_path: Path) -> None:
    finish(job(tmp_path / "out"))
    before = contents(tmp_path / "out")
    again = job(tmp_path / "out", settings={"model": "other"}, overwrite=True)
    assert contents(tmp_path / "out") == before
    finish(again)
    assert job(tmp_path / "out", settings={"model": "other"}).finished


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadArgument, match=r"cannot be written .*; name another folder"):
        job(tmp_path / "file" / "out")


def test_a_finished_job_is_known_without_an_engine(tmp_path: Path) -> None:
    finish(job(tmp_path / "out"))
    assert job(tmp_path / "out").finished
    (tmp_path / "out/run.trec").write_text("edited")
    with pytest.raises(InvalidData, match=r"run\.trec is not what manifest\.json records"):
        job(tmp_path / "out")


def test_another_job_in_the_same_folder_is_refused_with_what_differs(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        finish(job(tmp_path / "out", settings={"model": "m", "scoring": SCORING.describe()}), Stopping(1))
    other = {"model": "n", "scoring": Scoring(window=8, presentations=2).describe()}
    with pytest.raises(BadArgument, match=r'model is "m" there, "n" here; scoring.window is 4 there, 8 here; name'):
        job(tmp_path / "out", settings=other)
    with pytest.raises(BadArgument, match="pools_sha256 is"):
        job(tmp_path / "out", POOLS[1:], settings={"model": "m", "scoring": SCORING.describe()})
    finish(job(tmp_path / "out", settings=other, overwrite=True))
    with pytest.raises(BadArgument, match=r'model is "n" there, "m" here'):
        job(tmp_path / "out", settings={"model": "m"})


def test_another_engine_behind_the_same_settings_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        finish(job(tmp_path / "out"), Stopping(1))
    with pytest.raises(BadArgument, match=r"engine\.position_bias is 0\.2 there, 0\.7 here"):
        finish(job(tmp_path / "out"), FakeEngine(position_bias=0.7))


def test_files_that_are_not_of_a_job_are_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    (out / "run.trec").write_text("somebody's")
    with pytest.raises(BadArgument, match=r"holds a run\.trec of something else"):
        job(out)
    finish(job(out, overwrite=True))
    assert (out / "notes.txt").read_text() == "mine"
    (tmp_path / "file").write_text("")
    with pytest.raises(BadArgument, match="is a file"):
        job(tmp_path / "file")


@pytest.mark.parametrize("mine", ["scores/thesis.txt", "shards/notes", "scores"])
def test_overwriting_leaves_alone_what_no_job_has_written(tmp_path: Path, mine: str) -> None:
    (tmp_path / mine).parent.mkdir(exist_ok=True)
    (tmp_path / mine).write_text("mine")
    with pytest.raises(BadArgument, match=r"name a(nother)? folder"):
        job(tmp_path, overwrite=True)
    assert (tmp_path / mine).read_text() == "mine"


def test_a_pool_folder_is_not_overwritten(tmp_path: Path) -> None:
    write_pools(tmp_path / "pools", POOLS)
    with pytest.raises(BadArgument, match=r"pools\.jsonl"):
        job(tmp_path / "pools", overwrite=True)
    assert read_pools(tmp_path / "pools") == POOLS


@pytest.mark.parametrize("damaged", ["", "[]", "{}", '{"sha256": 3}', '{"sha256": {"run.trec": 0}}'])
def test_a_damaged_job_can_be_overwritten(tmp_path: Path, damaged: str) -> None:
    first = finish(job(tmp_path / "out"))
    (tmp_path / "out/manifest.json").write_text(damaged)
    again = finish(job(tmp_path / "out", overwrite=True))
    assert again["sha256"] == first["sha256"]


def test_a_query_twice_and_shards_of_nothing_are_refused_before_anything_is_scored(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="'q1' has two pools"):
        job(tmp_path / "out", [pool("q1"), pool("q1")])
    for size in (0, 1.5, True):
        with pytest.raises(BadArgument, match="shard_size"):
            job(tmp_path / "out", shard_size=size)


def test_results_are_not_written_before_all_queries_are_scored(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="6 of 6 queries are not scored yet"):
        job(tmp_path / "out").write(record={})


def test_ids_a_run_cannot_hold_are_refused_before_anything_is_scored(tmp_path: Path) -> None:
    bad = Pool(query_id="q", query="x", candidates=(Candidate(doc_id="a b", text="t"),))
    with pytest.raises(InvalidData, match="query 'q': document id 'a b'"):
        job(tmp_path / "out", [bad])
    assert os.listdir(tmp_path) == []


def test_a_first_try_that_scored_nothing_does_not_pin_the_folder(tmp_path: Path) -> None:
    with pytest.raises(EngineFailure, match="all 5 queries"):
        finish(job(tmp_path / "out", settings={"max_length": 10}), FakeEngine(max_length=10))
    manifest = finish(job(tmp_path / "out", settings={"max_length": 9000}))
    assert manifest["failed"] == {}


def test_a_finished_job_is_known_in_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(job(tmp_path / "out"))

    def refused(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pd_rerank.job.tempfile.TemporaryFile", refused)
    assert job(tmp_path / "out").finished
    with pytest.raises(BadArgument, match=r"cannot be written \(Permission denied\)"):
        job(tmp_path / "out", top_k=2)


# -- failures ----------------------------------------------------------------------------------------------


def test_a_query_that_fails_is_named_and_the_others_are_written(tmp_path: Path) -> None:
    pools = [*POOLS, pool("bad", query="a walrus")]
    first = job(tmp_path / "out", pools)
    manifest = finish(first, Failing("walrus"))
    assert manifest["failed"] == {"bad": "the device fell off"}
    lines = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    assert lines[-1] == {"query": {"qid": "bad", "text": "a walrus"}, "error": "the device fell off", "candidates": []}
    assert set(read_run(tmp_path / "out/run.trec")) == {"q1", "q3", "q4", "q5", "q6"}


def test_failed_queries_are_tried_again_and_then_nothing_shows_that_they_failed(tmp_path: Path) -> None:
    pools = [POOLS[0], pool("bad", query="a walrus"), *POOLS[1:]]
    finish(job(tmp_path / "whole", pools))
    finish(job(tmp_path / "cut", pools), Failing("walrus"))
    again = job(tmp_path / "cut", pools)
    assert not again.finished
    assert set(again.failed) == {"bad"}
    engine = FakeEngine(position_bias=0.2)
    finish(again, engine)
    assert engine.calls == 1
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_a_query_too_long_for_the_model_fails_alone(tmp_path: Path) -> None:
    pools = [POOLS[0], pool("long", query="bees " * 2000), POOLS[2]]
    manifest = finish(job(tmp_path / "out", pools), FakeEngine(max_length=3000))
    assert list(manifest["failed"]) == ["long"]
    assert "leaves no room for a document" in manifest["failed"]["long"]


def test_an_engine_that_never_works_stops_the_job(tmp_path: Path) -> None:
    with pytest.raises(EngineFailure, match="fell off"):
        finish(job(tmp_path / "out"), Failing("bees"))
    assert not (tmp_path / "out/manifest.json").exists()
    assert os.listdir(tmp_path / "out/shards") == ["settings.json"]  # and went no further than the first shard


def test_an_error_nobody_foresaw_is_not_taken_for_a_failed_query(tmp_path: Path) -> None:
    class Broken(FakeEngine):
        def grade_logits(self, *_: Any, **__: Any) -> Any:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        finish(job(tmp_path / "out"), Broken())


# -- results -----------------------------------------------------------------------------------------------


def test_results_hold_what_the_scores_say(tmp_path: Path) -> None:
    threshold = Threshold(value=0.3)
    finish(job(tmp_path / "out", threshold=threshold, tag="mine", top_k=3))
    tables, run = read_scores(tmp_path / "out/scores")
    (table,) = [t for _, t in join_scores(tables, POOLS, run=run) if t.query_id == "q4"]
    lines = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    assert [line["query"]["qid"] for line in lines] == [p.query_id for p in POOLS]
    found = lines[3]["candidates"]
    assert lines[3]["presentations"] == 2
    assert [c["rank"] for c in found] == [1, 2, 3]
    order = table.ranking()[:3]
    assert [c["docid"] for c in found] == [table.doc_ids[i] for i in order]
    assert [c["score"] for c in found] == table.mean()[order].tolist()
    assert [c["spread"] for c in found] == table.spread()[order].tolist()
    assert [c["grade_probabilities"] for c in found] == table.mean_probabilities()[order].tolist()
    assert [c["first_stage"] for c in found] == [{"rank": i + 1, "score": float(12 - i)} for i in order]
    assert [c["retained"] for c in found] == [c["score"] >= 0.3 for c in found]
    trec = read_run(tmp_path / "out/run.trec")
    assert [h.doc_id for h in trec["q4"]] == [c["docid"] for c in found]
    assert (tmp_path / "out/run.trec").read_text().splitlines()[0].endswith(" mine")
    assert "q2" not in trec


def test_a_missing_grade_is_counted_and_never_invented(tmp_path: Path) -> None:
    gone = POOLS[0].candidates[1]
    engine = FakeEngine(missing=lambda text: text == gone.text)
    manifest = finish(job(tmp_path / "out", POOLS[:1]), engine)
    assert manifest["without_grade"] == 1
    assert manifest["grades_missing"] == 2
    (line,) = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    last = line["candidates"][-1]
    assert (last["docid"], last["score"], last["spread"], last["grade_probabilities"]) == (
        gone.doc_id,
        None,
        None,
        None,
    )
    assert gone.doc_id not in {hit.doc_id for hit in read_run(tmp_path / "out/run.trec")["q1"]}


def test_settled_queries_take_fewer_presentations(tmp_path: Path) -> None:
    scoring = Scoring(window=4, presentations=8)
    manifest = finish(job(tmp_path / "out", scoring=scoring, settle=Settle(threshold=0.9)))
    assert manifest["presentations"] < 8 * len(POOLS)


def test_progress_ends_at_the_number_of_windows_announced(tmp_path: Path) -> None:
    some = job(tmp_path / "out", scoring=Scoring(window=4, presentations=8), settle=Settle(threshold=0.9))
    assert some.windows_total == 8 * (2 + 0 + 1 + 3 + 1 + 1)
    seen: list[int] = []
    engine = FakeEngine()
    some.score(engine=engine, prompt=GradePrompt(engine.tokenizer), on_windows=seen.append)
    assert sum(seen) == some.windows_total == some.windows_done


def test_no_pools_is_a_job_too(tmp_path: Path) -> None:
    assert finish(job(tmp_path / "out", []))["queries"] == 0
    assert (tmp_path / "out/run.trec").read_text() == ""


# -- counting ----------------------------------------------------------------------------------------------


def test_equal_windows_count_once() -> None:
    assert windows_of(POOLS[3], Scoring(window=5, presentations=10)) == 30
    assert windows_of(POOLS[3], Scoring(window=1, presentations=10)) == 12


def test_counted_tokens_are_those_an_engine_is_given() -> None:
    engine = FakeEngine()
    lengths: list[int] = []

    class Watching(FakeEngine):
        def grade_logits(self, prompts: Sequence[WindowPrompt], grade_ids: Sequence[int], **rest: Any) -> Any:
            lengths.extend(len(p.token_ids) for p in prompts)
            return super().grade_logits(prompts, grade_ids, **rest)

    prompt = GradePrompt(engine.tokenizer)
    from pd_rerank.scoring import score_pools

    score_pools(POOLS, engine=Watching(), prompt=prompt, scoring=SCORING)
    found = count_tokens(POOLS, tokenizer=engine.tokenizer, prompt=prompt, scoring=SCORING, max_length=10**6)
    assert found == {
        "prompts": len(lengths),
        "tokens": sum(lengths),
        "longest_prompt": max(lengths),
        "rendered_queries": 5,
    }
    part = count_tokens(POOLS, tokenizer=engine.tokenizer, prompt=prompt, scoring=SCORING, max_length=10**6, sample=3)
    assert part["rendered_queries"] == 3
    assert part["prompts"] == pytest.approx(len(lengths), rel=0.5)


def test_a_query_too_long_for_the_model_does_not_stop_the_count(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = FakeEngine().tokenizer
    pools = [pool("q1"), pool("q2", query="how " * 2000)]
    how: dict[str, Any] = {"tokenizer": tokenizer, "prompt": GradePrompt(tokenizer), "scoring": SCORING}
    found = count_tokens(pools, max_length=3000, **how)
    assert found["rendered_queries"] == 1
    assert found["tokens"] == 2 * count_tokens(pools[:1], max_length=3000, **how)["tokens"]
    assert "query 'q2' will fail" in caplog.text
