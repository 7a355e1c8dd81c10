from __future__ import annotations

from torch import nn

from factorized.nn.model import module_names, parameter_names


def test_what_a_model_holds_at_several_places_has_all_of_its_names() -> None:
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.bias = layer.bias
    model = nn.Sequential(layer, nn.Sequential(layer), other)
    assert module_names(model)[layer] == ["0", "1.0"]
    assert module_names(model)[model] == [""]
    assert parameter_names(model)[layer.bias] == ["0.bias", "1.0.bias", "2.bias"]
    assert parameter_names(model)[other.weight] == ["2.weight"]
