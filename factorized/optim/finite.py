"""Keeping values that are not finite out of an optimizer's state."""

from __future__ import annotations

import torch
from torch import Tensor


class StepGuard:
    """Decides whether a step may be taken, from the norm of its gradients."""

    def __init__(self, skip: bool, capturable: bool) -> None:
        self.skip = skip
        self.capturable = capturable
        self._on_host = 0
        self._on_device: Tensor | None = None

    @property
    def skipped(self) -> int:
        """Steps that were not taken."""
        return self._on_host + (int(self._on_device.item()) if self._on_device is not None else 0)

    def finite(self, norm: Tensor) -> bool | Tensor:
        """Return whether a norm is finite; with ``capturable=True`` as 1 or 0 on a GPU."""
        finite = torch.isfinite(norm)
        return finite.float() if self.capturable and norm.is_cuda else bool(finite)

    def passes(self, norm: Tensor) -> bool | Tensor:
        """Return whether the step may be taken, as ``finite`` does, and count those that may not."""
        passed = self.finite(norm)
        if isinstance(passed, Tensor):
            if self._on_device is None:
                self._on_device = torch.zeros((), device=norm.device)
            self._on_device.add_(1 - passed)
        elif not passed:
            if not self.skip:
                raise ValueError(
                    f"the gradients have norm {norm.item()}; the step was not taken, and the optimizer's state is "
                    "unchanged. Lower the learning rate, clip, or pass skip_nonfinite=True to skip and count such steps"
                )
            self._on_host += 1
        return passed
