"""Linear layers around heads that are narrower than the attention between them takes them for."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from factorized._checks import check_whole


def is_around_heads(layer: nn.Module) -> bool:
    """Return whether a layer is a ``HeadsIn`` or a ``HeadsOut``."""
    return isinstance(layer, (HeadsIn, HeadsOut))


def plain_type_of(layer: nn.Module) -> type[nn.Module]:
    """Return the class of a projection in its dense module."""
    return layer.plain_type if isinstance(layer, (HeadsIn, HeadsOut)) else type(layer)


class HeadsIn(nn.Module):
    """A linear layer whose output, head by head, is padded with zeros to ``size``.

    For attention that has one head size for queries, keys and values, where they have different ranks. Zeros add
    nothing to a score, and what they give in the values is cut off again by ``HeadsOut``.
    """

    def __init__(
        self,
        in_features: int,
        parts: tuple[tuple[int, int], ...],  # (heads, rank) of each projection in the weight, in order
        size: int,
        bias: bool = True,
        *,
        plain_type: type[nn.Module] = nn.Linear,  # what the layer was, and is again once nothing is padded
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for heads, rank in parts:
            check_whole("heads", heads, least=1)
            check_whole("rank", rank, least=1)
            if rank > size:
                raise ValueError(f"size must be at least the rank of every part, got size={size} and rank={rank}")
        self.in_features, self.parts, self.size, self.plain_type = in_features, tuple(parts), size, plain_type
        rows = sum(heads * rank for heads, rank in parts)
        self.weight = nn.Parameter(torch.empty(rows, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None

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
        """Return plain layers that compute the same with the very parameters; None where the ranks differ."""
        heads, (rank, *other) = sum(heads for heads, _ in self.parts), {rank for _, rank in self.parts}
        if other:
            return None
        pad = nn.ConstantPad1d((0, self.size - rank), 0.0)
        return nn.Sequential(_linear(self), nn.Unflatten(-1, (heads, rank)), pad, nn.Flatten(-2))

    def extra_repr(self) -> str:
        """Show shape, ranks and the size the heads are padded to."""
        ranks = ", ".join(f"{heads}x{rank}" for heads, rank in self.parts)
        return f"{self.in_features}, heads={ranks}, size={self.size}, bias={self.bias is not None}"


class HeadsOut(nn.Module):
    """A linear layer that reads the first ``rank`` of ``size`` dimensions of every head."""

    def __init__(
        self,
        heads: int,
        rank: int,
        size: int,
        out_features: int,
        bias: bool = True,
        *,
        plain_type: type[nn.Module] = nn.Linear,  # what the layer was, and is again once nothing is padded
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_whole("heads", heads, least=1)
        check_whole("rank", rank, least=1)
        if rank > size:
            raise ValueError(f"size must be at least the rank, got size={size} and rank={rank}")
        self.heads, self.rank, self.size = heads, rank, size
        self.out_features, self.plain_type = out_features, plain_type
        self.weight = nn.Parameter(torch.empty(out_features, heads * rank, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None

    def forward(
        self,
        input: Tensor,  # (..., heads · size)
    ) -> Tensor:  # (..., out)
        """Apply the layer."""
        kept = input.unflatten(-1, (self.heads, self.size))[..., : self.rank]
        return F.linear(kept.flatten(-2), self.weight, self.bias)

    def lowered(self) -> nn.Sequential:
        """Return plain layers that compute the same with the very parameters."""
        cut = nn.ConstantPad1d((0, self.rank - self.size), 0.0)
        return nn.Sequential(nn.Unflatten(-1, (self.heads, self.size)), cut, nn.Flatten(-2), _linear(self))

    def extra_repr(self) -> str:
        """Show shape, rank and the size the heads come in."""
        return f"heads={self.heads}x{self.rank}, size={self.size}, {self.out_features}, bias={self.bias is not None}"


def _linear(layer: HeadsIn | HeadsOut) -> nn.Linear:
    rows, columns = layer.weight.shape
    linear = nn.Linear(columns, rows, bias=layer.bias is not None, device="meta")
    linear.weight = layer.weight
    if layer.bias is not None:
        linear.bias = layer.bias
    return linear
