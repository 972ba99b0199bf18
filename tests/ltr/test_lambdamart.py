"""LambdaMART on designated pairs: the study's rows, weights, samples, parameters and stopping rule."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.evaluation.pairs import Direction, designate
from pd_rerank.ltr.lambdamart import (
    E0,
    FACTORS,
    N8,
    Lesson,
    Ranker,
    Supervision,
    Trees,
    background,
    examples,
    macro_strict,
    query_weights,
    sample_seed,
    train,
)
from tests.designated import direction, pool, vectors

NAMES = ("sign", "noise", "constant")


def lesson(name: str, *, size: int = 12, seed: int = 0, **fields: Any) -> Lesson:
    """A pool of `size`: the preferred passage second, its counterpart first, and column 0 tells them apart."""
    d: Direction = direction(name, preferred="d01", other="d00", **fields)
    case = designate([d], [pool(d.direction_id, {f"d{i:02}": float(size - i) for i in range(size)}, query=d.query)])[0]
    rng = np.random.default_rng(seed)
    features = np.column_stack([rng.normal(size=size), rng.normal(size=size), np.ones(size)]).astype(np.float32)
    features[:2, 0] = [-1.0, 1.0]
    return Lesson(case=case, features=features)


def lessons(n: int, prefix: str = "t", **fields: Any) -> list[Lesson]:
    return [lesson(f"{prefix}{i // 2}-1:q{i % 2 + 1}", seed=i, **fields) for i in range(n)]


# -- samples and rows -----------------------------------------------------------------------------------------------


def test_seeds_and_samples_are_the_studys() -> None:
    for row in vectors("nevir_unit")["n8_sampling"]:
        assert sample_seed(row["qid"]) == row["seed"]
        for size in (20, 150):
            drawn = sorted(random.Random(sample_seed(row["qid"])).sample(list(range(2, size)), 8))
            assert drawn == row[f"sample_from_range_2_to_{size - 1}"]
            # The pair stands first in this pool, so that what is outside it is 2 … size - 1.
            made = lesson(row["qid"], size=size)
            assert made.case.direction.direction_id == row["qid"]
            assert background(made.case, 8) == drawn


def test_a_sample_leaves_the_pair_out_and_a_small_pool_has_none() -> None:
    case = lesson("a-1:q1").case
    assert background(case, 10) == list(range(2, 12))
    assert background(case, 11) is None
    assert background(case, 3) != background(case, 3, seed=1)


def test_pair_restricted_rows_are_the_two_passages_alone() -> None:
    made = lessons(6)
    rows = examples(made)
    assert (rows.sizes, rows.labels.tolist()) == ((2,) * 6, [1, 0] * 6)
    assert rows.features[:2].tolist() == made[0].features[[1, 0]].tolist()


def test_background_rows_follow_the_pair() -> None:
    made = lessons(6)
    rows = examples(made, N8)
    assert (rows.sizes, rows.labels.tolist()) == ((10,) * 6, [2, 1, *[0] * 8] * 6)
    at = [1, 0, *(background(made[0].case, 8) or [])]
    assert rows.features[:10].tolist() == made[0].features[at].tolist()


def test_the_studys_loss_rows_follow_from_its_queries() -> None:
    train_counts = vectors("nevir_anchors")["populations"]["train"]
    assert train_counts["jointly_covered"] - train_counts["conflict_directions"] == train_counts["used"]
    assert train_counts["planned"] - train_counts["missing_target"] == train_counts["jointly_covered"]
    for supervision, key in ((E0, "loss_rows_E0"), (N8, "loss_rows_N8")):
        per_query = examples(lessons(2), supervision).sizes[0]
        assert train_counts["used"] * per_query == train_counts[key]


def test_weights_let_groups_count_alike() -> None:
    unit = vectors("nevir_unit")["train_weights"]
    groups = [name for name, n in unit["groups"].items() for _ in range(n)]
    found = dict(zip(groups, query_weights(groups).tolist(), strict=True))
    assert found == {"large": unit["weight_large"], "small": unit["weight_small"]}
    assert query_weights(groups).mean() == 1.0


def test_both_rows_of_a_query_carry_its_weight() -> None:
    made = [lesson(f"large-{i}:q1", seed=i) for i in range(4)] + [lesson(f"small-{i}:q1", seed=i) for i in range(2)]
    assert examples(made).weights.tolist() == [0.75] * 8 + [1.5] * 4


def test_what_teaches_nothing_is_dropped_and_counted() -> None:
    good = lesson("a-1:q1")
    lost = replace(good, case=replace(good.case, preferred=None, direction=direction("b-1:q1")))
    odd = lesson("c-1:q1", conflict="same query")
    again = lesson("a-2:q1", query=good.case.direction.query)
    small = lesson("d-1:q1", size=9)
    rows = examples([good, lost, odd, again, small], N8)
    assert rows.sizes == (10,)
    assert (rows.dropped.missing, rows.dropped.conflicts, rows.dropped.duplicates, rows.dropped.too_small) == (1,) * 4
    with pytest.raises(InvalidData, match="'z-1:q1' teaches in group 'z' what was taught in 'a'"):
        examples([good, lesson("z-1:q1", query=good.case.direction.query)])
    with pytest.raises(InvalidData, match=r"none of 1 directions can be trained on: 1 lack a passage in their pool$"):
        examples([lost])


def test_the_dev_measure_is_the_studys_group_mean() -> None:
    unit = vectors("nevir_unit")["macro_metrics"]
    score = {"correct": (1.0, 0.0), "wrong": (0.0, 1.0), "tie": (0.0, 0.0)}
    rows = [(group, *score[kind]) for group, kinds in unit["outcomes"].items() for kind in kinds]
    groups, preferred, other = zip(*rows, strict=True)
    assert macro_strict(np.array(preferred), np.array(other), groups) == unit["expected"]["group_macro"]


# -- trees ----------------------------------------------------------------------------------------------------------


def test_the_parameters_are_the_studys() -> None:
    told = Trees().parameters(E0.gains)
    want = {
        "objective": "lambdarank", "boosting": "gbdt", "metric": "none", "learning_rate": 0.03, "num_leaves": 7,
        "max_depth": 3, "lambda_l2": 1.0, "lambda_l1": 0.0, "min_data_in_leaf": 20, "min_sum_hessian_in_leaf": 0.001,
        "min_gain_to_split": 0.0, "feature_fraction": 0.8, "feature_fraction_bynode": 1.0, "bagging_fraction": 1.0,
        "bagging_freq": 0, "sigmoid": 1.0, "lambdarank_norm": True, "lambdarank_truncation_level": 2, "max_bin": 255,
        "use_missing": True, "zero_as_missing": False, "num_threads": 1, "deterministic": True,
        "force_col_wise": True, "label_gain": [0.0, 1.0],
    }  # fmt: skip
    assert {name: told[name] for name in want} == want
    assert {value for name, value in told.items() if name.endswith("seed")} == {20260907}
    assert (Trees().rounds, Trees().patience) == (300, 40)
    assert (N8.background, N8.labels, N8.gains) == (8, (2, 1, 0), (0.0, 1.0, 2.0))


def test_lightgbm_took_the_parameters_as_they_were_meant() -> None:
    pytest.importorskip("lightgbm")
    text = train(lessons(60), [], names=NAMES, supervision=N8, trees=Trees(rounds=2)).text
    for line in (
        "[objective: lambdarank]", "[num_leaves: 7]", "[max_depth: 3]", "[learning_rate: 0.03]", "[lambda_l2: 1]",
        "[lambda_l1: 0]", "[min_data_in_leaf: 20]", "[min_sum_hessian_in_leaf: 0.001]", "[feature_fraction: 0.8]",
        "[bagging_freq: 0]", "[lambdarank_truncation_level: 2]", "[lambdarank_norm: 1]", "[label_gain: 0,1,2]",
        "[sigmoid: 1]", "[max_bin: 255]", "[deterministic: 1]", "[force_col_wise: 1]", "[num_threads: 1]",
        "[seed: 20260907]", "[bagging_seed: 20260907]", "[feature_fraction_seed: 20260907]",
        "[data_random_seed: 20260907]", "[objective_seed: 20260907]", "[extra_seed: 20260907]",
    ):  # fmt: skip
        assert line in text, line


def test_training_learns_what_tells_the_pair_apart_and_is_the_same_twice() -> None:
    pytest.importorskip("lightgbm")
    made, dev = lessons(60), lessons(20, prefix="v")
    one, two = (train(made, dev, names=NAMES) for _ in range(2))
    assert one.text == two.text
    assert one.dev_strict == 1.0
    assert list(one.importance()) == ["sign"]
    preferred, other = one.scores([dev[0].features])[0][[1, 0]]
    assert preferred > other


def test_training_stops_after_patience_and_keeps_the_best_rounds() -> None:
    pytest.importorskip("lightgbm")
    made = train(lessons(60), lessons(20, prefix="v"), names=NAMES, trees=Trees(patience=5))
    assert (made.best_round, made.rounds_run) == (1, 6)
    assert made.text.count("Tree=") == 1
    whole = train(lessons(60), [], names=NAMES, trees=Trees(rounds=7))
    assert (whole.best_round, whole.dev_strict) == (7, None)


def test_every_factor_trains_on_the_same_queries() -> None:
    pytest.importorskip("lightgbm")
    made = lessons(40)
    found = {name: train(made, [], names=NAMES, supervision=s, trees=Trees(rounds=3)) for name, s in FACTORS.items()}
    assert {ranker.queries for ranker in found.values()} == {40}
    assert {name: ranker.rows for name, ranker in found.items()} == {
        name: 40 * (2 + s.background) for name, s in FACTORS.items()
    }
    assert len({ranker.text.partition("parameters:")[0] for ranker in found.values()}) > 2


def test_a_saved_ranker_scores_the_same(tmp_path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("lightgbm")
    made = train(lessons(60), lessons(20, prefix="v"), names=NAMES, supervision=N8)
    made.save(tmp_path / "n8")
    again = Ranker.load(tmp_path / "n8")
    assert again.describe() == made.describe()
    features = [one.features for one in lessons(3, prefix="x")]
    for a, b in zip(made.scores(features), again.scores(features), strict=True):
        assert a.tolist() == b.tolist()
    (tmp_path / "n8" / "model.txt").write_text("tree")
    with pytest.raises(InvalidData, match=r"is not what model\.json records"):
        Ranker.load(tmp_path / "n8")


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(BadArgument, match="need gains for the levels 0 to 2"):
        Supervision(labels=(2, 1, 0))
    pytest.importorskip("lightgbm")
    with pytest.raises(InvalidData, match="source group 't0' is trained on and stops the training"):
        train(lessons(4), lessons(2), names=NAMES)
    ranker = train(lessons(60), [], names=NAMES, trees=Trees(rounds=2))
    with pytest.raises(BadArgument, match="for a ranker of 3 columns"):
        ranker.scores([np.zeros((2, 4), dtype=np.float32)])
    assert ranker.scores([np.zeros((0, 3), dtype=np.float32)])[0].shape == (0,)
