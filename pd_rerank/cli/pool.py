"""`pd-rerank pool`: candidate pools from indexes and runs; their health; runs and rank_llm files to pools and back."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pd_rerank.cli import _CONTEXT, _EPILOG, flowing
from pd_rerank.cli.flags import flags
from pd_rerank.config import PoolSettings, load, read
from pd_rerank.errors import BadArgument, InvalidData, MissingResource

if TYPE_CHECKING:
    from pd_rerank.pool import Pool
    from pd_rerank.retrieval.hybrid import OnQueries, PoolJob

logger = logging.getLogger("pd_rerank")

_BUILD = """Make candidate pools: search every route, join, fuse, put the texts in, write the folder whole.

Routes (indexes to search, TREC runs) are listed in the config file; --run adds a run. The folder gets pools.jsonl, in
rank_llm's shape with every route's score and rank per candidate, and manifest.json with all that made it and a health
report. What is searched is kept in shards beside the folder: after an interruption the same command goes on where it
stopped, and ends with the same files. Settings of the config file and options below are one list; what is typed wins.
"""

pool = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    invoke_without_command=True,
    context_settings=_CONTEXT,
    epilog=_EPILOG,
    help=flowing(_BUILD),
)


def _command(function: Callable[..., None]) -> Callable[..., None]:
    """Register a sub-command under its name, with its docstring as help."""
    options: dict[str, Any] = {"epilog": _EPILOG, "context_settings": _CONTEXT}
    return pool.command(help=flowing(function.__doc__ or ""), **options)(function)


@pool.callback()
@flags(PoolSettings)
def build(
    ctx: typer.Context,
    config: Annotated[Path | None, typer.Option(help="YAML file with the routes and any of the options below.")] = None,
    run: Annotated[
        list[str] | None, typer.Option(help="NAME=PATH: a TREC run as a route. May be given several times.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace pools of other settings.")] = False,
    keep_hits: Annotated[
        bool, typer.Option("--keep-hits", help="Keep what was searched beside the folder, to fuse it otherwise later.")
    ] = False,
    validate_only: Annotated[
        bool, typer.Option("--validate-only", help="Check options, topics and runs, print counts as JSON and stop.")
    ] = False,
    progress: Annotated[
        bool | None,
        typer.Option(help="Progress bar on stderr. Default: where stderr is a terminal.", show_default=False),
    ] = None,
    **given: Any,
) -> None:
    """Build pools, unless a sub-command is called."""
    if ctx.invoked_subcommand is not None:
        return
    from pd_rerank.retrieval.hybrid import open_job, qrels_of

    settings = load(PoolSettings, file=config, given={**given, "routes": _with_runs(config, run)})
    for name in ("topics", "corpus", "qrels", "weights"):
        _there(getattr(settings, name), name)
    job = open_job(settings, overwrite=overwrite)
    qrels = qrels_of(settings)
    if validate_only:
        found = {"queries": len(job.queries), "routes": list(settings.routes), "to_search": job.todo()}
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    if job.finished:
        logger.info("%s is finished already, with these settings", job.folder)
        return
    start, left = time.monotonic(), job.todo()
    if left < len(job.queries) * len(job.routes):
        logger.info("going on: %d of %d searches are left", left, len(job.queries) * len(job.routes))
    try:
        with _bar(job, shown=progress) as on_queries:
            job.search(on_queries=on_queries)
    except KeyboardInterrupt:
        logger.error("interrupted; what was searched is kept in %s, run the same command again to go on", job.work)
        raise typer.Exit(130) from None
    record = {"seconds": {"search": round(time.monotonic() - start, 3)}}
    pools, manifest = job.write(record=record, qrels=qrels, keep_hits=keep_hits)
    logger.info("%d queries, %d candidates: %s", len(pools), manifest["candidates"], job.folder)


def _with_runs(config: Path | None, runs: list[str] | None) -> dict[str, Any] | None:
    """The routes of the config file with those of --run added; None where there are none of these."""
    if not runs:
        return None
    given = {} if config is None else read(PoolSettings, config)
    routes = dict(given.get("routes") or {})
    for word in runs:
        name, equals, path = word.partition("=")
        if not equals or not name or not path:
            raise BadArgument(f"--run {word}: write NAME=PATH, the route's name and its TREC run")
        if name in routes:
            raise BadArgument(f"--run {word}: there is a route '{name}' already; give it another name")
        routes[name] = {"type": "run", "path": path}
    return routes


def _there(path: Path | None, name: str) -> None:
    if path is not None and not path.exists():
        raise MissingResource(f"--{name}: no file or folder {path}")


@_command
def check(
    pools: Annotated[Path, typer.Option(help="Pool folder, or JSONL in rank_llm's shape.")],
    qrels: Annotated[Path | None, typer.Option(help="Judgements: recall ceiling, and whether ids meet.")] = None,
    corpus: Annotated[Path | None, typer.Option(help="JSONL or TSV: whether the pools are of this corpus.")] = None,
    relevant: Annotated[int, typer.Option(help="Grade from which a document is relevant.", min=1)] = 1,
    window_size: Annotated[int, typer.Option(help="Candidates per prompt, for the cost.", min=1)] = 20,
    presentations: Annotated[int, typer.Option(help="Presentations, for the cost.", min=1)] = 1,
    tokens_per_second: Annotated[float | None, typer.Option(help="A model's speed, for the seconds.")] = None,
    price_per_hour: Annotated[float | None, typer.Option(help="Of the machine, for the price.")] = None,
    for_queries: Annotated[
        int | None, typer.Option(help="Cost of so many queries with pools like these.", min=1)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Count tokens with this model's tokenizer, not four characters each.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")] = False,
) -> None:
    """Report what is wrong with pools, their recall ceiling, what each route adds, and what reranking them costs.

    Exits with 5 where ids of pools, judgements and corpus do not meet or an id has two texts; other problems are
    reported only.
    """
    from pd_rerank.files import read_qrels
    from pd_rerank.pool import read_pools
    from pd_rerank.retrieval.health import check_pools, faults, in_words

    for path, name in ((pools, "pools"), (qrels, "qrels"), (corpus, "corpus")):
        _there(path, name)
    report = check_pools(
        read_pools(pools),
        qrels=None if qrels is None else read_qrels(qrels),
        corpus_ids=None if corpus is None else _ids(corpus),
        relevant=relevant,
        window=window_size,
        presentations=presentations,
        count_tokens=None if model is None else _counter(model),
        tokens_per_second=tokens_per_second,
        price_per_hour=price_per_hour,
        for_queries=for_queries,
    )
    typer.echo(json.dumps(report, indent=2, ensure_ascii=False) if json_ else in_words(report))
    if found := faults(report):
        raise InvalidData("; ".join(found))


def _ids(corpus: Path) -> set[str]:
    from pd_rerank.retrieval.corpus import documents

    return {document.doc_id for document in documents(corpus)}


def _counter(model: str) -> Any:
    from pd_rerank._extras import need
    from pd_rerank.embedded import resolve_model

    transformers = need("transformers", extra="hf", purpose="--model counts tokens with a tokenizer of transformers")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_model(model))
    except OSError as error:
        raise MissingResource(f"no tokenizer for '{model}': {error}") from error
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


@_command
def convert(
    output: Annotated[Path, typer.Option(help="A folder for pools, or NAME.trec, or NAME.jsonl for rank_llm.")],
    pools: Annotated[Path | None, typer.Option(help="Pool folder, or JSONL in rank_llm's shape.")] = None,
    run: Annotated[Path | None, typer.Option(help="TREC run, with --corpus and --topics.")] = None,
    corpus: Annotated[Path | None, typer.Option(help="JSONL with the texts of the run's documents.")] = None,
    topics: Annotated[Path | None, typer.Option(help="Queries of the run.")] = None,
    hits: Annotated[int, typer.Option(help="Best hits of the run taken per query.", min=1)] = 100,
    route: Annotated[str | None, typer.Option(help="One route's ranking, instead of the fused one.")] = None,
    run_tag: Annotated[str, typer.Option(help="Last column of the run, one word.")] = "pd_rerank",
) -> None:
    """Turn pools into a TREC run or a rank_llm file, or a TREC run or a rank_llm file into pools."""
    from pd_rerank.files import read_corpus, read_run, read_topics
    from pd_rerank.pool import pools_from_run, read_pools, write_pools
    from pd_rerank.retrieval.hybrid import write_pools_as_jsonl, write_pools_as_run

    for path, name in ((pools, "pools"), (run, "run"), (corpus, "corpus"), (topics, "topics")):
        _there(path, name)
    made: list[Pool]
    if pools is not None:
        if run is not None or corpus is not None or topics is not None:
            raise BadArgument("--pools hold texts and queries already; leave out --run, --corpus, --topics")
        made = read_pools(pools)
    elif run is None or corpus is None or topics is None:
        raise BadArgument("nothing to convert: give --pools, or --run, --corpus and --topics")
    else:
        found = read_run(run)
        wanted = {hit.doc_id for ranked in found.values() for hit in ranked[:hits]}
        made = pools_from_run(found, read_topics(topics), read_corpus(corpus, wanted=wanted), depth=hits)
    if output.suffix in (".trec", ".run", ".txt"):
        write_pools_as_run(output, made, route=route, tag=run_tag)
    elif route is not None:
        raise BadArgument("--route is for a TREC run; name the output NAME.trec")
    elif output.suffix == ".jsonl":
        write_pools_as_jsonl(output, made)
    else:
        write_pools(output, made, manifest={"converted_from": str(pools or run)})
    logger.info("%d queries, %d candidates: %s", len(made), sum(map(len, made)), output)


@_command
def weights(
    pools: Annotated[Path, typer.Option(help="Pool folder with the routes' scores, of the dev queries.")],
    qrels: Annotated[Path, typer.Option(help="Judgements of the dev queries.")],
    test: Annotated[Path, typer.Option(help="Topics of the test queries: none of them may be among the dev queries.")],
    output: Annotated[Path, typer.Option(help="JSON file for the weights.")],
    config: Annotated[
        Path | None, typer.Option(help="Config of the pools: thresholds, transforms and precision. Default: none.")
    ] = None,
    metric: Annotated[str, typer.Option(help="ndcg@10, recall@100, mrr@10, …: the mean over dev queries.")] = "ndcg@10",
    steps: Annotated[int, typer.Option(help="Parts a whole is cut into; weights are multiples.", min=1)] = 20,
) -> None:
    """Find the weights of a weighted fusion on dev queries, by a grid over whole parts.

    The pools are those of dev queries; weights that were chosen on the queries they are tested on prove nothing, so
    a dev query that is among --test is refused. Use the file as 'weights:' of a pool config.
    """
    from pd_rerank.files import read_qrels, read_topics
    from pd_rerank.pool import read_pools
    from pd_rerank.retrieval.fusion import RouteRule, WeightedFusion
    from pd_rerank.retrieval.hybrid import runs_of, weighted_of
    from pd_rerank.retrieval.weights import search_weights

    for path, name in ((pools, "pools"), (qrels, "qrels"), (test, "test")):
        _there(path, name)
    runs = runs_of(read_pools(pools))
    if not runs:
        raise BadArgument(f"{pools} says of no candidate which route found it; build pools with 'pd-rerank pool'")
    fusion = (
        WeightedFusion(rules={name: RouteRule() for name in runs})
        if config is None
        else weighted_of(load(PoolSettings, file=config))
    )
    dev = next(iter(runs.values()))
    found = search_weights(
        runs, read_qrels(qrels), fusion=fusion, dev=list(dev), test=list(read_topics(test)), metric=metric, steps=steps
    )
    found.save(output)
    typer.echo(output.read_text(encoding="utf-8"), nl=False)


@contextmanager
def _bar(job: PoolJob, *, shown: bool | None) -> Iterator[OnQueries]:
    """A progress bar over searches on stderr: off with --quiet, and where stderr is no terminal unless asked for."""
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    wanted = sys.stderr.isatty() if shown is None else shown
    off = not wanted or not logger.isEnabledFor(logging.INFO)
    total = len(job.queries) * len(job.routes)
    with (
        logging_redirect_tqdm([logger]),
        tqdm(total=total, initial=total - job.todo(), unit="query", disable=off, file=sys.stderr) as bar,
    ):

        def on_queries(route: str, n: int) -> None:
            bar.set_description(route)
            bar.update(n)

        yield on_queries
