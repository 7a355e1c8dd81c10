"""Attention of one token on a GPU: the results of float64, the same bits each time, in graphs and compiled too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from factorized.integrations import decoding
from factorized.nn import one_token
from factorized.nn.one_row import multiply
from factorized.nn.one_token import attend_token
from factorized.nn.timing import capture
from tests.integrations.test_decoding import CONFIGS
from tests.integrations.test_decoding_attention import LAYERS, both, decode
from tests.nn.test_one_token import check, check_repeated, check_sequence, compute, draw
from tests.on_gpu import needs_cuda

pytestmark = needs_cuda


@pytest.fixture(autouse=True)
def on_the_gpu() -> Iterator[None]:
    with torch.device("cuda"):
        yield


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_the_kernel_computes_what_float64_does(dtype: torch.dtype, most: float) -> None:
    for held in (0, 1, 31, 32, 33, 255, 256, 257, 511):
        check(1, 16, 16, 128, 512, held, dtype, most)
    check(1, 32, 32, 128, 512, 500, dtype, most)
    check(1, 32, 8, 128, 700, 699, dtype, most, norm=True)  # grouped queries
    check(1, 6, 2, 64, 333, 200, dtype, most)
    check(1, 4, 2, 256, 100, 77, dtype, most)
    check(1, 4, 2, 16, 1000, 990, dtype, most)
    check(1, 16, 16, 128, 9000, 8765, dtype, most)
    check(8, 16, 16, 128, 512, 300, dtype, most, padded=True)
    check(3, 12, 4, 64, 512, 300, dtype, most, norm=True, padded=True)
    check(1, 2, 2, 128, 64, 64, dtype, most)  # the cache is full


@pytest.mark.parametrize(
    "constants",
    [{"WARPS": 8}, {"ELEMENTS": 2048, "PROGRAMS": 256}, {"ELEMENTS": 8192, "WARPS": 8}, {"PROGRAMS": 16}],
)
def test_it_does_with_other_constants(constants: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in constants.items():
        monkeypatch.setattr(one_token, name, value)
    check(1, 16, 16, 128, 512, 300, torch.bfloat16, 1e-2)
    check(8, 32, 8, 128, 512, 300, torch.bfloat16, 1e-2, norm=True)


def test_it_gives_the_same_bits_each_time() -> None:
    check_repeated(1, 16, 16, 128, 512, 400, torch.bfloat16, times=200)
    check_repeated(8, 8, 2, 128, 512, 400, torch.float16, times=50)


def test_tokens_see_those_that_were_written_just_before() -> None:
    check_sequence(1, 16, 4, 128, 150, torch.bfloat16, 1e-2)


def test_a_captured_layer_can_be_replayed() -> None:
    heads, size, positions, layers = 16, 128, 100, 8
    width = heads * size
    into = [torch.randn(3 * width, width, dtype=torch.bfloat16) / width**0.5 for _ in range(layers)]
    back = [torch.randn(width, width, dtype=torch.bfloat16) / width**0.5 for _ in range(layers)]
    states = [draw(1, heads, heads, size, positions, 0, torch.bfloat16) for _ in range(layers)]
    mask = torch.zeros(1, 1, 1, positions, dtype=torch.bool)
    x, seen, results = torch.randn(1, width, dtype=torch.bfloat16), [], []

    def step() -> None:
        y = x
        seen[:], results[:] = [], []
        for state, first, second in zip(states, into, back, strict=True):  # each starts while the one before still runs
            qkv = multiply(y, first)
            attended = attend_token(**{**state, "qkv": qkv, "mask": mask})
            y = multiply(attended, second)
            seen.append(qkv)
            results.append((attended, y))

    replay = capture(step)
    for state in states:
        state["length"].zero_()
    for held in range(positions):
        x.normal_()
        mask[..., : held + 1] = True
        caches = [(state["keys"].clone(), state["values"].clone()) for state in states]
        replay()
        for state, qkv, (keys, values), (attended, y), second in zip(states, seen, caches, results, back, strict=True):
            before = {**state, "qkv": qkv, "mask": mask, "keys": keys, "values": values, "length": torch.tensor(held)}
            wanted = compute(before)
            assert int(state["length"]) == held + 1
            near(attended, wanted[0])
            near(state["keys"], wanted[1])
            near(state["values"], wanted[2])
            near(y, attended.double() @ second.double().mT)


def near(actual: Tensor, wanted: Tensor) -> None:
    assert (actual.double() - wanted).norm() < 0.01 * wanted.norm()


@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler says what might be faster
@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_fused_decoder_decodes_what_the_model_does(
    name: str, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, fused = (which.cuda().bfloat16() for which in both(name))
    calls = []
    monkeypatch.setattr(decoding, "attend_token", lambda *given: calls.append(given) or attend_token(*given))
    decode(model, fused, sequences, 5, most=0.03)
    assert len(calls) == 5 * LAYERS


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_it_does_compiled() -> None:
    model, fused = (which.cuda().bfloat16() for which in both("llama"))
    decode(model, fused, 1, 5, most=0.03, run=torch.compile(fused, fullgraph=True, dynamic=False))
