"""Folders of image files: train/CLASS/*, test/CLASS/*, and Tiny-ImageNet's layout of the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from factorized.experiments.data.decode import Pixels, as_many_channels, stack_pixels, to_pixels
from factorized.experiments.data.explain import in_words
from factorized.experiments.data.extras import need
from factorized.experiments.data.images import Images
from factorized.experiments.data.known import make_images
from factorized.experiments.data.progress import Progress

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
TESTS = ("test", "val", "valid", "validation")
ANNOTATIONS = "val_annotations.txt"
THREADS = 4  # Pillow decodes outside Python's lock


@dataclass(frozen=True)
class Files:
    """Image files and their labels."""

    paths: tuple[Path, ...]
    labels: tuple[int, ...]


def is_image_folder(folder: Path) -> bool:
    """Return whether ``folder`` has a folder of training images."""
    return (folder / "train").is_dir()


def load_image_folder(folder: Path, progress: Progress) -> Images:
    """Return the images of a folder, decoded."""
    train, test, classes = list_image_folder(folder)
    parts = []
    for stage, files in (("training images", train), ("test images", test)):
        x = stack_pixels(_read_in_order(files.paths), len(files.paths), stage, progress)
        parts.append((x, torch.tensor(files.labels, dtype=torch.int64)))
    (x_train, y_train), (x_test, y_test) = parts
    x_train, x_test = as_many_channels(x_train, x_test)
    return make_images(folder.resolve().name, (x_train, y_train), (x_test, y_test), classes, str(folder))


def list_image_folder(folder: Path) -> tuple[Files, Files, tuple[str, ...]]:
    """Return the training files, the test files and the names of the classes, in order of name."""
    if not is_image_folder(folder):
        raise ValueError(f"{folder / 'train'} is missing; expected folders train/CLASS/ and test/CLASS/ of images")
    classes = tuple(path.name for path in _subfolders(folder / "train"))
    if not classes:
        raise ValueError(f"{folder / 'train'} must hold one folder for each class, it holds none")
    _check_announced(folder, classes)
    train = _in_class_folders(folder / "train", classes, may_be_empty=False)
    return train, _test_files(folder, classes), classes


def read_pixels(path: Path) -> Pixels:
    """Return the decoded file."""
    pillow = need("PIL.Image", "pillow", "reading image files")
    try:
        with pillow.open(path) as image:
            return to_pixels(image, str(path))
    except (OSError, pillow.DecompressionBombError) as error:
        raise ValueError(f"{path} is damaged or not an image: {in_words(error, named=False)}") from error


def _read_in_order(paths: Sequence[Path]) -> Iterator[tuple[str, Pixels]]:
    """Yield decoded files in order, a few ahead of their use and never all at once."""
    rest = iter(paths)
    with ThreadPoolExecutor(THREADS) as pool:
        waiting: deque[tuple[Path, Future[Pixels]]] = deque(
            (path, pool.submit(read_pixels, path)) for path in islice(rest, 16 * THREADS)
        )
        while waiting:
            path, pixels = waiting.popleft()
            yield str(path), pixels.result()
            waiting.extend((following, pool.submit(read_pixels, following)) for following in islice(rest, 1))


def _test_files(folder: Path, classes: tuple[str, ...]) -> Files:
    if (folder / "val" / ANNOTATIONS).is_file():
        return _annotated(folder / "val", classes)
    for name in TESTS:
        part = folder / name
        inside = [path.name for path in _subfolders(part)] if part.is_dir() else []
        if inside and inside != ["images"]:  # Tiny-ImageNet's test/images has no labels
            return _in_class_folders(part, classes, may_be_empty=True)
    raise ValueError(
        f"{folder} must hold test images in one of {', '.join(f'{name}/CLASS/' for name in TESTS)} or "
        f"val/{ANNOTATIONS}, it has none"
    )


def _in_class_folders(part: Path, classes: tuple[str, ...], may_be_empty: bool) -> Files:
    found = {path.name: path for path in _subfolders(part)}
    unknown, missing = sorted(set(found) - set(classes)), sorted(set(classes) - set(found))
    if unknown:
        raise ValueError(f"{part / unknown[0]}: there is no class {unknown[0]!r} among the training images")
    if missing:
        raise ValueError(f"{part / missing[0]} is missing: expected a folder for each of {len(classes)} classes")
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        inside = found[name] / "images"  # train/CLASS/images/*.JPEG in Tiny-ImageNet
        files = _image_files(inside if inside.is_dir() else found[name])
        if not files and not may_be_empty:
            raise ValueError(f"{found[name]} holds no images; expected files that end in {', '.join(sorted(SUFFIXES))}")
        paths += files
        labels += [label] * len(files)
    if not paths:
        raise ValueError(f"{part} holds no images; expected files that end in {', '.join(sorted(SUFFIXES))}")
    return Files(tuple(paths), tuple(labels))


def _annotated(part: Path, classes: tuple[str, ...]) -> Files:
    """Read Tiny-ImageNet's list of validation images: file, class, and a box that is not needed."""
    places = {name: label for label, name in enumerate(classes)}
    found: dict[Path, int] = {}
    for number, line in enumerate((part / ANNOTATIONS).read_text(encoding="utf-8").splitlines(), start=1):
        where = f"{part / ANNOTATIONS}:{number}"
        fields = line.split("\t")
        if len(fields) < 2:
            raise ValueError(f"{where} must be a file and its class, got {line!r}")
        path = part / "images" / fields[0]
        if fields[1] not in places:
            raise ValueError(f"{where}: there is no class {fields[1]!r} among the training images")
        if Path(fields[0]).name != fields[0] or not path.is_file():
            raise ValueError(f"{where} names {path}, which is missing")
        found[path] = places[fields[1]]
    extra = [path for path in _image_files(part / "images") if path not in found]
    if extra or not found:
        unlabelled = f"{extra[0]} is not in {part / ANNOTATIONS}" if extra else f"{part / ANNOTATIONS} is empty"
        raise ValueError(f"{unlabelled}: expected a line for each image")
    return Files(tuple(found), tuple(found.values()))


def _check_announced(folder: Path, classes: tuple[str, ...]) -> None:
    """Compare the classes with Tiny-ImageNet's own list of them, where there is one."""
    if not (folder / "wnids.txt").is_file():
        return
    announced = set((folder / "wnids.txt").read_text(encoding="utf-8").splitlines())
    differ = sorted(announced ^ set(classes))
    if differ:
        state = "is missing, though it is" if differ[0] in announced else "is there, but not"
        raise ValueError(f"{folder / 'train' / differ[0]} {state} in the list of classes {folder / 'wnids.txt'}")


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _image_files(folder: Path) -> list[Path]:
    files = (path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and not path.name.startswith("."))
    return sorted(files)
