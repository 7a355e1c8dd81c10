"""The GPU kernel of one token's attention: each program reads a span of the cache; the last one of a head joins them.

It starts while the kernel before it still runs. Before a program waits for that one, it only asks the L2 cache for keys
and values of earlier tokens. All else is read or written after the wait: for the kernel before, which is done only when
those before it are. That also holds for the number of tokens, which is read again: it decides what is right, and before
the wait only what is fetched.
"""

from __future__ import annotations

import triton
import triton.language as tl

LINE = tl.constexpr(64)  # elements of two bytes in a line of the L2 cache
LOWEST = tl.constexpr(-1.0e30)  # below all scores, and finite: its difference to itself is zero
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attention_kernel(
    qkv,  # (batch, (HEADS + 2 * GROUPS) * DIM)
    cos,  # (batch or 1, DIM)
    sin,  # like cos
    query_norm,  # (DIM,)
    key_norm,  # (DIM,)
    keys,  # (batch, GROUPS, size, DIM), the token's are written
    values,  # like keys
    length,  # (), tokens in the cache; increased by one if COUNT
    mask,  # (batch or 1, size), whether the token may see that position
    parts,  # (batch * HEADS, SPANS, DIM), written
    sums,  # (2, batch * HEADS, SPANS), written: the highest score of each span, and its sum of weights
    arrived,  # (batch * HEADS + 1,) or more: zeros, and again when done
    y,  # (batch, HEADS * DIM), written
    scale,
    eps,
    size,
    cos_stride,  # from one sequence to the next; zero if all have the same
    mask_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,  # heads of keys and values
    DIM: tl.constexpr,
    NORM: tl.constexpr,
    COUNT: tl.constexpr,
    SPANS: tl.constexpr,
    BLOCK: tl.constexpr,  # positions that are read at a time
    EARLY: tl.constexpr,  # the kernels before and after may run at the same time
):
    """Write the attention of a head, or, if other spans of its cache are not done yet, a part of it."""
    span, row = tl.program_id(0), tl.program_id(1)
    batch, head = row // HEADS, row % HEADS
    group = head // (HEADS // GROUPS)
    cache = (batch * GROUPS + group).to(tl.int64) * size * DIM
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        if head % (HEADS // GROUPS) == 0:
            early = tl.minimum(tl.load(length, volatile=True).to(tl.int32), size)
            _fetch(keys + cache, values + cache, early, span, DIM, SPANS, BLOCK)
        tl.extra.cuda.gdc_wait()
    held = tl.load(length, volatile=True).to(tl.int32)
    end = tl.minimum(held, size)
    mask += batch * mask_stride
    cos += batch * cos_stride
    sin += batch * cos_stride
    qkv += batch * (HEADS + 2 * GROUPS) * DIM
    query = _rotated(qkv + head * DIM, query_norm, eps, cos, sin, DIM, NORM) * (scale * LOG2_E)
    own_key = _rotated(qkv + (HEADS + group) * DIM, key_norm, eps, cos, sin, DIM, NORM).to(keys.dtype.element_ty)
    d = tl.arange(0, DIM)
    own_value = tl.load(qkv + (HEADS + GROUPS + group) * DIM + d)
    own_seen = tl.load(mask + held, mask=held < size, other=0) != 0
    key, value, seen = _block(keys + cache, values + cache, mask, span, end, DIM, BLOCK)
    if COUNT:
        _count(length, arrived + tl.num_programs(1), held)  # while the block is on its way
    writes = (span == 0) & (head % (HEADS // GROUPS) == 0) & (held < size)
    tl.store(keys + cache + held.to(tl.int64) * DIM + d, own_key, mask=writes)
    tl.store(values + cache + held.to(tl.int64) * DIM + d, own_value, mask=writes)
    highest, total, mean = LOWEST, 0.0, tl.zeros((DIM,), tl.float32)
    if (span == 0) & own_seen:
        highest = tl.sum(query * own_key.to(tl.float32), 0)
        total = 1.0
        mean = own_value.to(tl.float32)
    for block in range(span, tl.cdiv(end, BLOCK), SPANS):
        # the next block is on its way while this one is used
        next_key, next_value, next_seen = _block(keys + cache, values + cache, mask, block + SPANS, end, DIM, BLOCK)
        score = tl.where(seen, tl.sum(key.to(tl.float32) * query[None, :], 1), float("-inf"))
        top = tl.maximum(highest, tl.max(score, 0))
        weight, shrink = tl.exp2(score - top), tl.exp2(highest - top)
        total = total * shrink + tl.sum(weight, 0)
        mean = mean * shrink + tl.sum(weight[:, None] * value.to(tl.float32), 0)
        highest = top
        key, value, seen = next_key, next_value, next_seen
    _join(parts, sums, arrived, y, row, span, highest, total, mean, DIM, SPANS)


@triton.jit
def _count(length, arrived, held):
    """Count the token as soon as all programs have read how many were before it.

    That number is part of what is added, so that it is read before.
    """
    if tl.atomic_add(arrived, (held >= 0).to(tl.int32), sem="relaxed") == tl.num_programs(0) * tl.num_programs(1) - 1:
        tl.store(length, (held + 1).to(length.dtype.element_ty))
        tl.store(arrived, 0)


@triton.jit
def _join(parts, sums, arrived, y, row, span, highest, total, mean, DIM: tl.constexpr, SPANS: tl.constexpr):
    """Leave the part of a span; the last program of a head writes the mean of all.

    Parts are added in the order of the spans, so the result does not depend on which program is the last.
    """
    rows = tl.num_programs(1)
    d, s = tl.arange(0, DIM), tl.arange(0, SPANS)
    at = row * SPANS + span
    tl.store(parts + at * DIM + d, mean)
    tl.store(sums + at, highest)
    tl.store(sums + rows * SPANS + at, total)
    tl.debug_barrier()  # of the threads: one arrives for all
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == SPANS - 1:
        tl.debug_barrier()
        # not from the L1 cache, which knows nothing of other processors
        tops = tl.load(sums + row * SPANS + s, cache_modifier=".cg")
        totals = tl.load(sums + (rows + row) * SPANS + s, cache_modifier=".cg")
        means = tl.load(parts + (row * SPANS + s)[:, None] * DIM + d[None, :], cache_modifier=".cg")
        weight = tl.exp2(tops - tl.max(tops, 0))
        whole = tl.sum(weight * totals, 0)
        result = tl.sum(means * weight[:, None], 0) / tl.where(whole > 0, whole, 1.0)  # zeros if nothing is seen
        tl.store(y + row * DIM + d, result.to(y.dtype.element_ty))
        tl.store(arrived + row, 0)


@triton.jit
def _rotated(x, norm, eps, cos, sin, DIM: tl.constexpr, NORM: tl.constexpr):  # (DIM,)
    """Read a query or key, normalized if it has to be, and rotate it to its position."""
    d = tl.arange(0, DIM)
    other = (d + DIM // 2) % DIM  # with which it turns
    here, there = tl.load(x + d).to(tl.float32), tl.load(x + other).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(here * here, 0) / DIM + eps)
        here *= inverse * tl.load(norm + d).to(tl.float32)
        there *= inverse * tl.load(norm + other).to(tl.float32)
    there = tl.where(d < DIM // 2, -there, there)
    return here * tl.load(cos + d).to(tl.float32) + there * tl.load(sin + d).to(tl.float32)


@triton.jit
def _block(keys, values, mask, block, held, DIM: tl.constexpr, BLOCK: tl.constexpr):  # 2 * (BLOCK, DIM), (BLOCK,)
    """Read a block of keys and values, and which of them the token sees."""
    t = block * BLOCK + tl.arange(0, BLOCK)
    at = t[:, None] * DIM + tl.arange(0, DIM)[None, :]
    key = tl.load(keys + at, mask=t[:, None] < held, other=0.0)
    value = tl.load(values + at, mask=t[:, None] < held, other=0.0)
    return key, value, tl.load(mask + t, mask=t < held, other=0) != 0


@triton.jit
def _fetch(keys, values, held, span, DIM: tl.constexpr, SPANS: tl.constexpr, BLOCK: tl.constexpr):
    """Ask the L2 cache for the keys and values of a span."""
    lines: tl.constexpr = max(DIM // LINE, 1)
    for block in range(span, tl.cdiv(held, BLOCK), SPANS):
        t = tl.minimum(block * BLOCK + tl.arange(0, BLOCK), held - 1)
        at = t[:, None] * DIM + tl.arange(0, lines)[None, :] * LINE
        for tensor in tl.static_range(2):
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
                "=r,l",
                [(values if tensor else keys) + at],
                tl.int32,
                is_pure=False,
                pack=1,
            )
