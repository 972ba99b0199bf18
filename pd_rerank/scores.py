"""Grades to scores: the table every ranking, decision and stability figure is a function of."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from pd_rerank.errors import BadArgument, InvalidData, MissingResource
from pd_rerank.files import SCORED_WITH, read_json, sha256_file, versions, whole_file, whole_folder, write_json
from pd_rerank.pool import Pool, pool_sha256, pools_sha256

Scores = npt.NDArray[np.float64]
Readout = Literal["expected", "p_relevant", "argmax"]

READOUTS: tuple[str, ...] = get_args(Readout)


def grade_probabilities(logits: npt.NDArray[Any]) -> Scores:
    """Softmax over the grades alone, last axis, computed in float32 or wider.

    `logits` (…, G) raw logits or log-probabilities; rows with a NaN give NaN. Source: method, section 1.6.
    """
    wide = np.asarray(logits, dtype=np.float64)
    if wide.size == 0:
        return wide
    with np.errstate(invalid="ignore"):
        shifted = np.exp(wide - wide.max(axis=-1, keepdims=True))
        probabilities: Scores = shifted / shifted.sum(axis=-1, keepdims=True)
    return probabilities


def read_out(probabilities: Scores, readout: Readout = "expected") -> Scores:
    """Reduce grade probabilities (…, G), for grades 0…G-1, to scores in [0, 1].

    `expected`: sum(g · p_g) / (G-1). `p_relevant`: the mass on the upper half, P(g ≥ G/2), which is
    P(g ≥ 2) for grades 0–3. `argmax`: the likeliest grade / (G-1), the lower one on a tie.
    NaN stays NaN. Source: method, section 1.6.
    """
    top = probabilities.shape[-1] - 1
    if readout == "expected":
        expected: Scores = probabilities @ (np.arange(top + 1, dtype=np.float64) / top)
        return expected
    if readout == "p_relevant":
        upper: Scores = probabilities[..., (top + 1) // 2 :].sum(axis=-1)
        return upper
    if readout == "argmax":
        missing = np.isnan(probabilities).any(axis=-1)
        best = np.argmax(np.where(np.isnan(probabilities), -1.0, probabilities), axis=-1) / top
        return np.where(missing, np.nan, best)
    raise BadArgument(f"unknown readout '{readout}'; choose one of {', '.join(READOUTS)}")


def ranking(scores: Scores, doc_ids: Sequence[str]) -> npt.NDArray[np.int64]:
    """Positions from best to worst: score descending, ties by doc_id ascending, NaN last (also by doc_id)."""
    order = sorted(
        range(len(doc_ids)),
        key=lambda i: (bool(np.isnan(scores[i])), -scores[i] if scores[i] == scores[i] else 0.0, doc_ids[i]),
    )
    return np.array(order, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreTable:
    """Every grade read for one query: row = presentation, column = candidate in pool order; read-only.

    `grades` (K, n, G) float32 logits or log-probabilities over the grades, NaN where the engine had none;
    `fallback` (K, n) bool marks those; `window`, `slot` (K, n) int32 say where the candidate stood, -1 for a
    blank document, which is not shown and holds grade 0 by rule; `cut` (n,) int32 counts the characters
    taken off a document's end to fit the prompt.
    """

    query_id: str
    doc_ids: tuple[str, ...]
    grades: npt.NDArray[np.float32]
    fallback: npt.NDArray[np.bool_]
    window: npt.NDArray[np.int32]
    slot: npt.NDArray[np.int32]
    cut: npt.NDArray[np.int32]

    def __post_init__(self) -> None:
        k, n = self.grades.shape[:2]
        for name in ("fallback", "window", "slot"):
            if getattr(self, name).shape != (k, n):
                raise InvalidData(
                    f"score table '{self.query_id}': {name} has shape {getattr(self, name).shape}, grades say {(k, n)}"
                )
        if len(self.doc_ids) != n or self.cut.shape != (n,):
            raise InvalidData(f"score table '{self.query_id}': {len(self.doc_ids)} ids for {n} columns")
        self._freeze()

    def _freeze(self) -> None:
        for name in ("grades", "fallback", "window", "slot", "cut"):
            getattr(self, name).flags.writeable = False

    def __setstate__(self, state: list[Any]) -> None:
        # Copies and unpickled tables come through here, and arrays lose their flags on the way.
        for field, value in zip(fields(self), state, strict=True):
            object.__setattr__(self, field.name, value)
        self._freeze()

    @property
    def presentations(self) -> int:
        """K, the number of presentations."""
        return int(self.grades.shape[0])

    def probabilities(self) -> Scores:
        """Grade probabilities per presentation, (K, n, G)."""
        return grade_probabilities(self.grades)

    def scores(self, readout: Readout = "expected", *, residual: SlotResidual | None = None) -> Scores:
        """Scores in [0, 1] per presentation, (K, n); with `residual`, less each slot's mean residual."""
        scores = read_out(self.probabilities(), readout)
        return scores if residual is None else residual.subtract(scores, self)

    def mean_probabilities(self) -> Scores:
        """Grade probabilities averaged over the presentations that have them, (n, G); NaN where none has."""
        return _mean_over_presentations(self.probabilities())

    def mean(self, readout: Readout = "expected", *, residual: SlotResidual | None = None) -> Scores:
        """The served score: the mean over the presentations that have a grade, (n,); NaN where none has."""
        return _mean_over_presentations(self.scores(readout, residual=residual))

    def spread(self, readout: Readout = "expected", *, residual: SlotResidual | None = None) -> Scores:
        """Standard deviation over presentations (ddof 0), (n,); 0 for one presentation, NaN where none has a grade."""
        scores = self.scores(readout, residual=residual)
        mean = _mean_over_presentations(scores)
        return np.sqrt(_mean_over_presentations((scores - mean) ** 2))

    def ranking(self, readout: Readout = "expected", *, residual: SlotResidual | None = None) -> npt.NDArray[np.int64]:
        """Candidate positions from best to worst by the served score; ties by doc_id."""
        return ranking(self.mean(readout, residual=residual), self.doc_ids)


def _mean_over_presentations(values: Scores) -> Scores:
    """Mean over axis 0 of what is not NaN; NaN where there is none. Equal values have exactly that mean."""
    there = ~np.isnan(values)
    if not len(values):
        return np.full(values.shape[1:], np.nan)
    first = np.take_along_axis(values, there.argmax(axis=0)[None], axis=0)[0]
    count = there.sum(axis=0)
    total = np.where(there, values - first, 0.0).sum(axis=0)
    mean: Scores = first + np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
    return mean


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotResidual:
    """What a slot adds to a score on average, fitted on other queries and subtracted from these.

    `offsets[width]` is a tuple of `width` numbers: the mean of (score - the document's own mean over
    presentations, or the query's mean where there is one presentation) over all documents seen at that
    slot of a window that wide. Slots of widths never seen borrow the nearest width, stretched linearly.
    """

    offsets: dict[int, tuple[float, ...]]
    readout: Readout
    n_queries: int

    def __post_init__(self) -> None:
        if self.readout not in READOUTS:
            raise BadArgument(f"unknown readout '{self.readout}'; choose one of {', '.join(READOUTS)}")
        if not self.offsets:
            raise BadArgument("a slot residual holds offsets for at least one window width")
        for width, values in self.offsets.items():
            if width < 1 or len(values) != width or not np.isfinite(values).all():
                raise BadArgument(f"a slot residual for width {width} holds {width} finite numbers, got {values}")

    def check(self, *, readout: Readout, calibration: str) -> None:
        """Refuse scores of another readout, and scores from which CapCal has taken the slots' share already."""
        if self.readout != readout:
            raise BadArgument(f"the slot residual was fitted on readout '{self.readout}', asked for is '{readout}'")
        if calibration != "none":
            raise BadArgument(f"calibration '{calibration}' and a slot residual correct the same thing; choose one")

    @classmethod
    def fit(cls, tables: Iterable[ScoreTable], *, readout: Readout = "expected") -> SlotResidual:
        """Average the residuals of `tables` per window width and slot. Fit on queries you do not report on."""
        sums: dict[int, npt.NDArray[np.float64]] = {}
        counts: dict[int, npt.NDArray[np.float64]] = {}
        queries = 0
        for table in tables:
            if not table.doc_ids or not table.presentations:
                continue
            queries += 1
            scores = table.scores(readout)
            if table.presentations > 1:
                residuals = scores - _mean_over_presentations(scores)
            else:
                there = scores[~np.isnan(scores)]
                residuals = scores - (there.mean() if there.size else np.nan)
            widths = window_widths(table.window)
            ok = (table.slot >= 0) & ~np.isnan(residuals)
            for width in np.unique(widths[ok]):
                here = ok & (widths == width)
                w = int(width)
                sums.setdefault(w, np.zeros(w))
                counts.setdefault(w, np.zeros(w))
                np.add.at(sums[w], table.slot[here], residuals[here])
                np.add.at(counts[w], table.slot[here], 1.0)
        if not sums:
            raise BadArgument("a slot residual needs at least one score table with grades")
        offsets = {w: tuple((sums[w] / np.maximum(counts[w], 1.0)).tolist()) for w in sorted(sums)}
        return cls(offsets=offsets, readout=readout, n_queries=queries)

    def subtract(self, scores: Scores, table: ScoreTable) -> Scores:
        """Scores (K, n) of `table` less their slots' offsets; blank documents keep theirs. May leave [0, 1]."""
        widths = window_widths(table.window)
        out = scores.copy()
        for width in np.unique(widths[table.slot >= 0]):
            here = (table.slot >= 0) & (widths == width)
            out[here] -= self._offsets_for(int(width))[table.slot[here]]
        return out

    def _offsets_for(self, width: int) -> npt.NDArray[np.float64]:
        known = min(self.offsets, key=lambda w: (abs(w - width), w))
        values = np.array(self.offsets[known], dtype=np.float64)
        if known == width:
            return values
        stretched: npt.NDArray[np.float64] = np.interp(np.linspace(0, 1, width), np.linspace(0, 1, known), values)
        return stretched

    def save(self, path: str | Path) -> None:
        """Write the offsets as JSON, whole or not at all."""
        write_json(path, {"readout": self.readout, "n_queries": self.n_queries, "offsets": self.offsets})

    @classmethod
    def load(cls, path: str | Path) -> SlotResidual:
        """Read what `save` wrote; a file of another shape is `InvalidData`."""
        data = read_json(path)
        try:
            offsets = {int(w): tuple(float(x) for x in xs) for w, xs in data["offsets"].items()}
            return cls(offsets=offsets, readout=data["readout"], n_queries=int(data["n_queries"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidData(f"{path} is not a slot-residual file ({error!r})") from error


def window_widths(window: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """How many candidates shared each candidate's window, (K, n); 0 for blank documents (window -1)."""
    widths = np.zeros_like(window)
    for k, row in enumerate(window):
        shown = row >= 0
        if shown.any():
            widths[k, shown] = np.bincount(row[shown])[row[shown]]
    return widths


_SCORES, _RUN = "scores.npz", "run.json"


def write_scores(folder: str | Path, tables: Sequence[ScoreTable], *, run: Mapping[str, Any]) -> None:
    """Write score tables as a folder of scores.npz and run.json, whole or not at all; `read_scores` reads it back.

    scores.npz holds no pickles. Table q has `shapes[q]` = (K, n, G); its cells (K·n, row by row) lie in `fallback`,
    `window` and `slot` between `cell_offsets[q]` and `[q+1]`, its grades (K·n·G) in `grades` between
    `grade_offsets`, its documents in `cut` and `doc_id_offsets` between `doc_offsets`. Ids are UTF-8 bytes cut at
    `query_id_offsets` and `doc_id_offsets`, so that any id survives. run.json holds `run` (model, template hash,
    scoring, `pools_sha256`, …), library versions and the SHA-256 of scores.npz. No times: equal input, equal bytes.
    """
    seen: set[str] = set()
    for table in tables:
        if table.query_id in seen:
            raise InvalidData(f"query '{table.query_id}' has two score tables; write each query once")
        seen.add(table.query_id)
    with whole_folder(folder, holds=(_SCORES, _RUN)) as fresh:
        with whole_file(fresh / _SCORES, "wb") as stream:
            np.savez(stream, allow_pickle=False, **_pack(tables))
        record = {
            **run,
            "format": "pd_rerank scores 1",
            "queries": len(tables),
            "versions": versions(SCORED_WITH),
            "sha256": {_SCORES: sha256_file(fresh / _SCORES)},
        }
        write_json(fresh / _RUN, record)


def read_scores(folder: str | Path) -> tuple[list[ScoreTable], dict[str, Any]]:
    """Read what `write_scores` wrote: the tables and run.json. Files that do not belong together are `InvalidData`."""
    source = Path(folder)
    if not (source / _SCORES).is_file() or not (source / _RUN).is_file():
        raise MissingResource(f"no scores in {source}: a scores folder holds {_SCORES} and {_RUN}")
    run = read_json(source / _RUN)
    found = sha256_file(source / _SCORES)
    hashes = run.get("sha256") if isinstance(run, dict) else None
    want = hashes.get(_SCORES) if isinstance(hashes, dict) else None
    if want != found:
        raise InvalidData(
            f"{source / _SCORES} is not what {_RUN} records (sha256 {found[:12]}…, recorded {str(want)[:12]}…); "
            "score the pools again"
        )
    try:
        with np.load(source / _SCORES, allow_pickle=False) as arrays:
            return _unpack(arrays), run
    except (KeyError, ValueError, IndexError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidData(f"{source / _SCORES} does not hold score tables ({error!r})") from error


def join_scores(
    tables: Sequence[ScoreTable], pools: Sequence[Pool], *, run: Mapping[str, Any]
) -> list[tuple[Pool, ScoreTable]]:
    """Pair every pool with its score table, in the order of `pools`; scores of other pools are `InvalidData`.

    A query that `run` (run.json) records as failed has no pair. Ids must be the same in the same order, query by query,
    and the pools' content must hash to the `pools_sha256` that `run` records; the message names the query that differs.
    """
    by_query = {table.query_id: table for table in tables}
    failed = run.get("failed") or {}
    pool_ids = {pool.query_id for pool in pools}
    for table in tables:
        if table.query_id not in pool_ids:
            raise InvalidData(f"query '{table.query_id}' has scores but no pool; these scores are of other pools")
    pairs = []
    for pool in pools:
        found = by_query.get(pool.query_id)
        if found is None and pool.query_id in failed:
            continue
        if found is None:
            raise InvalidData(f"query '{pool.query_id}' has a pool but no scores; score these pools first")
        if found.doc_ids != pool.doc_ids:
            raise InvalidData(f"query '{pool.query_id}': {_difference(found.doc_ids, pool.doc_ids)}")
        pairs.append((pool, found))
    recorded = run.get("pools_sha256")
    if recorded is None:
        raise InvalidData("these scores do not record which pools they are of (no 'pools_sha256' in run.json)")
    if recorded != pools_sha256(pools):
        each = run.get("pool_sha256") or {}
        changed = [p.query_id for p in pools if each.get(p.query_id, pool_sha256(p)) != pool_sha256(p)]
        where = f"query '{changed[0]}'" if changed else "these queries"
        raise InvalidData(
            f"{where}: the ids are those scored, but the query, a text or a first-stage score is not, or the "
            "queries' order; score these pools again"
        )
    return pairs


def _difference(scored: Sequence[str], pool: Sequence[str]) -> str:
    if sorted(scored) == sorted(pool):
        return "scores and pool hold the same documents in another order; score this pool again"
    known = set(scored)
    other = [doc_id for doc_id in pool if doc_id not in known]
    what = f"the pool's document '{other[0]}' was not scored" if other else "documents were scored that it lacks"
    return f"{what} ({len(scored)} scored, {len(pool)} in the pool); these scores are of another pool"


def _pack(tables: Sequence[ScoreTable]) -> dict[str, npt.NDArray[Any]]:
    shapes = np.array([table.grades.shape for table in tables], dtype="<i8").reshape(len(tables), 3)
    query_ids, query_id_offsets = _pack_ids([table.query_id for table in tables])
    doc_ids, doc_id_offsets = _pack_ids([doc_id for table in tables for doc_id in table.doc_ids])

    def joined(name: str, dtype: str) -> npt.NDArray[Any]:
        parts = [np.asarray(getattr(table, name)).ravel() for table in tables]
        return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)

    return {
        "shapes": shapes,
        "doc_offsets": _offsets(shapes[:, 1]),
        "cell_offsets": _offsets(shapes[:, 0] * shapes[:, 1]),
        "grade_offsets": _offsets(shapes.prod(axis=1)),
        "query_ids": query_ids,
        "query_id_offsets": query_id_offsets,
        "doc_ids": doc_ids,
        "doc_id_offsets": doc_id_offsets,
        "grades": joined("grades", "<f4"),
        "fallback": joined("fallback", "?"),
        "window": joined("window", "<i4"),
        "slot": joined("slot", "<i4"),
        "cut": joined("cut", "<i4"),
    }


def _unpack(arrays: Mapping[str, npt.NDArray[Any]]) -> list[ScoreTable]:
    shapes = arrays["shapes"]
    query_ids = _unpack_ids(arrays["query_ids"], arrays["query_id_offsets"])
    doc_ids = _unpack_ids(arrays["doc_ids"], arrays["doc_id_offsets"])
    docs, cells, grades = arrays["doc_offsets"], arrays["cell_offsets"], arrays["grade_offsets"]
    whole = {name: arrays[name] for name in ("grades", "fallback", "window", "slot", "cut")}
    tables = []
    for q, (query_id, (k, n, g)) in enumerate(zip(query_ids, shapes.tolist(), strict=True)):
        cell, doc = slice(cells[q], cells[q + 1]), slice(docs[q], docs[q + 1])
        tables.append(
            ScoreTable(
                query_id=query_id,
                doc_ids=tuple(doc_ids[doc]),
                grades=whole["grades"][grades[q] : grades[q + 1]].reshape(k, n, g),
                fallback=whole["fallback"][cell].reshape(k, n),
                window=whole["window"][cell].reshape(k, n),
                slot=whole["slot"][cell].reshape(k, n),
                cut=whole["cut"][doc],
            )
        )
    return tables


def _offsets(counts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Where each of `counts` items starts and the last one ends: 0, c0, c0+c1, …"""
    return np.concatenate([[0], np.cumsum(counts)]).astype("<i8")


def _pack_ids(ids: Sequence[str]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    # Not numpy's unicode arrays: those drop trailing NULs and take the longest id's room for every id.
    raw = [i.encode("utf-8", "surrogatepass") for i in ids]
    return np.frombuffer(b"".join(raw), dtype=np.uint8), _offsets(np.array([len(r) for r in raw], dtype="<i8"))


def _unpack_ids(buffer: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> list[str]:
    raw = buffer.tobytes()
    return [raw[a:b].decode("utf-8", "surrogatepass") for a, b in pairwise(offsets.tolist())]
