"""Shrunk attention: built from a plan, described by one, as plain modules, and filled from dense checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from factorized._torch import full_precision
from factorized.attention.cost import AttentionCost
from factorized.attention.matrices import Matrices, check_finite, drawn_matrices, padded_matrices, spectral_matrices
from factorized.attention.multihead import ShrunkMultiheadAttention, allow_nested_tensors
from factorized.attention.register import adapter_of, find_attention, read_attention
from factorized.attention.resize import plain_module, read_unit, shrunk_module
from factorized.attention.unit import FORMS, AttentionUnit, shrunk_note
from factorized.nn.dense import CALL_HOOKS
from factorized.nn.init import Init
from factorized.nn.model import dotted, module_names
from factorized.planning.plan import AttentionEntry
from factorized.surgery.replace import replace_modules
from factorized.surgery.state import Shapes, named_slots


def shrunk_attention(model: nn.Module) -> list[AttentionUnit]:
    """Read every shrunk attention module of ``model``."""
    found = []
    for read in find_attention(model):
        if shrunk_note(read.module) is None:
            continue
        if read.unit is None:
            raise ValueError(f"{read.name or 'the model'}: its heads are shrunk, but it cannot be read: {read.reason}")
        found.append(read.unit)
    return found


def plain_attention(unit: AttentionUnit, size: int) -> nn.Module:
    """Return the plain module that computes what a shrunk one does, with heads of ``size``."""
    return plain_module(unit, size, padded_matrices(unit, size))


def with_plain_attention(
    model: nn.Module, shrunk: Iterable[AttentionUnit], to_plain: Callable[[list[str], AttentionUnit], nn.Module]
) -> nn.Module:
    """Replace shrunk attention by what ``to_plain`` returns; return the model."""
    places = module_names(model)
    new = {unit.module: to_plain(places[unit.module], unit) for unit in shrunk}
    for module, plain in new.items():
        hand_hooks(module, plain)
    model = replace_modules(model, new)
    allow_nested_tensors(model)
    return model


def hand_hooks(old: nn.Module, new: nn.Module) -> None:
    """Give attention that replaces another one its hooks, and those of its projections that have a place in it."""
    places = dict(new.named_modules())
    for path, module in old.named_modules():
        if path in places:
            places[path].__dict__ |= {name: module.__dict__[name] for name in CALL_HOOKS}


def attention_entries(model: nn.Module, name_of: Callable[[str], str]) -> list[AttentionEntry]:
    """Return the plan entries that would shrink a dense model's attention to that of this model."""
    places = module_names(model)
    entries = []
    for unit in shrunk_attention(model):
        module, size = unit.module, unit.head_size
        head_ranks = unit.query.head_size, unit.value.head_size
        names = [name_of(name) for name in places[module]]
        cost = AttentionCost(unit, FORMS)
        entries.append(
            AttentionEntry(
                name=names[0],
                type="MultiheadAttention" if isinstance(module, ShrunkMultiheadAttention) else type(module).__name__,
                shape=(unit.query.heads, size),
                aliases=tuple(names[1:]),
                params=cost.params_at(size, size),
                params_after=cost.params_at(*head_ranks),
                head_ranks=head_ranks,
                forms=unit.shrunk_forms,
            )
        )
    return entries


class DenseAttention:
    """A shrunk attention module, and the dense one whose checkpoint fills it."""

    def __init__(self, unit: AttentionUnit, names: Sequence[str]) -> None:
        self.unit, self.names = unit, names  # under all of which the model holds it
        self.dense = plain_module(unit, unit.head_size, None)
        self.read = read_unit(self.dense)
        own = set(self.read.parameters)
        self.slots = {name: slot for name, _, _, slot in named_slots(self.dense) if slot in own}

    @property
    def shapes(self) -> Shapes:
        """The names and shapes of what the dense checkpoint holds."""
        return {dotted(n, key): tuple(slot.shape) for n in self.names for key, slot in self.slots.items()}

    def given_elsewhere(self, state: Mapping[str, Tensor]) -> list[str]:
        """Return the names that may be missing, because ``state`` gives the module under another of its names."""
        given = self._given(state)
        return [dotted(name, key) for name in self.names if name != given for key in self.slots]

    def owns(self, tensor: Tensor) -> bool:
        """Return whether a tensor of the shrunk module belongs to one of its projections."""
        return any(tensor is mine for mine in self.unit.parameters)

    @torch.no_grad()
    def best(self, state: Mapping[str, Tensor]) -> Matrices:
        """Return the best heads of this size for the matrices in ``state`` (section 3.1)."""
        name = self._given(state)
        for key, slot in self.slots.items():
            slot.copy_(state[dotted(name, key)])
        check_finite(self.read, name or "the model")
        qk, ov = self.unit.query.head_size, self.unit.value.head_size
        return spectral_matrices(self.read, qk, ov, self.unit.shrunk_forms, may_add_bias=True)

    def _given(self, state: Mapping[str, Tensor]) -> str:
        """Return the first of the module's names under which ``state`` gives it."""
        given = (name for name in self.names if all(dotted(name, key) in state for key in self.slots))
        return next(given, self.names[0])


@full_precision
def build_attention(model: nn.Module, entry: AttentionEntry, init: Init | None) -> nn.Module:
    """Return the shrunk module for an entry of a plan; ``init=None`` leaves it unfilled. Changes nothing."""
    unit = read_unit(model.get_submodule(entry.name))
    qk, ov = entry.head_ranks
    forms = tuple(form for form in FORMS if form in entry.forms)
    if init is None or unit.query.weight.is_meta:
        return shrunk_module(unit, qk, ov, None)
    check_finite(unit, entry.name)
    if init == "spectral":
        return shrunk_module(unit, qk, ov, spectral_matrices(unit, qk, ov, forms, may_add_bias=ov < unit.head_size))
    return shrunk_module(unit, qk, ov, drawn_matrices(unit, qk, ov, forms, init))


def refuse_unregistered(entries: Iterable[AttentionEntry], modules: Mapping[str, nn.Module]) -> None:
    """Raise if a plan shrinks attention of a class that no longer has an adapter."""
    for entry in entries:
        module = modules.get(entry.name)
        if module is not None and type(module).__name__ == entry.type and adapter_of(module) is None:
            raise ValueError(
                f"{entry.name}: the plan shrinks attention of class {entry.type}, which is not registered in this "
                f"process; call fz.register_attention({entry.type}, ...) first. Nothing was changed"
            )


def attention_difference(entry: AttentionEntry, modules: Mapping[str, nn.Module]) -> str | None:
    """Return how the attention module that an entry names differs from the one it was made for."""
    module = modules.get(entry.name)
    found = read_attention(entry.name, module) if module is not None else None
    if found is None or found.unit is None or found.unit.shrunk is not None:
        return f"{entry.name} is not an attention module that can be shrunk"
    unit = found.unit
    has = (unit.query.heads, unit.head_size)
    return None if has == entry.shape else f"{entry.name} has {has[0]} heads of {has[1]}, not {entry.shape}"
