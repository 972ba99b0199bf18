"""LoRA adapters: opened, applied to a base model, and proved to be applied.

An adapter is a folder (or hub repository) with `adapter_config.json` and `adapter_model.safetensors`, as PEFT
writes it, and, where it was trained here, `reranker.json` beside them. Loading one is full of silent
failures: keys that match nothing, a resized vocabulary, an adapter that changes no score. Each is an error.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pd_rerank._extras import need
from pd_rerank.embedded import adapter_folder
from pd_rerank.errors import InvalidData, MissingResource, ModelMismatch
from pd_rerank.files import CARD, read_json, sha256_file

logger = logging.getLogger("pd_rerank")

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_SHOWN = 3
_OTHER_SIZE = re.compile(
    r"size mismatch for (\S+?): copying a param with shape torch\.Size\(\[([\d, ]*)\]\) from checkpoint, "
    r"the shape in current model is torch\.Size\(\[([\d, ]*)\]\)"
)
_VOCABULARY = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings", "lora_embedding")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter on disk: its folder, PEFT's settings for it, and our own card if it has one.

    `card` is the parsed `reranker.json` (prompt, template hash, training), None where there is none.
    """

    source: str
    folder: Path
    settings: dict[str, Any]
    card: dict[str, Any] | None

    @property
    def rank(self) -> int | None:
        """The largest LoRA rank in it, per-module ranks included; None for another kind of adapter."""
        ranks = [self.settings.get("r"), *(self.settings.get("rank_pattern") or {}).values()]
        return max((int(r) for r in ranks if r is not None), default=None)

    @property
    def base(self) -> str | None:
        """The base model it names: a hub id, or a path on the machine it was trained on."""
        return self.settings.get("base_model_name_or_path") or None

    @property
    def weights(self) -> Path | None:
        """Its weight file."""
        return next((self.folder / name for name in _WEIGHTS if (self.folder / name).is_file()), None)

    @property
    def changes_head(self) -> bool:
        """Whether it changes the output head or the embeddings, which a head copied from the base leaves out."""
        listed = [self.settings.get(name) or () for name in ("target_modules", "modules_to_save")]
        named = [module for some in listed for module in ([some] if isinstance(some, str) else some)]
        keys = _keys(self.weights)
        return any(name in text for text in (*named, *keys) for name in _VOCABULARY)

    def describe(self) -> dict[str, Any]:
        """Return what a manifest must record of it."""
        return {
            "source": self.source,
            "sha256": sha256_file(self.weights) if self.weights else None,
            "type": self.settings.get("peft_type"),
            "rank": self.rank,
            "rank_pattern": self.settings.get("rank_pattern") or {},
            "alpha": self.settings.get("lora_alpha"),
            "alpha_pattern": self.settings.get("alpha_pattern") or {},
            "target_modules": self.settings.get("target_modules"),
            "trained_on": self.base,
        }


def _keys(weights: Path | None) -> list[str]:
    """The names of the tensors in a safetensors file, from its header (8 bytes of length, then JSON)."""
    if weights is None or weights.suffix != ".safetensors":
        return []
    with weights.open("rb") as file:
        try:
            return list(json.loads(file.read(int.from_bytes(file.read(8), "little"))))
        except ValueError as error:
            raise InvalidData(f"{weights} is damaged: its header is no JSON; fetch it again") from error


def is_adapter_folder(folder: str | Path) -> bool:
    """Whether a local folder holds an adapter and no model of its own."""
    return Path(folder, _CONFIG).is_file() and not Path(folder, "config.json").is_file()


def open_adapter(source: str | Path, *, revision: str | None = None, local_only: bool = False) -> Adapter:
    """Read an adapter's settings from a folder, by short name, or from a hub repository (fetched to the hub's cache).

    Raises `MissingResource` where there is none, `InvalidData` for settings that are no JSON object.
    """
    folder = adapter_folder(source)
    if not folder.is_dir():
        folder = _fetch(str(source), revision, local_only)
    if not (folder / _CONFIG).is_file():
        raise MissingResource(f"{folder} holds no {_CONFIG}, so it is no adapter; give the folder PEFT saved")
    settings = read_json(folder / _CONFIG)
    if not isinstance(settings, dict):
        raise InvalidData(f"{folder / _CONFIG} is not a JSON object")
    card = read_json(folder / CARD) if (folder / CARD).is_file() else None
    adapter = Adapter(source=str(source), folder=folder, settings=settings, card=card)
    if adapter.weights is None:
        raise MissingResource(f"{folder} holds {_CONFIG} but none of {', '.join(_WEIGHTS)}: the adapter has no weights")
    return adapter


def _fetch(source: str, revision: str | None, local_only: bool) -> Path:
    hub = need("huggingface_hub", extra="hf", purpose=f"the adapter '{source}' is no folder here")
    try:
        return Path(
            hub.snapshot_download(
                source,
                revision=revision,
                local_files_only=local_only,
                allow_patterns=["adapter_*", "*.json", "*.jinja", "tokenizer*"],
            )
        )
    except (OSError, ValueError) as error:  # absent, gated or unreachable; ValueError: not even a hub id
        where = "the hub is out of reach or switched off" if local_only else "the hub would not give it"
        raise MissingResource(
            f"the adapter '{source}' is neither a folder here nor in the hub's cache, and {where}; check the name"
        ) from error


def apply_adapter(model: Any, adapter: Adapter) -> Any:
    """Wrap `model` with the adapter, in evaluation mode and the model's own precision; every key must match.

    The model's modules are changed in place. Raises `ModelMismatch` when shapes differ (a resized vocabulary
    gives both sizes), when no module is targeted, or when the file and the model disagree on a single key.
    """
    peft = need("peft", extra="hf", purpose=f"the adapter '{adapter.source}' needs PEFT")
    with _peft_notices():
        try:
            wrapped = peft.PeftModel.from_pretrained(
                model, str(adapter.folder), autocast_adapter_dtype=False, torch_device="cpu"
            )
            if wrapped.active_peft_config.is_prompt_learning:
                raise ModelMismatch(
                    f"the adapter '{adapter.source}' is of type {adapter.settings.get('peft_type')}, which adds "
                    "tokens to the prompt; grades are read at token positions, so only weight adapters (LoRA) will do"
                )
            # loaded once more, because only this call reports which keys of the file matched nothing
            file = peft.load_peft_weights(str(adapter.folder), device="cpu")
            result = peft.set_peft_model_state_dict(wrapped, file)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise _explained(adapter, error) from error
    unexpected = list(result.unexpected_keys)
    missing = [key for key in result.missing_keys if f".{wrapped.active_adapter}" in key]
    if unexpected or missing:
        raise ModelMismatch(
            f"the adapter '{adapter.source}' does not fit this model: "
            f"{_some(unexpected)} in its file match nothing in the model, {_some(missing)} the model expects are not "
            f"in the file; it was trained on '{adapter.base}': give that base as the model"
        )
    return wrapped.eval()


def fingerprint(model: Any) -> str | None:
    """A hash that tells apart models of one shape: the first row of every weight, rounded to bfloat16.

    Adapters on the model do not count, nor do the weights' names and order, which libraries change. None where there
    is nothing to compare: quantised or float16 weights, or weights that are not in memory.
    """
    import torch

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    rows = []
    for name, weight in base.named_parameters():
        if any(part.startswith("lora_") or part == "modules_to_save" for part in name.split(".")):
            continue
        if weight.is_meta or weight.dtype not in (torch.float32, torch.bfloat16):
            return None
        row = weight.detach()
        while row.ndim > 1:
            row = row[0]
        raw = row.to("cpu", torch.bfloat16).reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        rows.append(hashlib.sha256(raw).digest())
    return hashlib.sha256(b"".join(sorted(rows))).hexdigest()


def check_base(model: Any, adapter: Adapter) -> None:
    """Refuse a model with other weights than those the adapter's card records as its base; without a record, pass."""
    base = adapter.card.get("base") if isinstance(adapter.card, dict) else None
    theirs = base.get("fingerprint") if isinstance(base, dict) else None
    mine = None if theirs is None else fingerprint(model)
    if isinstance(base, dict) and mine is not None and mine != theirs:
        revision = f" at revision {base['revision']}" if base.get("revision") else ""
        raise ModelMismatch(
            f"the adapter '{adapter.source}' was trained on '{base.get('id')}'{revision}, and the weights of this "
            "model are others; give that base as the model, or check_adapter=False to use it on this one"
        )


def fold_adapter(wrapped: Any, adapter: Adapter) -> Any:
    """Fold an applied adapter into the weights and return the plain model.

    Raises `ModelMismatch` where input and output embeddings are one tensor and the adapter changes either:
    merging would change both.
    """
    base = wrapped.get_base_model()
    tied = bool(getattr(base.config.get_text_config(), "tie_word_embeddings", False))
    if tied and any(hasattr(layer, "lora_A") for layer in (base.get_input_embeddings(), base.get_output_embeddings())):
        raise ModelMismatch(
            f"the adapter '{adapter.source}' changes the output head or the embeddings, which this model ties into one "
            "tensor: merging would change both; use it unmerged (merge_adapter=False)"
        )
    with _peft_notices():
        return wrapped.merge_and_unload().eval()


def _explained(adapter: Adapter, error: Exception) -> ModelMismatch:
    """The error of a failed load, in terms of the adapter and the base rather than of tensors."""
    sizes = _OTHER_SIZE.findall(str(error))
    for key, theirs, ours in sizes:
        if any(name in key for name in _VOCABULARY):
            differing = [(a, b) for a, b in zip(_shape(theirs), _shape(ours), strict=False) if a != b]
            if differing:
                return ModelMismatch(
                    f"the adapter '{adapter.source}' was trained with a vocabulary of {differing[0][0]}, this base has "
                    f"{differing[0][1]} ({key}); give the base with the resized vocabulary, or resize it as in training"
                )
    if sizes:
        key, theirs, ours = sizes[0]
        return ModelMismatch(
            f"the adapter '{adapter.source}' has shape [{theirs}] where this base has [{ours}] ({key}, one of "
            f"{len(sizes)}); it was trained on '{adapter.base}': give that base as the model"
        )
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ModelMismatch(
        f"the adapter '{adapter.source}' could not be applied ({first[:300]}); it was trained on '{adapter.base}'"
    )


def _shape(text: str) -> list[int]:
    return [int(x) for x in text.split(",") if x.strip()]


def _some(keys: list[str]) -> str:
    return f"{len(keys)} keys" + (f" ({', '.join(keys[:_SHOWN])}{', …' if len(keys) > _SHOWN else ''})" if keys else "")


@contextmanager
def _peft_notices() -> Iterator[None]:
    """PEFT speaks through warnings; what it says is logged, and what matters is checked above."""
    with warnings.catch_warnings(record=True) as notices:
        warnings.simplefilter("always")
        yield
    for notice in notices:
        logger.info("peft: %s", str(notice.message).splitlines()[0])
