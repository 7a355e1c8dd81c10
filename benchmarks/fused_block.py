"""Blocks of low-rank WideResNets that apply batch normalization and ReLU inside the convolutions' kernels.

A block reads and writes its activations about half as often as what the compiler makes of it: statistics are taken
where a tensor is written, it is normalized where it is read, and the gradient of a normalized input is computed twice
from the thin gradient in place of being stored. One operator runs a block forward (``fused_kernels.py``), another one
backward (``fused_gradients.py``). ``fused_times.py`` times them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from factorized.experiments.models.wide_resnet import WideBlock, WideResNet
from factorized.formats.launches import Launch, run_all
from factorized.formats.thin_kernels import pack_kernel
from factorized.nn.conv import FactorizedConv2d

LARGEST_RANK = 64  # of layers that the kernels run
AT_ONCE = 1024  # numbers that a program packs


@dataclass(frozen=True)
class Tiles:
    """What one program of the kernels handles: positions, and channels at a time."""

    positions: int = 128
    channels: int = 128  # at most; the largest power of two that divides those of a tensor
    programs: int = 128  # at least, where possible
    sum_channels: int = 64  # at most, where positions are summed up
    sum_size: int = 2048  # of a tile there, at most: more would not fit into registers
    sum_programs: int = 264
    sums_by_products: bool = False  # of what is written, by tensor cores in place of sums across threads
    warps: int = 4
    stages: int = 3

    def tile(self, x: Tensor) -> tuple[int, int]:
        """Return the positions and channels of a tile."""
        rows, positions = self.positions, x.numel() // x.shape[1]
        while rows > 16 and positions < rows * self.programs:
            rows //= 2
        return rows, _divisor(x.shape[1], self.channels)

    def sum_tile(self, x: Tensor) -> tuple[int, int]:
        """Return the positions and channels of a tile where positions are summed up."""
        channels = _divisor(x.shape[1], self.sum_channels)
        return min(self.positions, self.sum_size // channels), channels

    def splits(self, x: Tensor) -> int:
        """Return into how many parts positions are split for sums."""
        rows, channels = self.sum_tile(x)
        return max(1, min(self.sum_programs // -(-x.shape[1] // channels), x.numel() // x.shape[1] // rows))

    @property
    def launching(self) -> dict[str, int]:
        """What every launch is told."""
        return {"num_warps": self.warps, "num_stages": self.stages}


def _divisor(extent: int, largest: int) -> int:
    """Return the largest power of two that divides ``extent``, from 16 up to ``largest``."""
    return min(largest, max(16, extent & -extent))


TILES = Tiles()


def _each(x: Tensor) -> int:
    """Return of how many positions a part of statistics is."""
    return TILES.tile(x)[0]


def _fits(x: Tensor, positions: int, channels: int) -> bool:
    """Return whether tiles of this size cover the tensor exactly."""
    return x.numel() // x.shape[1] % positions == 0 and x.shape[1] % channels == 0


def forward_launches(
    x: Tensor,  # (batch, channels, height, width), channels-last
    known: tuple[Tensor, int],  # parts of the statistics of x, and of how many positions each is
    parameters: Sequence[Tensor],  # gamma, beta, U, V
    epsilon: float,
    residual: Tensor | None,
    results: Sequence[Tensor],  # written: y, its parts, the thin tensor, packed factors, statistics, coefficients
) -> list[Launch]:
    """Normalize, activate and convolve x, and add the residual."""
    from benchmarks import fused_kernels as kernels

    gamma, beta, U, V = parameters
    y, parts, thin, packed, statistics, coefficients = results
    (channels, height, width), R = x.shape[1:], packed.shape[1]
    positions, own_U, own_V = x.numel() // channels, packed[: len(U)], packed[len(U) :]
    spread = thin.new_empty((positions, 3 * R))
    packing = (U.contiguous(), V.contiguous(), packed, len(U), len(packed), U.shape[1], R)
    norm = (known[0], gamma, beta, statistics, coefficients, len(known[0]), positions, known[1], epsilon)
    (bm, bc), (em, en), launching = TILES.tile(x), TILES.tile(y), TILES.launching
    sizes = {"H": height, "W": width, "O": channels, "R": R, "RESIDUAL": residual is not None, "BM": em, "BN": en}
    sizes |= {"BY_PRODUCTS": TILES.sums_by_products, "EVEN": _fits(y, em, en)}
    added = y if residual is None else residual
    return [
        Launch(pack_kernel, -(-packed.numel() // AT_ONCE), packing, {"SIZE": AT_ONCE}),
        Launch(kernels.statistics_kernel, -(-channels // 8), norm, {"C": channels, "BP": 256, "BC": 8}),
        Launch(
            kernels.project_kernel,
            -(-positions // bm),
            (x, coefficients, own_V, spread, positions),
            {"C": channels, "R": R, "EVEN": _fits(x, bm, bc), "BM": bm, "BC": bc, **launching},
        ),
        Launch(
            kernels.expand_kernel,
            len(parts),
            (spread, own_U, added, thin, y, parts, positions),
            {**sizes, **launching},
        ),
    ]


def backward_launches(
    gradient: Tensor,  # of y
    x: Tensor,
    kept: Sequence[Tensor],  # thin tensor, packed factors, statistics, coefficients
    epsilon: float,
    residual: Tensor | None,  # gradient that is added to that of x
    results: Sequence[Tensor],  # written: the gradients of x, of U and V in parts, of beta and gamma
) -> list[Launch]:
    """Go back to x and the parameters."""
    from benchmarks import fused_gradients as kernels

    thin, packed, statistics, coefficients = kept
    x_gradient, of_U, of_V, of_norm = results
    (channels, height, width), R = x.shape[1:], packed.shape[1]
    positions, own_U, own_V = x.numel() // channels, packed[: 3 * channels], packed[3 * channels :]
    thin_gradient, back = torch.empty_like(thin), statistics.new_empty((3, channels))
    parts = statistics.new_empty((len(of_V), 2, channels))
    (bm, bc), (im, ic), (gm, gc), launching = TILES.tile(gradient), TILES.tile(x), TILES.sum_tile(x), TILES.launching
    span, summing = -(-positions // (len(of_U) * gm)) * gm, len(of_U) * -(-channels // gc)
    added = x_gradient if residual is None else residual
    return [
        Launch(
            kernels.thin_gradients_kernel,
            summing - (-positions // bm),
            (gradient, thin, own_U, thin_gradient, of_U, positions, span, summing),
            {"H": height, "W": width, "O": channels, "R": R, "BM": bm, "BC": bc, "GM": gm, "GC": gc, **launching},
        ),
        Launch(
            kernels.norm_sums_kernel,
            summing,
            (x, coefficients, statistics, own_V, thin_gradient, of_V, parts, positions, span, epsilon),
            {"W": width, "C": channels, "R": R, "EVEN": _fits(x, gm, gc), "GM": gm, "GC": gc, **launching},
        ),
        Launch(
            kernels.norm_coefficients_kernel,
            -(-channels // 8),
            (parts, statistics, coefficients, of_norm, back, len(parts), positions, epsilon),
            {"C": channels, "BP": 128, "BC": 8},
        ),
        Launch(
            kernels.input_gradient_kernel,
            -(-positions // im),
            (x, coefficients, back, own_V, thin_gradient, added, x_gradient, positions),
            {
                **{"W": width, "C": channels, "R": R, "RESIDUAL": residual is not None, "BM": im, "BC": ic},
                "EVEN": _fits(x, im, ic),
                **launching,
            },
        ),
    ]


@torch.library.custom_op(
    "factorized_benchmarks::wide_block",
    mutates_args=(),
    schema="(Tensor x, Tensor parts, int each, Tensor[] parameters, float epsilon) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _wide_block(x: Tensor, parts: Tensor, each: int, parameters: Sequence[Tensor], epsilon: float) -> Any:
    """Return the block's result, parts of its statistics, and what the backward pass needs."""
    results = _empty_results(x, parts, each, parameters, epsilon)
    y, y_parts, between, *others = results
    between_parts = torch.empty_like(y_parts)
    first = (between, between_parts, *(tensor[0] for tensor in others))
    second = (y, y_parts, *(tensor[1] for tensor in others))
    launches = forward_launches(x, (parts, each), parameters[:4], epsilon, None, first)
    launches += forward_launches(between, (between_parts, _each(x)), parameters[4:], epsilon, x, second)
    run_all(launches, x.device)
    return results


@_wide_block.register_fake
def _empty_results(x: Tensor, parts: Tensor, each: int, parameters: Sequence[Tensor], epsilon: float) -> Any:
    batch, channels, height, width = x.shape
    R = max(16, 1 << (max(parameters[2].shape[1], parameters[6].shape[1]) - 1).bit_length())
    programs = -(-batch * height * width // _each(x))
    y, between = (x.new_empty((batch, height, width, channels)).permute(0, 3, 1, 2) for _ in range(2))
    norms = x.new_empty((2, 2, channels), dtype=torch.float32)
    return (
        y,
        x.new_empty((programs, 2, channels), dtype=torch.float32),
        between,
        x.new_empty((2, batch, height, width, R)),
        x.new_empty((2, 6 * channels, R)),
        norms,
        torch.empty_like(norms),
    )


@torch.library.custom_op(
    "factorized_benchmarks::wide_block_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor x, Tensor between, Tensor[] kept, float epsilon) -> (Tensor, Tensor, Tensor)",
)
def _wide_block_backward(gradient: Tensor, x: Tensor, between: Tensor, kept: Sequence[Tensor], epsilon: float) -> Any:
    """Return the gradients of x, of the factors of both layers in parts, and of beta and gamma of both."""
    x_gradient, sums, of_norms = results = _empty_gradients(gradient, x, between, kept, epsilon)
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    between_gradient = torch.empty_like(x_gradient)
    first, second = ([tensor[number] for tensor in kept] for number in range(2))
    launches = backward_launches(
        gradient, between, second, epsilon, None, (between_gradient, *sums[1], of_norms[1])
    ) + backward_launches(between_gradient, x, first, epsilon, gradient, (x_gradient, *sums[0], of_norms[0]))
    run_all(launches, x.device)
    return results


@_wide_block_backward.register_fake
def _empty_gradients(gradient: Tensor, x: Tensor, between: Tensor, kept: Sequence[Tensor], epsilon: float) -> Any:
    batch, channels, height, width = x.shape
    splits, R = TILES.splits(x), kept[0].shape[-1]
    x_gradient = x.new_empty((batch, height, width, channels)).permute(0, 3, 1, 2)
    sums = x.new_empty((2, 2, splits, 3 * channels, R), dtype=torch.float32)
    return x_gradient, sums, torch.empty_like(kept[2])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, _, parameters, ctx.epsilon = inputs
    ctx.ranks = [parameters[number].shape[1] for number in (2, 6)]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, *output[2:])


def _backward(ctx: Any, gradient: Tensor, *_: Tensor | None) -> tuple[Any, ...]:
    x, between, *kept = ctx.saved_tensors
    x_gradient, sums, of_norms = _wide_block_backward(gradient, x, between, kept, ctx.epsilon)
    of_factors = sums.sum(2)  # (layer, factor, channels·3, R)
    found: list[Tensor] = []
    for number, rank in enumerate(ctx.ranks):
        of_U, of_V = of_factors[number, :, :, :rank].unbind()
        of_beta, of_gamma = of_norms[number].unbind()
        found += [of_gamma, of_beta, of_U, of_V]
    return x_gradient, None, None, found, None


_wide_block.register_autograd(_backward, setup_context=_remember)


class FusedBlocks(nn.Module):
    """A stage of a WideResNet: its first block as it is, the others by the kernels while they are trained."""

    def __init__(self, blocks: Sequence[WideBlock]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(
        self,
        x: Tensor,  # (batch, channels, height, width), channels-last
    ) -> Tensor:
        """Run the blocks."""
        first, *others = self.blocks
        x = first(x)
        if not self.training:
            for block in others:
                x = block(x)
            return x
        kind = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        x = x.to(kind)
        positions = x.numel() // x.shape[1]
        variance, mean = torch.var_mean(x.detach().float(), dim=(0, 2, 3), correction=0)
        parts, each = torch.stack([mean, variance * positions])[None], positions
        for block in others:
            layers = ((block.bn1, block.conv1), (block.bn2, block.conv2))
            parameters = [tensor for norm, conv in layers for tensor in (norm.weight, norm.bias, *conv.factors)]
            x, parts, _, _, _, statistics, _ = _wide_block(x, parts, each, parameters, block.bn1.eps)
            each = _each(x)
            for (norm, _), (mean, variance) in zip(layers, statistics.detach().unbind(), strict=True):
                norm.running_mean.lerp_(mean, norm.momentum)
                norm.running_var.lerp_(variance * (positions / (positions - 1)), norm.momentum)
        return x


def fuse(network: WideResNet) -> WideResNet:
    """Let the kernels run the blocks of a network, in place; return it."""
    for number, stage in enumerate(network.stages):
        convolutions = [conv for block in stage[1:] for conv in (block.conv1, block.conv2)]
        if all(
            isinstance(conv, FactorizedConv2d) and conv.factors[0].shape[1] <= LARGEST_RANK for conv in convolutions
        ):
            network.stages[number] = FusedBlocks(list(stage))
    return network
