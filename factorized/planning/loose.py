"""Matrices that no layer holds: parameters of somebody's module, stacks of experts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from factorized.planning.candidate import Candidate
from factorized.planning.plan import PlanEntry


def loose_entries(model: nn.Module, candidates: Sequence[Candidate]) -> list[PlanEntry]:
    """Return a dense entry, with its reason, for every matrix or stack of matrices that no candidate holds."""
    seen: set[Tensor] = {p for candidate in candidates for p in candidate.module.parameters()}
    entries = []
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None or parameter in seen or is_lazy(parameter):
                continue
            seen.add(parameter)
            if sum(extent > 1 for extent in parameter.shape) >= 2:
                entries.append(_entry(f"{name}.{key}".removeprefix("."), type(module).__name__, parameter))
    return entries


def _entry(name: str, holder: str, parameter: Tensor) -> PlanEntry:
    stack = parameter.dim() == 3 and parameter.shape[0] > 1
    what = f"a stack of {parameter.shape[0]} matrices" if stack else "a parameter"
    return PlanEntry(
        name=name,
        type=type(parameter).__name__,
        shape=tuple(parameter.shape),
        reason=f"{what} in {holder}, which is not a layer that can be replaced",
        params=parameter.numel(),
        params_after=parameter.numel(),
    )
