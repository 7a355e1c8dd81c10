"""``factorized reproduce``: train the missing runs of a table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from factorized.experiments.cli.arguments import MOST_SEEDS, Quiet, examples
from factorized.experiments.cli.console import console, counted, plain_table, progress_bar, say
from factorized.experiments.cli.engines import EngineOptions, make_engine

if TYPE_CHECKING:
    from factorized.experiments.reproduce.estimate import Estimate
    from factorized.experiments.reproduce.job import Outcome
    from factorized.experiments.reproduce.planned import PlannedRun, Planner
    from factorized.experiments.reproduce.row import Row
    from factorized.experiments.reproduce.runs import Run

EXAMPLES = examples(
    "factorized reproduce table3 --data DIR --dry-run",
    "factorized reproduce table1 --data DIR --cells 'cifar10/resnet32x2*0.1*' --seeds 1",
    "factorized reproduce table3 --data DIR --epochs 5",
    "factorized reproduce figure3 --data DIR --seeds 1",
    "factorized reproduce figure4 --data DIR --cells 'translation/tatoeba*' --updates 200",
    "factorized reproduce table1 --data DIR --engine ray --gpus 0.5",
    "factorized reproduce table1 --data DIR --engine slurm --slurm slurm_partition=gpu --slurm timeout_min=240",
)

RESULTS = "results"  # need not be there
ROOM_FOR_REMARKS = 110  # columns below which a plan has figures only


def complete_table(incomplete: str) -> list[str]:
    """Return the tables that start with the given text."""
    from factorized.experiments.recipes.find import table_names

    return [name for name in table_names() if name.startswith(incomplete)]


Table = Annotated[
    str,
    typer.Argument(
        metavar="TABLE",
        help="table1 to table4, figure1 to figure4, bert, language, or the path of your own table's .toml file.",
        autocompletion=complete_table,
    ),
]


def reproduce(
    table: Table,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="The folder of data sets; by default $FACTORIZED_DATA, else ./data.",
        ),
    ] = None,
    cells: Annotated[str, typer.Option(metavar="GLOB", help="Only recipes whose names match.")] = "*",
    seeds: Annotated[int, typer.Option(min=1, max=MOST_SEEDS, help="Seeds 0 to N-1 of every recipe.")] = 3,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Shorten runs on images; results are marked as shortened.")
    ] = None,
    updates: Annotated[int | None, typer.Option(min=1, help="Shorten runs on text in the same way.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be trained, and how long it would take.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of runs and of the report.")] = Path("out"),
    results: Annotated[
        Path, typer.Option(help="Results of other machines, which count as finished; see `factorized results add`.")
    ] = Path(RESULTS),
    engine: Annotated[
        Literal["local", "ray", "slurm"], typer.Option(help="Where to train: on this machine or a cluster.")
    ] = "local",
    device: Annotated[
        str | None, typer.Option(metavar="cpu|cuda|cuda:1", help="local: where to compute; by default all GPUs.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, max=1024, help="local: number of processes; by default one per GPU.")
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_SEEDS, help="local: seeds of an image recipe that share a GPU; by default up to three."
        ),
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="ray: address of a running cluster; by default one is started here.")
    ] = None,
    gpus: Annotated[
        float | None, typer.Option(min=0, max=64, help="ray, slurm: GPUs per run; ray also takes fractions.")
    ] = None,
    cpus: Annotated[float, typer.Option(min=0.1, max=1024, help="ray: CPU cores per run.")] = 1.0,
    slurm: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="slurm: a parameter of submitit.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Train the missing runs of a table, and show ours beside the paper's figures.

    Finished runs are not repeated. To resume what was stopped, give the same command again. A changed recipe is another
    run: runs are written to OUT/NAME-FINGERPRINT/seed-SEED. The exit code is 1 if a run failed or its data are missing.
    """
    from factorized.experiments.data.extras import need
    from factorized.experiments.recipes.find import table_recipes
    from factorized.experiments.reproduce.data import sets_folder
    from factorized.experiments.reproduce.engine import carry_out
    from factorized.experiments.reproduce.planned import Planner, check_length, in_waves

    recipes = table_recipes(table, cells)
    length = check_length(recipes, epochs, updates)
    sets_folder(data)  # raises if there is none
    if not results.is_dir() and results != Path(RESULTS):  # runs that lie elsewhere would be done again
        raise ValueError(f"--results: there is no folder {results}; give the one that holds results from elsewhere")
    options = EngineOptions(engine, device, workers, at_once, address, gpus, cpus, slurm)
    own = {recipe.name: recipe for recipe in table_recipes(table)} if table.endswith(".toml") else {}
    with progress_bar(quiet=quiet):
        planner = Planner(out, data, _finished(out, results), length, own)
        rows = _rows(planner, recipes, seeds)
    waves = in_waves((run for row in rows for run in row.runs), data)
    if dry_run:
        _print_plan(rows, planner.finished, device)
        return
    count = sum(len(job.seeds) for jobs in waves for job in jobs)
    say(f"{table}: {counted(len(rows), 'recipe')}, {counted(seeds, 'seed')} each; {_to_do(count, rows)}")
    if _is_figure(table):
        need("matplotlib", "matplotlib", f"drawing {table}")
    failed = carry_out(waves, make_engine(options, out, quiet=quiet), _tell(count))
    rows = _rows(planner.again(_finished(out, results, quiet=True)), recipes, seeds)
    _print_rows(rows)
    _print_problems(rows)
    for outcome in failed:
        say(f"failed: {outcome.job.name}: {outcome.error}")
    _write_report(table, rows, failed, out)
    if failed or any(row.problem for row in rows):
        raise typer.Exit(1)


def _finished(*places: Path, quiet: bool = False) -> list[Run]:
    from factorized.experiments.reproduce.runs import read_runs

    found = read_runs([place for place in places if place.is_dir()])
    for left in found.left_out:
        if not (quiet or left.is_copy):
            say(f"skipped {left.path}: {left.why}")
    return found.runs


def _rows(planner: Planner, recipes: Sequence[Any], seeds: int) -> list[Row]:
    from factorized.experiments.reproduce.row import Row

    return [Row([planner.plan(recipe, seed) for seed in range(seeds)]) for recipe in recipes]


def _tell(count: int) -> Callable[[Outcome], None]:
    """Return a function that prints a line for each of ``count`` runs as it ends."""
    from factorized.experiments.reproduce.row import shown

    number = itertools.count(1)

    def tell(outcome: Outcome) -> None:
        name = outcome.job.name
        for result in outcome.results:
            say(f"done, {next(number)} of {count}: {name} seed {result['seed']}: {shown(result)}")
        if outcome.error is not None:
            say(f"failed: {name}: {outcome.error}")

    return tell


def _write_report(table: str, rows: Sequence[Row], failed: Sequence[Outcome], out: Path) -> None:
    """Write the page of the table's runs, those that failed included."""
    from factorized.experiments.reproduce.paper_figures import draw_figures
    from factorized.experiments.reproduce.report import PAGE, Heading, write_report

    finished = [run.finished.path for row in rows for run in row.runs if run.finished is not None]
    if not finished:
        return
    name = Path(table).stem
    folders = [Path(outcome.job.folder) for outcome in failed if Path(outcome.job.folder).is_dir()]
    page = out / "report" / name
    command = f"factorized reproduce {table}"
    title = f"{name}: ours beside the paper's" if _aims(rows) else name
    written = write_report([*finished, *folders], page, heading=Heading(title, command=command))
    say(f"tables, curves and more: {page / PAGE}")
    if _is_figure(table):
        for path in draw_figures(written.variants, page / "figures", only=table):
            say(f"drawn: {path}")


def _is_figure(table: str) -> bool:
    return table.startswith("figure") and not table.endswith(".toml")


def _print_rows(rows: Sequence[Row]) -> None:
    numbers = ("paper", "ours", "n", "off by\n(std)") if _aims(rows) else ("ours", "n")
    table = plain_table("recipe", *numbers, "", numbers=numbers)
    for row in rows:
        off = "" if row.off is None else f"{row.off:+.1f}"
        found = str(row.ours or ("blocked" if row.problem else ""))  # why is said below the table
        ours = (found, f"{row.ours.n if row.ours else 0} of {len(row.runs)}")
        figures = (str(row.paper or ""), *ours, off) if _aims(rows) else ours
        table.add_row(row.name, *figures, _remarks(row))
    console().print(table)


def _print_plan(rows: Sequence[Row], past: Sequence[Run], device: str | None) -> None:
    from factorized.experiments.cli.device import pick_device
    from factorized.experiments.reproduce.estimate import estimate, in_time
    from factorized.experiments.reproduce.planned import missing
    from factorized.experiments.reproduce.row import Row
    from factorized.experiments.training.record import describe_machine

    here = str(describe_machine(pick_device(device))["device"])
    to_do = missing(run for row in rows for run in row.runs)
    asked = {row.name for row in rows}
    first: dict[str, list[PlannedRun]] = {}  # what others continue from
    for run in to_do:
        if run.name not in asked:
            first.setdefault(run.name, []).append(run)
    shown = [*map(Row, first.values()), *rows]
    counts = [sum(run in to_do for run in row.runs) for row in shown]
    guesses = [estimate(row.runs[0].recipe, past, here) for row in shown]
    out = console()
    numbers = (*(("paper",) if _aims(rows) else ()), "done", "to do", "a run,\nabout")
    basis_and_remarks = ("estimated from", "") if out.width >= ROOM_FOR_REMARKS else ()
    table = plain_table("recipe", *numbers, *basis_and_remarks, numbers=numbers)
    for row, count, guess in zip(shown, counts, guesses, strict=True):
        basis = "no past run" if guess is None else guess.basis
        basis += f", {guess.device}" if guess is not None and guess.device != here else ""
        done = sum(run.finished is not None for run in row.runs)
        paper = (str(row.paper or ""),) if _aims(rows) else ()
        known = in_time(guess.seconds) if guess else "blocked" if row.problem else "?"
        figures = (*paper, str(done), str(count), known)
        remarks = (basis, _remarks(row, comes_first=row.name in first)) if basis_and_remarks else ()
        table.add_row(row.name, *figures, *remarks)
    out.print(table)
    _print_problems(rows)
    say(_to_do(len(to_do), rows) + _how_long(counts, guesses, here))


def _how_long(counts: Sequence[int], guesses: Sequence[Estimate | None], here: str) -> str:
    """Return how long so many runs of each recipe take, in words; nothing for none."""
    from factorized.experiments.reproduce.estimate import in_time

    known = [(count, guess) for count, guess in zip(counts, guesses, strict=True) if count and guess is not None]
    unknown = sum(counts) - sum(count for count, _ in known)
    if not known:
        return "; without past runs, there is no estimate of the time" if unknown else ""
    told = f": about {in_time(sum(count * guess.seconds for count, guess in known))} one after the other"
    told += f", and {counted(unknown, 'run')} without an estimate" if unknown else ""
    elsewhere = sorted({guess.device for _, guess in known} - {here})
    return told + (f"; times are those of {', '.join(elsewhere)}, and this is {here}" if elsewhere else f", on {here}")


def _to_do(count: int, rows: Sequence[Row]) -> str:
    """Return how many runs are to do, and how many cannot be done, in words."""
    impossible = sum(run.problem is not None for row in rows for run in row.runs)
    return f"{counted(count, 'run')} to do" + (f", {impossible:,} cannot be trained here" if impossible else "")


def _print_problems(rows: Sequence[Row]) -> None:
    """Print why recipes cannot be trained here, each reason once."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if row.problem is not None:
            names.setdefault(row.problem, []).append(row.name)
    for problem, some in names.items():
        what = some[0] if len(some) == 1 else f"{some[0]} and {len(some) - 1} more"
        say(f"{what} cannot be trained here: {problem}")


def _aims(rows: Sequence[Row]) -> bool:
    """Return whether some of the recipes aim at a figure of the paper."""
    return any(row.paper is not None for row in rows)


def _remarks(row: Row, *, comes_first: bool = False) -> str:
    first = ["comes first"] if comes_first else []
    shortened = [f"shortened: {row.shortened}"] if row.shortened else []
    return "; ".join(first + shortened)
