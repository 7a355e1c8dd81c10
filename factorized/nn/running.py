"""Running a model once on an example; evaluation mode and hooks; freezing and counting parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

ExampleInput = Tensor | Sequence[Any] | Mapping[str, Any]


def run_once(
    model: nn.Module, example_input: ExampleInput, argument: str = "example_input", *, gradients: bool = False
) -> Any:
    """Run ``model`` on ``example_input`` in evaluation mode, every layer called as a module; return its outputs.

    ``argument`` is what an error calls the input. No graph is recorded unless ``gradients``.
    """
    try:
        arguments, keywords = _as_call(model, example_input)
        # code that torch.compile made of a model sees no hooks that came later
        eager = torch.compiler.set_stance("force_eager")
        with torch.set_grad_enabled(gradients), evaluation_mode(model), _no_fused_attention(), eager:
            return model(*arguments, **keywords)
    except Exception as error:
        raise ValueError(
            f"{argument} does not run through {type(model).__name__}: {str(error).rstrip('.')}. Give what its forward "
            "takes: a tensor, a tuple of arguments or a dict of keywords"
        ) from error


def count_parameters(module: nn.Module) -> int:
    """Return the entries of all parameters; those of lazy layers, which have no size yet, count as zero."""
    return sum(parameter.numel() for parameter in module.parameters() if not is_lazy(parameter))


def move_to(model: nn.Module, values: Sequence[Any]) -> list[Any]:
    """Return the values with tensors on the device of the model."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return [moved(value, device) for value in values]


def moved(value: Any, device: torch.device, *, copy: bool = False) -> Any:
    """Return ``value`` with every tensor in it on a device, those in lists, tuples, named tuples and dicts too."""

    def move(tensor: Tensor) -> Tensor:
        if tensor.is_meta and device.type != "meta":
            raise ValueError("it is on the meta device, and has no values")
        return tensor.to(device, copy=True) if copy else tensor.to(device)

    return tree_map_only(Tensor, move, value)


def _as_call(model: nn.Module, example_input: ExampleInput) -> tuple[list[Any], dict[str, Any]]:
    if isinstance(example_input, Mapping):
        names, values = list(example_input), list(example_input.values())
    elif isinstance(example_input, Tensor):
        names, values = [], [example_input]
    elif isinstance(example_input, Sequence) and not isinstance(example_input, (str, bytes)):
        names, values = [], list(example_input)
    else:  # an array would be taken apart, and each of its rows given as an argument
        raise ValueError(f"it is of type {type(example_input).__name__}")
    there = move_to(model, values)
    return ([], dict(zip(names, there, strict=True))) if names else (there, {})


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put ``model`` in evaluation mode, and restore the mode of every module afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def removing(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks when the block ends."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def frozen(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Let none of these leaves require a gradient inside."""
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    for tensor in trained:
        tensor.requires_grad_(False)
    try:
        yield
    finally:
        for tensor in trained:
            tensor.requires_grad_(True)


@contextmanager
def _no_fused_attention() -> Iterator[None]:
    # The fused encoder layer is one opaque operation that no counter sees into.
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
