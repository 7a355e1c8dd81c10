from __future__ import annotations

import pytest
import torch
from torch import nn

import factorized as fz
from factorized.formats.frobenius import compose
from factorized.formats.kernel import to_matrix
from factorized.testing import error
from tests.decay.models_for_decay import layers, mixed, shaken


def test_every_product_is_found_under_its_name_and_kind() -> None:
    found = {form.name: form.kind for form in fz.forms(mixed())}
    linears = ["up.0", "up.1", "down.0", "down.1", "square.0", "square.1", "deep", "wide"]
    assert found == {"embed": "embedding", "conv": "conv", "grouped": "conv"} | dict.fromkeys(linears, "linear")


@pytest.mark.parametrize(
    "layer", [fz.FactorizedConv1d(4, 6, 3, 2), fz.FactorizedConv3d(4, 6, 3, 2), fz.FactorizedConv2d(4, 6, 3, 2)]
)
def test_convolutions_of_any_dimension_are_of_one_kind(layer: nn.Module) -> None:
    (form,) = fz.forms(nn.Sequential(layer))
    assert (form.name, form.kind, form.layer) == ("0", "conv", layer)


@pytest.mark.parametrize("name", ["embed", "conv", "grouped", "up.0", "deep", "wide"])
def test_its_parts_multiply_to_the_matrix_of_the_layer(name: str) -> None:
    model = mixed()
    (form,) = (form for form in fz.forms(model) if form.name == name)
    layer = layers(model)[name]
    assert len(form.inner) == layer.format.depth
    assert form.U.shape[0] == form.V.shape[0] == layer.shape.groups
    assert error(compose(form.U, form.V, form.inner), to_matrix(layer.weight, layer.shape)) < 1e-12


def test_its_parts_are_differentiable_in_every_factor() -> None:
    for form in fz.forms(mixed()):
        compose(form.U, form.V, form.inner).square().sum().backward()
        assert all(factor.parameter.grad.norm() > 0 for factor in form.factors)


def test_factors_stand_in_the_order_of_the_product() -> None:
    model = mixed()
    for form in fz.forms(model):
        parameters = tuple(factor.parameter for factor in form.factors)
        assert all(a is b for a, b in zip(parameters, layers(model)[form.name].factors, strict=True))


def test_a_change_of_a_factors_part_reaches_the_parameter() -> None:
    for form in fz.forms(mixed()):
        for factor in form.factors:
            with torch.no_grad():
                factor.part(factor.parameter)[-1, -1, -1] = 7.0
                factor.value[0, 0, 0] = 5.0
            assert factor.parameter.detach().flatten()[[0, -1]].tolist() == [5.0, 7.0]
            assert not factor.value.requires_grad


def test_layers_tied_to_the_same_factors_give_one_form() -> None:
    model = nn.Sequential(*(fz.FactorizedLinear(8, 8, 3, depth=1) for _ in range(3)))
    model[2].share_factors(model[0])
    assert [form.name for form in fz.forms(model)] == ["0", "1"]


def test_an_embedding_tied_to_its_output_layer_gives_one_form() -> None:
    model = nn.Sequential(fz.FactorizedEmbedding(11, 8, 3), fz.FactorizedLinear(8, 11, 3))
    model[1].share_factors(model[0])
    assert [(form.name, form.kind) for form in fz.forms(model)] == [("0", "embedding")]


def test_a_module_at_two_places_gives_one_form() -> None:
    layer = fz.FactorizedLinear(8, 8, 3)
    assert [form.name for form in fz.forms(nn.Sequential(layer, nn.ReLU(), layer))] == ["0"]


def test_layers_that_share_one_factor_only_are_two_products() -> None:
    model = shaken(nn.Sequential(fz.FactorizedLinear(8, 6, 3), fz.FactorizedLinear(9, 6, 3)))
    model[1].U = model[0].U
    assert [form.name for form in fz.forms(model)] == ["0", "1"]
    decay = fz.FrobeniusDecay(model, 1.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    decay.apply_()
    total = 0.5 * (model[0].weight.square().sum() + model[1].weight.square().sum())
    assert error(model[0].U.grad, torch.autograd.grad(total, model[0].U)[0]) < 1e-12


def test_a_dense_model_has_no_forms() -> None:
    assert fz.forms(nn.Sequential(nn.Linear(4, 4), nn.Conv2d(4, 4, 3))) == []


def test_it_is_printed_in_one_line_without_the_numbers_of_its_factors() -> None:
    (form,) = fz.forms(nn.Sequential(fz.FactorizedLinear(64, 32, 8)))
    assert repr(form).startswith("Form(name='0', kind='linear', format=")
    assert "tensor" not in repr(form)
