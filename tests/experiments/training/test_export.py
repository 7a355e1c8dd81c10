"""Networks as files: what is plain already stays so, and a file alone gives the same answers."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.experiments.data.stand_in import stand_in
from factorized.experiments.models.resnet import resnet
from factorized.experiments.training.export import (
    Kind,
    accuracy_of,
    logits_on_test,
    plain_network,
    read_network,
    write_network,
)

CPU = torch.device("cpu")


class Attentive(nn.Module):
    """Patches of an image that attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        patches = x.flatten(2).unflatten(2, (-1, 16)).squeeze(1)
        return self.head(self.attention(patches, patches, patches)[0].mean(1))


def test_attention_without_factors_is_plain_already() -> None:
    network = Attentive()
    assert fz.forms(network)
    assert plain_network(network, low_rank=False) is network


def test_shrunk_attention_alone_is_not_plain() -> None:
    torch.manual_seed(0)
    dense = Attentive()
    network = fz.factorize_attention(deepcopy(dense), rank_scale=0.5)
    plain = plain_network(network, low_rank=False)
    assert {name: t.shape for name, t in plain.state_dict().items()} == {
        name: t.shape for name, t in dense.state_dict().items()
    }
    images = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(plain(images), network.eval()(images))


@pytest.mark.parametrize("scheme", [fz.LowRank(), fz.TensorTrain(), fz.Overcomplete("deep")], ids=str)
@pytest.mark.parametrize("kind", ["plain", "export"])
def test_a_file_alone_gives_the_answers_of_the_network(tmp_path: Path, kind: Kind, scheme: object) -> None:
    torch.manual_seed(0)
    budget = {} if isinstance(scheme, fz.Overcomplete) else {"rank_scale": 0.3}
    network = fz.factorize(resnet(8, 10, 1), scheme, **budget).eval()
    images = stand_in("noise", 10, 8, 1, count=12)
    expected = logits_on_test(network, images, CPU)
    plain = plain_network(network, low_rank=False)
    path = tmp_path / ("a.pt2" if kind == "export" else "a.safetensors")
    write_network(plain, kind, path, images, {"model": "resnet8"})
    function = read_network(kind, path, plain, CPU)
    assert function is not None
    torch.testing.assert_close(logits_on_test(function, images, CPU), expected, rtol=1e-3, atol=1e-4)


def test_a_plain_file_holds_tied_weights_under_each_name(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 64))
    network[2].weight = network[1].weight
    images = stand_in("noise", 64, 8, 1, count=3)
    write_network(network, "plain", tmp_path / "a.safetensors", images, {})
    function = read_network("plain", tmp_path / "a.safetensors", network, CPU)
    assert function is not None
    assert torch.equal(logits_on_test(function, images, CPU), logits_on_test(network, images, CPU))


def test_a_plain_file_with_one_bit_changed_is_refused(tmp_path: Path) -> None:
    network, path = Attentive(), tmp_path / "a.safetensors"
    write_network(network, "plain", path, stand_in("gray", 4, 16, 1), {})
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="is damaged"):
        read_network("plain", path, network, CPU)


def test_accuracy_is_a_share_in_percent() -> None:
    images = stand_in("noise", 4, 8, 1, count=4)
    right = nn.functional.one_hot(images.y_test, 4).float()
    assert accuracy_of(right, images) == 100
    right[0] = right[0].roll(1)
    assert accuracy_of(right, images) == 75
