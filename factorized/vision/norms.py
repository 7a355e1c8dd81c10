"""The norms of a run's products at every step: recorded by one run, followed by another (figure 3)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from factorized.decay.forms import forms
from factorized.deploy.whole_file import write_whole
from factorized.vision.recipe import Recipe

FILE = "norms.safetensors"


def norms_table(
    recipe: Recipe, network: nn.Module, steps: int, seed: int
) -> Tensor | None:  # (steps of the run, products)
    """Return the norms to follow, or zeros to record them in; None where the recipe does neither."""
    shape = (steps, len(forms(network)))
    if recipe.decay.kind != "normalized":
        return torch.zeros(shape) if recipe.decay.record_norms else None
    path = Path(str(recipe.decay.norms).replace("{seed}", str(seed))) / FILE
    if not path.is_file():
        raise ValueError(f"decay.norms: there is no {path}; train that run with decay.record_norms=true first")
    try:
        with safe_open(path, framework="pt") as file:
            norms, expected = file.get_tensor("norms"), (file.metadata() or {}).get("checksum")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"decay.norms: {path} cannot be read ({error}); train that run again") from None
    if _checksum(norms) != expected:
        raise ValueError(f"decay.norms: {path} is damaged, its checksum is not the one it says; train that run again")
    if tuple(norms.shape) != shape:
        raise ValueError(
            f"decay.norms: {path} holds (steps, products) = {tuple(norms.shape)}, and this run needs {shape}; train "
            "both with the same network, data, batch and epochs"
        )
    return norms


def write_norms(
    norms: Tensor,  # (steps of the run, products)
    folder: Path,
) -> None:
    """Write the recorded norms into the folder of their run."""
    norms = norms.cpu().contiguous()
    metadata = {"checksum": _checksum(norms)}
    write_whole(folder / FILE, lambda path: save_file({"norms": norms}, path, metadata=metadata))


def _checksum(norms: Tensor) -> str:
    described = f"{tuple(norms.shape)} {norms.dtype}\n".encode()
    return hashlib.sha256(described + norms.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
