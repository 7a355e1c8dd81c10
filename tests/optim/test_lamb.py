from __future__ import annotations

import copy
import io
import pickle
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.optim.finite import StepGuard
from tests.optim.lamb_reference import Settings, draws, lamb, run

SHAPES = ((5, 3), (4,), (2, 3, 2))
START = draws(SHAPES, 1, seed=1)[0]
GRADIENTS = draws(SHAPES, 50)


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [nn.Parameter(start.clone().to(dtype)) for start in START]


def equal(one: Any, other: Any) -> bool:
    """Say whether two sets of parameters, or state dicts, are the same to the bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


SETTINGS = {
    "bare": Settings(bias_correction=False),
    "bias-correction": Settings(),
    "decay": Settings(weight_decay=0.3),
    "clipped-gradients": Settings(max_grad_norm=0.01, eps=1e-2),
    "gradients-too-small-to-clip": Settings(max_grad_norm=1e3, eps=1e-2),
    "clipped-trust": Settings(trust_clip=0.4),
    "all": Settings(0.05, (0.8, 0.95), 1e-3, 0.1, 0.5, True, 0.9),
    "all-uncorrected": Settings(0.05, (0.8, 0.95), 1e-3, 0.1, 0.5, False, 0.9),
    "no-momentum": Settings(betas=(0.0, 0.0)),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_it_equals_the_formula(settings: Settings) -> None:
    weights = parameters()
    run(fz.Lamb(weights, **asdict(settings)), weights, GRADIENTS[:20])
    for weight, expected in zip(weights, lamb(START, GRADIENTS[:20], settings), strict=True):
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_it_agrees_with_pytorch_optimizer(weight_decay: float, clip: float | None) -> None:
    import pytorch_optimizer as peer

    ours, theirs = parameters(), parameters()
    # Theirs adds eps to the norms too, never corrects the moments, and but for adam_debias divides lr by 1 - β₁ᵗ.
    common: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": weight_decay}
    mine = fz.Lamb(ours, **common, max_grad_norm=clip, bias_correction=False)
    clipping = {"pre_norm": clip is not None, "max_grad_norm": clip or 0.0}
    their = peer.Lamb(theirs, **common, **clipping, weight_decouple=False, adam_debias=True)
    run(mine, ours, GRADIENTS)
    run(their, theirs, GRADIENTS)
    assert max(weight.norm() for weight in ours) < peer.Lamb.clamp  # theirs clamps the norms of weights
    for weight, other, start in zip(ours, theirs, START, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-6, atol=1e-6)
        assert (weight - start).norm() > 0.1 * start.norm()


def test_the_trust_ratio_holds_without_weight_decay() -> None:
    for scale in (1e-3, 1.0, 1e3):
        weight = nn.Parameter(START[0] * scale)
        run(fz.Lamb([{"params": [weight], "weight_decay": 0.0}], lr=0.01), [weight], [[GRADIENTS[0][0]]])
        step = (weight.detach() - START[0] * scale).norm() / (START[0] * scale).norm()
        assert step.item() == pytest.approx(0.01, rel=1e-9)


def test_a_zero_weight_steps_with_ratio_1() -> None:
    weight = nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))
    gradient = draws([(4, 3)], 1)[0]
    run(fz.Lamb([weight], lr=0.01, eps=0.0), [weight], [gradient])
    torch.testing.assert_close(weight.detach(), -0.01 * gradient[0].sign(), rtol=1e-12, atol=0)


def test_a_zero_gradient_without_decay_moves_nothing() -> None:
    weights = parameters()
    run(fz.Lamb(weights, weight_decay=0.0), weights, [[torch.zeros_like(start) for start in START]])
    assert equal([weight.detach() for weight in weights], START)


def test_a_learning_rate_may_be_a_tensor() -> None:
    numbers, tensors = parameters(), parameters()
    rate = torch.tensor(0.02, dtype=torch.float64)
    run(fz.Lamb(numbers, lr=0.02), numbers, GRADIENTS[:1])
    optimizer = fz.Lamb(tensors, lr=rate)
    run(optimizer, tensors, GRADIENTS[:1])
    for number, tensor in zip(numbers, tensors, strict=True):
        torch.testing.assert_close(number, tensor, rtol=1e-12, atol=0)
    rate.zero_()
    before = [tensor.detach().clone() for tensor in tensors]
    run(optimizer, tensors, GRADIENTS[1:2])
    assert equal(before, [tensor.detach() for tensor in tensors])


def test_groups_have_their_own_settings() -> None:
    weights = parameters()
    own = [Settings(lr=0.1, weight_decay=0.2), Settings(lr=0.001, eps=1e-2, trust_clip=0.3)]
    groups = [{"params": weights[:1], **asdict(own[0])}, {"params": weights[1:], **asdict(own[1])}]
    run(fz.Lamb(groups, max_grad_norm=None), weights, GRADIENTS[:10])
    for weight, expected in zip(weights[:1], lamb(START, GRADIENTS[:10], own[0])[:1], strict=True):
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-12)
    for weight, expected in zip(weights[1:], lamb(START, GRADIENTS[:10], own[1])[1:], strict=True):
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-12)


def test_gradients_are_clipped_over_all_groups_and_left_as_they_are() -> None:
    weights = parameters()
    settings = Settings(max_grad_norm=0.1, eps=1e-2)
    optimizer = fz.Lamb([{"params": [weight]} for weight in weights], **asdict(settings))
    run(optimizer, weights, GRADIENTS[:3])
    for weight, expected in zip(weights, lamb(START, GRADIENTS[:3], settings), strict=True):
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-12)
    assert equal([weight.grad for weight in weights], GRADIENTS[2])


def test_a_parameter_without_gradient_is_left_alone() -> None:
    weights = parameters()
    optimizer = fz.Lamb(weights, weight_decay=0.1)
    run(optimizer, weights[:1], [GRADIENTS[0][:1]])
    assert not torch.equal(weights[0], START[0])
    assert equal([weight.detach() for weight in weights[1:]], START[1:])
    assert list(optimizer.state) == [weights[0]]
    nothing = fz.Lamb(parameters())
    nothing.step()
    assert not nothing.state


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("capturable", [False, True])
def test_a_saved_state_continues_to_the_bit(way: str, capturable: bool) -> None:
    weights = parameters(torch.float32)
    optimizer = fz.Lamb(weights, lr=0.01, capturable=capturable)
    run(optimizer, weights, GRADIENTS[:7])
    state: dict[str, Any] = optimizer.state_dict()
    if way == "deepcopy":
        state = copy.deepcopy(state)
    elif way == "pickle":
        state = pickle.loads(pickle.dumps(state))
    elif way == "torch.save":
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    resumed_weights = [nn.Parameter(weight.detach().clone()) for weight in weights]
    resumed = fz.Lamb(resumed_weights, lr=1.0)
    resumed.load_state_dict(state)
    run(resumed, resumed_weights, GRADIENTS[7:15])
    run(optimizer, weights, GRADIENTS[7:15])
    assert equal(weights, resumed_weights)
    assert equal(optimizer.state_dict(), resumed.state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copied_optimizer_trains_its_copied_parameters(copied: Any) -> None:
    weights = parameters()
    optimizer = fz.Lamb(weights, max_grad_norm=0.1, eps=1e-2, skip_nonfinite=True)
    run(optimizer, weights, GRADIENTS[:3])
    other_weights, other = copied((weights, optimizer))
    run(other, other_weights, GRADIENTS[3:6])
    assert not equal(weights, other_weights)
    run(optimizer, weights, GRADIENTS[3:6])
    assert equal(weights, other_weights)


def test_a_closure_is_run_with_gradients_and_its_loss_returned() -> None:
    weight = nn.Parameter(START[0].clone())
    optimizer = fz.Lamb([weight])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == START[0].square().sum()
    assert not torch.equal(weight, START[0])


def test_a_scheduler_sets_the_size_of_steps() -> None:
    weight = nn.Parameter(START[0].clone())
    optimizer = fz.Lamb([weight], lr=0.1, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for step in range(4):
        before = weight.detach().clone()
        run(optimizer, [weight], [[GRADIENTS[step][0]]])
        scheduler.step()
        size = (weight.detach() - before).norm() / before.norm()
        assert size.item() == pytest.approx(0.1 * 0.5**step, rel=1e-9)


def test_one_cycle_finds_the_momentum_to_cycle() -> None:
    optimizer = fz.Lamb(parameters(), betas=(0.9, 0.98))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    assert optimizer.param_groups[0]["betas"] == (0.95, 0.98)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["betas"][0] < 0.95


@pytest.mark.parametrize("settings", [SETTINGS["all"], SETTINGS["all-uncorrected"]])
def test_capturable_changes_nothing_on_a_cpu(settings: Settings) -> None:
    weights, captured = parameters(torch.float32), parameters(torch.float32)
    run(fz.Lamb(weights, **asdict(settings)), weights, GRADIENTS[:10])
    run(fz.Lamb(captured, **asdict(settings), capturable=True), captured, GRADIENTS[:10])
    assert equal(weights, captured)


def test_parameters_of_several_types_train_together() -> None:
    types = (torch.float64, torch.bfloat16, torch.float32)
    weights = [nn.Parameter(start.clone().to(dtype)) for start, dtype in zip(START, types, strict=True)]
    settings = Settings(max_grad_norm=0.5, eps=1e-2)
    run(fz.Lamb(weights, **asdict(settings)), weights, GRADIENTS[:5])
    expected = lamb(START, GRADIENTS[:5], settings)
    for weight, reference, dtype, tolerance in zip(weights, expected, types, (1e-4, 2e-2, 1e-4), strict=True):
        assert weight.dtype == dtype
        torch.testing.assert_close(weight.detach().double(), reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", range(3))
def test_a_gradient_that_is_not_finite_raises_and_changes_nothing(bad: float, place: int) -> None:
    weights = parameters()
    optimizer = fz.Lamb([{"params": [weight]} for weight in weights])
    run(optimizer, weights, GRADIENTS[:2])
    before = copy.deepcopy((list(weights), optimizer.state_dict()))
    gradients = [gradient.clone() for gradient in GRADIENTS[2]]
    gradients[place].view(-1)[-1] = bad
    with pytest.raises(ValueError, match=r"norm (nan|inf); the step was not taken, .* skip_nonfinite=True"):
        run(optimizer, weights, [gradients])
    assert equal(before, (list(weights), optimizer.state_dict()))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("capturable", [False, True])
def test_skipped_steps_are_counted_and_leave_no_trace(bad: float, place: int, capturable: bool) -> None:
    weights, undisturbed = parameters(), parameters()
    optimizer = fz.Lamb(weights, skip_nonfinite=True, capturable=capturable)
    spoiled = [gradient.clone() for gradient in GRADIENTS[2]]
    spoiled[place].view(-1)[0] = bad
    run(optimizer, weights, [spoiled])
    assert not optimizer.state
    run(optimizer, weights, [*GRADIENTS[:2], spoiled, *GRADIENTS[3:6]])
    plain = fz.Lamb(undisturbed, capturable=capturable)
    run(plain, undisturbed, [*GRADIENTS[:2], *GRADIENTS[3:6]])
    assert optimizer.skipped == 2
    assert plain.skipped == 0
    assert equal(weights, undisturbed)
    assert equal(optimizer.state_dict(), plain.state_dict())


@pytest.mark.parametrize("settings", [SETTINGS["all"], SETTINGS["gradients-too-small-to-clip"]], ids=["clip", "small"])
def test_a_step_that_does_not_wait_for_its_norm_clips_and_skips_alike(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, undisturbed = parameters(), parameters()
    plain = fz.Lamb(undisturbed, **asdict(settings))
    run(plain, undisturbed, GRADIENTS[:6])
    monkeypatch.setattr(StepGuard, "finite", lambda guard, norm: torch.isfinite(norm).float())  # as on a GPU
    optimizer = fz.Lamb(weights, **asdict(settings), capturable=True)
    spoiled = [torch.full_like(gradient, torch.nan) for gradient in GRADIENTS[0]]
    run(optimizer, weights, [*GRADIENTS[:2], spoiled, *GRADIENTS[2:6]])
    assert optimizer.skipped == 1
    assert [int(state["step"]) for state in optimizer.state.values()] == [6, 6, 6]
    for weight, expected in zip(weights, undisturbed, strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-6)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"lr": -0.1}, "lr must be a number of at least 0, got -0.1"),
    ({"lr": float("nan")}, "lr must be a number of at least 0, got nan"),
    ({"lr": True}, "lr must be a number of at least 0, got True"),
    ({"lr": float("inf")}, "lr must be a number of at least 0, got inf"),
    ({"lr": "1"}, "lr must be a number of at least 0, got '1'"),
    ({"betas": (-0.1, 0.9)}, r"betas\[0\] must be a number of at least 0 and below 1, got -0.1"),
    ({"betas": (1.0, 0.9)}, r"betas\[0\] must be a number of at least 0 and below 1, got 1.0"),
    ({"betas": (0.9, 1.0)}, r"betas\[1\] must be a number of at least 0 and below 1, got 1.0"),
    ({"betas": (0.9, float("nan"))}, r"betas\[1\] must be a number of at least 0 and below 1, got nan"),
    ({"eps": -1e-8}, "eps must be a number of at least 0, got -1e-08"),
    ({"weight_decay": -0.01}, "weight_decay must be a number of at least 0, got -0.01"),
    ({"max_grad_norm": 0}, "max_grad_norm must be a number above 0, got 0"),
    ({"max_grad_norm": -1.0}, "max_grad_norm must be a number above 0, got -1.0"),
    ({"trust_clip": 0.0}, "trust_clip must be a number above 0, got 0.0"),
]


@pytest.mark.parametrize(
    ("settings", "message"), WRONG, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_a_wrong_setting_says_what_is_allowed(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fz.Lamb(parameters(), **settings)
    if "max_grad_norm" not in settings:  # the others may also be given by group
        with pytest.raises(ValueError, match=message):
            fz.Lamb([{"params": parameters(), **settings}])


def test_the_reference_tells_settings_apart() -> None:
    results = [lamb(START, GRADIENTS[:3], replace(settings, lr=0.02)) for settings in SETTINGS.values()]
    first = [result[0] for result in results]
    distances = [(a - b).norm().item() for i, a in enumerate(first) for b in first[:i]]
    assert min(distances) > 1e-9
