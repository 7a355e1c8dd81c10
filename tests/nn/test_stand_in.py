"""What other code asks of a plain layer: its attributes, its class, and that it be found in a subclass too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

import factorized as fz
from factorized.testing import error

# Of the class, not of a layer: how a plain one is made, and what TorchScript reads.
OF_THE_CLASS = {"from_pretrained", "__constants__"}
PLAIN: dict[str, nn.Module] = {
    "linear": nn.Linear(6, 5, bias=False),
    "conv1d": nn.Conv1d(4, 6, 3, stride=2, padding="valid"),
    "conv2d": nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular", groups=2),
    "conv3d": nn.Conv3d(4, 6, 3, dilation=2),
    "transposed 1d": nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1),
    "transposed 2d": nn.ConvTranspose2d(4, 6, 3, groups=2),
    "transposed 3d": nn.ConvTranspose3d(4, 6, 3, bias=False),
    "embedding": nn.Embedding(9, 6, padding_idx=-1),
    "sparse embedding": nn.Embedding(9, 6, sparse=True, scale_grad_by_freq=True),
    "bag": nn.EmbeddingBag(9, 6, mode="sum", include_last_offset=True),
}


def factorized(plain: nn.Module) -> nn.Module:
    model = nn.Sequential(copy.deepcopy(plain))
    return fz.factorize(model, rank=2, keep_first_and_last=False, include=["0"])[0]


@pytest.mark.parametrize("kind", PLAIN)
def test_it_has_every_public_attribute_of_the_plain_layer(kind: str) -> None:
    plain = PLAIN[kind]
    layer = factorized(plain)
    assert type(layer).__module__.startswith("factorized.")
    names = {name for name in dir(plain) if not name.startswith("_")} - OF_THE_CLASS
    assert names - set(dir(layer)) == set()
    for name in names - {"weight", "bias"}:
        value = getattr(plain, name)
        if not callable(value):
            assert getattr(layer, name) == value, name
    assert (layer.bias is None) == (getattr(plain, "bias", None) is None)
    layer.reset_parameters()


def test_the_conv1d_of_gpt2_keeps_the_names_of_its_sizes() -> None:
    from transformers.pytorch_utils import Conv1D

    layer = factorized(Conv1D(8, 6))
    assert (layer.nf, layer.nx) == (8, 6)


class MyLinear(nn.Linear):
    """A linear that only adds how it is made and shown."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__(width, width)
        self.scale = scale

    def extra_repr(self) -> str:
        return f"scale={self.scale}"


class Conv3DSimple(nn.Conv3d):
    """As in torchvision's video models."""

    def __init__(self, in_planes: int, out_planes: int, midplanes: int | None = None, stride: int = 1) -> None:
        super().__init__(in_planes, out_planes, kernel_size=3, stride=stride, padding=1, bias=False)

    @staticmethod
    def get_downsample_stride(stride: int) -> tuple[int, int, int]:
        return stride, stride, stride


class Renamed(nn.Embedding):
    pass


SUBCLASSES: dict[str, tuple[nn.Module, Tensor]] = {
    "linear": (MyLinear(8, 0.5), torch.randn(3, 8)),
    "torch's own": (NonDynamicallyQuantizableLinear(8, 6), torch.randn(3, 8)),
    "conv": (Conv3DSimple(4, 6), torch.randn(2, 4, 3, 3, 3)),
    "embedding": (Renamed(9, 6, padding_idx=2), torch.tensor([1, 2, 8])),
}


@pytest.mark.parametrize("kind", SUBCLASSES)
def test_a_subclass_that_inherits_its_forward_is_factorized_and_comes_back(kind: str, tmp_path: Any) -> None:
    dense, x = SUBCLASSES[kind]
    model = nn.Sequential(copy.deepcopy(dense))
    plan = fz.plan(model, rank=2, keep_first_and_last=False)
    assert [entry.type for entry in plan.layers] == [type(dense).__name__]
    fz.factorize(model, plan)
    composed = fz.compose(model)
    assert type(composed[0]) is type(dense)
    assert vars(composed[0]).keys() == vars(dense).keys()
    assert repr(composed[0]) == repr(dense)
    assert error(composed(x), model(x)) < 1e-5
    fz.save(model, tmp_path / "saved")
    loaded = fz.load(tmp_path / "saved", nn.Sequential(copy.deepcopy(dense)))
    assert error(loaded(x), model(x)) == 0
    assert type(fz.compose(loaded)[0]) is type(dense)


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Padded(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight.abs(), bias)


class Asked(nn.Embedding):
    def positions(self) -> Tensor:
        return torch.arange(self.num_embeddings)


class Inherits(Scaled):
    pass


@pytest.mark.parametrize(
    ("dense", "layer", "defined"),
    [
        (Scaled(8, 8), fz.FactorizedLinear, "forward"),
        (Inherits(8, 8), fz.FactorizedLinear, "forward"),
        (Padded(4, 4, 3), fz.FactorizedConv2d, "_conv_forward"),
        (Asked(8, 8), fz.FactorizedEmbedding, "positions"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(8, 8), "bias", dim=None), fz.FactorizedLinear, "bias"),
    ],
)
def test_a_subclass_that_defines_more_stays_dense_with_the_reason(dense: nn.Module, layer: Any, defined: str) -> None:
    kind = type(dense).__name__
    reason = f"{kind} is not a plain Linear, Conv or Embedding: it defines '{defined}', which a replacement would lose"
    plan = fz.plan(nn.Sequential(nn.Linear(8, 8), dense), rank=2, keep_first_and_last=False)
    assert [entry.reason for entry in plan.entries if entry.name == "1"] == [reason]
    with pytest.raises(ValueError, match=f"it defines '{defined}'"):
        layer.from_dense(dense, 2)
