"""A convolution whose kernel is a tensor train or a Tucker tensor, or a separable one with such a pointwise part."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from factorized.layers.composed import check_dense
from factorized.layers.conv import Extent, conv_repr
from factorized.layers.draw import Init
from factorized.layers.execution import TRAFFIC
from factorized.layers.tensor import TensorizedLayer
from factorized.maths.contraction import contract_conv
from factorized.maths.convolution import Geometry, convolve, explicit_padding
from factorized.maths.folding import Rank
from factorized.maths.kernel import KernelShape
from factorized.maths.tucker import CoreKind


class TensorizedConv2d(TensorizedLayer):
    """An ``nn.Conv2d`` whose kernel, folded into ``dims``, is held as a tensor train or a Tucker tensor.

    ``rank``, ``method`` and ``dims`` are as for ``TensorizedLinear``. ``execution`` is ``"one_conv"`` (compose the
    kernel first), ``"two_convs"`` for a train (k×k, then 1×1) or ``"three_convs"`` for Tucker on channels (1×1, k×k,
    1×1), or ``"auto"``; all compute the same. ``separable=True`` is the block of the paper's tensor experiments: a
    depthwise convolution with a kernel of its own, then the pointwise one, which alone is decomposed.
    """

    dense_type: ClassVar[type[Any]] = nn.Conv2d
    composed_execution = "one_conv"
    contracted_executions: ClassVar[dict[str, str]] = {"tensor_train": "two_convs", "tucker": "three_convs"}

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Extent,
        rank: Rank,
        stride: Extent = 1,
        padding: Extent | str = 0,
        dilation: Extent = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        method: str = "tensor_train",
        dims: Sequence[int] | None = None,
        core: CoreKind | None = None,
        refinements: int = 0,
        separable: bool = False,
        execution: str = "auto",
        init: Init | None = "spectral",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # torch checks and normalizes the arguments; its weight takes no memory on the meta device.
        dense = self.dense_type(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,
            device="meta",
        )
        shape = KernelShape.of(dense.weight.shape, groups)
        super().__init__(shape, rank, method, dims, core, refinements, separable, device, dtype)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = dense.kernel_size
        self.stride = dense.stride
        self.padding = dense.padding
        self.dilation = dense.dilation
        self.groups = groups
        self.padding_mode = padding_mode
        self.separable = separable
        self.set_execution(execution)
        self.geometry = Geometry(
            dense.stride, explicit_padding(dense.padding, shape.size, dense.dilation), dense.dilation, padding_mode
        )
        self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None
        if init is not None:
            self.reset_parameters(init)

    @classmethod
    def from_dense(
        cls,
        dense: nn.Conv2d,
        rank: Rank,
        init: Init | None = "spectral",
        *,
        method: str = "tensor_train",
        dims: Sequence[int] | None = None,
        core: CoreKind | None = None,
        refinements: int = 0,
        separable: bool = False,
        execution: str = "auto",
    ) -> TensorizedConv2d:
        """Return a tensorized copy of ``dense``; ``init=None`` leaves the cores unfilled."""
        check_dense(dense, cls.dense_type)
        layer = cls(
            dense.in_channels,
            dense.out_channels,
            dense.kernel_size,
            rank,
            dense.stride,
            dense.padding,
            dense.dilation,
            dense.groups,
            dense.bias is not None,
            dense.padding_mode,
            method=method,
            dims=dims,
            core=core,
            refinements=refinements,
            separable=separable,
            execution=execution,
            init=None,
            device=dense.weight.device,
            dtype=dense.weight.dtype,
        )
        layer.take_over(dense, init)
        return layer

    def moving_cost(self, device: str) -> int:
        """Return what moving one channel costs more where two or three convolutions take the place of one."""
        return TRAFFIC[device].convolution * (1 if self.is_train else 2)

    @property
    def stride_area(self) -> int:
        """Positions of the input per position of the output."""
        return prod(self.stride)

    def dense_skeleton(self) -> nn.Conv2d:
        """Return an ``nn.Conv2d`` with this layer's settings on the meta device."""
        dense: nn.Conv2d = self.dense_type(
            self.in_channels,
            self.out_channels,
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            self.bias is not None,
            self.padding_mode,
            device="meta",
        )
        return dense

    def forward(
        self,
        input: Tensor,  # (batch, in, height, width) or (in, height, width)
    ) -> Tensor:  # (batch, out, height, width)
        """Apply the layer."""
        x, geometry = input, self.geometry
        if self.depthwise is not None:
            x = convolve(x, self.depthwise, None, geometry, self.in_channels)
            geometry = geometry.part(0, 0)
        if self.chosen_execution() == "one_conv":
            return convolve(x, self.running_weight(), self.bias, geometry, self.groups)
        return contract_conv(x, self.folding, self.format, list(self.cores), self.bias, geometry)

    def extra_repr(self) -> str:
        """Show shape, settings that differ from the defaults, format, rank and the parameters saved."""
        return ", ".join([*conv_repr(self), f"execution={self.chosen_execution()}", self.size_repr()])
