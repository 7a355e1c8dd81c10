"""The plan that would rebuild a factorized model as it stands."""

from __future__ import annotations

from torch import nn

from factorized.deploy.attention import attention_entries
from factorized.deploy.state import plain_name
from factorized.layers.base import FactorizedLayer
from factorized.layers.composed import ComposedLayer
from factorized.layers.conv import FactorizedConv
from factorized.layers.tensor import TensorizedLayer
from factorized.planning.model import check_model, module_names
from factorized.planning.plan import Plan, PlanEntry, TensorEntry
from factorized.planning.scheme import LowRank, Overcomplete, Scheme
from factorized.planning.tensor_scheme import TensorTrain, Tucker


def describe(model: nn.Module) -> Plan:
    """Return a plan with one entry per factorized layer or shrunken attention of ``model``, from these themselves.

    It holds however the layers came to be: by several calls of ``fz.factorize``, or by hand.
    """
    check_model(model)
    places = {
        module: [plain_name(name) for name in names]
        for module, names in module_names(model).items()
        if isinstance(module, ComposedLayer)
    }
    attention = attention_entries(model, plain_name)
    if not (places or attention):
        raise ValueError(f"{type(model).__name__} has no factorized layer; call fz.factorize first")
    leaders: dict[tuple[nn.Parameter, ...], str] = {}
    entries = []
    for layer, names in places.items():
        _check_parameters(names[0], layer)
        leader = leaders.setdefault(layer.factors, names[0])
        entries.append(_entry(layer, names, leader if leader != names[0] else None))
    entries += attention
    saved = sum(entry.params - entry.params_after for entry in entries)
    after = sum(parameter.numel() for parameter in model.parameters())
    return Plan(
        model=type(model).__name__,
        scheme=_scheme(list(places)),
        budget="as built",
        entries=tuple(entries),
        params=after + saved,
        params_after=after,
    )


def _check_parameters(name: str, layer: ComposedLayer) -> None:
    """Refuse a layer that ``fz.load`` could not fill: it makes parameters of all that a layer holds."""
    tensors = (*layer.factors, *(() if layer.bias is None else (layer.bias,)))
    if any(not isinstance(tensor, nn.Parameter) for tensor in tensors):
        raise ValueError(
            f"{name or 'the model'}: a parametrization, a weight norm, pruning or FSDP1 computes its factors or bias, "
            "and a checkpoint holds parameters only. Make them parameters again first, by "
            "torch.nn.utils.parametrize.remove_parametrizations or torch.nn.utils.prune.remove"
        )


def _entry(layer: ComposedLayer, names: list[str], tied_to: str | None) -> PlanEntry:
    assert isinstance(layer, (FactorizedLayer, TensorizedLayer))
    return PlanEntry(
        name=names[0],
        type=type(layer.dense_skeleton()).__name__,
        shape=layer.shape.weight_shape,
        groups=layer.shape.groups,
        rank=layer.rank,
        kind=layer.kind if isinstance(layer, FactorizedConv) else "spatial",
        depth=layer.depth if isinstance(layer, FactorizedLayer) else 0,
        aliases=tuple(names[1:]),
        tied_to=tied_to,
        params=layer.shape.numel if tied_to is None else 0,
        params_after=sum(factor.numel() for factor in layer.factors) if tied_to is None else 0,
        tensor=_tensor(layer) if isinstance(layer, TensorizedLayer) else None,
    )


def _tensor(layer: TensorizedLayer) -> TensorEntry:
    folding = layer.folding
    return TensorEntry(
        folding.method, folding.dims, folding.core, folding.refinements, separable=layer.depthwise is not None
    )


def _scheme(layers: list[ComposedLayer]) -> Scheme:
    if not layers:  # of attention alone
        return LowRank()
    matrices = [layer for layer in layers if isinstance(layer, FactorizedLayer)]
    if not matrices:
        trains = all(isinstance(layer, TensorizedLayer) and layer.is_train for layer in layers)
        return TensorTrain() if trains else Tucker()
    if any(layer.depth for layer in matrices):
        return Overcomplete("deep")
    overcomplete = all(layer.rank >= layer.shape.full_rank for layer in matrices)
    return Overcomplete("full") if overcomplete else LowRank()
