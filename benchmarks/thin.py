"""Time low-rank 3×3 convolutions by custom kernels against the compiler's way and the dense layer, on one GPU.

    python -m benchmarks.thin --out benchmarks/results/thin-h200.json --seconds 140

First the kernels are compared with float64. Then come single layers of four networks, forward and backward, with
several sizes of tiles, and whole training steps: forward, backward, decay and SGD, compiled, as one CUDA graph. All of
them are prepared at the same time in processes of their own, which take turns on the GPU. bf16, channels-last, batch
128; times are medians of interleaved rounds, in milliseconds.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import factorized as fz
from factorized.experiments.models.build import build_model
from factorized.experiments.training.record import describe_machine
from factorized.formats import thin
from factorized.nn.timing import capture, training_step

BATCH = 128
# in, out, stride, input height and width, rank
Case = tuple[int, int, int, int, int]
CASES: dict[str, list[Case]] = {
    "resnet32x2": [(64, 64, 1, 32, 9), (128, 128, 1, 16, 18), (64, 64, 1, 32, 2), (256, 256, 1, 8, 7)],
    "wrn28-10": [(160, 160, 1, 32, 15), (320, 320, 1, 16, 31), (640, 640, 1, 8, 15)],
}
BASE = thin.Tiles()
TILES = {
    "132 programs": BASE,
    "264 programs": replace(BASE, programs=264),
}
# network, ratio of parameters, by the kernels
STEPS = [
    ("resnet32x2", None, False),
    ("resnet32x2", 0.1, False),
    ("resnet32x2", 0.1, True),
    ("resnet32x2", 0.02, False),
    ("resnet32x2", 0.02, True),
]
ROUNDS, REPEATS = 9, 20


class Turn:
    """The turn of one process on the GPU, and how much time is left."""

    def __init__(self, folder: Path, deadline: float) -> None:
        self.folder, self.deadline = folder, deadline

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for the GPU and keep it."""
        with (self.folder / "turn").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
            torch.cuda.synchronize()

    @property
    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.time()

    def medians(self, steps: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
        """Time all steps in interleaved rounds, each round in one turn; at least once."""
        times: dict[str, list[float]] = {name: [] for name in steps}
        for round_ in range(rounds):
            if round_ > 0 and self.left < 0:
                break
            with self.taken():
                for name, step in steps.items():
                    times[name].append(_milliseconds(step))
        return {name: round(statistics.median(values), 4) for name, values in times.items()}


def check() -> list[dict]:
    """Compare the kernels with float64: the largest error of outputs and gradients, relative to their norm."""
    rows = []
    for batch, i, o, stride, height, width, rank in [
        (4, 64, 64, 1, 32, 32, 9),
        (3, 128, 128, 2, 17, 9, 19),
        (5, 256, 512, 1, 8, 8, 24),
        (2, 24, 40, 2, 11, 6, 1),
        (3, 160, 160, 1, 32, 32, 15),
        (5, 128, 128, 1, 16, 16, 18),
        (5, 256, 256, 1, 8, 8, 7),
    ]:
        x = torch.randn(batch, i, height, width, device="cuda").to(memory_format=torch.channels_last)
        layer = fz.FactorizedConv2d(i, o, 3, rank, stride, 1, bias=False, execution="products", device="cuda")
        found = {}
        for name, tiles in TILES.items():
            thin.TILES = tiles
            with torch.autocast("cuda", torch.bfloat16):
                found[name] = _gradients(layer, x.bfloat16())
        layer.execution = "composed"
        expected = _gradients(layer.double(), x.bfloat16().double())
        row = {"case": [batch, i, o, stride, height, width, rank]}
        for name, results in found.items():
            errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(results, expected, strict=True)]
            row[name] = round(max(errors), 5)
        rows.append(row)
        print("check", row, flush=True)
    return rows


def _gradients(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x.requires_grad_()
    y = layer(x)
    gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).bfloat16().to(y)
    return [y, *torch.autograd.grad(y, (x, *layer.parameters()), gradient)]


def time_layers(cases: list[Case], turn: Turn, save: Callable[[list[dict]], None]) -> None:
    """Time single layers: dense, by the kernels with every size of tiles, and at last as the compiler runs them."""
    rows: dict[Case, dict] = {case: {"case": list(case)} for case in cases}
    layers = {case: _layers(case) for case in cases}
    autocast = partial(torch.autocast, "cuda", torch.bfloat16, cache_enabled=False)
    for name, tiles in TILES.items():
        thin.TILES = tiles
        for case, (dense, layer, x) in layers.items():
            if turn.left < 0:
                break
            steps = {}
            with autocast():
                try:
                    steps[name] = capture(training_step(layer, x))
                    if "dense" not in rows[case]:
                        steps["dense"] = capture(training_step(dense, x))
                        with torch.no_grad():
                            steps[f"{name}, forward"] = capture(partial(layer, x))
                            steps["dense, forward"] = capture(partial(dense, x))
                except Exception as error:  # such as too much shared memory
                    rows[case][f"{name} failed"] = f"{type(error).__name__}: {error}"[:300]
            rows[case] |= turn.medians(steps)
            save(list(rows.values()))
            print(rows[case], flush=True)
    thin.ENABLED, thin.TILES = False, BASE
    for case, (_, layer, x) in layers.items():
        if turn.left < 10:
            break
        torch._dynamo.reset()
        with autocast():
            rows[case] |= turn.medians({"compiled products": training_step(layer, x, compiled=True)})
        save(list(rows.values()))
        print(rows[case], flush=True)


def _layers(case: Case) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    i, o, stride, size, rank = case
    dense = nn.Conv2d(i, o, 3, stride, 1, bias=False, device="cuda").to(memory_format=torch.channels_last)
    layer = fz.FactorizedConv2d.from_dense(dense, rank, init="kaiming", execution="products")
    x = torch.randn(BATCH, i, size, size, device="cuda").to(torch.bfloat16, memory_format=torch.channels_last)
    return dense, layer, x.requires_grad_()


def time_step(name: str, ratio: float | None, fused: bool, turn: Turn, save: Callable[[list[dict]], None]) -> None:
    """Time a whole training step; by the kernels, with every size of tiles."""
    torch.manual_seed(0)
    model = build_model(name, 10).cuda().to(memory_format=torch.channels_last)
    if ratio is not None:
        model = fz.factorize(model, ratio=ratio, init="default")
    for module in model.modules():
        if fused and isinstance(module, fz.FactorizedConv2d) and module.format.rank <= thin.LARGEST_RANK:
            module.execution = "products"
    x = torch.randn(BATCH, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    target = torch.randint(0, 10, (BATCH,), device="cuda")
    groups = model.parameters() if ratio is None else fz.parameter_groups(model, 1e-4, decay_norms=True)
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9, weight_decay=1e-4, foreach=True)
    if ratio is not None:
        fz.FrobeniusDecay(model, 1e-4).attach(optimizer)
    run = torch.compile(model, fullgraph=True, dynamic=False)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = F.cross_entropy(run(x).float(), target)
        loss.backward()
        optimizer.step()

    start = time.time()
    step()  # compiles
    row = {"network": name, "ratio": ratio, "fused": fused, "compile_seconds": round(time.time() - start, 1)}
    for tiles, thin.TILES in TILES.items() if fused else [("compiled", BASE)]:
        if turn.left < 0 and tiles in TILES and len(row) > 5:
            break
        row |= turn.medians({tiles: capture(step)})
        row["peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20)
        save([row])
        print(row, flush=True)


def work(part: str, folder: Path, deadline: float) -> None:
    """Do one process's part and save its rows after each of them."""
    torch.backends.cudnn.benchmark = True
    turn = Turn(folder, deadline)
    kind, _, which = part.partition("-")

    def save(rows: list[dict]) -> None:
        draft = folder / f"{part}.draft"
        draft.write_text(json.dumps(rows))
        draft.replace(folder / f"{part}.json")

    thin.ENABLED = kind == "layers" or (kind == "steps" and STEPS[int(which)][2])
    if kind == "layers":
        time_layers(list(CASES.values())[int(which)], turn, save)
    else:
        time_step(*STEPS[int(which)], turn, save)


def gather(folder: Path, checks: list[dict], seconds: float) -> dict:
    """Return everything that is saved so far."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {
        "machine": describe_machine(torch.device("cuda")),
        "seconds": round(seconds, 1),
        "batch": BATCH,
        "tiles": {name: asdict(tiles) for name, tiles in TILES.items()},
        "checks": checks,
        "layers": {name: found.get(f"layers-{place}", []) for place, name in enumerate(CASES)},
        "steps": [row for part, rows in found.items() if part.startswith("steps") for row in rows],
        "logs": {path.stem: path.read_text()[-1500:] for path in folder.glob("*.log") if path.stem not in found},
    }


def main() -> None:
    """Parse the command line, check the kernels, start all parts and write one JSON file as they go."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=140)
    parser.add_argument("--part", help="used by the processes that this one starts")
    parser.add_argument("--deadline", type=float)
    arguments = parser.parse_args()
    if arguments.part is not None:
        work(arguments.part, arguments.out, arguments.deadline)
        return
    start = time.time()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp())
    deadline = start + arguments.seconds - 12  # the last rounds take a few seconds
    parts = {f"steps-{place}": "0" for place in range(len(STEPS))}
    parts |= {f"layers-{place}": "10" for place in range(len(CASES))}  # after the steps, if there are few processors
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "3", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.thin", "--out", str(folder), "--deadline", str(deadline), "--part"]
    running = []
    for part, niceness in parts.items():
        log = (folder / f"{part}.log").open("w")
        patient = ["nice", "-n", niceness, *command, part]
        running.append(subprocess.Popen(patient, env=environment, stdout=log, stderr=subprocess.STDOUT))
    thin.ENABLED = True
    try:
        checks = check()
    except Exception as error:  # the times are of use even so
        checks = [{"failed": f"{type(error).__name__}: {error}"[:2000]}]
    while time.time() - start < arguments.seconds and any(process.poll() is None for process in running):
        arguments.out.write_text(json.dumps(gather(folder, checks, time.time() - start), indent=1))
        time.sleep(2)
    for process in running:
        process.kill()
    report = gather(folder, checks, time.time() - start)
    arguments.out.write_text(json.dumps(report, indent=1))
    for row in report["steps"]:
        print(row)
    for name, rows in report["layers"].items():
        print(name, *rows, sep="\n  ")
    for part, text in report["logs"].items():
        print(part, text[-300:], sep=": ")


def _milliseconds(step: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    step()
    begin.record()
    for _ in range(REPEATS):
        step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / REPEATS


if __name__ == "__main__":
    main()
