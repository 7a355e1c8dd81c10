"""Time the training of language models and translators, one after the other, alone on the device.

    python -m benchmarks.language_speed --data DIR --out benchmarks/results/language-h200.json
    python -m benchmarks.language_speed translation/tatoeba --data DIR --updates 3000 --out FILE

As ``factorized train`` runs them, without evaluations: speeds leave compilation out, but not the capture of graphs for
shapes that are met after the first tenth of the updates; peak memory is that of torch's tensors, in bytes. Without
``--data`` a language model reads random tokens, which takes as long.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from benchmarks.script import parser_of, write
from factorized.experiments.cli.text import load_text
from factorized.experiments.recipes.find import load_any_recipe
from factorized.experiments.recipes.text import TextRecipe
from factorized.experiments.text.corpus import Corpus
from factorized.experiments.text.tokens import PackedTexts
from factorized.experiments.text.train import TASKS, train_text

RECIPES = (
    "language/small",
    "language/small-narrow-0.5",
    "language/small-lowrank-0.5-si",
    "language/small-lowrank-0.5-si-fd",
    "language/small-lowrank-0.25-si-fd",
    "language/small-narrow-0.25",
)


def random_corpus(recipe: TextRecipe) -> Corpus:
    """Return 2000 sequences of random tokens, of the recipe's vocabulary and length."""
    count = recipe.data.vocabulary
    if isinstance(count, str):
        raise SystemExit(f"random tokens need a number of them, got data.vocabulary = {count!r}")
    words = WordLevel({"<pad>": 0, "</s>": 1, **{f"w{number}": number for number in range(2, count)}}, unk_token="w2")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="</s>")
    tokens = np.random.default_rng(0).integers(2, count, 2000 * recipe.data.length, dtype=np.int32)
    texts = (PackedTexts(tokens, np.array([0, len(tokens)]), len(tokens)),)
    return Corpus("random", "random", tokenizer, {"train": texts, "validation": texts}, {})


def main() -> None:
    """Parse the command line, time every recipe and write one JSON file."""
    parser = parser_of(__doc__)
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--data", help="the folder of the recipes' text; random tokens unless given")
    parser.add_argument("--set", action="append", default=[], help="section.field=value, for every recipe")
    parser.add_argument("--updates", type=int, default=240)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    corpora: dict[str, Corpus] = {}  # by task
    for name in arguments.recipes:
        changes = [f"schedule.updates={arguments.updates}", f"run.evaluate_every={arguments.updates}", *arguments.set]
        recipe = load_any_recipe(name, changes)
        if not isinstance(recipe, TextRecipe) or recipe.task not in ("language", "translation"):
            raise SystemExit(f"{name} is a recipe neither of a language model nor of a translator")
        if recipe.task == "translation" and not arguments.data:
            raise SystemExit(f"{name} needs --data: the speed of a translator depends on the lengths of its sentences")
        if recipe.task not in corpora:
            text = load_text(recipe, arguments.data) if arguments.data else random_corpus(recipe)
            corpora[recipe.task] = text
        torch._dynamo.reset()
        task = TASKS[recipe.task]
        unmeasured = patch.multiple(task, validate=lambda *_: {"loss": 0.0}, test=lambda *_: {"loss": 0.0})
        with TemporaryDirectory() as folder, unmeasured:
            (result,) = train_text(recipe, corpora[recipe.task], Path(folder), device=arguments.device)
        row = {key: result[key] for key in ("parameters", "tokens_per_second", "peak_memory")}
        row["updates_per_second"] = row["tokens_per_second"] * arguments.updates / result["tokens"]
        rows.append({"recipe": name, "changes": arguments.set, **row})
        print(rows[-1], flush=True)
        about = {"machine": result["machine"], "updates": arguments.updates}  # which knows transformers' version
        write(arguments.out, torch.device(arguments.device), rows, **about)


if __name__ == "__main__":
    main()
