"""``fz.FrobeniusDecay``: λ/2 ‖U M₁…M_d Vᵀ‖² on every product, with any optimizer (section 3.2 of the paper)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from factorized.decay.act import Arguments, FrobeniusEngine, act_before_update, gradient_of, learning_rates
from factorized.decay.forms import Factor, forms, unread_attention
from factorized.decay.guard import check_attachable, composed_layers
from factorized.decay.rest import decay_rest
from factorized.decay.strength import Number, Strength, check_readable, check_strength, decayed_forms, strengths
from factorized.maths.frobenius import computable


class FrobeniusDecay:
    """Penalize the product, not its factors: adds λ · ∂½‖U M₁…M_d Vᵀ‖² to the factors' gradients before every step.

    Of a tensorized layer it is the squared norm of the whole tensor, and the factors are its cores.

    Args:
        model: holds the products, see ``fz.forms``.
        strength: λ. A number, a tensor of one number, a schedule ``step -> λ``, or a dict from form kinds or name globs
            to numbers (the last match wins; what matches nothing is not decayed). Of attention, a number or schedule
            decays OV alone; QK is decayed where a dict says ``"qk"``, or, under rotary embeddings, names ``"*.qk"``.
        decoupled: subtract lr·λ·gradient from the parameters instead, as AdamW does with its decay.
        in_backward: for layers that compose their weight to run, add λW to the gradient of W inside the backward pass,
            which costs next to nothing. Exact where every step is one backward pass that uses each layer once, and
            whose gradients reach the optimizer as they are: no accumulation, gradient clipping or ``GradScaler``.
    """

    def __init__(
        self, model: nn.Module, strength: Strength, *, decoupled: bool = False, in_backward: bool = False
    ) -> None:
        self.forms = forms(model)
        if not self.forms:
            raise ValueError(
                f"{type(model).__name__} holds no products to decay; call fz.factorize first{unread_attention(model)}"
            )
        check_readable(strength, model)
        check_strength(strength, self.forms)
        self.strength = strength
        self.decoupled = decoupled
        self.steps = 0  # taken so far: what a schedule is asked with
        self._decayed = decayed_forms(strength, self.forms)
        self._inside = composed_layers(self._decayed, strength, decoupled) if in_backward else {}
        self._engine = FrobeniusEngine([form for form in self._decayed if form not in self._inside])
        self._handle: RemovableHandle | None = None

    def penalty(self) -> Tensor:
        """Return Σ λ/2 ‖U M₁…M_d Vᵀ‖², differentiable; for a loss of your own, or to log."""
        found = self._decayed or self.forms[:1]
        numbers = strengths(self.strength, found, self.steps)
        norms = [form.norm_squared([computable(value) for value in form.values]).sum() for form in found]
        return torch.stack([number * norm / 2 for number, norm in zip(numbers, norms, strict=True)]).sum()

    def apply_(self, lr: Number | None = None) -> None:
        """Act once, by hand: on the gradients that are there; with ``decoupled=True`` on the parameters, at ``lr``."""
        if self.decoupled and lr is None:
            raise ValueError("decoupled decay is scaled by the learning rate: call apply_(lr=...)")
        if self._inside:
            raise ValueError("with in_backward=True part of the decay acts in the backward pass: attach it instead")
        if self.decoupled:
            self._shrink(lambda parameter: lr, lambda parameter: True)  # type: ignore[arg-type, return-value]
        else:
            self._add_to_gradients(None, lambda parameter: True)
        self.steps += 1

    def attach(self, optimizer: Optimizer) -> Self:
        """Act just before every ``optimizer.step()``, after clipping and unscaling; return this decay."""
        if self._handle is not None:
            raise ValueError("this decay is attached already; call detach() first")
        check_attachable(self._decayed, optimizer, FrobeniusDecay)
        for form, number in self._inside.items():
            assert form.layer is not None
            form.layer.decay_in_backward = number
        self._handle = optimizer.register_step_pre_hook(self._before_step)
        return self

    def detach(self) -> None:
        """Stop acting on the optimizer."""
        if self._handle is None:
            raise ValueError("this decay is not attached to an optimizer; call attach(optimizer) first")
        self._handle.remove()
        self._handle = None
        for form in self._inside:
            assert form.layer is not None
            form.layer.decay_in_backward = 0.0

    def state_dict(self) -> dict[str, int]:
        """Return what a schedule has to know to go on after a restart: the steps taken."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where a saved decay left off."""
        self.steps = state["steps"]

    def holds(self, parameter: nn.Parameter) -> bool:
        """Say whether ``parameter`` is a factor that this decay acts on."""
        return any(factor.parameter is parameter for form in self._decayed for factor in form.factors)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        return act_before_update(partial(self._act, optimizer, self.steps), args, kwargs, once=self.decoupled)

    def _act(self, optimizer: Optimizer, step: int) -> None:
        self.steps = step  # a closure may act several times within one step
        rates = learning_rates(optimizer.param_groups)
        # A fused optimizer unscales its gradients itself, after this, and is told by what here.
        scale = getattr(optimizer, "grad_scale", None)
        found_inf = getattr(optimizer, "found_inf", None)
        if not self.decoupled:
            self._add_to_gradients(scale, rates.__contains__)
        else:
            kept = 1.0 if found_inf is None else 1 - found_inf
            self._shrink(lambda parameter: rates[parameter] * kept, rates.__contains__)
        factors = (factor for form in self._decayed for factor in form.factors)
        decay_rest(optimizer, factors, decoupled=self.decoupled)
        self.steps += 1

    def _add_to_gradients(self, scale: Tensor | None, held: Callable[[nn.Parameter], bool]) -> None:
        numbers = self._numbers()
        if scale is not None:  # equal strengths keep sharing one tensor, and so one launch
            scaled = {number: number * scale for number in numbers.values()}
            numbers = {factor: scaled[number] for factor, number in numbers.items()}
        self._engine.add(lambda f: gradient_of(f) if held(f.parameter) else None, numbers.__getitem__)

    def _shrink(self, rate: Callable[[nn.Parameter], Number], held: Callable[[nn.Parameter], bool]) -> None:
        numbers = self._numbers()

        def parameter_of(factor: Factor) -> Tensor | None:
            parameter = factor.parameter
            acts = held(parameter) and parameter.requires_grad and parameter.grad is not None
            return parameter.detach() if acts else None

        self._engine.add(parameter_of, lambda f: -rate(f.parameter) * numbers[f], to_factors=True)

    def _numbers(self) -> dict[Factor, Number]:
        numbers = strengths(self.strength, self.forms, self.steps)
        of = dict(zip(self.forms, numbers, strict=True))
        return {factor: of[form] for factor, form in self._engine.form_of.items()}


def decoupled_frobenius(optimizer: Optimizer, model: nn.Module, strength: Strength) -> FrobeniusDecay:
    """Give ``optimizer``, whichever it is, decoupled Frobenius decay: lr·λ·gradient off the factors, each step."""
    return FrobeniusDecay(model, strength, decoupled=True).attach(optimizer)
