"""Augmentation on a GPU: no wait for it, and inside a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from factorized.experiments.data.augment import crop_flip, draw_crops, normalize
from factorized.experiments.training.processes import Processes
from factorized.experiments.training.source import epoch_order
from factorized.experiments.training.streamed import Streamed
from tests.experiments.data.small_sets import small_images
from tests.on_gpu import needs_cuda

pytestmark = needs_cuda


def cropped(x: Tensor, index: Tensor) -> Tensor:
    return crop_flip(x, *draw_crops(len(index), 4, x.device), 4, index)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_nothing_waits_for_the_device() -> None:
    images = small_images().to("cuda")
    index = torch.tensor([1, 5, 5, 9], device="cuda")
    try:
        torch.cuda.set_sync_debug_mode("error")
        normalize(cropped(images.x_train, index), images.mean, images.std, torch.bfloat16)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_device_computes_what_the_host_does() -> None:
    images = small_images()
    draws = draw_crops(12, 4, "cpu")
    expected = normalize(crop_flip(images.x_train, *draws, 4), images.mean, images.std)
    got = normalize(crop_flip(images.x_train.cuda(), *(draw.cuda() for draw in draws), 4), images.mean, images.std)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-6, atol=1e-6)
    assert images.to("cuda").checksum == images.checksum


@pytest.mark.parametrize("compiled", [False, True])
def test_a_captured_step_draws_again_at_each_replay(compiled: bool) -> None:
    images = small_images(train=64, side=32).to("cuda")
    index = torch.arange(64, device="cuda")

    def augment(x: Tensor, index: Tensor) -> Tensor:
        return normalize(cropped(x, index), images.mean, images.std, torch.bfloat16)

    step = torch.compile(augment, fullgraph=True) if compiled else augment
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(images.x_train, index)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step(images.x_train, index)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(y.clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    assert seen[0].shape == (64, 3, 32, 32)


def test_compiled_and_eager_give_the_same_images_from_the_same_draws() -> None:
    images = small_images(train=64, side=32).to("cuda")
    draws = draw_crops(64, 4, "cuda")

    def augment(x: Tensor, top: Tensor, left: Tensor, flipped: Tensor) -> Tensor:
        return normalize(crop_flip(x, top, left, flipped, 4), images.mean, images.std, torch.bfloat16)

    expected = augment(images.x_train, *draws)
    got = torch.compile(augment, fullgraph=True)(images.x_train, *draws)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


def test_streamed_batches_arrive_on_the_device() -> None:
    images = small_images()
    source = Streamed(images, 4, Processes(torch.device("cuda")), workers=1)
    source.start(0, 1)
    for rows in epoch_order(12, 0, 1).split(4):
        source.feed()
        x, index, y = source.take()
        assert x.device.type == y.device.type == "cuda"
        assert torch.equal(x[index].cpu(), images.x_train[rows])
        assert torch.equal(y.cpu(), images.y_train[rows])
