"""A linear layer whose weight is kept transposed, as transformers' ``Conv1D`` does in GPT-2, and is a product."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from factorized.layers.base import FactorizedLayer, check_choice
from factorized.layers.draw import Init
from factorized.layers.execution import cheapest_linear
from factorized.maths.kernel import KernelShape


class FactorizedTransposedLinear(FactorizedLayer):
    """``y = x U M₁…M_d Vᵀ + b``: ``U`` is (in, rank) and ``V`` is (out, rank), so that the weight is (in, out).

    ``dense_type`` is the class it stands for, called with (out, in).
    """

    executions: ClassVar[tuple[str, ...]] = ("two_products", "one_product")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        dense_type: type[nn.Module],
        *,
        depth: int = 0,
        execution: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(KernelShape.of((in_features, out_features)), rank, depth, device, dtype)
        check_choice("execution", execution, (*self.executions, "auto"))
        self.in_features, self.out_features, self.dense_type = in_features, out_features, dense_type
        self.execution = execution
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype))

    @classmethod
    def from_dense(
        cls, dense: nn.Module, rank: int, init: Init | None = "spectral", *, depth: int = 0, execution: str = "auto"
    ) -> FactorizedTransposedLinear:
        """Return a factorized copy of ``dense``; ``init=None`` leaves the factors unfilled."""
        weight = dense.weight
        assert isinstance(weight, Tensor)
        inputs, outputs = weight.shape
        layer = cls(
            inputs,
            outputs,
            rank,
            type(dense),
            depth=depth,
            execution=execution,
            device=weight.device,
            dtype=weight.dtype,
        )
        layer.take_over(dense, init)
        return layer

    def dense_skeleton(self) -> nn.Module:
        """Return a layer of ``dense_type`` on the meta device."""
        with torch.device("meta"):
            return self.dense_type(self.out_features, self.in_features)

    def forward(
        self,
        input: Tensor,  # (..., in)
    ) -> Tensor:  # (..., out)
        """Apply the layer."""
        if self.chosen_execution() == "one_product":
            return F.linear(input, self.running_weight().mT, self.bias)
        x = F.linear(input, self.U.mT)
        for M in self.inner:
            x = F.linear(x, M.mT)
        return F.linear(x, self.V, self.bias)

    def chosen_execution(self) -> str:
        """Return the execution that ``forward`` takes: the one set, or for ``"auto"`` the cheapest by cost."""
        if self.drops or self.decay_in_backward:  # both act on the composed weight
            return "one_product"
        check_choice("execution", self.execution, (*self.executions, "auto"))
        return self.execution if self.execution != "auto" else cheapest_linear(self.shape, self.rank, self.depth)

    def extra_repr(self) -> str:
        """Show shape, rank and the parameters saved."""
        return f"{self.in_features}, {self.out_features}, execution={self.chosen_execution()}, {self.size_repr()}"
