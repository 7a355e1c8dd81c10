"""Reading files of SQuAD v1.1, and saying what is wrong with them."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from factorized.experiments.text.squad import Answer, Question, check_questions, read_paragraphs
from tests.experiments.text.small_squad import paragraph, table


def written(folder: Path, content: Any, name: str = "some.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_a_file_is_read_as_paragraphs_with_questions_and_answers(tmp_path: Path) -> None:
    path = written(tmp_path, table(paragraph(0), paragraph(1)))
    first, second = read_paragraphs(path)
    assert first.context.startswith("In house 0, room 0, the cat was red.")
    assert first.questions[0] == Question("p0q0", "What colour was the cat of room 0?", (Answer("red", 32),))
    assert [question.id for question in second.questions] == ["p1q0", "p1q1", "p1q2"]


def test_a_compressed_file_says_the_same(tmp_path: Path) -> None:
    plain = written(tmp_path, table(paragraph(0)))
    packed = tmp_path / "some.json.xz"
    packed.write_bytes(lzma.compress(plain.read_bytes()))
    assert list(read_paragraphs(packed)) == list(read_paragraphs(plain))


def asked(**changes: Any) -> dict[str, Any]:
    """Return a file of one question, with ``changes``; None takes a field away."""
    question = {"id": "q7", "question": "Who?", "answers": [{"text": "cat", "answer_start": 4}]} | changes
    question = {name: value for name, value in question.items() if value is not None}
    return table({"context": "The cat was red.", "qas": [question]})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "some.json is not valid JSON"),
        ("[" * 100_000, "some.json is not valid JSON"),
        ([], r"some.json: 'data' is missing, got \[\]; expected {\"data\""),
        ({"rows": 1}, "some.json: 'data' is missing, got only 'rows'"),
        ({"data": {}}, "'data' must be a list, got {}"),
        ({"data": [{"title": "x"}]}, "'paragraphs' is missing, got only 'title'"),
        (table(), "the train data holds no questions; expected {"),
        (table({"context": "The cat.", "qas": []}), "the train data holds no questions"),
        (table({"qas": []}), "'context' is missing, got only 'qas'"),
        (table({"context": " ", "qas": []}), "'context' is empty"),
        (table({"context": "The cat."}), "the paragraph 'The cat.'….*'qas' is missing"),
        (asked(id=None), "a question on 'The cat was red.'….*'id' is missing"),
        (asked(id=7), "'id' must be a text, got 7"),
        (asked(question=None), "question 'q7': 'question' is missing"),
        (asked(question=""), "question 'q7': 'question' is empty"),
        (asked(answers=[]), "question 'q7': expected at least one answer, got none; this reads SQuAD v1.1"),
        (asked(answers={"text": ["cat"], "answer_start": [4]}), "question 'q7': 'answers' must be a list"),
        (asked(answers=["cat"]), "question 'q7': 'text' is missing, got 'cat'"),
        (asked(answers=[{"text": "cat"}]), "question 'q7': 'answer_start' is missing, got only 'text'"),
        (asked(answers=[{"text": "cat", "answer_start": "4"}]), "'answer_start' must be a whole number, got '4'"),
        (
            asked(answers=[{"text": "cat", "answer_start": 3}]),
            "question 'q7': answer_start = 3 must be where 'cat' begins in its context of 16 characters, got ' ca'",
        ),
        (asked(answers=[{"text": "cat", "answer_start": 99}]), "answer_start = 99 must be .* got '' there"),
        (asked(answers=[{"text": "d.", "answer_start": -2}]), "answer_start = -2 must be .* got '' there"),
        (
            table(paragraph(0), paragraph(0)),
            "question 'p0q0' is twice in the train data, .*; every question needs its own id",
        ),
    ],
)
def test_a_wrong_file_is_reported_with_the_question_and_what_is_expected(
    tmp_path: Path, content: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_questions(list(read_paragraphs(written(tmp_path, content))), "train")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cut.json.xz", lzma.compress(b"{}" * 1000)[:-40], "cut.json.xz is damaged or truncated"),
        ("not.json.xz", b"{}", "not.json.xz is damaged or truncated"),
        ("latin.json", '{"data": "é"}'.encode("latin-1"), "latin.json is not UTF-8 text"),
    ],
)
def test_a_damaged_file_is_reported(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_paragraphs(tmp_path / name))
