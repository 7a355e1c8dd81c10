from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.decay.rest import REST_DECAY
from factorized.testing import error
from tests.attention.attention_zoo import BERT, EVERY, GPT2, LLAMA, TORCH, Kind, every_kind
from tests.attention.explicit import explicit_heads

LAMBDA = 0.37
pytestmark = pytest.mark.usefixtures("own_attention")


def by_hand(model: nn.Module, kind: Kind, **strengths: float) -> Tensor:
    """Return Σ λ/2 ‖·‖² over every head's explicit matrices; differentiable."""
    total = torch.zeros((), dtype=torch.float64)
    for name in kind.attention:
        for Q, K, V, out in explicit_heads(model.get_submodule(name)):
            total = total + 0.5 * strengths.get("qk", 0.0) * (Q @ K.T).square().sum()
            total = total + 0.5 * strengths.get("ov", 0.0) * (V @ out.T).square().sum()
    return total


def zero_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def assert_gradients(model: nn.Module, loss: Tensor) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = torch.autograd.grad(loss, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, expected, strict=True):
        assert parameter.grad is not None
        wanted = torch.zeros_like(parameter) if gradient is None else gradient
        assert (parameter.grad - wanted).abs().max() < 1e-11 * max(1.0, wanted.abs().max().item())


STRENGTHS: list[tuple[Any, dict[str, float]]] = [
    (LAMBDA, {"ov": LAMBDA}),
    (lambda step: LAMBDA, {"ov": LAMBDA}),
    (torch.tensor(LAMBDA, dtype=torch.float64), {"ov": LAMBDA}),
    ({"ov": LAMBDA, "qk": 0}, {"ov": LAMBDA}),
    ({"*.ov": LAMBDA, "*.qk": 0.11}, {"ov": LAMBDA, "qk": 0.11}),
    ({"*": LAMBDA}, {"ov": LAMBDA}),
]


@every_kind
@pytest.mark.parametrize(("strength", "wanted"), STRENGTHS)
def test_its_gradient_is_autograds_of_the_explicit_products(
    kind: Kind, strength: Any, wanted: dict[str, float]
) -> None:
    model = kind.make()
    decay = fz.FrobeniusDecay(model, strength)
    zero_gradients(model)
    decay.apply_()
    loss = by_hand(model, kind, **wanted)
    assert_gradients(model, loss)
    assert error(decay.penalty(), loss) < 1e-12


@pytest.mark.parametrize("kind", [kind for kind in EVERY if not kind.rotary], ids=lambda kind: kind.name)
def test_both_kinds_may_be_decayed_at_once_where_there_are_no_rotary_embeddings(kind: Kind) -> None:
    model = kind.make()
    zero_gradients(model)
    fz.FrobeniusDecay(model, {"ov": LAMBDA, "qk": 0.2}).apply_()
    assert_gradients(model, by_hand(model, kind, ov=LAMBDA, qk=0.2))


def test_a_shared_head_is_decayed_by_the_sum_over_its_query_heads() -> None:
    model = LLAMA.make()
    zero_gradients(model)
    fz.FrobeniusDecay(model, 1.0).apply_()
    attention = model.model.layers[0].self_attn
    V, out = attention.v_proj.weight.detach(), attention.o_proj.weight.detach()
    expected = torch.zeros_like(V)
    for head in range(6):
        rows, columns = slice(head // 3 * 8, head // 3 * 8 + 8), slice(head * 8, head * 8 + 8)
        expected[rows] += out[:, columns].T @ out[:, columns] @ V[rows]
    assert error(attention.v_proj.weight.grad, expected) < 1e-12


@pytest.mark.parametrize("strength", [{"qk": 0.1}, {"ov": 0.1, "qk": torch.tensor(0.1)}])
def test_queries_and_keys_under_rotary_embeddings_are_refused_unless_named(strength: Any) -> None:
    model = LLAMA.make()
    with pytest.raises(ValueError, match="rotary embeddings rotate the queries and keys of 'model"):
        fz.FrobeniusDecay(model, strength)
    with pytest.raises(ValueError, match="rotary"):
        fz.Flambe(model.parameters(), model, frobenius_decay=strength)
    assert fz.FrobeniusDecay(model, {"ov": 0.1, "qk": 0}).penalty() > 0
    zero_gradients(model)
    fz.FrobeniusDecay(model, {"model.layers.0.self_attn.qk": LAMBDA}).apply_()
    assert_gradients(model, by_hand(model, LLAMA, qk=LAMBDA))


@every_kind
def test_shrunk_heads_are_decayed_as_the_products_they_are(kind: Kind) -> None:
    model = fz.factorize_attention(kind.make(), 0.5, forms=kind.forms)
    composed = fz.compose(model)
    for one in (model, composed):
        zero_gradients(one)
    assert error(fz.FrobeniusDecay(model, LAMBDA).penalty(), by_hand(composed, kind, ov=LAMBDA)) < 1e-10
    decay = fz.FrobeniusDecay(model, LAMBDA)
    decay.apply_()
    parameters = [p for p in model.parameters() if p.requires_grad]
    expected = torch.autograd.grad(decay.penalty(), parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, expected, strict=True):
        if gradient is not None:
            assert error(parameter.grad, gradient) < 1e-10


KINDS = [TORCH[0], TORCH[3], BERT, GPT2, LLAMA]
by_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@by_kind
def test_values_and_outputs_leave_ordinary_decay_and_the_rest_of_packed_weights_does_not(kind: Kind) -> None:
    model = kind.make()
    groups = fz.parameter_groups(model, 0.1, decay_biases=True, decay_norms=True)
    rates = {p: group["weight_decay"] for group in groups for p in group["params"]}
    assert set(rates) == {p for p in model.parameters() if p.requires_grad}
    held = {factor.parameter for form in fz.forms(model) if form.kind == "ov" for factor in form.factors}
    assert all(rate == (0.0 if parameter in held else 0.1) for parameter, rate in rates.items())
    packed = [p for group in groups if REST_DECAY in group for p in group["params"]]
    assert len(packed) == {"torch packed": 1, "gpt2": 2}.get(kind.name, 0)
    assert all(group[REST_DECAY] == 0.1 for group in groups if REST_DECAY in group)


def test_the_forms_that_leave_ordinary_decay_can_be_chosen() -> None:
    model = BERT.make()
    inner = model.encoder.layer[0].attention.self

    def rate(weight: nn.Parameter, **settings: Any) -> float:
        groups = fz.parameter_groups(model, 0.1, **settings)
        return next(group["weight_decay"] for group in groups if any(p is weight for p in group["params"]))

    assert rate(inner.query.weight, attention=("qk", "ov")) == rate(inner.value.weight, attention=("qk", "ov")) == 0
    assert rate(inner.value.weight, attention=()) == rate(inner.value.weight, crs=True) == 0.1
    assert (rate(inner.query.weight, attention=("qk",)), rate(inner.value.weight, attention=("qk",))) == (0, 0.1)
    for wrong in ("ov", ("vo",), 3):
        with pytest.raises(ValueError, match='attention must be a list of "ov" and "qk"'):
            fz.parameter_groups(model, 0.1, attention=wrong)
    assert not any(REST_DECAY in g for g in fz.parameter_groups(TORCH[0].make(), 0.1, attention=("qk", "ov")))


def test_decaying_twice_is_refused_with_the_groups_that_would_not() -> None:
    model = BERT.make()
    optimizer = torch.optim.SGD(fz.parameter_groups(model, 0.1), lr=0.1)
    with pytest.raises(ValueError, match=r'attention=\("qk", "ov"\)'):
        fz.FrobeniusDecay(model, {"qk": 0.1}).attach(optimizer)
    everything = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    with pytest.raises(ValueError, match="would be decayed twice"):
        fz.FrobeniusDecay(model, 0.1).attach(everything)


def ordinary(model: nn.Module, kind: Kind) -> Tensor:
    """Return ½‖w‖² of every weight in use but values and outputs, and of no bias: what is left to ordinary decay."""
    used = torch.autograd.grad(loss_of(model, kind), list(model.parameters()), allow_unused=True)
    weights = [p for p, gradient in zip(model.parameters(), used, strict=True) if gradient is not None and p.dim() > 1]
    total = torch.stack([0.5 * weight.square().sum() for weight in weights]).sum()
    for name in kind.attention:
        heads = explicit_heads(model.get_submodule(name))
        total = total - 0.5 * torch.stack([out.square().sum() for _, _, _, out in heads]).sum()
        shared = [V for _, _, V, _ in heads[:: kind.groups]]
        total = total - 0.5 * torch.stack([V.square().sum() for V in shared]).sum()
    return total


def loss_of(model: nn.Module, kind: Kind) -> Tensor:
    return kind.run(model).square().mean()


@by_kind
def test_sgd_decays_the_products_and_the_rest_of_packed_weights_as_in_the_loss(kind: Kind) -> None:
    model = kind.make()
    expected = deepcopy(model)
    optimizer = torch.optim.SGD(fz.parameter_groups(model, 0.05), lr=0.1)
    fz.FrobeniusDecay(model, LAMBDA).attach(optimizer)
    by_loss = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model, kind).backward()
        optimizer.step()
        by_loss.zero_grad()
        penalty = by_hand(expected, kind, ov=LAMBDA) + 0.05 * ordinary(expected, kind)
        (loss_of(expected, kind) + penalty).backward()
        by_loss.step()
    for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (one - other).abs().max() < 1e-9, name


@by_kind
def test_decoupled_decay_takes_the_same_off_the_parameters(kind: Kind) -> None:
    model = kind.make()
    expected = deepcopy(model)
    optimizer = torch.optim.AdamW(fz.parameter_groups(model, 0.05), lr=0.1)
    fz.decoupled_frobenius(optimizer, model, LAMBDA)
    plain = torch.optim.AdamW(expected.parameters(), lr=0.1, weight_decay=0)
    loss_of(model, kind).backward()
    optimizer.step()
    penalty = by_hand(expected, kind, ov=LAMBDA) + 0.05 * ordinary(expected, kind)
    gradients = torch.autograd.grad(penalty, list(expected.parameters()), allow_unused=True)
    loss_of(expected, kind).backward()
    has_gradient = [parameter.grad is not None for parameter in expected.parameters()]
    plain.step()
    with torch.no_grad():
        for parameter, gradient, acts in zip(expected.parameters(), gradients, has_gradient, strict=True):
            if gradient is not None and acts:
                parameter -= 0.1 * gradient
    for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (one - other).abs().max() < 1e-9, name


@by_kind
def test_flambe_puts_the_frobenius_gradient_in_the_place_of_ordinary_decay(kind: Kind) -> None:
    model = kind.make()
    loss_of(model, kind).backward()
    before = deepcopy(model)
    settings: dict[str, Any] = {"lr": 0.1, "max_grad_norm": None, "bias_correction": False, "betas": (0.0, 0.0)}
    optimizer = fz.Flambe(fz.parameter_groups(model, 0.05), model, frobenius_decay=LAMBDA, **settings)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    penalty = by_hand(before, kind, ov=LAMBDA) + 0.05 * ordinary(before, kind)
    decays = torch.autograd.grad(penalty, list(before.parameters()), allow_unused=True)
    checked = 0
    for (name, old), decay, new in zip(before.named_parameters(), decays, model.parameters(), strict=True):
        if name not in gradients or old.dim() < 2:
            continue
        update = gradients[name] / (gradients[name].abs() + 1e-6) + (0 if decay is None else decay)
        ratio = old.norm() / update.norm()
        assert (new - (old - 0.1 * ratio * update)).abs().max() < 1e-8, name
        checked += 1
    assert checked >= 2


@pytest.mark.parametrize("penalty", [lambda m: fz.ProductPenalty(m, lambda W: 0.5 * LAMBDA * W.square().sum())])
@by_kind
def test_other_penalties_act_on_the_output_value_forms(kind: Kind, penalty: Callable[[nn.Module], Any]) -> None:
    model = kind.make()
    zero_gradients(model)
    made = penalty(model)
    assert {form.kind for form in made.forms} == {"ov"}
    made.apply_()
    assert_gradients(model, by_hand(model, kind, ov=LAMBDA))


@by_kind
def test_nuclear_decay_is_the_sum_of_the_singular_values_of_every_head(kind: Kind) -> None:
    model = kind.make()
    zero_gradients(model)
    decay = fz.NuclearDecay(model, LAMBDA)
    heads = [head for name in kind.attention for head in explicit_heads(model.get_submodule(name))]
    loss = LAMBDA * sum(torch.linalg.svdvals(V @ out.T)[:8].sum() for _, _, V, out in heads)
    assert error(decay.penalty(), loss) < 1e-10
    decay.apply_()
    parameters = [p for form in decay.forms for p in (form.left.parameter, form.right.parameter)]
    for parameter, gradient in zip(parameters, torch.autograd.grad(decay.penalty(), parameters), strict=True):
        assert error(parameter.grad, gradient) < 1e-8


@every_kind
def test_diagnoses_are_those_of_all_heads_together(kind: Kind) -> None:
    model = kind.make()
    found = {item.name: item for item in fz.diagnose(model, lr=0.1)}
    for name in kind.attention:
        heads = explicit_heads(model.get_submodule(name))
        ov = [torch.linalg.svdvals(V @ out.T) for _, _, V, out in heads]
        item = found[f"{name}.ov"]
        assert item.kind == "ov"
        assert item.frobenius == pytest.approx(sum(v.square().sum().item() for v in ov) ** 0.5, rel=1e-9)
        assert item.nuclear == pytest.approx(sum(v.sum().item() for v in ov), rel=1e-9)
        bound = 0.5 * sum((V.square().sum() + out.square().sum()).item() for _, _, V, out in heads)
        assert item.nuclear_bound == pytest.approx(bound, rel=1e-9)
        assert item.nuclear <= item.nuclear_bound


def test_norms_can_be_matched_by_form() -> None:
    model = GPT2.make()
    matcher = fz.NormMatcher(model)
    recorded = matcher.record()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.7
    matcher.match(recorded)
    assert matcher.record() == pytest.approx(recorded)
