"""The README is true: its tables are those of the results, its tree is that of the disk; test_docs.py runs its code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.tables import PAGES, TABLES, with_tables

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_tables_are_those_of_the_results() -> None:
    pages = [page.read_text() for page in PAGES]
    assert [with_tables(page) for page in pages] == pages
    assert sorted(re.findall("<!-- table:(.*?) -->", "".join(pages))) == sorted(TABLES)


def test_the_tree_in_the_readme_is_on_the_disk() -> None:
    tree = README.split("## The tree")[1]
    stages = re.findall(r"^      (\w+)/", tree, flags=re.MULTILINE)
    tops = re.findall(r"^    (\w+)/", tree, flags=re.MULTILINE)
    packages = sorted(path.parent.name for path in (ROOT / "factorized").glob("*/__init__.py"))
    assert sorted(stages) == packages
    assert all((ROOT / name).is_dir() for name in tops)


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]
)
def test_links_between_documents_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), f"{document} links to {target}"


@pytest.mark.parametrize(
    "room", sorted({p.parent.relative_to(ROOT) for p in ROOT.glob("factorized/*/**/*.py")}), ids=str
)
def test_the_tour_names_the_files_of_every_room_and_no_others(room: Path) -> None:
    tour = (ROOT / "docs/path.md").read_text()
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
