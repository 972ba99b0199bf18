"""Optional dependencies, imported where they are used and explained where they are missing."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from pd_rerank.errors import MissingExtra


def need(module: str, *, extra: str, purpose: str = "") -> ModuleType:
    """Import `module`, or raise `MissingExtra` naming the pip command that installs it.

    Only a module that is truly absent is reported as missing; an error raised *inside* an installed
    module passes through unchanged, so that a broken installation is not mistaken for a missing one.
    """
    root = module.partition(".")[0]
    if importlib.util.find_spec(root) is None:
        what = purpose or f"'{module}' is needed here"
        raise MissingExtra(f"{what}, and it is not installed; run: pip install 'pd-rerank[{extra}]'", name=root)
    return importlib.import_module(module)
