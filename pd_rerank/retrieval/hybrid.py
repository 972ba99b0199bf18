"""Candidate pools from several routes: search each, join, fuse, put the texts in, write the folder whole.

What a route found is kept in shards beside the output folder, each whole or absent, under a name made of all its hits
depend on. An interrupted job goes on after the last one and ends with the same files.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pd_rerank.errors import BadArgument, InvalidData, MissingResource, PdRerankError
from pd_rerank.files import (
    RunHit,
    clear_left_overs,
    read_json,
    read_jsonl,
    read_qrels,
    read_run,
    read_topics,
    sha256_file,
    sha256_json,
    write_json,
    write_jsonl,
    write_run,
)
from pd_rerank.pool import Candidate, Pool, RouteHit, write_pools, write_pools_file
from pd_rerank.retrieval.corpus import documents
from pd_rerank.retrieval.fusion import (
    NEVIR_DEPTHS,
    NEVIR_PAPER,
    Fusion,
    Ranking,
    RanxFusion,
    ReciprocalRank,
    RouteRule,
    Run,
    WeightedFusion,
)
from pd_rerank.retrieval.health import check_pools, problems
from pd_rerank.retrieval.searchers import fetch_texts, open_searcher, open_texts
from pd_rerank.retrieval.texts import folded
from pd_rerank.retrieval.weights import Weights, with_weights

if TYPE_CHECKING:
    from pd_rerank.config import PoolSettings, RouteSettings
    from pd_rerank.retrieval.searchers import Texts

logger = logging.getLogger("pd_rerank")

DEPTH = 100
"""Hits per route and query where nothing else is said."""

_MANIFEST, _SOURCE = "manifest.json", "source.json"
_OUTPUT = ("pools.jsonl", _MANIFEST)

OnQueries = Callable[[str, int], None]
"""Called with a route's name and how many more of its queries are searched."""


class Hit(Protocol):
    """A document found and its score."""

    @property
    def doc_id(self) -> str:
        """The document's id."""
        ...

    @property
    def score(self) -> float:
        """The route's score; higher is better."""
        ...


class Searcher(Protocol):
    """What can be asked for the best documents of texts: those of `searchers`, or anything with `search`."""

    def search(self, queries: Sequence[str], k: int) -> Sequence[Sequence[Hit]]:
        """The best `k` documents of each query."""
        ...


class Source(Protocol):
    """Where a route's hits come from."""

    def key(self) -> dict[str, Any]:
        """What its hits depend on, as plain values, known without opening it."""
        ...

    def hits(self, queries: Mapping[str, str], k: int) -> list[Sequence[Hit]]:
        """The best `k` documents of each query, given as texts by id."""
        ...

    def describe(self) -> dict[str, Any]:
        """What it turned out to be once opened: encoder, versions."""
        ...


@dataclass(frozen=True, slots=True)
class RunSource:
    """A TREC run as a route: no index, no Java."""

    path: Path
    _run: dict[str, list[RunHit]] = field(default_factory=dict, compare=False)

    def key(self) -> dict[str, Any]:
        """What its hits depend on: the file's content."""
        if not self.path.is_file():
            raise MissingResource(f"no run file {self.path}")
        return {"type": "run", "path": str(self.path), "sha256": sha256_file(self.path)}

    def hits(self, queries: Mapping[str, str], k: int) -> list[Sequence[Hit]]:
        """The run's best `k` documents of each query, by id."""
        return [self._read().get(query_id, [])[:k] for query_id in queries]

    def check(self, queries: Iterable[str]) -> None:
        """Refuse a run with queries that are not among `queries`."""
        known = set(queries)
        unknown = [query_id for query_id in self._read() if query_id not in known]
        if unknown:
            raise InvalidData(
                f"{len(unknown)} of the {len(self._read())} queries of {self.path} are not in the topics "
                f"({_some(unknown)}); give the topics the run was made with"
            )

    def describe(self) -> dict[str, Any]:
        """How much there is."""
        return {"queries": len(self._read())}

    def _read(self) -> dict[str, list[RunHit]]:
        if not self._run:
            self._run.update(read_run(self.path))
        return self._run


class SearchSource:
    """A searcher as a route, opened when something is left to search.

    `open` makes the searcher, `depends_on` says what its hits depend on: where that is unchanged, shards are reused.
    """

    def __init__(self, open: Callable[[], Searcher], *, depends_on: Mapping[str, Any]) -> None:
        self._open = open
        self._depends_on = dict(depends_on)
        self._searcher: Searcher | None = None

    @property
    def searcher(self) -> Searcher:
        """The searcher, opened."""
        if self._searcher is None:
            self._searcher = self._open()
        return self._searcher

    def key(self) -> dict[str, Any]:
        """What its hits depend on."""
        return dict(self._depends_on)

    def hits(self, queries: Mapping[str, str], k: int) -> list[Sequence[Hit]]:
        """The best `k` documents of each query."""
        return list(self.searcher.search(list(queries.values()), k))

    def describe(self) -> dict[str, Any]:
        """What the searcher says of itself."""
        describe = getattr(self.searcher, "describe", None)
        return dict(describe()) if describe is not None else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A named way to candidates, and how many of its hits go into a pool."""

    name: str
    source: Source
    depth: int = DEPTH

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise BadArgument(f"route '{self.name}': depth must be at least 1, got {self.depth}")
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise BadArgument(f"route name '{self.name}' holds more than letters, digits, '_', '-' and '.'; rename it")


# -- the job ------------------------------------------------------------------------------------------------


class PoolJob:
    """One set of queries, routes and one fusion, and one folder for the pools.

    A folder that holds pools of other settings is refused, with those that differ, unless `overwrite`. `texts` gives
    documents' texts by id; a share of documents without text above `missing_limit` stops the job, below it they are
    left out and counted. `fold_texts` makes one candidate of documents whose texts differ in case, white space or
    Unicode form only: the smallest id stands for all, in every pool alike. Judged documents that no route found are
    never put in.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        queries: Mapping[str, str],
        routes: Sequence[Route],
        fusion: Fusion,
        texts: Texts,
        fold_texts: bool = False,
        missing_limit: float = 0.0,
        shard_size: int = 256,
        settings: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> None:
        if not routes:
            raise BadArgument("pools need at least one route")
        if len({route.name for route in routes}) < len(routes):
            raise BadArgument(f"two routes have one name ({', '.join(route.name for route in routes)}); rename one")
        if not queries:
            raise InvalidData("there are no queries to make pools of")
        self.folder = Path(folder)
        self.queries = queries
        self.routes = routes
        self.fusion = fusion
        self.texts = texts
        self.fold_texts = fold_texts
        self.missing_limit = missing_limit
        self.work = self.folder.with_name(f"{self.folder.name}.hits")
        ids = list(queries)
        self._blocks = [{q: queries[q] for q in ids[i : i + shard_size]} for i in range(0, len(ids), shard_size)]
        self._keys = {route.name: {"depth": route.depth, **route.source.key()} for route in routes}
        self.settings = _plain(
            {
                **(settings or {}),
                "queries_sha256": sha256_json(list(queries.items())),
                "shard_size": shard_size,
                "routes": self._keys,
                "fusion": fusion.describe(),
                "fold_texts": fold_texts,
                "missing_limit": missing_limit,
            }
        )
        self._runs: dict[str, dict[str, dict[str, float]]] = {}
        self.finished = self._look(overwrite)

    def _look(self, overwrite: bool) -> bool:
        """Whether the folder holds these pools already; refuse it if it holds others."""
        if self.folder.exists() and not self.folder.is_dir():
            raise BadArgument(f"{self.folder} is a file; name a folder for the pools")
        if not self.folder.exists():
            return False
        if foreign := sorted(entry.name for entry in self.folder.iterdir() if entry.name not in _OUTPUT):
            raise BadArgument(f"{self.folder} holds '{foreign[0]}', which is no part of a pool folder; name another")
        if overwrite or not (self.folder / _MANIFEST).exists():
            return False
        record = read_json(self.folder / _MANIFEST)
        settings = record.get("settings") if isinstance(record, dict) else None
        differing = list(differences(settings or {}, self.settings))
        if differing:
            raise BadArgument(
                f"{self.folder} holds pools of other settings: {'; '.join(differing[:5])}"
                f"{f'; and {len(differing) - 5} more' if len(differing) > 5 else ''}; "
                "name another folder, remove this one, or overwrite it (pd-rerank pool --overwrite)"
            )
        if sha256_file(self.folder / "pools.jsonl") != record.get("sha256", {}).get("pools.jsonl"):
            raise InvalidData(f"{self.folder / 'pools.jsonl'} is not what {_MANIFEST} records; overwrite the pools")
        return True

    # -- searching ----------------------------------------------------------------------------------------------

    def shards(self, route: Route) -> Path:
        """The folder of a route's shards: its name holds a hash of all the hits depend on."""
        key = {name: self.settings[name] for name in ("queries_sha256", "shard_size")} | self._keys[route.name]
        return self.work / f"{route.name}-{sha256_json(key)[:12]}"

    def todo(self) -> int:
        """How many queries are still to be searched, over all routes."""
        return sum(
            len(block)
            for route in self.routes
            for i, block in enumerate(self._blocks)
            if not self._shard(route, i).exists()
        )

    def _shard(self, route: Route, i: int) -> Path:
        return self.shards(route) / f"{i:06d}.jsonl"

    def search(self, *, on_queries: OnQueries | None = None) -> None:
        """Search what no shard holds yet; each shard is on disk before the next is begun.

        All routes that were never opened are opened first: what is wrong with the last shows before the first works.
        """
        for route in self.routes:
            folder = self.shards(route)
            for left_over in folder.glob(".*"):
                left_over.unlink()
            if not (folder / _SOURCE).exists():
                write_json(folder / _SOURCE, _plain(route.source.describe()))
        for route in self.routes:
            found: dict[str, dict[str, float]] = {}
            for i in range(len(self._blocks)):
                held = self._held(route, i)
                if held is None:
                    self._search(route, i, on_queries)
                    held = self._held(route, i)
                    assert held is not None
                found |= held
            self._runs[route.name] = found

    def _search(self, route: Route, i: int, on_queries: OnQueries | None) -> None:
        block = self._blocks[i]
        found = route.source.hits(block, route.depth)
        if len(found) != len(block):
            raise InvalidData(f"route '{route.name}' answered {len(found)} of {len(block)} queries")
        lines = [_shard_line(q, hits, route) for q, hits in zip(block, found, strict=True)]
        write_jsonl(self._shard(route, i), lines)
        if on_queries is not None:
            on_queries(route.name, len(block))

    def _held(self, route: Route, i: int) -> dict[str, dict[str, float]] | None:
        """What a shard holds: scores by document, best first, by query; None where it is absent or damaged."""
        shard = self._shard(route, i)
        if not shard.exists():
            return None
        try:
            lines = [line for _, line in read_jsonl(shard)]
            held = {line["qid"]: dict(zip(line["docids"], line["scores"], strict=True)) for line in lines}
        except (InvalidData, KeyError, TypeError, ValueError) as error:
            logger.warning("%s is damaged (%s); its queries are searched again", shard, error)
            return None
        return held if list(held) == list(self._blocks[i]) else None

    @property
    def runs(self) -> dict[str, dict[str, dict[str, float]]]:
        """What the routes found, after `search`: scores by document, best first, by query, by route."""
        if len(self._runs) < len(self.routes):
            self.search()
        return self._runs

    # -- pools --------------------------------------------------------------------------------------------------

    def pools(self) -> tuple[list[Pool], dict[str, Any]]:
        """The pools, and counts: documents without text, documents folded into another."""
        runs = self.runs
        wanted = dict.fromkeys(d for run in runs.values() for hits in run.values() for d in hits)
        texts, missing = fetch_texts(
            self.texts,
            wanted,
            missing_limit=self.missing_limit,
            name=str(getattr(self.texts, "path", "the text index")),
            origin=lambda doc_id: f"'{doc_id}' of route '{_finder(runs, doc_id)}'",
        )
        if missing:
            logger.warning(
                "%d of %d documents have no text (%s); they are left out", len(missing), len(wanted), _some(missing)
            )
        stands_for = folded(texts) if self.fold_texts else {}
        counts: dict[str, Any] = {
            "documents": len(wanted),
            "missing_texts": len(missing),
            "folded_texts": len(stands_for),
        }
        if stands_for:
            logger.info("%d of %d documents repeat another's text and are folded into it", len(stands_for), len(wanted))
        kept, hits = _keep(runs, texts, stands_for)
        fused = self.fusion.fuse(kept, queries=list(self.queries))
        return [_pool(q, text, fused[q], hits, texts) for q, text in self.queries.items()], counts

    def write(
        self,
        *,
        record: Mapping[str, Any] | None = None,
        qrels: Mapping[str, Mapping[str, int]] | None = None,
        keep_hits: bool = False,
    ) -> tuple[list[Pool], dict[str, Any]]:
        """Write the pool folder from the shards and clear these away (unless `keep_hits`); return pools and manifest.

        `record` and a health report, on `qrels` where given, go into the manifest.
        """
        pools, counts = self.pools()
        report = check_pools(pools, qrels=qrels)
        for problem in problems(report):
            logger.warning("%s", problem)
        sources = {route.name: read_json(self.shards(route) / _SOURCE) for route in self.routes}
        about = {**(record or {}), "settings": self.settings, "sources": sources, **counts, "health": report}
        clear_left_overs(self.folder)
        write_pools(self.folder, pools, manifest=about)
        if not keep_hits:
            self._clear()
        return pools, read_json(self.folder / _MANIFEST)

    def _clear(self) -> None:
        for route in self.routes:
            shutil.rmtree(self.shards(route), ignore_errors=True)
        if self.work.is_dir() and not any(self.work.iterdir()):
            self.work.rmdir()


def _shard_line(query_id: str, hits: Sequence[Hit], route: Route) -> dict[str, Any]:
    ranked = sorted(hits, key=lambda hit: (-hit.score, hit.doc_id))[: route.depth]
    ids = [hit.doc_id for hit in ranked]
    if len(set(ids)) < len(ids):
        twice = next(doc_id for doc_id in ids if ids.count(doc_id) > 1)
        raise InvalidData(
            f"route '{route.name}' gave query '{query_id}' document '{twice}' twice; its index holds the id twice, "
            "make it again from a corpus where every id is there once"
        )
    for hit in ranked:
        if not math.isfinite(hit.score):
            raise InvalidData(f"route '{route.name}', query '{query_id}', document '{hit.doc_id}': score {hit.score}")
    return {"qid": query_id, "docids": ids, "scores": [float(hit.score) for hit in ranked]}


def _finder(runs: Mapping[str, Run], doc_id: str) -> str:
    """The first route that found a document."""
    return next(name for name, run in runs.items() if any(doc_id in hits for hits in run.values()))


def _keep(
    runs: Mapping[str, Run], texts: Mapping[str, str], stands_for: Mapping[str, str]
) -> tuple[dict[str, dict[str, dict[str, float]]], dict[str, dict[str, dict[str, RouteHit]]]]:
    """The hits that have a text, under the id that stands for them, as scores and with ranks; a route's best counts."""
    kept: dict[str, dict[str, dict[str, float]]] = {}
    ranked: dict[str, dict[str, dict[str, RouteHit]]] = {}
    for name, run in runs.items():
        kept[name] = {}
        for query_id, hits in run.items():
            mine: dict[str, float] = {}
            for rank, (found, score) in enumerate(hits.items(), 1):
                doc_id = stands_for.get(found, found)
                if found in texts and doc_id not in mine:
                    mine[doc_id] = score
                    ranked.setdefault(query_id, {}).setdefault(doc_id, {})[name] = RouteHit(score=score, rank=rank)
            kept[name][query_id] = mine
    return kept, ranked


def _pool(
    query_id: str,
    query: str,
    ranking: Ranking,
    hits: Mapping[str, Mapping[str, Mapping[str, RouteHit]]],
    texts: Mapping[str, str],
) -> Pool:
    routes = hits.get(query_id, {})
    found = zip(ranking.doc_ids, ranking.scores.tolist(), strict=True)
    candidates = [Candidate(doc_id=d, text=texts[d], score=score, routes=routes[d]) for d, score in found]
    return Pool(query_id=query_id, query=query, candidates=tuple(candidates))


# -- from and to runs -----------------------------------------------------------------------------------------


def runs_of(pools: Iterable[Pool]) -> dict[str, dict[str, dict[str, float]]]:
    """The runs of each route that pools were made of, best first; every run has every pool's query."""
    pools = list(pools)
    names = dict.fromkeys(name for pool in pools for c in pool.candidates for name in c.routes)
    found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in names}
    for pool in pools:
        for name in names:
            hits = [(c.routes[name].rank, c.doc_id, c.routes[name].score) for c in pool.candidates if name in c.routes]
            found[name][pool.query_id] = {doc_id: score for _, doc_id, score in sorted(hits)}
    return found


def write_pools_as_run(
    path: str | Path, pools: Iterable[Pool], *, route: str | None = None, tag: str = "pd_rerank"
) -> None:
    """Write the pools' ranking, or one route's, as a TREC run; candidates without a score are in pool order below.

    Where the pool's order and the scores disagree, the order rules, and scores are lowered to agree with it.
    """
    pools = list(pools)
    if route is None:
        write_run(path, ((pool.query_id, _falling(pool)) for pool in pools), tag=tag)
        return
    runs = runs_of(pools)
    if route not in runs:
        raise BadArgument(f"the pools have no route '{route}'; they have {', '.join(runs) or 'none'}")
    write_run(path, ((query_id, list(hits.items())) for query_id, hits in runs[route].items()), tag=tag)


def write_pools_as_jsonl(path: str | Path, pools: Iterable[Pool]) -> None:
    """Write pools as a file rank_llm reads; it wants a score of every candidate, so one without gets the one above."""
    write_pools_file(path, map(_scored, pools))


def _scored(pool: Pool) -> Pool:
    if all(c.score is not None for c in pool.candidates):
        return pool
    falling = zip(pool.candidates, _falling(pool), strict=True)
    return replace(pool, candidates=tuple(replace(c, score=score) for c, (_, score) in falling))


def _falling(pool: Pool) -> list[tuple[str, float]]:
    ranking: list[tuple[str, float]] = []
    below = 0.0
    for candidate in pool.candidates:
        below = candidate.score if candidate.score is not None and (not ranking or candidate.score < below) else below
        ranking.append((candidate.doc_id, below))
    return ranking


# -- from settings ---------------------------------------------------------------------------------------------


def open_job(settings: PoolSettings, *, overwrite: bool = False) -> PoolJob:
    """The job that settings describe; every file they name is looked at."""
    if settings.output is None:
        raise BadArgument("--output is missing: name a folder for the pools")
    if settings.topics is None:
        raise BadArgument("--topics is missing: name the file of the queries")
    topics = read_topics(settings.topics)
    queries = dict(list(topics.items())[: settings.max_queries])
    routes = [_route(name, route, settings) for name, route in settings.routes.items()]
    job = PoolJob(
        settings.output,
        queries=queries,
        routes=routes,
        fusion=fusion_of(settings),
        texts=_texts_of(settings, routes),
        fold_texts=settings.fold_texts,
        missing_limit=settings.missing_limit,
        shard_size=settings.shard_size,
        settings={"texts": _named(settings)},
        overwrite=overwrite,
    )
    for route in routes:
        if isinstance(route.source, RunSource) and not job.finished:
            route.source.check(topics)
    return job


def _named(settings: PoolSettings) -> dict[str, Any]:
    """Where texts come from, with what shows that it changed; a large corpus is not hashed for that."""
    if settings.corpus is None:
        return {"text_index": settings.text_index}
    return {
        "corpus": str(settings.corpus),
        "bytes": settings.corpus.stat().st_size if settings.corpus.exists() else None,
    }


def qrels_of(settings: PoolSettings) -> dict[str, dict[str, int]] | None:
    """The judgements that settings name, if any."""
    return None if settings.qrels is None else read_qrels(settings.qrels)


def weighted_of(settings: PoolSettings) -> WeightedFusion:
    """The weighted fusion that settings describe, whether or not it is the one they choose."""
    rules = {name: _rule(route, preset=settings.preset) for name, route in settings.routes.items()}
    weighted = WeightedFusion(rules=rules, precision=settings.precision)
    return weighted if settings.weights is None else with_weights(weighted, Weights.load(settings.weights))


def fusion_of(settings: PoolSettings) -> Fusion:
    """The fusion that settings describe; what would mean nothing to it is refused."""
    weighted = weighted_of(settings)
    if settings.method == "weighted":
        return weighted
    for name, route in settings.routes.items():
        if route.threshold is not None or route.transform is not None:
            raise BadArgument(
                f"route '{name}' has a threshold or transform, which mean nothing to method '{settings.method}'; "
                "leave them out or use method weighted"
            )
    weights = {name: rule.weight for name, rule in weighted.rules.items()}
    params = dict(settings.params)
    if settings.method == "rrf":
        if unknown := set(params) - {"k"}:
            raise BadArgument(f"rrf takes k, got {', '.join(sorted(unknown))}; a route's weight stands with the route")
        return ReciprocalRank(k=float(params.get("k", 60)), weights=weights)
    fusion = RanxFusion(method=settings.method.removeprefix("ranx:"), norm=settings.norm, params=params)
    if "weights" in fusion.takes and "weights" not in params:
        total = sum(weights.values()) or 1.0
        fusion = replace(fusion, params={**params, "weights": [weight / total for weight in weights.values()]})
    return fusion


def _rule(route: RouteSettings, *, preset: str | None) -> RouteRule:
    base = NEVIR_PAPER.get(route.type, RouteRule()) if preset == "nevir-paper" else RouteRule()
    return RouteRule(
        weight=base.weight if route.weight is None else route.weight,
        threshold=base.threshold if route.threshold is None else route.threshold,
        transform=route.transform or base.transform,
    )


def _route(name: str, route: RouteSettings, settings: PoolSettings) -> Route:
    depths = NEVIR_DEPTHS if settings.preset == "nevir-paper" else {}
    depth = route.depth or depths.get(route.type, DEPTH)
    if route.type == "run":
        assert route.path is not None
        return Route(name=name, source=RunSource(route.path), depth=depth)
    assert route.index is not None
    index, options = route.index, route.searcher_options()

    def open_index() -> Searcher:
        try:
            return open_searcher(route.type, index, threads=settings.threads, **options)
        except PdRerankError as error:
            raise type(error)(f"route '{name}': {error}") from error

    depends_on = {"type": route.type, "index": str(index), "index_sha256": _fingerprint(index), **options}
    return Route(name=name, source=SearchSource(open_index, depends_on=depends_on), depth=depth)


def _fingerprint(index: str) -> str | None:
    """A hash that changes with an index folder: of its manifest, else of its files' names and sizes."""
    folder = Path(index).expanduser()
    if (folder / _MANIFEST).is_file():
        return sha256_file(folder / _MANIFEST)
    if folder.is_dir():
        return sha256_json(sorted((path.name, path.stat().st_size) for path in folder.iterdir()))
    return None


def _texts_of(settings: PoolSettings, routes: Sequence[Route]) -> Texts:
    """Where texts come from: the corpus file, the text index, or the first route whose index stores them."""
    if settings.corpus is not None:
        return CorpusFile(settings.corpus)
    if settings.text_index is not None:
        index = settings.text_index
        return _LateTexts(lambda: open_texts(index))
    for route in routes:
        if isinstance(route.source, SearchSource) and settings.routes[route.name].type == "bm25":
            return _LateTexts(partial(getattr, route.source, "searcher"))
    raise BadArgument("nothing holds the texts: give --corpus (JSONL or TSV), --text-index, or a bm25 route")


@dataclass(frozen=True, slots=True)
class _LateTexts:
    open: Callable[[], Any]

    def texts(self, doc_ids: Iterable[str]) -> dict[str, str]:
        found: dict[str, str] = self.open().texts(doc_ids)
        return found


class CorpusFile:
    """The texts of a corpus file, JSONL or TSV, read once per call; an id that is there twice is refused."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise MissingResource(f"no corpus {path}")
        self.path = path

    def texts(self, doc_ids: Iterable[str]) -> dict[str, str]:
        """The texts of those of `doc_ids` that have one, by id."""
        wanted = set(doc_ids)
        seen: dict[str, str] = {}
        found: dict[str, str] = {}
        for document in documents(self.path):
            if document.doc_id not in wanted:
                continue
            if document.doc_id in seen:
                first = seen[document.doc_id]
                raise InvalidData(f"{document.where}: document '{document.doc_id}' was at {first} before; keep one")
            seen[document.doc_id] = document.where
            if document.text.strip():
                found[document.doc_id] = document.text
        return found


# -- small things ------------------------------------------------------------------------------------------------


def differences(there: Any, here: Any, name: str = "") -> Iterator[str]:
    """Name every setting whose values differ, as `name is … there, … here`."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in sorted({*there, *here}):
            yield from differences(there.get(key), here.get(key), f"{name}.{key}" if name else key)
    elif there != here:
        yield f"{name} is {_short(there)} there, {_short(here)} here"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:36]}…"


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, ensure_ascii=False, default=str))


def _some(ids: Sequence[str], most: int = 5) -> str:
    return ", ".join(f"'{i}'" for i in ids[:most]) + (", …" if len(ids) > most else "")
