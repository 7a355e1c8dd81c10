from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import factorized as fz
from factorized.formats.kernel import Kind
from factorized.nn.conv import FactorizedConv
from tests.models.unchanged import unchanged

MODES = ["zeros", "reflect", "replicate", "circular"]
CASES = [
    *(nn.Conv2d(6, 8, 3, padding=p, padding_mode=mode) for p, mode in product(["same", "valid", 1], MODES)),
    *(nn.Conv2d(6, 8, (4, 3), padding="same", dilation=(1, 2), padding_mode=mode) for mode in MODES),
    nn.Conv2d(6, 8, (3, 5), stride=(2, 3), padding=(1, 2), bias=False),
    nn.Conv2d(6, 8, 3, stride=2, padding=2, dilation=2, groups=2),
    nn.Conv2d(6, 8, 1, stride=2),
    nn.Conv1d(6, 8, 5, stride=2, padding=2, padding_mode="circular"),
    nn.Conv1d(6, 8, 4, padding="same"),
    nn.Conv3d(6, 8, (3, 2, 3), stride=(1, 2, 1), padding=(1, 0, 1)),
]


def layer_of(dense: nn.Module, rank: int, kind: Kind = "spatial", depth: int = 0) -> FactorizedConv:
    types = {nn.Conv1d: fz.FactorizedConv1d, nn.Conv2d: fz.FactorizedConv2d, nn.Conv3d: fz.FactorizedConv3d}
    layer = types[type(dense)].from_dense(deepcopy(dense).double(), rank, kind=kind, depth=depth)
    return stir(layer)


def stir(layer: Any) -> Any:
    """Move every parameter, so that inner matrices are not the identity."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return layer


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("kind", ["spatial", "channel"])
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("dense", CASES, ids=str)
def test_two_plain_convolutions_compute_what_the_factorized_one_does(dense: nn.Module, kind: Kind, depth: int) -> None:
    layer = layer_of(dense, rank=2, kind=kind, depth=depth)
    with unchanged(layer):
        pair = fz.lower(layer)
    assert type(pair) is nn.Sequential
    assert [type(part) for part in pair] == [type(dense)] * 2
    for size in (9, 12):
        x = torch.randn(2, 6, *(size,) * layer.dims, dtype=torch.float64)
        torch.testing.assert_close(pair(x), layer(x), rtol=1e-10, atol=1e-12)
    assert sum(p.numel() for p in pair.parameters()) == sum(
        p.numel() for name, p in layer.named_parameters() if "inner" not in name
    )


def test_the_paper_pair_is_one_by_k_then_k_by_one_with_the_stride_split() -> None:
    pair = fz.lower(layer_of(nn.Conv2d(6, 8, (3, 5), stride=(2, 3), padding=(1, 2), groups=2), rank=2))
    assert repr(pair[0]) == repr(
        nn.Conv2d(6, 4, (1, 5), stride=(1, 3), padding=(0, 2), groups=2, bias=False),
    )
    assert repr(pair[1]) == repr(nn.Conv2d(4, 8, (3, 1), stride=(2, 1), padding=(1, 0), groups=2))


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_two_linears_compute_what_the_factorized_one_does(depth: int, bias: bool) -> None:
    layer = stir(fz.FactorizedLinear(9, 7, 2, bias=bias, depth=depth, dtype=torch.float64))
    pair = fz.lower(layer)
    assert repr(pair[0]) == repr(nn.Linear(9, 2, bias=False))
    assert repr(pair[1]) == repr(nn.Linear(2, 7, bias=bias))
    x = torch.randn(3, 4, 9, dtype=torch.float64)
    torch.testing.assert_close(pair(x), layer(x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("settings", [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_a_narrow_table_and_a_linear_compute_what_the_factorized_embedding_does(
    depth: int, settings: dict[str, int]
) -> None:
    layer = stir(fz.FactorizedEmbedding(20, 9, 2, depth=depth, dtype=torch.float64, **settings))
    pair = fz.lower(layer)
    assert repr(pair[0]) == repr(nn.Embedding(20, 2, **settings))
    assert repr(pair[1]) == repr(nn.Linear(2, 9, bias=False))
    tokens = torch.randint(0, 20, (5, 6))
    torch.testing.assert_close(pair(tokens), layer(tokens), rtol=1e-10, atol=1e-12)


def test_padding_in_the_lowered_table_gets_no_gradient() -> None:
    pair = fz.lower(fz.FactorizedEmbedding(20, 9, 2, padding_idx=3))
    pair(torch.tensor([3, 4, 3])).sum().backward()
    assert pair[0].weight.grad[3].eq(0).all()
    assert pair[0].weight.grad[4].ne(0).all()


@pytest.mark.parametrize(
    ("layer", "lowered"),
    [
        (fz.FactorizedLinear(8, 8, 3), nn.Sequential),
        (fz.FactorizedLinear(8, 8, 4), nn.Linear),  # 4·(8 + 8) is no less than 8·8
        (fz.FactorizedLinear(8, 8, 12), nn.Linear),
        (fz.FactorizedLinear(8, 8, 3, depth=4), nn.Sequential),  # inner matrices cost nothing once merged
        (fz.FactorizedConv2d(8, 8, 3, 11), nn.Sequential),
        (fz.FactorizedConv2d(8, 8, 3, 12), nn.Conv2d),
        (fz.FactorizedConv2d(8, 8, 3, 6, groups=2), nn.Conv2d),
        (fz.FactorizedEmbedding(30, 8, 7), nn.Embedding),
    ],
    ids=repr,
)
def test_a_pair_that_would_not_be_smaller_is_composed_instead(layer: nn.Module, lowered: type[nn.Module]) -> None:
    plain = fz.lower(layer)
    assert type(plain) is lowered
    assert sum(p.numel() for p in plain.parameters()) <= sum(p.numel() for p in layer.to_dense().parameters())


def test_a_lowered_overcomplete_model_is_the_composed_one() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(6, 5))
    fz.factorize(model, fz.Overcomplete("wide"), keep_first_and_last=False)
    lowered, composed = fz.lower(model), fz.compose(model)
    assert repr(lowered) == repr(composed)
    for key, value in composed.state_dict().items():
        assert torch.equal(lowered.state_dict()[key], value), key


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("include", ["layers.0.linear*", "layers.1.linear*"])
@torch.no_grad()
def test_a_lowered_encoder_takes_padding(include: str) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dtype=torch.float64)
    model = fz.factorize(nn.TransformerEncoder(layer, 2).eval(), rank=2, include=[include], keep_first_and_last=False)
    x, padding = torch.randn(2, 5, 16, dtype=torch.float64), torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    expected, actual = (one(x, src_key_padding_mask=padding) for one in (model, fz.lower(model)))
    torch.testing.assert_close(actual[~padding], expected[~padding])


def test_tied_layers_of_one_kind_share_both_plain_weights() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model[2].weight = model[1].weight
    lowered = fz.lower(fz.factorize(model, rank=2))
    assert lowered[1][0].weight is lowered[2][0].weight
    assert lowered[1][1].weight is lowered[2][1].weight
    assert lowered[1][1].bias is not lowered[2][1].bias


@pytest.mark.parametrize("convert", [fz.lower, fz.compose])
def test_a_plain_model_is_traced_symbolically(convert: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 8, 3), nn.ConvTranspose2d(8, 8, 3), nn.Flatten(2), nn.Linear(16, 16)]
    model = fz.factorize(nn.Sequential(*layers).double(), rank=2, keep_first_and_last=False)
    x = torch.randn(2, 8, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(torch.fx.symbolic_trace(convert(model))(x), model(x))
