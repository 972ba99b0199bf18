"""`pd-rerank rerank`: a run or pools in; a run, results with grade probabilities, and scores out."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pd_rerank.cli.flags import flags
from pd_rerank.config import WHERE_NOT_WHAT, RerankSettings, load
from pd_rerank.errors import BadArgument, MissingResource, PdRerankError

if TYPE_CHECKING:
    from pd_rerank.decisions import Settle, Threshold
    from pd_rerank.engines.base import Engine
    from pd_rerank.job import OnWindows, RerankJob
    from pd_rerank.pool import Pool
    from pd_rerank.prompt import Prompt
    from pd_rerank.scores import SlotResidual
    from pd_rerank.scoring import Scoring

logger = logging.getLogger("pd_rerank")


class PartialResult(PdRerankError):
    """Some queries could not be scored; the others are written."""

    exit_code = 7


@flags(RerankSettings)
def rerank(
    config: Annotated[
        Path | None, typer.Option(help="YAML file with any of the options below as keys; what is typed wins.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Clear an earlier job's files from the folder.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print windows, prompts and estimated tokens as JSON and stop.")
    ] = False,
    validate_only: Annotated[
        bool, typer.Option("--validate-only", help="Check options and input, print counts as JSON and stop.")
    ] = False,
    progress: Annotated[
        bool | None,
        typer.Option(help="Progress bar on stderr. Default: where stderr is a terminal.", show_default=False),
    ] = None,
    **given: Any,
) -> None:
    """Rerank a TREC run or a set of pools with a model that grades many candidates in one prompt.

    The output folder gets run.trec, results.jsonl (grade probabilities, spread, rank per candidate), scores/ (every
    grade read, for evaluation) and manifest.json. Work is kept in shards: after an interruption the same command
    goes on where it stopped, and ends with the same files. Queries that cannot be scored are named, the others are
    written, and the exit code is 7.
    """
    work = Work(load(RerankSettings, file=config, given=given))
    run(work, overwrite=overwrite, dry_run=dry_run, validate_only=validate_only, progress=progress)


def run(work: Work, *, overwrite: bool, dry_run: bool, validate_only: bool, progress: bool | None) -> None:
    """Do what `rerank` was asked, wherever `work` has pools scored; `PartialResult` where queries failed."""
    if dry_run or validate_only:
        found = work.counts() | ({} if validate_only else work.estimate())
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    job = work.job(overwrite=overwrite)
    if job.finished:
        logger.info("%s is finished already, with these settings and pools", job.folder)
        return
    _report(job, finish(work, job, progress=progress))


def finish(work: Work, job: RerankJob, *, progress: bool | None, doing: str = "reranking") -> dict[str, Any]:
    """Score what is left of a job, write its results and return its manifest; after Ctrl-C say what is kept."""
    start, before = time.monotonic(), job.done
    if job.scored:
        logger.info("all %d queries are scored already; results are written from these scores", before)
    elif before:
        logger.info("going on after %d of %d queries", before, len(work.pools))
    try:
        if not job.scored:
            work.score(job, progress=progress, doing=doing)
    except KeyboardInterrupt:
        logger.error(
            "interrupted; %d of %d queries are kept in %s, run the same command again to go on",
            job.done,
            len(work.pools),
            job.folder,
        )
        raise typer.Exit(130) from None
    record = work.counts() | {"resumed_after": before, "seconds": round(time.monotonic() - start, 3)}
    if work.cost is not None:
        record |= {"server": work.settings.server, "cost": work.cost()}
    return job.write(record=record)


def _report(job: RerankJob, manifest: dict[str, Any]) -> None:
    """Say what came of it; raise `PartialResult` if queries failed."""
    for count, what in (
        (len(manifest["empty_pools"]), "queries had no candidates and have no lines in run.trec"),
        (manifest["without_grade"], "candidates got no grade; they are in results.jsonl with score null"),
        (manifest["documents_cut"], "documents were shortened to fit; 'cut' in results.jsonl says by how much"),
    ):
        if count:
            logger.warning("%d %s", count, what)
    if job.failed:
        some = ", ".join(f"'{query_id}'" for query_id in list(job.failed)[:5])
        reason = next(iter(job.failed.values()))
        raise PartialResult(
            f"{len(job.failed)} of {len(job.pools)} queries failed ({some}{', …' if len(job.failed) > 5 else ''}; "
            f"first: {reason}); the others are in {job.folder}, run the same command to try these again"
        )
    logger.info("%d queries, %d candidates: %s", manifest["queries"], manifest["candidates"], job.folder)


class Setup:
    """How pools are scored, without the pools: settings turned into what they name."""

    def __init__(self, settings: RerankSettings) -> None:
        from pd_rerank.prompt import MARKERS
        from pd_rerank.rubrics import load_rubric
        from pd_rerank.scoring import Scoring

        self.settings = settings
        if settings.residual is not None and not settings.residual.exists():
            raise MissingResource(f"--residual: no file or folder {settings.residual}")
        if settings.markers not in MARKERS:
            raise BadArgument(f"unknown markers '{settings.markers}'; choose one of {', '.join(MARKERS)}")
        self.rubric = load_rubric(settings.rubric)
        self.scoring: Scoring = Scoring(
            window=settings.window_size,
            partition=settings.partition,
            order=settings.order,
            presentations=settings.presentations,
            seed=settings.seed,
            shuffle=settings.shuffle,
            calibration=settings.calibration,
        )
        self.threshold = self._threshold()
        self.residual = self._residual()
        self.settle = self._settle()
        self.engine_options = settings.engine_options()

    def _threshold(self) -> Threshold | None:
        from pd_rerank.decisions import Threshold

        given, readout = self.settings.threshold, self.settings.readout
        return None if given is None else Threshold.of(given, readout)

    def _residual(self) -> SlotResidual | None:
        from pd_rerank.scores import SlotResidual

        if self.settings.residual is None:
            return None
        residual = SlotResidual.load(self.settings.residual)
        residual.check(readout=self.settings.readout, calibration=self.settings.calibration)
        return residual

    def _settle(self) -> Settle | None:
        from pd_rerank.decisions import Settle

        if not self.settings.settle:
            return None
        if self.threshold is not None:
            return Settle(threshold=self.threshold.value)
        return Settle(top_k=self.settings.top_k)

    def _prompt(self, tokenizer: Any) -> Prompt:
        from pd_rerank.prompt import ChatPrompt, GradePrompt

        settings = self.settings
        wording: dict[str, Any] = {
            "rubric": self.rubric,
            "instruction": settings.instruction,
            "markers": settings.markers,
            "max_doc_chars": settings.max_doc_chars,
        }
        if settings.engine == "generated":
            return ChatPrompt(**wording, reasons=bool(settings.reasons))
        return GradePrompt(
            tokenizer,
            **wording,
            placeholder=settings.placeholder,
            chat="auto" if settings.chat is None else settings.chat,
        )

    def open(self) -> tuple[Engine, Prompt]:
        """Load the engine and prove the prompt on its tokenizer."""
        from pd_rerank.decisions import scored_by
        from pd_rerank.engines import load_engine

        settings = self.settings
        engine = (
            self._generated()
            if settings.engine == "generated"
            else load_engine(settings.model, engine=settings.engine, **self.engine_options)
        )
        prompt = self._prompt(engine.tokenizer)
        card = getattr(engine, "adapter_card", None)
        if card:
            where = f"adapter '{self.settings.adapter}'"
            if self.settings.check_template:
                prompt.check_card(card, where=where)
            self.scoring.note_card(card, where=where)
        if self.threshold is not None and self.settings.check_template:
            self.threshold.check(scored_by(engine.describe(), prompt.describe(), self.scoring.describe()))
        return engine, prompt

    def _generated(self) -> Engine:
        """The engine that has grades written; its answers are kept in the output folder unless told otherwise."""
        from pd_rerank.engines.generated import GeneratedEngine

        options = self.engine_options | {"request": json.loads(self.engine_options.get("request", "{}"))}
        if "cache" not in options and self.settings.output is not None:
            named = {"model": self.settings.model, **{k: v for k, v in options.items() if k not in WHERE_NOT_WHAT}}
            digest = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()
            options["cache"] = self.settings.output / "answers" / digest[:12]
        return GeneratedEngine(self.settings.model, **options)


class Work(Setup):
    """Settings turned into what they name; making it finds every bad argument and missing file."""

    def __init__(self, settings: RerankSettings) -> None:
        for name in ("run", "corpus", "topics", "pools"):
            path = getattr(settings, name)
            if path is not None and not path.exists():
                raise MissingResource(f"--{name}: no file or folder {path}")
        if not settings.run_tag or any(c.isspace() for c in settings.run_tag):
            raise BadArgument(f"run tag {settings.run_tag!r} is empty or holds white space; use one word")
        super().__init__(settings)
        self.cost: Callable[[], dict[str, Any]] | None = None
        self.pools, self.missing_texts = self._pools()

    def _pools(self) -> tuple[list[Pool], int]:
        """The pools to score, and how many of the hits wanted had no text."""
        from pd_rerank.files import read_corpus, read_run, read_topics
        from pd_rerank.pool import pools_from_run, read_pools

        settings = self.settings
        if settings.pools is not None:
            return read_pools(settings.pools)[: settings.max_queries], 0
        assert settings.run is not None
        assert settings.topics is not None
        assert settings.corpus is not None
        topics = read_topics(settings.topics)
        run = read_run(settings.run)
        if settings.max_queries is not None:
            kept = list(topics)[: settings.max_queries]
            run = {query_id: hits for query_id, hits in run.items() if query_id in kept or query_id not in topics}
            topics = {query_id: topics[query_id] for query_id in kept}
        depth = settings.hits or 100
        wanted = {hit.doc_id for hits in run.values() for hit in hits[:depth]}
        logger.debug("reading the texts of %d documents from %s", len(wanted), settings.corpus)
        corpus = read_corpus(settings.corpus, wanted=wanted)
        pools = pools_from_run(run, topics, corpus, depth=depth, missing=settings.missing)
        asked = sum(min(len(hits), depth) for hits in run.values())
        return pools, asked - sum(map(len, pools))

    def counts(self) -> dict[str, Any]:
        """What there is to score, and where it came from."""
        paths = {name: getattr(self.settings, name) for name in ("run", "corpus", "topics", "pools")}
        return {
            "inputs": {name: str(path) for name, path in paths.items() if path is not None},
            "queries": len(self.pools),
            "candidates": sum(map(len, self.pools)),
            "empty_pools": [pool.query_id for pool in self.pools if not len(pool)],
            "missing_texts": self.missing_texts,
        }

    def estimate(self) -> dict[str, Any]:
        """What scoring would take, without a model: exact where its tokenizer is at hand, else by characters."""
        from pd_rerank.engines.fake import FakeTokenizer
        from pd_rerank.job import count_tokens, windows_of

        tokenizer = self._tokenizer()
        prompt = self._prompt(tokenizer or FakeTokenizer())
        longest = min(self.settings.max_length or 10**9, getattr(tokenizer, "model_max_length", 10**9))
        found = count_tokens(
            self.pools,
            tokenizer=tokenizer or FakeTokenizer(),
            prompt=prompt,
            scoring=self.scoring,
            max_length=longest if tokenizer else 4 * longest,
        )
        if tokenizer is None:
            found |= {name: -(-found[name] // 4) for name in ("tokens", "longest_prompt")}
        return {
            "windows": sum(windows_of(pool, self.scoring) for pool in self.pools),
            **found,
            "tokens_counted_by": "tokenizer" if tokenizer else "characters / 4",
        }

    def _tokenizer(self) -> Any:
        """The model's tokenizer where it can be had without fetching anything, else None."""
        from pd_rerank.embedded import local_folder
        from pd_rerank.engines.fake import FakeTokenizer

        if self.settings.engine == "fake":
            return FakeTokenizer()
        if self.settings.engine == "generated":
            return None
        folder = local_folder(self.settings.model)
        if folder is None or not Path(folder, "tokenizer_config.json").is_file() or not find_spec("transformers"):
            return None
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def job(self, *, overwrite: bool) -> RerankJob:
        """The job in its folder, compared with what is there."""
        from pd_rerank.files import SCORED_WITH, versions
        from pd_rerank.job import RerankJob

        settings = self.settings
        if settings.output is None:
            raise BadArgument("--output is missing: name a folder for the results")
        return RerankJob(
            self.pools,
            settings.output,
            scoring=self.scoring,
            readout=settings.readout,
            residual=self.residual,
            threshold=self.threshold,
            settle=self.settle,
            shard_size=settings.shard_size,
            tag=settings.run_tag,
            top_k=settings.top_k,
            overwrite=overwrite,
            settings={
                "model": settings.model,
                "engine_name": settings.engine,
                "engine_options": {k: v for k, v in self.engine_options.items() if k not in WHERE_NOT_WHAT},
                "prompt_options": {
                    "rubric": asdict(self.rubric),
                    "instruction": settings.instruction,
                    "markers": settings.markers,
                    "placeholder": settings.placeholder,
                    "max_doc_chars": settings.max_doc_chars,
                    "chat": settings.chat,
                    **({} if settings.reasons is None else {"reasons": settings.reasons}),
                },
                "scoring": self.scoring.describe(),
                "versions": versions(SCORED_WITH),
            },
        )

    def score(self, job: RerankJob, *, progress: bool | None, doing: str) -> None:
        """Load the engine and score what is left of the job."""
        engine, prompt = self.open()
        self.cost = getattr(engine, "cost", None)
        with progress_bar(job, shown=progress, doing=doing) as on_windows:
            job.score(engine=engine, prompt=prompt, on_windows=on_windows)


@contextmanager
def progress_bar(job: RerankJob, *, shown: bool | None, doing: str) -> Iterator[OnWindows]:
    """A progress bar over windows on stderr: off with --quiet, and where stderr is no terminal unless asked for."""
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    wanted = (sys.stderr is not None and sys.stderr.isatty()) if shown is None else shown
    off = not wanted or not logger.isEnabledFor(logging.INFO)
    with (
        logging_redirect_tqdm([logger]),
        tqdm(
            total=job.windows_total,
            initial=job.windows_done,
            desc=doing,
            unit="window",
            disable=off,
            file=sys.stderr,
        ) as bar,
    ):

        def on_windows(n: int) -> None:
            bar.update(n)

        yield on_windows
