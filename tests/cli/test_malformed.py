"""Malformed and odd input to the evaluation commands: an exit code with file, line and cure, or a plain result."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pd_rerank.pool import write_pools
from tests.evaluated import QUERIES, STEADY, pools, write_evaluation, write_scored

Cli = Callable[..., Any]
Change = Callable[[Path], object]

EVALUATE = ("evaluate", "--run", "run.trec", "--qrels", "qrels.txt", "--metrics", "nDCG@10")
SCORES = ("evaluate", "--scores", "scores", "--qrels", "qrels.txt", "--metrics", "nDCG@10")
POOLED = (*SCORES, "--first-stage", "pools")
STABILITY = ("stability", "--scores", "scores")
RUNS = ("stability", "--runs", "run.trec", "run2.trec")
PREFERENCE = ("preference", "--pairs", "pairs.jsonl", "--pools", "pools", "--scores", "scores")
COMPARE = ("compare", "run.trec", "run2.trec", "--qrels", "qrels.txt", "--metrics", "nDCG@10")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_evaluation(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def text(name: str, content: str | bytes) -> Change:
    """Put this in the file's place."""
    raw = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(raw)


def line(name: str, content: str) -> Change:
    """Add a line to the file."""

    def change(folder: Path) -> None:
        with open(folder / name, "a", encoding="utf-8") as stream:
            stream.write(content + "\n")

    return change


def record(name: str, **fields: Any) -> Change:
    """Change fields of a JSON file; None takes one away."""

    def change(folder: Path) -> None:
        data = {**json.loads((folder / name).read_text()), **fields}
        (folder / name).write_text(json.dumps({key: value for key, value in data.items() if value is not None}))

    return change


def pair(**fields: Any) -> Change:
    return line("pairs.jsonl", json.dumps(fields))


def pool_line(*candidates: dict[str, Any], **query: Any) -> Change:
    """A pools file of one line."""
    body = {"query": {"qid": "q1", "text": "bees", **query}, "candidates": list(candidates)}
    return text("pools.jsonl", json.dumps(body) + "\n")


def other_pools(folder: Path) -> None:
    first, *others = pools()
    texts = [replace(candidate, text="another text") for candidate in first.candidates]
    write_pools(folder / "pools", [replace(first, candidates=tuple(texts)), *others])


def fewer_pools(folder: Path) -> None:
    write_pools(folder / "pools", pools()[:2])


def nothing(_: Path) -> None:
    return None


RUN = "".join(f"q1 Q0 d{i} {i} {99 - i} t\n" for i in range(50)).encode()

A = {"docid": "A", "score": 1.0, "doc": {"text": "a"}}
FROM_FILE = ("preference", "--pairs", "pairs.jsonl", "--pools", "pools.jsonl", "--run", "run.trec")

REFUSED: list[tuple[str, tuple[str, ...], Change, int, tuple[str, ...]]] = [
    # runs
    ("run of five columns", EVALUATE, line("run.trec", "q1 Q0 E 5 0.1"), 5, ("run.trec:13", "5 columns", "has six")),
    ("run of seven columns", EVALUATE, line("run.trec", "q1 Q0 E E 5 0.1 t"), 5, ("run.trec:13", "none with a space")),
    ("score NaN", EVALUATE, line("run.trec", "q1 Q0 E 5 NaN t"), 5, ("run.trec:13", "finite number is wanted")),
    ("score inf", EVALUATE, line("run.trec", "q1 Q0 E 5 inf t"), 5, ("run.trec:13", "finite number is wanted")),
    ("score of letters", EVALUATE, line("run.trec", "q1 Q0 E 5 high t"), 5, ("run.trec:13", "'high' is not a number")),
    ("decimal comma", EVALUATE, line("run.trec", "q1 Q0 E 5 0,1 t"), 5, ("run.trec:13", "'0,1' is not a number")),
    ("rank of letters", EVALUATE, line("run.trec", "q1 Q0 E first 0.1 t"), 5, ("run.trec:13", "not a whole number")),
    ("rank with decimals", EVALUATE, line("run.trec", "q1 Q0 E 5.0 0.1 t"), 5, ("run.trec:13", "not a whole number")),
    ("document twice", EVALUATE, line("run.trec", "007 Q0 A 5 0.1 t"), 5, ("run.trec:13", "'A' twice", "keep one")),
    ("Latin-1 run", EVALUATE, text("run.trec", b"q1 Q0 \xe9t\xe9 1 1 t\n"), 5, ("run.trec:1", "convert the file")),
    ("UTF-16 run", EVALUATE, text("run.trec", "q1 Q0 A 1 1 t\n".encode("utf-16")), 5, ("run.trec:1", "UTF-8")),
    ("empty run", EVALUATE, text("run.trec", ""), 5, ("run.trec", "no lines")),
    ("blank run", EVALUATE, text("run.trec", "\n\n \n"), 5, ("run.trec", "no lines")),
    ("run with a heading", EVALUATE, text("run.trec", "qid Q0 docid rank score tag\n"), 5, ("run.trec:1", "rank")),
    ("no such run", (*EVALUATE[:2], "gone.trec", *EVALUATE[3:]), nothing, 4, ("gone.trec",)),
    ("cut gzip", ("evaluate", "--run", "r.gz", *EVALUATE[3:]),
     text("r.gz", gzip.compress(RUN)[:-9]), 5, ("r.gz", "damaged gzip", "fetch it again")),
    ("not gzip", ("evaluate", "--run", "r.gz", *EVALUATE[3:]), text("r.gz", "q1 Q0 A 1 1 t"), 5, ("r.gz:1", "gzip")),
    ("JSON for a run", EVALUATE, text("run.trec", '{"q1": {"A": 1}}\n'), 5, ("run.trec:1", "has six")),
    # judgements
    ("judgement of three columns", EVALUATE, line("qrels.txt", "q1 E 1"), 5, ("qrels.txt:13", "has four")),
    ("judgement of five columns", EVALUATE, line("qrels.txt", "q1 0 E 1 x"), 5, ("qrels.txt:13", "has four")),
    ("grade with decimals", EVALUATE, line("qrels.txt", "q1 0 E 1.5"), 5, ("qrels.txt:13", "not a whole number")),
    ("grade of letters", EVALUATE, line("qrels.txt", "q1 0 E yes"), 5, ("qrels.txt:13", "not a whole number")),
    ("judged twice", EVALUATE, line("qrels.txt", "q1 0 A 0"), 5, ("qrels.txt:13", "twice", "keep one line")),
    ("empty judgements", EVALUATE, text("qrels.txt", ""), 5, ("judgements", "no query")),
    ("judgements of other queries", EVALUATE, text("qrels.txt", "q9 0 A 1\n"), 5, ("'run'", "same query ids")),
    ("judgements are a folder", (*EVALUATE[:4], "pools"), nothing, 4, ("pools is a folder",)),
    ("no such judgements", (*EVALUATE[:4], "gone"), nothing, 4, ("no file gone",)),
    ("judgements of other documents, F1", (*STABILITY, "--qrels", "qrels.txt", "--threshold", "f1"),
     text("qrels.txt", "q1 0 Z 1\n"), 5, ("relevant candidate", "same ids")),
    # metrics and options
    ("unknown metric", (*EVALUATE[:5], "--metrics", "nDGC@10"), nothing, 2, ("'nDGC@10'", "write nDCG@10")),
    ("metric cut at 0", (*EVALUATE[:5], "--metrics", "P@0"), nothing, 2, ("from 1 on",)),
    ("no metric", (*EVALUATE[:5], "--metrics", ","), nothing, 2, ("at least one",)),
    ("relevance level 0", (*EVALUATE, "--relevance-level", "0"), nothing, 2, ("--relevance-level", "got 0")),
    ("nothing to evaluate", ("evaluate", "--qrels", "qrels.txt"), nothing, 2, ("--run or --scores",)),
    ("no judgements given", ("evaluate", "--run", "run.trec"), nothing, 2, ("--qrels",)),
    ("two systems of one name", (*EVALUATE, "--run", "run.trec"), nothing, 2, ("'run'", "NAME=run.trec")),
    ("name without a path", (*EVALUATE[:2], "x=", *EVALUATE[3:]), nothing, 2, ("NAME=PATH",)),
    ("unknown option", (*EVALUATE, "--qrles", "x"), nothing, 2, ("--qrles",)),
    ("report into a file", (*EVALUATE, "--output", "qrels.txt"), nothing, 2, ("qrels.txt is a file", "folder")),
    ("report below a file", (*EVALUATE, "--output", "qrels.txt/report"), nothing, 2, ("qrels.txt is a file",)),
    ("report over other things", (*EVALUATE, "--output", "pools"), nothing, 2, ("pools holds", "another folder")),
    ("unknown key in a config file", ("evaluate", "--config", "c.yaml"), text("c.yaml", "qrel: x\n"), 2,
     ("c.yaml", "'qrel'", "qrels")),
    # scores
    ("no scores there", (*SCORES[:2], "pools", *SCORES[3:]), nothing, 4, ("no scores in pools", "scores.npz")),
    ("scores of another run.json", SCORES, record("scores/run.json", sha256={"scores.npz": "0"}), 5,
     ("scores.npz", "score the pools again")),
    ("damaged scores", SCORES, text("scores/scores.npz", b"PK\x03\x04"), 5, ("scores.npz", "score the pools again")),
    ("run.json that is no JSON", SCORES, text("scores/run.json", "{"), 5, ("run.json is not JSON",)),
    ("scores of a changed text", POOLED, other_pools, 5, ("query 'q1'", "score these pools again")),
    ("scores without a pool", POOLED, fewer_pools, 5, ("query 'NA'", "scores are of other pools")),
    ("scores that name no pools", POOLED, record("scores/run.json", pools_sha256=None), 5, ("pools_sha256",)),
    ("pools beside their manifest", POOLED, line("pools/pools.jsonl", "{}"), 5, ("pools.jsonl", "manifest.json")),
    ("one presentation", STABILITY, lambda f: write_scored(f / "scores", {"q1": STEADY[:1]}), 5, ("--presentations",)),
    ("unknown readout", (*STABILITY, "--readout", "mode"), nothing, 2, ("--readout", "expected")),
    # stability
    ("one run", ("stability", "--runs", "run.trec"), nothing, 5, ("1 presentations", "a run for each presentation")),
    ("runs of other queries", RUNS, text("run2.trec", "q9 Q0 A 1 1 t\n"), 5, ("no query is in all runs",)),
    ("runs of other pools", (*RUNS, "--pools", "pools"), line("run2.trec", "q1 Q0 E 5 .1 t"), 5,
     ("run2.trec, query 'q1'", "'E'", "pools this run was made from")),
    ("scores and runs", (*RUNS, "--scores", "scores"), nothing, 2, ("--scores", "--runs")),
    ("threshold NaN", (*STABILITY, "--threshold", "nan"), nothing, 2, ("finite number",)),
    ("retention of 5", (*STABILITY, "--threshold", "retention=5"), nothing, 2, ("retention=0.3",)),
    ("no such threshold file", (*STABILITY, "--threshold", "t.json"), nothing, 4, ("no file t.json",)),
    ("threshold file of another kind", (*STABILITY, "--threshold", "t.json"), text("t.json", "[1]"), 5, ("t.json",)),
    ("F1 without judgements", (*STABILITY, "--threshold", "f1"), nothing, 2, ("--qrels",)),
    ("overlap gate without a threshold", (*STABILITY, "--min-overlap", ".9"), nothing, 2, ("needs --threshold",)),
    ("gate NaN", (*STABILITY, "--max-psi", "nan"), nothing, 2, ("--max-psi", "finite")),
    ("threshold saved below a file", (*STABILITY, "--threshold", "retention=.5", "--save-threshold", "run.trec/t"),
     nothing, 2, ("run.trec is a file", "another place")),
    ("threshold saved over a folder", (*STABILITY, "--threshold", "retention=.5", "--save-threshold", "pools"),
     nothing, 2, ("--save-threshold pools is a folder", "name a file")),
    # pairs and pools
    ("pair that is no JSON", PREFERENCE, line("pairs.jsonl", "{'a': 1}"), 5, ("pairs.jsonl:4", "not JSON")),
    ("pair that is a list", PREFERENCE, line("pairs.jsonl", "[1, 2]"), 5, ("pairs.jsonl:4", "this is a list")),
    ("pair without a rejected passage", PREFERENCE, pair(query_id="q1", preferred="A"), 5,
     ("pairs.jsonl:4", "no 'rejected'", "query, preferred, rejected")),
    ("pair with an empty passage", PREFERENCE, pair(query_id="q1", preferred="A", rejected=" "), 5,
     ("pairs.jsonl:4", "'rejected' is empty")),
    ("pair with NaN", PREFERENCE, line("pairs.jsonl", '{"query_id": "q1", "preferred": NaN, "rejected": "B"}'), 5,
     ("pairs.jsonl:4", "NaN")),
    ("pairs of two shapes", PREFERENCE, pair(id="1-1", q1="a", q2="b", doc1="x", doc2="y"), 5,
     ("pairs.jsonl:4", "two shapes")),
    ("pair id twice", PREFERENCE, pair(id="1", query_id="q1", preferred="A", rejected="C"), 5,
     ("pairs.jsonl:4", "pairs.jsonl:1", "give every line its id")),
    ("no pairs", PREFERENCE, text("pairs.jsonl", "\n"), 5, ("pairs.jsonl holds no pairs",)),
    ("pairs of other queries", PREFERENCE,
     text("pairs.jsonl", '{"query_id": "q9", "preferred": "A", "rejected": "B"}\n'), 5,
     ("none of the pairs' queries has a pool",)),
    ("pairs whose text is another", PREFERENCE,
     text("pairs.jsonl", '{"query_id": "q1", "query": "else", "preferred": "A", "rejected": "B"}\n'), 5,
     ("pool 'q1'", "leave the text out")),
    ("pairs without pools", ("preference", "--pairs", "pairs.jsonl", "--run", "run.trec"), nothing, 2, ("--pools",)),
    ("candidate twice in a pool", FROM_FILE, pool_line(A, A), 5, ("pools.jsonl:1", "'A' twice")),
    ("pool without candidates", FROM_FILE, text("pools.jsonl", '{"query": "x"}\n'), 5, ("pools.jsonl:1", "candidates")),
    ("pool query twice", FROM_FILE, text("pools.jsonl", '{"query": {"qid": 1, "text": "x"}, "candidates": []}\n' * 2),
     5, ("pools.jsonl:2", "pools.jsonl:1", "keep one")),
    ("first-stage score of letters", FROM_FILE, pool_line({**A, "score": "high"}), 5, ("pools.jsonl:1", "'high'")),
    ("candidate without a text", FROM_FILE, pool_line({**A, "doc": {}}), 5, ("pools.jsonl:1", "no text")),
    # comparisons
    ("one system", ("compare", "run.trec", "--qrels", "qrels.txt"), nothing, 2, ("two systems", "got 1")),
    ("unknown baseline", (*COMPARE, "--baseline", "x"), nothing, 2, ("--baseline x", "run, run2")),
    ("nothing to compare by", ("compare", "run.trec", "run2.trec"), nothing, 2, ("--qrels",)),
    ("pairs to compare by without pools", (*COMPARE, "--pairs", "pairs.jsonl"), nothing, 2, ("--pools",)),
    ("matched retention against one presentation", (*COMPARE, "s=scores", "--threshold", "matched"), nothing, 2,
     ("baseline 'run'", "one presentation")),
    ("threshold without presentations", (*COMPARE, "--threshold", "0.5"), nothing, 2,
     ("--threshold", "no system holds several presentations")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "change", "code", "said"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_it_is_refused_with_its_place_and_cure(
    cli: Cli, here: Path, words: tuple[str, ...], change: Change, code: int, said: tuple[str, ...]
) -> None:
    change(here)
    done = cli(*words)
    assert done.exit_code == code, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: ")
    assert "unforeseen" not in done.stderr
    for part in said:
        assert part in done.stderr


# -- odd, and taken as it is ---------------------------------------------------------------------------------------


def rewritten(name: str, change: Callable[[bytes], bytes]) -> Change:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


TAKEN: list[tuple[str, tuple[str, ...], Change]] = [
    ("Windows line ends", EVALUATE, rewritten("run.trec", lambda raw: raw.replace(b"\n", b"\r\n"))),
    ("mixed line ends", EVALUATE,
     rewritten("qrels.txt", lambda raw: raw.replace(b"\n", b"\r", 4).replace(b"\n", b"\r\n", 4))),
    ("byte-order mark", EVALUATE, rewritten("run.trec", lambda raw: b"\xef\xbb\xbf" + raw)),
    ("no last line end", EVALUATE, rewritten("run.trec", lambda raw: raw.rstrip(b"\n"))),
    ("tabs and many blanks", EVALUATE, rewritten("run.trec", lambda raw: raw.replace(b" Q0 ", b"\t\tQ0   "))),
    ("blank lines", EVALUATE, rewritten("qrels.txt", lambda raw: b"\n\n" + raw.replace(b"\n", b"\n\n"))),
    ("lines in another order", EVALUATE,
     rewritten("run.trec", lambda raw: b"".join(sorted(raw.splitlines(keepends=True), reverse=True)))),
    ("gzipped run", ("evaluate", "--run", "run.gz", *EVALUATE[3:]),
     lambda f: (f / "run.gz").write_bytes(gzip.compress((f / "run.trec").read_bytes()))),
    ("ranks with a zero in front", EVALUATE, rewritten("run.trec", lambda raw: re.sub(rb" (\d) 0", rb" 0\1 0", raw))),
    ("scientific notation", EVALUATE, rewritten("run.trec", lambda raw: raw.replace(b" 0.9 ", b" 9e-1 "))),
    ("a query nobody judged", EVALUATE, line("run.trec", "more Q0 A 1 1 t")),
    ("documents nobody judged below", EVALUATE, line("run.trec", "q1 Q0 nan 5 -3 t")),
    ("negative grades", EVALUATE, line("qrels.txt", "q1 0 spam -2")),
]  # fmt: skip


@pytest.mark.parametrize(("words", "change"), [case[1:] for case in TAKEN], ids=[case[0] for case in TAKEN])
def test_it_changes_no_figure(cli: Cli, here: Path, words: tuple[str, ...], change: Change) -> None:
    plain = json.loads(cli(*EVALUATE).stdout)
    change(here)
    done = cli(*words)
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["sections"][0]["rows"] == plain["sections"][0]["rows"]
    assert {q["query_id"] for q in report["queries"]} == set(QUERIES)


def test_ids_that_look_like_numbers_or_nothing_stay_what_they_are(cli: Cli, here: Path) -> None:
    (here / "run.trec").write_text("7 Q0 null 1 2 t\n007 Q0 NA 1 2 t\n007 Q0 nan 2 1 t\nNaN Q0 None 1 1 t\n")
    (here / "qrels.txt").write_text("007 0 NA 1\n007 0 nan 0\n7 0 07 1\n7 0 null 1\nNaN 0 None 1\n")
    report = json.loads(cli(*EVALUATE).stdout)
    assert {q["query_id"]: round(q["values"]["nDCG@10"], 4) for q in report["queries"]} == {
        "007": 1.0,
        "7": 0.6131,  # one of two relevant documents, the other being '07'
        "NaN": 1.0,
    }


def test_a_query_that_only_some_runs_hold_counts_as_a_failure_there(cli: Cli, here: Path) -> None:
    lines = (here / "run2.trec").read_text().splitlines(keepends=True)
    (here / "run2.trec").write_text("".join(text for text in lines if not text.startswith("NA ")))
    report = json.loads(cli(*RUNS).stdout)
    worst = {q["query_id"]: q["values"]["top_k_overlap"] for q in report["queries"]}
    assert worst == {"NA": 0.0, "q1": 1.0, "007": 1.0}
    assert "'NA'" in report["sections"][0]["text"]


def test_a_candidate_without_grades_is_counted_not_dropped(cli: Cli, here: Path) -> None:
    nan = float("nan")
    write_scored(here / "scores", {**QUERIES, "NA": [[0.9, nan, 0.5, 0.1]] * 3})
    report = json.loads(cli(*PREFERENCE).stdout)
    assert report["sections"][1]["rows"][0]["n"] == 3
    done = cli(*STABILITY, "--threshold", "0.5")
    assert done.exit_code == 0
    assert "leaves candidates out ('NA')" in json.loads(done.stdout)["sections"][0]["text"]


def test_pairs_that_contradict_themselves_are_left_out_and_counted(cli: Cli, here: Path) -> None:
    pair(query_id="q1", preferred="B", rejected="A")(here)  # line 1 says the opposite
    report = json.loads(cli(*PREFERENCE).stdout)
    found = {row["name"]: row["value"] for row in report["sections"][0]["rows"]}
    assert (found["planned directions"], found["covered"], found["used"]) == (4, 4, 2)


def test_passages_the_pools_lack_are_misses_of_the_planned_population(cli: Cli, here: Path) -> None:
    pair(query_id="q1", preferred="Z", rejected="A")(here)
    pair(query_id="gone", preferred="A", rejected="B")(here)
    primary = json.loads(cli(*PREFERENCE).stdout)["sections"]
    planned = json.loads(cli(*PREFERENCE, "--population", "planned").stdout)["sections"]
    missing = {row["name"]: row["value"] for row in primary[0]["rows"] if row["name"].startswith("missing")}
    assert missing == {"missing: pool": 1, "missing: preferred": 1}
    assert [part[1]["rows"][0]["n"] for part in (primary, planned)] == [3, 5]
    assert planned[1]["rows"][0]["value"] == pytest.approx(2 / 5)


def test_texts_that_no_file_can_carry_are_written_with_a_mark(cli: Cli, here: Path) -> None:
    (here / "pools.jsonl").write_text(
        json.dumps({"query": {"qid": "q1", "text": "half \ud800 <b>&"}, "candidates": [A, {**A, "docid": "B"}]})
    )
    (here / "pairs.jsonl").write_text('{"query_id": "q1", "preferred": "A", "rejected": "B"}\n')
    (here / "run.trec").write_text("q1 Q0 A 1 1 t\nq1 Q0 B 2 0 t\n")
    done = cli(*FROM_FILE, "--output", "report")
    assert done.exit_code == 0, done.stderr
    assert "half ? &lt;b&gt;&amp;" in (here / "report/report.html").read_text(encoding="utf-8")
