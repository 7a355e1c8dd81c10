"""``fz.NormMatcher``: the paper's "no decay (normalized)" experiment (figure 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from factorized._torch import computable, full_precision, not_compiled, on_one_device, without_autocast
from factorized.decay.forms import Factor, Form, check_have_values, forms
from factorized.decay.guard import LaterLayers, check_hookable, check_still_held
from factorized.decay.hook import Step
from factorized.decay.strength import check_number

Norms = dict[str, float]  # by form name
Exponents = list[tuple[Factor, dict[int, float]]]  # of trainable factors, each once: powers of the forms' ratios


class NormMatcher:
    """Records the Frobenius norms of a model's products, and rescales another run's products to recorded ones.

    Train once with Frobenius decay and call ``record()`` after every step. Then train again without decay, with
    ``attach(optimizer, recorded)``: after every step the factors of each product are rescaled equally to its recorded
    norm, so that only its direction is free. Frozen factors stay as they are, and the others make up for them. Factors
    that several products share are rescaled for all of them at once. Sharded factors are gathered to be measured, so
    all ranks must take part.

    Raises:
        ValueError: the model holds no products; in ``match``, if a norm is missing or a product is zero; in a step, if
            fewer norms were recorded than steps are taken.

    Examples:
        >>> decayed = nn.Sequential(fz.FactorizedLinear(64, 64, 8))
        >>> recorded = [fz.NormMatcher(decayed).record()]  # once a step
        >>> model = nn.Sequential(fz.FactorizedLinear(64, 64, 8))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> matcher = fz.NormMatcher(model).attach(optimizer, recorded)
    """

    def __init__(self, model: nn.Module) -> None:
        self.forms = forms(model)
        if not self.forms:
            raise ValueError(f"{type(model).__name__} holds no products to match; call fz.factorize first")
        self._later = LaterLayers(model)
        self._handle: RemovableHandle | None = None
        self._recorded: Sequence[Mapping[str, float]] = ()
        self._step = 0
        self._solved: tuple[list[bool], Exponents] | None = None  # for these trainable flags

    @full_precision
    @torch.no_grad()
    def record(self) -> Norms:
        """Return the present norm of every product, by name."""
        check_still_held(self.forms, between_passes=True)
        self._later.check(self.forms)
        check_have_values(self.forms)
        return {form.name: norm for form, norm in zip(self.forms, self.norms().tolist(), strict=True)}

    @torch.no_grad()
    def norms(self) -> Tensor:  # (forms,)
        """Return the norm of every product, in the order of ``forms``, on the first one's device."""
        with without_autocast(*(form.factors[0].parameter.device for form in self.forms)):
            return on_one_device([_norm(form) for form in self.forms])

    @torch.no_grad()
    def rescale(
        self,
        norms: Tensor,  # (forms,)
    ) -> None:
        """Rescale the factors so that the norms are ``norms``; it checks nothing, so it never waits for the device."""
        ratios = norms / self.norms()
        for factor, exponents in self._exponents():
            for index, exponent in exponents.items():
                factor.value.mul_((ratios[index] ** exponent).to(factor.parameter.device))

    def _exponents(self) -> Exponents:
        """Return the powers that rescale the factors which are trained now."""
        trains = [factor.parameter.requires_grad for form in self.forms for factor in form.factors]
        if self._solved is None or self._solved[0] != trains:
            self._solved = trains, _solve(self.forms)
        return self._solved[1]

    @full_precision
    @torch.no_grad()
    def match(self, norms: Mapping[str, float]) -> None:
        """Rescale the factors of every product to its norm in ``norms``."""
        missing = [form.name for form in self.forms if form.name not in norms]
        if missing:
            raise ValueError(f"norms must name every product of the model; {missing[0]!r} is missing")
        for form in self.forms:
            check_number(f"the norm of {form.name!r}", norms[form.name])
        current = self.record()
        for form in self.forms:
            if current[form.name] == 0:
                raise ValueError(f"{form.name}: a product of norm 0 has no direction to rescale; nothing was changed")
        self.rescale(self.norms().new_tensor([norms[form.name] for form in self.forms]))

    def attach(self, optimizer: Optimizer, recorded: Sequence[Mapping[str, float]]) -> Self:
        """Match ``recorded[t]`` after step t of ``optimizer``; return this matcher."""
        if self._handle is not None:
            raise ValueError("this matcher is attached already; call detach() first")
        check_hookable(optimizer)
        self._recorded, self._step = recorded, 0
        self._handle = optimizer.register_step_post_hook(self._after_step)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, which are not attached to an optimizer."""
        return {**self.__dict__, "_handle": None}

    def detach(self) -> None:
        """Stop acting on the optimizer."""
        if self._handle is None:
            raise ValueError("this matcher is not attached to an optimizer; call attach(optimizer, recorded) first")
        self._handle.remove()
        self._handle = None

    @not_compiled  # like the steps of decays
    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if Step(optimizer).is_skipped():
            return
        if self._step >= len(self._recorded):
            raise ValueError(
                f"only {len(self._recorded)} steps were recorded, and this is step {self._step + 1}; record every step "
                "of the other run, or call detach()"
            )
        self.match(self._recorded[self._step])
        self._step += 1


def _solve(found: Sequence[Form]) -> Exponents:
    """Return the powers that match all norms at once.

    A form's ratio is the product of its factors' scales, which is linear in logarithms. The smallest solution rescales
    all factors of a form equally, and also exists where forms share factors.
    """
    free = {factor.place: factor for form in found for factor in form.factors if factor.parameter.requires_grad}
    index = {place: number for number, place in enumerate(free)}
    counts = torch.zeros(len(found), len(free), dtype=torch.float64, device="cpu")
    for row, form in enumerate(found):
        for factor in form.factors:
            if factor.parameter.requires_grad:
                counts[row, index[factor.place]] += 1
    powers = torch.linalg.pinv(counts).tolist()  # (factors, forms)
    rounded = [[round(power, 14) for power in row] for row in powers]  # so that 0 and ½ are exact
    nonzero = [{form: power for form, power in enumerate(row) if power} for row in rounded]
    return list(zip(free.values(), nonzero, strict=True))


def _norm(form: Form) -> Tensor:
    return form.norm_squared([computable(value) for value in form.values]).sum().sqrt()
