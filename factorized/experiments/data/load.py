"""``load_images``: a data set by name or by path."""

from __future__ import annotations

import os
from pathlib import Path

from factorized.experiments.data.cifar_python import cifar_layout, load_cifar_python
from factorized.experiments.data.digits import load_digits
from factorized.experiments.data.explain import nearest
from factorized.experiments.data.hugging_face import load_hugging_face
from factorized.experiments.data.image_folder import is_image_folder, load_image_folder
from factorized.experiments.data.images import Images
from factorized.experiments.data.known import KNOWN
from factorized.experiments.data.npz import load_npz
from factorized.experiments.data.prepared import SUFFIX, read_prepared
from factorized.experiments.data.progress import Progress, silent

EMBEDDED = "digits"
DATASETS = (EMBEDDED, *KNOWN)


def data_folder(folder: Path | str | None = None) -> Path:
    """Return the folder of data sets: the one given, else $FACTORIZED_DATA, else ./data."""
    return Path(folder or os.environ.get("FACTORIZED_DATA") or "data")


def load_images(name_or_path: str, folder: Path | None = None, progress: Progress = silent) -> Images:
    """Return a data set; one that was prepared in ``folder`` comes from there, mapped into memory.

    ``name_or_path`` is "digits", "cifar10", "cifar100" or "tiny-imagenet", the name of a prepared set, "hf:OWNER/NAME"
    for any Hugging Face data set, or the path of an .npz file, a CIFAR folder, an image folder or a prepared file.
    """
    prepared = prepared_path(name_or_path, folder)
    if name_or_path != EMBEDDED and prepared is not None and prepared.is_file():
        return read_prepared(prepared)
    return load_source(name_or_path, folder, progress)


def prepared_path(name: str, folder: Path | None = None) -> Path | None:
    """Return where the set of this name is when prepared, or None if it is the path of something else."""
    if name.startswith("hf:"):
        name = name.removeprefix("hf:")
        for sign in "/?&=":
            name = name.replace(sign, "--" if sign == "/" else "-")
    plain = Path(name).name == name and not name.endswith((".npz", SUFFIX)) and name.strip(". ") != ""
    return data_folder(folder) / f"{name}{SUFFIX}" if plain else None


def load_source(name_or_path: str, folder: Path | None = None, progress: Progress = silent) -> Images:
    """Return a data set as ``load_images`` does, from what it was before it was prepared."""
    name = name_or_path
    if name == EMBEDDED:
        return load_digits()
    if name.startswith("hf:"):
        return load_hugging_face(name, name.removeprefix("hf:"), progress)
    if name in KNOWN:
        local = [data_folder(folder) / file for file in (f"{name}.npz", name, KNOWN[name].folder)]
        for path in local:
            if path.exists():
                return _load_path(path, progress)
        return load_hugging_face(name, KNOWN[name].hugging_face, progress)
    path = Path(name).expanduser()
    if not path.exists():
        raise _not_found(name, folder)
    return _load_path(path, progress)


def _load_path(path: Path, progress: Progress) -> Images:
    if path.is_file() and path.suffix == ".npz":
        return load_npz(path, progress)
    if path.is_file() and path.suffix == SUFFIX:
        return read_prepared(path)
    if path.is_dir() and cifar_layout(path):
        return load_cifar_python(path, progress)
    if path.is_dir() and is_image_folder(path):
        return load_image_folder(path, progress)
    inside = ", ".join(sorted(item.name for item in path.iterdir())[:5]) if path.is_dir() else ""
    raise ValueError(
        f"{path} is not a data set: expected an .npz file, a prepared {SUFFIX} file, a CIFAR python folder "
        f"(data_batch_1, … or train, test, meta) or a folder with train/CLASS/ and test/CLASS/"
        + (f"; it holds {inside or 'nothing'}" if path.is_dir() else "")
    )


def _not_found(name: str, folder: Path | None) -> ValueError:
    where = data_folder(folder)
    ready = sorted(path.stem for path in where.glob(f"*{SUFFIX}")) if where.is_dir() else []
    names = [*DATASETS, *(stem for stem in ready if stem not in DATASETS)]
    return ValueError(
        f"data set {name!r}{nearest(name.lower(), names, 0.6)} is neither a file or folder nor one of "
        f"{', '.join(names)} (those prepared in {where} included); hf:OWNER/NAME downloads one from Hugging Face"
    )
