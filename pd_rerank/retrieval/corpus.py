"""A corpus: files of documents, read in order and checked whole before anything expensive is done with them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from pd_rerank.errors import BadArgument, InvalidData, MissingResource
from pd_rerank.files import DOC_ID_FIELDS, document_text, identifier, read_jsonl, read_lines, run_word

Empty = Literal["error", "skip"]
ENDINGS = (".jsonl", ".json", ".tsv", ".jsonl.gz", ".json.gz", ".tsv.gz")
"""How the names of a corpus folder's files end."""


class Document(NamedTuple):
    """One document of a corpus, with the file and line it stands at."""

    where: str
    doc_id: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A corpus that was read through once: documents with a text and without one, and the SHA-256 of its bytes."""

    path: Path
    documents: int
    empty: int
    sha256: str


def documents(path: str | Path) -> Iterator[Document]:
    """Yield a corpus file's documents in order, ids as strings; a folder's files come in the order of their names.

    JSONL has an id (`_id`, `id`, `docid`, …) and a text (`text`, `contents`, …; a title goes in front); TSV is an
    id, a tab and the text. A malformed line is `InvalidData` with file and line.
    """
    for file in _files(Path(path)):
        if file.name.removesuffix(".gz").endswith(".tsv"):
            for number, line in read_lines(file):
                if not line.strip():
                    continue
                doc_id, tab, text = line.partition("\t")
                if not tab or not doc_id.strip():
                    raise InvalidData(f"{file}:{number}: a line of a .tsv corpus is an id, one tab and a text")
                yield Document(f"{file}:{number}", doc_id.strip(), text)
        else:
            for where, record in read_jsonl(file):
                doc_id = identifier(record, DOC_ID_FIELDS, where=where)
                yield Document(where, doc_id, document_text(record, where=where))


def check_corpus(path: str | Path, *, empty: Empty = "error") -> Corpus:
    """Read a corpus through: every line well formed, every id once and without white space, every text there.

    Documents without text are an error, or counted and left out with `empty="skip"`. All faults are `InvalidData`
    with file and line.
    """
    if empty not in get_args(Empty):
        raise BadArgument(f"unknown choice for documents without text '{empty}'; choose error or skip")
    seen: set[str] = set()
    blank: list[Document] = []
    for document in documents(path):
        run_word(document.doc_id, what=f"{document.where}: document id")
        if document.doc_id in seen:
            first = next(d.where for d in documents(path) if d.doc_id == document.doc_id)
            raise InvalidData(f"{document.where}: document '{document.doc_id}' was at {first} before; keep one of them")
        seen.add(document.doc_id)
        if not document.text.strip():
            blank.append(document)
    if not seen:
        raise InvalidData(f"{path} holds no documents")
    if blank and (empty == "error" or len(blank) == len(seen)):
        raise InvalidData(
            f"{blank[0].where}: document '{blank[0].doc_id}' has no text ({len(blank)} of {len(seen)} have none); give "
            "them one, or leave them out (--empty skip)"
        )
    whole = hashlib.sha256()
    for file in _files(Path(path)):
        with open(file, "rb") as stream:
            for block in iter(lambda: stream.read(1 << 20), b""):
                whole.update(block)
    return Corpus(path=Path(path), documents=len(seen) - len(blank), empty=len(blank), sha256=whole.hexdigest())


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise MissingResource(f"no corpus {path}")
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if file.name.endswith(ENDINGS))
    if not found:
        raise MissingResource(f"{path} holds no corpus files ({', '.join(ENDINGS)})")
    return found


def with_text(corpus: Corpus) -> Iterator[Document]:
    """Yield the documents of a checked corpus that have a text."""
    return (document for document in documents(corpus.path) if document.text.strip())
