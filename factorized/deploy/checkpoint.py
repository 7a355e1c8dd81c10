"""``fz.save`` and ``fz.load``: factorized models in files, without pickle.

A checkpoint is a folder: ``plan.json`` names a safetensors file and holds the plan that rebuilds the model around it.
The weights are written first, under a name of their own, and ``plan.json`` is renamed into place last: until that
moment the folder holds the old checkpoint, afterwards the new one, and never half of each.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from factorized.deploy.describe import describe
from factorized.deploy.state import (
    Shapes,
    check_same,
    distinct_tensors,
    fill,
    is_sharded,
    named_slots,
    plain_name,
    plain_state,
    unwrapped,
)
from factorized.deploy.whole_file import write_whole
from factorized.layers.composed import ComposedLayer
from factorized.layers.swap import build_layers, install, refuse_wrapped, replace_module
from factorized.planning.model import check_model
from factorized.planning.plan import Plan
from factorized.version import __version__

FORMAT = 1
MANIFEST = "plan.json"


def save(model: nn.Module, folder: str | Path) -> None:
    """Write ``model`` to ``folder`` as safetensors and ``plan.json``, replacing a checkpoint that is there.

    Models wrapped by ``torch.compile`` or ``DistributedDataParallel`` are saved as what they wrap. Of a sharded model
    (``fully_shard``) every rank calls this: the shards are gathered, rank 0 writes, and all return when it has.
    """
    check_model(model)
    model = unwrapped(model)
    plan = describe(model)
    tensors, aliases = distinct_tensors(plain_state(model))
    if not is_sharded(model):
        _write(Path(folder), plan, tensors, aliases)
        return
    if dist.get_rank() == 0:
        _write(Path(folder), plan, tensors, aliases)
    dist.barrier()


def _write(folder: Path, plan: Plan, tensors: dict[str, Tensor], aliases: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    old = _current_weights(folder)
    new = folder / f"weights-{uuid.uuid4().hex[:12]}.safetensors"
    manifest = {
        "format": FORMAT,
        "factorized": __version__,
        "torch": torch.__version__,
        "weights": new.name,
        "aliases": aliases,
        "plan": plan.to_dict(),
    }
    try:
        write_whole(new, lambda path: save_file(tensors, path, metadata={"format": "pt"}))
        write_whole(folder / MANIFEST, lambda path: path.write_text(json.dumps(manifest, indent=1)))
    finally:  # whichever way it ended, plan.json names one file and the other is of no use
        for weights in (old, new):
            if weights is not None and weights != _current_weights(folder):
                weights.unlink(missing_ok=True)


def load(
    folder: str | Path,
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Factorize ``model``, a fresh dense one, as the checkpoint in ``folder`` says, fill it, and return it.

    The weights end up on ``device`` and in ``dtype``, or where and as the model is; one on the meta device becomes
    real. The file is compared with the model before anything is changed.
    """
    check_model(model)
    refuse_wrapped(model)
    inside = unwrapped(model)
    manifest = _read_manifest(Path(folder))
    plan = _renamed(Plan.from_dict(manifest["plan"]), inside)
    aliases: dict[str, str] = manifest["aliases"]
    tensors = _read_weights(Path(folder) / manifest["weights"])
    tensors |= {alias: tensors[key] for alias, key in aliases.items() if key in tensors}
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
    return replace_module(model, wrapped, filled)


def _current_weights(folder: Path) -> Path | None:
    try:
        name = json.loads((folder / MANIFEST).read_text())["weights"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return folder / name if _is_weights_name(name) else None


def _is_weights_name(name: object) -> bool:
    """Return whether ``save`` could have written a file of this name: never one of another folder, or of the user."""
    return isinstance(name, str) and fnmatchcase(name, "weights-*.safetensors") and Path(name).name == name


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} holds no checkpoint: {MANIFEST} is missing. fz.save(model, folder) writes one")
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise ValueError(f"{path} was not written by fz.save: it has no format number")
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"{path} has format {manifest['format']!r}, written by factorized {manifest.get('factorized')}; this is "
            f"factorized {__version__}, which reads format {FORMAT}. Install a version that fits"
        )
    missing = [key for key in ("weights", "aliases", "plan") if key not in manifest]
    if missing:
        raise ValueError(f"{path} is damaged: {', '.join(missing)} is missing")
    if not isinstance(manifest["aliases"], dict) or not _is_weights_name(manifest["weights"]):
        raise ValueError(f"{path} is damaged: weights or aliases is not what fz.save writes. Save the model again")
    return manifest


def _read_weights(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ValueError(f"{path} is missing, though {MANIFEST} names it")
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, it is not a mapping
    except SafetensorError as error:
        size = path.stat().st_size
        raise ValueError(f"{path} is damaged ({error}; {size:,} bytes): save the model again") from error


def _renamed(plan: Plan, model: nn.Module) -> Plan:
    """Return ``plan`` with the names that ``model`` has, whose parts may be compiled."""
    actual = {plain_name(name): name for name, _ in model.named_modules(remove_duplicate=False)}
    entries = tuple(
        replace(
            entry,
            name=actual.get(entry.name, entry.name),
            aliases=tuple(actual.get(alias, alias) for alias in entry.aliases),
            tied_to=actual.get(entry.tied_to, entry.tied_to) if entry.tied_to else None,
        )
        for entry in plan.entries
    )
    return replace(plan, entries=entries)


def _shapes_after(model: nn.Module, layers: Mapping[str, nn.Module]) -> Shapes:
    """Return the state that ``model`` will have once ``layers`` are in, without putting them in."""
    replaced = {id(model.get_submodule(name)): layer for name, layer in layers.items()}
    gone = _replaced(model, layers)
    shapes: Shapes = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        layer = replaced.get(id(module))
        for name, _, _, tensor in named_slots(layer) if layer is not None else ():
            shapes[plain_name(f"{prefix}.{name}" if prefix else name)] = tuple(tensor.shape)
    for name, module, _, tensor in named_slots(model):
        if id(module) not in gone:
            shapes[name] = tuple(tensor.shape)
    return shapes


def _replaced(model: nn.Module, layers: Mapping[str, nn.Module]) -> set[int]:
    """Return the modules that will be gone: an attention module is replaced with all that is in it."""
    return {id(module) for name in layers for module in model.get_submodule(name).modules()}


def _check_ties(model: nn.Module, layers: Mapping[str, nn.Module], tensors: dict[str, Tensor]) -> None:
    """Raise where ``model`` holds one tensor under two names and the checkpoint two different ones."""
    layer_ids = {id(model.get_submodule(n)) for n, layer in layers.items() if isinstance(layer, ComposedLayer)}
    replaced = _replaced(model, layers)
    first: dict[Tensor, str] = {}
    for name, module, attribute, slot in named_slots(model):
        if id(module) in replaced and (attribute == "weight" or id(module) not in layer_ids):
            continue
        other = first.setdefault(slot, name)
        if not torch.equal(tensors[name], tensors[other]):
            raise ValueError(
                f"{other} and {name} are one tensor in the model and two in the checkpoint, with different values. "
                f"Untie them in the model first. Nothing was changed"
            )


def _check_no_lost_buffers(model: nn.Module) -> None:
    lost = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
        if (buffer := module._buffers.get(name)) is not None and buffer.is_meta
    ]
    if lost:
        raise ValueError(
            f"{', '.join(lost[:3])} would have no values: checkpoints hold no non-persistent buffers, and the model "
            "is on the meta device. Build it on a real one. Nothing was changed"
        )
