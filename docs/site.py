"""Pages of the site that are made from other files: README, API, notebooks, the paper's tables, the report."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
STAGES = {
    "formats": "How a weight is held: the schemes to choose from.",
    "nn": "Layers, and how they run.",
    "attention": "Attention classes of your own.",
    "planning": "Which layers are factorized, at which ranks.",
    "surgery": "Changing models: factorize, cut, compose, lower.",
    "decay": "Penalties on products.",
    "optim": "LAMB, and LAMB with Frobenius decay.",
    "files": "Saving and loading.",
    "diagnostics": "Looking inside a model.",
    "integrations": "Adapters to other packages.",
}


TITLES = {"nn": "Layers", "optim": "Optimizers"}
BASES = {
    "formats": [
        f"::: factorized.formats.{home}\n    options:\n      heading_level: 3"
        for home in ("format.Format", "scheme.Scheme")
    ]
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages to those under docs/."""
    pages = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
    for path, source in pages.items():
        files.append(File.generated(config, path, content=from_the_root((ROOT / source).read_text())))
    for stage in STAGES:
        files.append(File.generated(config, f"api/{stage}.md", content=api_page(stage)))
    for notebook in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        page = notebook_page(json.loads(notebook.read_text()))
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=page))
    for path, content in report_files().items():
        files.append(File.generated(config, path, content=content))
    return files


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that would load something from elsewhere when it is viewed."""
    if loaded := elsewhere(output):
        raise PluginError(f"{page.file.src_uri} would load {', '.join(loaded)}; keep such files under docs/")
    return output


def elsewhere(html: str) -> list[str]:
    """Return the addresses of scripts, style sheets and images that are not on the site."""
    sources: list[str] = re.findall(r'<(?:script|img|iframe)\b[^>]*\ssrc="(https?:[^"]*)"', html)
    links = re.findall(r"<link\b[^>]*>", html)
    return sources + [
        url for link in links if "stylesheet" in link for url in re.findall(r'href="(https?:[^"]*)"', link)
    ]


def from_the_root(text: str) -> str:
    """Return a page of the repository's root with its links as they are on the site."""
    text = text.replace("](docs/", "](").replace("](CONTRIBUTING.md)", "](contributing.md)").replace(".ipynb)", ".md)")
    return re.sub(r"\[([^\]]*)\]\(LICENSE\)", r"\1", text)


def api_page(stage: str) -> str:
    """Return the page of a stage: its public names in their order, then what extensions are made of."""
    title = TITLES.get(stage, stage.capitalize())
    parts = [f"# {title}", STAGES[stage]]
    prefix = "fz.integrations" if stage == "integrations" else "fz"
    for name, home in public_names().items():
        if home.split(".")[1] == stage:
            parts.append(f"::: {home}.{name}\n    options:\n      heading: {prefix}.{name}\n      toc_label: {name}")
    if stage in BASES:
        parts += ["## Base classes", "For [formats of your own](../guide/extending.md).", *BASES[stage]]
    return "\n\n".join(parts) + "\n"


def public_names() -> dict[str, str]:
    """Return every public name with the module that defines it, in the order of ``fz.__all__``."""
    homes: dict[str, str] = {}
    for file in ("factorized/public.py", "factorized/integrations/__init__.py"):
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("factorized."):
                homes |= {alias.name: node.module for alias in node.names}
    order = re.findall(r'^    "(\w+)",$', (ROOT / "factorized/public.py").read_text(), flags=re.MULTILINE)
    return {name: homes[name] for name in dict.fromkeys([*order, *homes]) if name != "__version__"}


def notebook_page(notebook: dict[str, Any]) -> str:
    """Return a notebook as Markdown, with the text that its cells printed."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        printed = "".join("".join(output.get("text", ())) for output in cell["outputs"])
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def report_files() -> dict[str, str]:
    """Return the report of all runs under results/, and a page with the paper's tables beside ours."""
    sys.path.insert(0, str(ROOT))
    from factorized.experiments.reproduce.report import write_report

    with TemporaryDirectory() as folder:
        write_report([ROOT / "results"], Path(folder))
        report = (Path(folder) / "report.html").read_text()
        tables = [path.read_text() for path in sorted((Path(folder) / "tables").glob("table-*.md"))]
    head = (
        "# The paper's tables\n\nAs the paper prints them, with ours above each figure that we trained. "
        "[The report](report/report.html) has every run: curves, layers, hardware and versions. "
        "[Reproduce a table](reproduce.md) says how to train what is missing.\n"
    )
    return {"report/report.html": report, "paper_tables.md": "\n\n".join([head, *tables])}
