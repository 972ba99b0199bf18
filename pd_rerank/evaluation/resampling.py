"""How sure a figure is: bootstraps, exact tests, intervals for rates, adjusted families, and the noise of repeats.

Everything takes per-unit numbers and returns a record that says what was resampled, how often and from which seed.
Random draws are numpy's `default_rng(seed).integers(0, n, (resamples, n))`, made in blocks that fit a processor's
cache: the same numbers as in one piece, in bounded memory.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.scores import Scores

Draw: TypeAlias = Callable[[tuple[int, int]], npt.NDArray[np.int64]]
"""Indices drawn with replacement, in the shape asked for."""

Statistic = Literal["micro", "macro"]

_BLOCK = 80_000
"""Draws made at once, 640 kB; measured fastest between 40,000 and 160,000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to resample: how often, from which seed, for which level; an interval is of percentiles, linear between."""

    resamples: int
    seed: int
    level: float = 0.95

    def __post_init__(self) -> None:
        if self.resamples < 1 or not 0 < self.level < 1 or self.seed < 0:
            raise BadArgument(f"a recipe needs resamples >= 1, seed >= 0 and 0 < level < 1, got {self}")


QUERIES = Recipe(resamples=20_000, seed=4401)
"""The order-consistency study's recipe for queries, and for collections then queries."""

GROUPS = Recipe(resamples=2_000, seed=20260910)
"""The NevIR study's recipe for source groups."""

GROUPS_AB = Recipe(resamples=10_000, seed=20260907)
"""The NevIR study's earlier recipe for source groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with a percentile bootstrap interval, None at both ends where there are fewer than two units.

    `n` counts the numbers, `units` what was resampled (`unit`: queries, groups, collections then queries).
    """

    estimate: float
    low: float | None
    high: float | None
    n: int
    unit: str
    units: int
    recipe: Recipe

    @property
    def excludes_zero(self) -> bool:
        """Whether there is an interval and all of it lies on one side of zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


# -- bootstraps ---------------------------------------------------------------------------------------------------


def paired_bootstrap(differences: Sequence[float] | Scores, recipe: Recipe = QUERIES) -> Interval:
    """The mean of per-query differences, queries resampled with replacement. Source: method, section 5.10."""
    values = _numbers(differences, what="differences")
    n = len(values)
    means = None
    if n > 1:
        means = _sums(_indices(recipe.seed, n), [values], recipe.resamples)[0] / n
    return _interval(float(values.mean()), means, n=n, unit="queries", units=n, recipe=recipe)


def ratio_bootstrap(
    numerators: Sequence[float] | Scores, denominators: Sequence[float] | Scores, recipe: Recipe = QUERIES
) -> Interval:
    """Σ numerators / Σ denominators, (n,) each, queries resampled with replacement: the interval of a pooled share.

    Denominators are not negative and not all 0; a resample that draws only zeros counts as nothing and is left out.
    """
    above, below = _numbers(numerators, what="numerators"), _numbers(denominators, what="denominators")
    if len(above) != len(below) or (below < 0).any() or not below.any():
        raise BadArgument("a ratio needs as many numerators as denominators, and these not negative and not all 0")
    n = len(above)
    draws = None
    if n > 1:
        up, down = _sums(_indices(recipe.seed, n), [above, below], recipe.resamples)
        draws = up[down > 0] / down[down > 0]
    return _interval(float(above.sum() / below.sum()), draws, n=n, unit="queries", units=n, recipe=recipe)


def hierarchical_bootstrap(collections: Mapping[str, Sequence[float] | Scores], recipe: Recipe = QUERIES) -> Interval:
    """The mean of collection means: collections resampled first, then queries within each one drawn.

    Collections weigh equally whatever their size; one drawn twice has its queries drawn twice, independently. A
    single collection has its queries resampled, as in `paired_bootstrap`. Source: method, section 5.10.
    """
    if not collections:
        raise InvalidData("no collections to resample")
    named = [_numbers(collections[name], what=f"collection '{name}'") for name in sorted(collections)]
    if len(named) == 1:
        return paired_bootstrap(named[0], recipe)
    rng = np.random.default_rng(recipe.seed)
    drawn = rng.integers(0, len(named), (recipe.resamples, len(named)))
    within = np.empty(drawn.shape)
    for c, values in enumerate(named):
        here = drawn == c
        within[here] = _sums(_of(rng, len(values)), [values], int(here.sum()))[0] / len(values)
    return _interval(
        float(np.mean([values.mean() for values in named])),
        within.mean(axis=1),
        n=sum(len(values) for values in named),
        unit="collections then queries",
        units=len(named),
        recipe=recipe,
    )


def group_bootstrap(
    values: Sequence[float] | Scores,
    groups: Sequence[str],
    recipe: Recipe = GROUPS,
    *,
    statistic: Statistic = "micro",
) -> Interval:
    """The mean of `values`, (n,), whole source groups resampled with replacement.

    "micro" is Σ values / Σ sizes over the groups drawn, "macro" the mean of the groups' own means. Groups are taken
    in the order of their names. `recipe=GROUPS` is the NevIR study's exactly. Source: nevir notes, section 8.
    """
    columns, n, units = _grouped([values], groups, statistic)
    draws = _ratios(columns, recipe) if units > 1 else None
    estimate = columns[0].sum() / columns[1].sum()
    return _interval(
        float(estimate), None if draws is None else draws[:, 0], n=n, unit="groups", units=units, recipe=recipe
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JointRegion:
    """Two differences resampled together, as Δ strict preference and Δ MRR.

    `opposite` is the share of resamples in which one rises and the other falls, `both_up` and `both_down` those in
    which they go together (exact zeros are none of these). `covariance` (2, 2) is of the resampled `points` (R, 2);
    the region holds a point if its squared Mahalanobis distance from the estimate is at most `radius2`, so that
    `level` of the resamples lie in it.
    """

    first: Interval
    second: Interval
    opposite: float
    both_up: float
    both_down: float
    correlation: float | None
    covariance: Scores
    radius2: float
    points: Scores

    def contains(self, first: float, second: float) -> bool:
        """Whether a point lies in the region; (0, 0) outside it: the two together differ from nothing."""
        offset = np.array([[first - self.first.estimate, second - self.second.estimate]])
        return bool(_distance2(offset, self.covariance)[0] <= self.radius2 * (1 + 1e-12))

    def outline(self, points: int = 100) -> Scores:
        """The region's edge as (points, 2), for drawing."""
        spread, axes = np.linalg.eigh(self.covariance)
        angle = np.linspace(0, 2 * np.pi, points)
        circle = np.stack([np.cos(angle), np.sin(angle)])
        edge = (axes * np.sqrt(np.maximum(spread, 0) * self.radius2)) @ circle
        outline: Scores = edge.T + np.array([self.first.estimate, self.second.estimate])
        return outline


def joint_bootstrap(
    first: Sequence[float] | Scores,
    second: Sequence[float] | Scores,
    groups: Sequence[str] | None = None,
    recipe: Recipe = GROUPS,
    *,
    statistic: Statistic = "micro",
) -> JointRegion:
    """Two per-unit differences, (n,) each, resampled with the same draws: do they move together?

    `groups` as in `group_bootstrap`, or None to resample the units themselves. At least two units are needed.
    """
    names = [str(i) for i in range(len(first))] if groups is None else groups
    order = np.arange(len(first)) if groups is None else None
    columns, n, units = _grouped([first, second], names, statistic, order=order)
    if units < 2:
        raise InvalidData("a joint region needs at least two groups (or units) to resample")
    points = _ratios(columns, recipe)
    estimate = np.array([column.sum() for column in columns[:2]]) / columns[2].sum()
    unit = "queries" if groups is None else "groups"
    one, two = (_interval(float(estimate[i]), points[:, i], n=n, unit=unit, units=units, recipe=recipe) for i in (0, 1))
    covariance = np.atleast_2d(np.cov(points.T, ddof=0))
    deviations = np.sqrt(np.diag(covariance))
    sign = np.sign(points)
    points.flags.writeable = False
    return JointRegion(
        first=one,
        second=two,
        opposite=float((sign[:, 0] * sign[:, 1] < 0).mean()),
        both_up=float((sign > 0).all(axis=1).mean()),
        both_down=float((sign < 0).all(axis=1).mean()),
        correlation=float(covariance[0, 1] / deviations.prod()) if deviations.all() else None,
        covariance=covariance,
        radius2=float(np.quantile(_distance2(points - estimate, covariance), recipe.level)),
        points=points,
    )


# -- tests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SignFlip:
    """A cluster sign-flip test: `p` two-sided, how it was had, and over how many units that could flip at all."""

    p: float
    method: Literal["exact", "monte carlo"]
    statistic: float
    units: int
    resamples: int | None = None
    seed: int | None = None


def sign_test(a: int, b: int) -> float:
    """The exact two-sided sign test of `a` against `b`, McNemar's of the discordant counts: min(1, 2 P(X <= min)).

    X is binomial with a + b trials at one half; counted in whole numbers. 1 where there is nothing to compare.
    """
    if a < 0 or b < 0:
        raise BadArgument(f"counts are not negative, got {a} and {b}")
    n, tail, term = a + b, 0, 1
    for k in range(min(a, b) + 1):
        tail += term
        term = term * (n - k) // (k + 1)
    return min(1.0, 2 * tail / (1 << n))


def sign_flip_test(
    values: Sequence[float] | Scores,
    groups: Sequence[str] | None = None,
    *,
    resamples: int = 100_000,
    seed: int = 4401,
) -> SignFlip:
    """Whether the sum of `values` is more than chance, if every group's sum were as likely to have the other sign.

    Groups (None: every value its own) flip as wholes, so that queries of one source count as one. Whole-number sums
    are counted exactly, as are all sign patterns of up to 20 groups; beyond that `resamples` patterns are drawn and
    p = (1 + as extreme ones) / (1 + resamples). Where all sums are of one size this is the sign test.
    """
    numbers = _numbers(values, what="values")
    sums = numbers if groups is None else _group_sums([numbers], groups)[0][0]
    up, sums = int((sums > 0).sum()), np.abs(sums[sums != 0])
    total = float(numbers.sum())
    if not len(sums) or total == 0:
        return SignFlip(p=1.0, method="exact", statistic=total, units=len(sums))
    if np.all(sums == sums[0]):
        return SignFlip(p=sign_test(up, len(sums) - up), method="exact", statistic=total, units=len(sums))
    if np.all(sums == np.rint(sums)) and len(sums) ** 2 * sums.sum() <= _EXACT_BITS:
        p = _exact_flips([int(s) for s in sums], round(abs(total)))
        return SignFlip(p=p, method="exact", statistic=total, units=len(sums))
    reach = abs(total) - 1e-12 * float(sums.sum())
    if len(sums) <= 20:
        flipped = np.zeros(1)
        for s in sums:
            flipped = np.concatenate([flipped + s, flipped - s])
        p = float((np.abs(flipped) >= reach).mean())
        return SignFlip(p=p, method="exact", statistic=total, units=len(sums))
    rng = np.random.default_rng(seed)
    extreme = 0
    for rows in _blocks(resamples, len(sums)):
        signs = rng.integers(0, 2, (rows, len(sums)), dtype=np.int8) * 2.0 - 1.0
        extreme += int((np.abs(signs @ sums) >= reach).sum())
    return SignFlip(
        p=(1 + extreme) / (1 + resamples),
        method="monte carlo",
        statistic=total,
        units=len(sums),
        resamples=resamples,
        seed=seed,
    )


def wilson(successes: int, n: int, *, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval for a rate of `successes` in `n`."""
    if not 0 <= successes <= n or n < 1:
        raise BadArgument(f"a rate needs 0 <= successes <= n and n >= 1, got {successes} of {n}")
    z = NormalDist().inv_cdf(0.5 + level / 2)
    rate, z2 = successes / n, z * z
    middle = (rate + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(rate * (1 - rate) / n + z2 / (4 * n * n))
    # At the ends the two terms cancel, but not in floating point.
    return middle - half if successes else 0.0, middle + half if successes < n else 1.0


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p-values of a family of tests: reject those at most α and the family errs with at most α.

    The i-th smallest of m is multiplied by m - i + 1, never below the one before it, at most 1.
    """
    adjusted: dict[str, float] = {}
    before = 0.0
    for i, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        if not 0 <= p <= 1:
            raise BadArgument(f"'{name}' has p-value {p}; p-values are between 0 and 1")
        before = adjusted[name] = min(1.0, max(before, (len(p_values) - i) * p))
    return {name: adjusted[name] for name in p_values}


# -- repeats ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseFloor:
    """What changes when the same candidates are scored again in the same order: nothing smaller can be read.

    `mean`, `low`, `high` are of the repeats' own means; `changed` the share of units that differ between two repeats,
    and `mean_change` the mean absolute difference, both over all pairs of repeats.
    """

    repeats: int
    n: int
    mean: float
    low: float
    high: float
    changed: float
    mean_change: float

    @property
    def range(self) -> float:
        """How far apart two repeats' means were at most: a difference below this is within the noise seen."""
        return self.high - self.low


def noise_floor(repeats: Sequence[Sequence[float] | Scores]) -> NoiseFloor:
    """The noise of repeated runs in one order: `repeats` holds one array of per-unit values, (n,), for each run."""
    runs = [_numbers(run, what=f"repeat {i}") for i, run in enumerate(repeats, 1)]
    if len(runs) < 2 or len({len(run) for run in runs}) > 1:
        raise BadArgument(
            f"noise needs at least two repeats over the same units, got {[len(run) for run in runs]} values"
        )
    means = [float(run.mean()) for run in runs]
    apart = [np.abs(a - b) for a, b in combinations(runs, 2)]
    return NoiseFloor(
        repeats=len(runs),
        n=len(runs[0]),
        mean=float(np.mean(means)),
        low=min(means),
        high=max(means),
        changed=float(np.mean([(change > 0).mean() for change in apart])),
        mean_change=float(np.mean([change.mean() for change in apart])),
    )


# -- inner parts --------------------------------------------------------------------------------------------------

_EXACT_BITS = 2e10
"""Bits touched by the exact sign-flip count at most; about a second's work."""


def _blocks(rows: int, width: int) -> Iterator[int]:
    """Cut `rows` rows of `width` draws into blocks of about `_BLOCK` draws: the number of rows of each."""
    most = max(1, _BLOCK // max(1, width))
    for start in range(0, rows, most):
        yield min(most, rows - start)


def _of(rng: np.random.Generator, n: int) -> Draw:
    return lambda size: rng.integers(0, n, size)


def _indices(seed: int, n: int) -> Draw:
    """What `default_rng(seed).integers(0, n, size)` draws, call after call, in two thirds of the time.

    That method maps 32 random bits u to u·n / 2³² and drops what would favour some indices (Lemire, "Fast Random
    Integer Generation in an Interval", 2019); here the same is done for many at once.
    """
    if not 1 < n < 2**31 or sys.byteorder == "big":
        return _of(np.random.default_rng(seed), n)
    bits = np.random.PCG64(seed)
    factor, least = np.uint64(n), np.uint32((2**32 - n) % n)
    left = np.empty(0, dtype=np.int64)

    def draw(size: tuple[int, int]) -> npt.NDArray[np.int64]:
        nonlocal left
        count = size[0] * size[1]
        parts = [left]
        while (lacking := count - sum(map(len, parts))) > 0:
            product = bits.random_raw((lacking + 1) // 2).view(np.uint32) * factor
            low = product.view(np.uint32)[::2]
            if low.min() < least:
                product = product[low >= least]
            np.right_shift(product, np.uint64(32), out=product)
            parts.append(product.view(np.int64))
        drawn = parts[-1] if not len(parts[0]) and len(parts) == 2 else np.concatenate(parts)
        left = drawn[count:].copy()
        return drawn[:count].reshape(size)

    return draw


def _sums(draw: Draw, columns: Sequence[Scores], resamples: int) -> list[Scores]:
    """The sum of each column over `n` draws with replacement, `resamples` times; all columns share the draws."""
    n = len(columns[0])
    if len(columns) == 2:  # as one complex column: each place is looked up once
        pairs = _sums(draw, [columns[0] + 1j * columns[1]], resamples)[0]
        return [pairs.real.copy(), pairs.imag.copy()]
    sums = [np.empty(resamples, dtype=column.dtype) for column in columns]
    start = 0
    for rows in _blocks(resamples, n):
        index = draw((rows, n))
        for column, out in zip(columns, sums, strict=True):
            # Memory traffic is what costs here: where they fit, values go where their indices stood, each place read
            # before it is written. The draws lie within the column, so "wrap" never wraps; it alone neither checks
            # nor copies.
            mine = len(columns) == 1 and column.dtype.itemsize == index.itemsize
            drawn = index.view(column.dtype) if mine else np.empty((rows, n), dtype=column.dtype)
            np.take(column, index, out=drawn, mode="wrap")
            np.add.reduce(drawn, axis=1, out=out[start : start + rows])
        start += rows
    return sums


def _ratios(columns: Sequence[Scores], recipe: Recipe) -> Scores:
    """Resampled Σ column / Σ last column, (resamples, columns - 1)."""
    *sums, sizes = _sums(_indices(recipe.seed, len(columns[0])), columns, recipe.resamples)
    return np.stack([s / sizes for s in sums], axis=1)


def _grouped(
    values: Sequence[Sequence[float] | Scores],
    groups: Sequence[str],
    statistic: Statistic,
    *,
    order: npt.NDArray[Any] | None = None,
) -> tuple[list[Scores], int, int]:
    """Per-group sums of every array and the groups' sizes (for "macro" means and ones), n, and how many groups."""
    if statistic not in ("micro", "macro"):
        raise BadArgument(f"unknown statistic '{statistic}'; choose micro or macro")
    numbers = [_numbers(v, what="values") for v in values]
    if any(len(v) != len(groups) for v in numbers):
        raise BadArgument(f"{[len(v) for v in numbers]} values for {len(groups)} group names; give one for each")
    if order is not None:
        return [*numbers, np.ones(len(order))], len(order), len(order)
    sums, sizes = _group_sums(numbers, groups)
    if statistic == "macro":
        sums, sizes = [s / sizes for s in sums], np.ones(len(sizes))
    return [*sums, sizes], len(groups), len(sizes)


def _group_sums(values: Sequence[Scores], groups: Sequence[str]) -> tuple[list[Scores], Scores]:
    place = {group: i for i, group in enumerate(sorted(set(groups)))}
    if len(values[0]) != len(groups):
        raise BadArgument(f"{len(values[0])} values for {len(groups)} group names; give one for each")
    index = np.array([place[group] for group in groups], dtype=np.int64)
    sizes = np.bincount(index, minlength=len(place)).astype(np.float64)
    sums = [np.bincount(index, weights=v, minlength=len(place)).astype(np.float64) for v in values]
    return sums, sizes


def _interval(estimate: float, draws: Scores | None, *, n: int, unit: str, units: int, recipe: Recipe) -> Interval:
    low: float | None = None
    high: float | None = None
    if draws is not None:
        tail = round((1 - recipe.level) / 2, 12)
        low, high = (float(q) for q in np.quantile(draws, [tail, 1 - tail]))
    return Interval(estimate=estimate, low=low, high=high, n=n, unit=unit, units=units, recipe=recipe)


def _numbers(values: Sequence[float] | Scores, *, what: str) -> Scores:
    numbers = np.ascontiguousarray(values, dtype=np.float64)
    if numbers.ndim != 1 or not numbers.size:
        raise InvalidData(f"{what}: a list of numbers is wanted, got shape {numbers.shape}")
    missing = ~np.isfinite(numbers)
    if missing.any():
        raise InvalidData(
            f"{what}: {int(missing.sum())} of {len(numbers)} are no numbers, first at {int(missing.argmax())}; "
            "a missing unit is a failure with a value, or is dropped on both sides and counted"
        )
    return numbers


def _distance2(offsets: Scores, covariance: Scores) -> Scores:
    """Squared Mahalanobis lengths of (m, 2); infinite off the line or point to which a flat covariance is confined."""
    spread, axes = np.linalg.eigh(covariance)
    along = offsets @ axes
    flat = spread <= 1e-12 * max(float(spread.max()), 1e-300)
    scaled = np.where(flat, 0.0, along**2 / np.where(flat, 1.0, spread)).sum(axis=1)
    off = (np.abs(along) > 1e-9 * max(1.0, float(np.abs(offsets).max(initial=0.0)))) & flat
    distances: Scores = np.where(off.any(axis=1), np.inf, scaled)
    return distances


def _exact_flips(sums: Sequence[int], reach: int) -> float:
    """P(|Σ ± s| >= reach) over all signs, counted in whole numbers; `sums` and `reach` are positive.

    One long integer holds the counts: digit k, of len(sums) + 1 bits, says in how many ways a subset sums to k.
    """
    width, total = len(sums) + 1, sum(sums)
    counts = 1
    for s in sums:
        counts += counts << (s * width)
    # Σ ± s = 2·subset - total, so the upper tail starts at the subset sum (total + reach) / 2; both have one parity.
    upper = counts >> ((total + reach) // 2 * width)
    tail, digit = 0, (1 << width) - 1
    raw = upper.to_bytes((upper.bit_length() + 7) // 8 or 1, "little")
    for k in range((total - reach) // 2 + 1):
        start = k * width
        chunk = int.from_bytes(raw[start // 8 : (start + width) // 8 + 1], "little")
        tail += (chunk >> (start % 8)) & digit
    return min(1.0, 2 * tail / (1 << len(sums)))
