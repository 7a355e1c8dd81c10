"""The decay at large ranks on a GPU: the gradients of the products, to the precision of bfloat16."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.decay.engine import make_workers
from factorized.decay.plain import Alike, Pair
from factorized.decay.rounded import Rounded
from factorized.nn.timing import capture
from tests.on_gpu import decayed_gradients, exact, kinds, needs_cuda

pytestmark = needs_cuda
SHAPES = [(5632, 512, 2048), (4100, 129, 4099), (2048, 500, 3000), (8000, 65, 9000), (3000, 1000, 4096)]
ERROR = 4e-3  # of bfloat16: factors, their Gram matrices


def products(shapes: list[tuple[int, int, int]] = SHAPES) -> nn.ModuleList:
    torch.manual_seed(0)
    with torch.device("cuda"):
        layers = [fz.FactorizedLinear(columns, rows, rank, bias=False) for rows, rank, columns in shapes]
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.05)
    return nn.ModuleList(layers)


def error(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def workers(model: nn.Module) -> list[type]:
    return kinds(make_workers(fz.forms(model)))


def test_gradients_are_those_of_the_products() -> None:
    model = products()
    assert workers(model) == [Rounded] * len(SHAPES)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    fz.FrobeniusDecay(model, 0.5).apply_()
    errors = [error(p.grad.double(), 0.5 * want) for p, want in zip(model.parameters(), exact(model), strict=True)]
    assert max(errors) < ERROR, errors


def test_they_are_added_to_what_is_there_and_not_to_frozen_factors() -> None:
    model = products(SHAPES[:2])
    model[0].U.requires_grad_(False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    fz.FrobeniusDecay(model, {"0": 0.5, "1": 2.0}).apply_()
    numbers = [0.0, 0.5, 2.0, 2.0]
    for parameter, number, want in zip(model.parameters(), numbers, exact(model), strict=True):
        assert (parameter.grad.double() - 1 - number * want).norm() <= ERROR * number * want.norm()
    assert torch.equal(model[0].U.grad, torch.ones_like(model[0].U))


@pytest.mark.parametrize("as_tensor", [False, True])
def test_factors_can_be_shrunk_themselves(as_tensor: bool) -> None:
    model = products()
    wanted = [p.double() - 0.25 * want for p, want in zip(model.parameters(), exact(model), strict=True)]
    steps = [want - p.double() for p, want in zip(model.parameters(), wanted, strict=True)]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rate = torch.tensor(0.5, device="cuda") if as_tensor else 0.5
    fz.FrobeniusDecay(model, 0.5, decoupled=True).apply_(rate)
    for parameter, old, step in zip(model.parameters(), before, steps, strict=True):
        assert error(parameter.double() - old.double(), step) < 2 * ERROR


def test_they_do_not_vary_from_run_to_run() -> None:
    model = products()
    decay, found = fz.FrobeniusDecay(model, 1.0), []
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        decay.apply_()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_parameters_that_were_given_other_memory_are_found() -> None:
    model = products()
    decay = fz.FrobeniusDecay(model, 1.0)
    for parameter in model.parameters():
        parameter.data = 2 * parameter.data
    for layer in model[::2]:
        layer.U.data = layer.U.data.t().contiguous().t()  # the same matrix, column by column
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    decay.apply_()
    for parameter, want in zip(model.parameters(), exact(model), strict=True):
        assert error(parameter.grad.double(), want) < ERROR


def test_a_factor_with_nan_has_gradients_with_nan() -> None:
    model = products(SHAPES[:1])
    with torch.no_grad():
        model[0].U[3, 5] = torch.nan
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    fz.FrobeniusDecay(model, 1.0).apply_()
    assert model[0].U.grad[3].isnan().all()
    assert model[0].V.grad[:, 5].isnan().all()


def test_factors_of_two_products_and_other_types_are_computed_by_torch() -> None:
    assert workers(products().double()) == [Pair] * len(SHAPES)
    model = products([SHAPES[0]] * 2)
    model[1].U = model[0].U
    assert workers(model) == [Alike] * 2


def test_the_decay_compiles_whole() -> None:
    model = products(SHAPES[:2])
    compiled, eager = (decayed_gradients(model, compiled=compiled) for compiled in (True, False))
    assert max(error(got, want) for got, want in zip(compiled, eager, strict=True)) < ERROR


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_captured_step_ends_where_eager_steps_do(decoupled: bool) -> None:
    start = products(SHAPES[:2])
    ends = []
    for captured in (False, True):
        model = deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        fz.FrobeniusDecay(model, 0.1, decoupled=decoupled).attach(optimizer)

        def step(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            sum(parameter.square().sum() for parameter in model.parameters()).backward()
            optimizer.step()

        repeat = capture(step) if captured else step
        for _ in range(1 if captured else 4):  # capturing has run it three times
            repeat()
        ends.append([parameter.detach() for parameter in model.parameters()])
    for eager, replayed in zip(*ends, strict=True):
        torch.testing.assert_close(replayed, eager, rtol=1e-4, atol=1e-5)
