from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from factorized.experiments.text import translation
from factorized.experiments.text.models import build_text_model
from factorized.experiments.text.network import build_text_network
from factorized.experiments.text.task import IGNORED, Batch
from factorized.experiments.text.train import train_text
from factorized.experiments.text.translation import TokenBatches, TranslationTask, score_bleu, translate_texts
from tests.experiments.text.small import small


def test_batches_hold_every_pair_once_and_no_more_tokens_than_asked() -> None:
    lengths = np.random.default_rng(0).integers(3, 40, size=500)
    batches = TokenBatches(lengths, 400, seed=3)
    first = list(batches)
    assert sorted(number for batch in first for number in batch) == list(range(500))
    assert max(len(batch) * max(lengths[number] for number in batch) for batch in first) <= 400
    filled = sum(lengths) / sum(len(batch) * max(lengths[number] for number in batch) for batch in first)
    assert filled > 0.9  # pairs of a batch are of like length, so that little is padding
    assert list(batches) == first
    batches.set_epoch(1)
    assert list(batches) != first
    assert list(TokenBatches(lengths, 400, seed=4)) != first


def test_a_pair_longer_than_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"run\.tokens = 10 is less than the longest pair, 12 tokens"):
        TokenBatches(np.array([3, 12]), 10, seed=0)
    with pytest.raises(ValueError, match="2 pairs cannot be divided into 3 parts of a batch; give more pairs"):
        TokenBatches(np.array([3, 12]), 100, seed=0, parts=3)


def test_the_decoder_reads_the_target_shifted_and_padding_is_neither_read_nor_learned(tmp_path: Path) -> None:
    recipe, corpus = small("translation", tmp_path)
    pad, end = corpus.tokenizer.pad_token_id, corpus.tokenizer.eos_token_id
    pairs: list[Any] = [
        {"source": np.array([5, 6, end]), "target": np.array([7, end])},
        {"source": np.array([8, end]), "target": np.array([9, 10, 11, end])},
    ]
    batch = TranslationTask(recipe, corpus).collate(pairs)
    assert batch["input_ids"].tolist() == [[5, 6, end], [8, end, pad]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["decoder_input_ids"].tolist() == [[pad, 7, end, pad], [pad, 9, 10, 11]]
    assert batch["labels"].tolist() == [[7, end, IGNORED, IGNORED], [9, 10, 11, end]]


@pytest.mark.parametrize("wrong", ["start", "tokenizer", "nothing"])
def test_a_folder_whose_model_reads_sentences_in_another_way_is_refused(tmp_path: Path, wrong: str) -> None:
    recipe, corpus = small("translation", tmp_path)
    pad, end, tokenizer = corpus.tokenizer.pad_token_id, corpus.tokenizer.eos_token_id, corpus.tokenizer
    model: Any = build_text_model(recipe, tokenizer, 0)
    if wrong == "start":  # as BART's, whose decoder begins with the end token
        model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = end
    if wrong == "tokenizer":  # the same
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<unk> $A </s>", special_tokens=[("<unk>", tokenizer.unk_token_id), ("</s>", end)]
        )
    folder = tmp_path / "network"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    recipe, corpus = small("translation", tmp_path, f"model.name=hf:{folder}")
    if wrong == "nothing":
        train_text(recipe, corpus, tmp_path / "run", device="cpu")
        return
    found = {"start": f"begins with {end},", "tokenizer": f"adds [{tokenizer.unk_token_id}, {end}] to a"}[wrong]
    with pytest.raises(ValueError, match=rf"padding token \({pad}\) and read .*{re.escape(found)}.*Seq2SeqTrainer"):
        train_text(recipe, corpus, tmp_path / "run", device="cpu")


def some_batch(task: TranslationTask) -> Batch:
    """Return a batch of nine pairs, six tokens long on one side and fewer on the other."""
    lengths = [(6, 4), (3, 4), (6, 2), (5, 3), (2, 4), (1, 1), (4, 4), (6, 4), (5, 1)]
    draw = np.random.default_rng(0).integers
    return task.collate([{"source": draw(5, 50, size=m), "target": draw(5, 50, size=n)} for m, n in lengths])


def test_batches_to_capture_have_one_shape_for_each_length(tmp_path: Path) -> None:
    recipe, corpus = small("translation", tmp_path, "run.tokens=75")
    task = TranslationTask(recipe, corpus)
    batch = task.to_capture(some_batch(task))
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        "input_ids": (12, 6),
        "attention_mask": (12, 1, 1, 6),
        "decoder_input_ids": (12, 6),
        "decoder_attention_mask": (1, 1, 6, 6),
        "labels": (12, 6),
    }
    assert batch["labels"][9:].eq(IGNORED).all()
    assert batch["attention_mask"].any(-1).all()  # every row reads something
    assert batch["labels"].ne(IGNORED).sum() == some_batch(task)["labels"].ne(IGNORED).sum()


@pytest.mark.parametrize(
    "changes", [(), ("factorize.scheme=low_rank", "factorize.rank=4", "factorize.attention=heads")]
)
def test_a_batch_to_capture_has_the_loss_and_the_gradients_of_the_batch(
    tmp_path: Path, changes: tuple[str, ...]
) -> None:
    recipe, corpus = small("translation", tmp_path, "run.label_smoothing=0.1", "model.layers=2", *changes)
    task = TranslationTask(recipe, corpus)
    model = build_text_network(recipe, corpus.tokenizer, 0).double()

    def loss_and_gradients(batch: Batch) -> list[torch.Tensor]:
        inputs, labels = task.for_plain_model(batch)
        loss = task.loss(model(**inputs), labels, labels.ne(IGNORED).sum())
        learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return [loss, *torch.autograd.grad(loss, learned)]

    plain, padded = (loss_and_gradients(batch) for batch in (some_batch(task), task.to_capture(some_batch(task))))
    torch.testing.assert_close(padded, plain, rtol=1e-5, atol=1e-7)  # losses are in float32


def test_the_pass_of_a_batch_to_capture_reads_no_values(tmp_path: Path) -> None:
    changes = ("factorize.scheme=low_rank", "factorize.rank=4", "model.dropout=0.1", "run.label_smoothing=0.1")
    recipe, corpus = small("translation", tmp_path, *changes)
    task = TranslationTask(recipe, corpus)
    model = build_text_network(recipe, corpus.tokenizer, 0).to("meta").train()  # tensors without values

    def run(batch: Batch) -> None:
        inputs, labels = task.for_plain_model({name: tensor.to("meta") for name, tensor in batch.items()})
        task.loss(model(**inputs, use_cache=False), labels, labels.ne(IGNORED).sum()).backward()

    run(task.to_capture(some_batch(task)))
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):  # its masks are read
        run(some_batch(task))


def test_a_pair_is_cut_after_the_longest_translation(tmp_path: Path) -> None:
    recipe, corpus = small("translation", tmp_path, "run.longest=2")
    pairs = TranslationTask(recipe, corpus).examples
    assert min(min(pairs.sources.lengths), min(pairs.targets.lengths)) > 2
    assert {len(side) for number in range(len(pairs)) for side in pairs[number].values()} == {2}
    assert max(pairs.lengths) == 2


def test_translations_come_back_in_the_order_of_their_sources(tmp_path: Path) -> None:
    recipe, corpus = small("translation", tmp_path)
    model = build_text_model(recipe, corpus.tokenizer, 0)
    sources = ["one", "nine three", "two"]
    together = translate_texts(model, corpus.tokenizer, sources, 2, 10)
    assert together == [translate_texts(model, corpus.tokenizer, [source], 2, 10)[0] for source in sources]


class Noting(nn.Module):
    """Keeps what it is asked to generate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def generate(self, **how: Any) -> torch.Tensor:
        self.how = how
        return torch.as_tensor(how["input_ids"])


def test_beam_and_longest_are_those_that_are_asked_for(tmp_path: Path) -> None:
    _, corpus = small("translation", tmp_path)
    model = Noting()
    translate_texts(model, corpus.tokenizer, ["one two"], beam=5, longest=7)
    assert {name: model.how[name] for name in ("num_beams", "max_new_tokens", "do_sample")} == {
        "num_beams": 5,
        "max_new_tokens": 7,
        "do_sample": False,
    }


@pytest.mark.parametrize("lower", [True, False])
def test_every_test_set_is_scored_the_first_as_bleu_and_without_case_if_the_text_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lower: bool
) -> None:
    for name in ("first", "second"):
        (tmp_path / f"{name}.tsv").write_text(f"one two three four\tthe {name} of five words\n")
    changes = ('data.test=["first.tsv", "second.tsv"]', f"data.lower={str(lower).lower()}")
    recipe, corpus = small("translation", tmp_path, *changes)
    said = "THE FIRST OF FIVE WORDS"
    monkeypatch.setattr(translation, "translate_texts", lambda model, tokenizer, texts, *how: [said] * len(texts))
    found = TranslationTask(recipe, corpus).test(build_text_model(recipe, corpus.tokenizer, 0))
    assert (found["bleu"] > 99) == lower
    assert found["bleu_second"] < 99
    assert {"bleu", "bleu_second", "bleu_signature", "loss"} == set(found)


def test_bleu_is_sacrebleus_and_says_how() -> None:
    score, signature = score_bleu(["the cat sat on the mat"], ["the cat sat on the mat"], lower=False)
    assert score == pytest.approx(100.0)
    assert "tok:13a" in signature
    assert score_bleu(["THE cat sat on a mat"], ["the cat sat on a mat"], lower=True)[0] == pytest.approx(100.0)
    assert score_bleu(["THE cat sat on a mat"], ["the cat sat on a mat"], lower=False)[0] < 100


class Sure(LlamaForCausalLM):
    """Says 1, 2, 3, … with a probability of 0.9 each, whatever stood before, and ends after 8."""

    def forward(self, input_ids: torch.Tensor, **others: Any) -> CausalLMOutputWithPast:
        logits = torch.full((len(input_ids), 1, 10), -9.0)
        logits[:, :, 9] = np.log(0.05)  # the end
        logits[:, :, input_ids.shape[1]] = np.log(0.9)
        return CausalLMOutputWithPast(logits=logits)


def test_beam_search_goes_on_until_no_better_translation_can_come() -> None:
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = Sure(LlamaConfig(vocab_size=10, eos_token_id=9, pad_token_id=9, use_cache=False, **sizes))

    class Digits:
        """Reads "0" and writes tokens as digits."""

        def __call__(self, texts: list[str], **how: Any) -> dict[str, torch.Tensor]:
            return {
                name: torch.full((len(texts), 1), kind) for kind, name in enumerate(("input_ids", "attention_mask"))
            }

        def batch_decode(self, rows: torch.Tensor, **how: Any) -> list[str]:
            return ["".join(map(str, row)) for row in rows.tolist()]

    assert translate_texts(model, Digits(), ["0"], beam=5, longest=20) == ["0123456789"]
