"""``factorized results add``: results from elsewhere, if their recipe and data are ours."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from factorized.experiments.cli.main import main
from factorized.experiments.reproduce.runs import read_run
from factorized.experiments.text.corpus import corpus_checksum
from factorized.files.checksum import sealed
from tests.experiments.cli.conftest import Cli

NAME = "digits/resnet8-wide-fd"


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of a whole run, as far as its recipe says: its epochs were few, and its history is short."""
    out = tmp_path_factory.mktemp("elsewhere")
    assert main(["train", NAME, "--set", "schedule.epochs=1", "--out", str(out), "--quiet", "--device", "cpu"]) == 0
    path = out / NAME / "seed-0/result.json"
    change(path, lambda found: found["recipe"]["schedule"].update(epochs=12))
    return path


def change(path: Path, how: Any, *, seal: bool = True) -> None:
    found = json.loads(path.read_text())
    how(found)
    if seal:
        found = sealed({key: value for key, value in found.items() if key != "checksum"})
    path.write_text(json.dumps(found))


@pytest.fixture
def copy(result: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copy(result, Path("mine.json")))


def test_a_result_of_our_recipe_on_our_data_is_taken_in_once(cli: Cli, copy: Path) -> None:
    said = cli("results", "add", copy)
    assert (said.code, said.err) == (0, "")
    assert f"added as results/{NAME}/seed-0.json" in said.out
    assert Path(f"results/{NAME}/seed-0.json").read_bytes() == copy.read_bytes()
    again = cli("results", "add", copy)
    assert again.code == 1
    assert f"not added: results/{NAME}/seed-0.json already holds this run" in again.out


def test_a_result_without_a_checksum_of_an_older_version_is_taken_in(cli: Cli, copy: Path) -> None:
    def older(found: dict[str, Any]) -> None:
        del found["checksum"], found["recipe"]["factorize"]["min_size"], found["recipe"]["shortened_from"]

    change(copy, older, seal=False)
    assert cli("results", "add", copy).code == 0


@pytest.mark.parametrize("first", ["whole", "short"])
def test_a_shortened_result_is_kept_apart_from_the_whole_one(cli: Cli, copy: Path, first: str) -> None:
    def shorten(found: dict[str, Any]) -> None:
        found["recipe"] |= {"shortened_from": 12}
        found["recipe"]["schedule"]["epochs"] = 1

    other = Path(shutil.copy(copy, "short.json"))
    change(other, shorten)
    for one in (copy, other) if first == "whole" else (other, copy):
        assert cli("results", "add", one).code == 0
    (whole, short) = sorted(Path("results").rglob("*.json"), key=lambda path: len(path.parts))
    assert whole == Path(f"results/{NAME}/seed-0.json")
    assert (short.name, len(short.parts)) == ("seed-0.json", 5)
    assert [read_run(path).recipe["shortened_from"] for path in (whole, short)] == [None, 12]


@pytest.mark.parametrize(
    "how",
    [lambda r: r["recipe"]["optimizer"].update(lr=0.2), lambda r: r["data"].update(checksum="0" * 64)],
    ids=["recipe", "data"],
)
def test_a_run_of_an_older_recipe_or_on_other_data_keeps_its_place(cli: Cli, copy: Path, how: Any) -> None:
    there = Path(f"results/{NAME}/seed-0.json")
    there.parent.mkdir(parents=True)
    shutil.copy(copy, there)
    change(there, how)
    before = there.read_bytes()
    assert cli("results", "add", copy).code == 0
    assert there.read_bytes() == before
    (beside,) = there.parent.glob("*/seed-0.json")
    assert beside.read_bytes() == copy.read_bytes()
    assert f"{beside} already holds this run" in cli("results", "add", copy).out


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            lambda r: r["recipe"]["optimizer"].update(lr=0.2),
            "its optimizer.lr is 0.2, and digits/resnet8-wide-fd has 0.1",
        ),
        (lambda r: r["recipe"]["schedule"].update(epochs=3), "its schedule.epochs is 3, and .* has 12"),
        (lambda r: r["recipe"].update(name="digits/resnet9"), "there is no recipe 'digits/resnet9' .did you mean"),
        (
            lambda r: r["data"].update(checksum="0" * 64),
            "it was trained on other data: checksum 000000000000…, and those",
        ),
        (lambda r: r.pop("history"), "not the result of a run: it has no history"),
    ],
)
def test_a_result_that_does_not_fit_is_refused_with_the_reason(cli: Cli, copy: Path, how: Any, message: str) -> None:
    change(copy, how)
    before = copy.read_bytes()
    said = cli("results", "add", copy)
    assert said.code == 1
    assert said.out.startswith("mine.json: not added: ")
    assert re.search(message, said.out)
    assert not Path("results").exists()
    assert copy.read_bytes() == before


def test_a_damaged_or_corrupt_file_is_named_and_the_others_are_taken_in(cli: Cli, copy: Path) -> None:
    corrupt, damaged = Path("corrupt.json"), Path("damaged.json")
    corrupt.write_text("{")
    shutil.copy(copy, damaged)
    change(damaged, lambda found: found.update(accuracy=99.9), seal=False)
    said = cli("results", "add", corrupt, damaged, "missing.json", copy)
    assert said.code == 1
    assert "corrupt.json: not added: not valid JSON" in said.out
    assert "damaged.json: not added: damaged, or changed since it was written" in said.out
    assert "missing.json: not added: cannot be read: No such file" in said.out
    assert f"mine.json: added as results/{NAME}/seed-0.json" in said.out


def test_a_damaged_file_in_the_place_of_a_result_is_the_one_that_is_named(cli: Cli, copy: Path) -> None:
    there = Path(f"results/{NAME}/seed-0.json")
    there.parent.mkdir(parents=True)
    there.write_text("{")
    said = cli("results", "add", copy)
    assert said.code == 1
    words = f"mine.json: not added: {there} is there already, and is damaged (not valid JSON: .*); remove that file"
    assert re.search(words.replace("(", r"\(").replace(")", r"\)"), " ".join(said.out.split()))
    assert there.read_text() == "{"


def test_data_that_nothing_is_known_of_have_to_be_given(cli: Cli, copy: Path) -> None:
    from factorized.experiments.recipes.find import load_recipe

    def cifar(found: dict[str, Any]) -> None:
        found["recipe"] = load_recipe("cifar10/resnet32").to_dict()
        found["data"]["name"] = "cifar10"

    change(copy, cifar)
    said = cli("results", "add", copy)
    assert "no result on 'cifar10' is there to compare its data with; name your copy's folder by --data" in said.out
    other = Path("results/cifar10/resnet32/seed-1.json")
    other.parent.mkdir(parents=True)
    shutil.copy(copy, other)
    change(other, lambda found: found.update(seed=1))
    assert cli("results", "add", copy).code == 0
    change(other, lambda found: found["data"].update(checksum="1" * 64))
    shutil.copy(copy, "third.json")
    change(Path("third.json"), lambda found: found.update(seed=2))
    Path("results/cifar10/resnet32/seed-0.json").unlink()
    said = cli("results", "add", "third.json")
    assert "it was trained on other data" in said.out
    assert "those of results/cifar10/resnet32/seed-1.json have 111111111111…" in said.out


def test_a_run_with_other_settings_is_taken_in_beside_those_of_its_recipe_where_asked(cli: Cli, copy: Path) -> None:
    assert cli("results", "add", copy).code == 0

    def changed(found: dict[str, Any]) -> None:
        found["recipe"]["optimizer"]["lr"] = 0.2
        found["recipe"]["run"]["evaluate_every"] = 2  # has no effect on what is learned

    change(copy, changed)
    assert "--changed adds it beside those of that recipe" in cli("results", "add", copy).out
    assert cli("results", "add", copy, "--changed").code == 0
    there = Path(f"results/{NAME}+optimizer.lr=0.2/seed-0.json")
    found = read_run(there).result  # whose checksum fits
    assert found.pop("changes") == ["optimizer.lr=0.2"]
    assert found == read_run(copy).result
    assert "already holds this run" in cli("results", "add", copy, "--changed").out


@pytest.mark.parametrize("options", [(), ("--changed",)])
def test_a_recipe_that_cannot_be_read_is_refused(cli: Cli, copy: Path, options: tuple[str, ...]) -> None:
    change(copy, lambda found: found["recipe"]["optimizer"].update(rl=0.2))
    said = cli("results", "add", copy, *options)
    assert (said.code, Path("results").exists()) == (1, False)
    assert "mine.json: not added: its recipe: there is no field 'optimizer.rl' (did you mean 'lr'" in said.out


def test_a_note_is_kept_with_the_result_and_its_seconds_do_not_count(cli: Cli, copy: Path) -> None:
    assert cli("results", "add", copy, "--note", "two runs shared the GPU").code == 0
    run = read_run(Path(f"results/{NAME}/seed-0.json"))
    assert (run.result["note"], run.timed) == ("two runs shared the GPU", False)


def test_a_result_that_names_a_place_on_one_machine_is_refused(cli: Cli, copy: Path) -> None:
    change(copy, lambda found: found["data"].update(name="/home/me/digits"))
    said = cli("results", "add", copy)
    assert "it names /home/me/digits, which is on one machine only; train it with relative names" in said.out


@pytest.mark.parametrize(
    ("folder", "code"),
    [
        ("bert/small/seed-0", 0),
        ("/somewhere/out/bert/small-0a1b2c3d/seed-0", 0),
        ("out/bert/small/seed-1", 1),
        ("out/bert/small-flambe/seed-0", 1),
    ],
)
def test_a_result_that_goes_on_from_a_run_of_the_right_recipe_and_seed_is_taken_in(
    cli: Cli, copy: Path, folder: str, code: int
) -> None:
    from factorized.experiments.recipes.find import load_any_recipe
    from tests.experiments.text.small_squad import write_squad

    recipe = load_any_recipe("squad/bert-small").to_dict()
    recipe["model"]["from_run"] = folder

    def fine_tuned(found: dict[str, Any]) -> None:
        found |= {"recipe": recipe, "task": "questions", "score": "f1", "scores": {"f1": 50.0}, "seed": 0}
        found["data"] = {"name": "squad-sample", "checksum": checksum}

    data = write_squad(Path("squad"))
    (data / "train.json").rename(data / "train-sample.json")
    checksum = corpus_checksum(load_any_recipe("squad/bert-small"), data)  # type: ignore[arg-type]
    change(copy, fine_tuned)
    said = cli("results", "add", copy, "--data", data)
    assert said.code == code, said
    if code:
        assert f"its model.from_run is {'/'.join(Path(folder).parts[-3:])!r}, and squad/bert-small has" in said.out
