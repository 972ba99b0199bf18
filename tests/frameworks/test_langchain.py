"""The LangChain compressor: on langchain-core alone, with every field of a document kept."""

from __future__ import annotations

import asyncio
import copy
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("langchain_core", reason="langchain-core is not installed")

from langchain_core.callbacks import CallbackManager
from langchain_core.documents import Document
from langchain_core.documents.compressor import BaseDocumentCompressor

from pd_rerank import BadArgument, FakeEngine, OCSFTBatchedReranker

QUERY = "red apples"
TEXTS = ["green pears", "red apples grow on trees", "apples"]


def documents() -> list[Document]:
    return [
        Document(page_content=text, id=f"id{i}", metadata={"source": {"page": i, "tags": [str(i)]}, "relevance": i})
        for i, text in enumerate(TEXTS)
    ]


def compressor(engine: FakeEngine | None = None, k: int = 10, **options: Any) -> Any:
    ranker = OCSFTBatchedReranker("fake", verbose=0, engine=engine or FakeEngine(), **options)
    return ranker.as_langchain_compressor(k=k)


def test_the_compressor_is_a_langchain_core_one_and_never_none() -> None:
    assert isinstance(compressor(), BaseDocumentCompressor)


def test_every_field_of_a_document_comes_back_with_its_score_beside_it() -> None:
    chosen = compressor().compress_documents(documents(), QUERY)
    assert [d.page_content for d in chosen] == [TEXTS[1], TEXTS[2], TEXTS[0]]
    assert [d.id for d in chosen] == ["id1", "id2", "id0"]
    assert [d.metadata["source"] for d in chosen] == [{"page": i, "tags": [str(i)]} for i in (1, 2, 0)]
    assert [d.metadata["relevance"] for d in chosen] == [1, 2, 0]
    scores = [d.metadata["relevance_score"] for d in chosen]
    assert scores == pytest.approx([0.9600805, 0.5, 0.0399195], abs=1e-6)
    assert {type(s) for s in scores} == {float}


def test_a_documents_own_class_is_kept() -> None:
    class Page(Document):
        number: int = 0

    (chosen,) = compressor(k=1).compress_documents([Page(page_content="apples", number=7)], QUERY)
    assert type(chosen) is Page
    assert chosen.number == 7


def test_async_gives_what_sync_gives() -> None:
    one = compressor(FakeEngine(position_bias=0.3), presentations=3)
    assert asyncio.run(one.acompress_documents(documents(), QUERY)) == one.compress_documents(documents(), QUERY)


def test_the_callers_documents_are_unchanged_and_share_nothing_with_the_chosen() -> None:
    given = documents()
    before = copy.deepcopy(given)
    one = compressor()
    for chosen in (
        one.compress_documents(given, QUERY),
        asyncio.run(one.acompress_documents(given, QUERY)),
        one.compress_documents(given, QUERY),
    ):
        assert given == before
        for document in chosen:
            document.metadata["source"]["tags"].append("changed")
            document.metadata["new"] = 1
            document.page_content = "changed"
    assert given == before


@pytest.mark.parametrize(("k", "count"), [(0, 0), (1, 1), (2, 2), (3, 3), (50, 3)])
def test_k_keeps_the_best(k: int, count: int) -> None:
    chosen = compressor(k=k).compress_documents(documents(), QUERY)
    assert [d.id for d in chosen] == ["id1", "id2", "id0"][:count]


def test_a_negative_k_is_refused_when_the_compressor_is_made() -> None:
    with pytest.raises(BadArgument, match="k must be 0 or more, got -1"):
        compressor(k=-1)


def test_no_documents_are_no_documents_and_no_engine_call() -> None:
    engine = FakeEngine()
    assert list(compressor(engine).compress_documents([], QUERY)) == []
    assert list(asyncio.run(compressor(engine).acompress_documents([], QUERY))) == []
    assert engine.calls == 0


def test_repeated_and_blank_documents_each_come_back() -> None:
    given = [Document(page_content=t, metadata={"i": i}) for i, t in enumerate(["apples", "", "apples", "red apples"])]
    chosen = compressor().compress_documents(given, QUERY)
    assert chosen[0].metadata["i"] == 3
    assert sorted(d.metadata["i"] for d in chosen) == [0, 1, 2, 3]
    assert chosen[-1].metadata == {"i": 1, "relevance_score": 0.0}


def test_a_document_without_a_grade_comes_last_with_score_none(caplog: pytest.LogCaptureFixture) -> None:
    chosen = compressor(FakeEngine(missing=lambda text: "red" in text)).compress_documents(documents(), QUERY)
    assert [d.id for d in chosen] == ["id2", "id0", "id1"]
    assert chosen[-1].metadata["relevance_score"] is None
    assert "1 of 3 grades are missing" in caplog.text


def test_an_error_of_the_engine_is_never_swallowed() -> None:
    class Failing(FakeEngine):
        def grade_logits(self, prompts: Any, grade_ids: Any, *, progress: Any = None) -> Any:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        compressor(Failing()).compress_documents(documents(), QUERY)
    with pytest.raises(RuntimeError, match="out of memory"):
        asyncio.run(compressor(Failing()).acompress_documents(documents(), QUERY))


def test_callbacks_are_accepted_as_langchain_passes_them() -> None:
    one = compressor(k=1)
    assert len(one.compress_documents(documents(), QUERY, callbacks=CallbackManager([]))) == 1
    assert len(asyncio.run(one.acompress_documents(documents(), QUERY, callbacks=None))) == 1


def test_langchain_core_is_all_it_needs_and_only_when_asked() -> None:
    script = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "sys.modules['langchain'] = sys.modules['langchain_classic'] = None\n"
        "from pd_rerank import FakeEngine, OCSFTBatchedReranker\n"
        "ranker = OCSFTBatchedReranker('m', 0, engine=FakeEngine())\n"
        "ranker.rank('q', ['a'])\n"
        "assert 'langchain_core' not in sys.modules\n"
        "one = ranker.as_langchain_compressor(k=1)\n"
        "from langchain_core.documents import Document\n"
        "(best,) = one.compress_documents([Document(page_content=t) for t in ('a', 'q')], 'q')\n"
        "assert best.page_content == 'q'\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
