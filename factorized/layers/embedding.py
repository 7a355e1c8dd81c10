"""An embedding whose table is a product: thin rows are looked up, then multiplied."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from factorized.layers.base import FactorizedLayer
from factorized.layers.composed import check_dense
from factorized.layers.draw import Init
from factorized.maths.kernel import KernelShape


class FactorizedEmbedding(FactorizedLayer):
    """``table = U M₁…M_d Vᵀ``: ``U`` holds a row of ``rank`` numbers per entry, ``V`` expands it to the full width."""

    bias: None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        rank: int,
        padding_idx: int | None = None,
        *,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        depth: int = 0,
        init: Init | None = "spectral",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(KernelShape.of((num_embeddings, embedding_dim)), rank, depth, device, dtype)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx must be in -{num_embeddings}..{num_embeddings - 1}, got {padding_idx}")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx % num_embeddings if padding_idx is not None else None
        self.scale_grad_by_freq = scale_grad_by_freq
        self.sparse = sparse
        self.bias = None
        if init is not None:
            self.reset_parameters(init)

    @classmethod
    def from_dense(
        cls, dense: nn.Embedding, rank: int, init: Init | None = "spectral", *, depth: int = 0
    ) -> FactorizedEmbedding:
        """Return a factorized copy of ``dense``; ``init=None`` leaves the factors unfilled."""
        check_dense(dense, nn.Embedding)
        if dense.max_norm is not None:
            raise ValueError(f"max_norm renormalizes rows of the table, which a product has not; got {dense.max_norm}")
        layer = cls(
            dense.num_embeddings,
            dense.embedding_dim,
            rank,
            dense.padding_idx,
            scale_grad_by_freq=dense.scale_grad_by_freq,
            sparse=dense.sparse,
            depth=depth,
            init=None,
            device=dense.weight.device,
            dtype=dense.weight.dtype,
        )
        layer.take_over(dense, init)
        return layer

    def dense_skeleton(self) -> nn.Embedding:
        """Return an ``nn.Embedding`` with this layer's settings on the meta device."""
        return nn.Embedding(
            self.num_embeddings,
            self.embedding_dim,
            self.padding_idx,
            scale_grad_by_freq=self.scale_grad_by_freq,
            sparse=self.sparse,
            device="meta",
        )

    def forward(
        self,
        input: Tensor,  # (...)
    ) -> Tensor:  # (..., dim)
        """Look up rows of the product."""
        if self.drops:
            table = self.running_weight()
            return F.embedding(input, table, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)
        x = F.embedding(input, self.U, self.padding_idx, sparse=self.sparse)
        for M in self.inner:
            x = x @ M
        x = F.linear(x, self.V).to(self.U.dtype)  # a table's dtype, also under autocast
        scale = self._gradient_scale(input, x.dtype) if torch.is_grad_enabled() else None
        return x if scale is None else _ScaleGradient.apply(x, scale)  # type: ignore[no-untyped-call]

    def chosen_execution(self) -> str:
        """Return ``"look_up"``, the one way of running an embedding."""
        return "look_up"

    def _gradient_scale(self, indices: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return what the dense layer multiplies the gradient of each looked-up row by.

        A dense table gives padding no gradient, and rare entries more, by scaling rows of its weight's gradient. ``V``
        is shared by all rows, so the scale has to act before it: on the gradient of the output.
        """
        if self.padding_idx is None and not self.scale_grad_by_freq:
            return None
        scale = torch.ones_like(indices, dtype=dtype)
        if self.scale_grad_by_freq:
            flat = indices.reshape(-1)  # counted in whole numbers: half types stop at 256
            counts = flat.new_zeros(self.num_embeddings).index_add(0, flat, torch.ones_like(flat))
            scale = scale / counts[indices]
        if self.padding_idx is not None:
            scale = scale * (indices != self.padding_idx)
        return scale.unsqueeze(-1)

    def draw_factors(self, init: Init) -> None:
        """Draw both factors at random; ``"default"`` draws ``U`` as torch draws a table, N(0, 1); padding is zero."""
        super().draw_factors(init)
        with torch.no_grad():
            if init == "default":
                self.U.normal_()
            if self.padding_idx is not None:
                self.U[self.padding_idx] = 0

    @torch.no_grad()
    def draw_dense_weight(self) -> Tensor:  # (entries, dim)
        """Draw the table that a fresh ``nn.Embedding`` would have."""
        weight = torch.randn(self.shape.weight_shape, device=self.U.device, dtype=self.U.dtype)
        if self.padding_idx is not None:
            weight[self.padding_idx] = 0
        return weight

    def extra_repr(self) -> str:
        """Show shape, rank and the parameters saved."""
        padding = f", padding_idx={self.padding_idx}" if self.padding_idx is not None else ""
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, {self.size_repr()}"


class _ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by ``scale``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        (scale,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient * scale, None
