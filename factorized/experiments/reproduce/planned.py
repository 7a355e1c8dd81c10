"""Which runs a table needs: those that are finished, those to do, and what has to come before them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from factorized.experiments.data.explain import in_words
from factorized.experiments.recipes.find import load_any_recipe, recipe_names
from factorized.experiments.recipes.identity import RUNS, fingerprint
from factorized.experiments.recipes.recipe import Data
from factorized.experiments.recipes.shorten import length_of, shorten, unit_of
from factorized.experiments.recipes.text import AnyRecipe
from factorized.experiments.reproduce.data import data_checksum
from factorized.experiments.reproduce.job import Job
from factorized.experiments.reproduce.runs import Run
from factorized.experiments.training.result import RESULT

# how a recipe names a run of another recipe
OTHER_RUN = re.compile(r"out/(?P<name>.+)/seed-(?P<seed>\{seed\}|\d+)")


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """A recipe with a seed: finished, to be done, or impossible because its data are missing."""

    recipe: AnyRecipe  # shortened where asked; runs of other recipes are named by their folders
    seed: int
    folder: Path  # of this seed
    checksum: str | None  # of its data; None where those are not there
    finished: Run | None = None
    needs: tuple[PlannedRun, ...] = ()
    problem: str | None = None  # why it cannot be trained here

    @property
    def name(self) -> str:
        """The name of its recipe."""
        return self.recipe.name

    @property
    def place(self) -> Path:
        """The folder where its network is, or will be."""
        return self.finished.path.parent if self.finished is not None and _has_network(self.finished) else self.folder

    @property
    def is_to_do(self) -> bool:
        """Whether it is not finished, and can be trained."""
        return self.finished is None and self.problem is None


@dataclass
class Planner:
    """Plans runs into the folder ``out``, given what is finished."""

    out: Path
    data: str | None
    finished: Sequence[Run]
    length: int | None = None  # epochs or updates of every run, where it has more
    own: Mapping[str, AnyRecipe] = field(default_factory=dict)  # recipes of the user's own table
    _planned: dict[tuple[str, int], PlannedRun] = field(default_factory=dict)
    _under_way: list[tuple[str, int]] = field(default_factory=list)
    _checksums: dict[str, str | ValueError] = field(default_factory=dict)
    _index: dict[tuple[int, str], list[Run]] | None = None  # what is finished, by seed and fingerprint

    def again(self, finished: Sequence[Run]) -> Planner:
        """Return a planner that knows more finished runs; the data are not read again."""
        return Planner(self.out, self.data, finished, self.length, self.own, _checksums=self._checksums)

    def plan(self, recipe: AnyRecipe, seed: int) -> PlannedRun:
        """Return the run of a recipe with a seed; the same one if it is asked for again."""
        key = (recipe.name, seed)
        if key in self._under_way:
            raise ValueError(f"{recipe.name} continues from itself, by way of {' -> '.join(dict(self._under_way))}")
        if key not in self._planned:
            self._under_way.append(key)
            self._planned[key] = self._plan(recipe, seed)
            self._under_way.pop()
        return self._planned[key]

    def _plan(self, recipe: AnyRecipe, seed: int) -> PlannedRun:
        if self.length is not None:
            recipe = shorten(recipe, self.length)
        recipe, needs = self._name_folders(recipe, seed)
        try:
            checksum = self._checksum(recipe)
        except ValueError as error:
            known = self._known_checksum(recipe)
            found = None if known is None else self._find(recipe, seed, known)
            problem = None if found else str(error)
            return PlannedRun(recipe, seed, self.out / recipe.name / f"seed-{seed}", None, found, needs, problem)
        folder = self.out / f"{recipe.name}-{fingerprint(recipe, checksum)}" / f"seed-{seed}"
        problem = next((f"{need.name}, which comes first: {need.problem}" for need in needs if need.problem), None)
        found = self._find(recipe, seed, checksum)
        return PlannedRun(recipe, seed, folder, checksum, found, needs, None if found else problem)

    def _name_folders(self, recipe: AnyRecipe, seed: int) -> tuple[AnyRecipe, tuple[PlannedRun, ...]]:
        """Return the recipe with folders in place of runs of other recipes, and those runs."""
        needs = []
        for section, name in RUNS.items():
            part = getattr(recipe, section)
            told = OTHER_RUN.fullmatch(getattr(part, name, None) or "")
            other = None if told is None else self._recipe(told["name"])
            if told is None or other is None:
                continue
            needs.append(self.plan(other, seed if told["seed"] == "{seed}" else int(told["seed"])))
            recipe = recipe.model_copy(update={section: part.model_copy(update={name: str(needs[-1].place)})})
        return recipe, tuple(needs)

    def _recipe(self, name: str) -> AnyRecipe | None:
        if name in self.own:
            return self.own[name]
        return load_any_recipe(name) if name in recipe_names() else None

    def _checksum(self, recipe: AnyRecipe) -> str:
        """Return the checksum of a recipe's data, computed once for each data set."""
        data = recipe.data
        files = [] if isinstance(data, Data) else [recipe.model_dump()["task"], data.train, data.validation, data.test]
        key = json.dumps([data.name, files])
        if key not in self._checksums:
            try:
                self._checksums[key] = data_checksum(recipe, self.data)
            except (ValueError, OSError, ImportError) as error:
                self._checksums[key] = ValueError(in_words(error))
        known = self._checksums[key]
        if isinstance(known, ValueError):
            raise known
        return known

    def _known_checksum(self, recipe: AnyRecipe) -> str | None:
        """Return the checksum of the data that finished runs of a recipe had; None where they had different ones."""
        known = {str(run.result["data"]["checksum"]) for run in self.finished if run.name == recipe.name}
        return known.pop() if len(known) == 1 else None

    def _find(self, recipe: AnyRecipe, seed: int, checksum: str) -> Run | None:
        """Return a finished run of this recipe on these data; one whose network is there comes first."""
        if self._index is None:
            self._index = {}
            for run in self.finished:
                data = str(run.result["data"]["checksum"])
                self._index.setdefault((run.seed, fingerprint(run.recipe, data)), []).append(run)
        fitting = self._index.get((seed, fingerprint(recipe, checksum)), [])
        return next((run for run in fitting if _has_network(run)), fitting[0] if fitting else None)


def missing(runs: Iterable[PlannedRun]) -> dict[PlannedRun, int]:
    """Return the runs to train before these are finished, each with the number of its wave.

    A finished run whose network is missing is trained again if another run needs the network.
    """
    depths: dict[PlannedRun, int] = {}
    for run in runs:
        if run.is_to_do:
            _depth(run, depths)
    return depths


def in_waves(runs: Iterable[PlannedRun], data: str | None) -> list[list[Job]]:
    """Return the jobs that finish these runs: those of a wave need only what the waves before it train.

    Seeds of one recipe are one job.
    """
    depths = missing(runs)
    waves: list[list[Job]] = [[] for _ in range(max(depths.values(), default=-1) + 1)]
    groups: dict[tuple[int, Path], list[PlannedRun]] = {}
    for run, depth in depths.items():
        groups.setdefault((depth, run.folder.parent), []).append(run)
    for (depth, folder), together in groups.items():
        seeds = tuple(sorted(run.seed for run in together))
        first = together[0]
        job = Job(first.recipe.to_dict(), seeds, str(folder.absolute()), data, first.checksum or "")
        waves[depth].append(job)
    return waves


def _depth(run: PlannedRun, depths: dict[PlannedRun, int]) -> int:
    """Enter ``run``, and what it needs and is missing, with the wave it belongs to."""
    if run not in depths:
        lacking = [need for need in run.needs if need.finished is None or not _has_network(need.finished)]
        depths[run] = max((_depth(need, depths) + 1 for need in lacking), default=0)
    return depths[run]


def _has_network(run: Run) -> bool:
    return run.path.name == RESULT


def check_length(recipes: Sequence[AnyRecipe], epochs: int | None, updates: int | None) -> int | None:
    """Return how long runs are to be; raise if that is given in another unit than the recipes have."""
    for option, given, unit in (("--epochs", epochs, "epochs"), ("--updates", updates, "updates")):
        other = next((recipe for recipe in recipes if unit_of(recipe) != unit), None)
        if given is not None and other is not None:
            have = f"{length_of(other):,} {unit_of(other)}"
            raise ValueError(f"{option} {given}: {other.name} has {have}; shorten it by --{unit_of(other)}")
    return epochs if epochs is not None else updates
