"""How time and memory of a training step grow with width, rank, depth and processes, with fitted exponents."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

import torch

from factorized.experiments.bench.measure import fit_exponent
from factorized.experiments.bench.processes import time_processes
from factorized.experiments.bench.session import Session, Way
from factorized.experiments.bench.stack import Stack
from factorized.nn.running import count_parameters

Dimension = Literal["width", "rank", "depth"]


ON_A_GPU = Stack(width=4096, rank=256, depth=8, rows=4096)


def measure_growth(session: Session, base: Stack | None = None, processes: tuple[int, ...] = (1, 2, 4)) -> None:
    """Time training steps at several sizes around ``base``, and fit value = c · size^k in logarithms."""
    base = base or (ON_A_GPU if session.is_cuda else Stack())
    sweeps: dict[Dimension, list[int]] = {
        "width": [base.width * 2**k // 4 for k in range(4)],
        "rank": [base.rank * 2**k // 4 for k in range(4)],
        "depth": [base.depth * 2**k // 4 for k in range(4)],
    }
    for dimension, sizes in sweeps.items():
        for size in sizes:
            stack = replace(base, **{dimension: size})
            given = {"dense": replace(stack, rank=0), "low rank": stack}
            if dimension == "rank":
                del given["dense"]
            makers = {name: partial(_way, each, dimension, size, session.device) for name, each in given.items()}
            session.compare(f"growth with {dimension}: {size}", makers, seconds=session.seconds / len(sizes))
        _fit(session, dimension)
    if session.wants("growth with processes", "low rank"):
        session.add(time_processes(base, processes))
        _fit(session, "processes")
    session.write()


def _way(stack: Stack, dimension: Dimension, size: int, device: torch.device) -> Way:
    model = stack.build(device)
    facts = {"grows": dimension, "size": size, "parameters": count_parameters(model)}
    return Way(stack.step(model), facts)


def _fit(session: Session, dimension: str) -> None:
    """Fit the exponents of what was measured along a dimension."""
    rows = [row for row in session.rows if row.get("grows") == dimension]
    for way in dict.fromkeys(row["way"] for row in rows):
        points = [row for row in rows if row["way"] == way]
        sizes = [point["size"] for point in points]
        if len(points) < 2:
            continue
        fit = {
            "grows": dimension,
            "way": way,
            "sizes": sizes,
            "time": round(fit_exponent(sizes, [point["ms"]["median"] for point in points]), 2),
            "memory": round(fit_exponent(sizes, [point["memory"] for point in points]), 2),
        }
        session.fits.append(fit)
        session.say(f"  {way}: time grows as {dimension}^{fit['time']}, memory as {dimension}^{fit['memory']}")
