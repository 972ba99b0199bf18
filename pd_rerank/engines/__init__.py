"""Engines turn prompts into grade logits; each module holds one, and none knows what a pool is."""

from __future__ import annotations

from typing import Any

from pd_rerank.engines.base import Engine
from pd_rerank.errors import BadArgument

ENGINES = ("hf", "fake")


def load_engine(model: Any, *, engine: str | Engine = "hf", **options: Any) -> Engine:
    """Build the engine called `engine` for `model`, or hand back an engine object as it is.

    `options` are the engine's own constructor arguments; one it does not know is a `TypeError`. An `adapter` of None
    is no adapter, and may be given to any engine.
    """
    given = {name: value for name, value in options.items() if name != "adapter" or value is not None}
    if not isinstance(engine, str):
        if not isinstance(engine, Engine):
            raise BadArgument(f"engine must be a name ({', '.join(ENGINES)}) or have grade_logits, got {engine!r}")
        if given:
            raise BadArgument(f"an engine object takes no further options, got {', '.join(sorted(given))}")
        return engine
    if engine == "hf":
        from pd_rerank.engines.hf import HFEngine

        return HFEngine(model, **given)
    if engine == "fake":
        from pd_rerank.engines.fake import FakeEngine

        return FakeEngine(name=str(model), **given)
    raise BadArgument(f"unknown engine '{engine}'; choose one of {', '.join(ENGINES)} or pass an engine object")
