"""``factorized report``: one page about runs, beside the paper's figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from factorized.experiments.cli.arguments import Quiet, examples
from factorized.experiments.cli.console import counted, say

EXAMPLES = examples(
    "factorized report results/",
    "factorized report out/ --out /tmp/report --figures",
    "factorized report out/digits/resnet8/seed-0 other/result.json --title 'Two runs'",
)


def report(
    results: Annotated[
        list[Path], typer.Argument(metavar="RESULTS", help="Result files, or folders with results at any depth.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for report.html and tables/.")] = Path("report"),
    title: Annotated[str, typer.Option(help="The heading of the page.")] = "",
    figures: Annotated[
        bool, typer.Option("--figures", help="Also redraw the paper's figures from these runs.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Write one page about finished runs: tables, curves, layers, hardware, what is missing.

    The page needs no network and no other file. Every table is also written as CSV and Markdown. Files that are
    damaged, or hold no result, are named and left out; nothing is deleted.
    """
    from factorized.experiments.reproduce.paper_figures import draw_figures
    from factorized.experiments.reproduce.report import PAGE, TABLES, Heading, write_report

    command = " ".join(["factorized report", *map(str, results)])
    written = write_report(results, out, heading=Heading(title, command=command))
    drawn = draw_figures(written.variants, out / "figures") if figures else []
    for file in written.found.left_out:
        say(f"left out: {file.path}: {file.why}")
    if quiet:
        return
    judged = len(written.judged)
    expected = f"({written.expected_within:.1f} expected if only seeds differed)"
    beside = f"; {written.within} of {judged} within two of the paper's deviations {expected}" if judged else ""
    say(f"{counted(len(written.found.runs), 'run')} of {counted(len(written.variants), 'variant')}{beside}")
    say(f"{out / PAGE}; tables as CSV and Markdown: {out / TABLES}")
    if figures:
        names = ", ".join(map(str, drawn))
        say(names or "no figure: none of the runs recorded norms (run.diagnose), and none differ in strength or rank")
