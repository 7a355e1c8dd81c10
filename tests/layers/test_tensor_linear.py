from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from factorized import FactorizedLinear, TensorizedLinear
from tests.composed_contract import Case, error
from tests.tensor_contract import TensorContract


def linear(name: str, inputs: int, outputs: int, rank: Any, bias: bool = True, **flags: Any) -> Case:
    settings = ("method", "dims", "core", "refinements", "execution")
    options = {key: flags.pop(key) for key in settings if key in flags}
    return Case(
        name,
        TensorizedLinear,
        lambda: nn.Linear(inputs, outputs, bias),
        rank,
        lambda leading: torch.randn(*leading, inputs),
        options,
        **flags,
    )


TUCKER = {"method": "tucker"}


class TestTensorizedLinear(TensorContract):
    cases = (
        linear("train", 12, 8, 2, thorough=True, inductor=True),
        linear("train-composed", 12, 8, (2, 3, 2), execution="one_product", thorough=True),
        linear("train-contracted-no-bias", 6, 9, 2, bias=False, execution="two_products"),
        linear("train-that-mixes-sides", 8, 6, (3, 2), dims=(4, 4, 3)),
        linear("train-of-primes", 5, 7, 2),
        linear("train-of-a-matrix", 6, 8, 3, dims=(8, 6)),
        linear("tucker", 12, 8, 2, **TUCKER, thorough=True, inductor=True),
        linear("tucker-composed", 12, 8, (2, 3, 2, 2), **TUCKER, execution="one_product"),
        linear("tucker-contracted", 12, 8, (2, 3, 2, 3), **TUCKER, execution="three_products", thorough=True),
        linear("tucker-three-to-one", 5, 24, (2, 2, 2, 3), **TUCKER, dims=(2, 4, 3, 5), execution="three_products"),
        linear(
            "tucker-near-full", 12, 8, (2, 3, 3, 4), **TUCKER, execution="one_product", thorough=True, inductor=True
        ),
        linear("train-near-full", 12, 8, (2, 6, 4), execution="one_product", thorough=True),
        linear("tucker-near-full-inside", 12, 8, (2, 7, 4), **TUCKER, dims=(2, 12, 4), core="train"),
        linear("tucker-refined", 12, 8, 2, **TUCKER, refinements=3),
        linear("tucker-train-core", 12, 8, (2, 3, 2, 2), **TUCKER, core="train"),
        linear("tucker-that-mixes-sides", 8, 6, 2, **TUCKER, dims=(4, 4, 3), core="train"),
    )


@pytest.mark.parametrize("method", ["tensor_train", "tucker"])
def test_it_takes_any_number_of_leading_dimensions(method: str) -> None:
    layer = TensorizedLinear(6, 8, 2, method=method, dtype=torch.float64)
    for execution in layer.executions:
        layer.execution = execution
        for leading in [(), (2,), (2, 3), (2, 3, 4), (0,), (0, 3)]:
            x = torch.randn(*leading, 6, dtype=torch.float64)
            assert layer(x).shape == (*leading, 8)
            assert error(layer(x), layer.to_dense()(x)) < 1e-12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"rank": 0},
            "rank must be a whole number of at least 1, up to (2, 8, 4) for dims (2, 4, 3, 4) (tensor_train), got 0",
        ),
        ({"rank": -2, "method": "tucker"}, "at least 1, up to (2, 4, 3, 4) for dims (2, 4, 3, 4) (tucker), got -2"),
        ({"rank": (2, 0, 2)}, "(tensor_train), got (2, 0, 2)"),
        ({"rank": 2.5}, "(tensor_train), got 2.5"),
        ({"rank": True}, "(tensor_train), got True"),
        (
            {"rank": (2, 2)},
            "rank must be one whole number or 3 of them for dims (2, 4, 3, 4) (tensor_train), got (2, 2)",
        ),
        ({"rank": (2, 2), "method": "tucker"}, "or 4 of them for dims (2, 4, 3, 4) (tucker), got (2, 2)"),
        ({"dims": (8, 11)}, "dims (8, 11) multiply to 88, but the weight 8x12 has 96 entries; give dims whose product"),
        ({"dims": (96,)}, "dims must be a tuple of at least two whole numbers of at least 1, got (96,)"),
        ({"dims": (8, 0)}, "dims must be a tuple of at least two whole numbers"),
        ({"dims": (96, True)}, "dims must be a tuple of at least two whole numbers"),
        ({"dims": iter((8, 12))}, "dims must be a tuple of at least two whole numbers"),
        ({"dims": "8x12"}, "dims must be a tuple of at least two whole numbers"),
        ({"in_features": 0}, "must have at least one entry in every dimension, got 8x0"),
        ({"out_features": -8}, "must have at least one entry in every dimension, got -8x12"),
        ({"method": "cp"}, 'method must be "tensor_train" or "tucker", got \'cp\''),
        ({"core": "thin", "method": "tucker"}, 'core must be "whole" or "train", got \'thin\''),
        ({"refinements": -1}, "refinements must be a whole number of at least 0, got -1"),
        ({"refinements": 3}, "for a tensor train; leave them out"),
        ({"core": "train"}, "are for method=\"tucker\", got core='train' and refinements=0 for a tensor train"),
        ({"execution": "three_products"}, 'execution must be one of "two_products", "one_product", "auto"'),
        (
            {"execution": "two_products", "dims": (4, 4, 6)},
            'which dims (4, 4, 6) do not allow for a 8x12 weight with groups=1; use "one_product", or leave dims out',
        ),
        ({"init": "orthogonal"}, 'init must be one of "spectral"'),
    ],
)
def test_wrong_arguments_say_what_is_allowed(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        TensorizedLinear(**{"in_features": 12, "out_features": 8, "rank": 2, **arguments})


@pytest.mark.parametrize(
    ("method", "rank", "real"), [("tensor_train", 9, (2, 8, 4)), ("tucker", (9, 2, 9, 9), (2, 2, 3, 4))]
)
def test_ranks_above_what_the_dimensions_allow_are_clipped_with_a_warning(
    method: str, rank: Any, real: tuple[int, ...]
) -> None:
    with pytest.warns(UserWarning, match="is above what dims .* allow; clipped to") as caught:
        layer = TensorizedLinear(12, 8, rank, method=method)
    assert len(caught) == 1
    assert layer.rank == real
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert TensorizedLinear(12, 8, real, method=method).rank == real


@pytest.mark.parametrize(
    ("method", "rank", "real"),
    [
        ("tensor_train", (1, 30, 1), (1, 6, 1)),
        ("tensor_train", (6, 1, 6), (6, 1, 6)),
        ("tucker", (1, 6, 2, 2), (1, 4, 2, 2)),
    ],
)
def test_a_rank_that_its_neighbours_do_not_allow_is_clipped_too(
    method: str, rank: tuple[int, ...], real: tuple[int, ...]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = TensorizedLinear(36, 36, rank, method=method)
    assert layer.rank == real
    assert layer.weight.isfinite().all()


def test_a_layer_of_another_type_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"dense must be an nn\.Linear, got Conv2d; fz\.factorize finds the right class"
    ):
        TensorizedLinear.from_dense(nn.Conv2d(3, 3, 3), 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dense must be an nn\.Linear, got Embedding"):
        FactorizedLinear.from_dense(nn.Embedding(3, 3), 2)  # type: ignore[arg-type]


def test_the_cores_of_a_long_train_are_drawn_without_overflow() -> None:
    dims = (*[2] * 9, *[2] * 9, *[1] * 40)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = TensorizedLinear(512, 512, 200, dims=dims, init="normal")
    assert 0.5 < layer.weight.square().mean() * 256 < 2


def test_the_cores_of_a_long_and_thick_train_are_drawn_without_underflow() -> None:
    ranks = tuple([min(2**k, 2 ** (24 - k), 256) for k in range(1, 24)])
    layer = TensorizedLinear(4096, 4096, ranks, dims=[2] * 24, init="normal")
    for core in layer.cores:
        assert core.isfinite().all()
        assert core.norm() > 1e-3


def test_an_input_of_another_width_is_refused() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        TensorizedLinear(6, 5, 2)(torch.randn(2, 7))
