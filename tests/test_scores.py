"""From grade logits to scores, means, spreads and rankings."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.scores import SlotResidual, grade_probabilities, ranking, read_out, window_widths
from tests.tables import table

NAN = float("nan")


def test_expected_grade_of_the_methods_logits() -> None:
    p = grade_probabilities(np.array([0.0, 1.0, 2.0, 3.0], dtype=np.float32))
    assert p == pytest.approx([0.0320586, 0.0871443, 0.2368828, 0.6439143], abs=1e-7)
    assert read_out(p) == pytest.approx(0.8308842, abs=1e-7)
    assert read_out(p) * 3 == pytest.approx(2.4926527, abs=1e-7)
    assert read_out(p, "p_relevant") == pytest.approx(0.2368828 + 0.6439143, abs=1e-7)
    assert read_out(p, "argmax") == 1.0


def test_close_logits_do_not_tie_as_they_would_in_bfloat16() -> None:
    logits = np.array([[10.0, 10.0, 10.0, 10.0], [10.0, 10.0, 10.0, 10.01]], dtype=np.float32)
    low, high = read_out(grade_probabilities(logits))
    assert high - low > 1e-4


@given(st.lists(st.floats(-50, 50), min_size=4, max_size=4), st.floats(-100, 100))
def test_scores_ignore_a_constant_added_to_the_logits(logits: list[float], shift: float) -> None:
    one = read_out(grade_probabilities(np.array(logits)))
    other = read_out(grade_probabilities(np.array(logits) + shift))
    assert one == pytest.approx(other, abs=1e-9)
    assert 0.0 <= one <= 1.0


@pytest.mark.parametrize("readout", ["expected", "p_relevant", "argmax"])
def test_missing_grades_stay_missing_in_every_readout(readout: str) -> None:
    scores = read_out(grade_probabilities(np.array([[0, 0, NAN, 0], [0, 0, 0, 9.0]])), readout)  # type: ignore[arg-type]
    assert np.isnan(scores[0])
    assert scores[1] > 0.9


def test_argmax_takes_the_lower_grade_on_a_tie() -> None:
    assert read_out(grade_probabilities(np.array([1.0, 5.0, 5.0, 0.0])), "argmax") == pytest.approx(1 / 3)


def test_ties_are_broken_by_id_and_missing_scores_come_last() -> None:
    assert ranking(np.array([0.5, NAN, 0.5, 0.9, NAN]), ["d", "b", "c", "e", "a"]).tolist() == [3, 2, 0, 4, 1]


def test_served_score_is_the_mean_over_presentations() -> None:
    scores = table([[0.9, 0.7, 0.5, 0.1], [0.8, 0.75, 0.4, 0.45], [0.55, 0.6, 0.5, 0.2]])
    assert scores.mean() == pytest.approx([0.75, 0.6833333, 0.4666667, 0.25], abs=1e-6)
    assert scores.spread()[0] == pytest.approx(np.std([0.9, 0.8, 0.55]), abs=1e-6)
    assert scores.ranking().tolist() == [0, 1, 2, 3]


def test_a_grade_missing_in_one_presentation_is_left_out_of_the_mean_not_invented() -> None:
    scores = table([[0.2, 0.9], [NAN, 0.7]])
    assert scores.mean() == pytest.approx([0.2, 0.8], abs=1e-6)
    assert scores.fallback.tolist() == [[False, False], [True, False]]
    assert np.isnan(table([[NAN, 0.5]]).mean()[0])


def test_tables_are_read_only_and_check_their_shapes() -> None:
    scores = table([[0.2, 0.9]])
    with pytest.raises(ValueError, match="read-only"):
        scores.grades[0, 0, 0] = 1.0
    with pytest.raises(InvalidData, match="fallback"):
        table([[0.2, 0.9]], fallback=np.zeros((1, 3), dtype=bool))
    with pytest.raises(InvalidData, match="3 ids"):
        table([[0.2, 0.9]], doc_ids=("a", "b", "c"))


def test_slot_residual_takes_off_exactly_what_a_slot_adds() -> None:
    # Two documents, two presentations: whoever stands at slot 0 gains 0.1, at slot 1 loses 0.1.
    scores = table([[0.6, 0.2], [0.4, 0.4]], slots=[[0, 1], [1, 0]])
    residual = SlotResidual.fit([scores])
    assert residual.offsets == {2: pytest.approx((0.1, -0.1), abs=1e-6)}
    assert scores.scores(residual=residual) == pytest.approx(np.array([[0.5, 0.3], [0.5, 0.3]]), abs=1e-6)
    assert scores.spread(residual=residual) == pytest.approx([0.0, 0.0], abs=1e-6)


def test_slot_residual_of_one_presentation_is_taken_about_the_querys_mean() -> None:
    residual = SlotResidual.fit([table([[0.9, 0.5, 0.1]]), table([[0.8, 0.5, 0.2]])])
    assert residual.offsets[3] == pytest.approx((0.35, 0.0, -0.35), abs=1e-6)
    assert residual.n_queries == 2


def test_slot_residual_borrows_the_nearest_width() -> None:
    residual = SlotResidual(offsets={2: (0.2, -0.2), 5: (0.0,) * 5}, readout="expected", n_queries=1)
    wide = table([[0.5, 0.5, 0.5]])
    assert residual.subtract(wide.scores(), wide)[0] == pytest.approx([0.3, 0.5, 0.7], abs=1e-6)


def test_slot_residual_round_trips_through_its_file(tmp_path: Path) -> None:
    residual = SlotResidual.fit([table([[0.9, 0.5, 0.1]])])
    residual.save(tmp_path / "r.json")
    assert SlotResidual.load(tmp_path / "r.json") == residual
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(InvalidData, match=r"other\.json"):
        SlotResidual.load(tmp_path / "other.json")
    for offsets in ({}, {"3": [0.1, 0.2]}, {"2": [0.1, float("nan")]}, {"0": []}):
        (tmp_path / "bad.json").write_text(json.dumps({"readout": "expected", "n_queries": 1, "offsets": offsets}))
        with pytest.raises(InvalidData, match=r"bad\.json"):
            SlotResidual.load(tmp_path / "bad.json")
    with pytest.raises(BadArgument):
        SlotResidual.fit([])


def test_blank_documents_are_left_alone_by_the_slot_residual() -> None:
    scores = table([[0.6, 0.0]], slots=[[0, -1]], window=np.array([[0, -1]], dtype=np.int32))
    residual = SlotResidual(offsets={1: (0.5,)}, readout="expected", n_queries=1)
    assert residual.subtract(scores.scores(), scores)[0] == pytest.approx([0.1, 0.0], abs=1e-6)


def test_window_widths_count_companions() -> None:
    assert window_widths(np.array([[0, 1, 0, -1, 0]], dtype=np.int32)).tolist() == [[3, 1, 3, 0, 3]]


def test_copies_and_unpickled_tables_are_equal_and_read_only() -> None:
    scores = table([[0.2, 0.9]])
    for twin in (copy.deepcopy(scores), pickle.loads(pickle.dumps(scores))):
        assert twin.query_id == "q"
        assert (twin.grades == scores.grades).all()
        assert not twin.grades.flags.writeable
