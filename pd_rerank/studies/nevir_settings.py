"""What the NevIR study can be told: collections, parts, trees, text scorers, and what is looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, JsonValue, model_validator

from pd_rerank.config import Settings, load
from pd_rerank.errors import near_names
from pd_rerank.ltr.lambdamart import FACTORS, SEED, Supervision, Trees
from pd_rerank.studies.folder import check_names

FUSION = "fusion"
"""The reference ranker: the first stage's own scores."""

E0_TIE = ", E0 tie"
"""The end of the name that a window rerank has with E0 breaking its ties."""


_FIELDS = ("id", "q1", "q2", "doc1", "doc2", "query", "query_id", "preferred", "rejected", "pair", "group")
"""Our words for the fields of labelled pairs, see `read_pairs`."""


class CollectionSettings(Settings):
    """Labelled pairs and the pools they are looked for in; or so many groups of this project's own `templates`."""

    pairs: Path | None = None
    source: Literal["prefix", "pair"] = "prefix"
    fields: dict[str, str] = Field({})
    pools: Path | None = None
    templates: int | None = Field(None, ge=4, le=96)

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.templates is None) == (self.pairs is None or self.pools is None):
            raise ValueError("a collection is 'pairs' with 'pools', or 'templates' alone")
        if unknown := [name for name in self.fields if name not in _FIELDS]:
            raise ValueError(f"pairs have no field '{unknown[0]}'; {near_names(unknown[0], _FIELDS)}")
        return self


class PartSettings(Settings):
    """A collection, or with `share` a part of it that keeps source groups together."""

    collection: str
    share: float | None = Field(None, gt=0, lt=1)


class SupervisionSettings(Settings):
    """One way to train trees, see `ltr.lambdamart.Supervision`."""

    background: int = Field(0, ge=0)
    labels: tuple[int, int, int] = (1, 0, 0)
    gains: tuple[float, ...] = (0.0, 1.0)

    def made(self) -> Supervision:
        """As the training takes it."""
        return Supervision(background=self.background, labels=self.labels, gains=self.gains)


class TreeSettings(Settings):
    """The trees: E0 and N=8 always; with `factors` one factor changed at a time; other N, other seeds, own arms."""

    factors: bool = True
    background: list[int] = Field([])
    seeds: list[int] = Field([])
    arms: dict[str, SupervisionSettings] = Field({})
    rounds: int = Field(300, ge=1)
    patience: int = Field(40, ge=1)

    @model_validator(mode="after")
    def _new_names(self) -> Self:
        for name in self.arms:
            if name == FUSION or name in FACTORS:
                raise ValueError(f"arm '{name}' has the name of a ranker that the study has itself; rename it")
        return self

    def all_arms(self) -> dict[str, tuple[Supervision, Trees]]:
        """Every arm by name: how it is supervised and grown."""
        trees = Trees(rounds=self.rounds, patience=self.patience)
        named = FACTORS if self.factors else {name: FACTORS[name] for name in ("E0", "N=8")}
        found = {name: (supervision, trees) for name, supervision in named.items()}
        n8 = FACTORS["N=8"]
        for n in self.background:
            found[f"N={n}"] = (Supervision(background=n, labels=n8.labels, gains=n8.gains), trees)
        for seed in self.seeds:
            again = Trees(rounds=self.rounds, patience=self.patience, seed=seed)
            for name in ("E0", "N=8"):
                own = FACTORS[name]
                own = Supervision(background=own.background, labels=own.labels, gains=own.gains, sample_seed=seed)
                found[f"{name}, seed {seed}"] = (own, again)
        found |= {name: (arm.made(), trees) for name, arm in self.arms.items()}
        return found


class ScorerSettings(Settings):
    """A text scorer of the window.

    `type`: `rerankers` for any model of that library (a cross-encoder by default), `generated` for grades a chat
    model writes, `ocsft` for this package's batched reranker, `scores` for a scores folder or run that is there
    already. `options` go to its constructor. `directions` and `dev_directions` are how many test and development
    directions it scores, whole groups; all by default. `presentations` M > 1: the test windows are scored in M seeded
    shuffles as well, so that order stability stands beside preference and position; `order_directions` limits them to
    so many directions, the same first groups. `skip` says why it is not run.
    """

    type: Literal["rerankers", "generated", "ocsft", "scores"]
    model: str
    options: dict[str, JsonValue] = Field({})
    directions: int | None = Field(None, ge=1)
    dev_directions: int | None = Field(None, ge=0)
    presentations: int = Field(1, ge=1)
    order_directions: int | None = Field(None, ge=1)
    pair_only: bool = True
    skip: str | None = None

    @model_validator(mode="after")
    def _can_be_asked_again(self) -> Self:
        if self.type == "scores" and self.presentations > 1:
            raise ValueError("scores at hand are of one order; leave 'presentations' out")
        if self.type == "scores" and self.options:
            raise ValueError(f"scores at hand take no options, got {', '.join(sorted(self.options))}")
        return self


class NevirSettings(Settings):
    """The whole study."""

    output: Path
    title: str = "Preference and position in fixed pools"
    note: str = ""
    collections: dict[str, CollectionSettings]
    test: PartSettings
    train: PartSettings | None = None
    dev: PartSettings | None = None
    seed: int = SEED
    trees: TreeSettings = Field(default_factory=lambda: load(TreeSettings))
    scorers: dict[str, ScorerSettings] = Field({})
    window: int = Field(20, ge=1)
    shard_size: int = Field(32, ge=1)
    keep: float = Field(0.95, gt=0, le=1)
    interpolate: bool = True
    main: str | None = None

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        check_names("collection", self.collections)
        check_names("scorer", self.scorers)
        arms = self.trees.all_arms() if self.train is not None else {}
        for name in self.scorers:
            if name == FUSION or name in arms or name.endswith(E0_TIE):
                raise ValueError(f"scorer '{name}' has the name of a ranker that the study has itself; rename it")
        parts = {name: part for name in ("train", "dev", "test") if (part := getattr(self, name)) is not None}
        for name, part in parts.items():
            if part.collection not in self.collections:
                raise ValueError(f"{name} is of collection '{part.collection}', which is not listed")
        if self.train is None and self.dev is not None and self.scorers == {}:
            raise ValueError("dev is for training and for choosing K and gates; there is neither train nor a scorer")
        for collection in {part.collection for part in parts.values()}:
            of_it = [(name, part.share) for name, part in parts.items() if part.collection == collection]
            without = [name for name, share in of_it if share is None]
            if len(of_it) > 1 and len(without) > 1:
                raise ValueError(f"'{collection}' serves {' and '.join(without)}: give all but one of them a share")
            if sum(share or 0 for _, share in of_it) > 1 - 1e-9 and (without or len(of_it) == 1):
                raise ValueError(f"the shares of '{collection}' leave nothing for {without[0]}")
        if self.main is not None and self.main not in self.scorers:
            raise ValueError(f"main scorer '{self.main}' is not among the scorers")
        return self
