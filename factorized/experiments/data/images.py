"""``Images``: a labelled set of images as four tensors, checked when it is made."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

CHUNK = 1 << 24  # bytes hashed at a time


@dataclass(frozen=True, eq=False)
class Images:
    """A training and a test set of images of one size, as bytes, with the mean and deviation that normalize them."""

    name: str
    x_train: Tensor  # (n, channels, height, width) uint8
    y_train: Tensor  # (n,) int64
    x_test: Tensor  # (m, channels, height, width) uint8
    y_test: Tensor  # (m,) int64
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # per channel, of pixels in 0..1
    std: tuple[float, ...]
    source: str = ""  # the file or folder they came from, for messages

    def __post_init__(self) -> None:
        for part, x, y in (("train", self.x_train, self.y_train), ("test", self.x_test, self.y_test)):
            _check_part(self.source or self.name, part, x, y, self.classes)
        where = self.source or self.name
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            raise ValueError(
                f"{where}: images of train and test must agree in channels, height and width, got "
                f"{tuple(self.x_train.shape[1:])} and {tuple(self.x_test.shape[1:])}"
            )
        if not len(self.mean) == len(self.std) == self.channels or min(self.std) <= 0:
            raise ValueError(
                f"{where}: mean and std must have one value for each of {self.channels} channels, std above 0, got "
                f"{self.mean} and {self.std}"
            )

    @property
    def channels(self) -> int:
        """The number of colour channels."""
        return self.x_train.shape[1]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.x_train.shape[2], self.x_train.shape[3]

    @cached_property
    def checksum(self) -> str:
        """SHA-256 of pixels and labels: independent of the file or folder they came from."""
        digest = hashlib.sha256()
        for tensor in (self.x_train, self.y_train, self.x_test, self.y_test):
            digest.update(f"{tuple(tensor.shape)} {tensor.dtype}\n".encode())
            for chunk in byte_chunks(tensor):
                digest.update(chunk)
        return digest.hexdigest()

    def to(self, device: torch.device | str) -> Images:
        """Return the same set with its tensors on ``device``, images with channels last as training reads them."""
        last = torch.channels_last
        moved = replace(
            self,
            x_train=self.x_train.to(device, memory_format=last),
            y_train=self.y_train.to(device),
            x_test=self.x_test.to(device, memory_format=last),
            y_test=self.y_test.to(device),
        )
        if "checksum" in vars(self):  # computed already: spare reading it all back
            vars(moved)["checksum"] = self.checksum
        return moved


def numbered_classes(
    where: str,
    y_train: Tensor,  # (n,)
    y_test: Tensor,  # (m,)
) -> tuple[str, ...]:
    """Return the class names "0", "1", … up to the greatest label; raise if there are more classes than images."""
    most = len(y_train) + len(y_test)
    for part, y in (("train", y_train), ("test", y_test)):
        if len(y) and int(y.max()) >= most:
            first = int(y.argmax())
            raise ValueError(
                f"{where}: labels must be in 0..{most - 1}, or there were more classes than images; y_{part}[{first}] "
                f"is {int(y[first])}"
            )
    return tuple(str(label) for label in range(max(int(y.max()) if len(y) else 0 for y in (y_train, y_test)) + 1))


def byte_chunks(tensor: Tensor) -> list[memoryview]:
    """Return the bytes of a tensor in order, a piece at a time, without copying those of a contiguous CPU tensor."""
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]


def _check_part(where: str, part: str, x: Tensor, y: Tensor, classes: tuple[str, ...]) -> None:
    if x.dtype != torch.uint8 or x.dim() != 4 or 0 in x.shape:
        raise ValueError(
            f"{where}: x_{part} must be uint8 images (n, channels, height, width), got {_describe(x)}; pixels in 0..1 "
            "become bytes by (x * 255).round()"
        )
    if y.dtype != torch.int64 or y.dim() != 1:
        raise ValueError(f"{where}: y_{part} must be int64 labels (n,), got {_describe(y)}")
    if len(x) != len(y):
        raise ValueError(f"{where}: x_{part} holds {len(x):,} images and y_{part} {len(y):,} labels; one is truncated")
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= len(classes):
        wrong = low if low < 0 else high
        first = int((y == wrong).nonzero()[0])
        raise ValueError(
            f"{where}: labels must be in 0..{len(classes) - 1}, one for each of {len(classes)} classes; "
            f"y_{part}[{first}] is {wrong}"
        )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
