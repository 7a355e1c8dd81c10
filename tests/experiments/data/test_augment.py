from __future__ import annotations

import pytest
import torch
from torch import Tensor

from factorized.experiments.data.augment import crop_flip, cut_out, draw_crops, draw_holes, normalize
from tests.experiments.data.small_sets import small_images


def one_by_one(x: Tensor, top: Tensor, left: Tensor, flipped: Tensor, pad: int) -> Tensor:
    """Pad, crop and flip as torchvision's RandomCrop and RandomHorizontalFlip would, an image at a time."""
    height, width = x.shape[2:]
    images = []
    for image, row, column, flip in zip(x, top.tolist(), left.tolist(), flipped.tolist(), strict=True):
        bordered = torch.zeros(image.shape[0], height + 2 * pad, width + 2 * pad, dtype=x.dtype)
        bordered[:, pad : pad + height, pad : pad + width] = image
        cut = bordered[:, row : row + height, column : column + width]
        images.append(cut.flip(2) if flip else cut)
    return torch.stack(images)


@pytest.mark.parametrize(("shape", "pad"), [((3, 8, 8), 4), ((1, 5, 9), 1), ((3, 4, 4), 0), ((2, 3, 3), 5)])
def test_each_image_is_cropped_and_flipped_by_its_own_draw(shape: tuple[int, ...], pad: int) -> None:
    torch.manual_seed(0)
    x = torch.randint(1, 256, (40, *shape), dtype=torch.uint8)
    draws = draw_crops(40, pad, "cpu")
    got = crop_flip(x, *draws, pad)
    assert got.dtype == torch.uint8
    assert torch.equal(got, one_by_one(x, *draws, pad))


def test_every_offset_with_and_without_a_flip_is_the_reference() -> None:
    x = torch.randint(1, 256, (50, 3, 6, 6), dtype=torch.uint8)
    places = torch.arange(25)
    top, left = (torch.cat([places // 5] * 2), torch.cat([places % 5] * 2))
    flipped = torch.arange(50) < 25
    assert torch.equal(crop_flip(x, top, left, flipped, 2), one_by_one(x, top, left, flipped, 2))


def test_an_index_chooses_the_images_in_the_same_gather() -> None:
    x = small_images().x_train
    index = torch.tensor([3, 3, 0, 11, 7])
    draws = draw_crops(5, 2, "cpu")
    assert torch.equal(crop_flip(x, *draws, 2, index), crop_flip(x[index], *draws, 2))


def test_offsets_are_uniform_independent_and_half_of_the_images_are_flipped() -> None:
    torch.manual_seed(0)
    count, pad = 81_000, 4
    top, left, flipped = draw_crops(count, pad, "cpu")
    together = torch.bincount(top * 9 + left, minlength=81).double()
    assert (top.min(), top.max(), left.min(), left.max()) == (0, 8, 0, 8)
    chi_square = ((together - 1000) ** 2 / 1000).sum()
    assert chi_square < 80 + 5 * (2 * 80) ** 0.5  # 80 degrees of freedom, five deviations
    assert abs(flipped.double().mean() - 0.5) < 5 * 0.5 / count**0.5
    assert abs(flipped[top == 0].double().mean() - 0.5) < 5 * 0.5 / 9000**0.5


def test_without_flips_no_image_is_mirrored() -> None:
    assert not draw_crops(1000, 0, "cpu", flip=False)[2].any()


def test_a_negative_pad_says_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="pad must be a number of pixels of at least 0, got -1"):
        draw_crops(3, -1, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_normalization_is_that_of_the_paper(dtype: torch.dtype) -> None:
    images = small_images()
    mean, std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
    got = normalize(images.x_train, mean, std, dtype)
    exact = images.x_train.float().div(255)
    expected = torch.stack([(exact[:, c] - mean[c]) / std[c] for c in range(3)], dim=1).to(dtype)
    assert torch.equal(got, expected)
    assert torch.equal(normalize(images.x_train, torch.tensor(mean), torch.tensor(std), dtype), got)


def test_the_border_is_black_before_normalization() -> None:
    x = torch.full((1, 1, 4, 4), 255, dtype=torch.uint8)
    far = torch.tensor([0])
    y = normalize(crop_flip(x, far, far, torch.tensor([False]), 1), (0.5,), (0.25,))
    assert torch.all(y[0, 0, 0] == -2)
    assert torch.all(y[0, 0, 1:, 1:] == 2)


@pytest.mark.parametrize(
    ("size", "side"), [((8, 8), 4), ((5, 9), 3), ((6, 6), 1), ((4, 4), 4), ((3, 7), 9), ((4, 4), 0)]
)
def test_each_image_has_zeros_in_its_own_square_as_far_as_it_is_inside(size: tuple[int, int], side: int) -> None:
    torch.manual_seed(0)
    x = 1 + torch.rand(60, 2, *size)
    row, column = draw_holes(60, size, "cpu")
    expected = x.clone()
    for image, down, right in zip(expected, row.tolist(), column.tolist(), strict=True):
        top, left = down - side // 2, right - side // 2
        image[:, max(0, top) : max(0, top + side), max(0, left) : max(0, left + side)] = 0
    assert torch.equal(cut_out(x, row, column, side), expected)


def test_holes_are_uniform_over_all_pixels() -> None:
    torch.manual_seed(0)
    row, column = draw_holes(60_000, (6, 10), "cpu")
    counts = torch.bincount(row * 10 + column, minlength=60).double()
    assert ((counts - 1000) ** 2 / 1000).sum() < 59 + 5 * (2 * 59) ** 0.5  # 59 degrees of freedom, five deviations


def test_the_whole_of_it_compiles_without_a_break_and_computes_the_same() -> None:
    images = small_images()
    index = torch.tensor([1, 5, 5, 9])
    draws = *draw_crops(4, 4, "cpu"), *draw_holes(4, images.size, "cpu")

    def augment(x: Tensor, index: Tensor, top: Tensor, left: Tensor, flipped: Tensor, *holes: Tensor) -> Tensor:
        return cut_out(normalize(crop_flip(x, top, left, flipped, 4, index), images.mean, images.std), *holes, 3)

    compiled = torch.compile(augment, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(images.x_train, index, *draws), augment(images.x_train, index, *draws))
