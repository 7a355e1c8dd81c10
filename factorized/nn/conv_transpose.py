"""Transposed convolutions whose kernel is held in a format, in one, two and three spatial dimensions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.modules.conv import _ConvTransposeNd

from factorized.formats.convolution import Geometry
from factorized.formats.format import Format, Way
from factorized.formats.kernel import Kind
from factorized.nn.conv import AnyConvolution, Extent
from factorized.nn.dense import format_of
from factorized.nn.init import Init
from factorized.nn.layer import Execution, Lowered
from factorized.nn.recorded import recorded_call


class FactorizedConvTranspose(AnyConvolution):
    """A transposed convolution whose kernel is held in a format. Abstract: use its subclasses.

    Torch keeps its weight as (in, out/groups, *size): the kernel of the convolution that this one transposes. The
    format describes that kernel. A chain runs backwards with each step transposed: for a product, ``U`` first, to
    ``rank`` channels, and then ``V``, with the same multiply-accumulates per position of the input.
    """

    known_ways: ClassVar[tuple[Way, ...]] = ("composed", "chain")
    takes_more = True  # an output_size
    geometry: Geometry

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Extent,
        format: Format | int,
        stride: Extent = 1,
        padding: Extent = 0,
        output_padding: Extent = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Extent = 1,
        padding_mode: str = "zeros",
        *,
        kind: Kind = "spatial",
        depth: int = 0,
        execution: Execution = "auto",
        init: Init | None = "spectral",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # torch checks and normalizes the arguments; its weight takes no memory on the meta device.
        settings = (stride, padding, output_padding, groups, bias, dilation, padding_mode)
        dense = self.dense_type(in_channels, out_channels, kernel_size, *settings, device="meta")
        made = format_of(tuple(dense.weight.shape), format, groups=groups, kind=kind, depth=depth)
        super().__init__(dense, made, execution, device, dtype)
        both_sides = tuple((p, p) for p in dense.padding)
        self.geometry = Geometry(dense.stride, both_sides, dense.dilation, output_padding=dense.output_padding)
        if init is not None:
            self.reset_parameters(init)

    def forward(
        self,
        input: Tensor,  # (batch, in, *spatial) or (in, *spatial)
        output_size: list[int] | None = None,
    ) -> Tensor:  # (batch, out, *spatial)
        """Apply the layer; ``output_size`` chooses among the extents that the stride allows, as in torch."""
        if isinstance(input, Proxy):
            return recorded_call(self, input, output_size)
        geometry = self.geometry
        if output_size is not None:
            output_padding: Any = _ConvTransposeNd._output_padding  # reads self.output_padding; takes any sequences
            extents = (self.stride, self.padding, self.kernel_size, self.dims, self.dilation)
            added = output_padding(self, input, output_size, *extents)
            geometry = replace(geometry, output_padding=tuple(added))
        way = self.chosen_execution()
        return self.format.run(way, input, self.factors, self.bias, geometry, self.adjust, transposed=True)

    def lowered(self) -> list[Lowered]:
        """Return one plain transposed convolution for each step of the chain, the last first."""
        made: list[Lowered] = []
        for place, (step, weight) in reversed(list(enumerate(self.worthwhile(self.format.plain(self.factors))))):
            # undoes the shuffle after the step
            made += [Lowered(nn.ChannelShuffle(step.outputs // step.shuffle))] if step.shuffle > 1 else []
            plain = self.plain_convolution(step.outputs, step.inputs, step.spans, step.groups, bias=False)
            made.append(Lowered(plain, (place, False), weight))
        return made


class FactorizedConvTranspose1d(FactorizedConvTranspose):
    """A factorized ``nn.ConvTranspose1d``; for a product, ``U`` is pointwise and ``V`` spans the length.

    Arguments and errors are those of ``nn.ConvTranspose1d`` and ``fz.FactorizedConv2d``.

    Examples:
        >>> layer = fz.FactorizedConvTranspose1d(32, 16, kernel_size=4, format=8, stride=2, padding=1)
        >>> layer(torch.randn(1, 32, 10)).shape
        torch.Size([1, 16, 20])
    """

    dense_type = nn.ConvTranspose1d
    dims = 1


class FactorizedConvTranspose2d(FactorizedConvTranspose):
    """A factorized ``nn.ConvTranspose2d``; a product is kh×1, then 1×kw (``kind="spatial"``).

    Arguments and errors are those of ``nn.ConvTranspose2d`` and ``fz.FactorizedConv2d``.

    Examples:
        >>> layer = fz.FactorizedConvTranspose2d(32, 16, kernel_size=4, format=8, stride=2, padding=1)
        >>> layer(torch.randn(1, 32, 8, 8)).shape
        torch.Size([1, 16, 16, 16])
    """

    dense_type = nn.ConvTranspose2d
    dims = 2


class FactorizedConvTranspose3d(FactorizedConvTranspose):
    """A factorized ``nn.ConvTranspose3d``; a product is kt×1×1, then 1×kh×kw (``kind="spatial"``).

    Arguments and errors are those of ``nn.ConvTranspose3d`` and ``fz.FactorizedConv2d``.

    Examples:
        >>> layer = fz.FactorizedConvTranspose3d(16, 8, kernel_size=2, format=4, stride=2)
        >>> layer(torch.randn(1, 16, 4, 4, 4)).shape
        torch.Size([1, 8, 8, 8, 8])
    """

    dense_type = nn.ConvTranspose3d
    dims = 3
