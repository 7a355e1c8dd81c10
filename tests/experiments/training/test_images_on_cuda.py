"""Augmentation on a GPU: no wait for it, and inside a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from factorized.experiments.data.augment import crop_flip, draw_crops, normalize, random_crop_flip
from factorized.experiments.data.loader import ImageLoader, TensorSource
from tests.experiments.data.small_sets import small_images
from tests.on_gpu import needs_cuda

pytestmark = needs_cuda


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_nothing_waits_for_the_device() -> None:
    images = small_images().to("cuda")
    index = torch.tensor([1, 5, 5, 9], device="cuda")
    try:
        torch.cuda.set_sync_debug_mode("error")
        normalize(random_crop_flip(images.x_train, 4, index), images.mean, images.std, torch.bfloat16)
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
def test_a_captured_step_draws_anew_at_each_replay(compiled: bool) -> None:
    images = small_images(train=64, side=32).to("cuda")
    index = torch.arange(64, device="cuda")

    def augment(x: Tensor, index: Tensor) -> Tensor:
        return normalize(random_crop_flip(x, 4, index), images.mean, images.std, torch.bfloat16)

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


def test_the_loader_puts_batches_on_the_device() -> None:
    images = small_images()
    loader = ImageLoader(TensorSource(images.x_train, images.y_train), 5, workers=1, device="cuda")
    batches = list(loader.epoch(0))
    assert [x.device.type for x, _ in batches] == ["cuda"] * 3
    assert sum(len(y) for _, y in batches) == 12
