"""A few rows times matrices on a GPU: the results of float64, to the precision of the type, in graphs too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import factorized as fz
from factorized.nn import few_rows, one_row
from factorized.nn.one_row import multiply
from factorized.nn.timing import capture
from tests.integrations.test_decoding import CONFIGS, build
from tests.nn.test_one_row import check_feed_forward, check_parts
from tests.on_gpu import needs_cuda

pytestmark = needs_cuda


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(few_rows, "MOST", 8)
    with torch.device("cuda"):
        yield


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_the_kernels_compute_what_torch_does(dtype: torch.dtype, most: float, rows: int) -> None:
    check_feed_forward(rows, 2048, 592, 5632, dtype, most)
    check_feed_forward(rows, 96, 40, 176, dtype, most)
    check_feed_forward(rows, 96, 19, 176, dtype, most)  # less than a line of the cache
    check_parts(rows, 4096, [(4096, 1024), (1024, 408), (1024, 416)], dtype, most)
    check_parts(rows, 2101, [(48, 24), (97, 711)], dtype, most)
    check_parts(rows, 4096, [(11008, 1184), (11008, 1180)], dtype, most, gated=True)


@pytest.mark.parametrize(
    "constants",
    [
        {"BLOCK": 512},
        {"BLOCK": 512, "PROGRAMS": 4, "REGISTERS": 128},
        {"PROGRAMS": 4, "REGISTERS": 128},
        {"WARPS": 8, "PROGRAMS": 4, "BLOCK": 4096},
    ],
)
def test_it_does_with_other_constants(constants: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in constants.items():
        monkeypatch.setattr(one_row, name, value)
    check_feed_forward(1, 4096, 1216, 11008, torch.bfloat16, 1e-2)
    check_parts(1, 4096, [(4096, 1216)] * 3, torch.bfloat16, 1e-2)


@pytest.mark.parametrize(
    "constants",
    [
        {"PROGRAMS": 1},
        {"PROGRAMS": 4, "WARPS": 4},
        {"PROGRAMS": 1, "WARPS": 16},
        {"PROGRAMS": 1, "LOADS": 16, "REGISTERS": 255},
        {"TALLEST": 1},
    ],
)
def test_several_rows_have_the_same_results_with_other_constants(
    constants: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in constants.items():
        monkeypatch.setattr(few_rows, name, value)
    check_feed_forward(8, 4096, 1216, 11008, torch.bfloat16, 1e-2)
    check_parts(8, 4096, [(4096, 1216)] * 3, torch.bfloat16, 1e-2)


@pytest.mark.parametrize("rows", [1, 8])
def test_captured_products_can_be_replayed(rows: int) -> None:
    x = torch.randn(rows, 2048, dtype=torch.bfloat16)
    matrices = [torch.randn(2048, 2048, dtype=torch.bfloat16) / 45 for _ in range(20)]
    results: list[Tensor] = []

    def step() -> None:
        y = x
        for matrix in matrices:  # each starts while the one before still runs
            y = multiply(y, matrix)
        results[:] = [y]

    replay = capture(step)
    for _ in range(20):
        x.normal_()
        replay()
        wanted = x.double()
        for matrix in matrices:
            wanted = wanted @ matrix.double().mT
        assert (results[0].double() - wanted).norm() < 0.03 * wanted.norm()


def test_other_types_and_more_rows_are_computed_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_row, "multiply_row", None)
    monkeypatch.setattr(few_rows, "multiply_rows", None)
    check_feed_forward(1, 96, 40, 176, torch.float32, 1e-5)
    check_feed_forward(8, 96, 40, 176, torch.float32, 1e-5)
    check_feed_forward(9, 96, 40, 176, torch.bfloat16, 2e-2)


@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler says what might be faster
@pytest.mark.parametrize("sequences", [1, 8])
def test_a_fused_decoder_gives_the_logits_of_the_model_compiled_too(sequences: int) -> None:
    model = build(CONFIGS["llama"](), 0.6).cuda().bfloat16()
    x = torch.randint(0, 100, (sequences, 1))
    wanted = model(x, use_cache=False).logits.float()
    fused = fz.integrations.fuse_decoder(model)
    for run in (fused, torch.compile(fused, fullgraph=True, dynamic=False)):
        found = run(x, use_cache=False).logits.float()
        assert (found - wanted).norm() < 0.02 * wanted.norm()
