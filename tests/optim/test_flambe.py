from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import factorized as fz
from factorized.optim.finite import StepGuard
from tests.optim.lamb_reference import Decay, Settings, draws, lamb, run

SETTINGS = Settings(lr=0.05, weight_decay=0.3, max_grad_norm=1.0)
GROUPS = {"conv": 2}  # what is not named has one group


class Model(nn.Module):
    """Never run: gradients are drawn. Two products of one shape, which share a batch, and two that go alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = fz.FactorizedConv2d(4, 6, 3, 2, groups=2)
        self.deep = fz.FactorizedLinear(5, 4, 3, depth=1)
        self.one = fz.FactorizedLinear(7, 6, 2, bias=False)
        self.two = fz.FactorizedLinear(7, 6, 2, bias=False)
        self.head = nn.Linear(4, 3)


def build(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    model = Model().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)  # no identity between the factors, nor orthogonal ones
    return model


def gradients_for(model: nn.Module, count: int, seed: int = 0) -> list[list[Tensor]]:
    return draws([tuple(parameter.shape) for parameter in model.parameters()], count, seed)


def frobenius(names: list[str], strength: Mapping[str, float]) -> Decay:
    """Return the decay λ∂½‖UMVᵀ‖² for the products in ``strength`` and λw for everything else, for the reference."""

    def decay(weights: list[Tensor], settings: Settings) -> list[Tensor]:
        of = dict(zip(names, weights, strict=True))
        result = {name: settings.weight_decay * weight for name, weight in of.items()}
        for product, number in strength.items():
            inner = f"{product}.inner.0"
            blocks = GROUPS.get(product, 1)
            U, V = of[f"{product}.U"].chunk(blocks), of[f"{product}.V"].chunk(blocks)
            M = of[inner].chunk(blocks) if inner in of else [torch.eye(U[0].shape[1], dtype=torch.float64)] * blocks
            W = [u @ m @ v.T for u, m, v in zip(U, M, V, strict=True)]
            result[f"{product}.U"] = number * torch.cat([w @ v @ m.T for w, m, v in zip(W, M, V, strict=True)])
            result[f"{product}.V"] = number * torch.cat([w.T @ u @ m for w, m, u in zip(W, M, U, strict=True)])
            if inner in of:
                result[inner] = number * torch.cat([u.T @ w @ v for u, w, v in zip(U, W, V, strict=True)])
        return list(result.values())

    return decay


def check(model: Model, optimizer: fz.Flambe, strength: Mapping[str, float], steps: int = 20) -> None:
    """Train and compare with the reference in which the products are decayed by ``strength``."""
    parameters, names = list(model.parameters()), [name for name, _ in model.named_parameters()]
    gradients = gradients_for(model, steps)
    expected = lamb(parameters, gradients, SETTINGS, frobenius(names, strength))
    run(optimizer, parameters, gradients)
    for name, parameter, reference in zip(names, parameters, expected, strict=True):
        torch.testing.assert_close(parameter.detach(), reference, rtol=1e-10, atol=1e-10, msg=name)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


PRODUCTS = ("conv", "deep", "one", "two")
STRENGTHS: dict[str, tuple[Any, dict[str, float]]] = {
    "number": (0.7, dict.fromkeys(PRODUCTS, 0.7)),
    "tensor": (torch.tensor(0.7, dtype=torch.float64), dict.fromkeys(PRODUCTS, 0.7)),
    "by-kind": ({"linear": 0.5, "conv": 0.2}, {"conv": 0.2, "deep": 0.5, "one": 0.5, "two": 0.5}),
    "by-name": ({"linear": 0.5, "t*": 0.9}, {"deep": 0.5, "one": 0.5, "two": 0.9}),
    "unnamed-decay-as-weights": ({"deep": 0.4}, {"deep": 0.4}),
    "zero-decays-as-weights": ({"*": 0.4, "one": 0.0, "conv": 0}, {"deep": 0.4, "two": 0.4}),
}


@pytest.mark.parametrize(("strength", "expected"), STRENGTHS.values(), ids=STRENGTHS)
def test_factors_are_decayed_as_products_and_the_rest_as_weights(strength: Any, expected: dict[str, float]) -> None:
    model = build()
    check(model, fz.Flambe(model.parameters(), model, frobenius_decay=strength, **asdict(SETTINGS)), expected)


def test_factors_of_one_product_may_be_in_different_groups() -> None:
    model = build()
    left = [parameter for name, parameter in model.named_parameters() if name.endswith("U")]
    rest = [parameter for name, parameter in model.named_parameters() if not name.endswith("U")]
    optimizer = fz.Flambe([{"params": left}, {"params": rest}], model, frobenius_decay=0.7, **asdict(SETTINGS))
    check(model, optimizer, dict.fromkeys(PRODUCTS, 0.7))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("capturable", [False, True])
def test_without_frobenius_decay_it_is_lamb_to_the_bit(grouped: bool, capturable: bool) -> None:
    model, other = build(), build()
    settings = asdict(SETTINGS) | {"capturable": capturable}
    groups = [fz.parameter_groups(m, 0.2, crs=True) if grouped else list(m.parameters()) for m in (model, other)]
    gradients = gradients_for(model, 10)
    run(fz.Flambe(groups[0], model, frobenius_decay=0.0, **settings), list(model.parameters()), gradients)
    run(fz.Lamb(groups[1], **settings), list(other.parameters()), gradients)
    assert same(model, other)
    assert not same(model, build())


def test_what_is_no_factor_is_treated_as_by_lamb_to_the_bit() -> None:
    model, other = build(), build()
    gradients = gradients_for(model, 10)
    run(fz.Flambe(model.parameters(), model, frobenius_decay=0.7), list(model.parameters()), gradients)
    run(fz.Lamb(other.parameters()), list(other.parameters()), gradients)
    assert same(model.head, other.head)
    assert not torch.equal(model.one.U, other.one.U)


def test_a_schedule_is_asked_with_the_steps_taken() -> None:
    model, other = build(), build()
    gradients = gradients_for(model, 3)
    asked: list[int] = []

    def schedule(step: int) -> float:
        asked.append(step)
        return 0.7 if step == 1 else 0.0

    optimizer = fz.Flambe(model.parameters(), model, frobenius_decay=schedule, weight_decay=0.0)
    by_hand = fz.Flambe(other.parameters(), other, frobenius_decay=torch.tensor(0.0), weight_decay=0.0)
    asked.clear()
    for step in range(3):
        run(optimizer, list(model.parameters()), gradients[step : step + 1])
        by_hand.frobenius_decay = torch.tensor(0.7 if step == 1 else 0.0, dtype=torch.float64)
        run(by_hand, list(other.parameters()), gradients[step : step + 1])
    assert asked == [0, 1, 2]
    for parameter, reference in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, reference, rtol=1e-12, atol=1e-12)


def test_a_strength_that_is_set_later_is_that_of_a_new_optimizer() -> None:
    model, other = build(), build()
    gradients = gradients_for(model, 1)
    optimizer = fz.Flambe(model.parameters(), model, frobenius_decay=0.0)
    optimizer.frobenius_decay = 0.1
    engine = optimizer._engine
    optimizer.frobenius_decay = 0.7
    assert optimizer._engine is engine  # for the same forms: setting a number at every step costs nothing
    run(optimizer, list(model.parameters()), gradients)
    run(fz.Flambe(other.parameters(), other, frobenius_decay=0.7), list(other.parameters()), gradients)
    assert same(model, other)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        optimizer.frobenius_decay = -1


def test_a_dict_of_strengths_that_is_changed_in_place_acts_like_one_that_is_set() -> None:
    model, other = build(), build()
    gradients = gradients_for(model, 1)
    optimizer = fz.Flambe(model.parameters(), model, frobenius_decay={"*": 0.0, "one": 0.1})
    optimizer.frobenius_decay["*"] = 0.7
    run(optimizer, list(model.parameters()), gradients)
    again = fz.Flambe(other.parameters(), other, frobenius_decay={"*": 0.7, "one": 0.1})
    run(again, list(other.parameters()), gradients)
    assert same(model, other)


def test_tied_layers_are_decayed_once() -> None:
    model = build()
    model.two.U, model.two.V = model.one.U, model.one.V
    check(
        model,
        fz.Flambe(model.parameters(), model, frobenius_decay=0.7, **asdict(SETTINGS)),
        {
            "conv": 0.7,
            "deep": 0.7,
            "one": 0.7,
        },
    )


def test_a_factor_of_two_products_gets_the_decay_of_both() -> None:
    model = build()
    model.two.V = model.one.V
    V, (one, two) = model.one.V.detach().clone(), (model.one.U.detach(), model.two.U.detach())
    expected = 0.7 * (V @ one.T @ one + V @ two.T @ two)
    expected = V - 0.05 * V.norm() / expected.norm() * expected
    optimizer = fz.Flambe(model.parameters(), model, lr=0.05, frobenius_decay=0.7)
    run(optimizer, [model.one.V], [[torch.zeros_like(V)]])
    torch.testing.assert_close(model.one.V.detach(), expected, rtol=1e-12, atol=1e-12)


def test_a_factor_without_gradient_stays() -> None:
    model = build()
    before = model.one.U.detach().clone()
    optimizer = fz.Flambe(model.parameters(), model, frobenius_decay=0.7)
    run(optimizer, [model.one.V], gradients_for(nn.ParameterList([model.one.V]), 1))
    assert torch.equal(model.one.U, before)
    assert list(optimizer.state) == [model.one.V]


def test_a_skipped_step_leaves_no_trace() -> None:
    model, other = build(), build()
    schedule: Callable[[int], float] = lambda step: 0.1 * step  # noqa: E731
    gradients = gradients_for(model, 4)
    spoiled = [torch.full_like(gradient, torch.nan) for gradient in gradients[0]]
    optimizer = fz.Flambe(model.parameters(), model, frobenius_decay=schedule, skip_nonfinite=True)
    run(optimizer, list(model.parameters()), [*gradients[:2], spoiled, *gradients[2:]])
    run(fz.Flambe(other.parameters(), other, frobenius_decay=schedule), list(other.parameters()), gradients)
    assert optimizer.skipped == 1
    assert same(model, other)


@pytest.fixture
def decides_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decide whether a step is taken as on a GPU that is not waited for."""
    monkeypatch.setattr(StepGuard, "finite", lambda _, norm: torch.isfinite(norm).float())


def a_schedule(step: int) -> float:
    return 0.1 * (step % 3)


@pytest.mark.usefixtures("decides_on_device")
@pytest.mark.parametrize("spoiled", [(0,), (2,), (1, 2, 5)])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_schedule_does_not_count_steps_that_a_device_skips_without_being_waited_for(
    spoiled: tuple[int, ...], resumed: bool
) -> None:
    model, other = build(), build()
    gradients = gradients_for(model, 8)
    given = [[g * torch.nan for g in gs] if n in spoiled else gs for n, gs in enumerate(gradients)]
    optimizer = fz.Flambe(model.parameters(), model, frobenius_decay=a_schedule)
    run(optimizer, list(model.parameters()), given[:4])
    if resumed:
        state = copy.deepcopy(optimizer.state_dict())
        optimizer = fz.Flambe(model.parameters(), model, frobenius_decay=a_schedule)
        optimizer.load_state_dict(state)
    else:
        model, optimizer = copy.deepcopy((model, optimizer))
    run(optimizer, list(model.parameters()), given[4:])
    taken = [gs for n, gs in enumerate(gradients) if n not in spoiled]
    run(fz.Flambe(other.parameters(), other, frobenius_decay=a_schedule), list(other.parameters()), taken)
    assert optimizer.steps == len(taken)
    for parameter, reference in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter, reference, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("decides_on_device")
def test_a_schedule_that_is_set_after_a_skipped_step_starts_at_the_steps_taken() -> None:
    model = build()
    asked: list[int] = []
    optimizer = fz.Flambe(model.parameters(), model, frobenius_decay=lambda step: 0.0)
    gradients = gradients_for(model, 3)
    run(optimizer, list(model.parameters()), [[g * torch.nan for g in gradients[0]], *gradients[1:]])
    optimizer.frobenius_decay = lambda step: float(asked.append(step) or 0.1)
    asked.clear()
    run(optimizer, list(model.parameters()), gradients[:1])
    assert asked == [2]


def test_a_saved_state_continues_to_the_bit_with_its_schedule() -> None:
    model = build()
    schedule: Callable[[int], float] = lambda step: 0.1 * step  # noqa: E731
    gradients = gradients_for(model, 10)
    optimizer = fz.Flambe(model.parameters(), model, frobenius_decay=schedule)
    run(optimizer, list(model.parameters()), gradients[:4])
    resumed_model = copy.deepcopy(model)
    resumed = fz.Flambe(resumed_model.parameters(), resumed_model, frobenius_decay=schedule)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(resumed, list(resumed_model.parameters()), gradients[4:])
    run(optimizer, list(model.parameters()), gradients[4:])
    assert same(model, resumed_model)


def test_a_distributed_checkpoint_before_the_first_step_counts_none() -> None:
    model = build()
    optimizer = fz.Flambe(model.parameters(), model, frobenius_decay=lambda step: 0.1 * step)
    get_state_dict(model, optimizer)
    assert optimizer.steps == 0


def test_a_saved_state_continues_a_schedule_where_no_parameter_took_every_step() -> None:
    model = build()
    schedule: Callable[[int], float] = lambda step: 0.1 * step  # noqa: E731
    parameters, gradients = list(model.parameters()), gradients_for(model, 6)
    optimizer = fz.Flambe(parameters, model, frobenius_decay=schedule)

    def take(taking: fz.Flambe, trained: list[nn.Parameter], steps: range) -> None:
        for step in steps:  # half of the parameters have a gradient, by turns
            for number, (parameter, gradient) in enumerate(zip(trained, gradients[step], strict=True)):
                parameter.grad = gradient.clone() if number % 2 == step % 2 else None
            taking.step()

    take(optimizer, parameters, range(3))
    resumed_model = copy.deepcopy(model)
    resumed = fz.Flambe(resumed_model.parameters(), resumed_model, frobenius_decay=schedule)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.steps == 3
    take(optimizer, parameters, range(3, 6))
    take(resumed, list(resumed_model.parameters()), range(3, 6))
    assert same(model, resumed_model)


def test_a_copied_optimizer_trains_its_copied_model() -> None:
    model = build()
    gradients = gradients_for(model, 6)
    optimizer = fz.Flambe(model.parameters(), model, frobenius_decay=0.7)
    run(optimizer, list(model.parameters()), gradients[:3])
    other_model, other = copy.deepcopy((model, optimizer))
    run(other, list(other_model.parameters()), gradients[3:])
    assert not same(model, other_model)
    run(optimizer, list(model.parameters()), gradients[3:])
    assert same(model, other_model)


def test_a_model_without_products_is_refused() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"Linear holds no products; use fz\.Lamb, or call fz\.factorize first"):
        fz.Flambe(model.parameters(), model)


def test_parameters_without_any_factor_are_refused() -> None:
    model = build()
    with pytest.raises(ValueError, match=r"hold none of the factors, such as those of 'conv'; make the groups after"):
        fz.Flambe(model.head.parameters(), model)


@pytest.mark.parametrize(
    ("strength", "message"),
    [
        (-0.1, "strength must be a finite number of at least 0, got -0.1"),
        (float("nan"), "strength must be a finite number of at least 0, got nan"),
        ({"embeding": 0.1}, "no form of the model matches 'embeding'. Kinds are linear, conv, embedding"),
        ({"one": -1}, "strength of 'one' must be a finite number"),
        (lambda step: -1.0, "strength at step 0 must be a finite number"),
    ],
)
def test_a_wrong_strength_says_what_is_allowed(strength: Any, message: str) -> None:
    model = build()
    with pytest.raises(ValueError, match=message):
        fz.Flambe(model.parameters(), model, frobenius_decay=strength)


def test_what_a_packed_weight_holds_beside_factors_is_decayed_as_a_weight() -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2)
    before = model.in_proj_weight.detach().clone()
    groups = fz.parameter_groups(model, weight_decay=0.5)
    optimizer = fz.Flambe(groups, model, lr=1e-2, frobenius_decay=0.0625)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moved = before - model.in_proj_weight.detach()
    queries_and_keys, values = moved[:16] / before[:16], moved[16:] / before[16:]
    torch.testing.assert_close(queries_and_keys, queries_and_keys.new_full((16, 8), queries_and_keys[0, 0].item()))
    assert queries_and_keys[0, 0] > 0
    assert values.std() > 0.1 * values.abs().mean()  # by their product with the outputs, not as they are
