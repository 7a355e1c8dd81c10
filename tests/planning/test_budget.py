from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from factorized.formats.product import LowRank, Overcomplete
from factorized.formats.residual import Residual
from factorized.formats.scheme import Scheme
from factorized.planning.calibration import Calibrated
from factorized.planning.planner import plan
from factorized.surgery.describe import describe
from factorized.surgery.factorize import factorize
from factorized.surgery.truncate import truncate
from tests.planning.models_for_planning import EXAMPLES, ConvNet, Mlp, Reader

NAN, INFINITY = float("nan"), float("inf")
ONE_OF = "give exactly one of ratio=, rank_scale=, rank=, energy=, macs=, got "


@pytest.mark.parametrize(
    ("name", "number"), [("rank", np.int64(3)), ("ratio", np.float32(0.7)), ("energy", np.float64(0.5))], ids=str
)
def test_numbers_of_numpy_are_numbers(name: str, number: Any) -> None:
    torch.manual_seed(0)
    model = Mlp()
    expected = plan(model, **{name: number.item()})
    made = plan(model, **{name: number})
    assert made == expected
    assert json.dumps(made.to_dict()) == json.dumps(expected.to_dict())
    factorized = factorize(model, made)
    assert all(type(entry.rank) is int for entry in describe(truncate(factorized, rank=np.int64(2))).layers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, ONE_OF + "none"),
        ({"ratio": 0.5, "rank": 3}, ONE_OF + "ratio=0.5, rank=3"),
        ({"energy": 0.5, "rank_scale": 0.1}, ONE_OF + "rank_scale=0.1, energy=0.5"),
        ({"scheme": Overcomplete(), "ratio": 2.0, "rank_scale": 1.5}, ONE_OF + "ratio=2, rank_scale=1.5"),
        ({"ratio": 0}, "ratio=0 is not positive; ratio must be in (0, 1]"),
        ({"ratio": -0.1}, "ratio=-0.1 is not positive; ratio must be in (0, 1]"),
        ({"ratio": 1.5}, "ratio=1.5 is above 1; ratio must be in (0, 1]; use Overcomplete(...)"),
        ({"ratio": NAN}, "ratio must be a number, got nan"),
        ({"ratio": INFINITY}, "ratio must be a number, got inf"),
        ({"ratio": "0.5"}, "ratio must be a number, got '0.5'"),
        ({"ratio": True}, "ratio must be a number, got True"),
        ({"rank_scale": 0}, "rank_scale=0 is not positive; rank_scale must be above 0"),
        ({"rank_scale": NAN}, "rank_scale must be a number, got nan"),
        ({"rank": 0}, "rank must be a whole number of at least 1, got 0"),
        ({"rank": -3}, "rank must be a whole number of at least 1, got -3"),
        ({"rank": 2.5}, "rank must be a whole number of at least 1, got 2.5"),
        ({"energy": 0}, "energy=0 is not positive; energy must be in (0, 1]"),
        ({"energy": 1.1}, "energy=1.1 is above 1; energy must be in (0, 1]"),
        ({"macs": 0.5}, "macs= counts multiply-accumulates on an input: pass example_input= as well"),
        ({"macs": 1.1, "example_input": EXAMPLES[Mlp]}, "macs=1.1 is above 1; macs must be in (0, 1]"),
        ({"ratio": 0.5, "allocate": "greedy"}, 'allocate must be one of "uniform", "spectrum", got \'greedy\''),
        (
            {"rank": 3, "allocate": "spectrum"},
            'allocate="spectrum" spends ratio= or macs= on LowRank layers, got rank=3',
        ),
        ({"energy": 0.9, "allocate": "spectrum"}, 'allocate="spectrum" spends ratio= or macs='),
        (
            {"scheme": Overcomplete(), "ratio": 2.0, "allocate": "spectrum"},
            'allocate="spectrum" spends ratio= or macs=',
        ),
        ({"scheme": Overcomplete(), "energy": 0.9}, "energy=0.9 is for LowRank; Overcomplete takes ratio="),
        (
            {"scheme": Overcomplete(), "macs": 0.9, "example_input": EXAMPLES[Mlp]},
            "macs=0.9 is for schemes that compress; Overcomplete takes ratio=, rank_scale= or rank=, or none",
        ),
        ({"scheme": Overcomplete(), "rank_scale": 0.5}, "rank_scale=0.5 is below full rank; rank_scale must be at"),
        (
            {"scheme": Overcomplete(), "rank": 3},
            "wide: rank must be at least 48, full rank, for an overcomplete",
        ),
        ({"scheme": Overcomplete(), "ratio": 0.1}, "full rank everywhere, the lowest of Overcomplete, it still keeps"),
        ({"scheme": "svd", "ratio": 0.5}, "scheme must be one of LowRank(), Overcomplete(), TensorTrain(), Tucker(),"),
        ({"scheme": "tensor_train", "ratio": 0.5}, "got 'tensor_train'; make one: TensorTrain()"),
        (
            {"scheme": LowRank, "ratio": 0.5},
            "got <class 'factorized.formats.product.LowRank'>; make one: LowRank()",
        ),
        ({"scheme": 0.1}, "got 0.1; a budget has a name: ratio=0.1"),
        ({"scheme": Calibrated([]), "ratio": 0.5}, "; data are given as init= of fz.factorize, or calibration= of"),
        ({"ratio": 10}, "ratio=10 is above 1; for 10 %, ratio=0.1; ratio must be in (0, 1]"),
        ({"rank_scale": 5}, "rank_scale=5 leaves every layer of Mlp dense"),
        ({"ratio": 1}, "ratio=1 leaves every layer of Mlp dense"),
    ],
)
def test_a_wrong_budget_says_what_is_allowed(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        plan(Mlp(), **arguments)


@pytest.mark.parametrize(
    ("scheme", "arguments", "message"),
    [
        (LowRank(), {"rank": 10**15}, r"^wide: rank must be in 1\.\.48 for a 96x48 weight, got 1000000000000000"),
        (Overcomplete("wide"), {"rank": 10**15}, r"^wide: rank must be in 1\.\.48000 .*1000 times its full rank"),
        (LowRank(), {"rank": 10**400}, r"rank must be below 1e\+18, got a number of more than 18 digits"),
        (LowRank(), {"rank": -(10**5000)}, r"rank must be below 1e\+18, got a number of more than 18 digits"),
        (Overcomplete("wide"), {"rank_scale": 1e15}, r"rank_scale=1e\+15 is above 1000"),
    ],
)
def test_an_absurd_rank_is_refused_before_anything_is_built(scheme: Any, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(Mlp(), scheme, **arguments)


def test_a_rank_above_full_names_the_layer_its_shape_and_the_way_out() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.Sequential(nn.Conv2d(64, 64, 3)), nn.Linear(64, 10))
    with pytest.raises(
        ValueError, match=r"^1\.0: rank must be in 1\.\.192 for a 64x64x3x3 weight, got 400; use Overcomplete"
    ):
        plan(model, rank=400)
    assert plan(model, Overcomplete("wide"), rank=400).selected[0].rank == 400


def test_one_rank_is_given_to_every_layer_that_it_makes_smaller() -> None:
    made = plan(Mlp(), rank=20)
    assert {entry.name: entry.rank for entry in made.entries} == {
        "inlet": None,
        "wide": 20,  # 48·96 > 20·(48 + 96)
        "square": 20,
        "narrow": None,  # 96·24 < 20·(96 + 24)
        "outlet": None,
    }
    assert "would grow" in (made.entries[3].reason or "")


def test_a_rank_scale_gives_the_papers_ranks_whole_or_not() -> None:
    made = plan(ConvNet(), rank_scale=1 / 9)
    assert [entry.rank for entry in made.selected] == [round(32 * 3 / 9), round(16 * 5 / 9), round(64 / 9)]
    assert made.budget == "rank_scale=0.111111"


@pytest.mark.parametrize("model_type", [ConvNet, Mlp, Reader])
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_energy_keeps_the_share_and_no_rank_more(model_type: type[nn.Module], share: float) -> None:
    torch.manual_seed(0)
    model = model_type()
    made = plan(model, energy=share)
    assert made.selected
    for entry in made.selected:
        matrix = _matrices(model.get_submodule(entry.name).weight.double(), entry.format.shape.groups)
        energies = torch.linalg.svdvals(matrix).square().sum(0)
        kept = energies.cumsum(0) / energies.sum()
        assert kept[entry.rank - 1] >= share - 1e-6
        assert entry.rank == 1 or kept[entry.rank - 2] < share + 1e-6


def _matrices(weight: torch.Tensor, groups: int) -> torch.Tensor:  # (groups, rows, columns)
    weight = weight.unflatten(0, (groups, -1))
    return weight if weight.dim() == 3 else weight.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def test_energy_works_on_half_precision_weights() -> None:
    torch.manual_seed(0)
    model = Mlp()
    exact = [entry.rank for entry in plan(model, energy=0.5).entries]
    assert [entry.rank for entry in plan(model.bfloat16(), energy=0.5).entries] == exact


@pytest.mark.parametrize(
    ("value", "arguments"),
    [(NAN, {"energy": 0.5}), (INFINITY, {"energy": 0.5}), (NAN, {"ratio": 0.5, "allocate": "spectrum"})],
)
def test_weights_without_singular_values_are_named(value: float, arguments: dict[str, Any]) -> None:
    model = Mlp()
    model.square.weight.data[3, 4] = value
    with pytest.raises(ValueError, match="square: weight holds NaN or infinite values"):
        plan(model, **arguments)


@pytest.mark.parametrize("arguments", [{"energy": 0.5}, {"ratio": 0.5, "allocate": "spectrum"}])
def test_singular_values_are_not_to_be_had_on_the_meta_device(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="wide: singular values need weights, but the model is on the meta device"):
        plan(Mlp().to("meta"), **arguments)


@pytest.mark.parametrize("arguments", [{"ratio": 0.5}, {"rank_scale": 0.2}, {"rank": 4}, {"macs": 0.5}])
@pytest.mark.parametrize("model_type", [ConvNet, Mlp, Reader])
def test_a_model_on_the_meta_device_is_planned_like_a_real_one(
    model_type: type[nn.Module], arguments: dict[str, Any]
) -> None:
    example = EXAMPLES[model_type]
    arguments = {**arguments, "example_input": example, "keep_first_and_last": False}
    real = plan(model_type(), **arguments)
    assert plan(model_type().to("meta"), **arguments) == real
    assert real.selected


@pytest.mark.parametrize(
    ("scheme", "reason"), [(LowRank(), "would grow"), (Residual(), "rank=5 is above its full rank")]
)
def test_a_layer_of_a_lower_full_rank_stays_dense(scheme: Scheme, reason: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4), nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    made = plan(model, scheme, rank=5)
    assert [entry.rank for entry in made.entries] == [None, None, None, 5, None]
    assert all(reason in (made.entries[place].reason or "") for place in (1, 2))
    with pytest.raises(ValueError, match=r"^1: rank must be in 1\.\.4 for a 4x64 weight, got 65"):
        plan(model, scheme, rank=65)
