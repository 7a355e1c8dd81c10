from __future__ import annotations

import math

import pytest
import torch

import factorized as fz
from factorized.testing import error
from tests.models.tensorized import SCHEMES, cores, images, layers, tensorized


@pytest.mark.parametrize("kind", SCHEMES)
def test_a_diagnosis_has_the_norms_of_the_whole_tensor(kind: str) -> None:
    model = tensorized(kind)
    for found, layer in zip(fz.diagnose(model, lr=0.1), layers(model).values(), strict=True):
        matrix = fz.forms(layer)[0].compose(cores(layer))
        values = torch.linalg.svdvals(matrix)
        assert found.kind == layer.form_kind
        assert found.frobenius == pytest.approx(layer.product.norm().item())
        assert found.effective_step == pytest.approx(0.1 / layer.product.square().sum().item())
        assert found.spectral == pytest.approx(values.max().item())
        assert found.nuclear == pytest.approx(values.sum().item())
        assert found.nuclear_bound is None
        assert len(found.non_orthogonality) == len(cores(layer))
    assert fz.diagnose(model, lr=0.1, spectrum=False)[0].spectral is None


def test_a_fresh_train_is_orthogonal_but_for_its_last_core() -> None:
    found = fz.diagnose(tensorized("train"), lr=0.1)[0]
    assert max(found.non_orthogonality[:-1]) < 1e-6


@pytest.mark.parametrize("kind", SCHEMES)
def test_norms_are_matched_by_scaling_all_cores_alike(kind: str) -> None:
    model = tensorized(kind)
    matcher = fz.NormMatcher(model)
    matcher.match(dict.fromkeys(matcher.record(), 2.5))
    for layer in layers(model).values():
        assert error(layer.product.norm(), torch.tensor(2.5)) < 1e-10


def test_bounds_take_the_composed_weights() -> None:
    model = tensorized("train", torch.float32)
    loader = [(images(dtype=torch.float32), torch.arange(4))]
    ours = fz.margin_bounds(model, loader, gamma=0.1)
    dense = fz.margin_bounds(fz.compose(model), loader, gamma=0.1)
    assert math.isclose(ours.log10_frobenius_term, dense.log10_frobenius_term, rel_tol=1e-4)
