"""What must hold before a decay of products is attached to an optimizer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from factorized.decay.forms import AnyForm, factor_parameters
from factorized.decay.strength import Strength, strengths


def check_attachable(decayed: Sequence[AnyForm], optimizer: Optimizer, kind: type) -> None:
    """Raise if ``optimizer`` holds none of the factors, decays them itself, or has such a decay attached already."""
    owners = factor_parameters(decayed)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter in owners]
    if decayed and not held:
        raise ValueError(
            f"the optimizer holds none of the factors (such as those of {decayed[0].name!r}); make it after "
            "fz.factorize, from fz.parameter_groups(model, ...)"
        )
    for group in optimizer.param_groups:
        doubly = [parameter for parameter in group["params"] if parameter in owners]
        if doubly and group.get("weight_decay", 0) != 0:
            raise ValueError(
                f"the optimizer decays the factors of {owners[doubly[0]].name!r} itself (weight_decay="
                f"{group['weight_decay']}), so they would be decayed twice; make it from "
                f"fz.parameter_groups(model, weight_decay={group['weight_decay']}{_also(owners[doubly[0]])}), which "
                "leaves the factors out"
            )
    for hook in optimizer._optimizer_step_pre_hooks.values():
        other = getattr(hook, "__self__", None)
        if type(other) is kind and any(other.holds(parameter) for parameter in held):  # type: ignore[attr-defined]
            raise ValueError(
                f"a {kind.__name__} of the same factors is attached to this optimizer already; detach() it"
            )


def _also(form: AnyForm) -> str:
    return ', attention=("qk", "ov")' if form.kind == "qk" else ""


def composed_layers(decayed: Sequence[AnyForm], strength: Strength, decoupled: bool) -> dict[AnyForm, float]:
    """Return the forms whose layer composes its weight to run, with their strengths: λW can act in their backward."""
    if decoupled or callable(strength):
        raise ValueError(
            "in_backward=True takes numbers as strength and adds to gradients: no schedule, no decoupled=True"
        )
    numbers = strengths(strength, decayed, step=0)
    inside = {}
    for form, number in zip(decayed, numbers, strict=True):
        if form.layer is not None and form.layer.composes and not isinstance(number, Tensor):
            inside[form] = number
    return inside
