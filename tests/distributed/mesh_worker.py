"""Run by torchrun in four processes, or two: tensor parallelism, FSDP2 and both, against one process.

torchrun --nproc-per-node 4 tests/distributed/mesh_worker.py SCENARIO,SCENARIO OUT.json
"""

from __future__ import annotations

import itertools
import json
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel import style as torch_style
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import factorized as fz
from factorized._torch import leave_process_group
from tests.distributed import placements_worker
from tests.distributed.worker import OPTIMIZERS, CountBytes, largest_difference, whole_state

STEPS = 3
WIDTH, HEADS, WORDS, RANK = 16, 4, 11, 3


class Conv1D(nn.Module):
    """A linear that keeps its weight transposed, as GPT-2's does."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(inputs, outputs)), nn.Parameter(torch.empty(outputs))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Attention(nn.Module):
    """Attention that splits as many heads as its projections give."""

    def __init__(self) -> None:
        super().__init__()
        # A bias of the keys has no gradient but rounding, which LAMB would make a step of.
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=name != "k") for name in "qkvo")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Net(nn.Module):
    """A small transformer: tied embedding and head, attention, an MLP with an inner matrix, a linear not split."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=1)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.whole = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        x = x + self.attention(x)
        x = x + self.down(F.gelu(self.up(x)))
        return self.head(self.whole(self.norm(x)))


def build() -> nn.Module:
    torch.manual_seed(0)
    model = Net().double()
    model = fz.factorize(model, fz.Overcomplete("deep"), include=["up"], init="spectral")
    return fz.factorize(model, rank=RANK, include=["embed", "attention.*", "down", "whole", "head"])


def plan() -> dict[str, torch_style.ParallelStyle]:
    """Return the parallelize plan of ``Net``."""
    columns = {name: fz.ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "up")}
    rows = {name: fz.RowwiseParallel() for name in ("attention.o", "down")}
    embed = fz.RowwiseParallel(input_layouts=Replicate())
    return {"embed": embed, **columns, **rows, "head": fz.ColwiseParallel(output_layouts=Replicate())}


def split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Give a model the kind of parallelism that the mesh's dimensions are named after."""
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        parallelize_module(model, mesh["tp"], plan())
    if "dp" in names:
        for child in (model.attention, model.up, model.down):
            fully_shard(child, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def meshes() -> dict[str, DeviceMesh]:
    world = dist.get_world_size()
    return {
        "tp": init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)),
        "fsdp": init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)),
        "both": init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp")),
    }


def batch(step: int, mesh: DeviceMesh | None) -> tuple[Tensor, Tensor]:
    """Return the words of a step, or the share of them that this process has along "dp"."""
    generator = torch.Generator().manual_seed(step)
    words, classes = (torch.randint(0, WORDS, (8, 5), generator=generator) for _ in range(2))
    if mesh is None or "dp" not in (mesh.mesh_dim_names or ()):
        return words, classes
    share = mesh["dp"].size()
    return words.chunk(share)[mesh.get_local_rank("dp")], classes.chunk(share)[mesh.get_local_rank("dp")]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh | None, steps: range) -> None:
    for step in steps:
        words, classes = batch(step, mesh)
        optimizer.zero_grad()
        F.cross_entropy(model(words).flatten(0, 1), classes.flatten()).backward()
        optimizer.step()


def trained(kind: str, optimizer: str) -> dict[str, Any]:
    """Train in all processes and in one; compare parameters, penalty and diagnosis."""
    mesh = meshes()[kind]
    expected, model = build(), split(build(), mesh)
    train(expected, OPTIMIZERS[optimizer](expected), None, range(STEPS))
    train(model, OPTIMIZERS[optimizer](model), mesh, range(STEPS))
    rows = [fz.diagnose(each, lr=0.1) for each in (model, expected)]
    penalties = [fz.FrobeniusDecay(each, 0.3).penalty() for each in (model, expected)]
    return {
        "difference": largest_difference(model, expected),
        "tied": model.head.U is model.embed.U and model.head.V is model.embed.V,
        "diagnosis": max(
            abs(a.nuclear - b.nuclear) + abs(a.frobenius - b.frobenius) for a, b in zip(*rows, strict=True)
        ),
        "penalty": (penalties[0] - penalties[1]).abs().item(),
    }


def sequence(folder: Path) -> dict[str, float]:
    """Compare an MLP whose tokens are split outside of it, and a transposed one, with one process."""
    mesh, result = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)), {}
    for dense_type in (nn.Linear, Conv1D):
        torch.manual_seed(0)
        up, down = (
            fz.FactorizedLinear(a, b, RANK, depth=depth, dense_type=dense_type)
            for a, b, depth in ((WIDTH, 10, 0), (10, WIDTH, 1))  # 10 rows are not as many for every rank
        )
        expected = nn.Sequential(up, nn.Tanh(), down).double()
        model = deepcopy(expected)
        x = torch.randn(3, 8, WIDTH, dtype=torch.double, requires_grad=True)
        own = x.detach().chunk(mesh.size(), 1)[mesh.get_local_rank()].requires_grad_()
        tokens = Shard(1)
        styles = {"0": fz.ColwiseParallel(input_layouts=tokens), "2": fz.RowwiseParallel(output_layouts=tokens)}
        parallelize_module(model, mesh, styles)
        wanted, found = expected(x), model(own)
        wanted.square().sum().backward()
        found.square().sum().backward()
        pairs = list(zip(model.parameters(), expected.parameters(), strict=True))
        errors = [(whole(a.grad) - b.grad).abs().max().item() for a, b in pairs]
        for mine, all_tokens in ((found, wanted), (own.grad, x.grad)):
            errors.append((mine - all_tokens.chunk(mesh.size(), 1)[mesh.get_local_rank()]).abs().max().item())
        result[dense_type.__name__] = max(errors)
    part = parallelize_module(
        deepcopy(up), mesh, fz.ColwiseParallel(input_layouts=Partial(), output_layouts=Replicate())
    )
    found = part(x.detach() / mesh.size())
    found.square().sum().backward()
    up.zero_grad()
    up(x).square().sum().backward()
    errors = [
        (whole(a.grad) - b.grad).abs().max().item() for a, b in zip(part.parameters(), up.parameters(), strict=True)
    ]
    result["partial sums"] = max(errors)
    return result


def traffic(folder: Path) -> dict[str, float]:
    """Count the numbers a token that collectives are given in an MLP, dense and factorized, forward and backward."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    x, result = torch.randn(4, 8, WIDTH, requires_grad=True), {}
    for name in ("dense", "factorized"):
        model = nn.ModuleDict({"up": nn.Linear(WIDTH, 24), "down": nn.Linear(24, WIDTH)})
        if name == "factorized":
            model = fz.factorize(model, rank=RANK, include=["up", "down"])
        parallelize_module(model, mesh, {"up": fz.ColwiseParallel(), "down": fz.RowwiseParallel()})
        with CountBytes() as forward:
            y = model["down"](model["up"](x))
        with CountBytes() as backward:
            y.sum().backward()
        result[f"{name} forward"], result[f"{name} backward"] = (n.total / 4 / 32 for n in (forward, backward))
    return result


def decayed(folder: Path) -> dict[str, float]:
    """Count the bytes of one decay; of Gram matrices, once for every mesh dimension that splits; and of inner ones."""
    model = split(build(), meshes()["both"])
    decay = fz.FrobeniusDecay(model, 0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with CountBytes() as counter:
        decay.apply_()
    ends = [end.parameter for form in decay.forms for end in (form.left, form.right)]
    grams = sum(end.shape[-1] ** 2 * sum(not p.is_replicate() for p in end.placements) for end in ends)
    inner = sum(factor.parameter.to_local().numel() for form in decay.forms for factor in form.middle)
    placements = {str(end.placements) for end in ends}
    return {"bytes": counter.total, "counted": 8 * (grams + inner), "placements": sorted(placements)}


Placements = tuple[Placement, Placement]
# FSDP2 over tensor parallelism of the same dimension splits what that has split; the others are made by torch alone.
TWICE: Placements = (_StridedShard(0, split_factor=2), Shard(0))
SQUARE: list[Placements] = [TWICE, (Shard(0), Replicate()), (Shard(0), Shard(0)), (Shard(0), Shard(1))]


def distribute(tensor: Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    if placements != TWICE:
        return distribute_tensor(tensor, mesh, placements)
    rows = tensor
    for axis in (1, 0):
        parts = [*rows.chunk(mesh.size(axis)), *[rows[:0]] * mesh.size(axis)]  # few rows make fewer chunks
        rows = parts[mesh.get_local_rank(axis)]
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def mixes(folder: Path) -> dict[str, float]:
    """Return the largest difference of every action over mixes of placements on a mesh of two dimensions."""
    mesh, result = meshes()["both"], {}
    for name in ("pair", "groups", "deep", "attention"):
        count = len(list(placements_worker.build(name).parameters()))
        cases = list(itertools.product(SQUARE, repeat=2)) if count == 2 else [[each] * count for each in SQUARE]
        for act in placements_worker.ACTIONS:
            worst = 0.0
            for chosen in cases:
                model, expected = placements_worker.build(name), placements_worker.build(name)
                for (path, parameter), placements in zip(list(model.named_parameters()), chosen, strict=True):
                    holder, _, last = path.rpartition(".")
                    placed = nn.Parameter(distribute(parameter.detach(), mesh, placements))
                    placed.grad = distribute(parameter.grad, mesh, placements)
                    model.get_submodule(holder)._parameters[last] = placed
                act(model)
                act(expected)
                for own, wanted in zip(model.parameters(), expected.parameters(), strict=True):
                    for a, b in ((own.detach(), wanted.detach()), (own.grad, wanted.grad)):
                        worst = max(worst, (whole(a) - b).abs().max().item())
            result[f"{name} {act.__name__}"] = worst
    return result


def save(folder: Path) -> dict[str, Any]:
    """Train on both dimensions, save by DCP and by ``fz.save``, then load into every other mesh of these processes."""
    mesh = meshes()["both"]
    model = split(build(), mesh)
    optimizer = OPTIMIZERS["adamw"](model)
    train(model, optimizer, mesh, range(STEPS))
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / "dcp")
    fz.save(model, folder / "saved")
    state = {name: tensor.clone() for name, tensor in whole_state(model).items()}
    if dist.get_rank() == 0:
        torch.save(state, folder / "state.pt")
    dist.barrier()
    return {"loaded": loaded(folder)}


def loaded(folder: Path) -> dict[str, dict[str, float]]:
    """Load what was saved into every mesh of these processes, and take one more step."""
    expected: dict[str, Tensor] = torch.load(folder / "state.pt")
    result: dict[str, dict[str, float]] = {}
    after: dict[str, Tensor] = {}
    for kind, mesh in {"one": None, **meshes()}.items():
        torch.manual_seed(1)
        model = build() if mesh is None else split(build(), mesh)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        optimizer = OPTIMIZERS["adamw"](model)
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder / "dcp")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        state = whole_state(model)
        differences = {name: (state[name] - value).abs().max().item() for name, value in expected.items()}
        train(model, optimizer, mesh, range(STEPS, STEPS + 1))
        after = after or {name: tensor.clone() for name, tensor in whole_state(model).items()}
        then = max((tensor - after[name]).abs().max().item() for name, tensor in whole_state(model).items())
        result[kind] = {"difference": max(differences.values()), "one step later": then}
    torch.manual_seed(1)
    model = split(fz.load(folder / "saved", Net().double()), meshes()["both"])
    state = whole_state(model)
    result["fz.load"] = {"difference": max((state[n] - v).abs().max().item() for n, v in expected.items())}
    return result


def build_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=50, num_attention_heads=4, num_key_value_heads=2, **sizes)
    return LlamaForCausalLM(config).double()


def llama_plan() -> dict[str, torch_style.ParallelStyle]:
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    styles: dict[str, torch_style.ParallelStyle] = {"lm_head": fz.ColwiseParallel(output_layouts=Replicate())}
    styles |= {f"model.layers.*.{name}": fz.ColwiseParallel() for name in columns}
    return styles | {f"model.layers.*.{name}": fz.RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}


def heads(folder: Path) -> dict[str, float]:
    """Compare the decay of dense attention whose heads are split, by FSDP2 too, with one process; count its bytes."""
    result: dict[str, float] = {}
    for kind in ("tp", "both"):
        model, expected = build_llama(), build_llama()
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], llama_plan())
        if kind == "both":
            fully_shard(model, mesh=mesh["dp"])
        decays = [fz.FrobeniusDecay(each, {"ov": 0.3, "*.qk": 0.2}) for each in (model, expected)]
        for parameter in (*model.parameters(), *expected.parameters()):
            parameter.grad = torch.zeros_like(parameter)
        decays[1].apply_()
        with CountBytes() as counter:
            decays[0].apply_()
        pairs = zip(model.parameters(), expected.parameters(), strict=True)
        result[kind] = max((whole(own.grad) - other.grad).abs().max().item() for own, other in pairs)
        result[f"{kind} bytes"] = counter.total
        result["size"] = max(other.grad.abs().max().item() for other in expected.parameters())
    return result


def llama(folder: Path) -> dict[str, float]:
    """Compare a small Llama, split as its users would, with the whole one: scores, gradients and generated words."""
    expected = build_llama()
    for name, module in list(expected.named_modules()):
        holder, _, last = name.rpartition(".")
        if isinstance(module, nn.Linear) and "layers" in name:
            setattr(expected.get_submodule(holder), last, fz.FactorizedLinear.from_dense(module, 6))
    model = deepcopy(expected)
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), llama_plan())
    words = torch.randint(0, 50, (2, 7))
    found, wanted = (each(input_ids=words, labels=words) for each in (model, expected))
    found.loss.backward()
    wanted.loss.backward()
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    written = [each.eval().generate(words, max_new_tokens=4, do_sample=False) for each in (model, expected)]
    return {
        "scores": (found.logits - wanted.logits).abs().max().item(),
        "gradients": max((whole(own.grad) - other.grad).abs().max().item() for own, other in pairs),
        "words": (written[0] - written[1]).abs().max().item(),
        "split": len({type(module) for module in model.modules()} - {type(module) for module in expected.modules()}),
    }


def main() -> None:
    scenarios, out = sys.argv[1].split(","), Path(sys.argv[2])
    dist.init_process_group("gloo")
    others = {
        "sequence": sequence,
        "traffic": traffic,
        "decayed": decayed,
        "mixes": mixes,
        "save": save,
        "load": loaded,
        "llama": llama,
        "heads": heads,
    }
    result = {}
    for scenario in scenarios:
        result[scenario] = others[scenario](out.parent) if scenario in others else trained(*scenario.split("-"))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(result))
    leave_process_group()


if __name__ == "__main__":
    main()
