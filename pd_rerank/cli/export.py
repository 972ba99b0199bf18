"""`pd-rerank export`: a base model with a trained adapter folded in, as a model folder of its own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from pd_rerank.errors import BadArgument

logger = logging.getLogger("pd_rerank")


def export(
    model: Annotated[str, typer.Option(help="The base the adapter was trained on: short name, folder or hub id.")],
    adapter: Annotated[str, typer.Option(help="The adapter: folder or hub id.")],
    output: Annotated[Path, typer.Option(help="Folder to write; one written here before is replaced.")],
    form: Annotated[
        str,
        typer.Option(
            metavar="merged|classifier",
            help="A causal model that every engine loads, or a classifier of one row per grade.",
        ),
    ] = "merged",
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's own), bf16, fp16 or fp32.")] = "auto",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the base on the hub.")] = None,
    adapter_revision: Annotated[str | None, typer.Option(help="The same of the adapter.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let the model run code of its own. Read it first.")
    ] = False,
) -> None:
    """Write a base model with an adapter folded into its weights, on the CPU.

    The folder holds the weights, the tokenizer, reranker.json with the prompt it was made with, and a model card. It
    is loaded again before it is kept, and must read a probe as the merged model did; how far merging itself moved
    scores is said. A classifier leaves out what some models do to their logits (a soft cap, a scale, a bias): its card
    says what to apply. What a form cannot hold is refused with the reason, exit code 5.
    """
    from pd_rerank.training.adapters import Form
    from pd_rerank.training.adapters import export as write

    chosen: Any = form
    if chosen not in get_args(Form):
        raise BadArgument(f"unknown form '{form}'; choose one of {', '.join(get_args(Form))}")
    record = write(
        model,
        output,
        adapter=adapter,
        form=chosen,
        dtype=dtype,
        revision=revision,
        adapter_revision=adapter_revision,
        trust_remote_code=trust_remote_code,
    )
    moved = record["merging_moved_scores_by"]
    logger.info("%s: %s, %s; merging moved scores of a probe by up to %.1e", output, form, record["dtype"], moved)
    if said := record.get("logits"):
        logger.warning(
            "the classifier's head leaves out %s; apply it to its rows, see README.md there", ", ".join(said)
        )
