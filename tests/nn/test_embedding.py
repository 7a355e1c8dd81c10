from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized import FactorizedEmbedding, Monarch, TensorTrain, Tucker
from factorized.formats.kernel import KernelShape
from factorized.formats.scheme import Scheme
from factorized.testing import error
from tests.nn.test_contract import ENTRIES, WIDTH, indices

TENSORS = TensorTrain(), Tucker(), fz.Residual(TensorTrain())


def test_of_a_sparse_table_the_rows_get_sparse_gradients() -> None:
    layer = FactorizedEmbedding(ENTRIES, WIDTH, 3, sparse=True)
    layer(torch.tensor([1, 4, 4])).sum().backward()
    assert layer.U.grad.is_sparse
    assert layer.U.grad.coalesce().indices().tolist() == [[1, 4]]
    assert not layer.V.grad.is_sparse


@pytest.mark.parametrize("sparse", [False, True])
def test_a_padding_row_that_is_not_zero_is_looked_up_but_trains_nothing(sparse: bool) -> None:
    layer = FactorizedEmbedding(ENTRIES, WIDTH, 3, 2, depth=1, sparse=sparse, init=nn.init.normal_)
    nn.init.normal_(layer.U)
    padding = torch.full((4,), 2)
    y = layer(padding)
    assert error(y, layer.weight[padding]) < 1e-6
    y.sum().backward()
    assert [factor.grad.to_dense().abs().max().item() for factor in layer.factors] == [0, 0, 0]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of torch's own code
@pytest.mark.parametrize("settings", [{"padding_idx": 2}, {"padding_idx": 2, "scale_grad_by_freq": True}], ids=str)
def test_a_trace_passes_the_check_of_torch_and_has_the_same_gradients(settings: dict[str, Any]) -> None:
    layer, x = FactorizedEmbedding(ENTRIES, WIDTH, 3, **settings), torch.tensor([[1, 2], [4, 4]])
    traced = torch.jit.trace(layer, x)
    assert "PythonOp" not in str(traced.graph)
    for given in (x, x.mT.repeat(2, 1)):
        expected, found = layer(given), traced(given)
        assert torch.equal(found, expected)
        wanted = torch.autograd.grad(expected.square().sum(), layer.factors)
        assert max(map(error, torch.autograd.grad(found.square().sum(), [traced.U, traced.V]), wanted)) < 1e-6


@pytest.mark.parametrize(
    "scheme", [fz.LowRank(), fz.Overcomplete("deep"), *TENSORS, fz.Monarch(), fz.Kronecker(), fz.Residual()], ids=str
)
@pytest.mark.filterwarnings("ignore:.*the row of padding_idx is zero")
def test_formats_tell_whether_padding_stays_zero_in_training(scheme: Scheme) -> None:
    torch.manual_seed(0)
    scale = None if isinstance(scheme, fz.Overcomplete) else 0.3
    model = nn.Sequential(nn.Embedding(16, 8, padding_idx=2)).double()
    fz.factorize(model, scheme, rank_scale=scale, init="spectral", keep_first_and_last=False)
    optimizer = torch.optim.SGD(fz.parameter_groups(model, weight_decay=0.1), lr=0.1)
    fz.FrobeniusDecay(model, 0.1).attach(optimizer)
    for _ in range(3):
        (model(torch.arange(16)) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (model(torch.tensor([2])).norm() < 1e-6).item() == model[0].format.keeps_zero_rows


@pytest.mark.parametrize("made", ["factorized", "truncated", "calibrated"])
def test_padding_stays_exactly_zero_with_an_optimizer_that_rescales_the_decay(made: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(40, 24, padding_idx=2))
    init = fz.Calibrated([torch.arange(40)]) if made == "calibrated" else "spectral"
    fz.factorize(model, rank=6, init=init, keep_first_and_last=False)
    if made == "truncated":
        fz.truncate(model, rank=5)
    optimizer = torch.optim.Adam(fz.parameter_groups(model, weight_decay=0), lr=0.01)
    fz.FrobeniusDecay(model, 0.1, decoupled=False).attach(optimizer)
    for _ in range(10):
        model(torch.arange(40)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model(torch.tensor([2])).count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_count_frequent_entries_right(dtype: torch.dtype) -> None:
    table = FactorizedEmbedding(4, 6, 2, scale_grad_by_freq=True)
    half = FactorizedEmbedding.from_dense(table.to_dense().to(dtype), 2, init=None)
    half.load_state_dict(table.state_dict())
    for layer in (table, half):  # 1000 repetitions, where bfloat16 itself cannot count beyond 256
        layer(torch.zeros(1000, dtype=torch.long)).float().sum().backward()
    assert error(half.V.grad, table.V.grad) < 2e-2


def test_it_takes_gradients_per_example() -> None:
    layer = FactorizedEmbedding(ENTRIES, WIDTH, 3, 2, scale_grad_by_freq=True)
    parameters, batch = dict(layer.named_parameters()), indices((3,))

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    per_example = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, batch)
    for n, x in enumerate(batch):
        for name, expected in torch.func.grad(loss)(parameters, x).items():
            assert error(per_example[name][n], expected) < 1e-6


def test_its_forward_derivative_is_that_of_the_dense_table() -> None:
    layer = FactorizedEmbedding(ENTRIES, WIDTH, 3, 2, scale_grad_by_freq=True).double()
    dense, x = layer.to_dense(), indices((3,))
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    tangents = {name: torch.randn_like(parameter) for name, parameter in parameters.items()}

    def table(parameters: dict[str, Tensor]) -> Tensor:
        return parameters["U"] @ parameters["V"].mT

    def run(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x,))

    def run_dense(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(dense, {"weight": table(parameters)}, (x,))

    actual, expected = (torch.func.jvp(f, (parameters,), (tangents,))[1] for f in (run, run_dense))
    assert error(actual, expected) < 1e-12


def test_it_takes_32_bit_indices_and_none_at_all() -> None:
    layer = FactorizedEmbedding(ENTRIES, WIDTH, 3, 2, scale_grad_by_freq=True)
    x = indices((3,))
    assert error(layer(x.int()), layer(x)) == 0
    assert layer(x[:0]).shape == (0, 8, WIDTH)


@pytest.mark.parametrize("padding_idx", [0, 8, -1, -9])
def test_padding_counts_from_either_end_as_in_torch(padding_idx: int) -> None:
    dense = nn.Embedding(ENTRIES, WIDTH, padding_idx)
    assert FactorizedEmbedding.from_dense(dense, 3).padding_idx == dense.padding_idx
    assert FactorizedEmbedding(ENTRIES, WIDTH, 3, padding_idx).padding_idx == dense.padding_idx


@pytest.mark.parametrize("padding_idx", [9, -10])
def test_padding_outside_the_table_is_refused(padding_idx: int) -> None:
    with pytest.raises(ValueError, match=rf"padding_idx must be in -9\.\.8, got {padding_idx}"):
        FactorizedEmbedding(ENTRIES, WIDTH, 3, padding_idx)


def test_a_table_that_renormalizes_its_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_norm must be None, got 1\.5: it renormalizes rows"):
        FactorizedEmbedding.from_dense(nn.Embedding(ENTRIES, WIDTH, max_norm=1.5), 3)


@pytest.mark.parametrize("scheme", [TensorTrain(), Tucker(), Monarch(blocks=3)], ids=str)
def test_a_table_without_thin_rows_refuses_what_needs_them(scheme: Scheme) -> None:
    format = scheme.at_rank(KernelShape(ENTRIES, WIDTH), 1)
    with pytest.raises(ValueError, match=r"sparse=True needs a core with a row per entry, which .* use LowRank"):
        FactorizedEmbedding(ENTRIES, WIDTH, format, sparse=True)
    with pytest.raises(ValueError, match="padding_idx=2 needs a row of zeros"):
        FactorizedEmbedding(ENTRIES, WIDTH, format, 2, init="default")
    assert FactorizedEmbedding(ENTRIES, WIDTH, format, 2).weight.isfinite().all()
