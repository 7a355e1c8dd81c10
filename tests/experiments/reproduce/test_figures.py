"""The charts of a report: what is drawn where."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from factorized.experiments.reproduce.compare import compare
from factorized.experiments.reproduce.figures import curve_groups, paper_panels, product_panels
from factorized.experiments.reproduce.variant import group_runs
from tests.experiments.reproduce.made import image_result, run_of

SI = "cifar10/resnet32x2-lowrank-0.1-si"  # 92.52 ± 0.66 in table 1
WIDE = "cifar10/wrn28-10-lowrank-0.06667-fd-si"  # an error of 3.86 ± 0.22 in table 2


def charts(name: str, accuracy: float) -> list[ET.Element]:
    """Return the scatter and the strip of one run."""
    panels = paper_panels(compare(group_runs([run_of(image_result(name, 0, accuracy))])))
    return [ET.fromstring(panel.svg) for panel in panels]


def place(element: ET.Element, key: str) -> float:
    return float(element.get(key) or "nan")


@pytest.mark.parametrize(
    ("name", "accuracy", "end"),
    [(SI, 93.84, "y1"), (SI, 91.2, "y2"), (WIDE, 96.58, "y1"), (WIDE, 95.7, "y2")],
)
def test_a_figure_two_deviations_off_is_at_the_end_of_its_range_and_of_the_band(
    name: str, accuracy: float, end: str
) -> None:
    scatter, strip = charts(name, accuracy)
    (dot,) = scatter.iter("circle")
    (reach,) = [line for line in scatter.iter("line") if line.get("class") == "reach"]
    assert dot.get("class") == "dot within"
    assert place(dot, "cy") == pytest.approx(place(reach, end), abs=0.2)
    assert place(dot, "cx") == place(reach, "x1")
    (dot,), (band,) = strip.iter("circle"), strip.iter("rect")
    edge = place(band, "y") + (place(band, "height") if end == "y2" else 0)  # up is better, of errors too
    assert place(dot, "cy") == pytest.approx(edge, abs=0.2)


def test_a_shortened_run_is_not_among_the_dots() -> None:
    assert paper_panels(compare(group_runs([run_of(image_result(SI, 0, 93.0, "schedule.epochs=2"))]))) == []


def test_curves_are_grouped_by_network_and_data_and_hold_every_epoch() -> None:
    runs = [run_of(image_result(name, 0, 90.0)) for name in (SI, "cifar10/resnet32x2", "digits/resnet8")]
    first, second = curve_groups(group_runs(runs))
    assert (first.title, second.title) == ("resnet32x2 on cifar10", "resnet8 on digits")
    assert [series.label for series in first.series] == ["resnet32x2-lowrank-0.1-si", "resnet32x2"]
    assert [panel.title for panel in first.panels] == ["Test accuracy, %", "Training loss"]
    (curve, _) = ET.fromstring(first.panels[0].svg).iter("polyline")
    points = (curve.get("points") or "").split()
    assert len(points) == 4
    (zero, *_) = (text for text in ET.fromstring(first.panels[0].svg).iter("text") if text.text == "0")
    assert float(points[0].partition(",")[0]) > place(zero, "x")  # the axis starts before the first epoch
    (curve, _) = ET.fromstring(first.panels[0].end).iter("polyline")
    assert len((curve.get("points") or "").split()) == 3  # epochs 2 to 4


def test_norms_are_drawn_with_how_far_the_bound_is_above_them() -> None:
    (panel,) = product_panels(group_runs([run_of(image_result(SI, 0, 93.0))]))
    assert panel.note == "at the end, the bound is 1.43 times the norm"


def test_a_logarithmic_axis_is_named_where_only_single_runs_are_far_apart() -> None:
    results = [image_result(SI, seed, 93.0) for seed in (0, 1)]
    for result, loss in zip(results, (0.4, 4.8), strict=True):  # means from 2.6 to 2.6, runs from 0.4 to 4.8
        for row in result["history"]:
            row["loss"] = loss
    (group,) = curve_groups(group_runs([run_of(result) for result in results]))
    assert [panel.note for panel in group.panels] == ["", "Logarithmic axis."]
