"""The order study in stages: tasks, grades of every presentation, what is derived from them, what readers make of them.

Every stage is kept: grades in shards of a few queries, answers in a file per query. What the stages give is a `Study`,
from which `order_report` makes every table. Source: the order-consistency paper (2026) and the method's sections 4, 5.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pd_rerank import windows
from pd_rerank.decisions import Settle, Threshold, dev_split
from pd_rerank.embedded import adapter_folder
from pd_rerank.engines import load_engine
from pd_rerank.engines.base import Engine
from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.evaluation.pool_change import changed_pools
from pd_rerank.evaluation.presentations import Presentations
from pd_rerank.evaluation.report_stability import Measured, Rule, measure, measure_at
from pd_rerank.evaluation.stability import fit_threshold_f1, matched_retention
from pd_rerank.evaluation.systems import read_system
from pd_rerank.files import CARD, clear_left_overs, read_json, sha256_file, whole_folder, write_json
from pd_rerank.pool import Pool, pools_sha256
from pd_rerank.prompt import ChatPrompt, GradePrompt, Prompt
from pd_rerank.rubrics import load_rubric
from pd_rerank.scores import ScoreTable, join_scores, read_scores, write_scores
from pd_rerank.scoring import Scoring, score_pools
from pd_rerank.studies.command import NotRun, about, attempt
from pd_rerank.studies.folder import RunFolder, slug
from pd_rerank.studies.order_data import Task, read_task
from pd_rerank.studies.order_reader import Asked, Kept
from pd_rerank.studies.order_settings import (
    CONTROLS,
    STORED,
    ControlSettings,
    OrderSettings,
    ReaderSettings,
    ScorerSettings,
    TaskSettings,
)
from pd_rerank.studies.scorers import SHOWN, WORDED, WRITTEN, check_reranker

logger = logging.getLogger("pd_rerank")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Graded:
    """What a scorer gave pools: tables of the first-stage order (K = 1) and of its shuffles, and what that took."""

    first: tuple[ScoreTable, ...]
    shuffled: tuple[ScoreTable, ...]
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """One scorer on one task.

    `shown` are its presentations (or ensembles); `first` the one of the first-stage order, empty where there is none;
    `stored` every presentation there is; `tables` their grades, empty for peers and what is derived. `spent` are the
    presentations behind one ranking, by query. `outputs` are the reader's, by query, one per presentation.
    """

    name: str
    task: str
    shown: tuple[Presentations, ...]
    first: tuple[Presentations, ...] = ()
    stored: tuple[Presentations, ...] = ()
    tables: tuple[ScoreTable, ...] = ()
    spent: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    outputs: Mapping[str, Sequence[str | None]] = field(default_factory=dict)
    measured: Measured | None = None
    matched: Measured | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Variant:
    """A scorer under one value of a control, on some of a task's queries."""

    control: str
    scorer: str
    task: str
    value: str
    pools: tuple[Pool, ...]
    first: tuple[ScoreTable, ...]
    shown: tuple[Presentations, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Study:
    """All that the report is made of; `entries[task]` holds the scorers that ran, by name, as the config lists them."""

    settings: OrderSettings
    tasks: Mapping[str, Task]
    entries: Mapping[str, Mapping[str, Entry]]
    dev: Mapping[str, Sequence[str]]
    variants: Sequence[Variant]
    not_run: Sequence[NotRun]

    @property
    def main(self) -> str:
        """The scorer that others are set against: the one named, else the first that ran."""
        ran = [name for name in self.settings.scorers if any(name in mine for mine in self.entries.values())]
        return self.settings.main if self.settings.main in ran else (ran or [""])[0]


def run(settings: OrderSettings, folder: RunFolder) -> Study:
    """Do what is not done yet, stage by stage, and return the whole."""
    check(settings)
    tasks = {
        name: read_task(name, task, folder.folder / f"{slug(name)}-templates", seed=settings.seed)
        for name, task in settings.tasks.items()
    }
    for name, task in tasks.items():
        logger.info("%s: %d queries, %d candidates", name, len(task.pools), sum(map(len, task.pools)))
    not_run: list[NotRun] = []
    scored: dict[str, dict[str, Entry]] = {name: {} for name in tasks}
    rankers = Rankers()
    for name, scorer in settings.scorers.items():
        for task in tasks.values():
            attempt(
                f"{name} on {task.name}",
                partial(_score, name, scorer, task, settings, folder, rankers, scored, not_run),
                not_run,
            )
    dev = {
        name: dev_split([pool.query_id for pool in task.pools])[0]
        for name, task in tasks.items()
        if "threshold" in task.settings.uses
    }
    for name, task in tasks.items():  # what is derived may settle on a threshold, so that this comes second
        for derived, scorer in settings.scorers.items():
            source = scored[name].get(scorer.of or "")
            if source is not None and scorer.skip is None and name in (scorer.tasks or tasks):
                make = partial(_derive, derived, scorer, source, settings, task, dev.get(name), scored[name])
                attempt(f"{derived} on {name}", make, not_run)
            elif scorer.type == "derived" and scorer.skip is None and name in (scorer.tasks or tasks):
                why = f"'{scorer.of}', which it is derived of, did not run there"
                not_run.append(NotRun(what=f"{derived} on {name}", why=why, failed=False))
    rankers.close()  # a reader may want its room
    entries: dict[str, dict[str, Entry]] = {}
    for name, task in tasks.items():
        listed = {scorer: scored[name][scorer] for scorer in settings.scorers if scorer in scored[name]}
        read = _read(listed, task, settings, folder, not_run)
        entries[name] = _measured(read, task, settings, dev.get(name), not_run)
    variants = [
        variant
        for control in CONTROLS
        if control not in STORED
        for variant in _control(control, settings, tasks, folder, rankers, entries, not_run)
    ]
    for control in CONTROLS:
        if control not in settings.controls:
            not_run.append(NotRun(what=f"control: {control}", why="the config does not ask for it", failed=False))
    return Study(
        settings=settings, tasks=tasks, entries=entries, dev=dev, variants=tuple(variants), not_run=tuple(not_run)
    )


def check(settings: OrderSettings) -> None:
    """Refuse, before anything is scored, rubrics that are not there and adapters asked in other words than trained in.

    Adapters on this machine are looked into; one that is not here fails when it is to be loaded.
    """
    for task_name, task in settings.tasks.items():
        load_rubric(task.asked)
        for name, scorer in settings.scorers.items():
            if scorer.type not in _OURS or scorer.skip is not None or task_name not in (scorer.tasks or settings.tasks):
                continue
            here = scorer.on(task_name)
            options = _asked_of(here, task, {})
            with about(f"scorer '{name}' on task '{task_name}'"):
                check_reranker(options)
            rubric = load_rubric(options["rubric"])
            card = _card(here)
            if card is None or not options.get("check_template", True):
                continue
            trained = card.get("rubric", {})
            words = {key: value for key, value in asdict(rubric).items() if key not in ("name", "max_doc_chars")}
            other = [key for key, value in words.items() if _plain(trained.get(key)) != _plain(value)]
            if other:
                raise BadArgument(
                    f"scorer '{name}' on task '{task_name}': its adapter was trained with rubric "
                    f"'{trained.get('name')}', asked is '{rubric.name}' (another {other[0]}); give the task or the "
                    f"scorer's options 'rubric: {options['adapter']}', or limit the scorer to other 'tasks'"
                )
    for control, asked in settings.controls.items():
        for name, task_name, changed in _changes(control, asked, settings):
            with about(f"control '{control}', {name} on {task_name}"):
                check_reranker(_asked_of(settings.scorers[name].on(task_name), settings.tasks[task_name], changed))


# -- scoring ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Opened:
    """What grades: an engine, the prompt of a task, and how pools are shown."""

    engine: Engine
    prompt: Prompt
    scoring: Scoring


class Rankers:
    """Engines as they are needed; the one opened last is kept for all that share it."""

    def __init__(self) -> None:
        self._key: Any = None
        self._engine: Any = None

    def close(self) -> None:
        """Let the engine go."""
        self._key, self._engine = None, None

    def open(self, name: str, scorer: ScorerSettings, task: TaskSettings, changed: Mapping[str, Any]) -> Opened:
        """What grades for a scorer on a task, with `changed` options; they are those of `OCSFTBatchedReranker`."""
        options = _asked_of(scorer, task, changed)
        shown = {key: options.pop(key) for key in SHOWN if key in options}
        check_template = options.pop("check_template", True)
        written = options.get("engine") == "generated"
        worded = {key: options.pop(key) for key in (WRITTEN if written else WORDED) if key in options}
        key = [scorer.model or name, options]
        if key != self._key:
            self.close()  # the old one goes before the new one comes
            self._engine = load_engine(key[0], also=(*SHOWN, *WORDED, "check_template"), **options)
            self._key = key
        prompt: Prompt = ChatPrompt(**worded) if written else GradePrompt(self._engine.tokenizer, **worded)
        card = getattr(self._engine, "adapter_card", None)
        if card and check_template:
            prompt.check_card(card, where=f"adapter '{options.get('adapter', key[0])}'")
        return Opened(engine=self._engine, prompt=prompt, scoring=Scoring(**shown))


def graded(
    name: str,
    scorer: ScorerSettings,
    task: TaskSettings,
    pools: Sequence[Pool],
    *,
    folder: RunFolder,
    rankers: Rankers,
    seed: int,
    count: int,
    size: int,
    label: str,
    changed: Mapping[str, Any] | None = None,
    at_once: int | None = None,
) -> Graded:
    """Grade pools in first-stage order and in `count` shuffles, shard by shard, each kept as it is done.

    `at_once` queries go into one call of the engine, by default a shard's. Scorers of canonical order are shown so many
    shuffled lists of candidates, which they put in order themselves.
    """
    options = _asked_of(scorer, task, changed or {})
    key = {
        "model": scorer.model or name,
        "options": options,
        "adapter": _weights(scorer),
        "rubric": asdict(load_rubric(options["rubric"])),
        "seed": seed,
        "count": count,
        "shard": size,
        "at_once": at_once,
        "pools": pools_sha256(pools),
    }
    place = folder.place(label, key)
    opened: list[Opened] = []
    first: list[ScoreTable] = []
    shuffled: list[ScoreTable] = []
    spent: list[Mapping[str, float]] = []
    for number, start in enumerate(range(0, len(pools), size)):
        block, shard = pools[start : start + size], place / f"shard-{number:05}"
        if not shard.exists():
            if not opened:
                opened.append(rankers.open(name, scorer, task, changed or {}))
                write_json(place / "key.json", key)
            clear_left_overs(shard)
            with whole_folder(shard, holds=()) as fresh:
                _grade(opened[0], block, fresh, seed=seed, count=count, at_once=at_once or len(block))
            logger.info("%s: %d of %d queries", label, min(start + size, len(pools)), len(pools))
        for part, into in (("first", first), *([("shuffled", shuffled)] if count else [])):
            tables, record = read_scores(shard / part)
            into.extend(table for _, table in join_scores(tables, block, run=record))
        spent.append(read_json(shard / "seconds.json"))
    seconds = {unit: math.fsum(s[unit] for s in spent) for unit in ("first", "shuffled", "cpu")}
    return Graded(first=tuple(first), shuffled=tuple(shuffled), seconds=seconds)


def _grade(ranker: Opened, pools: Sequence[Pool], fresh: Path, *, seed: int, count: int, at_once: int) -> None:
    """Fill a shard's folder."""

    def ask(asked: Sequence[Pool], presentations: int) -> list[ScoreTable]:
        scoring = replace(ranker.scoring, presentations=presentations, seed=seed)
        tables: list[ScoreTable] = []
        for start in range(0, len(asked), at_once):
            block = asked[start : start + at_once]
            tables += score_pools(block, engine=ranker.engine, prompt=ranker.prompt, scoring=scoring)
        return tables

    run = {
        "engine": ranker.engine.describe(),
        "prompt": ranker.prompt.describe(),
        "scoring": ranker.scoring.describe(),
        "pools_sha256": pools_sha256(pools),
    }
    begun, cpu = time.perf_counter(), time.process_time()
    first = ask(pools, 1)
    seconds = {"first": time.perf_counter() - begun, "shuffled": 0.0}
    write_scores(fresh / "first", first, run=run)
    if count:
        begun = time.perf_counter()
        canonical = ranker.scoring.order == "canonical"
        shuffled = _arrivals(pools, count, seed, ask) if canonical else ask(pools, count)
        seconds["shuffled"] = time.perf_counter() - begun
        write_scores(fresh / "shuffled", shuffled, run=run)
    write_json(fresh / "seconds.json", seconds | {"cpu": time.process_time() - cpu})


def _arrivals(
    pools: Sequence[Pool], count: int, seed: int, ask: Callable[[Sequence[Pool], int], list[ScoreTable]]
) -> list[ScoreTable]:
    """Tables of `count` arrivals of the same candidates, each served once: shuffling what the reranker puts in order
    itself would undo its order."""
    rows: list[list[ScoreTable]] = []
    for k in range(count):
        orders = [windows.permutation(len(pool), seed=seed + k) for pool in pools]
        arrived = [replace(p, candidates=tuple(p.candidates[i] for i in o)) for p, o in zip(pools, orders, strict=True)]
        back = [np.argsort(order) for order in orders]
        rows.append([_reordered(table, o) for table, o in zip(ask(arrived, 1), back, strict=True)])
    return [_stacked(tables) for tables in zip(*rows, strict=True)]


def _reordered(table: ScoreTable, order: Any) -> ScoreTable:
    names = ("grades", "fallback", "window", "slot")
    columns = {name: getattr(table, name)[:, order] for name in names}
    ids = tuple(table.doc_ids[i] for i in order)
    return ScoreTable(query_id=table.query_id, doc_ids=ids, cut=table.cut[order], **columns)


def _stacked(tables: Sequence[ScoreTable]) -> ScoreTable:
    names = ("grades", "fallback", "window", "slot")
    rows = {name: np.concatenate([getattr(table, name) for table in tables]) for name in names}
    one = tables[0]
    return ScoreTable(query_id=one.query_id, doc_ids=one.doc_ids, cut=one.cut, **rows)


def _score(
    name: str,
    scorer: ScorerSettings,
    task: Task,
    settings: OrderSettings,
    folder: RunFolder,
    rankers: Rankers,
    scored: Mapping[str, dict[str, Entry]],
    not_run: list[NotRun],
) -> None:
    """Let a scorer grade a task, or read what a peer has ranked."""
    if scorer.skip is not None:
        if task.name == next(iter(settings.tasks)):
            not_run.append(NotRun(what=name, why=scorer.skip, failed=False))
        return
    if scorer.tasks is not None and task.name not in scorer.tasks:
        not_run.append(NotRun(what=f"{name} on {task.name}", why="the config limits it to other tasks", failed=False))
        return
    if scorer.type == "derived":
        return
    count = settings.needed(name)
    if scorer.type == "scores":
        if task.name not in scorer.runs:
            not_run.append(NotRun(what=f"{name} on {task.name}", why="the config names no runs of it", failed=False))
            return
        stored = _peer(scorer.runs[task.name], task, count)
        first = _peer([scorer.first[task.name]], task, 1) if task.name in scorer.first else ()
        found = Entry(name=name, task=task.name, shown=(), first=first, stored=stored)
    else:
        made = graded(
            name, scorer.on(task.name), task.settings, task.pools, folder=folder, rankers=rankers, seed=settings.seed,
            count=count, size=settings.shard_size, label=f"{name} {task.name}",
        )  # fmt: skip
        found = Entry(
            name=name,
            task=task.name,
            shown=(),
            first=tuple(Presentations.of_table(table) for table in made.first),
            stored=tuple(Presentations.of_table(table) for table in made.shuffled),
            tables=made.shuffled,
            seconds=made.seconds,
        )
    shown = tuple(_head(query, settings.count(name)) for query in found.stored)
    scored[task.name][name] = replace(found, shown=shown, spent={query.query_id: 1.0 for query in shown})


def _peer(paths: Sequence[Path], task: Task, count: int) -> tuple[Presentations, ...]:
    """A peer's output on a task's pools; what it does not rank has no score, what is not in the pools is refused."""
    system = read_system(list(paths))
    if system.presentations < count:
        raise InvalidData(
            f"{paths[0]} and what is beside it are {system.presentations} presentations, the study takes {count}; give "
            "a run for each, or the scorer its own 'presentations'"
        )
    tables = {table.query_id: table for table in system.tables}
    found = []
    for pool in task.pools:
        rows = []
        if (table := tables.get(pool.query_id)) is not None:
            scores = table.scores(system.readout, residual=system.residual)
            rows = [dict(zip(table.doc_ids, row, strict=True)) for row in scores.tolist()]
        elif system.runs:
            rows = [{hit.doc_id: hit.score for hit in run.get(pool.query_id, ())} for run in system.runs]
        foreign = next((doc_id for row in rows for doc_id in row if doc_id not in pool.doc_ids), None)
        if foreign is not None:
            raise InvalidData(
                f"{paths[0]}, query '{pool.query_id}': '{foreign}' is not among the {len(pool)} candidates of task "
                f"'{task.name}'; let the peer rank these"
            )
        values = [[row.get(doc_id, math.nan) for doc_id in pool.doc_ids] for row in rows[:count]]
        blank = np.full((count, len(pool)), np.nan)
        found.append(Presentations.of_scores(pool.query_id, pool.doc_ids, values if rows else blank))
    return tuple(found)


# -- derived scorers ----------------------------------------------------------------------------------------------


def _derive(
    name: str,
    scorer: ScorerSettings,
    source: Entry,
    settings: OrderSettings,
    task: Task,
    dev: Sequence[str] | None,
    into: dict[str, Entry],
) -> None:
    """Add the ensembles of another scorer's presentations: no new scoring."""
    count, size = settings.count(name), scorer.size
    if scorer.bsc is not None:
        shown = tuple(_head(query, count * size).averaged(size) for query in source.stored)
        into[name] = Entry(name=name, task=task.name, shown=shown, spent={q.query_id: float(size) for q in shown})
        return
    settle = settle_of(source, task, dev, size=size, tolerance=scorer.tolerance)
    into[name] = adaptive(name, source, settle, size=size, count=count)


def settle_of(entry: Entry, task: Task, dev: Sequence[str] | None, *, size: int, tolerance: float) -> Settle:
    """When a query's decision is settled: of its retained set at the F1 threshold of whole ensembles, else of its head.

    The threshold is fitted on the dev part, whose queries then have no set figures.
    """
    if dev is None:
        top = min(task.settings.reader.top if task.settings.reader is not None else 5, task.settings.k)
        return Settle(top_k=top if "reader" in task.settings.uses else 1, tolerance=tolerance)
    whole = [query.averaged(size) for query in entry.stored if query.query_id in set(dev)]
    fitted = fit_threshold_f1(whole, task.qrels, min_grade=task.settings.min_grade)
    return Settle(threshold=fitted.value, tolerance=tolerance)


def adaptive(name: str, source: Entry, settle: Settle, *, size: int, count: int) -> Entry:
    """`count` disjoint ensembles of at most `size` presentations, each ended once its decision is settled."""
    shown, spent = [], {}
    for query in source.stored:
        means, used = [], []
        for start in range(0, count * size, size):
            rows = query.scores[start : start + size]
            k = next((k for k in range(settle.first, size) if settle.settled(rows[:k])), size)
            used.append(k)
            means.append(rows[:k].mean(axis=0))
        shown.append(Presentations.of_scores(query.query_id, query.doc_ids, np.array(means)))
        spent[query.query_id] = sum(used) / len(used)
    return Entry(name=name, task=source.task, shown=tuple(shown), spent=spent)


# -- consumers ----------------------------------------------------------------------------------------------------


def _read(
    entries: Mapping[str, Entry], task: Task, settings: OrderSettings, folder: RunFolder, not_run: list[NotRun]
) -> dict[str, Entry]:
    """The entries with what the reader says of every presentation's best passages."""
    if "reader" not in task.settings.uses:
        return dict(entries)
    reader = reader_of(task, settings)
    if reader is None:
        not_run.append(NotRun(what=f"reader on {task.name}", why="the config names no reader", failed=False))
        return dict(entries)
    kept = Kept(folder.folder, reader, task.name)
    texts = {pool.query_id: dict(zip(pool.doc_ids, pool.texts, strict=True)) for pool in task.pools}
    asked_of = {pool.query_id: pool.query for pool in task.pools}
    found = dict(entries)

    def answers(entry: Entry) -> None:
        logger.info("%s: reads for %s", task.name, entry.name)
        outputs: dict[str, Sequence[str | None]] = {}
        for query in entry.shown:
            heads = [_best(query, k, reader.top) for k in range(query.count)]
            there = [head for head in heads if head]
            said = iter(
                kept.read(
                    query.query_id,
                    [
                        Asked(
                            kind="qa" if task.settings.type == "qa" else "claims",
                            text=asked_of[query.query_id],
                            passages=tuple(texts[query.query_id][d][: reader.max_doc_chars] for d in head),
                        )
                        for head in there
                    ],
                )
            )
            outputs[query.query_id] = [next(said) if head else None for head in heads]
        found[entry.name] = replace(entry, outputs=outputs)

    for name, entry in entries.items():
        if not attempt(f"reader on {task.name}, {name}", partial(answers, entry), not_run):
            break
    return found


def reader_of(task: Task, settings: OrderSettings) -> ReaderSettings | None:
    """Who reads a task's passages: its own reader, else the study's."""
    return task.settings.reader or settings.reader


def _best(query: Presentations, k: int, top: int) -> list[str]:
    """The ids a presentation ranks first, best first."""
    ranks = query.ranks[k]
    order = sorted((int(rank), d) for d, rank in enumerate(ranks) if 0 <= rank < top)
    return [query.doc_ids[d] for _, d in order]


def _measured(
    entries: Mapping[str, Entry],
    task: Task,
    settings: OrderSettings,
    dev: Sequence[str] | None,
    not_run: list[NotRun],
) -> dict[str, Entry]:
    """The entries with every stability figure, at their own F1 thresholds and at equal retention."""
    found: dict[str, Entry] = {}
    shared: dict[str, Any] = {"qrels": task.qrels, "k": task.settings.k, "min_grade": task.settings.min_grade}

    def own(entry: Entry, fitted: bool) -> None:
        rule = Rule.parse("f1") if fitted else None
        found[entry.name] = replace(entry, measured=measure(entry.shown, rule=rule, dev=dev, **shared))

    for entry in entries.values():
        fits = dev is not None
        if not attempt(f"threshold of {entry.name} on {task.name}", partial(own, entry, fits), not_run):
            own(entry, False)
    reference = settings.matched or settings.main
    if dev is not None and reference is not None and reference not in found:
        why = f"'{reference}', whose retention is matched, did not run there"
        not_run.append(NotRun(what=f"matched retention on {task.name}", why=why, failed=False))
    elif dev is not None and reference is not None:

        def match() -> None:
            arms = {name: entry.shown for name, entry in found.items()}
            fitted = matched_retention(
                arms, task.qrels, reference=reference, dev=dev, min_grade=task.settings.min_grade
            )
            for name, threshold in fitted.items():
                at = measure_at(found[name].shown, threshold, dev=dev, **shared)
                found[name] = replace(found[name], matched=at)

        attempt(f"matched retention on {task.name}", match, not_run)
    return found


# -- controls -----------------------------------------------------------------------------------------------------

_OURS = ("ocsft", "fake")
"""Types of scorers that are scored here."""

_OPTION = {"partition": "partition", "placeholder": "placeholder", "markers": "markers", "width": "window"}


def _control(
    control: str,
    settings: OrderSettings,
    tasks: Mapping[str, Task],
    folder: RunFolder,
    rankers: Rankers,
    entries: Mapping[str, Mapping[str, Entry]],
    not_run: list[NotRun],
) -> list[Variant]:
    """Every variant of a control that needs scoring; none where the config does not ask for it."""
    asked = settings.controls.get(control)
    if asked is None:
        return []
    found: list[Variant] = []
    for name in controlled(control, asked, settings):
        scorer = settings.scorers[name]
        for task in (tasks[task] for task in asked.tasks or tasks):
            what = f"control: {control}, {name} on {task.name}"
            if scorer.type not in _OURS:
                not_run.append(NotRun(what=what, why="it takes new scoring, and this scorer is not ours", failed=False))
            elif name in entries[task.name]:
                make = partial(_variants, control, asked, name, scorer, task, settings, folder, rankers, found, not_run)
                attempt(what, make, not_run)
    return found


def _changes(
    control: str, asked: ControlSettings, settings: OrderSettings
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """The options that a control will change, by scorer and task."""
    for value in asked.values or CONTROLS[control]:
        changed = {_OPTION[control]: value} if control in _OPTION else value
        if isinstance(changed, dict):
            for name in controlled(control, asked, settings):
                if settings.scorers[name].type in _OURS and settings.scorers[name].skip is None:
                    yield from ((name, task, changed) for task in asked.tasks or settings.tasks)


def controlled(control: str, asked: ControlSettings, settings: OrderSettings) -> list[str]:
    """The scorers a control is of: those it names, else the first that is scored here."""
    if asked.scorers is not None:
        return asked.scorers
    ours = [name for name, s in settings.scorers.items() if s.type in _OURS and s.skip is None]
    return ours[:1]


def _variants(
    control: str,
    asked: ControlSettings,
    name: str,
    scorer: ScorerSettings,
    task: Task,
    settings: OrderSettings,
    folder: RunFolder,
    rankers: Rankers,
    found: list[Variant],
    not_run: list[NotRun],
) -> None:
    values = list(asked.values or CONTROLS[control])
    count = asked.presentations or settings.count(name)
    pools = task.some(asked.queries, seed=settings.seed)
    score = partial(
        graded, name, scorer.on(task.name), task.settings, folder=folder, rankers=rankers, seed=settings.seed,
        size=settings.shard_size,
    )  # fmt: skip

    def variant(value: str, of: Sequence[Pool], **more: Any) -> None:
        made = score(pools=of, label=f"{name} {task.name} {control} {value}", **more)
        shown = tuple(Presentations.of_table(table) for table in made.shuffled)
        found.append(
            Variant(
                control=control, scorer=name, task=task.name, value=value, pools=tuple(of), first=made.first,
                shown=shown,
            )
        )  # fmt: skip

    def absent(what: str, why: str) -> None:
        not_run.append(NotRun(what=f"control: {control}, {what}", why=why, failed=False))

    here = f"{name} on {task.name}"
    if control == "width":
        most = max(map(len, pools))
        if wide := [value for value in values if value > most]:
            absent(f"{here}, widths {', '.join(map(str, wide))}", f"its pools hold {most} candidates at most")
        values = [value for value in values if value <= most]
    if control in _OPTION:
        for v in values:
            variant(str(v), pools, count=count, changed={_OPTION[control]: v})
    elif control == "reverse":
        for order in ("given", "reverse"):
            variant(order, pools, count=0, changed={"order": order})
    elif control == "batching":
        for v in values:
            own, at_once = (v, None) if isinstance(v, dict) else ({}, v)
            variant(_said(v), pools, count=0, changed=own, at_once=at_once)
    elif control == "first_stage" and not task.others:
        absent(here, "the task names no other first stage")
    elif control == "first_stage":
        ids = {pool.query_id for pool in pools}
        for stage, of in {"run": pools, **task.others}.items():
            variant(stage, [pool for pool in of if pool.query_id in ids], count=count)
    else:
        ids = {pool.query_id for pool in pools}
        deeper, depth = [pool for pool in task.deeper if pool.query_id in ids], task.settings.candidates
        if not deeper:
            absent(here, f"no query has {depth + 1} candidates, one more than its pool holds")
            return
        both = {v: [changed_pools(p, change=v, seed=settings.seed, depth=depth)[:2] for p in deeper] for v in values}
        variant("original", [before for before, _ in both[values[0]]], count=0)
        for value, changed in both.items():
            variant(value, [after for _, after in changed], count=0)


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return f"{value} queries a call"


# -- inner parts --------------------------------------------------------------------------------------------------


def _head(query: Presentations, count: int) -> Presentations:
    """The first `count` presentations."""
    if count == query.count:
        return query
    return Presentations(
        query_id=query.query_id,
        doc_ids=query.doc_ids,
        ranks=query.ranks[:count],
        scores=query.scores[:count],
        slot=None if query.slot is None else query.slot[:count],
        window=None if query.window is None else query.window[:count],
    )


def _asked_of(scorer: ScorerSettings, task: TaskSettings, changed: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a reranker: the task's, the scorer's own over them, what a control changes over these."""
    options: dict[str, Any] = {"window": task.window, "rubric": task.asked}
    if task.max_doc_chars is not None:
        options["max_doc_chars"] = task.max_doc_chars
    if scorer.type == "fake":
        options["engine"] = "fake"
    return options | scorer.options | dict(changed)


def _folder_of(scorer: ScorerSettings) -> Path | None:
    """The folder of a scorer's adapter, where it is on this machine."""
    adapter = scorer.options.get("adapter")
    place = None if adapter is None else adapter_folder(str(adapter))
    return place if place is not None and place.is_dir() else None


def _card(scorer: ScorerSettings) -> Mapping[str, Any] | None:
    place = _folder_of(scorer)
    return read_json(place / CARD) if place is not None and (place / CARD).is_file() else None


def _weights(scorer: ScorerSettings) -> dict[str, str]:
    """What shows that an adapter's folder holds other weights than before."""
    place = _folder_of(scorer)
    files = [] if place is None else sorted(place.glob("adapter_*"))
    return {file.name: sha256_file(file) for file in files}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def threshold_of(entry: Entry) -> Threshold | None:
    """The threshold a scorer's own figures are at."""
    return None if entry.measured is None else entry.measured.threshold
