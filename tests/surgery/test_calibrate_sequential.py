"""``fz.Calibrated(batches, sequential=True)``: layers that make up for the errors of those before them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.planning import sequential
from tests.models.stack import shared_module, shared_weight
from tests.models.zoo import VOCABULARY, ZOO, Species, TiedLanguageModel
from tests.surgery.test_calibrate import colored, convolutions, images


class Skipping(nn.Module):
    """A layer behind the sum of another layer's inputs and outputs, which may be formed in place."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.in_place = nn.Linear(20, 20), nn.Linear(20, 12), in_place

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            x = x.clone()
            x += self.first(x)
        else:
            x = x + self.first(x)
        out: Tensor = self.second(x)
        return out


class Attending(nn.Module):
    """Three layers with the same input, and one behind them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.out = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.q(x) @ self.k(x).mT).softmax(-1)
        out: Tensor = self.out(weights @ self.v(x))
        return out


class Routed(nn.Module):
    """A layer that sees only those rows that the layer before it makes positive."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.expert = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = self.expert(x[x[:, 0] > 0])
        return out


def factorized(dense: nn.Module, batches: Any, *, one_by_one: bool = True, rank: int = 4, **settings: Any) -> Any:
    given = fz.Calibrated(batches, sequential=one_by_one, **settings)
    return fz.factorize(copy.deepcopy(dense), rank=rank, keep_first_and_last=False, init=given)


@torch.no_grad()
def lost(model: nn.Module, dense: nn.Module, x: Tensor) -> Tensor:
    """The squared error of a model's outputs, per example."""
    return (model.eval()(x) - dense.eval()(x)).square().sum() / len(x)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("mean", [0.0, 5.0])
def test_gaussian_inputs_of_known_covariance_give_the_optimum_behind_a_factorized_layer(
    mean: float, in_place: bool
) -> None:
    x, covariance = colored(400, 20)
    x = x + mean * torch.arange(20)  # which the biases account for
    dense = Skipping(in_place).double()
    model = factorized(dense, x.split(100))
    eye = torch.eye(20, dtype=torch.float64)
    W, before, after = (part.detach() for part in (dense.second.weight, dense.first.weight + eye, model.first.weight))
    moment = (after + eye) @ covariance @ (after + eye).mT
    values, Q = torch.linalg.eigh(moment)
    reached = torch.linalg.svdvals(W @ before @ covariance @ (after + eye).mT @ Q / values.sqrt())[:4].square().sum()
    best = (W @ before @ covariance @ before.mT @ W.mT).trace() - reached
    torch.testing.assert_close(lost(model, dense, x), best, rtol=1e-3, atol=0)
    apart = factorized(dense, x.split(100), one_by_one=False)
    assert lost(model, dense, x) < 0.9 * lost(apart, dense, x)
    torch.testing.assert_close(model.first.weight, apart.first.weight)
    torch.testing.assert_close(model(x).mean(0), dense(x).mean(0))


@pytest.mark.parametrize(
    "scheme",
    [fz.LowRank(), fz.LowRank("channel"), fz.Monarch(), fz.Kronecker(), fz.TensorTrain(), fz.Tucker()],
    ids=str,
)
def test_convolutions_in_every_format_lose_less(scheme: Any) -> None:
    dense, x = convolutions(), images()
    plan = fz.plan(dense, scheme, ratio=0.3, of="selected", keep_first_and_last=False, exclude=["9"])
    apart, behind = (
        fz.factorize(copy.deepcopy(dense), plan, init=fz.Calibrated([x], sequential=one)) for one in (False, True)
    )
    assert lost(behind, dense, x) < lost(apart, dense, x)


@pytest.mark.filterwarnings("ignore:init=Calibrated")  # of BERT's positions
@pytest.mark.parametrize("species", ZOO, ids=lambda species: species.name)
def test_whole_models_lose_less(species: Species) -> None:
    dense, x = species.fresh().eval(), species.inputs(batch=32)
    plan, errors = fz.plan(dense, ratio=0.7), []
    for one in (False, True):
        model = fz.factorize(copy.deepcopy(dense), plan, init=fz.Calibrated([x], sequential=one)).eval()
        with torch.no_grad():
            a, b = (getattr(out, "logits", out) for out in (model(x), dense(x)))
        errors.append((a - b).square().sum())
    assert errors[1] < errors[0] or (species.tied and errors[1] == errors[0])  # of a single weight


def test_layers_with_the_same_input_share_a_pass_and_fewer_layers_per_pass_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched: list[int] = []
    collecting = sequential.collecting
    monkeypatch.setattr(sequential, "collecting", lambda layers: watched.append(len(layers)) or collecting(layers))
    dense, x = Attending(), torch.randn(40, 3, 12)
    one, several = (factorized(dense, [x], layers_per_pass=size) for size in (None, 2))
    assert watched == [3, 1, 2, 1, 1]
    torch.testing.assert_close(one.state_dict(), several.state_dict(), rtol=0, atol=0)


def test_inputs_made_in_inference_mode_give_the_same_factors() -> None:
    with torch.inference_mode():
        x = torch.randn(40, 3, 12)  # nobody can tell whether it was written to
    models = [factorized(Attending(), [given]) for given in (x, x.clone())]
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict())


@pytest.mark.parametrize("make", [shared_weight, shared_module])
def test_layers_that_share_a_weight_make_up_for_errors_together(make: Any) -> None:
    dense, x = make().double(), torch.randn(200, 3, 8, dtype=torch.float64)
    apart, behind = (factorized(dense, [x], one_by_one=one, rank=3) for one in (False, True))
    assert behind[3].U is behind[4].U
    assert lost(behind, dense, x) < lost(apart, dense, x)


def test_an_embedding_tied_to_the_output_layer_keeps_the_weight_of_both() -> None:
    torch.manual_seed(0)
    dense, tokens = TiedLanguageModel().double(), torch.randint(0, VOCABULARY // 4, (64, 12))
    apart, behind = (factorized(dense, [tokens], one_by_one=one, rank=6) for one in (False, True))
    assert behind.embed.U is behind.decoder.U
    assert torch.equal(behind.embed.U, apart.embed.U)  # it comes first


def test_a_layer_whose_inputs_have_no_pairs_keeps_its_weight_for_those_that_it_gets() -> None:
    dense, x = Routed().double(), colored(400, 12)[0]
    model = factorized(dense, [x])
    hidden = model.first(x).detach()
    hidden = hidden[hidden[:, 0] > 0]
    assert len(hidden) != int((dense.first(x)[:, 0] > 0).sum())
    around = hidden - hidden.mean(0)
    values, Q = torch.linalg.eigh(around.mT @ around)
    best = torch.linalg.svdvals(dense.expert.weight.detach() @ (Q * values.clamp(min=0).sqrt()))[4:].square().sum()
    error = (model.expert(hidden) - dense.expert(hidden)).square().sum().detach()
    torch.testing.assert_close(error, best, rtol=1e-4, atol=1e-8)


def test_a_layer_that_is_not_called_behind_factors_stays_dense_until_all_others_are_filled() -> None:
    class Fickle(Skipping):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.runs, self.inputs = nn.Linear(12, 12), 0, []

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1  # for the order; 2 and 3 for the first layer; 4 and 5 for the second
            if self.runs == 5:
                return x
            self.inputs.append(self.second(self.first(x)))
            out: Tensor = self.last(self.inputs[-1])
            return out

    dense, x = Fickle(), torch.randn(60, 20)
    with pytest.warns(UserWarning, match="no batch reaches second "):
        model = factorized(dense, [x])
    spectral = fz.factorize(copy.deepcopy(dense), rank=4, keep_first_and_last=False)
    assert torch.equal(model.second.U, spectral.second.U)
    torch.testing.assert_close(model.inputs[-1], dense.second(model.first(x)), rtol=1e-4, atol=1e-5)


def test_layers_that_no_batch_reaches_take_no_pass_and_stay_spectral() -> None:
    class Unused(Skipping):
        def __init__(self) -> None:
            super().__init__()
            self.never = nn.Linear(20, 20)

    taken: list[Tensor] = []

    class Watched(list[Tensor]):
        def __iter__(self) -> Any:
            taken.append(self[0])
            return super().__iter__()

    dense = Unused()
    with pytest.warns(UserWarning, match="no batch reaches never"):
        model = factorized(dense, Watched([torch.randn(60, 20)]))
    spectral = fz.factorize(copy.deepcopy(dense), rank=4, keep_first_and_last=False)
    assert torch.equal(model.never.U, spectral.never.U)
    assert len(taken) == 3  # for the order, and for each layer that is called


def test_modes_hooks_and_statistics_stay_while_layers_compute_what_their_factors_do() -> None:
    dense = convolutions().train()
    statistics = copy.deepcopy(dense[1].state_dict())
    seen: list[Tensor] = []
    watching = dense[4].register_forward_hook(lambda layer, arguments, output: seen.append(output))
    given = fz.Calibrated([images()], sequential=True)
    fz.factorize(dense, rank=4, init=given, exclude=["0", "9"], keep_first_and_last=False)
    watching.remove()
    assert all(module.training for module in dense)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in dense.modules())
    torch.testing.assert_close(dict(dense[1].state_dict()), dict(statistics))
    whole, *_, last = seen  # the last is that of the inputs of the next layer
    torch.testing.assert_close(last, dense[:5].eval()(images()), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(whole, last, rtol=0.1)


def test_inputs_that_are_not_finite_behind_factors_leave_the_model_unchanged() -> None:
    class Dividing(Skipping):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x) / (self.first(x) - self.first(x)))
            return out

    model = Dividing()
    before = copy.deepcopy(model.state_dict())
    given = fz.Calibrated([torch.randn(60, 20)], sequential=True)
    with pytest.raises(ValueError, match="second: its inputs on the batches of Calibrated hold NaN"):
        fz.factorize(model, rank=4, keep_first_and_last=False, init=given)
    torch.testing.assert_close(model.state_dict(), before)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
