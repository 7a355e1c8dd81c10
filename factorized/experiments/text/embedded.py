"""The texts that need no download: Python's documentation, and number words of two languages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from factorized.experiments.data.extras import need
from factorized.experiments.text.text_files import Document, Pair

PIECE = 100  # words of a piece of documentation, at least
LIMIT = 10_000  # of the numbers
REPEATED = {1: 200, 2: 60, 3: 5, 4: 1}  # how often numbers of this many digits are trained on: there are few short ones


def python_documentation() -> Iterator[Document]:
    """Yield the text of Python's own ``help()``, which comes with it, in pieces of a topic: about 52,000 words.

    Topics repeat each other's paragraphs. Each is yielded once, so that no held-out piece is trained on elsewhere.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    for name in sorted(topics):
        piece: list[str] = []
        for paragraph in re.split(r"\n\s*?\n", topics[name]):
            words = " ".join(paragraph.split())
            if words and words not in seen:
                seen.add(words)
                piece.append(paragraph)
            if sum(len(each.split()) for each in piece) >= PIECE:
                yield ("\n\n".join(piece),)
                piece = []
        if piece:
            yield ("\n\n".join(piece),)


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
