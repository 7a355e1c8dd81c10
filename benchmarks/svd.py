"""Time spectral initialization of single matrices and of whole transformers; ``factorized bench`` has other packages.

    python -m benchmarks.svd matrices --out benchmarks/results/svd-cpu.json
    python -m benchmarks.svd models --out benchmarks/results/svd-models-cpu.json

On a CPU, times are those that one thread computed (``time.process_time``), which other processes disturb least. The
transformers have random weights: nothing is downloaded.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import factorized as fz
from benchmarks.script import parser_of, write
from factorized.experiments.bench.measure import milliseconds
from factorized.formats.svd import Method, truncated_svd
from factorized.surgery.factorize import build_layers

METHODS: tuple[Method, ...] = ("exact", "gram", "randomized")
MATRICES = [(256, 16, 10), (576, 32, 10), (1024, 64, 1), (1024, 256, 1), (2048, 128, 1), (2048, 256, 1)]
MODELS = ["BERT-base", "GPT-2", "BERT-large"]
Row = dict[str, Any]
Ways = dict[str, Callable[[], Any]]


def timed(ways: Ways, device: torch.device, rounds: int) -> tuple[Row, dict[str, Any]]:
    """Return the median, least and largest seconds of every way, measured in turn, and what each returned."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    results: dict[str, Any] = {}

    def run(name: str) -> None:
        results[name] = ways[name]()

    for _ in range(rounds):
        for name in ways:
            times[name].append(milliseconds(partial(run, name), device) / 1e3)
    spread = {
        name: {"median": round(statistics.median(t), 4), "least": round(min(t), 4), "largest": round(max(t), 4)}
        for name, t in times.items()
    }
    return spread, results


def matrices(device: torch.device, rounds: int) -> Iterable[Row]:
    """Compare the methods on Gaussian matrices, the hardest spectrum: time, error, distance from the best product."""
    for size, rank, batch in MATRICES:
        W = torch.randn(batch, size, size, device=device)
        ways: Ways = {method: partial(truncated_svd, W, rank, method) for method in METHODS}
        ways["exact"]()  # the first call loads libraries
        best = product(*truncated_svd(W.double(), rank, "exact"))
        seconds, results = timed(ways, device, rounds)
        found = {method: product(*result) for method, result in results.items()}
        yield {
            "size": size,
            "rank": rank,
            "batch": batch,
            "rounds": rounds,
            "seconds": seconds,
            "error_over_optimum": {
                m: round(float((W.double() - P).norm() / (W - best).norm()), 6) for m, P in found.items()
            },
            "from_the_best_product": {m: float(f"{(P - best).norm() / best.norm():.1e}") for m, P in found.items()},
        }


def product(U: Tensor, S: Tensor, V: Tensor) -> Tensor:
    """Return the matrix of a decomposition."""
    return (U * S.unsqueeze(-2)) @ V.mT


def transformer(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model of transformers with random weights, and the budget it gets."""
    from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    if name == "BERT-base":
        return BertModel(BertConfig()), {"ratio": 0.5}
    if name == "GPT-2":
        return GPT2LMHeadModel(GPT2Config()), {"ratio": 0.5}
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    return BertModel(BertConfig(**sizes)), {"rank": 256, "exclude": ["*embeddings*"]}


def models(device: torch.device, rounds: int, names: list[str]) -> Iterable[Row]:
    """Time what ``fz.factorize`` does before it changes a transformer, by default and exactly; a plan by spectrum."""
    for name in names:
        dense, budget = transformer(name)
        dense = dense.to(device)
        plan = fz.plan(dense, **budget)
        ways: Ways = {
            "default": partial(build_layers, dense, plan, "spectral"),
            "exact": partial(build_layers, dense, plan, "spectral", exact=True),
            "plan by spectrum": partial(fz.plan, dense, ratio=0.5, allocate="spectrum"),
        }
        seconds, results = timed(ways, device, rounds)
        error = {way: lost(dense, results[way]) for way in ("default", "exact")}
        yield {
            "model": name,
            "budget": {key: value for key, value in budget.items() if key != "exclude"},
            "layers": len(plan.selected),
            "rounds": rounds,
            "seconds": seconds,
            "error_over_optimum": round(error["default"] / error["exact"], 7),
        }


@torch.no_grad()
def lost(dense: nn.Module, layers: Mapping[str, nn.Module]) -> float:
    """Return the distance between the weights of a model and those of the layers that would replace its own."""
    pairs = [(dense.get_submodule(name).weight, layer.weight) for name, layer in layers.items()]
    squares = [(old - new).double().square().sum() for old, new in pairs]
    return float(torch.stack(squares).sum().sqrt())


def main() -> None:
    """Parse the command line, run one part and write one JSON file, row by row."""
    parser = parser_of(__doc__)
    parser.add_argument("part", choices=["matrices", "models"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device(arguments.device)
    parts: dict[str, Callable[[], Iterable[Row]]] = {
        "matrices": lambda: matrices(device, arguments.rounds),
        "models": lambda: models(device, arguments.rounds, arguments.models),
    }
    rows = []
    for row in parts[arguments.part]():
        rows.append(row)
        print(row, flush=True)
        write(arguments.out, device, rows)


if __name__ == "__main__":
    main()
