"""Which forms are computed together: on the CPU each product by itself, on a GPU many in a few launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from factorized.decay.arena import Arena
from factorized.decay.forms import AnyForm, Factor, Form, TensorForm, is_attention
from factorized.decay.fused import Fused, is_fusible
from factorized.decay.sharded import Gathered, Sharded, is_sharded, is_sharded_by_rows, own_gradient, whole
from factorized.decay.sharded_heads import ShardedHeads
from factorized.maths.frobenius import computable, frobenius_gradients, product_is_cheaper

# Forms with more entries than this gain nothing from being computed together, which takes a copy of their factors: on
# a GPU because a launch of their own is no loss, on the CPU because copying is. There it is for tensors, whose
# contractions are many small operations; products take four, and stacking them saved 0.1 % of a training step.
LARGEST_BATCHED = {"cuda": 2**20, "cpu": 2**15}


class Single:
    """A form that is computed by itself, from its factors where they are."""

    def __init__(self, form: Form) -> None:
        self.factors = form.factors
        (rows, rank), columns = form.U.shape[-2:], form.V.shape[-2]
        by_grams = not (form.middle or product_is_cheaper(rows, columns, rank, 0, products=3))
        whole = form.left.is_whole and form.right.is_whole
        self.is_plain = by_grams and whole and computable(form.left.value).dtype == form.U.dtype

    def gradients(self) -> list[Tensor]:
        """Return the gradient of ½‖U M₁…M_d Vᵀ‖² for every factor, in the order of ``factors``."""
        U, *inner, V = (computable(factor.value) for factor in self.factors)
        dU, dV, d_inner = frobenius_gradients(U, V, inner)
        return [like_parameter(f, gradient) for f, gradient in zip(self.factors, (dU, *d_inner, dV), strict=True)]

    def add_to(self, targets: Sequence[Tensor | None], numbers: Sequence[float]) -> None:
        """Add ``numbers`` times the gradients of a plain pair of matrices to ``targets``, in the products themselves.

        The targets are shaped like the parameters and must not be them: they are written while those are read.
        """
        U, V = (factor.parameter for factor in self.factors)
        left, right = targets
        of_U = U.mT @ U if right is not None else None
        if left is not None and numbers[0] != 0:
            left.addmm_(U, V.mT @ V, alpha=numbers[0])
        if right is not None and of_U is not None and numbers[1] != 0:
            right.addmm_(V, of_U, alpha=numbers[1])


class Tensors:
    """Tensors of one format. Cores that are sharded are gathered: they are small, and each is needed whole."""

    def __init__(self, members: Sequence[TensorForm]) -> None:
        self.members = list(members)
        self.factors: tuple[Factor, ...] = tuple(factor for form in members for factor in form.factors)

    def gradients(self) -> list[Tensor]:
        """Return the gradient of half the squared norm for every core, in the order of ``factors``."""
        cores = [computable(whole(f) if is_sharded(f.parameter) else f.value) for f in self.factors]
        count, format = len(self.members[0].factors), self.members[0].format
        if len(self.members) == 1:
            gradients = list(format.gradients(cores))
        else:
            stacks = format.gradients([torch.stack(cores[place::count]) for place in range(count)])
            gradients = [stacks[place][member] for member in range(len(self.members)) for place in range(count)]
        return [
            own_gradient(gradient, factor) if is_sharded(factor.parameter) else gradient
            for gradient, factor in zip(gradients, self.factors, strict=True)
        ]


Unit = Single | Fused | Arena | Sharded | ShardedHeads | Gathered | Tensors


def batches(found: Sequence[AnyForm]) -> list[Unit]:
    """Group forms that can be computed together: sharded ones, what the kernels know, other small ones on a GPU."""
    tensors = [form for form in found if isinstance(form, TensorForm)]
    products = [form for form in found if isinstance(form, Form)]
    sharded = [form for form in products if any(is_sharded(factor.parameter) for factor in form.factors)]
    local = [form for form in products if form not in sharded]
    for form in local:
        _check_matrices(form)
    by_rows = [form for form in sharded if is_sharded_by_rows(form)]
    heads = [form for form in by_rows if is_attention(form)]
    layers = [form for form in by_rows if not is_attention(form)]
    units: list[Unit] = [Gathered(form) for form in sharded if form not in by_rows]
    units += [Sharded(layers)] if layers else []
    units += [ShardedHeads(heads)] if heads else []
    units += tensor_units(tensors)
    alike: dict[tuple[Any, ...], list[Form]] = {}
    for form in local:
        kind = Single if not _shares(form) else Fused if is_fusible(form) else Arena
        apart = (form,) if kind is Single else ()
        alike.setdefault((kind, form.U.dtype, form.U.device, *apart), []).append(form)
    for (kind, *_), members in alike.items():
        units.append(Single(members[0]) if len(members) == 1 else kind(members))
    return units


def _check_matrices(form: Form) -> None:
    """Raise unless the factors of a layer are matrices that fit each other, whatever was done to them since."""
    if form.layer is None:
        return
    shapes = [tuple(factor.parameter.shape) for factor in form.factors]
    if any(len(shape) != 2 for shape in shapes):
        raise ValueError(
            f"the factors of {form.name!r} must be matrices, got shapes {shapes}; FSDP1 flattens parameters so: use "
            "torch.distributed.fsdp.fully_shard, which does not"
        )
    if len({rank for _, rank in shapes}) > 1:
        raise ValueError(f"the factors of {form.name!r} must have as many columns as each other, got shapes {shapes}")


def tensor_units(found: Sequence[TensorForm]) -> list[Unit]:
    """Group tensors of one format that are small enough to gain from a batch."""
    alike: dict[tuple[object, ...], list[TensorForm]] = {}
    for form in found:
        core = form.factors[0].parameter
        large = form.format.core_numel > LARGEST_BATCHED["cuda" if core.is_cuda else "cpu"]
        alike.setdefault((form.format, core.dtype, core.device, form if large else None), []).append(form)
    return [Tensors(members) for members in alike.values()]


def like_parameter(factor: Factor, gradient: Tensor) -> Tensor:
    """Return a gradient (batch, long, rank) without the batch where the factor is its whole parameter."""
    return gradient[0] if factor.is_whole else gradient


def _shares(form: Form) -> bool:
    """Return whether a form gains from being computed together with others: on a GPU, where launches are what costs."""
    (rows, rank), columns = form.U.shape[-2:], form.V.shape[-2]
    too_large = form.left.value.numel() + form.right.value.numel() > LARGEST_BATCHED["cuda"]
    shares_matrices = form.U.dim() > 3  # grouped queries: there are more products than matrices
    product = product_is_cheaper(rows, columns, rank, 0, products=3)
    return form.U.is_cuda and not (form.middle or too_large or shares_matrices or product)
