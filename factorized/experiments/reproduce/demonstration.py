"""``factorized demo``: train recipes, compare them, and check the best ones."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from factorized.experiments.data.images import Images
from factorized.experiments.data.load import load_images
from factorized.experiments.models.build import build_for
from factorized.experiments.recipes.find import load_recipe
from factorized.experiments.reproduce.report import Check
from factorized.experiments.reproduce.runs import Run
from factorized.experiments.reproduce.variant import Variant, group_runs, mark_best
from factorized.experiments.training.evaluate import evaluate_as_trained
from factorized.experiments.training.export import accuracy_of, logits_on_test
from factorized.experiments.training.interrupt import StopRequest
from factorized.experiments.training.progress import Reporter
from factorized.experiments.training.result import RESULT
from factorized.experiments.training.threads import one_thread
from factorized.experiments.training.train import train
from factorized.experiments.training.trained import load_trained
from factorized.files.checkpoint import load, save
from factorized.nn.running import count_parameters
from factorized.surgery.compose import compose
from factorized.surgery.lower import lower

CPU = torch.device("cpu")


def run_variants(
    recipes: Mapping[str, str],  # name and label
    folder: Path,
    seeds: Sequence[int],
    changes: Sequence[str],
    *,
    report: Callable[[], Reporter],
    tell: Callable[[Variant], None],
) -> list[Variant]:
    """Train each recipe with each seed into ``folder``, in place of what is there; return them with the best marked.

    ``report`` makes the reporter of a recipe's runs; ``tell`` is called with each recipe that is done.
    """
    variants = []
    with one_thread(), StopRequest() as stop:
        for name, label in recipes.items():
            stop.check()
            recipe = load_recipe(name, changes)
            images = load_images(recipe.data.name)
            where = folder / name
            results = train(recipe, images, where, seeds=seeds, device=CPU, overwrite=True, reporter=report())
            runs = [Run(where / f"seed-{result['seed']}" / RESULT, result) for result in results]
            variants += group_runs(runs, {name: label})
            tell(variants[-1])
    return mark_best(variants)


def winners_of(variants: Sequence[Variant]) -> list[Variant]:
    """Return the most accurate variant that has something to compose, and the most accurate low-rank one if another."""
    factorized = sorted((v for v in variants if v.scheme != "none"), key=lambda v: v.score.mean, reverse=True)
    low_rank = [variant for variant in factorized if variant.scheme == "low_rank"]
    return list(dict.fromkeys([*factorized[:1], *low_rank[:1]]))


def check_winner(winner: Variant, run: Path) -> list[Check]:
    """Return checks of a trained factorized network and of its plain forms, on all test images."""
    recipe, result, network = load_trained(run)
    images = load_images(recipe.data.name)
    expected = logits_on_test(network, images, CPU)
    accuracy = accuracy_of(expected, images)
    _, as_trained = evaluate_as_trained(recipe, network, images)
    recorded = abs(as_trained - result["accuracy"])
    checks = [Check("accuracy: points from the recorded one", recorded, 0.05)]
    for way, plain in (("composed", compose(network)), ("lowered", lower(network))):
        logits = logits_on_test(plain.eval(), images, CPU)
        off = abs(accuracy_of(logits, images) - accuracy)
        checks.append(Check(f"{way}: relative error of logits", _error(logits, expected), 1e-4))
        checks.append(Check(f"{way}: points of accuracy lost or gained", off, 0.05))
    saved = logits_on_test(_saved_and_loaded(network, recipe.model.name, images), images, CPU)
    checks.append(Check("saved and loaded: relative error of logits", _error(saved, expected), 0.0))
    if recipe.factorize.ratio is not None:
        share = winner.parameters / count_parameters(compose(network))
        checks.append(Check("parameters: share of the dense ones", share, recipe.factorize.ratio))
    return checks


def _saved_and_loaded(network: nn.Module, model: str, images: Images) -> nn.Module:
    with tempfile.TemporaryDirectory() as folder:
        save(network, folder)
        return load(folder, build_for(model, images)).eval()


def _error(logits: Tensor, expected: Tensor) -> float:
    return ((logits - expected).abs().max() / expected.abs().max()).item()
