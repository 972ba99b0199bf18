"""Adapters: applied exactly, or refused with what does not fit."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pd_rerank.errors import BadArgument, InvalidData, MissingResource, ModelMismatch
from tests.engines.tiny import GRADES, VOCABULARY, Words, one_slot_at_a_time, prompt, save_adapter, start_of, tiny

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from pd_rerank.engines.adapters import open_adapter  # noqa: E402
from pd_rerank.engines.hf import HFEngine  # noqa: E402

START = start_of(20, seed=5)
PROMPTS = [prompt(40, 4, seed=1), prompt(31, 2, seed=2, start=START), prompt(29, 1, seed=3, start=START)]
BODY = ["q_proj", "v_proj", "down_proj"]
WAYS: list[dict[str, Any]] = [
    {"batching": "single", "share_prefix": False},
    {"batching": "padded", "share_prefix": False},
    {"batching": "padded", "share_prefix": True},
]


def engine(model: Any = None, **options: Any) -> HFEngine:
    return HFEngine(model if model is not None else tiny(), tokenizer=Words(), **options)


def apart(one: list[Any], other: list[Any]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def rewrite(adapter: Path, change: Any) -> None:
    """Change an adapter's tensors on disk."""
    from safetensors.torch import load_file, save_file

    file = adapter / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)


@pytest.mark.parametrize(
    ("targets", "more"),
    [
        (BODY, {}),
        (["lm_head"], {}),
        (["embed_tokens", "q_proj"], {}),
        (BODY, {"modules_to_save": ["lm_head"]}),
        (BODY, {"use_rslora": True, "rank_pattern": {"q_proj": 2}}),
        (BODY, {"use_dora": True}),
    ],
    ids=["body", "head", "embeddings", "saved head", "pattern", "dora"],
)
def test_an_adapter_reads_like_the_adapted_model(tmp_path: Path, targets: list[str], more: dict[str, Any]) -> None:
    adapted = tiny()
    save_adapter(tmp_path, adapted, targets=targets, **more)  # `adapted` now carries it
    naive = one_slot_at_a_time(adapted, PROMPTS)
    assert apart(naive, one_slot_at_a_time(tiny(), PROMPTS)) > 0.05
    for way in WAYS:
        assert apart(engine(adapter=tmp_path, **way).grade_logits(PROMPTS, GRADES), naive) < 1e-4


def test_an_adapter_on_a_tied_head_is_read_through_the_module(tmp_path: Path) -> None:
    adapted = tiny(tie_word_embeddings=True)
    save_adapter(tmp_path, adapted, targets=["lm_head"])
    read = engine(tiny(tie_word_embeddings=True), adapter=tmp_path).grade_logits(PROMPTS, GRADES)
    assert apart(read, one_slot_at_a_time(adapted, PROMPTS)) < 1e-4


@pytest.mark.parametrize("targets", [BODY, ["lm_head"]], ids=["body", "head"])
def test_merged_reads_like_unmerged(tmp_path: Path, targets: list[str]) -> None:
    save_adapter(tmp_path, tiny(), targets=targets)
    unmerged = engine(adapter=tmp_path)
    merged = engine(adapter=tmp_path, merge_adapter=True)
    assert apart(merged.grade_logits(PROMPTS, GRADES), unmerged.grade_logits(PROMPTS, GRADES)) < 1e-4
    assert merged.describe()["adapter"]["merged"] is True
    assert unmerged.describe()["adapter"]["merged"] is False
    assert not any("lora" in name for name, _ in merged.model.named_parameters())


def test_merging_into_a_tied_head_is_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path, tiny(tie_word_embeddings=True), targets=["lm_head"])
    with pytest.raises(ModelMismatch, match="merge_adapter=False"):
        engine(tiny(tie_word_embeddings=True), adapter=tmp_path, merge_adapter=True)


def test_merging_the_body_under_a_tied_head_is_fine(tmp_path: Path) -> None:
    save_adapter(tmp_path, tiny(tie_word_embeddings=True), targets=BODY)
    one = engine(tiny(tie_word_embeddings=True), adapter=tmp_path, merge_adapter=True)
    other = engine(tiny(tie_word_embeddings=True), adapter=tmp_path)
    assert apart(one.grade_logits(PROMPTS, GRADES), other.grade_logits(PROMPTS, GRADES)) < 1e-4


def test_half_precision_keeps_the_adapter_in_the_model_s_precision(tmp_path: Path) -> None:
    save_adapter(tmp_path, tiny())
    reader = engine(adapter=tmp_path, dtype="bfloat16")
    assert {p.dtype for p in reader.model.parameters()} == {torch.bfloat16}
    assert reader.grade_logits(PROMPTS, GRADES)[0].dtype == np.float32


# -- refused ----------------------------------------------------------------------------------------------------


def test_an_adapter_that_changes_nothing_is_refused_unless_told(tmp_path: Path) -> None:
    save_adapter(tmp_path, tiny(), zero=True)
    with pytest.raises(ModelMismatch, match=r"changes nothing.*check_adapter=False"):
        engine(adapter=tmp_path)
    read = engine(adapter=tmp_path, check_adapter=False).grade_logits(PROMPTS, GRADES)
    assert apart(read, one_slot_at_a_time(tiny(), PROMPTS)) < 1e-4


def test_keys_that_match_nothing_are_refused_and_named(tmp_path: Path) -> None:
    save_adapter(tmp_path, tiny())
    rewrite(tmp_path, lambda tensors: {k.replace("self_attn", "attention"): v for k, v in tensors.items()})
    with pytest.raises(ModelMismatch, match=r"12 keys \(.*attention.*…\).* match nothing.*12 keys .*not in the file"):
        engine(adapter=tmp_path)


def test_a_single_missing_key_is_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path, tiny())
    gone = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    rewrite(tmp_path, lambda tensors: {k: v for k, v in tensors.items() if k != gone})
    with pytest.raises(ModelMismatch, match=r"1 keys \(.*layers\.1\.self_attn\.q_proj\.lora_B"):
        engine(adapter=tmp_path)


def test_a_single_key_too_many_is_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path, tiny())
    rewrite(
        tmp_path,
        lambda tensors: {**tensors, "base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.ones(4, 32)},
    )
    with pytest.raises(ModelMismatch, match=r"1 keys \(.*layers\.9"):
        engine(adapter=tmp_path)


@pytest.mark.parametrize(
    "how", [{"targets": ["lm_head"]}, {"targets": ["embed_tokens"]}, {"modules_to_save": ["embed_tokens"]}]
)
def test_another_vocabulary_is_refused_with_both_numbers(tmp_path: Path, how: dict[str, Any]) -> None:
    save_adapter(tmp_path, tiny(vocab_size=VOCABULARY + 4), **how)
    with pytest.raises(ModelMismatch, match=r"vocabulary of 164.*has 160"):
        engine(adapter=tmp_path)


def test_another_base_is_refused_with_the_one_it_was_trained_on(tmp_path: Path) -> None:
    save_adapter(tmp_path, tiny(hidden_size=64))
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": "big/base"}))
    with pytest.raises(ModelMismatch, match=r"shape \[.*64.*\].*big/base"):
        engine(adapter=tmp_path)


def test_an_adapter_for_other_modules_is_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path, tiny("GPTNeoX"), targets=["query_key_value"])
    with pytest.raises(ModelMismatch, match="could not be applied"):
        engine(adapter=tmp_path)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # between PEFT and transformers
def test_prompt_tuning_is_refused(tmp_path: Path) -> None:
    import peft

    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    peft.get_peft_model(tiny(), config).save_pretrained(tmp_path)
    with pytest.raises(ModelMismatch, match=r"PROMPT_TUNING.*LoRA"):
        engine(adapter=tmp_path)


def test_an_adapter_that_is_nowhere_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingResource, match=r"some/adapter.*neither a folder"):
        engine(adapter="some/adapter")
    with pytest.raises(MissingResource, match=r"adapter_config\.json"):
        engine(adapter=tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(InvalidData, match="not a JSON object"):
        engine(adapter=tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(MissingResource, match="no weights"):
        engine(adapter=tmp_path)


# -- found and described ----------------------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, Path]:
    """A base folder, and an adapter folder that names it, with tokenizer-free contents."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    tiny().save_pretrained(base)
    save_adapter(adapter, tiny())
    name_base(adapter, str(base))
    return base, adapter


def name_base(adapter: Path, base: str | None) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": base, "revision": None}))


def test_an_adapter_folder_given_as_the_model_brings_its_base(trained: tuple[Path, Path]) -> None:
    base, adapter = trained
    reader = HFEngine(adapter, tokenizer=Words(), device="cpu", dtype="float32")
    beside = HFEngine(base, adapter=adapter, tokenizer=Words(), device="cpu", dtype="float32")
    read = reader.grade_logits(PROMPTS, GRADES)
    assert np.array_equal(read[0], beside.grade_logits(PROMPTS, GRADES)[0])
    assert apart(read, one_slot_at_a_time(tiny(), PROMPTS)) > 0.05
    assert reader.describe()["adapter"]["source"] == str(adapter)
    with pytest.raises(BadArgument, match="itself an adapter"):
        HFEngine(adapter, adapter=adapter, tokenizer=Words())


def test_the_base_given_wins_over_the_one_the_adapter_names(trained: tuple[Path, Path]) -> None:
    base, adapter = trained
    name_base(adapter, "/moved/elsewhere/base")
    reader = HFEngine(base, adapter=adapter, tokenizer=Words(), device="cpu")
    assert reader.describe()["adapter"]["trained_on"] == "/moved/elsewhere/base"


def test_a_base_that_has_moved_is_named_with_the_way_out(trained: tuple[Path, Path]) -> None:
    _, adapter = trained
    name_base(adapter, "/moved/elsewhere/base")
    with pytest.raises(MissingResource, match=r"/moved/elsewhere/base.*give the base as model and .* as adapter"):
        HFEngine(adapter, tokenizer=Words())
    name_base(adapter, "some/base")
    with pytest.raises(MissingResource, match=r"some/base.*offline"):
        HFEngine(adapter, tokenizer=Words())
    name_base(adapter, None)
    with pytest.raises(MissingResource, match="names no base model"):
        HFEngine(adapter, tokenizer=Words())


def test_the_manifest_says_which_adapter_and_what_is_in_it(tmp_path: Path) -> None:
    from pd_rerank.files import sha256_file

    save_adapter(tmp_path, tiny(), rank=4, rank_pattern={"q_proj": 8})
    said = json.loads(json.dumps(engine(adapter=tmp_path).describe()))["adapter"]
    assert said["source"] == str(tmp_path)
    assert said["sha256"] == sha256_file(tmp_path / "adapter_model.safetensors")
    assert (said["rank"], said["rank_pattern"]) == (8, {"q_proj": 8})
    assert sorted(said["target_modules"]) == sorted(BODY)
    assert open_adapter(tmp_path).rank == 8


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # between PEFT and transformers
def test_a_model_object_that_carries_an_adapter_says_so(tmp_path: Path) -> None:
    import peft

    base = tiny()
    wrapped = peft.PeftModel.from_pretrained(base, str(save_adapter(tmp_path, tiny())))
    reader = engine(wrapped)
    assert reader.describe()["adapter"]["rank"] == 4
    assert apart(reader.grade_logits(PROMPTS, GRADES), one_slot_at_a_time(wrapped, PROMPTS)) < 1e-4


def test_our_card_is_read_where_it_is_and_none_where_it_is_not(tmp_path: Path) -> None:
    save_adapter(tmp_path, tiny())
    assert engine(adapter=tmp_path).adapter_card is None
    (tmp_path / "reranker.json").write_text('{"template_hash": "abc"}')
    assert engine(adapter=tmp_path).adapter_card == {"template_hash": "abc"}
    assert engine().adapter_card is None


def test_the_adapter_s_own_tokenizer_is_used(trained: tuple[Path, Path]) -> None:
    from tests.tokenizers_for_tests import byte_level

    _, adapter = trained
    base = adapter.parent / "wide"
    tiny(vocab_size=600).save_pretrained(base)
    byte_level().save_pretrained(base)
    own = byte_level()
    own.save_pretrained(adapter)
    settings = json.loads((adapter / "tokenizer_config.json").read_text())
    (adapter / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": 77}))
    assert HFEngine(base, adapter=adapter, device="cpu").tokenizer.model_max_length == 77
    assert HFEngine(base, device="cpu").tokenizer.model_max_length != 77


def test_peft_s_warnings_are_logged_and_not_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_adapter(tmp_path, tiny(tie_word_embeddings=True), targets=["lm_head"])
    with caplog.at_level(logging.INFO, logger="pd_rerank"):
        engine(tiny(tie_word_embeddings=True), adapter=tmp_path)
    assert any("tie" in record.message for record in caplog.records)
