"""Which checkpoint and which λ to keep: held-out quality and stability side by side, and rules that choose by them.

An `Evaluation` is one checkpoint on held-out queries. Rules are pure functions of evaluations that return a `Choice`
with its reasons, or abstain. Scores come through `scoring.score_pools`: what selects is what is served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pd_rerank.decisions import Threshold
from pd_rerank.engines.base import Engine, Progress
from pd_rerank.errors import BadArgument, InvalidData, near_names
from pd_rerank.evaluation.presentations import Presentations
from pd_rerank.evaluation.report import Cell, Table, defined, shown
from pd_rerank.evaluation.report_stability import Rule, measure
from pd_rerank.evaluation.resampling import QUERIES, Interval, Recipe, paired_bootstrap
from pd_rerank.evaluation.stability import ndcg_by_presentation
from pd_rerank.files import read_jsonl, write_jsonl
from pd_rerank.pool import Pool
from pd_rerank.prompt import GradePrompt
from pd_rerank.scoring import Scoring, score_pools

Qrels = Mapping[str, Mapping[str, int]]

FIGURES: Mapping[str, str] = {
    "ndcg": "nDCG@k of the canonical presentation",
    "mean_ndcg": "nDCG@k, mean over presentations",
    "worst_ndcg": "nDCG@k of the worst presentation",
    "tau_psi": "τ-PSI over presentations, lower is steadier",
    "overlap": "retained-set overlap over presentations, higher is steadier",
    "retention": "share of the candidates retained",
    "normalised_residual": "score movement against score spread",
}
"""What an evaluation says of each query, and as a mean with its interval."""

MARGIN = 0.015
"""How much nDCG counts as the same quality (method, section 4.7)."""

CONVERGED, PAPER_STEPS = 1000, 2305
"""The step from which the paper compares λ, and the steps of the runs that is said of (method, section 4.7)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A mean over the `n` held-out queries that have it, with a bootstrap interval; None is undefined or unknown."""

    value: float | None
    low: float | None = None
    high: float | None = None
    n: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One checkpoint on held-out queries: `figures` (see `FIGURES`) and, for paired comparisons, `queries`.

    `arm` names the loss, `weight` is its λ (0 where it has none), `step` counts optimizer steps. `score_sd` is the
    standard deviation of all candidates' expected grades, on the grade scale (0 to 3), in the canonical presentation:
    near 0 the scores have collapsed. `settings` say how it was measured; `missing` counts grades the engine lacked.
    """

    step: int
    score_sd: float
    figures: Mapping[str, Figure]
    arm: str = ""
    weight: float = 0.0
    missing: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    queries: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)

    @classmethod
    def recorded(
        cls,
        *,
        step: int,
        ndcg: float,
        score_sd: float = math.nan,
        tau_psi: float | None = None,
        overlap: float | None = None,
        arm: str = "",
        weight: float = 0.0,
    ) -> Evaluation:
        """An evaluation known by its means alone, as papers report them."""
        values = {"ndcg": ndcg, "tau_psi": tau_psi, "overlap": overlap}
        figures = {name: Figure(value=value) for name, value in values.items() if value is not None}
        return cls(step=step, score_sd=score_sd, figures=figures, arm=arm, weight=weight)

    @property
    def ndcg(self) -> float:
        """nDCG in the canonical presentation, NaN where unknown."""
        return self._value("ndcg")

    @property
    def tau_psi(self) -> float:
        """τ-PSI, NaN where unknown."""
        return self._value("tau_psi")

    @property
    def overlap(self) -> float:
        """Retained-set overlap, NaN where unknown."""
        return self._value("overlap")

    def _value(self, figure: str) -> float:
        value = self.figures[figure].value if figure in self.figures else None
        return math.nan if value is None else value

    @property
    def name(self) -> str:
        """Arm, λ and step in a few words."""
        weight = f"λ {self.weight:g}, " if self.weight else ""
        return f"{self.arm}{' ' if self.arm else ''}{weight}step {self.step}"

    def describe(self, *, queries: bool = True) -> dict[str, Any]:
        """The evaluation as JSON values, by default with every query's figures; `of` reads it back."""
        said: dict[str, Any] = {
            "arm": self.arm,
            "lambda": self.weight,
            "step": self.step,
            "score_sd": defined(self.score_sd),
            "missing": self.missing,
            "figures": {
                name: {"value": f.value, "low": f.low, "high": f.high, "n": f.n} for name, f in self.figures.items()
            },
            "settings": dict(self.settings),
        }
        if queries:
            said["queries"] = {query_id: dict(figures) for query_id, figures in self.queries.items()}
        return said

    @classmethod
    def of(cls, said: Mapping[str, Any], *, where: str = "the evaluation") -> Evaluation:
        """Read what `describe` said; another shape is `InvalidData`."""
        try:
            return cls(
                step=int(said["step"]),
                score_sd=math.nan if said["score_sd"] is None else float(said["score_sd"]),
                figures={name: Figure(**figure) for name, figure in said["figures"].items()},
                arm=str(said["arm"]),
                weight=float(said["lambda"]),
                missing=int(said["missing"]),
                settings=dict(said["settings"]),
                queries={query_id: dict(figures) for query_id, figures in said.get("queries", {}).items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidData(f"{where} is not what an evaluation was written as ({error!r})") from error


def write_evaluations(path: str | Path, evaluations: Iterable[Evaluation]) -> None:
    """Write one evaluation per line of JSONL, whole or not at all."""
    write_jsonl(path, (evaluation.describe() for evaluation in evaluations))


def read_evaluations(path: str | Path) -> list[Evaluation]:
    """Read what `write_evaluations` wrote."""
    return [Evaluation.of(said, where=where) for where, said in read_jsonl(path)]


# -- measuring --------------------------------------------------------------------------------------------------


def evaluate_heldout(
    engine: Engine,
    prompt: GradePrompt,
    pools: Sequence[Pool],
    qrels: Qrels,
    *,
    scoring: Scoring,
    step: int,
    arm: str = "",
    weight: float = 0.0,
    threshold: Threshold | None = None,
    k: int = 10,
    min_grade: int = 1,
    recipe: Recipe = QUERIES,
    progress: Progress | None = None,
) -> Evaluation:
    """Grade held-out pools once as they are and in `scoring.presentations` shuffles: quality beside stability.

    nDCG@k (linear gain) is of the pools in the order `scoring` arranges them, one presentation, ranked as served.
    Stability is over the shuffles, at least two. Retained sets need a threshold: the one given, else the one with the
    best F1 on a fixed half of the queries, and the overlap is then of the other half. Every pool needs judgements.
    """
    if scoring.presentations < 2:
        raise BadArgument(f"stability needs at least two presentations, got {scoring.presentations}; ten are usual")
    if lacking := [pool.query_id for pool in pools if pool.query_id not in qrels]:
        raise InvalidData(
            f"{len(lacking)} of {len(pools)} held-out queries have no judgement, first '{lacking[0]}'; judge them or "
            "leave them out"
        )
    if threshold is None and len(pools) < 2:
        raise BadArgument(f"a threshold is fitted on half of the held-out queries, there are {len(pools)}; give two")
    canonical = score_pools(
        pools, engine=engine, prompt=prompt, scoring=replace(scoring, presentations=1), progress=progress
    )
    tables = score_pools(pools, engine=engine, prompt=prompt, scoring=scoring, progress=progress)
    rule = Rule(objective="f1") if threshold is None else Rule(objective="given", given=threshold)
    shuffled = [Presentations.of_table(table) for table in tables]
    measured = measure(shuffled, rule=rule, qrels=qrels, k=k, min_grade=min_grade)
    queries: dict[str, dict[str, float | None]] = {}
    for table, outcome in zip(canonical, measured.outcomes, strict=True):
        judged = qrels[table.query_id]
        ranks = np.argsort(table.ranking())[None]
        grades = [judged.get(doc_id, 0) for doc_id in table.doc_ids]
        ndcg = float(ndcg_by_presentation(ranks, grades, judged=judged.values(), k=k)[0])
        rest = {name: defined(getattr(outcome, name)) for name in FIGURES if name != "ndcg"}
        queries[table.query_id] = {"ndcg": ndcg, **rest}
    top = len(prompt.grade_ids) - 1
    expected = np.concatenate([table.scores()[0] for table in canonical]) * top
    there = expected[~np.isnan(expected)]
    return Evaluation(
        step=step,
        score_sd=float((there - there[0]).std()) if there.size else math.nan,
        figures={name: _figure([figures[name] for figures in queries.values()], recipe) for name in FIGURES},
        arm=arm,
        weight=weight,
        missing=sum(int(table.fallback.sum()) for table in [*canonical, *tables]),
        settings={
            **scoring.describe(),
            "k": k,
            "queries": len(pools),
            "candidates": sum(map(len, pools)),
            "threshold": None if measured.threshold is None else measured.threshold.value,
            "threshold_fitted_on": len(measured.dev),
        },
        queries=queries,
    )


def difference(one: Evaluation, other: Evaluation, figure: str, recipe: Recipe = QUERIES) -> Interval:
    """The mean of `one` less `other` in a figure over the queries both have it for, queries resampled in pairs."""
    if figure not in FIGURES:
        raise BadArgument(f"unknown figure '{figure}'; {near_names(figure, FIGURES)}")
    pairs = [(mine.get(figure), other.queries.get(query_id, {}).get(figure)) for query_id, mine in one.queries.items()]
    apart = [a - b for a, b in pairs if a is not None and b is not None]
    if not apart:
        raise InvalidData(f"no query has '{figure}' in both {one.name} and {other.name}; evaluate both on the same")
    return paired_bootstrap(apart, recipe)


def _figure(values: Sequence[float | None], recipe: Recipe) -> Figure:
    there = [value for value in values if value is not None]
    if not there:
        return Figure(value=None, n=0)
    found = paired_bootstrap(there, recipe)
    return Figure(value=found.estimate, low=found.low, high=found.high, n=found.n)


# -- choosing ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a rule kept, None where it abstains; why, in words; and what makes the choice doubtful."""

    rule: str
    kept: Evaluation | None
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def describe(self) -> dict[str, Any]:
        """The choice as JSON values."""
        kept = None if self.kept is None else {"arm": self.kept.arm, "lambda": self.kept.weight, "step": self.kept.step}
        return {"rule": self.rule, "kept": kept, "reasons": list(self.reasons), "warnings": list(self.warnings)}


def best_ndcg(evaluations: Sequence[Evaluation]) -> Choice:
    """The highest held-out nDCG; of exactly equal ones the earliest step, then the smaller λ.

    The paper keeps a checkpoint so, by an nDCG with exponential gain on 100 queries drawn by a seed; `evaluate_heldout`
    has linear gain and takes the queries it is given. Source: method, section 4.7.
    """
    there = [e for e in evaluations if not math.isnan(e.ndcg)]
    if not there:
        return Choice(rule="best_ndcg", kept=None, reasons=("no evaluation has an nDCG",))
    best = min(there, key=lambda e: (-e.ndcg, e.step, e.weight, e.arm))
    return Choice(rule="best_ndcg", kept=best, reasons=(f"highest nDCG of {len(there)}: {best.ndcg:.4f}",))


def largest_weight(
    evaluations: Sequence[Evaluation], *, min_step: int | None = None, min_sd: float = 0.02, band: float = MARGIN
) -> Choice:
    """The paper's rule for λ: the largest whose quality is as good as any, at the earliest step of its best nDCG.

    Evaluations before `min_step` are set aside, since quality spikes early. Left out it is the paper's 1000 where the
    longest run has its 2305 steps or more, and the same share of a shorter one, for which the paper gives no number. A
    λ whose scores collapsed at any later one (`score_sd` below `min_sd`; unknown passes) is out. Of the rest, those
    whose best nDCG is within `band` of the best of all are as good. It abstains where fewer than half of the λ are
    left, or the one chosen was evaluated fewer than twice after `min_step`. Warnings: the choice is the end of the
    grid, all λ are in the band (quality does not tell them apart), a run is shorter than the longest. All evaluations
    are of one arm. Of a single run it keeps the best nDCG from `min_step` on, and none where the scores collapsed.
    Source: method, section 4.7, whose authors at λ 5 of one model kept step 1000, not the step of the best nDCG.
    """
    if len(arms := {e.arm for e in evaluations}) > 1:
        raise BadArgument(f"the λ rule compares one loss at several λ, got {', '.join(sorted(arms))}; choose in each")
    runs: dict[float, list[Evaluation]] = {}
    for evaluation in sorted(evaluations, key=lambda e: (e.weight, e.step)):
        runs.setdefault(evaluation.weight, []).append(evaluation)
    longest = max((run[-1].step for run in runs.values()), default=0)
    if min_step is None:
        min_step = min(CONVERGED, round(longest * CONVERGED / PAPER_STEPS))
    late = {weight: [e for e in run if e.step >= min_step and not math.isnan(e.ndcg)] for weight, run in runs.items()}
    collapsed = [weight for weight, run in late.items() if any(e.score_sd < min_sd for e in run)]
    best = {weight: best_ndcg(run).kept for weight, run in late.items() if weight not in collapsed}
    usable = {weight: kept for weight, kept in best.items() if kept is not None}
    reasons = [f"λ {weight:g} collapsed (score SD below {min_sd:g})" for weight in collapsed]
    reasons += [
        f"λ {weight:g} has no evaluation from step {min_step} on" for weight, kept in best.items() if kept is None
    ]
    rule = "largest_weight"
    if not usable or 2 * len(usable) < len(runs):
        reasons.append(f"{len(usable)} of {len(runs)} λ are usable, at least half are wanted")
        return Choice(rule=rule, kept=None, reasons=tuple(reasons))
    highest = max(kept.ndcg for kept in usable.values())
    within = sorted(weight for weight, kept in usable.items() if kept.ndcg >= highest - band - 1e-12)
    chosen = usable[within[-1]]
    names = ", ".join(f"{weight:g}" for weight in within)
    reasons.append(f"λ {names} within {band:g} of the best nDCG {highest:.4f}; the largest is taken")
    if len(late[chosen.weight]) < 2:
        reasons.append(f"λ {chosen.weight:g} was evaluated once from step {min_step} on, which may be a spike")
        return Choice(rule=rule, kept=None, reasons=tuple(reasons))
    warnings = []
    if len(runs) > 1 and chosen.weight in (min(runs), max(runs)):
        end = "largest" if chosen.weight == max(runs) else "smallest"
        warnings.append(f"λ {chosen.weight:g} is the {end} tried: one beyond it may be better")
    if len(within) == len(runs) > 1:
        warnings.append("every λ is as good: held-out quality does not tell them apart")
    if short := [weight for weight, run in runs.items() if run[-1].step < longest]:
        warnings.append(f"λ {', '.join(f'{w:g}' for w in short)} stopped before step {longest}")
    return Choice(rule=rule, kept=chosen, reasons=tuple(reasons), warnings=tuple(warnings))


def equal_stability(evaluations: Sequence[Evaluation], *, max_psi: float) -> Choice:
    """The highest nDCG among those no less steady than `max_psi`; it abstains where none is."""
    steady = [e for e in evaluations if e.tau_psi <= max_psi]
    said = f"{len(steady)} of {len(evaluations)} have a τ-PSI of at most {max_psi:.4f}"
    return Choice(rule="equal_stability", kept=best_ndcg(steady).kept, reasons=(said,))


def equal_quality(evaluations: Sequence[Evaluation], *, band: float = MARGIN) -> Choice:
    """The lowest τ-PSI among those within `band` of the highest nDCG; ties go to the higher nDCG, then earlier."""
    there = [e for e in evaluations if not math.isnan(e.tau_psi)]
    best = best_ndcg(there).kept
    if best is None:
        return Choice(rule="equal_quality", kept=None, reasons=("no evaluation has both nDCG and τ-PSI",))
    good = [e for e in there if e.ndcg >= best.ndcg - band - 1e-12]
    kept = min(good, key=lambda e: (e.tau_psi, -e.ndcg, e.step, e.weight, e.arm))
    said = f"{len(good)} of {len(there)} within {band:g} of the best nDCG {best.ndcg:.4f}"
    return Choice(rule="equal_quality", kept=kept, reasons=(said,))


RULES: Mapping[str, Callable[..., Choice]] = {
    rule.__name__: rule for rule in (best_ndcg, largest_weight, equal_stability, equal_quality)
}
"""The rules by name, for settings files."""


def choose(evaluations: Sequence[Evaluation], rule: str, **options: Any) -> Choice:
    """Apply the rule called `rule` with its options."""
    if rule not in RULES:
        raise BadArgument(f"unknown selection rule '{rule}'; {near_names(rule, RULES)}")
    return RULES[rule](evaluations, **options)


def frontier(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Those that no other beats: none has at least their nDCG and at most their τ-PSI, one of them strictly.

    Steadiest first. Evaluations without both figures are left out.
    """
    there = [e for e in evaluations if not math.isnan(e.ndcg) and not math.isnan(e.tau_psi)]

    def beaten(e: Evaluation) -> bool:
        return any(
            o.ndcg >= e.ndcg and o.tau_psi <= e.tau_psi and (o.ndcg, o.tau_psi) != (e.ndcg, e.tau_psi) for o in there
        )

    return sorted((e for e in there if not beaten(e)), key=lambda e: (e.tau_psi, e.ndcg, e.step))


# -- showing ----------------------------------------------------------------------------------------------------


def evaluation_line(evaluation: Evaluation) -> str:
    """Quality and stability of one evaluation on one line, for a training log."""
    parts = [
        f"{name} {_between(evaluation.figures[figure])}"
        for figure, name in (("ndcg", f"nDCG@{evaluation.settings.get('k', 10)}"), *_STEADY)
        if figure in evaluation.figures
    ]
    lost = f", {evaluation.missing} grades missing" if evaluation.missing else ""
    return f"{evaluation.name}: {', '.join(parts)}, score SD {shown(evaluation.score_sd)}{lost}"


def evaluation_table(evaluations: Sequence[Evaluation], *, title: str = "Held-out quality and stability") -> Table:
    """Quality and stability side by side, one row per evaluation in the order given; "yes" marks the frontier."""
    best = {id(e) for e in frontier(evaluations)}
    cut = next((e.settings["k"] for e in evaluations if "k" in e.settings), 10)
    columns = ("arm", "λ", "step", f"nDCG@{cut}", "τ-PSI", "overlap", "retained", "score SD", "frontier")
    rows: list[tuple[Cell, ...]] = [
        (
            e.arm or "–",
            f"{e.weight:g}",
            e.step,
            *(_between(e.figures.get(name)) for name in ("ndcg", "tau_psi", "overlap")),
            shown(e.figures["retention"].value) if "retention" in e.figures else None,
            e.score_sd,
            "yes" if id(e) in best else "",
        )
        for e in evaluations
    ]
    note = "with 95 % intervals over queries; frontier: no other is both as good and as steady"
    return Table(title=title, columns=columns, rows=tuple(rows), note=note)


def quality_at_stability(evaluations: Sequence[Evaluation], levels: Sequence[float] | None = None) -> Table:
    """The best nDCG each arm reaches at or below a τ-PSI, one column per level, whatever its λ and step.

    By default the levels are where each arm's best nDCG lies. None where an arm is never that steady.
    """
    arms: dict[str, list[Evaluation]] = {}
    for evaluation in evaluations:
        arms.setdefault(evaluation.arm, []).append(evaluation)
    if levels is None:
        best = [best_ndcg([e for e in arm if not math.isnan(e.tau_psi)]).kept for arm in arms.values()]
        levels = sorted({e.tau_psi for e in best if e is not None})
    rows: list[tuple[Cell, ...]] = []
    for name, arm in arms.items():
        kept = [equal_stability(arm, max_psi=level).kept for level in levels]
        rows.append((name or "–", *(None if e is None else e.ndcg for e in kept)))
    return Table(
        title="Quality at equal stability",
        columns=("arm", *(f"τ-PSI ≤ {level:.4f}" for level in levels)),
        rows=tuple(rows),
        note="the best held-out nDCG of an arm no less steady than that",
    )


def table_text(table: Table) -> str:
    """A table for a terminal: its columns padded to one width each."""
    cells = [list(table.columns), *([shown(cell) for cell in row] for row in table.rows)]
    widths = [max(len(row[c]) for row in cells) for c in range(len(table.columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def frontier_picture(evaluations: Sequence[Evaluation], *, title: str = "Held-out quality against stability") -> str:
    """Every evaluation by its τ-PSI and nDCG with their intervals, as SVG text. Needs matplotlib (extra eval)."""
    from pd_rerank.evaluation.pictures import Point, quality_stability

    nothing = Figure(value=None)
    points = []
    for e in evaluations:
        x, y = e.figures.get("tau_psi", nothing), e.figures.get("ndcg", nothing)
        points.append(Point(name=e.name, x=x.value, y=y.value, x_low=x.low, x_high=x.high, y_low=y.low, y_high=y.high))
    cut = next((e.settings["k"] for e in evaluations if "k" in e.settings), 10)
    return quality_stability(points, y_label=f"nDCG@{cut}", title=title)


_STEADY = (("tau_psi", "τ-PSI"), ("overlap", "overlap"))


def _between(figure: Figure | None) -> str:
    """A figure with its interval: `.4765 [.41, .54]`, – where there is none."""
    if figure is None or figure.value is None:
        return "–"
    if figure.low is None or figure.high is None:
        return shown(figure.value)
    return f"{shown(figure.value)} [{figure.low:.3f}, {figure.high:.3f}]"
