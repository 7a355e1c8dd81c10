"""A trained network in its run's folder, dense or factorized: written at the end of a run, read by other commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from factorized.deploy.checkpoint import load, save
from factorized.deploy.checksum import read_tensors, save_tensors
from factorized.deploy.compose import is_factorized
from factorized.vision.data.images import Images
from factorized.vision.models.build import build_model
from factorized.vision.recipe import Recipe
from factorized.vision.recipes import check_recipe

RESULT = "result.json"
FOLDER, DENSE = "model", "dense.safetensors"
KEYS = ("recipe", "seed", "accuracy", "parameters", "seconds", "data", "history")  # that other commands read


def save_trained(network: nn.Module, run: Path) -> None:
    """Write the network into the folder of its run: as ``fz.save`` does, or plain where it holds no products."""
    folder = run / FOLDER
    if is_factorized(network):
        save(network, folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / DENSE, network.state_dict())


def load_trained(run: Path) -> tuple[Recipe, dict[str, Any], nn.Module]:
    """Return the recipe, the result and the network, in evaluation mode, of a finished run."""
    result = read_result(run)
    recipe = check_recipe(result["recipe"], str(run / RESULT))
    data = result["data"]
    fresh = build_model(recipe.model.name, len(data["classes"]), data["size"][0], data["channels"])
    dense = run / FOLDER / DENSE
    if dense.is_file():
        try:
            fresh.load_state_dict(read_tensors(dense, "train the run again"))
        except RuntimeError as error:
            raise ValueError(f"{dense} holds the weights of another network: {error}") from error
        return recipe, result, fresh.eval()
    return recipe, result, load(run / FOLDER, fresh).eval()


def read_result(run: Path) -> dict[str, Any]:
    """Return what a finished run wrote about itself."""
    path = run / RESULT
    if not path.is_file():
        within = sorted(path.parent for path in run.glob("*/result.json")) if run.is_dir() else []
        hint = (
            f"; did you mean {within[0]}?" if within else "; give the folder of a finished run, such as out/NAME/seed-0"
        )
        raise ValueError(f"there is no {path}{hint}")
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    missing = [key for key in KEYS if key not in found] if isinstance(found, dict) else KEYS
    if missing:
        raise ValueError(f"{path} is not the result of a run: it has no {', '.join(missing)}")
    return found


def fit_images(result: dict[str, Any], images: Images) -> Images:
    """Return images to be fed as those that the network of a run learned from; refuse what it cannot classify."""
    data = result["data"]
    expected = (len(data["classes"]), data["channels"], *data["size"])
    found = (len(images.classes), images.channels, *images.size)
    if expected != found:
        raise ValueError(
            f"the run knows (classes, channels, height, width) = {expected} of {data['name']}, and {images.name} has "
            f"{found}; name the data set it was trained on by --data"
        )
    mean, std = (tuple(data.get(key, getattr(images, key))) for key in ("mean", "std"))  # older results have none
    return images if (mean, std) == (images.mean, images.std) else replace(images, mean=mean, std=std)
