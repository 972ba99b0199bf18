"""Tiny random models of the families that differ where grades are read, and prompts for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pd_rerank.engines.base import FloatArray, WindowPrompt

VOCABULARY = 160
GRADES = (33, 7, 150, 64)
"""Not consecutive and not sorted, as in Gemma 3."""

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "sliding_window": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "Gemma3Text": {"head_dim": 16, "sliding_window": 16, "sliding_window_pattern": 2},
    "Mistral": {"sliding_window": 12},
    "Granite": {"logits_scaling": 7.0, "attention_multiplier": 0.3, "embedding_multiplier": 3.0},
    "Cohere": {"logit_scale": 0.3},
    "Phi": {},
    "Phi3": {},
    "GPTNeoX": {},
}
"""Soft caps, windows shorter than the prompts, scaled logits, and (Phi) an output head with a bias."""


def tiny(family: str = "Llama", *, seed: int = 0, attention: str | None = None, **changes: Any) -> Any:
    """A random causal model of a family, float32, in evaluation mode."""
    import torch
    import transformers

    settings = {**SHAPE, **FAMILIES.get(family, {}), **changes}
    if family == "GPTNeoX":
        del settings["num_key_value_heads"]
    config = getattr(transformers, f"{family}Config")(**settings)
    name = "Gemma3ForCausalLM" if family == "Gemma3Text" else f"{family}ForCausalLM"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, name)._from_config(config, attn_implementation=attention or _attention(settings))
        head = model.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            torch.nn.init.normal_(head.bias)
    return model.float().eval()


def _attention(settings: dict[str, Any]) -> str:
    return "eager" if settings.get("attn_logit_softcapping") else "sdpa"


class Words:
    """The little a tokenizer must be here: a size, a padding token, an end."""

    pad_token_id = 0
    eos_token_id = 2
    model_max_length = int(1e30)

    def __init__(self, size: int = VOCABULARY) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


def prompt(
    tokens: int, slots: int, *, seed: int, start: list[int] | None = None, claim: int | None = None
) -> WindowPrompt:
    """A random prompt with its slots near the end; `start` leads it and counts as shared, unless `claim` says else."""
    rng = np.random.default_rng(seed)
    start = start or []
    ids = np.concatenate([np.array(start, dtype=np.int64), rng.integers(3, VOCABULARY, tokens - len(start))])
    at = tokens - 2 - 3 * np.arange(slots)[::-1]
    return WindowPrompt(token_ids=ids.astype(np.int64), slots=at.astype(np.int64), shared=len(start))


def start_of(tokens: int, *, seed: int) -> list[int]:
    """Random token ids to lead several prompts."""
    return [int(x) for x in np.random.default_rng(seed).integers(3, VOCABULARY, tokens)]


def one_slot_at_a_time(model: Any, prompts: list[WindowPrompt], grades: tuple[int, ...] = GRADES) -> list[FloatArray]:
    """The naive reading: for each slot, the prompt up to it, all logits, the last position, the grades picked."""
    import torch

    answers = []
    with torch.no_grad():
        for p in prompts:
            rows = [
                model(input_ids=torch.tensor(p.token_ids[: slot + 1])[None], use_cache=False).logits[
                    0, -1, list(grades)
                ]
                for slot in p.slots
            ]
            answers.append(torch.stack(rows).float().numpy())
    return answers


def save_adapter(
    folder: Path,
    model: Any,
    *,
    targets: list[str] | None = None,
    rank: int = 4,
    zero: bool = False,
    seed: int = 1,
    **settings: Any,
) -> Path:
    """Put a random LoRA adapter on `model` (changing it in place), save it to `folder` as PEFT does."""
    import warnings

    import peft
    import torch

    targets = targets or ["q_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(r=rank, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", **settings)
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        wrapped = peft.get_peft_model(model, config)
        if not zero:
            for name, weight in wrapped.named_parameters():
                if "lora_" in name:
                    torch.nn.init.normal_(weight, std=0.2)
        wrapped.save_pretrained(folder, save_embedding_layers=False)
    return folder
