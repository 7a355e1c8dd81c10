from __future__ import annotations

from typing import Any

import pytest
import torch

from factorized.formats.convolution import Geometry, explicit_padding, pad


@pytest.mark.parametrize(
    ("padding", "size", "dilation", "expected"),
    [
        ("valid", (3, 4), (1, 1), ((0, 0), (0, 0))),
        ("same", (3, 5), (1, 1), ((1, 1), (2, 2))),
        ("same", (2, 4), (1, 1), ((0, 1), (1, 2))),
        ("same", (4, 4), (2, 3), ((3, 3), (4, 5))),
        ("same", (1,), (5,), ((0, 0),)),
        ((0, 2, 1), (3, 3, 3), (1, 1, 1), ((0, 0), (2, 2), (1, 1))),
    ],
)
def test_padding_is_spelled_out_before_and_after_each_dimension(
    padding: str | tuple[int, ...], size: tuple[int, ...], dilation: tuple[int, ...], expected: tuple[Any, ...]
) -> None:
    assert explicit_padding(padding, size, dilation) == expected


def test_a_part_of_a_geometry_is_pointwise_elsewhere() -> None:
    whole = Geometry((2, 3, 4), ((1, 1), (2, 2), (3, 4)), (5, 6, 7), "circular")
    assert whole.only((1, 2)) == Geometry((1, 3, 4), ((0, 0), (2, 2), (3, 4)), (1, 6, 7), "circular")
    assert whole.only(()) == Geometry((1, 1, 1), ((0, 0),) * 3, (1, 1, 1), "circular")


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("zeros", [0, 1, 2, 3, 0, 0]),
        ("circular", [3, 1, 2, 3, 1, 2]),
        ("reflect", [2, 1, 2, 3, 2, 1]),
        ("replicate", [1, 1, 2, 3, 3, 3]),
    ],
)
def test_padding_one_dimension_leaves_the_other_alone(mode: str, expected: list[int]) -> None:
    row = torch.tensor([[[[1.0, 2.0, 3.0]]]])
    assert pad(row, [(0, 0), (1, 2)], mode)[0, 0].tolist() == [expected]
