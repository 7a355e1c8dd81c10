"""Time ways of computing a depthwise 3×3 convolution inside a compiled separable block, on one GPU.

    python -m benchmarks.depthwise --out benchmarks/results/depthwise-h200.json

A block is batch normalization, ReLU, the depthwise convolution and the pointwise one: forward and backward, compiled,
one CUDA graph, bf16, channels-last, batch 128. First every way is compared with float64. Times are medians of
interleaved rounds, in microseconds; memory is the peak of one step before it is captured. "Again" computes the
depthwise output a second time in the backward pass, in place of keeping it. Programs are compiled one by one, and none
is begun after ``--seconds``; what is measured by then is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.script import parser_of, write
from factorized.experiments.bench.memory import PeakMemory
from factorized.nn.timing import capture, median_milliseconds

Depthwise = Callable[[Tensor, Tensor], Tensor]
CASES = [(160, 32), (320, 16), (640, 8)]  # channels, height and width
ROUNDS, REPEATS = 9, 20  # of each block
PROGRAMS = 1056  # of the kernel of the gradients, at least: eight for each of an H200's multiprocessors


def by_convolution(
    x: Tensor,  # (batch, channels, height, width)
    taps: Tensor,  # (channels, 1, 3, 3)
) -> Tensor:  # like x
    """Return the convolution, by torch's own operator."""
    return F.conv2d(x, taps.to(x.dtype), padding=1, groups=x.shape[1])


def by_sums(
    x: Tensor,  # (batch, channels, height, width)
    taps: Tensor,  # (channels, 1, 3, 3)
) -> Tensor:  # like x
    """Return the convolution as a sum of nine products, which a compiler fuses; so are both gradients."""
    return _Sums.apply(x, taps, False)


def by_sums_of_taps(
    x: Tensor,  # (batch, channels, height, width)
    taps: Tensor,  # (channels, 1, 3, 3)
) -> Tensor:  # like x
    """Return the convolution by torch's own operator; only the gradient of the taps is a sum of products."""
    return _Sums.apply(x, taps, True)


def by_kernels(
    x: Tensor,  # (batch, channels, height, width)
    taps: Tensor,  # (channels, 1, 3, 3)
    warps: int = 4,  # of a program, which handles 1,024 entries at a time
) -> Tensor:  # like x
    """Return the convolution by Triton kernels: one launch forward, and one for both gradients."""
    y: Tensor = _forward(x, taps, warps)
    return y


def shifted(
    x: Tensor,  # (batch, channels, height, width)
    sign: int,
) -> list[Tensor]:
    """Return what each of the nine taps sees of ``x``, in float32; with -1, what the transposed ones see."""
    height, width = x.shape[2:]
    padded = F.pad(x, (1, 1, 1, 1)).float()
    places = [(1 + sign * (tap // 3 - 1), 1 + sign * (tap % 3 - 1)) for tap in range(9)]
    return [padded[:, :, down : down + height, right : right + width] for down, right in places]


class _Sums(torch.autograd.Function):
    apply: ClassVar[Callable[..., Tensor]]  # torch leaves it untyped

    @staticmethod
    def forward(x: Tensor, taps: Tensor, only_taps: bool) -> Tensor:
        return by_convolution(x, taps) if only_taps else _weighted(shifted(x, 1), taps).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
        *tensors, ctx.only_taps = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, taps = ctx.saved_tensors
        seen = shifted(gradient, -1)
        of_taps = torch.stack([(part * x).sum(dim=(0, 2, 3)) for part in seen], dim=1)  # (channels, 9)
        of_x = by_convolution(gradient, taps.flip(2, 3)) if ctx.only_taps else _weighted(seen, taps).to(x.dtype)
        return of_x, of_taps.view(taps.shape).to(taps.dtype), None


def _weighted(seen: list[Tensor], taps: Tensor) -> Tensor:
    weights = taps.flatten(1).float()[..., None, None]  # (channels, 9, 1, 1)
    total = seen[0] * weights[:, 0]
    for tap, part in enumerate(seen[1:], start=1):
        total = total + part * weights[:, tap]
    return total


@torch.library.custom_op("benchmarks::depthwise", mutates_args=())
def _forward(x: Tensor, taps: Tensor, warps: int) -> Tensor:
    from benchmarks.depthwise_kernels import forward_kernel

    x, y = x.contiguous(memory_format=torch.channels_last), _like(x)
    batch, channels, height, width = x.shape
    positions, (rows, columns) = batch * height * width, _tile(channels)
    grid = (-(-positions // rows) * -(-channels // columns),)
    sizes = (positions, height, width, channels)
    with torch.cuda.device_of(x):
        forward_kernel[grid](x, taps.contiguous(), y, *sizes, BM=rows, BC=columns, num_warps=warps)
    return y


@_forward.register_fake
def _(x: Tensor, taps: Tensor, warps: int) -> Tensor:
    return _like(x)


@torch.library.custom_op("benchmarks::depthwise_backward", mutates_args=())
def _backward(gradient: Tensor, x: Tensor, taps: Tensor, warps: int) -> tuple[Tensor, Tensor]:
    """Return the gradient of ``x`` and the parts of that of ``taps``."""
    from benchmarks.depthwise_kernels import backward_kernel

    gradient, x = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (gradient, x))
    of_x, sums = _empty_gradients(gradient, x, taps, warps)
    batch, channels, height, width = x.shape
    rows, columns = _tile(channels)
    grid = (len(sums) * -(-channels // columns),)
    sizes = (batch * height * width, height, width, _span(x), channels)
    with torch.cuda.device_of(x):
        backward_kernel[grid](gradient, x, taps.contiguous(), of_x, sums, *sizes, BM=rows, BC=columns, num_warps=warps)
    return of_x, sums


@_backward.register_fake
def _empty_gradients(gradient: Tensor, x: Tensor, taps: Tensor, warps: int) -> tuple[Tensor, Tensor]:
    runs = -(-(x.numel() // x.shape[1]) // _span(x))
    return _like(x), x.new_empty((runs, x.shape[1], 9), dtype=torch.float32)


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    *tensors, ctx.warps = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    x, taps = ctx.saved_tensors
    of_x, sums = _backward(gradient, x, taps, ctx.warps)
    return of_x, sums.sum(0).view(taps.shape).to(taps.dtype), None


_forward.register_autograd(_gradients, setup_context=_remember)


def _like(x: Tensor) -> Tensor:
    batch, channels, height, width = x.shape
    return x.new_empty((batch, height, width, channels)).permute(0, 3, 1, 2)


def _tile(channels: int) -> tuple[int, int]:
    """Return the positions and channels that a program handles at a time."""
    columns = 64 if channels % 64 == 0 else 32
    return 1024 // columns, columns


def _span(x: Tensor) -> int:
    """Return the positions of a run, a multiple of those that a program handles at a time."""
    rows, columns = _tile(x.shape[1])
    runs = max(1, PROGRAMS // -(-x.shape[1] // columns))
    return -(-(x.numel() // x.shape[1]) // (runs * rows)) * rows


@dataclass(frozen=True)
class Way:
    """How a block computes."""

    depthwise: Depthwise
    again: bool = False  # the depthwise output, in the backward pass
    product: bool = False  # the pointwise convolution is a matrix product


WAYS = {
    "convolution": Way(by_convolution),
    "kernels": Way(by_kernels),
    "kernels, 8 warps": Way(partial(by_kernels, warps=8)),
    "sums": Way(by_sums),
    "sums of taps": Way(by_sums_of_taps),
    "convolution, again": Way(by_convolution, again=True),
    "kernels, again": Way(by_kernels, again=True),
    "convolution, product": Way(by_convolution, product=True),
}


class Block(nn.Module):
    """Batch normalization, ReLU, a depthwise and a pointwise convolution, computed in one of the ways."""

    def __init__(self, channels: int, way: Way) -> None:
        super().__init__()
        self.way, self.norm = way, nn.BatchNorm2d(channels)
        self.taps = nn.Parameter(torch.randn(channels, 1, 3, 3) / 3)
        self.weight = nn.Parameter(torch.randn(channels, channels, 1, 1) / channels**0.5)

    def forward(
        self,
        x: Tensor,  # (batch, channels, height, width)
    ) -> Tensor:  # like x
        """Apply the block."""
        x = F.relu(self.norm(x))
        if not self.way.again:
            return self._separable(x)
        contexts = partial(create_selective_checkpoint_contexts, _keep_pointwise)
        y: Tensor = checkpoint(self._separable, x, use_reentrant=False, context_fn=contexts)
        return y

    def _separable(self, x: Tensor) -> Tensor:
        y, weight = self.way.depthwise(x, self.taps), self.weight.to(x.dtype)
        if self.way.product:
            return F.linear(y.movedim(1, -1), weight.flatten(1)).movedim(-1, 1)
        return F.conv2d(y, weight)


def _keep_pointwise(ctx: Any, operator: Any, *given: Any, **named: Any) -> CheckpointPolicy:
    """Keep the output of the pointwise convolution, and compute that of the depthwise one again."""
    pointwise = operator == torch.ops.aten.convolution.default and given[-1] == 1
    return CheckpointPolicy.MUST_SAVE if pointwise else CheckpointPolicy.PREFER_RECOMPUTE


def check(way: Way, device: torch.device, channels: int = 96, extent: int = 7) -> float:
    """Return the largest error of outputs and gradients, in bf16, against float64, relative to their norm."""
    torch.manual_seed(0)
    block = Block(channels, way).to(device)
    x = torch.randn(3, channels, extent, extent, device=device).bfloat16()
    exact = Block(channels, Way(by_convolution)).to(device).double()
    exact.load_state_dict(block.state_dict())
    found, expected = _results(block, x), _results(exact, x.double())
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True))


def _results(block: Block, x: Tensor) -> list[Tensor]:
    x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    y = block(x)
    gradient = torch.linspace(-1, 1, y.numel(), device=y.device, dtype=torch.float64).sin().reshape(y.shape).to(y)
    return [y, *torch.autograd.grad(y, (x, *block.parameters()), gradient)]


def step_of(way: Way, case: tuple[int, int], batch: int, device: torch.device) -> Callable[[], object]:
    """Return a compiled step, forward and backward."""
    channels, extent = case
    block = Block(channels, way).to(device)
    x = torch.randn(batch, channels, extent, extent, device=device).bfloat16()
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    gradient = torch.randn_like(x)
    run = torch.compile(block, fullgraph=True, dynamic=False) if device.type == "cuda" else block
    inputs = (x, *block.parameters())

    def step() -> None:
        torch.autograd.grad(run(x), inputs, gradient)

    return step


def measure(
    case: tuple[int, int], ways: dict[str, Way], batch: int, device: torch.device, deadline: float
) -> dict[str, Any]:
    """Return the microseconds of each way that is compiled in time, and its peak memory in MiB."""
    steps, memory = {}, {}
    for name, way in ways.items():
        if time.monotonic() > deadline:
            break
        torch._dynamo.reset()
        step = step_of(way, case, batch, device)
        step()
        with PeakMemory(device) as peak:
            peak.restart()
            step()
        memory[name] = round(peak.bytes / 2**20, 1)
        steps[name] = capture(step) if device.type == "cuda" else step
    times = median_milliseconds(steps, device.type == "cuda", rounds=ROUNDS, repeats=REPEATS)
    return {"case": list(case), "us": {name: round(1e3 * found, 1) for name, found in times.items()}, "MiB": memory}


def main(words: list[str] | None = None) -> None:
    """Parse the command line, check and time every way and write one JSON file, again after each block."""
    parser = parser_of(__doc__)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=len(CASES), help="the first of them")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--seconds", type=float, default=80, help="after which no more programs are compiled")
    parser.add_argument("--device", type=torch.device, default="cuda")
    given = parser.parse_args(words)
    deadline = time.monotonic() + given.seconds
    torch.backends.cudnn.benchmark = True
    ways = {name: WAYS[name] for name in given.ways}
    errors = {name: round(check(way, given.device), 5) for name, way in ways.items()}
    print(errors, flush=True)
    rows = []
    for case in CASES[: given.blocks]:
        rows.append(measure(case, ways, given.batch, given.device, deadline))
        print(rows[-1], flush=True)
        write(given.out, given.device, rows, batch=given.batch, errors=errors)


if __name__ == "__main__":
    main()
