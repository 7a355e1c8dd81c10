"""Printing for the verbs: lines, tables and a progress bar, in a terminal or a pipe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from factorized.experiments.cli.processes import process_number

WIDE = 160  # columns in a file or pipe, where lines are not wrapped


def console(*, quiet: bool = False) -> Console:
    """Return a console on standard output; ``quiet``, or in any process but the first, it prints nothing."""
    make = partial(Console, highlight=False, markup=False, quiet=quiet or process_number() > 0)  # names hold brackets
    out = make()
    return out if out.is_terminal else make(width=max(out.width, WIDE))


def say(line: str) -> None:
    """Print a line without wrapping it."""
    console().print(line, soft_wrap=True)


def counted(number: int, what: str) -> str:
    """Return "1 run" or "2 runs"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def plain_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """Return an empty table with these headings; those among ``numbers`` are set to the right.

    A narrow terminal breaks what comes after the first column, which is a name to be copied, but for numbers: where
    headings and figures are wider than 80 columns, break the heading by hand.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for place, column in enumerate(columns):
        number = column in numbers
        table.add_column(column, justify="right" if number else "left", no_wrap=number or place == 0, overflow="fold")
    return table


@contextmanager
def progress_bar(*, quiet: bool = False) -> Iterator[Bar]:
    """Show the progress that a function reports as (stage, done, total), in a terminal only."""
    out = Console(stderr=True)
    shown = out.is_terminal and not quiet and process_number() == 0
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=out, disable=not shown, transient=True)
    try:
        yield Bar(progress)
    finally:
        progress.stop()


class Bar:
    """Takes (stage, done, total), one row for each stage until it is done.

    Nothing is shown between stages: a line that is printed there would be overwritten.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.rows: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show what is done of a stage."""
        if stage not in self.rows:
            self.rows[stage] = self.progress.add_task(stage, total=total or None)  # without one, the bar moves on
            self.progress.start()
        self.progress.update(self.rows[stage], completed=done, total=total or None)
        if 0 < total <= done:
            self.progress.remove_task(self.rows.pop(stage))
            if not self.rows:
                self.progress.stop()
