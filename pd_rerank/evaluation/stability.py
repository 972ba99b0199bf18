"""What changes when the same candidates arrive in another order: rankings, retained sets, heads, quality.

Everything here is a function of arrays: row k is presentation k, column d is candidate d. Ranks count from 0 for the
best and -1 marks a candidate the presentation did not rank; scores are floats, NaN where missing. `Presentations`
holds both for one query, made from a score table or from one TREC run per presentation, so that any system can be
measured. Sections of the method named below are those of the order-consistency literature this follows;
docs/evaluation_stability.md works each figure by hand.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pd_rerank.decisions import Threshold, fit_f1, fit_retention
from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.evaluation.consumers import chosen, ends, modal_flip, pairwise_flip
from pd_rerank.evaluation.presentations import Presentations
from pd_rerank.scores import Scores

Ranks = npt.NDArray[np.integer[Any]]
Mask = npt.NDArray[np.bool_]
Matrix = npt.NDArray[np.float64]
Qrels = Mapping[str, Mapping[str, int]]

_CELLS = 1 << 17
"""Entries of the agreement matrices worked on at a time: 128 KiB of bytes, so that they stay in the cache."""


# -- rankings ------------------------------------------------------------------------------------------------


def tau_psi(ranks: Ranks) -> Any:
    """τ-PSI of strict rankings (…, K, n): (1 - mean Kendall τ-a over all pairs of presentations) / 2, in [0, 1].

    0: always the same ranking; 0.5: unrelated rankings; 1: reversed (K = 2). Each pair is compared on the candidates
    both rank; NaN with fewer than two presentations or nowhere two common candidates. Leading axes are independent
    queries; returns a float without any. Ranks with ties are `InvalidData`: use `tau_psi_b`. Source: method, 5.1.

    Where every presentation ranks every candidate no pair of presentations is visited: if a of K presentations put i
    above j, then a·(K-a) of the C(K,2) pairs of presentations disagree on (i, j), so τ-PSI = Σ_{i<j} a(K-a) /
    (C(K,2)·C(n,2)).

    Example: rankings ABCD, ABDC, BACD. On (A,B) a = 2 of 3, so 2·1 disagree; (C,D) likewise; other pairs agree.
    τ-PSI = (2 + 2) / (3·6) = .2222; pair by pair the τ are 2/3, 2/3, 1/3, mean 5/9, (1 - 5/9)/2 = .2222.
    """
    r = np.asarray(ranks)
    k, n = r.shape[-2:]
    flat = r.reshape(math.prod(r.shape[:-2]), k, n)
    out = np.full(len(flat), np.nan)
    if k >= 2 and n >= 2 and len(flat):
        whole = (flat >= 0).all(axis=(1, 2))
        out[whole] = _disagreement(flat if whole.all() else flat[whole])
        for q in np.flatnonzero(~whole):
            out[q] = _psi(kendall_matrix(flat[q]))
    return float(out[0]) if r.ndim == 2 else out.reshape(r.shape[:-2])


def tau_psi_b(scores: npt.ArrayLike) -> float:
    """τ-PSI with Kendall τ-b, for scores (K, n) with ties; without ties it equals `tau_psi`.

    A pair of presentations one of which ties all common candidates has no τ-b and is left out of the mean; NaN where no
    pair has one (a constant scorer is not called stable). NaN scores are missing.

    Example: scores (.9, .5, .5) and (.9, .6, .4): 2 concordant pairs, 1 tied in the first; τ-b = 2/√(2·3) = .8165, so
    .0918.
    """
    return _psi(kendall_matrix(np.asarray(scores, dtype=np.float64), variant="b"))


def kendall_matrix(values: npt.NDArray[Any], *, variant: Literal["a", "b"] = "a") -> Matrix:
    """Kendall τ between all rows of `values` (K, n), each pair on the columns both have; (K, K), NaN where undefined.

    `values` are ranks (integers, -1 missing) or scores (floats, NaN missing); only their order within a row counts.
    τ-a = (concordant - discordant) / all pairs; τ-b divides by √(pairs untied in one · pairs untied in the other).
    """
    v = np.asarray(values)
    there = ~np.isnan(v) if v.dtype.kind == "f" else v >= 0
    i, j = np.triu_indices(v.shape[1], 1)
    exact: Any = np.float32 if len(i) < 1 << 24 else np.float64
    both = (there[:, i] & there[:, j]).astype(exact)
    with np.errstate(invalid="ignore"):
        sign = ((v[:, i] > v[:, j]).astype(exact) - (v[:, i] < v[:, j])) * both
    balance = (sign @ sign.T).astype(np.float64)
    if variant == "a":
        pairs = (both @ both.T).astype(np.float64)
    else:
        untied = (np.abs(sign) @ both.T).astype(np.float64)
        pairs = np.sqrt(untied * untied.T)
    tau: Matrix = np.divide(balance, pairs, out=np.full(balance.shape, np.nan), where=pairs > 0)
    return tau


def _psi(tau: Matrix) -> float:
    pairs = tau[np.triu_indices(len(tau), 1)]
    pairs = pairs[~np.isnan(pairs)]
    return float(np.clip((1 - pairs.mean()) / 2, 0, 1)) if pairs.size else math.nan


def _disagreement(ranks: Ranks) -> Scores:
    """`tau_psi` in closed form for complete strict rankings (Q, K, n), K and n at least 2."""
    count, k, n = ranks.shape
    small = ranks.astype(np.uint8 if n <= 256 else np.int32)
    tally = np.uint8 if k < 256 else np.uint16
    exact: Any = np.float32 if n * n * k * k < 1 << 24 else np.float64
    total, squares = np.zeros(count), np.zeros(count)
    rows = max(1, min(n, _CELLS // n))
    step = max(1, _CELLS // (rows * n))
    for start in range(0, count, step):
        part = small[start : start + step]
        for top in range(0, n, rows):
            block = part[:, :, top : top + rows]
            above = np.zeros((len(part), block.shape[2], n), dtype=tally)
            beats = np.empty(above.shape, dtype=np.bool_)
            for p in range(k):
                np.less(block[:, p, :, None], part[:, p, None, :], out=beats)
                above += beats.view(np.uint8)
            counts = above.reshape(len(part), -1).astype(exact)
            total[start : start + step] += counts.sum(axis=1)
            squares[start : start + step] += np.einsum("ij,ij->i", counts, counts)
    pairs = n * (n - 1) / 2
    if (total != k * pairs).any():
        raise InvalidData("rankings with ties have no strict order; use tau_psi_b on the scores")
    # Over ordered (i, j) the counts are a and K - a: Σ a² = Σ_{i<j} (K² - 2a(K-a)).
    return np.asarray((k * k * pairs - squares) / (k * (k - 1) * pairs))


# -- sets ----------------------------------------------------------------------------------------------------


def top_k(ranks: Ranks, k: int = 10) -> Mask:
    """Which candidates are among each presentation's best k, (…, K, n)."""
    if k < 1:
        raise BadArgument(f"top k needs k of at least 1, got {k}")
    return np.asarray((ranks >= 0) & (ranks < k))


def jaccard_matrix(kept: Mask) -> Matrix:
    """Jaccard index |A∩B| / |A∪B| of all presentations' sets, kept (…, K, n) -> (…, K, K); two empty sets have 1."""
    member = np.asarray(kept).astype(np.float32)
    common = (member @ np.swapaxes(member, -1, -2)).astype(np.float64)
    size = np.diagonal(common, axis1=-2, axis2=-1)
    union = size[..., :, None] + size[..., None, :] - common
    jaccard: Matrix = np.divide(common, union, out=np.ones_like(common), where=union > 0)
    return jaccard


def retained_overlap(kept: Mask) -> Any:
    """Retained-set overlap: mean Jaccard index over all pairs of presentations, kept (…, K, n).

    1: every presentation keeps the same set. Two empty sets agree (1); NaN with fewer than two presentations. Leading
    axes are independent queries; returns a float without any. Source: method, 5.3.

    Example: at .5, sets ABC, AB, ABC: 2/3, 1, 2/3, mean .7778.
    """
    return _pair_mean(jaccard_matrix(kept))


def set_change(kept: Mask) -> Any:
    """The share of pairs of presentations whose sets differ at all, kept (…, K, n). With `top_k`: top-k churn.

    Example: top 3 of ABCD, ABDC, BACD: ABC, ABD, ABC; two of three pairs differ, .6667.
    """
    return _pair_mean((jaccard_matrix(kept) < 1).astype(np.float64))


def set_flip_rate(kept: Mask) -> float:
    """Of the candidates kept by any presentation, the share that not all keep, kept (K, n); NaN where none is kept.

    Example: sets ABC, AB, ABC: C of A, B, C is undecided, .3333. Source: method, 5.3.
    """
    share = np.asarray(kept).mean(axis=0) if len(kept) else np.zeros(0)
    ever = share > 0
    return float((share[ever] < 1).mean()) if ever.any() else math.nan


@dataclass(frozen=True, slots=True)
class SetQuality:
    """Precision, recall and F1 of retained sets, one number per presentation (or grid point)."""

    precision: Scores
    recall: Scores
    f1: Scores


def set_quality(kept: Mask, relevant: Mask) -> SetQuality:
    """Precision, recall, F1 of kept (…, n) against relevant (n,); 0 for an empty set, without relevant, without hits.

    Relevant means judged relevant *and* in the pool. Source: method, 5.3.
    """
    kept, relevant = np.asarray(kept), np.asarray(relevant)
    hits, size = (kept & relevant).sum(axis=-1), kept.sum(axis=-1)
    precision = np.divide(hits, size, out=np.zeros(hits.shape), where=size > 0)
    recall = np.divide(hits, relevant.sum(), out=np.zeros(hits.shape), where=np.full(hits.shape, relevant.any()))
    both = precision + recall
    f1 = np.divide(2 * precision * recall, both, out=np.zeros(hits.shape), where=both > 0)
    return SetQuality(precision, recall, f1)


def _pair_mean(matrix: Matrix) -> Any:
    """Mean over the pairs k < l of (…, K, K); a float where there are no leading axes."""
    k = matrix.shape[-1]
    if k < 2:
        mean = np.full(matrix.shape[:-2], np.nan)
    else:
        i, j = np.triu_indices(k, 1)
        mean = matrix[..., i, j].mean(axis=-1)
    return float(mean) if mean.ndim == 0 else mean


# -- heads ---------------------------------------------------------------------------------------------------


def rbo_matrix(ranks: Ranks, *, depth: int = 10, p: float = 0.9) -> Matrix:
    """Rank-biased overlap of all presentations, (K, n) -> (K, K), extrapolated from a finite depth.

    With A_d the share of common documents among the first d: RBO = (1-p) Σ_{d=1..k} A_d p^(d-1) + A_k p^k, where
    k = min(depth, length of the longest ranking). Rankings may hold different documents. Source: method, 5.5.

    Example, p .9: ABCD and ABDC agree on 1, 2, 4 of 1, 2, 4 and on 2 of 3: .1(1 + .9 + .81·2/3 + .729) + .6561 = .973.
    """
    if depth < 1 or not 0 < p < 1:
        raise BadArgument(f"RBO needs a depth of at least 1 and 0 < p < 1, got {depth} and {p}")
    r = np.asarray(ranks)
    k = min(depth, int((r >= 0).sum(axis=1).max(initial=0)))
    total, agreement = np.zeros((len(r), len(r))), np.zeros((len(r), len(r)))
    for d in range(1, k + 1):
        head = top_k(r, d).astype(np.float32)
        agreement = (head @ head.T).astype(np.float64) / d
        total += (1 - p) * p ** (d - 1) * agreement
    return total + agreement * p**k


def rbo_instability(ranks: Ranks, *, depth: int = 10, p: float = 0.9) -> float:
    """1 - mean RBO over all pairs of presentations (K, n): 0 for equal heads, towards 1 for disjoint ones."""
    if not np.asarray(ranks).size:
        return math.nan
    return 1 - float(_pair_mean(rbo_matrix(ranks, depth=depth, p=p)))


def rbo(a: Sequence[str], b: Sequence[str], *, depth: int = 10, p: float = 0.9) -> float:
    """Rank-biased overlap of two rankings of document ids, best first; see `rbo_matrix`. Two empty ones have 0."""
    return float(rbo_matrix(Presentations.of_rankings("", [a, b]).ranks, depth=depth, p=p)[0, 1])


# -- quality under reordering ----------------------------------------------------------------------------------


def ndcg_by_presentation(
    ranks: Ranks, grades: npt.ArrayLike, *, judged: Iterable[int] | None = None, k: int = 10
) -> Scores:
    """nDCG@k of each presentation, ranks (K, n) -> (K,): linear gain, as trec_eval and `ranking.evaluate` have it.

    `grades` (n,) of the candidates, 0 for unjudged. `judged` are all grades of the query's judgements, from which the
    ideal comes (default: the candidates'); 0 where none is positive. Source: method, 5.2.
    """
    r = np.asarray(ranks)
    gains = np.maximum(np.asarray(grades, dtype=np.float64), 0)
    known = gains if judged is None else np.maximum(np.array(list(judged), dtype=np.float64), 0)
    ideal = np.sort(known)[::-1][:k]
    best = float((ideal / np.log2(np.arange(len(ideal)) + 2)).sum())
    if best == 0:
        return np.zeros(len(r))
    discount = np.where(top_k(r, k), 1 / np.log2(np.maximum(r, 0) + 2), 0.0)
    values: Scores = (discount * gains).sum(axis=-1) / best
    return values


def gold_rank_variance(ranks: Ranks, gold: Mask) -> float:
    """Mean over relevant candidates of the population variance of their rank, ranks (K, n), gold (n,).

    Candidates that some presentation does not rank are left out; NaN where none is left. Source: method, 5.2.
    """
    r, gold = np.asarray(ranks), np.asarray(gold)
    use = gold & (r >= 0).all(axis=0)
    return float(r[:, use].var(axis=0).mean()) if len(r) and use.any() else math.nan


BUCKETS = ("top", "middle", "bottom")


def position_buckets(values: npt.ArrayLike, positions: npt.ArrayLike, n: int) -> dict[str, float]:
    """Mean of `values` where the watched candidate stood at `positions` (from 0) of a pool of n, by thirds.

    Position p is in the top where p < n/3, in the middle where p < 2n/3, else at the bottom; thirds without a value are
    absent. Source: method, 5.2.
    """
    v, p = np.asarray(values, dtype=np.float64), np.asarray(positions)
    third = np.where(p < n / 3, 0, np.where(p < 2 * n / 3, 1, 2))
    return {name: float(v[third == b].mean()) for b, name in enumerate(BUCKETS) if (third == b).any()}


def zeng_psi(buckets: Mapping[str, float]) -> float:
    """Zeng's position sensitivity: 1 - min/max of the mean quality by bucket of where the relevant document stood.

    `buckets` from `position_buckets`; of a collection: `pool_buckets` first, then this. NaN with fewer than two
    buckets or a maximum of 0. Not comparable with τ-PSI. Example: nDCG .8 at the top, .6 in the middle, .5 at the
    bottom: .375.
    """
    means = list(buckets.values())
    return 1 - min(means) / max(means) if len(means) > 1 and max(means) > 0 else math.nan


def pool_buckets(queries: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Bucket means over queries, each bucket over the queries that have it."""
    found: dict[str, list[float]] = {}
    for buckets in queries:
        for name, value in buckets.items():
            found.setdefault(name, []).append(value)
    return {name: math.fsum(found[name]) / len(found[name]) for name in BUCKETS if name in found}


# -- scores --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreSpread:
    """How far scores move with the presentation, against how far candidates lie apart.

    `residual`: mean over candidates of a candidate's variance over presentations. `centred`: the same after each
    presentation's mean is taken off. `dispersion`: mean over presentations of the variance over candidates.
    `normalised`: √(centred / dispersion), so a collapse of the scores does not pass for stability; NaN without
    dispersion. `order_marginal`: variance over candidates of their mean score. All variances divide by the count.
    """

    residual: float
    centred: float
    dispersion: float
    normalised: float
    order_marginal: float


def score_spread(scores: Scores) -> ScoreSpread:
    """The five figures of `ScoreSpread` from scores (K, n); candidates without all K scores are left out.

    Example: A .9 .8 .55, B .7 .75 .6, C .5 .4 .5, D .1 .45 .2: residual .01236, centred .00913, dispersion .04766,
    normalised .43775, order-marginal .03852. Source: method, 5.7.
    """
    s = _complete(scores)
    if not s.size:
        nan = math.nan
        return ScoreSpread(residual=nan, centred=nan, dispersion=nan, normalised=nan, order_marginal=nan)
    moved = s - s[0]  # scores that do not move have a variance of 0, not of rounding errors
    centred = (moved - moved.mean(axis=1, keepdims=True)).var(axis=0).mean()
    dispersion = s.var(axis=1).mean()
    return ScoreSpread(
        residual=float(moved.var(axis=0).mean()),
        centred=float(centred),
        dispersion=float(dispersion),
        normalised=float(np.sqrt(centred / dispersion)) if dispersion > 0 else math.nan,
        order_marginal=float(s.mean(axis=0).var()),
    )


def tie_rate(scores: Scores) -> float:
    """The share of neighbours in score order that are exactly equal, mean over presentations (K, n); NaN if n < 2."""
    falling = np.sort(np.asarray(scores, dtype=np.float64), axis=1)  # NaN last
    there = ~np.isnan(falling[:, 1:])
    pairs = there.sum(axis=1)
    equal = (falling[:, 1:] == falling[:, :-1]).sum(axis=1)
    return float((equal[pairs > 0] / pairs[pairs > 0]).mean()) if (pairs > 0).any() else math.nan


def margin(scores: Scores, k: int = 10) -> float:
    """The gap between the k-th and the next score, mean over presentations (K, n); NaN where n <= k or scores miss."""
    s = np.asarray(scores, dtype=np.float64)
    if not len(s) or s.shape[1] <= k:
        return math.nan
    falling = -np.sort(-s, axis=1)
    return float((falling[:, k - 1] - falling[:, k]).mean())


def _complete(scores: npt.ArrayLike) -> Scores:
    s = np.asarray(scores, dtype=np.float64)
    return s[:, ~np.isnan(s).any(axis=0)]


# -- thresholds ------------------------------------------------------------------------------------------------


def fit_threshold_f1(
    queries: Sequence[Presentations],
    qrels: Qrels,
    *,
    presentation: int | None = 0,
    min_grade: int = 1,
    span: tuple[float, float] | None = None,
) -> Threshold:
    """The threshold with the best mean F1 of the retained set over dev queries, for any system's scores.

    Fitted on one `presentation` (the method's way), or on the mean over all (None). The grid has 41 points over
    `span`, by default from the lowest to the highest score there is; ties go to the higher value. `Threshold.fit_f1`
    does the same for score tables. Source: method, 5.3.
    """
    relevant = [_grades(query, qrels) >= min_grade for query in queries]
    return fit_f1([_canonical(query, presentation) for query in queries], relevant, span=span)


def fit_threshold_retention(
    queries: Sequence[Presentations],
    target: float,
    *,
    presentation: int | None = 0,
    span: tuple[float, float] | None = None,
) -> Threshold:
    """The threshold whose mean share of retained candidates is nearest `target`; ties go to the higher value."""
    return fit_retention([_canonical(query, presentation) for query in queries], target, span=span)


def matched_retention(
    arms: Mapping[str, Sequence[Presentations]],
    qrels: Qrels,
    *,
    reference: str,
    dev: Collection[str],
    presentation: int | None = 0,
    min_grade: int = 1,
) -> dict[str, Threshold]:
    """One threshold per system so that all retain as much as `reference` does at its own F1 threshold.

    Larger sets overlap more, so systems are comparable only at equal retention. Fitted on the `dev` queries that all
    arms have; report on others. Every arm, the reference too, is matched to the reference's mean retention. Source:
    method, 5.3.
    """
    if reference not in arms:
        raise BadArgument(f"no system '{reference}' to match; there are {', '.join(arms)}")
    shared = set(dev).intersection(*({query.query_id for query in queries} for queries in arms.values()))
    if not shared:
        raise InvalidData("no dev query is in all systems; give systems scored on the same queries")
    fitting = {name: [q for q in queries if q.query_id in shared] for name, queries in arms.items()}
    own = fit_threshold_f1(fitting[reference], qrels, presentation=presentation, min_grade=min_grade)
    kept = [own.retain(_canonical(q, presentation)).mean() for q in fitting[reference] if q.doc_ids]
    target = float(np.mean(kept))
    return {
        name: fit_threshold_retention(queries, target, presentation=presentation) for name, queries in fitting.items()
    }


def _canonical(query: Presentations, presentation: int | None) -> Scores:
    if presentation is None:
        return np.asarray(query.scores.mean(axis=0))
    if presentation >= query.count:
        raise BadArgument(f"query '{query.query_id}' has {query.count} presentations, no number {presentation}")
    return np.asarray(query.scores[presentation])


def _grades(query: Presentations, qrels: Qrels) -> npt.NDArray[np.int64]:
    judged = qrels.get(query.query_id, {})
    return np.array([judged.get(doc_id, 0) for doc_id in query.doc_ids], dtype=np.int64)


# -- all of it, query by query -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StabilityOutcome:
    """One query's stability figures; NaN where a figure is undefined for it.

    `missing` counts candidates without a rank, over all presentations. The retained-set figures need a threshold; the
    nDCG ones, `gold_rank_variance` and `retained_f1` need judgements. Flips are of the first ranked (`selection_flip`)
    and of the first and last ranked together (`pair_flip`), pairwise, with the modal estimate beside them.
    """

    query_id: str
    presentations: int
    candidates: int
    missing: int
    tau_psi: float
    tau_psi_b: float
    overlap: float
    set_flip: float
    retention: float
    retained_f1: float
    retained_f1_sd: float
    top_k_churn: float
    top_k_overlap: float
    rbo_instability: float
    mean_ndcg: float
    worst_ndcg: float
    best_ndcg: float
    order_spread: float
    gold_rank_variance: float
    selection_flip: float
    selection_flip_modal: float
    pair_flip: float
    pair_flip_modal: float
    residual_variance: float
    centred_residual_variance: float
    dispersion: float
    normalised_residual: float
    order_marginal_variance: float
    tie_rate: float


FIGURES = tuple(f.name for f in fields(StabilityOutcome) if f.type == "float")
"""The names of a `StabilityOutcome`'s figures, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StabilitySummary:
    """A figure's mean over the `n` queries that have it; `undefined` names those that do not."""

    name: str
    value: float
    n: int
    undefined: tuple[str, ...]


def stability(
    queries: Sequence[Presentations],
    *,
    threshold: Threshold | float | None = None,
    qrels: Qrels | None = None,
    k: int = 10,
    min_grade: int = 1,
) -> list[StabilityOutcome]:
    """Every figure for every query, in order: see `StabilityOutcome` and the functions it names.

    `k` cuts the top-k sets, RBO and nDCG. A presentation that ranks nothing has failed and agrees with no other:
    overlap and RBO 0, churn and flips 1, nDCG 0; rank agreement and score figures leave it out. Of an empty pool
    nothing is defined. A query without judgements has NaN for what needs them. Report on queries the threshold was
    not fitted on.
    """
    frozen = Threshold(value=float(threshold)) if isinstance(threshold, int | float) else threshold
    psi = _tau_psi_of_all(queries)
    return [
        _outcome(query, psi[i], frozen, None if qrels is None else qrels.get(query.query_id), k, min_grade)
        for i, query in enumerate(queries)
    ]


def summarise(outcomes: Sequence[StabilityOutcome]) -> list[StabilitySummary]:
    """One row per figure: the mean over queries that have it, how many, and which have not."""
    rows = []
    for name in FIGURES:
        values = {outcome.query_id: float(getattr(outcome, name)) for outcome in outcomes}
        there = [value for value in values.values() if not math.isnan(value)]
        rows.append(
            StabilitySummary(
                name=name,
                value=math.fsum(there) / len(there) if there else math.nan,
                n=len(there),
                undefined=tuple(query_id for query_id, value in values.items() if math.isnan(value)),
            )
        )
    return rows


def mean_over_collections(collections: Mapping[str, Iterable[float]]) -> float:
    """The mean of the collections' means, each collection weighing the same; NaN units are skipped, as are
    collections without any other. Example: (.0694, .0743) from two collections give .0719.
    """
    means = []
    for values in collections.values():
        there = [value for value in values if not math.isnan(value)]
        if there:
            means.append(math.fsum(there) / len(there))
    return math.fsum(means) / len(means) if means else math.nan


def _tau_psi_of_all(queries: Sequence[Presentations]) -> list[float]:
    psi = [math.nan] * len(queries)
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, query in enumerate(queries):
        alike.setdefault(query.ranks.shape, []).append(i)
    for members in alike.values():
        for i, value in zip(members, tau_psi(np.stack([queries[i].ranks for i in members])), strict=True):
            psi[i] = float(value)
    return psi


def _outcome(
    query: Presentations,
    psi: float,
    threshold: Threshold | None,
    judged: Mapping[str, int] | None,
    k: int,
    min_grade: int,
) -> StabilityOutcome:
    figures = dict.fromkeys(FIGURES, math.nan)
    if query.doc_ids and query.count:
        figures |= _of_sets(query, threshold, k) | _of_choices(query) | _of_scores(query, psi)
        if judged is not None:
            figures |= _of_quality(query, judged, threshold, k, min_grade)
    return StabilityOutcome(
        query_id=query.query_id,
        presentations=query.count,
        candidates=len(query.doc_ids),
        missing=int((query.ranks < 0).sum()),
        **figures,
    )


def _of_sets(query: Presentations, threshold: Threshold | None, k: int) -> dict[str, float]:
    head = _jaccard(query, top_k(query.ranks, k))
    figures = {
        "top_k_churn": _pair_mean((head < 1).astype(np.float64)),
        "top_k_overlap": _pair_mean(head),
        "rbo_instability": rbo_instability(query.ranks, depth=k),
    }
    if threshold is None:
        return figures
    if (query.ranks >= 0).any() and np.isnan(query.scores).all():
        raise InvalidData(f"query '{query.query_id}' has rankings without scores; a threshold needs scores")
    kept = threshold.retain(query.scores)
    return figures | {
        "overlap": _pair_mean(_jaccard(query, kept)),
        "set_flip": set_flip_rate(kept) if query.count > 1 else math.nan,
        "retention": float(kept.mean()),
    }


def _jaccard(query: Presentations, kept: Mask) -> Matrix:
    """The Jaccard indices of the presentations' sets; 0 with a presentation that ranks nothing."""
    jaccard = jaccard_matrix(kept)
    failed = (query.ranks < 0).all(axis=1)
    jaccard[failed, :] = jaccard[:, failed] = 0.0
    return jaccard


def _of_choices(query: Presentations) -> dict[str, float]:
    first = [None if i < 0 else i for i in chosen(query.ranks).tolist()]
    figures = {"selection_flip": pairwise_flip(first), "selection_flip_modal": modal_flip(first)}
    if len(query.doc_ids) > 1:
        pairs = [None if a < 0 else (a, b) for a, b in ends(query.ranks).tolist()]
        figures |= {"pair_flip": pairwise_flip(pairs), "pair_flip_modal": modal_flip(pairs)}
    return figures


def _of_scores(query: Presentations, psi: float) -> dict[str, float]:
    spread, ties = score_spread(query.scores), tie_rate(query.scores)
    figures = {
        "tau_psi": psi,
        "tau_psi_b": psi if ties == 0 and not np.isnan(query.scores).any() else tau_psi_b(query.scores),
        "dispersion": spread.dispersion,
        "order_marginal_variance": spread.order_marginal,
        "tie_rate": ties,
    }
    if query.count > 1:
        figures |= {
            "residual_variance": spread.residual,
            "centred_residual_variance": spread.centred,
            "normalised_residual": spread.normalised,
        }
    return figures


def _of_quality(
    query: Presentations, judged: Mapping[str, int], threshold: Threshold | None, k: int, min_grade: int
) -> dict[str, float]:
    grades = np.array([judged.get(doc_id, 0) for doc_id in query.doc_ids], dtype=np.int64)
    gold = np.asarray(grades >= min_grade)
    ndcg = ndcg_by_presentation(query.ranks, grades, judged=judged.values(), k=k)
    figures = {"mean_ndcg": float(ndcg.mean()), "worst_ndcg": float(ndcg.min()), "best_ndcg": float(ndcg.max())}
    if threshold is not None:
        f1 = set_quality(threshold.retain(query.scores), gold).f1
        figures |= {"retained_f1": float(f1.mean())}
        if query.count > 1:
            figures |= {"retained_f1_sd": float(f1.std(ddof=1))}
    if query.count > 1:
        spread = float(ndcg.mean() - ndcg.min())
        figures |= {"order_spread": spread, "gold_rank_variance": gold_rank_variance(query.ranks, gold)}
    return figures
