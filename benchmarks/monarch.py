"""Compare Monarch matrices with low rank: how well each approximates a weight at the same number of parameters.

    python -m benchmarks.monarch --out benchmarks/results/monarch-cpu.json

``b`` × ``b`` blocks of rank r have exactly as many parameters as one block of rank ``b·r``. One block is low rank: for
a matrix ``fz.LowRank()``, for a kernel ``fz.LowRank("channel")``; kernels are also approximated by
``fz.LowRank("spatial")``, with at most as many parameters. Errors are ‖W - Ŵ‖ / ‖W‖ of the best approximation: means
and deviations over seeds of the draw or the training. The trained weights are those of ``digits/resnet8`` and of a
perceptron on the same digits. Times are medians of interleaved rounds, relative to those of low rank.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import factorized as fz
from benchmarks.script import parser_of, write
from factorized.experiments.data.digits import load_digits
from factorized.experiments.data.images import Images
from factorized.experiments.recipes.find import load_recipe
from factorized.experiments.training.train import train
from factorized.experiments.training.trained import load_trained
from factorized.formats.kernel import KernelShape, to_matrix
from factorized.nn.timing import median_milliseconds, training_step

BLOCKS = (1, 4, 16, 32)
SHARES = (0.1, 0.25, 0.5)  # of the dense parameters
SIGNAL_RANK = 32


def random_weights(seed: int) -> Iterator[tuple[str, Tensor]]:
    """Draw Gaussian matrices, and structured matrices with a tenth of their energy in noise."""
    torch.manual_seed(seed)
    for size in (256, 768):
        yield f"Gaussian {size}×{size}", torch.randn(size, size)
    for size in (256, 768):
        signal = torch.randn(size, SIGNAL_RANK) @ torch.randn(SIGNAL_RANK, size) / SIGNAL_RANK**0.5
        yield f"rank {SIGNAL_RANK} and noise {size}×{size}", noisy(signal)
    rows, columns = torch.randn(16, 16, 16, 1), torch.randn(16, 16, 1, 16)
    yield "16×16 blocks of rank 1 and noise 256×256", noisy((rows @ columns).transpose(1, 2).reshape(256, 256))


def noisy(signal: Tensor) -> Tensor:
    """Return entries of variance 1, a tenth of which is noise."""
    return 0.9**0.5 * signal + 0.1**0.5 * torch.randn_like(signal)


def perceptron_weights(seed: int, images: Images, epochs: int) -> tuple[list[tuple[str, Tensor]], float]:
    """Train a perceptron; return its wide weights and its test accuracy in percent."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
    network.extend([nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)])
    x, y = images.x_train.flatten(1).float() / 255, images.y_train
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(network(x[rows]), y[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        right = network(images.x_test.flatten(1).float() / 255).argmax(1) == images.y_test
    weights = [("perceptron 512×512", network[2].weight.detach()), ("perceptron 256×512", network[4].weight.detach())]
    return weights, 100 * right.float().mean().item()


def resnet_weights(run: Path) -> tuple[list[tuple[str, Tensor]], float]:
    """Return the last kernels of every width of a trained ResNet-8, and its test accuracy in percent."""
    _, result, network = load_trained(run)
    kernels = {m.weight.shape: m.weight.detach() for m in network.modules() if isinstance(m, nn.Conv2d)}
    wide = [kernel for shape, kernel in kernels.items() if shape[0] == shape[1] >= 32]
    return [(f"ResNet-8 {'×'.join(map(str, kernel.shape))}", kernel) for kernel in wide], result["accuracy"]


def errors(weight: Tensor) -> dict[tuple[float, str], float]:
    """Return the relative error of the best approximation by share of the parameters and format."""
    shape = KernelShape.of(weight.shape)
    one = fz.Monarch(1).at_rank(shape, 1).numel  # parameters of a rank in one block
    found = {}
    for wanted in (share * weight.numel() / one for share in SHARES):  # the rank of one block
        fitting = [b for b in BLOCKS if b <= 1.3 * wanted]
        total = round(wanted / fitting[-1]) * fitting[-1]  # a multiple of all of them
        share = total * one / weight.numel()
        for b in fitting:
            blocks = weight.reshape(b, shape.out_channels // b, b, -1).transpose(1, 2)
            found[share, str(b)] = beyond(blocks, total // b)
        if shape.size:
            found[share, "spatial"] = beyond(
                to_matrix(weight, shape), total * one // fz.LowRank().at_rank(shape, 1).numel
            )
    return found


def beyond(
    matrices: Tensor,  # (..., m, n)
    rank: int,
) -> float:
    """Return the share of the norm that the best approximations of this rank leave out, by exact SVD."""
    return (torch.linalg.svdvals(matrices)[..., rank:].norm() / matrices.norm()).item()


def times_over_low_rank(rounds: int) -> dict[int, float]:
    """Time training steps of a linear 768×768 on 256 rows at a quarter of its parameters, as chains; b = 1 is 1."""
    dense, x = nn.Linear(768, 768), torch.randn(256, 768, requires_grad=True)
    shape = KernelShape.of(dense.weight.shape)
    formats = {1: fz.LowRank().at_rank(shape, 96)}
    formats |= {b: fz.Monarch(b).at_rank(shape, 96 // b) for b in BLOCKS[1:]}
    layers = {b: fz.FactorizedLinear.from_dense(dense, format, execution="chain") for b, format in formats.items()}
    steps = {b: training_step(layer, x) for b, layer in layers.items()}
    times = median_milliseconds(steps, cuda=False, rounds=rounds)
    return {b: round(ms / times[1], 2) for b, ms in times.items()}


def main() -> None:
    """Parse the command line, measure and write one JSON file."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20, help="of the perceptron")
    parser.add_argument("--rounds", type=int, default=101, help="of timing")
    arguments = parser.parse_args()
    images, seeds = load_digits(), range(arguments.seeds)
    measured: dict[str, list[dict[tuple[float, str], float]]] = {}
    accuracy: dict[str, list[float]] = {"perceptron": [], "ResNet-8": []}
    with tempfile.TemporaryDirectory() as folder:
        train(load_recipe("digits/resnet8"), images, Path(folder), seeds=tuple(seeds), device="cpu")
        for seed in seeds:
            perceptron, right = perceptron_weights(seed, images, arguments.epochs)
            accuracy["perceptron"].append(round(right, 2))
            kernels, right = resnet_weights(Path(folder) / f"seed-{seed}")
            accuracy["ResNet-8"].append(round(right, 2))
            for name, weight in (*random_weights(seed), *perceptron, *kernels):
                measured.setdefault(name, []).append(errors(weight))
                print(seed, name, measured[name][-1], flush=True)
    rows = [
        {
            "weight": name,
            "share": round(share, 4),
            "blocks": blocks if blocks == "spatial" else int(blocks),
            "error": round(mean(run[share, blocks] for run in runs), 4),
            "deviation": round(stdev(run[share, blocks] for run in runs), 4),
        }
        for name, runs in measured.items()
        for share, blocks in runs[0]
    ]
    about = {"seeds": arguments.seeds, "accuracy": accuracy, "rounds": arguments.rounds}
    write(arguments.out, torch.device("cpu"), rows, **about, times=times_over_low_rank(arguments.rounds))


if __name__ == "__main__":
    main()
