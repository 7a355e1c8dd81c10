"""Convolutions whose kernel is a product, in one, two and three spatial dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from factorized.layers.base import FactorizedLayer, check_choice
from factorized.layers.composed import check_dense
from factorized.layers.draw import Init
from factorized.layers.execution import cheapest_conv
from factorized.maths.convolution import Geometry, convolve, explicit_padding, two_convs
from factorized.maths.kernel import KernelShape, Kind
from factorized.maths.products import two_products

Extent = int | tuple[int, ...]
_RUN: dict[str, Callable[..., Tensor]] = {"two_convs": two_convs, "two_products": two_products}


class FactorizedConv(FactorizedLayer):
    """A convolution with kernel ``U M₁…M_d Vᵀ`` (section 2.2). Abstract: use ``FactorizedConv1d``, ``2d`` or ``3d``.

    ``kind="spatial"`` splits the kernel's spatial dimensions between the factors (the paper's 1×k and k×1);
    ``kind="channel"`` gives them all to ``V`` (k×k to ``rank`` channels, then 1×1). ``execution`` is ``"two_convs"``,
    ``"one_conv"`` (compose the kernel first), ``"two_products"`` or ``"auto"``; all compute the same.
    """

    executions: ClassVar[tuple[str, ...]] = ("two_convs", "one_conv", "two_products")
    dense_type: ClassVar[type[Any]]
    dims: ClassVar[int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Extent,
        rank: int,
        stride: Extent = 1,
        padding: Extent | str = 0,
        dilation: Extent = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        kind: Kind = "spatial",
        depth: int = 0,
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
        shape = KernelShape.of(dense.weight.shape, groups, kind)
        super().__init__(shape, rank, depth, device, dtype)
        check_choice("execution", execution, (*self.executions, "auto"))
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = dense.kernel_size
        self.stride = dense.stride
        self.padding = dense.padding
        self.dilation = dense.dilation
        self.groups = groups
        self.padding_mode = padding_mode
        self.kind = kind
        self.execution = execution
        self.geometry = Geometry(
            dense.stride, explicit_padding(dense.padding, shape.size, dense.dilation), dense.dilation, padding_mode
        )
        self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None
        if init is not None:
            self.reset_parameters(init)

    @classmethod
    def from_dense(
        cls,
        dense: _ConvNd,
        rank: int,
        init: Init | None = "spectral",
        *,
        kind: Kind = "spatial",
        depth: int = 0,
        execution: str = "auto",
    ) -> Self:
        """Return a factorized copy of ``dense``; ``init=None`` leaves the factors unfilled."""
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
            kind=kind,
            depth=depth,
            execution=execution,
            init=None,
            device=dense.weight.device,
            dtype=dense.weight.dtype,
        )
        layer.take_over(dense, init)
        return layer

    def dense_skeleton(self) -> _ConvNd:
        """Return a ``torch.nn`` convolution with this layer's settings on the meta device."""
        dense: _ConvNd = self.dense_type(
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
        input: Tensor,  # (batch, in, *spatial) or (in, *spatial)
    ) -> Tensor:  # (batch, out, *spatial)
        """Apply the layer."""
        execution = self.chosen_execution()
        if execution == "one_conv":
            return convolve(input, self.running_weight(), self.bias, self.geometry, self.groups)
        run = _RUN[execution]
        return run(input, self.U, self.V, list(self.inner), self.bias, self.shape, self.geometry)

    def chosen_execution(self) -> str:
        """Return the execution that ``forward`` takes: the one set, or for ``"auto"`` the cheapest by cost."""
        if self.drops or self.decay_in_backward:  # both act on the composed weight
            return "one_conv"
        check_choice("execution", self.execution, (*self.executions, "auto"))
        if self.execution != "auto":
            return self.execution
        compiled = torch.compiler.is_compiling()
        return cheapest_conv(self.shape, self.rank, self.depth, self.stride, self.U.device.type, compiled)

    def extra_repr(self) -> str:
        """Show shape, settings that differ from the defaults, rank and the parameters saved."""
        settings = conv_repr(self)
        settings += [f"kind={self.kind}"] if self.kind != "spatial" else []
        return ", ".join([*settings, f"execution={self.chosen_execution()}", self.size_repr()])


def conv_repr(layer: Any) -> list[str]:
    """Return channels, kernel size and the settings that differ from the defaults of a convolution of any kind."""
    dims = len(layer.kernel_size)
    ones = (1,) * dims
    settings = [f"{layer.in_channels}, {layer.out_channels}, kernel_size={layer.kernel_size}"]
    settings += [f"stride={layer.stride}"] if layer.stride != ones else []
    settings += [f"padding={layer.padding}"] if layer.padding != (0,) * dims else []
    settings += [f"dilation={layer.dilation}"] if layer.dilation != ones else []
    settings += [f"groups={layer.groups}"] if layer.groups != 1 else []
    settings += ["bias=False"] if layer.bias is None else []
    settings += [f"padding_mode={layer.padding_mode}"] if layer.padding_mode != "zeros" else []
    return settings


class FactorizedConv1d(FactorizedConv):
    """A factorized ``nn.Conv1d``: ``V`` spans the length, ``U`` is pointwise."""

    dense_type = nn.Conv1d
    dims = 1


class FactorizedConv2d(FactorizedConv):
    """A factorized ``nn.Conv2d``: a 1×kw convolution, then a kh×1 one (``kind="spatial"``)."""

    dense_type = nn.Conv2d
    dims = 2


class FactorizedConv3d(FactorizedConv):
    """A factorized ``nn.Conv3d``: a 1×kh×kw convolution, then a kt×1×1 one (``kind="spatial"``)."""

    dense_type = nn.Conv3d
    dims = 3
