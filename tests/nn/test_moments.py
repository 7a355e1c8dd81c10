"""What is collected while a model runs equals what its layers multiply."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from factorized.formats.kernel import KernelShape
from factorized.nn import moments
from factorized.nn.moments import InputMoments, InputPairs, OutputGradients, collecting, patches

CONVOLUTIONS: list[tuple[type[Any], dict[str, Any]]] = [
    (nn.Conv1d, {"kernel_size": 3}),
    (nn.Conv1d, {"kernel_size": 4, "padding": "same", "padding_mode": "circular"}),
    (nn.Conv2d, {"kernel_size": 3, "padding": 1}),
    (nn.Conv2d, {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0), "groups": 2}),
    (nn.Conv2d, {"kernel_size": 3, "padding": 2, "dilation": 2, "padding_mode": "reflect"}),
    (nn.Conv2d, {"kernel_size": 4, "padding": "same", "dilation": (1, 2), "padding_mode": "replicate", "groups": 4}),
    (nn.Conv2d, {"kernel_size": 1, "stride": 2}),
    (nn.Conv3d, {"kernel_size": (1, 2, 3), "padding": 1, "stride": 2}),
    (nn.ConvTranspose1d, {"kernel_size": 3}),
    (nn.ConvTranspose2d, {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1}),
    (nn.ConvTranspose2d, {"kernel_size": (2, 3), "stride": (3, 1), "padding": (0, 3), "dilation": 2, "groups": 2}),
    (nn.ConvTranspose3d, {"kernel_size": 2, "stride": 2, "groups": 4}),
]


def images(conv: Any) -> Tensor:
    return torch.randn(3, 4, *(6, 7, 8)[: len(conv.kernel_size)], dtype=torch.float64)


@pytest.mark.parametrize(("kind", "settings"), CONVOLUTIONS)
def test_patches_times_the_weight_are_the_outputs(kind: type[Any], settings: dict[str, Any]) -> None:
    conv = kind(4, 8, bias=False, dtype=torch.float64, **settings)
    x = images(conv)
    expected = conv(x).movedim(1, -1).flatten(0, -2)  # (positions, out)
    weight = conv.weight.unflatten(0, (conv.groups, -1))
    if conv.transposed:
        weight = weight.transpose(1, 2)
    outputs = patches(x, conv) @ weight.flatten(2).mT  # (groups, positions, out/groups)
    torch.testing.assert_close(outputs.movedim(0, 1).flatten(1), expected)


@pytest.mark.parametrize(("kind", "settings"), CONVOLUTIONS)
def test_the_moment_of_a_convolution_gives_the_energy_of_its_outputs(
    kind: type[Any], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments, "PATCH_ENTRIES", 1)  # one example at a time
    conv = kind(4, 8, bias=False, dtype=torch.float64, **settings)
    shape = KernelShape.of(conv.weight.shape, conv.groups)
    x = images(conv)
    collected = InputMoments(conv)
    with collecting({conv: collected}), torch.no_grad():
        energy = conv(x).square().sum() + conv(x[0]).square().sum()  # also without a batch dimension
    weight = conv.weight.detach()
    torch.testing.assert_close((weight * collected.moment.apply(weight, shape)).sum(), energy)
    assert collected.directions == weight.numel() // (8 if not conv.transposed else 8 // conv.groups) // (
        1 if not conv.transposed else conv.groups
    )


@pytest.mark.parametrize("by_name", [False, True])
def test_an_output_size_that_a_transposed_convolution_is_called_with_counts(by_name: bool) -> None:
    conv = nn.ConvTranspose2d(4, 8, 3, stride=(2, 3), padding=1, bias=False, dtype=torch.float64)
    x, size = images(conv), [12, 21]  # one row and two columns more than without it
    collected = InputMoments(conv)
    with collecting({conv: collected}), torch.no_grad():
        energy = (conv(output_size=size, input=x) if by_name else conv(x, size)).square().sum()
    weight = conv.weight.detach()
    shape = KernelShape.of(conv.weight.shape)
    torch.testing.assert_close((weight * collected.moment.apply(weight, shape)).sum(), energy)


def test_bags_find_their_indices_by_name_whatever_comes_first() -> None:
    bag, indices = nn.EmbeddingBag(5, 3), torch.tensor([0, 1, 1, 4])
    collected = InputMoments(bag)
    with collecting({bag: collected}):
        bag(offsets=torch.tensor([0, 2]), input=indices)
    assert collected.moment.sums.tolist() == [[1, 2, 0, 0, 1]]


@pytest.mark.parametrize("layer", [nn.Conv2d(4, 8, 3), nn.ConvTranspose2d(4, 8, 3), nn.Linear(6, 8)])
def test_calls_with_no_examples_count_nothing(layer: nn.Module) -> None:
    collected, x = InputMoments(layer, centered=True), torch.randn(2, 4, 6, 6)
    with collecting({layer: collected}):
        layer(x[:0])
        assert collected.samples == 0
        layer(x)
        seen = collected.moment.sums
        layer(x[:0])
    assert torch.equal(collected.moment.sums, seen)


def test_of_many_images_few_are_unfolded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    conv = nn.Conv2d(4, 8, 3, padding=1)
    limit = 2 * 9 * 4 * 6 * 7  # entries of the patches of two images
    sizes: list[int] = []

    def watched(*given: Any) -> Tensor:
        found = patches(*given)
        sizes.append(found.numel())
        return found

    monkeypatch.setattr(moments, "PATCH_ENTRIES", limit)
    monkeypatch.setattr(moments, "patches", watched)
    collected = InputMoments(conv)
    with collecting({conv: collected}), torch.no_grad():
        conv(torch.randn(5, 4, 6, 7))
    assert sizes == [limit, limit, limit // 2]
    assert collected.samples == 5 * 6 * 7


def test_linear_inputs_of_any_shape_are_counted_and_given_by_keyword() -> None:
    layer = nn.Linear(5, 3)
    x = torch.randn(4, 2, 5)
    found = {layer: InputMoments(layer)}
    with collecting(found):
        layer(x)
        layer(input=x[0, 0])
    rows = torch.cat([x.reshape(-1, 5), x[0, :1]]).double()
    torch.testing.assert_close(found[layer].moment.sums, (rows.mT @ rows).unsqueeze(0), rtol=1e-6, atol=1e-6)
    assert (found[layer].samples, found[layer].directions) == (9, 5)
    layer(x)
    assert found[layer].samples == 9  # the hooks are gone


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("centered", [False, True])
def test_blocks_below_the_diagonal_mirror_those_above(
    rows: int, centered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments, "ROWS", rows)
    layer, x = nn.Linear(12, 3), torch.randn(40, 12, dtype=torch.float64)
    collected = InputMoments(layer, centered=centered)
    for part in x.split(25):
        collected(layer, (part,), {})
    x = x - x.mean(0) if centered else x
    torch.testing.assert_close(collected.moment.sums[0], x.mT @ x)
    assert torch.equal(collected.moment.sums, collected.moment.sums.mT)


def test_a_centered_moment_is_that_around_the_mean() -> None:
    conv = nn.Conv2d(4, 6, 3, groups=2).double()
    x = images(conv) + 2
    centered = InputMoments(conv, centered=True)
    with collecting({conv: centered}):
        conv(x)
        conv(x[:1])
    seen = torch.cat([patches(x, conv), patches(x[:1], conv)], dim=1)
    torch.testing.assert_close(centered.mean, seen.mean(1))
    around = seen - seen.mean(1, keepdim=True)
    torch.testing.assert_close(centered.moment.sums, around.mT @ around)


def test_of_constant_inputs_nothing_is_left_around_the_mean() -> None:
    layer, row = nn.Linear(7, 3), torch.rand(1, 7) / 3
    collected = InputMoments(layer, centered=True)
    for samples in (0, 5, 300):
        collected(layer, (row.expand(samples, 7),), {})
    assert not collected.moment.sums.any()
    assert torch.equal(collected.mean, row.double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_neither_overflow_nor_lose_small_ones(dtype: torch.dtype) -> None:
    layer = nn.Linear(2, 3, dtype=dtype)
    x = torch.tensor([[300.0, 0.0], *[[1.0, 1.0]] * 5000], dtype=dtype)
    collected = InputMoments(layer)
    collected(layer, (x,), {})
    assert collected.moment.sums.dtype == torch.float64
    torch.testing.assert_close(collected.moment.sums[0, 0, 0].item(), 95000.0)
    torch.testing.assert_close(collected.moment.sums[0, 1, 1].item(), 5000.0)


def test_lookups_are_counted_and_bags_leave_padding_out() -> None:
    table, bag = nn.Embedding(5, 3, padding_idx=0), nn.EmbeddingBag(5, 3, padding_idx=0)
    indices = torch.tensor([[0, 1, 1], [4, 1, 0]])
    found = {one: InputMoments(one) for one in (table, bag)}
    with collecting(found):
        table(indices)
        bag(indices)
        bag(indices.reshape(-1), offsets=torch.tensor([0, 2]))
    assert found[table].moment.sums.tolist() == [[2, 3, 0, 0, 1]]
    assert found[bag].moment.sums.tolist() == [[0, 6, 0, 0, 2]]
    assert found[table].moment.transposed
    assert (found[table].samples, found[table].directions) == (6, 3)


def test_an_error_while_running_removes_the_hooks() -> None:
    layer = nn.Linear(5, 3)
    with pytest.raises(RuntimeError), collecting({layer: InputMoments(layer)}):
        layer(torch.randn(2, 4))
    assert not layer._forward_pre_hooks


def test_gradients_of_outputs_are_averaged_over_all_their_entries() -> None:
    layer, seen = nn.Linear(5, 3), OutputGradients()
    assert seen.mean_square == 0
    weights = [torch.randn(4, 3), torch.randn(2, 7, 3)]
    with collecting({}, {layer: seen}):
        for weight in weights:
            (layer(torch.randn(*weight.shape[:-1], 5)) * weight).sum().backward()
    assert seen.mean_square == pytest.approx(torch.cat([w.flatten() for w in weights]).square().mean().item())
    assert not layer._forward_hooks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("ulps", "varies"), [(0, False), (1, False), (20, True)])
def test_inputs_that_vary_by_rounding_alone_have_no_moment_around_their_mean(
    dtype: torch.dtype, ulps: int, varies: bool
) -> None:
    x = torch.ones(6, 5, dtype=dtype)
    x[::2] += ulps * torch.finfo(dtype).eps
    layer = nn.Linear(5, 5, dtype=dtype)
    for centered in (True, False):
        collected = InputMoments(layer, centered=centered)
        collected(layer, (x,), {})
        assert bool(collected.moment.sums.any()) == (varies or not centered)


@pytest.mark.parametrize("kind", [InputMoments, InputPairs])
def test_moments_stay_when_code_after_a_layer_overwrites_its_input(kind: type[InputMoments]) -> None:
    layer, x = nn.Linear(4, 4, dtype=torch.float64), torch.randn(30, 4, dtype=torch.float64)
    collected, around = kind(layer, centered=True), x - x.mean(0)
    for part in x.clone().split(10):
        collected(layer, (part,), {})
        part.zero_()
    torch.testing.assert_close(collected.moment.sums[0], around.mT @ around)


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize(("kind", "settings"), [(nn.Linear, {}), *CONVOLUTIONS])
def test_pairs_multiply_the_inputs_of_an_earlier_run_with_those_of_a_later_one(
    kind: type[Any], settings: dict[str, Any], centered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments, "PATCH_ENTRIES", 1)
    layer = kind(4, 8, dtype=torch.float64, **settings)
    x = torch.randn(3, 4, dtype=torch.float64) if kind is nn.Linear else images(layer)
    collected = InputPairs(layer, centered=centered)
    for some in (x[:2], x[2:]):
        collected.expect(layer, (some,), {})
        collected(layer, (2 * some + 1,), {})
        collected.end()
    rows, later = (
        one.unsqueeze(0) if kind is nn.Linear else patches(one, layer) for one in (x, 2 * x + 1)
    )  # (groups, samples, inputs)
    torch.testing.assert_close(collected.dense_mean if centered else rows.mean(1), rows.mean(1))
    if centered:
        rows, later = rows - rows.mean(1, keepdim=True), later - later.mean(1, keepdim=True)
    torch.testing.assert_close(collected.cross, rows.mT @ later)
    torch.testing.assert_close(collected.moment.sums, later.mT @ later)


@pytest.mark.parametrize("calls", ["fewer", "more", "of another size"])
def test_calls_that_have_no_pair_leave_nothing_paired(calls: str) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(6, 4)
    collected = InputPairs(layer, centered=True)
    for _ in range(2):  # batches
        for _ in range(2):
            collected.expect(layer, (x,), {})
        for some in {"fewer": [x], "more": [x] * 3, "of another size": [x, x[:5]]}[calls]:
            collected(layer, (some,), {})
        collected.end()
    assert collected.cross is None
    assert not collected.expected
    torch.testing.assert_close(collected.dense_mean, collected.mean)
