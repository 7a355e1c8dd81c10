"""Time the products of low-rank decoder layers for one sequence, with several settings of the kernels.

    python -m benchmarks.decode_settings --out FILE
    python -m benchmarks.decode_settings --width 4096 --kernel RING=12288,WARPS=1 --kernel PROGRAMS=4 --out FILE

A chain is the eight products of every layer after ``fz.integrations.fuse_decoder``, without attention: one CUDA graph
over so many layers that each matrix comes from memory and not from the L2 cache. Nothing is compiled but the kernels,
by several processes at once, which also try them. Times are medians of rounds that are interleaved over the settings,
in microseconds a layer; ``error`` is that of the chain's last result against float64. A setting that fails has the
message of its error instead.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import ring
from benchmarks.script import parser_of, write
from factorized.nn import one_row
from factorized.nn.one_row import multiply
from factorized.nn.timing import capture, median_milliseconds

OWN = ("PROGRAMS", "WARPS", "REGISTERS", "BLOCK", "ELEMENTS", "LATENCY")  # of the library's kernel
OF_RING = ("RING", "PROGRAMS", "WARPS", "BUFFERS", "VECTORS", "OVERHEAD")  # of the one that reads into a ring
SETTINGS: tuple[Mapping[str, int], ...] = (
    {"PROGRAMS": 8},  # as it is
    {"PROGRAMS": 4},  # half of the registers, so that the next kernel's programs fit beside
    {"RING": 12_288, "WARPS": 1, "PROGRAMS": 8},
    {"RING": 12_288, "WARPS": 1, "PROGRAMS": 8, "VECTORS": 4},
    {"RING": 6_144, "WARPS": 1, "PROGRAMS": 16},
    {"RING": 24_576, "WARPS": 1, "PROGRAMS": 8},  # all shared memory: no room for the next kernel's programs
    {"RING": 24_576, "WARPS": 2, "PROGRAMS": 4},
    {"RING": 24_576, "WARPS": 4, "PROGRAMS": 4},
    {"RING": 49_152, "WARPS": 4, "PROGRAMS": 2},
    {"RING": 16_384, "WARPS": 4, "PROGRAMS": 4},  # room for three kernels
)
EPS = 1e-6
SECONDS = 90  # for all settings to be built and tried


class Sizes(NamedTuple):
    """Of the layers of a model."""

    width: int
    rank: int
    hidden: int  # outputs of gate and up
    layers: int


# width: that of the models of benchmarks.decode at half the parameters
MODELS = {
    2048: Sizes(2048, 640, 5632, layers=10),
    4096: Sizes(4096, 1216, 11_008, layers=4),
    64: Sizes(64, 24, 160, layers=2),
}


class Layer(NamedTuple):
    """The matrices of a decoder layer, as ``fuse_decoder`` keeps them, and the weight of both norms."""

    norm: Tensor
    qkv: tuple[Tensor, Tensor]
    out: tuple[Tensor, Tensor]
    up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]

    @property
    def nbytes(self) -> int:
        """Those of the matrices."""
        return sum(matrix.nbytes for pair in self[1:] for matrix in pair)


def constants(text: str) -> dict[str, int]:
    """Return the constants in a text such as ``BLOCK=512,PROGRAMS=4``."""
    try:
        found = {name: int(value) for name, value in (word.split("=") for word in text.split(","))}
    except ValueError:
        found = {}
    if not found or not set(found) <= set(OF_RING if "RING" in found else OWN):
        raise argparse.ArgumentTypeError(
            f"must be like BLOCK=512,PROGRAMS=4, of {', '.join(OWN)}, or with RING {', '.join(OF_RING)}; got {text}"
        )
    return found


@contextmanager
def changed(setting: Mapping[str, int]) -> Iterator[None]:
    """Let the library's kernel have other constants, or the one with a ring take its place, in a context."""
    with ExitStack() as stack:
        if "RING" in setting:
            stack.enter_context(patch.object(one_row, "multiply_row", ring.multiply_row))
        if setting:
            stack.enter_context(patch.multiple(ring if "RING" in setting else one_row, **setting))
        yield


def draw(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[list[Layer], Tensor]:
    """Return layers with random weights, and a row."""
    width, rank, hidden, layers = sizes
    random = torch.Generator(device).manual_seed(0)

    def matrix(outputs: int, inputs: int) -> Tensor:
        drawn = torch.randn(outputs, inputs, generator=random, device=device, dtype=dtype)
        return drawn.div_(inputs**0.5)

    def pair(layers: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
        return matrix(layers * rank, inputs), matrix(layers * outputs, rank)

    drawn = [
        Layer(
            matrix(1, width).flatten() + 1,
            pair(3, width, width),
            pair(1, width, width),
            pair(2, hidden, width),
            pair(1, width, hidden),
        )
        for _ in range(layers)
    ]
    return drawn, torch.randn(1, width, generator=random, device=device, dtype=dtype)


def apply(layer: Layer, x: Tensor, sizes: Sizes) -> Tensor:  # (1, width) to the same
    """Apply the products of a layer; in place of the attention, the queries go on."""
    width, rank, hidden, _ = sizes
    thin = multiply(x, layer.qkv[0], norm=layer.norm, eps=EPS)
    attended = multiply(thin, layer.qkv[1], parts=[(width, rank)] * 3)[:, :width]
    x = multiply(multiply(attended, layer.out[0]), layer.out[1], residual=x, parts=[(width, rank)])
    thin = multiply(x, layer.up[0], norm=layer.norm, eps=EPS)
    middle = multiply(thin, layer.up[1], gated=True, parts=[(hidden, rank)] * 2)
    return multiply(multiply(middle, layer.down[0]), layer.down[1], residual=x, parts=[(width, rank)])


def exact(layers: Sequence[Layer], x: Tensor, sizes: Sizes) -> Tensor:
    """Return in float64 what all layers return."""
    y = x.double()
    with patch.object(one_row, "_has_kernel", lambda *tensors: False):
        for layer in layers:
            wide = [tuple(matrix.double() for matrix in pair) for pair in layer[1:]]
            y = apply(Layer(layer.norm.double(), *wide), y, sizes)
    return y


def chain(layers: Sequence[Layer], x: Tensor, sizes: Sizes, result: Tensor) -> Callable[[], object]:
    """Return a function that applies all layers and writes the result."""

    def run() -> object:
        y = x
        for layer in layers:
            y = apply(layer, y, sizes)
        return result.copy_(y)

    return run


def torch_chains(layers: Sequence[Layer], x: Tensor, sizes: Sizes) -> dict[str, Callable[[], object]]:
    """Return functions that compute by plain torch, not compiled: the low-rank products, and those of dense layers."""
    width, _, hidden, count = sizes
    low_rank = chain(layers, x, sizes, torch.empty_like(x))
    shapes = [(width, width)] * 4 + [(hidden, width)] * 2 + [(width, hidden)]
    dense = [[torch.randn(shape, dtype=x.dtype, device=x.device) / 100 for shape in shapes] for _ in range(count)]

    def by_torch() -> object:
        with patch.object(one_row, "_has_kernel", lambda *tensors: False):
            return low_rank()

    def by_dense() -> object:
        y = x
        for queries, keys, values, out, gate, up, down in dense:
            thin = F.rms_norm(y, (width,), layers[0].norm, EPS)
            attended = F.linear(thin, queries)
            F.linear(thin, keys)
            F.linear(thin, values)
            y = y + F.linear(attended, out)
            thin = F.rms_norm(y, (width,), layers[0].norm, EPS)
            y = y + F.linear(F.silu(F.linear(thin, gate)) * F.linear(thin, up), down)
        return y

    return {"low rank by torch": by_torch, "dense by torch": by_dense}


@torch.no_grad()
def build(setting: Mapping[str, int], width: int) -> str:
    """Run one layer, so that its kernels are in Triton's cache; return why it failed, or an empty text."""
    sizes = MODELS[width]._replace(layers=1)
    try:
        layers, x = draw(sizes, torch.bfloat16, torch.device("cuda"))
        torch.cuda.synchronize()
        with changed(setting):
            apply(layers[0], x, sizes)
        torch.cuda.synchronize()
    except Exception as error:
        return message(error)
    return ""


def build_all(
    settings: Sequence[Mapping[str, int]], widths: Sequence[int], processes: int
) -> dict[tuple[int, int], str]:  # (width, place of the setting)
    """Build and run the kernels, each setting in a process of its own, several at once; return why some failed.

    A kernel that reads a wrong address leaves its process without a GPU. If all fail, it is not for their settings,
    and none is returned.
    """
    until = time.monotonic() + SECONDS
    failures = {}
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=1) as pool:
        places = [(width, place) for width in widths for place in range(len(settings))]
        tasks = {(width, place): pool.apply_async(build, (settings[place], width)) for width, place in places}
        for key, task in tasks.items():
            try:
                failures[key] = task.get(max(until - time.monotonic(), 0))
            except multiprocessing.TimeoutError:
                failures[key] = f"no answer in {SECONDS} s"
    failures = {key: failure for key, failure in failures.items() if failure}
    return failures if len(failures) < len(tasks) else {}


def message(error: BaseException) -> str:
    """Return the kind of an error and the beginning of its text."""
    return f"{type(error).__name__}: {error}"[:500]


@torch.no_grad()
def time_settings(
    settings: Sequence[Mapping[str, int]],
    width: int,
    failures: Mapping[tuple[int, int], str],
    arguments: argparse.Namespace,
    device: torch.device,
) -> list[dict[str, Any]]:
    """Return a row for each setting, and for plain torch; settings with ``failures`` are not run."""
    sizes, cuda = MODELS[width], device.type == "cuda"
    layers, x = draw(sizes, torch.bfloat16 if cuda else torch.float32, device)
    wanted = exact(layers, x, sizes)
    if cuda:
        torch.cuda.synchronize()  # a kernel may read its matrix before the kernel launched before it is done
    rows: list[dict[str, Any]] = []
    steps: dict[int, Callable[[], object]] = {}
    results: dict[int, Tensor] = {}
    for place, setting in enumerate(settings):
        name = ",".join(f"{constant}={value}" for constant, value in setting.items())
        row: dict[str, Any] = {"width": width, "setting": name, "bytes": layers[0].nbytes}
        rows.append(row)
        if (width, place) in failures:
            row["failed"] = failures[width, place]
            continue
        try:
            with changed(setting):  # the constants are read when the graph is captured
                results[place] = torch.empty_like(x)
                run = chain(layers, x, sizes, results[place])
                run()
                steps[place] = capture(run) if cuda else run
        except Exception as error:
            row["failed"] = message(error)
    for name, run in torch_chains(layers, x, sizes).items() if arguments.torch else ():
        dense = 2 * width * (4 * width + 3 * sizes.hidden) if "dense" in name else layers[0].nbytes
        rows.append({"width": width, "setting": name, "bytes": dense})
        steps[len(rows) - 1] = capture(run) if cuda else run
    times = median_milliseconds(steps, cuda, rounds=arguments.rounds, repeats=arguments.repeats)
    for place, milliseconds in times.items():
        microseconds = milliseconds * 1e3 / sizes.layers
        rows[place] |= {"microseconds": microseconds, "terabytes_per_second": rows[place]["bytes"] / microseconds / 1e6}
        if place in results:
            rows[place]["error"] = float((results[place].double() - wanted).norm() / wanted.norm())
    return rows


def line(row: Mapping[str, Any]) -> str:
    """Return a row of the table."""
    start = f"{row['width']:5} {row['setting']:46}"
    if "failed" in row:
        return f"{start} {row['failed'].splitlines()[0][:100]}"
    error = f" error {row['error']:.4f}" if "error" in row else ""
    return f"{start} {row['microseconds']:7.1f} us a layer {row['terabytes_per_second']:5.2f} TB/s{error}"


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line, time every setting and write one JSON file, again after each width."""
    parser = parser_of(__doc__)
    parser.add_argument("--width", type=int, action="append", choices=MODELS, help="2048 and 4096 unless given")
    parser.add_argument("--kernel", type=constants, action="append", help="constants; a list of settings unless given")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=10, help="that build kernels at the same time; 0: none")
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="without chains by plain torch")
    arguments = parser.parse_args(words)
    device = torch.device(arguments.device)
    settings, widths = arguments.kernel or SETTINGS, arguments.width or [2048, 4096]
    failures = build_all(settings, widths, arguments.processes) if arguments.processes and device.type == "cuda" else {}
    rows: list[dict[str, Any]] = []
    for width in widths:
        found = time_settings(settings, width, failures, arguments, device)
        print(*map(line, found), sep="\n", flush=True)
        rows += found
        write(arguments.out, device, rows, rounds=arguments.rounds, repeats=arguments.repeats)


if __name__ == "__main__":
    main()
