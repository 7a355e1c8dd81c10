"""An embedding whose table is held in a format: thin rows are looked up, then multiplied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from factorized._torch import is_jit_tracing
from factorized.formats.format import Format
from factorized.nn.dense import check_dense, format_of
from factorized.nn.init import Init
from factorized.nn.layer import FactorizedLayer, Lowered
from factorized.nn.recorded import recorded_call

NO_ROWS = "it renormalizes rows of the table, which the format does not store; keep the layer dense"


class FactorizedEmbedding(FactorizedLayer):
    """A factorized ``nn.Embedding``; for a product, rows of ``U`` are looked up and multiplied by ``Vᵀ``.

    Arguments are those of ``nn.Embedding`` (without ``max_norm``) and, for ``format``, ``depth`` and ``init``, of
    ``fz.FactorizedLinear``.

    Raises:
        ValueError: the format is for another shape, or cannot do what ``padding_idx`` or ``sparse`` asks for.

    Examples:
        >>> layer = fz.FactorizedEmbedding(1000, 64, 16, padding_idx=0)
        >>> layer
        FactorizedEmbedding(1000, 64, padding_idx=0, execution=look_up, rank=16, params=17,024 of 64,000)
        >>> layer(torch.tensor([0, 7])).shape
        torch.Size([2, 64])
    """

    bias: None
    form_kind = "embedding"
    tunable = False
    dense_type: ClassVar[type[nn.Module]] = nn.Embedding
    settings: ClassVar[tuple[str, ...]] = ("padding_idx", "scale_grad_by_freq", "sparse")  # of the dense layer

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        format: Format | int,
        padding_idx: int | None = None,
        *,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        depth: int = 0,
        init: Init | None = "spectral",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        made = format_of((num_embeddings, embedding_dim), format, depth=depth)
        super().__init__(made, "auto", device, dtype)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx must be in -{num_embeddings}..{num_embeddings - 1}, got {padding_idx}")
        if sparse and made.row_core is None:
            raise ValueError(
                f"sparse=True needs a core with a row per entry, which {made.name} does not have; use LowRank"
            )
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx % num_embeddings if padding_idx is not None else None
        self.scale_grad_by_freq = scale_grad_by_freq
        self.sparse = sparse
        self.max_norm, self.norm_type = None, 2.0  # of a table that is not renormalized
        self.bias = None
        self._has_thin_rows = made.has_thin_rows
        if init is not None:
            self.reset_parameters(init)

    @classmethod
    def from_dense(
        cls,
        dense: nn.Embedding | nn.EmbeddingBag,
        format: Format | int,
        init: Init | None = "spectral",
        *,
        depth: int = 0,
    ) -> Self:
        """Return a factorized copy of ``dense``; ``init=None`` leaves the factors unfilled."""
        check_dense(dense, cls.dense_type)
        if dense.max_norm is not None:
            raise ValueError(f"max_norm must be None, got {dense.max_norm}: {NO_ROWS}")
        make: Any = cls  # a bag has settings of its own
        layer: Self = make(
            dense.num_embeddings,
            dense.embedding_dim,
            format,
            **{name: getattr(dense, name) for name in cls.settings},
            depth=depth,
            init=None,
            device=dense.weight.device,
            dtype=dense.weight.dtype,
        )
        layer.take_over(dense, init)
        return layer

    def dense_skeleton(self) -> nn.Module:
        """Return a dense layer with this one's settings on the meta device."""
        return self.plain_table(self.embedding_dim)

    def plain_table(self, dim: int) -> nn.Module:
        """Return a dense layer with this one's settings and rows of ``dim`` numbers on the meta device."""
        settings = {name: getattr(self, name) for name in self.settings}
        return self.dense_type(self.num_embeddings, dim, **settings, device="meta")

    def chosen_execution(self) -> str:  # type: ignore[override]  # no way of a format looks rows up
        """Return ``"look_up"``, or ``"composed"`` where the whole table has to be formed."""
        return "composed" if self.drops or not self._has_thin_rows else "look_up"

    def forward(
        self,
        input: Tensor,  # (...)
    ) -> Tensor:  # (..., dim)
        """Look up rows of the table."""
        if isinstance(input, Proxy):
            return recorded_call(self, input)
        if self.chosen_execution() == "composed":
            table = self.composed_table()
            return F.embedding(input, table, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)
        return self.looked_up(input)

    def composed_table(self) -> Tensor:  # (entries, dim)
        """Return the table with drop-connect applied, in the type of its factors even under autocast."""
        return self.format.adjusted(self.factors, self.adjust).to(self.factors[0].dtype)

    def looked_up(
        self,
        input: Tensor,  # (...)
    ) -> Tensor:  # (..., dim)
        """Return rows of the table, from its thin rows."""
        factors = self.factors
        *wide, thin = self.format.chain_weights(factors)
        x = widened(F.embedding(input, thin, self.padding_idx, sparse=self.sparse), wide, factors[0].dtype)
        # A trace is recorded with gradients and checked without: the same in both.
        records = torch.is_grad_enabled() or is_jit_tracing()
        scale = self._gradient_scale(input, x.dtype) if records else None
        return x if scale is None else scale_gradient(x, scale)

    def _gradient_scale(self, indices: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return what the dense layer multiplies the gradient of each looked-up row by.

        A dense table gives padding no gradient, and rare entries more, by scaling rows of its weight's gradient. The
        other cores are shared by all rows, so the scale has to act before them: on the gradient of the output.
        """
        if self.padding_idx is None and not self.scale_grad_by_freq:
            return None
        scale = torch.ones_like(indices, dtype=dtype)
        if self.scale_grad_by_freq:
            flat = indices.reshape(-1)  # counted as integers: bfloat16 is exact up to 256 only
            counts = flat.new_zeros(self.num_embeddings).index_add(0, flat, torch.ones_like(flat))
            scale = scale / counts[indices]
        if self.padding_idx is not None:
            scale = scale * (indices != self.padding_idx)
        return scale.unsqueeze(-1)

    @torch.no_grad()
    def draw_factors(self, init: Init) -> None:
        """Draw the factors; ``"default"`` draws thin rows, or the table, as torch draws a table; padding is zero."""
        row_core = self.format.decayed[0].row_core  # of the part that is drawn: the rest of a residual is zero
        super().draw_factors(nn.init.normal_ if init == "default" and row_core is None else init)
        if row_core is None:
            if self.padding_idx is not None:
                raise ValueError(
                    f"padding_idx={self.padding_idx} needs a row of zeros, which a randomly drawn {self.format.name} "
                    'cannot have; use init="spectral", or LowRank'
                )
            return
        rows = self.get_parameter(row_core)
        if init == "default":
            rows.normal_()
        if self.padding_idx is not None:
            rows[self.padding_idx] = 0

    @torch.no_grad()
    def draw_dense_weight(self) -> Tensor:  # (entries, dim)
        """Draw the table that a fresh ``nn.Embedding`` would have."""
        factor = self.factors[0]
        weight = torch.randn(self.shape.weight_shape, device=factor.device, dtype=factor.dtype)
        if self.padding_idx is not None:
            weight[self.padding_idx] = 0
        return weight

    def lowered(self) -> list[Lowered]:
        """Return a table of thin rows, and the linears that widen them."""
        plain = self.worthwhile(self.format.plain(self.factors)) if self._has_thin_rows else []
        if not plain:
            return []
        *rest, (step, thin) = plain
        made = [Lowered(self.plain_table(step.inputs), (len(rest), False), thin)]
        for place, (step, weight) in reversed(list(enumerate(rest))):
            linear = nn.Linear(step.outputs, step.inputs, bias=False, device="meta")
            made.append(Lowered(linear, (place, True), weight.mT))
        return made

    def settings_repr(self) -> list[str]:
        """Return entries, dimension and the padding entry."""
        padding = f", padding_idx={self.padding_idx}" if self.padding_idx is not None else ""
        return [f"{self.num_embeddings}, {self.embedding_dim}{padding}"]


def widened(
    rows: Tensor,  # (..., rank)
    weights: list[Tensor],  # of the chain, all but the table of thin rows
    dtype: torch.dtype,
) -> Tensor:  # (..., dim)
    """Multiply thin rows, or sums of them, by the other weights of a chain."""
    for weight in reversed(weights):
        rows = F.linear(rows, weight.mT)
    return rows if rows.dtype == dtype else rows.to(dtype)  # autocast multiplies in another type


def scale_gradient(x: Tensor, scale: Tensor) -> Tensor:  # like x
    """Return ``x``, whose gradient will be multiplied by ``scale``."""
    if is_jit_tracing():  # a trace with a Python function in it could not be saved
        fixed = x.detach()
        return fixed + (x - fixed) * scale
    function = _ScaleGradient if torch.compiler.is_compiling() else _ScaleGradientAlone
    return function.apply(x, scale)


class _ScaleGradient(torch.autograd.Function):
    apply: ClassVar[Callable[..., Tensor]]  # torch leaves it untyped
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Tensor:
        return x.detach()  # not a view, so that the output can be changed in place

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (scale,) = ctx.saved_tensors
        return gradient * scale, None


class _ScaleGradientAlone(_ScaleGradient):
    """Forward-mode derivatives too, which torch's compiler cannot trace."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return tangent.clone()  # as torch's table, which scales its gradient only
