"""``fz.factorize``: putting factorized layers into a model, all of them or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from factorized.attention.family import is_transposed
from factorized.attention.multihead import keep_off_nested_tensors
from factorized.attention.register import read_attention
from factorized.formats.format import Format
from factorized.formats.scheme import Scheme
from factorized.nn.conv import FactorizedConv1d, FactorizedConv2d, FactorizedConv3d
from factorized.nn.conv_transpose import (
    FactorizedConvTranspose1d,
    FactorizedConvTranspose2d,
    FactorizedConvTranspose3d,
)
from factorized.nn.dense import dense_weight, plain_class
from factorized.nn.embedding import FactorizedEmbedding
from factorized.nn.embedding_bag import FactorizedEmbeddingBag
from factorized.nn.held_factors import FactorizedWeight, hold
from factorized.nn.held_weight import ExpertWeights, RecurrentWeight, named_layers
from factorized.nn.init import Init, check_init
from factorized.nn.layer import FactorizedLayer
from factorized.nn.linear import FactorizedLinear
from factorized.nn.model import Model, check_model, listed, named, own_parameter, sharing_memory
from factorized.planning.budget import BUDGETS
from factorized.planning.calibration import Calibrated
from factorized.planning.plan import Entry, Plan
from factorized.planning.planner import PlanOptions
from factorized.planning.planner import plan as make_plan
from factorized.planning.replaceable import shares_memory, why_not_replaced, why_not_shrunk
from factorized.surgery.calibrate import calibrate_all
from factorized.surgery.decompose import decompose_all, refuse_not_finite
from factorized.surgery.heads import attention_difference, build_attention, refuse_unregistered
from factorized.surgery.progress import Count, Progress
from factorized.surgery.replace import refuse_wrapped, replace_modules
from factorized.surgery.ties import follow_ties

LAYERS: dict[type[nn.Module], Any] = {
    nn.Linear: FactorizedLinear,
    nn.Embedding: FactorizedEmbedding,
    nn.EmbeddingBag: FactorizedEmbeddingBag,
    nn.Conv1d: FactorizedConv1d,
    nn.Conv2d: FactorizedConv2d,
    nn.Conv3d: FactorizedConv3d,
    nn.ConvTranspose1d: FactorizedConvTranspose1d,
    nn.ConvTranspose2d: FactorizedConvTranspose2d,
    nn.ConvTranspose3d: FactorizedConvTranspose3d,
    RecurrentWeight: FactorizedWeight,
    ExpertWeights: FactorizedWeight,
}


def factorize(
    model: Model,
    plan: Plan | Scheme | None = None,
    *,
    init: Init | Calibrated | None = None,
    exact: bool = False,
    progress: Progress | None = None,
    **options: Unpack[PlanOptions],
) -> Model:
    """Replace layers of ``model`` by factorized ones, in place, and return it.

    Every new layer is built before the first is installed, so that a failure leaves the model unchanged. A model that
    is itself one layer cannot be changed in place: use what is returned. Attributes set on a layer are copied to the
    new one, and plain values set on its weight (``weight.no_weight_decay = True``) to every factor; ``deepcopy`` drops
    the latter.

    Args:
        model: any ``nn.Module``.
        plan: a plan, or a scheme, for which ``fz.plan`` is called first; ``LowRank()`` unless given.
        init: how the factors are filled. ``"spectral"`` decomposes the weights of the layers, random or trained: the
            default except for ``Overcomplete``. ``fz.Calibrated(batches)`` uses trained weights and data, which then
            also choose the ranks for ``allocate="spectrum"`` and ``energy``.
            ``"default"`` (the default for ``Overcomplete``), ``"kaiming"``, ``"normal"`` or a callable draws them; the
            cores of tensors are drawn so that the weight has the variance of a dense one.
        exact: take ``torch.linalg.svd`` for spectral factors. Other decompositions are several times faster; at low
            ranks of large matrices they are randomized, with an error within 0.5 % of the best approximation's.
            docs/spectral_initialization.md says what differs.
        progress: is called with the number of layers decomposed so far and the total; without it a tqdm bar appears
            after two seconds, in a terminal or a notebook.
        options: the keyword arguments of ``fz.plan`` (``ratio=0.1``, ``exclude=["head"]``, ...), if no plan is given.

    Raises:
        ValueError: what ``fz.plan`` raises, or the plan was made for another model, or a weight is not finite, or
            ``exact`` is given where nothing is decomposed.

    Examples:
        >>> model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        >>> fz.factorize(model, fz.LowRank(), ratio=0.8)
        Sequential(
          (0): Linear(in_features=64, out_features=64, bias=True)
          (1): FactorizedLinear(64, 64, bias=True, execution=chain, rank=12, params=1,536 of 4,096)
          (2): Linear(in_features=64, out_features=64, bias=True)
        )
    """
    check_model(model)
    _refuse_unknown(options)
    if init is not None and not isinstance(init, Calibrated):
        check_init(init, ", fz.Calibrated(batches)")
    if isinstance(plan, Plan):
        _refuse_options(options)
    else:
        if isinstance(init, Calibrated) and (
            options.get("allocate") == "spectrum" or options.get("energy") is not None
        ):
            options.setdefault("calibration", init)
        plan = make_plan(model, plan, **options)
    init = init if init is not None else plan.scheme.init
    if exact and init != "spectral" and not isinstance(init, Calibrated):
        raise ValueError(
            f'exact=True is for init="spectral", which decomposes weights; init={init!r} draws the factors'
        )
    return cast(Model, install(model, plan, build_layers(model, plan, init, progress, exact=exact)))


def _refuse_unknown(options: PlanOptions) -> None:
    """Raise as Python does if a keyword argument is not one of ``factorize``, and name the nearest."""
    known = [*(factorize.__kwdefaults__ or ()), *PlanOptions.__annotations__]
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
            raise TypeError(f"factorize() got an unexpected keyword argument {name!r}; {hint}")


def _refuse_options(options: PlanOptions) -> None:
    """Raise if options for planning are given together with a finished plan."""
    given = {name for name, value in options.items() if value is not None}
    if given.intersection(BUDGETS):
        raise ValueError("the plan already holds the budget: pass a plan, or a scheme with a budget, not both")
    if given:
        raise ValueError("the plan already selects the layers: pass include=, exclude= and the like to fz.plan instead")


@torch.inference_mode(False)  # whose tensors could not be trained later, and give calibration no gradients
def build_layers(
    model: nn.Module,
    plan: Plan,
    init: Init | Calibrated | None,
    progress: Progress | None = None,
    *,
    exact: bool = False,
) -> dict[str, nn.Module]:
    """Return the new module of every selected entry by each of its names; changes nothing.

    ``init=None`` leaves factors unfilled.
    """
    dense = _matching_layers(model, plan, same_ties=init is not None)
    layers: dict[str, FactorizedLayer] = {}
    for name, format in {entry.name: entry.format for entry in plan.layers if entry.format is not None}.items():
        with named(name):
            layers[name] = _build(dense[name], format)
            layers[name].carry(dense[name])
    for entry in plan.layers:
        if entry.tied_to is not None:
            layers[entry.name].share_factors(layers[entry.tied_to])
    leaders = [entry.name for entry in plan.layers if entry.tied_to is None and init is not None]
    filled = {name: layers[name] for name in leaders if not layers[name].factors[0].is_meta}
    weights = {name: dense_weight(dense[name]) for name in filled}
    count = Count(progress, len(filled) + len(plan.attention))
    if init == "spectral":
        factors = decompose_all(weights, filled, count, exact=exact)
        for name, layer in filled.items():
            layer.set_factors(*factors[name])
    elif isinstance(init, Calibrated):
        calibrate_all(model, init, plan, dense, layers, count, exact=exact)
    elif init is not None:
        refuse_not_finite(weights)  # they are not used, but the user should know of them
        for layer in filled.values():
            layer.draw_factors(init)
            count.add(1)
    built: dict[str, nn.Module] = {**layers}
    for attention in plan.attention:
        built[attention.name] = build_attention(model, attention, "spectral" if isinstance(init, Calibrated) else init)
        count.add(1)
    return {name: built[entry.name] for entry in plan.selected for name in (entry.name, *entry.aliases)}


def install(model: nn.Module, plan: Plan, layers: Mapping[str, nn.Module]) -> nn.Module:
    """Install built modules in ``model`` under all of their names; layers share the bias of those they replace."""
    held: dict[nn.Module, dict[str, FactorizedLayer]] = {}
    new: dict[nn.Module, nn.Module] = {}
    for entry in plan.selected:
        layer = layers[entry.name]
        if isinstance(layer, FactorizedLayer) and layer.is_held:
            host, _, key = entry.name.rpartition(".")
            held.setdefault(model.get_submodule(host), {})[key] = layer
            continue
        replaced = model.get_submodule(entry.name)
        if isinstance(layer, FactorizedLayer) and layer.bias is not None:
            bias = replaced.get_parameter("bias")
            bias.data.copy_(layer.bias.data)  # calibration may have adjusted it
            layer.bias = bias
        new |= {model.get_submodule(name): layer for name in (entry.name, *entry.aliases)}
    model = replace_modules(model, new)
    for module, weights in held.items():
        hold(module, weights)
    keep_off_nested_tensors(model)
    follow_ties(model)
    return model


def _build(dense: nn.Module, format: Format) -> FactorizedLayer:
    if is_transposed(dense):
        return FactorizedLinear.from_dense(dense, format, init=None, transposed=True)
    layer: FactorizedLayer = LAYERS[plain_class(dense, LAYERS) or type(dense)].from_dense(dense, format, init=None)
    return layer


def _matching_layers(model: nn.Module, plan: Plan, same_ties: bool) -> dict[str, nn.Module]:
    """Return the dense layers a plan names; raise with what differs from the model that the plan was made for.

    With ``same_ties`` they must share weights as in the plan: else a weight would silently be dropped or untied.
    """
    refuse_wrapped(model)
    modules = named_layers(model)
    refuse_unregistered(plan.attention, modules)
    places: dict[nn.Module, set[str]] = {}
    for name, module in modules.items():
        places.setdefault(module, set()).add(name)
    wrong = [text for entry in plan.selected if (text := _difference(entry, modules, places, same_ties)) is not None]
    planned = Counter(name for entry in plan.selected for name in (entry.name, *entry.aliases))
    wrong += [f"{name} is in the plan twice" for name, count in planned.items() if count > 1]
    wrong += [text for entry in plan.attention if (text := attention_difference(entry, modules)) is not None]
    wrong = wrong or _differing_ties(model, plan, modules, same_ties)
    if wrong:
        raise ValueError(
            f"the plan was made for another model ({plan.model}): {listed(wrong, 3, '; ')}. "
            f"Pass the dense model that it was made for, or make a plan for this {type(model).__name__}; nothing was "
            "changed"
        )
    sharded = [
        entry.name
        for entry in plan.selected
        if any(isinstance(parameter, DTensor) for parameter in modules[entry.name].parameters())
    ]
    if sharded:
        raise ValueError(
            f"{sharded[0]}: its weight is sharded over processes and cannot be decomposed; factorize the model before "
            "fully_shard. Nothing was changed"
        )
    shared = sharing_memory(model) if same_ties else {}
    for entry in plan.selected:
        with named(entry.name):
            _refuse_loss(modules[entry.name], shared)
    return {entry.name: modules[entry.name] for entry in plan.selected}


def _refuse_loss(module: nn.Module, shared: Mapping[Tensor, str]) -> None:
    """Raise if a replacement would lose something that was put on ``module`` after the plan was made."""
    found = read_attention("", module)
    unit = None if found is None else found.unit
    lost = why_not_replaced(module) if unit is None else why_not_shrunk(unit)
    weights = [dense_weight(module)] if unit is None else unit.parameters
    others = [shared[weight] for weight in weights if weight in shared]
    if lost is None and others:
        lost = shares_memory(others[0])
    if lost is not None:
        raise ValueError(f"{lost}. Nothing was changed")


def _difference(
    entry: Entry, modules: dict[str, nn.Module], places: dict[nn.Module, set[str]], same_ties: bool
) -> str | None:
    planned = {entry.name, *entry.aliases}
    missing = sorted(planned - modules.keys())
    if missing:
        return f"{missing[0]} is missing"
    module = modules[entry.name]
    weight = own_parameter(module, "weight")
    if type(module).__name__ != entry.type or (weight is None and not entry.is_attention):
        return f"{entry.name} is {type(module).__name__}, not {entry.type}"
    if weight is not None and tuple(weight.shape) != entry.shape:
        return f"{entry.name} has shape {_times(weight.shape)}, not {_times(entry.shape)}"
    # In a checkpoint they hold the same weights: a fresh T5 ties embeddings that transformers makes one to resize them.
    as_one = {module} if same_ties else {modules[name] for name in planned if _alike(module, modules[name])}
    found = set().union(*(places[part] for part in as_one))
    if found != planned:
        return f"{entry.name} is the module at {_joined(found)}; in the plan, at {_joined(planned)}"
    return None


def _alike(module: nn.Module, other: nn.Module) -> bool:
    shapes, others = ({name: p.shape for name, p in held.named_parameters()} for held in (module, other))
    return type(module) is type(other) and shapes == others


def _differing_ties(model: nn.Module, plan: Plan, modules: dict[str, nn.Module], same_ties: bool) -> list[str]:
    planned: dict[str, set[str]] = {}  # the layers that share one weight, by the first of them
    for entry in plan.layers:
        planned.setdefault(entry.tied_to or entry.name, set()).add(entry.name)
    holders: dict[Tensor, set[str]] = {}  # by parameter: modules that hold it as their weight, or its full name
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                full = f"{name}.{key}".removeprefix(".")
                holders.setdefault(parameter, set()).add(name if key == "weight" else full)
    wrong = []
    for entry in plan.layers:
        has, wants = holders[dense_weight(modules[entry.name])], planned[entry.tied_to or entry.name]
        if (entry.tied_to or entry.name) not in wants:
            wrong.append(f"{entry.name} is tied to {entry.tied_to}, which the plan does not factorize")
        elif same_ties and has != wants:
            actual, expected = _joined(has - {entry.name}), _joined(wants - {entry.name})
            wrong.append(f"{entry.name} shares its weight with {actual}; in the plan, with {expected}")
    return wrong


def _joined(names: set[str]) -> str:
    return " and ".join(sorted(names)) or "no other layer"


def _times(extents: Sequence[int]) -> str:
    return "x".join(map(str, extents))
