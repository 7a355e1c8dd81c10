"""Draw the README's chart: accuracy against parameters, ours from ``results/`` and the paper's.

python -m benchmarks.accuracy_chart
"""

from __future__ import annotations

from benchmarks.drawing import Panel, draw
from benchmarks.tables import ROOT, compared
from factorized.experiments.reproduce.compare import Comparison

PATH = ROOT / "docs" / "figures" / "accuracy.svg"
NETWORKS = {"cifar10/resnet32x2": "ResNet-32x2 on CIFAR-10", "cifar10/vgg19": "VGG-19 on CIFAR-10"}
WAYS = {"-si-fd": "both ideas", "": "neither"}


def panels() -> list[Panel]:
    """Return one panel for each network: low-rank with and without the paper's methods, both ending in dense."""
    return [_panel(network, title) for network, title in NETWORKS.items()]


def _panel(network: str, title: str) -> Panel:
    found = {c.cell.recipe: c for c in compared(table=1)}

    def series(way: str) -> list[Comparison]:
        names = [*(f"{network}-lowrank-{ratio}{way}" for ratio in ("0.02", "0.05", "0.1")), network]
        return [found[name] for name in names if name in found]

    lines = {label: [_ours(point) for point in series(way)] for way, label in WAYS.items()}
    paper = {label: [_papers(point) for point in series(way)] for way, label in WAYS.items()}
    return Panel("million parameters", "test accuracy, %", lines, log="x", title=title, paper=paper)


def _ours(point: Comparison) -> tuple[float, float]:
    assert point.variant is not None
    return point.variant.parameters / 1e6, point.variant.score.mean


def _papers(point: Comparison) -> tuple[float, float, float]:
    assert point.variant is not None
    return point.variant.parameters / 1e6, point.paper.mean, point.paper.deviation or 0.0


if __name__ == "__main__":
    draw(panels(), PATH, width=3.7)  # small enough for a phone
