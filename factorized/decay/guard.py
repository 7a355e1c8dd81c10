"""Checks before a decay of products is attached to an optimizer, and before its steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from factorized.decay.forms import Form, factor_parameters, forms
from factorized.decay.strength import Strength, strengths
from factorized.nn.layer import FactorizedLayer

# Classes of torch and of other libraries (transformers has an Adafactor too) beside those that have betas.
_ADAPTIVE = {"Adadelta", "Adafactor", "Adagrad", "Muon", "RMSprop", "Rprop"}


class DecaysProducts(ABC):
    """Base class of everything that decays products: attached decays, and optimizers that decay. Abstract."""

    penalizes: ClassVar[str]  # a factor must not be decayed twice by the same penalty

    @property
    @abstractmethod
    def products(self) -> Sequence[Form]:
        """The forms that count as products, though their strength may be zero; other weights are ordinary ones."""

    @abstractmethod
    def holds(self, parameter: nn.Parameter) -> bool:
        """Return whether ``parameter`` is a factor that this object acts on."""


def check_attachable(decay: DecaysProducts, decayed: Sequence[Form], optimizer: Optimizer) -> None:
    """Raise if ``optimizer`` holds none of the factors, decays them itself, or has such a decay attached already."""
    check_hookable(optimizer)
    owners = factor_parameters(decayed)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter in owners]
    if decayed and not held and not any(parameter.requires_grad for parameter in owners):
        raise ValueError(
            f"all factors are frozen (requires_grad=False), such as those of {decayed[0].name!r}: there is nothing to "
            "decay; leave the decay out, or train some of the factors"
        )
    if decayed and not held:
        raise ValueError(
            f"the optimizer holds none of the factors (such as those of {decayed[0].name!r}); make it after "
            "fz.factorize, from fz.parameter_groups(model, ...), and the decay after anything that replaces "
            "parameters, such as fully_shard and to_empty"
        )
    check_still_held(decayed)
    check_decayed_once(decay, decayed, optimizer)


def check_hookable(optimizer: Optimizer) -> None:
    """Raise unless ``optimizer`` is one whose steps can be hooked into."""
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"attach takes a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if "_optimizer_step_pre_hooks" not in vars(optimizer):
        raise ValueError(
            f"attach takes an optimizer that torch can hook into, but {type(optimizer).__name__} only wraps one; "
            "attach to that one, before it is wrapped"
        )


def check_decayed_once(decay: DecaysProducts, decayed: Sequence[Form], optimizer: Optimizer) -> None:
    """Raise if ``optimizer`` decays factors of these forms itself, or another such decay is attached to it."""
    owners = factor_parameters(decayed)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter in owners]
    for group in optimizer.param_groups:
        doubly = [parameter for parameter in group["params"] if parameter in owners]
        if doubly and group.get("weight_decay", 0) != 0:
            raise ValueError(
                f"the optimizer decays the factors of {owners[doubly[0]].name!r} itself (weight_decay="
                f"{group['weight_decay']}), so they would be decayed twice; make it from "
                f"fz.parameter_groups(model, weight_decay={group['weight_decay']}{_also(owners[doubly[0]])}), which "
                "leaves the factors out"
            )
    if _same(optimizer, decay, held):
        raise ValueError(
            f"{type(optimizer).__name__} decays the same products itself, so they would be decayed twice; use fz.Lamb, "
            "or pass their strength only to the optimizer"
        )
    for hook in optimizer._optimizer_step_pre_hooks.values():
        other = getattr(hook, "__self__", None)
        if other is not decay and _same(other, decay, held):
            raise ValueError(
                f"a {type(decay).__name__} of the same factors is attached to this optimizer already; call its "
                "detach() first"
            )


def check_not_in_backward(decayed: Sequence[Form]) -> None:
    """Raise if a decay with ``in_backward=True`` acts on a layer of these forms, whichever optimizer steps."""
    for form in decayed:
        if form.layer is not None and form.layer.decay_in_backward:
            raise ValueError(
                f"a FrobeniusDecay with in_backward=True already decays {form.name!r}, whichever optimizer steps, so "
                "it would be decayed twice; call the detach() of that decay first"
            )


def check_still_held(decayed: Sequence[Form], *, between_passes: bool = False) -> None:
    """Raise if the model no longer holds a factor's parameter: it was pruned, parametrized, sharded or replaced.

    ``between_passes`` leaves out sharded ones: between a forward and a backward pass FSDP2 puts whole ones in their
    place.
    """
    for form in decayed:
        for factor in form.factors:
            if not factor.is_held and not (between_passes and isinstance(factor.parameter, DTensor)):
                raise ValueError(
                    f"{factor.name} is not the parameter that this decay was made for: it was pruned, parametrized, "
                    "sharded or replaced since. Make the optimizer and the decay after that; if the factor is "
                    "computed, make it a parameter again first (prune.remove, parametrize.remove_parametrizations)"
                )


class LaterLayers:
    """Finds layers of a model that were factorized after a decay of it was made; until then it compares two numbers."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._made = model, FactorizedLayer.made

    def check(self, known: Sequence[Form], decayed: Callable[[Sequence[Form]], Sequence[Form]] = tuple) -> None:
        """Raise if a layer of the model is not ``known`` and ``decayed`` returns it among those that should be."""
        if FactorizedLayer.made == self._made:
            return
        layers, factors = {form.layer for form in known}, factor_parameters(known)
        later = [  # of another layer and of other factors: FSDP2 may replace parameters, and layers may be tied
            form
            for form in forms(self._model)
            if form.layer not in layers and form.layer is not None and form.factors[0].parameter not in factors
        ]
        if missed := decayed(later):
            raise ValueError(
                f"{missed[0].name} was factorized after this decay was made, which does not act on it; make the "
                "optimizer and the decay after all layers are factorized"
            )
        self._made = FactorizedLayer.made


def only_makes_state(optimizer: Optimizer) -> bool:
    """Return whether a step is none of the training: a first one, at learning rates and gradients of zero.

    ``get_state_dict`` and ``set_state_dict`` of torch's distributed checkpoints take it, to make the state.
    """
    if optimizer.state or not all(_is_zero(group.get("lr")) for group in optimizer.param_groups):
        return False
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if any(gradient.is_sparse for gradient in gradients):
        return False
    norms = [torch.linalg.vector_norm(gradient, 1) for gradient in gradients]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]  # all ranks decide alike
    return bool(whole) and all(norm == 0 for norm in whole)


def _is_zero(lr: float | Tensor | None) -> bool:
    """Return whether a learning rate is zero; one on a GPU may be captured and is not read."""
    return lr is not None and not (isinstance(lr, Tensor) and lr.device.type != "cpu") and bool(lr == 0)


def is_adaptive(optimizer: Optimizer) -> bool:
    """Return whether an optimizer divides gradients by their size, as Adam does with its second moment."""
    named = any(cls.__name__ in _ADAPTIVE for cls in type(optimizer).__mro__)
    return named or "betas" in optimizer.defaults


def _same(other: object, decay: DecaysProducts, held: Sequence[nn.Parameter]) -> bool:
    if not isinstance(other, DecaysProducts) or other.penalizes != decay.penalizes:
        return False
    return any(other.holds(parameter) for parameter in held)


def _also(form: Form) -> str:
    return ', attention=("qk", "ov")' if form.kind == "qk" else ""


def composed_layers(
    decayed: Sequence[Form], strength: Strength, decoupled: bool
) -> dict[Form, tuple[FactorizedLayer, float]]:
    """Return the forms whose layer composes its weight to run, each with that layer and λ.

    The backward pass of such a layer can add λW.
    """
    if decoupled or callable(strength):
        raise ValueError(
            "in_backward=True takes numbers as strength and adds to gradients: no schedule, no decoupled=True"
        )
    numbers = strengths(strength, decayed, step=0)
    inside = {}
    for form, number in zip(decayed, numbers, strict=True):
        if form.layer is not None and form.layer.composes and not isinstance(number, Tensor):
            inside[form] = form.layer, number
    return inside
