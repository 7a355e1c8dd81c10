"""Check a registration: run a module with and without its heads cut, in a case where cutting loses nothing."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from factorized.attention.matrices import Heads, Matrices, read_matrices, spectral_matrices
from factorized.attention.register import is_known
from factorized.attention.resize import plain_module, read_unit, shrunk_module
from factorized.attention.unit import FORMS, AttentionUnit, FormName
from factorized.nn.running import ExampleInput, evaluation_mode, removing, run_once

EXACT = 1e-3  # a wrong registration changes the output by about 100 %
TOLERANCE = {torch.float16: 0.05, torch.bfloat16: 0.05}
UNCHECKED = "its registration could not be checked; pass example_input= to check it"


@dataclass
class Call:
    """The arguments of one call of a module."""

    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)


def check_registrations(
    units: Mapping[str, AttentionUnit], model: nn.Module, example_input: ExampleInput | None = None
) -> set[type[nn.Module]]:
    """Raise if the registration of a class does not fit its ``forward``.

    One module of every class is tried, with noise for its sequences: called as when ``model`` runs on
    ``example_input``, or with the sequences alone if its ``forward`` takes nothing else. Returns the classes for which
    neither was possible. Classes that the library knows are not tried.
    """
    firsts: dict[type[nn.Module], str] = {}
    for name, unit in units.items():
        if not is_known(unit.module) and unit.shrunk is None:
            firsts.setdefault(type(unit.module), name)
    chosen = {name: units[name] for name in firsts.values()}
    seen = _calls_of(chosen, model, example_input) if example_input is not None and chosen else {}
    unchecked = set()
    for name, unit in chosen.items():
        for call in (seen.get(name), _noise(unit)):
            error = _error(unit, _forms(unit), call)
            if error is not None:
                break
        if error is None:
            unchecked.add(type(unit.module))
        elif not error <= _allowed(unit):
            raise ValueError(_refusal(name, unit, call, error))
    return unchecked


def _forms(unit: AttentionUnit) -> tuple[FormName, ...]:
    return ("ov",) if unit.rotary else FORMS


def _allowed(unit: AttentionUnit) -> float:
    return TOLERANCE.get(unit.output.weight.dtype, EXACT)


def _refusal(name: str, unit: AttentionUnit, call: Call | None, error: float) -> str:
    wrong = [form for form in _forms(unit) if not (_error(unit, (form,), call) or 0) <= _allowed(unit)]
    look = "query=, key=, value= and output=, and at heads= and kv_heads="
    if not wrong:
        look = "head_size= and scale=: leave scale= out if forward computes the scale itself"
    elif wrong == ["qk"]:
        look = (
            "rotary=: set it to True if queries and keys are rotated by position, or normed, between their two matrices"
        )
    effect = f"change its output by {error:.0%} instead of leaving it as it was" if isfinite(error) else "make it fail"
    return (
        f"{name or 'the model'}: {type(unit.module).__name__} is registered in a way that does not fit its forward: "
        f"with forms of half the rank, heads of half the size {effect}. Look at {look}. Nothing was changed"
    )


@torch.no_grad()
def _error(unit: AttentionUnit, forms: Collection[FormName], call: Call | None) -> float | None:
    """Return how far the output moves when ``forms`` of half the rank get heads of half the size; None if unknown.

    It is also unknown if the output does not depend on the queries, as for a sequence of length one. A copy of the
    module is used, with matrices drawn so that scores are neither all alike nor all on one key.
    """
    if call is None or unit.output.weight.is_meta or type(unit.output.weight) is not nn.Parameter:
        return None
    size, half = unit.head_size, max(1, unit.head_size // 2)
    qk, ov = (half if form in forms else size for form in FORMS)
    drawn = _drawn(unit, qk, ov)
    whole = plain_module(unit, size, drawn)
    other = plain_module(unit, size, replace(drawn, query=(-drawn.query[0], drawn.query[1])))
    read = read_unit(whole)
    cut = shrunk_module(read, qk, ov, spectral_matrices(read, qk, ov, forms, may_add_bias=ov < size))
    try:
        expected, unlike = _output(whole, call), _output(other, call)
    except Exception:  # the forward of an unknown class may raise anything when given the wrong arguments
        return None
    if expected is None or unlike is None or not (expected - unlike).norm() > 0.05 * expected.norm() > 0:
        return None
    try:
        found = _output(cut, call)
    except Exception:  # a forward that finds other sizes than those registered
        return float("inf")
    if found is None or found.shape != expected.shape:
        return float("inf")
    return float((found - expected).norm() / expected.norm())


def _output(module: nn.Module, call: Call) -> Tensor | None:
    given = deepcopy(call)  # the call may write to a cache among them
    with evaluation_mode(module):
        # Not module(...), which would call other people's hooks.
        return next(_tensors(module.forward(*given.arguments, **given.keywords)), None)


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for part in output:
            yield from _tensors(part)
    elif isinstance(output, Mapping):
        yield from _tensors(tuple(output.values()))


def _drawn(unit: AttentionUnit, qk: int, ov: int) -> Matrices:
    """Return matrices of the unit's sizes whose forms have the ranks ``qk`` and ``ov``, in all dimensions of a head."""
    generator = torch.Generator().manual_seed(0)
    old = read_matrices(unit)
    mixing = {rank: torch.linalg.qr(_normal((unit.head_size, rank), generator))[0].mT for rank in (qk, ov)}

    def like(tensor: Tensor, rank: int, scale: float) -> Tensor:  # (..., head size)
        noise = _normal((*tensor.shape[:-1], rank), generator)
        return (scale * noise @ mixing[rank]).to(tensor)

    def heads(given: Heads, rank: int) -> Heads:
        weight, bias = given
        return like(weight, rank, weight.shape[1] ** -0.5), None if bias is None else like(bias, rank, 0.5)

    output = like(old.output, ov, ov**-0.5)
    return Matrices(heads(old.query, qk), heads(old.key, qk), heads(old.value, ov), output, old.output_bias)


def _noise(unit: AttentionUnit) -> Call | None:
    """Return sequences of noise for a ``forward`` that may take them; None where it needs more than three arguments."""
    needed = [
        parameter
        for parameter in inspect.signature(unit.module.forward).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if not 1 <= len(needed) <= 3:
        return None
    generator = torch.Generator().manual_seed(1)
    widths = [projection.long for projection in (unit.query, unit.key, unit.value)]
    call = Call()
    for parameter, width in zip(needed, widths, strict=False):
        sequence = _normal((2, 5, width), generator).to(unit.output.weight)
        if parameter.kind is parameter.KEYWORD_ONLY:
            call.keywords[parameter.name] = sequence
        else:
            call.arguments = (*call.arguments, sequence)
    return call


def _or_noise(value: object, widths: Collection[int]) -> object:
    """Return noise in place of a sequence, because an example may be all zeros."""
    if not (isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1 and value.shape[-1] in widths):
        return value
    return _normal(value.shape, torch.Generator().manual_seed(2)).to(value)


def _calls_of(units: Mapping[str, AttentionUnit], model: nn.Module, example_input: ExampleInput) -> dict[str, Call]:
    """Return what each module is called with first when ``model`` runs on ``example_input``."""
    calls: dict[str, Call] = {}

    def note(name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if name not in calls:
            widths = {projection.long for projection in units[name].projections}
            given = [_or_noise(value, widths) for value in arguments]
            calls[name] = deepcopy(Call(tuple(given), {key: _or_noise(keywords[key], widths) for key in keywords}))

    hooks = [
        unit.module.register_forward_pre_hook(
            lambda _, arguments, keywords, name=name: note(name, arguments, keywords), with_kwargs=True
        )
        for name, unit in units.items()
    ]
    with removing(hooks):
        run_once(model, example_input)
    return calls


def _normal(extents: Sequence[int], generator: torch.Generator) -> Tensor:
    return torch.randn(extents, generator=generator, dtype=torch.float32, device="cpu")
