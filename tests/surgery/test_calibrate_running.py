"""``fz.Calibrated``: how models run on batches, in parts or once, compiled or not, and what is left as it was."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.nn.layer import FactorizedLayer
from factorized.nn.moments import InputMoments
from tests.surgery.test_calibrate import colored, convolutions, images


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: Tensor, labels: Tensor | None = None) -> Tensor:
        out: Tensor = self.b(torch.relu(self.a(x)) * scale)
        return out


class InHalf(nn.Module):
    """A layer that its model runs under autocast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(20, 12)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("rounded", ["by autocast", "by a setting of torch"])
def test_moments_are_not_rounded_as_the_products_of_a_model_are(rounded: str) -> None:
    dense, x = InHalf(), colored(400, 20)[0].float() + 4
    layer, setting = dense.layer, torch.backends.mkldnn.matmul
    collected = InputMoments(layer, centered=True)
    before = setting.fp32_precision
    with layer.register_forward_pre_hook(collected, with_kwargs=True):
        if rounded == "by autocast":
            dense(x)
        else:
            setting.fp32_precision = "bf16"
            try:
                layer(x)
            finally:
                setting.fp32_precision = before
    around = x.double() - x.double().mean(0)
    torch.testing.assert_close(collected.moment.sums[0], around.mT @ around, rtol=0, atol=1e-12 * 400)


def test_batches_are_tensors_tuples_with_labels_or_dicts() -> None:
    x, scale, labels = torch.randn(40, 6), torch.rand(40, 1), torch.zeros(40)
    forms: list[Any] = [
        ((x, scale), labels),
        [(x, scale), labels],
        {"x": x, "scale": scale, "labels": labels},
        ({"x": x, "scale": scale}, labels),
    ]
    dense = TwoInputs()
    models = [
        fz.factorize(copy.deepcopy(dense), rank=2, keep_first_and_last=False, init=fz.Calibrated([form]))
        for form in forms
    ]
    spectral = fz.factorize(copy.deepcopy(dense), rank=2, keep_first_and_last=False)
    for model in models[1:]:
        torch.testing.assert_close(model.state_dict(), models[0].state_dict())
    assert not torch.allclose(models[0].b.weight, spectral.b.weight)


def test_running_leaves_modes_statistics_gradients_and_hooks_as_they_were() -> None:
    model = convolutions().train()
    model[5].eval()
    before = {key: value.clone() for key, value in model[1].state_dict().items()}
    tracked: list[bool] = []
    watching = model[9].register_forward_hook(lambda layer, inputs, output: tracked.append(output.requires_grad))
    random = torch.get_rng_state()
    fz.factorize(model, rank=4, init=fz.Calibrated([images()]), exclude=["9"])
    watching.remove()
    assert tracked == [False]
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model] == [True] * 5 + [False] + [True] * 4
    torch.testing.assert_close(dict(model[1].state_dict()), before)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_several_passes_give_what_one_pass_gives_and_hold_few_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    from factorized.planning import calibration

    watched: list[int] = []
    collecting = calibration.collecting
    monkeypatch.setattr(
        calibration, "collecting", lambda layers, others: watched.append(len(layers)) or collecting(layers, others)
    )
    dense, plan = convolutions(), fz.plan(convolutions(), rank=3, keep_first_and_last=False, exclude=["9"])
    one, several = (
        fz.factorize(copy.deepcopy(dense), plan, init=fz.Calibrated([images()], layers_per_pass=size))
        for size in (None, 2)
    )
    assert watched == [3, 2, 1]
    torch.testing.assert_close(one.state_dict(), several.state_dict())


@pytest.mark.parametrize(("samples", "batches"), [(40, 3), (48, 3), (49, 4)])
@pytest.mark.parametrize("form", [lambda x: x, lambda x: (x,), lambda x: {"input": x}], ids=["tensor", "tuple", "dict"])
def test_samples_bound_an_iterator_that_never_ends(form: Callable[[Tensor], Any], samples: int, batches: int) -> None:
    taken = 0

    def endless() -> Iterator[Any]:
        nonlocal taken
        for _ in itertools.count():
            taken += 1
            yield form(torch.randn(16, 20))

    fz.factorize(
        nn.Sequential(nn.Linear(20, 16)),
        rank=3,
        keep_first_and_last=False,
        init=fz.Calibrated(endless(), samples=samples),
    )
    assert taken == batches


@pytest.mark.filterwarnings("ignore:init=Calibrated")
def test_heads_that_are_cut_stay_spectral() -> None:
    dense = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True))
    plan = fz.plan(dense, ratio=0.6, attention="heads", keep_first_and_last=False)
    assert plan.attention
    spectral, ours = (
        fz.factorize(copy.deepcopy(dense), plan, init=init)
        for init in ("spectral", fz.Calibrated([torch.randn(20, 6, 16)]))
    )
    torch.testing.assert_close(ours[0].self_attn.state_dict(), spectral[0].self_attn.state_dict())
    assert not torch.allclose(ours[0].linear1.weight, spectral[0].linear1.weight)


def _wrapped(model: nn.Module) -> nn.Module:
    compiled: Any = torch.compile(model, backend="eager")
    return compiled


def _by_its_forward(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    return model


def _in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("compiled", [_wrapped, _by_its_forward, _in_place])
def test_a_compiled_model_that_ran_before_is_calibrated_like_any_other(
    compiled: Callable[[nn.Module], nn.Module],
) -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    batches = [torch.randn(64, 12)]
    expected = fz.factorize(copy.deepcopy(dense), rank=3, init=fz.Calibrated(batches))
    model = compiled(dense)
    with torch.no_grad():
        model(batches[0])
    found = fz.factorize(model, rank=3, init=fz.Calibrated(batches))
    assert isinstance(dense[2], FactorizedLayer)
    torch.testing.assert_close(dense.state_dict(), expected.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(found(batches[0]), expected(batches[0]))


def test_progress_counts_every_layer_once() -> None:
    seen: list[tuple[int, int]] = []
    fz.factorize(
        convolutions(),
        rank=3,
        init=fz.Calibrated([images()]),
        keep_first_and_last=False,
        progress=lambda done, total: seen.append((done, total)),
        exclude=["9"],
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]
