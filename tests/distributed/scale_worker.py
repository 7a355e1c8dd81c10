"""Run by torchrun in two or four processes: counts what a training step of a small transformer sends.

torchrun --nproc-per-node 4 tests/distributed/scale_worker.py WAY-VARIANT,WAY-VARIANT OUT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, PrepareModuleInput, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import factorized as fz
from benchmarks.counting import split_of
from factorized._torch import leave_process_group

HIDDEN, VOCABULARY, BATCH, LENGTH = 192, 1024, 4, 64
TP = 2


class Attention(nn.Module):
    """Attention that takes the number of heads and of tokens from what its projections give."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, HIDDEN // 4)).mT for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj((q + k + v).mT.flatten(2))  # what heads compute is all the same to collectives


class Block(nn.Module):
    """A block without norms."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp = nn.ModuleDict({"up_proj": nn.Linear(HIDDEN, 480), "down_proj": nn.Linear(480, HIDDEN, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(x)
        return x + self.mlp["down_proj"](F.silu(self.mlp["up_proj"](x)))


class Decoder(nn.Module):
    """A decoder whose tokens may be split outside of its layers, which transformers' attention does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.config = LlamaConfig(hidden_size=HIDDEN, intermediate_size=480, num_attention_heads=4)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        length = input_ids.shape[1] // dist.get_world_size()
        x = torch.randn(len(input_ids), length, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        for block in self.layers:
            x = block(x)
        return x


def build(variant: str) -> nn.Module:
    """Return a small Llama ("dense", "low"), BERT ("lamb", "flambe") or decoder for split tokens ("dense_split")."""
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY}
    model: nn.Module
    if variant.startswith(("dense", "low")):
        is_split = variant.endswith("_split")
        model = Decoder() if is_split else LlamaForCausalLM(LlamaConfig(intermediate_size=480, **sizes))
        if variant.startswith("dense"):
            return model
        return fz.factorize(model, rank=40, include=["layers" if is_split else "model.layers"], init="default")
    model = BertForMaskedLM(BertConfig(intermediate_size=768, tie_word_embeddings=False, **sizes))
    model.cls.predictions.bias = model.cls.predictions.decoder.bias  # which DDP would wait for
    if variant == "lamb":
        return model
    return fz.factorize(model, rank_scale=0.5, attention="heads", include=["*attention"], init="default")


def optimizer_of(variant: str, model: nn.Module) -> torch.optim.Optimizer:
    groups = fz.parameter_groups(model, 0.01)
    if variant == "flambe":
        return fz.Flambe(groups, model, lr=1e-3, frobenius_decay={"ov": 0.01})
    if variant == "lamb":
        return fz.Lamb(groups, lr=1e-3)
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    if variant.startswith("low"):
        fz.decoupled_frobenius(optimizer, model, 0.01)
    return optimizer


def styles(model: nn.Module, variant: str) -> dict[str, ParallelStyle]:
    """Return the parallelize plan of a model."""
    outside = Shard(1) if variant.endswith("_split") else Replicate()  # of the layers
    plan: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        split = split_of(name)
        if isinstance(module, nn.Embedding) and split:
            plan[name] = fz.RowwiseParallel(input_layouts=Replicate())
        elif split == "rows":
            plan[name] = fz.RowwiseParallel(output_layouts=outside)
        elif split == "columns":
            is_gathered = variant == "dense_sums_split" and "self_attn" in name
            plan[name] = fz.ColwiseParallel(input_layouts=Replicate() if is_gathered else outside)
        elif name.endswith("self_attn") and variant == "dense_sums_split":  # q, k and v have one input, gathered once
            plan[name] = PrepareModuleInput(input_layouts=outside, desired_input_layouts=Replicate())
        elif name.endswith("self_attn") and variant == "dense_sums":
            whole = {"hidden_states": Replicate()}
            plan[name] = PrepareModuleInput(input_kwarg_layouts=whole, desired_input_kwarg_layouts=whole)
        elif name.endswith("mlp") and variant == "dense_sums":
            plan[name] = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    return plan


def distribute(model: nn.Module, way: str, variant: str) -> nn.Module:
    """Return the model for DDP ("ddp"), FSDP2 ("fsdp"), tensor parallelism ("tp") or the last two ("both")."""
    world = dist.get_world_size()
    if way == "ddp":
        return DistributedDataParallel(model, broadcast_buffers=False)
    tp = {"fsdp": 1, "tp": world, "both": TP}[way]
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
    if way != "fsdp":
        parallelize_module(model, mesh["tp"], styles(model, variant))
    if way != "tp":
        kept = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        blocks = model.model.layers if hasattr(model, "model") else model.bert.encoder.layer
        for block in blocks:
            fully_shard(block, mesh=mesh["dp"], mp_policy=kept)
        fully_shard(model, mesh=mesh["dp"], mp_policy=kept)
    return model.to(torch.bfloat16) if way == "tp" else model


class Given(TorchDispatchMode):
    """Counts what collectives are given, by their kind; of what is gathered or scattered, the whole tensor's bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = {"gathered": 0, "scattered": 0, "summed": 0}

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its collectives are seen when it makes them
        if op.namespace in ("c10d", "_c10d_functional"):
            kinds = {"gather": "gathered", "scatter": "scattered", "reduce": "summed"}
            kind = next((kinds[word] for word in ("gather", "scatter", "reduce") if word in op._opname), None)
            tensors = [t.numel() * t.element_size() for t in tree_leaves(args) if isinstance(t, Tensor)]
            if kind == "summed":
                self.bytes[kind] += sum(tensors)
            elif kind and len(tensors) > 1:
                self.bytes[kind] += sum(tensors) - min(tensors)  # the smallest is this rank's part
            elif kind:
                self.bytes[kind] += tensors[0] * (args[1] if kind == "gathered" else 1)
        return op(*args, **(kwargs or {}))


def written() -> int:
    """Return the bytes that this process has written so far, to sockets and files."""
    return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    words = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    optimizer.zero_grad()
    found = model(input_ids=words)
    (found if isinstance(found, Tensor) else found.logits).float().square().mean().backward()
    optimizer.step()


def measure(scenario: str) -> dict[str, float]:
    """Take one step, then count a second one."""
    way, variant = scenario.split("-")
    model = distribute(build(variant), way, variant)
    optimizer = optimizer_of(variant, model)
    step(model, optimizer)
    dist.barrier()
    before = written()
    with Given() as given:
        step(model, optimizer)
    return {**given.bytes, "written": written() - before}


def main() -> None:
    out = Path(sys.argv[2])
    dist.init_process_group("gloo")
    result = {scenario: measure(scenario) for scenario in sys.argv[1].split(",")}
    if dist.get_rank() == 0:
        out.write_text(json.dumps(result))
    leave_process_group()


if __name__ == "__main__":
    main()
