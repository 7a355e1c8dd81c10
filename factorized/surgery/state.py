"""State dicts: reading them without wrappers, finding shared tensors, and comparing two of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from factorized.nn.model import dotted, listed
from factorized.surgery.replace import COMPILED

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
    """Return the state dict of ``model`` under plain names, with its actual parameters; shards stay shards."""
    state = {plain_name(key): value for key, value in model.state_dict(keep_vars=True).items()}
    odd = [key for key, value in state.items() if not isinstance(value, Tensor)]
    if odd:
        raise ValueError(f"{odd[0]} is {type(state[odd[0]]).__name__}; a checkpoint without pickle holds tensors only")
    sparse = [key for key, value in state.items() if value.layout != torch.strided]
    if sparse:
        raise ValueError(
            f"{sparse[0]} is sparse ({state[sparse[0]].layout}), and a file holds dense tensors only; make it dense, "
            "or register it with persistent=False"
        )
    return state


def is_sharded(model: nn.Module) -> bool:
    """Return whether any parameter of ``model`` is spread over processes.

    One that FSDP2 has gathered, as the root's after an evaluation, counts too: its changes are undone.
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return True
    from torch.distributed.fsdp import FSDPModule  # takes a while

    return any(isinstance(module, FSDPModule) for module in model.modules())


def distinct_tensors(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return every tensor once, and the names that are aliases of others."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[object, str] = {}
    for key, tensor in state.items():
        if is_lazy(tensor):
            raise ValueError(f"{key} is not initialized yet and has no values to save; run the model once first")
        if tensor.is_meta:
            raise ValueError(f"{key} is on the meta device and has no values to save; load the weights first")
        identity = _identity(tensor)
        if identity in first:
            aliases[key] = first[identity]
        else:
            first[identity] = key
            tensors[key] = tensor
    return tensors, aliases


def gathered(tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield ``tensors`` one at a time, each whole; if they are sharded, every rank must iterate over all."""
    for tensor in tensors.values():
        with torch.no_grad():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        yield whole
        del whole  # before the next one is gathered


def check_finite(model: nn.Module, remedy: str) -> None:
    """Raise if a parameter of ``model`` is not finite; all ranks of a sharded model raise together.

    Buffers may hold infinities, as masks do, but no NaN; the running statistics of normalization must be finite.
    """
    wrong = [text for slot in named_slots(model) if (text := _not_finite(*slot)) is not None]
    if is_sharded(model):  # a rank sees only its own shards
        found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, wrong)
        wrong = list(dict.fromkeys(text for texts in found for text in texts))
    if wrong:
        more = f" ({len(wrong) - 1} more tensors are not finite)" if len(wrong) > 1 else ""
        raise ValueError(f"{wrong[0]}{more}; {remedy}")


def check_same(what: str, expected: Shapes, found: Shapes, optional: Iterable[str] = ()) -> None:
    """Raise unless ``found`` has the expected names and shapes, with what is missing, unexpected or different."""
    missing = sorted(expected.keys() - found.keys() - set(optional))
    surplus = sorted(found.keys() - expected.keys())
    shapes = [
        f"{key} is {_times(found[key])}, expected {_times(expected[key])}"
        for key in sorted(expected.keys() & found.keys())
        if expected[key] != found[key]
    ]
    differences = [
        *([f"missing {listed(missing, 3)}"] if missing else []),
        *([f"unexpected {listed(surplus, 3)}"] if surplus else []),
        *([listed(shapes, 3, "; ")] if shapes else []),
    ]
    if differences:
        raise ValueError(f"{what} does not fit the model: {'; '.join(differences)}. Nothing was changed")


def named_slots(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield (plain name, module, attribute, tensor) of every parameter and saved buffer, shared ones each time."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and attribute not in module._non_persistent_buffers_set:
                yield plain_name(dotted(prefix, attribute)), module, attribute, tensor


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


def _identity(tensor: Tensor) -> object:
    """Return a key that is equal for two names of one tensor; all ranks agree on whether it is."""
    if isinstance(tensor, DTensor) or not tensor.numel():
        return id(tensor)
    place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (*place, tensor.shape, tensor.stride(), tensor.dtype)


@torch.no_grad()
def _not_finite(name: str, module: nn.Module, attribute: str, tensor: Tensor) -> str | None:
    values = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if is_lazy(values) or values.is_meta or not (values.is_floating_point() or values.is_complex()):
        return None
    if values.dtype.itemsize == 1:  # torch cannot check float8 for finite values
        values = values.float()
    if values.is_sparse:
        values = values.coalesce().values()
    may_be_infinite = attribute in module._buffers and not isinstance(module, _NormBase)
    good = ~values.isnan() if may_be_infinite else values.isfinite()
    if good.all():
        return None
    what = "NaN" if values.isnan().any() else "infinite values"
    layer = name.rpartition(".")[0]
    return f"{layer}: {attribute} holds {what}" if layer else f"{attribute} holds {what}"


def _times(extents: tuple[int, ...]) -> str:
    return "x".join(map(str, extents)) or "a scalar"
