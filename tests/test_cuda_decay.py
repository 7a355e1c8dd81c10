"""The decay's own GPU kernels: the gradients of the products, for any shapes, types and places in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import factorized as fz
from factorized.decay import fused
from factorized.decay.arena import Arena
from factorized.decay.engine import make_workers
from factorized.decay.fused import Fused
from factorized.decay.plain import Alike, Pair
from factorized.experiments.models.resnet import resnet
from factorized.nn.timing import capture
from tests.on_gpu import decayed_gradients, exact, kinds, needs_cuda
from tests.test_cuda import trained

pytestmark = needs_cuda
# rows of U, rank, rows of V
SHAPES = [
    (70, 9, 50),
    (130, 37, 200),
    (64, 37, 64),
    (5, 1, 3),
    (200, 60, 90),
    (65, 16, 64),
    (300, 17, 20),
    (129, 64, 640),
    (200, 65, 300),
    (1536, 73, 1536),
    (700, 128, 1100),
]
TYPES = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}  # and how well they hold what is added


def products(dtype: torch.dtype = torch.float32) -> nn.ModuleList:
    torch.manual_seed(0)
    layers = nn.ModuleList(fz.FactorizedLinear(columns, rows, rank, bias=False) for rows, rank, columns in SHAPES)
    for parameter in layers.parameters():
        nn.init.normal_(parameter, std=0.2)
    return layers.to(device="cuda", dtype=dtype)


def by_kernels(model: nn.Module, strength: object, **options: bool) -> fz.FrobeniusDecay:
    """Return a decay which the kernels compute, every product of it."""
    decay = fz.FrobeniusDecay(model, strength, **options)  # type: ignore[arg-type]
    assert kinds(decay._engine.workers) == [Fused]
    return decay


def reset(model: nn.Module) -> None:
    """Give every parameter a new gradient of zeros."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def check(model: nn.Module, numbers: Sequence[float] | float, most: float = 1e-5) -> None:
    """Compare gradients that were zero before to float64."""
    parameters = list(model.parameters())
    numbers = [numbers] * len(parameters) if isinstance(numbers, float) else numbers
    for parameter, number, gradient in zip(parameters, numbers, exact(model), strict=True):
        error = (parameter.grad.double() - number * gradient).norm()
        assert error <= most * number * gradient.norm(), (tuple(parameter.shape), number)


@pytest.mark.parametrize(("dtype", "most"), TYPES.items())
def test_gradients_are_those_of_the_products(dtype: torch.dtype, most: float) -> None:
    model = products(dtype)
    reset(model)
    by_kernels(model, 0.5).apply_()
    check(model, 0.5, most)


def test_they_are_added_to_what_is_there_and_not_to_frozen_factors() -> None:
    model = products()
    reset(model)
    for parameter in model.parameters():
        parameter.grad += 1
    model[9].U.requires_grad_(False)
    model[8].V.grad = None
    by_kernels(model, {"*": 0.5, "7": 2.0}).apply_()
    assert torch.equal(model[9].U.grad, torch.ones_like(model[9].U))
    assert model[8].V.grad is None
    for name, (parameter, gradient) in zip(
        (name for name, _ in model.named_parameters()), zip(model.parameters(), exact(model), strict=True), strict=True
    ):
        if name not in ("9.U", "8.V"):
            added = parameter.grad.double() - 1
            want = gradient * (2.0 if name.startswith("7.") else 0.5)
            assert (added - want).norm() < 1e-5 * (want.norm() + parameter.numel() ** 0.5), name


def launched(step: Callable[[], object]) -> Counter[str]:
    """Return the kernels and copies on the GPU that a step takes."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiled:
        step()
        torch.cuda.synchronize()
    events = profiled.events() or []
    return Counter(event.name for event in events if event.device_type == torch.autograd.DeviceType.CUDA)


def test_two_launches_do_it_all() -> None:
    model = products()
    reset(model)
    assert launched(by_kernels(model, 0.5).apply_) == {"gram_kernel": 1, "product_kernel": 1}


def test_factors_that_are_shrunk_themselves_are_copied_first() -> None:
    model = products()
    reset(model)
    decay = by_kernels(model, 0.5, decoupled=True)
    found = launched(lambda: decay.apply_(1e-3))
    assert (found.pop("gram_kernel"), found.pop("product_kernel")) == (1, 1)
    assert sum(found.values()) <= 2, found


def test_a_tensor_as_strength_is_read_at_every_replay() -> None:
    model = products()
    reset(model)
    strength = torch.tensor(1.0, device="cuda")
    replay = capture(by_kernels(model, strength).apply_)
    for value in (0.5, 0.25):
        strength.fill_(value)
        for parameter in model.parameters():
            parameter.grad.zero_()
        replay()
        check(model, value)


def test_a_captured_step_adds_to_the_gradients_that_it_was_captured_with() -> None:
    model = products()
    decay = by_kernels(model, 0.5)
    made: list[list[Tensor]] = []

    def step() -> None:
        reset(model)
        decay.apply_()
        made.append([parameter.grad for parameter in model.parameters()])

    replay = capture(step)
    captured = made[-1]
    reset(model)
    decay.apply_()  # with gradients that are somewhere else
    check(model, 0.5)
    by_hand = [parameter.grad.clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)  # in place: a graph also repeats the places of the factors
    replay()
    for parameter, own, other in zip(model.parameters(), captured, by_hand, strict=True):
        assert torch.equal(parameter.grad, other)  # of the step outside the graph
        torch.testing.assert_close(own, 8 * other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01), "on the GPU"])
def test_factors_can_be_shrunk_themselves(lr: float | Tensor | str) -> None:
    model = products()
    reset(model)
    rate = torch.tensor(0.01, device="cuda") if isinstance(lr, str) else lr
    wanted = [
        p.detach().double() - 0.005 * gradient for p, gradient in zip(model.parameters(), exact(model), strict=True)
    ]
    by_kernels(model, 0.5, decoupled=True).apply_(rate)
    for parameter, want in zip(model.parameters(), wanted, strict=True):
        assert (parameter - want).norm() < 1e-5 * want.norm(), parameter.shape


def test_they_do_not_vary_from_run_to_run() -> None:
    model = products()
    decay, found = by_kernels(model, 0.5), []
    for _ in range(5):
        reset(model)
        decay.apply_()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_parameters_that_were_given_other_memory_are_found() -> None:
    model = products()
    decay = by_kernels(model, 0.5)
    for parameter in model.parameters():
        parameter.data = 2 * parameter.data
    for layer in model[::2]:
        layer.U.data = layer.U.data.t().contiguous().t()  # the same matrix, column by column
    reset(model)
    decay.apply_()
    check(model, 0.5)


def test_gradients_that_are_laid_out_otherwise_are_added_to_by_torch() -> None:
    model = products()
    reset(model)
    model[9].U.grad = torch.zeros_like(model[9].U.mT).contiguous().mT
    by_kernels(model, 0.5).apply_()
    check(model, 0.5)


def test_gradients_anywhere_in_memory_need_no_other_kernels() -> None:
    from factorized.decay.kernels import gram_kernel

    model = products()
    decay, device = by_kernels(model, 0.5), torch.cuda.current_device()
    built = len(gram_kernel.device_caches[device][0])
    for parameter in list(model.parameters())[::3]:
        parameter.grad = parameter.new_zeros(parameter.numel() + 1)[1:].view_as(parameter)  # no multiple of 16
    decay.apply_()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        else:
            parameter.grad.zero_()
    decay.apply_()
    assert len(gram_kernel.device_caches[device][0]) == built > 0
    check(model, 0.5)


def test_what_the_kernels_do_not_know_is_computed_by_torch() -> None:
    assert set(workers(products())) == {Fused}
    assert set(workers(products(torch.float64))) <= {Alike, Arena, Pair}
    assert Arena in workers(products(torch.float64))
    large = nn.ModuleList([fz.FactorizedLinear(600, 600, fused.LARGEST_RANK + 1).cuda() for _ in range(2)])
    assert workers(large) == [Arena]
    tied = products()
    tied.append(fz.FactorizedLinear(50, 70, 9, bias=False).cuda())
    tied[-1].V = tied[0].V
    assert set(workers(tied)) == {Fused, Arena}


def workers(model: nn.Module) -> list[type]:
    return kinds(make_workers(fz.forms(model)))


def test_where_the_kernels_cannot_be_built_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*arguments: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    fused.can_build_kernels.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(fused, "launch", no_compiler)
        assert set(workers(products())) <= {Alike, Arena, Pair}
    fused.can_build_kernels.cache_clear()
    assert set(workers(products())) == {Fused}


def test_the_decay_compiles_whole() -> None:
    got, want = (decayed_gradients(products(), compiled=compiled) for compiled in (True, False))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(fz.parameter_groups(model, 1e-2), lr=0.05, momentum=0.9)
    by_kernels(model, 0.05).attach(optimizer)
    return optimizer


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(fz.parameter_groups(model, 1e-2), lr=1e-3, capturable=True)
    by_kernels(model, 0.05, decoupled=True).attach(optimizer)
    return optimizer


@pytest.mark.parametrize("make", [sgd, adamw])
def test_a_captured_step_ends_where_eager_steps_do(make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    start = fz.factorize(resnet(8), ratio=0.4).cuda()
    eager, replayed = (trained(start, make, captured, torch.float32) for captured in (False, True))
    for actual, expected in zip(replayed.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
