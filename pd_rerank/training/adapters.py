"""Adapters as artefacts: saved with what they were made with, read back to equal scores, merged, made a classifier.

An adapter folder holds PEFT's files, the tokenizer, `reranker.json` (what a reranker must know and check) and a model
card. Every folder is written whole or not at all, so the one before it survives a full disk and a killed process.
"""

from __future__ import annotations

import copy
import gc
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from pd_rerank._extras import need
from pd_rerank.engines.adapters import fingerprint, fold_adapter, open_adapter
from pd_rerank.engines.base import FloatArray, WindowPrompt
from pd_rerank.engines.canary import Canary, canary_of
from pd_rerank.engines.hf import HFEngine
from pd_rerank.engines.loading import no_bars
from pd_rerank.errors import BadArgument, InvalidData, ModelMismatch, PdRerankError
from pd_rerank.files import CARD, SCORED_WITH, check_folder, read_json, sha256_file, versions, whole_folder, write_json
from pd_rerank.prompt import GradePrompt
from pd_rerank.proof import probe_windows
from pd_rerank.rubrics import Rubric
from pd_rerank.scores import grade_probabilities, read_out
from pd_rerank.training.model_card import README, model_card
from pd_rerank.training.selection import Choice, Evaluation

logger = logging.getLogger("pd_rerank")

Form = Literal["merged", "classifier"]

_LIMITS = {"float32": 1e-4, "float64": 1e-4}
"""How far logits read from an export may lie from those it was made of, relative to the largest; others 2e-2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCard:
    """What an adapter records of its making.

    `base` is the model it was trained on (short name, hub id or folder) at `base_revision`; `window`, `partition` and
    `max_length` are how it was shown candidates, `loss`, `weight` (λ) and `step` how it was trained, `settings` the
    rest of that and `data` what it was trained on, both JSON values. `heldout` is its own evaluation, `beside` those of
    other arms on the same queries, `choice` why it was kept. `limits` are sentences for its model card. `fingerprint`
    is the base's where the model is not asked for it, being shared out among processes.
    """

    base: str
    base_revision: str | None = None
    window: int
    partition: str
    max_length: int | None = None
    loss: str
    weight: float = 0.0
    step: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    heldout: Evaluation | None = None
    beside: Sequence[Evaluation] = ()
    choice: Choice | None = None
    limits: Sequence[str] = ()
    licence: str | None = None
    fingerprint: str | None = None


def save_adapter(
    folder: str | Path, model: Any, tokenizer: Any, prompt: GradePrompt, card: AdapterCard, *, dtype: Any = None
) -> Path:
    """Save the active adapter of a PEFT model as a folder `OCSFTBatchedReranker(base, adapter=folder)` takes.

    `dtype` (a torch dtype) casts the saved weights; scores then equal those of the cast weights. What the model with
    these weights reads from a probe is kept beside them as `canary.json`, for engines to be held to; a model that
    cannot be read now is saved without one, and a warning says why; so is one shared out among processes
    (`card.fingerprint`). A folder already there is replaced if it was written here, and stays as it is if anything
    fails. Raises `InvalidData` for weights that are not finite, `BadArgument` for a card that is not JSON or a folder
    with anything else in it, `OSError` where the disk is full.
    """
    peft = need("peft", extra="train", purpose="adapters are saved through PEFT")
    import torch
    from safetensors.torch import save_file

    target = Path(folder)
    check_folder(target, holds=_ours(target))
    record = adapter_record(model, prompt, card)
    name = model.active_adapter
    state = peft.get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    tensors = {key: weight.detach().to("cpu", dtype or weight.dtype).contiguous() for key, weight in state.items()}
    broken = [key for key, weight in tensors.items() if not torch.isfinite(weight).all()]
    if broken:
        raise InvalidData(f"{len(broken)} weights of the adapter are NaN or infinite, first {broken[0]}; not saved")
    settings = copy.deepcopy(model.peft_config[name])
    settings.base_model_name_or_path, settings.revision = card.base, card.base_revision
    settings.inference_mode = True
    canary = None
    if card.fingerprint is None:  # else one process alone cannot run the model
        with _carrying(model, tensors):
            canary = _canary(model, tokenizer, prompt, name=card.base)
    with _whole(target) as fresh:
        save_file(tensors, str(fresh / "adapter_model.safetensors"), metadata={"format": "pt"})
        settings.save_pretrained(str(fresh))
        tokenizer.save_pretrained(str(fresh))
        if canary is not None:
            canary.write(fresh)
        _finish(fresh, record, title=target.name)
    return target


def _canary(model: Any, tokenizer: Any, prompt: GradePrompt, *, name: str) -> Canary | None:
    """The probe of all documents as `model` reads it; None, with a warning, where it does not."""
    try:
        engine = HFEngine(model, tokenizer=tokenizer)
        return canary_of(engine, probe_windows(engine, prompt)[0], prompt.grade_ids, model=name)
    except PdRerankError as error:
        logger.warning("the adapter is saved without a canary: %s", error)
        return None


@contextmanager
def _carrying(model: Any, tensors: Mapping[str, Any]) -> Iterator[None]:
    """`model` with the weights that are saved, its adapter taking inputs as they come; afterwards as it was."""
    import peft

    name = model.active_adapter
    state = peft.get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    before = {key: weight.detach().clone() for key, weight in state.items() if weight.dtype != tensors[key].dtype}
    layers = [layer for layer in model.modules() if hasattr(layer, "cast_input_dtype_enabled")]
    casts = [layer.cast_input_dtype_enabled for layer in layers]
    try:
        for layer in layers:
            layer.cast_input_dtype_enabled = True
        if before:
            peft.set_peft_model_state_dict(model, dict(tensors), adapter_name=name)
        yield
    finally:
        if before:
            peft.set_peft_model_state_dict(model, before, adapter_name=name)
        for layer, cast in zip(layers, casts, strict=True):
            layer.cast_input_dtype_enabled = cast


def adapter_record(model: Any, prompt: GradePrompt, card: AdapterCard) -> dict[str, Any]:
    """The content of `reranker.json`: the prompt as `GradePrompt.check_card` reads it, the base, training, figures."""
    base = {"id": card.base, "revision": card.base_revision, "fingerprint": card.fingerprint or fingerprint(model)}
    record = {
        "format": "pd_rerank adapter 1",
        **prompt.describe(),
        "grades": list(range(len(prompt.grade_ids))),
        "window": card.window,
        "partition": card.partition,
        "max_length": card.max_length,
        "base": base,
        "loss": card.loss,
        "lambda": card.weight,
        "step": card.step,
        "settings": dict(card.settings),
        "data": dict(card.data),
        "held_out": None if card.heldout is None else card.heldout.describe(queries=False),
        "beside": [evaluation.describe(queries=False) for evaluation in card.beside],
        "choice": None if card.choice is None else card.choice.describe(),
        "limits": list(card.limits),
        "licence": card.licence,
        "versions": versions(SCORED_WITH),
    }
    try:
        text = json.dumps(record, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadArgument(
            f"the adapter's card is no JSON ({error}); give plain numbers, texts, lists and dicts"
        ) from error
    return dict(json.loads(text))


def prompt_of(record: Mapping[str, Any], tokenizer: Any) -> GradePrompt:
    """The prompt an adapter was made with, from its `reranker.json`; `ModelMismatch` where it cannot be had again."""
    said = record.get("rubric")
    if not isinstance(said, Mapping):
        raise InvalidData(f"{CARD} does not hold the rubric the adapter was made with")
    try:
        rubric = Rubric(**{**said, "grades": tuple(said["grades"])})
        prompt = GradePrompt(
            tokenizer,
            rubric=rubric,
            markers=record["markers"],
            placeholder=record["placeholder"],
            max_doc_chars=record["max_doc_chars"],
            chat=record["layout"] != "plain",
        )
    except (KeyError, TypeError) as error:
        raise InvalidData(f"{CARD} does not describe a prompt ({error!r})") from error
    prompt.check_card(record)
    return prompt


# -- exports ----------------------------------------------------------------------------------------------------


def export(
    base: str | Path,
    folder: str | Path,
    *,
    adapter: str | Path,
    form: Form = "merged",
    dtype: Any = "auto",
    revision: str | None = None,
    adapter_revision: str | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Write `base` with `adapter` folded into its weights as a model folder of its own; return its `reranker.json`.

    `merged` is a causal model that any engine loads. `classifier` is the same body under a sequence-classification head
    of one row per grade, copied from the merged output head: row i of its token-wise output is the grade logits at
    position i. That head applies no soft cap, scale or bias; where the model has one, `logits` in `reranker.json` says
    so and `grade_logits` applies it. What was written is loaded again and must read a probe as the merged model does;
    the probe's grades are kept beside it as `canary.json`, for engines to be held to.

    `dtype` "auto" is the checkpoint's own, on the CPU. Raises `ModelMismatch` for what cannot be exported faithfully:
    an adapter on tied embeddings, no classifier of this architecture, a head that is more than one matrix.
    """
    if form not in get_args(Form):
        raise BadArgument(f"unknown form '{form}'; choose one of {', '.join(get_args(Form))}")
    target = Path(folder)
    check_folder(target, holds=_ours(target))
    opened = open_adapter(adapter, revision=adapter_revision)
    own = {"model_kwargs": {"dtype": "auto"}} if dtype in (None, "auto") else {"dtype": dtype}
    engine = HFEngine(
        base,
        adapter=adapter,
        device="cpu",
        revision=revision,
        adapter_revision=adapter_revision,
        trust_remote_code=trust_remote_code,
        **own,
    )
    tokenizer, card = engine.tokenizer, opened.card or {}
    prompt = prompt_of(card, tokenizer) if "template_hash" in card else GradePrompt(tokenizer)
    windows, ids = probe_windows(engine, prompt), prompt.grade_ids
    apart = engine.grade_logits(windows, ids)
    described = engine.describe()
    model = fold_adapter(engine.model, opened)
    together = HFEngine(model, tokenizer=tokenizer).grade_logits(windows, ids)
    limit = _LIMITS.get(described["dtype"], 2e-2)
    record = {
        **card,
        **prompt.describe(),
        "format": f"pd_rerank {form} 1",
        "base": {"id": str(base), "revision": revision, **(card.get("base") or {})},
        "adapter": described["adapter"],
        "dtype": described["dtype"],
        "merging_moved_scores_by": float(np.abs(_scores(apart) - _scores(together)).max()),
        "versions": versions(SCORED_WITH),
    }
    if form == "classifier":
        record["logits"] = _head(model, ids)
        model = _classifier(model, ids, tokenizer)
    attention = getattr(model.config, "_attn_implementation", None)
    with _whole(target) as fresh, no_bars():
        model.save_pretrained(str(fresh))
        tokenizer.save_pretrained(str(fresh))
        del model, engine
        gc.collect()  # the folder is loaded once more, and two copies may not fit
        if form == "merged":
            kept = HFEngine(
                fresh,
                tokenizer=tokenizer,
                dtype=described["dtype"],
                device="cpu",
                attn_implementation=attention,
                trust_remote_code=trust_remote_code,
            )
            read = kept.grade_logits(windows, ids)
        else:
            rows = _classifier_rows(fresh, windows, attention=attention, trust_remote_code=trust_remote_code)
            read = [grade_logits(r, record) for r in rows]
        _prove(read, together, limit, form)
        kept_as = {"dtype": described["dtype"], "model": described["model"]}
        Canary(prompt=windows[0], grade_ids=tuple(ids), logits=together[0], **kept_as).write(fresh)
        _finish(fresh, record, title=target.name)
    return dict(read_json(target / CARD))


def grade_logits(rows: FloatArray, record: Mapping[str, Any]) -> FloatArray:
    """Grade logits from a classifier export's rows (…, G): bias, scale and soft cap that its head leaves out.

    `record` is the export's `reranker.json`. logits = cap · tanh((rows + bias) · scale / cap), each where there is one.
    """
    said = record.get("logits") or {}
    logits = np.asarray(rows, dtype=np.float32)
    if (bias := said.get("bias")) is not None:
        logits = logits + np.asarray(bias, dtype=np.float32)
    if (scale := said.get("scale")) is not None:
        logits = logits * np.float32(scale)
    if (cap := said.get("softcap")) is not None:
        logits = np.float32(cap) * np.tanh(logits / np.float32(cap))
    return logits


def _head(model: Any, ids: Sequence[int]) -> dict[str, Any]:
    """What the model does to its head's product before it is the logits; refuses a head that is more than a matrix."""
    import torch

    head, config = model.get_output_embeddings(), model.config.get_text_config()
    if type(head) is not torch.nn.Linear:
        raise ModelMismatch(
            f"the output head is a {type(head).__name__}, not one matrix, so four of its rows are no classifier; "
            "export it with --form merged"
        )
    said: dict[str, Any] = {}
    if head.bias is not None:
        said["bias"] = head.bias.detach()[list(ids)].float().tolist()
    if getattr(config, "logits_scaling", None) not in (None, 1.0):
        said["scale"] = 1.0 / float(config.logits_scaling)
    elif getattr(config, "logit_scale", None) not in (None, 1.0):
        said["scale"] = float(config.logit_scale)
    if getattr(config, "final_logit_softcapping", None):
        said["softcap"] = float(config.final_logit_softcapping)
    return said


def _classifier(model: Any, ids: Sequence[int], tokenizer: Any) -> Any:
    """The model's body under transformers' sequence-classification head, its rows those of the grades."""
    import torch
    import transformers

    config = copy.deepcopy(model.config)
    config.num_labels = len(ids)
    config.id2label = {grade: str(grade) for grade in range(len(ids))}
    config.label2id = {str(grade): grade for grade in range(len(ids))}
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id
    kind = type(model).__name__
    try:
        with torch.device("meta"):
            made = transformers.AutoModelForSequenceClassification.from_config(config)
    except ValueError as error:
        raise ModelMismatch(
            f"transformers has no sequence classifier for {kind}; export it with --form merged, and let the server cut "
            "the head to the grades"
        ) from error
    body = model.base_model_prefix
    if made.base_model_prefix != body or type(getattr(made, body, None)) is not type(getattr(model, body)):
        raise ModelMismatch(f"{type(made).__name__} has another body than {kind}; export it with --form merged")
    setattr(made, body, getattr(model, body))
    rows = model.get_output_embeddings().weight.detach()[list(ids)].clone()
    score = torch.nn.Linear(rows.shape[1], len(ids), bias=False, dtype=rows.dtype)
    score.weight = torch.nn.Parameter(rows)
    made.score = score
    if left := [name for name, weight in made.named_parameters() if weight.is_meta]:
        raise ModelMismatch(
            f"{type(made).__name__} needs weights {kind} has not ({left[0]}); export it with --form merged"
        )
    made.config.architectures = [type(made).__name__]
    return made.eval()


def _classifier_rows(
    folder: Path, windows: Sequence[WindowPrompt], *, attention: str | None, trust_remote_code: bool
) -> list[FloatArray]:
    """Load a classifier export and read its head's rows at every slot of every window."""
    import torch
    import transformers

    made, found = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder,
        dtype="auto",
        attn_implementation=attention,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
    )
    if found["missing_keys"]:
        raise ModelMismatch(
            f"the classifier was saved without {sorted(found['missing_keys'])[0]}; nothing is kept of it"
        )
    made.eval()
    body, rows = getattr(made, made.base_model_prefix), []
    with torch.inference_mode():
        for window in windows:
            hidden = body(input_ids=torch.tensor(np.array(window.token_ids))[None], use_cache=False).last_hidden_state
            rows.append(made.score(hidden[0, window.slots.tolist()]).float().numpy())
    return rows


def _prove(read: Sequence[FloatArray], wanted: Sequence[FloatArray], limit: float, form: str) -> None:
    """Refuse an export that does not read a probe as the model it was made of."""
    mine, theirs = np.concatenate(read), np.concatenate(wanted)
    largest, apart = float(np.abs(theirs).max()), float(np.abs(mine - theirs).max())
    if not apart <= limit * max(1.0, largest):
        raise ModelMismatch(
            f"the {form} export reads a probe by up to {apart:.2g} off the model it was made of (logits up to "
            f"{largest:.2g}): this architecture does something that form cannot hold; serve the adapter unmerged"
        )


def _scores(read: Sequence[FloatArray]) -> Any:
    return read_out(grade_probabilities(np.concatenate(read)))


# -- folders ----------------------------------------------------------------------------------------------------


def _ours(folder: Path) -> set[str]:
    """The files of a folder that were written here, by its own record: what may be replaced."""
    record = read_json(folder / CARD) if (folder / CARD).is_file() else {}
    files = record.get("files") if isinstance(record, dict) else None
    return {CARD, README, *(files if isinstance(files, dict) else ())}


def _finish(fresh: Path, record: dict[str, Any], *, title: str) -> None:
    """Write the model card and the record, which names every file."""
    record["files"] = {path.name: sha256_file(path) if path.is_file() else None for path in sorted(fresh.iterdir())}
    (fresh / README).write_text(model_card(record, title=title), encoding="utf-8")
    write_json(fresh / CARD, record)


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """`whole_folder`; what libraries raise on a full disk becomes an `OSError` that says what is left."""
    try:
        with whole_folder(target, holds=_ours(target)) as fresh:
            yield fresh
    except PdRerankError:
        raise
    except Exception as error:
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
            raise
        kept = "what was there before is untouched" if target.exists() else "nothing of it is kept"
        raise OSError(f"{target} could not be written ({error}); {kept}: free some space and save again") from error
