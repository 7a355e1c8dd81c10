from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch import nn

from factorized.experiments.models.build import build_model

MINE = """
from torch import nn

def plain(classes): return nn.Sequential(nn.Flatten(), nn.Linear(12, classes))
def sized(classes, image_size, channels=3): return nn.Linear(image_size * channels, classes)
def no_classes(width): return nn.Linear(1, 1)
def no_model(classes): return "a model"
number = 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's in the working folder, which is not on the Python path."""
    (tmp_path / "mine_for_test.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine_for_test", raising=False)
    return "mine_for_test"


@pytest.mark.parametrize(
    ("name", "near"),
    [("resnet-32", "resnet32"), ("ResNet110", "resnet110"), ("vgg", "vgg19"), ("wrn2810", "wrn28-10")],
)
def test_an_unknown_name_names_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean '{near}'") as caught:
        build_model(name, 10)
    assert "module:function" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"classes": 0}, "classes must be"),
        ({"classes": 10**7}, "classes must be at most 1,000,000, got 10,000,000"),
        ({"classes": 10, "image_size": 0}, "image_size must be"),
        ({"classes": 10, "channels": -1}, "channels must be"),
        ({"classes": 10, "image_size": 8}, "vgg19 halves an image four times and needs at least 16×16, got 8×8"),
    ],
)
def test_wrong_sizes_say_what_is_allowed(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model("vgg19", **arguments)


def test_a_function_is_called_with_the_classes(mine: str) -> None:
    before = list(sys.path)
    model = build_model(f"{mine}:plain", 7)
    assert isinstance(model, nn.Sequential)
    assert model[1].out_features == 7
    assert sys.path == before


def test_a_function_that_asks_for_sizes_gets_them(mine: str) -> None:
    model = build_model(f"{mine}:sized", 7, image_size=5, channels=2)
    assert (model.in_features, model.out_features) == (10, 7)


def test_the_models_of_the_package_can_be_named_as_functions() -> None:
    model = build_model("factorized.experiments.models.resnet:resnet32x2", 10, channels=1)
    assert model.conv1.in_channels == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_here:f", "there is no module 'no_such_module_here'"),
        ("factorized.no_such:f", "there is no module 'factorized.no_such'"),
        ("{mine}:missing", "has no function 'missing'$"),
        ("{mine}:plane", "has no function 'plane' \\(did you mean 'plain'\\?"),
        (":", "a function is named as module:function"),
        ("{mine}:", "a function is named as module:function"),
        ("{mine}:number", "has no function 'number'"),
        ("{mine}:no_classes", "must take classes=, it takes \\(width\\)"),
        ("{mine}:no_model", "must return a torch.nn.Module, got str"),
    ],
)
def test_a_wrong_function_says_what_is_wrong(mine: str, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(name.format(mine=mine), 10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nimport no_such_package_at_all", "importing {mine} failed at {path}:2: ModuleNotFoundError: .*_at_all"),
        ("def f(classes:\n", "importing {mine} failed at {path}:1: SyntaxError: "),
        ("x = 1\nraise OSError('a disk')", "importing {mine} failed at {path}:2: OSError: a disk"),
        ("import sys\nsys.exit(7)", "importing {mine} failed at {path}:2: SystemExit: it exits with 7"),
        ("def f(classes):\n    return 1 / 0", "f failed at {path}:2: ZeroDivisionError"),
        ("import sys\ndef f(classes):\n    sys.exit()", "f failed at {path}:3: SystemExit: it exits with None"),
        ("import torch\ndef f(classes):\n  return torch.nn.Linear(-1, 2)", "f failed at {path}:3: RuntimeError"),
        ("from builtins import max as f", "f must take classes=, it takes"),
    ],
)
def test_a_model_file_that_fails_is_named_with_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    name = f"broken_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message.format(mine=name, path=tmp_path / f"{name}.py")):
        build_model(f"{name}:f", 10)


@pytest.mark.parametrize("name", ["", "qqq", "zzzzzzzzzz"])
def test_a_name_that_is_near_to_none_gets_no_suggestion(name: str) -> None:
    with pytest.raises(ValueError, match="model must be one of") as caught:
        build_model(name, 10)
    assert "did you mean" not in str(caught.value)
