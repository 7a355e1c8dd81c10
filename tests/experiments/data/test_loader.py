from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from factorized.experiments.data.loader import ImageLoader, TensorSource, epoch_order
from factorized.experiments.data.prepare import prepare
from factorized.experiments.data.prepared import read_prepared
from tests.experiments.data.small_sets import small_images, write_npz


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
        ({"batch": 0}, "batch must be a whole number of at least 1, got 0"),
        ({"batch": 4, "workers": -1}, "workers must be a whole number of at least 0"),
        ({"batch": 4, "rank": 2, "world": 2}, "rank must be in 0..1, got 2"),
        ({"batch": 24, "drop_last": True}, "batch=24 is more than the 23 images there are"),
    ],
)
def test_wrong_arguments_say_what_is_allowed(source: TensorSource, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageLoader(source, **arguments)


def test_images_and_labels_must_be_of_one_length() -> None:
    with pytest.raises(ValueError, match="x and y must be of one length"):
        TensorSource(torch.zeros(2), torch.zeros(3))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_mapped_file_gives_the_images_that_are_in_it(tmp_path: Path, workers: int) -> None:
    expected = small_images()
    images = read_prepared(prepare(str(write_npz(tmp_path / "small.npz", expected)), tmp_path / "data"))
    loader = ImageLoader(TensorSource(images.x_train, images.y_train), 5, shuffle=False, workers=workers)
    batches = list(loader.epoch(0))
    assert torch.equal(torch.cat([x for x, _ in batches]), expected.x_train)
    assert torch.equal(torch.cat([y for _, y in batches]), expected.y_train)
