"""Time Frobenius decay at large ranks: in the training step of a Llama, and alone at ranks 128 to 1024.

    python -m benchmarks.large_ranks --out benchmarks/results/large-ranks-h200.json

A Llama of 445 M parameters with random weights (8 layers, 2048 wide, feed-forward 5632), 8×1024 tokens, bf16 autocast
over float32 weights, forward and backward compiled, fused AdamW; its feed-forward layers at rank 512, 24 products.
The decay acts on these alone. Times are medians of interleaved rounds in milliseconds, memory is the peak in bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

import factorized as fz
from factorized.decay.plain import Pair
from factorized.experiments.bench.decay import feed_forward
from factorized.experiments.bench.llama import STRENGTH, LlamaSizes, build_llama
from factorized.experiments.training.record import describe_machine
from factorized.nn.timing import median_milliseconds

Step = Callable[[], object]
# How the decay's products are computed, and whether it acts on gradients or on factors
WAYS = ("float32 products of torch", "tf32 products of torch", "ours")
RANKS = (128, 256, 512, 1024)


def sizes_of(arguments: argparse.Namespace, rank: int) -> LlamaSizes:
    """Return the sizes of the model that the command line asks for."""
    names = ("layers", "width", "feed_forward", "vocabulary", "batch", "length")
    return LlamaSizes(rank=rank, **{name: getattr(arguments, name) for name in names})


def training_step(model: nn.Module, run: nn.Module, arguments: argparse.Namespace, way: str, decoupled: bool) -> Step:
    """Return a training step on a fixed batch; ``way`` is one of ``WAYS``, or empty for no decay of products."""
    tokens = torch.randint(arguments.vocabulary, (arguments.batch, arguments.length), device=arguments.device)
    groups = fz.parameter_groups(model, 0.1) if way else model.parameters()
    optimizer = torch.optim.AdamW(groups, lr=1e-5, fused=True)
    if way:
        decay = fz.FrobeniusDecay(model, {"linear": STRENGTH}, decoupled=decoupled)
        use(way, decay).attach(optimizer)

    def step() -> None:
        with torch.autocast(arguments.device, torch.bfloat16):
            loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        with tf32(way == WAYS[1]):
            optimizer.step()
        optimizer.zero_grad()

    return step


def use(way: str, decay: fz.FrobeniusDecay) -> fz.FrobeniusDecay:
    """Make a decay compute its products in one of ``WAYS``."""
    if way != WAYS[2]:
        decay._engine.workers = [Pair([form]) for form in dict.fromkeys(decay._engine.form_of.values())]
    return decay


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Let torch's float32 products round to tf32, for a while; compiled code would be compiled again for it."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def time_steps(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Time the training steps: dense, and low rank without decay and with each way of computing it."""
    steps: dict[tuple[int | None, str, bool], Step] = {}
    parameters, memory = {}, {}
    for rank in (None, arguments.rank):
        model = build_llama(sizes_of(arguments, arguments.rank), rank, torch.device(arguments.device))
        parameters[rank] = sum(parameter.numel() for parameter in model.parameters())
        run = torch.compile(model, dynamic=False) if arguments.compile else model
        decays = [("", False), *((way, decoupled) for decoupled in (False, True) for way in WAYS)]
        for way, decoupled in decays if rank else decays[:1]:
            steps[rank, way, decoupled] = training_step(model, run, arguments, way, decoupled)
    for key, step in steps.items():  # also compiles
        step()
        memory[key] = step_memory(step, arguments.device)
        print("warm", *key, memory[key], flush=True)
    times = median_milliseconds(steps, arguments.device == "cuda", arguments.rounds, repeats=arguments.repeats)
    return [
        {
            "rank": rank,
            "decay": way or None,
            "decoupled": decoupled if way else None,
            "parameters": parameters[rank],
            "ms": round(times[rank, way, decoupled], 3),
            "memory": memory[rank, way, decoupled],
        }
        for rank, way, decoupled in steps
    ]


def step_memory(step: Step, device: str) -> int | None:
    """Return how many bytes a step allocates at its peak beyond what stays."""
    if device != "cuda":
        step()
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def products(arguments: argparse.Namespace, rank: int) -> nn.ModuleList:
    """Return the feed-forward layers alone, each with a gradient."""
    model = feed_forward(sizes_of(arguments, rank), torch.device(arguments.device))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def time_decays(arguments: argparse.Namespace, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Time the decay alone, added to gradients and to factors, and compare its results with float64."""
    rows = []
    for rank in ranks:
        model = products(arguments, rank)
        steps: dict[tuple[str, bool], Step] = {}
        errors = {}
        for way, decoupled in product(WAYS, (False, True)):
            decay = use(way, fz.FrobeniusDecay(model, STRENGTH, decoupled=decoupled))

            def step(decay: fz.FrobeniusDecay = decay, way: str = way) -> None:
                with tf32(way == WAYS[1]):
                    decay.apply_(1e-8 if decay.decoupled else None)

            steps[way, decoupled] = step
            errors[way, decoupled] = None if decoupled else relative_error(model, step)
        times = median_milliseconds(steps, arguments.device == "cuda", arguments.rounds, repeats=arguments.repeats)
        for (way, decoupled), ms in times.items():
            row = {"rank": rank, "decay": way, "decoupled": decoupled, "ms": round(ms, 4)}
            rows.append({**row, "error": errors[way, decoupled]})
            print(rows[-1], flush=True)
    return rows


def relative_error(model: nn.ModuleList, step: Step) -> float:
    """Return the largest relative error, by factor, of the gradients that a step adds, against float64."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step()
    errors = []
    for layer in model[:3]:
        U, V = layer.U.detach().double(), layer.V.detach().double()
        for parameter, exact in ((layer.U, U @ (V.mT @ V)), (layer.V, V @ (U.mT @ U))):
            got = parameter.grad.double() / STRENGTH
            errors.append(((got - exact).norm() / exact.norm()).item())
    return max(errors)


def main() -> None:
    """Parse the command line, time what it asks for and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--feed-forward", type=int, default=5632)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=512)
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS, help="at which the decay is timed alone")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--eager", dest="compile", action="store_false", help="do not compile the model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    report: dict[str, Any] = {"machine": describe_machine(torch.device(arguments.device))}
    report |= {key: value for key, value in vars(arguments).items() if key not in ("out", "ranks")}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    report["alone"] = time_decays(arguments, arguments.ranks)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    report["rows"] = time_steps(arguments)
    for row in report["rows"]:
        print(row)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
