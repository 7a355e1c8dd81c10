"""Functions that have captured layers: after surgery they call what has taken the layers' place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from tests.models.unchanged import unchanged

Make = Callable[["Net"], Any]


class Net(nn.Module):
    """Two layers that are called by a function, which has captured them in one way or another."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.layers: Any = None
        self.run = make(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def in_variables(net: Net) -> Any:
    first, second = net.first, net.second
    return lambda x: second(first(x))


def in_self(net: Net) -> Any:
    return lambda x: net.second(net.first(x))


def in_defaults(net: Net) -> Any:
    def run(x: Tensor, first: nn.Module = net.first, *, second: nn.Module = net.second) -> Tensor:
        return second(first(x))

    return run


def in_a_list(net: Net) -> Any:
    layers = [net.first, {"second": net.second}]
    return lambda x: layers[1]["second"](layers[0](x))  # type: ignore[index, operator]


class Layers(NamedTuple):
    first: nn.Module
    second: nn.Module


def in_a_named_tuple(net: Net) -> Any:
    net.layers = Layers(net.first, net.second)
    return lambda x: net.layers.second(net.layers.first(x))


@dataclass(frozen=True, slots=True)
class Parts:
    layers: list[nn.Module]
    last: nn.Module


def in_a_dataclass(net: Net) -> Any:
    net.layers = Parts([net.first], net.second)
    return lambda x: net.layers.last(net.layers.layers[0](x))


def in_a_dataclass_that_is_captured(net: Net) -> Any:
    parts = Parts([net.first], net.second)
    return lambda x: parts.last(parts.layers[0](x))


def in_a_namespace(net: Net) -> Any:
    net.layers = SimpleNamespace(first=net.first, second=net.second)
    return lambda x: net.layers.second(net.layers.first(x))


def in_a_queue(net: Net) -> Any:
    net.layers = deque([net.first, net.second])
    return lambda x: net.layers[1](net.layers[0](x))


def in_another_function(net: Net) -> Any:
    first, second = net.first, net.second

    def inner(x: Tensor) -> Tensor:
        return first(x)

    @wraps(inner)
    def run(x: Tensor) -> Tensor:
        return second(inner(x))

    return run


def in_one_that_calls_itself(net: Net) -> Any:
    layers = (net.first, net.second)

    def run(x: Tensor, place: int = 0) -> Tensor:
        return x if place == 2 else run(layers[place](x), place + 1)

    return run


def in_a_method(net: Net) -> Any:
    second = net.second
    return MethodType(lambda self, x: second(self.first(x)), net)


def in_a_partial(net: Net) -> Any:
    first = net.first
    return partial(lambda x, then: then(first(x)), then=net.second.forward)


def in_compiled_code(net: Net) -> Any:
    first, second = net.first, net.second
    return torch.compile(lambda x: second(first(x)), backend="eager")


WAYS = [
    in_variables,
    in_self,
    in_defaults,
    in_a_list,
    in_a_named_tuple,
    in_a_dataclass,
    in_a_dataclass_that_is_captured,
    in_a_namespace,
    in_a_queue,
    in_another_function,
    in_one_that_calls_itself,
    in_a_method,
    in_a_partial,
    in_compiled_code,
]
every_way = pytest.mark.parametrize("make", WAYS)


def factorized(make: Make) -> Any:
    return fz.factorize(Net(make), rank=4, keep_first_and_last=False, min_size=0)


@every_way
def test_functions_call_the_new_layers_after_every_surgery(make: Make, tmp_path: Path) -> None:
    model, x = factorized(make), torch.randn(3, 16)
    fz.save(model, tmp_path)
    loaded: Any = fz.load(tmp_path, Net(make))
    shorter: Any = fz.truncate(fz.load(tmp_path, Net(make)), rank=2)
    for made in (model, loaded, shorter, fz.compose(model), fz.lower(model)):
        torch.testing.assert_close(made(x), made.second(made.first(x)))
        made(x).sum().backward()
        assert all(parameter.grad is not None for parameter in made.parameters())
        with torch.no_grad():
            made.first.apply(lambda module: [parameter.zero_() for parameter in module.parameters()])
        torch.testing.assert_close(made(x), made.second(torch.zeros(3, 16)))


@every_way
def test_composing_leaves_the_functions_of_the_model_as_they_are(make: Make) -> None:
    model, x = factorized(make), torch.randn(3, 16)
    run, expected = model.run, model(x)
    for to_plain in (fz.compose, fz.lower):
        to_plain(model)
        assert model.run is run
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


def test_a_copy_of_the_model_goes_on_calling_what_its_functions_have_captured() -> None:
    for make in (in_variables, in_a_list, in_another_function):
        model, x = Net(make), torch.randn(3, 16)
        copy, expected = deepcopy(model), model(x)
        fz.factorize(model, rank=4, keep_first_and_last=False, min_size=0)
        torch.testing.assert_close(copy(x), expected, rtol=0, atol=0)
        assert (model(x) - expected).abs().max() > 1e-3


def test_variables_that_functions_share_stay_shared_and_others_stay_as_they_are() -> None:
    def counted(net: Net) -> Any:
        layer, calls, rest = net.first, 0, [torch.zeros(2)]

        def run(x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return layer(x) + rest[0].sum()

        def swap(new: nn.Module) -> None:
            nonlocal layer
            layer = new

        run.rest, run.calls = rest, lambda: calls  # type: ignore[attr-defined]
        net.swap = swap
        return run

    model = Net(counted)
    calls, annotations = model.run.calls, model.run.__annotations__
    fz.factorize(model, rank=4, keep_first_and_last=False, min_size=0)
    model(torch.randn(3, 16))
    assert calls() == model.run.calls() == 1
    assert model.run.__closure__[2].cell_contents[0] is model.run.rest[0]
    assert (model.run.__name__, model.run.__annotations__) == ("run", annotations)
    model.swap(nn.Identity())
    torch.testing.assert_close(model(torch.ones(3, 16)), torch.ones(3, 16))


def test_functions_that_have_captured_no_layer_that_is_replaced_are_kept() -> None:
    def runs(net: Net) -> Any:
        net.unset = lambda: _later
        for _later in ():  # so it is never assigned
            pass
        return in_self(net)

    model = Net(runs)
    run, unset = model.run, model.unset
    fz.factorize(model, rank=4, keep_first_and_last=False, min_size=0)
    assert model.run is run
    assert model.unset is unset


@every_way
def test_if_one_layer_fails_no_function_is_changed(make: Make) -> None:
    model = Net(make)
    run = model.run
    with torch.no_grad():
        model.second.weight[0, 0] = torch.nan
    with unchanged(model), pytest.raises(ValueError, match=r"second: .*NaN"):
        fz.factorize(model, rank=4, keep_first_and_last=False, min_size=0)
    assert model.run is run
    assert not run(torch.ones(3, 16)).isfinite().all()
