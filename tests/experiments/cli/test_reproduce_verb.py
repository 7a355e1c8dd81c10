"""``factorized reproduce``: a table of digits, planned, stopped, resumed and repeated."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.experiments.cli.conftest import Cli
from tests.experiments.reproduce.made import image_result, write
from tests.experiments.reproduce.small_table import ENDLESS, TABLE, runs_in, wait_for_epochs, write_table

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_table_is_done_once_and_what_is_shortened_is_marked_everywhere(cli: Cli, tmp_path: Path) -> None:
    table = write_table(tmp_path)
    short = ("reproduce", table, "--seeds", "2", "--epochs", "1", "--device", "cpu")
    planned = cli(*short, "--dry-run")
    assert planned.code == 0
    assert planned.out.endswith("4 runs to do; without past runs, there is no estimate of the time\n")
    assert "no past run" in planned.out
    assert "shortened: 1 of 4 epochs" in planned.out
    assert not (tmp_path / "out").exists()

    done = cli(*short, "--quiet")
    assert (done.code, done.err) == (0, "")
    runs = runs_in(tmp_path / "out")
    assert {(run.name, run.seed) for run in runs} == {
        (name, seed) for name in ("small/digits", "small/digits-fd") for seed in (0, 1)
    }
    assert all(run.recipe["shortened_from"] == 4 for run in runs)
    lines = [line for line in done.out.splitlines() if line.startswith(("done, ", "small/"))]
    assert len(lines) == 4 + 2
    assert all("shortened: 1 of 4 epochs" in line for line in lines)
    dense = next(line for line in lines if line.startswith("small/digits "))
    assert "90.50 ± 0.25" in dense  # the paper's figure, without a distance from it
    assert "2 of 2" in dense

    assert "tables, curves and more: out/report/digits/report.html" in done.out
    assert "1 of 4 epochs" in (tmp_path / "out/report/digits/report.html").read_text()
    assert "1 of 4 epochs" in (tmp_path / "out/report/digits/tables/variants.csv").read_text()

    again = cli(*short, "--quiet")
    assert "; 0 runs to do" in again.out
    assert "done, " not in again.out
    assert [run.path.stat().st_mtime_ns for run in runs_in(tmp_path / "out")] == [
        run.path.stat().st_mtime_ns for run in runs
    ]

    more = cli(*short[:2], "--seeds", "3", "--epochs", "1", "--device", "cpu", "--dry-run")
    assert "2 runs to do: about " in more.out
    assert "this recipe, n = 2" in more.out
    assert cli(*short, "--dry-run").out.endswith("\n0 runs to do\n")
    whole = cli("reproduce", table, "--seeds", "1", "--dry-run", "--device", "cpu")
    assert "2 runs to do" in whole.out
    assert "shortened" not in whole.out


def test_a_changed_recipe_is_trained_again_beside_the_old_run(cli: Cli, tmp_path: Path) -> None:
    command = ("reproduce", write_table(tmp_path), "--cells", "small/digits", "--seeds", "1", "--epochs", "1", "-q")
    assert cli(*command).code == 0
    write_table(tmp_path, TABLE.replace("batch = 256", "batch = 512"))
    assert "1 run to do" in cli(*command).out
    assert sorted(run.recipe["run"]["batch"] for run in runs_in(tmp_path / "out")) == [256, 512]


def test_a_corrupt_result_is_named_and_skipped_and_stays(cli: Cli, tmp_path: Path) -> None:
    bad = tmp_path / "results/mine/seed-0.json"
    bad.parent.mkdir(parents=True)
    bad.write_text('{"recipe": {"name"')
    said = cli("reproduce", write_table(tmp_path), "--dry-run")
    assert said.code == 0
    assert "skipped results/mine/seed-0.json: not valid JSON" in said.out
    assert bad.read_text() == '{"recipe": {"name"'


def test_cells_without_data_are_named_and_the_others_are_trained(cli: Cli, tmp_path: Path) -> None:
    text = (
        TABLE
        + """
[[grid]]
name = "small/nowhere"
title = "Nowhere"
columns = ["dense"]
settings.data.name = "nowhere"
rows = { all = "*" }
"""
    )
    said = cli("reproduce", write_table(tmp_path, text), "--cells", "small/nowhere", "--seeds", "1", "--epochs", "1")
    assert said.code == 1
    assert "\nsmall/nowhere cannot be trained here: data set 'nowhere' is neither a file or folder" in said.out
    assert re.search(r"^small/nowhere +blocked +0 of 1 ", said.out, flags=re.MULTILINE)
    said = cli("reproduce", write_table(tmp_path, text), "--seeds", "1", "--epochs", "1", "-q")
    assert said.code == 1
    assert "; 2 runs to do, 1 cannot be trained here\n" in said.out
    assert len(runs_in(tmp_path / "out")) == 2


def test_a_reason_that_several_recipes_share_is_reported_once(cli: Cli, tmp_path: Path) -> None:
    text = TABLE.replace('"digits", crop', '"nowhere", crop')
    said = cli("reproduce", write_table(tmp_path, text), "--dry-run")
    assert "\nsmall/digits and 1 more cannot be trained here: data set 'nowhere' is " in said.out
    assert said.out.count("'nowhere' is neither a file or folder") == 1
    assert said.out.count(" blocked ") == 2
    assert said.out.count("cannot be trained here\n") == 1  # all are counted
    assert said.out.endswith("\n0 runs to do, 6 cannot be trained here\n")


def test_a_table_without_figures_of_the_paper_is_not_shown_beside_it(cli: Cli, tmp_path: Path) -> None:
    text = TABLE.replace("90.5±0.25 *", "* *")
    command = ("reproduce", write_table(tmp_path, text), "--cells", "small/digits", "--seeds", "1", "--epochs", "1")
    for said in (cli(*command, "--dry-run"), cli(*command, "--quiet")):
        assert "paper" not in said.out
        assert "(std)" not in said.out
    assert "<title>digits</title>" in (tmp_path / "out/report/digits/report.html").read_text()


def test_a_failed_run_is_named_with_its_reason(cli: Cli, tmp_path: Path) -> None:
    text = TABLE.replace("[columns]", "optimizer.lr = 1e30\n[columns]")
    said = cli("reproduce", write_table(tmp_path, text), "--cells", "*fd", "--seeds", "1", "--epochs", "1", "-q")
    assert said.code == 1
    assert "failed: small/digits-fd: the training loss is nan" in said.out
    assert "report.html" not in said.out  # nothing is finished
    assert "0 of 1" in said.out


def test_a_failed_run_is_in_the_report_of_the_others(cli: Cli, tmp_path: Path) -> None:
    text = TABLE.replace('decay.kind = "frobenius" }', 'decay.kind = "frobenius", optimizer.lr = 1e30 }')
    assert cli("reproduce", write_table(tmp_path, text), "--seeds", "1", "--epochs", "1", "-q").code == 1
    page = (tmp_path / "out/report/digits/report.html").read_text()
    assert "1 run failed; see the end of the page." in page
    assert "the training loss is nan" in page


def test_a_figure_is_drawn_from_its_runs(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(recipe: object, data: object) -> str:
        raise ValueError("the data are gone")

    monkeypatch.setattr("factorized.experiments.reproduce.planned.data_checksum", gone)  # all runs are finished
    for name in ("si", "si-fd"):
        result = image_result(f"cifar10/resnet20-lowrank-{name}", 0, 90.0)
        for row in result["history"]:
            row["effective_step"] = 0.1 / row["epoch"]
        write(tmp_path / "results", result)
    said = cli("reproduce", "figure3", "--cells", "*lowrank-si*", "--seeds", "1", "--device", "cpu")
    assert (said.code, said.err) == (0, "")
    files = [Path(line.removeprefix("drawn: ")) for line in said.out.splitlines() if line.startswith("drawn: ")]
    assert files == [Path(f"out/report/figure3/figures/figure3.{kind}") for kind in ("png", "svg")]
    assert all(file.stat().st_size > 10_000 for file in files)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tabel1",), "there is no table 'tabel1' to train (did you mean 'table1'?)"),
        (
            ("table1", "--cells", "cifar10/vgg18*"),
            "no cell of table1 matches 'cifar10/vgg18*'; near ones are cifar10/vgg19",
        ),
        (("table1", "--updates", "3"), "--updates 3: cifar10/vgg19 has 200 epochs; shorten it by --epochs"),
        (("table1", "--workers", "2", "--engine", "ray"), "--workers is for --engine local, and the engine is ray"),
        (("table1", "--at-once", "2", "--engine", "ray"), "--at-once is for --engine local, and the engine is ray"),
        (
            ("table1", "--data", "nowhere"),
            "--data: there is no folder nowhere; give the folder that holds the data sets",
        ),
        (("table1", "--results", "nowhere"), "--results: there is no folder nowhere"),
        (("table1", "--gpus", "1"), "--gpus is for --engine ray or slurm, and the engine is local"),
        (("table1", "--engine", "sge"), "'sge' is not one of 'local', 'ray', 'slurm'"),
        (("table1", "--seeds", "0"), "--seeds"),
    ],
)
def test_a_wrong_command_says_what_is_meant(cli: Cli, arguments: tuple[str, ...], message: str) -> None:
    assert message in cli("reproduce", *arguments).error


@pytest.mark.parametrize("setting", ["timeout_min", "=3"])
def test_a_wrong_parameter_of_slurm_says_what_is_meant(cli: Cli, tmp_path: Path, setting: str) -> None:
    said = cli("reproduce", write_table(tmp_path), "--engine", "slurm", "--slurm", setting)
    assert f"KEY=VALUE, such as timeout_min=240; got {setting!r}" in said.error


def interrupt_in_training(arguments: list[str], folder: Path, number: int, wanted: int) -> tuple[int, str]:
    """Return exit code and errors of a command that gets a signal when so many checkpoints are there."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "factorized", *arguments]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    with process:
        while process.poll() is None and len(list(folder.rglob("checkpoint.pt"))) < wanted:
            time.sleep(0.1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=200)
    return process.returncode, errors


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_keeps_what_is_finished_and_resumes_the_rest(cli: Cli, tmp_path: Path, number: int) -> None:
    text = TABLE.replace("epochs = 4, milestones = [2]", "epochs = 60")
    arguments = ["reproduce", str(write_table(tmp_path, text)), "--seeds", "1", "--epochs", "40", "--device", "cpu"]
    code, errors = interrupt_in_training(arguments, tmp_path, number, wanted=2)
    assert code == 128 + number
    assert (
        f"factorized: stopped by {signal.Signals(number).name}; its state is saved, continue with: factorized "
        in errors
    )
    assert "--resume" not in errors
    assert "Traceback" not in errors
    (first,) = runs_in(tmp_path / "out")
    assert first.name == "small/digits"
    before = first.path.stat().st_mtime_ns
    said = cli(*arguments, "--quiet")
    assert (said.code, said.err) == (0, "")
    assert "1 run to do" in said.out
    assert first.path.stat().st_mtime_ns == before
    second = next(run for run in runs_in(tmp_path / "out") if run.name == "small/digits-fd")
    assert [row["epoch"] for row in second.result["history"]] == list(range(1, 41))


@pytest.mark.nightly
def test_ctrl_c_reaches_several_processes_once_and_they_save_themselves(tmp_path: Path) -> None:
    # steps that take longer than the time between the terminal's signal and one of the engine
    slow = ENDLESS.replace("batch = 256", "batch = 1280").replace("resnet8", "resnet32")
    arguments = ["reproduce", str(write_table(tmp_path, slow)), "--seeds", "1", "--device", "cpu", "--workers", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "factorized", *arguments],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        wait_for_epochs(tmp_path / "out", runs=2)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, errors = process.communicate(timeout=200)
    assert process.returncode == 128 + signal.SIGINT
    assert errors.startswith("factorized: stopped by SIGINT; its state is saved, continue with: factorized reproduce ")
    assert errors.count("\n") == 1
    assert len(list((tmp_path / "out").rglob("checkpoint.pt"))) == 2


@pytest.mark.nightly
def test_figure_4_is_reproduced_on_text_shortened(cli: Cli, tmp_path: Path) -> None:
    command = ("reproduce", "figure4", "--cells", "translation/numbers*", "--seeds", "1", "--updates", "3")
    said = cli(*command, "--device", "cpu", "--quiet")
    assert (said.code, said.err) == (0, "")
    runs = runs_in(tmp_path / "out")
    assert len(runs) == 4
    assert all(run.recipe["shortened_from"] == 600 for run in runs)
    assert said.out.count("shortened: 3 of 600 updates") == 4 + 4
    assert "; 0 runs to do" in cli(*command, "--device", "cpu").out


@pytest.mark.nightly
def test_fine_tuning_follows_its_pre_training_in_one_command(cli: Cli, tmp_path: Path) -> None:
    from tests.experiments.text.small_squad import write_squad

    table = tmp_path / "bert.toml"
    table.write_text(
        """
recipe = { name = "{grid}", title = "{grid}" }
columns.all = {}
rows.all = {}

[[grid]]
name = "small/bert"
title = "A small BERT"
columns = ["all"]
rows = { all = "*" }

[grid.settings]
task = "masked"
model = { hidden = 16, layers = 2, heads = 2, feed_forward = 32, positions = 64 }
data = { name = "pydoc", vocabulary = 300, length = 32 }
schedule.updates = 10
run.batch = 4

[[grid]]
name = "small/squad"
title = "Questions to it"
columns = ["all"]
rows = { all = "*" }

[grid.settings]
task = "questions"
model.from_run = "out/small/bert/seed-{{seed}}"
data = { name = "small", train = ["train.json"], validation = ["dev.json"], length = 48, stride = 8 }
schedule.updates = 10
run.batch = 4
"""
    )
    data = write_squad(tmp_path / "squad")
    command = ("reproduce", table, "--cells", "small/squad", "--seeds", "2", "--updates", "2", "--data", data, "-q")
    planned = cli(*command, "--dry-run")
    assert "4 runs to do" in planned.out
    assert [line.split()[0] for line in planned.out.splitlines() if "shortened" in line] == [
        "small/bert",
        "small/squad",
    ]
    assert planned.out.count("comes first; shortened: 2 of 10 updates") == 1
    said = cli(*command, "--device", "cpu")
    assert (said.code, said.err) == (0, "")
    assert "4 runs to do" in said.out
    assert sorted(run.name for run in runs_in(tmp_path / "out")) == ["small/bert"] * 2 + ["small/squad"] * 2
    assert "; 0 runs to do" in cli(*command).out


@pytest.mark.parametrize("columns", ["80", "120"])
def test_a_plan_has_whole_names_in_a_narrow_terminal_and_remarks_in_a_wide_one(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", columns)
    out = cli("reproduce", "table1", "--dry-run", "--cells", "tiny-imagenet/resnet32x2-lowrank-0.15*").out
    assert "tiny-imagenet/resnet32x2-lowrank-0.15-si-fd " in out
    assert "62.24 ± 0.39" in out
    assert ("estimated from" in out) == (columns == "120")
