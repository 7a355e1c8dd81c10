"""Ranks by their effect on a loss: ``fz.Calibrated(batches, loss=...)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import factorized as fz
from tests.models.unchanged import unchanged
from tests.planning.models_for_planning import Mlp
from tests.planning.test_calibrated_ranks import WHOLE, Branches, ranks


class TwoHeads(nn.Module):
    """A trunk whose first layer can run without gradients, and two heads."""

    def __init__(self, first_learns: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head, self.other = (nn.Linear(24, 24) for _ in range(4))
        self.first_learns = first_learns

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.set_grad_enabled(self.first_learns and torch.is_grad_enabled()):
            x = F.relu(self.first(x))
        x = F.relu(self.second(x))
        return self.head(x), self.other(x)


class Mixed(nn.Module):
    """Two layers of which each example uses one more than the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor, share: Tensor) -> Tensor:
        out: Tensor = self.head(share * F.relu(self.left(x)) + (1 - share) * F.relu(self.right(x)))
        return out


@pytest.mark.parametrize("sizes", [[65, 65], [128, 2], [1] * 130])
def test_all_examples_count_alike_for_the_loss_however_they_are_batched(sizes: list[int]) -> None:
    model, x, labels = Mixed(), torch.randn(130, 32), torch.randint(10, (130,))
    share = torch.tensor([0.3] * 128 + [1.0] * 2).unsqueeze(-1)  # the last two would favour the left layer
    batches = [((a, b), y) for a, b, y in zip(*(part.split(sizes) for part in (x, share, labels)), strict=True)]
    whole, ours = (
        ranks(fz.plan(model, ratio=0.6, calibration=fz.Calibrated(given, loss=F.cross_entropy), **WHOLE))
        for given in ([((x, share), labels)], batches)
    )
    assert whole["left"] < 0.6 * whole["right"]
    assert ours == whole


@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize(("first_learns", "named"), [(True, "other"), (False, "first, other")])
def test_layers_that_the_loss_does_not_depend_on_are_named_and_have_the_mean_effect(
    first_learns: bool, named: str, size: int | None
) -> None:
    batches = [(torch.randn(60, 24), torch.randn(60, 24))]
    given = fz.Calibrated(batches, loss=lambda out, y: F.mse_loss(out[0], y), layers_per_pass=size)
    with pytest.warns(UserWarning, match=f"the loss does not depend on {named}, so the mean effect") as caught:
        made = fz.plan(TwoHeads(first_learns), ratio=0.6, calibration=given, **WHOLE)
    assert caught[0].filename == __file__
    assert all(3 < entry.rank < 12 for entry in made.layers)  # by their weights, the layers named would take it all
    assert len(made.layers) == 4


@pytest.mark.parametrize("row", [torch.zeros(32), torch.rand(32, generator=torch.Generator().manual_seed(0))])
def test_a_layer_of_constant_inputs_whose_bias_keeps_its_outputs_has_the_mean_effect(row: Tensor) -> None:
    batches = [((torch.randn(50, 32), row.expand(50, 32)), torch.randn(50, 64)) for _ in range(3)]
    given = fz.Calibrated(batches, loss=F.mse_loss)
    with pytest.warns(UserWarning, match="the loss does not depend on right, so the mean effect"):
        made = fz.plan(Branches(), ratio=0.6, calibration=given, **WHOLE)
    assert all(5 < entry.rank < 14 for entry in made.layers)  # type: ignore[operator]


def test_a_weight_that_the_loss_depends_on_in_one_of_two_uses_has_the_effect_of_that_one() -> None:
    class Tied(nn.Module):
        def __init__(self, both: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table, self.mix, self.head, self.both = (
                nn.Embedding(40, 16),
                nn.Linear(16, 16),
                nn.Linear(16, 40),
                both,
            )
            self.head.weight = self.table.weight

        def forward(self, ids: Tensor) -> Tensor:
            found = F.embedding(ids, self.table.weight) if not self.both else self.table(ids).detach()
            out: Tensor = self.head(self.mix(found))
            return out

    ids = torch.arange(40).repeat(8)
    given = fz.Calibrated([(ids, ids)], loss=F.cross_entropy)
    one, two = (ranks(fz.plan(Tied(both), ratio=0.6, calibration=given, **WHOLE)) for both in (False, True))
    assert one == two


class Backless(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise RuntimeError("no way back")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda out: out.sum(), "batch 0 .*: loss raised TypeError: .* called with the model's outputs and the other"),
        (lambda out, y: F.cross_entropy(out, y + 9), r"Target \d+ is out of bounds\. It is called with"),
        (lambda out, y: out.sum(-1), r"without dimensions, got one of shape \(30,\)"),
        (lambda out, y: 0.5, r"loss must return one finite number as a tensor without dimensions, got 0\.5"),
        (lambda out, y: out.sum() * torch.nan, "loss must return one finite number"),
        (lambda out, y: y.float().sum(), "loss .* does not depend on the outputs of any layer"),
        (lambda out, y: torch.ones((), requires_grad=True), "loss .* does not depend on the outputs of any layer"),
        (lambda out, y: (out - out.detach()).square().sum().sqrt(), "gradients of the loss .* hold NaN or infinite"),
        (lambda out, y: Backless.apply(out), "backward pass of the loss raised RuntimeError: no way back. Leave out"),
    ],
)
def test_a_loss_that_cannot_be_used_says_why(loss: Any, message: str) -> None:
    model = Mlp()
    given = fz.Calibrated([(torch.randn(30, 20), torch.randint(5, (30,)))], loss=loss)
    with unchanged(model), pytest.raises(ValueError, match=message):
        fz.plan(model, ratio=0.5, allocate="spectrum", calibration=given)
    assert all(parameter.requires_grad for parameter in model.parameters())


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.scale * out, y)


@pytest.mark.parametrize("wrap", [lambda loss: loss, lambda loss: lambda out, y: loss(out, y)], ids=["given", "called"])
@pytest.mark.parametrize("before", [None, torch.full((5,), 2.0)])
def test_tensors_that_a_loss_uses_get_no_gradients(wrap: Callable[[Any], Any], before: Tensor | None) -> None:
    loss, x = Scaled(), torch.randn(30, 20, requires_grad=True)
    loss.scale.grad = None if before is None else before.clone()
    given = fz.Calibrated([(x, torch.randint(5, (30,)))], loss=wrap(loss))
    fz.plan(Mlp(), ratio=0.5, allocate="spectrum", calibration=given)
    assert x.grad is None
    torch.testing.assert_close(loss.scale.grad, before)
    assert loss.scale.requires_grad
    assert x.requires_grad


def test_a_loss_is_a_function() -> None:
    with pytest.raises(ValueError, match=r"loss must be a function of outputs and labels, .* got 'cross_entropy'"):
        fz.Calibrated([], loss="cross_entropy")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"got <class .*CrossEntropyLoss'>; make one: CrossEntropyLoss\(\)$"):
        fz.Calibrated([], loss=nn.CrossEntropyLoss)


def test_no_layer_is_left_with_next_to_nothing_by_its_small_gradients() -> None:
    model = Branches(importance=0.3)
    torch.manual_seed(1)
    batches = [((torch.randn(200, 32), torch.randn(200, 32)), torch.randn(200, 64))]
    made = fz.plan(model, ratio=0.4, calibration=fz.Calibrated(batches, loss=F.mse_loss), **WHOLE)
    assert 1 < ranks(made)["right"] < ranks(made)["left"]  # by what is lost alone it would be 1
