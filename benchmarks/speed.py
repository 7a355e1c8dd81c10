"""The tables of ``docs/speed.md`` and the README's chart of speed, from what ``factorized bench`` measured.

    python -m benchmarks.speed     # draws the figures; ``python -m benchmarks.tables`` writes the tables

The reports are ``benchmarks/results/bench-*/NAME.json``, a folder for each machine. Decoding is measured by
``benchmarks.decode`` into ``decode-*.json``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import markdown
from benchmarks.drawing import drawn_from, save
from factorized.experiments.bench.charts import FIRST, OTHERS, OURS, figure_of
from factorized.experiments.bench.names import BENCHMARKS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Report = dict[str, Any]
Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
FIGURES = Path(__file__).parent.parent / "docs" / "figures"
MACHINES = {"h200": "GPU", "cpu": "CPU"}
BESIDE_DENSE = ("training", "inference", "llama", "layers")  # benchmarks whose first way is dense
DECODERS = {"llama-445m": "8 layers, 2048 wide", "llama-wide": "4 layers, 4096 wide"}
# reports of decoding and what their models are called; of a model and batch that two have, the last one is shown
DECODINGS = {
    "decode-h200": "",
    "decode-fused-h200": "",
    "decode-attention-h200": "; attention fused, too",
}
TUNED = "coordinate_descent_tuning"
OWN = ("low rank", "Tensor-Train", "Tucker", "feed-forward", "factorized")  # how ways of ours begin


def read(machine: str, name: str, results: Path = RESULTS) -> Report | None:
    """Return the report of a benchmark on a machine; None where it was not measured."""
    path = results / f"bench-{machine}" / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def conditions(report: Report) -> str:
    """Return machine, versions, clock and rounds in a sentence."""
    machine, rounds = report["machine"], [row["ms"]["rounds"] for row in report["rows"]]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    where = f"{machine['device']}, {machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    told = (
        f"{where}, torch {machine['torch']}{', ' if packages else ''}{packages}; commit {str(machine['commit'])[:7]}. "
    )
    n = f"{min(rounds)}" if min(rounds) == max(rounds) else f"{min(rounds)} to {max(rounds)}"
    return f"{told}Medians (least to largest) of n = {n} interleaved rounds by {report['clock']}."


def table(name: str, results: Path = RESULTS) -> str:
    """Return the tables of a benchmark, one for each machine, with what was left out."""
    parts = []
    for machine, kind in MACHINES.items():
        report = read(machine, name, results)
        if report is None or not report["rows"]:
            continue
        figure = f"figures/speed-{name}-{machine}.svg"
        made = growth_table(report) if report["fits"] else row_table(report)
        parts += [f"**{kind}.** {conditions(report)}", "", f"![{name} on a {kind}]({figure})", "", made, ""]
        parts += [f"Not measured: {why}." for why in report["skipped"]]
    return "\n".join(parts).strip() or "Not measured yet."


def row_table(report: Report) -> str:
    """Return the table with a row for each way."""
    has_error = any("error_over_optimum" in row for row in report["rows"])
    columns = ["", "way", "parameters", "ms", "of the first", "MiB", "of the first"]
    columns += ["error over the optimum"] if has_error else []
    rows = []
    before = ""
    for row in report["rows"]:
        spread = row["ms"]
        several = f" ({spread['least']:,.4g} to {spread['largest']:,.4g})" if spread["rounds"] > 1 else ""
        cells = [
            row["group"] if row["group"] != before else "",
            row["way"],
            f"{row['parameters']:,}" if "parameters" in row else "",
            f"{spread['median']:,.4g}{several}",
            _share(row.get("over")),
            f"{row['memory'] / 2**20:,.1f}",
            _share(row.get("memory_over")),
            *([f"{row['error_over_optimum']:.4f}"] if has_error else []),
        ]
        before = row["group"]
        rows.append(cells)
    return markdown.table(columns, rows, names=2)


def growth_table(report: Report) -> str:
    """Return the table of exponents."""
    rows = [
        [fit["grows"], fit["way"], ", ".join(map(str, fit["sizes"])), f"{fit['time']:.2f}", f"{fit['memory']:.2f}"]
        for fit in report["fits"]
    ]
    return markdown.table(["grows", "way", "sizes", "exponent of time", "exponent of memory"], rows, names=3)


def decoding(results: Path = RESULTS) -> str:
    """Return the table of milliseconds a token: dense, low rank and fused, each also as the tuned compiler makes it."""
    reports = [report for _, report in _decodings(results)]
    columns = [(way, tuned) for way in ("dense", "low rank", "fused") for tuned in (False, True)]
    rows = [
        [name, f"{batch}", *(f"{found[column]:.3f}" if column in found else "" for column in columns)]
        for name, batch, found in decoded(results)
    ]
    titles = [f"{way}, tuned" if tuned else way for way, tuned in columns]
    machines = [report["machine"] for report in reports]
    commits = [row.get("commit", report["machine"]["commit"])[:7] for report in reports for row in report["rows"]]
    rounds = sorted({report["rounds"] for report in reports})
    note = (
        f"{', '.join(dict.fromkeys(machine['device'] for machine in machines))}, torch "
        f"{', '.join(dict.fromkeys(machine['torch'] for machine in machines))}; commits "
        f"{', '.join(dict.fromkeys(commits))}. Medians of n = {' or '.join(map(str, rounds))} interleaved rounds of "
        f"{reports[0]['repeats']} tokens."
    )
    return markdown.table(["dense model", "sequences", *titles], rows, note)


def decoded(results: Path = RESULTS) -> list[tuple[str, int, dict[tuple[str, bool], float]]]:
    """Return models, sequences at once, and milliseconds a token by way and by whether the compiler was tuned."""
    reports = _decodings(results)
    cases: dict[tuple[str, int, str], Report] = {}
    for told, report in reports:
        cases |= {(row["model"], row["batch"], told): report for row in report["rows"]}
    every = [row for _, report in reports for row in report["rows"]]
    parameters = {row["model"]: row["parameters"] for row in every if _is_dense(row)}
    found = []
    for (model, batch, told), report in sorted(cases.items(), key=lambda case: case[0]):
        name = f"{DECODERS[model]}, {parameters[model] / 1e6:.0f} M parameters{told}"
        rows = [row for row in report["rows"] if (row["model"], row["batch"]) == (model, batch)]
        found.append((name, batch, {(row["way"], TUNED in row["options"]): row["milliseconds"] for row in rows}))
    return found


def slower(results: Path = RESULTS) -> str:
    """Return a sentence for each row of ours that takes longer than dense, or holds more memory."""
    told = []
    for machine in MACHINES:
        for name in BESIDE_DENSE:
            report = read(machine, name, results)
            for row in report["rows"] if report else []:
                excess = [
                    f"{row[key]:.2f} times the {what}"
                    for key, what in (("over", "time"), ("memory_over", "memory"))
                    if row["way"].startswith(OWN) and (row.get(key) or 0) > 1
                ]
                if excess:
                    told.append(
                        f"{_place(machine)}, {row['group']}: {row['way']} takes {' and '.join(excess)} of dense."
                    )
    told += slower_decoding(results)
    return "\n".join(f"- {sentence}" for sentence in told) or "No row is slower than dense or holds more memory."


def slower_decoding(results: Path = RESULTS) -> list[str]:
    """Return a sentence for each model that decodes more slowly at low rank than when dense, both untuned."""
    latest = {(name.partition(";")[0], batch): found for name, batch, found in decoded(results)}
    told = []
    for (name, batch), found in latest.items():
        dense, low_rank, fused = (found.get((way, False)) for way in ("dense", "low rank", "fused"))
        if dense and low_rank and low_rank > dense:
            share = f"{low_rank / dense:.2f} times the time of dense"
            but = f", and {fused / dense:.2f} with `fz.integrations.fuse_decoder`" if fused else ""
            sequences = "one sequence" if batch == 1 else f"{batch} sequences"
            told.append(f"H200, decoding {sequences} ({name}): low rank takes {share}{but}.")
    return told


def overview(results: Path = RESULTS) -> str:
    """Return the README's chart of speed, and a sentence for each of its rows that is slower than dense."""
    rows = overview_rows(results)
    behind = [
        f"{label} takes {row['over']:.2f} times as long as dense on {_place(machine)}."
        for machine, found in rows.items()
        for label, row in found.items()
        if row["over"] > 1
    ]
    behind += slower_decoding(results)
    first = "![Time of a training step and of inference over dense](docs/figures/speed.svg)"
    machines = "; ".join(_machine(machine, results) for machine in rows)
    text = (
        f"Time over dense: {machines}. [Memory, more rows and other packages](docs/speed.md); `factorized bench` "
        "measures your machine."
    )
    if "h200" not in rows:
        text += " On a GPU, narrow networks [gain little](docs/guide/limits.md)."
    return "\n".join([first, "", text, *(["", f"Slower: {' '.join(behind)}"] if behind else [])])


def overview_rows(results: Path = RESULTS) -> dict[str, dict[str, Row]]:
    """Return the rows of the README's chart by machine and label."""
    found: dict[str, dict[str, Row]] = {}
    for machine in MACHINES:
        for name in ("training", "llama", "inference"):
            report = read(machine, name, results)
            for row in report["rows"] if report else []:
                is_shown = row["way"] != "dense" and "lowered" not in row["way"] and row.get("over") is not None
                if is_shown and not (name == "inference" and row["group"].endswith("batch 1")):
                    network, what = row["group"].split(", ")[:2]
                    found.setdefault(machine, {})[f"{network}, {row['way']}, {what}"] = row
    return found


def overview_figure(results: Path = RESULTS) -> Figure:
    """Draw the README's chart."""
    from matplotlib.figure import Figure

    rows = overview_rows(results)
    heights = [len(found) + 1 for found in rows.values()]
    figure = Figure(figsize=(7.5, 0.19 * sum(heights) + 0.5), layout="constrained")
    panels = figure.subplots(len(rows), 1, squeeze=False, height_ratios=heights, sharex=True)[:, 0]
    for axes, (machine, found) in zip(panels, rows.items(), strict=True):
        shares = [row["over"] for row in found.values()]
        axes.barh(range(len(found)), shares, color=[OTHERS if share > 1 else OURS for share in shares], height=0.7)
        axes.set_yticks(range(len(found)), list(found), fontsize=7)
        axes.invert_yaxis()
        axes.axvline(1, color=FIRST, linewidth=0.8, linestyle="--")
        axes.set_xlim(0, max(1.1, 1.1 * max(shares)))
        for place, share in enumerate(shares):
            axes.annotate(f"{share:.2f}", (share, place), (3, 0), textcoords="offset points", va="center", fontsize=7)
        axes.set_title(f"time over dense, {_machine(machine, results)}", loc="left", fontsize=8)
        axes.tick_params(axis="x", labelsize=7)
    return figure


def figures(results: Path = RESULTS) -> dict[str, tuple[str, Callable[[], Figure]]]:
    """Return the checksum of what each figure shows, and the function that draws it, by file name."""
    shown = {
        machine: {label: row["over"] for label, row in rows.items()} for machine, rows in overview_rows(results).items()
    }
    made = {"speed.svg": (_checksum(shown), partial(overview_figure, results))} if shown else {}
    for machine in MACHINES:
        for name in BENCHMARKS:
            report = read(machine, name, results)
            if report is not None and report["rows"]:
                made[f"speed-{name}-{machine}.svg"] = _checksum(report), partial(figure_of, report)
    return made


def draw_figures(folder: Path = FIGURES, results: Path = RESULTS) -> None:
    """Draw every figure whose data changed."""
    for name, (checksum, draw) in figures(results).items():
        path = folder / name
        if drawn_from(path) != checksum:
            save(draw(), path, checksum)


TABLES: Mapping[str, Callable[[], str]] = {
    "speed": overview,
    "slower": slower,
    "decoding": decoding,
    **{f"speed-{name}": partial(table, name) for name in BENCHMARKS},
}


def _decodings(results: Path) -> list[tuple[str, Report]]:
    paths = [(told, results / f"{name}.json") for name, told in DECODINGS.items()]
    return [(told, json.loads(path.read_text())) for told, path in paths if path.is_file()]


def _is_dense(row: Row) -> bool:
    return row["way"] == "dense" and "parameters" in row


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _checksum(data: Any) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def _place(machine: str) -> str:
    return {"h200": "H200", "cpu": "one CPU core"}[machine]


def _machine(machine: str, results: Path) -> str:
    report = next(found for name in BENCHMARKS if (found := read(machine, name, results)) is not None)
    return f"{_place(machine)}, torch {report['machine']['torch']}"


if __name__ == "__main__":
    draw_figures()
