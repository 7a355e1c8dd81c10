"""Run by torchrun in two processes: attention of several families, replicated or sharded, against one process.

torchrun --nproc-per-node 2 tests/distributed/attention_worker.py attention OUT.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import factorized as fz
from factorized._torch import leave_process_group
from tests.attention.attention_zoo import GPT2, LLAMA, VOCABULARY
from tests.distributed.worker import OPTIMIZERS, STEPS, CountBytes, largest_difference


class Reader(nn.Module):
    """Torch's attention, packed (nine heads' parts over two shards do not divide) and shrunk, over an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 24)
        self.packed = nn.MultiheadAttention(24, 3, batch_first=True)
        self.shrunk = nn.MultiheadAttention(24, 3, batch_first=True)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.packed(x, x, x, need_weights=False)[0]
        return self.head(x + self.shrunk(x, x, x, need_weights=False)[0])


def reader() -> nn.Module:
    model = Reader().double()
    model.shrunk = fz.factorize_attention(model.shrunk, {"qk": 0.5, "ov": 0.375})
    return model


def llama() -> nn.Module:
    model = fz.factorize_attention(LLAMA.make(), 0.625, forms=("ov",))
    return model.train()


def gpt2() -> nn.Module:
    model = GPT2.make()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


MODELS: dict[str, Callable[[], nn.Module]] = {"torch": reader, "llama": llama, "gpt2": gpt2}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def loss(model: nn.Module, step: int, rank: int, world: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(3, VOCABULARY, (4, 6), generator=generator)
    own = tokens[rank * 4 // world : (rank + 1) * 4 // world]
    out = model(own)
    logits = out if isinstance(out, Tensor) else out.logits
    return F.cross_entropy(logits.flatten(0, 1), own.flip(1).flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world: int) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, step, rank, world).backward()
        optimizer.step()


def shard(model: nn.Module) -> nn.Module:
    blocks = {"Reader": ["packed", "shrunk"], "GPT2LMHeadModel": ["transformer.h.0"]}
    for name in blocks.get(type(model).__name__, ["model.layers.0"]):
        fully_shard(model.get_submodule(name))
    fully_shard(model)
    return model


def compare() -> dict[str, dict[str, float]]:
    """Return the largest difference to one process of every model and optimizer, replicated and sharded."""
    rank, world = dist.get_rank(), dist.get_world_size()
    result: dict[str, dict[str, float]] = {"ddp": {}, "fsdp": {}}
    for name in MODELS:
        for optimizer, make in OPTIMIZERS.items():
            expected, replica, shards = build(name), build(name), shard(build(name))
            train(expected, make(expected), 0, 1)
            made = make(replica)
            train(DistributedDataParallel(replica), made, rank, world)
            train(shards, make(shards), rank, world)
            result["ddp"][f"{name} {optimizer}"] = largest_difference(replica, expected)
            result["fsdp"][f"{name} {optimizer}"] = largest_difference(shards, expected)
    return result


def count() -> dict[str, float]:
    """Count what the decay of a sharded GPT-2 sends: its values' Gram matrices, and its outputs, which are gathered."""
    model = shard(build("gpt2"))
    decay = fz.FrobeniusDecay(model, 0.1)
    loss(model, 0, dist.get_rank(), dist.get_world_size()).backward()
    with CountBytes() as counter:
        decay.apply_()
    grams = sum(3 * 8 * 8 for form in decay.forms if form.kind == "ov")
    outputs = sum(form.right.parameter.to_local().numel() for form in decay.forms if form.kind == "ov")
    try:
        fz.factorize_attention(model)
        refused = 0
    except ValueError as error:
        refused = int("before fully_shard" in str(error))
    penalty, whole = decay.penalty().item(), fz.FrobeniusDecay(build("gpt2"), 0.1).penalty().item()
    return {
        "bytes": counter.total,
        "allowed": 8 * (grams + outputs),
        "penalty": abs(penalty - whole),
        "refused": refused,
    }


def halves() -> dict[str, float]:
    """Decay sharded float16 weights whose Gram matrices are beyond that type; report the error of the gradients."""
    result = {}
    for name in ("torch", "llama"):
        one, two = (build(name) for _ in range(2))
        with torch.no_grad():
            for parameter in (*one.parameters(), *two.parameters()):
                parameter *= 250 / parameter.abs().max()
        one, two = one.half(), shard(two.half())
        for model in (one, two):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            fz.FrobeniusDecay(model, {"ov": 1e-7}).apply_()
        expected = {key: parameter.grad.float() for key, parameter in one.named_parameters()}
        largest = max(gradient.abs().max().item() for gradient in expected.values())
        differences = [
            (parameter.grad.full_tensor().float() - expected[key]).abs().max().item()
            for key, parameter in two.named_parameters()
        ]
        result[name] = max(differences) / largest
    return result


def main() -> None:
    out = Path(sys.argv[2])
    dist.init_process_group("gloo")
    result = {**compare(), "sharded gpt2": count(), "halves": halves()}
    if dist.get_rank() == 0:
        out.write_text(json.dumps(result))
    leave_process_group()


if __name__ == "__main__":
    main()
