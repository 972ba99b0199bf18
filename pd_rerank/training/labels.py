"""Training labels: the grades that a teacher, or a judge, gives the documents of a pool.

A label is a vector of T scores, one per shuffle of the pool the teacher saw. A single-order target is its first
element, an order-averaged target its mean. Labels lie on disk as JSONL beside a manifest, or come from score tables
and judgements that are there already.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from pd_rerank.engines.base import FloatArray
from pd_rerank.errors import BadArgument, InvalidData, MissingResource, ModelMismatch, whole
from pd_rerank.files import (
    SCORED_WITH,
    finite,
    identifier,
    manifest,
    read_json,
    read_jsonl,
    sha256_file,
    whole_folder,
    write_json,
    write_jsonl,
)
from pd_rerank.pool import Pool, pool_sha256, pools_sha256
from pd_rerank.prompt import GradePrompt
from pd_rerank.scores import ScoreTable, join_scores

Target = Literal["single", "averaged"]

REQUIRED = (
    *("experiment_id", "teacher_model_id", "teacher_protocol", "prompt_template_id"),
    *("n_queries", "n_documents", "timestamp_utc"),
)
"""What a label folder's manifest must record. Source: method, 4.1."""

_LABELS, _MANIFEST, _FOLDER = "labels.jsonl", "manifest.json", "labels"

FILES = (_LABELS, _MANIFEST)
"""What `write_labels` puts into its folder."""

_ROUNDING = 1e-3
"""How far another program's rounding may put a mean or a sum of probabilities off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What one document is worth for one query.

    `scores` holds T numbers on the scale of the grades (0 … 3 for four grades), element t of the pool shuffled with
    the teacher's t-th seed; `grade_probabilities` is the mean over T of the probability of each grade, None where
    the teacher gave none.
    """

    query_id: str
    doc_id: str
    scores: tuple[float, ...]
    grade_probabilities: tuple[float, ...] | None = None

    @property
    def averaged(self) -> float:
        """The mean over the shuffles."""
        return math.fsum(self.scores) / len(self.scores)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Query(Mapping[str, Label]):
    """One query's labels as arrays: `scores` (n, T), `probabilities` (n, G) with NaN rows where there are none."""

    query_id: str
    place: Mapping[str, int]
    scores: npt.NDArray[np.float64]
    probabilities: npt.NDArray[np.float64]

    def __getitem__(self, doc_id: str) -> Label:
        i = self.place[doc_id]
        p = self.probabilities[i]
        return Label(
            query_id=self.query_id,
            doc_id=doc_id,
            scores=tuple(self.scores[i].tolist()),
            grade_probabilities=None if np.isnan(p).any() else tuple(p.tolist()),
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.place)

    def __len__(self) -> int:
        return len(self.place)


class Labels(Mapping[str, Mapping[str, Label]]):
    """Labels by query, then document; `manifest` says where they come from.

    Every label has the same number of scores T, all between 0 and the top grade, and a document one label per query;
    anything else is `InvalidData`. `grades` in the manifest is the number of grades, four where it says nothing.
    """

    def __init__(self, labels: Iterable[Label], *, manifest: Mapping[str, Any]) -> None:
        placed = ((f"query '{label.query_id}', document '{label.doc_id}'", label) for label in labels)
        self._fill(placed, manifest)

    @classmethod
    def _read(cls, placed: Iterable[tuple[str, Label]], *, manifest: Mapping[str, Any]) -> Labels:
        """Labels that each come with the place to name where one is wrong."""
        labels = cls.__new__(cls)
        labels._fill(placed, manifest)
        return labels

    def _fill(self, placed: Iterable[tuple[str, Label]], record: Mapping[str, Any]) -> None:
        self.manifest: Mapping[str, Any] = MappingProxyType(dict(record))
        self.grades = record.get("grades", 4)
        if not whole(self.grades) or self.grades < 2:
            raise InvalidData(f"labels of {self.grades!r} grades; a whole number from 2 on is wanted")
        self.presentations = 0
        found: dict[str, dict[str, tuple[tuple[float, ...], tuple[float, ...]]]] = {}
        none = (math.nan,) * self.grades
        for where, label in placed:
            self._check(label, where=where)
            query = found.setdefault(label.query_id, {})
            if label.doc_id in query:
                raise InvalidData(
                    f"{where}: document '{label.doc_id}' of query '{label.query_id}' has a label already; keep one"
                )
            query[label.doc_id] = label.scores, label.grade_probabilities or none
        self._queries = {
            query_id: _Query(
                query_id=query_id,
                place={doc_id: i for i, doc_id in enumerate(query)},
                scores=np.array([scores for scores, _ in query.values()], dtype=np.float64),
                probabilities=np.array([p for _, p in query.values()], dtype=np.float64),
            )
            for query_id, query in found.items()
        }

    def _check(self, label: Label, *, where: str) -> None:
        count, top = len(label.scores), self.grades - 1
        self.presentations = self.presentations or count
        if not count or count != self.presentations:
            raise InvalidData(
                f"{where}: {count} scores, the labels before have {self.presentations}; one per shuffle, the same for "
                "every document"
            )
        if wrong := [s for s in label.scores if not 0 <= s <= top]:  # NaN is not between them either
            raise InvalidData(f"{where}: score {wrong[0]} is not on the scale from 0 to {top}")
        p = label.grade_probabilities
        if p is not None and not (len(p) == top + 1 and min(p) >= 0 and abs(math.fsum(p) - 1) <= _ROUNDING):
            raise InvalidData(f"{where}: grade probabilities {list(p)} are not {top + 1} shares that add up to 1")

    def __getitem__(self, query_id: str) -> Mapping[str, Label]:
        return self._queries[query_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._queries)

    def __len__(self) -> int:
        return len(self._queries)

    @property
    def documents(self) -> int:
        """How many labels there are."""
        return sum(map(len, self._queries.values()))

    def arrays(self) -> Iterator[tuple[str, tuple[str, ...], npt.NDArray[np.float64]]]:
        """Every query's id, its documents' ids and their scores (n, T)."""
        return ((query.query_id, tuple(query.place), query.scores) for query in self._queries.values())

    def sha256(self) -> str:
        """A hash of what the labels say: ids, scores and probabilities; not of who gave them."""
        content = hashlib.sha256()
        for query in self._queries.values():
            content.update("\0".join((query.query_id, *query.place, "")).encode("utf-8", "surrogatepass"))
            content.update(query.scores.tobytes() + query.probabilities.tobytes())
        return content.hexdigest()

    def vectors(self, pool: Pool) -> npt.NDArray[np.float64]:
        """All T scores of a pool's documents, (n, T), in pool order; documents without a label are `InvalidData`."""
        query, at = self._of(pool)
        return query.scores[at]

    def targets(self, pool: Pool, kind: Target = "averaged") -> FloatArray:
        """A pool's targets on the scale of the grades, (n,) float32 in pool order.

        `single` is each document's first score, `averaged` the mean of all T. Documents without a label are
        `InvalidData` with a list of them.
        """
        if kind not in get_args(Target):
            raise BadArgument(f"unknown kind of target '{kind}'; choose one of {', '.join(get_args(Target))}")
        scores = self.vectors(pool)
        chosen = scores[:, 0] if kind == "single" else scores.mean(axis=1)
        return chosen.astype(np.float32)

    def probabilities(self, pool: Pool) -> FloatArray | None:
        """Mean grade probabilities of a pool's documents, (n, G) float32 in pool order; None where one has none."""
        query, at = self._of(pool)
        p = query.probabilities[at]
        return None if np.isnan(p).any() else p.astype(np.float32)

    def _of(self, pool: Pool) -> tuple[_Query, list[int]]:
        if not len(pool):
            empty = np.zeros((0, max(1, self.presentations)))
            return _Query(query_id="", place={}, scores=empty, probabilities=np.zeros((0, self.grades))), []
        if fault := _uncovered(self, pool):
            raise InvalidData(f"{fault}; label these pools, or leave them out")
        query = self._queries[pool.query_id]
        return query, [query.place[doc_id] for doc_id in pool.doc_ids]


# -- files -------------------------------------------------------------------------------------------------------


def write_labels(folder: str | Path, labels: Labels, *, also: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Write labels.jsonl and manifest.json, whole or not at all, and return the manifest; `read_labels` reads it back.

    The manifest holds the labels' own, `also`, counts, versions, the time and the SHA-256 of labels.jsonl.

    A line is one label: `query_id`, `doc_id`, `score_continuous` (the mean), `score_raw_vector` (T scores),
    `score_grade_vector` (mean probabilities, or null), `teacher_model_id`, `teacher_protocol`, `prompt_template_id`,
    `k_perms`. Times are in the manifest alone: equal labels, equal lines. Source: method, 4.1.
    """
    made = {**labels.manifest, **(also or {})}
    lacking = [key for key in REQUIRED[:4] if key not in made]
    if lacking:
        raise BadArgument(f"the labels' manifest lacks {', '.join(lacking)}")
    same = {key: made[key] for key in ("teacher_model_id", "teacher_protocol", "prompt_template_id")}
    same["k_perms"] = labels.presentations
    with whole_folder(folder, holds=FILES) as fresh:
        write_jsonl(fresh / _LABELS, (_line(label) | same for query in labels.values() for label in query.values()))
        counts = {
            "n_queries": len(labels),
            "n_documents": labels.documents,
            "k_perms": labels.presentations,
            "grades": labels.grades,
        }
        files = {_LABELS: fresh / _LABELS}
        record = manifest({**made, **counts, "format": "pd_rerank labels 1"}, files=files, libraries=SCORED_WITH)
        record["timestamp_utc"] = record.pop("created")
        write_json(fresh / _MANIFEST, record)
    return record


def _line(label: Label) -> dict[str, Any]:
    p = label.grade_probabilities
    return {
        "query_id": label.query_id,
        "doc_id": label.doc_id,
        "score_continuous": label.averaged,
        "score_raw_vector": list(label.scores),
        "score_grade_vector": None if p is None else list(p),
    }


def read_labels(path: str | Path) -> Labels:
    """Read labels: a folder that `write_labels` or `pd-rerank label` wrote, or a JSONL file alone.

    The folder's file must be the one its manifest records. A file alone has the manifest its lines make, which must
    agree with each other. A line that lacks a field, holds NaN or a score off the scale, has another T than the
    others, or labels a document again is `InvalidData` with file and line.
    """
    source = Path(path)
    if source.is_dir():
        inner = source / _FOLDER
        source = source if (source / _LABELS).is_file() or not inner.is_dir() else inner
        record = _verified(source)
        labels = Labels._read(_lines(source / _LABELS, record), manifest=record)
        if (labels.documents, labels.presentations or record["k_perms"]) != (record["n_documents"], record["k_perms"]):
            raise InvalidData(
                f"{source / _LABELS} holds {labels.documents} labels of {labels.presentations} scores, {_MANIFEST} "
                f"records {record['n_documents']} of {record['k_perms']}"
            )
        return labels
    record = {}
    lines = list(_lines(source, record))
    if not lines:
        raise InvalidData(f"{source} holds no labels")
    return Labels._read(lines, manifest=record)


def _verified(folder: Path) -> dict[str, Any]:
    for name in FILES:
        if not (folder / name).is_file():
            raise MissingResource(f"{folder} is no label folder: it has no {name}; a JSONL file can be named itself")
    record = read_json(folder / _MANIFEST)
    lacking = [key for key in (*REQUIRED, "k_perms") if not isinstance(record, dict) or key not in record]
    if lacking:
        raise InvalidData(f"{folder / _MANIFEST} lacks {', '.join(lacking)}; it is no label folder's")
    hashes = record.get("sha256")
    want = hashes.get(_LABELS) if isinstance(hashes, dict) else None
    found = sha256_file(folder / _LABELS)
    if want != found:
        raise InvalidData(
            f"{folder / _LABELS} is not what {_MANIFEST} records (sha256 {found[:12]}…, recorded {str(want)[:12]}…); "
            "make the labels again, or name the JSONL file itself if the change is meant"
        )
    return dict(record)


def _lines(path: Path, record: dict[str, Any]) -> Iterator[tuple[str, Label]]:
    """Each line's label with its place; what all lines must agree on is checked against `record`, or put there."""
    for where, line in read_jsonl(path):
        for key in ("teacher_model_id", "teacher_protocol", "prompt_template_id", "k_perms"):
            value = line.get(key)
            if record.setdefault(key, value) != value:
                raise InvalidData(
                    f"{where}: '{key}' is {value!r}, before it was {record[key]!r}; one file, one teacher"
                )
        label = _label(line, where=where)
        p = label.grade_probabilities
        record.setdefault("grades", 4 if p is None else len(p))
        record.setdefault("prompt", {"template_hash": record["prompt_template_id"]})
        yield where, label


def _label(line: Mapping[str, Any], *, where: str) -> Label:
    names = {name: identifier(line, (name,), where=where) for name in ("query_id", "doc_id")}
    mean = finite(line.get("score_continuous"), what="score_continuous", where=where)
    vector, p, count = line.get("score_raw_vector"), line.get("score_grade_vector"), line.get("k_perms")
    scores = (mean,) if vector is None else _numbers(vector, what="score_raw_vector", where=where)
    if count is not None and count != len(scores):
        if vector is None:
            raise InvalidData(
                f"{where}: k_perms is {count} and score_raw_vector is missing: a mean would stand for a single order; "
                "give the vector, or k_perms 1 where it may"
            )
        raise InvalidData(f"{where}: {len(scores)} scores in score_raw_vector, k_perms says {count}")
    label = Label(
        **names,
        scores=scores,
        grade_probabilities=None if p is None else _numbers(p, what="score_grade_vector", where=where),
    )
    if scores and abs(label.averaged - mean) > _ROUNDING:
        raise InvalidData(f"{where}: score_continuous is {mean}, the mean of score_raw_vector {label.averaged:.6g}")
    return label


def _numbers(values: Any, *, what: str, where: str) -> tuple[float, ...]:
    if not isinstance(values, list) or not values:
        raise InvalidData(f"{where}: {what} is {values!r}; a list of numbers is wanted")
    return tuple(finite(value, what=f"{what}, number {i}:", where=where) for i, value in enumerate(values, 1))


# -- labels from what is there already -----------------------------------------------------------------------------


def labels_of_tables(
    tables: Sequence[ScoreTable], pools: Sequence[Pool], *, run: Mapping[str, Any], experiment_id: str = "labels"
) -> Labels:
    """Labels from a teacher's score tables of `pools`; `run` is what run.json records of their making.

    Scores are expected grades, probabilities the mean over presentations. Queries that `run` names as failed have no
    labels, nor have documents that lack a grade in some presentation: the manifest's `failed` and `without_label`
    name them. Scores of other pools, and queries presented more often than others, are `InvalidData`.
    """
    failed = dict(run.get("failed") or {})
    pairs = join_scores(tables, pools, run=run)
    full = [(pool, table) for pool, table in pairs if len(pool)]
    shapes = {(table.presentations, table.grades.shape[2]): pool.query_id for pool, table in full}
    if len(shapes) > 1:
        (k, g), (other_k, other_g) = list(shapes)[:2]
        raise InvalidData(
            f"query '{shapes[k, g]}' has {k} presentations of {g} grades, '{shapes[other_k, other_g]}' {other_k} of "
            f"{other_g}; labels need the same of every query, so score the pools without --settle"
        )
    count, grades = next(iter(shapes), (int((run.get("scoring") or {}).get("presentations") or 1), 4))
    without: dict[str, list[str]] = {}
    labels = [label for _, table in full for label in _labels_of(table, without)]
    if full and not labels:
        raise InvalidData(f"in none of {len(full)} queries has a document all {count} grades; nothing is labelled")
    scoring = dict(run.get("scoring") or {})
    seed = int(scoring.get("seed") or 0)
    shuffled = "k_shot_window" if scoring.get("shuffle") == "window" else "k_shot_bsc"
    engine, prompt = dict(run.get("engine") or {}), dict(run.get("prompt") or {})
    adapter = engine.get("adapter")
    adapter = adapter.get("source") if isinstance(adapter, Mapping) else adapter
    record = {
        "experiment_id": experiment_id,
        "teacher_model_id": f"{engine.get('model')}" + (f"+lora:{adapter}" if adapter else ""),
        "teacher_revision": engine.get("commit") or engine.get("wheel"),
        "teacher_protocol": shuffled if count > 1 else "single_order",
        "prompt_template_id": prompt.get("template_hash"),
        "grades": grades,
        "seeds": list(range(seed, seed + count)) if count > 1 else [],
        "scoring": scoring,
        "teacher": engine,
        "prompt": prompt,
        **_of_pools(pools),
        "failed": failed,
        "without_label": without,
    }
    return Labels(labels, manifest=record)


def _labels_of(table: ScoreTable, without: dict[str, list[str]]) -> Iterator[Label]:
    top = table.grades.shape[2] - 1
    scores = np.clip(table.scores() * top, 0, top).T
    p = table.mean_probabilities()
    for i, doc_id in enumerate(table.doc_ids):
        if np.isnan(scores[i]).any():
            without.setdefault(table.query_id, []).append(doc_id)
            continue
        yield Label(
            query_id=table.query_id,
            doc_id=doc_id,
            scores=tuple(scores[i].tolist()),
            grade_probabilities=tuple(p[i].tolist()),
        )


def labels_of_qrels(
    qrels: Mapping[str, Mapping[str, int]],
    pools: Sequence[Pool],
    *,
    grades: int = 4,
    mapping: Mapping[int, int] | None = None,
    unjudged: int | None = None,
    judge: str = "judgements",
    experiment_id: str = "labels",
) -> Labels:
    """Labels from judgements, human or a language model's: T = 1, all probability on the grade given.

    `mapping` says which of the `grades` label grades a judged grade stands for; one it leaves out stands for itself,
    and is an error where that turns the judged order round (1=3 beside a judged 2). Documents of a judged
    query that nobody judged are an error that lists them, unless `unjudged` gives their grade. Queries nobody judged
    have no labels; the manifest's `failed` names them. `judge` names who judged.
    """
    wanted = mapping or {}
    for grade in (*wanted.values(), *(() if unjudged is None else (unjudged,))):
        if not 0 <= grade < grades:
            raise BadArgument(f"label grade {grade} is not on the scale from 0 to {grades - 1}")
    labels: list[Label] = []
    failed: dict[str, str] = {}
    open_ends: list[str] = []
    seen: set[int] = set()
    for pool in pools:
        judged = qrels.get(pool.query_id)
        if not judged:
            failed[pool.query_id] = "nobody judged it"
            continue
        missing = [doc_id for doc_id in pool.doc_ids if doc_id not in judged]
        if missing and unjudged is None:
            open_ends.append(_share(pool, missing, "judgement"))
            continue
        for doc_id in pool.doc_ids:
            grade = judged.get(doc_id)
            if grade is not None:
                seen.add(grade)
            value = unjudged if grade is None else wanted.get(grade, grade)
            assert value is not None
            if not 0 <= value < grades:
                raise InvalidData(
                    f"query '{pool.query_id}', document '{doc_id}': judged grade {grade} is not on the labels' scale "
                    f"from 0 to {grades - 1}; say what it stands for (map_grades)"
                )
            one = tuple(float(g == value) for g in range(grades))
            labels.append(Label(query_id=pool.query_id, doc_id=doc_id, scores=(float(value),), grade_probabilities=one))
    for grade in sorted(seen - wanted.keys()):
        for mapped in sorted(seen & wanted.keys()):
            if (grade - mapped) * (grade - wanted[mapped]) < 0:
                raise InvalidData(
                    f"judged grade {grade} is not mapped and would stay {grade}, though {mapped} becomes "
                    f"{wanted[mapped]}; say what it stands for (map_grades {mapped}={wanted[mapped]},{grade}=…)"
                )
    if open_ends:
        raise InvalidData(
            f"{len(open_ends)} of {len(pools)} queries: {_listed(open_ends)}; give their grade (unjudged), or leave "
            "these queries out"
        )
    if not labels:
        raise InvalidData(f"none of the {len(pools)} pools' queries is judged; these judgements are of other queries")
    record = {
        "experiment_id": experiment_id,
        "teacher_model_id": judge,
        "teacher_revision": None,
        "teacher_protocol": "judgements",
        "prompt_template_id": None,
        "grades": grades,
        "seeds": [],
        "map_grades": {str(judged): label for judged, label in wanted.items()},
        "unjudged": unjudged,
        **_of_pools(pools),
        "failed": failed,
        "without_label": {},
    }
    return Labels(labels, manifest=record)


def _of_pools(pools: Sequence[Pool]) -> dict[str, Any]:
    return {
        "pools_sha256": pools_sha256(pools),
        "pool_sha256": {pool.query_id: pool_sha256(pool) for pool in pools},
    }


# -- labels and what they are for ------------------------------------------------------------------------------------


def check_labels(
    labels: Labels, pools: Sequence[Pool], prompt: GradePrompt | None = None, *, check_template: bool = True
) -> None:
    """Refuse labels that are not of these pools, or not for this prompt; nothing is changed.

    Every document of every pool needs a label and every label of these queries a document; where the labels record
    the pools they are of, queries and texts must be those. All faults are in one `InvalidData`, as a list. Labels of
    more queries than these are fine. `prompt` is the student's: labels for another number of grades are a
    `ModelMismatch`, and with `check_template` so are those a teacher gave under another template. Judgements have none.
    """
    recorded: Mapping[str, str] = labels.manifest.get("pool_sha256") or {}
    faults: list[str] = []
    for pool in pools:
        if not len(pool):
            continue
        known = set(pool.doc_ids)
        if fault := _uncovered(labels, pool):
            faults.append(fault)
        elif foreign := [doc_id for doc_id in labels[pool.query_id] if doc_id not in known]:
            faults.append(f"query '{pool.query_id}': '{foreign[0]}' has a label, but is not in the pool")
        elif recorded.get(pool.query_id, want := pool_sha256(pool)) != want:
            faults.append(f"query '{pool.query_id}': the query, a text or a first-stage score is not what was labelled")
    if faults:
        other = len(faults) == sum(map(bool, map(len, pools)))
        cure = "these labels are of other pools" if other else "label these pools, or leave these queries out"
        raise InvalidData(f"the labels do not fit {len(faults)} of {len(pools)} pools: {_listed(faults)}; {cure}")
    if prompt is None:
        return
    if len(prompt.grade_ids) != labels.grades:
        raise ModelMismatch(
            f"the labels have {labels.grades} grades, the prompt's rubric has {len(prompt.grade_ids)}; "
            "use the rubric the labels were made with"
        )
    asked = labels.manifest.get("prompt") or {}
    if check_template:
        by_teacher = labels.manifest.get("teacher_protocol") not in (None, "judgements")
        if by_teacher and not asked.get("template_hash"):
            raise ModelMismatch(
                "the label file does not record which template its teacher was asked with (prompt_template_id); "
                "record it, or take the labels as they are (--no-check-template)"
            )
        prompt.check_card(asked, where="the label file")


def _uncovered(labels: Labels, pool: Pool) -> str:
    """What a pool lacks, in words; empty where every document has a label."""
    there = labels.get(pool.query_id, {})
    missing = [doc_id for doc_id in pool.doc_ids if doc_id not in there]
    return _share(pool, missing, "label") if missing else ""


def _share(pool: Pool, missing: Sequence[str], what: str) -> str:
    some = ", ".join(f"'{doc_id}'" for doc_id in missing[:5]) + (", …" if len(missing) > 5 else "")
    return f"query '{pool.query_id}': {len(missing)} of {len(pool)} documents have no {what} ({some})"


def _listed(faults: Sequence[str], most: int = 10) -> str:
    return "; ".join(faults[:most]) + (f"; and {len(faults) - most} more" if len(faults) > most else "")
