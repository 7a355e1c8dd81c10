"""Where a recipe's text comes from: files, folders, Hugging Face data sets and embedded texts, read part by part."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from factorized.experiments.data.load import data_folder
from factorized.experiments.data.progress import Progress, silent, watched
from factorized.experiments.recipes.text import Task, TextData
from factorized.experiments.text.embedded import number_words, python_documentation
from factorized.experiments.text.hugging_face import DataSet, documents_of_rows, open_data_set, pairs_of_rows
from factorized.experiments.text.squad import paragraphs_of_rows, read_paragraphs
from factorized.experiments.text.text_files import OPENERS, read_documents, read_pairs, read_two_files

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

HELD_OUT = 20  # without validation data, one in so many training items is held out
MOST_HELD_OUT = 5_000  # and no more of them than this
TWO_FILES = re.compile(r"(.*)\{([^{},]+),([^{},]+)\}(.*)")  # train.{de,en}


@dataclass(frozen=True)
class Layout:
    """How the text of a task is laid out."""

    items: str
    ending: str  # of the files that are taken from a folder
    read_file: Callable[[Path], Iterator[Any]]
    read_rows: Callable[[DataSet], Iterator[Any]]
    strings: Callable[[Any], tuple[str, ...]] = tuple  # everything in an item


DOCUMENTS = Layout("documents", ".txt", read_documents, documents_of_rows)
LAYOUTS: dict[Task, Layout] = {
    "language": DOCUMENTS,
    "masked": DOCUMENTS,
    "translation": Layout("pairs", ".tsv", read_pairs, pairs_of_rows),
    "questions": Layout("paragraphs", ".json", read_paragraphs, paragraphs_of_rows, attrgetter("strings")),
}
EMBEDDED: dict[Task, str] = {"language": "pydoc", "masked": "pydoc", "translation": "numbers"}


@dataclass(frozen=True)
class Place:
    """A file, two files side by side, a data set or an embedded text."""

    read: Callable[[], Iterator[Any]]  # from the beginning
    identity: str = ""  # changes when the text does; empty where only reading the text shows that
    count: int = 0  # of items, beside an identity; 0 if unknown


@dataclass(frozen=True)
class Part:
    """The text that is trained on, or that one set of scores is measured on."""

    places: tuple[Place, ...]
    layout: Layout
    held_out: bool | None = None  # of training data without validation data: only what is held out, or only the rest

    def read(self) -> Iterator[Any]:
        """Yield the items from the beginning: documents, pairs or paragraphs. Nothing more is held in memory."""
        items = chain.from_iterable(place.read() for place in self.places)
        if self.held_out is None:
            yield from items
            return
        count = 0
        for count, item in enumerate(islice(items, HELD_OUT * MOST_HELD_OUT if self.held_out else None), start=1):
            if is_held_out(count) == self.held_out:
                yield item
        if count < HELD_OUT:
            what = self.layout.items.removesuffix("s" if count == 1 else "")
            remedy = "put blank lines between documents, or " if self.layout is DOCUMENTS else ""
            raise ValueError(
                f"data.train has {count} {what}, too few to hold out one in {HELD_OUT}; {remedy}name other text in "
                "data.validation"
            )

    def survey(self, digest: Hash, progress: Progress, stage: str) -> int:
        """Add the text to ``digest``, and return its number of items, 0 where it is not known.

        A data set on the hub is not read for that: its identity stands for its text.
        """
        digest.update("".join(place.identity for place in self.places).encode())
        count = sum(place.count for place in self.places if place.identity)
        local = tuple(place for place in self.places if not place.identity)
        held_out = self.held_out if local == self.places else None
        for item in watched(Part(local, self.layout, held_out).read(), progress, stage):
            digest.update("\t".join(self.layout.strings(item)).encode())
            digest.update(b"\0")
            count += 1
        return count


def survey(parts: Mapping[str, Part], progress: Progress = silent) -> tuple[str, dict[str, int]]:
    """Return the SHA-256 of all parts, the same whatever files they came from, and the number of items in each."""
    digest = hashlib.sha256()
    counts: dict[str, int] = {}
    for name, part in parts.items():
        digest.update(name.encode())
        counts[name] = part.survey(digest, progress, f"reading {name}")
    return digest.hexdigest(), counts


def is_held_out(number: int) -> bool:
    """Return whether a training item, counted from 1, is held out where there is no validation data."""
    return number % HELD_OUT == 0 and number <= HELD_OUT * MOST_HELD_OUT


def find_parts(data: TextData, task: Task, folder: Path | None) -> Mapping[str, Part]:
    """Return the text that a recipe names, by part: train, validation, and each test set by its own name.

    Files and folders are looked for in ``folder``, else in the folder of data sets.
    """
    if not data.train:
        return _embedded_parts(data.name, task)
    where = data_folder() if folder is None else folder
    layout = LAYOUTS[task]

    def find(names: Sequence[str], part: str) -> list[Place]:
        return [place for name in names for place in _find_places(name, part, task, where)]

    train, validation = tuple(find(data.train, "train")), tuple(find(data.validation, "validation"))
    parts = {
        "train": Part(train, layout, held_out=None if validation else False),
        "validation": Part(validation or train, layout, held_out=None if validation else True),
    }
    for name in data.test:
        called = _name(name)
        if called in parts:
            raise ValueError(
                f"data.test: {name!r} would be called {called!r}, which is taken; rename it, as its scores are named "
                "after it"
            )
        parts[called] = Part(tuple(find([name], "test")), layout)
    return parts


def _embedded_parts(name: str, task: Task) -> Mapping[str, Part]:
    if name != EMBEDDED.get(task):
        embedded = f"only {EMBEDDED[task]!r}" if task in EMBEDDED else "nothing"
        raise ValueError(
            f"data.name = {name!r} needs data.train, the names of its files: for task {task!r} {embedded} comes with "
            "this package"
        )
    if task == "translation":
        parts = ("train", "validation", "test")
        return {part: Part((Place(partial(number_words, part)),), LAYOUTS[task]) for part in parts}
    text = (Place(python_documentation),)
    return {part: Part(text, DOCUMENTS, held_out=part == "validation") for part in ("train", "validation")}


def _name(name: str) -> str:
    """Return what a test set is called: wmt14 for hf:wmt14?config=de-en, for wmt14.tsv.gz and for wmt14.{de,en}."""
    return name.removeprefix("hf:").partition("?")[0].rstrip("/").rpartition("/")[2].partition(".")[0]


def _find_places(name: str, part: str, task: Task, folder: Path) -> list[Place]:
    layout = LAYOUTS[task]
    if name.startswith("hf:"):
        data = open_data_set(name, part, folder)
        return [Place(partial(layout.read_rows, data), data.identity, data.count)]
    two = TWO_FILES.fullmatch(name)
    if two is not None and task == "translation":
        begin, source, target, end = two.groups()
        sides = [_find_file(f"{begin}{language}{end}", part, folder) for language in (source, target)]
        return [Place(partial(read_two_files, *sides))]
    if (folder / name).is_dir():
        return [Place(partial(layout.read_file, file)) for file in _files_in(folder / name, layout.ending)]
    return [Place(partial(layout.read_file, _find_file(name, part, folder)))]


def _find_file(name: str, part: str, folder: Path) -> Path:
    tried = [folder / f"{name}{suffix}" for suffix in OPENERS]
    for path in tried:
        if path.is_file():
            return path
    raise ValueError(
        f"data.{part}: there is no {tried[0]} (nor {', '.join(path.name for path in tried[1:])}); name the folder of "
        f"the recipe's text by --data, or other files by --set 'data.{part}=[...]'"
    )


def _files_in(folder: Path, ending: str) -> list[Path]:
    endings = tuple(f"{ending}{suffix}" for suffix in OPENERS)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name.endswith(endings))
    if not files:
        held = ", ".join(sorted(path.name for path in folder.iterdir())[:5])
        raise ValueError(
            f"{folder} holds no {ending} files, compressed or not, it holds {held or 'nothing'}; rename its files, or "
            "name them one by one"
        )
    return files


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
