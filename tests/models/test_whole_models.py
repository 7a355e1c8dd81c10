from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.nn.layer import FactorizedLayer
from tests.models.unchanged import unchanged
from tests.models.zoo import RESNET, TIED, VGG, ZOO, Species, logits, train

FULL = fz.Overcomplete("full")
PRECISIONS = [(torch.float32, 1e-5), (torch.float64, 1e-12)]

every_species = pytest.mark.parametrize("species", ZOO, ids=lambda species: species.name)
every_precision = pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS, ids=["float32", "float64"])
every_mode = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])


def difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference over the largest value."""
    return float((a - b).detach().abs().max() / b.detach().abs().max())


def halved(species: Species, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a trained model at half its parameters, trained on by two steps."""
    model = fz.factorize(species.trained(dtype), ratio=0.5, keep_first_and_last=False)
    train(model, species, steps=2)
    return model


def factor_layers(model: nn.Module) -> dict[str, FactorizedLayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, FactorizedLayer)}


def assert_plain(model: nn.Module) -> None:
    for name, module in model.named_modules():
        assert not type(module).__module__.startswith("factorized"), name
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert type(tensor) in (nn.Parameter, Tensor), name


@every_species
@pytest.mark.parametrize("weights", ["fresh", "trained"])
def test_at_full_rank_the_factorized_model_computes_what_the_dense_one_did(species: Species, weights: str) -> None:
    model = (species.fresh() if weights == "fresh" else species.trained()).eval()
    x = species.inputs()
    with torch.no_grad():
        dense = logits(model, x)
        fz.factorize(model, FULL, init="spectral", keep_first_and_last=False)
        assert len(factor_layers(model)) >= 3
        assert difference(logits(model, x), dense) < 1e-4


@every_species
def test_half_the_parameters_train_and_every_factor_moves(species: Species) -> None:
    model = species.trained()
    before = sum(parameter.numel() for parameter in model.parameters())
    plan = fz.plan(model, ratio=0.5, keep_first_and_last=False)
    fz.factorize(model, plan)
    after = sum(parameter.numel() for parameter in model.parameters())
    assert after == plan.params_after
    assert 0.45 * before < after <= 0.5 * before
    factors = {f"{name}.{i}": f for name, layer in factor_layers(model).items() for i, f in enumerate(layer.factors)}
    start = {name: factor.detach().clone() for name, factor in factors.items()}
    losses = train(model, species, steps=2)
    assert all(torch.isfinite(torch.tensor(losses)))
    for name, tensor in model.state_dict().items():
        assert torch.isfinite(tensor).all(), name
    for name, factor in factors.items():
        assert not torch.equal(factor, start[name]), name


@every_species
@every_precision
@every_mode
@pytest.mark.parametrize("to_plain", [fz.compose, fz.lower])
def test_composed_and_lowered_models_are_plain_and_compute_the_same(
    species: Species, dtype: torch.dtype, tolerance: float, training: bool, to_plain: Callable[[nn.Module], nn.Module]
) -> None:
    model = halved(species, dtype).train(training)
    with unchanged(model):
        plain = to_plain(model)
    assert_plain(plain)
    assert all(module.training == training for module in plain.modules())
    x = species.inputs(dtype)
    assert difference(logits(plain, x), logits(model, x)) < tolerance


@every_species
def test_a_lowered_model_is_smaller_than_the_composed_one_and_both_train_on(species: Species) -> None:
    model = halved(species)
    sizes = {}
    for to_plain in (fz.compose, fz.lower):
        plain = to_plain(model)
        sizes[to_plain.__name__] = sum(parameter.numel() for parameter in plain.parameters())
        start = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
        train(plain, species, steps=1)
        for name, parameter in plain.named_parameters():
            assert parameter.dim() < 2 or not torch.equal(parameter, start[name]), name
    assert sizes["compose"] == sum(parameter.numel() for parameter in species.fresh().parameters())
    assert sizes["lower"] < 0.65 * sizes["compose"]


@every_species
def test_a_saved_model_loads_into_a_fresh_one_bit_for_bit(species: Species, tmp_path: Path) -> None:
    model = halved(species)
    fz.save(model, tmp_path)
    loaded = fz.load(tmp_path, species.fresh(seed=9))
    state = loaded.state_dict()
    assert list(state) == list(model.state_dict())
    for key, value in model.state_dict().items():
        assert torch.equal(state[key], value), key
    x = species.inputs()
    assert torch.equal(logits(loaded.eval(), x), logits(model.eval(), x))


@every_species
def test_a_dense_state_dict_at_full_rank_gives_the_dense_output(species: Species) -> None:
    dense = species.trained().eval()
    model = fz.factorize(species.fresh(seed=9), FULL, keep_first_and_last=False).eval()
    x = species.inputs()
    with torch.no_grad():
        assert difference(logits(model, x), logits(dense, x)) > 0.1
        assert fz.load_dense(model, dense.state_dict()) is model
        assert difference(logits(model, x), logits(dense, x)) < 1e-4


@pytest.mark.parametrize("species", [s for s in ZOO if s.tied], ids=lambda species: species.name)
def test_tied_weights_stay_tied_all_the_way(species: Species, tmp_path: Path) -> None:
    assert species.tied is not None

    def ends(model: nn.Module) -> tuple[nn.Module, nn.Module]:
        return model.get_submodule(species.tied[0]), model.get_submodule(species.tied[1])

    dense = species.trained()
    assert ends(dense)[0].weight is ends(dense)[1].weight
    model = fz.factorize(deepcopy(dense), ratio=0.5, keep_first_and_last=False)
    fz.save(model, tmp_path)
    for tied in (model, deepcopy(model), fz.load(tmp_path, species.fresh(seed=9))):
        first, second = ends(tied)
        assert first.U is second.U
        assert first.V is second.V
    first, second = ends(fz.compose(model))
    assert first.weight is second.weight
    pair, other = ends(fz.lower(model))
    assert pair[0].weight is other[1].weight  # U, a table here and a matrix there


def test_a_model_factorized_in_two_goes_is_saved_and_loaded(tmp_path: Path) -> None:
    model = VGG.trained().eval()
    fz.factorize(model, fz.LowRank(kind="channel"), rank_scale=0.4, include=[nn.Conv2d])
    fz.factorize(model, fz.Overcomplete("deep"), init="spectral", include=[nn.Linear], keep_first_and_last=False)
    layers = factor_layers(model)
    assert {(type(layer).__name__, len(layer.factors)) for layer in layers.values()} == {
        ("FactorizedConv2d", 2),
        ("FactorizedLinear", 3),
    }
    fz.save(model, tmp_path)
    loaded = fz.load(tmp_path, VGG.fresh(seed=9)).eval()
    assert {name: repr(layer) for name, layer in factor_layers(loaded).items()} == {
        name: repr(layer) for name, layer in layers.items()
    }
    x = VGG.inputs()
    assert torch.equal(logits(loaded, x), logits(model, x))


def test_the_compiled_resnet_computes_what_the_eager_one_does_forward_and_backward() -> None:
    model = halved(RESNET)
    twin = deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = RESNET.inputs()
    expected, got = logits(twin, x), logits(compiled, x)
    assert difference(got, expected) < 1e-5
    expected.square().sum().backward()
    got.square().sum().backward()
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_a_tied_model_without_ends_keeps_its_dense_tie() -> None:
    model = fz.factorize(TIED.trained(), rank=2)
    assert model.embed.weight is model.decoder.weight
    composed = fz.compose(model)
    assert composed.embed.weight is composed.decoder.weight
    assert composed.embed.weight is not model.embed.weight
