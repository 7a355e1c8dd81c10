from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from factorized import FactorizedConv2d, FactorizedLinear, Kronecker, LowRank, Monarch, TensorTrain, Tucker
from factorized.formats.format import Call, Cores, Format, Rank
from factorized.formats.kernel import KernelShape
from factorized.formats.scheme import Scheme
from factorized.testing import error


@dataclass(frozen=True)
class Scaled(Format):
    """A weight that is a number times a vector per row: the least that a format must say of itself."""

    shape: KernelShape
    rank: Rank = 1

    name: ClassVar[str] = "scaled"

    @property
    def cores(self) -> dict[str, tuple[int, ...]]:
        return {"scale": (self.shape.out_channels,), "row": self.shape.weight_shape[1:]}

    def decompose(self, weights: Tensor, *, exact: bool = False) -> Cores:
        row = weights.mean(dim=-2)
        return (weights * row.unsqueeze(-2)).sum(-1) / row.square().sum(-1, keepdim=True), row

    def compose(self, cores: Sequence[Tensor]) -> Tensor:
        return cores[0].unsqueeze(-1) * cores[1].unsqueeze(-2)

    def raised(self) -> list[Scaled]:
        return []


def test_a_format_that_says_only_what_it_must_has_the_rest_from_its_weight() -> None:
    format = Scaled(KernelShape(5, 4))
    torch.manual_seed(0)
    cores = [torch.randn(3, *extents, dtype=torch.float64, requires_grad=True) for extents in format.cores.values()]
    squared = format.compose(cores).square().sum(dim=(-2, -1))
    assert error(format.norm_squared(cores), squared) < 1e-12
    expected = torch.autograd.grad(squared.sum() / 2, cores)
    for actual, reference in zip(format.gradients(cores), expected, strict=True):
        assert error(actual, reference) < 1e-12
    assert format.spectrum(cores).shape == (3, 1, 4)
    assert (format.numel, format.height, format.matrix_rank) == (9, 1, 4)
    assert format.decayed == (format, 2)
    assert format.plain([core[0] for core in cores]) == []
    assert format.to_dict() == {"name": "scaled", "rank": 1}
    assert Scaled.read(format.shape, {"rank": 1}) == format
    layer = FactorizedLinear.from_dense(nn.Linear(4, 5).double(), format, "kaiming")
    assert layer.executions == ("composed",)
    x = torch.randn(2, 4, dtype=torch.float64)
    assert error(layer(x), layer.to_dense()(x)) < 1e-12
    assert layer.lowered() == []


def test_a_format_of_one_rank_is_lowered_one_by_one_and_one_of_several_says_how_itself() -> None:
    shape = KernelShape(5, 4)
    assert Scaled(shape, 3).lowered() == [Scaled(shape, 2)]
    assert Scaled(shape, 1).lowered() == []
    with pytest.raises(NotImplementedError, match=r"scaled has several ranks; define lowered\(\) for it"):
        Scaled(shape, (2, 3)).lowered()


def test_positions_are_those_that_the_strides_of_the_spanned_dimensions_leave() -> None:
    call = Call(batch=3, before=(10, 8), after=(5, 4))
    assert call.positions(()) == 3 * 10 * 8
    assert call.positions((0,)) == 3 * 5 * 8
    assert call.positions((1,)) == 3 * 10 * 4
    assert call.positions((0, 1)) == call.outputs == 3 * 5 * 4
    assert Call(7).positions(()) == Call(7).outputs == 7


@pytest.mark.parametrize(
    ("scheme", "macs"),
    [
        # 1x3 to 2 channels on 10 rows of 4 columns, then 3x1 on 5 rows
        (LowRank(), 3 * (10 * 4 * 2 * 4 * 3 + 5 * 4 * 6 * 2 * 3)),
        (LowRank("channel"), 3 * 5 * 4 * (2 * 4 * 9 + 6 * 2)),
        (Monarch(blocks=2), 3 * 5 * 4 * (8 * 2 * 9 + 6 * 4)),
        # 1x1 before the stride, then 3x3 and 1x1 after it
        (Tucker(), 3 * (10 * 8 * 4 * 2 + 5 * 4 * (2 * 2 * 9 + 6 * 2))),
    ],
    ids=["spatial", "channel", "monarch", "tucker"],
)
def test_a_strided_chain_costs_what_a_hand_counts_and_what_it_runs(scheme: Scheme, macs: int) -> None:
    format = scheme.at_rank(scheme.kernel((6, 4, 3, 3)), 2)
    call = Call(batch=3, before=(10, 8), after=(5, 4))
    assert format.chain_macs(call) == macs
    assert format.macs(call) == min(macs, format.macs(call))
    layer = FactorizedConv2d(4, 6, 3, format, stride=2, padding=1, execution="chain")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(torch.randn(3, 4, 10, 8))
    assert counter.get_total_flops() == 2 * (macs + format.prepare_macs)


@pytest.mark.parametrize("scheme", [TensorTrain(), Tucker()], ids=str)
def test_a_format_is_counted_in_the_way_that_takes_fewer_multiplications(scheme: Any) -> None:
    shape = KernelShape.of((24, 24))
    thin, thick = scheme.at_rank(shape, 1), scheme.at_scale(shape, 100)
    many = Call(batch=10_000)
    assert thin.macs(many) == thin.chain_macs(many) + thin.prepare_macs < many.outputs * shape.numel
    assert thick.macs(many) == many.outputs * shape.numel + thick.compose_macs
    assert thick.macs(Call(batch=1)) < thick.macs(many)


def test_a_look_up_multiplies_what_widens_the_thin_rows_or_composes_a_table_that_has_none() -> None:
    shape, call = KernelShape.of((1000, 16)), Call(batch=5, looked_up=True)
    assert LowRank().at_rank(shape, 3).macs(call) == 5 * 3 * 16
    train = TensorTrain(dims=(100, 40, 4)).at_rank(shape, 3)
    assert train.chain is None
    assert train.macs(call) == train.compose_macs > 0


@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("scheme", [LowRank(), TensorTrain(), Tucker(), Monarch(), Kronecker()], ids=str)
def test_weights_whose_squares_are_out_of_range_are_decomposed(scheme: Any, size: float) -> None:
    weight = torch.randn(12, 8, 3, 3, generator=torch.Generator().manual_seed(0))
    format = scheme.at_rank(KernelShape.of(tuple(weight.shape)), 1)
    best, found = (
        format.compose([core.double() for core in format.decompose(tensor)]) for tensor in (weight, weight * size)
    )
    assert error(found / size, best) < 1e-3


def test_a_product_of_groups_cannot_absorb_one_that_crosses_them() -> None:
    format = LowRank().at_rank(KernelShape.of((6, 2, 3, 3), groups=2), 2)
    torch.manual_seed(0)
    cores = [torch.randn(extents) for extents in format.cores.values()]
    with pytest.raises(ValueError, match="a weight in rank=2 cannot absorb a product exactly"):
        format.plus(cores, *(torch.randn(len(core), 1) for core in cores))
