"""Ranks rounded to multiples, asked for or unasked, never exceed a budget."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import factorized as fz
from tests.planning.models_for_planning import EXAMPLES, Mlp
from tests.planning.real_sizes import real_size


def ranks(made: fz.Plan) -> dict[str, Any]:
    return {entry.name: entry.rank for entry in made.selected}


@pytest.mark.parametrize("multiple", [2, 4, 8])
@pytest.mark.parametrize("allocate", ["uniform", "spectrum"])
@settings(max_examples=20)
@given(ratio=st.floats(0.45, 0.95))
def test_a_ratio_is_met_to_one_multiple_and_never_exceeded(multiple: int, allocate: str, ratio: float) -> None:
    made = fz.plan(Mlp(), ratio=ratio, multiple_of=multiple, allocate=allocate)
    assert made.ratio <= ratio
    assert all(rank % multiple == 0 for rank in ranks(made).values())
    cheapest = min(multiple * (entry.shape[0] + entry.shape[1]) for entry in made.selected)
    dense = [entry for entry in made.entries if entry.reason and "would grow" in entry.reason]
    assert made.params_after > ratio * made.params - max(cheapest, 2 * 24 * 96 if dense else 0)


def test_macs_are_spent_in_multiples_too() -> None:
    made = fz.plan(Mlp(), macs=0.6, example_input=EXAMPLES[Mlp], multiple_of=4)
    assert made.macs is not None
    assert 0.5 < (made.macs_after or 0) / made.macs <= 0.6
    assert all(rank % 4 == 0 for rank in ranks(made).values())


def test_energy_is_rounded_up() -> None:
    torch.manual_seed(0)
    model = Mlp()
    exact, rounded = (ranks(fz.plan(model, energy=0.5, multiple_of=m)) for m in (1, 4))
    assert exact == ranks(fz.plan(model, energy=0.5))
    assert rounded == {name: ceil(rank / 4) * 4 for name, rank in exact.items()}
    assert rounded != exact


@pytest.mark.parametrize(
    ("budget", "expected"), [({"rank": 17}, 16), ({"rank": 19}, 20), ({"rank_scale": 0.23}, 12), ({"rank": 1}, 4)]
)
def test_a_rank_and_a_rank_scale_are_exact_unless_a_multiple_is_asked_for(budget: Any, expected: int) -> None:
    assert ranks(fz.plan(Mlp(), **budget, multiple_of=4, include=["wide"]))["wide"] == expected
    assert ranks(fz.plan(Mlp(), **budget, include=["wide"]))["wide"] == budget.get("rank", round(0.23 * 48))


def test_an_overcomplete_rank_is_rounded_up_from_full() -> None:
    made = fz.plan(Mlp(), fz.Overcomplete("wide"), rank_scale=1, multiple_of=32)
    assert ranks(made) == {"wide": 64, "square": 96, "narrow": 32}


def test_a_layer_too_small_for_the_multiple_keeps_its_ranks() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(200, 200), nn.Linear(16, 16), nn.Linear(8, 8))
    assert ranks(fz.plan(model, rank=5, multiple_of=16)) == {"1": 16, "2": 5}
    assert ranks(fz.plan(model, ratio=0.2, multiple_of=16))["1"] == 16


@pytest.mark.parametrize("scheme", [fz.TensorTrain(), fz.Monarch()])
def test_a_multiple_is_for_products(scheme: Any) -> None:
    with pytest.raises(ValueError, match=r"multiple_of= rounds the ranks of LowRank and Overcomplete, got "):
        fz.plan(Mlp(), scheme, ratio=0.5, multiple_of=4)


@pytest.mark.parametrize("wrong", [0, -8, 2.5, True])
def test_a_wrong_multiple_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="multiple_of must be a whole number of at least 1"):
        fz.plan(Mlp(), ratio=0.5, multiple_of=wrong)


@pytest.mark.parametrize("name", ["llama-long", "bert", "vit", "mistral", "qwen2"])
@pytest.mark.parametrize("ratio", [0.55, 0.7])
def test_ranks_of_wide_layers_are_rounded_unasked_where_little_is_left_unspent(name: str, ratio: float) -> None:
    model = real_size(name)
    made, exact = fz.plan(model, ratio=ratio), fz.plan(model, ratio=ratio, multiple_of=1)
    assert ratio * 0.994 < made.ratio <= ratio
    before = ranks(exact)
    for entry in made.selected:
        if min(entry.shape) >= 512 and before.get(entry.name, 0) >= 64:
            assert entry.rank % 8 == 0
            assert abs(entry.rank - before[entry.name]) <= 64
    assert any(rank % 8 for rank in before.values())


def test_ranks_are_not_rounded_unasked_where_few_layers_would_leave_much_unspent() -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 10))
    for ratio in (0.61, 0.73):
        assert ranks(fz.plan(model, ratio=ratio)) == ranks(fz.plan(model, ratio=ratio, multiple_of=1))


def test_a_convolution_is_not_rounded_unasked() -> None:
    model = nn.Sequential(*(nn.Conv2d(512, 512, 3) for _ in range(20)))
    assert ranks(fz.plan(model, ratio=0.3)) == ranks(fz.plan(model, ratio=0.3, multiple_of=1))


def test_narrow_layers_beside_rounded_ones_keep_the_ranks_they_had() -> None:
    wide, narrow = (nn.Sequential(*(nn.Linear(side, side) for _ in range(12))) for side in (768, 300))
    model = nn.Sequential(nn.Linear(8, 8), wide, narrow, nn.Linear(8, 8))
    for ratio in (0.31, 0.5):
        made, exact = fz.plan(model, ratio=ratio), ranks(fz.plan(model, ratio=ratio, multiple_of=1))
        assert ratio * 0.99 < made.ratio <= ratio
        for name, rank in ranks(made).items():
            assert rank % 8 == 0 if name.startswith("1.") else rank == exact[name]
