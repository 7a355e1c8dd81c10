from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from factorized import FactorizedLinear
from tests.contract import Case, LayerContract, error


def linear(name: str, inputs: int, outputs: int, rank: int, bias: bool = True, **flags: Any) -> Case:
    options = {key: flags.pop(key) for key in ("depth", "execution") if key in flags}
    return Case(
        name,
        FactorizedLinear,
        lambda: nn.Linear(inputs, outputs, bias),
        rank,
        lambda leading: torch.randn(*leading, inputs),
        options,
        **flags,
    )


class TestLinear(LayerContract):
    cases = (
        linear("wide", 12, 7, 3, thorough=True, inductor=True),
        linear("tall-no-bias", 5, 9, 2, bias=False),
        linear("one-by-one", 1, 1, 1),
        linear("overcomplete", 6, 8, 11),
        linear("one-inner", 8, 6, 4, depth=1),
        linear("two-inner-one-product", 8, 6, 4, depth=2, execution="one_product", thorough=True),
        linear("two-inner-two-products", 6, 8, 4, depth=2, execution="two_products", thorough=True),
        linear("one-product", 6, 8, 4, execution="one_product"),
    )


@pytest.mark.parametrize("execution", FactorizedLinear.executions)
def test_it_takes_any_number_of_leading_dimensions(execution: str) -> None:
    layer = FactorizedLinear(6, 5, 3, execution=execution, dtype=torch.float64)
    for leading in [(), (2,), (2, 3), (2, 3, 4), (0,), (0, 3)]:
        x = torch.randn(*leading, 6, dtype=torch.float64)
        assert layer(x).shape == (*leading, 5)
        assert error(layer(x), layer.to_dense()(x)) < 1e-12


def test_an_input_of_another_width_is_refused() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        FactorizedLinear(6, 5, 3)(torch.randn(2, 7))
