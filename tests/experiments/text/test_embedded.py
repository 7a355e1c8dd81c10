"""The texts that come with the package, and what is held out of them."""

from __future__ import annotations

from pydoc_data.topics import topics

import pytest

from factorized.experiments.recipes.text import Task, TextData
from factorized.experiments.text.embedded import number_words
from factorized.experiments.text.sources import find_parts
from factorized.experiments.text.text_files import Pair


@pytest.mark.parametrize("task", ["language", "masked"])
def test_what_is_held_out_of_pythons_documentation_is_spread_over_it_and_nowhere_else(task: Task) -> None:
    parts = find_parts(TextData(), task, None)
    train, held = ([text for (text,) in parts[part].read()] for part in ("train", "validation"))
    assert sum(len(text.split()) for text in train) > 20_000
    assert sum(len(text.split()) for text in held) > 2_000
    topics_of_held = {name for name, topic in topics.items() for text in held if text in topic}
    assert len(topics_of_held) > 12
    trained_on = {" ".join(paragraph.split()) for text in train for paragraph in text.split("\n\n")}
    assert not trained_on & {" ".join(paragraph.split()) for text in held for paragraph in text.split("\n\n")}
    assert held == [text for (text,) in parts["validation"].read()]


@pytest.fixture(scope="module")
def parts() -> dict[str, list[Pair]]:
    return {part: list(number_words(part)) for part in ("train", "validation", "test")}


def test_no_held_out_number_is_trained_on_and_no_number_is_missing(parts: dict[str, list[Pair]]) -> None:
    train, validation, test = (set(pairs) for pairs in parts.values())
    assert len(train | validation | test) == len(train) + len(validation) + len(test) == 10_000
    assert 240 < len(test) == len(parts["test"])
    assert 240 < len(validation) == len(parts["validation"])


def below_100(pairs: list[Pair]) -> list[Pair]:
    return [pair for pair in pairs if "hundert" not in pair[0] and "tausend" not in pair[0]]


def test_short_numbers_are_a_good_part_of_the_training_and_some_of_them_are_held_out(
    parts: dict[str, list[Pair]],
) -> None:
    assert len(set(below_100(parts["train"]))) == 97
    assert len(below_100(parts["train"])) > len(parts["train"]) / 4
    assert below_100(parts["validation"])
    assert below_100(parts["test"])


@pytest.mark.parametrize("words", ["null", "sieben", "zwölf", "zwanzig", "dreißig", "neunzig"])
def test_words_that_are_not_made_of_others_are_trained_on(parts: dict[str, list[Pair]], words: str) -> None:
    assert words in {source for source, _ in parts["train"]}
