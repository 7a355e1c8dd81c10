"""The folder of a checkpoint: ``plan.json`` and the safetensors file that it names.

The weights are written first, under a new name, and ``plan.json`` is renamed into place last: until that moment the
folder holds the old checkpoint, afterwards the new one, and never half of each. Both files carry a checksum.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from factorized.files.atomic import WholeFile, remove_abandoned
from factorized.files.checksum import bytes_needed, is_sealed, read_tensors, sealed, write_tensors
from factorized.planning.plan import Plan
from factorized.version import __version__

FORMAT = 1
MANIFEST = "plan.json"
TRANSFORMERS_WEIGHTS = "model.safetensors"  # in one file or in several, with an index


def write_checkpoint(
    folder: Path, plan: Plan, tensors: dict[str, Tensor], values: Iterable[Tensor], aliases: dict[str, str]
) -> None:
    """Write a checkpoint into ``folder``; ``values`` are ``tensors`` in that order, whole.

    What earlier saves left there that were killed is removed first.
    """
    new = folder / f"weights-{uuid.uuid4().hex[:12]}.safetensors"
    text = _manifest(plan, new.name, aliases)
    with _named_failure(folder, bytes_needed(tensors) + len(text)):
        folder.mkdir(parents=True, exist_ok=True)
        remove_abandoned(folder, _is_ours, _is_needed)
        old = _current_weights(folder)
        try:
            with WholeFile(new) as weights, WholeFile(folder / MANIFEST) as named:
                write_tensors(weights.file, tensors, values=values)
                weights.put()
                named.file.write(text.encode())
                named.put()
        finally:  # whichever way it ended, plan.json names one file and the other is of no use
            for path in (old, new):
                if path is not None and path != _current_weights(folder):
                    path.unlink(missing_ok=True)


def write_plan(folder: Path, plan: Plan) -> None:
    """Write ``plan.json`` beside weights that transformers wrote into ``folder``, in place of a checkpoint of ours."""
    text = _manifest(plan, TRANSFORMERS_WEIGHTS, {})
    with _named_failure(folder, len(text)):
        folder.mkdir(parents=True, exist_ok=True)
        old = _current_weights(folder)
        with WholeFile(folder / MANIFEST) as named:
            named.file.write(text.encode())
            named.put()
        if old is not None:
            old.unlink(missing_ok=True)


def _manifest(plan: Plan, weights: str, aliases: dict[str, str]) -> str:
    manifest = {
        "format": FORMAT,
        "factorized": __version__,
        "torch": torch.__version__,
        "weights": weights,
        "aliases": aliases,
        "plan": plan.to_dict(),
    }
    return json.dumps(sealed(manifest), indent=1)


@contextmanager
def _named_failure(folder: Path, needed: int) -> Iterator[None]:
    """Let a failed write say which folder, how much it needs and what to do."""
    try:
        yield
    except OSError as error:
        remedy = "save into a folder that can be written"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
            remedy = f"{needed:,} bytes are needed and {free:,} are free; make room, or save elsewhere"
        reason = error.strerror or error
        raise OSError(error.errno, f"the model could not be saved: {reason} ({remedy})", str(folder)) from error


def _current_weights(folder: Path) -> Path | None:
    try:
        name = json.loads((folder / MANIFEST).read_text())["weights"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return folder / name if _is_weights_name(name) else None


def _is_weights_name(name: object) -> bool:
    """Return whether ``save`` could have written a file of this name: never one of another folder, or of the user."""
    return isinstance(name, str) and re.fullmatch(r"weights-[0-9a-f]{12}\.safetensors", name) is not None


def _is_ours(name: str) -> bool:
    return name == MANIFEST or _is_weights_name(name)


def _is_needed(path: Path) -> bool:
    """Return whether ``path`` is part of the checkpoint, or may be: ``plan.json`` cannot be read."""
    manifest, current = path.with_name(MANIFEST), _current_weights(path.parent)
    return path in (manifest, current) or (current is None and manifest.exists())


def read_checkpoint(folder: Path) -> tuple[Plan, dict[str, Tensor]]:
    """Return the plan and the weights; where another process saves meanwhile, those of one of its saves."""
    manifest = _read_manifest(folder)
    if manifest["weights"] == TRANSFORMERS_WEIGHTS:
        raise ValueError(f"the weights in {folder} were written by transformers; use fz.from_pretrained(cls, folder)")
    while True:
        weights = folder / manifest["weights"]
        try:
            tensors = read_tensors(weights, "save the model again")
            break
        except FileNotFoundError:
            latest = _read_manifest(folder)
            if latest["weights"] == manifest["weights"]:
                raise ValueError(f"{weights} is missing, though {MANIFEST} names it") from None
            manifest = latest
    try:
        plan = Plan.from_dict(manifest["plan"])
        _check_sizes(plan, tensors)
    except ValueError as error:
        raise ValueError(f"{folder / MANIFEST}: {error}") from error
    aliases: dict[str, str] = manifest["aliases"]
    if wrong := [alias for alias, key in aliases.items() if alias in tensors or key not in tensors]:
        raise ValueError(f"{folder / MANIFEST} is damaged: alias {wrong[0]!r} must be another name of a saved tensor")
    return plan, tensors | {alias: tensors[key] for alias, key in aliases.items()}


def read_plan_of_transformers(folder: Path) -> Plan | None:
    """Return the plan in ``folder`` where transformers wrote the weights; None where ``fz.save`` did."""
    manifest = _read_manifest(folder)
    if manifest["weights"] != TRANSFORMERS_WEIGHTS:
        return None
    try:
        return Plan.from_dict(manifest["plan"])
    except ValueError as error:
        raise ValueError(f"{folder / MANIFEST}: {error}") from error


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        intact = isinstance(manifest, dict) and is_sealed(manifest)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{folder} holds no checkpoint: {MANIFEST} is missing. fz.save(model, folder) writes one"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    except RecursionError:
        raise ValueError(f"{path} is damaged: its values are nested too deeply") from None
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise ValueError(f"{path} was not written by fz.save: it has no format number")
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"{path} has format {manifest['format']!r}, written by factorized {manifest.get('factorized')}; this is "
            f"factorized {__version__}, which reads format {FORMAT}. Install a version that fits"
        )
    if not intact:
        raise ValueError(f"{path} is damaged: its checksum is not the one it says. Save the model again")
    missing = [key for key in ("weights", "aliases", "plan") if key not in manifest]
    if missing:
        raise ValueError(f"{path} is damaged: {', '.join(missing)} is missing")
    aliases, weights = manifest["aliases"], manifest["weights"]
    if not _is_weights_name(weights) and weights != TRANSFORMERS_WEIGHTS:
        raise ValueError(f"{path} is damaged: weights must be a name that fz.save gives, got {weights!r}")
    if not isinstance(aliases, dict) or not all(isinstance(name, str) for name in aliases.values()):
        raise ValueError(f"{path} is damaged: aliases must map names to names, got {aliases!r}")
    return manifest


def _check_sizes(plan: Plan, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a layer that is larger than the whole file before memory is taken for it."""
    held = sum(tensor.numel() for tensor in tensors.values())
    for entry in plan.layers:
        if entry.format is not None and entry.format.numel > held:
            raise ValueError(
                f"the factors of {entry.name!r} ({entry.format.describe()}) are larger than all of the weights, which "
                f"are {held:,} values"
            )
