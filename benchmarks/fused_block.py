"""Time low-rank WideResNets whose blocks apply batch normalization and ReLU inside the convolutions' kernels.

    python -m benchmarks.fused_block --out out/fused-stages.json               # stages, by several sizes of tiles
    python -m benchmarks.fused_block --out out/fused-step.json --network      # whole training steps

A block reads and writes its activations about half as often as what the compiler makes of it: statistics are taken
where a tensor is written, it is normalized where it is read, and the gradient of a normalized input is computed twice
from the thin gradient in place of being stored. One operator runs a block forward (``fused_kernels.py``), another one
backward (``fused_gradients.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.script import parser_of, write
from factorized.experiments.bench.networks import NETWORKS, training_way
from factorized.experiments.data.stand_in import stand_in
from factorized.experiments.models.wide_resnet import WideBlock, WideResNet
from factorized.experiments.recipes.find import load_recipe
from factorized.experiments.training.network import Start, build_dense, factorize_network, plan_network
from factorized.experiments.training.processes import Processes
from factorized.experiments.training.trainer import Trainer
from factorized.formats.launches import Launch, run_all
from factorized.formats.thin_kernels import pack_kernel
from factorized.nn.conv import FactorizedConv2d
from factorized.nn.timing import Step, median_milliseconds, training_step

LARGEST_RANK = 64  # of layers that the kernels run
AT_ONCE = 1024  # numbers that a program packs


@dataclass(frozen=True)
class Tiles:
    """What one program of the kernels handles: positions, and channels at a time."""

    project: tuple[int, int] = (128, 64)
    expand: tuple[int, int] = (128, 64)
    back: tuple[int, int] = (128, 64)
    sums: tuple[int, int] = (64, 64)
    input_gradient: tuple[int, int] = (128, 64)
    programs: int = 264  # that sum over positions, where possible
    warps: int = 4
    stages: int = 3

    def fit(self, tile: tuple[int, int], positions: int) -> tuple[int, int]:
        """Return a tile, cut so that there are enough programs for a GPU."""
        rows, channels = tile
        while rows > 16 and positions < rows * self.programs:
            rows //= 2
        return rows, channels

    @property
    def launching(self) -> dict[str, int]:
        """What every launch is told."""
        return {"num_warps": self.warps, "num_stages": self.stages}

    def splits(self, positions: int, channels: int) -> int:
        """Into how many parts positions are split for sums."""
        return max(1, min(self.programs // -(-channels // self.sums[1]), positions // self.sums[0]))


TILES = Tiles()
OTHERS = {
    "64 positions": replace(TILES, project=(64, 64), expand=(64, 64), back=(64, 64), input_gradient=(64, 64)),
    "32 channels": replace(TILES, project=(128, 32), expand=(128, 32), back=(128, 32), input_gradient=(128, 32)),
    "64 positions, 32 channels": replace(TILES, project=(64, 32), expand=(64, 32), input_gradient=(64, 32)),
    "32 channels in sums": replace(TILES, sums=(64, 32)),
    "128 positions in sums": replace(TILES, sums=(128, 32)),
    "twice the programs": replace(TILES, programs=528),
    "2 stages": replace(TILES, stages=2),
    "4 stages": replace(TILES, stages=4),
    "8 warps": replace(TILES, warps=8),
}
STAGES = ((160, 32, 15), (320, 16, 31), (640, 8, 61))  # channels, height and width, rank: WideResNet-28-10 at 0.0667
BATCH, BLOCKS = 128, 3


def _each(x: Tensor) -> int:
    """Return of how many positions a part of statistics is."""
    return TILES.fit(TILES.expand, x.numel() // x.shape[1])[0]


def forward_launches(
    x: Tensor,  # (batch, channels, height, width), channels-last
    known: tuple[Tensor, int],  # parts of the statistics of x, and of how many positions each is
    parameters: Sequence[Tensor],  # gamma, beta, U, V
    epsilon: float,
    residual: Tensor | None,
    results: Sequence[Tensor],  # written: y, its parts, the thin tensor, packed factors, statistics, coefficients
) -> list[Launch]:
    """Normalize, activate and convolve x, and add the residual."""
    from benchmarks import fused_kernels as kernels

    gamma, beta, U, V = parameters
    y, parts, thin, packed, statistics, coefficients = results
    (channels, height, width), R = x.shape[1:], packed.shape[1]
    positions, own_U, own_V = x.numel() // channels, packed[: len(U)], packed[len(U) :]
    spread = thin.new_empty((positions, 3 * R))
    packing = (U.contiguous(), V.contiguous(), packed, len(U), len(packed), U.shape[1], R)
    norm = (known[0], gamma, beta, statistics, coefficients, len(known[0]), positions, known[1], epsilon)
    (bm, bc), (em, en) = (TILES.fit(tile, positions) for tile in (TILES.project, TILES.expand))
    launching = TILES.launching
    sizes = {"H": height, "W": width, "O": channels, "R": R, "RESIDUAL": residual is not None, "BM": em, "BN": en}
    added = y if residual is None else residual
    return [
        Launch(pack_kernel, -(-packed.numel() // AT_ONCE), packing, {"SIZE": AT_ONCE}),
        Launch(kernels.statistics_kernel, -(-channels // 8), norm, {"C": channels, "BP": 256, "BC": 8}),
        Launch(
            kernels.project_kernel,
            -(-positions // bm),
            (x, coefficients, own_V, spread, positions),
            {"C": channels, "R": R, "BM": bm, "BC": bc, **launching},
        ),
        Launch(
            kernels.expand_kernel,
            len(parts),
            (spread, own_U, added, thin, y, parts, positions),
            {**sizes, **launching},
        ),
    ]


def backward_launches(
    gradient: Tensor,  # of y
    x: Tensor,
    kept: Sequence[Tensor],  # thin tensor, packed factors, statistics, coefficients
    epsilon: float,
    residual: Tensor | None,  # gradient that is added to that of x
    results: Sequence[Tensor],  # written: the gradients of x, of U and V in parts, of beta and gamma
) -> list[Launch]:
    """Go back to x and the parameters."""
    from benchmarks import fused_gradients as kernels

    thin, packed, statistics, coefficients = kept
    x_gradient, of_U, of_V, of_norm = results
    (channels, height, width), R = x.shape[1:], packed.shape[1]
    positions, own_U, own_V = x.numel() // channels, packed[: 3 * channels], packed[3 * channels :]
    thin_gradient, back = torch.empty_like(thin), statistics.new_empty((3, channels))
    parts = statistics.new_empty((len(of_V), 2, channels))
    (bm, bc), (im, ic) = (TILES.fit(tile, positions) for tile in (TILES.back, TILES.input_gradient))
    (gm, gc), launching = TILES.sums, TILES.launching
    span, summing = -(-positions // (len(of_U) * gm)) * gm, len(of_U) * -(-channels // gc)
    added = x_gradient if residual is None else residual
    return [
        Launch(
            kernels.thin_gradients_kernel,
            summing - (-positions // bm),
            (gradient, thin, own_U, thin_gradient, of_U, positions, span, summing),
            {"H": height, "W": width, "O": channels, "R": R, "BM": bm, "BC": bc, "GM": gm, "GC": gc, **launching},
        ),
        Launch(
            kernels.norm_sums_kernel,
            summing,
            (x, coefficients, statistics, own_V, thin_gradient, of_V, parts, positions, span, epsilon),
            {"W": width, "C": channels, "R": R, "GM": gm, "GC": gc, **launching},
        ),
        Launch(
            kernels.norm_coefficients_kernel,
            -(-channels // 8),
            (parts, statistics, coefficients, of_norm, back, len(parts), positions, epsilon),
            {"C": channels, "BP": 128, "BC": 8},
        ),
        Launch(
            kernels.input_gradient_kernel,
            -(-positions // im),
            (x, coefficients, back, own_V, thin_gradient, added, x_gradient, positions),
            {
                **{"W": width, "C": channels, "R": R, "RESIDUAL": residual is not None, "BM": im, "BC": ic},
                **launching,
            },
        ),
    ]


@torch.library.custom_op(
    "factorized_benchmarks::wide_block",
    mutates_args=(),
    schema="(Tensor x, Tensor parts, int each, Tensor[] parameters, float epsilon) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _wide_block(x: Tensor, parts: Tensor, each: int, parameters: Sequence[Tensor], epsilon: float) -> Any:
    """Return the block's result, parts of its statistics, and what the backward pass needs."""
    results = _empty_results(x, parts, each, parameters, epsilon)
    y, y_parts, between, *others = results
    between_parts = torch.empty_like(y_parts)
    first = (between, between_parts, *(tensor[0] for tensor in others))
    second = (y, y_parts, *(tensor[1] for tensor in others))
    launches = forward_launches(x, (parts, each), parameters[:4], epsilon, None, first)
    launches += forward_launches(between, (between_parts, _each(x)), parameters[4:], epsilon, x, second)
    run_all(launches, x.device)
    return results


@_wide_block.register_fake
def _empty_results(x: Tensor, parts: Tensor, each: int, parameters: Sequence[Tensor], epsilon: float) -> Any:
    batch, channels, height, width = x.shape
    R = max(16, 1 << (max(parameters[2].shape[1], parameters[6].shape[1]) - 1).bit_length())
    programs = -(-batch * height * width // _each(x))
    y, between = (x.new_empty((batch, height, width, channels)).permute(0, 3, 1, 2) for _ in range(2))
    norms = x.new_empty((2, 2, channels), dtype=torch.float32)
    return (
        y,
        x.new_empty((programs, 2, channels), dtype=torch.float32),
        between,
        x.new_empty((2, batch, height, width, R)),
        x.new_empty((2, 6 * channels, R)),
        norms,
        torch.empty_like(norms),
    )


@torch.library.custom_op(
    "factorized_benchmarks::wide_block_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor x, Tensor between, Tensor[] kept, float epsilon) -> (Tensor, Tensor, Tensor)",
)
def _wide_block_backward(gradient: Tensor, x: Tensor, between: Tensor, kept: Sequence[Tensor], epsilon: float) -> Any:
    """Return the gradients of x, of the factors of both layers in parts, and of beta and gamma of both."""
    x_gradient, sums, of_norms = results = _empty_gradients(gradient, x, between, kept, epsilon)
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    between_gradient = torch.empty_like(x_gradient)
    first, second = ([tensor[number] for tensor in kept] for number in range(2))
    launches = backward_launches(
        gradient, between, second, epsilon, None, (between_gradient, *sums[1], of_norms[1])
    ) + backward_launches(between_gradient, x, first, epsilon, gradient, (x_gradient, *sums[0], of_norms[0]))
    run_all(launches, x.device)
    return results


@_wide_block_backward.register_fake
def _empty_gradients(gradient: Tensor, x: Tensor, between: Tensor, kept: Sequence[Tensor], epsilon: float) -> Any:
    batch, channels, height, width = x.shape
    splits, R = TILES.splits(batch * height * width, channels), kept[0].shape[-1]
    x_gradient = x.new_empty((batch, height, width, channels)).permute(0, 3, 1, 2)
    sums = x.new_empty((2, 2, splits, 3 * channels, R), dtype=torch.float32)
    return x_gradient, sums, torch.empty_like(kept[2])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, _, parameters, ctx.epsilon = inputs
    ctx.ranks = [parameters[number].shape[1] for number in (2, 6)]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, *output[2:])


def _backward(ctx: Any, gradient: Tensor, *_: Tensor | None) -> tuple[Any, ...]:
    x, between, *kept = ctx.saved_tensors
    x_gradient, sums, of_norms = _wide_block_backward(gradient, x, between, kept, ctx.epsilon)
    of_factors = sums.sum(2)  # (layer, factor, channels·3, R)
    found: list[Tensor] = []
    for number, rank in enumerate(ctx.ranks):
        of_U, of_V = of_factors[number, :, :, :rank].unbind()
        of_beta, of_gamma = of_norms[number].unbind()
        found += [of_gamma, of_beta, of_U, of_V]
    return x_gradient, None, None, found, None


_wide_block.register_autograd(_backward, setup_context=_remember)


class FusedBlocks(nn.Module):
    """A stage of a WideResNet: its first block as it is, the others by the kernels while they are trained."""

    def __init__(self, blocks: Sequence[WideBlock]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(
        self,
        x: Tensor,  # (batch, channels, height, width), channels-last
    ) -> Tensor:
        """Run the blocks."""
        first, *others = self.blocks
        x = first(x)
        if not self.training:
            for block in others:
                x = block(x)
            return x
        kind = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        x = x.to(kind)
        positions = x.numel() // x.shape[1]
        variance, mean = torch.var_mean(x.detach().float(), dim=(0, 2, 3), correction=0)
        parts, each = torch.stack([mean, variance * positions])[None], positions
        for block in others:
            layers = ((block.bn1, block.conv1), (block.bn2, block.conv2))
            parameters = [tensor for norm, conv in layers for tensor in (norm.weight, norm.bias, *conv.factors)]
            x, parts, _, _, _, statistics, _ = _wide_block(x, parts, each, parameters, block.bn1.eps)
            each = _each(x)
            for (norm, _), (mean, variance) in zip(layers, statistics.detach().unbind(), strict=True):
                norm.running_mean.lerp_(mean, norm.momentum)
                norm.running_var.lerp_(variance * (positions / (positions - 1)), norm.momentum)
        return x


def fuse(network: WideResNet) -> WideResNet:
    """Let the kernels run the blocks of a network, in place; return it."""
    for number, stage in enumerate(network.stages):
        convolutions = [conv for block in stage[1:] for conv in (block.conv1, block.conv2)]
        if all(
            isinstance(conv, FactorizedConv2d) and conv.factors[0].shape[1] <= LARGEST_RANK for conv in convolutions
        ):
            network.stages[number] = FusedBlocks(list(stage))
    return network


def stage_of(channels: int, rank: int, device: torch.device) -> list[WideBlock]:
    """Return low-rank blocks of a stage, drawn at random."""
    blocks = [WideBlock(channels, channels, 1) for _ in range(BLOCKS)]
    for block in blocks:
        block.conv1, block.conv2 = (FactorizedConv2d.from_dense(c, rank) for c in (block.conv1, block.conv2))
    return [block.to(device) for block in blocks]


def compare_stages(rounds: int) -> list[dict[str, Any]]:
    """Time the blocks of every stage, forward and backward: compiled, and by the kernels with several tiles."""
    global TILES
    device, rows, own = torch.device("cuda"), [], TILES
    for channels, size, rank in STAGES:
        torch._dynamo.reset()
        blocks = stage_of(channels, rank, device)
        x = torch.randn(BATCH, channels, size, size, device=device, dtype=torch.bfloat16)
        x = x.to(memory_format=torch.channels_last).requires_grad_()
        steps: dict[str, Step] = {}
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            steps["compiled"] = training_step(nn.Sequential(*copy.deepcopy(blocks)).train(), x, compiled=True)
            for name, tiles in {"kernels": own, **OTHERS}.items():
                torch._dynamo.reset()
                TILES = tiles
                fused = FusedBlocks([nn.Identity(), *blocks]).train()  # type: ignore[list-item]
                try:
                    steps[name] = training_step(fused, x, compiled=True)
                except Exception as error:  # too much shared memory, say: the others go on
                    print(channels, name, str(error)[:200], flush=True)
            times = median_milliseconds(steps, cuda=True, rounds=rounds, repeats=20)
        for name, ms in times.items():
            print(channels, size, rank, name, f"{ms:.4f} ms", f"{ms / times['compiled']:.2f}", flush=True)
            rows.append({"channels": channels, "size": size, "rank": rank, "way": name, "ms": round(ms, 4)})
    TILES = own
    return rows


def fused_step(name: str, batch: int) -> Step:
    """Return the training step of a recipe whose blocks the kernels run."""
    device, images = torch.device("cuda"), stand_in("noise", 10, 32, 3, 2 * batch)
    recipe = load_recipe(name, [f"run.batch={batch}"])
    dense = build_dense(recipe, images, seed=0)
    plan = plan_network(recipe, dense, images)
    network = factorize_network(recipe, dense, plan, None)
    trainer = Trainer(recipe, images, Processes(device), 0, start=Start(fuse(network), plan))
    trainer.source.start(0, 0)
    return trainer.step


def compare_steps(rounds: int) -> list[dict[str, Any]]:
    """Time whole training steps: dense, and low rank with and without the kernels."""
    names = {way: name for way, name in NETWORKS["WideResNet-28-10"].items() if way.startswith(("dense", "low"))}
    steps: dict[str, Step] = {}
    for way, name in names.items():
        steps[way] = training_way(name, BATCH, torch.device("cuda")).run
        if way != "dense":
            torch._dynamo.reset()
            steps[f"{way}, kernels"] = fused_step(name, BATCH)
    times = median_milliseconds(steps, cuda=True, rounds=rounds, repeats=8)
    for way, ms in times.items():
        print(way, f"{ms:.3f} ms", f"{ms / times['dense']:.3f}", flush=True)
    return [{"way": way, "ms": round(ms, 4)} for way, ms in times.items()]


def main() -> None:
    """Parse the command line, measure, and write one JSON file."""
    parser = parser_of(__doc__)
    parser.add_argument("--network", action="store_true", help="whole training steps in place of stages")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    rows = compare_steps(arguments.rounds) if arguments.network else compare_stages(arguments.rounds)
    write(arguments.out, torch.device("cuda"), rows, rounds=arguments.rounds, batch=BATCH, tiles=asdict(TILES))


if __name__ == "__main__":
    main()
