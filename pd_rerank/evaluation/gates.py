"""Gates: limits on a report's figures that make a team's checks fail, with the worst units named."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pd_rerank.errors import BadArgument, PdRerankError
from pd_rerank.evaluation.report import Section, Table, defined

WORST = 5
"""How many of the worst units a failed gate names."""


class GateFailed(PdRerankError):
    """A figure is beyond the limit that was set for it; the report is written all the same."""

    exit_code = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A limit on a figure: the least or the most it may be. `option` is how it was asked for."""

    option: str
    figure: str
    limit: float
    kind: Literal["most", "least"]

    def __post_init__(self) -> None:
        if not math.isfinite(self.limit):
            raise BadArgument(f"{self.option} is a finite number, got {self.limit}")

    def worst_first(self, units: Mapping[str, float]) -> list[tuple[str, float]]:
        """The units that have the figure, by how far they are on the wrong side, then by id."""
        sign = -1 if self.kind == "most" else 1
        there = [(unit, value) for unit, value in units.items() if not math.isnan(value)]
        return sorted(there, key=lambda item: (sign * item[1], item[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A gate with the figure it met: `value` NaN where no unit has one, which does not pass."""

    gate: Gate
    value: float
    worst: tuple[tuple[str, float], ...]

    @property
    def passed(self) -> bool:
        """Whether the figure is within the limit, the limit itself included."""
        return self.value <= self.gate.limit if self.gate.kind == "most" else self.value >= self.gate.limit

    @property
    def sentence(self) -> str:
        """What is wrong, for an error's message."""
        gate = self.gate
        if math.isnan(self.value):
            return f"{gate.option}: nothing has {gate.figure}, so that the limit cannot be shown to hold"
        names = ", ".join(f"'{unit}' {value:.4g}" for unit, value in self.worst)
        return f"{gate.figure} is {self.value:.4g}, {gate.option} {gate.limit:g} is the {gate.kind} (worst: {names})"


def gates_of(figures: Mapping[str, str], options: Mapping[str, Any]) -> list[Gate]:
    """The gates among `options`: those of the names in `figures` (`max_…` or `min_…`) that are not None."""
    return [
        Gate(
            option=f"--{name.replace('_', '-')}",
            figure=figure,
            limit=float(options[name]),
            kind="most" if name.startswith("max_") else "least",
        )
        for name, figure in figures.items()
        if options.get(name) is not None
    ]


def check(
    gates: Sequence[Gate], values: Mapping[str, float], units: Mapping[str, Mapping[str, float]]
) -> list[Checked]:
    """Hold each gate against its figure among `values`; `units` has every figure's value by query (or direction)."""
    return [
        Checked(
            gate=gate,
            value=values.get(gate.figure, math.nan),
            worst=tuple(gate.worst_first(units.get(gate.figure, {}))[:WORST]),
        )
        for gate in gates
    ]


def refuse_failed(checked: Sequence[Checked]) -> None:
    """Raise `GateFailed` if any gate failed, naming all that did."""
    failed = [found.sentence for found in checked if not found.passed]
    if failed:
        raise GateFailed(f"{len(failed)} of {len(checked)} gates failed: {'; '.join(failed)}")


def gate_section(checked: Sequence[Checked]) -> list[Section]:
    """The gates as a report's section; none where there are no gates."""
    if not checked:
        return []
    rows = tuple(
        (
            "passed" if found.passed else "FAILED",
            found.gate.option,
            found.gate.figure,
            defined(found.value),
            found.gate.limit,
            ", ".join(f"{unit} {value:.4g}" for unit, value in found.worst),
        )
        for found in checked
    )
    columns = ("", "gate", "figure", "value", "limit", "worst")
    return [Section(title="Gates", tables=(Table(title="Limits set for this report", columns=columns, rows=rows),))]
