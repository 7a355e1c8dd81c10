"""The page of a report and the files of its tables."""

from __future__ import annotations

import csv
import io
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from factorized.experiments.reproduce.report import (
    Check,
    Heading,
    Report,
    make_report,
    report_page,
    report_tables,
    write_report,
)
from factorized.experiments.reproduce.runs import Found, read_runs
from factorized.experiments.training.folder import FAILURE
from tests.experiments.reproduce.made import LAYER, MACHINE, image_result, run_of, text_result, write

PLAIN, SI = "cifar10/resnet32x2-lowrank-0.1", "cifar10/resnet32x2-lowrank-0.1-si"


def digits() -> Report:
    names = {"digits/resnet8": 99.0, "digits/resnet8-lowrank-0.1": 96.0, "digits/resnet8-lowrank-0.1-si-fd": 98.0}
    made = [image_result(name, seed, mean + seed / 10) for name, mean in names.items() for seed in (0, 1)]
    return make_report(Found([run_of(result) for result in made]))


def read_csv(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


class Tags(HTMLParser):
    """The tags of a page, and those left open."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "link", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_loads_nothing_and_says_everything() -> None:
    checks = [Check("it is the same", 1e-7, 1e-5), Check("it is not", 1.0, 0.1)]
    page = report_page(digits(), Heading("A title", "A lead.", "factorized demo"), checks)
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert not {name for name, _ in tags.all} & {"img", "iframe", "object", "embed"}
    addresses = [a[key] or "" for _, a in tags.all for key in ("src", "href") if key in a]
    assert all(address.startswith(("data:", "#")) for address in addresses)
    inside = {a["id"] for _, a in tags.all if "id" in a}
    assert {address[1:] for address in addresses if address.startswith("#")} <= inside
    assert not re.search(r"https?://|@import|url\(", page)
    for words in ("A title", "A lead.", "factorized demo", "99.05 ± 0.07", "some &lt;GPU&gt;", "it is not"):
        assert words in page
    assert "at the end, the bound is 1.43 times the norm" in page  # 20 / 14
    assert page.count('class="ok"') == page.count('class="fail"') == 1
    identities = [a["id"] for _, a in tags.all if "id" in a]
    assert len(identities) == len(set(identities))


def test_runs_of_images_and_of_text_are_on_one_page() -> None:
    text = [text_result("translation/numbers", seed, "bleu", 30.0 + seed) for seed in (0, 1)]
    text += [text_result("bert/tiny", 0, "loss", 2.5)]
    report = make_report(Found([*digits().found.runs, *map(run_of, text)]))
    page = report_page(report, Heading())
    for words in ("30.50 ± 0.71", "BLEU", "2.50", "Validation loss", "translation on numbers", "resnet8 on digits"):
        assert words in page
    assert "Lower is better for loss and perplexity." in page


def test_write_report_writes_the_page_and_every_table_as_csv_and_markdown(tmp_path: Path) -> None:
    runs = write(tmp_path / "runs", *(image_result(SI, seed, 93.84 - seed, layers=[LAYER]) for seed in (0, 1)))
    report = write_report([runs], tmp_path / "report")
    assert (report.within, len(report.judged)) == (1, 1)
    page = (tmp_path / "report/report.html").read_text()
    files = {path.stem for path in (tmp_path / "report/tables").glob("*.csv")}
    grid = "table-1-resnet-32x2-on-cifar-10"
    assert files == {"paper", "variants", "runs", "machines", "data", "missing", f"layers-{SI.replace('/', '-')}", grid}
    assert files == {path.stem for path in (tmp_path / "report/tables").glob("*.md")}
    assert read_csv(tmp_path / "report/tables/data.csv")[0].keys() == {"data set", "runs", "checksum"}
    assert all(f'download="{name}.csv"' in page and f'id="{name}"' in page for name in files)
    for chart in ("Ours against the paper", "Differences in the paper's deviations", "Test accuracy, % of resnet32x2"):
        assert f'aria-label="{escape(chart)}' in page
    (row,) = read_csv(tmp_path / "report/tables/paper.csv")
    assert (row["recipe"], row["n"], row["paper"], row["paper deviation"]) == (SI, "2", "92.52", "0.66")
    assert float(row["ours"]) == 93.34
    assert row["verdict"] == "within"
    (layer,) = read_csv(tmp_path / f"report/tables/layers-{SI.replace('/', '-')}.csv")
    assert (layer["layer"], layer["rank"], layer["nuclear"], layer["of dense"]) == (
        "layer1.0.conv1",
        "4",
        "2.5",
        "0.16666666666666666",
    )
    (method,) = [r for r in read_csv(tmp_path / f"report/tables/{grid}.csv") if r["method"] == "Low-Rank (SI)"]
    assert (method["0.1 n"], method["0.1 paper"], method["0.05 n"], method["0.05 paper"]) == (
        "2",
        "92.52",
        "0",
        "91.72",
    )
    quoted = {r["method"]: r["quoted from"] for r in read_csv(tmp_path / f"report/tables/{grid}.csv")}
    assert (quoted["Pruning"], quoted["Low-Rank (SI)"]) == ("wang:20a", "")
    assert "quoted from wang:20a" in page
    assert "<small>n = 2, paper 92.52 ± 0.66</small>" in page
    assert "<small>paper 91.72 ± 0.63</small>" in page


def test_a_second_report_leaves_no_tables_of_the_first(tmp_path: Path) -> None:
    write_report([write(tmp_path / "a", image_result(SI, 0, 93.0))], tmp_path / "report")
    write_report([write(tmp_path / "b", image_result("digits/resnet8", 0, 97.0))], tmp_path / "report")
    assert not (tmp_path / "report/tables/paper.csv").exists()
    assert (tmp_path / "report/tables/variants.csv").exists()


def test_the_papers_variants_come_first_and_in_its_order_and_others_as_they_are_called(tmp_path: Path) -> None:
    names = ["digits/resnet8-lowrank-0.1", "digits/resnet8", "cifar100/resnet32x2", SI, PLAIN]
    found = read_runs([write(tmp_path, *(image_result(name, 0, 70.0) for name in names))])
    ordered = [PLAIN, SI, "cifar100/resnet32x2", "digits/resnet8", "digits/resnet8-lowrank-0.1"]
    assert [variant.name for variant in make_report(found).variants] == ordered


def test_mixed_versions_are_shown_as_such() -> None:
    newer = image_result(PLAIN, 1, 93.5, machine={**MACHINE, "torch": "2.11.0", "factorized": "0.2.0"})
    page = report_page(make_report(Found([run_of(image_result(PLAIN, 0, 93.6)), run_of(newer)])), Heading())
    assert "These runs are of mixed versions of factorized: 0.1.0, 0.2.0." in page
    assert "These runs are of mixed versions of torch: 2.11.0, 2.13.0." in page
    assert '<span class="chip">mixed versions</span>' in page
    alike = report_page(digits(), Heading())
    assert "mixed " not in alike


@pytest.mark.parametrize(
    ("other", "chip", "notice"),
    [
        ({"commit": "b" * 40}, "mixed versions", "The runs are of 2 commits; rows that mix them are marked."),
        ({"cuda": "13.0"}, "mixed versions", ""),
        ({"python": "3.14.0"}, "mixed versions", ""),
        ({"device": "another"}, "mixed hardware", ""),
        ({"processes": 2}, "mixed hardware", ""),
    ],
)
def test_rows_of_several_commits_or_machines_are_marked(other: dict[str, object], chip: str, notice: str) -> None:
    runs = [image_result(PLAIN, 0, 93.6), image_result(PLAIN, 1, 93.5, machine={**MACHINE, **other})]
    page = report_page(make_report(Found([run_of(result) for result in runs])), Heading())
    assert set(re.findall(r'<span class="chip">(mixed \w+)</span>', page)) == {chip}
    assert notice in page


def test_shortened_runs_are_marked_in_every_table_and_chart(tmp_path: Path) -> None:
    runs = write(tmp_path / "runs", image_result(SI, 0, 40.0, "schedule.epochs=2", layers=[LAYER]))
    report = write_report([runs], tmp_path / "out")
    assert report.judged == []
    for name in ("paper", "variants", "runs", "table-1-resnet-32x2-on-cifar-10"):
        for kind in ("csv", "md"):
            assert "shortened" in (tmp_path / f"out/tables/{name}.{kind}").read_text(), (name, kind)
    page = (tmp_path / "out/report.html").read_text()
    assert "1 variant is shortened" in page
    marked = f"{SI} (shortened: 2 of 200 epochs)"
    assert f'data-series="{marked.rpartition("/")[2]}"' in page  # a curve and its place in the legend
    assert f"<h4>{marked}</h4>" in page  # the norms of its products
    assert f"<summary>{marked}</summary>" in page  # its layers


@pytest.mark.parametrize(("ahead", "marked"), [(0.5, True), (0.1, False)])
def test_a_cell_of_the_papers_tables_is_best_of_its_size_where_it_is_ahead_by_more_than_the_deviations(
    tmp_path: Path, ahead: float, marked: bool
) -> None:
    plain = [image_result(PLAIN, seed, 93.0 + seed / 5) for seed in (0, 1)]
    spectral = [image_result(SI, seed, 93.0 + ahead + seed / 5) for seed in (0, 1)]
    write_report([write(tmp_path / "runs", *plain, *spectral)], tmp_path / "out")
    rows = (tmp_path / "out/tables/table-1-resnet-32x2-on-cifar-10.md").read_text().splitlines()
    (row,) = [row for row in rows if row.startswith("| Low-Rank (SI) |")]
    assert ("best of its size" in row) == marked
    assert not any("best" in other for other in rows if other is not row and other.startswith("| Low"))


def test_what_failed_and_what_was_left_out_is_on_the_page(tmp_path: Path) -> None:
    runs = write(tmp_path / "runs", image_result(SI, 0, 93.0))
    (runs / SI / "seed-1").mkdir()
    (runs / SI / "seed-1" / FAILURE).write_text('{"error": "the training loss is nan"}')
    (runs / "half.json").write_text('{"recipe"')
    report = write_report([runs], tmp_path / "out")
    page = (tmp_path / "out/report.html").read_text()
    assert report.failed == 1
    for words in ("the training loss is nan", "half.json", "not valid JSON", "1 run failed", "1 file is left out"):
        assert words in page
    assert (runs / "half.json").read_text() == '{"recipe"'


def test_a_place_without_results_is_an_error_that_names_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"there is no result of a run in .*other.json: not the result of a run"):
        write_report([tmp_path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    runs = write(tmp_path / "runs", image_result(SI, 0, 93.0))
    (tmp_path / "out").write_text("a file")
    with pytest.raises(ValueError, match=r"cannot write to .*out.*choose another folder by --out"):
        write_report([runs], tmp_path / "out")


def test_names_of_recipes_are_text_and_not_markup(tmp_path: Path) -> None:
    result = image_result("digits/resnet8", 0, 97.0)
    result["recipe"]["name"] = "<script>alert(1)</script>"
    page = report_page(make_report(Found([run_of(result)])), Heading())
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_variants_that_are_called_alike_have_labels_and_files_of_their_own(tmp_path: Path) -> None:
    names = {"mine a": 0.1, "mine-a": 0.2}
    made = [image_result("digits/resnet8", 0, 90.0, f"optimizer.lr={lr}", layers=[LAYER]) for lr in names.values()]
    for result, name in zip(made, names, strict=True):
        result["recipe"]["name"] = name
    labels = dict.fromkeys(names, "one label")
    write_report([write(tmp_path / "runs", *made)], tmp_path / "out", labels=labels)
    page = (tmp_path / "out/report.html").read_text()
    assert 'data-series="one label"' in page
    assert 'data-series="one label #2"' in page
    write_report([tmp_path / "runs"], tmp_path / "out")
    files = sorted(path.name for path in (tmp_path / "out/tables").glob("layers*.csv"))
    assert files == ["layers-mine-a--2.csv", "layers-mine-a.csv"]


def test_changed_settings_are_reported_once() -> None:
    changed = run_of(image_result("digits/resnet8", 0, 97.0, "optimizer.lr=0.05"))
    alone = report_page(make_report(Found([changed])), Heading())
    assert "<small>changed: optimizer.lr = 0.05</small>" in alone
    beside = report_page(make_report(Found([run_of(image_result("digits/resnet8", 0, 98.0)), changed])), Heading())
    assert "digits/resnet8 (optimizer.lr=0.05)" in beside
    assert "changed: optimizer.lr" not in beside


def test_a_check_that_measured_no_number_fails() -> None:
    assert not Check("", float("nan"), 1.0).passed


def test_a_check_has_plain_numbers() -> None:
    assert Check("", 0.0, 0.05).figures == "0 (allowed 0.05)"
    assert Check("", 0.09954, 0.1).figures == "0.0995 (allowed 0.1)"
    assert Check("", 2.61e-7, 1e-4).figures == "2.61e-07 (allowed 0.0001)"


def test_columns_that_say_nothing_are_left_out() -> None:
    plain = image_result("digits/resnet8", 0, 97.0)
    noted = image_result("digits/resnet8-wide-fd", 0, 98.0, composed={"parameters": 4000}, note="shared a GPU")
    for results, expected in (([plain], set()), ([plain, noted], {"note", "deployed"})):
        tables = report_tables(make_report(Found([run_of(result) for result in results])))
        names = {column.name for table in (tables.runs, tables.variants) for column in table.columns}
        assert names & {"note", "deployed"} == expected
    assert "shared a GPU" in tables.runs.to_csv()
