"""The package is one path: a stage imports from stages before it, files stay short, public names are documented."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import factorized as fz

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "factorized"
PATH = [
    "maths",
    "adapters",
    "planning",
    "layers",
    "decay",
    "optim",
    "deploy",
    "diagnostics",
    "vision text",
    "reproduce",
    "cli",
]
STAGE = {name: place for place, names in enumerate(PATH) for name in names.split()}
LONGEST = 300


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports_of(path: Path, root: Path) -> list[tuple[int, str]]:
    """Return (line, dotted module) of everything of this package that a file imports, wherever the statement stands."""
    found = []
    package = path.relative_to(root).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            # "from factorized import planning" names a folder, "from factorized import plan" a function
            found += [(node.lineno, f"{module}.{a.name}" if module == "factorized" else module) for a in node.names]
    return [(line, name) for line, name in found if name.split(".")[0] == "factorized"]


def place_of(module: str) -> int:
    """Return where on the path a module stands; the root of the package stands where the last stage it imports does."""
    stage = module.split(".")[1] if "." in module else ""
    if stage in STAGE:
        return STAGE[stage]
    return max(place_of(name) for _, name in imports_of(PACKAGE / "public.py", ROOT) if name.split(".")[1] in STAGE)


def backward_imports(path: Path, root: Path) -> list[str]:
    folder = path.relative_to(root).parts[1]
    if folder not in STAGE:  # a file at the root of the package: it may import everything
        return []
    return [
        f"{path.relative_to(root)}:{line} imports {module}"
        for line, module in imports_of(path, root)
        if ".".join(module.split(".")[:2]) not in (f"factorized.{folder}", "factorized.version")
        and place_of(module) >= STAGE[folder]
    ]


def test_a_stage_imports_only_from_stages_before_it() -> None:
    assert [wrong for path in sources("factorized") for wrong in backward_imports(path, ROOT)] == []


@pytest.mark.parametrize(
    ("folder", "statement", "is_wrong"),
    [
        ("layers", "from factorized.planning.plan import Plan", False),
        ("layers", "from factorized.layers.base import FactorizedLayer", False),
        ("layers", "from factorized.version import __version__", False),
        ("layers", "from .base import FactorizedLayer", False),
        ("text", "from factorized.deploy.compose import compose", False),
        ("planning", "from factorized.layers.base import FactorizedLayer", True),
        ("planning", "def f():\n    import factorized.layers.base", True),
        ("planning", "from ..layers import base", True),
        ("planning", "from factorized import layers", True),
        ("planning", "from factorized import plan", True),
        ("planning", "import factorized as fz", True),
        ("cli", "import factorized as fz", False),
        ("planning", "from . import budget", False),
        ("vision", "from factorized.text.translate import train", True),
        ("maths", "from factorized.version import __version__\nfrom factorized.cli import main", True),
    ],
)
def test_the_check_itself_sees_wrong_imports(tmp_path: Path, folder: str, statement: str, is_wrong: bool) -> None:
    path = tmp_path / "factorized" / folder / "some.py"
    path.parent.mkdir(parents=True)
    path.write_text(statement)
    assert bool(backward_imports(path, tmp_path)) == is_wrong


def test_every_folder_of_the_package_is_a_stage_of_the_path() -> None:
    folders = {path.parent.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*/*.py")}
    assert folders - set(STAGE) == set()


def test_no_file_is_longer_than_a_reader_can_take_in() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in sources("factorized", "tests", "benchmarks")}
    assert len(lengths) > 40
    assert {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > LONGEST} == {}


@pytest.mark.parametrize("name", [name for name in fz.__all__ if name != "__version__"])
def test_every_public_name_can_be_imported_has_a_docstring_and_is_on_the_tour(name: str) -> None:
    public = getattr(fz, name)
    assert "__doc__" in vars(public) or not isinstance(public, type)  # a docstring of its own, not its parent's
    assert len((public.__doc__ or "").strip().splitlines()[0]) > 20
    assert public.__module__.startswith("factorized.")
    tour = ROOT / "docs" / "path.md"
    assert tour.is_file(), "docs/path.md, the tour of the public names, is missing"
    assert re.search(rf"(fz\.|`){name}\b", tour.read_text())


def test_the_public_names_are_those_that_the_package_imports() -> None:
    statements = ast.walk(ast.parse((PACKAGE / "public.py").read_text()))
    imported = {alias.name for node in statements if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported == set(fz.__all__)
    assert len(fz.__all__) == len(set(fz.__all__))


def test_the_library_imports_only_packages_that_it_states_as_dependencies() -> None:
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    needed = {re.split(r"[<>=\[ ]", name)[0] for name in stated}
    library = PATH[: PATH.index("vision text")]
    found = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in sources(*(f"factorized/{stage}" for stage in library))
        for node in ast.walk(ast.parse(path.read_text()))
        for module in imported_by(node)
        if module not in {*needed, *sys.stdlib_module_names, "factorized", "__future__"}
    }
    # transformers inside fz.from_pretrained, which is given a class of it; Triton comes with torch on GPUs
    allowed = {"factorized/deploy/pretrained.py: transformers", "factorized/decay/kernels.py: triton"}
    assert found <= allowed
    assert "numpy" in needed  # tensors become bytes through it, and safetensors.torch imports it


def imported_by(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    return [(node.module or "").split(".")[0]] if isinstance(node, ast.ImportFrom) and not node.level else []


def test_importing_the_package_and_reading_attention_imports_nothing_but_torch_and_safetensors() -> None:
    heavy = ["transformers", "datasets", "ray", "typer", "matplotlib", "sklearn", "PIL", "accelerate"]
    code = (
        "import sys, torch, factorized as fz; attention = torch.nn.MultiheadAttention(8, 2);"
        "assert len(fz.forms(attention)) == 2; fz.factorize_attention(attention);"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.stdout.strip() == "[]", result.stderr
