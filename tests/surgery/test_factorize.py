from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.formats import product
from factorized.nn.layer import FactorizedLayer
from factorized.planning.plan import Plan
from factorized.surgery import decompose
from tests.models.stack import shared_module, shared_weight, stack
from tests.models.unchanged import unchanged
from tests.models.zoo import RESNET, TIED, TiedLanguageModel


def same_state(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return list(first) == list(second) and all(torch.equal(first[key], second[key]) for key in first)


def layers_of(model: nn.Module) -> list[FactorizedLayer]:
    return [module for module in model.modules() if isinstance(module, FactorizedLayer)]


def test_factorizing_happens_in_place_and_returns_the_same_model() -> None:
    model = stack()
    first, last = model[0], model[5]
    assert fz.factorize(model, rank=2) is model
    assert model[0] is first
    assert model[5] is last
    assert all(isinstance(model[i], fz.FactorizedLinear) and model[i].rank == 2 for i in (2, 3, 4))


@pytest.mark.parametrize("init", ["spectral", "default", "kaiming", "normal"])
def test_planning_and_factorizing_in_one_go_equals_two_steps(init: Any) -> None:
    one, two = RESNET.fresh(), RESNET.fresh()
    torch.manual_seed(3)
    fz.factorize(one, fz.LowRank(kind="channel"), init=init, ratio=0.4, exclude=["layer1"], keep_first_and_last=False)
    plan = fz.plan(two, fz.LowRank(kind="channel"), ratio=0.4, exclude=["layer1"], keep_first_and_last=False)
    torch.manual_seed(3)
    fz.factorize(two, plan, init=init)
    assert len(layers_of(one)) == len(plan.selected) > 4
    assert same_state(one, two)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ratio": 0.5}, "plan already holds the budget"),
        ({"rank": 3}, "plan already holds the budget"),
        ({"rank_scale": 0.2}, "plan already holds the budget"),
        ({"energy": 0.9}, "plan already holds the budget"),
        ({"macs": 0.5}, "plan already holds the budget"),
        ({"include": ["2"]}, "plan already selects the layers"),
        ({"exclude": ["2"]}, "plan already selects the layers"),
        ({"keep_first_and_last": False}, "plan already selects the layers"),
        ({"init": "xavier"}, "init must be one of"),
        ({"init": 3}, "init must be one of"),
        ({"init": "calibrated"}, r"fz.Calibrated\(batches\) or a callable .* got 'calibrated'$"),
        ({"init": [torch.ones(9, 9)]}, r"fz.Calibrated\(batches\) or a callable .* got a value of type list$"),
        ({"init": torch.ones(9, 9)}, r"fz.Calibrated\(batches\) or a callable .* got a value of type Tensor$"),
        ({"init": fz.Calibrated}, r"fz.Calibrated\(batches\) or a callable .* got the class Calibrated$"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_changes(arguments: dict[str, Any], message: str) -> None:
    model = stack()
    plan = fz.plan(model, rank=2)
    with unchanged(model), pytest.raises(ValueError, match=message):
        fz.factorize(model, plan, **arguments)


@pytest.mark.parametrize("init", ["spectral", "kaiming", nn.init.ones_])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named_and_nothing_changes(value: float, init: Any) -> None:
    model = stack()
    with torch.no_grad():
        model[4].weight[3, 5] = value
    with unchanged(model), pytest.raises(ValueError, match=r"^4: weight holds NaN or infinite.*nothing was changed"):
        fz.factorize(model, rank=2, init=init)


def test_a_failure_in_the_second_batch_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fails_the_second_time(stacked: Tensor, rank: int, method: str) -> tuple[Tensor, Tensor]:
        calls.append(stacked.shape)
        if len(calls) == 2:
            raise RuntimeError("no memory left")
        return original(stacked, rank, method)

    original = product.spectral_factors
    monkeypatch.setattr(product, "spectral_factors", fails_the_second_time)
    model = stack()
    with unchanged(model), pytest.raises(RuntimeError, match="no memory left"):
        fz.factorize(model, rank=2)
    assert len(calls) == 2


def test_a_failing_init_changes_nothing() -> None:
    drawn = []

    def fails_the_third_time(matrix: Tensor) -> None:
        drawn.append(matrix.zero_())
        if len(drawn) == 3:
            raise RuntimeError("no more numbers")

    model = stack()
    with unchanged(model), pytest.raises(RuntimeError, match="no more numbers"):
        fz.factorize(model, init=fails_the_third_time, rank=2)


def test_a_callable_fills_the_factors() -> None:
    model = fz.factorize(stack(), init=lambda matrix: matrix.fill_(0.5), rank=2)
    for layer in layers_of(model):
        assert all(torch.equal(factor, torch.full_like(factor, 0.5)) for factor in layer.factors)
        assert torch.equal(layer.weight, torch.full_like(layer.weight, 0.5))


def test_equal_shapes_are_decomposed_together_to_what_one_at_a_time_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = product.spectral_factors
    monkeypatch.setattr(product, "spectral_factors", lambda W, *rest: seen.append(tuple(W.shape)) or original(W, *rest))
    model, twin = stack(), stack()
    fz.factorize(model, rank=3)
    assert sorted(seen) == [(1, 1, 12, 48), (2, 1, 12, 12)]
    for name in ("2", "3", "4"):
        alone = fz.FactorizedLinear.from_dense(twin.get_submodule(name), 3)
        torch.testing.assert_close(model.get_submodule(name).weight, alone.weight, rtol=1e-5, atol=1e-6)
    seen.clear()
    monkeypatch.setattr(decompose, "STACKED_ON_CPU", 12 * 12)
    limited = fz.factorize(stack(), rank=3)
    assert sorted(seen) == [(1, 1, 12, 12), (1, 1, 12, 12), (1, 1, 12, 48)]
    for layer, other in zip(layers_of(limited), layers_of(model), strict=True):
        torch.testing.assert_close(layer.weight, other.weight, rtol=1e-5, atol=1e-6)


def test_a_shared_module_is_replaced_under_every_name() -> None:
    model = shared_module()
    x = torch.randn(2, 3, 8)
    expected = model(x)
    plan: Plan = fz.plan(model, fz.Overcomplete("full"))
    assert [(entry.name, entry.aliases) for entry in plan.selected] == [("2", ()), ("3", ("4",))]
    fz.factorize(model, plan, init="spectral")
    assert isinstance(model[3], fz.FactorizedLinear)
    assert model[4] is model[3]
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_tied_layers_share_their_factors_and_keep_their_own_biases() -> None:
    model = shared_weight()
    biases = model[3].bias, model[4].bias
    fz.factorize(model, rank=2)
    assert model[3].U is model[4].U
    assert model[3].V is model[4].V
    assert (model[3].bias, model[4].bias) == biases
    names = [name for name, _ in model.named_parameters()]
    assert "3.U" in names
    assert "4.U" not in names


def test_deep_tied_layers_share_their_inner_matrices() -> None:
    model = fz.factorize(TIED.fresh(), fz.Overcomplete("deep"), keep_first_and_last=False)
    assert isinstance(model, TiedLanguageModel)
    assert model.embed.inner[0] is model.decoder.inner[0]


@pytest.mark.parametrize("scheme", [fz.LowRank(), fz.TensorTrain()], ids=str)
def test_a_functional_call_gives_tied_layers_their_own_factors_back(scheme: Any) -> None:
    # torch leaves other tensors in a module that has two names, such as a list of cores in two layers
    model = fz.factorize(TIED.fresh(), scheme, rank=2, keep_first_and_last=False).eval()
    tokens = TIED.inputs()
    before = model(tokens)
    doubled = {name: 2 * parameter.detach() for name, parameter in model.named_parameters()}
    torch.func.functional_call(model, doubled, tokens)
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    torch.testing.assert_close(model(tokens), before)


def test_a_model_that_is_itself_a_layer_is_returned_factorized() -> None:
    dense = nn.Linear(8, 6)
    with unchanged(dense):
        model = fz.factorize(dense, rank=2, keep_first_and_last=False)
    assert isinstance(model, fz.FactorizedLinear)
    assert model.bias is dense.bias


def test_a_model_on_the_meta_device_stays_there() -> None:
    with torch.device("meta"):
        model = TiedLanguageModel()
    fz.factorize(model, rank=4, keep_first_and_last=False)
    assert len(layers_of(model)) == 3
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.embed.U is model.decoder.U
    assert model(torch.zeros(2, 5, dtype=torch.long, device="meta")).shape == (2, 5, 80)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_factors_have_the_dtype_of_the_weight(dtype: torch.dtype) -> None:
    reference = fz.factorize(stack().to(dtype).double(), rank=3)
    model = fz.factorize(stack().to(dtype), rank=3)
    for layer, exact in zip(layers_of(model), layers_of(reference), strict=True):
        assert {factor.dtype for factor in layer.factors} == {dtype}
        torch.testing.assert_close(layer.weight.double(), exact.weight, rtol=0, atol=32 * torch.finfo(dtype).eps * 0.2)


def test_frozen_weights_modes_and_the_very_biases_are_taken_over() -> None:
    model = stack()
    model[2].weight.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    model[4].eval()
    biases = [model[i].bias for i in (2, 3, 4)]
    fz.factorize(model, fz.Overcomplete("deep"))
    assert [model[i].training for i in (2, 3, 4)] == [True, True, False]
    assert [[factor.requires_grad for factor in model[i].factors] for i in (2, 3, 4)] == [[False] * 3] + [
        [True] * 3
    ] * 2
    assert [model[i].bias is bias for i, bias in zip((2, 3, 4), biases, strict=True)] == [True] * 3
    assert [bias.requires_grad for bias in biases] == [True, False, True]


def test_a_bias_shared_across_the_model_stays_one() -> None:
    model = stack()
    model[5] = nn.Linear(12, 12)
    model[5].bias = model[3].bias = model[4].bias
    fz.factorize(model, rank=2)
    assert model[3].bias is model[4].bias
    assert model[5].bias is model[4].bias


@pytest.mark.parametrize("scheme", [fz.LowRank(), fz.Overcomplete("wide")])
def test_spectral_init_leaves_the_random_state_alone(scheme: Any) -> None:
    model = stack()
    before = torch.random.get_rng_state()
    fz.factorize(model, scheme, init="spectral", rank_scale=None if scheme.rank_scale else 0.2)
    assert torch.equal(torch.random.get_rng_state(), before)
    fz.factorize(stack(), scheme, init="kaiming", rank_scale=None if scheme.rank_scale else 0.2)
    assert not torch.equal(torch.random.get_rng_state(), before)


@torch.no_grad()
def test_a_compiled_layer_is_replaced_inside_its_wrapper() -> None:
    plain, model = fz.factorize(stack(), rank=2), stack()
    x = torch.randn(2, 3, 8)
    model[3] = torch.compile(model[3], backend="eager")
    model(x)
    fz.factorize(model, rank=2)
    assert isinstance(model.get_submodule("3._orig_mod"), fz.FactorizedLinear)
    torch.testing.assert_close(model(x), plain(x))
    assert not torch.allclose(stack()(x), plain(x))
