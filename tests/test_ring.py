"""The kernel with a ring: sizes, results by Triton's interpreter, and what is built for an H200."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import ring
from benchmarks.ring import ring_sizes
from tests.interpreted import needs_interpreter, run_interpreted

WITH_A_RING = """
import torch
from benchmarks import ring
from factorized.nn import one_row
from tests.nn.test_one_row import check_feed_forward, check_parts
one_row.multiply_row = ring.multiply_row
for ring.RING, ring.WARPS in ((2048, 1), (16384, 4)):
    check_feed_forward(1, 1100, 24, 300, torch.float32, 1e-6)
    check_feed_forward(1, 96, 40, 176, torch.bfloat16, 2e-2)
    check_parts(1, 136, [(64, 40), (32, 16), (32, 24)], torch.float16, 2e-3)
    check_parts(1, 72, [(48, 300), (97, 24)], torch.float32, 1e-6)
    check_parts(1, 72, [(56, 40), (56, 64)], torch.float32, 1e-6, gated=True)
"""
BUILT = """
import re
import triton
from triton.backends.compiler import GPUTarget
from benchmarks.ring_kernel import ring_kernel

def build(**given):
    usual = {"OUT_1": given["OUT"], "OUT_2": given["OUT"], "IN_1": 0, "IN_2": 0, "WIDTH": given["IN"], "NORM": False}
    values = {**usual, "RESIDUAL": True, "GATED": 0, "EARLY": True, "TILES": 3, "LINES": 64, "BUFFERS": 3, **given}
    pointers = ["x", "weight", "norm", "residual", "y"]
    types = {**dict.fromkeys(pointers, "*bf16"), "eps": "fp32", **dict.fromkeys(values, "constexpr")}
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(len(pointers))}
    source = triton.compiler.ASTSource(ring_kernel, types, values, aligned)
    options = {"num_warps": 1, "launch_pdl": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

for ptx in (
    build(IN=4096, OUT=3648, NORM=True, TILE=4, BLOCK=512),
    build(IN=1216, OUT=12288, OUT_1=4096, OUT_2=8192, WIDTH=3648, IN_1=1216, IN_2=2432, TILE=4, BLOCK=256),
    build(IN=1216, OUT=11008, GATED=1, WIDTH=2432, IN_1=1216, TILE=4, BLOCK=256),
):
    ahead, after = ptx.split("griddepcontrol.wait", 1)
    assert len(re.findall("cp.async.*commit_group", ahead)) >= 3, ptx
    assert "cp.async.cg.shared.global" in ahead and "ld.global.v4" not in ahead, ptx
    assert "ld.global.v4" in after and "st.global" in after, ptx
"""


@pytest.mark.parametrize(
    ("outputs", "inputs", "begins", "matrices", "sizes"),
    [
        (3648, 4096, [], 1, (4, 512, 1, 3)),
        (12288, 1216, [4096, 8192], 1, (4, 256, 3, 6)),
        (11008, 1216, [], 2, (4, 256, 3, 3)),
        (6145, 592, [2049, 4097], 1, (1, 1024, 6, 6)),
        (64, 24, [32], 1, (1, 32, 1, 1)),
    ],
)
def test_rings_are_full_and_all_programs_have_as_much_to_do(
    outputs: int,
    inputs: int,
    begins: list[int],
    matrices: int,
    sizes: tuple[int, int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ring, "RING", 12_288)
    monkeypatch.setattr(ring, "WARPS", 1)
    tile, block, tiles, buffers = found = ring_sizes(outputs, inputs, begins, 1056, matrices)
    assert found == sizes
    assert -(-outputs // tile) <= 1056 * tiles
    assert tile * block * matrices * buffers * 2 <= 12_288


@pytest.mark.nightly
@needs_interpreter
def test_the_interpreted_ring_computes_the_same() -> None:
    run_interpreted(WITH_A_RING)


@pytest.mark.nightly
@needs_interpreter
def test_not_interpreted_a_ring_is_filled_before_the_wait_and_the_row_read_after_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    run_interpreted(BUILT, interpret=False)
