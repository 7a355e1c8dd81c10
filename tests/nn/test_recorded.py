"""``torch.fx`` traces factorized models as it traces dense ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import factorized as fz
from factorized.formats.scheme import Scheme
from factorized.nn.layer import FactorizedLayer

SCHEMES = [
    fz.LowRank(),
    fz.Overcomplete("deep"),
    fz.TensorTrain(),
    fz.Tucker(),
    fz.Monarch(),
    fz.Kronecker(),
    fz.Residual(fz.LowRank()),
]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(4, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 24, 3, padding=1), nn.Flatten(), nn.Linear(384, 9)
    return nn.Sequential(*layers)


def with_ways(scheme: Scheme) -> Iterator[nn.Sequential]:
    """Yield a model for every way in which one of its layers can run."""
    budget: dict[str, Any] = {} if isinstance(scheme, fz.Overcomplete) else {"rank": 3}
    ways = fz.factorize(network(), scheme, min_size=0, keep_first_and_last=False, **budget)[2].executions
    for way in ("auto", *ways):
        model = fz.factorize(network(), scheme, min_size=0, keep_first_and_last=False, **budget)
        model[2].execution = way
        yield model


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_a_trace_computes_the_same_in_every_format_and_way_to_run(scheme: Scheme) -> None:
    x = torch.randn(2, 4, 4, 4)
    for model in with_ways(scheme):
        traced = torch.fx.symbolic_trace(model)
        assert torch.equal(traced(x), model(x))
        traced(x).sum().backward()
        assert all(factor.grad is not None for factor in model[2].factors if factor.requires_grad)
        torch.testing.assert_close(fz.compose(traced)(x), traced(x), rtol=1e-4, atol=1e-5)


class Reader(nn.Module):
    """Reads the weight of its table as that of its output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.mix = nn.Embedding(40, 16), nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.mix(self.table(ids)), self.table.weight)


class OnlyReads(Reader):
    """Calls the table nowhere."""

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.mix(F.embedding(ids, self.table.weight)), self.table.weight)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(16, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(x)[0]
        return out


class Others(nn.Module):
    """Layers that are called with more than an input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag, self.up = nn.EmbeddingBag(40, 16), nn.ConvTranspose1d(16, 16, 3, stride=2)

    def forward(self, ids: Tensor) -> Tensor:
        bags = self.bag(ids, torch.arange(0, 6, 2))
        out: Tensor = self.up(bags.T.unsqueeze(0), output_size=[8])
        return out


IDS, TOKENS = torch.arange(6), torch.randn(2, 5, 16)
CASES: list[tuple[Callable[[], nn.Module], Tensor, dict[str, Any]]] = [
    (Reader, IDS, {}),
    (OnlyReads, IDS, {}),
    (Attends, TOKENS, {"attention": "heads", "ratio": 0.6}),
    (Gates, TOKENS, {}),
    (Others, IDS, {}),
]


@pytest.mark.parametrize(("make", "x", "options"), CASES, ids=lambda case: getattr(case, "__name__", None))
def test_weights_that_are_read_and_modules_that_hold_them_are_traced(
    make: Callable[[], nn.Module], x: Tensor, options: dict[str, Any]
) -> None:
    budget = {} if "ratio" in options else {"rank": 3}
    model = fz.factorize(make(), min_size=0, keep_first_and_last=False, **budget, **options)
    traced = torch.fx.symbolic_trace(model)
    assert torch.equal(traced(x), model(x))
    with torch.no_grad():  # a trace holds the factors, no weight that they had
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert torch.equal(traced(x), model(x))


def test_what_a_trace_cannot_record_says_what_to_do() -> None:
    layer = fz.FactorizedLinear(8, 8, 2)
    with pytest.raises(ValueError, match=r"FactorizedLinear is called, .* trace nn.Sequential\(layer\)"):
        torch.fx.symbolic_trace(layer)
    layer.register_forward_hook(lambda module, given, output: 2 * output)
    with pytest.raises(ValueError, match=r"0: its forward hooks run now, .* remove them before tracing"):
        torch.fx.symbolic_trace(nn.Sequential(layer))


def test_a_tracer_may_take_layers_for_its_leaves_with_their_hooks() -> None:
    class Leaves(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, FactorizedLayer)

    layer, x = fz.FactorizedLinear(8, 8, 2), torch.randn(3, 8)
    layer.register_forward_hook(lambda module, given, output: 2 * output)
    model = nn.Sequential(layer)
    assert torch.equal(torch.fx.GraphModule(model, Leaves().trace(model))(x), model(x))
