from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from factorized.experiments.data import prepared as prepared_module
from factorized.experiments.data.images import Images
from factorized.experiments.data.known import KNOWN
from factorized.experiments.data.load import data_folder, load_images
from factorized.experiments.data.prepare import list_prepared, prepare
from factorized.experiments.data.prepared import read_prepared, write_prepared
from tests.experiments.data.small_sets import TINY, small_images, write_cifar10, write_folder, write_npz


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_npz(tmp_path / "flowers.npz", small_images())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


def test_a_prepared_set_is_found_by_its_name_and_is_the_same(source: Path, folder: Path) -> None:
    path = prepare(str(source), folder)
    assert path == folder / "flowers.safetensors"
    read, original = load_images("flowers", folder), load_images(str(source))
    assert read.checksum == original.checksum
    assert (read.name, read.classes, read.mean, read.std) == ("flowers", original.classes, original.mean, original.std)
    assert read.source == str(source)


def test_the_file_is_plain_safetensors(source: Path, folder: Path) -> None:
    path = prepare(str(source), folder)
    tensors, images = load_file(path), small_images()
    assert {key: value.dtype for key, value in tensors.items()} == {
        "x_train": torch.uint8,
        "y_train": torch.int64,
        "x_test": torch.uint8,
        "y_test": torch.int64,
    }
    assert torch.equal(tensors["x_test"], images.x_test)
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["info"])["checksum"] == images.checksum


def test_a_prepared_set_is_mapped_and_not_copied_into_memory(folder: Path) -> None:
    path = prepare("digits", folder)
    images = read_prepared(path)
    address = images.x_train.data_ptr()
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    ranges = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in maps]
    assert any(start <= address < end for start, end in ranges)


def test_writing_to_a_mapped_set_does_not_change_the_file(source: Path, folder: Path) -> None:
    path = prepare(str(source), folder)
    read_prepared(path).x_train.zero_()
    assert read_prepared(path).checksum == small_images().checksum


def test_progress_is_reported_while_reading_and_writing(tmp_path: Path, folder: Path) -> None:
    told: list[tuple[str, int, int]] = []
    prepare(str(write_folder(tmp_path / "set", small_images())), folder, lambda *call: told.append(call))
    assert [call[0] for call in told] == ["training images", "test images", *["writing"] * 4]
    assert told[-1][1] == told[-1][2] == 18 * 108 + 18 * 8
    assert all(done <= total for _, done, total in told)


def test_what_is_there_is_kept(source: Path, folder: Path) -> None:
    path = prepare(str(source), folder)
    before = path.stat().st_mtime_ns
    assert prepare(str(source), folder) == path
    assert path.stat().st_mtime_ns == before


def test_a_newer_source_is_converted_again_and_so_is_any_when_asked(source: Path, folder: Path) -> None:
    path = prepare(str(source), folder)
    write_npz(source, small_images(train=15))
    os.utime(source, (path.stat().st_mtime + 5,) * 2)
    assert len(read_prepared(prepare(str(source), folder)).x_train) == 15
    before = path.stat().st_ino
    assert prepare(str(source), folder, overwrite=True).stat().st_ino != before


def test_a_damaged_file_that_is_there_is_not_taken_for_ready(source: Path, folder: Path) -> None:
    path = prepare(str(source), folder)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is damaged \(its checksum is .* prepare it again"):
        prepare(str(source), folder)
    prepare(str(source), folder, overwrite=True)
    assert load_images("flowers", folder).checksum == small_images().checksum


def test_another_source_of_the_same_name_is_not_mixed_up(source: Path, folder: Path, tmp_path: Path) -> None:
    prepare(str(source), folder)
    (tmp_path / "else").mkdir()
    other = write_npz(tmp_path / "else" / "flowers.npz", small_images(train=15))
    with pytest.raises(
        ValueError, match=f"already there, prepared from {source}, not from {other}; give it another name"
    ):
        prepare(str(other), folder)
    assert len(load_images("flowers", folder).x_train) == 12
    prepare(str(other), folder, name="more-flowers")
    assert len(load_images("more-flowers", folder).x_train) == 15


@pytest.mark.parametrize("name", ["a/b", "a.npz", "..", "hf:a"])
def test_a_name_that_is_none_says_what_is_allowed(source: Path, folder: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"plain name, without folder or ending, of letters and digits, got '{name}'"):
        prepare(str(source), folder, name=name)


def test_what_is_called_a_known_set_has_to_be_it(
    source: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KNOWN, "cifar10", TINY)
    with pytest.raises(ValueError, match="cifar10 has 10 classes"):
        prepare(str(source), folder, name="cifar10")
    fits = write_npz(tmp_path / "fits.npz", small_images(50, 10, 32, classes=10))
    assert read_prepared(prepare(str(fits), folder, name="cifar10")).mean == TINY.mean


def test_an_official_folder_is_prepared_under_the_short_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KNOWN, "cifar10", TINY)
    official = write_cifar10(tmp_path / "cifar-10-batches-py", small_images(50, 10, 32, classes=10))
    assert prepare(str(official), folder) == folder / "cifar10.safetensors"
    assert load_images("cifar10", folder).source == str(official)


def test_the_digits_can_be_prepared_too(folder: Path) -> None:
    assert read_prepared(prepare("digits", folder)).checksum == load_images("digits").checksum


def test_what_is_ready_is_listed_with_what_is_wrong(source: Path, folder: Path) -> None:
    assert list_prepared(folder) == []
    prepare(str(source), folder)
    (folder / "cut.safetensors").write_bytes((folder / "flowers.safetensors").read_bytes()[:-9])
    save_file({"weight": torch.zeros(2)}, folder / "model.safetensors")
    cut, flowers, model = list_prepared(folder)
    assert (flowers.name, flowers.train, flowers.test, flowers.classes) == ("flowers", 12, 6, 3)
    assert (flowers.shape, flowers.checksum, flowers.problem) == ((3, 6, 6), small_images().checksum, "")
    assert flowers.source == str(source)
    assert "cut.safetensors is damaged" in cut.problem
    assert "model.safetensors is not a data set of this version" in model.problem


def rewritten(path: Path, change: Any) -> None:
    """Change the header of a safetensors file."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + content[8 + length :])


def relabelled(path: Path, label: int) -> None:
    """Give every training image a label that no class has."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    save_file({**tensors, "y_train": torch.full_like(tensors["y_train"], label)}, path, metadata)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_bytes(b""), r"is damaged \(.*0 bytes\): prepare it again"),
        (lambda path: path.write_bytes(path.read_bytes()[:100]), r"is damaged .*100 bytes\)"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is damaged"),
        (lambda path: relabelled(path, 99), r"is damaged \(.*99.*: prepare it again"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\7"), "its checksum is [0-9a-f]{64}, expected"),
        (lambda path: path.unlink(), "is missing; `factorized data prepare` writes it"),
        (
            lambda path: rewritten(path, lambda h: h["__metadata__"].update(info=h["__metadata__"]["info"] + " ")),
            "the checksum of its description does not match",
        ),
        (
            lambda path: rewritten(path, lambda h: h["__metadata__"].update(format="2")),
            "not a data set of this version",
        ),
        (lambda path: rewritten(path, lambda h: h.pop("__metadata__")), "got None with"),
    ],
)
def test_a_damaged_file_is_named_and_says_what_to_do(source: Path, folder: Path, change: Any, message: str) -> None:
    path = prepare(str(source), folder)
    change(path)
    with pytest.raises(ValueError, match=f"^{path} .*{message}"):
        read_prepared(path)


def test_a_conversion_that_fails_leaves_what_was_there(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = prepare(str(source), folder)
    before = path.read_bytes()

    def full_disk(tensor: torch.Tensor) -> list[memoryview]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepared_module, "byte_chunks", full_disk)
    with pytest.raises(ValueError, match=f"cannot write to {path}: No space left on device; make room for"):
        prepare(str(source), folder, overwrite=True)
    assert path.read_bytes() == before
    assert [item.name for item in folder.iterdir()] == ["flowers.safetensors"]


def test_a_folder_that_cannot_be_made_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=f"cannot write to {tmp_path / 'file' / 'data'}: .*FACTORIZED_DATA"):
        prepare(str(source), tmp_path / "file" / "data")


def test_the_data_folder_is_the_one_given_or_the_variable_or_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FACTORIZED_DATA", "/somewhere")
    assert data_folder("given") == Path("given")
    assert data_folder() == Path("/somewhere")
    monkeypatch.delenv("FACTORIZED_DATA")
    assert data_folder() == Path("data")


def test_a_set_on_no_disk_yet_is_written_as_it_is(folder: Path) -> None:
    folder.mkdir()
    images = small_images(channels=1)
    strided = Images(**{**vars(images), "x_train": images.x_train.repeat_interleave(2, 0)[::2]})
    write_prepared(strided, folder / "a.safetensors")
    assert read_prepared(folder / "a.safetensors").checksum == images.checksum


def test_a_folder_that_may_not_be_written_is_named_and_not_a_file_in_between(
    source: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *arguments: object) -> None:
        raise OSError(30, "Read-only file system", str(path))

    folder.mkdir()
    for way in ("open", "unlink"):
        monkeypatch.setattr(Path, way, refuse)
    with pytest.raises(
        ValueError, match=r"flowers.safetensors: Read-only file system; make room for .* bytes, or choose"
    ):
        prepare(str(source), folder)
