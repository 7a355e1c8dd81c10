"""A linear layer whose weight is a tensor train or a Tucker tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from factorized.layers.composed import check_dense
from factorized.layers.draw import Init
from factorized.layers.tensor import TensorizedLayer
from factorized.maths.contraction import contract_linear
from factorized.maths.folding import Rank
from factorized.maths.kernel import KernelShape
from factorized.maths.tucker import CoreKind


class TensorizedLinear(TensorizedLayer):
    """``y = x Wᵀ + b`` with ``W`` (out, in), folded into ``dims``, held as a tensor train or a Tucker tensor.

    ``rank`` is one whole number for all ranks or a tuple of them: between each two dimensions for
    ``method="tensor_train"``, one per dimension for ``"tucker"``. ``execution`` is ``"one_product"`` (compose ``W``
    first), ``"two_products"`` for a train or ``"three_products"`` for Tucker, where ``dims`` keep outputs and inputs
    apart, or ``"auto"``; all compute the same.
    """

    composed_execution = "one_product"
    contracted_executions: ClassVar[dict[str, str]] = {"tensor_train": "two_products", "tucker": "three_products"}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: Rank,
        bias: bool = True,
        *,
        method: str = "tensor_train",
        dims: Sequence[int] | None = None,
        core: CoreKind | None = None,
        refinements: int = 0,
        execution: str = "auto",
        init: Init | None = "spectral",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = KernelShape.of((out_features, in_features))
        super().__init__(shape, rank, method, dims, core, refinements, False, device, dtype)
        self.in_features = in_features
        self.out_features = out_features
        self.set_execution(execution)
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        if init is not None:
            self.reset_parameters(init)

    @classmethod
    def from_dense(
        cls,
        dense: nn.Linear,
        rank: Rank,
        init: Init | None = "spectral",
        *,
        method: str = "tensor_train",
        dims: Sequence[int] | None = None,
        core: CoreKind | None = None,
        refinements: int = 0,
        execution: str = "auto",
    ) -> TensorizedLinear:
        """Return a tensorized copy of ``dense``; ``init=None`` leaves the cores unfilled."""
        check_dense(dense, nn.Linear)
        layer = cls(
            dense.in_features,
            dense.out_features,
            rank,
            dense.bias is not None,
            method=method,
            dims=dims,
            core=core,
            refinements=refinements,
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
        return contract_linear(input, self.folding, self.format, list(self.cores), self.bias)

    def extra_repr(self) -> str:
        """Show shape, format, rank and the parameters saved."""
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, "
            f"execution={self.chosen_execution()}, {self.size_repr()}"
        )
