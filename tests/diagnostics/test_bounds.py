from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import factorized as fz

Loader = list[tuple[Tensor, Tensor]]
# One hidden layer that stretches by 3 and 1, one that stretches by 2 and 4: all norms are known.
HIDDEN = torch.tensor([[3.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
OUTPUT = torch.tensor([[2.0, 0.0, 0.0], [0.0, 4.0, 0.0]])
# Scores are (6x, 4y): margins are 6, 2, 12 and 8.
INPUTS = torch.tensor([[1.0, 0.0], [1.0, 1.0], [2.0, 0.0], [0.0, 2.0]])
CLASSES = torch.tensor([0, 0, 0, 1])
LOADER: Loader = [(INPUTS[:3], CLASSES[:3]), (INPUTS[3:], CLASSES[3:])]


def mlp(factors: bool = False) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 2, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(HIDDEN)
        model[2].weight.copy_(OUTPUT)
    if factors:
        model[0] = fz.FactorizedLinear.from_dense(model[0], 2)
        model[2] = fz.FactorizedLinear.from_dense(model[2], 2, depth=1)
    return model


class Pair(nn.Module):
    """Returns a tuple, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.net(x),)


def diverged() -> nn.Sequential:
    model = mlp(factors=True)
    with torch.no_grad():
        model[0].U.fill_(math.nan)
    return model


def terms(
    matrices: Sequence[Tensor], B: float, m: int, r: int, gamma: float, samples: int, delta: float = 0.05
) -> tuple[float, float]:
    """Return log10 of the terms of corollaries A.1 and A.2, with each layer's own norm for σ."""
    L = len(matrices)
    spectral = [torch.linalg.matrix_norm(W.double(), 2).item() ** 2 for W in matrices]
    frobenius = [W.double().square().sum().item() for W in matrices]
    confidence = math.log(L * samples / delta)
    by_rank = B**2 * L**3 * m * r * math.log(L * m) * math.prod(spectral) + confidence
    others = [math.prod(spectral[:i] + spectral[i + 1 :]) for i in range(L)]
    weighted = sum(norm * other for norm, other in zip(frobenius, others, strict=True))
    by_frobenius = B**2 * L**2 * m * math.log(L * m) * weighted + confidence
    scale = gamma**2 * samples
    return math.log10(by_rank / scale) / 2, math.log10(by_frobenius / scale) / 2


@pytest.mark.parametrize("factors", [False, True])
@pytest.mark.parametrize(("gamma", "loss"), [(1.0, 0.0), (2.5, 0.25), (7.0, 0.5), (100.0, 1.0)])
def test_both_terms_are_those_of_the_appendix(factors: bool, gamma: float, loss: float) -> None:
    bounds = fz.margin_bounds(mlp(factors), LOADER, gamma=gamma)
    assert (bounds.samples, bounds.layers, bounds.width, bounds.rank) == (4, 2, 3, 2)
    assert bounds.radius == 2.0
    assert bounds.gamma == gamma
    assert bounds.margin_loss == loss
    by_rank, by_frobenius = terms([HIDDEN, OUTPUT], B=2.0, m=3, r=2, gamma=gamma, samples=4)
    assert bounds.log10_rank_term == pytest.approx(by_rank, abs=1e-5)
    assert bounds.log10_frobenius_term == pytest.approx(by_frobenius, abs=1e-5)


def test_a_margin_of_exactly_gamma_counts_as_lost() -> None:
    assert fz.margin_bounds(mlp(), LOADER, gamma=2.0).margin_loss == 0.25
    assert fz.margin_bounds(mlp(), LOADER, gamma=1.999).margin_loss == 0.0


@pytest.mark.parametrize("factors", [False, True])
def test_a_model_of_a_half_type_is_bounded_like_its_double(factors: bool) -> None:
    loader = [(inputs.bfloat16(), classes) for inputs, classes in LOADER]
    half = fz.margin_bounds(mlp(factors).bfloat16(), loader, gamma=1.0)
    whole = fz.margin_bounds(mlp().double(), [(inputs.double(), classes) for inputs, classes in LOADER], gamma=1.0)
    assert half.log10_rank_term == pytest.approx(whole.log10_rank_term, abs=1e-2)
    assert half.log10_frobenius_term == pytest.approx(whole.log10_frobenius_term, abs=1e-2)


def test_the_confidence_enters_where_the_rest_is_small() -> None:
    model = mlp()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.01)
    for delta in (0.5, 1e-6):
        bounds = fz.margin_bounds(model, LOADER, gamma=1.0, delta=delta)
        expected = terms([HIDDEN / 100, OUTPUT / 100], B=2.0, m=3, r=2, gamma=1.0, samples=4, delta=delta)
        assert (bounds.log10_rank_term, bounds.log10_frobenius_term) == pytest.approx(expected, abs=1e-5)


def test_the_margin_is_by_default_that_which_a_tenth_fall_short_of() -> None:
    bounds = fz.margin_bounds(mlp(), LOADER)
    assert bounds.gamma == pytest.approx(2 + 0.3 * 4)  # margins 2, 6, 8, 12
    assert bounds.margin_loss == 0.25


def conv_net(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4, 3, bias=False))


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"groups": 2, "depth": 1}, {"format": 50}], ids=str)
def test_a_composed_model_has_the_same_frobenius_term(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    factorized = conv_net(fz.FactorizedConv2d(4, 4, 3, **({"format": 2} | options), bias=False)).double()
    with torch.no_grad():
        for parameter in factorized.parameters():
            parameter.add_(torch.randn_like(parameter) / 3)
    loader = [(torch.randn(5, 4, 4, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1]))]
    ours, dense = (fz.margin_bounds(m, loader, gamma=0.5) for m in (factorized, fz.compose(factorized)))
    assert ours.log10_frobenius_term == pytest.approx(dense.log10_frobenius_term, abs=1e-9)
    assert ours.rank <= dense.rank
    # ‖W‖²_F / ‖W‖²_2 is at most the rank, so that the term with the rank is never the smaller one.
    assert dense.log10_rank_term >= ours.log10_rank_term >= ours.log10_frobenius_term

    kernel, groups = factorized[0].weight.detach(), options.get("groups", 1)
    blocks = [part.permute(0, 2, 1, 3).reshape(12 // groups, 12 // groups) for part in kernel.chunk(groups)]
    matrices = [torch.block_diag(*blocks), factorized[3].weight.detach()]
    by_rank, by_frobenius = terms(matrices, B=ours.radius, m=12, r=ours.rank, gamma=0.5, samples=5)
    assert ours.log10_frobenius_term == pytest.approx(by_frobenius, abs=1e-9)
    assert ours.log10_rank_term == pytest.approx(by_rank, abs=1e-9)


class Classifier(nn.Module):
    """An embedding of the rounded inputs, a module of any kind, and a linear layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(4, 8), inner, nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x.abs().long() % 4)
        attends = not isinstance(self.inner, (Conv1D, nn.LSTM))
        x = self.inner(x, x, x[..., :4])[0] if attends else self.inner(x)
        return self.head((x[0] if isinstance(x, tuple) else x).mean(1))


@pytest.mark.parametrize(
    ("inner", "matrices"),
    [
        (lambda: Conv1D(8, 8), lambda m: [m.weight.T]),
        (
            lambda: nn.LSTM(8, 8, batch_first=True),
            lambda m: [torch.block_diag(*W.chunk(4)) for W in m._flat_weights[:2]],
        ),
        (
            lambda: nn.MultiheadAttention(8, 2, vdim=4, batch_first=True),
            lambda m: [m.q_proj_weight, m.k_proj_weight, m.v_proj_weight, m.out_proj.weight],
        ),
    ],
    ids=["Conv1D", "LSTM", "attention"],
)
def test_layers_of_every_kind_count_dense_as_they_do_factorized(
    inner: Callable[[], nn.Module], matrices: Callable[[Any], list[Tensor]]
) -> None:
    torch.manual_seed(0)
    model = Classifier(inner()).double()
    settings: dict[str, Any] = {"attention": "heads", "keep_first_and_last": False}
    factorized = fz.factorize(model, rank_scale=0.5, **settings)
    dense = fz.compose(factorized)
    bounds = fz.margin_bounds(dense, LOADER, gamma=1.0)
    found = [W.detach() for W in (*matrices(dense.inner), dense.head.weight)]
    by_rank, by_frobenius = terms(found, bounds.radius, bounds.width, bounds.rank, 1.0, 4)
    assert (bounds.log10_rank_term, bounds.log10_frobenius_term) == pytest.approx((by_rank, by_frobenius), abs=1e-9)
    ours = fz.margin_bounds(factorized, LOADER, gamma=1.0)
    assert ours.log10_frobenius_term == pytest.approx(by_frobenius, abs=1e-9)
    assert ours.layers == bounds.layers == len(found)


def test_packed_projections_of_attention_are_three_matrices() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(2, 1), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.attention(x, x, x)[0])

    model = Attends()
    bounds = fz.margin_bounds(model, LOADER, gamma=1.0)
    matrices = [*model.attention.in_proj_weight.detach().chunk(3), model.attention.out_proj.weight, model.head.weight]
    by_rank, by_frobenius = terms([W.detach() for W in matrices], bounds.radius, 2, 2, 1.0, 4)
    assert (bounds.log10_rank_term, bounds.log10_frobenius_term) == pytest.approx((by_rank, by_frobenius), abs=1e-5)


def test_the_rank_of_groups_is_that_of_the_block_diagonal_matrix() -> None:
    loader = [(torch.randn(5, 4, 4, 4), torch.tensor([0, 1, 2, 0, 1]))]
    for layer, rank in [
        (nn.Conv2d(4, 4, 3, groups=2), 12),
        (fz.FactorizedConv2d(4, 4, 3, 2, groups=2), 4),
        (fz.FactorizedConv2d(4, 4, 3, 40), 12),
        (fz.FactorizedConv2d(4, 4, 3, 5), 5),
    ]:
        assert fz.margin_bounds(conv_net(layer), loader, gamma=1.0).rank == rank


def test_samples_are_run_in_evaluation_mode_without_gradients_and_every_mode_is_restored() -> None:
    model = nn.Sequential(nn.Dropout(0.9), *mlp()).train()
    model[2].eval()  # frozen, as batch norms often are
    seen: list[tuple[bool, bool]] = []
    model.register_forward_hook(lambda module, *_: seen.append((module[0].training, torch.is_grad_enabled())))
    assert fz.margin_bounds(model, LOADER, gamma=1.0).margin_loss == 0.0
    assert seen == [(False, False)] * 2
    assert [module.training for module in model] == [True, True, False, True]
    assert model.training
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fz.margin_bounds(model, [(torch.randn(2, 7), CLASSES[:2])], gamma=1.0)
    assert [module.training for module in model] == [True, True, False, True]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_classes_may_be_whole_numbers_of_any_type(dtype: torch.dtype) -> None:
    loader = [(inputs, classes.to(dtype)) for inputs, classes in LOADER]
    assert fz.margin_bounds(mlp(), loader, gamma=1.0) == fz.margin_bounds(mlp(), LOADER, gamma=1.0)


def test_under_autocast_the_spectra_keep_their_digits() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(fz.FactorizedLinear(2, 9, 2, depth=1), nn.Linear(9, 2))
    loader = [(INPUTS.float(), CLASSES)]
    expected = fz.margin_bounds(model, loader, gamma=1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        bounds = fz.margin_bounds(model, loader, gamma=1.0)
    assert bounds.log10_rank_term == expected.log10_rank_term
    assert bounds.log10_frobenius_term == expected.log10_frobenius_term


@pytest.mark.parametrize(
    ("model", "loader", "options", "message"),
    [
        (mlp(), [], {}, "the loader is empty; margins need samples"),
        (mlp(), [(INPUTS, 1 - CLASSES)], {}, r"a tenth of the samples have a margin of -10\.8 or less.* Pass gamma="),
        (nn.Flatten(), LOADER, {}, "Flatten has no linear or convolutional layer to bound"),
        (nn.Embedding(3, 2), LOADER, {}, "Embedding has no linear or convolutional layer to bound"),
        (mlp(), LOADER, {"gamma": 0.0}, r"gamma must be a finite number above 0, got 0\.0$"),
        (mlp(), LOADER, {"gamma": -1.0}, r"gamma must be a finite number above 0, got -1\.0$"),
        (mlp(), LOADER, {"gamma": math.nan}, "gamma must be a finite number above 0, got nan$"),
        (mlp(), LOADER, {"gamma": math.inf}, "gamma must be a finite number above 0, got inf$"),
        (mlp(), LOADER, {"gamma": "1"}, "gamma must be a finite number above 0, got '1'$"),
        (mlp(), LOADER, {"delta": None}, "delta must be a probability between 0 and 1, got None"),
        (mlp(), [(INPUTS, CLASSES + 1)], {"gamma": 1.0}, r"one class in 0\.\.1 per sample, got \(4,\) of 1\.\.2 for 4"),
        (mlp(), [(INPUTS, CLASSES[:3])], {"gamma": 1.0}, r"one class in 0\.\.1 per sample, got \(3,\)"),
        (mlp(), [(INPUTS * math.nan, CLASSES)], {"gamma": 1.0}, "scores hold NaN or infinity"),
        (diverged(), LOADER, {"gamma": 1.0}, "scores hold NaN or infinity, .* check the model"),
        (mlp(), [(INPUTS.long(), CLASSES)], {"gamma": 1.0}, "inputs of a floating type.*, got torch.int64"),
        (mlp(), [(INPUTS, CLASSES.float())], {"gamma": 1.0}, "classes as whole numbers, got torch.float32"),
        (nn.Linear(2, 1), LOADER, {"gamma": 1.0}, r"two classes or more\), got \(3, 1\)"),
        (mlp(), [{"inputs": INPUTS, "labels": CLASSES}], {}, r"pairs \(inputs, classes\) of tensors, got dict"),
        (mlp(), [(INPUTS, CLASSES, CLASSES)], {}, r"pairs \(inputs, classes\) of tensors, got tuple of 3"),
        (mlp(), [(INPUTS.numpy(), CLASSES)], {}, r"pairs \(inputs, classes\) of tensors, got tuple of 2"),
        (mlp(), [INPUTS], {}, r"pairs \(inputs, classes\) of tensors, got Tensor"),
        (Pair(), LOADER, {}, r"the model must return scores \(samples, classes\) as a tensor, got tuple"),
        (mlp(), LOADER, {"delta": 0.0}, "delta must be a probability between 0 and 1, got 0.0"),
        (mlp(), LOADER, {"delta": 1.0}, "delta must be a probability between 0 and 1, got 1.0"),
    ],
)
def test_what_cannot_be_bounded_says_why(
    model: nn.Module, loader: Loader, options: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fz.margin_bounds(model, loader, **options)
