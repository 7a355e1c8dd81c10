"""``factorized evaluate``."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from factorized.experiments.data.digits import load_digits
from factorized.experiments.training.result import read_result, read_result_file
from factorized.files.checksum import save_tensors
from tests.experiments.cli.conftest import Cli
from tests.experiments.training.small import change_result


def test_a_run_has_the_accuracy_that_was_recorded(cli: Cli, trained: Path, trained_dense: Path) -> None:
    for run in (trained, trained_dense):
        recorded = json.loads((run / "result.json").read_text())["accuracy"]
        said = cli("evaluate", run)
        assert said.code == 0
        assert f"test accuracy {recorded:.2f} %" in said.out
        assert f"recorded {recorded:.2f} %: +0.00 points" in said.out


def test_a_run_that_is_not_what_it_says_fails(cli: Cli, trained: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    change_result(run, accuracy=read_result(run)["accuracy"] - 1)
    said = cli("evaluate", run)
    assert said.code == 1
    assert "+1.00 points" in said.out


def test_other_images_are_measured_and_not_compared(cli: Cli, trained: Path, npz: Path) -> None:
    said = cli("evaluate", trained, "--data", npz)
    assert said.code == 0
    assert "on 20 images of noise" in said.out
    assert "not comparable" in said.out


def test_other_images_are_fed_as_those_that_were_learned_from(cli: Cli, trained: Path, tmp_path: Path) -> None:
    images = load_digits()
    brighter = images.x_train // 2 + 100  # other statistics, and the same images to test on
    parts = {"x_train": brighter, "y_train": images.y_train, "x_test": images.x_test, "y_test": images.y_test}
    np.savez(tmp_path / "brighter.npz", **{name: tensor.numpy() for name, tensor in parts.items()})
    recorded = json.loads((trained / "result.json").read_text())["accuracy"]
    assert f"test accuracy {recorded:.2f} %" in cli("evaluate", trained, "--data", tmp_path / "brighter.npz").out
    said = cli("compose", trained, "--data", tmp_path / "brighter.npz", "--out", tmp_path / "a.safetensors").out
    assert f"after {recorded:.2f} %" in said
    assert f"minus mean {images.mean[0]:.6g}, over std {images.std[0]:.6g}" in said


def test_a_result_that_does_not_say_how_images_were_fed_is_still_evaluated(
    cli: Cli, trained: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    data = read_result(run)["data"]
    change_result(run, data={key: value for key, value in data.items() if key not in ("mean", "std")})
    assert "+0.00 points" in cli("evaluate", run).out


def test_images_whose_classes_are_in_another_order_are_refused(cli: Cli, trained: Path, tmp_path: Path) -> None:
    run, images = shutil.copytree(trained, tmp_path / "run"), load_digits()
    names = [f"digit {number}" for number in range(10)]
    change_result(run, data={**read_result(run)["data"], "classes": names})
    parts = {name: getattr(images, name).numpy() for name in ("x_train", "y_train", "x_test", "y_test")}
    path = tmp_path / "named.npz"
    np.savez(path, **{**parts, "x_train": parts["x_train"][:50], "y_train": parts["y_train"][:50]}, classes=names)
    assert "not comparable" in cli("evaluate", run, "--data", path).out
    np.savez(path, **parts, classes=[*names[1:], "null"])
    assert "class 0 is 'digit 0' for the run, and 'digit 1' in named" in cli("evaluate", run, "--data", path).error
    np.savez(path, **parts)  # classes without names
    assert "+0.00 points" in cli("evaluate", run, "--data", path).out
    swapped = [*map(str, range(8)), "9", "8"]  # as folders of such names may be sorted
    np.savez(path, **parts, classes=swapped)
    assert "class 8 is '8' for the run, and '9' in named" in cli("evaluate", trained, "--data", path).error


def test_images_that_do_not_fit_are_refused(cli: Cli, trained: Path, tmp_path: Path) -> None:
    x, y = np.zeros((4, 16, 16), dtype=np.uint8), np.arange(4) % 2
    np.savez(tmp_path / "other.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    message = cli("evaluate", trained, "--data", tmp_path / "other.npz").error
    assert "(10, 1, 8, 8) of digits" in message
    assert "(2, 1, 16, 16)" in message


def test_what_is_no_run_says_what_one_is(cli: Cli, trained: Path, tmp_path: Path) -> None:
    assert f"did you mean {trained}?" in cli("evaluate", trained.parent).error
    (tmp_path / "result.json").write_text("{")
    assert "result.json: not valid JSON" in cli("evaluate", tmp_path).error
    for other, why in (('{"a": 1}', "it has no recipe, seed"), ("[1]", "it holds no fields")):
        (tmp_path / "result.json").write_text(other)
        assert f"result.json: not the result of a run: {why}" in cli("evaluate", tmp_path).error
    run = shutil.copytree(trained, tmp_path / "run")
    weights = next((run / "model").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:100])
    assert "is damaged" in cli("evaluate", run).error


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("accuracy", float("nan"), "accuracy: must be a finite number, got nan"),
        ("accuracy", "98.03", "accuracy: must be a valid number, got '98.03'"),
        ("accuracy", 140.0, "accuracy: must be less than or equal to 100"),
        ("seed", None, "seed: must be a valid integer, got None"),
        ("data", {"name": "digits"}, "data.checksum: Field required"),
        ("history", {}, "history: must be a valid list"),
        ("files", {"plan.json": 3}, "files.plan.json: must be a valid string"),
        ("files", None, "files must hold the checksums"),
    ],
)
def test_a_field_of_another_type_is_named(
    cli: Cli, trained: Path, tmp_path: Path, field: str, value: object, message: str
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    change_result(run, **{field: value})
    said = cli("evaluate", run).error
    assert message in said
    assert f"{run}/result.json: " in said
    assert "train the run again" in said


@pytest.mark.parametrize("verb", ["evaluate", "compose"])
def test_a_result_that_was_changed_is_refused(cli: Cli, trained: Path, tmp_path: Path, verb: str) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    text = (run / "result.json").read_text()
    (run / "result.json").write_text(text.replace('"seed": 0', '"seed": 1'))
    assert f"{run}/result.json: damaged, or changed since" in cli(verb, run).error


def test_committed_results_of_images_can_be_read() -> None:
    paths = sorted((Path(__file__).parents[3] / "results").glob("cifar*/**/*.json"))
    assert len(paths) > 10
    for path in paths:
        result = read_result_file(path)
        epochs = [row["epoch"] for row in result["history"]]
        assert epochs == list(range(1, result["recipe"]["schedule"]["epochs"] + 1))


def test_damaged_weights_of_a_dense_run_are_named(cli: Cli, trained_dense: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained_dense, tmp_path / "run")
    weights = run / "model/dense.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert f"{weights} is damaged" in cli("evaluate", run).error
    save_tensors(weights, {"a": torch.zeros(1)})
    assert f"{weights} is damaged, or of another network" in cli("evaluate", run).error
    change_result(run, files={weights.name: hashlib.sha256(weights.read_bytes()).hexdigest()})
    assert f"{weights} holds the weights of another network" in cli("evaluate", run).error
