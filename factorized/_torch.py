"""Helpers around torch: its private functions, types to compute in, nothing rounded, local parts of tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._functorch import config
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

Given = ParamSpec("Given")
Found = TypeVar("Found")


def computable(value: Tensor) -> Tensor:
    """Return ``value`` in a type that is safe for computing squares: half precision becomes float32."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def all_finite(value: Tensor) -> bool:
    """Return whether every entry is finite: from the extremes, in a seventh of the time of looking at each entry."""
    return bool(torch.isfinite(torch.stack(torch.aminmax(value))).all())


def without_autocast(*devices: torch.device) -> AbstractContextManager[object]:
    """Return a context that disables autocast on ``devices``, so that products keep full precision."""
    kinds = {device.type for device in devices} - {"meta"}
    off = [torch.autocast(kind, enabled=False) for kind in sorted(kinds) if torch.is_autocast_enabled(kind)]
    if len(off) < 2:
        return off[0] if off else nullcontext()
    stack = ExitStack()
    for context in off:
        stack.enter_context(context)
    return stack


@contextmanager
def without_rounding() -> Iterator[None]:
    """Let torch round no float32 factors of matrix products inside, as TF32 or bfloat16, if the user allows it."""
    get, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    rounded = [backend for backend in ("cuda", "mkldnn") if get(backend, "matmul") in ("tf32", "bf16")]
    own = {backend: _own_precision(backend, "matmul") for backend in rounded}
    try:
        for backend in own:
            put(backend, "matmul", "ieee")
        yield
    finally:
        for backend, setting in own.items():
            put(backend, "matmul", setting)


def _own_precision(backend: str, operations: str) -> str:
    """Return a setting itself, "none" where a more general one decides: torch tells only what is in effect."""
    get, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    effective = get(backend, operations)
    if backend == "generic":
        return effective
    general = ("generic" if operations == "all" else backend, "all")
    kept, other = _own_precision(*general), "tf32" if effective == "ieee" else "ieee"
    put(*general, other)
    inherited = get(backend, operations) == other
    put(*general, kept)
    return "none" if inherited else effective


def full_precision(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """Return ``function`` with autocast and rounded products disabled inside: what it computes is kept."""

    @wraps(function)
    def unrounded(*args: Given.args, **kwargs: Given.kwargs) -> Found:
        accelerator = torch.accelerator.current_accelerator()
        devices = [torch.device("cpu"), *([] if accelerator is None else [accelerator])]
        with without_autocast(*devices), without_rounding():
            return function(*args, **kwargs)

    return unrounded


class WatchingMode(TorchDispatchMode):
    """A dispatch mode that looks at what is computed, and changes and keeps nothing of it. Abstract."""


def is_traced() -> bool:
    """Return whether calls are recorded or transformed: compiled, exported, on fake tensors, by ``torch.func``."""
    return bool(
        torch.compiler.is_compiling()
        or (torch._C._len_torch_dispatch_stack() and not _is_only_watched())
        or torch._C._are_functorch_transforms_active()
        or is_jit_tracing()
    )


def _is_only_watched() -> bool:
    return all(isinstance(mode, WatchingMode) for mode in _get_current_dispatch_mode_stack())


def in_backward() -> bool:
    """Return whether autograd is running: a forward inside is that of a checkpoint, done a second time."""
    return torch._C._current_graph_task_id() != -1


def leaves(value: Tensor) -> list[Tensor]:
    """Return the tensors to which a backward pass from ``value`` adds gradients, unless they are frozen by then."""
    waiting = [] if value.grad_fn is None else [value.grad_fn]
    seen = set(waiting)
    while waiting:
        following = {node for node, _ in waiting.pop().next_functions if node is not None} - seen
        seen |= following
        waiting.extend(following)
    kind = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]  # no stub
    return [node.variable for node in seen if isinstance(node, kind)]


def is_jit_tracing() -> bool:
    """Return whether ``torch.jit.trace`` records the calls."""
    return torch._C._get_tracing_state() is not None


def kept_by_compiler(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """Return a function whose result compiled code keeps.

    Unlike ``torch.compiler.assume_constant_result`` this does not import the compiler, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@kept_by_compiler
def is_transformed() -> bool:
    """Return whether ``torch.func`` transforms calls."""
    return bool(torch._C._are_functorch_transforms_active())


def is_known(condition: bool) -> bool:
    """Return whether a condition on sizes holds; one that is not known while compiling does not, and gets no guard."""
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes half a second

    return statically_known_true(condition)


def is_exporting() -> bool:
    """Return whether ``torch.export`` runs; in compiled code, torch 2.11's own function always returns True."""
    return bool(torch.compiler._is_exporting_flag)


def triton_capability(device: torch.device | int) -> tuple[int, int]:
    """Return the compute capability of a GPU for which Triton builds kernels; (0, 0) where there is none.

    AMD's numbers mean other GPUs.
    """
    if find_spec("triton") is None or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


@cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def saving_hooks() -> tuple[Any, Any] | None:
    """Return the hooks that currently pack and unpack what autograd saves."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def shares_memory(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are views of the same memory."""
    return bool(torch._C._is_alias_of(first, second))  # type: ignore[attr-defined]  # no stub


def without_torch_function() -> AbstractContextManager[object]:
    """Return a context in which subclasses of tensors do not intercept calls."""
    return torch._C.DisableTorchFunctionSubclass()


def on_one_device(numbers: Sequence[Tensor]) -> Tensor:  # (numbers,)
    """Return single numbers, which may be on several devices, as one tensor on the first one's device."""
    first = numbers[0].device
    return torch.stack([number if number.device == first else number.to(first) for number in numbers])


def local_range(tensor: DTensor, dim: int) -> tuple[int, int]:
    """Return the start and length, along ``dim`` of a distributed tensor, of this process's part.

    Every mesh dimension that splits it makes pieces of ⌈length / ranks⌉.
    """
    mesh = tensor.device_mesh
    start, length = 0, tensor.shape[dim]
    for axis in split_order(tensor, dim):
        piece = -(-length // mesh.size(axis))
        skipped = min(mesh.get_local_rank(axis) * piece, length)
        start, length = start + skipped, min(piece, length - skipped)
    return start, length


def split_order(tensor: DTensor, dim: int) -> list[int]:
    """Return the mesh dimensions that split ``dim`` of a distributed tensor, in order.

    Those with a ``_StridedShard`` come last: with it FSDP2 splits what tensor parallelism has already split.
    """
    cuts = list(enumerate(tensor.placements))
    late = [axis for axis, placement in cuts if isinstance(placement, _StridedShard) and placement.dim == dim]
    early = [axis for axis, placement in cuts if placement.is_shard(dim) and axis not in late]
    return [*early, *reversed(late)]


def leave_process_group() -> None:
    """Destroy every process group, and wait until their threads have ended.

    torch caches the meshes of DTensors, and a mesh holds its groups: ``destroy_process_group`` alone leaves gloo's
    threads running. One that frees the tensors of the last collective while Python exits aborts the process.
    """
    dist.destroy_process_group()
    for mesh in [found for found in gc.get_objects() if type(found) is DeviceMesh]:
        mesh._pg_registry.clear()
    gc.collect()  # sharded networks hold groups too, in cycles


def not_compiled(function: Callable[Given, Found]) -> Callable[Given, Found]:
    """Return a function that the compiler leaves uncompiled.

    Unlike ``torch.compiler.disable`` this imports the compiler, which takes a second, only when it is first called.
    """
    return cast(Callable[Given, Found], _disable_dynamo(function))


def set_up_compiler() -> None:
    """Set how training is compiled, in the whole process: as eager code runs, and with every program in torch's cache.

    Backward passes are compiled without the autocast around the forward pass, since they are called outside of it.
    Programs with an ``autograd.Function`` are cached too: what it computes, both ways, is part of their key.
    """
    config.backward_pass_autocast = "off"
    config.autograd_cache_allow_custom_autograd_functions = True
