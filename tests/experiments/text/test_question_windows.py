"""Windows of long paragraphs: what they share, where the answer is, and what it says."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from factorized.experiments.text.question_windows import QuestionWindows
from factorized.experiments.text.squad import Answer, Paragraph, Question, read_paragraphs
from tests.experiments.text.small_squad import small_corpus, write_squad

LENGTH, STRIDE = 40, 8


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return small_corpus(tmp_path_factory.mktemp("tokenizer")).tokenizer


@pytest.fixture(scope="module")
def paragraphs(tmp_path_factory: pytest.TempPathFactory) -> list[Paragraph]:
    folder = write_squad(tmp_path_factory.mktemp("squad"))
    return list(read_paragraphs(folder / "dev.json"))


@pytest.fixture(scope="module")
def windows(paragraphs: list[Paragraph], tokenizer: Any) -> QuestionWindows:
    return QuestionWindows(paragraphs, tokenizer, LENGTH, STRIDE)


def test_a_window_holds_the_question_then_a_part_of_the_paragraph(windows: QuestionWindows, tokenizer: Any) -> None:
    inputs, (first, end) = windows.inputs[0], windows.context[0]
    ids = inputs["input_ids"].tolist()
    assert (ids[0], ids[first - 1], ids[end]) == (tokenizer.cls_token_id, *[tokenizer.sep_token_id] * 2)
    assert tokenizer.decode(ids[1 : first - 1]) == windows.questions[0].text
    assert inputs["token_type_ids"].tolist() == [0] * first + [1] * (end + 1 - first)


def test_windows_are_full_share_the_stride_and_cover_the_paragraph(windows: QuestionWindows) -> None:
    long = len(windows.questions) - 1  # the last paragraph has eight sentences
    numbers = [number for number, question in enumerate(windows.question_of) if question == long]
    assert len(numbers) > 2
    assert all(len(windows.inputs[number]["input_ids"]) == LENGTH for number in numbers[:-1])
    assert len(windows.inputs[numbers[-1]]["input_ids"]) <= LENGTH
    for before, after in pairwise(numbers):
        assert windows.offsets[before][-STRIDE:].tolist() == windows.offsets[after][:STRIDE].tolist()
    assert windows.offsets[numbers[0]][0, 0] == 0
    assert windows.offsets[numbers[-1]][-1, 1] == len(windows.contexts[long])


def test_the_labels_say_the_answer_in_every_window_that_holds_it_and_point_at_cls_in_others(
    windows: QuestionWindows,
) -> None:
    held = set()
    for number, question in enumerate(windows.question_of):
        answer, offsets = windows.questions[question].answers[0], windows.offsets[number]
        inside = offsets[0, 0] <= answer.start and answer.start + len(answer.text) <= offsets[-1, 1]
        if inside:
            assert windows.text(number, *windows.answers[number]) == answer.text
            held.add(question)
        else:
            assert windows.answers[number] == (0, 0)
    assert held == set(range(len(windows.questions)))
    assert (0, 0) in windows.answers


@pytest.mark.parametrize(
    ("text", "start", "labelled"),
    [
        ("dark blue", 12, "dark blue"),
        ("blu", 17, "blue"),  # an answer inside a word becomes the word
        ("lue", 18, "blue"),
        (" dark ", 11, "dark"),  # blanks belong to no token
    ],
)
def test_an_answer_becomes_the_tokens_that_it_touches(tokenizer: Any, text: str, start: int, labelled: str) -> None:
    context = "The cat was dark blue."
    assert context[start : start + len(text)] == text
    question = Question("q", "What colour?", (Answer(text, start),))
    vocabulary = set(tokenizer.get_vocab())
    assert {"dark", "blue"} <= vocabulary
    windows = QuestionWindows([Paragraph(context, (question,))], tokenizer, LENGTH, STRIDE)
    assert windows.text(0, *windows.answers[0]) == labelled


def test_progress_is_reported(paragraphs: list[Paragraph], tokenizer: Any) -> None:
    told: list[tuple[str, int, int]] = []
    QuestionWindows(paragraphs, tokenizer, LENGTH, STRIDE, progress=lambda *how: told.append(how), stage="dev")
    assert told == [("dev", 11, 11)]


@pytest.mark.parametrize(
    ("question", "context", "message"),
    [
        ("cat " * 26, "The cat.", "question 'q' has 26 tokens, which leaves 11 of data.length = 40.*data.stride = 12"),
        ("cat " * 99, "The cat.", "question 'q' has 99 tokens, which leaves 0 of data.length = 40"),
        ("Who?", "\u0007", "question 'q': its context has no tokens"),
    ],
)
def test_a_question_that_cannot_be_cut_into_windows_is_named(
    tokenizer: Any, question: str, context: str, message: str
) -> None:
    asked = Paragraph(context, (Question("q", question, (Answer(context, 0),)),))
    with pytest.raises(ValueError, match=message):
        QuestionWindows([asked], tokenizer, LENGTH, 12)
