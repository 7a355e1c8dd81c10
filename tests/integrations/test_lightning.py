from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import factorized as fz
from factorized.integrations.lightning import PLAN, FactorizeCallback, restore_plan
from factorized.surgery.describe import describe

# Lightning warns about workers, loggers and torch's own changes; none of it is about what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore")


class Net(pl.LightningModule):
    def __init__(self, optimizers: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
        self.count = optimizers
        self.automatic_optimization = optimizers == 1

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        if not self.automatic_optimization:
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        if self.count == 1:
            return SGD(fz.parameter_groups(self, 1e-2), lr=0.1, momentum=0.9)
        return [SGD(fz.parameter_groups(part, 1e-2), lr=0.1) for part in (self.body[0], self.body[2], self.body[4])]


class Loadable(Net):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        restore_plan(self, checkpoint)


def plan_of(module: nn.Module) -> fz.Plan:
    return fz.plan(module, rank=3, keep_first_and_last=False)


def by_energy(module: nn.Module) -> fz.Plan:
    return fz.plan(module, energy=0.7, keep_first_and_last=False)


def net(seed: int = 0, kind: type[Net] = Net, optimizers: int = 1) -> Net:
    torch.manual_seed(seed)
    return kind(optimizers)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 12, generator=generator)
    return list(zip(x.split(8), torch.randint(0, 4, (24,), generator=generator).split(8), strict=True))


def loader() -> DataLoader[Any]:
    x, y = zip(*batches(), strict=True)
    return DataLoader(TensorDataset(torch.cat(x), torch.cat(y)), batch_size=8)


def trainer(folder: Path, epochs: int, *callbacks: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=list(callbacks),
        default_root_dir=folder,
        enable_checkpointing=False,
        **quiet,
    )


def by_hand(module: Net, decay: float | None, init: Any = None, decoupled: bool | None = None) -> Net:
    fz.factorize(module, plan_of(module), init=init)
    optimizer = module.configure_optimizers()
    for one in optimizer if isinstance(optimizer, list) else [optimizer]:
        if decay is not None:
            fz.FrobeniusDecay(module, decay, decoupled=decoupled).attach(one)
    for _ in range(2):
        for x, y in batches():
            for one in optimizer if isinstance(optimizer, list) else [optimizer]:
                one.zero_grad()
            F.cross_entropy(module(x), y).backward()
            for one in optimizer if isinstance(optimizer, list) else [optimizer]:
                one.step()
    return module


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    torch.testing.assert_close(dict(a.state_dict()), dict(b.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("optimizers", "settings"), [(1, {}), (3, {}), (1, {"init": nn.init.eye_}), (1, {"decoupled": True})]
)
def test_training_with_the_callback_equals_factorizing_and_decaying_by_hand(
    tmp_path: Path, optimizers: int, settings: dict[str, Any]
) -> None:
    module = net(optimizers=optimizers)
    trainer(tmp_path, 2, FactorizeCallback(plan_of, decay=0.05, **settings)).fit(module, loader())
    assert_equal(module, by_hand(net(optimizers=optimizers), decay=0.05, **settings))
    undecayed = by_hand(net(optimizers=optimizers), decay=None)
    assert not torch.equal(module.body[0].U, undecayed.body[0].U)


def test_a_plan_can_be_given_as_it_is(tmp_path: Path) -> None:
    module = net()
    trainer(tmp_path, 2, FactorizeCallback(plan_of(module))).fit(module, loader())
    assert_equal(module, by_hand(net(), decay=None))


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_notebook"])
def test_strategies_that_train_copies_of_the_module_take_one_that_is_factorized(strategy: str, tmp_path: Path) -> None:
    module = net()
    made = pl.Trainer(accelerator="cpu", strategy=strategy, devices=2, logger=False, default_root_dir=tmp_path)
    callback = FactorizeCallback(plan_of)
    with pytest.raises(ValueError, match=r"trains copies of the module in other processes.*fz\.factorize\(module"):
        callback.setup(made, module, "fit")
    FactorizeCallback().setup(made, module, "fit")
    fz.factorize(module, plan_of(module))
    checkpoint: dict[str, Any] = {}
    callback.on_save_checkpoint(made, module, checkpoint)
    other = net()
    FactorizeCallback().setup(made, other, "fit")
    with pytest.raises(ValueError, match="trains copies of the module in other processes"):
        other.on_load_checkpoint(checkpoint)
    callback.setup(made, module, "fit")
    module.on_load_checkpoint(checkpoint)


@pytest.mark.parametrize("make", [plan_of, by_energy])
def test_a_resumed_run_goes_on_exactly_even_from_other_weights(tmp_path: Path, make: Any) -> None:
    def callback() -> FactorizeCallback:
        return FactorizeCallback(make, decay=lambda step: 0.02 * (step + 1))

    whole, first, second = net(), net(), net(seed=5)
    trainer(tmp_path, 4, callback()).fit(whole, loader())
    begun = trainer(tmp_path, 2, callback())
    begun.fit(first, loader())
    begun.save_checkpoint(tmp_path / "half.ckpt")
    trainer(tmp_path, 4, callback()).fit(second, loader(), ckpt_path=tmp_path / "half.ckpt")
    assert_equal(second, whole)
    assert "on_load_checkpoint" not in vars(second)
    deepcopy(second.body)


def test_a_checkpoint_holds_the_plan_and_is_read_back_without_a_trainer(tmp_path: Path) -> None:
    module = net()
    fitted = trainer(tmp_path, 1, FactorizeCallback(by_energy))
    fitted.fit(module, loader())
    fitted.save_checkpoint(tmp_path / "one.ckpt")
    saved = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert fz.Plan.from_dict(saved[PLAN]).layers
    loaded = Loadable.load_from_checkpoint(tmp_path / "one.ckpt", weights_only=True)
    assert_equal(loaded, module)


class Everything(Loadable):
    """Tied tables, attention and a recurrent network."""

    def __init__(self, optimizers: int = 1) -> None:
        super().__init__(optimizers)
        self.table, self.head = nn.Embedding(30, 16), nn.Linear(16, 30)
        self.head.weight = self.table.weight
        self.attention, self.gates = nn.MultiheadAttention(16, 2), nn.LSTM(16, 16)


def test_another_factorization_of_every_kind_of_layer_gives_way_to_that_of_the_checkpoint() -> None:
    def everything(seed: int, rank_scale: float) -> Net:
        made = net(seed, Everything)
        plan = fz.plan(made, rank_scale=rank_scale, keep_first_and_last=False, attention=("qk", "ov"))
        return fz.factorize(made, plan)

    saved, other = everything(0, 0.25), everything(1, 0.5)
    restore_plan(other, {PLAN: describe(saved).to_dict()})
    other.load_state_dict(saved.state_dict())
    assert_equal(other, saved)
    assert other.head.U is other.table.U
    assert describe(other).entries == describe(saved).entries


def test_the_same_module_can_be_fitted_and_tested_again(tmp_path: Path) -> None:
    module, callback = net(), FactorizeCallback(plan_of, decay=0.05)
    for _ in range(2):
        trainer(tmp_path, 1, callback).fit(module, loader())
    assert callback.state_dict() == {"steps": [3]}
    module.test_step = module.training_step
    trainer(tmp_path, 1, callback).test(module, loader(), verbose=False)


def test_ordinary_decay_of_factors_is_refused(tmp_path: Path) -> None:
    module = net()
    module.configure_optimizers = lambda: SGD(module.parameters(), lr=0.1, weight_decay=1e-2)
    with pytest.raises(ValueError, match="decayed twice"):
        trainer(tmp_path, 1, FactorizeCallback(plan_of, decay=0.05)).fit(module, loader())


def test_a_module_that_is_dense_has_nothing_to_decay(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no products to decay"):
        trainer(tmp_path, 1, FactorizeCallback(decay=0.05)).fit(net(), loader())
