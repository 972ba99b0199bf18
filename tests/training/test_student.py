"""The model in training reads what serving reads, with gradients, in float32 at slots only."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from pd_rerank.engines.hf import HFEngine
from pd_rerank.errors import BadArgument
from pd_rerank.training.examples import Example, View
from pd_rerank.training.student import Average, Lora, Student, load_student, with_lora
from tests.engines.tiny import FAMILIES, GRADES, Words, prompt, save_adapter, tiny
from tests.training.runs import write_model

torch = pytest.importorskip("torch")

LORA = Lora(rank=4, alpha=8, dropout=0.0, targets="all-linear")


def trained_looking(family: str = "Llama", *, lora: Lora = LORA, **changes: Any) -> Any:
    """A tiny model with an adapter whose weights are all random."""
    model = with_lora(tiny(family, **changes), lora, seed=0)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for name, weight in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(weight, std=0.2)
    return model


def example(*orders: list[int], tokens: int = 60) -> Example:
    """An example whose views are random prompts with the given orders of its documents."""
    m = len(set().union(*orders) - {-1})
    views = [
        View(prompts=(prompt(tokens, len(order), seed=i),), shows=np.array(order)) for i, order in enumerate(orders)
    ]
    return Example(
        query_id="q",
        window=0,
        positions=np.arange(m),
        targets=np.zeros(m, dtype=np.float32),
        probabilities=None,
        weights=None,
        views=tuple(views),
    )


@pytest.mark.parametrize("family", list(FAMILIES))
def test_training_reads_what_serving_reads_in_every_family(family: str) -> None:
    model = trained_looking(family)
    student = Student(model, GRADES)
    shown = prompt(60, 5, seed=3)
    mine = student.logits(shown)
    assert mine.shape == (5, 4)
    assert mine.requires_grad
    (served,) = HFEngine(model, tokenizer=Words()).grade_logits([shown], GRADES)
    assert np.allclose(mine.detach().numpy(), served, atol=1e-5)
    mine.sum().backward()
    assert all(weight.grad is not None for weight in student.weights.values())


def test_no_logit_of_the_vocabulary_is_computed_and_the_head_is_whole_afterwards() -> None:
    model = trained_looking(tie_word_embeddings=True)
    student, head = Student(model, GRADES), model.get_base_model().get_output_embeddings()
    shapes = []
    model.get_base_model().register_forward_hook(lambda _, __, out: shapes.append(tuple(out.logits.shape)))
    student.logits(prompt(60, 5, seed=3))
    assert shapes == [(1, 5, 4)]
    assert head(torch.zeros(1, 32)).shape == (1, 160)


def test_a_bfloat16_base_has_a_float32_adapter_and_float32_logits() -> None:
    model = with_lora(tiny().to(torch.bfloat16), LORA, seed=0)
    student = Student(model, GRADES)
    assert {weight.dtype for weight in student.weights.values()} == {torch.float32}
    logits = student.logits(prompt(60, 8, seed=3))
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float()), "read in bfloat16, logits fall on its steps"
    logits.square().sum().backward()
    assert max(float(weight.grad.abs().max()) for weight in student.weights.values()) > 0


def test_half_precision_keeps_activations_in_half_and_lets_others_run_the_model() -> None:
    model, shown = trained_looking(), prompt(60, 5, seed=3)
    exact = Student(trained_looking(), GRADES).logits(shown)
    model.get_base_model().to(torch.bfloat16)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.float()
    engine, student = HFEngine(model, tokenizer=Words()), Student(model, GRADES)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        logits = student.logits(shown)
    assert torch.allclose(logits, exact, atol=0.3)
    wide = [t for t in kept if t.dtype == torch.float32 and t.ndim == 3 and t.shape[1] == 60 and t.shape[2] == 64]
    assert wide == [], "an adapter kept its inputs in float32"
    with student.as_served():
        (served,) = engine.grade_logits([shown], GRADES)
    assert np.allclose(served, logits.detach().numpy(), atol=0.3)
    assert torch.equal(student.logits(shown), logits)


def test_a_head_in_training_is_read_with_its_adapter() -> None:
    model = trained_looking(lora=Lora(rank=2, alpha=8, dropout=0.0, targets="q_proj,lm_head"))
    student = Student(model, GRADES)
    shown = prompt(60, 5, seed=3)
    (served,) = HFEngine(model, tokenizer=Words()).grade_logits([shown], GRADES)
    assert np.allclose(student.logits(shown).detach().numpy(), served, atol=1e-5)


def test_only_the_adapter_is_in_training_and_a_fresh_one_changes_nothing() -> None:
    bare, shown = tiny(), prompt(60, 5, seed=3)
    (before,) = HFEngine(bare, tokenizer=Words()).grade_logits([shown], GRADES)
    state = torch.random.get_rng_state()
    student = Student(with_lora(bare, LORA, seed=0), GRADES)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all("lora_" in name for name in student.weights)
    assert np.allclose(student.logits(shown).detach().numpy(), before, atol=1e-6)
    again = Student(with_lora(tiny(), LORA, seed=0), GRADES).weights
    assert all(torch.equal(weight, again[name]) for name, weight in student.weights.items())


def test_views_come_back_in_the_order_of_the_documents() -> None:
    student = Student(trained_looking(), GRADES)
    made = example([0, 1, 2], [2, 0, 1])
    logits = student.example(made)
    assert logits.shape == (2, 3, 4)
    plain = student.logits(made.views[1].prompts[0])
    assert torch.equal(logits[1], plain[[1, 2, 0]])
    assert student.example(made, views=1).shape == (1, 3, 4)


def test_a_view_of_two_prompts_puts_their_slots_together() -> None:
    student = Student(trained_looking(), GRADES)
    two = View(prompts=(prompt(50, 2, seed=0), prompt(60, 2, seed=1)), shows=np.array([3, 0, -1, 1]))
    logits = student.view(two, 4)
    first, second = (student.logits(p) for p in two.prompts)
    assert torch.equal(logits, torch.stack([first[1], second[1], torch.zeros(4), first[0]]))


def test_the_base_is_read_without_adapter_and_without_gradient() -> None:
    model, made = trained_looking(), example([1, 0, 2])
    student = Student(model, GRADES)
    base = student.base(made)
    (served,) = HFEngine(tiny(), tokenizer=Words()).grade_logits([made.views[0].prompts[0]], GRADES)
    assert np.allclose(base.numpy(), served[[1, 0, 2]], atol=1e-5)
    assert not base.requires_grad
    assert student.logits(made.views[0].prompts[0]).requires_grad


def test_checkpointing_gives_the_same_gradients_with_dropout_too() -> None:
    found = []
    for checkpointing in (False, True):
        model = trained_looking(lora=Lora(rank=4, alpha=8, dropout=0.3, targets="all-linear"))
        student = Student(model, GRADES, checkpointing=checkpointing)
        torch.manual_seed(5)
        student.example(example([0, 1, 2], [2, 0, 1])).square().sum().backward()
        found.append({name: weight.grad.clone() for name, weight in student.weights.items()})
    assert all(torch.allclose(grad, found[1][name], atol=1e-5, rtol=1e-4) for name, grad in found[0].items())


def test_two_views_draw_their_own_dropout() -> None:
    model = trained_looking(lora=Lora(rank=4, alpha=8, dropout=0.3, targets="all-linear"))
    student, made = Student(model, GRADES), example([0, 1], [0, 1])
    shown = made.views[0].prompts[0]
    assert not torch.equal(student.logits(shown), student.logits(shown))
    torch.manual_seed(1)
    one = student.logits(shown)
    torch.manual_seed(1)
    assert torch.equal(one, student.logits(shown))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.05, 0.5])
def test_dropout_drops_its_share_and_keeps_the_mean(p: float, dtype: Any) -> None:
    model = trained_looking(lora=Lora(rank=4, alpha=8, dropout=p, targets="q_proj"))
    dropout = next(m for m in model.modules() if getattr(m, "lora_dropout", None)).lora_dropout["default"]
    x = torch.ones(3, 331, 101, dtype=dtype, requires_grad=True)
    torch.manual_seed(0)
    found = dropout(x)
    found.sum().backward()
    assert found.dtype == dtype
    assert x.grad is not None
    assert torch.equal(x.grad, found)  # of ones: what is dropped has no gradient, the rest its scale
    assert float((found == 0).float().mean()) == pytest.approx(p, abs=5 * (p * (1 - p) / x.numel()) ** 0.5)
    assert found.detach().unique().tolist() == pytest.approx([0, 1 / (1 - p)], rel=4e-3)
    for axis in range(3):  # no row or column is favoured
        shares = (found == 0).float().mean(dim=[d for d in range(3) if d != axis])
        assert float((shares - p).abs().max()) < 6 * (p * (1 - p) * shares.numel() / x.numel()) ** 0.5
    assert not torch.equal(dropout(x), found)
    assert torch.equal(dropout.eval()(x), x)
    assert dropout.train()(x[:, :0]).shape == (3, 0, 101)


def test_averaged_weights_follow_with_their_decay_and_leave_the_student_as_it_is() -> None:
    weights = {"w": torch.nn.Parameter(torch.tensor([1.0, 2.0]))}
    average = Average(weights, decay=0.9)
    weights["w"].data = torch.tensor([2.0, 2.0])
    average.update(weights)
    assert average.means["w"].tolist() == pytest.approx([1.1, 2.0])
    with average.in_place_of(weights):
        assert weights["w"].tolist() == pytest.approx([1.1, 2.0])
    assert weights["w"].tolist() == [2.0, 2.0]


def test_the_averaged_model_reads_the_second_view() -> None:
    student = Student(trained_looking(), GRADES)
    average, made = Average(student.weights), example([0, 1, 2], [2, 0, 1])
    read = student.averaged(made, average)
    assert read is not None
    assert torch.equal(read, student.view(made.views[1], 3).detach())
    assert not read.requires_grad
    for weight in student.weights.values():
        weight.data = weight.data + 1.0
    assert torch.equal(student.averaged(made, average), read), "the student moved, its average did not"
    assert student.averaged(example([0]), average) is None


def test_labels_reach_the_loss_and_full_views_need_no_mask() -> None:
    student = Student(trained_looking(), GRADES)
    assert student.batch(example([0, 1], [1, 0])).shown is None
    masked = student.batch(example([0, 1], [1, -1]))
    assert masked.shown is not None
    assert masked.shown.tolist() == [[True, True], [False, True]]


@pytest.mark.parametrize(
    ("targets", "modules"),
    [("q_proj, v_proj", ["q_proj", "v_proj"]), ("all-linear", "all-linear"), (r".*\.q_proj", r".*\.q_proj")],
)
def test_targets_are_names_all_or_an_expression(targets: str, modules: Any) -> None:
    assert Lora(targets=targets).modules == modules


def test_what_cannot_be_trained_is_refused(tmp_path: Any) -> None:
    with pytest.raises(BadArgument, match="with lora-targets 'k_prj'"):
        with_lora(tiny(), Lora(targets="k_prj"), seed=0)
    base = write_model(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", tiny(vocab_size=10))
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": str(base)}))
    with pytest.raises(BadArgument, match="is an adapter; name a base model"):
        load_student(str(adapter), lora=LORA, seed=0)
