"""Answering questions: spans, batches, scores, and training from the command line's functions."""

from __future__ import annotations

import itertools
import json
import lzma
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from factorized.experiments.cli.text import compose_run, evaluate_run
from factorized.experiments.recipes.find import load_any_recipe
from factorized.experiments.text.corpus import Corpus, load_corpus
from factorized.experiments.text.questions import QuestionsTask, best_spans
from factorized.experiments.text.train import train_text
from factorized.experiments.text.trained import load_text_run
from factorized.surgery.compose import is_factorized
from factorized.surgery.shrink import factorize_attention
from tests.experiments.text.small_squad import paragraph, pretrained_run, recipe_of, small_corpus, table, write_squad

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return small_corpus(tmp_path_factory.mktemp("corpus"))


class Oracle(nn.Module):
    """Puts its logits on the labels, or ``before`` them."""

    def __init__(self, before: int = 0) -> None:
        super().__init__()
        self.before, self.weight = before, nn.Parameter(torch.zeros(()))

    def forward(self, input_ids: Tensor, start_positions: Tensor, end_positions: Tensor, **others: Tensor) -> Any:
        labels = ((at - self.before).clamp(min=0) for at in (start_positions, end_positions))
        starts, ends = (9.0 * nn.functional.one_hot(at, input_ids.shape[1]) for at in labels)
        return SimpleNamespace(loss=torch.tensor(2.0), start_logits=starts.bfloat16(), end_logits=ends.bfloat16())


def brute_force(starts: Tensor, ends: Tensor, context: tuple[int, int], longest: int) -> tuple[float, tuple[int, int]]:
    spans = [(i, j) for i in range(*context) for j in range(i, context[1]) if j - i < longest]
    return max((float(starts[i] + ends[j]), (i, j)) for i, j in spans)


def test_the_best_span_is_the_best_of_all_that_are_allowed() -> None:
    draws = torch.Generator().manual_seed(0)
    contexts = [(3, 20), (1, 5), (10, 11), (2, 18)]
    for _, longest in itertools.product(range(20), (1, 4, 30)):
        starts, ends = torch.randn(2, len(contexts), 20, generator=draws)
        scores, spans = best_spans(starts, ends, torch.tensor(contexts), longest)
        for row, context in enumerate(contexts):
            score, span = brute_force(starts[row], ends[row], context, longest)
            assert scores[row].item() == pytest.approx(score)
            assert tuple(spans[row].tolist()) == span


def test_logits_that_are_no_numbers_still_give_a_span_of_the_context() -> None:
    wrong = torch.full((1, 6), torch.nan)
    _, spans = best_spans(wrong, wrong, torch.tensor([[2, 5]]))
    assert spans.tolist() == [[2, 2]]


def test_a_batch_is_padded_to_its_longest_window(corpus: Corpus) -> None:
    task = QuestionsTask(recipe_of(), corpus)
    lengths = [len(inputs["input_ids"]) for inputs in task.examples.inputs]
    short, long = lengths.index(min(lengths)), lengths.index(max(lengths))
    batch = task.collate([task.examples[short], task.examples[long]])
    assert sorted(batch) == ["attention_mask", "end_positions", "input_ids", "start_positions", "token_type_ids"]
    assert batch["input_ids"].shape == batch["token_type_ids"].shape == (2, lengths[long])
    assert batch["attention_mask"].sum(dim=1).tolist() == [lengths[short], lengths[long]]
    assert (batch["input_ids"][0, lengths[short] :] == task.tokenizer.pad_token_id).all()
    positions = zip(batch["start_positions"].tolist(), batch["end_positions"].tolist(), strict=True)
    assert list(positions) == [task.examples.answers[short], task.examples.answers[long]]


def test_a_model_that_knows_every_answer_scores_100(corpus: Corpus) -> None:
    assert len(corpus.questions["validation"]) > len(corpus.questions["validation"].questions)
    task = QuestionsTask(recipe_of(), corpus)
    assert task.test(Oracle()) == {"loss": 2.0, "exact_match": 100.0, "f1": 100.0}
    assert task.validate(Oracle()) == {"loss": 2.0, "exact_match": 100.0, "f1": 100.0}
    assert task.test(Oracle(before=2))["exact_match"] < 50


def test_validation_asks_some_of_the_questions_and_the_test_all(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    class Counting(Oracle):
        def forward(self, input_ids: Tensor, **others: Tensor) -> Any:
            asked.append(len(input_ids))
            return super().forward(input_ids, **others)

    task = QuestionsTask(recipe_of(), corpus)
    monkeypatch.setattr("factorized.experiments.text.questions.VALIDATED", 4)
    assert task.validate(Counting())["exact_match"] == 100.0  # of 11 questions, numbers 0, 3, 6 and 9
    of_question = corpus.questions["validation"].question_of
    assert sum(asked) == sum(question in (0, 3, 6, 9) for question in of_question)
    asked.clear()
    task.test(Counting())
    assert sum(asked) == len(of_question)


def test_test_files_are_scored_by_name(tmp_path: Path) -> None:
    recipe = recipe_of({"data": {"test": ["other.json"]}})
    folder = write_squad(tmp_path)
    (folder / "other.json").write_text(json.dumps(table(paragraph(7))))
    task = QuestionsTask(recipe, load_corpus(recipe, folder, tmp_path / "cache"))
    found = task.test(Oracle())
    assert (found["f1"], found["f1_other"], found["exact_match_other"]) == (100.0, 100.0, 100.0)


def test_without_a_validation_file_whole_paragraphs_are_held_out(tmp_path: Path) -> None:
    recipe = recipe_of({"data": {"validation": []}})
    corpus = load_corpus(recipe, write_squad(tmp_path, train=20), tmp_path / "cache")
    train, held = (corpus.questions[part] for part in ("train", "validation"))
    assert (len(train.questions), len(held.questions)) == (57, 3)
    assert not set(train.contexts) & set(held.contexts)
    with pytest.raises(ValueError, match=r"data.train has 3 paragraphs, too few to hold out one in 20"):
        load_corpus(recipe, write_squad(tmp_path), tmp_path / "cache")


def test_a_corpus_has_one_checksum_however_it_is_stored(tmp_path: Path, corpus: Corpus) -> None:
    folder = write_squad(tmp_path)
    (folder / "train.json.xz").write_bytes(lzma.compress((folder / "train.json").read_bytes()))
    (folder / "train.json").unlink()
    assert load_corpus(recipe_of(), folder, tmp_path / "cache").checksum == corpus.checksum
    (folder / "dev.json").write_text(json.dumps(table(paragraph(5))))
    assert load_corpus(recipe_of(), folder, tmp_path / "cache").checksum != corpus.checksum


def test_windows_are_tokenized_once_for_one_text_tokenizer_length_and_stride(tmp_path: Path) -> None:
    folder = write_squad(tmp_path / "squad")

    def load(changes: dict[str, Any] | None = None, tokenizer: Any = None) -> tuple[Corpus, list[str]]:
        stages: list[str] = []
        loaded = load_corpus(
            recipe_of(changes), folder, tmp_path / "cache", lambda stage, *_: stages.append(stage), tokenizer
        )
        return loaded, [stage for stage in stages if stage.startswith("tokenizing")]

    first, told = load()
    assert told == ["tokenizing train", "tokenizing validation"]
    for tokenizer in (None, first.tokenizer):  # learned, and as a run has it after training
        again, told = load(tokenizer=tokenizer)
        assert not told
        for part, windows in first.questions.items():
            found = again.questions[part]
            assert (found.question_of, found.context, found.answers) == (
                windows.question_of,
                windows.context,
                windows.answers,
            )
            assert [rows.tolist() for rows in found.offsets] == [rows.tolist() for rows in windows.offsets]
            for row, expected in zip(found.inputs, windows.inputs, strict=True):
                assert {name: ids.tolist() for name, ids in row.items()} == {
                    name: ids.tolist() for name, ids in expected.items()
                }
    for data in ({"length": 47}, {"stride": 7}, {"vocabulary": 110}):
        assert load({"data": data})[1] == ["tokenizing train", "tokenizing validation"]
    (folder / "dev.json").write_text(json.dumps(table(paragraph(5))))
    assert load()[1] == ["tokenizing train", "tokenizing validation"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"stride": 48}}, "data.stride = 48 must be less than data.length = 48"),
        ({"data": {"stride": -1}}, "data.stride"),
        ({"task": "masked", "data": {"stride": 7}}, "data.stride = 7 is for questions, and task is masked"),
        ({"run": {"label_smoothing": 0.1}}, "run.label_smoothing = 0.1 is for .* and task is questions"),
        ({"model": {"name": "hf:some", "from_run": "out/x"}}, "give name = 'hf:some' or from_run = 'out/x', not both"),
        ({"data": {"train": []}}, "for task 'questions' nothing comes with this package"),
        ({"data": {"train": ["none.json"]}}, "there is no .*none.json .nor none.json.xz"),
    ],
)
def test_a_wrong_recipe_is_reported(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_corpus(recipe_of(changes), write_squad(tmp_path), tmp_path / "cache")


def test_a_shrunk_encoder_is_fine_tuned_evaluated_and_composed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = pretrained_run(tmp_path, lambda model: factorize_attention(model, 0.5))
    changes = ('data.train=["train.json"]', "data.length=48", "data.stride=8", "schedule.updates=2", "run.batch=4")
    recipe: Any = load_any_recipe("squad/bert-small", (*changes, f"model.from_run={before}"))
    folder = tmp_path / "squad"
    corpus = load_corpus(recipe, folder, tmp_path / "cache")
    (result,) = train_text(recipe, corpus, tmp_path / "out", device=CPU)
    run = tmp_path / "out" / "seed-0"
    assert set(result["scores"]) == {"loss", "exact_match", "f1"}
    assert result["history"][-1]["update"] == 2
    began = result["from_run"]
    assert (began["recipe"]["name"], began["recipe"]["task"], began["seed"]) == ("squad/small", "masked", 1)
    _, _, model, tokenizer = load_text_run(run)
    assert type(model).__name__ == "BertForQuestionAnswering"
    assert is_factorized(model)
    assert tokenizer.get_vocab() == corpus.tokenizer.get_vocab()
    evaluate_run(run, str(folder), CPU)
    compose_run(run, None, str(folder), CPU, overwrite=False)
    told = capsys.readouterr().out
    assert f"recorded f1 {result['scores']['f1']:.4g}: +0" in told
    assert (run / "composed" / "tokenizer.json").is_file()
    (again,) = train_text(recipe, corpus, tmp_path / "out", device=CPU, resume=True)
    assert again["scores"] == result["scores"]
    composed = recipe_of({"model": {"name": f"hf:{run / 'composed'}"}})
    assert load_corpus(composed, folder, tmp_path / "cache").tokenizer.get_vocab() == tokenizer.get_vocab()


def test_the_recipe_of_bert_base_is_that_of_the_paper() -> None:
    recipe: Any = load_any_recipe("squad/bert-base")
    assert (recipe.task, recipe.optimizer.lr, recipe.run.batch) == ("questions", 3e-5, 32)
    assert (recipe.data.length, recipe.data.stride, recipe.schedule.warmup) == (384, 128, 0.1)
    assert recipe.schedule.updates == 5530  # two epochs


def test_the_sample_is_read_four_times() -> None:
    recipe: Any = load_any_recipe("squad/bert-small")
    assert recipe.schedule.updates == 4 * (4457 // recipe.run.batch)  # windows of the sample
