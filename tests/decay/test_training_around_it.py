from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import Optimizer

import factorized as fz
from factorized.testing import error
from tests.decay.models_for_decay import (
    STRENGTH,
    batch,
    by_weights,
    difference,
    gradients_of_decay,
    layers,
    loss_of,
    mixed,
    shaken,
    shrink_by_hand,
    train,
    twins,
)

Make = Callable[..., Optimizer]
FUSED_OR_NOT = [
    pytest.param(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), id="sgd"),
    pytest.param(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True), id="sgd-fused"),
    pytest.param(lambda p: torch.optim.AdamW(p, lr=0.01), id="adamw"),
    pytest.param(lambda p: torch.optim.AdamW(p, lr=0.01, fused=True), id="adamw-fused"),
]


def add_by_hand(model: nn.Module) -> None:
    factors = [factor for layer in layers(model).values() for factor in layer.factors]
    for factor, gradient in zip(factors, gradients_of_decay(model), strict=True):
        factor.grad += gradient


def test_clipping_the_gradients_does_not_clip_the_decay() -> None:
    def clip(model: nn.Module) -> None:
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.01) > 0.1

    def clip_then_add(model: nn.Module) -> None:
        clip(model)
        add_by_hand(model)

    model, reference = twins()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fz.FrobeniusDecay(model, STRENGTH).attach(optimizer)
    train(model, optimizer, before_step=lambda: clip(model))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    train(reference, plain, before_step=lambda: clip_then_add(reference))
    assert difference(model, reference) < 1e-12


@pytest.mark.parametrize("decoupled", [False, True])
def test_accumulated_gradients_are_decayed_once_a_step(decoupled: bool) -> None:
    def run(model: nn.Module, parts: int) -> nn.Module:
        model.norm.eval()  # the statistics of a part are not those of the whole
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fz.FrobeniusDecay(model, STRENGTH, decoupled=decoupled).attach(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            tokens, classes = batch(step)
            for part, expected in zip(tokens.chunk(parts), classes.chunk(parts), strict=True):
                (F.cross_entropy(model(part), expected) / parts).backward()
            optimizer.step()
        return model

    model, reference = twins()
    assert difference(run(model, parts=4), run(reference, parts=1)) < 1e-12


def scaled_step(scaler: torch.amp.GradScaler, model: nn.Module, optimizer: Optimizer, spoiled: bool) -> None:
    """Train one step; ``spoiled`` makes a gradient infinite, so that the scaler skips it."""
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 0)).backward()
    if spoiled:
        model.up[0].U.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()


class TestGradScaler:
    @pytest.mark.parametrize("make", FUSED_OR_NOT)
    @pytest.mark.parametrize("decoupled", [False, True])
    @pytest.mark.parametrize("unscale_first", [False, True])
    def test_a_scaled_run_equals_the_unscaled_one(self, make: Make, decoupled: bool, unscale_first: bool) -> None:
        model, reference = twins()
        optimizer, plain = (make(fz.parameter_groups(twin, 0.0)) for twin in (model, reference))
        fz.FrobeniusDecay(model, STRENGTH, decoupled=decoupled).attach(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if unscale_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        if decoupled:
            train(reference, plain, range(3), before_step=lambda: shrink_by_hand(reference, plain))
        else:
            train(reference, plain, range(3), penalty=lambda: by_weights(reference))
        assert difference(model, reference) < 1e-7

    @pytest.mark.parametrize("make", FUSED_OR_NOT)
    @pytest.mark.parametrize("decoupled", [False, True])
    def test_a_step_skipped_for_infinite_gradients_changes_nothing(self, make: Make, decoupled: bool) -> None:
        model, _ = twins()
        optimizer = make(fz.parameter_groups(model, 0.0))
        fz.FrobeniusDecay(model, STRENGTH, decoupled=decoupled).attach(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

        # torch's fused SGD reads momentum it never wrote if the very first step is skipped
        scaled_step(scaler, model, optimizer, spoiled=False)
        untouched = deepcopy(model)
        scaled_step(scaler, model, optimizer, spoiled=True)
        assert scaler.get_scale() == 512.0
        assert difference(model, untouched) == 0
        scaled_step(scaler, model, optimizer, spoiled=False)
        assert difference(model, untouched) > 1e-3

    @pytest.mark.parametrize("make", FUSED_OR_NOT)
    def test_a_schedule_does_not_count_a_skipped_step(self, make: Make) -> None:
        model, _ = twins()
        optimizer = make(fz.parameter_groups(model, 0.0))
        decay = fz.FrobeniusDecay(model, lambda step: STRENGTH / (step + 1), decoupled=True).attach(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for spoiled in (False, True, False):
            scaled_step(scaler, model, optimizer, spoiled)
        assert decay.steps == 2


class TestWhatIsLeftOut:
    @pytest.mark.parametrize("decoupled", [False, True])
    def test_a_factor_without_gradient_is_untouched(self, decoupled: bool) -> None:
        model, before = twins()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fz.FrobeniusDecay(model, STRENGTH, decoupled=decoupled).attach(optimizer)
        loss_of(model, 0).backward()
        model.embed.U.grad = model.up[0].V.grad = model.wide.U.grad = None
        optimizer.step()
        still = {
            f"{name}.{side}"
            for name, layer in layers(model).items()
            for side in ("U", "V")
            if torch.equal(getattr(layer, side), getattr(layers(before)[name], side))
        }
        assert still == {"embed.U", "up.0.V", "wide.U"}
        assert model.wide.U.grad is None

    @pytest.mark.parametrize("frozen", ["U", "V"])
    @pytest.mark.parametrize("decoupled", [False, True])
    def test_a_frozen_factor_stays_while_the_other_is_decayed(self, frozen: str, decoupled: bool) -> None:
        model, before = twins()
        for layer in layers(model).values():
            getattr(layer, frozen).requires_grad_(False)
        loss_of(model, 0).backward()
        plain = {
            name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fz.FrobeniusDecay(model, STRENGTH, decoupled=decoupled).attach(optimizer)
        optimizer.step()
        trained = {"U": "V", "V": "U"}[frozen]
        for name, layer in layers(model).items():
            old = layers(before)[name]
            assert torch.equal(getattr(layer, frozen), getattr(old, frozen))
            (decay,) = torch.autograd.grad(STRENGTH / 2 * old.weight.square().sum(), getattr(old, trained))
            expected = getattr(old, trained) - 0.1 * (plain[f"{name}.{trained}"] + decay)
            assert error(getattr(layer, trained), expected) < 1e-12

    @pytest.mark.parametrize("decoupled", [False, True])
    def test_a_factor_held_by_another_optimizer_is_left_to_that_one(self, decoupled: bool) -> None:
        model = mixed()
        others = [layer.V for layer in layers(model).values()]
        rest = [p for p in model.parameters() if all(p is not other for other in others)]
        first, second = torch.optim.SGD(rest, lr=0.1), torch.optim.SGD(others, lr=0.1)
        fz.FrobeniusDecay(model, STRENGTH, decoupled=decoupled).attach(first)
        loss_of(model, 0).backward()
        before = [(V.detach().clone(), V.grad.clone()) for V in others]
        first.step()
        assert all(torch.equal(V, v) and torch.equal(V.grad, g) for V, (v, g) in zip(others, before, strict=True))
        fz.FrobeniusDecay(model, STRENGTH, decoupled=decoupled).attach(second)
        units = [torch.autograd.grad(by_weights(model), layer.V)[0] for layer in layers(model).values()]
        second.step()
        for V, (v, g), unit in zip(others, before, units, strict=True):
            assert error(V, v - 0.1 * (g + unit)) < 1e-12

    def test_a_sparse_table_is_decayed_decoupled(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(fz.FactorizedEmbedding(11, 8, 3, sparse=True)).double()
        before = deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fz.decoupled_frobenius(optimizer, model, STRENGTH)
        (model(torch.tensor([1, 4])) * 0.0).sum().backward()
        assert model[0].U.grad.is_sparse
        optimizer.step()
        expected = before[0].U - 0.1 * torch.autograd.grad(by_weights(before), before[0].U)[0]
        assert error(model[0].U, expected) < 1e-12


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)])
def test_a_run_resumed_from_its_state_continues_the_same(make: Make, decoupled: bool) -> None:
    def start() -> tuple[nn.Module, Optimizer]:
        model = mixed()
        optimizer = make(fz.parameter_groups(model, 0.1), lr=0.05)
        fz.FrobeniusDecay(model, STRENGTH, decoupled=decoupled).attach(optimizer)
        return model, optimizer

    model, optimizer = start()
    train(model, optimizer, range(2))
    saved: tuple[dict[str, Any], dict[str, Any]] = deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(2, 4))
    resumed, other = start()
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    train(resumed, other, range(2, 4))
    assert difference(model, resumed) == 0


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])  # without momentum the optimizer never has a state
def test_a_distributed_checkpoint_neither_counts_a_step_nor_decays(momentum: float, decoupled: bool) -> None:
    results = []
    for saves in (False, True):
        model = mixed()
        optimizer = torch.optim.SGD(fz.parameter_groups(model, 0.0), lr=0.05, momentum=momentum)
        decay = fz.FrobeniusDecay(model, lambda step: STRENGTH * (1 + step), decoupled=decoupled).attach(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            if saves:
                get_state_dict(model, optimizer)
            train(model, optimizer, range(step, step + 1))
        assert decay.steps == 3
        results.append(model)
    assert difference(*results) == 0


def test_a_warm_up_from_zero_is_decayed_from_its_first_step() -> None:
    model, reference = twins()
    optimizers = [torch.optim.SGD(twin.parameters(), lr=0.0, momentum=0.9) for twin in (model, reference)]
    decay = fz.FrobeniusDecay(model, STRENGTH).attach(optimizers[0])
    for step in range(3):
        train(model, optimizers[0], range(step, step + 1))
        train(reference, optimizers[1], range(step, step + 1), penalty=lambda: by_weights(reference))
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.05
    assert decay.steps == 3
    assert difference(model, reference) < 1e-12


def test_a_copy_of_the_model_is_not_decayed() -> None:
    model = mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fz.decoupled_frobenius(optimizer, model, STRENGTH)
    averaged, untouched = deepcopy(model), deepcopy(model)
    loss_of(averaged, 0).backward()
    train(model, optimizer, range(2))
    assert difference(averaged, untouched) == 0


@pytest.mark.usefixtures("fresh_compiler")
class TestCompiled:
    @pytest.mark.parametrize("strength", [STRENGTH, torch.tensor(STRENGTH)], ids=["float", "tensor"])
    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    def test_the_decay_compiles_whole(self, strength: Any, backend: str) -> None:
        torch.manual_seed(0)
        parts = [fz.FactorizedLinear(12, 14, rank, depth=depth, bias=False) for rank, depth in ((3, 0), (3, 0), (4, 1))]
        model = shaken(nn.ModuleList(parts))
        apply = torch.compile(fz.FrobeniusDecay(model, strength).apply_, fullgraph=True, backend=backend)
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            apply()
            expected = torch.autograd.grad(by_weights(model, float(strength)), list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), expected, strict=True):
                assert error(parameter.grad, gradient) < 1e-10
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)

    @pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's, of its own tracing
    @pytest.mark.parametrize("decoupled", [False, True])
    def test_a_compiled_model_trains_as_it_does_eagerly(self, decoupled: bool) -> None:
        model, reference = twins()
        compiled = torch.compile(model, backend="aot_eager")
        for trained, holder in ((compiled, model), (reference, reference)):
            optimizer = torch.optim.SGD(fz.parameter_groups(trained, 0.01), lr=0.1, momentum=0.9)
            fz.FrobeniusDecay(trained, STRENGTH, decoupled=decoupled).attach(optimizer)
            train(trained, optimizer, range(3))
            assert difference(holder, mixed()) > 1e-2
        assert difference(model, reference) < 1e-10

    @pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
    @pytest.mark.parametrize("decoupled", [False, True])
    def test_a_compiled_step_decays_as_an_eager_one(self, decoupled: bool) -> None:
        model, reference = twins()
        for twin, compiles in ((model, True), (reference, False)):
            optimizer = torch.optim.SGD(fz.parameter_groups(twin, 0.01), lr=0.1, momentum=0.9)
            fz.FrobeniusDecay(twin, STRENGTH, decoupled=decoupled).attach(optimizer)
            if compiles:
                optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
            train(twin, optimizer, range(3))
        assert difference(model, reference) < 1e-12

    @pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
    @pytest.mark.parametrize("decoupled", [False, True])
    @pytest.mark.parametrize("set_to_none", [False, True])
    def test_a_compiled_step_decays_what_is_frozen_and_trained_again_like_an_eager_one(
        self, decoupled: bool, set_to_none: bool
    ) -> None:
        model, reference = twins()
        for twin, compiles in ((model, True), (reference, False)):
            optimizer = torch.optim.SGD(fz.parameter_groups(twin, 0.01), lr=0.1)
            fz.FrobeniusDecay(twin, STRENGTH, decoupled=decoupled).attach(optimizer)
            if compiles:
                optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
            for step, trained in enumerate((True, False, True)):
                twin.wide.U.requires_grad_(trained)
                train(twin, optimizer, range(step, step + 1), set_to_none=set_to_none)
        assert difference(model, reference) < 1e-12

    def test_a_compiled_decay_acts_on_what_is_frozen_and_trained_again(self) -> None:
        model, reference = twins()
        eager = fz.FrobeniusDecay(reference, STRENGTH, decoupled=True)
        decay = fz.FrobeniusDecay(model, STRENGTH, decoupled=True)
        compiled = torch.compile(decay.apply_, backend="aot_eager", fullgraph=True)
        for trained in (True, False, True):
            for twin in (model, reference):
                twin.wide.U.requires_grad_(trained)
            compiled(lr=0.1)
            eager.apply_(lr=0.1)
        assert difference(model, reference) < 1e-12

    @pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
    @pytest.mark.parametrize("before", [0.0, 0.1])
    @pytest.mark.parametrize("by_hand", [False, True])
    def test_a_strength_by_name_that_changes_in_place_acts_when_compiled(self, before: float, by_hand: bool) -> None:
        model, reference = twins()
        for twin, compiles in ((model, True), (reference, False)):
            optimizer = torch.optim.SGD(fz.parameter_groups(twin, 0.01), lr=0.1)
            decay = fz.FrobeniusDecay(twin, {"*": STRENGTH, "wide": before}, decoupled=False)
            act = decay.apply_ if by_hand else (lambda: None)
            if not by_hand:
                decay.attach(optimizer)
            if compiles:
                act = torch.compile(act, backend="aot_eager")
                optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
            train(twin, optimizer, range(1), before_step=act)
            decay.strength["wide"] = 0.5
            train(twin, optimizer, range(1, 2), before_step=act)
        assert difference(model, reference) < 1e-12


@pytest.mark.parametrize(
    ("make", "looks"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 1),
        (lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4, line_search_fn="strong_wolfe"), 4),
    ],
    ids=["sgd", "lbfgs"],
)
def test_a_decoupled_decay_shrinks_once_a_step_however_often_a_closure_is_called(
    make: Make, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = twins()
    optimizer = make(model.parameters())
    decay = fz.FrobeniusDecay(model, STRENGTH, decoupled=True).attach(optimizer)
    shrunk, called = [], []
    shrink = decay._shrink
    monkeypatch.setattr(decay, "_shrink", lambda rate, held: shrunk.append(1) or shrink(rate, held))

    def closure() -> torch.Tensor:
        called.append(1)
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert len(called) >= looks
    assert len(shrunk) == decay.steps == 1
