"""A trained network in its run's folder, dense or factorized: written at the end of a run, read by other commands."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import nn

from factorized.experiments.data.explain import first_problem
from factorized.experiments.data.images import Images
from factorized.experiments.models.build import build_model
from factorized.experiments.recipes.find import check_recipe
from factorized.experiments.recipes.recipe import Recipe
from factorized.experiments.training.network import infinite_buffers, not_finite
from factorized.files.checkpoint import load, save
from factorized.files.checksum import is_sealed, read_tensors, save_tensors
from factorized.surgery.compose import is_factorized
from factorized.surgery.state import check_finite

RESULT = "result.json"
FOLDER, DENSE = "model", "dense.safetensors"
Positive = Annotated[int, Field(ge=1)]


class _Part(BaseModel):
    """Fields that other commands read; a result may say more."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class _Data(_Part):
    name: str
    checksum: str
    classes: Annotated[list[str], Field(min_length=1)]
    channels: Positive
    size: Annotated[list[Positive], Field(min_length=2, max_length=2)]
    mean: list[float] = []  # not given, or one for each channel
    std: list[Annotated[float, Field(gt=0)]] = []

    @model_validator(mode="after")
    def _one_for_each_channel(self) -> Self:
        for name in self.model_fields_set & {"mean", "std"}:
            if len(getattr(self, name)) != self.channels:
                raise ValueError(f"{name} must be {self.channels} numbers, one for each channel")
        return self


class _Result(_Part):
    recipe: dict[str, Any]
    seed: Annotated[int, Field(ge=0)]
    accuracy: Annotated[float, Field(ge=0, le=100)]
    parameters: Positive
    seconds: Annotated[float, Field(ge=0)]
    data: _Data
    history: list[dict[str, int | float | None]]
    files: dict[str, str] | None = None  # SHA-256 of what is in the folder of the network, by name


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


def load_trained(run: Path, *, trust_model: bool = False) -> tuple[Recipe, dict[str, Any], nn.Module]:
    """Return the recipe, the result and the network, in evaluation mode, of a finished run.

    Every file is compared with the checksum that the result holds. A network of ``module:function`` is refused unless
    ``trust_model`` is set: building it runs whatever that module does.
    """
    result = read_result(run)
    recipe = check_recipe(result["recipe"], str(run / RESULT))
    name, data, files = recipe.model.name, result["data"], result.get("files")
    if ":" in name and not name.startswith("hf:") and not trust_model:
        raise ValueError(
            f"{run / RESULT} names the model {name!r}, and building it runs code of that module; give --trust-model if "
            "you know the module and where the run comes from"
        )
    if not files:
        raise ValueError(f"{run / RESULT}: files must hold the checksums of the network's files; train the run again")
    for file, expected in files.items():
        check_file(run / FOLDER / Path(file).name, expected)
    fresh = build_model(name, len(data["classes"]), data["size"][0], data["channels"])
    may_be_infinite = infinite_buffers(fresh)
    if DENSE in files:
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


def read_result(run: Path) -> dict[str, Any]:
    """Return the result of a finished run on images, after checking its checksum."""
    found, intact = read_sealed(run)
    if isinstance(found, dict) and "task" in found:
        raise ValueError(f"{run / RESULT} is a run on text (task {found['task']!r}); this needs one on images")
    result = check_result(found, run / RESULT)
    if not intact:
        raise ValueError(wrong_checksum(run))
    return {key: value for key, value in result.items() if key != "checksum"}


def read_sealed(run: Path) -> tuple[Any, bool]:
    """Return what ``result.json`` of a run holds, and whether its checksum is right."""
    path = run / RESULT
    if not path.is_file():
        within = sorted(path.parent for path in run.glob("*/result.json")) if run.is_dir() else []
        hint = (
            f"; did you mean {within[0]}?" if within else "; give the folder of a finished run, such as out/NAME/seed-0"
        )
        raise ValueError(f"there is no {path}{hint}")
    try:
        found: Any = json.loads(path.read_text())
        return found, isinstance(found, dict) and is_sealed(found)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}; delete it and train the run again") from None


def wrong_checksum(run: Path) -> str:
    """Return the message for a result whose checksum is wrong."""
    return f"{run / RESULT} is damaged, or was changed: its checksum does not match; delete it and train the run again"


def check_result(found: Any, path: Path) -> dict[str, Any]:
    """Return ``found`` if it is the result of a run, as ``path`` holds it; name what is missing or of another type."""
    fields = _Result.model_fields.items()
    missing = [
        name for name, field in fields if field.is_required() and not (isinstance(found, dict) and name in found)
    ]
    if missing:
        raise ValueError(f"{path} is not the result of a run: it has no {', '.join(missing)}")
    try:
        _Result.model_validate(found)
    except ValidationError as error:
        raise ValueError(f"{path}: {first_problem(error)}; train the run again") from None
    checked: dict[str, Any] = found
    return checked


def fit_images(result: dict[str, Any], images: Images) -> Images:
    """Return images normalized as in the run's training; raise if the network cannot classify them."""
    data = result["data"]
    expected = (len(data["classes"]), data["channels"], *data["size"])
    found = (len(images.classes), images.channels, *images.size)
    if expected != found:
        raise ValueError(
            f"the run knows (classes, channels, height, width) = {expected} of {data['name']}, and {images.name} has "
            f"{found}; name the data set it was trained on by --data"
        )
    mean, std = (tuple(data.get(key) or getattr(images, key)) for key in ("mean", "std"))
    return images if (mean, std) == (images.mean, images.std) else replace(images, mean=mean, std=std)
