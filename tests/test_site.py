"""The site has a page for every document and every public name; `make docs` builds it and checks its links."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import factorized as fz
from tests.browser import Browser
from tests.notebooks import NOTEBOOKS

ROOT = Path(__file__).parents[1]


def load() -> ModuleType:
    spec = spec_from_file_location("site_pages", ROOT / "docs" / "site.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["site_pages"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SITE: Any = load()
NAV = re.findall(r"^ +- (?:[^:\n]*: )?([\w/]+\.(?:md|html))$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)


def test_every_document_is_in_the_navigation_once() -> None:
    written = {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")}
    made = {"index.md", "contributing.md", "changelog.md", "paper_tables.md", "report/report.html"}
    made |= {f"api/{stage}.md" for stage in SITE.STAGES} | {f"notebooks/{path.stem}.md" for path in NOTEBOOKS}
    assert sorted(NAV) == sorted(written | made)


def test_every_public_name_is_on_one_page_of_the_api() -> None:
    pages = "".join(SITE.api_page(stage).partition("## Base classes")[0] for stage in SITE.STAGES)
    shown = re.findall(r"^::: (\S+)\.(\w+)$", pages, flags=re.MULTILINE)
    names = {*fz.__all__, *dir(fz.integrations)} - {"__version__"}
    assert sorted(name for _, name in shown) == sorted(names)
    for module, name in shown:
        owner = fz.integrations if module.startswith("factorized.integrations") else fz
        assert getattr(owner, name).__module__ == module


def test_the_readme_becomes_the_first_page_with_its_links() -> None:
    links = "[a](docs/guide/index.md#x) [b](CONTRIBUTING.md) ![c](docs/f.svg) [Apache](LICENSE) [d](docs/n/e.ipynb)"
    page = SITE.from_the_root(links)
    assert page == "[a](guide/index.md#x) [b](contributing.md) ![c](f.svg) Apache [d](n/e.md)"


def test_a_notebook_becomes_a_page_with_what_it_printed() -> None:
    code = {"cell_type": "code", "source": ["print(1)\n", "x = 2"], "outputs": [{"text": ["1\n"]}]}
    page = SITE.notebook_page({"cells": [{"cell_type": "markdown", "source": ["# A"]}, code]})
    assert page == "# A\n\n```python\nprint(1)\nx = 2\n```\n\n```text\n1\n```\n"


def test_what_a_page_would_load_from_elsewhere_is_found() -> None:
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text())["theme"]["font"] is False
    html = '<a href="https://a"></a><script src="x.js"></script><img alt="" src="https://b/c.png">'
    assert SITE.elsewhere(html + '<link rel="stylesheet" href="https://d">') == ["https://b/c.png", "https://d"]


def test_lists_and_tables_follow_a_blank_line_without_which_the_site_shows_them_as_text() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md")]:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        assert re.findall(r"^(?![-#|<]|\d\. |  ).+\n(?:- |\d\. |\| ).*", text, flags=re.MULTILINE) == [], page


@pytest.mark.nightly
def test_the_site_is_built_without_a_warning_and_shown_without_a_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert built.returncode == 0, built.stderr
    with Browser(tmp_path / "profile") as browser:
        for page in NAV:
            browser.open(tmp_path / "site" / page.replace(".md", ".html"), width=390, dark=page.startswith("guide"))
            assert browser.errors == []
            assert {request.partition(":")[0] for request in browser.requests} <= {"file", "data"}
            assert browser.run("document.documentElement.scrollWidth") <= 390, f"{page} is wider than a phone"
        for dark, scheme in ((True, "slate"), (False, "default")):
            browser.open(tmp_path / "site" / "index.html", dark=dark)
            assert browser.run("document.body.dataset.mdColorScheme") == scheme
