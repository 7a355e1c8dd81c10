"""``fz.FrobeniusDecay``: λ/2 ‖U M₁…M_d Vᵀ‖² on every product, with any optimizer (section 3.2 of the paper)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Self

from torch import Tensor, nn
from torch.optim import Optimizer

from factorized._checks import check_whole, warn
from factorized._torch import computable, not_compiled, on_one_device, without_autocast
from factorized.decay.engine import Engine, gradient_of
from factorized.decay.forms import Factor, Form, forms, why_none
from factorized.decay.guard import check_not_in_backward, composed_layers, is_adaptive
from factorized.decay.hook import AttachedDecay, Step, inner_optimizer
from factorized.decay.rest import decay_rest
from factorized.decay.strength import (
    Number,
    Strength,
    check_number,
    check_readable,
    check_strength,
    decayed_forms,
    noted,
    product_forms,
    scalar,
    strengths,
)
from factorized.nn.layer import FactorizedLayer


class FrobeniusDecay(AttachedDecay):
    """Penalize the product, not its factors: adds λ · ∂½‖U M₁…M_d Vᵀ‖² to the factors' gradients before every step.

    For a layer in another format it penalizes the squared norm of its weight, and the factors are the format's cores.

    Args:
        model: holds the products, see ``fz.forms``.
        strength: λ. A number, a tensor of one number, a schedule ``step -> λ``, or a dict from form kinds, names of
            formats or name globs to numbers (the last match wins; forms that match nothing are not decayed). For
            attention, a number or schedule decays OV only; QK is decayed where a dict has ``"qk"`` or, under rotary
            embeddings, ``"*.qk"``.
        decoupled: True subtracts lr·λ·gradient from the parameters instead, as AdamW does with its decay. None means
            False, with a warning if the optimizer is adaptive and so rescales the gradient: Adam, ``fz.Lamb``, …
        in_backward: for layers that compose their weight to run, add λW to the gradient of W inside the backward pass,
            which costs almost nothing. Exact if every step is one backward pass that calls each layer once and whose
            gradients reach the optimizer unchanged: no accumulation, gradient clipping or ``GradScaler``. A layer that
            is called twice is decayed twice, and one whose ``weight`` the model's code reads instead (Mamba, WavLM) is
            not decayed. Inside autocast it is rounded like the composed weight.

    Raises:
        ValueError: the model holds no products, ``strength`` has a wrong value or names nothing in the model; in
            ``attach``, if the optimizer does not hold the factors, or decays them itself.

    Examples:
        >>> model = nn.Sequential(fz.FactorizedLinear(64, 64, 8), nn.Linear(64, 10))
        >>> optimizer = torch.optim.SGD(fz.parameter_groups(model, weight_decay=1e-4), lr=0.1)
        >>> decay = fz.FrobeniusDecay(model, 1e-4).attach(optimizer)
        >>> decay
        FrobeniusDecay(products=1, strength=0.0001, decoupled=False)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()  # decays the product, too
    """

    noun = "decay"
    shown = ("strength", "decoupled")
    penalizes = "the squared Frobenius norm"

    def __init__(
        self, model: nn.Module, strength: Strength, *, decoupled: bool | None = None, in_backward: bool = False
    ) -> None:
        self.forms = forms(model)
        if not self.forms:
            raise ValueError(
                f"{type(model).__name__} holds no products to decay; call fz.factorize first{why_none(model)}"
            )
        check_readable(strength, model)
        self.decoupled = self.changes_parameters = bool(decoupled)
        self._hints = decoupled is None  # whether to warn that an adaptive optimizer rescales what is added
        super().__init__(model, ())
        self._inside: dict[Form, tuple[FactorizedLayer, float]] = {}
        self._engine = Engine(())
        self.strength = strength
        if in_backward:
            self._inside = composed_layers(self._decayed, strength, self.decoupled)
            self._engine = Engine([form for form in self._decayed if form not in self._inside])

    @property
    def strength(self) -> Strength:
        """λ, which may be set between steps; a dict may also be changed in place."""
        return self._strength

    @strength.setter
    def strength(self, strength: Strength) -> None:
        if self._inside:
            raise ValueError(
                "with in_backward=True the layers hold the strength, and it cannot be set; detach this decay and make "
                "another one"
            )
        check_strength(strength, self.forms)
        self._strength, self._noted = strength, noted(strength)
        decayed = decayed_forms(strength, self.forms)
        if decayed != self._decayed:
            self._decayed, self._engine = decayed, Engine(decayed)
            self._decays_seen = []  # so that the next step checks that nothing else decays these forms

    @property
    def products(self) -> Sequence[Form]:
        """The forms that count as products, also at a strength of zero."""
        return product_forms(self._strength, self.forms)

    def penalty(self) -> Tensor:
        """Return Σ λ/2 ‖U M₁…M_d Vᵀ‖², differentiable; to add to a loss or to log.

        A schedule is asked with ``steps``, which only an attached decay and ``apply_`` count: with the penalty in the
        loss, add one to it after every step. Sharded factors are gathered, so all ranks must call it.
        """
        self._refresh()
        found = self._decayed or self.forms[:1]
        numbers = strengths(self.strength, found, self.steps)
        with without_autocast(*(form.factors[0].parameter.device for form in found)):
            norms = [form.norm_squared([computable(value) for value in form.values]).sum() for form in found]
            halves = [_near(number, norm) * norm / 2 for number, norm in zip(numbers, norms, strict=True)]
        return on_one_device(halves).sum()

    def apply_(self, lr: Number | None = None) -> None:
        """Act once, by hand: on the current gradients or, with ``decoupled=True``, on the parameters at ``lr``.

        Parameters are shrunk whether they have gradients or not, so it may be called after ``zero_grad``.
        """
        if self.decoupled and lr is None:
            raise ValueError("decoupled decay is scaled by the learning rate: call apply_(lr=...)")
        if not self.decoupled and lr is not None:
            raise ValueError(
                "decay that is added to gradients is not scaled by a learning rate: call apply_() without lr="
            )
        if self._inside:
            raise ValueError("with in_backward=True part of the decay acts in the backward pass: attach it instead")
        self._refresh()
        if lr is None:
            numbers = self._numbers()
            self._engine.add(gradient_of, lambda factor: numbers[factor])  # torch 2.11 traces no dict.__getitem__
        else:
            if not isinstance(lr, Tensor):
                check_number("lr", lr)
            rate = scalar(lr)
            self._shrink(lambda parameter: rate, lambda parameter: True)
        self.steps += 1

    def attach(self, optimizer: Optimizer) -> Self:
        """Act just before every ``optimizer.step()``, after clipping and unscaling; return this decay.

        Copies of torch's optimizers drop such attachments: attach a decay of the copied model to them. LBFGS, which
        compares losses, gets the penalty added to them.
        """
        optimizer = inner_optimizer(optimizer)
        if self._inside and any(group.get("maximize", False) for group in optimizer.param_groups):
            raise ValueError(
                "in_backward=True adds λW to gradients for descent, but the optimizer maximizes; use in_backward=False"
            )
        if self._handle is None:
            check_not_in_backward(self._decayed)
        super().attach(optimizer)
        if self._hints and is_adaptive(optimizer):
            warn(
                f"{type(optimizer).__name__} rescales gradients, including the decay that is added to them. Pass "
                "decoupled=True, or use fz.decoupled_frobenius, to shrink the factors as AdamW does with its own "
                "decay. decoupled=False keeps the decay in the gradients, without this warning",
            )
        for layer, number in self._inside.values():
            layer.decay_in_backward = number
        return self

    def detach(self) -> None:
        """Stop acting on the optimizer."""
        super().detach()
        for layer, _ in self._inside.values():
            layer.decay_in_backward = 0.0

    def state_dict(self) -> dict[str, int]:
        """Return what a schedule needs to continue after a restart: the number of steps taken."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where a saved decay left off."""
        check_whole("steps", state.get("steps"), least=0)
        self.steps = state["steps"]

    def _refresh(self, *, stepping: bool = False) -> None:
        if noted(self._strength) != self._noted:
            self._take_over()
        super()._refresh(stepping=stepping)

    @not_compiled  # torch cannot: workers are made for other forms
    def _take_over(self) -> None:
        self.strength = self._strength

    def _acts_on(self, found: Sequence[Form]) -> Sequence[Form]:
        return decayed_forms(self._strength, found)

    def _counts(self, step: Step) -> bool:
        return not (callable(self.strength) and step.is_skipped())  # only a schedule is worth waiting for

    def _act(self, step: Step) -> None:
        if self.decoupled:
            self._shrink(step.rate, lambda parameter: step.holds(parameter) and parameter.grad is not None)
        else:
            numbers = step.for_gradients(self._numbers())
            self._engine.add(lambda f: gradient_of(f) if f in numbers else None, numbers.__getitem__)
        decay_rest(step, self, decoupled=self.decoupled)

    def _shrink(self, rate: Callable[[nn.Parameter], Number], acts_on: Callable[[nn.Parameter], bool]) -> None:
        numbers = self._numbers()
        made: dict[tuple[Number, Number], Number] = {}  # equal numbers share one tensor, and so one launch

        def parameter_of(factor: Factor) -> Tensor | None:
            parameter = factor.parameter
            return parameter.detach() if parameter.requires_grad and acts_on(parameter) else None

        def number_of(factor: Factor) -> Number:
            key = rate(factor.parameter), numbers[factor]
            if key not in made:
                made[key] = -key[0] * key[1]
            return made[key]

        self._engine.add(parameter_of, number_of)

    def _numbers(self) -> dict[Factor, Number]:
        # Factors are read from a list: torch's compiler would not see that one from a dict's keys is frozen later.
        if isinstance(self.strength, float):  # the same as ``strengths``, five times faster
            number = self.strength
            return {f: 0.0 if form.kind == "qk" else number for form in self._decayed for f in form.factors}
        numbers = strengths(self.strength, self._decayed, self.steps)
        return {f: number for form, number in zip(self._decayed, numbers, strict=True) for f in form.factors}


def _near(number: Number, norm: Tensor) -> Number:
    return number.to(norm.device) if isinstance(number, Tensor) else number


def decoupled_frobenius(optimizer: Optimizer, model: nn.Module, strength: Strength) -> FrobeniusDecay:
    """Give any ``optimizer`` decoupled Frobenius decay: each step subtracts lr·λ·gradient from the factors.

    ``model`` and ``strength`` are those of ``fz.FrobeniusDecay``. Returns the decay, attached to the optimizer.

    Raises:
        ValueError: as ``fz.FrobeniusDecay`` and its ``attach``.

    Examples:
        >>> model = nn.Sequential(fz.FactorizedLinear(64, 64, 8), nn.Linear(64, 10))
        >>> optimizer = torch.optim.AdamW(fz.parameter_groups(model, weight_decay=0.1), lr=1e-3)
        >>> decay = fz.decoupled_frobenius(optimizer, model, 0.1)
    """
    return FrobeniusDecay(model, strength, decoupled=True).attach(optimizer)
