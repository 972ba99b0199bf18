"""Parts of labelled pairs that share no source, for training, development and test."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.evaluation.pairs import Direction, union_groups


def split(
    directions: Sequence[Direction], shares: Mapping[str, float], *, seed: int = 20260907
) -> dict[str, list[Direction]]:
    """Divide directions into named parts of about these shares, whole source groups at a time.

    Groups are those of `union_groups`, the study's rule for its own parts, and each direction carries its own. They
    are dealt in an order that the seed and their names alone decide, each to the part that lacks most, so that a part
    differs from its share by a group at most. A share is above 0 and together they make 1; a part that gets no group
    is `InvalidData`. Directions keep the order of the file.
    """
    if not shares or any(share <= 0 for share in shares.values()) or not math.isclose(sum(shares.values()), 1):
        raise BadArgument(f"shares are above 0 and make 1 together, got {dict(shares)}")
    grouped: defaultdict[str, list[int]] = defaultdict(list)
    linked = union_groups(directions)
    for i, d in enumerate(linked):
        grouped[d.group].append(i)
    lacking = {name: share * len(linked) for name, share in shares.items()}
    part_of: dict[str, str] = {}
    for group in in_seeded_order(grouped, seed=seed):
        part_of[group] = part = max(lacking, key=lambda name: lacking[name])
        lacking[part] -= len(grouped[group])
    parts = {name: [d for d in linked if part_of[d.group] == name] for name in shares}
    if empty := [name for name, found in parts.items() if not found]:
        raise InvalidData(
            f"{len(grouped)} source groups are too few for parts {', '.join(shares)}: '{empty[0]}' is empty"
        )
    return parts


def first_groups(directions: Sequence[Direction], least: int, *, seed: int = 20260907) -> set[str]:
    """The first groups, in the seed's order, that hold at least `least` directions between them; smaller sets nest."""
    sizes: defaultdict[str, int] = defaultdict(int)
    for d in directions:
        sizes[d.group] += 1
    chosen: set[str] = set()
    held = 0
    for group in in_seeded_order(sizes, seed=seed):
        if held >= least:
            break
        chosen.add(group)
        held += sizes[group]
    return chosen


def in_seeded_order(groups: Mapping[str, object], *, seed: int) -> list[str]:
    """Group names in the order of the SHA-256 of "seed:name"."""
    return sorted(groups, key=lambda group: hashlib.sha256(f"{seed}:{group}".encode()).digest())
