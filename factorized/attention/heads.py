"""Linear layers that pad or cut heads, because the attention between them expects wider heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from factorized._checks import check_whole


def plain_type_of(layer: nn.Module) -> type[nn.Module]:
    """Return the class of a projection in its dense module."""
    return layer.plain_type if isinstance(layer, AroundHeads) else type(layer)


class AroundHeads(nn.Module):
    """A linear layer with heads on one side, whose ranks are at most ``size``. Abstract."""

    def __init__(
        self,
        out_features: int,
        in_features: int,
        parts: tuple[tuple[int, int], ...],  # (heads, rank) of each projection in the weight, in order
        size: int,
        bias: bool,
        plain_type: type[nn.Module],  # what the layer was, and is again once nothing is padded
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        for heads, rank in parts:
            check_whole("heads", heads, least=1)
            check_whole("rank", rank, least=1)
            if rank > size:
                raise ValueError(f"size must be at least the rank, got size={size} and rank={rank}")
        self.size, self.plain_type = size, plain_type
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None

    def _linear(self) -> nn.Linear:
        """Return a plain layer with the same parameters."""
        rows, columns = self.weight.shape
        linear = nn.Linear(columns, rows, bias=self.bias is not None, device="meta")
        linear.weight = self.weight
        if self.bias is not None:
            linear.bias = self.bias
        return linear


class HeadsIn(AroundHeads):
    """A linear layer whose output, head by head, is padded with zeros to ``size``.

    For attention modules with one head size for queries, keys and values whose ranks differ. Zeros add nothing to a
    score, and ``HeadsOut`` cuts off what they add to the values.
    """

    def __init__(
        self,
        in_features: int,
        parts: tuple[tuple[int, int], ...],  # (heads, rank) of each projection in the weight, in order
        size: int,
        bias: bool = True,
        *,
        plain_type: type[nn.Module] = nn.Linear,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        rows = sum([heads * rank for heads, rank in parts])
        super().__init__(rows, in_features, parts, size, bias, plain_type, device, dtype)
        self.in_features, self.parts = in_features, tuple(parts)

    def forward(
        self,
        input: Tensor,  # (..., in)
    ) -> Tensor:  # (..., sum of heads · size)
        """Apply the layer."""
        y = F.linear(input, self.weight, self.bias)
        padded = []
        start = 0
        for heads, rank in self.parts:
            part = y.narrow(-1, start, heads * rank).unflatten(-1, (heads, rank))
            padded.append(F.pad(part, (0, self.size - rank)).flatten(-2))
            start += heads * rank
        return padded[0] if len(padded) == 1 else torch.cat(padded, dim=-1)

    def lowered(self) -> nn.Sequential | None:
        """Return plain layers that compute the same and share the parameters; None where the ranks differ."""
        heads, (rank, *other) = sum(heads for heads, _ in self.parts), {rank for _, rank in self.parts}
        if other:
            return None
        pad = nn.ConstantPad1d((0, self.size - rank), 0.0)
        return nn.Sequential(self._linear(), nn.Unflatten(-1, (heads, rank)), pad, nn.Flatten(-2))

    def extra_repr(self) -> str:
        """Show shape, ranks and the size the heads are padded to."""
        ranks = ", ".join(f"{heads}x{rank}" for heads, rank in self.parts)
        return f"{self.in_features}, heads={ranks}, size={self.size}, bias={self.bias is not None}"


class HeadsOut(AroundHeads):
    """A linear layer that reads the first ``rank`` of ``size`` dimensions of every head."""

    def __init__(
        self,
        heads: int,
        rank: int,
        size: int,
        out_features: int,
        bias: bool = True,
        *,
        plain_type: type[nn.Module] = nn.Linear,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(out_features, heads * rank, ((heads, rank),), size, bias, plain_type, device, dtype)
        self.heads, self.rank, self.out_features = heads, rank, out_features

    def forward(
        self,
        input: Tensor,  # (..., heads · size)
    ) -> Tensor:  # (..., out)
        """Apply the layer."""
        kept = input.unflatten(-1, (self.heads, self.size))[..., : self.rank]
        return F.linear(kept.flatten(-2), self.weight, self.bias)

    def lowered(self) -> nn.Sequential:
        """Return plain layers that compute the same and share the parameters."""
        cut = nn.ConstantPad1d((0, self.rank - self.size), 0.0)
        return nn.Sequential(nn.Unflatten(-1, (self.heads, self.size)), cut, nn.Flatten(-2), self._linear())

    def extra_repr(self) -> str:
        """Show shape, rank and the size the heads come in."""
        return f"heads={self.heads}x{self.rank}, size={self.size}, {self.out_features}, bias={self.bias is not None}"
