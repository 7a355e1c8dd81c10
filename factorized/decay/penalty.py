"""``fz.ProductPenalty`` and ``fz.NuclearDecay``: other penalties on the product, as the paper's conclusion suggests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from factorized._torch import computable, on_one_device, without_autocast
from factorized.decay.engine import gradient_of
from factorized.decay.forms import Form, forms, why_none
from factorized.decay.hook import AttachedDecay, Step
from factorized.decay.rest import decay_rest
from factorized.decay.sharded import add_whole
from factorized.decay.strength import check_number, unless_named
from factorized.formats.svd import factor_spectrum, nuclear_gradients


class ProductPenalty(AttachedDecay):
    """Penalize the composed products ``W = U M₁…M_d Vᵀ`` by any ``fn(W)``, whose gradient is added before every step.

    For a layer in another format, ``W`` is the matrix that low rank would read its weight as.

    ``fn`` takes a batch of matrices (batch, m, n) and returns one number. The product is formed and
    differentiated by autograd: this works for any ``fn``, at the cost of the dense weight. In attention it acts on the
    OV forms. Sharded factors are gathered.

    Raises:
        ValueError: ``fn`` is not callable, the model holds no products, or, when it acts, ``fn`` does not return a
            differentiable number.

    Examples:
        >>> model = nn.Sequential(fz.FactorizedLinear(64, 64, 8))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> penalty = fz.ProductPenalty(model, lambda W: 1e-4 * W.abs().sum()).attach(optimizer)
        >>> penalty.penalty().requires_grad
        True
    """

    noun = "penalty"
    shown = ("fn",)
    penalizes = "a function of the product"

    def __init__(self, model: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
        if not callable(fn):
            raise ValueError(f"fn must be a function of the composed matrices (batch, m, n), got {fn!r}")
        self.forms = unless_named(forms(model))
        if not self.forms:
            raise ValueError(
                f"{type(model).__name__} holds no products to penalize; call fz.factorize first{why_none(model)}"
            )
        super().__init__(model, self.forms)
        self.fn = fn

    def penalty(self) -> Tensor:
        """Return Σ fn(W), differentiable."""
        self._refresh()
        with without_autocast(*(form.factors[0].parameter.device for form in self.forms)):
            return on_one_device([self._of(form, form.values) for form in self.forms]).sum()

    def apply_(self) -> None:
        """Add the penalty's gradient to the current gradients, once."""
        self._refresh()
        self._act(None)

    def _of(self, form: Form, values: Sequence[Tensor]) -> Tensor:
        number = self.fn(form.compose(values))
        if not isinstance(number, Tensor):
            raise ValueError(f"{form.name}: fn must return a tensor of one number, got {number!r}")
        return number.sum()

    def _gradients(self, form: Form) -> list[Tensor]:
        with torch.inference_mode(False), torch.enable_grad():
            values = [computable(value.detach()).clone().requires_grad_() for value in form.values]
            number = self._of(form, values)
            if not number.requires_grad:
                raise ValueError(
                    f"{form.name}: the result of fn does not depend on the product by differentiable operations, so it "
                    "penalizes nothing; do not detach or round in fn"
                )
            return list(torch.autograd.grad(number, values))

    @torch.no_grad()
    def _act(self, step: Step | None) -> None:
        for form in self.forms:
            held = [step is None or step.holds(factor.parameter) for factor in form.factors]
            targets = [gradient_of(factor) if own else None for factor, own in zip(form.factors, held, strict=True)]
            if all(target is None for target in targets):
                continue
            with without_autocast(form.factors[0].parameter.device):
                gradients = self._gradients(form)
            for factor, target, gradient in zip(form.factors, targets, gradients, strict=True):
                if target is not None:
                    weight = 1.0 if step is None else step.for_gradient(factor.parameter, 1.0)
                    add_whole(target, factor, gradient * weight)
        if step is not None:
            decay_rest(step, self, decoupled=False)


class NuclearDecay(ProductPenalty):
    """Penalize λ‖U M₁…M_d Vᵀ‖_*, the nuclear norm, which ordinary decay of the factors bounds (equation 2).

    ``strength`` is λ. The gradient is added before every step of the optimizer that it is attached to; its SVDs are no
    larger than the rank.

    Raises:
        ValueError: ``strength`` is not a finite number of at least 0, or the model holds no products.

    Examples:
        >>> model = nn.Sequential(fz.FactorizedLinear(64, 64, 8))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> decay = fz.NuclearDecay(model, 1e-4).attach(optimizer)
        >>> expected = 1e-4 * torch.linalg.matrix_norm(model[0].weight, "nuc")
        >>> torch.allclose(decay.penalty(), expected)
        True
    """

    penalizes = "the nuclear norm"
    shown = ("strength",)

    def __init__(self, model: nn.Module, strength: float) -> None:
        check_number("strength", strength)
        super().__init__(model, self._scaled_norm)
        self.strength = strength

    def _scaled_norm(self, W: Tensor) -> Tensor:  # (batch, m, n) -> ()
        return self.strength * torch.linalg.svdvals(W).sum()

    def _of(self, form: Form, values: Sequence[Tensor]) -> Tensor:
        values = [computable(value) for value in values]
        if not form.is_product:
            return super()._of(form, values)
        U, *inner, V = (value.detach() for value in values)
        norm = factor_spectrum(U, V, inner).sum()
        # By hand: autograd has no derivative for factors without full rank, such as zero.
        for value, gradient in zip(values, self._product_gradients(U, inner, V), strict=True):
            norm = norm + ((value - value.detach()) * gradient).sum()
        return self.strength * norm

    def _gradients(self, form: Form) -> list[Tensor]:
        if not form.is_product:
            return super()._gradients(form)
        U, *inner, V = (computable(value.detach()) for value in form.values)
        return [self.strength * gradient for gradient in self._product_gradients(U, inner, V)]

    def _product_gradients(self, U: Tensor, inner: Sequence[Tensor], V: Tensor) -> list[Tensor]:
        dU, dV, d_inner = nuclear_gradients(U, V, inner)
        return [dU, *d_inner, dV]
