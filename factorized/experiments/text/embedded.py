"""The texts that need no download: Python's documentation, and number words of two languages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from factorized.experiments.data.extras import need
from factorized.experiments.text.text_files import Document, Pair

LIMIT = 10_000  # of the numbers
REPEATED = {1: 200, 2: 60, 3: 5, 4: 1}  # how often numbers of so many digits are trained on: there are few short ones


def python_documentation() -> Iterator[Document]:
    """Yield the topics of Python's own ``help()``, which come with it: about 65,000 words."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield (topics[name],)


def number_words(part: str) -> Iterator[Pair]:
    """Return the German and English words for numbers below 10,000: those to train on, or for validation or test.

    Of the numbers of two, three and four digits, one in twenty is held out, half of them for validation and half for
    test; but not those up to twenty and the tens, whose words are not made of others. The order is always the same.
    """
    order = sorted(range(LIMIT), key=lambda number: (number * 7919) % 10_007)  # a fixed shuffle
    made_of_others = [number for number in order if number > 20 and (number > 99 or number % 10)]
    by_digits = [[number for number in made_of_others if len(str(number)) == digits] for digits in REPEATED]
    unseen = {number for numbers in by_digits for number in numbers[19::20]}
    held = [number for number in order if number in unseen]
    numbers = {
        "train": [number for number in order if number not in unseen for _ in range(REPEATED[len(str(number))])],
        "validation": held[::2],
        "test": held[1::2],
    }
    return map(_words, numbers[part])


@cache
def _words(number: int) -> Pair:
    convert = need("num2words", "num2words", "translation/numbers", "text").num2words
    return convert(number, lang="de"), convert(number, lang="en")
