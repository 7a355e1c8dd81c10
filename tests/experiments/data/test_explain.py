from __future__ import annotations

import pytest
from torch import nn

import factorized as fz
from factorized.experiments.data.explain import place_and_reason


def test_a_failure_inside_the_library_is_placed_at_the_users_line_that_called_it() -> None:
    with pytest.raises(ValueError, match="rank") as raised:
        _users_function()
    assert place_and_reason(raised.value).startswith(f"at {__file__}:")


def _users_function() -> None:
    fz.plan(nn.Sequential(nn.Linear(8, 8)), rank=-1)
