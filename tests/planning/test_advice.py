"""A budget that is out of reach, or that starves layers, names the argument that helps."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
from torch import nn

import factorized as fz
from tests.planning.models_for_planning import EXAMPLES, Mlp, Reader
from tests.planning.real_sizes import real_size


def floors(message: str) -> dict[str, float]:
    """The arguments that a refusal names, with the ratios they would reach."""
    _, _, told = message.partition("factorize more layers: ")
    found = re.findall(r"((?:\w+=\S+?)(?: with \w+=\S+?)*) (?:would reach )?(0\.\d{4})", told)
    return {argument: float(ratio) for argument, ratio in found}


@pytest.mark.filterwarnings("ignore:.*below 5% of full rank")
@pytest.mark.parametrize(
    ("name", "arguments", "helps"),
    [
        ("llama", {}, {"keep_first_and_last=False"}),
        ("gpt2", {}, {"keep_first_and_last=False"}),
        ("llama", {"attention": False}, {'attention="layers"', "keep_first_and_last=False"}),
        ("bert", {"attention": False}, {'attention="layers"', "keep_first_and_last=False"}),
        ("qwen2", {"attention": "heads"}, {'attention="layers"', "keep_first_and_last=False"}),
    ],
)
def test_a_refusal_names_the_arguments_that_reach_further_and_how_far(
    name: str, arguments: dict[str, Any], helps: set[str]
) -> None:
    model = real_size(name)
    with pytest.raises(ValueError, match=r"ratio=0\.3 is out of reach") as caught:
        fz.plan(model, ratio=0.3, **arguments)
    reached = floors(str(caught.value))
    assert reached.keys() == helps
    assert str(caught.value).endswith('of="selected" counts it over the factorized layers only')
    for argument, ratio in reached.items():
        given = arguments | eval(f"dict({argument})")
        assert fz.plan(model, ratio=ratio, **given).ratio <= ratio
        with pytest.raises(ValueError, match="is out of reach"):
            fz.plan(model, ratio=ratio - 2e-4, **given)


def test_arguments_that_are_not_enough_alone_are_named_together() -> None:
    with pytest.raises(ValueError, match="is out of reach") as caught:
        fz.plan(real_size("gpt2"), ratio=0.1, attention=False)
    reached = floors(str(caught.value))
    assert min(reached, key=lambda name: reached[name]).count("=") == 2
    assert min(reached.values()) < 0.1


def test_a_refusal_names_attention_that_nobody_registered() -> None:
    with pytest.raises(
        ValueError, match=r'attention="layers" .* Not registered as attention: T5Attention; see fz\.reg'
    ):
        fz.plan(real_size("t5"), ratio=0.1, attention="heads")


@pytest.mark.parametrize("scheme", [fz.Residual(), fz.Overcomplete()])
def test_a_refusal_of_a_scheme_that_adds_parameters_asks_for_fewer_layers(scheme: Any) -> None:
    with pytest.raises(ValueError, match=r"Ask for \d\.\d+ or more, or factorize fewer layers: see include="):
        fz.plan(Mlp(), scheme, ratio=0.3)


def test_a_refusal_names_a_multiple_or_a_least_size_that_is_in_the_way() -> None:
    with pytest.raises(ValueError, match=r"multiple_of=1 (would reach )?0\.1"):
        fz.plan(Mlp(), ratio=0.2, multiple_of=16)
    with pytest.raises(ValueError, match=r"min_size=0 (would reach )?0\."):
        fz.plan(Mlp(), ratio=0.3, min_size=5000)


@pytest.mark.parametrize(
    ("given", "without"), [({"include": ["square"]}, "include=None"), ({"exclude": ["square"]}, "exclude=()")]
)
def test_a_refusal_names_patterns_that_are_in_the_way(given: dict[str, Any], without: str) -> None:
    with pytest.raises(ValueError, match=r"ratio=0\.2 is out of reach") as caught:
        fz.plan(Mlp(), ratio=0.2, **given)
    reached = floors(str(caught.value))[without]
    assert fz.plan(Mlp(), ratio=reached).ratio <= reached


@pytest.mark.parametrize(
    ("name", "ratio", "arguments", "rank"),
    [
        ("qwen2", 0.3, {}, "24 of 896"),
        ("gpt2", 0.55, {"attention": False}, "16 of 768"),
        ("mistral", 0.3, {"attention": False}, "10 of 4096"),
    ],
)
def test_ranks_that_starve_because_much_stays_dense_are_warned_about(
    name: str, ratio: float, arguments: dict[str, Any], rank: str
) -> None:
    with pytest.warns(UserWarning, match=rf"at rank {rank}, because \d\d% of the model stays dense") as caught:
        fz.plan(real_size(name), ratio=ratio, **arguments)
    message = str(caught[0].message)
    assert "keep_first_and_last=False spends it on more layers" in message
    assert ('attention="layers" or ' in message) == ("attention" in arguments)
    assert 'of="selected"' in message


def test_a_small_ratio_of_a_model_that_is_factorized_throughout_is_not_warned_about() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(30)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert max(entry.rank for entry in fz.plan(model, ratio=0.08).selected) <= 2
        fz.plan(real_size("gpt2"), ratio=0.02, of="selected")


@pytest.mark.parametrize("budget", ["ratio", "macs"])
def test_a_budget_of_the_selected_layers_counts_those_alone(budget: str) -> None:
    model = Reader()
    example = EXAMPLES[Reader]
    made = fz.plan(model, **{budget: 0.4}, of="selected", include=["mix", "output"], example_input=example)
    before, after = ("macs", "macs_after") if budget == "macs" else ("params", "params_after")
    chosen = [entry for entry in made.entries if entry.name in ("mix", "output")]
    share = sum(getattr(e, after) for e in chosen) / sum(getattr(e, before) for e in chosen)
    assert 0.3 < share <= 0.4
    assert made.budget == f'{budget}=0.4, of="selected"'


@pytest.mark.parametrize("budget", [{"rank": 3}, {"rank_scale": 0.5}, {"energy": 0.9}])
def test_of_selected_is_for_shares(budget: dict[str, Any]) -> None:
    (got,) = (f"{name}={value:g}" for name, value in budget.items())
    with pytest.raises(ValueError, match=rf'of="selected" says what ratio= or macs= is a share of, got {got}; leave'):
        fz.plan(Mlp(), **budget, of="selected")


def test_a_budget_is_of_the_model_or_of_what_is_selected() -> None:
    with pytest.raises(ValueError, match='of must be one of "model", "selected", got \'all\''):
        fz.plan(Mlp(), ratio=0.5, of="all")


def test_a_table_whose_padding_would_be_trained_is_a_warning() -> None:
    model = nn.Sequential(
        nn.Embedding(64, 16, padding_idx=0), nn.Embedding(64, 16), nn.EmbeddingBag(64, 16, padding_idx=0)
    )
    options: Any = {"rank_scale": 0.3, "keep_first_and_last": False}
    with pytest.warns(UserWarning, match=r"^0: the row of padding_idx is zero .* in TensorTrain\(\) it is") as caught:
        fz.plan(model, fz.TensorTrain(), **options)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    for scheme in (fz.LowRank(), fz.Monarch(), fz.Residual()):
        fz.plan(model, scheme, **options)
    fz.plan(model, fz.TensorTrain(), exclude=["0"], **options)
