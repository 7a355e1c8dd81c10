from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from factorized._torch import on_one_device, without_autocast
from factorized.formats import frobenius
from factorized.formats.frobenius import (
    compose,
    frobenius_gradients,
    frobenius_norm_squared,
    product_is_cheaper,
)

# (m, n, rank): below, the ways to the norm and to the gradients that are cheaper there
BY_GRAMS = [(20, 30, 3), (30, 20, 4), (11, 7, 1)]
BY_PRODUCT = [(6, 4, 9), (4, 6, 8), (5, 7, 13)]


def factors(m: int, n: int, rank: int, depth: int, batch: tuple[int, ...] = ()) -> list[Tensor]:
    """Return U, V and the inner matrices, as leaves that want gradients."""
    generator = torch.Generator().manual_seed(m * n + rank)
    shapes = [(m, rank), (n, rank)] + [(rank, rank)] * depth
    return [
        (torch.randn(*batch, *shape, generator=generator, dtype=torch.float64) / rank**0.5).requires_grad_()
        for shape in shapes
    ]


def chain(U: Tensor, V: Tensor, *inner: Tensor) -> Tensor:
    return torch.linalg.multi_dot([U, *inner, V.mT]) if U.dim() == 2 else _batched_chain(U, V, *inner)


def _batched_chain(U: Tensor, V: Tensor, *inner: Tensor) -> Tensor:
    members = [chain(*parts) for parts in zip(*(t.flatten(0, -3) for t in (U, V, *inner)), strict=True)]
    return torch.stack(members).view(*U.shape[:-2], U.shape[-2], V.shape[-2])


def close(actual: Tensor, expected: Tensor) -> bool:
    return actual.shape == expected.shape and bool((actual - expected).norm() <= 1e-10 * expected.norm())


class Sizes(TorchFunctionMode):
    """Collect the trailing two extents of every tensor that torch returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.seen.add(tuple(result.shape[-2:]))
        return result


def forms_the_product(function: Any, U: Tensor, V: Tensor, inner: list[Tensor]) -> bool:
    m, n = U.shape[-2], V.shape[-2]
    with Sizes() as sizes:
        function(U, V, inner)
    return (m, n) in sizes.seen


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize(("m", "n", "rank"), [(5, 8, 3), (8, 5, 3), (4, 4, 6), (1, 6, 2)])
def test_composing_multiplies_the_whole_chain_in_order(
    m: int, n: int, rank: int, depth: int, batch: tuple[int, ...]
) -> None:
    U, V, *inner = factors(m, n, rank, depth, batch)
    product = compose(U, V, inner)
    assert product.shape == (*batch, m, n)
    assert close(product, chain(U, V, *inner))


@pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("m", "n", "rank", "by_product"), [(*s, False) for s in BY_GRAMS] + [(*s, True) for s in BY_PRODUCT]
)
def test_norm_and_gradients_are_those_of_autograd_by_either_way(
    m: int, n: int, rank: int, by_product: bool, depth: int, batch: tuple[int, ...]
) -> None:
    U, V, *inner = leaves = factors(m, n, rank, depth, batch)
    assert forms_the_product(frobenius_norm_squared, U, V, inner) is by_product
    assert forms_the_product(frobenius_gradients, U, V, inner) is by_product

    squares = chain(*leaves).square()
    half = 0.5 * squares.sum()
    expected = torch.autograd.grad(half, leaves)
    norm = frobenius_norm_squared(U, V, inner)
    dU, dV, d_inner = frobenius_gradients(U, V, inner)
    assert norm.shape == batch
    assert close(norm, squares.sum(dim=(-2, -1)))
    assert len(d_inner) == depth
    for gradient, reference in zip((dU, dV, *d_inner), expected, strict=True):
        assert close(gradient, reference)
    for gradient, reference in zip(torch.autograd.grad(0.5 * norm.sum(), leaves), expected, strict=True):
        assert close(gradient, reference)


@pytest.mark.parametrize(
    ("m", "n", "rank", "by_product"), [(*s, False) for s in BY_GRAMS] + [(*s, True) for s in BY_PRODUCT]
)
@pytest.mark.parametrize(("left", "right"), [((2, 1), (2, 3)), ((2, 3), (2, 1))])
def test_a_matrix_in_several_products_has_the_sum_of_their_gradients_by_either_way(
    left: tuple[int, ...], right: tuple[int, ...], m: int, n: int, rank: int, by_product: bool
) -> None:
    (U, _), (_, V) = (factors(m, n, rank, 0, batch) for batch in (left, right))
    assert forms_the_product(frobenius_gradients, U, V, []) is by_product
    squares = (U @ V.mT).square()
    assert close(frobenius_norm_squared(U, V), squares.sum(dim=(-2, -1)))
    expected = torch.autograd.grad(0.5 * squares.sum(), (U, V))
    for gradient, reference in zip(frobenius_gradients(U, V)[:2], expected, strict=True):
        assert close(gradient, reference)


@settings(max_examples=60)
@given(
    m=st.integers(1, 7),
    n=st.integers(1, 7),
    rank=st.integers(1, 7),
    depth=st.integers(0, 3),
    batch=st.lists(st.integers(1, 2), max_size=2).map(tuple),
)
def test_both_ways_agree_with_autograd_whichever_is_cheaper(
    m: int, n: int, rank: int, depth: int, batch: tuple[int, ...]
) -> None:
    U, V, *inner = leaves = factors(m, n, rank, depth, batch)
    squares = chain(*leaves).square()
    expected = torch.autograd.grad(0.5 * squares.sum(), leaves)
    for by_product in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(frobenius, "product_is_cheaper", lambda *_, answer=by_product, **__: answer)
            norm = frobenius_norm_squared(U, V, inner)
            dU, dV, d_inner = frobenius_gradients(U, V, inner)
        assert close(norm, squares.sum(dim=(-2, -1)))
        for gradient, reference in zip((dU, dV, *d_inner), expected, strict=True):
            assert close(gradient, reference)


@pytest.mark.parametrize("products", [1, 3])
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize(
    ("m", "n", "rank", "cheaper"),
    [
        (512, 512, 8, False),
        (512, 4608, 100, False),
        (64, 64, 1, False),
        (192, 192, 192, True),
        (64, 576, 300, True),
        (10, 1000, 100, True),
    ],
)
def test_the_gram_way_is_for_small_ranks_and_the_product_for_large_ones(
    m: int, n: int, rank: int, cheaper: bool, depth: int, products: int
) -> None:
    assert product_is_cheaper(m, n, rank, depth, products) is cheaper
    assert product_is_cheaper(n, m, rank, depth, products) is cheaper


@pytest.mark.parametrize(
    ("depth", "products", "turn"),
    [
        (0, 1, 50),  # 100² r = 200 r² at 50
        (0, 3, 75),  # 3·100² r = 400 r² at 75
        (1, 1, 39),  # 100² r + 100 r² = 200 r² + 4 r³ at 39.04
        (1, 3, 56),  # 3·100² r + 100 r² = 400 r² + 4 r³ at 56.9
    ],
)
def test_the_product_wins_above_the_rank_that_a_hand_finds(depth: int, products: int, turn: int) -> None:
    assert not product_is_cheaper(100, 100, turn, depth, products)
    assert product_is_cheaper(100, 100, turn + 1, depth, products)


@pytest.mark.parametrize(("m", "n"), [(6, 40), (40, 6)])
def test_composing_multiplies_the_inner_matrices_into_the_shorter_factor(m: int, n: int) -> None:
    U, V, *inner = factors(m, n, 3, 2)
    with Sizes() as sizes:
        compose(U, V, inner)
    assert (6, 3) in sizes.seen
    assert (40, 3) not in sizes.seen


def test_the_gram_way_never_holds_a_tensor_larger_than_its_factors() -> None:
    U, V, *inner = factors(200, 300, 5, 2)
    for function in (frobenius_norm_squared, frobenius_gradients):
        with Sizes() as sizes:
            function(U, V, inner)
        assert max(map(prod, sizes.seen)) <= V.numel()


@pytest.mark.parametrize("kinds", [(), ("cpu",), ("cuda",), ("cpu", "cuda"), ("meta", "cpu", "cpu")])
def test_autocast_is_off_on_the_devices_that_are_named_and_on_again_after(kinds: tuple[str, ...]) -> None:
    before = {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")}
    try:
        for kind in before:
            torch.set_autocast_enabled(kind, True)
        with without_autocast(*map(torch.device, kinds)):
            assert {kind for kind in before if not torch.is_autocast_enabled(kind)} == set(kinds) - {"meta"}
        assert all(torch.is_autocast_enabled(kind) for kind in before)
    finally:
        for kind, was_on in before.items():
            torch.set_autocast_enabled(kind, was_on)


def test_numbers_are_put_side_by_side() -> None:
    assert on_one_device([torch.tensor(1.0), torch.tensor(2.0)]).tolist() == [1, 2]
