"""``fz.Lamb``: layer-wise adaptive moments (You et al., 2020), as the paper's BERT experiments use it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from factorized._checks import check_range
from factorized.decay.local import placed_like
from factorized.optim.directions import add_directions_, laid_out_like, subtract_scaled_
from factorized.optim.finite import StepGuard
from factorized.optim.norms import global_norm, local_part, norms

Pairs = list[tuple[nn.Parameter, Tensor]]  # a parameter and its gradient


class Lamb(Optimizer):
    """LAMB: Adam with a trust ratio ‖w‖/‖u‖ for every parameter (You et al., 2020).

    ``r = m̂ / (√v̂ + ε)``, ``u = r + λw``, ``w ← w - η (‖w‖/‖u‖) u``; the ratio is 1 where a norm is zero.

    Args:
        params: parameters or groups; the trust ratio ‖w‖/‖u‖ also applies in groups without decay.
        lr: η, a number or a tensor of one.
        betas: decay rates of the moments m and v.
        eps: ε.
        weight_decay: λ.
        max_grad_norm: the norm of all gradients together is clipped to this first, including what an attached decay has
            added; None does not clip. An optimizer that holds only a part of the model (a stage of a pipeline, or in
            torch's ``ZeroRedundancyOptimizer``) would clip that part alone: pass None, and clip before the step.
        bias_correction: divide the moments by 1 - βᵗ.
        trust_clip: an upper bound for the trust ratio.
        capturable: never wait for a GPU, also for CUDA graphs. Without it every step waits once, to see whether the
            gradients are finite.
        skip_nonfinite: skip a step whose gradients hold NaN or infinity, or are so large that their squares, which the
            second moment keeps, are infinite (above 1e19 in float32), and count it in ``skipped``; otherwise it raises.
            The state is unchanged in both cases. With ``capturable=True`` a GPU always skips such steps.

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
        _check_rate(group["lr"])
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

    @property
    @torch.no_grad()
    def found_inf(self) -> Tensor | None:
        """Whether the present gradients are not finite, so that ``step`` does not take them; None if they are.

        ``GradScaler`` sets it on fused optimizers. A decay that shrinks parameters just before a step reads it.
        """
        found = self._stepping()
        finite = self.guard.finite(_norm_of_all(found)) if any(found) else True
        return None if finite is True else 1 - torch.as_tensor(finite, dtype=torch.float32)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch has two overloads
        """Take one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = self._stepping()
        if not any(found):
            return loss
        norm = _norm_of_all(found)
        passed = self.guard.passes(norm)
        if passed is False:
            return loss
        on_device = passed if isinstance(passed, Tensor) else None
        scale = self._clipping(norm, on_device is not None)
        decays = self._decays(on_device)
        for group, pairs in zip(self.param_groups, found, strict=True):
            for parameters, gradients in _by_device_and_type(pairs):
                self._update(group, parameters, gradients, decays, scale, on_device)
        return loss

    def _stepping(self) -> list[Pairs]:
        """Return the parameters that have a gradient, with it, of every group."""
        return [
            [(p, _local_gradient(p.grad, p)) for p in group["params"] if p.grad is not None]
            for group in self.param_groups
        ]

    def _clipping(self, norm: Tensor, on_device: bool) -> float | Tensor | None:
        """Return what all gradients are multiplied by; None if they stay as they are."""
        if self.max_grad_norm is None:
            return None
        if on_device:
            return torch.clamp(self.max_grad_norm / norm, max=1.0)
        found = norm.item()
        return self.max_grad_norm / found if found > self.max_grad_norm else None

    def _decays(
        self,
        passed: Tensor | None,  # 1 or 0, if the step must not wait for it
    ) -> dict[nn.Parameter, Tensor]:
        """Return, in new tensors, what is added to updates in place of λw; called before any parameter is changed."""
        return {}

    def _update(
        self,
        group: dict[str, Any],
        parameters: list[nn.Parameter],  # of one device and type
        gradients: list[Tensor],
        decays: Mapping[nn.Parameter, Tensor],
        scale: float | Tensor | None,
        passed: Tensor | None,  # 1 or 0, if the step must not wait for it
    ) -> None:
        """Update parameters of one group."""
        passed = None if passed is None else passed.to(gradients[0].device)
        if scale is not None:
            scale = scale.to(gradients[0].device) if isinstance(scale, Tensor) else scale
            gradients = list(torch._foreach_mul(gradients, scale))
        states = [self._state_of(parameter) for parameter in parameters]
        steps = [state["step"] for state in states]
        if passed is None:
            torch._foreach_add_(steps, 1.0)
        else:  # as a single tensor, torch would fetch it from the device
            torch._foreach_add_(steps, [passed] * len(steps))

        weights = [local_part(parameter) for parameter in parameters]
        given = [decays.get(parameter) for parameter in parameters]
        plain = [weight for weight, decay in zip(weights, given, strict=True) if decay is None]
        decayed = iter(torch._foreach_mul(plain, group["weight_decay"]) if plain else ())
        updates = [next(decayed) if decay is None else local_part(decay) for decay in given]
        first = [local_part(state["exp_avg"]) for state in states]
        second = [local_part(state["exp_avg_sq"]) for state in states]
        updates = [laid_out_like(moment, update) for moment, update in zip(first, updates, strict=True)]
        gradients = [laid_out_like(moment, gradient) for moment, gradient in zip(first, gradients, strict=True)]
        if not group["bias_correction"]:
            steps = [torch.full_like(step, torch.inf) for step in steps]  # after which 1 - βᵗ is 1
        add_directions_(updates, gradients, first, second, steps, group["betas"], group["eps"], passed)

        ratios = self._trust_ratios(group, parameters, weights, updates)
        rate = group["lr"].reshape(()) if isinstance(group["lr"], Tensor) else group["lr"]
        rate = rate if passed is None else rate * passed
        subtract_scaled_(weights, updates, ratios * rate)

    def _trust_ratios(
        self, group: dict[str, Any], parameters: list[nn.Parameter], weights: list[Tensor], updates: list[Tensor]
    ) -> Tensor:  # (parameters,)
        weight_norms, update_norms = norms(weights, parameters), norms(updates, parameters)
        both = (weight_norms > 0) & (update_norms > 0)
        ratios = torch.where(both, weight_norms / update_norms, 1.0)
        if group["trust_clip"] is not None:
            ratios = ratios.clamp(max=group["trust_clip"])
        return ratios

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        elif state["step"].device != parameter.device:  # torch loads it to where it was saved
            state["step"] = state["step"].to(parameter.device)
        return state


def _check_rate(lr: float | Tensor) -> None:
    """Raise unless a learning rate is a number of at least 0, or a tensor of one; a tensor on a GPU is not checked."""
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr must be one number, got a tensor of shape {tuple(lr.shape)}")
        if lr.device.type != "cpu":
            return
        lr = lr.item()
    check_range("lr", lr, least=0)


def _local_gradient(gradient: Tensor, parameter: nn.Parameter) -> Tensor:
    if gradient.is_sparse:
        raise ValueError("a parameter has a sparse gradient, which LAMB cannot use; pass sparse=False to its embedding")
    gradient = local_part(placed_like(gradient, parameter))
    return gradient if gradient.dtype == parameter.dtype else gradient.to(parameter.dtype)


def _norm_of_all(found: Sequence[Pairs]) -> Tensor:
    stepping = [pair for pairs in found for pair in pairs]
    return global_norm([gradient for _, gradient in stepping], [parameter for parameter, _ in stepping])


def _by_device_and_type(
    pairs: Pairs,
) -> Iterable[tuple[list[nn.Parameter], list[Tensor]]]:
    """Return the parameters and gradients that are updated together, those of one shape next to each other."""
    found: dict[tuple[torch.device, torch.dtype], tuple[list[nn.Parameter], list[Tensor]]] = {}
    for parameter, gradient in sorted(pairs, key=lambda pair: pair[0].shape):
        alike = found.setdefault((gradient.device, gradient.dtype), ([], []))
        alike[0].append(parameter)
        alike[1].append(gradient)
    return found.values()
