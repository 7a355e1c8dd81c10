"""The list of schemes, and reading a scheme or a format from a plan's JSON: the one place that knows them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from factorized.formats.format import Format
from factorized.formats.kernel import KernelShape
from factorized.formats.kronecker import Kronecker
from factorized.formats.monarch import Monarch
from factorized.formats.product import LowRank, Overcomplete
from factorized.formats.residual import Residual
from factorized.formats.scheme import Scheme
from factorized.formats.tensor_train import TensorTrain
from factorized.formats.tucker import Tucker

SCHEMES: tuple[type[Scheme], ...] = (LowRank, Overcomplete, TensorTrain, Tucker, Monarch, Kronecker, Residual)

SCHEMES_BY_NAME: dict[str, type[Scheme]] = {scheme.name: scheme for scheme in SCHEMES}
FORMATS: dict[str, type[Format]] = {format.name: format for scheme in SCHEMES for format in scheme.formats}


def read_scheme(data: Mapping[str, Any]) -> Scheme:
    """Undo ``Scheme.to_dict``."""
    settings = dict(data)
    name = settings.pop("name", None)
    if name not in SCHEMES_BY_NAME:
        raise ValueError(f"scheme name must be one of {', '.join(SCHEMES_BY_NAME)}, got {name!r}")
    parts = {key: read_scheme(value) for key, value in settings.items() if isinstance(value, dict) and "name" in value}
    return SCHEMES_BY_NAME[name].read(settings | parts)


def read_format(shape: KernelShape, data: Mapping[str, Any]) -> Format:
    """Undo ``Format.to_dict`` for a weight of this shape."""
    settings = dict(data)
    name = settings.pop("name", None)
    if name not in FORMATS:
        raise ValueError(f"format name must be one of {', '.join(FORMATS)}, got {name!r}")
    format = FORMATS[name]
    held = {key: value for key, value in settings.items() if isinstance(value, dict) and "name" in value}
    parts = {key: read_format(format.part_shape(shape), value) for key, value in held.items()}
    return format.read(shape, settings | parts)


def scheme_of(formats: Sequence[Format]) -> Scheme:
    """Return the first scheme that makes all of these formats; low rank for none, or for a mixture."""
    made = (scheme() for scheme in SCHEMES if formats and all(isinstance(f, scheme.formats) for f in formats))
    return next(made, LowRank())
