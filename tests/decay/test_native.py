"""The CPU kernels of Frobenius decay: what they compute, and what they read and write."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import factorized as fz
from factorized.decay import native
from factorized.decay.build import VECTORS, Kernels, cpu_kernels, load_kernels
from factorized.decay.native import Native
from tests.contract import error
from tests.decay.native_products import SHAPES, TOLERANCE, exact, products, with_gradients

KINDS = list(VECTORS)
HERE = torch.backends.cpu.get_cpu_capability()


def usable(capability: str) -> bool:
    return cpu_kernels(torch.float32) is not None and KINDS.index(capability) >= KINDS.index(HERE)


@pytest.fixture(params=KINDS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels of every kind of processor that this one can stand in for."""
    capability: str = request.param
    if not usable(capability):
        pytest.skip(f"needs a C compiler and a processor with {capability}")

    def chosen(dtype: torch.dtype) -> Kernels:
        return load_kernels(dtype, capability)

    monkeypatch.setattr(native, "cpu_kernels", chosen)
    return capability


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.usefixtures("kernels")
class TestWhatTheyCompute:
    @pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
    def test_the_gradients_are_autograds(self, dtype: torch.dtype) -> None:
        model = products(dtype)
        unit = Native(fz.forms(model))
        expected = exact(model)
        for factor, gradient in zip(unit.factors, unit.gradients(), strict=True):
            assert error(gradient, expected[factor.parameter]) < TOLERANCE[dtype]

    @pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
    def test_each_is_added_with_its_own_number(self, dtype: torch.dtype) -> None:
        model = with_gradients(products(dtype))
        unit, expected = Native(fz.forms(model)), exact(model)
        numbers = [0.5 + n for n in range(len(unit.factors))]
        before = [factor.parameter.grad.double().clone() for factor in unit.factors]
        unit.add_to([factor.parameter.grad for factor in unit.factors], numbers)
        for factor, number, start in zip(unit.factors, numbers, before, strict=True):
            assert error(factor.parameter.grad, start + number * expected[factor.parameter]) < TOLERANCE[dtype]

    @pytest.mark.parametrize("left_out", [0, 1])
    @pytest.mark.parametrize("how", ["no target", "zero", "zero tensor"])
    def test_a_factor_can_be_left_out(self, left_out: int, how: str) -> None:
        model = with_gradients(products())
        unit, expected = Native(fz.forms(model)), exact(model)
        before = [factor.parameter.grad.clone() for factor in unit.factors]
        targets = [factor.parameter.grad for factor in unit.factors]
        numbers: list[float | Tensor] = [2.0] * len(targets)
        for place in range(left_out, len(targets), 2):
            if how == "no target":
                targets[place] = None
            else:
                numbers[place] = 0.0 if how == "zero" else torch.tensor(0.0)
        unit.add_to(targets, numbers)
        for place, (factor, start) in enumerate(zip(unit.factors, before, strict=True)):
            grad = factor.parameter.grad
            if place % 2 == left_out:
                assert torch.equal(grad, start)
            else:
                assert error(grad, start.double() + 2 * expected[factor.parameter]) < TOLERANCE[torch.float32]

    def test_what_is_added_to_may_be_the_factors_themselves(self) -> None:
        model = products()
        unit = Native(fz.forms(model))
        expected = [f.parameter.detach() - 0.1 * g for f, g in zip(unit.factors, unit.gradients(), strict=True)]
        unit.add_to([factor.parameter.detach() for factor in unit.factors], [-0.1] * len(expected))
        for factor, reference in zip(unit.factors, expected, strict=True):
            torch.testing.assert_close(factor.parameter.detach(), reference)

    def test_results_depend_on_no_number_of_threads(self, threads: Callable[[int], None]) -> None:
        unit = Native(fz.forms(products()))
        threads(1)
        alone = unit.gradients()
        for count in (2, 3):
            threads(count)
            assert all(map(torch.equal, unit.gradients(), alone))

    @pytest.mark.parametrize(("m", "n", "rank"), SHAPES)
    def test_what_is_not_finite_stays_in_its_row(self, m: int, n: int, rank: int) -> None:
        model = products(shapes=[(m, n, rank)])
        (form,) = fz.forms(model)
        wanted = Native([form]).gradients()[0]
        row = m // 2
        with torch.no_grad():
            model[0].U[row] = torch.nan
        dU, dV = Native([form]).gradients()
        others = [k for k in range(m) if k != row]
        assert dU[row].isnan().all()
        assert torch.equal(dU[others], wanted[others])
        assert dV.isnan().all()  # the Gram matrix of U is

    def test_they_read_and_write_nothing_beyond_a_factor(self, kernels: str) -> None:
        """Each factor and target ends where memory does: one number more and the process dies."""
        run = subprocess.run([sys.executable, "-c", AT_THE_END, kernels], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert run.stdout.split() == ["done"]


AT_THE_END = """
import ctypes, mmap, sys, torch
import factorized as fz
from factorized.decay import native
from factorized.decay.build import load_kernels
native.cpu_kernels = lambda dtype: load_kernels(dtype, sys.argv[1])
libc, kept = ctypes.CDLL(None), []

def at_the_end(matrix):
    size = -(-4 * matrix.numel() // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    kept.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(start + size), mmap.PAGESIZE, 0) == 0
    moved = torch.frombuffer(memory, dtype=torch.float32, count=matrix.numel(), offset=size - 4 * matrix.numel())
    return moved.view(matrix.shape).copy_(matrix)

for rank in range(1, 129, 3):
    layer = fz.FactorizedLinear(rank + 2, 520 + rank, rank, bias=False)
    for parameter in layer.parameters():
        parameter.data = at_the_end(parameter.data)
    unit = native.Native(fz.forms(layer))
    unit.add_to([at_the_end(torch.zeros(p.shape)) for p in (layer.U, layer.V)], [1.0, 1.0])
print("done")
"""
