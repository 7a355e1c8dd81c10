"""The result of a run, ``result.json``: one schema for images and for text, and reading it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from factorized.experiments.data.explain import first_problem, in_words
from factorized.files.checksum import is_sealed

RESULT = "result.json"
LOWER_IS_BETTER = ("loss", "perplexity")  # of the figures that a run is judged by
Result = dict[str, Any]  # what a run's result.json holds
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


class _Part(BaseModel):
    """Fields that other code reads; a result may have more."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class _Recipe(_Part):
    name: Annotated[str, Field(min_length=1)]
    model: dict[str, Any] = {}
    factorize: dict[str, Any] = {}
    schedule: dict[str, Any] = {}


class _Data(_Part):
    name: str
    checksum: str


class _Images(_Data):
    classes: Annotated[list[str], Field(min_length=1)]
    channels: Positive
    size: Annotated[list[Positive], Field(min_length=2, max_length=2)]
    mean: list[float] = []  # not given, or one for each channel
    std: list[Annotated[float, Field(gt=0)]] = []

    @model_validator(mode="after")
    def _one_for_each_channel(self) -> Self:
        for name in self.model_fields_set & {"mean", "std"}:
            if len(getattr(self, name)) != self.channels:
                raise ValueError(f"{name} must be {self.channels} numbers, one for each channel")
        return self


class _Began(_Part):
    """The run that another continued from: whole, or summarized for ``results/``."""

    recipe: _Recipe | str
    seed: Count
    changes: list[str] = []


class _Size(_Part):
    parameters: Count


class _Layer(_Part):
    name: str
    kind: str
    shape: list[int]
    rank: str
    params: int
    dense_params: int | None
    frobenius: float
    spectral: float | None
    nuclear: float | None
    nuclear_bound: float | None
    stable_rank: float | None


class _Result(_Part):
    recipe: _Recipe
    seed: Count
    parameters: Positive
    seconds: Annotated[float, Field(ge=0)]
    machine: dict[str, Any]
    data: _Data
    history: list[dict[str, int | float | None]]
    layers: list[_Layer] = []
    composed: _Size | None = None
    from_run: _Began | None = None
    files: dict[str, str] | None = None  # SHA-256 of what is in the folder of the network, by name


class _ImageResult(_Result):
    accuracy: Annotated[float, Field(ge=0, le=100)]
    data: _Images


class _TextResult(_Result):
    task: str
    score: str
    scores: dict[str, Any]

    @model_validator(mode="after")
    def _has_its_score(self) -> Self:
        if not isinstance(self.scores.get(self.score), int | float):
            raise ValueError(f"score = {self.score!r} must name a number among scores, got {self.scores}")
        return self


def is_text(result: Result) -> bool:
    """Return whether a result is of a run on text."""
    return not result.keys().isdisjoint({"task", "score", "scores"})


def read_result(run: Path, on: Literal["images", "text"] | None = None) -> Result:
    """Return the result in the folder of a finished run, on images or on text if only that one will do."""
    path = run / RESULT
    if not path.is_file():
        within = sorted(path.parent for path in run.glob("*/result.json")) if run.is_dir() else []
        hint = f"did you mean {within[0]}?" if within else "give the folder of a finished run, such as out/NAME/seed-0"
        raise ValueError(f"there is no {path}; {hint}")
    try:
        result = read_result_file(path, sealed=True)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; delete it and train the run again") from None
    found = "text" if is_text(result) else "images"
    if on not in (None, found):
        raise ValueError(f"{path} is a run on {found}; this needs one on {on}")
    return result


def read_result_file(path: Path, *, sealed: bool = False) -> Result:
    """Return what a file of any name holds if it is the result of a run; a ``ValueError`` says why it is none.

    The checksum is left out of what is returned; a file without one is refused only if ``sealed``.
    """
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot be read: {in_words(error, named=False)}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("not the result of a run: it holds no fields")
    schema = _TextResult if is_text(found) else _ImageResult
    needed = [name for name, field in schema.model_fields.items() if field.is_required()]
    missing = [name for name in (*needed, *(["checksum"] if sealed else [])) if name not in found]
    if missing:
        raise ValueError(f"not the result of a run: it has no {', '.join(missing)}")
    if "checksum" in found and not is_sealed(found):
        raise ValueError("damaged, or changed since it was written: its checksum does not match")
    try:
        schema.model_validate(found)
    except ValidationError as error:
        raise ValueError(f"not the result of a run: {first_problem(error)}") from None
    return {key: value for key, value in found.items() if key != "checksum"}
