"""``fz.Flambe``: LAMB with decoupled Frobenius decay (section 6 of the paper)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from factorized._torch import not_compiled
from factorized.decay.engine import Engine
from factorized.decay.forms import Form, forms, why_none
from factorized.decay.frobenius import FrobeniusDecay
from factorized.decay.guard import (
    DecaysProducts,
    LaterLayers,
    check_not_in_backward,
    check_still_held,
    only_makes_state,
)
from factorized.decay.rest import REST_DECAY, packed_parameters, without_factors
from factorized.decay.strength import (
    Strength,
    check_readable,
    check_strength,
    decayed_forms,
    noted,
    product_forms,
    strengths,
)
from factorized.optim.count import StepCount
from factorized.optim.lamb import Lamb

TAKEN = "steps"  # the key of the steps taken in every group, since torch's distributed checkpoints keep nothing else


class Flambe(Lamb, DecaysProducts):
    """LAMB whose update of a factor is ``u = r + λ·∂½‖U M₁…M_d Vᵀ‖²`` instead of ``r + λw``.

    The products are those of ``model`` (see ``fz.forms``) whose ``frobenius_decay`` is not zero; their factors are not
    decayed by ``weight_decay``, even if their group has one. Everything else is ``Lamb``, bit for bit,
    and so are the other arguments.

    Args:
        params: parameters or groups, as for ``Lamb``.
        model: holds the products.
        frobenius_decay: λ for products: a number, a dict by form kind or name glob, or a schedule of the steps taken,
            without those that were skipped; for attention a number means only OV, see ``FrobeniusDecay``.

    Raises:
        ValueError: as for ``Lamb``; or the model holds no products, or ``params`` none of their factors.

    Examples:
        >>> model = nn.Sequential(fz.FactorizedLinear(64, 64, 8), nn.Linear(64, 10))
        >>> groups = fz.parameter_groups(model, weight_decay=0.01)
        >>> optimizer = fz.Flambe(groups, model, lr=1e-3, frobenius_decay=0.01)
        >>> model(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
    """

    penalizes = FrobeniusDecay.penalizes

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        model: nn.Module,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        frobenius_decay: Strength = 0.01,
        *,
        max_grad_norm: float | None = 1.0,
        bias_correction: bool = True,
        trust_clip: float | None = None,
        capturable: bool = False,
        skip_nonfinite: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            max_grad_norm=max_grad_norm,
            bias_correction=bias_correction,
            trust_clip=trust_clip,
            capturable=capturable,
            skip_nonfinite=skip_nonfinite,
        )
        self.forms: list[Form] = forms(model)
        if not self.forms:
            raise ValueError(
                f"{type(model).__name__} holds no products; use fz.Lamb, or call fz.factorize first{why_none(model)}"
            )
        check_readable(frobenius_decay, model)
        self._later = LaterLayers(model)
        self._set_decayed([])
        self._count = StepCount()
        self.frobenius_decay = frobenius_decay
        held = {parameter for group in self.param_groups for parameter in group["params"]}
        if self._factors and not held & self._factors:
            raise ValueError(
                f"the parameters hold none of the factors, such as those of {self._decayed[0].name!r}; make the groups "
                "after fz.factorize, from fz.parameter_groups(model, ...)"
            )

    @property
    def steps(self) -> int:
        """Steps taken so far, the argument of a schedule; skipped ones do not count. With ``capturable`` it waits."""
        return int(self._count)

    @property
    def frobenius_decay(self) -> Strength:
        """λ for products, which may be set between steps; a dict may also be changed in place."""
        return self._frobenius_decay

    @frobenius_decay.setter
    def frobenius_decay(self, strength: Strength) -> None:
        check_strength(strength, self.forms)
        decayed = decayed_forms(strength, self.forms)
        check_not_in_backward(decayed)
        if callable(strength):
            self._count = StepCount(self.steps)  # which forgets what another schedule said
        self._frobenius_decay, self._noted = strength, noted(strength)
        # These hold more than factors, such as packed attention weights; the rest of them keeps its ordinary decay.
        self._packed = packed_parameters(self.products)
        if decayed != self._decayed:
            self._set_decayed(decayed)

    def _set_decayed(self, decayed: list[Form]) -> None:
        self._decayed, self._engine = decayed, Engine(decayed)
        self._factors = {factor.parameter for factor in self._engine.form_of}

    @property
    def products(self) -> Sequence[Form]:
        """The forms that count as products, also at a strength of zero."""
        return product_forms(self._frobenius_decay, self.forms)

    def holds(self, parameter: nn.Parameter) -> bool:
        """Return whether ``parameter`` is a factor that is decayed as part of its product."""
        return parameter in self._factors

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles."""
        own = ("forms", "_frobenius_decay", "_noted", "_count", "_decayed", "_engine", "_factors", "_packed", "_later")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own settings, as ``Lamb`` does."""
        super().add_param_group({**param_group, TAKEN: 0})

    def state_dict(self) -> dict[str, Any]:
        """Return the state, and in every group the steps taken: a parameter without gradients has taken fewer."""
        for group in self.param_groups:
            group[TAKEN] = self.steps
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the state was saved, including a schedule."""
        super().load_state_dict(state_dict)
        steps = [int(state["step"]) for state in self.state.values()]  # all that the state of a Lamb has
        self._count = StepCount(max([*steps, *(int(group.get(TAKEN, 0)) for group in self.param_groups)]))

    @not_compiled  # it reads settings that may change between steps
    def _decays(self, passed: Tensor | None) -> dict[nn.Parameter, Tensor]:
        """Return λ times the Frobenius gradient of every factor."""
        if noted(self._frobenius_decay) != self._noted:
            self.frobenius_decay = self._frobenius_decay
        check_still_held(self._decayed)
        self._later.check(self.forms, partial(decayed_forms, self._frobenius_decay))
        decays: dict[nn.Parameter, Tensor] = {}
        for group in self.param_groups:
            rate = group.get(REST_DECAY, group["weight_decay"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p in self._packed and (p in self._factors or REST_DECAY in group):
                    decays[p] = without_factors(p, self._packed[p]) * rate
                elif p in self._factors:
                    decays[p] = torch.zeros_like(p)
        strength = self.frobenius_decay
        if callable(strength):
            strength = self._count.scheduled(strength, passed)
        numbers = dict(zip(self.forms, strengths(strength, self.forms, step=0), strict=True))
        self._engine.add(lambda f: decays.get(f.parameter), lambda f: numbers[self._engine.form_of[f]])
        if not only_makes_state(self):
            self._count.add(passed)
        return decays
