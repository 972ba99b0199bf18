"""Candidate pools of a collection, from nothing: index what is not indexed, search, fuse, write, check, evaluate.

    python pipelines/build_pools.py --config pipelines/configs/pools_dl20.yaml
    python pipelines/build_pools.py --config pipelines/configs/pools_nevir.yaml --pairs ../shared/data/nevir/test.jsonl

The config is one of `pd-rerank pool`; paths in it are relative to the working folder. The corpus it names is written
first from labelled pairs (`--pairs`, with topics and qrels; the pools are then held against the pairs), or from a file
whose sentences are glued together (`--respace`). `--dev` names the config of dev queries: their pools are built too,
and fusion weights and the parameters ranx learns are fitted on them. The report goes to stdout and to
`<output>-report.json`.
"""

from __future__ import annotations

import argparse
import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pd_rerank import Pool, read_pools
from pd_rerank.config import PoolSettings, load
from pd_rerank.evaluation.pairs import Direction, coverage, designate, first_stage, read_pairs
from pd_rerank.evaluation.preference import pair_outcomes, population, position, strict_preference
from pd_rerank.evaluation.ranking import measure
from pd_rerank.files import read_json, read_jsonl, write_json, write_jsonl
from pd_rerank.retrieval.fusion import Fusion, RanxFusion
from pd_rerank.retrieval.health import in_words
from pd_rerank.retrieval.hybrid import fusion_of, open_job, qrels_of, runs_of, weighted_of
from pd_rerank.retrieval.weights import search_weights, with_weights
from pd_rerank.studies.collections import index_if_absent, lay_out


def main() -> None:
    args = arguments()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("pd_rerank").setLevel(logging.INFO)
    settings = load(PoolSettings, file=args.config, given={"output": args.output})
    clock = Clock()
    directions = [] if args.pairs is None else read_pairs(args.pairs)
    if directions:
        lay_out(directions, settings)
    if args.respace is not None:
        respace(args.respace, settings)
    pools, health = build(settings, args, clock)
    fusions = {method: fused_by(method, settings) for method in args.compare}
    if args.dev is not None:
        fusions |= fitted(load(PoolSettings, file=args.dev), settings, pools, args)
    metrics = ("nDCG@10", f"R(rel={args.relevant})@100" if args.relevant > 1 else "R@100")
    report = {
        "health": health,
        "quality": quality(pools, settings, fusions, metrics),
        "thresholds": survivors(pools, settings),
        "pairs": against_pairs(pools, directions) if directions else None,
        "seconds": clock.stages,
    }
    write_json(beside(settings, "report"), report)
    tables = [report[name] for name in ("quality", "thresholds", "pairs", "seconds")]
    print("\n\n".join([in_words(health), *(table(rows) for rows in tables if rows)]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--pairs", type=Path, help="labelled pairs (JSONL) to make corpus, topics and qrels of")
    parser.add_argument("--respace", type=Path, help="corpus (JSONL) to put spaces back between the sentences of")
    parser.add_argument("--output", type=Path, help="pool folder, in place of the config's")
    parser.add_argument("--dtype", default="fp32", help="numbers documents are encoded in: fp32, bf16 (%(default)s)")
    parser.add_argument(
        "--compare", nargs="*", default=[], metavar="METHOD", help="other fusions to evaluate: rrf, mnz, …"
    )
    parser.add_argument("--dev", type=Path, help="config of the pools of dev queries, to fit weights on")
    parser.add_argument("--fit", nargs="*", default=[], metavar="METHOD", help="ranx methods to fit on --dev as well")
    parser.add_argument("--relevant", type=int, default=1, help="least grade that counts for recall (%(default)s)")
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


def respace(glued: Path, settings: PoolSettings) -> None:
    """Write the config's corpus from one whose sentences follow one another without a space.

    The space goes behind a full stop, question or exclamation mark that a capital letter follows.
    """
    if settings.corpus is None or settings.corpus == glued:
        raise SystemExit("--respace writes the config's corpus: name another file there")
    texts = ({**record, "text": re.sub(r"([.?!])(?=[A-Z])", r"\1 ", record["text"])} for _, record in read_jsonl(glued))
    write_jsonl(settings.corpus, texts)


def build(settings: PoolSettings, args: argparse.Namespace, clock: Clock) -> tuple[list[Pool], dict[str, Any]]:
    """Index what is not indexed and make the pools; they and their health."""
    for name, route in settings.routes.items():
        index_if_absent(route, settings, dtype=args.dtype)
        clock.note(f"index {name}")
    job = open_job(settings, overwrite=args.overwrite)
    clock.note("read topics and runs")
    if not job.finished:
        job.search(on_queries=lambda route, n: clock.note(f"search {route}"))
        clock.note("read shards")
        job.write(qrels=qrels_of(settings), keep_hits=True)
        clock.note("fuse, fetch texts, check, write")
    return read_pools(job.folder), read_json(job.folder / "manifest.json")["health"]


def beside(settings: PoolSettings, name: str) -> Path:
    """The file `<output>-<name>.json`."""
    assert settings.output is not None
    return settings.output.with_name(f"{settings.output.name}-{name}.json")


def fused_by(method: str, settings: PoolSettings) -> Fusion:
    """Another fusion of the config's routes: each counts alike and as it is."""
    plain = {"threshold": None, "transform": None, "weight": None}
    routes = {name: route.model_copy(update=plain) for name, route in settings.routes.items()}
    return fusion_of(settings.model_copy(update={"method": method, "routes": routes, "preset": None, "weights": None}))


def fitted(
    dev: PoolSettings, settings: PoolSettings, pools: Sequence[Pool], args: argparse.Namespace
) -> dict[str, Fusion]:
    """Fusions fitted on the pools of dev queries: the best weights, and the ranx methods asked for."""
    dev_pools, _ = build(dev, args, Clock())
    runs, qrels = runs_of(dev_pools), qrels_of(dev)
    if qrels is None:
        raise SystemExit(f"{args.dev} names no qrels to fit on")
    on, test = [pool.query_id for pool in dev_pools], [pool.query_id for pool in pools]
    weighted = weighted_of(settings)
    found = search_weights(runs, qrels, fusion=weighted, dev=on, test=test)
    found.save(beside(settings, "weights"))
    fusions: dict[str, Fusion] = {"fitted weights": with_weights(weighted, found.weights)}
    for method in args.fit:
        fusions[f"fitted {method}"] = RanxFusion(method=method).fit(runs, qrels, dev=on, test=test)
    return fusions


def quality(
    pools: Sequence[Pool], settings: PoolSettings, fusions: Mapping[str, Fusion], metrics: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Mean metrics over the judged queries: of each route, of the fusion, and of the same hits fused otherwise."""
    qrels, runs = qrels_of(settings), runs_of(pools)
    if qrels is None:
        return {}
    ranked = {name: {q: list(hits) for q, hits in run.items()} for name, run in runs.items()}
    ranked["fusion"] = {pool.query_id: list(pool.doc_ids) for pool in pools}
    for name, fusion in fusions.items():
        ranked[name] = {q: list(ranking.doc_ids) for q, ranking in fusion.fuse(runs).items()}
    judged = {q: grades for q, grades in qrels.items() if any(grade > 0 for grade in grades.values())}
    means = {name: measure(judged, run, metrics).mean(axis=0) for name, run in ranked.items()}
    return {name: dict(zip(metrics, map(float, values), strict=True)) for name, values in means.items()}


def survivors(pools: Sequence[Pool], settings: PoolSettings) -> dict[str, dict[str, float]]:
    """Per route with a threshold, what passes it; and the size of pools that would hold nothing else."""
    floors = {name: rule.threshold for name, rule in weighted_of(settings).rules.items() if rule.threshold is not None}
    if settings.method != "weighted" or not floors:
        return {}
    rows = {}
    for name, floor in floors.items():
        kept = [sum(hit.score >= floor for c in p.candidates if (hit := c.routes.get(name))) for p in pools]
        rows[name] = {"threshold": floor, "kept": float(np.mean(kept)), "queries_with_none": kept.count(0)}
    lowest = {name: floors.get(name, -np.inf) for name in settings.routes}
    sizes = [sum(any(hit.score >= lowest[n] for n, hit in c.routes.items()) for c in p.candidates) for p in pools]
    return {**rows, "pools": {"kept": float(np.mean(sizes)), "queries_with_none": sizes.count(0)}}


def against_pairs(pools: Sequence[Pool], directions: Sequence[Direction]) -> dict[str, Any]:
    """What the pools hold of the pairs, and which passage each route and the fusion prefer, strictly compared."""
    cases = designate(directions, pools)
    rows: dict[str, Any] = {}
    for name in ("fusion", *runs_of(pools)):
        scores = {p.query_id: first_stage(p) if name == "fusion" else route_scores(p, name) for p in pools}
        outcomes = population(pair_outcomes(cases, [scores[str(case.query_id)] for case in cases]))
        preference, place = strict_preference(outcomes), position(outcomes, top=20)
        rows[name] = {
            "n": preference.n,
            "strict": preference.strict,
            "ties": preference.model_tie,
            "both_directions": preference.both,
            "pairs": preference.complete_pairs,
            "paired": preference.paired,
            "MRR": place.mrr,
            "P@1": place.preferred_at[1],
            "both_in_top10": position(outcomes).both_in_top,
            "both_in_top20": place.both_in_top,
        }
    return {"coverage": asdict(coverage(cases)), **rows}


def route_scores(pool: Pool, route: str) -> Any:
    """A route's scores in pool order; what it did not find scores below all it found."""
    return np.array([c.routes[route].score if route in c.routes else -np.inf for c in pool.candidates])


def table(rows: Mapping[str, Mapping[str, Any]] | None) -> str:
    """Rows of numbers as lines of text."""

    def shown(value: Any) -> str:
        return f"{value:.4f}" if isinstance(value, float) else str(value)

    lines = [f"{name:16} " + "  ".join(f"{k} {shown(v)}" for k, v in row.items()) for name, row in (rows or {}).items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
