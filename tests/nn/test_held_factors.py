from __future__ import annotations

import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import factorized as fz
from factorized.nn.held_factors import FactorizedWeight, _in_one_piece
from factorized.nn.held_weight import held_weights
from factorized.testing import error

INPUTS, HIDDEN = 6, 8
SETTINGS: list[tuple[type[nn.RNNBase], dict[str, Any]]] = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True, "proj_size": 3}),
    (nn.LSTM, {"num_layers": 2, "bias": False}),
    (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    (nn.GRU, {"bias": False, "batch_first": True}),
    (nn.RNN, {"nonlinearity": "relu"}),
]


def low_rank(dense: nn.Module) -> Any:
    """Return a factorized copy of ``dense`` whose factors are not those of a decomposition."""
    model = fz.factorize(nn.Sequential(deepcopy(dense)), rank_scale=0.4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model[0]  # type: ignore[index]


def tensors(outputs: Any) -> list[Tensor]:
    """Return all tensors of what a recurrent network returns."""
    if isinstance(outputs, Tensor):
        return [outputs]
    return [tensor for part in outputs if part is not None for tensor in tensors(part)]


@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
def test_a_recurrent_network_computes_what_its_composed_one_does(
    kind: type[nn.RNNBase], settings: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    layer = low_rank(kind(INPUTS, HIDDEN, **settings).double())
    dense = fz.compose(nn.Sequential(layer))[0]  # type: ignore[index]
    assert type(dense) is kind
    assert isinstance(layer, kind)
    x = torch.randn(5, 4, INPUTS, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([4, 4, 2, 1, 1]) if settings.get("batch_first") else torch.tensor([5, 3, 2, 1])
    packed = pack_padded_sequence(x, lengths, batch_first=settings.get("batch_first", False))
    _, hx = dense(x)
    for arguments in ((x,), (x, hx), (packed,), (x[:, 0],)):
        found, expected = tensors(layer(*arguments)), tensors(dense(*arguments))
        assert [error(a, b) < 1e-12 for a, b in zip(found, expected, strict=True)] == [True] * len(expected)
    assert isinstance(layer(packed)[0], PackedSequence)
    keys = list(held_weights(dense))
    through = torch.autograd.grad(dense(x)[0].square().sum(), [getattr(dense, key) for key in keys])
    for key, gradient in zip(keys, through, strict=True):
        factors = layer.factors.get_submodule(key).factors
        own = torch.autograd.grad(layer(x)[0].square().sum(), factors, retain_graph=True)
        reference = torch.autograd.grad(getattr(layer, key), factors, gradient)
        assert [error(a, b) < 1e-10 for a, b in zip(own, reference, strict=True)] == [True] * len(own)


def test_between_its_layers_it_drops_as_the_dense_one_does() -> None:
    layer = low_rank(nn.LSTM(INPUTS, HIDDEN, num_layers=2, dropout=0.5).double())
    dense, x = fz.compose(nn.Sequential(layer))[0], torch.randn(5, 4, INPUTS).double()  # type: ignore[index]
    torch.manual_seed(1)
    found = layer(x)[0]
    torch.manual_seed(1)
    assert error(found, dense(x)[0]) < 1e-12
    assert error(layer.eval()(x)[0], found) > 1e-3


def test_every_gate_has_factors_of_its_own() -> None:
    model = fz.factorize(nn.Sequential(nn.LSTM(INPUTS, HIDDEN)), rank=2)
    forms = {form.name: form for form in fz.forms(model)}
    assert list(forms) == ["0.factors.weight_ih_l0", "0.factors.weight_hh_l0"]
    assert forms["0.factors.weight_ih_l0"].U.shape == (4, HIDDEN, 2)
    assert forms["0.factors.weight_ih_l0"].V.shape == (4, INPUTS, 2)
    assert {form.kind for form in forms.values()} == {"recurrent"}
    fz.FrobeniusDecay(model, {"recurrent": 1e-4})


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRUCell])
def test_copies_pickles_and_other_types_keep_their_factors(kind: type[nn.Module]) -> None:
    layer = low_rank(kind(INPUTS, HIDDEN).double())
    x = torch.randn(4, INPUTS).double()
    expected = tensors(layer(x))[0]
    for other in (deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is type(layer)
        assert error(tensors(other(x))[0], expected) == 0
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert error(tensors(layer(x))[0], expected) == 0
    assert tensors(layer.float()(x.float()))[0].dtype == torch.float32
    assert type(layer).__name__ == f"Factorized{kind.__name__}"
    assert "FactorizedWeight(" in repr(layer)


def test_functional_call_takes_other_factors() -> None:
    layer, x = low_rank(nn.GRU(INPUTS, HIDDEN).double()), torch.randn(5, 4, INPUTS).double()
    other = low_rank(nn.GRU(INPUTS, HIDDEN).double())
    y, _ = torch.func.functional_call(layer, dict(other.named_parameters()), (x,))
    assert error(y, other(x)[0]) == 0


def test_threads_can_call_one_module_at_the_same_time() -> None:
    together = Barrier(2, timeout=60)

    class Meeting(nn.GRUCell):
        def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
            together.wait()
            state = super().forward(input, hx)
            together.wait()
            return state

    cell = low_rank(Meeting(INPUTS, HIDDEN))
    dense, inputs = fz.compose(nn.Sequential(cell))[0], [torch.randn(3, INPUTS) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        states = list(threads.map(cell, inputs))
    for x, state in zip(inputs, states, strict=True):
        torch.testing.assert_close(state, nn.GRUCell.forward(dense, x))


def test_weights_that_two_cells_share_are_factorized_together() -> None:
    model = nn.ModuleDict({"a": nn.GRUCell(8, 8), "b": nn.GRUCell(8, 8), "c": nn.Linear(8, 8)})
    model["b"].weight_hh = model["a"].weight_hh
    fz.factorize(model, rank=2, include=["a", "b"])
    layers = {name: m for name, m in model.named_modules() if isinstance(m, FactorizedWeight)}
    assert layers["a.factors.weight_hh"].U is layers["b.factors.weight_hh"].U
    plain = fz.compose(model)
    assert plain["a"].weight_hh is plain["b"].weight_hh  # type: ignore[index]


def test_some_weights_of_a_module_may_stay_dense() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LSTM(INPUTS, HIDDEN).double())
    x = torch.randn(5, 4, INPUTS).double()
    fz.factorize(model, rank=2, include=["*.weight_hh_l0"])
    assert [name for name, _ in model.named_parameters()] == [
        *("0.weight_ih_l0", "0.bias_ih_l0", "0.bias_hh_l0"),
        *("0.factors.weight_hh_l0.U", "0.factors.weight_hh_l0.V"),
    ]
    plain = fz.compose(model)
    assert list(plain.state_dict()) == list(nn.Sequential(nn.LSTM(INPUTS, HIDDEN)).state_dict())
    assert error(plain(x)[0], model(x)[0]) < 1e-12
    again = fz.plan(nn.Sequential(model, nn.Linear(8, 8)), rank=1, keep_first_and_last=False)
    assert "already factorized" in (again.entries[0].reason or "")


def test_drop_connect_acts_on_the_product_of_every_gate() -> None:
    layer, x = low_rank(nn.GRU(INPUTS, HIDDEN).double()), torch.randn(5, 4, INPUTS).double()
    expected = layer(x)[0]
    fz.drop_connect(layer, 0.5)
    assert error(layer(x)[0], expected) > 1e-3
    assert error(layer.eval()(x)[0], expected) < 1e-12


class Experts(nn.Module):
    """Reads its weight once for each expert; ``traced`` as a whole, or not."""

    def __init__(self, traced: bool) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(3, 8, 6))
        self.traced_whole = traced

    def forward(self, x: Tensor) -> Tensor:
        y = x.new_zeros(())
        for matrix in range(3):
            if self.traced_whole or x.sum() != matrix:  # depends on the data, which no trace can
                y = y + torch.tanh(x @ self.up_proj[matrix].mT)
        return y


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's, of its own tracing
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("traced", [False, True])
def test_compiled_it_decays_in_its_backward_pass_once_and_drops_entries(traced: bool) -> None:
    torch.manual_seed(0)
    model = fz.factorize(nn.Sequential(Experts(traced)).double(), rank=2, keep_first_and_last=False)
    x = torch.randn(4, 6).double()
    fz.FrobeniusDecay(model, 0.3, in_backward=True).attach(torch.optim.SGD(model.parameters(), lr=0.1))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=traced)
    gradients = []
    for run in (model, compiled):
        model.zero_grad()
        run(x).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert error(one, other) < 1e-12
    fz.drop_connect(model, 0.5)
    assert error(compiled(x), compiled(x)) > 1e-3


def test_the_dense_weights_are_let_go() -> None:
    model = nn.Sequential(nn.LSTM(INPUTS, HIDDEN))
    dense = weakref.ref(model[0].weight_ih_l0)
    fz.factorize(model, rank=2)
    gc.collect()
    assert dense() is None


def test_given_memory_after_the_meta_device_it_is_drawn_as_torch_draws_it() -> None:
    with torch.device("meta"):
        model: Any = fz.factorize(nn.Sequential(nn.GRU(INPUTS, HIDDEN)), rank=3)
    model.to_empty(device="cpu")
    model[0].reset_parameters()
    largest = [parameter.abs().max() for parameter in fz.compose(model)[0].parameters()]  # type: ignore[index]
    assert min(largest) > 0.2
    assert max(largest) < 2 * HIDDEN**-0.5


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRUCell])
def test_under_autocast_it_follows_its_composed_one(kind: type[nn.Module]) -> None:
    layer = low_rank(kind(INPUTS, HIDDEN))
    dense, x = fz.compose(nn.Sequential(layer))[0], torch.randn(4, INPUTS)  # type: ignore[index]
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = tensors(layer(x))[0], tensors(dense(x))[0]
    assert found.dtype == expected.dtype
    assert error(found, expected) < 2e-2
    found.sum().backward()
    assert {parameter.grad.dtype for parameter in layer.parameters()} == {torch.float32}


def test_what_looks_at_products_sees_every_gate() -> None:
    model = fz.factorize(nn.Sequential(nn.LSTM(INPUTS, HIDDEN)), rank=2)
    assert [row.name for row in fz.diagnose(model, lr=0.1)] == ["0.factors.weight_ih_l0", "0.factors.weight_hh_l0"]
    penalty = fz.NuclearDecay(model, 0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    penalty.attach(optimizer)
    model(torch.randn(3, 2, INPUTS))[0].sum().backward()
    optimizer.step()


@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
def test_for_cudnn_the_weights_are_one_piece_of_memory_biases_last(
    kind: type[nn.RNNBase], settings: dict[str, Any]
) -> None:
    dense = kind(INPUTS, HIDDEN, **settings)
    weights = dict(dense.named_parameters())
    found = _in_one_piece(weights, bool(dense.bias))
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    assert len({view.untyped_storage().data_ptr() for view in found.values()}) == 1
    places = {name: view.storage_offset() for name, view in found.items()}
    biases = [place for name, place in places.items() if name.startswith("bias")]
    assert all(place < min(biases, default=10**9) for name, place in places.items() if name.startswith("weight"))
    with_biases = kind(INPUTS, HIDDEN, **{**settings, "bias": True})
    size = next(iter(found.values())).untyped_storage().nbytes() // 4
    assert size == sum(parameter.numel() for parameter in with_biases.parameters())  # zeros where there are none


def test_a_write_to_a_gate_is_refused_and_a_gate_that_is_set_is_decomposed() -> None:
    layer = low_rank(nn.LSTM(INPUTS, HIDDEN).double())
    before = layer.weight_ih_l0.clone()
    for write in (nn.init.normal_, lambda weight: weight.data.zero_(), lambda weight: weight[0].fill_(1)):
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"would be lost\. Set layer\.weight = W"):
            write(layer.weight_ih_l0)
    assert torch.equal(layer.weight_ih_l0, before)
    for value in (2 * before.detach(), nn.Parameter(3 * before.detach())):
        layer.weight_ih_l0 = value
        assert error(layer.weight_ih_l0, value) < 1e-10
    assert "weight_ih_l0" not in dict(layer.named_parameters())


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(INPUTS, 4 * HIDDEN), r"weight must be 32x6 for this layer, got 6x32; nothing was changed"),
        (torch.ones(4 * HIDDEN, 1), r"weight must be 32x6 for this layer, got 32x1; nothing was changed"),
        (None, r"weight must be a tensor, got NoneType; nothing was changed"),
    ],
)
def test_a_gate_that_is_set_must_have_the_shape_of_the_dense_one(weight: Any, message: str) -> None:
    layer = low_rank(nn.LSTM(INPUTS, HIDDEN))
    before = layer.weight_ih_l0.clone()
    with pytest.raises(ValueError, match=message):
        layer.weight_ih_l0 = weight
    assert torch.equal(layer.weight_ih_l0, before)


def test_a_composed_network_lets_its_weights_be_set_before_it_runs() -> None:
    dense = fz.compose(nn.Sequential(low_rank(nn.LSTM(INPUTS, HIDDEN))))[0]  # type: ignore[index]
    x, other = torch.randn(5, 4, INPUTS), nn.LSTM(INPUTS, HIDDEN)
    for name, parameter in other.named_parameters():
        setattr(dense, name, nn.Parameter(parameter.detach().clone()))
    assert torch.equal(dense(x)[0], other(x)[0])


def test_under_autocast_its_weights_keep_the_type_of_their_factors() -> None:
    layer = low_rank(nn.LSTM(INPUTS, HIDDEN))
    with torch.autocast("cpu", torch.bfloat16):
        weights = layer.composed_weights()
        outputs = layer(torch.randn(5, 4, INPUTS))[0]
        expected = fz.compose(nn.Sequential(layer))[0](torch.randn(5, 4, INPUTS))[0]  # type: ignore[index]
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert outputs.dtype == expected.dtype


def test_factors_are_in_the_mode_of_the_network_that_holds_them() -> None:
    model = fz.factorize(nn.Sequential(nn.LSTM(INPUTS, HIDDEN)).eval(), rank=2)
    assert not any(module.training for module in model.modules())


def test_setting_a_bias_composes_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 sets all parameters of its own before and after every pass, while factors are still sharded."""
    network = low_rank(nn.GRU(INPUTS, HIDDEN))
    bias = nn.Parameter(torch.ones_like(network.bias_ih_l0))
    monkeypatch.setattr(FactorizedWeight, "weight", property(lambda layer: pytest.fail("a weight was composed")))
    network.bias_ih_l0 = bias
    assert network.bias_ih_l0 is bias
    assert network.get_parameter("bias_ih_l0") is bias
