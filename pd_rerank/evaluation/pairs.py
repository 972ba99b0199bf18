"""Labelled pairs: which of two passages a query prefers, read from files and joined to the pools that were ranked."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from pd_rerank.errors import InvalidData
from pd_rerank.files import identifier, read_jsonl
from pd_rerank.pool import Pool
from pd_rerank.scores import Scores

Side = Literal["q1", "q2"]
Conflict = Literal["same query", "opposing labels", "same passages"]
Missing = Literal["pool", "preferred", "other", "both"]

_NEVIR = ("q1", "q2", "doc1", "doc2")
_OWN = ("preferred", "rejected")
_SHAPES = "a line has either id, q1, q2, doc1, doc2, or query, preferred, rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """One query and the two passages it tells apart: `preferred` should rank above `other`.

    Passages are texts or document ids, as the file gives them; `query` may be empty where `query_id` names it.
    Two directions of one `pair_id` (sides q1 and q2) mirror each other; `group` is the source they share with
    others, the unit of resampling; `conflict` says why the label contradicts itself, where it does.
    """

    direction_id: str
    query: str
    preferred: str
    other: str
    group: str
    pair_id: str | None = None
    side: Side = "q1"
    query_id: str | None = None
    conflict: Conflict | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """A direction joined to the pool of its query; a direction without a pool, or without a passage in it, stays one.

    `doc_ids` are the pool's; `first` (n,) float64 holds the first stage's scores, higher is better; `id_order` (n,)
    each id's place among the sorted ids, which breaks ties in lists and never decides a preference; `preferred` and
    `other` are positions in the pool, None where absent; `route_tops` the best id of each
    route, in the order of the routes' names, None for a route that gave this query nothing.
    """

    direction: Direction
    query_id: str | None = None
    doc_ids: tuple[str, ...] = ()
    first: Scores
    id_order: npt.NDArray[np.int64]
    preferred: int | None = None
    other: int | None = None
    route_tops: tuple[str | None, ...] = ()

    @property
    def missing(self) -> Missing | None:
        """What keeps this direction from being covered; None where both passages are in the pool."""
        if self.query_id is None:
            return "pool"
        if self.preferred is None and self.other is None:
            return "both"
        if self.preferred is None:
            return "preferred"
        return "other" if self.other is None else None


class HasDirection(Protocol):
    """Whatever is recorded per direction: a case, an outcome."""

    @property
    def direction(self) -> Direction:
        """The direction it is of."""


Unit = TypeVar("Unit", bound=HasDirection)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How many directions could be judged at all: `planned` of the file, `covered` with both passages in the pool,
    `used` of those without a conflict, and how many complete pairs and groups the used ones make up.
    """

    planned: int
    covered: int
    used: int
    conflicts: int
    missing: Mapping[Missing, int]
    planned_pairs: int
    complete_pairs: int
    planned_groups: int
    groups: int


# -- reading ------------------------------------------------------------------------------------------------------


def read_pairs(
    path: str | Path, *, source: Literal["prefix", "pair"] = "prefix", fields: Mapping[str, str] | None = None
) -> list[Direction]:
    """Read labelled pairs from JSONL in file order, conflicts marked; both shapes are told apart by their fields.

    NevIR's shape `id, q1, q2, doc1, doc2` gives two directions, `id:q1` preferring doc1 and `id:q2` preferring doc2;
    the group is the id before its last hyphen, or with `source="pair"` the whole id. A user's own shape is `query`
    (text) or `query_id`, `preferred` and `rejected` (texts or document ids), with optional `id` and `pair` (shared by
    two lines); the group is the query. A field `group` names it in either shape. `fields` says what another file
    calls them, as {"query": "question"}.
    A missing, empty or non-text field, a repeated id, and a file of two shapes are `InvalidData` with file and line.
    """
    directions: list[Direction] = []
    lines: dict[str, str] = {}
    sides: Counter[str] = Counter()
    shape: str | None = None
    for count, (where, given) in enumerate(read_jsonl(path), 1):
        record = given | {ours: given.get(theirs) for ours, theirs in (fields or {}).items()}
        here = _shape(record, where=where)
        if shape not in (None, here):
            raise InvalidData(f"{where}: lines of two shapes in one file; {_SHAPES}")
        shape = here
        found = (
            _nevir(record, source, where=where) if here == "nevir" else [_own(record, sides, count=count, where=where)]
        )
        for direction in found:
            if direction.direction_id in lines:
                before = lines[direction.direction_id]
                raise InvalidData(f"{where}: '{direction.direction_id}' was at {before} before; give every line its id")
            lines[direction.direction_id] = where
        directions += found
    if not directions:
        raise InvalidData(f"{path} holds no pairs; {_SHAPES}")
    return mark_conflicts(directions)


def mark_conflicts(directions: Sequence[Direction]) -> list[Direction]:
    """The same directions with `conflict` set where labels contradict themselves, whatever a ranker does.

    "same passages": a passage preferred over itself. "same query": the two sides of a pair ask the same.
    "opposing labels": elsewhere the same query prefers the same two passages the other way round.
    """
    preferred: defaultdict[tuple[str, frozenset[str]], set[str]] = defaultdict(set)
    queries: defaultdict[str, list[str]] = defaultdict(list)
    for d in directions:
        preferred[_query_key(d), frozenset((d.preferred, d.other))].add(d.preferred)
        if d.pair_id is not None:
            queries[d.pair_id].append(_query_key(d))

    def conflict(d: Direction) -> Conflict | None:
        if d.preferred == d.other:
            return "same passages"
        if d.pair_id is not None and queries[d.pair_id].count(_query_key(d)) > 1:
            return "same query"
        return "opposing labels" if len(preferred[_query_key(d), frozenset((d.preferred, d.other))]) > 1 else None

    return [replace(d, conflict=conflict(d)) for d in directions]


def prefix_group(pair_id: str) -> str:
    """The source of a pair by its id: everything before the last hyphen, the whole id where there is none."""
    return pair_id.rpartition("-")[0] or pair_id


def union_groups(directions: Sequence[Direction]) -> list[Direction]:
    """The same directions, grouped by everything that ties them to a common source.

    Two directions share a group when they share, directly or through others, a group, a pair, a passage, a query, a
    query's lower-cased words in order, or those words in any order; a query without words links nothing. A group is
    named after the smallest former group in it. Source: the NevIR study's rule for its train and validation splits.
    """
    parent: dict[object, object] = {}

    def root(key: object) -> object:
        parent.setdefault(key, key)
        while parent[key] != key:
            parent[key] = key = parent[parent[key]]
        return key

    for d in directions:
        first, *others = _links(d)
        for key in others:
            parent[root(key)] = root(first)
    names: dict[object, str] = {}
    for d in directions:
        at = root(("group", d.group))
        names[at] = min(d.group, names.get(at, d.group))
    return [replace(d, group=names[root(("group", d.group))]) for d in directions]


def keep_apart(parts: Mapping[str, Sequence[Direction]]) -> None:
    """Refuse splits that share a source: `InvalidData` names a group found in two of the named `parts`."""
    where = [(name, d) for name, directions in parts.items() for d in directions]
    seen: dict[str, str] = {}
    for (name, _), linked in zip(where, union_groups([d for _, d in where]), strict=True):
        if seen.setdefault(linked.group, name) != name:
            raise InvalidData(
                f"source group '{linked.group}' is in '{seen[linked.group]}' and, through "
                f"'{linked.direction_id}', in '{name}'; put all of a group into one part"
            )


# -- joining to pools ---------------------------------------------------------------------------------------------


def designate(directions: Sequence[Direction], pools: Iterable[Pool]) -> list[Case]:
    """Join every direction to its pool and find its two passages there; one case per direction, in order.

    The pool is the one named by `query_id`, else the one of the query's text, the one named like the direction if
    there are several; several pools of one text otherwise serve as many directions of that text in order. A passage
    is found by id, else by text. Texts are compared with white space collapsed. Nothing is inserted: what is missing
    stays missing and is counted. A text that two candidates carry, pools that cannot be told apart, and a `query_id`
    whose pool asks something else than the direction does are `InvalidData`.
    """
    texts = _Squeezed()
    by_id = {pool.query_id: pool for pool in pools}
    by_text: defaultdict[str, list[Pool]] = defaultdict(list)
    for pool in by_id.values():
        by_text[texts[pool.query]].append(pool)
    routes = sorted({name for pool in by_id.values() for c in pool.candidates for name in c.routes})

    def named(d: Direction) -> bool:
        """Whether a pool is named like the direction and asks its query: lines without ids are only counted."""
        return d.direction_id in by_id and texts[by_id[d.direction_id].query] == texts[d.query]

    waiting: defaultdict[str, list[Direction]] = defaultdict(list)
    for d in directions:
        if d.query_id is None and not named(d):
            waiting[texts[d.query]].append(d)
    turns = {d.direction_id: turn for same in waiting.values() for turn, d in enumerate(same)}

    def pool_of(d: Direction) -> Pool | None:
        if d.query_id is not None:
            found = by_id.get(d.query_id)
            if found is not None and d.query and texts[found.query] != texts[d.query]:
                raise InvalidData(
                    f"'{d.direction_id}': pool '{d.query_id}' asks {found.query[:60]!r}, the pair {d.query[:60]!r}; "
                    "these pools are of other queries, or leave the text out of the pairs"
                )
            return found
        if named(d):
            return by_id[d.direction_id]
        same, asking = by_text[texts[d.query]], waiting[texts[d.query]]
        if len(same) > 1 and len(same) != len(asking):
            raise InvalidData(
                f"'{d.direction_id}': {len(same)} pools ask its query ('{same[0].query_id}', "
                f"'{same[1].query_id}', …) and {len(asking)} directions do; give the pairs a query_id"
            )
        return same[turns[d.direction_id] % len(same)] if same else None

    opened: dict[str, _Opened] = {}
    cases = []
    for d in directions:
        found = pool_of(d)
        if found is None:
            cases.append(Case(direction=d, first=np.zeros(0), id_order=np.zeros(0, dtype=np.int64)))
            continue
        if found.query_id not in opened:
            opened[found.query_id] = _Opened(found, texts, routes)
        cases.append(opened[found.query_id].case(d))
    return cases


def coverage(cases: Sequence[Case]) -> Coverage:
    """Count what of the planned directions the pools let one judge."""
    covered = [case for case in cases if case.missing is None]
    used = [case for case in covered if case.direction.conflict is None]
    return Coverage(
        planned=len(cases),
        covered=len(covered),
        used=len(used),
        conflicts=sum(case.direction.conflict is not None for case in cases),
        missing=dict(Counter(case.missing for case in cases if case.missing is not None)),
        planned_pairs=len({c.direction.pair_id for c in cases if c.direction.pair_id is not None}),
        complete_pairs=len(complete_pairs(used)),
        planned_groups=len({c.direction.group for c in cases}),
        groups=len({c.direction.group for c in used}),
    )


def complete_pairs(units: Iterable[Unit]) -> dict[str, tuple[Unit, Unit]]:
    """The pairs of which exactly the two sides, q1 and q2, are among `units` (cases or outcomes), by pair id."""
    pairs: defaultdict[str, list[Unit]] = defaultdict(list)
    for unit in units:
        if unit.direction.pair_id is not None:
            pairs[unit.direction.pair_id].append(unit)
    whole = {}
    for pair_id, sides in pairs.items():
        if sorted(unit.direction.side for unit in sides) == ["q1", "q2"]:
            one, two = sides
            if one.direction.group != two.direction.group:
                raise InvalidData(
                    f"pair '{pair_id}' is in groups '{one.direction.group}' and '{two.direction.group}'; "
                    "a pair has one source"
                )
            whole[pair_id] = (one, two)
    return whole


# -- inner parts --------------------------------------------------------------------------------------------------


class _Opened:
    """A pool with what is needed to find passages in it, made once for all its directions."""

    def __init__(self, pool: Pool, texts: _Squeezed, routes: Sequence[str]) -> None:
        self.pool, self.texts = pool, texts
        self.by_id = {doc_id: i for i, doc_id in enumerate(pool.doc_ids)}
        self.by_text: defaultdict[str, list[int]] = defaultdict(list)
        for i, text in enumerate(pool.texts):
            self.by_text[texts[text]].append(i)
        self.first = first_stage(pool)
        self.id_order = np.argsort(np.array(sorted(range(len(pool)), key=pool.doc_ids.__getitem__), dtype=np.int64))
        for array in (self.first, self.id_order):
            array.flags.writeable = False
        self.tops = _route_tops(pool, routes)

    def case(self, d: Direction) -> Case:
        return Case(
            direction=d,
            query_id=self.pool.query_id,
            doc_ids=self.pool.doc_ids,
            first=self.first,
            id_order=self.id_order,
            preferred=self.find(d.preferred, d),
            other=self.find(d.other, d),
            route_tops=self.tops,
        )

    def find(self, passage: str, d: Direction) -> int | None:
        by_text = self.by_text.get(self.texts[passage], [])
        places = {*by_text, self.by_id[passage]} if passage in self.by_id else set(by_text)
        if len(places) > 1:
            ids = ", ".join(f"'{self.pool.doc_ids[i]}'" for i in sorted(places))
            raise InvalidData(
                f"'{d.direction_id}': its passage {passage[:40]!r} is {ids} in pool '{self.pool.query_id}'; "
                "name the one meant by its id"
            )
        return places.pop() if places else None


def first_stage(pool: Pool) -> Scores:
    """The first stage's scores in pool order, (n,): -inf where one is missing, minus the position where all are."""
    scores = [candidate.score for candidate in pool.candidates]
    if all(score is None for score in scores):
        return -np.arange(len(scores), dtype=np.float64)
    return np.array([-np.inf if score is None else score for score in scores], dtype=np.float64)


def _route_tops(pool: Pool, routes: Sequence[str]) -> tuple[str | None, ...]:
    hits = {name: [(c.routes[name].rank, c.doc_id) for c in pool.candidates if name in c.routes] for name in routes}
    return tuple(min(hits[name])[1] if hits[name] else None for name in routes)


_WORDS = re.compile(r"[a-z0-9]+(?:'[a-z0-9]+)?")


def _links(d: Direction) -> Iterator[tuple[str, object]]:
    yield "group", d.group
    if d.pair_id is not None:
        yield "pair", d.pair_id
    yield "passage", d.preferred
    yield "passage", d.other
    yield "query", _query_key(d)
    words = _WORDS.findall(d.query.lower())
    if words:
        yield "words", tuple(words)
        yield "bag", tuple(sorted(words))


def _query_key(d: Direction) -> str:
    return d.query if d.query_id is None else d.query_id


class _Squeezed(dict[str, str]):
    """Texts with white space collapsed, each collapsed once: the same passages fill many pools."""

    def __missing__(self, text: str) -> str:
        self[text] = " ".join(text.split())
        return self[text]


def _shape(record: Mapping[str, Any], *, where: str) -> str:
    if any(field in record for field in _NEVIR):
        return "nevir"
    if any(field in record for field in _OWN):
        return "own"
    raise InvalidData(f"{where}: no pair of passages; {_SHAPES}, this one has {', '.join(record) or 'no fields'}")


def _nevir(record: Mapping[str, Any], source: str, *, where: str) -> list[Direction]:
    pair_id = identifier(record, ("id",), where=where)
    q1, q2, doc1, doc2 = (_text(record, field, where=where) for field in _NEVIR)
    group = _group(record, prefix_group(pair_id) if source == "prefix" else pair_id, where=where)
    return [
        Direction(
            direction_id=f"{pair_id}:q1", query=q1, preferred=doc1, other=doc2, group=group, pair_id=pair_id, side="q1"
        ),
        Direction(
            direction_id=f"{pair_id}:q2", query=q2, preferred=doc2, other=doc1, group=group, pair_id=pair_id, side="q2"
        ),
    ]


def _own(record: Mapping[str, Any], sides: Counter[str], *, count: int, where: str) -> Direction:
    named = record.get("query_id") is not None
    query_id = identifier(record, ("query_id",), where=where) if named else None
    query = "" if named and record.get("query") is None else _text(record, "query", where=where)
    pair_id = identifier(record, ("pair",), where=where) if record.get("pair") is not None else None
    if pair_id is not None:
        sides[pair_id] += 1
        if sides[pair_id] > 2:
            raise InvalidData(f"{where}: a third line of pair '{pair_id}'; a pair has two directions")
    return Direction(
        direction_id=identifier(record, ("id",), where=where) if record.get("id") is not None else str(count),
        query=query,
        preferred=_passage(record, "preferred", where=where),
        other=_passage(record, "rejected", where=where),
        group=_group(record, query_id or query, where=where),
        pair_id=pair_id,
        side="q2" if pair_id is not None and sides[pair_id] == 2 else "q1",
        query_id=query_id,
    )


def _group(record: Mapping[str, Any], otherwise: str, *, where: str) -> str:
    return otherwise if record.get("group") is None else identifier(record, ("group",), where=where)


def _passage(record: Mapping[str, Any], field: str, *, where: str) -> str:
    value = record.get(field)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return _text(record, field, where=where)


def _text(record: Mapping[str, Any], field: str, *, where: str) -> str:
    value = record.get(field)
    if value is None:
        raise InvalidData(f"{where}: no '{field}'; {_SHAPES}")
    if not isinstance(value, str):
        raise InvalidData(f"{where}: '{field}' is a {type(value).__name__}, a text is wanted")
    if not value.strip():
        raise InvalidData(f"{where}: '{field}' is empty; write the text or drop the line")
    return value
