"""What an attention module costs at a head size, in parameters and in multiply-accumulates, and its spectrum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from factorized.attention.matrices import stacked_by_group, with_bias_row
from factorized.attention.unit import FORMS, AttentionUnit, FormName
from factorized.formats.svd import factor_spectrum

Shape = tuple[int, ...]


@dataclass(frozen=True)
class AttentionCall:
    """The sizes in one call of an attention module."""

    batch: int
    queries: int
    keys: int


@dataclass(frozen=True)
class AttentionCost:
    """What an attention module costs with its ``forms`` at a rank per head, or dense (``rank=None``)."""

    unit: AttentionUnit
    forms: tuple[FormName, ...]  # those that are shrunk
    calls: tuple[AttentionCall, ...] = ()

    @property
    def full_rank(self) -> int:
        """The head size of the dense module."""
        return self.unit.head_size

    def ranks(self, rank: int | None) -> tuple[int, int]:
        """Return the sizes of QK and OV when the forms to shrink are at ``rank``."""
        now = {form: self.unit.form(form)[0].head_size for form in FORMS}
        qk, ov = (size if rank is None or form not in self.forms else min(rank, size) for form, size in now.items())
        return qk, ov

    def params(self, rank: int | None) -> int:
        """Return the entries of the four projections and their biases."""
        return self.params_at(*self.ranks(rank))

    def macs(self, rank: int | None) -> int:
        """Return the MACs of all calls: of projections, of scores, and of weighting the values."""
        return self.macs_at(*self.ranks(rank))

    def params_at(self, qk: int, ov: int) -> int:
        """Return the entries of the projections and biases at a rank of each form."""
        unit = self.unit
        count = 0
        for projection, size in zip(unit.projections, (qk, qk, ov, ov), strict=True):
            count += projection.heads * size * projection.long
            if projection is not unit.output and projection.bias is not None:
                count += projection.heads * size
        # Shrinking the values folds their bias into the output bias, which is added where there is none.
        has_bias = unit.has_output_bias or (unit.value.bias is not None and ov < self.full_rank)
        return count + (unit.output.long if has_bias else 0)

    def macs_at(self, qk: int, ov: int) -> int:
        """Return the MACs of all calls at a rank of each form."""
        unit = self.unit
        between = qk + ov
        if unit.one_size:  # the smaller of the two is padded
            between = 2 * (max(qk, ov) if unit.resizable else self.full_rank)
        query, key, value, output = (p.heads * p.long for p in unit.projections)
        total = 0
        for call in self.calls:
            total += call.batch * call.queries * (query * qk + output * ov)
            total += call.batch * call.keys * (key * qk + value * ov)
            attended = call.keys if unit.sums_to_one else call.keys + 1  # one more key, of zeros
            total += call.batch * call.queries * attended * unit.query.heads * between
        return total


def watch(
    units: Mapping[nn.Module, AttentionUnit],
) -> tuple[dict[nn.Module, list[AttentionCall]], list[RemovableHandle]]:
    """Record every call of these modules; return the records and the hooks, to be removed afterwards."""
    calls: dict[nn.Module, list[AttentionCall]] = {module: [] for module in units}
    handles: list[RemovableHandle] = []
    for module, unit in units.items():
        if isinstance(module, nn.MultiheadAttention):
            record = partial(_record_multihead, calls[module])
            handles.append(module.register_forward_pre_hook(record, with_kwargs=True))
            continue
        seen: dict[str, Shape] = {}
        for role, path in {"queries": unit.query.path, "keys": unit.key.path}.items():
            record = partial(_record_projection, calls[module], seen, role)
            handles.append(module.get_submodule(path).register_forward_hook(record))
    return calls, handles


def attention_spectrum(name: str, unit: AttentionUnit, forms: Sequence[FormName]) -> Tensor:  # (head size,)
    """Return the squared singular values of some forms, summed over them and over heads."""
    total = torch.zeros(unit.head_size, dtype=torch.float64, device="cpu")
    for form in forms:
        left, right = (p.view(p.weight.detach()).double() for p in unit.form(form))
        if form == "qk":
            biases = (None if p.bias is None else p.bias_view(p.bias.detach()).double() for p in (unit.query, unit.key))
            left, right = (with_bias_row(W, b) for W, b in zip((left, right), biases, strict=True))
            left = stacked_by_group(left, unit.groups)
        else:
            right = stacked_by_group(right, unit.groups)
        if left.is_meta or not (torch.isfinite(left).all() and torch.isfinite(right).all()):
            what = "are on the meta device" if left.is_meta else "hold NaN or infinite values"
            raise ValueError(f"{name}: singular values need weights, but those of this attention {what}")
        squares = factor_spectrum(left, right).square().sum(dim=0).cpu()
        total[: squares.shape[0]] += squares
    return total


def _record_multihead(
    calls: list[AttentionCall], module: nn.Module, inputs: tuple[Tensor, ...], keywords: dict[str, Any]
) -> None:
    given = dict(zip(("query", "key"), inputs, strict=False)) | keywords
    batch, queries = _batch_and_length(given["query"].shape, bool(module.batch_first))
    calls.append(AttentionCall(batch, queries, _batch_and_length(given["key"].shape, bool(module.batch_first))[1]))


def _record_projection(
    calls: list[AttentionCall], seen: dict[str, Shape], role: str, module: nn.Module, inputs: Any, output: Tensor
) -> None:
    """Note the shape of the projected queries or keys; once both are there, in any order, the call is complete."""
    seen[role] = tuple(output.shape)
    if len(seen) == 2:
        batch, length = _batch_and_length(seen["queries"], batch_first=True)
        calls.append(AttentionCall(batch, length, seen["keys"][-2]))
        seen.clear()


def _batch_and_length(shape: Sequence[int], batch_first: bool) -> tuple[int, int]:
    if len(shape) == 2 or batch_first:
        return prod(shape[:-2]), shape[-2]
    return shape[1], shape[0]
