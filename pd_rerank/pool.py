"""Candidates and pools: what a first stage hands to a reranker, in memory and on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from pd_rerank.errors import BadArgument, InvalidData, MissingResource
from pd_rerank.files import (
    DOC_ID_FIELDS,
    QUERY_ID_FIELDS,
    RunHit,
    document_text,
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

logger = logging.getLogger("pd_rerank")

Missing = Literal["error", "skip"]

_POOLS, _MANIFEST = "pools.jsonl", "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteHit:
    """What one retrieval route said of a candidate: its score and its rank, counted from 1."""

    score: float
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One document of a pool. `score` is the first stage's, where there is one; `routes` keeps each route's own."""

    doc_id: str
    text: str
    score: float | None = None
    routes: Mapping[str, RouteHit] = field(default_factory=lambda: MappingProxyType({}))

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy can be neither copied nor sent to another process.
        return partial(Candidate, doc_id=self.doc_id, text=self.text, score=self.score, routes=dict(self.routes)), ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A query and its candidates, each id once, in the order given.

    Files and first stages use the canonical order, see `Pool.ordered`; a caller's own list keeps its
    arrival order. An empty pool is a valid pool.
    """

    query_id: str
    query: str
    candidates: tuple[Candidate, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for candidate in self.candidates:
            if not isinstance(candidate.doc_id, str) or not isinstance(candidate.text, str):
                raise InvalidData(f"pool '{self.query_id}': ids and texts are strings, got {candidate!r}")
            if candidate.doc_id in seen:
                raise InvalidData(f"pool '{self.query_id}' holds '{candidate.doc_id}' twice; keep one of them")
            if candidate.score is not None and not math.isfinite(candidate.score):
                raise InvalidData(
                    f"pool '{self.query_id}', candidate '{candidate.doc_id}': first-stage score is "
                    f"{candidate.score}; give a finite number or none"
                )
            seen.add(candidate.doc_id)

    @classmethod
    def ordered(cls, *, query_id: str, query: str, candidates: Iterable[Candidate]) -> Pool:
        """Make a pool in canonical order: first-stage score descending, then doc_id; unscored candidates last."""
        ranked = sorted(candidates, key=lambda c: (-(c.score if c.score is not None else -math.inf), c.doc_id))
        return cls(query_id=query_id, query=query, candidates=tuple(ranked))

    @property
    def doc_ids(self) -> tuple[str, ...]:
        """The candidates' ids, in pool order."""
        return tuple(candidate.doc_id for candidate in self.candidates)

    @property
    def texts(self) -> tuple[str, ...]:
        """The candidates' texts, in pool order."""
        return tuple(candidate.text for candidate in self.candidates)

    def __len__(self) -> int:
        return len(self.candidates)


def write_pools(folder: str | Path, pools: Iterable[Pool], *, manifest: Mapping[str, Any] | None = None) -> None:
    """Write pools as a folder of pools.jsonl and manifest.json, whole or not at all; `read_pools` reads it back.

    pools.jsonl has the shape rank_llm reads, with each candidate's `routes` added; equal pools give equal bytes.
    The manifest holds `manifest` (what the maker wants recorded), versions, time and SHA-256. A folder that holds
    anything else is refused.
    """
    with whole_folder(folder, holds=(_POOLS, _MANIFEST)) as fresh:
        counts = {"queries": 0, "candidates": 0, "empty": 0}
        write_jsonl(fresh / _POOLS, _counted(pools, counts))
        write_json(fresh / _MANIFEST, _manifest({**(manifest or {}), **counts}, fresh))


def write_pools_file(path: str | Path, pools: Iterable[Pool]) -> None:
    """Write pools as one JSONL file in the shape rank_llm reads, whole or not at all."""
    write_jsonl(path, _counted(pools, {"queries": 0, "candidates": 0, "empty": 0}))


def read_pools(path: str | Path) -> list[Pool]:
    """Read the pools of a folder written by `write_pools`, or of a JSONL file in rank_llm's shape.

    A line is `{"query": {"qid", "text"}, "candidates": [{"docid", "score", "doc"}]}`; `query` may be a plain
    string, its id then standing beside it or being the line's count from 1, and `doc` may be a string. Candidates
    keep the file's order. A folder whose pools.jsonl is not the one its manifest names, a malformed line, a
    document twice in a pool or a query twice in the file is `InvalidData`.
    """
    source = Path(path)
    if source.is_dir():
        source = _verified(source)
    pools: list[Pool] = []
    lines: dict[str, str] = {}
    for where, record in read_jsonl(source):
        pool = _pool(record, where=where, count=len(pools) + 1)
        if pool.query_id in lines:
            raise InvalidData(f"{where}: query '{pool.query_id}' was at {lines[pool.query_id]} before; keep one")
        lines[pool.query_id] = where
        pools.append(pool)
    return pools


def pools_from_run(
    run: Mapping[str, Sequence[RunHit]],
    queries: Mapping[str, str],
    corpus: Mapping[str, str] | Iterable[tuple[str, str]],
    *,
    depth: int = 100,
    missing: Missing = "error",
) -> list[Pool]:
    """Make one pool per query, in the order of `queries`, from the best `depth` hits of `run` and their texts.

    `corpus` is a mapping or (id, text) pairs; pairs are read once and only the texts needed are kept. Hits without
    a text are an error with their count, or left out with `missing="skip"` (the pool is then shorter). A query of
    the run that is not in `queries` is an error. A query without hits keeps an empty pool and is warned of.
    """
    if depth < 1:
        raise BadArgument(f"depth must be at least 1, got {depth}")
    if missing not in get_args(Missing):
        raise BadArgument(f"unknown choice for missing texts '{missing}'; choose error or skip")
    unknown = [query_id for query_id in run if query_id not in queries]
    if unknown:
        raise InvalidData(
            f"{len(unknown)} of the run's {len(run)} queries are not in the topics ({_some(unknown)}); "
            "give the topics the run was made with"
        )
    best = {query_id: _best(run.get(query_id, ()), depth) for query_id in queries}
    texts = _texts(corpus, {hit.doc_id for hits in best.values() for hit in hits})
    _report_missing(best, texts, missing=missing)
    empty = [query_id for query_id, hits in best.items() if not hits]
    if empty:
        logger.warning("%d of %d queries have no hits (%s)", len(empty), len(best), _some(empty))
    return [
        Pool.ordered(
            query_id=query_id,
            query=queries[query_id],
            candidates=[
                Candidate(doc_id=hit.doc_id, text=texts[hit.doc_id], score=hit.score)
                for hit in hits
                if hit.doc_id in texts
            ],
        )
        for query_id, hits in best.items()
    ]


def pool_sha256(pool: Pool) -> str:
    """The SHA-256 of a pool's content: query, ids, texts, scores and routes, in order; hex."""
    content = json.dumps(_record(pool), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(content.encode()).hexdigest()


def pools_sha256(pools: Iterable[Pool]) -> str:
    """The SHA-256 over the content of pools in order; how a file spells them (spaces, key order) is no part of it."""
    whole = hashlib.sha256()
    for pool in pools:
        whole.update(bytes.fromhex(pool_sha256(pool)))
    return whole.hexdigest()


def _record(pool: Pool) -> dict[str, Any]:
    """A pool in the shape rank_llm reads, plus our routes."""
    return {
        "query": {"qid": pool.query_id, "text": pool.query},
        "candidates": [
            {
                "docid": c.doc_id,
                "score": None if c.score is None else float(c.score),
                "doc": {"text": c.text},
                "routes": {
                    name: {"score": float(hit.score), "rank": int(hit.rank)} for name, hit in sorted(c.routes.items())
                },
            }
            for c in pool.candidates
        ],
    }


def _counted(pools: Iterable[Pool], counts: dict[str, int]) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    for pool in pools:
        if pool.query_id in seen:
            raise InvalidData(f"query '{pool.query_id}' has two pools; give every query its own id")
        if not pool.query.strip():
            raise InvalidData(f"query '{pool.query_id}' has no text, and could not be read back; write one or drop it")
        seen.add(pool.query_id)
        counts["queries"] += 1
        counts["candidates"] += len(pool)
        counts["empty"] += not len(pool)
        yield _record(pool)


def _manifest(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    return manifest({"format": "pd_rerank pools 1", **settings}, files={_POOLS: folder / _POOLS})


def _verified(folder: Path) -> Path:
    """The pools.jsonl of a pool folder, after comparing it with the manifest."""
    for name in (_POOLS, _MANIFEST):
        if not (folder / name).is_file():
            raise MissingResource(f"{folder} is no pool folder: it has no {name}; a JSONL file can be named itself")
    recorded = read_json(folder / _MANIFEST)
    hashes = recorded.get("sha256") if isinstance(recorded, dict) else None
    want = hashes.get(_POOLS) if isinstance(hashes, dict) else None
    found = sha256_file(folder / _POOLS)
    if want != found:
        raise InvalidData(
            f"{folder / _POOLS} is not what {_MANIFEST} records (sha256 {found[:12]}…, recorded {str(want)[:12]}…); "
            "make the pools again, or name the JSONL file itself if the change is meant"
        )
    return folder / _POOLS


def _pool(record: Mapping[str, Any], *, where: str, count: int) -> Pool:
    query, candidates = record.get("query"), record.get("candidates")
    if not isinstance(candidates, list):
        raise InvalidData(f"{where}: no list of candidates; a pool line has 'query' and 'candidates'")
    if isinstance(query, str):
        named = any(record.get(key) is not None for key in QUERY_ID_FIELDS)
        query_id, text = identifier(record, QUERY_ID_FIELDS, where=where) if named else str(count), query
    elif isinstance(query, dict) and isinstance(query.get("text"), str):
        query_id, text = identifier(query, QUERY_ID_FIELDS, where=f"{where}, query"), query["text"]
    else:
        raise InvalidData(f"{where}: 'query' is neither a string nor an object with 'qid' and 'text'")
    found = [_candidate(c, where=f"{where}, candidate {i}") for i, c in enumerate(candidates, 1)]
    if not text.strip():
        raise InvalidData(f"{where}: query '{query_id}' has no text; write one or drop the line")
    try:
        return Pool(query_id=query_id, query=text, candidates=tuple(found))
    except InvalidData as error:
        raise InvalidData(f"{where}: {error}") from error


def _candidate(record: Any, *, where: str) -> Candidate:
    if not isinstance(record, dict):
        raise InvalidData(f"{where}: an object with 'docid', 'score' and 'doc' is wanted, this is {record!r}")
    doc, score, routes = record.get("doc"), record.get("score"), record.get("routes") or {}
    if not isinstance(doc, dict | str):
        raise InvalidData(f"{where}: no document under 'doc'; pools carry their texts")
    if not isinstance(routes, dict) or not all(isinstance(hit, dict) for hit in routes.values()):
        raise InvalidData(f"{where}: 'routes' is not an object of objects with 'score' and 'rank'")
    return Candidate(
        doc_id=identifier(record, ("docid", *DOC_ID_FIELDS), where=where),
        text=document_text(doc, where=where),
        score=None if score is None else finite(score, what="score", where=where),
        routes=MappingProxyType({name: _hit(hit, name=name, where=where) for name, hit in routes.items()}),
    )


def _hit(hit: Mapping[str, Any], *, name: str, where: str) -> RouteHit:
    rank = hit.get("rank")
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise InvalidData(f"{where}: route '{name}' has rank {rank!r}, a whole number is wanted")
    return RouteHit(score=finite(hit.get("score"), what=f"score of route '{name}'", where=where), rank=rank)


def _best(hits: Sequence[RunHit], depth: int) -> list[RunHit]:
    return sorted(hits, key=lambda hit: (-hit.score, hit.doc_id))[:depth]


def _texts(corpus: Mapping[str, str] | Iterable[tuple[str, str]], needed: set[str]) -> dict[str, str]:
    if isinstance(corpus, Mapping):
        return {doc_id: corpus[doc_id] for doc_id in needed if doc_id in corpus}
    texts: dict[str, str] = {}
    for doc_id, text in corpus:
        if doc_id not in needed:
            continue
        if doc_id in texts:
            raise InvalidData(f"the corpus holds document '{doc_id}' twice; keep one of them")
        texts[doc_id] = text
    return texts


def _report_missing(best: Mapping[str, Sequence[RunHit]], texts: Mapping[str, str], *, missing: Missing) -> None:
    wanted = {hit.doc_id: None for hits in best.values() for hit in hits}
    gone = [doc_id for doc_id in wanted if doc_id not in texts]
    if not gone:
        return
    what = f"{len(gone)} of the run's {len(wanted)} documents have no text in the corpus ({_some(gone)})"
    if len(gone) == len(wanted):
        raise InvalidData(f"{what}; run and corpus are of different collections")
    if missing == "error":
        raise InvalidData(f"{what}; give the corpus the run was made on, or skip missing texts")
    logger.warning("%s; they are left out", what)


def _some(ids: Sequence[str], most: int = 5) -> str:
    """The first few ids, quoted."""
    return ", ".join(f"'{i}'" for i in ids[:most]) + (", …" if len(ids) > most else "")
