"""``fz.ProductPenalty`` and ``fz.NuclearDecay``: other penalties on the product, as the paper's conclusion asks for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from factorized.decay.act import Arguments, act_before_update, gradient_of, learning_rates
from factorized.decay.forms import AnyForm, TensorForm, forms, unread_attention
from factorized.decay.guard import check_attachable
from factorized.decay.strength import Number, check_number, unless_named
from factorized.maths.frobenius import computable
from factorized.maths.spectral import factor_spectrum, nuclear_gradients


class ProductPenalty:
    """Any penalty ``fn(W)`` on the composed products ``W = U M₁…M_d Vᵀ``; its gradient is added before every step.

    Of a tensorized layer ``W`` is the matrix that low rank would read its weight as.

    ``fn`` takes a batch of matrices (batch, m, n) and returns one number. The product is formed, and its gradient taken
    by autograd: right for any ``fn``, at the cost of the dense weight. Of attention it is the OV forms.
    """

    def __init__(self, model: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
        self.forms = unless_named(forms(model))
        if not self.forms:
            raise ValueError(
                f"{type(model).__name__} holds no products to penalize; call fz.factorize first"
                f"{unread_attention(model)}"
            )
        self.fn = fn
        self._handle: RemovableHandle | None = None

    def penalty(self) -> Tensor:
        """Return Σ fn(W), differentiable."""
        return torch.stack([self.fn(form.compose(form.values)).sum() for form in self.forms]).sum()

    def apply_(self) -> None:
        """Add the gradient to those that are there, once."""
        self._add(lambda parameter: True)

    def attach(self, optimizer: Optimizer) -> Self:
        """Act just before every ``optimizer.step()``; return this penalty."""
        if self._handle is not None:
            raise ValueError("this penalty is attached already; call detach() first")
        check_attachable(self.forms, optimizer, type(self))
        self._handle = optimizer.register_step_pre_hook(self._before_step)
        return self

    def detach(self) -> None:
        """Stop acting on the optimizer."""
        if self._handle is None:
            raise ValueError("this penalty is not attached to an optimizer; call attach(optimizer) first")
        self._handle.remove()
        self._handle = None

    def holds(self, parameter: nn.Parameter) -> bool:
        """Say whether ``parameter`` is a factor that this penalty acts on."""
        return any(factor.parameter is parameter for form in self.forms for factor in form.factors)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        return act_before_update(partial(self._act, optimizer), args, kwargs)

    def _act(self, optimizer: Optimizer) -> None:
        held = learning_rates(optimizer.param_groups)
        # A fused optimizer unscales its gradients itself, after this, and is told by what here.
        scale = getattr(optimizer, "grad_scale", None)
        self._add(held.__contains__, 1.0 if scale is None else scale)

    def _gradients(self, form: AnyForm) -> list[Tensor]:
        values = [computable(factor.value).requires_grad_() for factor in form.factors]
        with torch.enable_grad():
            loss = self.fn(form.compose(values)).sum()
        return list(torch.autograd.grad(loss, values))

    @torch.no_grad()
    def _add(self, held: Callable[[nn.Parameter], bool], scale: Number = 1.0) -> None:
        for form in self.forms:
            targets = [gradient_of(factor) if held(factor.parameter) else None for factor in form.factors]
            if all(target is None for target in targets):
                continue
            for factor, target, gradient in zip(form.factors, targets, self._gradients(form), strict=True):
                if target is not None:
                    factor.part(target).add_(gradient * scale)


class NuclearDecay(ProductPenalty):
    """λ‖U M₁…M_d Vᵀ‖_*, what ordinary decay of the factors bounds (equation 2), from SVDs no larger than the rank."""

    def __init__(self, model: nn.Module, strength: float) -> None:
        check_number("strength", strength)
        super().__init__(model, lambda W: strength * torch.linalg.svdvals(W).sum())
        self.strength = strength

    def penalty(self) -> Tensor:
        """Return Σ λ‖W‖_*, differentiable."""
        return self.strength * torch.stack([self._nuclear_norm(form) for form in self.forms]).sum()

    def _nuclear_norm(self, form: AnyForm) -> Tensor:
        values = [computable(value) for value in form.values]
        if isinstance(form, TensorForm):
            return torch.linalg.svdvals(form.compose(values)).sum()
        U, *inner, V = values
        return factor_spectrum(U, V, inner).sum()

    def _gradients(self, form: AnyForm) -> list[Tensor]:
        if isinstance(form, TensorForm):
            return super()._gradients(form)
        U, *inner, V = (computable(factor.value) for factor in form.factors)
        dU, dV, d_inner = nuclear_gradients(U, V, inner)
        return [gradient * self.strength for gradient in (dU, *d_inner, dV)]
