"""``init=fz.Calibrated(batches)``: factors that keep the outputs of layers on data."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import factorized as fz
from factorized.experiments.data.load import load_images
from factorized.nn.layer import FactorizedLayer
from factorized.nn.moments import InputMoments
from tests.models.stack import shared_module, shared_weight
from tests.models.zoo import VOCABULARY, ZOO, Species, TiedLanguageModel


def colored(samples: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Gaussian inputs of mean zero, and their covariance, which their second moment equals exactly."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(samples, n, generator=generator, dtype=torch.float64)
    white = torch.linalg.qr(drawn - drawn.mean(0)).Q * samples**0.5
    root = torch.randn(n, n, generator=generator, dtype=torch.float64) * torch.logspace(0, -2, n, dtype=torch.float64)
    return white @ root.mT, root @ root.mT


def images(count: int = 64) -> Tensor:
    """Images whose neighbouring pixels are alike, as in photographs."""
    noise = torch.randn(count, 3, 14, 14, generator=torch.Generator().manual_seed(1))
    return F.avg_pool2d(noise, 3, 1) * 3


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, stride=2, groups=2, padding=1),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Conv2d(24, 24, 3, padding=2, dilation=2, padding_mode="circular"),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24 * 36, 10),
    )


def output_error(model: nn.Module, dense: nn.Module, name: str, inputs: Tensor) -> float:
    """The squared error of one layer on the inputs that it has in the dense model."""
    seen: list[Tensor] = []
    place = dense.get_submodule(name)
    hook = place.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    with torch.no_grad():
        dense.eval()(inputs)
        hook.remove()
        return sum((model.get_submodule(name)(x) - place(x)).square().sum().item() for x in seen)


def both(dense: nn.Module, init: fz.Calibrated, **options: Any) -> tuple[nn.Module, nn.Module]:
    """The model with spectral factors, and with calibrated ones."""
    plan = fz.plan(dense, **options)
    return (fz.factorize(copy.deepcopy(dense), plan, init=one) for one in ("spectral", init))  # type: ignore[return-value]


@pytest.mark.parametrize("mean", [0.0, 5.0])
def test_gaussian_inputs_of_known_covariance_give_the_optimum(mean: float) -> None:
    x, covariance = colored(400, 20)
    x = x + mean * torch.arange(20)  # which the bias accounts for
    dense = nn.Sequential(nn.Linear(20, 12)).double()
    model = fz.factorize(copy.deepcopy(dense), rank=4, keep_first_and_last=False, init=fz.Calibrated(x.split(100)))
    with torch.no_grad():
        error = (model(x) - dense(x)).square().sum(-1).mean()
    values, Q = torch.linalg.eigh(covariance)
    root = Q * values.clamp(min=0).sqrt()
    best = torch.linalg.svdvals(dense[0].weight @ root)[4:].square().sum()
    torch.testing.assert_close(error, best.detach(), rtol=1e-4, atol=0)


def test_a_float32_model_reaches_the_optimum_though_inputs_vary_little_beside_their_mean() -> None:
    x = colored(400, 20)[0].float() + 1e4
    dense = nn.Sequential(nn.Linear(20, 12))
    model = fz.factorize(copy.deepcopy(dense), rank=4, keep_first_and_last=False, init=fz.Calibrated(x.split(100)))
    with torch.no_grad():
        error = (model.double()(x.double()) - dense.double()(x.double())).square().sum()
    around = x.double() - x.double().mean(0)
    best = torch.linalg.svdvals(dense[0].weight.detach() @ around.mT)[4:].square().sum()
    torch.testing.assert_close(error, best, rtol=1e-4, atol=0)


def test_a_float32_model_keeps_directions_without_samples_by_the_size_of_their_weights() -> None:
    x = torch.randn(5, 40)
    dense = nn.Sequential(nn.Linear(40, 30, bias=False))
    with pytest.warns(UserWarning, match="fewer samples than directions"):
        model = fz.factorize(copy.deepcopy(dense), rank=12, keep_first_and_last=False, init=fz.Calibrated([x]))
    W = dense[0].weight.detach().double()
    outputs = torch.linalg.qr(W @ x.double().mT).Q  # which are kept whole
    best = torch.linalg.svdvals(W - outputs @ (outputs.mT @ W))[12 - 5 :].square().sum()
    lost = (W - model[0].weight.detach().double()).square().sum()  # type: ignore[operator, union-attr]
    torch.testing.assert_close(lost, best, rtol=1e-3, atol=0)


def test_a_deep_product_at_lower_rank_reaches_the_same_optimum() -> None:
    x, _ = colored(400, 20)
    dense = nn.Linear(20, 12).double()
    shallow, deep = (
        fz.FactorizedLinear.from_dense(dense, 4, init=None, depth=depth).format.calibrate(
            dense.weight.detach(), [_moment(dense, x)]
        )
        for depth in (0, 1)
    )
    torch.testing.assert_close(deep[0] @ deep[1] @ deep[2].mT, shallow[0] @ shallow[1].mT)


def _moment(dense: nn.Module, x: Tensor) -> Any:
    collected = InputMoments(dense)
    collected(dense, (x,), {})
    return collected.moment


@pytest.mark.parametrize(
    "scheme",
    [fz.LowRank(), fz.LowRank("channel"), fz.Monarch(), fz.Kronecker(), fz.TensorTrain(), fz.Tucker()],
    ids=str,
)
def test_no_layer_has_a_larger_output_error_than_with_spectral_initialization(scheme: Any) -> None:
    dense, x = convolutions(), images()
    spectral, ours = both(
        dense, fz.Calibrated([x]), scheme=scheme, ratio=0.3, of="selected", keep_first_and_last=False, exclude=["9"]
    )
    layers = [name for name, module in ours.named_modules() if isinstance(module, FactorizedLayer)]
    assert len(layers) >= 2
    for name in layers:
        assert output_error(ours, dense, name, x) < output_error(spectral, dense, name, x), name


@pytest.mark.filterwarnings("ignore:init=Calibrated")  # of BERT's positions
@pytest.mark.parametrize("species", ZOO, ids=lambda species: species.name)
def test_whole_models_keep_more_of_their_outputs(species: Species) -> None:
    dense, x = species.fresh().eval(), species.inputs(batch=32)
    errors = []
    for model in both(dense, fz.Calibrated([x]), ratio=0.7):
        with torch.no_grad():
            a, b = (getattr(out, "logits", out) for out in (model.eval()(x), dense(x)))
        errors.append((a - b).square().sum())
    assert errors[1] < errors[0]


@pytest.mark.nightly
def test_digits_keep_more_accuracy_than_with_spectral_initialization() -> None:
    data = load_images("digits")
    x, test = ((part.float() / 255) for part in (data.x_train, data.x_test))
    torch.manual_seed(0)
    dense = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
    optimizer = torch.optim.Adam(dense.parameters(), lr=2e-3)
    for _ in range(6):
        for chosen in torch.randperm(len(x)).split(96):
            optimizer.zero_grad()
            F.cross_entropy(dense(x[chosen]), data.y_train[chosen]).backward()
            optimizer.step()

    def accuracy(model: nn.Module) -> float:
        with torch.no_grad():
            return (model(test).argmax(-1) == data.y_test).float().mean().item()

    assert accuracy(dense) > 0.95
    # labels come along, as from a DataLoader
    batches = list(zip(x.split(128), data.y_train.split(128), strict=True))
    for ratio in (0.1, 0.15):
        spectral, ours = both(dense, fz.Calibrated(batches), ratio=ratio)
        assert accuracy(ours) > accuracy(spectral) + 0.05, ratio


@pytest.mark.parametrize("make", [shared_weight, shared_module])
def test_layers_that_share_a_weight_share_their_error(make: Any) -> None:
    dense = make().double()
    x = torch.randn(200, 3, 8, dtype=torch.float64)
    spectral, ours = both(dense, fz.Calibrated([x]), rank=3)
    inputs = [dense[:place](x).detach() for place in (3, 4)]
    if make is shared_module:  # one bias for both
        inputs = [torch.cat(inputs)]
    around = torch.cat([i - i.mean(0) for i in inputs])
    values, Q = torch.linalg.eigh(around.mT @ around)
    best = torch.linalg.svdvals(dense[3].weight.detach() @ (Q * values.clamp(min=0).sqrt()))[3:].square().sum()
    errors = []
    for model in (spectral, ours):
        pairs = zip((model[3], model[4]), (dense[3], dense[4]), inputs, strict=False)
        errors.append(sum((a(i) - b(i)).square().sum() for a, b, i in pairs).detach())
    torch.testing.assert_close(errors[1], best, rtol=1e-5, atol=0)
    assert errors[1] < errors[0]
    assert ours[3].U is ours[4].U  # type: ignore[index]


def test_biases_are_adjusted_in_place_unless_another_module_holds_them() -> None:
    x, _ = colored(400, 12)
    x = x.float() + 3
    dense = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
    own, shared = copy.deepcopy(dense), copy.deepcopy(dense)
    shared[1].bias = shared[0].bias
    for model, moves in ((own, True), (shared, False)):
        bias, before = model[0].bias, model[0].bias.detach().clone()
        fz.factorize(model, rank=3, keep_first_and_last=False, init=fz.Calibrated([x]))
        assert model[0].bias is bias
        assert torch.equal(bias, before) is not moves
    torch.testing.assert_close(own[0](x).mean(0), dense[0](x).mean(0))


def test_an_embedding_tied_to_the_output_layer_counts_both_uses() -> None:
    torch.manual_seed(0)
    dense = TiedLanguageModel().double()
    frequent = torch.randint(0, VOCABULARY // 4, (64, 12))
    spectral, ours = both(
        dense, fz.Calibrated([frequent]), rank=6, keep_first_and_last=False, include=["embed", "decoder"]
    )
    assert ours.embed.U is ours.decoder.U
    hidden = dense.norm.register_forward_hook(lambda module, arguments, output: seen.append(output))
    seen: list[Tensor] = []
    dense(frequent)
    hidden.remove()
    errors = []
    for model in (spectral, ours):
        lost = (model.embed.weight - dense.embed.weight).detach()
        errors.append(lost[frequent].square().sum().item() + (seen[0] @ lost.mT).square().sum().item())
    assert errors[1] < 0.95 * errors[0]


def test_a_transposed_linear_of_gpt2_is_calibrated_on_its_rows() -> None:
    from transformers.pytorch_utils import Conv1D

    x, covariance = colored(300, 16)
    dense = nn.Sequential(Conv1D(24, 16)).double()
    nn.init.normal_(dense[0].weight)
    model = fz.factorize(copy.deepcopy(dense), rank=4, keep_first_and_last=False, init=fz.Calibrated([x]))
    values, Q = torch.linalg.eigh(covariance)
    best = torch.linalg.svdvals((Q * values.clamp(min=0).sqrt()).mT @ dense[0].weight)[4:].square().sum()
    with torch.no_grad():
        torch.testing.assert_close((model(x) - dense(x)).square().sum(-1).mean(), best, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_are_calibrated_in_higher_precision(dtype: torch.dtype) -> None:
    x, _ = colored(400, 24)
    dense = nn.Sequential(nn.Linear(24, 24)).to(dtype)
    spectral, ours = both(dense, fz.Calibrated([x.to(dtype)]), rank=6, keep_first_and_last=False)
    assert ours[0].U.dtype == dtype  # type: ignore[index, union-attr]
    assert output_error(ours, dense, "0", x.to(dtype)) < 0.5 * output_error(spectral, dense, "0", x.to(dtype))
