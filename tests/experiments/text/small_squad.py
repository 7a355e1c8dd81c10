"""SQuAD in small: files of a few paragraphs, a tokenizer of them, and a pre-trained run that was not trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from factorized.experiments.recipes.find import check_text_recipe, merge
from factorized.experiments.recipes.text import TextRecipe
from factorized.experiments.text.corpus import Corpus, load_corpus
from factorized.experiments.text.models import build_text_model
from factorized.experiments.text.trained import save_text_model
from factorized.experiments.training.record import write_json

ANIMALS = ("cat", "dog", "horse", "raven", "toad", "whale")
COLOURS = ("red", "dark blue", "green", "white and black", "grey", "Beyoncé's yellow")
TINY: dict[str, Any] = {
    "name": "squad/small",
    "task": "questions",
    "model": {"hidden": 16, "layers": 2, "heads": 2, "feed_forward": 32, "positions": 64},
    "data": {
        "name": "small",
        "train": ["train.json"],
        "validation": ["dev.json"],
        "vocabulary": 120,
        "length": 48,
        "stride": 8,
    },
    "schedule": {"updates": 2},
    "run": {"batch": 4, "evaluate_every": 2, "checkpoint_every": 2},
}


def paragraph(number: int, sentences: int = 3) -> dict[str, Any]:
    """Return a paragraph on the colours of animals, with a question on each sentence."""
    context, asked = "", []
    for place in range(sentences):
        animal, colour = ANIMALS[(number + place) % len(ANIMALS)], COLOURS[(number + 2 * place) % len(COLOURS)]
        sentence = f"In house {number}, room {place}, the {animal} was {colour}. "
        start = len(context) + sentence.index(colour)
        answers = [{"text": colour, "answer_start": start}]
        question = f"What colour was the {animal} of room {place}?"
        asked.append({"id": f"p{number}q{place}", "question": question, "answers": answers})
        context += sentence
    return {"context": context.strip(), "qas": asked}


def table(*paragraphs: dict[str, Any]) -> dict[str, Any]:
    """Return paragraphs in the layout of a SQuAD file."""
    return {"version": "1.1", "data": [{"title": "Animals", "paragraphs": list(paragraphs)}]}


def write_squad(folder: Path, train: int = 3) -> Path:
    """Write train.json and dev.json into ``folder`` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.json").write_text(json.dumps(table(*(paragraph(number) for number in range(train)))))
    (folder / "dev.json").write_text(json.dumps(table(paragraph(100), paragraph(101, sentences=8))))
    return folder


def recipe_of(changes: dict[str, Any] | None = None) -> TextRecipe:
    """Return a recipe of questions for a tiny BERT, with ``changes``."""
    return check_text_recipe(merge(TINY, changes or {}), "small")


def small_corpus(folder: Path, recipe: TextRecipe | None = None) -> Corpus:
    """Return a corpus of the small files, written into ``folder``."""
    return load_corpus(recipe or recipe_of(), write_squad(folder / "squad"), folder / "cache")


def pretrained_run(folder: Path, change: Callable[[nn.Module], nn.Module] = lambda model: model) -> Path:
    """Write a finished run of masked language modelling, with a fresh network after ``change``, and return it."""
    tokenizer = small_corpus(folder).tokenizer
    masked = {key: value for key, value in TINY.items() if key != "data"} | {"task": "masked"}
    recipe = check_text_recipe(masked | {"data": {"length": 64, "vocabulary": 120}}, "small")
    model = change(build_text_model(recipe, tokenizer, seed=1))
    run = folder / "pretrained"
    files = save_text_model(model, tokenizer, run)
    head = {"task": "masked", "recipe": recipe.to_dict(), "seed": 1, "score": "loss", "scores": {"loss": 1.0}}
    data = {"name": "small", "checksum": "0"}
    rest = {"parameters": 1, "seconds": 1.0, "machine": {}, "data": data, "history": []}
    write_json(run / "result.json", {**head, **rest, "files": files})
    return run
