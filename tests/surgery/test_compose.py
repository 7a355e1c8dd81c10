from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.nn.layer import FactorizedLayer
from tests.models.unchanged import unchanged

Convert = Callable[[nn.Module], nn.Module]
CONVOLUTIONS = [
    nn.Conv1d(6, 8, 3, stride=2, padding=1),
    nn.Conv2d(6, 8, (3, 5), padding="same", dilation=(2, 1), padding_mode="reflect"),
    nn.Conv2d(6, 8, 4, padding="same", bias=False),
    nn.Conv2d(6, 8, 3, stride=(2, 1), padding=(1, 2), groups=2, padding_mode="circular"),
    nn.Conv3d(6, 8, (3, 2, 3), padding="valid"),
]


def input_of(dense: nn.Module) -> Tensor:
    if isinstance(dense, nn.Embedding):
        return torch.randint(0, dense.num_embeddings, (4, 7))
    if isinstance(dense, nn.Linear):
        return torch.randn(4, dense.in_features, dtype=torch.float64)
    return torch.randn(2, 6, *(9,) * len(dense.kernel_size), dtype=torch.float64)


def stirred(model: nn.Module) -> nn.Module:
    """Return the model with inner matrices that are no longer the identity."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("scheme", [fz.LowRank(), fz.LowRank(kind="channel"), fz.Overcomplete("deep")], ids=str)
@pytest.mark.parametrize(
    "dense", [*CONVOLUTIONS, nn.Linear(7, 5), nn.Linear(7, 5, bias=False), nn.Embedding(11, 6, padding_idx=2)], ids=str
)
def test_a_composed_layer_is_the_dense_one_with_all_of_its_settings(dense: nn.Module, scheme: fz.LowRank) -> None:
    dense = deepcopy(dense).double()
    budget = {} if scheme.rank_scale else {"rank": 2}
    factorized = fz.factorize(nn.Sequential(dense), scheme, keep_first_and_last=False, **budget)
    composed = fz.compose(stirred(factorized))[0]
    assert repr(composed) == repr(dense)
    assert type(composed) is type(dense)
    x = input_of(dense)
    torch.testing.assert_close(composed(x), factorized(x), rtol=1e-10, atol=1e-12)
    assert composed.weight.shape == dense.weight.shape
    assert composed.weight.is_contiguous()


def test_a_model_that_is_itself_a_layer_is_composed() -> None:
    layer = fz.FactorizedLinear(6, 4, 2)
    with unchanged(layer):
        dense = fz.compose(layer)
    assert type(dense) is nn.Linear
    assert torch.equal(dense.weight, layer.weight)
    assert dense.bias is not layer.bias


@pytest.mark.parametrize("convert", [fz.compose, fz.lower])
def test_a_model_without_factorized_layers_is_refused(convert: Convert) -> None:
    with pytest.raises(ValueError, match=r"Sequential has no factorized layer; call fz.factorize first"):
        convert(nn.Sequential(nn.Linear(3, 3)))


@pytest.mark.parametrize("convert", [fz.compose, fz.lower])
def test_training_the_copy_leaves_the_factorized_model_alone(convert: Convert) -> None:
    model = fz.factorize(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)), rank=2)
    with unchanged(model):
        stirred(convert(model))


@pytest.mark.parametrize("convert", [fz.compose, fz.lower])
@pytest.mark.parametrize(("U", "V", "trains"), [(False, False, False), (True, False, True), (True, True, True)])
def test_the_copy_trains_where_a_factor_did(convert: Convert, U: bool, V: bool, trains: bool) -> None:
    model = fz.factorize(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)), rank=2)
    model[1].U.requires_grad_(U)
    model[1].V.requires_grad_(V)
    model[1].bias.requires_grad_(False)
    model[1].eval()
    plain = convert(model)[1]
    assert {name: p.requires_grad for name, p in plain.named_parameters() if "weight" in name} == {
        name: trains for name, _ in plain.named_parameters() if "weight" in name
    }
    assert not any(p.requires_grad for name, p in plain.named_parameters() if "bias" in name)
    assert not plain.training


@pytest.mark.parametrize("convert", [fz.compose, fz.lower])
def test_a_shared_module_stays_shared(convert: Convert) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model[2] = model[1]
    plain = convert(fz.factorize(model, rank=2))
    assert plain[1] is plain[2]
    assert not isinstance(plain[1], FactorizedLayer)


@pytest.mark.parametrize("convert", [fz.compose, fz.lower])
def test_a_shared_bias_stays_shared(convert: Convert) -> None:
    model = fz.factorize(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), rank=2)
    model[2].bias = model[1].bias
    plain = convert(model)
    first, second = ([p for name, p in layer.named_parameters() if "bias" in name] for layer in plain[1:3])
    assert first[0] is second[0]


def test_layers_that_share_one_factor_only_keep_their_own_weights() -> None:
    model = fz.factorize(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), rank=2)
    model[2].U = model[1].U
    composed = fz.compose(model)
    assert torch.equal(composed[2].weight, model[2].weight)
    assert not torch.allclose(composed[1].weight, composed[2].weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_dtype_stays(dtype: torch.dtype) -> None:
    model = fz.factorize(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)).to(dtype), rank=2)
    for plain in (fz.compose(model), fz.lower(model)):
        assert {parameter.dtype for parameter in plain.parameters()} == {dtype}


def test_a_model_on_the_meta_device_is_composed_there() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    composed = fz.compose(fz.factorize(model, rank=2))
    assert type(composed[1]) is nn.Linear
    assert composed[1].weight.is_meta


def test_pickles_of_composed_and_lowered_models_do_not_mention_the_package() -> None:
    model = fz.factorize(nn.Sequential(nn.Linear(6, 8), nn.Conv1d(8, 8, 3), nn.Linear(8, 3)), rank=2)
    assert b"factorized" in pickle.dumps(model)
    for plain in (fz.compose(model), fz.lower(model)):
        assert b"factorized" not in pickle.dumps(plain)


@torch.no_grad()
def test_a_compiled_model_is_composed_inside_its_wrapper() -> None:
    model = fz.factorize(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)), rank=2)
    model[1] = torch.compile(model[1], backend="eager")
    whole = torch.compile(model, backend="eager")
    x = torch.randn(4, 6)
    expected = whole(x)
    composed = fz.compose(whole)
    assert not any(isinstance(module, FactorizedLayer) for module in composed.modules())
    torch.testing.assert_close(composed(x), expected)
    composed.get_submodule("_orig_mod.1._orig_mod").weight.zero_()
    assert not torch.allclose(composed(x), expected)
    torch.testing.assert_close(whole(x), expected)
