"""Expanding a tensor while keeping only its cores for the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from factorized._torch import without_autocast

Indices = tuple[tuple[str, ...], ...]  # a name per dimension of every core
# Slices per core: enough for the intermediate tensors of one slice together to stay well below the size of the whole.
SLICES = 2


def light_expansion(
    expand: Callable[[Sequence[Tensor]], Tensor],
    indices: Indices,  # of every core
    cores: Sequence[Tensor],
) -> Tensor:  # (*dims)
    """Return ``expand(cores)``. Differentiable; the backward pass holds intermediates of at most the result's size.

    Autograd would keep every intermediate product for the backward pass, and near full rank each is as large as the
    result. Here only the cores are kept, and the backward pass computes the intermediates again.
    """
    if not torch.is_grad_enabled() or not any(core.requires_grad for core in cores):
        return expand(cores)
    return _LightExpansion.apply(expand, indices, *cores)


def light_gradients(
    indices: Indices,  # of every core
    cores: Sequence[Tensor],
    at: Tensor,  # (*dims)
) -> tuple[Tensor, ...]:  # like cores
    """Return the gradients of ⟨``at``, the expanded tensor⟩, one slice of the tensor's longest dimension at a time.

    A slice grows from the core that has this dimension, one neighbour at a time, so that no intermediate is larger than
    the slice. There are enough slices for all intermediates of one to be smaller than the tensor.
    """
    # Of equal dimensions take an outer one: there the core of a Tucker tensor is multiplied without a copy.
    places = [0, at.dim() - 1, *range(1, at.dim() - 1)]
    longest = max(places, key=at.shape.__getitem__)
    first, *others = _growth(indices, [core.shape for core in cores], f"d{longest}")
    gradients = [at.new_zeros(core.shape, dtype=core.dtype) for core in cores]
    place, extent = indices[first].index(f"d{longest}"), at.shape[longest]
    step_size = -(-extent // (SLICES * len(cores)))
    for start in range(0, extent, step_size):
        count = min(step_size, extent - start)
        rows, part = cores[first].narrow(place, start, count), at.narrow(longest, start, count)
        state, names, steps = rows, indices[first], []
        for core in others:
            step = _Step(state, names, cores[core], indices[core])
            state, names = step.forward(), step.names
            steps.append(step)
        of_state = part.permute(*[int(name[1:]) for name in names if name[0] == "d"]).to(rows.dtype)
        of_state = of_state.reshape(state.shape)
        del state
        for core in reversed(others):
            of_state = steps.pop().backward(of_state, gradients[core])
        gradients[first].narrow(place, start, count).copy_(of_state)
    return tuple(gradients)


class _Step:
    """A tensor multiplied by a core over the one index that both have, kept until its gradients are needed."""

    def __init__(self, state: Tensor, names: tuple[str, ...], core: Tensor, core_names: tuple[str, ...]) -> None:
        self.place = next(place for place, name in enumerate(names) if name in core_names)
        middle = core_names.index(names[self.place])
        self.extents = (prod(core.shape[:middle]), core.shape[middle], prod(core.shape[middle + 1 :]))
        self.inside = min(self.extents[0], self.extents[2]) > 1  # the shared index has others on both sides
        self.left = state.movedim(self.place, -1).flatten(0, -2)  # (all others, shared)
        self.core = self._as_matrix(core)
        self.kept = [*state.shape[: self.place], *state.shape[self.place + 1 :]]
        kept_names = [*names[: self.place], *names[self.place + 1 :]]
        turn = middle if self.inside else 0  # how many dimensions of the core come before those that the tensor keeps
        others, other_names = list(core.shape), list(core_names)
        del others[middle], other_names[middle]
        self.shape = [*others[:turn], *self.kept, *others[turn:]]
        self.names = (*other_names[:turn], *kept_names, *other_names[turn:])

    def _as_matrix(self, core: Tensor) -> Tensor:  # (shared, all others), or (before, shared, after)
        core = core.reshape(self.extents)
        if self.inside:
            return core
        return core[0] if self.extents[0] == 1 else core[..., 0].mT

    def forward(self) -> Tensor:
        """Return the product, in the shape of this step."""
        return (self.left @ self.core).reshape(self.shape)

    def backward(self, gradient: Tensor, of_core: Tensor) -> Tensor:
        """Add to the gradient of the core, and return that of the tensor."""
        if not self.inside:
            gradient = gradient.reshape(self.left.shape[0], -1)
            self._as_matrix(of_core).addmm_(self.left.mT, gradient)
            of_left = gradient @ self.core.mT
        else:
            before, _, after = self.extents
            gradient = gradient.reshape(before, -1, after)
            of_core.view(self.extents).baddbmm_(self.left.mT.expand(before, -1, -1), gradient)
            of_left = gradient.transpose(0, 1).flatten(1) @ self.core.transpose(1, 2).flatten(0, 1)
        return of_left.unflatten(0, self.kept).movedim(-1, self.place)


def _growth(indices: Indices, shapes: Sequence[Sequence[int]], start: str) -> list[int]:
    """Return the cores in the order in which a slice of one index grows: always the neighbour that adds least."""
    order = [place for place, names in enumerate(indices) if start in names]
    left = [place for place in range(len(indices)) if place not in order]
    while left:
        reached = {name for place in order for name in indices[place]}
        near = [place for place in left if reached.intersection(indices[place])]

        def added(place: int, reached: set[str] = reached) -> float:
            extents = dict(zip(indices[place], shapes[place], strict=True))
            shared = prod([extent for name, extent in extents.items() if name in reached])
            return prod(extents.values()) / shared**2

        order.append(min(near, key=added))
        left.remove(order[-1])
    return order


class _LightExpansion(torch.autograd.Function):
    apply: ClassVar[Callable[..., Tensor]]  # torch leaves it untyped
    generate_vmap_rule = True

    @staticmethod
    def forward(expand: Callable[[Sequence[Tensor]], Tensor], indices: Indices, *cores: Tensor) -> Tensor:
        return expand(cores)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.expand, ctx.indices, *cores = inputs
        ctx.save_for_backward(*cores)
        ctx.save_for_forward(*cores)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cores = ctx.saved_tensors
        with without_autocast(gradient.device):  # slices are added up in the type of the cores
            return None, None, *light_gradients(ctx.indices, cores, gradient)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: Tensor | None) -> Tensor:
        cores = ctx.saved_tensors
        given = [(place, tangent) for place, tangent in enumerate(tangents) if tangent is not None]
        parts = [ctx.expand([*cores[:place], tangent, *cores[place + 1 :]]) for place, tangent in given]
        return torch.stack(parts).sum(dim=0)
