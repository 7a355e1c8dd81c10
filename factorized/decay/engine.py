"""Computes the Frobenius gradients of forms and adds them to tensors.

On the CPU each product is computed alone; on a GPU many are computed together in a few launches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from factorized._torch import without_autocast
from factorized.decay.arena import Arena
from factorized.decay.forms import Factor, Form, is_attention
from factorized.decay.fused import Fused, is_fusible
from factorized.decay.local import placed_like
from factorized.decay.plain import Alike, Pair, Part, Plain, forms_product, is_pair
from factorized.decay.rounded import Rounded, is_large
from factorized.decay.sharded import Sharded, ShardedHeads, is_sharded, is_sharded_by_rows
from factorized.decay.strength import Number

# What the gradient of a factor is added to, shaped like its parameter; None leaves the factor out.
Target = Callable[[Factor], Tensor | None]
Place = tuple[torch.device, torch.dtype, torch.Size]  # of a parameter; workers depend on it
# Computing forms together takes a copy of their factors. Above this many entries it is not worth it: on a GPU it saves
# too few launches, on the CPU the copy is too slow. On the CPU only tensors are stacked, whose contractions are many
# small operations; a product takes four, and stacking products saved 0.1 % of a training step.
LARGEST_BATCHED = {"cuda": 2**20, "cpu": 2**15}


class Worker(Protocol):
    """Computes some forms that share no factor with those of other workers."""

    @property
    def factors(self) -> tuple[Factor, ...]:
        """The factors of all forms."""

    def add_to(self, targets: Sequence[Tensor | None], numbers: Sequence[Number]) -> None:
        """Add ``numbers`` times the gradients to ``targets``, which may be the parameters: all are read before."""


class Engine:
    """Computes the Frobenius gradients of some forms, at every step."""

    def __init__(self, found: Sequence[Form]) -> None:
        self.form_of: dict[Factor, Form] = {factor: form for form in found for factor in form.factors}
        self._parameters = list(dict.fromkeys(factor.parameter for factor in self.form_of))
        self.workers = make_workers(found)
        self._made_for: list[Place] = self._places()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles: without workers, which are made again for the device in use."""
        return {**self.__dict__, "workers": [], "_made_for": []}

    def add(self, target: Target, coefficient: Callable[[Factor], Number]) -> None:
        """Add ``coefficient(factor)`` times every factor's gradient to its ``target``.

        The targets may be the factors themselves: none is changed before all that need it have read it.
        """
        if self._places() != self._made_for:  # parameters were moved, or changed their type or shape
            self.workers, self._made_for = make_workers(list(dict.fromkeys(self.form_of.values()))), self._places()
        with torch.no_grad(), without_autocast(*(parameter.device for parameter in self._parameters)):
            for worker in self.workers:
                targets = [target(factor) for factor in worker.factors]
                if any(tensor is not None for tensor in targets):
                    found = zip(worker.factors, targets, strict=True)
                    worker.add_to(targets, [0.0 if tensor is None else coefficient(f) for f, tensor in found])

    def _places(self) -> list[Place]:
        return [(parameter.device, parameter.dtype, parameter.shape) for parameter in self._parameters]


def gradient_of(factor: Factor) -> Tensor | None:
    """Return the gradient of the factor's parameter; None where there is none to add to, as for any optimizer."""
    parameter = factor.parameter
    gradient = parameter.grad
    if gradient is None or not parameter.requires_grad:
        return None
    if gradient.is_sparse:
        raise ValueError(
            f"{factor.name} has a sparse gradient, to which a decay of the whole factor cannot be added; use "
            "decoupled=True, or sparse=False in the embedding"
        )
    placed = placed_like(gradient, parameter)
    if placed is not gradient:  # added to a partial sum, the decay would count once per rank
        parameter.grad = placed
    return placed


def make_workers(found: Sequence[Form]) -> list[Worker]:
    """Group forms that are computed together: those for the kernels, large ones, single ones, and all others."""
    products = [form for form in found if form.is_product]
    sharded = [form for form in products if any(is_sharded(factor.parameter) for factor in form.factors)]
    by_rows = [form for form in sharded if is_sharded_by_rows(form)]
    heads = [form for form in by_rows if is_attention(form)]
    layers = [form for form in by_rows if not is_attention(form)]
    parts: list[Part] = [Alike([form]) for form in sharded if form not in by_rows]
    parts += [Sharded(layers)] if layers else []
    parts += [ShardedHeads(heads)] if heads else []
    uses = Counter(factor.parameter for form in found for factor in form.factors)
    sharing = {form for form in found if any(uses[factor.parameter] > 1 for factor in form.factors)}
    together: dict[tuple[Any, ...], list[Form]] = {}
    for form in found:
        if form not in sharded:
            together.setdefault(_batch_key(form, form in sharing), []).append(form)
    workers: list[Worker] = []
    for (kind, *_), members in together.items():
        if len(members) == 1 and kind in (Fused, Arena):
            kind = _kind_alone(members[0], members[0] in sharing)
        if kind in (Alike, Arena):
            parts.append(kind(members))
        else:
            workers.append(kind(members))
    return [*workers, Plain(parts)] if parts else workers


def _batch_key(form: Form, shares: bool) -> tuple[Any, ...]:
    """Return the class that computes a form, and what forms that are computed together have in common.

    ``shares`` means that a factor also belongs to another form: such forms are computed by parts of one worker.
    """
    core = form.factors[0].parameter
    if form.format is not None and not form.is_product:
        large = form.format.numel > LARGEST_BATCHED["cuda" if core.is_cuda else "cpu"]
        return Alike, form.format, core.dtype, core.device, form if large else None
    _check_matrices(form)
    if is_large(form) and not shares:
        return Rounded, form.left.parameter.shape, form.right.parameter.shape, core.device
    if not _gains_from_batching(form):
        return _kind_alone(form, shares), form
    return Fused if is_fusible(form) and not shares else Arena, core.dtype, core.device


def _kind_alone(form: Form, shares: bool) -> type[Pair | Alike]:
    return Pair if is_pair(form) and not shares else Alike


def _check_matrices(form: Form) -> None:
    """Raise unless the factors of a layer are still matrices that fit each other."""
    if form.layer is None:
        return
    shapes = [tuple(factor.parameter.shape) for factor in form.factors]
    if any(len(shape) != 2 for shape in shapes):
        raise ValueError(
            f"the factors of {form.name!r} must be matrices, got shapes {shapes}; FSDP1 flattens parameters; use "
            "torch.distributed.fsdp.fully_shard, which does not"
        )
    if len({rank for _, rank in shapes}) > 1:
        raise ValueError(f"the factors of {form.name!r} must have the same number of columns, got shapes {shapes}")


def _gains_from_batching(form: Form) -> bool:
    """Return whether a product is computed faster together with others: on a GPU, where launches dominate the cost."""
    too_large = form.left.value.numel() + form.right.value.numel() > LARGEST_BATCHED["cuda"]
    shares_matrices = form.U.dim() > 3  # grouped queries: there are more products than matrices
    return form.U.is_cuda and not (form.middle or too_large or shares_matrices or forms_product(form))
