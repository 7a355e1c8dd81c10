"""The verbs for recipes and runs on text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from factorized.experiments.cli.console import console, progress_bar, say

if TYPE_CHECKING:
    import torch
    from torch import nn

    from factorized.experiments.recipes.text import TextRecipe
    from factorized.experiments.text.corpus import Corpus
    from factorized.planning.plan import Plan

ALLOWED = 0.01  # of the recorded score: what other devices and precisions may change
ROUNDING = 1e-3  # of the loss: what multiplying the factors out may change


def is_text_run(run: Path) -> bool:
    """Return whether ``run`` is the folder of a finished run on text."""
    from factorized.experiments.training.result import is_text, read_result

    return is_text(read_result(run))


def load_text(recipe: TextRecipe, data: str | None, *, quiet: bool = False, tokenizer: Any = None) -> Corpus:
    """Return the recipe's text, tokenized; its files are looked for in the folder ``data``."""
    from factorized.experiments.data.load import data_folder
    from factorized.experiments.text.corpus import load_corpus

    folder = None if data is None else Path(data).expanduser()
    if folder is not None and not folder.is_dir():
        named = (".txt files" if name == "." else name for name in recipe.data.train)
        texts = ", ".join(named) or "the recipe's text"
        raise ValueError(f"--data: there is no folder {data}; give the folder of {texts}")
    if folder is not None and not recipe.data.train:
        raise ValueError(
            f"--data {data}: {recipe.name} reads the embedded text {recipe.data.name!r}; drop --data, or name files of "
            "yours by --set 'data.train=[\"train.txt\"]'"
        )
    with progress_bar(quiet=quiet) as bar:
        return load_corpus(recipe, folder, data_folder() / "packed", bar, tokenizer)


def train_recipe(
    recipe: TextRecipe,
    data: str | None,
    folder: Path,
    *,
    seeds: Sequence[int],
    device: torch.device,
    resume: bool | Literal["auto"],
    overwrite: bool,
    allow_other_devices: bool,
    quiet: bool,
) -> list[dict[str, Any]]:
    """Train a recipe of text and return the results."""
    from factorized.experiments.text.train import train_text
    from factorized.experiments.training.progress import Reporter

    results = []
    apart = recipe.of_seed(0) != recipe  # each seed continues from its own run
    for together in [(seed,) for seed in seeds] if apart else [tuple(seeds)]:
        of_seed = recipe.of_seed(together[0])
        results += train_text(
            of_seed,
            load_text(of_seed, data, quiet=quiet),
            folder,
            seeds=together,
            device=device,
            resume=resume,
            overwrite=overwrite,
            allow_other_devices=allow_other_devices,
            reporter=Reporter(console(quiet=quiet), quiet=quiet),
        )
    return results


def plan_recipe(recipe: TextRecipe) -> tuple[nn.Module, Plan | None]:
    """Return the network of a recipe of text and its plan, without reading more than the size of the vocabulary."""
    import torch

    from factorized.experiments.text.corpus import tokenizer_of_model
    from factorized.experiments.text.network import plan_text, starting_network
    from factorized.experiments.text.tokenizer import stand_in_tokenizer
    from factorized.surgery.compose import is_factorized
    from factorized.surgery.describe import describe

    needs_weights = bool(recipe.model.name or recipe.model.from_run) or recipe.factorize.depends_on_weights
    tokenizer = tokenizer_of_model(recipe) or stand_in_tokenizer(recipe.data)
    with torch.device("cpu" if needs_weights else "meta"):
        dense = starting_network(recipe, tokenizer, seed=0)
    return dense, describe(dense) if is_factorized(dense) else plan_text(recipe, dense)


def evaluate_run(run: Path, data: str | None, device: torch.device) -> None:
    """Measure a finished run on text once more, and compare with what was recorded."""
    from factorized.experiments.text.train import TASKS
    from factorized.experiments.text.trained import load_text_run

    recipe, result, model, tokenizer = load_text_run(run)
    corpus = load_text(recipe, data, tokenizer=tokenizer)
    scores = TASKS[recipe.task](recipe, corpus).test(model.to(device))
    name, found, recorded = result["score"], scores[result["score"]], result["scores"][result["score"]]
    say("  ".join(f"{key} {value:.4g}" for key, value in scores.items() if isinstance(value, int | float)))
    if corpus.checksum != result["data"]["checksum"]:
        say(f"recorded {name} {recorded:.4g} on other text ({result['data']['name']}): not comparable")
        return
    say(f"recorded {name} {recorded:.4g}: {found - recorded:+.2g}")
    if abs(found - recorded) > ALLOWED * max(1.0, abs(recorded)):
        raise typer.Exit(1)


def _is_a_model(folder: Path) -> bool:
    """Return whether a folder is empty, or holds files alone, with the config of a model among them."""
    found = list(folder.iterdir()) if folder.is_dir() else [folder]
    return not found or (all(path.is_file() for path in found) and (folder / "config.json").is_file())


def compose_run(run: Path, out: Path | None, data: str | None, device: torch.device, *, overwrite: bool) -> None:
    """Write the network of a run on text as a folder that transformers opens by itself, and compare the loss."""
    import shutil

    from factorized.experiments.models.hugging_face import quiet
    from factorized.experiments.text.train import TASKS
    from factorized.experiments.text.trained import load_text_run
    from factorized.nn.running import count_parameters
    from factorized.surgery.compose import compose, is_factorized

    folder = out or run / "composed"
    if folder.exists() and not overwrite:
        raise ValueError(f"{folder} is already there; name another folder by --out, or replace it with --overwrite")
    if folder.exists() and not _is_a_model(folder):
        raise ValueError(
            f"--overwrite replaces folders that hold one model of transformers and nothing else, and {folder} does "
            "not; name another folder by --out"
        )
    recipe, _, model, tokenizer = load_text_run(run)
    task = TASKS[recipe.task](recipe, load_text(recipe, data, tokenizer=tokenizer))
    before, trained = task.validate(model.to(device))["loss"], count_parameters(model)
    plain: Any = compose(model.cpu()) if is_factorized(model) else model.cpu()
    after = task.validate(plain.to(device))["loss"]
    say(f"validation loss before {before:.5f}, after {after:.5f}")
    if not abs(after - before) <= ROUNDING * max(1.0, before):
        say(f"that is more than rounding: {folder} was not written")
        raise typer.Exit(1)
    shutil.rmtree(folder, ignore_errors=True)
    with quiet():
        plain.cpu().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    say(f"{folder}: {trained:,} parameters in training, {count_parameters(plain):,} now; transformers opens it")
