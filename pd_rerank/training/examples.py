"""What a training step reads: windows of pools, the views of each, and the labels of their documents.

Windows are planned for all pools at once and rendered when asked for, through `GradePrompt.sheet` as in serving: what
does not fit is shortened by the same plan, what still does not fit is left out and counted.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from pd_rerank import windows
from pd_rerank.engines.base import FloatArray, IntArray, WindowPrompt
from pd_rerank.errors import BadArgument, InvalidData, whole
from pd_rerank.pool import Pool
from pd_rerank.prompt import GradePrompt, PromptSheet
from pd_rerank.training.labels import Labels, Target, check_labels
from pd_rerank.windows import Order

logger = logging.getLogger("pd_rerank")

Views = Literal["none", "within_window", "whole_pool", "dropout", "markers", "repartition", "replacement"]

_SHEETS = 256
"""Pools kept tokenised: all of a small set; of a large one tokenising again costs a hundredth of a step."""

_SCHEME = 0x5BD1E995
"""Turns a view's seed into the seed of its marker scheme (method, section 4.4)."""

_REPLACED = 0x9E3779B9
"""Turns a view's seed into the seed of what is replaced in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Which windows are trained on and what a window's views are.

    `width`, `partition` and `order` cut a pool as in `Scoring`. `seeds` holds one base seed per view. `views`:

    - `none`: one view, the window as it is;
    - `within_window`: the same candidates at other slots, one shuffle per seed, no two alike (method, 4.2);
    - `whole_pool`: no views but whole-pool shuffles, one per seed, each cut into windows of one view: as many times
      the windows, which is permutation augmentation. Later epochs take the seeds that follow;
    - `dropout`: the same prompt several times; only LoRA dropout differs;
    - `markers`: as `within_window`, and each view draws a scheme of markers and deals its markers out to the slots in
      any order (method, 4.4);
    - `repartition` (not in the paper): two windows of a pool together; view 0 shuffles each, the others shuffle both
      and cut again, so that companions change too;
    - `replacement` (not in the paper): as `within_window`, but in views after the first `replaced` candidates make
      way for others of the pool, or, where it has no others, just go. Only who stayed is compared.

    `targets`: labels of the teacher's first order, or the mean over its orders.
    """

    width: int = 20
    partition: windows.Partition = "contiguous"
    order: windows.Arrangement = "given"
    views: Views = "within_window"
    seeds: tuple[int, ...] = (0, 1)
    targets: Target = "single"
    replaced: int = 1

    def __post_init__(self) -> None:
        for name, known in (
            ("views", get_args(Views)),
            ("targets", get_args(Target)),
            ("partition", windows.PARTITIONS),
            ("order", windows.ARRANGEMENTS),
        ):
            if getattr(self, name) not in known:
                raise BadArgument(f"unknown {name} '{getattr(self, name)}'; choose one of {', '.join(known)}")
        for name in ("width", "replaced"):
            if not whole(getattr(self, name)) or getattr(self, name) < 1:
                raise BadArgument(f"{name} must be a whole number of at least 1, got {getattr(self, name)!r}")
        if len(set(self.seeds)) != len(self.seeds):
            raise BadArgument(f"each view has a seed of its own, got {list(self.seeds)}")
        if self.views == "whole_pool":
            least = 1
        else:
            least = 1 if self.views == "none" else 2
        if len(self.seeds) < least:
            raise BadArgument(f"views '{self.views}' needs {least} seeds or more, got {len(self.seeds)}")
        if self.paired and self.width < 2:
            raise BadArgument(f"views '{self.views}' compares orders of a window, which a width of 1 has not")

    @property
    def paired(self) -> bool:
        """Whether an example has several views that a consistency term can compare."""
        return self.views not in ("none", "whole_pool")

    def describe(self) -> dict[str, Any]:
        """The recipe as JSON values."""
        return {**asdict(self), "seeds": list(self.seeds)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class View:
    """One showing of an example's documents: its prompts, mostly one, and what their slots show.

    `shows` (slots,) over all prompts in turn is the document of the example at each slot, -1 for a companion that is
    not of the example.
    """

    prompts: tuple[WindowPrompt, ...]
    shows: IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Example:
    """One window's documents (m of them) with labels and views.

    `positions` (m,) in the pool; `targets` (m,) float32; `probabilities` (m, G) and `weights` (m,) where there are.
    A window of one document has one view. `window` counts within the pool's presentation.
    """

    query_id: str
    window: int
    positions: IntArray
    targets: FloatArray
    probabilities: FloatArray | None
    weights: FloatArray | None
    views: tuple[View, ...]

    @property
    def shown(self) -> npt.NDArray[np.bool_]:
        """Which view shows which document, (views, m)."""
        places = np.arange(len(self.positions))
        return np.stack([np.isin(places, view.shows) for view in self.views])

    @property
    def tokens(self) -> int:
        """Tokens of all prompts of all views."""
        return sum(len(prompt.token_ids) for view in self.views for prompt in view.prompts)


@dataclass(slots=True, kw_only=True)
class Plan:
    """What became of the pools: counts, and the queries that were left out with why.

    `narrowed` queries got windows narrower than asked for, `shortened` documents lost text to the cap on characters
    or to the room there is, `blank` documents show nothing and are not trained on, `singles` are windows of one.
    """

    queries: int = 0
    documents: int = 0
    examples: int = 0
    singles: int = 0
    narrowed: int = 0
    shortened: int = 0
    blank: int = 0
    empty: int = 0
    dropped: dict[str, str] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """The counts as JSON values; of dropped queries how many, and the first few."""
        return {**asdict(self), "dropped": len(self.dropped), "dropped_first": dict(list(self.dropped.items())[:5])}

    def __str__(self) -> str:
        said = [f"{self.examples} windows of {self.queries} queries, {self.documents} documents"]
        for count, what in (
            (self.singles, "windows of one, for the fit only"),
            (self.narrowed, "queries with narrower windows, for want of room"),
            (self.shortened, "documents shortened"),
            (self.blank, "blank documents left out"),
            (self.empty, "empty pools"),
            (len(self.dropped), "queries dropped, no room for one document"),
        ):
            if count:
                said.append(f"{count} {what}")
        return "; ".join(said)


class Examples:
    """The windows of a set of pools as a sequence of examples, planned at once and rendered when asked for.

    `prompts` is one `GradePrompt`, or one per marker scheme for views `markers`. `max_tokens` is the longest prompt.
    `slot_weights` (width,), from `losses.inverse_propensity`, weighs a document by its pool position modulo the width
    (method, 4.4). `probabilities` reads the teacher's P(g), which the distribution loss needs.

    Raises what `labels.check_labels` raises for labels of other pools or another template, and `InvalidData` where
    not one window is left.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        labels: Labels,
        *,
        prompts: GradePrompt | Sequence[GradePrompt],
        recipe: Recipe,
        max_tokens: int,
        slot_weights: Sequence[float] | npt.NDArray[np.float64] | None = None,
        probabilities: bool = False,
        check_template: bool = True,
    ) -> None:
        self._prompts = [prompts] if isinstance(prompts, GradePrompt) else list(prompts)
        if (len(self._prompts) > 1) != (recipe.views == "markers"):
            raise BadArgument("views 'markers' take a prompt for each of several marker schemes, other views one")
        if slot_weights is not None and len(slot_weights) != recipe.width:
            raise BadArgument(f"{len(slot_weights)} slot weights for windows of {recipe.width}; give one for each slot")
        self.recipe = recipe
        self._pools = list(pools)
        self._max_tokens = max_tokens
        self._weights = None if slot_weights is None else np.asarray(slot_weights, dtype=np.float32)
        check_labels(labels, self._pools, self._prompts[0], check_template=check_template)
        self._targets = [labels.targets(pool, recipe.targets) for pool in self._pools]
        self._probabilities = [_probabilities(pool, labels) for pool in self._pools] if probabilities else None
        self._sheets: OrderedDict[int, tuple[PromptSheet, ...]] = OrderedDict()
        self.plan = Plan()
        self._entries: list[tuple[int, int, int]] = []
        for i, pool in enumerate(self._pools):
            self._entries += self._planned(i, pool)
        self.plan.examples = len(self._entries)
        self._say()

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, i: int) -> Example:
        return self.example(i)

    def __iter__(self) -> Iterator[Example]:
        return (self.example(i) for i in range(len(self)))

    def query_of(self, i: int) -> str:
        """The query an example is of, without rendering it."""
        return self._pools[self._entries[i][0]].query_id

    def example(self, i: int, *, epoch: int = 0) -> Example:
        """Render example `i` with the views of an epoch."""
        which, presentation, index = self._entries[i]
        pool, sheets = self._pools[which], self._sheet(which)
        cuts = self._cut(pool, sheets, presentation, epoch)
        if self.recipe.views == "repartition":
            group = _groups(len(cuts))[index]
            parts = [cuts[w] for w in group]
        else:
            parts = [cuts[index]]
        positions = np.concatenate(parts)
        at = _Place(pool=pool, index=index, epoch=epoch, parts=parts, shown=np.concatenate(cuts))
        return Example(
            query_id=pool.query_id,
            window=index,
            positions=positions,
            targets=self._targets[which][positions],
            probabilities=None if self._probabilities is None else self._probabilities[which][positions],
            weights=None if self._weights is None else self._weights[positions % self.recipe.width],
            views=self._views(at, positions, sheets),
        )

    # -- planning -------------------------------------------------------------------------------------------------

    def _planned(self, i: int, pool: Pool) -> list[tuple[int, int, int]]:
        if not len(pool):
            self.plan.empty += 1
            return []
        try:
            sheets = self._sheet(i)
        except InvalidData as error:
            self.plan.dropped[pool.query_id] = str(error)
            return []
        blank, width = sheets[0].blank, min(sheet.width for sheet in sheets)
        shown = int((~blank).sum())
        self.plan.blank += int(blank.sum())
        self.plan.shortened += int((sheets[0].cut > 0).sum())
        if not shown:
            self.plan.empty += 1
            return []
        self.plan.queries += 1
        self.plan.documents += shown
        self.plan.narrowed += width < min(self.recipe.width, shown)
        entries = []
        for presentation in range(len(self.recipe.seeds) if self.recipe.views == "whole_pool" else 1):
            cuts = self._cut(pool, sheets, presentation, epoch=0)
            self.plan.singles += sum(len(cut) == 1 for cut in cuts)
            count = len(_groups(len(cuts))) if self.recipe.views == "repartition" else len(cuts)
            entries += [(i, presentation, index) for index in range(count)]
        return entries

    def _say(self) -> None:
        if not self._entries:
            first = next(iter(self.plan.dropped.items()), None)
            why = f"; first '{first[0]}': {first[1]}" if first else "; the pools are empty"
            raise InvalidData(f"no window is left of {len(self._pools)} pools{why}")
        if self.plan.dropped:
            some = ", ".join(f"'{query_id}'" for query_id in list(self.plan.dropped)[:5])
            logger.warning(
                "%d of %d queries leave no room for a document and are dropped (%s%s); raise max_length, shorten them",
                len(self.plan.dropped),
                len(self._pools),
                some,
                ", …" if len(self.plan.dropped) > 5 else "",
            )

    def _sheet(self, i: int) -> tuple[PromptSheet, ...]:
        """The pool's documents, tokenised for each prompt; the pools asked for last are kept."""
        if i in self._sheets:
            self._sheets.move_to_end(i)
            return self._sheets[i]
        pool = self._pools[i]
        sheets = tuple(
            prompt.sheet(pool.query, pool.texts, width=self.recipe.width, max_tokens=self._max_tokens)
            for prompt in self._prompts
        )
        self._sheets[i] = sheets
        if len(self._sheets) > _SHEETS:
            self._sheets.popitem(last=False)
        return sheets

    def _cut(self, pool: Pool, sheets: Sequence[PromptSheet], presentation: int, epoch: int) -> list[Order]:
        """The windows of one presentation of a pool, blank documents left out."""
        recipe, n = self.recipe, len(pool)
        keys = None
        if recipe.order == "canonical" or recipe.partition == "hashed":
            keys = windows.content_keys(pool.query, pool.texts, pool.doc_ids)
        if recipe.order == "canonical":
            assert keys is not None
            order = windows.canonical(keys)
        else:
            order = windows.reverse(n) if recipe.order == "reverse" else windows.identity(n)
        if recipe.views == "whole_pool":
            seed = recipe.seeds[presentation] + epoch * (max(recipe.seeds) - min(recipe.seeds) + 1)
            order = order[windows.permutation(n, seed=seed)]
        order = order[~sheets[0].blank[order]]
        return windows.partition(order, width=min(sheet.width for sheet in sheets), method=recipe.partition, keys=keys)

    # -- views ----------------------------------------------------------------------------------------------------

    def _views(self, at: _Place, positions: Order, sheets: Sequence[PromptSheet]) -> tuple[View, ...]:
        recipe = self.recipe
        if not recipe.paired or len(positions) == 1:
            return (_view([positions], positions, sheets[0]),)
        if recipe.views == "dropout":
            return tuple(_view([positions], positions, sheets[0]) for _ in recipe.seeds)
        if recipe.views == "repartition" and len(at.parts) > 1:
            return tuple(_view(parts, positions, sheets[0]) for parts in self._repartitioned(at, positions))
        orders = _distinct_orders(positions, [at.seed(base) for base in recipe.seeds])
        if recipe.views == "markers":
            drawn = [_marks(at.seed(base), len(sheets), len(positions)) for base in recipe.seeds]
            return tuple(
                _view([order], positions, sheets[scheme], marks=marks)
                for order, (scheme, marks) in zip(orders, drawn, strict=False)
            )
        if recipe.views == "replacement":
            orders = [orders[0]] + [
                self._replaced(at, positions, order, base)
                for order, base in zip(orders[1:], recipe.seeds[1:], strict=False)
            ]
        return tuple(_view([order], positions, sheets[0]) for order in orders)

    def _repartitioned(self, at: _Place, positions: Order) -> list[list[Order]]:
        """View 0 keeps the windows and shuffles each; the others shuffle all and cut into windows of those sizes."""
        first = at.seed(self.recipe.seeds[0])
        kept = [part[windows.permutation(len(part), seed=first + w)] for w, part in enumerate(at.parts)]
        stops = np.cumsum([len(part) for part in at.parts])[:-1]
        others = _distinct_orders(
            positions, [at.seed(base) for base in self.recipe.seeds[1:]], but=np.concatenate(kept)
        )
        return [kept, *(np.split(order, stops) for order in others)]

    def _replaced(self, at: _Place, positions: Order, order: Order, base: int) -> Order:
        """`order` with `replaced` of its candidates, at most half, changed for others of the pool, or left out."""
        draw = random.Random(at.seed(base) ^ _REPLACED)
        count = max(1, min(self.recipe.replaced, len(order) // 2))
        out = draw.sample(range(len(order)), count)
        others = [int(p) for p in at.shown if p not in set(positions.tolist())]
        new = draw.sample(others, min(count, len(others)))
        changed = order.copy()
        for slot, p in zip(out, new, strict=False):
            changed[slot] = p
        return np.delete(changed, out[len(new) :])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where an example is: its pool, its number there, the epoch, its windows, and all that the pool shows."""

    pool: Pool
    index: int
    epoch: int
    parts: list[Order]
    shown: Order

    def seed(self, base: int) -> int:
        return windows.view_seed(base, epoch=self.epoch, query_id=self.pool.query_id, window=self.index)


def _distinct_orders(positions: Order, seeds: Sequence[int], *, but: Order | None = None) -> list[Order]:
    """One shuffle per seed, no two alike nor like `but`: a repeated one is drawn again with the next seed.

    There are no more than there are orders.

    The reference does not check, and its two views of a window of few documents are often the same, which leaves
    nothing to compare (method, section 4.2).
    """
    m = len(positions)
    seen = set() if but is None else {but.tobytes()}
    possible = math.factorial(m) - len(seen) if m < 8 else len(seeds)
    found = []
    for seed in seeds[:possible]:
        again = itertools.count(seed)
        while (order := positions[windows.permutation(m, seed=next(again))]).tobytes() in seen:
            pass
        seen.add(order.tobytes())
        found.append(order)
    return found


def _marks(seed: int, schemes: int, m: int) -> tuple[int, list[int]]:
    """A view's marker scheme, and which of its markers each slot carries: drawn in this order from one seed.

    Source: method, section 4.4, which gives the seed; that both come from one stream is our reading.
    """
    draw = random.Random(seed ^ _SCHEME)
    scheme, marks = draw.randrange(schemes), list(range(m))
    draw.shuffle(marks)
    return scheme, marks


def _view(parts: Sequence[Order], positions: Order, sheet: PromptSheet, *, marks: Sequence[int] | None = None) -> View:
    """Render the windows `parts`; each is at most as wide as the sheet, having been cut by it."""
    place = {int(p): i for i, p in enumerate(positions)}
    shows = [place.get(int(p), -1) for part in parts for p in part]
    return View(prompts=tuple(sheet.window(part, marks=marks) for part in parts), shows=np.array(shows, dtype=np.int64))


def _groups(count: int) -> list[list[int]]:
    """Windows 0 … count-1 in pairs, the last three together where the count is odd."""
    starts = list(range(0, count - 1, 2)) or [0]
    stops = [*starts[1:], count]
    return [list(range(start, stop)) for start, stop in zip(starts, stops, strict=True)]


# -- labels -------------------------------------------------------------------------------------------------------


def _probabilities(pool: Pool, labels: Labels) -> FloatArray:
    found = labels.probabilities(pool)
    if found is None:
        raise InvalidData(
            f"the distribution loss needs the teacher's grade probabilities, and labels of '{pool.query_id}' have "
            "none; label with an engine that gives them, or set distribution to 0"
        )
    return found


def relevant_by_slot(pools: Sequence[Pool], qrels: Mapping[str, Mapping[str, int]], *, width: int) -> list[int]:
    """How many documents judged relevant (grade 1 or more) stand at each pool position modulo `width`.

    What `losses.inverse_propensity` makes DebiasFirst's weights of. Source: method, section 4.4.
    """
    counts = [0] * width
    for pool in pools:
        judged = qrels.get(pool.query_id, {})
        for position, doc_id in enumerate(pool.doc_ids):
            counts[position % width] += judged.get(doc_id, 0) >= 1
    return counts


# -- the order of an epoch ----------------------------------------------------------------------------------------


def epoch_order(count: int, *, seed: int, epoch: int, multiple: int) -> Order:
    """Examples in the order an epoch takes them, repeated from its start up to a multiple of the windows per step.

    It depends on the seed and the epoch alone, not on how many processes share a step.
    """
    order = windows.permutation(count, seed=windows.view_seed(seed, epoch=epoch, query_id="order", window=0))
    return np.resize(order, -(-count // multiple) * multiple)
