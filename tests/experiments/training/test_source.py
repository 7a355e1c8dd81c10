from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from factorized.experiments.data.prepare import prepare
from factorized.experiments.data.prepared import read_prepared
from factorized.experiments.training.processes import Processes
from factorized.experiments.training.source import OnDevice, Source, draws_seed, epoch_order
from factorized.experiments.training.streamed import Streamed
from factorized.experiments.training.train import train
from tests.experiments.data.small_sets import small_images, write_npz
from tests.experiments.training.small import assert_same_run, digits, recipe

CPU = Processes(torch.device("cpu"))


def sources(batch: int, processes: Processes = CPU) -> list[Source]:
    return [OnDevice(digits(), batch, processes), Streamed(digits(), batch, processes)]


def taken(source: Source, seed: int, epoch: int, step: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return the images and labels of every step from ``step`` to the end of the epoch."""
    source.start(seed, epoch, step)
    batches = []
    for _ in range(step, source.steps):
        source.feed()
        x, index, y = source.take()
        batches.append((x[index].clone(), y.clone()))
    return batches


def assert_same(left: list[tuple[Tensor, Tensor]], right: list[tuple[Tensor, Tensor]]) -> None:
    assert len(left) == len(right)
    for (x, y), (other_x, other_y) in zip(left, right, strict=True):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)


def test_the_order_is_a_shuffle_that_seed_and_epoch_decide() -> None:
    orders = {(seed, epoch): epoch_order(100, seed, epoch).tolist() for seed in (0, 1) for epoch in range(3)}
    assert all(sorted(order) == list(range(100)) for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 6


def test_the_order_and_the_draws_do_not_change_between_versions() -> None:
    assert epoch_order(8, 0, 0).tolist() == [7, 1, 6, 0, 5, 3, 2, 4]
    assert draws_seed(1, 2) == 6_267_803_784_824_751_413


@pytest.mark.parametrize("kind", [0, 1], ids=["on the device", "streamed"])
def test_the_random_state_of_the_training_is_left_alone(kind: int) -> None:
    state = torch.random.get_rng_state()
    taken(sources(100)[kind], 0, 0)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_mapped_file_gives_the_images_that_are_in_it(tmp_path: Path, workers: int) -> None:
    expected = small_images()
    images = read_prepared(prepare(str(write_npz(tmp_path / "small.npz", expected)), tmp_path / "data"))
    source = Streamed(images, 4, CPU, workers)
    for epoch in (1, 0):
        order = epoch_order(12, 0, epoch)
        assert_same(taken(source, 0, epoch), [(expected.x_train[i], expected.y_train[i]) for i in order.split(4)])


@pytest.mark.parametrize("kind", [0, 1], ids=["on the device", "streamed"])
def test_an_epoch_takes_the_images_in_the_order_of_its_seed_and_number(kind: int) -> None:
    source = sources(100)[kind]
    assert source.steps == 5  # of 512 images
    for seed, epoch in ((0, 0), (0, 1), (7, 0)):
        order = epoch_order(512, seed, epoch)
        expected = [(digits().x_train[rows], digits().y_train[rows]) for rows in order[:500].split(100)]
        assert_same(taken(source, seed, epoch), expected)
    assert_same(taken(source, 0, 1, step=3), taken(sources(100)[kind], 0, 1)[3:])


@pytest.mark.parametrize("kind", [0, 1], ids=["on the device", "streamed"])
def test_processes_share_every_batch_between_them(kind: int) -> None:
    shares = [taken(sources(64, Processes(torch.device("cpu"), rank, 4))[kind], 3, 2) for rank in range(4)]
    whole = taken(sources(64)[kind], 3, 2)
    joined = [
        (torch.stack([x for x, _ in parts], 1).flatten(0, 1), torch.stack([y for _, y in parts], 1).flatten())
        for parts in zip(*shares, strict=True)
    ]
    assert_same(joined, whole)


def test_processes_stop_with_the_last_whole_batch_of_all() -> None:
    images = digits(511)  # 512 would fill one more batch, and padding for two processes would too
    steps = {Streamed(images, 64, Processes(torch.device("cpu"), rank, 2)).steps for rank in range(2)}
    assert steps == {7} == {OnDevice(images, 64, CPU).steps}


@pytest.mark.parametrize("kind", [OnDevice, Streamed])
def test_a_batch_that_processes_cannot_share_is_refused(kind: type) -> None:
    with pytest.raises(ValueError, match="cannot be shared by 3 processes; make it a multiple of 3"):
        kind(digits(), 64, Processes(torch.device("cpu"), 0, 3))


def test_a_batch_on_the_device_may_be_taken_past_the_end_of_an_epoch() -> None:
    source = OnDevice(digits(), 256, CPU)
    source.start(0, 0)
    batches = [source.take()[1].clone() for _ in range(5)]  # as a capture does, to warm up
    assert torch.equal(batches[0], batches[2])


def test_the_fed_batch_stays_in_one_place() -> None:
    source = Streamed(digits(), 64, CPU)
    source.start(0, 0)
    source.feed()
    before = [tensor.data_ptr() for tensor in source.take()]
    source.feed()
    assert [tensor.data_ptr() for tensor in source.take()] == before
    assert source.take()[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_streamed_run_ends_with_the_bits_of_one_on_the_device(tmp_path: Path, workers: int) -> None:
    changes = ("data.place=loader", f"data.workers={workers}")
    train(recipe(*changes), digits(), tmp_path / "streamed", device="cpu")
    train(recipe(), digits(), tmp_path / "device", device="cpu")
    assert_same_run(tmp_path / "streamed", tmp_path / "device")


def test_orders_and_draws_of_seeds_and_epochs_start_from_different_numbers() -> None:
    numbers = [draws_seed(seed, epoch) for seed in range(20) for epoch in range(20)]
    assert len(set(numbers)) == len(numbers)
    generators = [torch.Generator().manual_seed(number) for number in numbers[:50]]
    orders = {tuple(torch.randperm(512, generator=generator).tolist()) for generator in generators}
    assert not orders & {tuple(epoch_order(512, 0, epoch).tolist()) for epoch in range(20)}
