"""A report about runs: one self-contained page beside the paper's figures, and its tables as files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from factorized.experiments.data.explain import writing_to
from factorized.experiments.recipes.find import paper_cells
from factorized.experiments.reproduce.compare import BAND, Comparison, chance_within, compare
from factorized.experiments.reproduce.figures import curve_groups, paper_panels, product_panels
from factorized.experiments.reproduce.paper_tables import grid_tables, missing_table, paper_table
from factorized.experiments.reproduce.runs import Found, Run, read_runs
from factorized.experiments.reproduce.table import Table
from factorized.experiments.reproduce.tables import (
    data_table,
    failed_table,
    layer_tables,
    machine_table,
    run_table,
    variant_table,
)
from factorized.experiments.reproduce.variant import Variant, group_runs, mark_best
from factorized.files.atomic import write_text

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATES = Path(__file__).parent / "templates"
PAGE, TABLES = "report.html", "tables"


@dataclass(frozen=True)
class Check:
    """A condition that must hold, with what was measured."""

    what: str
    measured: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether it holds; NaN does not."""
        return self.measured <= self.allowed

    @property
    def figures(self) -> str:
        """What was measured, beside what is allowed."""
        return f"{self.measured:.3g} (allowed {self.allowed:g})"


@dataclass(frozen=True)
class Heading:
    """The title, lead and command at the top of a report."""

    title: str = ""  # one that fits, unless given
    lead: str = ""
    command: str = "factorized report"


@dataclass(frozen=True)
class Report:
    """The content of a report, before it is written as a page."""

    found: Found
    variants: Sequence[Variant]  # the best marked
    comparisons: Sequence[Comparison]  # with the paper's tables that some of them aim at

    @property
    def judged(self) -> list[Comparison]:
        """The comparisons that were judged: whole runs beside a figure with a deviation."""
        return [comparison for comparison in self.comparisons if comparison.judged]

    @property
    def within(self) -> int:
        """How many of them are within the band."""
        return sum(comparison.verdict == "within" for comparison in self.judged)

    @property
    def expected_within(self) -> float:
        """How many would be within it on average if ours and the paper's runs differed by their seeds alone."""
        return sum(chance_within(BAND, found.ours.n) for found in self.judged if found.ours is not None)

    @property
    def failed(self) -> int:
        """How many runs ended in an error."""
        return sum(run.error is not None for run in self.found.unfinished)


@dataclass(frozen=True)
class Tables:
    """The tables of a report; those that have no rows are not shown."""

    paper: Table
    grids: Sequence[Table]
    variants: Table
    runs: Table
    layers: Sequence[Table]
    machines: Table
    data: Table
    missing: Table
    failed: Table

    def filled(self) -> list[Table]:
        """Return those with rows."""
        single = (self.paper, self.variants, self.runs, self.machines, self.data, self.missing, self.failed)
        return [table for table in (*single, *self.grids, *self.layers) if table.rows]


def write_report(
    results: Sequence[Path],
    out: Path,
    *,
    heading: Heading | None = None,
    labels: Mapping[str, str] | None = None,
    checks: Sequence[Check] = (),
) -> Report:
    """Write ``out/report.html`` of the runs in these files and folders, and its tables under ``out/tables``.

    ``labels`` are shown in place of the names of recipes. Tables of an earlier report in ``out`` are removed.
    """
    report = make_report(read_runs(results), labels)
    if not report.variants:
        told = "; ".join(f"{file.path}: {file.why}" for file in report.found.left_out[:3])
        where = ", ".join(map(str, results))
        raise ValueError(f"there is no result of a run in {where}{f' ({told})' if told else ''}; train one first")
    tables = report_tables(report)
    page = report_page(report, heading or Heading(), checks, tables)
    with writing_to(out, "choose another folder by --out"):
        (out / TABLES).mkdir(parents=True, exist_ok=True)
        for kind in ("csv", "md"):
            for old in (out / TABLES).glob(f"*.{kind}"):
                old.unlink()
        for table in tables.filled():
            write_text(out / TABLES / f"{table.slug}.csv", table.to_csv())
            write_text(out / TABLES / f"{table.slug}.md", table.to_markdown())
        write_text(out / PAGE, page)
    return report


def make_report(found: Found, labels: Mapping[str, str] | None = None) -> Report:
    """Return the runs as variants, the best marked, beside the paper."""
    order = {cell.recipe: place for place, cell in enumerate(paper_cells()) if cell.table is not None and cell.recipe}
    variants = mark_best(group_runs(found.runs, labels))
    variants.sort(key=lambda variant: order.get(variant.name, math.inf))  # others stay as they were given
    return Report(found, variants, compare(variants))


def report_tables(report: Report) -> Tables:
    """Return every table of the page."""
    return Tables(
        paper=paper_table(report.comparisons),
        grids=grid_tables(report.comparisons),
        variants=variant_table(report.variants),
        runs=run_table(report.variants),
        layers=layer_tables(report.variants),
        machines=machine_table(report.found.runs),
        data=data_table(report.found.runs),
        missing=missing_table(report.comparisons),
        failed=failed_table(report.found),
    )


def report_page(report: Report, heading: Heading, checks: Sequence[Check] = (), tables: Tables | None = None) -> str:
    """Return the page; the report holds at least one run."""
    return page_template("report.html").render(
        title=heading.title or ("Runs beside the paper" if report.comparisons else "Training runs"),
        heading=heading,
        report=report,
        tables=tables or report_tables(report),
        notices=_notices(report),
        scatter=paper_panels(report.comparisons),
        curves=curve_groups(report.variants),
        products=product_panels(report.variants),
        checks=checks,
    )


def page_template(name: str, *folders: Path) -> Template:
    """Return the template of a page, which may use others in ``folders`` and those of reports."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader([*folders, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template(name)


def _notices(report: Report) -> list[str]:
    """Return notices for the top of the page."""
    runs, found = report.found.runs, report.found
    told = []
    for name in ("factorized", "torch"):
        versions = _versions(runs, name)
        if len(versions) > 1:
            told.append(f"These runs are of mixed versions of {name}: {', '.join(versions)}.")
    commits = _versions(runs, "commit")
    if len(commits) > 1:
        told.append(f"The runs are of {len(commits)} commits; rows that mix them are marked.")
    shortened = sum(bool(variant.shortened) for variant in report.variants)
    if shortened:
        told.append(f"{_are(shortened, 'variant')} shortened: trained for less than the recipe says, and not judged.")
    if report.failed:
        told.append(f"{report.failed} run{'' if report.failed == 1 else 's'} failed; see the end of the page.")
    if found.left_out:
        told.append(f"{_are(len(found.left_out), 'file')} left out; see the end of the page.")
    return told


def _versions(runs: Sequence[Run], name: str) -> list[str]:
    return sorted({str(run.result["machine"].get(name) or "unknown") for run in runs})


def _are(number: int, thing: str) -> str:
    return f"{number} {thing}{' is' if number == 1 else 's are'}"
