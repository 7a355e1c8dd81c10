from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import factorized as fz
from factorized.files.checksum import save_tensors, sealed
from tests.models.unchanged import unchanged


def dense(width: int = 8, count: int = 4) -> nn.Sequential:
    middle = [nn.Linear(width, width) for _ in range(count - 2)]
    return nn.Sequential(nn.Linear(6, width), *middle, nn.Linear(width, 3), nn.BatchNorm1d(3))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    fz.save(fz.factorize(dense(), rank=2), tmp_path)
    return tmp_path


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "plan.json").read_text())


def weights_of(folder: Path) -> Path:
    return folder / manifest_of(folder)["weights"]


def assert_refused(folder: Path, message: str, model: nn.Module | None = None) -> None:
    model = dense() if model is None else model
    with unchanged(model), pytest.raises(ValueError, match=message):
        fz.load(folder, model)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_truncated_weights_are_called_damaged(saved: Path, share: float) -> None:
    path = weights_of(saved)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    assert_refused(saved, r"weights-.*\.safetensors is damaged \(.*bytes\): save the model again")


def test_weights_that_are_not_safetensors_are_called_damaged(saved: Path) -> None:
    torch.save({"a": torch.ones(3)}, weights_of(saved))
    assert_refused(saved, r"weights-.*\.safetensors is damaged")


def test_missing_weights_are_named(saved: Path) -> None:
    weights_of(saved).unlink()
    assert_refused(saved, r"weights-.*\.safetensors is missing, but plan\.json names it")


@pytest.mark.parametrize("folder", [".", "nowhere"])
def test_a_folder_without_a_manifest_holds_no_checkpoint(tmp_path: Path, folder: str) -> None:
    assert_refused(tmp_path / folder, r"holds no checkpoint: plan\.json is missing. fz\.save")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is damaged"),
        ("{", "is damaged"),
        ('{"format": 1, "pl', "is damaged"),
        ("[1, 2]", "was not written by fz.save"),
        ("{}", "was not written by fz.save"),
        (json.dumps(sealed({"format": 1})), "is damaged: weights, aliases, plan is missing"),
        ('{"format": 1}', "is damaged: its checksum does not match"),
        ('{"format": 1, "plan": ' + "[" * 100_000, "is damaged: its values are nested too deeply"),
        ('{"format": 1, "plan": ' + "[" * 10_000 + "]" * 10_000 + "}", "is damaged"),
        ('{"format": 1, "plan": ' + "9" * 10_000 + "}", "is damaged"),
    ],
)
def test_a_manifest_of_garbage_is_called_damaged(saved: Path, text: str, message: str) -> None:
    (saved / "plan.json").write_text(text)
    assert_refused(saved, rf"plan\.json {message}")


@pytest.mark.parametrize("number", [2, 99, "1", None])
def test_another_format_number_says_which_versions_meet(saved: Path, number: object) -> None:
    manifest = manifest_of(saved) | {"format": number, "factorized": "9.9.9"}
    (saved / "plan.json").write_text(json.dumps(manifest))
    assert_refused(saved, rf"has format {number!r}, written by factorized 9\.9\.9; this is .* reads format 1")


def edit_entry(**changes: object) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["plan"]["entries"][0].update(changes)


def edit_format(**changes: object) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["plan"]["entries"][0]["format"].update(changes)


def edit(**changes: object) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest.update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit_format(rank=3), "1.U is 8x2, expected 8x3; 1.V is 8x2, expected 8x3. Nothing was changed"),
        (edit_format(rank=0), "rank must be a whole number of at least 1, got 0"),
        (edit_format(rank=2.0), "rank must be a whole number of at least 1, got 2.0"),
        (edit_format(rank="2"), r"plan\.json: entry '1': rank must be a whole number of at least 1, got '2'"),
        (edit_format(rank=True), r"plan\.json: entry '1': rank must be a whole number of at least 1, got True"),
        (edit_format(rank={"a": 1}), r"plan\.json: entry '1': rank must be a whole number of at least 1, got {'a': 1}"),
        (edit_format(rank=10**15), r"plan\.json: entry '1': rank must be in 1\.\.8000 .*got 10{15}"),
        (edit_format(rank=10**3), r"plan\.json: the factors of '1' \(rank=1000\) are larger than all of the"),
        (edit_format(depth=10**15), r"plan\.json: entry '1': depth must be in 0\.\.1000, got 10{15}"),
        (edit_format(depth=-1), r"plan\.json: entry '1': depth must be a whole number of at least 0, got -1"),
        (edit_entry(shape=[8, -8]), r"plan\.json: entry '1': shape must be a whole number of at least 0, got -8"),
        (edit_entry(shape=["8", 8]), r"plan\.json: entry '1': shape must be a whole number of at least 0, got '8'"),
        (edit_entry(shape=8), r"plan\.json: entry '1': shape must be a list, got 8"),
        (edit_entry(shape=None), r"plan\.json: entry '1': shape must be a list, got None"),
        (edit_entry(shape=[]), r"plan\.json: entry '1': shape must be a list of at least two, got \[\]"),
        (edit_format(groups=0), r"plan\.json: entry '1': format: groups must be a whole number of at least 1, got 0"),
        (edit_entry(name=1), r"plan\.json: entry 1: name must be text, got 1"),
        (edit_format(groups=2), "1: format must be for a weight 8x8 with groups=1, got one for 8x8 with groups=2"),
        (edit_format(row_dims=10**15), r"plan\.json: entry '1': format: row_dims must be in 0\.\.0, got 10{15}"),
        (edit_format(name="round"), r"plan\.json: entry '1': format name must be one of product, .*, got 'round'"),
        (edit_entry(type=["Linear"]), r"plan\.json: entry '1': type must be text, got \('Linear',\)"),
        (edit_entry(aliases="2"), r"plan\.json: entry '1': aliases must be a list, got '2'"),
        (edit_entry(aliases=[2]), r"plan\.json: entry '1': aliases must be text, got 2"),
        (edit_entry(params="many"), r"plan\.json: entry '1': params must be a whole number of at least 0, got 'many'"),
        (edit_entry(format=3), r"plan\.json: .*not a plan"),
        (
            edit_entry(format={"groups": 1, "row_dims": 0, "name": "tucker", "dims": [-2, 4], "rank": [1, 1]}),
            r"plan\.json: entry '1': dims must be",
        ),
        (edit_entry(head_ranks=[2, "2"]), r"plan\.json: entry '1': head_ranks must be a whole number"),
        (edit_entry(head_ranks=[2]), r"plan\.json: entry '1': head_ranks must be a list of two, got \[2\]"),
        (edit_format(rank=[2, 2]), "rank must be a whole number of at least 1"),
        (edit_entry(format=None), "missing 1.weight; unexpected 1.U, 1.V"),
        (edit_format(depth=1), "missing 1.inner.0"),
        (edit_entry(name="7"), "7 is missing"),
        (edit_entry(name="0"), "0 has shape 8x6, not 8x8"),
        (edit_entry(type="Conv2d"), "1 is Linear, not Conv2d"),
        (edit_entry(shape=[8, 9]), "1 has shape 8x8, not 8x9"),
        (edit_entry(aliases=["2"]), "2 is in the plan twice"),
        (edit_entry(aliases=["0"]), "1 is the module at 1; in the plan, at 0 and 1"),
        (edit_entry(tied_to="0"), "1 is tied to 0, which the plan does not factorize"),
        (edit_entry(surprise=1), "not a plan"),
        (edit(plan={"format": 2}), "plan format must be 1, got 2"),
        (edit(plan=[]), "plan"),
        (edit(aliases=[]), "plan.json is damaged: aliases must map names to names"),
        (edit(aliases={"1.U": 3}), "plan.json is damaged: aliases must map names to names"),
        (edit(aliases={"1.U": "2.U"}), "plan.json is damaged: alias '1.U' must be another name of a saved tensor"),
        (edit(aliases={"x": "9.U"}), "plan.json is damaged: alias 'x' must be another name of a saved tensor"),
        (edit(weights=3), "plan.json is damaged: weights must be a name that fz.save gives, got 3"),
        (edit(weights="../weights-0123456789ab.safetensors"), "plan.json is damaged: weights must be a name"),
        (edit(weights="/etc/passwd"), "plan.json is damaged: weights must be a name"),
    ],
)
def test_an_edited_manifest_is_refused(saved: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    manifest = manifest_of(saved)
    change(manifest)
    del manifest["checksum"]
    (saved / "plan.json").write_text(json.dumps(sealed(manifest)))
    assert_refused(saved, message)


def drop(tensors: dict[str, Tensor]) -> None:
    for key in [key for key in tensors if key.startswith(("1.", "2."))]:
        del tensors[key]


def add(tensors: dict[str, Tensor]) -> None:
    tensors["7.weight"] = torch.ones(2)


def reshape(tensors: dict[str, Tensor]) -> None:
    tensors["0.bias"] = torch.ones(9)
    tensors["4.num_batches_tracked"] = torch.ones(1, dtype=torch.long)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, "missing 1.U, 1.V, 1.bias and 3 more. Nothing was changed"),
        (add, "unexpected 7.weight. Nothing was changed"),
        (reshape, "0.bias is 9, expected 8; 4.num_batches_tracked is 1, expected a scalar. Nothing was changed"),
    ],
)
def test_edited_weights_are_refused(saved: Path, change: Callable[[dict[str, Tensor]], None], message: str) -> None:
    tensors = load_file(weights_of(saved))
    change(tensors)
    save_tensors(weights_of(saved), tensors)
    assert_refused(saved, f"the checkpoint in .* does not fit the model: {message}")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (dense(width=9), "1 has shape 9x9, not 8x8; 2 has shape 9x9, not 8x8"),
        (dense(count=3), "2 has shape 3x8, not 8x8"),
        (nn.Sequential(nn.Linear(6, 8)), "another model .*: 1 is missing; 2 is missing"),
        (dense()[:4], "unexpected 4.bias, 4.num_batches_tracked, 4.running_mean and 2 more"),
        (nn.Sequential(*dense(), nn.Linear(3, 3)), "missing 5.bias, 5.weight"),
    ],
)
def test_weights_of_another_model_say_what_differs(saved: Path, model: nn.Module, message: str) -> None:
    assert_refused(saved, message, model)
