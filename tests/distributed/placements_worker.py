"""Run by torchrun in two processes: products whose factors have any mix of placements, against one process.

torchrun --nproc-per-node 2 tests/distributed/placements_worker.py placements OUT.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import factorized as fz
from factorized._torch import leave_process_group
from factorized.formats.kernel import KernelShape

Placements = tuple[Placement, ...]
ONE = [(Shard(0),), (Shard(1),), (Replicate(),)]
SHAPE = KernelShape.of((6, 8))
HYBRID = [(Replicate(), Shard(0)), (Shard(0), Replicate()), (Shard(0), Shard(0)), (Shard(0), Shard(1))]

MODELS: dict[str, Callable[[], nn.Module]] = {
    "pair": lambda: fz.FactorizedLinear(6, 5, 3, bias=False),
    "groups": lambda: fz.FactorizedConv2d(4, 6, 3, 2, groups=2, bias=False),
    "deep": lambda: fz.FactorizedLinear(6, 5, 3, depth=1, bias=False),
    "train": lambda: fz.FactorizedLinear(8, 6, fz.TensorTrain().at_rank(SHAPE, 2), bias=False),
    "monarch": lambda: fz.FactorizedLinear(8, 6, fz.Monarch(blocks=2).at_rank(SHAPE, 2), bias=False),
    "attention": lambda: nn.MultiheadAttention(6, 3, bias=False),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(MODELS[name]()).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
            parameter.grad = torch.randn_like(parameter)
    return model


def distribute(model: nn.Module, mesh: DeviceMesh, chosen: Iterable[Placements]) -> nn.Module:
    """Distribute every parameter and its gradient, each by placements of its own."""
    for (name, parameter), placements in zip(list(model.named_parameters()), chosen, strict=True):
        path, _, last = name.rpartition(".")
        placed = nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements))
        placed.grad = distribute_tensor(parameter.grad, mesh, placements)
        model.get_submodule(path)._parameters[last] = placed
    return model


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def coupled(model: nn.Module) -> None:
    fz.FrobeniusDecay(model, 0.3).apply_()


def decoupled(model: nn.Module) -> None:
    fz.FrobeniusDecay(model, 0.3, decoupled=True).apply_(lr=0.1)


def in_the_loss(model: nn.Module) -> None:
    fz.FrobeniusDecay(model, 0.3).penalty().backward()


def cubed(model: nn.Module) -> None:
    fz.ProductPenalty(model, lambda W: W.abs().pow(3).sum()).apply_()


def nuclear(model: nn.Module) -> None:
    fz.NuclearDecay(model, 0.3).apply_()


def matched(model: nn.Module) -> None:
    matcher = fz.NormMatcher(model)
    matcher.match(dict.fromkeys(matcher.record(), 1.5))


def lamb(model: nn.Module) -> None:
    fz.Lamb(model.parameters(), lr=0.1, weight_decay=0.1).step()


def flambe(model: nn.Module) -> None:
    groups = fz.parameter_groups(model, 0.1)
    fz.Flambe(groups, model, lr=0.1, frobenius_decay=0.3).step()


def packed(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(fz.parameter_groups(model, 0.1), lr=0.1)
    fz.FrobeniusDecay(model, 0.3).attach(optimizer)
    optimizer.step()


ACTIONS = (coupled, decoupled, in_the_loss, cubed, nuclear, matched, lamb, flambe, packed)


def difference(name: str, mesh: DeviceMesh, chosen: tuple[Placements, ...], act: Callable[[nn.Module], None]) -> float:
    model, expected = distribute(build(name), mesh, chosen), build(name)
    act(model)
    act(expected)
    pairs = list(zip(model.parameters(), expected.parameters(), strict=True))
    return max(
        (whole(of(own)) - of(wanted)).abs().max().item()
        for own, wanted in pairs
        for of in (Tensor.detach, lambda parameter: parameter.grad)
    )


def mixes() -> dict[str, float]:
    """Return the largest difference of every action over every mix of placements."""
    line, square = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    result: dict[str, float] = {}
    for name in MODELS:
        count = len(list(build(name).parameters()))
        cases = [(line, mix) for mix in product(ONE, repeat=count)]
        cases += [(square, mix) for mix in product(HYBRID, repeat=count) if count < 3]
        for act in ACTIONS:
            result[f"{name} {act.__name__}"] = max(difference(name, mesh, mix, act) for mesh, mix in cases)
    return result


def partial_gradient() -> dict[str, float]:
    """Return the error of the decay, and of LAMB, where each rank has half of a factor's gradient."""
    mesh, result = init_device_mesh("cpu", (2,)), {}
    for act in (coupled, cubed, lamb, flambe):
        model, expected = distribute(build("pair"), mesh, [(Replicate(),), (Shard(0),)]), build("pair")
        own = model[0].U
        own.grad = DTensor.from_local(own.grad.to_local() / 2, mesh, [Partial()], run_check=False)
        act(model)
        act(expected)
        parts = [(own.detach(), expected[0].U.detach()), (own.grad, expected[0].U.grad)]
        result[act.__name__] = max((whole(a) - b).abs().max().item() for a, b in parts)
    return result


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def with_U(make: Callable[[Tensor], Tensor]) -> nn.Module:
    model = distribute(build("pair"), init_device_mesh("cpu", (2, 1)), [(Shard(0), Replicate())] * 2)
    model[0].U = nn.Parameter(make(whole(model[0].U.detach())))
    return model


def refusals() -> dict[str, str]:
    line, square = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))
    cases: dict[str, Callable[[Tensor], Tensor]] = {
        "whole": lambda U: U,
        "mesh": lambda U: distribute_tensor(U, line, [Shard(0)]),
        "partial": lambda U: DTensor.from_local(U, square, [Partial(), Replicate()], run_check=False),
        "strided": lambda U: DTensor.from_local(
            U[:3],
            square,
            [_StridedShard(0, split_factor=2), Shard(0)],
            run_check=False,
            shape=U.shape,
            stride=U.stride(),
        ),
    }
    calls: dict[str, Callable[[nn.Module], object]] = {
        "forms": fz.forms,
        "decay": lambda model: fz.FrobeniusDecay(model, 0.1),
        "nuclear": lambda model: fz.NuclearDecay(model, 0.1),
        "matcher": fz.NormMatcher,
        "flambe": lambda model: fz.Flambe(model.parameters(), model),
    }
    result = {
        f"{case} {name}": refused(lambda call=call, make=make: call(with_U(make)))
        for case, make in cases.items()
        for name, call in calls.items()
    }

    def partial_lamb() -> None:
        model = with_U(cases["partial"])
        model[0].U.grad = torch.zeros_like(model[0].U)
        fz.Lamb(model.parameters()).step()

    return result | {"partial lamb": refused(partial_lamb)}


def main() -> None:
    dist.init_process_group("gloo")
    result: dict[str, Any] = {"mixes": mixes(), "partial gradient": partial_gradient(), "refusals": refusals()}
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(result))
    leave_process_group()


if __name__ == "__main__":
    main()
