"""LAMB and FLAMBé on a GPU: the steps of the CPU, without waiting for the device."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import factorized as fz
from factorized.experiments.text.network import build_text_network, build_text_optimizer
from tests.experiments.text.small import small
from tests.on_gpu import needs_cuda

pytestmark = needs_cuda
Make = Callable[..., torch.optim.Optimizer]


def lamb(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return fz.Lamb(fz.parameter_groups(model, 0.1), lr=0.01, **settings)


def flambe(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return fz.Flambe(fz.parameter_groups(model, 0.1), model, lr=0.01, frobenius_decay=0.2, **settings)


def built() -> nn.Module:
    """Return a model with tensors of odd sizes, of two types, and one with other strides than its gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(fz.FactorizedLinear(65, 47, 7), nn.Linear(47, 11).double(), nn.Conv2d(3, 5, 3))
    model[2].to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's overloads forget it
    return model


def give_gradients(models: list[nn.Module], seed: int) -> None:
    torch.manual_seed(seed)
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        drawn = torch.randn(parameters[0].shape)
        for parameter in parameters:
            parameter.grad = drawn.to(parameter)


@pytest.fixture
def refuses_to_wait() -> Iterator[Callable[[], None]]:
    """Return a function after whose call everything that waits for the device raises."""

    def refuse() -> None:
        with warnings.catch_warnings(action="ignore"):  # torch says that this mode does not find everything
            torch.cuda.set_sync_debug_mode("error")

    yield refuse
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("make", [lamb, flambe])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("clip", [None, 0.5, 1e6])
def test_steps_are_those_of_the_cpu(make: Make, capturable: bool, clip: float | None) -> None:
    model = built()
    there = copy.deepcopy(model).cuda()
    optimizers = [make(model, max_grad_norm=clip), make(there, max_grad_norm=clip, capturable=capturable)]
    for step in range(5):
        give_gradients([model, there], step)
        for optimizer in optimizers:
            optimizer.step()
    for (name, expected), actual in zip(model.named_parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(
            actual.cpu(), expected, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("make", [lamb, flambe])
def test_a_capturable_step_waits_for_nothing(make: Make, refuses_to_wait: Callable[[], None]) -> None:
    model = built().cuda()
    optimizer = make(model, capturable=True)
    give_gradients([model], 0)
    optimizer.step()  # makes the state
    refuses_to_wait()
    optimizer.step()


def test_a_schedule_does_not_count_skipped_steps_and_is_not_waited_for(refuses_to_wait: Callable[[], None]) -> None:
    model = built()
    there = copy.deepcopy(model).cuda()
    settings: dict[str, Any] = {"lr": 0.01, "frobenius_decay": lambda step: 0.5 * (step % 3)}
    here = fz.Flambe(fz.parameter_groups(model, 0.1), model, **settings)
    optimizer = fz.Flambe(fz.parameter_groups(there, 0.1), there, capturable=True, **settings)
    for step in range(7):
        give_gradients([model, there], step)
        if step in (0, 3):
            there[0].U.grad.fill_(torch.nan)
        else:
            here.step()
        if step > 0:  # the first one makes the state
            refuses_to_wait()
        optimizer.step()
        torch.cuda.set_sync_debug_mode("default")
    assert optimizer.steps == here.steps == 5
    assert optimizer.skipped == 2
    for mine, its in zip(model.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(its.cpu(), mine, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("capturable", [False, True])
def test_a_state_that_was_saved_on_a_cpu_continues(capturable: bool) -> None:
    model = built()
    there = copy.deepcopy(model).cuda()
    here, optimizer = flambe(model), flambe(there, capturable=capturable)
    give_gradients([model, there], 0)
    here.step()
    optimizer.load_state_dict(copy.deepcopy(here.state_dict()))
    with torch.no_grad():
        for mine, its in zip(model.parameters(), there.parameters(), strict=True):
            its.copy_(mine)
    here.step()
    optimizer.step()
    for mine, its in zip(model.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(its.cpu(), mine, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "lamb", "flambe"])
def test_the_optimizer_of_a_text_recipe_is_fused_and_waits_for_nothing(
    tmp_path: Path, name: str, refuses_to_wait: Callable[[], None]
) -> None:
    changes = (f"optimizer.name={name}", "decay.kind=frobenius", "decay.strength=0.1")
    recipe, corpus = small("masked", tmp_path, *changes)
    model = build_text_network(recipe, corpus.tokenizer, 0).cuda()
    optimizer = build_text_optimizer(recipe, model)
    give_gradients([model], 0)
    optimizer.step()
    refuses_to_wait()
    optimizer.step()
    assert all(group["fused" if name == "adamw" else "capturable"] for group in optimizer.param_groups)
