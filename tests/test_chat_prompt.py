"""The message to a model that writes its grades: what it says and hides; the prompts of slots stay as they were."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from pd_rerank.engines.base import ChatWindow
from pd_rerank.engines.fake import FakeTokenizer
from pd_rerank.errors import BadArgument, ModelMismatch
from pd_rerank.prompt import ChatPrompt, GradePrompt
from pd_rerank.rubrics import RUBRICS

TEXTS = ["first text", "second text", "   ", "third"]


def window(prompt: ChatPrompt, positions: list[int], texts: list[str] = TEXTS) -> ChatWindow:
    return prompt.sheet("a query", texts, width=20, max_tokens=1).window(positions)


def test_the_message_holds_rubric_query_and_documents_in_the_order_shown() -> None:
    prompt = ChatPrompt()
    text = window(prompt, [3, 0]).text
    rubric = RUBRICS["passage_relevance"]
    parts = [rubric.system, rubric.instruction, "3: ", "2: ", "1: ", "0: ", '"grade"', "Query: a query"]
    parts += ["Documents:\n[1] third\n[2] first text\n[end of documents]"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert "second" not in text


def test_ids_are_the_markers_without_their_brackets() -> None:
    shown = window(ChatPrompt(markers="doc_n"), [1, 0])
    assert shown.ids == ("Doc-1", "Doc-2")
    assert '{"id": "Doc-1", "grade": 0}' in shown.text
    assert shown.slots.tolist() == [0, 1]


def test_token_ids_are_the_text() -> None:
    shown = window(ChatPrompt(), [0], ["naïve 🙂"])
    assert "".join(map(chr, shown.token_ids.tolist())) == shown.text


def test_blank_documents_are_not_shown_and_what_is_cut_is_counted() -> None:
    sheet = ChatPrompt(max_doc_chars=5).sheet("q", TEXTS, width=20, max_tokens=1)
    assert sheet.blank.tolist() == [False, False, True, False]
    assert sheet.cut.tolist() == [5, 6, 0, 0]
    assert sheet.width == 3
    assert "[1] first\n" in sheet.window([0]).text


@pytest.mark.parametrize("token", ["<|im_end|>", "</think>", "<end_of_turn>", "[/INST]", "<|eot_id|>", "</s>"])
def test_no_text_can_end_its_turn(token: str) -> None:
    text = ChatPrompt().sheet(f"q {token}", [f"a {token} b"], width=1, max_tokens=1).window([0]).text
    assert token not in text
    assert f"{token[0]} {token[1:]}" in text


def test_the_rubric_of_evidence_has_five_grades_and_may_ask_for_reasons() -> None:
    prompt = ChatPrompt(rubric="evidence", reasons=True)
    assert prompt.grade_ids == (0, 1, 2, 3, 4)
    shown = window(prompt, [0])
    assert shown.reasons
    assert '"reason"' in shown.text
    assert "from 0 to 4" in shown.text
    assert '"reason"' not in window(ChatPrompt(rubric="evidence"), [0]).text


def test_the_hash_tells_apart_whatever_changes_the_text() -> None:
    prompts = [
        ChatPrompt(),
        ChatPrompt(rubric="evidence"),
        ChatPrompt(markers="roman"),
        ChatPrompt(instruction="Another."),
        ChatPrompt(reasons=True),
    ]
    assert all(a.hash != b.hash for a, b in permutations(prompts, 2))
    assert ChatPrompt().hash == ChatPrompt(max_doc_chars=7).hash == ChatPrompt().hash


def test_scores_of_a_slot_prompt_are_not_taken_for_those_of_a_message() -> None:
    slots = GradePrompt(FakeTokenizer())
    with pytest.raises(ModelMismatch, match="layout"):
        ChatPrompt().check_card(slots.describe(), where="it")
    with pytest.raises(ModelMismatch, match="layout"):
        slots.check_card(ChatPrompt().describe())


def test_the_text_of_slot_prompts_is_the_one_their_hashes_were_taken_of() -> None:
    # Adapters and score files hold this hash; a change of the text they were made with must be meant.
    assert GradePrompt(FakeTokenizer()).hash == "d39d195eba30cec8c5c0ae4fff1964b49df02e797970e1487b38e95cbe0557c5"


def test_bad_settings_are_refused() -> None:
    for wrong in ({"markers": "stars"}, {"instruction": " "}, {"max_doc_chars": -1}, {"rubric": "none"}):
        with pytest.raises(BadArgument):
            ChatPrompt(**wrong)
    sheet = ChatPrompt().sheet("q", TEXTS, width=2, max_tokens=1)
    with pytest.raises(BadArgument):
        sheet.window(np.array([], dtype=np.int64))
    with pytest.raises(BadArgument, match="calibration"):
        sheet.empty(2)
