"""Computes the Frobenius gradients of forms and adds them to tensors.

On the CPU each product is computed alone; on a GPU many are computed together in a few launches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from factorized._torch import computable, without_autocast
from factorized.decay.arena import Arena
from factorized.decay.forms import Factor, Form, is_attention
from factorized.decay.fused import Fused, is_fusible
from factorized.decay.local import placed_like
from factorized.decay.rounded import Rounded, is_large
from factorized.decay.sharded import Sharded, ShardedHeads, is_sharded, is_sharded_by_rows, own_gradient, whole
from factorized.decay.strength import Number
from factorized.formats.frobenius import product_is_cheaper

# What the gradient of a factor is added to, shaped like its parameter; None leaves the factor out.
Target = Callable[[Factor], Tensor | None]
Place = tuple[torch.device, torch.dtype, torch.Size]  # of a parameter; workers depend on it
# Computing forms together takes a copy of their factors. Above this many entries it is not worth it: on a GPU it saves
# too few launches, on the CPU the copy is too slow. On the CPU only tensors are stacked, whose contractions are many
# small operations; a product takes four, and stacking products saved 0.1 % of a training step.
LARGEST_BATCHED = {"cuda": 2**20, "cpu": 2**15}


class Engine:
    """Computes the Frobenius gradients of some forms, at every step."""

    def __init__(self, found: Sequence[Form]) -> None:
        self.form_of: dict[Factor, Form] = {factor: form for form in found for factor in form.factors}
        self._parameters = list(dict.fromkeys(factor.parameter for factor in self.form_of))
        self.workers = make_workers(found)
        self._made_for: list[Place] = self._places()
        self._turn = _turns(self.form_of)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles: without workers, which are made again for the device in use."""
        return {**self.__dict__, "workers": [], "_made_for": []}

    def add(self, target: Target, coefficient: Callable[[Factor], Number], *, to_factors: bool = False) -> None:
        """Add ``coefficient(factor)`` times every factor's gradient to its ``target``.

        ``to_factors`` means that the targets are the factors themselves: then none is changed before all are read.
        """
        if self._places() != self._made_for:  # parameters were moved, or changed their type or shape
            self.workers, self._made_for = make_workers(list(dict.fromkeys(self.form_of.values()))), self._places()
        additions: dict[tuple[int, Number], tuple[list[Tensor], list[Tensor]]] = {}
        with torch.no_grad(), without_autocast(*(parameter.device for parameter in self._parameters)):
            for worker in self.workers:
                targets = [target(factor) for factor in worker.factors]
                if all(tensor is None for tensor in targets):
                    continue
                numbers = [0.0 if t is None else coefficient(f) for f, t in zip(worker.factors, targets, strict=True)]
                if isinstance(worker, Rounded) and not torch.compiler.is_compiling():
                    worker.add_to(targets, numbers)
                    continue
                plain = [number for number in numbers if not isinstance(number, Tensor)]
                if isinstance(worker, Alike) and worker.is_plain_pair and len(plain) == 2 and not to_factors:
                    worker.add_to(targets, plain)
                    continue
                found = zip(worker.factors, targets, numbers, worker.gradients(), strict=True)
                for factor, tensor, number, gradient in found:
                    if tensor is not None:
                        into, parts = additions.setdefault((self._turn[factor], number), ([], []))
                        into.append(tensor if factor.is_whole else factor.part(tensor))
                        parts.append(gradient)
            for (_, number), (into, parts) in additions.items():
                if isinstance(number, Tensor):
                    torch._foreach_add_(into, torch._foreach_mul(parts, number.to(parts[0].device).reshape(())))
                elif number != 0:
                    torch._foreach_add_(into, parts, alpha=number)

    def _places(self) -> list[Place]:
        return [(parameter.device, parameter.dtype, parameter.shape) for parameter in self._parameters]


def _turns(factors: Iterable[Factor]) -> dict[Factor, int]:
    """Number the factors that share a parameter: one launch may add to many tensors, but not twice to the same one."""
    seen: Counter[nn.Parameter] = Counter()
    turns = {}
    for factor in factors:
        turns[factor] = seen[factor.parameter] if factor.projection is None else 0  # projections are different parts
        seen[factor.parameter] += 1
    return turns


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


class Alike:
    """Forms of one format, computed as a stack; or a single form.

    Sharded factors are gathered: the cores of formats other than products, and products that are split by columns.
    """

    def __init__(self, members: Sequence[Form]) -> None:
        self.members = list(members)
        self.factors: tuple[Factor, ...] = tuple(factor for form in members for factor in form.factors)
        self.is_plain_pair = len(members) == 1 and _is_plain_pair(members[0])

    def gradients(self) -> list[Tensor]:
        """Return the gradient of half the squared norm for every factor, in the order of ``factors``."""
        values = [
            computable(factor.view(whole(factor)) if is_sharded(factor.parameter) else factor.value)
            for factor in self.factors
        ]
        form = self.members[0]
        count = len(form.factors)
        if len(self.members) == 1:
            gradients = form.gradients(values)
        else:
            stacks = form.gradients([torch.stack(values[place::count]) for place in range(count)])
            gradients = [stacks[place][member] for member in range(len(self.members)) for place in range(count)]
        return [_like_target(factor, gradient) for factor, gradient in zip(self.factors, gradients, strict=True)]

    def add_to(self, targets: Sequence[Tensor | None], numbers: Sequence[float]) -> None:
        """Add ``numbers`` times the gradients of a plain pair of matrices to ``targets``, without temporary results.

        The targets are shaped like the parameters, but must not be the parameters, which are read meanwhile.
        """
        U, V = (factor.parameter for factor in self.factors)
        left, right = targets
        of_U = U.mT @ U if right is not None else None
        if left is not None and numbers[0] != 0:
            left.addmm_(U, V.mT @ V, alpha=numbers[0])
        if right is not None and of_U is not None and numbers[1] != 0:
            right.addmm_(V, of_U, alpha=numbers[1])


Worker = Alike | Fused | Rounded | Arena | Sharded | ShardedHeads


def make_workers(found: Sequence[Form]) -> list[Worker]:
    """Group forms that are computed together: sharded ones, those for the kernels, other small ones on a GPU."""
    products = [form for form in found if form.is_product]
    sharded = [form for form in products if any(is_sharded(factor.parameter) for factor in form.factors)]
    by_rows = [form for form in sharded if is_sharded_by_rows(form)]
    heads = [form for form in by_rows if is_attention(form)]
    layers = [form for form in by_rows if not is_attention(form)]
    workers: list[Worker] = [Alike([form]) for form in sharded if form not in by_rows]
    workers += [Sharded(layers)] if layers else []
    workers += [ShardedHeads(heads)] if heads else []
    uses = Counter(factor.parameter for form in found for factor in form.factors)
    together: dict[tuple[Any, ...], list[Form]] = {}
    for form in found:
        if form not in sharded:
            shares = any(uses[factor.parameter] > 1 for factor in form.factors)
            together.setdefault(_batch_key(form, shares), []).append(form)
    for (worker, *_), members in together.items():
        workers.append(Alike(members) if len(members) == 1 and worker is not Rounded else worker(members))
    return workers


def _batch_key(form: Form, shares: bool) -> tuple[Any, ...]:
    """Return the class that computes a form, and what forms that are computed together have in common.

    ``shares`` means that a factor also belongs to another form, so that it may not be changed before all are read.
    """
    core = form.factors[0].parameter
    if form.format is not None and not form.is_product:
        large = form.format.numel > LARGEST_BATCHED["cuda" if core.is_cuda else "cpu"]
        return Alike, form.format, core.dtype, core.device, form if large else None
    _check_matrices(form)
    if is_large(form) and not shares:
        return Rounded, form.left.parameter.shape, form.right.parameter.shape, core.device
    if not _gains_from_batching(form):
        return Alike, form
    return Fused if is_fusible(form) else Arena, core.dtype, core.device


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
    return form.U.is_cuda and not (form.middle or too_large or shares_matrices or _forms_product(form))


def _is_plain_pair(form: Form) -> bool:
    """Return whether a form is two whole matrices whose gradients come from their Gram matrices, in their own type."""
    if not form.is_product or form.middle or not (form.left.is_whole and form.right.is_whole):
        return False
    return not _forms_product(form) and computable(form.left.value).dtype == form.U.dtype


def _forms_product(form: Form) -> bool:
    """Return whether the product itself is cheaper than Gram matrices."""
    (rows, rank), columns = form.U.shape[-2:], form.V.shape[-2]
    return product_is_cheaper(rows, columns, rank, 0, products=3)


def _like_target(factor: Factor, gradient: Tensor) -> Tensor:
    """Return a gradient shaped like its target: this rank's part, or without a batch dimension of one."""
    if is_sharded(factor.parameter):
        return own_gradient(gradient, factor)
    return gradient[0] if factor.is_whole else gradient
