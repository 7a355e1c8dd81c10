"""What a weight costs as a tensor in a format."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from factorized.maths.contraction import can_contract, contracted_macs, preparing_macs
from factorized.maths.folding import Folding, Rank
from factorized.maths.kernel import KernelShape
from factorized.planning.cost import Call


@dataclass(frozen=True)
class TensorCost:
    """What one weight costs at some ranks, or dense (``rank=None``). Tied layers share it and add up their calls."""

    shape: KernelShape
    folding: Folding
    separable: bool = False
    multiplied: tuple[Call, ...] = ()

    @property
    def taps(self) -> int:
        """Entries of the depthwise kernel of a separable block."""
        return self.shape.in_channels * prod(self.shape.size) if self.separable else 0

    def params(self, rank: Rank | None) -> int:
        """Return the entries of the weight, or of the cores and the depthwise kernel."""
        return self.shape.numel if rank is None else self.folding.format(rank).core_numel + self.taps

    def macs(self, rank: Rank | None) -> int:
        """Return the MACs of all calls, each in the way that takes fewer: composing the weight, or contracting."""
        positions = [call.positions for call in self.multiplied]
        if rank is None:
            return sum(positions) * self.shape.numel
        tensor = self.folding.format(rank)
        composed = sum(count * self.folding.shape.numel + tensor.expand_macs for count in positions)
        if not can_contract(self.folding):
            return composed + sum(positions) * self.taps
        contracted = sum(
            contracted_macs(self.folding, tensor, call.positions, call.input_positions)
            + preparing_macs(self.folding, tensor)
            for call in self.multiplied
        )
        return min(composed, contracted) + sum(positions) * self.taps
