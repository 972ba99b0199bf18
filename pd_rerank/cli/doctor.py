"""`pd-rerank doctor`: what is installed here, and whether a model can be read at all."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pd_rerank.config import ModelSettings, load
from pd_rerank.engines import ENGINES
from pd_rerank.errors import BadArgument, ModelMismatch, PdRerankError
from pd_rerank.files import versions
from pd_rerank.prompt import MARKERS, marker
from pd_rerank.rubrics import RUBRICS, load_rubric

if TYPE_CHECKING:
    from pd_rerank.prompt import GradePrompt
    from pd_rerank.proof import Check

logger = logging.getLogger("pd_rerank")

_MARK = {True: "pass", False: "FAIL", None: "note"}


def doctor(
    model: Annotated[str | None, typer.Option(help="Short name, folder or hub id of a model to prove.")] = None,
    adapter: Annotated[
        str | None, typer.Option(help="LoRA adapter to prove: folder or hub id. Without --model: on the base it names.")
    ] = None,
    engine: Annotated[
        str,
        typer.Option(help=f"What reads the model: {', '.join(ENGINES)}; fake needs none.", metavar="|".join(ENGINES)),
    ] = "hf",
    server: Annotated[
        str | None, typer.Option(help="Address of the model server, for --engine server and generated.")
    ] = None,
    served_as: Annotated[str | None, typer.Option(help="The server's name for the model or adapter.")] = None,
    slot_readout: Annotated[str | None, typer.Option(help="How vLLM or a server reads the slots.")] = None,
    canary: Annotated[
        Path | None, typer.Option(help="Scores of transformers that vLLM or a server must repeat.")
    ] = None,
    rubric: Annotated[str, typer.Option(help="Name or .yaml file of the rubric to prove with.")] = "passage_relevance",
    instruction: Annotated[str | None, typer.Option(help="Replaces the rubric's instruction.")] = None,
    markers: Annotated[str, typer.Option(help=f"How documents are marked: {', '.join(MARKERS)}.")] = "numeric",
    placeholder: Annotated[str, typer.Option(help="What stands where a grade would.")] = "0",
    chat: Annotated[
        bool | None,
        typer.Option(help="Use the chat template, or a plain prompt. Default: the template where there is one."),
    ] = None,
    max_length: Annotated[int | None, typer.Option(min=1, help="Longest prompt in tokens.")] = None,
    merge_adapter: Annotated[bool, typer.Option("--merge-adapter", help="Fold the adapter into the weights.")] = False,
    dtype: Annotated[str | None, typer.Option(help="auto, bf16, fp16 or fp32.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps.")] = None,
    device_map: Annotated[str | None, typer.Option(help="auto: spread the model over the devices there are.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the model run code of its own. Read it first.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Show what is installed here; with a model, prove on a probe that its grades can be read.

    The proof: grades are single tokens, every slot is followed by its placeholder, the chat template keeps query and
    documents, batches and shared prefixes read like single prompts, an adapter is applied and was made with this
    prompt. Of --engine generated, which asks for five answers: every document gets a grade, and not all the same. Ends
    with 0 if all passes, 3 if something is not installed, 4 if the model is not there, 5 if it does not fit, 6 if it
    fails. The output is meant to be pasted into an issue.
    """
    options = {
        "max_length": max_length,
        "merge_adapter": merge_adapter or None,
        "dtype": dtype,
        "device": device,
        "device_map": device_map,
        "revision": revision,
        "trust_remote_code": trust_remote_code or None,
        "server": server,
        "served_as": served_as,
        "slot_readout": slot_readout,
        "canary": canary,
    }
    options = {name: value for name, value in options.items() if value is not None}
    wording: dict[str, Any] = {
        "rubric": rubric,
        "instruction": instruction,
        "markers": markers,
        "placeholder": placeholder,
        "chat": "auto" if chat is None else chat,
    }
    _check(engine, model, {**options, "adapter": adapter}, wording=wording)
    sheet = environment()
    if not as_json:
        _show(sheet)
    proof = Proof(title="", checks=[])
    failure: PdRerankError | None = None
    if model is not None or adapter is not None:
        try:
            proof = prove_model(model, adapter=adapter, engine=engine, options=options, wording=wording)
        except PdRerankError as error:
            failure = error
    wrong = [c.name for c in proof.checks if c.passed is False]
    if as_json:
        found = {
            "environment": sheet,
            "proof": [{"name": c.name, "passed": c.passed, "detail": c.detail} for c in proof.checks],
            "error": None if failure is None else str(failure),
            "passed": failure is None and not wrong,
        }
        typer.echo(json.dumps(found, indent=2))
    elif proof.checks:
        _table(proof.title, [(c.name, _MARK[c.passed], c.detail) for c in proof.checks])
    if failure is not None:
        raise failure
    if wrong:
        raise ModelMismatch(f"{len(wrong)} of {len(proof.checks)} checks failed: {'; '.join(wrong)}")


def _check(engine: str, model: str | None, given: Mapping[str, Any], *, wording: Mapping[str, Any]) -> None:
    """Refuse what no model could make right, before anything is loaded."""
    if engine not in ENGINES:
        raise BadArgument(f"unknown engine '{engine}'; choose one of {', '.join(ENGINES)}")
    load(ModelSettings, given={"engine": engine, **given}).engine_options()
    if engine == "generated" and (wording["placeholder"] != "0" or wording["chat"] != "auto"):
        raise BadArgument("--placeholder and --chat are for reading slots; --engine generated has none")
    if engine in ("vllm", "server") and model is None and given["adapter"] is not None:
        raise BadArgument(f"--engine {engine} needs the base of an adapter: give it as --model")
    load_rubric(wording["rubric"])
    marker(wording["markers"], 0)


# -- the model ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was tried on a model, under a title that names it."""

    title: str
    checks: list[Check]


def prove_model(
    model: str | None, *, adapter: str | None, engine: str, options: Mapping[str, Any], wording: Mapping[str, Any]
) -> Proof:
    """Load a model, with its adapter if there is one, and try it; an adapter alone brings the base it names.

    `options` are the engine's, `wording` the prompt's. The adapter is tried first and the base after it, so that only
    one of them is in memory.
    """
    from pd_rerank.engines import load_engine
    from pd_rerank.prompt import ChatPrompt, GradePrompt
    from pd_rerank.proof import Check, moved, probe, prove, prove_written

    alone = model is None
    loaded = load_engine(adapter if alone else model, engine=engine, adapter=None if alone else adapter, **options)
    described = loaded.describe()
    plain = {name: value for name, value in described.items() if isinstance(value, str | int | float)}
    as_loaded = Check(name="loaded", passed=None, detail=", ".join(f"{name} {value}" for name, value in plain.items()))
    if engine == "generated":
        chat = ChatPrompt(**{name: value for name, value in wording.items() if name not in ("placeholder", "chat")})
        made = Check(name="prompt", passed=None, detail=f"template {chat.hash[:12]}")
        return Proof(title=f"{model} at {options['server']}", checks=[as_loaded, made, *prove_written(loaded, chat)])
    prompt = GradePrompt(loaded.tokenizer, **wording)
    prompt_as = f"template {prompt.hash[:12]}, {prompt.layout} layout, prompts up to {loaded.max_length} tokens"
    checks = [as_loaded, Check(name="prompt", passed=None, detail=prompt_as), *prove(loaded, prompt)]
    if adapter is None:
        return Proof(title=str(model), checks=checks)
    base = model
    if alone:
        if described.get("adapter") is None:
            raise BadArgument(f"'{adapter}' is a model of its own, not an adapter; give it as --model")
        base = described["model"]
        # What was said of the hub's revision was said of the adapter; the base is the one just loaded.
        options = {**options, "revision": described.get("commit")}
    card = getattr(loaded, "adapter_card", None)
    fits = _card_check(prompt, card) if card else Check(**_NO_CARD)
    read = probe(loaded, prompt)
    if hasattr(loaded, "using"):  # vLLM gives back no memory; it reads the base beside the adapter
        bare = loaded.using(None)
    else:
        del loaded
        of_adapter = ("merge_adapter", "served_as", "canary")
        bare = load_engine(base, engine=engine, **{n: v for n, v in options.items() if n not in of_adapter})
    checks += [moved(read, probe(bare, GradePrompt(bare.tokenizer, **wording))), fits]
    return Proof(title=f"{base} with {adapter}", checks=checks)


_NO_CARD: dict[str, Any] = {
    "name": "the adapter was made with this prompt",
    "passed": None,
    "detail": "it does not say: no reranker.json beside it",
}


def _card_check(prompt: GradePrompt, card: Mapping[str, Any]) -> Check:
    from pd_rerank.proof import Check

    try:
        prompt.check_card(card)
    except ModelMismatch:
        made = f"made with template {str(card['template_hash'])[:12]}, this prompt is {prompt.hash[:12]}"
        cure = " ".join(_asked_for(prompt, card))
        detail = f"{made}; give {cure}" if cure else f"{made}; its reranker.json does not say what differs"
        return Check(name=_NO_CARD["name"], passed=False, detail=detail)
    return Check(name=_NO_CARD["name"], passed=True, detail=f"template {prompt.hash[:12]}")


def _asked_for(prompt: GradePrompt, card: Mapping[str, Any]) -> Iterator[str]:
    """The options that would make `prompt` the one an adapter's card describes."""
    mine = prompt.describe()
    ours, theirs = mine["rubric"], card.get("rubric") or {}
    theirs = {"name": theirs} if isinstance(theirs, str) else theirs
    words = [word for word in ours if word in theirs and word not in ("instruction", "max_doc_chars")]
    name, instruction = str(theirs.get("name")), ours["instruction"]
    if any(theirs[word] != ours[word] for word in words):
        shipped = RUBRICS.get(name) if name != ours["name"] else None
        instruction = shipped.instruction if shipped else theirs.get("instruction")
        yield f"--rubric {name}" if shipped else f"--rubric, the adapter's folder, for its rubric '{name}'"
    if theirs.get("instruction", instruction) != instruction:
        yield f"--instruction {shlex.quote(theirs['instruction'])}"
    for option in ("markers", "placeholder"):
        if option in card and card[option] != mine[option]:
            yield f"--{option} {shlex.quote(str(card[option]))}"
    if "layout" in card and (card["layout"] == "plain") != (mine["layout"] == "plain"):
        yield "--no-chat" if card["layout"] == "plain" else "--chat"


# -- the environment ---------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """What matters of this machine and installation, as plain values."""
    from pd_rerank.retrieval.java import java_report

    return {
        "versions": versions(()),
        "platform": platform.platform(),
        "cpus": _cpus(),
        "packages": packages(),
        "java": java_report(),
        "torch": _torch(),
        "folders": _folders(),
    }


def packages() -> list[dict[str, Any]]:
    """Every package this one can use, the version installed or None, and the extra that brings it."""
    try:
        declared = metadata.requires("pd-rerank") or []
    except metadata.PackageNotFoundError:
        return []
    found: dict[str, dict[str, Any]] = {}
    for line in declared:
        name = re.split(r"[\s\[<>=!~;(]", line, maxsplit=1)[0]
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        group = extra[1] if extra else None
        if name.lower().replace("_", "-") == "pd-rerank" or group in {"dev", "all"} or name in found:
            continue
        version = versions([name])[name]
        cure = f"pip install 'pd-rerank[{group}]'" if group else "pip install --force-reinstall pd-rerank"
        found[name] = {"name": name, "version": version, "extra": group, "cure": None if version else cure}
    return list(found.values())


def _cpus() -> dict[str, Any]:
    from pd_rerank.engines.loading import cpu_computes_bfloat16

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"count": os.cpu_count(), "usable": usable, "bf16": cpu_computes_bfloat16()}


def _torch() -> dict[str, Any] | None:
    """What torch can compute on; None where it is not installed."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    cuda = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "version": torch.__version__,
        "cuda": cuda,
        "mps": bool(torch.backends.mps.is_available()),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _folders() -> dict[str, Any]:
    """Where models are kept, and the room there in GB."""
    from pd_rerank.embedded import cache_folder

    hub = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    folders = {"models": cache_folder(), "hub cache": hub}
    return {name: {"path": str(folder), "free_gb": _free_gb(folder)} for name, folder in folders.items()}


def _free_gb(folder: Path) -> float:
    there = next(place for place in (folder, *folder.parents) if place.exists())
    return round(shutil.disk_usage(there).free / 1e9, 1)


# -- the sheet ---------------------------------------------------------------------------------------------


def _show(sheet: dict[str, Any]) -> None:
    _table("environment", [(name, "", text) for name, text in _environment_lines(sheet)])
    _table(
        "packages",
        [
            (p["name"], p["version"] or "missing", p["cure"] or (f"for {p['extra']}" if p["extra"] else ""))
            for p in sheet["packages"]
        ],
    )


def _environment_lines(sheet: dict[str, Any]) -> list[tuple[str, str]]:
    cpus, torch, java = sheet["cpus"], sheet["torch"], sheet["java"]
    used = java["java"] and f"{java['java']['version']} ({java['java']['home']})"
    bf16 = "in hardware" if cpus["bf16"] else "emulated and slow, so fp32 is the default"
    accelerators = [*torch["cuda"], *(["mps"] if torch["mps"] else [])] if torch else []
    return [
        *((name, version) for name, version in sheet["versions"].items()),
        ("platform", sheet["platform"]),
        ("CPUs", f"{cpus['usable']} usable of {cpus['count']}; bf16: {bf16}"),
        (
            "torch",
            f"{torch['version']}, {torch['threads']} threads, {torch['cpu_capability']}"
            if torch
            else "not installed; pip install 'pd-rerank[hf]'",
        ),
        ("accelerators", ", ".join(accelerators) or "none"),
        ("Java", used if not java["problem"] else f"reranking needs none; for pools: {java['problem']}"),
        *((name, f"{folder['path']}, {folder['free_gb']} GB free") for name, folder in sheet["folders"].items()),
    ]


def _table(title: str, rows: Sequence[tuple[str, str, str]]) -> None:
    """A table where stdout is a terminal, aligned lines elsewhere."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, show_header=False, title_justify="left")
        for row in rows:
            style = "red" if row[1] in {"FAIL", "missing"} else None
            table.add_row(*(cell.replace("[", "\\[") for cell in row), style=style)
        Console().print(table)
        return
    typer.echo(f"{title}:")
    widths = [max((len(row[i]) for row in rows), default=0) for i in (0, 1)]
    for name, mark, text in rows:
        typer.echo(f"  {name:<{widths[0]}}  {f'{mark:<{widths[1]}}  ' if widths[1] else ''}{text}".rstrip())
