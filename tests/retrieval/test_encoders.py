"""Encoders give what plain transformers gives, one text at a time and unpadded, and read a model's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pd_rerank.errors import BadArgument, MissingResource, ModelMismatch
from pd_rerank.retrieval.encoders import DenseEncoder, PyseriniQuery, SpladeEncoder, load_encoder, quantised
from tests.retrieval.tiny_encoders import TEXTS, WORDS, bert, sentence_transformer

pytest.importorskip("transformers", reason="encoders need the extra 'hf'")

MEAN = {"word_embedding_dimension": 16, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert(tmp_path_factory.mktemp("splade-toy"), head=True)


def states(folder: Path, text: str, *, head: bool = False, max_length: int = 32) -> Any:
    """Token states, or vocabulary scores, of one text on its own, by plain transformers."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = (transformers.AutoModelForMaskedLM if head else transformers.AutoModel).from_pretrained(folder).eval()
    clean = text.encode("utf-8", "replace").decode()
    with torch.no_grad():
        out = model(**tokenizer(clean, return_tensors="pt", truncation=True, max_length=max_length))
    return (out.logits if head else out.last_hidden_state)[0].numpy()


@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
@pytest.mark.parametrize("l2_norm", [True, False])
def test_vectors_are_those_of_each_text_alone_and_unpadded(plain: Path, pooling: Any, l2_norm: bool) -> None:
    encoder = DenseEncoder(plain, pooling=pooling, l2_norm=l2_norm, batch_size=3)
    found = encoder.encode(TEXTS)
    for text, vector in zip(TEXTS, found, strict=True):
        rows = states(plain, text)
        want = {"cls": rows[0], "mean": rows.mean(axis=0), "last": rows[-1]}[pooling]
        if l2_norm:
            want = want / np.linalg.norm(want)
        np.testing.assert_allclose(vector, want, atol=2e-6)
    assert found.dtype == np.float32
    assert found.shape == (len(TEXTS), 16) == (len(TEXTS), encoder.dimension)


def test_batches_change_no_vector_beyond_rounding_and_order_is_kept(plain: Path) -> None:
    whole = DenseEncoder(plain, pooling="mean", l2_norm=True).encode(TEXTS)
    for size, tokens in ((1, None), (2, 40), (64, 33)):
        some = DenseEncoder(plain, pooling="mean", l2_norm=True, batch_size=size, batch_tokens=tokens).encode(TEXTS)
        np.testing.assert_allclose(some, whole, atol=2e-6)


def test_no_batch_holds_more_tokens_than_its_budget_unless_one_text_does(plain: Path) -> None:
    encoder = DenseEncoder(plain, pooling="mean", l2_norm=True, batch_tokens=40)
    ids = encoder._token_ids(TEXTS * 3, "document")
    shapes = [tuple(tokens.shape) for _, tokens, _ in encoder._batches(ids)]
    assert all(rows * longest <= 40 or rows == 1 for rows, longest in shapes)
    assert sum(rows for rows, _ in shapes) == 3 * len(TEXTS)


def test_term_weights_are_log1p_relu_at_the_highest_token(masked: Path) -> None:
    encoder = load_encoder(masked)
    assert encoder.kind == "sparse"
    for text, weights in zip(TEXTS, encoder.encode(TEXTS), strict=True):
        want = np.log1p(np.maximum(states(masked, text, head=True), 0.0)).max(axis=0)
        assert set(weights) == {WORDS[i] for i in np.flatnonzero(want > 0)}
        for i, word in enumerate(WORDS):
            assert weights.get(word, 0.0) == pytest.approx(want[i], abs=2e-5)
        assert list(weights.values()) == sorted(weights.values(), reverse=True)


def test_max_terms_keeps_the_heaviest(masked: Path) -> None:
    whole, few = (SpladeEncoder(masked, max_terms=n).encode(TEXTS[:1])[0] for n in (None, 3))
    assert list(few.items()) == list(whole.items())[:3]


def test_prefixes_go_in_front_of_their_side_only(plain: Path) -> None:
    encoder = DenseEncoder(plain, pooling="mean", l2_norm=True, query_prefix="query: ", doc_prefix="passage: ")
    bare = DenseEncoder(plain, pooling="mean", l2_norm=True)
    query, document = encoder.encode(["a dog"], side="query"), encoder.encode(["a dog"])
    np.testing.assert_allclose(query, bare.encode(["query: a dog"]), atol=1e-6)
    np.testing.assert_allclose(document, bare.encode(["passage: a dog"]), atol=1e-6)


def test_texts_are_cut_at_max_length(plain: Path) -> None:
    encoder = DenseEncoder(plain, pooling="mean", l2_norm=False, max_length=6)
    np.testing.assert_allclose(
        encoder.encode(TEXTS[3:4])[0], states(plain, TEXTS[3], max_length=6).mean(axis=0), atol=2e-6
    )


def test_a_model_that_says_nothing_about_pooling_is_refused(plain: Path) -> None:
    with pytest.raises(BadArgument, match="how tokens are pooled; give pooling cls or mean"):
        load_encoder(plain)


def test_the_files_of_a_sentence_transformers_folder_are_followed(tmp_path: Path) -> None:
    prompts = {"query": "query: ", "document": "passage: "}
    folder = sentence_transformer(tmp_path / "m", pooling=MEAN, inner="0_Transformer", max_length=7, prompts=prompts)
    found = load_encoder(folder).describe()
    assert found["kind"] == "dense"
    assert (found["pooling"], found["l2_norm"], found["max_length"], found["dimension"]) == ("mean", True, 7, 16)
    assert (found["query_prefix"], found["doc_prefix"]) == ("query: ", "passage: ")
    assert list(found["weights_sha256"]) == ["model.safetensors"]


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": ["cls"]}, "cls"),
    ],
)
def test_both_spellings_of_pooling_are_read(tmp_path: Path, config: dict[str, Any], pooling: str) -> None:
    encoder = load_encoder(sentence_transformer(tmp_path / "m", pooling=config, normalise=False))
    assert isinstance(encoder, DenseEncoder)
    assert (encoder.pooling, encoder.l2_norm) == (pooling, False)


def test_what_is_given_wins_over_the_files(tmp_path: Path) -> None:
    folder = sentence_transformer(tmp_path / "m", pooling=MEAN, max_length=7, prompts={"query": "query: "})
    found = load_encoder(folder, pooling="cls", l2_norm=False, query_prefix="", max_length=9).describe()
    assert (found["pooling"], found["l2_norm"], found["query_prefix"], found["max_length"]) == ("cls", False, "", 9)


def test_modules_and_poolings_that_are_not_known_are_refused(tmp_path: Path) -> None:
    folder = sentence_transformer(tmp_path / "m", pooling={"pooling_mode_max_tokens": True})
    with pytest.raises(ModelMismatch, match="pools by max_tokens"):
        load_encoder(folder)
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(MEAN))
    with pytest.raises(ModelMismatch, match="module 'Dense'"):
        load_encoder(folder)


@pytest.mark.parametrize(
    ("name", "pooling", "l2_norm", "query", "document"),
    [
        ("bge-base-en-v1.5", "cls", True, "Represent this sentence for searching relevant passages: ", ""),
        ("BGE-small-en", "cls", True, "Represent this sentence for searching relevant passages: ", ""),
        ("e5-base-v2", "mean", True, "query: ", "passage: "),
        ("contriever-msmarco", "mean", False, "", ""),
    ],
)
def test_known_families_bring_what_their_files_leave_out(
    tmp_path: Path, name: str, pooling: str, l2_norm: bool, query: str, document: str
) -> None:
    found = load_encoder(bert(tmp_path / name)).describe()
    assert (found["pooling"], found["l2_norm"]) == (pooling, l2_norm)
    assert (found["query_prefix"], found["doc_prefix"]) == (query, document)


def test_a_name_that_only_resembles_a_family_is_not_taken_for_it(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="how tokens are pooled"):
        load_encoder(bert(tmp_path / "my-bge-base-en-v1.5-finetuned"))


def test_splade_pooling_other_than_the_maximum_is_refused(masked: Path, tmp_path: Path) -> None:
    folder = bert(tmp_path / "sum", head=True)
    modules = [("", "MLMTransformer"), ("1_SpladePooling", "SpladePooling")]
    listed = [{"idx": i, "name": str(i), "path": p, "type": f"x.{t}"} for i, (p, t) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_SpladePooling").mkdir()
    (folder / "1_SpladePooling" / "config.json").write_text(json.dumps({"pooling_strategy": "sum"}))
    with pytest.raises(ModelMismatch, match="sum of relu"):
        load_encoder(folder)
    (folder / "1_SpladePooling" / "config.json").write_text(json.dumps({"pooling_strategy": "max"}))
    assert load_encoder(folder).kind == "sparse"


def test_pyserini_gets_vectors_and_whole_weights(plain: Path, masked: Path) -> None:
    dense, sparse = DenseEncoder(plain, pooling="cls", l2_norm=True), SpladeEncoder(masked)
    vector = PyseriniQuery(dense).encode("a dog")
    assert (vector.shape, vector.dtype) == ((16,), np.float32)
    weights = PyseriniQuery(sparse, quantise=100).encode("a dog")
    assert weights == quantised(sparse.encode(["a dog"], side="query")[0], 100)
    assert all(type(weight) is int and weight > 0 for weight in weights.values())


def test_weights_are_rounded_and_zeros_dropped() -> None:
    assert quantised({"a": 1.237, "b": 0.004, "c": 0.006}, 100) == {"a": 124, "c": 1}


def test_progress_counts_every_text_once(plain: Path) -> None:
    seen: list[int] = []
    DenseEncoder(plain, pooling="cls", l2_norm=True, batch_size=3).encode(TEXTS, progress=seen.append)
    assert sum(seen) == len(TEXTS)


def test_nothing_encodes_to_nothing(plain: Path, masked: Path) -> None:
    assert DenseEncoder(plain, pooling="cls", l2_norm=True).encode([]).shape == (0, 16)
    assert SpladeEncoder(masked).encode([]) == []


@pytest.mark.parametrize("name", ["/no/such/model", "./no-such-model", "splade-tny"])
def test_a_model_that_is_nowhere_is_named(name: str) -> None:
    with pytest.raises(MissingResource, match=name.lstrip(".")):
        load_encoder(name)


@pytest.mark.parametrize(
    "settings", [{"batch_size": 0}, {"max_length": 2}, {"dtype": "fp8"}, {"pooling": "max"}, {"batch_tokens": 0}]
)
def test_settings_out_of_range_are_refused(plain: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(BadArgument):
        DenseEncoder(plain, **{"pooling": "cls", "l2_norm": True, **settings})
