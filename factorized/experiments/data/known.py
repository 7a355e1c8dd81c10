"""The paper's three data sets: their sources, expected contents and normalization."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from factorized.experiments.data.images import Images
from factorized.experiments.data.statistics import channel_statistics, in_chunks


@dataclass(frozen=True)
class Known:
    """A data set of the paper."""

    hugging_face: str  # the data set to load if it is not on this machine
    folder: str  # the name of the official folder
    classes: int
    size: int
    train_per_class: int
    test_per_class: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def pixels(self) -> int:
        """The number of pixels of all training images, to which the work of an epoch is proportional."""
        return self.classes * self.train_per_class * self.size**2


KNOWN = {
    "cifar10": Known(
        hugging_face="uoft-cs/cifar10?image=img&label=label",
        folder="cifar-10-batches-py",
        classes=10,
        size=32,
        train_per_class=5000,
        test_per_class=1000,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
    ),
    "cifar100": Known(
        hugging_face="uoft-cs/cifar100?image=img&label=fine_label",
        folder="cifar-100-python",
        classes=100,
        size=32,
        train_per_class=500,
        test_per_class=100,
        mean=(0.5071, 0.4867, 0.4408),
        std=(0.2675, 0.2565, 0.2761),
    ),
    "tiny-imagenet": Known(
        hugging_face="zh-plus/tiny-imagenet?image=image&label=label&test=valid",
        folder="tiny-imagenet-200",
        classes=200,
        size=64,
        train_per_class=500,
        test_per_class=50,
        mean=(0.4802, 0.4481, 0.3975),
        std=(0.2770, 0.2691, 0.2821),
    ),
}


def known_name(name: str) -> str:
    """Return the short name of a known set for the name of its official folder; any other name as it is."""
    return next((short for short, known in KNOWN.items() if name == known.folder), name)


def make_images(
    name: str,
    train: tuple[Tensor, Tensor],  # (n, channels, height, width) uint8, (n,) int64
    test: tuple[Tensor, Tensor],  # (m, channels, height, width) uint8, (m,) int64
    classes: tuple[str, ...],
    source: str,
) -> Images:
    """Return the set under its name: one of the paper's must be complete; for any other, mean and std are computed."""
    name = known_name(name)
    known = KNOWN.get(name)
    neutral = (0.0,) * train[0].shape[1], (1.0,) * train[0].shape[1]
    images = Images(name, *train, *test, classes, *neutral, source)
    if known is None:
        mean, std = channel_statistics(in_chunks(images.x_train))
        return replace(images, mean=mean, std=std)
    _check_whole(images, known)
    return replace(images, mean=known.mean, std=known.std)


def _check_whole(images: Images, known: Known) -> None:
    remedy = f"get it again, or rename it if it is not {images.name}"
    expected, got = (3, known.size, known.size), tuple(images.x_train.shape[1:])
    if got != expected or len(images.classes) != known.classes:
        raise ValueError(
            f"{images.source}: {images.name} has {known.classes} classes of images {expected}, got "
            f"{len(images.classes)} of {got}; {remedy}"
        )
    parts = (("train", images.y_train, known.train_per_class), ("test", images.y_test, known.test_per_class))
    for part, y, each in parts:
        if len(y) != each * known.classes:
            raise ValueError(
                f"{images.source}: {images.name} has {each * known.classes:,} {part} images, got {len(y):,}; {remedy}"
            )
        counts = torch.bincount(y, minlength=known.classes)
        wrong = (counts != each).nonzero().flatten().tolist()
        if wrong:
            raise ValueError(
                f"{images.source}: {images.name} has {each:,} {part} images of each class, got "
                f"{int(counts[wrong[0]]):,} of class {wrong[0]} ({images.classes[wrong[0]]}), so labels are wrong; "
                f"{remedy}"
            )
