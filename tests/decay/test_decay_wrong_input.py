from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import factorized as fz
from tests.decay.models_for_decay import STRENGTH, difference, mixed, train

DENSE = nn.Sequential(nn.Linear(4, 4))


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


@pytest.mark.parametrize(
    ("strength", "message"),
    [
        (-0.1, r"strength must be a finite number of at least 0, got -0\.1"),
        (float("nan"), "got nan"),
        (float("inf"), "got inf"),
        (True, "got True"),
        ("0.1", "got '0.1'"),
        (None, "got None"),
        (torch.ones(2), r"one number, got a tensor of shape \(2,\)"),
        ({"linear": -1.0}, r"strength of 'linear' must be .* got -1\.0"),
        ({"linear": float("nan")}, "strength of 'linear' must be .* got nan"),
        ({"linear": False}, "strength of 'linear' must be .* got False"),
        (
            {"linear": 0.1, "attention": 0.1},
            "no form of the model matches 'attention'. Kinds are linear, conv, embedding, .*near names are 'embed'",
        ),
        ({"layers.*": 0.1}, r"no form of the model matches 'layers\.\*'"),
        ({1: 0.1}, "name forms by kind or name glob, got 1"),
        (torch.tensor(-1.0), r"at least 0, got -1\.0"),
        ({"linear": torch.tensor(float("nan"))}, "strength of 'linear' must be .* got nan"),
        (lambda step: -1.0, r"strength at step 0 must be .* got -1\.0"),
        (lambda step: torch.tensor(float("nan")), "strength at step 0 must be .* got nan"),
    ],
)
def test_a_wrong_strength_says_what_is_allowed(strength: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fz.FrobeniusDecay(mixed(), strength)


@pytest.mark.parametrize("strength", [-0.1, float("nan"), True, "0.1"])
def test_a_wrong_nuclear_strength_says_what_is_allowed(strength: Any) -> None:
    with pytest.raises(ValueError, match="strength must be a finite number of at least 0"):
        fz.NuclearDecay(mixed(), strength)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), None])
@pytest.mark.parametrize("kind", ["gradient", "decoupled", "flambe"])
def test_a_schedule_that_goes_wrong_later_is_stopped_there_and_nothing_changed(wrong: Any, kind: str) -> None:
    def schedule(step: int) -> Any:
        return 0.1 if step < 2 else wrong

    model = mixed()
    if kind == "flambe":
        optimizer: torch.optim.Optimizer = fz.Flambe(model.parameters(), model, frobenius_decay=schedule)
    else:
        optimizer = sgd(model)
        fz.FrobeniusDecay(model, schedule, decoupled=kind == "decoupled").attach(optimizer)
    train(model, optimizer, range(2))
    before = deepcopy(model)
    with pytest.raises(ValueError, match="strength at step 2 must be a finite number of at least 0"):
        train(model, optimizer, range(2, 3))
    assert difference(model, before) == 0


@pytest.mark.parametrize("fn", [None, 0.1, "l1"])
def test_a_penalty_that_is_no_function_says_so(fn: Any) -> None:
    with pytest.raises(ValueError, match=r"fn must be a function of the composed matrices \(batch, m, n\), got"):
        fz.ProductPenalty(mixed(), fn)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda W: 1.0, r"^embed: fn must return a tensor of one number, got 1\.0"),
        (lambda W: None, "^embed: fn must return a tensor of one number, got None"),
        (lambda W: W.detach().sum(), "^embed: the result of fn does not depend on the product"),
        (lambda W: (W > 0).sum(), "^embed: the result of fn does not depend on the product"),
    ],
)
def test_a_function_that_penalizes_nothing_is_named_with_its_product(fn: Any, message: str) -> None:
    model = mixed()
    fz.ProductPenalty(model, fn).attach(optimizer := sgd(model))
    with pytest.raises(ValueError, match=message):
        train(model, optimizer, range(1))


@pytest.mark.parametrize("attention", [None, "ov", ["vo"], 1])
def test_wrong_attention_of_groups_says_what_is_allowed(attention: Any) -> None:
    with pytest.raises(ValueError, match='attention must be a list of "ov" and "qk"'):
        fz.parameter_groups(mixed(), 0.1, attention=attention)


@pytest.mark.parametrize("weight_decay", [-0.1, float("nan"), float("inf"), None, "0.1", True])
def test_a_wrong_weight_decay_of_groups_says_what_is_allowed(weight_decay: Any) -> None:
    with pytest.raises(ValueError, match="weight_decay must be a finite number of at least 0"):
        fz.parameter_groups(mixed(), weight_decay)


@pytest.mark.parametrize("share", [-0.1, 1, 1.5, float("nan"), None, "0.1", False])
def test_a_wrong_share_to_drop_says_what_is_allowed(share: Any) -> None:
    with pytest.raises(ValueError, match=r"share must be in \[0, 1\), got"):
        fz.drop_connect(mixed(), share)


@pytest.mark.parametrize(
    "use",
    [
        lambda: fz.FrobeniusDecay(DENSE, 0.1),
        lambda: fz.FrobeniusDecay(DENSE, {"linear": 0.1}),
        lambda: fz.ProductPenalty(DENSE, torch.sum),
        lambda: fz.NuclearDecay(DENSE, 0.1),
        lambda: fz.drop_connect(DENSE, 0.1),
        lambda: fz.decoupled_frobenius(sgd(DENSE), DENSE, 0.1),
    ],
)
def test_a_model_without_products_is_to_be_factorized_first(use: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"Sequential (holds|has) no .*; call fz\.factorize first"):
        use()


DECAYS = [
    pytest.param(lambda m: fz.FrobeniusDecay(m, 0.1), id="frobenius"),
    pytest.param(lambda m: fz.FrobeniusDecay(m, 0.1, decoupled=True), id="decoupled"),
    pytest.param(lambda m: fz.ProductPenalty(m, torch.sum), id="penalty"),
    pytest.param(lambda m: fz.NuclearDecay(m, 0.1), id="nuclear"),
]
Make = Callable[[nn.Module], Any]


@pytest.mark.parametrize("make", DECAYS)
class TestAttaching:
    def test_an_optimizer_that_holds_none_of_the_factors_is_refused(self, make: Make) -> None:
        model = mixed()
        optimizer = sgd(model.head)
        with pytest.raises(ValueError, match=r"holds none of the factors \(such as those of 'embed'\); make it after"):
            make(model).attach(optimizer)
        make(model).attach(sgd(model))

    def test_factors_that_are_all_frozen_are_reported(self, make: Make) -> None:
        model = mixed()
        decay, optimizer = make(model), sgd(model.head)
        for form in fz.forms(model):
            for factor in form.factors:
                factor.parameter.requires_grad_(False)
        with pytest.raises(ValueError, match=r"all factors are frozen .* of 'embed': there is nothing to decay"):
            decay.attach(optimizer)

    def test_an_optimizer_made_before_factorizing_is_refused(self, make: Make) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        optimizer = sgd(model)
        model = fz.factorize(model, rank=2, keep_first_and_last=False)
        with pytest.raises(ValueError, match=r"make it after fz\.factorize"):
            make(model).attach(optimizer)

    def test_an_optimizer_that_decays_the_factors_is_shown_the_groups_to_use(self, make: Make) -> None:
        model = mixed()
        optimizer = sgd(model, weight_decay=0.01)
        expected = r"decays the factors of 'embed' itself .*fz\.parameter_groups\(model, weight_decay=0\.01\)"
        with pytest.raises(ValueError, match=expected):
            make(model).attach(optimizer)
        make(model).attach(torch.optim.SGD(fz.parameter_groups(model, 0.01), lr=0.1))

    def test_attaching_twice_is_refused(self, make: Make) -> None:
        model = mixed()
        optimizer, other = sgd(model), sgd(model)
        decay = make(model).attach(optimizer)
        for again in (optimizer, other):
            with pytest.raises(ValueError, match=r"attached already; call detach\(\) first"):
                decay.attach(again)

    def test_another_of_its_kind_on_the_same_factors_is_refused_until_it_is_detached(self, make: Make) -> None:
        model = mixed()
        optimizer = sgd(model)
        decay = make(model).attach(optimizer)
        with pytest.raises(ValueError, match="of the same factors is attached to this optimizer already; call its"):
            make(model).attach(optimizer)
        decay.detach()
        make(model).attach(optimizer)

    def test_detaching_what_is_not_attached_is_refused(self, make: Make) -> None:
        model = mixed()
        decay = make(model)
        with pytest.raises(ValueError, match=r"not attached to an optimizer; call attach\(optimizer\) first"):
            decay.detach()
        decay.attach(sgd(model)).detach()
        with pytest.raises(ValueError, match="not attached"):
            decay.detach()


@pytest.mark.parametrize("make", [decay for decay in DECAYS if decay.id != "decoupled"])
def test_a_sparse_gradient_says_what_to_do_instead(make: Make) -> None:
    model = nn.Sequential(fz.FactorizedEmbedding(11, 8, 3, sparse=True))
    optimizer = sgd(model)
    make(model).attach(optimizer)
    model(torch.tensor([1, 4])).sum().backward()
    with pytest.raises(ValueError, match=r"sparse gradient.*decoupled=True, or sparse=False"):
        optimizer.step()


def test_a_coupled_and_a_decoupled_decay_of_the_same_factors_are_refused_together() -> None:
    model = mixed()
    optimizer = sgd(model)
    fz.FrobeniusDecay(model, {"conv": 0.1}).attach(optimizer)
    with pytest.raises(ValueError, match="FrobeniusDecay of the same factors"):
        fz.decoupled_frobenius(optimizer, model, 0.1)


def test_decoupled_decay_by_hand_asks_for_the_learning_rate() -> None:
    with pytest.raises(ValueError, match=r"call apply_\(lr=\.\.\.\)"):
        fz.FrobeniusDecay(mixed(), 0.1, decoupled=True).apply_()


@pytest.mark.parametrize("lr", [-0.1, float("nan"), "0.1"])
def test_decoupled_decay_by_hand_takes_no_wrong_learning_rate(lr: Any) -> None:
    with pytest.raises(ValueError, match="lr must be a finite number of at least 0"):
        fz.FrobeniusDecay(mixed(), 0.1, decoupled=True).apply_(lr=lr)


def test_a_decay_of_gradients_by_hand_takes_no_learning_rate() -> None:
    with pytest.raises(ValueError, match=r"not scaled by a learning rate: call apply_\(\) without lr="):
        fz.FrobeniusDecay(mixed(), 0.1).apply_(lr=0.1)


def test_a_state_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="steps must be a whole number of at least 0, got None"):
        fz.FrobeniusDecay(mixed(), 0.1).load_state_dict({})


def test_a_refused_attachment_leaves_the_optimizer_as_it_was() -> None:
    model, reference = mixed(), mixed()
    optimizer = sgd(model, weight_decay=0.01)
    with pytest.raises(ValueError, match="decayed twice"):
        fz.FrobeniusDecay(model, STRENGTH, in_backward=True).attach(optimizer)
    train(model, optimizer, range(2))
    train(reference, sgd(reference, weight_decay=0.01), range(2))
    assert difference(model, reference) == 0


class UnknownAttn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4) for _ in range(4))


@pytest.mark.parametrize(
    "decay",
    [
        lambda model: fz.FrobeniusDecay(model, 0.1),
        lambda model: fz.NuclearDecay(model, 0.1),
        lambda model: fz.Flambe(model.parameters(), model),
    ],
)
def test_a_model_of_attention_that_nobody_registered_says_how_to(decay: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(ValueError, match=r"(?s)holds no products.*UnknownAttn of .* is not registered.*query="):
        decay(nn.Sequential(nn.Linear(4, 4), UnknownAttn()))


def test_a_traced_model_is_decayed_through_the_one_that_was_traced() -> None:
    model = nn.Sequential(fz.FactorizedLinear(6, 6, 2), fz.FactorizedLinear(6, 6, 2))
    traced: nn.Module = torch.export.export(model, (torch.ones(2, 6),)).module()
    with pytest.raises(ValueError, match=r"It was traced, which leaves no layers: pass the model that was traced"):
        fz.FrobeniusDecay(traced, STRENGTH)
    own = set(list(traced.parameters())[:3])  # those of a stage of a pipeline
    groups = fz.parameter_groups(model, 0.1)
    held = [{**group, "params": [p for p in group["params"] if p in own]} for group in groups]
    optimizer = torch.optim.SGD([group for group in held if group["params"]], lr=0.1)
    fz.FrobeniusDecay(model, STRENGTH).attach(optimizer)
    traced(torch.ones(2, 6)).sum().backward()
    U, V = (factor.detach().clone() for factor in model[0].factors)
    expected = U - 0.1 * (model[0].U.grad + STRENGTH * U @ (V.T @ V))
    optimizer.step()
    torch.testing.assert_close(model[0].U.detach(), expected)


def test_forms_asked_for_by_kind_that_cannot_be_read_are_refused_with_the_reason() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(8, 2), UnknownAttn()])
    for strength in ({"ov": 0.1}, {"ov": torch.tensor(0.1), "qk": 0}):
        with pytest.raises(
            ValueError, match=r"(?s)'ov' asks for attention, but '1' cannot be read: .* is not registered.*'\*\.ov'"
        ):
            fz.FrobeniusDecay(model, strength)
        with pytest.raises(ValueError, match="'ov' asks for attention, but '1' cannot be read"):
            fz.Flambe(fz.parameter_groups(model, 0.1), model, frobenius_decay=strength)
    for strength in (0.1, {"*.ov": 0.1}, {"ov": 0, "*.ov": 0.1}):
        assert [form.kind for form in fz.FrobeniusDecay(model, strength).forms] == ["qk", "ov"]


def test_a_kind_that_the_model_lacks_is_fine_and_a_misspelt_name_is_told_the_nearest() -> None:
    model = nn.Sequential(fz.FactorizedConv2d(4, 4, 3, 2))
    others = ("linear", "embedding", "recurrent", "experts", "monarch", "qk", "ov")
    assert fz.FrobeniusDecay(model, {"conv": 0.1, **dict.fromkeys(others, 0.2)}).penalty() > 0
    with pytest.raises(ValueError, match=r"no form of the model matches 'lin'\..*near names are 'linear'"):
        fz.FrobeniusDecay(model, {"conv": 0.1, "lin": 0})
    with pytest.raises(ValueError, match=r"matches 'up\.9'.*near names are 'up\.1', 'up\.0'"):
        fz.FrobeniusDecay(mixed(), {"up.9": 0.1})


ADAPTIVE = ["Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Adafactor", "Muon", "Lamb"]


@pytest.mark.parametrize("name", ADAPTIVE)
def test_an_adaptive_optimizer_is_told_of_decoupled_decay_unless_asked_for_coupled(name: str) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        kind = getattr(fz if name == "Lamb" else torch.optim, name)
        return kind(fz.parameter_groups(model, 0.0))

    model = nn.Sequential(fz.FactorizedLinear(8, 8, 2, bias=False))
    with pytest.warns(UserWarning, match=rf"^{name} rescales gradients.*decoupled=True, or use fz.decoupled_frobenius"):
        fz.FrobeniusDecay(model, 0.1).attach(make(model))
    for decoupled in (False, True):
        fz.FrobeniusDecay(model, 0.1, decoupled=decoupled).attach(make(model))
    fz.FrobeniusDecay(model, 0.1).attach(torch.optim.SGD(fz.parameter_groups(model, 0.0)))
