"""The tables of a report: the paper beside ours, every variant and run, layers, machines, what is missing or failed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from factorized.experiments.recipes.find import paper_cells
from factorized.experiments.recipes.tables import Cell
from factorized.experiments.reproduce.chart import seed_dots
from factorized.experiments.reproduce.compare import BAND, Comparison
from factorized.experiments.reproduce.runs import LOWER_IS_BETTER, Found, Run
from factorized.experiments.reproduce.summary import Summary
from factorized.experiments.reproduce.table import Column, Table, Value
from factorized.experiments.reproduce.variant import Variant

VERSIONS = ("factorized", "torch", "cuda", "python")
NORMS = ("frobenius", "spectral", "nuclear", "nuclear_bound", "stable_rank")
DASH = "–"


def paper_table(comparisons: Sequence[Comparison]) -> Table:
    """Return the paper's figures beside ours, one row for each that was trained."""
    columns = (
        Column("cell", parts=("recipe", "network and data", "method", "column")),
        Column("paper", number=True, parts=("paper", "paper deviation")),
        Column("ours", number=True, parts=("ours", "ours deviation")),
        Column("n", number=True),
        Column("difference", number=True),
        Column("in deviations", number=True),
        Column("verdict"),
        Column("metric"),
        Column("table", number=True),
    )
    rows, tones = [], []
    for found in comparisons:
        if found.variant is None:
            continue
        cell, variant = found.cell, found.variant
        rows.append(
            (
                Value(
                    variant.label,
                    (variant.name, cell.grid, cell.row, cell.column),
                    small=f"{cell.grid}: {cell.row}, {cell.column}",
                    chips=mixed(variant),
                ),
                _mean(found.paper),
                _mean(found.ours),
                _count(found.ours),
                _signed(found.difference),
                _signed(found.in_deviations, found.verdict),
                Value(_verdict(found), (found.verdict,), tone=found.verdict.replace(" ", "-")),
                Value(cell.metric),
                Value(str(cell.table), (cell.table,)),
            )
        )
        tones.append(found.verdict.replace(" ", "-"))
    note = (
        f"The paper's figures are means of three trials. A figure is within the band if it is at most {BAND:g} of the "
        "paper's deviations away. Shortened and changed runs are not judged."
    )
    return Table("paper", "The paper and ours", columns, rows, note, tones)


def grid_tables(comparisons: Sequence[Comparison]) -> list[Table]:
    """Return the parts of the paper's tables as the paper prints them, with ours above each figure."""
    trained: dict[str | None, Comparison] = {}
    for found in comparisons:  # where a recipe was also trained shorter, the whole run is shown
        known = trained.get(found.cell.recipe)
        if known is None or (found.variant is not None and found.variant.comparable):
            trained[found.cell.recipe] = found
    wanted = {(c.cell.table, c.cell.grid, c.cell.metric) for c in comparisons if c.variant is not None}
    return [
        _grid_table(place, list(cells), trained)
        for place, cells in groupby(paper_cells(), key=lambda cell: (cell.table, cell.grid, cell.metric))
        if place in wanted
    ]


def _grid_table(
    place: tuple[int | None, str, str], cells: Sequence[Cell], trained: Mapping[str | None, Comparison]
) -> Table:
    number, grid, metric = place
    names = list(dict.fromkeys(cell.column for cell in cells))
    by_row: dict[tuple[str, str | None], dict[str, Cell]] = {}
    for cell in cells:
        by_row.setdefault((cell.row, cell.source), {})[cell.column] = cell
    parts = ("ours", "ours deviation", "n", "paper", "paper deviation")
    columns = [Column("method"), *(Column(n, number=True, parts=tuple(f"{n} {part}" for part in parts)) for n in names)]
    rows, tones = [], []
    for (label, source), found in by_row.items():
        cited = f"quoted from {source}" if source is not None else ""
        row = [Value(label, small=cited)]
        for name in names:
            row.append(_grid_value(found.get(name), trained))
        rows.append(row)
        tones.append("quoted" if cited else "")
    better = "lower" if metric == "error" else "higher"
    note = f"Ours above, the paper's below; test {metric} in percent, {better} is better. {DASH}: not trained."
    return Table(_slug(f"table-{number}-{grid}"), f"Table {number}: {grid}", columns, rows, note, tones)


def _grid_value(cell: Cell | None, trained: Mapping[str | None, Comparison]) -> Value:
    if cell is None:
        return Value("", (None,))
    printed = "" if cell.figure is None else str(Summary(cell.figure, cell.deviation, 3))
    found = trained.get(cell.recipe) if cell.recipe is not None else None
    if found is None:  # a figure of others
        return Value(printed, (None, None, None, cell.figure, cell.deviation))
    ours = found.ours
    if ours is None:
        return Value(DASH, (None, None, 0, cell.figure, cell.deviation), small=printed, tone="missing")
    chips = ("shortened",) if found.verdict == "shortened" else ("changed",) if found.verdict == "changed" else ()
    best = "best of its size" in (found.variant.marks if found.variant is not None else ())
    raw = (ours.mean, ours.deviation, ours.n, cell.figure, cell.deviation)
    return Value(str(ours), raw, f"{printed}, n = {ours.n}", found.verdict, (*chips, *(("best",) if best else ())))


def variant_table(variants: Sequence[Variant]) -> Table:
    """Return one row for each variant."""
    metrics = list(dict.fromkeys(variant.metric_name for variant in variants))
    several = len(metrics) > 1
    deployed = any(variant.deployed is not None for variant in variants)
    columns = [
        Column("variant"),
        Column("score" if several else metrics[0], number=True, parts=("score", "deviation")),
        *([Column("metric")] if several else []),
        Column("n", number=True),
        Column("each seed"),
        Column("parameters", number=True),
        *([Column("deployed", number=True)] if deployed else []),
        Column("seconds a run", number=True),
        Column("data"),
    ]
    rows = []
    for variant in variants:
        low, high = _span(variant, variants)
        told = ", ".join(f"seed {run.seed}: {run.score:.2f}" for run in variant.runs)
        size = variant.parameters
        rows.append(
            [
                Value(
                    variant.label,
                    (_marked(variant),),
                    small=_beside_name(variant),
                    chips=(*variant.marks, *_chips(variant)),
                ),
                _mean(variant.score, tone="strong" if variant.marks else ""),
                *([Value(variant.metric_name)] if several else []),
                _count(variant.score),
                Value(told, drawing=seed_dots([run.score for run in variant.runs], low, high, told)),
                Value(f"{size:,}", (size,)),
                *([_whole(variant.deployed)] if deployed else []),
                _seconds(variant.seconds),
                Value(variant.data),
            ]
        )
    way = "lower is better for loss and perplexity" if any(v.metric in LOWER_IS_BETTER for v in variants) else ""
    note = (
        "Means ± standard deviations over the seeds, after the last epoch or update. “Best” is said only where a mean "
        "is ahead of all others by more than the deviation of the difference, and never of a single run."
    )
    return Table(
        "variants", "Variants", columns, rows, f"{note} {way[:1].upper()}{way[1:]}{'.' if way else ''}".strip()
    )


def run_table(variants: Sequence[Variant]) -> Table:
    """Return one row for each run."""
    columns = (
        Column("recipe"),
        Column("seed", number=True),
        Column("metric"),
        Column("score", number=True),
        Column("seconds", number=True),
        Column("device"),
        Column("torch"),
        Column("factorized"),
        Column("commit"),
        Column("note", long=True),
        Column("file", long=True),
    )
    rows = []
    for variant in variants:
        for run in variant.runs:
            machine = run.result["machine"]
            commit = str(machine.get("commit") or "")
            rows.append(
                (
                    Value(_marked(variant)),
                    Value(str(run.seed), (run.seed,)),
                    Value(variant.metric_name, (run.metric,)),
                    Value(f"{run.score:.2f}", (run.score,)),
                    Value(f"{run.result['seconds']:.1f}", (run.result["seconds"],)),
                    *(Value(str(machine.get(name) or "")) for name in ("device", "torch", "factorized")),
                    Value(_short(commit), (commit,)),
                    Value(str(run.result.get("note", ""))),
                    Value(run.path.as_posix()),
                )
            )
    return Table("runs", "Runs", columns, rows)


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
        slug = _slug(f"layers-{variant.label}")
        taken = sum(table.slug == slug or table.slug.startswith(f"{slug}--") for table in tables)
        tables.append(Table(f"{slug}--{taken + 1}" if taken else slug, variant.label, columns, rows, note))
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
        _whole(first["params"]),
        Value("" if share is None else f"{share:.1%}", (share,)),
        *norms,
    )


def machine_table(runs: Sequence[Run]) -> Table:
    """Return the hardware and versions of the runs, one row for each combination."""
    every = ("device", "threads", "processes", *VERSIONS, "commit", "system")
    names = [name for name in every if any(run.result["machine"].get(name) is not None for run in runs)]
    counted: dict[tuple[str, ...], int] = {}
    for run in runs:
        machine = run.result["machine"]
        key = tuple("" if machine.get(name) is None else str(machine[name]) for name in names)
        counted[key] = counted.get(key, 0) + 1
    rows = [
        (*(Value(_short(v) if n == "commit" else v, (v,)) for n, v in zip(names, key, strict=True)), _whole(count))
        for key, count in counted.items()
    ]
    columns = (*(Column(name, long=name == "system") for name in names), Column("runs", number=True))
    return Table("machines", "Hardware and versions", columns, rows)


def data_table(runs: Sequence[Run]) -> Table:
    """Return the data sets of the runs."""
    counted: dict[tuple[str, str], int] = {}
    for run in runs:
        key = (run.result["data"]["name"], run.result["data"]["checksum"])
        counted[key] = counted.get(key, 0) + 1
    rows = [(Value(name), _whole(count), Value(checksum)) for (name, checksum), count in counted.items()]
    return Table("data", "Data", (Column("name"), Column("runs", number=True), Column("checksum")), rows)


def missing_table(comparisons: Sequence[Comparison]) -> Table:
    """Return the figures of the same tables that nobody has trained yet, with the command that does."""
    columns = (
        Column("cell", parts=("recipe", "network and data", "method", "column")),
        Column("paper", number=True, parts=("paper", "paper deviation")),
        Column("table", number=True),
        Column("command"),
    )
    rows = [
        (
            Value(
                f"{found.cell.grid}: {found.cell.row}, {found.cell.column}",
                (found.cell.recipe, found.cell.grid, found.cell.row, found.cell.column),
            ),
            _mean(found.paper),
            Value(str(found.cell.table), (found.cell.table,)),
            Value(f"factorized train {found.cell.recipe} --data DIR --seeds 3"),
        )
        for found in comparisons
        if found.variant is None
    ]
    return Table("missing", "Missing", columns, rows)


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


def _marked(variant: Variant) -> str:
    """Return the label of a variant, marked where its runs are shortened: CSV has no chips."""
    told = variant.shortened
    return variant.label if not told or told in variant.label else f"{variant.label} (shortened: {told})"


def _chips(variant: Variant) -> tuple[str, ...]:
    told = [f"shortened: {variant.shortened}"] if variant.shortened else []
    return (*told, *mixed(variant))


def _beside_name(variant: Variant) -> str:
    """Return what the label does not say: the recipe, and where it was changed."""
    changes = {key: value for key, value in variant.changes.items() if f"{key}={value}" not in variant.label}
    changed = ", ".join(f"{key} = {value}" for key, value in changes.items())
    parts = [variant.name] if not variant.label.startswith(variant.name) else []
    return "; ".join(parts + ([f"changed: {changed}"] if changed else []))


def _verdict(found: Comparison) -> str:
    told = found.variant.shortened if found.variant is not None and found.verdict == "shortened" else ""
    return f"{found.verdict}{f': {told}' if told else ''}"


def _span(variant: Variant, variants: Sequence[Variant]) -> tuple[float, float]:
    """Return the least and the greatest score on the same data."""
    alike = [v for v in variants if (v.metric, v.data) == (variant.metric, variant.data)]
    scores = [run.score for other in alike for run in other.runs]
    return min(scores), max(scores)


def _mean(summary: Summary | None, tone: str = "") -> Value:
    if summary is None:
        return Value("", (None, None))
    return Value(str(summary), (summary.mean, summary.deviation), tone=tone)


def _count(summary: Summary | None) -> Value:
    return _whole(summary.n if summary is not None else 0)


def _whole(number: int | None) -> Value:
    return Value("" if number is None else f"{number:,}", (number,))


def _signed(number: float | None, tone: str = "") -> Value:
    text = "" if number is None else f"{round(number, 2) + 0.0:+.2f}".replace("-", "−")  # never −0.00
    return Value(text, (number,), tone=tone)


def _seconds(summary: Summary | None) -> Value:
    if summary is None:
        return Value("not timed", (None,), tone="soft")
    return Value(f"{summary.mean:.1f}", (summary.mean,))


def _short(commit: str) -> str:
    return re.sub(r"^([0-9a-f]{8})[0-9a-f]*", r"\1", commit)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")
