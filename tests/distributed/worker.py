"""Run by torchrun in two processes: trains sharded or replicated models and compares them with one process.

torchrun --nproc-per-node 2 tests/distributed/worker.py SCENARIO,SCENARIO OUT.json
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import sys
import weakref
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import factorized as fz
from factorized._torch import leave_process_group
from factorized.files import checksum
from factorized.nn.layer import FactorizedLayer

STEPS = 3


class Net(nn.Module):
    """Convolutions with and without groups and inner matrices, a linear and an embedding: every kind of product."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.conv = nn.Conv2d(12, 16, 3, padding=1)
        self.grouped = nn.Conv2d(16, 12, 3, padding=1, groups=2)
        self.linear = nn.Linear(12, 14)
        self.head = nn.Linear(14, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).movedim(-1, 1)
        x = self.grouped(F.relu(self.conv(x)))
        return self.head(F.relu(self.linear(x.mean(dim=(2, 3)))))


def build() -> nn.Module:
    torch.manual_seed(0)
    model = Net().double()
    model = fz.factorize(model, rank=3, include=["embed", "conv", "grouped"])
    return fz.factorize(model, fz.Overcomplete("deep"), include=["linear"], init="spectral")


def build_tensors() -> nn.Module:
    torch.manual_seed(0)
    model = fz.factorize(Net().double(), fz.TensorTrain(), rank=2, include=["conv"])
    model = fz.factorize(model, fz.Monarch(blocks=2), rank=2, include=["linear"])
    return fz.factorize(model, fz.Tucker(), rank=3, include=["grouped"])


def batch(step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 11, (4, 6, 6), generator=generator)
    classes = torch.randint(0, 5, (4,), generator=generator)
    size = 4 // world
    return tokens[rank * size : (rank + 1) * size], classes[rank * size : (rank + 1) * size]


Make = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(fz.parameter_groups(model, 1e-2), lr=0.1, momentum=0.9)
    fz.FrobeniusDecay(model, 0.1).attach(optimizer)
    return optimizer


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(fz.parameter_groups(model, 1e-2), lr=0.01)
    fz.decoupled_frobenius(optimizer, model, 0.1)
    return optimizer


def flambe(model: nn.Module) -> torch.optim.Optimizer:
    return fz.Flambe(fz.parameter_groups(model, 1e-2), model, lr=0.01, frobenius_decay=0.1)


def inside(model: nn.Module) -> torch.optim.Optimizer:
    """Decay in the backward pass, as part of the gradient that is averaged."""
    for module in model.modules():
        if isinstance(module, FactorizedLayer):
            module.execution = "composed"
    optimizer = torch.optim.SGD(fz.parameter_groups(model, 1e-2), lr=0.1, momentum=0.9)
    decay = fz.FrobeniusDecay(model, 0.1, in_backward=True).attach(optimizer)
    assert decay._inside
    return optimizer


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(fz.parameter_groups(model, 1e-2), lr=0.1, momentum=0.9)


OPTIMIZERS: dict[str, Make] = {"sgd": sgd, "adamw": adamw, "flambe": flambe}
OTHER_DECAYS: dict[str, Make] = {"inside": inside, "penalty": plain}


def train(model: nn.Module, optimizer: str, rank: int, world: int, wrapper: type[nn.Module] | None = None) -> None:
    made = (OPTIMIZERS | OTHER_DECAYS)[optimizer](model)
    run = model if wrapper is None else wrapper(model)
    for step in range(STEPS):
        tokens, classes = batch(step, rank, world)
        made.zero_grad()
        loss = F.cross_entropy(run(tokens), classes)
        if optimizer == "penalty":  # added on every rank, whose gradients are averaged
            loss = loss + fz.FrobeniusDecay(model, 0.1).penalty()
        loss.backward()
        made.step()


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }


def largest_difference(model: nn.Module, expected: nn.Module) -> float:
    state, wanted = whole_state(model), expected.state_dict()
    return max((state[name] - wanted[name]).abs().max().item() for name in wanted)


class CountBytes(TorchDispatchMode):
    """Counts what collectives are given while it is active, whoever calls them: c10d, or distributed tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # its collectives are seen when it makes them
        moves = op.namespace in ("c10d", "_c10d_functional") and op._opname not in (
            "wait_tensor",
            "_wrap_tensor_autograd",
        )
        if moves:
            self.total += sum(t.numel() * t.element_size() for t in tree_leaves(args) if isinstance(t, Tensor))
        return op(*args, **(kwargs or {}))


def shard(model: nn.Module) -> nn.Module:
    for child in (model.conv, model.grouped, model.linear):
        fully_shard(child)
    fully_shard(model)
    return model


def compare(scenario: str, folder: Path) -> dict[str, float]:
    kind, optimizer, *of = scenario.split("-")
    make = build_tensors if of == ["tensors"] else build
    rank, world = dist.get_rank(), dist.get_world_size()
    expected = make()
    train(expected, optimizer, 0, 1)
    model = make() if kind == "ddp" else shard(make())
    train(model, optimizer, rank, world, DistributedDataParallel if kind == "ddp" else None)
    return {"difference": largest_difference(model, expected)}


def pipeline(scenario: str, folder: Path) -> dict[str, float]:
    """Train two stages, each on a rank of its own."""
    rank, make = dist.get_rank(), OPTIMIZERS[scenario.partition("-")[2]]
    torch.manual_seed(0)
    expected = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()
    expected = fz.factorize(expected, rank=2, keep_first_and_last=False)
    own = slice(2 * rank, 2 * rank + 2)
    stage = deepcopy(expected)[own]
    optimizers = make(expected), make(stage)
    schedule = Schedule1F1B(PipelineStage(stage, rank, 2, torch.device("cpu")), n_microbatches=4, loss_fn=F.mse_loss)
    for _ in range(STEPS):
        x, y = torch.randn(2, 8, 6, dtype=torch.float64)
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.mse_loss(expected(x), y).backward()
        schedule.step(x) if rank == 0 else schedule.step(target=y)
        for optimizer in optimizers:
            optimizer.step()
    return {"difference": max(on_all_ranks(largest_difference(stage, expected[own])))}


def count(scenario: str, folder: Path) -> dict[str, float]:
    model = shard(build())
    decay = fz.FrobeniusDecay(model, 0.1)
    tokens, classes = batch(0, dist.get_rank(), dist.get_world_size())
    F.cross_entropy(model(tokens), classes).backward()
    with CountBytes() as counter:
        decay.apply_()
    with CountBytes() as naive:
        for form in decay.forms:
            U, V = form.left.parameter.detach(), form.right.parameter.detach()
            (U @ (V.mT @ V)).redistribute(U.device_mesh, U.placements)
    grams = sum(2 * form.left.batch * form.U.shape[-1] ** 2 for form in decay.forms)
    inner = sum(factor.parameter.numel() for form in decay.forms for factor in form.middle)
    return {"bytes": counter.total, "allowed": 8 * (grams + inner), "left to distributed tensors": naive.total}


def checkpoint(scenario: str, folder: Path) -> dict[str, float]:
    expected, model = build(), shard(build())
    fz.save(model, folder / "saved")
    dist.barrier()
    torch.manual_seed(1)
    loaded = fz.load(folder / "saved", Net().double())
    return {"difference": largest_difference(loaded, expected)}


def on_all_ranks(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def error_of_saving(model: nn.Module, folder: Path) -> str:
    try:
        fz.save(model, folder)
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def unwritable(scenario: str, folder: Path) -> dict[str, list[str]]:
    """Save where rank 0 cannot: no folder, a disk that is full at the third tensor, and a NaN that rank 1 holds."""
    model = shard(build())
    (folder / "file").write_text("")
    errors = {"no folder": on_all_ranks(error_of_saving(model, folder / "file"))}
    written, take = itertools.count(), checksum._bytes

    def full(tensor: Tensor) -> memoryview:
        if next(written) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return take(tensor)

    checksum._bytes = full
    errors["full"] = on_all_ranks(error_of_saving(model, folder / "full"))
    checksum._bytes = take
    if dist.get_rank() == 1:
        model.head.weight.to_local().detach()[0, 0] = math.nan
    errors["nan"] = on_all_ranks(error_of_saving(model, folder / "nan"))
    left = [path.name for name in ("full", "nan") for path in (folder / name).glob("*")]
    return {**errors, "left": left}


def stages(scenario: str, folder: Path) -> dict[str, list[Any]]:
    """Save another model on either rank, as stages of a pipeline are sharded: to two folders, then to one."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "shard"))
    layers = [fz.FactorizedLinear(6, 6, 2), *(nn.Linear(6, 6) for _ in range(rank))]
    model, own = fully_shard(nn.Sequential(*layers), mesh=mesh["shard"]), folder / f"stage-{rank}"
    fz.save(model, own)
    same = False
    if own.exists():
        same = largest_difference(model, fz.load(own, nn.Sequential(*(nn.Linear(6, 6) for _ in layers)))) == 0
    return {"same": on_all_ranks(same), "one": on_all_ranks(error_of_saving(model, folder / "one stage"))}


def held(scenario: str, folder: Path) -> dict[str, list[int]]:
    """Count the whole tensors that are alive, the new one included, each time that one is gathered."""
    model = shard(build())
    gathered: list[weakref.ref[Tensor]] = []
    most, gather = 0, DTensor.full_tensor

    def counted(tensor: DTensor, **options: Any) -> Tensor:
        nonlocal most
        whole = gather(tensor, **options)
        gathered.append(weakref.ref(whole))
        most = max(most, sum(reference() is not None for reference in gathered))
        return whole

    DTensor.full_tensor = counted
    fz.save(model, folder / "held")
    DTensor.full_tensor = gather
    return {"most": on_all_ranks(most), "gathered": on_all_ranks(len(gathered)), "tensors": len(model.state_dict())}


def late(scenario: str, folder: Path) -> dict[str, str]:
    torch.manual_seed(0)
    model = Net().double()
    fully_shard(model)
    before = deepcopy(list(model.state_dict()))
    try:
        fz.factorize(model, rank=3, include=["conv"])
    except ValueError as error:
        return {"error": str(error), "untouched": str(before == list(model.state_dict()))}
    return {"error": "", "untouched": ""}


def wrapped(scenario: str, folder: Path) -> dict[str, str]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net().double())
    try:
        fz.factorize(model, rank=3, include=["module.conv"])
    except ValueError as error:
        return {"error": str(error)}
    return {"error": ""}


def main() -> None:
    scenarios, out = sys.argv[1].split(","), Path(sys.argv[2])
    dist.init_process_group("gloo")
    others = {"count": count, "checkpoint": checkpoint, "unwritable": unwritable, "held": held} | {
        "late": late,
        "stages": stages,
        "wrapped": wrapped,
        "pipeline-sgd": pipeline,
        "pipeline-adamw": pipeline,
    }
    result = {scenario: others.get(scenario, compare)(scenario, out.parent) for scenario in scenarios}
    if dist.get_rank() == 0:
        out.write_text(json.dumps(result))
    leave_process_group()


if __name__ == "__main__":
    main()
