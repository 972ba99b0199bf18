"""The NevIR study's tables and figures from its rankers' outcomes: Tables I to III, contrasts, what decided, costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pd_rerank.evaluation.diagnosis import decompose
from pd_rerank.evaluation.pairs import Case, complete_pairs, coverage
from pd_rerank.evaluation.pictures import Point, preference_position, tie_matrix
from pd_rerank.evaluation.preference import (
    PairOutcome,
    contrast,
    cross_table,
    differences,
    pair_differences,
    per_direction,
    population,
    position,
    strict_preference,
)
from pd_rerank.evaluation.replay import (
    FrontierPoint,
    cost,
    fallback_policies,
    fit_margin_gate,
    gated,
    k_curve,
    margin_frontier,
    routes_disagree,
    window_rerank,
)
from pd_rerank.evaluation.report import Cell, Picture, Report, Section, Table
from pd_rerank.evaluation.report_preference import Ranker, preference_report
from pd_rerank.evaluation.resampling import (
    GROUPS,
    Interval,
    group_bootstrap,
    holm,
    joint_bootstrap,
    sign_flip_test,
    sign_test,
)
from pd_rerank.studies.command import left_out
from pd_rerank.studies.nevir import Entry, Study, mixed, with_secondary
from pd_rerank.studies.nevir_orders import order_sections
from pd_rerank.studies.nevir_settings import E0_TIE, FUSION

_E0 = "E0"
_N8 = "N=8"
_FEW = 12
"""Different grades that a matrix can show."""

_WEIGHTS = tuple(i / 10 for i in range(11))

TIMING = "Seconds"
"""The one table that is not the same when everything is scored again."""


def report(study: Study) -> Report:
    """Every table of the study, in the paper's order, then what it left open."""
    rankers = _with_e0_ties(study, "test")
    sections = [
        _populations(study),
        _table_two(rankers, study),
        *([_development(study)] if "dev" in study.parts else []),
        *_table_three(rankers),
        _contrasts(rankers),
        *_training(study),
        *_decided(rankers),
        *order_sections(study),
        *_operating_points(study),
        *_interpolation(study),
        *_fallbacks(study),
        _costs(study),
        left_out(study),
    ]
    settings = {
        **study.settings.model_dump(mode="json"),
        "bootstrap": asdict(GROUPS) | {"unit": "source groups"},
        "pools": {name: part.sha256 for name, part in study.parts.items()},
    }
    return Report(title=study.settings.title, settings=settings, sections=tuple(sections), queries=_queries(study))


def timing(study: Study) -> Table:
    """Seconds of every scorer and part, from pools handed over to scores in hand; differs from run to run."""
    rows = [
        (
            part,
            name,
            entry.scored,
            entry.seconds["wall"],
            entry.seconds["cpu"],
            1000 * entry.seconds["cpu"] / entry.scored,
        )
        for part, entries in study.entries.items()
        for name, entry in entries.items()
        if entry.seconds and entry.scored
    ]
    columns = ("part", "scorer", "candidates scored", "wall seconds", "cpu seconds", "cpu seconds per 1,000")
    note = (
        "from pools handed over to scores in hand, for every scorer alike: rendering, features and batching are in it, "
        "loading is not"
    )
    return Table(title=TIMING, columns=columns, rows=tuple(rows), note=note)


# -- Tables I to III ------------------------------------------------------------------------------------------------


def _populations(study: Study) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for name, part in study.parts.items():
        found = coverage(part.cases)
        sizes = [len(pool) for pool in part.pools.values()]
        routes = [sum(None in case.route_tops for case in part.cases), _both_in(part.cases, study.settings.window)]
        rows.append(
            (
                name, part.collection, found.planned, found.covered, found.used, found.planned_pairs,
                found.complete_pairs, found.planned_groups, found.groups, found.conflicts, *routes, sum(sizes),
                sum(sizes) / len(sizes),
            )
        )  # fmt: skip
    columns = (
        "part", "collection", "planned", "covered", "used", "pairs", "complete pairs", "groups planned", "groups",
        "conflicts", "queries with an empty route", "both in window", "candidates", "per pool",
    )  # fmt: skip
    text = (
        f"{study.settings.note}\n\n" if study.settings.note else ""
    ) + "Covered: both passages are in the pool. Used: covered, and the label does not contradict itself."
    return Section(title="Populations", text=text, tables=(Table(title="Table I", columns=columns, rows=tuple(rows)),))


_TABLE_TWO = (
    "ranker", "n", "strict", "strict share", "low", "high", "reverse", "tie", "unavailable", "pairs", "both",
    "paired share", "group macro", "P@1", "P@3", "P@10", "MRR", "MRR low", "MRR high", "mean rank preferred",
    "mean rank other", "median designated", "both in top 10", "fallback", "Δ strict pp", "Δ low", "Δ high",
    "strict share of planned",
)  # fmt: skip


def _table_two(rankers: Mapping[str, Entry], study: Study) -> Section:
    tables = [Table(title="Table II", columns=_TABLE_TWO, rows=_rows_two(rankers), note=_NOTE_TWO)]
    limited = {name: len(entry.cases) for name, entry in rankers.items()}
    if len(set(limited.values())) > 1:
        common = _common(rankers)
        note = f"the {len(common)} directions that every ranker has scored"
        same = _on(rankers, common)
        tables.append(Table(title="Table II, common directions", columns=_TABLE_TWO, rows=_rows_two(same), note=note))
    ties = [
        (name, rule, place.mrr, place.preferred_at[1], place.mean_rank_preferred)
        for name, entry in rankers.items()
        for rule in ("doc_id", "best", "worst", "expected")
        for place in [position(population(entry.outcomes), ties=rule)]
    ]
    columns = ("ranker", "ties", "MRR", "P@1", "mean rank preferred")
    tables.append(Table(title="Positions under ties", columns=columns, rows=tuple(ties), note=_NOTE_TIES))
    points = [
        Point(
            name=name, x=strict.estimate, x_low=strict.low, x_high=strict.high,
            y=mrr.estimate, y_low=mrr.low, y_high=mrr.high,
        )
        for name, entry in rankers.items()
        for strict, mrr in [_two_intervals(population(entry.outcomes))]
    ]  # fmt: skip
    caption = "How often the right passage is preferred, and how high it stands in the pool."
    picture = Picture(title="Preference and position", caption=caption, svg=preference_position(points))
    return Section(title="Preference and position", tables=tuple(tables), pictures=(picture,))


_NOTE_TWO = (
    "ties and unavailable are failures; Δ against fusion on the same directions; intervals resample source groups; "
    "the last column counts what the pools lack as failures"
)
_NOTE_TIES = "by document id, at the best or worst place of what is tied, and in expectation over its orders"


def _rows_two(rankers: Mapping[str, Entry]) -> tuple[tuple[Cell, ...], ...]:
    return tuple(_row_two(name, entry, rankers[FUSION]) for name, entry in rankers.items())


def _row_two(name: str, entry: Entry, fusion: Entry) -> tuple[Cell, ...]:
    mine = population(entry.outcomes)
    found, place = strict_preference(mine), position(mine)
    strict, mrr = _two_intervals(mine)
    change: tuple[Cell, ...] = (None, None, None)
    if name != FUSION:
        apart = differences(mine, _same(fusion.outcomes, mine))
        change = _percent(group_bootstrap(apart.values, apart.groups))
    taken = entry.cost
    return (
        name, found.n, found.strict_correct, found.strict, strict.low, strict.high, found.reverse, found.model_tie,
        found.unavailable, found.complete_pairs, found.both, found.paired, found.group_macro,
        *(place.preferred_at[k] for k in (1, 3, 10)), place.mrr, mrr.low, mrr.high, place.mean_rank_preferred,
        place.mean_rank_other, place.median_designated, place.both_in_top,
        None if taken is None else sum(row.fallback for row in entry.rows if _primary(row.outcome)), *change,
        strict_preference(population(entry.outcomes, "planned")).strict,
    )  # fmt: skip


def _development(study: Study) -> Section:
    rows = _rows_two(_with_e0_ties(study, "dev"))
    text = "What training was stopped by and K, gates and mixtures were chosen on; not what is reported."
    return Section(title="Development", text=text, tables=(Table(title="Development", columns=_TABLE_TWO, rows=rows),))


def _table_three(rankers: Mapping[str, Entry]) -> list[Section]:
    rows: list[tuple[Cell, ...]] = []
    crossed: list[tuple[Cell, ...]] = []
    for name, entry in rankers.items():
        if not entry.pair_only:
            continue
        window, alone = population(entry.outcomes), population(entry.pair_only)
        for what, found in (("pair only", strict_preference(alone)), ("window", strict_preference(window))):
            rows.append(
                (
                    name, what, found.n, found.strict_correct, found.strict, found.low, found.high, found.reverse,
                    found.model_tie, found.unavailable, found.both, found.paired,
                )
            )  # fmt: skip
        for of_pair, row in cross_table(alone, window).items():
            crossed.append((name, of_pair, *row.values()))
    if not rows:
        return []
    columns = (
        "scorer", "scored", "n", "strict", "strict share", "least", "most", "reverse", "tie", "unavailable", "both",
        "paired share",
    )  # fmt: skip
    note = "least and most: unavailable directions as failures and as successes"
    relations = ("scorer", "pair only", "strict_correct", "reverse", "model_tie", "unavailable")
    return [
        Section(
            title="Pair only and window",
            text="The two designated passages scored alone, beside the same scorer's window rerank.",
            tables=(
                Table(title="Table III", columns=columns, rows=tuple(rows), note=note),
                Table(title="Pair only against window", columns=relations, rows=tuple(crossed)),
            ),
        )
    ]


# -- contrasts ------------------------------------------------------------------------------------------------------


_CONTRASTS = (
    "ranker", "against", "n", "Δ strict pp", "low", "high", "Δ macro pp", "macro low", "macro high", "corrections",
    "regressions", "right in both", "right in neither", "groups up", "groups even", "groups down", "p directions",
    "p groups", "p groups, Holm", "Δ paired pp", "paired low", "paired high", "Δ MRR", "MRR low", "MRR high",
    "moves opposite", "both up",
)  # fmt: skip


def _contrasts(rankers: Mapping[str, Entry]) -> Section:
    pairs = list(_compared(rankers))
    found = [_contrast(population(rankers[a].outcomes), population(rankers[b].outcomes)) for a, b in pairs]
    adjusted = holm({f"{a}\0{b}": p for (a, b), (_, p) in zip(pairs, found, strict=True)})
    rows: list[tuple[Cell, ...]] = []
    for (a, b), (cells, _) in zip(pairs, found, strict=True):
        rows.append((a, b, *cells[:16], adjusted[f"{a}\0{b}"], *cells[16:]))
    note = (
        "p directions: exact sign test; p groups: sign-flip test of source groups, Holm over this table; "
        "moves opposite: share of resamples in which strict preference and MRR go different ways"
    )
    return Section(
        title="Contrasts", tables=(Table(title="Contrasts", columns=_CONTRASTS, rows=tuple(rows), note=note),)
    )


def _compared(rankers: Mapping[str, Entry]) -> Iterable[tuple[str, str]]:
    for name, entry in rankers.items():
        if name != FUSION:
            yield name, FUSION
        if name == _N8 or (entry.rows and _E0 in rankers):
            yield name, _E0
        if name.endswith(E0_TIE):
            yield name, name.removesuffix(E0_TIE)


def _contrast(mine: Sequence[PairOutcome], theirs: Sequence[PairOutcome]) -> tuple[tuple[Cell, ...], float]:
    """The cells of a contrast over the first one's directions, and the p-value that Holm adjusts."""
    theirs = _same(theirs, mine)
    change = contrast(mine, theirs)
    strict, rank = (differences(mine, theirs, measure) for measure in ("strict", "reciprocal_rank"))
    flip = sign_flip_test(strict.values, strict.groups)
    both: tuple[Cell, ...] = (None, None, None)
    if complete_pairs(mine):
        pairs = pair_differences(mine, theirs)
        both = _percent(group_bootstrap(pairs.values, pairs.groups))
    mrr = group_bootstrap(rank.values, rank.groups)
    together: tuple[Cell, ...] = (None, None)
    if len(set(strict.groups)) > 1:
        region = joint_bootstrap(strict.values, rank.values, strict.groups)
        together = (region.opposite, region.both_up)
    cells = (
        change.n, *_percent(group_bootstrap(strict.values, strict.groups)),
        *_percent(group_bootstrap(strict.values, strict.groups, statistic="macro")),
        change.corrections, change.regressions, change.common_correct, change.common_not, change.groups_positive,
        change.groups_zero, change.groups_negative, sign_test(change.corrections, change.regressions), flip.p,
        *both, mrr.estimate, mrr.low, mrr.high, *together,
    )  # fmt: skip
    return cells, flip.p


# -- training -------------------------------------------------------------------------------------------------------


def _training(study: Study) -> list[Section]:
    if not study.rankers:
        return []
    test = study.entries["test"]
    rows = []
    for name, ranker in study.rankers.items():
        mine = population(test[name].outcomes)
        found, place = strict_preference(mine), position(mine)
        s = ranker.supervision
        rows.append(
            (
                name, s.background, "/".join(map(str, s.labels)), "/".join(f"{g:g}" for g in s.gains),
                ranker.trees.seed, ranker.queries, ranker.rows, ranker.best_round, ranker.rounds_run,
                ranker.dev_strict, found.strict, found.model_tie, found.paired, place.mrr, place.preferred_at[1],
                place.mean_rank_preferred, place.mean_rank_other,
            )
        )  # fmt: skip
    columns = (
        "arm", "background", "labels", "gains", "seed", "queries", "rows", "trees", "rounds run", "dev strict, macro",
        "strict", "ties", "paired", "MRR", "P@1", "mean rank preferred", "mean rank other",
    )  # fmt: skip
    dropped = [(name, *asdict(ranker.dropped).values()) for name, ranker in study.rankers.items()]
    gains = [
        (name, column, gain)
        for name, ranker in study.rankers.items()
        for column, gain in list(ranker.importance().items())[:10]
    ]
    dead = [(c.name, "never" if c.constant else "not within a pool") for c in study.columns if c.constant_in_pools]
    reasons = ("arm", "passage missing", "label conflicts", "repeated", "pool too small")
    tables = (
        Table(title="Training factors", columns=columns, rows=tuple(rows), note=_NOTE_TRAINING),
        Table(title="Training directions left out", columns=reasons, rows=tuple(dropped)),
        Table(title="Columns that split most", columns=("arm", "column", "gain"), rows=tuple(gains)),
        Table(title="Columns that tell nothing apart", columns=("column", "varies"), rows=tuple(dead)),
    )
    text = "LambdaMART on the designated pairs alone (E0), with background (N=8), and one factor changed at a time."
    return [Section(title="Training interventions", text=text, tables=tables)]


_NOTE_TRAINING = "test figures of the whole pool; labels of preferred, counterpart, background; one seed unless named"


# -- what decided ---------------------------------------------------------------------------------------------------


_DECIDED = (
    "scorer", "branch", "n", "strict", "reverse", "tie", "unavailable", "fusion right", "corrections", "regressions",
)  # fmt: skip


def _decided(rankers: Mapping[str, Entry]) -> list[Section]:
    rows: list[tuple[Cell, ...]] = []
    ties: list[tuple[Cell, ...]] = []
    cells: list[tuple[Cell, ...]] = []
    pictures = []
    for name, entry in rankers.items():
        if not entry.rows or name.endswith(E0_TIE):
            continue
        mine = population(entry.outcomes)
        found = decompose(mine, _same(rankers[FUSION].outcomes, mine))
        for branch, part in [*found.branches.items(), ("overall", found.overall)]:
            rows.append((name, branch, *asdict(part).values()))
        ties.append(
            (
                name, found.branches["grade_tie"].n, found.tie_share, found.tie_failure_share, found.top_grade,
                found.top_ties, found.saturation, found.top_failures, found.edge_ties,
            )
        )  # fmt: skip
        grades = sorted({grade for pair in found.matrix for grade in pair})
        if 0 < len(grades) <= _FEW:
            cells += [(name, p, o, cell.n, cell.reference_correct) for (p, o), cell in found.matrix.items()]
            counts = [[found.matrix[p, o].n if (p, o) in found.matrix else 0 for o in grades] for p in grades]
            svg = tie_matrix(counts, [f"{grade:g}" for grade in grades])
            caption = f"{name}: which grade of the preferred passage met which of the other; ties on the diagonal."
            pictures.append(Picture(title=f"Grades of {name}", caption=caption, svg=svg))
    if not rows:
        return []
    shares = (
        "scorer", "grade ties", "share of directions", "share of failures", "top grade", "ties at it", "saturation",
        "failures at it", "ties at the window's edge",
    )  # fmt: skip
    tables = [
        Table(title="What decided", columns=_DECIDED, rows=tuple(rows)),
        Table(title="Grade ties", columns=shares, rows=tuple(ties)),
    ]
    if cells:
        columns = ("scorer", "grade of preferred", "grade of other", "n", "fusion right")
        tables.append(Table(title="Grade matrix", columns=columns, rows=tuple(cells)))
    text = "Successes and failures of each window rerank by what decided them, beside what fusion had right."
    return [Section(title="What decided", text=text, tables=tuple(tables), pictures=tuple(pictures))]


# -- K, gates, mixtures: chosen on the development part ---------------------------------------------------------------


_POINTS = (
    "scorer", "operating point", "K", "margin below", "part", "n", "strict", "strict share", "low", "high", "both",
    "MRR", "P@1", "judged per query", "queries sent", "fallback", "changed",
)  # fmt: skip


def _operating_points(study: Study) -> list[Section]:
    """Every K, and per scorer what was chosen on the development part: the least K, the margin gate, the route gate."""
    deepest = max(len(pool) for part in study.entries for pool in study.parts[part].pools.values())
    k, keep = min(study.settings.window, deepest), study.settings.keep
    curve: list[tuple[Cell, ...]] = []
    points: list[tuple[Cell, ...]] = []
    frontier: list[tuple[Cell, ...]] = []
    pictures = []
    for name, entry in study.entries["test"].items():
        if not entry.rows:
            continue
        test = k_curve(entry.cases, entry.grades, ks=range(k + 1))
        curve += [_point(name, f"K={p.k}", "test", p) for p in test]
        dots = [(f"K={p.k}", p) for p in test if p.k in (0, 1, 2, 3, 5, 10, k)]
        dev = study.entries.get("dev", {}).get(name)
        if dev is not None and any(_primary(row.outcome) for row in dev.rows):
            on_dev = k_curve(dev.cases, dev.grades, ks=range(k + 1))
            curve += [_point(name, f"K={p.k}", "dev", p) for p in on_dev]
            enough = keep * on_dev[-1].preference.strict_correct
            least = next(p.k for p in on_dev if p.preference.strict_correct >= enough)
            sweep = margin_frontier(dev.cases, dev.grades, k=k)
            frontier += [_point(name, "margin gate", "dev", p) for p in sweep]
            gate = fit_margin_gate(sweep, target=keep)
            sent = {
                "full window": [True] * len(entry.cases),
                "margin gate": gate.calls(entry.cases),
                "route gate": [routes_disagree(case) for case in entry.cases],
            }
            chosen = {
                what: gated(
                    entry.cases, entry.grades, calls, k=k, threshold=gate.threshold if "margin" in what else None
                )
                for what, calls in sent.items()
            }
            chosen["least K"] = test[least]
            points += [_point(name, what, "test", p) for what, p in chosen.items()]
            points.append(_point(name, "least K", "dev", on_dev[least]))
            points.append(_point(name, "full window", "dev", on_dev[-1]))
            dots += [(what, p) for what, p in chosen.items() if what.endswith("gate")]
        caption = f"{name}: strict preference against judged candidates per query, on the test part."
        svg = preference_position(
            [Point(name=what, x=p.cost.mean_judged, y=p.preference.strict) for what, p in dots],
            x_label="judged candidates per query", y_label="strict preference", title=f"Cost of {name}",
        )  # fmt: skip
        pictures.append(Picture(title=f"Cost frontier of {name}", caption=caption, svg=svg))
    if not curve:
        return []
    note = f"chosen on the development part to keep {keep:.0%} of the full window's strict successes, applied to test"
    tables = [Table(title="K curve", columns=_POINTS, rows=tuple(curve))]
    if points:
        tables.insert(0, Table(title="Operating points", columns=_POINTS, rows=tuple(points), note=note))
        tables.append(Table(title="Margin frontier", columns=_POINTS, rows=tuple(frontier)))
    text = "What less judging keeps. Costs run over all queries, preference and position over the covered directions."
    if not points:
        text += " There is no development part that the scorers read, so that nothing could be chosen."
    return [Section(title="K and gates", text=text, tables=tuple(tables), pictures=tuple(pictures))]


def _point(name: str, what: str, part: str, p: FrontierPoint) -> tuple[Cell, ...]:
    primary = [row.outcome for row in p.rows if _primary(row.outcome)]
    found = group_bootstrap(per_direction(primary, "strict"), _groups(primary))
    return (
        name, what, p.k, p.threshold, part, p.preference.n, p.preference.strict_correct, p.preference.strict,
        found.low, found.high, p.preference.both, p.position.mrr, p.position.preferred_at[1], p.cost.mean_judged,
        p.cost.triggered, p.cost.fallback, p.cost.changed,
    )  # fmt: skip


def _interpolation(study: Study) -> list[Section]:
    k = study.settings.window
    rows: list[tuple[Cell, ...]] = []
    for name, entry in study.entries["test"].items():
        if not entry.rows or not study.settings.interpolate:
            continue
        curves: dict[str, dict[float, tuple[Any, Any]]] = {}
        for part in ("dev", "test"):
            mine = study.entries.get(part, {}).get(name)
            if mine is not None and any(_primary(row.outcome) for row in mine.rows):
                curves[part] = {weight: _mixture(mine, weight, k) for weight in _WEIGHTS}
        best = None
        if "dev" in curves:
            best = max(_WEIGHTS, key=lambda w: (curves["dev"][w][0].strict_correct, curves["dev"][w][1].mrr, w))
        for part, curve in curves.items():
            for weight, (found, place) in curve.items():
                mark = "chosen on dev" if weight == best else ""
                rows.append(
                    (
                        name, part, weight, mark, found.n, found.strict_correct, found.strict, found.model_tie,
                        found.both, place.mrr, place.preferred_at[1],
                    )
                )  # fmt: skip
    if not rows:
        return []
    columns = ("scorer", "part", "weight of text", "", "n", "strict", "strict share", "tie", "both", "MRR", "P@1")
    note = "text and fusion scores scaled to [0, 1] over the window and mixed; fallback and tail as elsewhere"
    table = Table(title="Score interpolation", columns=columns, rows=tuple(rows), note=note)
    return [Section(title="Score interpolation", tables=(table,))]


def _mixture(entry: Entry, weight: float, k: int) -> tuple[Any, Any]:
    grades = [mixed(case, given, weight, k=k) for case, given in zip(entry.cases, entry.grades, strict=True)]
    mine = population(row.outcome for row in window_rerank(entry.cases, grades, k=k))
    return strict_preference(mine), position(mine)


def _fallbacks(study: Study) -> list[Section]:
    rows: list[tuple[Cell, ...]] = []
    for name, entry in study.entries["test"].items():
        if not entry.rows or not any(row.judged < row.requested for row in entry.rows):
            continue
        for rule, found in fallback_policies(entry.cases, entry.grades, k=study.settings.window).items():
            mine = population(row.outcome for row in found)
            strict = strict_preference(mine)
            rows.append(
                (name, rule, strict.n, strict.strict_correct, strict.strict, position(mine).mrr, cost(found).fallback)
            )
    if not rows:
        return []
    columns = ("scorer", "a missing grade sends back", "n", "strict", "strict share", "MRR", "queries sent back")
    return [
        Section(
            title="Fallback policies", tables=(Table(title="Fallback policies", columns=columns, rows=tuple(rows)),)
        )
    ]


# -- costs and what was left out --------------------------------------------------------------------------------------


def _costs(study: Study) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for part, entries in study.entries.items():
        for name, entry in entries.items():
            taken = entry.cost
            if taken is None:
                if entry.scored:
                    rows.append((part, name, len(study.parts[part].pools), entry.scored, *[None] * 8))
                continue
            rows.append(
                (
                    part, name, taken.queries, entry.scored, taken.requested, taken.judged, taken.missing,
                    taken.fallback, taken.changed, taken.mean_judged,
                    *(entry.tokens.get(f"{what}_tokens") for what in ("prompt", "completion")),
                )
            )  # fmt: skip
    columns = (
        "part", "scorer", "queries", "candidates scored", "window grades asked", "had", "missing", "fallback queries",
        "changed", "had per query", "tokens in", "tokens out",
    )  # fmt: skip
    note = (
        "scored: with the pairs alone and in every order; tokens are counted by chat endpoints only; an unknown count "
        "is empty"
    )
    text = (
        "Seconds stand in seconds.csv beside the report, since they differ from run to run: one scope for all scorers."
    )
    return Section(title="Cost", text=text, tables=(Table(title="Cost", columns=columns, rows=tuple(rows), note=note),))


def _queries(study: Study) -> tuple[Any, ...]:
    """The main scorer's directions, the worst first: the one named, else the first that ran, else E0, else fusion."""
    test, part = study.entries["test"], study.parts["test"]
    with_rows = [name for name, entry in test.items() if entry.rows]
    name = (
        study.settings.main
        if study.settings.main in test
        else (with_rows or [n for n in (_E0,) if n in test] or [FUSION])[0]
    )
    assert name is not None
    entry = test[name]
    directions = {case.direction.direction_id for case in entry.cases}
    first = tuple(o for o in test[FUSION].outcomes if o.direction.direction_id in directions)
    return preference_report(
        Ranker(name=name, outcomes=entry.outcomes, branched=_branched(entry), cost=entry.cost),
        entry.cases,
        references=[Ranker(name=FUSION, outcomes=first)],
        pools=list(part.pools.values()),
        settings={},
    ).queries


def _branched(entry: Entry) -> tuple[PairOutcome, ...]:
    if entry.rows:
        return entry.outcomes
    whole = max(1, *(len(case.doc_ids) for case in entry.cases))
    return tuple(row.outcome for row in window_rerank(entry.cases, entry.grades, k=whole))


# -- inner parts ----------------------------------------------------------------------------------------------------


def _with_e0_ties(study: Study, part: str) -> dict[str, Entry]:
    """A part's rankers, and each window rerank again with E0 breaking its ties."""
    entries = study.entries[part]
    found = dict(entries)
    if _E0 in entries:
        for name, entry in entries.items():
            if entry.rows:
                tied = name + E0_TIE
                found[tied] = with_secondary(tied, entry, entries[_E0], k=study.settings.window)
    return found


def _primary(outcome: PairOutcome) -> bool:
    return outcome.missing is None and outcome.direction.conflict is None


def _groups(outcomes: Sequence[PairOutcome]) -> list[str]:
    return [o.direction.group for o in outcomes]


def _same(outcomes: Iterable[PairOutcome], wanted: Sequence[PairOutcome]) -> list[PairOutcome]:
    """Of `outcomes` those of the directions of `wanted`."""
    ids = {o.direction.direction_id for o in wanted}
    return [o for o in outcomes if o.direction.direction_id in ids]


def _common(rankers: Mapping[str, Entry]) -> set[str]:
    every = [{case.direction.direction_id for case in entry.cases} for entry in rankers.values()]
    return set.intersection(*every)


def _on(rankers: Mapping[str, Entry], directions: set[str]) -> dict[str, Entry]:
    """The same rankers on some of their directions."""
    found = {}
    for name, entry in rankers.items():
        at = [i for i, case in enumerate(entry.cases) if case.direction.direction_id in directions]
        found[name] = Entry(
            name=name,
            outcomes=tuple(entry.outcomes[i] for i in at),
            cases=tuple(entry.cases[i] for i in at),
            rows=tuple(entry.rows[i] for i in at) if entry.rows else (),
        )
    return found


def _two_intervals(mine: Sequence[PairOutcome]) -> tuple[Interval, Interval]:
    groups = _groups(mine)
    strict, mrr = (group_bootstrap(per_direction(mine, measure), groups) for measure in ("strict", "reciprocal_rank"))
    return strict, mrr


def _percent(found: Interval) -> tuple[Cell, Cell, Cell]:
    low, high = (None if end is None else 100 * end for end in (found.low, found.high))
    return 100 * found.estimate, low, high


def _both_in(cases: Sequence[Case], k: int) -> int:
    outcomes = population(
        outcome for outcome in (row.outcome for row in window_rerank(cases, [case.first for case in cases], k=0))
    )
    return int(per_direction(outcomes, f"both@{k}").sum()) if outcomes else 0
