"""Candidate pools of a collection, from nothing: index what is not indexed, search, fuse, write, check, evaluate.

    python pipelines/build_pools.py --config pipelines/configs/pools_scifact.yaml
    python pipelines/build_pools.py --config pipelines/configs/pools_nevir.yaml --pairs ../shared/data/nevir/test.jsonl

The config is one of `pd-rerank pool`; paths in it are relative to the working folder. With `--pairs` the corpus, topics
and qrels it names are written from labelled pairs first, and the pools are held against the pairs. The report goes to
stdout and to `<output>-report.json`.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pd_rerank import Pool, read_pools
from pd_rerank.config import PoolSettings, RouteSettings, load
from pd_rerank.evaluation.pairs import Direction, coverage, designate, first_stage, read_pairs
from pd_rerank.evaluation.preference import pair_outcomes, population, position, strict_preference
from pd_rerank.evaluation.ranking import measure
from pd_rerank.files import read_json, whole_file, write_json, write_jsonl
from pd_rerank.retrieval.encoders import load_encoder
from pd_rerank.retrieval.health import in_words
from pd_rerank.retrieval.hybrid import fusion_of, open_job, qrels_of, runs_of
from pd_rerank.retrieval.indexing import index_bm25, index_dense, index_sparse

METRICS = ("nDCG@10", "R@100")


def main() -> None:
    args = arguments()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("pd_rerank").setLevel(logging.INFO)
    settings = load(PoolSettings, file=args.config, given={"output": args.output})
    clock = Clock()
    directions = [] if args.pairs is None else lay_out(args.pairs, settings)
    for name, route in settings.routes.items():
        index_if_absent(route, settings)
        clock.note(f"index {name}")
    job = open_job(settings, overwrite=args.overwrite)
    if not job.finished:
        clock.note("read topics and runs")
        job.search(on_queries=lambda route, n: clock.note(f"search {route}"))
        clock.note("search")
        job.write(qrels=qrels_of(settings), keep_hits=True)
        clock.note("fuse, fetch texts, check, write")
    pools = read_pools(job.folder)
    report = {
        "health": read_json(job.folder / "manifest.json")["health"],
        "quality": quality(pools, settings, args.compare),
        "pairs": against_pairs(pools, directions) if directions else None,
        "seconds": clock.stages,
    }
    write_json(job.folder.with_name(f"{job.folder.name}-report.json"), report)
    tables = (report["quality"], report["pairs"], report["seconds"])
    print("\n\n".join([in_words(report["health"]), *(table(rows) for rows in tables if rows)]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--pairs", type=Path, help="labelled pairs (JSONL) to make corpus, topics and qrels of")
    parser.add_argument("--output", type=Path, help="pool folder, in place of the config's")
    parser.add_argument(
        "--compare", nargs="*", default=[], metavar="METHOD", help="other fusions to evaluate: rrf, mnz, …"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace pools of other settings")
    return parser.parse_args()


class Clock:
    """Wall and CPU seconds of each stage, from the end of the one before."""

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, float]] = {}
        self._last = self._now()

    def note(self, stage: str) -> None:
        """Count the time since the last note for `stage`."""
        now = self._now()
        spent = self.stages.setdefault(stage, {"wall": 0.0, "cpu": 0.0})
        for name in spent:
            spent[name] = round(spent[name] + now[name] - self._last[name], 2)
        self._last = now

    @staticmethod
    def _now() -> dict[str, float]:
        return {"wall": time.perf_counter(), "cpu": time.process_time()}


def lay_out(pairs: Path, settings: PoolSettings) -> list[Direction]:
    """Write the corpus, topics and qrels of labelled pairs; a passage's id is made of its text, so of nothing else."""
    directions = read_pairs(pairs)
    passages = {text for d in directions for text in (d.preferred, d.other)}
    ids = {text: f"p{hashlib.sha256(text.encode()).hexdigest()[:12]}" for text in passages}
    if settings.corpus is None or settings.topics is None or settings.qrels is None:
        raise SystemExit("--pairs are written to the config's corpus, topics and qrels: name all three")
    write_jsonl(settings.corpus, [{"_id": ids[text], "text": text} for text in sorted(passages, key=ids.__getitem__)])
    write_jsonl(settings.topics, ({"qid": d.direction_id, "text": d.query} for d in directions))
    with whole_file(settings.qrels) as stream:
        stream.writelines(f"{d.direction_id} 0 {ids[d.preferred]} 1\n" for d in directions)
    return directions


def index_if_absent(route: RouteSettings, settings: PoolSettings) -> None:
    """Make a route's index from the corpus, with the route's encoder, where there is none."""
    if route.index is None or Path(route.index).exists() or settings.corpus is None:
        return
    if route.type == "bm25":
        index_bm25(settings.corpus, route.index, threads=settings.threads)
        return
    names = ("query_prefix", "pooling", "l2_norm", "max_length", "batch_size")
    options = {name: getattr(route, name) for name in names if getattr(route, name) is not None}
    if route.encoder is None:
        raise SystemExit(f"the index {route.index} is not there, and no encoder is named to make it with")
    if route.type == "dense":
        index_dense(settings.corpus, route.index, encoder=load_encoder(route.encoder, kind="dense", **options))
    else:
        index_sparse(settings.corpus, route.index, encoder=load_encoder(route.encoder, kind="sparse", **options))


def quality(pools: Sequence[Pool], settings: PoolSettings, compare: Sequence[str]) -> dict[str, dict[str, float]]:
    """Mean metrics over the judged queries: of each route, of the fusion, and of the same hits fused otherwise."""
    qrels, runs = qrels_of(settings), runs_of(pools)
    if qrels is None:
        return {}
    ranked = {name: {q: list(hits) for q, hits in run.items()} for name, run in runs.items()}
    ranked["fusion"] = {pool.query_id: list(pool.doc_ids) for pool in pools}
    for method in compare:
        bare = {
            n: route.model_copy(update={"threshold": None, "transform": None}) for n, route in settings.routes.items()
        }
        fusion = fusion_of(settings.model_copy(update={"method": method, "routes": bare}))
        ranked[method] = {q: ranking.doc_ids for q, ranking in fusion.fuse(runs).items()}
    judged = {q: grades for q, grades in qrels.items() if any(grade > 0 for grade in grades.values())}
    means = {name: measure(judged, run, METRICS).mean(axis=0) for name, run in ranked.items()}
    return {name: dict(zip(METRICS, map(float, values), strict=True)) for name, values in means.items()}


def against_pairs(pools: Sequence[Pool], directions: Sequence[Direction]) -> dict[str, Any]:
    """What the pools hold of the pairs, and which passage each route and the fusion prefer, strictly compared."""
    cases = designate(directions, pools)
    rows: dict[str, Any] = {}
    for name in ("fusion", *runs_of(pools)):
        scores = {p.query_id: first_stage(p) if name == "fusion" else route_scores(p, name) for p in pools}
        outcomes = population(pair_outcomes(cases, [scores[str(case.query_id)] for case in cases]))
        preference, place = strict_preference(outcomes), position(outcomes, top=20)
        rows[name] = {
            "strict": preference.strict,
            "paired": preference.paired,
            "ties": preference.model_tie,
            "MRR": place.mrr,
            "both_in_top20": place.both_in_top,
        }
    return {"coverage": asdict(coverage(cases)), **rows}


def route_scores(pool: Pool, route: str) -> Any:
    """A route's scores in pool order, nan where it did not find the candidate."""
    import numpy as np

    return np.array([c.routes[route].score if route in c.routes else np.nan for c in pool.candidates])


def table(rows: Mapping[str, Mapping[str, Any]] | None) -> str:
    """Rows of numbers as lines of text."""

    def shown(value: Any) -> str:
        return f"{value:.4f}" if isinstance(value, float) else str(value)

    lines = [f"{name:12} " + "  ".join(f"{k} {shown(v)}" for k, v in row.items()) for name, row in (rows or {}).items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
