"""Artefacts: saved and read back to equal scores, merged, made a classifier, refused, and never half written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pd_rerank.engines import load_engine
from pd_rerank.errors import BadArgument, InvalidData, ModelMismatch
from pd_rerank.pool import Candidate, Pool
from pd_rerank.prompt import GradePrompt
from pd_rerank.scores import ScoreTable
from pd_rerank.scoring import Scoring, score_pools
from tests.engines.fake_vllm import Behaviour, vllm  # noqa: F401 (the fixture)
from tests.engines.tiny import tiny
from tests.tokenizers_for_tests import byte_level

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from pd_rerank import OCSFTBatchedReranker  # noqa: E402
from pd_rerank.engines.adapters import fingerprint  # noqa: E402
from pd_rerank.engines.canary import read_canary  # noqa: E402
from pd_rerank.engines.hf import HFEngine  # noqa: E402
from pd_rerank.training.adapters import (  # noqa: E402
    AdapterCard,
    _prove,
    adapter_record,
    export,
    grade_logits,
    prompt_of,
    save_adapter,
)
from pd_rerank.training.selection import Evaluation, best_ndcg  # noqa: E402

BODY = ["q_proj", "v_proj", "down_proj"]
TEXTS = [
    "The tide rises twice a day.",
    "Bread needs flour, water, salt and yeast.",
    "A chain should be oiled.",
    "Bees visit flowers.",
    "Honey keeps.",
]
POOLS = [
    Pool(
        query_id=f"q{q}",
        query=query,
        candidates=tuple(Candidate(doc_id=f"d{i}", text=text) for i, text in enumerate(TEXTS)),
    )
    for q, query in enumerate(["how do tides work", "what is in bread"])
]
SCORING = Scoring(window=3, partition="contiguous", presentations=2)
ROOM: dict[str, Any] = {"vocab_size": 600, "max_position_embeddings": 2048}


def wide(family: str = "Llama", **changes: Any) -> Any:
    """A tiny model that embeds the byte-level tokenizer and takes real prompts."""
    return tiny(family, **{**ROOM, **changes})


def trained(model: Any, *, targets: list[str] | None = None, seed: int = 1) -> Any:
    """`model` with an adapter that changes what it says."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets or BODY, task_type="CAUSAL_LM")
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        wrapped = peft.get_peft_model(model, config)
        for name, weight in wrapped.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(weight, std=0.2)
    return wrapped


def card(base: str | Path, **more: Any) -> AdapterCard:
    settings: dict[str, Any] = {
        "base": str(base),
        "window": 3,
        "partition": "contiguous",
        "max_length": 2048,
        "loss": "oc_sft",
        "weight": 3.0,
        "step": 200,
        "data": {"made of": "five sentences written for this test"},
        "settings": {"learning rate": 2e-4},
    }
    return AdapterCard(**(settings | more))


def save_base(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    byte_level().save_pretrained(folder)
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_base(tmp_path / "base", wide())


def saved(base: Path, folder: Path, model: Any = None, **more: Any) -> Path:
    prompt = GradePrompt(byte_level(), max_doc_chars=200)
    return save_adapter(folder, trained(wide() if model is None else model), byte_level(), prompt, card(base, **more))


def scores(tables: list[ScoreTable]) -> Any:
    return np.stack([table.scores() for table in tables])


def ranker(model: Any, **options: Any) -> OCSFTBatchedReranker:
    settings = {"window": 3, "partition": "contiguous", "presentations": 2, "max_doc_chars": 200}
    return OCSFTBatchedReranker(model, **{"dtype": "float32", "device": "cpu", **settings, **options})


# -- the round trip -------------------------------------------------------------------------------------------------


def test_a_saved_adapter_gives_the_scores_it_was_trained_to(base: Path, tmp_path: Path) -> None:
    model, prompt = trained(wide()), GradePrompt(byte_level(), max_doc_chars=200)
    engine = HFEngine(model, tokenizer=byte_level())
    live = scores(score_pools(POOLS, engine=engine, prompt=prompt, scoring=SCORING))
    folder = save_adapter(tmp_path / "adapter", model, byte_level(), prompt, card(base))
    read = scores(ranker(base, adapter=folder).score_pools(POOLS))
    assert np.array_equal(read, live)
    assert not np.allclose(read, scores(ranker(base).score_pools(POOLS)), atol=1e-3)
    alone = scores(ranker(folder).score_pools(POOLS))
    assert np.array_equal(alone, live)


def test_half_precision_halves_the_file_and_keeps_the_cast_scores(base: Path, tmp_path: Path) -> None:
    model, prompt = trained(wide()), GradePrompt(byte_level(), max_doc_chars=200)
    whole = save_adapter(tmp_path / "whole", model, byte_level(), prompt, card(base))
    half = save_adapter(tmp_path / "half", model, byte_level(), prompt, card(base), dtype=torch.bfloat16)
    size = [(folder / "adapter_model.safetensors").stat().st_size for folder in (whole, half)]
    assert size[1] < 0.7 * size[0]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(weight.to(torch.bfloat16).float())
    live = scores(score_pools(POOLS, engine=HFEngine(model, tokenizer=byte_level()), prompt=prompt, scoring=SCORING))
    assert np.array_equal(scores(ranker(base, adapter=half).score_pools(POOLS)), live)


def test_only_the_active_adapter_is_saved_under_its_plain_name(base: Path, tmp_path: Path) -> None:
    model = trained(wide())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["k_proj"], task_type="CAUSAL_LM"))
    folder = save_adapter(tmp_path / "a", model, byte_level(), GradePrompt(byte_level(), max_doc_chars=200), card(base))
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
    assert not [path for path in folder.iterdir() if path.is_dir()]
    assert np.isfinite(scores(ranker(base, adapter=folder).score_pools(POOLS))).all()


# -- its canary -----------------------------------------------------------------------------------------------------


def test_the_canary_is_what_the_saved_adapter_reads_and_the_base_does_not(base: Path, tmp_path: Path) -> None:
    folder = saved(base, tmp_path / "adapter")
    canary = read_canary(folder)
    served = ranker(base, adapter=folder)
    assert canary.grade_ids == served.prompt.grade_ids
    (read,) = served.engine.grade_logits([canary.prompt], canary.grade_ids)
    assert np.array_equal(read, canary.logits)
    assert canary.check(read, dtype="float32", what="the adapter") == 0
    (bare,) = ranker(base).engine.grade_logits([canary.prompt], canary.grade_ids)
    with pytest.raises(ModelMismatch, match=f"does not read its canary as {base} did"):
        canary.check(bare, dtype="float32", what="the base")


def test_the_canary_of_cast_weights_is_theirs_and_the_model_keeps_its_own(base: Path, tmp_path: Path) -> None:
    model = trained(wide())
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    prompt = GradePrompt(byte_level())
    half = save_adapter(tmp_path / "half", model, byte_level(), prompt, card(base), dtype=torch.bfloat16)
    canary = read_canary(half)
    (read,) = ranker(base, adapter=half).engine.grade_logits([canary.prompt], canary.grade_ids)
    assert np.array_equal(read, canary.logits)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    (whole,) = HFEngine(model, tokenizer=byte_level()).grade_logits([canary.prompt], canary.grade_ids)
    assert not np.array_equal(whole, canary.logits)


def test_engines_find_it_and_refuse_to_read_otherwise(base: Path, tmp_path: Path, vllm: Behaviour) -> None:  # noqa: F811
    from tests.engines.model_servers import ModelServer

    folder, how = saved(base, tmp_path / "adapter"), {"dtype": "float32", "quiet": True}
    served, reading = load_engine(str(base), adapter=folder, **how), GradePrompt(byte_level())
    kinds = {"vllm": how}
    server = ModelServer(
        "vllm_pooling",
        load_engine(str(base), **how).model,
        served.tokenizer,
        adapters={"adapter": served.model},
        grade_ids=reading.grade_ids,
    )
    with server.running():
        kinds["server"] = {"server": server.url, "quiet": True}
        for kind, options in kinds.items():
            assert load_engine(str(base), engine=kind, adapter=folder, **options).describe()["canary"] == "held"
        record = json.loads((folder / "canary.json").read_text())
        record["logits"] = [[-3 * value for value in row] for row in record["logits"]]
        (folder / "canary.json").write_text(json.dumps(record))
        for kind, options in kinds.items():
            with pytest.raises(ModelMismatch, match="does not read its canary"):
                load_engine(str(base), engine=kind, adapter=folder, **options)


def test_a_model_in_the_middle_of_training_is_left_as_it_was(base: Path, tmp_path: Path) -> None:
    model = trained(wide().to(torch.bfloat16))
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.float()
    layers = [m for m in model.modules() if hasattr(m, "cast_input_dtype_enabled")]
    for layer in layers:  # as training in half precision has it
        layer.cast_input_dtype_enabled = False
    model.train()
    chance = torch.random.get_rng_state()
    folder = save_adapter(tmp_path / "a", model, byte_level(), GradePrompt(byte_level()), card(base))
    assert read_canary(folder).dtype == "bfloat16"
    assert all(m.training for m in model.modules())
    assert not any(layer.cast_input_dtype_enabled for layer in layers)
    assert torch.equal(chance, torch.random.get_rng_state())
    assert all(weight.grad is None for weight in model.parameters())


def test_an_adapter_no_probe_fits_is_saved_without_a_canary(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    narrow = trained(wide(max_position_embeddings=64))
    folder = save_adapter(tmp_path / "a", narrow, byte_level(), GradePrompt(byte_level()), card(base))
    assert "saved without a canary" in caplog.text
    assert not (folder / "canary.json").exists()
    assert (folder / "adapter_model.safetensors").exists()


# -- what it records ------------------------------------------------------------------------------------------------


def test_the_record_holds_what_was_agreed(base: Path, tmp_path: Path) -> None:
    measured = Evaluation.recorded(arm="OC-SFT", weight=3, step=200, ndcg=0.47, tau_psi=0.08, score_sd=0.5)
    other = Evaluation.recorded(arm="single order", step=200, ndcg=0.46, tau_psi=0.2, score_sd=0.5)
    folder = saved(
        base,
        tmp_path / "adapter",
        base_revision="abc123",
        heldout=measured,
        beside=[other],
        choice=best_ndcg([measured, other]),
        limits=["English only."],
        licence="apache-2.0",
    )
    record = json.loads((folder / "reranker.json").read_text())
    prompt = GradePrompt(byte_level(), max_doc_chars=200)
    assert {name: record[name] for name in prompt.describe()} == json.loads(json.dumps(prompt.describe()))
    assert record["grades"] == [0, 1, 2, 3]
    assert (record["window"], record["partition"], record["max_length"]) == (3, "contiguous", 2048)
    assert record["base"] == {"id": str(base), "revision": "abc123", "fingerprint": fingerprint(wide())}
    assert (record["loss"], record["lambda"], record["step"]) == ("oc_sft", 3.0, 200)
    assert record["held_out"]["figures"]["tau_psi"]["value"] == 0.08
    assert Evaluation.of(record["held_out"]) == measured
    assert set(record["files"]) == {p.name for p in folder.iterdir()} - {"reranker.json", "README.md"}
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == (str(base), "abc123")
    assert ranker(base, adapter=folder).engine.adapter_card == record


def test_the_model_card_says_it_in_tables(base: Path, tmp_path: Path) -> None:
    measured = Evaluation.recorded(arm="OC-SFT", weight=3, step=200, ndcg=0.47, tau_psi=0.08, score_sd=0.5)
    other = Evaluation.recorded(arm="single order", step=200, ndcg=0.46, tau_psi=0.2, score_sd=0.5)
    folder = saved(base, tmp_path / "my adapter", heldout=measured, beside=[other], limits=["English only."])
    told = (folder / "README.md").read_text()
    assert told.startswith(f'---\nbase_model: "{base}"\nlibrary_name: "peft"\n')
    assert "# my adapter" in told
    assert 'adapter="THIS_FOLDER", window=3, partition="contiguous", max_doc_chars=200, max_length=2048)' in told
    for row in (
        "| loss | oc_sft |",
        "| λ | 3.0000 |",
        "| steps | 200 |",
        "| learning rate | 0.0002 |",
        "| made of | five sentences written for this test |",
        "|  | this (OC-SFT λ 3, step 200) | single order step 200 |",
        "| τ-PSI over presentations, lower is steadier | 0.0800 | 0.2000 |",
    ):
        assert row in told, row
    assert "- English only." in told
    unmeasured = (saved(base, tmp_path / "other") / "README.md").read_text()
    assert "how well it ranks is not known" in unmeasured
    assert "Held-out" not in unmeasured


def test_the_code_in_the_model_card_runs(base: Path, tmp_path: Path) -> None:
    folder = saved(base, tmp_path / "adapter")
    code = (
        (folder / "README.md").read_text().split("```python\n")[1].split("```")[0].replace("THIS_FOLDER", str(folder))
    )
    scope: dict[str, Any] = {}
    exec(code, scope)
    assert scope["ranker"].scoring.window == 3
    assert scope["ranker"].engine.adapter_card["template_hash"] == scope["ranker"].prompt.hash


def test_the_prompt_comes_back_from_the_record() -> None:
    tokenizer = byte_level()
    for options in (
        {},
        {"rubric": "answer_support", "markers": "alpha", "placeholder": "?", "max_doc_chars": 99},
        {"instruction": "Grade by colour.", "chat": False},
    ):
        prompt = GradePrompt(tokenizer, **options)
        again = prompt_of(json.loads(json.dumps(prompt.describe())), tokenizer)
        assert (again.hash, again.max_doc_chars) == (prompt.hash, prompt.max_doc_chars)
    with pytest.raises(InvalidData, match="rubric"):
        prompt_of({"template_hash": "abc"}, tokenizer)
    with pytest.raises(ModelMismatch, match="template"):
        prompt_of({**GradePrompt(tokenizer).describe(), "template_hash": "abc"}, tokenizer)


# -- refused --------------------------------------------------------------------------------------------------------


def test_another_prompt_is_refused_with_what_differs(base: Path, tmp_path: Path) -> None:
    folder = saved(base, tmp_path / "adapter")
    with pytest.raises(ModelMismatch, match=r"differ in markers"):
        ranker(base, adapter=folder, markers="alpha")
    assert ranker(base, adapter=folder, markers="alpha", check_template=False).prompt.markers == "alpha"


def test_another_base_of_the_same_shape_is_refused(base: Path, tmp_path: Path) -> None:
    folder = saved(base, tmp_path / "adapter")
    other = save_base(tmp_path / "twin", wide(seed=7))
    with pytest.raises(ModelMismatch, match=rf"trained on '{base}'.*weights of this model are others"):
        ranker(other, adapter=folder)
    assert ranker(other, adapter=folder, check_adapter=False).engine.adapter_card is not None


def test_the_same_base_elsewhere_or_in_half_precision_is_known_again(base: Path, tmp_path: Path) -> None:
    folder = saved(base, tmp_path / "adapter")
    moved = base.rename(tmp_path / "moved")
    assert ranker(moved, adapter=folder, dtype="bfloat16").engine.adapter_card is not None


def test_the_fingerprint_is_of_the_base_alone() -> None:
    plain = fingerprint(wide())
    assert plain is not None
    assert fingerprint(trained(wide())) == plain
    assert fingerprint(wide().to(torch.bfloat16)) == plain
    assert fingerprint(wide(seed=1)) != plain
    assert fingerprint(wide().to(torch.float16)) is None
    tied = fingerprint(trained(wide(tie_word_embeddings=True), targets=["lm_head"]))
    assert tied == fingerprint(wide(tie_word_embeddings=True))
    changed = wide()
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight[0, 3] += 0.5
    assert fingerprint(changed) != plain


def test_broken_weights_and_cards_are_not_saved(base: Path, tmp_path: Path) -> None:
    model, prompt = trained(wide()), GradePrompt(byte_level())
    with pytest.raises(BadArgument, match="no JSON"):
        save_adapter(tmp_path / "a", model, byte_level(), prompt, card(base, data={"loss": float("nan")}))
    with torch.no_grad():
        next(w for name, w in model.named_parameters() if "lora_B" in name)[0, 0] = float("nan")
    with pytest.raises(InvalidData, match=r"1 weights .*first .*lora_B"):
        save_adapter(tmp_path / "a", model, byte_level(), prompt, card(base))
    assert not (tmp_path / "a").exists()


def test_a_folder_with_something_else_in_it_is_left_alone(base: Path, tmp_path: Path) -> None:
    folder = saved(base, tmp_path / "adapter")
    saved(base, folder, step=400)
    assert json.loads((folder / "reranker.json").read_text())["step"] == 400
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(BadArgument, match=r"thesis\.tex"):
        saved(base, folder)
    assert (folder / "thesis.tex").exists()


# -- whole or not at all --------------------------------------------------------------------------------------------

AGAIN = """
import os, resource, signal, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.training.test_adapters import *

class Dies:
    def save_pretrained(self, folder):
        assert (Path(folder) / "adapter_model.safetensors").exists()
        os.kill(os.getpid(), signal.SIGKILL)

prompt = GradePrompt(byte_level(), max_doc_chars=200)
how = {how!r}
if how == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    save_adapter({folder!r}, trained(wide()), Dies() if how == "killed" else byte_level(), prompt, card("b", step=999))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals and resource limits")
@pytest.mark.parametrize("how", ["killed", "full"])
def test_the_earlier_adapter_survives(base: Path, tmp_path: Path, how: str) -> None:
    folder = saved(base, tmp_path / "adapter")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    root = str(Path(__file__).resolve().parents[2])
    script = AGAIN.format(root=root, folder=str(folder), how=how)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
    if how == "killed":
        assert done.returncode == -signal.SIGKILL, done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"OSError {folder} could not be written ("), done.stdout
        assert "untouched" in done.stdout
        assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    saved(base, folder, step=400)
    assert json.loads((folder / "reranker.json").read_text())["step"] == 400


# -- exports --------------------------------------------------------------------------------------------------------


def logits(engine: HFEngine, prompt: GradePrompt) -> tuple[list[Any], list[Any]]:
    windows = [
        prompt.sheet(pool.query, pool.texts, width=3, max_tokens=2048).window(order)
        for pool in POOLS
        for order in ([0, 1, 2], [4, 3], [2])
    ]
    return windows, engine.grade_logits(windows, prompt.grade_ids)


def apart(one: list[Any], other: list[Any]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}], ids=["untied", "tied"])
def test_a_merged_export_reads_like_the_adapter(tmp_path: Path, changes: dict[str, Any]) -> None:
    base = save_base(tmp_path / "base", wide(**changes))
    folder = saved(base, tmp_path / "adapter", wide(**changes))
    record = export(base, tmp_path / "merged", adapter=folder, form="merged")
    with_adapter, merged = ranker(base, adapter=folder), ranker(tmp_path / "merged")
    assert np.abs(scores(with_adapter.score_pools(POOLS)) - scores(merged.score_pools(POOLS))).max() < 1e-5
    assert merged.engine.adapter_card == record
    assert 0 <= record["merging_moved_scores_by"] < 1e-5
    assert record["dtype"] == "float32"
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    with pytest.raises(ModelMismatch, match="markers"):
        ranker(tmp_path / "merged", markers="roman")
    told = (tmp_path / "merged" / "README.md").read_text()
    assert 'OCSFTBatchedReranker("THIS_FOLDER", window=3' in told


def test_an_adapter_on_the_head_is_merged_too(base: Path, tmp_path: Path) -> None:
    prompt = GradePrompt(byte_level(), max_doc_chars=200)
    model = trained(wide(), targets=["q_proj", "lm_head"])
    folder = save_adapter(tmp_path / "adapter", model, byte_level(), prompt, card(base))
    export(base, tmp_path / "out", adapter=folder, form="classifier")
    windows, wanted = logits(HFEngine(model, tokenizer=byte_level()), prompt)
    assert apart(rows(tmp_path / "out", windows), wanted) < 1e-4
    assert apart(wanted, logits(HFEngine(wide(), tokenizer=byte_level()), prompt)[1]) > 0.05


def rows(folder: Path, windows: list[Any], attention: str = "sdpa") -> list[Any]:
    """What transformers' own token classifier, given the exported head, says at every slot."""
    made = transformers.AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation=attention)
    read = []
    with torch.no_grad():
        for window in windows:
            ids = torch.tensor(window.token_ids)[None]
            hidden = getattr(made, made.base_model_prefix)(input_ids=ids).last_hidden_state[0]
            every = hidden @ made.score.weight.T
            assert torch.allclose(every[-1], made(input_ids=ids).logits[0], atol=1e-5)
            read.append(every[window.slots].numpy())
    return read


@pytest.mark.parametrize(
    ("family", "changes", "extra"),
    [
        ("Llama", {}, {}),
        ("Llama", {"tie_word_embeddings": True}, {}),
        ("Qwen3", {}, {}),
        ("Gemma2", {}, {"softcap": 3.0}),
        ("Phi", {}, {"bias": 4}),
    ],
    ids=["llama", "tied", "qwen3", "softcap", "bias"],
)
def test_a_classifier_s_rows_are_the_grade_logits(
    tmp_path: Path, family: str, changes: dict[str, Any], extra: dict[str, Any]
) -> None:
    model = trained(wide(family, **changes), targets=["q_proj", "v_proj"])
    prompt = GradePrompt(byte_level(), max_doc_chars=200)
    base = save_base(tmp_path / "base", wide(family, **changes))
    folder = save_adapter(tmp_path / "adapter", model, byte_level(), prompt, card(base))
    record = export(base, tmp_path / "out", adapter=folder, form="classifier")
    windows, wanted = logits(HFEngine(model, tokenizer=byte_level()), prompt)
    raw = rows(tmp_path / "out", windows, "eager" if family == "Gemma2" else "sdpa")
    assert [r.shape for r in raw] == [(len(w.slots), 4) for w in windows]
    assert apart([grade_logits(r, record) for r in raw], wanted) < 1e-4
    assert {name: len(v) if isinstance(v, list) else v for name, v in record["logits"].items()} == extra
    if extra:
        assert apart(raw, wanted) > 0.05
    told = (tmp_path / "out" / "README.md").read_text()
    assert ("as they stand" in told) == (not extra)
    assert "vllm serve THIS_FOLDER --runner pooling" in told
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [f"{family}ForSequenceClassification"]
    assert config["id2label"] == {"0": "0", "1": "1", "2": "2", "3": "3"}


def test_the_token_classifier_of_transformers_takes_the_same_folder(base: Path, tmp_path: Path) -> None:
    folder = saved(base, tmp_path / "adapter")
    export(base, tmp_path / "out", adapter=folder, form="classifier")
    windows, wanted = logits(ranker(base, adapter=folder).engine, GradePrompt(byte_level(), max_doc_chars=200))
    with pytest.raises(ModelMismatch, match=r"LlamaForSequenceClassification.*no output head"):
        ranker(tmp_path / "out")
    made = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "out")
    torch.nn.init.zeros_(made.score.bias)
    with torch.no_grad():
        read = [made(input_ids=torch.tensor(w.token_ids)[None]).logits[0, w.slots].numpy() for w in windows]
    assert apart(read, wanted) < 1e-4


def test_corrections_are_applied_in_the_head_s_order() -> None:
    rows = np.array([[1.0, 2.0]], dtype=np.float32)
    said = {"logits": {"bias": [1.0, 0.0], "scale": 0.5, "softcap": 2.0}}
    assert grade_logits(rows, said) == pytest.approx(2 * np.tanh([[0.5, 0.5]]))
    assert np.array_equal(grade_logits(rows, {}), rows)


@pytest.mark.parametrize("family", ["Granite", "Cohere"])
def test_an_architecture_without_a_classifier_is_refused_and_merges(tmp_path: Path, family: str) -> None:
    changes = {"tie_word_embeddings": False}
    base = save_base(tmp_path / "base", wide(family, **changes))
    folder = saved(base, tmp_path / "adapter", wide(family, **changes))
    with pytest.raises(ModelMismatch, match=f"no sequence classifier for {family}ForCausalLM.*--form merged"):
        export(base, tmp_path / "out", adapter=folder, form="classifier")
    assert not (tmp_path / "out").exists()
    assert export(base, tmp_path / "out", adapter=folder, form="merged")["format"] == "pd_rerank merged 1"


def test_merging_into_tied_embeddings_is_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", wide(tie_word_embeddings=True))
    model = trained(wide(tie_word_embeddings=True), targets=["lm_head"])
    folder = save_adapter(tmp_path / "adapter", model, byte_level(), GradePrompt(byte_level()), card(base))
    for form in ("merged", "classifier"):
        with pytest.raises(ModelMismatch, match="ties into one"):
            export(base, tmp_path / "out", adapter=folder, form=form)


def test_an_export_that_reads_otherwise_is_refused() -> None:
    wanted = [np.array([[1.0, 2.0]], dtype=np.float32), np.array([[4.0, 0.0]], dtype=np.float32)]
    _prove(wanted, wanted, 1e-4, "classifier")
    with pytest.raises(ModelMismatch, match=r"classifier export reads a probe by up to 0\.01"):
        _prove([wanted[0], wanted[1] + np.float32(0.01)], wanted, 1e-4, "classifier")
    with pytest.raises(ModelMismatch):
        _prove([wanted[0], wanted[1] * np.float32(np.nan)], wanted, 1e-4, "classifier")


def test_an_adapter_without_a_record_is_exported_for_the_usual_prompt(base: Path, tmp_path: Path) -> None:
    folder = saved(base, tmp_path / "adapter")
    (folder / "reranker.json").unlink()
    record = export(base, tmp_path / "out", adapter=folder, form="merged")
    assert record["template_hash"] == GradePrompt(byte_level()).hash
    assert "Training" not in (tmp_path / "out" / "README.md").read_text()


def test_bad_destinations_are_found_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    with pytest.raises(BadArgument, match=r"thesis\.tex"):
        export("no/model", tmp_path / "full", adapter="no/adapter")
    with pytest.raises(BadArgument, match="merged, classifier"):
        export("no/model", tmp_path / "out", adapter="no/adapter", form="gguf")  # type: ignore[arg-type]


def test_a_record_is_plain_json(base: Path) -> None:
    record = adapter_record(trained(wide()), GradePrompt(byte_level()), card(base, settings={"betas": (0.9, 0.95)}))
    assert record["settings"] == {"betas": [0.9, 0.95]}
