"""Ranks by what they cost the outputs: ``calibration=fz.Calibrated(batches)`` of ``fz.plan``."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import factorized as fz
from factorized.nn.moments import InputMoments
from factorized.planning.spectrum import noise_spectrum
from tests.models.unchanged import unchanged
from tests.planning.models_for_planning import ConvNet, Mlp, TiedReader


class Branches(nn.Module):
    """Two equal layers side by side, of which one reads inputs of few directions and one counts little."""

    def __init__(self, importance: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.importance = nn.Linear(32, 32), nn.Linear(32, 32), importance

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([self.left(x), self.importance * self.right(y)], dim=-1)


def narrow(samples: int, directions: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(samples, directions, generator=generator) @ torch.randn(directions, 32, generator=generator)


def ranks(plan: fz.Plan) -> dict[str, Any]:
    return {entry.name: entry.rank for entry in plan.layers}


WHOLE: dict[str, Any] = {"keep_first_and_last": False, "allocate": "spectrum"}


def test_ranks_go_where_outputs_need_them_and_not_where_weights_are_large() -> None:
    model, x = Branches(), torch.randn(200, 32)
    with torch.no_grad():
        model.left.weight *= 3
    batches = [((narrow(200, 4), x), None)]
    bare = fz.plan(model, ratio=0.4, **WHOLE)
    ours = fz.plan(model, ratio=0.4, calibration=fz.Calibrated(batches), **WHOLE)
    assert ranks(bare)["left"] > ranks(bare)["right"]
    assert ranks(ours)["left"] == 4  # which keep its outputs whole
    assert ranks(ours)["right"] > ranks(bare)["right"]


def test_the_scale_of_outputs_does_not_matter_without_a_loss() -> None:
    model, batches = Branches(), [((torch.randn(200, 32), torch.randn(200, 32)), None)]
    before = ranks(fz.plan(model, ratio=0.6, calibration=fz.Calibrated(batches), **WHOLE))
    with torch.no_grad():
        model.left.weight *= 100
    assert ranks(fz.plan(model, ratio=0.6, calibration=fz.Calibrated(batches), **WHOLE)) == before
    assert ranks(fz.plan(model, ratio=0.6, **WHOLE))["right"] < min(before.values())


def test_small_outputs_count_in_full_whatever_the_default_type() -> None:
    model = Branches()
    with torch.no_grad():
        model.left.weight *= 1e-5
    given = fz.Calibrated([((torch.randn(200, 32), torch.randn(200, 32)), None)])
    expected = ranks(fz.plan(model, ratio=0.6, calibration=given, **WHOLE))
    torch.set_default_dtype(torch.float16)
    try:
        found = ranks(fz.plan(model, ratio=0.6, calibration=given, **WHOLE))
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == expected


def test_a_loss_gives_ranks_to_the_layers_that_change_it() -> None:
    model = Branches(importance=0.3)
    batches = [((torch.randn(200, 32), torch.randn(200, 32)), torch.randn(200, 64)) for _ in range(2)]
    even = ranks(fz.plan(model, ratio=0.4, calibration=fz.Calibrated(batches), **WHOLE))
    ours = ranks(fz.plan(model, ratio=0.4, calibration=fz.Calibrated(batches, loss=F.mse_loss), **WHOLE))
    assert abs(even["left"] - even["right"]) <= 2
    assert ours["left"] > 1.5 * ours["right"]
    lost = {
        name: (
            fz.factorize(copy.deepcopy(model), fz.plan(model, ratio=0.4, calibration=given, **WHOLE))(*batches[0][0])
            - model(*batches[0][0])
        )
        .square()
        .mean()
        for name, given in {"even": fz.Calibrated(batches), "loss": fz.Calibrated(batches, loss=F.mse_loss)}.items()
    }
    assert lost["loss"] < lost["even"]


def test_the_effect_on_the_loss_does_not_depend_on_how_scale_is_split_between_layers() -> None:
    model, x = Mlp(), torch.randn(150, 20)
    given = fz.Calibrated([(x, torch.randint(5, (150,)))], loss=F.cross_entropy)
    before = ranks(fz.plan(model, ratio=0.5, allocate="spectrum", calibration=given))
    with torch.no_grad():
        for parameter in model.wide.parameters():
            parameter *= 50
        model.square.weight /= 50
    assert ranks(fz.plan(model, ratio=0.5, allocate="spectrum", calibration=given)) == before


@pytest.mark.parametrize("loss", [None, F.cross_entropy])
@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("ratio", [0.3, 0.55, 0.8])
def test_a_ratio_is_met_to_one_step_and_never_exceeded(ratio: float, multiple: int, loss: Any) -> None:
    model = Mlp()
    given = fz.Calibrated([(torch.randn(150, 20), torch.randint(5, (150,)))], loss=loss)
    made = fz.plan(model, ratio=ratio, allocate="spectrum", calibration=given, multiple_of=multiple)
    assert made.params_after <= ratio * made.params
    steps = [multiple * sum(entry.shape) for entry in made.layers]
    assert made.params_after > ratio * made.params - min(steps)
    assert all(entry.rank % multiple == 0 for entry in made.layers)


@pytest.mark.parametrize("size", [None, 1])
def test_convolutions_and_several_passes_choose_alike(size: int | None) -> None:
    torch.manual_seed(0)
    model, x, y = ConvNet(), torch.randn(40, 3, 16, 16), torch.randint(10, (40,))
    given = fz.Calibrated([(x, y)], loss=F.cross_entropy, layers_per_pass=size)
    made = fz.plan(model, ratio=0.5, allocate="spectrum", calibration=given)
    once = fz.plan(model, ratio=0.5, allocate="spectrum", calibration=fz.Calibrated([(x, y)], loss=F.cross_entropy))
    assert ranks(made) == ranks(once)
    assert len(set(ranks(made).values())) > 1


@pytest.mark.filterwarnings("ignore:init=Calibrated")
@pytest.mark.parametrize("samples", [20, 200], ids=["fewer than directions", "enough"])
@pytest.mark.parametrize("made", [fz.plan, fz.factorize])
def test_no_moments_are_held_while_the_batches_run_again(
    made: Callable[..., Any], samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    held: list[int] = []

    class Counted(InputMoments):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            alive.add(self)

    class Watched(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            held.append(sum(one.samples > 0 for one in alive))
            return super().__iter__()

    monkeypatch.setattr("factorized.planning.calibration.InputMoments", Counted)
    model, x = nn.Sequential(*(nn.Linear(48, 48) for _ in range(4))), torch.randn(samples, 48)
    given = fz.Calibrated(Watched([(x, x)]), layers_per_pass=1, loss=F.mse_loss)
    made(model, ratio=0.5, **WHOLE, **({"calibration": given} if made is fz.plan else {"init": given}))
    assert held == [0] * (4 if made is fz.plan else 8)


def test_energy_is_that_of_the_outputs() -> None:
    model = Branches()
    batches = [((narrow(200, 4), torch.randn(200, 32)), None)]
    options: dict[str, Any] = {"energy": 0.999, "keep_first_and_last": False}
    with pytest.raises(ValueError, match="leaves every layer"):  # of bare weights, all ranks are needed
        fz.plan(model, **options)
    ours = fz.plan(model, calibration=fz.Calibrated(batches), **options)
    assert ranks(ours) == {"left": 4}
    factorized = fz.factorize(copy.deepcopy(model), init=fz.Calibrated(batches), **options)
    assert factorized.left.rank == 4


def test_factorize_chooses_ranks_by_the_calibration_it_initializes_with() -> None:
    model, given = Mlp(), fz.Calibrated([torch.randn(300, 20) * torch.logspace(0, -3, 20)])
    made = fz.plan(model, ratio=0.5, allocate="spectrum", calibration=given)
    factorized = fz.factorize(copy.deepcopy(model), ratio=0.5, allocate="spectrum", init=given)
    assert {name: factorized.get_submodule(name).rank for name in ranks(made)} == ranks(made)
    assert ranks(made) != ranks(fz.plan(model, ratio=0.5, allocate="spectrum"))


@pytest.mark.filterwarnings("ignore:init=Calibrated")
def test_layers_that_share_a_weight_add_up_their_effects() -> None:
    model, ids = TiedReader(), torch.randint(200, (64, 8))
    given = fz.Calibrated([(ids, ids)], loss=lambda out, ids: F.cross_entropy(out.flatten(0, -2), ids.flatten()))
    made = fz.plan(model, ratio=0.5, calibration=given, **WHOLE)
    assert len({entry.rank for entry in made.layers if entry.tied_to or entry.name in ("tokens", "output")}) == 1


def test_planning_by_a_loss_leaves_gradients_modes_and_frozen_parameters_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(16, 16), nn.Linear(16, 3))
    model[3].requires_grad_(False)
    model(torch.randn(4, 8)).sum().backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    given = fz.Calibrated([(torch.randn(40, 8), torch.randint(3, (40,)))], loss=F.cross_entropy)
    with torch.no_grad(), unchanged(model):
        fz.plan(model, ratio=0.8, calibration=given, **WHOLE)
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, False, True, True]
    assert all(module.training and not module._forward_hooks for module in model.modules())
    torch.testing.assert_close([None if p.grad is None else p.grad for p in model.parameters()], gradients)


class Block(nn.Module):
    """Three layers, of which the second can be checkpointed."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(20, 40), nn.Linear(40, 40), nn.Linear(40, 5)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        second = (
            self.second if self.reentrant is None else partial(checkpoint, self.second, use_reentrant=self.reentrant)
        )
        out: Tensor = self.last(F.relu(second(x)))
        return out


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_layer_that_a_checkpoint_runs_again_counts_once(reentrant: bool) -> None:
    torch.manual_seed(0)
    given = fz.Calibrated([(torch.randn(150, 20), torch.randint(5, (150,)))], loss=F.cross_entropy)
    plain, ours = (fz.plan(Block(which), ratio=0.5, calibration=given, **WHOLE) for which in (None, reentrant))
    assert ranks(ours) == ranks(plain)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.also = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.also(self.used(x))
        return out


@pytest.mark.parametrize("loss", [None, F.mse_loss])
def test_layers_that_never_run_are_named_and_count_by_their_weights(loss: Any) -> None:
    given = fz.Calibrated([(torch.randn(60, 24), torch.randn(60, 24))], loss=loss)
    with pytest.warns(UserWarning, match="no batch reaches unused .* spectra of the bare weights") as caught:
        made = fz.plan(Unused(), ratio=0.6, calibration=given, **WHOLE)
    assert caught[0].filename == __file__
    assert all(1 < entry.rank < 12 for entry in made.layers)
    assert len(made.layers) == 3


@pytest.mark.parametrize("rounded", [False, True])
def test_layers_of_constant_inputs_are_named_and_count_by_their_weights_not_by_rounding(rounded: bool) -> None:
    x, row = torch.randn(60, 32), torch.rand(32)
    y = row.repeat(60, 1)
    if rounded:
        y[::2, :4] = y[::2, :4].nextafter(torch.tensor(torch.inf))  # a single direction, by the last bit
    given = fz.Calibrated([((a, b), None) for a, b in zip(x.split(20), y.split(20), strict=True)])
    with pytest.warns(
        UserWarning, match=r"the outputs of right are constant on the batches, so .* bare weights"
    ) as caught:
        made = fz.plan(Branches(), ratio=0.6, calibration=given, **WHOLE)
    assert caught[0].filename == __file__
    assert ranks(made)["right"] >= 7


@pytest.mark.parametrize("loss", [None, F.cross_entropy])
def test_where_no_layer_runs_ranks_go_by_the_bare_weights(loss: Any) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.lstm, self.head = nn.LSTM(24, 24, 2, batch_first=True), nn.Linear(24, 5)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.lstm(x)[0][:, -1])
            return out

    model = Recurrent()
    with torch.no_grad():
        model.lstm.weight_hh_l0.copy_(narrow(96, 2)[:, :24])
    given = fz.Calibrated([(torch.randn(30, 4, 24), torch.randint(5, (30,)))], loss=loss)
    with pytest.warns(UserWarning, match=r"no batch reaches lstm\.weight_ih_l0, .* spectra of the bare weights"):
        made = fz.plan(model, ratio=0.5, calibration=given, allocate="spectrum")
    found = ranks(made)
    assert found.pop("lstm.weight_hh_l0") <= 2
    assert len(found) == 3
    assert max(found.values()) - min(found.values()) <= 1  # of drawn weights that are alike


@pytest.mark.filterwarnings("ignore:init=Calibrated")
def test_heads_that_are_cut_count_by_their_weights() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    given = fz.Calibrated([torch.randn(30, 6, 32)])
    made = fz.plan(model, ratio=0.7, attention="heads", calibration=given, **WHOLE)
    assert made.attention
    assert made.layers
    assert made.params_after <= 0.7 * made.params


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 0.5, "calibration": fz.Calibrated([])}, 'for allocate="spectrum" or energy=; give one of them'),
        (
            {"ratio": 0.5, "allocate": "spectrum", "calibration": [torch.randn(4, 20)]},
            r"calibration must be fz\.Calibrated\(batches\), got list",
        ),
        ({"ratio": 0.5, "allocate": "spectrum", "calibration": fz.Calibrated([])}, "batches holds no examples"),
        (
            {"ratio": 0.5, "allocate": "spectrum", "calibration": fz.Calibrated([torch.randn(4, 7)])},
            r"batch 0 of Calibrated\(batches\) does not run through Mlp",
        ),
        (
            {"ratio": 0.5, "allocate": "spectrum", "calibration": fz.Calibrated([torch.full((4, 20), torch.inf)])},
            r"its inputs on the batches of Calibrated hold NaN or infinite values",
        ),
    ],
)
def test_a_wrong_calibration_says_what_is_expected(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fz.plan(Mlp(), **options)


def test_noise_is_what_is_lost_over_what_is_kept() -> None:
    assert noise_spectrum([6.0, 3.0, 1.0]) == pytest.approx([0.0, 10 * (4 / 6 - 1 / 9), 10 * (1 / 9)])
    assert noise_spectrum([0.0, 0.0]) == [0.0, 0.0]
    small = [1000.0, 1e-3, 1e-3]  # little is lost: the same as the spectrum
    assert noise_spectrum(small)[1:] == pytest.approx(small[1:], rel=1e-3)
