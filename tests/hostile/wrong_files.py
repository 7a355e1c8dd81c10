"""Wrong data, runs and checkpoints: each a way to spoil one file of the folder, and the verbs that read it."""

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
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from factorized.deploy.checksum import sealed
from factorized.vision.state import load_state, save_state
from tests.hostile.cases import Case, Prepare
from tests.hostile.damage import damage
from tests.hostile.place import DENSE, LOW
from tests.vision.data.small_sets import small_images, write_npz

REMOVED = object()


def rewritten(path: str, data: str | bytes) -> Prepare:
    return lambda folder: (folder / path).write_bytes(data.encode() if isinstance(data, str) else data)


def removed(path: str) -> Prepare:
    return lambda folder: (folder / path).unlink()


def made_a_folder(path: str) -> Prepare:
    def prepare(folder: Path) -> None:
        (folder / path).unlink()
        (folder / path).mkdir()

    return prepare


def damaged(path: str, seed: int) -> Prepare:
    return lambda folder: damage(next(folder.glob(path)), seed)


def truncated(path: str, share: float) -> Prepare:
    def prepare(folder: Path) -> None:
        data = (folder / path).read_bytes()
        (folder / path).write_bytes(data[: int(share * len(data))])

    return prepare


GARBAGE: dict[str, Callable[[str], Prepare]] = {
    "missing": removed,
    "empty": lambda path: rewritten(path, ""),
    "text": lambda path: rewritten(path, "hello"),
    "zeros": lambda path: rewritten(path, bytes(1000)),
    "a folder": made_a_folder,
    "a pickle": lambda path: rewritten(path, pickle.dumps({"x": 1})),
    "an enormous header": lambda path: rewritten(path, struct.pack("<Q", 2**62) + b"{}"),
    "a header of garbage": lambda path: rewritten(path, struct.pack("<Q", 8) + b"{'a': 1}"),
}


# Data


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


class Runs:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("was-run"),)


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


# Runs


def edited(path: str, *keys: str | int, value: Any) -> Prepare:
    """Change one value of a JSON file, or remove it; its checksum is made anew."""

    def prepare(folder: Path) -> None:
        table = inner = json.loads((folder / path).read_text())
        for key in keys[:-1]:
            inner = inner[key]
        if value is REMOVED:
            del inner[keys[-1]]
        else:
            inner[keys[-1]] = value
        del table["checksum"]
        (folder / path).write_text(json.dumps(sealed(table)))

    return prepare


DEEP = "[" * 100_000 + "]" * 100_000
RESULT, PLAN = f"{LOW}/result.json", f"{LOW}/model/plan.json"
RESULT_EDITS: tuple[tuple[tuple[str | int, ...], tuple[Any, ...]], ...] = (
    (("recipe",), (REMOVED, None, {}, [], "low.toml", 3)),
    (("recipe", "model"), (REMOVED, None, {})),
    (
        ("recipe", "model", "name"),
        (REMOVED, None, 3, "", "resnet9", "nowhere:small", "own:exits", "hf:x", "resnet20"),
    ),
    (("recipe", "run", "batch"), (0, "x", None)),
    (("accuracy",), (REMOVED, None, "x", [], {}, math.nan, math.inf)),
    (("data",), (REMOVED, None, [], "digits", {})),
    (("data", "classes"), (REMOVED, None, [], 10, "0123456789", ["0"], list(range(1000)))),
    (("data", "size"), (REMOVED, None, [], [8], 8, ["8", "8"], [0, 0], [-8, -8], [8.5, 8], [10**12, 10**12])),
    (("data", "channels"), (REMOVED, None, 0, -1, "1", 1.5, 3, 10**12)),
    (("data", "mean"), (None, "x", [], [0.5, 0.5], ["x"], [math.nan])),
    (("data", "std"), (None, "x", [], [0], [-1], [math.nan], [math.inf])),
    (("data", "checksum"), (REMOVED, None, 3)),
    (("seed",), (REMOVED,)),
)
PLAN_EDITS: tuple[tuple[tuple[str | int, ...], tuple[Any, ...]], ...] = (
    (("format",), (REMOVED, 2, "1", None)),
    (("weights",), (REMOVED, None, 3, "", "../weights-1.safetensors", "/etc/passwd", "weights-1.safetensors")),
    (("aliases",), (REMOVED, None, [], {"x": "y"}, {"x": 3})),
    (("plan",), (REMOVED, None, [], {}, "plan")),
    (("plan", "format"), (REMOVED, 2, None)),
    (("plan", "entries"), (REMOVED, None, {}, [], [3], [None], [{}])),
    (("plan", "entries", 1, "name"), (REMOVED, None, 3, "", "nothing", "..")),
    (("plan", "entries", 1, "type"), (REMOVED, None, 3, "Linear", "os.system")),
    (("plan", "entries", 1, "shape"), (REMOVED, None, [], 3, ["x"], [10**15, 10**15])),
    (("plan", "entries", 1, "rank"), (REMOVED, None, 0, -1, 2.5, "3", True, 10**15, 10**40)),
)


def wrong_runs() -> Iterator[Case]:
    """Yield runs whose result or network is damaged, evaluated and composed."""
    ways: dict[str, Prepare] = {}
    for path, edits in ((RESULT, RESULT_EDITS), (PLAN, PLAN_EDITS)):
        file = Path(path).name
        for keys, values in edits:
            for value in values:
                shown = "removed" if value is REMOVED else repr(value)[:40]
                ways[f"{file} {'.'.join(map(str, keys))} = {shown}"] = edited(path, *keys, value=value)
        ways |= {f"{file} {name}": spoil(path) for name, spoil in GARBAGE.items()}
        ways[f"{file} deep"] = rewritten(path, DEEP)
        ways[f"{file} a list"] = rewritten(path, "[1, 2]")
        ways[f"{file} null"] = rewritten(path, "null")
        ways[f"{file} not text"] = rewritten(path, b"\xff\xfe\xfd" * 10)
    weights = f"{LOW}/model/weights-*.safetensors"
    ways |= {f"weights damaged {seed}": damaged(weights, seed) for seed in range(12)}
    ways["weights that are no numbers"] = lambda folder: _fill(next(folder.glob(weights)), math.nan)
    ways["other weights"] = lambda folder: _fill(next(folder.glob(weights)), 0.5)
    for name, prepare in ways.items():
        yield Case(f"evaluate {name}", ("evaluate", LOW), prepare)
        yield Case(f"compose {name}", ("compose", LOW, "--out", "new.safetensors"), prepare)
    dense = f"{DENSE}/model/dense.safetensors"
    for name, prepare in {
        **{name: spoil(dense) for name, spoil in GARBAGE.items()},
        **{f"damaged {seed}": damaged(dense, seed) for seed in range(6)},
        "no numbers": lambda folder: _fill(folder / dense, math.nan),
    }.items():
        yield Case(f"evaluate dense weights {name}", ("evaluate", DENSE), prepare)
        yield Case(f"compose dense weights {name}", ("compose", DENSE, "--out", "new.safetensors"), prepare)


def _fill(path: Path, value: float) -> None:
    save_file({k: t.fill_(value) if t.is_floating_point() else t for k, t in load_file(path).items()}, path)


def state(change: Callable[[Any], object]) -> Prepare:
    """Change the checkpoint of a run that has not ended; what is written is a whole and valid file."""

    def prepare(folder: Path) -> None:
        found = load_state(folder / LOW)
        change(found)
        save_state(found, folder / LOW)
        (folder / RESULT).unlink()

    return prepare


STATE_EDITS: dict[str, tuple[Any, ...]] = {
    "recipe": (None, {}, [], "low"),
    "seed": (None, "0", 1, -1),
    "data": (None, "", "0" * 64, 3),
    "epoch": (-5, 10**9, "1", None, 0.5, math.nan, 2),
    "step": (-1, 10**9, "1", None, 0.5),
    "history": (None, "x", [None], [{}], [{"epoch": "x"}]),
    "seconds": (None, "x", math.nan, -1.0),
    "network": (None, {}, [], {"x": torch.ones(3)}, {"x": 3}),
    "momentum": (None, {}, [], {"x": torch.ones(3)}),
    "counts": (None, [], {"loss_sum": "x"}),
    "random": (None, {}, [], {"cpu": torch.zeros(3, dtype=torch.uint8)}, {"cpu": torch.zeros(5056)}),
}


def wrong_checkpoints() -> Iterator[Case]:
    """Yield checkpoints that are damaged or hold what no run writes, resumed."""
    path = f"{LOW}/checkpoint.pt"
    ways: dict[str, Prepare] = {
        f"{field} = {repr(value)[:30]!s}".replace("\n", ""): state(lambda s, f=field, v=value: setattr(s, f, v))  # type: ignore[misc]
        for field, values in STATE_EDITS.items()
        for value in values
    }
    ways["weights that are no numbers"] = state(lambda s: [t.fill_(math.nan) for t in _floats(s.network)])
    ways["momentum that is no number"] = state(lambda s: [t.fill_(math.nan) for t in _floats(s.momentum)])
    ways["weights of other shapes"] = state(
        lambda s: s.network.update({k: t[:1] for k, t in s.network.items() if t.dim()})
    )
    ways["weights of another type"] = state(lambda s: s.network.update({k: t.long() for k, t in s.network.items()}))
    ways["a weight missing"] = state(lambda s: s.network.popitem())
    ways["a momentum missing"] = state(lambda s: s.momentum.popitem())
    ways |= {name: spoil(path) for name, spoil in GARBAGE.items() if name != "missing"}
    ways |= {f"truncated to {share:.0%}": truncated(path, share) for share in (0.01, 0.5, 0.99)}
    ways["code"] = lambda folder: torch.save({"recipe": Runs()}, folder / path)
    for name, prepare in ways.items():
        yield Case(f"resume {name}", ("train", "low.toml", "--resume"), prepare)


def _floats(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors.values() if tensor.is_floating_point()]
