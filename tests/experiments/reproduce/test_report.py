"""Summaries, marks and the page."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from factorized.experiments.recipes.find import load_recipe
from factorized.experiments.reproduce.report import Check, report_page
from factorized.experiments.reproduce.summary import Summary
from factorized.experiments.reproduce.variant import Variant, mark_best


def result(name: str, seed: int, accuracy: float, **row: float) -> dict[str, Any]:
    history = [
        {"epoch": epoch + 1, "loss": 1 / (epoch + 1), "test_accuracy": accuracy - 5 + 5 * epoch, **row}
        for epoch in (0, 1)
    ]
    return {
        "recipe": load_recipe(name).to_dict(),
        "seed": seed,
        "accuracy": accuracy,
        "parameters": 7466,
        "seconds": 4.0,
        "machine": {"device": "some <CPU>", "torch": "2.13", "commit": None},
        "data": {"name": "digits", "checksum": "abc", "classes": list("0123456789"), "channels": 1, "size": [8, 8]},
        "history": history,
    }


def variants() -> list[Variant]:
    products = {"nuclear": 10.0, "nuclear_bound": 12.5}
    return [
        Variant("dense", [result("digits/resnet8", seed, 99 + seed / 10) for seed in (0, 1)], 75002),
        Variant("plain", [result("digits/resnet8-lowrank-0.1", seed, 96, **products) for seed in (0, 1)], 7466),
        Variant("SI & FD", [result("digits/resnet8-lowrank-0.1-si-fd", s, 98, **products) for s in (0, 1)], 7466),
    ]


@pytest.mark.parametrize(
    ("values", "text"), [([94.0], "94.00"), ([94.0, 95.0], "94.50 ± 0.71"), ([1.0, 1.0, 1.0], "1.00 ± 0.00")]
)
def test_a_summary_is_mean_and_sample_deviation(values: list[float], text: str) -> None:
    summary = Summary.of(values)
    assert str(summary) == text
    assert summary.n == len(values)


def test_the_best_of_all_and_of_the_low_rank_ones_are_marked() -> None:
    assert [variant.marks for variant in mark_best(variants())] == [("best",), (), ("best low-rank",)]
    assert [variant.marks for variant in mark_best(variants()[1:])] == [(), ("best", "best low-rank")]
    assert [variant.marks for variant in mark_best(variants()[:1])] == [("best",)]


def test_colour_tells_the_decay_and_a_broken_line_the_initialization() -> None:
    assert [variant.style for variant in variants()] == ["dense", "weight broken", "frobenius"]


def test_curves_are_means_between_the_least_and_the_greatest() -> None:
    curve = variants()[0].curve("test_accuracy")
    assert curve is not None
    assert curve.points[1] == (2, pytest.approx(99.05))
    assert curve.band[1] == (2, 99, pytest.approx(99.1))
    assert variants()[0].curve("nuclear") is None


class Tags(HTMLParser):
    """The tags of a page, and those left open."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_loads_nothing_and_says_everything() -> None:
    checks = [Check("it is the same", 1e-7, 1e-5), Check("it is not", 1.0, 0.1)]
    page = report_page("A title", "A lead.", "factorized demo", mark_best(variants()), checks)
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    names = {name for name, _ in tags.all}
    assert not names & {"script", "link", "img", "iframe"}
    assert not any("src" in attributes or "href" in attributes for _, attributes in tags.all)
    assert not re.search(r"https?://|@import|url\((?!#)", page)
    assert "prefers-color-scheme: dark" in page
    assert "99.05 ± 0.07" in page
    assert "n = 2 seeds (0, 1)" in page
    assert page.count("<figure>") == 2 + 2  # curves, and a panel for each factorized variant
    assert "at the end, the bound is 1.25 times the norm" in page
    assert "some &lt;CPU&gt;" in page
    assert "commit" not in page
    assert page.count('"ok"') == page.count('"fail"') == 1
    identities = [attributes["id"] for _, attributes in tags.all if "id" in attributes]
    assert len(identities) == len(set(identities))


def test_the_paper_has_a_column_where_a_recipe_aims_at_it() -> None:
    aimed = [Variant("dense", [result("cifar10/resnet32x2", 0, 94.0)], 75002)]
    assert '<td class="number" data-label="paper">94.49</td>' in report_page("t", "l", "c", aimed)
    assert 'data-label="paper"' not in report_page("t", "l", "c", variants())


def test_a_check_that_measured_no_number_fails() -> None:
    assert not Check("", float("nan"), 1.0).passed


def test_a_check_is_told_in_plain_numbers() -> None:
    assert Check("", 0.0, 0.05).figures == "0 (allowed 0.05)"
    assert Check("", 0.09954, 0.1).figures == "0.0995 (allowed 0.1)"
    assert Check("", 2.61e-7, 1e-4).figures == "2.61e-07 (allowed 0.0001)"
    assert Check("it", 0.0, 0.05).figures in report_page("t", "l", "c", variants(), [Check("it", 0.0, 0.05)])
