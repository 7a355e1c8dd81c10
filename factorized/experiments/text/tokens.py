"""Tokenized text in memory-mapped arrays, written once and found again by what it was made from."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from factorized.experiments.data.progress import Progress, silent

AT_ONCE = 1000  # texts tokenized together
HEADER = "packed.json"
Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class PackedTexts:
    """Many token sequences, one after the other: ``tokens[offsets[i]:offsets[i + 1]]`` is text ``i``."""

    tokens: Tokens  # (all tokens,) memory-mapped
    offsets: npt.NDArray[np.int64]  # (texts + 1,)
    words: int  # words of the text, between blanks

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> Tokens:
        return self.tokens[self.offsets[number] : self.offsets[number + 1]]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The number of tokens of every text."""
        return np.diff(self.offsets)


def pack(
    folder: Path,
    key: Any,
    texts: Callable[[], Iterable[str]],
    tokenizer: Any,
    *,
    end: int,
    progress: Progress = silent,
    stage: str = "tokenizing",
) -> PackedTexts:
    """Tokenize ``texts`` into ``folder``, or map what is there if it was made from the same ``key``.

    ``key`` describes texts and tokenizer. The token ``end`` is put after each text.
    """
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    place = folder / name
    if not (place / HEADER).is_file():
        shutil.rmtree(place, ignore_errors=True)
        unfinished = folder / f"{name}.tmp"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        _write(unfinished, texts(), tokenizer, end, progress, stage)
        unfinished.rename(place)
    header = json.loads((place / HEADER).read_text())
    return PackedTexts(
        np.load(place / "tokens.npy", mmap_mode="r"), np.load(place / "offsets.npy", mmap_mode="r"), header["words"]
    )


def _write(folder: Path, texts: Iterable[str], tokenizer: Any, end: int, progress: Progress, stage: str) -> None:
    lengths, words, count = [0], 0, 0
    raw = folder / "tokens.raw"
    with raw.open("wb") as file:
        for some in _in_groups(texts):
            for ids in tokenizer(some, add_special_tokens=False, return_attention_mask=False)["input_ids"]:
                file.write(np.asarray([*ids, end], dtype=np.int32).tobytes())
                lengths.append(len(ids) + 1)
            words += sum(len(text.split()) for text in some)
            count += len(some)
            progress(stage, count, 0)
    total = sum(lengths)
    if total == len(lengths) - 1:  # nothing but ends
        raise ValueError(f"{stage}: the text has not a single token")
    tokens = np.lib.format.open_memmap(folder / "tokens.npy", mode="w+", dtype=np.int32, shape=(total,))
    tokens[:] = np.memmap(raw, dtype=np.int32, mode="r")
    tokens.flush()
    raw.unlink()
    np.save(folder / "offsets.npy", np.cumsum(lengths, dtype=np.int64))
    (folder / HEADER).write_text(json.dumps({"words": words}))


def _in_groups(texts: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(texts)
    while some := list(islice(iterator, AT_ONCE)):
        yield some
