"""Describe a factorized model by the plan that would rebuild it."""

from __future__ import annotations

from torch import nn

from factorized.nn.layer import FactorizedLayer
from factorized.nn.model import check_model, module_names
from factorized.nn.running import count_parameters
from factorized.planning.plan import Entry, Plan, PlanEntry
from factorized.planning.schemes import scheme_of
from factorized.surgery.heads import attention_entries
from factorized.surgery.state import plain_name


def describe(model: nn.Module) -> Plan:
    """Return a plan with one entry per factorized layer or shrunk attention module of ``model``, read from the model.

    It does not matter how the layers were made: by several calls of ``fz.factorize``, or by hand.
    """
    check_model(model)
    places = {
        module: [module.dense_name(plain_name(name)) for name in names]
        for module, names in module_names(model).items()
        if isinstance(module, FactorizedLayer)
    }
    attention = attention_entries(model, plain_name)
    if not (places or attention):
        raise ValueError(f"{type(model).__name__} has no factorized layer; call fz.factorize first")
    leaders: dict[tuple[nn.Parameter, ...], str] = {}
    entries: list[Entry] = []
    for layer, names in places.items():
        _check_parameters(names[0], layer)
        leader = leaders.setdefault(layer.factors, names[0])
        entries.append(_entry(layer, names, leader if leader != names[0] else None))
    entries += attention
    saved = sum(entry.params - entry.params_after for entry in entries)
    after = count_parameters(model)
    return Plan(
        model=type(model).__name__,
        scheme=scheme_of([layer.format for layer in places]),
        budget="as built",
        entries=tuple(entries),
        params=after + saved,
        params_after=after,
    )


def _check_parameters(name: str, layer: FactorizedLayer) -> None:
    """Raise for a layer that ``fz.load`` could not fill, because it fills only parameters."""
    tensors = (*layer.factors, *(() if layer.bias is None else (layer.bias,)))
    if any(not isinstance(tensor, nn.Parameter) for tensor in tensors):
        raise ValueError(
            f"{name or 'the model'}: a parametrization, a weight norm, pruning or FSDP1 computes its factors or bias, "
            "and a checkpoint holds parameters only. Make them parameters again first, with "
            "torch.nn.utils.parametrize.remove_parametrizations or torch.nn.utils.prune.remove"
        )


def _entry(layer: FactorizedLayer, names: list[str], tied_to: str | None) -> PlanEntry:
    return PlanEntry(
        name=names[0],
        type=(layer.dense_class or type(layer.dense_skeleton())).__name__,
        shape=layer.dense_shape,
        format=layer.format,
        aliases=tuple(names[1:]),
        tied_to=tied_to,
        params=layer.shape.numel if tied_to is None else 0,
        params_after=layer.format.numel if tied_to is None else 0,
    )
