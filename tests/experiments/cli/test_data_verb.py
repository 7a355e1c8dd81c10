"""``factorized data``."""

from __future__ import annotations

from pathlib import Path

import pytest

from factorized.experiments.data.load import load_images
from tests.experiments.cli.conftest import Cli


def test_a_set_is_prepared_once_with_its_checksum_and_then_listed(cli: Cli, npz: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sets"
    said = cli("data", "prepare", npz, "--folder", folder)
    checksum = load_images(str(npz)).checksum
    assert "128 training and 20 test images of 1×8×8, 10 classes" in said.out
    assert f"sha256 {checksum}\n" in said.out
    listed = cli("data", "ls", "--folder", folder).out
    row = next(line for line in listed.splitlines() if line.startswith("noise"))
    assert checksum[:12] in row
    assert "factorized data prepare cifar10" in listed
    assert "embedded, always ready" in listed


def test_a_narrow_terminal_shows_whole_words(
    cli: Cli, npz: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("data", "prepare", npz, "--folder", tmp_path / "sets")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    listed = " ".join(cli("data", "ls", "--folder", tmp_path / "sets").out.split())
    assert "not there: factorized data" in listed
    assert "sha256" not in listed


def test_the_folder_may_come_from_the_environment(
    cli: Cli, npz: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FACTORIZED_DATA", str(tmp_path / "there"))
    assert cli("data", "prepare", npz, "--name", "mine").code == 0
    assert (tmp_path / "there/mine.safetensors").is_file()


def test_an_unusable_file_is_listed_with_what_is_wrong(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    assert "unusable: " in cli("data", "ls", "--folder", tmp_path).out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", "cifer10"], "did you mean 'cifar10'?"),
        (["prepare", "."], "is not a data set"),
        (["ls", "--folder", "/no/such/folder"], "there is no folder /no/such/folder"),
        (["prepare"], "Missing argument"),
        (["prepare", "digits", "--name", "-1"], "name must be a plain name, without folder or ending"),
        (["prepare", "digits", "--name", "a:b"], "name must be a plain name, without folder or ending"),
    ],
)
def test_a_wrong_request_says_what_is_wrong(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in cli("data", *arguments).error
