"""``prepare``: convert a data set into one safe file; and list the files that are ready."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from factorized.experiments.data.explain import writing_to
from factorized.experiments.data.known import KNOWN, known_name, make_images
from factorized.experiments.data.load import DATASETS, data_folder, load_source, prepared_path
from factorized.experiments.data.prepared import SUFFIX, Prepared, describe_prepared, read_prepared, write_prepared
from factorized.experiments.data.progress import Progress, silent


def prepare(
    name_or_path: str,
    folder: Path | None = None,
    progress: Progress = silent,
    *,
    name: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Convert a data set into ``folder``/NAME.safetensors, unless that is done, and return that path.

    What is there is checked against its checksum and kept, unless its source is a newer file or ``overwrite`` is set.
    ``name`` is what ``load_images`` will find it by; without it, that of the set, or of the file or folder.
    """
    path = _named(name, folder) if name is not None else _target(name_or_path, folder)
    if path.is_file() and not overwrite:
        _check_same_source(path, name_or_path)
        if not _is_newer(Path(name_or_path).expanduser(), path):
            read_prepared(path)
            return path
    images = load_source(name_or_path, folder, progress)
    if path.stem in KNOWN and images.name != path.stem:  # it has to be what it is called
        train, test = (images.x_train, images.y_train), (images.x_test, images.y_test)
        images = make_images(path.stem, train, test, images.classes, images.source)
    with writing_to(path.parent, "name another data folder by --folder or $FACTORIZED_DATA"):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_prepared(replace(images, name=path.stem, source=_source(name_or_path)), path, progress)
    return path


def list_prepared(folder: Path | None = None) -> list[Prepared]:
    """Return the prepared sets of ``folder`` by name; those that cannot be used hold the reason."""
    return [describe_prepared(path) for path in sorted(data_folder(folder).glob(f"*{SUFFIX}"))]


def _named(name: str, folder: Path | None) -> Path:
    path = prepared_path(name, folder)
    if path is None or not re.fullmatch(r"\w[\w.+-]{0,199}", name):
        raise ValueError(f"name must be a plain name, without folder or ending, of letters and digits, got {name!r}")
    return path


def _target(name_or_path: str, folder: Path | None) -> Path:
    path = Path(name_or_path).expanduser().resolve()
    plain = path.stem if path.suffix in (".npz", SUFFIX) else known_name(path.name)
    return prepared_path(name_or_path, folder) or data_folder(folder) / f"{plain}{SUFFIX}"


def _source(name_or_path: str) -> str:
    is_name = name_or_path in DATASETS or name_or_path.startswith("hf:")
    return name_or_path if is_name else str(Path(name_or_path).expanduser().resolve())


def _check_same_source(path: Path, name_or_path: str) -> None:
    there = describe_prepared(path)
    if not there.problem and there.source != _source(name_or_path):
        raise ValueError(
            f"{path} is already there, prepared from {there.source}, not from {_source(name_or_path)}; give it another "
            "name (--name), or replace that (--overwrite)"
        )


def _is_newer(source: Path, path: Path) -> bool:
    return source.is_file() and source.stat().st_mtime > path.stat().st_mtime
