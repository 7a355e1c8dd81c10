"""How strongly each form is decayed: one number, numbers by name, kind or format, or a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import Tensor, nn

from factorized._checks import is_number, plain_number
from factorized._torch import kept_by_compiler
from factorized.attention.register import find_attention
from factorized.attention.unit import FORMS
from factorized.decay.forms import Form
from factorized.planning.schemes import FORMATS

LAYER_KINDS = ("linear", "conv", "embedding", "recurrent", "experts")
FORM_KINDS = (*LAYER_KINDS, *FORMATS, *FORMS)  # and the names of formats
Number = float | Tensor  # a tensor can be changed inside a captured CUDA graph
Strength = Number | Mapping[str, Number] | Callable[[int], float]


def strengths(strength: Strength, found: Sequence[Form], step: int) -> list[Number]:
    """Return the strength of every form at ``step``."""
    if callable(strength):
        strength = strength(step)
        check_number(f"strength at step {step}", strength)
    if isinstance(strength, Mapping):
        strength = {pattern: scalar(number) for pattern, number in strength.items()}
        return [_by_pattern(strength, form) for form in found]
    number = scalar(strength)
    return [0.0 if form.kind == "qk" else number for form in found]


def decayed_forms(strength: Strength, found: Sequence[Form]) -> list[Form]:
    """Return the forms that are decayed: those whose strength is not zero."""
    if callable(strength):
        return unless_named(found)
    numbers = strengths(strength, found, step=0)
    return [form for form, n in zip(found, numbers, strict=True) if isinstance(n, Tensor) or n != 0]


def product_forms(strength: Strength, found: Sequence[Form]) -> list[Form]:
    """Return the forms that count as products in packed weights: those decayed, or a number of zero would decay."""
    return decayed_forms(strength, found) if isinstance(strength, Mapping) else unless_named(found)


def noted(strength: Strength) -> dict[str, Number] | None:
    """Return a copy of strengths by name, to see later whether they were changed in place; None for others."""
    return dict(strength) if isinstance(strength, Mapping) else None


def unless_named(found: Sequence[Form]) -> list[Form]:
    """Return the forms that a single number acts on: of attention only OV, which the paper found to be more robust."""
    return [form for form in found if form.kind != "qk"]


def check_strength(strength: Strength, found: Sequence[Form]) -> None:
    """Raise unless every number is finite and not negative, and every pattern is a kind or matches a form's name.

    A kind that the model lacks is fine: one dict may serve several models.
    """
    if callable(strength):
        strengths(strength, found, step=0)
        return
    if not isinstance(strength, Mapping):
        check_number("strength", strength)
        return
    for pattern, number in strength.items():
        if not isinstance(pattern, str):
            raise ValueError(f"strength must name forms by kind or name glob, got {pattern!r}")
        check_number(f"strength of {pattern!r}", number)
        if pattern not in FORM_KINDS and not any(_matches(pattern, form) for form in found):
            names = [form.name for form in found]
            near = get_close_matches(pattern, [*FORM_KINDS, *names], n=3) or names[:3]
            raise ValueError(
                f"strength: no form of the model matches {pattern!r}. Kinds are {', '.join(FORM_KINDS)}; near names "
                f"are {', '.join(map(repr, near))}"
            )
        turned = next((form for form in found if form.rotary), None)
        if pattern == "qk" and turned is not None and (isinstance(number, Tensor) or number != 0):
            raise ValueError(
                f"strength: 'qk' asks for Q Kᵀ, but rotary embeddings rotate the queries and keys of {turned.name!r} "
                "by position, so that Q Kᵀ is not a single form (docs/attention.md). Leave it out, or ask for "
                f"such forms by name: {{'*.qk': ...}} or {{{turned.name!r}: ...}}"
            )


def check_readable(strength: Strength, model: nn.Module) -> None:
    """Raise if ``strength`` names a kind of attention form and some attention of ``model`` cannot be read."""
    numbers = strength if isinstance(strength, Mapping) else {}
    named = [k for k in FORMS if k in numbers and (isinstance(numbers[k], Tensor) or numbers[k] != 0)]
    for read in find_attention(model) if named else ():
        if read.unit is None:
            raise ValueError(
                f"strength: {named[0]!r} asks for attention, but {read.name or 'the model'!r} cannot be read: "
                f"{read.reason}\n"
                f"To decay only the others, ask for them by name: {{'*.{named[0]}': ...}}"
            )


def _by_pattern(strength: Mapping[str, Number], form: Form) -> Number:
    # The last pattern that matches wins, so that exceptions follow the rule.
    for pattern in reversed(list(strength)):
        if _matches(pattern, form):
            return strength[pattern]
    return 0.0


def scalar(number: Number) -> Number:
    """Return a tensor of one number without dimensions, and other numbers as plain ones.

    A tensor of shape (1,) would take part in type promotion, and foreach operations do not accept it.
    """
    return number.reshape(()) if isinstance(number, Tensor) else plain_number(number)


def _matches(pattern: str, form: Form) -> bool:
    # A glob that happens to cover attention does not include QK, which has to be named.
    says_qk = form.kind != "qk" or pattern.endswith("qk")
    formats = {format.name for format in (form.format, form.layer and form.layer.format) if format is not None}
    return pattern == form.kind or pattern in formats or (says_qk and _fits(form.name, pattern))


@kept_by_compiler
def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern)


def check_number(what: str, number: object) -> None:
    """Raise unless ``number`` is finite and not negative; a tensor on a GPU is not checked, as it may be captured."""
    if isinstance(number, Tensor):
        if number.numel() != 1:
            raise ValueError(f"{what} must be one number, got a tensor of shape {tuple(number.shape)}")
        if number.device.type != "cpu":
            return
        number = number.item()
    if not (is_number(number) and number >= 0):
        raise ValueError(f"{what} must be a finite number of at least 0, got {number!r}")
