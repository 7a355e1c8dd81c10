"""Translation: pairs of sentences, batches of a number of tokens, beam search and BLEU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, Sampler

from factorized.experiments.data.extras import need
from factorized.experiments.text.task import (
    IGNORED,
    Batch,
    Example,
    TextTask,
    device_of,
    in_batches,
    padded,
    totals,
)
from factorized.experiments.text.tokens import PackedTexts
from factorized.nn.running import evaluation_mode

POOL = 100  # batches' worth of pairs that are sorted by length together
AT_ONCE = 256  # sentences translated together


class Pairs(Dataset[Example]):
    """Sources and targets, cut after ``longest`` tokens."""

    def __init__(self, sources: PackedTexts, targets: PackedTexts, longest: int) -> None:
        self.sources, self.targets, self.longest = sources, targets, longest

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, number: int) -> Example:
        return {"source": self.sources[number][: self.longest], "target": self.targets[number][: self.longest]}

    @property
    def lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The tokens that a pair takes in a batch: those of its longer side."""
        return np.minimum(np.maximum(self.sources.lengths, self.targets.lengths), self.longest)


class TokenBatches(Sampler[list[int]]):
    """Batches of pairs of like length, each of about ``tokens`` tokens with padding; other ones in every epoch.

    Every batch comes in ``parts`` that follow each other. One that has fewer pairs is left out of its epoch.
    """

    def __init__(self, lengths: np.ndarray[Any, np.dtype[np.int64]], tokens: int, seed: int, parts: int = 1) -> None:
        self.lengths, self.tokens, self.seed, self.parts, self.epoch = lengths, tokens, seed, parts, 0
        self._made: tuple[int, list[list[int]]] | None = None
        if len(lengths) < parts:  # every batch would be left out
            raise ValueError(f"{len(lengths)} pairs cannot be divided into {parts} parts of a batch; give more pairs")
        longest = int(lengths.max())
        if parts * longest > tokens:
            each = f", times {parts} parts of a batch" if parts > 1 else ""
            raise ValueError(
                f"run.tokens = {tokens} is less than the longest pair, {longest} tokens{each}; make it larger, or "
                "run.longest smaller"
            )

    def set_epoch(self, epoch: int) -> None:
        """Go on with the batches of ``epoch``."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._batches())

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches())

    def _batches(self) -> list[list[int]]:
        if self._made is None or self._made[0] != self.epoch:
            self._made = (self.epoch, self._cut(np.random.default_rng((self.seed, self.epoch))))
        return self._made[1]

    def _cut(self, draws: np.random.Generator) -> list[list[int]]:
        order = draws.permutation(len(self.lengths))
        pool = max(1, POOL * self.tokens // max(1, int(self.lengths.mean())))
        batches: list[list[int]] = []
        for start in range(0, len(order), pool):
            some = order[start : start + pool]
            batch: list[int] = []
            longest = 0
            for number in some[np.argsort(self.lengths[some], kind="stable")]:
                longest = max(longest, int(self.lengths[number]))
                if longest * (len(batch) + 1) > self.tokens:
                    batches.append(batch)
                    batch, longest = [], int(self.lengths[number])
                batch.append(int(number))
            batches.append(batch)
        drawn = (batches[i] for i in draws.permutation(len(batches)) if len(batches[i]) >= self.parts)
        return [batch[part :: self.parts] for batch in drawn for part in range(self.parts)]


class TranslationTask(TextTask):
    """Translate the first sentence of a pair into the second."""

    score = "bleu"

    @cached_property
    def examples(self) -> Pairs:
        """The training pairs."""
        return self._pairs("train")

    def batches(self, seed: int, parts: int) -> TokenBatches:
        """Return batches of ``run.tokens`` tokens."""
        return TokenBatches(self.examples.lengths, self.recipe.run.tokens, seed, parts)

    def prepare(self, model: nn.Module) -> None:
        """Raise if a model from a folder reads sentences in another way than the batches of this task."""
        config: Any = model.config
        pad, end = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        around = self.tokenizer("")["input_ids"]
        if config.decoder_start_token_id != pad or around != [end]:
            raise ValueError(
                f"a translator must begin with the padding token ({pad}) and read sentences that end with the end "
                f"token ({end}), as Marian and T5 do; this {type(model).__name__} begins with "
                f"{config.decoder_start_token_id}, and its tokenizer adds {around} to a sentence. Train it by "
                "transformers' Seq2SeqTrainer with fz.integrations.FactorizedTrainerMixin"
            )

    def collate(self, examples: Sequence[Example]) -> Batch:
        """Pad sources and targets; the decoder reads the target shifted by one."""
        pad = self.tokenizer.pad_token_id
        sources = padded([example["source"] for example in examples], pad)
        targets = padded([example["target"] for example in examples], pad)
        mask = sources.ne(pad)
        shifted = torch.cat([torch.full_like(targets[:, :1], pad), targets[:, :-1]], dim=1)
        return {
            "input_ids": sources,
            "attention_mask": mask.long(),
            "decoder_input_ids": shifted,
            "labels": targets.masked_fill(targets == pad, IGNORED),
        }

    def lengths(self, example: Example) -> list[int]:
        """Return the tokens of the source and of the target."""
        return [len(example["source"]), len(example["target"])]

    @property
    def can_be_captured(self) -> bool:
        """Whether the network is built from sizes and not compiled: to compile it for every shape would take too long.

        One from a folder may drop layers at random, and a graph would drop the same ones every time.
        """
        return not self.recipe.run.compile and not self.recipe.model.name

    def to_capture(self, batch: Batch) -> Batch:
        """Pad sources and targets to one length, and the batch to all rows that it has room for: a shape per length.

        What is added has no label. The masks are ready-made: transformers would read the values of its own during the
        pass, to see whether it can do without them.
        """
        rows, length = len(batch["labels"]), max(batch[name].shape[1] for name in ("input_ids", "labels"))
        room = self.recipe.run.tokens // length

        def filled(name: str, value: int) -> Tensor:  # (room, length)
            return F.pad(batch[name], (0, length - batch[name].shape[1], 0, room - rows), value=value)

        pad = self.tokenizer.pad_token_id
        mask = filled("attention_mask", 0).bool()
        mask[rows:, 0] = True  # attention to nothing would be NaN
        causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
        return {
            "input_ids": filled("input_ids", pad),
            "attention_mask": mask[:, None, None],  # (room, heads, queries, keys)
            "decoder_input_ids": filled("decoder_input_ids", pad),
            "decoder_attention_mask": causal[None, None],
            "labels": filled("labels", IGNORED),
        }

    def measure(self, model: nn.Module, part: str) -> dict[str, float]:
        """Return the loss per token of the pairs of a part."""
        some = in_batches(self._pairs(part), AT_ONCE)
        found = totals(model, (self.collate(examples) for examples in some))
        return {"loss": found.loss / found.labels}

    def test(self, model: nn.Module) -> dict[str, Any]:
        """Return BLEU of the first test set, or of the validation pairs; of other test sets by name; and the loss."""
        parts = self.corpus.tests or ["validation"]
        found: dict[str, Any] = self.validate(model)
        for part in parts:
            sources, references = zip(*self.corpus.pairs[part], strict=True)
            run = self.recipe.run
            translations = translate_texts(model, self.tokenizer, sources, run.beam, run.longest)
            bleu, signature = score_bleu(translations, references, self.recipe.data.lower)
            found |= {"bleu": bleu, "bleu_signature": signature} if part == parts[0] else {f"bleu_{part}": bleu}
        return found

    def _pairs(self, part: str) -> Pairs:
        sources, targets = self.corpus.texts[part]
        return Pairs(sources, targets, self.recipe.run.longest)


def translate_texts(model: Any, tokenizer: Any, sources: Sequence[str], beam: int, longest: int) -> list[str]:
    """Return the translations that beam search finds, in the order of ``sources``."""
    order = sorted(range(len(sources)), key=lambda number: -len(sources[number]))
    found: dict[int, str] = {}
    with evaluation_mode(model), torch.no_grad():
        for some in in_batches(order, AT_ONCE):
            texts = [sources[number] for number in some]
            inputs = tokenizer(texts, padding=True, truncation=True, max_length=longest, return_tensors="pt")
            outputs = model.generate(
                input_ids=inputs["input_ids"].to(device_of(model)),
                attention_mask=inputs["attention_mask"].to(device_of(model)),
                num_beams=beam,
                max_new_tokens=longest,
                early_stopping=False,  # True ends with the first finished hypotheses, before better ones are complete
                do_sample=False,
            )
            found |= dict(zip(some, tokenizer.batch_decode(outputs, skip_special_tokens=True), strict=True))
    return [found[number] for number in range(len(sources))]


def score_bleu(translations: Sequence[str], references: Sequence[str], lower: bool) -> tuple[float, str]:
    """Return BLEU and what sacrebleu says of how it was computed."""
    metric = need("sacrebleu", "sacrebleu", "BLEU", "text").BLEU(lowercase=lower)
    return metric.corpus_score(list(translations), [list(references)]).score, str(metric.get_signature())
