"""FSDP2 for text: networks whose parameters are split over processes, with the checkpoints of one process.

torch's ``fully_shard`` is called here because accelerate's FSDP2 does not fit: it ignores CPUs, does not see that
factors are tied, and gives the optimizer other parameters after the decay was attached to it.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from factorized.surgery.state import distinct_tensors, gathered, plain_state

SHARDS = Version("5.22")  # 5.17 lacks what TextTrainer sets; those between were not tried


def shard(model: Any, device: torch.device) -> None:
    """Split a transformers model over all processes, the parameters of each layer together, and move it to ``device``.

    A layer's parameters are gathered while it runs. All that belongs to no layer, such as embeddings and what is tied
    to them, is gathered for as long as the model runs.
    """
    if Version(transformers.__version__) < SHARDS:
        raise ValueError(
            f"run.shard = true needs transformers {SHARDS} or newer, whose Trainer leaves a split network alone, got "
            f"{transformers.__version__}; pip install -U transformers"
        )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # BERT's logits are a view, which no loss here changes in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    if model.can_generate():
        register_fsdp_forward_method(model, "generate")  # which calls the encoder of a translator by itself


def _layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers of a transformer: what its outermost lists of modules hold."""
    children = list(module.children())
    if isinstance(module, nn.ModuleList):
        return children
    return [layer for child in children for layer in _layers(child)]


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a sharded model in the first process, nothing in the others; all have to call this."""
    tensors, aliases = distinct_tensors(plain_state(model))
    first = dist.get_rank() == 0
    whole = {name: value.cpu() for name, value in zip(tensors, gathered(tensors), strict=True) if first}
    return whole | {alias: whole[name] for alias, name in aliases.items() if first}


def whole_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state dict of an optimizer with every tensor gathered; all processes have to call this."""
    state = optimizer.state_dict()
    return {**state, "state": {index: _whole(held) for index, held in state["state"].items()}}


def _whole(held: dict[str, Any]) -> dict[str, Any]:
    return {name: value.full_tensor().cpu() if isinstance(value, DTensor) else value for name, value in held.items()}


def split_when_loaded(optimizer: Optimizer) -> None:
    """Make ``optimizer.load_state_dict`` accept what ``whole_state`` returned, and split it as the parameters are."""
    optimizer.register_load_state_dict_pre_hook(_split)


def _split(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    split = {
        index: {name: _like(parameters[index], value) for name, value in held.items()}
        for index, held in state["state"].items()
    }
    return {**state, "state": split}


def _like(parameter: nn.Parameter, value: Any) -> Any:
    """Return a tensor of the parameter's shape split as the parameter is; anything else as it is."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    # every process has the whole tensor and keeps its part
    return distribute_tensor(
        value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )
