"""A run's progress: a bar with figures in a terminal, one line per epoch elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn
from torch import Tensor

REFRESH = 20  # steps between two looks at the loss, each of which waits for the device
ONE_LINE = 160  # columns that the longest name, the bar and the figures need side by side


class Reporter:
    """Shows a run's progress; a terminal gets a bar, a file or pipe a line per epoch, ``quiet`` nothing."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console()
        self.quiet = quiet
        self.live = self.console.is_terminal and not quiet
        title, figures = (_text(field) for field in ("{task.description}", "{task.fields[figures]}"))
        columns: tuple[ProgressColumn, ...] = (title, BarColumn(), figures, TimeRemainingColumn())
        if self.console.width < ONE_LINE:  # a narrow terminal would cut off the time left first
            both = _text("{task.description}\n{task.fields[figures]}")
            columns = (both, BarColumn(bar_width=10), TimeRemainingColumn(compact=True))
        self.progress = Progress(*columns, console=self.console, disable=not self.live)
        self._layers: TaskID | None = None

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()

    def decomposing(self, done: int, total: int) -> None:
        """Show how many layers of a network are decomposed, until all are."""
        if self._layers is None:
            self._layers = self.progress.add_task("decomposing", total=total, figures="")
        self.progress.update(self._layers, completed=done, figures=f"{done} of {total} layers")
        if done == total:
            self.progress.remove_task(self._layers)
            self._layers = None

    def begin(self, title: str, epochs: int, steps: int, done: int) -> None:
        """Begin the run ``title`` of ``epochs`` epochs of ``steps`` steps, ``done`` of which were taken before."""
        self.task = self.progress.add_task(title, total=epochs * steps, completed=done, figures="")
        self.title, self.epochs, self.steps = title, epochs, steps
        self.test = ""

    def note(self, line: str) -> None:
        """Show a line about the run."""
        if not self.quiet:
            self.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def step(self, epoch: int, step: int, loss_sum: Tensor, images_per_second: float) -> None:
        """Show a step of an epoch, both counted from 0; the loss is only read now and then."""
        if self.live and (step + 1) % REFRESH == 0:
            self._show(epoch, step + 1, loss_sum.item() / (step + 1), images_per_second)

    def epoch(self, row: dict[str, Any]) -> None:
        """Show a finished epoch, whose row counts from 1."""
        if "test_accuracy" in row:
            self.test = f"  test {row['test_accuracy']:.2f} %"
        figures = self._show(row["epoch"] - 1, self.steps, row["loss"], row["images_per_second"])
        if not self.live:
            self.note(f"{self.title}  {figures}")

    def figures(self, done: int, figures: Mapping[str, float]) -> None:
        """Show figures of a run, after ``done`` of its steps."""
        shown = "  ".join([f"{done:,}/{self.steps:,}", *(f"{name} {value:.4g}" for name, value in figures.items())])
        self.progress.update(self.task, completed=done, figures=shown)
        if not self.live:
            self.note(f"{self.title}  {shown}")

    def _show(self, epoch: int, steps: int, loss: float, images_per_second: float) -> str:
        figures = f"epoch {epoch + 1}/{self.epochs}  loss {loss:.3f}{self.test}  {images_per_second:,.0f} images/s"
        self.progress.update(self.task, completed=epoch * self.steps + steps, figures=figures)
        return figures


def _text(field: str) -> TextColumn:
    return TextColumn(field, markup=False)  # a recipe's name may hold brackets
