"""Reading SQuAD v1.1: paragraphs with questions, whose answers are spans of the paragraph."""

from __future__ import annotations

import json
import lzma
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factorized.experiments.text.sources import open_text

LAYOUT = '{"data": [{"paragraphs": [{"context", "qas": [{"id", "question", "answers": [{"text", "answer_start"}]}]}]}]}'
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
    def strings(self) -> tuple[str, ...]:
        """All that it says, for a checksum."""
        asked = [(q.id, q.text, *(f"{a.start} {a.text}" for a in q.answers)) for q in self.questions]
        return (self.context, *(text for texts in asked for text in texts))


def read_paragraphs(paths: Sequence[Path]) -> Iterator[Paragraph]:
    """Yield the paragraphs of SQuAD v1.1 files, compressed or not, after checking every answer against its place."""
    seen: dict[str, Path] = {}
    for path in paths:
        before = len(seen)
        for article in _get(_parsed(path), "data", list, str(path)):
            for paragraph in _get(article, "paragraphs", list, str(path)):
                context = _text(paragraph, "context", str(path))
                where = f"{path}, the paragraph {context[:30]!r}…"
                questions = tuple(_question(asked, context, path) for asked in _get(paragraph, "qas", list, where))
                for question in questions:
                    if question.id in seen:
                        raise ValueError(
                            f"question {question.id!r} is in {path} although it is in {seen[question.id]} already; "
                            "every question needs an id of its own: remove one of them"
                        )
                    seen[question.id] = path
                yield Paragraph(context, questions)
        if len(seen) == before:
            raise ValueError(f"{path} holds no questions; expected {LAYOUT}")


def _parsed(path: Path) -> Any:
    try:
        with open_text(path) as file:
            return json.load(file)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}; expected {LAYOUT}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise ValueError(f"{path} is damaged or truncated: {error}; get it again") from None


def _question(table: Any, context: str, path: Path) -> Question:
    name = _text(table, "id", f"{path}, a question on {context[:30]!r}…")
    where = f"{path}, question {name!r}"
    answers = tuple(_answer(answer, context, where) for answer in _get(table, "answers", list, where))
    if not answers:
        raise ValueError(
            f"{where}: expected an answer at least, got none; this reads SQuAD v1.1, where every question has one: "
            "remove the question"
        )
    return Question(name, _text(table, "question", where), answers)


def _answer(table: Any, context: str, where: str) -> Answer:
    text, start = _text(table, "text", where), _get(table, "answer_start", int, where)
    there = context[start : start + len(text)] if start >= 0 else ""
    if there != text:
        raise ValueError(
            f"{where}: answer_start = {start} must be where {text!r} begins in its context of {len(context):,} "
            f"characters, got {there!r} there; mend the number, or remove the question"
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
