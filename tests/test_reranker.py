"""`OCSFTBatchedReranker` inside `rerankers`: each fault known there or among its neighbours, as a claim."""

from __future__ import annotations

import asyncio
import copy
import gc
import hashlib
import json
import logging
import math
import os
import pickle
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rerankers import Document, Reranker
from rerankers.models import AVAILABLE_RANKERS

from pd_rerank import (
    BadArgument,
    EngineFailure,
    FakeEngine,
    GeneratedEngine,
    InvalidData,
    ModelMismatch,
    OCSFTBatchedReranker,
    SlotResidual,
    Threshold,
    register,
)
from pd_rerank.decisions import Settle
from pd_rerank.engines import fake
from pd_rerank.prompt import load_rubric
from pd_rerank.windows import PARTITIONS
from tests.tokenizers_for_tests import byte_level

QUERY = "red apples"
DOCS = ["green pears", "red apples grow on trees", "apples"]
"""Word overlap 0, 1 and 1/2: best to worst they stand 1, 2, 0."""

OVERLAP_SCORES = {0.0: 0.0399195, 0.5: 0.5, 1.0: 0.9600805}
"""Expected grade / 3 of the fake engine's logits -2(g - 3v)², worked out apart from the package."""


RESIDUAL = SlotResidual(offsets={2: (0.1, -0.1)}, readout="expected", n_queries=1)


def make(engine: Any = None, **options: Any) -> OCSFTBatchedReranker:
    return OCSFTBatchedReranker("fake", verbose=0, engine=FakeEngine() if engine is None else engine, **options)


def by_content(query: str, text: str) -> float:
    """A relevance that depends on the text alone and differs from text to text."""
    return int(hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8], 16) / 16**8


def fake_score(value: float) -> float:
    """The expected grade / 3 that the fake engine gives a document of relevance `value`."""
    weights = [math.exp(-2.0 * (g - 3.0 * value) ** 2) for g in range(4)]
    return sum(g * w for g, w in enumerate(weights)) / sum(weights) / 3


def fields(results: Any) -> list[tuple[Any, ...]]:
    return [(r.doc_id, r.text, r.metadata, r.score, r.rank, r.spread, r.grade_probabilities, r.cut) for r in results]


class Busy(FakeEngine):
    """Counts how many calls are inside it at once, and holds them until `open` is set."""

    def __init__(self, *, pause: float = 0.002, **options: Any) -> None:
        super().__init__(**options)
        self.pause, self.active, self.peak, self.entered = pause, 0, 0, 0
        self.open = threading.Event()
        self.open.set()
        self._lock = threading.Lock()

    def grade_logits(self, prompts: Any, grade_ids: Any, *, progress: Any = None) -> Any:
        with self._lock:
            self.entered += 1
            self.active += 1
            self.peak = max(self.peak, self.active)
        try:
            time.sleep(self.pause)
            assert self.open.wait(20), "nobody opened the engine"
            return super().grade_logits(prompts, grade_ids, progress=progress)
        finally:
            with self._lock:
                self.active -= 1


# -- inside rerankers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["ocsft", "OCSFTBatchedReranker"])
def test_rerankers_builds_it_under_both_names(model_type: str) -> None:
    ranker = Reranker("some/model", model_type=model_type, engine="fake", verbose=0, window=7)
    assert isinstance(ranker, OCSFTBatchedReranker)
    assert ranker.engine.name == "some/model"
    assert ranker.scoring.window == 7
    results = ranker.rank(query=QUERY, docs=DOCS, doc_ids=["a", "b", "c"])
    assert [r.doc_id for r in results] == ["b", "c", "a"]
    assert [r.score for r in results] == pytest.approx([OVERLAP_SCORES[v] for v in (1.0, 0.5, 0.0)], abs=1e-6)


@pytest.mark.parametrize(
    "name", ["team/gpt-tuned", "/home/jinan/my-lora", "cohere-style", "my-t5-colbert", "vicuna/flashrank", "upr"]
)
def test_a_model_name_that_rerankers_would_guess_from_does_not_divert_it(name: str) -> None:
    ranker = Reranker(f"{name}/x", model_type="ocsft", engine="fake", verbose=0)
    assert isinstance(ranker, OCSFTBatchedReranker)
    assert ranker.engine.name == f"{name}/x"


def test_register_is_safe_to_repeat_and_touches_nobody_else() -> None:
    before = dict(AVAILABLE_RANKERS)
    register()
    register()
    assert before == AVAILABLE_RANKERS
    assert AVAILABLE_RANKERS["ocsft"] is AVAILABLE_RANKERS["OCSFTBatchedReranker"] is OCSFTBatchedReranker


def test_a_key_error_while_the_engine_loads_is_not_taken_for_a_missing_dependency(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(**options: Any) -> Any:
        return {}["rope_theta"]

    monkeypatch.setattr(fake, "FakeEngine", broken)
    with pytest.raises(EngineFailure, match=r"'my/model' failed on a missing key 'rope_theta'") as caught:
        Reranker("my/model", model_type="ocsft", engine="fake", verbose=0)
    assert isinstance(caught.value.__cause__, KeyError)
    assert capfd.readouterr() == ("", "")


def test_a_key_error_from_a_tokenizer_is_not_taken_for_a_missing_dependency() -> None:
    class Torn(FakeEngine):
        def __init__(self) -> None:
            super().__init__()
            self.tokenizer.encode = lambda text, add_special_tokens=False: {}["vocab"]

    with pytest.raises(EngineFailure, match="vocab"):
        Reranker("my/model", model_type="ocsft", engine=Torn(), verbose=0)


@pytest.mark.parametrize("error", [ImportError("moved"), RuntimeError("broken"), MemoryError("full")])
def test_other_errors_of_a_constructor_pass_through_rerankers_unchanged(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(**options: Any) -> Any:
        raise error

    monkeypatch.setattr(fake, "FakeEngine", broken)
    with pytest.raises(type(error)) as caught:
        Reranker("my/model", model_type="ocsft", engine="fake", verbose=0)
    assert caught.value is error


def test_an_unknown_option_is_an_error_that_names_it_and_what_it_resembles() -> None:
    with pytest.raises(BadArgument, match="unknown option 'widnow'; did you mean window"):
        Reranker("m", model_type="ocsft", engine="fake", verbose=0, widnow=10)
    with pytest.raises(BadArgument, match="'instructions'; did you mean instruction"):
        OCSFTBatchedReranker("m", engine="fake", instructions="be strict")
    with pytest.raises(BadArgument, match=r"'batch_size'; did you mean .*batch_tokens"):
        OCSFTBatchedReranker("no/such-model", batch_size=2)
    with pytest.raises(TypeError, match="batch_size"):
        make().rank(QUERY, DOCS, batch_size=2)  # type: ignore[call-arg]


def test_an_object_that_is_no_engine_is_told_what_it_lacks() -> None:
    class Half:
        name = "half"

        def grade_logits(self, prompts: Any, grade_ids: Any, *, progress: Any = None) -> list[Any]:
            return []

    with pytest.raises(BadArgument, match="this Half lacks tokenizer, max_length, describe"):
        OCSFTBatchedReranker("m", engine=Half())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"settle": True}, "settle is Settle"),
        ({"settle": Settle(top_k=3)}, "presentations of at least 3"),
        ({"settle": Settle(top_k=3, first=4), "presentations": 4}, "presentations of at least 5"),
        ({"placeholder": 0}, "placeholder 0 must be a string"),
        ({"instruction": 7}, "instruction must be a text, got 7"),
        ({"max_doc_chars": "many"}, "max_doc_chars must be a whole number"),
        ({"rubric": 3}, "a rubric is a name"),
        ({"slot_residual": 3}, "a slot residual is a SlotResidual or its file, got 3"),
        ({"slot_residual": RESIDUAL, "calibration": "capcal"}, "correct the same thing"),
        ({"slot_residual": RESIDUAL, "readout": "argmax"}, "fitted on readout 'expected'"),
        ({"max_concurrency": "four"}, "max_concurrency must be a whole number"),
    ],
)
def test_values_of_another_type_or_that_contradict_each_other_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadArgument, match=message):
        make(**options)


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    ranker = make(window=np.int64(2), presentations=np.int32(3), seed=np.int64(5), max_doc_chars=np.int64(40))
    assert json.dumps(ranker.scoring.describe()) == json.dumps(
        make(window=2, presentations=3, seed=5).scoring.describe()
    )
    assert json.dumps(ranker.prompt.describe()["max_doc_chars"]) == "40"


def test_a_threshold_is_refused_on_scores_of_another_model_or_template() -> None:
    ranker = make()
    fitted = Threshold(value=0.5, context=ranker.context())
    assert len(make(threshold=fitted).retain(QUERY, DOCS)) == len(ranker.retain(QUERY, DOCS, 0.5))
    with pytest.raises(ModelMismatch, match="template_hash"):
        make(threshold=fitted, placeholder="?")
    other = OCSFTBatchedReranker("another", engine="fake", verbose=0)
    with pytest.raises(ModelMismatch, match=r"model .* there, another here"):
        other.retain(QUERY, DOCS, fitted)
    assert make(threshold=fitted, placeholder="?", check_template=False).retain(QUERY, DOCS) is not None


def test_an_unknown_option_beside_an_engine_object_is_an_error_that_names_it() -> None:
    with pytest.raises((TypeError, BadArgument), match="widnow"):
        make(widnow=10)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("window", 0),
        ("window", 2.5),
        ("presentations", 0),
        ("seed", "7"),
        ("partition", "dealt"),
        ("order", "random"),
        ("shuffle", "all"),
        ("calibration", "isotonic"),
        ("readout", "median"),
        ("max_concurrency", 0),
        ("threshold", True),
        ("threshold", float("nan")),
        ("rubric", "beauty"),
        ("markers", "emoji"),
        ("placeholder", " "),
        ("max_doc_chars", -1),
        ("engine", "gpt"),
        ("engine", 7),
        ("chat", "yes"),
        ("chat", 1),
        ("template_kwargs", 5),
        ("max_length", "long"),
        ("max_length", 0),
        ("max_length", 1.5),
        ("max_concurrency", 1.0),
        ("max_concurrency", True),
        ("verbose", "no"),
    ],
)
def test_a_bad_setting_stops_the_constructor_and_is_named(option: str, value: Any) -> None:
    with pytest.raises(BadArgument, match=option.removesuffix("s")):
        OCSFTBatchedReranker("m", **{"verbose": 0, "engine": "fake", option: value})


def test_an_adapter_for_an_engine_without_adapters_is_refused_in_those_words() -> None:
    with pytest.raises(BadArgument, match="takes no adapter"):
        OCSFTBatchedReranker("m", 0, engine="fake", adapter="some/lora")


# -- silence -------------------------------------------------------------------------------------------------


def test_verbose_0_writes_nothing_even_where_rerankers_prints(capfd: pytest.CaptureFixture[str]) -> None:
    ranker = Reranker("m", model_type="ocsft", engine="fake", verbose=0)
    documents = [Document(text, doc_id=f"d{i}", metadata={"i": i}) for i, text in enumerate(DOCS)]
    ranker.rank(QUERY, documents, doc_ids=[1, 2, 3], metadata=[{}, {}, {}])
    ranker.rank(QUERY, [Document("no id")])
    ranker.rank(QUERY, [])
    asyncio.run(ranker.rank_async(QUERY, DOCS))
    assert capfd.readouterr() == ("", "")


def test_the_class_itself_never_prints_at_any_verbosity(capfd: pytest.CaptureFixture[str]) -> None:
    OCSFTBatchedReranker("m", verbose=2, engine="fake").rank(QUERY, [Document("no id")], doc_ids=["x"])
    assert capfd.readouterr() == ("", "")


def test_a_fresh_process_with_verbose_0_writes_nothing() -> None:
    script = (
        "from pd_rerank import OCSFTBatchedReranker\n"
        "from rerankers import Document, Reranker\n"
        "ranker = Reranker('team/gpt', model_type='ocsft', engine='fake', verbose=0)\n"
        "results = ranker.rank('q', [Document('a q', doc_id='x'), 'b', ''], doc_ids=[1, 2, 3])\n"
        "assert [r.rank for r in results] == [1, 2, 3]\n"
        "ranker.rank('q', ['alike', 'alike'])  # worth a warning\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random Llama of two layers and a byte-level tokenizer."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tokenizer = byte_level()
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=4096, **shape)
    folder = str(tmp_path_factory.mktemp("tiny"))
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_verbose_0_loads_and_runs_a_real_model_without_a_word(
    tiny_model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    ranker = Reranker(tiny_model, model_type="ocsft", verbose=0, dtype="float32", device="cpu")
    assert len(ranker.rank(QUERY, [*DOCS, ""])) == 4
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("verbose", "told"), [(0, True), (1, False)])
def test_verbose_0_reaches_what_fetches_models(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch, verbose: int, told: bool
) -> None:
    heard: list[bool] = []

    def resolve(name: str, *, quiet: bool = False) -> str:
        heard.append(quiet)
        return tiny_model

    monkeypatch.setattr("pd_rerank.engines.loading.resolve_model", resolve)
    OCSFTBatchedReranker("short-name", verbose, dtype="float32", device="cpu")
    assert set(heard) == {told}


def test_calls_at_once_on_a_real_model_and_tokenizer_do_not_disturb_each_other(tiny_model: str) -> None:
    ranker = OCSFTBatchedReranker(tiny_model, 0, dtype="float32", device="cpu", window=2, max_concurrency=4)
    asked = [(f"query {i}", [f"text {i} {j} " * (j + 1) for j in range(5)]) for i in range(12)]

    async def everyone() -> list[Any]:
        return await asyncio.gather(*(ranker.rank_async(q, docs) for q, docs in asked))

    for results, (query, docs) in zip(asyncio.run(everyone()), asked, strict=True):
        assert [(r.text, r.score) for r in results] == [(r.text, r.score) for r in ranker.rank(query, docs)]
        assert len({r.score for r in results}) == 5


# -- what goes in --------------------------------------------------------------------------------------------


def test_strings_documents_and_a_mixture_rank_alike() -> None:
    ranker = make()
    as_documents = [Document(text) for text in DOCS]
    mixed = [DOCS[0], Document(DOCS[1]), DOCS[2]]
    plain = fields(ranker.rank(QUERY, DOCS))
    assert fields(ranker.rank(QUERY, as_documents)) == plain
    assert fields(ranker.rank(QUERY, mixed)) == plain
    assert fields(ranker.rank(QUERY, tuple(DOCS))) == plain
    assert [row[0] for row in plain] == [1, 2, 0]


def test_iterators_are_read_once_and_nothing_is_lost() -> None:
    results = make().rank(QUERY, (text for text in DOCS), doc_ids=iter("abc"), metadata=({"i": i} for i in range(3)))  # type: ignore[arg-type]
    assert [(r.doc_id, r.text, r.metadata) for r in results] == [
        ("b", DOCS[1], {"i": 1}),
        ("c", DOCS[2], {"i": 2}),
        ("a", DOCS[0], {"i": 0}),
    ]


def test_a_single_string_or_document_is_one_document() -> None:
    ranker = make()
    (one,) = ranker.rank(QUERY, "apples")
    assert (one.doc_id, one.rank) == (0, 1)
    assert one.score == pytest.approx(0.5)
    (other,) = ranker.rank(QUERY, Document("apples", doc_id="x", metadata={"a": 1}))
    assert (other.doc_id, other.rank, other.score, other.metadata) == ("x", 1, one.score, {"a": 1})


def test_documents_without_an_id_get_their_position_on_the_result_itself() -> None:
    results = make().rank(QUERY, [Document(DOCS[0]), Document(DOCS[1], doc_id="own"), DOCS[2]])
    assert {r.text: r.document.doc_id for r in results} == {DOCS[0]: 0, DOCS[1]: "own", DOCS[2]: 2}
    results = make().rank(QUERY, DOCS, doc_ids=["a", None, "c"])  # type: ignore[list-item]
    assert {r.text: r.doc_id for r in results} == {DOCS[0]: "a", DOCS[1]: 1, DOCS[2]: "c"}


@pytest.mark.parametrize("what", ["doc_ids", "metadata"])
@pytest.mark.parametrize("count", [0, 2, 4])
@pytest.mark.parametrize("as_documents", [False, True])
def test_too_few_or_too_many_entries_are_refused_with_both_numbers(what: str, count: int, as_documents: bool) -> None:
    docs: Sequence[Any] = [Document(text) for text in DOCS] if as_documents else DOCS
    entries: list[Any] = [{"i": i} if what == "metadata" else i for i in range(count)]
    with pytest.raises(ValueError, match=f"3 documents but {count} entries in {what}"):
        make().rank(QUERY, docs, **{what: entries})


def test_ids_keep_their_type_and_1_and_the_string_1_are_two_documents() -> None:
    results = make().rank(QUERY, DOCS, doc_ids=[1, "1", 1.5])  # type: ignore[list-item]
    assert [r.doc_id for r in results] == ["1", 1.5, 1]
    assert [type(r.doc_id) for r in results] == [str, float, int]


def test_an_id_of_0_or_the_empty_string_is_an_id() -> None:
    assert [r.doc_id for r in make().rank(QUERY, DOCS, doc_ids=[5, 0, ""])] == [0, "", 5]
    documents = [Document("apples", doc_id=0), Document("red apples", doc_id="")]
    assert [r.doc_id for r in make().rank(QUERY, documents)] == ["", 0]


def test_repeated_ids_and_repeated_texts_keep_separate_results() -> None:
    results = make().rank(QUERY, ["apples", "apples", "red apples", "pears"], doc_ids=["x", "x", "x", "y"])
    assert [(r.doc_id, r.text) for r in results] == [
        ("x", "red apples"),
        ("x", "apples"),
        ("x", "apples"),
        ("y", "pears"),
    ]
    assert [r.rank for r in results] == [1, 2, 3, 4]
    assert results[1].score == results[2].score


def test_passed_ids_and_metadata_replace_those_of_documents() -> None:
    documents = [Document(text, doc_id=f"own{i}", metadata={"own": i}) for i, text in enumerate(DOCS)]
    results = make().rank(QUERY, documents, doc_ids=["a", "b", "c"], metadata=[{"m": 0}, {"m": 1}, {"m": 2}])
    assert [(r.doc_id, r.metadata) for r in results] == [("b", {"m": 1}), ("c", {"m": 2}), ("a", {"m": 0})]
    kept = make().rank(QUERY, documents)
    assert [(r.doc_id, r.metadata) for r in kept] == [("own1", {"own": 1}), ("own2", {"own": 2}), ("own0", {"own": 0})]


def test_metadata_of_none_is_no_metadata() -> None:
    document = Document("apples")
    document.metadata = None
    results = make().rank(QUERY, [document, "red apples"], metadata=[None, {"a": 1}])  # type: ignore[list-item]
    assert [r.document.metadata for r in results] == [{"a": 1}, {}]
    assert make().rank(QUERY, document)[0].document.metadata == {}


def test_what_else_a_document_carries_comes_back() -> None:
    class Page(Document):  # type: ignore[misc]
        pass

    page = Page("apples", doc_id="p", image_path="scan.png", base64="aGk=")
    page.section = 4
    (result,) = make().rank(QUERY, [page])
    assert type(result.document) is Page
    assert (result.image_path, result.base64, result.section) == ("scan.png", "aGk=", 4)


def test_the_callers_objects_are_deep_equal_afterwards() -> None:
    ids, metadata = ["a", "a", "b"], [{"n": {"deep": [1, {"x": 2}]}}, {}, {"z": None}]
    documents = [Document(text, metadata={"own": [text]}) for text in DOCS]
    strings = list(DOCS)
    before = copy.deepcopy((ids, metadata, strings, [vars(d) for d in documents]))
    ranker = make(presentations=3)
    ranker.rank(QUERY, documents, doc_ids=ids, metadata=metadata)
    ranker.rank_many([QUERY, QUERY], [documents, strings], [ids, None], [metadata, None])
    ranker.retain(QUERY, documents, 0.5)
    assert (ids, metadata, strings, [vars(d) for d in documents]) == before


def test_results_share_nothing_that_can_be_changed_with_the_caller_or_each_other() -> None:
    shared: dict[str, Any] = {"nested": {"list": [1]}}
    document = Document("apples", doc_id="x", metadata=shared)
    ranker = make()
    first, second = ranker.rank(QUERY, [document, document]), ranker.rank(QUERY, [document, document])
    first[0].document.metadata["nested"]["list"].append(2)
    first[0].document.metadata["new"] = True
    first[0].document.text = "changed"
    first[0].document.doc_id = "changed"
    first.results.pop()
    assert shared == {"nested": {"list": [1]}}
    assert (document.text, document.doc_id) == ("apples", "x")
    assert first[0].document is not second[0].document
    assert [(r.text, r.doc_id, r.metadata) for r in second] == [("apples", "x", shared)] * 2


def test_metadata_that_cannot_be_copied_is_handed_through() -> None:
    handle = threading.Lock()
    (result,) = make().rank(QUERY, ["apples"], metadata=[{"handle": handle, "more": [handle]}])
    assert result.metadata["handle"] is handle
    assert result.metadata["more"] == [handle]


@pytest.mark.parametrize(
    ("docs", "says"),
    [
        ([1], "document 0 is a int"),
        (["a", None], "document 1 is a NoneType"),
        ([["a"]], "document 0 is a list"),
        ({"id": "text"}, "docs is a list"),
        (None, "docs is a list"),
        ([Document(document_type="image", base64="aGk=")], "document 0 is of type 'image'"),
    ],
)
def test_what_is_no_text_is_refused_by_position(docs: Any, says: str) -> None:
    with pytest.raises(BadArgument, match=says):
        make().rank(QUERY, docs)


@pytest.mark.parametrize("kept", ["doc_ids", "metadata"])
@pytest.mark.parametrize("value", ["a", {"a": 1}, 7])
def test_ids_or_metadata_that_are_no_list_are_refused(kept: str, value: Any) -> None:
    with pytest.raises(BadArgument, match=kept):
        make().rank(QUERY, "apples", **{kept: value})


def test_a_metadata_entry_that_is_no_dict_is_refused_by_position() -> None:
    with pytest.raises(BadArgument, match="metadata of document 1 is a str"):
        make().rank(QUERY, DOCS, metadata=[{}, "x", {}])  # type: ignore[list-item]


def test_a_query_that_is_no_string_is_refused() -> None:
    with pytest.raises(BadArgument, match="a query is a string, got list"):
        make().rank([QUERY], DOCS)  # type: ignore[arg-type]


# -- empty and blank -----------------------------------------------------------------------------------------


def test_an_empty_list_is_an_empty_result_and_no_engine_call() -> None:
    engine = FakeEngine()
    for options in ({}, {"presentations": 4}, {"calibration": "capcal"}, {"order": "canonical"}, {"window": 1}):
        results = make(engine, **options).rank(QUERY, [])
        assert (len(results), list(results), results.top_k(3), results.has_scores) == (0, [], [], True)
        assert results.presentations == 0
        assert results.get_score_by_docid("x") is None
    assert len(make(engine, threshold=0.5).retain(QUERY, [])) == 0
    assert len(make(engine).rank(QUERY, [], doc_ids=[], metadata=[])) == 0
    assert make(engine).rank_many([], []) == []
    assert engine.calls == 0


def test_an_empty_list_among_many_queries_keeps_its_place() -> None:
    engine = FakeEngine()
    many = make(engine).rank_many([QUERY, "nothing", QUERY], [DOCS, [], DOCS[:1]])
    assert [len(results) for results in many] == [3, 0, 1]
    assert [results.query for results in many] == [QUERY, "nothing", QUERY]
    assert engine.calls == 1


BLANKS = ["", "   ", "\n\t", "\u200b", "\ufeff \u2060", "\u00a0", "\0"]


@pytest.mark.parametrize("blank", BLANKS)
def test_a_blank_document_scores_0_and_leaves_its_neighbours_alone(blank: str) -> None:
    shown: list[str] = []

    def relevance(query: str, text: str) -> float:
        shown.append(text)
        return fake.word_overlap(query, text)

    ranker = make(FakeEngine(relevance=relevance, position_bias=0.3, companion_bias=0.2))
    without = {r.text: r.score for r in ranker.rank(QUERY, DOCS)}
    shown.clear()
    results = ranker.rank(QUERY, [DOCS[0], blank, *DOCS[1:]])
    assert sorted(shown) == sorted(DOCS)
    assert {r.text: r.score for r in results if r.text != blank} == without
    assert (results[-1].text, results[-1].score, results[-1].rank) == (blank, 0.0, 4)


def test_a_list_of_blanks_costs_no_engine_call_and_loses_no_result() -> None:
    engine = FakeEngine()
    results = make(engine, presentations=3).rank(QUERY, BLANKS)
    assert [r.score for r in results] == [0.0] * len(BLANKS)
    assert sorted(r.doc_id for r in results) == list(range(len(BLANKS)))
    assert engine.calls == 0


# -- what comes out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 7, 25, 39, 41])
def test_every_result_has_its_place_as_rank_and_a_score_that_falls(n: int) -> None:
    texts = [f"text {i}" for i in range(n)]
    results = make(FakeEngine(relevance=by_content)).rank(QUERY, texts)
    assert len(results) == results.results_count() == len(results.results) == n
    assert [r.rank for r in results] == list(range(1, n + 1))
    scores = [r.score for r in results]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == n
    assert sorted(r.text for r in results) == sorted(texts)
    assert results.has_scores


def test_scores_are_plain_python_numbers() -> None:
    results = make(presentations=3).rank(QUERY, [*DOCS, ""])
    for r in results:
        assert type(r.score) is float
        assert type(r.spread) is float
        assert {type(p) for p in r.grade_probabilities} == {float}
        assert type(r.rank) is int
        assert type(r.cut) is int
        assert 0.0 <= r.score <= 1.0
    json.dumps([(r.score, r.spread, r.grade_probabilities, r.rank, r.cut, r.doc_id) for r in results])
    assert type(make().score(QUERY, "apples")) is float


def test_a_score_is_the_expected_grade_of_its_grade_probabilities() -> None:
    for r in make(presentations=2).rank(QUERY, DOCS):
        assert sum(r.grade_probabilities) == pytest.approx(1)
        assert r.score == pytest.approx(sum(g * p for g, p in enumerate(r.grade_probabilities)) / 3)


def test_top_k_takes_the_best_and_refuses_negative_numbers() -> None:
    results = make().rank(QUERY, DOCS)
    assert [r.doc_id for r in results.top_k(2)] == [1, 2]
    assert results.top_k(0) == []
    assert len(results.top_k(10)) == 3
    with pytest.raises(ValueError, match="top_k must be 0 or more, got -1"):
        results.top_k(-1)
    results.top_k(2).clear()
    assert len(results) == 3


def test_an_id_is_found_as_number_or_string_and_the_exact_one_first() -> None:
    results = make().rank(QUERY, DOCS)
    assert results.get_score_by_docid(0) == results.get_score_by_docid("0") == pytest.approx(0.0399195, abs=1e-6)
    assert results.get_result_by_docid("1").text == DOCS[1]  # type: ignore[union-attr]
    named = make().rank(QUERY, DOCS, doc_ids=["7", 7, "x"])
    assert named.get_result_by_docid("7").text == DOCS[0]  # type: ignore[union-attr]
    assert named.get_result_by_docid(7).text == DOCS[1]  # type: ignore[union-attr]
    assert named.get_result_by_docid("y") is None
    assert named.get_score_by_docid(3) is None
    only = make().rank(QUERY, ["", "apples"])
    assert only.get_score_by_docid("0") == 0.0


def test_results_survive_deepcopy_and_pickle() -> None:
    results = make(FakeEngine(position_bias=0.2), presentations=3).rank(
        QUERY, [*DOCS, ""], doc_ids=["a", 1, "1", "a"], metadata=[{"n": {"x": [i]}} for i in range(4)]
    )
    for twin in (copy.deepcopy(results), pickle.loads(pickle.dumps(results)), copy.copy(results)):
        assert fields(twin) == fields(results)
        assert (twin.query, len(twin), twin.presentations) == (QUERY, 4, 3)
        assert np.array_equal(twin.table.grades, results.table.grades)  # type: ignore[union-attr]
    one = pickle.loads(pickle.dumps(results[0]))
    assert (one.text, one.score, one.n) == (results[0].text, results[0].score, results[0].n)
    deep = copy.deepcopy(results)
    deep[0].document.metadata["n"]["x"].append(9)
    assert results[0].metadata["n"]["x"] != deep[0].metadata["n"]["x"]


def test_a_result_answers_for_its_document_and_refuses_what_nobody_has() -> None:
    (result,) = make().rank(QUERY, "apples", metadata=[{"year": 2020}])
    assert (result.text, result.year, result.document_type) == ("apples", 2020, "text")
    with pytest.raises(AttributeError, match="colour"):
        result.colour  # noqa: B018
    assert "apples" in repr(result)


def test_score_is_the_score_of_the_document_alone() -> None:
    ranker = make(FakeEngine(position_bias=0.5, companion_bias=0.5))
    for doc in (DOCS[2], Document(DOCS[2], doc_id="x")):
        assert ranker.score(QUERY, doc) == ranker.rank(QUERY, [doc])[0].score == pytest.approx(0.5)
    assert math.isnan(make(FakeEngine(missing=lambda text: True)).score(QUERY, "apples"))
    assert ranker.score(QUERY, "") == 0.0


# -- grades that are missing ---------------------------------------------------------------------------------


def test_a_missing_grade_is_none_ranks_last_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    ranker = make(FakeEngine(missing=lambda text: "red" in text or text == "pears"))
    with caplog.at_level(logging.WARNING, logger="pd_rerank"):
        results = ranker.rank(QUERY, ["red apples", "apples", "pears", ""], doc_ids=[*"dcba"])
    assert [(r.doc_id, r.rank) for r in results] == [("c", 1), ("a", 2), ("b", 3), ("d", 4)]
    assert [r.score is None for r in results] == [False, False, True, True]
    assert (results[3].spread, results[3].grade_probabilities) == (None, None)
    assert [r.doc_id for r in results.top_k(2)] == ["c", "a"]
    assert results.get_score_by_docid("d") is None
    (record,) = caplog.records
    assert "2 of 4 grades are missing" in record.getMessage()
    assert "2 of 4 documents have none" in record.getMessage()
    assert int(results.table.fallback.sum()) == 2  # type: ignore[union-attr]


def test_grades_missing_in_some_presentations_are_counted_and_left_out_of_the_mean(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class FirstSlotLost(FakeEngine):
        def grade_logits(self, prompts: Any, grade_ids: Any, *, progress: Any = None) -> Any:
            read = super().grade_logits(prompts, grade_ids, progress=progress)
            for values in read:
                values[0, 2] = np.nan
            return read

    with caplog.at_level(logging.WARNING, logger="pd_rerank"):
        results = make(FirstSlotLost(relevance=by_content), presentations=4).rank(QUERY, DOCS)
    assert "4 of 12 grades are missing" in caplog.text
    for r in results:
        assert r.score == pytest.approx(fake_score(by_content("", r.text)), abs=1e-6)


def test_no_warning_where_nothing_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="pd_rerank"):
        make(presentations=3).rank(QUERY, [*DOCS, "", DOCS[0]])
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("wrong", ["fewer", "shape"])
def test_an_engine_that_breaks_its_contract_is_an_error_not_a_score(wrong: str) -> None:
    class Wrong(FakeEngine):
        def grade_logits(self, prompts: Any, grade_ids: Any, *, progress: Any = None) -> Any:
            read = super().grade_logits(prompts, grade_ids, progress=progress)
            return read[1:] if wrong == "fewer" else [values[1:] for values in read]

    with pytest.raises(EngineFailure, match="engine 'fake' returned"):
        make(Wrong()).rank(QUERY, DOCS)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyError("layer"), ZeroDivisionError("x")])
def test_an_error_of_the_engine_is_never_swallowed(error: Exception) -> None:
    class Failing(FakeEngine):
        def grade_logits(self, prompts: Any, grade_ids: Any, *, progress: Any = None) -> Any:
            raise error

    ranker = make(Failing(), threshold=0.5)
    calls: list[Callable[[], Any]] = [
        lambda: ranker.rank(QUERY, DOCS),
        lambda: ranker.rank_many([QUERY], [DOCS]),
        lambda: ranker.score(QUERY, "apples"),
        lambda: ranker.retain(QUERY, DOCS),
        lambda: asyncio.run(ranker.rank_async(QUERY, DOCS)),
    ]
    for call in calls:
        with pytest.raises(type(error)) as caught:
            call()
        assert caught.value is error


# -- many queries --------------------------------------------------------------------------------------------

MANY = [
    ("red apples", ["apples", "red", "green pears", "red apples"]),
    ("green pears", [f"pears {i}" for i in range(23)]),
    ("nothing", []),
    ("red apples", ["apples", "red", "green pears", "red apples"]),
    ("blank", ["", "blank", "\u200b"]),
]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 1},
        {"window": 3, "partition": "hashed", "order": "canonical"},
        {"window": 5, "presentations": 3},
        {"window": 5, "presentations": 3, "shuffle": "window"},
        {"window": 5, "presentations": 2, "calibration": "capcal"},
        {"readout": "p_relevant", "partition": "contiguous", "order": "reverse"},
    ],
    ids=str,
)
def test_many_queries_at_once_are_one_engine_call_and_rank_as_one_by_one(options: dict[str, Any]) -> None:
    engine = FakeEngine(relevance=by_content, position_bias=0.4, companion_bias=0.3)
    ranker = make(engine, **options)
    together = ranker.rank_many([q for q, _ in MANY], [d for _, d in MANY])
    assert engine.calls == 1
    apart = [ranker.rank(q, d) for q, d in MANY]
    assert [fields(r) for r in together] == [fields(r) for r in apart]
    assert [r.query for r in together] == [q for q, _ in MANY]
    backwards = ranker.rank_many([q for q, _ in MANY][::-1], [d for _, d in MANY][::-1])
    assert [fields(r) for r in backwards[::-1]] == [fields(r) for r in together]


def test_presentations_stop_per_query_alike_alone_and_together() -> None:
    engine = FakeEngine(relevance=by_content, position_bias=0.4)
    ranker = make(engine, presentations=12, settle=Settle(top_k=1), window=5)
    together = ranker.rank_many([q for q, _ in MANY], [d for _, d in MANY])
    apart = [ranker.rank(q, d) for q, d in MANY]
    assert [fields(r) for r in together] == [fields(r) for r in apart]
    assert [r.presentations for r in together] == [r.presentations for r in apart]
    assert len({r.presentations for r in together if len(r)}) > 1


def test_many_queries_carry_their_own_ids_and_metadata() -> None:
    many = make().rank_many(
        ["a", "b"], [["a", "x"], Document("b", doc_id="own")], [["1", "2"], None], [None, [{"k": 1}]]
    )
    assert [[(r.doc_id, r.metadata) for r in results] for results in many] == [
        [("1", {}), ("2", {})],
        [("own", {"k": 1})],
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((["a", "b"], [["x"]]), "2 queries but 1 entries in docs"),
        ((["a"], [["x"]], []), "1 queries but 0 entries in doc_ids"),
        ((["a"], [["x"]], None, [None, None]), "1 queries but 2 entries in metadata"),
        (("a", [["x"]]), "use rank for one"),
        ((["a", "b"], "xy"), "use rank for one"),
    ],
)
def test_lists_of_queries_that_do_not_match_are_refused(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(BadArgument, match=says):
        make().rank_many(*arguments)


def test_progress_counts_every_window_once() -> None:
    seen: list[int] = []
    engine = FakeEngine()
    make(engine, window=2).rank_many([QUERY, QUERY], [DOCS, DOCS], progress=seen.append)
    assert sum(seen) == engine.prompts == 4


# -- scores and windows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("n", [0, 1, 7, 20, 25, 39, 40, 41])
def test_every_document_is_graded_exactly_once_in_windows_of_20(n: int, partition: str) -> None:
    shown: list[str] = []

    def relevance(query: str, text: str) -> float:
        shown.append(text)
        return by_content(query, text)

    engine = FakeEngine(relevance=relevance)
    texts = [f"text {i}" for i in range(n)]
    results = make(engine, partition=partition).rank(QUERY, texts)
    assert sorted(shown) == sorted(texts)
    assert engine.prompts == -(-n // 20) or partition == "hashed"
    expected = {text: fake_score(by_content("", text)) for text in texts}
    assert {r.text: r.score for r in results} == pytest.approx(expected, abs=1e-6)
    several = make(engine, partition=partition, presentations=3).rank(QUERY, texts)
    assert {r.text: r.score for r in several} == pytest.approx(expected, abs=1e-6)
    assert several.table is not None
    for windows, slots in zip(several.table.window.tolist(), several.table.slot.tolist(), strict=True):
        assert len(set(zip(windows, slots, strict=True))) == n
        assert all(0 <= slot < 20 for slot in slots)


@cache
def ranker_with(relevance: Callable[[str, str], float], bias: float, **options: Any) -> OCSFTBatchedReranker:
    return make(FakeEngine(relevance=relevance, position_bias=bias, companion_bias=bias), **options)


TEXTS = st.lists(st.text(alphabet="abc \n\u200b", max_size=3), max_size=30)
SHUFFLES = st.integers(0, 2**32).map(random.Random)
LAYOUTS = st.fixed_dictionaries(
    {
        "partition": st.sampled_from(PARTITIONS),
        "presentations": st.sampled_from([1, 2, 5]),
        "shuffle": st.sampled_from(["pool", "window"]),
        "window": st.sampled_from([2, 5, 20]),
    }
)


@settings(deadline=None, max_examples=60)
@given(texts=TEXTS, layout=LAYOUTS, order=st.sampled_from(["given", "reverse", "canonical"]))
def test_a_score_follows_its_text_under_every_partition_and_k(
    texts: list[str], layout: dict[str, Any], order: str
) -> None:
    ranker = ranker_with(by_content, 0.0, order=order, **layout)
    results = ranker.rank(QUERY, texts, doc_ids=[f"d{i}" for i in range(len(texts))])
    assert sorted(r.doc_id for r in results) == sorted(f"d{i}" for i in range(len(texts)))
    for r in results:
        shown = " ".join(r.text.split())
        blank = not shown.replace("\u200b", "").strip()
        assert r.text == texts[int(r.doc_id[1:])]
        assert r.score == pytest.approx(0.0 if blank else fake_score(by_content("", shown)), abs=1e-6)


@settings(deadline=None, max_examples=100)
@given(texts=TEXTS, layout=LAYOUTS, shuffle=SHUFFLES)
def test_canonical_order_decides_the_same_whatever_order_the_texts_arrive_in(
    texts: list[str], layout: dict[str, Any], shuffle: random.Random
) -> None:
    ranker = ranker_with(by_content, 0.4, order="canonical", **layout)
    arrived = shuffle.sample(texts, len(texts))
    assert [(r.text, r.score, r.spread) for r in ranker.rank(QUERY, arrived)] == [
        (r.text, r.score, r.spread) for r in ranker.rank(QUERY, texts)
    ]


@settings(deadline=None, max_examples=100)
@given(
    docs=st.lists(st.tuples(st.sampled_from([1, "1", 2, "b"]), st.sampled_from(["x", "y", " x", ""])), max_size=14),
    layout=LAYOUTS,
    shuffle=SHUFFLES,
)
def test_canonical_order_holds_for_repeated_and_mixed_ids_too(
    docs: list[tuple[str | int, str]], layout: dict[str, Any], shuffle: random.Random
) -> None:
    ranker = ranker_with(by_content, 0.4, order="canonical", **layout)

    def decided(asked: list[tuple[str | int, str]]) -> list[tuple[str, str, float | None]]:
        results = ranker.rank(QUERY, [text for _, text in asked], doc_ids=[i for i, _ in asked])
        return [(repr(r.doc_id), r.text, r.score) for r in results]

    assert decided(shuffle.sample(docs, len(docs))) == decided(docs)


@settings(deadline=None, max_examples=100)
@given(texts=TEXTS, partition=st.sampled_from(PARTITIONS), k=st.sampled_from([1, 3]), shuffle=SHUFFLES)
def test_windows_of_one_score_the_same_whatever_order_the_texts_arrive_in(
    texts: list[str], partition: str, k: int, shuffle: random.Random
) -> None:
    ranker = ranker_with(by_content, 0.4, window=1, partition=partition, presentations=k)
    arrived = shuffle.sample(texts, len(texts))
    assert [(r.text, r.score) for r in ranker.rank(QUERY, arrived)] == [
        (r.text, r.score) for r in ranker.rank(QUERY, texts)
    ]


def test_the_order_laws_are_tested_on_an_engine_that_breaks_them_otherwise() -> None:
    ranker = ranker_with(by_content, 0.4, window=5)
    texts = [f"text {i}" for i in range(12)]
    assert [(r.text, r.score) for r in ranker.rank(QUERY, texts)] != [
        (r.text, r.score) for r in ranker.rank(QUERY, texts[::-1])
    ]


@settings(deadline=None, max_examples=60)
@given(
    docs=st.lists(st.tuples(st.sampled_from(["x", "y", "1"]), st.sampled_from("abcd")), max_size=10), shuffle=SHUFFLES
)
def test_ties_never_go_by_arrival_even_among_repeated_ids(docs: list[tuple[str, str]], shuffle: random.Random) -> None:
    ranker = ranker_with(fake.word_overlap, 0.0)

    def decided(asked: list[tuple[str, str]]) -> list[tuple[str, str]]:
        return [
            (r.doc_id, r.text) for r in ranker.rank("no word of them", [t for _, t in asked], [i for i, _ in asked])
        ]

    assert decided(shuffle.sample(docs, len(docs))) == decided(docs)
    assert [i for i, _ in decided(docs)] == sorted(i for i, _ in docs)


def test_a_score_is_no_function_of_its_list() -> None:
    ranker = make()
    alone = ranker.rank(QUERY, ["apples"])[0].score
    assert alone == pytest.approx(0.5)
    assert {r.score for r in ranker.rank(QUERY, ["apples"] * 30)} == {alone}
    for others in (["red apples"], ["pears"], ["red apples", "pears", ""]):
        for window in (1, 2, 20):
            assert make(window=window).rank(QUERY, ["apples", *others]).get_score_by_docid(0) == alone


def test_equal_grades_make_equal_scores_not_zeros() -> None:
    results = make(FakeEngine(relevance=lambda q, t: 0.5)).rank(QUERY, [f"text {i}" for i in range(25)])
    assert {r.score for r in results} == {results[0].score}
    assert results[0].score == pytest.approx(0.5)


# -- options that must not be accepted and ignored -----------------------------------------------------------


class Watched(FakeEngine):
    """Keeps every prompt it was given, as text."""

    def __init__(self) -> None:
        super().__init__(relevance=by_content, position_bias=0.4, companion_bias=0.3)
        self.seen: list[str] = []

    def grade_logits(self, prompts: Any, grade_ids: Any, *, progress: Any = None) -> Any:
        self.seen += [self.tokenizer.decode(p.token_ids.tolist()) for p in prompts]
        return super().grade_logits(prompts, grade_ids, progress=progress)


@pytest.mark.parametrize(
    ("base", "option"),
    [
        ({}, {"window": 3}),
        ({"window": 3}, {"partition": "contiguous"}),
        ({"window": 3}, {"partition": "hashed"}),
        ({}, {"order": "reverse"}),
        ({}, {"order": "canonical"}),
        ({}, {"presentations": 3}),
        ({"presentations": 3}, {"seed": 9}),
        ({"presentations": 3, "window": 3}, {"shuffle": "window"}),
        ({}, {"calibration": "capcal"}),
        ({}, {"readout": "argmax"}),
        ({}, {"slot_residual": RESIDUAL}),
        ({"presentations": 9}, {"settle": Settle(top_k=1, tolerance=9)}),
        ({}, {"rubric": "answer_support"}),
        ({}, {"instruction": "Grade by colour."}),
        ({}, {"markers": "alpha"}),
        ({}, {"placeholder": "?"}),
        ({}, {"max_doc_chars": 3}),
    ],
    ids=str,
)
def test_no_option_is_accepted_and_ignored(base: dict[str, Any], option: dict[str, Any]) -> None:
    def outcome(**options: Any) -> tuple[list[str], list[float | None]]:
        engine = Watched()
        results = make(engine, **options).rank(QUERY, [f"text {i}" for i in range(8)])
        return engine.seen, [r.score for r in results]

    assert outcome(**base, **option) != outcome(**base)


def test_each_readout_is_read_from_the_same_grade_probabilities() -> None:
    for r in make(readout="p_relevant").rank(QUERY, DOCS):
        assert r.score == pytest.approx(r.grade_probabilities[2] + r.grade_probabilities[3])
    results = make(FakeEngine(relevance=lambda q, t: {"a": 0.9, "b": 0.3}[t]), readout="argmax").rank(QUERY, ["b", "a"])
    assert [(r.text, r.score) for r in results] == [("a", 1.0), ("b", pytest.approx(1 / 3))]


def test_a_slot_residual_is_taken_off_the_score_and_decides_the_rank() -> None:
    plain = {r.text: r.score for r in make().rank(QUERY, ["apples", "red"])}
    results = make(slot_residual=RESIDUAL).rank(QUERY, ["apples", "red"])
    assert [r.text for r in results] == ["red", "apples"]
    assert [r.score for r in results] == pytest.approx([plain["red"] + 0.1, plain["apples"] - 0.1])


def test_shuffling_inside_windows_moves_slots_and_leaves_companions() -> None:
    texts = [f"text {i}" for i in range(12)]
    for shuffle, companions_stay in (("window", True), ("pool", False)):
        table = make(window=4, presentations=5, shuffle=shuffle).rank(QUERY, texts).table
        assert table is not None
        assert bool((table.window == table.window[0]).all()) is companions_stay
        assert not (table.slot == table.slot[0]).all()


def test_an_instruction_reaches_the_prompt_in_the_rubrics_place() -> None:
    engine = Watched()
    make(engine, instruction="Grade by colour alone.").rank(QUERY, DOCS)
    assert "Grade by colour alone." in engine.seen[0]
    assert load_rubric("passage_relevance").instruction not in engine.seen[0]


def test_a_chat_template_is_not_asked_of_a_tokenizer_without_one() -> None:
    with pytest.raises(ModelMismatch, match="no chat template"):
        make(chat=True)


def test_a_chat_template_that_drops_the_users_turn_is_refused_before_any_score() -> None:
    class Deaf(fake.FakeTokenizer):
        chat_template = "yes"  # type: ignore[assignment]

        def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
            return "".join(f"<{m['role']}>{m['content']}\n" for m in messages if m["role"] != "user")

    engine = FakeEngine()
    engine.tokenizer = Deaf()
    with pytest.raises(ModelMismatch, match="does not keep the query and documents"):
        make(engine)


def test_grades_are_asked_for_by_token_id() -> None:
    asked: list[list[int]] = []

    class Asked(FakeEngine):
        def grade_logits(self, prompts: Any, grade_ids: Any, *, progress: Any = None) -> Any:
            asked.append(list(grade_ids))
            return super().grade_logits(prompts, grade_ids, progress=progress)

    make(Asked()).rank(QUERY, ["١ ² ３ 10", "apples"])
    assert asked == [[ord(c) for c in "0123"]]


def test_long_documents_are_cut_to_the_budget_and_no_slot_is_lost() -> None:
    engine = Watched()
    engine.max_length = 2600
    texts = [f"word{i} " * 5000 for i in range(20)]
    results = make(engine).rank("word7", [*texts, "word7 is short"])
    assert len(engine.seen) >= 2
    assert max(map(len, engine.seen)) <= 2600
    assert [r.cut > 20_000 for r in results if r.doc_id != 20] == [True] * 20
    assert next(r.cut for r in results if r.doc_id == 20) == 0
    assert all(r.score is not None for r in results)


def test_a_limit_that_does_not_bind_changes_nothing() -> None:
    seen = []
    for options in ({}, {"max_doc_chars": 0}, {"max_doc_chars": 500}):
        engine = Watched()
        results = make(engine, **options).rank(QUERY, [*DOCS, "exactly " * 20])
        seen.append((engine.seen, fields(results)))
    assert seen[0] == seen[1] == seen[2]
    assert [row[-1] for row in seen[0][1]] == [0, 0, 0, 0]


def test_a_query_too_long_for_the_model_is_an_error_with_the_numbers() -> None:
    with pytest.raises(InvalidData, match="tokens of 1500"):
        make(FakeEngine(max_length=1500)).rank("long " * 400, DOCS)


# -- the adapter's template ----------------------------------------------------------------------------------


def carrying(card: dict[str, Any]) -> FakeEngine:
    engine = FakeEngine()
    engine.adapter_card = card  # type: ignore[attr-defined]
    return engine


def test_an_adapter_made_with_another_template_is_refused_unless_overridden() -> None:
    card = {"template_hash": "0" * 64, "markers": "alpha", "placeholder": "0"}
    with pytest.raises(ModelMismatch, match=r"000000000000, this prompt is .*differ in markers.*check_template=False"):
        make(carrying(card))
    with pytest.raises(ModelMismatch, match="template"):
        Reranker("m", model_type="ocsft", engine=carrying(card), verbose=0)
    assert len(make(carrying(card), check_template=False).rank(QUERY, DOCS)) == 3


def test_an_adapter_made_with_this_template_is_taken() -> None:
    plain, other = make(), make(markers="alpha")
    assert make(carrying(plain.prompt.describe())).prompt.hash == plain.prompt.hash
    with pytest.raises(ModelMismatch, match="differ in markers"):
        make(carrying(other.prompt.describe()))
    make(carrying(other.prompt.describe()), markers="alpha")


# -- thresholds ----------------------------------------------------------------------------------------------


def test_retain_keeps_what_reaches_the_threshold_best_first() -> None:
    results = make().retain(QUERY, DOCS, 0.5 - 1e-9, doc_ids=["a", "b", "c"], metadata=[{"i": i} for i in range(3)])
    assert [(r.doc_id, r.rank, r.metadata) for r in results] == [("b", 1, {"i": 1}), ("c", 2, {"i": 2})]
    assert len(results) == 2
    assert results.table.grades.shape == (1, 3, 4)  # type: ignore[union-attr]


def test_a_threshold_is_reached_by_the_score_that_equals_it() -> None:
    score = make().score(QUERY, "apples")
    assert [r.doc_id for r in make(threshold=score).retain(QUERY, DOCS)] == [1, 2]


@pytest.mark.parametrize("threshold", [0.99, 1.5, np.float32(0.99), np.int64(1), 2])
def test_a_threshold_none_reaches_gives_an_empty_result(threshold: Any) -> None:
    results = make().retain(QUERY, DOCS, threshold)
    assert (len(results), list(results), results.top_k(5)) == (0, [], [])


def test_a_threshold_may_be_a_number_an_object_or_its_file_here_or_in_the_constructor(tmp_path: Path) -> None:
    fitted = Threshold(value=0.4, objective="f1", reached=0.9, n_queries=3)
    fitted.save(tmp_path / "threshold.json")
    for given_as in (0.4, fitted, tmp_path / "threshold.json", str(tmp_path / "threshold.json")):
        assert [r.doc_id for r in make().retain(QUERY, DOCS, given_as)] == [1, 2]
        assert [r.doc_id for r in make(threshold=given_as).retain(QUERY, DOCS)] == [1, 2]
        assert [r.doc_id for r in make(threshold=given_as).retain(QUERY, DOCS, 0.0)] == [1, 2, 0]


def test_retain_without_any_threshold_says_where_to_give_one() -> None:
    with pytest.raises(BadArgument, match="pass one here or to the constructor"):
        make().retain(QUERY, DOCS)


def test_a_threshold_of_0_is_a_threshold() -> None:
    assert len(make(threshold=0.0).retain(QUERY, [*DOCS, ""])) == 4


def test_a_threshold_fitted_on_another_readout_is_refused() -> None:
    fitted = Threshold(value=0.4, objective="f1", readout="p_relevant")
    with pytest.raises(BadArgument, match="fitted on readout 'p_relevant', asked for is 'expected'"):
        make(threshold=fitted)
    with pytest.raises(BadArgument, match="p_relevant"):
        make().retain(QUERY, DOCS, fitted)
    assert len(make(threshold=fitted, readout="p_relevant").retain(QUERY, DOCS)) == 2


def test_a_slot_residual_fitted_on_another_readout_is_refused(tmp_path: Path) -> None:
    RESIDUAL.save(tmp_path / "residual.json")
    for given_as in (RESIDUAL, tmp_path / "residual.json"):
        with pytest.raises(BadArgument, match="fitted on readout 'expected', asked for is 'argmax'"):
            make(slot_residual=given_as, readout="argmax")
        make(slot_residual=given_as)


def test_a_document_without_a_grade_is_never_retained(caplog: pytest.LogCaptureFixture) -> None:
    ranker = make(FakeEngine(missing=lambda text: "red" in text))
    assert [r.doc_id for r in ranker.retain(QUERY, DOCS, -1.0)] == [2, 0]


# -- many callers --------------------------------------------------------------------------------------------


def test_rank_async_is_rank_ids_metadata_and_all() -> None:
    ranker = make(FakeEngine(position_bias=0.3), presentations=2)
    arguments: dict[str, Any] = {"doc_ids": ["a", 1, "1"], "metadata": [{"n": [i]} for i in range(3)]}
    later = asyncio.run(ranker.rank_async(QUERY, DOCS, **arguments))
    assert fields(later) == fields(ranker.rank(QUERY, DOCS, **arguments))
    assert [r.metadata for r in later] == [{"n": [1]}, {"n": [2]}, {"n": [0]}]
    assert type(later) is type(ranker.rank(QUERY, DOCS))


def test_a_hundred_concurrent_calls_each_get_their_own_answer_within_the_bound() -> None:
    engine = Busy(relevance=by_content)
    ranker = make(engine, max_concurrency=3)
    asked = [
        (f"query {i}", [f"text {i} {j}" for j in range(4)], [{"i": i, "j": j} for j in range(4)]) for i in range(100)
    ]

    async def everyone() -> list[Any]:
        return await asyncio.gather(*(ranker.rank_async(q, docs, metadata=m) for q, docs, m in asked))

    answers = asyncio.run(everyone())
    assert 1 < engine.peak <= 3
    assert engine.entered == 100
    assert [fields(a) for a in answers] == [fields(ranker.rank(q, docs, metadata=m)) for q, docs, m in asked]


def test_one_reranker_serves_several_event_loops_in_sequence_under_contention() -> None:
    engine = Busy()
    ranker = make(engine, max_concurrency=1)

    async def eight() -> list[Any]:
        return await asyncio.gather(*(ranker.rank_async(QUERY, DOCS) for _ in range(8)))

    for _ in range(3):
        assert [len(results) for results in asyncio.run(eight())] == [3] * 8
    assert engine.peak == 1
    assert engine.entered == 24


def test_the_bound_holds_over_event_loops_in_several_threads() -> None:
    engine = Busy()
    ranker = make(engine, max_concurrency=2)

    async def eight() -> list[Any]:
        return await asyncio.gather(*(ranker.rank_async(QUERY, DOCS) for _ in range(8)))

    threads = [threading.Thread(target=lambda: asyncio.run(eight())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.entered == 24
    assert engine.peak <= 2


def test_a_reranker_holds_on_to_no_event_loop() -> None:
    ranker = make(Busy(), max_concurrency=1)
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def eight() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await asyncio.gather(*(ranker.rank_async(QUERY, DOCS) for _ in range(8)))

    asyncio.run(eight())
    gc.collect()
    assert loops[0]() is None


def test_the_event_loop_runs_on_while_documents_are_graded() -> None:
    engine = Busy()
    engine.open.clear()
    ranker = make(engine)

    async def graded() -> Any:
        task = asyncio.create_task(ranker.rank_async(QUERY, DOCS))
        while not engine.active:
            await asyncio.sleep(0.001)
        engine.open.set()
        return await task

    assert len(asyncio.run(graded())) == 3


def test_a_call_cancelled_while_it_waits_never_reaches_the_engine() -> None:
    engine = Busy()
    engine.open.clear()
    ranker = make(engine, max_concurrency=1)

    async def scenario() -> None:
        first = asyncio.create_task(ranker.rank_async(QUERY, DOCS))
        while not engine.active:
            await asyncio.sleep(0.001)
        second = asyncio.create_task(ranker.rank_async(QUERY, DOCS))
        await asyncio.sleep(0.01)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        engine.open.set()
        assert len(await first) == 3
        assert len(await ranker.rank_async(QUERY, DOCS)) == 3

    asyncio.run(scenario())
    assert engine.entered == 2


def test_cancelled_calls_still_count_towards_the_bound_until_they_are_done() -> None:
    engine = Busy()
    engine.open.clear()
    ranker = make(engine, max_concurrency=1)

    async def scenario() -> None:
        for _ in range(5):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ranker.rank_async(QUERY, DOCS), 0.02)
        engine.open.set()
        assert len(await ranker.rank_async(QUERY, DOCS)) == 3

    asyncio.run(scenario())
    assert engine.peak == 1
    assert engine.entered == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_has_threads_of_its_own() -> None:
    script = (
        "import asyncio, os, signal, sys, time\n"
        "from pd_rerank import OCSFTBatchedReranker\n"
        "ranker = OCSFTBatchedReranker('m', verbose=0, engine='fake')\n"
        "asyncio.run(ranker.rank_async('q', ['a', 'q']))\n"
        "time.sleep(0.5)  # until the thread says that it is idle\n"
        "if os.fork():\n"
        "    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
        "signal.alarm(30)\n"
        "asyncio.run(ranker.rank_async('q', ['a', 'q']))\n"
        "os._exit(0)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


def test_rank_async_raises_what_rank_raises() -> None:
    with pytest.raises(BadArgument, match="3 documents but 1 entries"):
        asyncio.run(make().rank_async(QUERY, DOCS, doc_ids=["a"]))


def test_a_reranker_that_served_async_calls_lets_the_process_end() -> None:
    script = (
        "import asyncio\n"
        "from pd_rerank import FakeEngine, OCSFTBatchedReranker\n"
        "ranker = OCSFTBatchedReranker('m', 0, engine=FakeEngine())\n"
        "print(len(asyncio.run(ranker.rank_async('q', ['a', 'b']))))\n"
    )
    without = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", without + script],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONDEVMODE": "1"},
    )
    assert (run.returncode, run.stdout) == (0, "2\n"), run.stderr


# -- grades that are written down -----------------------------------------------------------------------------------


def test_a_chat_model_ranks_under_the_same_interface() -> None:
    from tests.engines.chat_server import ChatServer

    with ChatServer() as server:
        ranker = Reranker("judge", model_type="ocsft", engine="generated", server=server.url, window=2, verbose=0)
        ranked = ranker.rank(QUERY, DOCS, doc_ids=["a", "b", "c"])
        assert [(r.doc_id, r.score) for r in ranked.results] == [("b", 1.0), ("c", pytest.approx(2 / 3)), ("a", 0.0)]
        assert ranked.results[0].grade_probabilities == (0, 0, 0, 1)
        assert [d["model"] for d in server.requests] == ["judge", "judge"]
        kept = ranker.retain(QUERY, DOCS, 0.5, doc_ids=["a", "b", "c"])
        assert [r.doc_id for r in kept.results] == ["b", "c"]
        reasoned = OCSFTBatchedReranker("judge", engine=GeneratedEngine("judge", server=server.url), reasons=True)
        assert reasoned.prompt.hash != ranker.prompt.hash


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "need a server's address"),
        ({"calibration": "capcal"}, "calibration corrects grade probabilities"),
        ({"placeholder": "?"}, "for reading slots"),
        ({"chat": False}, "for reading slots"),
        ({"template_kwargs": {"enable_thinking": False}}, "for reading slots"),
        ({"adapter": "x"}, "takes no adapter"),
        ({"dtype": "float32"}, "unknown option 'dtype'"),
        ({"engine": "fake", "reasons": True}, "grades that are written down"),
    ],
)
def test_what_means_nothing_to_written_grades_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadArgument, match=said):
        OCSFTBatchedReranker("judge", **{"engine": "generated", **options})
