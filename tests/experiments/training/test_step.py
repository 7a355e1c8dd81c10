from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx import GraphModule

from factorized._torch import set_up_compiler
from factorized.experiments.data.augment import cut_out, draw_crops, draw_holes, normalize
from factorized.experiments.recipes.find import check_recipe
from factorized.experiments.recipes.recipe import Recipe
from factorized.experiments.training import step as step_module
from factorized.experiments.training.processes import Processes
from factorized.experiments.training.source import epoch_order
from factorized.experiments.training.step import TrainingStep, autocast_type
from factorized.experiments.training.train import train
from factorized.experiments.training.trainer import Trainer
from factorized.nn.linear import FactorizedLinear
from tests.experiments.training import smooth
from tests.experiments.training.small import STEPS, digits, recipe

CPU = Processes(torch.device("cpu"))
# torch's compiler makes an instance of an autograd function, and warns about it
COMPILED = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def inputs_of_a_step(changed: Recipe) -> tuple[Tensor, Tensor]:
    """Return what the network is given in the first step, and those images in a black border of two pixels."""
    trainer = Trainer(changed, digits(), CPU, seed=0)
    given: list[Tensor] = []
    trainer.network.register_forward_pre_hook(lambda module, arguments: given.append(arguments[0]))
    torch.manual_seed(0)
    trainer.source.start(0, 0)
    trainer.step()
    rows = epoch_order(len(digits().y_train), 0, 0)[: changed.run.batch]
    return given[0], normalize(F.pad(digits().x_train[rows], (2, 2, 2, 2)), digits().mean, digits().std)


def test_crops_and_flips_act_only_where_the_recipe_says() -> None:
    actual, padded = inputs_of_a_step(recipe("data.crop_padding=0", "data.flip=false"))
    plain = padded[:, :, 2:-2, 2:-2]
    assert torch.equal(actual, plain)
    actual, _ = inputs_of_a_step(recipe("data.crop_padding=0", "data.flip=true"))
    straight = (actual == plain).flatten(1).all(1)
    assert ((actual == plain.flip(3)).flatten(1).all(1) | straight).all()
    assert 40 < straight.sum() < 88  # of 128
    actual, _ = inputs_of_a_step(recipe("data.crop_padding=2", "data.flip=false"))
    shifts = torch.stack([padded[:, :, top : top + 8, left : left + 8] for top in range(5) for left in range(5)])
    matches = (shifts == actual).flatten(2).all(2)  # (25, batch)
    assert matches.any(0).all()
    assert matches.any(1).all()


def test_holes_are_cut_only_where_the_recipe_says_and_after_the_crops_are_drawn() -> None:
    changed = recipe("data.crop_padding=2", "data.flip=true", "data.cutout=4")
    whole, _ = inputs_of_a_step(recipe("data.crop_padding=2", "data.flip=true"))
    actual, _ = inputs_of_a_step(changed)
    torch.manual_seed(0)
    draw_crops(changed.run.batch, 2, "cpu")
    assert torch.equal(actual, cut_out(whole, *draw_holes(changed.run.batch, (8, 8), "cpu"), 4))
    assert (actual != whole).flatten(1).any(1).sum() >= 4  # digits have empty corners


def test_the_loss_of_an_epoch_is_the_mean_of_its_steps_and_the_accuracy_counts_every_image() -> None:
    trainer = Trainer(recipe("data.crop_padding=0", "run.label_smoothing=0.1"), digits(), CPU, seed=0)
    losses, correct = [], 0
    trainer.source.start(0, 0)
    order = epoch_order(len(digits().y_train), 0, 0)
    for number in range(STEPS):
        rows = order[number * 128 : (number + 1) * 128]
        with torch.no_grad():
            logits = deepcopy(trainer.network)(normalize(digits().x_train[rows], digits().mean, digits().std))
        losses.append(F.cross_entropy(logits, digits().y_train[rows], label_smoothing=0.1).item())
        correct += int((logits.argmax(1) == digits().y_train[rows]).sum())
        trainer.step()
    turns = trainer._finish_epoch(0, 0.1, 0, began=0.0)
    next(turns)
    with pytest.raises(StopIteration) as ended:
        next(turns)
    row = ended.value.value
    assert row["loss"] == pytest.approx(sum(losses) / STEPS, rel=1e-5)
    assert row["accuracy"] == pytest.approx(100 * correct / (STEPS * 128), abs=0.5)


def test_a_step_computes_in_the_recipe_s_type() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert autocast_type("auto", cpu) == autocast_type("float32", cuda) == torch.float32
    assert autocast_type("auto", cuda) == autocast_type("bfloat16", cpu) == torch.bfloat16


def test_bfloat16_autocast_keeps_the_weights_in_float32_and_rounds_the_rest() -> None:
    networks = {}
    for precision in ("float32", "bfloat16"):
        trainer = Trainer(recipe(f"run.precision={precision}"), digits(), CPU, seed=0)
        torch.manual_seed(0)
        trainer.source.start(0, 0)
        trainer.step()
        networks[precision] = trainer.network
    pairs = zip(*(network.parameters() for network in networks.values()), strict=True)
    errors = [((a - b).norm() / a.norm()).item() for a, b in pairs if a.dim() > 1]
    assert {parameter.dtype for parameter in networks["bfloat16"].parameters()} == {torch.float32}
    assert 1e-5 < max(errors) < 0.05


@COMPILED
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_a_compiled_step_ends_where_plain_eager_does(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    changes = (f"model.name='{smooth.NAME}'",)
    states = []
    for compiled in ("no", "yes"):
        trainer = Trainer(recipe(*changes, f"run.compile={compiled}"), digits(), CPU, seed=0)
        assert (trainer.step._loss == trainer.step._loss_and_correct) == (compiled == "no")
        torch.manual_seed(0)
        trainer.source.start(0, 0)
        for _ in range(3):
            trainer.step()
        states.append((trainer.network.state_dict(), trainer.step.loss_sum, trainer.step.correct))
    for name, expected in states[0][0].items():
        torch.testing.assert_close(states[1][0][name], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states[1][1], states[0][1], rtol=1e-5, atol=0)


@COMPILED
@pytest.mark.parametrize("name", ["resnet8", "resnet8-lowrank-0.1-si-fd", "resnet8-wide-fd"])  # the last in backward
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_torch_s_cache_takes_the_program_of_a_step(
    name: str, precision: str, cacheable_programs: list[GraphModule]
) -> None:
    changes = ("run.compile=yes", f"run.precision={precision}")
    trainer = Trainer(recipe(*changes, name=f"digits/{name}"), digits(), CPU, seed=0)
    trainer.source.start(0, 0)
    trainer.step()
    (program,) = cacheable_programs
    assert "add_" not in [node.target for node in program.graph.nodes]  # batches are counted outside
    assert torch.is_autocast_enabled("cpu") is False


@pytest.mark.usefixtures("torch_s_settings")
def test_a_compiled_backward_pass_does_not_autocast_what_the_forward_pass_did_not() -> None:
    def in_float32(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return (x @ x).sum()

    gradients = []
    set_up_compiler()
    for function in (in_float32, torch.compile(in_float32, backend="aot_eager")):
        x = torch.arange(9.0).reshape(3, 3).div(7).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = function(x)
        gradients += torch.autograd.grad(loss, x)
    assert torch.equal(*gradients)


@pytest.mark.nightly
@COMPILED
@pytest.mark.usefixtures("torch_s_settings")
def test_a_decay_in_the_backward_pass_has_its_own_program_for_every_strength(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    set_up_compiler()
    found = []
    for strength in (0.1, 0.2, 0.1):
        torch.compiler.reset()
        counters.clear()
        torch.manual_seed(0)
        layer = FactorizedLinear(8, 8, 8)
        layer.decay_in_backward = strength
        torch.compile(layer, fullgraph=True, dynamic=False)(torch.zeros(2, 8)).sum().backward()
        U, V = layer.factors
        torch.testing.assert_close(U.grad, strength * U @ (V.mT @ V))
        found.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert found == [0, 0, 1]


def test_the_cpu_is_not_compiled_or_captured_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "capture", None)
    step = Trainer(recipe(), digits(), CPU, seed=0).step
    assert step._loss == step._loss_and_correct
    assert step._run == step._step


@pytest.mark.parametrize(("batch", "message"), [(513, "513 is more than the 512 training images; make it smaller")])
def test_a_batch_that_the_data_cannot_fill_is_refused(batch: int, message: str) -> None:
    for place in ("device", "loader"):
        with pytest.raises(ValueError, match=message):
            Trainer(recipe(f"run.batch={batch}", f"data.place={place}"), digits(), CPU, seed=0)


SCHEDULES = [
    ({"epochs": 200}, {0: 1, 99: 1, 100: 0.1, 149: 0.1, 150: 0.01, 199: 0.01}),
    ({"epochs": 10, "milestones": [0.5, 0.75]}, {4: 1, 5: 0.1, 7: 0.1, 8: 0.01}),
    ({"epochs": 100, "milestones": [0.55]}, {54: 1, 55: 0.1}),  # 0.55 · 100 is a little more than 55
    ({"epochs": 200, "milestones": [60, 120, 160], "factor": 0.2}, {59: 1, 60: 0.2, 120: 0.04, 160: 0.008}),
    ({"epochs": 4, "milestones": [1]}, {0: 1, 1: 0.1}),
    ({"epochs": 200, "milestones": [], "factor": 0.5}, {199: 1}),
    ({"epochs": 200, "warmup_epochs": 1}, {0: 0.1, 1: 1, 100: 0.1}),
    ({"epochs": 200, "warmup_epochs": 2, "warmup_factor": 0.3}, {0: 0.3, 1: 0.3, 2: 1}),
    ({"epochs": 20, "shape": "linear"}, {0: 0, 1: 0.5, 2: 1, 2.9: 0.95, 11: 0.5, 20: 0}),
]


@pytest.mark.parametrize(("fields", "expected"), SCHEDULES)
def test_the_learning_rate_follows_the_schedule(fields: dict[str, object], expected: dict[float, float]) -> None:
    schedule = check_recipe({"model": {"name": "resnet8"}, "schedule": fields}, "test").schedule
    for epoch, share in expected.items():
        assert schedule.learning_rate(0.4, epoch) == pytest.approx(0.4 * share, rel=1e-12)


@pytest.mark.parametrize("change", ["schedule.milestones=[-0.5]", "schedule.milestones=[0]", "schedule.epochs=0"])
def test_a_schedule_that_makes_no_sense_is_refused(change: str) -> None:
    with pytest.raises(ValueError, match=change.partition("=")[0]):
        recipe(change)


@pytest.mark.parametrize("change", ["milestones=[0.5]", "factor=0.2", "warmup_epochs=1", "warmup_factor=0.5"])
def test_fields_of_milestones_are_refused_where_the_learning_rate_is_linear(change: str) -> None:
    with pytest.raises(ValueError, match=rf'{change.partition("=")[0]} = .* is for shape = "milestones"'):
        recipe("schedule.shape=linear", f"schedule.{change}")


def test_a_linear_learning_rate_changes_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, step = [], TrainingStep.__call__

    def watched(self: TrainingStep) -> None:
        taken.append(float(self.optimizer.param_groups[0]["lr"]))
        step(self)

    monkeypatch.setattr(TrainingStep, "__call__", watched)
    (result,) = train(recipe("schedule.shape=linear", "optimizer.lr=0.4"), digits(), tmp_path)
    share = (torch.arange(8) + 0.5) / 8
    expected = 0.4 * torch.minimum(share / 0.1, (1 - share) / 0.9)
    torch.testing.assert_close(torch.tensor(taken), expected)
    assert [row["lr"] for row in result["history"]] == pytest.approx([expected[3].item(), expected[7].item()])


@pytest.mark.parametrize("kind", ["weight", "crs"])
def test_a_rest_that_would_do_nothing_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="rest is the decay of everything but the products"):
        recipe(f"decay.kind={kind}", "decay.rest=0.1")
