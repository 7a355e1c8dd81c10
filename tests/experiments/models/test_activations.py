"""Norm, shortcut and ReLU as one function: without the kernels, they are the layers one after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from factorized.experiments.models.normalized import layers, tiles
from factorized.experiments.models.normalized.convolutions import _follow as follow
from factorized.experiments.models.normalized.layers import activate, norm_suits
from factorized.experiments.models.resnet import resnet
from factorized.experiments.models.vgg import vgg19_nfc
from factorized.experiments.models.wide_resnet import wide_resnet


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("has_shortcut", [True, False])
def test_without_kernels_it_is_the_norm_the_sum_and_relu(training: bool, has_shortcut: bool) -> None:
    norm = nn.BatchNorm2d(6).train(training)
    x = torch.randn(3, 6, 4, 4)
    shortcut = torch.randn_like(x) if has_shortcut else None
    found = activate(norm, x, shortcut)
    fresh = nn.BatchNorm2d(6).train(training)
    assert torch.equal(found, F.relu(fresh(x) + shortcut if shortcut is not None else fresh(x)))
    assert all(torch.equal(*pair) for pair in zip(norm.buffers(), fresh.buffers(), strict=True))


NORMS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "in training": (lambda: nn.BatchNorm2d(6), True),
    "in evaluation mode": (lambda: nn.BatchNorm2d(6).eval(), False),
    "without scale and shift": (lambda: nn.BatchNorm2d(6, affine=False), False),
    "without running statistics": (lambda: nn.BatchNorm2d(6, track_running_stats=False), False),
    "that averages over all batches": (lambda: nn.BatchNorm2d(6, momentum=None), False),
    "of several processes": (lambda: nn.SyncBatchNorm(6), False),
    "of groups": (lambda: nn.GroupNorm(2, 6), False),
}


@pytest.mark.parametrize(("make", "suits"), NORMS.values(), ids=NORMS.keys())
def test_plain_norms_in_training_suit_the_kernels_in_half_precision(make: Callable[[], nn.Module], suits: bool) -> None:
    norm, x = make(), torch.randn(2, 6, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm_suits(x, norm) is suits
    assert not norm_suits(x, norm)


@pytest.mark.parametrize("make", [nn.BatchNorm2d, nn.Identity, lambda channels: nn.GroupNorm(2, channels)])
@pytest.mark.parametrize("hooked", [False, True])
def test_only_what_nobody_else_has_is_written_over(make: Callable[[int], nn.Module], hooked: bool) -> None:
    norm, (x, shortcut) = make(4), torch.randn(2, 3, 4, 5, 5)
    seen: list[Tensor] = []
    if hooked:
        norm.register_forward_hook(lambda module, given, output: seen.append(output))
    before = x.clone(), shortcut.clone()
    expected = F.relu(norm(x) + shortcut)
    seen.clear()
    torch.testing.assert_close(activate(norm, x, shortcut), expected)
    assert torch.equal(x, before[0])
    assert torch.equal(shortcut, before[1])
    if hooked:
        assert seen[0].min() < 0  # not yet activated


def test_a_network_that_fx_recorded_writes_over_nothing_that_a_hook_keeps() -> None:
    recorded, x = torch.fx.symbolic_trace(resnet(8).eval()), torch.randn(2, 3, 16, 16)
    seen: list[tuple[Tensor, Tensor]] = []
    for module in recorded.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(lambda module, given, output: seen.append((output, output.clone())))
    recorded(x)
    assert len(seen) == 7
    assert all(torch.equal(*pair) for pair in seen)


def test_a_hook_on_every_module_keeps_what_they_return() -> None:
    network, seen = resnet(8).eval(), list[tuple[Tensor, Tensor]]()
    hook = register_module_forward_hook(lambda module, given, output: seen.append((output, output.clone())))
    try:
        network(torch.randn(2, 3, 16, 16))
    finally:
        hook.remove()
    assert len(seen) > 7
    assert all(torch.equal(*pair) for pair in seen)


def test_norms_suit_the_kernels_in_compiled_code_too() -> None:
    norm, x = nn.BatchNorm2d(6), torch.zeros(2, 6, 4, 4)
    compiled = torch.compile(lambda x: x + norm_suits(x, norm), fullgraph=True, backend="eager", dynamic=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(x).eq(1).all()
    assert compiled(x).eq(0).all()


def test_what_autocast_leaves_in_float64_does_not_suit_the_kernels() -> None:
    norm, x = nn.BatchNorm2d(6).double(), torch.randn(2, 6, 4, 4, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert F.conv2d(x, x).dtype == torch.float64
        assert not norm_suits(x, norm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_running_statistics_of_any_type_follow_those_of_a_batch(dtype: torch.dtype) -> None:
    norm = nn.BatchNorm2d(2).to(dtype)
    follow(norm, torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0]))
    torch.testing.assert_close(norm.running_mean, torch.tensor([0.1, 0.2], dtype=dtype))
    torch.testing.assert_close(norm.running_var, torch.tensor([1.2, 1.4], dtype=dtype))
    assert norm.num_batches_tracked == 1


def test_norms_of_other_tensors_do_not_suit_the_kernels() -> None:
    class Other(Tensor):
        pass

    norm = nn.BatchNorm2d(6)
    norm.running_mean = norm.running_mean.as_subclass(Other)  # type: ignore[union-attr]
    with torch.autocast("cpu", torch.bfloat16):
        assert not norm_suits(torch.randn(2, 6, 4, 4), norm)


def test_norms_with_hooks_do_not_suit_the_kernels() -> None:
    norm = nn.BatchNorm2d(6)
    norm.register_forward_hook(lambda *_: None)
    with torch.autocast("cpu", torch.bfloat16):
        assert not norm_suits(torch.randn(2, 6, 4, 4), norm)


@pytest.mark.parametrize(
    ("make", "count"), [(lambda: resnet(8), 7), (lambda: wide_resnet(10, 1), 7), (vgg19_nfc, 16)], ids=["r", "w", "v"]
)
def test_every_norm_before_a_relu_is_one_of_these(
    make: Callable[[], nn.Module], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[nn.Module] = []
    monkeypatch.setattr(layers, "_has_gpu_kernels", lambda x: True)
    monkeypatch.setattr(layers, "norm_suits", lambda x, norm: asked.append(norm))
    network = make().train()
    network(torch.randn(2, 3, 32, 32))
    own = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(set(asked)) == len(own) == count


@pytest.mark.parametrize("change", ["a hook", "another activation"])
def test_what_follows_a_convolution_of_vgg_is_called_where_it_is_no_plain_relu(change: str) -> None:
    network, x, seen = vgg19_nfc().eval(), torch.randn(2, 3, 32, 32), list[Tensor]()
    if change == "a hook":
        network.stages[1][2].register_forward_hook(lambda module, given, result: seen.append(result))  # type: ignore[index]
        network(x)
        assert len(seen) == 1
    else:
        usual = network(x)
        network.stages[1][2] = nn.Identity()  # type: ignore[index,operator]
        assert not torch.equal(network(x), usual)


@pytest.mark.parametrize("end", range(7))
def test_the_first_layers_of_a_stage_of_vgg_are_run_as_those_of_any_other_chain(end: int) -> None:
    stage, x = vgg19_nfc().stages[0][:end], torch.randn(2, 3, 8, 8)  # type: ignore[index]
    assert torch.equal(stage(x), nn.Sequential(*stage)(x))


@pytest.mark.parametrize("channels", [16, 64, 160, 512, 640])
@pytest.mark.parametrize("positions", [32 * 32 * 128, 7 * 7 * 3, 4])
def test_programs_have_every_position_once(channels: int, positions: int) -> None:
    x = torch.empty(positions, channels, 1, 1, device="meta")
    for walk in (tiles.TILES.walk(x), tiles.TILES.walk(x, 64), tiles.TILES.stream(x), tiles.TILES.cover(x)):
        assert walk.span % walk.positions == 0
        assert (walk.splits - 1) * walk.span < positions <= walk.splits * walk.span
        assert (walk.tiles - 1) * walk.channels < channels <= walk.tiles * walk.channels


def test_parts_of_a_factors_gradient_take_no_more_bytes_than_the_tensor_where_it_is_large() -> None:
    for channels, size, R in [(256, 8, 64), (640, 8, 64), (64, 32, 16)]:
        x = torch.empty(128, channels, size, size, device="meta")
        walk = tiles.TILES.walk(x, R)
        assert walk.splits * 3 * R * 4 <= 2 * 128 * size * size
        assert walk.programs >= 132
