"""Write the tables of the README and the cards from the files under ``results/`` and ``benchmarks/results/``.

    python -m benchmarks.tables

A table is between ``<!-- table:NAME -->`` and ``<!-- end -->``; everything between them is replaced.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks import speed
from benchmarks.markdown import fill, table
from benchmarks.recovery_table import read_rows, recovery_table
from factorized.experiments.recipes.find import load_recipe, paper_cells
from factorized.experiments.reproduce.compare import TRIALS, Comparison
from factorized.experiments.reproduce.report import Report, make_report
from factorized.experiments.reproduce.runs import read_runs
from factorized.experiments.reproduce.summary import Summary
from factorized.experiments.reproduce.variant import Variant

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
CARDS = (
    "calibrated",
    "frobenius_decay",
    "low_rank",
    "monarch",
    "overcomplete",
    "speed",
    "spectral_initialization",
    "tensor",
)
OTHERS = ("README", "docs/guide/images", "docs/guide/limits")
PAGES = [ROOT / f"{page}.md" for page in (*OTHERS, *(f"docs/{card}" for card in CARDS))]


def accuracy() -> str:
    """Return the README's chart with what it shows in words."""
    smaller, large = _row("cifar10/resnet32x2-lowrank-0.1-si-fd"), _row("cifar10/resnet32x2")
    better, plain = _row("cifar10/resnet32-full-fd"), _row("cifar10/resnet32")
    better_100, plain_100 = _row("cifar100/resnet32-full-fd"), _row("cifar100/resnet32")
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
            f"{_score(_composed(better) or better.score)}, trained dense {_score(plain.score)}; both have "
            f"{better.deployed:,} parameters. On CIFAR-100 products reach {_score(better_100.score)}, "
            f"the dense network {_score(plain_100.score)}.",
        ]
    )


def low_rank() -> str:
    """Return the table of every network trained for Table 1 of the paper."""
    return _trained(sorted(_rows(table=1), key=lambda row: (row.name.partition("-")[0], -row.parameters, row.name)))


def tensors() -> str:
    """Return the table of every network trained for Table 2 of the paper: tensors and low rank."""
    return _trained(sorted(_rows(table=2), key=lambda row: -row.score.mean))


def _trained(found: Sequence[Variant]) -> str:
    titles = ["recipe", "parameters", "test accuracy", "n", "the paper (n = 3)", "seconds per run"]
    rows = [
        [
            f"`{row.name}`",
            f"{row.parameters:,}",
            *_beside_the_paper(row),
            f"{row.seconds.mean:.0f}" if row.seconds is not None else "not timed",
        ]
        for row in found
    ]
    return table(titles, rows, _conditions(found))


def distillation() -> str:
    """Return the table of networks trained with more parameters and deployed without them."""
    found = sorted(_rows(table=3), key=lambda row: -row.score.mean)
    trained = ["parameters in training", "test accuracy", "n", "the paper (n = 3)"]
    rows = []
    for row in found:
        composed = row.score if row.deployed == row.parameters else _composed(row)
        again = "not measured" if composed is None else f"{composed.mean:.2f}"
        rows.append([f"`{row.name}`", f"{row.parameters:,}", *_beside_the_paper(row), f"{row.deployed:,}", again])
    return table(["recipe", *trained, "deployed", "test accuracy"], rows, _conditions(found))


def step_size() -> str:
    """Return the table of low-rank ResNet-20s with different decays, those of the paper's Figure 3."""
    ways = {"si": "ordinary decay", "si-fd": "Frobenius decay", "normalized": "none, with the norms of Frobenius decay"}
    found = {row.name: row for row in _report().variants}
    rows, picked = [], [found[f"cifar10/resnet20-lowrank-{way}"] for way in ways]
    for decay, row in zip(ways.values(), picked, strict=True):
        history = row.runs[0].result["history"]
        steps = [f"{history[epoch - 1]['effective_step']:.1e}" for epoch in (100, 150, 200)]
        rows.append([decay, *steps, f"{history[-1]['loss']:.3f}", str(row.score), str(row.score.n)])
    titles = ["decay", "effective step after 100 epochs", "150", "200", "training loss", "test accuracy", "n"]
    note = f"ResNet-20 on CIFAR-10, rank scale 1/9, spectral initialization. {_conditions(picked)}"
    return table(titles, rows, note)


def sparsity() -> str:
    """Return the paper's figures for sparse and low-rank VGG-19."""
    names = ("Pruning", "Dynamic Sparsity", "Lottery (w. hybrid/rewind)", "Fixed Sparsity", "Low-Rank (SI & FD)")
    columns = ("0.1", "0.05", "0.02")
    cells = {(cell.grid, cell.row, cell.column): cell.figure for cell in paper_cells() if cell.table == 1}
    rows = [
        [grid, row, *(f"{cells[grid, row, column]:.2f}" for column in columns)]
        for grid in ("VGG-19 NFC on CIFAR-10", "VGG-19 NFC on CIFAR-100")
        for row in names
    ]
    note = "Test accuracy in percent by the share of parameters that are not zero; figures of the paper, not ours."
    return table(["network", "method", *columns], rows, note, names=2)


def together() -> str:
    """Return the table of runs that take turns on one GPU."""
    report = _read("together-h200")
    rows = [[str(row["runs"]), f"{row['seconds_per_epoch']:.2f}", f"{row['gain']:.2f}"] for row in report["rows"]]
    note = (
        f"`{report['recipe']}`, {_machine(report)}, bf16, batch 128; medians of the last {report['epochs'] - 2} of "
        f"{report['epochs']} epochs, each with its evaluation. The gain is over one run after another."
    )
    return table(["runs at once", "seconds for an epoch of all", "gain"], rows, note, names=0)


def training_step() -> str:
    """Return the table of the time that decaying the products adds to a training step."""
    report = speed.read("h200", "decay") or {}
    rows = [row for row in report["rows"] if row["group"].startswith("decay in the training step")]
    cells = [
        [
            row["way"].replace("fz.FrobeniusDecay", "`fz.FrobeniusDecay`"),
            f"{row['ms']['median']:.3f}",
            "" if row is rows[0] else f"{row['over'] - 1:.1%}",
            f"{row['memory'] / 2**20:,.0f}",
        ]
        for row in rows
    ]
    what = rows[0]["group"].removeprefix("decay in the ")
    note = f"The {what}, bf16, forward and backward compiled, with SGD as one CUDA graph. {speed.conditions(report)}"
    return table(["decay", "ms per training step", "added", "MiB"], cells, note)


def decomposition() -> str:
    """Return the table of exact decompositions against those by Gram matrix and randomized ones."""
    report = _read("svd-cpu")
    distance = "its distance from the best product"
    titles = ["rank", "exact SVD", "Gram matrix", distance, "randomized", "its error over the optimum", distance]
    rows = []
    for row in report["rows"]:
        batch = f"{row['batch']} of " if row["batch"] > 1 else ""
        exact, gram, randomized = (f"{row['seconds'][way]['median']:.3f} s" for way in ("exact", "gram", "randomized"))
        away = row["from_the_best_product"]
        rows.append(
            [
                f"{batch}{row['size']}×{row['size']}",
                str(row["rank"]),
                exact,
                gram,
                f"{away['gram']:.0e}",
                randomized,
                f"{row['error_over_optimum']['randomized']:.4f}",
                f"{away['randomized']:.2f}",
            ]
        )
    note = f"Distances are relative, ‖P - best‖ / ‖best‖. {_cpu_time(report)}"
    return table(["Gaussian matrix", *titles], rows, note)


def surgery() -> str:
    """Return the table of the spectral initialization of whole transformers."""
    report = _read("svd-models-cpu")
    titles = ["layers", "n", "`exact=True`", "default", "times faster", "error over the optimum"]
    rows = []
    for row in report["rows"]:
        exact, default, plan = (row["seconds"][way] for way in ("exact", "default", "plan by spectrum"))
        budget = ", ".join(f"`{key}={value}`" for key, value in row["budget"].items())
        rows.append(
            [
                f"{row['model']}, {budget}",
                str(row["layers"]),
                str(row["rounds"]),
                _seconds(exact),
                _seconds(default),
                f"{exact['median'] / default['median']:.1f}",
                f"{row['error_over_optimum']:.6f}",
                _seconds(plan),
            ]
        )
    note = f"Seconds: median (least to largest). Random weights. {_cpu_time(report)}"
    return table(["model, budget", *titles, 'a plan with `allocate="spectrum"`'], rows, note)


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
    rows = []
    for (weight, share), errors in kept.items():
        columns = [errors.get("spatial", errors[1]), *(errors.get(blocks) for blocks in (4, 16, 32))]
        if columns[1] is None:
            continue  # nothing to compare
        best = min(error for error in columns if error is not None)
        cells = ["" if e is None else f"**{e:.3f}**" if e == best else f"{e:.3f}" for e in columns]
        rows.append([weight, f"{share:.1%}", *cells])
    note = (
        f"‖W - Ŵ‖ / ‖W‖ of the best approximation; {_machine(report)}; means of n = {report['seeds']} seeds, whose "
        f"deviation is at most {max(row['deviation'] for row in report['rows']):.3f}. Test accuracy of the trained "
        f"networks: perceptron {mean(report['accuracy']['perceptron']):.1f} %, "
        f"ResNet-8 {mean(report['accuracy']['ResNet-8']):.1f} %. A training step of a 768×768 linear on 256 rows at "
        f"a quarter of its parameters takes {times['4']}, {times['16']} and {times['32']} times as long with 4×4, "
        f"16×16 and 32×32 blocks as with low rank: medians of n = {report['rounds']}, interleaved."
    )
    return table(["weight", "parameters kept", "low rank", "4×4 blocks", "16×16", "32×32"], rows, note)


def calibrated() -> str:
    """Return the table of accuracies with calibrated and with spectral factors."""
    report = _read("calibrated-cpu")
    found = {(row["network"], row["ratio"], row["init"], row["recovery"]): row for row in report["rows"]}
    ways = [(init, when) for when in ("before", "after") for init in ("spectral", "calibrated", "sequential")]
    rows = []
    for network, ratio in _networks(report):
        cells = (found[network, ratio, init, when] for init, when in ways)
        rows.append([network, f"{ratio:.0%}", *(f"{row['accuracy']:.1f} ± {row['deviation']:.1f}" for row in cells)])
    dense = [f"{row['network']} {row['accuracy']:.1f} %" for row in report["rows"] if row["init"] == "dense"]
    note = (
        f"Test accuracy in percent; {_machine(report)}; means and deviations of n = {report['seeds']} seeds. Dense "
        f"after {report['epochs']} epochs: {', '.join(dense)}. The further epoch has Frobenius decay."
    )
    titles = [init if when == "before" else f"{init}, one more epoch" for init, when in ways]
    return table(["network", "parameters kept", *titles], rows, note)


def ranks() -> str:
    """Return the table of scores by the way ranks were chosen."""
    report = _read("ranks-cpu")
    found = {(row["network"], row["ratio"], row["ranks"]): row for row in report["rows"]}
    ways = list(dict.fromkeys(row["ranks"] for row in report["rows"] if row["ranks"] != "dense"))
    titles = {"uniform": "uniform", "weights": "by weights", "outputs": "by outputs", "loss": "by outputs and loss"}
    rows = [
        [network, f"{ratio:.0%}", *(_mean(found[network, ratio, way]) for way in ways)]
        for network, ratio in _networks(report)
    ]
    dense = [f"{row['network']} {row['mean']:.2f}" for row in report["rows"] if row["ranks"] == "dense"]
    note = (
        "Test accuracy in percent, and perplexity per byte (lower is better) of the language model; "
        f"{_machine(report)}; means and deviations of n = {report['seeds']} seeds. Dense: {', '.join(dense)}."
    )
    return table(["network", "parameters kept", *(titles[way] for way in ways)], rows, note)


def _networks(report: dict[str, Any]) -> list[tuple[str, float]]:
    """Return the compressed networks of a report, each with the share of parameters that it kept."""
    return list(dict.fromkeys((row["network"], row["ratio"]) for row in report["rows"] if row["ratio"] < 1))


def recovery() -> str:
    """Return the table of finished runs, compressed and trained further."""
    return recovery_table(read_rows(RESULTS))


def _mean(row: dict[str, Any]) -> str:
    digits = 1 if row["score"] == "accuracy" else 2
    return f"{row['mean']:.{digits}f} ± {row['deviation']:.{digits}f}"


TABLES: dict[str, Callable[[], str]] = {
    "accuracy": accuracy,
    "low-rank": low_rank,
    "tensors": tensors,
    "distillation": distillation,
    "step-size": step_size,
    "sparsity": sparsity,
    "together": together,
    "training-step": training_step,
    "decomposition": decomposition,
    "surgery": surgery,
    "monarch": monarch,
    "calibrated": calibrated,
    "ranks": ranks,
    "recovery": recovery,
    **speed.TABLES,
}


def with_tables(text: str) -> str:
    """Return ``text`` with every table of results regenerated."""
    return fill(text, TABLES)


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


def _composed(row: Variant) -> Summary | None:
    """Return the accuracy after composing, if it was measured."""
    measured = [run.result["composed"]["accuracy"] for run in row.runs if "composed" in run.result]
    return Summary.of(measured) if measured else None


def _score(score: Summary) -> str:
    return f"{score} % (n = {score.n})"


def _beside_the_paper(row: Variant) -> list[str]:
    paper = load_recipe(row.name).paper  # accuracies, also where the paper's table has errors
    figure = "" if paper.accuracy is None else str(Summary(paper.accuracy, paper.deviation, TRIALS))
    return [str(row.score), str(row.score.n), figure]


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
