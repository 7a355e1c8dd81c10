"""``benchmarks.recovery`` and the baselines that it measures, on a small run."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from benchmarks import recovery
from benchmarks.baselines import Inputs, activation_aware, factorized_by, pruned, whitened
from benchmarks.one_network import OneNetwork
from benchmarks.recovery_table import read_rows, recovery_table
from factorized.experiments.cli.main import main
from factorized.experiments.models.build import build_model
from tests.on_gpu import needs_cuda

SMALL = ("--ratios", "0.3", "--samples", "256", "--device", "cpu", "--kind", "channel")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense run of one epoch."""
    out = tmp_path_factory.mktemp("dense")
    assert main(["train", "digits/resnet8", "--set", "schedule.epochs=1", "--out", str(out), "--quiet"]) == 0
    return out / "digits/resnet8/seed-0"


def rows_of(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    rows = json.loads(path.read_text())["rows"]
    return {(row["ratio"], row["method"], row["recovery"]): row for row in rows}


def test_every_method_is_measured_without_recovery_and_with_either_decay(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "made" / "recovery.json"
    recovery.main([str(run), *SMALL, "--out", str(out)])
    rows = rows_of(out)
    products = ("calibrated", "calibrated, sequential", "truncated SVD", "ASVD", "SVD-LLM")
    expected = {(1.0, "dense", "none"), (0.3, "pruning", "none"), (0.3, "pruning", "ordinary")}
    expected |= {(0.3, method, way) for method in products for way in ("none", "ordinary", "frobenius")}
    assert rows.keys() == expected
    whole = rows[1.0, "dense", "none"]["parameters"]
    for (ratio, _, way), row in rows.items():
        assert row["score"] == "accuracy"
        assert (row.get("seed"), "seconds" in row) == ((None, False) if way == "none" else (0, True))
        assert row["parameters"] == pytest.approx(ratio * whole, rel=0.06)
    for method in products:
        assert rows[0.3, method, "ordinary"]["loss"] != rows[0.3, method, "frobenius"]["loss"]
    at_once, sequential = (rows[0.3, method, "none"]["loss"] for method in products[:2])
    assert at_once != sequential
    assert json.loads(out.read_text())["machine"]["torch"] == torch.__version__


def test_figures_that_are_known_are_not_measured_again_and_others_are_added(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "recovery.json"
    given = [str(run), *SMALL, "--methods", "pruning", "--out", str(out)]
    recovery.main([*given, "--decays"])
    assert rows_of(out).keys() == {(1.0, "dense", "none"), (0.3, "pruning", "none")}
    recovery.main([*given, "--seconds", "0"])
    assert "no time is left; the same command goes on from here" in capsys.readouterr().out
    assert len(rows_of(out)) == 2
    recovery.main(given)
    before = out.read_bytes()
    assert list(rows_of(out)) == [(1.0, "dense", "none"), (0.3, "pruning", "none"), (0.3, "pruning", "ordinary")]
    capsys.readouterr()
    recovery.main(given)
    assert (capsys.readouterr().out, out.read_bytes()) == ("", before)
    recovery.main([*given, "--seeds", "0", "1"])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["recovery"], row.get("seed")) for row in rows] == [
        *[("none", None)] * 2,
        *[("ordinary", seed) for seed in (0, 1)],
    ]
    assert rows[2]["loss"] != rows[3]["loss"]


def test_processes_that_share_a_file_leave_each_other_s_cells_alone_and_keep_all_figures(
    run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "recovery.json"
    other, cell = recovery.Report(out, {"note": "kept"}), recovery.Cell(0.3, "pruning", 0, ())
    command = [str(run), *SMALL, "--methods", "pruning", "truncated SVD", "--decays", "--out", str(out)]
    with other.claim(cell) as free:
        assert free
        recovery.main(command)
        assert rows_of(out).keys() == {(1.0, "dense", "none"), (0.3, "truncated SVD", "none")}
        other.add({"score": "accuracy", "ratio": 0.3, "method": "pruning", "recovery": "frobenius"}, {"accuracy": 1.0})
    recovery.main(command)
    assert list(rows_of(out)) == [
        (1.0, "dense", "none"),
        (0.3, "truncated SVD", "none"),
        (0.3, "pruning", "frobenius"),
        (0.3, "pruning", "none"),
    ]
    report = json.loads(out.read_text())
    assert (report["note"], report["samples"]) == ("kept", 256)


def test_a_recovery_is_a_tenth_of_the_training_with_the_decay_asked_for(run: Path) -> None:
    subject = recovery.open_subject(str(run), None, torch.device("cpu"))
    work = recovery.Compression(subject, "spatial", 64, share_compiled=False)
    own: Any = subject.recipe
    subject.recipe = own.model_copy(update={"schedule": own.schedule.model_copy(update={"epochs": 200})})
    made: dict[tuple[str, str], Any] = {
        (method, decay): work.recipe(recovery.Cell(0.3, method, 0, ()), decay)
        for method in ("calibrated", "SVD-LLM", "pruning")
        for decay in ("ordinary", "frobenius")
    }
    assert {one.schedule.epochs for one in made.values()} == {20}
    assert {one.decay.strength for one in made.values()} == {own.decay.strength}
    assert [one.decay.kind for one in made.values()] == ["weight", "frobenius"] * 3
    schemes = [(one.factorize.scheme, one.factorize.kind) for one in made.values()][::2]
    assert schemes == [("low_rank", "spatial"), ("low_rank", "channel"), ("none", "spatial")]
    assert {one.run.compile for one in made.values()} == {"no"}
    subject.recipe = None
    with pytest.raises(ValueError, match="is no run of ours"):
        work.recipe(recovery.Cell(0.3, "pruning", 0, ()), "ordinary")


def test_there_is_no_time_for_what_took_longer_before() -> None:
    clock = recovery.Clock(1000.0)
    assert clock.allows_another()
    clock.longest = 1000.0
    assert not clock.allows_another()
    clock.seconds = None
    assert clock.allows_another()


def _output_error(W: Tensor, U: Tensor, V: Tensor, x: Tensor) -> float:
    return (x @ (W - U @ V.mT).mT).square().sum().item()


def test_svd_llm_keeps_as_much_of_the_outputs_as_calibration_and_asvd_scales_by_magnitudes() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(12, 9, bias=False).double()
    x = torch.randn(200, 12, dtype=torch.float64) @ torch.randn(12, 12, dtype=torch.float64)
    seen = Inputs()
    seen(layer, (x,))
    W = layer.weight.detach()
    ours = fz.factorize(nn.Sequential(layer), rank=3, keep_first_and_last=False, init=fz.Calibrated([x]))[0]
    least = _output_error(W, ours.U.detach(), ours.V.detach(), x)
    assert _output_error(W, *whitened(W, seen, 3), x) == pytest.approx(least, rel=1e-4)
    scale = x.abs().mean(0).sqrt()
    U, S, Vh = torch.linalg.svd(W * scale)
    expected = (U[:, :3] * S[:3]) @ Vh[:3] / scale
    U, V = activation_aware(W, seen, 3)
    torch.testing.assert_close(U @ V.mT, expected)


def test_a_baseline_reads_the_patches_of_a_convolution() -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.Flatten(), nn.Linear(128, 2))
    batches = fz.Calibrated([torch.randn(20, 3, 8, 8)])
    plan = fz.plan(dense, fz.LowRank("channel"), rank=3)
    ours = fz.factorize(copy.deepcopy(dense), plan, init=batches)
    theirs = factorized_by("SVD-LLM", copy.deepcopy(dense), plan, batches)
    without_bias = fz.factorize(copy.deepcopy(dense), plan)
    x = next(iter(batches.batches))
    errors = [(model(x) - dense(x)).square().mean().item() for model in (theirs, ours, without_bias)]
    assert errors[0] < errors[2]
    assert theirs[2].rank == 3


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_pruned_weights_stay_zero_and_as_many_remain_as_factors_have(optimizer: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    plan = fz.plan(model, rank=3)
    largest = model[2].weight.detach().abs().flatten().topk(96).indices
    pruned(model, plan)
    kept = model[2].weight != 0
    assert kept.flatten().nonzero().flatten().tolist() == sorted(largest.tolist())
    assert model[0].weight.ne(0).all()  # not in the plan
    before = model[2].weight.detach().clone()
    options: dict[str, Any] = {"momentum": 0.9} if optimizer == "SGD" else {}
    steps = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01, weight_decay=0.1, **options)
    for _ in range(5):
        steps.zero_grad()
        model(torch.randn(32, 8)).square().sum().backward()
        steps.step()
    assert torch.equal(model[2].weight != 0, kept)
    assert not torch.equal(model[2].weight, before)


def test_a_copy_of_a_pruned_network_keeps_its_zeros_in_training() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2))
    pruned(model, fz.plan(model, rank=1))
    found = recovery._copied(model)
    found(torch.randn(9, 4)).square().sum().backward()
    zero = model[1].weight == 0
    assert found[1].weight.grad is not None
    assert zero.any()
    assert not found[1].weight.grad[zero].any()
    assert found[1].weight.grad[~zero].any()


def test_one_compiled_network_trains_products_of_all_ranks_and_pruned_weights_alike() -> None:
    torch.manual_seed(0)
    dense = build_model("resnet8", 10, 8, 1)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    one = OneNetwork(dense, "aot_eager")
    some = fz.plan(dense, fz.LowRank(), ratio=0.3)
    networks = [
        fz.factorize(copy.deepcopy(dense), some),
        fz.factorize(copy.deepcopy(dense), fz.LowRank("channel"), ratio=0.9, exclude=["stages.0.*"]),
        pruned(copy.deepcopy(dense), some),
    ]
    x = torch.randn(16, 1, 8, 8)
    for network in networks:
        composing = one.holding(recovery._copied(network))
        for either in (network, composing):
            either.train()(x).square().sum().backward()
        found = {name: p.grad for name, p in composing.body.named_parameters()}
        for place, name in enumerate(one.layers):
            found |= {f"{name}.{own}": p.grad for own, p in composing.holders[place].named_parameters()}
        for name, parameter in network.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(composing.eval()(x), network.eval()(x), rtol=1e-3, atol=1e-4)
        composing.zero_grad()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not any("weight" in layer.__dict__ for layer in one.layers.values())


def test_runs_on_a_gpu_share_one_compiled_network(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def eager(dense: nn.Module) -> OneNetwork:
        made.append(OneNetwork(dense, "eager"))
        return made[-1]

    monkeypatch.setattr(recovery, "OneNetwork", eager)
    subject = recovery.open_subject(str(run), None, torch.device("cpu"))
    trained = {}
    for share in (False, True):
        work = recovery.Compression(subject, "channel", 256, share_compiled=share)
        for method in ("truncated SVD", "pruning"):
            plan, cell = work.plan(method, 0.3), recovery.Cell(0.3, method, 0, ())
            network = work.recover(work.compress(method, plan), plan, work.recipe(cell, "ordinary"), 0)
            trained[share, method] = subject.evaluate(network)["loss"]
    assert len(made) == 1
    for method in ("truncated SVD", "pruning"):
        # other processors round otherwise
        assert trained[True, method] == pytest.approx(trained[False, method], rel=1e-2)


@needs_cuda
def test_a_gpu_trains_all_ranks_by_one_compiled_network_in_captured_steps(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "recovery.json"
    given = [word if word != "cpu" else "cuda" for word in SMALL]
    recovery.main([str(run), *given, "--methods", "calibrated", "pruning", "--out", str(out)])
    found = rows_of(out)
    assert len(found) == 6
    assert found[0.3, "calibrated", "frobenius"]["accuracy"] > found[0.3, "calibrated", "none"]["accuracy"]
    assert found[0.3, "pruning", "ordinary"]["parameters"] == found[0.3, "pruning", "none"]["parameters"]


def test_a_recovery_that_diverges_is_noted_and_others_go_on(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recover, asked = recovery.Compression.recover, []

    def diverges(self: recovery.Compression, *arguments: Any) -> nn.Module:
        asked.append(arguments[2].decay.kind)
        if len(asked) == 1:
            raise ValueError("the training loss is nan")
        return recover(self, *arguments)

    monkeypatch.setattr(recovery.Compression, "recover", diverges)
    out = tmp_path / "recovery.json"
    recovery.main([str(run), *SMALL, "--methods", "truncated SVD", "--out", str(out)])
    assert asked == ["weight", "frobenius"]
    assert rows_of(out)[0.3, "truncated SVD", "ordinary"]["problem"] == "the training loss is nan"
    assert "accuracy" in rows_of(out)[0.3, "truncated SVD", "frobenius"]
    assert "ordinary 0 the training loss is nan" in capsys.readouterr().out


def test_the_table_joins_files_averages_over_networks_and_seeds_and_says_of_fewer_how_far_from_dense_they_are(
    tmp_path: Path,
) -> None:
    def row(network: str, ratio: float, method: str, way: str, accuracy: float, **more: Any) -> dict[str, Any]:
        key = {"network": network, "score": "accuracy", "ratio": ratio, "method": method, "kind": "spatial"}
        return {**key, "recovery": way, "accuracy": accuracy, **more}

    files = {
        "a": [row("net seed 0", 1.0, "dense", "none", 90.0), row("net seed 0", 0.3, "calibrated", "none", 80.0)],
        "b": [
            row("net seed 0", 0.3, "calibrated", "none", 80.0),  # the same once more
            row("net seed 1", 1.0, "dense", "none", 92.0),
            row("net seed 1", 0.3, "calibrated", "none", 84.0),
            row("net seed 0", 0.1, "pruning", "ordinary", 70.0, seed=0),
            row("net seed 0", 0.1, "pruning", "ordinary", 72.0, seed=1),  # of the same network
            row("net seed 1", 0.1, "calibrated", "none", 75.0),
            row("net seed 0", 0.3, "pruning", "ordinary", 70.0, seed=0) | {"problem": "nan"},
            row("small seed 0", 1.0, "dense", "none", 90.0),
            row("small seed 0", 0.1, "ASVD", "none", 60.0),
        ],
    }
    for name, rows in files.items():
        made = {"machine": {"device": "NVIDIA H200" if name == "b" else "a processor"}, "rows": rows}
        (tmp_path / f"recovery-{name}.json").write_text(json.dumps(made))
    table = recovery_table(read_rows(tmp_path)).splitlines()
    assert table[0] == "| network | method | 30% | 10% |"
    assert table[2:5] == [
        "| net | calibrated | 82.00 ± 2.83 | 75.00 (n = 1, -17.00) |",
        "| net | pruning, ordinary decay | diverged (n = 1) | 71.00 ± 1.41 (n = 1, -19.00) |",
        "| small | ASVD | – | 60.00 |",
    ]
    assert "a cell of fewer has its own n, and the difference to those dense networks. net: " in table[-1]
    assert "net: test accuracy in percent, dense 91.00 ± 1.41, n = 2, CPU and H200; small: " in table[-1]
    assert table[-1].endswith("small: test accuracy in percent, dense 90.00, n = 1, H200.")
