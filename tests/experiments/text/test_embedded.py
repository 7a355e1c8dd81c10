"""The texts that come with the package, and what is held out of the number words."""

from __future__ import annotations

import pytest

from factorized.experiments.text.embedded import number_words, python_documentation
from factorized.experiments.text.text_files import Pair


def test_pythons_documentation_is_there() -> None:
    assert sum(len(text.split()) for (text,) in python_documentation()) > 20_000


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
