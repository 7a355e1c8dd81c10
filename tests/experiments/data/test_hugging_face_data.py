from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from PIL import Image

from factorized.experiments.data.hugging_face import Options, load_hugging_face, parse_address
from factorized.experiments.data.images import Images
from factorized.experiments.data.known import KNOWN
from factorized.experiments.data.load import load_images
from factorized.experiments.data.progress import silent
from tests.experiments.data.small_sets import TINY, small_images

CALLS: list[tuple[Any, ...]] = []


def as_dataset(x: torch.Tensor, y: torch.Tensor, names: list[str] | None, **columns: Any) -> datasets.Dataset:
    image, label = columns.pop("image", "image"), columns.pop("label", "label")
    pixels = x.permute(0, 2, 3, 1).numpy()
    pictures = [Image.fromarray(p[:, :, 0] if p.shape[-1] == 1 else p) for p in pixels]
    kind = datasets.ClassLabel(names=names) if names else datasets.Value("int64")
    features = {image: datasets.Image(), label: kind}
    content: dict[str, Any] = {image: pictures, label: y.tolist()}
    for name, value in columns.items():
        features[name], content[name] = value, [0] * len(y)
    return datasets.Dataset.from_dict(content, features=datasets.Features(features))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, datasets.DatasetDict]:
    """A hub of real data sets on the disk, instead of the real one."""
    there: dict[str, datasets.DatasetDict] = {}
    CALLS.clear()

    def load_dataset(name: str, config: str | None = None, revision: str | None = None) -> datasets.DatasetDict:
        CALLS.append((name, config, revision))
        if name not in there:
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{name}' doesn't exist on the Hub")
        folder = tmp_path / name.replace("/", "--")
        there[name].save_to_disk(str(folder))
        return datasets.load_from_disk(str(folder))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    datasets.disable_progress_bars()
    return there


def splits(images: Images, test: str = "test", **columns: Any) -> datasets.DatasetDict:
    names = list(images.classes)
    return datasets.DatasetDict(
        {
            "train": as_dataset(images.x_train, images.y_train, names, **columns),
            test: as_dataset(images.x_test, images.y_test, names, **columns),
        }
    )


@pytest.mark.parametrize("test", ["test", "validation", "valid"])
@pytest.mark.parametrize("channels", [1, 3])
def test_any_data_set_of_images_and_labels_is_read(hub: dict[str, Any], test: str, channels: int) -> None:
    images = small_images(channels=channels)
    hub["me/small"] = splits(images, test)
    told: list[tuple[str, int, int]] = []
    read = load_images("hf:me/small", progress=lambda *call: told.append(call))
    assert read.checksum == images.checksum
    assert (read.name, read.source, read.classes) == ("hf:me/small", "hf:me/small", images.classes)
    assert told == [("train images", 12, 12), (f"{test} images", 6, 6)]


@pytest.mark.parametrize(
    ("name", "repository", "columns", "test"),
    [
        ("cifar10", "uoft-cs/cifar10", {"image": "img"}, "test"),
        ("cifar100", "uoft-cs/cifar100", {"image": "img", "label": "fine_label"}, "test"),
        ("tiny-imagenet", "zh-plus/tiny-imagenet", {}, "valid"),
    ],
)
def test_the_papers_sets_are_read_by_their_names_on_the_hub(
    hub: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    repository: str,
    columns: dict[str, Any],
    test: str,
) -> None:
    small = {**vars(TINY), "hugging_face": KNOWN[name].hugging_face}
    monkeypatch.setitem(KNOWN, name, type(TINY)(**small))
    images = small_images(50, 10, 32, classes=10)
    extra = {"coarse_label": datasets.ClassLabel(names=["all"])} if name == "cifar100" else {}
    hub[repository] = splits(images, test, **columns, **extra)
    read = load_images(name, tmp_path / "empty")
    assert [(repository, None, None)] == CALLS
    assert (read.name, read.mean) == (name, TINY.mean)
    assert read.checksum == images.checksum


def test_columns_splits_config_and_revision_can_be_named(hub: dict[str, Any]) -> None:
    images = small_images()
    made = splits(images, image="photo", label="kind", other=datasets.ClassLabel(names=["all"]))
    hub["me/odd"] = datasets.DatasetDict({"first": made["train"], "second": made["test"]})
    address = "hf:me/odd?config=v2&revision=abc&image=photo&label=kind&train=first&test=second"
    assert load_images(address).checksum == images.checksum
    assert CALLS == [("me/odd", "v2", "abc")]


def test_whole_numbers_without_names_serve_as_labels_when_named(hub: dict[str, Any]) -> None:
    images = small_images()
    hub["me/plain"] = datasets.DatasetDict(
        {
            "train": as_dataset(images.x_train, images.y_train, None),
            "test": as_dataset(images.x_test, images.y_test, None),
        }
    )
    with pytest.raises(ValueError, match=r"must have one column of kind ClassLabel, it has 0 among .*\?label=COLUMN"):
        load_images("hf:me/plain")
    read = load_images("hf:me/plain?label=label")
    assert read.classes == ("0", "1", "2")
    assert read.checksum == images.checksum


def test_gray_training_images_and_colour_test_images_agree_in_channels(hub: dict[str, Any]) -> None:
    gray, colour = small_images(channels=1), small_images()
    names = list(gray.classes)
    hub["me/mixed"] = datasets.DatasetDict(
        {
            "train": as_dataset(gray.x_train, gray.y_train, names),
            "test": as_dataset(colour.x_test, colour.y_test, names),
        }
    )
    read = load_images("hf:me/mixed")
    assert torch.equal(read.x_train, gray.x_train.expand(-1, 3, -1, -1))
    assert torch.equal(read.x_test, colour.x_test)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("nobody/nothing", "data set nobody/nothing could not be loaded: .*doesn't exist.*Give a local .npz"),
        ("me/small?test=holdout", "must have a split holdout, it has train, test; name one by"),
        ("me/small?image=img", "train has no column 'img', it has image, label"),
        ("me/small?labels=x", "after \\? any of config, revision, image, label, train, test"),
        ("?label=x", "a Hugging Face data set is hf:OWNER/NAME"),
    ],
)
def test_a_wrong_name_says_what_is_there(hub: dict[str, Any], address: str, message: str) -> None:
    hub["me/small"] = splits(small_images())
    with pytest.raises(ValueError, match=message):
        load_images(f"hf:{address}")


def test_two_columns_of_labels_ask_which(hub: dict[str, Any]) -> None:
    hub["me/two"] = splits(small_images(), coarse=datasets.ClassLabel(names=["all"]))
    with pytest.raises(ValueError, match=r"it has 2 among image \(Image\), label \(ClassLabel\), coarse"):
        load_images("hf:me/two")


def test_a_row_without_a_label_is_named(hub: dict[str, Any]) -> None:
    images = small_images()
    hub["me/holes"] = splits(images)
    unlabelled = as_dataset(images.x_test, torch.tensor([0, 1, -1, 0, 1, 2]), list(images.classes))
    hub["me/holes"]["test"] = unlabelled
    with pytest.raises(ValueError, match="hf:me/holes, test row 2: expected an image and a label, got"):
        load_images("hf:me/holes")


def test_a_picture_of_another_size_is_named_by_its_row(hub: dict[str, Any]) -> None:
    images = small_images()
    made = splits(images)
    odd = as_dataset(torch.zeros(1, 3, 5, 9, dtype=torch.uint8), torch.tensor([0]), list(images.classes))
    made["train"] = datasets.concatenate_datasets([made["train"].select(range(11)), odd])
    hub["me/odd"] = made
    with pytest.raises(ValueError, match="hf:me/odd, train row 11 is 5×9, but hf:me/odd, train row 0 is 6×6"):
        load_images("hf:me/odd")


def test_an_address_is_split_into_its_parts() -> None:
    repository, options = parse_address("owner/name?label=fine&test=valid", Options)
    assert (repository, options.label, options.test, options.train) == ("owner/name", "fine", "valid", "train")


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs datasets, .*pip install '\.\[vision\]'"):
        load_hugging_face("a", "a/b", silent)


def test_labels_without_names_are_fewer_than_the_images(hub: dict[str, Any]) -> None:
    images = small_images(train=4, test=2)
    odd = as_dataset(images.x_train, torch.full((4,), 10**12), None)
    hub["a/odd"] = datasets.DatasetDict(train=odd, test=odd)
    with pytest.raises(ValueError, match=r"hf:a/odd\?label=label: labels must be in 0..7"):
        load_hugging_face("odd", "a/odd?label=label", silent)


@pytest.mark.parametrize("problem", [datasets.exceptions.DatasetGenerationError("cut off"), KeyError("features")])
def test_whatever_the_library_raises_says_what_to_give_instead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, problem: Exception
) -> None:
    def load_dataset(*arguments: object, **options: object) -> None:
        raise problem

    monkeypatch.chdir(tmp_path)  # where there is no folder data/
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"a/b could not be loaded: .*(cut off|features).* Give a local .npz"):
        load_hugging_face("b", "a/b", silent)
    with pytest.raises(ValueError, match=r"Put cifar-10-batches-py or cifar10.npz into a folder, .*: --data DIR"):
        load_images("cifar10")


def test_bars_are_not_written_into_files_and_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def load_dataset(place: str, *arguments: object, **options: object) -> None:
        seen.append((place, datasets.are_progress_bars_disabled()))
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setenv("HOME", "/home/me")
    datasets.enable_progress_bars()
    for terminal in (False, True):
        monkeypatch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal)
        with pytest.raises(ValueError, match="no network"):
            load_hugging_face("b", "~/photos", silent)
    assert seen == [("/home/me/photos", True), ("/home/me/photos", False)]
    assert not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()


def test_tries_of_a_network_that_is_not_there_are_not_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load_dataset(*arguments: object, **options: object) -> None:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 8s [Retry 5/5].")
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    level = logging.getLogger("huggingface_hub").level
    with pytest.raises(ValueError, match="no network"):
        load_hugging_face("b", "a/b", silent)
    assert not caplog.records
    assert logging.getLogger("huggingface_hub").level == level
