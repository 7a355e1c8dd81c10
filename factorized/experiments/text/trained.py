"""The trained model and its tokenizer in the folder of a text run: written at its end, read by commands."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from torch import nn

from factorized.experiments.models.hugging_face import quiet
from factorized.experiments.recipes.find import check_text_recipe
from factorized.experiments.recipes.text import TextRecipe
from factorized.experiments.text.models import auto_class
from factorized.experiments.text.sharding import whole_weights
from factorized.experiments.text.tokenizer import load_tokenizer
from factorized.experiments.training.result import RESULT, Result, read_result
from factorized.experiments.training.trained import FOLDER, check_files, checksum_of
from factorized.files.folder import MANIFEST
from factorized.files.pretrained import from_pretrained, save_pretrained
from factorized.surgery.compose import is_factorized
from factorized.surgery.state import is_sharded


def save_text_model(model: Any, tokenizer: Any, run: Path, *, first: bool = True) -> dict[str, str]:
    """Write the network and its tokenizer into the folder of its run, and return the checksum of each file.

    All processes of a sharded network have to call this; only the ``first`` one writes and returns something.
    """
    folder = run / FOLDER
    if first:
        shutil.rmtree(folder, ignore_errors=True)
    if is_factorized(model):
        save_pretrained(model, folder)
    elif is_sharded(model):
        weights = whole_weights(model)
        if first:
            model.save_pretrained(folder, state_dict=weights)
    else:
        model.save_pretrained(folder)
    if not first:
        return {}
    tokenizer.save_pretrained(folder)
    return {path.name: checksum_of(path) for path in sorted(folder.iterdir())}


def load_text_run(run: Path) -> tuple[TextRecipe, Result, nn.Module, Any]:
    """Return recipe, result, network in evaluation mode, and tokenizer of a finished run on text."""
    result = read_result(run, "text")
    recipe = check_text_recipe(result["recipe"], str(run / RESULT))
    check_files(run, result)
    return recipe, result, load_network(recipe.task, run), load_tokenizer(run / FOLDER)


def load_network(task: str, run: Path) -> nn.Module:
    """Return the network that ``save_text_model`` wrote into the folder of a run, in evaluation mode."""
    auto, folder = auto_class(task), run / FOLDER
    with quiet():
        if (folder / MANIFEST).is_file():
            model: nn.Module = from_pretrained(auto, folder)
        else:
            model = auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return model.eval()
