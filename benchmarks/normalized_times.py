"""Time the kernels that normalize inside convolutions (``experiments/models/normalized/``) by several sizes of tiles.

    python -m benchmarks.normalized_times --out out/normalized-kernels.json

Kernels are built by several processes at once, and timed afterwards, while nothing else runs. Microseconds of a kernel
are those of a CUDA graph of ten launches, whose data may stay in the L2 cache where they fit. ``benchmarks.versions``
times whole training steps.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.script import parser_of, write
from factorized.experiments.models.normalized import launches
from factorized.experiments.models.normalized import tiles as sizes
from factorized.experiments.models.normalized.tiles import TILES, Tiles
from factorized.formats.launches import Launch
from factorized.nn.timing import capture, median_milliseconds

# channels, height and width, rank: WideResNet-28-10 at 0.0667, ResNet-32x2 at 0.1
STAGES = ((160, 32, 15), (320, 16, 31), (640, 8, 61), (64, 32, 9), (128, 16, 18), (256, 8, 36))
BATCH = 128
LAUNCHES = 10  # of a kernel in one graph
SETTINGS: Mapping[str, Tiles] = {
    "own": TILES,
    "64 positions": replace(TILES, positions=64, programs=1),
    "64 positions, walks of 32 channels": replace(TILES, positions=64, programs=1, walk_channels=32),
    "256 positions, 8 warps": replace(TILES, positions=256, warps=8),
    "8 warps": replace(TILES, warps=8),
    "64 channels": replace(TILES, channels=64),
    "32 channels": replace(TILES, channels=32),
    "2 stages": replace(TILES, stages=2),
    "4 stages": replace(TILES, stages=4),
    "walks of 32 channels": replace(TILES, walk_channels=32),
    "walks of 32 channels, 128 positions": replace(TILES, walk_channels=32, walk_size=4096),
    "masked walks": replace(TILES, walks_fit=False),
    "masked walks, twice the size, 8 warps": replace(TILES, walks_fit=False, walk_size=4096, warps=8),
    "walks of half the size": replace(TILES, walk_size=1024),
    "walks of twice the size": replace(TILES, walk_size=4096),
    "twice the size, 8 warps": replace(TILES, walk_size=4096, warps=8),
    "twice the walks": replace(TILES, walk_programs=528),
    "four times the walks": replace(TILES, walk_programs=1056),
    "1 tile ahead": replace(TILES, ahead=1),
    "2 tiles ahead": replace(TILES, ahead=2),
    "4 tiles ahead": replace(TILES, ahead=4),
    "2 tiles ahead, twice the walks": replace(TILES, ahead=2, walk_programs=528),
    "streams of half the size, half the warps": replace(
        TILES, stream_size=2048, stream_warps=4, cover_size=2048, cover_warps=2
    ),
    "streams of half the size, twice the walks": replace(TILES, stream_size=2048, walk_programs=528, cover_size=1024),
    "streams of twice the size": replace(TILES, stream_size=8192, cover_size=8192),
    "streams of half the warps": replace(TILES, stream_warps=4, cover_warps=8),
}


def launches_of(stage: tuple[int, int, int], batch: int, tiles: Tiles, device: torch.device) -> dict[str, Launch]:
    """Return the launches of a convolution, forward and backward, on random numbers."""
    sizes.TILES = tiles  # which the sizes of results depend on, too
    channels, size, rank = stage
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    random = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int, dtype: torch.dtype = kind) -> Tensor:
        return torch.randn(shape, generator=random, device=device, dtype=dtype)

    x, gradient, residual, y = (drawn(batch, size, size, channels).permute(0, 3, 1, 2) for _ in range(4))
    R = max(16, 1 << (rank - 1).bit_length())
    walk, summing, stream = tiles.walk(x), tiles.walk(x, R), tiles.stream(x)
    norm = [drawn(channels, dtype=torch.float32) for _ in range(2)]
    factors = [drawn(3 * channels, rank, dtype=torch.float32) / (3 * channels) ** 0.5 for _ in range(2)]
    parts = drawn(walk.splits, 2, channels, dtype=torch.float32).square()
    thin, packed = drawn(batch, size, size, R), drawn(6 * channels, R)
    statistics, coefficients = (drawn(2, channels, dtype=torch.float32).square() for _ in range(2))
    sums = drawn(2, summing.splits, 3 * channels, R, dtype=torch.float32)
    parts_of_x = drawn(stream.splits, 2, channels, dtype=torch.float32).square()
    running = (norm[0].clone(), norm[1].clone(), 0.1)
    of_norm = torch.empty_like(statistics)
    kept = (thin, packed, statistics, coefficients)
    found = launches.forward_launches(x, coefficients, factors, residual, (y, parts, thin, packed))
    found += launches.backward_launches(gradient, x, kept, 1e-5, residual, (y, *sums, of_norm))
    found.append(launches.measuring(x, parts_of_x))
    join = launches.joining((parts, walk.span), walk.positions, (*norm, 1e-5), running, (statistics, coefficients))
    of_sum = launches.activation_gradient_launches(
        gradient, x, y, statistics, coefficients, 1e-5, residual, torch.empty_like(y), of_norm
    )
    alone = launches.activation_gradient_launches(
        gradient, x, None, statistics, coefficients, 1e-5, residual, residual, of_norm
    )
    found += [join, *launches.activation_launches(x, coefficients, residual, y), *of_sum[::2]]
    named = {launch.kernel.__name__.removesuffix("_kernel"): launch for launch in found}
    without = [*launches.activation_launches(x, coefficients, None, y), *alone[::2]]
    return named | {f"{launch.kernel.__name__.removesuffix('_kernel')}, no shortcut": launch for launch in without}


def build(place: int, name: str) -> None:
    """Run the kernels of a setting once, so that they are in Triton's cache."""
    for launch in launches_of(STAGES[place], BATCH, SETTINGS[name], torch.device("cuda")).values():
        launch.run()
    torch.cuda.synchronize()


def time_kernels(rounds: int, processes: int, seconds: float) -> list[dict[str, Any]]:
    """Return a row for each kernel of each stage: its time by each setting, or why that failed."""
    names = [(place, name) for place in range(len(STAGES)) for name in SETTINGS]
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=1) as pool:
        tasks = {key: pool.apply_async(build, key) for key in names}
        failed: dict[tuple[int, str], str] = {}
        for key, task in tasks.items():
            try:
                task.get(seconds)
            except Exception as error:  # too much shared memory, say: the others go on
                failed[key] = f"{type(error).__name__}: {error}"[:200]
    rows = []
    for place, (channels, size, rank) in enumerate(STAGES):
        steps: dict[tuple[str, str], Callable[[], object]] = {}
        for name, tiles in SETTINGS.items():
            if (place, name) not in failed:
                for kernel, launch in launches_of(STAGES[place], BATCH, tiles, torch.device("cuda")).items():
                    steps[kernel, name] = capture(partial(_repeat, launch))
        times = median_milliseconds(steps, cuda=True, rounds=rounds)
        why = {name: text for (where, name), text in failed.items() if where == place}
        for kernel in dict.fromkeys(kernel for kernel, _ in steps):
            took = {name: round(ms * 1e3 / LAUNCHES, 2) for (own, name), ms in times.items() if own == kernel}
            best = min(took, key=lambda name: took[name])
            print(f"{channels} channels, {kernel}: own {took.get('own')} us, best {best} {took[best]}", flush=True)
            row = {"channels": channels, "size": size, "rank": rank, "kernel": kernel}
            rows.append({**row, "microseconds": took, "failed": why})
    return rows


def _repeat(launch: Launch) -> None:
    for _ in range(LAUNCHES):
        launch.run()


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, and write one JSON file."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=150, help="to build in; what takes longer is left out")
    parser.add_argument("--processes", type=int, default=14, help="that build kernels at the same time")
    given = parser.parse_args(words)
    rows = time_kernels(given.rounds, given.processes, given.seconds)
    write(given.out, torch.device("cuda"), rows, rounds=given.rounds, batch=BATCH, tiles=asdict(TILES))


if __name__ == "__main__":
    main()
