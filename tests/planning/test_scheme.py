from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from factorized.formats.kernel import KernelShape
from factorized.formats.monarch import Monarch
from factorized.formats.product import LowRank, Overcomplete, Product
from factorized.formats.scheme import Scheme
from factorized.planning.planner import plan
from factorized.planning.schemes import read_scheme
from tests.planning.models_for_planning import ResNet32


@pytest.mark.parametrize(
    ("weight", "groups", "kind", "scale", "rank"),
    [
        # convolutions: round(scale · out·kh)
        ((64, 64, 3, 3), 1, "spatial", 1 / 9, 21),
        ((128, 64, 3, 3), 1, "spatial", 0.1, 38),
        ((32, 16, 5, 3), 1, "spatial", 0.25, 40),
        ((32, 16, 5, 3), 2, "spatial", 0.25, 20),
        ((64, 64, 3, 3), 1, "channel", 0.25, 16),
        ((64, 32, 3), 1, "spatial", 0.25, 16),
        ((16, 16, 2, 3, 3), 1, "spatial", 0.25, 8),
        ((64, 32, 1, 1), 1, "spatial", 0.1, 6),
        # linears and embeddings: round(scale · min(m, n))
        ((300, 40), 1, "spatial", 0.1, 4),
        ((40, 300), 1, "spatial", 0.1, 4),
        ((40, 300), 1, "channel", 0.2, 8),
        # halves go to the even neighbour, as Python rounds
        ((10, 10), 1, "spatial", 0.25, 2),
        ((14, 20), 1, "spatial", 0.25, 4),
        # never below 1
        ((64, 64, 3, 3), 1, "spatial", 1e-6, 1),
        ((40, 300), 1, "spatial", 1e-6, 1),
    ],
)
def test_the_rank_at_a_scale_is_the_papers(
    weight: tuple[int, ...], groups: int, kind: str, scale: float, rank: int
) -> None:
    shape = KernelShape.of(weight, groups, kind)
    assert LowRank(kind=kind).at_scale(shape, scale).rank == rank
    assert Overcomplete(kind=kind).at_scale(shape, scale).rank == max(rank, shape.full_rank)


@pytest.mark.parametrize(
    ("weight", "scale", "full", "asked"),
    [((64, 16, 3, 3), 0.5, 48, 96), ((40, 300), 3, 40, 120), ((64, 64, 3, 3), 1.5, 192, 288)],
)
def test_only_low_rank_stops_at_full_rank(weight: tuple[int, ...], scale: float, full: int, asked: int) -> None:
    shape = KernelShape.of(weight)
    assert LowRank().at_scale(shape, scale).rank == full
    assert Overcomplete("wide").at_scale(shape, scale).rank == asked


def test_a_rank_that_is_not_overcomplete_for_every_layer_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 16))
    expected = r"^2: rank must be at least 16, full rank, .* got 12; use LowRank\(\) for less"
    with pytest.raises(ValueError, match=expected):
        plan(model, Overcomplete("wide"), rank=12, keep_first_and_last=False)


@pytest.mark.parametrize(
    ("scheme", "rank", "depth"),
    [
        (Overcomplete("full"), 192, 0),
        (Overcomplete("deep"), 192, 1),
        (Overcomplete("wide"), 576, 0),
        (Overcomplete("wide", width=1.5), 288, 0),
    ],
)
def test_overcomplete_needs_no_budget(scheme: Overcomplete, rank: int, depth: int) -> None:
    with torch.device("meta"):
        model = torch.nn.Conv2d(64, 64, 3)
    entry = plan(model, scheme, keep_first_and_last=False).entries[0]
    assert entry.format == Product(KernelShape.of((64, 64, 3, 3)), rank, depth)
    assert entry.params_after == rank * (192 + 192 + depth * rank)


@pytest.mark.parametrize(
    ("variant", "millions"),
    [("full", "0.95"), ("deep", "1.43"), ("wide", "2.84")],
)
def test_resnet32_trains_with_as_many_parameters_as_in_the_paper(variant: str, millions: str) -> None:
    with torch.device("meta"):
        made = plan(ResNet32(), Overcomplete(variant))
    assert f"{made.params / 1e6:.2f}" == "0.46"
    assert f"{made.params_after / 1e6:.2f}" == millions


@pytest.mark.parametrize(
    ("scheme", "arguments", "message"),
    [
        (LowRank, {"kind": "rows"}, 'kind must be one of "spatial", "channel", got \'rows\''),
        (LowRank, {"kind": 0.1}, "got 0.1; ranks and budgets, such as ratio=0.1, are arguments of fz.factorize"),
        (Overcomplete, {"kind": "rows"}, "kind must be one of"),
        (Overcomplete, {"variant": "tall"}, 'variant must be one of "full", "deep", "wide", got \'tall\''),
        (Overcomplete, {"variant": "wide", "width": 0.5}, "width must be in 1..1000 .* got 0.5"),
        (Overcomplete, {"variant": "wide", "width": float("nan")}, "width must be in 1..1000 .* got nan"),
    ],
)
def test_a_wrong_scheme_says_what_is_allowed(scheme: type[Scheme], arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scheme(**arguments)


@pytest.mark.parametrize(
    "scheme",
    [
        LowRank(),
        LowRank("channel"),
        Overcomplete("deep"),
        Overcomplete("wide", width=2.5, kind="channel"),
        Monarch(),
        Monarch(blocks=4),
    ],
)
def test_a_scheme_survives_json(scheme: Scheme) -> None:
    assert read_scheme(json.loads(json.dumps(scheme.to_dict()))) == scheme


def test_an_unknown_scheme_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scheme name must be one of .*tucker, .*, got 'sparse'"):
        read_scheme({"name": "sparse"})
