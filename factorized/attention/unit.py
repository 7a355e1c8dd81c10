"""The result of an adapter: the four projections of an attention module, as views over heads."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

FormName = Literal["qk", "ov"]  # of a head: its Query-Key form and its Output-Value form
FORMS: tuple[FormName, ...] = ("qk", "ov")


@dataclass(frozen=True)
class Shrunk:
    """The note that ``fz.factorize_attention`` leaves on a module: its head size before, and its sizes now.

    The module holds it as its attribute ``shrunk``.
    """

    head_size: int
    qk: int
    ov: int
    added_bias: bool = False  # whether an output bias was added, into which value biases are folded


@dataclass(frozen=True, eq=False)
class Projection:
    """The part of a weight, and of its bias, that belongs to all heads of one projection."""

    path: str  # dotted name, inside the unit, of the module that holds it; empty for the unit itself
    weight: nn.Parameter
    bias: nn.Parameter | None
    heads: int
    head_size: int
    dim: int  # of the weight, along which the heads lie: 0 for the rows of a Linear, 1 for its columns
    start: int = 0  # where this projection begins along that dimension, in a packed weight
    bias_start: int | None = None  # the same in the bias, if different: it may be packed where weights are not

    @property
    def size(self) -> int:
        """Entries of the weight along ``dim``: those of all heads."""
        return self.heads * self.head_size

    @property
    def long(self) -> int:
        """The extent on the model's side: what the projection reads, or for the output what it writes."""
        return self.weight.shape[1 - self.dim]

    def view(self, tensor: Tensor) -> Tensor:  # (heads, long, head_size)
        """Return this projection's part of a tensor shaped like its weight, by head; a view, never a copy."""
        part = tensor.narrow(self.dim, self.start, self.size).unflatten(self.dim, (self.heads, self.head_size))
        return part.mT if self.dim == 0 else part.transpose(0, 1)

    def bias_view(self, tensor: Tensor) -> Tensor:  # (heads, head_size)
        """Return this projection's part of a tensor shaped like its bias, by head; not for the output."""
        start = self.start if self.bias_start is None else self.bias_start
        return tensor.narrow(0, start, self.size).unflatten(0, (self.heads, self.head_size))


@dataclass(frozen=True, eq=False)
class AttentionUnit:
    """One attention module, read: heads ``softmax(scale · x Q_h K_hᵀ yᵀ) y V_h O_hᵀ`` (equation 1 of the paper).

    A K/V head may serve several query heads (grouped queries). ``head_size`` is that of the dense module.
    """

    module: nn.Module
    query: Projection
    key: Projection
    value: Projection
    output: Projection
    rotary: bool  # queries and keys are rotated by position between the two matrices
    head_size: int
    resizable: tuple[str, ...] = ()  # dotted attributes: the head size that ``forward`` reads, the size of all heads
    one_size: bool = True  # whether ``forward`` has one head size for queries, keys and values
    sums_to_one: bool = True  # whether attention weights add up to one, so that a value bias is a constant

    @property
    def groups(self) -> int:
        """Query heads per K/V head."""
        return self.query.heads // self.key.heads

    @property
    def shrunk(self) -> Shrunk | None:
        """The note of how the module was shrunk, if it was."""
        return shrunk_note(self.module)

    @property
    def shrunk_forms(self) -> tuple[FormName, ...]:
        """The forms whose heads are smaller than the dense module's."""
        return tuple(form for form in FORMS if self.form(form)[0].head_size < self.head_size)

    @property
    def has_output_bias(self) -> bool:
        """Whether the dense module has an output bias; shrinking may have added one."""
        return self.output.bias is not None and not (self.shrunk is not None and self.shrunk.added_bias)

    @property
    def projections(self) -> tuple[Projection, Projection, Projection, Projection]:
        """Query, key, value, output."""
        return self.query, self.key, self.value, self.output

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The weights and biases of all projections; a packed one several times."""
        return [tensor for p in self.projections for tensor in (p.weight, p.bias) if tensor is not None]

    def form(self, name: FormName) -> tuple[Projection, Projection]:
        """Return the two factors of a form: query and key, or value and output."""
        return (self.query, self.key) if name == "qk" else (self.value, self.output)

    def grouped_view(self, projection: Projection, tensor: Tensor) -> Tensor:  # (kv_heads, groups or 1, long, size)
        """Return ``projection.view``; with grouped queries, by K/V head and then by the query heads it serves.

        The factors of a form then multiply by broadcasting: a K/V head is one matrix for its whole group.
        """
        view = projection.view(tensor)
        return view if self.groups == 1 else view.unflatten(0, (self.key.heads, -1))


def are_forms(given: object) -> bool:
    """Return whether an argument is a collection of names of forms; it may be empty."""
    return isinstance(given, Collection) and not isinstance(given, str) and all(name in FORMS for name in given)


def shrunk_note(module: nn.Module) -> Shrunk | None:
    """Return the note that shrinking left on ``module``, or None."""
    note = module.__dict__.get("shrunk")
    return note if isinstance(note, Shrunk) else None
