"""Engines turn prompts into grade logits; each module holds one, and none knows what a pool is."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pd_rerank.engines.base import Engine
from pd_rerank.errors import BadArgument, near_names

_HOMES = {
    "hf": ("pd_rerank.engines.hf", "HFEngine"),
    "vllm": ("pd_rerank.engines.vllm", "VLLMEngine"),
    "server": ("pd_rerank.engines.server", "ServerEngine"),
    "generated": ("pd_rerank.engines.generated", "GeneratedEngine"),
    "fake": ("pd_rerank.engines.fake", "FakeEngine"),
}
ENGINES = tuple(_HOMES)

_CONTRACT = ("name", "tokenizer", "max_length", "grade_logits", "describe")


def load_engine(model: Any, *, engine: str | Engine = "hf", also: Iterable[str] = (), **options: Any) -> Engine:
    """Build the engine called `engine` for `model`, or hand back an engine object as it is.

    `options` are the engine's own constructor arguments; one it does not know is a `BadArgument` that offers near
    names, of the engine's or of `also`, what the caller takes itself. An `adapter` of None is no adapter, and may be
    given to any engine; `torch_dtype` is transformers' old word for `dtype`.
    """
    if not isinstance(engine, str):
        given = _given(options)
        if lacking := [name for name in _CONTRACT if not hasattr(engine, name)]:
            raise BadArgument(
                f"engine must be a name ({', '.join(ENGINES)}) or an object with {', '.join(_CONTRACT)}; "
                f"this {type(engine).__name__} lacks {', '.join(lacking)}"
            )
        if given:
            raise BadArgument(f"an engine object takes no further options, got {', '.join(sorted(given))}")
        return engine
    kind, given = check_options(engine, options, also=also)
    named = {"name": str(model)} if engine == "fake" else {"model": model}
    built: Engine = kind(**named, **given)
    return built


def check_options(
    engine: str, options: Mapping[str, Any], *, also: Iterable[str] = ()
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What makes an engine and its options in that one's words, nothing loaded; refuses what `load_engine` refuses."""
    if engine not in ENGINES:
        raise BadArgument(f"unknown engine '{engine}'; choose one of {', '.join(ENGINES)} or pass an engine object")
    module, name = _HOMES[engine]
    kind = getattr(importlib.import_module(module), name)
    return kind, _known(kind, _given(options), also=also)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "adapter" or value is not None}


def _known(kind: type, options: Mapping[str, Any], *, also: Iterable[str]) -> dict[str, Any]:
    """`options` in the words of the engine's constructor; an unknown one is refused."""
    known = [name for name in inspect.signature(kind).parameters if name not in ("model", "name")]
    said = dict(options)
    if "torch_dtype" in said and "dtype" in known:
        if "dtype" in said:
            raise BadArgument("torch_dtype is another word for dtype; give one of them")
        said["dtype"] = said.pop("torch_dtype")
    for name in said:
        if name == "adapter" and name not in known:
            raise BadArgument(f"this engine ({kind.__name__}) takes no adapter; leave it out")
        if name not in known:
            raise BadArgument(f"unknown option '{name}'; {near_names(name, [*known, *also])}")
    return said
