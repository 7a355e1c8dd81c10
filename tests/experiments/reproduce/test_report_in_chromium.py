"""The page in a real headless Chromium: no errors, the numbers of the files, readable on a phone and in the dark."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from factorized.experiments.reproduce.report import write_report
from tests.browser import VARIABLE, Browser, find_chromium
from tests.experiments.reproduce.made import LAYER, image_result, text_result, write

ACCURACIES = {
    "cifar10/resnet32x2": (94.5, 94.25, 94.125),
    "cifar10/resnet32x2-lowrank-0.1": (93.0, 93.5, 93.125),
    "cifar10/resnet32x2-lowrank-0.1-si": (93.84,),
    "cifar10/resnet32x2-lowrank-0.1-fd": (80.0, 81.0),
    "digits/resnet8": (97.5,),
}
NUMBERS = """(slug, names) => [...document.getElementById(slug).tBodies[0].rows].map(row =>
    names.map(name => row.cells[[...document.getElementById(slug).tHead.rows[0].cells]
        .findIndex(head => head.textContent === name)].dataset.sort))"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of runs on images and text."""
    out = tmp_path_factory.mktemp("report")
    images = [
        image_result(name, seed, accuracy, layers=[LAYER, {**LAYER, "name": "layer2.0.conv1", "nuclear": 7.25}])
        for name, found in ACCURACIES.items()
        for seed, accuracy in enumerate(found)
    ]
    text = [text_result("translation/numbers", seed, "bleu", 30.0 + seed) for seed in (0, 1)]
    write_report([write(out / "runs", *images, *text)], out)
    return out


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One Chromium for all tests of this file."""
    with Browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture
def page(browser: Browser, folder: Path) -> Browser:
    """The page as a desktop shows it, freshly loaded."""
    browser.open(folder / "report.html")
    return browser


def test_nothing_is_loaded_and_nothing_is_wrong(page: Browser) -> None:
    assert page.errors == []
    assert [url.partition(":")[0] for url in page.requests if not url.startswith("data:")] == ["file"]


def test_the_numbers_on_the_page_are_those_of_the_runs(page: Browser, folder: Path) -> None:
    shown = page.run(f"({NUMBERS})('variants', ['variant', 'score', 'n'])")
    expected = {**ACCURACIES, "translation/numbers": (30.0, 31.0)}
    assert {name: (float(mean), int(n)) for name, mean, n in shown} == {
        name: (pytest.approx(math.fsum(found) / len(found)), len(found)) for name, found in expected.items()
    }
    each = page.run(f"({NUMBERS})('runs', ['recipe', 'seed', 'score'])")
    assert {(name, int(seed)): float(score) for name, seed, score in each} == {
        (name, seed): score for name, found in expected.items() for seed, score in enumerate(found)
    }
    layers = page.run(f"({NUMBERS})('layers-digits-resnet8', ['layer', 'rank', 'nuclear'])")
    assert layers == [["layer1.0.conv1", "4", "2.5"], ["layer2.0.conv1", "4", "7.25"]]
    link = page.run("document.querySelector('a[download=\"paper.csv\"]').href")
    text = page.run(f"fetch({link!r}).then(answer => answer.text())")
    assert text == (folder / "tables/paper.csv").read_text()
    paper = {row["recipe"]: row for row in csv.DictReader(io.StringIO(text))}
    assert float(paper["cifar10/resnet32x2-lowrank-0.1-si"]["in deviations"]) == 2.0
    verdicts = dict(page.run(f"({NUMBERS})('paper', ['cell', 'verdict'])"))
    assert verdicts["cifar10/resnet32x2-lowrank-0.1-fd"] == "off"
    assert verdicts["cifar10/resnet32x2-lowrank-0.1-si"] == "within"


def test_a_click_on_a_heading_sorts_and_another_one_turns_the_order(page: Browser) -> None:
    click = "[...document.querySelectorAll('#variants th button')].find(b => b.textContent === 'score').click()"
    scores = f"({NUMBERS})('variants', ['score']).map(([score]) => Number(score))"
    page.run(click)
    rising = page.run(scores)
    page.run(click)
    assert rising == sorted(rising)
    assert page.run(scores) == rising[::-1]
    assert page.run("document.querySelector('#variants th[aria-sort]').ariaSort") == "descending"


def test_words_filter_the_rows(page: Browser) -> None:
    page.run("""{ const input = document.querySelector('input[data-filter="variants"]');
        input.value = 'RESNET32x2 si'; input.dispatchEvent(new Event('input')) }""")
    shown = "[...document.querySelectorAll('#variants tbody tr')].filter(row => row.checkVisibility()).length"
    assert page.run(shown) == 1
    assert page.run("document.querySelector('[data-count=\"variants\"]').textContent") == "1 of 6 rows"


def test_series_are_toggled_and_the_second_half_is_shown(page: Browser) -> None:
    visible = (
        "[...document.querySelectorAll('[data-curves]')[0].querySelectorAll('.chart .series')]"
        ".filter(line => getComputedStyle(line).display !== 'none' && line.closest('svg').checkVisibility()).length"
    )
    first = page.run(visible)
    assert first == 2 * 4  # accuracy and loss of four variants
    page.run("document.querySelector('button[data-series]').click()")
    assert page.run(visible) == first - 2
    page.run("document.querySelector('button[data-all=\"false\"]').click()")
    assert page.run(visible) == 0
    page.run("document.querySelector('button[data-all=\"true\"]').click()")
    page.run("document.querySelector('button[data-part=\"end\"]').click()")
    assert page.run(visible) == first
    shown = "document.querySelector('[data-curves] div[data-part=\"end\"]').checkVisibility()"
    assert page.run(shown)


def test_curves_start_within_their_axes(page: Browser) -> None:
    outside = page.run("""[...document.querySelectorAll('.chart')].filter(chart => {
        const lines = [...chart.querySelectorAll('.grid')].map(line => line.getBoundingClientRect().y);
        const [top, bottom] = [Math.min(...lines) - 1, Math.max(...lines) + 1];
        return [...chart.querySelectorAll('polyline.curve')].some(line => {
            const box = line.getBBox(), place = line.getScreenCTM();
            return box.y * place.d + place.f < top || (box.y + box.height) * place.d + place.f > bottom;
        });
    }).length""")
    assert outside == 0


def test_runs_of_one_epoch_are_seen(browser: Browser, tmp_path: Path) -> None:
    run = image_result("digits/resnet8", 0, 47.0)
    write_report([write(tmp_path / "runs", {**run, "history": run["history"][:1]})], tmp_path)
    browser.open(tmp_path / "report.html")
    dots = "[...document.querySelectorAll('.chart .point')].map(point => getComputedStyle(point).fill)"
    assert browser.run(dots)
    assert "rgba(0, 0, 0, 0)" not in browser.run(dots)
    assert browser.run("document.querySelector('.facts dt').textContent") == "run"


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_shows_the_page_without_scrolling_sideways(browser: Browser, folder: Path, width: int) -> None:
    browser.open(folder / "report.html", width, 844)
    browser.run("document.querySelectorAll('details').forEach(part => { part.open = true })")
    assert browser.run("[document.documentElement.scrollWidth, document.body.scrollWidth]") == [width, width]
    assert (
        browser.run("document.querySelector('#paper').parentElement.scrollWidth") > width
    )  # the table has its own box
    assert browser.errors == []


def test_the_screen_is_not_blank_and_the_dark_one_is_dark(browser: Browser, folder: Path) -> None:
    light, dark = Image.new("L", (1, 1)), Image.new("L", (1, 1))
    for number, scheme in enumerate((False, True)):
        browser.open(folder / "report.html", dark=scheme)
        picture = Image.open(io.BytesIO(browser.screenshot())).convert("RGB")
        assert picture.size == (1280, 900)
        assert len(set(picture.resize((320, 225)).get_flattened_data())) > 50  # text, lines and dots in colour
        if number:
            dark = picture.convert("L")
        else:
            light = picture.convert("L")
    assert light.getpixel((2, 2)) > 200
    assert dark.getpixel((2, 2)) < 60


def test_a_chromium_that_is_named_has_to_be_there_else_the_remedy_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/nowhere/chromium")
    with pytest.raises(pytest.fail.Exception, match=r"/nowhere/chromium: apt-get install chromium"):
        find_chromium()
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium"):
        find_chromium()


def test_a_phone_shows_our_figures_without_scrolling_the_table(browser: Browser, folder: Path) -> None:
    browser.open(folder / "report.html", 400, 844)
    edges = "document.querySelectorAll('#paper thead th')[2].getBoundingClientRect().right"
    assert browser.run("document.querySelectorAll('#paper thead th')[2].textContent") == "ours"
    assert browser.run(edges) <= browser.run(
        "document.querySelector('#paper').parentElement.getBoundingClientRect().right"
    )
