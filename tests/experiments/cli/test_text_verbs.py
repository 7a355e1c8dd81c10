from __future__ import annotations

from pathlib import Path

import pytest

from tests.experiments.cli.conftest import Cli
from tests.experiments.text.small import BY_TASK, NAMES, SMALL, files


def trained(cli: Cli, task: str) -> str:
    """Train a small recipe of the task in the working folder, and return the folder of its run."""
    changes = [f"--set={change}" for change in (*SMALL, *BY_TASK[task], *files(Path("texts"), task))]
    code, out, error = cli("train", NAMES[task], "--data", "texts", "--device", "cpu", *changes)
    assert code == 0, error
    assert f"out/{NAMES[task]}/seed-0" in out
    return f"out/{NAMES[task]}/seed-0"


def test_a_language_model_is_trained_evaluated_composed_and_heard(cli: Cli) -> None:
    run = trained(cli, "language")
    code, out, _ = cli("evaluate", run, "--data", "texts", "--device", "cpu")
    assert code == 0
    assert "recorded perplexity" in out
    code, out, _ = cli("generate", "--run", run, "one two", "--tokens", "3", "--device", "cpu")
    assert code == 0
    assert out.startswith("one two")
    code, _, error = cli("translate", "--run", run, "one", "--device", "cpu")
    assert code == 2
    assert "was trained for task 'language'; give a run of a translation recipe" in error
    code, _, error = cli("compose", run, "--to", "onnx", "--data", "texts")
    assert code == 2
    assert "is a run on text" in error


def test_a_factorized_translator_is_composed_into_a_folder_of_transformers(cli: Cli) -> None:
    from transformers import AutoModelForSeq2SeqLM

    changes = [f"--set={change}" for change in (*SMALL, *BY_TASK["translation"], *files(Path("texts"), "translation"))]
    name = "translation/numbers-0.5-si"
    code, _, error = cli("train", name, "--data", "texts", "--device", "cpu", *changes)
    assert code == 0, error
    run = f"out/{name}/seed-0"
    code, out, _ = cli("translate", "--run", run, "one two", "three four", "--device", "cpu")
    assert code == 0
    assert len(out.splitlines()) == 2
    code, out, error = cli("compose", run, "--data", "texts", "--device", "cpu")
    assert code == 0, error
    assert "validation loss before" in out
    AutoModelForSeq2SeqLM.from_pretrained(f"{run}/composed")
    code, _, error = cli("compose", run, "--data", "texts", "--device", "cpu")
    assert code == 2
    assert "is already there" in error


@pytest.mark.parametrize("name", ["bert/large-0.5-flambe", "translation/iwslt14-0.25", "language/small-lowrank-0.5-si"])
def test_the_plan_of_a_recipe_of_text_needs_no_text(cli: Cli, name: str) -> None:
    code, out, error = cli("plan", name)
    assert code == 0, error
    assert "rank" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "language/tiny", "--data", "nowhere"], "there is no folder nowhere"),
        (["train", "language/tiny", "--data", "."], "reads the embedded text 'pydoc'; drop --data"),
        (["train", "language/small", "--data", "."], "wikipedia.txt"),
        (["train", "bert/tiny", "--set", "data.name=mine"], "needs data.train"),
        (["generate", "--run", ".", "x"], "there is no result.json"),
    ],
)
def test_wrong_words_about_text_are_one_line(cli: Cli, arguments: list[str], message: str) -> None:
    code, _, error = cli(*arguments)
    assert code == 2
    assert message in error
    assert len(error.strip().splitlines()) == 1
