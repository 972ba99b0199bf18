"""Training runs from end to end on a tiny random model: they learn, go on, agree across processes, and lose nothing."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pd_rerank.config import RECIPES
from pd_rerank.engines.hf import HFEngine
from pd_rerank.files import read_json, sha256_file, write_json
from pd_rerank.pool import Pool, write_pools
from pd_rerank.training.labels import labels_of_qrels, write_labels
from tests.training.runs import RACK, SCRIPT, Bench, pools_of, qrels_of, signals_kept, start

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, script: ModuleType, model_folder: Path) -> Bench:
    """Three runs nothing happened to, for tests of what something happens to: `run`, `four` steps, and `half` of it."""
    bench = Bench(tmp_path_factory.mktemp("whole"), script, model_folder)
    with signals_kept():
        assert bench() == 0
        assert bench(max_steps=4, save_every=4, output=str(bench.place / "four")) == 0
        assert bench("--stop-after", "3", output=str(bench.place / "half")) == 0
    return bench


def adapter_weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(folder / "adapter_model.safetensors"))


def same(one: dict[str, Any], other: dict[str, Any], *, atol: float = 0.0) -> bool:
    return one.keys() == other.keys() and all(
        torch.allclose(weight, other[name], atol=atol, rtol=0) for name, weight in one.items()
    )


def close(one: list[dict[str, Any]], other: list[dict[str, Any]], *, to: float) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(a[name] == pytest.approx(b[name], abs=to, rel=to) for name in a)
        for a, b in zip(one, other, strict=True)
    )


# -- what a run does ----------------------------------------------------------------------------------------------


def test_a_run_prints_a_line_per_step_and_leaves_an_adapter_that_serves(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(ramp_steps=500) == 0
    said = capsys.readouterr()
    shown = [line for line in said.out.splitlines() if line]
    assert [line.partition("  ")[0] for line in shown] == [f"step {i}/6" for i in range(1, 7)]
    assert "left 0:00:00" in shown[-1]
    assert "12 windows of 6 queries, 30 documents; 6 windows of one" not in said.err
    assert "12 windows of 6 queries, 30 documents; 6 steps of 4 windows" in said.err
    assert "λ rises to 5 over 500 steps and the run has 6: it ends at 0.05" in said.err
    run = bench.place / "run"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000003", "step-000006"]
    served = HFEngine(bench.settings["model"], adapter=run / "adapter")
    assert served.adapter_card is not None
    assert served.adapter_card["step"] == 6
    assert (served.adapter_card["loss"], served.adapter_card["lambda"]) == ("oc_sft", 5.0)
    assert same(adapter_weights(run / "adapter"), adapter_weights(run / "checkpoints" / "step-000006" / "adapter"))


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_every_recipe_trains(bench: Bench, recipe: str) -> None:
    more = {"qrels": str(bench.place / "qrels.txt")} if recipe == "debias_first" else {}
    assert bench(recipe=recipe, max_steps=2, save_every=2, views_per_window=2, **more) == 0
    lines = bench.lines()
    assert [line["step"] for line in lines] == [1, 2]
    card = read_json(bench.place / "run" / "adapter" / "reranker.json")
    assert card["loss"] == recipe
    consistent = RECIPES[recipe]["loss"] != "supervised"
    assert (max(line["consistency"] for line in lines) > 0) == consistent


def test_training_fits_the_labels(bench: Bench) -> None:
    changes: dict[str, Any] = {"lora_dropout": 0.0, "max_steps": 25, "save_every": 25, "max_queries": 1}
    assert bench(recipe="single_order", learning_rate=2e-2, windows_per_step=2, **changes) == 0
    fits = [line["fit"] for line in bench.lines()]
    assert fits[-1] < 0.3 * fits[0]


def test_consistency_training_brings_two_orders_together(bench: Bench) -> None:
    """The same steps with and without the term: it ends with views closer to each other."""
    ends = {}
    for strength in (0.0, 5.0):
        bench.settings["output"] = str(bench.place / f"run{strength:g}")
        assert bench(consistency=strength, max_steps=15, save_every=15, lora_dropout=0.0, ramp_steps=0) == 0
        ends[strength] = sum(line["consistency"] for line in bench.lines(f"run{strength:g}")[-5:])
    assert ends[5.0] < 0.5 * ends[0.0]


def test_a_bfloat16_base_trains(bench: Bench) -> None:
    assert bench(dtype="bfloat16", gradient_checkpointing=True, max_steps=3) == 0
    weights = adapter_weights(bench.place / "run" / "adapter")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert bench("--overwrite", adapter_dtype="bfloat16", max_steps=2) == 0
    assert {w.dtype for w in adapter_weights(bench.place / "run" / "adapter").values()} == {torch.bfloat16}


def test_checkpointing_does_not_change_the_losses(bench: Bench) -> None:
    assert bench(max_steps=3) == 0
    plain = bench.lines()
    assert bench("--overwrite", max_steps=3, gradient_checkpointing=True) == 0
    assert close(plain, bench.lines(), to=1e-5)


def test_windows_of_one_train_on_the_fit_alone(bench: Bench) -> None:
    assert bench(recipe="single_order", window_size=1, max_steps=2, min_spread=0.02) == 0
    assert [line["spread"] for line in bench.lines()] == [None, None]


def test_heldout_queries_choose_the_adapter_and_show_quality_beside_stability(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    held = {"heldout_pools": str(bench.place / "held"), "heldout_qrels": str(bench.place / "held.txt")}
    assert bench(max_steps=4, save_every=2, evaluate_presentations=3, **held) == 0
    found = [json.loads(line) for line in (bench.place / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert [e["step"] for e in found] == [2, 4]
    best = max(found, key=lambda e: (e["figures"]["ndcg"]["value"], -e["step"]))
    card = read_json(bench.place / "run" / "adapter" / "reranker.json")
    assert card["step"] == best["step"]
    assert card["held_out"]["figures"] == best["figures"]
    assert len(card["beside"]) == 1
    assert card["beside"][0]["step"] != best["step"]
    assert card["choice"]["rule"] == "best_ndcg"
    said = capsys.readouterr().err
    assert said.count("oc_sft λ 5, step 2: nDCG@10") == 1
    assert "Held-out" in said or "frontier" in said
    assert (bench.place / "run" / "frontier.svg").read_text().lstrip().startswith("<")


def test_an_evaluation_does_not_change_the_training(bench: Bench, whole: Bench) -> None:
    held = {"heldout_pools": str(bench.place / "held"), "heldout_qrels": str(bench.place / "held.txt")}
    assert bench(max_steps=4, save_every=1, evaluate_presentations=2, **held) == 0
    assert bench.lines() == whole.lines("four")


# -- going on -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["oc_sft", "mean_teacher", "permutation_augmentation"])
def test_a_resumed_run_equals_an_uninterrupted_one(bench: Bench, whole: Bench, recipe: str) -> None:
    if recipe != "oc_sft":
        assert bench(recipe=recipe) == 0
        whole = bench
    lines, weights = whole.lines(), adapter_weights(whole.place / "run" / "adapter")
    bench.settings["output"] = str(bench.place / "again")
    assert bench("--stop-after", "2", recipe=recipe) == 0
    assert not (bench.place / "again" / "adapter").exists()
    assert bench.lines("again") == lines[:2]
    assert bench(recipe=recipe) == 0
    assert bench.lines("again") == lines
    assert same(weights, adapter_weights(bench.place / "again" / "adapter"))
    before = (bench.place / "again" / "checkpoints" / "step-000006" / "state.json").read_bytes()
    assert bench(recipe=recipe) == 0, "a finished run is left as it is"
    assert (bench.place / "again" / "checkpoints" / "step-000006" / "state.json").read_bytes() == before


def launched(config: Path) -> tuple[str, str]:
    """Train in two processes on this CPU, as the page on training says; `accelerate launch --cpu` would start one."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(SCRIPT), "--config", str(config)]
    done = subprocess.run(command, env={**os.environ, **RACK}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


def two_processes(config: Path, *words: str) -> tuple[str, str]:
    """The same without a launcher; what they say on stdout and on stderr."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    said = [config.parent / f"rank{rank}" for rank in range(2)]
    ranks = [
        start(config, *words, said=path, env={**place, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, path in enumerate(said)
    ]
    for rank, path in zip(ranks, said, strict=True):
        rank.join(timeout=600)
        assert rank.exitcode == 0, path.with_suffix(".err").read_text(encoding="utf-8")[-3000:]
    out, err = ("".join(path.with_suffix(end).read_text(encoding="utf-8") for path in said) for end in (".out", ".err"))
    return out, err


@pytest.mark.parametrize("shared", [False, True], ids=["whole base", "shared base"])
def test_two_processes_equal_one_with_twice_the_accumulation(bench: Bench, whole: Bench, shared: bool) -> None:
    config = bench.config(max_steps=4, save_every=4, shard_base=shared, output=str(bench.place / "two"))
    out, err = two_processes(config) if shared else launched(config)
    assert "shared by 2 processes" in err
    assert out.count("step 1/4") == 1
    assert close(whole.lines("four"), bench.lines("two"), to=1e-5)
    ends = whole.place / "four" / "adapter", bench.place / "two" / "adapter"
    one, other = map(adapter_weights, ends)
    assert same(one, other, atol=1e-5)
    records = [read_json(end / "reranker.json") for end in ends]
    assert records[0]["base"] == records[1]["base"], "known by the same fingerprint, though no process holds it whole"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_shared_base_takes_windows_of_one_evaluates_and_goes_on(bench: Bench, dtype: str) -> None:
    """Windows of three and of one in a pool of four: the processes need unlike numbers of passes."""
    pools = pools_of(7, n=4)
    write_pools(bench.place / "fours", pools)
    write_labels(bench.place / "four-labels", labels_of_qrels(qrels_of(pools), pools))
    changes: dict[str, Any] = {
        "recipe": "mean_teacher",
        "dtype": dtype,
        "pools": str(bench.place / "fours"),
        "labels": str(bench.place / "four-labels"),
        "heldout_pools": str(bench.place / "held"),
        "heldout_qrels": str(bench.place / "held.txt"),
        "evaluate_presentations": 2,
        "max_steps": 4,
        "save_every": 2,
    }
    assert bench(**changes) == 0
    path = bench.config("two.yaml", **changes, shard_base=True, output=str(bench.place / "two"))
    assert "shared by 2 processes" in two_processes(path, "--stop-after", "2")[1]
    two_processes(path)
    assert close(bench.lines(), bench.lines("two"), to=1e-5)
    found = [(bench.place / run / "evaluations.jsonl").read_text().splitlines() for run in ("run", "two")]
    assert len(found[0]) == len(found[1]) == 2
    for one, other in zip(*(map(json.loads, lines) for lines in found), strict=True):
        assert one["figures"]["ndcg"]["value"] == pytest.approx(other["figures"]["ndcg"]["value"], abs=1e-5)
    one, two = (adapter_weights(bench.place / run / "adapter") for run in ("run", "two"))
    assert same(one, two, atol=1e-5)


def test_one_process_cannot_share_a_base(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(shard_base=True) == 2
    assert "--shard-base shares the base out among processes and there is one" in capsys.readouterr().err


def test_other_words_qrels_or_heldout_queries_do_not_go_on_in_the_same_folder(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    rubric = bench.place / "rubric.yaml"
    words = {"name": "r", "system": "Grade.", "instruction": "Grade documents.", "grades": ["a", "b", "c", "d"]}
    rubric.write_text(json.dumps(words), encoding="utf-8")
    held = {"heldout_pools": str(bench.place / "held"), "heldout_qrels": str(bench.place / "held.txt")}
    changes = {"rubric": str(rubric), "evaluate_presentations": 2, **held}
    assert bench("--stop-after", "1", **changes) == 0
    rubric.write_text(json.dumps(words | {"system": "Judge."}), encoding="utf-8")
    assert bench(**changes) == 2
    assert "holds another training run (rubric is" in capsys.readouterr().err
    rubric.write_text(json.dumps(words), encoding="utf-8")
    qrels = bench.place / "held.txt"
    qrels.write_text("\n".join(qrels.read_text(encoding="utf-8").splitlines()[1:]) + "\n", encoding="utf-8")
    assert bench(**changes) == 2
    assert "holds another training run (heldout." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"learning_rate": float("inf")}, "--learning-rate"),
        ({"seed": 10**30}, "--seed"),
        ({"convention": "variance_mean", "recipe": "kl_to_base"}, "--convention means nothing without"),
        ({"max_psi": 0.1}, "--max-psi means nothing without"),
        ({"recipe": "marker_consistency", "markers": "roman"}, "--marker-schemes"),
    ],
)
def test_what_would_mean_nothing_is_refused(
    bench: Bench, changes: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(**changes) == 2
    assert says in capsys.readouterr().err


def test_other_settings_do_not_go_on_in_the_same_folder(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--stop-after", "1") == 0
    assert bench(consistency=3.0) == 2
    said = capsys.readouterr().err
    assert "holds another training run (settings.consistency is 5.0 there, 3.0 here)" in said
    assert "--overwrite" in said
    assert bench("--overwrite", consistency=3.0, max_steps=1) == 0
    assert len(bench.lines()) == 1


def test_another_base_under_the_same_name_does_not_go_on_in_the_same_folder(
    bench: Bench, whole: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    run = bench.copied(whole.place / "half")
    record = read_json(run / "run.json")
    other = bench.place / "other"
    shutil.copytree(bench.settings["model"], other)
    write_json(run / "run.json", {**record, "settings": {**record["settings"], "model": str(other)}})
    weights = load_file(other / "model.safetensors")
    save_file({name: weight + 0.1 for name, weight in weights.items()}, other / "model.safetensors", {"format": "pt"})
    assert bench(model=str(other)) == 2
    mark = record["base_fingerprint"]
    assert f"holds another training run (base_fingerprint is '{mark}' there" in capsys.readouterr().err

    write_json(run / "run.json", {name: said for name, said in record.items() if name != "base_fingerprint"})
    assert bench() == 0, "a record from before there was one goes on"
    assert read_json(run / "run.json") == record
    assert bench.lines("again") == whole.lines()


def test_an_average_over_one_order_is_warned_of(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--dry-run", recipe="order_averaged") == 0
    assert "recipe order_averaged): labels of one order have nothing to average" in capsys.readouterr().err
    assert bench("--dry-run", recipe="single_order") == 0
    assert "nothing to average" not in capsys.readouterr().err


def test_a_request_to_stop_saves_the_step_and_goes_on_later(bench: Bench) -> None:
    said = bench.place / "said"
    job = start(bench.config(max_steps=200, save_every=1000), said=said)
    out, err = said.with_suffix(".out"), said.with_suffix(".err")
    deadline = time.monotonic() + 300
    while not (out.is_file() and out.read_text(encoding="utf-8").startswith("step 1/200")):
        assert job.is_alive(), err.read_text(encoding="utf-8")
        assert time.monotonic() < deadline
        time.sleep(0.02)
    job.terminate()
    job.join(timeout=120)
    assert job.exitcode == 130
    step = len(bench.lines())
    assert step < 200
    assert f"interrupted; step {step} is saved" in err.read_text(encoding="utf-8")
    assert (bench.place / "run" / "checkpoints" / f"step-{step:06d}" / "state.safetensors").is_file()
    assert bench("--stop-after", str(step + 1), max_steps=200, save_every=1000) == 0
    assert len(bench.lines()) == step + 1


def test_training_starts_from_a_finished_adapter(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(max_steps=2, output=str(bench.place / "first")) == 0
    start = bench.place / "first" / "adapter"
    tiny_step = {"max_steps": 1, "learning_rate": 1e-9, "warmup": 0}
    assert bench(start=str(start), output=str(bench.place / "second"), **tiny_step) == 0
    second = bench.place / "second" / "adapter"
    assert same(adapter_weights(start), adapter_weights(second), atol=1e-6)
    card = json.loads((second / "reranker.json").read_text(encoding="utf-8"))
    assert card["data"]["start"] == sha256_file(start / "adapter_model.safetensors")

    moved = start.rename(bench.place / "moved")  # where it lies is no part of the run, its weights are
    assert bench(start=str(moved), output=str(bench.place / "second"), **tiny_step) == 0
    assert bench(output=str(bench.place / "second"), **tiny_step) == 2
    assert "another training run" in capsys.readouterr().err


def test_an_adapter_of_other_shape_or_base_is_no_start(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(max_steps=1, output=str(bench.place / "first")) == 0
    start = bench.place / "first" / "adapter"
    assert bench(start=str(start), lora_rank=2, output=str(bench.place / "second")) == 5
    assert "give --lora-rank (4 there)" in capsys.readouterr().err
    assert bench(start=str(start), lora_alpha=4, output=str(bench.place / "fifth")) == 5
    assert "--lora-alpha 4; give 8" in capsys.readouterr().err
    card = json.loads((start / "reranker.json").read_text(encoding="utf-8"))
    card["base"]["fingerprint"] = "0" * 64
    (start / "reranker.json").write_text(json.dumps(card), encoding="utf-8")
    assert bench(start=str(start), output=str(bench.place / "third")) == 5
    assert bench(start=str(bench.place / "nowhere"), output=str(bench.place / "fourth")) == 4


def test_one_process_trains_in_a_folder_at_a_time(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    from pd_rerank.training.checkpoints import RunFolder

    held = RunFolder(bench.place / "run", run={})
    assert bench() == 2
    assert "another process trains in" in capsys.readouterr().err
    held.close()


# -- what goes wrong ----------------------------------------------------------------------------------------------


def test_collapsed_scores_stop_the_run_with_its_checkpoint_kept(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(min_spread=3.0, patience=4) == 7
    said = capsys.readouterr().err
    assert "step 4: for 4 steps the documents of a window have differed by less than 3" in said
    assert (bench.place / "run" / "checkpoints" / "step-000004" / "state.safetensors").is_file()


def test_a_loss_that_is_no_number_stops_the_run_before_the_step(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(learning_rate=1e30, save_every=1, warmup=0.0) == 6
    said = capsys.readouterr().err
    assert "step 2: the loss is nan" in said
    assert "q" in said.partition("it read queries")[2]
    assert len(bench.lines()) == 1
    weights = adapter_weights(bench.place / "run" / "checkpoints" / "step-000001" / "adapter")
    assert all(torch.isfinite(weight).all() for weight in weights.values())


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes; writing on fails as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_loses_no_earlier_checkpoint(
    bench: Bench, whole: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    again = bench.copied(whole.place / "half")
    saved = (again / "checkpoints" / "step-000003" / "state.safetensors").read_bytes()
    with full_disk(20_000):
        assert bench() == 6
    said = capsys.readouterr().err
    assert "the checkpoint of step 6 could not be written" in said
    assert "step 3 is kept: free some space and run the same command" in " ".join(said.split())
    places = again / "checkpoints"
    assert [path.name for path in places.iterdir()] == ["step-000003"]
    assert (places / "step-000003" / "state.safetensors").read_bytes() == saved
    assert bench() == 0
    assert bench.lines("again") == whole.lines()
    assert same(adapter_weights(whole.place / "run" / "adapter"), adapter_weights(again / "adapter"))


def test_a_full_disk_at_the_end_leaves_the_checkpoints_to_make_the_adapter_of(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(max_steps=2, save_every=2) == 0
    run = bench.place / "run"
    weights = adapter_weights(run / "adapter")
    shutil.rmtree(run / "adapter")
    with full_disk(20_000):
        assert bench(max_steps=2, save_every=2) == 6
    said = " ".join(capsys.readouterr().err.split())
    assert f"{run / 'adapter'} could not be written" in said
    assert "nothing of it is kept: free some space and save again" in said
    assert not (run / "adapter").exists()
    assert bench(max_steps=2, save_every=2) == 0
    assert same(weights, adapter_weights(run / "adapter"))


def test_a_full_disk_in_the_middle_of_a_line_costs_the_steps_since_the_checkpoint(bench: Bench, whole: Bench) -> None:
    bench.settings["output"] = str(bench.place / "again")
    assert bench("--stop-after", "2", max_steps=4, save_every=2) == 0
    lines = bench.place / "again" / "steps.jsonl"
    with full_disk(lines.stat().st_size + 40):
        assert bench(max_steps=4, save_every=2) == 6
    assert bench(max_steps=4, save_every=2) == 0
    assert bench.lines("again") == whole.lines("four")


@pytest.mark.parametrize("name", ["state.safetensors", "step-000006", "adapter"])
def test_killed_in_the_middle_of_a_save_nothing_is_lost(bench: Bench, whole: Bench, name: str) -> None:
    """Killed while a file is written, before the checkpoint gets its name, and before the kept adapter gets its."""
    places = bench.copied(whole.place / "half")
    killed = start(bench.config(), said=bench.place / "said", die_at=name)
    killed.join(timeout=300)
    assert killed.exitcode == 9
    assert (places / "checkpoints" / "step-000003" / "state.safetensors").is_file()
    assert not (places / "adapter").exists()
    assert list(places.rglob(".*.part")), "it was killed in the middle"
    assert bench() == 0
    assert list(places.rglob(".*.part")) == []
    assert bench.lines("again") == whole.lines()
    assert same(adapter_weights(whole.place / "run" / "adapter"), adapter_weights(places / "adapter"))


def test_a_damaged_checkpoint_is_named(bench: Bench, whole: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    path = bench.copied(whole.place / "half") / "checkpoints" / "step-000003" / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    assert bench() == 5
    assert "state.safetensors is not what state.json records; remove" in capsys.readouterr().err


def test_a_line_half_written_when_killed_is_written_again(bench: Bench, whole: Bench) -> None:
    with open(bench.copied(whole.place / "half") / "steps.jsonl", "a") as stream:
        stream.write('{"step": 4, "loss": 0.1')
    assert bench() == 0
    assert bench.lines("again") == whole.lines()


def test_the_wrong_label_file_is_refused_before_training(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    others = pools_of(3, first=50)
    write_labels(bench.place / "others", labels_of_qrels(qrels_of(others), others))
    assert bench(labels=str(bench.place / "others")) == 5
    assert "the labels do not fit 6 of 6 pools: query 'q0': 5 of 5 documents have no label" in capsys.readouterr().err
    assert bench("--overwrite", labels=str(bench.place / "qrels.txt")) == 5
    assert bench("--overwrite", labels=str(bench.place / "nothing")) == 4
    twice = bench.place / "twice.jsonl"
    lines = (bench.place / "labels" / "labels.jsonl").read_text().splitlines(keepends=True)
    twice.write_text("".join([*lines, lines[0]]))
    capsys.readouterr()
    assert bench("--overwrite", labels=str(twice)) == 5
    assert f"twice.jsonl:{len(lines) + 1}: " in capsys.readouterr().err


def test_labels_of_another_template_are_refused_unless_that_is_meant(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = read_json(bench.place / "labels" / "manifest.json")
    write_json(bench.place / "labels" / "manifest.json", manifest | {"prompt": {"template_hash": "f" * 64}})
    assert bench() == 5
    assert "was made with prompt template ffffffffffff" in capsys.readouterr().err
    lines = (bench.place / "labels" / "labels.jsonl").read_text(encoding="utf-8")
    taught = bench.place / "taught.jsonl"
    taught.write_text(lines.replace('"judgements"', '"k_shot_bsc"'), encoding="utf-8")
    assert bench("--overwrite", labels=str(taught)) == 5
    assert "does not record which template its teacher was asked with" in capsys.readouterr().err
    assert bench("--overwrite", check_template=False, max_steps=1) == 0


def test_a_document_twice_is_refused(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    path = bench.place / "pools.jsonl"
    one = {"docid": "d", "score": 1.0, "doc": {"text": "tide"}}
    path.write_text(json.dumps({"query": {"qid": "q", "text": "tide?"}, "candidates": [one, one]}) + "\n")
    assert bench(pools=str(path)) == 5
    assert "holds 'd' twice" in capsys.readouterr().err


@pytest.mark.parametrize(("long", "code"), [(3, 0), (6, 5)])
def test_queries_too_long_are_dropped_and_counted_and_none_left_is_an_error(
    bench: Bench, long: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    pools = [
        Pool(query_id=p.query_id, query=p.query * (400 if i < long else 1), candidates=p.candidates)
        for i, p in enumerate(pools_of(6))
    ]
    write_pools(bench.place / "long", pools)
    write_labels(bench.place / "long-labels", labels_of_qrels(qrels_of(pools), pools))
    changes = {"pools": str(bench.place / "long"), "labels": str(bench.place / "long-labels"), "max_steps": 1}
    assert bench(**changes) == code
    said = " ".join(capsys.readouterr().err.split())
    if code:
        assert "no window is left of 6 pools; first 'q0'" in said
    else:
        assert "3 of 6 queries leave no room for a document and are dropped ('q0', 'q1', 'q2')" in said
        assert "6 windows of 3 queries" in said


def test_queries_trained_on_are_not_held_out(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    held = {"heldout_pools": str(bench.place / "pools"), "heldout_qrels": str(bench.place / "qrels.txt")}
    assert bench(**held) == 5
    assert "6 queries are trained on and held out, first 'q0'" in capsys.readouterr().err


def test_a_folder_of_something_else_is_left_alone(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    (bench.place / "run").mkdir()
    (bench.place / "run" / "thesis.tex").write_text("years of work")
    for words in ((), ("--overwrite",)):
        assert bench(*words) == 2
        assert "holds 'thesis.tex' and no training run" in capsys.readouterr().err
    assert (bench.place / "run" / "thesis.tex").is_file()


def test_windows_that_processes_cannot_share_are_refused(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(windows_per_step=5, batch_size=2) == 2
    assert "no multiple of --batch-size" in capsys.readouterr().err


def test_a_tracker_that_is_not_installed_is_named(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(trackers="nosuchtracker") == 3
    assert "tracker 'nosuchtracker' is not installed" in capsys.readouterr().err


def test_a_dry_run_says_what_would_be_trained_on_and_writes_nothing(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("--dry-run") == 0
    assert "12 windows of 6 queries" in capsys.readouterr().err
    assert not (bench.place / "run").exists()


def test_time_is_not_spent_where_the_folder_is_refused(bench: Bench) -> None:
    (bench.place / "run").write_text("a file")
    began = time.monotonic()
    assert bench(model="/no/such/model") == 2
    assert time.monotonic() - began < 30
