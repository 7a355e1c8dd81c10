"""Time one update of LAMB and FLAMBé beside torch's fused AdamW, on the parameters of BERT.

    python -m benchmarks.optimizers --out benchmarks/results/optimizers-h200.json

Gradients are random. Times are medians of interleaved rounds, in milliseconds. A pass reads or writes every parameter
once; passes are counted from the tensors that torch's operators take and return. "Graph" is the update as one CUDA
graph.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import factorized as fz
from benchmarks.script import parser_of, write
from factorized.experiments.bench.measure import milliseconds
from factorized.nn.timing import capture

SIZES: dict[str, dict[str, Any]] = {
    "BERT-small": {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048},
    "BERT-large": {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096},
}
RATE, STRENGTH = 1e-4, 0.01
REPEATS = 10  # on a GPU, so that it need not wait for the first launch
WRITING_ONLY = {"aten::zero_", "aten::fill_", "aten::copy_"}  # operators that do not read what they change
MAKING = {"aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like"}  # and these read nothing
Update = Callable[[], object]


class Traffic(TorchDispatchMode):
    """Counts the bytes that operators read and write while it is active, if each reads and writes a tensor once."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count its tensors."""
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        schema = func._schema
        if any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns):
            return found  # a view
        given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
        read: dict[int, int] = {}  # by address
        for argument in schema.arguments:
            sizes = {leaf.data_ptr(): leaf.nbytes for leaf in _tensors(given.get(argument.name))}
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if "fused" in schema.name and argument.name == "grads":
                writes = False  # gradients are written only if they are unscaled, too
            self.bytes += sum(sizes.values()) if writes else 0
            if not (writes and schema.name in WRITING_ONLY):
                read |= sizes
        if schema.name not in MAKING:
            self.bytes += sum(read.values())
        makes = not any(value.alias_info is not None for value in schema.returns)
        if makes and not schema.name.startswith("aten::empty"):
            self.bytes += sum(leaf.nbytes for leaf in _tensors(found))
        return found


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def passes(update: Update, parameters: list[nn.Parameter]) -> float:
    """Return how many times ``update`` reads or writes as many bytes as the parameters have."""
    with Traffic() as traffic:
        update()
    return traffic.bytes / sum(parameter.nbytes for parameter in parameters)


def updates(model: nn.Module) -> Iterator[tuple[str, Update]]:
    """Yield the update of every optimizer."""
    parameters, cuda = list(model.parameters()), next(model.parameters()).is_cuda

    def lamb(**settings: Any) -> torch.optim.Optimizer:
        return fz.Lamb(parameters, lr=RATE, weight_decay=STRENGTH, **{"max_grad_norm": None, **settings})

    def flambe(**settings: Any) -> torch.optim.Optimizer:
        groups = fz.parameter_groups(model, STRENGTH)
        return fz.Flambe(groups, model, lr=RATE, frobenius_decay=STRENGTH, max_grad_norm=None, **settings)

    adamw = partial(torch.optim.AdamW, parameters, lr=RATE, weight_decay=STRENGTH, fused=True)
    yield "AdamW", adamw().step
    yield "LAMB", lamb().step
    yield "LAMB, clipped", lamb(max_grad_norm=1e-3).step
    yield "FLAMBé", flambe().step
    if cuda:
        yield "LAMB, capturable", lamb(capturable=True).step
        yield "AdamW, graph", capture(adamw(capturable=True).step)
        yield "LAMB, graph", capture(lamb(capturable=True).step)
        yield "FLAMBé, graph", capture(flambe(capturable=True).step)


def measure(name: str, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Return a row for every optimizer on one model."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    with device:
        model = BertForMaskedLM(BertConfig(**SIZES[name]))
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) / 1000
    found: dict[str, Update] = {}
    first, counted = {}, {}
    for optimizer, update in updates(model):
        found[optimizer], first[optimizer] = update, milliseconds(update, device) / 1e3
        if "graph" not in optimizer:
            counted[optimizer] = passes(update, parameters)
    times: dict[str, list[float]] = {optimizer: [] for optimizer in found}
    for _ in range(rounds):
        for optimizer, update in found.items():
            times[optimizer].append(milliseconds(update, device, REPEATS))
    size = sum(parameter.nbytes for parameter in parameters)
    rows = []
    for optimizer, ms in times.items():
        median = statistics.median(ms)
        number = counted[optimizer.removesuffix(", graph")]  # a graph replays the same operators
        rows.append(
            {
                "model": name,
                "parameters": size // 4,
                "optimizer": optimizer,
                "ms": round(median, 4),
                "least_ms": round(min(ms), 4),
                "largest_ms": round(max(ms), 4),
                "first_s": round(first[optimizer], 2),
                "passes": round(number, 2),
                "gb_per_s": round(number * size / median / 1e6, 1),
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Parse the command line, time every optimizer and write one JSON file."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in arguments.models:
        rows += measure(name, arguments.device, arguments.rounds)
        write(arguments.out, arguments.device, rows, rounds=arguments.rounds)


if __name__ == "__main__":
    main()
