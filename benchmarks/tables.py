"""Write the tables of the README and the cards from the files under ``results/`` and ``benchmarks/results/``.

    python -m benchmarks.tables

A table is between ``<!-- table:NAME -->`` and ``<!-- end -->``; everything between them is replaced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import speed
from benchmarks.recovery_table import read_rows, recovery_table
from factorized.experiments.recipes.find import paper_cells
from factorized.experiments.reproduce.compare import Comparison
from factorized.experiments.reproduce.report import Report, make_report
from factorized.experiments.reproduce.runs import read_runs
from factorized.experiments.reproduce.summary import Summary
from factorized.experiments.reproduce.variant import Variant

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / "guide" / f"{name}.md" for name in ("images", "limits")),
    *(
        ROOT / "docs" / f"{name}.md"
        for name in (
            "calibrated",
            "frobenius_decay",
            "low_rank",
            "monarch",
            "overcomplete",
            "speed",
            "spectral_initialization",
        )
    ),
)


def accuracy() -> str:
    """Return the README's chart with what it shows in words."""
    smaller, large = _row("cifar10/resnet32x2-lowrank-0.1-si-fd"), _row("cifar10/resnet32x2")
    better, plain = _row("cifar10/resnet32-full-fd"), _row("cifar10/resnet32")
    composed = Summary.of([run.result["composed"]["accuracy"] for run in better.runs if "composed" in run.result])
    seeds = [row.score.n for row in _rows(table=1) if row.name.startswith("cifar10/")]
    return "\n".join(
        [
            "![Test accuracy against parameters, ours and the paper's](docs/figures/accuracy.svg)",
            "",
            "Low-rank networks trained with both ideas of the paper, explained below, and with neither; dense at the "
            f"right end. Solid lines are ours (n = {min(seeds)} to {max(seeds)}), dotted ones the paper's (n = 3). "
            f"{_conditions([large])}",
            "",
            f"- **Smaller:** ResNet-32x2 with {smaller.parameters:,} of its {large.parameters:,} parameters reaches "
            f"{_score(smaller.score)}, dense {_score(large.score)}.",
            f"- **Better at the same size:** ResNet-32, trained as products and multiplied out, reaches "
            f"{_score(composed)}, trained dense {_score(plain.score)}; both have {better.deployed:,} parameters.",
        ]
    )


def low_rank() -> str:
    """Return the table of every network trained for Table 1 of the paper."""
    rows = sorted(_rows(table=1), key=lambda row: (row.name.partition("-")[0], -row.parameters, row.name))
    lines = [
        "| recipe | parameters | test accuracy | n | the paper (n = 3) | seconds per run |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        seconds = f"{row.seconds.mean:.0f}" if row.seconds is not None else "not timed"
        lines.append(f"| `{row.name}` | {row.parameters:,} | {_beside_the_paper(row)} | {seconds} |")
    return "\n".join([*lines, "", _conditions(rows)])


def distillation() -> str:
    """Return the table of networks trained with more parameters and deployed without them."""
    rows = sorted(_rows(table=3), key=lambda row: -row.score.mean)
    lines = [
        "| recipe | parameters in training | test accuracy | n | the paper (n = 3) | deployed | test accuracy |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        composed = [run.result["composed"]["accuracy"] for run in row.runs if "composed" in run.result]
        deployed = mean(composed) if composed else row.score.mean
        lines.append(
            f"| `{row.name}` | {row.parameters:,} | {_beside_the_paper(row)} | {row.deployed:,} | {deployed:.2f} |"
        )
    return "\n".join([*lines, "", _conditions(rows)])


def sparsity() -> str:
    """Return the paper's figures for sparse and low-rank VGG-19."""
    names = ("Pruning", "Dynamic Sparsity", "Lottery (w. hybrid/rewind)", "Fixed Sparsity", "Low-Rank (SI & FD)")
    lines = []
    for grid in ("VGG-19 NFC on CIFAR-10", "VGG-19 NFC on CIFAR-100"):
        cells = {
            (cell.row, cell.column): cell.figure for cell in paper_cells() if cell.grid == grid and cell.table == 1
        }
        columns = ("0.1", "0.05", "0.02")
        if not lines:
            lines = [f"| network | method | {' | '.join(columns)} |", f"| --- | --- |{' ---: |' * len(columns)}"]
        for row in names:
            figures = [f"{cells[row, column]:.2f}" for column in columns]
            lines.append(f"| {grid} | {row} | {' | '.join(figures)} |")
    note = "Test accuracy in percent by the share of parameters that are not zero; figures of the paper, not ours."
    return "\n".join([*lines, "", note])


def epoch() -> str:
    """Return the table of whole epochs."""
    report = _read("epoch-h200")
    lines = ["| recipe | seconds per epoch | ms per step |", "| --- | ---: | ---: |"]
    lines += [f"| `{row['recipe']}` | {row['seconds']:.2f} | {row['ms_per_step']:.2f} |" for row in report["rows"]]
    note = (
        f"{_machine(report)}, bf16, batch {report['batch']}, 50,000 images on the device; augmentation, forward, "
        f"backward, decay and SGD compiled, as one CUDA graph; medians of n = {report['epochs']} interleaved epochs."
    )
    return "\n".join([*lines, "", note])


def together() -> str:
    """Return the table of runs that take turns on one GPU."""
    report = _read("together-h200")
    lines = ["| runs at once | steps per second of all | gain |", "| ---: | ---: | ---: |"]
    for row in report["rows"]:
        lines.append(f"| {row['runs']} | {row['in_turn_steps_per_second']:.0f} | {row['in_turn_gain']:.2f} |")
    note = (
        f"Thin ResNet-32, {_machine(report)}, bf16, batch 128; each step compiled, as one CUDA graph; medians of "
        f"n = {report['rounds']} interleaved rounds of {report['steps']} steps. The gain is over one run after another."
    )
    return "\n".join([*lines, "", note])


def training_step() -> str:
    """Return the table of the time that decaying the products adds to a training step."""
    report = _read("training-step-h200")
    rows = [row for row in report["rows"] if row["execution"] in ("dense", "auto") and row["ratio"] in (None, 0.1)]
    ordinary = next(row["ms"] for row in rows if (row["ratio"], row["decay"]) == (0.1, "weight"))
    decays = {"weight": "ordinary", "frobenius": "`fz.FrobeniusDecay`", "loop": "four products per layer, in a loop"}
    lines = ["| ResNet-32x2 | decay | ms per training step | added |", "| --- | --- | ---: | ---: |"]
    for row in rows:
        name = "dense" if row["ratio"] is None else f"low rank, ratio {row['ratio']}"
        added = "" if row["decay"] == "weight" else f"{row['ms'] / ordinary - 1:.1%}"
        lines.append(f"| {name} | {decays[row['decay']]} | {row['ms']:.2f} | {added} |")
    note = (
        f"{_machine(report)}, bf16, batch {report['batch']}; forward, backward and SGD compiled, as one CUDA "
        f"graph; medians of n = {report['rounds']} interleaved rounds of 20 steps."
    )
    return "\n".join([*lines, "", note])


def decomposition() -> str:
    """Return the table of exact decompositions against those by Gram matrix and randomized ones."""
    report = _read("svd-cpu")
    lines = [
        "| Gaussian matrix | rank | exact SVD | Gram matrix | its distance from the best product | randomized "
        "| its error over the optimum | its distance from the best product |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in report["rows"]:
        batch = f"{row['batch']} of " if row["batch"] > 1 else ""
        exact, gram, randomized = (row["seconds"][way]["median"] for way in ("exact", "gram", "randomized"))
        distance = row["from_the_best_product"]
        lines.append(
            f"| {batch}{row['size']}×{row['size']} | {row['rank']} | {exact:.3f} s | {gram:.3f} s "
            f"| {distance['gram']:.0e} | {randomized:.3f} s | {row['error_over_optimum']['randomized']:.4f} "
            f"| {distance['randomized']:.2f} |"
        )
    note = f"Distances are relative, ‖P - best‖ / ‖best‖. {_cpu_time(report)}"
    return "\n".join([*lines, "", note])


def surgery() -> str:
    """Return the table of the spectral initialization of whole transformers."""
    report = _read("svd-models-cpu")
    lines = [
        "| model, budget | layers | n | `exact=True` | default | times faster | error over the optimum "
        '| a plan with `allocate="spectrum"` |',
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in report["rows"]:
        exact, default, plan = (row["seconds"][way] for way in ("exact", "default", "plan by spectrum"))
        budget = ", ".join(f"`{key}={value}`" for key, value in row["budget"].items())
        times = exact["median"] / default["median"]
        lines.append(
            f"| {row['model']}, {budget} | {row['layers']} | {row['rounds']} | {_seconds(exact)} | {_seconds(default)} "
            f"| {times:.1f} "
            f"| {row['error_over_optimum']:.6f} | {_seconds(plan)} |"
        )
    return "\n".join([*lines, "", f"Seconds: median (least to largest). Random weights. {_cpu_time(report)}"])


def _seconds(spread: dict[str, float]) -> str:
    several = f" ({spread['least']:.1f} to {spread['largest']:.1f})" if spread["least"] < spread["largest"] else ""
    return f"{spread['median']:.1f}{several}"


def _cpu_time(report: dict[str, Any]) -> str:
    rounds = " or ".join(map(str, sorted({row["rounds"] for row in report["rows"]})))
    return f"{_machine(report)}, CPU time on a machine shared with other work; medians of n = {rounds}, interleaved."


def monarch() -> str:
    """Return the table of the errors of Monarch matrices and low rank."""
    report = _read("monarch-cpu")
    times = report["times"]
    kept: dict[tuple[str, float], dict[Any, float]] = {}  # errors by format, of a weight at a share of its parameters
    for row in report["rows"]:
        kept.setdefault((row["weight"], row["share"]), {})[row["blocks"]] = row["error"]
    lines = [
        "| weight | parameters kept | low rank | 4×4 blocks | 16×16 | 32×32 |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (weight, share), errors in kept.items():
        columns = [errors.get("spatial", errors[1]), *(errors.get(blocks) for blocks in (4, 16, 32))]
        if columns[1] is None:
            continue  # nothing to compare
        best = min(error for error in columns if error is not None)
        cells = ["" if e is None else f"**{e:.3f}**" if e == best else f"{e:.3f}" for e in columns]
        lines.append(f"| {weight} | {share:.1%} | {' | '.join(cells)} |")
    note = (
        f"‖W - Ŵ‖ / ‖W‖ of the best approximation; {_machine(report)}; means of n = {report['seeds']} seeds, whose "
        f"deviation is at most {max(row['deviation'] for row in report['rows']):.3f}. Test accuracy of the trained "
        f"networks: perceptron {mean(report['accuracy']['perceptron']):.1f} %, "
        f"ResNet-8 {mean(report['accuracy']['ResNet-8']):.1f} %. A training step of a 768×768 linear on 256 rows at "
        f"a quarter of its parameters takes {times['4']}, {times['16']} and {times['32']} times as long with 4×4, "
        f"16×16 and 32×32 blocks as with low rank: medians of n = {report['rounds']}, interleaved."
    )
    return "\n".join([*lines, "", note])


def calibrated() -> str:
    """Return the table of accuracies with calibrated and with spectral factors."""
    report = _read("calibrated-cpu")
    found = {(row["network"], row["ratio"], row["init"], row["recovery"]): row for row in report["rows"]}
    lines = [
        "| network | parameters kept | spectral | calibrated | spectral, one more epoch | calibrated, one more epoch |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for network, ratio in dict.fromkeys((row["network"], row["ratio"]) for row in report["rows"] if row["ratio"] < 1):
        columns = [
            found[network, ratio, init, when] for when in ("before", "after") for init in ("spectral", "calibrated")
        ]
        cells = [f"{row['accuracy']:.1f} ± {row['deviation']:.1f}" for row in columns]
        lines.append(f"| {network} | {ratio:.0%} | {' | '.join(cells)} |")
    dense = [f"{row['network']} {row['accuracy']:.1f} %" for row in report["rows"] if row["init"] == "dense"]
    note = (
        f"Test accuracy in percent; {_machine(report)}; means and deviations of n = {report['seeds']} seeds. Dense "
        f"after {report['epochs']} epochs: {', '.join(dense)}. The further epoch has Frobenius decay."
    )
    return "\n".join([*lines, "", note])


def ranks() -> str:
    """Return the table of scores by the way ranks were chosen."""
    report = _read("ranks-cpu")
    found = {(row["network"], row["ratio"], row["ranks"]): row for row in report["rows"]}
    ways = list(dict.fromkeys(row["ranks"] for row in report["rows"] if row["ranks"] != "dense"))
    titles = {"uniform": "uniform", "weights": "by weights", "outputs": "by outputs", "loss": "by outputs and loss"}
    lines = [
        f"| network | parameters kept | {' | '.join(titles[way] for way in ways)} |",
        f"| --- | ---: |{' ---: |' * len(ways)}",
    ]
    for network, ratio in dict.fromkeys((row["network"], row["ratio"]) for row in report["rows"] if row["ratio"] < 1):
        cells = [_mean(found[network, ratio, way]) for way in ways]
        lines.append(f"| {network} | {ratio:.0%} | {' | '.join(cells)} |")
    dense = [f"{row['network']} {row['mean']:.2f}" for row in report["rows"] if row["ranks"] == "dense"]
    note = (
        "Test accuracy in percent, and perplexity per byte (lower is better) of the language model; "
        f"{_machine(report)}; means and deviations of n = {report['seeds']} seeds. Dense: {', '.join(dense)}."
    )
    return "\n".join([*lines, "", note])


def compression() -> str:
    """Return the table of scores of this library and of others, before and after recovery."""
    report = _read("compression-cpu")
    rows = [row for row in report["rows"] if row["method"] != "dense"]
    found = {(row["network"], row["method"], row["recovery"], row["ratio"]): row for row in rows}
    ratios = sorted({row["ratio"] for row in rows}, reverse=True)
    after = {"none": "", "ordinary": ", ordinary decay", "frobenius": ", Frobenius decay"}
    lines = [
        f"| network | method | {' | '.join(f'{ratio:.0%}' for ratio in ratios)} |",
        f"| --- | --- |{' ---: |' * len(ratios)}",
    ]
    order = sorted(dict.fromkeys(key[:3] for key in found), key=lambda key: list(after).index(key[2]))
    for network in dict.fromkeys(key[0] for key in found):
        for _, method, recovery in (key for key in order if key[0] == network):
            cells = [_mean(found[network, method, recovery, ratio]) for ratio in ratios]
            lines.append(f"| {network} | {method}{after[recovery]} | {' | '.join(cells)} |")
    dense = [row for row in report["rows"] if row["method"] == "dense"]
    told = ", ".join(f"{row['network']} {row['mean']:.2f} (n = {row['n']})" for row in dense)
    note = (
        "Test accuracy in percent, and perplexity per byte (lower is better) of the language model; "
        f"{_machine(report)}; means and deviations over seeds. Dense: {told}."
    )
    return "\n".join([*lines, "", note])


def recovery() -> str:
    """Return the table of finished runs, compressed and trained further."""
    return recovery_table(read_rows(RESULTS))


def _mean(row: dict[str, Any]) -> str:
    digits = 1 if row["score"] == "accuracy" else 2
    spread = "" if row["deviation"] is None else f" ± {row['deviation']:.{digits}f}"
    return f"{row['mean']:.{digits}f}{spread}"


TABLES: dict[str, Callable[[], str]] = {
    "accuracy": accuracy,
    "low-rank": low_rank,
    "distillation": distillation,
    "sparsity": sparsity,
    "epoch": epoch,
    "together": together,
    "training-step": training_step,
    "decomposition": decomposition,
    "surgery": surgery,
    "monarch": monarch,
    "calibrated": calibrated,
    "ranks": ranks,
    "compression": compression,
    "recovery": recovery,
    **speed.TABLES,
}


def with_tables(text: str) -> str:
    """Return ``text`` with every table of results regenerated."""
    return fill(text, TABLES)


def fill(text: str, tables: dict[str, Callable[[], str]]) -> str:
    """Return ``text`` with each of these tables regenerated between its marks."""
    for name, make in tables.items():
        block = f"<!-- table:{name} -->\n{make()}\n<!-- end -->"
        text = re.sub(rf"<!-- table:{name} -->.*?<!-- end -->", lambda _, new=block: new, text, flags=re.DOTALL)
    return text


@cache
def _report() -> Report:
    return make_report(read_runs([ROOT / "results"]))


def compared(table: int) -> list[Comparison]:
    """Return what was trained, whole, for a table of the paper, beside its figures."""
    return [c for c in _report().judged if c.cell.table == table and c.variant is not None]


def _rows(table: int) -> list[Variant]:
    return [c.variant for c in compared(table) if c.variant is not None]


def _row(name: str) -> Variant:
    return next(row for table in (1, 3) for row in _rows(table) if row.name == name)


def _score(score: Summary) -> str:
    return f"{score} % (n = {score.n})"


def _beside_the_paper(row: Variant) -> str:
    paper = next(comparison.paper for comparison in _report().judged if comparison.variant is row)
    return f"{row.score} | {row.score.n} | {paper}"


def _conditions(rows: Sequence[Variant]) -> str:
    first = rows[0].runs[0]
    epochs, batch = first.length, first.recipe["run"]["batch"]
    return f"Accuracy after the last of {epochs} epochs, batch {batch}; {_machine(first.result)}, bf16."


def _read(name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return report


def _machine(report: dict[str, Any]) -> str:
    machine = report["machine"]
    threads = machine["threads"]
    device = machine["device"] if "NVIDIA" in machine["device"] else f"{threads} CPU core{'s' if threads > 1 else ''}"
    return f"{device}, torch {machine['torch']}"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))
