from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from factorized.experiments.data.image_folder import list_image_folder, load_image_folder
from factorized.experiments.data.images import Images
from factorized.experiments.data.progress import silent
from tests.experiments.data.small_sets import pictures, save, small_images, write_folder, write_tiny_imagenet


def in_class_order(images: Images) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pixels and labels of the training part, a class after the other."""
    order = torch.argsort(images.y_train, stable=True)
    return images.x_train[order], images.y_train[order]


@pytest.mark.parametrize("test", ["test", "val", "valid", "validation"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_folder_of_classes_is_read_class_by_class(tmp_path: Path, test: str, channels: int) -> None:
    images = small_images(channels=channels)
    read = load_image_folder(write_folder(tmp_path / "flowers", images, test), silent)
    x, y = in_class_order(images)
    assert torch.equal(read.x_train, x)
    assert torch.equal(read.y_train, y)
    assert (read.name, read.classes, len(read.x_test)) == ("flowers", images.classes, 6)


def test_tiny_imagenets_layout_is_read_with_the_labels_of_its_annotations(tmp_path: Path) -> None:
    images = small_images()
    read = load_image_folder(write_tiny_imagenet(tmp_path / "tiny", images), silent)
    assert torch.equal(read.x_train, in_class_order(images)[0])
    assert torch.equal(read.x_test, images.x_test)
    assert torch.equal(read.y_test, images.y_test)


def test_test_images_without_labels_are_passed_over_for_labelled_ones(tmp_path: Path) -> None:
    images = small_images()
    folder = write_folder(tmp_path / "sorted", images, "val")
    save(folder / "test" / "images" / "test_0.JPEG", pictures(1)[0], "PNG")
    assert len(load_image_folder(folder, silent).x_test) == 6


def test_gray_images_among_colour_ones_get_three_channels(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "mixed", small_images(channels=1))
    colour = pictures(1)[0]
    save(folder / "train" / "kind 1" / "0001.png", colour)
    read = load_image_folder(folder, silent)
    assert read.x_train.shape[1] == read.x_test.shape[1] == 3
    assert torch.equal(read.x_train[0, 0], read.x_train[0, 2])
    assert torch.equal(read.x_train[4], torch.from_numpy(colour).permute(2, 0, 1))


@pytest.mark.parametrize("mode", ["RGBA", "P", "CMYK", "1", "LA"])
def test_other_kinds_of_image_are_converted(tmp_path: Path, mode: str) -> None:
    folder = write_folder(tmp_path / "modes", small_images())
    path = folder / "train" / "kind 0" / "0000.png"
    picture = Image.fromarray(pictures(1)[0]).convert(mode)
    path.unlink()
    picture.save(path.with_suffix(".tif"))
    expected = np.asarray(picture.convert("RGB"))
    assert torch.equal(load_image_folder(folder, silent).x_train[0], torch.from_numpy(expected.copy()).permute(2, 0, 1))


def test_images_of_more_than_eight_bits_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "deep", small_images())
    path = folder / "train" / "kind 0" / "0000.png"
    Image.fromarray(np.full((6, 6), 40_000, np.uint16)).save(path)
    with pytest.raises(ValueError, match=f"{path} has mode I.*more than 8 bits"):
        load_image_folder(folder, silent)


def test_progress_counts_the_images(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    load_image_folder(write_folder(tmp_path, small_images()), lambda *call: told.append(call))
    assert told == [("training images", 12, 12), ("test images", 6, 6)]


def test_an_image_of_another_size_is_named_with_the_one_it_differs_from(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, small_images())
    odd = folder / "train" / "kind 2" / "0002.png"
    save(odd, pictures(1, side=7)[0])
    with pytest.raises(ValueError, match=rf"{odd} is 7×7, but \S*kind 0\S* is 6×6; .*Resize them first"):
        load_image_folder(folder, silent)


Change = Callable[[Path], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "train").rename(f / "training"), "train is missing; expected folders train/CLASS/"),
        (lambda f: (f / "test").rename(f / "tests"), "must hold test images in one of test/CLASS/, val/CLASS/"),
        (lambda f: (f / "test" / "kind 1").rename(f / "test" / "kind 7"), "kind 7: there is no class 'kind 7'"),
        (lambda f: [p.unlink() for p in (f / "train" / "kind 1").iterdir()], "kind 1 holds no images; expected files"),
        (
            lambda f: (f / "train" / "kind 0" / "0000.png").write_bytes(b"no image"),
            "0000.png is damaged or not an image",
        ),
        (lambda f: [p.unlink() for p in f.glob("test/*/*")], "test holds no images"),
        (
            lambda f: (f / "test" / "kind 0").rename(f / "lost"),
            "test/kind 0 is missing: expected a folder for",
        ),
    ],
)
def test_a_folder_that_is_not_whole_says_which_file_and_what_was_expected(
    tmp_path: Path, change: Change, message: str
) -> None:
    folder = write_folder(tmp_path / "set", small_images())
    change(folder)
    with pytest.raises(ValueError, match=message) as caught:
        load_image_folder(folder, silent)
    assert str(folder) in str(caught.value)


def test_a_truncated_image_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, small_images(side=40))
    path = folder / "test" / "kind 0" / "0000.png"
    path.write_bytes(path.read_bytes()[:1500])
    with pytest.raises(ValueError, match=f"{path} is damaged or truncated"):
        load_image_folder(folder, silent)


def test_a_training_folder_without_classes_says_so(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with pytest.raises(ValueError, match="must hold one folder for each class, it holds none"):
        list_image_folder(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "val/images/val_3.JPEG").unlink(), r"annotations.txt:4 names \S*val_3.JPEG, which is missing"),
        (lambda f: save(f / "val/images/val_9.JPEG", pictures(1)[0], "PNG"), "val_9.JPEG is not in .*a line for each"),
        (lambda f: (f / "val/val_annotations.txt").write_text("val_0.JPEG"), r"annotations.txt:1 must be a file and"),
        (lambda f: (f / "val/val_annotations.txt").write_text("val_0.JPEG\tn7\t0"), r"txt:1: there is no class 'n7'"),
        (lambda f: (f / "val/val_annotations.txt").write_text("../x.JPEG\tkind0\t0"), r"txt:1 names .* is missing"),
        (lambda f: (f / "wnids.txt").write_text("kind0\nkind1\nkind2\nkind3"), "train/kind3 is missing, though"),
        (lambda f: (f / "wnids.txt").write_text("kind0\nkind1"), "train/kind2 is there, but not in the list"),
    ],
)
def test_a_damaged_tiny_imagenet_says_which_file_and_what_was_expected(
    tmp_path: Path, change: Change, message: str
) -> None:
    images = small_images()
    names = Images(**{**vars(images), "classes": ("kind0", "kind1", "kind2")})
    folder = write_tiny_imagenet(tmp_path / "tiny", names)
    change(folder)
    with pytest.raises(ValueError, match=message):
        load_image_folder(folder, silent)


def test_an_image_that_would_fill_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path, small_images())
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(ValueError, match=r"0000.png is damaged or not an image: .*decompression bomb"):
        load_image_folder(folder, silent)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_is_read_the_way_up_its_camera_noted(tmp_path: Path, orientation: int) -> None:
    folder = write_folder(tmp_path / "photos", small_images())
    path = folder / "train" / "kind 0" / "0000.png"
    upright = Image.fromarray(pictures(1)[0])
    ways = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the transposition that undoes what the camera did
    noted = Image.Exif()
    noted[0x112] = orientation
    lying = upright.transpose(Image.Transpose(ways[orientation])) if orientation > 1 else upright
    lying.save(path, exif=noted)
    expected = torch.from_numpy(np.array(upright)).permute(2, 0, 1)
    assert torch.equal(load_image_folder(folder, silent).x_train[0], expected)


def test_a_palette_with_transparency_is_read_without_a_word(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "drawings", small_images())
    picture = Image.fromarray(pictures(1)[0]).convert("P")
    picture.save(folder / "train" / "kind 0" / "0000.png", transparency=bytes([0, 128, 255]))
    expected = torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1)
    assert torch.equal(load_image_folder(folder, silent).x_train[0], expected)
