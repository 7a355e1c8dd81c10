"""``fz.save`` and ``fz.load``: factorized models in files, without pickle."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from factorized.files.checksum import in_file_order
from factorized.files.folder import read_checkpoint, write_checkpoint
from factorized.nn.held_weight import HeldWeight, named_layers
from factorized.nn.layer import FactorizedLayer
from factorized.nn.model import Model, check_model, dotted
from factorized.planning.plan import Entry, Plan, PlanEntry
from factorized.surgery.describe import describe
from factorized.surgery.factorize import build_layers, install
from factorized.surgery.replace import refuse_wrapped, replace_module
from factorized.surgery.state import (
    Shapes,
    check_finite,
    check_same,
    distinct_tensors,
    fill,
    gathered,
    is_sharded,
    named_slots,
    plain_name,
    plain_state,
    unwrapped,
)


def save(model: nn.Module, folder: str | Path, *, allow_nonfinite: bool = False) -> None:
    """Write ``model`` to ``folder`` as safetensors and ``plan.json``, replacing any checkpoint there.

    Wrappers of ``torch.compile`` and ``DistributedDataParallel`` are not saved, only the model inside. For a sharded
    model (``fully_shard``) every rank must call this: the shards are gathered one tensor at a time, rank 0 writes, and
    all ranks return when it has finished, or raise its error. Each stage of a pipeline needs a separate folder; the
    first of its ranks writes it.

    Raises:
        ValueError: the model has no factorized layer, something in it cannot be saved without pickle, ranks save
            different stages to one folder, or weights are not finite; ``allow_nonfinite=True`` saves those too.
        OSError: the files could not be written; an earlier checkpoint is kept.

    Examples:
        >>> model = nn.Sequential(fz.FactorizedLinear(64, 64, 8))
        >>> fz.save(model, "saved")
        >>> model = fz.load("saved", nn.Sequential(nn.Linear(64, 64)))  # a fresh dense model
    """
    check_model(model)
    model = unwrapped(model)
    plan, state = describe(model), plain_state(model)
    _check_fillable(model, state)
    if not allow_nonfinite:
        check_finite(model, "nothing was written. Pass allow_nonfinite=True to save the model as it is")
    tensors, aliases = distinct_tensors(state)
    tensors = in_file_order(tensors)
    values = gathered(tensors)
    if not is_sharded(model):
        write_checkpoint(Path(folder), plan, tensors, values, aliases)
        return
    writer = writing_rank(folder, tensors)
    failure: BaseException | None = None
    if dist.get_rank() == writer:
        try:
            write_checkpoint(Path(folder), plan, tensors, values, aliases)
        except BaseException as error:  # sent to the other ranks, which would otherwise wait forever
            failure = error
    deque(values, maxlen=0)  # the other ranks, and a writer that failed, take part and keep nothing
    failures: list[BaseException | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    if (told := failures[writer]) is not None:
        raise told


def writing_rank(folder: str | Path, names: Iterable[str]) -> int:
    """Return the first of the ranks that save to ``folder``; raise on all ranks if they save other ``names``."""
    saved = str(Path(folder).absolute()), hashlib.sha256("\n".join(names).encode()).hexdigest()
    found = [saved] * dist.get_world_size()
    dist.all_gather_object(found, saved)
    if len(set(found)) > len({place for place, _ in found}):
        raise ValueError(
            f"ranks save different models to one folder, got {saved[0]} on rank {dist.get_rank()}: give every stage of "
            "a pipeline a folder of its own. Nothing was written"
        )
    return found.index(saved)


def load(
    folder: str | Path,
    model: Model,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Model:
    """Factorize a fresh dense ``model`` like the checkpoint in ``folder``, fill it, and return it.

    The weights end up on ``device`` and in ``dtype``, by default those of the model; a model on the meta device gets
    real weights. The file is compared with the model before anything is changed.

    Raises:
        ValueError: the folder holds no checkpoint, its files are damaged, it does not fit the model, the model is
            sharded, or weights cannot have this ``device`` or ``dtype``.

    Examples:
        >>> fz.save(fz.factorize(nn.Sequential(nn.Linear(64, 64)), rank=8, keep_first_and_last=False), "saved")
        >>> model = fz.load("saved", nn.Sequential(nn.Linear(64, 64)), dtype=torch.bfloat16)
        >>> model[0].U.dtype, model[0].rank
        (torch.bfloat16, 8)
    """
    check_model(model)
    check_target(device, dtype)
    refuse_wrapped(model)
    inside = unwrapped(model)
    if is_sharded(inside):
        raise ValueError(
            f"{type(inside).__name__} is sharded over processes, but loading needs whole weights; load before "
            "fully_shard. Nothing was changed"
        )
    saved, tensors = read_checkpoint(Path(folder))
    plan = _renamed(saved, inside)
    layers = build_layers(inside, plan, init=None)
    expected = _shapes_after(inside, layers)
    check_same(f"the checkpoint in {folder}", expected, {key: tuple(value.shape) for key, value in tensors.items()})
    _check_no_lost_buffers(inside)
    _check_ties(inside, layers, tensors)
    filled = install(inside, plan, layers)
    if not any(parameter.is_meta for parameter in filled.parameters()):
        filled.to(device=device, dtype=dtype)
    fill(filled, tensors, device or "cpu", dtype)
    if filled is inside:
        return model
    wrapped = next(name for name, module in model.named_modules() if module is inside)
    return cast(Model, replace_module(model, wrapped, filled))


def _check_fillable(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Raise if the state dict has other names than parameters and buffers, which are what ``fz.load`` fills."""
    odd = sorted(state.keys() ^ {name for name, _, _, _ in named_slots(model)})
    if odd:
        raise ValueError(
            f"the state dict {'holds' if odd[0] in state else 'lacks'} {odd[0]}, because get_extra_state or a state "
            "dict hook changes it, but fz.load fills parameters and buffers only. Make it a buffer, or keep it in "
            "another file, and remove the hook. Nothing was written"
        )


def check_target(device: object, dtype: object) -> None:
    """Raise unless weights can be put on ``device``, in ``dtype``; None leaves either as it is."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating-point torch.dtype, such as torch.bfloat16, got {dtype!r}")
    try:
        torch.empty(0, device=cast(Any, device))
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f'device must be one of this machine, such as "cpu", got {device!r}: {reason}') from error


def _renamed(plan: Plan, model: nn.Module) -> Plan:
    """Return ``plan`` with the names in ``model``, parts of which may be compiled."""
    actual = {plain_name(name): name for name in named_layers(model)}
    entries: list[Entry] = []
    for entry in plan.entries:
        names = [actual.get(name, name) for name in (entry.name, *entry.aliases)]
        renamed = replace(entry, name=names[0], aliases=tuple(names[1:]))
        if isinstance(renamed, PlanEntry) and renamed.tied_to is not None:
            renamed = replace(renamed, tied_to=actual.get(renamed.tied_to, renamed.tied_to))
        entries.append(renamed)
    return replace(plan, entries=tuple(entries))


def _shapes_after(model: nn.Module, layers: Mapping[str, nn.Module]) -> Shapes:
    """Return the shapes that ``model``'s state will have once ``layers`` are installed, without installing them."""
    modules = named_layers(model)
    replaced = {id(modules[name]): layer for name, layer in layers.items()}
    gone, held = _replaced(modules, layers)
    shapes: Shapes = {}
    for place, module in modules.items():
        layer = replaced.get(id(module))
        prefix = layer.factor_name(place) if isinstance(layer, FactorizedLayer) else place
        for name, _, _, tensor in named_slots(layer) if layer is not None else ():
            shapes[plain_name(dotted(prefix, name))] = tuple(tensor.shape)
    for name, module, _, tensor in named_slots(model):
        if id(module) not in gone and name not in held:
            shapes[name] = tuple(tensor.shape)
    return shapes


def _replaced(modules: Mapping[str, nn.Module], layers: Mapping[str, nn.Module]) -> tuple[set[int], set[str]]:
    """Return the modules that will be replaced, and the names of parameters that will become factors.

    An attention module is replaced with everything inside it.
    """
    gone = {id(module) for name in layers for module in modules[name].modules()}
    held = {plain_name(name) for name, m in modules.items() if isinstance(m, HeldWeight) and id(m) in gone}
    return gone, held


def _check_ties(model: nn.Module, layers: Mapping[str, nn.Module], tensors: dict[str, Tensor]) -> None:
    """Raise if ``model`` holds one tensor under two names, but the checkpoint holds two different ones."""
    modules = named_layers(model)
    layer_ids = {id(modules[n]) for n, layer in layers.items() if isinstance(layer, FactorizedLayer)}
    replaced, held = _replaced(modules, layers)
    first: dict[Tensor, str] = {}
    for name, module, attribute, slot in named_slots(model):
        if name in held or (id(module) in replaced and (attribute == "weight" or id(module) not in layer_ids)):
            continue
        other = first.setdefault(slot, name)
        if not _same_bits(tensors[name], tensors[other]):
            raise ValueError(
                f"{other} and {name} are one tensor in the model and two in the checkpoint, with different values. "
                f"Untie them in the model first. Nothing was changed"
            )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal bit by bit, so that NaN equals NaN."""
    return a is b or (a.dtype == b.dtype and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)))


def _check_no_lost_buffers(model: nn.Module) -> None:
    lost = [
        dotted(prefix, name)
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
        if (buffer := module._buffers.get(name)) is not None and buffer.is_meta
    ]
    if lost:
        raise ValueError(
            f"{', '.join(lost[:3])} would have no values: checkpoints hold no non-persistent buffers, and the model "
            "is on the meta device. Build it on a real device. Nothing was changed"
        )
