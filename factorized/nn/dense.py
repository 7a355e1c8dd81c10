"""Reading a dense layer: its plain class, its weight, the format for it, attributes that users added, its state."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable

from torch import Tensor, nn

from factorized.formats.format import Format
from factorized.formats.kernel import KernelShape, Kind
from factorized.formats.product import Product

CALL_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)
# What a subclass of a plain layer may define and still be the same layer; the last is Python 3.14's.
MAKES_OR_SHOWS = ("__init__", "__repr__", "extra_repr", "reset_parameters", "__annotate_func__")


def format_of(
    weight_shape: tuple[int, ...], format: Format | int, *, groups: int = 1, kind: Kind = "spatial", depth: int = 0
) -> Format:
    """Return the format for a weight: the one given, checked, or the product of a given rank."""
    if not isinstance(format, Format):
        return Product(KernelShape.of(weight_shape, groups, kind), format, depth)
    if format.shape.weight_shape != weight_shape or format.shape.groups != groups:
        raise ValueError(
            f"format must be for a weight {'x'.join(map(str, weight_shape))} with groups={groups}, got one for "
            f"{format.shape} with groups={format.shape.groups}; make one for this layer"
        )
    return format


def added_attributes(module: nn.Module, fresh: nn.Module) -> dict[str, object]:
    """Return the attributes set on a module that a fresh one of its plain class does not have."""
    known = {*vars(fresh), "_compiled_call_impl"}  # of module.compile(): it would keep calling the old one
    return {name: value for name, value in vars(module).items() if name not in known}


def plain_class(module: nn.Module, known: Collection[type[nn.Module]]) -> type[nn.Module] | None:
    """Return the class in ``known`` that computes what ``module`` does: its own, or one it inherits everything from."""
    for cls in type(module).__mro__:
        if cls in known:
            return cls
        if _defined(cls):
            return None
    return None


def why_not_plain(module: nn.Module, known: Collection[type[nn.Module]]) -> str | None:
    """Return what keeps ``module`` from being one of the ``known`` layers, or None."""
    if plain_class(module, known) is not None:
        return None
    reason = f"{type(module).__name__} is not a plain Linear, Conv or Embedding"
    if not isinstance(module, tuple(known)):
        return reason
    defined = next(names for cls in type(module).__mro__ if (names := _defined(cls)))
    telling = min(defined, key=lambda name: name.startswith("__"))
    return f"{reason}: it defines {telling!r}, which a replacement would lose"


def _defined(cls: type) -> list[str]:
    """Return the names that a class defines for its objects, except for how they are made and shown."""
    return [
        name
        for name, value in vars(cls).items()
        if not isinstance(value, (staticmethod, classmethod))
        and name not in MAKES_OR_SHOWS
        and (callable(value) or not name.startswith("__") or name == "__slots__")
    ]


def check_dense(dense: nn.Module, expected: type[nn.Module]) -> None:
    """Raise unless ``dense`` is a layer of the expected type."""
    if not isinstance(dense, expected):
        raise ValueError(
            f"dense must be an nn.{expected.__name__}, got {type(dense).__name__}; fz.factorize finds the right class "
            "for every layer of a model"
        )
    if (reason := why_not_plain(dense, (expected,))) is not None:
        raise ValueError(reason)


def dense_weight(dense: nn.Module) -> Tensor:
    """Return the weight of a dense layer."""
    weight = dense.weight
    if not isinstance(weight, Tensor):
        raise ValueError(f"dense must have a weight, got {type(dense).__name__}, whose weight is {weight!r}")
    return weight


def refuse_dense(weights: Iterable[str], state_dict: Container[str], errors: list[str]) -> None:
    """Add to torch's errors, once, if a state dict has dense weights for factors; ``strict=False`` would drop them."""
    message = "The state dict has dense weights where the model has factors; use fz.load_dense(model, state_dict)."
    if message not in errors and any(weight in state_dict for weight in weights):
        errors.append(message)
