"""The shipped training configs, and the settings they are written in."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
import yaml

from pd_rerank.config import RECIPES, TrainSettings, load
from pd_rerank.errors import BadArgument
from pd_rerank.training.selection import Evaluation
from tests.training.runs import CONFIGS

FILES = sorted(path for path in CONFIGS.glob("*.yaml") if not path.stem.startswith(("rubric-", "arms-", "start-")))

PLACES = {"pools": "p", "labels": "l", "output": "o"}


def settings(**given: Any) -> TrainSettings:
    return load(TrainSettings, given={**PLACES, **given})


def test_there_is_a_config_for_each_task_on_accelerators_and_on_a_cpu() -> None:
    tasks = {"passages", "qa", "responses"}
    assert {path.stem for path in FILES} == tasks | {f"cpu-small-{task}" for task in tasks}


def test_what_the_small_configs_start_from_and_every_arm_loads() -> None:
    start = load(TrainSettings, file=CONFIGS / "start-small-passages.yaml")
    assert (start.recipe, start.cpu) == ("single_order", True)
    shared = yaml.safe_load((CONFIGS / "arms-small-passages.yaml").read_text(encoding="utf-8"))
    arms, baseline = shared.pop("arms"), shared.pop("baseline")
    shared = {name.replace("-", "_"): value for name, value in shared.items()}
    found = {name: load(TrainSettings, given={**shared, **own}) for name, own in arms.items()}
    assert baseline in found
    assert [s.consistency for name, s in found.items() if name.startswith("oc_sft")] == [0, 1, 3, 5]
    assert {s.max_steps for s in found.values()} == {24}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_config_loads(path: Path) -> None:
    found = load(TrainSettings, file=path)
    assert found.recipe == "oc_sft"
    assert found.cpu == path.stem.startswith("cpu-small")


@pytest.mark.parametrize(
    ("task", "strength", "width", "chars", "queries", "windows", "steps"),
    [
        ("passages", 5.0, 20, 1200, 29_500, 5, 2305),
        ("qa", 3.0, 10, 1600, 30_000, 1, 469),
        ("responses", 1.0, 4, 2000, 30_000, 1, 469),
    ],
)
def test_the_papers_tasks_have_the_papers_numbers_on_one_gpu_and_on_eight(
    task: str, strength: float, width: int, chars: int, queries: int, windows: int, steps: int, script: ModuleType
) -> None:
    found = load(TrainSettings, file=CONFIGS / f"{task}.yaml")
    assert (found.consistency, found.window_size, found.max_doc_chars) == (strength, width, chars)
    assert (found.lora_rank, found.lora_alpha, found.lora_dropout) == (16, 32.0, 0.05)
    assert (found.beta1, found.beta2, found.weight_decay, found.warmup, found.max_grad_norm) == (
        0.9,
        0.95,
        0.01,
        0.1,
        1,
    )
    assert -(-queries * windows // found.windows_per_step) == steps
    asked = load(TrainSettings, file=CONFIGS / f"{task}.yaml", given={"select": "largest_weight"})
    seen = [step for step in range(1, steps + 1) if script.due(step, script.evaluation_every(asked), steps)]
    rising = [Evaluation.recorded(step=step, ndcg=0.4 + step / 10**4, weight=strength) for step in seen]
    step, choice = script.chosen(asked, rising, steps)
    assert (step, choice.kept) == (steps, rising[-1]), "it finds evaluations late enough, and does not abstain"
    for ranks, accumulation in ((1, 64), (8, 8)):
        taken = [
            [place for places in script.share(64, found.batch_size, ranks=ranks, rank=rank) for place in places]
            for rank in range(ranks)
        ]
        assert {len(places) for places in taken} == {accumulation}
        assert sorted(place for places in taken for place in places) == list(range(64))


def test_the_page_on_training_names_every_recipe_rule_and_config() -> None:
    page = (CONFIGS.parents[1] / "docs" / "training.md").read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    named = {*re.findall(r"`([^`\n]+)`", prose)}
    assert {*RECIPES, *get_args(TrainSettings.model_fields["select"].annotation)} <= named
    assert {f"{task}.yaml" for task in ("passages", "qa", "responses", "cpu-small-passages")} <= named
    options = {f"--{name}" for name in (*TrainSettings.model_fields, "stop_after", "overwrite")}
    other = {"--only", "--num_processes", "--nproc_per_node", "--use_fsdp", "--adapter", "--help"}
    assert {flag.replace("-", "_") for flag in re.findall(r"(?<=`)--([a-z_-]+)", prose)} <= {
        name.removeprefix("--") for name in options | other
    }


def test_run_seeds_give_the_papers_view_seeds() -> None:
    assert [settings(seed=seed).view_seeds for seed in (42, 43, 44)] == [(0, 1), (2, 3), (4, 5)]
    assert settings(recipe="permutation_augmentation", seed=44).view_seeds == (0, 1)
    assert len(settings(views_per_window=4).view_seeds) == 4
    assert settings(recipe="single_order").view_seeds == (0,)


def test_a_recipe_sets_what_is_not_given() -> None:
    assert settings(recipe="mean_teacher").consistency == 0.5
    assert settings(recipe="mean_teacher", consistency=1.0).consistency == 1.0
    assert settings(recipe="order_averaged").targets == "averaged"
    assert settings(recipe="oc_sft", targets="averaged").targets == "averaged"
    assert settings(recipe="lora_dropout").lora_dropout == 0.2
    names = TrainSettings.model_fields
    assert all(key in names for recipe in RECIPES.values() for key in recipe)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"pools": None}, "--pools is missing"),
        ({"recipe": "oc_sfft"}, "--recipe: input should be 'single_order'"),
        ({"heldout_pools": "h"}, "go together"),
        ({"recipe": "debias_first"}, "--debias needs --qrels"),
        ({"views": "none"}, "--loss order_consistency compares views of a window; --views none gives one"),
        ({"views_per_window": 1}, "compares views of a window"),
        ({"loss": "supervised"}, "reads one view of a window; --views within_window makes several"),
        ({"recipe": "mean_teacher", "views_per_window": 3}, "between two views"),
        ({"views": "dropout", "lora_dropout": 0.0}, "differ by --lora-dropout"),
        ({"squared": 0.0}, "nothing is fitted"),
        ({"windows_per_step": 6, "batch_size": 4}, "no multiple of --batch-size"),
        ({"select": "equal_stability"}, "needs --max-psi"),
        ({"min_step": 100}, "--min-step means nothing without --select largest_weight"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_sentence(given: dict[str, Any], says: str) -> None:
    with pytest.raises(BadArgument, match=says):
        settings(**given)
