"""``fz.truncate``: cutting an already factorized model to lower ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from operator import gt
from typing import Any, cast

import torch
from torch import nn

from factorized._checks import check_whole, is_number, plain_number
from factorized._torch import computable, full_precision
from factorized.attention.cost import AttentionCost, attention_spectrum
from factorized.attention.matrices import padded_matrices, spectral_matrices
from factorized.attention.resize import plain_module, read_unit, shrunk_module
from factorized.attention.unit import FORMS, AttentionUnit
from factorized.formats.format import Format
from factorized.nn.layer import FactorizedLayer
from factorized.nn.model import Model, check_model, module_names, named
from factorized.nn.running import count_parameters
from factorized.planning.plan import AttentionEntry, Plan, PlanEntry
from factorized.planning.ranks import Choice, Item, lowest_cost, spend_uniformly
from factorized.planning.spectrum import rank_for_energy
from factorized.surgery.heads import hand_hooks, shrunk_attention
from factorized.surgery.replace import refuse_wrapped, replace_modules
from factorized.surgery.state import is_sharded, plain_name

Install = Callable[[nn.Module], nn.Module]  # installs the result in a model, and returns the model


@dataclass(frozen=True)
class Cut:
    """One product, or the heads of one attention module: its choices, from the present one down, and their use."""

    name: str  # as in a plan
    item: Item
    choices: Sequence[Choice]  # formats, or the sizes of a head in its shrunk forms
    energies: Callable[[], torch.Tensor]  # squared singular values
    planned: Callable[[PlanEntry | AttentionEntry], Choice]  # the choice of a plan's entry
    cut: Callable[[Choice], Install]

    def at_most(self, rank: int) -> Choice:
        """Return the present choice with every rank above ``rank`` lowered to it."""
        now = self.choices[0]
        return _capped(now, rank) if isinstance(now, Format) else tuple(min(size, rank) for size in now)


@torch.inference_mode(False)  # whose tensors could not be trained later
@full_precision
def truncate(
    model: Model,
    plan: Plan | None = None,
    *,
    ratio: float | None = None,
    rank_scale: float | None = None,
    rank: int | None = None,
    energy: float | None = None,
) -> Model:
    """Cut the products of a factorized ``model`` to lower ranks, in place, and return it.

    Each layer keeps the best approximation of its weight: a product by an SVD of its rank × rank core, a tensor
    train by rounding, a Tucker tensor by the HOSVD of its core, another format by decomposing its weight again. Shrunk
    attention heads shrink further. Nothing else changes, tied layers stay tied, and all layers are cut or none;
    residuals, whose rest is frozen, cannot be cut. The parameters are new, so make a new optimizer and decay. Give
    exactly one of ``plan``, ``ratio``, ``rank_scale``, ``rank`` and ``energy``.

    Args:
        model: a model that ``fz.factorize`` or ``fz.load`` returned.
        plan: a plan for the dense model, with ranks that are no higher than those of its layers; other layers stay.
        ratio: parameters after, relative to those of the factorized model now; never exceeded.
        rank_scale: the share of every rank to keep.
        rank: the highest rank to keep; where a layer has several ranks, lower ones are not cut.
        energy: share of each product's squared singular values to keep.

    Raises:
        ValueError: not exactly one of them is given, a value is out of reach, or the model has no factorized layer.

    Examples:
        >>> model = nn.Sequential(fz.FactorizedLinear(64, 64, 16))
        >>> fz.truncate(model, rank_scale=0.5)[0].rank
        8
    """
    check_model(model)
    refuse_wrapped(model)
    ratio, rank_scale, energy = (plain_number(value) for value in (ratio, rank_scale, energy))
    rank = plain_number(rank)
    given = {"ratio": ratio, "rank_scale": rank_scale, "energy": energy, "rank": rank}
    asked = [name for name, value in {"plan": plan, **given}.items() if value is not None]
    if len(asked) != 1:
        raise ValueError(f"give exactly one of a plan, ratio=, rank_scale=, rank= and energy=, got {asked or 'none'}")
    if plan is not None and not isinstance(plan, Plan):
        raise ValueError(f"plan must be what fz.plan returns, got {plan!r}; budgets have names, such as ratio=0.5")
    for name in ("ratio", "rank_scale", "energy"):
        value = given[name]
        if value is not None and not (is_number(value) and 0 < value <= 1):
            raise ValueError(f"{name} must be in (0, 1], got {value!r}")
    if is_sharded(model):
        raise ValueError(
            f"{type(model).__name__} is sharded over processes, but truncating needs whole factors; truncate before "
            "fully_shard. Nothing was changed"
        )
    cuts = _cuts(model)
    if plan is None and ratio is None and rank_scale != 1:  # which ask something of every layer
        _refuse_frozen(cuts, rank or 0)
    if plan is not None:
        choices = _by_plan(cuts, plan)
    elif ratio is not None:
        choices = _by_ratio(model, cuts, ratio)
    elif rank_scale is not None:
        choices = [cut.item.at_scale(rank_scale) for cut in cuts]
    elif rank is not None:
        check_whole("rank", rank)
        choices = [cut.at_most(rank) for cut in cuts]
    else:
        assert energy is not None  # the one that is left
        choices = [_by_energy(cut, energy) for cut in cuts]
    installs = []
    for cut, choice in zip(cuts, choices, strict=True):
        if choice != cut.choices[0]:
            with named(cut.name):
                installs.append(cut.cut(choice))
    for install in installs:
        model = cast(Model, install(model))
    return model


def _cuts(model: nn.Module) -> list[Cut]:
    tied: dict[tuple[nn.Parameter, ...], list[tuple[str, FactorizedLayer]]] = {}
    for layer, names in module_names(model).items():
        if isinstance(layer, FactorizedLayer):
            tied.setdefault(layer.factors, []).append((layer.dense_name(plain_name(names[0])), layer))
    items: dict[Format, tuple[Item, list[Format]]] = {}
    cuts = []
    for layers in tied.values():
        format = layers[0][1].format
        if format not in items:
            path = _path(format)
            items[format] = _item(path, lambda format: format.numel, lambda format: format.ranks), path
        cuts.append(_layer_cut(layers[0][0], [layer for _, layer in layers], *items[format]))
    places = module_names(model)
    heads = [unit for unit in shrunk_attention(model) if unit.shrunk_forms]
    cuts += [_heads_cut(plain_name(places[unit.module][0]), unit) for unit in heads]
    if not cuts:
        raise ValueError(f"{type(model).__name__} has no factorized layer; call fz.factorize first")
    return cuts


def _refuse_frozen(cuts: Sequence[Cut], rank: int) -> None:
    """Raise if a layer has a higher rank and cannot be cut, because a part of its weight is frozen."""
    for cut in cuts:
        choice = cut.choices[0]
        if isinstance(choice, Format) and choice.frozen and max(choice.ranks) > rank:
            raise ValueError(
                f"{cut.name or 'the model'} is a {choice.name}, {choice.describe()}, whose rest is frozen, and it "
                "cannot be cut. Cut the other layers, by ratio= or a plan; nothing was changed"
            )


def _path(format: Format) -> list[Format]:
    """Return formats from ``format`` down to the lowest, one step at a time, keeping ranks in proportion."""
    start, path = format.ranks, [format]

    def shares(lower: Format) -> list[float]:  # that are left of every rank, the largest first
        return sorted((now / first for now, first in zip(lower.ranks, start, strict=True)), reverse=True)

    while (lower := path[-1].lowered()) and not format.frozen:
        path.append(min(lower, key=shares))
    return path


@lru_cache
def _capped(format: Format, limit: int) -> Format:
    """Return ``format`` with its ranks above ``limit`` lowered to it, and no others."""

    def kept(lower: Format) -> int:  # of all ranks up to the limit
        return sum([min(rank, limit) for rank in lower.ranks])

    while max(format.ranks) > limit and (lower := format.lowered()):
        format = max(lower, key=kept)
    return format


def _item(path: Sequence[Any], cost: Callable[[Any], int], ranks: Callable[[Any], tuple[int, ...]]) -> Item:
    places = {choice: place for place, choice in enumerate(path)}
    return Item(
        cost=cost,
        at_scale=lambda scale: path[round((1 - min(scale, 1)) * (len(path) - 1))],
        reference=sum(ranks(path[0])),
        may_stay_dense=False,
        higher=lambda choice: path[: places[choice]][-1:],
        lower=lambda choice: path[places[choice] + 1 :][:1],
        ranks=ranks,
    )


def _is_smaller(format: Format, now: Format) -> bool:
    """Return whether a format is of the same kind as ``now``, and none of its cores is larger."""
    if (format.name, format.shape, list(format.cores)) != (now.name, now.shape, list(now.cores)):
        return False
    pairs = zip(format.cores.values(), now.cores.values(), strict=True)
    return all(a <= b for new, old in pairs for a, b in zip(new, old, strict=True))


def _layer_cut(name: str, layers: Sequence[FactorizedLayer], item: Item, path: Sequence[Format]) -> Cut:
    first = layers[0]

    def refuse_meta() -> None:
        if first.factors[0].is_meta:
            raise ValueError("its factors are on the meta device and have no values; nothing was changed")

    @torch.no_grad()
    def energies() -> torch.Tensor:
        if not first.format.is_product:
            raise ValueError(f"{name}: energy= is for products, and this is a {first.format.name}; use ratio= or rank=")
        with named(name):
            refuse_meta()
        spectrum = first.format.spectrum([computable(factor) for factor in first.factors])
        return spectrum.double().square().flatten(0, -2).sum(0)

    def planned(entry: PlanEntry | AttentionEntry) -> Format:
        format, now = entry.format if isinstance(entry, PlanEntry) else None, first.format
        if format is None or not _is_smaller(format, now):
            asked = "no layer" if format is None else f"one of {format.shape} in {format.name}, {format.describe()}"
            raise ValueError(
                f"{name} is a weight of {now.shape} in {now.name}, {now.describe()}; the plan has {asked}, which is "
                "not smaller. Nothing was changed"
            )
        return format

    @torch.no_grad()
    def cut(format: Format) -> Install:
        old = first.factors
        refuse_meta()
        for layer in layers:
            layer.check_settable()
        made = first.format.truncate([factor.detach() for factor in old], format)
        factors = [
            nn.Parameter(core.clone(memory_format=torch.contiguous_format), was.requires_grad)
            for core, was in zip(made, old, strict=True)
        ]
        for factor, was in zip(factors, old, strict=True):
            vars(factor).update(vars(was))

        def install(model: nn.Module) -> nn.Module:
            for layer in layers:
                layer.change_ranks(format, factors)
            return model

        return install

    return Cut(name, item, path, energies, planned, cut)


def _heads_cut(name: str, unit: AttentionUnit) -> Cut:
    kinds, now = unit.shrunk_forms, (unit.query.head_size, unit.value.head_size)
    cost = AttentionCost(unit, kinds)
    sizes = [size for kind, size in zip(FORMS, now, strict=True) if kind in kinds]  # a choice has one for each
    path = [tuple(max(1, round(size * rank / max(sizes))) for size in sizes) for rank in range(max(sizes), 0, -1)]

    def of_both(choice: tuple[int, ...]) -> tuple[int, int]:
        given = dict(zip(kinds, choice, strict=True))
        qk, ov = (given.get(kind, size) for kind, size in zip(FORMS, now, strict=True))
        return qk, ov

    def planned(entry: PlanEntry | AttentionEntry) -> tuple[int, ...]:
        asked = entry.head_ranks if isinstance(entry, AttentionEntry) else None
        choice = tuple(size for kind, size in zip(FORMS, asked or (), strict=False) if kind in kinds)
        if asked is None or of_both(choice) != asked or any(map(gt, asked, now)):
            raise ValueError(f"{name} has heads of {now}, which the plan does not cut. Nothing was changed")
        return choice

    def cut(choice: tuple[int, ...]) -> Install:
        qk, ov = of_both(choice)
        whole = read_unit(plain_module(unit, unit.head_size, padded_matrices(unit, unit.head_size)))
        new = shrunk_module(whole, qk, ov, spectral_matrices(whole, qk, ov, kinds, may_add_bias=ov < unit.head_size))
        hand_hooks(unit.module, new)

        return lambda model: replace_modules(model, {unit.module: new})

    item = _item(path, lambda choice: cost.params_at(*of_both(choice)), lambda choice: (max(choice),))
    return Cut(name, item, path, lambda: attention_spectrum(name, unit, kinds), planned, cut)


def _by_plan(cuts: Sequence[Cut], plan: Plan) -> list[Choice]:
    entries = {name: entry for entry in plan.selected for name in (entry.name, *entry.aliases)}
    unknown = sorted({e.name for e in plan.selected if e.tied_to is None} - {cut.name for cut in cuts})
    if unknown:
        raise ValueError(f"{unknown[0]} is in the plan, but it is not factorized; nothing was changed")
    return [cut.planned(entries[cut.name]) if cut.name in entries else cut.choices[0] for cut in cuts]


def _by_ratio(model: nn.Module, cuts: Sequence[Cut], ratio: float) -> list[Choice]:
    whole, items = count_parameters(model), [cut.item for cut in cuts]
    rest = whole - sum(cut.item.cost(cut.choices[0]) for cut in cuts)
    budget, least = int(ratio * whole) - rest, lowest_cost(items)
    if budget < least:
        lowest = ceil((rest + least) / whole * 1e4) / 1e4
        raise ValueError(
            f"ratio={ratio:g} is out of reach for {type(model).__name__}: at rank 1 it still keeps {lowest:.4f} of its "
            f"{whole:,} parameters, of which {rest:,} are not factors. Ask for {lowest:.4f}..1; nothing was changed"
        )
    return list(spend_uniformly(items, budget))


def _by_energy(cut: Cut, share: float) -> Choice:
    energies = cut.energies()
    return cut.at_most(rank_for_energy(energies.tolist(), share)) if energies.sum() > 0 else cut.choices[-1]
