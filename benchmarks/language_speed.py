"""Time the training of language models, one after the other, alone on the device.

    python -m benchmarks.language_speed --data DIR --out benchmarks/results/language-h200.json

As ``factorized train`` runs them, without evaluations: tokens per second leave compilation out; peak memory is that of
torch's tensors, in bytes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch

from factorized.experiments.cli.text import load_text
from factorized.experiments.recipes.find import load_any_recipe
from factorized.experiments.recipes.text import TextRecipe
from factorized.experiments.text.language import LanguageTask
from factorized.experiments.text.train import train_text

RECIPES = (
    "language/small",
    "language/small-narrow-0.5",
    "language/small-lowrank-0.5-si",
    "language/small-lowrank-0.5-si-fd",
    "language/small-lowrank-0.25-si-fd",
    "language/small-narrow-0.25",
)


def main() -> None:
    """Parse the command line, time every recipe and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--data", help="the folder of the recipes' text")
    parser.add_argument("--updates", type=int, default=240)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows, corpus = [], None
    for name in arguments.recipes:
        changes = [f"schedule.updates={arguments.updates}", f"run.evaluate_every={arguments.updates}"]
        recipe = load_any_recipe(name, changes)
        if not isinstance(recipe, TextRecipe) or recipe.task != "language":
            raise SystemExit(f"{name} is not a recipe of a language model")
        corpus = corpus or load_text(recipe, arguments.data)
        torch._dynamo.reset()
        unmeasured = patch.object(LanguageTask, "measure", lambda *_: {"loss": 0.0, "perplexity": 1.0})
        with TemporaryDirectory() as folder, unmeasured:
            (result,) = train_text(recipe, corpus, Path(folder), device=arguments.device)
        row = {key: result[key] for key in ("parameters", "tokens_per_second", "peak_memory")}
        rows.append({"recipe": name, **row})
        print(rows[-1], flush=True)
        found = {"machine": result["machine"], "updates": arguments.updates, "rows": rows}
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
