from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import factorized as fz
from factorized.testing import error
from tests.decay.models_for_decay import (
    STRENGTH,
    by_weights,
    difference,
    gradients_of_decay,
    layers,
    loss_of,
    mixed,
    shrink_by_hand,
    train,
    twins,
)

Make = Callable[..., Optimizer]


def added(model: nn.Module, decay: fz.FrobeniusDecay) -> dict[str, Tensor]:
    """Return what one action of the decay adds to every gradient."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    decay.apply_()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def acts_on(model: nn.Module, strength: Any) -> dict[str, float]:
    """Return how many times ½‖W‖² each layer is decayed by, measured on its gradients, zeros left out."""
    gradients = added(model, fz.FrobeniusDecay(model, strength))
    found = {}
    for name, layer in layers(model).items():
        (unit,) = torch.autograd.grad(0.5 * layer.weight.square().sum(), layer.U)
        found[name] = (gradients[f"{name}.U"].norm() / unit.norm()).item()
    return {name: pytest.approx(number) for name, number in found.items() if number != 0}


class TestGradients:
    def test_the_penalty_is_the_squared_norm_of_the_weights(self) -> None:
        model = mixed()
        assert error(fz.FrobeniusDecay(model, STRENGTH).penalty(), by_weights(model)) < 1e-12

    def test_what_it_adds_is_the_gradient_of_its_penalty(self) -> None:
        model = mixed()
        decay = fz.FrobeniusDecay(model, STRENGTH)
        expected = torch.autograd.grad(decay.penalty(), list(model.parameters()), materialize_grads=True)
        for actual, reference in zip(added(model, decay).values(), expected, strict=True):
            assert error(actual, reference) < 1e-10

    def test_it_acts_on_the_factors_as_they_are_now(self) -> None:
        model = mixed()
        decay = fz.FrobeniusDecay(model, STRENGTH)
        added(model, decay)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        for parameter in list(model.parameters())[::2]:
            parameter.data = parameter.data.clone() + 0.1  # other memory, as after a move to another device
        factors = [factor for layer in layers(model).values() for factor in layer.factors]
        expected = gradients_of_decay(model)
        added(model, decay)
        for factor, reference in zip(factors, expected, strict=True):
            assert error(factor.grad, reference) < 1e-10

    def test_half_parameters_get_the_single_precision_gradient_rounded_once(self) -> None:
        model = mixed().bfloat16()
        gradients = added(model, fz.FrobeniusDecay(model, STRENGTH))
        assert {gradient.dtype for gradient in gradients.values()} == {torch.bfloat16}
        reference = added(model.float(), fz.FrobeniusDecay(model, STRENGTH))
        assert all(error(gradients[name], reference[name]) < 3e-3 for name in gradients)


class TestStrength:
    def test_one_that_is_given_later_leaves_queries_and_keys_alone_too(self) -> None:
        attention = nn.MultiheadAttention(16, 4).double()
        decay = fz.FrobeniusDecay(attention, {"qk": 0.1, "ov": 0.1})
        decay.strength = 0.2
        expected = torch.autograd.grad(decay.penalty(), list(attention.parameters()), materialize_grads=True)
        gradients = added(attention, decay)
        assert not gradients["in_proj_weight"][:32].any()
        torch.testing.assert_close(list(gradients.values()), list(expected))

    @pytest.mark.parametrize("first", [0.0, {"conv": 1.0}, {"up.*": 0.0, "embed": 1.0}])
    @pytest.mark.parametrize("later", [0.3, {"linear": 0.3}, {"up.1": 0.3, "embed": 0.0}, lambda step: 0.3])
    def test_one_that_is_set_later_acts_on_the_forms_that_it_names(self, first: Any, later: Any) -> None:
        model = mixed()
        decay = fz.FrobeniusDecay(model, first)
        decay.strength = later
        expected = fz.FrobeniusDecay(model, later)
        assert repr(decay) == repr(expected)
        assert torch.equal(decay.penalty(), expected.penalty())
        reference, actual = added(model, expected), added(model, decay)
        assert all(torch.equal(actual[name], reference[name]) for name in reference)

    def test_another_number_for_the_same_forms_costs_nothing(self) -> None:
        decay = fz.FrobeniusDecay(mixed(), 0.1)
        engine = decay._engine
        decay.strength = 0.2
        assert decay._engine is engine

    def test_one_that_is_set_later_must_not_meet_another_decay(self) -> None:
        model = mixed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first = fz.FrobeniusDecay(model, {"conv": 0.5}).attach(optimizer)
        second = fz.FrobeniusDecay(model, {"linear": 0.5}).attach(optimizer)
        second.strength = {"linear": 0.1}
        optimizer.step()
        second.strength = 0.1
        with pytest.raises(ValueError, match="a FrobeniusDecay of the same factors is attached to this optimizer"):
            optimizer.step()
        first.detach()
        optimizer.step()

    def test_one_that_is_set_later_is_checked_like_the_first(self) -> None:
        model = mixed()
        decay = fz.FrobeniusDecay(model, {"embed": 0.5})
        groups = [{"params": model.embed.parameters()}, {"params": model.conv.parameters(), "weight_decay": 0.1}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        decay.attach(optimizer)
        for wrong, message in ((-1, "at least 0, got -1"), ({"down": 1.0}, "no form of the model matches 'down'")):
            with pytest.raises(ValueError, match=message):
                decay.strength = wrong
        assert decay.strength == {"embed": 0.5}
        decay.strength = 0.5
        with pytest.raises(ValueError, match=r"the optimizer decays the factors of 'conv' itself \(weight_decay=0.1\)"):
            optimizer.step()
        inside = fz.FrobeniusDecay(fz.FactorizedLinear(4, 4, 8, execution="composed"), 1, in_backward=True)
        with pytest.raises(ValueError, match="with in_backward=True the layers hold the strength"):
            inside.strength = 0.5

    def test_a_dict_that_is_changed_in_place_acts_like_one_that_is_set(self) -> None:
        model, reference = twins()
        optimizer, plain = (torch.optim.SGD(twin.parameters(), lr=0.1) for twin in (model, reference))
        decay = fz.FrobeniusDecay(model, {"conv": 0.0, "linear": 0.5}).attach(optimizer)
        other = fz.FrobeniusDecay(reference, {"conv": 0.0, "linear": 0.5}).attach(plain)
        decay.strength["conv"] = 0.3
        other.strength = {"conv": 0.3, "linear": 0.5}
        assert torch.equal(decay.penalty(), other.penalty())
        decay.strength["linear"] = 0.0
        other.strength = {"conv": 0.3, "linear": 0.0}
        train(model, optimizer, range(2))
        train(reference, plain, range(2))
        assert difference(model, reference) == 0
        assert repr(decay) == repr(other)
        decay.strength["linear"] = -1.0
        with pytest.raises(ValueError, match="strength of 'linear' must be a finite number of at least 0"):
            optimizer.step()

    def test_a_kind_or_a_glob_names_the_forms_and_the_rest_is_left_alone(self) -> None:
        assert acts_on(mixed(), {"conv": 0.5, "up.*": 2.0}) == {"conv": 0.5, "grouped": 0.5, "up.0": 2.0, "up.1": 2.0}

    def test_the_last_match_wins(self) -> None:
        model = mixed()
        others = dict.fromkeys(layers(model), 1.0)
        assert acts_on(model, {"*": 1.0, "embedding": 3.0, "up.1": 2.0}) == others | {"embed": 3.0, "up.1": 2.0}
        assert acts_on(model, {"up.1": 2.0, "*": 1.0}) == others

    def test_zero_leaves_a_form_alone(self) -> None:
        assert acts_on(mixed(), 0) == {}
        assert acts_on(mixed(), {"linear": 0.0, "embed": 1.5}) == {"embed": 1.5}

    def test_the_penalty_weighs_the_forms_alike(self) -> None:
        model = mixed()
        expected = sum(layer.weight.square().sum() for name, layer in layers(model).items() if name.startswith("up"))
        expected = expected + 0.25 * model.embed.weight.square().sum()
        assert error(fz.FrobeniusDecay(model, {"up.?": 2.0, "embedding": 0.5}).penalty(), expected) < 1e-12

    @pytest.mark.parametrize("shape", [(), (1,)])
    def test_a_tensor_can_be_changed_between_steps(self, shape: tuple[int, ...]) -> None:
        model, strength = mixed(), torch.full(shape, 0.5)
        decay = fz.FrobeniusDecay(model, {"linear": strength, "conv": 0.25})
        before = added(model, decay)
        penalty = decay.penalty()
        strength.fill_(1.5)
        after = added(model, decay)
        assert error(after["wide.U"], 3 * before["wide.U"]) < 1e-12
        assert error(after["up.0.V"], 3 * before["up.0.V"]) < 1e-12
        assert error(after["conv.U"], before["conv.U"]) == 0
        expected = sum(layer.weight.square().sum() for layer in layers(model).values() if layer.shape.size == ())
        expected = expected - model.embed.weight.square().sum()
        assert error(decay.penalty() - penalty, 0.5 * expected) < 1e-12

    def test_a_schedule_is_asked_with_the_steps_taken(self) -> None:
        model = mixed()
        decay = fz.FrobeniusDecay(model, lambda step: 0.5 + step)
        first, second = added(model, decay)["wide.U"], added(model, decay)["wide.U"]
        assert error(second, 3 * first) < 1e-12
        assert decay.steps == 2
        assert error(decay.penalty(), by_weights(model, 2.5)) < 1e-12

    @pytest.mark.parametrize("make", [lambda n: n, lambda n: {"*": n}, lambda n: lambda step: n])
    @pytest.mark.parametrize("decoupled", [False, True])
    def test_it_may_be_a_number_of_numpy(self, make: Callable[[Any], Any], decoupled: bool) -> None:
        made = []
        for number in (np.float32(0.5), 0.5):
            model = mixed()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            fz.FrobeniusDecay(model, make(number), decoupled=decoupled).attach(optimizer)
            train(model, optimizer, range(2))
            made.append(model)
        assert difference(*made) == 0

    def test_a_schedule_that_starts_at_zero_still_comes_into_force(self) -> None:
        model = mixed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fz.FrobeniusDecay(model, lambda step: 0.0 if step < 2 else STRENGTH).attach(optimizer)
        reference = mixed()
        plain = torch.optim.SGD(reference.parameters(), lr=0.1)
        train(model, optimizer, range(4))
        train(reference, plain, range(2))
        train(reference, plain, range(2, 4), penalty=lambda: by_weights(reference))
        assert difference(model, reference) < 1e-12


class TestAttached:
    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_it_equals_the_penalty_in_the_loss(self, set_to_none: bool) -> None:
        model, reference = twins()
        optimizer, plain = (
            torch.optim.SGD(fz.parameter_groups(twin, 1e-2), lr=0.1, momentum=0.9) for twin in (model, reference)
        )
        decay = fz.FrobeniusDecay(model, STRENGTH, decoupled=False)
        assert decay.attach(optimizer) is decay
        train(model, optimizer, set_to_none=set_to_none)
        train(reference, plain, penalty=lambda: by_weights(reference))
        assert difference(model, reference) < 1e-8
        assert difference(model, mixed()) > 1e-2

    @pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
    @pytest.mark.parametrize("as_tensors", [False, True])
    def test_decoupled_it_shrinks_the_factors_by_each_groups_rate(self, make: Make, as_tensors: bool) -> None:
        rates: tuple[Any, Any] = (0.1, 0.02)
        if as_tensors:
            rates = (torch.tensor(0.1, dtype=torch.float64), torch.tensor([0.02], dtype=torch.float64))

        def optimizer_of(model: nn.Module) -> Optimizer:
            linear = [p for name, p in model.named_parameters() if name.startswith(("up", "deep", "square.0"))]
            others = [p for p in model.parameters() if all(p is not q for q in linear)]
            groups = [{"params": linear, "lr": rates[0]}, {"params": others, "lr": rates[1]}]
            return make(groups, weight_decay=0.0, foreach=False)

        model, reference = twins()
        optimizer, plain = optimizer_of(model), optimizer_of(reference)
        decay = fz.decoupled_frobenius(optimizer, model, STRENGTH)
        train(model, optimizer)
        train(reference, plain, before_step=lambda: shrink_by_hand(reference, plain))
        assert difference(model, reference) < 1e-8
        assert (decay.decoupled, decay.steps) == (True, 4)

    @pytest.mark.parametrize("with_gradients", [False, True])
    def test_by_hand_it_shrinks_the_factors_at_the_rate_it_is_given(self, with_gradients: bool) -> None:
        model, reference = twins()
        if with_gradients:
            loss_of(model, 0).backward()
        fz.FrobeniusDecay(model, STRENGTH, decoupled=True).apply_(lr=0.1)
        shrink_by_hand(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
        assert difference(model, reference) < 1e-12

    def test_by_hand_it_leaves_frozen_factors_as_they_are(self) -> None:
        model, before = twins()
        for layer in layers(model).values():
            layer.U.requires_grad_(False)
        fz.FrobeniusDecay(model, STRENGTH, decoupled=True).apply_(lr=0.1)
        for name, layer in layers(model).items():
            assert torch.equal(layer.U, layers(before)[name].U)
            assert not torch.allclose(layer.V, layers(before)[name].V)

    @pytest.mark.parametrize("by_hand", [False, True])
    def test_a_learning_rate_of_a_wider_type_is_a_number_like_any_other(self, by_hand: bool) -> None:
        model = mixed().float()
        reference, rate = deepcopy(model), torch.tensor([0.1], dtype=torch.float64)
        for twin, lr in ((model, rate), (reference, 0.1)):
            if by_hand:
                fz.FrobeniusDecay(twin, STRENGTH, decoupled=True).apply_(lr=lr)
            else:
                optimizer = torch.optim.SGD(fz.parameter_groups(twin, 0.0), lr=lr)
                fz.decoupled_frobenius(optimizer, twin, STRENGTH)
                train(twin, optimizer, range(1))
        assert difference(model, reference) < 1e-6

    def test_detached_it_stops_and_can_be_attached_again(self) -> None:
        model, reference = twins()
        optimizer, plain = (torch.optim.SGD(twin.parameters(), lr=0.1) for twin in (model, reference))
        decay = fz.FrobeniusDecay(model, STRENGTH).attach(optimizer)
        decay.detach()
        train(model, optimizer, range(2))
        train(reference, plain, range(2))
        assert difference(model, reference) == 0
        decay.attach(optimizer)
        train(model, optimizer, range(2))
        train(reference, plain, range(2), penalty=lambda: by_weights(reference))
        assert difference(model, reference) < 1e-12

    def test_two_decays_of_different_factors_share_an_optimizer(self) -> None:
        model, reference = twins()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for kind in ("linear", "conv", "embedding"):
            fz.FrobeniusDecay(model, {kind: STRENGTH}).attach(optimizer)
        train(model, optimizer)
        train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), penalty=lambda: by_weights(reference))
        assert difference(model, reference) < 1e-12

    @pytest.mark.parametrize("named", [False, True])
    @pytest.mark.parametrize(
        "make",
        [lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3)],
        ids=["sgd", "lbfgs"],
    )
    def test_a_closure_sees_the_decay_each_time_and_a_step_counts_once(self, make: Make, named: bool) -> None:
        asked: list[int] = []

        def run(model: nn.Module, decayed: bool) -> nn.Module:
            optimizer = make(model.parameters())
            if decayed:
                fz.FrobeniusDecay(model, lambda step: asked.append(step) or STRENGTH).attach(optimizer)

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, 0)
                (loss if decayed else loss + by_weights(model)).backward()
                return loss

            for _ in range(3):
                loss = optimizer.step(closure=closure) if named else optimizer.step(closure)
                assert loss is not None
            return model

        model, reference = twins()
        assert difference(run(model, decayed=True), run(reference, decayed=False)) < 1e-8
        assert set(asked) == {0, 1, 2}


def warm_up(step: int) -> float:
    return min(step / 100, 1.0)


@pytest.mark.parametrize(
    ("decay", "text"),
    [
        (lambda model: fz.FrobeniusDecay(model, 1e-4), "FrobeniusDecay(products=2, strength=0.0001, decoupled=False)"),
        (
            lambda model: fz.FrobeniusDecay(model, {"1": 0.5}, decoupled=True),
            "FrobeniusDecay(products=1, strength={'1': 0.5}, decoupled=True)",
        ),
        (
            lambda model: fz.FrobeniusDecay(model, warm_up),
            "FrobeniusDecay(products=2, strength=warm_up, decoupled=False)",
        ),
        (lambda model: fz.NuclearDecay(model, 0.5), "NuclearDecay(products=2, strength=0.5)"),
        (lambda model: fz.ProductPenalty(model, torch.sum), "ProductPenalty(products=2, fn=sum)"),
    ],
)
def test_a_notebook_shows_how_many_products_are_decayed_and_how(decay: Callable[[nn.Module], Any], text: str) -> None:
    assert repr(decay(nn.Sequential(fz.FactorizedLinear(8, 8, 2), fz.FactorizedLinear(8, 4, 2)))) == text


def test_a_schedule_goes_on_after_a_restart() -> None:
    model = fz.FactorizedLinear(9, 7, 2).double()
    decay = fz.FrobeniusDecay(nn.Sequential(model), lambda step: 0.1 * (step + 1))
    model.U.grad, model.V.grad = torch.zeros_like(model.U), torch.zeros_like(model.V)
    decay.apply_()
    resumed = fz.FrobeniusDecay(nn.Sequential(model), lambda step: 0.1 * (step + 1))
    resumed.load_state_dict(decay.state_dict())
    assert resumed.steps == 1
    torch.testing.assert_close(resumed.penalty(), 2 * fz.FrobeniusDecay(nn.Sequential(model), 0.1).penalty())


@pytest.mark.parametrize("model", [nn.MultiheadAttention(64, 1), fz.FactorizedLinear(64, 64, 8)])
def test_the_penalty_of_half_parameters_is_computed_in_single_precision(model: nn.Module) -> None:
    for parameter in model.parameters():
        nn.init.constant_(parameter, 4.0)
    whole, half = (fz.FrobeniusDecay(twin, 2.0).penalty() for twin in (model, deepcopy(model).half()))
    assert whole > torch.finfo(torch.float16).max
    assert torch.equal(half, whole)
