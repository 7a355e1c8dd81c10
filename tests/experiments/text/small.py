"""Text recipes that train in a second, and their corpora."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from factorized.experiments.recipes.find import load_any_recipe
from factorized.experiments.recipes.text import TextRecipe
from factorized.experiments.text.corpus import Corpus, load_corpus
from factorized.experiments.text.train import train_text
from factorized.experiments.text.trainer import TextTrainer
from factorized.experiments.training.interrupt import Interrupted

NAMES = {"language": "language/tiny", "masked": "bert/tiny", "translation": "translation/numbers"}
SMALL = (
    "model.hidden=16",
    "model.layers=1",
    "model.heads=2",
    "model.feed_forward=32",
    "schedule.updates=4",
    "run.evaluate_every=2",
    "run.checkpoint_every=2",
)
BY_TASK = {
    "language": ("data.length=16", "run.batch=4", "data.vocabulary=300"),
    "masked": ("data.length=16", "run.batch=4", "data.vocabulary=300"),
    "translation": ("run.tokens=200", "run.longest=40", "run.beam=2"),
}
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def files(folder: Path, task: str) -> tuple[str, ...]:
    """Write a small text or set of pairs, and return the changes that make a recipe read it."""
    folder.mkdir(parents=True, exist_ok=True)
    if task == "translation":
        pairs = [f"{a} {b}\t{b} {a} !" for a in WORDS for b in WORDS]
        _write(folder / "train.tsv", "\n".join(pairs) + "\n")
        return ('data.train=["train.tsv"]', "data.vocabulary=60")
    lines = [" ".join(WORDS[(i * j) % 10] for j in range(1, 12)) for i in range(60)]
    _write(folder / "train.txt", "\n\n".join(lines))
    return ('data.train=["train.txt"]',)


def write_pairs_of_many_lengths(folder: Path) -> None:
    """Write pairs of one to nine words in place of the small set of pairs."""
    pairs = [(WORDS[i : i + count], WORDS[i : i + count // 2 + 1]) for count in range(1, 10) for i in range(8)]
    (folder / "train.tsv").write_text("".join(f"{' '.join(a)}\t{' '.join(b)}\n" for a, b in pairs))


def _write(path: Path, text: str) -> None:
    if not path.exists():  # another process may be reading it
        path.write_text(text)


def small(task: str, folder: Path, *changes: str) -> tuple[TextRecipe, Corpus]:
    """Return a recipe of the task and its corpus, packed in ``folder``."""
    made = files(folder, task)
    recipe = load_any_recipe(NAMES[task], (*SMALL, *BY_TASK[task], *made, *changes))
    assert isinstance(recipe, TextRecipe)
    return recipe, load_corpus(recipe, folder, folder / "packed")


def train_until(update: int, recipe: TextRecipe, corpus: Corpus, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Train into ``folder`` until a signal stops the run in an update, which it finishes."""
    real = TextTrainer.training_step

    def stopped(self: TextTrainer, *arguments: Any, **keywords: Any) -> Tensor:
        if self.state.global_step == update - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *arguments, **keywords)

    with patch.context() as within:
        within.setattr(TextTrainer, "training_step", stopped)
        with pytest.raises(Interrupted):
            train_text(recipe, corpus, folder, device="cpu")
