from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import factorized as fz
from factorized.experiments.recipes.find import load_any_recipe
from factorized.experiments.recipes.text import TextRecipe
from factorized.experiments.text import network, train, trainer
from factorized.experiments.text.corpus import Corpus, load_corpus
from factorized.experiments.text.language import LanguageTask
from factorized.experiments.text.network import build_text_network, build_text_optimizer
from factorized.experiments.text.train import TASKS, _last_checkpoint, train_text
from factorized.experiments.text.trained import load_text_run
from factorized.experiments.text.trainer import TextTrainer
from factorized.experiments.training.folder import CHECKPOINTS
from factorized.experiments.training.progress import Reporter
from factorized.files.checksum import sealed
from tests.experiments.reproduce.made import image_result
from tests.experiments.text.small import BY_TASK, NAMES, SMALL, files, small, train_until

SlowDown = Callable[[type, str, float], None]


@pytest.mark.parametrize("task", ["language", "masked", "translation"])
def test_a_task_is_trained_scored_saved_and_read_back(tmp_path: Path, task: str) -> None:
    recipe, corpus = small(task, tmp_path)
    (result,) = train_text(recipe, corpus, tmp_path / "run", device="cpu")
    assert result["scores"][result["score"]] >= 0
    assert [row["update"] for row in result["history"] if "validation_loss" in row] == [2, 4]
    rates = {row["update"]: row["learning_rate"] for row in result["history"] if "learning_rate" in row}
    assert len(rates) == 4
    for update, rate in rates.items():
        assert rate == pytest.approx(recipe.optimizer.lr * recipe.schedule.factor(update - 1)), update
    read, written, model, tokenizer = load_text_run(tmp_path / "run" / "seed-0")
    assert read == recipe
    assert written["scores"] == result["scores"]
    assert tokenizer.get_vocab() == corpus.tokenizer.get_vocab()
    assert [row["name"] for row in written["layers"]] == [form.name for form in fz.forms(model)] != []
    again = TASKS[task](recipe, corpus).test(model)
    assert again[result["score"]] == pytest.approx(result["scores"][result["score"]], rel=1e-5)
    assert not (tmp_path / "run" / "seed-0" / "checkpoints").exists()


@pytest.mark.parametrize("task", ["language", "masked"])
def test_text_for_less_than_one_batch_is_refused_as_nothing_would_be_trained(tmp_path: Path, task: str) -> None:
    recipe, corpus = small(task, tmp_path)
    count = len(TASKS[task](recipe, corpus).examples)
    recipe, corpus = small(task, tmp_path, f"run.batch={count + 1}")
    with pytest.raises(ValueError, match=f"makes {count} sequences .*, fewer than run.batch = {count + 1}; give more"):
        train_text(recipe, corpus, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
    recipe, corpus = small(task, tmp_path, f"run.batch={count}", "schedule.updates=1")
    (result,) = train_text(recipe, corpus, tmp_path / "run", device="cpu")
    assert result["tokens"] == count * recipe.data.length


@pytest.fixture
def slow_down(monkeypatch: pytest.MonkeyPatch) -> SlowDown:
    """Stop the clocks, and return a function that makes a method of a class take some seconds."""
    now = 0.0
    for module in (train, trainer):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now))

    def slow_down(owner: type, name: str, seconds: float) -> None:
        real = getattr(owner, name)

        def slowed(*arguments: Any, **keywords: Any) -> Any:
            nonlocal now
            now += seconds
            return real(*arguments, **keywords)

        monkeypatch.setattr(owner, name, slowed)

    return slow_down


@pytest.mark.parametrize(
    ("owner", "slow", "checkpoint_every"), [(LanguageTask, "validate", 1000), (TextTrainer, "_save", 7)]
)
def test_a_result_says_how_many_tokens_were_read_and_how_fast_without_evaluations_and_checkpoints(
    tmp_path: Path, slow_down: SlowDown, owner: type, slow: str, checkpoint_every: int
) -> None:
    changes = ("schedule.updates=40", "run.evaluate_every=20", f"run.checkpoint_every={checkpoint_every}")
    recipe, corpus = small("language", tmp_path, *changes)
    slow_down(TextTrainer, "training_step", 2.0)
    slow_down(owner, slow, 1000.0)
    (result,) = train_text(recipe, corpus, tmp_path / "run", device="cpu")
    assert result["tokens"] == 40 * 4 * 16
    assert result["tokens_per_second"] == 4 * 16 / 2.0
    assert result["machine"]["transformers"] == transformers.__version__


@pytest.mark.parametrize("task", ["language", "masked", "translation"])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, corpus = small(task, tmp_path, "schedule.updates=6", "run.evaluate_every=3", "model.dropout=0.1")
    (whole,) = train_text(recipe, corpus, tmp_path / "whole", device="cpu")
    train_until(4, recipe, corpus, tmp_path / "stopped", monkeypatch)
    (resumed,) = train_text(recipe, corpus, tmp_path / "stopped", device="cpu", resume=True)
    assert resumed["scores"] == whole["scores"]
    assert resumed["tokens"] == whole["tokens"]
    states = [load_text_run(tmp_path / name / "seed-0")[2].state_dict() for name in ("whole", "stopped")]
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
    assert [row["update"] for row in resumed["history"]] == [row["update"] for row in whole["history"]]


def test_a_stopped_run_of_a_mixture_from_a_folder_continues_with_its_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MixtralConfig(**sizes, vocab_size=300, num_key_value_heads=2, num_local_experts=2)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "network")
    small("language", tmp_path)[1].tokenizer.save_pretrained(tmp_path / "network")
    changes = (f"model.name=hf:{tmp_path / 'network'}", "data.length=16", "run.batch=4", "data.vocabulary=300")
    steps = ("schedule.updates=4", "run.evaluate_every=2", "run.checkpoint_every=2", "optimizer.lr=0.01")
    recipe = load_any_recipe("language/tiny", (*files(tmp_path, "language"), *changes, *steps))
    assert isinstance(recipe, TextRecipe)
    corpus = load_corpus(recipe, tmp_path, tmp_path / "packed")
    (whole,) = train_text(recipe, corpus, tmp_path / "whole", device="cpu")
    train_until(2, recipe, corpus, tmp_path / "stopped", monkeypatch)
    (resumed,) = train_text(recipe, corpus, tmp_path / "stopped", device="cpu", resume=True)
    assert resumed["scores"] == whole["scores"]


def test_the_seconds_of_a_run_are_those_of_all_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_down: SlowDown
) -> None:
    recipe, corpus = small("language", tmp_path, "schedule.updates=6", "run.evaluate_every=6")
    slow_down(TextTrainer, "training_step", 2.0)
    train_until(2, recipe, corpus, tmp_path / "run", monkeypatch)
    for path in (tmp_path / "run" / "seed-0" / "checkpoints").iterdir():
        assert path.name == "checkpoint-2"
    slow_down(TextTrainer, "training_step", 1.0)  # beside the 2
    (result,) = train_text(recipe, corpus, tmp_path / "run", device="cpu", resume=True)
    assert result["seconds"] == 2 * 2.0 + 4 * 3.0


@pytest.fixture
def stopped_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[TextRecipe, Corpus, Path]:
    """A run that was stopped at its second update of four, with its recipe and corpus."""
    recipe, corpus = small("language", tmp_path)
    train_until(2, recipe, corpus, tmp_path / "run", monkeypatch)
    return recipe, corpus, tmp_path / "run"


def test_a_run_of_another_number_of_processes_is_not_resumed_unless_that_is_allowed(
    stopped_run: tuple[TextRecipe, Corpus, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, corpus, folder = stopped_run
    begun = folder / "seed-0" / "begun.json"
    state = json.loads(begun.read_text())
    assert state["ran_on"] == ["1 process (cpu)"]
    begun.write_text(json.dumps({**state, "ran_on": ["4 processes (cuda)"]}))
    with pytest.raises(ValueError, match=r"was trained by 4 processes \(cuda\), and this is 1 process \(cpu\)"):
        train_text(recipe, corpus, folder, device="cpu", resume=True)
    how: dict[str, Any] = {"device": "cpu", "resume": True, "allow_other_devices": True, "reporter": Reporter()}
    (result,) = train_text(recipe, corpus, folder, **how)
    assert "continues with 1 process (cpu); it was trained by 4 processes (cuda) before" in capsys.readouterr().out
    assert result["ran_on"] == ["4 processes (cuda)", "1 process (cpu)"]
    begun.write_text(json.dumps({**state, "ran_on": ["4 processes (cuda)"]}))
    (again,) = train_text(recipe, corpus, folder, device="cpu", resume=True)  # it has ended
    assert again["scores"] == result["scores"]


def test_what_was_written_after_the_last_checkpoint_is_forgotten(
    stopped_run: tuple[TextRecipe, Corpus, Path],
) -> None:
    recipe, corpus, folder = stopped_run
    run = folder / "seed-0"
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert checkpoint.name == "checkpoint-2"
    with (run / "metrics.jsonl").open("a") as rows:  # as a process leaves them that is killed at update 4
        rows.writelines(f'{{"update": {update}, "loss": 1000.0}}\n' for update in (3, 4))
        rows.write('{"update": 5, "lo')
    (run / "checkpoints" / "checkpoint-1").mkdir()
    shutil.copy(checkpoint / "trainer_state.json", run / "checkpoints" / "checkpoint-1")  # older
    (run / "checkpoints" / "checkpoint-4").mkdir()  # not complete
    (result,) = train_text(recipe, corpus, folder, device="cpu", resume=True)
    assert [row["update"] for row in result["history"] if "loss" in row] == [1, 2, 3, 4]
    assert all(row["loss"] < 100 for row in result["history"] if "loss" in row)


def test_the_newest_of_several_checkpoints_is_that_of_the_highest_number(tmp_path: Path) -> None:
    for update in (2, 9, 10, 100):
        (tmp_path / CHECKPOINTS / f"checkpoint-{update}").mkdir(parents=True)
        if update < 100:  # the process was killed while it wrote the last
            (tmp_path / CHECKPOINTS / f"checkpoint-{update}" / "trainer_state.json").write_text("{}")
    newest = _last_checkpoint(tmp_path)
    assert newest is not None
    assert newest.name == "checkpoint-10"
    assert _last_checkpoint(tmp_path / "nothing") is None


def test_a_damaged_note_of_what_is_trained_is_named(stopped_run: tuple[TextRecipe, Corpus, Path]) -> None:
    recipe, corpus, folder = stopped_run
    for content in ("{", "[]", '{"seed": "x"}'):
        (folder / "seed-0" / "begun.json").write_text(content)
        with pytest.raises(ValueError, match=r"begun\.json is damaged; start this run over with --overwrite"):
            train_text(recipe, corpus, folder, device="cpu", resume=True)


def test_a_finished_run_is_not_repeated_and_another_recipe_is_not_resumed(tmp_path: Path) -> None:
    recipe, corpus = small("language", tmp_path)
    (first,) = train_text(recipe, corpus, tmp_path / "run", device="cpu")
    before = (tmp_path / "run" / "seed-0" / "result.json").stat().st_mtime_ns
    (again,) = train_text(recipe, corpus, tmp_path / "run", device="cpu", resume=True)
    assert again["scores"] == first["scores"]
    assert (tmp_path / "run" / "seed-0" / "result.json").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="already holds a run"):
        train_text(recipe, corpus, tmp_path / "run", device="cpu")
    other, _ = small("language", tmp_path, "optimizer.lr=0.5")
    with pytest.raises(ValueError, match=r"holds a run with .*lr.*0\.5"):
        train_text(other, corpus, tmp_path / "run", device="cpu", resume=True)


def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path: Path) -> None:
    recipe, corpus = small("language", tmp_path, "optimizer.lr=1e30", "optimizer.name=sgd")
    with pytest.raises(ValueError, match=r"the training loss is (nan|inf) at update \d+; .*Try optimizer.lr="):
        train_text(recipe, corpus, tmp_path / "run", device="cpu")


def test_updates_that_lamb_skipped_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU LAMB skips them without telling."""
    recipe, corpus = small("language", tmp_path, "optimizer.name=lamb")
    real = TextTrainer.training_step

    def spoiled(self: TextTrainer, model: torch.nn.Module, *others: Any) -> torch.Tensor:
        loss = real(self, model, *others)
        model.get_input_embeddings().weight.grad[0, 0] = torch.nan
        return loss

    monkeypatch.setattr(TextTrainer, "training_step", spoiled)
    monkeypatch.setattr(network, "Lamb", partial(fz.Lamb, skip_nonfinite=True))
    with pytest.raises(ValueError, match=r"the gradients of 1 updates are not finite at update 1; .*Try optimizer.lr="):
        train_text(recipe, corpus, tmp_path / "run", device="cpu")


@torch.no_grad()
def _squares(model: torch.nn.Module) -> dict[str, float]:
    return {form.name: float(form.norm_squared(list(form.values)).sum()) for form in fz.forms(model)}


def _norms(recipe: Any, corpus: Any, steps: int) -> dict[str, float]:
    """Train with gradients of zero, so that only the decay acts; return the norm of every form."""
    model = build_text_network(recipe, corpus.tokenizer, 0)
    before = _squares(model)
    optimizer = build_text_optimizer(recipe, model)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    after = _squares(model)
    return {name: after[name] / before[name] for name in after}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lamb", "flambe"])
def test_frobenius_decay_of_the_named_forms_acts_under_every_optimizer(tmp_path: Path, optimizer: str) -> None:
    changes = (f"optimizer.name={optimizer}", "optimizer.lr=0.1", "decay.kind=frobenius", "decay.strength=0.5")
    recipe, corpus = small("masked", tmp_path, *changes, "decay.rest=0.0", 'decay.forms=["ov"]')
    found = _norms(recipe, corpus, 3)
    assert found
    for name, share in found.items():
        if name.endswith("ov"):
            assert share < 0.999, name
        else:
            assert share == pytest.approx(1.0), name


def test_frobenius_decay_acts_on_projections_that_are_layers(tmp_path: Path) -> None:
    changes = ("factorize.scheme=low_rank", "factorize.rank=3", "decay.kind=frobenius", "decay.strength=0.5")
    recipe, corpus = small("language", tmp_path, *changes, "optimizer.lr=0.1")
    found = _norms(recipe, corpus, 3)
    assert any(name.endswith("q_proj") for name in found)
    assert max(found.values()) < 0.999


def test_weight_decay_leaves_norms_and_biases_alone(tmp_path: Path) -> None:
    recipe, corpus = small("masked", tmp_path, "optimizer.name=adamw", "optimizer.lr=0.1", "decay.strength=0.5")
    model = build_text_network(recipe, corpus.tokenizer, 0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_text_optimizer(recipe, model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        moved = not torch.equal(parameter, before[name])
        assert moved == (parameter.dim() > 1 and bool(before[name].any())), name


def test_a_run_of_images_or_a_damaged_one_is_named(tmp_path: Path) -> None:
    recipe, corpus = small("language", tmp_path)
    train_text(recipe, corpus, tmp_path / "run", device="cpu")
    run = tmp_path / "run" / "seed-0"
    from factorized.experiments.training.trained import load_trained

    with pytest.raises(ValueError, match="is a run on text; this needs one on images"):
        load_trained(run)
    (run / "model" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config\.json is damaged, or of another network"):
        load_text_run(run)
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, "seed": 5}))
    with pytest.raises(ValueError, match="damaged, or changed since it was written"):
        load_text_run(run)
    (run / "result.json").write_text(json.dumps(sealed(image_result("digits/resnet8", 0, 97.0))))
    with pytest.raises(ValueError, match="is a run on images; this needs one on text"):
        load_text_run(run)


@pytest.mark.nightly
@pytest.mark.parametrize("task", ["language", "translation"])
def test_two_processes_prepare_one_text_and_train_one_run(tmp_path: Path, task: str) -> None:
    changes = [f"--set={change}" for change in (*SMALL, *BY_TASK[task], *files(tmp_path / "texts", task))]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "factorized", "train", NAMES[task], "--data", "texts", *changes]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [*command, "--device", "cpu"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr[-2000:]
    _, result, _, _ = load_text_run(tmp_path / "out" / NAMES[task] / "seed-0")
    assert result["machine"]["processes"] == 2
    assert [row["update"] for row in result["history"] if "validation_loss" in row] == [2, 4]
