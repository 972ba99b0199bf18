"""Queries of the order study written for this project: passages, questions, responses, claims, from short lists.

They show that every step runs, and nothing about a scorer. The same number of queries gives the same bytes.
"""

from __future__ import annotations

import hashlib
from itertools import product
from pathlib import Path
from typing import Any

from pd_rerank.files import whole_file, write_jsonl, write_run

_PLACES = (
    "harbour", "hillside", "riverside", "market", "old town", "northern", "garden", "station", "island", "meadow",
    "canal", "mountain",
)  # fmt: skip
_THINGS = ("museum", "bakery", "library", "swimming pool", "workshop", "theatre", "clinic", "school")
_TOWNS = ("Aldery", "Bruvik", "Castona", "Delmar", "Estrup", "Fennwick", "Gorlin", "Hasselt Mills")
_FOUNDERS = ("Ada Brenn", "Carl Dove", "Edna Falk", "Gus Hartley", "Ida Jonker", "Kai Lund", "Mina Norrby", "Otto Pell")
_NEEDS = ("opening hours", "ticket prices", "tram connections", "guided tours", "winter courses", "cloakroom rules")


def _names(number: int) -> tuple[str, str, str, str]:
    """The place, founder, town and need of a query; all 96 places differ."""
    place, thing = list(product(_PLACES, _THINGS))[number * 37 % 96]
    k = number // 8 + number
    return f"{place} {thing}", _FOUNDERS[k % 8], _TOWNS[(3 * k + number) % 8], _NEEDS[number % 6]


def write_passages(folder: Path, queries: int, depth: int) -> dict[str, Path]:
    """Write topics, corpus, qrels (grades 0 to 3) and two first-stage runs of at most `depth` passages."""
    corpus: dict[str, str] = {}
    judged: dict[str, dict[str, int]] = {}
    for q in range(queries):
        what, _, town, need = _names(q)
        texts = {
            3: f"All {need} of the {what}, for summer and for winter, are posted at its door in {town}.",
            2: f"Of the {need} of the {what} only those for summer are known.",
            1: f"The {what} stands behind the square, near the fountain, and many people know it.",
            0: f"Nobody in {town} remembers the {need} of the year the bridge was built.",
        }
        for grade, text in texts.items():
            corpus[f"p{q:02}{grade}"] = text
            judged.setdefault(f"t{q:02}", {})[f"p{q:02}{grade}"] = grade
    topics = {f"t{q:02}": "{3} of the {0} for summer and winter".format(*_names(q)) for q in range(queries)}
    write_jsonl(folder / "topics.jsonl", ({"qid": qid, "text": text} for qid, text in topics.items()))
    write_jsonl(folder / "corpus.jsonl", ({"_id": doc_id, "text": text} for doc_id, text in corpus.items()))
    with whole_file(folder / "qrels.txt") as stream:
        stream.writelines(f"{qid} 0 {d} {g}\n" for qid, grades in judged.items() for d, g in grades.items())
    paths = {name: folder / f"{name}.{end}" for name, end in _FILES.items()}
    for name in ("run", "other"):
        write_run(paths[name], [(qid, _ranked(text, qid, corpus, name)[:depth]) for qid, text in topics.items()])
    return paths


_FILES = {"topics": "jsonl", "corpus": "jsonl", "qrels": "txt", "run": "trec", "other": "trec"}


def _ranked(query: str, query_id: str, corpus: dict[str, str], name: str) -> list[tuple[str, float]]:
    """A first stage that counts shared words and errs by a draw from names."""
    asked = set(query.lower().split())
    scored = {
        doc_id: round(len(asked & set(text.lower().split())) + 5 * _draw(name, query_id, doc_id), 6)
        for doc_id, text in corpus.items()
    }
    return sorted(scored.items(), key=lambda item: (-item[1], item[0]))


def write_questions(path: Path, queries: int, depth: int) -> None:
    """Write questions that take two passages to answer, each among `depth` passages."""
    records = []
    for q in range(queries):
        what, founder, town, _ = _names(q)
        passages: list[dict[str, Any]] = [
            {"title": what, "text": f"{founder} founded the {what}.", "supporting": True},
            {"title": founder, "text": f"{founder} was born in the town of {town}.", "supporting": True},
        ]
        for step in range(1, depth):
            thing, person, place, need = _names((q + 5 * step) % 96)
            passages += [
                {"title": thing, "text": f"People ask for the {need} of the {thing} in {place}.", "supporting": False},
                {"title": person, "text": f"{person} was born near {place}.", "supporting": False},
            ]
        shown = sorted(passages[:depth], key=lambda p: _draw("qa", str(q), str(p["text"])))
        numbered = [{"pid": f"h{q:02}-{i}", **passage} for i, passage in enumerate(shown)]
        question = f"In which town was the founder of the {what} born?"
        records.append({"qid": f"h{q:02}", "question": question, "answers": [town], "passages": numbered})
    write_jsonl(path, records)


def write_responses(path: Path, queries: int, depth: int) -> None:
    """Write prompts with `depth` responses, of which those that meet more of the prompt are scored higher."""
    records = []
    for q in range(queries):
        what, _, town, need = _names(q)
        parts = [f"The {what} in {town}", "welcomes visitors", "who come by tram", f"and tells them its {need}"]
        responses = []
        for i in range(depth):
            text = f"{' '.join(parts[: 1 + i % 4])}{'.' if i < 4 else f', as was said {i} times.'}"
            score = 1 + i % 4 + (0.5 if i >= 4 else 0)
            responses.append({"rid": f"r{i}", "text": text, "scores": [score, min(5, score + 1), score]})
        responses.sort(key=lambda r: _draw("responses", str(q), str(r["rid"])))
        prompt = f"Invite visitors who come by tram to the {what} in {town}; mention its {need}."
        records.append({"qid": f"r{q:02}", "prompt": prompt, "responses": responses})
    write_jsonl(path, records)


def write_claims(path: Path, queries: int, depth: int) -> None:
    """Write claims with `depth` pieces of evidence; every eighth claim is disputed."""
    labels = (*("SUPPORTS", "REFUTES", "NOT_ENOUGH_INFO") * 2, "SUPPORTS", "DISPUTED")
    records = []
    for q in range(queries):
        what, founder, town, _ = _names(q)
        said = {
            "SUPPORTS": [f"The {what} was founded by {founder}.", f"{founder} of {town} founded the {what}."],
            "REFUTES": [f"The {what} was not founded by {founder}.", f"It never was {founder} who founded the {what}."],
        }
        said["DISPUTED"] = [said["SUPPORTS"][0], said["REFUTES"][0]]
        label = labels[q % 8]
        texts = list(said.get(label, []))
        for step in range(1, depth):
            thing, person, place, _ = _names((q + 5 * step) % 96)
            texts += [f"{person} walked from the {what} to {place}.", f"The {thing} was founded by {person}."]
        texts = sorted(texts[:depth], key=lambda text: _draw("claims", str(q), text))
        evidences = [
            {
                "eid": f"c{q:02}-{i}",
                "article": what,
                "text": text,
                "label": next((n for n in ("SUPPORTS", "REFUTES") if text in said[n]), "NOT_ENOUGH_INFO"),
            }
            for i, text in enumerate(texts)
        ]
        claim = f"The {what} was founded by {founder}"
        records.append({"claim_id": f"c{q:02}", "claim": claim, "label": label, "evidences": evidences})
    write_jsonl(path, records)


def _draw(*words: str) -> float:
    """A number in [0, 1) that depends on nothing but the words."""
    return int.from_bytes(hashlib.sha256("\0".join(words).encode()).digest()[:6], "big") / 2**48
