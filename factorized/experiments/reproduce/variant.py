"""One row of a comparison: the runs of a recipe on the same data, and the curves they drew."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from factorized.experiments.recipes.find import load_any_recipe, recipe_names
from factorized.experiments.recipes.identity import NOT_DECIDING, settings
from factorized.experiments.recipes.shorten import shortening
from factorized.experiments.reproduce.chart import Line
from factorized.experiments.reproduce.runs import NAMES, Run
from factorized.experiments.reproduce.summary import Summary
from factorized.experiments.training.result import LOWER_IS_BETTER

NAMES_AND_NOTES = ("name", "title", "paper", "shortened_from", "decay.record_norms")  # they change no weight
Settings = dict[str, Any]  # "section.field" and value


@dataclass(frozen=True, eq=False)
class Variant:
    """A recipe that was trained with some seeds."""

    runs: Sequence[Run]  # at least one; the same settings and data
    label: str
    changes: Settings = field(default_factory=dict)  # where it differs from the shipped recipe of that name
    shortened: str = ""  # "3 of 200 epochs" where that is the difference
    marks: tuple[str, ...] = ()  # "best", and of what

    @property
    def title(self) -> str:
        """The label, marked where its runs are shortened."""
        told = self.shortened
        return self.label if not told or told in self.label else f"{self.label} (shortened: {told})"

    @property
    def name(self) -> str:
        """The name of the recipe."""
        return self.runs[0].name

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe of its first run."""
        return self.runs[0].recipe

    @property
    def scheme(self) -> str:
        """How its weights are factorized; "none" for a dense network."""
        return str(self.recipe["factorize"].get("scheme", "none"))

    @property
    def data(self) -> str:
        """The name of its data set."""
        return str(self.runs[0].result["data"]["name"])

    @property
    def model(self) -> str:
        """The network: its name, or the task of a transformer that is given by sizes."""
        return str(self.recipe.get("model", {}).get("name") or self.recipe.get("task", ""))

    @property
    def metric(self) -> str:
        """The name of the score of its runs."""
        return self.runs[0].metric

    @property
    def metric_name(self) -> str:
        """The metric as a heading."""
        return NAMES.get(self.metric, self.metric)

    @property
    def score(self) -> Summary:
        """The score of its runs."""
        return Summary.of([run.score for run in self.runs])

    @property
    def parameters(self) -> int:
        """Parameters in training."""
        return int(self.runs[0].result["parameters"])

    @property
    def deployed(self) -> int | None:
        """Parameters without factors that cost more than their product; None where no run recorded it.

        Schemes with a budget have no such factors: the planner leaves layers dense that would grow.
        """
        if self.scheme != "overcomplete":
            return self.parameters
        for result in (run.result for run in self.runs):
            if result.get("composed") is not None:
                return int(result["composed"]["parameters"])
            if result.get("layers"):
                sizes = [(layer["params"], layer["dense_params"]) for layer in result["layers"]]
                return self.parameters - sum(max(0, size - dense) for size, dense in sizes if dense is not None)
        return None

    @property
    def seconds(self) -> Summary | None:
        """Seconds of the runs that had their device to themselves; None if none had."""
        alone = [float(run.result["seconds"]) for run in self.runs if run.timed]
        return Summary.of(alone) if alone else None

    @property
    def comparable(self) -> bool:
        """Whether it is the shipped recipe of its name, as long as that one."""
        return not self.changes and not self.shortened

    def curve(self, column: str, label: str | None = None, style: str = "") -> Line | None:
        """Return a column of the metrics over epochs or updates, averaged over the seeds; None where no run has it.

        Runs that were not evaluated at the same epochs are interpolated, from where all of them have begun.
        """
        by = self.runs[0].by
        rows = [row for run in self.runs if (row := _column(run.result["history"], by, column))]
        if not rows:
            return None
        first, last = max(min(row) for row in rows), min(max(row) for row in rows)
        places = sorted({place for row in rows for place in row if first <= place <= last})
        if not places:
            return None
        read = [np.interp(places, sorted(row), [row[place] for place in sorted(row)]).tolist() for row in rows]
        values = {place: [row[number] for row in read] for number, place in enumerate(places)}
        return Line(
            label or self.label,
            [(place, sum(found) / len(found)) for place, found in values.items()],
            style,
            [(place, min(found), max(found)) for place, found in values.items()] if len(rows) > 1 else (),
        )


def _column(history: Iterable[Mapping[str, float | None]], by: str, column: str) -> dict[float, float]:
    found = ((row.get(by), row.get(column)) for row in history)
    return {place: value for place, value in found if place is not None and value is not None}


def group_runs(runs: Iterable[Run], labels: Mapping[str, str] | None = None) -> list[Variant]:
    """Return the runs as variants, in the order in which they are first met.

    Runs belong together that have the same recipe and data. ``labels`` are by recipe; the name unless given.
    """
    groups: list[list[Run]] = []
    for run in runs:
        same = next((group for group in groups if _same(group[0], run)), None)
        if same is None:
            groups.append([run])
        else:
            same.append(run)
    found = [_variant(sorted(group, key=lambda run: run.seed), groups, labels or {}) for group in groups]
    labels_of = [variant.label for variant in found]
    return [  # a label belongs to one variant, whatever names are given
        replace(variant, label=f"{label} #{labels_of[:place].count(label) + 1}")
        if label in labels_of[:place]
        else variant
        for place, (variant, label) in enumerate(zip(found, labels_of, strict=True))
    ]


def _same(one: Run, other: Run) -> bool:
    return (
        one.name == other.name
        and one.metric == other.metric
        and one.result["data"]["checksum"] == other.result["data"]["checksum"]
        and not differences(one.recipe, other.recipe)
    )


def settings_of(variant: Variant) -> Settings:
    """Return the fields of its recipe that decide a run, as "section.field"."""
    return _settings(variant.recipe)


def differences(recipe: Mapping[str, Any], other: Mapping[str, Any]) -> Settings:
    """Return the fields of ``recipe``, with their values, that decide a run and are otherwise in ``other``.

    A field that only one of them has was added to recipes, or removed, between two versions, and does not count.
    """
    here, there = _settings(recipe), _settings(other)
    return {key: value for key, value in here.items() if key in there and there[key] != value}


def _settings(recipe: Mapping[str, Any]) -> Settings:
    beside = {*NAMES_AND_NOTES, *(f"{section}.{name}" for section, names in NOT_DECIDING.items() for name in names)}
    found = {key: value for key, value in settings(recipe).items() if not {key, key.partition(".")[0]} & beside}
    return {"data.name": recipe.get("data", {}).get("name"), **found}


def _variant(runs: Sequence[Run], groups: Sequence[Sequence[Run]], labels: Mapping[str, str]) -> Variant:
    first = runs[0]
    alike = [group[0] for group in groups if group[0].name == first.name]
    shipped = first.name in recipe_names()
    base = load_any_recipe(first.name).to_dict() if shipped else alike[0].recipe
    changes = differences(first.recipe, base)
    shortened = shortening(first.recipe)
    ends = base.get("schedule", {}).get(f"{first.by}s")
    if shipped and isinstance(ends, int) and isinstance(first.length, int) and first.length < ends:
        shortened = f"{first.length:,} of {ends:,} {first.by}s"
    if shortened:
        changes = {key: value for key, value in changes.items() if not key.startswith("schedule.")}
    label = labels.get(first.name, first.name)
    if len(alike) > 1:
        told = [f"{key}={value}" for key, value in changes.items()] + ([shortened] if shortened else [])
        others = {run.result["data"]["checksum"] for run in alike}
        told += [f"data {first.result['data']['checksum'][:8]}…"] if len(others) > 1 else []
        label = f"{label} ({', '.join(told)})" if told else label
    return Variant(runs, label, changes, shortened)


def mark_best(variants: Sequence[Variant]) -> list[Variant]:
    """Return the variants with the best ones marked: on a data set, and among those of the same size and scheme.

    One is the best only if it is ahead of every other by more than the deviation of their difference. Shortened ones
    must be ahead of the whole ones too, which need not be ahead of them.
    """
    marked = {variant: list(variant.marks) for variant in variants}
    for word, group in (("best", _contest), ("best of its size", _size)):
        for best in _winners(variants, group):
            marked[best].append(word)
    return [replace(variant, marks=tuple(marked[variant])) for variant in variants]


def _contest(variant: Variant) -> Hashable:
    return variant.metric, variant.runs[0].result["data"]["checksum"]


def _size(variant: Variant) -> Hashable:
    return _contest(variant), variant.scheme, variant.model, variant.deployed or variant.parameters


def _winners(variants: Sequence[Variant], group: Callable[[Variant], Hashable]) -> list[Variant]:
    groups: dict[Hashable, list[Variant]] = {}
    for variant in variants:
        groups.setdefault(group(variant), []).append(variant)
    winners = []
    for members in groups.values():
        ordered = sorted(members, key=lambda v: v.score.mean, reverse=members[0].metric not in LOWER_IS_BETTER)
        for place, one in enumerate(ordered):
            rivals = [other for other in ordered if other is not one and other.shortened in ("", one.shortened)]
            behind = [other for other in ordered[place + 1 :] if is_ahead(one.score, other.score)]
            if rivals and all(other in behind for other in rivals):
                winners.append(one)
    return winners


def is_ahead(one: Summary, other: Summary) -> bool:
    """Return whether two means differ by more than the deviation of their difference; never so for a single run."""
    if one.deviation is None or other.deviation is None:
        return False
    return abs(one.mean - other.mean) > math.hypot(one.deviation, other.deviation)
