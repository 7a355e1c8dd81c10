"""Attention of one token: what the kernel computes, writes and counts, in Triton's interpreter; where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from factorized.nn import one_token
from factorized.nn.one_token import attend_token, counters, has_kernel, span_count
from tests.interpreted import needs_interpreter, run_interpreted

INTERPRETED = """
import torch
from factorized.nn import one_token
from tests.nn.test_one_token import check, check_repeated, check_sequence, draw
for dtype, most in ((torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)):
    check(1, 4, 4, 16, 24, 7, dtype, most)
one_token.ELEMENTS = 512  # 8 or 16 positions a block
for programs in (128, 8, 1):  # so many spans, several blocks in each, and one span
    one_token.PROGRAMS = programs
    for held in (0, 1, 7, 8, 9, 31, 49):
        check(1, 2, 2, 64, 50, held, torch.float32, 1e-6)
    check(1, 6, 2, 32, 70, 67, torch.float32, 1e-6)  # grouped queries
    check(1, 6, 2, 32, 70, 67, torch.float32, 1e-6, norm=True)
    check(3, 4, 2, 32, 70, 40, torch.float32, 1e-6, norm=True, padded=True)
    check_repeated(2, 4, 2, 32, 70, 60, torch.bfloat16)
    check_sequence(2, 4, 2, 32, 20, torch.float32, 1e-6)
check(1, 2, 2, 32, 20, 20, torch.float32, 1e-6)  # the cache is full
check(1, 2, 2, 32, 20, 9, torch.float32, 1e-6, counted=False)
given = draw(2, 4, 2, 32, 20, 9, torch.float32)
torch.library.opcheck(one_token.attend_token, tuple(given.values()), test_utils=("test_schema", "test_faketensor"))
"""


def draw(
    sequences: int,
    heads: int,
    groups: int,
    size: int,
    positions: int,
    held: int,
    dtype: torch.dtype,
    *,
    norm: bool = False,
    padded: bool = False,
    counted: bool = True,
) -> dict[str, Any]:
    """Return arguments of ``attend_token`` with a cache that holds some tokens, and old values after them."""
    torch.manual_seed(0)
    mask = (torch.arange(positions) <= held).expand(sequences, 1, 1, positions)
    if padded:  # on the left, by another length each
        mask = mask & (torch.arange(positions) >= torch.arange(sequences)[:, None] * held // 3)[:, None, None]
    angle = torch.randn(1, 1, size // 2).repeat(1, 1, 2)
    stored = torch.randn(2, sequences, groups, positions, size).to(dtype)
    weights = [(torch.rand(size) + 0.5).to(dtype) if norm else None for _ in range(2)]
    length = torch.tensor(held)
    return {
        "qkv": torch.randn(sequences, (heads + 2 * groups) * size).to(dtype),
        "cos": angle.cos().to(dtype),
        "sin": angle.sin().to(dtype),
        "keys": stored[0],
        "values": stored[1],
        "length": length if counted else None,
        "position": None if counted else length,
        "mask": mask,
        "arrived": counters(heads, mask.device),
        "scale": size**-0.5,
        "query_norm": weights[0],
        "key_norm": weights[1],
        "eps": 1e-5,
    }


def compute(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return, in float64, the attention, and the cache with the token if there is place for it."""
    exact = {name: value.double() if isinstance(value, Tensor) else value for name, value in given.items()}
    keys, values, qkv = exact["keys"].clone(), exact["values"].clone(), exact["qkv"]
    sequences, groups, positions, size = keys.shape
    held = int(given["position"] if given["length"] is None else given["length"])
    states = qkv.view(sequences, -1, size)
    query, key, value = states.split([states.shape[1] - 2 * groups, groups, groups], 1)
    if exact["query_norm"] is not None:
        query = F.rms_norm(query, (size,), exact["query_norm"], exact["eps"])
        key = F.rms_norm(key, (size,), exact["key_norm"], exact["eps"])
    query, key = (x * exact["cos"] + turned(x) * exact["sin"] for x in (query, key))
    if held < positions:
        keys[:, :, held], values[:, :, held] = key, value
    attended = F.scaled_dot_product_attention(
        query[:, :, None], keys, values, given["mask"], scale=exact["scale"], enable_gqa=True
    )
    return attended[:, :, 0].flatten(1), keys, values


def attend_plainly(*given: Any) -> Tensor:
    """Do what ``attend_token`` does by plain torch."""
    names = draw(1, 1, 1, 16, 1, 0, torch.float32)
    named = dict(zip(names, given, strict=True))
    y, keys, values = compute(named)
    named["keys"].copy_(keys)
    named["values"].copy_(values)
    if named["length"] is not None:
        named["length"] += 1
    return y.to(named["qkv"].dtype)


def turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def check(
    sequences: int,
    heads: int,
    groups: int,
    size: int,
    positions: int,
    held: int,
    dtype: torch.dtype,
    most: float,
    **how: bool,
) -> None:
    """Compare what is computed and written to float64; nothing else of the cache may change."""
    given = draw(sequences, heads, groups, size, positions, held, dtype, **how)
    wanted, before = compute(given), (given["keys"].clone(), given["values"].clone())
    close(attend_token(**given), wanted[0], most)
    others = torch.arange(positions, device=given["mask"].device) != held
    for name, expected, old in zip(("keys", "values"), wanted[1:], before, strict=True):
        close(given[name], expected, most)
        assert torch.equal(given[name][:, :, others], old[:, :, others])
    assert given["arrived"].count_nonzero() == 0
    length = given["position"] if given["length"] is None else given["length"]
    assert length == held + (given["length"] is not None)


def check_repeated(
    sequences: int, heads: int, groups: int, size: int, positions: int, held: int, dtype: torch.dtype, times: int = 3
) -> None:
    """Compare the bits of the same call, made several times."""
    given = draw(sequences, heads, groups, size, positions, held, dtype, counted=False)
    first, *others = [attend_token(**given) for _ in range(times)]
    assert all(torch.equal(first, other) for other in others)


def check_sequence(
    sequences: int, heads: int, groups: int, size: int, positions: int, dtype: torch.dtype, most: float
) -> None:
    """Compare tokens, each of which sees those before it and itself, to float64, until the cache is full."""
    given = draw(sequences, heads, groups, size, positions, 0, dtype)
    places = torch.arange(positions, device=given["mask"].device)
    for held in range(positions):
        given["mask"] = (places <= held).expand(sequences, 1, 1, positions)
        given["qkv"] = torch.randn_like(given["qkv"])
        wanted = compute(given)[0]
        close(attend_token(**given), wanted, most)


def close(actual: Tensor, wanted: Tensor, most: float) -> None:
    assert actual.shape == wanted.shape
    assert (actual.double() - wanted).norm() < most * wanted.norm()


@pytest.mark.nightly
@needs_interpreter
def test_the_interpreted_kernel_computes_writes_and_counts() -> None:
    run_interpreted(INTERPRETED)


def states(**how: Any) -> dict[str, Any]:
    """Return what ``has_kernel`` is asked about, of two sequences with two heads."""
    given = draw(2, 2, 2, 32, 20, 9, torch.float32)
    return {name: given[name] for name in ("qkv", "keys", "values", "mask")} | how


def test_there_is_a_kernel_for_a_static_cache_and_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_kernel(**states())  # on a CPU
    monkeypatch.setattr(one_token, "can_launch", lambda x: True)
    assert has_kernel(**states())


@pytest.mark.parametrize(
    "how",
    [
        {"qkv": torch.randn(4, 192)},  # two tokens of each sequence
        {"mask": None},
        {"mask": torch.zeros(2, 1, 1, 20)},  # added to scores
        {"mask": torch.ones(2, 1, 1, 19, dtype=torch.bool)},
        {"mask": torch.ones(1, 1, 1, 20, dtype=torch.bool)},
        {"keys": torch.randn(2, 2, 32, 20).mT},  # a copy would be written
        {"values": torch.randn(2, 2, 20, 16)},
        {"qkv": torch.randn(2, 192).half()},
        {"qkv": torch.randn(2, 192, requires_grad=True)},
        {"keys": torch.randn(2, 2, 20, 24), "values": torch.randn(2, 2, 20, 24), "qkv": torch.randn(2, 144)},
    ],
)
def test_there_is_none_for_others(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_token, "can_launch", lambda x: True)
    assert not has_kernel(**states(**how))


def test_there_is_none_for_more_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_token, "can_launch", lambda x: True)
    monkeypatch.setattr(one_token, "SEQUENCES", 1)
    assert not has_kernel(**states())


@pytest.mark.parametrize(
    ("rows", "sequences", "positions", "spans"),
    [
        *((16, 1, 512, 8), (32, 1, 512, 4), (12, 1, 512, 8), (4, 1, 512, 16), (4, 1, 300, 16), (4, 1, 20, 1)),
        *((128, 8, 512, 4), (256, 8, 512, 2), (300, 1, 4096, 1)),
    ],
)
def test_programs_are_about_as_many_as_processors_and_spans_no_more_than_blocks(
    rows: int, sequences: int, positions: int, spans: int
) -> None:
    assert span_count(rows, sequences, positions, 32) == spans
