"""Selection: held-out figures worked by hand, and rules on recorded numbers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from pd_rerank.decisions import Threshold
from pd_rerank.engines.fake import FakeEngine
from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.pool import Candidate, Pool
from pd_rerank.prompt import GradePrompt
from pd_rerank.scoring import Scoring
from pd_rerank.training.selection import (
    Evaluation,
    best_ndcg,
    choose,
    difference,
    equal_quality,
    equal_stability,
    evaluate_heldout,
    evaluation_line,
    evaluation_table,
    frontier,
    frontier_picture,
    largest_weight,
    quality_at_stability,
    read_evaluations,
    table_text,
    write_evaluations,
)

WEIGHTS = (0.5, 1, 2, 3, 4, 5)


def at(weight: float, step: int, ndcg: float, *, score_sd: float = 0.5, psi: float | None = None) -> Evaluation:
    return Evaluation.recorded(arm="OC-SFT", weight=weight, step=step, ndcg=ndcg, score_sd=score_sd, tau_psi=psi)


def sweep(best: dict[float, float], *, step: int = 1600, collapsed: tuple[float, ...] = ()) -> list[Evaluation]:
    """Two converged evaluations per λ, the best one and a worse one after it."""
    sd = {weight: 0.01 if weight in collapsed else 0.5 for weight in best}
    return [
        at(weight, at_step, ndcg - less, score_sd=sd[weight])
        for weight, ndcg in best.items()
        for at_step, less in ((step, 0.0), (2305, 0.01))
    ]


# -- the recorded sweeps (nDCG@10 of 100 held-out queries) ------------------------------------------------------------


def test_with_the_whole_grid_in_the_band_the_largest_weight_is_taken() -> None:
    qwen_4b = dict(zip(WEIGHTS, (0.467, 0.4764, 0.4703, 0.4702, 0.475, 0.4799), strict=True))
    choice = largest_weight(sweep(qwen_4b))
    assert choice.kept is not None
    assert (choice.kept.weight, choice.kept.step, choice.kept.ndcg) == (5, 1600, 0.4799)
    assert any("largest tried" in w for w in choice.warnings)
    assert any("every λ is as good" in w for w in choice.warnings)


def test_a_collapsed_weight_is_out_and_the_next_one_within_the_band_is_taken() -> None:
    qwen_1_7b = dict(zip(WEIGHTS, (0.4382, 0.4529, 0.4513, 0.4821, 0.4846, 0.0936), strict=True))
    choice = largest_weight(sweep(qwen_1_7b, collapsed=(5,)))
    assert choice.kept is not None
    assert choice.kept.weight == 4
    assert choice.reasons[0].startswith("λ 5 collapsed")
    assert choice.warnings == ()


def test_a_collapse_counts_even_where_its_quality_is_in_the_band() -> None:
    best = {3: 0.48, 4: 0.481, 5: 0.482}
    evaluations = [*sweep(best), at(5, 2000, 0.47, score_sd=0.0199)]
    assert largest_weight(evaluations).kept == sweep(best)[2]
    assert largest_weight(evaluations, min_sd=0.0199).kept == sweep(best)[4]
    early = [*sweep(best), at(5, 999, 0.3, score_sd=0.0)]
    assert largest_weight(early).kept == sweep(best)[4]


@pytest.mark.parametrize(
    ("argmax", "chosen"),
    [((3, 0.4677), (5, 0.4608)), ((2, 0.4454), (5, 0.444))],
    ids=["Granite 3B", "Qwen3 8B"],
)
def test_the_largest_within_the_band_wins_over_the_best(
    argmax: tuple[float, float], chosen: tuple[float, float]
) -> None:
    evaluations = sweep(dict([(1, argmax[1] - 0.02), argmax, chosen]))
    choice = largest_weight(evaluations)
    assert choice.kept is not None
    assert choice.kept.weight == chosen[0]
    best = best_ndcg(evaluations).kept
    assert best is not None
    assert best.weight == argmax[0]


def test_the_band_ends_exactly_where_it_says() -> None:
    assert largest_weight(sweep({1: 0.4846, 2: 0.4696})).kept == at(2, 1600, 0.4696)
    assert largest_weight(sweep({1: 0.4846, 2: 0.4695})).kept == at(1, 1600, 0.4846)


def test_early_spikes_are_set_aside() -> None:
    evaluations = [*sweep({1: 0.45, 2: 0.44}), at(1, 400, 0.49), at(2, 999, 0.50)]
    assert largest_weight(evaluations).kept == at(2, 1600, 0.44)
    assert largest_weight(evaluations, min_step=900).kept == at(2, 999, 0.50)


@pytest.mark.parametrize(("steps", "from_step"), [(2305, 1000), (4000, 1000), (469, 203), (10, 4)])
def test_early_is_before_step_1000_of_the_papers_runs_and_as_large_a_share_of_shorter_ones(
    steps: int, from_step: int
) -> None:
    run = [at(1, from_step - 1, 0.6), at(1, from_step, 0.5), at(1, steps, 0.4)]
    assert largest_weight(run).kept == run[1]


def test_equal_quality_goes_to_the_earliest_step() -> None:
    evaluations = [at(5, 2000, 0.47), at(5, 1200, 0.47), at(5, 2305, 0.46)]
    assert best_ndcg(evaluations).kept == evaluations[1]
    assert largest_weight(evaluations).kept == evaluations[1]


def test_the_rule_abstains_rather_than_guess() -> None:
    most_collapsed = sweep({1: 0.4, 2: 0.4, 3: 0.4}, collapsed=(2, 3))
    choice = largest_weight(most_collapsed)
    assert choice.kept is None
    assert "1 of 3 λ are usable" in choice.reasons[-1]
    too_short = [at(weight, 469, 0.4) for weight in (0.5, 1, 2)]
    assert largest_weight(too_short).kept is None
    assert largest_weight(too_short, min_step=1000).reasons[0] == "λ 0.5 has no evaluation from step 1000 on"
    assert largest_weight([*too_short, *(at(w, 400, 0.4) for w in (0.5, 1, 2))], min_step=400).kept is not None
    once = largest_weight([*sweep({1: 0.45}), at(2, 1000, 0.45)])
    assert once.kept is None
    assert "evaluated once" in once.reasons[-1]


def test_half_usable_is_enough() -> None:
    assert largest_weight(sweep({1: 0.4, 2: 0.4}, collapsed=(2,))).kept is not None


def test_a_run_that_stopped_early_is_said_so() -> None:
    choice = largest_weight([*sweep({1: 0.4, 2: 0.45}), at(3, 1000, 0.44), at(3, 1200, 0.44)])
    assert choice.kept == at(3, 1000, 0.44)
    assert any("λ 3 stopped before step 2305" in w for w in choice.warnings)


def test_two_losses_are_not_compared_by_their_weights() -> None:
    other = Evaluation.recorded(arm="EMA", weight=1, step=1600, ndcg=0.4)
    with pytest.raises(BadArgument, match="EMA, OC-SFT"):
        largest_weight([at(1, 1600, 0.4), other])


# -- rules on both figures ------------------------------------------------------------------------------------------

POINTS = [
    at(0, 100, 0.449, psi=0.209),
    at(1, 100, 0.455, psi=0.129),
    at(3, 100, 0.459, psi=0.083),
    at(5, 100, 0.450, psi=0.060),
    at(9, 100, 0.440, psi=0.070),
]


def test_quality_at_equal_stability() -> None:
    assert equal_stability(POINTS, max_psi=0.129).kept == POINTS[2]
    assert equal_stability(POINTS, max_psi=0.07).kept == POINTS[3]
    assert equal_stability(POINTS, max_psi=0.05).kept is None
    assert choose(POINTS, "equal_stability", max_psi=0.07).kept == POINTS[3]


def test_stability_at_equal_quality() -> None:
    assert equal_quality(POINTS).kept == POINTS[3]
    assert equal_quality(POINTS, band=0.0089).kept == POINTS[2]
    assert equal_quality([at(1, 1, 0.4)]).kept is None


def test_an_unknown_rule_is_refused_with_the_near_one() -> None:
    with pytest.raises(BadArgument, match="did you mean best_ndcg"):
        choose(POINTS, "best_ndgc")


def test_the_frontier_holds_what_nothing_beats() -> None:
    assert frontier(POINTS) == [POINTS[3], POINTS[2]]
    twin = at(3, 200, 0.459, psi=0.083)
    assert frontier([*POINTS, twin, at(7, 1, 0.9)]) == [POINTS[3], POINTS[2], twin]


def test_the_tables_stand_side_by_side() -> None:
    arms = [
        Evaluation.recorded(arm=arm, step=1, ndcg=ndcg, tau_psi=psi, score_sd=0.4)
        for arm, ndcg, psi in (("A", 0.45, 0.2), ("A", 0.44, 0.1), ("B", 0.46, 0.1), ("C", 0.40, 0.3))
    ]
    table = quality_at_stability(arms)
    assert table.columns == ("arm", "τ-PSI ≤ 0.1000", "τ-PSI ≤ 0.2000", "τ-PSI ≤ 0.3000")
    assert table.rows == (("A", 0.44, 0.45, 0.45), ("B", 0.46, 0.46, 0.46), ("C", None, None, 0.40))
    text = table_text(evaluation_table(POINTS)).splitlines()
    assert len(text) == 6
    assert text[0].split() == ["arm", "λ", "step", "nDCG@10", "τ-PSI", "overlap", "retained", "score", "SD", "frontier"]
    assert [line.endswith("yes") for line in text[1:]] == [False, False, True, True, False]
    assert text[3].split()[:5] == ["OC-SFT", "3", "100", "0.4590", "0.0830"]


def test_the_picture_names_every_evaluation() -> None:
    pytest.importorskip("matplotlib")
    svg = frontier_picture([*POINTS[:2], at(7, 100, 0.4)])
    assert svg.startswith("<svg")
    assert "OC-SFT λ 1, step 100" in svg
    assert "(undefined)" in svg


# -- held-out evaluation --------------------------------------------------------------------------------------------

TEXTS = {"A": "bees live long", "B": "bees live", "C": "bees", "D": "a ferry"}
QRELS = {"A": 3, "B": 2, "C": 0, "D": 0}


def pools(n: int = 6, order: str = "DCBA") -> list[Pool]:
    return [
        Pool(
            query_id=f"q{i}",
            query="bees live long",
            candidates=tuple(Candidate(doc_id=d, text=TEXTS[d]) for d in order),
        )
        for i in range(n)
    ]


def heldout(engine: FakeEngine, n: int = 6, **more: object) -> Evaluation:
    settings: dict[str, object] = {
        "scoring": Scoring(window=4, partition="contiguous", presentations=5),
        "step": 200,
        "arm": "OC-SFT",
        "weight": 3.0,
    }
    qrels = {f"q{i}": QRELS for i in range(n)}
    return evaluate_heldout(engine, GradePrompt(engine.tokenizer), pools(n), qrels, **(settings | more))  # type: ignore[arg-type]


def test_an_order_free_scorer_is_perfectly_steady() -> None:
    found = heldout(FakeEngine())
    assert found.ndcg == 1.0
    assert found.tau_psi == 0.0
    assert found.overlap == 1.0
    assert (found.step, found.arm, found.weight, found.missing) == (200, "OC-SFT", 3.0, 0)
    assert found.settings["threshold_fitted_on"] == 3
    assert found.figures["overlap"].n == 3
    assert found.figures["ndcg"].n == 6


def test_quality_is_of_the_pools_as_they_are_given() -> None:
    # The bias lifts what is shown last by 2 over what is shown first, more than any relevance: D C B A ranks A B C D,
    # its reverse D C B A: (2/log2(4) + 3/log2(5)) / (3 + 2/log2(3)).
    biased = FakeEngine(position_bias=10.0)
    assert heldout(biased).ndcg == pytest.approx(1.0)
    reverse = heldout(biased, scoring=Scoring(window=4, partition="contiguous", presentations=5, order="reverse"))
    assert reverse.ndcg == pytest.approx((2 / 2 + 3 / math.log2(5)) / (3 + 2 / math.log2(3)))
    assert reverse.tau_psi > 0.2


def test_the_score_spread_is_on_the_grade_scale() -> None:
    flat = heldout(FakeEngine(relevance=lambda query, text: 0.5))
    assert flat.score_sd == 0.0
    engine = FakeEngine()
    prompt = GradePrompt(engine.tokenizer)
    from pd_rerank.scoring import score_pools

    (table,) = score_pools(pools(1), engine=engine, prompt=prompt, scoring=Scoring(window=4))
    assert heldout(engine).score_sd == pytest.approx(float(np.std(3 * table.scores()[0])))


def test_a_threshold_given_is_used_on_every_query() -> None:
    found = heldout(FakeEngine(), threshold=Threshold(value=0.0))
    assert found.figures["overlap"].n == 6
    assert found.figures["retention"].value == 1.0


def test_missing_grades_are_counted() -> None:
    found = heldout(FakeEngine(missing=lambda text: "ferry" in text))
    assert found.missing == 6 * 6
    assert found.ndcg == 1.0
    assert "36 grades missing" in evaluation_line(found)


def test_held_out_queries_need_judgements_and_shuffles() -> None:
    with pytest.raises(InvalidData, match=r"3 of 6 .* first 'q3'"):
        evaluate_heldout(
            engine := FakeEngine(),
            GradePrompt(engine.tokenizer),
            pools(6),
            {f"q{i}": QRELS for i in range(3)},
            scoring=Scoring(presentations=5),
            step=1,
        )
    with pytest.raises(BadArgument, match="two presentations"):
        heldout(FakeEngine(), scoring=Scoring(presentations=1))
    with pytest.raises(BadArgument, match="give two"):
        heldout(FakeEngine(), n=1)


def test_two_arms_are_compared_query_by_query() -> None:
    steady, shaky = heldout(FakeEngine()), heldout(FakeEngine(position_bias=1.0))
    apart = difference(steady, shaky, "tau_psi")
    assert apart.n == 6
    assert apart.estimate == pytest.approx(steady.tau_psi - shaky.tau_psi)
    assert apart.estimate < 0
    with pytest.raises(BadArgument, match="tau_psi"):
        difference(steady, shaky, "tau-psi")
    with pytest.raises(InvalidData, match="no query"):
        difference(steady, POINTS[0], "ndcg")


def test_evaluations_survive_the_disk(tmp_path: Path) -> None:
    made = [heldout(FakeEngine(position_bias=0.4)), Evaluation.recorded(step=1, ndcg=0.4)]
    write_evaluations(tmp_path / "evaluations.jsonl", made)
    read = read_evaluations(tmp_path / "evaluations.jsonl")
    assert read[0] == made[0]
    assert read[1].describe() == made[1].describe()
    (tmp_path / "other.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(InvalidData, match=r"other\.jsonl:1"):
        read_evaluations(tmp_path / "other.jsonl")


def test_the_line_shows_quality_and_stability_side_by_side() -> None:
    line = evaluation_line(heldout(FakeEngine()))
    assert line.startswith(
        "OC-SFT λ 3, step 200: nDCG@10 1.0000 [1.000, 1.000], τ-PSI 0.0000 [0.000, 0.000], overlap 1"
    )
