from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from factorized.formats.kernel import KernelShape
from factorized.formats.product import LowRank, Overcomplete, Product
from factorized.planning.plan import Plan
from factorized.planning.planner import plan
from factorized.planning.ranks import Choices, Item, lowest_cost, spend_by_spectrum, spend_uniformly, total_cost
from factorized.planning.spectrum import rank_for_energy
from tests.planning.models_for_planning import EXAMPLES, ConvNet, Mlp, Reader, TiedReader, with_singular_values

MODELS = {model_type: model_type() for model_type in (ConvNet, Mlp, Reader, TiedReader)}
WHOLE = {"keep_first_and_last": False}


def smallest_step(made: Plan) -> int:
    """The parameters that one rank more costs the smallest factorized layer."""
    return min(replace(entry.format, rank=1).numel for entry in made.selected if entry.tied_to is None)


def reachable(model: nn.Module, **arguments: Any) -> float:
    """The low end of the range that the error for an impossible budget gives."""
    with pytest.raises(ValueError, match="is out of reach") as caught:
        plan(model, **arguments)
    found = re.search(r"Ask for (\d\.\d+)(\.\.1| or more),", str(caught.value))
    assert found is not None
    assert f"still keeps {found[1]} of its" in str(caught.value)
    return float(found[1])


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("allocate", ["uniform", "spectrum"])
@settings(max_examples=25)
@given(share=st.floats(0, 0.999))
def test_a_ratio_is_never_exceeded_and_met_to_one_rank_step(
    model_type: type[nn.Module], allocate: str, share: float
) -> None:
    model = MODELS[model_type]
    low = LOWEST[model_type]
    ratio = low + share * (1 - low)
    made = plan(model, ratio=ratio, allocate=allocate, **WHOLE)
    assert made.ratio <= ratio
    assert made.params_after > ratio * made.params - max(0.005 * ratio * made.params, smallest_step(made))
    for entry in made.selected:
        assert entry.params_after < entry.params or entry.tied_to


LOWEST = {model_type: reachable(model, ratio=1e-6, **WHOLE) for model_type, model in MODELS.items()}


@pytest.mark.filterwarnings("ignore:.*below 5% of full rank")
@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize(
    ("budget", "arguments"), [("ratio", {}), ("ratio", {"allocate": "spectrum"}), ("macs", {}), ("ratio", WHOLE)]
)
def test_the_range_in_the_error_is_the_reachable_one(
    model_type: type[nn.Module], budget: str, arguments: dict[str, Any]
) -> None:
    model = MODELS[model_type]
    arguments = {**arguments, "example_input": EXAMPLES[model_type]}
    if model_type is TiedReader and arguments.get("keep_first_and_last", True):
        arguments["include"] = ["mix"]
    low = reachable(model, **{budget: 1e-6}, **arguments)
    assert all(entry.rank == 1 for entry in plan(model, **{budget: low}, **arguments).selected)
    with pytest.raises(ValueError, match="is out of reach"):
        plan(model, **{budget: low - 2e-4}, **arguments)


def test_the_range_of_overcomplete_begins_at_full_rank_and_has_no_upper_end() -> None:
    low = reachable(MODELS[Mlp], scheme=Overcomplete(), ratio=1e-6)
    lowest = plan(MODELS[Mlp], Overcomplete(), ratio=low).selected
    assert [entry.rank for entry in lowest] == [min(entry.shape) for entry in lowest]
    for ratio in (low, 2.0, 4.0):
        made = plan(MODELS[Mlp], Overcomplete(), ratio=ratio)
        assert made.params * ratio - smallest_step(made) < made.params_after <= made.params * ratio


@pytest.mark.parametrize("model_type", MODELS)
def test_a_ratio_that_whole_ranks_meet_is_met_exactly(model_type: type[nn.Module]) -> None:
    # A count over the whole, times the whole, is often a hair below the count: no rank may be lost to that.
    for step in range(1, 60):
        scaled = plan(MODELS[model_type], rank_scale=step / 200, **WHOLE)
        assert plan(MODELS[model_type], ratio=scaled.ratio, **WHOLE).params_after == scaled.params_after
        just_below = (scaled.params_after - 0.3) / scaled.params
        if just_below > LOWEST[model_type]:
            assert plan(MODELS[model_type], ratio=just_below, **WHOLE).params_after < scaled.params_after


@pytest.mark.parametrize("model_type", [ConvNet, Mlp, Reader])
def test_a_uniform_ratio_decomposes_nothing_and_leaves_the_model_as_it_was(
    model_type: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_type().train()
    modules = dict(model.named_modules())
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("a uniform ratio needs no singular values")

    for name in ("svd", "svdvals", "eigh", "qr"):
        monkeypatch.setattr(torch.linalg, name, refuse)
    plan(model, ratio=0.6, example_input=EXAMPLES[model_type], **WHOLE)
    after = dict(model.named_modules())
    assert list(after) == list(modules)
    assert all(after[name] is module and module.training for name, module in modules.items())
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with pytest.raises(AssertionError, match="no singular values"):
        plan(model, ratio=0.6, allocate="spectrum", **WHOLE)


def test_uniform_ranks_follow_one_scale() -> None:
    made = plan(MODELS[Mlp], ratio=0.4)
    scales = [entry.rank / LowRank().reference(entry.format.shape) for entry in made.selected]
    assert len(scales) == 3
    assert max(scales) - min(scales) < 2 / 24  # the shortest reference, and one step for the remainder


def test_spectrum_puts_rank_where_the_singular_values_are() -> None:
    model = Mlp()
    with_singular_values(model.wide, [10.0] * 12)
    with_singular_values(model.square, [10.0, 10.0])
    with_singular_values(model.narrow, [10.0] * 5)
    made = plan(model, ratio=0.42, allocate="spectrum")
    ranks = {entry.name: entry.rank for entry in made.selected}
    assert ranks["wide"] >= 12
    assert ranks["narrow"] >= 5
    uniform = plan(model, ratio=0.42)
    assert uniform.selected[0].rank < 12
    assert squared_error(model, made) < 1e-6 < squared_error(model, uniform)


def squared_error(model: nn.Module, made: Plan) -> float:
    """What truncating every planned layer to its rank loses."""
    return sum(
        torch.linalg.svdvals(model.get_submodule(entry.name).weight.detach().double())[entry.rank :]
        .square()
        .sum()
        .item()
        for entry in made.selected
    )


@settings(max_examples=60)
@given(data=st.data())
def test_spectrum_never_loses_more_than_uniform_and_stays_within_the_budget(data: st.DataObject) -> None:
    items, energies, budget = data.draw(problems())
    found = spend_by_spectrum(items, energies, budget)
    assert total_cost(items, found) <= budget
    assert lost(energies, found) <= lost(energies, spend_uniformly(items, budget))


@pytest.mark.parametrize("budget", range(18, 217, 9))
def test_spectrum_is_the_best_there_is_when_all_steps_cost_the_same(budget: int) -> None:
    # Three layers of 12 ranks at a cost of 6 each, dense out of reach: brute force over all 12³ choices.
    items = [priced(6, 12, dense=100) for _ in range(3)]
    energies = [[2.0**-k for k in range(12)], [0.7 * 1.3**-k for k in range(12)], [0.3] * 12]
    choices = [ranks for ranks in itertools.product(range(1, 13), repeat=3) if 6 * sum(ranks) <= budget]
    best = min(lost(energies, list(ranks)) for ranks in choices)
    assert lost(energies, spend_by_spectrum(items, energies, budget)) == pytest.approx(best, abs=1e-12)


def priced(cost: int, reference: int, dense: int = 1000) -> Item:
    """A layer with this cost a rank, too large to stay dense."""
    return whole_ranks(lambda r: dense if r is None else cost * r, lambda s: max(1, round(reference * s)), reference)


def whole_ranks(cost: Callable[[int | None], int], at_scale: Callable[[float], int], reference: int) -> Item:
    """A layer whose choices are its ranks."""
    return Item(
        cost, at_scale, reference, True, lambda r: [r + 1], lambda r: [r - 1] if r > 1 else [], ranks=lambda r: (r,)
    )


def test_spectrum_weighs_energy_against_cost() -> None:
    assert spend_by_spectrum([priced(10, 12), priced(1, 12)], [[1.0] * 12, [1.0] * 12], 21) == [1, 11]


def test_spectrum_gives_way_to_uniform_where_whole_steps_mislead_it() -> None:
    # The first layer's step earns more per cost, but then the second's, which earns more, no longer fits.
    items, energies = [priced(6, 4), priced(10, 12)], [[100.0, 6.5, 0.0, 0.0], [100.0, 10.0] + [0.0] * 10]
    assert spend_uniformly(items, 26) == [1, 2]
    assert spend_by_spectrum(items, energies, 26) == [1, 2]


def test_a_layer_that_stays_dense_loses_nothing() -> None:
    items, energies = [priced(4, 4, dense=10), priced(4, 12)], [[10.0] * 4, [5.0] + [1.0] * 11]
    assert spend_uniformly(items, 18) == [1, 3]
    assert spend_by_spectrum(items, energies, 18) == [None, 2]


def lost(energies: list[list[float]], ranks: Choices) -> float:
    return sum(sum(energy[rank:]) for energy, rank in zip(energies, ranks, strict=True) if rank is not None)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Item], list[list[float]], int]:
    shapes = draw(st.lists(st.builds(KernelShape, st.integers(4, 20), st.integers(4, 20)), min_size=1, max_size=4))
    items = [
        whole_ranks(
            lambda rank, shape=shape: shape.numel if rank is None else Product(shape, rank).numel,
            lambda scale, shape=shape: LowRank().at_scale(shape, scale).rank,
            LowRank().reference(shape),
        )
        for shape in shapes
    ]
    values = st.lists(st.floats(1e-3, 10), min_size=20, max_size=20)
    energies = [sorted(draw(values), reverse=True)[: shape.full_rank] for shape in shapes]
    low, high = lowest_cost(items), total_cost(items, [None] * len(items))
    return items, energies, draw(st.integers(low, high))


@pytest.mark.parametrize(
    ("energies", "share", "rank"),
    [([4.0, 1.0, 0.0], 0.7, 1), ([4.0, 1.0, 0.0], 0.8, 1), ([4.0, 1.0, 0.0], 0.9, 2), ([4.0, 1.0, 0.0], 1.0, 2)],
)
def test_an_energy_is_kept_by_the_smallest_rank_that_reaches_it(energies: list[float], share: float, rank: int) -> None:
    assert rank_for_energy(energies, share) == rank
    assert rank_for_energy([0.0, 0.0], share) == 1


def test_an_energy_is_measured_more_precisely_than_float32() -> None:
    model = nn.Sequential(nn.Linear(1000, 200))
    with_singular_values(model[0], [1.0] * 40 + [1e-4] * 160)
    (entry,) = plan(model, energy=1 - 2.0125e-8, keep_first_and_last=False).selected
    assert entry.rank == 120  # of an energy of 40 and 160e-8, 80.5e-8 may be lost


def test_the_energies_of_groups_are_added() -> None:
    model = nn.Sequential(nn.Conv1d(64, 64, 1, groups=2).double())
    U, S, Vh = torch.linalg.svd(torch.randn(2, 32, 32, dtype=torch.float64))
    S = torch.zeros_like(S)
    S[0, :1], S[1, :9] = 3, 1
    with torch.no_grad():
        model[0].weight.copy_((U * S.unsqueeze(-2) @ Vh).reshape(64, 32, 1))
    (entry,) = plan(model, energy=0.75, keep_first_and_last=False).selected
    assert entry.rank == 5  # 9 + 1, and then 1 for each, of 18
