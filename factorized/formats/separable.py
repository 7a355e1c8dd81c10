"""Separable kernels: a dense depthwise convolution, then a pointwise matrix in another format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from factorized.formats.convolution import Geometry, convolve, convolve_transposed
from factorized.formats.cost import Device
from factorized.formats.format import Adjust, Call, Cores, Fill, Format, Rank, Step, Way, draw_to_scale
from factorized.formats.kernel import KernelShape
from factorized.formats.svd import method_of, truncated_svd


@dataclass(frozen=True)
class Separable(Format):
    """A kernel that is, for each input channel, one k×k kernel times a column of ``pointwise``.

    A decay penalizes the pointwise part, as the paper's experiments did.
    """

    shape: KernelShape
    pointwise: Format
    rank: Rank = field(init=False, compare=False, repr=False)
    chain: tuple[Step, ...] | None = field(init=False, compare=False, repr=False)

    name: ClassVar[str] = "separable"

    def __post_init__(self) -> None:
        inner = self.pointwise.chain
        object.__setattr__(self, "rank", self.pointwise.rank)
        object.__setattr__(self, "chain", None if inner is None else (self._depthwise, *inner))

    @property
    def _depthwise(self) -> Step:
        channels, spans = self.shape.in_channels, tuple(range(len(self.shape.size)))
        return Step(channels, channels, self.shape.size, channels, spans)

    @property
    def cores(self) -> dict[str, tuple[int, ...]]:
        """The cores of the pointwise part, then the depthwise kernel."""
        return {**self.pointwise.cores, "depthwise": (self.shape.in_channels, 1, *self.shape.size)}

    @property
    def decayed(self) -> tuple[Format, int]:
        """The pointwise part."""
        return self.pointwise, len(self.pointwise.cores)

    def decompose(
        self,
        weights: Tensor,  # (..., out, in, *size)
        *,
        exact: bool = False,
    ) -> Cores:
        """Split each input channel by its SVD, then decompose the pointwise part.

        The part of a kernel that belongs to one input channel is a matrix (out, taps); its leading singular triplet is
        the best separable kernel. A triplet has either sign; the largest tap is taken to be positive, so that rounding
        does not decide what is decomposed. A channel whose weights are all zero gets taps that are not: zeros on both
        sides would never receive a gradient.
        """
        spatial = len(self.shape.size)
        channels = weights.flatten(-spatial).transpose(-3, -2)  # (..., in, out, taps)
        U, S, V = truncated_svd(channels, 1, method_of(exact))
        largest = V.abs().argmax(dim=-2, keepdim=True)
        sign = torch.where(V.take_along_dim(largest, dim=-2) < 0, -1, 1)  # (..., in, 1, 1)
        root = S.sqrt().unsqueeze(-1) * sign
        pointwise = (U * root).squeeze(-1).transpose(-2, -1).to(weights.dtype)  # (..., out, in)
        batch = weights.shape[: weights.dim() - 2 - spatial]
        taps = (V * torch.where(root == 0, sign, root)).reshape(*batch, *self.cores["depthwise"]).to(weights.dtype)
        kernel = pointwise.reshape(*pointwise.shape, *(1,) * spatial)
        return (*self.pointwise.decompose(kernel, exact=exact), taps)

    def compose(self, cores: Sequence[Tensor]) -> Tensor:  # (..., out, in, *size)
        """Multiply the taps of every channel by its column."""
        return self.adjusted(cores, None)

    def adjusted(self, cores: Sequence[Tensor], adjust: Adjust | None) -> Tensor:  # (..., out, in, *size)
        """Multiply the taps of every channel by its column, adjusted."""
        taps = cores[-1].squeeze(-len(self.shape.size) - 1).unsqueeze(-len(self.shape.size) - 2)
        return self.pointwise.adjusted(cores[:-1], adjust) * taps

    @torch.no_grad()
    def draw(self, cores: Sequence[Tensor], fill: Fill) -> None:
        """Draw the depthwise kernel as torch does, and scale the other cores to the mean square of a dense weight."""
        dense = torch.empty(self.shape.weight_shape, device=cores[0].device, dtype=torch.float32)
        fill(dense)
        nn.init.kaiming_uniform_(cores[-1], a=math.sqrt(5))
        draw_to_scale(self.pointwise, cores[:-1], dense.square().mean() / cores[-1].float().square().mean())

    def chain_weights(self, cores: Sequence[Tensor]) -> list[Tensor]:
        """Return the depthwise kernel, then the chain of the pointwise part."""
        return [cores[-1], *self.pointwise.chain_weights(cores[:-1])]

    def plain(self, cores: Sequence[Tensor]) -> list[tuple[Step, Tensor]]:
        """Return the depthwise layer and the pointwise part, as its chain where that is smaller than composed."""
        inner = self.pointwise.plain(cores[:-1])
        shape = self.pointwise.shape
        if not inner or sum(weight.numel() for _, weight in inner) >= shape.numel:
            inner = [(Step(shape.in_channels, shape.out_channels, shape.size), self.pointwise.compose(cores[:-1]))]
        return [(self._depthwise, cores[-1]), *inner]

    def macs(self, call: Call) -> int:
        """Return the multiply-accumulates of the depthwise convolution, then of the pointwise part."""
        after = Call(call.batch, call.after, call.after)
        return call.outputs * self._depthwise.macs + self.pointwise.macs(after)

    def ways(self, stride: tuple[int, ...], device: Device, compiled: bool) -> dict[Way, float]:
        """Return the costs of the pointwise part, which runs after the depthwise strides."""
        return self.pointwise.ways((1,) * len(stride), device, compiled)

    def run(
        self,
        way: Way,
        x: Tensor,
        cores: Sequence[Tensor],
        bias: Tensor | None,
        geometry: Geometry | None,
        adjust: Adjust | None = None,
        transposed: bool = False,
    ) -> Tensor:
        """Convolve every channel separately, then apply the pointwise part, on which ``adjust`` acts; or back."""
        assert geometry is not None  # linears have no kernel to separate
        channels, pointwise = self.shape.in_channels, geometry.only(())
        if transposed:
            x = self.pointwise.run(way, x, cores[:-1], None, pointwise, adjust, transposed)
            return convolve_transposed(x, cores[-1], bias, geometry, channels)
        x = convolve(x, cores[-1], None, geometry, channels)
        return self.pointwise.run(way, x, cores[:-1], bias, pointwise, adjust)

    def raised(self) -> list[Self]:
        """Return the formats whose pointwise part has the next higher ranks."""
        return [replace(self, pointwise=other) for other in self.pointwise.raised()]

    def lowered(self) -> list[Self]:
        """Return the formats whose pointwise part has the next lower ranks."""
        return [replace(self, pointwise=other) for other in self.pointwise.lowered()]

    def to_dict(self) -> dict[str, Any]:
        """Return the settings, with those of the pointwise part nested."""
        return {"name": self.name, "pointwise": self.pointwise.to_dict()}

    @staticmethod
    def part_shape(shape: KernelShape) -> KernelShape:
        """Return the shape of the pointwise part."""
        return pointwise_shape(shape)

    def describe(self) -> str:
        """Return the settings of the pointwise part."""
        return f"separable=True, {self.pointwise.describe()}"


def pointwise_shape(shape: KernelShape) -> KernelShape:
    """Return the shape of the pointwise part of a separable kernel; raise where there is nothing to separate."""
    if shape.groups > 1 or prod(shape.size) == 1:
        raise ValueError(
            f"separable=True splits a convolution over space from one over channels: it needs a kernel larger than one "
            f"position and groups=1, got {shape} and groups={shape.groups}"
        )
    return KernelShape.of((shape.out_channels, shape.in_channels, *[1] * len(shape.size)))
