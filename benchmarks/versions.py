"""Time training steps of one or more checkouts of this package in turn, each in its own process, on one GPU.

    git archive OLD factorized | tar x -C vendor/old
    python -m benchmarks.versions . vendor/old --out out/versions --only ResNet
    python -m benchmarks.versions . vendor/old --out out/llama --only Llama --rounds 15 --steps 5

Networks and rows are those of ``factorized bench training`` and ``factorized bench llama``. All processes compile at
once; one after another lets cuDNN choose the algorithms of its convolutions, and keeps its step as a CUDA graph. Then
they take turns, so that a busy moment hits all of them alike, old and new. Every
checkout gets its own report, in the form of ``factorized bench``. At the end the first row of each is timed again after
all other processes have ended.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.script import parser_of
from factorized.experiments.bench.measure import Spread, clock_of
from factorized.experiments.bench.networks import NETWORKS as OF_IMAGES
from factorized.experiments.training.record import describe_machine

WORKER = Path(__file__).with_name("version_worker.py")
# what each row of a network is called, and how the worker calls it
NETWORKS = {
    **OF_IMAGES,
    "Llama": {"dense": "llama", "low rank": "llama low", "low rank, Frobenius decay": "llama low decay"},
}
MARK = b"@"  # begins the lines that a worker tells
BATCH = 128


class Worker:
    """A process that holds the training step of one recipe, as one checkout computes it.

    ``script`` is what Python runs there, with the recipe, the batch and the device as arguments.
    """

    def __init__(
        self, checkout: Path, network: str, way: str, device: torch.device, threads: int, script: Sequence[str] = ()
    ) -> None:
        self.checkout, self.network, self.way = checkout, network, way
        self.times: list[float] = []
        self.facts: dict[str, Any] | None = None
        folders = os.pathsep.join([str(checkout.resolve()), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": folders, "TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
        command = [sys.executable, *(script or [str(WORKER)]), NETWORKS[network][way], str(BATCH), str(device)]
        # unbuffered: a line that waits in a buffer of Python is not seen by ``select``
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    def hear(self, seconds: float) -> Any:
        """Return the next thing that the process tells, or None after ``seconds`` or where it has ended."""
        out, deadline = self.process.stdout, time.monotonic() + seconds
        assert out is not None
        while select.select([out], [], [], max(0.0, deadline - time.monotonic()))[0]:
            line = out.readline()
            if not line:
                return None
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        return None

    def ask(self, line: bytes) -> Any:
        """Return what the process answers to a line, or None where it does not."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        return self.hear(60)

    def milliseconds(self, steps: int) -> float:
        """Time some steps."""
        found = self.ask(b"%d" % steps)
        if found is None:
            raise RuntimeError(f"{self.checkout}, {self.network}, {self.way}: the process does not answer")
        return float(found)

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()  # closes its pipes


def report(checkout: Path, workers: Sequence[Worker], device: torch.device) -> dict[str, Any]:
    """Return the rows of a checkout in the form of ``factorized bench``."""
    rows, skipped = [], []
    for worker in workers:
        group = f"{worker.network}, training step, batch {BATCH if worker.network in OF_IMAGES else 8}"
        if not worker.times or worker.facts is None:
            skipped.append(f"{group}: {worker.way}: it was not compiled in time")
            continue
        spread = Spread.of(worker.times)
        row = {"group": group, "way": worker.way, "ms": spread.to_dict(), **worker.facts}
        first = next((row for row in rows if row["group"] == group), row)
        row["over"] = round(spread.median / first["ms"]["median"], 4)
        row["memory_over"] = round(row["memory"] / first["memory"], 4)
        rows.append(row)
        print(
            f"{checkout} {group}: {worker.way}: {spread} {row['over']:.3f} memory {row['memory_over']:.3f}", flush=True
        )
    machine = {**describe_machine(device), "packages": {}}
    about = {"benchmark": "training", "checkout": str(checkout), "machine": machine, "clock": clock_of(device)}
    return {**about, "rows": rows, "fits": [], "skipped": skipped}


def wait_for(workers: Sequence[Worker], seconds: float, after: Path | None) -> list[Worker]:
    """Return the workers that have compiled their step after ``seconds``; wait as long for a file, too."""
    deadline = time.monotonic() + seconds
    told = [worker.hear(max(0.0, deadline - time.monotonic())) for worker in workers]
    print(f"compiled {len(told) - told.count(None)} of {len(told)}", flush=True)
    for worker, found in zip(workers, told, strict=True):
        worker.facts = worker.ask(b"") if found == "compiled" else found  # others have nothing to choose
        print(f"{worker.checkout} {worker.network}, {worker.way}: {worker.facts}", flush=True)
    while after and not after.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    return [worker for worker in workers if worker.facts is not None]


def take_turns(workers: Sequence[Worker], rounds: int, steps: int) -> None:
    """Time steps of every worker, round after round; the first round warms up."""
    for round_ in range(rounds + 1):
        for worker in workers:
            taken = worker.milliseconds(steps)
            if round_:
                worker.times.append(taken)


def main(words: list[str] | None = None) -> None:
    """Parse the command line, compile and time, and write a JSON file for each checkout."""
    parser = parser_of(__doc__)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path()])
    parser.add_argument("--only", nargs="+", default=[""], help="for each checkout, a pattern of its rows")
    parser.add_argument("--compile-seconds", type=float, default=200, help="after which rows are left out")
    parser.add_argument("--after", type=Path, help="a file to wait for before anything is timed")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--steps", type=int, default=8, help="of each row in a round")
    parser.add_argument("--threads", type=int, default=3, help="that each process compiles kernels with")
    parser.add_argument("--device", type=torch.device, default="cuda")
    given = parser.parse_args(words)
    patterns = given.only * (len(given.checkouts) if len(given.only) == 1 else 1)
    workers = [
        Worker(checkout, network, way, given.device, given.threads)
        for checkout, pattern in zip(given.checkouts, patterns, strict=True)
        for network in NETWORKS
        for way in NETWORKS[network]
        if re.search(pattern, f"{network}: {way}")
    ]
    with ExitStack() as stack:
        for worker in workers:
            stack.callback(worker.end)
        ready = wait_for(workers, given.compile_seconds, given.after)
        take_turns(ready, given.rounds, given.steps)
        given.out.mkdir(parents=True, exist_ok=True)
        for number, checkout in enumerate(given.checkouts):
            found = report(checkout, [worker for worker in workers if worker.checkout == checkout], given.device)
            (given.out / f"{number}.json").write_text(json.dumps(found, indent=1) + "\n")
        of_checkouts = ([worker for worker in ready if worker.checkout == checkout] for checkout in given.checkouts)
        firsts = [found[0] for found in of_checkouts if found]
        for worker in workers:
            if worker not in firsts:
                worker.end()
        for worker in firsts:
            alone = Spread.of([worker.milliseconds(given.steps) for _ in range(given.rounds)])
            print(f"{worker.checkout} {worker.network}, {worker.way}, alone: {alone}", flush=True)


if __name__ == "__main__":
    main()
