"""``factorized bench``: how fast this machine runs factorized models, beside dense ones and other packages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from factorized.experiments.bench.names import BENCHMARKS
from factorized.experiments.cli.arguments import Device, Quiet, examples
from factorized.experiments.cli.console import console, plain_table, say

EXAMPLES = examples(
    "factorized bench                                   what can be measured",
    "factorized bench layers decay",
    "factorized bench training --only ResNet --seconds 30 --device cpu",
    "factorized bench all --out out/bench",
)


def complete_benchmark(incomplete: str) -> list[str]:
    """Return the benchmarks that start with the given text."""
    return [name for name in (*BENCHMARKS, "all") if name.startswith(incomplete)]


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="Benchmarks to run, or `all`; without any, they are listed.",
            autocompletion=complete_benchmark,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the JSON and charts of each benchmark.")] = Path("out/bench"),
    device: Device = None,
    seconds: Annotated[
        float, typer.Option(min=0, help="Time to spend on each group of rows; three rounds at least.")
    ] = 10,
    only: Annotated[str, typer.Option(metavar="TEXT", help="Only rows whose name contains this.")] = "",
    quiet: Quiet = False,
) -> None:
    """Measure speed and memory on this machine, beside dense models and other packages.

    Weights and data are random. With one CPU thread (OMP_NUM_THREADS=1), times are CPU time instead of wall-clock time.
    """
    if not names:
        table = plain_table("benchmark", "what it measures")
        for name, benchmark in BENCHMARKS.items():
            table.add_row(name, benchmark.about)
        console().print(table)
        return
    from factorized.experiments.bench.run import find_benchmarks, run_benchmarks
    from factorized.experiments.cli.device import pick_device

    found = find_benchmarks(names)
    run_benchmarks(found, out, pick_device(device), seconds, only, (lambda line: None) if quiet else say)
    if quiet:
        say(str(out))
