"""README and tour are true: tables and chart are of the results, the tree of the disk; test_docs.py runs the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import accuracy_chart
from benchmarks.drawing import checksum, drawn_from
from benchmarks.tables import PAGES, TABLES, with_tables

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TOUR = (ROOT / "docs/path.md").read_text()
PAGES_OF_ALL = ["README.md", "CONTRIBUTING.md", *(str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("docs/**/*.md")))]


def test_the_tables_are_those_of_the_results() -> None:
    pages = [page.read_text() for page in PAGES]
    assert [with_tables(page) for page in pages] == pages
    assert sorted(re.findall("<!-- table:(.*?) -->", "".join(pages))) == sorted(TABLES)


def test_the_chart_is_drawn_from_the_results() -> None:
    assert drawn_from(accuracy_chart.PATH) == checksum(accuracy_chart.panels())


def test_the_first_screen_of_the_readme_has_what_a_reader_needs() -> None:
    """Chart, both formulas, how to install, ten lines and where to go next come before anything longer."""
    order = [
        "accuracy.svg",
        "U = Ũ √Σ",
        "λ/2 ‖U Vᵀ‖²",
        "## Install",
        "make demo",
        "make test",
        "```python",
        "## Where to",
    ]
    order += ["## Speed", "@inproc"]
    places = [README.index(word) for word in order]
    assert places == sorted(places)
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line and "import" not in line]) <= 10
    assert len(README.splitlines()) < 120


def test_the_tree_in_the_tour_is_on_the_disk() -> None:
    tree = TOUR.split("## The tree")[1].split("## 1.")[0]
    stages = re.findall(r"^      (\w+)/", tree, flags=re.MULTILINE)
    tops = re.findall(r"^    (\w+)/", tree, flags=re.MULTILINE)
    packages = sorted(path.parent.name for path in (ROOT / "factorized").glob("*/__init__.py"))
    assert sorted(stages) == packages
    assert all((ROOT / name).is_dir() for name in tops)
    assert len(tops) > 4


def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", page, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", PAGES_OF_ALL)
def test_links_between_documents_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target, _, anchor in re.findall(r"\]\((?!http)([^)#]*)(#([^)]*))?\)", path.read_text()):
        page = path.parent / target if target else path
        assert page.exists(), f"{document} links to {target}"
        assert not anchor or anchor in anchors(page.read_text()), f"{document} links to {target}#{anchor}"


@pytest.mark.parametrize(
    "room", sorted({p.parent.relative_to(ROOT) for p in ROOT.glob("factorized/*/**/*.py")}), ids=str
)
def test_the_tour_names_the_files_of_every_room_and_no_others(room: Path) -> None:
    tour = TOUR
    assert f"`{room}/`" in tour
    rows = re.findall(
        r"^\| (`.*?) \|", tour.split(f"`{room}/`")[1].split("\n## ")[0].split("\n### ")[0], flags=re.MULTILINE
    )
    named = [name for row in rows for name in re.findall(r"`(\w+\.py)`", row)]
    assert sorted(named) == sorted(path.name for path in (ROOT / room).glob("*.py") if path.name != "__init__.py")


def test_the_tour_names_the_files_beside_the_rooms() -> None:
    tour = (ROOT / "docs/path.md").read_text().split("## Beside the path")[1]
    files = [path.name for path in (ROOT / "factorized").glob("*.py") if path.name != "__init__.py"]
    assert [name for name in files if f"`factorized/{name}`" not in tour] == []
