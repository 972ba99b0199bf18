"""`pd-rerank demo`: what the order of arrival does to a reranker, and what undoes it, shown on a few passages."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from pd_rerank.errors import BadArgument, EngineFailure

if TYPE_CHECKING:
    import numpy.typing as npt
    from rich.console import Console
    from rich.table import Table

    from pd_rerank.engines.base import Engine
    from pd_rerank.pool import Pool
    from pd_rerank.prompt import GradePrompt
    from pd_rerank.scores import Scores
    from pd_rerank.scoring import Scoring

logger = logging.getLogger("pd_rerank")

PLAIN_WIDTH, WIDTH = 80, 100
"""The width of what is printed where stdout is no terminal, and the widest on one."""

SIGN_OF_LIFE_S = 20.0
"""Seconds between two lines on progress where stderr is no terminal."""

FEW = 3
"""Arrival orders for the rows other than the first, and those shown side by side."""

GIVEN, SINGLE = "round-robin, as given", "window=1, one by one"

SHOWN = 8
"""Documents listed one by one."""


def demo(
    model: Annotated[
        str, typer.Option(help="Short name, folder or hub id; 'fake' shows the tables without a model.")
    ] = "smollm2-135m",
    adapter: Annotated[str | None, typer.Option(help="LoRA adapter, folder or hub id.")] = None,
    engine: Annotated[str, typer.Option(help="hf, or fake: the same as --model fake.")] = "hf",
    queries: Annotated[int, typer.Option(min=1, max=8, help="Queries of the demo data.")] = 2,
    candidates: Annotated[int, typer.Option(min=2, max=24, help="Candidates per query, the first stage's best.")] = 16,
    presentations: Annotated[
        int, typer.Option(min=2, max=100, help="Arrival orders to try; the average is over half of them.")
    ] = 10,
    window_size: Annotated[int, typer.Option(min=1, help="Candidates in one prompt; 20 in earnest.")] = 10,
    seed: Annotated[int, typer.Option(help="Seed of the first arrival order.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the figures to this file, as JSON.")
    ] = None,
) -> None:
    """Show what the order of arrival does to ranks, scores and decisions, and what undoes it.

    The same queries and passages reach the reranker in several shuffled orders. Nothing else changes, so
    whatever changes in the answers is the order's doing. Takes two to six minutes on two CPU cores.
    """
    from rich.console import Console

    from pd_rerank.embedded import ADAPTERS
    from pd_rerank.engines import ENGINES, load_engine
    from pd_rerank.files import write_json
    from pd_rerank.prompt import GradePrompt

    if json_file is not None and json_file.is_dir():
        raise BadArgument(f"--json {json_file} is a folder; name a file")
    if engine not in ENGINES:
        raise BadArgument(f"unknown engine '{engine}'; choose one of {', '.join(ENGINES)}")
    fake = "fake" in (model, engine)
    if fake and adapter is not None:
        raise BadArgument("the fake model takes no --adapter; name the model the adapter was made for")
    started = time.perf_counter(), time.process_time()
    if fake:
        logger.info("no model: the fake grades by word overlap and leans towards the end of a prompt")
        reader = load_engine("fake", engine="fake", position_bias=0.6)
    else:
        logger.info("loading %s", model)
        reader = load_engine(model, adapter=adapter)
    prompt = GradePrompt(reader.tokenizer)
    card = getattr(reader, "adapter_card", None)
    if card:
        prompt.check_card(card, where=f"adapter '{adapter}'")
    figures = measure(
        reader,
        prompt,
        queries=queries,
        candidates=candidates,
        presentations=presentations,
        window=window_size,
        seed=seed,
    )
    own = f"{model}-passages"
    if adapter is None and not fake and own in ADAPTERS:
        logger.info("loading %s with its adapter %s", model, own)
        trained = load_engine(model, adapter=own)
        figures["training"] = training(
            reader, trained, own, queries=queries, candidates=candidates, orders=min(FEW, presentations), seed=seed
        )
    figures["seconds"] = {
        "wall": round(time.perf_counter() - started[0], 1),
        "cpu": round(time.process_time() - started[1], 1),
    }
    if json_file is not None:
        write_json(json_file, figures)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it: no name of a model is worth a failure
    out = Console(highlight=False, markup=False, emoji=False)
    out.width = min(out.width, WIDTH) if out.is_terminal else PLAIN_WIDTH
    show(figures, out)


# -- figures ------------------------------------------------------------------------------------------------


def measure(
    engine: Engine,
    prompt: GradePrompt,
    *,
    queries: int,
    candidates: int,
    presentations: int,
    window: int,
    seed: int,
) -> dict[str, Any]:
    """Score the demo's pools under several arrival orders in five ways, and compare; plain values, as for JSON."""
    import numpy as np

    from pd_rerank.evaluation.presentations import strict_ranks
    from pd_rerank.scoring import Scoring
    from pd_rerank.windows import permutation

    pools, qrels, twins = demo_data()
    pools = [replace(pool, candidates=pool.candidates[:candidates]) for pool in pools[:queries]]
    grades = [np.array([qrels[pool.query_id][d] for d in pool.doc_ids]) for pool in pools]
    orders = [permutation(candidates, seed=seed + k) for k in range(presentations)]
    few, half = orders[:FEW], presentations // 2
    ways: list[tuple[str, Scoring, list[npt.NDArray[np.int64]]]] = [
        (GIVEN, Scoring(window=window), orders),
        ("contiguous, as given", Scoring(window=window, partition="contiguous"), few),
        ('order="canonical"', Scoring(window=window, order="canonical"), few),
        (SINGLE, Scoring(window=1), few),
    ]
    rows: list[dict[str, Any]] = []
    by_way: list[list[Scores]] = []
    with _Progress(sum(len(used) for _, _, used in ways) * queries * candidates) as bar:
        for label, scoring, used in ways:
            clock = time.process_time()
            scores = _scores(pools, used, engine=engine, prompt=prompt, scoring=scoring, bar=bar)
            spent = (time.process_time() - clock) / (len(used) * queries)
            by_way.append(scores)
            rows.append({"way": label, **_compare(pools, scores, grades), "cpu_seconds_per_query": spent})
    # Two averages are over disjoint presentations, as those of two callers are; the orders are halved in several ways.
    halves = [np.roll(np.arange(2 * half), -r).reshape(2, half) for r in range(half)]
    averages = [np.concatenate([s[pair].mean(axis=1) for pair in halves]) for s in by_way[0]]
    pairs = [(i, i + 1) for i in range(0, 2 * half, 2)]
    rows.insert(
        2,
        {
            "way": f"average, presentations={half}",
            **_compare(pools, averages, grades, pairs=pairs),
            "cpu_seconds_per_query": half * rows[0]["cpu_seconds_per_query"],
        },
    )
    first, ids = by_way[0][0], pools[0].doc_ids
    ranks = strict_ranks(first, ids)
    return {
        "engine": engine.describe(),
        "settings": {
            "queries": queries,
            "candidates": candidates,
            "presentations": presentations,
            "averaged": half,
            "window": window,
            "seed": seed,
            "template": prompt.hash,
        },
        "rows": rows,
        "example": {
            "query": pools[0].query,
            "texts": dict(zip(ids, pools[0].texts, strict=True)),
            "top": [
                [
                    {
                        "docid": ids[i],
                        "grade": int(grades[0][i]),
                        "arrived": int(np.flatnonzero(order == i)[0]) + 1,
                        "score": float(scores[i]),
                    }
                    for i in np.argsort(ranked)[:5].tolist()
                ]
                for order, scores, ranked in zip(few, first, ranks, strict=False)
            ],
            "documents": _documents(ids, grades[0], first, ranks + 1, threshold=rows[0]["threshold"]),
        },
        "quality": {
            "first_stage_ndcg10": float(np.mean([_ndcg_as_listed(g) for g in grades])),
            "random_ndcg10": float(np.mean([_ndcg_of_chance(g) for g in grades])),
            **_twins(pools, by_way[0], twins),
        },
    }


def training(
    bare: Engine, trained: Engine, adapter: str, *, queries: int, candidates: int, orders: int, seed: int
) -> dict[str, Any]:
    """The demo's pools under `orders` arrival orders by a model without and with its adapter, in the adapter's prompt.

    Both read windows as wide as the adapter was trained on; plain values, as for JSON.
    """
    import numpy as np

    from pd_rerank.prompt import GradePrompt
    from pd_rerank.scoring import Scoring
    from pd_rerank.windows import permutation

    card = getattr(trained, "adapter_card", None) or {}
    pools, qrels, _ = demo_data()
    pools = [replace(pool, candidates=pool.candidates[:candidates]) for pool in pools[:queries]]
    grades = [np.array([qrels[pool.query_id][d] for d in pool.doc_ids]) for pool in pools]
    arrivals = [permutation(candidates, seed=seed + k) for k in range(orders)]
    scoring = Scoring(window=card["window"], partition=card["partition"])
    rows = []
    with _Progress(2 * orders * queries * candidates) as bar:
        for label, engine in (("bare model", bare), ("with adapter", trained)):
            prompt = GradePrompt(engine.tokenizer, rubric=adapter)
            clock = time.process_time()
            scores = _scores(pools, arrivals, engine=engine, prompt=prompt, scoring=scoring, bar=bar)
            spent = (time.process_time() - clock) / (orders * queries)
            rows.append({"way": label, **_compare(pools, scores, grades), "cpu_seconds_per_query": spent})
    return {"adapter": adapter, "window": card["window"], "orders": orders, "rows": rows}


def demo_data() -> tuple[list[Pool], dict[str, dict[str, int]], dict[str, tuple[str, str]]]:
    """The demo's pools, its grades per query and document, and per query its twins: (better, worse)."""
    from pd_rerank.files import read_jsonl
    from pd_rerank.pool import read_pools

    with resources.as_file(resources.files("pd_rerank") / "demo") as folder:
        pools = read_pools(folder / "pools.jsonl")
        qrels: dict[str, dict[str, int]] = {}
        for _, line in read_jsonl(folder / "qrels.jsonl"):
            qrels.setdefault(line["qid"], {})[line["docid"]] = line["grade"]
        twins = {line["qid"]: (line["docid"], line["twin"]) for _, line in read_jsonl(folder / "twins.jsonl")}
    return pools, qrels, twins


def _scores(
    pools: Sequence[Pool],
    orders: Sequence[npt.NDArray[Any]],
    *,
    engine: Engine,
    prompt: GradePrompt,
    scoring: Scoring,
    bar: _Progress,
) -> list[Scores]:
    """Per pool the scores (arrivals, n): row = the order its list arrived in, column = candidate in pool order."""
    import numpy as np

    from pd_rerank.scoring import score_pools

    windows = -(-len(orders[0]) // scoring.window)
    out = [np.empty((len(orders), len(pool))) for pool in pools]
    for k, order in enumerate(orders):
        # A call for each arrival order, as a caller's would come: an engine computes equal prompts of one call once.
        tables = score_pools(
            [replace(pool, candidates=tuple(pool.candidates[i] for i in order)) for pool in pools],
            engine=engine,
            prompt=prompt,
            scoring=scoring,
            progress=lambda done: bar.advance(done * len(orders[0]) / windows),
        )
        for scores, table in zip(out, tables, strict=True):
            if table.fallback.any():
                raise EngineFailure(
                    f"'{engine.name}' gave no grade for {int(table.fallback.sum())} of {len(order)} candidates of "
                    f"query '{table.query_id}'; pd-rerank doctor --model shows why"
                )
            scores[k, order] = table.mean()
    return out


def _compare(
    pools: Sequence[Pool],
    scores: Sequence[Scores],
    grades: Sequence[npt.NDArray[Any]],
    *,
    pairs: Sequence[tuple[int, int]] | None = None,
) -> dict[str, Any]:
    """What changes between two rows of scores, averaged over `pairs` of rows (default: all) and over the queries."""
    import numpy as np

    from pd_rerank.evaluation.presentations import strict_ranks
    from pd_rerank.evaluation.stability import jaccard_matrix, kendall_matrix, ndcg_by_presentation

    threshold = float(np.median(np.concatenate([s[0] for s in scores])))
    change: list[float] = []
    tau: list[float] = []
    overlap: list[float] = []
    top: list[bool] = []
    ndcg: list[float] = []
    for pool, table, graded in zip(pools, scores, grades, strict=True):
        ranks = strict_ranks(table, pool.doc_ids)
        ndcg += ndcg_by_presentation(ranks, graded).tolist()
        taus, overlaps, first = kendall_matrix(ranks), jaccard_matrix(table >= threshold), ranks.argmin(axis=1)
        for a, b in pairs or combinations(range(len(table)), 2):
            change.append(float(np.abs(table[a] - table[b]).mean()))
            tau.append(float(taus[a, b]))
            overlap.append(float(overlaps[a, b]))
            top.append(bool(first[a] != first[b]))
    return {
        "pairs": len(change),
        "threshold": threshold,
        "score_sd": float(np.mean([s.std(axis=1).mean() for s in scores])),
        "mean_score_change": float(np.mean(change)),
        "kendall_tau": float(np.mean(tau)),
        "retained_overlap": float(np.mean(overlap)),
        "top1_changes": int(np.sum(top)),
        "ndcg10": float(np.mean(ndcg)),
    }


def _documents(
    ids: Sequence[str],
    grades: npt.NDArray[Any],
    scores: Scores,
    ranks: npt.NDArray[Any],
    *,
    threshold: float,
) -> list[dict[str, Any]]:
    """Per document, in first-stage order: range of score and of rank over the arrival orders, how often it is kept."""
    return [
        {
            "docid": doc_id,
            "grade": int(grades[i]),
            "score": [float(scores[:, i].min()), float(scores[:, i].max())],
            "rank": [int(ranks[:, i].min()), int(ranks[:, i].max())],
            "kept": int((scores[:, i] >= threshold).sum()),
        }
        for i, doc_id in enumerate(ids)
    ]


def _twins(pools: Sequence[Pool], scores: Sequence[Scores], twins: Mapping[str, tuple[str, str]]) -> dict[str, int]:
    """How often the better of two passages alike in wording scores strictly higher, over queries and arrival orders."""
    better = total = 0
    for pool, table in zip(pools, scores, strict=True):
        place = {doc_id: i for i, doc_id in enumerate(pool.doc_ids)}
        good, bad = twins[pool.query_id]
        if good in place and bad in place:
            better += int((table[:, place[good]] > table[:, place[bad]]).sum())
            total += len(table)
    return {"better_twin_higher": better, "twin_trials": total}


def _ndcg_as_listed(grades: npt.NDArray[Any]) -> float:
    """nDCG@10 of candidates in the order of their judged grades here."""
    import numpy as np

    from pd_rerank.evaluation.stability import ndcg_by_presentation

    return float(ndcg_by_presentation(np.arange(len(grades))[None], grades)[0])


def _ndcg_of_chance(grades: npt.NDArray[Any]) -> float:
    """The expected nDCG@10 of a random order: its mean over the n rotations, in which each rank sees each candidate."""
    import numpy as np

    from pd_rerank.evaluation.stability import ndcg_by_presentation

    places = np.arange(len(grades))
    return float(ndcg_by_presentation((places[:, None] + places) % len(grades), grades).mean())


class _Progress:
    """Candidates graded so far, on stderr: a bar on a terminal, elsewhere a line now and then; nothing with --quiet."""

    def __init__(self, total: int) -> None:
        from tqdm import tqdm

        heard = logger.isEnabledFor(logging.INFO)
        self._bar = tqdm(total=total, unit="candidate", desc="grading", disable=None if heard else True, leave=False)
        self._lines = heard and self._bar.disable  # tqdm has found that stderr is no terminal
        self._total = total
        self._done = 0.0
        self._said = time.monotonic()

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self, candidates: float) -> None:
        """Add to the candidates graded; parts of one are kept until they make a whole."""
        self._done += candidates
        whole = int(self._done + 1e-6)
        self._bar.update(whole - self._bar.n)
        if self._lines and time.monotonic() - self._said >= SIGN_OF_LIFE_S:
            logger.info("graded %d of %d candidates", whole, self._total)
            self._said = time.monotonic()


# -- tables -------------------------------------------------------------------------------------------------


class Signs(NamedTuple):
    """What a bar of ranks and a cut text are drawn with."""

    out_of_range: str = "·"
    in_range: str = "█"
    cut: str = "…"


def signs(encoding: str) -> Signs:
    """Signs that can be written in `encoding`."""
    try:
        "".join(Signs()).encode(encoding)
    except UnicodeEncodeError:
        return Signs(".", "#", "...")
    return Signs()


def show(figures: Mapping[str, Any], out: Console) -> None:
    """Print what `measure` and `training` found, as tables and what they mean."""
    settings, example, quality = figures["settings"], figures["example"], figures["quality"]
    n, orders = settings["candidates"], settings["presentations"]
    out.print(
        f"{figures['engine']['model']}: {settings['queries']} of the demo's queries, {n} candidates each, in windows "
        f"of up to {settings['window']}, in {orders} arrival orders. Nothing but the order changes."
    )
    out.print(
        f"\n1. The top five of one query in {len(example['top'])} of the orders: {example['query']}\n"
        "(#: place of arrival; judged: the judged grade, 0 to 3; last: the score the model gave)\n"
    )
    _show_top(example, out)
    out.print(
        f"\n2. Its first {min(SHOWN, n)} passages over the {orders} orders: where each scored, ranked, was kept\n"
    )
    _show_documents(example, settings, out)
    out.print(
        "\n3. What changes between two arrival orders: the mean over all pairs of orders, all queries\n"
        "An average is compared with one over other orders. Averaging makes changes smaller, but it cannot rank by "
        "what a model does not see.\n"
    )
    _show_rows(figures["rows"], out)
    out.print(
        "\nScore change: how far a document's score moves. SD of scores: how far apart the scores of one order lie "
        "(their standard deviation), to hold that change against. Kept: score at or above the median of that row's "
        "first arrival order. Overlap: shared members over all members of the two kept sets. CPU: to score a query "
        "once that way. A bare 0 or 1 is exact, not rounded."
    )
    by_way = {row["way"]: row for row in figures["rows"]}
    out.print(
        f"\nnDCG@10: {by_way[GIVEN]['ndcg10']:.2f} as given, {by_way[SINGLE]['ndcg10']:.2f} with window=1, "
        f"{quality['random_ndcg10']:.2f} for a random order, {quality['first_stage_ndcg10']:.2f} for the first stage "
        f"(BM25). Of two passages alike but for the point, the better one scored higher in "
        f"{quality['better_twin_higher']} of {quality['twin_trials']} arrivals.\n"
        "Read this as a picture of order, not of quality: over so few queries these numbers say little, and off the "
        "shelf a model as small as smollm2-135m knows little of relevance and much of position. Canonical order and "
        "window=1 make the answer independent of arrival; relevance takes a larger model or an adapter (--model, "
        "--adapter)."
    )
    if "training" in figures:
        _show_training(figures["training"], quality, out)
    if "seconds" in figures:
        out.print(
            f"Time, loading included: {figures['seconds']['wall']:.0f} s, {figures['seconds']['cpu']:.0f} s of CPU."
        )


def _show_top(example: Mapping[str, Any], out: Console) -> None:
    table = _table()
    table.add_column("rank", justify="right")
    for k in range(len(example["top"])):
        table.add_column(f"arrival order {k + 1}")
    room = (out.width - len("rank")) // len(example["top"]) - _GAP
    for rank in range(len(example["top"][0])):
        cells = []
        for best in example["top"]:
            hit = best[rank]
            text = _beginning(example["texts"][hit["docid"]], room, out)
            cells.append(f"{text}\n  #{hit['arrived']}, judged {hit['grade']}, {hit['score']:.3f}")
        table.add_row(str(rank + 1), *cells)
    out.print(table)


def _show_documents(example: Mapping[str, Any], settings: Mapping[str, Any], out: Console) -> None:
    n, drawn = settings["candidates"], signs(out.encoding)
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "judged\ngrade": lambda d: str(d["grade"]),
        "score,\nmin to max": lambda d: f"{d['score'][0]:.3f} to {d['score'][1]:.3f}",
        "rank": lambda d: f"{d['rank'][0]}-{d['rank'][1]}",
        f"ranks 1 to {n}": lambda d: (
            drawn.out_of_range * (d["rank"][0] - 1)
            + drawn.in_range * (d["rank"][1] - d["rank"][0] + 1)
            + drawn.out_of_range * (n - d["rank"][1])
        ),
        "kept": lambda d: f"{d['kept']}/{settings['presentations']}",
    }
    rows = [[cell(d) for cell in columns.values()] for d in example["documents"][:SHOWN]]
    table = _table()
    table.add_column("passage")
    for name in columns:
        table.add_column(name, justify="left" if name.startswith("ranks") else "right", no_wrap=True)
    widths = [max(map(len, (*name.splitlines(), *(row[c] for row in rows)))) for c, name in enumerate(columns)]
    room = out.width - sum(widths) - _GAP * len(widths)
    for document, cells in zip(example["documents"], rows, strict=False):
        table.add_row(_beginning(example["texts"][document["docid"]], room, out), *cells)
    out.print(table)


def _show_training(figures: Mapping[str, Any], quality: Mapping[str, Any], out: Console) -> None:
    out.print(
        f"\n4. What training does: {figures['adapter']}, an adapter that comes with this package, beside the bare "
        f"model, both in the adapter's own short prompt and windows of {figures['window']}, in {figures['orders']} "
        "arrival orders\n"
    )
    _show_rows(figures["rows"], out, {"nDCG\n@10": lambda row: _decimals(row["ndcg10"], 2)})
    out.print(
        f"\nA random order has nDCG@10 {quality['random_ndcg10']:.2f}. Half an hour of training on one core, on other "
        "text, taught it something of what a passage is about. It is not trained to be consistent: what it decides "
        "still moves with the order. Its card says what it was trained on and how good it is there."
    )


def _show_rows(
    rows: Sequence[Mapping[str, Any]],
    out: Console,
    first: Mapping[str, Callable[[Mapping[str, Any]], str]] | None = None,
) -> None:
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        **(first or {}),
        "score\nchange": lambda row: _decimals(row["mean_score_change"], 4),
        "SD of\nscores": lambda row: _decimals(row["score_sd"], 4),
        "Kendall\ntau": lambda row: _decimals(row["kendall_tau"], 3),
        "overlap\nof kept": lambda row: _decimals(row["retained_overlap"], 3),
        "first\nchanged": lambda row: f"{row['top1_changes']} of {row['pairs']}",
        "CPU s\na query": lambda row: f"{row['cpu_seconds_per_query']:.1f}",
    }
    table = _table()
    table.add_column("how the list is scored")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row["way"], *(cell(row) for cell in columns.values()))
    out.print(table)


_GAP = 2
"""Columns between two cells."""


def _table() -> Table:
    """A table with a rule of hyphens under its head, `_GAP` between cells and nothing around them."""
    from rich.box import Box
    from rich.table import Table

    rule = Box("    \n    \n -- \n    \n    \n -- \n    \n    \n", ascii=True)
    return Table(box=rule, show_edge=False, pad_edge=False, collapse_padding=True)


def _decimals(value: float, digits: int) -> str:
    """A number to so many decimals; exact 0 and 1 without any, so that they are told from rounded ones."""
    return str(int(value)) if value in (0.0, 1.0) else f"{value:.{digits}f}"


def _beginning(text: str, room: int, out: Console) -> str:
    """As much of a text as there is room for, at least a word or two."""
    room = max(12, min(28, room))
    cut = signs(out.encoding).cut
    return text if len(text) <= room else f"{text[: room - len(cut)].rstrip()}{cut}"
