"""Questions with their paragraphs as sequences of tokens; a long paragraph becomes several windows that overlap."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from factorized.experiments.data.progress import Progress, silent
from factorized.experiments.text.squad import Paragraph, Question
from factorized.files.atomic import write_whole

AT_ONCE = 500  # questions tokenized together
Numbers = npt.NDArray[np.int32]


class QuestionWindows(Dataset[dict[str, Any]]):
    """Every question of some paragraphs, beside every window of its paragraph: ``[CLS] question [SEP] window [SEP]``.

    A window has ``length`` tokens at most, and shares ``stride`` tokens of the paragraph with the next. They are read
    from ``file`` if it is there, and written to it if not; its name has to change with the other arguments.
    """

    def __init__(
        self,
        paragraphs: Sequence[Paragraph],
        tokenizer: Any,
        length: int,
        stride: int,
        *,
        file: Path | None = None,
        progress: Progress = silent,
        stage: str = "tokenizing",
    ) -> None:
        self.tokenizer, self.length, self.stride = tokenizer, length, stride
        self.questions = [question for paragraph in paragraphs for question in paragraph.questions]
        self.contexts = [paragraph.context for paragraph in paragraphs for _ in paragraph.questions]
        self.inputs: list[dict[str, Numbers]] = []  # of each window, as the tokenizer names them
        self.question_of: list[int] = []  # the number of its question
        self.context: list[tuple[int, int]] = []  # its first token of the paragraph, and the token after the last
        self.offsets: list[Numbers] = []  # (tokens of the paragraph, 2): their first character, and the one after
        self.answers: list[tuple[int, int]] = []  # first and last token of the answer; both [CLS] if it is not there
        if file is not None and file.is_file():
            self._read(file)
            return
        for start in range(0, len(self.questions), AT_ONCE):
            self._tokenize(range(start, min(start + AT_ONCE, len(self.questions))))
            progress(stage, min(start + AT_ONCE, len(self.questions)), len(self.questions))
        if file is not None:
            self._write(file)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"inputs": self.inputs[number], "answer": self.answers[number]}

    def text(self, number: int, first: int, last: int) -> str:
        """Return what the paragraph says from token ``first`` to token ``last`` of a window, as it is written there."""
        begin, offsets = self.context[number][0], self.offsets[number]
        context = self.contexts[self.question_of[number]]
        return context[offsets[first - begin, 0] : offsets[last - begin, 1]]

    def _tokenize(self, numbers: range) -> None:
        asked = [self.questions[number].text for number in numbers]
        self._check_room(numbers, asked)
        encoded = self.tokenizer(
            asked,
            [self.contexts[number] for number in numbers],
            truncation="only_second",
            max_length=self.length,
            stride=self.stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_attention_mask=False,
        )
        sources, offsets = encoded.pop("overflow_to_sample_mapping"), encoded.pop("offset_mapping")
        for window, source in enumerate(sources):
            number = numbers[source]
            question, sides = self.questions[number], encoded.sequence_ids(window)
            if 1 not in sides:
                raise ValueError(f"question {question.id!r}: its context has no tokens; remove the question")
            first, end = sides.index(1), len(sides) - sides[::-1].index(1)
            inputs = {name: np.asarray(rows[window], dtype=np.int32) for name, rows in encoded.items()}
            places = np.asarray(offsets[window][first:end], dtype=np.int32)
            nowhere = int(np.argmax(inputs["input_ids"] == self.tokenizer.cls_token_id))
            self.inputs.append(inputs)
            self.question_of.append(number)
            self.context.append((first, end))
            self.offsets.append(places)
            self.answers.append(_tokens_of_answer(question, places, first) or (nowhere, nowhere))

    def _write(self, file: Path) -> None:
        """Write all windows one after the other, with the number of tokens of each."""
        names = self.inputs[0]
        arrays: dict[str, Any] = {
            "windows": np.array([(*where, *answer) for where, answer in zip(self.context, self.answers, strict=True)]),
            "question_of": np.array(self.question_of),
            "tokens": np.array([len(inputs["input_ids"]) for inputs in self.inputs]),
            "offsets": np.concatenate(self.offsets),
            **{f"input {name}": np.concatenate([inputs[name] for inputs in self.inputs]) for name in names},
        }

        def save(path: Path) -> None:
            with path.open("wb") as opened:  # savez would add to the name
                np.savez(opened, **arrays)

        write_whole(file, save)

    def _read(self, file: Path) -> None:
        with np.load(file) as arrays:
            self.question_of = arrays["question_of"].tolist()
            windows, tokens = arrays["windows"].tolist(), arrays["tokens"]
            self.context = [(first, end) for first, end, *_ in windows]
            self.answers = [(first, last) for *_, first, last in windows]
            self.offsets = _cut(arrays["offsets"], np.array([end - first for first, end in self.context]))
            names = [name.removeprefix("input ") for name in arrays if name.startswith("input ")]
            columns = [_cut(arrays[f"input {name}"], tokens) for name in names]
        self.inputs = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def _check_room(self, numbers: range, asked: Sequence[str]) -> None:
        """Raise if a question is so long that windows would not advance: the tokenizers library would abort."""
        special = self.tokenizer.num_special_tokens_to_add(pair=True)
        for number, ids in zip(numbers, self.tokenizer(asked, add_special_tokens=False)["input_ids"], strict=True):
            room = self.length - special - len(ids)
            if room <= self.stride:
                raise ValueError(
                    f"question {self.questions[number].id!r} has {len(ids)} tokens, which leaves {max(0, room)} of "
                    f"data.length = {self.length} for its context; expected more than data.stride = {self.stride}: "
                    "make data.length larger or data.stride smaller, or remove the question"
                )


def _cut(
    rows: Numbers,  # (all tokens, ...)
    lengths: npt.NDArray[np.int64],  # (windows,)
) -> list[Numbers]:
    ends = np.cumsum(lengths).tolist()
    return [rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _tokens_of_answer(
    question: Question,
    offsets: Numbers,  # (tokens of the paragraph, 2)
    first: int,
) -> tuple[int, int] | None:
    """Return first and last token of the question's first answer in a window; None if it is not all there."""
    answer = question.answers[0]
    begin, end = answer.start, answer.start + len(answer.text)
    if begin < offsets[0, 0] or end > offsets[-1, 1]:
        return None
    start = int(np.searchsorted(offsets[:, 1], begin, side="right"))
    last = int(np.searchsorted(offsets[:, 0], end, side="left")) - 1
    return (first + start, first + last) if start <= last else None
