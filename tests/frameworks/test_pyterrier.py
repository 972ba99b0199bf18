"""The PyTerrier transformer, alone and in pipelines, on the real PyTerrier; no Java is started."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pyterrier", reason="PyTerrier is not installed (pip install 'pd-rerank[pyterrier]')")

import pandas as pd
import pyterrier as pt

from pd_rerank import BadArgument, FakeEngine, InvalidData, OCSFTBatchedReranker
from pd_rerank.frameworks.pyterrier import OCSFTTransformer

QUERIES = {"q2": "red apples", "q1": "bees make honey"}
TEXTS = {"a": "green pears", "b": "red apples grow on trees", "c": "apples", "d": "bees make honey"}


def ranker(engine: FakeEngine | None = None, **options: Any) -> OCSFTBatchedReranker:
    return OCSFTBatchedReranker("fake", verbose=0, engine=engine or FakeEngine(), **options)


def frame(docs: Any = TEXTS) -> Any:
    rows = [
        {"qid": qid, "query": query, "docno": docno, "text": text, "score": 9.0, "rank": i, "url": f"{qid}/{docno}"}
        for qid, query in QUERIES.items()
        for i, (docno, text) in enumerate(docs.items())
    ]
    return pd.DataFrame(rows, index=range(100, 100 + len(rows)))


def test_it_gives_the_librarys_ranking_and_scores_query_by_query_in_one_engine_call() -> None:
    engine = FakeEngine(position_bias=0.3)
    found = OCSFTTransformer(ranker(engine, presentations=3))(frame())
    assert engine.calls == 1
    assert list(dict.fromkeys(found["qid"])) == list(QUERIES)
    for qid, query in QUERIES.items():
        alone = ranker(FakeEngine(position_bias=0.3), presentations=3).rank(query, list(TEXTS.values()), list(TEXTS))
        rows = found[found["qid"] == qid]
        assert list(zip(rows["docno"], rows["score"], rows["rank"], strict=True)) == [
            (r.doc_id, r.score, r.rank - 1) for r in alone.results
        ]
    assert list(found["url"]) == list(found["qid"] + "/" + found["docno"])


def test_the_given_frame_is_unchanged() -> None:
    given = frame()
    OCSFTTransformer(ranker())(given)
    pd.testing.assert_frame_equal(given, frame())


def test_in_a_pipeline_with_a_cutoff_and_a_fixed_first_stage() -> None:
    first = pt.Transformer.from_df(frame())
    pipeline = first >> OCSFTTransformer(ranker()) % 2
    found = pipeline(pd.DataFrame([{"qid": qid, "query": query} for qid, query in QUERIES.items()]))
    assert [(q, d) for q, d in zip(found["qid"], found["docno"], strict=True)][:2] == [("q2", "b"), ("q2", "c")]
    assert found.groupby("qid").size().to_dict() == {"q1": 2, "q2": 2}


def test_an_experiment_counts_what_it_ranks_first() -> None:
    first = pt.Transformer.from_df(frame())
    qrels = pd.DataFrame([{"qid": "q2", "docno": "b", "label": 1}, {"qid": "q1", "docno": "d", "label": 1}])
    topics = pd.DataFrame([{"qid": qid, "query": query} for qid, query in QUERIES.items()])
    table = pt.Experiment([first >> OCSFTTransformer(ranker())], topics, qrels, ["recip_rank"], names=["ours"])
    assert table["recip_rank"].tolist() == [1.0]


def test_what_it_needs_and_gives_is_known_before_it_runs() -> None:
    one = OCSFTTransformer(ranker(), text_field="body")
    outputs = pt.inspect.transformer_outputs(one, ["qid", "query", "docno", "body"])
    assert {"score", "rank"} <= set(outputs)
    with pytest.raises(Exception, match="body"):
        one(frame())


def test_another_text_field_is_read() -> None:
    renamed = frame().rename(columns={"text": "body"})
    found = OCSFTTransformer(ranker(), text_field="body")(renamed)
    assert found["docno"].tolist()[0] == "b"


def test_no_rows_are_no_rows_and_no_engine_call() -> None:
    engine = FakeEngine()
    found = OCSFTTransformer(ranker(engine))(frame().iloc[:0])
    assert len(found) == 0
    assert {"score", "rank"} <= set(found.columns)
    assert engine.calls == 0


def test_ties_are_broken_by_docno_and_repeats_keep_their_rows() -> None:
    same = {"z": "apples", "b": "apples", "m": "apples"}
    found = OCSFTTransformer(ranker(window=1))(frame(same))
    assert found[found["qid"] == "q2"]["docno"].tolist() == ["b", "m", "z"]
    twice = pd.concat([frame(), frame()])
    assert OCSFTTransformer(ranker())(twice).groupby("qid").size().tolist() == [8, 8]


def test_a_document_without_a_grade_comes_last_and_can_be_cut_and_evaluated() -> None:
    one = OCSFTTransformer(ranker(FakeEngine(missing=lambda text: "red" in text)))
    found = one(frame())
    last = found[found["qid"] == "q2"].iloc[-1]
    assert (last["docno"], last["score"], last["rank"]) == ("b", float("-inf"), 3)
    assert "b" not in (pt.Transformer.from_df(frame()) >> one % 3)(frame()[["qid", "query"]].drop_duplicates())["docno"]


def test_a_query_of_two_texts_and_a_document_without_text_are_refused() -> None:
    broken = frame()
    broken.loc[100, "query"] = "green apples"
    with pytest.raises(InvalidData, match="query 'q2' has 2 texts"):
        OCSFTTransformer(ranker())(broken)
    missing = frame()
    missing.loc[101, "text"] = None
    with pytest.raises(BadArgument, match="get_text"):
        OCSFTTransformer(ranker())(missing)
