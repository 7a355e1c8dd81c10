"""``factorized compress``: a run, a Hugging Face folder or a function made smaller, stage by stage."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import factorized as fz
from factorized.experiments.cli.main import main
from factorized.experiments.compress import images as image_subjects
from factorized.experiments.compress.images import ImageSubject
from factorized.experiments.models.build import build_model
from factorized.experiments.training.folder import claimed
from factorized.experiments.training.progress import Reporter
from tests.browser import Browser
from tests.experiments.cli.conftest import Cli

RATIO = 0.3
QUICK = ("--kind", "channel", "--samples", "256")  # factors in closed form
STAGES = ("before", "plan", "compressed", "recovered", "differences")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense run of three epochs, which is worth compressing."""
    out = tmp_path_factory.mktemp("dense")
    assert main(["train", "digits/resnet8", "--set", "schedule.epochs=3", "--out", str(out), "--quiet"]) == 0
    return out / "digits/resnet8/seed-0"


@pytest.fixture(scope="module")
def compressed(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That run compressed, recovered, lowered and composed."""
    out = tmp_path_factory.mktemp("compressed")
    given = ["--ratio", RATIO, "--out", out, "--to", "lowered", "--to", "composed", "--quiet"]
    assert main(["compress", str(run), *map(str, given)]) == 0
    return out


def state_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "compress.json").read_text())
    return found


def test_a_run_keeps_its_ratio_and_most_of_its_accuracy(run: Path, compressed: Path) -> None:
    state = state_of(compressed)
    dense = json.loads((run / "result.json").read_text())
    assert state["before"]["scores"]["accuracy"] == pytest.approx(dense["accuracy"])
    assert state["before"]["parameters"] == dense["parameters"]
    assert RATIO - 0.01 < state["compressed"]["parameters"] / dense["parameters"] <= RATIO
    assert state["recovered"]["parameters"] == state["compressed"]["parameters"]
    assert state["compressed"]["scores"]["accuracy"] > dense["accuracy"] - 15
    assert state["recovered"]["scores"]["accuracy"] > dense["accuracy"] - 10
    assert set(STAGES) <= state["seconds"].keys()
    assert state["machine"]["torch"] == torch.__version__


def test_recovery_is_a_run_like_any_other(cli: Cli, compressed: Path) -> None:
    recovered = compressed / "recovered/seed-0"
    assert cli("evaluate", recovered).code == 0
    recipe = json.loads((recovered / "result.json").read_text())["recipe"]
    assert recipe["decay"]["kind"] == "frobenius"
    assert recipe["factorize"]["ratio"] == RATIO
    assert recipe["schedule"]["epochs"] == 1


def test_the_compressed_network_opens_by_itself(compressed: Path) -> None:
    state = state_of(compressed)
    network = fz.load(compressed / "compressed", build_model("resnet8", 10, 8, 1))
    assert {entry["name"]: entry["rank"] for entry in state["plan"]["layers"]} == {
        name: module.rank for name, module in network.named_modules() if isinstance(module, fz.FactorizedConv2d)
    }
    assert sum(p.numel() for p in network.parameters()) == state["compressed"]["parameters"]


def test_plain_forms_are_as_accurate_as_the_recovered_network(compressed: Path) -> None:
    state = state_of(compressed)
    for form, parameters in (("lowered", state["recovered"]["parameters"]), ("composed", 75_002)):
        assert state[form]["parameters"] == parameters
        assert state[form]["scores"]["accuracy"] == pytest.approx(state["recovered"]["scores"]["accuracy"], abs=0.5)
        assert load_file(compressed / form / "model.safetensors")


def test_layers_show_what_they_lost_alone_and_in_the_network(compressed: Path) -> None:
    state = state_of(compressed)
    names = [row["name"] for row in state["plan"]["layers"]]
    alone, within = state["differences"]["alone"], state["differences"]["compressed"]
    assert list(alone) == list(within) == list(state["differences"]["recovered"]) == names
    assert alone[names[0]] == pytest.approx(within[names[0]], rel=1e-3)  # nothing is compressed before it
    assert within[names[-1]] > alone[names[-1]] > 0
    for row in state["plan"]["layers"]:
        assert sum(row["spectrum"]) == pytest.approx(1)
        assert row["spectrum"] == sorted(row["spectrum"], reverse=True)


@pytest.fixture
def copied(compressed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(compressed, tmp_path / "copied"))


def test_what_is_finished_is_not_done_again(cli: Cli, run: Path, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("this was done before")

    before = (copied / "compress.json").read_bytes()
    for name in ("evaluate", "save", "load", "train", "dense", "batches"):
        monkeypatch.setattr(ImageSubject, name, refuse)
    said = cli("compress", run, "--ratio", RATIO, "--out", copied)
    assert said.code == 0, said.err
    rows = [line.split()[0] for line in said.out.splitlines()]
    assert rows[:6] == ["network", "dense", "compressed", "recovered", "lowered", "composed"]
    assert (copied / "compress.json").read_bytes() == before


def test_a_compression_that_was_stopped_goes_on_where_it_was(
    cli: Cli, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    arguments = ("compress", run, "--ratio", RATIO, "--out", tmp_path / "out", *QUICK)
    with monkeypatch.context() as patched:
        patched.setattr(image_subjects, "train", stop)
        assert cli(*arguments).code == 130
    stopped = state_of(tmp_path / "out")
    assert "compressed" in stopped
    assert "recovered" not in stopped
    said = cli(*arguments)
    assert said.code == 0, said.err
    assert "plan:" not in said.out  # it was there
    ended = state_of(tmp_path / "out")
    assert {key: ended[key] for key in ("before", "plan", "compressed")} == {
        key: stopped[key] for key in ("before", "plan", "compressed")
    }
    assert ended["recovered"]["scores"]


def test_a_recovery_that_was_stopped_goes_on_from_its_checkpoint(
    cli: Cli, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.toml"
    own.write_text('extends = "digits/resnet8"\n[schedule]\nepochs = 2\n')
    (tmp_path / "other.toml").write_text(own.read_text().replace("2", "3"))
    given = ("--ratio", RATIO, "--recover", own, "--out", tmp_path / "out", *QUICK, "--ranks", "uniform")
    trained, epoch = [], Reporter.epoch

    def stopped(self: Reporter, row: dict[str, Any]) -> None:
        trained.append(row["epoch"])
        if trained == [1]:
            os.kill(os.getpid(), signal.SIGINT)
        epoch(self, row)

    monkeypatch.setattr(Reporter, "epoch", stopped)
    said = cli("compress", run, *given)
    assert (said.code, trained) == (130, [1])
    refused = cli("compress", run, *given[:3], tmp_path / "other.toml", *given[4:]).error
    assert "recovered/seed-0 holds a run with schedule.epochs = 2, and this recipe says 3; give --recover" in refused
    assert "choose another --out, or start over with --overwrite" in refused
    said = cli("compress", run, *given)
    assert (said.code, trained) == (0, [1, 2]), said.err
    assert [row["epoch"] for row in state_of(tmp_path / "out")["recovered"]["history"]] == [1, 2]


def test_recovery_can_be_added_later_and_another_one_is_refused(cli: Cli, run: Path, tmp_path: Path) -> None:
    arguments = ("compress", run, "--ratio", RATIO, "--out", tmp_path / "out", *QUICK, "--ranks", "uniform")
    assert cli(*arguments, "--recover", "none", "--to", "lowered").code == 0
    before = state_of(tmp_path / "out")
    assert "recovered" not in before
    assert before["lowered"]["scores"] == pytest.approx(before["compressed"]["scores"], rel=1e-5)
    page = (tmp_path / "out/compress.html").read_text()
    assert "by recovery" not in page
    assert cli(*arguments).code == 0
    assert "by recovery" in (tmp_path / "out/compress.html").read_text()
    after = state_of(tmp_path / "out")
    assert after["lowered"]["scores"]["loss"] == pytest.approx(after["recovered"]["scores"]["loss"], rel=1e-3)
    own = tmp_path / "own.toml"
    own.write_text('extends = "digits/resnet8"\n[schedule]\nepochs = 1\n')
    assert "was recovered by another recipe (digits/resnet8-recovery)" in cli(*arguments, "--recover", own).error
    assert cli(*arguments, "--recover", own, "--overwrite").code == 0
    assert state_of(tmp_path / "out")["recovered"]["asked"]["name"] == "own-recovery"


def test_ranks_by_loss_by_outputs_and_uniform_ones_differ(cli: Cli, run: Path, tmp_path: Path) -> None:
    found = {}
    for ranks in ("loss", "outputs", "uniform"):
        out = tmp_path / ranks
        said = cli("compress", run, "--ratio", "0.2", "--ranks", ranks, "--recover", "none", "--out", out, *QUICK)
        assert said.code == 0, said.err
        found[ranks] = [row["rank"] for row in state_of(out)["plan"]["layers"]]
    assert len({tuple(ranks) for ranks in found.values()}) == 3


def test_few_samples_are_noted_and_layers_stay_dense_on_request(cli: Cli, run: Path, tmp_path: Path) -> None:
    given = ("--ratio", "0.5", "--recover", "none", "--samples", 1, "--exclude", "stages.0.*", "--multiple-of", 4)
    said = cli("compress", run, *given, "--layers-per-pass", 2, "--sequential", "--out", tmp_path)
    assert said.code == 0, said.err
    assert state_of(tmp_path)["asked"]["sequential"] is True
    assert "note: init=Calibrated: fewer samples than directions" in said.out
    assert "fewer samples than directions" in (tmp_path / "compress.html").read_text()
    rows = state_of(tmp_path)["plan"]["layers"]
    assert not any(row["name"].startswith("stages.0") for row in rows)
    assert all(row["rank"] % 4 == 0 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ratio", "1.5"), "--ratio must be above 0 and below 1, the share of parameters to keep, got 1.5"),
        (("--ratio", "0"), "--ratio must be above 0 and below 1"),
        (("--ratio", "0.001"), "factorize more layers: --first-and-last would reach 0."),
        (("--ratio", "0.5", "--recover", "digits/resnet9"), "digits/resnet8"),
        (("--ratio", "0.5", "--recover", "language/tiny"), "--recover language/tiny trains on text, and"),
        (("--ratio", "0.5", "--exclude", "nothing"), "nothing"),
        (("--ratio", "0.5", "--multiple-of", "0"), "--multiple-of must be greater than or equal to 1, got '0'"),
        (("--ratio", "0.5", "--data", "nowhere"), "there is no file or folder nowhere"),
        (("--ratio", "0.5", "--device", "tpu"), "--device must be cpu, cuda or cuda:NUMBER"),
    ],
)
def test_wrong_arguments_are_one_line_and_leave_no_folder(
    cli: Cli, run: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert message in cli("compress", run, *arguments, "--out", tmp_path / "out/small").error
    assert not (tmp_path / "out").exists()


def test_no_option_of_other_verbs_is_named(cli: Cli, run: Path) -> None:
    for verb in (("compress", run, "--ratio", "0.5"), ("evaluate", run), ("compose", run)):
        message = cli(*verb, "--data", "nowhere").error
        assert message.endswith("there is no file or folder nowhere; give a folder of data sets, or the path of one\n")


def test_a_folder_that_was_there_stays_after_a_refusal(cli: Cli, run: Path, tmp_path: Path) -> None:
    assert "nothing" in cli("compress", run, "--ratio", "0.5", "--exclude", "nothing", "--out", tmp_path).error
    assert tmp_path.is_dir()


def test_a_model_that_is_none_says_what_it_can_be(cli: Cli, run: Path, tmp_path: Path, npz: Path) -> None:
    for near in (run.parents[1], run / "model", run / "model/dense.safetensors"):
        assert near.exists()
        assert cli("compress", near, "--ratio", "0.5").error.endswith(f"did you mean {run}?\n")
    of_transformers = tmp_path / "models/gpt2"
    of_transformers.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (of_transformers / name).touch()
    for near in (of_transformers.parent, of_transformers / "model.safetensors"):
        assert cli("compress", near, "--ratio", "0.5").error.endswith(f"did you mean {of_transformers}?\n")
    (of_transformers / "config.json").unlink()
    assert "MODEL must be the folder of a finished run" in cli("compress", tmp_path, "--ratio", "0.5").error
    assert "write a function that builds the network and loads" in cli("compress", "net.pt", "--ratio", "0.5").error
    for name in ("gpt2", "hf:someone/bert-base"):
        told = f"Hub first: hf download {name.removeprefix('hf:')} --local-dir FOLDER\n"
        assert cli("compress", name, "--ratio", "0.5").error.endswith(told)
    assert "classifies images; name them by --data" in cli("compress", "a:b", "--ratio", "0.5").error
    assert "there is no module 'nowhere'" in cli("compress", "nowhere:b", "--ratio", "0.5", "--data", npz).error


def test_a_compression_that_is_interrupted_says_how_to_go_on(
    cli: Cli, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(subject: ImageSubject, samples: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ImageSubject, "batches", interrupted)
    said = cli("compress", run, "--ratio", RATIO, "--out", tmp_path)
    again = f"factorized compress {run} --ratio {RATIO} --out {tmp_path}"
    assert (said.code, said.err) == (
        130,
        f"factorized: stopped by Ctrl-C; what is finished is kept, continue with: {again}\n",
    )


def test_a_folder_of_another_compression_and_a_damaged_one_are_refused(cli: Cli, run: Path, copied: Path) -> None:
    said = cli("compress", run, "--ratio", "0.5", "--out", copied)
    assert "holds another compression: ratio is 0.3 there, and 0.5 in this command" in said.error
    (copied / "compress.json").write_text('{"asked": {}}')
    assert "compress.json is damaged, was changed, or" in cli("compress", run, "--ratio", RATIO, "--out", copied).error


def test_a_folder_that_another_process_compresses_into_is_left_alone(cli: Cli, run: Path, copied: Path) -> None:
    with claimed(copied):
        said = cli("compress", run, "--ratio", RATIO, "--out", copied, "--overwrite")
    assert f"another process is training into {copied}" in said.error
    assert state_of(copied)["recovered"]  # nothing was deleted


def test_quiet_says_only_the_result(cli: Cli, run: Path, copied: Path) -> None:
    said = cli(
        "compress", run, "--ratio", RATIO, "--out", copied, "--quiet", "--overwrite", "--recover", "none", *QUICK
    )
    lines = said.out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["network", "dense", "compressed"]
    assert lines[-1] == f"figures and layers: {copied / 'compress.html'}"


def test_a_factorized_run_and_a_folder_that_cannot_be_written_are_refused(
    cli: Cli, run: Path, compressed: Path, tmp_path: Path
) -> None:
    recovered = compressed / "recovered/seed-0"
    assert "is factorized already" in cli("compress", recovered, "--ratio", "0.5", "--out", tmp_path / "a").error
    (tmp_path / "file").write_text("")
    assert "cannot write to" in cli("compress", run, "--ratio", "0.5", "--out", tmp_path / "file").error


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_loads_nothing_fits_the_screen_and_draws_every_layer(
    browser: Browser, compressed: Path, width: int
) -> None:
    page = compressed / "compress.html"
    browser.open(page, width)
    assert (browser.errors, browser.requests) == ([], [page.resolve().as_uri()])
    assert browser.run("document.documentElement.scrollWidth") <= width
    layers = len(state_of(compressed)["plan"]["layers"])
    assert browser.run("document.querySelectorAll('#layers svg.spectrum').length") == layers
    assert browser.run("document.querySelectorAll('#layers .kept').length") == layers
    assert browser.run("document.querySelectorAll('#charts figure').length") >= 1
    texts = browser.run("[...document.querySelectorAll('.facts dt')].map(e => e.textContent)")
    assert texts == [
        "parameters",
        "accuracy, dense",
        "accuracy, compressed",
        "accuracy, recovered",
        "improved by recovery",
    ]
    assert "Calibrated on 1,442 training examples" in browser.run("document.querySelector('header p').textContent")
    cells = browser.run("[...document.querySelector('#figures table').rows].map(row => row.cells[2].textContent)")
    scores = [state_of(compressed)[name]["scores"]["accuracy"] for name in STAGES if name in ("before", "compressed")]
    assert cells[:3] == ["accuracy, %", *(f"{score:.2f}" for score in scores)]


def test_a_function_that_returns_a_trained_classifier_is_compressed(
    cli: Cli, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_models_to_compress.py").write_text(
        "from safetensors.torch import load_file\n"
        "from factorized.experiments.models.resnet import resnet\n"
        "def trained(classes, channels):\n"
        "    model = resnet(8, classes, channels)\n"
        f"    model.load_state_dict(load_file({str(run / 'model/dense.safetensors')!r}))\n"
        "    return model\n"
    )
    said = cli("compress", "own_models_to_compress:trained", "--ratio", RATIO, "--data", "digits", *QUICK)
    assert said.code == 0, said.err
    state = state_of(Path("out/compressed/own_models_to_compress-trained-0.3"))
    assert "recovered" not in state  # nobody said how
    dense = json.loads((run / "result.json").read_text())["accuracy"]
    assert state["before"]["scores"]["accuracy"] == pytest.approx(dense, abs=0.3)
    assert state["compressed"]["parameters"] <= RATIO * state["before"]["parameters"]
