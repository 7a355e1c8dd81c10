from __future__ import annotations

import pytest
import torch
from torch import Tensor

from factorized.formats.svd import spectral_factors, squared_singular_values, truncated_svd
from tests.rounding import rounding_products, setting

METHODS = ["exact", "gram", "randomized"]


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def with_spectrum(m: int, n: int, values: Tensor) -> Tensor:
    """Return a random m×n matrix with exactly these singular values."""
    left = torch.linalg.qr(gaussian(m, len(values), seed=1)).Q
    right = torch.linalg.qr(gaussian(n, len(values), seed=2)).Q
    return (left * values) @ right.mT


def relative_error(W: Tensor, U: Tensor, V: Tensor) -> float:
    return float((W - U @ V.mT).norm() / W.norm())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (1, 6), (9, 9), (17, 8), (8, 17), (3, 6, 5), (2, 3, 5, 6)])
def test_the_product_of_full_rank_factors_is_the_matrix(shape: tuple[int, ...], method: str) -> None:
    W = gaussian(*shape)
    rank = min(shape[-2:])
    U, V = spectral_factors(W, rank, method)
    assert U.shape == (*shape[:-1], rank)
    assert V.shape == (*shape[:-2], shape[-1], rank)
    torch.testing.assert_close(U @ V.mT, W, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rank", [1, 5, 12])
def test_both_factors_have_the_diagonal_gram_matrix_of_the_singular_values(rank: int, method: str) -> None:
    W = with_spectrum(20, 12, torch.linspace(12, 1, 12, dtype=torch.float64) ** 3)
    U, V = spectral_factors(W, rank, method)
    sigma = torch.diag(torch.linalg.svdvals(W)[:rank])
    torch.testing.assert_close(U.mT @ U, sigma, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(V.mT @ V, sigma, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("rank", [1, 4, 9])
def test_the_error_of_the_exact_way_is_the_tail_of_the_singular_values(rank: int) -> None:
    values = torch.tensor([9.0, 8, 7, 5, 4, 3, 2.5, 1, 0.5, 0.25], dtype=torch.float64)
    W = with_spectrum(14, 11, values)
    U, S, V = truncated_svd(W, rank, "exact")
    torch.testing.assert_close(S, values[:rank], rtol=1e-12, atol=0)
    error = (W - (U * S) @ V.mT).square().sum()
    torch.testing.assert_close(error, values[rank:].square().sum(), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize(("shape", "rank"), [((512, 384), 32), ((384, 512), 32), ((256, 2304), 64), ((2304, 256), 85)])
def test_the_randomized_error_on_a_flat_spectrum_is_within_half_a_percent_of_the_optimum(
    shape: tuple[int, int], rank: int, seed: int
) -> None:
    W = gaussian(*shape, seed=seed, dtype=torch.float32)
    optimum = torch.linalg.svdvals(W)[rank:].norm() / W.norm()
    error = relative_error(W, *spectral_factors(W, rank, "randomized"))
    assert optimum * (1 - 1e-5) <= error <= optimum * 1.005  # plain power iterations leave 0.55 %


def test_the_randomized_error_on_a_decaying_spectrum_is_the_optimum() -> None:
    values = 0.9 ** torch.arange(200, dtype=torch.float64)
    W = with_spectrum(300, 280, values)
    optimum = float(values[32:].norm() / values.norm())
    error = relative_error(W, *spectral_factors(W, 32, "randomized"))
    assert optimum * (1 - 1e-10) <= error <= optimum * (1 + 1e-6)


@pytest.mark.parametrize(("shape", "rank"), [((300, 280), 6), ((280, 300), 6), ((300, 280), 20), ((40, 30), 25)])
def test_a_matrix_of_rank_six_is_recovered_by_the_randomized_way(shape: tuple[int, int], rank: int) -> None:
    W = gaussian(shape[0], 6) @ gaussian(6, shape[1], seed=1)
    assert relative_error(W, *spectral_factors(W, rank, "randomized")) < 1e-12


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch", [(3,), (2, 2)])
def test_a_batch_gives_what_its_matrices_give_one_at_a_time(batch: tuple[int, ...], method: str) -> None:
    # The members differ in scale, so that a shift or a norm shared by the batch would show.
    W = gaussian(*batch, 40, 30)
    W = W * torch.logspace(-2, 2, W[..., 0, 0].numel(), dtype=torch.float64).view(*batch, 1, 1)
    for rank in (5, 33):
        U, V = spectral_factors(W, rank, method)
        alone = [spectral_factors(member, rank, method) for member in W.flatten(0, -3)]
        torch.testing.assert_close(U.flatten(0, -3), torch.stack([u for u, _ in alone]), rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(V.flatten(0, -3), torch.stack([v for _, v in alone]), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_computed_in_float32_and_only_factors_are_rounded_back(dtype: torch.dtype, method: str) -> None:
    W = gaussian(24, 18, dtype=dtype)
    for rank in (6, 20):
        factors = spectral_factors(W, rank, method)
        for factor, reference in zip(factors, spectral_factors(W.float(), rank, method), strict=True):
            assert factor.dtype == dtype
            assert torch.equal(factor, reference.to(dtype))
    for part, reference in zip(truncated_svd(W, 6, method), truncated_svd(W.float(), 6, method), strict=True):
        assert part.dtype == torch.float32
        assert torch.equal(part, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_types_keep_their_type(dtype: torch.dtype) -> None:
    W = gaussian(12, 10, dtype=dtype)
    for method in METHODS:
        assert {part.dtype for part in truncated_svd(W, 4, method)} == {dtype}
        assert {part.dtype for part in spectral_factors(W, 12, method)} == {dtype}


@pytest.mark.parametrize(("rank", "method"), [(4, "exact"), (4, "randomized"), (30, "exact"), (30, "randomized")])
def test_torchs_random_state_neither_moves_nor_matters(rank: int, method: str) -> None:
    W = gaussian(30, 20)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        before = torch.get_rng_state()
        first = spectral_factors(W, rank, method)
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(2)
        second = spectral_factors(W, rank, method)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("shape", "rank", "method"),
    [
        ((64, 48), 2, "exact"),  # small
        ((400, 200), 2, "gram"),  # small on one side
        ((300, 280), 120, "gram"),  # a rank too large to save anything
        ((280, 300), 70, "gram"),  # a quarter of the full rank: less than twice as fast
        ((300, 280), 4, "randomized"),
        ((280, 400), 16, "randomized"),
        ((2800, 280), 16, "gram"),  # so long that products with it take longer than its Gram matrix
        ((300, 280), 250, "exact"),  # nearly full rank
    ],
)
def test_auto_takes_the_randomized_way_only_where_it_is_much_faster(
    shape: tuple[int, int], rank: int, method: str
) -> None:
    W = gaussian(*shape, dtype=torch.float32)
    S = truncated_svd(W, rank)[1]
    assert [one for one in METHODS if torch.equal(S, truncated_svd(W, rank, one)[1])] == [method]


def test_auto_keeps_all_digits_of_float64() -> None:
    W = gaussian(200, 160)
    assert torch.equal(truncated_svd(W, 40)[1], truncated_svd(W, 40, "exact")[1])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("shape", "rank"), [((6, 4), 5), ((4, 6), 12), ((3, 5, 5), 8)])
def test_above_full_rank_the_product_stays_and_only_v_has_surplus_columns(
    shape: tuple[int, ...], rank: int, method: str
) -> None:
    W = gaussian(*shape)
    kept = min(shape[-2:])
    U, V = spectral_factors(W, rank, method)
    assert (U.shape[-1], V.shape[-1]) == (rank, rank)
    torch.testing.assert_close(U @ V.mT, W, rtol=1e-12, atol=1e-12)
    assert (U[..., kept:] == 0).all()
    assert (V[..., kept:] != 0).all()


def test_surplus_columns_of_v_are_about_as_long_as_the_smallest_kept_one() -> None:
    W = with_spectrum(400, 400, torch.linspace(9, 4, 400, dtype=torch.float64))
    lengths = spectral_factors(W, 420, "exact")[1][:, 400:].norm(dim=0)
    assert ((lengths > 2 * 0.8) & (lengths < 2 * 1.2)).all()  # √4 is the smallest


def test_surplus_columns_of_v_can_learn_even_if_the_smallest_kept_one_is_zero() -> None:
    W = gaussian(6, 4)
    W[:, 3] = 0
    U, V = spectral_factors(W, 7, "exact")
    torch.testing.assert_close(U @ V.mT, W, rtol=1e-12, atol=1e-12)
    assert (V[:, 4:].norm(dim=0) > 1e-5).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rank", [3, 6])
def test_a_zero_matrix_stays_zero_and_can_learn(rank: int, method: str) -> None:
    other = gaussian(5, 4)
    U, V = spectral_factors(torch.stack([torch.zeros_like(other), other]), rank, method)
    assert (U[0] == 0).all()
    assert ((V[0].norm(dim=0) > 0.1) & (V[0].norm(dim=0) < 3)).all()
    alone = spectral_factors(other, rank, method)
    torch.testing.assert_close(U[1] @ V[1].mT, alone[0] @ alone[1].mT)


def test_a_decomposition_that_does_not_converge_in_float32_is_done_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.linalg.svd

    def fails_in_float32(W: Tensor, full_matrices: bool) -> tuple[Tensor, Tensor, Tensor]:
        if W.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        return real(W, full_matrices=full_matrices)

    monkeypatch.setattr(torch.linalg, "svd", fails_in_float32)
    W = gaussian(8, 6, dtype=torch.float32)
    U, V = spectral_factors(W, 6, "exact")
    assert (U.dtype, V.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(U @ V.mT, W)


@pytest.mark.parametrize(
    ("W", "rank", "method", "message"),
    [
        (torch.ones(6, 4), 0, "exact", r"rank must be in 1\.\.4 for a 6x4 matrix, got 0"),
        (torch.ones(6, 4), -2, "auto", r"rank must be in 1\.\.4 for a 6x4 matrix, got -2"),
        (torch.ones(6, 4), 5, "randomized", r"rank must be in 1\.\.4 for a 6x4 matrix, got 5"),
        (torch.ones(2, 3, 9), 4, "auto", r"rank must be in 1\.\.3 for a 3x9 matrix, got 4"),
        (torch.tensor([[1.0, float("nan")]]), 1, "auto", "NaN or infinite"),
        (torch.tensor([[1.0, float("inf")]]), 1, "exact", "NaN or infinite"),
        (torch.tensor([[1.0, -float("inf")]]).half(), 1, "randomized", "NaN or infinite"),
        (torch.ones(6, 4, device="meta"), 2, "auto", "meta device.*real device"),
        (
            torch.ones(6, 4),
            2,
            "lanczos",
            r'method must be one of "auto", "exact", "gram", "randomized", got \'lanczos\'',
        ),
    ],
)
def test_a_wrong_decomposition_says_what_is_allowed(W: Tensor, rank: int, method: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        truncated_svd(W, rank, method)


@pytest.mark.parametrize(
    ("W", "rank", "message"),
    [
        (torch.ones(6, 4), 0, r"rank must be in 1\.\.4 for a 6x4 matrix, got 0"),
        (torch.full((6, 4), float("nan")), 9, "NaN or infinite"),
        (torch.ones(6, 4, device="meta"), 9, "meta device"),
    ],
)
def test_wrong_spectral_factors_say_what_is_allowed(W: Tensor, rank: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spectral_factors(W, rank)


@pytest.mark.parametrize("method", ["gram", "randomized"])
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
def test_weights_may_have_any_scale(scale: float, method: str) -> None:
    W = torch.randn(64, 48, generator=torch.Generator().manual_seed(3))
    expected, S, _ = truncated_svd(W, 8, method)
    U, scaled, _ = truncated_svd(W * scale, 8, method)
    torch.testing.assert_close(scaled / scale, S, rtol=1e-4, atol=0)
    torch.testing.assert_close(U.abs(), expected.abs(), rtol=0, atol=1e-3)


SPECTRA = {
    "random": torch.linspace(1.9, 0.05, 160, dtype=torch.float64),
    "outliers": torch.cat([torch.tensor([60.0, 30.0, 20.0]), torch.linspace(1.9, 0.05, 157)]).double(),
    "power law": torch.arange(1, 161, dtype=torch.float64) ** -0.7,
    "exponential": 0.9 ** torch.arange(160, dtype=torch.float64),
    "fast": 0.5 ** torch.arange(160, dtype=torch.float64),
    "rank 20": torch.cat([torch.linspace(3, 1, 20), torch.zeros(140)]).double(),
    "one": torch.cat([torch.ones(1), torch.zeros(159)]).double(),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e15])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_gram_matrix_gives_the_digits_of_float32(spectrum: str, scale: float, transposed: bool) -> None:
    values, rank = SPECTRA[spectrum], 40
    W = with_spectrum(200, 160, values)
    W = W.mT if transposed else W
    U, S, V = (part.double() for part in truncated_svd((W * scale).float(), rank, "gram"))
    S = S / scale
    torch.testing.assert_close(S, values[:rank], rtol=2e-6, atol=2e-6 * float(values[0]))
    for vectors in (U, V):
        assert (vectors.mT @ vectors - torch.eye(rank)).abs().max() < 2e-5
    error = float((W - (U * S) @ V.mT).norm())
    least = float(values[rank:].norm())
    assert error <= least * (1 + 1e-6) + 3e-6 * float(values.norm())


@pytest.mark.parametrize("spectrum", ["random", "power law"])
def test_the_gram_matrix_gives_the_true_product_where_the_randomized_way_gives_one_as_near(spectrum: str) -> None:
    values, rank = SPECTRA[spectrum], 40
    W = with_spectrum(200, 160, values)
    U, S, V = truncated_svd(W, rank, "exact")
    best = (U * S) @ V.mT
    gram, randomized = (
        (U * S) @ V.mT for U, S, V in (truncated_svd(W.float(), rank, one) for one in ("gram", "randomized"))
    )
    assert (gram - best).norm() < 2e-5 * best.norm()
    assert (randomized - best).norm() > 0.01 * best.norm()  # the price that the card names
    assert (W - randomized).norm() < 1.005 * (W - best).norm()


def test_one_matrix_of_a_batch_that_the_gram_matrix_does_not_resolve_is_decomposed_exactly() -> None:
    W = torch.stack([with_spectrum(200, 160, SPECTRA[name]) for name in ("random", "fast", "random")]).float()
    U, S, V = truncated_svd(W, 40, "gram")
    for place, method in enumerate(("gram", "exact", "gram")):
        alone = truncated_svd(W[place], 40, method)
        torch.testing.assert_close(S[place], alone[1], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close((U * S.unsqueeze(-2) @ V.mT)[place], (alone[0] * alone[1]) @ alone[2].mT)


def test_an_eigendecomposition_that_does_not_converge_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(matrix: Tensor) -> tuple[Tensor, Tensor]:
        raise torch.linalg.LinAlgError("did not converge")

    W = gaussian(20, 16, dtype=torch.float32)
    expected = truncated_svd(W, 4, "exact")
    monkeypatch.setattr(torch.linalg, "eigh", fails)
    for part, reference in zip(truncated_svd(W, 4, "gram"), expected, strict=True):
        assert torch.equal(part, reference)


@pytest.mark.parametrize("method", ["gram", "randomized"])
def test_products_that_the_user_lets_torch_round_do_not_matter(method: str) -> None:
    W = gaussian(300, 280, dtype=torch.float32)
    with setting(lambda: torch.set_float32_matmul_precision("medium")), rounding_products():
        rounded = truncated_svd(W, 40, method)
    with torch.autocast("cpu", torch.bfloat16):
        cast = truncated_svd(W, 40, method)
    for U, S, V in (rounded, cast):
        assert (U.dtype, S.dtype, V.dtype) == (torch.float32,) * 3
        torch.testing.assert_close(W @ V, U * S, rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", [(300, 200), (2, 200, 300), (600, 560), (40, 30)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_squared_singular_values_are_as_precise_as_asked_for(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    W = gaussian(*shape, dtype=dtype)
    W = W * 1e12 if dtype == torch.float32 else W  # whose Gram matrix is near the end of the range
    W[..., 1, :] = W[..., 0, :]  # the smallest one is zero
    expected = torch.linalg.svdvals(W.double()).square()
    for precise, tolerance in ((True, 1e-13), (False, 1e-5)):
        found = squared_singular_values(W, precise=precise)
        assert found.dtype == torch.float64
        tolerance = 1e-6 if shape == (40, 30) and dtype != torch.float64 else tolerance  # an SVD in float32
        assert ((found - expected).abs() <= tolerance * expected[..., :1]).all()
        assert (found[..., :-1] >= found[..., 1:]).all()
