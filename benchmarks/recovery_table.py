"""The table of ``benchmarks.recovery``: the score by ratio, method and decay, of all files together."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.markdown import figure, table

Row = dict[str, Any]
METHODS = ("calibrated", "calibrated, sequential", "truncated SVD", "ASVD", "SVD-LLM", "pruning")
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
    """Return the table; what was not measured is a dash.

    Cells of fewer than all dense networks say of how many, and how far from those: dense networks of one architecture
    differ by more than the methods, so that figures of different ones do not compare.
    """
    compressed = [row for row in rows if row["method"] != "dense"]
    ratios = sorted({row["ratio"] for row in compressed}, reverse=True)
    written = []
    for network in dict.fromkeys(row["network"] for row in rows):
        dense = _dense([row for row in rows if row["network"] == network])
        for after, told in AFTER.items():
            for method in METHODS:
                key = (network, method, after)
                own = [row for row in compressed if (row["network"], row["method"], row["recovery"]) == key]
                cells = [_cell([row for row in own if row["ratio"] == ratio], dense) for ratio in ratios]
                if own:
                    written.append([network, f"{method}{told}", *cells])
    columns = ["network", "method", *(f"{ratio:.0%}" for ratio in ratios)]
    return table(columns, written, _note(rows), names=2)


def _cell(rows: Sequence[Row], dense: Mapping[str, float]) -> str:
    """Return the figure of some rows; of fewer than all dense networks with their number and the difference to them."""
    if not rows:
        return figure([])
    digits = 3 if rows[0]["score"] == "loss" else 2
    networks = {row["dense"] for row in rows}
    if any("problem" in row for row in rows):
        told, apart = "diverged", ""
    else:
        scores = [row[row["score"]] for row in rows]
        told = figure(scores, digits)
        apart = f", {mean(scores) - mean(dense[row['dense']] for row in rows):+,.{digits}f}"
    return told if len(networks) >= len(dense) else f"{told} (n = {len(networks)}{apart})"


def _dense(rows: Sequence[Row]) -> dict[str, float]:
    """Return the scores of the dense networks by their names."""
    return {row["dense"]: row[row["score"]] for row in rows if row["method"] == "dense"}


def _note(rows: Sequence[Row]) -> str:
    """Return what the figures are, and those of the dense networks."""
    parts = []
    for network in dict.fromkeys(row["network"] for row in rows):
        own = [row for row in rows if row["network"] == network]
        dense = _dense(own)
        told = figure([*dense.values()], 3 if own[0]["score"] == "loss" else 2)
        unit = {"accuracy": "test accuracy in percent", "perplexity": "perplexity per word", "loss": "loss"}
        devices = " and ".join(sorted({row["device"] for row in own}))
        parts.append(f"{network}: {unit[own[0]['score']]}, dense {told}, n = {len(dense)}, {devices}")
    return (
        "Means and deviations over n dense networks; a cell of fewer has its own n, and the difference to those dense "
        f"networks. {'; '.join(parts)}."
    )
