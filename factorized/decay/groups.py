"""``fz.parameter_groups``: parameter groups in which factors of products get no ordinary weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from factorized.attention.unit import are_forms
from factorized.decay.forms import Form, factor_parameters, forms, is_attention
from factorized.decay.rest import REST_DECAY, packed_parameters
from factorized.decay.strength import check_number
from factorized.nn.model import check_model

_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    *,
    decay_norms: bool = False,
    decay_biases: bool = False,
    crs: bool = False,
    attention: Sequence[str] = ("ov",),
) -> list[dict[str, Any]]:
    """Return parameter groups for any torch optimizer: weights with ``weight_decay``, factors of products without.

    A weight that packs factors of products together with ordinary weights (``in_proj_weight``, GPT-2's ``c_attn``) gets
    a separate group, which the optimizer does not decay: an attached decay or ``Flambe`` reads the group's
    ``"rest_decay"`` and decays the rest of the weight as the optimizer would have.

    Args:
        model: a factorized model; its frozen parameters are left out.
        weight_decay: the decay of ordinary weights.
        decay_norms: also decay the parameters of normalization layers. The paper's ResNet recipe sets this and
            ``decay_biases``.
        decay_biases: also decay biases.
        crs: compression-rate scaling instead of Frobenius decay: each product's factors are decayed by
            ``weight_decay`` times their share of the dense weight's parameters, and attention like any weight.
        attention: the forms of attention that are decayed as products: ``"ov"``, ``"qk"``, both or none. The weights
            of other forms count as ordinary weights.

    Raises:
        ValueError: ``weight_decay`` is not a finite number of at least 0, ``attention`` lists other forms, or what
            ``fz.forms`` raises.

    Examples:
        >>> model = nn.Sequential(fz.FactorizedLinear(64, 64, 8), nn.Linear(64, 10))
        >>> groups = fz.parameter_groups(model, weight_decay=1e-4)
        >>> [(group["weight_decay"], len(group["params"])) for group in groups]  # the linear, biases, U and V
        [(0.0001, 1), (0.0, 2), (0.0, 2)]
        >>> optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    """
    check_model(model)
    check_number("weight_decay", weight_decay)
    if not are_forms(attention):
        raise ValueError(f'attention must be a list of "ov" and "qk", got {attention!r}')
    chosen = [f for f in forms(model) if not is_attention(f) or (f.kind in attention and not crs)]
    owners = factor_parameters(chosen)
    packed = packed_parameters(chosen)
    norms = {p for module in model.modules() if _is_norm(module) for p in module.parameters(recurse=False)}
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    factors: dict[Form, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter in owners:
            factors.setdefault(owners[parameter], []).append(parameter)
            continue
        is_norm = parameter in norms
        is_bias = not is_norm and "bias" in name.rpartition(".")[2]  # in_proj_bias too
        kept = (decay_norms or not is_norm) and (decay_biases or not is_bias)
        (decayed if kept else free).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]
    if crs:
        groups += [
            {"params": parameters, "weight_decay": weight_decay * compression_rate(form)}
            for form, parameters in factors.items()
        ]
    else:
        whole = [p for parameters in factors.values() for p in parameters if p not in packed]
        mixed = [p for parameters in factors.values() for p in parameters if p in packed]
        groups.append({"params": whole, "weight_decay": 0.0})
        groups.append({"params": mixed, "weight_decay": 0.0, REST_DECAY: weight_decay})
    return [group for group in groups if group["params"]]


def compression_rate(form: Form) -> float:
    """Return the number of entries of a layer's factors, relative to its product."""
    return sum(factor.parameter.numel() for factor in form.factors) / form.numel


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, _NORMS) or "norm" in type(module).__name__.lower()
