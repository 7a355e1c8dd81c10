"""The state of a run, in one file: written as a whole or not at all, and read back bit for bit."""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from factorized.deploy.whole_file import write_whole
from factorized.vision.step import TrainingStep

FILE = "checkpoint.pt"


@dataclass
class RunState:
    """Everything that a run needs to go on as if it had never stopped."""

    recipe: dict[str, Any]
    seed: int
    data: str  # checksum
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
    buffer = io.BytesIO()  # torch's own writer ends the program when the disk is full
    torch.save(vars(state), buffer)
    write_whole(folder / FILE, lambda path: path.write_bytes(buffer.getbuffer()))


def load_state(folder: Path) -> RunState:
    """Read what ``save_state`` wrote; nothing in the file is executed."""
    path = folder / FILE
    try:
        with zipfile.ZipFile(path) as archive:
            if (broken := archive.testzip()) is not None:  # torch does not look at the checksums
                raise ValueError(f"{broken} has another checksum than it says")
        return RunState(**torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # a damaged file can raise anything
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path} is damaged ({reason}); remove it to start this run anew") from error


def check_same_run(state: RunState, recipe: dict[str, Any], seed: int, data: str, folder: Path) -> None:
    """Refuse to go on with another recipe or other data than the run began with; the first difference is named."""
    if state.seed != seed:
        raise ValueError(f"{folder} holds a run of seed {state.seed}, not {seed}; resume with that seed")
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
    if state.data != data:
        raise ValueError(
            f"{folder} holds a run on other images: their checksum was {state.data[:12]}…, and is {data[:12]}… now; "
            "resume with the same data, or train into another folder"
        )
