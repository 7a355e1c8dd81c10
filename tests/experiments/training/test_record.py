from __future__ import annotations

import errno
import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.event_file_writer import AtomicCounter

import factorized as fz
from factorized.experiments.data.augment import normalize
from factorized.experiments.training import record, trainer
from factorized.experiments.training.interrupt import CannotWrite, Interrupted
from factorized.experiments.training.network import build_network
from factorized.experiments.training.record import Recorder, commit, layer_rows, product_row, write_json
from factorized.experiments.training.train import train
from factorized.experiments.training.trained import load_trained
from factorized.files.checksum import is_sealed
from factorized.nn.running import count_parameters
from tests.experiments.training.small import TIMES, Signals, digits, recipe, state_of

PRODUCTS = ("nuclear", "nuclear_bound", "frobenius", "effective_step")
MEASURED = ("epoch", "lr", "loss", "accuracy", "test_loss", "test_accuracy", *TIMES)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped in its second epoch and went on."""
    folder = tmp_path_factory.mktemp("run")
    reporter = Signals(signal.SIGTERM, epoch=1, step=0)
    with pytest.raises(Interrupted):
        train(recipe(), digits(), folder, device="cpu", reporter=reporter)
    train(recipe(), digits(), folder, device="cpu", resume=True)
    return folder / "seed-0"


def test_metrics_survive_a_continuation_that_cannot_write_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_a_full_disk(path: Path, text: str, **_: Any) -> None:
        path.write_bytes(text[:5].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    before = '{"epoch": 1, "loss": 3.0}\n'
    (tmp_path / "metrics.jsonl").write_text(before)
    monkeypatch.setattr(Path, "write_text", on_a_full_disk)
    with pytest.raises(CannotWrite, match="No space left"), Recorder(tmp_path, [{"epoch": 1, "loss": 3.0}]):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_a_result_holds_rank_size_and_norms_of_every_product(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    _, _, network = load_trained(run)
    found = {form.name: form for form in fz.forms(network)}
    assert [layer["name"] for layer in result["layers"]] == list(found)
    for layer, diagnosis in zip(result["layers"], fz.diagnose(network, lr=0.1), strict=True):
        weight = found[layer["name"]]
        assert layer["rank"] == str(weight.U.shape[-1])
        assert layer["params"] < layer["dense_params"] == math.prod(layer["shape"])
        assert layer["frobenius"] == pytest.approx(diagnosis.frobenius)
        assert layer["spectral"] <= layer["frobenius"] <= layer["nuclear"] <= layer["nuclear_bound"] * (1 + 1e-5)


def test_an_overcomplete_run_records_what_it_deploys(run: Path, tmp_path: Path) -> None:
    wide = recipe("schedule.epochs=1", name="digits/resnet8-wide-fd")
    (result,) = train(wide, digits(), tmp_path, device="cpu")
    _, _, network = load_trained(tmp_path / "seed-0")
    dense = fz.compose(network)
    assert result["composed"]["parameters"] == count_parameters(dense) < result["parameters"]
    x = normalize(digits().x_test, *(torch.tensor(values) for values in (digits().mean, digits().std)), torch.float32)
    with torch.no_grad():
        right = (dense.eval()(x).argmax(1) == digits().y_test).float().mean()
    assert result["composed"]["accuracy"] == pytest.approx(100 * float(right))
    assert "composed" not in json.loads((run / "result.json").read_text())  # low rank is deployed as it is


def test_a_network_without_products_has_no_layers_to_record() -> None:
    assert layer_rows(torch.nn.Linear(2, 2)) == []


def test_forms_of_attention_are_recorded_with_their_heads() -> None:
    rows = layer_rows(torch.nn.MultiheadAttention(8, 2))
    assert [(row["kind"], row["shape"], row["rank"]) for row in rows] == [
        ("qk", [2, 8, 8], "4"),
        ("ov", [2, 8, 8], "4"),
    ]


def test_metrics_are_one_row_per_epoch_with_all_that_was_measured(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2]
    assert [row["lr"] for row in rows] == pytest.approx([0.1, 0.01])
    for row in rows:
        assert set(row) == {*MEASURED, *PRODUCTS}
        assert all(math.isfinite(value) for value in row.values())
    assert rows == json.loads((run / "result.json").read_text())["history"]


def test_the_result_says_what_was_run_on_what_and_what_came_out(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    network = build_network(recipe(), digits(), seed=0)
    assert result["recipe"] == recipe().to_dict()
    assert result["seed"] == 0
    assert result["parameters"] == count_parameters(network)
    assert result["macs"] == 80512  # of one image of 8×8 pixels
    assert result["seconds"] > 0
    assert result["accuracy"] == result["history"][-1]["test_accuracy"]
    assert result["best_accuracy"] == max(row["test_accuracy"] for row in result["history"])
    machine = result["machine"]
    assert machine["torch"] == torch.__version__
    assert machine["python"] == sys.version.split()[0]
    assert machine["factorized"] == fz.__version__
    assert machine["processes"] == 1
    assert machine["device"]
    assert machine["commit"] == commit()
    data = result["data"]
    assert (data["name"], data["checksum"]) == ("digits", digits().checksum)
    assert (len(data["classes"]), data["channels"], data["size"]) == (10, 1, [8, 8])


@pytest.mark.parametrize("name", ["digits/resnet8", "digits/resnet8-lowrank-0.1-si-fd", "digits/resnet8-wide-fd"])
def test_the_trained_network_can_be_read_back_from_its_folder(tmp_path: Path, name: str) -> None:
    [result] = train(recipe(name=name), digits(), tmp_path, device="cpu")
    loaded_recipe, loaded_result, network = load_trained(tmp_path / "seed-0")
    assert loaded_recipe == recipe(name=name)
    assert loaded_result == result
    assert not network.training
    expected = state_of(tmp_path).network
    assert network.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in network.state_dict().items())


def test_the_rows_hold_the_averages_of_what_diagnose_says(run: Path) -> None:
    network = build_network(recipe(), digits(), seed=0)
    network.load_state_dict(state_of(run.parent).network)
    rows = fz.diagnose(network, 0.01)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    for name in PRODUCTS:
        assert last[name] == pytest.approx(sum(getattr(row, name) for row in rows) / len(rows), rel=1e-6)
    assert 0 < last["frobenius"] < last["nuclear"] < last["nuclear_bound"]


def test_a_dense_network_has_no_products_to_log_and_diagnosis_can_be_left_out(tmp_path: Path) -> None:
    assert product_row(build_network(recipe(name="digits/resnet8"), digits(), seed=0), 0.1) == {}
    [result] = train(recipe("run.diagnose=false", "schedule.epochs=1"), digits(), tmp_path, device="cpu")
    assert set(result["history"][0]) == set(MEASURED)


@pytest.mark.parametrize("name", ["test_accuracy", "nuclear"])
def test_networks_are_tested_and_diagnosed_as_often_as_the_recipe_says_and_at_the_end(
    name: str, tmp_path: Path
) -> None:
    changes = ("run.evaluate_every=2", "run.diagnose=true", "schedule.epochs=3")
    [result] = train(recipe(*changes), digits(), tmp_path, device="cpu")
    assert [name in row for row in result["history"]] == [False, True, True]


def curves(run: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(run)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_every_number_of_every_epoch_once(run: Path) -> None:
    found = curves(run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert set(found) == {*MEASURED, *PRODUCTS} - {"epoch"}
    for name, points in found.items():
        assert [step for step, _ in points] == [1, 2]
        assert [value for _, value in points] == pytest.approx([row[name] for row in rows], rel=1e-6)


def test_curves_of_an_epoch_that_is_trained_again_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # files of one second are ordered by this number as text: 9 comes after 10
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer._global_uid", AtomicCounter(9))

    def row(epoch: int, loss: float) -> dict[str, Any]:
        return {"epoch": epoch, "loss": loss}

    with Recorder(tmp_path, []) as recorder:
        recorder.add(row(1, 3.0))
        recorder.add(row(2, 2.0))  # and killed before its checkpoint
    with Recorder(tmp_path, [row(1, 3.0)]) as recorder:
        recorder.add(row(2, 1.0))
    assert curves(tmp_path) == {"loss": [(1, 3.0), (2, 1.0)]}
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [3.0, 1.0]


def test_a_recorder_without_a_folder_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Recorder(None, []) as recorder:
        recorder.add({"epoch": 0, "loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_what_json_has_no_number_for_is_written_as_null(tmp_path: Path) -> None:
    row = {"epoch": 0, "effective_step": float("inf"), "test_loss": float("nan"), "loss": 1.5}
    write_json(tmp_path / "result.json", {"history": [row]})
    with Recorder(tmp_path, []) as recorder:
        recorder.add(row)
    expected = {"epoch": 0, "effective_step": None, "test_loss": None, "loss": 1.5}
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == expected
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["history"] == [expected]
    assert is_sealed(result)


def test_a_result_made_in_a_checkout_names_its_commit() -> None:
    root = record.PACKAGE.parent
    if not (root / ".git").exists():
        assert commit() is None
        return
    head = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert str(commit()).removesuffix("-dirty") == head.stdout.strip()


def test_the_commit_is_that_of_the_package_and_of_no_repository_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        done = subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], capture_output=True, check=True)
        return done.stdout.decode().strip()

    package = tmp_path / "factorized"
    package.mkdir()
    (package / "version.py").write_text("")
    monkeypatch.setattr(record, "PACKAGE", package)
    assert commit() is None
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    assert commit() == git("rev-parse", "HEAD")
    (package / "version.py").write_text("changed")
    assert commit() == git("rev-parse", "HEAD") + "-dirty"
    inner = tmp_path / "env" / "factorized"
    inner.mkdir(parents=True)
    monkeypatch.setattr(record, "PACKAGE", inner)
    assert commit() is None
    monkeypatch.setenv("PATH", "")
    assert commit() is None


def test_decompositions_of_a_run_use_one_thread_whatever_the_process_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, int] = {}

    def watched(name: str, function: Any) -> Any:
        def run(*arguments: Any) -> Any:
            seen[name] = torch.get_num_threads()
            return function(*arguments)

        return run

    monkeypatch.setattr(record, "diagnose", watched("diagnose", record.diagnose))
    monkeypatch.setattr(trainer, "factorize_network", watched("factorize", trainer.factorize_network))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        train(recipe("schedule.epochs=1"), digits(), tmp_path, device="cpu")
        assert seen == {"diagnose": 1, "factorize": 1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
