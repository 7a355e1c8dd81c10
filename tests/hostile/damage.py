"""Damage to files, of every kind that disks, networks and interrupted copies do; the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

BLOCK = 64  # bytes that are zeroed or swapped at once


def flip_bit(data: bytearray, draw: random.Random) -> bytearray:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return data


def flip_bytes(data: bytearray, draw: random.Random) -> bytearray:
    for _ in range(draw.randint(2, 8)):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return data


def truncate(data: bytearray, draw: random.Random) -> bytearray:
    return data[: draw.randrange(len(data))]


def zero_block(data: bytearray, draw: random.Random) -> bytearray:
    start = draw.randrange(len(data))
    data[start : start + BLOCK] = bytes(len(data[start : start + BLOCK]))
    return data


def swap_blocks(data: bytearray, draw: random.Random) -> bytearray:
    size = min(BLOCK, len(data) // 2)
    first = draw.randrange(len(data) - 2 * size + 1)
    second = draw.randrange(first + size, len(data) - size + 1)
    data[first : first + size], data[second : second + size] = (
        data[second : second + size],
        data[first : first + size],
    )
    return data


def append(data: bytearray, draw: random.Random) -> bytearray:
    return data + draw.randbytes(draw.randint(1, BLOCK))


DAMAGES: tuple[Callable[[bytearray, random.Random], bytearray], ...] = (
    flip_bit,
    flip_bytes,
    truncate,
    zero_block,
    swap_blocks,
    append,
)


def replace(path: Path, data: bytes) -> None:
    """Put another file in the place of one that may be mapped into memory."""
    path.unlink()
    path.write_bytes(data)


def damage(path: Path, seed: int) -> str:
    """Damage a file, in the way and at the place that ``seed`` says, and return what was done to it."""
    draw = random.Random(seed)
    change = DAMAGES[seed % len(DAMAGES)]
    replace(path, bytes(change(bytearray(path.read_bytes()), draw)))
    return f"{change.__name__}, seed {seed}, of {path.name}"
