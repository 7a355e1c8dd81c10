"""The benchmarks by name, and running them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from factorized.experiments.bench.charts import draw
from factorized.experiments.bench.names import BENCHMARKS
from factorized.experiments.bench.session import Session
from factorized.experiments.data.explain import nearest
from factorized.nn.model import listed

ALL = "all"


def find_benchmarks(names: Sequence[str]) -> list[str]:
    """Return the benchmarks of these names, each once; ``all`` stands for every one.

    Raises:
        ValueError: there is no benchmark of a name.
    """
    for name in names:
        if name != ALL and name not in BENCHMARKS:
            meant = nearest(name, [*BENCHMARKS, ALL], 0.4)
            raise ValueError(f"there is no benchmark {name!r}{meant}; there are {', '.join(BENCHMARKS)}")
    return list(dict.fromkeys([*BENCHMARKS] if ALL in names else names))


def run_benchmarks(
    names: Sequence[str],
    folder: Path,
    device: torch.device,
    seconds: float = 10,
    only: str = "",
    say: Callable[[str], object] = print,
    charts: bool = True,
) -> None:
    """Run benchmarks one after another, and write ``NAME.json`` and its charts into ``folder``.

    The JSON is written after every group of rows. ``seconds`` are spent on timing each group; ``only`` leaves out rows
    without this text in "GROUP: WAY".
    """
    for name in find_benchmarks(names):
        say(f"\n{name}: {BENCHMARKS[name].about}")
        session = Session(name, folder / f"{name}.json", device, seconds, only, say)
        session.write()  # a folder that cannot be written fails before anything is measured
        BENCHMARKS[name].load()(session)
        session.write()
        if only and not session.rows:
            named = f"; there are {listed(session.unwanted, 2, '; ')}" if session.unwanted else ""
            say(f"  no row has {only!r} in its name{named}")
        if charts:
            say(", ".join(map(str, [session.path, *draw(session.to_dict(), folder)])))
