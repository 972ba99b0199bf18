"""Collections of labelled pairs: laid out as corpus and topics, indexed, searched, fused, and read back."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from pd_rerank.config import PoolSettings, RouteSettings, load
from pd_rerank.errors import BadArgument
from pd_rerank.evaluation.pairs import Direction
from pd_rerank.files import read_json, whole_file, write_jsonl
from pd_rerank.pool import Pool, read_pools
from pd_rerank.retrieval.encoders import load_encoder
from pd_rerank.retrieval.fusion import RouteRule
from pd_rerank.retrieval.hybrid import open_job, qrels_of, weighted_of
from pd_rerank.retrieval.indexing import index_bm25, index_dense, index_sparse


def lay_out(directions: Sequence[Direction], settings: PoolSettings) -> None:
    """Write the corpus, topics and qrels of labelled pairs; a passage's id is made of its text, so of nothing else."""
    if settings.corpus is None or settings.topics is None or settings.qrels is None:
        raise BadArgument("pairs are laid out as the config's corpus, topics and qrels: name all three")
    for name, path in (("corpus", settings.corpus), ("topics", settings.topics)):
        if path.suffix.lower() == ".tsv":
            raise BadArgument(f"{name}: pairs are laid out as JSON lines; give {path} the ending .jsonl")
    passages = {text for d in directions for text in (d.preferred, d.other)}
    ids = {text: passage_id(text) for text in passages}
    write_jsonl(settings.topics, ({"qid": d.direction_id, "text": d.query} for d in directions))
    with whole_file(settings.qrels) as stream:
        stream.writelines(f"{d.direction_id} 0 {ids[d.preferred]} 1\n" for d in directions)
    # Last, since its absence is what has the rest made.
    write_jsonl(settings.corpus, [{"_id": ids[text], "text": text} for text in sorted(passages, key=ids.__getitem__)])


def passage_id(text: str) -> str:
    """The id of a passage that has none: p and the first 12 digits of its text's SHA-256."""
    return f"p{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"


def index_if_absent(route: RouteSettings, settings: PoolSettings, *, dtype: str = "fp32") -> None:
    """Make a route's index from the corpus, with the route's encoder, where there is none."""
    if route.index is None or Path(route.index).exists() or settings.corpus is None:
        return
    if route.type == "bm25":
        index_bm25(settings.corpus, route.index, threads=settings.threads)
        return
    names = ("query_prefix", "pooling", "l2_norm", "max_length", "batch_size")
    options = {name: getattr(route, name) for name in names if getattr(route, name) is not None}
    options["dtype"] = dtype
    if route.encoder is None:
        raise BadArgument(f"the index {route.index} is not there, and no encoder is named to make it with")
    if route.type == "dense":
        index_dense(settings.corpus, route.index, encoder=load_encoder(route.encoder, kind="dense", **options))
    else:
        index_sparse(settings.corpus, route.index, encoder=load_encoder(route.encoder, kind="sparse", **options))


def pools_of(
    config: Path, directions: Sequence[Direction], *, say: Callable[[str], None] = lambda _: None
) -> tuple[list[Pool], dict[str, RouteRule]]:
    """The pools of a collection, and the rules they were fused by.

    `config` is one of `pd-rerank pool` (.yaml): what of corpus, topics, indexes and pools is not there is made, the
    corpus of the pairs' own passages where the config's is missing. Or it is a pool folder or file, which is read as
    it is; the rules are then those its manifest records, else plain ones for the routes it has.
    """
    if config.suffix.lower() not in (".yaml", ".yml"):
        pools = read_pools(config)
        return pools, _recorded_rules(config, pools)
    settings = load(PoolSettings, file=config)
    if settings.corpus is not None and not settings.corpus.exists():
        say(f"laying out {len(directions)} directions as {settings.corpus}")
        lay_out(directions, settings)
    for name, route in settings.routes.items():
        say(f"route {name}")
        index_if_absent(route, settings)
    job = open_job(settings)
    if not job.finished:
        job.search(on_queries=lambda route, n: say(f"route {route}: {n} queries"))
        job.write(qrels=qrels_of(settings), keep_hits=True)
    return read_pools(job.folder), dict(weighted_of(settings).rules)


def _recorded_rules(place: Path, pools: Sequence[Pool]) -> dict[str, RouteRule]:
    recorded = place / "manifest.json"
    if place.is_dir() and recorded.is_file():
        fusion = read_json(recorded).get("settings", {}).get("fusion", {})
        if isinstance(fusion.get("rules"), dict):
            return {name: RouteRule(**rule) for name, rule in fusion["rules"].items()}
    return {name: RouteRule() for name in sorted({name for p in pools for c in p.candidates for name in c.routes})}
