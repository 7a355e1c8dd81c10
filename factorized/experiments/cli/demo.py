"""``factorized demo``: the whole workflow on the embedded digits, with a report page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from factorized.experiments.cli.arguments import MOST_SEEDS, Changes, Quiet, examples
from factorized.experiments.cli.console import console, plain_table, say

if TYPE_CHECKING:
    from factorized.experiments.reproduce.report import Check
    from factorized.experiments.reproduce.variant import Variant

EXAMPLES = examples(
    "factorized demo",
    "factorized demo --seeds 1 --out /tmp/demo",
    "factorized demo --set schedule.epochs=30",
)
VARIANTS = {
    "digits/resnet8": "dense",
    "digits/resnet8-lowrank-0.1": "low rank 0.1",
    "digits/resnet8-lowrank-0.1-si": "low rank 0.1, SI",
    "digits/resnet8-lowrank-0.1-fd": "low rank 0.1, FD",
    "digits/resnet8-lowrank-0.1-si-fd": "low rank 0.1, SI & FD",
    "digits/resnet8-wide-fd": "overcomplete wide, FD",
}
TITLE = "Products in place of weights, on handwritten digits"
LEAD = (
    "A small ResNet, trained in six ways: dense; with a tenth of the parameters in four ways (SI: the factors start "
    "from the SVD of a random weight; FD: the product is decayed, not its factors); and overcomplete, with the factors "
    "multiplied out after training."
)


def demo(
    seeds: Annotated[int, typer.Option(min=1, max=MOST_SEEDS, help="Number of seeds for each variant.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for runs and report.html.")] = Path("out/demo"),
    changes: Changes = None,
    quiet: Quiet = False,
) -> None:
    """Train a small ResNet six ways on the embedded digits, compare them, compose the winner and check it.

    The six: dense; a tenth of the parameters plain, with spectral initialization (SI), with Frobenius decay (FD) and
    with both; and overcomplete. Nothing is downloaded. The exit code is 1 if a check fails.
    """
    began = time.perf_counter()
    from factorized.experiments.reproduce.demonstration import check_winner, run_variants, winners_of
    from factorized.experiments.reproduce.report import PAGE, Heading, write_report
    from factorized.experiments.training.progress import Reporter

    terminal = console().is_terminal  # in a file or pipe, one line per variant is enough
    variants = run_variants(
        VARIANTS,
        out,
        range(seeds),
        changes or (),
        report=lambda: Reporter(console(), quiet=quiet or not terminal),
        tell=lambda done: None if quiet or terminal else say(f"{done.label}: {done.score} %"),
    )
    _print_table(variants)
    checks = []
    for winner in winners_of(variants):
        found = check_winner(winner, winner.runs[0].path.parent)
        _print_checks(winner.label, found)
        checks += [replace(check, what=f"{winner.label}, {check.what}") for check in found]
    folders = [run.path.parent for variant in variants for run in variant.runs]
    write_report(folders, out, heading=Heading(TITLE, LEAD, "factorized demo"), labels=VARIANTS, checks=checks)
    say(f"\n{time.perf_counter() - began:.0f} seconds in all; curves and more: {out / PAGE}")
    if not all(check.passed for check in checks):
        raise typer.Exit(1)


def _print_table(variants: list[Variant]) -> None:
    numbers = ("test\naccuracy, %", "parameters", "deployed", "seconds\na run")
    table = plain_table("variant", *numbers, "", numbers=numbers)
    for variant in variants:
        seconds = f"{variant.seconds.mean:.1f}" if variant.seconds is not None else ""
        counts = (f"{variant.parameters:,}", f"{variant.deployed or variant.parameters:,}", seconds)
        marks = ", ".join(f"← {mark}" for mark in variant.marks)
        table.add_row(variant.label, str(variant.score), *counts, marks, style="bold" if marks else None)
    console().print(table)
    seeds = variants[0].score.n
    say(f"means ± standard deviations over n = {seeds} seeds" if seeds > 1 else "one seed each (n = 1)")


def _print_checks(label: str, checks: Sequence[Check]) -> None:
    """Print what was checked of a winner, and what was found."""
    say(f"\nChecks of {label!r} as plain PyTorch, on all test images:")
    table = plain_table("", "check", "found", "allowed", numbers=("found", "allowed"))
    for check in checks:
        table.add_row("ok" if check.passed else "FAIL", check.what, f"{check.measured:.3g}", f"{check.allowed:g}")
    console().print(table)
