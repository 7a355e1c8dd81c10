"""The table of ``benchmarks.recovery``: the score by ratio, method and decay, of all files together."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.markdown import figure, table

Row = dict[str, Any]
METHODS = ("calibrated", "truncated SVD", "ASVD", "SVD-LLM", "pruning")
AFTER = {"none": "", "ordinary": ", ordinary decay", "frobenius": ", Frobenius decay"}
DEVICES = {"NVIDIA H200": "H200"}


def read_rows(folder: Path) -> list[Row]:
    """Return the rows of all files, each with the device it was measured on; networks are named without their seeds.

    ``dense`` is the name with the seed: it tells the dense networks of one architecture apart.
    A figure without recovery may be in several files: one of them is kept.
    """
    found: dict[str, Row] = {}
    for path in sorted(folder.glob("recovery-*.json")):
        report = json.loads(path.read_text())
        device = report["machine"]["device"]
        for row in report["rows"]:
            keys = ("network", "ratio", "method", "kind", "recovery", "seed")
            named = {"network": re.sub(r" seed \d+$", "", row["network"]), "dense": row["network"]}
            one = {**row, **named, "device": DEVICES.get(device, "CPU")}
            found.setdefault(json.dumps([row.get(key) for key in keys]), one)
    return list(found.values())


def recovery_table(rows: Sequence[Row]) -> str:
    """Return the table; what was not measured is a dash. Cells of fewer than all dense networks say of how many."""
    compressed = [row for row in rows if row["method"] != "dense"]
    ratios = sorted({row["ratio"] for row in compressed}, reverse=True)
    written = []
    for network in dict.fromkeys(row["network"] for row in rows):
        count = _networks([row for row in rows if (row["network"], row["method"]) == (network, "dense")])
        for after, told in AFTER.items():
            for method in METHODS:
                key = (network, method, after)
                own = [row for row in compressed if (row["network"], row["method"], row["recovery"]) == key]
                cells = [_cell([row for row in own if row["ratio"] == ratio], count) for ratio in ratios]
                if own:
                    written.append([network, f"{method}{told}", *cells])
    columns = ["network", "method", *(f"{ratio:.0%}" for ratio in ratios)]
    return table(columns, written, _note(rows), names=2)


def _cell(rows: Sequence[Row], count: int) -> str:
    """Return the figure of some rows, with the number of their dense networks if it is below ``count``."""
    if not rows:
        return figure([])
    digits = 3 if rows[0]["score"] == "loss" else 2
    diverged = any("problem" in row for row in rows)
    told = "diverged" if diverged else figure([row[row["score"]] for row in rows], digits)
    found = _networks(rows)
    return told if found >= count else f"{told} (n = {found})"


def _networks(rows: Sequence[Row]) -> int:
    return len({row["dense"] for row in rows})


def _note(rows: Sequence[Row]) -> str:
    """Return what the figures are, and those of the dense networks."""
    parts = []
    for network in dict.fromkeys(row["network"] for row in rows):
        own = [row for row in rows if row["network"] == network]
        dense = [row for row in own if row["method"] == "dense"]
        unit = {"accuracy": "test accuracy in percent", "perplexity": "perplexity per word", "loss": "loss"}
        devices = " and ".join(sorted({row["device"] for row in own}))
        count = _networks(dense)
        parts.append(f"{network}: {unit[own[0]['score']]}, dense {_cell(dense, count)}, n = {count}, {devices}")
    return f"Means and deviations over n dense networks; a cell of fewer has its own n. {'; '.join(parts)}."
