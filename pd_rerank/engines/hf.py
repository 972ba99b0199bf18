"""The transformers engine: grades read from the slots of one forward pass.

Only the slots' rows go through the model's own output head (so its bias, soft cap, scale or adapter stay
right) and only the grade tokens' logits leave it. On a CPU prompts run one by one without padding or mask; on
an accelerator they run in batches padded on the right, which causal attention makes exact without a mask. What
the prompts of a query share at their start is computed once, where that saves enough.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from pd_rerank._extras import need
from pd_rerank.embedded import EMBEDDED
from pd_rerank.engines.adapters import Adapter, apply_adapter, check_base, fold_adapter
from pd_rerank.engines.base import FloatArray, IntArray, Progress, WindowPrompt
from pd_rerank.engines.loading import load_named, named_dtype, out_of_memory, take_object
from pd_rerank.errors import BadArgument, EngineFailure, ModelMismatch, whole
from pd_rerank.files import CARD, read_json

logger = logging.getLogger("pd_rerank")

Batching = Literal["auto", "padded", "single"]

_NO_LIMIT = 1 << 30
_WORTH_SHARING = 0.2
"""On an accelerator, share a prefix when that saves this part of all tokens."""
_WORTH_SHARING_CPU, _MASK_COST = 0.1, 1 / 3500
"""On a CPU, when it saves this part, and what attention then costs more: behind a prefix it takes a mask and computes
what a causal pass leaves out, half the square of the tokens behind it (fitted to docs/log.md, 2026-12-01)."""
_CPU_ROWS = 16
_CPU_TOKENS = 1024
_SMALLER = "score fewer candidates per window, lower max_doc_chars, or load the model in a smaller dtype (bfloat16)"


class HFEngine:
    """Reads grade logits with a causal language model of transformers.

    `model` is a short name (`pd_rerank.embedded`), a hub id, a folder, a folder that holds only an adapter (its
    base is loaded under it), or a model object, then with `tokenizer`. A model object is used as it is: it is
    moved or cast only if `device` or `dtype` say so, an adapter is put into it in place, and soft-capped models
    set to `sdpa` attention are switched to `eager`, which knows the cap.

    `adapter`: a PEFT folder or hub id; `merge_adapter` folds it into the weights; `check_adapter` proves that the
    model is the base its card records and, on a probe, that it changes the logits. `dtype`: auto, float32/fp32,
    bfloat16/bf16, float16/fp16 or a torch dtype; auto takes bfloat16 on a CPU that computes in it and float32 on
    others, the checkpoint's own on accelerators.
    `device_map`, `attn_implementation`, `trust_remote_code`, `model_kwargs`, `tokenizer_kwargs` go to
    transformers. `max_length` lowers the model's own limit, in tokens.

    `batching`: `single` (no padding), `padded`, or `auto` (padded on accelerators). `batch_tokens` bounds a
    padded or prefix-sharing batch and is halved when memory runs out. `share_prefix`: compute a query's common
    prompt start once always (True), never (False), or where it saves enough tokens to pay (auto: a fifth of them, on a
    CPU a tenth, and more where many tokens are left); "queries": as auto, and what prompts of different queries have
    in common too, which then depends on what is scored together.

    `adapter_card` is the `reranker.json` of the adapter, or of a model folder that one was merged into, or None.
    Raises `MissingResource`, `ModelMismatch` or `BadArgument` before anything is scored.
    """

    _keeps: bool
    _keeps_per_row: bool
    _cache_word: str
    _filler: int
    _turn: int | None

    def __init__(
        self,
        model: Any,
        *,
        adapter: str | os.PathLike[str] | None = None,
        tokenizer: Any = None,
        dtype: Any = "auto",
        device: Any = None,
        device_map: Any = None,
        revision: str | None = None,
        adapter_revision: str | None = None,
        merge_adapter: bool = False,
        check_adapter: bool = True,
        batching: Batching = "auto",
        batch_tokens: int | None = None,
        share_prefix: bool | Literal["auto", "queries"] = "auto",
        max_length: int | None = None,
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        model_kwargs: Mapping[str, Any] | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        quiet: bool = False,
    ) -> None:
        if batching not in get_args(Batching):
            raise BadArgument(f"unknown batching '{batching}'; choose one of {', '.join(get_args(Batching))}")
        if not (isinstance(share_prefix, bool) or share_prefix in ("auto", "queries")):
            raise BadArgument(f"share_prefix is True, False, 'auto' or 'queries', not {share_prefix!r}")
        for name, number in (("batch_tokens", batch_tokens), ("max_length", max_length)):
            if number is not None and (not whole(number) or number < 1):
                raise BadArgument(f"{name} must be a whole number of at least 1, got {number!r}")
        if device is not None and device_map is not None:
            raise BadArgument("give device or device_map, not both")
        torch = need("torch", extra="hf", purpose="the transformers engine runs on torch")
        need("transformers", extra="hf", purpose="the transformers engine loads models through transformers")

        self._torch = torch
        if isinstance(model, str | os.PathLike):
            loaded = load_named(
                os.fspath(model),
                adapter=None if adapter is None else os.fspath(adapter),
                tokenizer=tokenizer,
                dtype=named_dtype(torch, dtype),
                device=device,
                device_map=device_map,
                revision=revision,
                adapter_revision=adapter_revision,
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
                model_kwargs=model_kwargs or {},
                tokenizer_kwargs=tokenizer_kwargs or {},
                quiet=quiet,
            )
            self.name = os.fspath(model)
        else:
            if model_kwargs or tokenizer_kwargs or device_map is not None or revision is not None:
                raise BadArgument(
                    "a model object is already loaded: device_map, revision, model_ and tokenizer_kwargs do not apply"
                )
            if tokenizer is None:
                raise BadArgument("a model object needs its tokenizer: HFEngine(model, tokenizer=…)")
            loaded = take_object(
                model,
                adapter=None if adapter is None else os.fspath(adapter),
                tokenizer=tokenizer,
                dtype=named_dtype(torch, dtype),
                device=device,
                adapter_revision=adapter_revision,
                attn_implementation=attn_implementation,
                trust_remote_code=trust_remote_code,
            )
            self.name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
        if merge_adapter and loaded.adapter is None:
            raise BadArgument("merge_adapter=True needs an adapter")
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self._source = loaded.folder
        self._base_name = self.name

        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        self._text_config = base.config.get_text_config()
        self._rows_of_embedding = _width(base.get_input_embeddings(), self._text_config)
        self._rows_of_head = _width(base.get_output_embeddings(), self._text_config)
        self._check_vocabulary()
        self._read_signature(base)
        self.device = _input_device(torch, self.model)
        self.max_length = self._longest(max_length)
        self._accelerated = str(self.device.type) != "cpu"
        self._padded = self._accelerated if batching == "auto" else batching == "padded"
        self._share = share_prefix
        self._config = base.config
        self._can_share = bool(share_prefix) and self._shareable()

        with self._evaluating():
            self._prove_causal()
        self.adapter_card: dict[str, Any] | None = None
        self._adapter: dict[str, Any] | None = None
        if loaded.adapter is not None:
            self._put_on(loaded.adapter, merge=merge_adapter, check=check_adapter)
        elif loaded.folder is not None and Path(loaded.folder, CARD).is_file():
            self.adapter_card = read_json(Path(loaded.folder, CARD))
        elif hasattr(self.model, "active_peft_config"):
            inside = self.model.active_peft_config
            self._adapter = {"source": "in the model object", "type": str(inside.peft_type), "rank": inside.r}
        self.batch_tokens = batch_tokens if batch_tokens is not None else self._roomy()

    # -- reading ------------------------------------------------------------------------------------------------

    def grade_logits(
        self,
        prompts: Sequence[WindowPrompt],
        grade_ids: Sequence[int],
        *,
        progress: Progress | None = None,
    ) -> list[FloatArray]:
        """Return each prompt's raw logits of the grade tokens at its slots, float32 (slots, len(grade_ids)).

        A prompt that comes twice is computed once. A row the model answered with NaN or infinity is NaN, and
        how many is logged as a warning. Raises `BadArgument` for a prompt longer than `max_length` and
        `ModelMismatch` for ids outside the vocabulary, both before the first forward pass, and
        `EngineFailure` when a single prompt does not fit into memory.
        """
        self._check(prompts, grade_ids)
        answers: list[FloatArray | None] = [None] * len(prompts)
        twins: dict[tuple[bytes, bytes], list[int]] = {}
        for i, prompt in enumerate(prompts):
            twins.setdefault((prompt.token_ids.tobytes(), prompt.slots.tobytes()), []).append(i)
        first = {members[0]: members for members in twins.values()}
        lost = 0

        def deliver(i: int, logits: FloatArray) -> None:
            nonlocal lost
            broken = np.isnan(logits).any(axis=-1) | np.isposinf(logits).any(axis=-1)
            logits[broken] = np.nan
            lost += int(broken.sum()) * len(first[i])
            for twin in first[i]:
                answers[twin] = logits.copy() if twin != i else logits
            if progress is not None:
                progress(len(first[i]))

        waiting: list[int] = []
        for i in first:
            if len(prompts[i].slots):
                waiting.append(i)
            else:
                deliver(i, np.zeros((0, len(grade_ids)), dtype=np.float32))
        columns = self._torch.tensor(list(grade_ids), dtype=self._torch.long)
        with self._evaluating():
            alone = waiting
            for group, length in self._families(prompts, waiting):
                prefix = self._prefix(prompts[group[0]].token_ids[:length])
                if prefix is None:
                    break  # this model's cache is not of the plain kind: nothing can be shared
                self._read(prompts, group, columns, prefix, deliver)
                shared = set(group)
                alone = [i for i in alone if i not in shared]
            self._read(prompts, alone, columns, None, deliver)
        if lost:
            logger.warning(
                "%s: %d of %d slots came back as NaN or infinity and are left without a grade; %s is the likely cause, "
                "load the model in bfloat16 or float32",
                self.name,
                lost,
                sum(len(p.slots) for p in prompts),
                str(self.model.dtype).removeprefix("torch."),
            )
        return [a for a in answers if a is not None]

    def describe(self) -> dict[str, Any]:
        """Return what a manifest must record: model, revision, adapter, precision, device, attention, versions."""
        source = self._source
        manifest = Path(source, "source.json") if source else None
        wheel = read_json(manifest) if manifest and manifest.is_file() else None
        commit = getattr(self._config, "_commit_hash", None)
        if self._base_name in EMBEDDED:  # where it lies is this machine's own business; what it is, is not
            commit = commit or (Path(source).name if source and Path(source).parent.name == "snapshots" else None)
            source = None
        return {
            "engine": "hf",
            "model": self._base_name,
            "path": source if source != self._base_name else None,
            "class": type(self.model).__name__,
            "commit": commit,
            "wheel": wheel and {name: wheel[name] for name in ("wheel", "version", "sha256")},
            "adapter": self._adapter,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": str(self.device),
            "attention": getattr(self._config, "_attn_implementation", None),
            "batching": "padded" if self._padded else "single",
            "share_prefix": self._share if self._can_share else False,
            "max_length": self.max_length,
            "versions": {name: _version(name) for name in ("torch", "transformers", "peft", "tokenizers", "numpy")},
        }

    def _families(self, prompts: Sequence[WindowPrompt], waiting: list[int]) -> Iterator[tuple[list[int], int]]:
        """Groups of prompts that truly start alike, with the length of that start, where sharing it pays.

        A query's prompts first; with `share_prefix="queries"` then those left over, whatever their query.
        """
        if not self._can_share:
            return
        starts: dict[bytes, list[int]] = {}
        for i in waiting:
            if prompts[i].shared > 0 and not self._past_turn(len(prompts[i].token_ids)):
                starts.setdefault(prompts[i].token_ids[: prompts[i].shared].tobytes(), []).append(i)
        left: list[int] = []
        for group in starts.values():
            length = min(min(prompts[i].shared, int(prompts[i].slots[0])) for i in group)
            if self._worth_sharing(prompts, group, length):
                yield group, length
            else:
                left += group
        if self._share == "queries" and left:
            length = min(int(prompts[i].slots[0]) for i in left)
            first = prompts[left[0]].token_ids[:length]
            same = np.logical_and.reduce([prompts[i].token_ids[:length] == first for i in left])
            length = length if same.all() else int(same.argmin())
            if self._worth_sharing(prompts, left, length):
                yield left, length

    def _worth_sharing(self, prompts: Sequence[WindowPrompt], group: Sequence[int], length: int) -> bool:
        saved = length * (len(group) - 1)
        total = sum(len(prompts[i].token_ids) for i in group)
        least, mean = _WORTH_SHARING, total / len(group)
        if not self._accelerated:
            least = max(_WORTH_SHARING_CPU, _MASK_COST * (mean - length) ** 2 / mean)
        return saved > 0 and (self._share is True or saved >= least * total)

    def _read(
        self,
        prompts: Sequence[WindowPrompt],
        members: Sequence[int],
        columns: Any,
        prefix: _Prefix | None,
        deliver: Callable[[int, FloatArray], None],
    ) -> None:
        """Run prompts in batches, longest first, so that memory runs out at the start or never."""
        # Equal lengths are sorted by content, so that arrival order does not decide who shares a batch.
        waiting = sorted(members, key=lambda i: (len(prompts[i].token_ids), prompts[i].token_ids.tobytes()))
        while waiting:
            longest = len(prompts[waiting[-1]].token_ids)
            rows, cost = self._size(longest, prefix)
            batch = waiting[-rows:]
            logits = self._attempt([prompts[i] for i in batch], columns, prefix)
            if logits is None:
                if len(batch) == 1:
                    raise EngineFailure(
                        f"one prompt of {longest} tokens ({len(prompts[batch[0]].slots)} candidates) does not fit "
                        f"into the memory of {self.device}; {_SMALLER}"
                    )
                self.batch_tokens = len(batch) * cost // 2
                logger.info("out of memory at %d prompts of %d tokens; halving the batch", len(batch), longest)
                continue
            del waiting[-rows:]
            for i, rows_of_prompt in zip(batch, logits, strict=True):
                deliver(i, rows_of_prompt)

    def _size(self, longest: int, prefix: _Prefix | None) -> tuple[int, int]:
        """How many prompts go into the next batch, and what each counts towards `batch_tokens`."""
        if (prefix is None and not self._padded) or self._past_turn(longest):
            return 1, longest
        if self._padded or self._accelerated or prefix is None:
            return max(1, self.batch_tokens // longest), longest
        cost = longest - prefix.length  # on a CPU speed decides, and the work is the suffix
        return max(1, min(_CPU_ROWS, self.batch_tokens // cost)), cost

    def _attempt(self, batch: list[WindowPrompt], columns: Any, prefix: _Prefix | None) -> list[FloatArray] | None:
        """One forward pass; None when memory ran out."""
        try:
            return self._forward(batch, columns, prefix)
        except Exception as error:
            if not out_of_memory(error):
                size = f"{len(batch)} prompts of up to {max(len(p.token_ids) for p in batch)} tokens"
                raise EngineFailure(f"{self.name}: the forward pass over {size} failed: {error}") from error
        if self.device.type == "cuda":  # outside the except block, where the failed tensors are still held
            self._torch.cuda.empty_cache()
        elif self.device.type == "mps":
            self._torch.mps.empty_cache()
        return None

    def _forward(self, batch: list[WindowPrompt], columns: Any, prefix: _Prefix | None) -> list[FloatArray]:
        torch = self._torch
        before = prefix.length if prefix else 0
        width = max(len(p.token_ids) for p in batch) - before
        ids = np.full((len(batch), width), self._filler, dtype=np.int64)
        most = max(len(p.slots) for p in batch)
        rows: IntArray = np.empty((len(batch), most), dtype=np.int64)
        for r, prompt in enumerate(batch):
            ids[r, : len(prompt.token_ids) - before] = prompt.token_ids[before:]
            rows[r, : len(prompt.slots)] = prompt.slots - before
            rows[r, len(prompt.slots) :] = rows[r, len(prompt.slots) - 1]
        tokens = torch.from_numpy(ids).to(self.device)

        def head(keep: IntArray | None) -> Any:
            how: dict[str, Any] = {"use_cache": prefix is not None}
            if prefix is not None:
                how[self._cache_word] = prefix.copies(len(batch))
            if keep is not None:
                how["logits_to_keep"] = torch.from_numpy(keep).to(self.device)
            return self.model(input_ids=tokens, **how).logits

        alike = bool((rows == rows[0]).all())
        logits: Any = None
        if self._keeps and alike:
            logits = head(rows[0])
        elif self._keeps_per_row:
            logits = head(rows)
            if tuple(logits.shape[:-1]) != rows.shape:
                self._keeps_per_row = False  # a model of its own making: it read the positions as something else
                logits = None
        if logits is None:
            union, index = np.unique(rows, return_inverse=True)
            full = head(union if self._keeps else None)
            at = index.reshape(rows.shape) if self._keeps else rows
            order = torch.arange(len(batch), device=full.device)[:, None]
            logits = full[order, torch.from_numpy(at).to(full.device)]
        picked = logits[..., columns.to(logits.device)].float().cpu().numpy()
        return [picked[r, : len(p.slots)].copy() for r, p in enumerate(batch)]

    def _prefix(self, token_ids: IntArray) -> _Prefix | None:
        """The model's state after a common prompt start; None if that state cannot be shared."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self._config)
        how: dict[str, Any] = {"logits_to_keep": 1} if self._keeps else {}
        how[self._cache_word] = cache
        tokens = self._torch.from_numpy(np.array(token_ids)[None]).to(self.device)
        try:
            self.model(input_ids=tokens, use_cache=True, **how)
        except Exception as error:
            if not out_of_memory(error):
                raise EngineFailure(
                    f"{self.name}: the forward pass over the common prompt start failed: {error}"
                ) from error
            raise EngineFailure(
                f"a common prompt start of {len(token_ids)} tokens does not fit into the memory of {self.device}; "
                f"{_SMALLER}"
            ) from error
        if not all(_plain(layer) and layer.get_seq_length() == len(token_ids) for layer in cache.layers):
            self._can_share = False
            return None
        return _Prefix(cache=cache, length=len(token_ids))

    def _check(self, prompts: Sequence[WindowPrompt], grade_ids: Sequence[int]) -> None:
        for i, prompt in enumerate(prompts):
            length = len(prompt.token_ids)
            if length > self.max_length:
                raise BadArgument(
                    f"prompt {i} has {length} tokens, {self.name} takes {self.max_length}; score fewer candidates per "
                    "window or lower max_doc_chars"
                )
            slots = prompt.slots
            if len(slots) and (slots[0] < 0 or slots[-1] >= length or (np.diff(slots) <= 0).any()):
                raise BadArgument(
                    f"prompt {i} has {length} tokens and slots {slots.tolist()}: not increasing within it"
                )
            highest = int(prompt.token_ids.max(initial=0))
            if highest >= self._rows_of_embedding:
                raise ModelMismatch(
                    f"prompt {i} holds token id {highest}, the model embeds {self._rows_of_embedding} tokens; the "
                    "tokenizer is not this model's, or was extended without resizing the model"
                )
        if any(not 0 <= g < self._rows_of_head for g in grade_ids):
            raise ModelMismatch(
                f"grade ids {list(grade_ids)} are outside the model's {self._rows_of_head} output tokens"
            )

    def _past_turn(self, length: int) -> bool:
        """Whether a prompt is so long that the model changes its position encoding with the length of the batch."""
        return self._turn is not None and length > self._turn

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluation mode without gradients; a model handed over in the middle of training gets its mode back."""
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            with self._torch.inference_mode():
                yield
        finally:
            for module in training:
                module.training = True

    # -- setting up ---------------------------------------------------------------------------------------------

    def _read_signature(self, base: Any) -> None:
        """What this model's forward understands; transformers renamed one word in 5.24 and widened another in 5.21."""
        known = inspect.signature(base.forward).parameters
        self._keeps = "logits_to_keep" in known
        self._keeps_per_row = self._keeps and _at_least(_version("transformers"), (5, 21))
        self._cache_word = next((word for word in ("cache", "past_key_values") if word in known), "")
        pad = getattr(self.tokenizer, "pad_token_id", None)
        end = getattr(self.tokenizer, "eos_token_id", None)
        filler = pad if pad is not None else end
        self._filler = filler if isinstance(filler, int) and 0 <= filler < self._rows_of_embedding else 0
        rope = getattr(self._text_config, "rope_parameters", None) or {}
        kinds = [rope, *(v for v in rope.values() if isinstance(v, dict))]
        turns = [
            k.get("original_max_position_embeddings")
            or getattr(self._text_config, "original_max_position_embeddings", None)
            for k in kinds
            if k.get("rope_type") == "longrope"
        ]
        self._turn = min((int(t) for t in turns if t), default=None)

    def _shareable(self) -> bool:
        """Whether this model keeps plain keys and values per layer, which can be copied for many suffixes."""
        if not self._cache_word:
            return False
        from transformers import DynamicCache

        try:
            layers = DynamicCache(config=self._config).layers
        except (KeyError, AttributeError, TypeError, ValueError):  # a layer type this cache does not know
            return False
        return bool(layers) and all(_plain(layer) for layer in layers)

    def _check_vocabulary(self) -> None:
        """Refuse a tokenizer with ordinary tokens the model has no embedding for (special ones may go unused)."""
        try:
            size = len(self.tokenizer)
        except TypeError:
            return
        if size <= self._rows_of_embedding:
            return
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        beyond = range(self._rows_of_embedding, size)
        if all(i in added and getattr(added[i], "special", False) for i in beyond):
            return
        raise ModelMismatch(
            f"the tokenizer has {size} tokens, {self.name} embeds {self._rows_of_embedding}; it was extended without "
            "resizing the model, or belongs to another model: give the matching one as tokenizer"
        )

    def _longest(self, asked: int | None) -> int:
        names = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "max_seq_len")
        own = next((v for n in names if isinstance(v := getattr(self._text_config, n, None), int) and v > 0), None)
        said = getattr(self.tokenizer, "model_max_length", None)
        told = said if isinstance(said, int) and 0 < said < 10_000_000 else None
        return min(limit for limit in (own, told, asked, _NO_LIMIT) if limit is not None)

    def _prove_causal(self) -> None:
        """Refuse a model whose early positions change with later tokens: its slots would see each other's grades."""
        ids = np.repeat(_probe(self._rows_of_embedding), 2, axis=0)
        half = ids.shape[1] // 2
        ids[1, half:] = (ids[0, half:] + 1) % self._rows_of_embedding
        logits = self._last_logits(ids, at=half - 1)
        tolerance = 1e-3 if self.model.dtype == self._torch.float32 else 5e-2
        apart = (logits[0] - logits[1]).abs().max().item()
        if apart > tolerance * max(1e-6, logits.abs().max().item()):
            raise ModelMismatch(
                f"{self.name} ({type(self.model).__name__}) is not causal: what it says at a position depends on "
                "tokens after it; a reranker needs a generative (decoder-only) model"
            )

    def _put_on(self, opened: Adapter, *, merge: bool, check: bool) -> None:
        if check:
            check_base(self.model, opened)
        ids = _probe(self._rows_of_embedding)
        with self._evaluating():
            before = self._last_logits(ids)
        self.model = apply_adapter(self.model, opened)
        if check:
            with self._evaluating():
                after = self._last_logits(ids)
            if (after - before).abs().max().item() == 0.0:
                raise ModelMismatch(
                    f"the adapter '{opened.source}' changes nothing: on a probe prompt the logits are those of the "
                    "base (untrained, or its weights are zero); give the trained one, or check_adapter=False to use it"
                )
        if merge:
            self.model = fold_adapter(self.model, opened)
        if opened.source == self.name:  # the adapter brought its base
            self._base_name = str(self._source)
        self.adapter_card = opened.card
        self._adapter = {**opened.describe(), "merged": merge}
        self.name = f"{self.name}+{opened.source}" if opened.source != self.name else self.name

    def _last_logits(self, ids: IntArray, *, at: int = -1) -> Any:
        """All logits at one position of each row, float32 on the CPU."""
        tokens = self._torch.from_numpy(ids).to(self.device)
        return self.model(input_ids=tokens, use_cache=False).logits[:, at].float().cpu()

    def _roomy(self) -> int:
        """A batch size in tokens to start from: generous, since running out of memory only halves it."""
        torch, config = self._torch, self._text_config
        if self.device.type != "cuda":
            return 8192 if self._accelerated else _CPU_TOKENS
        free, _ = torch.cuda.mem_get_info(self.device)
        hidden = int(getattr(config, "hidden_size", 4096))
        wide = int(getattr(config, "intermediate_size", None) or 4 * hidden)
        per_token = 2 * self.model.dtype.itemsize * (8 * hidden + 3 * wide)
        return int(min(65536, max(2048, 0.6 * free / per_token)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prefix:
    """The keys and values of a common prompt start, batch of one."""

    cache: Any
    length: int

    def copies(self, rows: int) -> Any:
        """A cache of `rows` equal rows to go on from; the layers replace their tensors and never write into them."""
        fresh = copy.copy(self.cache)
        fresh.layers = [copy.copy(layer) for layer in self.cache.layers]
        fresh.batch_repeat_interleave(rows)
        return fresh


def _plain(layer: Any) -> bool:
    """Whether a cache layer holds keys and values and nothing else; exactly these two classes, no children."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)


def _input_device(torch: Any, model: Any) -> Any:
    """Where token ids go: the embedding's device, or the first accelerator of a model that is partly offloaded."""
    device = next(model.get_input_embeddings().parameters()).device
    if device.type == "meta":
        places = [p for p in getattr(model, "hf_device_map", {}).values() if p not in ("cpu", "disk")]
        device = torch.device(places[0] if places else "cpu")
    return device


def _width(module: Any, text_config: Any) -> int:
    """How many tokens an embedding or output head knows."""
    for name in ("num_embeddings", "out_features"):
        if isinstance(value := getattr(module, name, None), int):
            return value
    return int(text_config.vocab_size)


def _probe(vocabulary: int, length: int = 24) -> IntArray:
    """Fixed token ids spread over a vocabulary, (1, length)."""
    spread: IntArray = (np.arange(length, dtype=np.int64) * 7919 + 13) % vocabulary
    return spread[None]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _at_least(version: str | None, wanted: tuple[int, int]) -> bool:
    parts = (version or "0.0").split(".")
    return tuple(int(p) if p.isdigit() else 0 for p in parts[:2]) >= wanted
