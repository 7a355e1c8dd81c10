"""``init=fz.Calibrated(batches)``: factors that keep the outputs of layers on data."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
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


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: Tensor, labels: Tensor | None = None) -> Tensor:
        out: Tensor = self.b(torch.relu(self.a(x)) * scale)
        return out


class InHalf(nn.Module):
    """A layer that its model runs under autocast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(20, 12)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("rounded", ["by autocast", "by a setting of torch"])
def test_moments_are_not_rounded_as_the_products_of_a_model_are(rounded: str) -> None:
    dense, x = InHalf(), colored(400, 20)[0].float() + 4
    layer, setting = dense.layer, torch.backends.mkldnn.matmul
    collected = InputMoments(layer, centered=True)
    before = setting.fp32_precision
    with layer.register_forward_pre_hook(collected, with_kwargs=True):
        if rounded == "by autocast":
            dense(x)
        else:
            setting.fp32_precision = "bf16"
            try:
                layer(x)
            finally:
                setting.fp32_precision = before
    around = x.double() - x.double().mean(0)
    torch.testing.assert_close(collected.moment.sums[0], around.mT @ around, rtol=0, atol=1e-12 * 400)


def test_batches_are_tensors_tuples_with_labels_or_dicts() -> None:
    x, scale, labels = torch.randn(40, 6), torch.rand(40, 1), torch.zeros(40)
    forms: list[Any] = [
        ((x, scale), labels),
        [(x, scale), labels],
        {"x": x, "scale": scale, "labels": labels},
        ({"x": x, "scale": scale}, labels),
    ]
    dense = TwoInputs()
    models = [
        fz.factorize(copy.deepcopy(dense), rank=2, keep_first_and_last=False, init=fz.Calibrated([form]))
        for form in forms
    ]
    spectral = fz.factorize(copy.deepcopy(dense), rank=2, keep_first_and_last=False)
    for model in models[1:]:
        torch.testing.assert_close(model.state_dict(), models[0].state_dict())
    assert not torch.allclose(models[0].b.weight, spectral.b.weight)


def test_running_leaves_modes_statistics_gradients_and_hooks_as_they_were() -> None:
    model = convolutions().train()
    model[5].eval()
    before = {key: value.clone() for key, value in model[1].state_dict().items()}
    tracked: list[bool] = []
    watching = model[9].register_forward_hook(lambda layer, inputs, output: tracked.append(output.requires_grad))
    random = torch.get_rng_state()
    fz.factorize(model, rank=4, init=fz.Calibrated([images()]), exclude=["9"])
    watching.remove()
    assert tracked == [False]
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model] == [True] * 5 + [False] + [True] * 4
    torch.testing.assert_close(dict(model[1].state_dict()), before)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_several_passes_give_what_one_pass_gives_and_hold_few_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    from factorized.planning import calibration

    watched: list[int] = []
    collecting = calibration.collecting
    monkeypatch.setattr(
        calibration, "collecting", lambda layers, others: watched.append(len(layers)) or collecting(layers, others)
    )
    dense, plan = convolutions(), fz.plan(convolutions(), rank=3, keep_first_and_last=False, exclude=["9"])
    one, several = (
        fz.factorize(copy.deepcopy(dense), plan, init=fz.Calibrated([images()], layers_per_pass=size))
        for size in (None, 2)
    )
    assert watched == [3, 2, 1]
    torch.testing.assert_close(one.state_dict(), several.state_dict())


@pytest.mark.parametrize(("samples", "batches"), [(40, 3), (48, 3), (49, 4)])
@pytest.mark.parametrize("form", [lambda x: x, lambda x: (x,), lambda x: {"input": x}], ids=["tensor", "tuple", "dict"])
def test_samples_bound_an_iterator_that_never_ends(form: Callable[[Tensor], Any], samples: int, batches: int) -> None:
    taken = 0

    def endless() -> Iterator[Any]:
        nonlocal taken
        for _ in itertools.count():
            taken += 1
            yield form(torch.randn(16, 20))

    fz.factorize(
        nn.Sequential(nn.Linear(20, 16)),
        rank=3,
        keep_first_and_last=False,
        init=fz.Calibrated(endless(), samples=samples),
    )
    assert taken == batches


@pytest.mark.filterwarnings("ignore:init=Calibrated")
def test_heads_that_are_cut_stay_spectral() -> None:
    dense = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True))
    plan = fz.plan(dense, ratio=0.6, attention="heads", keep_first_and_last=False)
    assert plan.attention
    spectral, ours = (
        fz.factorize(copy.deepcopy(dense), plan, init=init)
        for init in ("spectral", fz.Calibrated([torch.randn(20, 6, 16)]))
    )
    torch.testing.assert_close(ours[0].self_attn.state_dict(), spectral[0].self_attn.state_dict())
    assert not torch.allclose(ours[0].linear1.weight, spectral[0].linear1.weight)


def _wrapped(model: nn.Module) -> nn.Module:
    compiled: Any = torch.compile(model, backend="eager")
    return compiled


def _by_its_forward(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    return model


def _in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("compiled", [_wrapped, _by_its_forward, _in_place])
def test_a_compiled_model_that_ran_before_is_calibrated_like_any_other(
    compiled: Callable[[nn.Module], nn.Module],
) -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    batches = [torch.randn(64, 12)]
    expected = fz.factorize(copy.deepcopy(dense), rank=3, init=fz.Calibrated(batches))
    model = compiled(dense)
    with torch.no_grad():
        model(batches[0])
    found = fz.factorize(model, rank=3, init=fz.Calibrated(batches))
    assert isinstance(dense[2], FactorizedLayer)
    torch.testing.assert_close(dense.state_dict(), expected.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(found(batches[0]), expected(batches[0]))


def test_progress_counts_every_layer_once() -> None:
    seen: list[tuple[int, int]] = []
    fz.factorize(
        convolutions(),
        rank=3,
        init=fz.Calibrated([images()]),
        keep_first_and_last=False,
        progress=lambda done, total: seen.append((done, total)),
        exclude=["9"],
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]
