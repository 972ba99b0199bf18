"""Train an order-consistent adapter, or one of the arms it is compared with.

    accelerate launch train/ocsft.py --config train/configs/passages.yaml
    python train/ocsft.py --config train/configs/cpu-small-passages.yaml

`accelerate launch --num_processes 8` shares each step's windows among eight processes; the same windows make the same
step in one. With `--shard-base` they share the frozen base too. Precision is the settings', not accelerate's. After an
interruption the same command goes on, with the losses it would have had without one. Exit codes are those of
`pd-rerank`, 7 for collapsed scores; `accelerate launch` makes them 1.
"""

from __future__ import annotations

import datetime
import logging
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from pd_rerank import GradePrompt, HFEngine, Pool, Scoring, read_pools, read_qrels
from pd_rerank._extras import need
from pd_rerank.cli import program
from pd_rerank.cli.flags import flags
from pd_rerank.config import TrainSettings, load
from pd_rerank.engines.adapters import fingerprint, open_adapter
from pd_rerank.errors import BadArgument, EngineFailure, InvalidData, MissingExtra, PdRerankError
from pd_rerank.files import sha256_json, whole_file
from pd_rerank.pool import pools_sha256
from pd_rerank.rubrics import load_rubric
from pd_rerank.training.adapters import AdapterCard, save_adapter
from pd_rerank.training.checkpoints import RunFolder, read_state, restore, state_of
from pd_rerank.training.examples import Examples, Recipe, epoch_order, relevant_by_slot
from pd_rerank.training.labels import Labels, read_labels
from pd_rerank.training.losses import LOSSES, Fit, Terms, as_difference, inverse_propensity, means, total
from pd_rerank.training.schedules import learning_rate, ramp
from pd_rerank.training.selection import (
    Choice,
    Evaluation,
    choose,
    evaluate_heldout,
    evaluation_line,
    evaluation_table,
    frontier_picture,
    read_evaluations,
    table_text,
    write_evaluations,
)
from pd_rerank.training.sharding import SharedBase
from pd_rerank.training.student import Average, Lora, Student, load_student
from pd_rerank.windows import view_seed

logger = logging.getLogger("pd_rerank")


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What is trained on, and what is held out to measure by."""

    pools: list[Pool]
    labels: Labels
    heldout: tuple[list[Pool], dict[str, dict[str, int]]] | None

    def check(self, settings: TrainSettings) -> None:
        """Refuse queries that are in both; warn of an average over one order."""
        held = {pool.query_id for pool in self.heldout[0]} if self.heldout else set()
        if both := held & {pool.query_id for pool in self.pools}:
            raise InvalidData(
                f"{len(both)} queries are trained on and held out, first '{min(both)}'; hold out queries of their own"
            )
        if settings.targets == "averaged" and self.labels.presentations == 1:
            logger.warning(
                "--targets averaged (recipe %s): labels of one order have nothing to average, so these are the "
                "single-order targets; label with --presentations 2 or more",
                settings.recipe,
            )

    def describe(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        teacher = {name: self.labels.manifest.get(name) for name in ("teacher_model_id", "teacher_protocol")}
        found = {"pools_sha256": pools_sha256(self.pools), "labels": teacher | {"sha256": self.labels.sha256()}}
        if self.heldout is not None:
            pools, qrels = self.heldout
            judged = {pool.query_id: qrels.get(pool.query_id) for pool in pools}
            found["heldout"] = {"pools_sha256": pools_sha256(pools), "qrels_sha256": sha256_json(judged)}
        return found


class Collapsed(PdRerankError):
    """The documents of a window have come to the same score."""

    exit_code = 7


@flags(TrainSettings)
def ocsft(
    config: Annotated[Path | None, typer.Option(help="YAML file with any option as key; what is typed wins.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Clear another run from the folder.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be trained on, and stop.")] = False,
    stop_after: Annotated[int | None, typer.Option(help="Save after this step and stop; to be gone on from.")] = None,
    **given: Any,
) -> None:
    """Train a LoRA adapter on labelled pools so that a window's scores do not depend on its order.

    One line per step goes to stdout, the rest to stderr. The folder gets those lines, an evaluation of quality beside
    stability at each checkpoint, the checkpoints, and the adapter of the one that is kept.
    """
    # Configuration
    settings = load(TrainSettings, file=config, given=given)
    torch = need("torch", extra="train", purpose="training runs on torch")
    accelerator = accelerator_of(settings)
    ranks = accelerator.num_processes
    if settings.windows_per_step % (ranks * settings.batch_size):
        raise BadArgument(
            f"windows-per-step {settings.windows_per_step} cannot be shared by {ranks} processes with batch-size "
            f"{settings.batch_size}; give a multiple of {ranks * settings.batch_size}"
        )
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    main = accelerator.is_main_process
    if not main:
        logger.setLevel(logging.ERROR)

    # Data
    data = Data(
        pools=read_pools(settings.pools)[: settings.max_queries],
        labels=read_labels(settings.labels),
        heldout=read_heldout(settings),
    )
    data.check(settings)
    mine = main and not dry_run  # one process alone writes
    with RunFolder(settings.output, run=record_of(settings, data), overwrite=overwrite) if mine else nullcontext() as f:
        train(settings, accelerator, data, f, stop_after=0 if dry_run else stop_after)


def train(
    settings: TrainSettings, accelerator: Any, data: Data, folder: RunFolder | None, *, stop_after: int | None
) -> None:
    """Model, loop, end; `folder` is None in processes that write nothing."""
    import torch

    ranks, rank = accelerator.num_processes, accelerator.process_index
    shared = SharedBase(accelerator) if settings.shard_base else None

    # Model
    lora = Lora(
        rank=settings.lora_rank,
        alpha=settings.lora_alpha,
        dropout=settings.lora_dropout,
        targets=settings.lora_targets,
    )
    options = ("dtype", "revision", "attn_implementation", "trust_remote_code", "start")
    how = {name: getattr(settings, name) for name in options}
    with shared.turn() if shared else nullcontext():
        device = "cpu" if shared else accelerator.device
        model, tokenizer = load_student(settings.model, lora=lora, seed=settings.seed, device=device, **how)
        prompts = prompts_of(settings, tokenizer)
        base = fingerprint(model)
        if folder:
            folder.hold_to("base_fingerprint", base)
        mark = base if shared else None
        student = Student(model, prompts[0].grade_ids, checkpointing=settings.gradient_checkpointing)
        if shared:
            student.share(shared)
    if shared:
        with student.as_served():
            shared.start(model)
    together = {"batching": "single", "share_prefix": False} if shared else {}  # as many passes in every process
    with student.as_served():
        engine = HFEngine(model, tokenizer=tokenizer, max_length=settings.max_length, **together)
    examples = examples_of(settings, data, prompts, max_tokens=engine.max_length)
    adamw = torch.optim.AdamW(
        student.weights.values(),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
    )
    average = Average(student.weights, decay=settings.ema_decay) if settings.loss == "mean_teacher" else None
    running = {} if average is None else average.means

    per_epoch = -(-len(examples) // settings.windows_per_step)
    steps = settings.max_steps or settings.epochs * per_epoch
    last = steps if stop_after is None else min(steps, stop_after)
    by = f", shared by {ranks} processes" if ranks > 1 else ""
    logger.info("%s; %d steps of %d windows%s", examples.plan, steps, settings.windows_per_step, by)

    # Where it goes on
    done = max(folder.steps(), default=0) if folder else 0
    done = int(accelerator.reduce(torch.tensor(done, device=accelerator.device), "sum"))  # the other processes have 0
    lines = folder.rewind(done) if folder else []
    evaluations = read_evaluations(folder.evaluations) if folder and folder.evaluations.is_file() else []
    if done:
        restore(read_state(settings.output, done), student.weights, adamw, running, step=done)
        logger.info("going on after step %d of %d", done, steps)
    wrapped, optimizer = (model, adamw) if shared else accelerator.prepare(model, adamw)
    if settings.trackers:
        plain = {name: value for name, value in comparable(settings).items() if isinstance(value, str | float | int)}
        accelerator.init_trackers("pd_rerank", config=plain)

    # What training starts from: the base, or the adapter it goes on from
    if settings.evaluate_first and data.heldout is not None and not (done or evaluations) and (folder or shared):
        with student.as_served():
            evaluations.append(evaluate(settings, engine, prompts[0], data, step=0))
        logger.info("%s", evaluation_line(evaluations[0]))
        if folder:
            write_evaluations(folder.evaluations, evaluations)

    # Loop
    warmup = int(settings.warmup * steps)
    over = settings.ramp_steps if settings.ramp_fraction is None else round(settings.ramp_fraction * steps)
    strength = 0.0
    if settings.loss != "supervised":
        strength = as_difference(settings.consistency, views=max(2, settings.views_per_window), of=settings.convention)
    if strength and steps < over / 2:
        logger.warning(
            "λ rises to %.3g over %d steps and the run has %d: it ends at %.3g; give ramp_fraction or fewer ramp_steps",
            strength,
            over,
            steps,
            ramp(steps - 1, target=strength, over=over),
        )
    loss_of = loss_for(settings, student, wrapped, average)
    low = trailing(lines, lambda line: flat(settings, line))
    pace: deque[float] = deque(maxlen=50)
    signalled = signals()
    for step in range(done, last):
        began = time.monotonic()
        rate = learning_rate(step, steps=steps, warmup=warmup, peak=settings.learning_rate)
        for group in adamw.param_groups:
            group["lr"] = rate
        weight = ramp(step, target=strength, over=over)
        epoch, turn = divmod(step, per_epoch)
        if turn == 0 or step == done:
            whole = epoch_order(len(examples), seed=settings.seed, epoch=epoch, multiple=settings.windows_per_step)
        order = whole[turn * settings.windows_per_step :][: settings.windows_per_step]

        passes = list(share(settings.windows_per_step, settings.batch_size, ranks=ranks, rank=rank))
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=accelerator.device)
        for number, places in enumerate(passes, 1):
            with accelerator.no_sync(wrapped) if number < len(passes) else nullcontext():
                terms, tokens, idle = [], 0, 0.0
                for place in places:
                    example = examples.example(int(order[place]), epoch=epoch)
                    if shared:
                        idle += shared.level(student, example.views[0].prompts[0], passes_of(settings, example))
                    # Dropout depends on step and window, not on what ran before or in which process.
                    torch.manual_seed(view_seed(settings.seed, epoch=step, query_id="dropout", window=place))
                    terms.append(loss_of(example))
                    tokens += example.tokens
                loss = total(terms, weight) + idle
                accelerator.backward(loss / len(passes))
            sums += summed(torch, loss, terms, tokens)
        sums[-1] += len(signalled)
        line = line_of(accelerator.reduce(sums, "sum").tolist(), step=step + 1, passes=len(passes) * ranks)
        if shared:
            shared.average(student.weights)
        norm = float(accelerator.clip_grad_norm_(student.weights.values(), settings.max_grad_norm))
        if not (math.isfinite(line["loss"]) and math.isfinite(norm)):
            raise EngineFailure(not_finite(step + 1, line["loss"], norm, [examples.query_of(int(i)) for i in order]))
        optimizer.step()
        optimizer.zero_grad()
        if average is not None:
            average.update(student.weights)

        stopped = bool(line.pop("signals"))
        pace.append(time.monotonic() - began)
        line |= {"strength": weight, "rate": rate, "gradient": norm, "seconds": pace[-1]}
        low = low + 1 if flat(settings, line) else 0
        collapsed = low >= settings.patience
        accelerator.log({name: value for name, value in line.items() if value is not None}, step=step + 1)
        if folder:
            print(step_line(line, steps=steps, pace=pace), flush=True)
            folder.add_step(line)
        evaluated = data.heldout is not None and not stopped and due(step + 1, evaluation_every(settings), steps)
        if evaluated and (folder or shared):
            with student.as_served():
                evaluations.append(evaluate(settings, engine, prompts[0], data, step=step + 1))
        if folder:
            if evaluated:
                write_evaluations(folder.evaluations, evaluations)
                logger.info("%s", evaluation_line(evaluations[-1]))
                draw(folder, evaluations)
            if evaluated or stopped or collapsed or due(step + 1, settings.save_every, last):
                mine = evaluations[-1] if evaluated else None
                card = card_of(settings, engine, data, examples, step=step + 1, evaluation=mine, mark=mark)
                state = state_of(student.weights, adamw, running)
                with student.as_served():
                    folder.save(step + 1, state, adapter_saver(model, tokenizer, prompts[0], card))
        accelerator.wait_for_everyone()
        if collapsed:
            raise Collapsed(
                f"step {step + 1}: for {low} steps the documents of a window have differed by less than "
                f"{settings.min_spread:g} in expected grade: the scores have collapsed. Lower --consistency or "
                "--learning-rate, or add --cross-entropy 0.3; the checkpoints are kept"
            )
        if stopped:
            logger.error("interrupted; step %d is saved, run the same command to go on", step + 1)
            raise typer.Exit(130)

    # End
    if folder and last == steps:
        step, choice = chosen(settings, evaluations, steps)
        load_adapter(model, folder.checkpoint(step) / "adapter")
        mine = next((e for e in evaluations if e.step == step), None)
        more = {"beside": [e for e in evaluations if e.step != step], "choice": choice, "mark": mark}
        card = card_of(settings, engine, data, examples, step=step, evaluation=mine, **more)
        dtype = getattr(torch, settings.adapter_dtype)
        with student.as_served():
            save_adapter(folder.adapter, model, tokenizer, prompts[0], card, dtype=dtype)
        if evaluations:
            logger.info("%s", table_text(evaluation_table(evaluations)))
        logger.info("the adapter of step %d is kept: %s", step, folder.adapter)
    accelerator.end_training()


# -- configuration ------------------------------------------------------------------------------------------------


def accelerator_of(settings: TrainSettings) -> Any:
    accelerate = need("accelerate", extra="train", purpose="training runs through accelerate")
    trackers = [name.strip() for name in (settings.trackers or "").split(",") if name.strip()]
    tracking = need("accelerate.tracking", extra="train")
    there = [tracker.value for tracker in tracking.get_available_trackers()]
    if absent := [name for name in trackers if name not in there]:  # accelerate itself would go on without a word
        raise MissingExtra(f"tracker '{absent[0]}' is not installed; run: pip install {absent[0]}, or leave it out")
    accelerator = accelerate.Accelerator(
        cpu=settings.cpu,
        mixed_precision="no",
        log_with=trackers or None,
        project_dir=str(settings.output / "trackers") if trackers else None,
        kwargs_handlers=[
            accelerate.InitProcessGroupKwargs(timeout=datetime.timedelta(hours=6)),  # the others wait for an evaluation
            accelerate.DistributedDataParallelKwargs(broadcast_buffers=False),
        ],
    )
    if str(accelerator.distributed_type).rpartition(".")[2] in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        raise BadArgument(
            "this script shares the frozen base out by itself: launch with --num_processes alone, without FSDP, "
            "DeepSpeed or Megatron of accelerate's own, and set --shard-base where each process cannot hold the base"
        )
    return accelerator


def comparable(settings: TrainSettings) -> dict[str, Any]:
    """The settings that make a run what it is: without places, and without how often it is looked at."""
    free = {"pools", "labels", "qrels", "heldout_pools", "heldout_qrels", "output", "cpu", "threads", "trackers"}
    free |= {"save_every", "evaluate_every", "select", "max_psi", "min_step", "adapter_dtype", "patience", "min_spread"}
    free |= {"shard_base", "start", "evaluate_first"}
    return {name: value for name, value in settings.model_dump(mode="json").items() if name not in free}


def record_of(settings: TrainSettings, data: Data) -> dict[str, Any]:
    said: dict[str, Any] = {"rubric": sha256_json(asdict(load_rubric(settings.rubric)))}
    if settings.debias and settings.qrels is not None:
        said["qrels"] = sha256_json(read_qrels(settings.qrels))
    return {"settings": comparable(settings), "start": started_from(settings), **said, **data.describe()}


def started_from(settings: TrainSettings) -> str | None:
    """The SHA-256 of the adapter training starts from."""
    return None if settings.start is None else str(open_adapter(settings.start).describe()["sha256"])


def evaluation_every(settings: TrainSettings) -> int:
    return settings.evaluate_every or settings.save_every


def due(step: int, every: int, last: int) -> bool:
    return step % every == 0 or step == last


# -- data ---------------------------------------------------------------------------------------------------------


def read_heldout(settings: TrainSettings) -> tuple[list[Pool], dict[str, dict[str, int]]] | None:
    if settings.heldout_pools is None or settings.heldout_qrels is None:
        return None
    return read_pools(settings.heldout_pools)[: settings.heldout_queries], read_qrels(settings.heldout_qrels)


def prompts_of(settings: TrainSettings, tokenizer: Any) -> list[GradePrompt]:
    """The prompt trained with; for views that differ in markers one per scheme, the first being served."""
    schemes = [settings.markers]
    if settings.views == "markers":
        schemes = [name.strip() for name in settings.marker_schemes.split(",")]
    return [
        GradePrompt(
            tokenizer,
            rubric=settings.rubric,
            instruction=settings.instruction,
            markers=markers,
            placeholder=settings.placeholder,
            max_doc_chars=settings.max_doc_chars,
            chat="auto" if settings.chat is None else settings.chat,
        )
        for markers in schemes
    ]


def examples_of(settings: TrainSettings, data: Data, prompts: list[GradePrompt], *, max_tokens: int) -> Examples:
    weights = None
    if settings.debias and settings.qrels is not None:
        counts = relevant_by_slot(data.pools, read_qrels(settings.qrels), width=settings.window_size)
        weights = inverse_propensity(counts, clip=settings.debias_clip)
    recipe = Recipe(
        width=settings.window_size,
        partition=settings.partition,
        order=settings.order,
        views=settings.views,
        seeds=settings.view_seeds,
        targets=settings.targets,
        replaced=settings.replaced,
    )
    return Examples(
        data.pools,
        data.labels,
        prompts=prompts,
        recipe=recipe,
        max_tokens=max_tokens,
        slot_weights=weights,
        probabilities=settings.distribution > 0,
        check_template=settings.check_template,
    )


# -- one step -----------------------------------------------------------------------------------------------------

SUMS = ("loss", "fit", "consistency", "squares", "documents", "tokens", "signals")
"""What the processes of a step add up; the first three are means over a pass."""


def loss_for(settings: TrainSettings, student: Student, wrapped: Any, average: Average | None) -> Callable[..., Terms]:
    """The loss of one example, with the forward passes it takes."""
    fit = Fit(squared=settings.squared, distribution=settings.distribution, cross_entropy=settings.cross_entropy)
    loss, more = LOSSES[settings.loss], {}
    if settings.loss == "kl_to_base":
        more["temperature"] = settings.temperature
    views = None if settings.loss == "order_consistency" else 1

    def loss_of(example: Any) -> Terms:
        reference = None
        if settings.loss == "kl_to_base":
            reference = student.base(example)
        elif average is not None:
            reference = student.averaged(example, average)
        logits = student.example(example, views=views, through=wrapped)
        return loss(logits, student.batch(example, reference=reference), fit=fit, **more)

    return loss_of


def passes_of(settings: TrainSettings, example: Any) -> tuple[int, int]:
    """How often `loss_for` runs the model on an example, with gradients and without."""
    views = example.views if settings.loss == "order_consistency" else example.views[:1]
    other = {"kl_to_base": example.views[:1], "mean_teacher": example.views[1:2]}.get(settings.loss, ())
    return sum(len(view.prompts) for view in views), sum(len(view.prompts) for view in other)


def share(windows: int, batch: int, *, ranks: int, rank: int) -> Iterator[range]:
    """The places in a step that one process takes, batch by batch: with fewer processes each takes more of the same."""
    for first in range(rank * batch, windows, ranks * batch):
        yield range(first, first + batch)


def summed(torch: Any, loss: Any, terms: list[Terms], tokens: int) -> Any:
    """One pass's share of `SUMS`; squares are of scores about their window's mean, windows of one left out."""
    fit, apart = means(terms)
    scores = [t.scores for t in terms if len(t.scores) > 1]
    squares = sum((s - s.mean()).square().sum() for s in scores)
    values = (loss, fit, apart, squares, sum(map(len, scores)), tokens, 0)
    return torch.stack([torch.as_tensor(v, dtype=torch.float64, device=loss.device).detach() for v in values])


def line_of(sums: list[float], *, step: int, passes: int) -> dict[str, Any]:
    said = dict(zip(SUMS, sums, strict=True))
    return {
        "step": step,
        **{name: said[name] / passes for name in ("loss", "fit", "consistency")},
        "spread": math.sqrt(said["squares"] / said["documents"]) if said["documents"] else None,
        "tokens": said["tokens"],
        "signals": said["signals"],
    }


def flat(settings: TrainSettings, line: dict[str, Any]) -> bool:
    """Whether the documents of a step's windows hardly differ; windows of one do not say."""
    return line["spread"] is not None and line["spread"] < settings.min_spread


def step_line(line: dict[str, Any], *, steps: int, pace: deque[float]) -> str:
    left = datetime.timedelta(seconds=round((steps - line["step"]) * sum(pace) / len(pace)))
    spread = "–" if line["spread"] is None else f"{line['spread']:.3f}"
    return (
        f"step {line['step']}/{steps}  loss {line['loss']:.4f} = {line['fit']:.4f} + "
        f"{line['strength']:.3g} × {line['consistency']:.4f}  rate {line['rate']:.2e}  "
        f"gradient {line['gradient']:.3g}  spread {spread}  "
        f"{line['tokens'] / max(line['seconds'], 1e-9):.0f} tokens/s  left {left}"
    )


def not_finite(step: int, loss: float, norm: float, queries: list[str]) -> str:
    some = ", ".join(list(dict.fromkeys(queries))[:5])
    return (
        f"step {step}: the loss is {loss:g} and the gradient {norm:g}, so the step was not taken; it read queries "
        f"{some}, …. Lower --learning-rate or take --dtype float32; what was saved before is kept"
    )


def trailing(lines: list[dict[str, Any]], holds: Callable[[dict[str, Any]], bool]) -> int:
    """For how many of the last lines in a row something holds."""
    count = 0
    for line in reversed(lines):
        if not holds(line):
            break
        count += 1
    return count


def signals() -> list[int]:
    """A list that gets every request to stop; the step in progress is finished and saved first."""
    found: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(ValueError):  # not in the main thread
            signal.signal(number, lambda got, _: found.append(got))
    return found


# -- evaluation and adapters --------------------------------------------------------------------------------------


def evaluate(settings: TrainSettings, engine: HFEngine, prompt: GradePrompt, data: Data, *, step: int) -> Evaluation:
    assert data.heldout is not None
    pools, qrels = data.heldout
    scoring = Scoring(
        window=settings.window_size,
        partition=settings.partition,
        order=settings.order,
        presentations=settings.evaluate_presentations,
    )
    return evaluate_heldout(
        engine,
        prompt,
        pools,
        qrels,
        scoring=scoring,
        step=step,
        arm=settings.recipe,
        weight=lambda_of(settings),
        k=settings.evaluate_k,
    )


def lambda_of(settings: TrainSettings) -> float:
    return 0.0 if settings.loss == "supervised" else settings.consistency


def draw(folder: RunFolder, evaluations: Sequence[Evaluation]) -> None:
    """Draw quality against stability, where matplotlib is installed."""
    with suppress(MissingExtra):
        picture = frontier_picture(evaluations)
        with whole_file(folder.folder / "frontier.svg") as stream:
            stream.write(picture)


def chosen(settings: TrainSettings, evaluations: Sequence[Evaluation], steps: int) -> tuple[int, Choice | None]:
    """The step whose adapter is kept, and why; the last where nothing is held out or the rule abstains."""
    evaluations = [e for e in evaluations if e.step]
    if not evaluations or settings.select == "last":
        return steps, None
    options = {"equal_stability": {"max_psi": settings.max_psi}, "largest_weight": {"min_step": settings.min_step}}
    choice = choose(evaluations, settings.select, **options.get(settings.select, {}))
    if choice.kept is None:
        logger.warning("%s keeps none (%s); the last step is kept", settings.select, "; ".join(choice.reasons))
        return steps, choice
    return choice.kept.step, choice


def card_of(
    settings: TrainSettings,
    engine: HFEngine,
    data: Data,
    examples: Examples,
    *,
    step: int,
    evaluation: Evaluation | None,
    beside: Sequence[Evaluation] = (),
    choice: Choice | None = None,
    mark: str | None = None,
) -> AdapterCard:
    return AdapterCard(
        base=settings.model,
        base_revision=settings.revision or engine.describe()["commit"],
        window=settings.window_size,
        partition=settings.partition,
        max_length=settings.max_length,
        loss=settings.recipe,
        weight=lambda_of(settings),
        step=step,
        settings=comparable(settings),
        data={"start": started_from(settings), **data.describe(), **examples.plan.describe()},
        heldout=evaluation,
        beside=beside,
        choice=choice,
        fingerprint=mark,
    )


def adapter_saver(model: Any, tokenizer: Any, prompt: GradePrompt, card: AdapterCard) -> Callable[[Path], Any]:
    return lambda place: save_adapter(place, model, tokenizer, prompt, card)


def load_adapter(model: Any, folder: Path) -> None:
    """Put a checkpoint's adapter on the model in training."""
    import peft

    peft.set_peft_model_state_dict(model, peft.load_peft_weights(str(folder), device="cpu"))


if __name__ == "__main__":
    program(ocsft)
