"""Norm, shortcut and ReLU as one function: without the kernels, they are the layers one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import factorized as fz
from factorized.experiments.models import wide_resnet as wide_resnet_module
from factorized.experiments.models.normalized import launches, layers, tiles
from factorized.experiments.models.normalized.convolutions import _follow as follow
from factorized.experiments.models.normalized.layers import activate, norm_suits
from factorized.experiments.models.normalized.statistics import Statistics
from factorized.experiments.models.resnet import resnet
from factorized.experiments.models.vgg import vgg19_nfc
from factorized.experiments.models.wide_resnet import WideBlock, wide_resnet
from factorized.formats.kernel import KernelShape
from factorized.testing import error


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


class Launch(NamedTuple):
    """Something else in the place of a kernel."""

    run: Callable[[], object]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let torch compute on a CPU what the kernels do, in any type; return what was launched."""
    seen: list[str] = []

    def activation(x: Tensor, coefficients: Tensor, shortcut: Tensor | None, y: Tensor) -> list[Launch]:
        assert shortcut is None
        scale, shift = coefficients[..., None, None]
        seen.append("forward")
        return [Launch(lambda: y.copy_(F.relu(x * scale + shift)))]

    def gradients(
        gradient: Tensor, x: Tensor, y: None, statistics: Tensor, coefficients: Tensor, epsilon: float, *found: Tensor
    ) -> list[Launch]:
        (scale, shift), (mean, variance) = coefficients[..., None, None], statistics[..., None, None]
        normal = (x - mean) / (variance + epsilon).sqrt()
        passed = gradient * (x * scale + shift > 0)
        of_norm = torch.stack([passed.sum((0, 2, 3)), (passed * normal).sum((0, 2, 3))])
        of_beta, of_gamma = of_norm[..., None, None] * x.shape[1] / x.numel()
        seen.append("backward")
        results = (scale * (passed - of_beta - normal * of_gamma), torch.empty(0), of_norm)
        return [Launch(lambda: [empty.copy_(result) for empty, result in zip(found, results, strict=True)])]

    def statistics(norm: nn.BatchNorm2d, x: Tensor, positions: int) -> Statistics:
        with torch.no_grad():
            variance, mean = torch.var_mean(x.to(norm.weight.dtype), (0, 2, 3), correction=0)
            scale = norm.weight / (variance + norm.eps).sqrt()
            return Statistics(torch.stack([mean, variance]), torch.stack([scale, norm.bias - mean * scale]))

    monkeypatch.setattr(launches, "activation_launches", activation)
    monkeypatch.setattr(launches, "activation_gradient_launches", gradients)
    monkeypatch.setattr(layers, "measured", lambda x: x)
    monkeypatch.setattr(layers, "followed", statistics)
    monkeypatch.setattr(layers, "norm_suits", lambda x, norm: True)
    return seen


def with_kernels(monkeypatch: pytest.MonkeyPatch, present: bool = True) -> None:
    monkeypatch.setattr(layers, "_has_gpu_kernels", lambda x: present)


def separable_block() -> nn.Module:
    torch.manual_seed(0)
    block = WideBlock(16, 16, 1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's overloads forget it
    for conv in ("conv1", "conv2"):
        format = fz.TensorTrain(separable=True).at_rank(KernelShape.of((16, 16, 3, 3)), 4)
        setattr(block, conv, fz.FactorizedConv2d.from_dense(getattr(block, conv), format))
    return block


def kept_and_gradients(run: Any, block: nn.Module, x: Tensor) -> tuple[int, list[Tensor]]:
    """Return how many bytes the last operation keeps for the backward pass beside parameters; and gradients."""
    with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.bfloat16, cache_enabled=False):
        y = run(x)
    storages = [kept.untyped_storage() for kept in getattr(y.grad_fn, "saved_tensors", ())]
    saved = {storage.data_ptr(): storage.nbytes() for storage in storages}
    for parameter in block.parameters():
        saved.pop(parameter.data_ptr(), None)
    torch.manual_seed(1)
    return sum(saved.values()), list(torch.autograd.grad(y, [x, *block.parameters()], torch.randn_like(y)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_compiled_separable_blocks_compute_activations_twice_in_place_of_keeping_them(
    dtype: torch.dtype, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    block = separable_block()
    block = block.double() if dtype == torch.float64 else block
    x = torch.randn(8, 16, 8, 8, dtype=dtype).to(memory_format=torch.channels_last).requires_grad_()
    kept, found = [], []
    for twice in (True, False):
        torch._dynamo.reset()
        launched.clear()
        with monkeypatch.context() as patch:
            with_kernels(patch)
            if not twice:
                patch.setattr(wide_resnet_module, "_is_separable", lambda conv: False)
            compiled = torch.compile(block, fullgraph=True, dynamic=False, backend="aot_eager")
            bytes_, gradients = kept_and_gradients(compiled, block, x)
        assert sorted(launched) == ["backward"] * 2 + ["forward"] * (4 if twice else 2)
        kept.append(bytes_)
        found.append(gradients)
    assert kept[1] - kept[0] == 2 * x.untyped_storage().nbytes()
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    with_kernels(monkeypatch, present=False)
    _, exact = kept_and_gradients(block.double(), block, x.detach().double().requires_grad_())
    # what bf16 rounds also decides which numbers ReLU lets through
    assert all(error(*pair) < (1e-10 if dtype == torch.float64 else 0.1) for pair in zip(found[0], exact, strict=True))


@pytest.mark.parametrize("compiled", [False, True])
def test_activations_are_computed_once_where_nothing_is_gained(
    compiled: bool, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_kernels(monkeypatch)
    torch._dynamo.reset()
    block, x = separable_block(), torch.randn(2, 16, 8, 8).to(memory_format=torch.channels_last)
    if compiled:
        with torch.no_grad():
            torch.compile(block, fullgraph=True, dynamic=False, backend="aot_eager")(x)
        assert launched == ["forward"] * 2
    else:
        kept_and_gradients(block, block, x.requires_grad_())
        assert launched == ["forward"] * 2 + ["backward"] * 2
