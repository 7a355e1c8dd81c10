from __future__ import annotations

import json
import re
import warnings
from html import escape
from html.parser import HTMLParser
from typing import Any

import pytest
from torch import nn

from factorized.formats.monarch import Monarch
from factorized.formats.product import LowRank, Overcomplete
from factorized.planning.parts import shown_parts
from factorized.planning.plan import Plan, PlanEntry
from factorized.planning.planner import plan
from factorized.planning.table import everything_else, plan_table, short_count
from tests.planning.models_for_planning import EXAMPLES, Attends, ConvNet, Mlp, ResNet32, TiedReader

LONG = "encoder_of_everything.a_rather_long_name_for_a_block.layers.11.feed_forward"


def awkward() -> nn.Module:
    """A model whose names need escaping or more room than there is, with tied layers and aliases."""
    model = TiedReader()
    model.blocks = nn.ModuleDict({"<b>&amp;": nn.Linear(32, 48), '"quoted"': nn.Linear(2, 2)})
    model.again = model.mix
    holder: nn.Module = model
    for part in LONG.split("."):
        holder.add_module(part, nn.Linear(40, 40) if part == "feed_forward" else nn.Module())
        holder = holder.get_submodule(part)
    return model


PLANS = {
    "convnet": plan(ConvNet(), ratio=0.4, example_input=EXAMPLES[ConvNet]),
    "mlp": plan(Mlp(), LowRank("channel"), energy=0.5),
    "attention": plan(Attends(), ratio=0.9, example_input=EXAMPLES[Attends]),
    "tied": plan(TiedReader(), ratio=0.5, example_input=EXAMPLES[TiedReader], keep_first_and_last=False),
    "awkward": plan(awkward(), rank=2, keep_first_and_last=False),
    "wide": plan(ResNet32(), Overcomplete("wide", width=2), example_input=EXAMPLES[ResNet32]),
    "deep": plan(ConvNet(), Overcomplete("deep")),
    "monarch": plan(ConvNet(), Monarch(), rank=1, example_input=EXAMPLES[ConvNet]),
    "itself": plan(nn.Linear(32, 32), rank=2, keep_first_and_last=False),
}
every_plan = pytest.mark.parametrize("made", PLANS.values(), ids=PLANS)


@every_plan
def test_a_plan_survives_json(made: Plan) -> None:
    assert Plan.from_dict(json.loads(json.dumps(made.to_dict()))) == made


@every_plan
def test_every_entry_has_either_a_rank_or_a_reason(made: Plan) -> None:
    assert all((entry.rank is None) != (entry.reason is None) for entry in made.entries)
    assert len(made.selected) + len(made.skipped) == len(made.entries)
    assert made.ratio == made.params_after / made.params


def test_an_entry_gives_the_format_it_was_planned_with() -> None:
    entry = PLANS["convnet"].entries[2]
    assert (entry.name, entry.shape, entry.format.shape.groups) == ("body.2", (32, 16, 5, 3), 2)
    assert (entry.format.shape.rows, entry.format.shape.columns) == (16 * 5, 16 * 3)
    assert entry.params_after == entry.format.numel


def test_a_plan_with_layers_without_entries_survives_a_round_trip() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it draws nothing
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)), nn.Linear(16, 0), nn.Linear(0, 4))
    made = plan(model, rank=2)
    assert Plan.from_dict(made.to_dict()) == made
    changed = made.to_dict()
    changed["entries"][1]["shape"] = [0, 16]
    with pytest.raises(ValueError, match=r"entry '1': rank must be in 1\.\.0 for a 0x16 weight"):
        Plan.from_dict(changed)


def broken(**changes: Any) -> dict[str, Any]:
    return {**PLANS["mlp"].to_dict(), **changes}


def test_the_page_of_a_model_that_grows_does_not_call_it_kept() -> None:
    page = plan(Mlp(), Overcomplete("wide")).to_html()
    assert "</i>factorized</th>" in page
    assert "</i>kept" not in page


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (broken(format=2), "plan format must be 1, got 2; make the plan again"),
        ({}, "plan format must be 1, got None"),
        ({"format": 1}, "not a plan made by Plan.to_dict(): 'entries'"),
        (
            {key: value for key, value in broken().items() if key != "params"},
            "not a plan made by Plan.to_dict(): 'para",
        ),
        (broken(entries=3), "not a plan made by Plan.to_dict(): "),
        (broken(entries=[3]), "not a plan made by Plan.to_dict(): "),
        (broken(entries=[{"name": "a"}]), "missing 2 required positional arguments: 'type' and 'shape'"),
        (broken(entries=[{"name": "a", "type": "b", "shape": [1], "size": 2}]), "unexpected keyword argument 'size'"),
        (broken(scheme=None), "not a plan made by Plan.to_dict(): "),
        (broken(scheme={"name": "sparse"}), "scheme name must be one of low_rank, overcomplete, tensor_train, tucker"),
        (broken(scheme={"name": "low_rank", "depth": 1}), "unexpected keyword argument 'depth'"),
        ([], "not a plan made by Plan.to_dict(): []"),
        (None, "not a plan made by Plan.to_dict(): None"),
    ],
)
def test_a_broken_dictionary_is_not_a_plan(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Plan.from_dict(data)


@every_plan
@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_fits_its_width_and_leaves_out_no_layer_or_reason(made: Plan, width: int) -> None:
    lines = plan_table(made, width).splitlines()
    assert max(map(len, lines)) <= width
    words = "".join(plan_table(made, width).split())
    for entry in made.entries:
        assert "".join((entry.name or "(model)").split()) in words
        assert "".join((entry.reason or "").split()) in words
        assert str(entry.rank or "") in words
        if entry.rank is not None and entry.tied_to is None:
            assert f"{short_count(entry.params)}->{short_count(entry.params_after)}" in words
    assert "".join(f"{made.ratio:.4f} of {made.params:,} parameters".split()) in words
    assert made.budget in words


def test_a_row_of_the_table_shows_what_changes() -> None:
    rows = plan_table(PLANS["convnet"], 120).splitlines()
    entry = PLANS["convnet"].entries[1]
    changes = f"4,608 -> {entry.params_after:,} +590k -> {short_count(entry.macs_after)}"
    assert re.fullmatch(rf"body\.0 +Conv2d +32x16x3x3 +{entry.rank} +{changes}", rows[3])
    assert re.match(r"layer +type +shape +rank +params +MACs", rows[0])
    assert "MACs" not in plan_table(PLANS["mlp"], 120).splitlines()[0]


@pytest.mark.parametrize(
    ("width", "headings"),
    [(72, "layer type shape rank params MACs"), (62, "layer shape rank params MACs"), (50, "layer shape rank params")],
)
def test_a_narrow_table_gives_up_whole_columns(width: int, headings: str) -> None:
    lines = plan_table(PLANS["convnet"], width).splitlines()
    assert lines[0].split() == headings.split()
    if "MACs" in headings:
        assert lines[3].endswith(short_count(PLANS["convnet"].entries[1].macs_after))


def test_a_tied_layer_of_the_table_says_with_what() -> None:
    lines = plan_table(PLANS["tied"], 80).splitlines()
    row = next(index for index, line in enumerate(lines) if line.startswith("output"))
    assert "shared" in lines[row]
    assert lines[row + 1].strip() == "tied to tokens"


def test_print_gives_the_table_in_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert str(PLANS["awkward"]) == plan_table(PLANS["awkward"], 60)
    monkeypatch.setenv("COLUMNS", "3")
    assert max(map(len, str(PLANS["awkward"]).splitlines())) <= 3


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (9_999, "9,999"),
        (10_000, "10k"),
        (36_864, "36.9k"),
        (999_400, "999k"),
        (999_900, "1000k"),
        (7_427_914, "7.43M"),
        (1_100_679_680, "1.1G"),
        (2.5e12, "2.5T"),
        (3.6e15, "3600T"),
    ],
)
def test_counts_are_short(count: int, text: str) -> None:
    assert short_count(count) == text


class Page(HTMLParser):
    """Checks that every tag is closed in order, and collects text per row and what the page would load."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[str] = []
        self.bars: list[list[float]] = []
        self.loads: list[str] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.loads += [value or "" for key, value in attributes if key in ("src", "href")]
        self.loads += [tag] if tag in ("script", "link", "img", "iframe", "object") else []
        if tag == "tr" and "class" in given:
            self.rows.append(f"{given['class']}: ")
            self.bars.append([])
        if "style" in given:
            self.bars[-1].append(float((given["style"] or "").removeprefix("width:").removesuffix("%")))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "tbody" in self.open and "tr" in self.open:
            self.rows[-1] += f"{data} "


@every_plan
def test_the_page_draws_every_layer_and_closes_every_tag(made: Plan) -> None:
    source = made.to_html()
    page = Page(source)
    assert page.open == []
    assert page.loads == []
    assert "url(" not in source
    assert "@import" not in source
    assert len(page.rows) == len(made.entries)
    for entry, row in zip(made.entries, page.rows, strict=True):
        assert escape(entry.name or "(model)") in source
        assert (entry.name or "(model)") in row
        assert "×".join(map(str, entry.shape)) in row
        assert row.startswith("dense: " if entry.rank is None else "factorized: ")
        assert (entry.reason or str(entry.rank)) in row
        assert all(alias in row for alias in entry.aliases)
        assert f"shares the factors of {entry.tied_to}" in row or entry.tied_to is None
    for figure in (made.model, made.budget, str(made.scheme), f"{made.ratio:.2%} of {made.params:,}"):
        assert escape(figure) in source
    assert ("MACs" in source.split("</style>")[1]) == (made.macs is not None)


@every_plan
def test_the_bars_of_the_page_are_in_proportion(made: Plan) -> None:
    longest = max(max(entry.params, entry.params_after) for entry in made.entries)
    for entry, bars in zip(made.entries, Page(made.to_html()).bars, strict=True):
        sizes = [entry.params, entry.params_after] if entry.rank is not None else [entry.params]
        assert bars == pytest.approx([100 * size / longest for size in sizes if size], abs=0.006)


@every_plan
def test_a_notebook_shows_the_plan_and_keeps_its_own_looks(made: Plan) -> None:
    source = made._repr_html_()
    page = Page(source)
    assert page.open == []
    assert page.loads == []
    assert len(page.rows) == len(made.entries)
    assert f"{made.ratio:.2%} of {made.params:,}" in source
    assert not re.search(r"<(html|body|head|title)\b", source)
    style = source.split("<style>")[1].split("</style>")[0].strip()
    depth, outside = 0, ""
    for character in style:
        depth += (character == "{") - (character == "}")
        outside += character if depth == 0 and character != "}" else ""
    assert outside.split() == [".factorized-plan"]  # every rule is inside that class


@every_plan
def test_pages_say_where_the_parameters_are(made: Plan) -> None:
    for source in (made.to_html(), made._repr_html_()):
        assert f'<td class="number" data-label="parameters">{short_count(everything_else(made))}</td></tr></tfoot>' in (
            source.replace("<td></td></tr></tfoot>", "</tr></tfoot>")
        )
        for part in made.parts:
            shown = f"<dt>{part.name.capitalize()}</dt><dd>{part.params / made.params:.1%}" in source
            assert shown == (part in shown_parts(made.parts))


def test_a_name_cannot_smuggle_markup_into_the_page() -> None:
    hostile = "<script>alert('x')</script>"
    entry = PlanEntry(hostile, hostile, (3, 3), reason=hostile, aliases=(hostile,), params=9, params_after=9)
    made = Plan(hostile, LowRank(), hostile, (entry,), 9, 9)
    assert made.to_html().count(escape(hostile)) == 7
    for page in (made.to_html(), made._repr_html_()):
        assert "<script" not in page
        assert Page(page).loads == []
