"""The tables of a report about our runs: every variant and run, layers, machines, data, what failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from factorized.experiments.reproduce.chart import seed_dots
from factorized.experiments.reproduce.runs import Found, Run
from factorized.experiments.reproduce.summary import Summary
from factorized.experiments.reproduce.table import Column, Columns, Table, Value
from factorized.experiments.reproduce.values import (
    count_value,
    mean_value,
    seconds_value,
    short_commit,
    slug_of,
    whole_value,
)
from factorized.experiments.reproduce.variant import Variant
from factorized.experiments.training.record import NORMS
from factorized.experiments.training.result import LOWER_IS_BETTER

VERSIONS = ("factorized", "torch", "cuda", "python")


def variant_table(variants: Sequence[Variant]) -> Table:
    """Return one row for each variant."""
    metrics = list(dict.fromkeys(variant.metric_name for variant in variants))
    several = len(metrics) > 1
    deployed = any(variant.deployed not in (None, variant.parameters) for variant in variants)
    score = Column("score" if several else metrics[0], number=True, parts=("score", "deviation"))
    columns: Columns[Variant] = [
        (Column("variant"), _variant_value),
        (score, lambda v: mean_value(v.score, tone="strong" if v.marks else "")),
        *([(Column("metric"), lambda v: Value(v.metric_name))] if several else []),
        (Column("n", number=True), lambda v: count_value(v.score)),
        (Column("each seed"), lambda v: _seeds_value(v, variants)),
        (Column("parameters", number=True), lambda v: whole_value(v.parameters)),
        *([(Column("deployed", number=True), lambda v: whole_value(v.deployed))] if deployed else []),
        (Column("seconds a run", number=True), lambda v: seconds_value(v.seconds)),
        (Column("data"), lambda v: Value(v.data)),
    ]
    note = (
        "Means ± standard deviations over the seeds, after the last epoch or update. “Best” marks a mean that "
        "is ahead of all others by more than the deviation of the difference; a single run is never marked."
    )
    if any(variant.metric in LOWER_IS_BETTER for variant in variants):
        note += " Lower is better for loss and perplexity."
    return Table.of("variants", "Variants", variants, columns, note)


def _variant_value(variant: Variant) -> Value:
    chips = (*variant.marks, *_chips(variant))
    return Value(variant.label, (variant.title,), small=_beside_name(variant), chips=chips)


def _seeds_value(variant: Variant, variants: Sequence[Variant]) -> Value:
    told = ", ".join(f"seed {run.seed}: {run.score:.2f}" for run in variant.runs)
    return Value(told, drawing=seed_dots([run.score for run in variant.runs], *_span(variant, variants), told))


def run_table(variants: Sequence[Variant]) -> Table:
    """Return one row for each run."""
    variant_of = {run: variant for variant in variants for run in variant.runs}
    columns: Columns[Run] = [
        (Column("recipe"), lambda run: Value(variant_of[run].title)),
        (Column("seed", number=True), lambda run: Value(str(run.seed), (run.seed,))),
        (Column("metric"), lambda run: Value(variant_of[run].metric_name, (run.metric,))),
        (Column("score", number=True), lambda run: Value(f"{run.score:.2f}", (run.score,))),
        (Column("seconds", number=True), _seconds_of),
        *((Column(name), partial(_of_machine, name)) for name in ("device", "torch", "factorized", "commit")),
        *([(Column("note", long=True), lambda run: Value(_note(run)))] if any(map(_note, variant_of)) else []),
        (Column("file", long=True), lambda run: Value(run.path.as_posix())),
    ]
    return Table.of("runs", "Runs", variant_of, columns)


def _seconds_of(run: Run) -> Value:
    return seconds_value(Summary.of([float(run.result["seconds"])]) if run.timed else None)


def _of_machine(name: str, run: Run) -> Value:
    return _machine_value(name, str(run.result["machine"].get(name) or ""))


def _machine_value(name: str, told: str) -> Value:
    return Value(short_commit(told) if name == "commit" else told, (told,))


def _note(run: Run) -> str:
    return str(run.result.get("note", f"{run.at_once} runs at once" if run.at_once > 1 else ""))


def layer_tables(variants: Sequence[Variant]) -> list[Table]:
    """Return ranks and norms of the products of each variant that recorded them, averaged over its runs."""
    tables: list[Table] = []
    for variant in variants:
        recorded = [run.result["layers"] for run in variant.runs if run.result.get("layers")]
        if not recorded:
            continue
        names = [name for name in NORMS if any(layer.get(name) is not None for layer in recorded[0])]
        columns = (
            Column("layer"),
            Column("kind"),
            Column("shape"),
            Column("rank"),
            Column("parameters", number=True),
            Column("of dense", number=True),
            *(Column(name.replace("_", " "), number=True) for name in names),
        )
        rows = [_layer_row(layers, names) for layers in zip(*recorded, strict=False)]
        note = f"Norms of the products after training, means of n = {len(recorded)}."
        slug = slug_of(f"layers-{variant.label}")
        taken = sum(table.slug == slug or table.slug.startswith(f"{slug}--") for table in tables)
        tables.append(Table(f"{slug}--{taken + 1}" if taken else slug, variant.title, columns, rows, note))
    return tables


def _layer_row(layers: Sequence[Mapping[str, Any]], names: Iterable[str]) -> Sequence[Value]:
    first = layers[0]
    share = first["params"] / first["dense_params"] if first.get("dense_params") else None
    norms = []
    for name in names:
        found = [layer[name] for layer in layers if layer.get(name) is not None]
        mean = sum(found) / len(found) if found else None
        norms.append(Value("" if mean is None else f"{mean:.4g}", (mean,)))
    return (
        Value(first["name"]),
        Value(first["kind"]),
        Value("×".join(map(str, first["shape"]))),
        Value(str(first["rank"])),
        whole_value(first["params"]),
        Value("" if share is None else f"{share:.1%}", (share,)),
        *norms,
    )


def machine_table(runs: Sequence[Run]) -> Table:
    """Return the hardware and versions of the runs, one row for each combination."""
    every = ("device", "threads", "processes", "runs_at_once", *VERSIONS, "commit", "system")
    names = [name for name in every if any(run.result["machine"].get(name) is not None for run in runs)]
    machines = (run.result["machine"] for run in runs)
    counted = Counter(tuple("" if m.get(name) is None else str(m[name]) for name in names) for m in machines)
    rows = [(*map(_machine_value, names, key), whole_value(count)) for key, count in counted.items()]
    columns = (*(Column(name.replace("_", " "), long=name == "system") for name in names), Column("runs", number=True))
    return Table("machines", "Hardware and versions", columns, rows)


def data_table(runs: Sequence[Run]) -> Table:
    """Return the data sets of the runs."""
    counted = Counter((run.result["data"]["name"], run.result["data"]["checksum"]) for run in runs)
    rows = [(Value(name), whole_value(count), Value(checksum)) for (name, checksum), count in counted.items()]
    return Table("data", "Data", (Column("data set"), Column("runs", number=True), Column("checksum")), rows)


def failed_table(found: Found) -> Table:
    """Return runs without a result, and files that were left out."""
    rows = [
        (
            Value(run.path.as_posix()),
            Value("failed" if run.error is not None else "not finished", tone="off" if run.error is not None else ""),
            Value(run.reached if run.error is None else f"{run.error} ({run.reached})"),
        )
        for run in found.unfinished
    ]
    rows += [(Value(file.path.as_posix()), Value("left out"), Value(file.why)) for file in found.left_out]
    return Table(
        "failed", "Failed, unfinished, left out", (Column("where"), Column("what"), Column("why", long=True)), rows
    )


def mixed(variant: Variant) -> tuple[str, ...]:
    """Return what differs between the runs of a variant: "mixed versions", "mixed hardware"."""
    machines = [run.result["machine"] for run in variant.runs]
    versions = {tuple(machine.get(name) for name in (*VERSIONS, "commit")) for machine in machines}
    hardware = {(machine.get("device"), machine.get("processes")) for machine in machines}
    return (*(("mixed versions",) if len(versions) > 1 else ()), *(("mixed hardware",) if len(hardware) > 1 else ()))


def _chips(variant: Variant) -> tuple[str, ...]:
    told = [f"shortened: {variant.shortened}"] if variant.shortened else []
    return (*told, *mixed(variant))


def _beside_name(variant: Variant) -> str:
    """Return what the label does not say: the recipe, and where it was changed."""
    changes = {key: value for key, value in variant.changes.items() if f"{key}={value}" not in variant.label}
    changed = ", ".join(f"{key} = {value}" for key, value in changes.items())
    parts = [variant.name] if not variant.label.startswith(variant.name) else []
    return "; ".join(parts + ([f"changed: {changed}"] if changed else []))


def _span(variant: Variant, variants: Sequence[Variant]) -> tuple[float, float]:
    """Return the least and the greatest score on the same data."""
    alike = [v for v in variants if (v.metric, v.data) == (variant.metric, variant.data)]
    scores = [run.score for other in alike for run in other.runs]
    return min(scores), max(scores)
