"""Text recipes that train in a second, and their corpora."""

from __future__ import annotations

from pathlib import Path

from factorized.experiments.recipes.find import load_any_recipe
from factorized.experiments.recipes.text import TextRecipe
from factorized.experiments.text.corpus import Corpus, load_corpus

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


def _write(path: Path, text: str) -> None:
    if not path.exists():  # another process may be reading it
        path.write_text(text)


def small(task: str, folder: Path, *changes: str) -> tuple[TextRecipe, Corpus]:
    """Return a recipe of the task and its corpus, packed in ``folder``."""
    made = files(folder, task)
    recipe = load_any_recipe(NAMES[task], (*SMALL, *BY_TASK[task], *made, *changes))
    assert isinstance(recipe, TextRecipe)
    return recipe, load_corpus(recipe, folder, folder / "packed")
