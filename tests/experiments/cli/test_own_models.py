"""Somebody else's network through every verb: planned, trained, evaluated, composed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from factorized.experiments.training.result import read_result
from tests.experiments.cli.conftest import Cli
from tests.experiments.training.small import change_result

MINE = """
import torch
from torch import nn

def by_numbers(classes):  # as networks do that read a schedule off a tensor
    widths = [int(width.item()) for width in torch.linspace(32, 64, 3)]
    sides = zip([64, *widths], [*widths, classes])
    return nn.Sequential(nn.Flatten(), *(nn.Linear(before, after) for before, after in sides))

def masked(classes):
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Linear(32, classes))
    network.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
    network.register_buffer("nothing", torch.zeros(0))
    return network

def tied(classes):
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, classes))
    network[3].weight = network[1].weight
    return network

class Attentive(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        patches = x.flatten(1).unflatten(1, (-1, 16))
        return self.head(self.attention(patches, patches, patches)[0].mean(1))

def attentive(classes): return Attentive(classes)
"""
SHRUNKEN = """
scheme = "low_rank"
ratio = 0.7
attention = "heads"
"""


@pytest.fixture(autouse=True)
def in_a_folder_with_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_networks.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_networks", raising=False)


def write_recipe(function: str, factorize: str = "") -> str:
    text = f'[model]\nname = "own_networks:{function}"\n[schedule]\nepochs = 1\n[factorize]\n{factorize}'
    Path(f"{function}.toml").write_text(text)
    return f"{function}.toml"


@pytest.mark.parametrize(
    ("function", "factorize"),
    [("masked", ""), ("tied", ""), ("attentive", ""), ("attentive", SHRUNKEN), ("attentive", 'scheme = "none"')],
)
def test_it_is_trained_evaluated_and_composed(cli: Cli, function: str, factorize: str) -> None:
    said = cli("train", write_recipe(function, factorize))
    assert said.code == 0, said
    run = f"out/{function}/seed-0"
    assert "+0.00 points" in cli("evaluate", run, "--trust-model").out
    said = cli("compose", run, "--trust-model")
    assert said.code == 0, said
    assert "logits differ by" in said.out


@pytest.mark.parametrize("verb", ["evaluate", "compose"])
def test_a_module_that_a_result_names_is_not_imported_unless_trusted(cli: Cli, verb: str) -> None:
    assert cli("train", write_recipe("tied"), "--quiet").code == 0
    run = Path("out/tied/seed-0")
    recipe = read_result(run)["recipe"]
    change_result(run, recipe={**recipe, "model": {"name": "somebody_s:tied"}})
    Path("somebody_s.py").write_text("import pathlib\npathlib.Path('harm').touch()\n" + MINE)
    message = cli(verb, "out/tied/seed-0").error
    assert "names the model 'somebody_s:tied'" in message
    assert "give --trust-model" in message
    assert not Path("harm").exists()
    assert "somebody_s" not in sys.modules
    assert cli(verb, "out/tied/seed-0", "--trust-model").code == 0
    assert Path("harm").exists()
    del sys.modules["somebody_s"]


def test_composing_gives_shrunk_attention_its_head_size_back(cli: Cli) -> None:
    assert cli("train", write_recipe("attentive", SHRUNKEN), "--quiet").code == 0
    whole = 4 * 16 * 16 + 4 * 16 + 16 * 10 + 10
    assert f" {whole:,} now" in cli("compose", "out/attentive/seed-0", "--trust-model").out


def test_a_network_that_reads_numbers_off_tensors_is_planned(cli: Cli, npz: Path) -> None:
    for arguments in (["--model", "own_networks:by_numbers", "--data", npz], [write_recipe("by_numbers")]):
        said = cli("plan", *arguments, "--rank", 8, *(["--scheme", "low_rank"] if len(arguments) == 1 else []))
        assert said.code == 0, said
        assert "2 of 4 layers factorized" in said.out


def test_a_hugging_face_folder_with_weights_is_planned_and_trained_dense(cli: Cli) -> None:
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    images = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 10}
    transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **images)).save_pretrained("vit")
    said = cli(
        "plan", "--model", "hf:vit", "--ratio", 0.6, "--size", 8, "--channels", 1, "--set", "factorize.attention=heads"
    )
    assert said.code == 0, said
    Path("vit.toml").write_text('[model]\nname = "hf:vit"\n[schedule]\nepochs = 1')
    assert cli("train", "vit.toml", "--quiet").code == 0
    assert "+0.00 points" in cli("evaluate", "out/vit/seed-0").out
