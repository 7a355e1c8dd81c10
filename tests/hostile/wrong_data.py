"""Wrong data: each a way to spoil one data set of the folder, prepared and trained on."""

from __future__ import annotations

import io
import json
import math
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.experiments.data.small_sets import small_images, write_npz
from tests.hostile.cases import Case, Prepare
from tests.hostile.place import DENSE
from tests.hostile.spoil import GARBAGE, Runs, damaged, rewritten, truncated


def npz(**changes: Any) -> Prepare:
    """Write arrays that do not fit each other; None leaves one out."""
    gray = small_images(train=128, test=20, side=8, channels=1, classes=10)
    return lambda folder: write_npz(folder / "noise.npz", gray, **changes)


def enormous_npz(folder: Path) -> None:
    """Write an archive whose header claims 10¹² images in a few bytes."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (10**12, 8, 8)})
    with zipfile.ZipFile(folder / "noise.npz", "w") as archive:
        for name in ("x_train", "y_train", "x_test", "y_test"):
            archive.writestr(f"{name}.npy", header.getvalue() + b"\0" * 64)


NPZ: dict[str, Prepare] = {
    "without x_train": npz(x_train=None),
    "without y_test": npz(y_test=None),
    "floats": npz(x_train=np.zeros((128, 8, 8))),
    "floats that are no numbers": npz(x_train=np.full((128, 8, 8), math.nan, np.float32)),
    "complex numbers": npz(x_train=np.zeros((128, 8, 8), np.complex64)),
    "objects": npz(x_train=np.array([{}, []] * 64, dtype=object)),
    "texts": npz(y_train=np.array(["a"] * 128)),
    "one dimension": npz(x_train=np.zeros(128, np.uint8)),
    "five dimensions": npz(x_train=np.zeros((128, 8, 8, 1, 1), np.uint8)),
    "no images": npz(x_train=np.zeros((0, 8, 8), np.uint8), y_train=np.zeros(0, np.int64)),
    "images of no pixels": npz(x_train=np.zeros((128, 0, 8), np.uint8)),
    "other sizes in the test": npz(x_test=np.zeros((20, 9, 9), np.uint8)),
    "fewer labels": npz(y_train=np.zeros(127, np.int64)),
    "labels below zero": npz(y_train=np.full(128, -1)),
    "labels beyond all classes": npz(y_train=np.full(128, 10**9)),
    "labels beyond int64": npz(y_train=np.full(128, 2**64 - 1, np.uint64)),
    "labels with fractions": npz(y_train=np.full(128, 0.5)),
    "labels in two dimensions": npz(y_train=np.zeros((128, 10, 2), np.int64)),
    "a header of 10¹² images": enormous_npz,
    **{name: spoil("noise.npz") for name, spoil in GARBAGE.items()},
    **{f"truncated to {share:.0%}": truncated("noise.npz", share) for share in (0.01, 0.5, 0.99)},
}


def pickled(path: str, value: Any) -> Prepare:
    return rewritten(path, pickle.dumps(value, protocol=2))


PIXELS = np.zeros((10, 3072), np.uint8)
BATCH = "batches/data_batch_1"
CIFAR: dict[str, Prepare] = {
    **{f"a batch: {name}": spoil(BATCH) for name, spoil in GARBAGE.items()},
    **{f"names: {name}": spoil("batches/batches.meta") for name, spoil in GARBAGE.items()},
    "a list": pickled(BATCH, [1, 2]),
    "no labels": pickled(BATCH, {"data": PIXELS}),
    "no data": pickled(BATCH, {"labels": [0] * 10}),
    "labels of text": pickled(BATCH, {"data": PIXELS, "labels": ["a"] * 10}),
    "fewer labels": pickled(BATCH, {"data": PIXELS, "labels": [0] * 9}),
    "labels beyond": pickled(BATCH, {"data": PIXELS, "labels": [10] * 10}),
    "labels below": pickled(BATCH, {"data": PIXELS, "labels": [-1] * 10}),
    "labels beyond int64": pickled(BATCH, {"data": PIXELS, "labels": [2**70] * 10}),
    "other sizes": pickled(BATCH, {"data": PIXELS[:, :100].copy(), "labels": [0] * 10}),
    "floats": pickled(BATCH, {"data": PIXELS.astype(float), "labels": [0] * 10}),
    "code": pickled(BATCH, {"data": Runs(), "labels": [0] * 10}),
    "names of numbers": pickled("batches/batches.meta", {"label_names": list(range(10))}),
    "no names": pickled("batches/batches.meta", {"label_names": []}),
    "ten bytes that ask for 2³⁰ places": rewritten(BATCH, b"\x80\x02]r\x00\x00\x00\x40."),
    "bytes that ask for 2⁶² bytes": rewritten(BATCH, b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"x."),
    "open marks without end": rewritten(BATCH, b"\x80\x02" + b"(" * 10**6),
    "deep lists": rewritten(BATCH, b"\x80\x02" + b"]" * 10**6 + b"a" * (10**6 - 1) + b"."),
}


def picture(data: bytes | None, name: str = "photos/train/kind 0/0000.png") -> Prepare:
    def prepare(folder: Path) -> None:
        if data is None:
            (folder / name).unlink()
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)

    return prepare


def png(width: int, height: int, mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def claimed_png(width: int, height: int) -> bytes:
    """Return a PNG whose header claims a size that its data do not have."""
    data = bytearray(png(6, 6))
    data[16:24] = struct.pack(">II", width, height)
    return bytes(data)


def without(name: str) -> Prepare:
    return lambda folder: shutil.rmtree(folder / name)


PHOTOS: dict[str, Prepare] = {
    "an empty file": picture(b""),
    "a text": picture(b"hello"),
    "half a picture": picture(png(6, 6)[:40]),
    "a picture of another size": picture(png(7, 6)),
    "a picture that claims 60,000 by 60,000": picture(claimed_png(60_000, 60_000)),
    "a picture that claims no width": picture(claimed_png(0, 6)),
    "a class without pictures": lambda folder: (folder / "photos/train/kind 9").mkdir(),
    "a class that the test alone has": picture(png(6, 6), "photos/test/kind 9/0.png"),
    "no test": without("photos/test"),
    "no training": without("photos/train"),
    "a test of nothing": lambda folder: [shutil.rmtree(path) for path in (folder / "photos/test").iterdir()],
    "a folder that is called a picture": lambda folder: (folder / "photos/train/kind 0/x.png").mkdir(),
}


def prepared_header(change: Callable[[dict[str, Any]], object]) -> Prepare:
    def prepare(folder: Path) -> None:
        path = folder / "data/small.safetensors"
        data = path.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        change(header)
        encoded = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[8 + size :])

    return prepare


PREPARED: dict[str, Prepare] = {
    **{name: spoil("data/small.safetensors") for name, spoil in GARBAGE.items() if name != "missing"},
    **{f"damaged {seed}": damaged("data/small.safetensors", seed) for seed in range(12)},
    "no description": prepared_header(lambda header: header.pop("__metadata__")),
    "another format": prepared_header(lambda header: header["__metadata__"].update(format="factorized images 0")),
    "another description": prepared_header(lambda header: header["__metadata__"].update(info="{}")),
    "fewer tensors": prepared_header(lambda header: header.pop("x_test")),
    "offsets beyond the end": prepared_header(lambda header: header["x_test"].update(data_offsets=[0, 10**15])),
    "weights of a network": lambda folder: shutil.copy(
        folder / DENSE / "model/dense.safetensors", folder / "data/small.safetensors"
    ),
}


def wrong_data() -> Iterator[Case]:
    """Yield data that is damaged or does not fit, trained on and prepared."""
    sets = {"noise.npz": NPZ, "batches": CIFAR, "photos": PHOTOS, "data/small.safetensors": PREPARED}
    for path, ways in sets.items():
        for name, prepare in ways.items():
            train = ("train", "dense.toml", "--out", "new", "--set", "run.batch=10", "--data", path)
            yield Case(f"train on {path}: {name}", train, prepare)
            if path != "data/small.safetensors":
                yield Case(f"prepare {path}: {name}", ("data", "prepare", path, "--folder", "new"), prepare)
    for name, prepare in PREPARED.items():
        named = ("train", "dense.toml", "--out", "new", "--set", "data.name=small", "--set", "run.batch=10")
        yield Case(f"train on the prepared set by name: {name}", named, prepare)
