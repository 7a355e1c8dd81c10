"""The stages of a compression, each kept in its folder as soon as it is done, so that nothing is done twice."""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import nn

from factorized.experiments.compress.layers import differences, layer_calls, layer_rows, losses_alone, output_spectra
from factorized.experiments.compress.subject import Plain, Subject
from factorized.experiments.data.explain import writing_to
from factorized.experiments.data.progress import Progress, silent
from factorized.experiments.recipes.recipe import Factorize
from factorized.experiments.recipes.text import AnyRecipe
from factorized.experiments.training.folder import COMPRESSION, writing
from factorized.experiments.training.progress import Reporter
from factorized.experiments.training.record import describe_machine, write_json
from factorized.experiments.training.result import RESULT
from factorized.experiments.training.state import OtherRun
from factorized.files.checksum import is_sealed
from factorized.formats.product import LowRank
from factorized.nn.running import count_parameters
from factorized.planning.advice import Change, OutOfReach
from factorized.planning.calibration import Calibrated
from factorized.planning.plan import Plan
from factorized.planning.planner import plan as make_plan
from factorized.surgery.compose import compose, is_factorized
from factorized.surgery.factorize import factorize
from factorized.surgery.lower import lower

COMPRESSED, RECOVERED = "compressed", "recovered"  # folders
LOGS = ("metrics.jsonl", "checkpoint.pt", "events.out.tfevents.*")  # of a run: no network needs them to be opened
SAMPLES = 2048
ELSEWHERE = "choose another folder by --out"
Ranks = Literal["loss", "outputs", "uniform"]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """The settings of a compression."""

    ratio: float
    ranks: Ranks = "loss"  # how the budget is spent
    kind: Literal["spatial", "channel"] = "spatial"  # of factorized convolutions
    exclude: tuple[str, ...] = ()
    keep_first_and_last: bool = True
    multiple_of: int | None = None
    samples: int = SAMPLES  # examples to calibrate with
    layers_per_pass: int | None = None
    sequential: bool = False  # layers make up for the errors of those before them

    def __post_init__(self) -> None:
        if not 0 < self.ratio < 1:
            raise ValueError(
                f"--ratio must be above 0 and below 1, the share of parameters to keep, got {self.ratio:g}"
            )

    @property
    def factorize(self) -> Factorize:
        """The same settings as fields of a recipe."""
        return Factorize(
            scheme="low_rank",
            ratio=self.ratio,
            allocate="uniform" if self.ranks == "uniform" else "spectrum",
            kind=self.kind,
            exclude=list(self.exclude),
            keep_first_and_last=self.keep_first_and_last,
            multiple_of=self.multiple_of,
        )


class Work:
    """One compression in its folder.

    Args:
        subject: the network.
        settings: what is asked.
        folder: where everything is written. If it holds the same compression, what is finished is kept.
        overwrite: start over, whatever the folder holds.
        say: called with a line for every stage.
        progress: called with a stage, what is done of it, and its total.
    """

    def __init__(
        self,
        subject: Subject,
        settings: Settings,
        folder: Path,
        *,
        overwrite: bool = False,
        say: Say = print,
        progress: Progress = silent,
        reporter: Reporter | None = None,
    ) -> None:
        self.subject, self.settings, self.folder = subject, settings, folder
        self.say, self.progress, self.reporter = say, progress, reporter or Reporter(quiet=True)
        asked = {**asdict(settings), "model": subject.name, "identity": list(subject.identity)}
        del asked["layers_per_pass"]  # it changes the memory that is taken, and no result
        self.asked: dict[str, Any] = json.loads(json.dumps(asked))
        self.state = self._begin(overwrite)

    def run(self, recipe: AnyRecipe | None, plain: Sequence[Plain] = ()) -> dict[str, Any]:
        """Do every stage that is not done, and return what is known; ``recipe`` recovers the network, if given."""
        for form in plain:
            if form not in self.subject.forms:
                raise ValueError(
                    f"{self.subject.name} cannot be written as {form}: transformers would not open it. Ask for "
                    f"{' or '.join(self.subject.forms)}, or lower it in Python: fz.lower(fz.from_pretrained(...))"
                )
        if "plan" not in self.state:
            self._check_reach()
        self._stage("before", self._evaluate_dense)
        self._stage("plan", self._plan)
        self._stage("compressed", self._factorize)
        if recipe is not None:
            self._check_recovery(recipe)
            self._stage("recovered", lambda: self._recover(recipe))
        wanted = ["compressed", *(["recovered"] if "recovered" in self.state else [])]
        for form in self.subject.forms:
            if form in plain or form in self.state:
                self._write_plain(form, wanted[-1])
        if not set(wanted).issubset(self.state.get("differences", ())):
            self.state.pop("differences", None)
            self._stage("differences", lambda: self._differences(wanted))
        return self.state

    @cached_property
    def batches(self) -> list[Any]:
        """The batches to calibrate with."""
        return self.subject.batches(self.settings.samples)

    @cached_property
    def dense(self) -> nn.Module:
        """The trained network. Compressing it in place deletes this property, so that it is read again."""
        network = self.subject.dense()
        if is_factorized(network):
            raise ValueError(
                f"{self.subject.name} is factorized already, with {count_parameters(network):,} parameters; compress a "
                "dense network, or lower its ranks by fz.truncate"
            )
        return network

    def _begin(self, overwrite: bool) -> dict[str, Any]:
        """Return the state of the same compression in the folder, or a new one."""
        path = self.folder / COMPRESSION
        fresh = {"asked": self.asked, "score": self.subject.score, "lower_is_better": self.subject.lower_is_better}
        folders = [self.folder / name for name in (COMPRESSED, RECOVERED, "lowered", "composed")]
        with writing_to(self.folder, ELSEWHERE):
            self.folder.mkdir(parents=True, exist_ok=True)
            for pattern in ("compress.*.tmp", "*/model.safetensors.*.tmp"):  # of a process that was killed
                for unfinished in self.folder.glob(pattern):
                    unfinished.unlink()
            if overwrite:
                path.unlink(missing_ok=True)
                for place in folders:
                    shutil.rmtree(place, ignore_errors=True)
            if not path.is_file():
                if others := [place for place in folders if place.exists()]:
                    raise ValueError(
                        f"{others[0]} exists, and is not part of a compression; choose another --out, or let "
                        "--overwrite delete it"
                    )
                machine = describe_machine(self.subject.device)
                return {**fresh, "machine": machine, "seconds": {}, "notes": [], "files": {}}
            text = path.read_bytes()
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict) or not is_sealed(found) or "files" not in found:
            raise ValueError(
                f"{path} is damaged, was changed, or is of an older version; start over with --overwrite, or choose "
                "another --out"
            )
        found.pop("checksum")
        other = [key for key, value in self.asked.items() if found["asked"].get(key) != value]
        if "plan" not in found and not {"model", "identity"}.intersection(other):  # no setting was used yet
            found["asked"] = self.asked
        elif other:
            key = other[0]
            differs = (
                f"the weights, files or data of {self.subject.name} were others then"
                if key == "identity"
                else f"{key} is {found['asked'].get(key)!r} there, and {self.asked[key]!r} in this command"
            )
            raise ValueError(
                f"{self.folder} holds another compression: {differs}; choose another --out, or start over with "
                "--overwrite"
            )
        gone = {  # what was deleted is done again
            name
            for name, files in found["files"].items()
            if not all((self.folder / name / file).is_file() for file in files)
        }
        if RECOVERED in gone:  # without its result, a run goes on from its checkpoint, and writes its network again
            for result in (self.folder / RECOVERED).glob(f"*/{RESULT}"):
                result.unlink()
        gone |= {"differences"} if gone.intersection(found).intersection((COMPRESSED, RECOVERED)) else set()
        return {name: value for name, value in found.items() if name not in gone}

    def _stage(self, name: str, work: Callable[[], Any]) -> None:
        """Do one stage, unless it is done, and write down what it found."""
        if name in self.state:
            return
        began = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            self.state[name] = work()
        notes = dict.fromkeys(str(one.message) for one in caught if issubclass(one.category, UserWarning))
        for note in notes:
            self.say(f"note: {note}")
        self.state["notes"] = [*dict.fromkeys([*self.state["notes"], *notes])]
        self.state["seconds"][name] = time.perf_counter() - began
        if (self.folder / name).is_dir():
            self.state["files"][name] = _files(self.folder / name)
        with writing(self.folder):
            write_json(self.folder / COMPRESSION, self.state)

    def _evaluate_dense(self) -> dict[str, Any]:
        scores = self.subject.evaluate(self.dense)
        self.say(f"{self.subject.name}: {count_parameters(self.dense):,} parameters, {self.told(scores)}")
        return {"scores": scores, "parameters": count_parameters(self.dense)}

    def _calibration(self, stage: str) -> Calibrated:
        settings, watched = self.settings, Watched(self.batches, self.progress, stage)
        loss = self.subject.loss if settings.ranks == "loss" else None
        return Calibrated(watched, layers_per_pass=settings.layers_per_pass, loss=loss, sequential=settings.sequential)

    def _check_reach(self) -> None:
        """Raise if the settings allow no plan: a uniform one shows it before anything is tested or calibrated."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the plan itself gives them
            self._make_plan(None)

    def _plan(self) -> dict[str, Any]:
        made = self._make_plan(None if self.settings.ranks == "uniform" else self._calibration("choosing ranks"))
        spectra = output_spectra(self.dense, made, self._calibration("reading spectra"))
        layers = "1 layer" if len(made.layers) == 1 else f"{len(made.layers)} layers"
        self.say(f"plan: {layers} factorized, {made.params_after:,} of {made.params:,} parameters")
        return {"plan": made.to_dict(), "layers": layer_rows(made, spectra), "examples": sum(map(_size, self.batches))}

    def _make_plan(self, calibration: Calibrated | None) -> Plan:
        """Return a plan of the dense network as asked: by the spectra that a calibration shows, or uniform."""
        settings = self.settings
        try:
            return make_plan(
                self.dense,
                LowRank(settings.kind),
                ratio=settings.ratio,
                allocate="uniform" if calibration is None else "spectrum",
                calibration=calibration,
                exclude=settings.exclude,
                keep_first_and_last=settings.keep_first_and_last,
                multiple_of=settings.multiple_of,
                example_input=self.subject.example_input,
            )
        except OutOfReach as error:
            raise ValueError(error.told(_as_options, "none of its layers is left out by an option")) from None

    @cached_property
    def plan(self) -> Plan:
        """The plan, once it was made."""
        return Plan.from_dict(self.state["plan"]["plan"])

    def _factorize(self) -> dict[str, Any]:
        dense = self.dense
        del self.dense  # it is changed in place
        calibration = self._calibration("calibrating")
        network = factorize(
            dense, self.plan, init=calibration, progress=lambda done, total: self.progress("factorizing", done, total)
        )
        self.subject.save(network, self.folder / COMPRESSED)
        scores = self.subject.evaluate(network)
        self.say(f"compressed: {count_parameters(network):,} parameters, {self.told(scores)}")
        return {"scores": scores, "parameters": count_parameters(network)}

    def _check_recovery(self, recipe: AnyRecipe) -> None:
        before = self.state.get("recovered")
        if before is not None and before["asked"] != recipe.to_dict():
            raise ValueError(
                f"{self.folder} was recovered by another recipe ({before['asked']['name']}); choose another --out, or "
                "start over with --overwrite"
            )

    def _recover(self, recipe: AnyRecipe) -> dict[str, Any]:
        network = self.subject.load(self.folder / COMPRESSED)
        try:
            result = self.subject.train(recipe, network, self.plan, self.folder / RECOVERED, self.reporter)
        except OtherRun as error:  # of an earlier recovery that was stopped
            raise ValueError(
                f"{error.differs}; give --recover and --device as for that recovery, choose another --out, or start "
                "over with --overwrite"
            ) from None
        del network  # what is tested is what was written
        scores = self.subject.evaluate(self.subject.trained(self.folder / RECOVERED))
        self.say(f"recovered: {self.told(scores)}, after {result['seconds']:.0f} s of {recipe.name}")
        kept = {"asked": recipe.to_dict(), "recipe": result["recipe"], "history": result["history"]}
        return {"scores": scores, "parameters": result["parameters"], **kept}

    def final(self) -> nn.Module:
        """Return the compressed network, recovered if it was."""
        if "recovered" in self.state:
            return self.subject.trained(self.folder / RECOVERED)
        return self.subject.load(self.folder / COMPRESSED)

    def _write_plain(self, form: Plain, of: str) -> None:
        """Write a plain form of the network, unless it is there; one from before a recovery is written again."""
        if self.state.get(form, {"of": of})["of"] != of:
            del self.state[form]

        def written() -> dict[str, Any]:
            network = self.final().cpu()
            plain = (lower(network) if form == "lowered" else compose(network)).eval()
            self.subject.save(plain, self.folder / form)
            scores = self.subject.evaluate(plain)
            self.say(f"{form}: {count_parameters(plain):,} parameters, {self.told(scores)}; {self.folder / form}")
            return {"scores": scores, "parameters": count_parameters(plain), "of": of}

        self._stage(form, written)

    def _differences(self, wanted: Sequence[str]) -> dict[str, dict[str, float]]:
        """Return how the outputs of every layer differ from the dense network's, also by itself.

        One network is held at a time, beside the dense network's calls of its layers on one batch.
        """
        names = [entry.name for entry in self.plan.layers]
        batch = self.batches[len(self.batches) // 2]  # of texts, the first are the shortest
        calls = layer_calls(self.dense, names, batch)
        del self.dense
        found = {}
        for stage in wanted:
            network = self.subject.load(self.folder / COMPRESSED) if stage == "compressed" else self.final()
            if stage == "compressed":
                found["alone"] = losses_alone(network, calls)
            found[stage] = differences(network, calls, batch)
            del network
        return found

    def told(self, scores: dict[str, float]) -> str:
        """Return the score as text for a message."""
        name = self.subject.score
        return f"{name} {scores[name]:.2f}{' %' if name == 'accuracy' else ''}"


def _files(folder: Path) -> list[str]:
    """Return the names of the files in a folder, those of logs left out."""
    files = (path for path in folder.rglob("*") if path.is_file() and not any(path.match(log) for log in LOGS))
    return sorted(path.relative_to(folder).as_posix() for path in files)


def _size(batch: Any) -> int:
    """Return how many examples a batch has: tensors by name, or inputs and labels."""
    return len(next(iter(batch.values())) if isinstance(batch, dict) else batch[-1])


def _as_options(change: Change) -> str | None:
    """Return the options of ``factorized compress`` that make this change of a plan, or None if it has none."""
    written = {"keep_first_and_last": "--first-and-last", "exclude": "no --exclude", "multiple_of": "no --multiple-of"}
    return " with ".join(written[name] for name in change) if change.keys() <= written.keys() else None


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """Make the folder of a compression, if it is not there; an error removes what was made and is still empty."""
    with writing_to(folder, ELSEWHERE):
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # the first that holds something ends it
            for path in new:
                path.rmdir()
        raise


class Watched:
    """An iterable of batches that reports how many of them were taken."""

    def __init__(self, batches: Sequence[Any], progress: Progress, stage: str) -> None:
        self.batches, self.progress, self.stage = batches, progress, stage

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.batches):
            yield batch
            self.progress(self.stage, number + 1, len(self.batches))
