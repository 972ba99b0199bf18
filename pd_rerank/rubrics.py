"""Rubrics: what is graded, in which words, and what each grade means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pd_rerank.embedded import adapter_folder
from pd_rerank.errors import BadArgument, InvalidData, MissingResource
from pd_rerank.files import CARD, read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Rubric:
    """What is graded and what each grade means.

    `grades[g]` describes grade g, lowest first; shipped rubrics have four of them, `evidence` five.
    `item` is the singular word for a candidate; `max_doc_chars` is the default cap on its text.
    """

    name: str
    system: str
    instruction: str
    grades: tuple[str, ...]
    query_label: str = "Query"
    item: str = "document"
    max_doc_chars: int = 1200

    def __post_init__(self) -> None:
        if not 2 <= len(self.grades) <= 10:
            raise BadArgument(f"rubric '{self.name}' has {len(self.grades)} grades; give 2 to 10, lowest first")
        for field in ("system", "instruction", "query_label", "item"):
            if not getattr(self, field).strip():
                raise BadArgument(f"rubric '{self.name}': '{field}' is empty")


RUBRICS: Mapping[str, Rubric] = {
    rubric.name: rubric
    for rubric in (
        Rubric(
            name="passage_relevance",
            system=(
                "You assess search results. Each numbered document receives one whole-number grade for how "
                "well its own text answers the query. A document's place in the list says nothing about it. "
                "Give grades only: no ranking, no explanation."
            ),
            instruction="Grade every document for a web search by how well it answers the query.",
            grades=(
                "unrelated to the query",
                "on the subject, but does not answer the query",
                "answers the query in part, or leaves something important out",
                "answers the query fully and directly",
            ),
        ),
        Rubric(
            name="answer_support",
            system=(
                "You assess evidence for answering a question that may need several sources together. Each "
                "numbered passage receives one whole-number grade for what it contributes. A passage's place in "
                "the list says nothing about it. Give grades only: no ranking, no explanation."
            ),
            instruction="Grade every passage by how much it contributes to answering the question.",
            grades=(
                "contributes nothing to the answer",
                "names something from the question without a usable fact",
                "holds a fact that may be one step of the answer",
                "holds a fact without which the question cannot be answered",
            ),
            query_label="Question",
            item="passage",
            max_doc_chars=1600,
        ),
        Rubric(
            name="response_quality",
            system=(
                "You assess replies to a user's prompt. Each numbered response receives one whole-number grade "
                "for its quality. A response's place in the list says nothing about it. Give grades only: no "
                "ranking, no explanation."
            ),
            instruction="Grade every response by how correct, helpful and complete it is as a reply to the prompt.",
            grades=(
                "wrong, harmful or beside the point",
                "partly right, with serious errors or gaps",
                "right on the whole, with small errors or gaps",
                "correct, complete and helpful",
            ),
            query_label="Prompt",
            item="response",
            max_doc_chars=2000,
        ),
        Rubric(
            name="evidence",
            system=(
                "You are a strict checker of evidence. For each numbered passage, decide whether what it says, and "
                "nothing you know besides, meets all conditions of the query. Look closely at negation and how far "
                "it reaches, at who or what a statement is about, at the direction of comparisons, and at limits of "
                "time, place, number or kind. Passages are judged one by one; use no tools."
            ),
            instruction="Grade every passage by how fully its own text meets the conditions of the query.",
            grades=(
                "about something else",
                "a condition is contradicted, negated, or said of another thing",
                "on the subject, but a condition that is needed is not stated",
                "every condition is met, one detail only by implication",
                "every condition is met in so many words",
            ),
            item="passage",
            max_doc_chars=8000,
        ),
    )
}


def load_rubric(rubric: str | Path | Rubric) -> Rubric:
    """A shipped rubric by name, one's own from a YAML file with the fields of `Rubric`, or the one of an adapter.

    An adapter trained here is named by its folder or short name: its rubric is the one it was trained with, and so is
    the cap on a document's text. In YAML `grades` is a mapping from 0 upwards or a list, lowest first. Unknown fields
    are refused.
    """
    if isinstance(rubric, Rubric):
        return rubric
    if not isinstance(rubric, str | Path):
        raise BadArgument(f"a rubric is a name, a .yaml file or a Rubric, got {rubric!r}")
    known = RUBRICS.get(str(rubric))
    if known is not None:
        return known
    path = Path(rubric)
    card = adapter_folder(rubric) / CARD
    if card.is_file():
        return _trained_with(card)
    if path.suffix not in {".yaml", ".yml"}:
        raise BadArgument(
            f"unknown rubric '{rubric}'; choose {', '.join(RUBRICS)}, or name a .yaml file or an adapter's folder"
        )
    if not path.is_file():
        raise MissingResource(f"no rubric file {path}")
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidData(f"{path} is not YAML: {error}") from error
    if not isinstance(data, dict):
        raise InvalidData(f"{path}: a rubric file is a mapping, got {type(data).__name__}")
    data.setdefault("name", path.stem)
    fields = set(Rubric.__dataclass_fields__)
    for key in data:
        if key not in fields:
            raise InvalidData(f"{path}: unknown rubric field '{key}'; a rubric has {', '.join(sorted(fields))}")
    grades = data.get("grades")
    if isinstance(grades, dict):
        if sorted(grades) != list(range(len(grades))):
            raise InvalidData(f"{path}: grades are numbered 0 to {len(grades) - 1} without gaps, got {sorted(grades)}")
        data["grades"] = [grades[g] for g in range(len(grades))]
    for key, value in data.items():
        if key == "grades":
            good = isinstance(value, list) and all(isinstance(text, str) for text in value)
        elif key == "max_doc_chars":
            good = isinstance(value, int) and not isinstance(value, bool)
        else:
            good = isinstance(value, str)
        if not good:
            raise InvalidData(f"{path}: field '{key}' has the wrong type ({type(value).__name__})")
    try:
        return Rubric(**{**data, "grades": tuple(data.get("grades", ()))})
    except TypeError as error:
        raise InvalidData(f"{path}: {error}") from error


def _trained_with(card: Path) -> Rubric:
    record = read_json(card)
    try:
        said = record["rubric"]
        chars = record.get("max_doc_chars", said.get("max_doc_chars"))
        return Rubric(**{**said, "grades": tuple(said["grades"]), "max_doc_chars": chars})
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidData(f"{card} does not hold the rubric its adapter was trained with") from error
