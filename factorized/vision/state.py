"""The state of a run, in one file: written as a whole or not at all, and read back bit for bit."""

from __future__ import annotations

import os
import pickle
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from factorized.vision.step import TrainingStep

FILE = "checkpoint.pt"


@dataclass
class RunState:
    """Everything that a run needs to go on as if it had never stopped."""

    recipe: dict[str, Any]
    seed: int
    epoch: int = 0  # that comes next, or is under way
    step: int = 0  # of that epoch, that comes next
    history: list[dict[str, Any]] = field(default_factory=list)  # a row per finished epoch
    seconds: float = 0.0
    network: dict[str, Tensor] = field(default_factory=dict)
    momentum: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)  # of the epoch under way
    random: dict[str, Tensor] = field(default_factory=dict)  # where the generators are in it


def gather(state: RunState, network: nn.Module, optimizer: SGD, step: TrainingStep) -> None:
    """Fill ``state`` with what the run holds now."""
    state.network = {name: tensor.cpu().clone() for name, tensor in network.state_dict().items()}
    state.momentum = {name: tensor.cpu().clone() for name, tensor in _momentum(network, optimizer).items()}
    state.counts = {name: tensor.cpu().clone() for name, tensor in _counts(step).items()}
    state.random = {"cpu": torch.get_rng_state()}
    if step.device.type == "cuda":
        state.random["cuda"] = torch.cuda.get_rng_state(step.device)


@torch.no_grad()
def restore(state: RunState, network: nn.Module, optimizer: SGD, step: TrainingStep) -> None:
    """Put ``state`` back, in place: a captured step keeps reading the same memory. An empty part counts as zeros."""
    network.load_state_dict(state.network)
    for saved, current in ((state.momentum, _momentum(network, optimizer)), (state.counts, _counts(step))):
        for name, tensor in current.items():
            tensor.copy_(saved[name]) if name in saved else tensor.zero_()


def restore_random(state: RunState, device: torch.device) -> None:
    """Put the generators where they were when the state was gathered."""
    torch.set_rng_state(state.random["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state.random["cuda"], device)


def _momentum(network: nn.Module, optimizer: SGD) -> dict[str, Tensor]:
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in network.named_parameters()}
    return {name: state["momentum_buffer"] for name, state in states.items() if "momentum_buffer" in state}


def _counts(step: TrainingStep) -> dict[str, Tensor]:
    counts = {"loss_sum": step.loss_sum, "correct": step.correct, "position": step.position}
    return counts if step.norms is None else {**counts, "norms": step.norms}


def save_state(state: RunState, folder: Path) -> None:
    """Write ``state`` to ``folder``: the file there is the old one or the new one, never half of it."""
    path = folder / FILE
    temporary = path.with_suffix(".tmp")
    try:
        torch.save(asdict(state), temporary)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_state(folder: Path) -> RunState:
    """Read what ``save_state`` wrote; nothing in the file is executed."""
    path = folder / FILE
    try:
        return RunState(**torch.load(path, map_location="cpu", weights_only=True))
    except (RuntimeError, EOFError, TypeError, OSError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path} cannot be read ({reason}); remove it to start this run anew") from None


def check_recipe_matches(state: RunState, recipe: dict[str, Any], seed: int, folder: Path) -> None:
    """Refuse to go on with another recipe than the one the run began with; the first difference is named."""
    if state.seed != seed:
        raise ValueError(f"{folder} holds a run of seed {state.seed}, not {seed}")
    for section, value in recipe.items():
        before = state.recipe.get(section)
        if section in ("name", "title", "paper") or before == value:
            continue
        if isinstance(value, dict) and isinstance(before, dict):
            field_ = next(key for key in {**before, **value} if before.get(key) != value.get(key))
            section, before, value = f"{section}.{field_}", before.get(field_), value.get(field_)
        raise ValueError(
            f"{folder} holds a run with {section} = {before!r}, and this recipe says {value!r}; resume with the same "
            "recipe, or train into another folder"
        )


def prepare_folder(folder: Path, network: nn.Module, *, resume: bool, overwrite: bool) -> None:
    """Make the run's folder, and fail now rather than at the first checkpoint if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / "probe.tmp"
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror}; choose another folder with --out") from None
    # weights and momentum, the old file beside the new one, and the model at the end
    needed = 5 * sum(tensor.nbytes for tensor in network.state_dict().values())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(f"{folder} has {free / 2**20:.0f} MiB free, and checkpoints need {needed / 2**20:.0f} MiB")
    if (folder / FILE).exists() and not (resume or overwrite):
        raise ValueError(f"{folder} already holds a run; go on with --resume, or start anew with --overwrite")
    if overwrite and not resume:
        for name in (FILE, "metrics.jsonl", "result.json", "norms.safetensors"):
            (folder / name).unlink(missing_ok=True)
