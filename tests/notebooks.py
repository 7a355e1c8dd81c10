"""Runs the notebooks under docs/notebooks without Jupyter; ``python -m tests.notebooks`` stores what they print."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def run(notebook: dict[str, Any]) -> list[str]:
    """Run the cells in order, as a kernel would, and return what each one prints; the last expression is shown."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "code":
            continue
        *body, last = ast.parse("".join(cell["source"])).body
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(ast.Module(body, []), f"cell {number}", "exec"), scope)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), scope)
                print(*([] if value is None else [value]), end="" if value is None else "\n")
            else:
                exec(compile(ast.Module([last], []), f"cell {number}", "exec"), scope)
        printed.append(said.getvalue())
    return printed


def fill(path: Path) -> None:
    """Run a notebook in an empty folder and store the output of every cell in its file."""
    notebook = json.loads(path.read_text())
    here = Path.cwd()
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            printed = iter(run(notebook))
        finally:
            os.chdir(here)
    for count, cell in enumerate([c for c in notebook["cells"] if c["cell_type"] == "code"], start=1):
        text = next(printed)
        stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell["outputs"], cell["execution_count"] = [stream] if text else [], count
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    for path in NOTEBOOKS:
        fill(path)
