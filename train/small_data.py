"""Pools and judgements for the `cpu-small` configs, from small permissively licensed collections.

    python train/small_data.py passages --data DATA --output runs/small-passages
    python train/small_data.py qa --data DATA --output runs/small-qa
    python train/small_data.py responses --data DATA --output runs/small-responses

`passages` reads CondaQA's contrast pairs (`condaqa/dev_contrast_pairs.jsonl`, Apache-2.0) and FEVER-Symmetric
(`fever_symmetric/dev.jsonl`, CC BY-SA 3.0): a question or claim, the sentences that settle it (grade 3), other
sentences of the same passage (1) and sentences about something else (0). `qa` trains on MuSiQue (`qa/musique.jsonl`,
CC BY 4.0) and holds HotpotQA out (`qa/hotpotqa.jsonl`, CC BY-SA 4.0); supporting passages are worth 3. `responses`
reads graded replies (`responses/vicuna.jsonl`, Apache-2.0), whose mean grade 1 to 5 is brought to 0 to 3. What is held
out shares no passage, claim subject or prompt with what is trained on. The folder gets `train/`, `heldout/`,
`train-qrels.txt` and `heldout-qrels.txt`; the same data give the same bytes.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pd_rerank import Candidate, Pool
from pd_rerank.files import read_jsonl, whole_file
from pd_rerank.pool import write_pools

HELD_OUT = 0.2
"""Share of the groups that is held out."""

SENTENCE = re.compile(r"(?<=[.!?]) +(?=[A-Z\"'(])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A query, what bears on it (text to grade), and the group it must not be parted from."""

    query_id: str
    query: str
    group: str
    judged: Mapping[str, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("passages", "qa", "responses"))
    parser.add_argument("--data", type=Path, required=True, help="folder that holds the collections")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--pool-size", type=int, default=8, help="candidates of a pool, for passages and qa")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    if args.task == "passages":
        questions = [*condaqa(args.data), *fever(args.data)]
        train, held = apart(questions, draw)
        parts = {name: filled(part, args.pool_size, draw) for name, part in (("train", train), ("heldout", held))}
    elif args.task == "qa":
        parts = {
            "train": cut(multi_hop(args.data / "qa" / "musique.jsonl"), args.pool_size, draw),
            "heldout": cut(multi_hop(args.data / "qa" / "hotpotqa.jsonl"), args.pool_size, draw),
        }
    else:
        train, held = apart(list(responses(args.data)), draw, share=0.5)
        parts = {"train": cut(train, None, draw), "heldout": cut(held, None, draw)}
    for name, judged in parts.items():
        write(args.output, name, judged)
        print(f"{args.output / name}: {len(judged)} pools, {sum(len(pool) for pool, _ in judged)} candidates")


# -- collections --------------------------------------------------------------------------------------------------


def condaqa(data: Path) -> Iterator[Question]:
    """A question once per passage; of a passage and its edit the sentences that differ settle it, one of each."""
    seen = set()
    for _, record in read_jsonl(data / "condaqa" / "dev_contrast_pairs.jsonl"):
        passage, question = str(record["passage_id"]), " ".join(record["question"].split())
        if (passage, question) in seen:
            continue
        seen.add((passage, question))
        one, other = (SENTENCE.split(" ".join(record[side].split())) for side in ("doc_yes", "doc_no"))
        differ = [[text for text in mine if text not in theirs] for mine, theirs in ((one, other), (other, one))]
        judged = {text: 1 for text in one if text in other and len(text) >= 40}
        judged = dict(list(judged.items())[:2])
        judged.update({texts[0]: 3 for texts in differ if texts})
        if 3 in judged.values():
            yield Question(
                query_id=f"condaqa-{passage}-{len(seen)}", query=question, group=f"condaqa-{passage}", judged=judged
            )


def fever(data: Path) -> Iterator[Question]:
    """A claim; the evidence that bears it out and the evidence against it both settle it."""
    for _, record in read_jsonl(data / "fever_symmetric" / "dev.jsonl"):
        subject = " ".join(record["q1"].lower().split()[:2])
        for side in ("q1", "q2"):
            yield Question(
                query_id=f"{record['id']}-{side}",
                query=plain(record[side]),
                group=f"fever-{subject}",
                judged={plain(record["doc1"]): 3, plain(record["doc2"]): 3},
            )


def multi_hop(path: Path) -> list[Question]:
    return [
        Question(
            query_id=str(record["qid"]),
            query=record["question"],
            group=str(record["qid"]),
            judged={f"{p['title']}: {p['text']}": 3 if p["supporting"] else 0 for p in record["passages"]},
        )
        for _, record in read_jsonl(path)
    ]


def responses(data: Path) -> Iterator[Question]:
    for _, record in read_jsonl(data / "responses" / "vicuna.jsonl"):
        graded = {r["text"]: round((sum(r["scores"]) / len(r["scores"]) - 1) * 3 / 4) for r in record["responses"]}
        yield Question(query_id=str(record["qid"]), query=record["prompt"], group=str(record["qid"]), judged=graded)


def plain(text: str) -> str:
    """FEVER's tokenised text as written text: brackets by name, and spaces in front of punctuation."""
    for name, sign in (("-LRB-", "("), ("-RRB-", ")"), ("-LSB-", "["), ("-RSB-", "]"), ("--", "–")):
        text = text.replace(name, sign)
    text = re.sub(r" +([.,;:!?)\]])", r"\1", re.sub(r"([(\[]) +", r"\1", text))
    return " ".join(text.split())


# -- pools --------------------------------------------------------------------------------------------------------


def apart(
    questions: Sequence[Question], draw: random.Random, *, share: float = HELD_OUT
) -> tuple[list[Question], list[Question]]:
    """Questions to train on and to hold out, whole groups on either side; both in an order that mixes collections."""
    groups = sorted({question.group for question in questions})
    held = set(draw.sample(groups, round(share * len(groups))))
    mixed = draw.sample(list(questions), len(questions))
    return [q for q in mixed if q.group not in held], [q for q in mixed if q.group in held]


def filled(questions: Sequence[Question], size: int, draw: random.Random) -> list[tuple[Pool, Mapping[str, int]]]:
    """Pools of `size`: what bears on the question, and texts of other groups of the same side."""
    texts = [(question.group, text) for question in questions for text in question.judged]
    found = []
    for question in questions:
        judged = dict(question.judged)
        while len(judged) < size:
            group, text = draw.choice(texts)
            if group != question.group:
                judged.setdefault(text, 0)
        found.append(pool_of(question, judged, draw))
    return found


def cut(questions: Iterable[Question], size: int | None, draw: random.Random) -> list[tuple[Pool, Mapping[str, int]]]:
    """Pools of what is judged; where it is more than `size`, the best stay and the others are drawn."""
    found = []
    for question in questions:
        texts = sorted(draw.sample(list(question.judged), len(question.judged)), key=lambda t: -question.judged[t])
        found.append(pool_of(question, {text: question.judged[text] for text in texts[:size]}, draw))
    return found


def pool_of(question: Question, judged: Mapping[str, int], draw: random.Random) -> tuple[Pool, Mapping[str, int]]:
    """A pool in drawn order; a document's id is its number in it, which says nothing of its grade."""
    texts = draw.sample(list(judged), len(judged))
    ids = [f"{question.query_id}-{number}" for number in range(len(texts))]
    candidates = [Candidate(doc_id=doc_id, text=text) for doc_id, text in zip(ids, texts, strict=True)]
    pool = Pool.ordered(query_id=question.query_id, query=question.query, candidates=candidates)
    return pool, {doc_id: judged[text] for doc_id, text in zip(ids, texts, strict=True)}


def write(folder: Path, name: str, judged: Sequence[tuple[Pool, Mapping[str, int]]]) -> None:
    write_pools(folder / name, [pool for pool, _ in judged])
    with whole_file(folder / f"{name}-qrels.txt") as stream:
        for pool, grades in judged:
            stream.writelines(f"{pool.query_id} 0 {doc_id} {grade}\n" for doc_id, grade in grades.items())


if __name__ == "__main__":
    main()
