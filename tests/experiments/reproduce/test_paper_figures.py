"""The paper's figures, drawn from what runs logged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from factorized.experiments.reproduce.paper_figures import (
    Panel,
    draw_figures,
    norm_panels,
    step_panels,
    sweep_panels,
    translation_panels,
)
from factorized.experiments.reproduce.variant import Variant, group_runs
from tests.experiments.reproduce.made import image_result, run_of, text_result

RESNET = "cifar10/resnet20-lowrank"


def variants(*given: tuple[str, ...], **fields: object) -> list[Variant]:
    """Return two runs of each recipe with changes."""
    return group_runs(
        run_of(image_result(f"{RESNET}-{name}", seed, 85.0 + 2 * place + seed, *changes, **fields))
        for place, (name, *changes) in enumerate(given)
        for seed in (0, 1)
    )


def drawn(panels: list[Panel]) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """Return the lines of each panel by their labels."""
    found = {}
    for title, draw in panels:
        axes = Figure().add_subplot()
        draw(axes)
        handles, labels = axes.get_legend_handles_labels()
        lines = [getattr(handle, "lines", [handle])[0] for handle in handles]
        found[title] = {
            label: (list(line.get_xdata()), list(line.get_ydata())) for line, label in zip(lines, labels, strict=True)
        }
    return found


def test_norms_and_their_bounds_are_drawn_by_initialization() -> None:
    panels = drawn(norm_panels(variants(("wd",), ("fd",), ("si",), ("si-fd",))))
    assert {title: list(lines) for title, lines in panels.items()} == {
        "resnet20 on cifar10, regular initialization": ["weight decay", "Frobenius decay"],
        "resnet20 on cifar10, spectral initialization": ["weight decay", "Frobenius decay"],
    }
    first = panels["resnet20 on cifar10, regular initialization"]["weight decay"]
    assert first == ([1, 2, 3, 4], [11.0, 12.0, 13.0, 14.0])


def test_decays_are_compared_at_the_same_rank() -> None:
    other = [
        ("wd", "factorize.rank_scale=0.037"),
        ("wd", "factorize.rank_scale=0.5"),
        ("fd", "factorize.rank_scale=0.5"),
    ]
    runs = variants(*other, ("wd",), ("fd",))
    for seed in (2, 3):  # the rank with one decay has the most runs
        runs[0].runs.append(run_of(image_result(f"{RESNET}-wd", seed, 80.0, "factorize.rank_scale=0.037")))
    for place, variant in enumerate(runs):
        for run in variant.runs:
            for row in run.result["history"]:
                row |= {"nuclear": float(place), "effective_step": float(place)}
    for panels in (norm_panels(runs), step_panels(runs)):
        compared = {title: lines for title, lines in drawn(panels).items() if "loss" not in title and "%" not in title}
        ends = [[ys[-1] for _, ys in lines.values()] for lines in compared.values()]
        assert ends == [[1.0, 2.0], [3.0, 4.0]]
        assert [title.partition("\n")[2] for title in compared] == ["rank scale 0.5", "rank scale 0.1111"]


def test_weight_decay_is_drawn_at_several_ranks() -> None:
    large = variants(("wd", "factorize.rank_scale=0.5"), parameters=9000)
    panels = drawn(norm_panels([*variants(("wd",)), *large]))
    assert list(panels["resnet20 on cifar10, weight decay, by rank"]) == [
        "rank scale 0.1111, kaiming",
        "rank scale 0.5, kaiming",
    ]


def overcomplete(*given: tuple[str, ...], **fields: object) -> list[Variant]:
    """Return a run of each overcomplete ResNet-20 with changes."""
    return group_runs(
        run_of(image_result(f"cifar10/resnet20-{name}", 0, 90.0 + place, *changes, **fields))
        for place, (name, *changes) in enumerate(given)
    )


def test_rank_scales_of_overcomplete_networks_are_drawn_beside_those_below_1() -> None:
    wide = overcomplete(("wide-9-wd",), ("full-wd",), parameters=9000)
    below = variants(("wd",))
    assert list(drawn(norm_panels([*wide, *below]))["resnet20 on cifar10, weight decay, by rank"]) == [
        "rank scale 0.1111, kaiming",
        "rank scale 1, kaiming",
        "rank scale 9, kaiming",
    ]
    deep = overcomplete(("deep-wd",))  # has an inner matrix: no point of the sweep
    (panel,) = drawn(sweep_panels([*wide, *below, *deep])).values()
    assert panel == {"weight decay, kaiming init": ([0.1111, 1.0, 9.0], [85.5, 91.0, 90.0])}


def test_a_sweep_has_a_point_for_each_strength_with_its_mean() -> None:
    swept = [(name, f"decay.strength={strength}") for name in ("si", "si-fd") for strength in (1e-3, 1e-4)]
    (panel,) = drawn(sweep_panels(variants(*swept))).values()
    assert panel == {
        "weight decay, SI": ([1e-4, 1e-3], [87.5, 85.5]),
        "Frobenius decay, SI": ([1e-4, 1e-3], [91.5, 89.5]),
    }


def test_a_sweep_over_ranks_keeps_other_settings_apart() -> None:
    panels = sweep_panels(
        variants(
            ("si", "factorize.rank_scale=0.5"),
            ("si", "factorize.rank_scale=0.25"),
            ("si", "factorize.rank_scale=0.75", "optimizer.lr=0.01"),
        )
    )
    (panel,) = drawn(panels).values()
    assert panel == {"weight decay, SI": ([0.25, 0.5], [87.5, 85.5])}


def test_step_sizes_are_drawn_where_decays_differ() -> None:
    def logged(*names: str) -> list[Variant]:
        found = variants(*((name,) for name in names))
        for variant in found:
            for run in variant.runs:
                for row in run.result["history"]:
                    row["effective_step"] = 0.1 / row["epoch"]
        return found

    panels = drawn(step_panels(logged("none", "si-fd", "normalized")))
    assert [title.partition(", ")[2] for title in panels] == [
        "training loss",
        "test accuracy, %",
        "effective step size",
    ]
    steps = panels["resnet20 on cifar10, effective step size"]
    assert list(steps) == ["no decay, SI", "Frobenius decay, SI", "no decay (normalized), SI"]
    assert steps["no decay, SI"][1] == pytest.approx([0.1, 0.05, 0.1 / 3, 0.025])
    assert step_panels(logged("si")) == []


def translators(*given: tuple[str, float, int, tuple[str, ...]]) -> list[Variant]:
    """Return a run of each recipe with its BLEU, its parameters and changes."""
    return group_runs(
        run_of(text_result(f"translation/tatoeba{name}", 0, "bleu", bleu, *changes, parameters=parameters))
        for name, bleu, parameters, changes in given
    )


def test_translation_is_drawn_over_the_strength_of_the_decay_of_dense_networks() -> None:
    dense = [("-wd", 31.0, "1e-4"), ("-wd", 33.0, "1e-5"), ("-fd-ov", 34.0, "1e-5"), ("-fd-ov-qk", 35.0, "1e-5")]
    found = translators(
        ("", 32.0, 9_000_000, ()),
        *((name, bleu, 9_000_000, (f"decay.strength={strength}",)) for name, bleu, strength in dense),
    )
    (title, draw), *rest = translation_panels(found)
    assert drawn([(title, draw)])["translation on tatoeba, BLEU"] == {
        "weight decay": ([1e-5, 1e-4], [33.0, 31.0]),
        "Frobenius decay of OV": ([1e-5], [34.0]),
        "Frobenius decay of OV and QK": ([1e-5], [35.0]),
        "no decay": ([0, 1], [32.0, 32.0]),
    }
    assert rest == []  # nothing was compressed
    assert sweep_panels(found) == []


def test_translation_is_drawn_over_the_size_with_the_best_strength_of_each() -> None:
    decayed = ("decay.kind=weight", "decay.strength=1e-4")
    found = translators(
        ("", 32.0, 9_000_000, ()),
        ("-0.5", 20.0, 5_000_000, ()),
        ("-0.25-si", 25.0, 3_000_000, ()),
        ("-0.5-si", 30.0, 5_000_000, ()),
        ("-0.5-si", 28.0, 5_000_000, decayed),
        ("-0.5-si", 29.0, 5_000_000, (decayed[0], "decay.strength=1e-5")),
    )
    (panel,) = drawn(translation_panels(found)).values()
    assert panel == {
        "no decay, network init": ([5, 9], [20.0, 32.0]),
        "no decay, SI": ([3, 5, 9], [25.0, 30.0, 32.0]),
        "weight decay, SI": ([5], [29.0]),
    }


def test_sweeps_of_the_same_network_say_what_tells_them_apart() -> None:
    swept = [
        ("si", f"decay.strength={strength}", f"optimizer.lr={lr}") for strength in (1e-3, 1e-4) for lr in (0.1, 0.05)
    ]
    alone = ("si", "decay.strength=1e-3", "optimizer.momentum=0.5")  # no sweep: its settings tell nothing apart
    assert [title for title, _ in sweep_panels(variants(*swept, alone))] == [
        "resnet20 on cifar10, accuracy, %\nlr 0.1",
        "resnet20 on cifar10, accuracy, %\nlr 0.05",
    ]


def test_titles_are_short_and_dense_networks_have_no_initialization_in_the_legend() -> None:
    names = ("bert/small", "bert/small-0.5", "bert/small-flambe")
    panels = drawn(
        sweep_panels(
            group_runs(
                run_of(text_result(name, 0, "loss", 3.0, f"decay.strength={strength}"))
                for name in names
                for strength in (0.1, 1.0)
            )
        )
    )
    assert [title.splitlines() for title in panels] == [
        ["masked on wikipedia, loss", "attention init default, scheme none, optimizer lamb"],
        ["masked on wikipedia, loss", "attention init default, scheme low_rank, optimizer lamb"],
        ["masked on wikipedia, loss", "attention init spectral, scheme none, rest 0.01, forms ov,", "optimizer flambe"],
    ]
    assert [list(lines) for lines in panels.values()] == [
        ["weight decay"],
        ["weight decay, SI"],
        ["Frobenius decay"],
    ]


def test_every_panel_says_how_many_runs_it_shows() -> None:
    one, *_ = variants(("si", "decay.strength=3e-4"))
    found = [*variants(("si",), ("si-fd",)), replace(one, runs=one.runs[:1])]
    for row in (row for variant in found for run in variant.runs for row in run.result["history"]):
        row["effective_step"] = 0.1
    expected = {norm_panels: "epoch; n = 2", step_panels: "epoch; n = 2", sweep_panels: "strength; n = 1 to 2"}
    for of, label in expected.items():
        axes = Figure().add_subplot()
        of(found)[0][1](axes)
        assert axes.get_xlabel() == label


def test_a_sweep_has_a_tick_at_every_strength() -> None:
    axes = Figure().add_subplot()
    sweep_panels(variants(("si",), ("si", "decay.strength=3e-4")))[0][1](axes)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0.0001", "0.0003"]
    assert axes.get_ylabel() == "mean ± deviation"


def test_a_strength_of_0_has_a_place_beside_the_others() -> None:
    axes = Figure().add_subplot()
    sweep_panels(variants(*(("si", f"decay.strength={strength}") for strength in (0, 1e-4, 1e-3))))[0][1](axes)
    places = [axes.transData.transform((strength, 90))[0] for strength in (0, 1e-4, 1e-3)]
    assert places[1] - places[0] > 30  # pixels
    assert places[2] - places[1] > 30


def test_shortened_runs_are_marked_in_every_legend() -> None:
    short = [("decay.strength=1e-3", "schedule.epochs=2"), ("decay.strength=1e-4", "schedule.epochs=2")]
    found = variants(*((name, *changes) for name in ("wd", "si-fd") for changes in short))
    found += variants(("wd", "factorize.rank_scale=0.5", "schedule.epochs=2"), parameters=9000)
    for variant in found:
        for run in variant.runs:
            for row in run.result["history"]:
                row["effective_step"] = 0.1
    found += translators(("-wd", 31.0, 9, ("schedule.updates=2",)), ("-0.5-si", 30.0, 5, ("schedule.updates=2",)))
    for draw in (norm_panels, sweep_panels, step_panels, translation_panels):
        labels = [label for lines in drawn(draw(found)).values() for label in lines]
        assert labels
        assert all("(shortened: 2 of " in label for label in labels), labels


def test_figures_are_png_and_svg_and_the_same_each_time(tmp_path: Path) -> None:
    found = variants(("wd",), ("si",))
    files = draw_figures(found, tmp_path / "a")
    assert [path.name for path in files] == ["figure1.png", "figure1.svg"]
    assert draw_figures(found, tmp_path / "c", only="figure3") == []
    assert draw_figures(found, tmp_path / "c", only="figure1") == [tmp_path / "c" / path.name for path in files]
    translated = draw_figures(translators(("", 32.0, 9, ()), ("-0.5", 20.0, 5, ())), tmp_path / "t")
    assert [path.name for path in translated] == ["figure4.png", "figure4.svg"]
    assert len(set(Image.open(files[0]).convert("RGB").get_flattened_data())) > 50
    assert files[1].read_bytes() == draw_figures(found, tmp_path / "b")[1].read_bytes()


def test_runs_that_logged_nothing_have_no_figures(tmp_path: Path) -> None:
    assert draw_figures(group_runs([run_of(image_result("digits/resnet8", 0, 97.0))]), tmp_path / "out") == []
    assert not (tmp_path / "out").exists()
