from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.nn.utils import parametrizations, prune
from transformers.pytorch_utils import Conv1D

from factorized import compose, factorize, lower
from factorized.nn.linear import FactorizedLinear
from factorized.planning.plan import Plan
from factorized.planning.planner import plan
from tests.planning.models_for_planning import Attends, ConvNet, Mlp, TiedReader


class Special(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


def between(layer: nn.Module) -> nn.Sequential:
    """A model with the layer in the middle, and beside it one that can be factorized."""
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(64, 64), layer, nn.Linear(8, 8))


def reasons(made: Plan) -> dict[str, str]:
    return {entry.name: entry.reason or "" for entry in made.skipped}


def changed(layer: nn.Module, change: Callable[[Any], object]) -> nn.Module:
    change(layer)
    return layer


def no_entries(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.empty(0, 64))


def whole_numbers(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.zeros(16, 16, dtype=torch.int8), requires_grad=False)


class Quantized(nn.Parameter):
    """A weight that holds more than its numbers, as those of quantized models do."""


def of_another_class(layer: nn.Linear) -> None:
    layer.weight = Quantized(layer.weight.detach())


def ignore(*arguments: object) -> None:
    return None


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Linear(2, 2), "would grow"),
        (nn.Conv2d(16, 16, 3, groups=16), "depthwise convolution"),
        (nn.Conv2d(16, 32, 3, groups=16), "depthwise convolution"),
        (nn.ConvTranspose2d(16, 32, 3, groups=16), "depthwise convolution"),
        (nn.EmbeddingBag(50, 16, max_norm=1.0), "max_norm renormalizes rows"),
        (nn.Bilinear(8, 8, 8), "Bilinear is not a plain"),
        (Special(64, 64), "Special is not a plain"),
        (nn.Embedding(50, 16, max_norm=1.0), "max_norm renormalizes rows"),
        (nn.LazyLinear(16), "not initialized yet; run the model once"),
        (changed(nn.Linear(64, 64), lambda layer: layer.register_forward_hook(ignore)), "has hooks"),
        (changed(nn.Linear(64, 64), lambda layer: layer.register_forward_pre_hook(ignore)), "has hooks"),
        (changed(nn.Linear(64, 64), lambda layer: layer.register_full_backward_hook(ignore)), "has hooks"),
        (changed(nn.Linear(64, 64), lambda layer: layer.register_full_backward_pre_hook(ignore)), "has hooks"),
        (changed(nn.Linear(64, 64), lambda layer: setattr(layer, "forward", layer.forward)), "forward was replaced"),
        (changed(nn.Linear(64, 64), lambda layer: layer.register_state_dict_post_hook(ignore)), "has hooks"),
        (changed(nn.Linear(64, 64), lambda layer: layer.register_load_state_dict_post_hook(ignore)), "has hooks"),
        (changed(nn.Linear(64, 64), lambda layer: layer.register_buffer("mask", torch.ones(64))), "holds 'mask'"),
        (changed(nn.Linear(64, 64), lambda layer: layer.add_module("extra", nn.ReLU())), "holds 'extra'"),
        (changed(nn.Linear(64, 64), lambda layer: layer.weight.register_hook(ignore)), "has a gradient hook"),
        (
            changed(nn.Linear(64, 64), lambda layer: layer.weight.register_post_accumulate_grad_hook(ignore)),
            "has a gradient hook",
        ),
        (changed(nn.Linear(64, 64), lambda layer: setattr(layer.weight, "partition_dim", 0)), "'partition_dim'"),
        (changed(nn.Linear(64, 64), lambda layer: setattr(layer.weight, "ds_id", 7)), "'ds_id'"),
        (changed(nn.Linear(64, 64), lambda layer: setattr(layer.weight, "main_grad", torch.ones(2))), "'main_grad'"),
        (changed(nn.Linear(64, 64), lambda layer: setattr(layer.weight, "infshape", object())), "'infshape'"),
        (changed(nn.Linear(64, 64), of_another_class), "its weight is a Quantized, not a plain parameter"),
        (changed(nn.Linear(64, 64), lambda layer: layer.to(torch.float8_e4m3fn)), "its weight is float8_e4m3fn, which"),
        (parametrizations.weight_norm(nn.Linear(64, 64)), "its weight is computed (by weight norm, "),
        (parametrizations.orthogonal(nn.Linear(64, 64)), "its weight is computed (by weight norm, "),
        (parametrizations.weight_norm(nn.Linear(64, 64), "bias", dim=None), "ParametrizedLinear is not a plain"),
        (prune.random_unstructured(nn.Linear(64, 64), "weight", 0.5), "or pruning); make it a parameter first"),
        (changed(nn.Linear(16, 16), whole_numbers), "its weight is int8, not floating point"),
        (nn.Linear(16, 16, dtype=torch.complex64), "its weight is complex64, not floating point"),
        (changed(nn.Linear(64, 64), no_entries), "its weight has no entries"),
        (FactorizedLinear(64, 64, 4), "already factorized"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_what_cannot_be_factorized_is_left_dense_with_a_reason(layer: nn.Module, reason: str) -> None:
    made = plan(between(layer), rank=1)
    assert [entry.name for entry in made.entries] == ["0", "1", "2", "3"]
    assert [entry.name for entry in made.selected] == ["1"]
    assert reason in reasons(made)["2"]
    entry = made.entries[2]
    assert entry.params == entry.params_after
    assert made.params - made.params_after == 64 * 64 - 2 * 64


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(8), nn.LayerNorm(8), nn.ReLU(), nn.PReLU()])
def test_layers_without_a_weight_matrix_are_not_listed(layer: nn.Module) -> None:
    assert [entry.name for entry in plan(between(layer), rank=1).entries] == ["0", "1", "3"]


def test_torch_attention_is_one_unit_whose_parts_are_not_listed() -> None:
    made = plan(Attends(), ratio=0.9)
    assert [entry.name for entry in made.entries] == ["inlet", "attention", "hidden", "back", "outlet"]
    assert "its projections are parameters, not layers" in reasons(made)["attention"]
    assert made.entries[1].params == sum(p.numel() for p in Attends().attention.parameters())
    with pytest.raises(
        ValueError, match=r"nothing to factorize in Attends: .*attention: its projections are parameters"
    ):
        plan(Attends(), ratio=0.9, include=["attention.out_proj"])


def test_the_first_and_last_layer_stay_dense_unless_asked_for() -> None:
    made = plan(Mlp(), rank=1)
    assert reasons(made) == {
        "inlet": "first layer (keep_first_and_last=True)",
        "outlet": "last layer (keep_first_and_last=True)",
    }
    assert not plan(Mlp(), rank=1, keep_first_and_last=False).skipped


def test_the_first_and_last_layer_may_be_of_gpt2s_class() -> None:
    model = nn.Sequential(*(Conv1D(64, 64) for _ in range(3)))
    assert [entry.name for entry in plan(model, rank=2).selected] == ["1"]


def test_a_convolution_of_one_input_channel_is_not_depthwise() -> None:
    made = plan(nn.Sequential(nn.Conv2d(1, 64, 5), nn.ConvTranspose2d(1, 64, 5)), rank=2, keep_first_and_last=False)
    assert [entry.name for entry in made.selected] == ["0", "1"]


@pytest.mark.parametrize(
    ("arguments", "selected"),
    [
        ({"include": ["wide"]}, ["wide"]),
        ({"include": ["inlet", "wide"]}, ["inlet", "wide"]),
        ({"include": ["*let", "wide"]}, ["wide"]),
        ({"include": [nn.Linear]}, ["wide", "square", "narrow"]),
        ({"include": ["*e"], "exclude": ["wide"]}, ["square"]),
        ({"exclude": ["w*", "square"]}, ["narrow"]),
        ({"exclude": ["outlet"], "keep_first_and_last": False}, ["inlet", "wide", "square", "narrow"]),
        ({"include": ("[wn]*",)}, ["wide", "narrow"]),
    ],
)
def test_include_and_exclude_take_names_and_globs(arguments: dict[str, Any], selected: list[str]) -> None:
    made = plan(Mlp(), rank=1, **arguments)
    assert [entry.name for entry in made.selected] == selected
    assert all(reasons(made).values())


@pytest.mark.parametrize(
    ("arguments", "selected"),
    [
        ({"include": ["body"]}, ["body.0", "body.2", "body.4"]),
        ({"exclude": ["body"], "keep_first_and_last": False}, ["stem", "head"]),
        ({"include": [nn.Conv2d]}, ["body.0", "body.2", "body.4"]),
        ({"exclude": [nn.Conv2d], "keep_first_and_last": False}, ["head"]),
        ({"include": [nn.Linear, "body.0"], "keep_first_and_last": False}, ["body.0", "head"]),
        ({"include": ["bod*"]}, ["body.0", "body.2", "body.4"]),
    ],
)
def test_include_and_exclude_take_containers_and_types(arguments: dict[str, Any], selected: list[str]) -> None:
    assert [entry.name for entry in plan(ConvNet(), rank=1, **arguments).selected] == selected


def test_layers_left_out_by_name_say_so() -> None:
    made = plan(Mlp(), rank=1, include=["wide", "square"], exclude=["square"])
    assert reasons(made)["square"] == "in exclude="
    assert reasons(made)["narrow"] == "not in include="


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"include": ["sqare"]}, "include='sqare' matches no layer of Mlp; its 5 layers include 'square'"),
        ({"exclude": ["narow", "wide"]}, "exclude='narow' matches no layer of Mlp; its 5 layers include 'narrow'"),
        ({"include": ["zzz*"]}, "its 5 layers include 'inlet', 'wide', 'square'"),
        ({"include": [nn.Conv2d]}, "include='Conv2d' matches no layer of Mlp"),
        ({"include": "wide"}, "include must be a list of names, globs or module types, got 'wide': write ['wide']"),
        ({"include": nn.Linear}, "include must be a list of names, globs or module types, got Linear: write [Linear]"),
        ({"exclude": "wide"}, "exclude must be a list of names, globs or module types, got 'wide'"),
        ({"include": [3]}, "include must be a list of names, globs or module types, got [3]"),
        ({"include": []}, "nothing to factorize in Mlp: all of its layers are left out (inlet: first layer"),
        ({"exclude": ["*"]}, "; wide, square and 1 more: in exclude=; "),
    ],
)
def test_a_wrong_selection_says_what_there_is(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        plan(Mlp(), ratio=0.5, **arguments)


def test_a_model_without_layers_says_so() -> None:
    with pytest.raises(ValueError, match="nothing to factorize in ReLU: it has no layer with a weight matrix"):
        plan(nn.ReLU(), ratio=0.5)
    with pytest.raises(ValueError, match="include='a' matches no layer of ReLU; it has none"):
        plan(nn.ReLU(), ratio=0.5, include=["a"])
    with pytest.raises(ValueError, match=r"the model itself: first layer"):
        plan(nn.Linear(8, 8), ratio=0.9)


def test_a_module_under_two_names_is_one_entry() -> None:
    model = Mlp()
    model.also = nn.ModuleList([model.square])
    made = plan(model, rank=2)
    assert [entry.aliases for entry in made.entries] == [(), (), ("also.0",), (), ()]
    assert plan(model, rank=2, include=["also"]).selected[0].name == "square"
    assert plan(model, rank=2, exclude=["also.0"]).entries[2].reason == "in exclude="


def test_a_tied_embedding_and_output_are_planned_together_and_counted_once() -> None:
    model = TiedReader()
    made = plan(model, ratio=0.5, keep_first_and_last=False)
    tokens, _, output = made.entries
    assert output.tied_to == "tokens"
    assert tokens.tied_to is None
    assert tokens.rank == output.rank
    assert (output.params, output.params_after) == (0, 0)
    assert made.params == sum(p.numel() for p in model.parameters()) == sum(e.params for e in made.entries) + 32 + 200
    assert made.params_after == sum(entry.params_after for entry in made.entries) + 32 + 200


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"include": ["tokens", "mix"]}, {"tokens": "weight is tied to output.weight, which stays dense"}),
        ({"include": ["output", "mix"]}, {"output": "weight is tied to tokens.weight, which stays dense"}),
        ({"exclude": ["tokens"], "keep_first_and_last": False}, {"output": "weight is tied to tokens.weight"}),
        ({}, {"tokens": "first layer", "output": "last layer"}),
    ],
)
def test_tied_layers_of_which_one_stays_dense_both_do(arguments: dict[str, Any], reason: dict[str, str]) -> None:
    made = plan(TiedReader(), rank=2, **arguments)
    assert [entry.name for entry in made.selected] == ["mix"]
    for name, part in reason.items():
        assert part in reasons(made)[name]
    assert [entry.params for entry in made.entries] == [200 * 32, 32 * 32, 0]


def test_layers_that_read_one_weight_in_two_shapes_stay_dense() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(32, 64, 1), nn.Conv1d(64, 64, 1, groups=2), nn.Linear(64, 64))
    model[2].weight = model[1].weight
    made = plan(model, rank=2, keep_first_and_last=False)
    expected = "weight is tied to a layer that reads it in another shape, which stays dense"
    assert {name: text for name, text in reasons(made).items() if name in "12"} == {"1": expected, "2": expected}


class KeepsOwnWeight(nn.Module):
    def __init__(self, keep: Callable[[nn.Parameter], object]) -> None:
        super().__init__()
        self.layers = between(nn.Linear(64, 64))
        self.mine = keep(self.layers[2].weight)


@pytest.mark.parametrize(
    "keep",
    [
        lambda w: w,
        lambda w: [w],
        lambda w: (0, w),
        lambda w: {"w": w},
        lambda w: partial(linear, weight=w),
        lambda w: [{"params": [w]}],
        lambda w: lambda x: linear(x, w),
        lambda w: lambda x, weight=w: linear(x, weight),
        lambda w: partial(lambda weights, x: linear(x, weights[0]), [w]),
    ],
    ids=["itself", "list", "tuple", "dict", "partial", "nested", "captured", "default", "partial of a list"],
)
def test_a_weight_that_the_model_also_holds_itself_stays_dense(keep: Callable[[nn.Parameter], object]) -> None:
    made = plan(KeepsOwnWeight(keep), rank=2)
    assert reasons(made)["layers.2"] == "weight is tied to mine, which stays dense"


def one_memory(model: nn.Sequential) -> None:
    model[2].weight.data = model[1].weight.data


def one_memory_transposed(model: nn.Sequential) -> None:
    model[2].weight = nn.Parameter(model[1].weight.data.T)


@pytest.mark.parametrize("share", [one_memory, one_memory_transposed])
def test_weights_of_two_parameters_in_one_memory_stay_dense(share: Callable[[nn.Sequential], None]) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))
    share(model)
    made = plan(model, rank=2)
    assert [entry.name for entry in made.selected] == ["3"]
    assert reasons(made)["1"].startswith("its weight shares memory with 2.weight, a tie that would be lost; make them")
    assert reasons(made)["2"].startswith("its weight shares memory with 1.weight")


def test_weights_that_are_part_of_another_tensor_of_the_model_stay_dense() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    packed = nn.Linear(64, 192)
    model.append(packed)
    for layer, rows in zip(model[1:4], packed.weight.data.split(64), strict=True):
        layer.weight = nn.Parameter(rows)
    model.register_buffer("kept", model[4].weight.data)
    made = plan(model, rank=2, keep_first_and_last=False)
    assert [entry.name for entry in made.selected] == ["0", "5"]
    shared = {name: text.removeprefix("its weight shares memory with ") for name, text in reasons(made).items()}
    assert [shared[name].split(",")[0] for name in "1234"] == ["6.weight", "6.weight", "6.weight", "kept"]


def test_parts_of_one_buffer_share_no_memory() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))
    buffer = torch.zeros(128, 64)
    model[1].weight.data, model[2].weight.data = buffer[:64], buffer[64:]
    columns = torch.zeros(64, 128)
    model[3].weight.data, model[4].weight.data = columns[:, :64], columns[:, 64:]
    assert [entry.name for entry in plan(model, rank=2).selected] == ["1", "2", "3"]


def test_attention_in_the_memory_of_another_keeps_its_heads() -> None:
    model = nn.ModuleList(nn.MultiheadAttention(32, 4) for _ in range(3))
    model[1].in_proj_weight.data = model[0].in_proj_weight.data
    made = plan(model, rank=2, attention="heads")
    assert [entry.name for entry in made.selected] == ["2"]
    assert "its weight shares memory with 1.in_proj_weight" in reasons(made)["0"]


def test_a_shared_bias_does_not_keep_a_layer_dense() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8))
    model[1].bias = model[2].bias
    made = plan(model, rank=2)
    assert [(entry.name, entry.tied_to) for entry in made.selected] == [("1", None), ("2", None)]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_parts_stay_as_they_are() -> None:
    model = between(torch.jit.script(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))))
    made, x = plan(model, ratio=0.9), torch.randn(3, 8)
    assert "compiled by torch.jit" in reasons(made)["2.0"]
    assert made.params == sum(parameter.numel() for parameter in model.parameters())
    model[0], model[3] = nn.Linear(8, 64), nn.Linear(64, 8)
    factorized = factorize(model.eval(), rank=4)
    for plain in (compose(factorized), lower(factorized)):
        torch.testing.assert_close(plain(x), factorized(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda layer: torch.jit.trace(layer, torch.randn(2, 64))])
def test_a_layer_that_torch_jit_compiled_says_what_works_instead(compiled: Callable[[nn.Module], nn.Module]) -> None:
    says = "keeps its weights; factorize it before, and then trace it, or script what fz.lower returns"
    assert says in reasons(plan(between(compiled(nn.Linear(64, 64))), rank=4))["2"]
    model, x = nn.Sequential(factorize(between(nn.Linear(64, 64)), rank=4)[2]), torch.randn(2, 64)
    for made in (torch.jit.trace(model, x), torch.jit.script(lower(model))):
        torch.testing.assert_close(made(x), model(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_layer_that_was_scripted_after_it_was_planned_is_refused() -> None:
    model = between(nn.Linear(64, 64))
    made = plan(model, rank=4)
    model[2] = torch.jit.script(model[2])
    with pytest.raises(ValueError, match="2 is RecursiveScriptModule, not Linear"):
        factorize(model, made)
