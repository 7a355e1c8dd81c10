from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from factorized.experiments.data import load as load_module
from factorized.experiments.data.known import KNOWN
from factorized.experiments.data.load import load_images
from factorized.experiments.data.prepare import prepare
from tests.experiments.data.small_sets import (
    TINY,
    small_images,
    write_cifar10,
    write_folder,
    write_npz,
    write_tiny_imagenet,
)

# of the pixels and labels as they are with scikit-learn 1.9: a change here is a change of everybody's results
DIGITS = "02f2aea1cf69c5f4aab79e7e9044f90dbb84a8f19eb69eadf614b8e97fad2faf"


def test_the_digits_are_embedded_and_split_by_class() -> None:
    digits = load_images("digits")
    assert digits.x_train.shape == (1442, 1, 8, 8)
    assert digits.x_test.shape == (355, 1, 8, 8)
    assert (int(digits.x_train.min()), int(digits.x_train.max())) == (0, 255)
    for y in (digits.y_train, digits.y_test):
        counts = torch.bincount(y, minlength=10)
        assert counts.min() > 0.9 * counts.max()
    assert digits.checksum == DIGITS
    assert digits.classes == tuple("0123456789")


def test_the_digits_keep_their_seventeen_levels_apart() -> None:
    levels = load_images("digits").x_train.unique()
    assert levels.tolist() == [round(level * 255 / 16) for level in range(17)]


def test_no_image_of_the_digits_is_in_both_parts_or_lost() -> None:
    from sklearn.datasets import load_digits

    digits = load_images("digits")
    both = torch.cat([digits.x_train, digits.x_test]).flatten(1).double()
    original = torch.from_numpy(load_digits().data) * (255 / 16)
    assert len(both) == len(original) == 1797
    assert torch.equal(both.sum(0), original.round().sum(0))


def test_the_digits_are_read_without_importing_scikit_learn() -> None:
    code = (
        "import sys; from factorized.experiments.data.load import load_images\n"
        "load_images('digits'); print({'sklearn', 'scipy', 'pandas'} & sys.modules.keys())\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == "set()"


def test_every_local_form_of_one_set_has_one_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KNOWN, "cifar10", TINY)
    images = small_images(50, 10, 32, classes=10)
    forms = [
        write_npz(tmp_path / "a.npz", images),
        write_cifar10(tmp_path / "cifar", images),
        prepare(str(tmp_path / "a.npz"), tmp_path / "data"),
    ]
    assert {load_images(str(form)).checksum for form in forms} == {images.checksum}


def test_image_folders_are_recognized(tmp_path: Path) -> None:
    images = small_images()
    assert load_images(str(write_folder(tmp_path / "plain", images))).name == "plain"
    assert torch.equal(load_images(str(write_tiny_imagenet(tmp_path / "tiny", images))).y_test, images.y_test)


@pytest.mark.parametrize("form", ["prepared", "npz", "official folder"])
def test_a_known_set_is_taken_from_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setitem(KNOWN, "cifar10", TINY)
    images = small_images(50, 10, 32, classes=10)
    folder = tmp_path / "data"
    folder.mkdir()
    if form == "official folder":
        write_cifar10(folder / "cifar-10-batches-py", images)
    else:
        write_npz(folder / "cifar10.npz", images)
    if form == "prepared":
        prepare("cifar10", folder)
        (folder / "cifar10.npz").unlink()
    monkeypatch.setenv("FACTORIZED_DATA", str(folder))
    read = load_images("cifar10")
    assert (read.name, read.mean, read.checksum) == ("cifar10", TINY.mean, images.checksum)


def test_a_known_set_that_is_nowhere_comes_from_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(load_module, "load_hugging_face", lambda *call: asked.append(call[:2]))
    for name in KNOWN:
        load_images(name, tmp_path)
    load_images("hf:me/mine", tmp_path)
    assert asked == [
        ("cifar10", "uoft-cs/cifar10?image=img&label=label"),
        ("cifar100", "uoft-cs/cifar100?image=img&label=fine_label"),
        ("tiny-imagenet", "zh-plus/tiny-imagenet?image=image&label=label&test=valid"),
        ("hf:me/mine", "me/mine"),
    ]


def test_a_prepared_hugging_face_set_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = small_images()
    monkeypatch.setattr(load_module, "load_hugging_face", lambda *call: images)
    path = prepare("hf:me/mine?label=kind", tmp_path)
    monkeypatch.delattr(load_module, "load_hugging_face")
    assert path.name == "me--mine-label-kind.safetensors"
    assert load_images("hf:me/mine?label=kind", tmp_path).checksum == images.checksum
    assert load_images("me--mine-label-kind", tmp_path).checksum == images.checksum


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cifar-10", r"data set 'cifar-10' \(did you mean 'cifar10'\?\) is neither"),
        ("flower", r"did you mean 'flowers'\?.*one of digits, cifar10, cifar100, tiny-imagenet, flowers"),
        ("no/such/path.npz", "'no/such/path.npz' is neither a file or folder nor one of digits"),
    ],
)
def test_an_unknown_name_says_what_there_is(tmp_path: Path, name: str, message: str) -> None:
    prepare(str(write_npz(tmp_path / "flowers.npz", small_images())), tmp_path / "data")
    with pytest.raises(ValueError, match=message):
        load_images(name, tmp_path / "data")


def test_a_file_or_folder_of_another_kind_says_what_was_expected(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(
        ValueError, match=r"notes.txt is not a data set: expected an .npz file, a prepared .safetensors"
    ):
        load_images(str(tmp_path / "notes.txt"))
    with pytest.raises(ValueError, match=r"is not a data set: .* train/CLASS/ and test/CLASS/; it holds notes.txt"):
        load_images(str(tmp_path))


@pytest.mark.parametrize(("module", "package"), [("sklearn", "scikit-learn"), ("PIL", "pillow")])
def test_a_missing_package_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, package: str
) -> None:
    write_folder(tmp_path, small_images())
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=rf"needs {package}, .*pip install '\.\[vision\]'"):
        load_images("digits" if module == "sklearn" else str(tmp_path))
