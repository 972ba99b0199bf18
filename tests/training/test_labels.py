"""Training labels: what a teacher's tables or judgements become, and what is refused before a student sees it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pd_rerank.engines.fake import FakeEngine, FakeTokenizer
from pd_rerank.errors import BadArgument, InvalidData, MissingResource, ModelMismatch
from pd_rerank.pool import Candidate, Pool, pool_sha256, pools_sha256
from pd_rerank.prompt import GradePrompt
from pd_rerank.rubrics import Rubric
from pd_rerank.scoring import Scoring, score_pools
from pd_rerank.training.label_report import label_report
from pd_rerank.training.labels import (
    REQUIRED,
    Label,
    Labels,
    check_labels,
    labels_of_qrels,
    labels_of_tables,
    read_labels,
    write_labels,
)
from pd_rerank.windows import permutation
from tests.tables import table

WORDS = ["bees", "live", "long", "in", "the", "summer", "hive", "and", "make", "honey", "until", "winter", "comes"]


def pool(query_id: str, n: int = 5) -> Pool:
    texts = [" ".join(WORDS[i : i + 4]) for i in range(n)]
    candidates = tuple(Candidate(doc_id=f"d{i}", text=text, score=float(n - i)) for i, text in enumerate(texts))
    return Pool(query_id=query_id, query="how long do bees live", candidates=candidates)


POOLS = [pool("q1"), pool("none", 0), pool("q2", 7)]


def graded(pools: list[Pool], engine: FakeEngine | None = None, **scoring: Any) -> tuple[list[Any], dict[str, Any]]:
    """A teacher's tables of `pools`, and the record of their making as a job leaves it."""
    teacher = engine or FakeEngine(position_bias=0.4, name="teacher")
    prompt = GradePrompt(teacher.tokenizer)
    shown = Scoring(**{"window": 3, "presentations": 4, **scoring})
    tables = score_pools(pools, engine=teacher, prompt=prompt, scoring=shown)
    run = {
        "engine": teacher.describe(),
        "prompt": prompt.describe(),
        "scoring": shown.describe(),
        "pools_sha256": pools_sha256(pools),
        "pool_sha256": {p.query_id: pool_sha256(p) for p in pools},
        "failed": {},
    }
    return tables, json.loads(json.dumps(run))


@pytest.fixture
def labels() -> Labels:
    tables, run = graded(POOLS)
    return labels_of_tables(tables, POOLS, run=run, experiment_id="try")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "labels.jsonl").read_text(encoding="utf-8").splitlines()]


# -- from a teacher's tables -----------------------------------------------------------------------------------------


def test_scores_become_vectors_on_the_scale_of_the_grades() -> None:
    found = table([[0.1, 0.9], [0.3, 0.9], [0.2, 0.6]], query_id="q")
    two = Pool(query_id="q", query="x", candidates=(Candidate(doc_id="A", text="a"), Candidate(doc_id="B", text="b")))
    labels = labels_of_tables([found], [two], run={"pools_sha256": pools_sha256([two])})
    assert labels["q"]["A"].scores == pytest.approx((0.3, 0.9, 0.6))
    assert labels["q"]["B"].averaged == pytest.approx(2.4)
    assert labels["q"]["B"].grade_probabilities == pytest.approx((0.2, 0, 0, 0.8))
    assert labels.targets(two, "single") == pytest.approx([0.3, 2.7])
    assert labels.targets(two, "averaged") == pytest.approx([0.6, 2.4])
    assert (labels.targets(two).dtype, labels.vectors(two).shape) == (np.float32, (2, 3))
    assert labels.probabilities(two) == pytest.approx(np.array([[0.8, 0, 0, 0.2], [0.2, 0, 0, 0.8]]))


def test_element_t_is_the_whole_pool_shuffled_with_seed_t(labels: Labels) -> None:
    engine = FakeEngine(position_bias=0.4)
    seven = POOLS[2]
    for seed in range(4):
        order = permutation(7, seed=seed)
        shown = replace(seven, candidates=tuple(seven.candidates[i] for i in order))
        (alone,) = score_pools([shown], engine=engine, prompt=GradePrompt(engine.tokenizer), scoring=Scoring(window=3))
        assert labels.vectors(seven)[order, seed] == pytest.approx(3 * alone.scores()[0], abs=1e-6)
    assert len(set(labels["q2"]["d3"].scores)) > 1, "the teacher must depend on order for this to say anything"
    assert labels.manifest["seeds"] == [0, 1, 2, 3]


def test_targets_follow_the_pool_given_not_the_order_labelled(labels: Labels) -> None:
    turned = replace(POOLS[0], candidates=POOLS[0].candidates[::-1])
    assert labels.targets(turned).tolist() == labels.targets(POOLS[0]).tolist()[::-1]
    assert len(set(labels.targets(turned).tolist())) > 1


def test_an_empty_pool_has_no_targets_and_no_label(labels: Labels) -> None:
    assert labels.targets(POOLS[1]).shape == (0,)
    assert list(labels) == ["q1", "q2"]
    check_labels(labels, POOLS)


def test_a_document_without_all_its_grades_is_left_out_and_named() -> None:
    forgetful = FakeEngine(missing=lambda text: text.startswith("live"))
    tables, run = graded(POOLS, forgetful)
    labels = labels_of_tables(tables, POOLS, run=run)
    assert labels.manifest["without_label"] == {"q1": ["d1"], "q2": ["d1"]}
    with pytest.raises(InvalidData, match=r"query 'q1': 1 of 5 documents have no label \('d1'\)"):
        labels.targets(POOLS[0])
    with pytest.raises(InvalidData, match=r"2 of 3 pools: query 'q1': 1 of 5 .* 'q2': 1 of 7 documents have no label"):
        check_labels(labels, POOLS)
    once = table([[0.5, 0.5], [float("nan"), 0.5]], query_id="q")
    two = replace(POOLS[0], query_id="q", candidates=tuple(Candidate(doc_id=d, text=d) for d in "AB"))
    labels = labels_of_tables([once], [two], run={"pools_sha256": pools_sha256([two])})
    assert (list(labels["q"]), labels.manifest["without_label"]) == (["B"], {"q": ["A"]})
    blind = graded(POOLS, FakeEngine(missing=lambda text: True))
    with pytest.raises(InvalidData, match="in none of 2 queries has a document all 4 grades"):
        labels_of_tables(blind[0], POOLS, run=blind[1])


def test_queries_that_failed_have_no_labels_and_are_named() -> None:
    tables, run = graded(POOLS)
    labels = labels_of_tables(tables[:-1], POOLS, run=run | {"failed": {"q2": "too long"}})
    assert (list(labels), labels.manifest["failed"]) == (["q1"], {"q2": "too long"})
    with pytest.raises(InvalidData, match="query 'q2' has a pool but no scores"):
        labels_of_tables(tables[:-1], POOLS, run=run)


def test_scores_of_other_pools_are_refused() -> None:
    tables, run = graded(POOLS)
    changed = [replace(POOLS[0], query="how long do cats live"), *POOLS[1:]]
    with pytest.raises(InvalidData, match="query 'q1': the ids are those scored, but the query, a text"):
        labels_of_tables(tables, changed, run=run)


def test_queries_presented_unequally_often_are_refused() -> None:
    tables, run = graded(POOLS)
    fewer, _ = graded(POOLS, presentations=3)
    with pytest.raises(InvalidData, match=r"query 'q1' has 4 presentations of 4 grades, 'q2' 3 of 4; .*--settle"):
        labels_of_tables([tables[0], tables[1], fewer[2]], POOLS, run=run)


def test_one_presentation_is_called_what_it_is() -> None:
    tables, run = graded(POOLS, presentations=1)
    labels = labels_of_tables(tables, POOLS, run=run)
    assert (labels.manifest["teacher_protocol"], labels.manifest["seeds"]) == ("single_order", [])


def test_the_manifest_names_teacher_revision_and_template() -> None:
    tables, run = graded(POOLS)
    run["engine"] |= {"model": "base", "commit": "abc", "adapter": {"source": "runs/first", "rank": 8}}
    record = labels_of_tables(tables, POOLS, run=run).manifest
    assert (record["teacher_model_id"], record["teacher_revision"]) == ("base+lora:runs/first", "abc")
    assert record["prompt_template_id"] == GradePrompt(FakeTokenizer()).hash


# -- judgements ----------------------------------------------------------------------------------------------------


def test_judgements_become_labels_of_one_score() -> None:
    qrels = {"q1": {"d0": 3, "d1": 1, "d2": 0, "d3": 2, "d4": 0, "elsewhere": 9}, "q2": {f"d{i}": 1 for i in range(7)}}
    labels = labels_of_qrels(qrels, POOLS, judge="people")
    assert labels.targets(POOLS[0]).tolist() == labels.targets(POOLS[0], "single").tolist() == [3, 1, 0, 2, 0]
    assert labels["q1"]["d3"].grade_probabilities == (0, 0, 1, 0)
    assert (labels.presentations, labels.manifest["teacher_protocol"]) == (1, "judgements")
    check_labels(labels, [POOLS[0]], GradePrompt(FakeTokenizer()))


def test_binary_judgements_can_stand_for_other_grades() -> None:
    qrels = {p.query_id: {d: int(d == "d2") for d in p.doc_ids} for p in POOLS if len(p)}
    assert labels_of_qrels(qrels, POOLS, mapping={1: 3}).targets(POOLS[0]).tolist() == [0, 0, 3, 0, 0]
    with pytest.raises(BadArgument, match="label grade 4 is not on the scale from 0 to 3"):
        labels_of_qrels(qrels, POOLS, mapping={1: 4})


def test_a_grade_left_out_of_the_map_may_not_change_places_with_one_that_is_in_it() -> None:
    judged = {"q1": {"d0": 1, "d1": 2, "d2": 0}}
    with pytest.raises(InvalidData, match=r"judged grade 2 is not mapped and would stay 2, though 1 becomes 3; .*2="):
        labels_of_qrels(judged, [POOLS[0]], unjudged=0, mapping={1: 3})
    assert labels_of_qrels(judged, [POOLS[0]], unjudged=0, mapping={1: 2})["q1"]["d1"].scores == (2,)
    assert labels_of_qrels(judged, [POOLS[0]], unjudged=0, mapping={0: 3, 1: 2, 2: 1})["q1"]["d2"].scores == (3,)


def test_documents_nobody_judged_are_listed_or_given_a_grade() -> None:
    qrels = {"q1": {"d0": 3, "d1": 2}, "q2": {f"d{i}": 1 for i in range(7)}}
    with pytest.raises(InvalidData, match=r"1 of 3 queries: query 'q1': 3 of 5 documents have no judgement \('d2', "):
        labels_of_qrels(qrels, POOLS)
    assert labels_of_qrels(qrels, POOLS, unjudged=0).targets(POOLS[0]).tolist() == [3, 2, 0, 0, 0]


def test_a_query_nobody_judged_is_no_query_without_relevant_documents() -> None:
    labels = labels_of_qrels({"q1": {"d0": 3}}, [POOLS[0], POOLS[2]], unjudged=0)
    assert (list(labels), labels.manifest["failed"]) == (["q1"], {"q2": "nobody judged it"})
    with pytest.raises(InvalidData, match="these judgements are of other queries"):
        labels_of_qrels({"x": {"d0": 3}}, POOLS, unjudged=0)


@pytest.mark.parametrize("grade", [4, -1])
def test_judged_grades_off_the_scale_are_refused(grade: int) -> None:
    with pytest.raises(InvalidData, match=f"query 'q1', document 'd0': judged grade {grade} is not on the labels'"):
        labels_of_qrels({"q1": {"d0": grade}}, [POOLS[0]], unjudged=0)
    assert labels_of_qrels({"q1": {"d0": grade}}, [POOLS[0]], unjudged=0, mapping={grade: 3})["q1"]["d0"].scores == (3,)


# -- files ---------------------------------------------------------------------------------------------------------


def test_labels_come_back_as_they_were_with_every_required_key(labels: Labels, tmp_path: Path) -> None:
    record = write_labels(tmp_path / "labels", labels)
    assert set(REQUIRED) <= set(record)
    assert (record["n_queries"], record["n_documents"], record["k_perms"], record["experiment_id"]) == (2, 12, 4, "try")
    again = read_labels(tmp_path / "labels")
    assert again == labels
    assert again.probabilities(POOLS[2]).tolist() == labels.probabilities(POOLS[2]).tolist()  # type: ignore[union-attr]
    assert read_labels(tmp_path) == again, "the folder above will do"
    first = lines(tmp_path / "labels")[0]
    assert list(first) == [
        *("query_id", "doc_id", "score_continuous", "score_raw_vector", "score_grade_vector"),
        *("teacher_model_id", "teacher_protocol", "prompt_template_id", "k_perms"),
    ]
    assert first["score_continuous"] == pytest.approx(sum(first["score_raw_vector"]) / 4)
    assert not [path for path in tmp_path.iterdir() if path.name != "labels"]


def test_equal_labels_are_equal_bytes(labels: Labels, tmp_path: Path) -> None:
    write_labels(tmp_path / "a", labels)
    write_labels(tmp_path / "b", read_labels(tmp_path / "a"))
    assert (tmp_path / "a/labels.jsonl").read_bytes() == (tmp_path / "b/labels.jsonl").read_bytes()


def test_a_file_alone_has_the_manifest_its_lines_make(labels: Labels, tmp_path: Path) -> None:
    write_labels(tmp_path / "labels", labels)
    (tmp_path / "mine.jsonl").write_bytes((tmp_path / "labels/labels.jsonl").read_bytes())
    alone = read_labels(tmp_path / "mine.jsonl")
    assert alone == labels
    assert alone.manifest["teacher_model_id"] == "teacher"
    check_labels(alone, POOLS, GradePrompt(FakeTokenizer()))
    with pytest.raises(ModelMismatch, match="the label file was made with prompt template"):
        check_labels(alone, POOLS, GradePrompt(FakeTokenizer(), placeholder="?"))


def plain(doc_id: str = "d", **fields: Any) -> dict[str, Any]:
    made = {"query_id": "q", "doc_id": doc_id, "score_continuous": 2.0, "score_raw_vector": [1.0, 3.0]}
    return made | {"score_grade_vector": [0, 0.5, 0, 0.5], "k_perms": 2} | fields


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (plain("c"), "document 'c' of query 'q' has a label already; keep one"),
        (plain(score_raw_vector=[2.0], k_perms=1), "'k_perms' is 1, before it was 2"),
        (plain(score_raw_vector=[2.0]), "1 scores in score_raw_vector, k_perms says 2"),
        (plain(score_raw_vector=None), "k_perms is 2 and score_raw_vector is missing"),
        (plain(score_raw_vector=[1.0, 3.5], score_continuous=2.25), "score 3.5 is not on the scale from 0 to 3"),
        (plain(score_raw_vector=[-0.5, 3], score_continuous=1.25), "score -0.5 is not on the scale from 0 to 3"),
        (plain(score_raw_vector=[1.0, None]), "score_raw_vector, number 2: None is not a number"),
        (plain(score_raw_vector=[]), r"score_raw_vector is \[\]; a list of numbers is wanted"),
        (plain(score_continuous=None), "score_continuous None is not a number"),
        (plain(score_continuous=2.5), "score_continuous is 2.5, the mean of score_raw_vector 2"),
        (plain(score_grade_vector=[0.5, 0.5, 0.5, 0]), "are not 4 shares that add up to 1"),
        (plain(score_grade_vector=[1.5, -0.5, 0, 0]), "are not 4 shares that add up to 1"),
        (plain(score_grade_vector=[1.0, 0, 0]), "are not 4 shares that add up to 1"),
        (
            plain(teacher_model_id="another"),
            "'teacher_model_id' is 'another', before it was None; one file, one teacher",
        ),
        (plain(doc_id=None), "no id; give one of doc_id"),
        ('{"query_id": "q", "doc_id": "d", "score_continuous": NaN}', "NaN is not a JSON number"),
        ("{", "not JSON"),
    ],
)
def test_a_faulty_line_is_named_with_its_place(tmp_path: Path, record: dict[str, Any] | str, says: str) -> None:
    text = record if isinstance(record, str) else json.dumps(record)
    (tmp_path / "l.jsonl").write_text(f"{json.dumps(plain('c'))}\n\n{text}\n")
    with pytest.raises(InvalidData, match=says) as caught:
        read_labels(tmp_path / "l.jsonl")
    assert f"{tmp_path / 'l.jsonl'}:3" in str(caught.value)


def test_nan_cannot_be_made_into_a_label() -> None:
    with pytest.raises(InvalidData, match="query 'q', document 'd': score nan is not on the scale"):
        Labels([Label(query_id="q", doc_id="d", scores=(1.0, float("nan")))], manifest={})


def test_no_labels_at_all_are_refused(tmp_path: Path) -> None:
    (tmp_path / "l.jsonl").write_text("\n")
    with pytest.raises(InvalidData, match="holds no labels"):
        read_labels(tmp_path / "l.jsonl")
    with pytest.raises(MissingResource, match="no file"):
        read_labels(tmp_path / "none.jsonl")


def edited(folder: Path, change: Callable[[str], str]) -> None:
    path = folder / "labels.jsonl"
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


def test_a_folder_whose_files_do_not_belong_together_is_refused(labels: Labels, tmp_path: Path) -> None:
    write_labels(tmp_path, labels)
    edited(tmp_path, lambda text: text.split("\n", 1)[1])
    with pytest.raises(InvalidData, match=r"is not what manifest\.json records"):
        read_labels(tmp_path)
    record = json.loads((tmp_path / "manifest.json").read_text())
    del record["teacher_model_id"]
    (tmp_path / "manifest.json").write_text(json.dumps(record))
    with pytest.raises(InvalidData, match="lacks teacher_model_id"):
        read_labels(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(MissingResource, match=r"it has no manifest\.json"):
        read_labels(tmp_path)


def test_a_full_disk_leaves_the_labels_that_were_there(
    labels: Labels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_labels(tmp_path / "labels", labels)
    before = {path: path.read_bytes() for path in (tmp_path / "labels").iterdir()}
    calls = []

    def full(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    fewer = Labels(labels["q1"].values(), manifest=labels.manifest)
    with pytest.raises(OSError, match="No space left"):
        write_labels(tmp_path / "labels", fewer)
    assert {path: path.read_bytes() for path in (tmp_path / "labels").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["labels"]


def test_a_folder_with_something_else_is_not_replaced(labels: Labels, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(BadArgument, match=r"holds 'thesis.tex', which is none of"):
        write_labels(tmp_path, labels)


# -- whether labels fit ----------------------------------------------------------------------------------------------


def test_labels_of_more_queries_than_asked_for_fit(labels: Labels) -> None:
    check_labels(labels, [POOLS[2]], GradePrompt(FakeTokenizer()))


def test_labels_of_other_pools_are_refused_with_a_list(labels: Labels) -> None:
    with pytest.raises(InvalidData, match=r"1 of 1 pools: query 'q9': 5 of 5 .*; these labels are of other pools"):
        check_labels(labels, [pool("q9")])
    with pytest.raises(InvalidData, match=r"'q1': 2 of 7 documents have no label \('d5', 'd6'\); label these pools"):
        check_labels(labels, [pool("q1", 7), POOLS[2]])
    with pytest.raises(InvalidData, match="query 'q2': 'd5' has a label, but is not in the pool"):
        check_labels(labels, [pool("q2", 5)])
    rewritten = replace(POOLS[0], query="how long do wasps live")
    with pytest.raises(InvalidData, match="query 'q1': the query, a text or a first-stage score is not what was"):
        check_labels(labels, [rewritten, POOLS[2]])


def test_labels_under_another_template_are_refused_unless_told_otherwise(labels: Labels) -> None:
    other = GradePrompt(FakeTokenizer(), markers="alpha")
    with pytest.raises(ModelMismatch, match=r"differ in markers\).*check_template=False"):
        check_labels(labels, POOLS, other)
    check_labels(labels, POOLS, other, check_template=False)


def test_labels_of_another_number_of_grades_are_refused_always(labels: Labels) -> None:
    rubric = Rubric(name="two", system="Grade.", instruction="Grade each.", grades=("no", "yes"))
    with pytest.raises(ModelMismatch, match="the labels have 4 grades, the prompt's rubric has 2"):
        check_labels(labels, POOLS, GradePrompt(FakeTokenizer(), rubric=rubric), check_template=False)


def test_an_unknown_kind_of_target_is_refused(labels: Labels) -> None:
    with pytest.raises(BadArgument, match="unknown kind of target 'median'; choose one of single, averaged"):
        labels.targets(POOLS[0], "median")  # type: ignore[arg-type]


# -- the report ------------------------------------------------------------------------------------------------------


def figures(report: Any) -> dict[str, float | None]:
    return {row.name: row.value for section in report.sections for row in section.rows}


def test_silver_beta_is_what_the_slot_adds_and_spread_is_over_documents() -> None:
    a_b = Pool(query_id="q", query="x", candidates=(Candidate(doc_id="A", text="a"), Candidate(doc_id="B", text="b")))
    tables = [table([[0.9, 0.4], [0.7, 0.4]], slots=[[0, 1], [1, 0]])]
    labels = labels_of_tables(tables, [a_b], run={"pools_sha256": pools_sha256([a_b])})
    found = figures(label_report(labels, [a_b], tables=tables))
    assert found["silver-β"] == pytest.approx(0.15)  # slot 0: (.1 + 0)/2, slot 1: -.05, times 3
    assert found["τ-PSI"] == 0
    assert found["order variance"] == pytest.approx(0.045)  # (.3² + 0) / 2
    assert found["dispersion"] == pytest.approx((0.75**2 + 0.45**2) / 2)
    assert found["single-order less averaged"] == pytest.approx(0.15)
    assert found["SD over a query's documents"] == pytest.approx(0.6)
    assert figures(label_report(labels, [a_b]))["silver-β"] is None


def test_quality_is_that_of_the_rankings_labels_make_and_of_judged_queries_alone() -> None:
    a_b = Pool(
        query_id="q",
        query="x",
        candidates=(Candidate(doc_id="A", text="a", score=1.0), Candidate(doc_id="B", text="b", score=2.0)),
    )
    other = replace(a_b, query_id="other")
    tables = [table([[0.2, 0.4], [0.9, 0.4]]), table([[0.2, 0.4], [0.9, 0.4]], query_id="other")]
    labels = labels_of_tables(tables, [a_b, other], run={"pools_sha256": pools_sha256([a_b, other])})
    report = label_report(labels, [a_b, other], qrels={"q": {"A": 1}, "unseen": {"A": 1}}, metrics=["RR"])
    found = figures(report)
    assert found["RR of the first stage"] == found["RR of single-order labels"] == 0.5
    assert (found["RR of averaged labels"], found["RR, averaged less single-order"]) == (1, 0.5)
    assert report.sections[-1].text == "1 of 2 labelled queries are judged."
    with pytest.raises(InvalidData, match="none of the 2 labelled queries is judged"):
        label_report(labels, [a_b, other], qrels={"unseen": {"A": 1}})
