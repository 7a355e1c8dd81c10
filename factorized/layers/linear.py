"""A linear layer whose weight is a product."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from factorized.layers.base import FactorizedLayer, check_choice
from factorized.layers.composed import check_dense
from factorized.layers.draw import Init
from factorized.layers.execution import cheapest_linear
from factorized.maths.kernel import KernelShape


class FactorizedLinear(FactorizedLayer):
    """``y = x (U M₁…M_d Vᵀ)ᵀ + b``, by thin products (``"two_products"``) or one with the composed weight."""

    executions: ClassVar[tuple[str, ...]] = ("two_products", "one_product")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        bias: bool = True,
        *,
        depth: int = 0,
        execution: str = "auto",
        init: Init | None = "spectral",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(KernelShape.of((out_features, in_features)), rank, depth, device, dtype)
        check_choice("execution", execution, (*self.executions, "auto"))
        self.in_features = in_features
        self.out_features = out_features
        self.execution = execution
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        if init is not None:
            self.reset_parameters(init)

    @classmethod
    def from_dense(
        cls, dense: nn.Linear, rank: int, init: Init | None = "spectral", *, depth: int = 0, execution: str = "auto"
    ) -> FactorizedLinear:
        """Return a factorized copy of ``dense``; ``init=None`` leaves the factors unfilled."""
        check_dense(dense, nn.Linear)
        layer = cls(
            dense.in_features,
            dense.out_features,
            rank,
            dense.bias is not None,
            depth=depth,
            execution=execution,
            init=None,
            device=dense.weight.device,
            dtype=dense.weight.dtype,
        )
        layer.take_over(dense, init)
        return layer

    def dense_skeleton(self) -> nn.Linear:
        """Return an ``nn.Linear`` with this layer's settings on the meta device."""
        return nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")

    def forward(
        self,
        input: Tensor,  # (..., in)
    ) -> Tensor:  # (..., out)
        """Apply the layer."""
        if self.chosen_execution() == "one_product":
            return F.linear(input, self.running_weight(), self.bias)
        x = F.linear(input, self.V.mT)
        for M in reversed(list(self.inner)):  # torch 2.11 traces a list, not a ParameterList
            x = F.linear(x, M)
        return F.linear(x, self.U, self.bias)

    def chosen_execution(self) -> str:
        """Return the execution that ``forward`` takes: the one set, or for ``"auto"`` the cheapest by cost."""
        if self.drops or self.decay_in_backward:  # both act on the composed weight
            return "one_product"
        check_choice("execution", self.execution, (*self.executions, "auto"))
        if self.execution != "auto":
            return self.execution
        return cheapest_linear(self.shape, self.rank, self.depth)

    def extra_repr(self) -> str:
        """Show shape, rank and the parameters saved."""
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, "
            f"execution={self.chosen_execution()}, {self.size_repr()}"
        )
