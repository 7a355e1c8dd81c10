from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.decay.engine import make_workers
from factorized.decay.plain import Alike, Plain
from factorized.formats.kernel import KernelShape
from factorized.formats.scheme import Scheme
from factorized.testing import error
from tests.models.tensorized import SCHEMES, cores, images, layers, tensorized

every_kind = pytest.mark.parametrize("kind", SCHEMES)


def penalty(model: nn.Module) -> Tensor:
    """½ Σ ‖whole tensor‖², formed."""
    return torch.stack([layer.product.square().sum() / 2 for layer in layers(model).values()]).sum()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, extra: float = 0.0) -> None:
    optimizer.zero_grad()
    loss = model(images()).square().sum()
    (loss + extra * penalty(model) if extra else loss).backward()
    optimizer.step()


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(fz.parameter_groups(model, weight_decay=0), lr=1e-3, momentum=0.9, **options)


def assert_equal(model: nn.Module, other: nn.Module, tolerance: float = 1e-11) -> None:
    for (name, parameter), reference in zip(model.named_parameters(), other.parameters(), strict=True):
        assert error(parameter, reference) < tolerance, name


@every_kind
@pytest.mark.parametrize("in_backward", [False, True])
def test_the_decay_is_that_of_the_penalty_in_the_loss(kind: str, in_backward: bool) -> None:
    model = tensorized(kind)
    twin = deepcopy(model)
    optimizer, other = sgd(model), sgd(twin)
    fz.FrobeniusDecay(model, 0.3, in_backward=in_backward).attach(optimizer)
    for _ in range(3):
        step(model, optimizer)
        step(twin, other, extra=0.3)
    assert_equal(model, twin)


@every_kind
def test_the_penalty_and_forms_need_nothing_from_the_user(kind: str) -> None:
    model = tensorized(kind)
    decay = fz.FrobeniusDecay(model, 0.3)
    assert error(decay.penalty(), 0.3 * penalty(model)) < 1e-12
    found = fz.forms(model)
    assert [(form.name, form.kind) for form in found] == [("3", "conv"), ("6", "conv"), ("9", "linear")][: len(found)]
    assert [form.name for form in found] == list(layers(model))
    for form, layer in zip(found, layers(model).values(), strict=True):
        assert form.layer is layer
        assert not form.is_product
        assert [factor.parameter for factor in form.factors] == cores(layer)
        assert form.numel == layer.product.numel()


@every_kind
def test_decoupled_decay_shrinks_the_parameters_by_the_same_gradient(kind: str) -> None:
    model = tensorized(kind)
    twin = deepcopy(model)
    expected = torch.autograd.grad(penalty(twin), cores(twin))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    fz.FrobeniusDecay(model, 0.3, decoupled=True).apply_(lr=0.1)
    for core, before, gradient in zip(cores(model), cores(twin), expected, strict=True):
        assert error(core, before - 0.1 * 0.3 * gradient) < 1e-12


@every_kind
def test_only_cores_leave_the_ordinary_decay(kind: str) -> None:
    model = tensorized(kind)
    groups = fz.parameter_groups(model, weight_decay=0.1)
    decay_of = {parameter: group["weight_decay"] for group in groups for parameter in group["params"]}
    for layer in layers(model).values():
        assert {decay_of[core] for core in cores(layer)} == {0.0}
        for depthwise in layer.factors[len(cores(layer)) :]:
            assert decay_of[depthwise] == 0.1  # a dense kernel of its own, as in the paper
    assert decay_of[model[0].weight] == 0.1  # type: ignore[index]


@every_kind
def test_compression_rate_scaling_decays_cores_by_their_share(kind: str) -> None:
    model = tensorized(kind)
    groups = fz.parameter_groups(model, weight_decay=0.1, crs=True)
    decay_of = {parameter: group["weight_decay"] for group in groups for parameter in group["params"]}
    for layer in layers(model).values():
        rate = sum(core.numel() for core in cores(layer)) / layer.product.numel()
        assert 0 < rate < 1
        for core in cores(layer):
            assert decay_of[core] == pytest.approx(0.1 * rate)


@every_kind
def test_flambe_takes_the_tensors_gradient_in_place_of_the_weights(kind: str) -> None:
    model = tensorized(kind)
    optimizer = fz.Flambe(
        fz.parameter_groups(model, weight_decay=0.01), model=model, lr=1e-2, frobenius_decay=0.5, max_grad_norm=None
    )
    model(images()).square().sum().backward()
    expected = torch.autograd.grad(penalty(model), cores(model))
    with torch.no_grad():
        decays = optimizer._decays(None)
    for core, gradient in zip(cores(model), expected, strict=True):
        assert error(decays[core], 0.5 * gradient) < 1e-11
    before = [core.clone() for core in cores(model)]
    optimizer.step()
    assert all(not torch.equal(core, old) for core, old in zip(cores(model), before, strict=True))


@every_kind
def test_other_penalties_act_on_the_matrix_of_the_tensor(kind: str) -> None:
    for made, reference in [
        (lambda model: fz.ProductPenalty(model, lambda W: W.pow(4).sum()), lambda W: W.pow(4).sum()),
        (lambda model: fz.NuclearDecay(model, 0.2), lambda W: 0.2 * torch.linalg.svdvals(W).sum()),
    ]:
        model = tensorized(kind)
        forms = fz.forms(model)
        loss = torch.stack([reference(form.compose(form.values)) for form in forms]).sum()
        expected = torch.autograd.grad(loss, cores(model))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        added = made(model)
        assert error(added.penalty(), loss) < 1e-12
        added.apply_()
        for core, gradient in zip(cores(model), expected, strict=True):
            assert error(core.grad, gradient) < 1e-9


@pytest.mark.parametrize(
    ("kind", "names"),
    [("train", ["tensor_train"]), ("monarch", ["monarch"]), ("separable-tucker", ["tucker", "separable"])],
)
def test_strengths_go_by_format(kind: str, names: list[str]) -> None:
    model = tensorized(kind)
    everywhere = fz.FrobeniusDecay(model, 0.1).penalty()
    for name in names:
        assert fz.FrobeniusDecay(model, {name: 0.1}).penalty() == everywhere > 0
    assert fz.FrobeniusDecay(model, {"product": 0.1}).penalty() == 0


@pytest.mark.parametrize("scheme", [fz.TensorTrain(), fz.Tucker(), fz.Monarch(blocks=4)], ids=str)
def test_weights_of_one_format_are_one_batch_and_give_what_each_alone_does(scheme: Scheme) -> None:
    formats = [scheme.at_rank(KernelShape.of((24, 24)), rank) for rank in (2, 2, 2, 3)]
    model = nn.Sequential(*(fz.FactorizedLinear(24, 24, format, dtype=torch.float64) for format in formats))
    (worker,) = make_workers(fz.forms(model))
    assert isinstance(worker, Plain)
    assert sorted(len(part.members) for part in worker.parts if isinstance(part, Alike)) == [1, 3]
    found = {
        factor.parameter: gradient
        for part in worker.parts
        for factor, gradient in zip(part.factors, part.gradients(), strict=True)
    }
    for layer in layers(model).values():
        gradients = layer.format.gradients([core.detach() for core in layer.factors])
        for core, gradient in zip(layer.factors, gradients, strict=True):
            assert error(found[core], gradient) < 1e-12


def test_half_types_are_decayed_in_float() -> None:
    model = tensorized("train", torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    twin = deepcopy(model).double()
    expected = torch.autograd.grad(penalty(twin), cores(twin))
    fz.FrobeniusDecay(model, 1.0).apply_()
    for core, gradient in zip(cores(model), expected, strict=True):
        assert error(core.grad, gradient) < 1e-2


def test_only_layers_that_compose_decay_in_their_backward() -> None:
    model = tensorized("tucker")
    decay = fz.FrobeniusDecay(model, 0.3, in_backward=True)
    composing = {name for name, layer in layers(model).items() if layer.composes}
    assert {form.name for form in decay._inside} == composing
    assert composing
    for layer in layers(model).values():
        layer.execution = "chain"
    assert fz.FrobeniusDecay(model, 0.3, in_backward=True)._inside == {}


def test_drop_connect_drops_entries_of_the_tensor() -> None:
    model = tensorized("train")
    x = images()
    still = model.eval()(x)
    fz.drop_connect(model, 0.5)
    assert error(model(x), still) == 0
    model.train()
    assert {layer.chosen_execution() for layer in layers(model).values()} == {"composed"}
    torch.manual_seed(0)
    first = model(x)
    torch.manual_seed(1)
    assert error(model(x), first) > 1e-3
