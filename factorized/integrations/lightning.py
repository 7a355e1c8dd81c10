"""Lightning: a callback that factorizes the module, decays its products, and keeps the plan in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from factorized.decay.forms import factor_parameters, forms
from factorized.decay.frobenius import FrobeniusDecay
from factorized.decay.strength import Strength
from factorized.nn.init import Init
from factorized.planning.plan import Plan
from factorized.surgery.compose import compose_in_place, is_factorized
from factorized.surgery.describe import describe
from factorized.surgery.factorize import build_layers, factorize, install

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:  # the smaller package, which has the same classes
        from pytorch_lightning import Callback

PLAN = "factorized_plan"  # its place in a checkpoint


class FactorizeCallback(Callback):
    """Factorize a ``LightningModule`` before its optimizers are made, and decay its products.

    The module's ``configure_optimizers`` runs after that. Use ``fz.parameter_groups(self, ...)`` in it, so that no
    factor gets ordinary weight decay on top of ``decay``. Every checkpoint holds the plan; a run that is resumed from
    one is factorized by that plan, not by a new one, and continues exactly.

    Args:
        plan: a plan for the module, or a function that makes one: ``lambda module: fz.plan(module, ratio=0.3)``. None
            for a module that is already factorized, or whose checkpoint has a plan.
        init: how factors are filled, as for ``fz.factorize``.
        decay: the strength of ``fz.FrobeniusDecay``, attached to every optimizer that holds factors; None for none.
        decoupled: as for ``fz.FrobeniusDecay``.

    Raises:
        ValueError: in ``fit``, what ``fz.plan``, ``fz.factorize`` and ``fz.FrobeniusDecay`` raise.

    Examples:
        >>> import pytorch_lightning as pl
        >>> callback = fz.integrations.FactorizeCallback(lambda module: fz.plan(module, ratio=0.3), decay=1e-4)
        >>> trainer = pl.Trainer(callbacks=[callback], accelerator="cpu", logger=False)  # then trainer.fit(...)
    """

    def __init__(
        self,
        plan: Plan | Callable[[nn.Module], Plan] | None = None,
        *,
        init: Init | None = None,
        decay: Strength | None = None,
        decoupled: bool | None = None,
    ) -> None:
        self.plan, self.init, self.decay, self.decoupled = plan, init, decay, decoupled
        self.decays: list[FrobeniusDecay] = []  # one for each optimizer that holds factors
        self._steps: list[int] = []  # taken in a checkpoint or an earlier ``fit``, for decays that are not made yet

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Factorize the module, unless it already is, and apply a checkpoint's plan before its weights."""
        if self.plan is not None and not is_factorized(pl_module):
            _refuse_copies(trainer)
            made = self.plan if isinstance(self.plan, Plan) else self.plan(pl_module)
            factorize(pl_module, made, init=self.init)
        if trainer.global_step == 0:
            self._steps = []
        # Lightning calls callbacks only after a checkpoint's weights are loaded, but the module before that.
        of_module = pl_module.on_load_checkpoint

        def restore_first(checkpoint: dict[str, Any]) -> None:
            if PLAN in checkpoint and not is_factorized(pl_module):
                _refuse_copies(trainer)
            restore_plan(pl_module, checkpoint)
            of_module(checkpoint)

        vars(pl_module)["on_load_checkpoint"] = restore_first

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach a decay to every optimizer that holds factors."""
        _forget_wrapper(pl_module)
        if self.decay is None:
            return
        factors = factor_parameters(forms(pl_module))
        holding = [o for o in trainer.optimizers if any(p in factors for g in o.param_groups for p in g["params"])]
        # If none holds any, attaching to the first raises the error that explains it.
        self.decays = [
            FrobeniusDecay(pl_module, self.decay, decoupled=self.decoupled).attach(optimizer)
            for optimizer in holding or trainer.optimizers[:1]
        ]
        self._resume()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Detach the decays: another ``fit`` makes new optimizers."""
        _forget_wrapper(pl_module)
        self._steps = self.state_dict()["steps"]
        for decay in self.decays:
            decay.detach()
        self.decays = []

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Write the plan into a checkpoint."""
        if is_factorized(pl_module):
            checkpoint[PLAN] = describe(pl_module).to_dict()

    def state_dict(self) -> dict[str, Any]:
        """Return the steps that the decays have taken, for strengths that follow a schedule."""
        return {"steps": [decay.steps for decay in self.decays] or self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a saved run left off."""
        self._steps = list(state_dict["steps"])
        self._resume()

    def _resume(self) -> None:
        # Lightning restores callbacks before or after ``on_fit_start``, depending on its strategy.
        if self.decays:
            for decay, steps in zip(self.decays, self._steps, strict=False):
                decay.load_state_dict({"steps": steps})
            self._steps = []


def restore_plan(module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Factorize ``module`` like the one that wrote ``checkpoint``, so that its weights can be loaded next.

    ``FactorizeCallback`` does this when a ``Trainer`` loads. For ``load_from_checkpoint``, which has no callbacks, call
    it in the module's ``on_load_checkpoint``. A checkpoint without a plan changes nothing.

    Raises:
        ValueError: the plan does not fit the module.

    Examples:
        >>> import pytorch_lightning as pl
        >>> class Net(pl.LightningModule):
        ...     def on_load_checkpoint(self, checkpoint):
        ...         fz.integrations.restore_plan(self, checkpoint)
    """
    if PLAN not in checkpoint:
        return
    saved = Plan.from_dict(checkpoint[PLAN])
    if is_factorized(module):
        if describe(module).entries == saved.entries:
            return
        compose_in_place(module)  # the plan restores ties
    install(module, saved, build_layers(module, saved, init=None))


def _refuse_copies(trainer: Trainer) -> None:
    """Raise if the trainer trains copies of its module in processes that it spawns or forks, as in notebooks.

    Lightning then copies weights back to the module by their names, which a dense one does not have.
    """
    launcher = getattr(trainer.strategy, "launcher", None)
    if any(cls.__name__ == "_MultiProcessingLauncher" for cls in type(launcher).__mro__):
        raise ValueError(
            f"{type(trainer.strategy).__name__} trains copies of the module in other processes, so that the module "
            "itself would stay dense. Factorize it before, with fz.factorize(module, plan), and pass no plan; or start "
            'a script with strategy="ddp"'
        )


def _forget_wrapper(module: nn.Module) -> None:
    """Restore the module's own ``on_load_checkpoint``, because copies and pickles would include the wrapper."""
    vars(module).pop("on_load_checkpoint", None)
