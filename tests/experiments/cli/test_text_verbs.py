from __future__ import annotations

from pathlib import Path

import pytest

from tests.experiments.cli.conftest import Cli
from tests.experiments.text.small import BY_TASK, NAMES, SMALL, files


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _train(cli: Cli, task: str, name: str) -> str:
    """Train a recipe of the task, made small, and return the folder of its run."""
    changes = [f"--set={change}" for change in (*SMALL, *BY_TASK[task], *files(Path("texts"), task))]
    said = cli("train", name, "--data", "texts", "--device", "cpu", *changes)
    assert said.code == 0, said.err
    assert f"out/{name}/seed-0" in said.out
    return f"out/{name}/seed-0"


def test_a_language_model_is_trained_evaluated_and_heard(cli: Cli) -> None:
    run = _train(cli, "language", NAMES["language"])
    said = cli("evaluate", run, "--data", "texts", "--device", "cpu")
    assert said.code == 0
    assert "recorded perplexity" in said.out
    said = cli("generate", "--run", run, "one two", "--tokens", "3", "--device", "cpu")
    assert said.code == 0
    assert said.out.startswith("one two")
    assert "give a run of a translation recipe" in cli("translate", "--run", run, "one", "--device", "cpu").error
    assert "is a run on text" in cli("compose", run, "--to", "onnx", "--data", "texts").error


def test_a_factorized_translator_is_composed_into_a_folder_of_transformers(cli: Cli) -> None:
    from transformers import AutoModelForSeq2SeqLM

    run = _train(cli, "translation", "translation/numbers-0.5-si")
    said = cli("translate", "--run", run, "one two", "three four", "--device", "cpu")
    assert said.code == 0
    assert len(said.out.splitlines()) == 2
    said = cli("compose", run, "--data", "texts", "--device", "cpu")
    assert said.code == 0, said.err
    assert "validation loss before" in said.out
    AutoModelForSeq2SeqLM.from_pretrained(f"{run}/composed")
    assert "is already there" in cli("compose", run, "--data", "texts", "--device", "cpu").error


@pytest.mark.parametrize("name", ["bert/large-0.5-flambe", "translation/iwslt14-0.25", "language/small-lowrank-0.5-si"])
def test_the_plan_of_a_recipe_of_text_needs_no_text(cli: Cli, name: str) -> None:
    said = cli("plan", name)
    assert said.code == 0, said.err
    assert "rank" in said.out


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
    assert message in cli(*arguments).error
