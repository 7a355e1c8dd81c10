"""The first convolution may see more channels than images have, all zeros: its results do not change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import factorized as fz
from factorized.experiments.models import stem
from factorized.experiments.models.resnet import resnet
from factorized.experiments.models.stem import convolve_images, convolve_with_zeros, gains_by_zeros


@pytest.mark.parametrize("channels", [1, 3, 8, 9])
def test_zeros_beside_the_channels_change_neither_results_nor_gradients(channels: int) -> None:
    conv = nn.Conv2d(channels, 5, 3, stride=2, padding=1, dilation=2).double()
    x = torch.randn(2, channels, 9, 7, dtype=torch.float64, requires_grad=True)
    given = (x, conv.weight, conv.bias)
    ours, usual = convolve_with_zeros(conv, x), conv(x)
    torch.testing.assert_close(ours, usual)
    gradients = (torch.autograd.grad(y.square().sum(), given) for y in (ours, usual))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)


CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "three channels": (lambda: nn.Conv2d(3, 4, 3), True),
    "eight channels": (lambda: nn.Conv2d(8, 4, 3), False),
    "groups": (lambda: nn.Conv2d(3, 3, 3, groups=3), False),
    "circular padding": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), False),
    "a product": (lambda: fz.FactorizedConv2d(3, 4, 3, 2), False),
}


@pytest.mark.parametrize(("make", "gains"), CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
def test_plain_convolutions_of_few_channels_gain_by_zeros_in_half_precision(
    make: Callable[[], nn.Module], gains: bool
) -> None:
    conv, x = make(), torch.randn(2, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert gains_by_zeros(conv, x) is gains
    assert not gains_by_zeros(conv, x)


def test_convolutions_with_hooks_are_called() -> None:
    conv, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)
    conv.register_forward_hook(lambda *_: None)
    with torch.autocast("cpu", torch.bfloat16):
        assert not gains_by_zeros(conv, x)


def test_on_a_cpu_the_convolution_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stem, "convolve_with_zeros", lambda conv, x: pytest.fail("filled up with zeros"))
    network, x = resnet(8), torch.randn(2, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        network(x)
        assert torch.equal(convolve_images(network.conv1, x), network.conv1(x))
