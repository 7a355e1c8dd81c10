from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

import factorized as fz
from factorized.experiments.recipes.recipe import USED_BY, Factorize
from factorized.experiments.training.network import (
    build_dense,
    build_network,
    build_scheme,
    check_network,
    plan_network,
    plan_options,
)
from factorized.experiments.training.train import train
from factorized.nn.layer import FactorizedLayer
from factorized.planning.planner import PlanOptions
from factorized.planning.schemes import SCHEMES
from tests.experiments.training.small import digits, recipe

MINE = """
import sys
from torch import nn

class Pair(nn.Linear):
    def forward(self, x): return super().forward(x.flatten(1)), x

class Leaves(nn.Linear):
    def forward(self, x): sys.exit(0)

class Detached(nn.Linear):
    def forward(self, x): return super().forward(x.flatten(1)).detach()

class Rounded(nn.Linear):
    def forward(self, x): return super().forward(x.flatten(1)).long()

def leaves(classes): return Leaves(64, classes)
def detached(classes): return Detached(64, classes)
def rounded(classes): return Rounded(64, classes)
def without_memory(classes): return good(classes).to("meta")
def fewer(classes): return nn.Sequential(nn.Flatten(), nn.Linear(64, classes - 3))
def pair(classes): return Pair(64, classes)
def other_size(classes): return nn.Sequential(nn.Flatten(), nn.Linear(63, classes))
def nothing(classes): return nn.Flatten()
def frozen(classes): return nn.Sequential(nn.Flatten(), nn.Linear(64, classes)).requires_grad_(False)
def good(classes): return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""


@pytest.fixture(autouse=True)
def in_a_folder_with_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd_networks.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_networks", raising=False)


def test_recipes_have_every_scheme_with_every_setting_of_it() -> None:
    trained = [scheme for scheme in SCHEMES if scheme is not fz.Residual]  # recipes have no weights to freeze
    assert get_args(Factorize.model_fields["scheme"].annotation) == ("none", *(scheme.name for scheme in trained))
    for scheme in trained:
        for field in dataclasses.fields(scheme):  # type: ignore[arg-type]
            assert Factorize.model_fields[field.name].default == field.default
            assert scheme.name in USED_BY[field.name]


@pytest.mark.parametrize(
    ("fields", "scheme"),
    [
        ({"scheme": "none"}, None),
        ({"scheme": "low_rank", "ratio": 0.1, "kind": "channel"}, fz.LowRank("channel")),
        ({"scheme": "overcomplete", "variant": "wide", "width": 2.0}, fz.Overcomplete("wide", 2.0)),
        ({"scheme": "tensor_train", "ratio": 0.1, "dims": [4, 4]}, fz.TensorTrain((4, 4))),
        ({"scheme": "tucker", "ratio": 0.1, "core": "train", "order": 3}, fz.Tucker(order=3, core="train")),
        ({"scheme": "monarch", "ratio": 0.1, "blocks": 4}, fz.Monarch(4)),
        ({"scheme": "kronecker", "ratio": 0.1, "outer": [2, 4]}, fz.Kronecker((2, 4))),
    ],
)
def test_a_recipe_builds_its_scheme(fields: dict[str, Any], scheme: fz.Scheme | None) -> None:
    assert build_scheme(Factorize(**fields)) == scheme


@pytest.mark.parametrize("scheme", ["monarch", "kronecker"])
def test_a_recipe_of_a_newer_scheme_is_planned(scheme: str) -> None:
    changed = recipe(f"factorize.scheme={scheme}", "factorize.ratio=0.3")
    made = plan_network(changed, build_dense(changed, digits(), seed=0), digits())
    assert made is not None
    assert 0.2 < made.ratio <= 0.3
    assert made.scheme.name == scheme


def test_every_option_of_a_plan_is_a_field_of_a_recipe_but_inputs() -> None:
    fields = Factorize(scheme="low_rank", ratio=0.1, exclude=["a"], min_size=7, multiple_of=8, of="selected")
    options = plan_options(fields)
    assert options.keys() == PlanOptions.__annotations__.keys() - {"example_input", "calibration"}
    assert all(options[name] == getattr(fields, name) for name in options)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("fewer", r"must return a tensor \(images, 10\), got \(2, 7\) for two images"),
        ("pair", r"must return a tensor \(images, 10\), got tuple"),
        ("other_size", r"cannot classify images \(1, 8, 8\): it failed outside of your code: RuntimeError: .*mat1"),
        ("leaves", r"cannot classify images .*: it failed at .*odd_networks\.py:9: SystemExit: it exits with 0"),
        (
            "detached",
            r"must return logits that its parameters can be trained by, got torch\.float32 without",
        ),
        ("rounded", r"must return logits that its parameters can be trained by, got torch\.int64 without"),
        ("nothing", "has no parameters that can be trained"),
        ("frozen", "has no parameters that can be trained"),
    ],
)
def test_a_network_that_cannot_classify_the_images_is_refused_before_anything_is_made(
    tmp_path: Path, function: str, message: str
) -> None:
    changed = recipe(f"model.name=odd_networks:{function}", name="digits/resnet8")
    with pytest.raises(ValueError, match=f"model 'odd_networks:{function}' {message}"):
        train(changed, digits(), tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


def test_a_network_without_memory_is_refused(tmp_path: Path) -> None:
    changed = recipe("model.name=odd_networks:without_memory", name="digits/resnet8")
    with pytest.raises(ValueError, match=r"'odd_networks:without_memory': 1\.weight is on the meta device"):
        train(changed, digits(), tmp_path / "out", device="cpu")


def test_checking_a_network_leaves_it_as_it_was() -> None:
    changed = recipe("model.name=odd_networks:good", name="digits/resnet8")
    network = build_dense(changed, digits(), seed=0).train()
    network[0].eval()
    check_network(changed, network, digits())
    assert [module.training for module in network.modules()] == [True, False, True]


def test_the_execution_of_a_recipe_is_that_of_its_convolutions() -> None:
    network = build_network(recipe("factorize.execution=products", "factorize.keep_first_and_last=false"), digits(), 0)
    layers = [module for module in network.modules() if isinstance(module, FactorizedLayer)]
    assert {(layer.form_kind, layer.execution) for layer in layers} == {("conv", "products"), ("linear", "auto")}
