"""What LAMB refuses: settings of the wrong kind, and gradients it has no update for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import factorized as fz


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"betas": (0.9,)}, r"betas must be two numbers, got \(0\.9,\)"),
        ({"betas": 0.9}, r"betas must be two numbers, got 0\.9"),
        ({"betas": None}, "betas must be two numbers, got None"),
        ({"lr": torch.tensor(-0.1)}, r"lr must be a number of at least 0, got -0\.1"),
        ({"lr": torch.tensor(float("nan"))}, "lr must be a number of at least 0, got nan"),
        ({"lr": torch.ones(2)}, r"lr must be one number, got a tensor of shape \(2,\)"),
    ],
)
def test_a_wrong_setting_says_what_is_allowed(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fz.Lamb([nn.Parameter(torch.ones(3))], **settings)


def test_a_sparse_gradient_says_what_to_do_and_leaves_the_state_clean() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = fz.Lamb(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="sparse gradient, which LAMB cannot use; pass sparse=False"):
        optimizer.step()
    assert not optimizer.state


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="real parameters, got complex"):
        fz.Lamb([nn.Parameter(torch.ones(3, dtype=torch.complex64))])


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_learning_rate_of_any_one_element_shape_moves_a_parameter_without_dimensions(shape: tuple[int, ...]) -> None:
    weight = nn.Parameter(torch.tensor(2.0))
    weight.grad = torch.tensor(4.0)
    fz.Lamb([weight], lr=torch.full(shape, 0.1), weight_decay=0.0).step()
    assert weight.shape == ()
    assert weight.item() == pytest.approx(1.8)


def test_a_group_that_is_refused_is_not_kept() -> None:
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = fz.Lamb([one])
    with pytest.raises(ValueError, match="lr must be a number of at least 0, got -1"):
        optimizer.add_param_group({"params": [other], "lr": -1})
    optimizer.add_param_group({"params": [other], "lr": 0.1})
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.1]
