"""The matrices of an attention module, read, written, and at other head sizes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from factorized._torch import full_precision
from factorized.attention.unit import AttentionUnit, FormName, Projection
from factorized.formats.kernel import KernelShape
from factorized.formats.svd import truncated_factors
from factorized.nn.init import Init, check_init, fill_of

Heads = tuple[Tensor, Tensor | None]  # (heads, long, size) and the bias (heads, size)


@dataclass(frozen=True)
class Matrices:
    """All matrices of an attention module, by head."""

    query: Heads
    key: Heads
    value: Heads
    output: Tensor  # (heads, out, size)
    output_bias: Tensor | None  # (out,)


@torch.no_grad()
def read_matrices(unit: AttentionUnit) -> Matrices:
    """Return copies of the matrices that ``unit`` holds."""

    def heads(projection: Projection) -> Heads:
        bias = projection.bias
        return (
            projection.view(projection.weight.detach()).clone(),
            None if bias is None else projection.bias_view(bias.detach()).clone(),
        )

    bias = unit.output.bias
    return Matrices(
        heads(unit.query),
        heads(unit.key),
        heads(unit.value),
        unit.output.view(unit.output.weight.detach()).clone(),
        None if bias is None else bias.detach().clone(),
    )


@full_precision
@torch.no_grad()
def spectral_matrices(
    unit: AttentionUnit, qk: int, ov: int, forms: Collection[FormName], *, may_add_bias: bool
) -> Matrices:
    """Return the matrices with these ``forms`` rebalanced, and truncated to the sizes given (section 3.1).

    Query and key biases are rows of the augmented matrices. A value bias is folded into the output bias if attention
    weights sum to one and there is an output bias, or one may be added; else it is a row as well.
    """
    old = new = read_matrices(unit)
    groups = unit.groups
    if "qk" in forms:
        has_bias = old.query[1] is not None or old.key[1] is not None
        left, right = (with_bias_row(*heads) if has_bias else heads[0] for heads in (old.query, old.key))
        left, right = truncated_factors(stacked_by_group(left, groups), right, qk)
        left = unstacked(left, groups)
        new = replace(new, query=_split(left, old.query), key=_split(right, old.key))
    if "ov" in forms:
        left, bias = old.value
        folds = bias is not None and unit.sums_to_one and (may_add_bias or old.output_bias is not None)
        if bias is not None and folds:
            shift = folded_values(old.output, bias)
            new = replace(new, output_bias=shift if old.output_bias is None else old.output_bias + shift)
        elif bias is not None:
            left = with_bias_row(left, bias)
        left, right = truncated_factors(left, stacked_by_group(old.output, groups), ov)
        zeros = left.new_zeros(left.shape[0], ov)
        value = (left, zeros) if folds else _split(left, old.value)
        new = replace(new, value=value, output=unstacked(right, groups))
    return new


@torch.no_grad()
def drawn_matrices(unit: AttentionUnit, qk: int, ov: int, forms: Collection[FormName], init: Init) -> Matrices:
    """Return the matrices, redrawing those of these ``forms``, each as if it were a layer's weight.

    The input biases of these forms become zero; the output bias stays.
    """
    check_init(init)
    new = read_matrices(unit)

    def drawn(projection: Projection, size: int, old: Tensor | None) -> Heads:
        rows, columns = projection.heads * size, projection.long
        shape = (columns, rows) if projection is unit.output else (rows, columns)
        weight = projection.weight.new_empty(shape)
        fill_of(init, KernelShape.of(shape))(weight)
        weight = weight.mT if projection is unit.output else weight
        by_head = weight.unflatten(0, (projection.heads, size)).mT
        return by_head, None if old is None else old.new_zeros(projection.heads, size)

    if "qk" in forms:
        new = replace(new, query=drawn(unit.query, qk, new.query[1]), key=drawn(unit.key, qk, new.key[1]))
    if "ov" in forms:
        new = replace(new, value=drawn(unit.value, ov, new.value[1]), output=drawn(unit.output, ov, None)[0])
    return new


def padded_matrices(unit: AttentionUnit, size: int) -> Matrices:
    """Return the matrices with zeros added to every head up to ``size``: the same function.

    An output bias that shrinking added has no place in the dense class. A free dimension of the first head carries it:
    its value is always 1, which attention weights that sum to one leave unchanged.
    """
    old = read_matrices(unit)

    def pad(heads: Heads) -> Heads:
        return _pad(heads[0], size), None if heads[1] is None else _pad(heads[1], size)

    new = replace(old, query=pad(old.query), key=pad(old.key), value=pad(old.value), output=_pad(old.output, size))
    free, bias = unit.value.head_size, new.value[1]
    if unit.has_output_bias or new.output_bias is None or bias is None or size == free:
        return new
    bias[0, free] = 1.0
    new.output[0, :, free] = new.output_bias
    return replace(new, output_bias=None)


@torch.no_grad()
def write_matrices(unit: AttentionUnit, matrices: Matrices) -> None:
    """Copy matrices, which must have the unit's sizes, into its parameters."""
    pairs = zip(unit.projections, (matrices.query, matrices.key, matrices.value), strict=False)
    for projection, (weight, bias) in pairs:
        projection.view(projection.weight.detach()).copy_(weight)
        if projection.bias is not None and bias is not None:
            projection.bias_view(projection.bias.detach()).copy_(bias)
    unit.output.view(unit.output.weight.detach()).copy_(matrices.output)
    if unit.output.bias is not None:
        bias = matrices.output_bias
        unit.output.bias.detach().copy_(torch.zeros_like(unit.output.bias) if bias is None else bias)


def check_finite(unit: AttentionUnit, name: str) -> None:
    """Raise if any weight of ``unit`` is not finite."""
    if not all(torch.isfinite(parameter.detach()).all() for parameter in unit.parameters):
        raise ValueError(f"{name}: attention weights hold NaN or infinite values; nothing was changed")


def _split(
    augmented: Tensor,  # (heads, m or m + 1, size)
    old: Heads,
) -> Heads:
    """Return a matrix and its bias row; where there was no bias the row is zero, and is left out."""
    weight, bias = old
    rows = weight.shape[1]
    return augmented[:, :rows], None if bias is None else augmented[:, rows]


def _pad(tensor: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, size - tensor.shape[-1]))


def with_bias_row(
    W: Tensor,  # (heads, m, k)
    bias: Tensor | None,  # (heads, k)
) -> Tensor:  # (heads, m + 1, k)
    """Return the matrix that multiplies ``[x, 1]``: ``W`` above its bias, or above zeros where there is none."""
    row = W.new_zeros(W.shape[0], W.shape[2]) if bias is None else bias
    return torch.cat([W, row.unsqueeze(1)], dim=1)


def folded_values(
    output: Tensor,  # (heads, out, k)
    bias: Tensor,  # (kv_heads, k)
) -> Tensor:  # (out,)
    """Return ``Σ_h O_h b_h``, what value biases add to the output where attention weights sum to one."""
    per_head = bias.repeat_interleave(output.shape[0] // bias.shape[0], dim=0)
    return torch.einsum("hok,hk->o", output, per_head)


def stacked_by_group(
    factor: Tensor,  # (heads, m, k)
    groups: int,
) -> Tensor:  # (heads / groups, groups·m, k)
    """Return the matrices of the query heads that share one K/V head, stacked by rows.

    The SVD of the stack times the shared matrix is the best choice for all of them together.
    """
    return factor.unflatten(0, (-1, groups)).flatten(1, 2)


def unstacked(
    stack: Tensor,  # (kv_heads, groups·m, k)
    groups: int,
) -> Tensor:  # (heads, m, k)
    """Undo ``stacked_by_group``."""
    return stack.unflatten(1, (groups, -1)).flatten(0, 1)
