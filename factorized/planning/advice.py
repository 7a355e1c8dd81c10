"""Advice on which argument helps if a budget is out of reach, or leaves layers with tiny ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from factorized.attention.register import adapter_of, looks_like_attention
from factorized.nn.held_weight import named_layers
from factorized.nn.model import listed
from factorized.planning.plan import Plan
from factorized.planning.ranks import Choices, total_cost
from factorized.planning.solve import Problem

STARVED = 0.05  # of full rank
DENSE_AFTER, DENSE_BEFORE = 0.5, 0.1  # dense shares of the model, after and before, from which the rest is starved
WORTH_NAMING = 0.005  # share of the model that an argument must save to be named in a warning

Change = Mapping[str, Any]  # other values for arguments of fz.plan
Pose = Callable[[Change], Problem]  # the problem with some arguments changed


class OutOfReach(ValueError):
    """A budget is below the lowest share that a plan can reach.

    Attributes:
        reached: changes of arguments that reach less, each with the share that it reaches.
    """

    def __init__(self, before: str, reached: list[tuple[Change, float]], after: str, *, of_model: bool) -> None:
        self.before, self.reached, self.after = before, reached, after
        selected = '. of="selected" counts it over the factorized layers only' if of_model else ""
        super().__init__(self.told(_written, "see include=, exclude= and keep_first_and_last=") + selected)

    def told(self, written: Callable[[Change], str | None], otherwise: str) -> str:
        """Return the message with the changes as ``written``, which is None for those that the caller cannot make."""
        named = [(text, low) for change, low in self.reached if (text := written(change)) is not None]
        told = ", ".join(f"{text} {'would reach ' * (not i)}{low:.4f}" for i, (text, low) in enumerate(named))
        return f"{self.before}: {told or otherwise}{self.after}"


def out_of_reach(model: nn.Module, problem: Problem, changes: list[Change], pose: Pose) -> ValueError:
    """Return the error for a budget below the lowest share, with the shares that other arguments would reach."""
    scheme, budget, lowest = problem.scheme, problem.budget, problem.lowest
    if budget.name == "macs" and lowest >= 1:
        return ValueError(
            f"{budget} is out of reach for {type(model).__name__}: weights of {scheme} are multiplied out before they "
            "run, so that none is saved; use ratio=, or another scheme"
        )
    allowed = (
        f"{lowest:.4f}..1, or factorize more layers"
        if scheme.compresses
        else f"{lowest:.4f} or more, or factorize fewer layers"
    )
    floor = "full rank everywhere, the lowest of Overcomplete," if scheme.least_scale else "rank 1 everywhere"
    if budget.multiple_of is not None:
        floor = "the lowest ranks everywhere"
    reached = sorted(_reached(problem, changes, pose), key=lambda pair: -pair[1])
    before = (
        f"{budget} is out of reach for {type(model).__name__}: with {floor} it still keeps {lowest:.4f} of its "
        f"{problem.whole:,} {budget.counted}. Ask for {allowed}"
    )
    of_model = scheme.compresses and budget.of == "model"
    return OutOfReach(before, reached, _unregistered(problem), of_model=of_model)


def above_reach(model: nn.Module, problem: Problem, choices: Choices) -> str | None:
    """Return the message for a budget that full rank everywhere leaves unspent, or None."""
    items, budget = problem.items, problem.budget
    highest = problem.rest + total_cost(items, choices)
    spent = highest >= 0.99 * problem.target + problem.rest
    if spent or not all(item.is_highest(choice) for item, choice in zip(items, choices, strict=True)):
        return None
    return (
        f"{budget} is out of reach for {type(model).__name__}: at full rank everywhere, {problem.scheme} keeps only "
        f"{highest / problem.whole:.4f} of its {problem.whole:,} {budget.counted}. Ask for less, or factorize fewer "
        "layers: see include= and exclude="
    )


def starved(
    model: nn.Module, problem: Problem, choices: Choices, plan: Plan, changes: list[Change], pose: Pose
) -> str | None:
    """Return the warning for ranks that are tiny because much of the model stays dense, or None."""
    if not problem.budget.is_share or problem.budget.of == "selected" or not problem.scheme.compresses:
        return None
    chosen = {candidate.name for tied in problem.weights for candidate in tied}
    dense = sum(entry.params for entry in plan.entries if entry.name not in chosen)
    if dense < DENSE_AFTER * plan.params_after or dense < DENSE_BEFORE * plan.params:
        return None
    zipped = [*zip(problem.weights, problem.items, choices, strict=True)]
    ranks = [(tied, item, item.height(choice)) for tied, item, choice in zipped if choice is not None]
    tiny = [(tied, item, rank) for tied, item, rank in ranks if rank < STARVED * item.reference]
    if 2 * sum(item.cost(None) for _, item, _ in tiny) < sum(item.cost(None) for item in problem.items):
        return None
    tied, item, rank = tiny[0]
    helps = [
        _written(change) for change, low in _reached(problem, changes, pose) if low < problem.lowest - WORTH_NAMING
    ]
    spread = f"{' or '.join(helps)} spends it on more layers; " if helps else ""
    layers = "1 layer" if len(tiny) == 1 else f"{len(tiny)} layers"
    return (
        f"{problem.budget} leaves {layers} of {type(model).__name__} below {STARVED:.0%} of full rank, such "
        f"as {tied[0].name!r} at rank {rank} of {item.reference}, because {dense / plan.params:.0%} of the model stays "
        f'dense. {spread}of="selected" counts it over the factorized layers only{_unregistered(problem)}'
    )


def trained_padding(model: nn.Module, plan: Plan) -> str | None:
    """Return a warning if tables with padding get formats that do not keep its row of zeros, or None."""
    modules = named_layers(model)
    tables = [
        entry
        for entry in plan.layers
        if isinstance(table := modules[entry.name], nn.Embedding)
        and table.padding_idx is not None
        and not (entry.format is None or entry.format.keeps_zero_rows)
    ]
    if not tables:
        return None
    return (
        f"{listed([entry.name for entry in tables])}: the row of padding_idx is zero in nn.Embedding, but in "
        f"{plan.scheme} it is approximated, and changes with the others in training. Mask padding in the model, leave "
        "the table dense (exclude=), or use LowRank() or Monarch(), which keep the row"
    )


def _reached(problem: Problem, changes: list[Change], pose: Pose) -> Iterator[tuple[Change, float]]:
    """Yield the changes that lower the floor, with the floor they reach; all together where no single one is enough."""
    if not problem.scheme.compresses:
        return
    alone = [(change, low) for change in changes if (low := _floor(pose, change)) < problem.lowest]
    yield from alone
    if len(alone) > 1 and min(low for _, low in alone) > problem.budget.value:
        together = {key: value for change, _ in alone for key, value in change.items()}
        yield together, _floor(pose, together)


def _floor(pose: Pose, change: Change) -> float:
    """Return the floor with some arguments changed; 1 where they raise."""
    try:
        return pose(change).lowest
    except ValueError:  # heads whose registration does not fit, say
        return 1.0


def _written(change: Change) -> str:
    return " with ".join(
        f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in change.items()
    )


def _unregistered(problem: Problem) -> str:
    """Return a sentence on attention modules that stay dense because their classes are not registered, or nothing."""
    modules = [c.module for c in problem.candidates if c.reason is not None and looks_like_attention(c.module)]
    names = sorted({type(module).__name__ for module in modules if adapter_of(module) is None})
    return f". Not registered as attention: {' and '.join(names)}; see fz.register_attention" if names else ""
