"""A module `vllm` with vLLM's own names and shapes, computed by a tiny transformers model; what a GPU would be for.

Fields and behaviours are those read and run in vllm 0.28 to 0.33: rows of cached tokens are left out or stale, an
adapter's output head is ignored where vLLM ignores it, and model runner V1 refuses token ids at prompt positions.
"""

from __future__ import annotations

import importlib.machinery
import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pd_rerank.engines.adapters import apply_adapter, open_adapter

BLOCK = 16


@dataclass
class SamplingParams:
    max_tokens: int = 16
    temperature: float = 1.0
    detokenize: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    flat_logprobs: bool = False
    skip_reading_prefix_cache: bool | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: int | None = None

    def __post_init__(self) -> None:
        if self.skip_reading_prefix_cache is None:
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None or (
                self.prompt_logprob_token_ids is not None
            )


@dataclass
class OldSamplingParams:
    """Of vLLM 0.28: nothing about token ids at prompt positions."""

    max_tokens: int = 16
    temperature: float = 1.0
    detokenize: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    flat_logprobs: bool = False
    skip_reading_prefix_cache: bool | None = None
    logprob_token_ids: list[int] | None = None


@dataclass
class PoolingParams:
    use_activation: bool | None = None
    skip_reading_prefix_cache: bool | None = None


@dataclass
class PoolerConfig:
    task: str | None = None


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class Behaviour:
    """How this vLLM behaves; `no_pooling` is where it says so, load or encode.

    `loads` holds what every LLM was started with, `calls` the size of every submission.
    """

    runner_v2: bool = True
    no_pooling: str = ""
    out_of_memory: bool = False
    stale_cache: bool = False
    stale: float = 0.0
    no_numbers: bool = False
    ignores_adapters: bool = False
    rows_short: int = 0
    omits: int | None = None
    wrong_prompt_rows: bool = False
    loads: list[dict[str, Any]] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    cached: int = 0


def made(behaviour: Behaviour, *, old: bool = False) -> dict[str, types.ModuleType]:
    """The modules of a fake vLLM, to put into sys.modules."""

    class LLM:
        def __init__(self, model: str, *, runner: str = "auto", **kwargs: Any) -> None:
            import torch
            import transformers

            behaviour.loads.append({"model": model, "runner": runner, **kwargs})
            if behaviour.out_of_memory:
                raise RuntimeError("CUDA out of memory")
            if runner == "pooling" and behaviour.no_pooling == "load":
                raise ValueError("This model does not support `--runner pooling`.")
            self.names: dict[str, int] = {}
            self.runner = runner
            overrides = kwargs.get("hf_overrides") or {}
            self.tokens = overrides.get("classifier_from_token")
            self.caching = bool(kwargs.get("enable_prefix_caching"))
            self.seen: set[tuple[Any, ...]] = set()
            dtype = {"auto": torch.float32}.get(kwargs["dtype"], getattr(torch, kwargs["dtype"], None))
            self.model_config = types.SimpleNamespace(dtype=dtype, max_model_len=kwargs.get("max_model_len") or 2048)
            config = transformers.AutoConfig.from_pretrained(model)
            self.classifier = config.architectures[0].endswith("ForSequenceClassification")
            kind = "AutoModelForSequenceClassification" if self.classifier else "AutoModelForCausalLM"
            self.source = lambda: getattr(transformers, kind).from_pretrained(model, dtype=dtype).eval()
            self.models: dict[str, Any] = {"": self.source()}
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)
            assert self.classifier or runner != "pooling" or overrides["method"] == "no_post_processing"

        def _model(self, lora: LoRARequest | None) -> Any:
            if lora is None or behaviour.ignores_adapters:
                return self.models[""]
            assert self.names.setdefault(lora.lora_name, lora.lora_int_id) == lora.lora_int_id, "one name, one adapter"
            if lora.lora_path not in self.models:
                self.models[lora.lora_path] = apply_adapter(self.source(), open_adapter(lora.lora_path))
            return self.models[lora.lora_path]

        def _cached(self, ids: list[int], lora: LoRARequest | None, skip: bool) -> int:
            """Tokens taken from the cache, in whole blocks, never all of them; then this prompt's blocks are in it."""
            who = lora.lora_int_id if lora else 0
            blocks = [(who, *ids[:end]) for end in range(BLOCK, len(ids), BLOCK)]
            hit = 0
            if self.caching and not skip:
                while hit < len(blocks) and blocks[hit] in self.seen:
                    hit += 1
            self.seen.update(blocks)
            behaviour.cached += hit * BLOCK
            return hit * BLOCK

        def _logits(self, ids: list[int], lora: LoRARequest | None) -> Any:
            import torch

            with torch.no_grad():
                return self._model(lora)(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()

        def encode(
            self, prompts: Any, pooling_params: Any, *, pooling_task: str, lora_request: Any, use_tqdm: bool
        ) -> list[Any]:
            import torch

            if behaviour.no_pooling == "encode":
                raise ValueError("Unsupported task: 'token_classify'")
            assert (self.runner, pooling_task, pooling_params.use_activation) == ("pooling", "token_classify", False)
            behaviour.calls.append(len(prompts))
            answers = []
            for prompt in prompts:
                ids = prompt["prompt_token_ids"]
                cached = self._cached(ids, lora_request, bool(pooling_params.skip_reading_prefix_cache))
                model = self._model(lora_request)
                base = model.get_base_model() if hasattr(model, "get_base_model") else model
                with torch.no_grad():
                    body = getattr(base, base.base_model_prefix)
                    hidden = body(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0].float()
                    if self.classifier:
                        rows = hidden @ base.score.weight.float().T
                    else:
                        head = base.get_output_embeddings()
                        head = getattr(head, "base_layer", head)  # an adapter on the head is ignored
                        columns = [self.tokenizer.convert_tokens_to_ids(t) for t in self.tokens]
                        rows = hidden @ head.weight[columns].float().T
                rows = rows[cached : len(ids) - behaviour.rows_short]
                if behaviour.no_numbers or (behaviour.stale_cache and cached):
                    rows = torch.full_like(rows, float("nan") if behaviour.no_numbers else behaviour.stale)
                answers.append(
                    types.SimpleNamespace(outputs=types.SimpleNamespace(data=rows), num_cached_tokens=cached)
                )
            return answers

        def generate(self, prompts: Any, params: Any, *, lora_request: Any, use_tqdm: bool) -> list[Any]:
            assert self.runner == "generate"
            assert len(prompts) == len(params)
            behaviour.calls.append(len(prompts))
            return [self._one(p["prompt_token_ids"], how, lora_request) for p, how in zip(prompts, params, strict=True)]

        def _one(self, ids: list[int], how: Any, lora: Any) -> Any:
            wanted = getattr(how, "prompt_logprob_token_ids", None)
            if wanted is not None and not behaviour.runner_v2:
                raise ValueError("prompt_logprob_token_ids requires the V2 model runner")
            cached = self._cached(ids, lora, bool(how.skip_reading_prefix_cache))
            logs = self._logits(ids, lora).log_softmax(-1)
            shown = how.logprob_token_ids or logs[-1].topk(how.logprobs or 1).indices.tolist()
            best = int(logs[-1].argmax())
            kept = [t for t in shown if t != behaviour.omits]
            first = {t: Logprob(float(logs[-1, t])) for t in [best, *kept]}
            output = types.SimpleNamespace(
                prompt_token_ids=ids,
                prompt_logprobs=None,
                prompt_token_id_logprobs=None,
                num_cached_tokens=cached,
                outputs=[types.SimpleNamespace(logprobs=[first])],
            )
            shift = 1 if behaviour.wrong_prompt_rows else 0
            if how.prompt_logprobs is not None:
                rows: list[Any] = [None]
                for at in range(len(ids) - 1):
                    top = logs[max(0, at - shift)].topk(min(how.prompt_logprobs, logs.shape[-1]))
                    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
                    stale = behaviour.stale_cache and at + 1 < cached
                    rows.append({t: Logprob(0.0 if stale else v) for t, v in pairs})
                output.prompt_logprobs = rows
            start = getattr(how, "prompt_logprob_start", None)
            if wanted is not None and cached <= start:
                count = len(ids) - 1 - start
                assert np.shape(wanted)[0] == count, "one row of ids per position"
                values = np.full((count, np.shape(wanted)[1]), -np.inf, dtype=np.float32)
                for j, row in enumerate(np.asarray(wanted)):
                    for c, t in enumerate(row):
                        if t >= 0:
                            values[j, c] = logs[max(0, start + j - shift), int(t)]
                output.prompt_token_id_logprobs = values * (np.nan if behaviour.no_numbers else 1)
            return output

    def module(name: str, **names: Any) -> types.ModuleType:
        fresh = types.ModuleType(name)
        fresh.__spec__ = importlib.machinery.ModuleSpec(name, None)
        for key, value in names.items():
            setattr(fresh, key, value)
        return fresh

    return {
        "vllm": module(
            "vllm", LLM=LLM, SamplingParams=OldSamplingParams if old else SamplingParams, PoolingParams=PoolingParams
        ),
        "vllm.config": module("vllm.config", PoolerConfig=PoolerConfig),
        "vllm.lora": module("vllm.lora"),
        "vllm.lora.request": module("vllm.lora.request", LoRARequest=LoRARequest),
    }


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Behaviour:
    """A fake vLLM in place of the real one; change how it behaves before an engine is made."""
    behaviour = Behaviour()
    install(monkeypatch, behaviour)
    return behaviour


def install(monkeypatch: pytest.MonkeyPatch, behaviour: Behaviour, *, old: bool = False) -> None:
    import sys

    for name, fresh in made(behaviour, old=old).items():
        monkeypatch.setitem(sys.modules, name, fresh)
