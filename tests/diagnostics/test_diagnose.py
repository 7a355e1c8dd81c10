from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorized as fz

LAYERS: dict[str, Any] = {
    "linear": lambda: fz.FactorizedLinear(9, 7, 3),
    "overcomplete": lambda: fz.FactorizedLinear(5, 4, 11),
    "inner": lambda: fz.FactorizedLinear(8, 6, 4, depth=2),
    "conv": lambda: fz.FactorizedConv2d(4, 6, 3, 5),
    "grouped-conv": lambda: fz.FactorizedConv2d(6, 4, 3, 2, groups=2),
    "grouped-conv-inner": lambda: fz.FactorizedConv2d(6, 4, 3, 2, groups=2, depth=1),
    "embedding": lambda: fz.FactorizedEmbedding(12, 6, 3),
}


def trained(name: str) -> nn.Module:
    """Return a model of one layer whose factors are no longer those of an initialization."""
    torch.manual_seed(0)
    model = nn.Sequential(LAYERS[name]()).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 2)
    return model


def matrix(layer: Any) -> Tensor:
    """Return the composed matrix: of groups, the block-diagonal whole."""
    groups, inner = layer.shape.groups, layer.factors[1:-1]
    blocks = []
    for g in range(groups):
        block = layer.U.detach().chunk(groups)[g]
        for M in inner:
            block = block @ M.detach().chunk(groups)[g]
        blocks.append(block @ layer.V.detach().chunk(groups)[g].T)
    return torch.block_diag(*blocks)


@pytest.mark.parametrize("name", LAYERS)
def test_the_norms_are_those_of_the_composed_matrix(name: str) -> None:
    model = trained(name)
    W = matrix(model[0])
    values = torch.linalg.svdvals(W)
    (diagnosis,) = fz.diagnose(model, lr=0.1)
    assert diagnosis.frobenius == pytest.approx(W.norm().item(), rel=1e-10)
    assert diagnosis.frobenius == pytest.approx(model[0].weight.norm().item(), rel=1e-10)
    assert diagnosis.spectral == pytest.approx(values[0].item(), rel=1e-10)
    assert diagnosis.nuclear == pytest.approx(values.sum().item(), rel=1e-10)
    assert diagnosis.stable_rank == pytest.approx((values.square().sum() / values[0] ** 2).item(), rel=1e-10)
    assert diagnosis.effective_step == pytest.approx(0.1 / W.square().sum().item(), rel=1e-10)


@pytest.mark.parametrize("name", ["linear", "conv", "grouped-conv", "embedding"])
def test_the_bound_is_the_nuclear_norm_at_spectral_initialization_and_above_it_later(name: str) -> None:
    torch.manual_seed(0)
    (fresh,) = fz.diagnose(nn.Sequential(LAYERS[name]().double()), lr=0.1)
    assert fresh.nuclear_bound == pytest.approx(fresh.nuclear, rel=1e-6)  # the layers decompose in float32
    model = trained(name)
    (later,) = fz.diagnose(model, lr=0.1)
    squares = sum(factor.detach().square().sum().item() for factor in model[0].factors)
    assert later.nuclear_bound == pytest.approx(squares / 2, rel=1e-12)
    assert later.nuclear_bound > 1.05 * later.nuclear


def test_a_product_with_inner_matrices_has_no_such_bound() -> None:
    model = trained("inner")
    with torch.no_grad():
        model[0].inner[0].mul_(100)
    (diagnosis,) = fz.diagnose(model, lr=0.1)
    squares = sum(factor.detach().square().sum().item() for factor in (model[0].U, model[0].V))
    assert diagnosis.nuclear is not None
    assert diagnosis.nuclear > squares / 2
    assert diagnosis.nuclear_bound is None


@pytest.mark.parametrize("name", ["linear", "conv", "grouped-conv"])
def test_factors_are_orthogonal_at_spectral_initialization_and_not_later(name: str) -> None:
    torch.manual_seed(0)
    (fresh,) = fz.diagnose(nn.Sequential(LAYERS[name]().double()), lr=0.1)
    assert max(fresh.non_orthogonality) < 1e-6
    (later,) = fz.diagnose(trained(name), lr=0.1)
    assert min(later.non_orthogonality) > 0.05


def test_non_orthogonality_is_the_share_of_the_gram_matrix_off_its_diagonal() -> None:
    model = trained("linear")
    (diagnosis,) = fz.diagnose(model, lr=0.1)
    for factor, found in zip((model[0].U, model[0].V), diagnosis.non_orthogonality, strict=True):
        gram = factor.detach().T @ factor.detach()
        off = gram - torch.diag(torch.diag(gram))
        assert found == pytest.approx((off.norm() / gram.norm()).item(), rel=1e-10)
    with torch.no_grad():
        model[0].U.fill_(1.0)
    assert fz.diagnose(model, lr=0.1)[0].non_orthogonality[0] == pytest.approx((6 / 9) ** 0.5)


def test_every_product_is_named_once_in_the_models_order() -> None:
    tied = fz.FactorizedLinear(4, 4, 2)
    model = nn.ModuleDict({"conv": LAYERS["conv"](), "words": LAYERS["embedding"](), "one": tied, "two": tied})
    found = [(diagnosis.name, diagnosis.kind) for diagnosis in fz.diagnose(model, lr=0.1)]
    assert found == [("conv", "conv"), ("words", "embedding"), ("one", "linear")]


@pytest.mark.parametrize("name", LAYERS)
def test_without_spectrum_nothing_is_decomposed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained(name)
    (whole,) = fz.diagnose(model, lr=0.1)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a decomposition was computed")

    for decomposition in ("svd", "svdvals", "qr", "eigh", "eigvalsh"):
        monkeypatch.setattr(torch.linalg, decomposition, refuse)
    (cheap,) = fz.diagnose(model, lr=0.1, spectrum=False)
    assert (cheap.spectral, cheap.nuclear, cheap.stable_rank) == (None, None, None)
    shared = ("name", "kind", "frobenius", "nuclear_bound", "effective_step", "non_orthogonality")
    assert [getattr(cheap, field) for field in shared] == [getattr(whole, field) for field in shared]


def test_a_product_that_is_zero_has_no_direction_to_step_in() -> None:
    model = trained("linear")
    with torch.no_grad():
        model[0].U.zero_()
    (diagnosis,) = fz.diagnose(model, lr=0.1)
    assert (diagnosis.frobenius, diagnosis.nuclear, diagnosis.stable_rank) == (0, 0, 0)
    assert diagnosis.effective_step == float("inf")
    assert diagnosis.non_orthogonality[0] == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_layer_that_diverged_is_seen_among_those_that_did_not(value: float) -> None:
    model = nn.Sequential(*trained("linear"), *trained("inner"))
    healthy = fz.diagnose(model, lr=0.1)[1]
    with torch.no_grad():
        model[0].V[1, 1] = value
    wrong, other = fz.diagnose(model, lr=0.1)
    assert not math.isfinite(wrong.frobenius)
    assert [str(figure) for figure in (wrong.spectral, wrong.nuclear, wrong.stable_rank)] == ["nan"] * 3
    assert other == healthy


def test_diagnosing_keeps_no_graph_and_touches_no_gradient() -> None:
    model = trained("inner")
    model[0](torch.randn(2, 8, dtype=torch.float64)).sum().backward()
    before = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    recorded: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        recorded.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        (diagnosis,) = fz.diagnose(model, lr=0.1)
    assert not recorded
    assert isinstance(diagnosis.frobenius, float)
    assert isinstance(diagnosis.nuclear, float)
    after = [parameter.grad for parameter in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True) if b is not None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_diagnosed_in_float32(dtype: torch.dtype) -> None:
    model = nn.Sequential(*trained("inner"), *trained("linear")).to(dtype)
    half, whole = fz.diagnose(model, lr=0.1), fz.diagnose(model.double(), lr=0.1)
    assert half[1].nuclear_bound == pytest.approx(whole[1].nuclear_bound, rel=1e-4)
    for field in ("frobenius", "effective_step", "spectral", "nuclear", "stable_rank"):
        assert getattr(half[0], field) == pytest.approx(getattr(whole[0], field), rel=1e-4)


def test_a_model_without_products_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Linear holds no products to diagnose; call fz\.factorize first"):
        fz.diagnose(nn.Linear(3, 2), lr=0.1)


@pytest.mark.parametrize(
    "call", [lambda model: fz.diagnose(model, lr=0.1), lambda model: fz.NormMatcher(model).record()]
)
def test_a_model_with_a_part_on_the_meta_device_has_no_norms(call: Any) -> None:
    model = nn.Sequential(fz.FactorizedLinear(8, 8, 2), fz.FactorizedLinear(8, 8, 2, device="meta"))
    with pytest.raises(ValueError, match=r"^1\.U is on the meta device and has no values; load the weights first$"):
        call(model)


@pytest.mark.parametrize("lr", [-0.1, float("nan"), "0.1", None, True])
def test_a_wrong_learning_rate_says_what_is_allowed(lr: Any) -> None:
    with pytest.raises(ValueError, match="lr must be a finite number of at least 0"):
        fz.diagnose(trained("linear"), lr)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_learning_rate_given_as_a_tensor_is_a_number_in_the_diagnosis(shape: tuple[int, ...]) -> None:
    model = trained("linear")
    (diagnosis,) = fz.diagnose(model, torch.full(shape, 0.25))
    assert isinstance(diagnosis.effective_step, float)
    assert diagnosis == fz.diagnose(model, 0.25)[0]


def test_under_autocast_a_diagnosis_keeps_its_digits() -> None:
    model = nn.Sequential(*trained("inner"), *trained("linear")).float()
    expected = fz.diagnose(model, lr=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fz.diagnose(model, lr=0.1) == expected
