"""What only a GPU can show: the same results as on the CPU, and steps that can be captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import factorized as fz
from factorized.decay.arena import Arena
from factorized.experiments.models.resnet import resnet
from factorized.formats.format import WAYS
from factorized.formats.svd import spectral_factors
from tests.on_gpu import kinds, needs_cuda

pytestmark = needs_cuda


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return fz.factorize(resnet(8).double(), ratio=0.4).cuda()


@pytest.mark.parametrize("execution", WAYS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions_compute_on_the_gpu_what_the_dense_layer_does(execution: str, channels_last: bool) -> None:
    dense = nn.Conv2d(16, 24, 3, (2, 1), padding=1, device="cuda", dtype=torch.float64)
    layer = fz.FactorizedConv2d.from_dense(dense, 48, execution=execution)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(2, 16, 9, 7, device="cuda", dtype=torch.float64).to(memory_format=layout)
    torch.testing.assert_close(layer(x), dense(x), rtol=1e-9, atol=1e-9)


def test_the_decomposition_is_the_same_on_both_devices() -> None:
    W = torch.randn(3, 40, 30, dtype=torch.float64)
    products = [U @ V.mT for U, V in (spectral_factors(weight, 5) for weight in (W, W.cuda()))]
    torch.testing.assert_close(products[1].cpu(), products[0], rtol=1e-9, atol=1e-9)


@pytest.fixture(params=[False, True], ids=["float32", "tf32"])
def _rounding(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let products of float32 be rounded to tf32, or not. monkeypatch cannot undo this setting since pytest 9.2."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.param
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.usefixtures("_rounding")
@pytest.mark.parametrize(("shape", "rank"), [((3, 300, 280), 70), ((640, 600), 200), ((280, 900), 60)])
def test_decompositions_by_gram_matrix_are_the_best_ones_on_the_gpu_too(shape: tuple[int, ...], rank: int) -> None:
    W = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    U, V = spectral_factors(W.cuda(), rank)
    best, best_V = spectral_factors(W.double(), rank, "exact")
    torch.testing.assert_close(U.cpu().double() @ V.cpu().double().mT, best @ best_V.mT, rtol=0, atol=1e-3)


def trained(
    model: nn.Module,
    make: Callable[[nn.Module], torch.optim.Optimizer],
    captured: bool,
    dtype: torch.dtype = torch.float64,
) -> nn.Module:
    """Train four steps, the last three of them as a replayed graph if ``captured``."""
    model = deepcopy(model)
    optimizer = make(model)
    x = torch.randn(4, 3, 16, 16, device="cuda", dtype=dtype, generator=torch.Generator("cuda").manual_seed(1))
    y = torch.tensor([0, 1, 2, 3], device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            step()
    for _ in range(3):
        graph.replay() if captured else step()
    torch.cuda.synchronize()
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(fz.parameter_groups(model, 1e-2), lr=0.05, momentum=0.9)
    decay = fz.FrobeniusDecay(model, 0.05).attach(optimizer)
    assert Arena in kinds(decay._engine.workers)
    return optimizer


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(fz.parameter_groups(model, 1e-2), lr=1e-3, capturable=True)
    fz.decoupled_frobenius(optimizer, model, 0.05)
    return optimizer


def flambe(model: nn.Module) -> torch.optim.Optimizer:
    return fz.Flambe(fz.parameter_groups(model, 1e-2), model, lr=1e-3, frobenius_decay=0.05, capturable=True)


@pytest.mark.parametrize("make", [sgd, adamw, flambe])
def test_a_captured_step_with_decay_ends_where_eager_steps_do(
    make: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    start = small_model()
    eager, replayed = trained(start, make, captured=False), trained(start, make, captured=True)
    for (name, expected), actual in zip(eager.named_parameters(), replayed.parameters(), strict=True):
        torch.testing.assert_close(
            actual, expected, rtol=1e-7, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_captured_lamb_skips_what_is_not_finite() -> None:
    weight = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = fz.Lamb([weight], lr=0.1, capturable=True)
    for gradient in (1.0, float("nan"), 1.0):
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
    assert torch.isfinite(weight).all()
    assert optimizer.skipped == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autotune_chooses_on_the_gpu_under_autocast(dtype: torch.dtype) -> None:
    model = fz.factorize(resnet(8), ratio=0.4).cuda()
    with torch.autocast("cuda", dtype):
        times = fz.autotune(model, torch.randn(2, 3, 16, 16), rounds=1)
    for name, measured in times.items():
        assert model.get_submodule(name).execution == min(measured, key=measured.__getitem__)


def attention_model() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 3, 32, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.Sequential(nn.Flatten(2), nn.Linear(256, 24), encoder, nn.Flatten(), nn.Linear(72, 10))
    model = fz.factorize(model.double(), rank_scale=0.5, attention="heads")
    return fz.factorize(model, rank=3, include=["4"]).cuda()


@pytest.mark.parametrize("make", [sgd, adamw, flambe])
def test_a_captured_step_that_decays_attention_ends_where_eager_steps_do(
    make: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    start = attention_model()
    eager, replayed = trained(start, make, captured=False), trained(start, make, captured=True)
    for actual, expected in zip(replayed.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-9)


def test_attention_forms_are_decayed_on_the_gpu_as_on_the_cpu() -> None:
    models = [attention_model(), attention_model().cpu(), nn.ModuleList([nn.MultiheadAttention(24, 3)]).double()]
    pairs = [(models[0], models[1]), (deepcopy(models[2]).cuda(), models[2])]
    for on_gpu, on_cpu in pairs:
        for model in (on_gpu, on_cpu):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            fz.FrobeniusDecay(model, {"*": 0.3, "qk": 0.2}).apply_()
        for actual, expected in zip(on_gpu.parameters(), on_cpu.parameters(), strict=True):
            torch.testing.assert_close(actual.grad.cpu(), expected.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_shrunk_attention_runs_fused_on_the_gpu(dtype: torch.dtype) -> None:
    dense = nn.MultiheadAttention(64, 4, batch_first=True, device="cuda").eval()
    small = fz.factorize_attention(deepcopy(dense), {"qk": 0.5, "ov": 0.75})
    x = torch.randn(2, 16, 64, device="cuda")
    expected = fz.compose(small)(x, x, x, need_weights=False)[0]
    actual = small.to(dtype)(x.to(dtype), x.to(dtype), x.to(dtype), need_weights=False)[0]
    torch.testing.assert_close(actual.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bias", [True, False])
def test_recurrent_networks_give_cudnn_all_weights_in_one_piece(kind: type[nn.RNNBase], bias: bool) -> None:
    dense = kind(32, 64, num_layers=2, bidirectional=True, bias=bias).cuda()
    model = fz.factorize(nn.Sequential(dense), rank=4)
    x = torch.randn(7, 5, 32, device="cuda")
    y = model(x)[0]  # cuDNN warns of weights in several pieces, and a warning is an error here
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    torch.testing.assert_close(y, fz.compose(model)(x)[0], rtol=1e-4, atol=1e-5)
