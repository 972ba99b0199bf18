"""score_pools: grades come back to the candidate they belong to, in one engine call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_rerank import windows
from pd_rerank.decisions import Settle
from pd_rerank.engines.base import FloatArray
from pd_rerank.engines.fake import FakeEngine
from pd_rerank.errors import BadArgument, EngineFailure, InvalidData
from pd_rerank.pool import Candidate, Pool
from pd_rerank.prompt import GradePrompt
from pd_rerank.scores import ScoreTable, SlotResidual
from pd_rerank.scoring import Scoring, capcal, score_pools

WORDS = ["tide", "moon", "sea", "bread", "chain", "map", "pump", "seed"]


def pool(texts: list[str], query: str = "tide moon sea", query_id: str = "q") -> Pool:
    candidates = tuple(Candidate(doc_id=f"d{i:03d}", text=t) for i, t in enumerate(texts))
    return Pool(query_id=query_id, query=query, candidates=candidates)


def distinct(n: int) -> list[str]:
    return [f"text {i} {WORDS[i % 8]} {WORDS[(i // 8) % 8]}" for i in range(n)]


def scored(
    pools: list[Pool], engine: FakeEngine | None = None, settle: Settle | None = None, **how: Any
) -> list[ScoreTable]:
    engine = engine or FakeEngine()
    return score_pools(
        pools, engine=engine, prompt=GradePrompt(engine.tokenizer), scoring=Scoring(**how), settle=settle
    )


@settings(deadline=None, max_examples=40)
@given(
    n=st.integers(0, 45),
    window=st.integers(1, 25),
    k=st.integers(1, 3),
    partition=st.sampled_from(windows.PARTITIONS),
    order=st.sampled_from(windows.ARRANGEMENTS),
    shuffle=st.sampled_from(["pool", "window"]),
)
def test_every_score_belongs_to_its_text_in_every_layout(
    n: int, window: int, k: int, partition: Any, order: Any, shuffle: Any
) -> None:
    """An engine that grades by text alone gives each candidate the same score wherever it stands."""
    texts = distinct(n)
    alone = {t: scored([pool([t])])[0].mean()[0] for t in set(texts)}
    (table,) = scored([pool(texts)], window=window, presentations=k, partition=partition, order=order, shuffle=shuffle)
    assert table.grades.shape == (k, n, 4)
    assert table.scores() == pytest.approx(np.array([[alone[t] for t in texts]] * k).reshape(k, n))


@pytest.mark.parametrize("n", [7, 25, 39])
def test_no_candidate_is_skipped_when_the_pool_is_no_multiple_of_the_window(n: int) -> None:
    for partition in windows.PARTITIONS:
        (table,) = scored([pool(distinct(n))], partition=partition)
        assert (table.window >= 0).all()
        assert not table.fallback.any()


def test_all_windows_of_all_pools_go_to_the_engine_in_one_call() -> None:
    engine = FakeEngine()
    scored(
        [pool(distinct(45), query_id="a"), pool([], query_id="b"), pool(distinct(5), query_id="c")],
        engine,
        presentations=2,
    )
    assert engine.calls == 1
    assert engine.prompts == 2 * 3 + 2 * 1


def test_empty_pools_cost_no_call_and_keep_their_place() -> None:
    engine = FakeEngine()
    (table,) = scored([pool([])], engine, presentations=3)
    assert engine.calls == 0
    assert table.grades.shape == (3, 0, 4)
    assert table.mean().tolist() == []


def test_windows_that_come_out_the_same_are_computed_once() -> None:
    engine = FakeEngine()
    (table,) = scored([pool(distinct(12))], engine, window=1, presentations=10)
    assert engine.prompts == 12
    assert table.presentations == 10
    assert (table.spread() == 0).all()


def test_one_presentation_shows_the_candidates_as_given() -> None:
    (table,) = scored([pool(distinct(5))], window=5)
    assert table.slot.tolist() == [[0, 1, 2, 3, 4]]
    (table,) = scored([pool(distinct(5))], window=5, order="reverse")
    assert table.slot.tolist() == [[4, 3, 2, 1, 0]]


def test_more_presentations_are_the_methods_whole_pool_shuffles() -> None:
    (table,) = scored([pool(distinct(10))], window=5, presentations=2, partition="contiguous", seed=1)
    for k, seed in enumerate((1, 2)):
        order = windows.permutation(10, seed=seed)
        position = np.argsort(order)
        assert table.window[k].tolist() == (position // 5).tolist()
        assert table.slot[k].tolist() == (position % 5).tolist()


def test_shuffling_inside_windows_keeps_companions_and_moves_slots() -> None:
    (table,) = scored([pool(distinct(20))], window=10, presentations=3, shuffle="window")
    assert (table.window == table.window[0]).all()
    assert not (table.slot == table.slot[0]).all()


@settings(deadline=None, max_examples=25)
@given(st.permutations(range(30)), st.sampled_from(windows.PARTITIONS), st.integers(1, 3))
def test_canonical_order_makes_the_score_of_a_text_independent_of_arrival(
    arrival: list[int], partition: Any, k: int
) -> None:
    texts = [*distinct(28), "the same text", "the same text"]
    biased = FakeEngine(position_bias=0.6, companion_bias=0.4)
    ids = [f"d{i}" for i in range(30)]
    how = {"window": 8, "order": "canonical", "partition": partition, "presentations": k}
    straight = Pool(
        query_id="q", query="tide", candidates=tuple(Candidate(doc_id=ids[i], text=texts[i]) for i in range(30))
    )
    shuffled = Pool(
        query_id="q", query="tide", candidates=tuple(Candidate(doc_id=ids[i], text=texts[i]) for i in arrival)
    )
    here, there = scored([straight], biased, **how)[0], scored([shuffled], biased, **how)[0]
    assert dict(zip(here.doc_ids, here.mean(), strict=True)) == dict(zip(there.doc_ids, there.mean(), strict=True))


def test_without_it_a_biased_engine_does_depend_on_arrival() -> None:
    biased = FakeEngine(position_bias=0.6, companion_bias=0.4)
    here = scored([pool(distinct(30))], biased)[0].mean()
    there = scored([pool(distinct(30)[::-1])], biased)[0].mean()[::-1]
    assert np.abs(here - there).max() > 0.05


def test_blank_documents_are_not_shown_and_hold_grade_zero() -> None:
    engine = FakeEngine(relevance=lambda query, text: 1.0)
    (table,) = scored([pool(["tide", "", " \u200b", "moon"])], engine)
    assert table.window.tolist() == [[0, -1, -1, 0]]
    assert table.slot.tolist() == [[0, -1, -1, 1]]
    assert table.mean().tolist()[1:3] == [0.0, 0.0]
    assert table.probabilities()[0, 1].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert not table.fallback.any()


def test_neighbours_of_a_blank_document_score_as_if_it_were_not_there() -> None:
    biased = FakeEngine(position_bias=0.5, companion_bias=0.5)
    with_blank = scored([pool(["tide", "  ", "moon"])], biased)[0].mean()
    without = scored([pool(["tide", "moon"])], biased)[0].mean()
    assert with_blank[[0, 2]].tolist() == without.tolist()


def test_missing_grades_are_marked_and_never_invented() -> None:
    engine = FakeEngine(missing=lambda text: "moon" in text)
    (table,) = scored([pool(["tide", "moon", "sea"])], engine, presentations=2)
    assert table.fallback.tolist() == [[False, True, False]] * 2
    assert np.isnan(table.mean()).tolist() == [False, True, False]
    assert table.ranking()[-1] == 1


class Partial(FakeEngine):
    """An engine that misses one grade of four for the first document of every window."""

    def grade_logits(self, *args: Any, **kwargs: Any) -> list[FloatArray]:
        read = super().grade_logits(*args, **kwargs)
        for values in read:
            values[0, 2] = np.nan
        return read


def test_one_missing_grade_of_four_makes_the_whole_reading_missing() -> None:
    (table,) = scored([pool(["tide", "moon"])], Partial())
    assert table.fallback.tolist() == [[True, False]]
    assert np.isnan(table.grades[0, 0]).all()


class Short(FakeEngine):
    def grade_logits(self, *args: Any, **kwargs: Any) -> list[FloatArray]:
        return [values[:-1] for values in super().grade_logits(*args, **kwargs)]


class Lost(FakeEngine):
    def grade_logits(self, *args: Any, **kwargs: Any) -> list[FloatArray]:
        return super().grade_logits(*args, **kwargs)[1:]


@pytest.mark.parametrize("engine", [Short, Lost])
def test_an_engine_that_loses_rows_is_an_error_not_a_shift(engine: type[FakeEngine]) -> None:
    with pytest.raises(EngineFailure, match="'fake' returned"):
        scored([pool(distinct(30))], engine())


def test_too_long_a_query_fails_before_any_engine_call() -> None:
    engine = FakeEngine(max_length=800)
    with pytest.raises(InvalidData, match="no room"):
        scored([pool(["a"]), pool(["b"], query="w " * 800)], engine)
    assert engine.calls == 0


def test_capcal_by_the_methods_example() -> None:
    p, probe = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.4, 0.3, 0.2, 0.1])
    assert capcal(p, probe) == pytest.approx([0, 0.1245513, 0.3333333, 0.5421154], abs=1e-6)
    assert capcal(p, probe, adaptive=False) == pytest.approx([0, 0.1428571, 0.3333333, 0.5238095], abs=1e-6)


@pytest.mark.parametrize("partition", windows.PARTITIONS)
def test_capcal_takes_its_slots_from_the_partition(partition: Any) -> None:
    """Where grades are position alone, the probe says the same as the prompt: the correction flattens it."""
    position_only = {"relevance": lambda query, text: 0.5, "position_bias": 0.6}
    texts = distinct(23)
    raw = scored([pool(texts)], FakeEngine(**position_only), window=7, partition=partition)[0]
    calibrated = scored(
        [pool(texts)], FakeEngine(**position_only), window=7, partition=partition, calibration="capcal"
    )[0]
    assert np.std(calibrated.mean()) < 0.8 * np.std(raw.mean())
    by_slot = {(int(w), int(s)): x for w, s, x in zip(raw.window[0], raw.slot[0], calibrated.mean(), strict=True)}
    for (w, s), x in by_slot.items():
        p = raw.probabilities()[0, (raw.window[0] == w) & (raw.slot[0] == s)][0]
        assert x == pytest.approx(float(capcal(p, p) @ np.arange(4) / 3), abs=1e-5)


def test_slot_residual_removes_a_pure_position_bias_on_other_queries() -> None:
    biased = FakeEngine(position_bias=0.4)
    fit = [pool(distinct(20), query_id=str(i), query=WORDS[i]) for i in range(8)]
    residual = SlotResidual.fit(scored(fit, biased, presentations=10, window=20))
    (table,) = scored([pool(distinct(20), query="seed map")], biased, presentations=5, window=20)
    assert table.spread(residual=residual).mean() < 0.5 * table.spread().mean()


def test_settled_queries_stop_and_open_ones_go_on() -> None:
    engine = FakeEngine(position_bias=0.5)
    sure = pool(["tide moon sea"] * 1 + ["bread"] * 3, query_id="sure")
    torn = pool(["tide bread", "moon chain", "sea map", "tide moon"], query_id="torn")
    tables = scored([sure, torn], engine, Settle(threshold=0.5, tolerance=0.01), presentations=12)
    assert tables[0].presentations < tables[1].presentations <= 12


def test_spending_adaptively_gives_the_first_rows_of_spending_all() -> None:
    engine = FakeEngine(position_bias=0.5)
    texts = distinct(24)
    (all_of_it,) = scored([pool(texts)], engine, presentations=8)
    (adaptive,) = scored([pool(texts)], engine, Settle(top_k=5, tolerance=0.2), presentations=8)
    assert (all_of_it.grades[: adaptive.presentations] == adaptive.grades).all()


def test_adaptive_spending_ends_at_the_most_presentations_allowed() -> None:
    noisy = FakeEngine(position_bias=1.0)
    (table,) = scored([pool(distinct(20))], noisy, Settle(threshold=0.3, tolerance=0.0), presentations=4)
    assert table.presentations == 4
    with pytest.raises(BadArgument, match="presentations of at least 3"):
        scored([pool(distinct(20))], noisy, Settle(threshold=0.3), presentations=2)


@pytest.mark.parametrize(
    "bad",
    [{"window": 0}, {"presentations": 0}, {"window": 2.5}, {"seed": "x"}, {"partition": "spiral"}, {"order": "up"},
     {"shuffle": "x"}, {"calibration": "x"}, {"window": True}],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused_by_name(bad: dict[str, Any]) -> None:
    with pytest.raises(BadArgument, match=next(iter(bad))):
        Scoring(**bad)


def test_progress_counts_every_prompt() -> None:
    done: list[int] = []
    engine = FakeEngine()
    score_pools(
        [pool(distinct(45))],
        engine=engine,
        prompt=GradePrompt(engine.tokenizer),
        scoring=Scoring(),
        progress=done.append,
    )
    assert sum(done) == 3


def test_a_window_whose_documents_all_look_the_same_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    scored([pool(["tide", "moon"])], FakeEngine(relevance=lambda query, text: 0.3))
    assert "in 1 of 1 windows every document got exactly the same grades" in caplog.text
    caplog.clear()
    scored([pool(["tide", "bread"])])
    scored([pool(["tide"])])
    assert not caplog.text


def test_a_calibration_prompt_without_grades_leaves_them_missing_and_marked() -> None:
    engine = FakeEngine(missing=lambda text: text == "")
    (table,) = scored([pool(["tide", "moon"])], engine, calibration="capcal")
    assert table.fallback.all()
    assert np.isnan(table.mean()).all()


def test_other_windows_than_an_adapter_was_trained_in_are_told(caplog: pytest.LogCaptureFixture) -> None:
    card = {"window": 2, "partition": "contiguous"}
    Scoring(window=2, partition="contiguous").note_card(card, where="adapter 'a'")
    Scoring().note_card({}, where="a card of another make")
    assert not caplog.messages
    Scoring(window=20, partition="round_robin").note_card(card, where="adapter 'a'")
    assert caplog.messages == [
        "adapter 'a' was trained with window 2 and is served with 20",
        "adapter 'a' was trained with partition contiguous and is served with round_robin",
    ]
