"""`pd-rerank doctor`: what is installed here, and whether a model can be read at all."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pd_rerank.errors import ModelMismatch, PdRerankError
from pd_rerank.files import versions

if TYPE_CHECKING:
    from pd_rerank.proof import Check

logger = logging.getLogger("pd_rerank")

_MARK = {True: "pass", False: "FAIL", None: "note"}


def doctor(
    model: Annotated[str | None, typer.Option(help="Short name, folder or hub id of a model to prove.")] = None,
    adapter: Annotated[str | None, typer.Option(help="LoRA adapter to prove with it: folder or hub id.")] = None,
    engine: Annotated[str, typer.Option(help="hf, or fake to try the sheet without a model.")] = "hf",
    rubric: Annotated[str, typer.Option(help="Name or .yaml file of the rubric to prove with.")] = "passage_relevance",
    dtype: Annotated[str | None, typer.Option(help="auto, bf16, fp16 or fp32.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Show what is installed here; with a model, prove on a probe that its grades can be read.

    The proof: grades are single tokens, every slot is followed by its placeholder, the chat template keeps query and
    documents, batches and shared prefixes read like single prompts, an adapter is applied and was made with this
    prompt. Ends with 0 if all passes, 3 if something is not installed, 4 if the model is not there, 5 if it does not
    fit, 6 if it fails. The output is meant to be pasted into an issue.
    """
    sheet = environment()
    if not as_json:
        _show(sheet)
    checks: list[Check] = []
    failure: PdRerankError | None = None
    if model is not None or adapter is not None:
        options = {name: value for name, value in (("dtype", dtype), ("device", device)) if value is not None}
        try:
            checks = prove_model(model, adapter=adapter, engine=engine, rubric=rubric, options=options)
        except PdRerankError as error:
            failure = error
    wrong = [c.name for c in checks if c.passed is False]
    if as_json:
        found = {
            "environment": sheet,
            "proof": [{"name": c.name, "passed": c.passed, "detail": c.detail} for c in checks],
            "error": None if failure is None else str(failure),
            "passed": failure is None and not wrong,
        }
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
    elif checks:
        title = f"{model or ''}{f' with {adapter}' if adapter else ''}".strip()
        _table(title, [(c.name, _MARK[c.passed], c.detail) for c in checks])
    if failure is not None:
        raise failure
    if wrong:
        raise ModelMismatch(f"{len(wrong)} of {len(checks)} checks failed: {'; '.join(wrong)}")


# -- the model ---------------------------------------------------------------------------------------------


def prove_model(
    model: str | None, *, adapter: str | None, engine: str, rubric: str, options: dict[str, Any]
) -> list[Check]:
    """Load a model, with its adapter if there is one, and return the sheet of its proof."""
    from pd_rerank.engines import load_engine
    from pd_rerank.prompt import GradePrompt
    from pd_rerank.proof import Check, probe, prove

    base = None
    if adapter is not None:
        plain = load_engine(model, engine=engine, **options)
        base = probe(plain, GradePrompt(plain.tokenizer, rubric=rubric))
        del plain
        options = {**options, "adapter": adapter}
    loaded = load_engine(model, engine=engine, **options)
    prompt = GradePrompt(loaded.tokenizer, rubric=rubric)
    checks = prove(loaded, prompt, base=base)
    if adapter is not None:
        card = getattr(loaded, "adapter_card", None)
        checks.append(_card_check(prompt, card) if card else Check(**_NO_CARD))
    described = {name: value for name, value in loaded.describe().items() if isinstance(value, str | int | float)}
    loaded_as = ", ".join(f"{name} {value}" for name, value in described.items())
    prompt_as = f"template {prompt.hash[:12]}, {prompt.layout} layout, prompts up to {loaded.max_length} tokens"
    return [
        Check(name="loaded", passed=None, detail=loaded_as),
        Check(name="prompt", passed=None, detail=prompt_as),
        *checks,
    ]


_NO_CARD: dict[str, Any] = {
    "name": "the adapter was made with this prompt",
    "passed": None,
    "detail": "it does not say: no reranker.json beside it",
}


def _card_check(prompt: Any, card: Any) -> Check:
    from pd_rerank.proof import Check

    try:
        prompt.check_card(card)
    except ModelMismatch as error:
        return Check(name=_NO_CARD["name"], passed=False, detail=str(error))
    return Check(name=_NO_CARD["name"], passed=True, detail=f"template {prompt.hash[:12]}")


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
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text(errors="replace").split()) if info.is_file() else None
    bf16 = None if flags is None else sorted(flags & {"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
    return {"count": os.cpu_count(), "usable": usable, "bf16": bf16}


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
    bf16 = "unknown" if cpus["bf16"] is None else ", ".join(cpus["bf16"]) or "none, bf16 is emulated and slow"
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
