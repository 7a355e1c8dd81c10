"""Tensor layers and attention forms in one model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import factorized as fz
from factorized.nn.layer import FactorizedLayer
from tests.attention.attention_zoo import bert

IDS = torch.tensor([[5, 9, 3, 2], [7, 1, 4, 8]])
STRENGTH = {"ov": 0.02, "tensor_train": 0.03}


def bert_with_trains() -> nn.Module:
    model = bert()
    dense = ["*.intermediate.dense", "*.output.dense"]
    made = fz.plan(model, fz.TensorTrain(), rank_scale=0.6, include=dense, exclude=["*.attention"])
    assert [entry.name for entry in made.selected] == [
        f"encoder.layer.0.{name}" for name in ("intermediate.dense", "output.dense")
    ]
    return fz.factorize(model, made).double().eval()


def logits(model: nn.Module) -> Tensor:
    output: Any = model(IDS)
    return output[0]


def name_of(form: fz.Form) -> str:
    return form.kind if form.kind in ("qk", "ov") else form.format.name


def test_one_decay_acts_on_trains_and_on_attention_and_leaves_the_rest() -> None:
    model = bert_with_trains()
    assert {name_of(form) for form in fz.forms(model)} == {"qk", "ov", "tensor_train"}
    decay = fz.FrobeniusDecay(model, STRENGTH)  # type: ignore[arg-type]
    found = [form for form in fz.forms(model) if name_of(form) in STRENGTH]
    penalty = sum(STRENGTH[name_of(form)] / 2 * form.compose(form.values).square().sum() for form in found)
    wanted = torch.autograd.grad(penalty, list(model.parameters()), allow_unused=True)  # type: ignore[arg-type]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    decay.apply_()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, torch.zeros_like(parameter) if gradient is None else gradient)


def test_trained_with_flambe_they_are_saved_loaded_composed_and_lowered(tmp_path: Path) -> None:
    model = bert_with_trains()
    groups = fz.parameter_groups(model, 0.01)
    optimizer = fz.Flambe(groups, model=model, lr=1e-3, frobenius_decay=STRENGTH)  # type: ignore[arg-type]
    logits(model).square().mean().backward()
    optimizer.step()
    fz.factorize_attention(model, rank_scale=0.5)
    expected = logits(model)
    fz.save(model, tmp_path)
    assert torch.equal(logits(fz.load(tmp_path, bert().double().eval())), expected)
    for plain in (fz.compose(model), fz.lower(model)):
        torch.testing.assert_close(logits(plain), expected)
        assert not any(isinstance(module, FactorizedLayer) for module in plain.modules())
