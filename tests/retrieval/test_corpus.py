"""A corpus is checked whole, and what is wrong is named by file and line."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest

from pd_rerank.errors import InvalidData, MissingResource
from pd_rerank.retrieval.corpus import check_corpus, documents, with_text
from tests.retrieval.tiny_encoders import write_lines


def test_jsonl_tsv_and_gzip_give_the_same_documents(tmp_path: Path) -> None:
    jsonl = write_lines(
        tmp_path / "c.jsonl", ['{"_id": "d1", "text": "one"}', '{"id": 2, "title": "T", "contents": "two"}']
    )
    tsv = write_lines(tmp_path / "c.tsv", ["d1\tone", "2\tT two"])
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(jsonl.read_bytes()))
    assert [(d.doc_id, d.text) for d in documents(jsonl)] == [("d1", "one"), ("2", "T\ntwo")]
    assert [(d.doc_id, d.text) for d in documents(tsv)] == [("d1", "one"), ("2", "T two")]
    assert [d[1:] for d in documents(tmp_path / "c.jsonl.gz")] == [d[1:] for d in documents(jsonl)]


def test_a_folder_is_its_files_in_order_of_name(tmp_path: Path) -> None:
    write_lines(tmp_path / "b.jsonl", ['{"id": "2", "text": "two"}'])
    write_lines(tmp_path / "a.tsv", ["1\tone"])
    (tmp_path / "notes.txt").write_text("not a corpus")
    assert [d.doc_id for d in documents(tmp_path)] == ["1", "2"]
    assert check_corpus(tmp_path).documents == 2


def test_a_checked_corpus_is_counted_and_hashed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.tsv", ["1\tone", "", "2\ttwo"])
    found = check_corpus(path)
    assert (found.documents, found.empty) == (2, 0)
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("c.jsonl", ['{"id": "1", "text": "a"}', '{"id": "2", "tex'], r"c\.jsonl:2: not JSON"),
        (
            "c.jsonl",
            ['{"id": "1", "text": "a"}', '{"id": "1", "text": "b"}'],
            r"c\.jsonl:2: document '1' was at .*c\.jsonl:1",
        ),
        ("c.jsonl", ['{"id": "1", "text": "a"}', '{"id": "2", "text": " "}'], r"c\.jsonl:2: document '2' has no text"),
        ("c.jsonl", ['{"id": "1"}'], r"c\.jsonl:1: no text; give one of text"),
        ("c.jsonl", ['{"text": "a"}'], r"c\.jsonl:1: no id"),
        ("c.jsonl", ['{"id": "a b", "text": "a"}'], r"c\.jsonl:1: document id 'a b' is empty or holds white space"),
        ("c.tsv", ["1\ta", "2 b"], r"c\.tsv:2: a line of a \.tsv corpus is an id, one tab and a text"),
        ("c.tsv", ["", " "], "holds no documents"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, name: str, lines: list[str], message: str) -> None:
    with pytest.raises(InvalidData, match=message):
        check_corpus(write_lines(tmp_path / name, lines))


def test_documents_without_text_are_counted_and_left_out_where_asked(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.tsv", ["1\tone", "2\t", "3\tthree"])
    with pytest.raises(InvalidData, match="1 of 3 have none"):
        check_corpus(path)
    found = check_corpus(path, empty="skip")
    assert (found.documents, found.empty) == (2, 1)
    assert [d.doc_id for d in with_text(found)] == ["1", "3"]
    with pytest.raises(InvalidData, match="2 of 2 have none"):
        check_corpus(write_lines(path, ["1\t", "2\t"]), empty="skip")


def test_a_corpus_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingResource, match="no corpus"):
        check_corpus(tmp_path / "c.jsonl")
    with pytest.raises(MissingResource, match="holds no corpus files"):
        check_corpus(tmp_path)
