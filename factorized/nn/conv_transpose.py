"""Transposed convolutions whose kernel is held in a format, in one, two and three spatial dimensions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from factorized.formats.convolution import Geometry
from factorized.formats.format import Format, Way
from factorized.formats.kernel import Kind
from factorized.nn.conv import Extent
from factorized.nn.dense import check_dense, format_of
from factorized.nn.init import Init
from factorized.nn.layer import Execution, FactorizedLayer, Lowered


class FactorizedConvTranspose(FactorizedLayer):
    """A transposed convolution whose kernel is held in a format. Abstract: use that of one, two or three dimensions.

    Torch keeps its weight as (in, out/groups, *size): the kernel of the convolution that this one transposes. The
    format is that kernel's. A chain runs backwards, each of its steps transposed: of a product ``U`` first, to ``rank``
    channels, and then ``V``, with the same multiply-accumulates per position of the input.
    """

    form_kind = "conv"
    known_ways: ClassVar[tuple[Way, ...]] = ("composed", "chain")
    dense_type: ClassVar[type[Any]]
    dims: ClassVar[int]
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
        self.stride = dense.stride
        super().__init__(made, execution, device, dtype)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = dense.kernel_size
        self.padding = dense.padding
        self.output_padding = dense.output_padding
        self.transposed = dense.transposed
        self.dilation = dense.dilation
        self.groups = groups
        self.padding_mode = padding_mode
        both_sides = tuple((p, p) for p in dense.padding)
        self.geometry = Geometry(dense.stride, both_sides, dense.dilation, output_padding=dense.output_padding)
        self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None
        if init is not None:
            self.reset_parameters(init)

    @classmethod
    def from_dense(
        cls,
        dense: _ConvTransposeNd,
        format: Format | int,
        init: Init | None = "spectral",
        *,
        kind: Kind = "spatial",
        depth: int = 0,
        execution: Execution = "auto",
    ) -> Self:
        """Return a factorized copy of ``dense``; ``init=None`` leaves the factors unfilled."""
        check_dense(dense, cls.dense_type)
        layer = cls(
            dense.in_channels,
            dense.out_channels,
            dense.kernel_size,
            format,
            dense.stride,
            dense.padding,  # type: ignore[arg-type]
            dense.output_padding,
            dense.groups,
            dense.bias is not None,
            dense.dilation,
            dense.padding_mode,
            kind=kind,
            depth=depth,
            execution=execution,
            init=None,
            device=dense.weight.device,
            dtype=dense.weight.dtype,
        )
        layer.take_over(dense, init)
        return layer

    def dense_skeleton(self) -> _ConvTransposeNd:
        """Return a ``torch.nn`` transposed convolution with this layer's settings on the meta device."""
        return self.plain_convolution(
            self.in_channels, self.out_channels, range(self.dims), self.groups, self.bias is not None
        )

    def plain_convolution(
        self, inputs: int, outputs: int, spans: Collection[int], groups: int, bias: bool
    ) -> _ConvTransposeNd:
        """Return a transposed convolution on the meta device with this layer's settings in the dimensions it spans."""

        def keep(values: tuple[int, ...], otherwise: int) -> tuple[int, ...]:
            return tuple(value if d in spans else otherwise for d, value in enumerate(values))

        plain: _ConvTransposeNd = self.dense_type(
            inputs,
            outputs,
            keep(self.kernel_size, 1),
            keep(self.stride, 1),
            keep(self.padding, 0),
            keep(self.output_padding, 0),
            groups,
            bias,
            keep(self.dilation, 1),
            self.padding_mode,
            device="meta",
        )
        return plain

    def forward(
        self,
        input: Tensor,  # (batch, in, *spatial) or (in, *spatial)
        output_size: list[int] | None = None,
    ) -> Tensor:  # (batch, out, *spatial)
        """Apply the layer; ``output_size`` chooses among the extents that the stride allows, as in torch."""
        geometry = self.geometry
        if output_size is not None:
            added = _ConvTransposeNd._output_padding(
                self,  # type: ignore[arg-type]  # it reads nothing of the layer but its output_padding
                input,
                output_size,
                self.stride,  # type: ignore[arg-type]
                self.padding,
                self.kernel_size,
                self.dims,
                self.dilation,
            )
            geometry = replace(geometry, output_padding=tuple(added))
        way, factors = self.chosen_execution(), self.factors
        return self.format.run_transposed(way, input, factors, self.bias, geometry, self.adjust)

    def lowered(self) -> list[Lowered]:
        """Return one plain transposed convolution for each step of the chain, the last first."""
        made: list[Lowered] = []
        for place, (step, weight) in reversed(list(enumerate(self.worthwhile(self.format.plain(self.factors))))):
            # undoes the shuffle that follows the step of the convolution
            made += [(nn.ChannelShuffle(step.outputs // step.shuffle), None, None)] if step.shuffle > 1 else []
            plain = self.plain_convolution(step.outputs, step.inputs, step.spans, step.groups, bias=False)
            made.append((plain, (place, False), weight))
        return made

    def settings_repr(self) -> list[str]:
        """Return channels, kernel size and the settings that differ from the defaults."""
        ones, none = (1,) * self.dims, (0,) * self.dims
        settings = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"]
        settings += [f"stride={self.stride}"] if self.stride != ones else []
        settings += [f"padding={self.padding}"] if self.padding != none else []
        settings += [f"output_padding={self.output_padding}"] if self.output_padding != none else []
        settings += [f"dilation={self.dilation}"] if self.dilation != ones else []
        settings += [f"groups={self.groups}"] if self.groups != 1 else []
        settings += ["bias=False"] if self.bias is None else []
        return settings


class FactorizedConvTranspose1d(FactorizedConvTranspose):
    """A factorized ``nn.ConvTranspose1d``; of a product ``U`` is pointwise and ``V`` spans the length."""

    dense_type = nn.ConvTranspose1d
    dims = 1


class FactorizedConvTranspose2d(FactorizedConvTranspose):
    """A factorized ``nn.ConvTranspose2d``; a product is kh×1, then 1×kw (``kind="spatial"``)."""

    dense_type = nn.ConvTranspose2d
    dims = 2


class FactorizedConvTranspose3d(FactorizedConvTranspose):
    """A factorized ``nn.ConvTranspose3d``; a product is kt×1×1, then 1×kh×kw (``kind="spatial"``)."""

    dense_type = nn.ConvTranspose3d
    dims = 3
