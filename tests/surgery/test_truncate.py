from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.formats.kernel import KernelShape, to_matrix
from factorized.nn.layer import FactorizedLayer
from factorized.surgery.describe import describe
from factorized.testing import error
from tests.attention.attention_zoo import EVERY, Kind, register_own


class Net(nn.Module):
    """A layer of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 12)
        self.conv = nn.Conv2d(12, 16, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose1d(16, 12, 4, stride=2)
        self.net = nn.GRU(12, 16, batch_first=True)
        self.head = nn.Linear(16, 30, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.table(x).permute(0, 3, 1, 2)).flatten(2)
        return self.head(self.net(self.up(x).mT)[0])


def tokens() -> Tensor:
    torch.manual_seed(1)
    return torch.randint(30, (2, 4, 3))


def trained(scheme: Any = None, **settings: Any) -> Any:
    """Return a factorized model whose factors are not balanced."""
    torch.manual_seed(0)
    settings = settings or {"rank": 6}
    model = fz.factorize(Net().double(), scheme or fz.LowRank(), keep_first_and_last=False, **settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def layers(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, FactorizedLayer)}


SCHEMES = {
    "low-rank": (fz.LowRank(), {"rank": 6}),
    "deep": (fz.Overcomplete("deep"), {"rank_scale": 1.5}),
    "train": (fz.TensorTrain(), {"rank_scale": 0.9}),
    "tucker": (fz.Tucker(), {"rank_scale": 0.9}),
    "tucker-refined": (fz.Tucker(refinements=3), {"rank_scale": 0.9}),
    "tucker-train": (fz.Tucker(core="train"), {"rank_scale": 0.6}),
    "monarch": (fz.Monarch(blocks=2), {"rank": 3}),
    "kronecker": (fz.Kronecker(), {"rank_scale": 0.9}),
}
every_scheme = pytest.mark.parametrize("kind", SCHEMES)


@every_scheme
def test_every_layer_is_what_a_decomposition_of_its_weight_is(kind: str) -> None:
    scheme, settings = SCHEMES[kind]
    model = trained(scheme, **settings)
    before, weights = layers(deepcopy(model)), {n: m.format.compose(m.factors) for n, m in layers(model).items()}
    assert fz.truncate(model, rank_scale=0.5) is model
    after = layers(model)
    assert after.keys() == before.keys()
    assert all(after[name].format.numel < before[name].format.numel for name in after)
    for name, layer in after.items():
        expected = layer.format.compose(layer.format.decompose(weights[name]))
        assert error(layer.format.compose(layer.factors), expected) < 1e-10
        assert {parameter.is_contiguous() for parameter in layer.parameters()} == {True}
    assert model(tokens()).isfinite().all()
    assert error(fz.compose(model)(tokens()), model(tokens())) < 1e-10


@every_scheme
def test_half_types_are_cut_as_their_values_in_float64_would_be(kind: str) -> None:
    scheme, settings = SCHEMES[kind]
    model = trained(scheme, **settings).bfloat16()
    reference = deepcopy(model).double()
    for one in (model, reference):
        fz.truncate(one, rank_scale=0.5)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    expected = layers(reference)
    for name, layer in layers(model).items():
        assert layer.format == expected[name].format
        exact = layer.format.compose([factor.double() for factor in layer.factors])
        assert error(exact, expected[name].format.compose(expected[name].factors)) < 2e-2


def test_a_product_is_the_truncated_svd_of_its_weight() -> None:
    model = trained()
    before = {name: to_matrix(m.format.compose(m.factors), m.shape) for name, m in layers(model).items()}
    fz.truncate(model, rank=3)
    for name, layer in layers(model).items():
        assert layer.rank == 3
        U, S, Vh = torch.linalg.svd(before[name], full_matrices=False)
        best = (U[..., :3] * S[..., None, :3]) @ Vh[..., :3, :]
        assert error(to_matrix(layer.format.compose(layer.factors), layer.shape), best) < 1e-10
        assert error(layer.U.norm(), layer.V.norm()) < 1e-10  # both carry √Σ


@pytest.mark.parametrize("kind", ["low-rank", "deep", "train", "tucker"])
@pytest.mark.parametrize("ratio", [0.7, 0.5])
def test_a_ratio_of_the_present_parameters_is_met_and_never_exceeded(kind: str, ratio: float) -> None:
    scheme, settings = SCHEMES[kind]
    model = trained(scheme, **settings)
    before = sum(parameter.numel() for parameter in model.parameters())
    fz.truncate(model, ratio=ratio)
    after = sum(parameter.numel() for parameter in model.parameters())
    assert (ratio - 0.1) * before < after <= ratio * before


@pytest.mark.parametrize("budget", [{"rank_scale": 0.5}, {"ratio": 0.4}])
@pytest.mark.parametrize("scheme", [fz.TensorTrain(), fz.Tucker(), fz.Tucker(core="train")], ids=str)
@pytest.mark.parametrize("layer", [nn.Linear(256, 256), nn.Conv2d(48, 40, 3)], ids=["linear", "convolution"])
def test_ranks_of_a_tensor_fall_in_proportion(layer: nn.Module, scheme: Any, budget: dict[str, Any]) -> None:
    model = fz.factorize(nn.Sequential(deepcopy(layer)), scheme, rank_scale=0.6, keep_first_and_last=False)
    before = layers(model)["0"].rank
    fz.truncate(model, **budget)
    shares = [now / was for now, was in zip(layers(model)["0"].rank, before, strict=True)]
    assert max(shares) < 1
    assert max(shares) - min(shares) < 1.01 / min(before)  # a step of the smallest


@pytest.mark.parametrize("limit", [1, 4, 7, 30])
@pytest.mark.parametrize(
    ("scheme", "ranks"),
    [
        (fz.TensorTrain(dims=(16, 16, 16, 16)), (5, 30, 6)),
        (fz.TensorTrain(dims=(16, 16, 16, 16)), (16, 3, 12)),
        (fz.Tucker(dims=(64, 32, 32)), (30, 3, 12)),
        (fz.Tucker(dims=(64, 32, 32), core="train"), (30, 3, 12)),
        (fz.Monarch(blocks=4), 30),
        (fz.LowRank(), 30),
    ],
    ids=str,
)
def test_a_rank_is_the_limit_of_every_rank_and_cuts_none_below_it(
    scheme: fz.Scheme, ranks: int | tuple[int, ...], limit: int
) -> None:
    torch.manual_seed(0)
    format = scheme.at_rank(KernelShape.of((256, 256)), ranks)
    assert format.rank == ranks
    model: Any = nn.Sequential(fz.FactorizedLinear.from_dense(nn.Linear(256, 256).double(), format))
    factors, weight = model[0].factors, format.compose(model[0].factors)
    fz.truncate(model, rank=limit)
    after = model[0].format
    assert after.rank == (min(ranks, limit) if isinstance(ranks, int) else tuple(min(rank, limit) for rank in ranks))
    expected = after.compose(after.decompose(weight, exact=True))
    assert error(after.compose(model[0].factors), expected) < 1e-10
    if after.rank == ranks:
        assert all(now is before for now, before in zip(model[0].factors, factors, strict=True))


def test_the_limit_of_a_separable_convolution_is_that_of_its_pointwise_part() -> None:
    format = fz.Tucker(separable=True, dims=(64, 8, 8)).at_rank(KernelShape.of((64, 64, 3, 3)), (8, 5, 2))
    model: Any = nn.Sequential(fz.FactorizedConv2d.from_dense(nn.Conv2d(64, 64, 3), format))
    for limit, ranks in [(8, (8, 5, 2)), (6, (6, 5, 2)), (3, (3, 3, 2))]:
        fz.truncate(model, rank=limit)
        assert model[0].rank == ranks


def test_an_energy_keeps_that_share_of_every_spectrum_and_no_more_ranks_than_it_takes() -> None:
    model = trained()
    with torch.no_grad():
        model.conv.U[:24, 1:] = 0  # of the first of two groups, whose spectra are added
    spectra = {name: m.format.spectrum(m.factors).detach().square().sum(0) for name, m in layers(model).items()}
    fz.truncate(model, energy=0.9)
    for name, layer in layers(model).items():
        kept = spectra[name].cumsum(0) / spectra[name].sum()
        assert kept[layer.rank - 1] >= 0.9 > (kept[layer.rank - 2] if layer.rank > 1 else 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_energy_of_half_types_is_measured_in_float32(dtype: torch.dtype) -> None:
    model, reference = trained().to(dtype), trained().to(dtype).double()
    for one in (model, reference):
        fz.truncate(one, energy=0.8)
    ranks = [[module.rank for module in one.modules() if hasattr(module, "rank")] for one in (model, reference)]
    assert ranks[0] == ranks[1]
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_a_plan_for_the_dense_model_says_the_ranks() -> None:
    model = trained()
    kept = layers(model)["conv"].rank
    fz.truncate(model, fz.plan(Net(), rank=2, include=["table", "net", "head"], keep_first_and_last=False))
    ranks = {name: layer.rank for name, layer in layers(model).items()}
    assert ranks.pop("conv") == kept
    assert ranks.pop("up") > 2
    assert set(ranks.values()) == {2}


def test_tied_layers_stay_tied_and_frozen_ones_frozen_and_hooks_and_attributes_stay() -> None:
    torch.manual_seed(0)
    dense = Net().double()
    dense.head = nn.Linear(12, 30, bias=False).double()
    dense.head.weight = dense.table.weight
    dense.table.weight.no_weight_decay = True
    dense.conv.weight.requires_grad_(False)
    model: Any = fz.factorize(dense, rank=6, keep_first_and_last=False)
    called: list[int] = []
    model.conv.register_forward_hook(lambda *_: called.append(1))
    model.conv.execution = "chain"
    fz.truncate(model, rank=2)
    assert model.head.U is model.table.U
    assert model.head.V is model.table.V
    assert model.table.U.no_weight_decay
    assert not model.conv.U.requires_grad
    assert model.conv.chosen_execution() == "chain"
    model.conv(torch.randn(1, 12, 5, 5).double())
    assert called == [1]
    assert {parameter.shape[-1] for parameter in model.head.parameters()} == {2}


def test_afterwards_it_decays_and_is_saved_like_any_other(tmp_path: Path) -> None:
    model, x = trained(), tokens()
    fz.truncate(model, ratio=0.5)
    optimizer = torch.optim.SGD(fz.parameter_groups(model, weight_decay=0.0), lr=0.1)
    fz.FrobeniusDecay(model, 0.1).attach(optimizer)
    before = sum(form.norm_squared(form.values).sum() for form in fz.forms(model))
    (0 * model(x).sum()).backward()
    optimizer.step()
    assert sum(form.norm_squared(form.values).sum() for form in fz.forms(model)) < before
    fz.save(model, tmp_path / "saved")
    assert error(fz.load(tmp_path / "saved", Net().double())(x), model(x)) == 0
    fz.load_dense(model, Net().double().state_dict())


def attends() -> Any:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).double().eval()


@pytest.mark.parametrize("settings", [{"rank": 2}, {"ratio": 0.6}, {"rank_scale": 0.5}, {"energy": 0.5}])
def test_shrunk_attention_gets_smaller_heads(settings: dict[str, Any]) -> None:
    model = fz.factorize(attends(), rank=5, attention="heads", keep_first_and_last=False)
    composed = fz.compose(model)
    x = torch.randn(2, 5, 16).double()
    fz.truncate(model, **settings)
    qk, ov = model.self_attn.shrunk.qk, model.self_attn.shrunk.ov
    assert 1 <= qk == ov < 5
    reference = fz.factorize(composed, rank=qk, attention="heads", include=["self_attn"], keep_first_and_last=False)
    assert error(model.self_attn(x, x, x)[0], reference.self_attn(x, x, x)[0]) < 1e-10
    fz.compose(model)(x)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [({"rank_scale": 0.5}, (4, 1)), ({"ratio": 0.95}, (4, 1)), ({"rank": 2}, (2, 2)), ({"rank": 3}, (3, 2))],
)
def test_unequal_sizes_of_heads_fall_in_proportion_and_a_rank_limits_both(
    settings: dict[str, Any], sizes: tuple[int, int]
) -> None:
    model = fz.factorize_attention(attends(), {"qk": 0.75, "ov": 0.25})
    fz.truncate(model, **settings)
    assert (model.self_attn.shrunk.qk, model.self_attn.shrunk.ov) == sizes


@pytest.mark.parametrize("scales", [{"qk": 0.5, "ov": 0.125}, {"qk": 0.75, "ov": 0.25}])
def test_a_plan_of_unequal_sizes_of_heads_says_both(scales: dict[Any, float]) -> None:
    plan = describe(fz.factorize_attention(attends(), scales))
    model = fz.truncate(fz.factorize_attention(attends(), {"qk": 0.75, "ov": 0.25}), plan)
    assert (model.self_attn.shrunk.qk, model.self_attn.shrunk.ov) == (8 * scales["qk"], 8 * scales["ov"])


def test_heads_of_their_dense_size_are_not_cut() -> None:
    model = fz.factorize_attention(attends(), rank_scale=1)
    with pytest.raises(ValueError, match="has no factorized layer"):
        fz.truncate(deepcopy(model), rank=2)
    fz.truncate(fz.factorize(model, rank=8, include=["linear1"]), rank=2)
    assert model.linear1.rank == 2
    assert model.self_attn.shrunk.qk == model.self_attn.shrunk.ov == 8


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.name)
def test_heads_of_every_family_are_those_that_its_composed_module_would_get(kind: Kind) -> None:
    register_own()
    model = fz.factorize_attention(kind.make(), 0.75, forms=kind.forms)  # type: ignore[arg-type]
    reference = fz.factorize_attention(fz.compose(model), 0.375, forms=kind.forms)  # type: ignore[arg-type]
    fz.truncate(model, rank=3)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in reference.parameters())
    assert error(kind.run(model), kind.run(reference)) < 1e-8
    assert [repr(model.get_submodule(name)) for name in kind.attention] == [
        repr(reference.get_submodule(name)) for name in kind.attention
    ]


def test_if_one_layer_cannot_be_cut_none_is() -> None:
    model = trained()
    state = deepcopy(model.state_dict())
    with torch.no_grad():
        model.head.U[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"head: .*NaN"):
        fz.truncate(model, rank=1)
    for name, value in model.state_dict().items():
        assert name == "head.U" or torch.equal(value, state[name])


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (trained, {}, "give exactly one of a plan, ratio=, rank_scale=, rank= and energy=, got none"),
        (trained, {"plan": 0.5}, "plan must be what fz.plan returns, got 0.5; budgets have names, such as ratio=0.5"),
        (trained, {"rank": 2, "ratio": 0.5}, "got ['ratio', 'rank']"),
        (trained, {"ratio": 0.0}, "ratio must be in (0, 1], got 0.0"),
        (trained, {"ratio": "half"}, "ratio must be in (0, 1], got 'half'"),
        (trained, {"energy": 1.5}, "energy must be in (0, 1], got 1.5"),
        (trained, {"rank": 0}, "rank must be a whole number of at least 1"),
        (trained, {"ratio": 0.01}, "ratio=0.01 is out of reach for Net: at rank 1 it still keeps 0."),
        (Net, {"rank": 2}, "Net has no factorized layer; call fz.factorize first"),
        (lambda: trained(fz.TensorTrain(), rank=2), {"energy": 0.5}, "energy= is for products, and this is a tensor_"),
        (lambda: trained(rank=2), {"plan": fz.plan(Net(), rank=3)}, "conv is a weight of 16x6x3x3 in product, rank=2"),
        (
            lambda: fz.factorize(Net(), rank=2, include=["head"]),
            {"plan": fz.plan(Net(), rank=1, include=["conv"])},
            "conv is in the plan, but it is not factorized; nothing was changed",
        ),
        (lambda: trained(fz.Residual(), rank=2), {"rank": 1}, "is a residual, residual=frozen, rank=2, whose"),
        (lambda: trained(fz.Residual(), rank=2), {"rank_scale": 0.5}, "and it cannot be cut. Cut the other layers, by"),
        (lambda: trained(fz.Residual(), rank=2), {"energy": 0.5}, "and it cannot be cut. Cut the other layers, by"),
        (lambda: trained().to("meta"), {"rank": 1}, "its factors are on the meta device"),
        (lambda: trained().to("meta"), {"energy": 0.5}, "its factors are on the meta device"),
    ],
)
def test_what_cannot_be_done_says_why(model: Callable[[], nn.Module], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        fz.truncate(model(), **settings)


@pytest.mark.parametrize("settings", [{"rank": 2}, {"rank_scale": 1.0}, {"ratio": 0.99}])
def test_residuals_stay_where_the_other_layers_can_be_cut(settings: dict[str, Any]) -> None:
    model = fz.factorize(Net(), fz.Residual(), rank=2, include=["conv"])
    fz.truncate(fz.factorize(model, rank=2, include=["head"]), **settings)
    assert model.conv.rank == 2
    assert model.head.rank == (1 if "ratio" in settings else 2)


def test_the_lowest_ratio_that_a_refusal_names_can_be_asked_for() -> None:
    with pytest.raises(ValueError, match="is out of reach") as caught:
        fz.truncate(trained(), ratio=0.01)
    (lowest,) = re.findall(r"Ask for (0\.\d{4})\.\.1; nothing was changed", str(caught.value))
    fz.truncate(trained(), ratio=float(lowest))
