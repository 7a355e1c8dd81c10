"""The norms of a run's products at every step: recorded by one run, followed by another (figure 3)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from factorized.decay.forms import forms
from factorized.experiments.recipes.recipe import Recipe
from factorized.files.checksum import read_tensors, save_tensors

FILE = "norms.safetensors"


def norms_table(
    recipe: Recipe, network: nn.Module, steps: int, seed: int
) -> Tensor | None:  # (steps of the run, products)
    """Return the norms to follow, or zeros to record them in; None where the recipe does neither."""
    shape = (steps, len(forms(network)))
    if recipe.decay.kind != "normalized":
        return torch.zeros(shape) if recipe.decay.record_norms else None
    path = Path(str(recipe.decay.norms).replace("{seed}", str(seed))).expanduser() / FILE
    if not path.is_file():
        raise ValueError(f"decay.norms: there is no {path}; train that run with decay.record_norms=true first")
    try:
        norms = read_tensors(path, "train that run again")["norms"]
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(f"decay.norms: {path} cannot be read ({error}); train that run again") from None
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
    save_tensors(folder / FILE, {"norms": norms})
