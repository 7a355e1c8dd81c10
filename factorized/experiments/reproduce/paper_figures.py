"""Figures 1 to 3 of the paper from logged quantities, as PNG and SVG: norms, sweeps and effective step sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from factorized.experiments.data.explain import in_words
from factorized.experiments.data.extras import need
from factorized.experiments.reproduce.variant import Settings, Variant, settings_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Panel = tuple[str, Callable[["Axes"], None]]  # a title, and what draws below it
DECAYS = {
    "weight": ("weight decay", "C1"),
    "frobenius": ("Frobenius decay", "C0"),
    "none": ("no decay", "C7"),
    "normalized": ("no decay (normalized)", "C2"),
    "crs": ("scaled weight decay", "C4"),
}
BUDGETS = ("rank_scale", "ratio")


def draw_figures(variants: Sequence[Variant], folder: Path) -> list[Path]:
    """Write the figures that these variants have the quantities for, and return the files.

    Figure 1 is of runs that recorded the norms of their products (``run.diagnose``), figure 2 of runs that differ in
    the strength of the decay or in the rank, figure 3 of runs with different decays.
    """
    need("matplotlib", "matplotlib", "--figures", "vision")
    written = []
    for name, panels in (
        ("figure1", norm_panels(variants)),
        ("figure2", sweep_panels(variants)),
        ("figure3", step_panels(variants)),
    ):
        if panels:
            figure = _figure(panels)
            for kind in ("png", "svg"):
                written.append(folder / f"{name}.{kind}")
                _save(figure, written[-1])
    return written


def norm_panels(variants: Sequence[Variant]) -> list[Panel]:
    """Return figure 1: nuclear norms and their bounds, by initialization, and by rank where the factors are decayed."""
    logged = [v for v in variants if v.scheme == "low_rank" and v.curve("nuclear_bound") is not None]
    spectral = [v for v in logged if v.recipe["factorize"].get("init") in ("spectral", None)]
    panels = []
    for title, members, label in (
        ("regular initialization", [v for v in logged if v not in spectral], _decay),
        ("spectral initialization", spectral, _decay),
        ("weight decay, by rank", [v for v in logged if _kind(v) == "weight"], _budget),
    ):
        for model, data in dict.fromkeys((v.model, v.data) for v in members):
            here = [v for v in members if (v.model, v.data) == (model, data)]
            if label is _decay or len({v.parameters for v in here}) > 1:
                panels.append((f"{model} on {data}, {title}", _norms(_distinct(here, label))))
    return panels


def sweep_panels(variants: Sequence[Variant]) -> list[Panel]:
    """Return figure 2: the score over the strength of the decay, and over the rank, for each kind of decay."""
    panels = []
    for field, log in (("decay.strength", True), *((f"factorize.{name}", False) for name in BUDGETS)):
        for members in _sweeps(variants, field):
            first = members[0]
            panels.append((f"{first.model} on {first.data}, {first.metric_name}", _sweep(members, field, log=log)))
    return panels


def step_panels(variants: Sequence[Variant]) -> list[Panel]:
    """Return figure 3: loss, test accuracy and effective step size of networks that differ in their decay."""
    logged = [v for v in variants if v.scheme == "low_rank" and v.curve("effective_step") is not None]
    panels = []
    for model, data in dict.fromkeys((v.model, v.data) for v in logged):
        chosen = _distinct((v for v in logged if (v.model, v.data) == (model, data)), _decay_and_init)
        if len({_kind(v) for v in chosen.values()}) < 2:
            continue
        for column, title in (
            ("loss", "training loss"),
            ("test_accuracy", "test accuracy, %"),
            ("effective_step", "effective step size"),
        ):
            panels.append((f"{model} on {data}, {title}", _curves(chosen, column, log=column != "test_accuracy")))
    return panels


def _norms(variants: Mapping[str, Variant]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for number, (label, variant) in enumerate(variants.items()):
            colour = DECAYS[_kind(variant)][1] if label == _decay(variant) else f"C{number}"
            norm, bound = variant.curve("nuclear"), variant.curve("nuclear_bound")
            if norm is not None and bound is not None:
                axes.plot(*zip(*norm.points, strict=True), color=colour, label=label)
                axes.plot(*zip(*bound.points, strict=True), color=colour, linestyle=":")
        axes.set(xlabel="epoch", ylabel="nuclear norm; dotted: its bound")

    return draw


def _curves(variants: Mapping[str, Variant], column: str, *, log: bool) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for number, (label, variant) in enumerate(variants.items()):
            line = variant.curve(column)
            if line is not None:
                axes.plot(*zip(*line.points, strict=True), color=f"C{number}", label=label)
        axes.set(xlabel="epoch", yscale="log" if log else "linear")

    return draw


def _sweep(variants: Sequence[Variant], field: str, *, log: bool) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for number, label in enumerate(dict.fromkeys(map(_decay_and_init, variants))):
            members = sorted((v for v in variants if _decay_and_init(v) == label), key=lambda v: settings_of(v)[field])
            places = [settings_of(v)[field] for v in members]
            means, errors = [v.score.mean for v in members], [v.score.deviation or 0.0 for v in members]
            axes.errorbar(places, means, errors, color=f"C{number}", label=label, marker="o", capsize=2)
        axes.set(xlabel=field.partition(".")[2].replace("_", " "), xscale="log" if log else "linear")

    return draw


def _sweeps(variants: Sequence[Variant], field: str) -> list[list[Variant]]:
    """Return variants that differ in a field, the decay and the initialization alone, if it has two values or more."""
    groups: list[tuple[Settings, list[Variant]]] = []
    for variant in variants:
        settings = settings_of(variant)
        if not isinstance(settings.get(field), int | float) or _kind(variant) not in ("weight", "frobenius"):
            continue
        rest = {key: value for key, value in settings.items() if key not in (field, "decay.kind", "factorize.init")}
        same = next((members for found, members in groups if found == rest), None)
        if same is None:
            groups.append((rest, [variant]))
        else:
            same.append(variant)
    return [members for _, members in groups if len({settings_of(v)[field] for v in members}) > 1]


def _distinct(variants: Iterable[Variant], label: Callable[[Variant], str]) -> dict[str, Variant]:
    """Return one variant for each label; of those with the same one, that which has most runs."""
    found: dict[str, Variant] = {}
    for variant in variants:
        known = found.get(label(variant))
        if known is None or len(variant.runs) > len(known.runs):
            found[label(variant)] = variant
    return found


def _kind(variant: Variant) -> str:
    return str(variant.recipe.get("decay", {}).get("kind", "none"))


def _decay(variant: Variant) -> str:
    return DECAYS[_kind(variant)][0]


def _decay_and_init(variant: Variant) -> str:
    init = variant.recipe["factorize"].get("init")
    return f"{_decay(variant)}, {'SI' if init in ('spectral', None) else init}"


def _budget(variant: Variant) -> str:
    fields = variant.recipe["factorize"]
    init = fields.get("init") or "spectral"
    return next((f"{name.replace('_', ' ')} {fields[name]:g}, {init}" for name in BUDGETS if fields.get(name)), init)


def _figure(panels: Sequence[Panel]) -> Figure:
    from matplotlib.figure import Figure

    across = min(3, len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(4.2 * across, 3.3 * down), layout="constrained")
    for number, (title, draw) in enumerate(panels):
        axes = figure.add_subplot(down, across, number + 1)
        draw(axes)
        axes.set_title(title, fontsize=9)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    return figure


def _save(figure: Figure, path: Path) -> None:
    from matplotlib import rc_context

    about: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with rc_context({"svg.hashsalt": "factorized"}):  # the same picture is the same file
            figure.savefig(path, dpi=160, metadata=about)
    except OSError as error:
        raise ValueError(
            f"cannot write {path}: {in_words(error, named=False)}; choose another folder by --out"
        ) from None
