"""The weight of a factorized layer in other people's code: read in every way, never written to, and set."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import factorized as fz
from factorized.formats.product import Product
from factorized.testing import error


@pytest.fixture
def layer() -> fz.FactorizedLinear:
    torch.manual_seed(0)
    return fz.FactorizedLinear(6, 5, 3, dtype=torch.float64)


@pytest.fixture
def compositions(monkeypatch: pytest.MonkeyPatch) -> list[Product]:
    """Return a list that gets one entry whenever a product is composed."""
    found: list[Product] = []
    compose = Product.compose

    def counted(format: Product, cores: Any) -> Tensor:
        found.append(format)
        return compose(format, cores)

    monkeypatch.setattr(Product, "compose", counted)
    return found


def plain(layer: fz.FactorizedLinear) -> Tensor:
    return layer.U.detach() @ layer.V.detach().T


def divide(layer: fz.FactorizedLinear) -> None:
    layer.weight /= 2


WRITES: dict[str, Callable[[Any], object]] = {
    "normal": lambda layer: nn.init.normal_(layer.weight),
    "orthogonal": lambda layer: nn.init.orthogonal_(layer.weight),
    "truncated": lambda layer: nn.init.trunc_normal_(layer.weight),
    "xavier of a view": lambda layer: nn.init.xavier_uniform_(layer.weight.data.view(5, -1)),
    "data": lambda layer: layer.weight.data.zero_(),
    "assigned data": lambda layer: setattr(layer.weight, "data", torch.ones(5, 6)),
    "row of data": lambda layer: layer.weight.data[1].zero_(),
    "detached": lambda layer: layer.weight.detach().mul_(2),
    "mul": lambda layer: layer.weight.mul_(2),
    "divide": divide,
    "copy": lambda layer: layer.weight.copy_(torch.ones(5, 6)),
    "item": lambda layer: layer.weight.__setitem__(0, 1.0),
    "transposed": lambda layer: layer.weight.T.zero_(),
    "same type": lambda layer: layer.weight.to(torch.float64).contiguous().zero_(),
    "several": lambda layer: torch._foreach_mul_([layer.weight], 2.0),
    "flag": lambda layer: F.relu(layer.weight, inplace=True),
    "renormalized": lambda layer: F.embedding(torch.tensor([1]), layer.weight, max_norm=1e-3),
    "gradient": lambda layer: setattr(layer.weight, "grad", torch.ones(5, 6)),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_the_weight_is_refused_with_the_remedy(
    layer: fz.FactorizedLinear, write: str, mode: Callable[[], Any]
) -> None:
    before = plain(layer)
    with mode(), pytest.raises(RuntimeError, match=r"would be lost\. Set layer\.weight = W"):
        WRITES[write](layer)
    assert torch.equal(plain(layer), before)


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda weight: weight.numpy(), id="numpy"),
        pytest.param(lambda weight: weight.T[1:].numpy(), id="view"),
        pytest.param(lambda weight: np.asarray(weight), id="asarray"),
        pytest.param(np.from_dlpack, id="dlpack"),
        pytest.param(lambda weight: weight.cpu().data.numpy(force=True), id="forced"),
    ],
)
def test_its_numpy_array_is_read_only_and_copies_are_not(
    layer: fz.FactorizedLinear, read: Callable[[Tensor], np.ndarray]
) -> None:
    array = read(layer.weight.detach())
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 0
    array.copy()[0] = 0
    np.asarray(layer.weight.detach(), dtype=np.float16)[0] = 0
    np.from_dlpack(layer.weight.detach(), copy=True)[0] = 0


def test_out_of_and_into_other_tensors_it_can_be_written(layer: fz.FactorizedLinear) -> None:
    other, taken = nn.Linear(6, 5, dtype=torch.float64), torch.empty(5, 6, dtype=torch.float64)
    with torch.no_grad():
        other.weight.copy_(layer.weight)
        torch.mul(layer.weight, 2, out=taken)
        taken.sub_(layer.weight)
    assert torch.equal(other.weight, plain(layer))
    assert torch.equal(taken, plain(layer))


@pytest.mark.parametrize(
    "freeze",
    [
        lambda layer: layer.weight.requires_grad_(False),
        lambda layer: setattr(layer.weight, "requires_grad", False),
        lambda layer: nn.Parameter(layer.weight),
    ],
)
def test_its_requires_grad_is_that_of_the_factors(layer: fz.FactorizedLinear, freeze: Callable[[Any], object]) -> None:
    with pytest.raises(RuntimeError, match=r"layer\.requires_grad_\(False\).*nn\.Parameter\(weight\.detach"):
        freeze(layer)
    with torch.no_grad():
        assert layer.weight.requires_grad  # as that of a parameter, in any mode
    layer.requires_grad_(False)
    assert not layer.weight.requires_grad
    assert (layer.weight * 2).grad_fn is None


@pytest.mark.filterwarnings("error")  # torch warns where the gradient of an ordinary result is asked for
def test_what_the_factors_tell_is_told_without_composing(
    layer: fz.FactorizedLinear, compositions: list[Product]
) -> None:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    assert (weight.shape, weight.dtype, weight.device) == ((5, 6), torch.float64, torch.device("cpu"))
    assert (weight.ndim, weight.dim(), weight.size(), weight.size(1), len(weight)) == (2, 2, (5, 6), 6, 5)
    assert (weight.numel(), torch.numel(weight), weight.element_size(), weight.nbytes) == (30, 30, 8, 240)
    assert (weight.layout, weight.is_cuda, weight.is_meta, weight.is_sparse) == (torch.strided, False, False, False)
    assert weight.requires_grad
    assert weight.is_floating_point()
    assert weight.grad is None
    assert weight.data.shape == weight.detach().shape == (5, 6)
    assert compositions == []
    weight.sum()
    weight.mean()
    assert len(compositions) == 1


def test_the_feed_forward_block_of_t5_composes_nothing(compositions: list[Product]) -> None:
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5DenseActDense

    block = T5DenseActDense(T5Config(d_model=16, d_ff=32))
    block.wo = fz.FactorizedLinear.from_dense(block.wo, 2)
    block.wo.execution = "chain"
    block(torch.randn(3, 16))
    assert compositions == []


def test_it_answers_what_a_plain_tensor_does(layer: fz.FactorizedLinear) -> None:
    weight, expected = layer.weight, plain(layer)
    stored = io.BytesIO()
    torch.save(weight, stored)
    stored.seek(0)
    read = (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight)), torch.load(stored), weight.clone(), weight + 0)
    assert all(type(tensor) is Tensor and torch.equal(tensor, expected) for tensor in read)
    assert read[0].requires_grad
    assert not copy.deepcopy(layer.requires_grad_(False).weight).requires_grad
    assert torch.equal(weight, expected)
    assert torch.equal(weight.T, expected.T)
    assert torch.equal(weight[(1, 2)], expected[1, 2])
    assert torch.equal(torch.cat([weight, weight]), expected.repeat(2, 1))
    assert (weight.detach().numpy() == expected.numpy()).all()
    assert weight.tolist() == expected.tolist()
    assert weight.stride() == (6, 1)
    assert weight.data_ptr() == weight.view(-1).data_ptr() != 0
    assert repr(weight.detach()) == repr(expected)
    assert [row.sum().item() for row in weight] == expected.sum(1).tolist()


class Multiplied(torch.autograd.Function):
    """A linear as libraries of fused kernels write it: it is given the weight by C++."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


@pytest.mark.parametrize(
    "run",
    [
        F.linear,
        lambda x, weight: x @ weight.T,
        Multiplied.apply,
        lambda x, weight: Multiplied.apply(x, weight.view(5, 6)),
        lambda x, weight: checkpoint(F.linear, x, weight, use_reentrant=False),
        torch.compile(F.linear, fullgraph=True, backend="aot_eager"),
        lambda x, weight: torch.func.vmap(F.linear, (0, None))(x, weight),
    ],
    ids=["linear", "matmul", "custom", "custom-view", "checkpoint", "compiled", "mapped"],
)
def test_gradients_reach_the_factors(layer: fz.FactorizedLinear, run: Callable[..., Tensor]) -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    expected = torch.autograd.grad(F.linear(x, layer.U @ layer.V.T).square().sum(), layer.factors)
    actual = torch.autograd.grad(run(x, layer.weight).square().sum(), layer.factors)
    assert [error(a, b) < 1e-12 for a, b in zip(actual, expected, strict=True)] == [True, True]
    layer.V.requires_grad_(False)
    run(x, layer.weight).square().sum().backward()
    assert error(layer.U.grad, expected[0]) < 1e-12
    assert layer.V.grad is None


def test_second_derivatives_pass_through_custom_functions(layer: fz.FactorizedLinear) -> None:
    x = torch.randn(4, 6, dtype=torch.float64)

    def second(weight: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(Multiplied.apply(x, weight).square().sum(), layer.U, create_graph=True)
        return torch.autograd.grad(first.square().sum(), layer.V)[0]

    assert error(second(layer.weight), second(layer.U @ layer.V.T)) < 1e-12


def test_a_gradient_that_is_retained_can_be_read(layer: fz.FactorizedLinear) -> None:
    weight = layer.weight
    weight.retain_grad()
    (weight * 2).sum().backward()
    assert weight.grad is not None
    assert (weight.grad == 2).all()
    layer.weight.grad = None  # as loops do that clear gradients


def test_it_keeps_its_type_under_autocast_as_a_parameter_does(layer: fz.FactorizedLinear) -> None:
    layer.float()
    x = torch.randn(2, 6)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.weight.dtype == (layer.weight * 1).dtype == torch.float32
        assert F.linear(x, layer.weight).dtype == torch.bfloat16


def test_a_compiled_and_an_exported_program_read_it_plain(layer: fz.FactorizedLinear) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layer

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x.to(self.inner.weight.dtype), self.inner.weight).relu()

    reader, x = Reader(), torch.randn(4, 6)
    expected = reader(x)
    compiled: Any = torch.compile(reader, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), expected)
    assert torch.equal(torch.export.export(reader, (x,)).module()(x), expected)


def test_on_the_meta_device_it_is_a_tensor_there() -> None:
    layer = fz.FactorizedLinear(6, 5, 3, device="meta")
    assert layer.weight.is_meta
    assert (layer.weight @ torch.empty(6, device="meta")).shape == (5,)
    with pytest.raises(ValueError, match="the factors are on the meta device"):
        layer.weight = torch.ones(5, 6)


def test_a_weight_that_is_set_keeps_type_device_and_followers(layer: fz.FactorizedLinear) -> None:
    follower = fz.FactorizedLinear(6, 5, 3, dtype=torch.float64)
    follower.weight = layer.weight  # ties, as it does for plain layers
    assert follower.factors == layer.factors
    target = torch.randn(5, 6) @ torch.diag(torch.tensor([1.0, 1, 1, 0, 0, 0]))
    layer.weight = nn.Parameter(target)
    assert {factor.dtype for factor in layer.factors} == {torch.float64}
    assert error(follower.weight, target) < 1e-6
    layer.weight = layer.weight / 2
    assert error(follower.weight, target / 2) < 1e-6


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(6, 5), "weight must be 5x6 for this layer, got 6x5"),
        (torch.full((5, 6), torch.nan), "weight holds NaN or infinity"),
        (torch.ones(5, 6, device="meta"), "weight is on the meta device"),
        (torch.ones(5, 6, dtype=torch.int64), "weight must be floating point, got int64"),
        (fz.FactorizedLinear(6, 5, 2).weight, r"cannot be tied to a 5x6 one \(.*rank=2\).*other\.weight\.clone\(\)"),
        (3.0, "weight must be a tensor, got float"),
        (None, "weight must be a tensor, got NoneType"),
    ],
)
def test_a_weight_that_does_not_fit_is_refused(layer: fz.FactorizedLinear, weight: Any, message: str) -> None:
    before = plain(layer)
    with pytest.raises(ValueError, match=message):
        layer.weight = weight
    assert torch.equal(plain(layer), before)
