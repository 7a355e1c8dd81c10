"""Small data sets made on the spot, in every form that can be read."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from factorized.experiments.data.images import Images
from factorized.experiments.data.known import Known

Bytes = npt.NDArray[np.uint8]
TINY = Known("some/where", "cifar-10-batches-py", 10, 32, 5, 1, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


def pictures(count: int, side: int = 6, channels: int = 3, seed: int = 0) -> Bytes:  # (count, side, side, channels)
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, channels), dtype=np.uint8)


def small_images(train: int = 12, test: int = 6, side: int = 6, channels: int = 3, classes: int = 3) -> Images:
    """Return random images whose labels count up and begin again."""

    def part(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.from_numpy(pictures(count, side, channels, seed)).permute(0, 3, 1, 2).contiguous()
        return x, torch.arange(count) % classes

    (x, y), (x_test, y_test) = part(train, 1), part(test, 2)
    names = tuple(f"kind {i}" for i in range(classes))
    return Images("small", x, y, x_test, y_test, names, (0.5,) * channels, (0.25,) * channels)


def write_npz(path: Path, images: Images, **changes: Any) -> Path:
    """Write ``images`` as an .npz, channels last; ``changes`` replace or, if None, leave out an array."""
    arrays: dict[str, Any] = {}
    for part in ("train", "test"):
        arrays[f"x_{part}"] = getattr(images, f"x_{part}").permute(0, 2, 3, 1).numpy()
        arrays[f"y_{part}"] = getattr(images, f"y_{part}").numpy()
    arrays |= changes
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return path


def write_folder(folder: Path, images: Images, test: str = "test", suffix: str = "png") -> Path:
    """Write ``images`` as folder/train/CLASS/*.png and folder/test/CLASS/*.png."""
    for part, name in (("train", "train"), ("test", test)):
        x, y = getattr(images, f"x_{part}"), getattr(images, f"y_{part}")
        for i, (pixels, label) in enumerate(zip(x, y.tolist(), strict=True)):
            save(folder / name / images.classes[label] / f"{i:04d}.{suffix}", pixels.permute(1, 2, 0).numpy())
    return folder


def write_tiny_imagenet(folder: Path, images: Images) -> Path:
    """Write ``images`` as Tiny-ImageNet is laid out, with its unlabelled test images too."""
    for i, (pixels, label) in enumerate(zip(images.x_train, images.y_train.tolist(), strict=True)):
        name = images.classes[label]
        save(folder / "train" / name / "images" / f"{name}_{i:02d}.JPEG", pixels.permute(1, 2, 0).numpy(), "PNG")
        (folder / "train" / name / f"{name}_boxes.txt").write_text("boxes are not needed")
    lines = []
    for i, (pixels, label) in enumerate(zip(images.x_test, images.y_test.tolist(), strict=True)):
        save(folder / "val" / "images" / f"val_{i}.JPEG", pixels.permute(1, 2, 0).numpy(), "PNG")
        lines.append(f"val_{i}.JPEG\t{images.classes[label]}\t0\t32\t44\t62")
    (folder / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    (folder / "wnids.txt").write_text("\n".join(reversed(images.classes)))
    save(folder / "test" / "images" / "test_0.JPEG", pictures(1)[0], "PNG")
    return folder


def save(path: Path, pixels: Bytes, kind: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels[:, :, 0] if pixels.shape[-1] == 1 else pixels).save(path, kind)


def python2_pickle(value: Any) -> bytes:
    """Return ``value`` as Python 2 and NumPy 1 would have pickled it: what the official CIFAR files hold."""
    return b"\x80\x02" + _python2(value) + b"."


def _python2(value: Any) -> bytes:
    if isinstance(value, dict):
        items = b"".join(_python2(key) + _python2(item) for key, item in value.items())
        return b"}(" + items + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(_python2(item) for item in value) + b"e"
    if isinstance(value, tuple):
        return b"(" + b"".join(_python2(item) for item in value) + b"t"
    if isinstance(value, str):
        return b"T" + struct.pack("<i", len(value)) + value.encode("latin1")
    if isinstance(value, bytes):
        return b"T" + struct.pack("<i", len(value)) + value
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    if value is None:
        return b"N"
    empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + _python2((0,)) + _python2("b") + b"tR"
    element = (
        b"cnumpy\ndtype\n" + _python2(("u1", 0, 1)) + b"R" + _python2((3, "|", None, None, None, -1, -1, 0)) + b"b"
    )
    state = _python2(1) + _python2(value.shape) + element + b"\x89" + _python2(value.tobytes())
    return empty + b"(" + state + b"tb"


def write_cifar10(folder: Path, images: Images, pickled: Any = python2_pickle) -> Path:
    """Write ``images``, which are 32×32, in five training batches and a test batch, as in the official archive."""
    folder.mkdir(parents=True, exist_ok=True)
    xs, ys = images.x_train.chunk(5), images.y_train.chunk(5)
    for i, (x, y) in enumerate([*zip(xs, ys, strict=True), (images.x_test, images.y_test)], start=1):
        batch = {
            "batch_label": f"batch {i}",
            "labels": y.tolist(),
            "data": x.flatten(1).numpy(),
            "filenames": ["a.png"],
        }
        (folder / (f"data_batch_{i}" if i <= 5 else "test_batch")).write_bytes(pickled(batch))
    (folder / "batches.meta").write_bytes(pickled({"label_names": list(images.classes), "num_vis": 3072}))
    return folder


def write_cifar100(folder: Path, images: Images, pickled: Any = python2_pickle) -> Path:
    """Write ``images``, which are 32×32, as CIFAR-100's official archive has them, with coarse labels too."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "test"):
        x, y = getattr(images, f"x_{part}"), getattr(images, f"y_{part}")
        batch = {"coarse_labels": [0] * len(y), "fine_labels": y.tolist(), "data": x.flatten(1).numpy()}
        (folder / part).write_bytes(pickled(batch))
    names = {"fine_label_names": list(images.classes), "coarse_label_names": ["all"]}
    (folder / "meta").write_bytes(pickled(names))
    return folder
