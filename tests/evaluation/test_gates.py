"""Gates: the limit itself passes, nothing to measure does not, and the worst are named."""

from __future__ import annotations

import pytest

from pd_rerank.errors import BadArgument
from pd_rerank.evaluation.gates import Gate, GateFailed, check, gate_section, gates_of, refuse_failed

NAN = float("nan")
UNITS = {"psi": {"b": 0.3, "a": 0.3, "c": 0.1, "d": NAN}, "overlap": {"a": 0.2, "b": 0.9}}
MOST = Gate(option="--max-psi", figure="psi", limit=0.2, kind="most")
LEAST = Gate(option="--min-overlap", figure="overlap", limit=0.5, kind="least")


@pytest.mark.parametrize(
    ("gate", "value", "passed"),
    [(MOST, 0.2, True), (MOST, 0.2001, False), (LEAST, 0.5, True), (LEAST, 0.4999, False), (MOST, NAN, False)],
)
def test_the_limit_itself_passes_and_nothing_does_not(gate: Gate, value: float, passed: bool) -> None:
    assert check([gate], {gate.figure: value}, UNITS)[0].passed is passed
    assert check([gate], {}, UNITS)[0].passed is False


def test_the_worst_units_come_first_on_either_side() -> None:
    most, least = check([MOST, LEAST], {"psi": 0.23, "overlap": 0.55}, UNITS)
    assert most.worst == (("a", 0.3), ("b", 0.3), ("c", 0.1))
    assert least.worst == (("a", 0.2), ("b", 0.9))


def test_all_that_failed_are_named_at_once() -> None:
    checked = check([MOST, LEAST], {"psi": 0.23, "overlap": 0.4}, UNITS)
    said = r"2 of 2 gates failed: psi is 0\.23, .*worst: 'a' 0\.3.*; overlap is 0\.4"
    with pytest.raises(GateFailed, match=said) as told:
        refuse_failed(checked)
    assert told.value.exit_code == 7
    refuse_failed(check([MOST], {"psi": 0.1}, UNITS))


def test_gates_are_made_of_the_options_that_were_given() -> None:
    options = {"max_psi": 0.1, "min_overlap": None, "top_k": 10}
    made = gates_of({"max_psi": "tau_psi", "min_overlap": "overlap"}, options)
    assert made == [Gate(option="--max-psi", figure="tau_psi", limit=0.1, kind="most")]
    with pytest.raises(BadArgument, match="--max-psi is a finite number"):
        gates_of({"max_psi": "tau_psi"}, {"max_psi": NAN})


def test_a_report_shows_its_gates_where_there_are_any() -> None:
    assert gate_section([]) == []
    (section,) = gate_section(check([MOST], {"psi": NAN}, {}))
    assert section.tables[0].rows == (("FAILED", "--max-psi", "psi", None, 0.2, ""),)
