"""Run the benchmarks of ``factorized bench`` on a GPU in a few minutes: networks are compiled in parallel first.

    python -m benchmarks.gpu_speed --out benchmarks/results/bench-h200

What is not compiled is measured first. Then processes that each build one network fill the compiler's cache; not all of
them were done after 100 s on an H200 with 16 cores, so name benchmarks to compile fewer. Every group of rows is kept as
soon as it is measured.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from factorized.experiments.bench.billion import measure_billion
from factorized.experiments.bench.decay import compare_decays
from factorized.experiments.bench.growth import measure_growth
from factorized.experiments.bench.initialization import compare_initializations
from factorized.experiments.bench.layers import compare_layers
from factorized.experiments.bench.llama import train_llama
from factorized.experiments.bench.networks import NETWORKS, run_networks, train_networks
from factorized.experiments.bench.run import find_benchmarks, run_benchmarks
from factorized.experiments.bench.session import Session

AT_ONCE = 12  # processes that compile
Part = tuple[str, Callable[[Session], None]]
# Parts of one name share a file; those that compile nothing come first, so that a stop while compiling loses little
EAGER: list[Part] = [
    ("layers", compare_layers),
    ("initialization", partial(compare_initializations, sizes=(1024, 2048))),
    ("growth", partial(measure_growth, processes=())),
]
ORDER = ("ResNet-32x2", "WideResNet-28-10", "VGG-19")
COMPILED: list[Part] = [("training", partial(train_networks, networks={name: NETWORKS[name]})) for name in ORDER]
COMPILED += [("llama", train_llama), ("decay", compare_decays)]
COMPILED += [("inference", partial(run_networks, networks={name: NETWORKS[name]})) for name in ORDER]
LONGEST: list[Part] = [
    ("initialization", partial(compare_initializations, sizes=(4096,))),
    ("initialization", partial(compare_initializations, sizes=(8192,), shares=(32,))),
    ("billion", measure_billion),
]


def compiled_rows() -> list[tuple[str, str]]:
    """Return benchmarks and rows whose networks are compiled, those that take longest first."""
    rows = [
        ("training", f"{network}, training step, batch 128: {way}") for network in NETWORKS for way in NETWORKS[network]
    ]
    rows += [("llama", "Llama, training step, 8×1024 tokens: dense"), ("llama", "rank 512, Frobenius decay")]
    rows += [("decay", "training step of ResNet-32x2 at 0.1, batch 128: ordinary decay")]
    return rows + [
        ("inference", f"{network}, inference, batch 128: {way}") for network in NETWORKS for way in NETWORKS[network]
    ]


def compile_in_parallel(rows: Sequence[tuple[str, str]], device: str, seconds: float) -> None:
    """Build each row in a process of its own, several at once; stop those that are not done in time."""
    deadline = time.monotonic() + seconds
    waiting, running = list(rows), []
    with tempfile.TemporaryDirectory() as folder:
        while (waiting or running) and time.monotonic() < deadline:
            running = [process for process in running if process.poll() is None]
            while waiting and len(running) < AT_ONCE:
                name, only = waiting.pop(0)
                out = str(Path(folder) / f"{len(waiting)}")
                command = [sys.executable, "-m", "benchmarks.gpu_speed", "--warm", name, only, "--device", device]
                running.append(subprocess.Popen([*command, "--out", out], stdout=subprocess.DEVNULL))
            time.sleep(0.1)
        for process in running:
            process.kill()
            process.wait()


def main(given: Sequence[str] | None = None) -> None:
    """Parse the command line, and compile or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="benchmarks to run, all unless given")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", type=torch.device, default="cuda")
    parser.add_argument("--seconds", type=float, default=2, help="of timing for each group of rows")
    parser.add_argument("--compile-seconds", type=float, default=100, help="after which compiling in parallel stops")
    parser.add_argument("--warm", nargs=2, metavar=("NAME", "ROW"), help="only build a row, to fill the cache")
    arguments = parser.parse_args(given)
    if arguments.warm:
        name, row = arguments.warm
        run_benchmarks([name], arguments.out, arguments.device, seconds=0, only=row, charts=False)
        return
    began = time.monotonic()
    names = find_benchmarks(arguments.names or ["all"])
    sessions = {
        name: Session(name, arguments.out / f"{name}.json", arguments.device, arguments.seconds) for name in names
    }
    for parts in (EAGER, COMPILED, LONGEST):
        if parts is COMPILED and arguments.compile_seconds:
            rows = [row for row in compiled_rows() if row[0] in names]
            compile_in_parallel(rows, str(arguments.device), arguments.compile_seconds)
            print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
        for name, measure in ((name, measure) for name, measure in parts if name in names):
            try:
                measure(sessions[name])
            except Exception as error:  # the other parts are worth having
                sessions[name].skip(name, f"{type(error).__name__}: {error}")
            print(f"-- {name} after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
