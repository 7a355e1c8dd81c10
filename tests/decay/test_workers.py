"""The ways of computing many Frobenius gradients with torch's own operations: one by one, or padded in batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.decay.arena import Arena
from factorized.decay.engine import make_workers
from factorized.decay.forms import Form
from factorized.decay.plain import Alike, Pair, Plain, add_products, is_pair
from factorized.decay.strength import Number
from factorized.testing import error
from tests.decay.models_for_decay import by_weights

SQUARE = [fz.FactorizedLinear(12, 12, 3), fz.FactorizedLinear(12, 12, 3)]
GROUPED = [fz.FactorizedConv2d(8, 12, 1, 2, groups=2), fz.FactorizedLinear(4, 6, 2)]
RANKS = [fz.FactorizedLinear(12, 14, 3), fz.FactorizedLinear(12, 14, 4), fz.FactorizedLinear(14, 12, 9)]
SHAPES = [fz.FactorizedEmbedding(700, 5, 2), *(fz.FactorizedLinear(6, 9, 3) for _ in range(9)), *GROUPED, *RANKS]

Make = Callable[[Sequence[Form]], Alike | Arena]


@pytest.mark.parametrize(
    ("make", "modules"),
    [
        pytest.param(Alike, [fz.FactorizedLinear(9, 7, 4, depth=2)], id="single-deep"),
        pytest.param(Alike, [fz.FactorizedLinear(9, 7, 12)], id="single-overcomplete"),
        pytest.param(Alike, GROUPED[:1], id="single-groups"),
        pytest.param(Arena, SQUARE, id="arena-square"),
        pytest.param(Arena, RANKS, id="arena-ranks"),
        pytest.param(Arena, SHAPES, id="arena-shapes"),
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.bfloat16, 1e-5)])
def test_its_gradients_are_autograds(
    make: Make, modules: list[nn.Module], dtype: torch.dtype, tolerance: float
) -> None:
    model = nn.Sequential(*deepcopy(modules)).to(dtype)
    computed = make(fz.forms(model))
    for seed in range(2):  # the tensors of a batch are used again
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        exact = deepcopy(model).double()
        twin = dict(zip(model.parameters(), exact.parameters(), strict=True))
        expected = torch.autograd.grad(by_weights(exact, 1.0), [twin[factor.parameter] for factor in computed.factors])
        for actual, reference in zip(computed.gradients(), expected, strict=True):
            assert error(actual.reshape(reference.shape), reference) < tolerance


def test_on_the_cpu_every_product_is_computed_by_itself() -> None:
    *pairs, rest = make_workers(fz.forms(nn.Sequential(*SQUARE, *GROUPED)))
    assert [type(worker) for worker in pairs] == [Pair] * 3
    assert isinstance(rest, Plain)
    assert [type(part) for part in rest.parts] == [Alike]


def drawn_pair() -> tuple[list[Tensor], Pair, list[Tensor]]:
    """Return the factors of a product, the worker that computes it alone, and its gradients."""
    torch.manual_seed(0)
    (form,) = fz.forms(fz.FactorizedLinear(9, 7, 2).double())
    U, V = factors = [factor.parameter.detach() for factor in form.factors]
    return factors, Pair([form]), [U @ (V.mT @ V), V @ (U.mT @ U)]


NUMBERS: list[list[Number]] = [[0.5, 0.25], [torch.tensor(0.5), 0.25], [torch.tensor(0.5), torch.tensor(0.25)]]


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("left_out", [None, 0, 1])
@pytest.mark.parametrize("by", ["pair", "products"])
def test_a_lone_product_adds_its_gradients(left_out: int | None, numbers: list[Number], by: str) -> None:
    factors, worker, gradients = drawn_pair()
    before = [torch.randn_like(factor) for factor in factors]
    targets = [None if index == left_out else old.clone() for index, old in enumerate(before)]
    with torch.no_grad():
        worker.add_to(targets, numbers) if by == "pair" else add_products(factors, targets, numbers)
    for target, old, number, gradient in zip(targets, before, numbers, gradients, strict=True):
        if target is not None:
            torch.testing.assert_close(target, old + float(number) * gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("by", ["pair", "products"])
def test_the_targets_of_a_lone_product_may_be_its_factors(numbers: list[Number], by: str) -> None:
    factors, worker, gradients = drawn_pair()
    numbers = [-number for number in numbers]
    wanted = [factor + float(n) * gradient for factor, n, gradient in zip(factors, numbers, gradients, strict=True)]
    with torch.no_grad():
        worker.add_to(factors, numbers) if by == "pair" else add_products(factors, factors, numbers)
    for factor, want in zip(factors, wanted, strict=True):
        torch.testing.assert_close(factor, want, rtol=1e-12, atol=1e-12)


def test_gradients_of_another_type_than_their_factors_are_added_to() -> None:
    factors, worker, gradients = drawn_pair()
    targets = [torch.ones_like(factor, dtype=torch.float32) for factor in factors]
    with torch.no_grad():
        worker.add_to(targets, [0.5, 0.25])
    for target, number, gradient in zip(targets, (0.5, 0.25), gradients, strict=True):
        torch.testing.assert_close(target, (1 + number * gradient).float())


def test_a_coefficient_of_zero_leaves_targets_alone_even_where_the_product_is_infinite() -> None:
    factors, worker, _ = drawn_pair()
    targets = [torch.ones_like(factor) for factor in factors]
    factors[0][0, 0] = torch.inf
    with torch.no_grad():
        worker.add_to(targets, [0.0, 0.0])
        add_products(factors, targets, [0.0, 0.0])
    assert all((target == 1).all() for target in targets)


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(fz.FactorizedLinear(8, 8, 8), id="overcomplete"),
        pytest.param(fz.FactorizedLinear(9, 7, 2, depth=1), id="deep"),
        pytest.param(fz.FactorizedLinear(9, 7, 2).bfloat16(), id="half"),
        pytest.param(fz.FactorizedConv2d(8, 12, 3, 2, groups=2), id="groups"),
    ],
)
def test_a_product_that_is_no_plain_pair_goes_the_long_way(module: nn.Module) -> None:
    (form,) = fz.forms(module)
    assert not is_pair(form)
    (worker,) = make_workers([form])
    assert isinstance(worker, Plain)


def test_products_with_a_factor_in_common_are_computed_by_one_worker() -> None:
    model = nn.Sequential(*(fz.FactorizedLinear(12, 12, 3, bias=False) for _ in range(3)))
    model[1].V = model[0].U
    kinds = [type(worker) for worker in make_workers(fz.forms(model))]
    assert kinds == [Pair, Plain]


def sharing_layers() -> nn.Module:
    model = nn.Sequential(*(fz.FactorizedLinear(12, 12, 3, bias=False) for _ in range(3)))
    model[2].U = model[1].V = model[0].U
    return model


def sharing_attention() -> nn.Module:
    model = nn.ModuleList(nn.MultiheadAttention(12, 3, kdim=5, vdim=6, bias=False) for _ in range(3))
    model[2].v_proj_weight = model[1].v_proj_weight = model[0].v_proj_weight
    return model


@pytest.mark.parametrize("make", [sharing_layers, sharing_attention])
def test_no_tensor_is_added_to_twice_at_once(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make().double()  # on a GPU, where many tensors are added to at once, shared ones would race
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    penalty = fz.FrobeniusDecay(model, 0.3).penalty()
    expected = torch.autograd.grad(penalty, list(model.parameters()), materialize_grads=True)
    add, calls = torch._foreach_add_, []

    def spy(into: list[Tensor], parts: list[Tensor], alpha: float) -> None:
        calls.append([tensor.data_ptr() for tensor in into])
        add(into, parts, alpha=alpha)

    monkeypatch.setattr(torch, "_foreach_add_", spy)
    fz.FrobeniusDecay(model, 0.3, decoupled=True).apply_(lr=0.5)
    assert sum(map(len, calls)) == 6
    assert all(len(set(places)) == len(places) for places in calls)
    for parameter, old, reference in zip(model.parameters(), before, expected, strict=True):
        assert error(parameter.detach(), old - 0.5 * reference) < 1e-10


def test_a_layer_that_changes_its_type_later_is_decayed_in_that_type() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(fz.FactorizedLinear(12, 12, 3) for _ in range(3)))
    decay = fz.FrobeniusDecay(model, 0.3)
    model[2].double()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    decay.apply_()
    expected = torch.autograd.grad(by_weights(model[2], 0.3), [model[2].U, model[2].V])
    for parameter, reference in zip((model[2].U, model[2].V), expected, strict=True):
        assert error(parameter.grad, reference) < 1e-14


def test_a_model_that_becomes_half_precision_later_is_decayed_in_single_precision() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(fz.FactorizedLinear(12, 12, 3) for _ in range(2)))
    decay = fz.FrobeniusDecay(model, 0.3)
    model.bfloat16()
    exact = deepcopy(model).double()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    decay.apply_()
    expected = torch.autograd.grad(by_weights(exact, 0.3), [factor for layer in exact for factor in layer.factors])
    for factor, reference in zip([factor for layer in model for factor in layer.factors], expected, strict=True):
        assert error(factor.grad, reference.bfloat16()) < 1e-4  # rounded once
