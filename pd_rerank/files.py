"""Files written whole or not at all, and read with the line number of what is wrong."""

from __future__ import annotations

import codecs
import datetime
import errno
import glob
import gzip
import hashlib
import itertools
import json
import logging
import math
import os
import platform
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO, Any, NamedTuple

from pd_rerank import __version__
from pd_rerank.errors import BadArgument, InvalidData, MissingResource

if sys.platform != "win32":  # there two processes in one folder are the user's own care
    import fcntl

logger = logging.getLogger("pd_rerank")

CARD = "reranker.json"
"""What an adapter's folder records of the prompt and training its weights are of."""

SCORED_WITH = ("numpy", "torch", "transformers", "tokenizers", "peft")
"""The libraries whose versions can move a score."""

TEXT_FIELDS = ("text", "segment", "contents", "content", "body", "passage")
"""Where a document's text is looked for, in this order (rank_llm's)."""

DOC_ID_FIELDS = ("_id", "id", "docid", "doc_id", "pid")
QUERY_ID_FIELDS = ("query_id", "qid", "_id", "id")
QUERY_FIELDS = ("text", "query", "title")

_TOPIC = "a topic is an id, one tab and the query's text"
_EMPTY_TOPIC = "empty line, skipped; if a query belongs there, write it, else drop the line"
_RUN_LINE = "a run line has six (query id, Q0, document id, rank, score, tag), none with a space inside"
_QREL_LINE = "a judgement has four (query id, 0, document id, grade), none with a space inside"


@contextmanager
def whole_file(path: str | Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a temporary neighbour of `path` for writing and rename it into place on success only."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
    try:
        with os.fdopen(handle, mode, **text) as stream:  # type: ignore[call-overload]
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o666 & ~umask())
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def whole_folder(path: str | Path, *, holds: Collection[str]) -> Iterator[Path]:
    """Give an empty temporary neighbour of `path` to fill and rename it into place on success only.

    `holds` names the entries the folder is for. A folder already at `path` is replaced if it holds
    nothing else; otherwise it is refused, since replacing it would delete what is not ours.
    """
    target = Path(path)
    check_folder(target, holds=holds)
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    try:
        yield fresh
        os.chmod(fresh, 0o777 & ~umask())
        if not target.exists():
            os.replace(fresh, target)
        elif _exchange(fresh, target):
            shutil.rmtree(fresh)
        else:
            old = fresh.with_suffix(".old")
            os.replace(target, old)
            try:
                os.replace(fresh, target)
            except BaseException:
                os.replace(old, target)
                raise
            shutil.rmtree(old)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change places in one step, so that a kill finds either where it was; False where none can."""
    import ctypes

    a, b = os.fsencode(one), os.fsencode(other)
    try:
        libc = ctypes.CDLL(None)
        if sys.platform == "darwin":
            return bool(libc.renamex_np(a, b, 2) == 0)  # RENAME_SWAP
        return bool(libc.renameat2(-100, a, -100, b, 2) == 0)  # AT_FDCWD twice, RENAME_EXCHANGE
    except (AttributeError, OSError, TypeError):  # another system's C library
        return False


def clear_left_overs(path: str | Path) -> None:
    """Delete what killed processes left beside `path` of folders that `whole_folder` was to put there."""
    target = Path(path)
    for ending in ("part", "old"):  # eight letters are what mkdtemp puts between
        for left_over in target.parent.glob(f".{glob.escape(target.name)}.????????.{ending}"):
            shutil.rmtree(left_over, ignore_errors=True)


def hold_folder(path: str | Path, *, busy: str) -> int | None:
    """Keep other processes out of a folder; returns the handle whose closing lets it go, as does the process's end.

    A folder that another process holds is `BadArgument` with the message `busy`. None where folders cannot be locked.
    """
    if sys.platform == "win32":
        return None
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise BadArgument(busy) from None
        logger.debug("%s cannot be locked (%s)", path, error)
        return None
    return lock


def check_place(path: str | Path) -> None:
    """Refuse a path that nothing can be written at: below a file, or where this user may not write."""
    above = next(place for place in Path(path).absolute().parents if place.exists())
    if not above.is_dir():
        raise BadArgument(f"{path} cannot be written: {above} is a file; name another place")
    if not os.access(above, os.W_OK | os.X_OK):
        raise BadArgument(f"{path} cannot be written: no permission in {above}; name another place")


def check_folder(path: str | Path, *, holds: Collection[str]) -> None:
    """Refuse what `whole_folder` could not replace: a file, or a folder that holds anything but `holds`."""
    target = Path(path)
    check_place(target)
    if not target.exists():
        return
    if not target.is_dir():
        raise BadArgument(f"{target} is a file; name a folder")
    foreign = sorted(entry.name for entry in target.iterdir() if entry.name not in holds)
    if foreign:
        ours = ", ".join(sorted(holds))
        raise BadArgument(f"{target} holds '{foreign[0]}', which is none of {ours}; name another folder")


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented UTF-8 JSON, whole or not at all. NaN and infinity are refused."""
    with whole_file(path) as stream:
        json.dump(value, stream, indent=2, ensure_ascii=False, allow_nan=False)
        stream.write("\n")


def write_jsonl(path: str | Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line in UTF-8, whole or not at all. NaN and infinity are refused."""
    with whole_file(path, "wb") as stream:
        for record in records:
            line = json.dumps(record, ensure_ascii=False, allow_nan=False)
            try:
                stream.write(line.encode() + b"\n")
            except UnicodeEncodeError:  # half a surrogate pair has no UTF-8, but JSON can spell it
                stream.write(json.dumps(record, allow_nan=False).encode() + b"\n")


def read_json(path: str | Path) -> Any:
    """Read one JSON file; a missing or malformed one is an error that names it."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MissingResource(f"no file {path}") from error
    except IsADirectoryError as error:
        raise MissingResource(f"{path} is a folder, a JSON file is wanted") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InvalidData(f"{path} is not JSON: {error}") from error


def sha256_file(path: str | Path) -> str:
    """The SHA-256 of a file's bytes, as hex."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """The SHA-256 of a JSON value, whatever the order of its keys, as hex; what JSON does not know goes in as text."""
    said = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=str)
    return hashlib.sha256(said.encode()).hexdigest()


def versions(libraries: Iterable[str] = ()) -> dict[str, str | None]:
    """Versions of Python, this package and the named distributions; None for those not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "pd_rerank": __version__}
    for library in libraries:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            found[library] = None
    return found


def manifest(
    settings: Mapping[str, Any],
    *,
    files: Mapping[str, str | Path] | None = None,
    libraries: Iterable[str] = (),
) -> dict[str, Any]:
    """What a folder records of its making: `settings`, versions, files' SHA-256 by name, the time (UTC)."""
    return {
        **settings,
        "versions": versions(libraries),
        "sha256": {name: sha256_file(path) for name, path in (files or {}).items()},
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


# -- reading lines ----------------------------------------------------------------------------------------


def read_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, line without its end), blank lines included.

    LF, CRLF and CR end lines, mixed as they come; a byte-order mark is dropped; `.gz` is unpacked.
    Text that is not UTF-8 is `InvalidData` with file and line.
    """
    number = 0
    try:
        with gzip.open(path, "rb") if Path(path).suffix == ".gz" else open(path, "rb") as stream:
            for raw in stream:
                if not number:
                    raw = raw.removeprefix(codecs.BOM_UTF8)
                for piece in raw.removesuffix(b"\n").removesuffix(b"\r").split(b"\r"):
                    number += 1
                    yield number, piece.decode("utf-8")
    except FileNotFoundError as error:
        raise MissingResource(f"no file {path}") from error
    except IsADirectoryError as error:
        raise MissingResource(f"{path} is a folder, a file is wanted") from error
    except UnicodeDecodeError as error:
        raise InvalidData(
            f"{path}:{number}: byte {error.object[error.start]:#04x} is not UTF-8; convert the file to UTF-8"
        ) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InvalidData(f"{path}:{number + 1}: damaged gzip file ({error}); fetch it again") from error


def read_jsonl(path: str | Path, *, warn: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("file:line", object) per line of a JSONL file; blank lines are skipped but counted.

    With `warn`, what is said of them. A line that is not one JSON object, or holds NaN or Infinity, is `InvalidData`
    with file and line.
    """
    for number, line in read_lines(path):
        where = f"{path}:{number}"
        if not line.strip():
            if warn:
                logger.warning("%s: %s", where, warn)
            continue
        try:
            record = json.loads(line, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            at = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            what = getattr(error, "msg", str(error)) + at
            raise InvalidData(f"{where}: not JSON ({what}); every line is one whole JSON object") from error
        if not isinstance(record, dict):
            raise InvalidData(f"{where}: a JSON object is wanted, this is a {type(record).__name__}")
        yield where, record


def identifier(record: Mapping[str, Any], fields: Sequence[str], *, where: str) -> str:
    """The id of a record: the first of `fields` it has, as a string.

    Whole numbers become their decimal digits; "007", "NA" and "null" stay as they are. Anything else,
    the empty string too, is `InvalidData`.
    """
    for field in fields:
        value = record.get(field)
        if value is None:
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str):
            raise InvalidData(f"{where}: id '{field}' is {value!r}; write it as a string")
        if not value or _HALF_PAIR.search(value):
            raise InvalidData(f"{where}: id '{field}' is {value!r}, which no file can carry; give it a name")
        return value
    raise InvalidData(f"{where}: no id; give one of {', '.join(fields)}, the line has {_names(record)}")


def document_text(document: Mapping[str, Any] | str, *, where: str) -> str:
    """A document's text: a plain string, or the first of `TEXT_FIELDS` it has; a title goes in front."""
    if isinstance(document, str):
        return document
    text = _first_text(document, TEXT_FIELDS, where=where)
    title = document.get("title")
    if title is not None and not isinstance(title, str):
        raise InvalidData(f"{where}: 'title' is a {type(title).__name__}, not a string")
    return "\n".join(part for part in (title, text) if part)


def finite(value: Any, *, what: str, where: str) -> float:
    """`value` as a finite float: a JSON number or a plain decimal string; anything else is `InvalidData`."""
    try:
        if isinstance(value, bool) or (isinstance(value, str) and "_" in value):
            raise ValueError
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidData(f"{where}: {what} {value!r} is not a number") from error
    if not math.isfinite(number):
        raise InvalidData(f"{where}: {what} is {value}; a finite number is wanted")
    return number


# -- topics, corpora, runs, judgements ---------------------------------------------------------------------


def read_topics(path: str | Path, *, allow_empty: bool = False) -> dict[str, str]:
    """Query texts by id, in file order: JSONL where the name ends in .jsonl or .jsonl.gz, else id, tab, text.

    Blank lines are skipped with a warning. An id without a text is refused unless `allow_empty`; so is an
    id seen before.
    """
    topics: dict[str, str] = {}
    for where, query_id, text in _topic_lines(path):
        if query_id in topics:
            raise InvalidData(f"{where}: query '{query_id}' was there before; give every query its own id")
        if not text.strip() and not allow_empty:
            raise InvalidData(f"{where}: query '{query_id}' has no text; write one or drop the line")
        topics[query_id] = text
    if not topics:
        raise InvalidData(f"{path} holds no queries")
    return topics


def _topic_lines(path: str | Path) -> Iterator[tuple[str, str, str]]:
    if Path(path).name.removesuffix(".gz").endswith((".jsonl", ".json")):
        for where, record in read_jsonl(path, warn=_EMPTY_TOPIC):
            yield (
                where,
                identifier(record, QUERY_ID_FIELDS, where=where),
                _first_text(record, QUERY_FIELDS, where=where),
            )
        return
    for number, line in read_lines(path):
        where = f"{path}:{number}"
        if not line.strip():
            logger.warning("%s: %s", where, _EMPTY_TOPIC)
            continue
        query_id, tab, text = line.partition("\t")
        if not tab:
            hint = "; name JSON lines .jsonl" if line.lstrip().startswith("{") else ""
            raise InvalidData(f"{where}: no tab; {_TOPIC}{hint}")
        if not query_id.strip():
            raise InvalidData(f"{where}: nothing before the tab; {_TOPIC}")
        yield where, query_id.strip(), text.strip()


def read_corpus(path: str | Path, *, wanted: Collection[str] | None = None) -> Iterator[tuple[str, str]]:
    """Yield (document id, text) of a corpus, JSONL or TSV (id, tab, text), in one reading; `wanted`: those ids only.

    An id that comes twice among those yielded is `InvalidData` with both lines.
    """
    seen: dict[str, str] = {}
    for where, doc_id, document in _corpus_lines(path):
        if wanted is not None and doc_id not in wanted:
            continue
        if doc_id in seen:
            raise InvalidData(f"{where}: document '{doc_id}' was at {seen[doc_id]} before; keep one of them")
        seen[doc_id] = where
        yield doc_id, document_text(document, where=where)


def _corpus_lines(path: str | Path) -> Iterator[tuple[str, str, Mapping[str, Any] | str]]:
    if not Path(path).name.removesuffix(".gz").endswith(".tsv"):
        for where, record in read_jsonl(path):
            yield where, identifier(record, DOC_ID_FIELDS, where=where), record
        return
    for number, line in read_lines(path):
        if not line.strip():
            continue
        doc_id, tab, text = line.partition("\t")
        if not tab or not doc_id.strip():
            raise InvalidData(f"{path}:{number}: a corpus line is id, tab, text; name JSON lines .jsonl")
        yield f"{path}:{number}", doc_id.strip(), text.strip()


class RunHit(NamedTuple):
    """One line of a run: a document with its rank, as written, and its score."""

    doc_id: str
    rank: int
    score: float


def read_run(path: str | Path) -> dict[str, list[RunHit]]:
    """A TREC run by query, in file order, each query's hits by score descending, then document id.

    Six columns between tabs or spaces; ids stay strings ("007", "NA"). Another number of columns, a score
    or rank that is no number, and a document twice in a query are `InvalidData` with file and line. Scores
    rule, as in trec_eval; where a query's ranks say otherwise, a warning says so.
    """
    run: dict[str, dict[str, RunHit]] = {}
    for number, line in read_lines(path):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        columns = _SPACES.split(line.strip(" \t"))
        if len(columns) != 6:
            raise InvalidData(f"{where}: {len(columns)} columns; {_RUN_LINE}")
        query_id, _, doc_id, rank, score, _ = columns
        hits = run.setdefault(query_id, {})
        if doc_id in hits:
            raise InvalidData(f"{where}: query '{query_id}' holds '{doc_id}' twice; keep one of them")
        hits[doc_id] = RunHit(doc_id, _whole(rank, what="rank", where=where), finite(score, what="score", where=where))
    ordered = {qid: sorted(hits.values(), key=lambda hit: (-hit.score, hit.doc_id)) for qid, hits in run.items()}
    odd = [qid for qid, ranked in ordered.items() if not _ranks_agree(ranked)]
    if odd:
        logger.warning(
            "%s: ranks and scores disagree in %d queries, first '%s'; scores are followed",
            path,
            len(odd),
            odd[0],
        )
    return ordered


def write_run(
    path: str | Path, rankings: Iterable[tuple[str, Sequence[tuple[str, float]]]], *, tag: str = "pd_rerank"
) -> None:
    """Write (query id, [(document id, score), best first]) as a TREC run, whole or not at all.

    Ranks count from 1 and scores strictly decrease, so that every reader sees this order. Six decimals
    are printed; a score that would not lie below the one before it is lowered to one step under that:
    0.000001, or single precision's spacing there if wider, since trec_eval reads scores in single precision.
    Rising or non-finite scores, a document twice, and ids or tags with white space are refused.
    """
    if not tag or any(c.isspace() for c in tag):
        raise BadArgument(f"run tag {tag!r} is empty or holds white space; use one word")
    written: set[str] = set()
    with whole_file(path) as stream:
        for query_id, ranking in rankings:
            run_word(query_id, what="query id")
            if query_id in written:
                raise InvalidData(f"query '{query_id}' is ranked twice; a run holds every query once")
            written.add(query_id)
            seen: set[str] = set()
            for doc_id, _ in ranking:
                run_word(doc_id, what=f"query '{query_id}': document id")
                if doc_id in seen:
                    raise InvalidData(f"query '{query_id}' ranks '{doc_id}' twice; keep one of them")
                seen.add(doc_id)
            printed = _falling([score for _, score in ranking], query_id=query_id)
            for rank, ((doc_id, _), shown) in enumerate(zip(ranking, printed, strict=True), 1):
                stream.write(f"{query_id} Q0 {doc_id} {rank} {shown} {tag}\n")


def run_word(word: str, *, what: str) -> str:
    """Return `word`, or raise `InvalidData` where a TREC run, split at white space, cannot hold it."""
    if not word or any(c.isspace() for c in word) or _HALF_PAIR.search(word):
        raise InvalidData(f"{what} {word!r} is empty or holds white space; a TREC run cannot hold it, rename it")
    return word


def read_qrels(path: str | Path) -> dict[str, dict[str, int]]:
    """Judgements by query and document, from four columns between tabs or spaces.

    Grades are whole numbers, negative ones included; a pair judged twice is `InvalidData`.
    """
    qrels: dict[str, dict[str, int]] = {}
    for number, line in read_lines(path):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        columns = _SPACES.split(line.strip(" \t"))
        if len(columns) != 4:
            raise InvalidData(f"{where}: {len(columns)} columns; {_QREL_LINE}")
        query_id, _, doc_id, grade = columns
        judged = qrels.setdefault(query_id, {})
        if doc_id in judged:
            raise InvalidData(f"{where}: query '{query_id}' judges '{doc_id}' twice; keep one line")
        judged[doc_id] = _whole(grade, what="grade", where=where)
    return qrels


_SPACES = re.compile(r"[ \t]+")
"""Not `str.split`: that also splits at no-break and ideographic spaces, which ids may hold."""

_HALF_PAIR = re.compile("[\ud800-\udfff]")

_SINGLE = 2.0 ** (52 - 23)
"""Single precision's spacing in units of double precision's."""


def _falling(scores: Sequence[float], *, query_id: str) -> list[str]:
    """Print scores that do not rise so that they fall; see `write_run`. Counts in millionths, exactly."""
    printed: list[str] = []
    before: int | None = None
    for rank, score in enumerate(scores, 1):
        if not math.isfinite(score) or (rank > 1 and score > scores[rank - 2]):
            raise InvalidData(f"query '{query_id}', rank {rank}: score {score} is no number or above the one before")
        units = int(f"{score:.6f}".replace(".", ""))
        if before is not None:
            step = max(1, math.ceil(math.ulp(before / 1e6) * _SINGLE * 1e6))
            units = min(units, before - step)
        whole, part = divmod(abs(units), 1_000_000)
        printed.append(f"{'-' if units < 0 else ''}{whole}.{part:06d}")
        before = units
    return printed


def _first_text(record: Mapping[str, Any], fields: Sequence[str], *, where: str) -> str:
    for field in fields:
        value = record.get(field)
        if value is None:
            continue
        if not isinstance(value, str):
            raise InvalidData(f"{where}: '{field}' is a {type(value).__name__}, not a string")
        return value
    raise InvalidData(f"{where}: no text; give one of {', '.join(fields)}, the line has {_names(record)}")


def _names(record: Mapping[str, Any]) -> str:
    return ", ".join(record) or "no fields"


def _whole(text: str, *, what: str, where: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise InvalidData(f"{where}: {what} '{text}' is not a whole number")
    return int(text)


def _ranks_agree(hits: Sequence[RunHit]) -> bool:
    return not any(a.rank > b.rank and a.score > b.score for a, b in itertools.pairwise(hits))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def umask() -> int:
    """The bits this process keeps off new files and folders."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
