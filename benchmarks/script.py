"""What benchmark scripts share: the start of their command line, and the JSON file that they write."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from factorized.experiments.training.record import describe_machine


def parser_of(docstring: str | None) -> argparse.ArgumentParser:
    """Return a parser with ``--out``, whose help is the docstring of the script."""
    parser = argparse.ArgumentParser(description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    return parser


def write(out: Path, device: torch.device, rows: Sequence[object], **about: object) -> None:
    """Write rows to one JSON file, with the machine that they were measured on and what else is known of them."""
    report = {"machine": describe_machine(device), **about, "rows": rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
