from __future__ import annotations

import copy
import io
import sys
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.formats import hosvd, svd, tensor_train
from factorized.surgery import progress
from factorized.surgery.progress import late


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 12), nn.MultiheadAttention(12, 2), nn.Linear(12, 12), nn.Linear(12, 12))


@pytest.mark.parametrize("init", ["spectral", "normal"])
def test_a_callback_hears_of_every_layer_and_attention_module(init: Any) -> None:
    heard: list[tuple[int, int]] = []
    plan = fz.plan(net(), rank_scale=0.25, keep_first_and_last=False, attention="heads")
    fz.factorize(net(), plan, init=init, progress=lambda done, total: heard.append((done, total)))
    assert heard[-1] == (4, 4)
    assert [done for done, _ in heard] == sorted({done for done, _ in heard})
    assert len(heard) > 2


def test_weights_that_are_decomposed_together_are_reported_together() -> None:
    heard: list[tuple[int, int]] = []
    options: Any = {"rank": 2, "keep_first_and_last": False, "attention": False}
    fz.factorize(net(), progress=lambda done, total: heard.append((done, total)), **options)
    assert heard == [(1, 3), (3, 3)]


def test_an_error_in_the_callback_leaves_the_model_as_it_was() -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    model = net()
    with pytest.raises(KeyboardInterrupt):
        fz.factorize(model, rank=2, keep_first_and_last=False, progress=stop)
    assert isinstance(model[0], nn.Linear)


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, seconds: float) -> str:
    """Return what a factorization writes by itself, whose every look at the clock is so many seconds later."""
    clock = count(0, seconds)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(sys, "stderr", stream)
    fz.factorize(net(), rank=2, keep_first_and_last=False)
    return stream.getvalue()


def test_a_terminal_sees_a_bar_only_after_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, Terminal(), seconds=0.1) == ""
    assert "decomposing" in shown(monkeypatch, Terminal(), seconds=1.5)


def test_a_file_or_a_session_without_tqdm_sees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert shown(monkeypatch, io.StringIO(), seconds=5) == ""
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    assert shown(monkeypatch, Terminal(), seconds=5) == ""


def test_a_late_callback_is_told_nothing_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    heard: list[int] = []
    told = late(lambda done, total: heard.append(done))
    told(1, 2)
    told(2, 2)
    assert heard == [2]


def test_loading_a_dense_checkpoint_counts_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[int, int]] = []
    monkeypatch.setattr(progress, "_nothing", lambda done, total: heard.append((done, total)))
    model = fz.factorize(net(), rank=2, keep_first_and_last=False, attention=False)
    heard.clear()
    fz.load_dense(model, net().state_dict())
    assert heard[-1] == (3, 3)
    assert torch.isfinite(model[0].U).all()


SCHEMES = {
    "low rank": (fz.LowRank(), 20),
    "tensor train": (fz.TensorTrain(), 4),
    "Tucker": (fz.Tucker(), 8),
    "Monarch": (fz.Monarch(blocks=2), 20),
    "Kronecker": (fz.Kronecker(), 8),
    "residual": (fz.Residual(fz.LowRank()), 20),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_exact_decompositions_can_be_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, rank = SCHEMES[name]
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(512, 512, bias=False))
    methods: list[str] = []
    for module in (svd, hosvd, tensor_train):
        real = module.truncated_svd

        def spy(W: Tensor, rank: int, method: str, real: Any = real) -> Any:
            methods.append(method)
            return real(W, rank, method)

        monkeypatch.setattr(module, "truncated_svd", spy)
    for exact, method in ((True, "exact"), (False, "auto")):
        methods.clear()
        fz.factorize(copy.deepcopy(dense), scheme, rank=rank, keep_first_and_last=False, exact=exact)
        assert set(methods) == {method}


class Idle(nn.Module):
    """A layer that runs, and one that never does."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(8, 8), nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.filterwarnings("ignore:init=Calibrated. no batch reaches idle")
def test_exact_decompositions_of_layers_that_data_do_not_reach_can_be_asked_for() -> None:
    torch.manual_seed(0)
    dense, calibrated = Idle(), fz.Calibrated([torch.randn(16, 8)])
    expected = fz.factorize(copy.deepcopy(dense), rank=3, keep_first_and_last=False, exact=True)
    for exact in (True, False):
        model = fz.factorize(copy.deepcopy(dense), rank=3, init=calibrated, keep_first_and_last=False, exact=exact)
        assert torch.equal(model.idle.U, expected.idle.U) == exact


def test_exact_factors_are_those_of_torchs_own_decomposition() -> None:
    torch.manual_seed(0)
    dense = nn.Linear(300, 280, bias=False)
    U, S, Vh = torch.linalg.svd(dense.weight.detach().mT, full_matrices=False)  # wide ones are transposed
    best = (Vh.mT[:, :20] * S[:20]) @ U[:, :20].mT
    exact, fast = (
        fz.factorize(nn.Sequential(copy.deepcopy(dense)), rank=20, keep_first_and_last=False, exact=exact)[0].weight
        for exact in (True, False)
    )
    assert (exact - best).norm() < 1e-5 * best.norm()
    assert (fast - best).norm() > 0.1 * best.norm()
    assert (fast - dense.weight).norm() < 1.005 * (best - dense.weight).norm()


@pytest.mark.parametrize("init", ["kaiming", nn.init.zeros_])
def test_exact_is_refused_where_nothing_is_decomposed(init: Any) -> None:
    model = net()
    with pytest.raises(ValueError, match=r'exact=True is for init="spectral".*draws the factors'):
        fz.factorize(model, rank=2, init=init, exact=True)
    assert isinstance(model[0], nn.Linear)


@pytest.mark.parametrize("exact", [True, False])
def test_factorizing_under_autocast_gives_the_same_factors(exact: bool) -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(300, 280))
    plain = fz.factorize(copy.deepcopy(dense), rank=70, keep_first_and_last=False, exact=exact)
    with torch.autocast("cpu", torch.bfloat16):
        cast = fz.factorize(copy.deepcopy(dense), rank=70, keep_first_and_last=False, exact=exact)
    assert torch.equal(plain[0].U, cast[0].U)
