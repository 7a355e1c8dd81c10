from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from factorized.experiments.data.images import Images
from factorized.experiments.data.known import KNOWN, make_images
from factorized.experiments.data.statistics import channel_statistics, in_chunks
from tests.experiments.data.small_sets import TINY, small_images


def test_a_set_tells_its_sizes() -> None:
    images = small_images()
    assert (images.channels, images.size, len(images.classes)) == (3, (6, 6), 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": torch.zeros(12, 3, 6, 6)}, r"x_train must be uint8 .* got float32 \(12, 3, 6, 6\)"),
        ({"x_test": torch.zeros(12, 6, 6, dtype=torch.uint8)}, r"x_test must be uint8 images \(n, channels"),
        ({"x_train": torch.zeros(0, 3, 6, 6, dtype=torch.uint8)}, "x_train must be uint8 images"),
        ({"y_train": torch.zeros(12, dtype=torch.int32)}, "y_train must be int64 labels"),
        ({"y_test": torch.zeros(6, 1, dtype=torch.int64)}, "y_test must be int64 labels"),
        ({"y_train": torch.zeros(11, dtype=torch.int64)}, "x_train holds 12 images and y_train 11 labels"),
        ({"y_train": torch.full((12,), 3)}, r"labels must be in 0..2, .* y_train\[0\] is 3"),
        ({"y_test": torch.tensor([0, 1, -1, 0, 0, 0])}, r"y_test\[2\] is -1"),
        ({"x_test": torch.zeros(6, 3, 7, 6, dtype=torch.uint8)}, r"must agree .* \(3, 6, 6\) and \(3, 7, 6\)"),
        ({"mean": (0.5,)}, "one value for each of 3 channels"),
        ({"std": (0.5, 0.0, 0.5)}, "std above 0"),
    ],
)
def test_a_wrong_set_names_its_file_and_what_was_expected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^some/file.npz: .*{message}"):
        replace(small_images(), source="some/file.npz", **changes)


def test_the_checksum_is_of_pixels_labels_and_shapes_and_not_of_names() -> None:
    images = small_images()
    assert replace(images, name="other", source="elsewhere").checksum == images.checksum
    assert len(images.checksum) == 64
    pixels, labels = images.x_test.clone(), images.y_train.clone()
    pixels[-1, -1, -1, -1] ^= 1
    labels[0] = 1
    reshaped = {"x_train": images.x_train.reshape(12, 3, 4, 9), "x_test": images.x_test.reshape(6, 3, 4, 9)}
    others = [replace(images, **change) for change in ({"x_test": pixels}, {"y_train": labels}, reshaped)]
    assert len({images.checksum, *(other.checksum for other in others)}) == 4


def test_the_checksum_does_not_depend_on_memory_layout() -> None:
    images = small_images()
    last = replace(images, x_train=images.x_train.to(memory_format=torch.channels_last))
    assert last.checksum == images.checksum


def test_a_set_moves_to_a_device() -> None:
    moved = small_images().to(torch.device("cpu"))
    assert isinstance(moved, Images)
    assert moved.checksum == small_images().checksum
    images = small_images()
    images.checksum  # noqa: B018, computed once and taken along
    assert "checksum" in vars(images.to("cpu"))


@pytest.mark.parametrize("channels", [1, 3])
def test_statistics_are_those_of_the_pixels(channels: int) -> None:
    x = small_images(train=50, channels=channels).x_train
    mean, std = channel_statistics(in_chunks(x))
    exact = x.double() / 255
    torch.testing.assert_close(torch.tensor(mean, dtype=torch.float64), exact.mean((0, 2, 3)), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        torch.tensor(std, dtype=torch.float64), exact.std((0, 2, 3), correction=0), rtol=1e-12, atol=0
    )


def test_statistics_do_not_depend_on_the_pieces() -> None:
    x = small_images(train=50).x_train
    assert channel_statistics(x.split(7)) == channel_statistics([x])


def test_a_channel_of_one_colour_can_be_divided_by() -> None:
    mean, std = channel_statistics([torch.full((2, 1, 3, 3), 51, dtype=torch.uint8)])
    assert mean == (0.2,)
    assert std == (1.0,)


def test_no_images_have_no_statistics() -> None:
    with pytest.raises(ValueError, match="need at least one image"):
        channel_statistics([])


def test_the_papers_normalization_is_used_for_its_three_sets() -> None:
    constants = {name: (known.mean, known.std) for name, known in KNOWN.items()}
    assert constants == {
        "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
        "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
        "tiny-imagenet": ((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)),
    }
    sizes = {name: (k.classes, k.size, k.train_per_class, k.test_per_class) for name, k in KNOWN.items()}
    assert sizes == {
        "cifar10": (10, 32, 5000, 1000),
        "cifar100": (100, 32, 500, 100),
        "tiny-imagenet": (200, 64, 500, 50),
    }


def tiny_cifar(**changes: Any) -> Images:
    """Return what TINY describes: 10 classes, 5 training images and 1 test image of each."""
    small = replace(small_images(50, 10, 32, classes=10), **changes)
    train, test = (small.x_train, small.y_train), (small.x_test, small.y_test)
    return make_images("cifar10", train, test, small.classes, "some/cifar10.npz")


def test_a_known_set_is_normalized_as_in_the_paper_and_another_by_its_own_pixels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(KNOWN, "cifar10", TINY)
    images = tiny_cifar()
    assert (images.mean, images.std) == (TINY.mean, TINY.std)
    train, test = (images.x_train, images.y_train), (images.x_test, images.y_test)
    other = make_images("other", train, test, images.classes, "")
    assert (other.mean, other.std) == channel_statistics([images.x_train])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_train": torch.arange(50) // 6}, "cifar10 has 5 train images of each class, got 6 of class 0 .kind 0."),
        ({"y_test": torch.zeros(10, dtype=torch.int64)}, "cifar10 has 1 test images of each class, got 10 of class 0"),
        (
            {"x_train": torch.zeros(40, 3, 32, 32, dtype=torch.uint8), "y_train": torch.arange(40) % 10},
            "cifar10 has 50 train images, got 40",
        ),
        ({"classes": tuple("abcdefghijk")}, "cifar10 has 10 classes of images .* got 11"),
    ],
)
def test_a_known_set_that_is_truncated_or_mislabelled_says_what_was_expected(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KNOWN, "cifar10", TINY)
    with pytest.raises(ValueError, match=f"^some/cifar10.npz: {message}.*rename it if it is not cifar10"):
        tiny_cifar(**changes)
