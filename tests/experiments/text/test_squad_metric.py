"""SQuAD's metric: its normalization, exact match and F1, on cases worked out by hand, published ones, and a peer's."""

from __future__ import annotations

import random

import pytest
from torchmetrics.functional.text import squad

from factorized.experiments.text.squad_metric import exact_match, f1, normalize_answer, score_answers


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("the Cat", "cat"),
        ("cat.", "cat"),
        ("  An   apple,\tthe\npear ", "apple pear"),
        ("Another theme", "another theme"),  # articles are whole words
        ("well-known", "wellknown"),  # punctuation leaves no blank
        ("a-b", "ab"),  # and goes before articles do
        ("U.S.A.", "usa"),
        ("the.", ""),
        ("“cat”", "“cat”"),  # punctuation is that of ASCII
        ("24–10", "24–10"),
        ("Beyoncé", "beyoncé"),
        ("", ""),
    ],
)
def test_an_answer_is_normalized_as_officially(text: str, normal: str) -> None:
    assert normalize_answer(text) == normal


@pytest.mark.parametrize(
    ("prediction", "answers", "exact", "overlap"),
    [
        ("the Cat", ["cat."], 1.0, 1.0),
        ("a black cat", ["the cat"], 0.0, 2 / 3),  # one word of two is right, and the only one is found
        ("cat", ["black cat", "dog"], 0.0, 2 / 3),
        ("cat", ["dog", "the cat", "black cat"], 1.0, 1.0),  # the best of several answers counts
        ("cat cat dog", ["cat dog dog"], 0.0, 2 / 3),  # a word counts as often as both have it
        ("dog cat", ["cat dog"], 0.0, 1.0),  # F1 does not see the order
        ("", ["cat"], 0.0, 0.0),
        ("the", ["cat"], 0.0, 0.0),
        ("the", ["a"], 1.0, 0.0),  # nothing is left of both: they match, and share no word
        ("Denver Broncos", ["Denver Broncos", "Denver Broncos", "The Denver Broncos"], 1.0, 1.0),
        ("Santa Clara", ["Santa Clara, California", "Levi's Stadium"], 0.0, 0.8),
    ],
)
def test_a_prediction_is_compared_with_every_answer(
    prediction: str, answers: list[str], exact: float, overlap: float
) -> None:
    assert exact_match(prediction, answers) == exact
    assert f1(prediction, answers) == pytest.approx(overlap)


@pytest.mark.parametrize(
    ("asked", "score"),
    [
        ({"56e10a3be3433e1400422b22": ("1976", ["1976"])}, 100.0),
        ({"56e10a3be3433e1400422b22": ("1999", ["1976"])}, 0.0),
        (
            {
                "56e10a3be3433e1400422b22": ("1976", ["1976"]),
                "56d2051ce7d4791d0090260b": ("Beyonce", ["Beyoncé and Bruno Mars"]),
                "5733b5344776f419006610e1": ("climate change", ["climate change"]),
            },
            200 / 3,
        ),
    ],
)
def test_the_examples_of_the_metrics_card_score_as_published(
    asked: dict[str, tuple[str, list[str]]], score: float
) -> None:
    predictions = {question: prediction for question, (prediction, _) in asked.items()}
    answers = {question: texts for question, (_, texts) in asked.items()}
    assert score_answers(predictions, answers) == {"exact_match": pytest.approx(score), "f1": pytest.approx(score)}


def test_scores_are_those_of_torchmetrics() -> None:
    draws = random.Random(0)
    words = ("cat", "Cat,", "the", "a", "dog", "U.S.", "well-known", "24–10", "“an”", "  ", "dog's", "Dogs")

    def text() -> str:
        return " ".join([*draws.choices(words, k=draws.randrange(5)), "end"])  # of empty texts, it follows SQuAD 2.0

    asked = {str(number): (text(), [text() for _ in range(draws.randrange(1, 4))]) for number in range(300)}
    theirs = squad(
        [{"id": question, "prediction_text": prediction} for question, (prediction, _) in asked.items()],
        [{"id": q, "answers": {"text": texts, "answer_start": [0] * len(texts)}} for q, (_, texts) in asked.items()],
    )
    ours = score_answers({q: prediction for q, (prediction, _) in asked.items()}, {q: t for q, (_, t) in asked.items()})
    assert 0 < ours["exact_match"] < ours["f1"] < 100
    assert ours == {name: pytest.approx(value.item(), rel=1e-5) for name, value in theirs.items()}


def test_a_question_without_a_prediction_counts_as_wrong() -> None:
    found = score_answers({"1": "cat", "unknown": "dog"}, {"1": ["the cat"], "2": ["dog"]})
    assert found == {"exact_match": 50.0, "f1": 50.0}


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({}, "at least one question, got none"),
        ({"q7": []}, r"answers\['q7'\] must be a list of at least one text, got \[\]"),
        ({"q7": "cat"}, r"answers\['q7'\] must be a list of at least one text, got 'cat'"),
    ],
)
def test_wrong_answers_are_named(answers: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score_answers({}, answers)
