"""Reading text files, compressed or not, line by line: documents and pairs of sentences."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import IO, cast

OPENERS: dict[str, Callable[..., IO[str]]] = {
    "": open,
    ".xz": cast(Callable[..., IO[str]], lzma.open),
    ".gz": cast(Callable[..., IO[str]], gzip.open),
    ".bz2": cast(Callable[..., IO[str]], bz2.open),
}
LONGEST = 2**18  # characters of a document: no longer text is held in memory at once
Document = tuple[str]
Pair = tuple[str, str]  # source, target


@contextmanager
def open_text(path: Path) -> Iterator[IO[str]]:
    """Open a text file, compressed or not; an error while it is read names the file."""
    try:
        with OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8-sig") as file:
            yield file
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}; convert it to UTF-8") from None
    except (OSError, EOFError, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
        raise ValueError(f"{path} is damaged or truncated: {error}; get it again") from None


def read_documents(path: Path) -> Iterator[Document]:
    """Yield the documents of a file, which blank lines separate; very long ones are cut."""
    lines: list[str] = []
    found, size = False, 0
    for line in _lines(path):
        blank = not line.strip()
        if not blank:
            lines.append(line)
            size += len(line)
        if lines and (blank or size >= LONGEST):
            yield ("".join(lines),)
            lines, size, found = [], 0, True
    if lines:
        yield ("".join(lines),)
    elif not found:
        raise ValueError(f"{path} holds no text; give a file with words, or take it out of the recipe's data")


def read_pairs(path: Path) -> Iterator[Pair]:
    """Yield the pairs of a TSV file: source, tab and target in each line; a third column is ignored."""
    number = 0
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            raise ValueError(
                f"{path}:{number} is empty; expected source, a tab and target in every line: remove that line"
            )
        source, target, *more = (field.strip() for field in [*line.split("\t"), ""])
        if len(more) > 2:
            raise ValueError(
                f"{path}:{number}: expected source, a tab and target, got {len(more) + 1} columns: "
                f"{line.strip()[:60]!r}; keep two, such as tatoeba's sentences without their numbers: cut -f 2,4"
            )
        if not source or not target:
            raise ValueError(
                f"{path}:{number}: expected source, a tab and target, got {line.strip()[:60]!r}; two files whose lines "
                'belong together are named as one, such as "train.{de,en}"'
            )
        yield source, target
    if not number:
        raise ValueError(f"{path} holds no pairs; expected source, a tab and target in every line")


def read_two_files(source: Path, target: Path) -> Iterator[Pair]:
    """Yield the pairs of two files whose lines belong together."""
    counts = [0, 0]
    for lines in zip_longest(_lines(source), _lines(target)):
        counts = [count + (line is not None) for count, line in zip(counts, lines, strict=True)]
        if counts[0] != counts[1]:
            continue  # read on, to report the length of both
        one, other = (line.strip() for line in lines)
        if not one or not other:
            raise ValueError(
                f"{target if one else source}:{counts[0]} is empty; every line needs its translation in the other "
                "file: remove that line from both"
            )
        yield one, other
    if counts[0] != counts[1]:
        raise ValueError(
            f"{source} has {counts[0]:,} lines and {target} {counts[1]:,}; every line needs its translation in the "
            "other file: give two files of as many lines"
        )
    if not counts[0]:
        raise ValueError(f"{source} and {target} hold no pairs; expected a sentence in every line")


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file; one of more than ``LONGEST`` characters comes in pieces."""
    with open_text(path) as file:
        yield from iter(lambda: file.readline(LONGEST), "")
