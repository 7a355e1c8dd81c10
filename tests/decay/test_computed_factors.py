"""Factors that a parametrization, a weight norm or pruning computes, and those that were replaced."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import factorized as fz
from factorized.formats.kernel import KernelShape


class Twice(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return 2 * value


COMPUTED: dict[str, Callable[[nn.Module], object]] = {
    "0.U": lambda model: parametrize.register_parametrization(model[0], "U", Twice()),
    "0.V": lambda model: prune.l1_unstructured(model[0], "V", 0.5),
    "1.inner.0": lambda model: parametrize.register_parametrization(model[1].inner, "0", Twice()),
    "1.U": lambda model: parametrizations.weight_norm(model[1], "U"),
    "1.V": lambda model: parametrizations.spectral_norm(model[1], "V"),
    "2.cores.1": lambda model: prune.l1_unstructured(model[2].cores, "1", 0.5),
    "3.L": lambda model: parametrize.register_parametrization(model[3], "L", Twice()),
}
ENTRIES: dict[str, Callable[[nn.Module], object]] = {
    "forms": fz.forms,
    "decay": lambda model: fz.FrobeniusDecay(model, 0.1),
    "groups": lambda model: fz.parameter_groups(model, 0.1),
    "flambe": lambda model: fz.Flambe(model.parameters(), model),
    "nuclear": lambda model: fz.NuclearDecay(model, 0.1),
    "matcher": fz.NormMatcher,
    "diagnose": lambda model: fz.diagnose(model, 0.1),
}


def four() -> nn.Module:
    torch.manual_seed(0)
    shape = KernelShape.of((8, 8))
    formats = fz.TensorTrain().at_rank(shape, 2), fz.Monarch(blocks=2).at_rank(shape, 2)
    layers = [fz.FactorizedLinear(8, 8, format) for format in formats]
    return nn.Sequential(fz.FactorizedLinear(8, 8, 2), fz.FactorizedLinear(8, 8, 2, depth=1), *layers)


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
@pytest.mark.parametrize("name", COMPUTED)
def test_a_factor_that_is_computed_is_refused_by_its_name(name: str, entry: Callable[[nn.Module], object]) -> None:
    model = four()
    COMPUTED[name](model)
    with pytest.raises(ValueError, match=rf"^{name} is not a parameter of the model: a parametrization"):
        entry(model)


@pytest.mark.parametrize("name", COMPUTED)
def test_a_layer_reads_the_factor_that_is_computed(name: str) -> None:
    model = four().eval()
    COMPUTED[name](model)
    layer, core = model[int(name[0])], name[2:]
    holder, _, own = core.rpartition(".")
    factor = layer.factors[list(layer.format.cores).index(core)]
    assert not isinstance(factor, nn.Parameter)
    assert torch.equal(factor, getattr(layer.get_submodule(holder), own))


SETTERS: dict[str, Callable[[nn.Module, int], object]] = {
    "the weight": lambda model, place: setattr(model[place], "weight", torch.randn(8, 8)),
    "a tie": lambda model, place: model[place].share_factors(four()[place]),
    "a tie to it": lambda model, place: four()[place].share_factors(model[place]),
    "a new draw": lambda model, place: model[place].reset_parameters(),
    "a draw of factors": lambda model, place: model[place].reset_parameters("kaiming"),
    "a dense checkpoint": lambda model, _: fz.load_dense(model, nn.Sequential(*[nn.Linear(8, 8)] * 4).state_dict()),
    "truncation": lambda model, _: fz.truncate(model, rank=1),
}


@pytest.mark.parametrize("setter", SETTERS.values(), ids=SETTERS)
@pytest.mark.parametrize("name", COMPUTED)
def test_a_factor_that_is_computed_cannot_be_set_and_nothing_changes(
    name: str, setter: Callable[[nn.Module, int], object]
) -> None:
    model = four().eval()
    COMPUTED[name](model)
    x, before = torch.randn(5, 8), {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        expected = model(x)
    with pytest.raises(ValueError, match=rf"{name[2:]} cannot be set, because a parametrization.* nothing was changed"):
        setter(model, int(name[0]))
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["0.U", "1.inner.0", "1.V", "3.L"])
def test_a_parametrized_factor_is_composed_and_lowered_as_it_computes(name: str) -> None:
    model = four().eval()
    COMPUTED[name](model)
    x = torch.randn(5, 8)
    for made in (fz.compose(model), fz.lower(model)):
        torch.testing.assert_close(made(x), model(x))


@pytest.mark.parametrize("kind", ["frobenius", "nuclear", "flambe"])
def test_a_factor_that_is_pruned_while_training_is_refused_at_the_next_step(kind: str) -> None:
    model = four()
    groups = fz.parameter_groups(model, 0.1)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=0.1)
    if kind == "flambe":
        optimizer = fz.Flambe(groups, model)
    else:
        (fz.FrobeniusDecay(model, 0.1) if kind == "frobenius" else fz.NuclearDecay(model, 0.1)).attach(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    prune.l1_unstructured(model[0], "U", 0.5)
    with pytest.raises(ValueError, match=r"0\.U is not the parameter that this decay was made for: it was pruned"):
        optimizer.step()


REPLACED: dict[str, Callable[[nn.Module], object]] = {
    "pruned": lambda model: prune.l1_unstructured(model[0], "U", 0.5),
    "assigned": lambda model: model.load_state_dict(deepcopy(model.state_dict()), assign=True),
    "truncated": lambda model: fz.truncate(model, rank=1),
}


@pytest.mark.parametrize("replace", REPLACED.values(), ids=REPLACED)
@pytest.mark.parametrize(
    "make",
    [lambda model: fz.FrobeniusDecay(model, 0.1), lambda model: fz.ProductPenalty(model, torch.sum)],
    ids=["frobenius", "product"],
)
def test_a_penalty_in_a_loss_and_a_decay_by_hand_refuse_factors_that_were_replaced(
    make: Callable[[nn.Module], Any], replace: Callable[[nn.Module], object]
) -> None:
    model = four()
    decay = make(model)
    decay.penalty().backward()
    replace(model)
    for act in (decay.penalty, decay.apply_):
        with pytest.raises(ValueError, match=r"0\.U is not the parameter that this decay was made for"):
            act()


def test_norms_of_factors_that_were_replaced_are_not_recorded() -> None:
    model = four()
    matcher = fz.NormMatcher(model)
    REPLACED["assigned"](model)
    with pytest.raises(ValueError, match=r"0\.U is not the parameter"):
        matcher.record()


@pytest.mark.parametrize("name", ["in_proj_weight", "out_proj.weight"])
def test_weights_of_attention_that_were_replaced_are_refused_at_the_next_step(name: str) -> None:
    attention = nn.MultiheadAttention(8, 2)
    optimizer = torch.optim.SGD(attention.parameters(), lr=0.1)
    fz.FrobeniusDecay(attention, 0.1).attach(optimizer)
    holder, _, last = name.rpartition(".")
    setattr(attention.get_submodule(holder), last, nn.Parameter(attention.get_parameter(name).detach().clone()))
    with pytest.raises(ValueError, match=rf"{name} is not the parameter that this decay was made for"):
        optimizer.step()


def test_attention_whose_projection_is_computed_has_no_form_and_says_why() -> None:
    attention = nn.MultiheadAttention(8, 2)
    parametrizations.weight_norm(attention.out_proj)
    assert fz.forms(nn.Sequential(attention)) == []
    with pytest.raises(ValueError, match=r"out_proj is \w+, whose weight is not a plain parameter"):
        fz.FrobeniusDecay(nn.Sequential(attention), 0.1)
