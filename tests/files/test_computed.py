"""Factors that a parametrization, a weight norm or pruning computes, on their way into files and plain models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune, weight_norm

import factorized as fz
from tests.decay.test_computed_factors import COMPUTED, four

HOOKED: dict[str, Callable[[nn.Module], object]] = {
    "0.U": lambda model: prune.l1_unstructured(model[0], "U", 0.5),
    "2.cores.1": lambda model: prune.l1_unstructured(model[2].cores, "1", 0.5),
    "3.weight": lambda model: weight_norm(model[3]),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_a_computed_factor_is_not_saved(name: str, tmp_path: Path) -> None:
    model = four()
    COMPUTED[name](model)
    with pytest.raises(ValueError, match=rf"^{name[0]}: a parametrization, .* computes its factors or bias"):
        fz.save(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_computed_bias_is_not_saved(tmp_path: Path) -> None:
    model = four()
    prune.l1_unstructured(model[1], "bias", 0.5)
    with pytest.raises(ValueError, match=r"^1: a parametrization"):
        fz.save(model, tmp_path)


def test_a_factor_that_was_pruned_for_good_is_saved_and_composed(tmp_path: Path) -> None:
    model = four().eval()
    prune.l1_unstructured(model[0], "U", 0.5)
    prune.remove(model[0], "U")
    fz.save(model, tmp_path)
    x = torch.randn(5, 8)
    torch.testing.assert_close(fz.compose(model)(x), model(x))


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("convert", [fz.compose, fz.lower])
@pytest.mark.parametrize("name", HOOKED)
def test_what_hooks_compute_is_refused_by_its_name(name: str, convert: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(*four()[:3], nn.Linear(8, 8))
    HOOKED[name](model)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"^{name} is computed by pruning, or by torch's older weight_norm"):
            convert(model)
        with torch.no_grad():
            model(torch.randn(5, 8))  # which leaves tensors that torch would copy


@pytest.mark.parametrize("convert", [fz.compose, fz.lower, lambda model: fz.save(model, "nowhere")])
def test_shrunk_heads_that_cannot_be_read_are_named(convert: Callable[[nn.Module], object]) -> None:
    model = nn.Sequential(nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 16))
    fz.factorize(model, rank=4, attention="heads", keep_first_and_last=False)
    parametrize.register_parametrization(model[0].q_proj, "weight", nn.Identity())
    with pytest.raises(ValueError, match=r"^0: its heads are shrunk, and cannot be read: "):
        convert(model)
