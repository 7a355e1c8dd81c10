"""``factorized translate``: translate sentences with a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from factorized.experiments.cli.arguments import Device, complete_run, examples
from factorized.experiments.cli.console import say

EXAMPLES = examples(
    "factorized translate --run out/translation/numbers/seed-0 zweiundvierzig",
    'factorized translate --run out/translation/tatoeba/seed-0 "Guten Morgen"',
)


def translate(
    texts: Annotated[list[str], typer.Argument(metavar="TEXT", help="Sentences to translate.")],
    run: Annotated[
        Path, typer.Option("--run", autocompletion=complete_run, help="The folder of a finished translation run.")
    ],
    device: Device = None,
) -> None:
    """Translate sentences with a finished run, one line each."""
    from factorized.experiments.cli.device import pick_device
    from factorized.experiments.text.trained import load_text_run
    from factorized.experiments.text.translation import translate_texts

    recipe, _, model, tokenizer = load_text_run(run)
    if recipe.task != "translation":
        raise ValueError(f"{run} was trained for task {recipe.task!r}; give a run of a translation recipe")
    sources, longest = [text.strip() for text in texts], recipe.run.longest  # as in training
    for number, source in enumerate(sources, start=1):
        if (tokens := len(tokenizer(source)["input_ids"])) > longest:
            raise ValueError(
                f"TEXT {number} has {tokens} tokens, and the translator reads {longest} at most; give its sentences "
                "one by one"
            )
    for line in translate_texts(model.to(pick_device(device)), tokenizer, sources, recipe.run.beam, longest):
        say(line)
