"""Images from a Hugging Face data set."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl

import torch
from torch import Tensor

from factorized.experiments.data.decode import Pixels, as_many_channels, stack_pixels, to_pixels
from factorized.experiments.data.extras import need
from factorized.experiments.data.images import Images, numbered_classes
from factorized.experiments.data.known import KNOWN, make_images
from factorized.experiments.data.progress import Progress

TESTS = ("test", "validation", "valid", "val")
BATCH = 256
if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Chosen = TypeVar("Chosen", bound=DataclassInstance)


@dataclass(frozen=True)
class Options:
    """The options after ``?`` in a data set's name; empty ones are detected."""

    config: str = ""
    revision: str = ""
    image: str = ""  # the column of images
    label: str = ""  # the column of labels
    train: str = "train"  # the split to train on
    test: str = ""  # the split to test on


def load_hugging_face(name: str, address: str, progress: Progress) -> Images:
    """Return the data set at ``address``, OWNER/NAME or OWNER/NAME?label=COLUMN&test=SPLIT, under ``name``."""
    repository, options = parse_address(address, Options)
    place = str(Path(repository).expanduser()) if repository.startswith("~") else repository  # no shell saw it
    datasets = need("datasets", "datasets", f"the Hugging Face data set {repository}")
    try:
        with bars_in_terminals(datasets):
            found = datasets.load_dataset(place, options.config or None, revision=options.revision or None)
    except Exception as error:  # datasets, its file readers and the network raise errors of many types
        local = (
            f"Put {KNOWN[name].folder} or {name}.npz into a folder, and give that: --data DIR"
            if name in KNOWN
            else "Give a local .npz, CIFAR folder or image folder instead: --data PATH"
        )
        raise ValueError(f"the Hugging Face data set {repository} could not be loaded: {error}. {local}") from error
    where = f"hf:{address}"
    train = _split(where, found, (options.train,))
    test = _split(where, found, (options.test,) if options.test else TESTS)
    image = options.image or _column(where, found[train], "Image", "image")
    label = options.label or _column(where, found[train], "ClassLabel", "label")
    parts = (_read(where, found[split], split, image, label, progress) for split in (train, test))
    (x_train, y_train), (x_test, y_test) = parts
    names = getattr(found[train].features[label], "names", None)
    classes = tuple(names) if names else numbered_classes(where, y_train, y_test)
    x_train, x_test = as_many_channels(x_train, x_test)
    return make_images(name, (x_train, y_train), (x_test, y_test), classes, where)


@contextmanager
def bars_in_terminals(datasets: Any) -> Iterator[None]:
    """Show progress bars only in a terminal, and hide the hub's retry messages."""
    logger = logging.getLogger("huggingface_hub")
    level, silent = logger.level, datasets.are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if not silent:
            datasets.enable_progress_bars()


def parse_address(address: str, options: type[Chosen]) -> tuple[str, Chosen]:
    """Return the repository of OWNER/NAME?key=value&key=value, and its keys and values as a dataclass of options."""
    repository, _, query = address.partition("?")
    given = dict(parse_qsl(query, keep_blank_values=True))
    allowed = [field.name for field in fields(options)]
    wrong = sorted(set(given) - set(allowed))
    if not repository or wrong:
        raise ValueError(
            f"a Hugging Face data set is hf:OWNER/NAME, and after ? any of {', '.join(allowed)} as key=value joined "
            f"by &; got hf:{address}"
        )
    return repository, options(**given)


def _split(where: str, found: Any, names: tuple[str, ...]) -> str:
    for name in names:
        if name in found:
            return name
    raise ValueError(
        f"{where} must have a split {' or '.join(names)}, it has {', '.join(found)}; name one by ?train= or &test="
    )


def _column(where: str, split: Any, kind: str, option: str) -> str:
    features = {name: type(feature).__name__ for name, feature in split.features.items()}
    fitting = [name for name, its_kind in features.items() if its_kind == kind]
    if len(fitting) != 1:
        columns = ", ".join(f"{name} ({its_kind})" for name, its_kind in features.items())
        raise ValueError(
            f"{where} must have one column of kind {kind}, it has {len(fitting)} among {columns}; name one by "
            f"?{option}=COLUMN"
        )
    return fitting[0]


def _read(
    where: str, split: Any, name: str, image: str, label: str, progress: Progress
) -> tuple[Tensor, Tensor]:  # (n, channels, height, width) uint8, (n,) int64
    for column, option in ((image, "image"), (label, "label")):
        if column not in split.features:
            raise ValueError(
                f"{where}: {name} has no column {column!r}, it has {', '.join(split.features)}; see ?{option}="
            )
    labels: list[int] = []

    def rows() -> Iterator[tuple[str, Pixels]]:
        for batch in split.select_columns([image, label]).iter(batch_size=BATCH):
            for picture, number in zip(batch[image], batch[label], strict=True):
                row = f"{where}, {name} row {len(labels)}"
                if picture is None or not isinstance(number, int) or number < 0:
                    raise ValueError(f"{row}: expected an image and a label, got {type(picture).__name__}, {number!r}")
                labels.append(number)
                yield row, to_pixels(picture, row)

    x = stack_pixels(rows(), split.num_rows, f"{name} images", progress)
    return x, torch.tensor(labels, dtype=torch.int64)
