"""Figures as the cells of a table, and names made of text."""

from __future__ import annotations

import re

from factorized.experiments.reproduce.summary import Summary
from factorized.experiments.reproduce.table import Value


def mean_value(summary: Summary | None, tone: str = "") -> Value:
    """Return a mean with its deviation; empty where nothing was measured."""
    if summary is None:
        return Value("", (None, None))
    return Value(str(summary), (summary.mean, summary.deviation), tone=tone)


def count_value(summary: Summary | None) -> Value:
    """Return the n of a mean."""
    return whole_value(summary.n if summary is not None else 0)


def whole_value(number: int | None) -> Value:
    """Return a whole number."""
    return Value("" if number is None else f"{number:,}", (number,))


def signed_value(number: float | None, tone: str = "") -> Value:
    """Return a difference with its sign."""
    text = "" if number is None else f"{round(number, 2) + 0.0:+.2f}".replace("-", "−")  # never −0.00
    return Value(text, (number,), tone=tone)


def seconds_value(summary: Summary | None) -> Value:
    """Return the mean of some times; said in words where no run was timed."""
    if summary is None:
        return Value("not timed", (None,), tone="soft")
    return Value(f"{summary.mean:.1f}", (summary.mean,))


def short_commit(commit: str) -> str:
    """Return a commit with eight digits, and what follows them."""
    return re.sub(r"^([0-9a-f]{8})[0-9a-f]*", r"\1", commit)


def slug_of(text: str) -> str:
    """Return a name for files and anchors."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")
