"""What every layer with a tensor for its weight is: the cores of a tensor train or a Tucker tensor."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from factorized.layers.base import check_choice
from factorized.layers.composed import ComposedLayer
from factorized.layers.draw import Init, draw_dense, draw_dense_as
from factorized.layers.execution import TRAFFIC, contracting_is_cheaper
from factorized.maths.contraction import can_contract
from factorized.maths.folding import Rank, fold
from factorized.maths.kernel import KernelShape
from factorized.maths.light_expansion import expand_for_training
from factorized.maths.spectral import truncated_svd
from factorized.maths.tensor_train import TrainFormat
from factorized.maths.tucker import CoreKind


class TensorizedLayer(ComposedLayer):
    """A layer whose weight, folded into several dimensions, is a tensor train or a Tucker tensor. Abstract.

    ``cores`` holds the tensor in the order of its format (``maths/tensor_train.py``, ``maths/tucker.py``). Of a
    separable convolution it is the pointwise part, and ``depthwise`` (in, 1, *size) the other.
    """

    depthwise: nn.Parameter | None
    execution: str
    composed_execution: ClassVar[str]
    contracted_executions: ClassVar[dict[str, str]]  # by method

    def __init__(
        self,
        shape: KernelShape,
        rank: Rank,
        method: str,
        dims: Sequence[int] | None,
        core: CoreKind | None,
        refinements: int,
        separable: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(shape)
        self.folding = fold(shape, method, dims, None, core, refinements, separable)
        self.format = self.folding.format(rank)
        asked = tuple(rank) if isinstance(rank, (tuple, list)) else (rank,) * len(self.rank)
        if asked != self.rank:
            warnings.warn(
                f"rank {rank} is above what dims {self.folding.dims} allow; clipped to {self.rank}", stacklevel=3
            )
        contracted = [self.contracted_executions[method]] if can_contract(self.folding) else []
        self.executions = (*contracted, self.composed_execution)  # the ways this layer can run, the composed one last
        self.cores = nn.ParameterList(
            nn.Parameter(torch.empty(extents, device=device, dtype=dtype)) for extents in self.format.core_shapes
        )
        taps = torch.empty(shape.in_channels, 1, *shape.size, device=device, dtype=dtype) if separable else None
        self.depthwise = nn.Parameter(taps) if taps is not None else None

    def set_execution(self, execution: str) -> None:
        """Run in the way asked for; find the cheapest one of every device, for ``"auto"``."""
        self.execution = execution
        self.check_execution()
        self._cheapest = {device: self.cheapest_execution(device) for device in TRAFFIC}

    def cheapest_execution(self, device: str) -> str:
        """Return the cheapest way to run: composing the weight, or contracting the cores with the input."""
        *contracted, composed = self.executions
        if contracted and contracting_is_cheaper(self.format, self.folding, self.moving_cost(device), self.stride_area):
            return contracted[0]
        return composed

    def moving_cost(self, device: str) -> int:
        """Return what moving one channel costs more where the cores are contracted, in multiply-accumulates."""
        return 0

    @property
    def stride_area(self) -> int:
        """Positions of the input per position of the output."""
        return 1

    @property
    def method(self) -> str:
        """``"tensor_train"`` or ``"tucker"``."""
        return self.folding.method

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions that the weight is folded into."""
        return self.folding.dims

    @property
    def rank(self) -> tuple[int, ...]:
        """The ranks of the format."""
        return self.format.ranks

    @property
    def factors(self) -> tuple[nn.Parameter, ...]:
        """The cores, and the depthwise kernel of a separable convolution."""
        return (*self.cores, *([] if self.depthwise is None else [self.depthwise]))

    @property
    def product(self) -> Tensor:
        """The weight that the cores stand for: of a separable convolution the pointwise one; differentiable."""
        cores = list(self.cores)
        # The pointwise part of a separable kernel is small beside the dense one, whatever is kept on the way to it.
        separable = self.depthwise is not None
        tensor = self.format.expand(cores) if separable else expand_for_training(self.format, cores)
        return tensor.reshape(self.folding.shape.weight_shape)

    @property
    def weight(self) -> Tensor:
        """The composed weight, in the dense layer's shape; differentiable."""
        return self.product if self.depthwise is None else self.product * self.depthwise.squeeze(1)

    @property
    def alike(self) -> Hashable:
        """Layers of one shape and format are decomposed in one batch."""
        return self.shape, self.format, self.depthwise is not None

    def decompose(
        self,
        weights: Tensor,  # (batch, out, in/groups, *size)
    ) -> tuple[Tensor, ...]:
        """Return the cores of some weights; for a separable convolution each input channel is split by its SVD first.

        The part of a kernel that belongs to one input channel is a matrix (out, taps); its leading singular triplet is
        the best separable kernel, whose pointwise part is then decomposed. A triplet has either sign; the largest tap
        is taken to be positive, so that rounding does not decide what is decomposed. Taps of a channel whose weights
        are all zero are not: zeros on both sides would never receive a gradient.
        """
        if self.depthwise is None:
            return self.format.decompose(weights.reshape(-1, *self.dims))
        channels = weights.flatten(3).transpose(1, 2)  # (batch, in, out, taps)
        U, S, V = truncated_svd(channels, 1)
        largest = V.abs().argmax(dim=-2, keepdim=True)
        sign = torch.where(V.take_along_dim(largest, dim=-2) < 0, -1, 1)  # (batch, in, 1, 1)
        root = S.sqrt().unsqueeze(-1) * sign
        pointwise = (U * root).squeeze(-1).transpose(1, 2).to(weights.dtype)  # (batch, out, in)
        taps = (V * torch.where(root == 0, sign, root)).reshape(len(weights), *self.depthwise.shape).to(weights.dtype)
        return (*self.format.decompose(pointwise.reshape(-1, *self.dims)), taps)

    @torch.no_grad()
    def set_factors(self, *factors: Tensor) -> None:
        """Copy the cores in, and the depthwise kernel."""
        for own, value in zip(self.factors, factors, strict=True):
            own.copy_(value)

    @torch.no_grad()
    def draw_factors(self, init: Init) -> None:
        """Draw the cores so that the weight has the mean square that ``init`` gives a dense weight of its shape.

        A depthwise kernel is drawn as torch draws one, and the cores make up for it.
        """
        dense = torch.empty(self.shape.weight_shape, device=self.cores[0].device)
        draw_dense_as(dense, self.shape, init)
        target = dense.square().mean()
        if self.depthwise is not None:
            draw_dense(self.depthwise)
            target = target / self.depthwise.float().square().mean()
        # The norm of a long train is beyond float32, even where all of its cores have norm 1.
        drawn = [torch.randn(core.shape, device=core.device).double() for core in self.cores]
        drawn = [core / core.norm() for core in drawn]
        scale = target * self.format.numel / self.format.norm_squared(drawn)  # of the squared norm of the tensor
        for core, value in zip(self.cores, drawn, strict=True):
            core.copy_(value * scale ** (1 / (2 * len(self.cores))))

    def share_factors(self, other: Self) -> None:
        """Hold the very factors of ``other``."""
        self.cores, self.depthwise = other.cores, other.depthwise

    def chosen_execution(self) -> str:
        """Return the execution that ``forward`` takes: the one set, or for ``"auto"`` the cheapest by cost."""
        if self.drops or self.decay_in_backward:  # both act on the composed weight
            return self.composed_execution
        self.check_execution()
        if self.execution != "auto":
            return self.execution
        return self._cheapest["cpu" if self.cores[0].device.type == "cpu" else "cuda"]

    def check_execution(self) -> None:
        """Raise unless ``execution`` is one of this layer's."""
        contracted = self.contracted_executions[self.method]
        if self.execution == contracted not in self.executions:
            raise ValueError(
                f"execution={contracted!r} contracts cores with the input, which dims {self.dims} do not allow for a "
                f'{self.shape} weight with groups={self.shape.groups}; use "{self.composed_execution}", or leave dims '
                "out of an ungrouped layer"
            )
        check_choice("execution", self.execution, (*self.executions, "auto"))

    @property
    def is_train(self) -> bool:
        """Whether the format is a tensor train."""
        return isinstance(self.format, TrainFormat)

    def size_repr(self) -> str:
        """Return the format, its dimensions and ranks, and the parameters saved, for the layer's repr."""
        used = sum(factor.numel() for factor in self.factors)
        separable = ", separable=True" if self.depthwise is not None else ""
        return (
            f"method={self.method}, dims={self.dims}{separable}, rank={self.rank}, "
            f"params={used:,} of {self.shape.numel:,}"
        )
