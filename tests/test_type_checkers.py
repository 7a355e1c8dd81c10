"""Type checkers and editors know the public names, and no others, from an editable install and from a wheel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import factorized as fz

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(sys.executable).parent
USE = """\
import factorized as fz
from torch import nn

class Net(nn.Sequential): ...

plan = fz.plan(Net(), fz.LowRank(), ratio=0.1)
reveal_type(plan)
reveal_type(fz.factorize(Net(), plan))
reveal_type(fz.integrations.FactorizeCallback())
fz.nothere
fz.integrations.nothere
"""
REVEALED = {7: "Plan", 8: "Net", 9: "FactorizeCallback"}  # by line
WRONG = {10, 11}


@pytest.fixture(scope="module", params=["editable", "wheel"])
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of a fresh environment with this package, which borrows all others from the present one."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    clone, environment = folder / "clone", folder / "environment"
    shutil.copytree(ROOT / "factorized", clone / "factorized")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (packages,) = environment.glob("lib/*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    made = environment / "bin" / "python"
    command = [str(made), "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--ignore-installed"]
    what = ["-e", str(clone)] if request.param == "editable" else [str(clone)]
    subprocess.run([*command, *what], capture_output=True, check=True, cwd=folder)
    assert (packages / "factorized").is_dir() == (request.param == "wheel")
    return made


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "uses_it.py").write_text(USE)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')  # as Pyright, not as its fork
    return tmp_path


def output_of(command: list[str], project: Path) -> str:
    """Run a checker, which exits with 1 where it finds something."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH")}
    return subprocess.run(command, capture_output=True, text=True, cwd=project, env=environment, check=False).stdout


@pytest.mark.nightly  # mypy reads torch's files
def test_mypy_knows_the_public_names_and_no_others(
    python: Path, project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache = tmp_path_factory.getbasetemp() / "mypy"  # of both installs: the other packages are the same
    checker = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "--cache-dir", str(cache)]
    *found, _ = output_of([*checker, "uses_it.py"], project).splitlines()
    kinds = [(int(line.split(":")[1]), line.split(":")[2].strip(), line) for line in found]
    assert {line: text.rpartition(".")[2].strip('"') for line, kind, text in kinds if kind == "note"} == REVEALED
    assert {line for line, kind, text in kinds if kind == "error" and 'no attribute "nothere"' in text} == WRONG
    assert len(kinds) == 5


@pytest.mark.nightly
def test_pyright_knows_the_public_names_and_no_others(python: Path, project: Path) -> None:
    checker = [str(SCRIPTS / "basedpyright"), "--pythonpath", str(python), "--outputjson"]
    found = json.loads(output_of([*checker, "uses_it.py"], project))["generalDiagnostics"]
    kinds = [(one["range"]["start"]["line"] + 1, one["severity"], one["message"]) for one in found]
    assert {line: text.split('"')[-2] for line, kind, text in kinds if kind == "information"} == REVEALED
    assert {line for line, kind, text in kinds if kind == "error" and text.startswith('"nothere"')} == WRONG


class Editor:
    """An editor that asks Pyright's language server which names may follow a dot."""

    def __init__(self, python: Path, project: Path) -> None:
        self.python, self.project, self.asked = python, project, 0
        command = [str(SCRIPTS / "basedpyright-langserver"), "--stdio"]
        self.server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        folder = {"uri": project.as_uri(), "name": project.name}
        can = {"workspace": {"configuration": True}}
        self.ask("initialize", processId=None, rootUri=project.as_uri(), workspaceFolders=[folder], capabilities=can)
        self.send(method="initialized", params={})

    def send(self, **message: Any) -> None:
        content = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self.server.stdin is not None
        self.server.stdin.write(b"Content-Length: %d\r\n\r\n" % len(content) + content)
        self.server.stdin.flush()

    def received(self) -> Iterator[dict[str, Any]]:
        assert self.server.stdout is not None
        for line in self.server.stdout:
            if line.startswith(b"Content-Length"):
                size = int(line.split(b":")[1])
            elif not line.strip():
                yield json.loads(self.server.stdout.read(size))

    def ask(self, method: str, **params: Any) -> Any:
        """Return the answer to a request, and answer what the server asks meanwhile: which Python is used."""
        self.asked += 1
        self.send(id=self.asked, method=method, params=params)
        for message in self.received():
            if "method" not in message and message.get("id") == self.asked:
                return message["result"]
            if "id" in message:
                items = message["params"].get("items", [])
                self.send(id=message["id"], result=[{"pythonPath": str(self.python)} for _ in items])
        raise AssertionError("the language server stopped")

    def names_after(self, text: str) -> set[str]:
        file = {"uri": (self.project / f"{self.asked}.py").as_uri()}
        opened = {**file, "languageId": "python", "version": 1, "text": text}
        self.send(method="textDocument/didOpen", params={"textDocument": opened})
        lines = text.split("\n")
        end = {"line": len(lines) - 1, "character": len(lines[-1])}
        answer = self.ask("textDocument/completion", textDocument=file, position=end)
        return {item["label"] for item in answer["items"] if not item["label"].startswith("__")}


@pytest.mark.nightly
def test_an_editor_completes_the_public_names(python: Path, project: Path) -> None:
    editor = Editor(python, project)
    try:
        public = {name for name in dir(fz) if not name.startswith("__")}
        assert editor.names_after("import factorized as fz\nfz.") == public
        assert editor.names_after("import factorized as fz\nfz.integrations.") == {*dir(fz.integrations)}
    finally:
        editor.server.kill()
        editor.server.communicate()


def test_an_editable_install_writes_a_path_that_type_checkers_follow(tmp_path: Path) -> None:
    clone, target = tmp_path / "clone", tmp_path / "installed"
    shutil.copytree(ROOT / "factorized", clone / "factorized")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(target), "-e", str(clone)], capture_output=True, check=True)
    (path_file,) = target.glob("*.pth")
    assert path_file.read_text().strip() == str(clone)
    assert (clone / "factorized" / "py.typed").is_file()
