"""The vLLM engine against a module with vLLM's names and shapes, and its silent failures: corrected, or refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pd_rerank.engines import load_engine
from pd_rerank.errors import BadArgument, EngineFailure, MissingExtra, ModelMismatch
from tests.engines.fake_vllm import Behaviour, install, vllm
from tests.engines.tiny import save_adapter
from tests.tokenizers_for_tests import byte_level

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from pd_rerank import OCSFTBatchedReranker  # noqa: E402
from pd_rerank.engines.base import WindowPrompt  # noqa: E402
from pd_rerank.engines.canary import write_canary  # noqa: E402
from pd_rerank.engines.vllm import VLLMEngine  # noqa: E402
from pd_rerank.prompt import GradePrompt  # noqa: E402
from tests.engines.test_server import DOCS, QUERY, compared, hf, normalised, windows, write_model  # noqa: E402

__all__ = ["vllm"]

READOUTS = ["pooling", "prompt_ids", "one_token"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(folder: Path) -> Path:
    return save_adapter(folder.parent / "ad1", hf(folder).model, rank=9)


def engine(folder: Path, **options: Any) -> VLLMEngine:
    made = load_engine(str(folder), engine="vllm", dtype="float32", quiet=True, **options)
    assert isinstance(made, VLLMEngine)
    return made


# -- the same numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", ["auto", False])
@pytest.mark.parametrize("readout", READOUTS)
def test_every_readout_gives_what_transformers_gives(
    readout: str, share: Any, folder: Path, adapter: Path, vllm: Behaviour
) -> None:
    plain = engine(folder, slot_readout=readout, share_prefix=share)
    assert plain.readout == readout
    assert compared(plain, hf(folder)) < 1e-4
    vllm.cached = 0
    assert compared(plain, hf(folder)) < 1e-4
    assert (vllm.cached > 0) == (share == "auto"), "the second time the prompts' start is in the cache"
    with_it = engine(folder, slot_readout=readout, share_prefix=share, adapter=adapter)
    assert compared(with_it, hf(folder, adapter=adapter)) < 1e-4


def test_pooling_is_the_default_and_takes_one_submission_for_all_windows(folder: Path, vllm: Behaviour) -> None:
    made = engine(folder, canary=False)
    assert made.readout == "pooling"
    assert vllm.loads[0]["runner"] == "pooling"
    prompt = GradePrompt(made.tokenizer)
    vllm.calls.clear()
    made.grade_logits(windows(prompt), prompt.grade_ids)
    assert vllm.calls == [3]


def test_a_long_call_can_be_ended_between_submissions(
    folder: Path, vllm: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(folder, canary=False, share_prefix=False)
    prompt = GradePrompt(made.tokenizer)
    some = windows(prompt)
    empty = WindowPrompt(token_ids=np.arange(5), slots=np.array([], dtype=np.int64))
    wanted = made.grade_logits([*some, empty], prompt.grade_ids)
    longest, second = len(some[0].token_ids), len(some[1].token_ids)
    monkeypatch.setattr("pd_rerank.engines.vllm._SUBMITTED", longest + second)
    vllm.calls.clear()
    seen: list[int] = []
    read = made.grade_logits([*some, empty], prompt.grade_ids, progress=seen.append)
    assert (vllm.calls, seen) == ([2, 1], [3, 1, 1])
    for r, w in zip(read, wanted, strict=True):
        np.testing.assert_allclose(r, w, atol=1e-5)

    def nobody_waits(_: int) -> None:
        raise KeyError("gone")

    vllm.calls.clear()
    with pytest.raises(KeyError):
        made.grade_logits(some, prompt.grade_ids, progress=nobody_waits)
    assert vllm.calls == [2]
    monkeypatch.setattr("pd_rerank.engines.vllm._SUBMITTED", 1)
    assert compared(made, hf(folder)) < 1e-4


def test_token_ids_at_prompt_positions_give_way_where_the_runner_has_none(
    folder: Path, vllm: Behaviour, caplog: pytest.LogCaptureFixture
) -> None:
    vllm.runner_v2 = False
    with pytest.raises(ModelMismatch, match="requires the V2 model runner"):
        engine(folder, slot_readout="prompt_ids")
    head = save_adapter(folder.parent / "biased", hf(folder).model)
    with caplog.at_level(logging.WARNING, "pd_rerank"):
        made = engine(folder, tensor_parallel=2, adapter=head)
    assert made.readout == "one_token"
    assert "one part of the vocabulary" in caplog.text
    assert "requires the V2 model runner" in caplog.text


@pytest.mark.parametrize("where", ["load", "encode"])
def test_where_vllm_cannot_pool_the_next_readout_is_taken_and_said(
    where: str, folder: Path, adapter: Path, vllm: Behaviour, caplog: pytest.LogCaptureFixture
) -> None:
    vllm.no_pooling = where
    with caplog.at_level(logging.WARNING, "pd_rerank"):
        made = engine(folder, adapter=adapter, canary=False)
    assert (made.readout, [load["runner"] for load in vllm.loads]) == ("prompt_ids", ["pooling", "generate"])
    assert "is read without pooling" in caplog.text
    assert ("--runner pooling" if where == "load" else "Unsupported task: 'token_classify'") in caplog.text
    assert compared(made, hf(folder, adapter=adapter)) < 1e-4
    vllm.runner_v2 = False
    assert engine(folder).readout == "one_token"
    with pytest.raises((EngineFailure, ModelMismatch), match="pooling"):
        engine(folder, slot_readout="pooling")


def test_where_memory_runs_out_vllm_is_not_started_again(folder: Path, vllm: Behaviour) -> None:
    vllm.out_of_memory = True
    with pytest.raises(EngineFailure, match="out of memory"):
        engine(folder)
    assert len(vllm.loads) == 1


def test_an_older_vllm_reads_one_token_or_its_likeliest(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    behaviour = Behaviour()
    install(monkeypatch, behaviour, old=True)
    assert engine(folder, canary=False).readout == "pooling"
    with pytest.raises(ModelMismatch, match=r"0\.31 can"):
        engine(folder, slot_readout="prompt_ids")
    with caplog.at_level(logging.WARNING, "pd_rerank"):
        made, reference = engine(folder, slot_readout="top_k"), hf(folder)
    assert "'top_k' is not held against generating a token" in caplog.text
    prompt = GradePrompt(made.tokenizer)
    with caplog.at_level(logging.WARNING, "pd_rerank"):
        read = np.concatenate(made.grade_logits(windows(prompt), prompt.grade_ids))
    wanted = np.concatenate(reference.grade_logits(windows(prompt), prompt.grade_ids))
    lost = np.isnan(read).any(-1)
    assert lost.any(), "random weights leave some grade out of the likeliest 20"
    assert np.isnan(read[lost]).all()
    assert f"{int(lost.sum())} of 9 slots came back without all their grades" in caplog.text
    np.testing.assert_allclose(normalised(read[~lost]), normalised(wanted[~lost]), atol=1e-5)


def test_likeliest_tokens_are_right_where_all_grades_are_among_them(
    tmp_path: Path, vllm: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd_rerank.engines.vllm._TOP", 400)
    place = write_model(tmp_path / "m")
    made = engine(place, slot_readout="top_k")
    assert compared(made, hf(place)) < 1e-4
    assert compared(made, hf(place)) < 1e-4


@pytest.mark.parametrize("family", ["Gemma2", "Granite", "Cohere"])
def test_soft_cap_and_scale_are_applied_here_where_the_head_leaves_them_out(
    family: str, tmp_path: Path, vllm: Behaviour
) -> None:
    place = write_model(tmp_path / family, family)
    made = engine(place, canary=False)
    assert compared(made, hf(place)) < 1e-4
    made._head = {}
    assert compared(made, hf(place)) > 1e-2


def test_several_adapters_stand_over_one_base(folder: Path, adapter: Path, vllm: Behaviour, tmp_path: Path) -> None:
    second = save_adapter(tmp_path / "other" / adapter.name, hf(folder).model, seed=5, rank=20)
    made = engine(folder, adapter=adapter, adapters=[second], canary=False)
    assert len(vllm.loads) == 1
    assert (vllm.loads[0]["max_loras"], vllm.loads[0]["max_lora_rank"]) == (2, 32)
    other, none = made.using(second), made.using(None)
    assert compared(other, hf(folder, adapter=second)) < 1e-4
    assert compared(made, hf(folder, adapter=adapter)) < 1e-4
    assert compared(none, hf(folder)) < 1e-4
    assert (none.describe()["adapter"], other.describe()["adapter"]["rank"]) == (None, 20)
    vllm.cached = 0
    assert compared(made.using(second, share_prefix=False), hf(folder, adapter=second)) < 1e-4
    assert (vllm.cached, len(vllm.loads)) == (0, 1)
    with pytest.raises(BadArgument, match="none of the adapters"):
        made.using(tmp_path / "ad3")


def test_a_reranker_over_vllm_ranks_as_one_over_transformers(folder: Path, vllm: Behaviour) -> None:
    options: dict[str, Any] = {"verbose": 0, "window": 3, "presentations": 3, "dtype": "float32"}
    there = OCSFTBatchedReranker(str(folder), engine="vllm", **options)
    here = OCSFTBatchedReranker(str(folder), **options)
    ranked, wanted = there.rank(QUERY, DOCS), here.rank(QUERY, DOCS)
    assert [r.document.doc_id for r in ranked.results] == [r.document.doc_id for r in wanted.results]
    np.testing.assert_allclose([r.score for r in ranked.results], [r.score for r in wanted.results], atol=1e-5)


def test_a_classifier_export_is_read_by_its_card_over_any_number_of_gpus(
    folder: Path, adapter: Path, tmp_path: Path, vllm: Behaviour
) -> None:
    from pd_rerank.training.adapters import export

    export(folder, tmp_path / "cls", adapter=adapter, form="classifier", dtype="float32")
    made = engine(tmp_path / "cls", tensor_parallel=2, canary=False)
    assert "hf_overrides" not in vllm.loads[0]
    assert compared(made, hf(folder, adapter=adapter)) < 1e-4
    with pytest.raises(ModelMismatch, match="read by 'pooling' alone"):
        engine(tmp_path / "cls", slot_readout="one_token")


def test_without_vllm_the_command_that_installs_it_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'pd-rerank\[vllm\]'"):
        engine(folder)


# -- what would go wrong silently -------------------------------------------------------------------------------


def test_an_adapter_on_the_output_head_is_refused_or_read_token_by_token(
    folder: Path, tmp_path: Path, vllm: Behaviour
) -> None:
    place = save_adapter(tmp_path / "head", hf(folder).model, targets=["q_proj", "lm_head"])
    for readout in ("pooling", "prompt_ids", "top_k"):
        with pytest.raises(ModelMismatch, match="leaves out here; export it"):
            engine(folder, adapter=place, slot_readout=readout)
    made = engine(folder, adapter=place)
    assert made.readout == "one_token"
    assert compared(made, hf(folder, adapter=place)) < 1e-4


def test_a_head_cut_over_several_gpus_is_refused_with_the_export_as_cure(folder: Path, vllm: Behaviour) -> None:
    with pytest.raises(ModelMismatch, match=r"over several GPUs.*pd-rerank export --form classifier"):
        engine(folder, tensor_parallel=2, slot_readout="pooling")
    assert vllm.loads == []


def test_a_head_with_a_bias_is_not_read_by_its_rows(tmp_path: Path, vllm: Behaviour) -> None:
    place = write_model(tmp_path / "phi", "Phi")
    with pytest.raises(ModelMismatch, match="has a bias"):
        engine(place, slot_readout="pooling")
    assert compared(engine(place), hf(place)) < 1e-4


def test_an_adapter_vllm_does_not_apply_is_refused(folder: Path, adapter: Path, vllm: Behaviour) -> None:
    vllm.ignores_adapters = True
    for readout in READOUTS:
        with pytest.raises(ModelMismatch, match="changes nothing"):
            engine(folder, adapter=adapter, slot_readout=readout)


def test_an_adapter_of_a_kind_vllm_does_not_know_is_named(folder: Path, tmp_path: Path, vllm: Behaviour) -> None:
    place = save_adapter(tmp_path / "dora", hf(folder).model, use_dora=True)
    with pytest.raises(ModelMismatch, match="DoRA, which vLLM does not apply; export it merged"):
        engine(folder, adapter=place)
    assert vllm.loads == []


@pytest.mark.parametrize("stale", [0.0, float("nan")])
def test_rows_left_over_from_other_requests_turn_the_cache_off(
    stale: float, folder: Path, vllm: Behaviour, caplog: pytest.LogCaptureFixture
) -> None:
    vllm.stale_cache, vllm.stale = True, stale
    with caplog.at_level(logging.WARNING, "pd_rerank"):
        made = engine(folder, slot_readout="pooling", canary=False)
    assert "prefix cache is left alone" in caplog.text
    assert made.describe()["share_prefix"] is False
    assert compared(made, hf(folder)) < 1e-4
    assert compared(made, hf(folder)) < 1e-4


@pytest.mark.parametrize("readout", ["pooling", "prompt_ids", "top_k"])
def test_a_prompt_sent_again_is_read_without_the_cache_that_swallowed_its_slots(
    readout: str, folder: Path, vllm: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd_rerank.engines.vllm._TOP", 400)
    made = engine(folder, slot_readout=readout, canary=False)
    assert made.describe()["share_prefix"] is True
    rng = np.random.default_rng(0)
    ids = rng.integers(20, 200, 100)
    prompt = WindowPrompt(token_ids=ids, slots=np.array([40, 70, 98]))
    grades = GradePrompt(made.tokenizer).grade_ids
    wanted = hf(folder).grade_logits([prompt], grades)[0]
    vllm.calls.clear()
    for calls in ([1], [1, 1, 1]):
        (read,) = made.grade_logits([prompt], grades)
        np.testing.assert_allclose(normalised(read), normalised(wanted), atol=1e-4)
        assert vllm.calls == calls


def test_another_number_of_rows_is_an_error(folder: Path, vllm: Behaviour) -> None:
    made = engine(folder, canary=False)
    prompt = GradePrompt(made.tokenizer)
    vllm.rows_short = 1
    with pytest.raises(EngineFailure, match=r"rows of shape .* came back for a prompt"):
        made.grade_logits(windows(prompt), prompt.grade_ids)


def test_prompt_rows_that_differ_from_generating_are_refused(folder: Path, vllm: Behaviour) -> None:
    vllm.wrong_prompt_rows = True
    with pytest.raises(ModelMismatch, match="off what generating a token there gives"):
        engine(folder, slot_readout="prompt_ids")


def test_a_probe_of_which_nothing_is_read_proves_nothing(folder: Path, adapter: Path, vllm: Behaviour) -> None:
    vllm.no_numbers = True
    with pytest.raises(ModelMismatch, match="off what generating a token there gives"):
        engine(folder, slot_readout="prompt_ids")
    for readout in ("pooling", "prompt_ids"):
        with pytest.raises(ModelMismatch, match="whether it is applied cannot be told"):
            engine(folder, slot_readout=readout, adapter=adapter)


def test_a_missing_grade_is_nan_and_counted(folder: Path, vllm: Behaviour, caplog: pytest.LogCaptureFixture) -> None:
    made = engine(folder, slot_readout="one_token")
    prompt = GradePrompt(made.tokenizer)
    vllm.omits = prompt.grade_ids[3]
    with caplog.at_level(logging.WARNING, "pd_rerank"):
        read = np.concatenate(made.grade_logits(windows(prompt)[:2], prompt.grade_ids))
    assert np.isnan(read).all(axis=-1).sum() >= 3
    assert "slots came back without all their grades" in caplog.text


def test_a_canary_read_otherwise_stops_the_start(folder: Path, tmp_path: Path, vllm: Behaviour) -> None:
    prompt = GradePrompt(byte_level())
    window = windows(prompt)[0]
    write_canary(hf(folder), window, prompt.grade_ids, tmp_path)
    made = engine(folder, canary=tmp_path)
    assert made.describe()["canary"] == "held"
    with pytest.raises(ModelMismatch, match="does not read its canary"):
        engine(write_model(tmp_path / "other", initializer_range=0.3), canary=tmp_path)
    with pytest.raises(BadArgument, match=r"no canary\.json lies beside"):
        engine(folder, canary=True)


def test_an_adapters_own_canary_is_found_and_the_bases_is_not_taken_for_it(
    folder: Path, adapter: Path, vllm: Behaviour
) -> None:
    prompt = GradePrompt(byte_level())
    window = windows(prompt)[0]
    place = adapter.parent / "ad-with-canary"
    save_adapter(place, hf(folder).model, seed=3)
    write_canary(hf(folder, adapter=place), window, prompt.grade_ids, place)
    assert engine(folder, adapter=place).describe()["canary"] == "held"
    write_canary(hf(folder), window, prompt.grade_ids, place)
    with pytest.raises(ModelMismatch, match="does not read its canary"):
        engine(folder, adapter=place)


def test_grades_without_a_row_and_prompts_too_long_are_refused(folder: Path, vllm: Behaviour) -> None:
    made = engine(folder, canary=False, max_length=300)
    prompt = GradePrompt(made.tokenizer)
    with pytest.raises(ModelMismatch, match=r"has none for token 200 .*head_tokens=\[200"):
        made.grade_logits([WindowPrompt(token_ids=np.arange(30), slots=np.array([5]))], [200, *prompt.grade_ids])
    with pytest.raises(BadArgument, match="takes 300"):
        made.grade_logits([WindowPrompt(token_ids=np.arange(301), slots=np.array([5]))], prompt.grade_ids)
    assert compared(engine(folder, canary=False, head_tokens=prompt.grade_ids), hf(folder)) < 1e-4
