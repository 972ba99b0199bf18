"""The order study's tasks: queries with candidates, judgements, accepted answers and labels, from files of four shapes.

Nothing is drawn by chance: `queries` of a file are those with the smallest hashes of the study's seed, so that fewer
are always among more.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pd_rerank.errors import InvalidData
from pd_rerank.evaluation.consumers import read_verdict
from pd_rerank.evaluation.pool_change import sample_queries
from pd_rerank.files import document_text, identifier, read_corpus, read_jsonl, read_qrels, read_run, read_topics
from pd_rerank.pool import Candidate, Pool, pools_from_run, read_pools
from pd_rerank.studies.order_settings import TaskSettings
from pd_rerank.studies.order_templates import write_claims, write_passages, write_questions, write_responses


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """One task as it is scored: a pool per query in first-stage order, and what is known of its candidates.

    `deeper` holds the pools with one candidate more, of the queries that have one; `others` the pools of the same
    queries by other first stages; `answers` and `labels` what the reader should say. `there` counts the file's queries,
    `left_out` says how many of them could not be used, by reason.
    """

    name: str
    settings: TaskSettings
    pools: tuple[Pool, ...]
    qrels: Mapping[str, Mapping[str, int]]
    there: int
    deeper: tuple[Pool, ...] = ()
    others: Mapping[str, tuple[Pool, ...]] = field(default_factory=dict)
    answers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)

    def some(self, queries: int | None, *, seed: int) -> tuple[Pool, ...]:
        """The pools of the first `queries` queries by the study's draw, in the task's order; all where it is None."""
        return _drawn(self.pools, queries, seed=seed)


def read_task(name: str, settings: TaskSettings, folder: Path, *, seed: int) -> Task:
    """Read a task's files, or write the templates' into `folder` and read those."""
    if settings.templates is not None:
        settings = _laid_out(settings, folder)
    pools, qrels, more = _READERS[settings.type](settings)
    left_out: dict[str, int] = more.pop("left_out", {})
    there = len(pools) + sum(left_out.values())
    short = [pool for pool in pools if len(pool) < 2]
    if short:
        left_out["fewer than two candidates"] = len(short)
    full = [pool for pool in pools if len(pool) >= 2]
    if len(full) < 4:
        why = "".join(f"; {n} left out: {reason}" for reason, n in left_out.items())
        raise InvalidData(f"task '{name}' has {len(full)} queries with two candidates or more, it takes four{why}")
    chosen = _drawn(full, settings.queries, seed=seed)
    ids = {pool.query_id for pool in chosen}
    n = settings.candidates
    others = {
        other: tuple(_cut(pool, n) for pool in found if pool.query_id in ids and len(pool) >= 2)
        for other, found in more.pop("others", {}).items()
    }
    return Task(
        name=name,
        settings=settings,
        pools=tuple(_cut(pool, n) for pool in chosen),
        deeper=tuple(_cut(pool, n + 1) for pool in chosen if len(pool) > n),
        qrels={query_id: grades for query_id, grades in qrels.items() if query_id in ids},
        others=others,
        there=there,
        left_out=left_out,
        **more,
    )


def files_of(settings: TaskSettings) -> dict[str, Path]:
    """The files a task is read from, by what they are."""
    names = ("file", "pools", "run", "topics", "corpus", "qrels")
    found = {name: getattr(settings, name) for name in names if getattr(settings, name) is not None}
    return found | {f"run of {name}": path for name, path in settings.others.items()}


# -- the four shapes ----------------------------------------------------------------------------------------------

_Read = tuple[list[Pool], dict[str, dict[str, int]], dict[str, Any]]


def _passages(settings: TaskSettings) -> _Read:
    assert settings.qrels is not None
    qrels = read_qrels(settings.qrels)
    if settings.pools is not None:
        pools, others = read_pools(settings.pools), {}
    else:
        assert settings.run is not None
        assert settings.topics is not None
        assert settings.corpus is not None
        topics = read_topics(settings.topics)
        runs = {name: read_run(path) for name, path in {"": settings.run, **settings.others}.items()}
        depth = settings.candidates + 1
        # what has no text is left out, so that a run is read somewhat deeper than the pool
        best = {name: {qid: hits[: 2 * depth] for qid, hits in run.items()} for name, run in runs.items()}
        wanted = {hit.doc_id for run in best.values() for hits in run.values() for hit in hits}
        texts = dict(read_corpus(settings.corpus, wanted=wanted))
        made = {name: _of_run(run, topics, texts, depth) for name, run in best.items()}
        pools, others = made.pop(""), made
    judged = [pool for pool in pools if any(g >= settings.min_grade for g in qrels.get(pool.query_id, {}).values())]
    left_out = {"no relevant judgement": len(pools) - len(judged)} if len(judged) < len(pools) else {}
    return judged, qrels, {"others": others, "left_out": left_out}


def _of_run(run: Any, topics: Mapping[str, str], texts: Mapping[str, str], depth: int) -> list[Pool]:
    found = pools_from_run(run, topics, texts, depth=2 * depth, missing="skip")
    return [_cut(pool, depth) for pool in found]


def _questions(settings: TaskSettings) -> _Read:
    answers: dict[str, tuple[str, ...]] = {}

    def question(record: Mapping[str, Any], query_id: str, where: str) -> list[tuple[Candidate, int]]:
        said = record.get("answers")
        if not isinstance(said, list) or not said or not all(isinstance(answer, str) for answer in said):
            raise InvalidData(f"{where}: 'answers' is no list of accepted answers")
        answers[query_id] = tuple(said)
        return [
            (Candidate(doc_id=identifier(p, ("pid", "id"), where=at), text=document_text(p, where=at)), _mark(p, at))
            for p, at in _items(record, "passages", where)
        ]

    pools, qrels = _lines(settings, ("qid", "query_id", "id"), "question", question)
    return pools, qrels, {"answers": answers}


def _mark(passage: Mapping[str, Any], where: str) -> int:
    supporting = passage.get("supporting")
    if not isinstance(supporting, bool):
        raise InvalidData(f"{where}: 'supporting' is {supporting!r}; write true or false")
    return int(supporting)


def _responses(settings: TaskSettings) -> _Read:
    low, high = settings.scale

    def prompt(record: Mapping[str, Any], query_id: str, where: str) -> list[tuple[Candidate, int]]:
        found = []
        for response, at in _items(record, "responses", where):
            scores = response.get("scores")
            scores = scores if isinstance(scores, list) else []
            numbers = all(type(s) in (int, float) for s in scores)
            if not scores or not numbers or not all(low <= s <= high for s in scores):
                raise InvalidData(
                    f"{at}: 'scores' is {response.get('scores')!r}; give numbers from {low:g} to {high:g} (scale)"
                )
            grade = round(settings.levels * (statistics.fmean(scores) - low) / (high - low))
            candidate = Candidate(
                doc_id=identifier(response, ("rid", "id"), where=at), text=document_text(response, where=at)
            )
            found.append((candidate, grade))
        return found

    pools, qrels = _lines(settings, ("qid", "query_id", "id"), "prompt", prompt)
    return pools, qrels, {}


def _claims(settings: TaskSettings) -> _Read:
    labels: dict[str, str] = {}

    def claim(record: Mapping[str, Any], query_id: str, where: str) -> list[tuple[Candidate, int]] | None:
        label = str(record.get("label", "")).strip()
        if label.upper() == "DISPUTED":
            return None
        if read_verdict(label) == "INVALID":
            raise InvalidData(f"{where}: label {label!r} is none of SUPPORTS, REFUTES, NOT_ENOUGH_INFO, DISPUTED")
        labels[query_id] = label
        return [
            (
                Candidate(doc_id=identifier(e, ("eid", "id"), where=at), text=document_text(e, where=at)),
                int(read_verdict(str(e.get("label", ""))) in ("SUPPORTED", "REFUTED")),
            )
            for e, at in _items(record, "evidences", where)
        ]

    disputed: list[str] = []
    pools, qrels = _lines(settings, ("claim_id", "qid", "id"), "claim", claim, disputed)
    return pools, qrels, {"labels": labels, "left_out": {"disputed": len(disputed)} if disputed else {}}


_READERS: Mapping[str, Callable[[TaskSettings], _Read]] = {
    "passages": _passages,
    "qa": _questions,
    "responses": _responses,
    "claims": _claims,
}


def _lines(
    settings: TaskSettings,
    ids: Sequence[str],
    text: str,
    read: Callable[[Mapping[str, Any], str, str], list[tuple[Candidate, int]] | None],
    left_out: list[str] | None = None,
) -> tuple[list[Pool], dict[str, dict[str, int]]]:
    """Pools and grades of a JSONL file, one query per line; `read` gives a line's candidates, or None to leave it."""
    assert settings.file is not None
    seen: dict[str, str] = {}
    pools: list[Pool] = []
    qrels: dict[str, dict[str, int]] = {}
    for where, record in read_jsonl(settings.file):
        query_id = identifier(record, ids, where=where)
        if query_id in seen:
            raise InvalidData(f"{where}: '{query_id}' was at {seen[query_id]} before; give every line an id of its own")
        seen[query_id] = where
        asked = record.get(text)
        if not isinstance(asked, str) or not asked.strip():
            raise InvalidData(f"{where}: '{text}' is {asked!r}; write its text or drop the line")
        found = read(record, query_id, where)
        if found is None:
            assert left_out is not None
            left_out.append(query_id)
            continue
        try:
            pools.append(Pool(query_id=query_id, query=asked, candidates=tuple(candidate for candidate, _ in found)))
        except InvalidData as error:
            raise InvalidData(f"{where}: {error}") from error
        qrels[query_id] = {candidate.doc_id: grade for candidate, grade in found}
    return pools, qrels


def _items(record: Mapping[str, Any], name: str, where: str) -> list[tuple[Mapping[str, Any], str]]:
    items = record.get(name)
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise InvalidData(f"{where}: '{name}' is no list of objects")
    return [(item, f"{where}, {name} {i}") for i, item in enumerate(items, 1)]


# -- inner parts --------------------------------------------------------------------------------------------------


def _cut(pool: Pool, n: int) -> Pool:
    return pool if len(pool) <= n else Pool(query_id=pool.query_id, query=pool.query, candidates=pool.candidates[:n])


def _drawn(pools: Sequence[Pool], queries: int | None, *, seed: int) -> tuple[Pool, ...]:
    if queries is None or queries >= len(pools):
        return tuple(pools)
    wanted = set(sample_queries((pool.query_id for pool in pools), size=queries, seed=seed))
    return tuple(pool for pool in pools if pool.query_id in wanted)


def _laid_out(settings: TaskSettings, folder: Path) -> TaskSettings:
    """Write the templates of a task's kind, and return the settings that read them."""
    queries, depth = settings.templates or 0, settings.candidates + 1
    if settings.type == "passages":
        paths = write_passages(folder, queries, 2 * depth)
        other = paths.pop("other")
        return settings.model_copy(update={**paths, "others": {"other": other}})
    write = {"qa": write_questions, "responses": write_responses, "claims": write_claims}[settings.type]
    path = folder / f"{settings.type}.jsonl"
    write(path, queries, depth if settings.type == "qa" else settings.candidates)
    return settings.model_copy(update={"file": path})
