"""``factorized compose``: the file is what was trained, or it is not there."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from factorized.vision import export
from factorized.vision.data.digits import load_digits
from factorized.vision.models.build import build_model
from factorized.vision.trained import load_trained
from tests.cli.conftest import Cli
from tests.vision.test_folder import files_of_at_most

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
    assert message == f"factorized: cannot write {path}: File too large; name another file by --out\n"
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_may_not_be_written_is_named(
    cli: Cli, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *arguments: object) -> None:
        raise OSError(30, "Read-only file system", str(path))

    for way in ("write_bytes", "unlink"):
        monkeypatch.setattr(Path, way, refuse)
    path = tmp_path / "m.safetensors"
    assert f"cannot write {path}: Read-only file system" in cli("compose", trained, "--out", path).error


def test_what_is_no_run_is_told_before_anything_about_the_file(cli: Cli, tmp_path: Path) -> None:
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
    [(["--out", "m.onnx"], "must end in .safetensors"), (["--out", "/no/such/m.safetensors"], "there is no folder")],
)
def test_a_wrong_file_name_is_refused(cli: Cli, trained: Path, arguments: list[str], message: str) -> None:
    assert message in cli("compose", trained, *arguments).error
