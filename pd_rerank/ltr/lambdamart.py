"""LambdaMART on pools whose only labels are designated pairs: pair-restricted, or with sampled background.

Parameters, weights, sampling and the stopping rule are those of the NevIR study's E0 and N=8 (nevir notes, section 4);
what sampling, label levels and gains do apart from one another can be set one by one.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pd_rerank._extras import need
from pd_rerank.errors import BadArgument, InvalidData, MissingResource
from pd_rerank.evaluation.pairs import Case
from pd_rerank.files import read_json, sha256_file, versions, whole_folder, write_json
from pd_rerank.ltr.features import Matrix
from pd_rerank.scores import Scores

SEED = 20260907
"""The study's seed, of its trees and of its samples."""

_MODEL, _CARD = "model.txt", "model.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """What a query teaches: its two designated passages, and `background` others sampled from its pool.

    `labels` are the levels of the preferred passage, its counterpart and the background; `gains[level]` is what a
    level is worth. `sample_seed` is part of every query's own seed.
    """

    background: int = 0
    labels: tuple[int, int, int] = (1, 0, 0)
    gains: tuple[float, ...] = (0.0, 1.0)
    sample_seed: int = SEED

    def __post_init__(self) -> None:
        if self.background < 0:
            raise BadArgument(f"background is a count from 0, got {self.background}")
        if min(self.labels) < 0 or max(self.labels) >= len(self.gains):
            raise BadArgument(f"labels {self.labels} need gains for the levels 0 to {max(self.labels)}: {self.gains}")


E0 = Supervision()
"""The pair-trained ranker's: only the two designated passages enter the loss."""

N8 = Supervision(background=8, labels=(2, 1, 0), gains=(0.0, 1.0, 2.0))
"""Background training: eight sampled passages below the pair. Sampling, labels and gains change together."""

FACTORS: Mapping[str, Supervision] = {
    "E0": E0,
    "E0, labels 2/1": replace(N8, background=0),
    "N=8": N8,
    "N=8, labels 1/0/0": replace(N8, labels=(1, 0, 0), gains=(0.0, 1.0)),
    "N=8, gains 0/1/1": replace(N8, gains=(0.0, 1.0, 1.0)),
    "N=8, gains 0/1/3": replace(N8, gains=(0.0, 1.0, 3.0)),
}
"""E0 and N=8 with one factor changed at a time.

"E0, labels 2/1" takes the sampling out of N=8. "labels 1/0/0" takes the levels out: background counts as the
counterpart does. "gains 0/1/1" makes the two designated passages worth the same, so that only background teaches;
"gains 0/1/3" is the usual 2^level - 1.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """Parameters of the trees; the defaults are the study's (its configuration c3)."""

    leaves: int = 7
    depth: int = 3
    l2: float = 1.0
    learning_rate: float = 0.03
    rounds: int = 300
    patience: int = 40
    seed: int = SEED

    def parameters(self, gains: Sequence[float]) -> dict[str, Any]:
        """What LightGBM is told."""
        return {
            "objective": "lambdarank",
            "boosting": "gbdt",
            "metric": "none",
            "learning_rate": self.learning_rate,
            "num_leaves": self.leaves,
            "max_depth": self.depth,
            "lambda_l1": 0.0,
            "lambda_l2": self.l2,
            "min_data_in_leaf": 20,
            "min_sum_hessian_in_leaf": 0.001,
            "min_gain_to_split": 0.0,
            "feature_fraction": 0.8,
            "feature_fraction_bynode": 1.0,
            "bagging_fraction": 1.0,
            "bagging_freq": 0,
            "sigmoid": 1.0,
            "lambdarank_norm": True,
            "lambdarank_truncation_level": 2,
            "label_gain": list(gains),
            "max_bin": 255,
            "use_missing": True,
            "zero_as_missing": False,
            "num_threads": 1,
            "deterministic": True,
            "force_col_wise": True,
            "verbosity": -1,
            **dict.fromkeys(
                ("seed", "bagging_seed", "feature_fraction_seed", "data_random_seed", "objective_seed", "extra_seed"),
                self.seed,
            ),
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lesson:
    """One query to learn from: its case, and the features of its whole pool, (n, columns) in pool order."""

    case: Case
    features: Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Training directions that teach nothing, by why."""

    missing: int = 0
    conflicts: int = 0
    duplicates: int = 0
    too_small: int = 0

    def __str__(self) -> str:
        told = {
            "lack a passage in their pool": self.missing,
            "contradict themselves": self.conflicts,
            "repeat another": self.duplicates,
            "have a pool too small to sample background from": self.too_small,
        }
        return ", ".join(f"{count} {what}" for what, count in told.items() if count) or "there is none"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Examples:
    """Rows to train on: `features` (rows, columns), `labels` and `weights` (rows,), `sizes` rows per query in order."""

    features: Matrix
    labels: npt.NDArray[np.int64]
    weights: Scores
    sizes: tuple[int, ...]
    dropped: Dropped


# -- examples -----------------------------------------------------------------------------------------------------


def sample_seed(query_id: str, *, seed: int = SEED) -> int:
    """The seed of a query's background sample: the first 8 bytes of the SHA-256 of "seed:query id", big-endian."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{query_id}".encode()).digest()[:8], "big")


def background(case: Case, n: int, *, seed: int = SEED) -> list[int] | None:
    """`n` pool positions outside the pair, sampled by the direction's own seed, ascending; None if there are fewer."""
    others = [i for i in range(len(case.doc_ids)) if i not in (case.preferred, case.other)]
    if len(others) < n:
        return None
    rng = random.Random(sample_seed(case.direction.direction_id, seed=seed))
    return sorted(rng.sample(others, n))


def query_weights(groups: Sequence[str]) -> Scores:
    """A weight for each query, (n,): n / (groups · queries of its group), so that groups count alike; mean 1."""
    sizes = Counter(groups)
    return np.array([len(groups) / (len(sizes) * sizes[group]) for group in groups], dtype=np.float64)


def examples(lessons: Sequence[Lesson], supervision: Supervision = E0) -> Examples:
    """The rows that lessons give under a supervision: per query the two designated passages, then its background.

    A direction that lacks a passage, contradicts itself, repeats another one, or has too small a pool is dropped and
    counted. Repeats that cross source groups, and nothing left to learn from, are `InvalidData`.
    """
    kept, dropped = _eligible([lesson.case for lesson in lessons], supervision)
    if not kept:
        raise InvalidData(f"none of {len(lessons)} directions can be trained on: {dropped}")
    levels = supervision.labels
    weights = query_weights([lessons[i].case.direction.group for i, _ in kept])
    sizes = tuple(len(rows) for _, rows in kept)
    return Examples(
        features=np.concatenate([lessons[i].features[rows] for i, rows in kept]),
        labels=np.array([level for n in sizes for level in (*levels[:2], *levels[2:] * (n - 2))], dtype=np.int64),
        weights=np.repeat(weights, sizes),
        sizes=sizes,
        dropped=dropped,
    )


def _eligible(cases: Sequence[Case], supervision: Supervision) -> tuple[list[tuple[int, list[int]]], Dropped]:
    """Which cases teach, by position, each with the pool positions of its rows: the pair, then its background."""
    kept: list[tuple[int, list[int]]] = []
    taught: dict[tuple[str, str, str], str] = {}
    count: Counter[str] = Counter()
    for i, case in enumerate(cases):
        d = case.direction
        if case.preferred is None or case.other is None:
            count["missing"] += 1
            continue
        if d.conflict is not None:
            count["conflicts"] += 1
            continue
        key = (" ".join(d.query.split()) or str(case.query_id), case.doc_ids[case.preferred], case.doc_ids[case.other])
        if key in taught:
            if taught[key] != d.group:
                raise InvalidData(
                    f"'{d.direction_id}' teaches in group '{d.group}' what was taught in '{taught[key]}'; "
                    "group directions by what they share (union_groups)"
                )
            count["duplicates"] += 1
            continue
        sampled = background(case, supervision.background, seed=supervision.sample_seed)
        if sampled is None:
            count["too_small"] += 1
            continue
        taught[key] = d.group
        kept.append((i, [case.preferred, case.other, *sampled]))
    return kept, Dropped(**count)


# -- training -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranker:
    """Trained trees with what they were made of: `text` is LightGBM's own, up to the best round."""

    text: str
    names: tuple[str, ...]
    supervision: Supervision
    trees: Trees
    best_round: int
    rounds_run: int
    dev_strict: float | None
    queries: int
    rows: int
    dropped: Dropped

    def scores(self, pools: Sequence[Matrix]) -> list[Scores]:
        """Scores of whole pools, one array (n,) per matrix (n, columns), higher is better."""
        if wrong := [m.shape for m in pools if m.shape[1] != len(self.names)]:
            raise BadArgument(f"features of shape {wrong[0]} for a ranker of {len(self.names)} columns")
        booster = _lightgbm().Booster(model_str=self.text)
        sizes = [len(matrix) for matrix in pools]
        if not sum(sizes):
            return [np.zeros(0) for _ in pools]
        every = np.asarray(booster.predict(np.concatenate(pools), num_threads=1), dtype=np.float64)
        return np.split(every, np.cumsum(sizes)[:-1])

    def importance(self) -> dict[str, float]:
        """The loss each column's splits took away, by name, largest first; columns never split on are left out."""
        gain = _lightgbm().Booster(model_str=self.text).feature_importance(importance_type="gain")
        used = {name: float(g) for name, g in zip(self.names, gain, strict=True) if g > 0}
        return dict(sorted(used.items(), key=lambda item: -item[1]))

    def describe(self) -> dict[str, Any]:
        """All but the trees themselves, as plain values."""
        return {
            "names": list(self.names),
            "supervision": asdict(self.supervision),
            "trees": asdict(self.trees),
            "best_round": self.best_round,
            "rounds_run": self.rounds_run,
            "dev_strict": self.dev_strict,
            "queries": self.queries,
            "rows": self.rows,
            "dropped": asdict(self.dropped),
        }

    def save(self, folder: str | Path) -> None:
        """Write model.txt and model.json into `folder`, whole or not at all."""
        with whole_folder(folder, holds=(_MODEL, _CARD)) as fresh:
            (fresh / _MODEL).write_text(self.text, encoding="utf-8")
            made = {"sha256": sha256_file(fresh / _MODEL), "versions": versions(("lightgbm", "numpy"))}
            write_json(fresh / _CARD, self.describe() | made)

    @classmethod
    def load(cls, folder: str | Path) -> Ranker:
        """Read what `save` wrote; trees that are not those its card records are `InvalidData`."""
        model = Path(folder) / _MODEL
        card = read_json(Path(folder) / _CARD)
        if not model.is_file():
            raise MissingResource(f"{folder} is no saved ranker: it has no {_MODEL}")
        if card.get("sha256") != sha256_file(model):
            raise InvalidData(f"{model} is not what {_CARD} records; train the ranker again")
        given = card["supervision"]
        return cls(
            text=model.read_text(encoding="utf-8"),
            names=tuple(card["names"]),
            supervision=Supervision(**given | {"labels": tuple(given["labels"]), "gains": tuple(given["gains"])}),
            trees=Trees(**card["trees"]),
            dropped=Dropped(**card["dropped"]),
            **{name: card[name] for name in ("best_round", "rounds_run", "dev_strict", "queries", "rows")},
        )


def train(
    lessons: Sequence[Lesson],
    dev: Sequence[Lesson],
    *,
    names: Sequence[str],
    supervision: Supervision = E0,
    trees: Trees = Trees(),
) -> Ranker:
    """Train on `lessons`; stop when `dev`'s designated pairs have not been preferred oftener for `patience` rounds.

    What is watched is strict preference averaged within source groups and then over them; the ranker is the prefix of
    rounds that was best. Without `dev` all rounds are run. A group that is in both is `InvalidData`.
    """
    rows = examples(lessons, supervision)
    watched = [lesson for lesson in dev if lesson.case.missing is None]
    if dev and not watched:
        raise InvalidData(f"none of the {len(dev)} development directions has both its passages in the pool")
    mine = {lesson.case.direction.group for lesson in lessons}
    if shared := mine & {lesson.case.direction.group for lesson in watched}:
        raise InvalidData(f"source group '{min(shared)}' is trained on and stops the training; keep the parts apart")
    lightgbm = _lightgbm()
    parameters = trees.parameters(supervision.gains)
    data = lightgbm.Dataset(
        rows.features,
        label=rows.labels,
        weight=rows.weights,
        group=list(rows.sizes),
        feature_name=list(names),
        params=parameters,
        free_raw_data=False,
    )
    seen: list[float] = []
    callbacks, valid = [], []
    if watched:
        pairs = np.concatenate([_pair(lesson) for lesson in watched])
        labels = [1, 0] * len(watched)
        valid = [data.create_valid(pairs, label=labels, group=[2] * len(watched))]
        groups = [lesson.case.direction.group for lesson in watched]

        def strict(predicted: Scores, _: Any) -> tuple[str, float, bool]:
            seen.append(macro_strict(predicted[0::2], predicted[1::2], groups))
            return "strict", seen[-1], True

        callbacks = [lightgbm.early_stopping(trees.patience, min_delta=0.0, verbose=False)]
    booster = lightgbm.train(
        parameters,
        data,
        num_boost_round=trees.rounds,
        valid_sets=valid,
        feval=strict if watched else None,
        callbacks=callbacks,
    )
    best = booster.best_iteration if watched and booster.best_iteration > 0 else booster.current_iteration()
    return Ranker(
        text=booster.model_to_string(num_iteration=best),
        names=tuple(names),
        supervision=supervision,
        trees=trees,
        best_round=best,
        rounds_run=len(seen) or booster.current_iteration(),
        dev_strict=max(seen) if seen else None,
        queries=len(rows.sizes),
        rows=len(rows.labels),
        dropped=rows.dropped,
    )


def macro_strict(preferred: Scores, other: Scores, groups: Sequence[str]) -> float:
    """Strict preference averaged within groups, then over them; scores (n,) of the two passages."""
    weights = query_weights(groups)
    return float((weights * (preferred > other)).sum() / len(groups))


# -- inner parts --------------------------------------------------------------------------------------------------


def _pair(lesson: Lesson) -> Matrix:
    pair = [at for at in (lesson.case.preferred, lesson.case.other) if at is not None]
    return lesson.features[pair]


def _lightgbm() -> Any:
    return need("lightgbm", extra="ltr", purpose="LambdaMART is trained by 'lightgbm'")
