from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import factorized as fz
from factorized.experiments.recipes.recipe import Recipe
from factorized.experiments.training.network import build_dense, build_network, plan_network, set_learning_rate
from factorized.experiments.training.processes import Processes
from factorized.experiments.training.train import train
from factorized.experiments.training.trainer import Trainer
from factorized.files.checksum import save_tensors
from tests.experiments.training import smooth
from tests.experiments.training.sgd_reference import train_by_hand
from tests.experiments.training.small import STEPS, digits, recipe, state_of

PLAIN = ("data.crop_padding=0", "data.flip=false", f"model.name='{smooth.NAME}'")
LOW_RANK = "digits/resnet8-lowrank-0.1-si-fd"
WIDE = "digits/resnet8-wide-fd"
CPU = Processes(torch.device("cpu"))


def trained_network(changed: Recipe, steps: int = 3) -> tuple[nn.Module, nn.Module]:
    """Return the network before and after some steps of the loop."""
    trainer = Trainer(changed, digits(), CPU, seed=0)
    set_learning_rate(trainer.optimizer, changed.schedule.learning_rate(changed.optimizer.lr, 0))
    trainer.source.start(0, 0)
    for _ in range(steps):
        trainer.step()
    return build_network(changed, digits(), seed=0), trainer.network


def largest_error(actual: nn.Module, expected: nn.Module) -> float:
    pairs = zip(actual.parameters(), expected.parameters(), strict=True)
    return max(((a.double() - b).norm() / b.norm().clamp(min=1e-3)).item() for a, b in pairs)


@pytest.mark.parametrize("name", [LOW_RANK, WIDE])
@pytest.mark.parametrize(
    "changes",
    [
        ("decay.kind=weight",),
        ("decay.kind=crs",),
        ("decay.kind=none",),
        ("decay.kind=none", "decay.rest=0.1"),
        ("decay.kind=frobenius",),
        ("decay.kind=frobenius", "decay.rest=0"),
        ("decay.kind=frobenius", "optimizer.clip=0.5"),
        ("decay.kind=weight", "optimizer.clip=0.5", "optimizer.nesterov=true"),
        ("decay.kind=weight", "optimizer.momentum=0", "run.label_smoothing=0.2"),
    ],
    ids=" ".join,
)
def test_every_decay_does_to_the_weights_what_it_says(name: str, changes: tuple[str, ...]) -> None:
    changed = recipe(*PLAIN, "decay.strength=0.1", "schedule.warmup_epochs=1", *changes, name=name)
    before, after = trained_network(changed)
    expected = train_by_hand(before, changed, digits(), seed=0, steps=3)
    assert largest_error(after, expected) < 2e-5
    other = recipe(*PLAIN, "decay.strength=0.11", "decay.kind=weight", "schedule.warmup_epochs=1", name=name)
    assert largest_error(after, train_by_hand(before, other, digits(), seed=0, steps=3)) > 2e-4  # and is told apart


def test_a_dense_network_is_decayed_too() -> None:
    changed = recipe(*PLAIN, "decay.strength=0.1", name="digits/resnet8")
    before, after = trained_network(changed)
    assert largest_error(after, train_by_hand(before, changed, digits(), seed=0, steps=3)) < 2e-5


def test_frobenius_decay_acts_in_the_backward_pass_only_where_nothing_rescales_gradients() -> None:
    def strengths(*changes: str) -> set[float]:
        changed = recipe(*changes, "factorize.execution=composed", name=WIDE)
        forms = fz.forms(Trainer(changed, digits(), CPU, seed=0).network)
        return {form.layer.decay_in_backward for form in forms if form.layer is not None}

    assert strengths() == {recipe(name=WIDE).decay.strength}
    assert strengths("optimizer.clip=1") == {0.0}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds trained with Frobenius decay, their norms recorded."""
    folder = tmp_path_factory.mktemp("recorded")
    train(recipe("decay.record_norms=true"), digits(), folder, seeds=(0, 1), device="cpu")
    return folder


def following(folder: Path, *changes: str) -> Recipe:
    """A recipe without a decay of its own that follows the norms of the run in ``folder``."""
    followed = folder / "seed-{seed}"
    return recipe("decay.kind=normalized", f"decay.norms='{followed}'", *changes)


def norms_of(network: nn.Module) -> Tensor:
    return torch.stack([form.layer.weight.norm() for form in fz.forms(network) if form.layer is not None])


@torch.no_grad()
def test_recorded_norms_are_those_of_the_products_after_every_step(recorded: Path) -> None:
    trainer = Trainer(recipe(), digits(), CPU, seed=1)
    table = load_file(recorded / "seed-1" / "norms.safetensors")["norms"]
    assert table.shape == (2 * STEPS, len(fz.forms(trainer.network)))
    trainer.network.load_state_dict(state_of(recorded, seed=1).network)
    torch.testing.assert_close(table[-1], norms_of(trainer.network), rtol=1e-5, atol=0)
    assert not torch.allclose(table[0], table[-1], rtol=1e-3)


def test_a_normalized_run_has_the_recorded_norms_after_every_step(recorded: Path) -> None:
    table = load_file(recorded / "seed-0" / "norms.safetensors")["norms"]
    trainer = Trainer(following(recorded), digits(), CPU, seed=0)
    trainer.source.start(0, 0)
    for step in range(STEPS):
        trainer.step()
        with torch.no_grad():
            torch.testing.assert_close(norms_of(trainer.network), table[step], rtol=1e-5, atol=0)


def test_every_seed_of_a_normalized_run_follows_its_own_norms(recorded: Path, tmp_path: Path) -> None:
    changed = following(recorded)
    train(changed, digits(), tmp_path, seeds=(0, 1), device="cpu")
    network = build_network(changed, digits(), seed=0)
    for seed in (0, 1):
        table = load_file(recorded / f"seed-{seed}" / "norms.safetensors")["norms"]
        network.load_state_dict(state_of(tmp_path, seed).network)
        with torch.no_grad():
            torch.testing.assert_close(norms_of(network), table[-1], rtol=1e-5, atol=0)


def test_norms_to_follow_must_be_there_and_fit(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no .*seed-5/norms\.safetensors; train that run with"):
        train(following(recorded), digits(), tmp_path, seeds=(5,), device="cpu")
    with pytest.raises(ValueError, match=r"there is no \{sed\}/0/norms\.safetensors; train that run with"):
        train(recipe("decay.kind=normalized", "decay.norms={sed}/{seed}"), digits(), tmp_path, device="cpu")
    with pytest.raises(ValueError, match=r"holds \(steps, products\) = \(8, 6\), and this run needs \(12, 6\)"):
        train(following(recorded, "schedule.epochs=3"), digits(), tmp_path, device="cpu")
    (tmp_path / "seed-0").mkdir()
    (tmp_path / "seed-0" / "norms.safetensors").write_bytes(b"no norms")
    with pytest.raises(ValueError, match="cannot be read"):
        train(following(tmp_path), digits(), tmp_path / "out", device="cpu")
    save_tensors(tmp_path / "seed-0" / "norms.safetensors", {"other": torch.zeros(1)})
    with pytest.raises(ValueError, match="cannot be read"):
        train(following(tmp_path), digits(), tmp_path / "out", device="cpu")


@pytest.mark.parametrize("init", ["spectral", "default", "kaiming", "normal"])
def test_factors_are_filled_as_the_recipe_says(init: str) -> None:
    changed = recipe(f"factorize.init={init}")
    actual = build_network(changed, digits(), seed=4)
    dense = build_dense(changed, digits(), seed=4)
    weights = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    plan = plan_network(changed, dense, digits())
    assert plan is not None
    expected = fz.factorize(dense, plan, init=init)
    for (name, left), right in zip(actual.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(left, right), name
    errors = [
        (form.layer.weight - weights[f"{form.name}.weight"]).norm() / weights[f"{form.name}.weight"].norm()
        for form in fz.forms(actual)
        if form.layer is not None
    ]
    assert len(errors) == 6
    assert all(error < 1 for error in errors) == (init == "spectral")
