"""The proof of a model: each check fails on the fault it is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pd_rerank.engines.base import FloatArray, WindowPrompt
from pd_rerank.engines.fake import FakeEngine
from pd_rerank.prompt import GradePrompt
from pd_rerank.proof import probe, prove


def failed(engine: FakeEngine, base: Sequence[FloatArray] | None = None) -> list[str]:
    checks = prove(engine, GradePrompt(engine.tokenizer), base=base)
    return [check.name for check in checks if check.passed is False]


def test_a_sound_engine_passes_every_check() -> None:
    engine = FakeEngine()
    checks = prove(engine, GradePrompt(engine.tokenizer))
    assert len(checks) == 8
    assert all(check.passed for check in checks)


def test_batches_that_read_differently_are_found() -> None:
    class Padding(FakeEngine):
        def grade_logits(self, prompts: Sequence[WindowPrompt], grade_ids: Sequence[int], **rest: Any) -> Any:
            read = super().grade_logits(prompts, grade_ids, **rest)
            return [values + np.arange(4) * 0.1 for values in read] if len(prompts) > 1 else read

    assert failed(Padding()) == ["a batch of unequal prompts reads like each alone"]


def test_a_shared_prefix_that_reads_differently_is_found() -> None:
    class Sharing(FakeEngine):
        def grade_logits(self, prompts: Sequence[WindowPrompt], grade_ids: Sequence[int], **rest: Any) -> Any:
            read = super().grade_logits(prompts, grade_ids, **rest)
            return [v + np.arange(4) * 0.1 if p.shared else v for v, p in zip(read, prompts, strict=True)]

    assert failed(Sharing()) == ["a shared prefix reads like the whole prompt"]


def test_missing_grades_are_found() -> None:
    assert "every slot has its grades" in failed(FakeEngine(missing=lambda text: text.startswith("Honey")))


def test_scores_that_do_not_depend_on_the_document_are_found() -> None:
    assert failed(FakeEngine(relevance=lambda query, text: 0.5)) == ["different documents get different scores"]


def test_a_template_that_drops_documents_is_found() -> None:
    class Dropping(type(FakeEngine().tokenizer)):  # type: ignore[misc]
        def decode(self, ids: Sequence[int]) -> str:
            return super().decode(ids).replace("ferry", "")

    engine = FakeEngine()
    engine.tokenizer = Dropping()
    (check,) = [c for c in prove(engine, GradePrompt(engine.tokenizer)) if c.passed is False]
    assert check.name == "the chat template keeps query and documents"
    assert check.detail == "lost: The ferry to the island leaves"


def test_an_adapter_that_changes_nothing_is_found() -> None:
    engine = FakeEngine()
    same = probe(engine, GradePrompt(engine.tokenizer))
    assert failed(engine, base=same) == ["the adapter changes the scores"]
    assert failed(FakeEngine(position_bias=0.3), base=same) == []


@pytest.mark.parametrize(("dtype", "passes"), [("float32", False), ("bfloat16", True)])
def test_half_precision_is_given_more_room(dtype: str, passes: bool) -> None:
    class Rough(FakeEngine):
        def grade_logits(self, prompts: Sequence[WindowPrompt], grade_ids: Sequence[int], **rest: Any) -> Any:
            read = super().grade_logits(prompts, grade_ids, **rest)
            return [values + np.arange(4) * 0.01 for values in read] if len(prompts) > 1 else read

        def describe(self) -> dict[str, Any]:
            return {"dtype": dtype}

    assert (failed(Rough()) == []) is passes
