"""State dicts: reading them without wrappers, telling shared tensors apart, and saying how two of them differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from factorized.layers.swap import COMPILED

Shapes = dict[str, tuple[int, ...]]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside ``torch.compile`` and data-parallel wrappers."""
    while True:
        if COMPILED in model._modules:
            model = model.get_submodule(COMPILED)
        elif isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        else:
            return model


def plain_name(name: str) -> str:
    """Return a dotted name without the parts that ``torch.compile`` puts in."""
    return ".".join(part for part in name.split(".") if part != COMPILED)


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of ``model`` under plain names; shards are gathered, so all ranks must call this."""
    state = {plain_name(key): _whole(value) for key, value in model.state_dict().items()}
    odd = [key for key, value in state.items() if not isinstance(value, Tensor)]
    if odd:
        raise ValueError(f"{odd[0]} is {type(state[odd[0]]).__name__}; a checkpoint without pickle holds tensors only")
    return state


def is_sharded(model: nn.Module) -> bool:
    """Say whether any parameter of ``model`` is spread over processes."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def distinct_tensors(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return every tensor once, contiguous and with storage of its own, and which names are aliases of which."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    storages: set[int] = set()
    for key, tensor in state.items():
        if tensor.is_meta:
            raise ValueError(f"{key} is on the meta device and has no values to save")
        storage = tensor.untyped_storage().data_ptr()
        identity = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and identity in first:
            aliases[key] = first[identity]
            continue
        first[identity] = key
        whole = tensor.contiguous()
        tensors[key] = whole.clone() if storage in storages else whole
        storages.add(storage)
    return tensors, aliases


def check_same(what: str, expected: Shapes, found: Shapes, optional: Iterable[str] = ()) -> None:
    """Raise unless ``found`` has the expected names and shapes; say what is missing, unexpected or different."""
    missing = sorted(expected.keys() - found.keys() - set(optional))
    surplus = sorted(found.keys() - expected.keys())
    shapes = [
        f"{key} is {_times(found[key])}, expected {_times(expected[key])}"
        for key in sorted(expected.keys() & found.keys())
        if expected[key] != found[key]
    ]
    differences = [
        *(f"missing {', '.join(missing[:3])}{_more(missing)}" for _ in missing[:1]),
        *(f"unexpected {', '.join(surplus[:3])}{_more(surplus)}" for _ in surplus[:1]),
        *(f"{'; '.join(shapes[:3])}{_more(shapes)}" for _ in shapes[:1]),
    ]
    if differences:
        raise ValueError(f"{what} does not fit the model: {'; '.join(differences)}. Nothing was changed")


def named_slots(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield (plain name, module, attribute, tensor) of every parameter and saved buffer, shared ones each time."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and attribute not in module._non_persistent_buffers_set:
                yield plain_name(f"{prefix}.{attribute}" if prefix else attribute), module, attribute, tensor


@torch.no_grad()
def fill(
    model: nn.Module, tensors: Mapping[str, Tensor], device: torch.device | str, dtype: torch.dtype | None
) -> None:
    """Copy ``tensors`` into ``model``; what is on the meta device becomes real on ``device``, shared ones once."""
    made: dict[Tensor, Tensor] = {}
    for name, module, attribute, slot in list(named_slots(model)):
        if not slot.is_meta:
            slot.copy_(tensors[name])
            continue
        if slot not in made:
            target = dtype if dtype is not None and slot.is_floating_point() else slot.dtype
            value = tensors[name].to(device=device, dtype=target, copy=True)  # names may share one tensor of the file
            made[slot] = nn.Parameter(value, slot.requires_grad) if isinstance(slot, nn.Parameter) else value
        setattr(module, attribute, made[slot])


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _times(extents: tuple[int, ...]) -> str:
    return "x".join(map(str, extents)) or "a scalar"


def _more(names: list[str]) -> str:
    return f" and {len(names) - 3} more" if len(names) > 3 else ""
