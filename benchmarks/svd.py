"""Time the randomized decomposition against the exact one on a Gaussian matrix, the hardest spectrum.

python -m benchmarks.svd --out benchmarks/results/svd-cpu.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from factorized.experiments.training.record import describe_machine
from factorized.formats.svd import Method, truncated_svd


def seconds(W: torch.Tensor, rank: int, method: Method) -> float:
    """Time one decomposition."""
    if W.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    truncated_svd(W, rank, method)
    if W.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compare(size: int, rank: int, batch: int, device: str, rounds: int) -> dict[str, object]:
    """Time both ways, interleaved, and compare the randomized error ‖W - U S Vᵀ‖ with the optimum."""
    W = torch.randn(batch, size, size, device=device)
    times: dict[Method, list[float]] = {"exact": [], "randomized": []}
    for method in times:
        seconds(W, rank, method)
    for _ in range(rounds):
        for method, values in times.items():
            values.append(seconds(W, rank, method))
    error = {}
    for method in times:
        U, S, V = truncated_svd(W, rank, method)
        error[method] = torch.linalg.matrix_norm(W - (U * S.unsqueeze(-2)) @ V.mT).mean().item()
    exact, randomized = (statistics.median(times[method]) for method in ("exact", "randomized"))
    return {
        "size": size,
        "rank": rank,
        "batch": batch,
        "rounds": rounds,
        "exact_seconds": round(exact, 5),
        "randomized_seconds": round(randomized, 5),
        "times_faster": round(exact / randomized, 2),
        "error_over_optimum": round(error["randomized"] / error["exact"], 5),
    }


def main() -> None:
    """Parse the command line, run the comparison and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for size, rank, batch in [(256, 16, 10), (576, 32, 10), (1024, 64, 1), (2048, 128, 1), (2048, 256, 1)]:
        rows.append(compare(size, rank, batch, arguments.device, arguments.rounds))
        print(rows[-1], flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(
        json.dumps({"machine": describe_machine(torch.device(arguments.device)), "rows": rows}, indent=1)
    )


if __name__ == "__main__":
    main()
