"""Wrong command lines: small products of verbs, options and wrong values, one `Case` each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from factorized.experiments.recipes.recipe import Recipe
from tests.hostile.place import LOW

Prepare = Callable[[Path], object]


@dataclass(frozen=True)
class Case:
    """A wrong command in the folder of `place.py`, after ``prepare`` has made something in it wrong too."""

    name: str
    words: tuple[str, ...]
    prepare: Prepare | None = None
    says: str = ""  # words that the message must hold, in any case

    def __str__(self) -> str:
        return self.name


VERBS: dict[str, tuple[str, ...]] = {  # a right command of each
    "recipes ls": ("recipes", "ls"),
    "recipes show": ("recipes", "show", "low.toml"),
    "plan": ("plan", "low.toml"),
    "plan --model": ("plan", "--model", "resnet8", "--ratio", "0.5"),
    "train": ("train", "low.toml", "--out", "new"),
    "evaluate": ("evaluate", LOW),
    "compose": ("compose", LOW, "--overwrite"),
    "data prepare": ("data", "prepare", "noise.npz", "--folder", "new"),
    "data ls": ("data", "ls"),
    "report": ("report", LOW, "--out", "new"),
    "demo": ("demo", "--seeds", "1", "--set", "schedule.epochs=1", "--quiet"),
}
NO_NUMBER = ("", "x", "nan", "1,5", "0x10", "--", "1e999")
NO_COUNT = (*NO_NUMBER, "0", "-1", "1.5", "9" * 20)
NO_SHARE = (*NO_NUMBER, "0", "-0.1", "inf", "-inf")
NO_DATA = ("", "nowhere", "notes.txt", "own.py", "empty", "out", "low.toml", "hf:", "hf:nobody", "hf:a/b/c", "a.toml")
NO_DEVICE = ("", "x", "cuda:99", "cuda:x", "cuda:-1", "tpu", "meta", "cpu:x", "cpu,cuda", "CPU", "gpu")
NO_CHANGE = (
    *(
        "",
        "x",
        "=",
        "=1",
        ".=1",
        "schedule",
        "schedule.epochs",
        "schedule.epochs=",
        "schedule=1",
        "schedule.epochs=1=2",
    ),
    *(
        "schedule.epochs=1\nrun.batch=2",
        "schedule.nothing=1",
        "nothing.epochs=1",
        "schedule.epochs.deeper=1",
        "a b.c=1",
    ),
    *(
        "schedule.epochs=[",
        "schedule.epochs={a=1}",
        "model.name=",
        "model.name=nothing",
        "data.name=nowhere",
        "a.b.c=1",
    ),
    *("name.x=1", "paper.table=x", "schedule..epochs=1", "extends.x=1", "'schedule'.epochs=0", "data.name=''"),
)
OPTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("plan", "--ratio", (*NO_SHARE, "2", "1e-9")),
    ("plan", "--rank-scale", NO_SHARE),
    ("plan", "--rank", NO_COUNT),
    ("plan", "--energy", (*NO_SHARE, "2")),
    ("plan", "--macs", (*NO_SHARE, "2", "1e-9")),
    ("plan", "--scheme", ("", "x", "LOW_RANK", "low-rank", "none")),
    ("plan", "--variant", ("", "x", "deep", "WIDE")),
    ("plan", "--model", ("resnet8", "")),
    ("plan", "--classes", ("5",)),
    ("plan", "--data", NO_DATA),
    ("plan", "--html", ("", "nowhere/plan.html", "empty", "notes.txt/plan.html", "/proc/plan.html")),
    ("plan --model", "--rank", ("3",)),
    ("plan --model", "--classes", NO_COUNT),
    ("plan --model", "--size", NO_COUNT),
    ("plan --model", "--channels", NO_COUNT),
    ("plan --model", "--scheme", ("", "x", "none", "overcomplete")),
    ("plan --model", "--variant", ("wide", "deep", "x")),
    ("plan --model", "--data", NO_DATA),
    ("train", "--seeds", NO_COUNT),
    ("train", "--seed", (*NO_NUMBER, "-1", "1.5", "9" * 20)),
    ("train", "--out", ("", "notes.txt", "notes.txt/deeper", "/proc/nothing", "/dev/null", "x" * 300, "a\0b")),
    ("train", "--device", NO_DEVICE),
    ("train", "--data", NO_DATA),
    ("evaluate", "--device", NO_DEVICE),
    ("evaluate", "--data", (*NO_DATA, "photos", "batches")),
    ("compose", "--device", NO_DEVICE),
    ("compose", "--data", (*NO_DATA, "photos", "batches")),
    ("compose", "--to", ("", "x", "ONNX", "pt2", "plain,onnx")),
    (
        "compose",
        "--out",
        ("", "x", "x.onnx", "x.txt", "nowhere/x.safetensors", "b.safetensors", "own.py/x.safetensors"),
    ),
    ("data prepare", "--name", ("", ".", "..", "a/b", "/a", "x.npz", "x.safetensors", "hf:x", "a\0b", "x" * 300)),
    ("data prepare", "--folder", ("", "notes.txt", "notes.txt/deeper", "/proc/nothing", "a\0b")),
    ("data ls", "--folder", ("", "nowhere", "notes.txt", "a\0b")),
    ("report", "--out", ("", "notes.txt", "notes.txt/deeper", "/proc/nothing", "/dev/null", "a\0b")),
    ("demo", "--seeds", NO_COUNT),
    ("demo", "--out", ("", "notes.txt", "notes.txt/deeper", "/proc/nothing", "/dev/null")),
)
ARGUMENTS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    ((), ("", "x", "trian", "--nope", "-Z", "train,plan", "Train", "--version=3")),
    (("report",), ("", "nowhere", "notes.txt", "empty", "low.toml", "a\0b")),
    (("recipes",), ("", "x", "list", "-Z")),
    (("data",), ("", "x", "list", "download")),
    (("recipes", "ls"), ("nothing", "digits/x", "DIGITS", "a\0b")),
    (
        ("recipes", "show"),
        (
            "",
            "x",
            "digits",
            "digits/",
            "nowhere.toml",
            "a.toml",
            "notes.txt",
            "../low",
            "/",
            "digits/resnet9",
            "a\0.toml",
        ),
    ),
    (("plan",), ("", "x", "digits", "nowhere.toml", "a.toml", "resnet8", LOW, "notes.txt")),
    (("train",), ("", "x", "digits", "nowhere.toml", "a.toml", "resnet8", LOW, "notes.txt", "low")),
    (("evaluate",), ("", "x", ".", "/", "out", "out/low", f"{LOW}/result.json", f"{LOW}/model", "notes.txt", "a\0b")),
    (("compose",), ("", "x", ".", "/", "out", "out/low", f"{LOW}/result.json", f"{LOW}/model", "notes.txt", LOW)),
    (
        ("data", "prepare"),
        (
            "",
            "x",
            ".",
            "/",
            "empty",
            "out",
            "own.py",
            "notes.txt",
            "low.toml",
            "digit",
            "hf:",
            "hf:x",
            f"{LOW}/model",
            "a\0b",
        ),
    ),
)
TOGETHER: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("plan", ("--ratio", "0.1", "--rank", "3"), "one of"),
    ("plan", ("--energy", "0.5", "--macs", "0.5"), "one of"),
    ("plan", ("--scheme", "overcomplete", "--ratio", "0.1"), "ratio"),
    ("plan", ("--size", "8"), "--size"),
    ("plan --model", ("low.toml",), "--model"),
    ("plan --model", ("--size", "8", "--data", "noise.npz"), "--size"),
    ("plan --model", ("--set", "factorize.scheme=none"), "scheme"),
    ("train", ("--seed", "1", "--seeds", "2"), "--seeds"),
    ("train", ("--resume", "--overwrite"), "--overwrite"),
    ("train", ("--resume",), "resume"),
    ("train", ("--out", "out"), "--overwrite"),
    ("train", ("--out", "out", "--resume", "--set", "schedule.epochs=2"), "epochs"),
    ("train", ("--out", "out", "--resume", "--set", "optimizer.lr=0.2"), "lr"),
    ("train", ("--out", "out", "--resume", "--seed", "7"), "resume"),
    ("train", ("--out", "out", "--resume", "--data", "noise.npz"), ""),
    ("train", ("--ratio", "0.1"), ""),
    ("compose", ("--to", "onnx", "--out", "x.safetensors"), ".onnx"),
    ("compose", ("--to", "export", "--out", "x.onnx"), ".pt2"),
    ("data prepare", ("--name", "small", "--folder", "data"), ""),
)
MISSING = (
    *(("plan",), ("train",), ("evaluate",), ("compose",), ("data", "prepare"), ("recipes", "show")),
    *(("plan", "--html", "x.html"), ("plan", "--set", "run.batch=1"), ("train", "--seeds", "2")),
)
# What a field may not be, by what it is; as TOML has it.
WRONG_TYPES: dict[object, tuple[str, ...]] = {
    bool: ("1", "0.0", "'true'", "[]", "{}", "nan", "1979-05-27"),
    int: ("1.5", "true", "'1'", "[1]", "{}", "nan", "inf", "x", "07:32:00"),
    float: ("true", "'1'", "[1.0]", "{}", "nan", "-inf", "x", "1e999", "1979-05-27"),
    str: ("1", "true", "[]", "{}", "1.5", "1979-05-27"),
    list: ("1", "true", "{}", "[[]]", "[{}]", "[nan]"),
    Literal: ("1", "true", "'nothing'", "[]", "{}", "''"),
}
OUT_OF_BOUNDS: dict[str, tuple[str, ...]] = {
    "data.crop_padding": ("-1", "100000000"),
    "data.cutout": ("-1", "100000000"),
    "data.workers": ("-1", "500"),
    "factorize.width": ("0", "-1", "nan"),
    "factorize.dims": ("[]", "[0]", "[-1]", "[1.5]"),
    "factorize.order": ("0", "-1", "1000"),
    "factorize.refinements": ("-1",),
    "factorize.ratio": ("0", "-1", "2", "1e-12"),
    "factorize.rank_scale": ("0", "-1"),
    "factorize.rank": ("0", "-1"),
    "factorize.energy": ("0", "-1", "1.5"),
    "factorize.macs": ("0", "-1", "2"),
    "factorize.include": ("['nothing*']", "[]", "['']"),
    "factorize.exclude": ("['*']",),
    "factorize.attention": ("['x']",),
    "decay.strength": ("-1", "nan", "inf"),
    "decay.rest": ("-1",),
    "decay.norms": ("'nowhere'", "'out/dense/seed-0'", "''"),
    "decay.kind": ("normalized",),
    "optimizer.lr": ("0", "-1", "nan"),
    "optimizer.momentum": ("-0.1", "1", "2"),
    "optimizer.clip": ("0", "-1"),
    "schedule.epochs": ("0", "-1"),
    "schedule.milestones": ("[0]", "[-1]", "['x']", "[nan]"),
    "schedule.factor": ("0", "-1"),
    "schedule.warmup_epochs": ("-1",),
    "schedule.warmup_factor": ("0", "-1"),
    "run.batch": ("0", "-1", "1000000000"),
    "run.label_smoothing": ("-0.1", "1"),
    "run.evaluate_every": ("0", "-1"),
    "run.checkpoint_every": ("0", "-1"),
}


def command_lines() -> Iterator[Case]:
    """Yield every wrong command line that needs no file to be wrong."""
    for verb, option, values in OPTIONS:
        for value in values:
            yield Case(f"{verb} {option} {value[:20]!r}", (*VERBS[verb], option, value))
        yield Case(f"{verb} {option} without a value", (*VERBS[verb], option))
    for verb, words in VERBS.items():
        for surplus in (("--nope",), ("--nope=1",), ("-Z",), ("--quiet=maybe",), ("surplus", "words")):
            yield Case(f"{verb} {' '.join(surplus)}", (*words, *surplus))
    for words, values in ARGUMENTS:
        for value in values:
            yield Case(f"{' '.join(words)} {value[:30]!r} as argument", (*words, value))
    for verb, words, says in TOGETHER:
        yield Case(f"{verb} {' '.join(words)} together", (*VERBS[verb], *words), says=says)
    for words in MISSING:
        yield Case(f"{' '.join(words)} without argument", words)
    for verb in ("plan", "plan --model", "train", "demo"):
        for change in NO_CHANGE:
            if verb == "plan --model" and change.startswith("data."):
                continue  # it looks at no data
            yield Case(f"{verb} --set {change!r}", (*VERBS[verb], "--set", change))


def wrong_fields() -> Iterator[Case]:
    """Yield a change of every field of a recipe to what it may not be; the verbs take turns."""
    verbs = ("train", "plan")
    changes = [f"{field}={value}" for field, values in OUT_OF_BOUNDS.items() for value in values]
    for field, kind in _fields(Recipe):
        changes += [f"{field}={value}" for value in WRONG_TYPES[kind]]
    for number, change in enumerate(dict.fromkeys(changes)):
        bound = change.partition("=")[0] in OUT_OF_BOUNDS
        verb = "train" if bound else verbs[number % len(verbs)]  # a plan does not look at how a run is trained
        yield Case(f"{verb} --set {change}", (*VERBS[verb], "--set", change))


def _fields(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, field in section.model_fields.items():
        kinds = [kind for kind in _choices(field.annotation) if kind is not type(None)]
        if isinstance(kinds[0], type) and issubclass(kinds[0], BaseModel):
            yield from _fields(kinds[0], f"{prefix}{name}.")
        elif prefix and len(kinds) == 1:
            yield f"{prefix}{name}", get_origin(kinds[0]) or kinds[0]


def _choices(annotation: Any) -> tuple[Any, ...]:
    choices = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return tuple(get_args(choice)[0] if get_origin(choice) is Annotated else choice for choice in choices)
