"""The small real encoders find what is meant, by short name, without a model hub."""

from __future__ import annotations

import pytest

from pd_rerank.errors import MissingResource
from pd_rerank.retrieval.encoders import Encoder, load_encoder

pytestmark = pytest.mark.real_model

PASSAGES = [
    "Bees make honey from the nectar that they gather in flowers.",
    "The central bank raised its interest rate by a quarter of a point.",
    "Photosynthesis turns light, water and carbon dioxide into sugar.",
    "A goalkeeper may touch the ball with the hands inside the penalty area.",
]
QUESTIONS = [
    "what do bees produce?",
    "how did the cost of borrowing change?",
    "how do plants use sunlight?",
    "who is allowed to use hands in soccer?",
]


def load(name: str) -> Encoder:
    try:
        return load_encoder(name)
    except MissingResource as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", ["all-minilm-l6-v2", "minilm-int8"])
def test_dense_encoders_put_each_question_beside_its_passage(name: str) -> None:
    if name == "minilm-int8":
        pytest.importorskip("onnxruntime")
    encoder = load(name)
    scores = encoder.encode(QUESTIONS, side="query") @ encoder.encode(PASSAGES).T
    assert scores.argmax(axis=1).tolist() == [0, 1, 2, 3]
    assert encoder.describe()["pooling"] == "mean"
    assert encoder.describe()["l2_norm"] is True


def test_the_sparse_encoder_finds_passages_and_adds_words_that_are_meant() -> None:
    encoder = load("splade-tiny")
    assert encoder.kind == "sparse"
    documents = encoder.encode(PASSAGES)
    queries = encoder.encode(
        ["which insects make honey?", "did the bank raise rates?", "carbon dioxide and light", "hands in football"],
        side="query",
    )
    scores = [[sum(w * d.get(term, 0.0) for term, w in q.items()) for d in documents] for q in queries]
    assert [row.index(max(row)) for row in scores] == [0, 1, 2, 3]
    assert "football" in documents[3]
    assert "football" not in PASSAGES[3]
