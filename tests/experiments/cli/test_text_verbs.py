from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    LlamaConfig,
    MptConfig,
    PretrainedConfig,
)

from factorized.experiments.text import corpus, translation
from factorized.experiments.text.network import starting_network
from factorized.experiments.training.record import write_json
from factorized.experiments.training.result import read_result
from factorized.surgery.compose import is_factorized
from tests.experiments.cli.conftest import Cli
from tests.experiments.text.small import BY_TASK, NAMES, SMALL, files

# of a network that is read from a folder, the sizes are its own
OWN_SIZES = ("model.hidden=128", "model.layers=4", "model.heads=4", "model.feed_forward=344")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


DRAWS = (("--seed", "1"), ("--seed", "1"), ("--seed", "2"), (), ())


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
    drawn = [cli("generate", "--run", run, "one", *seed, "--device", "cpu").out for seed in DRAWS]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[3] == drawn[4] not in drawn[:3]
    assert "give a run of a translation recipe" in cli("translate", "--run", run, "one", "--device", "cpu").error
    assert "is a run on text" in cli("compose", run, "--to", "onnx", "--data", "texts").error
    said = cli("compose", run, "--data", "texts", "--device", "cpu")  # dense, and written as it is
    assert said.code == 0
    assert "model shards" not in said.err  # a bar of transformers
    AutoModelForCausalLM.from_pretrained(f"{run}/composed")


def test_a_run_is_compared_with_what_it_recorded_on_the_same_text_alone(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _train(cli, "language", NAMES["language"])
    monkeypatch.delattr(corpus, "learn_tokenizer")  # the run has one
    result = read_result(Path(run))
    worse = {**result, "scores": {**result["scores"], "perplexity": 0.9 * result["scores"]["perplexity"]}}
    write_json(Path(run) / "result.json", worse)
    said = cli("evaluate", run, "--data", "texts", "--device", "cpu")
    assert said.code == 1
    assert "recorded perplexity" in said.out
    with Path("texts/train.txt").open("a") as file:
        file.write("\n\none more")
    said = cli("evaluate", run, "--data", "texts", "--device", "cpu")
    assert said.code == 0
    assert "on other text (pydoc): not comparable" in said.out


def test_a_factorized_translator_is_composed_into_a_folder_of_transformers(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:

    run = _train(cli, "translation", "translation/numbers-0.5-si")
    said = cli("translate", "--run", run, "one two", "three four", "--device", "cpu")
    assert said.code == 0
    assert len(said.out.splitlines()) == 2
    assert cli("translate", "--run", run, " one two", "three four  ", "--device", "cpu").out == said.out
    said = cli("translate", "--run", run, "one two", "three " * 50, "--device", "cpu")  # which would be cut
    assert "TEXT 2 has 51 tokens, and the translator reads 40 at most; give its sentences one by one" in said.error
    assert "give a run of a language recipe" in cli("generate", "--run", run, "one", "--device", "cpu").error
    said = cli("compose", run, "--data", "texts", "--device", "cpu")
    assert said.code == 0, said.err
    assert "validation loss before" in said.out
    composed = AutoModelForSeq2SeqLM.from_pretrained(f"{run}/composed")
    assert not is_factorized(composed)
    assert {type(module) for module in composed.modules() if "Linear" in type(module).__name__} == {nn.Linear}
    assert AutoTokenizer.from_pretrained(f"{run}/composed")("one two")["input_ids"]
    assert "is already there" in cli("compose", run, "--data", "texts", "--device", "cpu").error
    again = ("compose", run, "--data", "texts", "--device", "cpu", "--overwrite")
    assert cli(*again).code == 0
    for others in ("texts", run, "texts/none.txt"):  # folders and files that it did not write are kept
        Path("texts/none.txt").write_text("one")
        before = sorted(Path().rglob("*"))
        assert f"and {others} does not; name another folder by --out" in cli(*again, "--out", others).error
        assert sorted(Path().rglob("*")) == before
    monkeypatch.setattr(translation, "translate_texts", lambda model, tokenizer, texts, *how: map(str, how))
    assert cli("translate", "--run", run, "one", "--device", "cpu").out.split() == ["2", "40"]  # beam and longest
    monkeypatch.setattr("factorized.experiments.cli.text.ROUNDING", -1.0)
    said = cli("compose", run, "--data", "texts", "--device", "cpu", "--out", "elsewhere")
    assert said.code == 1
    assert "more than rounding: elsewhere was not written" in said.out
    assert not Path("elsewhere").exists()


@pytest.mark.parametrize("name", ["bert/large-0.5-flambe", "translation/iwslt14-0.25", "language/small-lowrank-0.5-si"])
def test_the_plan_of_a_recipe_of_text_needs_no_text(cli: Cli, name: str) -> None:
    said = cli("plan", name)
    assert said.code == 0, said.err
    assert "rank" in said.out


def test_a_budget_replaces_that_of_a_recipe_and_a_page_is_drawn(cli: Cli) -> None:
    whole, half = (cli("plan", "language/tiny-lowrank-0.5", *how).out for how in ((), ("--ratio", "0.25")))
    assert whole != half
    said = cli("plan", "language/tiny-lowrank-0.5", "--html", "plan.html")
    assert said.out == f"{whole}written to plan.html\n"
    assert "down_proj" in Path("plan.html").read_text()


def test_the_plan_of_a_dense_recipe_says_so_and_a_large_one_takes_no_memory(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[nn.Module] = []

    def noted(*arguments: Any, **keywords: Any) -> nn.Module:
        made.append(starting_network(*arguments, **keywords))
        return made[-1]

    monkeypatch.setattr("factorized.experiments.text.network.starting_network", noted)
    said = cli("plan", "bert/large")
    assert "bert/large trains a dense network of 335,174,458 parameters; a budget, such as --ratio 0.1" in said.out
    assert all(parameter.is_meta for parameter in made[0].parameters())
    assert "there is no plan to draw; drop --html" in cli("plan", "bert/large", "--html", "plan.html").error


def _trained_on(task: str, *changes: str) -> list[str]:
    """Return the command that trains a small recipe of the task on texts/, with ``changes``."""
    every = (*SMALL, *BY_TASK[task], *files(Path("texts"), task), *changes)
    return ["train", NAMES[task], "--data", "texts", "--device", "cpu", *(f"--set={change}" for change in every)]


@pytest.mark.parametrize(
    ("task", "content", "changes", "message"),
    [
        (
            "translation",
            {"a.de": "eins\nzwei\n", "a.en": "one\n"},
            ['data.train=["a.{de,en}"]'],
            "texts/a.de has 2 lines and texts/a.en 1; every line needs its translation",
        ),
        (
            "translation",
            {"a.de": "eins\n", "a.en": "one\n"},
            ['data.train=["a.de", "a.en"]'],
            "a.de:1: expected source, a tab and target, got 'eins'; two files whose lines belong together",
        ),
        ("translation", {"a.tsv": "eins\tone\n\n"}, ['data.train=["a.tsv"]'], "a.tsv:2 is empty; expected source"),
        ("language", {"a.txt": "\n \n"}, ['data.train=["a.txt"]'], "texts/a.txt holds no text; give a file with words"),
        ("masked", {"a.txt": "\u0007\n\n" * 40}, ['data.train=["a.txt"]'], "the training text has no tokens"),
        ("masked", {"a.txt": "\u0007"}, ['data.validation=["a.txt"]'], "tokenizing validation: the text has no tokens"),
        ("language", {"a.txt": "one two"}, ['data.train=["a.txt"]'], "data.train has 1 document, too few to hold out"),
        ("language", {}, ["data.vocabulary=100"], "data.vocabulary = 100 is too small: characters and special tokens"),
        ("language", {}, ['data.train=["hf:some/set"]'], "hf:some/set could not be loaded (train): Couldn't reach"),
        ("masked", {}, ["model.from_run=none"], "model.from_run = 'none': there is no none/result.json"),
        (
            "translation",
            {},
            ["factorize.scheme=low_rank", "factorize.attention=heads", "factorize.rank_scale=0.01"],
            "rank_scale = 0.01 leaves a head of model.encoder.layers.0.self_attn without dimensions: it has 8, so ask",
        ),
    ],
)
def test_bad_text_and_sizes_are_one_line_and_nothing_is_written(
    cli: Cli, task: str, content: dict[str, str], changes: list[str], message: str
) -> None:
    command = _trained_on(task, *changes)
    for name, text in content.items():
        Path("texts", name).write_text(text)
    assert message in cli(*command).error
    assert not Path("out").exists()


def _saved(config: PretrainedConfig) -> str:
    AutoModelForCausalLM.from_config(config).save_pretrained("network")
    return "model.name=hf:network"


def test_a_vocabulary_that_does_not_fit_the_model_is_named_with_both_sizes(cli: Cli) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    said = cli(*_trained_on("language", *OWN_SIZES, _saved(LlamaConfig(vocab_size=50, **sizes))))
    assert "the model has 50 embeddings and the tokenizer 298 tokens; take the tokenizer" in said.error
    assert not Path("out").exists()


def test_a_folder_with_a_tokenizer_is_planned_whatever_vocabulary_the_recipe_would_learn(cli: Cli) -> None:
    folder = f"{_train(cli, 'language', NAMES['language'])}/model"
    changes = (f"model.name=hf:{folder}", "data.length=16")
    said = cli("plan", "language/tiny-lowrank-0.5-si-fd", *(f"--set={change}" for change in changes))
    assert said.code == 0, said.err  # it has fewer embeddings than the 2,000 tokens that would be learned
    assert "LlamaForCausalLM" in said.out


def test_attention_that_nobody_registered_is_named_with_the_lines_to_add(cli: Cli) -> None:
    config = MptConfig(vocab_size=400, d_model=16, n_heads=2, n_layers=1)
    heads = ("factorize.scheme=low_rank", "factorize.attention=heads", "factorize.rank_scale=0.5")
    error = cli(*_trained_on("language", *OWN_SIZES, _saved(config), *heads)).error
    assert "transformer.blocks.0.attn: MptAttention of transformers" in error
    assert "is not registered; register it with fz.register_attention( MptAttention, query=" in error
    assert "of its linears: Wqkv, out_proj" in error
    assert 'or set factorize.attention = "layers"' in error
    assert not Path("out").exists()


def test_a_run_of_another_task_is_named_and_left_as_it_is(cli: Cli) -> None:
    run = _train(cli, "language", NAMES["language"])
    before = {path: path.read_bytes() for path in Path(run).rglob("*") if path.is_file()}
    assert (
        "was trained for task 'language'; give a run of a translation recipe"
        in cli("translate", "--run", run, "x").error
    )
    other = cli(*_trained_on("masked", f"model.from_run={run}")).error
    assert f"model.from_run = '{run}' is a run of task 'language'; give one of task 'masked'" in other
    Path("out/bert").mkdir()
    Path(run).parent.rename("out/bert/tiny")
    resumed = cli(*_trained_on("masked"), "--resume").error
    assert "holds a run with task = 'language', and this recipe says 'masked'" in resumed
    assert "already holds a run" in cli(*_trained_on("masked")).error
    after = {path: path.read_bytes() for path in Path("out/bert/tiny/seed-0").rglob("*") if path.is_file()}
    assert list(after.values()) == list(before.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train", "language/tiny", "--data", "nowhere"],
            "there is no folder nowhere; give the folder of the recipe's",
        ),
        (["train", "language/tiny", "--data", "."], "reads the embedded text 'pydoc'; drop --data"),
        (["train", "language/small", "--data", "."], "wikipedia.txt"),
        (["train", "bert/tiny", "--set", "data.name=mine"], "needs data.train"),
        (["generate", "--run", ".", "x"], "there is no result.json"),
    ],
)
def test_wrong_words_about_text_are_one_line(cli: Cli, arguments: list[str], message: str) -> None:
    assert message in cli(*arguments).error
