"""Files with a checksum of their contents: safetensors and JSON that raise if they were damaged."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from factorized.files.atomic import WholeFile

# The names of types in safetensors; wide ones first, which keeps every tensor in a file aligned.
TYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_OPENING = b'{"__metadata__":{"checksum":"'  # of the header, after the 8 bytes of its length
_BLANK = b"0" * 64


def in_file_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors`` in the order in which a file holds them; raise for a type that safetensors lacks."""
    for name, tensor in tensors.items():
        if tensor.dtype not in TYPES:
            raise ValueError(f"{name} is {tensor.dtype}, which safetensors files cannot hold; convert it first")
    order = list(TYPES)
    return dict(sorted(tensors.items(), key=lambda item: order.index(item[1].dtype)))


def bytes_needed(tensors: Mapping[str, Tensor]) -> int:
    """Return the size of a file with ``tensors``, without its header."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def file_header(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> bytes:
    """Return what a safetensors file begins with, up to the first of ``tensors``, which are ``in_file_order``."""
    header: dict[str, Any] = {"__metadata__": about}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded


def save_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> None:
    """Write ``tensors`` to ``path`` atomically, in the format of ``write_tensors``."""
    with WholeFile(path) as new:
        write_tensors(new.file, tensors, about)
        new.put()


def write_tensors(
    file: IO[bytes],
    tensors: Mapping[str, Tensor],
    about: Mapping[str, str] | None = None,
    values: Iterable[Tensor] | None = None,
) -> None:
    """Write ``tensors`` as a safetensors file whose metadata begin with the SHA-256 of the file with that field zeroed.

    ``values`` gives the tensors in ``in_file_order`` one at a time, if ``tensors`` have only shapes and types.
    """
    tensors = in_file_order(tensors)
    header = file_header(tensors, {"checksum": _BLANK.decode(), "format": "pt", **(about or {})})
    file.write(header)
    digest = hashlib.sha256(header)
    for tensor in tensors.values() if values is None else values:
        data = _bytes(tensor)
        file.write(data)
        digest.update(data)
        del tensor, data  # before the next one is gathered
    file.seek(8 + len(_OPENING))
    file.write(digest.hexdigest().encode())


def read_tensors(path: Path, remedy: str) -> dict[str, Tensor]:
    """Return what ``write_tensors`` wrote to ``path``; raise a ValueError that ends in ``remedy`` if it is damaged.

    A missing file raises FileNotFoundError.
    """
    with path.open("rb") as file:
        opening = file.read(8 + len(_OPENING))
        expected = file.read(len(_BLANK))
        digest = hashlib.sha256(opening + _BLANK)
        found = hashlib.file_digest(file, lambda: digest).hexdigest()
        size = file.tell()
    if opening[8:] != _OPENING:
        raise ValueError(f"{path} is damaged (it does not begin with a checksum; {size:,} bytes): {remedy}")
    if found.encode() != expected:
        raise ValueError(f"{path} is damaged (its checksum does not match; {size:,} bytes): {remedy}")
    try:
        with safe_open(path, framework="pt") as opened:
            return {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118, it is not a mapping
    except (SafetensorError, RuntimeError, OSError) as error:
        if not path.exists():  # removed since it was read: torch, which opens it again, has another message
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
        raise ValueError(f"{path} is damaged ({error}; {size:,} bytes): {remedy}") from error


def checksum_of_tensors(tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> str:
    """Return the SHA-256 of names, types, shapes and bytes, and of ``about``, copying one tensor at a time at most."""
    digest = hashlib.sha256(json.dumps(about or {}).encode())
    for name, tensor in tensors.items():
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def sealed(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON-ready ``data`` with its checksum added."""
    return {**data, "checksum": _digest(data)}


def is_sealed(data: Mapping[str, Any]) -> bool:
    """Return whether ``data`` is exactly what ``sealed`` returned."""
    return data.get("checksum") == _digest({key: value for key, value in data.items() if key != "checksum"})


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = plain.as_strided((plain.numel(),), (1,))  # a single entry may have any stride, which view(-1) would keep
    return flat.view(torch.uint8).numpy().data
