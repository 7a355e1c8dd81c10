from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorized as fz


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        fz.FactorizedConv2d(4, 6, 3, 2, groups=2),
        nn.Flatten(),
        fz.FactorizedLinear(24, 5, 3, depth=2),
        fz.FactorizedLinear(5, 3, 2),
    ).double()


def products(model: nn.Module) -> dict[str, Tensor]:
    return {name: module.weight.detach().clone() for name, module in model.named_children() if hasattr(module, "rank")}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(8, 4, 4, 4, dtype=torch.float64, generator=generator)).square().mean().backward()
    optimizer.step()


def snapshot(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def unchanged(model: nn.Module, before: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(snapshot(model), before, strict=True))


def test_it_records_the_norm_of_every_product() -> None:
    model = build()
    recorded = fz.NormMatcher(model).record()
    assert recorded == pytest.approx({name: W.norm().item() for name, W in products(model).items()}, rel=1e-12)
    assert list(recorded) == ["0", "2", "3"]


def test_matching_changes_the_norms_and_keeps_the_directions() -> None:
    model = build()
    before, biases = products(model), [model[0].bias.clone(), model[2].bias.clone()]
    wanted = {"0": 0.3, "2": 7.0, "3": 1e-3}
    matcher = fz.NormMatcher(model)
    matcher.match(wanted)
    assert matcher.record() == pytest.approx(wanted, rel=1e-12)
    for name, W in products(model).items():
        torch.testing.assert_close(W, before[name] / before[name].norm() * wanted[name], rtol=1e-10, atol=1e-14)
    assert torch.equal(model[0].bias, biases[0])
    assert torch.equal(model[2].bias, biases[1])


def test_half_types_are_recorded_in_float32() -> None:
    half = fz.NormMatcher(build().bfloat16()).record()
    whole = fz.NormMatcher(build().bfloat16().double()).record()
    assert half == pytest.approx(whole, rel=1e-5)


def test_matching_what_was_recorded_restores_the_norms() -> None:
    model = build()
    matcher = fz.NormMatcher(model)
    recorded = matcher.record()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.7)
    assert matcher.record()["0"] > 2 * recorded["0"]
    matcher.match(recorded)
    assert matcher.record() == pytest.approx(recorded, rel=1e-12)


def test_all_factors_of_a_product_are_rescaled_alike() -> None:
    model = build()
    layer = model[2]
    before = [factor.detach().clone() for factor in layer.factors]
    matcher = fz.NormMatcher(model)
    matcher.match({name: 16 * norm for name, norm in matcher.record().items()})
    assert len(before) == 4
    for factor, old in zip(layer.factors, before, strict=True):
        torch.testing.assert_close(factor.detach(), 2 * old, rtol=1e-12, atol=0)


def test_attached_it_takes_the_optimizers_direction_and_the_recorded_norm_every_step() -> None:
    torch.manual_seed(1)
    source, model = build(), build()
    source_optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
    fz.FrobeniusDecay(source, 0.5).attach(source_optimizer)
    recorder, recorded = fz.NormMatcher(source), []
    for seed in range(5):
        step(source, source_optimizer, seed)
        recorded.append(recorder.record())
    assert recorded[0] != pytest.approx(recorded[4], rel=1e-2)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    matcher = fz.NormMatcher(model).attach(optimizer, recorded)
    for seed in range(5):
        free = copy.deepcopy(model)
        step(free, torch.optim.SGD(free.parameters(), lr=0.1), seed)
        step(model, optimizer, seed)
        assert matcher.record() == pytest.approx(recorded[seed], rel=1e-12)
        assert matcher.record() != pytest.approx(fz.NormMatcher(free).record(), rel=1e-4)
        for name, W in products(free).items():
            expected = W / W.norm() * recorded[seed][name]
            torch.testing.assert_close(products(model)[name], expected, rtol=1e-10, atol=1e-13)
        assert torch.equal(model[3].bias, free[3].bias)


def test_more_steps_than_were_recorded_are_refused() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    matcher = fz.NormMatcher(model)
    matcher.attach(optimizer, [matcher.record()])
    step(model, optimizer, 0)
    with pytest.raises(ValueError, match="only 1 steps were recorded, and this is step 2"):
        step(model, optimizer, 1)


@pytest.mark.parametrize("fused", [False, True])  # a fused optimizer takes its step, and changes nothing
def test_a_step_that_a_gradient_scaler_skips_is_none_of_the_recorded(fused: bool) -> None:
    model = build().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    matcher = fz.NormMatcher(model)
    recorded = [{name: norm * factor for name, norm in matcher.record().items()} for factor in (2.0, 3.0)]
    matcher.attach(optimizer, recorded)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for factor in (math.inf, 1.0):
        optimizer.zero_grad()
        loss: Tensor = scaler.scale(model(torch.ones(8, 4, 4, 4)).square().mean() * factor)
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
    assert matcher.record() == pytest.approx(recorded[0], rel=1e-5)


def test_a_missing_name_is_named_and_nothing_changed() -> None:
    model = build()
    before = snapshot(model)
    with pytest.raises(ValueError, match=re.escape("norms must name every product of the model; '3' is missing")):
        fz.NormMatcher(model).match({"0": 1.0, "2": 1.0})
    assert unchanged(model, before)


def test_a_product_of_norm_zero_cannot_be_rescaled_and_nothing_is_changed() -> None:
    model = build()
    with torch.no_grad():
        model[3].U.zero_()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"^3: a product of norm 0 has no direction to rescale; nothing was changed"):
        fz.NormMatcher(model).match({"0": 1.0, "2": 1.0, "3": 1.0})
    assert unchanged(model, before)


def test_it_is_attached_once_and_detached_once() -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    matcher = fz.NormMatcher(model)
    recorded = [matcher.record()]
    with pytest.raises(ValueError, match=r"not attached to an optimizer; call attach\(optimizer, recorded\) first"):
        matcher.detach()
    matcher.attach(optimizer, recorded)
    with pytest.raises(ValueError, match=r"attached already; call detach\(\) first"):
        matcher.attach(optimizer, recorded)
    matcher.detach()
    step(model, optimizer, 0)
    assert matcher.record() != pytest.approx(recorded[0], rel=1e-6)
    matcher.attach(optimizer, recorded)  # starts from the first recorded norms again
    step(model, optimizer, 1)
    assert matcher.record() == pytest.approx(recorded[0], rel=1e-12)


def test_a_model_without_products_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Linear holds no products to match; call fz\.factorize first"):
        fz.NormMatcher(nn.Linear(3, 2))


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), "1", None])
def test_a_norm_that_is_none_is_named_and_nothing_changed(wrong: Any) -> None:
    model = build()
    before = snapshot(model)
    with pytest.raises(ValueError, match="the norm of '2' must be a finite number of at least 0"):
        fz.NormMatcher(model).match({"0": 1.0, "2": wrong, "3": 1.0})
    assert unchanged(model, before)


def test_frozen_factors_stay_and_the_others_make_up_for_it() -> None:
    model = build()
    model[0].U.requires_grad_(False)
    for factor in model[3].factors:
        factor.requires_grad_(False)
    before = [model[0].U.detach().clone(), *(factor.detach().clone() for factor in model[3].factors)]
    matcher = fz.NormMatcher(model)
    still = matcher.record()["3"]
    matcher.match({"0": 5.0, "2": 7.0, "3": 1.0})
    assert matcher.record() == pytest.approx({"0": 5.0, "2": 7.0, "3": still}, rel=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(before, [model[0].U, *model[3].factors], strict=True))


def tie_a_side(first: Any, second: Any) -> None:
    second.V = first.V


def tie_transposed(first: Any, second: Any) -> None:
    second.U, second.V = first.V, first.U


def tie_to_itself(first: Any, second: Any) -> None:
    first.V = first.U


@pytest.mark.parametrize("tie", [tie_a_side, tie_transposed, tie_to_itself])
def test_products_that_share_factors_are_all_matched(tie: Callable[[Any, Any], None]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(fz.FactorizedLinear(5, 5, 2) for _ in range(3))).double()
    tie(model[0], model[1])
    wanted = {"0": 3.0, "1": 3.0 if tie is tie_transposed else 0.2, "2": 7.0}
    matcher = fz.NormMatcher(model)
    matcher.match(wanted)
    assert matcher.record() == pytest.approx(wanted, rel=1e-12)


def test_a_factor_that_is_frozen_or_freed_later_is_noticed() -> None:
    model = build()
    matcher = fz.NormMatcher(model)
    wanted = dict.fromkeys(matcher.record(), 2.0)
    for trains in (True, False, True):
        model[2].U.requires_grad_(trains)
        before = model[2].U.detach().clone()
        wanted = {name: 1.5 * norm for name, norm in wanted.items()}
        matcher.match(wanted)
        assert matcher.record() == pytest.approx(wanted, rel=1e-12)
        assert torch.equal(before, model[2].U) is not trains


def test_under_autocast_norms_keep_their_digits() -> None:
    matcher = fz.NormMatcher(build().float())
    expected = matcher.record()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert matcher.record() == expected
