"""The folder of a run: stages kept under what they depend on, scores in shards, tables, figures and one page."""

from __future__ import annotations

import csv
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pd_rerank.errors import BadArgument, InvalidData
from pd_rerank.evaluation.page import page
from pd_rerank.evaluation.report import Cell, Report, Table, as_json, as_markdown, defined
from pd_rerank.files import (
    clear_left_overs,
    hold_folder,
    read_json,
    sha256_file,
    sha256_json,
    versions,
    whole_file,
    whole_folder,
    write_json,
)
from pd_rerank.pool import Pool

_LONGEST = 80
"""Characters in the name of a scorer or a collection, which is part of file names."""

_REPORT = ("index.html", "report.md", "report.json", "tables", "figures")


class Scorer(Protocol):
    """What scores candidates: one list of scores per pool, in pool order, None where there is none."""

    def score(self, pools: Sequence[Pool]) -> list[list[float | None]]:
        """Score every candidate of every pool."""
        ...

    def describe(self) -> dict[str, Any]:
        """What decides about the scores, as plain values."""
        ...

    def tokens(self) -> dict[str, int | None]:
        """Tokens read and written so far, by name, None where they are not known; empty where nobody counts."""
        ...

    def presentations(self) -> list[int] | None:
        """How many presentations each pool of the last `score` took; None where a pool is read as it is, once."""
        ...


class RunFolder:
    """A folder in which a study runs, stops at any moment, and goes on; held by one process at a time.

    Every stage lies under a name that ends in a digest of all it depends on and appears whole or not at all: what is
    there is taken as it is, and a changed setting makes another stage beside it instead of spoiling it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise BadArgument(f"the run folder {str(folder)!r} cannot be made: {error}; name another") from error
        busy = f"another process is working in {self.folder}; wait for it, or name another folder"
        self._lock = hold_folder(self.folder, busy=busy)
        for left_over in self.folder.rglob(".*.????????.part"):  # of files a killed run was writing
            if left_over.is_file():
                left_over.unlink()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Let another process have the folder."""
        lock, self._lock = getattr(self, "_lock", None), None
        if lock is not None:
            os.close(lock)

    def record(self, settings: Mapping[str, Any], inputs: Mapping[str, Path], libraries: Sequence[str]) -> None:
        """Write run.json: settings, versions, and the SHA-256 of the files the run starts from."""
        hashes = {name: sha256_file(path) for name, path in inputs.items()}
        made = {"settings": settings, "inputs": hashes, "versions": versions(libraries)}
        write_json(self.folder / "run.json", made)

    def place(self, name: str, key: Any) -> Path:
        """Where the stage of that name and key lies, or will."""
        return self.folder / f"{slug(name)}-{sha256_json(key)[:12]}"

    def stage(self, name: str, key: Any, make: Callable[[Path], None]) -> Path:
        """The folder of a stage: as it was made, or made now by `make`, which fills an empty folder."""
        place = self.place(name, key)
        if not place.exists():
            clear_left_overs(place)
            with whole_folder(place, holds=()) as fresh:
                make(fresh)
                write_json(fresh / "key.json", key)
        return place

    def scored(
        self, name: str, key: Any, pools: Sequence[Pool], open_scorer: Callable[[], Scorer], *, size: int = 32
    ) -> Iterator[Mapping[str, Any]]:
        """Score pools in shards of `size`, each kept as it is done; yields each shard's record, in order.

        The scorer is opened when the first missing shard is come to. A record holds `queries` (query_id, doc_ids,
        scores, and presentations where they are counted), `seconds` (wall, cpu: from pools handed over to scores in
        hand, loading left out) and `tokens`.
        """
        place = self.place(name, key)
        scorer: Scorer | None = None
        for number, start in enumerate(range(0, len(pools), size)):
            block, shard = pools[start : start + size], place / f"shard-{number:05}.json"
            if not shard.exists():
                scorer = open_scorer() if scorer is None else scorer
                write_json(place / "key.json", key)
                write_json(shard, _scored(scorer, block))
            record = read_json(shard)
            held = [(q["query_id"], q["doc_ids"]) for q in record["queries"]]
            if held != [(pool.query_id, list(pool.doc_ids)) for pool in block]:
                raise InvalidData(f"{shard} holds scores of other candidates; remove {place} to score them again")
            yield record

    def publish(self, report: Report) -> Path:
        """Write the report: index.html, report.md, report.json, tables/*.csv, figures/*.svg, whole or not at all."""
        place = self.folder / "report"
        clear_left_overs(place)
        with whole_folder(place, holds=_REPORT) as fresh:
            (fresh / "tables").mkdir()
            (fresh / "figures").mkdir()
            for section in report.sections:
                for table in section.tables:
                    write_table(table, fresh / "tables" / f"{slug(table.title)}.csv")
                for picture in section.pictures:
                    _write(fresh / "figures" / f"{slug(picture.title)}.svg", picture.svg)
            write_json(fresh / "report.json", as_json(report))
            _write(fresh / "report.md", as_markdown(report))
            _write(fresh / "index.html", page(report))
        return place


def write_table(table: Table, path: Path) -> None:
    """Write a table as CSV, numbers as Python spells them, nothing for None."""
    with whole_file(path) as stream:
        rows = csv.writer(stream, lineterminator="\n")
        rows.writerow(table.columns)
        rows.writerows([_cell(cell) for cell in row] for row in table.rows)


def slug(name: str) -> str:
    """A name as part of a path: lower-case letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "-"


def check_names(what: str, names: Iterable[str]) -> None:
    """Refuse names whose files would be the same, or that are too long for files."""
    seen: dict[str, str] = {}
    for name in names:
        if len(name) > _LONGEST:
            raise ValueError(f"{what} '{name[:20]}…' has a name of {len(name)} characters; {_LONGEST} are enough")
        if other := seen.get(slug(name)):
            raise ValueError(f"{what}s '{other}' and '{name}' would have the same files; rename one of them")
        seen[slug(name)] = name


def _scored(scorer: Scorer, pools: Sequence[Pool]) -> dict[str, Any]:
    before = scorer.tokens()
    wall, cpu = time.perf_counter(), time.process_time()
    scores = scorer.score(pools)
    seconds = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    after = scorer.tokens()
    queries: list[dict[str, Any]] = [
        {"query_id": pool.query_id, "doc_ids": list(pool.doc_ids), "scores": [defined(score) for score in found]}
        for pool, found in zip(pools, scores, strict=True)
    ]
    for query, taken in zip(queries, scorer.presentations() or (), strict=False):
        query["presentations"] = taken
    return {
        "queries": queries,
        "seconds": seconds,
        "tokens": {
            name: None if now is None or (was := before.get(name, 0)) is None else now - was
            for name, now in after.items()
        },
        "scorer": scorer.describe(),
        "versions": versions(("numpy", "torch", "transformers", "rerankers")),
    }


def _cell(cell: Cell) -> str:
    if cell is None:
        return ""
    return repr(cell) if isinstance(cell, float) else str(cell)


def _write(path: Path, text: str) -> None:
    with whole_file(path) as stream:
        stream.write(text)
