"""A folder as users have: data in every form, recipes, models of their own, runs that ended."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from torch import nn

import factorized as fz
from factorized.experiments.cli.main import main
from tests.experiments.data.small_sets import small_images, write_cifar10, write_folder, write_npz
from tests.hostile.own_models import FILES

LOW, DENSE, NORMED, SAVED = "out/low/seed-0", "out/dense/seed-0", "out/normed/seed-0", "saved"
DIGITS = '[model]\nname = "resnet8"\n[schedule]\nepochs = 1\n[data]\nname = "digits"\ncrop_padding = 1\n'
PRODUCTS = '[factorize]\nscheme = "low_rank"\nratio = 0.1\ninit = "spectral"\n[decay]\nkind = "frobenius"\n'
RECIPES = {"low": DIGITS + PRODUCTS, "dense": DIGITS, "normed": DIGITS + PRODUCTS + "record_norms = true\n"}


def make_place(folder: Path) -> None:
    """Fill ``folder``, which is the working folder: the commands write down paths as they are given."""
    for name, text in RECIPES.items():
        (folder / f"{name}.toml").write_text(text)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    gray = small_images(train=128, test=20, side=8, channels=1, classes=10)
    write_npz(folder / "noise.npz", gray)
    write_folder(folder / "photos", small_images())
    write_cifar10(folder / "batches", small_images(train=50, test=10, side=32, classes=10))
    (folder / "notes.txt").write_text("mine")
    (folder / "empty").mkdir()
    (folder / "a.toml").mkdir()
    (folder / "b.safetensors").mkdir()
    for words in (
        *(["train", f"{name}.toml", "--quiet", "--device", "cpu"] for name in RECIPES),
        ["compose", LOW],
        ["data", "prepare", "noise.npz", "--name", "small"],
    ):
        assert main(words) == 0
    fz.save(fz.factorize(dense(), rank=2), folder / SAVED)


def dense() -> nn.Sequential:
    """Return a model such as the one in `SAVED` was before it was factorized."""
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def copy_place(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def contents(folder: Path) -> dict[str, str]:
    """Return the checksum of every file below ``folder``; Python's own caches are nobody's."""
    return {
        str(path.relative_to(folder)): _digest(path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
