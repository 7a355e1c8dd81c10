"""The paper's figures from logged quantities, as PNG and SVG: norms, sweeps, effective step sizes, translation."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from factorized.experiments.data.explain import writing_to
from factorized.experiments.data.extras import need
from factorized.experiments.reproduce.variant import Settings, Variant, settings_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Panel = tuple[str, Callable[["Axes"], None]]  # a title, and what draws below it
Points = Sequence[tuple[float, Variant]]
Group = tuple[Settings, list[Variant]]  # what the variants have in common
DECAYS = {
    "weight": ("weight decay", "C1"),
    "frobenius": ("Frobenius decay", "C0"),
    "none": ("no decay", "C7"),
    "normalized": ("no decay (normalized)", "C2"),
    "crs": ("scaled weight decay", "C4"),
}
RANK_SCALE = tuple(f"factorize.{name}" for name in ("scheme", "variant", "width", "rank_scale"))  # fields that set it
LONGEST = 58  # letters in a line of a title
UNBROKEN = "\N{NO-BREAK SPACE}"  # between words that stay on one line


def draw_figures(variants: Sequence[Variant], folder: Path, only: str | None = None) -> list[Path]:
    """Write the figures that these variants have the quantities for, or ``only`` one of them, and return the files.

    Figure 1 is of runs that recorded the norms of their products (``run.diagnose``), figure 2 of runs that differ in
    the strength of the decay or in the rank, figure 3 of runs with different decays, figure 4 of runs on translation.
    """
    need("matplotlib", "matplotlib", "--figures", "vision")
    written = []
    for name, of in (
        ("figure1", norm_panels),
        ("figure2", sweep_panels),
        ("figure3", step_panels),
        ("figure4", translation_panels),
    ):
        panels = of(variants) if only in (None, name) else []
        if panels:
            figure = _figure(panels)
            for kind in ("png", "svg"):
                written.append(folder / f"{name}.{kind}")
                save_figure(figure, written[-1])
    return written


def norm_panels(variants: Sequence[Variant]) -> list[Panel]:
    """Return figure 1: nuclear norms and their bounds, by initialization, and by rank where the factors are decayed."""
    logged = [v for v in variants if v.scheme != "none" and v.curve("nuclear_bound") is not None]
    low_rank = [v for v in logged if v.scheme == "low_rank"]
    spectral = [v for v in low_rank if v.recipe["factorize"].get("init") in ("spectral", None)]
    ranked = [v for v in logged if _kind(v) == "weight" and (_rank_scale(v) or _ratio(v))]
    regular = [v for v in low_rank if v not in spectral]
    panels = []
    for title, members in (("regular initialization", regular), ("spectral initialization", spectral)):
        for whole_title, here in _titled(_by_decay(members), title):
            panels.append((whole_title, _norms(_distinct(here, _decay))))
    ranked.sort(key=lambda v: _rank_scale(v) or _ratio(v) or 0.0)
    by_rank = _alike(ranked, (*RANK_SCALE, "factorize.ratio", "factorize.init"))
    several = [group for group in by_rank if len({v.parameters for v in group[1]}) > 1]
    for whole_title, here in _titled(several, "weight decay, by rank"):
        panels.append((whole_title, _norms(_distinct(here, _budget))))
    return panels


def sweep_panels(variants: Sequence[Variant]) -> list[Panel]:
    """Return figure 2: the score over the strength of the decay, and over the rank, for each kind of decay.

    Translation is left to figure 4.
    """
    panels = []
    decayed = [v for v in variants if v.metric != "bleu" and _kind(v) in ("weight", "frobenius")]
    for name, value, fields, log in (
        ("strength", _strength, ("decay.strength",), True),
        ("rank scale", _rank_scale, RANK_SCALE, True),
        ("ratio", _ratio, ("factorize.ratio",), False),
    ):
        swept = [v for v in decayed if value(v) is not None]
        groups = _alike(swept, (*fields, "decay.kind", "factorize.init"))
        for title, members in _titled([group for group in groups if len(set(map(value, group[1]))) > 1]):
            panels.append((title, _scores(_lines(members, _decay_and_init, value), name, log=log)))
    return panels


def step_panels(variants: Sequence[Variant]) -> list[Panel]:
    """Return figure 3: loss, test accuracy and effective step size of networks that differ in their decay."""
    logged = [v for v in variants if v.scheme == "low_rank" and v.curve("effective_step") is not None]
    groups = [group for group in _by_decay(logged) if len(set(map(_kind, group[1]))) > 1]
    columns = {
        "loss": "training loss",
        "test_accuracy": "test accuracy, %",
        "effective_step": "effective step size",
    }
    return [
        (title, _curves(_distinct(members, _decay_and_init), column, log=column != "test_accuracy"))
        for titled in zip(*(_titled(groups, title) for title in columns.values()), strict=True)
        for column, (title, members) in zip(columns, titled, strict=True)
    ]


def translation_panels(variants: Sequence[Variant]) -> list[Panel]:
    """Return figure 4: BLEU over the strength of the decay of dense networks, and over the size, by initialization.

    Of networks with the same decay, initialization and size, the one of the best strength is drawn.
    """
    panels = []
    translated = [v for v in variants if v.metric == "bleu"]
    for title, members in _titled(_alike(translated, ("decay", "factorize"))):
        dense = [v for v in members if v.scheme == "none"]
        decayed = _lines((v for v in dense if _kind(v) != "none"), _forms, _strength)
        if decayed:
            without = [(_decay(v), v.score.mean) for v in dense if _kind(v) == "none"]
            panels.append((title, _scores(decayed, "strength", log=True, levels=dict(without))))
        factorized = [v for v in members if v.scheme != "none"]
        sizes = {}
        for label in dict.fromkeys(map(_decay_and_init, factorized)):
            some = [v for v in factorized if _decay_and_init(v) == label]
            some += [v for v in dense if _kind(v) == _kind(some[0])]
            best = {v.parameters: v for v in sorted(some, key=lambda v: v.score.mean)}
            sizes[label] = sorted((size / 1e6, v) for size, v in best.items())
        if sizes:
            panels.append((title, _scores(sizes, "parameters, millions")))
    return panels


def _norms(variants: Mapping[str, Variant]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for number, (label, variant) in enumerate(variants.items()):
            colour = DECAYS[_kind(variant)][1] if label == _decay(variant) else f"C{number}"
            norm, bound = variant.curve("nuclear"), variant.curve("nuclear_bound")
            if norm is not None and bound is not None:
                axes.plot(*zip(*norm.points, strict=True), color=colour, label=label)
                axes.plot(*zip(*bound.points, strict=True), color=colour, linestyle=":")
        axes.set(xlabel=f"epoch; {_seeds(variants.values())}", ylabel="nuclear norm; dotted: its bound")

    return draw


def _curves(variants: Mapping[str, Variant], column: str, *, log: bool) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for number, (label, variant) in enumerate(variants.items()):
            line = variant.curve(column)
            if line is not None:
                # the normalized run has the step sizes of the one that it follows: dashed above it, both are seen
                style, order = ("--", 3) if _kind(variant) == "normalized" else ("-", 2)
                places, values = zip(*line.points, strict=True)
                axes.plot(places, values, color=f"C{number}", label=label, linestyle=style, zorder=order)
        axes.set(xlabel=f"epoch; {_seeds(variants.values())}", yscale="log" if log else "linear")

    return draw


def _scores(
    lines: Mapping[str, Points], xlabel: str, *, log: bool = False, levels: Mapping[str, float] | None = None
) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for number, (label, points) in enumerate(lines.items()):
            means, errors = [v.score.mean for _, v in points], [v.score.deviation or 0.0 for _, v in points]
            axes.errorbar([x for x, _ in points], means, errors, color=f"C{number}", label=label, marker="o", capsize=2)
        for label, level in (levels or {}).items():
            axes.axhline(level, color="C7", linestyle="--", label=label)
        told = _seeds(variant for points in lines.values() for _, variant in points)
        axes.set(xlabel=f"{xlabel}; {told}", ylabel="mean ± deviation")
        if log:
            values = sorted({x for points in lines.values() for x, _ in points})
            if values[0] > 0:
                axes.set_xscale("log")
            else:  # a strength of 0, a decade below the others
                axes.set_xscale("symlog", linthresh=min((value for value in values if value > 0), default=1.0))
            # powers of ten are few or none between the values
            axes.set_xticks(values, [f"{value:g}" for value in values])
            axes.minorticks_off()

    return draw


def _seeds(variants: Iterable[Variant]) -> str:
    """Return of how many runs the figures of these variants are."""
    counts = sorted({len(variant.runs) for variant in variants})
    return f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"


def _lines(
    variants: Iterable[Variant], label: Callable[[Variant], str], value: Callable[[Variant], float | None]
) -> dict[str, Points]:
    """Return the variants of each label over a value."""
    found: dict[str, list[tuple[float, Variant]]] = {}
    for variant in variants:
        found.setdefault(label(variant), []).append((value(variant) or 0.0, variant))
    return {label: sorted(points, key=lambda point: point[0]) for label, points in found.items()}


def _alike(variants: Iterable[Variant], apart: Sequence[str]) -> list[Group]:
    """Return variants in groups that differ in some fields or sections alone."""
    groups: list[Group] = []
    for variant in variants:
        settings = settings_of(variant).items()
        rest = {key: value for key, value in settings if not {key, key.partition(".")[0]} & set(apart)}
        same = next((members for found, members in groups if found == rest), None)
        if same is None:
            groups.append((rest, [variant]))
        else:
            same.append(variant)
    return groups


def _by_decay(variants: Sequence[Variant]) -> list[Group]:
    """Return variants in groups that differ in decay and initialization alone.

    A group with one decay is left out where the same network has one with several.
    """
    groups = _alike(variants, ("decay", "factorize.init"))
    several = {(v.model, v.data) for _, members in groups if len(set(map(_kind, members))) > 1 for v in members}
    return [
        (common, members)
        for common, members in groups
        if len(set(map(_kind, members))) > 1 or (members[0].model, members[0].data) not in several
    ]


def _titled(groups: Sequence[Group], what: str = "") -> Iterator[tuple[str, list[Variant]]]:
    """Yield the variants of each group below a title that also says what tells it from groups with the same title.

    The title names the network, the data and ``what`` is drawn: the metric unless given.
    """
    titles = [f"{first.model} on {first.data}, {what or first.metric_name}" for _, (first, *_) in groups]
    for title, (settings, members) in zip(titles, groups, strict=True):
        others = [found for other, (found, _) in zip(titles, groups, strict=True) if other == title]
        told = [  # a field that another group has no use for tells nothing that its scheme does not
            _in_words(key, value)
            for key, value in settings.items()
            if value is not None and any(key in other and other[key] != value for other in others)
        ]
        lines = textwrap.wrap(", ".join(setting.replace(" ", UNBROKEN) for setting in told), LONGEST)
        yield "\n".join([title, *lines]).replace(UNBROKEN, " "), members


def _in_words(key: str, value: Any) -> str:
    """Return a setting in the words of a title, such as "optimizer lamb"."""
    name = key.removesuffix(".name").rpartition(".")[2].replace("_", " ")
    text = " and ".join(map(str, value)) if isinstance(value, list) else value
    return f"{name} {text}"


def _distinct(variants: Iterable[Variant], label: Callable[[Variant], str]) -> dict[str, Variant]:
    """Return one variant for each label: the one with the most runs."""
    found: dict[str, Variant] = {}
    for variant in variants:
        known = found.get(label(variant))
        if known is None or len(variant.runs) > len(known.runs):
            found[label(variant)] = variant
    return found


def _kind(variant: Variant) -> str:
    return str(variant.recipe.get("decay", {}).get("kind", "none"))


def _decay(variant: Variant) -> str:
    return f"{DECAYS[_kind(variant)][0]}{_mark(variant)}"


def _decay_and_init(variant: Variant) -> str:
    if variant.scheme == "none":
        return _decay(variant)
    init = variant.recipe["factorize"].get("init")
    return f"{DECAYS[_kind(variant)][0]}, {'SI' if init in ('spectral', None) else f'{init} init'}{_mark(variant)}"


def _forms(variant: Variant) -> str:
    forms = " and ".join(form.upper() for form in variant.recipe["decay"].get("forms") or ())
    return f"{DECAYS[_kind(variant)][0]}{f' of {forms}' if forms else ''}{_mark(variant)}"


def _budget(variant: Variant) -> str:
    scale = _rank_scale(variant)
    rank = f"ratio {_ratio(variant):g}" if scale is None else f"rank scale {scale:g}"
    return f"{rank}, {variant.recipe['factorize'].get('init') or 'spectral'}{_mark(variant)}"


def _strength(variant: Variant) -> float | None:
    return _number(variant, "decay.strength")


def _ratio(variant: Variant) -> float | None:
    return _number(variant, "factorize.ratio")


def _rank_scale(variant: Variant) -> float | None:
    """Return the rank scale of the products, as given, or as the variant of an overcomplete network has it."""
    given = _number(variant, "factorize.rank_scale")
    if given is not None or variant.scheme != "overcomplete" or _ratio(variant) is not None:
        return given
    scales = {"full": 1.0, "wide": _number(variant, "factorize.width")}  # deep has an inner matrix
    return scales.get(str(settings_of(variant).get("factorize.variant")))


def _number(variant: Variant, field: str) -> float | None:
    value = settings_of(variant).get(field)
    return float(value) if isinstance(value, int | float) else None


def _mark(variant: Variant) -> str:
    return f" (shortened: {variant.shortened})" if variant.shortened else ""


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


def save_figure(figure: Figure, path: Path, description: str | None = None) -> None:
    """Write a figure of matplotlib, as SVG with the description; the same figure gives the same file."""
    from matplotlib import rc_context

    about: dict[str, Any] = {"Date": None, "Creator": None, "Description": description} if path.suffix == ".svg" else {}
    in_letters = rc_context({"svg.hashsalt": "factorized", "svg.fonttype": "none"})  # rather than outlines of them
    with writing_to(path, "choose another folder by --out"), in_letters:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160, metadata=about)
