from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import factorized as fz


class Block(nn.Sequential):
    """A container of a type of its own."""


class SomeAttention(nn.Sequential):
    """Attention by its name."""


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 32),
        Block(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)),
        nn.ModuleDict({"left": nn.Linear(32, 32), "right": nn.Conv1d(32, 32, 1)}),
        nn.Linear(32, 8),
    )


@pytest.mark.parametrize(
    ("include", "selected"),
    [
        (["1"], ["1.0", "1.2"]),
        (["1.0"], ["1.0"]),
        (["*.2"], ["1.2"]),
        (["[12]"], ["1.0", "1.2", "2.left", "2.right"]),
        (["*left"], ["2.left"]),
        ([Block], ["1.0", "1.2"]),
        ([nn.ModuleDict], ["2.left", "2.right"]),
        ([nn.Conv1d, "1.2"], ["1.2", "2.right"]),
        (["*"], ["1.0", "1.2", "2.left", "2.right"]),
    ],
)
def test_names_globs_and_types_stand_for_layers_and_for_containers(include: list[Any], selected: list[str]) -> None:
    assert [entry.name for entry in fz.plan(model(), rank=2, include=include).selected] == selected
    others = [name for name in ("1.0", "1.2", "2.left", "2.right") if name not in selected]
    if others:
        assert [entry.name for entry in fz.plan(model(), rank=2, exclude=include).selected] == others


def test_wrong_patterns_are_refused_before_they_are_matched_against_attention() -> None:
    host = nn.Sequential(nn.Linear(8, 8), SomeAttention(nn.Linear(8, 24), nn.Linear(8, 8)), nn.Linear(8, 8))
    for attention in ("layers", "heads", False):
        with pytest.raises(ValueError, match="include must be a list of names, globs or module types"):
            fz.plan(host, rank=2, include=[3], attention=attention)  # type: ignore[list-item, arg-type]
