"""Exact match and F1 of SQuAD v1.1, as its official evaluation computes them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Return ``text`` in lower case, without ASCII punctuation, articles and extra whitespace.

    The order matters: punctuation goes before articles, and leaves no blank, so that "a-b" is one word "ab".
    """
    return " ".join(ARTICLES.sub(" ", text.lower().translate(WITHOUT_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """Return 1 if the prediction equals one of the answers after normalization, else 0."""
    found = normalize_answer(prediction)
    return float(any(found == normalize_answer(answer) for answer in answers))


def f1(prediction: str, answers: Sequence[str]) -> float:
    """Return the largest F1 of the prediction's words with those of an answer, in 0..1.

    Without a common word it is 0, also where nothing is left of both after normalization.
    """
    return max(
        _f1_of_words(normalize_answer(prediction).split(), normalize_answer(answer).split()) for answer in answers
    )


def _f1_of_words(found: Sequence[str], gold: Sequence[str]) -> float:
    common = (Counter(found) & Counter(gold)).total()
    return 2 * common / (len(found) + len(gold)) if common else 0.0


def score_answers(predictions: Mapping[str, str], answers: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Return ``exact_match`` and ``f1`` over all questions of ``answers``, in percent.

    Both map the id of a question: to the text that was predicted, and to all answers that count as right. A question
    without a prediction counts as wrong.
    """
    if not answers:
        raise ValueError("answers must hold at least one question, got none")
    for question, texts in answers.items():
        if isinstance(texts, str) or not texts:
            raise ValueError(f"answers[{question!r}] must be a list of at least one text, got {texts!r}")
    answered = [(predictions[question], texts) for question, texts in answers.items() if question in predictions]
    return {
        "exact_match": 100 * sum(exact_match(*pair) for pair in answered) / len(answers),
        "f1": 100 * sum(f1(*pair) for pair in answered) / len(answers),
    }
