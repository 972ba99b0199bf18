"""Rubrics by name and from YAML, with the field of what is wrong."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from pd_rerank.engines.fake import FakeTokenizer
from pd_rerank.errors import BadArgument, InvalidData, MissingResource
from pd_rerank.prompt import GradePrompt
from pd_rerank.rubrics import RUBRICS, Rubric, load_rubric


def test_own_rubrics_come_from_yaml(tmp_path: Path) -> None:
    path = tmp_path / "legal.yaml"
    path.write_text(
        "system: You grade statutes.\ninstruction: Grade each statute.\nitem: statute\n"
        "grades: {0: beside the point, 1: same field, 2: applies in part, 3: governs the case}\n"
    )
    rubric = load_rubric(path)
    assert rubric.name == "legal"
    assert rubric.grades[3] == "governs the case"
    text = GradePrompt(FakeTokenizer(), rubric=path)._whole_text("q", ["x"])
    assert "3: governs the case\n2: applies in part\n1: same field\n0: beside the point" in text
    assert "Statutes:\n[1] x" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("grades: [a, b, c, d]\nsystem: s\ninstruction: i\nitme: x", "itme"),
        ("- 1", "mapping"),
        ("system: s\ninstruction: i\ngrades: {1: a, 2: b}", "0 to 1"),
        ("system: s\ninstruction: i\ngrades: [a, b, 3]", "grades"),
        ("system: s\ngrades: [a, b]", "instruction"),
        ("a: [", "YAML"),
    ],
)
def test_a_broken_rubric_file_names_the_field(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(content)
    with pytest.raises(InvalidData, match=message):
        load_rubric(path)


def test_unknown_rubrics_are_refused_with_the_choices() -> None:
    with pytest.raises(BadArgument, match="response_quality"):
        load_rubric("relevance")
    with pytest.raises(MissingResource):
        load_rubric("absent.yaml")
    with pytest.raises(BadArgument, match="2 to 10"):
        Rubric(name="x", system="s", instruction="i", grades=("only",))


def test_an_adapter_is_its_own_rubric(tmp_path: Path) -> None:
    said = {**asdict(RUBRICS["evidence"]), "name": "mine", "grades": ["no", "yes"]}
    for card in (tmp_path / "reranker.json", tmp_path / "a b" / "reranker.json"):
        card.parent.mkdir(exist_ok=True)
        card.write_text(json.dumps({"rubric": said, "max_doc_chars": 70}), encoding="utf-8")
        found = load_rubric(card.parent)
        assert (found.name, found.grades, found.max_doc_chars) == ("mine", ("no", "yes"), 70)
    (tmp_path / "reranker.json").write_text('{"rubric": null}', encoding="utf-8")
    with pytest.raises(InvalidData, match="does not hold the rubric"):
        load_rubric(str(tmp_path))
