"""The command line as a whole: help, errors, completion, signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import typer
from typer.testing import CliRunner

from factorized.experiments.cli import plan
from factorized.experiments.cli.app import app
from factorized.experiments.cli.main import main
from factorized.experiments.data.extras import install_command
from factorized.experiments.recipes.recipe import Factorize
from factorized.experiments.training.interrupt import CannotWrite, Interrupted
from factorized.version import __version__
from tests.experiments.cli.conftest import Cli

SCHEMES = list(get_args(Factorize.model_fields["scheme"].annotation))

ROOT = Path(__file__).parents[3]
VERBS = [
    [],
    ["recipes"],
    ["recipes", "ls"],
    ["recipes", "show"],
    ["plan"],
    ["train"],
    ["evaluate"],
    ["compose"],
    ["compress"],
    ["translate"],
    ["generate"],
    ["data"],
    ["data", "prepare"],
    ["data", "ls"],
    ["reproduce"],
    ["results"],
    ["results", "add"],
    ["report"],
    ["bench"],
    ["demo"],
]


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start the command line as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "factorized", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def test_a_recipe_is_read_as_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_bytes(
        b"\xef\xbb\xbf" + 'extends = "digits/resnet8"\ntitle = "Größe"\n'.encode()
    )  # as Notepad writes it
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "utf-8"}
    for whole in ([], ["--whole"]):
        assert 'title = "Größe"' in start("recipes", "show", str(recipe), *whole, **ascii_only).communicate()[0]


def test_signs_that_the_output_cannot_hold_do_not_end_a_command(tmp_path: Path) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text('extends = "digits/resnet8"\ntitle = "dense → low rank"\n', encoding="utf-8")
    process = start("recipes", "show", str(recipe), PYTHONIOENCODING="latin-1")
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert 'title = "dense ? low rank"' in out


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: " ".join(verb) or "factorized")
def test_the_help_of_every_verb_has_examples_of_it(verb: list[str]) -> None:
    result = CliRunner().invoke(app, [*verb, "--help"], prog_name="factorized", env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert not re.search(r"<\w", result.output)  # a type of Python
    assert "…" not in result.output
    usage = re.search(r"Usage: factorized (.*)", result.output)
    assert usage is not None
    assert re.fullmatch(r"([a-z]+ )*\[OPTIONS\]( COMMAND \[ARGS\]| \[?[A-Z|]+\]?)?(\.\.\.)?", usage[1].strip())
    examples = result.output.split("Examples:")[1]
    assert re.search(rf"^ *factorized {' '.join(verb)}", examples, flags=re.MULTILINE)


def test_paragraphs_of_the_help_break_where_the_terminal_ends() -> None:
    result = CliRunner().invoke(app, ["demo", "--help"], prog_name="factorized", env={"COLUMNS": "100"})
    assert "(FD) and with both; and overcomplete." in result.output


def test_every_verb_is_tried_here() -> None:
    groups = {group.name: group.typer_instance for group in app.registered_groups}
    assert set(groups) == {verb[0] for verb in VERBS if len(verb) == 2}
    inside = {(name, command.name) for name, group in groups.items() for command in group.registered_commands}
    assert inside == {tuple(verb) for verb in VERBS if len(verb) == 2}
    assert {command.name for command in app.registered_commands} == {v[0] for v in VERBS if len(v) == 1} - set(groups)


def test_python_with_the_package_is_the_command() -> None:
    assert start("--version").communicate()[0] == f"{__version__}\n"


def test_no_arguments_show_the_help(cli: Cli) -> None:
    assert "Usage: factorized" in cli().out


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["recipes", "ls"]])
def test_what_needs_no_torch_does_not_wait_for_it(arguments: list[str]) -> None:
    code = f"import sys; from factorized.experiments.cli.main import main; main({arguments})\n"
    code += "print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "Did you mean 'train'? See `factorized --help`."),
        (["train", "digits/resnet8", "--sed", "1"], "there is no option --sed; did you mean --seed? See"),
        (["train", "digits/resnet8", "--ratio", "0.1"], "change the recipe by --set factorize.ratio=VALUE. See"),
        (["evaluate", "out", "--ratio", "0.1"], "there is no option --ratio. See"),
        (["train", "digits/resnet8", "--seed", str(10**20)], "--seed must be at most 9223372036854775807, the largest"),
        (["train", "digits/resnet8", "--seeds", str(10**20)], "--seeds"),
        (["train", "digits/resnet8", "--device", ""], "the value of --device is empty: ''"),
        (["train", "digits/resnet8", "--device=  "], "the value of --device is empty: ' '"),
        (["train", "digits/resnet8", "--out", ""], "the value of --out is empty: ''"),
        (["data", "prepare", "digits", "--name", ""], "the value of --name is empty: ''"),
        (["train", "", "--quiet"], "an argument is empty: ''"),
        (["train", "digits/resnet8", "--out", "a\nb"], "the value of --out holds a line break or control character"),
        (["evaluate", "a\0b"], "an argument holds a line break or control character"),
        (["evaluate", "a\udcffb"], "an argument holds bytes that are not text"),
        (["train", "digits/resnet8", "--out", 5000 * "x"], "the value of --out is 5,000 characters long"),
        (["train", "digits/resnet8", "--device", "cpu:3"], "--device must be cpu, cuda or cuda:NUMBER, got 'cpu:3'"),
        (["train"], "Missing argument 'NAME'. See `factorized train --help`."),
        (["recipes", "show"], "Missing argument 'NAME'. See `factorized recipes show --help`."),
        (["train", "digits/resnet9"], "did you mean 'digits/resnet8'?"),
        (
            ["train", "digits/resnet8", "--seeds", "0"],
            "--seeds must be greater than or equal to 1, got '0'. See `factorized train --help`.",
        ),
        (["train", "digits/resnet8", "--seeds=-1"], "--seeds must be greater than or equal to 1, got '-1'. See"),
        (["train", "digits/resnet8", "--seeds", "two"], "--seeds must be a valid integer, got 'two'. See"),
        (["compose", "out", "--to", "caffe"], "--to: 'caffe' is not one of 'plain', 'onnx', 'export'. See"),
        (["recipes"], "Missing command"),
        (["evaluate", "nowhere"], "there is no nowhere/result.json; give the folder of a finished run"),
    ],
)
def test_a_wrong_command_is_one_line_and_exit_code_2(cli: Cli, arguments: list[str], message: str) -> None:
    assert message in cli(*arguments).error


@pytest.mark.parametrize(
    ("problem", "line"),
    [
        (ValueError("one\n  two"), "factorized: one two\n"),
        (PermissionError(13, "Permission denied", "out"), "factorized: out: Permission denied\n"),
        (ModuleNotFoundError("a needs b: pip install b"), "factorized: a needs b: pip install b\n"),
        (RuntimeError("odd"), "factorized: RuntimeError: odd; `factorized --debug …` shows where\n"),
        (RuntimeError("CUDA out of memory"), "factorized: RuntimeError: CUDA out of memory; use a smaller run.batch"),
    ],
)
def test_whatever_goes_wrong_is_one_line(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, problem: Exception, line: str
) -> None:
    def fail(line: str) -> None:
        raise problem

    monkeypatch.setattr(plan, "say", fail)
    said = cli("plan", "digits/resnet8")
    assert said.error.startswith(line)
    debugged = cli("--debug", "plan", "digits/resnet8")
    assert debugged.code == 2
    assert "Traceback" in debugged.err
    assert debugged.err.splitlines()[-1].startswith("factorized: ")


@pytest.mark.parametrize("package", ["typer", "rich", "pydantic"])
def test_without_the_extra_it_says_what_to_install(package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from factorized.experiments.cli.main import main; sys.exit(main(['recipes', 'ls']))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    line = f"factorized: this needs {package}, which is not installed: {install_command('vision')}\n"
    assert (found.returncode, found.stderr) == (2, line)


@pytest.mark.parametrize("version", ["0.9.4", "0.28.0", "0.28.0.dev1"])
def test_with_an_old_typer_it_says_which_one_to_install(
    version: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(typer, "__version__", version)
    asked = re.search(r'"typer>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert asked is not None
    assert cli("recipes", "ls").error == (
        f"factorized: the command line needs typer {asked[1]} or newer, and {version} is installed: "
        f"{install_command('vision')}\n"
    )


@pytest.mark.parametrize("version", ["0.29.0", "0.30", "1.0.0rc1"])
def test_with_the_oldest_typer_or_a_newer_one_it_runs(version: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typer, "__version__", version)
    assert cli("recipes", "ls").code == 0


def test_a_package_that_a_model_of_the_users_misses_is_named_with_the_line_that_imports_it(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_model.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    message = cli("plan", "--model", "odd_model:build", "--ratio", 0.5).error
    assert message == (
        f"factorized: model 'odd_model:build': importing odd_model failed at {tmp_path / 'odd_model.py'}:1: "
        "ModuleNotFoundError: No module named 'no_such_package'\n"
    )


def test_ctrl_c_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(line: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "say", stop)
    said = cli("plan", "digits/resnet8")
    assert (said.code, said.err) == (130, "factorized: stopped by Ctrl-C\n")


@pytest.mark.parametrize(
    ("error", "what", "kept"),
    [
        (Interrupted(signal.SIGTERM), "stopped by SIGTERM; ", "its state is saved, "),
        (CannotWrite("the disk is full; make room"), "the disk is full; make room; ", "the last checkpoint is kept, "),
    ],
)
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("train digits/resnet8 --overwrite", "continue with: factorized train digits/resnet8 --resume"),
        # which always goes on
        ("compress out/run --ratio 0.5 --overwrite", "continue with: factorized compress out/run --ratio 0.5"),
        ("demo --seeds 1", "start over with: factorized demo --seeds 1"),  # which never does
    ],
)
def test_a_run_that_ended_early_says_which_command_goes_on(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, given: str, expected: str, error: Exception, what: str, kept: str
) -> None:
    def stop(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("factorized.experiments.cli.device.pick_device", stop)
    monkeypatch.setattr("factorized.experiments.reproduce.demonstration.run_variants", stop)
    told = f"factorized: {what}{kept if 'continue' in expected else ''}{expected}\n"
    said = cli(*given.split())
    assert (said.code, said.err) == (143 if isinstance(error, Interrupted) else 2, told)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert cli(*given.split()).err == told.replace("with: ", "with: torchrun … -m ")


def test_the_version_is_printed(cli: Cli) -> None:
    assert cli("--version").out == f"{__version__}\n"


def test_a_page_that_cannot_be_written_is_named(cli: Cli, tmp_path: Path) -> None:
    page = tmp_path / "none" / "plan.html"
    message = cli("plan", "digits/resnet8-wide-fd", "--html", page).error
    assert message == f"factorized: cannot write to {page}: No such file or directory; name another place by --html\n"


def test_only_the_first_of_several_processes_prints(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert cli("recipes", "show", "digits/resnet8").out == ""
    assert cli("recipes", "show", "digits/resnet9").err == ""


def test_an_error_of_one_process_alone_is_told_by_that_process(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(line: str) -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr(plan, "say", fail)
    monkeypatch.setenv("RANK", "1")
    assert cli("plan", "digits/resnet8").err.startswith("factorized (process 1): RuntimeError: odd")


def test_a_reader_that_has_had_enough_is_no_error() -> None:
    command = f"{sys.executable} -m factorized recipes ls | head -1"
    found = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT, check=False)
    assert found.stderr == ""
    assert found.stdout.startswith("recipe")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("factorized tra", ["train", "translate"]),
        (
            "factorized train digits/resnet8-lowrank-0.1-",
            [f"digits/resnet8-lowrank-0.1-{end}" for end in ("fd", "si", "si-fd")],
        ),
        ("factorized recipes show digits/resnet8-w", ["digits/resnet8-wide-fd"]),
        ("factorized plan --model wr", ["wrn28-10"]),
        ("factorized data prepare tiny", ["tiny-imagenet"]),
        ("factorized plan --scheme t", ["tensor_train", "tucker"]),
        ("factorized plan --variant w", ["wide"]),
        ("factorized train --set optimizer.", [f"optimizer.{f}=" for f in ("lr", "momentum", "nesterov", "clip")]),
        ("factorized train --set factorize.var", [f"factorize.variant={word}" for word in ("full", "deep", "wide")]),
        ("factorized train --set data.flip = f", ["false"]),
        ("factorized train x --set factorize.scheme =", SCHEMES),
        ("factorized demo --set schedule.epochs = 9 --set run.compile = y", ["yes"]),
    ],
)
def test_a_shell_completes_verbs_recipes_models_and_fields(words: str, expected: list[str]) -> None:
    completing = {"COMP_WORDS": "\n".join(words.split()), "COMP_CWORD": str(len(words.split()) - 1)}
    process = start(_FACTORIZED_COMPLETE="complete_bash", **completing)
    out, err = process.communicate(timeout=120)
    assert (sorted(out.split()), err) == (sorted(expected), "")


def test_bash_itself_completes_a_change_by_the_script_that_is_installed(tmp_path: Path) -> None:
    script, _ = start(_FACTORIZED_COMPLETE="source_bash").communicate(timeout=120)
    command = tmp_path / "factorized"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m factorized "$@"\n')
    command.chmod(0o755)
    ask = (
        "COMP_WORDS=(factorized train digits/resnet8 --set factorize.scheme = ov); COMP_CWORD=6; "
        '_factorized_completion factorized; echo "${COMPREPLY[@]}"'
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    found = subprocess.run(
        ["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, cwd=ROOT, env=environment, check=True
    )
    assert (found.stdout, found.stderr) == ("overcomplete\n", "")


def test_a_home_folder_is_found_behind_an_equals_sign_too(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli("data", "prepare", "digits", "--folder=~/sets").code == 0
    assert (tmp_path / "sets/digits.safetensors").is_file()


def test_finished_runs_are_completed(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from factorized.experiments.cli.arguments import complete_run

    monkeypatch.chdir(trained.parents[2])
    (trained.parents[2] / "out").symlink_to(trained.parents[1], target_is_directory=True)
    found = complete_run("out/")
    (trained.parents[2] / "out").unlink()
    assert found == [f"out/{trained.parent.name}/seed-0"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.nightly)]
)
def test_a_stopped_run_says_how_to_go_on_and_that_works(tmp_path: Path, number: signal.Signals, code: int) -> None:
    arguments = ["train", "digits/resnet8", "--set", "schedule.epochs=3", "--out", str(tmp_path / "o"), "--overwrite"]
    process = start(*arguments)
    assert process.stdout is not None
    assert "epoch 1/3" in process.stdout.readline()
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    assert process.returncode == code
    assert err.count("\n") == 1
    assert err.startswith(f"factorized: stopped by {number.name}; its state is saved, continue with: factorized train")
    command = err.split("continue with: ")[1].split()
    assert "--overwrite" not in command
    assert main(command[1:]) == 0
    assert (tmp_path / "o/digits/resnet8/seed-0/result.json").is_file()
