from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from factorized.vision.data.loader import ImageLoader, epoch_order
from factorized.vision.data.prepare import prepare
from factorized.vision.data.sources import (
    FileSource,
    ImageSource,
    MappedSource,
    TensorSource,
    open_source,
    source_statistics,
)
from factorized.vision.data.statistics import channel_statistics
from tests.vision.data.small_sets import pictures, save, small_images, write_folder, write_npz


@pytest.fixture
def source() -> TensorSource:
    images = small_images(train=23)
    return TensorSource(images.x_train, torch.arange(23))


def labels(loader: ImageLoader, epoch: int) -> list[list[int]]:
    return [y.tolist() for _, y in loader.epoch(epoch)]


def joined(lists: list[list[int]]) -> list[int]:
    return [item for each in lists for item in each]


def test_the_order_is_a_shuffle_that_seed_and_epoch_decide() -> None:
    orders = {(seed, epoch): epoch_order(100, seed, epoch).tolist() for seed in (0, 1) for epoch in range(3)}
    assert all(sorted(order) == list(range(100)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 6
    torch.manual_seed(99)
    state = torch.random.get_rng_state()
    assert epoch_order(100, 1, 2).tolist() == orders[1, 2]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_order_does_not_change_between_versions() -> None:
    assert epoch_order(8, 0, 0).tolist() == [7, 1, 6, 0, 5, 3, 2, 4]


def test_an_epoch_holds_every_image_once_with_its_label(source: TensorSource) -> None:
    loader = ImageLoader(source, 5, seed=3)
    batches = list(loader.epoch(0))
    assert len(loader) == len(batches) == 5
    assert [len(y) for _, y in batches] == [5, 5, 5, 5, 3]
    order = torch.cat([y for _, y in batches])
    assert torch.equal(order, epoch_order(23, 3, 0))
    assert torch.equal(torch.cat([x for x, _ in batches]), source.x[order])


def test_an_epoch_is_the_same_whether_or_not_those_before_it_were_run(source: TensorSource) -> None:
    whole = ImageLoader(source, 5, seed=3)
    run = [labels(whole, epoch) for epoch in range(3)]
    assert run[0] != run[1]
    assert labels(ImageLoader(source, 5, seed=3), 2) == run[2]
    assert labels(whole, 1) == run[1]


def test_worker_processes_change_nothing(source: TensorSource) -> None:
    loader = ImageLoader(source, 5, seed=3, workers=2)
    for epoch in (1, 0):
        assert labels(loader, epoch) == labels(ImageLoader(source, 5, seed=3), epoch)


def test_the_random_state_of_the_training_is_left_alone(source: TensorSource) -> None:
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    list(ImageLoader(source, 5).epoch(0))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_last_short_batch_can_be_dropped_and_the_order_kept(source: TensorSource) -> None:
    dropped = ImageLoader(source, 5, drop_last=True)
    assert [len(batch) for batch in labels(dropped, 0)] == [5] * 4 == [5] * len(dropped)
    assert joined(labels(ImageLoader(source, 5, shuffle=False), 7)) == list(range(23))


@pytest.mark.parametrize("world", [2, 3, 5])
def test_processes_share_an_epoch_in_equal_parts(source: TensorSource, world: int) -> None:
    loaders = [ImageLoader(source, 4, rank=rank, world=world) for rank in range(world)]
    parts = [joined(labels(loader, 1)) for loader in loaders]
    assert {len(part) for part in parts} == {-(-23 // world)}
    assert set(joined(parts)) == set(range(23))
    assert len({len(loader) for loader in loaders}) == 1


def test_processes_share_a_test_set_without_counting_an_image_twice(source: TensorSource) -> None:
    parts = [joined(labels(ImageLoader(source, 4, shuffle=False, rank=rank, world=5), 0)) for rank in range(5)]
    assert sorted(joined(parts)) == list(range(23))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": 0}, "batch must be a whole number from 1, got 0"),
        ({"batch": 4, "workers": -1}, "workers must be a whole number from 0"),
        ({"batch": 4, "rank": 2, "world": 2}, "rank must be in 0..1, got 2"),
        ({"batch": 24, "drop_last": True}, "batch=24 is more than the 23 images there are"),
    ],
)
def test_wrong_arguments_say_what_is_allowed(source: TensorSource, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageLoader(source, **arguments)


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    return prepare(str(write_npz(tmp_path / "small.npz", small_images())), tmp_path / "data")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "files", small_images())


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_mapped_file_gives_the_images_that_are_in_it(prepared: Path, part: Any, workers: int) -> None:
    images = small_images()
    x, y = (images.x_train, images.y_train) if part == "train" else (images.x_test, images.y_test)
    source = open_source(prepared, part)
    assert len(source) == len(x)
    batches = list(ImageLoader(source, 5, shuffle=False, workers=workers).epoch(0))
    assert torch.equal(torch.cat([batch for batch, _ in batches]), x)
    assert torch.equal(torch.cat([labels for _, labels in batches]), y)


def test_a_mapped_source_travels_to_workers_as_its_path(prepared: Path) -> None:
    source = open_source(prepared, "train")
    source[[0]]
    sent = pickle.dumps(source)
    assert len(sent) < 1000
    assert torch.equal(pickle.loads(sent)[[3]][0], small_images().x_train[[3]])


@pytest.mark.parametrize("workers", [0, 1])
def test_image_files_are_decoded_when_asked_for(files: Path, workers: int) -> None:
    images = small_images()
    source = open_source(files, "train")
    order = torch.argsort(images.y_train, stable=True)
    (x, y), *_ = ImageLoader(source, 12, shuffle=False, workers=workers).epoch(0)
    assert torch.equal(x, images.x_train[order])
    assert torch.equal(y, images.y_train[order])


def test_gray_files_get_as_many_channels_as_asked_for(tmp_path: Path) -> None:
    images = small_images(channels=1)
    folder = write_folder(tmp_path, images)
    for channels in (1, 3):
        x, _ = open_source(folder, "test", channels)[[0]]  # type: ignore[arg-type]
        assert torch.equal(x, images.x_test[:1].expand(-1, channels, -1, -1))


def test_a_file_of_another_size_is_named_when_it_comes(files: Path) -> None:
    odd = files / "train" / "kind 1" / "0004.png"
    save(odd, pictures(1, side=9)[0])
    with pytest.raises(ValueError, match=rf"{odd} is 9×9, but \S*kind 0\S* is 6×6"):
        list(ImageLoader(open_source(files, "train"), 1).epoch(0))


def test_a_colour_file_in_a_gray_set_is_an_error(files: Path) -> None:
    with pytest.raises(ValueError, match="is an image in colour, with channels=1"):
        open_source(files, "train", 1)[[0, 1]]


@pytest.mark.parametrize("kind", ["mapped", "files"])
def test_statistics_of_a_source_are_those_of_its_images(prepared: Path, files: Path, kind: str) -> None:
    source: ImageSource = open_source(prepared if kind == "mapped" else files, "train")
    assert isinstance(source, MappedSource if kind == "mapped" else FileSource)
    assert source_statistics(source) == channel_statistics([small_images().x_train])


def test_a_wrong_part_or_file_says_what_is_allowed(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='part must be "train" or "test"'):
        open_source(prepared, "val")  # type: ignore[arg-type]
    prepared.write_bytes(b"")
    with pytest.raises(ValueError, match="is damaged"):
        open_source(prepared, "train")
    with pytest.raises(ValueError, match="x and y must be of one length"):
        TensorSource(torch.zeros(2), torch.zeros(3))
