"""The images a verb works on: those a recipe names, or those ``--data`` puts in their place."""

from __future__ import annotations

from pathlib import Path

from factorized.cli.console import progress_bar
from factorized.vision.data.cifar_python import cifar_layout
from factorized.vision.data.image_folder import is_image_folder
from factorized.vision.data.images import Images
from factorized.vision.data.load import EMBEDDED, load_images, prepared_path
from factorized.vision.recipe import Recipe


def load_data(recipe: Recipe, data: str | None, *, quiet: bool = False) -> tuple[Recipe, Images]:
    """Return the recipe and its images.

    ``data`` is a folder of data sets, or a data set itself, by which the recipe then names its data.
    """
    folder = None
    if data is not None and _is_data_set(data):
        name = data if data.startswith("hf:") else str(Path(data).expanduser().resolve())  # to be found again
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"name": name})})
    elif data is not None:
        folder = Path(data).expanduser()
        if not folder.is_dir():
            raise ValueError(
                f"--data: there is no file or folder {data}; give a folder of data sets, or the path of one. A "
                f"data set that has a name goes by it: --set data.name={data}"
            )
        if recipe.data.name == EMBEDDED or prepared_path(recipe.data.name, folder) is None:
            raise ValueError(
                f"--data {data}: the recipe's data set {recipe.data.name!r} comes from no folder of data sets, and "
                f"{data} is not a data set itself: expected train/CLASS/ and test/CLASS/, or the files of CIFAR. Give "
                "one that is, or drop --data"
            )
    with progress_bar(quiet=quiet) as bar:
        return recipe, load_images(recipe.data.name, folder, bar)


def _is_data_set(data: str) -> bool:
    path = Path(data).expanduser()
    if path.is_dir():
        return cifar_layout(path) is not None or is_image_folder(path)
    return data.startswith("hf:") or path.is_file()
