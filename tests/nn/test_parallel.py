"""Tensor parallelism of single layers, in one process; tests/distributed/test_meshes.py has more of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.parametrize
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

import factorized as fz
from factorized._torch import leave_process_group
from factorized.formats.kernel import KernelShape
from factorized.nn.embedding_bag import FactorizedEmbeddingBag


class Turned(nn.Module):
    """A linear that keeps its weight transposed."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(inputs, outputs)), nn.Parameter(torch.empty(outputs))


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    leave_process_group()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: fz.FactorizedLinear(6, 5, 3),
    "deep": lambda: fz.FactorizedLinear(6, 5, 3, depth=2, bias=False),
    "transposed": lambda: fz.FactorizedLinear(6, 5, 3, depth=1, dense_type=Turned),
    "embedding": lambda: fz.FactorizedEmbedding(6, 5, 3, 1, depth=1, scale_grad_by_freq=True),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    layer = LAYERS[name]().double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


def inputs(name: str) -> Tensor:
    return torch.randint(0, 6, (2, 4)) if name == "embedding" else torch.randn(2, 4, 6, dtype=torch.double)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("style", [fz.ColwiseParallel, fz.RowwiseParallel])
@pytest.mark.parametrize("name", LAYERS)
def test_a_parallel_layer_computes_what_the_layer_does(name: str, style: type[ParallelStyle], mesh: DeviceMesh) -> None:
    expected, x = build(name), inputs(name)
    layer = parallelize_module(build(name), mesh, style(input_layouts=Replicate(), output_layouts=Replicate()))
    for each in (expected, layer):
        each(x).square().sum().backward()
    torch.testing.assert_close(layer(x), expected(x))
    for own, wanted in zip(layer.parameters(), expected.parameters(), strict=True):
        assert isinstance(own, DTensor)
        torch.testing.assert_close(whole(own.grad), wanted.grad)


def placements(layer: nn.Module) -> dict[str, Shard | Replicate]:
    return {name: parameter.placements[0] for name, parameter in layer.named_parameters()}


@pytest.mark.parametrize(
    ("name", "style", "split"),
    [
        ("linear", fz.ColwiseParallel(), {"U", "bias"}),
        ("linear", fz.RowwiseParallel(), {"V"}),
        ("deep", fz.ColwiseParallel(), {"U"}),
        ("transposed", fz.ColwiseParallel(), {"V", "bias"}),
        ("transposed", fz.RowwiseParallel(), {"U"}),
        ("embedding", fz.ColwiseParallel(), {"V"}),
        ("embedding", fz.RowwiseParallel(), {"U"}),
    ],
)
def test_one_outer_factor_is_split_by_rows_and_the_others_are_whole(
    name: str, style: ParallelStyle, split: set[str], mesh: DeviceMesh
) -> None:
    found = placements(parallelize_module(build(name), mesh, style))
    assert {part for part, placement in found.items() if placement == Shard(0)} == split
    assert {part for part, placement in found.items() if placement == Replicate()} == found.keys() - split


@pytest.mark.parametrize("dense", [nn.Linear(6, 4), nn.Embedding(6, 4)])
def test_a_dense_layer_is_split_as_torch_does(dense: nn.Module, mesh: DeviceMesh) -> None:
    layer = parallelize_module(dense, mesh, fz.ColwiseParallel())
    assert layer.weight.placements == (Shard(0 if isinstance(dense, nn.Linear) else 1),)


def matrix_format(scheme: fz.Monarch) -> fz.FactorizedLinear:
    return fz.FactorizedLinear(8, 6, scheme.at_rank(KernelShape.of((6, 8)), 2))


def dropped() -> nn.Module:
    return fz.drop_connect(nn.Sequential(fz.FactorizedLinear(6, 5, 3)), 0.1)[0]


def computed() -> nn.Module:
    layer = fz.FactorizedLinear(6, 5, 3)
    nn.utils.parametrize.register_parametrization(layer, "V", nn.Identity())
    return layer


@pytest.mark.parametrize(
    ("make", "style", "message"),
    [
        (computed, fz.ColwiseParallel(), "V of .* is not a parameter: a parametrization or pruning computes it"),
        (
            lambda: fz.FactorizedConv2d(4, 4, 3, 2),
            fz.ColwiseParallel(),
            "splits linears and embeddings, got Factorized",
        ),
        (
            lambda: FactorizedEmbeddingBag(6, 5, 3),
            fz.ColwiseParallel(),
            "splits linears and embeddings, got Factorized",
        ),
        (lambda: matrix_format(fz.Monarch(blocks=2)), fz.RowwiseParallel(), "factorize it with fz.LowRank"),
        (lambda: fz.FactorizedLinear(6, 5, 3, execution="composed"), fz.ColwiseParallel(), 'execution to "auto"'),
        (lambda: fz.FactorizedEmbedding(6, 5, 3, sparse=True), fz.RowwiseParallel(), "use sparse=False"),
        (lambda: fz.FactorizedLinear(6, 5, 3), fz.RowwiseParallel(output_layouts=Partial()), "output_layouts must be"),
        (dropped, fz.ColwiseParallel(), r"fz.drop_connect\(model, 0\)"),
    ],
)
def test_what_cannot_be_split_is_refused_with_a_remedy(
    make: Callable[[], nn.Module], style: ParallelStyle, message: str, mesh: DeviceMesh
) -> None:
    layer = make()
    with pytest.raises(ValueError, match=message):
        parallelize_module(layer, mesh, style)
    assert not any(isinstance(parameter, DTensor) for parameter in layer.parameters())


def test_a_layer_is_split_once_and_over_one_dimension(mesh: DeviceMesh) -> None:
    layer = build("linear")
    with pytest.raises(ValueError, match=r'pass one of them, such as mesh\["tp"\]'):
        parallelize_module(layer, init_device_mesh("cpu", (1, 1)), fz.ColwiseParallel())
    parallelize_module(layer, mesh, fz.ColwiseParallel())
    with pytest.raises(ValueError, match="before fully_shard"):
        parallelize_module(layer, mesh, fz.RowwiseParallel())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight


def test_tied_layers_stay_tied(mesh: DeviceMesh) -> None:
    model = fz.factorize(Tied(), rank=3, include=["embed", "head"])
    parallelize_module(model, mesh, {"embed": fz.RowwiseParallel(), "head": fz.ColwiseParallel()})
    assert model.head.U is model.embed.U
    assert model.head.V is model.embed.V
    assert len(fz.forms(model)) == 1


def test_tied_layers_that_are_split_differently_are_refused(mesh: DeviceMesh) -> None:
    model = fz.factorize(Tied(), rank=3, include=["embed", "head"])
    with pytest.raises(ValueError, match="use RowwiseParallel for an embedding and ColwiseParallel for the linear"):
        parallelize_module(model, mesh, {"embed": fz.ColwiseParallel(), "head": fz.ColwiseParallel()})


def test_frozen_factors_and_attributes_of_parameters_are_kept(mesh: DeviceMesh) -> None:
    layer = build("linear")
    layer.V.requires_grad_(False)
    layer.U.marked = "kept"
    parallelize_module(layer, mesh, fz.ColwiseParallel())
    assert [parameter.requires_grad for parameter in (layer.U, layer.V, layer.bias)] == [True, False, True]
    assert layer.U.marked == "kept"


def test_dropped_entries_and_other_executions_are_refused_after_the_split(mesh: DeviceMesh) -> None:
    model = nn.Sequential(parallelize_module(build("linear"), mesh, fz.ColwiseParallel()))
    with pytest.raises(ValueError, match="no factorized linear or convolution to tune"):
        fz.autotune(model, inputs("linear"))
    fz.drop_connect(model, 0.1)
    with pytest.raises(ValueError, match="which tensor parallelism does not form"):
        model(inputs("linear"))
    model.eval()(inputs("linear"))


def test_the_output_may_stay_distributed(mesh: DeviceMesh) -> None:
    layer = parallelize_module(build("linear"), mesh, fz.ColwiseParallel(use_local_output=False))
    output = layer(inputs("linear"))
    assert isinstance(output, DTensor)
    assert output.placements == (Shard(2),)
    assert output.shape == (2, 4, 5)


def test_a_parallel_layer_runs_under_autocast(mesh: DeviceMesh) -> None:
    expected, x = build("linear").float(), torch.randn(2, 4, 6)
    layer = parallelize_module(deepcopy(expected), mesh, fz.RowwiseParallel())
    expected.execution = "chain"
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), expected(x))


def test_a_parallel_layer_compiles_without_a_break(mesh: DeviceMesh) -> None:
    model = nn.Sequential(build("linear"))
    x = inputs("linear")
    expected = model(x)
    parallelize_module(model, mesh, {"0": fz.ColwiseParallel()})
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
