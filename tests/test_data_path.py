"""The package is one path: a stage imports from stages before it, files stay short, public names are documented."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import factorized as fz
from factorized.formats.format import Format
from factorized.formats.scheme import Scheme
from factorized.nn.layer import FactorizedLayer

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "factorized"
PATH = [
    "formats",
    "nn",
    "attention",
    "planning",
    "surgery",
    "decay",
    "optim",
    "files",
    "diagnostics",
    "integrations",
    "experiments.data",
    "experiments.models",
    "experiments.recipes",
    "experiments.training",
    "experiments.text",
    "experiments.reproduce",
    "experiments.compress",
    "experiments.bench",
    "experiments.cli",
]
LIBRARY = [stage for stage in PATH if "." not in stage]
BESIDE = ("version", "_checks", "_torch")  # files that every stage may import, and that import nothing of ours
LONGEST = 400  # usually 100 to 300; above this it is two ideas


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def library() -> list[Path]:
    return [*sources(*(f"factorized/{stage}" for stage in LIBRARY)), *sorted(PACKAGE.glob("*.py"))]


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


def stage_of(module: str) -> str | None:
    """Return the stage that a dotted module is in; None for the root of the package and its files."""
    inside = module.partition(".")[2]
    return next((stage for stage in PATH if f"{inside}.".startswith(f"{stage}.")), None)


def place_of(module: str) -> int:
    """Return where on the path a module stands: -1 beside it, the end of the library for what holds its names."""
    stage = stage_of(module)
    if stage is not None:
        return PATH.index(stage)
    return -1 if module.removeprefix("factorized.") in BESIDE else len(LIBRARY) - 1


def backward_imports(path: Path, root: Path) -> list[str]:
    own = ".".join(path.relative_to(root).with_suffix("").parts)
    stage = stage_of(own)
    if stage is None and own.removeprefix("factorized.") not in BESIDE:  # public.py, testing.py: they import everything
        return []
    return [
        f"{path.relative_to(root)}:{line} imports {module}"
        for line, module in imports_of(path, root)
        if stage is None or (stage_of(module) != stage and place_of(module) >= PATH.index(stage))
    ]


def test_a_stage_imports_only_from_stages_before_it() -> None:
    assert [wrong for path in sources("factorized") for wrong in backward_imports(path, ROOT)] == []


@pytest.mark.parametrize(
    ("file", "statement", "is_wrong"),
    [
        ("surgery/some.py", "from factorized.planning.plan import Plan", False),
        ("surgery/some.py", "from factorized.nn.layer import FactorizedLayer", False),
        ("surgery/some.py", "from factorized.version import __version__", False),
        ("surgery/some.py", "from .replace import replace", False),
        ("formats/some.py", "from factorized._checks import check_whole", False),
        ("_checks.py", "from factorized.formats.format import Format", True),
        ("_checks.py", "from factorized._torch import computable", True),
        ("testing.py", "from factorized.surgery.factorize import factorize", False),
        ("formats/some.py", "from factorized.testing import check_format", True),
        ("planning/some.py", "from factorized.surgery.factorize import factorize", True),
        ("planning/some.py", "def f():\n    import factorized.surgery.factorize", True),
        ("planning/some.py", "from ..surgery import factorize", True),
        ("planning/some.py", "from factorized import surgery", True),
        ("planning/some.py", "from factorized import plan", True),
        ("planning/some.py", "import factorized as fz", True),
        ("planning/some.py", "from . import budget", False),
        ("files/some.py", "from factorized.experiments.data.images import Images", True),
        ("formats/some.py", "from factorized.version import __version__\nimport factorized.experiments.cli", True),
        ("experiments/cli/some.py", "import factorized as fz", False),
        ("experiments/cli/some.py", "from factorized.experiments.training.train import train", False),
        ("experiments/training/some.py", "from factorized.experiments.training.step import Step", False),
        ("experiments/training/some.py", "from factorized.experiments.reproduce.chart import chart", True),
        ("experiments/data/some.py", "from ..models.build import build_model", True),
    ],
)
def test_the_check_itself_sees_wrong_imports(tmp_path: Path, file: str, statement: str, is_wrong: bool) -> None:
    path = tmp_path / "factorized" / file
    path.parent.mkdir(parents=True)
    path.write_text(statement)
    assert bool(backward_imports(path, tmp_path)) == is_wrong


def test_every_folder_of_the_package_is_a_stage_of_the_path() -> None:
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in PACKAGE.rglob("*/*.py")}
    assert {name for name in folders if stage_of(name) is None} == {"factorized.experiments"}


def test_no_file_is_longer_than_a_reader_can_take_in() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in sources("factorized", "tests", "benchmarks")}
    assert len(lengths) > 40
    assert {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > LONGEST} == {}


def concrete(base: type) -> Iterator[type]:
    """Yield every class of ours below ``base`` that is not abstract."""
    for cls in base.__subclasses__():
        yield from concrete(cls)
        if cls.__module__.startswith("factorized.") and not getattr(cls, "__abstractmethods__", None):
            yield cls


def classes_asked_for(path: Path) -> list[str]:
    """Return the names of the classes that a file checks with ``isinstance``."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    asked = [c.args[1] for c in calls if isinstance(c.func, ast.Name) and c.func.id in ("isinstance", "issubclass")]
    return [node.id for kinds in asked for node in ast.walk(kinds) if isinstance(node, ast.Name)]


def test_private_functions_of_torch_are_called_in_one_file() -> None:
    assert [path.name for path in library() if "torch._C" in path.read_text()] == ["_torch.py"]


def test_only_the_file_of_a_format_a_scheme_or_a_layer_asks_for_its_class() -> None:
    homes = {
        cls.__name__: ROOT / f"{cls.__module__.replace('.', '/')}.py"
        for base in (Format, Scheme, FactorizedLayer)
        for cls in concrete(base)
    }
    assert len(homes) > 20
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources("factorized")
        for name in classes_asked_for(path)
        if homes.get(name, path) != path
    ]
    assert wrong == []


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
    found = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in library()
        for node in ast.walk(ast.parse(path.read_text()))
        for module in imported_by(node)
        if module not in {*needed, *sys.stdlib_module_names, "factorized", "__future__"}
    }
    # transformers inside fz.from_pretrained, which is given a class of it; Triton comes with torch on GPUs; tqdm draws
    # a bar where it is installed; an integration is imported by people who have its package; the contract is for
    # people who test
    allowed = {
        "factorized/files/pretrained.py: transformers",
        "factorized/decay/kernels.py: triton",
        "factorized/formats/launches.py: triton",
        "factorized/formats/thin_kernels.py: triton",
        "factorized/nn/few_rows_kernel.py: triton",
        "factorized/nn/one_row_kernel.py: triton",
        "factorized/nn/one_token_kernel.py: triton",
        "factorized/surgery/progress.py: tqdm",
        "factorized/integrations/lightning.py: lightning",
        "factorized/integrations/lightning.py: pytorch_lightning",
        "factorized/integrations/masks.py: transformers",
        "factorized/integrations/peft.py: peft",
        "factorized/integrations/transformers.py: transformers",
        "factorized/testing.py: pytest",
        "factorized/testing.py: onnxruntime",
    }
    assert found <= allowed
    assert "numpy" in needed  # tensors become bytes through it, and safetensors.torch imports it


def imported_by(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    return [(node.module or "").split(".")[0]] if isinstance(node, ast.ImportFrom) and not node.level else []


def test_the_library_works_without_the_application_and_without_packages_that_only_that_needs(tmp_path: Path) -> None:
    application = ["pydantic", "typer", "rich", "datasets", "sklearn", "PIL", "tensorboard", "matplotlib", "jinja2"]
    blocked = ["factorized.experiments", "transformers", "accelerate", "ray", "onnx", *application]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked}))\n"  # None makes an import fail
        "import torch, factorized as fz\n"
        "attention = torch.nn.MultiheadAttention(8, 2)\n"
        "assert len(fz.forms(attention)) == 2; fz.factorize_attention(attention)\n"
        "model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))\n"
        "plan = fz.plan(model, ratio=0.9, keep_first_and_last=False)\n"
        "fz.save(fz.factorize(model, plan), sys.argv[1]); print(plan.entries[0].format.name)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "saved")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.stdout.strip() == "product", result.stderr
    assert (tmp_path / "saved/plan.json").is_file()
