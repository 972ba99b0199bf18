"""When two texts are one: what copies of a passage may differ in."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping


def normal_text(text: str) -> str:
    """A text without what two copies may differ in: Unicode form (NFKC), case, white space."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def folded(texts: Mapping[str, str]) -> dict[str, str]:
    """For documents that have the text of another, the id that stands for all of them: the smallest."""
    groups: dict[str, list[str]] = {}
    for doc_id, text in texts.items():
        groups.setdefault(normal_text(text), []).append(doc_id)
    return {d: min(ids) for ids in groups.values() if len(ids) > 1 for d in ids if d != min(ids)}
