"""Convolutions whose kernel is held in a format, in one, two and three spatial dimensions."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.modules.conv import _ConvNd

from factorized.formats.convolution import Geometry, explicit_padding
from factorized.formats.format import Format
from factorized.formats.kernel import Kind
from factorized.nn.dense import check_dense, format_of
from factorized.nn.init import Init
from factorized.nn.layer import Execution, FactorizedLayer, Lowered
from factorized.nn.recorded import recorded_call

Extent = int | tuple[int, ...]


class AnyConvolution(FactorizedLayer):
    """What convolutions and transposed ones share: their settings, read from and given back to torch. Abstract."""

    form_kind = "conv"
    dense_type: ClassVar[type[Any]]
    dims: ClassVar[int]

    def __init__(
        self,
        dense: _ConvNd,
        format: Format,
        execution: Execution,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        self.stride = dense.stride  # of ``dense``, because torch has checked and normalized its settings
        super().__init__(format, execution, device, dtype)
        self.in_channels = dense.in_channels
        self.out_channels = dense.out_channels
        self.kernel_size = dense.kernel_size
        self.padding = dense.padding
        self.output_padding = dense.output_padding
        self.transposed = dense.transposed
        self.dilation = dense.dilation
        self.groups = dense.groups
        self.padding_mode = dense.padding_mode
        self.bias = None
        if dense.bias is not None:
            self.bias = nn.Parameter(torch.empty(dense.out_channels, device=device, dtype=dtype))

    @classmethod
    def from_dense(
        cls,
        dense: _ConvNd,
        format: Format | int,
        init: Init | None = "spectral",
        *,
        kind: Kind = "spatial",
        depth: int = 0,
        execution: Execution = "auto",
    ) -> Self:
        """Return a factorized copy of ``dense``; ``init=None`` leaves the factors unfilled."""
        check_dense(dense, cls.dense_type)
        own = {"output_padding": dense.output_padding} if dense.transposed else {}
        make: Any = cls  # subclasses take the arguments of torch's layers
        layer: Self = make(
            dense.in_channels,
            dense.out_channels,
            dense.kernel_size,
            format,
            stride=dense.stride,
            padding=dense.padding,
            dilation=dense.dilation,
            groups=dense.groups,
            bias=dense.bias is not None,
            padding_mode=dense.padding_mode,
            kind=kind,
            depth=depth,
            execution=execution,
            init=None,
            device=dense.weight.device,
            dtype=dense.weight.dtype,
            **own,
        )
        layer.take_over(dense, init)
        return layer

    def dense_skeleton(self) -> _ConvNd:
        """Return a ``torch.nn`` convolution with this layer's settings on the meta device."""
        return self.plain_convolution(
            self.in_channels, self.out_channels, range(self.dims), self.groups, self.bias is not None
        )

    def plain_convolution(self, inputs: int, outputs: int, spans: Collection[int], groups: int, bias: bool) -> _ConvNd:
        """Return a convolution on the meta device with this layer's settings in the dimensions that it spans."""

        def keep(values: tuple[int, ...], otherwise: int) -> tuple[int, ...]:
            return tuple(value if d in spans else otherwise for d, value in enumerate(values))

        own = {"output_padding": keep(self.output_padding, 0)} if self.transposed else {}
        plain: _ConvNd = self.dense_type(
            inputs,
            outputs,
            keep(self.kernel_size, 1),
            stride=keep(self.stride, 1),
            padding=self.padding if isinstance(self.padding, str) else keep(self.padding, 0),
            dilation=keep(self.dilation, 1),
            groups=groups,
            bias=bias,
            padding_mode=self.padding_mode,
            device="meta",
            **own,
        )
        return plain

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
        settings += [f"padding_mode={self.padding_mode}"] if self.padding_mode != "zeros" else []
        return settings


class FactorizedConv(AnyConvolution):
    """A convolution whose kernel is held in a format (section 2.2). Abstract: use ``FactorizedConv1d``, ``2d``, ``3d``.

    ``format`` is a ``Format`` for the kernel, or the rank of a product. For a product, ``kind="spatial"`` splits the
    kernel's spatial dimensions between the factors (the paper's 1×k and k×1); ``kind="channel"`` gives them all to
    ``V`` (k×k to ``rank`` channels, then 1×1).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Extent,
        format: Format | int,
        stride: Extent = 1,
        padding: Extent | str = 0,
        dilation: Extent = 1,
        groups: int = 1,
        bias: bool = True,
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
        settings = (in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode)
        dense = self.dense_type(*settings, device="meta")
        made = format_of(tuple(dense.weight.shape), format, groups=groups, kind=kind, depth=depth)
        super().__init__(dense, made, execution, device, dtype)
        self.geometry = Geometry(
            dense.stride, explicit_padding(dense.padding, made.shape.size, dense.dilation), dense.dilation, padding_mode
        )
        if init is not None:
            self.reset_parameters(init)

    def forward(
        self,
        input: Tensor,  # (batch, in, *spatial) or (in, *spatial)
    ) -> Tensor:  # (batch, out, *spatial)
        """Apply the layer."""
        if isinstance(input, Proxy):
            return recorded_call(self, input)
        way = self.chosen_execution(input)
        return self.format.run(way, input, self.factors, self.bias, self.geometry, self.adjust)

    def lowered(self) -> list[Lowered]:
        """Return one plain convolution for each step of the chain, and channel shuffles where it has them."""
        made: list[Lowered] = []
        for place, (step, weight) in enumerate(self.worthwhile(self.format.plain(self.factors))):
            plain = self.plain_convolution(step.inputs, step.outputs, step.spans, step.groups, bias=False)
            made.append(Lowered(plain, (place, False), weight))
            made += [Lowered(nn.ChannelShuffle(step.shuffle))] if step.shuffle > 1 else []
        return made


class FactorizedConv1d(FactorizedConv):
    """A factorized ``nn.Conv1d``; for a product, ``V`` spans the length and ``U`` is pointwise.

    Arguments and errors are those of ``nn.Conv1d`` and ``fz.FactorizedConv2d``.

    Examples:
        >>> fz.FactorizedConv1d(64, 64, kernel_size=9, format=32)
        FactorizedConv1d(64, 64, kernel_size=(9,), execution=chain, rank=32, params=20,480 of 36,864)
    """

    dense_type = nn.Conv1d
    dims = 1


class FactorizedConv2d(FactorizedConv):
    """A factorized ``nn.Conv2d``; a product is a 1×kw convolution, then a kh×1 one (``kind="spatial"``).

    Arguments and errors are those of ``nn.Conv2d`` and, for ``format``, ``depth``, ``execution`` and ``init``, of
    ``fz.FactorizedLinear``. ``execution="products"`` is a third way to run a product: two matrix products with a shift
    of thin tensors between them. ``kind`` is that of ``fz.LowRank``.

    Examples:
        >>> layer = fz.FactorizedConv2d(32, 64, kernel_size=3, format=16, padding=1)
        >>> layer(torch.randn(1, 32, 8, 8)).shape
        torch.Size([1, 64, 8, 8])
        >>> layer.to_dense()
        Conv2d(32, 64, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    """

    dense_type = nn.Conv2d
    dims = 2


class FactorizedConv3d(FactorizedConv):
    """A factorized ``nn.Conv3d``; a product is a 1×kh×kw convolution, then a kt×1×1 one (``kind="spatial"``).

    Arguments and errors are those of ``nn.Conv3d`` and ``fz.FactorizedConv2d``.

    Examples:
        >>> fz.FactorizedConv3d(16, 32, kernel_size=3, format=8)
        FactorizedConv3d(16, 32, kernel_size=(3, 3, 3), execution=chain, rank=8, params=1,920 of 13,824)
    """

    dense_type = nn.Conv3d
    dims = 3
