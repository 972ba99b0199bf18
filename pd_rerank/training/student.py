"""The model in training: a base model with a fresh LoRA adapter, read at slots and nowhere else.

The base stays frozen in its own precision. The adapter's weights are float32 and are used in the base's precision, as
they will be served; computed in float32 they took a quarter more time and memory on a CPU and gave the same gradients.
Only hidden states at slots reach the output head, and of the head only the grades' rows, in float32: no logit of the
vocabulary is computed.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pd_rerank._extras import need
from pd_rerank.engines.adapters import check_base, open_adapter
from pd_rerank.engines.base import WindowPrompt
from pd_rerank.engines.loading import load_named, named_dtype, out_of_memory
from pd_rerank.errors import BadArgument, EngineFailure, ModelMismatch
from pd_rerank.training.examples import Example, View
from pd_rerank.training.losses import Batch, in_window_order

if TYPE_CHECKING:
    from torch import Tensor

    from pd_rerank.training.sharding import SharedBase
else:
    Tensor = Any

PROJECTIONS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
"""The seven projections of Llama, Qwen, Mistral, Gemma and Granite, in words of `Lora.targets`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """The adapter to train. `targets`: module names between commas, `all-linear`, or a regular expression."""

    rank: int = 16
    alpha: float = 32
    dropout: float = 0.05
    targets: str = PROJECTIONS

    @property
    def modules(self) -> str | list[str]:
        """The targets in PEFT's form."""
        if self.targets == "all-linear" or re.search(r"[^\w,\s-]", self.targets):
            return self.targets
        return [name.strip() for name in self.targets.split(",") if name.strip()]


def load_student(
    name: str,
    *,
    lora: Lora,
    seed: int,
    dtype: Any = "auto",
    device: Any = None,
    revision: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    start: str | Path | None = None,
) -> tuple[Any, Any]:
    """Load a base model and put a LoRA adapter on it, drawn with `seed` or `start`ing from a finished one.

    Returns the PEFT model and its tokenizer. The base keeps its precision, the adapter is float32, whatever the base
    is. Raises what loading raises, `BadArgument` for an adapter in place of a base and for targets the model does not
    have, and what `start_from` raises.
    """
    need("peft", extra="train", purpose="training puts a LoRA adapter on the model through PEFT")
    torch = need("torch", extra="train", purpose="training runs on torch")
    loaded = load_named(
        name,
        adapter=None,
        tokenizer=None,
        dtype=named_dtype(torch, dtype),
        device=device,
        device_map=None,
        revision=revision,
        adapter_revision=None,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        model_kwargs={},
        tokenizer_kwargs={},
        quiet=False,
    )
    if loaded.adapter is not None:
        raise BadArgument(f"'{name}' is an adapter; name a base model, on which a new adapter is trained")
    model = with_lora(loaded.model, lora, seed=seed)
    if start is not None:
        start_from(model, start)
    return model, loaded.tokenizer


def with_lora(model: Any, lora: Lora, *, seed: int) -> Any:
    """`model` with a fresh adapter, changed in place; its weights are drawn with `seed`, torch's own state is kept."""
    import peft
    import torch

    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.modules,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of tied embeddings it does not touch
        torch.manual_seed(seed)
        try:
            wrapped = peft.get_peft_model(model, config)
        except ValueError as error:
            raise BadArgument(
                f"no adapter can be put on {type(model).__name__} with lora-targets '{lora.targets}': {error}"
            ) from error
    for weight in wrapped.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
    for module in wrapped.modules():
        for dropout in getattr(module, "lora_dropout", {}).values():
            if type(dropout) is torch.nn.Dropout:
                dropout.forward = partial(_drop, dropout)
    return wrapped


def _drop(dropout: Any, x: Tensor) -> Tensor:
    """What torch's dropout gives, with 16 random bits for each element on a CPU.

    There torch draws each element by itself, which was an eighth of a training step; this takes half of that.
    """
    import torch

    dropped = round(dropout.p * 2**16)
    if not dropout.training or x.device.type != "cpu" or not 0 < dropped < 2**16:
        return torch.nn.functional.dropout(x, dropout.p, dropout.training)
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    kept = bits[: x.numel()].view(x.shape) >= dropped - 2**15
    return x * kept.to(x.dtype).mul_(2**16 / (2**16 - dropped))


def start_from(model: Any, source: str | Path) -> None:
    """Give the fresh adapter of `model` the weights of a finished one, changed in place.

    `ModelMismatch` where that one was trained on another base or has other weights than this: another rank or scale,
    other targets, or an output head of its own.
    """
    import peft

    start = open_adapter(source)
    check_base(model, start)
    alpha = model.peft_config[model.active_adapter].lora_alpha
    if (there := start.settings.get("lora_alpha")) != alpha:
        raise ModelMismatch(f"training cannot start from '{source}' at --lora-alpha {alpha:g}; give {there}, as it has")
    state = peft.load_peft_weights(str(start.folder), device="cpu")
    wanted = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    shapes = [{name: tuple(weight.shape) for name, weight in weights.items()} for weights in (state, wanted)]
    if shapes[0] != shapes[1]:
        differ = sorted(name for name in shapes[0] | shapes[1] if shapes[0].get(name) != shapes[1].get(name))
        raise ModelMismatch(
            f"training cannot start from '{source}': its weights are not those of the adapter in training, first "
            f"{differ[0]}; give --lora-rank ({start.rank} there) and --lora-targets as it has them"
        )
    peft.set_peft_model_state_dict(model, state)


class Student:
    """Grade logits of a model in training, with gradients: (slots, G) float32 per prompt.

    `model` is a PEFT model; `checkpointing` computes activations again in the backward pass instead of keeping them.
    `through` in the methods is the model as accelerate wrapped it, where gradients are to be shared.
    """

    def __init__(self, model: Any, grade_ids: Sequence[int], *, checkpointing: bool = False) -> None:
        import torch

        self._torch = torch
        self.model = model
        base = model.get_base_model()
        self._keeps = "logits_to_keep" in inspect.signature(base.forward).parameters
        self._head = base.get_output_embeddings()
        self._grades = torch.tensor(list(grade_ids), dtype=torch.long)
        self._rows, self._bias = self._grade_rows()
        self._half = base.dtype if base.dtype in (torch.bfloat16, torch.float16) else None
        self._adapted = [m for m in model.modules() if hasattr(m, "cast_input_dtype_enabled")]
        self._cast(self._half is None)
        if checkpointing:
            # transformers renamed it in 5.24; only the form that is not reentrant takes several passes to one backward
            enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        model.train()

    @property
    def weights(self) -> dict[str, Any]:
        """The parameters in training, by name."""
        return {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}

    def logits(self, prompt: WindowPrompt, through: Any = None) -> Tensor:
        """Logits of the grades at the slots of one prompt, (slots, G) float32."""
        torch = self._torch
        model = self.model if through is None else through
        device = self.model.get_input_embeddings().weight.device
        ids = torch.from_numpy(np.ascontiguousarray(prompt.token_ids))[None].to(device)
        slots = torch.from_numpy(np.ascontiguousarray(prompt.slots)).to(device)
        how = {"logits_to_keep": slots} if self._keeps else {}
        with self._four_rows(), torch.autocast(device.type, dtype=self._half, enabled=self._half is not None):
            found = model(input_ids=ids, use_cache=False, **how).logits[0]
        found = found if self._keeps else found[slots]
        return found.float() if self._rows is not None else found[:, self._grades.to(found.device)].float()

    @contextmanager
    def as_served(self) -> Iterator[None]:
        """Let others run the model, outside of training: the adapter then takes what it is given."""
        self._cast(True)
        try:
            yield
        finally:
            self._cast(self._half is None)

    def _cast(self, to_float32: bool) -> None:
        """Whether the adapter's inputs become float32 like its weights, rather than its weights like its inputs."""
        for module in self._adapted:
            module.cast_input_dtype_enabled = to_float32

    def share(self, shared: SharedBase) -> None:
        """Share the base out among processes; from then on all of them run the model together."""
        shared.take(self.model)
        device = self.model.get_input_embeddings().weight.device
        self._rows, self._bias = (None if kept is None else kept.to(device) for kept in (self._rows, self._bias))

    def view(self, view: View, m: int, through: Any = None) -> Tensor:
        """Logits of one view, (m, G), in the order of the example's documents."""
        rows = [self.logits(prompt, through) for prompt in view.prompts]
        whole = rows[0] if len(rows) == 1 else self._torch.cat(rows)
        return in_window_order(whole, self._torch.from_numpy(view.shows).to(whole.device), m)

    def example(self, example: Example, *, views: int | None = None, through: Any = None) -> Tensor:
        """Logits of all views of an example, or of the first `views`: (views, m, G). Prompts run one by one."""
        try:
            return self._torch.stack(
                [self.view(view, len(example.positions), through) for view in example.views[:views]]
            )
        except Exception as error:
            if not out_of_memory(error):
                raise
            raise EngineFailure(
                f"a window of query '{example.query_id}' ({example.tokens} tokens in {len(example.views)} views) does "
                "not fit into memory; set gradient-checkpointing, lower window-size or max-doc-chars, or take dtype "
                "bfloat16"
            ) from error

    def base(self, example: Example) -> Tensor:
        """View 0's logits without the adapter and without gradients, (m, G)."""
        with self._torch.no_grad(), self.model.disable_adapter():
            return self.view(example.views[0], len(example.positions))

    def averaged(self, example: Example, average: Average) -> Tensor | None:
        """The second view's logits with the averaged weights, without gradients (m, G); None where there is one view.

        Dropout stays on, as in the reference. Source: method, section 4.4.
        """
        if len(example.views) < 2:
            return None
        with self._torch.no_grad(), average.in_place_of(self.weights):
            return self.view(example.views[1], len(example.positions))

    def batch(self, example: Example, *, reference: Tensor | None = None) -> Batch:
        """An example's labels on the model's device."""
        device = self.model.get_input_embeddings().weight.device

        def tensor(values: Any) -> Any:
            return None if values is None else self._torch.from_numpy(np.ascontiguousarray(values)).to(device)

        shown = example.shown
        return Batch(
            targets=tensor(example.targets),
            probabilities=tensor(example.probabilities),
            weights=tensor(example.weights),
            shown=None if shown.all() else tensor(shown),
            reference=reference,
        )

    def _grade_rows(self) -> tuple[Any, Any]:
        """The head's rows of the grades in float32; None where the head is in training, or no plain matrix."""
        head, torch = self._head, self._torch
        if type(head) is not torch.nn.Linear or any(weight.requires_grad for weight in head.parameters()):
            return None, None
        at = self._grades.to(head.weight.device)
        bias = None if head.bias is None else head.bias.detach()[at].float()
        return head.weight.detach()[at].float(), bias

    @contextmanager
    def _four_rows(self) -> Iterator[None]:
        """Let the model's own forward, with its scales and caps, go through the grades' rows of the head alone."""
        if self._rows is None:
            yield
            return
        torch, rows, bias = self._torch, self._rows, self._bias

        def few(hidden: Any) -> Any:
            with torch.autocast(hidden.device.type, enabled=False):
                return torch.nn.functional.linear(hidden.float(), rows, bias)

        self._head.forward = few
        try:
            yield
        finally:
            del self._head.forward


class Average:
    """A running mean of the weights in training: after each step, mean = decay · mean + (1 - decay) · weight.

    It starts as a copy. Source: method, section 4.4.
    """

    def __init__(self, weights: Mapping[str, Any], *, decay: float = 0.999) -> None:
        self.decay = decay
        self.means = {name: weight.detach().clone() for name, weight in weights.items()}

    def update(self, weights: Mapping[str, Any]) -> None:
        """Move towards `weights`."""
        for name, weight in weights.items():
            self.means[name].lerp_(weight.detach(), 1.0 - self.decay)

    @contextmanager
    def in_place_of(self, weights: Mapping[str, Any]) -> Iterator[None]:
        """Put the means where the weights are, for as long as this lasts."""
        kept = {name: weight.data for name, weight in weights.items()}
        for name, weight in weights.items():
            weight.data = self.means[name]
        try:
            yield
        finally:
            for name, weight in weights.items():
                weight.data = kept[name]
