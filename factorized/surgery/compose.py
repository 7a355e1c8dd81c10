"""``fz.compose``: a factorized model as plain dense ``torch.nn`` modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from factorized._torch import full_precision
from factorized.attention.unit import AttentionUnit
from factorized.nn.held_factors import HoldsFactors, release
from factorized.nn.held_weight import HeldWeight
from factorized.nn.layer import FactorizedLayer
from factorized.nn.model import Model, check_copyable, check_model, module_names
from factorized.surgery.heads import plain_attention, shrunk_attention, with_plain_attention
from factorized.surgery.replace import copied, replace_modules
from factorized.surgery.state import check_finite, is_sharded
from factorized.surgery.ties import follow_ties

ToPlain = Callable[[list[str], FactorizedLayer, "SharedWeights"], nn.Module]
ToPlainAttention = Callable[[list[str], AttentionUnit], nn.Module]


class SharedWeights:
    """The plain parameters made so far, so that layers that share factors share the parameter too."""

    def __init__(self) -> None:
        self._made: dict[tuple[tuple[nn.Parameter, ...], object], nn.Parameter] = {}

    def parameter(self, layer: FactorizedLayer, role: object, value: Tensor) -> nn.Parameter:
        """Return the parameter that plays ``role`` for the layer's factors, made from ``value`` at the first call."""
        trains = any(factor.requires_grad for factor in layer.factors)
        made = nn.Parameter(value.detach().clone(memory_format=torch.contiguous_format), requires_grad=trains)
        return self._made.setdefault((layer.factors, role), made)


def is_factorized(model: nn.Module) -> bool:
    """Return whether ``model`` holds factorized layers or shrunk attention, which ``compose`` undoes."""
    return any(isinstance(module, FactorizedLayer) for module in model.modules()) or bool(shrunk_attention(model))


def compose(model: Model, *, allow_nonfinite: bool = False) -> Model:
    """Return a copy of ``model`` whose factorized layers are dense ``torch.nn`` layers with the same function.

    The weights are the products ``U M₁…M_d Vᵀ``; tied layers stay tied. Shrunk attention gets its dense head size
    back, padded with zeros, in its original class. The given model is not changed, and the copy does not need this
    package.

    Raises:
        ValueError: the model has no factorized layer, is sharded over processes, or has weights that are not finite;
            ``allow_nonfinite=True`` converts those too.

    Examples:
        >>> model = nn.Sequential(fz.FactorizedLinear(64, 64, 8))
        >>> fz.compose(model)
        Sequential(
          (0): Linear(in_features=64, out_features=64, bias=True)
        )
    """
    return convert(model, _dense_layer, _dense_attention, allow_nonfinite=allow_nonfinite)


def compose_in_place(model: nn.Module) -> nn.Module:
    """Do what ``compose`` does to ``model`` itself, and return it, or its replacement if it is itself a layer."""
    return _replace_all(model, _dense_layer, _dense_attention)


def _dense_layer(names: list[str], layer: FactorizedLayer, shared: SharedWeights) -> nn.Module:
    return dense_layer(layer, shared)


def _dense_attention(names: list[str], unit: AttentionUnit) -> nn.Module:
    return plain_attention(unit, unit.head_size)


def dense_layer(layer: FactorizedLayer, shared: SharedWeights) -> nn.Module:
    """Return the dense ``torch.nn`` layer for ``layer``, which shares its bias."""
    dense = layer.dense_skeleton()
    dense.weight = shared.parameter(layer, "weight", layer.weight.reshape(layer.dense_shape))
    if layer.bias is not None:
        dense.bias = layer.bias
    return dense.train(layer.training)


@torch.inference_mode(False)  # whose tensors could not be trained later
def convert(
    model: Model,
    to_plain: ToPlain,
    to_plain_attention: ToPlainAttention,
    *,
    allow_nonfinite: bool,
) -> Model:
    """Return a copy of ``model`` with every factorized layer replaced by ``to_plain``, under all of its names.

    ``to_plain_attention`` replaces shrunk attention. Weights must be finite, before and after, unless
    ``allow_nonfinite``.
    """
    check_model(model)
    if is_sharded(model):
        raise ValueError(
            f"{type(model).__name__} is sharded over processes and cannot be copied; call fz.save, which gathers it, "
            "and fz.load in one process"
        )
    if not allow_nonfinite:
        check_finite(model, "pass allow_nonfinite=True to convert the model as it is")
    check_copyable(model)
    copy = _replace_all(copied(model), to_plain, to_plain_attention)
    if not allow_nonfinite:
        check_finite(
            copy,
            "its finite factors have a product that is too large for its type. Convert model.float(), or pass "
            "allow_nonfinite=True",
        )
    return cast(Model, copy)


@full_precision
def _replace_all(model: nn.Module, to_plain: ToPlain, to_plain_attention: ToPlainAttention) -> nn.Module:
    """Replace every factorized layer and all shrunk attention in place; return the model."""
    attention = shrunk_attention(model)
    places = {layer: names for layer, names in module_names(model).items() if isinstance(layer, FactorizedLayer)}
    if not (places or attention):
        raise ValueError(f"{type(model).__name__} has no factorized layer; call fz.factorize first")
    shared = SharedWeights()
    held: dict[FactorizedLayer, nn.Parameter] = {}
    new: dict[nn.Module, nn.Module] = {}
    for layer, names in places.items():
        plain = to_plain(names, layer, shared)
        if isinstance(plain, HeldWeight):
            held[layer] = plain.weight
            continue
        layer.hand_back(plain)
        new[layer] = plain
    model = replace_modules(model, new)
    for holder in [module for module in model.modules() if isinstance(module, HoldsFactors)]:
        release(holder, held)
    model = with_plain_attention(model, attention, to_plain_attention)
    follow_ties(model)
    return model
