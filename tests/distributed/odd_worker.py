"""Run by torchrun in two processes: shards that are uneven or empty, half types, other penalties and diagnostics.

torchrun --nproc-per-node 2 tests/distributed/odd_worker.py odd OUT.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import factorized as fz
from factorized._torch import leave_process_group
from tests.distributed.worker import OPTIMIZERS, Make, largest_difference


class Odd(nn.Module):
    """Odd numbers of rows, groups that cross shards, and factors of one row, of which one rank has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = fz.FactorizedEmbedding(7, 5, 2)
        self.wide = fz.FactorizedLinear(5, 9, 3)
        self.deep = fz.FactorizedLinear(9, 6, 2, depth=1)
        self.grouped = fz.FactorizedConv1d(6, 9, 3, 2, groups=3, padding=1)
        self.narrow = fz.FactorizedLinear(9, 1, 1)
        self.widen = fz.FactorizedLinear(1, 3, 4)
        self.head = nn.Linear(3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.deep(torch.tanh(self.wide(self.embed(tokens)))))
        x = torch.tanh(self.grouped(x.movedim(-1, 1))).mean(dim=-1)
        return self.head(torch.tanh(self.widen(torch.tanh(self.narrow(x)))))


def build(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    model = Odd().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model.to(dtype)


def shard(model: nn.Module, **options: Any) -> nn.Module:
    for child in (model.wide, model.deep, model.grouped, model.narrow):
        fully_shard(child, **options)
    return fully_shard(model, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, share: slice, steps: int = 3) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        tokens, classes = torch.randint(0, 7, (4, 6), generator=generator), torch.arange(4) % 2
        optimizer.zero_grad()
        F.cross_entropy(model(tokens[share]).double(), classes[share]).backward()
        optimizer.step()


def own_share() -> slice:
    return slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)


def difference(make: Make, frozen: tuple[str, ...] = ()) -> float:
    expected, model = build(), build()
    for twin in (expected, model):
        for name, parameter in twin.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen or ("nothing",)))
    model = shard(model)
    train(expected, make(expected), slice(None))
    train(model, make(model), own_share())
    return largest_difference(model, expected)


def penalized(penalty: Callable[[nn.Module], Any]) -> Make:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(fz.parameter_groups(model, 1e-2), lr=0.1)
        penalty(model).attach(optimizer)
        return optimizer

    return make


PENALTIES: dict[str, Callable[[nn.Module], Any]] = {
    "frobenius": lambda model: fz.FrobeniusDecay(model, 0.1),
    "nuclear": lambda model: fz.NuclearDecay(model, 0.1),
    "product": lambda model: fz.ProductPenalty(model, lambda W: 0.1 * W.abs().pow(3).sum()),
}


def half() -> nn.Module:
    return build(torch.bfloat16)


def mixed() -> nn.Module:
    model = build(torch.float32)
    model.wide.double()
    model.deep.bfloat16()
    return model


def added_gradients(make: Callable[[], nn.Module]) -> float:
    """Return how far what the decay adds to gradients is from what it adds in one process."""
    added = []
    for model in (shard(make()), make()):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        fz.FrobeniusDecay(model, 0.1).apply_()
        gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
        added.append(torch.cat([gradient.flatten().double() for gradient in gradients]))
    return (added[0] - added[1]).abs().max().item()


def penalty_in_the_loss(penalty: Callable[[nn.Module], Any]) -> float:
    """Return the largest difference between the gradients of a loss of one's own, and its value, here and in one."""
    results = []
    for model in (shard(build()), build()):
        loss = torch.zeros((), dtype=torch.float64) + penalty(model).penalty()
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
        results.append(torch.cat([loss.detach().flatten(), *(gradient.flatten() for gradient in whole)]))
    return (results[0] - results[1]).abs().max().item()


def matched() -> float:
    expected, model = build(), shard(build())
    norms = {name: 1.5 + index for index, name in enumerate(fz.NormMatcher(expected).record())}
    for twin in (expected, model):
        fz.NormMatcher(twin).match(norms)
    return largest_difference(model, expected)


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def evaluated() -> nn.Module:
    """Return a sharded model whose parameters FSDP2 has gathered and not yet let go of."""
    model = fully_shard(build()).eval()
    with torch.no_grad():
        model(torch.zeros(2, 6, dtype=torch.int64))
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return model


def load_into_shards() -> None:
    folder = Path(sys.argv[2]).with_name(f"saved-{dist.get_rank()}")
    fz.save(nn.Sequential(fz.FactorizedLinear(6, 4, 2), nn.Linear(4, 4)), folder)
    fz.load(folder, nn.Sequential(nn.Linear(6, 4), fully_shard(nn.Linear(4, 4))))


def partly_sharded() -> None:
    model = nn.Sequential(fz.FactorizedLinear(6, 4, 2))
    fully_shard(model, ignored_params={model[0].U})
    fz.FrobeniusDecay(model, 0.1)


def by_columns() -> float:
    """Return how far LAMB with weights sharded by columns ends from one process."""
    results = []
    for sharded in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(6, 4).double()
        if sharded:
            fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else Shard(0))
        optimizer = fz.Lamb(model.parameters(), lr=0.1)
        model(torch.ones(2, 6, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
        weight = model.weight.detach()
        results.append(weight.full_tensor() if isinstance(weight, DTensor) else weight)
    return (results[0] - results[1]).abs().max().item()


def mixed_precision() -> float:
    model = shard(build(torch.float32), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    expected = build(torch.float32)
    train(model, penalized(PENALTIES["frobenius"])(model), own_share())
    train(expected, penalized(PENALTIES["frobenius"])(expected), slice(None))
    return largest_difference(model, expected)


def odd() -> dict[str, Any]:
    frozen = ("wide.U", "deep.V", "deep.inner", "grouped.U", "narrow")
    result: dict[str, Any] = {f"trained {name}": difference(make) for name, make in OPTIMIZERS.items()}
    result |= {f"frozen {name}": difference(make, frozen) for name, make in OPTIMIZERS.items()}
    result |= {f"trained {name}": difference(penalized(penalty)) for name, penalty in PENALTIES.items()}
    result |= {f"in the loss {name}": penalty_in_the_loss(penalty) for name, penalty in PENALTIES.items()}
    rates = [
        [group["weight_decay"] for group in fz.parameter_groups(m, 0.1, crs=True)] for m in (shard(build()), build())
    ]
    dense = fz.compose(build()).state_dict()
    return result | {
        "half": added_gradients(half),
        "mixed types": added_gradients(mixed),
        "mixed precision": mixed_precision(),
        "matched": matched(),
        "by columns": by_columns(),
        "diagnosed alike": fz.diagnose(shard(build()), 0.1) == fz.diagnose(build(), 0.1),
        "scaled alike": rates[0] == rates[1],
        "set weight": refused(lambda: shard(build()).wide.reset_parameters("spectral")),
        "load dense": refused(lambda: fz.load_dense(shard(build()), dense)),
        "load": refused(load_into_shards),
        "compose": refused(lambda: fz.compose(shard(build()))),
        "lower": refused(lambda: fz.lower(shard(build()))),
        "load dense after an evaluation": refused(lambda: fz.load_dense(evaluated(), dense)),
        "truncate after an evaluation": refused(lambda: fz.truncate(evaluated(), rank=1)),
        "compose after an evaluation": refused(lambda: fz.compose(evaluated())),
        "partly sharded": refused(partly_sharded),
    }


def main() -> None:
    dist.init_process_group("gloo")
    result = odd()
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps({sys.argv[1]: result}))
    leave_process_group()


if __name__ == "__main__":
    main()
