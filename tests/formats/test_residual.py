from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import factorized as fz
from factorized.formats.kernel import KernelShape
from factorized.formats.residual import TYPES


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)).double()


def residual(dtype: Any = None, part: Any = None, rank: int = 3) -> Any:
    scheme = fz.Residual(part or fz.LowRank(), dtype)
    return fz.factorize(net(), scheme, rank=rank, keep_first_and_last=False)


def x() -> Tensor:
    return torch.randn(9, 24, generator=torch.Generator().manual_seed(1)).double()


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("rank", [1, 3])
def test_at_any_rank_the_model_starts_as_it_was(rank: int) -> None:
    model = residual(rank=rank)
    assert relative(model(x()), net()(x())) < 1e-14
    leading = fz.factorize(net(), rank=rank, keep_first_and_last=False)
    assert torch.equal(model[2].U, leading[2].U)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float32", 1e-7), ("bfloat16", 4e-3), ("float16", 4e-4), ("float8_e4m3fn", 3e-2), ("int8", 1e-2)],
)
def test_a_rest_in_fewer_bytes_is_kept_as_exactly_as_its_type_allows(dtype: str, tolerance: float) -> None:
    model = residual(dtype)
    assert model[2].residual.dtype == TYPES[dtype]
    assert relative(model[2].weight, net()[2].weight) < tolerance
    assert model[2].U.dtype == torch.float64


def test_the_larger_part_of_a_weight_is_kept_out_of_the_quantized_rest() -> None:
    dense = nn.Linear(64, 64).double()
    with torch.no_grad():
        dense.weight += 3 * torch.outer(torch.randn(64), torch.randn(64))
    few, many = (
        fz.FactorizedLinear.from_dense(dense, fz.Residual(dtype="int8").at_rank(fz.LowRank().kernel((64, 64)), rank))
        for rank in (1, 16)
    )
    assert relative(many.weight, dense.weight) < relative(few.weight, dense.weight)


@pytest.mark.parametrize("kept", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 1.0), (torch.float16, 1e-5)])
def test_a_scale_that_is_rounded_down_flips_no_entry(dtype: torch.dtype, size: float, kept: str) -> None:
    torch.manual_seed(0)
    weight = (size * torch.randn(4000, 20)).to(dtype)
    format = fz.Residual(dtype=kept).at_rank(KernelShape.of((4000, 20)), 1)
    *part, rest, scale = format.decompose(weight)
    expected = weight.double() - format.part.compose(part).double()
    assert (rest.double() * expected >= 0).all()
    assert (scale > 0).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_of_zeros_stay_zero(dtype: str) -> None:
    dense = nn.Linear(8, 4)
    with torch.no_grad():
        dense.weight.zero_()
    layer = fz.FactorizedLinear.from_dense(dense, fz.Residual(dtype=dtype).at_rank(fz.LowRank().kernel((4, 8)), 2))
    assert torch.equal(layer.weight, dense.weight)


def test_bytes_are_rounded_to_the_nearest() -> None:
    dense = net()[2]
    layer = residual("int8")[2]
    assert ((layer.weight - dense.weight).abs() <= 0.501 * layer.residual_scale).all()


@pytest.mark.parametrize("dtype", [None, *TYPES])
def test_the_part_trains_and_the_rest_does_not(dtype: Any) -> None:
    model = residual(dtype)
    before = deepcopy(model)
    optimizer = torch.optim.SGD(fz.parameter_groups(model, 1e-2), lr=0.1)
    decay = fz.FrobeniusDecay(model, 0.3).attach(optimizer)
    model(x()).square().mean().backward()
    gradient = model[2].U.grad.clone()
    optimizer.step()
    U, V = before[2].U, before[2].V
    torch.testing.assert_close(model[2].U.grad, gradient + 0.3 * (U @ (V.mT @ V)))  # nothing of R in it
    assert not torch.equal(model[2].U, before[2].U)
    assert torch.equal(model[2].residual.float(), before[2].residual.float())
    assert model[2].residual.grad is None
    norms = sum((layer.U @ layer.V.mT).square().sum() for layer in model if isinstance(layer, fz.FactorizedLinear))
    torch.testing.assert_close(decay.penalty(), 0.15 * norms)


@pytest.mark.parametrize("execution", ["chain", "composed"])
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float8_e4m3fn"])
def test_the_rest_stays_frozen_when_all_parameters_are_set_to_be_trained(dtype: Any, execution: Any) -> None:
    model = residual(dtype)
    model[2].execution = execution
    before = deepcopy(model)
    model.requires_grad_(False).requires_grad_(True)  # as Lightning's unfreeze() does
    optimizer = torch.optim.AdamW(fz.parameter_groups(model, 0.1), lr=0.1)
    model(x()).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model[2].U, before[2].U)
    for name in before[2].format.frozen:
        if hasattr(before[2], name):
            assert torch.equal(getattr(model[2], name).float(), getattr(before[2], name).float())


def transposed() -> tuple[Any, Tensor]:
    from transformers.pytorch_utils import Conv1D as conv1d

    format = fz.Residual().at_rank(fz.LowRank().kernel((24, 8)), 3)
    return fz.FactorizedLinear.from_dense(conv1d(8, 24).double(), format, transposed=True), x()


def linear() -> tuple[Any, Tensor]:
    return residual()[0], x()


def table() -> tuple[Any, Tensor]:
    format = fz.Residual().at_rank(fz.LowRank().kernel((9, 6)), 3)
    return fz.FactorizedEmbedding.from_dense(nn.Embedding(9, 6).double(), format), torch.arange(9)


def separable() -> tuple[Any, Tensor]:
    scheme = fz.Residual(fz.Tucker(separable=True))
    format = scheme.at_rank(scheme.kernel((8, 6, 3, 3)), 2)
    layer = fz.FactorizedConv2d.from_dense(nn.Conv2d(6, 8, 3).double(), format, execution="composed")
    return layer, torch.randn(2, 6, 5, 5).double()


@pytest.mark.parametrize("make", [linear, transposed, separable])
def test_decay_in_the_backward_pass_leaves_the_rest_alone(make: Callable[[], tuple[Any, Tensor]]) -> None:
    layer, input = make()
    layer.execution = "composed"
    found = []
    for in_backward in (False, True):
        model = nn.Sequential(deepcopy(layer))
        optimizer = torch.optim.SGD(fz.parameter_groups(model, 0.0), lr=0.0)
        fz.FrobeniusDecay(model, 0.3, in_backward=in_backward).attach(optimizer)
        model(input).square().mean().backward()
        optimizer.step()
        found.append([p.grad for p in model.parameters() if p.requires_grad])
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_averaging_what_is_trained_leaves_a_rest_of_one_byte_alone(dtype: torch.dtype) -> None:
    model = residual(dtype)
    ema = get_ema_avg_fn(0.9999)
    average = AveragedModel(
        model, avg_fn=lambda old, new, count: ema(old, new, count) if new.dtype.itemsize > 1 else new
    )
    for _ in range(20):
        average.update_parameters(model)
    torch.testing.assert_close(average(x()), model(x()))


@pytest.mark.parametrize("make", [linear, transposed, table])
def test_drop_connect_drops_nothing_of_the_rest(make: Callable[[], tuple[Any, Tensor]]) -> None:
    layer, input = make()
    with torch.no_grad():
        layer.U.zero_()
    expected = layer(input)
    fz.drop_connect(layer, 0.5)
    torch.testing.assert_close(layer(input), expected)


def test_drop_connect_drops_nothing_of_the_rest_of_a_recurrent_network() -> None:
    model = nn.ModuleDict({"gates": nn.LSTM(24, 8)}).double()
    fz.factorize(model, fz.Residual(), rank=2, keep_first_and_last=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("U"):
                parameter.zero_()
    expected, _ = model["gates"](x())
    fz.drop_connect(model, 0.5)
    torch.testing.assert_close(model["gates"](x())[0], expected)


@pytest.mark.parametrize("dtype", [None, *TYPES])
def test_it_is_composed_saved_and_loaded(tmp_path: Path, dtype: Any) -> None:
    model = residual(dtype)
    dense = fz.compose(model)
    assert [type(layer) for layer in dense] == [type(layer) for layer in net()]
    torch.testing.assert_close(dense(x()), model(x()))
    torch.testing.assert_close(fz.lower(model)(x()), model(x()))
    fz.save(model, tmp_path)
    loaded: Any = fz.load(tmp_path, net())
    assert loaded[2].format == model[2].format
    assert torch.equal(loaded(x()), model(x()))
    assert not loaded[2].residual.requires_grad
    torch.testing.assert_close(fz.load_dense(loaded, dense.state_dict())(x()), model(x()), rtol=0.05, atol=0.05)


def test_plan_and_scheme_survive_json() -> None:
    scheme = fz.Residual(fz.TensorTrain(order=3), "int8")
    plan = fz.plan(net(), scheme, rank=2, keep_first_and_last=False)
    assert fz.Plan.from_dict(plan.to_dict()) == plan
    assert plan.scheme == scheme == fz.Residual(fz.TensorTrain(order=3), torch.int8)
    assert repr(fz.Residual(dtype=torch.int8)) == "Residual(part=LowRank(), dtype='int8')"


def test_a_rank_is_a_share_of_full_rank_and_parameters_count_the_rest() -> None:
    plan = fz.plan(net(), fz.Residual(), rank_scale=0.25, keep_first_and_last=False)
    assert [entry.rank for entry in plan.layers] == [6, 8, 1]
    assert plan.ratio > 1
    assert fz.plan(net(), fz.Residual(), ratio=1.4, keep_first_and_last=False).ratio <= 1.4
    with pytest.raises(ValueError, match=r"rank 1 everywhere it still keeps 1\.\d+.*or more"):
        fz.plan(net(), fz.Residual(), ratio=0.5, keep_first_and_last=False)


def test_drawn_parts_have_no_rest() -> None:
    model = fz.factorize(net(), fz.Residual(dtype="int8"), rank=3, init="normal", keep_first_and_last=False)
    torch.testing.assert_close(model[2].weight, model[2].U @ model[2].V.mT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("low_rank",), "part must be a scheme"),
        ((fz.Residual(),), "part must be a scheme"),
        ((fz.LowRank(), "int4"), "dtype must be one of"),
        ((fz.LowRank(), torch.int64), "dtype must be one of"),
    ],
)
def test_a_wrong_scheme_says_what_is_allowed(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fz.Residual(*arguments)


def test_an_adapter_is_merged_into_the_part() -> None:
    layer = residual("int8")[2]
    U, V = torch.randn(32, 2).double(), torch.randn(32, 2).double()
    format, cores = layer.format.plus(layer.factors, U, V)
    assert format.rank == 5
    torch.testing.assert_close(format.compose(cores), layer.weight + U @ V.mT)
