"""Reading text: embedded sets, plain files, TSV pairs, compressed or not, and Hugging Face data sets."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar, cast

from factorized.experiments.data.extras import need
from factorized.experiments.data.load import data_folder

OPENERS: dict[str, Callable[..., IO[str]]] = {
    "": open,
    ".xz": cast(Callable[..., IO[str]], lzma.open),
    ".gz": cast(Callable[..., IO[str]], gzip.open),
    ".bz2": cast(Callable[..., IO[str]], bz2.open),
}
HELD_OUT = 20  # of so many documents one is for validation, where no validation text is named
Pair = tuple[str, str]  # source, target
Item = TypeVar("Item")


@dataclass(frozen=True)
class Source:
    """The files of a recipe's text, found; or the embedded set of that name."""

    name: str
    train: tuple[Path, ...] = ()
    validation: tuple[Path, ...] = ()
    test: tuple[Path, ...] = ()

    @property
    def embedded(self) -> bool:
        """Whether the text comes with Python, and no file is read."""
        return not self.train


def find_source(
    name: str, train: Sequence[str], validation: Sequence[str], test: Sequence[str], folder: Path | None
) -> Source:
    """Return the files that a recipe names, looked for in ``folder``, else in the folder of data sets."""
    where = data_folder() if folder is None else folder
    parts = [tuple(_find(file, where) for file in files) for files in (train, validation, test)]
    return Source(name, *parts)


def _find(file: str, folder: Path) -> Path:
    tried = [folder / file, *(folder / f"{file}{suffix}" for suffix in OPENERS if suffix)]
    for path in tried:
        if path.is_file():
            return path
    raise ValueError(
        f"there is no {folder / file} (nor {', '.join(p.name for p in tried[1:])}); name the folder of the recipe's "
        "text by --data"
    )


def find_vocabulary(file: str, folder: Path | None) -> Path:
    """Return a file of word pieces: its path, or its name in the folder of the text."""
    tried = [Path(file).expanduser(), (data_folder() if folder is None else folder) / file]
    for path in tried:
        if path.is_file():
            return path
    raise ValueError(
        f"data.vocabulary: there is no {' nor '.join(map(str, tried))}; expected a file with one word piece a line, or "
        "a number of tokens to learn"
    )


def open_text(path: Path) -> IO[str]:
    """Open a text file, compressed or not."""
    return OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8")


def read_documents(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the documents of text files: what stands between blank lines."""
    for path in paths:
        found = False
        with open_text(path) as file:
            lines: list[str] = []
            for line in _decoded(file, path):
                if line.strip():
                    lines.append(line)
                elif lines:
                    found = True
                    yield "".join(lines)
                    lines = []
            if lines:
                found = True
                yield "".join(lines)
        if not found:
            raise ValueError(f"{path} holds no text")


def read_pairs(paths: Sequence[Path]) -> Iterator[Pair]:
    """Yield source and target of TSV files, a pair a line."""
    for path in paths:
        count = 0
        with open_text(path) as file:
            for number, line in enumerate(_decoded(file, path), start=1):
                if not line.strip():
                    raise ValueError(f"{path}:{number} is empty; expected source, a tab and target in every line")
                fields = line.rstrip("\n").split("\t")
                if len(fields) < 2 or not fields[0].strip() or not fields[1].strip():
                    raise ValueError(f"{path}:{number}: expected source, a tab and target, got {line.strip()[:60]!r}")
                count += 1
                yield fields[0].strip(), fields[1].strip()
        if not count:
            raise ValueError(f"{path} holds no pairs")


def read_two_files(source: Path, target: Path) -> Iterator[Pair]:
    """Yield the pairs of two files whose lines belong together."""
    with open_text(source) as file:
        left = list(_decoded(file, source))
    with open_text(target) as file:
        right = list(_decoded(file, target))
    if len(left) != len(right):
        raise ValueError(
            f"{source} has {len(left):,} lines and {target} {len(right):,}; every line needs its translation in the "
            "other file"
        )
    for number, (one, other) in enumerate(zip(left, right, strict=True), start=1):
        if not one.strip() or not other.strip():
            raise ValueError(f"{source if not one.strip() else target}:{number} is empty; remove that line from both")
        yield one.strip(), other.strip()


def _decoded(file: IO[str], path: Path) -> Iterator[str]:
    try:
        yield from file
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise ValueError(f"{path} is damaged or truncated: {error}") from None


def hold_out(items: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """Return training and validation items: every twentieth is held out."""
    kept = [item for number, item in enumerate(items) if number % HELD_OUT != HELD_OUT - 1]
    return kept, list(items[HELD_OUT - 1 :: HELD_OUT])


def python_documentation() -> list[str]:
    """Return the topics of Python's own ``help()``, which come with it: about 65,000 words."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def number_words(limit: int = 10_000) -> list[Pair]:
    """Return German and English words for the numbers below ``limit``, shuffled in one fixed way."""
    convert = need("num2words", "num2words", "translation/numbers", "text").num2words
    order = sorted(range(limit), key=lambda number: (number * 7919) % 10_007)  # a fixed shuffle
    return [(convert(number, lang="de"), convert(number, lang="en")) for number in order]
