from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from tests.attention.attention_zoo import BERT
from tests.models.unchanged import unchanged

Act = Callable[[nn.Module, Path], object]
ACTS: dict[str, tuple[Act, Act]] = {
    "save": (fz.save, lambda model, path: fz.save(model, path, allow_nonfinite=True)),
    "compose": (lambda model, _: fz.compose(model), lambda model, _: fz.compose(model, allow_nonfinite=True)),
    "lower": (lambda model, _: fz.lower(model), lambda model, _: fz.lower(model, allow_nonfinite=True)),
}


class Net(nn.Module):
    """Layers that stay dense beside one that is factorized, normalization and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("mask", torch.full((8, 8), -math.inf).triu(1))
        self.register_buffer("steps", torch.tensor(3))


def factorized() -> Net:
    model = fz.factorize(Net(), rank=2)
    assert isinstance(model, Net)
    return model


def put(tensor: Tensor, value: float) -> None:
    with torch.no_grad():
        tensor.view(-1)[-1] = value


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("middle.U", math.nan, "middle: U holds NaN"),
        ("middle.V", math.inf, "middle: V holds infinite values"),
        ("middle.bias", -math.inf, "middle: bias holds infinite values"),
        ("first.weight", math.nan, "first: weight holds NaN"),
        ("norm.running_mean", math.nan, "norm: running_mean holds NaN"),
        ("norm.running_var", math.inf, "norm: running_var holds infinite values"),
        ("mask", math.nan, "mask holds NaN"),
    ],
)
def test_what_is_not_finite_is_refused_by_the_name_of_its_layer_unless_asked_for(
    act: str, name: str, value: float, message: str, tmp_path: Path
) -> None:
    model = factorized()
    put(model.state_dict()[name], value)
    refused, allowed = ACTS[act]
    with unchanged(model), pytest.raises(ValueError, match=f"^{message};.*allow_nonfinite=True"):
        refused(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    allowed(model, tmp_path / "out")
    if act == "save":
        assert not fz.load(tmp_path / "out", Net()).state_dict()[name].isfinite().all()


@pytest.mark.parametrize("act", ACTS)
def test_masks_may_be_infinite(act: str, tmp_path: Path) -> None:
    ACTS[act][0](factorized(), tmp_path)


def test_several_are_counted(tmp_path: Path) -> None:
    model = factorized()
    for parameter in model.middle.parameters():
        put(parameter, math.nan)
    with pytest.raises(ValueError, match=r"middle: U holds NaN \(2 more tensors are not finite\); nothing was written"):
        fz.save(model, tmp_path)


def test_a_product_that_overflows_its_type_is_refused() -> None:
    model = factorized().half()
    with torch.no_grad():
        model.middle.U.fill_(300), model.middle.V.fill_(300)
    with pytest.raises(ValueError, match="middle: weight holds infinite values; its finite factors have a product"):
        fz.compose(model)
    fz.lower(model)


def test_weights_of_eight_bits_are_asked_too(tmp_path: Path) -> None:
    model = factorized()
    model.first.weight = nn.Parameter(model.first.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    fz.save(model, tmp_path)
    model.first.weight = nn.Parameter(torch.full((8, 6), math.nan).to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ValueError, match="first: weight holds NaN"):
        fz.save(model, tmp_path)


def test_save_pretrained_refuses_and_allows_alike(tmp_path: Path) -> None:
    model = fz.factorize_attention(BERT.make())
    put(model.embeddings.word_embeddings.weight, math.nan)
    with pytest.raises(ValueError, match=r"^embeddings\.word_embeddings: weight holds NaN"):
        fz.save_pretrained(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    fz.save_pretrained(model, tmp_path / "out", allow_nonfinite=True)
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize(
    ("lazy", "name"), [(lambda: nn.LazyLinear(4), "weight"), (lambda: nn.LazyBatchNorm1d(affine=False), "running_mean")]
)
@pytest.mark.parametrize("act", ACTS)
def test_what_is_not_initialized_yet_is_named_too(
    act: str, lazy: Callable[[], nn.Module], name: str, tmp_path: Path
) -> None:
    model = nn.Sequential(fz.FactorizedLinear(8, 8, 2), lazy())
    with pytest.raises(ValueError, match=rf"^1\.{name} is not initialized yet.*; run the model once first"):
        ACTS[act][0](model, tmp_path)
    model(torch.randn(2, 8))
    ACTS[act][0](model, tmp_path)


@pytest.mark.parametrize("act", ["compose", "lower"])
def test_sparse_buffers_are_looked_through(act: str, tmp_path: Path) -> None:
    model = factorized()
    model.register_buffer("graph", torch.eye(3).to_sparse())
    converted = ACTS[act][0](model, tmp_path)
    assert isinstance(converted, nn.Module)
    assert torch.equal(converted.get_buffer("graph").to_dense(), torch.eye(3))
    model.graph._values().fill_(math.nan)
    with pytest.raises(ValueError, match="graph holds NaN"):
        ACTS[act][0](model, tmp_path)
