"""Time composing all tensorized weights of WideResNet-28-10, one by one or those of one format together, on one GPU.

    python -m benchmarks.compositions --out benchmarks/results/compositions-h200.json

Cores in, pointwise weights out, and back: compiled, one CUDA graph, bf16 by autocast, as a training step computes them.
"float32" rounds the composed weight only, not the cores. Times are medians of interleaved rounds, in microseconds.
Before that the gradients of both orders are compared in float64.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import factorized as fz
from benchmarks.script import parser_of, write
from factorized._torch import set_up_compiler, without_autocast
from factorized.experiments.models.wide_resnet import wide_resnet
from factorized.formats.format import Cores, Format
from factorized.formats.scheme import Scheme
from factorized.nn.layer import FactorizedLayer
from factorized.nn.timing import capture, median_milliseconds

Compose = Callable[[Sequence[Format], Sequence[Cores]], list[Tensor]]
ROUNDS, REPEATS = 9, 20
SCHEMES: dict[str, tuple[Scheme, float]] = {  # of table 2, with their rank scales
    "Tensor-Train 0.0667": (fz.TensorTrain(separable=True), 0.705),
    "Tucker 0.0667": (fz.Tucker(separable=True), 0.68),
}


def one_by_one(formats: Sequence[Format], cores: Sequence[Cores]) -> list[Tensor]:
    """Return the weights, each composed by itself."""
    return [format.compose(own) for format, own in zip(formats, cores, strict=True)]


def together(formats: Sequence[Format], cores: Sequence[Cores]) -> list[Tensor]:
    """Return the weights; those of equal formats are one batch."""
    places = defaultdict(list)
    for place, format in enumerate(formats):
        places[format].append(place)
    weights: dict[int, Tensor] = {}
    for format, equal in places.items():
        stacks = [torch.stack(parts) for parts in zip(*[cores[place] for place in equal], strict=True)]
        weights.update(zip(equal, format.compose(stacks).unbind(), strict=True))
    return [weights[place] for place in range(len(formats))]


def in_float32(compose: Compose, formats: Sequence[Format], cores: Sequence[Cores]) -> list[Tensor]:
    """Return the weights, composed in float32 and then rounded, in place of rounding every core."""
    with without_autocast(cores[0][0].device):
        return [weight.bfloat16() for weight in compose(formats, cores)]


WAYS: dict[str, Compose] = {
    "one by one": one_by_one,
    "together": together,
    "one by one, float32": partial(in_float32, one_by_one),
    "together, float32": partial(in_float32, together),
}


def tensorized(name: str, depth: int, width: int) -> tuple[list[Format], list[Cores]]:
    """Return the formats and cores of a network's pointwise weights."""
    torch.manual_seed(0)
    scheme, scale = SCHEMES[name]
    model = fz.factorize(wide_resnet(depth, width), scheme, rank_scale=scale, init="kaiming")
    layers = [layer for layer in model.modules() if isinstance(layer, FactorizedLayer)]
    parts = [layer.format.decayed for layer in layers]
    cores = [layer.factors[:count] for layer, (_, count) in zip(layers, parts, strict=True)]
    return [format for format, _ in parts], [tuple(core.detach() for core in own) for own in cores]


def step_of(compose: Compose, formats: Sequence[Format], cores: Sequence[Cores], compiled: bool) -> Callable[[], Any]:
    """Return a function that composes every weight and returns the gradients of all cores."""
    own = [tuple(core.clone().requires_grad_() for core in part) for part in cores]
    leaves = [core for part in own for core in part]

    def run(given: Sequence[Cores]) -> list[Tensor]:
        return compose(formats, given)

    forward = torch.compile(run, fullgraph=True, dynamic=False) if compiled else run
    gradients = [torch.ones_like(weight) for weight in run(own)]

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(own), leaves, gradients)

    return step


def check(formats: Sequence[Format], cores: Sequence[Cores]) -> float:
    """Return the largest difference between the gradients of both ways in float64, relative to their norm."""
    exact = [tuple(core.double() for core in part) for part in cores]
    found, expected = (step_of(compose, formats, exact, compiled=False)() for compose in (together, one_by_one))
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True))


def measure(name: str, depth: int, width: int, device: torch.device) -> dict[str, Any]:
    """Return the microseconds of every way for one scheme."""
    formats, cores = tensorized(name, depth, width)
    error = check(formats, cores)
    cores = [tuple(core.to(device) for core in part) for part in cores]
    steps, is_cuda = {}, device.type == "cuda"
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
        for way, compose in WAYS.items():
            torch._dynamo.reset()
            step = step_of(compose, formats, cores, compiled=is_cuda)
            steps[way] = capture(step) if is_cuda else step
        times = median_milliseconds(steps, is_cuda, rounds=ROUNDS, repeats=REPEATS)
    us = {way: round(1e3 * found, 1) for way, found in times.items()}
    return {"scheme": name, "weights": len(formats), "formats": len(set(formats)), "us": us, "error": error}


def main(words: list[str] | None = None) -> None:
    """Parse the command line, and write one JSON file."""
    parser = parser_of(__doc__)
    parser.add_argument("--depth", type=int, default=28)
    parser.add_argument("--width", type=int, default=10)
    parser.add_argument("--device", type=torch.device, default="cuda")
    given = parser.parse_args(words)
    set_up_compiler()
    rows = []
    for name in SCHEMES:
        rows.append(measure(name, given.depth, given.width, given.device))
        print(rows[-1], flush=True)
        write(given.out, given.device, rows, depth=given.depth, width=given.width)


if __name__ == "__main__":
    main()
