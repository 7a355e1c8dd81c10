"""The keyword arguments of ``fz.plan`` are listed once beside it; what passes them on follows."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import pytest
from torch import nn

import factorized as fz
from factorized.planning.planner import PlanOptions, plan
from tests.planning.models_for_planning import EXAMPLES, Mlp


def test_the_options_are_the_keywords_of_the_signature_with_their_types() -> None:
    parameters = inspect.signature(plan).parameters.values()
    keywords = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    assert list(PlanOptions.__annotations__) == keywords
    hints = get_type_hints(plan)
    assert get_type_hints(PlanOptions) == {name: hints[name] for name in keywords}


def test_every_option_is_documented_where_it_is_planned() -> None:
    documented = inspect.getdoc(plan) or ""
    assert all(f"\n    {name}: " in documented for name in PlanOptions.__annotations__)


@pytest.mark.parametrize("made", [None, fz.LowRank(), fz.plan(Mlp(), ratio=0.5)])
@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("ratoi", r"did you mean 'ratio'\?"),
        ("inti", r"did you mean 'init'\?"),
        ("zzz", "it takes init, exact, progress, ratio, rank_scale, .*, attention"),
    ],
)
def test_a_mistyped_keyword_is_reported_as_one_of_factorize_with_the_nearest(made: Any, wrong: str, hint: str) -> None:
    with pytest.raises(TypeError, match=rf"^factorize\(\) got an unexpected keyword argument '{wrong}'; {hint}$"):
        fz.factorize(Mlp(), made, **{wrong: 0.5})


GIVEN: dict[str, Any] = {
    "of": "selected",
    "example_input": EXAMPLES[Mlp],
    "allocate": "spectrum",
    "calibration": fz.Calibrated([]),
    "multiple_of": 8,
    "include": ["wide"],
    "exclude": ["wide"],
    "min_size": 5000,
    "keep_first_and_last": False,
    "attention": ("ov",),
}


@pytest.mark.parametrize("name", GIVEN)
def test_an_option_is_refused_beside_a_plan(name: str) -> None:
    made = fz.plan(Mlp(), ratio=0.5)
    with pytest.raises(ValueError, match="the plan already selects the layers"):
        fz.factorize(Mlp(), made, **{name: GIVEN[name]})


def test_what_factorize_is_given_is_planned() -> None:
    arguments: dict[str, Any] = {"ratio": 0.3, "of": "selected", "include": ["wide", "square"], "multiple_of": 2}
    made = fz.plan(Mlp(), **arguments)
    model = fz.factorize(Mlp(), **arguments)
    layers = {name: module.rank for name, module in model.named_modules() if isinstance(module, fz.FactorizedLinear)}
    assert layers == {entry.name: entry.rank for entry in made.selected}
    assert isinstance(model.narrow, nn.Linear)
