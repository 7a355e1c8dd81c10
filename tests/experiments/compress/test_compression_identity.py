"""What tells one compression from another: the network's weights, its data, and the folder it is written to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from factorized.experiments.cli.subjects import default_folder, open_subject
from factorized.experiments.data.images import Images
from factorized.experiments.training.train import train
from tests.experiments.training.small import digits, recipe

CPU = torch.device("cpu")


def write_images(images: Images, path: Path) -> str:
    parts = {name: getattr(images, name).numpy() for name in ("y_train", "y_test")}
    for name in ("x_train", "x_test"):
        parts[name] = getattr(images, name).movedim(1, -1).numpy()
    np.savez(path, **parts)
    return str(path)


@pytest.fixture
def own_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("loads_its_weights.py").write_text(
        "from pathlib import Path\n"
        "import torch\n"
        "from factorized.experiments.models.resnet import resnet\n"
        "def trained(classes):\n"
        "    model = resnet(8, classes, 1)\n"
        "    torch.nn.init.constant_(list(model.parameters())[-1], float(Path('bias.txt').read_text()))\n"
        "    return model\n"
    )
    Path("bias.txt").write_text("0.5")
    return "loads_its_weights:trained"


def test_a_function_that_returns_other_weights_gives_another_network(own_function: str) -> None:
    first, again = (open_subject(own_function, "digits", CPU).identity for _ in range(2))
    Path("bias.txt").write_text("0.25")
    other = open_subject(own_function, "digits", CPU).identity
    assert first == again
    assert first != other
    assert first[-1] == other[-1]  # the images


@pytest.mark.parametrize(
    "change",
    [
        "model.first.copy_(model.first.flip(1))",  # the same entries, elsewhere
        "model.first.view(torch.int16)[0, 0] ^= 1",  # the last bit of an entry
        "model.second = nn.Parameter(model.first.clone())",  # equal, but tied no longer
        "model.first.data = model.first.view(torch.float16)",  # the same bytes, read otherwise
    ],
)
def test_weights_in_another_order_of_another_type_or_tied_otherwise_are_another_network(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ties_its_weights.py").write_text(
        "from pathlib import Path\n"
        "import torch\n"
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, classes):\n"
        "        super().__init__()\n"
        "        self.first = nn.Parameter(torch.randn(64, 64, dtype=torch.bfloat16))\n"
        "        self.second, self.head = self.first, nn.Linear(64, classes)\n"
        "    def forward(self, x):\n"
        "        return self.head(x.flatten(1) @ self.first.float() @ self.second.float())\n"
        "@torch.no_grad()\n"
        "def trained(classes):\n"
        "    model = Net(classes)\n"
        "    exec(Path('change.txt').read_text())\n"
        "    return model\n"
    )
    identities = []
    for text in ("", "", change):
        Path("change.txt").write_text(text)
        identities.append(open_subject("ties_its_weights:trained", "digits", CPU).identity)
    first, again, other = identities
    assert first == again
    assert first != other
    assert first[-1] == other[-1]  # the images


def test_other_images_are_another_network(own_function: str, tmp_path: Path) -> None:
    images = digits()
    train(recipe("schedule.epochs=1"), images, tmp_path / "run", device="cpu")
    files = [write_images(images, tmp_path / "as_they_are.npz")]
    files.append(write_images(replace(images, x_train=images.x_train.flip(-1)), tmp_path / "flipped.npz"))
    for model in (own_function, str(tmp_path / "run/seed-0")):
        first, other = (open_subject(model, file, CPU).identity for file in files)
        assert first != other
        assert list(first)[:-1] == list(other)[:-1]  # the weights


def test_the_default_folder_has_the_whole_ratio_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{}")
    assert default_folder(str(tmp_path), 0.25) == tmp_path / "compressed-0.25"
    assert default_folder("mymodels:trained", 0.125) == Path("out/compressed/mymodels-trained-0.125")
