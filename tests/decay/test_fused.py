"""The decay's kernels, by Triton's interpreter; and, without kernels, how their work is cut and what they are given."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from ctypes import c_float
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.decay import engine, fused
from factorized.decay.fused import MOST, TILES, Fused, Products, Tiles, _cut_grams, _cut_products, _last_place
from factorized.decay.plain import Plain
from factorized.decay.strength import Number
from tests.interpreted import needs_interpreter, run_interpreted
from tests.on_gpu import decayed_gradients

SHAPES = [(192, 9), (65, 16), (64, 17), (3, 1), (130, 37), (90, 64), (66, 65), (400, 73), (90, 128)]
INTERPRETED = "from tests.decay import test_fused\ntest_fused."


def drawn(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return pairs of factors of all kinds of ranks and layouts."""
    torch.manual_seed(0)
    matrices = []
    for index, (rows, rank) in enumerate([(1, 1), (129, 16), (300, 33), *SHAPES]):
        U, V = torch.randn(rows, rank).to(dtype), torch.randn(rows // 3 + 40, rank).to(dtype)
        if index % 3 == 1:
            U = U.t().contiguous().t()  # column by column
        if index % 3 == 2:
            V = torch.randn(2 * len(V), rank + 3).to(dtype)[::2, 1 : 1 + rank]
        matrices += [U, V]
    return matrices


def exact(matrices: Sequence[Tensor]) -> list[Tensor]:
    wide = [matrix.double() for matrix in matrices]
    return [
        gradient for U, V in zip(wide[::2], wide[1::2], strict=True) for gradient in (U @ (V.mT @ V), V @ (U.mT @ U))
    ]


def added_to(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return targets that hold ones, laid out like the matrices."""
    targets = [torch.empty_strided(matrix.shape, matrix.stride(), dtype=matrix.dtype) for matrix in matrices]
    return [target.fill_(1) for target in targets]


def check(targets: Sequence[Tensor], numbers: Sequence[float], wanted: Sequence[Tensor], most: float = 1e-6) -> None:
    """Compare what was added to ones."""
    for target, number, gradient in zip(targets, numbers, wanted, strict=True):
        want = 1 + number * gradient
        assert (target.double() - want).norm() <= most * want.norm(), (tuple(target.shape), target.dtype, number)


def check_gradients() -> None:
    check_all(drawn(), TILES, 1e-6)
    for dtype, most in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)):
        by_rows = [matrix.contiguous() for matrix in drawn(dtype)]
        assert Products(by_rows).by_rows
        check_all(by_rows, TILES, most)
    for tiles in (Tiles(block=16, rows=16, step=32, span=1), Tiles(block=64, rows=64, span=8)):
        check_all(drawn()[2:14], tiles, 1e-6)


def check_all(matrices: Sequence[Tensor], tiles: Tiles, most: float) -> None:
    targets, numbers = added_to(matrices), [0.01 * (index % 4) for index in range(len(matrices))]
    Products(matrices, tiles).add_to(targets, numbers)
    check(targets, numbers, exact(matrices), most)


def check_left_out() -> None:
    matrices = drawn()[:6]
    products, targets = Products(matrices), added_to(matrices)
    with torch.no_grad():
        matrices[1][0, 0] = torch.inf  # 0 times this is not 0
    products.add_to([None, targets[1], targets[2], None, targets[4], targets[5]], [1.0, 0.0, 0.5, 1.0, 0.0, 0.5])
    check(targets[2:], [0.5, 0.0, 0.0, 0.5], exact(matrices)[2:])
    check(targets[:2], [0.0, 0.0], [torch.zeros_like(target) for target in targets[:2]])


def check_in_place() -> None:
    matrices = drawn()
    wanted = [m.double() - 0.01 * gradient for m, gradient in zip(matrices, exact(matrices), strict=True)]
    Products(matrices).add_to(matrices, [-0.01] * len(matrices))
    for matrix, want in zip(matrices, wanted, strict=True):
        assert (matrix - want).norm() < 1e-6 * want.norm(), matrix.shape


def check_moved() -> None:
    """Two steps with other targets, numbers, and places of the factors: nothing is remembered."""
    matrices = [torch.nn.Parameter(matrix.contiguous()) for matrix in drawn()]
    products = Products(matrices)
    for number in (0.5, torch.tensor(0.25), torch.tensor(0.125, dtype=torch.float64)):
        for matrix in matrices[::2]:
            matrix.data = 2 * matrix.data.t().contiguous().t()
        targets = added_to(matrices)
        products.add_to(targets, [number if index % 3 else 0.5 for index in range(len(matrices))])
        with torch.no_grad():
            check(targets, [float(number) if index % 3 else 0.5 for index in range(len(matrices))], exact(matrices))


@pytest.mark.nightly
@needs_interpreter
@pytest.mark.parametrize("name", ["check_gradients", "check_left_out", "check_in_place", "check_moved"])
def test_interpreted_kernels_add_what_float64_does(name: str) -> None:
    run_interpreted(f"{INTERPRETED}{name}()")


@pytest.mark.parametrize("tiles", [TILES, Tiles(block=16, rows=32, step=16, span=1)])
def test_every_entry_is_computed_once(tiles: Tiles) -> None:
    programs, sums, size = _cut_grams(SHAPES, tiles)
    lengths = [last - first for _, first, last, *_ in programs]
    assert lengths == sorted(lengths, reverse=True)
    written = torch.zeros(size, dtype=torch.int64)
    rows_seen = {factor: torch.zeros(rows, dtype=torch.int64) for factor, (rows, _) in enumerate(SHAPES)}
    for factor, first, last, left, right, begin in programs:
        padded = -(-SHAPES[factor][1] // tiles.block) * tiles.block
        gram = written[begin : begin + padded * padded].view(padded, padded)
        gram[left : left + tiles.block, right : right + tiles.block] += 1
        if left < right:
            gram[right : right + tiles.block, left : left + tiles.block] += 1
        if left == right == 0:
            rows_seen[factor][first:last] += 1
    assert (written == 1).all()
    assert all((seen == 1).all() for seen in rows_seen.values())
    for factor, (begin, count) in enumerate(sums):
        assert count == len({program[1] for program in programs if program[0] == factor})
        assert begin == min(program[5] for program in programs if program[0] == factor)
    for factor, (rows, rank) in enumerate(SHAPES):
        corners = {(row, column) for number, row, column in _cut_products(SHAPES, tiles) if number == factor}
        assert corners == set(product(range(0, rows, tiles.rows), range(0, rank, tiles.block)))


def test_sums_of_gram_matrices_are_small_beside_the_factors() -> None:
    shapes = [(1536, 73)] * 16  # of VGG-19 at 0.1
    assert _cut_grams(shapes, TILES)[2] < sum(rows * rank for rows, rank in shapes) / 2


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Record the numbers of launches, which then do nothing."""
    found: list[list[float]] = []
    monkeypatch.setattr(fused, "launch", lambda products, table, addresses, numbers, scales: found.append(numbers))
    return found


def test_targets_that_are_not_laid_out_like_their_factors_are_added_to_by_torch(launches: list[list[float]]) -> None:
    matrices = [torch.randn(12, 3), torch.randn(9, 3), torch.randn(7, 1), torch.randn(6, 1)]
    targets = [
        torch.ones(3, 12).t(),  # other strides
        torch.ones(9, 3, dtype=torch.float64),
        torch.ones(1, 7).t(),  # the same, but for a dimension of one
        torch.ones(6, 1),
    ]
    Products(matrices).add_to(targets, [0.5, 0.5, 0.5, torch.tensor(0.5)])
    assert launches[-1] == [0.0, 0.0, 0.5, 1.0]
    check(targets, [0.5, 0.5, 0.0, 0.0], exact(matrices))


def test_matrices_by_rows_are_known_and_known_again_when_they_have_moved(launches: list[list[float]]) -> None:
    matrices = [nn.Parameter(matrix) for matrix in (torch.randn(12, 3), torch.randn(9, 3), torch.randn(1, 7).t())]
    products = Products([*matrices, torch.randn(6, 1)])
    assert products.by_rows
    for wanted in (False, True):
        matrices[1].data = matrices[1].data.t().contiguous().t() if not wanted else matrices[1].data.contiguous()
        products.add_to([None] * 4, [0.0] * 4)
        assert products.by_rows is wanted


def test_the_kernels_leave_out_matrices_that_32_bits_cannot_count() -> None:
    assert _last_place(torch.empty(2**24, 128, device="meta")) == 2**31 - 1
    assert _last_place(torch.empty_strided((2, 3), (2**31, 1), device="meta")) == 2**31 + 2


def test_sums_are_float32_whatever_the_default_type_is(launches: list[list[float]]) -> None:
    matrices = [torch.randn(12, 3), torch.randn(9, 3)]
    torch.set_default_dtype(torch.float64)
    try:
        products = Products(matrices)
    finally:
        torch.set_default_dtype(torch.float32)
    assert products.sums.dtype == products.ones.dtype == products.coefficients.dtype == torch.float32


def test_more_products_than_one_launch_takes_are_split(launches: list[list[float]]) -> None:
    worker = Fused(fz.forms(nn.ModuleList(fz.FactorizedLinear(4, 3, 1) for _ in range(MOST + 3))))
    launches.clear()
    targets = [torch.zeros_like(factor.parameter) for factor in worker.factors]
    worker.add_to(targets, [float(index) for index in range(len(targets))])
    assert [len(numbers) for numbers in launches] == [2 * MOST, 6]
    assert [number for numbers in launches for number in numbers] == list(range(len(targets)))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the engine choose the kernels, and compute from their arguments what they would."""
    monkeypatch.setattr(engine, "_gains_from_batching", lambda form: not form.middle)
    monkeypatch.setattr(engine, "is_fusible", lambda form: True)
    monkeypatch.setattr(fused, "launch", launch_on_the_cpu)


def launch_on_the_cpu(
    products: Products, factors: Tensor, addresses: Sequence[int], numbers: Sequence[float], scales: Tensor
) -> None:
    rows = factors.tolist()
    values = [at(address, rows, rank).clone() for address, rows, rank, *_ in rows]
    for index, (_, length, rank, down, across, *target_strides, _, _) in enumerate(rows):
        assert [down, across] == target_strides == [rank, 1]
        number = numbers[index] * scales[index]
        if number != 0:
            partner = values[index ^ 1]
            at(addresses[index], length, rank).add_(number * values[index] @ (partner.mT @ partner))


def at(address: int, rows: int, rank: int) -> Tensor:
    """Return the float32 matrix at an address."""
    return torch.frombuffer((c_float * (rows * rank)).from_address(address), dtype=torch.float32).view(rows, rank)


def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    model = nn.ModuleList(fz.FactorizedLinear(9, 7, rank, bias=False) for rank in (2, 3, 4))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_decay_by_kernels_adds_to_gradients_step_after_step() -> None:
    model = layers()
    model[1].V.requires_grad_(False)
    decay = fz.FrobeniusDecay(model, {"0": 0.5, "1": torch.tensor(0.25), "2": 0.0})
    assert [type(worker) for worker in decay._engine.workers] == [Fused]
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)  # elsewhere
            parameter.data = 2 * parameter.data
        decay.apply_()
        targets = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        check(targets, [0.5, 0.5, 0.25, 0.0, 0.0, 0.0], exact([parameter.detach() for parameter in model.parameters()]))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_a_decoupled_decay_by_kernels_reads_factors_before_it_changes_them(lr: Number) -> None:
    model = layers()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    decay = fz.FrobeniusDecay(model, 0.5, decoupled=True)
    for _ in range(2):
        wanted = [old - 0.05 * gradient for old, gradient in zip(before, exact(before), strict=True)]
        decay.apply_(lr)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter, want in zip(before, wanted, strict=True):
            torch.testing.assert_close(parameter.double(), want, rtol=1e-5, atol=1e-6)


def test_factors_of_one_rate_share_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    decay = fz.FrobeniusDecay(layers(), 0.5, decoupled=True)
    numbers: list[Number] = []
    monkeypatch.setattr(decay._engine, "add", lambda _, number: numbers.extend(map(number, decay._engine.form_of)))
    decay.apply_(torch.tensor(0.1))  # on a GPU, each of them would be a launch
    assert len(numbers) == 6
    assert all(number is numbers[0] for number in numbers)


def test_factors_of_one_rate_share_a_tensor_in_a_scaled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    optimizer.found_inf = torch.tensor(0.0)  # as GradScaler sets it
    decay = fz.FrobeniusDecay(model, 0.5, decoupled=True).attach(optimizer)
    numbers: list[Number] = []
    monkeypatch.setattr(decay._engine, "add", lambda _, number: numbers.extend(map(number, decay._engine.form_of)))
    optimizer.step()
    assert len(numbers) == 6
    assert all(number is numbers[0] for number in numbers)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_factors_of_two_products_are_left_to_torch() -> None:
    model = layers()
    model.append(fz.FactorizedLinear(9, 7, 4, bias=False))
    model[3].V = model[2].V
    decay = fz.FrobeniusDecay(model, 0.5)
    assert [type(worker) for worker in decay._engine.workers] == [Fused, Plain]
    assert len(decay._engine.workers[0].factors) == 4
    assert [type(worker) for worker in deepcopy(decay)._engine.workers] == []  # made again where the copy is used


def test_a_compiled_decay_needs_no_kernels(monkeypatch: pytest.MonkeyPatch, as_on_a_gpu: None) -> None:
    model = layers()
    eager = [gradient.clone() for gradient in decayed_gradients(model, compiled=False)]
    decay, found = fz.FrobeniusDecay(model, 0.1), []
    monkeypatch.setattr(fused, "launch", lambda *arguments: found.append(arguments))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.compile(decay.apply_, fullgraph=True, backend="aot_eager")()
    assert not found
    for parameter, want in zip(model.parameters(), eager, strict=True):
        torch.testing.assert_close(parameter.grad, want)
