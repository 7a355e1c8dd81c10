"""Answering questions: the span of a paragraph that answers one, as in SQuAD v1.1; exact match and F1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from factorized.experiments.text.question_windows import QuestionWindows
from factorized.experiments.text.squad_metric import score_answers
from factorized.experiments.text.task import Batch, Example, TextTask, device_of, in_batches, padded
from factorized.nn.running import evaluation_mode

LONGEST = 30  # tokens of an answer
VALIDATED = 500  # questions at most that a validation during training answers


class QuestionsTask(TextTask):
    """Find where in a paragraph the answer to a question begins and ends."""

    score = "f1"
    predicts_tokens = False

    @property
    def examples(self) -> QuestionWindows:
        """The windows of the training questions."""
        return self.corpus.questions["train"]

    def collate(self, examples: Sequence[Example]) -> Batch:
        """Pad windows to the longest of them; the labels are the first and the last token of the answer."""
        pads = {"input_ids": self.tokenizer.pad_token_id}
        rows = [example["inputs"] for example in examples]
        batch = {name: padded([row[name] for row in rows], pads.get(name, 0)) for name in rows[0]}
        batch["attention_mask"] = padded([[1] * len(row["input_ids"]) for row in rows], 0)
        answers = torch.tensor([example["answer"] for example in examples])
        return batch | {"start_positions": answers[:, 0], "end_positions": answers[:, 1]}

    def lengths(self, example: Example) -> list[int]:
        """Return the tokens of a window."""
        return [len(example["inputs"]["input_ids"])]

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Return the figures of some of the validation questions, evenly spaced."""
        every = -(-len(self.corpus.questions["validation"].questions) // VALIDATED)
        return self.measure(model, "validation", every)

    def measure(self, model: nn.Module, part: str, every: int = 1) -> dict[str, float]:
        """Return loss, exact match and F1 of a part, or of each ``every``-th question."""
        windows = self.corpus.questions[part]
        chosen = [number for number, question in enumerate(windows.question_of) if question % every == 0]
        predictions, loss = self._answer(model, windows, chosen)
        gold = {q.id: [answer.text for answer in q.answers] for q in windows.questions[::every]}
        return {"loss": loss, **score_answers(predictions, gold)}

    def _answer(
        self, model: nn.Module, windows: QuestionWindows, chosen: Sequence[int]
    ) -> tuple[dict[str, str], float]:
        """Return the best answer that the chosen windows of each question give, by its id; and the mean loss."""
        answers: dict[str, tuple[float, str]] = {}
        total = torch.zeros((), dtype=torch.float64)
        order = sorted(chosen, key=lambda number: len(windows.inputs[number]["input_ids"]))  # less padding
        with evaluation_mode(model), torch.no_grad():
            for some in in_batches(order, self.recipe.run.batch):
                batch = self.collate([windows[number] for number in some])
                output = model(**{name: tensor.to(device_of(model)) for name, tensor in batch.items()})
                total += output.loss.double().cpu() * len(some)
                context = torch.tensor([windows.context[number] for number in some])
                spans = best_spans(output.start_logits.float().cpu(), output.end_logits.float().cpu(), context)
                for number, score, (first, last) in zip(some, *(part.tolist() for part in spans), strict=True):
                    name = windows.questions[windows.question_of[number]].id
                    if name not in answers or score > answers[name][0]:
                        answers[name] = (score, windows.text(number, first, last))
        return {name: text for name, (_, text) in answers.items()}, total.item() / len(chosen)


def best_spans(
    starts: Tensor,  # (batch, length)
    ends: Tensor,  # (batch, length)
    context: Tensor,  # (batch, 2)
    longest: int = LONGEST,
) -> tuple[Tensor, Tensor]:  # (batch,), (batch, 2)
    """Return the largest sum of a start's and an end's logit in each row, and the tokens of that span, both included.

    A span lies in the context, from its first token up to the token before its end, and has ``longest`` tokens at
    most. All such spans are compared; the list of the n best starts and ends that other programs make is a shortcut to
    the same, which can miss the best span.
    """
    length = starts.shape[1]
    places = torch.arange(length)
    outside = (places < context[:, :1]) | (places >= context[:, 1:])
    starts, ends = (logits.masked_fill(outside, -torch.inf) for logits in (starts, ends))
    best = torch.full((len(starts),), -torch.inf)
    spans = context[:, :1].repeat(1, 2)  # the first token, where no logit is finite
    for more in range(min(longest, length)):
        scores, first = (starts[:, : length - more] + ends[:, more:]).max(dim=1)
        better = scores > best
        best = torch.where(better, scores, best)
        spans = torch.where(better[:, None], torch.stack([first, first + more], dim=1), spans)
    return best, spans
