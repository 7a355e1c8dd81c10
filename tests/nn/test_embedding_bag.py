from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from factorized import FactorizedEmbedding, FactorizedEmbeddingBag, LowRank, Monarch, TensorTrain, Tucker
from factorized.formats.format import Format
from factorized.formats.kernel import KernelShape
from factorized.formats.scheme import Scheme
from factorized.testing import error

ENTRIES, WIDTH = 9, 6
INDICES = torch.tensor([2, 2, 7, 7, 7, 1, 3, 4, 0, 2])
OFFSETS = torch.tensor([0, 3, 3, 6])  # one bag is empty
SHAPE = KernelShape.of((ENTRIES, WIDTH))
FORMATS: dict[str, Format] = {"product": LowRank().at_rank(SHAPE, 3), "monarch": Monarch(3).at_rank(SHAPE, 1)}


def made(format: str = "product", **settings: Any) -> FactorizedEmbeddingBag:
    torch.manual_seed(0)
    return FactorizedEmbeddingBag.from_dense(nn.EmbeddingBag(ENTRIES, WIDTH, **settings).double(), FORMATS[format])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("settings", [{}, {"padding_idx": 2}, {"include_last_offset": True, "padding_idx": 7}])
def test_bags_that_begin_at_offsets_are_those_of_the_dense_layer(
    mode: str, settings: dict[str, Any], format: str
) -> None:
    layer = made(format, mode=mode, **settings)
    dense = layer.to_dense()
    ends = torch.tensor([len(INDICES)])
    offsets = torch.cat([OFFSETS, ends]) if settings.get("include_last_offset") else OFFSETS
    found, expected = layer(INDICES, offsets), dense(INDICES, offsets)
    assert error(found, expected) < 1e-12
    probe = torch.randn_like(expected)
    (through,) = torch.autograd.grad(expected, [dense.weight], probe)
    for gradient, reference in zip(
        torch.autograd.grad(found, layer.factors, probe),
        torch.autograd.grad(layer.weight, layer.factors, through),
        strict=True,
    ):
        assert error(gradient, reference) < 1e-12
    assert error(layer(INDICES.int(), offsets.int()), expected) < 1e-12


@pytest.mark.parametrize("settings", [{}, {"padding_idx": 2}, {"scale_grad_by_freq": True}])
def test_weights_of_single_entries_are_multiplied_in_and_have_a_gradient(settings: dict[str, Any]) -> None:
    layer = made(mode="sum", **settings)
    dense = layer.to_dense()
    weights = torch.randn(len(INDICES), dtype=torch.float64, requires_grad=True)
    found, expected = layer(INDICES, OFFSETS, weights), dense(INDICES, OFFSETS, per_sample_weights=weights)
    assert error(found, expected) < 1e-12
    probe = torch.randn_like(expected)
    assert (
        error(torch.autograd.grad(found, weights, probe)[0], torch.autograd.grad(expected, weights, probe)[0]) < 1e-12
    )


@pytest.mark.parametrize("drop_connect", [0.0, 1e-300])  # the second composes the table, and drops nothing
def test_by_frequency_its_gradients_are_those_of_an_embedding_that_is_summed(drop_connect: float) -> None:
    layer = made(mode="sum", scale_grad_by_freq=True)
    rows = FactorizedEmbedding(ENTRIES, WIDTH, 3, scale_grad_by_freq=True, dtype=torch.float64)
    rows.set_factors(*layer.factors)
    layer.drop_connect = drop_connect
    x = INDICES.view(2, 5)
    probe = torch.randn(2, WIDTH, dtype=torch.float64)
    for gradient, reference in zip(
        torch.autograd.grad(layer(x), layer.factors, probe),
        torch.autograd.grad(rows(x).sum(1), rows.factors, probe),
        strict=True,
    ):
        assert error(gradient, reference) < 1e-12


@pytest.mark.parametrize("scheme", [TensorTrain(), Tucker(order=4)])
def test_weights_of_single_entries_keep_their_type_under_autocast(scheme: Scheme) -> None:
    shape = KernelShape.of((16, 16))
    layer = FactorizedEmbeddingBag.from_dense(nn.EmbeddingBag(16, 16, mode="sum"), scheme.at_rank(shape, 3))
    assert layer.widens_bags
    weights = torch.randn(10)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(INDICES, OFFSETS, weights)
    assert error(found, layer.to_dense()(INDICES, OFFSETS, weights)) < 2e-2


def test_sums_and_means_are_widened_once_a_bag_and_maxima_once_an_entry() -> None:
    assert [made(mode=mode).widens_bags for mode in ("sum", "mean", "max")] == [True, True, False]
    assert not made("monarch").widens_bags


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "median"}, 'mode must be one of "sum", "mean", "max", got \'median\''),
        ({"padding_idx": 9}, "padding_idx must be in -9..8, got 9"),
    ],
)
def test_wrong_settings_say_what_is_allowed(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FactorizedEmbeddingBag(ENTRIES, WIDTH, 3, **settings)


def test_a_table_whose_rows_are_renormalized_is_refused() -> None:
    with pytest.raises(ValueError, match="it renormalizes rows"):
        FactorizedEmbeddingBag.from_dense(nn.EmbeddingBag(9, 6, max_norm=1.0), 3)


def test_what_goes_together_only_for_sums_is_refused_as_torch_does() -> None:
    with pytest.raises(NotImplementedError, match="only supported for mode='sum'"):
        made(mode="mean")(INDICES, OFFSETS, torch.ones(len(INDICES), dtype=torch.float64))
    with pytest.raises(ValueError, match="offsets has to be"):
        made()(INDICES)
