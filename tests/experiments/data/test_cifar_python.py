from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from factorized.experiments.data.cifar_python import cifar_layout, load_cifar_python
from factorized.experiments.data.images import Images
from factorized.experiments.data.known import KNOWN, Known
from factorized.experiments.data.progress import silent
from factorized.experiments.data.unpickle import ByteArray, unpickle
from tests.experiments.data.small_sets import TINY, python2_pickle, small_images, write_cifar10, write_cifar100


@pytest.fixture(autouse=True)
def small_cifars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KNOWN, "cifar10", TINY)
    monkeypatch.setitem(KNOWN, "cifar100", Known("", "cifar-100-python", 10, 32, 5, 1, TINY.mean, TINY.std))


@pytest.fixture
def images() -> Images:
    return small_images(50, 10, 32, classes=10)


@pytest.mark.parametrize(
    "pickled",
    [python2_pickle, *(lambda value, n=n: pickle.dumps(value, protocol=n) for n in range(6))],
    ids=["Python 2", *(f"protocol {n}" for n in range(6))],
)
@pytest.mark.parametrize(("write", "name"), [(write_cifar10, "cifar10"), (write_cifar100, "cifar100")])
def test_an_official_folder_is_read_whatever_python_wrote_it(
    tmp_path: Path, images: Images, write: Callable[..., Path], name: str, pickled: Callable[[Any], bytes]
) -> None:
    folder = write(tmp_path / "under any name", images, pickled)
    read = load_cifar_python(folder, silent)
    assert (read.name, read.classes, read.mean) == (name, images.classes, TINY.mean)
    assert read.checksum == images.checksum


def test_the_files_written_here_are_what_numpy_itself_reads(images: Images) -> None:
    data = images.x_test.flatten(1).numpy()
    read = pickle.loads(python2_pickle({"data": data, "labels": [1, 2]}), encoding="latin1")
    assert np.array_equal(read["data"], data)
    assert read["labels"] == [1, 2]


def test_progress_is_reported_for_each_file(tmp_path: Path, images: Images) -> None:
    told: list[tuple[str, int, int]] = []
    load_cifar_python(write_cifar10(tmp_path, images), lambda *call: told.append(call))
    assert told == [("reading", i, 6) for i in range(1, 7)]


class Harm:
    """Would make a file if it were unpickled."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


@pytest.mark.parametrize(
    ("call", "named"),
    [(os.mkdir, r"posix.mkdir|nt.mkdir"), (eval, "eval"), (getattr, "getattr"), (np.load, "load"), (np.array, "array")],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_file_that_would_run_something_is_refused_and_runs_nothing(
    tmp_path: Path, images: Images, call: Callable[..., Any], named: str, protocol: int
) -> None:
    folder = write_cifar10(tmp_path / "cifar", images)
    path = folder / "data_batch_3"
    path.write_bytes(pickle.dumps({"data": Harm(call, str(tmp_path / "harm"))}, protocol))
    with pytest.raises(ValueError, match=rf"data_batch_3 is damaged.*it names \S*({named}).*nothing was run"):
        load_cifar_python(folder, silent)
    assert not (tmp_path / "harm").exists()


ARRAY = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)R"  # to be followed by its state
BYTES = b"cnumpy\ndtype\n(U\x02u1tR"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"cnumpy\nndarray\n((I1000000000000\ntU\x01OtR.", "it calls numpy.ndarray"),
        (pickle.dumps(np.zeros(3)), "it holds an array of 'f8'; expected bytes"),
        (pickle.dumps(np.array([{}], dtype=object)), "it holds an array of 'O8'; expected bytes"),
        (pickle.dumps(np.zeros(3, np.int8), 5), "it holds an array of 'i1'; expected bytes"),
        (ARRAY + b"(K\x01K\x00\x85N\x89U\x00tb.", "it holds an array that is not of bytes"),
        (ARRAY + b"(K\x01]" + BYTES + b"\x89U\x00tb.", r"it holds an array of shape \[\]$"),
        (
            b"\x80\x02cnumpy.core.numeric\n_frombuffer\n(U\x00NK\x00\x85U\x01CtR.",
            "it holds an array that is not of bytes",
        ),
        (b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x04\x00\x00\x00zliptR.", "it encodes text as"),
        (b"Pan id\n.", "persistent"),
        (ARRAY + b"(K\x01I9\nI9\ntb.", "unpack"),
        (python2_pickle(np.zeros((2, 3), np.uint8)).replace(b"J\x03\0\0\0t", b"J\x04\0\0\0t"), "in 6 bytes"),
        (b"(" * 100_000, ""),
        (b"", "exhausted"),
        (b"]r\xff\xff\xff\x7f.", "it numbers an object 2,147,483,647 and has 7 bytes"),
        (b"]p2147483647\n.", "it numbers an object 2,147,483,647"),
        (b"\x80\x04\x8e" + (1 << 34).to_bytes(8, "little") + b".", "expected 17179869184 bytes"),
        (b"\x80\x05\x96" + (1 << 34).to_bytes(8, "little") + b".", "expected 17179869184 bytes"),
        (b"\x80\x04\x95" + (1 << 34).to_bytes(8, "little") + b".", ""),
        (
            b"X\xe8\x03\0\0" + b"a" * 1000 + b"q\x01" + b"c_codecs\nencode\n(h\x01X\x06\0\0\0latin1tR" * 50 + b".",
            "many",
        ),
    ],
)
def test_pickles_made_to_do_harm_are_plain_errors(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path} is damaged, truncated or not a data file.*{message}"):
        unpickle(path)


def test_a_file_larger_than_any_of_cifar_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole: no disk is used
    with pytest.raises(ValueError, match="it has 1,099,511,627,776 bytes, more than any file of CIFAR"):
        unpickle(path)


def test_a_file_cannot_change_what_a_name_leads_to(tmp_path: Path) -> None:
    path = tmp_path / "file"
    # sets an attribute on what the name leads to, by the state that BUILD gives to an object's slots
    path.write_bytes(b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(N}X\x05\x00\x00\x00_callNstb.")
    unpickle(path)
    path.write_bytes(pickle.dumps(np.ones(4, np.uint8), 2))
    read = unpickle(path)
    assert isinstance(read, ByteArray)
    assert read.array.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("protocol", [2, 5])
def test_arrays_keep_their_shape_and_order(tmp_path: Path, order: str, protocol: int) -> None:
    array = np.asarray(np.arange(12, dtype=np.uint8).reshape(3, 4), order=order)  # type: ignore[call-overload]
    (tmp_path / "file").write_bytes(pickle.dumps(array, protocol))
    assert np.array_equal(unpickle(tmp_path / "file").array, array)


@pytest.mark.parametrize("keep", [5, 1000, -1])
def test_a_truncated_file_is_named(tmp_path: Path, images: Images, keep: int) -> None:
    folder = write_cifar10(tmp_path, images)
    path = folder / "data_batch_2"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=f"{path} is damaged, truncated"):
        load_cifar_python(folder, silent)


def test_a_missing_file_is_named(tmp_path: Path, images: Images) -> None:
    folder = write_cifar10(tmp_path, images)
    (folder / "data_batch_4").unlink()
    assert cifar_layout(folder) == "cifar10"
    with pytest.raises(ValueError, match=f"{folder / 'data_batch_4'} is missing"):
        load_cifar_python(folder, silent)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([1, 2], "expected a dictionary, got list"),
        ({"labels": [1]}, "expected 'data', a ByteArray, got NoneType"),
        ({"data": np.zeros((2, 3072), np.uint8)}, "expected 'labels', a list, got NoneType"),
        ({"data": np.zeros((2, 3071), np.uint8), "labels": [1, 2]}, r"data must be \(n, 3072\), got \(2, 3071\)"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, "2 images and 1 labels"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": ["a", 1]}, "labels must be a list of whole numbers"),
        ({"data": np.zeros((10, 3072), np.uint8), "labels": [10] * 10}, r"labels must be in 0..9.*is 10"),
        ({"data": np.zeros((10, 3072), np.uint8), "labels": [3] * 10}, "5 train images of each class, got"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [3] * 2}, "50 train images, got 42"),
    ],
)
def test_a_batch_that_is_not_one_says_what_was_expected(
    tmp_path: Path, images: Images, batch: Any, message: str
) -> None:
    folder = write_cifar10(tmp_path, images)
    (folder / "data_batch_1").write_bytes(pickle.dumps(batch))
    with pytest.raises(ValueError, match=message) as caught:
        load_cifar_python(folder, silent)
    assert str(folder) in str(caught.value)


def test_class_names_must_be_text(tmp_path: Path, images: Images) -> None:
    folder = write_cifar10(tmp_path, images)
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [1, 2]}))
    with pytest.raises(ValueError, match="class names must be text, got int"):
        load_cifar_python(folder, silent)


def test_another_folder_is_no_cifar_folder(tmp_path: Path) -> None:
    assert cifar_layout(tmp_path) is None
    with pytest.raises(ValueError, match="is not a CIFAR folder: expected one of the sets of files data_batch_1"):
        load_cifar_python(tmp_path, silent)
