"""Images that stay where they are until a batch of them is asked for: in memory, in a mapped file, in image files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from factorized.vision.data.decode import stack_pixels
from factorized.vision.data.image_folder import Files, list_image_folder, read_pixels
from factorized.vision.data.prepared import SUFFIX, describe_prepared, read_prepared
from factorized.vision.data.progress import silent
from factorized.vision.data.statistics import channel_statistics

Part = Literal["train", "test"]
Batch = tuple[Tensor, Tensor]  # (n, channels, height, width) uint8, (n,) int64
CHUNK = 256  # images read at a time for statistics


class ImageSource(Protocol):
    """Labelled images by their numbers."""

    def __len__(self) -> int:
        """Return how many images there are."""

    def __getitem__(self, index: Sequence[int]) -> Batch:
        """Return these images and their labels."""


class TensorSource:
    """Images in memory."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        if len(x) != len(y):
            raise ValueError(f"x and y must be of one length, got {len(x):,} images and {len(y):,} labels")
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Sequence[int]) -> Batch:
        which = torch.as_tensor(index)
        return self.x[which], self.y[which]


class MappedSource:
    """Images of a prepared file, of which only what is asked for is read.

    Each process maps the file itself: worker processes get its path, not its content.
    """

    def __init__(self, path: Path, part: Part) -> None:
        described = describe_prepared(path)
        if described.problem:
            raise ValueError(described.problem)
        self.path, self.part = path, part
        self._count = described.train if part == "train" else described.test
        self._mapped: TensorSource | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Sequence[int]) -> Batch:
        if self._mapped is None:
            images = read_prepared(self.path, verify=False)
            train = self.part == "train"
            x, y = (images.x_train, images.y_train) if train else (images.x_test, images.y_test)
            self._mapped = TensorSource(x, y)
        return self._mapped[index]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_mapped": None}


class FileSource:
    """Image files, decoded when asked for."""

    def __init__(self, files: Files, channels: Literal[1, 3] = 3) -> None:
        self.files, self.channels = files, channels
        self.size = read_pixels(files.paths[0]).shape[:2]

    def __len__(self) -> int:
        return len(self.files.paths)

    def __getitem__(self, index: Sequence[int]) -> Batch:
        paths = [self.files.paths[i] for i in index]
        x = stack_pixels(((str(path), read_pixels(path)) for path in paths), len(paths), "reading", silent)
        if tuple(x.shape[2:]) != self.size:
            (height, width), first = self.size, self.files.paths[0]
            raise ValueError(
                f"{paths[0]} is {x.shape[2]}×{x.shape[3]}, but {first} is {height}×{width}; all images of a set must "
                "have one size. Resize them first"
            )
        if x.shape[1] > self.channels:
            raise ValueError(f"among {paths[0]} and those after it is an image in colour, with channels=1")
        return x.expand(-1, self.channels, -1, -1), torch.tensor([self.files.labels[i] for i in index])


def open_source(path: Path, part: Part, channels: Literal[1, 3] = 3) -> ImageSource:
    """Return the training or test images of a prepared file or of an image folder."""
    if part not in ("train", "test"):
        raise ValueError(f'part must be "train" or "test", got {part!r}')
    if path.suffix == SUFFIX:
        return MappedSource(path, part)
    train, test, _ = list_image_folder(path)
    return FileSource(train if part == "train" else test, channels)


def source_statistics(source: ImageSource) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel of a source, read once, a few images at a time."""

    def chunks() -> Iterator[Tensor]:
        for start in range(0, len(source), CHUNK):
            yield source[range(start, min(start + CHUNK, len(source)))][0]

    return channel_statistics(chunks())
