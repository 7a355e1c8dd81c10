"""What compression does to every layer, measured on one batch."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import factorized as fz
from factorized.experiments.compress.layers import (
    POINTS,
    differences,
    layer_calls,
    layer_rows,
    losses_alone,
    output_spectra,
)
from factorized.planning.calibration import Calibrated
from tests.planning.models_for_planning import Mlp, TiedReader

NAMES = ["wide", "square", "narrow"]


def test_a_layer_loses_by_itself_what_its_spectrum_says() -> None:
    torch.manual_seed(0)
    dense, x = Mlp(), torch.randn(200, 20)
    for layer in (dense.wide, dense.square):
        layer.register_parameter("bias", None)  # so that means count
    plan = fz.plan(dense, rank=9)
    calibration = Calibrated([x])
    spectra = output_spectra(dense, plan, calibration)
    model = fz.factorize(copy.deepcopy(dense), plan, init=calibration)
    alone = losses_alone(model, layer_calls(dense, NAMES, x))
    assert list(spectra) == list(alone) == NAMES
    for name, lost in alone.items():
        assert lost == pytest.approx(sum(spectra[name][9:]), rel=1e-3)
    assert all(module.training for module in dense.modules())


def test_differences_add_up_along_the_network_and_are_zero_where_nothing_changed() -> None:
    torch.manual_seed(0)
    dense, x = Mlp(), torch.randn(50, 20)
    calls = layer_calls(dense, NAMES, x)
    assert set(differences(copy.deepcopy(dense), calls, x).values()) == {0.0}
    model = fz.factorize(copy.deepcopy(dense), rank=4, include=["wide"])
    found = differences(model, calls, x)
    alone = losses_alone(model, calls)
    assert found["wide"] == pytest.approx(alone["wide"], rel=1e-5)
    assert found["square"] > 0 == alone["square"]


def test_outputs_that_are_compared_are_not_held() -> None:
    dense, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), torch.randn(1000, 64)
    calls = layer_calls(dense, [str(n) for n in range(8)], x)
    held: list[int] = []

    def count(*call: object) -> None:
        held.append(sum(type(one) is torch.Tensor and one.shape == x.shape for one in gc.get_objects()))

    for layer in dense:
        layer.register_forward_pre_hook(count)
    assert len(differences(dense, calls, x)) == 8
    assert max(held) - held[0] <= 1  # the output of the layer before


class InPlace(nn.Module):
    """Layers whose inputs and outputs are written to after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu_()
        x += self.second(x)
        return x


def test_code_that_writes_in_place_after_a_layer_does_not_change_what_it_lost() -> None:
    model, names = InPlace(), ["first", "second"]
    calls = layer_calls(model, names, torch.randn(50, 20))
    assert losses_alone(copy.deepcopy(model), calls) == {"first": 0.0, "second": 0.0}


def test_of_a_layer_that_is_called_twice_the_last_call_counts() -> None:
    model = nn.Sequential(*[nn.Linear(20, 20)] * 2)
    calls = layer_calls(model, ["0"], x := torch.randn(50, 20))
    torch.testing.assert_close(calls["0"].output, model(x).detach())
    assert differences(copy.deepcopy(model), calls, x) == losses_alone(model, calls) == {"0": 0.0}


def test_a_network_is_not_watched_any_more_after_its_calls_even_if_it_fails() -> None:
    model = Mlp()
    layer_calls(model, NAMES, torch.randn(2, 20))
    with pytest.raises(ValueError, match="a batch does not run through Mlp"):
        layer_calls(model, NAMES, torch.randn(2, 21))
    assert not any(module._forward_hooks for module in model.modules())


def test_layers_that_share_a_weight_share_a_spectrum_and_layers_that_never_run_have_none() -> None:
    model, ids = TiedReader(), torch.randint(200, (16, 8))
    plan = fz.plan(model, ratio=0.5, keep_first_and_last=False)
    leaders = {entry.name for entry in plan.layers if entry.tied_to is None}
    assert output_spectra(model, plan, Calibrated([ids])).keys() == leaders
    assert layer_calls(nn.Sequential(nn.Linear(2, 2)), ["missing"], torch.randn(1, 2)) == {}


def test_long_spectra_are_thinned_out_to_what_can_be_drawn() -> None:
    plan = fz.plan(Mlp(), rank=9)
    long, short = [float(n) for n in range(1000, 0, -1)], [3.0, 2.0, 1.0]
    rows = {row["name"]: row for row in layer_rows(plan, {"wide": long, "square": short})}
    assert rows["wide"]["spectrum"] == long[::5]
    assert len(rows["wide"]["spectrum"]) == POINTS
    assert (rows["wide"]["full_rank"], rows["wide"]["rank"]) == (1000, 9)
    assert rows["square"]["spectrum"] == short
    assert (rows["narrow"]["spectrum"], rows["narrow"]["full_rank"]) == (None, None)
