"""What the studies' commands share: to run in a folder, to leave out what cannot be run, and to say so."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pd_rerank.errors import PdRerankError
from pd_rerank.evaluation.report import Report, Section, Table, check_destination
from pd_rerank.studies.folder import RunFolder, write_table
from pd_rerank.studies.scorers import failure_of

logger = logging.getLogger("pd_rerank")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NotRun:
    """What was left out, and why."""

    what: str
    why: str
    failed: bool


class Study(Protocol):
    """What a study comes to, as far as its command asks."""

    @property
    def not_run(self) -> Sequence[NotRun]:
        """What was left out."""
        ...


class StudySettings(Protocol):
    """What a study is told, as far as its command asks."""

    @property
    def output(self) -> Path:
        """The run folder."""
        ...

    def model_dump(self, *, mode: str) -> dict[str, Any]:
        """All of it, as plain values."""
        ...


S = TypeVar("S", bound=StudySettings)
T = TypeVar("T", bound=Study)


def carry_out(
    told: Callable[[], S],
    *,
    inputs: Callable[[S], Mapping[str, Path]],
    libraries: Sequence[str],
    run: Callable[[S, RunFolder], T],
    report: Callable[[T], Report],
    timing: Callable[[T], Table],
) -> int:
    """A study from settings to page, in its run folder; returns the exit code: 0, 7 with something failed, an error's.

    `inputs` are the files whose hashes the run records, by name, and `libraries` those whose versions it does.
    """
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO)
    try:
        settings = told()
        with RunFolder(settings.output) as folder:
            check_destination(settings.output / "check")
            folder.record(settings.model_dump(mode="json"), inputs(settings), libraries)
            study = run(settings, folder)
            place = folder.publish(report(study))
            write_table(timing(study), settings.output / "seconds.csv")
    except PdRerankError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    failed = [item for item in study.not_run if item.failed]
    for item in failed:
        print(f"not run: {item.what}: {item.why}", file=sys.stderr)
    print(place / "index.html")
    return 7 if failed else 0


@contextmanager
def about(what: str) -> Iterator[None]:
    """Say before an error's message what it is about."""
    try:
        yield
    except PdRerankError as error:
        raise type(error)(f"{what}: {error}") from error


def attempt(what: str, make: Callable[[], None], not_run: list[NotRun]) -> bool:
    """Do it, or note why it could not be done; what our own code does wrong is raised."""
    try:
        make()
    except Exception as error:
        why = failure_of(error)
        if why is None:
            raise
        logger.warning("%s is left out: %s", what, error, exc_info=not isinstance(error, PdRerankError))
        not_run.append(NotRun(what=what, why=why, failed=True))
        return False
    return True


def left_out(study: Study) -> Section:
    """The report's section of what was not run."""
    rows = tuple((item.what, "failed" if item.failed else "left out", item.why) for item in study.not_run)
    text = "" if rows else "Everything the config names was run."
    tables = (Table(title="Not run", columns=("what", "", "why"), rows=rows),)
    return Section(title="What was not run, and why", text=text, tables=tables)
