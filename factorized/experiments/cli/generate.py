"""``factorized generate``: continue a text with a trained language model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from factorized.experiments.cli.arguments import Device, complete_run, examples
from factorized.experiments.cli.console import say

EXAMPLES = examples('factorized generate --run out/language/tiny/seed-0 "The for statement"')


def generate(
    prompt: Annotated[str, typer.Argument(metavar="TEXT", help="The beginning of the text.")],
    run: Annotated[
        Path,
        typer.Option("--run", autocompletion=complete_run, help="The folder of a finished run of a language model."),
    ],
    tokens: Annotated[int, typer.Option(min=1, max=100_000, help="Number of tokens to add.")] = 50,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Sample with this seed; by default the likeliest tokens are taken.")
    ] = None,
    device: Device = None,
) -> None:
    """Continue a text with a finished run of a language model."""
    import torch

    from factorized.experiments.cli.device import pick_device
    from factorized.experiments.text.language import continue_text
    from factorized.experiments.text.trained import load_text_run

    recipe, _, model, tokenizer = load_text_run(run)
    if recipe.task != "language":
        raise ValueError(f"{run} was trained for task {recipe.task!r}; give a run of a language recipe")
    if seed is not None:
        torch.manual_seed(seed)
    say(continue_text(model.to(pick_device(device)), tokenizer, prompt, tokens, draw=seed is not None))
