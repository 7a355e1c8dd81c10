"""Time a low-rank linear layer, forward and backward in bfloat16, at ranks that are multiples of 8 and at others.

python -m benchmarks.multiples --out benchmarks/results/multiples-h200.json
"""

from __future__ import annotations

import statistics

import torch

from benchmarks.script import parser_of, write

LAYERS = [(2048, 5632), (1024, 4096), (384, 1536), (384, 384), (256, 1024), (256, 256)]
RANKS = [15, 16, 20, 24, 31, 32, 60, 63, 64, 100, 104, 112, 126, 127, 128, 192, 200, 248, 250, 255, 256, 448, 480]
RANKS += [496, 500, 504, 508, 511, 512]


def milliseconds(inputs: int, outputs: int, rank: int, tokens: int, rounds: int) -> float:
    """Return the median time of a forward and a backward pass."""
    made = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    x, V, U = (torch.randn(*shape, **made) for shape in ((tokens, inputs), (inputs, rank), (rank, outputs)))
    gradient = torch.randn(tokens, outputs, device="cuda", dtype=torch.bfloat16)
    times = []
    for _ in range(rounds + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(6):
            torch.autograd.grad(x @ V @ U, (x, V, U), gradient)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 6)
    return statistics.median(times[3:])


def main() -> None:
    """Parse the command line, measure and write one JSON file."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for inputs, outputs in LAYERS:
        for rank in RANKS:
            spent = milliseconds(inputs, outputs, rank, arguments.tokens, arguments.rounds)
            rows.append({"inputs": inputs, "outputs": outputs, "rank": rank, "milliseconds": round(spent, 3)})
            print(rows[-1], flush=True)
    write(arguments.out, torch.device("cuda"), rows, tokens=arguments.tokens)


if __name__ == "__main__":
    main()
