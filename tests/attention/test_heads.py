from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from factorized.attention.heads import HeadsIn, HeadsOut
from factorized.testing import error


def filled(layer: Any) -> Any:
    torch.manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


@pytest.mark.parametrize("bias", [True, False])
def test_every_head_is_padded_with_zeros_behind_its_own_dimensions(bias: bool) -> None:
    layer = filled(HeadsIn(6, ((2, 3), (1, 2)), 4, bias, dtype=torch.float64))
    x = torch.randn(5, 7, 6, dtype=torch.float64)
    y = layer(x).unflatten(-1, (3, 4))
    plain = F.linear(x, layer.weight, layer.bias)
    assert error(y[..., :2, :3].flatten(-2), plain[..., :6]) < 1e-12
    assert error(y[..., 2, :2], plain[..., 6:]) < 1e-12
    assert y[..., :2, 3:].abs().max() == y[..., 2, 2:].abs().max() == 0


def test_the_output_reads_the_first_dimensions_of_every_head() -> None:
    layer = filled(HeadsOut(2, 3, 4, 5, dtype=torch.float64))
    x = torch.randn(7, 8, dtype=torch.float64)
    kept = x.unflatten(-1, (2, 4))[..., :3].flatten(-2)
    assert error(layer(x), F.linear(kept, layer.weight, layer.bias)) < 1e-12


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HeadsIn(6, ((2, 5),), 4), "size must be at least the rank"),
        (lambda: HeadsIn(6, ((0, 2),), 4), "heads must be a whole number"),
        (lambda: HeadsIn(6, ((2, 0),), 4), "rank must be a whole number"),
        (lambda: HeadsOut(2, 5, 4, 6), "size must be at least the rank"),
        (lambda: HeadsOut(2, 1.5, 4, 6), "rank must be a whole number"),
    ],
)
def test_wrong_sizes_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_their_reprs_show_heads_ranks_and_size() -> None:
    assert repr(HeadsIn(6, ((2, 3), (1, 2)), 4)) == "HeadsIn(6, heads=2x3, 1x2, size=4, bias=True)"
    assert repr(HeadsOut(2, 3, 4, 5, bias=False)) == "HeadsOut(heads=2x3, size=4, 5, bias=False)"
