"""A bag of embeddings whose table is held in a format: thin rows are summed up, then multiplied."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from factorized._checks import check_choice
from factorized.formats.format import Format
from factorized.nn.embedding import FactorizedEmbedding, widened
from factorized.nn.init import Init
from factorized.nn.layer import Lowered
from factorized.nn.recorded import recorded_call


class FactorizedEmbeddingBag(FactorizedEmbedding):
    """A factorized ``nn.EmbeddingBag``; for a product, rows of ``U`` are summed or averaged, then multiplied by ``Vᵀ``.

    Arguments are those of ``nn.EmbeddingBag`` (without ``max_norm``) and of ``fz.FactorizedEmbedding``.

    A maximum, and ``scale_grad_by_freq``, need every row multiplied first. The counts of ``scale_grad_by_freq`` are
    correct here; torch 2.13 uses those of other entries on the CPU. A maximum with padding is exported for one batch
    size only.

    Raises:
        ValueError: as for ``fz.FactorizedEmbedding``, or ``mode`` is unknown.

    Examples:
        >>> layer = fz.FactorizedEmbeddingBag(1000, 64, 16, mode="sum")
        >>> layer(torch.tensor([[1, 2, 3], [4, 5, 6]])).shape  # two bags of three entries
        torch.Size([2, 64])
    """

    dense_type = nn.EmbeddingBag
    settings = (*FactorizedEmbedding.settings, "mode", "include_last_offset")

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        format: Format | int,
        *,
        mode: str = "mean",
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        depth: int = 0,
        init: Init | None = "spectral",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_choice("mode", mode, ("sum", "mean", "max"))
        super().__init__(
            num_embeddings,
            embedding_dim,
            format,
            padding_idx,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            depth=depth,
            init=init,
            device=device,
            dtype=dtype,
        )
        self.mode = mode
        self.include_last_offset = include_last_offset

    @property
    def widens_bags(self) -> bool:
        """Whether thin rows are added up before they are widened; else every row is widened first."""
        return self._has_thin_rows and self.mode != "max" and not self.scale_grad_by_freq

    def forward(
        self,
        input: Tensor,  # (bags, entries), or (entries of all bags,)
        offsets: Tensor | None = None,  # (bags,), where each begins
        per_sample_weights: Tensor | None = None,  # like input, for sums
    ) -> Tensor:  # (bags, dim)
        """Return the sum, mean or maximum of the rows of each bag."""
        if isinstance(input, Proxy):
            return recorded_call(self, input, offsets, per_sample_weights)
        composed = self.chosen_execution() == "composed"
        if composed and not self.scale_grad_by_freq:
            return self._bags(input, self.composed_table(), offsets, per_sample_weights, self.padding_idx)
        if self.widens_bags and not composed:
            factors = self.factors
            *wide, thin = self.format.chain_weights(factors)
            table = thin.to(factors[0].dtype)  # that of per-sample weights, where autocast multiplies cores in another
            bags = self._bags(input, table, offsets, per_sample_weights, self.padding_idx, self.sparse)
            return widened(bags, wide, factors[0].dtype)
        rows = super().forward(input.reshape(-1))
        places = torch.arange(rows.shape[0], dtype=input.dtype, device=input.device).view_as(input)
        if self.padding_idx is None:
            return self._bags(places, rows, offsets, per_sample_weights, None)
        places = (places + 1).masked_fill(input == self.padding_idx, 0)
        rows = torch.cat([rows.new_zeros(1, self.embedding_dim), rows])  # one more, for padding
        return self._bags(places, rows, offsets, per_sample_weights, 0)

    def _bags(
        self,
        indices: Tensor,  # like input
        table: Tensor,  # (entries, any width)
        offsets: Tensor | None,
        per_sample_weights: Tensor | None,
        padding_idx: int | None,
        sparse: bool = False,
    ) -> Tensor:  # (bags, any width)
        return F.embedding_bag(
            indices,
            table,
            offsets,
            mode=self.mode,
            sparse=sparse,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding_idx,
        )

    def lowered(self) -> list[Lowered]:
        """Return nothing: a pair in ``nn.Sequential`` would take neither offsets nor per-sample weights."""
        return []

    @property
    def why_composed(self) -> str:
        """Why ``lowered`` is empty."""
        return "a pair of layers would take no offsets"

    def settings_repr(self) -> list[str]:
        """Return entries, dimension, the mode and the padding entry."""
        return [*super().settings_repr(), f"mode={self.mode}"]
