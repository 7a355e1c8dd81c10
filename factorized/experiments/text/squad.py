"""Reading SQuAD v1.1: paragraphs with questions, whose answers are spans of the paragraph."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from factorized.experiments.text.hugging_face import DataSet
from factorized.experiments.text.text_files import open_text

LAYOUT = '{"data": [{"paragraphs": [{"context", "qas": [{"id", "question", "answers": [{"text", "answer_start"}]}]}]}]}'
COLUMNS = ("id", "context", "question", "answers")  # of a data set with a question in each row
KINDS = {str: "a text", int: "a whole number", list: "a list"}


@dataclass(frozen=True)
class Answer:
    """A span of a paragraph."""

    text: str
    start: int  # its first character in the paragraph


@dataclass(frozen=True)
class Question:
    """A question, with every answer that counts as right."""

    id: str
    text: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Paragraph:
    """A text and what is asked about it."""

    context: str
    questions: tuple[Question, ...]

    @property
    def texts(self) -> tuple[str, ...]:
        """The paragraph, then the questions."""
        return (self.context, *(question.text for question in self.questions))

    @property
    def strings(self) -> tuple[str, ...]:
        """Everything in it, for a checksum."""
        asked = [(q.id, q.text, *(f"{a.start} {a.text}" for a in q.answers)) for q in self.questions]
        return (self.context, *chain.from_iterable(asked))


def read_paragraphs(path: Path) -> Iterator[Paragraph]:
    """Yield the paragraphs of a SQuAD v1.1 file, compressed or not, after checking every answer against its place."""
    for article in _get(_parsed(path), "data", list, str(path)):
        for paragraph in _get(article, "paragraphs", list, str(path)):
            yield _paragraph(paragraph, str(path))


def paragraphs_of_rows(data: DataSet) -> Iterator[Paragraph]:
    """Yield the paragraphs of a data set with a question in each row, as the hub has SQuAD."""
    for _, rows in groupby(data.rows(), key=lambda row: row.get("context")):
        asked = [_as_in_files(row, data.address) for row in rows]
        yield _paragraph(asked[0] | {"qas": asked}, data.address)


def _as_in_files(row: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a row whose answers are a list of tables, where the hub has a table of lists."""
    if any(column not in row for column in COLUMNS):
        raise ValueError(f"{where}: expected the columns {', '.join(COLUMNS)}, got {', '.join(row)}")
    answers = row["answers"]
    if not isinstance(answers, dict):
        return row
    return row | {
        "answers": [dict(zip(answers, values, strict=True)) for values in zip(*answers.values(), strict=True)]
    }


def check_questions(paragraphs: Sequence[Paragraph], part: str) -> None:
    """Raise if a part has no questions, or two with the same id."""
    seen: set[str] = set()
    for paragraph in paragraphs:
        for question in paragraph.questions:
            if question.id in seen:
                raise ValueError(
                    f"question {question.id!r} is twice in the {part} data, here on {paragraph.context[:30]!r}…; every "
                    "question needs its own id: remove one of them"
                )
            seen.add(question.id)
    if not seen:
        raise ValueError(f"the {part} data holds no questions; expected {LAYOUT}")


def _parsed(path: Path) -> Any:
    try:
        with open_text(path) as file:
            return json.load(file)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}; expected {LAYOUT}") from None


def _paragraph(table: Any, where: str) -> Paragraph:
    context = _text(table, "context", where)
    asked = _get(table, "qas", list, f"{where}, the paragraph {context[:30]!r}…")
    return Paragraph(context, tuple(_question(question, context, where) for question in asked))


def _question(table: Any, context: str, where: str) -> Question:
    name = _text(table, "id", f"{where}, a question on {context[:30]!r}…")
    where = f"{where}, question {name!r}"
    answers = tuple(_answer(answer, context, where) for answer in _get(table, "answers", list, where))
    if not answers:
        raise ValueError(
            f"{where}: expected at least one answer, got none; this reads SQuAD v1.1, where every question has one: "
            "remove the question"
        )
    return Question(name, _text(table, "question", where), answers)


def _answer(table: Any, context: str, where: str) -> Answer:
    text, start = _text(table, "text", where), _get(table, "answer_start", int, where)
    there = context[start : start + len(text)] if start >= 0 else ""
    if there != text:
        raise ValueError(
            f"{where}: answer_start = {start} must be where {text!r} begins in its context of {len(context):,} "
            f"characters, got {there!r} there; correct it, or remove the question"
        )
    return Answer(text, start)


def _text(table: Any, name: str, where: str) -> str:
    text: str = _get(table, name, str, where)
    if not text.strip():
        raise ValueError(f"{where}: {name!r} is empty; expected a text")
    return text


def _get(table: Any, name: str, kind: type, where: str) -> Any:
    if not isinstance(table, dict) or name not in table:
        got = f"only {', '.join(map(repr, table)) or 'nothing'}" if isinstance(table, dict) else reprlib.repr(table)
        raise ValueError(f"{where}: {name!r} is missing, got {got}; expected {LAYOUT}")
    if type(table[name]) is not kind:
        raise ValueError(f"{where}: {name!r} must be {KINDS[kind]}, got {reprlib.repr(table[name])}; expected {LAYOUT}")
    return table[name]
