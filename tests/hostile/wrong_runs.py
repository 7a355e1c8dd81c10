"""Wrong runs and checkpoints: each a way to spoil one file of a run, and the verbs that read it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from factorized.experiments.training.state import load_state, save_state
from factorized.files.checksum import sealed
from tests.hostile.cases import Case, Prepare
from tests.hostile.place import DENSE, LOW
from tests.hostile.spoil import GARBAGE, Runs, damaged, rewritten, truncated

REMOVED = object()


def edited(path: str, *keys: str | int, value: Any) -> Prepare:
    """Change one value of a JSON file, or remove it; its checksum is made anew."""

    def prepare(folder: Path) -> None:
        table = inner = json.loads((folder / path).read_text())
        for key in keys[:-1]:
            inner = inner[key]
        if value is REMOVED:
            del inner[keys[-1]]
        else:
            inner[keys[-1]] = value
        del table["checksum"]
        (folder / path).write_text(json.dumps(sealed(table)))

    return prepare


DEEP = "[" * 100_000 + "]" * 100_000
RESULT, PLAN = f"{LOW}/result.json", f"{LOW}/model/plan.json"
RESULT_EDITS: tuple[tuple[tuple[str | int, ...], tuple[Any, ...]], ...] = (
    (("recipe",), (REMOVED, None, {}, [], "low.toml", 3)),
    (("recipe", "model"), (REMOVED, None, {})),
    (
        ("recipe", "model", "name"),
        (REMOVED, None, 3, "", "resnet9", "nowhere:small", "own:exits", "hf:x", "resnet20"),
    ),
    (("recipe", "run", "batch"), (0, "x", None)),
    (("accuracy",), (REMOVED, None, "x", [], {}, math.nan, math.inf)),
    (("data",), (REMOVED, None, [], "digits", {})),
    (("data", "classes"), (REMOVED, None, [], 10, "0123456789", ["0"], list(range(1000)))),
    (("data", "size"), (REMOVED, None, [], [8], 8, ["8", "8"], [0, 0], [-8, -8], [8.5, 8], [10**12, 10**12])),
    (("data", "channels"), (REMOVED, None, 0, -1, "1", 1.5, 3, 10**12)),
    (("data", "mean"), (None, "x", [], [0.5, 0.5], ["x"], [math.nan])),
    (("data", "std"), (None, "x", [], [0], [-1], [math.nan], [math.inf])),
    (("data", "checksum"), (REMOVED, None, 3)),
    (("seed",), (REMOVED,)),
)
PLAN_EDITS: tuple[tuple[tuple[str | int, ...], tuple[Any, ...]], ...] = (
    (("format",), (REMOVED, 2, "1", None)),
    (("weights",), (REMOVED, None, 3, "", "../weights-1.safetensors", "/etc/passwd", "weights-1.safetensors")),
    (("aliases",), (REMOVED, None, [], {"x": "y"}, {"x": 3})),
    (("plan",), (REMOVED, None, [], {}, "plan")),
    (("plan", "format"), (REMOVED, 2, None)),
    (("plan", "entries"), (REMOVED, None, {}, [], [3], [None], [{}])),
    (("plan", "entries", 1, "name"), (REMOVED, None, 3, "", "nothing", "..")),
    (("plan", "entries", 1, "type"), (REMOVED, None, 3, "Linear", "os.system")),
    (("plan", "entries", 1, "shape"), (REMOVED, None, [], 3, ["x"], [10**15, 10**15])),
    (("plan", "entries", 1, "format", "rank"), (REMOVED, None, 0, -1, 2.5, "3", True, 10**15, 10**40)),
    (("plan", "entries", 1, "format", "name"), (REMOVED, None, 3, "", "sparse")),
)


def wrong_runs() -> Iterator[Case]:
    """Yield runs whose result or network is damaged, evaluated and composed."""
    ways: dict[str, Prepare] = {}
    for path, edits in ((RESULT, RESULT_EDITS), (PLAN, PLAN_EDITS)):
        file = Path(path).name
        for keys, values in edits:
            for value in values:
                shown = "removed" if value is REMOVED else repr(value)[:40]
                ways[f"{file} {'.'.join(map(str, keys))} = {shown}"] = edited(path, *keys, value=value)
        ways |= {f"{file} {name}": spoil(path) for name, spoil in GARBAGE.items()}
        ways[f"{file} deep"] = rewritten(path, DEEP)
        ways[f"{file} a list"] = rewritten(path, "[1, 2]")
        ways[f"{file} null"] = rewritten(path, "null")
        ways[f"{file} not text"] = rewritten(path, b"\xff\xfe\xfd" * 10)
    weights = f"{LOW}/model/weights-*.safetensors"
    ways |= {f"weights damaged {seed}": damaged(weights, seed) for seed in range(12)}
    ways["weights that are no numbers"] = lambda folder: _fill(next(folder.glob(weights)), math.nan)
    ways["other weights"] = lambda folder: _fill(next(folder.glob(weights)), 0.5)
    for name in (*GARBAGE, "deep", "a list", "null", "not text"):
        yield Case(f"report {name}", ("report", LOW, "--out", "new"), ways[f"{Path(RESULT).name} {name}"])
    for name, prepare in ways.items():
        yield Case(f"evaluate {name}", ("evaluate", LOW), prepare)
        yield Case(f"compose {name}", ("compose", LOW, "--out", "new.safetensors"), prepare)
    dense = f"{DENSE}/model/dense.safetensors"
    for name, prepare in {
        **{name: spoil(dense) for name, spoil in GARBAGE.items()},
        **{f"damaged {seed}": damaged(dense, seed) for seed in range(6)},
        "no numbers": lambda folder: _fill(folder / dense, math.nan),
    }.items():
        yield Case(f"evaluate dense weights {name}", ("evaluate", DENSE), prepare)
        yield Case(f"compose dense weights {name}", ("compose", DENSE, "--out", "new.safetensors"), prepare)


def _fill(path: Path, value: float) -> None:
    save_file({k: t.fill_(value) if t.is_floating_point() else t for k, t in load_file(path).items()}, path)


def state(change: Callable[[Any], object]) -> Prepare:
    """Change the checkpoint of a run that has not ended; what is written is a whole and valid file."""

    def prepare(folder: Path) -> None:
        found = load_state(folder / LOW)
        change(found)
        save_state(found, folder / LOW)
        (folder / RESULT).unlink()

    return prepare


STATE_EDITS: dict[str, tuple[Any, ...]] = {
    "recipe": (None, {}, [], "low"),
    "seed": (None, "0", 1, -1),
    "data": (None, "", "0" * 64, 3),
    "epoch": (-5, 10**9, "1", None, 0.5, math.nan, 2),
    "step": (-1, 10**9, "1", None, 0.5),
    "history": (None, "x", [None], [{}], [{"epoch": "x"}]),
    "seconds": (None, "x", math.nan, -1.0),
    "network": (None, {}, [], {"x": torch.ones(3)}, {"x": 3}),
    "momentum": (None, {}, [], {"x": torch.ones(3)}),
    "counts": (None, [], {"loss_sum": "x"}),
    "random": (None, {}, [], {"cpu": torch.zeros(3, dtype=torch.uint8)}, {"cpu": torch.zeros(5056)}),
}


def wrong_checkpoints() -> Iterator[Case]:
    """Yield checkpoints that are damaged or hold what no run writes, resumed."""
    path = f"{LOW}/checkpoint.pt"
    ways: dict[str, Prepare] = {
        f"{field} = {repr(value)[:30]!s}".replace("\n", ""): state(lambda s, f=field, v=value: setattr(s, f, v))  # type: ignore[misc]
        for field, values in STATE_EDITS.items()
        for value in values
    }
    ways["weights that are no numbers"] = state(lambda s: [t.fill_(math.nan) for t in _floats(s.network)])
    ways["momentum that is no number"] = state(lambda s: [t.fill_(math.nan) for t in _floats(s.momentum)])
    ways["weights of other shapes"] = state(
        lambda s: s.network.update({k: t[:1] for k, t in s.network.items() if t.dim()})
    )
    ways["weights of another type"] = state(lambda s: s.network.update({k: t.long() for k, t in s.network.items()}))
    ways["a weight missing"] = state(lambda s: s.network.popitem())
    ways["a momentum missing"] = state(lambda s: s.momentum.popitem())
    ways |= {name: spoil(path) for name, spoil in GARBAGE.items() if name != "missing"}
    ways |= {f"truncated to {share:.0%}": truncated(path, share) for share in (0.01, 0.5, 0.99)}
    code: Any = {"recipe": Runs()}
    ways["code"] = lambda folder: save_state(code, folder / LOW)
    for name, prepare in ways.items():
        yield Case(f"resume {name}", ("train", "low.toml", "--resume"), prepare)


def _floats(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors.values() if tensor.is_floating_point()]
