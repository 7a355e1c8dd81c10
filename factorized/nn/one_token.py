"""Attention of one new token to a static cache, as in decoding: one GPU kernel that rotates, writes and attends."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from factorized.nn.one_row import can_launch

PROGRAMS = 128  # for each sequence
MOST_PROGRAMS = 512  # for all sequences
WARPS = 4
REGISTERS = 168  # of a thread, so that none is spilled and programs of the next kernel fit beside it
ELEMENTS = 4096  # of the keys that a program reads at a time
SEQUENCES = 8  # most that have a token each; 0: there is no kernel
SIZES = (16, 32, 64, 128, 256)  # of heads


def counters(heads: int, device: torch.device) -> Tensor:  # (SEQUENCES * heads + 1,)
    """Return the counters of the kernel's programs. They are zero between calls, and calls must not overlap."""
    return torch.zeros(SEQUENCES * heads + 1, dtype=torch.int32, device=device)


def has_kernel(
    qkv: Tensor,  # (sequences, (heads + 2 * heads of keys) * size)
    keys: Tensor,  # (sequences, heads of keys, positions, size)
    values: Tensor,
    mask: object,  # (sequences, 1, 1, positions) if it is a tensor
) -> bool:
    """Return whether ``attend_token`` can compute the attention of these."""
    rows, _, positions, size = keys.shape
    return (
        len(qkv) == rows <= SEQUENCES
        and size in SIZES
        and isinstance(mask, Tensor)
        and mask.dtype == torch.bool
        and mask.shape == (rows, 1, 1, positions)
        and keys.is_contiguous()
        and values.is_contiguous()
        and values.shape == keys.shape
        and qkv.dtype == keys.dtype
        and qkv.device == keys.device == mask.device
        and not (torch.is_grad_enabled() and qkv.requires_grad)
        and can_launch(qkv)
    )


# of any layout: the compiler would compute cosines, sines and masks of a fixed one again for each layer
@torch.library.custom_op(
    "factorized::attend_token",
    mutates_args=("keys", "values", "length", "arrived"),
    tags=(torch.Tag.flexible_layout,),
)
def attend_token(
    qkv: Tensor,  # (sequences, (heads + 2 * heads of keys) * size): query, key and value of the token
    cos: Tensor,  # (sequences or 1, 1, size), of its position
    sin: Tensor,
    keys: Tensor,  # (sequences, heads of keys, positions, size)
    values: Tensor,
    length: Tensor | None,  # (), tokens in the cache, one more afterwards
    position: Tensor | None,  # (), that number if it has to stay; one of the two is given
    mask: Tensor,  # (sequences, 1, 1, positions), bool: which of them the token sees, and whether itself
    arrived: Tensor,  # ``counters``
    scale: float,
    query_norm: Tensor | None,  # (size,), weights of RMS norms of each head
    key_norm: Tensor | None,
    eps: float,
) -> Tensor:  # (sequences, heads * size)
    """Return the attention of a token; write its key, rotated, and its value into the cache, and maybe count it.

    A token that the cache has no place for is neither written nor seen. The kernel may start while the one launched
    just before still runs, and waits for its results.
    """
    from factorized.nn.one_token_kernel import attention_kernel

    qkv, cos, sin, cuda = qkv.contiguous(), cos.contiguous(), sin.contiguous(), qkv.is_cuda
    if mask.stride(-1) != 1:
        mask = mask.contiguous()
    sequences, groups, positions, size = keys.shape
    heads = qkv.shape[1] // size - 2 * groups
    rows, block = sequences * heads, max(ELEMENTS // size, 1)
    spans = span_count(rows, sequences, positions, block)
    parts = qkv.new_empty(rows * spans * (size + 2), dtype=torch.float32)
    sums, y = parts[rows * spans * size :], qkv.new_empty(sequences, heads * size)
    held = position if length is None else length
    settings = {"num_warps": WARPS, "maxnreg": REGISTERS, "launch_pdl": True} if cuda else {}
    with torch.cuda.device_of(qkv):  # Triton launches on the current GPU
        attention_kernel[(spans, rows)](
            *(qkv, cos, sin),
            *(qkv if norm is None else norm for norm in (query_norm, key_norm)),
            *(keys, values, held, mask, parts, sums, arrived, y),
            *(scale, eps, positions),
            *(0 if len(tensor) == 1 else tensor.stride(0) for tensor in (cos, mask)),
            *(heads, groups, size, query_norm is not None, length is not None, spans, block),
            EARLY=cuda,
            **settings,
        )
    return y


@attend_token.register_fake
def _(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor | None,
    position: Tensor | None,
    mask: Tensor,
    arrived: Tensor,
    scale: float,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> Tensor:
    return qkv.new_empty(len(qkv), qkv.shape[1] - 2 * keys.shape[1] * keys.shape[3])


def span_count(rows: int, sequences: int, positions: int, block: int) -> int:
    """Return in how many spans, a power of two, the cache of each head is read, at most one for each block."""
    most = max(min(PROGRAMS * sequences, MOST_PROGRAMS) // rows, 1)
    blocks = 2 ** math.ceil(math.log2(math.ceil(positions / block)))
    return int(min(2 ** int(math.log2(most)), blocks))
