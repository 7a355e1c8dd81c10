"""Every kind of layer on its whole path: plan, factors, decay, files, and back to the plain module."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.nn.layer import FactorizedLayer
from factorized.testing import error


class Upsampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3)
        self.up = nn.ConvTranspose2d(16, 24, 4, stride=2, padding=1)
        self.up3 = nn.ConvTranspose3d(24, 16, 3, stride=2, output_padding=1, groups=2)
        self.up1 = nn.ConvTranspose1d(16, 16, 5, dilation=2)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.first(x)).relu()
        x = self.up3(x.unsqueeze(2)).mean(4).flatten(2).relu()
        return self.last(self.up1(x).mean(-1))


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.EmbeddingBag(40, 16, mode="sum")
        self.bag = nn.EmbeddingBag(40, 16, mode="max", padding_idx=3)
        self.mean = nn.EmbeddingBag(40, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) + self.bag(x) + self.mean(x))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.net = kind(12, 16, batch_first=True, **settings)
        self.cell = nn.GRUCell(12, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.net(x)[0][..., :16].mean(1) + self.cell(x[:, 0]))


class Experts(nn.Module):
    """Named and shaped like those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(0.3 * torch.randn(4, 32, 12))
        self.down_proj = nn.Parameter(0.3 * torch.randn(4, 12, 16))

    def forward(self, x: Tensor) -> Tensor:
        parts = []
        for expert in range(4):
            gate, up = nn.functional.linear(x, self.gate_up_proj[expert]).chunk(2, dim=-1)
            parts.append(nn.functional.linear(gate.relu() * up, self.down_proj[expert]))
        return torch.stack(parts).mean(0)


def mixture() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 12), Experts(), nn.Linear(12, 4))


def images() -> Tensor:
    return torch.randn(2, 3, 6, 6, dtype=torch.float64)


def words() -> Tensor:
    return torch.randint(40, (5, 7))


def sequences() -> Tensor:
    return torch.randn(3, 5, 12, dtype=torch.float64)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], list[str]]] = {
    "transposed": (Upsampler, images, ["up", "up3", "up1"]),
    "bags": (Bags, words, ["bag", "mean"]),
    "lstm": (
        lambda: Recurrent(nn.LSTM, bidirectional=True, num_layers=2),
        sequences,
        ["net.weight_ih_l0", "net.weight_hh_l0", "cell.weight_ih"],
    ),
    "projected": (lambda: Recurrent(nn.LSTM, proj_size=8, bidirectional=True), sequences, ["net.weight_hh_l0"]),
    "gru": (lambda: Recurrent(nn.GRU, bias=False), sequences, ["net.weight_ih_l0", "net.weight_hh_l0"]),
    "rnn": (lambda: Recurrent(nn.RNN, nonlinearity="relu"), sequences, ["net.weight_ih_l0", "net.weight_hh_l0"]),
    "experts": (mixture, lambda: sequences()[:, 0], ["1.gate_up_proj", "1.down_proj"]),
}
every_model = pytest.mark.parametrize("kind", MODELS)


def dense_model(kind: str) -> tuple[nn.Module, Tensor, list[str]]:
    torch.manual_seed(0)
    make, example, names = MODELS[kind]
    return make().double(), example(), names


@every_model
def test_a_plan_counts_the_parameters_that_the_factorized_model_has(kind: str) -> None:
    model, x, names = dense_model(kind)
    plan = fz.plan(model, ratio=0.8, example_input=x)
    assert set(names) <= {entry.name for entry in plan.selected}
    assert fz.Plan.from_dict(plan.to_dict()) == plan
    fz.factorize(model, plan)
    assert sum(parameter.numel() for parameter in model.parameters()) == plan.params_after
    assert all(entry.macs_after for entry in plan.selected)
    assert plan.params * 0.77 < plan.params_after <= plan.params * 0.8


@every_model
def test_at_full_rank_the_model_computes_what_it_did_and_is_composed_into_the_plain_module(kind: str) -> None:
    model, x, _ = dense_model(kind)
    expected, state = model(x), deepcopy(model.state_dict())
    fz.factorize(model, fz.Overcomplete(), init="spectral")
    assert len(fz.forms(model)) >= 2
    assert error(model(x), expected) < 1e-12
    plain = fz.compose(model)
    assert not any(type(module).__module__.startswith("factorized") for module in plain.modules())
    assert list(plain.state_dict()) == list(state)
    assert all(error(plain.state_dict()[key], value) < 1e-12 for key, value in state.items())
    assert error(plain(x), expected) < 1e-12
    assert error(fz.lower(model)(x), expected) < 1e-12


@every_model
@pytest.mark.parametrize("scheme", [fz.LowRank(), fz.TensorTrain(), fz.Tucker(), fz.Kronecker()], ids=repr)
def test_below_full_rank_composed_and_lowered_models_compute_the_same(kind: str, scheme: Any) -> None:
    model, x, _ = dense_model(kind)
    fz.factorize(model, scheme, rank_scale=0.5)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lowered, ")  # what grows back is said, see below
        lowered = fz.lower(model)
    for plain in (fz.compose(model), lowered):
        assert error(plain(x), model(x)) < 1e-12


@every_model
def test_a_dense_checkpoint_is_taken_over_and_files_come_back(kind: str, tmp_path: Path) -> None:
    model, x, _ = dense_model(kind)
    expected = deepcopy(model)
    other, _, _ = dense_model(kind)
    fz.factorize(expected, rank=2)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(3)
    fz.factorize(other, rank=2)
    fz.load_dense(other, model.state_dict())
    assert error(other(x), expected(x)) < 1e-12
    fz.save(other, tmp_path / "saved")
    back = fz.load(tmp_path / "saved", dense_model(kind)[0])
    assert error(back(x), other(x)) == 0
    assert {name: tuple(p.shape) for name, p in back.named_parameters()} == {
        name: tuple(p.shape) for name, p in other.named_parameters()
    }


@every_model
def test_the_decay_is_that_of_the_composed_weights(kind: str) -> None:
    model, x, _ = dense_model(kind)
    fz.factorize(model, rank=2)
    optimizer = torch.optim.SGD(fz.parameter_groups(model, weight_decay=0.0), lr=1.0)
    strength = 1e-2
    loss = model(x).square().mean()
    loss.backward()
    factors = {factor.parameter for form in fz.forms(model) for factor in form.factors}
    task = {factor: factor.grad.clone() for factor in factors}
    weights = fz.compose(model).state_dict()
    penalty = 0.5 * sum(form.norm_squared(form.values).sum() for form in fz.forms(model))
    expected = dict(zip(factors, torch.autograd.grad(penalty, list(factors)), strict=True))
    norms = sum(
        weights[layer.weight_key(name)].square().sum()
        for name, layer in model.named_modules()
        if isinstance(layer, FactorizedLayer)
    )
    assert error(2 * penalty, torch.as_tensor(norms)) < 1e-12
    before = {factor: factor.detach().clone() for factor in factors}
    fz.FrobeniusDecay(model, strength).attach(optimizer)
    optimizer.step()
    for factor in factors:
        assert error(before[factor] - factor, task[factor] + strength * expected[factor]) < 1e-10


@pytest.mark.parametrize(
    ("kind", "grown"),
    [
        ("gru", r"net\.factors\.weight_ih_l0 168 → 576 \(the module that holds it needs the whole weight\)"),
        ("bags", r"bag 112 → 640 \(a pair of layers would take no offsets\)"),
    ],
)
def test_a_lowered_model_says_which_layers_grow_back_and_why(kind: str, grown: str) -> None:
    model, x, _ = dense_model(kind)
    plain = [type(module) for module in model.modules()]
    fz.factorize(model, rank=2)
    with pytest.warns(UserWarning, match=grown):
        lowered = fz.lower(model)
    assert [type(module) for module in lowered.modules()] == plain
    assert error(lowered(x), model(x)) < 1e-12
