"""The state of a run in one file, written atomically and read back exactly."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor, nn
from torch.optim import SGD

from factorized.experiments.data.explain import first_problem, in_words
from factorized.experiments.training.network import not_finite
from factorized.experiments.training.step import TrainingStep
from factorized.files.atomic import write_whole

FILE = "checkpoint.pt"
DIGEST = 32  # bytes of the checksum at its end
REMEDY = "start this run over with --overwrite"
Tensors = dict[str, Tensor]


class RunState(BaseModel):
    """Everything that a run needs to resume exactly; every field is checked for its type."""

    model_config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)

    recipe: dict[str, Any]
    seed: Annotated[int, Field(ge=0)]
    data: str  # checksum
    epoch: Annotated[int, Field(ge=0)] = 0  # that comes next, or is under way, counted from 0
    step: Annotated[int, Field(ge=0)] = 0  # of that epoch, that comes next
    history: list[dict[str, int | float | None]] = []  # a row per finished epoch, counted from 1
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    ran_on: list[str] = []  # processes and kinds of device, in the order in which they trained it
    at_once: Annotated[int, Field(ge=1)] = 1  # runs on the device while it was trained, itself included; the most
    network: Tensors = {}
    momentum: Tensors = {}
    counts: Tensors = {}  # of the epoch under way
    random: Tensors = {}  # where the generators are in it


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
    """Restore ``state`` in place: a captured step keeps reading the same memory. An empty part counts as zeros."""
    network.load_state_dict(state.network)
    for saved, current in ((state.momentum, _momentum(network, optimizer)), (state.counts, _counts(step))):
        for name, tensor in current.items():
            tensor.copy_(saved[name]) if name in saved else tensor.zero_()


def restore_random(state: RunState, step: TrainingStep, rank: int) -> None:
    """Restore the random generators; a process that the run did not have before goes on with its own."""
    torch.set_rng_state(state.random["cpu"])
    if step.device.type == "cuda":
        torch.cuda.set_rng_state(state.random["cuda"], step.device)
    own = own_of(rank, step.device)
    if step.own is not None and own in state.random:
        step.own.state = state.random[own]


def own_of(rank: int, device: torch.device) -> str:
    """Return the name of the generator that only one of several processes draws from."""
    return f"{device.type} of process {rank}"


def _momentum(network: nn.Module, optimizer: SGD) -> Tensors:
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in network.named_parameters()}
    return {name: state["momentum_buffer"] for name, state in states.items() if "momentum_buffer" in state}


def _counts(step: TrainingStep) -> Tensors:
    counts = {"loss_sum": step.loss_sum, "correct": step.correct, "position": step.position}
    return counts if step.norms is None else {**counts, "norms": step.norms}


def save_state(state: RunState, folder: Path) -> None:
    """Write ``state`` to ``folder``, its checksum last: the file there is the old one or the new one, whole."""
    buffer = io.BytesIO()  # torch's own writer ends the program when the disk is full
    torch.save(dict(state), buffer)
    buffer.write(hashlib.sha256(buffer.getbuffer()).digest())
    write_whole(folder / FILE, lambda path: path.write_bytes(buffer.getbuffer()))


def load_state(folder: Path) -> RunState:
    """Read what ``save_state`` wrote; nothing in the file is executed, and every field has its type."""
    path = folder / FILE
    try:
        data = path.read_bytes()
        if hashlib.sha256(memoryview(data)[:-DIGEST]).digest() != data[-DIGEST:]:  # torch does not look at any
            raise ValueError(f"its checksum does not match; {len(data):,} bytes")
        found = torch.load(io.BytesIO(data[:-DIGEST]), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch would advise to run whatever the file holds
        raise ValueError(f"{path} is damaged (it holds more than tensors and plain values); {REMEDY}") from error
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(f"{path} is damaged ({in_words(error, named=False)}); {REMEDY}") from error
    try:
        return RunState.model_validate(found)
    except ValidationError as error:
        raise ValueError(f"{path}: {first_problem(error)}; {REMEDY}") from None


class OtherRun(ValueError):
    """A folder holds another run than the one to resume.

    Attributes:
        differs: where they differ.
    """

    def __init__(self, differs: str, remedy: str) -> None:
        self.differs = differs
        super().__init__(f"{differs}; {remedy}")


def check_same_run(state: RunState, recipe: dict[str, Any], seed: int, data: str, folder: Path) -> None:
    """Refuse to resume with another recipe or other data than the run began with; the first difference is named."""
    if state.seed != seed:
        raise OtherRun(f"{folder} holds a run of seed {state.seed}, not {seed}", "resume with that seed")
    for section, value in recipe.items():
        before = state.recipe.get(section)
        if section in ("name", "title", "paper") or before == value:
            continue
        if isinstance(value, dict) and isinstance(before, dict):
            field_ = next(key for key in {**before, **value} if before.get(key) != value.get(key))
            section, before, value = f"{section}.{field_}", before.get(field_), value.get(field_)
        raise OtherRun(
            f"{folder} holds a run with {section} = {before!r}, and this recipe says {value!r}",
            "resume with the same recipe, or train into another folder",
        )
    if state.data != data:
        raise OtherRun(
            f"{folder} holds a run on other data: their checksum was {state.data[:12]}…, and is {data[:12]}… now",
            "resume with the same data, or train into another folder",
        )


def check_same_devices(ran_on: Sequence[str], kind: str, folder: Path) -> None:
    """Refuse to resume with other processes than trained the run so far; ``kind`` describes the present ones."""
    if ran_on and ran_on[-1] != kind:
        raise OtherRun(
            f"{folder} was trained by {ran_on[-1]}, and this is {kind}: the result would not be that of an "
            "uninterrupted run",
            "resume as it began, or give --allow-other-devices",
        )


def add_devices(state: RunState, kind: str, folder: Path, note: Callable[[str], None]) -> None:
    """Record which processes train a run from now on; ``note`` is called with a line if they have changed."""
    if state.ran_on[-1:] == [kind]:
        return
    if state.ran_on:
        note(f"{folder} continues with {kind}; it was trained by {', '.join(state.ran_on)} before")
    state.ran_on.append(kind)


def check_fits(
    state: RunState,
    folder: Path,
    network: nn.Module,
    optimizer: SGD,
    step: TrainingStep,
    may_be_infinite: Collection[str],
) -> None:
    """Refuse a checkpoint that this run cannot have written; tensors in ``may_be_infinite`` need not be finite."""
    epochs, steps = step.recipe.schedule.epochs, step.source.steps
    problem = (
        _problem_of_numbers(state, epochs, steps)
        or _problem_of_tensors("network", state.network, network.state_dict(), may_be_infinite)
        or _problem_of_tensors("momentum", state.momentum, _momentum(network, optimizer))
        or _problem_of_tensors("counts", state.counts, _counts(step))
        or _problem_of_random(state, step.device)
    )
    if problem is None and (position := int(state.counts["position"])) != state.epoch * steps + state.step:
        problem = f"counts.position is {position}, expected {state.epoch * steps + state.step}"
    if problem is not None:
        raise ValueError(f"{folder / FILE}: {problem}; {REMEDY}")


def _problem_of_numbers(state: RunState, epochs: int, steps: int) -> str | None:
    if state.epoch > epochs:
        return f"epoch is {state.epoch}, and the run has {epochs}"
    most = steps if state.epoch < epochs else 0
    if state.step > most:
        return f"step is {state.step}, and at most {most} steps of that epoch can have been taken"
    if [row.get("epoch") for row in state.history] != list(range(1, state.epoch + 1)):
        return f"history must have a row for each of {state.epoch} epochs, and has {len(state.history)} rows"
    if state.epoch == epochs and state.history[-1].get("test_accuracy") is None:
        return "history must end with a test_accuracy"
    return None


def _problem_of_tensors(
    part: str, saved: Mapping[str, Tensor], expected: Mapping[str, Tensor], may_be_infinite: Collection[str] = ()
) -> str | None:
    if odd := sorted(saved.keys() ^ expected.keys()):
        return f"{part} {'has no' if odd[0] in expected else 'must not have'} {odd[0]!r}"
    for name, tensor in saved.items():
        ours, its = ((tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in (expected[name], tensor))
        if ours != its:
            return f"{part}.{name} is {its[1]} {its[0]}, expected {ours[1]} {ours[0]}"
    bad = not_finite(saved, may_be_infinite)
    return None if bad is None else f"{part}.{bad} holds NaN or infinity"


def _problem_of_random(state: RunState, device: torch.device) -> str | None:
    for kind in ("cpu", "cuda") if device.type == "cuda" and state.step else ("cpu",):
        if kind not in state.random:
            return f"random has no state of {kind}, where the epoch under way has to go on"
    for name, kept in state.random.items():
        kind = name.partition(" ")[0]
        if kind == "cuda" and device.type != "cuda":
            continue  # and not restored
        try:
            torch.Generator(device if kind == "cuda" else "cpu").set_state(kept)
        except (RuntimeError, TypeError):
            return f"random.{name} is not the state of a generator"
    return None
