from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.experiments.models.build import MODELS, build_model
from factorized.experiments.models.resnet import ResNet, resnet, resnet32x2
from factorized.experiments.models.vgg import vgg19_nfc
from factorized.experiments.models.wide_resnet import WideBlock, wide_resnet

Make = Callable[[], nn.Module]
SMALL: dict[str, tuple[Make, int]] = {  # what keeps the tests short, and its image size
    "resnet8": (lambda: resnet(8, 10), 16),
    "resnet8, 1x1 shortcuts": (lambda: ResNet(8, (8, 16, 32), "conv", 10), 16),
    "vgg19": (lambda: vgg19_nfc(10, 1), 16),
    "wide resnet 10-2": (lambda: wide_resnet(10, 2, 10), 16),
}
every_small = pytest.mark.parametrize("name", SMALL)


def made(name: str, seed: int = 0) -> tuple[nn.Module, Tensor]:
    make, size = SMALL[name]
    torch.manual_seed(seed)
    return make(), torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(1))


@every_small
def test_the_seed_decides_the_weights(name: str) -> None:
    first, second, other = made(name)[0], made(name)[0], made(name, seed=1)[0]
    for (key, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


@every_small
def test_every_parameter_is_trained(name: str) -> None:
    model, x = made(name)
    loss = model(x).logsumexp(1).sum()
    loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.abs().sum() > 0, key


@every_small
def test_the_compiled_model_has_no_break_and_computes_the_same(name: str) -> None:
    model, x = made(name)
    expected = deepcopy(model)(x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)


@every_small
def test_channels_last_computes_the_same_and_stays_channels_last(name: str) -> None:
    model, x = made(name)
    expected = deepcopy(model).eval()(x)
    seen = []
    last = [module for module in model.modules() if isinstance(module, nn.Conv2d)][-1]
    last.register_forward_hook(lambda module, args, y: seen.append(y.is_contiguous(memory_format=torch.channels_last)))
    model = model.eval().to(memory_format=torch.channels_last)
    got = model(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert seen == [True]


@every_small
def test_the_model_can_be_factorized_and_composed(name: str) -> None:
    model, x = made(name)
    fz.factorize(model, rank=2).eval()
    torch.testing.assert_close(fz.compose(model)(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_every_named_model_maps_images_to_logits(name: str) -> None:
    with torch.device("meta"):
        model = build_model(name, 7, image_size=48, channels=1)
        assert model(torch.empty(2, 1, 48, 48)).shape == (2, 7)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "vgg19"])
def test_digits_are_large_enough_for_every_residual_network(name: str) -> None:
    with torch.device("meta"):
        assert build_model(name, 10, image_size=8, channels=1)(torch.empty(2, 1, 8, 8)).shape == (2, 10)


def close_to(weight: Tensor, std: float) -> bool:
    """Return whether a weight looks drawn from N(0, std²), to five deviations."""
    weight = weight.detach()
    slack = 5 / math.sqrt(2 * weight.numel())
    return abs(float(weight.std()) / std - 1) < slack and abs(float(weight.mean())) < 5 * std / weight.numel() ** 0.5


@pytest.mark.parametrize(
    ("make", "conv_std", "linear_std"),
    [
        (lambda: resnet(20), "in", lambda linear: math.sqrt(2 / linear.in_features)),
        (lambda: ResNet(8, (16, 32, 64), "conv", 10), "in", lambda linear: math.sqrt(2 / linear.in_features)),
        (vgg19_nfc, "in", lambda linear: 0.01),
        (lambda: wide_resnet(16, 2), "out", lambda linear: 1 / math.sqrt(3 * linear.in_features)),
    ],
    ids=["resnet", "resnet with convolutions as shortcuts", "vgg", "wide resnet"],
)
def test_weights_are_drawn_as_in_the_paper(make: Make, conv_std: str, linear_std: Callable[[nn.Linear], float]) -> None:
    torch.manual_seed(0)
    model = make()
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            fan = module.in_channels if conv_std == "in" else module.out_channels
            assert close_to(module.weight, math.sqrt(2 / (fan * math.prod(module.kernel_size)))), name
        elif isinstance(module, nn.Linear):
            assert close_to(module.weight, linear_std(module)), name
        elif isinstance(module, nn.BatchNorm2d):
            assert torch.all(module.weight == 1), name
            assert torch.all(module.bias == 0), name


def test_vgg_and_wide_resnet_start_with_no_bias() -> None:
    for model in (vgg19_nfc(), wide_resnet(10, 1)):
        assert torch.all(model.linear.bias == 0)


def test_vgg_is_sixteen_convolutions_and_one_linear_layer() -> None:
    kinds = [type(module) for module in vgg19_nfc().modules()]
    assert kinds.count(nn.Conv2d) == 16
    assert kinds.count(nn.BatchNorm2d) == 16
    assert kinds.count(nn.Linear) == 1


def test_resnet32x2_has_1x1_shortcuts_where_the_size_changes_and_nowhere_else() -> None:
    with torch.device("meta"):
        model = resnet32x2()
    pointwise = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1)]
    assert [(m.in_channels, m.out_channels, m.stride) for m in pointwise] == [(64, 128, (2, 2)), (128, 256, (2, 2))]


def test_thin_resnets_have_shortcuts_without_parameters() -> None:
    model = resnet(20)
    assert all(m.kernel_size == (3, 3) for m in model.modules() if isinstance(m, nn.Conv2d))
    x = torch.randn(1, 16, 8, 8)
    y = model.stages[1][0].shortcut(x)
    assert torch.equal(y[:, 8:24], x[:, :, ::2, ::2])
    assert not y[:, :8].any()
    assert not y[:, 24:].any()


def test_a_wide_block_that_keeps_its_shape_adds_its_raw_input() -> None:
    block = WideBlock(8, 8, 1)
    nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 8, 5, 5)
    assert torch.equal(block(x), x)


def test_a_wide_block_that_changes_shape_convolves_its_activated_input() -> None:
    block = WideBlock(8, 16, 2).eval()
    nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 8, 6, 6)
    torch.testing.assert_close(block(x), block.shortcut(block.bn1(x).relu()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: resnet(31), "depth must be 6n \\+ 2"),
        (lambda: resnet(2), "depth must be 6n \\+ 2"),
        (lambda: wide_resnet(27), "depth must be 6n \\+ 4"),
        (lambda: wide_resnet(28, 0), "width must be a whole number of at least 1"),
        (lambda: vgg19_nfc(10, 0), "pool must be .* got 0"),
    ],
)
def test_a_wrong_size_says_what_is_allowed(make: Make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
