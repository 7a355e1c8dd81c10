"""Safe unpickling: a file may name nothing but what NumPy writes for an array of bytes.

Even that is not NumPy's own code, which would allocate whatever a file asks for: names lead to stand-ins of ours, made
anew for each use, so that a harmful file can neither call anything else nor change what a name leads to. Memory stays
in proportion to the file: its opcodes are read before they are run, because lengths and memo numbers allocate too.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

LARGEST = 1 << 30  # bytes of a file; the largest of CIFAR has 155 million


def unpickle(path: Path) -> Any:
    """Return what ``path`` holds: dictionaries, lists, tuples, numbers, text, bytes and ``ByteArray``."""
    try:
        if path.stat().st_size > LARGEST:
            raise pickle.UnpicklingError(f"it has {path.stat().st_size:,} bytes, more than any file of CIFAR")
        raw = path.read_bytes()
        _check_memory(raw)
        return _Unpickler(raw).load()
    except Exception as error:  # a pickle that is cut off, or made to do harm, can raise anything
        reason = str(error) or type(error).__name__
        raise ValueError(f"{path} is damaged, truncated or not a data file: {reason}") from error


def _check_memory(raw: bytes) -> None:
    """Raise for lengths beyond the end of ``raw``, and for memo numbers that no file of its length needs."""
    for opcode, argument, _ in pickletools.genops(raw):
        # pickle keeps a list as long as the largest number
        if isinstance(argument, int) and "PUT" in opcode.name and argument > len(raw):
            raise pickle.UnpicklingError(f"it numbers an object {argument:,} and has {len(raw):,} bytes")


class ByteArray:
    """An array of bytes as a pickle describes it."""

    array: npt.NDArray[np.uint8]

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, raw = state
        if type(kind) is not _ByteType:
            raise pickle.UnpicklingError("it holds an array that is not of bytes")
        self.fill(raw, shape, "F" if fortran else "C")

    def fill(self, raw: Any, shape: Any, order: Any) -> ByteArray:
        """Take the bytes, after checking that there are as many as ``shape`` needs."""
        raw = raw if isinstance(raw, (bytes, bytearray)) else b""
        if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
            raise pickle.UnpicklingError(f"it holds an array of shape {shape!r}")
        if math.prod(shape) != len(raw):
            raise pickle.UnpicklingError(f"it holds an array of shape {shape} in {len(raw):,} bytes")
        self.array = np.frombuffer(raw, np.uint8).reshape(shape, order="F" if order == "F" else "C")
        return self


class _ByteType:
    """The element type uint8; a pickle sets its byte order next, which means nothing for bytes."""

    def __setstate__(self, state: Any) -> None:
        pass


class _Name:
    """The stand-in for a name in a pickle: a callable, made for this use only."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)


class _Unpickler(pickle.Unpickler):
    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw), encoding="bytes")
        self.room = len(raw)  # characters that may be encoded: a file spells each of them out

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes for Python 2
            return _Name(self._encode)
        call = _CALLS.get((module.replace("numpy._core.", "numpy.core."), name))  # NumPy 2 and 1
        if call is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no data file needs; nothing was run")
        return _Name(call)

    def _encode(self, text: Any, encoding: Any) -> bytes:
        if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
            raise pickle.UnpicklingError(f"it encodes text as {encoding!r}")
        self.room -= len(text)
        if self.room < 0:
            raise pickle.UnpicklingError("it encodes one text many times, as Python would not have written")
        return text.encode("latin1")


def _new_array(*arguments: Any) -> ByteArray:
    return ByteArray()


def _element_type(code: Any, *flags: Any) -> _ByteType:
    if code not in ("u1", b"u1"):
        raise pickle.UnpicklingError(f"it holds an array of {code!r}; expected bytes, 'u1'")
    return _ByteType()


def _array_class(*arguments: Any) -> Any:
    raise pickle.UnpicklingError("it calls numpy.ndarray, as NumPy would not have written")


def _from_buffer(raw: Any, kind: Any, shape: Any, order: Any) -> ByteArray:
    if type(kind) is not _ByteType:
        raise pickle.UnpicklingError("it holds an array that is not of bytes")
    return ByteArray().fill(raw, shape, order)


_CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): _array_class,
    ("numpy", "dtype"): _element_type,
    ("numpy.core.multiarray", "_reconstruct"): _new_array,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
}
