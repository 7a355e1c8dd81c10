"""``fz.Lamb``: layer-wise adaptive moments (You et al., 2020), as the paper's BERT experiments use it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from factorized.decay.local import placed_like
from factorized.optim.finite import StepGuard, check_range, check_rate
from factorized.optim.norms import global_norm, local_part, norms


class Lamb(Optimizer):
    """``r = m̂ / (√v̂ + ε)``, ``u = r + λw``, ``w ← w - η (‖w‖/‖u‖) u``; the ratio is 1 where a norm is zero.

    Args:
        params: parameters or groups; the trust ratio ‖w‖/‖u‖ also applies in groups without decay.
        lr: η, a number or a tensor of one.
        betas: decay rates of the moments m and v.
        eps: ε.
        weight_decay: λ.
        max_grad_norm: the norm of all gradients together is clipped to this first, including what an attached decay has
            added; None does not clip.
        bias_correction: divide the moments by 1 - βᵗ.
        trust_clip: an upper bound for the trust ratio.
        capturable: keep everything on the device, for CUDA graphs.
        skip_nonfinite: skip a step whose gradients hold NaN or infinity, or are so large that their squares, which the
            second moment keeps, are infinite (above 1e19 in float32), and count it in ``skipped``; otherwise it raises.
            The state is unchanged in both cases. A CUDA graph cannot raise, so it always skips such steps.

    Raises:
        ValueError: a setting is out of its range, or a parameter is complex; in ``step``, if a gradient is sparse or
            not finite.

    Examples:
        >>> model = nn.Linear(4, 1)
        >>> optimizer = fz.Lamb(model.parameters(), lr=1e-2)
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        max_grad_norm: float | None = 1.0,
        bias_correction: bool = True,
        trust_clip: float | None = None,
        capturable: bool = False,
        skip_nonfinite: bool = False,
    ) -> None:
        if max_grad_norm is not None:
            check_range("max_grad_norm", max_grad_norm, above=0)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "trust_clip": trust_clip,
            "capturable": capturable,
        }
        super().__init__(params, defaults)
        self.max_grad_norm = max_grad_norm
        self.guard = StepGuard(skip_nonfinite, capturable)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles; torch leaves out what is not a setting of a group."""
        return {**super().__getstate__(), "max_grad_norm": self.max_grad_norm, "guard": self.guard}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own settings, which are checked like the common ones."""
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except ValueError:
            del self.param_groups[-1]
            raise

    @staticmethod
    def _check_group(group: dict[str, Any]) -> None:
        if any(parameter.is_complex() for parameter in group["params"]):
            raise ValueError("LAMB takes real parameters, got complex ones; convert them with torch.view_as_real")
        check_rate(group["lr"])
        if not isinstance(group["betas"], Sequence) or len(group["betas"]) != 2:
            raise ValueError(f"betas must be two numbers, got {group['betas']!r}")
        for name, beta in zip(("betas[0]", "betas[1]"), group["betas"], strict=True):
            check_range(name, beta, least=0, below=1)
        for name in ("eps", "weight_decay"):
            check_range(name, group[name], least=0)
        if group["trust_clip"] is not None:
            check_range("trust_clip", group["trust_clip"], above=0)

    @property
    def skipped(self) -> int:
        """Steps skipped so far because a gradient was not finite."""
        return self.guard.skipped

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch has two overloads
        """Take one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = [
            {
                parameter: _local_gradient(parameter.grad, parameter)
                for parameter in group["params"]
                if parameter.grad is not None
            }
            for group in self.param_groups
        ]
        stepping = {parameter: gradient for found in gradients for parameter, gradient in found.items()}
        if not stepping:
            return loss
        norm = global_norm(list(stepping.values()), list(stepping))
        passed = self.guard.passes(norm)
        if passed is False:
            return loss
        scale = None
        if self.max_grad_norm is not None:
            scale = torch.nan_to_num(self.max_grad_norm / norm, nan=0.0).clamp(max=1.0)
        self._before_updates()
        for group, found in zip(self.param_groups, gradients, strict=True):
            if found:
                self._update(group, found, scale, passed if isinstance(passed, Tensor) else None)
        return loss

    def _before_updates(self) -> None:
        """Called before any parameter of the step is changed."""

    def _update(
        self, group: dict[str, Any], found: Mapping[nn.Parameter, Tensor], scale: Tensor | None, passed: Tensor | None
    ) -> None:
        """Update one group; ``passed`` is 1 or 0 on the device if the step must not wait for it."""
        parameters, gradients = list(found), list(found.values())
        if passed is not None:
            gradients = [torch.where(passed > 0, gradient, 0.0) for gradient in gradients]
        if scale is not None:
            gradients = list(torch._foreach_mul(gradients, scale))
        states = [self._state_of(parameter, group["capturable"]) for parameter in parameters]
        beta1, beta2 = group["betas"]
        keep1, keep2 = _kept(beta1, passed), _kept(beta2, passed)
        steps = [state["step"] for state in states]
        first = [local_part(state["exp_avg"]) for state in states]
        second = [local_part(state["exp_avg_sq"]) for state in states]
        torch._foreach_add_(steps, 1.0 if passed is None else [passed] * len(steps))
        torch._foreach_mul_(first, keep1)
        torch._foreach_add_(first, torch._foreach_mul(gradients, 1 - keep1))
        torch._foreach_mul_(second, keep2)
        squares = torch._foreach_mul(gradients, gradients)
        torch._foreach_add_(second, torch._foreach_mul(squares, 1 - keep2))

        roots = torch._foreach_sqrt(second)
        updates: tuple[Tensor, ...] | list[Tensor] = first
        if group["bias_correction"]:
            torch._foreach_div_(roots, _corrections(steps, beta2, group["capturable"], root=True))
            updates = torch._foreach_div(first, _corrections(steps, beta1, group["capturable"], root=False))
        torch._foreach_add_(roots, group["eps"])
        updates = list(torch._foreach_div(updates, roots))
        self._add_decay(group, parameters, updates)

        ratios = self._trust_ratios(group, parameters, updates)
        rate = group["lr"].reshape(()) if isinstance(group["lr"], Tensor) else group["lr"]
        rate = rate if passed is None else rate * passed
        torch._foreach_mul_(updates, list((ratios * rate).unbind()))
        torch._foreach_sub_([local_part(parameter) for parameter in parameters], updates)

    def _add_decay(self, group: dict[str, Any], parameters: list[nn.Parameter], updates: list[Tensor]) -> None:
        """Add λw to the updates."""
        if group["weight_decay"] != 0 and parameters:
            torch._foreach_add_(updates, [local_part(p) for p in parameters], alpha=group["weight_decay"])

    def _trust_ratios(
        self, group: dict[str, Any], parameters: list[nn.Parameter], updates: list[Tensor]
    ) -> Tensor:  # (parameters,)
        weight_norms = norms([local_part(parameter) for parameter in parameters], parameters)
        update_norms = norms(updates, parameters)
        both = (weight_norms > 0) & (update_norms > 0)
        ratios = torch.where(both, weight_norms / update_norms, 1.0)
        if group["trust_clip"] is not None:
            ratios = ratios.clamp(max=group["trust_clip"])
        return ratios

    def _state_of(self, parameter: nn.Parameter, capturable: bool) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            where = parameter.device if capturable else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=where)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def _local_gradient(gradient: Tensor, parameter: nn.Parameter) -> Tensor:
    if gradient.is_sparse:
        raise ValueError("a parameter has a sparse gradient, which LAMB cannot use; pass sparse=False to its embedding")
    return local_part(placed_like(gradient, parameter))


def _kept(beta: float, passed: Tensor | None) -> float | Tensor:
    return beta if passed is None else torch.where(passed > 0, beta, 1.0)


def _corrections(steps: list[Tensor], beta: float, capturable: bool, root: bool) -> list[Tensor] | list[float]:
    if not capturable:  # numbers, with which all tensors are divided at once
        return [(1 - beta ** max(step.item(), 1)) ** (0.5 if root else 1) for step in steps]
    # In double: 1 - 0.999 keeps only four digits in float32.
    corrections = [1 - beta ** step.double().clamp(min=1) for step in steps]
    return [correction.sqrt() for correction in corrections] if root else corrections
