from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from factorized.experiments.data.known import KNOWN
from factorized.experiments.data.npz import load_npz
from tests.experiments.data.small_sets import TINY, pictures, small_images, write_npz


def test_images_come_back_from_an_npz_whichever_side_the_channels_are(tmp_path: Path) -> None:
    images = small_images()
    last = load_npz(write_npz(tmp_path / "last.npz", images))
    first = load_npz(
        write_npz(tmp_path / "first.npz", images, x_train=images.x_train.numpy(), x_test=images.x_test.numpy())
    )
    assert last.checksum == first.checksum == images.checksum
    assert (last.name, last.source) == ("last", str(tmp_path / "last.npz"))
    assert last.classes == ("0", "1", "2")
    assert last.x_train.is_contiguous()


def test_gray_images_need_no_channel_axis(tmp_path: Path) -> None:
    images = small_images(channels=1)
    flat = {f"x_{part}": getattr(images, f"x_{part}")[:, 0].numpy() for part in ("train", "test")}
    assert load_npz(write_npz(tmp_path / "gray.npz", images, **flat)).checksum == images.checksum


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_labels_may_be_any_whole_numbers_and_a_column(tmp_path: Path, dtype: type) -> None:
    images = small_images()
    column = images.y_train.numpy().astype(dtype)[:, None]
    assert load_npz(write_npz(tmp_path / "a.npz", images, y_train=column)).checksum == images.checksum


def test_class_names_may_come_along(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "named.npz", small_images(), classes=np.array(["cat", "dog", "emu", "fox"]))
    assert load_npz(path).classes == ("cat", "dog", "emu", "fox")


def test_statistics_are_computed_and_those_of_the_paper_used_for_its_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KNOWN, "cifar10", TINY)
    images = small_images(50, 10, 32, classes=10)
    assert load_npz(write_npz(tmp_path / "cifar10.npz", images)).mean == TINY.mean
    mine = load_npz(write_npz(tmp_path / "mine.npz", images))
    torch.testing.assert_close(torch.tensor(mine.mean), images.x_train.float().mean((0, 2, 3)) / 255)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_test": None}, "must hold x_train, y_train, x_test, y_test; it has no y_test, it holds x_train"),
        ({"x_train": pictures(12) / 255}, r"x_train must be uint8, got float64 \(12, 6, 6, 3\)"),
        ({"x_train": pictures(12, channels=4)}, r"x_train must be \(n, height, .* with 1 or 3 channels, got"),
        ({"x_train": pictures(12, side=3)}, "which axis is meant is not clear"),
        ({"x_test": pictures(6).reshape(6, -1)}, r"x_test must be .* got \(6, 108\)"),
        ({"y_train": np.zeros(12)}, r"y_train must be whole numbers \(n,\), got float64"),
        ({"y_train": np.zeros((12, 3), int)}, "y_train must be whole numbers"),
        ({"y_train": np.full(12, -1)}, r"labels must be in 0..2.*y_train\[0\] is -1"),
        ({"y_test": np.full(6, 10**12)}, r"labels must be in 0..17, .* than images; y_test\[0\] is 1000000000000"),
        (
            {"y_train": np.full(12, 2**63 + 5, np.uint64)},
            r"0..17, .*y_train\[0\] is 9223372036854775807",
        ),
        ({"y_train": np.zeros(11, int)}, "x_train holds 12 images and y_train 11 labels"),
        ({"classes": np.array(["one"])}, r"labels must be in 0..0"),
        ({"classes": np.array([1, 2, 3])}, "classes must be a list of names"),
        ({"y_test": np.array([{"a": 1}] * 6)}, "y_test cannot be read, expected an array of numbers: Object arrays"),
    ],
)
def test_a_wrong_file_says_which_array_and_what_was_expected(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = write_npz(tmp_path / "wrong.npz", small_images(), **changes)
    with pytest.raises(ValueError, match=message) as caught:
        load_npz(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("keep", [0, 10, 500, -30])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    path = write_npz(tmp_path / "cut.npz", small_images())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=f"{path} is not an .npz file with .*, or truncated"):
        load_npz(path)


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "flipped.npz", small_images())
    content = bytearray(path.read_bytes())
    content[600] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path}: x_train cannot be read"):
        load_npz(path)


def test_a_single_array_is_not_a_data_set(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", pictures(2))
    (tmp_path / "one.npy").rename(tmp_path / "one.npz")
    with pytest.raises(ValueError, match="file with x_train, y_train, x_test, y_test, or truncated"):
        load_npz(tmp_path / "one.npz")


def test_progress_is_reported_for_each_array(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    load_npz(write_npz(tmp_path / "a.npz", small_images()), lambda *call: told.append(call))
    assert told == [("reading", i, 4) for i in range(1, 5)]


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("claimed", [{}, {"file_size": 10**15}])
def test_an_array_that_claims_more_than_the_file_holds_is_refused_before_there_is_room_for_it(
    tmp_path: Path, compression: int, claimed: dict[str, int]
) -> None:
    path = write_npz(tmp_path / "a.npz", small_images())
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    header = io.BytesIO()
    shape = (10**12, 32, 32, 3)
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, header.getvalue() + bytes(100) if name == "x_train.npy" else content)
        for key, value in claimed.items():
            setattr(archive.getinfo("x_train.npy"), key, value)  # what the directory at the end says
    with pytest.raises(ValueError, match=r"x_train is uint8 \(1000000000000, 32, 32, 3\), .*; it is damaged"):
        load_npz(path)
