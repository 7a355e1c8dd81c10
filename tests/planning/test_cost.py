from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import factorized as fz
from factorized.formats.kernel import KernelShape
from factorized.formats.kronecker import Kronecker
from factorized.formats.monarch import Monarch
from factorized.formats.product import LowRank
from factorized.formats.residual import Residual
from factorized.formats.scheme import Scheme
from factorized.formats.tensor_train import TensorTrain
from factorized.formats.tucker import Tucker
from factorized.nn.embedding import FactorizedEmbedding
from factorized.nn.linear import FactorizedLinear
from factorized.planning.cost import LayerCost, measure
from factorized.planning.planner import plan
from factorized.surgery.factorize import LAYERS
from tests.planning.models_for_planning import EXAMPLES, Attends, ConvNet, Mlp, Reader, TiedReader

WHOLE = {"keep_first_and_last": False}


def counted(module: nn.Module, x: Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(x)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("kind", ["spatial", "channel"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("dense", "extent"),
    [
        (nn.Conv2d(8, 12, 3, padding=1), (2, 8, 10, 9)),
        (nn.Conv2d(8, 12, (3, 5), stride=(2, 3), padding=(1, 2)), (2, 8, 12, 15)),
        (nn.Conv2d(8, 12, (5, 1), stride=2, dilation=(2, 1)), (1, 8, 17, 6)),
        (nn.Conv2d(8, 12, 3, padding=1, groups=2), (2, 8, 6, 6)),
        (nn.Conv2d(8, 12, 3, padding="same", padding_mode="circular"), (2, 8, 6, 6)),
        (nn.Conv2d(8, 12, 3), (8, 7, 7)),
        (nn.Conv1d(6, 10, 3, stride=2), (2, 6, 11)),
        (nn.Conv3d(4, 6, 3, stride=(2, 1, 2), padding=1), (1, 4, 6, 5, 6)),
        (nn.ConvTranspose2d(8, 12, (4, 3), stride=(2, 3), padding=1, output_padding=1), (2, 8, 5, 6)),
        (nn.ConvTranspose2d(8, 12, 3, groups=2, dilation=2), (2, 8, 5, 6)),
        (nn.ConvTranspose1d(6, 10, 3, stride=2), (6, 11)),
        (nn.ConvTranspose3d(4, 6, 3, stride=(2, 1, 2), padding=1), (1, 4, 3, 5, 4)),
    ],
)
def test_planned_macs_are_those_the_factorized_convolution_spends(
    dense: nn.Conv2d, extent: tuple[int, ...], kind: str, depth: int
) -> None:
    x = torch.zeros(extent)
    shape = KernelShape.of(dense.weight.shape, dense.groups, kind)
    cost = LayerCost(shape, tuple(measure(dense, x, {dense: shape}).calls[dense]))
    assert cost.macs(None) == counted(dense, x)
    assert cost.params(None) == dense.weight.numel()
    layer = LAYERS[type(dense)].from_dense(dense, 3, kind=kind, depth=depth)
    layer.execution = "chain"
    assert cost.macs(layer.format) == counted(layer, x)
    assert cost.params(layer.format) == sum(factor.numel() for factor in layer.factors)


@pytest.mark.parametrize("depth", [0, 1])
def test_planned_macs_are_those_factorized_linears_and_embeddings_spend(depth: int) -> None:
    x, ids = torch.zeros(2, 5, 20), torch.zeros(2, 5, dtype=torch.long)
    linear, table = nn.Linear(20, 30), nn.Embedding(50, 20)
    plain, looked = KernelShape.of((30, 20)), KernelShape.of((50, 20))
    cost = LayerCost(plain, tuple(measure(linear, x, {linear: plain}).calls[linear]))
    assert cost.macs(None) == counted(linear, x) == 10 * 600
    thin = FactorizedLinear.from_dense(linear, 4, depth=depth)
    assert cost.macs(thin.format) == counted(thin, x)
    cost = LayerCost(looked, tuple(measure(table, ids, {table: looked}).calls[table]))
    assert cost.macs(None) == counted(table, ids) == 0
    rows = FactorizedEmbedding.from_dense(table, 4, depth=depth)
    assert cost.macs(rows.format) == counted(rows, ids)


SCHEMES = [LowRank(), TensorTrain(), Tucker(), Monarch(), Monarch(blocks=4), Kronecker()]


@pytest.mark.parametrize("scheme", [*SCHEMES, *map(Residual, SCHEMES)], ids=str)
@pytest.mark.parametrize(
    "dense",
    [nn.Linear(48, 64), nn.Embedding(200, 48), nn.EmbeddingBag(200, 48), nn.EmbeddingBag(200, 48, mode="max")],
    ids=lambda dense: type(dense).__name__,
)
def test_planned_macs_are_those_of_the_cheapest_way_in_every_format(dense: nn.Module, scheme: Scheme) -> None:
    x = torch.zeros(3, 7, 48) if isinstance(dense, nn.Linear) else torch.zeros(3, 7, dtype=torch.long)
    made = plan(nn.Sequential(dense), scheme, rank=4, example_input=x, min_size=0, **WHOLE)
    model = fz.factorize(nn.Sequential(dense), made).eval()
    spent = []
    for way in model[0].executions if isinstance(dense, nn.Linear) else ("auto",):
        model[0].execution = way
        spent.append(counted(model, x))
    assert made.macs_after == min(spent)


@pytest.mark.parametrize("scheme", [LowRank(), Kronecker()], ids=str)
def test_a_recurrent_weight_with_a_residual_is_multiplied_once(scheme: Scheme) -> None:
    x = torch.zeros(5, 2, 24)
    macs = [
        plan(nn.LSTM(24, 32), of, rank=2, example_input=x, min_size=0).macs_after for of in (scheme, Residual(scheme))
    ]
    assert macs[0] == macs[1]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_attention_is_counted_whatever_the_device(device: str) -> None:
    model = Attends().to(device)
    made = plan(model, ratio=0.9, example_input=EXAMPLES[Attends])
    linears = 16 * 16 + 4 * 16 * 16 + 2 * 16 * 64 + 16 * 4
    assert made.macs == 2 * 5 * linears + 2 * 2 * (5 * 5 * 8) * 2


@pytest.mark.parametrize("model_type", [ConvNet, Mlp, TiedReader])
@pytest.mark.parametrize("allocate", ["uniform", "spectrum"])
@pytest.mark.parametrize("share", [0.4, 0.55, 0.7, 0.9])
def test_a_macs_budget_is_never_exceeded_and_met_to_one_rank_step(
    model_type: type[nn.Module], allocate: str, share: float
) -> None:
    made = plan(model_type(), macs=share, example_input=EXAMPLES[model_type], allocate=allocate, **WHOLE)
    steps: Counter[str] = Counter()
    for entry in made.selected:
        steps[entry.tied_to or entry.name] += entry.macs_after // entry.rank
    assert made.macs_after <= share * made.macs
    assert made.macs_after > share * made.macs - max(0.005 * made.macs, min(steps.values()))


@pytest.mark.parametrize("model_type", [ConvNet, Mlp])
@pytest.mark.parametrize("scheme", [TensorTrain(), Tucker(), Monarch()], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("share", [0.6, 0.8])
def test_schemes_can_be_compared_at_one_macs_budget(model_type: type[nn.Module], scheme: Scheme, share: float) -> None:
    model, x = model_type().eval(), EXAMPLES[model_type]
    made = plan(model, scheme, macs=share, example_input=x, **WHOLE)
    assert made.macs == counted(model, x)
    assert (share - 0.06) * made.macs < made.macs_after <= share * made.macs
    fz.factorize(model, made)
    for entry in made.selected:
        model.get_submodule(entry.name).execution = "chain"
    assert counted(model, x) == made.macs_after


def test_a_scheme_that_always_composes_has_no_macs_to_save() -> None:
    with pytest.raises(ValueError, match=r"weights of Kronecker\(\) are multiplied out before they run, .* use ratio="):
        plan(Mlp(), Kronecker(), macs=0.9, example_input=EXAMPLES[Mlp], **WHOLE)


def test_a_layer_that_the_example_does_not_run_through_is_reported() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> Any:
            return self.used(x)

    used, unused = plan(Skips(), macs=0.5, example_input=torch.zeros(3, 16), **WHOLE).entries
    assert used.rank == 4
    assert unused.reason == "does not run on example_input, so that no multiply-accumulates would be saved"


@pytest.mark.parametrize(("of", "which"), [("model", "Lookup"), ("selected", "the selected layers")])
def test_a_share_of_no_multiplications_is_refused(of: Any, which: str) -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.unused = nn.Embedding(40, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> Any:
            return self.table(x)

    with pytest.raises(ValueError, match=f"^macs=0.5.* is a share of what {which} multiply on example_input"):
        plan(Lookup(), macs=0.5, of=of, example_input=torch.zeros(3, dtype=torch.long), **WHOLE)


def test_the_parts_of_a_plan_add_up_to_its_totals() -> None:
    for model_type in (ConvNet, Mlp, Reader, TiedReader):
        made = plan(model_type(), ratio=0.7, example_input=EXAMPLES[model_type], **WHOLE)
        assert made.params - made.params_after == sum(entry.params - entry.params_after for entry in made.entries)
        assert made.macs == sum(entry.macs for entry in made.entries)
        assert made.macs_after == sum(entry.macs_after for entry in made.entries)


def test_an_embedding_costs_macs_only_once_it_is_factorized() -> None:
    made = plan(Reader(), ratio=0.5, example_input=EXAMPLES[Reader], **WHOLE)
    tokens = made.entries[0]
    assert tokens.rank is not None
    assert (tokens.macs, tokens.macs_after) == (0, 14 * tokens.rank * 32)
    by_macs = plan(Reader(), macs=0.5, example_input=EXAMPLES[Reader], **WHOLE)
    assert by_macs.entries[0].rank is None


def test_a_layer_called_twice_costs_twice() -> None:
    layer = nn.Linear(32, 32)
    model = nn.Sequential(nn.Linear(32, 32), layer, nn.ReLU(), layer, nn.Linear(32, 32))
    made = plan(model, ratio=0.8, example_input=torch.zeros(3, 32))
    assert [entry.name for entry in made.entries] == ["0", "1", "4"]
    assert [entry.macs for entry in made.entries] == [3 * 1024, 2 * 3 * 1024, 3 * 1024]
    assert made.macs == 4 * 3 * 1024


class CallsByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv, self.last = nn.Conv1d(4, 8, 1), nn.Conv1d(8, 8, 3), nn.Conv1d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.conv(input=self.first(x)))


def test_a_layer_called_by_keyword_is_counted() -> None:
    made = plan(CallsByName(), rank=2, example_input=torch.zeros(1, 4, 10))
    assert made.entries[1].macs == 8 * 8 * 8 * 3


@pytest.mark.parametrize(
    "example_input",
    [
        torch.zeros(2, 7, dtype=torch.long),
        (torch.zeros(2, 7, dtype=torch.long),),
        [torch.zeros(2, 7, dtype=torch.long), 3],
        {"ids": torch.zeros(2, 7, dtype=torch.long), "shift": 3},
    ],
    ids=["tensor", "tuple", "list", "dict"],
)
def test_an_example_is_a_tensor_arguments_or_keywords(example_input: Any) -> None:
    made = plan(Reader(), macs=0.8, example_input=example_input, **WHOLE)
    assert made.macs == 14 * (32 * 64 + 64 * 300)


@pytest.mark.parametrize(
    ("example_input", "message"),
    [
        (torch.zeros(2, 3, 16), "example_input does not run through ConvNet: "),
        ((torch.zeros(2, 3, 16, 16), 7), "example_input does not run through ConvNet: .*positional"),
        ({"y": torch.zeros(2, 3, 16, 16)}, "does not run through ConvNet: .*'y'.*a tensor, a tuple of arguments or"),
    ],
    ids=["shape", "too many", "unknown keyword"],
)
def test_an_example_that_does_not_run_is_reported_and_nothing_is_left_behind(example_input: Any, message: str) -> None:
    model = ConvNet()
    with pytest.raises(ValueError, match=message):
        plan(model, macs=0.5, example_input=example_input)
    assert all(module.training and not module._forward_hooks for module in model.modules())


def test_counting_leaves_modes_statistics_gradients_and_hooks_alone() -> None:
    model = ConvNet()
    model.body.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan(model, macs=0.5, example_input=torch.randn(4, 3, 16, 16))
    assert {name: module.training for name, module in model.named_modules()} == {
        name: not name.startswith("body") for name, _ in model.named_modules()
    }
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.norm.num_batches_tracked == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.backends.mha.get_fastpath_enabled()


class Notes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.records_gradients = torch.is_grad_enabled()
        return x


def test_counting_records_no_gradients() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Notes(), nn.Linear(8, 8))
    plan(model, rank=1, example_input=torch.zeros(1, 8))
    assert not model[2].records_gradients


def test_lazy_layers_are_not_initialized_by_counting() -> None:
    model = nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 32), nn.LazyLinear(5))
    with pytest.raises(ValueError, match=r"2\.weight is not initialized yet, .*run the model once first"):
        plan(model, ratio=0.9, example_input=torch.zeros(1, 4))
    assert type(model[2]) is nn.LazyLinear


def test_channel_convolutions_multiply_at_their_strided_positions_only() -> None:
    model = nn.Conv2d(16, 16, 3, stride=2, padding=1, bias=False)
    spatial, channel = (
        plan(model, LowRank(kind), rank=4, example_input=torch.zeros(1, 16, 8, 8), **WHOLE).entries[0]
        for kind in ("spatial", "channel")
    )
    assert (spatial.format.shape.row_dims, channel.format.shape.row_dims) == (1, 0)
    assert spatial.macs_after == 8 * 4 * (4 * 48) + 4 * 4 * (4 * 48)
    assert channel.macs_after == 4 * 4 * (4 * 16 * 9) + 4 * 4 * (4 * 16)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # torch's counter misses the first of an LSTM
def test_recurrent_networks_are_counted_and_composing_their_gates_costs(kind: Any, dtype: torch.dtype) -> None:
    net = kind(6, 8, num_layers=2, bidirectional=True).to(dtype)
    model, x = nn.ModuleDict({"net": net}), torch.zeros(5, 4, 6, dtype=dtype)
    model.forward = lambda x: model["net"](x)  # type: ignore[method-assign]
    made = plan(model, rank=2, example_input=x)
    weights = sum(p.numel() for name, p in net.named_parameters() if "weight" in name)
    assert made.macs == 20 * weights
    composing = sum(entry.format.compose_macs for entry in made.entries if entry.format is not None)  # type: ignore[union-attr]
    assert made.macs_after == made.macs + composing
    assert sum(entry.macs or 0 for entry in made.entries) == made.macs


def test_experts_are_counted_by_the_tokens_that_are_sent_to_them() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down_proj = nn.Parameter(torch.randn(4, 8, 16))

        def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
            return torch.stack([self.down_proj[k] @ row for row, ks in zip(x, chosen, strict=True) for k in ks])

    chosen = torch.tensor([[0, 1], [2, 3], [1, 1], [0, 3]])
    made = plan(nn.Sequential(Experts())[0], rank=2, example_input=(torch.randn(4, 16), chosen))
    assert made.macs == 8 * 8 * 16


def test_a_compiled_model_is_measured_like_any_other_without_a_warning() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 4))
    example = torch.randn(2, 16)
    expected = fz.plan(model, rank=2, example_input=example).macs
    compiled: Any = torch.compile(model, backend="eager")
    assert fz.plan(compiled, rank=2, example_input=example).macs == expected
