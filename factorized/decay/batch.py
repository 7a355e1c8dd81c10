"""The Frobenius gradients of many forms: those of one shape in one batch of matrix products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from factorized.decay.arena import Arena
from factorized.decay.forms import AnyForm, Factor, Form, TensorForm, is_attention
from factorized.decay.fused import Fused, is_fusible
from factorized.decay.native import Native, is_native
from factorized.decay.sharded import Sharded, is_sharded, own_rows, whole
from factorized.decay.sharded_heads import ShardedHeads
from factorized.maths.frobenius import computable, frobenius_gradients, product_is_cheaper

# Forms with more entries than this gain nothing from being computed together, which takes a copy of their factors: on
# a GPU because a launch of their own is no loss, on the CPU because copying is.
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


class Batch:
    """Forms ``U Vᵀ`` of one shape on the CPU, their factors copied side by side into tensors that are made once."""

    def __init__(self, members: Sequence[Form]) -> None:
        self.factors: tuple[Factor, ...] = (*(form.left for form in members), *(form.right for form in members))
        like = computable(members[0].left.value)
        count, rank = sum(form.left.batch for form in members), like.shape[-1]
        rows, columns = members[0].U.shape[-2], members[0].V.shape[-2]
        # Where both factors have equally many rows, one tensor holds both and one product serves both.
        self.square = rows == columns
        extents = [(2 * count, rows)] if self.square else [(count, rows), (count, columns)]
        self.values = [like.new_empty(size, long, rank) for size, long in extents]
        self.grams = [like.new_empty(size, rank, rank) for size, _ in extents]
        self.results = [like.new_empty(size, long, rank) for size, long in extents]
        sizes = [factor.batch for factor in self.factors]
        stacked = [self.results[0]] if self.square else self.results
        per_side = [sizes] if self.square else [sizes[: len(members)], sizes[len(members) :]]
        parts = [part for side, size in zip(stacked, per_side, strict=True) for part in side.split(size)]
        self.parts = [like_parameter(factor, part) for factor, part in zip(self.factors, parts, strict=True)]
        # Plain matrices in a type to compute with are stacked as they are, which saves making views at every step.
        plain = all(factor.is_whole for factor in self.factors) and like.dtype == members[0].U.dtype
        self.matrices: list[Tensor] = [factor.parameter for factor in self.factors] if plain else []

    @torch.no_grad()
    def gradients(self) -> list[Tensor]:
        """Return the gradient of ½‖U Vᵀ‖² for every factor, in the order of ``factors``; valid until the next call."""
        sources = list(self.matrices) or [computable(factor.value) for factor in self.factors]
        join = torch.stack if self.matrices else torch.cat
        half = len(sources) // 2
        for value, gram, side in zip(
            self.values, self.grams, [sources] if self.square else [sources[:half], sources[half:]], strict=True
        ):
            join(side, out=value)
            torch.bmm(value.mT, value, out=gram)
        # Each factor is multiplied by the Gram matrix of its partner, half a batch away or in the other tensor.
        partners = [self.grams[0].roll(self.grams[0].shape[0] // 2, 0)] if self.square else self.grams[::-1]
        for value, gram, result in zip(self.values, partners, self.results, strict=True):
            torch.bmm(value, gram, out=result)
        return self.parts


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
            own_rows(gradient, factor) if is_sharded(factor.parameter) else gradient
            for gradient, factor in zip(gradients, self.factors, strict=True)
        ]


Unit = Single | Batch | Native | Fused | Arena | Sharded | ShardedHeads | Tensors


def batches(found: Sequence[AnyForm]) -> list[Unit]:
    """Group forms that can be computed together: what is sharded, what the kernels know, and what is of one shape."""
    tensors = [form for form in found if isinstance(form, TensorForm)]
    products = [form for form in found if isinstance(form, Form)]
    sharded = [form for form in products if any(is_sharded(factor.parameter) for factor in form.factors)]
    local = [form for form in products if form not in sharded]
    for form in local:
        _check_matrices(form)
    heads = [form for form in sharded if is_attention(form)]
    layers = [form for form in sharded if not is_attention(form)]
    units: list[Unit] = [Sharded(layers)] if layers else []
    units += [ShardedHeads(heads)] if heads else []
    units += tensor_units(tensors)
    alike: dict[tuple[Any, ...], list[Form]] = {}
    held = Counter(factor.parameter for form in found for factor in form.factors)
    for form in local:
        kind = _kind(form, held)
        shape = (*form.U.shape[-2:], form.V.shape[-2])
        apart = (form,) if kind is Single else shape if kind is Batch else ()
        alike.setdefault((kind, form.U.dtype, form.U.device, *apart), []).append(form)
    for (kind, *_), members in alike.items():
        units.append(Single(members[0]) if len(members) == 1 else kind(members))
    return units


def _kind(form: Form, held: Mapping[nn.Parameter, int]) -> type[Unit]:
    """Return how to compute a form; ``held`` says in how many places a parameter is."""
    shared = any(held[factor.parameter] > 1 for factor in form.factors)  # two threads may not write to one
    if is_native(form) and not shared:
        return Native
    if not _shares(form):
        return Single
    return Fused if is_fusible(form) else Arena if form.U.is_cuda else Batch


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
    """Say whether a form gains from being computed together with others."""
    (rows, rank), columns = form.U.shape[-2:], form.V.shape[-2]
    entries = form.left.value.numel() + form.right.value.numel()
    too_large = entries > LARGEST_BATCHED["cuda" if form.U.is_cuda else "cpu"]
    shares_matrices = form.U.dim() > 3  # grouped queries: there are more products than matrices
    product = product_is_cheaper(rows, columns, rank, 0, products=3)
    return not (form.middle or too_large or shares_matrices or product)
