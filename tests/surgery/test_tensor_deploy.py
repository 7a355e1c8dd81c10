from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import factorized as fz
from factorized.formats.kernel import KernelShape
from factorized.nn.layer import FactorizedLayer
from factorized.planning.select import ALREADY
from factorized.testing import error
from tests.models.tensorized import SCHEMES, dense, images, layers, tensorized
from tests.models.unchanged import unchanged

every_kind = pytest.mark.parametrize("kind", SCHEMES)


def is_plain(model: nn.Module) -> bool:
    return not any(type(module).__module__.startswith("factorized.") for module in model.modules())


@pytest.mark.filterwarnings("ignore:lowered, .*no smaller plain layers compute a")
@every_kind
@pytest.mark.parametrize("to_plain", [fz.compose, fz.lower])
def test_plain_models_compute_the_same(kind: str, to_plain: object) -> None:
    model = tensorized(kind).eval()
    with unchanged(model):
        plain = to_plain(model)  # type: ignore[operator]
    assert is_plain(plain)
    assert error(plain(images()), model(images())) < 1e-11


@every_kind
def test_a_composed_model_has_the_modules_of_the_dense_one(kind: str) -> None:
    assert repr(fz.compose(tensorized(kind))) == repr(dense())


def kinds_of(module: nn.Module) -> list[str]:
    return [
        " ".join((type(p).__name__, *("x".join(map(str, w.shape)) for w in p.parameters() if w.dim() > 1)))
        for p in module
    ]


@pytest.mark.filterwarnings("ignore:lowered, .*no smaller plain layers compute a")
@pytest.mark.parametrize(
    ("kind", "convolution", "linear"),
    [
        ("train", ["Conv2d 2x8x3x3", "Conv2d 12x2x1x1"], ["Linear 2x48", "Linear 24x2"]),
        (
            "tucker",
            ["Conv2d 2x8x1x1", "Conv2d 2x2x3x3", "Conv2d 12x2x1x1"],
            ["Linear 4x48", "Linear 4x4", "Linear 24x4"],
        ),
        ("separable-train", ["Conv2d 8x1x3x3", "Conv2d 12x8x1x1"], None),
        ("separable-tucker", ["Conv2d 8x1x3x3", "Conv2d 12x8x1x1"], None),
        ("monarch", ["Conv2d 8x4x3x3", "ChannelShuffle", "Conv2d 12x4x1x1"], None),
    ],
)
def test_lowered_layers_are_a_few_plain_ones(kind: str, convolution: list[str], linear: list[str] | None) -> None:
    lowered = fz.lower(tensorized(kind))
    assert kinds_of(lowered[3]) == convolution  # type: ignore[index]
    first = next(part for part in lowered[3] if max(getattr(part, "kernel_size", (1,))) > 1)  # type: ignore[index]
    assert (first.stride, first.padding) == ((2, 2), (1, 1))
    if linear is not None:
        assert kinds_of(lowered[9]) == linear  # type: ignore[index]
    assert sum(p.numel() for p in lowered.parameters()) < sum(p.numel() for p in dense().parameters())


def test_a_chain_larger_than_its_dense_layer_is_composed() -> None:
    format = fz.TensorTrain().at_rank(KernelShape.of((12, 12)), (3, 12, 4))
    assert isinstance(fz.lower(fz.FactorizedLinear(12, 12, format)), nn.Linear)
    format = fz.TensorTrain().at_rank(KernelShape.of((8, 4, 3, 3), groups=2), 2)
    with pytest.warns(UserWarning, match=r"the model 54 → 288 \(no smaller plain layers compute a tensor_train\)"):
        assert isinstance(fz.lower(fz.FactorizedConv2d(8, 8, 3, format, groups=2)), nn.Conv2d)


@every_kind
def test_a_saved_model_loads_into_a_fresh_one_bit_for_bit(kind: str, tmp_path: Path) -> None:
    model = tensorized(kind, torch.float32).eval()
    fz.save(model, tmp_path)
    torch.manual_seed(9)
    loaded = fz.load(tmp_path, dense(torch.float32)).eval()
    assert {n: repr(m) for n, m in layers(loaded).items()} == {n: repr(m) for n, m in layers(model).items()}
    assert {n: layer.format for n, layer in layers(loaded).items()} == {n: m.format for n, m in layers(model).items()}
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key
    x = images(dtype=torch.float32)
    assert torch.equal(loaded(x), model(x))


def test_low_rank_and_tensors_live_in_one_model_and_one_checkpoint(tmp_path: Path) -> None:
    model = fz.factorize(dense(), rank=2, include=["9"])
    fz.factorize(model, fz.Tucker(refinements=2), rank=2, include=["3", "6"])
    assert [(form.kind, form.format.name) for form in fz.forms(model)] == [
        ("conv", "tucker"),
        ("conv", "tucker"),
        ("linear", "product"),
    ]
    optimizer = torch.optim.SGD(fz.parameter_groups(model, weight_decay=0.1), lr=0.1)
    fz.FrobeniusDecay(model, 0.1).attach(optimizer)
    model(images()).sum().backward()
    optimizer.step()
    fz.save(model, tmp_path)
    loaded = fz.load(tmp_path, dense())
    assert error(loaded.eval()(images()), model.eval()(images())) == 0
    assert loaded[3].format.refinements == 2  # type: ignore[index, union-attr]


@every_kind
def test_a_dense_checkpoint_is_decomposed_as_factorize_does(kind: str) -> None:
    source = dense()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    expected = fz.factorize(dense(), SCHEMES[kind], rank=2)
    expected = fz.load_dense(expected, source.state_dict())
    direct = dense()
    direct.load_state_dict(source.state_dict())
    direct = fz.factorize(direct, SCHEMES[kind], rank=2)
    for key, value in direct.state_dict().items():
        assert error(expected.state_dict()[key], value) < 1e-9 or "num_batches" in key, key


def test_at_full_rank_a_dense_checkpoint_gives_the_dense_model() -> None:
    source = dense().eval()
    for scheme in (fz.TensorTrain(), fz.Tucker(), fz.Monarch()):
        plan = fz.plan(source, scheme, rank=1)
        full = [entry if entry.format is None else at_full_rank(scheme, entry) for entry in plan.entries]
        model = fz.factorize(dense(), replace(plan, entries=tuple(full)), init="default").eval()
        assert error(model(images()), source(images())) > 1e-2
        fz.load_dense(model, source.state_dict())
        assert error(model(images()), source(images())) < 1e-10


def at_full_rank(scheme: Any, entry: fz.PlanEntry) -> fz.PlanEntry:
    return replace(entry, format=scheme.at_scale(entry.format.shape, 1e9))


@every_kind
def test_a_model_on_the_meta_device_is_planned_built_and_loaded(kind: str, tmp_path: Path) -> None:
    model = tensorized(kind, torch.float32).eval()
    fz.save(model, tmp_path)
    loaded = fz.load(tmp_path, dense(torch.float32).to("meta")).eval()
    assert error(loaded(images(dtype=torch.float32)), model(images(dtype=torch.float32))) == 0


def test_tensorized_layers_are_not_tensorized_again() -> None:
    model = tensorized("train")
    made = fz.plan(model, fz.Tucker(), rank=1, keep_first_and_last=False)
    assert {entry.reason for entry in made.skipped} == {ALREADY}
    assert all(not isinstance(model.get_submodule(entry.name), FactorizedLayer) for entry in made.selected)


def test_autotune_measures_every_execution_of_tensorized_layers() -> None:
    model = tensorized("tucker", torch.float32)
    measured = fz.autotune(model, images(dtype=torch.float32), rounds=1)
    assert {name: set(times) for name, times in measured.items()} == {
        name: set(layer.executions) for name, layer in layers(model).items()
    }
    assert all(layer.execution in layer.executions for layer in layers(model).values())


def test_tied_layers_share_their_cores_all_the_way(tmp_path: Path) -> None:
    def tied() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12))
        model[2].weight = model[0].weight
        return model.double()

    model = fz.factorize(tied(), fz.TensorTrain(), rank=2, keep_first_and_last=False)
    fz.save(model, tmp_path)
    for made in (model, fz.load(tmp_path, tied())):
        assert all(a is b for a, b in zip(made[0].cores, made[2].cores, strict=True))  # type: ignore[index, union-attr]
        assert len(fz.forms(made)) == 1
    composed = fz.compose(model)
    assert composed[0].weight is composed[2].weight  # type: ignore[index]
    x = torch.randn(3, 12, dtype=torch.float64)
    assert error(composed(x), model(x)) < 1e-12


def test_of_lowered_pointwise_layers_the_first_one_has_the_stride() -> None:
    for scheme in (fz.TensorTrain(), fz.Tucker()):
        format = scheme.at_rank(KernelShape.of((16, 16, 1, 1)), 2)
        layer = fz.FactorizedConv2d(16, 16, 1, format, stride=(2, 1), padding=1, dtype=torch.float64)
        lowered: Any = fz.lower(nn.Sequential(layer))[0]  # type: ignore[index]
        assert (lowered[0].stride, lowered[0].padding) == ((2, 1), (1, 1))
        assert {(part.stride, part.padding) for part in lowered[1:]} == {((1, 1), (0, 0))}
        x = torch.randn(2, 16, 7, 6, dtype=torch.float64)
        assert error(lowered(x), layer.to_dense()(x)) < 1e-12
