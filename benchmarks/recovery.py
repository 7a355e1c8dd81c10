"""Compress a finished run as others do and as this library does, and train it further with either decay.

    python -m benchmarks.recovery out/cifar10/vgg19/seed-0 --data DIR --out benchmarks/results/recovery-vgg19-h200.json

At every ratio of the parameters of the compressed layers, the dense network of the run is compressed by truncated SVD,
ASVD, SVD-LLM's whitening and magnitude pruning, and by ``fz.Calibrated``, all layers at once and one after another,
with ranks chosen by the loss. It is tested as it is, and after a tenth of the run's own training: with ordinary decay
of every parameter, and with Frobenius decay of the products. Recovery is the one of ``factorized compress``. Every
figure is written as soon as it is known, and one that is in the file is not measured again. The same command, started
several times, shares the work: a small network leaves a GPU idle.
"""

from __future__ import annotations

import argparse
import copy
import gc
import hashlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import factorized as fz
from benchmarks.baselines import METHODS, factorized_by, pruned
from benchmarks.one_network import OneNetwork
from factorized.experiments.cli.subjects import open_subject
from factorized.experiments.compress.subject import Subject, recovery_recipe
from factorized.experiments.recipes.recipe import Factorize, Recipe
from factorized.experiments.recipes.text import AnyRecipe, TextRecipe
from factorized.experiments.training.progress import Reporter
from factorized.experiments.training.record import describe_machine, write_json
from factorized.files.atomic import lock
from factorized.nn.running import count_parameters

RATIOS = (0.1, 0.3, 0.5, 0.7)
DENSE, SVD, PRUNED = "dense", "truncated SVD", "pruning"
OURS = "calibrated", "calibrated, sequential"
WAYS = (*OURS, *METHODS, PRUNED)
NONE, ORDINARY, FROBENIUS = "none", "ordinary", "frobenius"
SAMPLES = 2048
ONCE = 10**5  # epochs or updates between two tests, or two checkpoints: more than any recovery has
Kind = Literal["spatial", "channel"]
Key = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """What is measured together: one network, compressed, and its recoveries."""

    ratio: float
    method: str
    seed: int  # of the recoveries
    decays: tuple[str, ...]


def cells_of(
    ratios: Sequence[float], methods: Sequence[str], decays: Sequence[str], seeds: Sequence[int]
) -> Iterator[Cell]:
    """Yield the cells, the first ratio first. Pruned weights are no products, so that they have one decay."""
    for seed in seeds:
        for ratio in ratios:
            for method in methods:
                chosen = tuple(decay for decay in decays if method != PRUNED or decay == ORDINARY)
                yield Cell(ratio, method, seed, chosen)


@dataclass(frozen=True)
class Report:
    """The figures of one file, which processes share: each reads it anew, and is alone while it adds to it."""

    path: Path
    about: dict[str, Any]

    def has(self, key: Key) -> bool:
        """Return whether a figure is known."""
        rows = self._read().get("rows", [])
        return any(all(row.get(name) == value for name, value in key.items()) for row in rows)

    def add(self, key: Key, figures: dict[str, Any]) -> None:
        """Write a figure down."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked("the file", wait=True):
            known = self._read()
            rows = [*known.pop("rows", []), {**key, **figures}]
            write_json(self.path, {**known, **self.about, "rows": rows})
        print(*key.values(), figures.get("problem") or f"{figures[key['score']]:.2f}", flush=True)

    def claim(self, cell: Cell) -> AbstractContextManager[bool]:
        """Return a context that gives whether the cell is free, and keeps it from other processes."""
        return self._locked(f"{cell.ratio} {cell.method} {cell.seed}", wait=False)

    def _read(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.path.read_text()) if self.path.is_file() else {}
        found.pop("checksum", None)
        return found

    @contextmanager
    def _locked(self, what: str, *, wait: bool) -> Iterator[bool]:
        name = hashlib.sha256(f"{self.path.resolve()} {what}".encode()).hexdigest()
        with (Path(tempfile.gettempdir()) / f"recovery-{name[:16]}.lock").open("wb") as file:
            yield lock(file, wait=wait) is not False


class Clock:
    """Says whether a recovery would end in time, by the longest one so far."""

    def __init__(self, seconds: float | None) -> None:
        self.began, self.seconds, self.longest = time.perf_counter(), seconds, 0.0

    def allows_another(self) -> bool:
        """Return whether there is time for a recovery."""
        return self.seconds is None or time.perf_counter() - self.began + self.longest <= self.seconds


class Compression:
    """The dense network of one run, and what is done to it.

    Args:
        kind: how calibration and truncated SVD read a kernel; ASVD and SVD-LLM need "channel".
        samples: training examples to calibrate with.
        share_compiled: train all networks by one compiled one.
    """

    def __init__(self, subject: Subject, kind: Kind, samples: int, *, share_compiled: bool) -> None:
        self.subject, self.share_compiled = subject, share_compiled
        self.kinds: dict[str, Kind] = {way: "channel" if way in ("ASVD", "SVD-LLM") else kind for way in WAYS}
        self.calibration = fz.Calibrated(subject.batches(samples), loss=subject.loss)

    def plan(self, method: str, ratio: float) -> fz.Plan:
        """Return the plan of a ratio: ranks by the loss for our method, one rank scale for others."""
        dense = self.subject.dense()
        ours = method in OURS
        return fz.plan(
            dense,
            fz.LowRank(self.kinds[method]),
            ratio=ratio,
            of="selected",
            exclude=[name for name, module in dense.named_modules() if isinstance(module, nn.Embedding)],
            allocate="spectrum" if ours else "uniform",
            calibration=self.calibration if ours else None,
            example_input=self.subject.example_input,
        )

    def compress(self, method: str, plan: fz.Plan) -> nn.Module:
        """Return the network, compressed."""
        dense = self.subject.dense()
        if method in OURS:
            init = fz.Calibrated(self.calibration.batches, sequential=method == OURS[1])
            return fz.factorize(dense, plan, init=init)
        if method == SVD:
            return fz.factorize(dense, plan, init="spectral")
        return pruned(dense, plan) if method == PRUNED else factorized_by(method, dense, plan, self.calibration)

    def recipe(self, cell: Cell, decay: str) -> AnyRecipe:
        """Return the recipe of a recovery, tested and saved at its end alone.

        It compiles nothing: that would be done anew for every set of ranks.
        """
        own = self.subject.recipe
        if own is None:
            raise ValueError(f"{self.subject.name} is no run of ours: nobody knows how it was trained")
        low_rank = Factorize(scheme="low_rank", ratio=cell.ratio, of="selected", kind=self.kinds[cell.method])
        recipe = recovery_recipe(self.subject.fit(own), None, low_rank)
        run: dict[str, Any] = {"evaluate_every": ONCE, "checkpoint_every": ONCE}
        run |= {"compile": "no", "diagnose": False} if isinstance(recipe, Recipe) else {"compile": False}
        fields: dict[str, Any] = {"run": recipe.run.model_copy(update=run)}
        if decay == ORDINARY:
            fields["decay"] = recipe.decay.model_copy(update={"kind": "weight"})
            if isinstance(own, TextRecipe):  # LAMB, not FLAMBé
                fields["optimizer"] = recipe.optimizer.model_copy(update={"name": own.optimizer.name})
        if cell.method == PRUNED:
            fields["factorize"] = type(own.factorize)()
        return recipe.model_copy(update=fields)

    @cached_property
    def one_network(self) -> OneNetwork:
        """The dense network, compiled once for all ranks."""
        return OneNetwork(self.subject.dense())

    def recover(self, network: nn.Module, plan: fz.Plan, recipe: AnyRecipe, seed: int) -> nn.Module:
        """Return a copy of the network after its recovery."""
        found = _copied(network)
        if self.share_compiled:
            found = self.one_network.holding(found)
        self.subject.seed = seed
        with tempfile.TemporaryDirectory() as folder:
            self.subject.train(recipe, found, plan, Path(folder), Reporter(quiet=True))
        return found


def _copied(network: nn.Module) -> nn.Module:
    """Return a copy that keeps the hooks of pruned weights."""
    found = copy.deepcopy(network)
    for ours, its in zip(network.parameters(), found.parameters(), strict=True):
        for hook in (ours._backward_hooks or {}).values():
            its.register_hook(hook)
    return found


def measure(work: Compression, report: Report, cells: Sequence[Cell], clock: Clock) -> None:
    """Measure the cells that no other process has claimed, until the time is over."""
    dense = {**_about(work), "ratio": 1.0, "method": DENSE, "kind": None, "recovery": NONE}
    with report.claim(Cell(1.0, DENSE, 0, ())) as free:
        if free and not report.has(dense):
            _test(work, report, dense, work.subject.dense())
    for cell in cells:
        with report.claim(cell) as free:
            if free and not _measure_cell(work, report, cell, clock):
                print("no time is left; the same command goes on from here", flush=True)
                return


def _measure_cell(work: Compression, report: Report, cell: Cell, clock: Clock) -> bool:
    """Measure a network without recovery and with that of every decay; return whether there was time to begin."""
    start: Key = {**_about(work), "ratio": cell.ratio, "method": cell.method, "kind": work.kinds[cell.method]}
    start["recovery"] = NONE
    wanted = [{**start, "recovery": decay, "seed": cell.seed} for decay in cell.decays]
    missing = [key for key in wanted if not report.has(key)]
    if not missing and report.has(start):
        return True
    if not clock.allows_another():
        return False
    plan = work.plan(cell.method, cell.ratio)
    network = work.compress(cell.method, plan)
    if not report.has(start):
        _test(work, report, start, network)
    for key in missing:
        if clock.allows_another():
            began = time.perf_counter()
            try:
                trained = work.recover(network, plan, work.recipe(cell, key["recovery"]), cell.seed)
            except ValueError as error:  # the loss is not finite any more: others have to go on
                report.add(key, {"problem": str(error)})
                continue
            seconds = time.perf_counter() - began
            clock.longest = max(clock.longest, seconds)
            _test(work, report, key, trained, seconds=round(seconds, 1))
            del trained
            gc.collect()  # a captured step holds memory of the GPU
    return True


def _about(work: Compression) -> Key:
    return {"network": work.subject.name, "score": work.subject.score}


def _test(work: Compression, report: Report, key: Key, network: nn.Module, **more: Any) -> None:
    zeros = sum(p.numel() - int(p.count_nonzero()) for p in network.parameters() if p.dim() > 1)
    figures = {**work.subject.evaluate(network), "parameters": count_parameters(network) - zeros}
    report.add(key, {**figures, **more})


def main(given: Sequence[str] | None = None) -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a finished run of a dense network")
    parser.add_argument("--data", help="as of factorized compress")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS)
    parser.add_argument("--methods", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--decays", nargs="*", choices=(ORDINARY, FROBENIUS), default=(ORDINARY, FROBENIUS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the recovery")
    parser.add_argument("--kind", choices=("spatial", "channel"), default="spatial", help="how kernels become matrices")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="training examples to calibrate with")
    parser.add_argument("--seconds", type=float, help="begin no recovery that would not end by then")
    parser.add_argument("--no-compile", action="store_true", help="compile nothing on a GPU either")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(given)
    clock, device = Clock(arguments.seconds), arguments.device
    subject = open_subject(str(arguments.run), arguments.data, device)
    share = isinstance(subject.recipe, Recipe) and device.type == "cuda" and not arguments.no_compile
    work = Compression(subject, arguments.kind, arguments.samples, share_compiled=share)
    report = Report(arguments.out, {"machine": describe_machine(device), "samples": arguments.samples})
    cells = cells_of(arguments.ratios, arguments.methods, arguments.decays, arguments.seeds)
    measure(work, report, list(cells), clock)


if __name__ == "__main__":
    main()
