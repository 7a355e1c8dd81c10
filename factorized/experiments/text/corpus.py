"""The text of a recipe, tokenized: what a task trains, validates and tests on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from factorized.experiments.data.explain import writing_to
from factorized.experiments.data.progress import Progress, silent, watched
from factorized.experiments.models.hugging_face import model_folder
from factorized.experiments.recipes.text import TextRecipe
from factorized.experiments.text.from_run import tokenizer_of_run
from factorized.experiments.text.question_windows import QuestionWindows
from factorized.experiments.text.sources import Part, find_parts, find_vocabulary, survey
from factorized.experiments.text.squad import check_questions
from factorized.experiments.text.text_files import Pair
from factorized.experiments.text.tokenizer import has_tokenizer, learn_tokenizer, load_tokenizer, state_of
from factorized.experiments.text.tokens import PackedTexts, name_of, pack
from factorized.files.atomic import locked_folder


@dataclass(frozen=True)
class Corpus:
    """Texts of one language, or both sides of pairs, by part."""

    name: str
    checksum: str
    tokenizer: Any
    texts: Mapping[str, tuple[PackedTexts, ...]]  # by part: the texts, or sources and targets
    pairs: Mapping[str, tuple[Pair, ...]]  # of translation, the validation and test pairs as they were read
    questions: Mapping[str, QuestionWindows] = field(default_factory=dict)  # of task questions, in place of texts

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
    with ExitStack() as held:
        with writing_to(cache, "name another folder by $FACTORIZED_DATA"):
            cache.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked_folder(cache, wait=True))
        return _load(recipe, folder, cache, progress, tokenizer)


def corpus_checksum(recipe: TextRecipe, folder: Path | None) -> str:
    """Return the checksum that the recipe's text has in a result; nothing is tokenized."""
    return survey(find_parts(recipe.data, recipe.task, folder), silent)[0]


def _load(recipe: TextRecipe, folder: Path | None, cache: Path, progress: Progress, tokenizer: Any) -> Corpus:
    data, task = recipe.data, recipe.task
    if isinstance(data.vocabulary, str):
        vocabulary = find_vocabulary(data.vocabulary, folder)
        recipe = recipe.model_copy(update={"data": data.model_copy(update={"vocabulary": str(vocabulary)})})
    if tokenizer is None:
        tokenizer = tokenizer_of_model(recipe)
    parts = find_parts(data, task, folder)
    checksum, counts = survey(parts, progress)
    if task == "questions":
        return _load_questions(recipe, parts, checksum, cache, progress, tokenizer)
    if tokenizer is None:
        training = watched(parts["train"].read(), progress, "learning tokens", counts["train"])
        tokenizer = _learned(recipe, checksum, chain.from_iterable(training), cache)
    state = state_of(tokenizer)
    paired = task == "translation"
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if end is None:
        raise ValueError("the model's tokenizer has neither eos_token nor sep_token to end a text with; give it one")
    missing = [name for name in ("cls_token", "sep_token", "mask_token") if getattr(tokenizer, name) is None]
    if task == "masked" and missing:
        raise ValueError(
            f"the model's tokenizer has no {' and no '.join(missing)}, which masked language models need; set them, "
            "and write it again by tokenizer.save_pretrained(folder)"
        )
    texts = {
        name: pack(
            cache,
            {"checksum": checksum, "part": name, "tokenizer": state},
            part.read,
            tokenizer,
            sides=2 if paired else 1,
            end=end,
            progress=progress,
            stage=f"tokenizing {name}",
            total=counts[name],
        )
        for name, part in parts.items()
    }
    kept = {name: tuple(part.read()) for name, part in parts.items() if name != "train"} if paired else {}
    return Corpus(data.name, checksum, tokenizer, texts, kept)


def _load_questions(
    recipe: TextRecipe, parts: Mapping[str, Part], checksum: str, cache: Path, progress: Progress, tokenizer: Any
) -> Corpus:
    data = recipe.data
    paragraphs = {name: list(part.read()) for name, part in parts.items()}
    for name, some in paragraphs.items():
        check_questions(some, name)
    if tokenizer is None:
        training = (text for paragraph in paragraphs["train"] for text in paragraph.texts)
        tokenizer = _learned(recipe, checksum, training, cache)
    made_from = {"checksum": checksum, "tokenizer": state_of(tokenizer), "length": data.length, "stride": data.stride}
    questions = {
        name: QuestionWindows(
            some,
            tokenizer,
            data.length,
            data.stride,
            file=cache / f"windows-{name_of({**made_from, 'part': name})}.npz",
            progress=progress,
            stage=f"tokenizing {name}",
        )
        for name, some in paragraphs.items()
    }
    return Corpus(data.name, checksum, tokenizer, {}, {}, questions)


def tokenizer_of_model(recipe: TextRecipe) -> Any:
    """Return the tokenizer of the run or folder that the recipe's model comes from; None if it has none."""
    if recipe.model.from_run is not None:
        return tokenizer_of_run(recipe.model.from_run)
    folder = model_folder(recipe.model.name)
    if recipe.model.name and (recipe.task == "questions" or has_tokenizer(folder)):
        return load_tokenizer(folder)
    return None


def _learned(recipe: TextRecipe, checksum: str, texts: Iterable[str], cache: Path) -> Any:
    """Return the tokenizer of the training text; it is learned once."""
    vocabulary = recipe.data.vocabulary
    if isinstance(vocabulary, str):
        vocabulary = hashlib.sha256(Path(vocabulary).read_bytes()).hexdigest()
    key = {"checksum": checksum, "task": recipe.task, "vocabulary": vocabulary, "lower": recipe.data.lower}
    return learn_tokenizer(recipe.task, recipe.data, texts, cache / f"tokenizer-{name_of(key)}.json")
