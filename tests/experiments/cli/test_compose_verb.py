"""``factorized compose``: the file is what was trained, or it is not there."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from factorized.experiments.data.digits import load_digits
from factorized.experiments.data.load import load_images
from factorized.experiments.models.build import build_model
from factorized.experiments.training import export
from factorized.experiments.training.evaluate import evaluate_as_trained
from factorized.experiments.training.trained import fit_images, load_trained
from factorized.files.atomic import WholeFile
from factorized.files.checksum import save_tensors
from tests.experiments.cli.conftest import Cli
from tests.experiments.training.small import change_result
from tests.experiments.training.test_folder import files_of_at_most

SUFFIX = {"plain": ".safetensors", "onnx": ".onnx", "export": ".pt2"}


@pytest.mark.parametrize("low_rank", [False, True])
@pytest.mark.parametrize("kind", ["plain", "onnx", "export"])
def test_a_low_rank_run_becomes_a_file_with_its_accuracy(
    cli: Cli, trained: Path, tmp_path: Path, kind: str, low_rank: bool
) -> None:
    path = tmp_path / f"model{SUFFIX[kind]}"
    said = cli("compose", trained, "--to", kind, "--out", path, *(["--lower"] if low_rank else []))
    assert (said.code, said.err) == (0, "")
    accuracy = json.loads((trained / "result.json").read_text())["accuracy"]
    assert f"accuracy before {accuracy:.2f} %, after {accuracy:.2f} %" in said.out
    assert f"7,466 parameters in training, {'7,466' if low_rank else '75,002'} now" in said.out
    assert list(tmp_path.iterdir()) == [path]


def test_a_plain_checkpoint_loads_into_the_dense_model(cli: Cli, trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "plain.safetensors"
    assert cli("compose", trained, "--out", path).code == 0
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
    assert json.loads(about["classes"]) == [str(digit) for digit in range(10)]
    plain = build_model(about["model"], 10, 8, 1).eval()
    plain.load_state_dict(load_file(path))
    images = load_digits()
    device = torch.device("cpu")
    expected = export.logits_on_test(load_trained(trained)[2], images, device)
    torch.testing.assert_close(export.logits_on_test(plain, images, device), expected, rtol=1e-4, atol=1e-4)


def test_the_file_lies_in_the_run_unless_named(cli: Cli, trained_dense: Path) -> None:
    assert cli("compose", trained_dense, "--to", "export").code == 0
    assert (trained_dense / "composed.pt2").is_file()
    assert "already there" in cli("compose", trained_dense, "--to", "export").error
    assert cli("compose", trained_dense, "--to", "export", "--overwrite").code == 0


def change_weights(run: Path, change: Callable[[torch.Tensor], object], name: str, *, admit: bool) -> None:
    """Change a tensor of a dense run; ``admit`` it in the checksum that the result holds."""
    path = run / "model/dense.safetensors"
    tensors = load_file(path)
    change(tensors[name])
    path.unlink()  # which may be mapped into memory
    save_tensors(path, tensors)
    if admit:
        change_result(run, files={path.name: hashlib.sha256(path.read_bytes()).hexdigest()})


@pytest.mark.parametrize("verb", ["compose", "evaluate"])
@pytest.mark.parametrize(("name", "value"), [("linear.weight", "nan"), ("bn1.running_var", "inf")])
def test_weights_that_are_not_finite_are_refused_by_name(
    cli: Cli, trained_dense: Path, tmp_path: Path, verb: str, name: str, value: str
) -> None:
    run = shutil.copytree(trained_dense, tmp_path / "run", ignore=shutil.ignore_patterns("composed*"))
    change_weights(run, lambda tensor: tensor.flatten()[3:4].fill_(float(value)), name, admit=True)
    assert f"{run}/model: {name} holds NaN or infinity" in cli(verb, run).error
    assert not list(run.glob("composed*"))


@pytest.mark.parametrize("kind", ["plain", "onnx", "export"])
def test_a_network_with_another_accuracy_than_recorded_is_not_written(
    cli: Cli, trained_dense: Path, tmp_path: Path, kind: str
) -> None:
    run = shutil.copytree(trained_dense, tmp_path / "run", ignore=shutil.ignore_patterns("composed*"))
    change_weights(run, torch.Tensor.neg_, "linear.weight", admit=True)
    message = cli("compose", run, "--to", kind).error
    assert "% on these images, and its network has" in message
    assert "nothing was written" in message
    assert not list(run.glob("composed*"))


def test_a_run_in_bfloat16_has_the_accuracy_that_it_recorded_where_rounding_decides(
    cli: Cli, trained_dense: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(trained_dense, tmp_path / "run", ignore=shutil.ignore_patterns("composed*"))
    (recipe, result, network), images = load_trained(run), load_digits()
    recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"precision": "bfloat16"})})
    every = replace(images, x_test=images.x_train, y_test=images.y_train)
    exact = export.logits_on_test(network, every, torch.device("cpu")).topk(2)
    near = exact.values.diff().squeeze().abs().argsort()[:20]  # images whose classes are nearly as likely
    parts = {"x_train": images.x_train, "y_train": images.y_train, "x_test": every.x_test[near]}
    np.savez(tmp_path / "near.npz", y_test=exact.indices[near, 0], **{key: part.numpy() for key, part in parts.items()})
    near_images = load_images(str(tmp_path / "near.npz"))
    _, accuracy = evaluate_as_trained(recipe, network, fit_images(result, near_images))
    assert accuracy < 99  # 100 in float32
    data = {**result["data"], "checksum": near_images.checksum}
    change_result(run, accuracy=accuracy, recipe=recipe.to_dict(), data=data)
    said = cli("compose", run, "--data", tmp_path / "near.npz", "--out", tmp_path / "a.safetensors")
    assert said.code == 0, said
    assert "accuracy before 100.00 %, after 100.00 %" in said.out


def test_a_network_whose_file_was_changed_is_refused(cli: Cli, trained_dense: Path, tmp_path: Path) -> None:
    run = shutil.copytree(trained_dense, tmp_path / "run", ignore=shutil.ignore_patterns("composed*"))
    change_weights(run, lambda tensor: tensor.flatten()[0:1].add_(1e-6), "linear.weight", admit=False)
    assert "dense.safetensors is damaged, or of another network: its checksum is" in cli("compose", run).error
    (run / "model/dense.safetensors").unlink()
    assert "dense.safetensors is missing" in cli("compose", run).error


def test_on_other_images_only_before_and_after_are_compared(cli: Cli, trained: Path, npz: Path, tmp_path: Path) -> None:
    said = cli("compose", trained, "--data", npz, "--out", tmp_path / "a.safetensors")
    assert said.code == 0, said
    recorded = json.loads((trained / "result.json").read_text())["accuracy"]
    assert f"recorded {recorded:.2f} % on other images (digits): not compared" in said.out
    assert "accuracy before" in said.out


def test_the_batch_of_an_onnx_file_has_a_name(cli: Cli, trained: Path, tmp_path: Path) -> None:
    import onnx

    assert cli("compose", trained, "--to", "onnx", "--out", tmp_path / "a.onnx").code == 0
    graph = onnx.load(tmp_path / "a.onnx").graph
    sizes = [value.type.tensor_type.shape.dim for value in (*graph.input, *graph.output)]
    assert [dims[0].dim_param for dims in sizes] == ["batch", "batch"]


def test_the_help_names_both_files(cli: Cli, trained_dense: Path) -> None:
    said = " ".join(cli("compose", "--help").out.replace("│", " ").split())
    assert "RUN/composed.*, or RUN/lowered.* with --lower" in said


@pytest.mark.parametrize("kind", ["plain", "onnx", "export"])
def test_a_file_that_is_less_accurate_is_not_left_behind(
    cli: Cli, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    read = export.read_network

    def read_wrong(*arguments: object) -> Callable[[torch.Tensor], torch.Tensor]:
        function = read(*arguments)
        return lambda x: -function(x)

    monkeypatch.setattr(export, "read_network", read_wrong)
    said = cli("compose", trained, "--to", kind, "--out", tmp_path / f"model{SUFFIX[kind]}")
    assert said.code == 1
    assert "was not written" in said.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["plain", "onnx", "export"])
def test_a_full_disk_is_one_line_and_leaves_nothing_behind(cli: Cli, trained: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"model{SUFFIX[kind]}"
    with files_of_at_most(1000):
        message = cli("compose", trained, "--to", kind, "--out", path).error
    assert message == f"factorized: cannot write to {path}: File too large; name another file by --out\n"
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_may_not_be_written_is_named(
    cli: Cli, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: WholeFile) -> None:
        raise OSError(30, "Read-only file system", str(file.temporary))

    monkeypatch.setattr(WholeFile, "__enter__", refuse)
    path = tmp_path / "m.safetensors"
    assert f"cannot write to {path}: Read-only file system" in cli("compose", trained, "--out", path).error


def test_a_file_that_is_not_a_run_is_reported_first(cli: Cli, tmp_path: Path) -> None:
    assert f"there is no {tmp_path}/none/result.json" in cli("compose", tmp_path / "none").error


@pytest.mark.parametrize(("missing", "code"), [("onnxruntime", 0), ("onnxscript", 2)])
def test_a_missing_package_is_named(
    cli: Cli, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, code: int
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    said = cli("compose", trained, "--to", "onnx", "--out", tmp_path / "m.onnx")
    assert said.code == code
    assert "run pip install '.[onnx]' in the folder of your clone" in said.out + said.err
    assert (tmp_path / "m.onnx").is_file() == (code == 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "m.onnx"], "must end in .safetensors; for .onnx, give --to onnx"),
        (["--out", "m"], "in .safetensors\n"),
        (["--out", "/no/such/m.safetensors"], "there is no folder"),
    ],
)
def test_a_wrong_file_name_is_refused(cli: Cli, trained: Path, arguments: list[str], message: str) -> None:
    assert message in cli("compose", trained, *arguments).error
