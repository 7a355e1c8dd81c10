"""The images a verb works on: those a recipe names, or those ``--data`` puts in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from factorized.experiments.cli.console import progress_bar
from factorized.experiments.data.cifar_python import cifar_layout
from factorized.experiments.data.image_folder import is_image_folder
from factorized.experiments.data.images import Images
from factorized.experiments.data.load import EMBEDDED, load_images, prepared_path
from factorized.experiments.recipes.recipe import Recipe
from factorized.experiments.training.trained import fit_images


def load_data(
    recipe: Recipe, data: str | None, *, quiet: bool = False, takes_settings: bool = True
) -> tuple[Recipe, Images]:
    """Return the recipe and its images.

    ``data`` is a folder of data sets, or a data set itself. The recipe then has the name of
    the set, not its path: a run is the same wherever its images are. ``takes_settings`` says whether the verb has
    ``--set``, which an error may suggest.
    """
    folder, where = None, recipe.data.name
    if data is not None and _is_data_set(data):
        where = data
    elif data is not None:
        folder = Path(data).expanduser()
        if not folder.is_dir():
            by_name = f". To give the name of a data set, use --set data.name={data}" if takes_settings else ""
            raise ValueError(
                f"--data: there is no file or folder {data}; give a folder of data sets, or the path of one{by_name}"
            )
        if recipe.data.name == EMBEDDED or prepared_path(recipe.data.name, folder) is None:
            raise ValueError(
                f"--data {data}: the recipe's data set {recipe.data.name!r} is not read from a folder of data sets, "
                f"and {data} is not a data set itself: expected train/CLASS/ and test/CLASS/, or the files of CIFAR. "
                "Give one that is, or drop --data"
            )
    with progress_bar(quiet=quiet) as bar:
        images = load_images(where, folder, bar)
    name = where if prepared_path(where) is not None else images.name
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"name": name})}), images


def load_data_of_run(recipe: Recipe, result: dict[str, Any], data: str | None) -> Images:
    """Return the images that a run was trained on, or others where ``data`` names them, fed as those were."""
    trained_on = f"{recipe.data.name!r} (checksum {result['data']['checksum'][:12]}…)"
    try:
        _, images = load_data(recipe, data, takes_settings=False)
    except ValueError as error:
        if data is not None:
            raise
        raise ValueError(f"the run was trained on {trained_on}: {error}. Name the file or folder by --data") from error
    if data is None and images.checksum != result["data"]["checksum"]:
        raise ValueError(
            f"the run was trained on {trained_on}, but the data of that name have checksum "
            f"{images.checksum[:12]}…; name the file or folder by --data"
        )
    return fit_images(result, images)


def _is_data_set(data: str) -> bool:
    path = Path(data).expanduser()
    if path.is_dir():
        return cifar_layout(path) is not None or is_image_folder(path)
    return data.startswith("hf:") or path.is_file()
