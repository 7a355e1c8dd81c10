"""Every parameter of a model is in one entry of its plan, or in everything else."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import factorized as fz
from factorized.nn.held_weight import named_layers
from factorized.planning.table import everything_else, plan_table
from tests.planning.models_for_planning import Attends, ConvNet, Mlp, TiedReader
from tests.planning.real_sizes import NAMES, real_size


def held_by_nobody(model: nn.Module, made: fz.Plan) -> int:
    """Count, one by one, the parameters that no entry accounts for."""
    counted, layers = set(), named_layers(model)
    for entry in made.entries:
        if entry.type == "Parameter":
            counted.add(model.get_parameter(entry.name))
            continue
        module = layers[entry.name]
        if entry.is_attention:
            form_holders = [m for m in module.modules() if isinstance(m, nn.Linear) or "Conv1D" in type(m).__name__]
            counted.update(p for m in form_holders for p in m.parameters())
            counted.update(p for name, p in module.named_parameters() if "in_proj" in name)
        else:
            counted.add(module.weight)
    return sum(p.numel() for p in model.parameters() if p not in counted)


@pytest.mark.parametrize("name", NAMES)
def test_entries_and_everything_else_add_up_to_the_model(name: str) -> None:
    model = real_size(name)
    made = fz.plan(model, ratio=0.98, keep_first_and_last=False)
    assert everything_else(made) == held_by_nobody(model, made)
    assert made.params == sum(parameter.numel() for parameter in model.parameters())
    assert sum(part.params for part in made.parts) == made.params
    assert sum(part.params_after for part in made.parts) == made.params_after
    assert everything_else(made) == made.parts[-1].params == made.parts[-1].params_after
    assert everything_else(made) < 0.01 * made.params  # norms and biases, no matrix


def test_a_loose_matrix_has_a_row_and_a_loose_vector_has_none() -> None:
    model = Mlp()
    model.positions = nn.Parameter(torch.zeros(1, 50, 20))
    model.token = nn.Parameter(torch.zeros(1, 1, 20))
    model.stack = nn.Parameter(torch.zeros(3, 5, 20))
    made = fz.plan(model, ratio=0.6)
    loose = [entry for entry in made.entries if entry.type == "Parameter"]
    assert [(entry.name, entry.params, entry.params_after) for entry in loose] == [
        ("positions", 1000, 1000),
        ("stack", 300, 300),
    ]
    assert loose[0].reason == "a parameter in Mlp, which is not a layer that can be replaced"
    assert loose[1].reason == "a stack of 3 matrices in Mlp, which is not a layer that can be replaced"
    assert fz.factorize(model, made).positions is model.positions


@pytest.mark.parametrize(
    ("model", "arguments", "expected"),
    [
        (ConvNet(), {"ratio": 0.5}, {"embeddings": 0, "attention": 0}),
        (TiedReader(), {"ratio": 0.5, "keep_first_and_last": False}, {"embeddings": 6400, "other layers": 1024}),
        (Attends(), {"ratio": 0.9}, {"attention": 4 * (16 * 16 + 16), "embeddings": 0}),
    ],
)
def test_parts_say_where_the_parameters_are(model: nn.Module, arguments: Any, expected: dict[str, int]) -> None:
    made = fz.plan(model, **arguments)
    assert expected.items() <= {part.name: part.params for part in made.parts}.items()
    table = plan_table(made, 120)
    for part in made.parts:
        share, after = part.params / made.params, part.params_after / made.params_after
        line = f"{share:6.1%} of the parameters  -> {after:6.1%} after"
        assert (line in table) == (part.params > 0 and made.parts[0].params + made.parts[1].params > 0)
    assert "everything else" in table
    assert fz.Plan.from_dict(json.loads(json.dumps(made.to_dict()))).parts == made.parts


def test_a_layer_whose_name_begins_like_attention_does_not_belong_to_it() -> None:
    model = Attends()
    model.attention_head = nn.Linear(16, 16)
    before, after = ({part.name: part.params for part in fz.plan(one, ratio=0.95).parts} for one in (Attends(), model))
    assert after["attention"] == before["attention"]
    assert after["other layers"] == before["other layers"] + 16 * 16


@pytest.mark.parametrize("attention", ["layers", "heads", False])
def test_strange_attention_and_its_layers_belong_to_attention(attention: Any) -> None:
    made = fz.plan(real_size("qwen2"), ratio=0.9, attention=attention)
    parts = {part.name: part.params for part in made.parts}
    assert parts["attention"] == sum(entry.params for entry in made.entries if ".self_attn" in entry.name) > 0


def test_one_rank_leaves_a_layer_dense_whose_full_rank_is_less() -> None:
    made = fz.plan(real_size("bert"), rank=16, keep_first_and_last=False, min_size=0)
    table = next(entry for entry in made.entries if entry.name.endswith("token_type_embeddings"))
    assert table.shape == (2, 1024)
    assert table.reason == "would grow: the factors would cost more than the dense layer"
    assert {entry.rank for entry in made.selected} == {16}


def test_a_least_size_leaves_smaller_layers_dense() -> None:
    made = fz.plan(Mlp(), ratio=0.6, min_size=5000)
    reasons = {entry.name: entry.reason for entry in made.entries}
    assert reasons["wide"] == "has 4,608 parameters, fewer than min_size=5,000"
    assert reasons["square"] is None
    with pytest.raises(ValueError, match="min_size must be a whole number of at least 0, got -1"):
        fz.plan(Mlp(), ratio=0.6, min_size=-1)


def test_layers_that_are_nothing_beside_the_model_stay_dense_unasked() -> None:
    made = fz.plan(real_size("bert"), ratio=0.6)
    assert "fewer than min_size=6,703" in str(
        next(entry.reason for entry in made.entries if entry.name.endswith("token_type_embeddings"))
    )
