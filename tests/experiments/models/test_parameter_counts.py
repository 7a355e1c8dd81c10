"""Every size in the paper's tables 1 to 3."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import factorized as fz
from factorized.experiments.models.build import build_model

COUNTS = {
    "resnet20": "0.27",
    "resnet32": "0.46",
    "resnet44": "0.66",
    "resnet56": "0.85",
    "resnet110": "1.73",
    "resnet32x2": "7.43",
    "vgg19": "20.04",
    "wrn28-10": "36.48",
}


def planned(name: str, classes: int, scheme: Any, **budget: float) -> fz.Plan:
    with torch.device("meta"):
        return fz.plan(build_model(name, classes), scheme, **budget)


@pytest.mark.parametrize(("name", "millions"), COUNTS.items())
def test_a_model_has_as_many_parameters_as_in_the_paper(name: str, millions: str) -> None:
    with torch.device("meta"):
        model = build_model(name, 10)
    assert f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.2f}" == millions


@pytest.mark.parametrize(
    ("name", "classes", "size", "exact"),
    [
        ("resnet32x2", 10, 32, 7_427_914),
        ("wrn28-10", 10, 32, 36_479_194),
        ("vgg19", 10, 32, 20_035_018),
        ("vgg19", 200, 64, 20_132_488),
    ],
)
def test_the_exact_count_does_not_move(name: str, classes: int, size: int, exact: int) -> None:
    with torch.device("meta"):
        model = build_model(name, classes, size)
    assert sum(parameter.numel() for parameter in model.parameters()) == exact


@pytest.mark.parametrize(
    ("name", "classes", "plain", "full", "deep", "wide"),
    [
        ("resnet32", 10, "0.46", "0.95", "1.43", "2.84"),
        ("resnet56", 10, "0.85", "1.72", "2.59", "5.16"),
        ("resnet110", 10, "1.73", "3.47", "5.21", "10.39"),
        ("resnet32", 100, "0.47", "0.95", "1.44", "2.84"),
        ("resnet56", 100, "0.86", "1.73", "2.60", "5.17"),
        ("resnet110", 100, "1.73", "3.48", "5.22", "10.40"),
    ],
)
def test_overcomplete_training_sizes_are_those_of_table_3(
    name: str, classes: int, plain: str, full: str, deep: str, wide: str
) -> None:
    for variant, millions in (("full", full), ("deep", deep), ("wide", wide)):
        plan = planned(name, classes, fz.Overcomplete(variant))
        assert f"{plan.params / 1e6:.2f}" == plain
        assert f"{plan.params_after / 1e6:.2f}" == millions, variant


@pytest.mark.parametrize(("ratio", "millions"), [(0.01667, "0.61"), (0.06667, "2.4")])
def test_low_rank_wide_resnets_have_the_sizes_of_table_2(ratio: float, millions: str) -> None:
    after = planned("wrn28-10", 10, fz.LowRank(), ratio=ratio).params_after / 1e6
    assert f"{after:.{len(millions) - 2}f}" == millions


@pytest.mark.parametrize("name", ["vgg19", "resnet32x2"])
@pytest.mark.parametrize("ratio", [0.1, 0.05, 0.02])
def test_the_ratios_of_table_1_are_within_reach(name: str, ratio: float) -> None:
    plan = planned(name, 10, fz.LowRank(), ratio=ratio)
    assert 0.99 * ratio < plan.params_after / plan.params <= ratio
