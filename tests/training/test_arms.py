"""Several arms on the same labels, and the pools that the small configs train on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from pd_rerank.files import read_qrels
from pd_rerank.pool import read_pools
from pd_rerank.training.selection import Evaluation, read_evaluations
from tests.training.runs import RACK, SCRIPT, Bench, loaded

pytest.importorskip("torch")

TRAIN = SCRIPT.parent

Done = subprocess.CompletedProcess[str]


def script(name: str, *words: object) -> Done:
    command = [sys.executable, str(TRAIN / name), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **RACK}, check=False, timeout=300)


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return loaded(TRAIN / "arms.py")


@pytest.fixture
def here(
    bench: Bench, module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """`train/arms.py` in this process, and in it the runs that it starts."""

    def run(command: Sequence[str], check: bool) -> Done:
        assert command[1] == str(SCRIPT)
        return subprocess.CompletedProcess(command, bench.program(*command[2:]))

    def call(*words: object) -> Done:
        monkeypatch.setattr(module.subprocess, "run", run)
        monkeypatch.setattr(sys, "argv", ["arms.py", *map(str, words)])
        capsys.readouterr()
        code: Any = 0
        try:
            module.main()
        except SystemExit as ended:
            code = ended.code
        monkeypatch.undo()
        said = capsys.readouterr()
        return subprocess.CompletedProcess(words, code, said.out, said.err)

    return call


def arms(bench: Bench, **more: Any) -> Path:
    shared = {
        **{name: value for name, value in bench.settings.items() if name != "output"},
        "heldout_pools": str(bench.place / "held"),
        "heldout_qrels": str(bench.place / "held.txt"),
        "evaluate-presentations": 2,
        "max_steps": 2,
        "output": str(bench.place / "arms"),
        "baseline": "shuffled",
        "arms": {"shuffled": {"recipe": "permutation_augmentation"}, "steady": {"recipe": "oc_sft", "consistency": 3}},
    }
    path = bench.place / "arms.yaml"
    path.write_text(yaml.safe_dump({**shared, **more}), encoding="utf-8")
    return path


def test_arms_are_trained_and_shown_beside_the_base(bench: Bench, here: Callable[..., Done]) -> None:
    config = arms(bench)
    shelf = script("arms.py", "--config", config, "--only", "off_the_shelf")
    assert shelf.returncode == 0, shelf.stderr
    done = here("--config", config)
    assert done.returncode == 0, done.stderr
    found = {e.arm: e for e in read_evaluations(bench.place / "arms" / "arms.jsonl")}
    assert list(found) == ["off_the_shelf", "shuffled", "steady"]
    assert [e.weight for e in found.values()] == [0, 0, 3]
    assert found["steady"].queries.keys() == found["off_the_shelf"].queries.keys()
    text = (bench.place / "arms" / "arms.md").read_text(encoding="utf-8")
    assert "Differences from shuffled" in text
    assert (bench.place / "arms" / "steady" / "adapter" / "reranker.json").is_file()

    before = {path: path.read_bytes() for path in (bench.place / "arms").rglob("*") if path.is_file()}
    again = here("--config", config)
    assert (again.returncode, again.stdout) == (0, done.stdout[-len(again.stdout) :])
    assert {path: path.read_bytes() for path in before} == before

    for _ in range(2):  # finished arms of other settings are not passed off as these
        other = here("--config", arms(bench, max_steps=3), "--only", "steady")
        assert (other.returncode, other.stdout) == (2, "")
        assert "holds another training run (settings.max_steps is 2 there, 3 here)" in other.stderr

    held = bench.place / "held.txt"  # nor those of files that say something else now
    held.write_text(held.read_text(encoding="utf-8").replace(" 3\n", " 1\n"), encoding="utf-8")
    other = here("--config", arms(bench), "--only", "steady")
    assert (other.returncode, "holds another training run (heldout" in other.stderr) == (2, True), other.stderr


def test_the_papers_rule_chooses_among_arms_that_differ_in_their_weight_alone(
    bench: Bench, module: ModuleType, tmp_path: Path
) -> None:
    mine = {f"steady{w}": {"consistency": w} for w in (1, 3, 5)} | {
        "shuffled": {"recipe": "permutation_augmentation"},
        "teacher": {"recipe": "mean_teacher", "select": "best_ndcg"},
    }
    found = module.settings_of(arms(bench, arms=mine, select="largest_weight", max_steps=469))[0]
    ndcg = {"steady1": 0.46, "steady3": 0.45, "steady5": 0.44}
    runs = {
        name: [
            Evaluation.recorded(arm=name, weight=settings.consistency, step=step, ndcg=best - 0.001 * (step == 469))
            for step, best in ((0, 0.1), (50, 0.9), (400, ndcg.get(name, 0.5)), (469, ndcg.get(name, 0.5)))
        ]
        for name, settings in found.items()
    }
    choices = module.weights(found, runs)
    assert [(c.kept.arm, c.kept.weight, c.kept.step) for c in choices] == [("oc_sft", 3, 400)]
    text = module.report([run[-1] for run in runs.values()], tmp_path, None, choices)
    assert "By largest_weight: oc_sft, λ 3 at step 400 (λ 1, 3 within 0.015 of the best nDCG 0.4600" in text
    assert text.splitlines()[-1] == (tmp_path / "arms.md").read_text(encoding="utf-8").splitlines()[-1]
    steps = {name: settings.model_copy(update={"min_step": 450}) for name, settings in found.items()}
    assert module.weights(steps, runs)[0].kept is None, "evaluated once from there on"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"arms": None}, "has no mapping 'arms'"),
        ({"arms": {}}, "has no mapping 'arms'"),
        ({"output": None}, "names no 'output'"),
        ({"arms": {"../x": {}}}, "an arm's name is of letters"),
        ({"arms": {"a": 5}}, "its options are 'key: value' lines, got 5"),
        ({"arms": {"shuffled": {"max-steps": 3}}}, "'max_steps' is the same for all arms"),
        ({"arms": {"start": {}}}, "the name 'start' is taken"),
        ({"baseline": "steadier"}, "baseline 'steadier' is none of the arms"),
        ({"heldout_pools": None, "heldout_qrels": None}, "give heldout-pools"),
    ],
)
def test_arms_that_cannot_be_compared_are_refused(
    bench: Bench, here: Callable[..., Done], more: dict[str, Any], says: str
) -> None:
    done = here("--config", arms(bench, **more))
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert not (bench.place / "arms").exists()


def collection(folder: Path) -> Path:
    """Small files of the collections' shapes, written for this test."""
    rows = {
        "condaqa/dev_contrast_pairs.jsonl": [
            {
                "passage_id": p,
                "question": f"Is hall {p} open on Sundays?",
                "doc_yes": f"Hall {p} stands by the river and was built long ago. It opens every day in month {p}.",
                "doc_no": f"Hall {p} stands by the river and was built long ago. It is shut on Sundays in month {p}.",
            }
            for p in range(10)
        ],
        "fever_symmetric/dev.jsonl": [
            {
                "id": f"dev-{b}",
                "q1": f"Singer{b} Lee sang .",
                "q2": f"Singer{b} Lee never sang .",
                "doc1": f"Singer{b} -LRB- born 1950 -RRB- sang .",
                "doc2": f"Singer{b} was no singer .",
            }
            for b in range(10)
        ],
    }
    for name, records in rows.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return folder


def test_small_pools_keep_groups_apart_and_are_the_same_every_time(tmp_path: Path) -> None:
    data = collection(tmp_path / "data")
    for name in ("one", "two"):
        done = script("small_data.py", "passages", "--data", data, "--output", tmp_path / name)
        assert done.returncode == 0, done.stderr
    folder = tmp_path / "one"
    train, held = read_pools(folder / "train"), read_pools(folder / "heldout")
    assert len(train) + len(held) == 30
    assert not {t for pool in train for t in pool.texts} & {t for pool in held for t in pool.texts}
    for name, pools in (("train", train), ("heldout", held)):
        qrels = read_qrels(folder / f"{name}-qrels.txt")
        assert {pool.query_id for pool in pools} == qrels.keys()
        assert all(set(qrels[pool.query_id]) == set(pool.doc_ids) and len(pool) == 8 for pool in pools)
        assert all(sorted(qrels[pool.query_id].values())[-2:] == [3, 3] for pool in pools)
    pool = next(pool for pool in (*train, *held) if "Singer3" in pool.query and "never" in pool.query)
    assert "Singer3 (born 1950) sang." in pool.texts
    for name in ("train/pools.jsonl", "heldout/pools.jsonl", "train-qrels.txt", "heldout-qrels.txt"):
        assert (folder / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
