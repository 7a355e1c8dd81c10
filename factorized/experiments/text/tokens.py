"""Tokenized text in memory-mapped arrays, written once and found again by what it was made from."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from factorized.experiments.data.progress import Progress, silent

AT_ONCE = 1000  # texts that are tokenized together, at most
CHARACTERS = 2**18  # of texts that are tokenized together, about
HEADER = "packed.json"
Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class PackedTexts:
    """Many token sequences, one after the other: ``tokens[offsets[i]:offsets[i + 1]]`` is text ``i``."""

    tokens: Tokens  # (all tokens,) memory-mapped
    offsets: npt.NDArray[np.int64]  # (texts + 1,) memory-mapped
    words: int  # words of the text, between blanks

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> Tokens:
        return self.tokens[self.offsets[number] : self.offsets[number + 1]]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The number of tokens of every text."""
        return np.diff(self.offsets)


def name_of(key: Any) -> str:
    """Return the name of a file that is found again by ``key``, which describes what it was made from."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def pack(
    folder: Path,
    key: Any,
    items: Callable[[], Iterable[tuple[str, ...]]],
    tokenizer: Any,
    *,
    sides: int = 1,
    end: int,
    progress: Progress = silent,
    stage: str = "tokenizing",
    total: int = 0,
) -> tuple[PackedTexts, ...]:
    """Tokenize ``items`` of ``sides`` texts each into ``folder``, or map what is there if it was made from ``key``.

    Returns the texts of each side: of pairs, sources and targets. ``key`` describes texts and tokenizer. The token
    ``end`` is put after each text. Items are tokenized and written group by group.
    """
    name = name_of(key)
    place = folder / name
    if not (place / HEADER).is_file():
        shutil.rmtree(place, ignore_errors=True)
        unfinished = folder / f"{name}.tmp"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        with ExitStack() as files:
            packers = [files.enter_context(closing(_Packer(unfinished, side, tokenizer, end))) for side in range(sides)]
            count = 0
            for some in _in_groups(items()):
                for packer, texts in zip(packers, zip(*some, strict=True), strict=True):
                    packer.add(texts)
                count += len(some)
                progress(stage, count, total)
        if any(packer.tokens.length == count for packer in packers):  # nothing but ends
            raise ValueError(f"{stage}: the text has no tokens; give text with words")
        (unfinished / HEADER).write_text(json.dumps({"words": [packer.words for packer in packers]}))
        unfinished.rename(place)
    words = json.loads((place / HEADER).read_text())["words"]
    return tuple(
        PackedTexts(_mapped(place, "tokens", side), _mapped(place, "offsets", side), words[side])
        for side in range(sides)
    )


def _mapped(folder: Path, what: str, side: int) -> npt.NDArray[Any]:
    mapped: npt.NDArray[Any] = np.load(folder / f"{what}-{side}.npy", mmap_mode="r")
    return np.asarray(mapped)  # the same memory; cutting a piece out of a memmap takes ten times as long


class _Packer:
    """Writes the tokens of one side."""

    def __init__(self, folder: Path, side: int, tokenizer: Any, end: int) -> None:
        self.tokenizer, self.end, self.words = tokenizer, end, 0
        self.tokens = _GrowingArray(folder / f"tokens-{side}.npy", np.dtype(np.int32))
        self.offsets = _GrowingArray(folder / f"offsets-{side}.npy", np.dtype(np.int64))
        self.offsets.extend(np.zeros(1))

    def add(self, texts: Sequence[str]) -> None:
        """Tokenize and write some texts."""
        found = self.tokenizer(
            list(texts), add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False
        )["input_ids"]
        begin = self.tokens.length
        self.offsets.extend(begin + np.cumsum([len(ids) + 1 for ids in found], dtype=np.int64))
        for ids in found:
            self.tokens.extend(np.asarray([*ids, self.end]))
        self.words += sum(len(text.split()) for text in texts)

    def close(self) -> None:
        """Close both files."""
        self.tokens.close()
        self.offsets.close()


class _GrowingArray:
    """A one-dimensional .npy file that is written piece by piece; its length is put into its header at the end."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.file, self.dtype, self.length = path.open("wb"), dtype, 0
        self._write_header()

    def extend(self, values: npt.NDArray[Any]) -> None:
        """Add values at the end."""
        self.file.write(values.astype(self.dtype).tobytes())
        self.length += len(values)

    def close(self) -> None:
        """Write the length and close the file."""
        self.file.seek(0)
        self._write_header()  # as long as before: numpy leaves room for the digits of a growing first dimension
        self.file.close()

    def _write_header(self) -> None:
        shape = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self.file, shape)


def _in_groups(items: Iterable[tuple[str, ...]]) -> Iterator[list[tuple[str, ...]]]:
    """Yield items in groups whose texts are short enough to be tokenized together."""
    some: list[tuple[str, ...]] = []
    size = 0
    for item in items:
        some.append(item)
        size += sum(map(len, item))
        if len(some) >= AT_ONCE or size >= CHARACTERS:
            yield some
            some, size = [], 0
    if some:
        yield some
