"""``factorized train``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.experiments.cli.conftest import RECIPE, SHORT, Cli

ROOT = Path(__file__).parents[3]
TINY = ("--set", "schedule.epochs=1", "--set", "run.batch=64", "--quiet")


def test_seeds_land_in_folders_of_their_own_and_are_summed_up(cli: Cli, tmp_path: Path) -> None:
    said = cli("train", "digits/resnet8", *SHORT, "--seeds", 2, "--out", tmp_path)
    results = [json.loads((tmp_path / f"digits/resnet8/seed-{n}/result.json").read_text()) for n in range(2)]
    accuracies = [result["accuracy"] for result in results]
    assert "epoch 1/1" in said.out
    assert all(f"{accuracy:.2f}" in said.out for accuracy in accuracies)
    assert f"digits/resnet8: {sum(accuracies) / 2:.2f} ± " in said.out
    assert "% (n = 2), 75,002 parameters" in said.out


def test_seeds_that_take_turns_end_as_they_do_one_after_another(cli: Cli, tmp_path: Path) -> None:
    command = ("train", "digits/resnet8", *SHORT, "--set", "run.batch=256", "--seeds", 2)
    alone = cli(*command, "--out", tmp_path / "a")
    at_once = cli(*command, "--at-once", 2, "--out", tmp_path / "b")
    results = [
        [json.loads((tmp_path / run / f"digits/resnet8/seed-{n}/result.json").read_text()) for n in range(2)]
        for run in "ab"
    ]
    assert [result["accuracy"] for result in results[0]] == [result["accuracy"] for result in results[1]]
    assert [result["machine"]["runs_at_once"] for result in results[0] + results[1]] == [1, 1, 2, 2]
    assert alone.out.splitlines()[-1] == at_once.out.splitlines()[-1]


def test_one_seed_and_the_papers_figure(cli: Cli, npz: Path, tmp_path: Path) -> None:
    name = "cifar10/resnet32-full-fd"
    said = cli("train", name, "--data", npz, *TINY, "--set", "model.name=resnet8", "--seed", 7, "--out", tmp_path / "o")
    assert (tmp_path / f"o/{name}/seed-7/result.json").is_file()
    assert "(n = 1)" in said.out
    assert "; paper, table 3: " in said.out
    assert "epoch 1/1" not in said.out


def test_data_may_be_a_data_set_or_a_folder_of_them(cli: Cli, npz: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sets"
    folder.mkdir()
    shutil.copy(npz, folder / "cifar10.npz")
    refused = cli("train", "cifar10/resnet20", *TINY, "--data", folder, "--out", tmp_path / "o")
    assert "cifar10.npz" in refused.error  # found by name in the folder, and not what CIFAR-10 must hold
    assert cli("data", "prepare", npz, "--folder", folder, "--name", "noise").code == 0
    named = ("--set", "data.name=noise", "--set", "model.name=resnet8")
    by_name = cli("train", "cifar10/resnet20", *TINY, *named, "--data", folder, "--out", tmp_path / "a")
    by_path = cli(
        "train", "cifar10/resnet20", *TINY, "--set", "model.name=resnet8", "--data", npz, "--out", tmp_path / "b"
    )
    assert (by_name.code, by_path.code) == (0, 0)
    results = [json.loads((tmp_path / run / "cifar10/resnet20/seed-0/result.json").read_text()) for run in "ab"]
    assert results[0]["data"]["checksum"] == results[1]["data"]["checksum"]
    assert results[0]["recipe"] == results[1]["recipe"]  # wherever the images are
    run = tmp_path / "b/cifar10/resnet20/seed-0"
    assert str(tmp_path) not in (run / "result.json").read_text()
    for verb in ("evaluate", "compose"):
        message = cli(verb, run).error
        assert "the run was trained on 'noise' (checksum " in message
        assert "Name the file or folder by --data" in message
        assert cli(verb, run, "--data", npz).code == 0
    assert cli("evaluate", run, "--data", folder).code == 0  # found by its name
    again = ("--set", "model.name=resnet8", "--data", shutil.copy(npz, tmp_path / "noise.npz.bak"))
    assert (
        "is not a data set"
        in cli("train", "cifar10/resnet20", *TINY, *again, "--out", tmp_path / "b", "--resume").error
    )
    (tmp_path / "moved").mkdir()
    again = ("--set", "model.name=resnet8", "--data", shutil.copy(npz, tmp_path / "moved" / "noise.npz"))
    assert cli("train", "cifar10/resnet20", *TINY, *again, "--out", tmp_path / "b", "--resume").code == 0


def test_a_set_of_the_same_name_and_other_images_is_not_taken_for_that_of_the_run(
    cli: Cli, npz: Path, tmp_path: Path
) -> None:
    digits = shutil.copy(npz, tmp_path / "digits.npz")
    assert cli("train", "digits/resnet8", *TINY, "--data", digits, "--out", tmp_path).code == 0
    message = cli("evaluate", tmp_path / "digits/resnet8/seed-0").error
    assert "trained on 'digits'" in message
    assert "but the data of that name have checksum" in message


@pytest.mark.parametrize("name", ["digits", "noise.npz"])
def test_a_folder_that_would_not_be_looked_into_is_refused(cli: Cli, npz: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "photos" / "cats").mkdir(parents=True)  # without train/ and test/
    named = name if name == "digits" else str(npz)
    change = ("--set", f"data.name={named}")
    message = cli("train", "digits/resnet8", *SHORT, *change, "--data", tmp_path / "photos", "--out", tmp_path).error
    assert f"'{named}' is not read from a folder of data sets" in message
    assert "photos is not a data set itself: expected train/CLASS/" in message


def test_a_set_known_by_name_is_not_a_path(cli: Cli, tmp_path: Path) -> None:
    message = cli("train", "digits/resnet8", *SHORT, "--data", "prepared", "--out", tmp_path).error
    assert "--set data.name=prepared" in message


def test_a_recipe_of_ones_own_lands_under_its_name_wherever_its_file_is(cli: Cli, tmp_path: Path) -> None:
    own = tmp_path / "deep" / "own.toml"
    own.parent.mkdir()
    own.write_text('extends = "digits/resnet8"\n[schedule]\nepochs = 1\n')
    assert cli("train", own, "--quiet", "--out", tmp_path / "o").code == 0
    assert (tmp_path / "o/own/seed-0/result.json").is_file()


def test_a_run_is_not_overwritten_unless_asked_and_can_be_resumed(cli: Cli, trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "o" / RECIPE / "seed-0"
    shutil.copytree(trained, run)
    again = ("train", RECIPE, *SHORT, "--quiet", "--out", tmp_path / "o")
    assert "continue it with --resume, or start over with --overwrite" in cli(*again).error
    assert cli(*again, "--resume").code == 0
    assert "optimizer.lr" in cli(*again, "--set", "optimizer.lr=0.2", "--resume").error
    assert cli(*again, "--set", "optimizer.lr=0.2", "--overwrite").code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "2", "--seed", "1"], "not both"),
        (["--at-once", "0"], "--at-once"),
        (["--resume", "--overwrite"], "give one of them"),
        (["--resume", "--auto-resume"], "got --resume and --auto-resume"),
        (["--resume"], "there is nothing to resume in "),
        (["--device", "toaster"], "--device must be cpu, cuda or cuda:NUMBER, got 'toaster'"),
        (["--device", "meta"], "--device must be cpu, cuda or cuda:NUMBER, got 'meta'"),
        (["--device", "cuda:99"], "there is no GPU 99; this machine has "),
        (["--data", "/no/such/place"], "there is no file or folder /no/such/place"),
        (["--set", "schedule.epoch=3"], "did you mean 'epochs'?"),
        (["--set", "epochs=3"], "a change is section.field=value"),
        (["--set", "schedule.epochs=zero"], "schedule.epochs"),
        (
            ["--set", "data.crop_padding=8"],
            "data.crop_padding = 8 would crop images of 8×8 out of sight: expected 0..7",
        ),
        (
            ["--set", "data.cutout=9"],
            "data.cutout = 9 would cut squares out of images of 8×8 that are larger than the images: expected 0..8",
        ),
        (["--set", "data.place=loader", "--set", "data.workers=5000"], "workers must be at most"),
        (["--set", "data.workers=2"], 'workers = 2 read ahead for place = "loader"'),
        (["--set", "run.batch=100000"], "run.batch = 100000 is more than the"),
        (["--set", "data.name=cifer10"], "did you mean 'cifar10'?"),
        (["--set", "model.name=vgg19"], "needs at least 16×16"),
        (["--out", "/proc/nothing"], "cannot write to /proc/nothing"),
    ],
)
def test_a_wrong_request_says_what_is_wrong(cli: Cli, tmp_path: Path, arguments: list[str], message: str) -> None:
    said = cli("train", "digits/resnet8", "--quiet", "--out", tmp_path, *arguments)
    assert message in said.error
    assert not list(tmp_path.rglob("result.json"))


def test_runs_on_text_take_no_turns(cli: Cli, tmp_path: Path) -> None:
    said = cli("train", "language/tiny", "--seeds", 2, "--at-once", 2, "--out", tmp_path)
    assert "--at-once 2 is for recipes of images; language/tiny is on text, leave it out" in said.error


def test_a_loss_that_is_not_a_number_is_one_line_with_what_to_try(cli: Cli, tmp_path: Path) -> None:
    wild = ("--set", "optimizer.lr=1e30", *SHORT)
    said = cli("train", "digits/resnet8", *wild, "--out", tmp_path)
    assert "Try optimizer.lr=0.1 or" in said.error


def test_a_script_can_always_resume(cli: Cli, tmp_path: Path) -> None:
    always = ("train", "digits/resnet8", *SHORT, "--quiet", "--auto-resume", "--out", tmp_path)
    first, second = cli(*always), cli(*always)
    assert first.code == second.code == 0
    assert first.out == second.out


@pytest.mark.nightly
def test_two_processes_under_torchrun_train_one_run(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = [
        "factorized",
        "train",
        "digits/resnet8",
        *SHORT,
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    found = subprocess.run([*launch, *command], capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("(n = 1)") == 1
    result = json.loads((tmp_path / "digits/resnet8/seed-0/result.json").read_text())
    assert result["machine"]["processes"] == 2
