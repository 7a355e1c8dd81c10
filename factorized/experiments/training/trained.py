"""A trained network in its run's folder, dense or factorized: written at the end of a run, read by other commands."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

from torch import nn

from factorized.experiments.data.images import Images
from factorized.experiments.models.build import build_model
from factorized.experiments.recipes.find import check_recipe
from factorized.experiments.recipes.recipe import Recipe
from factorized.experiments.training.network import infinite_buffers, not_finite
from factorized.experiments.training.result import RESULT, Result, read_result
from factorized.files.checkpoint import load, save
from factorized.files.checksum import read_tensors, save_tensors
from factorized.surgery.compose import is_factorized
from factorized.surgery.state import check_finite

FOLDER, DENSE = "model", "dense.safetensors"


def save_trained(network: nn.Module, run: Path) -> dict[str, str]:
    """Write the network into the folder of its run, and return the checksum of each file.

    The files are those of ``fz.save``, or one plain file where the network holds no products.
    """
    folder = run / FOLDER
    shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed before it wrote the result
    if is_factorized(network):
        save(network, folder)
    else:
        check_finite(network, "the network was not written")
        folder.mkdir(parents=True)
        save_tensors(folder / DENSE, network.state_dict())
    return {path.name: checksum_of(path) for path in sorted(folder.iterdir())}


def load_trained(run: Path, *, trust_model: bool = False) -> tuple[Recipe, Result, nn.Module]:
    """Return the recipe, the result and the network, in evaluation mode, of a finished run.

    Every file is compared with the checksum that the result holds. A network of ``module:function`` is refused unless
    ``trust_model`` is set: building it runs whatever that module does.
    """
    result = read_result(run, "images")
    recipe = check_recipe(result["recipe"], str(run / RESULT))
    name, data = recipe.model.name, result["data"]
    if ":" in name and not name.startswith("hf:") and not trust_model:
        raise ValueError(
            f"{run / RESULT} names the model {name!r}, and building it runs code of that module; give --trust-model if "
            "you know the module and where the run comes from"
        )
    check_files(run, result)
    fresh = build_model(name, len(data["classes"]), data["size"][0], data["channels"])
    may_be_infinite = infinite_buffers(fresh)
    if DENSE in result["files"]:
        try:
            fresh.load_state_dict(read_tensors(run / FOLDER / DENSE, "train the run again"))
        except RuntimeError as error:
            raise ValueError(f"{run / FOLDER / DENSE} holds the weights of another network: {error}") from error
        network = fresh
    else:
        network = load(run / FOLDER, fresh)
    if (bad := not_finite(network.state_dict(), may_be_infinite)) is not None:
        raise ValueError(f"{run / FOLDER}: {bad} holds NaN or infinity; train the run again")
    return recipe, result, network.eval()


def check_files(run: Path, result: Result) -> None:
    """Raise if a file of the run's network is missing, or is not the one that the result names."""
    if not result.get("files"):
        raise ValueError(f"{run / RESULT}: files must hold the checksums of the network's files; train the run again")
    for file, expected in result["files"].items():
        check_file(run / FOLDER / Path(file).name, expected)


def check_file(path: Path, expected: str) -> None:
    """Raise if the file is missing, or is not the one with that checksum."""
    if not path.is_file():
        raise ValueError(f"{path} is missing, though {RESULT} names it; train the run again")
    found = checksum_of(path)
    if found != expected:
        raise ValueError(
            f"{path} is damaged, or of another network: its checksum is {found[:12]}…, and {RESULT} says "
            f"{expected[:12]}…; get it again, or train the run again"
        )


def checksum_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fit_images(result: Result, images: Images) -> Images:
    """Return images normalized as in the run's training; raise if the network cannot classify them."""
    data = result["data"]
    expected = (len(data["classes"]), data["channels"], *data["size"])
    found = (len(images.classes), images.channels, *images.size)
    if expected != found:
        raise ValueError(
            f"the run was trained on (classes, channels, height, width) = {expected} of {data['name']}, and "
            f"{images.name} has {found}; name the data set it was trained on by --data"
        )
    _check_classes(data["classes"], list(images.classes), images.name)
    mean, std = (tuple(data.get(key) or getattr(images, key)) for key in ("mean", "std"))
    return images if (mean, std) == (images.mean, images.std) else replace(images, mean=mean, std=std)


def _check_classes(known: list[str], given: list[str], name: str) -> None:
    """Raise if labels stand for other classes than in the run's training; classes without names are numbered."""
    numbered = [str(number) for number in range(len(known))]
    if known == given or (numbered in (known, given) and sorted(known) != sorted(given)):
        return
    number = next(number for number in range(len(known)) if known[number] != given[number])
    raise ValueError(
        f"class {number} is {known[number]!r} for the run, and {given[number]!r} in {name}; give the classes the names "
        "that they had in training, in the same order"
    )
