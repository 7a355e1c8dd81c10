"""The text of a recipe, tokenized: what a task trains, validates and tests on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from factorized.experiments.data.progress import Progress, silent
from factorized.experiments.recipes.text import TextRecipe
from factorized.experiments.text.from_run import tokenizer_of_run
from factorized.experiments.text.models import model_folder
from factorized.experiments.text.question_windows import QuestionWindows
from factorized.experiments.text.sources import (
    Pair,
    Source,
    find_source,
    find_vocabulary,
    hold_out,
    number_words,
    python_documentation,
    read_documents,
    read_pairs,
)
from factorized.experiments.text.squad import Paragraph, read_paragraphs
from factorized.experiments.text.tokenizer import learn_tokenizer, load_tokenizer
from factorized.experiments.text.tokens import PackedTexts, pack
from factorized.files.atomic import lock

EMBEDDED = {"language": "pydoc", "masked": "pydoc", "translation": "numbers"}


@dataclass(frozen=True)
class Corpus:
    """Texts of one language, or both sides of pairs, by part."""

    name: str
    checksum: str
    tokenizer: Any
    texts: Mapping[str, tuple[PackedTexts, ...]]  # by part: the texts, or sources and targets
    pairs: Mapping[str, tuple[Pair, ...]]  # of translation, what is not trained on as it was read, to be scored
    questions: Mapping[str, QuestionWindows] = field(default_factory=dict)  # of questions, in place of texts

    @property
    def tests(self) -> list[str]:
        """The parts that a trained model is tested on."""
        return [part for part in (self.questions or self.texts) if part not in ("train", "validation")]


def load_corpus(
    recipe: TextRecipe, folder: Path | None, cache: Path, progress: Progress = silent, tokenizer: Any = None
) -> Corpus:
    """Return the recipe's text, tokenized once into ``cache``; the files are looked for in ``folder``.

    The tokenizer is learned from the training text, unless one is given: that of a trained model. Of several processes
    one writes, and the others wait and map what it wrote.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(cache, os.O_RDONLY) if os.name != "nt" else None  # Windows cannot open folders
    except OSError as error:
        raise ValueError(
            f"cannot write to {cache}: {error.strerror}; name another folder by $FACTORIZED_DATA"
        ) from None
    try:
        if descriptor is not None:
            lock(descriptor, wait=True)
        return _load(recipe, folder, cache, progress, tokenizer)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def corpus_checksum(recipe: TextRecipe, folder: Path | None) -> str:
    """Return the checksum that the recipe's text has in a result; nothing is tokenized."""
    source = _find(recipe, folder)
    if recipe.task == "questions":
        return _checksum_of_questions(_paragraphs(source))
    return _checksum(_pairs(source) if recipe.task == "translation" else _documents(source))


def _find(recipe: TextRecipe, folder: Path | None) -> Source:
    data, task = recipe.data, recipe.task
    source = find_source(data.name, data.train, data.validation, data.test, folder)
    if source.embedded and data.name != EMBEDDED.get(task):
        embedded = f"only {EMBEDDED[task]!r}" if task in EMBEDDED else "nothing"
        raise ValueError(
            f"data.name = {data.name!r} needs data.train, the names of its files: for task {task!r} {embedded} comes "
            "with this package"
        )
    return source


def _load(recipe: TextRecipe, folder: Path | None, cache: Path, progress: Progress, tokenizer: Any) -> Corpus:
    data, task = recipe.data, recipe.task
    source, paired = _find(recipe, folder), task == "translation"
    if isinstance(data.vocabulary, str):
        vocabulary = find_vocabulary(data.vocabulary, folder)
        recipe = recipe.model_copy(update={"data": data.model_copy(update={"vocabulary": str(vocabulary)})})
    if tokenizer is None and recipe.model.from_run is not None:
        tokenizer = tokenizer_of_run(recipe.model.from_run)
    if task == "questions":
        return _load_questions(recipe, source, cache, progress, tokenizer)
    parts = _pairs(source) if paired else _documents(source)
    checksum = _checksum(parts)
    if tokenizer is None:
        tokenizer = _tokenizer(recipe, checksum, parts, paired, cache)
    state = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    sides = (0, 1) if paired else (None,)
    texts: dict[str, tuple[PackedTexts, ...]] = {}
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    for part, read in parts.items():
        packed = []
        for side in sides:
            key = {"checksum": checksum, "part": part, "side": side, "tokenizer": state}
            stage = f"tokenizing {part}"
            packed.append(pack(cache, key, _side(read, side), tokenizer, end=end, progress=progress, stage=stage))
        texts[part] = tuple(packed)
    kept = {part: tuple(read()) for part, read in parts.items() if part != "train"} if paired else {}
    return Corpus(data.name, checksum, tokenizer, texts, kept)


def _load_questions(recipe: TextRecipe, source: Source, cache: Path, progress: Progress, tokenizer: Any) -> Corpus:
    data, model = recipe.data, recipe.model
    paragraphs = _paragraphs(source)
    if not any(paragraph.questions for paragraph in paragraphs["validation"]):
        raise ValueError(
            f"data.train has {len(paragraphs['train'])} paragraphs, too few to hold a twentieth out; name a file of "
            "questions in data.validation"
        )
    checksum = _checksum_of_questions(paragraphs)
    if tokenizer is None and model.name:
        tokenizer = load_tokenizer(model_folder(model.name))
    if tokenizer is None:
        train = paragraphs["train"]
        texts = [text for paragraph in train for text in (paragraph.context, *(q.text for q in paragraph.questions))]
        tokenizer = _tokenizer(recipe, checksum, {"train": lambda: texts}, paired=False, cache=cache)
    questions = {
        part: QuestionWindows(items, tokenizer, data.length, data.stride, progress=progress, stage=f"tokenizing {part}")
        for part, items in paragraphs.items()
    }
    return Corpus(data.name, checksum, tokenizer, {}, {}, questions)


def _paragraphs(source: Source) -> dict[str, list[Paragraph]]:
    return {part: list(read()) for part, read in _parts(source, read_paragraphs).items()}


def _checksum_of_questions(paragraphs: Mapping[str, Sequence[Paragraph]]) -> str:
    return _checksum({part: partial(map, attrgetter("strings"), items) for part, items in paragraphs.items()})


Parts = Mapping[str, Callable[[], Iterable[Any]]]  # by part, a function that reads it from the beginning


def _documents(source: Source) -> Parts:
    if source.embedded:
        train, held = hold_out(python_documentation())
        return {"train": lambda: train, "validation": lambda: held}
    return _parts(source, read_documents)


def _pairs(source: Source) -> Parts:
    if source.embedded:
        train, held = hold_out(number_words())
        half = len(held) // 2
        return {"train": lambda: train, "validation": lambda: held[:half], "test": lambda: held[half:]}
    return _parts(source, read_pairs)


def _parts(source: Source, read: Callable[[Sequence[Path]], Iterator[Any]]) -> Parts:
    """Return the parts of files; each test file is a part of its own, called like the file."""
    tests = {path.name.partition(".")[0]: partial(read, (path,)) for path in source.test}
    if source.validation:
        return {"train": partial(read, source.train), "validation": partial(read, source.validation), **tests}
    train, held = hold_out(list(read(source.train)))
    return {"train": lambda: train, "validation": lambda: held, **tests}


def _side(read: Callable[[], Iterable[Any]], side: int | None) -> Callable[[], Iterable[str]]:
    return read if side is None else lambda: (pair[side] for pair in read())


def _checksum(parts: Parts) -> str:
    """Return the SHA-256 of all texts, the same whatever files they came from."""
    digest = hashlib.sha256()
    for part, read in parts.items():
        digest.update(part.encode())
        for item in read():
            digest.update("\t".join(item).encode() if isinstance(item, tuple) else item.encode())
            digest.update(b"\0")
    return digest.hexdigest()


def _tokenizer(recipe: TextRecipe, checksum: str, parts: Parts, paired: bool, cache: Path) -> Any:
    """Return the tokenizer of the training text; it is learned once."""
    vocabulary = recipe.data.vocabulary
    if isinstance(vocabulary, str):
        vocabulary = hashlib.sha256(Path(vocabulary).read_bytes()).hexdigest()
    key = {"checksum": checksum, "task": recipe.task, "vocabulary": vocabulary, "lower": recipe.data.lower}
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = cache / f"tokenizer-{name}.json"
    return learn_tokenizer(recipe.task, recipe.data, lambda: _training_text(parts, paired), path)


def _training_text(parts: Parts, paired: bool) -> Iterator[str]:
    for item in parts["train"]():
        if paired:
            yield from item
        else:
            yield item
