"""The NevIR study in stages: parts, pools, trees, text scores of the window and of the pair alone; each one kept.

What the stages give is a `Study`: rankers with their outcomes over the test and the development part, from which
`nevir_report` makes every table. Source: "Preference is not position" (2026) and nevir notes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pd_rerank._extras import need
from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.evaluation.pairs import Case, Direction, designate, keep_apart, read_pairs
from pd_rerank.evaluation.preference import PairOutcome, pair_only_outcomes, pair_outcomes
from pd_rerank.evaluation.replay import Cost, Reranked, cost, head_of, window_rerank
from pd_rerank.evaluation.splits import first_groups, split
from pd_rerank.files import read_json, sha256_file, whole_file, write_json
from pd_rerank.ltr.features import ColumnAudit, FeatureMaker, audit
from pd_rerank.ltr.lambdamart import Lesson, Ranker, train
from pd_rerank.pool import Pool, pools_sha256
from pd_rerank.retrieval.fusion import RouteRule
from pd_rerank.scores import Scores
from pd_rerank.studies.collections import pools_of
from pd_rerank.studies.command import NotRun, about, attempt
from pd_rerank.studies.folder import RunFolder, slug
from pd_rerank.studies.nevir_settings import FUSION, CollectionSettings, NevirSettings, ScorerSettings
from pd_rerank.studies.scorers import check_scorer, open_scorer, pointwise
from pd_rerank.studies.templates import write_templates
from pd_rerank.windows import permutation, view_seed

logger = logging.getLogger("pd_rerank")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """A part of the study: its directions joined to their pools, the pools, and the rules these were fused by."""

    name: str
    collection: str
    cases: tuple[Case, ...]
    pools: Mapping[str, Pool]
    rules: Mapping[str, RouteRule]
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entry:
    """One ranker on one part: its outcomes, and where a window was reranked what that took and decided.

    `grades` are the text scores by case, NaN where there are none; `orders` those of the window in further orders, by
    order and case, None for a case that was not asked again; `pair_only` the outcomes of scoring the two passages
    alone. `presentations` is what a window took on average, None where a window is read as it is. `seconds` and
    `tokens` are what the scorer was measured to spend on this part.
    """

    name: str
    outcomes: tuple[PairOutcome, ...]
    cases: tuple[Case, ...]
    rows: tuple[Reranked, ...] = ()
    grades: tuple[Scores, ...] = ()
    orders: tuple[tuple[Scores | None, ...], ...] = ()
    presentations: float | None = None
    pair_only: tuple[PairOutcome, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    tokens: Mapping[str, int | None] = field(default_factory=dict)
    scored: int = 0

    @property
    def cost(self) -> Cost | None:
        """What the window asked for; None where the whole pool is ranked."""
        return cost(self.rows) if self.rows else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Study:
    """All that the report is made of; `entries[part]` holds rankers by name, fusion first."""

    settings: NevirSettings
    parts: Mapping[str, Part]
    entries: Mapping[str, Mapping[str, Entry]]
    rankers: Mapping[str, Ranker]
    columns: Sequence[ColumnAudit]
    not_run: Sequence[NotRun]


def run(settings: NevirSettings, folder: RunFolder) -> Study:
    """Do what is not done yet, stage by stage, and return the whole."""
    if settings.train is not None:
        need("lightgbm", extra="ltr", purpose="trees are trained by 'lightgbm'")
    for name, scorer in settings.scorers.items():
        with about(f"scorer '{name}'"):
            check_scorer(scorer)
    not_run: list[NotRun] = []
    parts = read_parts(settings, folder)
    entries: dict[str, dict[str, Entry]] = {
        name: {FUSION: whole_pool(FUSION, part, [case.first for case in part.cases])}
        for name, part in parts.items()
        if name != "train"
    }
    rankers, columns = grown(settings, folder, parts, entries, not_run)
    for name, scorer in settings.scorers.items():
        attempt(name, partial(read_by, name, scorer, settings, folder, parts, entries, not_run), not_run)
    return Study(
        settings=settings, parts=parts, entries=entries, rankers=rankers, columns=columns, not_run=tuple(not_run)
    )


# -- parts and pools ----------------------------------------------------------------------------------------------


def read_parts(settings: NevirSettings, folder: RunFolder) -> dict[str, Part]:
    """The parts, of whole collections or of shares of them; a source that two parts share is `InvalidData`."""
    wanted = {name: part for name in ("train", "dev", "test") if (part := getattr(settings, name)) is not None}
    read = {name: _collection(name, settings.collections[name], folder) for name in _used(settings)}
    directions: dict[str, list[Direction]] = {}
    for collection, (labelled, _, _) in read.items():
        of_it = {name: part.share for name, part in wanted.items() if part.collection == collection}
        directions |= _shares(of_it, labelled, seed=settings.seed)
    parts = {}
    keep_apart(directions)
    for name, part in wanted.items():
        _, pools, rules = read[part.collection]
        cases = designate(directions[name], pools)
        if not any(case.query_id is not None for case in cases):
            raise InvalidData(f"none of {name}'s {len(cases)} directions has a pool; are these pools of other queries?")
        used = {case.query_id for case in cases}
        mine = {pool.query_id: pool for pool in pools if pool.query_id in used}
        parts[name] = Part(
            name=name,
            collection=part.collection,
            cases=tuple(cases),
            pools=mine,
            rules=rules,
            sha256=pools_sha256(mine.values()),
        )
    return parts


def _used(settings: NevirSettings) -> list[str]:
    parts = (settings.train, settings.dev, settings.test)
    return list(dict.fromkeys(part.collection for part in parts if part is not None))


def _collection(
    name: str, settings: CollectionSettings, folder: RunFolder
) -> tuple[list[Direction], list[Pool], dict[str, RouteRule]]:
    pairs, config = settings.pairs, settings.pools
    if settings.templates is not None:
        place = folder.folder / f"{slug(name)}-templates"
        pairs, config = write_templates(place, settings.templates)
    assert pairs is not None
    assert config is not None
    directions = read_pairs(pairs, source=settings.source, fields=settings.fields)
    pools, rules = pools_of(config, directions, say=partial(logger.info, "%s: %s", name))
    return directions, pools, rules


def _shares(
    shares: Mapping[str, float | None], directions: Sequence[Direction], *, seed: int
) -> dict[str, list[Direction]]:
    """A collection's directions by part; what the shares leave over is the one part's without a share, or nobody's."""
    given = {name: share for name, share in shares.items() if share is not None}
    rest = next((name for name, share in shares.items() if share is None), "")
    if not given:
        return {rest: list(directions)}
    left = 1 - sum(given.values())
    parts = split(directions, given | ({rest: left} if left > 1e-9 else {}), seed=seed)
    return {name: found for name, found in parts.items() if name}


# -- trees --------------------------------------------------------------------------------------------------------


def grown(
    settings: NevirSettings,
    folder: RunFolder,
    parts: Mapping[str, Part],
    entries: Mapping[str, dict[str, Entry]],
    not_run: list[NotRun],
) -> tuple[dict[str, Ranker], list[ColumnAudit]]:
    """Train every arm on the train part, stopped by the development part, and score the pools of both others."""
    learned = parts.get("train")
    if learned is None:
        not_run.append(NotRun(what="E0 and background training", why="the config names no train part", failed=False))
        return {}, []
    apart = [name for name, part in parts.items() if list(part.rules) != list(learned.rules)]
    if apart:
        raise BadArgument(
            f"{apart[0]} has routes {', '.join(parts[apart[0]].rules)}, train has {', '.join(learned.rules)}; "
            "trees read the same columns everywhere: name the routes alike, in one order"
        )
    arms = settings.trees.all_arms()
    maker = FeatureMaker(learned.rules)
    rules = {name: asdict(rule) for name, rule in learned.rules.items()}
    fed = {n: [(c.direction.direction_id, c.direction.group) for c in p.cases] for n, p in parts.items() if n != "test"}
    key = {
        "arms": {name: [asdict(supervision), asdict(trees)] for name, (supervision, trees) in arms.items()},
        "rules": rules,
        "columns": list(maker.names),
        "directions": fed,
        "pools": {name: part.sha256 for name, part in parts.items() if name != "test"},
    }

    def grow(fresh: Path) -> None:
        lessons = {name: _lessons(parts[name], maker) for name in ("train", "dev") if name in parts}
        for place, (name, (supervision, trees)) in enumerate(arms.items()):
            logger.info("trees: %s on %d directions", name, len(lessons["train"]))
            made = train(
                lessons["train"], lessons.get("dev", []), names=maker.names, supervision=supervision, trees=trees
            )
            made.save(fresh / f"{place:02}")

    def score(part: Part, fresh: Path) -> None:
        begun = time.perf_counter(), time.process_time()
        pools = list(part.pools.values())
        features = [maker.features(pool) for pool in pools]
        spent = {"features": _since(begun)}
        arrays: dict[str, Any] = {}
        for place, (name, ranker) in enumerate(rankers.items()):
            begun = time.perf_counter(), time.process_time()
            arrays[f"{place:02}"] = np.concatenate([*ranker.scores(features), np.zeros(0)])
            spent[name] = _since(begun)
        with whole_file(fresh / "scores.npz", "wb") as stream:
            np.savez(stream, **arrays)
        write_json(fresh / "columns.json", [asdict(column) for column in audit(maker.names, features)])
        write_json(fresh / "seconds.json", spent)

    stage = folder.stage("trees", key, grow)
    rankers = {name: Ranker.load(stage / f"{place:02}") for place, name in enumerate(arms)}
    columns: list[ColumnAudit] = []
    for name, mine in entries.items():
        part = parts[name]
        done = folder.stage(f"tree scores {name}", [key, part.sha256], partial(score, part))
        columns = [ColumnAudit(**column) for column in read_json(done / "columns.json")]
        seconds = read_json(done / "seconds.json")
        ends = np.cumsum([len(pool) for pool in part.pools.values()])[:-1]
        with np.load(done / "scores.npz") as saved:
            for place, arm in enumerate(arms):
                of_pool = dict(zip(part.pools, np.split(saved[f"{place:02}"], ends), strict=True))
                values = [np.zeros(0) if c.query_id is None else of_pool[c.query_id] for c in part.cases]
                spent = {unit: seconds["features"][unit] + seconds[arm][unit] for unit in ("wall", "cpu")}
                scored = sum(map(len, part.pools.values()))
                mine[arm] = whole_pool(arm, part, values, seconds=spent, scored=scored)
    return rankers, columns


def whole_pool(
    name: str, part: Part, values: Sequence[Scores], *, seconds: Mapping[str, float] | None = None, scored: int = 0
) -> Entry:
    """A ranker of whole pools; `values` are its scores by case."""
    return Entry(
        name=name,
        outcomes=tuple(pair_outcomes(part.cases, values)),
        cases=part.cases,
        grades=tuple(values),
        seconds=seconds or {},
        scored=scored,
    )


def _lessons(part: Part, maker: FeatureMaker) -> list[Lesson]:
    features = {query_id: maker.features(pool) for query_id, pool in part.pools.items()}
    none = np.zeros((0, len(maker.names)), dtype=np.float32)
    return [
        Lesson(case=case, features=none if case.query_id is None else features[case.query_id]) for case in part.cases
    ]


def _since(begun: tuple[float, float]) -> dict[str, float]:
    return {"wall": time.perf_counter() - begun[0], "cpu": time.process_time() - begun[1]}


# -- text scorers ---------------------------------------------------------------------------------------------------


def read_by(
    name: str,
    scorer: ScorerSettings,
    settings: NevirSettings,
    folder: RunFolder,
    parts: Mapping[str, Part],
    entries: Mapping[str, dict[str, Entry]],
    not_run: list[NotRun],
) -> None:
    """Let a scorer read the windows (and the pairs alone) of its directions, and add what it makes of the pools."""
    if scorer.skip is not None:
        not_run.append(NotRun(what=name, why=scorer.skip, failed=False))
        return
    opened: list[Any] = []

    def once() -> Any:
        if not opened:
            opened.append(open_scorer(scorer))
        return opened[0]

    for part_name, mine in entries.items():
        part = parts[part_name]
        least = scorer.directions if part_name == "test" else scorer.dev_directions
        cases = chosen(part, least, seed=settings.seed)
        if not cases:
            continue
        if len(cases) < len(part.cases):
            why = f"the config limits it to {len(cases)} of {len(part.cases)} directions"
            not_run.append(NotRun(what=f"{name} on the rest of {part_name}", why=why, failed=False))
        key = {
            "scorer": {"type": scorer.type, "model": scorer.model, "options": scorer.options, **_content(scorer)},
            "window": settings.window,
            "pools": part.sha256,
        }
        heads = _heads(part, cases, settings.window, with_pairs=pointwise(scorer))
        logger.info("%s: %d windows of %s", name, len(heads), part_name)
        shards = list(folder.scored(f"{name} {part_name}", key, heads, once, size=settings.shard_size))
        found, windows_read = _by_query(shards), list(shards)
        if part_name == "test" and all(score is None for scores in found.values() for score in scores.values()):
            raise InvalidData(f"no candidate of {part_name} has a score; are they scores of other queries?")
        pair_scores = {c.direction.direction_id: _pair_of(c, found.get(str(c.query_id), {})) for c in cases}
        if not pointwise(scorer) and scorer.pair_only:
            alone = _pairs(part, cases)
            more = list(folder.scored(f"{name} {part_name} pairs", key, alone, once, size=settings.shard_size))
            read = _by_query(more)
            pair_scores = {c.direction.direction_id: _pair_of(c, read.get(c.direction.direction_id, {})) for c in cases}
            shards += more
        orders = []
        asked = chosen(part, scorer.order_directions, seed=settings.seed)
        again = {case.query_id for case in asked} if scorer.presentations > 1 and part_name == "test" else set()
        for m in range(scorer.presentations if again else 0):
            arrived = [_shuffled(p, seed=settings.seed, order=m) for p in heads if p.query_id in again]
            which = {**key, "order": [settings.seed, m]}
            more = list(folder.scored(f"{name} {part_name} order {m}", which, arrived, once, size=settings.shard_size))
            read = _by_query(more)
            orders.append(
                tuple(_laid_out(c, read.get(str(c.query_id), {})) if c.query_id in again else None for c in cases)
            )
            shards += more
            windows_read += more
        grades = tuple(_laid_out(case, found.get(str(case.query_id), {})) for case in cases)
        rows = tuple(window_rerank(cases, grades, k=settings.window))
        mine[name] = Entry(
            name=name,
            outcomes=tuple(row.outcome for row in rows),
            cases=tuple(cases),
            rows=rows,
            grades=grades,
            orders=tuple(orders),
            presentations=_spent(windows_read),
            pair_only=tuple(_alone(cases, pair_scores)) if scorer.pair_only else (),
            seconds={unit: math.fsum(shard["seconds"][unit] for shard in shards) for unit in ("wall", "cpu")},
            tokens=_tokens(shards),
            scored=sum(len(query["doc_ids"]) for shard in shards for query in shard["queries"]),
        )


def with_secondary(name: str, entry: Entry, by: Entry, *, k: int) -> Entry:
    """The same window rerank with another ranker's scores breaking its ties; window, tail and fallback unchanged."""
    scores = {case.direction.direction_id: values for case, values in zip(by.cases, by.grades, strict=True)}
    secondary = [scores[case.direction.direction_id] for case in entry.cases]
    rows = tuple(window_rerank(entry.cases, entry.grades, k=k, secondary=secondary))
    return Entry(
        name=name, outcomes=tuple(row.outcome for row in rows), cases=entry.cases, rows=rows, grades=entry.grades
    )


def mixed(case: Case, grades: Scores, weight: float, *, k: int) -> Scores:
    """Text and first-stage scores of the window mixed, each scaled to [0, 1] over it: weight · text + the rest · first.

    NaN where a grade is missing and outside the window. At weight 0 this is the first stage, at 1 the text alone.
    """
    head = head_of(case, k)
    out = np.full(len(grades), np.nan)
    there = head & ~np.isnan(grades)
    if there.any():
        out[there] = weight * _scaled(grades[there]) + (1 - weight) * _scaled(case.first[there])
    return out


def chosen(part: Part, least: int | None, *, seed: int) -> list[Case]:
    """The cases of the first source groups that hold `least` directions, all of them where it is None."""
    if least is None or least >= len(part.cases):
        return list(part.cases)
    groups = first_groups([case.direction for case in part.cases], least, seed=seed)
    return [case for case in part.cases if case.direction.group in groups]


# -- inner parts --------------------------------------------------------------------------------------------------


def _heads(part: Part, cases: Sequence[Case], k: int, *, with_pairs: bool) -> list[Pool]:
    """A pool for each query: its window in first-stage order, and with `with_pairs` the designated passages too."""
    wanted: dict[str, np.ndarray[Any, np.dtype[np.bool_]]] = {}
    for case in cases:
        if case.query_id is None:
            continue
        mask = wanted.setdefault(case.query_id, head_of(case, k))
        if with_pairs:
            mask[[at for at in (case.preferred, case.other) if at is not None]] = True
    return [_sub_pool(part.pools[query_id], mask, query_id) for query_id, mask in wanted.items()]


def _pairs(part: Part, cases: Sequence[Case]) -> list[Pool]:
    """A pool of the two designated passages for each covered direction, in first-stage order."""
    found = []
    for case in cases:
        pair = [at for at in (case.preferred, case.other) if at is not None]
        if case.query_id is not None and len(pair) == 2:
            mask = np.zeros(len(case.doc_ids), dtype=bool)
            mask[pair] = True
            found.append(_sub_pool(part.pools[case.query_id], mask, case.direction.direction_id))
    return found


def _sub_pool(pool: Pool, mask: np.ndarray[Any, np.dtype[np.bool_]], query_id: str) -> Pool:
    return Pool(
        query_id=query_id,
        query=pool.query,
        candidates=tuple(c for c, wanted in zip(pool.candidates, mask, strict=True) if wanted),
    )


def _shuffled(pool: Pool, *, seed: int, order: int) -> Pool:
    """The pool as it arrives in that order: a shuffle of its own for every query, so that no slot keeps one rank."""
    own = view_seed(seed, epoch=order, query_id=pool.query_id, window=0)
    shown = permutation(len(pool), seed=own)
    return Pool(query_id=pool.query_id, query=pool.query, candidates=tuple(pool.candidates[i] for i in shown))


def _spent(shards: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean number of presentations of a window, None where they are not counted."""
    counts = [query.get("presentations") for shard in shards for query in shard["queries"]]
    known = [count for count in counts if count is not None]
    return sum(known) / len(known) if known else None


def _by_query(shards: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    return {
        query["query_id"]: dict(zip(query["doc_ids"], query["scores"], strict=True))
        for shard in shards
        for query in shard["queries"]
    }


def _laid_out(case: Case, scores: Mapping[str, float | None]) -> Scores:
    given = (scores.get(doc_id) for doc_id in case.doc_ids)
    return np.array([math.nan if score is None else score for score in given], dtype=np.float64)


def _pair_of(case: Case, scores: Mapping[str, float | None]) -> tuple[float | None, float | None]:
    at = (case.preferred, case.other)
    one, two = (None if i is None else scores.get(case.doc_ids[i]) for i in at)
    return one, two


def _alone(cases: Sequence[Case], scores: Mapping[str, tuple[float | None, float | None]]) -> list[PairOutcome]:
    """Pair-only outcomes over the directions that the pools cover: the same population as the window's."""
    return pair_only_outcomes([case.direction for case in cases if case.missing is None], scores)


def _tokens(shards: Sequence[Mapping[str, Any]]) -> dict[str, int | None]:
    names = {name for shard in shards for name in shard["tokens"]}
    known = {name: [shard["tokens"].get(name) for shard in shards] for name in sorted(names)}
    return {name: None if None in counts else sum(counts) for name, counts in known.items()}


def _content(scorer: ScorerSettings) -> dict[str, str]:
    """What shows that scores at hand have changed."""
    if scorer.type != "scores":
        return {}
    path = Path(scorer.model)
    files = [path] if path.is_file() else sorted(path.rglob("scores.npz"))
    return {str(file): sha256_file(file) for file in files}


def _scaled(values: Scores) -> Scores:
    low, span = values.min(), values.max() - values.min()
    found: Scores = (values - low) / span if span > 0 else np.ones(len(values))
    return found
