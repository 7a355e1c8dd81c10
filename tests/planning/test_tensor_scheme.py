from __future__ import annotations

import json
import re
import warnings
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from factorized.experiments.models.wide_resnet import wide_resnet
from factorized.formats.kernel import KernelShape
from factorized.formats.monarch import Monarch
from factorized.formats.scheme import Scheme
from factorized.formats.tensor_train import TensorTrain
from factorized.formats.tucker import Tucker
from factorized.nn.conv import FactorizedConv2d
from factorized.planning.plan import Plan
from factorized.planning.planner import plan
from factorized.planning.schemes import read_scheme
from factorized.surgery.factorize import factorize
from tests.planning.models_for_planning import TiedReader

with torch.device("meta"):
    WIDE = wide_resnet()
    SMALL = wide_resnet(10, 2)
SCHEMES = [TensorTrain(), Tucker(), TensorTrain(order=4), Tucker(order=3), Tucker(core="train", order=3)]


@pytest.mark.parametrize(
    ("scheme", "scale", "params"),
    [
        (TensorTrain(separable=True), 0.234, 607_160),
        (TensorTrain(separable=True), 0.705, 2_434_702),
        (Tucker(separable=True), 0.211, 608_501),
        (Tucker(separable=True), 0.68, 2_444_223),
        (Tucker(separable=True, core="whole"), 0.211, 442_918),
        (Tucker(separable=True, core="whole"), 0.68, 1_767_376),
    ],
    ids=str,
)
def test_the_separable_block_has_the_parameters_of_the_paper(scheme: Scheme, scale: float, params: int) -> None:
    made = plan(WIDE, scheme, rank_scale=scale)
    assert made.params == 36_479_194
    assert len(made.selected) == 24
    assert made.params_after == params
    assert {entry.format.pointwise.dims for entry in made.selected} == {  # type: ignore[union-attr]
        (16, 16, 10),
        (32, 32, 25),
        (40, 40, 32),
        (50, 64, 32),
        (64, 64, 50),
        (80, 80, 64),
    }


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@settings(max_examples=8)
@given(ratio=st.floats(0.02, 0.95))
def test_a_ratio_is_met_within_one_percent_from_below(scheme: Scheme, ratio: float) -> None:
    made = plan(WIDE, scheme, ratio=ratio)
    assert 0.99 * ratio < made.ratio <= ratio


@pytest.mark.parametrize("scheme", [*SCHEMES, TensorTrain(separable=True), Tucker(separable=True), Monarch()], ids=str)
@pytest.mark.parametrize("ratio", [0.13, 0.17])
def test_a_ratio_of_a_small_model_is_met_too(scheme: Scheme, ratio: float) -> None:
    made = plan(SMALL, scheme, ratio=ratio)
    assert 0.99 * ratio < made.ratio <= ratio


@pytest.mark.parametrize("scheme", [*SCHEMES, TensorTrain(order=3), Monarch()], ids=str)
@pytest.mark.parametrize("widths", [(61, 127, 127, 67, 11), (64, 128, 128, 64, 10)])
def test_a_ratio_is_met_where_one_step_of_a_rank_costs_more_than_one_percent(
    scheme: Scheme, widths: tuple[int, ...]
) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths)))
    for ratio in (0.5, 0.7, 0.97):
        made = plan(model, scheme, ratio=ratio)
        assert 0.99 * ratio < made.ratio <= ratio


@pytest.mark.parametrize("scheme", [TensorTrain(), Tucker()], ids=str)
@pytest.mark.parametrize(
    "layer",
    [partial(nn.Linear, 1024, 1024), partial(nn.Linear, 768, 3072), partial(nn.Conv2d, 64, 128, 3, bias=False)],
    ids=["1024x1024", "3072x768", "128x64x3x3"],
)
def test_a_ratio_of_a_single_layer_is_met_too(scheme: Any, layer: Any) -> None:
    with torch.device("meta"):
        model = nn.Sequential(layer())
    for ratio in (0.05, 0.15, 0.25, 0.33, 0.4, 0.5, 0.6):
        made = plan(model, scheme, ratio=ratio, keep_first_and_last=False)
        assert 0.99 * ratio < made.ratio <= ratio


def test_ranks_that_meet_a_ratio_stay_near_each_other() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 1024))
    for ratio in (0.05, 0.1, 0.2, 0.5):
        (entry,) = plan(model, Tucker(), ratio=ratio, keep_first_and_last=False).selected
        assert max(entry.rank) < 1.5 * min(entry.rank)  # type: ignore[arg-type, type-var, operator]


def test_a_ratio_that_full_rank_does_not_reach_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"ratio=0.5 is out of reach .* at full rank everywhere, .* keeps only 0.12"):
        plan(WIDE, TensorTrain(separable=True), ratio=0.5)
    with pytest.raises(ValueError, match=r"ratio=0.0001 is out of reach .* with rank 1 everywhere"):
        plan(WIDE, TensorTrain(), ratio=0.0001)


@pytest.mark.parametrize(("scheme", "ranks"), [(TensorTrain(), (6, 5, 5)), (Tucker(), (6, 9, 5, 7))])
def test_the_ranks_at_a_scale_are_rounded_and_at_least_one(scheme: Any, ranks: tuple[int, ...]) -> None:
    shape = KernelShape.of((12 * 18, 10 * 14))
    half = scheme.at_scale(shape, 0.5)
    assert half.dims == (12, 18, 10, 14)
    assert half.rank == ranks
    assert set(scheme.at_scale(shape, 1e-9).rank) == {1}
    assert scheme.at_scale(shape, 1e9).rank == half.full_ranks


def test_a_scheme_shows_what_differs_from_the_defaults() -> None:
    assert repr(TensorTrain()) == "TensorTrain()"
    assert repr(TensorTrain(order=3, separable=True)) == "TensorTrain(order=3, separable=True)"
    assert repr(Tucker(dims=(4, 4), core="train")) == "Tucker(dims=(4, 4), core='train')"


def test_a_ratio_out_of_reach_does_not_send_to_what_tensors_refuse() -> None:
    with pytest.raises(ValueError, match=r'more layers: keep_first_and_last=False would reach 0\.0006\. of="'):
        plan(WIDE, TensorTrain(), ratio=1e-5)


def test_no_budget_is_spent_on_ranks_that_add_nothing() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(64, 256, 1), nn.Conv2d(8, 8, 1))
    for budget in ({"ratio": 0.5}, {"rank_scale": 0.25}):
        ((outputs, inputs),) = [entry.rank for entry in plan(model, Tucker(), **budget).selected]  # type: ignore[arg-type, misc]
        assert outputs == inputs  # a matrix has one rank


def test_every_kind_of_layer_is_decomposed_but_what_separable_cannot_split_stays_dense() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.Conv1d(8, 8, 3), nn.Embedding(20, 8), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, groups=2)
    )
    made = plan(model, TensorTrain(), rank=1, keep_first_and_last=False)
    assert [entry.reason for entry in made.entries] == [None] * 5
    made = plan(model, Tucker(separable=True), rank=1, keep_first_and_last=False)
    separable = "separable=True splits ungrouped convolutions with kernels larger than 1x1"
    assert [entry.reason for entry in made.entries] == [None, None, separable, separable, separable]


def test_attention_under_a_tensor_scheme_does_not_send_to_what_that_scheme_refuses() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), nn.Linear(32, 32))
    (reason,) = [e.reason for e in plan(model, TensorTrain(), rank=2).skipped if e.type == "MultiheadAttention"]
    assert reason == 'its projections are parameters, not layers; fz.LowRank() with attention="heads" shrinks its heads'


def test_a_weight_tied_to_an_embedding_is_decomposed_once() -> None:
    made = plan(TiedReader(), TensorTrain(), rank=1, keep_first_and_last=False)
    (tied,) = [entry for entry in made.selected if entry.tied_to is not None]
    (leader,) = [entry for entry in made.selected if entry.name == tied.tied_to]
    assert tied.format == leader.format
    assert (leader.params_after, tied.params_after) == (leader.format.numel, 0)  # type: ignore[union-attr]


def test_ranks_above_what_is_allowed_are_clipped_with_one_warning_and_the_plan_shows_the_real_ones() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    for budget in ({"rank": 12}, {"rank_scale": 1.5}):
        with pytest.warns(UserWarning, match=r"is above what 3 of 3 layers allow, such as '0' .* clipped to") as caught:
            made = plan(model, TensorTrain(), keep_first_and_last=False, **budget)  # type: ignore[arg-type]
        assert len(caught) == 1
        assert {entry.rank for entry in made.selected} == {(8, 12, 8)}
        assert "8x12x8" in str(made)
        assert "8x12x8" in made.to_html()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(model, TensorTrain(), rank=8, keep_first_and_last=False)
        plan(model, TensorTrain(), ratio=0.9, keep_first_and_last=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TensorTrain(dims=(8,)), "dims must be a tuple of at least two whole numbers of at least 1, got (8,)"),
        (lambda: TensorTrain(order=1), "order must be a whole number of at least 2"),
        (lambda: TensorTrain(order=3, dims=(4, 4)), "give dims or order, not both"),
        (lambda: Tucker(core="thin"), 'core must be one of "whole", "train", got \'thin\''),  # type: ignore[arg-type]
        (lambda: Tucker(refinements=-1), "refinements must be a whole number of at least 0"),
        (lambda: TensorTrain(separable=1), "separable must be True or False, got 1"),  # type: ignore[arg-type]
        (
            lambda: plan(WIDE, TensorTrain(dims=(4, 4)), rank=1, include=["stages.0.0"]),
            "stages.0.0.conv1: dims (4, 4) multiply to 16, but the weight 160x16x3x3 has 23,040 entries",
        ),
        (lambda: plan(WIDE, TensorTrain(), rank=0), "rank must be a whole number of at least 1, got 0"),
        (
            lambda: plan(WIDE, TensorTrain(), rank=(2, 2, 2)),  # type: ignore[arg-type]
            "rank must be one number for all layers, got (2, 2, 2); the ranks of one tensor are for from_dense",
        ),
        (
            lambda: plan(WIDE, TensorTrain(), energy=0.5),
            "energy=0.5 is for LowRank; TensorTrain takes ratio=, macs=, rank_sca",
        ),
        (lambda: plan(WIDE, Tucker(), ratio=1.2), "ratio=1.2 is above 1"),
        (lambda: plan(WIDE, Tucker(), ratio=0.2, allocate="spectrum"), "on LowRank layers, got ratio=0.2 and Tucker("),
        (lambda: plan(WIDE, Tucker()), "give exactly one of ratio=, rank_scale=, rank=, energy=, macs=, got none"),
    ],
)
def test_wrong_arguments_say_what_is_allowed(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize("scheme", [*SCHEMES, TensorTrain(dims=[64, 64]), Tucker(refinements=2), Monarch()], ids=str)  # type: ignore[list-item, arg-type]
def test_schemes_and_plans_go_through_json(scheme: Any) -> None:
    assert read_scheme(json.loads(json.dumps(scheme.to_dict()))) == scheme
    made = plan(nn.Sequential(nn.Linear(64, 64)), scheme, rank=2, keep_first_and_last=False)
    assert Plan.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    broken = made.to_dict()
    broken["entries"][0]["format"]["surprise"] = 1
    with pytest.raises(ValueError, match="not a plan"):
        Plan.from_dict(broken)


def test_given_dimensions_are_used() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    made = plan(model, TensorTrain(dims=(16, 16, 16)), rank=3, keep_first_and_last=False)
    assert made.entries[0].format.dims == (16, 16, 16)  # type: ignore[union-attr]
    assert made.entries[0].rank == (3, 3)
    assert made.params_after == 16 * 3 + 3 * 16 * 3 + 3 * 16 + 64


def test_macs_count_the_cheaper_of_composing_and_contracting() -> None:
    x = torch.randn(10, 64)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    apart = plan(model, TensorTrain(), rank=2, keep_first_and_last=False, example_input=x)
    assert apart.macs == 10 * 64 * 64
    assert apart.macs_after == 10 * 2 * 128 + 2 * 2 * 2 * 64  # two thin products; each half is made from two cores
    mixed = plan(model, TensorTrain(dims=(16, 16, 16)), rank=2, keep_first_and_last=False, example_input=x)
    assert mixed.macs_after > mixed.macs  # type: ignore[operator]
    image = torch.randn(2, 8, 6, 6)
    conv = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False))
    block = plan(conv, TensorTrain(separable=True), rank=1, keep_first_and_last=False, example_input=image)
    assert (
        block.macs_after == 2 * 36 * (8 * 9 + 64) + 4 * 4 + 64
    )  # depthwise, pointwise, and the expansion of (4, 4, 4)


@pytest.mark.parametrize("scheme", [TensorTrain(), Tucker(), Tucker(separable=True)], ids=str)
@pytest.mark.parametrize("size", [3, 1])
@pytest.mark.parametrize("stride", [1, 2, (2, 1)])
def test_planned_macs_of_a_convolution_are_those_its_plain_layers_spend(scheme: Scheme, size: int, stride: Any) -> None:
    if size == 1 and scheme == Tucker(separable=True):
        scheme = Tucker(core="train")
    x = torch.randn(2, 32, 16, 12)
    model = nn.Sequential(nn.Conv2d(32, 48, size, stride, size // 2, bias=False))
    made = plan(model, scheme, rank=3, keep_first_and_last=False, example_input=x)
    layer: Any = factorize(model, made)[0]  # type: ignore[index]
    layer.execution = "chain" if "chain" in layer.executions else "composed"
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(x)
    assert made.macs_after == counter.get_total_flops() // 2


def test_a_stride_decides_with_the_rest_whether_tucker_is_contracted() -> None:
    # A pointwise convolution in front of a k×k one runs where that one does not, beyond its stride.
    format = Tucker().at_rank(KernelShape.of((64, 256, 3, 3)), (32, 64))
    chosen = [
        FactorizedConv2d(256, 64, 3, format, stride, padding=1, init=None).chosen_execution() for stride in (1, 4)
    ]
    assert chosen == ["chain", "composed"]
