"""The server engine against real servers on loopback: the numbers of the transformers engine, or a named failure."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pd_rerank.engines import load_engine
from pd_rerank.errors import BadArgument, EngineFailure, MissingResource, ModelMismatch
from tests.engines.tiny import save_adapter, tiny
from tests.tokenizers_for_tests import byte_level

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("httpx")

from pd_rerank import OCSFTBatchedReranker  # noqa: E402
from pd_rerank.engines.adapters import apply_adapter, open_adapter  # noqa: E402
from pd_rerank.engines.base import WindowPrompt  # noqa: E402
from pd_rerank.engines.canary import write_canary  # noqa: E402
from pd_rerank.engines.hf import HFEngine  # noqa: E402
from pd_rerank.engines.server import ServerEngine  # noqa: E402
from pd_rerank.prompt import GradePrompt  # noqa: E402
from tests.engines.model_servers import ModelServer  # noqa: E402

READOUTS = {"pooling": "vllm_pooling", "one_token": "vllm", "generate": "sglang", "score": "sglang"}

QUERY = "which tide?"
DOCS = ["tide tide moon", "bread and salt", "the moon pulls the tide", "", "oil", "rain on the sea", "flour"]

Start = Callable[..., ModelServer]


def write_model(folder: Path, family: str = "Llama", **changes: Any) -> Path:
    tokenizer = byte_level()
    shape = {"vocab_size": len(tokenizer), "max_position_embeddings": 2048, "eos_token_id": tokenizer.eos_token_id}
    tiny(family, **{**shape, **changes}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def adapter(folder: Path) -> Path:
    return save_adapter(folder.parent / "ad1", hf(folder).model)


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Start a server of the tiny model; the grades' ids are those of its prompt."""
    with ExitStack() as stack:

        def run(kind: str, place: Path = folder, *, adapters: Any = None, **more: Any) -> ModelServer:
            engine = hf(place)
            ids = GradePrompt(engine.tokenizer).grade_ids
            put_on = {n: apply_adapter(hf(place).model, open_adapter(a)) for n, a in (adapters or {}).items()}
            server = ModelServer(kind, engine.model, engine.tokenizer, adapters=put_on, **{"grade_ids": ids, **more})
            return stack.enter_context(server.running())

        yield run


def hf(place: Path, **more: Any) -> HFEngine:
    return HFEngine(place, dtype="float32", **more)


def served(place: Path, server: ModelServer, **more: Any) -> ServerEngine:
    engine = load_engine(str(place), engine="server", server=server.url, quiet=True, **more)
    assert isinstance(engine, ServerEngine)
    engine._client._backoff_s = 0.01
    return engine


def windows(prompt: GradePrompt, max_tokens: int = 2048) -> list[WindowPrompt]:
    """Windows of one query: 3 candidates, 1, 2, and the first again."""
    sheet = prompt.sheet(QUERY, DOCS, width=3, max_tokens=max_tokens)
    return [sheet.window(w) for w in ([0, 1, 2], [4], [5, 6], [0, 1, 2])]


def compared(engine: Any, reference: HFEngine) -> float:
    """How far the engine's grade probabilities are from those of the transformers engine at most."""
    prompt = GradePrompt(reference.tokenizer)
    wanted = reference.grade_logits(windows(prompt), prompt.grade_ids)
    read = engine.grade_logits(windows(prompt), prompt.grade_ids)
    assert [r.shape for r in read] == [w.shape for w in wanted]
    assert all(r.dtype == np.float32 for r in read)
    return max(float(np.abs(normalised(r) - normalised(w)).max()) for r, w in zip(read, wanted, strict=True))


def normalised(logits: Any) -> Any:
    return torch.tensor(np.asarray(logits)).double().log_softmax(-1).numpy()


# -- the same numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("readout", READOUTS)
def test_every_readout_gives_what_transformers_gives(readout: str, start: Start, folder: Path) -> None:
    engine = served(folder, start(READOUTS[readout]), slot_readout=readout)
    assert engine.readout == readout
    assert compared(engine, hf(folder)) < 1e-5


@pytest.mark.parametrize(
    ("kind", "found"), [("vllm_pooling", "pooling"), ("vllm", "one_token"), ("sglang", "generate")]
)
def test_the_readout_is_found_by_asking(kind: str, found: str, start: Start, folder: Path) -> None:
    assert served(folder, start(kind)).readout == found


@pytest.mark.parametrize("readout", ["pooling", "one_token", "generate"])
def test_an_adapter_is_chosen_by_its_name(readout: str, start: Start, folder: Path, adapter: Path) -> None:
    server = start(READOUTS[readout], adapters={"ad1": adapter, "other": adapter})
    with_it = hf(folder, adapter=adapter)
    by_name = served(folder, server, adapter="ad1")
    assert compared(by_name, with_it) < 1e-5
    assert compared(served(folder, server), hf(folder)) < 1e-5
    by_folder = served(folder, server, adapter=adapter)
    assert by_folder.served == "ad1"
    assert by_folder.describe()["adapter"]["sha256"] == with_it.describe()["adapter"]["sha256"]


@pytest.mark.parametrize("family", ["Gemma2", "Granite", "Cohere"])
def test_soft_cap_and_scale_are_applied_here_where_the_head_leaves_them_out(
    family: str, start: Start, tmp_path: Path
) -> None:
    place = write_model(tmp_path / family, family)
    server = start("vllm_pooling", place)
    engine = served(place, server)
    assert compared(engine, hf(place)) < 1e-4
    engine._head = {}
    assert compared(engine, hf(place)) > 1e-2


def test_a_head_with_a_bias_is_not_read_by_its_rows(start: Start, tmp_path: Path) -> None:
    place = write_model(tmp_path / "phi", "Phi")
    with pytest.raises(ModelMismatch, match="has a bias"):
        served(place, start("vllm_pooling", place))


def test_a_reranker_over_a_server_ranks_as_one_in_this_process(start: Start, folder: Path) -> None:
    server = start("vllm_pooling")
    options: dict[str, Any] = {"verbose": 0, "window": 3, "presentations": 3}
    there = OCSFTBatchedReranker(str(folder), engine="server", server=server.url, **options)
    here = OCSFTBatchedReranker(str(folder), dtype="float32", **options)
    ranked, wanted = there.rank(QUERY, DOCS), here.rank(QUERY, DOCS)
    assert [r.document.doc_id for r in ranked.results] == [r.document.doc_id for r in wanted.results]
    np.testing.assert_allclose([r.score for r in ranked.results], [r.score for r in wanted.results], atol=1e-5)


def test_one_token_asks_the_longest_prefix_first_and_then_the_other_slots_at_once(start: Start, folder: Path) -> None:
    server = start("vllm")
    engine = served(folder, server, concurrency=1)
    server.posts.clear()
    prompt = GradePrompt(engine.tokenizer)
    (window,) = windows(prompt)[:1]
    engine.grade_logits([window], prompt.grade_ids)
    sent = [[len(p) for p in body["prompt"]] for _, body in server.posts]
    assert sent == [[int(window.slots[2]) + 1], [int(window.slots[0]) + 1, int(window.slots[1]) + 1]]


def test_no_more_requests_are_under_way_than_allowed_and_twins_are_asked_once(start: Start, folder: Path) -> None:
    server = start("vllm_pooling")
    engine = served(folder, server, concurrency=2)
    prompt = GradePrompt(engine.tokenizer)
    server.posts.clear()
    seen: list[int] = []
    read = engine.grade_logits(windows(prompt) * 5, prompt.grade_ids, progress=seen.append)
    assert len(server.posts) == 3
    assert server.most <= 2
    assert sum(seen) == 20
    np.testing.assert_array_equal(read[0], read[3])


# -- what would go wrong silently -------------------------------------------------------------------------------


@pytest.mark.parametrize("readout", ["pooling", "one_token", "generate"])
def test_a_missing_grade_is_nan_and_counted(
    readout: str, start: Start, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = start(READOUTS[readout])
    engine = served(folder, server)
    prompt = GradePrompt(engine.tokenizer)
    first = windows(prompt)[0].token_ids.tolist()
    server.fault = lambda path, body, n: (
        "missing" if first in (body.get("input_ids"), *body.get("input", ())) or "prompt" in body else None
    )
    with caplog.at_level(logging.WARNING, "pd_rerank"):
        read = engine.grade_logits(windows(prompt)[:2], prompt.grade_ids)
    assert np.isnan(read[0]).all()
    lost = 3 if readout != "one_token" else 4
    assert f"{lost} of 4 slots came back without all their grades" in caplog.text


def test_a_server_that_cannot_be_told_the_tokens_gives_those_among_its_likeliest(
    start: Start, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "pd_rerank"):
        engine = served(folder, start("vllm", knows_ids=False))
    assert "cannot be told which tokens" in caplog.text
    assert engine.describe()["top_logprobs"] == 20
    prompt, reference = GradePrompt(engine.tokenizer), hf(folder)
    read = np.concatenate(engine.grade_logits(windows(prompt), prompt.grade_ids))
    wanted = np.concatenate(reference.grade_logits(windows(prompt), prompt.grade_ids))
    whole = ~np.isnan(read).any(-1)
    assert not whole.all()
    np.testing.assert_allclose(normalised(read[whole]), normalised(wanted[whole]), atol=1e-5)


def test_an_adapter_that_is_listed_but_not_applied_is_refused(start: Start, folder: Path, adapter: Path) -> None:
    for kind in ("vllm", "vllm_pooling"):
        server = start(kind, adapters={"ad1": adapter}, applies_adapters=False)
        with pytest.raises(ModelMismatch, match="changes nothing"):
            served(folder, server, adapter="ad1")


@pytest.mark.parametrize(
    ("listed", "why"),
    [
        ({"base": None, "other": None, "ad1": "base"}, "changes nothing"),
        ({"base": None, "ad1": None}, "changes nothing"),
        ({"base": None, "other": None, "ad1": None}, r"which of the models at .* \(base, other\) is the base of 'ad1'"),
        (
            {"base": None, "other": None, "ad1": "away"},
            r"which of the models at .* \(base, other\) is the base of 'ad1'",
        ),
    ],
)
def test_an_adapters_base_is_found_or_the_start_fails(
    listed: dict[str, str | None], why: str, start: Start, folder: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start("vllm_pooling", adapters={"ad1": adapter}, applies_adapters=False)
    entries = {"data": [{"id": name, "parent": parent} for name, parent in listed.items()]}
    usual = server.get
    monkeypatch.setattr(server, "get", lambda path: entries if path == "/v1/models" else usual(path))
    with pytest.raises(ModelMismatch, match=why):
        served(folder, server, adapter="ad1")
    write_canary(hf(folder), windows(GradePrompt(byte_level()))[0], GradePrompt(byte_level()).grade_ids, folder.parent)
    assert served(folder, server, adapter="ad1", canary=folder.parent).describe()["canary"] == "held"


def test_a_merged_model_under_an_adapters_name_is_served_with_a_warning(
    start: Start, folder: Path, adapter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "pd_rerank"):
        engine = served(folder, start("vllm_pooling"), adapter=adapter, served_as="base")
    assert "'base' is the only model" in caplog.text
    assert compared(engine, hf(folder)) < 1e-5


def test_an_adapter_by_which_no_grade_is_read_is_not_said_to_change_nothing(
    start: Start, folder: Path, adapter: Path
) -> None:
    server = start("vllm", adapters={"ad1": adapter}, knows_ids=False)
    server.fault = lambda path, body, n: "missing"
    with pytest.raises(ModelMismatch, match="whether it is applied cannot be told"):
        served(folder, server, adapter="ad1")


def test_an_adapter_on_the_output_head_is_not_read_by_the_base_heads_rows(
    start: Start, folder: Path, tmp_path: Path
) -> None:
    place = save_adapter(tmp_path / "headed", hf(folder).model, targets=["q_proj", "lm_head"])
    with pytest.raises(ModelMismatch, match="ignores what this adapter does to the output head"):
        served(folder, start("vllm_pooling", adapters={"headed": place}), adapter=place)
    ones = served(folder, start("vllm", adapters={"headed": place}), adapter=place)
    assert compared(ones, hf(folder, adapter=place)) < 1e-5


def test_the_scoring_endpoint_takes_no_adapter(start: Start, folder: Path, adapter: Path) -> None:
    with pytest.raises(ModelMismatch, match="takes no adapter"):
        served(folder, start("sglang", adapters={"ad1": adapter}), adapter="ad1", slot_readout="score")


def test_other_weights_than_the_canarys_are_refused(start: Start, folder: Path, tmp_path: Path) -> None:
    prompt = GradePrompt(byte_level())
    window = windows(prompt)[0]
    write_canary(hf(folder), window, prompt.grade_ids, tmp_path / "good.json")
    write_canary(HFEngine(tiny(vocab_size=len(byte_level()), seed=9, max_position_embeddings=2048),
                          tokenizer=byte_level()), window, prompt.grade_ids, tmp_path / "other.json")  # fmt: skip
    server = start("vllm_pooling")
    assert served(folder, server, canary=tmp_path / "good.json").describe()["canary"] == "held"
    with pytest.raises(ModelMismatch, match="does not read its canary"):
        served(folder, server, canary=tmp_path / "other.json")
    swapped = start("vllm_pooling", grade_ids=prompt.grade_ids[::-1])
    with pytest.raises(ModelMismatch, match="does not read its canary"):
        served(folder, swapped, canary=tmp_path / "good.json")


def test_a_head_with_another_number_of_rows_is_refused(start: Start, folder: Path) -> None:
    with pytest.raises(ModelMismatch, match="3 rows where the prompt has 4 grades"):
        served(folder, start("vllm_pooling", grade_ids=(3, 4, 5)))


def test_a_prompt_longer_than_the_server_takes_is_refused_before_anything_is_sent(start: Start, folder: Path) -> None:
    server = start("vllm_pooling", max_model_len=50)
    engine = served(folder, server)
    assert engine.max_length == 50
    prompt = GradePrompt(engine.tokenizer)
    server.posts.clear()
    with pytest.raises(BadArgument, match="takes 50"):
        engine.grade_logits(windows(prompt), prompt.grade_ids)
    assert server.posts == []


# -- who answers ------------------------------------------------------------------------------------------------


def test_no_server_another_model_and_an_unknown_adapter_are_named(start: Start, folder: Path) -> None:
    with pytest.raises(BadArgument, match="server='http"):
        load_engine(str(folder), engine="server")
    server = start("vllm")
    with pytest.raises(ModelMismatch, match="no adapter 'ad9', only base"):
        served(folder, server, adapter="ad9")
    with pytest.raises(ModelMismatch, match="no model 'big'"):
        served(folder, server, served_as="big")
    with pytest.raises(ModelMismatch, match="cannot be read at slots"):
        served(folder, server, slot_readout="pooling")
    url = server.url
    server.stop()
    with pytest.raises(MissingResource, match="no model server at"):
        load_engine(str(folder), engine="server", server=url, server_timeout=1)


def test_the_key_comes_from_the_environment_and_is_shown_nowhere(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start("vllm", key="s3cret")
    with pytest.raises(BadArgument, match="PD_RERANK_API_KEY") as refused:
        served(folder, server)
    monkeypatch.setenv("PD_RERANK_API_KEY", "s3cret")
    engine = served(folder, server)
    assert "s3cret" not in json.dumps(engine.describe()) + str(refused.value)


# -- servers in trouble -----------------------------------------------------------------------------------------


def test_what_is_read_before_a_failure_is_kept_and_only_the_rest_asked_again(start: Start, folder: Path) -> None:
    server = start("vllm_pooling")
    engine = served(folder, server, concurrency=1)
    prompt = GradePrompt(engine.tokenizer)
    some = windows(prompt)
    bad = some[1].token_ids.tolist()
    server.fault = lambda path, body, n: "rows" if body["input"] == [bad] else None
    with pytest.raises(EngineFailure, match=r"1 of 3 windows got no grades from .*rows of shape"):
        engine.grade_logits(some, prompt.grade_ids)
    server.posts.clear()
    server.fault = None
    read = engine.grade_logits(some, prompt.grade_ids)
    assert [body["input"] for _, body in server.posts] == [[bad]]
    wanted = hf(folder).grade_logits(some, prompt.grade_ids)
    for r, w in zip(read, wanted, strict=True):
        np.testing.assert_allclose(normalised(r), normalised(w), atol=1e-5)
