"""What every layer with a composed weight is: factors, and the dense layer that they stand for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from math import prod
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.conv import _ConvNd

from factorized.layers.draw import Init, check_init, draw_bias, draw_dense
from factorized.maths.kernel import KernelShape

CALL_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


class ComposedLayer(nn.Module):
    """A layer whose weight is composed from factors: matrices, or the cores of a tensor. Abstract."""

    bias: nn.Parameter | None

    def __init__(self, shape: KernelShape) -> None:
        super().__init__()
        self.shape = shape
        self.drop_connect = 0.0  # share of the product's entries dropped in training, see fz.drop_connect
        self.carried: tuple[str, ...] = ()  # attributes that were set on the dense layer, see ``carry``
        self.decay_in_backward = 0.0  # added to the gradient of a composed weight, see fz.FrobeniusDecay

    @property
    @abstractmethod
    def factors(self) -> tuple[nn.Parameter, ...]:
        """Every parameter of the weight, in the order of the product."""

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """The composed weight, in the dense layer's shape; differentiable."""

    @property
    @abstractmethod
    def alike(self) -> Hashable:
        """What two layers must have in common to be decomposed in one batch."""

    @abstractmethod
    def decompose(
        self,
        weights: Tensor,  # (batch, out, in/groups, *size)
    ) -> tuple[Tensor, ...]:  # each (batch, *factor)
        """Return the factors that ``set_factors`` takes, of the best approximations of some weights of one shape."""

    @abstractmethod
    def set_factors(self, *factors: Tensor) -> None:
        """Copy factors in."""

    @abstractmethod
    def draw_factors(self, init: Init) -> None:
        """Draw the factors at random."""

    @abstractmethod
    def share_factors(self, other: Self) -> None:
        """Hold the very factors of ``other``."""

    @abstractmethod
    def chosen_execution(self) -> str:
        """Return how ``forward`` runs: the execution set, or for ``"auto"`` the cheapest by cost."""

    @abstractmethod
    def dense_skeleton(self) -> nn.Module:
        """Return a dense layer with this layer's settings on the meta device, weight and bias still to be given."""

    @abstractmethod
    def size_repr(self) -> str:
        """Return the rank and the parameters saved, for the layer's repr."""

    @property
    def product(self) -> Tensor:
        """What the factors compose and a decay acts on: the weight, or the part of it that is decomposed."""
        return self.weight

    @property
    def composes(self) -> bool:
        """Whether ``forward`` composes the product, so that λ times it can be added in the backward pass."""
        return self.chosen_execution() in ("one_conv", "one_product")

    def running_weight(self) -> Tensor:
        """Return the product as ``forward`` uses it: in training with entries dropped, or decayed by λW."""
        weight = self.product
        if self.decay_in_backward:
            weight = _AddToGradient.apply(weight, self.decay_in_backward)  # type: ignore[no-untyped-call]
        return F.dropout(weight, self.drop_connect) if self.drops else weight

    @property
    def drops(self) -> bool:
        """Whether ``forward`` drops entries of the product, which it then has to form."""
        return self.training and self.drop_connect > 0

    def to_dense(self) -> nn.Module:
        """Return the plain ``torch.nn`` layer that computes the same, sharing nothing with this one."""
        dense = self.dense_skeleton()
        trains = any(factor.requires_grad for factor in self.factors)
        dense.weight = nn.Parameter(self.weight.detach().clone(memory_format=torch.contiguous_format), trains)
        if self.bias is not None:
            dense.bias = nn.Parameter(self.bias.detach().clone(), requires_grad=self.bias.requires_grad)
        return dense.train(self.training)

    def reset_parameters(self, init: Init = "spectral") -> None:
        """Fill the factors anew, ``"spectral"`` from a fresh dense initialization, and the bias as torch does."""
        check_init(init)
        if self.factors[0].is_meta:
            return
        if init == "spectral":
            self.set_weight(self.draw_dense_weight())
        else:
            self.draw_factors(init)
        draw_bias(self.bias, fan_in=prod(self.shape.weight_shape[1:]))

    @torch.no_grad()
    def set_weight(
        self,
        weight: Tensor,  # (out, in/groups, *size)
    ) -> None:
        """Make the product the best approximation of ``weight`` at this rank (section 3.1)."""
        if any(isinstance(factor, DTensor) for factor in self.factors):
            raise ValueError(
                "the factors are sharded over processes and cannot be set whole; do this before fully_shard"
            )
        self.set_factors(*(factor[0] for factor in self.decompose(weight.unsqueeze(0))))

    @torch.no_grad()
    def draw_dense_weight(self) -> Tensor:  # (out, in/groups, *size)
        """Draw the weight that a fresh dense layer of this kind would have."""
        factor = self.factors[0]
        weight = torch.empty(self.shape.weight_shape, device=factor.device, dtype=factor.dtype)
        draw_dense(weight)
        return weight

    def take_over(self, dense: nn.Module, init: Init | None) -> None:
        """Fill the factors from ``dense.weight`` as ``init`` says; copy its bias, its mode and ``requires_grad``.

        ``init=None`` leaves the factors unfilled.
        """
        weight = dense.weight
        assert isinstance(weight, Tensor)
        if init is not None:
            check_init(init)
        if init == "spectral" and not weight.is_meta:
            self.set_weight(weight)
        elif init is not None and not weight.is_meta:
            self.draw_factors(init)
        for factor in self.factors:
            factor.requires_grad_(weight.requires_grad)
        bias = getattr(dense, "bias", None)
        if bias is not None and self.bias is not None:
            self.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
        self.train(dense.training)

    def carry(self, dense: nn.Module) -> None:
        """Take over the attributes set on a dense layer, and let every factor have those set on its weight."""
        added = added_attributes(dense, *(1,) * (3 if isinstance(dense, _ConvNd) else 2))
        taken = sorted(name for name in added if hasattr(self, name))
        if taken:
            raise ValueError(
                f"its attribute {taken[0]!r} has the name of one that {type(self).__name__} has; rename it. Nothing "
                "was changed"
            )
        for name, value in added.items():
            setattr(self, name, value)
        self.carried = tuple(added)
        for factor in self.factors:
            vars(factor).update(vars(dense.weight))

    def hand_back(self, plain: nn.Module) -> None:
        """Give the plain module in this layer's place what was set on the dense one, and the hooks of this layer."""
        for name in self.carried:
            setattr(plain, name, getattr(self, name))
        for name in CALL_HOOKS:
            plain.__dict__[name] = self.__dict__[name]

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles carry: no decay is attached to an optimizer of theirs."""
        return {**self.__dict__, "decay_in_backward": 0.0}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"  # one line: the lists of factors are in the sizes


def added_attributes(module: nn.Module, *arguments: object) -> dict[str, object]:
    """Return the attributes that were set on a module after it was made: those that one of these arguments has not."""
    with torch.device("meta"):
        fresh = type(module)(*arguments)
    standard = {*vars(fresh), "_compiled_call_impl"}  # the latter, of module.compile(), would go on calling the old one
    return {name: value for name, value in vars(module).items() if name not in standard}


def check_dense(dense: nn.Module, expected: type[nn.Module]) -> None:
    """Raise unless ``dense`` is a layer of the expected type."""
    if not isinstance(dense, expected):
        raise ValueError(
            f"dense must be an nn.{expected.__name__}, got {type(dense).__name__}; fz.factorize finds the right class "
            "for every layer of a model"
        )


class _AddToGradient(torch.autograd.Function):
    """The identity, which adds ``strength`` times its input to the gradient that passes."""

    @staticmethod
    def forward(weight: Tensor, strength: float) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.strength = inputs[1]  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient + ctx.strength * weight, None  # type: ignore[attr-defined]
