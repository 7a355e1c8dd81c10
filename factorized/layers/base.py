"""What every factorized layer is: two factors, inner matrices between them, and the dense layer they stand for."""

from __future__ import annotations

from abc import abstractmethod
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from factorized.layers.draw import Init, check_init, decompose, draw, draw_bias, draw_dense, fill_identity
from factorized.maths.convolution import composed_kernel
from factorized.maths.kernel import KernelShape


class FactorizedLayer(nn.Module):
    """A layer whose weight is the product ``U M₁…M_d Vᵀ`` (section 2 of the paper). Abstract.

    ``U`` is (groups·rows, rank), ``V`` is (groups·columns, rank), each inner matrix is (groups·rank, rank), where rows
    and columns are those of the weight's matrix (``maths/kernel.py``).
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        shape: KernelShape,
        rank: int,
        depth: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        check_whole("rank", rank, least=1)
        check_whole("depth", depth, least=0)
        self.shape = shape
        self.drop_connect = 0.0  # share of the product's entries dropped in training, see fz.drop_connect
        self.decay_in_backward = 0.0  # added to the gradient of a composed weight, see fz.FrobeniusDecay
        self.U = nn.Parameter(torch.empty(shape.groups * shape.rows, rank, device=device, dtype=dtype))
        self.inner = nn.ParameterList(
            nn.Parameter(torch.empty(shape.groups * rank, rank, device=device, dtype=dtype)) for _ in range(depth)
        )
        self.V = nn.Parameter(torch.empty(shape.groups * shape.columns, rank, device=device, dtype=dtype))

    @property
    def rank(self) -> int:
        """Columns of the factors."""
        return self.U.shape[1]

    @property
    def depth(self) -> int:
        """How many inner matrices stand between the factors."""
        return len(self.inner)

    @property
    def factors(self) -> tuple[nn.Parameter, ...]:
        """Every parameter of the product, in its order: ``U``, the inner matrices, ``V``."""
        return (self.U, *self.inner, self.V)

    @property
    def weight(self) -> Tensor:
        """The composed weight, in the dense layer's shape; differentiable."""
        return composed_kernel(self.U, self.V, list(self.inner), self.shape)

    def running_weight(self) -> Tensor:
        """Return the composed weight as ``forward`` uses it: in training with entries dropped, or decayed by λW."""
        weight = self.weight
        if self.decay_in_backward:
            weight = _AddToGradient.apply(weight, self.decay_in_backward)  # type: ignore[no-untyped-call]
        return F.dropout(weight, self.drop_connect) if self.drops else weight

    @property
    def drops(self) -> bool:
        """Whether ``forward`` drops entries of the product, which it then has to form."""
        return self.training and self.drop_connect > 0

    @abstractmethod
    def dense_skeleton(self) -> nn.Module:
        """Return a dense layer with this layer's settings on the meta device, weight and bias still to be given."""

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
        if self.U.is_meta:
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
        """Make the product the best approximation of ``weight`` at this rank, by its SVD (section 3.1)."""
        self.set_factors(*decompose(weight, self.shape, self.rank))

    @torch.no_grad()
    def set_factors(
        self,
        U: Tensor,  # (groups·rows, rank)
        V: Tensor,  # (groups·columns, rank)
    ) -> None:
        """Copy factors in and make the inner matrices identities."""
        self.U.copy_(U)
        self.V.copy_(V)
        for M in self.inner:
            fill_identity(M)

    @torch.no_grad()
    def draw_factors(self, init: Init) -> None:
        """Draw both factors at random and make the inner matrices identities."""
        draw(self.U, self.V, self.shape, init)
        for M in self.inner:
            fill_identity(M)

    @torch.no_grad()
    def draw_dense_weight(self) -> Tensor:  # (out, in/groups, *size)
        """Draw the weight that a fresh dense layer of this kind would have."""
        weight = torch.empty(self.shape.weight_shape, device=self.U.device, dtype=self.U.dtype)
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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"  # one line: the list of inner matrices is in the depth

    def size_repr(self) -> str:
        """Return the rank, the depth and the parameters saved, for the layer's repr."""
        depth = f", depth={self.depth}" if self.depth else ""
        used = sum(factor.numel() for factor in self.factors)
        return f"rank={self.rank}{depth}, params={used:,} of {self.shape.numel:,}"


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


def check_whole(name: str, value: object, least: int) -> None:
    """Raise unless ``value`` is a whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise unless ``value`` is one of ``choices``."""
    if value not in choices:
        quoted = ", ".join(f'"{choice}"' for choice in choices)
        raise ValueError(f"{name} must be one of {quoted}, got {value!r}")
