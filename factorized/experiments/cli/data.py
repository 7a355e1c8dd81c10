"""``factorized data``: convert data sets into files that load quickly."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from factorized.experiments.cli.arguments import examples
from factorized.experiments.cli.console import console, plain_table, progress_bar, say
from factorized.experiments.cli.verb import Group, Verb

app = typer.Typer(
    cls=Group,
    help="Prepare data sets, and list what is ready.",
    epilog=examples("factorized data prepare cifar10", "factorized data ls"),
)
ROOM_FOR_DETAILS = 100  # columns below which a list has counts only
Folder = Annotated[Path | None, typer.Option(help="Folder of prepared sets; by default $FACTORIZED_DATA, else ./data.")]


def complete_set(incomplete: str) -> list[str]:
    """Return the data sets known by name that start with the given text."""
    return [name for name in ("digits", "cifar10", "cifar100", "tiny-imagenet") if name.startswith(incomplete)]


@app.command(
    "prepare",
    cls=Verb,
    epilog=examples(
        "factorized data prepare cifar10                from a folder or Hugging Face",
        "factorized data prepare ~/cifar-10-batches-py --folder DIR",
        "factorized data prepare photos/ --name photos  photos/train/CLASS/*.png",
        "factorized data prepare hf:OWNER/NAME",
    ),
)
def prepare_set(
    source: Annotated[
        str,
        typer.Argument(
            metavar="NAME|PATH",
            help="digits, cifar10, cifar100, tiny-imagenet, hf:OWNER/NAME, an .npz file, a CIFAR or an image folder.",
            autocompletion=complete_set,
        ),
    ],
    folder: Folder = None,
    name: Annotated[str | None, typer.Option(help="The name of the set in recipes.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the set if it exists.")] = False,
) -> None:
    """Convert a data set once into one safe, memory-mapped file, with a checksum of all images and labels."""
    from factorized.experiments.data.prepare import prepare
    from factorized.experiments.data.prepared import describe_prepared

    with progress_bar() as bar:
        path = prepare(source, folder, bar, name=name, overwrite=overwrite)
    ready = describe_prepared(path)
    shape = "×".join(map(str, ready.shape))
    say(f"{path}: {ready.train:,} training and {ready.test:,} test images of {shape}, {ready.classes} classes")
    say(f"sha256 {ready.checksum}")


@app.command("ls", cls=Verb, epilog=examples("factorized data ls", "factorized data ls --folder DIR"))
def list_sets(folder: Folder = None) -> None:
    """List the data sets that are ready, and those that can be prepared by name."""
    from factorized.experiments.data.load import DATASETS, EMBEDDED, data_folder
    from factorized.experiments.data.prepare import list_prepared

    if folder is not None and not folder.is_dir():
        raise ValueError(f"--folder: there is no folder {folder}")
    out = console()
    details = ("classes", "shape", "sha256") if out.width >= ROOM_FOR_DETAILS else ()
    table = plain_table("data set", "training", "test", *details, "from", numbers=("training", "test", "classes"))
    ready = list_prepared(folder)
    for item in ready:
        if item.problem:
            table.add_row(item.name, "", "", *("" for _ in details), f"unusable: {item.problem}", style="red")
            continue
        told = (str(item.classes), "×".join(map(str, item.shape)), item.checksum[:12]) if details else ()
        table.add_row(item.name, f"{item.train:,}", f"{item.test:,}", *told, item.source)
    there = {item.name for item in ready}
    for name in DATASETS:
        if name not in there:
            note = "embedded, always ready" if name == EMBEDDED else f"not there: factorized data prepare {name}"
            table.add_row(name, "", "", *("" for _ in details), note, style="dim")
    out.print(table)
    say(f"in {data_folder(folder)}")
