"""Files: whole or not at all, and read with the line of what is wrong."""

from __future__ import annotations

import errno
import gzip
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_rerank import files
from pd_rerank.errors import BadArgument, InvalidData, MissingResource

RUN_LINE = "q1 Q0 d1 1 9.5 tag"


@pytest.fixture
def put(tmp_path: Path) -> Callable[[str, str | bytes], Path]:
    def write(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def single(x: float) -> float:
    """x rounded to single precision."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


# -- whole or not at all -----------------------------------------------------------------------------------


def test_a_file_that_fails_half_way_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(TypeError), files.whole_file(path) as stream:
        stream.writelines(["half", None])
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_full_disk_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for write in (
        lambda: files.write_run(tmp_path / "run.trec", [("q", [("d", 1.0)])]),
        lambda: files.write_jsonl(tmp_path / "x.jsonl", [{"a": 1}]),
        lambda: files.write_json(tmp_path / "x.json", {"a": 1}),
    ):
        with pytest.raises(OSError, match="No space left"):
            write()
    assert os.listdir(tmp_path) == []


def test_a_folder_that_fails_half_way_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    with files.whole_folder(folder, holds=["a"]) as fresh:
        (fresh / "a").write_text("old")
    with pytest.raises(FileNotFoundError), files.whole_folder(folder, holds=["a"]) as fresh:
        os.rename(fresh / "missing", fresh / "a")
    assert (folder / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["set"]


def test_a_folder_is_replaced_but_never_one_that_holds_other_files(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    for text in ("one", "two"):
        with files.whole_folder(folder, holds=["a"]) as fresh:
            (fresh / "a").write_text(text)
    assert (folder / "a").read_text() == "two"
    (folder / "thesis.tex").write_text("do not delete")
    with (
        pytest.raises(BadArgument, match=r"holds 'thesis.tex', which is none of a; name another"),
        files.whole_folder(folder, holds=["a"]),
    ):
        pass
    assert (folder / "thesis.tex").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from pd_rerank import files

target = Path(sys.argv[1])

def write(text):
    with files.whole_folder(target, holds=["a", "b"]) as fresh:
        (fresh / "a").write_text(text)
        (fresh / "b").write_text(text)

if sys.argv[2] == "apart":
    files._exchange = lambda one, other: False
write("old")
seen = []
for last in range(1000):
    child = os.fork()
    if not child:
        left = last
        def hook(event, args):
            global left
            if event.startswith(("os.", "shutil.", "open", "ctypes.")):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        write("new")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    there = sorted(path.read_text() for path in target.iterdir()) if target.exists() else ["absent"]
    seen.append("/".join(there))
    if status == 0:
        break
    if seen[-1] != "old/old":
        write("old")
print(*seen)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="folders change places in one step on Linux")
def test_a_folder_is_whole_whenever_its_writer_is_killed(tmp_path: Path) -> None:
    def states(how: str) -> list[str]:
        command = [sys.executable, "-c", KILLED, str(tmp_path / how / "set"), how]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent)
        return done.stdout.split()

    seen = states("exchanged")
    assert len(seen) > 8
    assert set(seen) == {"old/old", "new/new"}
    assert seen[-1] == "new/new"
    assert "absent" in states("apart")  # what the exchange is for


def test_a_folder_does_not_replace_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(BadArgument, match="is a file"), files.whole_folder(tmp_path / "f", holds=[]):
        pass


def test_written_files_have_the_permissions_of_ordinary_files(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    files.write_json(tmp_path / "ours.json", {})
    assert (tmp_path / "ours.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_manifest_names_versions_hashes_and_time(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    record = files.manifest({"depth": 3}, files={"a": tmp_path / "a"}, libraries=["numpy", "no-such-library"])
    assert record["depth"] == 3
    assert record["sha256"]["a"] == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert set(record["versions"]) == {"python", "pd_rerank", "numpy", "no-such-library"}
    assert record["versions"]["no-such-library"] is None
    assert record["created"].endswith("+00:00")


def test_json_lines_refuse_nan_and_spell_out_what_utf8_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_jsonl(tmp_path / "x.jsonl", [{"a": float("nan")}])
    files.write_jsonl(tmp_path / "x.jsonl", [{"a": "é"}, {"a": "half \ud83d"}])
    assert (tmp_path / "x.jsonl").read_bytes() == '{"a": "é"}\n'.encode() + b'{"a": "half \\ud83d"}\n'


# -- lines -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_line_ends_and_byte_order_marks_do_not_matter(
    put: Callable[[str, str | bytes], Path], end: str, mark: bytes
) -> None:
    path = put("t.tsv", mark + end.join(["q1\tone", "q2\tzwei ü", ""]).encode())
    assert files.read_topics(path) == {"q1": "one", "q2": "zwei ü"}


def test_mixed_line_ends_keep_their_count(put: Callable[[str, str | bytes], Path]) -> None:
    assert list(files.read_lines(put("a", b"1\r\n2\n\r\n4\r5\n"))) == [(1, "1"), (2, "2"), (3, ""), (4, "4"), (5, "5")]


def test_line_separators_inside_a_json_text_do_not_end_the_line(put: Callable[[str, str | bytes], Path]) -> None:
    path = put("c.jsonl", '{"_id": "a", "text": "x\u2028y\x85z"}\n')
    assert list(files.read_corpus(path)) == [("a", "x\u2028y\x85z")]


def test_what_is_not_utf8_is_named_with_its_line(put: Callable[[str, str | bytes], Path]) -> None:
    with pytest.raises(InvalidData, match=r"t\.tsv:2: byte 0xfc is not UTF-8"):
        files.read_topics(put("t.tsv", b"q1\tone\nq2\tzw\xfclf\n"))


def test_gzip_is_unpacked_and_a_damaged_one_is_named(put: Callable[[str, str | bytes], Path]) -> None:
    packed = gzip.compress(b'{"_id": 1, "text": "a"}\n' * 1)
    assert list(files.read_corpus(put("c.jsonl.gz", packed))) == [("1", "a")]
    with pytest.raises(InvalidData, match="damaged gzip"):
        list(files.read_corpus(put("d.jsonl.gz", packed[:-9])))
    with pytest.raises(InvalidData, match="damaged gzip"):
        list(files.read_corpus(put("e.jsonl.gz", b"plain text")))


@pytest.mark.parametrize("reader", [files.read_topics, files.read_run, files.read_qrels, files.read_json])
def test_a_wrong_path_is_a_missing_resource(reader: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(MissingResource, match=r"no file .*nowhere"):
        reader(tmp_path / "nowhere")
    with pytest.raises(MissingResource, match="is a folder"):
        reader(tmp_path)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"_id": "b", "text"', r"c\.jsonl:3: not JSON \(Expecting ':' delimiter at column 20\)"),
        ('{"_id": "b", "text": "t", "x": NaN}', r"c\.jsonl:3: not JSON \(NaN is not a JSON number\)"),
        ('{"_id": "b", "text": "t", "x": -Infinity}', r"c\.jsonl:3: not JSON \(-Infinity is not"),
        ('["b", "t"]', r"c\.jsonl:3: a JSON object is wanted, this is a list"),
        ('{"text": "t"}', r"c\.jsonl:3: no id; give one of _id, id, docid, doc_id, pid, the line has text"),
        ('{"_id": null, "text": "t"}', r"c\.jsonl:3: no id"),
        ('{"_id": 1.5, "text": "t"}', r"c\.jsonl:3: id '_id' is 1\.5; write it as a string"),
        ('{"_id": true, "text": "t"}', r"c\.jsonl:3: id '_id' is True"),
        ('{"_id": "", "text": "t"}', r"c\.jsonl:3: id '_id' is '', which no file can carry"),
        ('{"_id": "b", "abstract": "t"}', r"c\.jsonl:3: no text; give one of text, segment, .*has _id, abstract"),
        ('{"_id": "b", "text": ["t"]}', r"c\.jsonl:3: 'text' is a list, not a string"),
        ('{"_id": "b", "text": "t", "title": 7}', r"c\.jsonl:3: 'title' is a int, not a string"),
        ('{"_id": "a", "text": "t"}', r"c\.jsonl:3: document 'a' was at .*c\.jsonl:1 before"),
        ("[" * 100_000, r"c\.jsonl:3: not JSON"),
        ('{"_id": ' + "9" * 5000 + ', "text": "t"}', r"c\.jsonl:3: not JSON \(Exceeds the limit"),
    ],
)
def test_a_corrupt_corpus_line_is_named(put: Callable[[str, str | bytes], Path], line: str, says: str) -> None:
    path = put("c.jsonl", '{"_id": "a", "text": "t"}\n\n' + line + "\n")
    with pytest.raises(InvalidData, match=says):
        list(files.read_corpus(path))


def test_ids_stay_what_they_are(put: Callable[[str, str | bytes], Path]) -> None:
    ids = ["007", "NA", "null", "None", "1e5", "été", "文書", "🙂", "1.0", "-0"]
    lines = "".join(json.dumps({"_id": i, "text": "t"}) + "\n" for i in ids)
    assert [i for i, _ in files.read_corpus(put("c.jsonl", lines))] == ids
    run = put("r.trec", "".join(f"{i} Q0 {i} 1 1.0 t\n" for i in ids))
    assert list(files.read_run(run)) == ids
    assert [hits[0].doc_id for hits in files.read_run(run).values()] == ids
    assert list(files.read_topics(put("t.tsv", "".join(f"{i}\tx\n" for i in ids)))) == ids
    qrels = files.read_qrels(put("q.txt", "".join(f"{i} 0 {i} 1\n" for i in ids)))
    assert qrels == {i: {i: 1} for i in ids}


def test_numeric_json_ids_become_their_digits(put: Callable[[str, str | bytes], Path]) -> None:
    path = put("c.jsonl", '{"id": 12345678901234567890123, "text": "t"}\n{"docid": 7, "contents": "u"}\n')
    assert [i for i, _ in files.read_corpus(path)] == ["12345678901234567890123", "7"]


def test_text_is_looked_for_in_order_and_a_title_goes_in_front() -> None:
    assert files.document_text({"body": "b", "segment": "s", "contents": "c"}, where="") == "s"
    assert files.document_text({"text": None, "passage": "p"}, where="") == "p"
    assert files.document_text({"title": "T", "text": "t"}, where="") == "T\nt"
    assert files.document_text({"title": "T", "text": ""}, where="") == "T"
    assert files.document_text("plain", where="") == "plain"


def test_of_a_corpus_only_the_texts_wanted_are_kept(put: Callable[[str, str | bytes], Path]) -> None:
    path = put("c.jsonl", '{"_id": "a", "text": "1"}\n{"_id": "b", "text": "2"}\n{"_id": "b", "text": "3"}\n')
    assert list(files.read_corpus(path, wanted={"a"})) == [("a", "1")]


# -- topics ------------------------------------------------------------------------------------------------


def test_topics_are_tabs_or_json_lines_and_ids_are_strings(put: Callable[[str, str | bytes], Path]) -> None:
    want = {"7": "one", "q": "two\twords"}
    assert files.read_topics(put("t.tsv", "7\tone\n\nq\ttwo\twords\n")) == want
    lines = '{"query_id": 7, "text": "one"}\n{"qid": "q", "query": "two\\twords"}\n'
    assert files.read_topics(put("t.jsonl", lines)) == want
    assert files.read_topics(put("u.jsonl", '{"_id": "q", "title": "x"}\n{"id": "r", "text": "y"}\n')) == {
        "q": "x",
        "r": "y",
    }


@pytest.mark.parametrize(
    ("name", "line"), [("t.tsv", "{0}\ttides\n"), ("t.jsonl", '{{"id": "{0}", "text": "tides"}}\n')]
)
def test_an_empty_line_among_topics_is_skipped_and_told(
    put: Callable[[str, str | bytes], Path], caplog: pytest.LogCaptureFixture, name: str, line: str
) -> None:
    path = put(name, line.format(1) + "\n" + line.format(2))
    assert list(files.read_topics(path)) == ["1", "2"]
    assert f"{name}:2: empty line, skipped; if a query belongs there, write it" in caplog.text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("q1\tone\nq2\t \n", r"t\.tsv:2: query 'q2' has no text; write one or drop the line"),
        ("q1\tone\nq2 two\n", r"t\.tsv:2: no tab; a topic is an id, one tab and the query's text"),
        ("\tone\n", r"t\.tsv:1: nothing before the tab"),
        ('{"qid": "1", "text": "x"}\n', r"t\.tsv:1: no tab; .*; name JSON lines \.jsonl"),
        ("q1\tone\nq1\ttwo\n", r"t\.tsv:2: query 'q1' was there before"),
        ("\n\n", r"t\.tsv holds no queries"),
    ],
)
def test_a_faulty_topic_is_named_with_line_and_cure(
    put: Callable[[str, str | bytes], Path], content: str, says: str
) -> None:
    with pytest.raises(InvalidData, match=says):
        files.read_topics(put("t.tsv", content))


def test_an_empty_query_is_kept_only_when_asked_for(put: Callable[[str, str | bytes], Path]) -> None:
    path = put("t.tsv", "q1\t\n")
    assert files.read_topics(path, allow_empty=True) == {"q1": ""}
    with pytest.raises(InvalidData):
        files.read_topics(path)


# -- runs and judgements -----------------------------------------------------------------------------------


def test_runs_are_read_with_tabs_or_spaces_in_canonical_order(put: Callable[[str, str | bytes], Path]) -> None:
    path = put("r.trec", "q2\tQ0\tb\t2\t1.5\tt\nq1 Q0  x 1 -3e-1 t \nq2 Q0 c 3 1.5 t\nq2 Q0 a 1 1.75 t\n")
    assert files.read_run(path) == {
        "q2": [("a", 1, 1.75), ("b", 2, 1.5), ("c", 3, 1.5)],
        "q1": [("x", 1, -0.3)],
    }


def test_a_no_break_space_is_part_of_an_id(put: Callable[[str, str | bytes], Path]) -> None:
    assert files.read_run(put("r", "q\u00a01 Q0 d\u3000x 1 2 t\n")) == {"q\u00a01": [("d\u3000x", 1, 2.0)]}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("q1 Q0 d2 2 9.0", r"r\.trec:2: 5 columns; a run line has six \(query id, Q0, document id, rank, score, tag\)"),
        ("q1 Q0 d 2 2 9.0 tag", r"r\.trec:2: 7 columns"),
        ("q1 Q0 d2 2 high tag", r"r\.trec:2: score 'high' is not a number"),
        ("q1 Q0 d2 2 nan tag", r"r\.trec:2: score is nan; a finite number is wanted"),
        ("q1 Q0 d2 2 -inf tag", r"r\.trec:2: score is -inf"),
        ("q1 Q0 d2 2 1_0 tag", r"r\.trec:2: score '1_0' is not a number"),
        ("q1 Q0 d2 two 9.0 tag", r"r\.trec:2: rank 'two' is not a whole number"),
        ("q1 Q0 d1 2 9.0 tag", r"r\.trec:2: query 'q1' holds 'd1' twice; keep one"),
    ],
)
def test_a_faulty_run_line_is_named(put: Callable[[str, str | bytes], Path], line: str, says: str) -> None:
    with pytest.raises(InvalidData, match=says):
        files.read_run(put("r.trec", f"{RUN_LINE}\n{line}\n"))


def test_ranks_against_the_scores_are_warned_of(
    put: Callable[[str, str | bytes], Path], caplog: pytest.LogCaptureFixture
) -> None:
    run = files.read_run(put("r.trec", "q Q0 a 1 1.0 t\nq Q0 b 2 2.0 t\n"))
    assert [hit.doc_id for hit in run["q"]] == ["b", "a"]
    assert "ranks and scores disagree in 1 queries, first 'q'" in caplog.text


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("q d 1", r"q\.txt:1: 3 columns; a judgement has four"),
        ("q 0 d 1.5", r"q\.txt:1: grade '1\.5' is not a whole number"),
        ("q 0 d 1\nq 0 d 2", r"q\.txt:2: query 'q' judges 'd' twice"),
    ],
)
def test_a_faulty_judgement_is_named(put: Callable[[str, str | bytes], Path], line: str, says: str) -> None:
    with pytest.raises(InvalidData, match=says):
        files.read_qrels(put("q.txt", line))


def test_judgements_keep_negative_grades(put: Callable[[str, str | bytes], Path]) -> None:
    assert files.read_qrels(put("q.txt", "q\t0\ta\t-2\nq 0 b 3\n")) == {"q": {"a": -2, "b": 3}}


def test_a_run_is_written_in_six_columns_with_falling_scores(tmp_path: Path) -> None:
    files.write_run(
        tmp_path / "r", [("q1", [("a", 0.5), ("b", 0.5), ("c", 0.4999999), ("d", 0.1)]), ("q2", [])], tag="x"
    )
    assert (tmp_path / "r").read_text() == (
        "q1 Q0 a 1 0.500000 x\nq1 Q0 b 2 0.499999 x\nq1 Q0 c 3 0.499998 x\nq1 Q0 d 4 0.100000 x\n"
    )


@given(st.lists(st.floats(-1e6, 1e6) | st.sampled_from([0.0, 0.5, 1.0]), max_size=40))
def test_printed_scores_fall_even_in_single_precision(scores: list[float]) -> None:
    ranked = sorted(scores, reverse=True)
    printed = [float(s) for s in files._falling(ranked, query_id="q")]
    assert all(single(a) > single(b) for a, b in pairwise(printed))
    step = 1e-6 + max(map(abs, scores), default=0.0) * 2**-22
    assert all(-1e-6 < a - b < 1e-6 + i * step for i, (a, b) in enumerate(zip(ranked, printed, strict=True)))


@settings(deadline=None)
@given(st.dictionaries(st.text(st.characters(exclude_categories=["Z", "C"]), min_size=1), st.floats(0, 1), max_size=20))
def test_a_written_run_reads_back_in_its_order(
    tmp_path_factory: pytest.TempPathFactory, scores: dict[str, float]
) -> None:
    path = tmp_path_factory.mktemp("run") / "r"
    ranking = sorted(scores.items(), key=lambda item: (-item[1], item[0]))
    files.write_run(path, [("q", ranking)])
    back = files.read_run(path).get("q", [])
    assert [hit.doc_id for hit in back] == [doc_id for doc_id, _ in ranking]
    assert [hit.rank for hit in back] == list(range(1, len(ranking) + 1))


@pytest.mark.parametrize(
    ("rankings", "says"),
    [
        ([("q", [("a", 0.1), ("b", 0.2)])], r"query 'q', rank 2: score 0\.2 is no number or above the"),
        ([("q", [("a", float("nan"))])], r"rank 1: score nan"),
        ([("q", [("a b", 0.1)])], r"query 'q': document id 'a b' is empty or holds white space"),
        ([("q", [("a\u2003", 0.1)])], r"document id"),
        ([("", [("a", 0.1)])], r"query id '' is empty"),
        ([("q", [("a", 0.2), ("a", 0.1)])], r"ranks 'a' twice"),
        ([("q", []), ("q", [])], r"ranked twice"),
    ],
)
def test_what_a_run_cannot_hold_is_refused_and_nothing_written(
    tmp_path: Path, rankings: list[tuple[str, list[tuple[str, float]]]], says: str
) -> None:
    with pytest.raises(InvalidData, match=says):
        files.write_run(tmp_path / "r", rankings)
    assert os.listdir(tmp_path) == []


def test_a_tag_is_one_word(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="run tag 'my run'"):
        files.write_run(tmp_path / "r", [], tag="my run")


def test_a_corpus_may_be_tab_separated(tmp_path: Path) -> None:
    path = tmp_path / "c.tsv"
    path.write_text("007\tThe tide.\r\n\nNA\ta\tb\n")
    assert list(files.read_corpus(path)) == [("007", "The tide."), ("NA", "a\tb")]
    path.write_text("007\tThe tide.\nno tab here\n")
    with pytest.raises(InvalidData, match=r"c\.tsv:2: .*id, tab, text"):
        list(files.read_corpus(path))
