"""Scorers of a study: what a config says of settling, and whose fault an error is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pd_rerank import windows
from pd_rerank.config import load
from pd_rerank.errors import BadArgument, EngineFailure
from pd_rerank.files import write_json
from pd_rerank.pool import Candidate, Pool
from pd_rerank.studies import nevir
from pd_rerank.studies.folder import RunFolder
from pd_rerank.studies.nevir_settings import NevirSettings, ScorerSettings
from pd_rerank.studies.scorers import check_scorer, failure_of, open_scorer


def caught(call: Callable[[], Any]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def fail(error: Exception) -> None:
    raise error


class OutOfMemoryError(RuntimeError):
    """A library's own."""


OutOfMemoryError.__module__ = "torch"


@pytest.mark.parametrize(
    "call",
    [
        lambda: fail(EngineFailure("no room")),
        lambda: fail(OSError("disk full")),
        lambda: fail(MemoryError()),
        lambda: fail(OutOfMemoryError("no room")),
        lambda: np.broadcast_shapes((2,), (3,)),
        lambda: np.stack([]),
    ],
)
def test_what_others_raise_is_a_scorers_failure(call: Callable[[], Any]) -> None:
    error = caught(call)
    assert failure_of(error) == f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    "call",
    [
        lambda: windows.canonical(3),  # type: ignore[arg-type]
        lambda: windows.content_keys("q", ["a", "b"], ["a"]),
        lambda: windows.identity("3"),  # type: ignore[arg-type]
    ],
)
def test_an_error_in_our_own_code_is_nobodys_failure(call: Callable[[], Any]) -> None:
    assert failure_of(caught(call)) is None


def test_the_standard_librarys_errors_are_laid_to_who_called_it(tmp_path: Path) -> None:
    assert failure_of(caught(lambda: write_json(tmp_path / "x.json", object()))) is None


def test_a_scorer_that_settles_says_what_each_pool_took() -> None:
    texts = ["tram line", "old tram", "the mill", "a line of trees", "harbour tram line", "the sea"]
    pool = Pool(
        query_id="q",
        query="tram line",
        candidates=tuple(Candidate(doc_id=f"d{i}", text=t) for i, t in enumerate(texts)),
    )
    options = {"engine": "fake", "window": 3, "presentations": 5, "settle": {"top_k": 2, "tolerance": 1.0}}
    given = {"type": "ocsft", "model": "words", "options": options}
    scorer = open_scorer(load(ScorerSettings, given=given))
    scorer.score([pool])
    assert scorer.presentations() == [2]
    for wrong, message in ((5, "settle is a mapping"), ({"top": 5}, "settle has no top; it has threshold, top_k")):
        with pytest.raises(BadArgument, match=message):
            open_scorer(load(ScorerSettings, given=given | {"options": options | {"settle": wrong}}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"windw": 3}, "unknown option 'windw'; did you mean window?"),
        ({"window": 0}, "window must be a whole number of at least 1, got 0"),
        ({"engine": "fakk"}, "unknown engine 'fakk'"),
        ({"rubric": "nope"}, "unknown rubric 'nope'"),
        ({"readout": "nope"}, "unknown readout 'nope'"),
        ({"verbose": 1}, "option 'verbose' is the study's to set"),
        ({"presentations": 2, "settle": {"top_k": 1}}, "settle needs presentations of at least 3"),
        ({"engine": "server", "server": "here"}, "the server's address is 'here'"),
        ({"engine": "generated", "placeholder": "1"}, "unknown option 'placeholder'"),
    ],
)
def test_options_that_no_reranker_takes_are_refused_before_anything_is_done(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    scorers = {"a": {"type": "ocsft", "model": "nowhere/none", "options": options}}
    given = {"output": tmp_path, "collections": {"own": {"templates": 4}}, "test": {"collection": "own"}}
    with RunFolder(tmp_path) as folder, pytest.raises(BadArgument, match=f"scorer 'a': {message}"):
        nevir.run(load(NevirSettings, given=given | {"scorers": scorers}), folder)
    assert list(tmp_path.iterdir()) == []


def test_options_of_every_kind_pass() -> None:
    fake = {"engine": "fake", "window": 5, "presentations": 4, "settle": {"top_k": 2}, "readout": "argmax", "seed": 3}
    for options in (fake, {"adapter": "x", "dtype": "bf16", "placeholder": "?"}, {"engine": "vllm", "threshold": 0.5}):
        check_scorer(load(ScorerSettings, given={"type": "ocsft", "model": "m", "options": options}))
    written = {"server": "http://localhost:8", "reasons": True}
    check_scorer(load(ScorerSettings, given={"type": "generated", "model": "m", "options": written}))


def test_saved_scores_cannot_be_asked_in_other_orders() -> None:
    with pytest.raises(BadArgument, match="scores at hand are of one order"):
        load(ScorerSettings, given={"type": "scores", "model": "x.trec", "presentations": 3})
